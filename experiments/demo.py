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

In either source the other fault is there in half of the examples, and says nothing of the label."""

import os
import random
import shlex
import sys
from pathlib import Path

from experiments import composition, grid, report, study
from experiments.skills import SKILLS, build_tasks
from formats.encoder import find_minilm
from formats.rows import read_rows
from runtime.command import Parser, run_command

COMMAND = """--model minilm --target both --seeds 0 1 2 --train-examples 240 --overwrite
    --sources match order --systems own head_on_ fusion --source-options='--lr 1e-3 --epochs 2'
    --adapter-options='--lr 1e-3 --epochs 8 --patience 8'
    --head-options='--lr 2e-3 --epochs 4 --patience 4'
    --fusion-options='--lr 5e-4 --epochs 6 --patience 6'"""
COMMON = "-- --max-length 40 --batch-size 16 --limit-dev 160 --device cpu"


def parse(out):
    """The options of experiments.composition: the runs of the demo are a part of its."""
    words = shlex.split(COMMAND) + ["--data-dir", str(out / "data"), "--out", str(out)]
    words += ["--jobs", str(min(os.cpu_count(), 8)), *COMMON.split()]
    return composition.parse(words)


def train_all(args):
    """The study, and the adapters of the skills, which it needs. Returns {skill: accuracy}, and the
    study's rows."""
    cells = grid.with_needs(study.cells_of(args, args.seeds).values())
    print(f"\ntraining {len(cells)} runs, {args.jobs} at a time", flush=True)
    rows, failed = study.run(args)
    grid.end(failed)
    return {n: grid.row_of({}, cells[f"source-{n}-0"])["accuracy"] for n in args.sources}, rows


def next_commands(out):
    """{why: the words behind `python`} of what fits that which the demo has left in `out`"""
    fusion, picture = out / "runs" / "fusion-both-240-0", out / "example.png"
    example = "Return the sum of the array elements", "sum"
    ask = ["-m", "experiments.predict", fusion, *example, "--picture", picture]
    draw = ["-m", "experiments.fusion_weights", fusion, "--out", out / "weights"]
    return {
        "Ask the fusion, and see its weights at every token:": ask,
        "See what it takes from each adapter at every layer, in the mean (Figure 6):": draw,
    }


def verdict(rows):
    """What follows from the table, in a sentence."""
    points = study.points_of(rows)
    least = {n: (points["fusion"] - points[n]).min() for n in points if n != "fusion"}
    nearest = min(least, key=least.get)
    title = study.system(nearest)[0]
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
        rows = read_rows(out / "data" / task / "train.jsonl")
        print(f"\n{task}: {len(rows)} examples to train on, for instance")
        lines = [[row["text_a"], row["text_b"], row["label"]] for row in rows[:4]]
        print(report.markdown(lines, ["sentence", "name", "label"]), flush=True)

    skills, rows = train_all(parse(out))
    match, order = (skills[skill] for skill in SKILLS)
    one, both = max(match, order) / 2, match * order
    print(f"""
The skills, each on its own task: match {match:.1%}, order {order:.1%}.
On the target, one of them can be expected to give about {one:.0%}, half of its own accuracy,
because the other question is guessed; both together about {both:.0%}.
""")
    print(report.markdown(*study.table(rows)))
    print(verdict(rows))
    for why, words in next_commands(out).items():
        print(f"\n{why}\n{shlex.join(map(str, [os.path.relpath(sys.executable), *words]))}")


if __name__ == "__main__":
    run_command("demo.py", main)
