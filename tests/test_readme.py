"""What the README says of the code is true."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_equation_points_at_a_line_that_is_there():
    rows = re.findall(r"\| `(\w+\.py)`: `(.+)` \|", README)
    assert len(rows) >= 10
    for file, line in rows:
        assert line in (ROOT / file).read_text(encoding="utf-8"), f"{line} is no longer in {file}"


def test_line_counts():
    for file, count in re.findall(r"\| `(\w+\.py)` \| .* \| ([\d,]+) \|", README):
        actual = len((ROOT / file).read_text(encoding="utf-8").splitlines())
        assert abs(int(count.replace(",", "")) - actual) <= 0.1 * actual, (
            f"{file} has {actual} lines"
        )


def test_every_option_in_the_readme_exists():
    import train

    known = {"--stage", "--task", "--help"} | set(
        re.findall(r"--[a-z-]+", (ROOT / "train.py").read_text())
    )
    commands = re.findall(r"python train\.py (.+)", README)
    assert commands
    for option in re.findall(r"--[a-z-]+", " ".join(commands)):
        assert option in known, option
    assert train.STAGES["adapter"] == (1e-4, 30) and train.STAGES["fusion"] == (5e-5, 10)
