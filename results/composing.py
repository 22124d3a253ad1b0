"""`python -m results.composing OUT` writes the tasks of experiments/skills.py into OUT. `--import
results.composing` lets a study compare every way to compose; results/composing.sh calls both.
`python -m results.composing` alone, of the rows in composing_*.csv, draws composing.png, and writes
every difference between two of them, paired by seed, with its 95 % interval."""

import itertools
import random
import sys
from pathlib import Path

import pandas as pd

import examples.composing  # noqa: F401  (its stages)
from experiments.report import with_interval, write_text
from experiments.skills import build_tasks
from experiments.study import SYSTEMS, figure

KINDS = {
    "sum": "sum",
    "average": "average",
    "gates": "sigmoid gates",
    "scaled": "attention, scores over √d",
    "top_one": "attention, the largest s alone",
    "router": "gate from h alone",
    "scalearn": "ScaLearn",
    "scalearn_uniform": "ScaLearn, uniform",
}
for kind, title in KINDS.items():
    SYSTEMS[kind] = (title, "fusion", f"--import examples.composing --fusion {kind}", "all")
SYSTEMS["soup"] = ("AdapterSoup, new head", "soup", "--import examples.composing", "all")
SYSTEMS["joint"] = ("attention, Φ trained with Ψ", "joint", "--import examples.composing", "all")

PANELS = {"two": "both, N = 2", "eight": "both, N = 8", "asked": "asked, N = 2"}


def draw(out):
    """A panel for each target; the systems are sorted by their mean on eight adapters."""
    SYSTEMS["fusion"] = ("attention", "", "", "")
    SYSTEMS["mean"] = ("even weights, V trained", "", "", "")
    SYSTEMS["head_on_order"] = ("head on order", "", "", "")
    rows = {name: pd.read_csv(out / f"composing_{name}.csv") for name in PANELS}
    means = rows["eight"].groupby("system")["accuracy"].mean()
    for name, of in rows.items():
        of = of.assign(task=PANELS[name], limit_train=of["train_examples"])
        rows[name] = of.sort_values("system", key=lambda n: n.map(means), ascending=False)
    figure(out / "composing.png", pd.concat(rows.values()))
    lines = ["target,system,minus,points (95 % interval)"]
    for name, of in rows.items():
        points = 100 * of.pivot(index="seed", columns="system", values="accuracy")
        for one, other in itertools.combinations(of["system"].unique(), 2):
            lines.append(f"{name},{one},{other},{with_interval(points[one] - points[other])}")
    write_text(out / "composing_differences.csv", "\n".join(lines) + "\n")


if __name__ == "__main__":
    if sys.argv[1:]:
        build_tasks(Path(sys.argv[1]), random.Random(0))
    else:
        draw(Path("results"))
