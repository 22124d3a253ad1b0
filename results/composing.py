"""`python -m results.composing OUT` writes the tasks of experiments/skills.py into OUT. `--import
results.composing` lets a study compare every way to compose; results/composing.sh calls both.
`python -m results.composing` alone draws composing.png of the rows in composing_*.csv."""

import random
import sys
from pathlib import Path

import pandas as pd

import examples.composing  # noqa: F401  (its stages)
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
    for name, title in {"fusion": "attention", "mean": "even weights, V trained"}.items():
        SYSTEMS[name] = (title, *SYSTEMS[name][1:])
    files = {name: out / f"composing_{name}.csv" for name in PANELS}
    rows = {name: pd.read_csv(path) for name, path in files.items() if path.is_file()}
    means = rows["eight"].groupby("system")["accuracy"].mean()
    for name, of in rows.items():
        of = of.assign(task=PANELS[name], limit_train=of["train_examples"])
        rows[name] = of.sort_values("system", key=lambda n: n.map(means), ascending=False)
    figure(out / "composing.png", pd.concat(rows.values()))


if __name__ == "__main__":
    if sys.argv[1:]:
        build_tasks(Path(sys.argv[1]), random.Random(0))
    else:
        draw(Path("results"))
