"""How large the house may be, and which room may import which.

"Minimal" is this project's first word, and each line that was added had a good reason. So whoever
adds what is worth it raises a number here, and says why in the commit.
"""

import ast
import re
from pathlib import Path

import pytest

import train

ROOT = Path(__file__).parent.parent
# rooms and the five files: each may import itself and those before it
ORDER = "formats runtime fast data bert adapter fusion train experiments examples".split()
ORDER += ["results"]
FILES = [path.relative_to(ROOT) for path in [*ROOT.glob("*.py"), *ROOT.glob("[!.]*/*.py")]]
TESTS = [path for path in FILES if path.parent.name == "tests"]
FILES = [path for path in FILES if path.parent.name not in ("tests", "docs")]
FIVE = [path for path in FILES if path.parent == Path(".")]
PAGES = ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


def lines(paths):
    return sum(len((ROOT / path).read_text("utf-8").splitlines()) for path in paths)


def room(name):
    return [path for path in FILES if path.parent.name == name]


def words(paths):
    return sum(len((ROOT / path).read_text("utf-8").split()) for path in paths)


@pytest.mark.parametrize(
    "what, found, most",
    [
        ("lines of the five files", lines(FIVE), 1625),
        ("lines around them", lines({*FILES, *ROOT.glob("results/*.sh")} - {*FIVE}), 4530),
        ("lines of formats", lines(room("formats")), 1045),
        ("lines of runtime", lines(room("runtime")), 970),
        ("lines of tests", lines(TESTS), 4090),
        ("lines of experiments", lines([*room("experiments"), *room("examples")]), 2340),
        ("lines of README.md", lines(["README.md"]), 90),
        ("lines of results.md", lines(["docs/results.md"]), 80),
        ("lines of the walkthrough", lines(["docs/walkthrough.py"]), 410),
        ("words of the pages", words([*PAGES, "results/README.md"]), 8_000),
        ("words of the walkthrough", words(["docs/walkthrough.py"]), 2800),
        ("pages in docs", len(PAGES) - 1, 8),
        ("options of train.py", len(train.make_parser()._actions) - 1, 32),  # one is --help
    ],
)
def test_it_stays_small(what, found, most):
    assert found <= most, what


def test_no_function_has_more_than_six_parameters():
    for path in FILES:
        for node in ast.walk(ast.parse((ROOT / path).read_text("utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.Lambda)):
                names = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
                names = [n for n in [*names, *(a.arg for a in node.args.kwonlyargs)] if n != "self"]
                assert len(names) <= 6, (path, node.lineno, names)


def test_imports_point_down():
    """Also those inside functions."""
    names = [path.stem for path in TESTS]
    for path in FILES:
        above = ORDER[ORDER.index(path.parts[0].removesuffix(".py")) + 1 :]
        text = (ROOT / path).read_text("utf-8")
        rooms = re.findall(r"^ *(?:from|import) (\.|\w+)", text, re.MULTILINE)
        assert not {*rooms} & {*above, *names, "."}, path
