"""The whole story on a laptop, without any hub: adapters on three tasks, and a fusion that helps a
fourth with few examples, beside the controls that show what helps.

    make demo
    python -m experiments.demo [--out runs/demo]        # the same, in an environment of your own

The encoder is MiniLM-L6, a small BERT from PyPI; the texts are the docstrings of Python's library,
NumPy and PyTorch. Sources: which library a sentence is from (`library`), whether it describes a
function, a class or a method (`kind`), whether it describes what has a given name (`name`). Target:
the last question on NumPy, which `name` leaves out, with 150 training examples (`numpy_name`).

The target was chosen by trying. Two others were left after one seed each: the fusion was 1.5 points
above the head on the related task in one, 8.0 below in the other. Sentences and names were changed
four times, until `name` was learned well, with results of seed 0 in view. Learning rates were tried
on earlier forms, mostly with seeds 3 and 4 (the target's own adapter was near 50 % with each);
seeds 1 and 2 were run on the final form only. So the distance from fusion to that adapter is that
of a chosen example. Whether it comes from composition, or from `name` alone, the controls show.
"""

import ast
import contextlib
import importlib.util
import json
import random
import re
import shlex
import sysconfig
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import train
from experiments.report import mean_and_deviation, table, with_deviation
from formats.encoder import find_minilm
from formats.files import read_json
from runtime.command import run_command
from runtime.settings import option, parse


@dataclass(frozen=True)
class Options:
    out: Path = option(Path("runs/demo"), "default runs/demo")


TARGET = "numpy_name"
SOURCES = {"library": 1, "kind": 1, "name": 2}  # of each the epochs
# what it is, its stage, its learning rate, and which adapters it takes
SYSTEMS = {
    "own": ("the target's own adapter", "adapter", "1e-3", ""),
    "head": ("a new head on `name`, frozen", "head", "2e-3", "name"),
    "fusion": ("the fusion of all four", "fusion", "5e-4", f"library kind name {TARGET}"),
    "without": ("the fusion without `name`", "fusion", "5e-4", f"library kind {TARGET}"),
}
BUDGET = "--batch-size 16 --epochs 5 --patience 3"  # of every system
COMMON = "--max-length 48 --overwrite"
SEEDS = (0, 1, 2)
FILES = {  # enough of each library, so that reading takes seconds
    "std": "*.py asyncio/*.py email/*.py http/*.py json/*.py logging/*.py multiprocessing/*.py "
    "tkinter/*.py unittest/*.py",
    "numpy": "**/*.py",
    "torch": "nn/**/*.py optim/**/*.py distributions/**/*.py autograd/**/*.py utils/data/**/*.py "
    "distributed/*.py",
}


def docstrings(library):
    """(kind, name, [sentences]) of the docstrings in a library's source files; nothing is imported
    or run."""
    if library == "std":
        root = Path(sysconfig.get_path("stdlib"))
    else:
        root = Path(importlib.util.find_spec(library).submodule_search_locations[0])
    files = {path for pattern in FILES[library].split() for path in root.glob(pattern)}
    for path in sorted(path for path in files if "tests" not in path.parts):
        with contextlib.suppress(SyntaxError, ValueError):  # what is no Python, or not UTF-8
            for kind, node in definitions(ast.parse(path.read_text(encoding="utf-8"))):
                if text := ast.get_docstring(node):
                    yield kind, node.name, sentences(text)


def words_of(name):
    """zseries_to_cseries -> zseries to cseries, BatchNorm -> batch norm"""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_+", " ", name).strip().lower()


def definitions(tree):
    """("function" | "class" | "method", node) of every definition, level by level."""
    for parent in ast.walk(tree):
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.ClassDef):
                yield "class", node
            elif isinstance(node, ast.FunctionDef):
                yield "method" if isinstance(parent, ast.ClassDef) else "function", node


def sentences(text):
    """The English sentences in a docstring's prose: sections, code, and markup are left out."""
    result = []
    for paragraph in re.split(r"\n\s*\n", text):
        if re.search(r">>>|::|---|===|^\s*[:@.]|^\s{4}|\w+ : |[{}|]", paragraph, re.MULTILINE):
            continue
        paragraph = re.sub(r":\w+:|[`*]", "", " ".join(paragraph.split()))
        for sentence in re.split(r"(?<=[.!?]) (?=[A-Z])", paragraph):
            words = [word.strip(".,;:()'\"") for word in sentence.split()]
            if 5 <= len(words) <= 20 and sum(map(str.isalpha, words)) > 0.8 * len(words):
                result.append(sentence)
    return result


def build_tasks(out, rng):
    """Writes four tasks as jsonl files: DIR/TASK/train.jsonl and validation.jsonl."""
    library, kind, named = defaultdict(set), defaultdict(set), defaultdict(dict)
    for origin in FILES:
        for what, name, texts in docstrings(origin):
            library[origin].update(texts)
            kind[what].update(texts[:1])  # the summary line
            # short ones are quicker; __init__ and its like say nothing
            if texts and len(texts[0].split()) <= 14 and not name.startswith("__"):
                named["target" if origin == "numpy" else "source"][texts[0]] = words_of(name)
    for task, classes in {"library": library, "kind": kind}.items():
        count = Counter(text for texts in classes.values() for text in texts)
        rows = []
        for label in sorted(classes):
            texts = sorted(text for text in classes[label] if count[text] == 1)  # not of two
            chosen = rng.sample(texts, min(250, len(texts)))
            rows += [{"text_a": text, "label": label} for text in chosen]
        rng.shuffle(rows)
        write(out, task, rows[:500], rows[500:700])
    for task, pool, train_size in (("name", "source", 1600), (TARGET, "target", 150)):
        texts = list(named[pool].items())
        rng.shuffle(texts)
        # the development set is of other docstrings
        write(out, task, pairs(texts[400:], train_size, rng), pairs(texts[:400], 200, rng))


