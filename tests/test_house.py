"""Which room may import which: imports point down only."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FIVE = ["bert", "adapter", "fusion", "data", "train"]
BELOW = ["formats", "runtime"]
ALL = [*BELOW, *FIVE, "variants", "experiments", "examples"]
MAY_IMPORT = {  # a room or one of the five files, and what of the house it may import
    "formats": ["formats"],
    "runtime": BELOW,
    "bert": BELOW,
    "adapter": [*BELOW, "bert"],
    "fusion": [*BELOW, "bert", "adapter"],
    "data": BELOW,
    "variants": [*BELOW, "bert", "adapter", "fusion", "data", "variants"],
    "train": [*BELOW, "bert", "adapter", "fusion", "data", "variants"],
    "experiments": ALL,
    "examples": ALL,
}
PATHS = [path for name in MAY_IMPORT for path in (ROOT / name).glob("*.py")]
PATHS += [ROOT / f"{name}.py" for name in FIVE]
FILES = {  # "runtime.run": its syntax tree
    ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text("utf-8"))
    for path in PATHS
}


def room(module):
    return module.split(".")[0]


def imports(module):
    """Every module that a file may load, also inside functions."""
    for node in ast.walk(FILES[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: a relative import"
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def test_every_room_is_read():
    files = {*ROOT.glob("*.py"), *ROOT.glob("[!.]*/*.py")}
    assert {path for path in files if path.parent.name not in ("tests", "docs")} == {*PATHS}


@pytest.mark.parametrize("module", FILES)
def test_imports_point_down(module):
    tests = {path.stem for path in (ROOT / "tests").glob("*.py")}
    above = {*MAY_IMPORT, *tests} - {*MAY_IMPORT[room(module)]}
    found = {name for name in imports(module) if room(name) in above}
    assert not found, found


def test_help_loads_only_what_it_must():
    """Whoever asks `python train.py --help` waits for no library of the experiments or the hub."""
    words = [sys.executable, "-X", "importtime", "train.py", "--help"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "--reduction-factor" in done.stdout, done.stderr[-2000:]
    loaded = {line.split()[-1].split(".")[0] for line in done.stderr.splitlines()}
    needless = "experiments examples matplotlib PIL transformers adapters pytest datasets pandas"
    assert "torch" in loaded and not loaded & {*needless.split(), "pyarrow", "huggingface_hub"}
