"""`python -m results.composing OUT` writes the tasks of experiments/skills.py into OUT. `--import
results.composing` lets a study compare every way to compose; results/composing.sh calls both."""

import random
import sys
from pathlib import Path

import examples.composing  # noqa: F401  (its stages)
from experiments.skills import build_tasks
from experiments.study import SYSTEMS

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

if __name__ == "__main__":
    build_tasks(Path(sys.argv[1]), random.Random(0))
