"""experiments.composition and the demo on it: what they print and write is what their runs say."""

import hashlib
import math
import random
import sys
from unittest.mock import patch

import pandas as pd
import pytest

import fake_grid
import train
from conftest import cli, thorough
from data import load_split
from experiments import composition, demo, grid, skills
from experiments.load_run import load_run
from formats.files import read_json
from fusion import FUSIONS

DOCSTRINGS = {
    library: [
        (f"{name}_{i}", [f"The {name} {i} of {library} says a {word} and runs."])
        for i in range(60)
        for name, word in (("cat", "red"), ("dog", "blue"))
    ]
    for library in ("std", "numpy", "torch")
}


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """The runs of a grid, one after another."""
    monkeypatch.setattr(grid, "run", fake_grid.run_here)
    monkeypatch.delitem(sys.modules, "examples.mean_fusion", raising=False)  # --import runs it
    with patch.dict(FUSIONS):
        yield


def test_every_control_beside_the_fusion(runs, encoder, data_dir, tmp_path, capsys):
    out = tmp_path / "out"
    words = cli("--target rte --seeds 0 1", model=encoder, data_dir=data_dir, out=out)
    words += cli("--train-examples 48", sources=["sst2", runs / "pick"])
    words += ["--fusion-options", "--fusion attention"]  # the control's is still mean
    composition.main([*words, "--", *cli("--device cpu --epochs 1 --lr 5e-3")])
    printed = capsys.readouterr().out
    lines = [" ".join(line.replace("|", " ").split()) for line in printed.splitlines()]

    rows = pd.read_csv(out / "composition.csv")
    names = "head head_on_sst2 head_on_pick own full mean mean_with_own fusion fusion_with_own "
    names += "fusion_of_own fusion_without_sst2 fusion_without_pick"
    assert [*dict.fromkeys(rows["system"])] == names.split() and len(rows) == 2 * 12
    for row in rows.itertuples():
        run = out / "runs" / f"{row.system}-48-{row.seed}"
        options = read_json(run / "run.json")["options"]
        assert row.accuracy == read_json(run / "metrics.json")["accuracy"]
        assert options["limit_train"] == row.train_examples == 48 and options["seed"] == row.seed
        if row.system.startswith(("fusion", "mean")):
            fused = [f"own-48-{row.seed}", "source-sst2"]
            fused = [str(out / "runs" / name) for name in fused] + [str(runs / "pick")]
            copies = [read_json(path)["options"]["out"] for path in run.glob("adapters/*/run.json")]
            assert {*copies} <= {*fused} and len(copies) == len(options["adapters"])
            assert options["fusion"] == ("mean" if "mean" in row.system else "attention")
    points = rows.pivot(index="seed", columns="system", values="accuracy") * 100
    for system in names.split():
        if system != "fusion":
            gain = points["fusion"] - points[system]
            values = ", ".join(f"{value:.1f}" for value in points[system])
            mean = f"{points[system].mean():.2f} ± {points[system].std():.2f}"
            numbers = f"{values} {mean} {gain.mean():.2f} {gain.min():.2f}"
            assert any(line.endswith(numbers) for line in lines)


def test_what_is_left_over(runs, encoder, data_dir, tmp_path, capsys):
    """--test asks every run for what it was not trained on."""
    out, words = tmp_path / "out", cli("--target rte --systems fusion --train-examples 24 48")
    words += cli("--test", model=encoder, data_dir=data_dir, out=out)
    words += ["--sources", str(runs / "rte"), "sst2"]
    with pytest.raises(ValueError, match="two adapters would be called 'rte'"):
        composition.main(words)
    words[-2] = f"other={runs / 'rte'}"
    for size, message in ((96, "--test needs --train-examples below 96"), (97, "rte has only 96")):
        with pytest.raises(ValueError, match=message):
            composition.main([str(size) if word == "48" else word for word in words])
    with pytest.raises(ValueError, match="--limit-train does not belong behind --"):
        composition.main([*words, *cli("-- --limit-train 7")])
    composition.main([*words, "--", *cli("--device cpu --epochs 1")])
    printed = capsys.readouterr().out
    assert "WARNING: fusion-24-0: other was TRAINED on 100% of them" in printed
    rows = pd.read_csv(out / "composition.csv")
    assert [*rows["train_examples"]] == [24, 48]
    for row in rows.itertuples():
        run = load_run(out / "runs" / f"fusion-{row.train_examples}-0")
        task = train.find_task(run.args, "rte")
        drawn = load_split(task, "train", run.tokenizer, row.train_examples, row.seed)
        every, drawn, left = (
            {example.hash for example in split}
            for split in (run.split("train"), drawn, run.left_over())
        )
        assert left == every - drawn and len(left) == 96 - row.train_examples
        found = train.evaluate(run.model, run.task, run.left_over(), run.args)
        assert row.test_accuracy == found["accuracy"]


