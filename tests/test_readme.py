"""What README.md and docs/ say is true: commands are understood by the programs that they name,
links lead somewhere, and quoted lines of code are there."""

import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

import train
from experiments import grid
from runtime import options

ROOT = Path(__file__).parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
README = PAGES["README.md"]


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 130


# --------------------------------------------------------------------------------------------------
# Commands


def commands(text):
    """Every `python ...` in the code of a page, as a list of words."""
    code = re.findall(r"```\n(.*?)```", text, re.DOTALL) + re.findall(r"`([^`]+)`", prose(text))
    values = dict(re.findall(r'^(\w+)="(.+)"$', "\n".join(code), re.MULTILINE))
    for block in code:
        block = re.sub(r"\s*\\\n\s*", " ", block)  # a command over several lines
        for name, value in values.items():
            block = block.replace(f"${name}", value)
        block = re.sub(r"\$\{\w+\[.*?\]\}|\$[a-z]\w*", "rte", block)  # other variables of the shell
        block = re.sub(r"\$SLURM_\w+", "0", block)
        for line in block.splitlines():
            for command in re.split(r"; | && | \| ", line):
                found = re.match(
                    r"(?:do |srun |\$ )?(?:python|torchrun .*?)(?= (?:-m )?\w)", command
                )
                if found and re.search(r"\btrain\.py|\bdata\.py|\bbert\.py|-m \w", command):
                    yield shlex.split(command, comments=True)


def prose(text):
    """A page without its blocks of code, each paragraph on one line."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def program(words):
    """(its name, its arguments): train.py ..., -m experiments.predict ..."""
    for i, word in enumerate(words):
        if word in ("train.py", "data.py", "bert.py"):
            return word, words[i + 1 :]
        if word == "-m":
            return words[i + 1], words[i + 2 :]
    raise AssertionError(f"no program in {words}")


GRIDS = ("experiments.table1", "experiments.architecture_search")


class Understood(Exception):
    """Raised in place of everything that follows the parser."""


def stop_after(parse):
    def parse_and_stop(*values):
        parse(*values)
        raise Understood

    return parse_and_stop


def understand(name, words, monkeypatch):
    """Raises ValueError for arguments that the program refuses. No file is touched."""
    if name == "bert.py":
        assert 1 <= len(words) <= 2 and not words[0].startswith("-"), words
        return
    if name == "train.py":
        args = train.arguments(words)
        args.out = Path("a directory that is not there")  # what is there is not looked at
        train.check(args)
        return
    if name != "data.py" and not name.startswith("experiments."):  # its options are its own
        assert importlib.util.find_spec(name), name
        return
    parsers = [(options.Parser, "parse_args"), (options.Parser, "parse_intermixed_args")]
    for owner, method in [(grid, "own_arguments")] if name in GRIDS else parsers:
        monkeypatch.setattr(owner, method, stop_after(getattr(owner, method)))
    monkeypatch.setattr(sys, "argv", [name, *words])
    module = importlib.import_module(name.removesuffix(".py"))
    with pytest.raises(Understood):
        module.arguments(words) if name in GRIDS else module.main()
    if name in GRIDS and "--" in words:  # what follows goes to every train.py
        monkeypatch.undo()
        rest = words[words.index("--") + 1 :]
        understand("train.py", ["--stage", "head", "--task", "rte", *rest], monkeypatch)


FOUND = [(page, tuple(words)) for page, text in PAGES.items() for words in commands(text)]


def test_commands_are_found():
    names = {program(words)[0] for _, words in FOUND}
    assert {
        "train.py",
        "data.py",
        "bert.py",
        "experiments.evaluate",
        "experiments.predict",
    } <= names
    assert {"experiments.table1", "experiments.prune", "experiments.curves"} <= names
    assert len(FOUND) >= 40


@pytest.mark.parametrize("page, words", FOUND, ids=[shlex.join(words)[:80] for _, words in FOUND])
def test_every_command_is_understood(page, words, monkeypatch, capsys):
    name, arguments = program(words)
    arguments = [re.sub(r"\.\.\.$", "", word) for word in arguments]
    if arguments == ["--help"]:
        with pytest.raises(SystemExit, match="^0$"):
            train.arguments(arguments)
        return
    understand(name, [word for word in arguments if word], monkeypatch)


def test_a_command_with_an_unknown_option_is_noticed(monkeypatch):
    for name in ("train.py", "experiments.predict", "experiments.table1"):
        with monkeypatch.context() as patch, pytest.raises((ValueError, SystemExit)):
            understand(name, ["--no-such-option"], patch)


def test_make_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    for text in PAGES.values():
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


# --------------------------------------------------------------------------------------------------
# Links


def anchor(heading):
    """As GitHub makes it of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", PAGES[page])
    for link in (a or b for a, b in links):
        if re.match(r"https?:", link):
            continue
        file, _, place = link.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), f"{page}: {link}"
        if place:
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert place in map(anchor, headings), f"{page}: {link}"