def pairs(texts, n, rng):
    """n pairs of a sentence and a name, half of them of what the sentence describes. texts: (a
    sentence, its name)"""
    rows = {}
    while len(rows) < n:
        (text, name), (_, other) = rng.sample(texts, 2)
        if name != other:
            right = len(rows) % 2 == 0
            row = {"text_a": text, "text_b": name if right else other}
            rows[*row.values()] = {**row, "label": "yes" if right else "no"}
    rows = list(rows.values())
    rng.shuffle(rows)
    return rows


def write(out, task, train_rows, dev_rows):
    (out / task).mkdir(parents=True, exist_ok=True)
    for split, rows in (("train", train_rows), ("validation", dev_rows)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (out / task / f"{split}.jsonl").write_text(lines, encoding="utf-8")


def train_sources(out, model):
    """{task: metrics} of an adapter on each source."""
    options = f"--stage adapter --lr 1e-3 {COMMON} --model {model}".split()
    return {
        task: run(out, task, "--task", task, "--epochs", epochs, *options)
        for task, epochs in SOURCES.items()
    }


def compare(out, model):
    """{system: [metrics of each seed]} on the target, over the adapters of `train_sources`."""
    results = defaultdict(list)
    for seed in SEEDS:
        own = {TARGET: f"own-{seed}"}  # the adapter of this seed
        for name, (_, stage, lr, adapters) in SYSTEMS.items():
            options = f"--stage {stage} --task {TARGET} --lr {lr} --seed {seed}"
            options = f"{options} {BUDGET} {COMMON} --model {model}".split()
            if adapters:
                options += ["--adapters", *(out / own.get(task, task) for task in adapters.split())]
            results[name].append(run(out, f"{name}-{seed}", *options))
    return results


def run(out, name, *options):
    """Does what the command that it shows does, and returns what metrics.json of that run says."""
    words = [*map(str, options), "--data-dir", str(out / "data"), "--out", str(out / name)]
    print(f"\n$ python train.py {shlex.join(words)}", flush=True)
    train.main(words)
    return read_json(out / name / "metrics.json")


def source_table(results):
    """(rows, header) of a table of the sources and of the target, in %."""
    rows = []
    for task, metrics in results.items():
        shares = [f"{100 * metrics[name]:.1f}" for name in ("majority_class_accuracy", "accuracy")]
        rows.append([task, metrics["train_examples"], metrics["dev_examples"], *shares])
    return rows, ["task", "training", "development", "majority class", "its adapter"]


def system_table(results):
    """(rows, header) of a table of what `compare` returns, in %."""
    rows = []
    for name, found in results.items():
        what, _, lr, _ = SYSTEMS[name]
        accuracies = [metrics["accuracy"] for metrics in found]
        each = [f"{100 * accuracy:.1f}" for accuracy in accuracies]
        rows.append([what, lr, *each, with_deviation(*mean_and_deviation(accuracies))])
    seeds = [f"seed {seed}" for seed in SEEDS]
    return rows, [TARGET, "learning rate", *seeds, "mean ± deviation"]


def conclusion(results):
    """What follows from what `compare` returns, in words. One system counts as better than another
    if it is better with every seed."""
    lines, better = [], {}
    for name in ("own", "head", "without"):
        pairs = zip(results["fusion"], results[name], strict=True)
        wins = [fusion["accuracy"] > other["accuracy"] for fusion, other in pairs]
        better[name] = all(wins)
        what = f"fusion is better than {SYSTEMS[name][0]}"
        lines.append(f"{what} with {sum(wins)} of {len(wins)} seeds")
    if not better["own"]:
        verdict = "the other tasks' adapters do not reliably help"
    elif better["head"]:
        verdict = "other tasks help, and fusing them is better than taking the most related one"
    else:
        verdict = "other tasks help, but these seeds do not show that fusing adapters is better "
        verdict += "than taking the right one: `name`"
    return "\n".join([*lines, f"so on this target {verdict}."])


def main(argv=None):
    words = "Adapters, their fusion and its controls on docstrings, with MiniLM, on two cores."
    out = parse(Options, argv, "python -m experiments.demo", words).out
    find_minilm()  # or an error that says how to install it
    print("reading the docstrings of Python, NumPy and PyTorch", flush=True)
    build_tasks(out / "data", random.Random(0))
    for path in sorted(out.glob("data/*/*.jsonl")):
        lines = path.read_text(encoding="utf-8").splitlines()
        print(f"{path}: {len(lines)} examples, the first: {lines[0]}")
    sources, results = train_sources(out, "minilm"), compare(out, "minilm")

    print("\nAccuracy on the development sets, in %")
    print("", *table(*source_table(sources | {TARGET: results["own"][0]})), sep="\n")
    print("", *table(*system_table(results)), sep="\n")
    print(f"\n{conclusion(results)}")
    own, fusion, page, figures = (out / x for x in "own-0 fusion-0 page.html figures".split())
    print(f"\nnext: python -m experiments.curves {own} {fusion}")
    print(f"      python -m experiments.predict {fusion} 'The sum.' 'total' --explain {page}")
    print(f"      python -m experiments.figure4 {fusion} --baseline {own} --out {figures}")


if __name__ == "__main__":
    run_command("demo.py", main)
