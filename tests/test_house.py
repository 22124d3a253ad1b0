"""Which room may import which: imports point down only, nothing goes round in a circle, and the
five files are short."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FIVE = {"bert", "adapter", "fusion", "data", "train"}
BELOW = {"formats", "runtime"}
MAY_IMPORT = {  # a room or one of the five files, and what of the house it may import
    "formats": {"formats"},
    "runtime": {"formats", "runtime"},
    "bert": BELOW,
    "adapter": BELOW | {"bert"},
    "fusion": BELOW | {"bert", "adapter"},
    "data": BELOW,
    "variants": BELOW | {"bert", "adapter", "fusion", "data", "variants"},
    "train": BELOW | {"bert", "adapter", "fusion", "data", "variants"},
    "experiments": BELOW | FIVE | {"variants", "experiments", "examples"},
    "examples": BELOW | FIVE | {"variants", "experiments", "examples"},
}
EXCEPTIONS = {("data", "main"): {"bert"}}  # `python data.py TASK` asks what an encoder will read
LONGEST_FUNCTION = 62  # lines, its docstring included
# lines of the five files: each at most 15 % over its plan, and 1,358 together, where it is 1,200
LONGEST = {"bert": 239, "adapter": 264, "fusion": 237, "data": 305, "train": 313}
LONGEST_FIVE = 1358


def files():
    """{module: its syntax tree} of the whole house, as "runtime.run" and "bert"."""
    result = {}
    for room in MAY_IMPORT:
        for path in [ROOT / f"{room}.py"] if room in FIVE else sorted((ROOT / room).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            result[module] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return result


FILES = files()


def room(module):
    return module.split(".")[0]


def imported(node):
    """Every module that an import statement may load: `from runtime import run` loads runtime and
    perhaps runtime.run. Raises ValueError for a relative import, which the house does not have."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if node.level:
        raise ValueError(f"relative import in line {node.lineno}")
    return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]


def imports_of(module):
    """[(name of the function or None, imported module)], also of imports inside functions, of both
    branches of an `if`, and of importlib.import_module("...")."""
    result = []

    def visit(node, function):
        if isinstance(node, ast.Import | ast.ImportFrom):
            result.extend((function, name) for name in imported(node))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "__import__")
        ):
            # a name that is computed could be anything; the only one is what a user gives --import
            if (module, function) != ("experiments.load_run", "import_module"):
                assert isinstance(node.args[0], ast.Constant), f"{module}: {ast.unparse(node)}"
                result.append((function, node.args[0].value))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = function or node.name
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(FILES[module], None)
    return result


def resolved(name):
    """The file that an import loads: "runtime.run.Run" is of runtime.run."""
    while name and name not in FILES:
        name = name.rpartition(".")[0]
    return name


def test_every_room_is_read():
    """The house has no file that the tests below do not see."""
    here = {path.stem for path in ROOT.glob("*.py")}
    assert here == FIVE
    there = {path.parent.name for path in ROOT.glob("[!.]*/*.py")} - {"tests", "docs"}
    assert there <= set(MAY_IMPORT) and {"formats", "runtime", "variants", "experiments"} <= there
    assert {"formats.adapterhub", "runtime.run", "variants.pal", *FIVE} <= set(FILES)
    assert ("main", "runtime.inspect") in imports_of("data")  # also inside functions


@pytest.mark.parametrize("module", FILES)
def test_imports_point_down(module):
    tests = {"tests", "conftest", *(path.stem for path in (ROOT / "tests").glob("*.py"))}
    for function, name in imports_of(module):
        below = MAY_IMPORT[room(module)] | EXCEPTIONS.get((module, function), set())
        assert room(name) not in {*MAY_IMPORT, *tests} - below, f"{module} imports {name}"


def test_no_import_is_for_types_alone():
    for module, tree in FILES.items():
        names = {ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Name | ast.Attribute)}
        assert not {name for name in names if "TYPE_CHECKING" in name}, module


def test_no_circle():
    """Not within a room either; the encoder that the command of data.py asks for counts, too."""
    graph = {
        module: {resolved(name) for _, name in imports_of(module)} - {"", module}
        for module in FILES
    }
    while leaves := {module for module, below in graph.items() if not below}:
        graph = {module: below - leaves for module, below in graph.items() if module not in leaves}
    assert not graph, f"a circle, and what stands above it: {graph}"


@pytest.mark.parametrize("module", sorted(FIVE))
def test_functions_are_short(module):
    for node in ast.walk(FILES[module]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= LONGEST_FUNCTION, f"{module}.{node.name} has {lines} lines"


def test_the_five_files_are_short():
    lines = {name: len((ROOT / f"{name}.py").read_text().splitlines()) for name in sorted(FIVE)}
    assert sum(lines.values()) <= LONGEST_FIVE, f"{sum(lines.values())} lines: {lines}"
    longer = {name: count for name, count in lines.items() if count > LONGEST[name]}
    assert not longer, f"{longer} lines, at most {LONGEST}"


def asked_for(tree):
    """Names of the classes that isinstance or a comparison with type(...) asks for."""

    def names(node):
        return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} | {
            n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)
        }

    result = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
            result |= names(node.args[1])
        if isinstance(node, ast.MatchClass):
            result |= names(node.cls)
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            called = [side for side in sides if isinstance(side, ast.Call)]
            if any(ast.unparse(side.func) == "type" for side in called):
                result |= set().union(*(names(side) for side in sides if side not in called))
    return result


def test_nothing_asks_for_a_kind():
    """A kind of adapter, of fusion or of task is one class in one place: whoever uses it calls what
    it has, and does not ask which one it is."""
    kinds = {"Adapter", "AdapterConfig", "Fusion", "Classes", "Choices"}
    for module, tree in FILES.items():
        if room(module) == "variants":
            kinds |= {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    assert {"PAL", "PALConfig", "FoldedFusion"} <= kinds
    for module, tree in FILES.items():
        if room(module) in FIVE | {"formats", "runtime", "experiments", "examples"}:
            found = asked_for(tree) & kinds
            assert not found, f"{module} asks for {', '.join(sorted(found))}"


@pytest.mark.parametrize(
    "code",
    ["isinstance(a, PAL)", "isinstance(a, (int, pal.PAL))", "type(a) is PAL", "type(a) in {PAL}"],
)
def test_the_question_is_found(code):
    assert "PAL" in asked_for(ast.parse(code))


def test_help_loads_only_what_it_must():
    """Whoever asks `python train.py --help` waits for no library of the experiments or the hub."""
    code = "import runpy, sys\nsys.argv = ['train.py', '--help']\n"
    code += "try: runpy.run_path('train.py', run_name='__main__')\n"
    code += "finally: print(*sorted(sys.modules), sep='\\n', file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "--reduction-factor" in done.stdout, done.stderr[-2000:]
    loaded = {room(name) for name in done.stderr.splitlines()}
    assert loaded & set(MAY_IMPORT) >= {"bert", "adapter", "formats", "runtime"}
    needless = {
        "experiments",
        "examples",
        "matplotlib",
        "PIL",
        "transformers",
        "adapters",
        "pytest",
        "datasets",
        "pandas",
        "pyarrow",
    }
    assert not loaded & needless
    # `datasets` brings huggingface_hub along; the house itself asks for it where it downloads
    assert "huggingface_hub" not in loaded or "datasets" in loaded
    for module in FILES:
        if room(module) not in {"experiments", "examples"}:
            at_once = {room(name) for function, name in imports_of(module) if function is None}
            assert not at_once & {"huggingface_hub", "matplotlib"}, module
