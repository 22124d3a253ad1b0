"""STS-B of GLUE (Cer et al., 2017), a regression: how alike are two sentences, from 0 to 5?

    python examples/sts_b.py --stage adapter --task sts_b
    python -m experiments.evaluate runs/sts_b --import examples.sts_b
    python -m experiments.predict runs/sts_b "A man sleeps." "A dog runs." --import examples.sts_b

The loss is the squared error, as in GLUE's baselines. The best epoch is the one with the highest
Pearson correlation.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # found from any directory

import train
from data import TASKS, Classification, Task
from runtime.command import run_command


def pearson(labels, predictions):
    """Their correlation, -1 to 1; labels, predictions: [examples]. 0 where either is constant."""
    x, y = (values.double() - values.double().mean() for values in (labels, predictions))
    size = (x.norm() * y.norm()).item()
    return (x @ y).item() / size if size > 0 else 0.0


class Regression(Classification):
    """A number for each example; the head is one for a single class."""

    dtype = torch.float32
    scores = {"pearson": pearson}

    def loss(logits, labels):
        return F.mse_loss(logits[:, 0], labels)

    def predict(logits):
        return logits[:, 0]

    def label(task, value):
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = -1.0
        if not 0 <= number <= 5:
            raise ValueError(f"label {value!r:.100} is not a number from 0 to 5")
        return number


TASKS["sts_b"] = Task(
    hub=("nyu-mll/glue", "stsb", None),
    columns=("sentence1", "sentence2"),
    labels=("score",),
    sizes=(5749, 1500),
    type=Regression,
)

if __name__ == "__main__":
    run_command("sts_b.py", train.main)
