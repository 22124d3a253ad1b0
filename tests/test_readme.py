"""README.md and docs/: commands are understood by the programs that they name, links lead
somewhere, and quoted lines of code are there."""

import argparse
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

ROOT = Path(__file__).parent.parent
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in FILES}
README = PAGES["README.md"]
WALKTHROUGH = (ROOT / "docs" / "walkthrough.py").read_text(encoding="utf-8")


# --------------------------------------------------------------------------------------------------
# Commands


def commands(text):
    """Every `python ...` in the code of a page, as a list of words."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    code = re.findall(r"```\n(.*?)```", text, re.DOTALL)
    code += re.findall(r"`([^`]+)`", re.sub(r"(?<!\n)\n(?!\n)", " ", prose))
    values = dict(re.findall(r'^(\w+)="(.+)"$', "\n".join(code), re.MULTILINE))
    for block in code:
        block = re.sub(r"\s*\\\n\s*", " ", block)  # a command over several lines
        for name, value in values.items():
            block = block.replace(f"${name}", value)
        block = re.sub(r"\$\{\w+\[.*?\]\}|\$[a-z]\w*", "rte", block)  # other variables of the shell
        block = re.sub(r"\$SLURM_\w+", "0", block)
        for command in re.split(r"; | && | \| |\n", block):
            start = r"(?:do |srun |\$ )?(?:python|torchrun .*?) (?=train\.py|-m \w)"
            if found := re.match(start, command):
                yield shlex.split(command[found.end() :], comments=True)


class Understood(BaseException):
    """Raised in place of everything that follows the parser."""


def understand(words, monkeypatch):
    """Ends in Understood, or in another exception for words that the program refuses."""
    module, *words = words[1:] if words[0] == "-m" else words
    module = importlib.import_module(module.removesuffix(".py"))
    words = [word.removesuffix("...") for word in words if word != "..."]
    if "--" in words:  # what follows goes to every train.py
        rest = words[words.index("--") + 1 :]
        with pytest.raises(Understood):
            understand(["train.py", "--stage", "head", "--task", "rte", *rest], monkeypatch)
        words = words[: words.index("--")]

    def parse_and_stop(*values):
        parse(*values)
        raise Understood

    parse = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(sys, "argv", ["program", *words])
    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        patch.setattr(argparse.ArgumentParser, "parse_intermixed_args", parse_and_stop)
        module.main()


FOUND = sorted({(page, shlex.join(words)) for page in PAGES for words in commands(PAGES[page])})
INSTALLED = "-m experiments", "-m examples", "train.py"
assert len(FOUND) > 40


@pytest.mark.parametrize("page, words", FOUND, ids=lambda text: text[:80])
def test_every_command_is_understood(page, words, monkeypatch):
    if words.startswith(INSTALLED):
        with pytest.raises(SystemExit if "--help" in words else Understood):
            understand(shlex.split(words), monkeypatch)


FOLLOWED = "README.md docs/tasks.md docs/after_training.md docs/adapterhub.md docs/forking.md"


def write_what_the_pages_presuppose(place, encoder):
    """BERT-base in the hub's cache, the GLUE tasks, and the files that the pages speak of."""
    fill_hub_cache(place / "hub" / "models--google-bert--bert-base-uncased", encoder)
    for task in "mnli qqp sst2 mrpc rte cb".split():
        rows = []
        for i in range(2000):
            text = ["the cat sleeps and sleeps", "red dog runs"][i % 2]
            rows.append({**dict.fromkeys(TASKS[task].columns, text), "label": i % 2})
        for split, n in (("train", 2000), ("validation", 100), ("test", 100)):
            write_rows(place / "DIR" / task / f"{split}.jsonl", rows[:n])
    reviews = "".join(f"{['good', 'bad'][i % 2]} film,{1 + i % 2}\n" for i in range(40))
    (place / "reviews.csv").write_text(f"review,stars\n{reviews}")
    shutil.copy(place / "DIR" / "rte" / "validation.jsonl", place / "rows.jsonl")
    (place / "DIRECTORY_OR_HUB_ID").symlink_to(encoder)


@thorough
def test_commands_run_as_printed(encoder, tmp_path):
    """Every command in a block of the pages that a user follows, in the order printed, by bash in
    one directory. Left out are make, the environment, the command for the hub."""
    write_what_the_pages_presuppose(tmp_path, encoder)
    for path in ROOT.iterdir():
        if path.suffix == ".py" or path.is_dir() and path.name[0] != "." and path.name != "runs":
            (tmp_path / path.name).symlink_to(path)
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub")}
    environment["ADAPTERFUSION_DATA_DIR"] = str(tmp_path / "DIR")
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    fusion_cb = "python train.py --stage fusion --task cb --adapters runs/mnli runs/rte\n"
    for page in FOLLOWED.split():
        text = PAGES[page]
        for block in re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            if not re.match(r"python|for |mkdir", block) or "--adapters paper" in block:
                continue
            if "runs/fusion-cb" in block:
                block = fusion_cb + block
            given = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
            done = subprocess.run(["bash", "-ec", block], **given)
            assert done.returncode == 0, f"{page}: {block}{done.stderr[-2000:]}"


# --------------------------------------------------------------------------------------------------
# Links and names


def anchor(heading):
    """As GitHub makes it of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", [*PAGES, "docs/walkthrough.py"])
def test_every_link_leads_somewhere(page):
    text = PAGES.get(page, WALKTHROUGH)
    links = re.findall(r"\]\((?!https?:)([^)\s]+)\)|(?:src|href)=\"(?!https?:)([^\"]+)\"", text)
    for link in (a or b for a, b in links):
        file, _, place = link.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), link
        if place:
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert place in map(anchor, headings), link


def test_every_equation_points_at_a_line_that_is_there():
    rows = re.findall(r"\| `(\w+\.py)`: `(.+)` \|", README)
    assert {file[:-3] for file, _ in rows} == {*"bert adapter fusion data train".split()}
    for file, line in rows:
        assert line in (ROOT / file).read_text(encoding="utf-8"), f"{line} is no longer in {file}"


# --------------------------------------------------------------------------------------------------
# The walkthrough


def cells_of_source(text):
    """[(kind, text)] of the cells of a percent-format file."""
    for cell in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        title, _, body = cell.partition("\n")
        if title.strip() == "[markdown]":
            yield "markdown", re.sub(r"^# ?", "", body.strip(), flags=re.MULTILINE)
        else:
            yield "code", re.sub(r"^# %(?=\w)", "%", body.strip(), flags=re.MULTILINE)


def test_the_notebook_is_that_of_its_source_and_executed():
    cells = json.loads((ROOT / "docs" / "walkthrough.ipynb").read_text(encoding="utf-8"))["cells"]
    found = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    assert found == [*cells_of_source(WALKTHROUGH)], "make walkthrough, see the Makefile"
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert len(code) > 15 and all(cell["execution_count"] for cell in code)
    assert "error" not in {output["output_type"] for output in outputs}
    assert not re.search("/(home|root|work|tmp|Users)/|site-packages", json.dumps(outputs))
