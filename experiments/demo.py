"""Composition on a laptop, without any hub: two skills, learned apart from each other, and a target
that needs both.

    make demo
    python -m experiments.demo [--out runs/demo]        # the same, in an environment of your own

The encoder is MiniLM-L6, a small BERT from PyPI; the texts are the docstrings of Python's library,
PyTorch and NumPy. An example is a sentence and a name, and may be wrong in two ways: the name is
that of another docstring, and the sentence's words are shuffled.

    match   does the name belong to the sentence?    (Python's library and PyTorch)
    order   are the words in their order?            (Python's library and PyTorch)
    both    which of the four?                       (NumPy, 240 of its 960 training examples)

In either source the other fault is there in half of the examples, and says nothing of the label.
Whoever has one skill alone is right about one of two questions, and has to guess the other.
"""

import json
import os
import random
from pathlib import Path

import torch

from experiments import composition, grid, report
from experiments.load_run import load_run
from experiments.skills import build_tasks
from formats.encoder import find_minilm
from runtime.command import Parser, run_command

OPTIONS = {  # by stage
    "adapter": "--lr 1e-3 --epochs 8 --patience 8",
    "head": "--lr 2e-3 --epochs 4 --patience 4",
    "fusion": "--lr 5e-4 --epochs 6 --patience 6",
}
SKILLS = ["match", "order"]
SOURCE_EPOCHS = "2"
SYSTEMS = "own head_on_match head_on_order fusion".split()
COMMON = "--max-length 40 --batch-size 16 --limit-dev 160 --device cpu --dtype float32".split()


def parse(out):
    """The options of experiments.composition: the runs of the demo are a part of its."""
    words = ["--model", "minilm", "--data-dir", str(out / "data"), "--out", str(out)]
    words += ["--target", "both", "--sources", *(str(out / "runs" / skill) for skill in SKILLS)]
    words += ["--systems", *SYSTEMS, "--seeds", "0", "1", "2", "--train-examples", "240"]
    words += [f"--{stage}-options={options}" for stage, options in OPTIONS.items()]
    words += ["--jobs", str(min(os.cpu_count(), 8)), "--overwrite", "--", *COMMON]
    return composition.parse(words)


def train_all(args):
    """The skills' adapters, and then the study. Returns {skill: accuracy}, and the study's rows."""
    last = ["--seed", "0", "--epochs", SOURCE_EPOCHS]
    cells = {(s,): grid.cell(args, s, "adapter", ["--task", s, *last]) for s in SKILLS}
    study = composition.cells_of(args)
    print(f"\ntraining {len(cells) + len(study)} runs, {args.jobs} at a time", flush=True)
    skills, failed = grid.run(args, ["task"], cells)
    grid.end(failed)
    rows, failed = grid.run(args, composition.COLUMNS, study)
    grid.end(failed)
    return dict(zip(skills["task"], skills["accuracy"], strict=True)), rows


def weights_of_match(run):
    """[layers, 2]: its mean weight on the tokens of the sentences, and on those of the names."""
    sentences, names, n = [], [], run.adapters.index("match")
    for found in run.fusion_weights(run.split()):
        s = torch.stack(found["weights"]["output"])[:, :, n]  # [layers, T]
        end = found["tokens"].index("[SEP]")
        sentences.append(s[:, 1:end])
        names.append(s[:, end + 1 : -1])
    return torch.stack([torch.cat(part, 1).double().mean(1) for part in (sentences, names)], 1)


def verdict(rows):
    """What follows from the table, in a sentence."""
    points = composition.points_of(rows)
    least = {n: (points["fusion"] - points[n]).min() for n in points if n != "fusion"}
    nearest = min(least, key=least.get)
    title, _, _ = grid.system(nearest)
    if least[nearest] <= 0:
        return f"The fusion is not ahead with every seed: {title} equals or beats it."
    lead = f"by {least[nearest]:.1f} points at the least ({title})"
    return f"With every seed the fusion is ahead of every control, {lead}."


def main(argv=None):
    parser = Parser("python -m experiments.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="default runs/demo")
    out = parser.parse_args(argv).out
    find_minilm()  # or an error that says how to install it
    print("reading the docstrings of Python, PyTorch and NumPy", flush=True)
    build_tasks(out / "data", random.Random(0), SKILLS)
    for task in (*SKILLS, "both"):
        path = out / "data" / task / "train.jsonl"
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        print(f"\n{task}: {len(rows)} examples to train on, for instance")
        lines = [[row["text_a"], row["text_b"], row["label"]] for row in rows[:4]]
        print(report.markdown(lines, ["sentence", "name", "label"]), flush=True)

    skills, rows = train_all(parse(out))
    match, order = (skills[skill] for skill in SKILLS)
    print(
        f"\nThe skills, on their own tasks: match {100 * match:.1f} %, order {100 * order:.1f} %."
    )
    print(f"With one of them the target's ceiling is about {50 * max(match, order):.0f} %: half of")
    print("that skill's accuracy, because the other question is guessed. With both it is ", end="")
    print(f"{100 * match * order:.0f} %.\n\n{report.markdown(*composition.table(rows))}")
    print(verdict(rows), "\n")
    run = load_run(out / "runs" / "fusion-240-0")
    lines = [[str(i), *pair] for i, pair in enumerate(weights_of_match(run).tolist(), 1)]
    print("The weight of `match` in fusion-240-0, on tokens of the sentence and of the name:")
    print(report.markdown(lines, ["layer", "sentence", "name"]))


if __name__ == "__main__":
    run_command("demo.py", main)
