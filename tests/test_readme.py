"""Pages: commands are understood, what is named is there, forks work. Which room imports which."""

import contextlib
import importlib
import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
from safetensors.torch import load_file

import train
from experiments import benchmark, demo, fusion_weights, load_run
from fusion import active_fusions

ROOT = Path(__file__).parent.parent
# rooms and the five files: each may import itself and those before it
ORDER = "formats runtime fast data bert adapter fusion train experiments examples results".split()
FILES = [path.relative_to(ROOT) for path in [*ROOT.glob("*.py"), *ROOT.glob("[!.]*/*.py")]]
TESTS = [path.stem for path in FILES if path.parent.name == "tests"]
FILES = [path for path in FILES if path.parent.name not in ("tests", "docs")]

NAMES = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md"))]
NAMES += ["README.md", "results/README.md", "docs/walkthrough.py"]
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in NAMES}
LINES = [shlex.join(map(str, words)) for words in demo.next_commands(Path("runs/demo")).values()]
PAGES["experiments/demo.py"] = "\n".join(["```", *(f"python {line}" for line in LINES), "```"])


def blocks(page, language=""):
    """[code] of the blocks in a language on a page."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)
    return [code for name, code in found if name == language]


def commands(page):
    """Every `python ...` in the code of a page, as the words behind it."""
    prose = re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)
    prose = re.sub(r"(?<!\n)\n(?!\n)", " ", prose)
    for block in blocks(page) + re.findall(r"`([^`]+)`", prose):
        block = re.sub(r"\s*\\\n\s*", " ", block)  # a command over several lines
        block = re.sub(r"\$\{\w+\[.*?\]\}|\$\w+", "rte", block)  # variables of the shell
        program = r"(?:python|torchrun .*?) ((?:train\.py|-m experiments|examples/).*)"
        for command in re.split(r"; | && | \| |\n", block):
            if found := re.search(program, command):
                yield shlex.split(found[1], comments=True)


class Understood(BaseException):
    """Raised by what each program calls first with its options."""


NEXT = [(train, "check_out"), (load_run, "read_finished"), (fusion_weights, "read_finished")]
NEXT += [(benchmark, "choose_device"), (tempfile, "TemporaryDirectory")]
TABLES = "adapter.ADAPTERS adapter.HEADS bert.ENCODERS data.TASKS fusion.FUSIONS train.STAGES"
CHECKED = [page for page in PAGES if page != "results/README.md"]  # which tells of earlier commits
FOUND = sorted({(page, shlex.join(words)) for page in CHECKED for words in commands(page)})
assert len(FOUND) > 25


@pytest.fixture
def own_modules(page, tmp_path, monkeypatch):
    """The modules on a page, blocks that begin with a name, can be imported as in a new process."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    own = re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)
    for name, code in own:
        (tmp_path / f"{name}.py").write_text(code)
    for name in [name for name in sys.modules if name.startswith("examples.")] + [*dict(own)]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    with contextlib.ExitStack() as stack:
        for table in TABLES.split():
            stack.enter_context(patch.dict(table))
        yield


@pytest.mark.parametrize("page, words", FOUND, ids=lambda text: text[:80])
def test_every_command_is_understood(page, words, own_modules, monkeypatch):
    for module, name in NEXT:
        monkeypatch.setattr(module, name, Mock(side_effect=Understood))
    monkeypatch.setattr(train, "encoder_of", lambda _: None)  # of runs that are not there
    program, *given = shlex.split(words)
    if program == "-m":
        program, *given = given
    module = importlib.import_module(program.removesuffix(".py").replace("/", "."))
    main = getattr(module, "main", train.main)  # that of most examples
    with pytest.raises(Understood):
        main(given)


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_there(page):
    """The lines in the README's table; links, and files whose room is named before them."""
    quoted = re.findall(r"\| `(\w+\.py)`: `(.+)` \|", PAGES[page])
    for file, line in quoted:
        assert line in (ROOT / file).read_text(encoding="utf-8"), line
    assert bool(quoted) == (page == "README.md")
    rooms = "|".join([*ORDER, "tests|docs"])
    for path in re.findall(rf"`((?:{rooms})/[\w./]*)`", PAGES[page]):
        assert (ROOT / path).exists(), path
    for link in re.findall(r"(?:\]\(|src=\"|href=\")(?!https?:)([^)\s\"#]+)", PAGES[page]):
        assert ((ROOT / page).parent / link).exists(), link


