"""README.md and docs/: commands are understood by the programs that they name, links lead
somewhere, tables are those of the files in results/, and the notebook is that of its source."""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import fill_hub_cache, thorough, write_rows
from data import TASKS
from experiments import pages
from runtime import settings

ROOT = Path(__file__).parent.parent
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in FILES}
WALKTHROUGH = (ROOT / "docs" / "walkthrough.py").read_text(encoding="utf-8")


def commands(text):
    """Every `python ...` in the code of a page, as a list of words."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    code = re.findall(r"```\n(.*?)```", text, re.DOTALL)
    code += re.findall(r"`([^`]+)`", re.sub(r"(?<!\n)\n(?!\n)", " ", prose))
    values = dict(re.findall(r'^(\w+)="(.+)"$', "\n".join(code), re.MULTILINE))
    program = r"(?:do |srun |\$ )?(?:python|torchrun .*?) (?=train\.py|-m (?:experiments|examples))"
    for block in code:
        block = re.sub(r"\s*\\\n\s*", " ", block)  # a command over several lines
        for name, value in values.items():
            block = block.replace(f"${name}", value)
        block = re.sub(r"\$\{\w+\[.*?\]\}|\$[a-z]\w*", "rte", block)  # other variables of the shell
        block = re.sub(r"\$SLURM_\w+", "0", block)
        for command in re.split(r"; | && | \| |\n", block):
            if found := re.match(program, command):
                yield shlex.split(command[found.end() :], comments=True)


class Understood(BaseException):
    """Raised in place of everything that follows the parser."""


def understand(words):
    """Ends in Understood, or in another exception for words that the program refuses."""
    module, *words = words[1:] if words[0] == "-m" else words
    words = [word.removesuffix("...") for word in words if word != "..."]
    if "--" in words:  # what follows goes to every train.py
        end = words.index("--")
        with pytest.raises(Understood):
            understand([*"train.py --stage head --task rte".split(), *words[end + 1 :]])
        words = words[:end]
    importlib.import_module(module.removesuffix(".py")).main(words)


FOUND = sorted({(page, shlex.join(words)) for page in PAGES for words in commands(PAGES[page])})
assert len(FOUND) > 40


@pytest.mark.parametrize("page, words", FOUND, ids=lambda text: text[:80])
def test_every_command_is_understood(page, words, monkeypatch):
    check_values = settings.check_values

    def check_and_stop(options):
        check_values(options)
        raise Understood

    monkeypatch.setattr(settings, "check_values", check_and_stop)
    with pytest.raises(SystemExit if "--help" in words else Understood):
        understand(shlex.split(words))


FOLLOWED = "README.md docs/tasks.md docs/after_training.md docs/adapterhub.md docs/forking.md"


def write_what_the_pages_presuppose(place, encoder):
    """BERT-base in the hub's cache, the GLUE tasks, and the files that the pages speak of."""
    fill_hub_cache(place / "hub" / "models--google-bert--bert-base-uncased", encoder)
    for task in "mnli qqp sst2 mrpc rte cb".split():
        texts = ["the cat sleeps and sleeps", "red dog runs"]
        rows = [dict.fromkeys(TASKS[task].columns, texts[i % 2]) for i in range(2000)]
        rows = [{**row, "label": i % 2} for i, row in enumerate(rows)]
        for split, n in (("train", 2000), ("validation", 100), ("test", 100)):
            write_rows(place / "DIR" / task / f"{split}.jsonl", rows[:n])
    (place / "reviews.csv").write_text("review,stars\n" + "good film,1\nbad film,2\n" * 20)
    shutil.copy(place / "DIR" / "rte" / "validation.jsonl", place / "rows.jsonl")
    (place / "DIRECTORY_OR_HUB_ID").symlink_to(encoder)
    (place / "data").symlink_to(place / "DIR")
    for path in [*ROOT.glob("*.py"), *ROOT.glob("[!.]*/")]:
        if path.name != "runs":
            (place / path.name).symlink_to(path)


@thorough
def test_blocks_run_as_printed(encoder, tmp_path):
    """Every command and Python program of the pages that a user follows, in the order printed, in
    one directory. Left out are make, the environment, the command for the hub."""
    write_what_the_pages_presuppose(tmp_path, encoder)
    places = {"HF_HUB_CACHE": tmp_path / "hub", "ADAPTERFUSION_DATA_DIR": tmp_path / "DIR"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **places, "PATH": path, "MPLBACKEND": "agg"}

    def run(*words):
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{words[-1]}{done.stderr[-2000:]}"

    fusion_cb = "python train.py --stage fusion --task cb --adapters runs/mnli runs/rte\n"
    for page in FOLLOWED.split():
        for block in re.findall(r"^```\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE):
            if re.match(r"python|for |mkdir", block) and "--adapters paper" not in block:
                run("bash", "-ec", fusion_cb * ("runs/fusion-cb" in block) + block)
    for page in ("README.md", "docs/python.md"):
        run("python", "-c", "".join(re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL)))


def anchor(heading):
    """As GitHub makes it of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", [*PAGES, "docs/walkthrough.py"])
def test_every_link_leads_somewhere(page):
    """So does every line of code that the README's table names."""
    text = PAGES.get(page, WALKTHROUGH)
    links = re.findall(r"\]\((?!https?:)([^)\s]+)\)|(?:src|href)=\"(?!https?:)([^\"]+)\"", text)
    for link in (a or b for a, b in links):
        file, _, place = link.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), link
        if place:
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert place in map(anchor, headings), link
    for file, line in re.findall(r"\| `(\w+\.py)`: `(.+)` \|", text):
        assert line in (ROOT / file).read_text(encoding="utf-8"), line


def test_every_table_is_that_of_its_file():
    assert pages.table("readme").replace(" --- ", "---") in PAGES["README.md"]
    tables = re.findall(r"<!-- table: (\w+) -->\n((?:\|.*\n)*)", PAGES["docs/results.md"])
    assert len(tables) == 9
    for name, text in tables:
        assert text == pages.table(name), name
    values = pages.read("benchmarks").groupby("row")["value"].agg(set)
    for line in re.findall(r"^\| (?!---|row[ ,]).*", PAGES["docs/benchmarks.md"], re.MULTILINE):
        name, *found = (cell.strip() for cell in line.strip("|").split("|"))
        assert {*found} - {"", "–"} <= values[name], line


def test_the_notebook_is_that_of_its_source():
    """Cell for cell, but for the marks of comments."""

    def plain(text):
        return re.sub(r"^(# ?)*", "", text.strip(), flags=re.MULTILINE)

    cells = json.loads((ROOT / "docs" / "walkthrough.ipynb").read_text(encoding="utf-8"))["cells"]
    source = re.split(r"^# %%.*\n", WALKTHROUGH, flags=re.MULTILINE)[1:]
    found = [plain("".join(cell["source"])) for cell in cells]
    assert found == [*map(plain, source)], "make walkthrough, see the Makefile"