def test_every_page_is_reached_from_the_readme():
    reached, todo = set(), ["README.md"]
    while todo:
        page = todo.pop()
        if page not in reached:
            reached.add(page)
            for link in re.findall(r"\]\(([^)\s#]+\.md)", PAGES[page]):
                path = ((ROOT / page).parent / link).resolve()
                todo.append(str(path.relative_to(ROOT)))
    assert reached == set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_tests_that_are_there(page):
    """And it is nobody's unfinished merge."""
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("*.py"))
    assert not re.search(r"^(<{7}|={7}|>{7})", PAGES[page], re.MULTILINE)
    for words in re.findall(r"`([^`\n]+)`", PAGES[page]):
        for file in re.findall(r"tests/\w+\.py", words):
            assert (ROOT / file).exists(), file
        for name in re.findall(r"\btest_\w+\b(?!\.py)", words):
            assert f"def {name}(" in tests, name


# --------------------------------------------------------------------------------------------------
# Code


def test_every_equation_points_at_a_line_that_is_there():
    rows = re.findall(r"\| `(\w+\.py)`: `(.+)` \|", README)
    assert {file for file, _ in rows} == {
        "bert.py",
        "adapter.py",
        "fusion.py",
        "data.py",
        "train.py",
    }
    for file, line in rows:
        assert line in (ROOT / file).read_text(encoding="utf-8"), f"{line} is no longer in {file}"


def test_the_defaults_are_those_that_the_readme_names():
    assert train.STAGES["adapter"] == (1e-4, 30) and train.STAGES["fusion"] == (5e-5, 10)


def figures(text):
    return set(re.findall(r"\d+\.\d+", text))


def test_the_readme_has_no_figure_that_its_pages_have_not():
    section = README[README.index("## What it gives") : README.index("## Your own task")]
    tables = "\n".join(line for line in section.splitlines() if line.startswith("|"))
    assert len(figures(tables)) > 20
    assert figures(tables) <= figures(PAGES["docs/results.md"] + PAGES["docs/benchmarks.md"])


# --------------------------------------------------------------------------------------------------
# The walkthrough


def cells_of_source(text):
    """[(kind, text)] of the cells of a percent-format file."""
    header, *cells = re.split(r"^# %%", text, flags=re.MULTILINE)
    for cell in cells:
        title, _, body = cell.partition("\n")
        if title.strip() == "[markdown]":
            yield "markdown", re.sub(r"^# ?", "", body.strip(), flags=re.MULTILINE)
        else:
            yield "code", re.sub(r"^# %(?=\w)", "%", body.strip(), flags=re.MULTILINE)


NOTEBOOK = json.loads((ROOT / "docs" / "walkthrough.ipynb").read_text(encoding="utf-8"))


def test_the_notebook_is_that_of_its_source():
    source = list(cells_of_source((ROOT / "docs" / "walkthrough.py").read_text(encoding="utf-8")))
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in NOTEBOOK["cells"]]
    assert len(source) > 40
    assert cells == source, "run `make walkthrough`"


def test_the_notebook_is_executed():
    code = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in code)
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3


def test_the_notebook_names_no_place_of_a_machine():
    written = json.dumps([cell.get("outputs", []) for cell in NOTEBOOK["cells"]])
    for place in ("/home/", "/root/", "/work/", "/tmp/", "/Users/", "site-packages"):
        assert place not in written, place
    assert "timestamp" not in json.dumps(NOTEBOOK["metadata"])


def test_links_of_the_walkthrough():
    text = "".join("".join(c["source"]) for c in NOTEBOOK["cells"] if c["cell_type"] == "markdown")
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert len(links) >= 4
    for link in links:
        assert (ROOT / "docs" / link).exists(), link