@pytest.mark.parametrize("page", ["docs/forking.md"])
def test_the_fork_on_the_page(own_modules, launch, runs, tmp_path):
    given = {"task": "rte", "epochs": 1, "adapters": [runs / "rte", runs / "sst2"]}
    launch("--import scaled_fusion --stage fusion --fusion scaled", out=tmp_path / "run", **given)
    fusion = active_fusions(load_run.load_run(tmp_path / "run").bert)[0, "output"]
    scores = torch.tensor([[[3.0, -1.0]]])
    assert torch.allclose(fusion.softmax(scores), (scores / 32**0.5).softmax(-1))


def test_the_python_on_the_pages(encoder, tmp_path, monkeypatch):
    """From train.main on a file that is there to a folder that can be published."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    code = [*blocks("docs/python.md", "python"), blocks("docs/adapterhub.md", "python")[0]]
    exec("\n".join(code).replace("minilm", str(encoder)), {})
    fusion = load_file(tmp_path / "published" / "model_adapter_fusion.safetensors")
    assert {t.dtype for t in fusion.values()} == {torch.float16}
    assert not [*(tmp_path / "published").rglob("run.json")]


EDITED = """
import json, sys, train
from experiments import evaluate

for words in json.loads(sys.argv[1]):
    run = train.main(words)
    again = evaluate.main([run["out"], "--device", "cpu"])
    assert (again["loss"], again["accuracy"]) == (run["dev_loss"], run["accuracy"])
"""


def test_the_edits_on_the_page(command, tmp_path):
    """All together, in copies of the files, in both stages; evaluate finds what training did."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("*.py")}
    for hunk in re.split("^--- ", "".join(blocks("docs/forking.md", "diff")), flags=re.M)[1:]:
        file, *lines = hunk.splitlines()
        old, new = ("\n".join(x[1:] for x in lines if x[0] in marks) for marks in (" -", " +"))
        assert texts[file].count(old) == 1, old
        texts[file] = texts[file].replace(old, new)
    for room in "experiments fast formats runtime".split():
        (tmp_path / room).symlink_to(ROOT / room)
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    words = [[*map(str, command(s, tmp_path / s))] for s in ("adapter", "fusion")]
    subprocess.run([sys.executable, "-c", EDITED, json.dumps(words)], cwd=tmp_path, check=True)


def test_the_notebook_is_that_of_its_source():
    """Cell for cell, but for the marks of comments."""

    def plain(text):
        return re.sub(r"^(# ?)*", "", text.strip(), flags=re.MULTILINE)

    cells = json.loads((ROOT / "docs" / "walkthrough.ipynb").read_text(encoding="utf-8"))["cells"]
    source = re.split(r"^# %%.*\n", PAGES["docs/walkthrough.py"], flags=re.MULTILINE)[1:]
    found = [plain("".join(cell["source"])) for cell in cells]
    assert found == [*map(plain, source)], "make walkthrough, see the Makefile"


def test_imports_point_down():
    """Also those inside functions."""
    for path in FILES:
        above = ORDER[ORDER.index(path.parts[0].removesuffix(".py")) + 1 :]
        text = (ROOT / path).read_text("utf-8")
        rooms = re.findall(r"^ *(?:from|import) (\.|\w+)", text, re.MULTILINE)
        assert not {*rooms} & {*above, *TESTS, "."}, path