def test_a_target_from_a_file(runs, encoder, data_dir, tmp_path, refused):
    """All options of train.py reach the target, and what is held out of its file is not counted."""
    rows, file = (data_dir / "rte" / "train.jsonl").read_text(), tmp_path / "mine.jsonl"
    file.write_text(rows.replace("sentence1", "question").replace("sentence2", "answer"))
    words = cli("--target mine --systems fusion", model=encoder, out=tmp_path / "out")
    behind = cli("-- --device cpu --epochs 1 --dev-fraction 0.25", train_file=file)
    behind += ["--columns", "text_a=question", "text_b=answer"]
    named = [f"ours={runs / 'rte'}", str(runs / "pick")]
    tasks = [*words, *cli(sources=[named[0], "sst2"], data_dir=data_dir), *behind]
    text = "--train-file is of mine, sst2 would be trained on it, too"
    refused(tasks, text, name="composition", main=composition.main)
    composition.main([*words, *cli(sources=named), *behind])
    assert pd.read_csv(tmp_path / "out" / "composition.csv")["train_examples"].tolist() == [72]
    run = read_json(tmp_path / "out" / "runs" / "fusion-0" / "run.json")
    assert run["tasks"]["mine"]["columns"] == ["text_a", "text_b"] and run["train_examples"] == 72
    assert [*run["options"]["adapters"]] == ["ours", "pick"]


def test_what_the_development_set_chooses():
    """Among heads, own, the fusion, and the fusion with own; other systems are no choice."""
    accuracies = {"own": (0.5, 0.8), "head_on_a": (0.6, 0.6), "fusion": (0.6, 0.7), "full": (1, 1)}
    rows = [
        (system, seed, accuracy, 1 - accuracy, 100)
        for system, both in accuracies.items()
        for seed, accuracy in enumerate(both)
    ]
    names = ["system", "seed", "accuracy", "test_accuracy", "dev_examples"]
    (first, second), header = composition.choices(pd.DataFrame(rows, columns=names))
    assert first[:3] == ["0", "new head on a", "fusion of the sources"]  # ties keep the order
    assert first[3:] == pytest.approx([0, math.sqrt(48), 40, 0])
    assert second[:3] == ["1", "the target's own adapter", "fusion of the sources"]
    assert second[3:] == pytest.approx([10, math.sqrt(16 + 21), 20, -10])
    assert len(header) == len(first)


def test_the_tasks_of_the_demo_are_always_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(skills, "docstrings", lambda library: DOCSTRINGS[library])
    skills.build_tasks(tmp_path, random.Random(0), demo.SKILLS)
    written = b"".join(path.read_bytes() for path in sorted(tmp_path.glob("*/*.jsonl")))
    assert hashlib.sha256(written).hexdigest()[:16] == "358c76d911e6a965"


@thorough
def test_the_demo(encoder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(skills, "docstrings", lambda library: DOCSTRINGS[library])
    monkeypatch.setattr(demo, "find_minilm", lambda: encoder)
    monkeypatch.setattr(skills, "SIZES", {"source": (24, 12), "target": (240, 12)})
    monkeypatch.setattr(demo, "OPTIONS", {"adapter": "--epochs 1", "fusion": "--epochs 1"})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "minilm").symlink_to(encoder)
    demo.main(["--out", "demo"])
    printed = " ".join(capsys.readouterr().out.split())
    for system in demo.SYSTEMS:
        runs = [f"demo/runs/{system}-240-{seed}" for seed in (0, 1, 2)]
        each = [100 * read_json(f"{run}/metrics.json")["accuracy"] for run in runs]
        assert ", ".join(f"{value:.1f}" for value in each) in printed
