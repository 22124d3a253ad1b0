"""Which room may import which."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
# rooms and the five files: each may import itself and those before it
ORDER = "formats runtime fast data bert adapter fusion train experiments examples".split()
ORDER += ["results"]
FILES = [path.relative_to(ROOT) for path in [*ROOT.glob("*.py"), *ROOT.glob("[!.]*/*.py")]]
TESTS = [path for path in FILES if path.parent.name == "tests"]
FILES = [path for path in FILES if path.parent.name not in ("tests", "docs")]


def test_imports_point_down():
    """Also those inside functions."""
    names = [path.stem for path in TESTS]
    for path in FILES:
        above = ORDER[ORDER.index(path.parts[0].removesuffix(".py")) + 1 :]
        text = (ROOT / path).read_text("utf-8")
        rooms = re.findall(r"^ *(?:from|import) (\.|\w+)", text, re.MULTILINE)
        assert not {*rooms} & {*above, *names, "."}, path
