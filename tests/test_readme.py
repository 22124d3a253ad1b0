"""README.md and docs/: commands are understood by the programs that they name, links lead
somewhere, and the notebook is that of its source."""

import importlib
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

import child
import train
from conftest import WORDS, cli, fill_hub_cache, sentence, thorough, write_rows
from data import TASKS
from experiments import demo, skills
from runtime import settings

ROOT = Path(__file__).parent.parent
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in FILES}
WALKTHROUGH = (ROOT / "docs" / "walkthrough.py").read_text(encoding="utf-8")


def blocks(text):
    """(language, code) of every block of code on a page."""
    return re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(text):
    """Every `python ...` in the code of a page, as a list of words."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    code = [block for language, block in blocks(text) if not language]
    code += re.findall(r"`([^`]+)`", re.sub(r"(?<!\n)\n(?!\n)", " ", prose))
    program = r"(?:do |srun |\$ )?(?:python|torchrun .*?) (?=train\.py|-m (?:experiments|examples))"
    for block in code:
        block = re.sub(r"\s*\\\n\s*", " ", block)  # a command over several lines
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
assert len(FOUND) > 30


@pytest.mark.parametrize("page, words", FOUND, ids=lambda text: text[:80])
def test_every_command_is_understood(page, words, monkeypatch):
    check_values = settings.check_values

    def check_and_stop(options):
        check_values(options)
        raise Understood

    monkeypatch.setattr(settings, "check_values", check_and_stop)
    for file in re.findall(r"^# (\S+)\.py$", PAGES[page], re.MULTILINE):  # a fork, for --import
        monkeypatch.setitem(sys.modules, Path(file).name, pytest)
    with pytest.raises(SystemExit if "--help" in words else Understood):
        understand(shlex.split(words))


FOLLOWED = "README tasks after_training adapterhub forking python".split()
SAY = r"""python() { printf '%s\0' "$PYTHONPATH" "$@"; printf '\n\0'; }; """


@pytest.fixture
def followed(encoder, tmp_path, monkeypatch):
    """A directory with what the pages presuppose: this project, what `make demo` leaves, BERT-base
    in the hub's cache, tasks of GLUE, and the files that they speak of."""
    for path in [*ROOT.glob("*.py"), *ROOT.glob("[!.]*/")]:
        if path.name != "runs":
            (tmp_path / path.name).symlink_to(path)
    rng, texts = random.Random(0), ["the cat sleeps and sleeps", "red dog runs"]
    for task in "mnli qqp sst2 mrpc rte".split():
        rows = [dict.fromkeys(TASKS[task].columns, texts[i % 2]) for i in range(64)]
        for split in ("train", "validation", "test"):
            labelled = [{**row, "label": i % 2} for i, row in enumerate(rows)]
            write_rows(tmp_path / "DIR" / task / f"{split}.jsonl", labelled)
    (tmp_path / "reviews.csv").write_text("review,stars\n" + "good film,1\nbad film,2\n" * 20)
    shutil.copy(tmp_path / "DIR" / "rte" / "test.jsonl", tmp_path / "rows.jsonl")

    documented = [(word, [f"{sentence(rng, 6)} {word}"]) for word in WORDS if word.isalpha()]
    monkeypatch.setattr(skills, "docstrings", lambda origin: documented)
    monkeypatch.setattr(skills, "SIZES", {"source": (64, 32), "target": (240, 32)})
    out = tmp_path / "runs" / "demo"
    skills.build_tasks(out / "data", rng, demo.SKILLS)
    study = demo.study_of(out)
    for cell in (*demo.source_cells(study.options), study.cells["fusion-240-0"]):
        train.main([*cell.command, *cli("--epochs 1", model=encoder)])

    cached = Path(constants.HF_HUB_CACHE) / "models--google-bert--bert-base-uncased"
    fill_hub_cache(cached, encoder)
    yield tmp_path
    shutil.rmtree(cached)


@thorough
def test_blocks_run_as_printed(followed):
    """Every command and program of the pages that a user follows, in the order printed, in one
    directory; stages are trained for one epoch.

    A block of commands begins with python, for, mkdir or export; the others are make, the
    environment, what was printed, and the citation. The one that needs the hub is left out. A
    program that begins with the name of a file, as a comment, is that file, and the commands with
    it are run in new processes, in which nothing is imported yet; the others of a page are one.
    """
    environment = {"ADAPTERFUSION_DATA_DIR": str(followed / "DIR"), "MPLBACKEND": "agg"}
    shell = {"cwd": followed, "capture_output": True, "text": True}

    def run(words, path="", new_process=False):
        if new_process:
            given = {**os.environ, **environment, "PYTHONPATH": path}
            done = subprocess.run([sys.executable, *words], env=given, **shell)
            status, error = done.returncode, done.stderr
        else:
            status, _, error = child.Program(words, cwd=followed, **environment).finish()
        assert status == 0, f"{shlex.join(words)}\n{error[-2000:]}"

    for page in FOLLOWED:
        files, program = [], ""
        text = PAGES["README.md" if page == "README" else f"docs/{page}.md"]
        for language, block in blocks(text):
            if named := re.match(r"# (\S+\.py)\n", block):
                files.append(followed / named[1])
                files[-1].parent.mkdir(exist_ok=True)
                files[-1].write_text(block)
            elif language == "python":
                program += block
            elif re.match(r"python|for |mkdir|export", block) and "--adapters paper" not in block:
                new_process = any(file.name in block for file in files)
                said = subprocess.run(["bash", "-ec", SAY + block], check=True, **shell).stdout
                for command in said.split("\n\0")[:-1]:
                    path, *words = command.split("\0")[:-1]
                    run(words + ["--epochs", "1"] * ("--stage" in words), path, new_process)
        if program:
            (followed / "program.py").write_text(program)
            run(["program.py"])


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


def test_the_notebook_is_that_of_its_source():
    """Cell for cell, but for the marks of comments."""

    def plain(text):
        return re.sub(r"^(# ?)*", "", text.strip(), flags=re.MULTILINE)

    cells = json.loads((ROOT / "docs" / "walkthrough.ipynb").read_text(encoding="utf-8"))["cells"]
    source = re.split(r"^# %%.*\n", WALKTHROUGH, flags=re.MULTILINE)[1:]
    found = [plain("".join(cell["source"])) for cell in cells]
    assert found == [*map(plain, source)], "make walkthrough, see the Makefile"
