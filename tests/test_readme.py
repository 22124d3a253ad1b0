"""README.md and docs/: commands are understood by the programs that they name, names in the code
exist, links lead somewhere, and the notebook is that of its source."""

import ast
import contextlib
import importlib
import json
import re
import shlex
import sys
import tempfile
from pathlib import Path
from unittest.mock import Mock, patch

import pytest

import train
from data import TASKS
from experiments import benchmark, demo, fusion_weights, load_run, skills

ROOT = Path(__file__).parent.parent
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "results" / "README.md"]
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in FILES}
WALKTHROUGH = (ROOT / "docs" / "walkthrough.py").read_text(encoding="utf-8")
every_page = pytest.mark.parametrize("page", PAGES)


def blocks(page, language=""):
    """[code] of the blocks in a language on a page."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)
    return [code for name, code in found if name == language]


def commands(page):
    """Every `python ...` in the code of a page, as a list of words."""
    prose = re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)
    code = blocks(page) + re.findall(r"`([^`]+)`", re.sub(r"(?<!\n)\n(?!\n)", " ", prose))
    program = r"(?:do |srun )?(?:python|torchrun .*?) (?=train\.py|-m experiments|examples/)"
    for block in code if page != "results/README.md" else []:  # commands of earlier commits
        block = re.sub(r"\s*\\\n\s*", " ", block)  # a command over several lines
        block = re.sub(r"\$\{\w+\[.*?\]\}|\$[a-z]\w*", "rte", block)  # variables of the shell
        block = re.sub(r"\$SLURM_\w+", "0", block)
        for command in re.split(r"; | && | \| |\n", block):
            if found := re.match(program, command):
                yield shlex.split(command[found.end() :], comments=True)


class Understood(BaseException):
    """Raised in place of everything that follows the options."""


# what each program calls first with its options
NEXT = [(train, "check_out"), (load_run, "read_finished"), (fusion_weights, "read_finished")]
NEXT += [(benchmark, "choose_device"), (demo, "find_minilm"), (skills, "build_tasks")]
NEXT += [(tempfile, "TemporaryDirectory")]  # a download
TABLES = "adapter.ADAPTERS adapter.HEADS bert.ENCODERS data.TASKS fusion.FUSIONS train.STAGES"
FOUND = sorted({(page, shlex.join(words)) for page in PAGES for words in commands(page)})
assert len(FOUND) > 30


@pytest.fixture
def own_modules(page, tmp_path, monkeypatch):
    """The names of the modules on a page, blocks that begin with one, which can be imported, as in
    a new process, like those in examples/."""
    names = []
    for code in blocks(page, "python"):
        if found := re.match(r"# (\w+)\.py\n", code):
            names.append(found[1])
            (tmp_path / f"{found[1]}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in [*sys.modules]:
        if name.startswith("examples.") or name in names:
            monkeypatch.delitem(sys.modules, name)
    with contextlib.ExitStack() as stack:
        for table in TABLES.split():
            stack.enter_context(patch.dict(table))
        yield names


@pytest.mark.parametrize("page, words", FOUND, ids=lambda text: text[:80])
def test_every_command_is_understood(page, words, own_modules, monkeypatch):
    for task in TASKS:  # which a command on results.md finds there
        Path("MINI", task).mkdir(parents=True)
    for module, name in NEXT:
        monkeypatch.setattr(module, name, Mock(side_effect=Understood))
    monkeypatch.setattr(train, "encoder_of", lambda _: None)  # of runs that are not there
    program, *given = shlex.split(words)
    if program == "-m":
        program, *given = given
    module = importlib.import_module(program.removesuffix(".py").replace("/", "."))
    main = getattr(module, "main", train.main)  # that of most examples
    with pytest.raises(SystemExit if "--help" in given else Understood):
        main([word.removesuffix("...") for word in given if word != "..."])


@every_page
def test_names_in_python_exist(page, own_modules):
    """A page's own modules can be imported. Its other blocks are one program: what they import is
    there, and so is what they take from a module, or from a loaded run."""
    for name in own_modules:
        importlib.import_module(name)
    objects = {}
    for node in ast.walk(ast.parse("".join(blocks(page, "python")))):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            exec(ast.unparse(node), objects)
        elif isinstance(node, ast.Assign) and "load_run(" in ast.unparse(node.value):
            objects[node.targets[0].id] = load_run.LoadedRun
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in objects:  # a walk comes to statements before what is in them
                kind = objects[node.value.id]
                there = {*dir(kind), *getattr(kind, "__annotations__", ())}  # also a field's name
                assert node.attr in there, ast.unparse(node)


@every_page
def test_code_that_a_page_quotes_is_there(page):
    """Lines in the README's table, and what a diff takes away."""
    quoted = re.findall(r"\| `(\w+\.py)`: `(.+)` \|", PAGES[page])
    for code in blocks(page, "diff"):
        file, *lines = code.removeprefix("--- ").splitlines()
        quoted += [(file, line[1:]) for line in lines if line[0] in "- "]
    for file, line in quoted:
        assert line in (ROOT / file).read_text(encoding="utf-8"), line
    assert bool(quoted) == (page in ("README.md", "docs/forking.md"))


@pytest.mark.parametrize("page", [*PAGES, "docs/walkthrough.py"])
def test_every_link_leads_somewhere(page):
    text = PAGES.get(page, WALKTHROUGH)
    links = re.findall(r"\]\((?!https?:)([^)\s]+)\)|(?:src|href)=\"(?!https?:)([^\"]+)\"", text)
    for link in (a or b for a, b in links):
        file, _, place = link.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), link
        if place:
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8").lower(), re.M)
            anchors = [re.sub(r"[^\w\- ]", "", title).strip() for title in headings]  # GitHub's
            assert place in [title.replace(" ", "-") for title in anchors], link


def test_the_notebook_is_that_of_its_source():
    """Cell for cell, but for the marks of comments."""

    def plain(text):
        return re.sub(r"^(# ?)*", "", text.strip(), flags=re.MULTILINE)

    cells = json.loads((ROOT / "docs" / "walkthrough.ipynb").read_text(encoding="utf-8"))["cells"]
    source = re.split(r"^# %%.*\n", WALKTHROUGH, flags=re.MULTILINE)[1:]
    found = [plain("".join(cell["source"])) for cell in cells]
    assert found == [*map(plain, source)], "make walkthrough, see the Makefile"
