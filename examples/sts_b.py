"""STS-B of GLUE (Cer et al., 2017), a regression: how alike are two sentences, from 0 to 5?

    python train.py --import examples.sts_b --stage adapter --task sts_b
    python -m experiments.evaluate runs/sts_b --import examples.sts_b
    python -m experiments.predict runs/sts_b "A man sleeps." "A dog runs." --import examples.sts_b

The loss is the squared error, as in GLUE's baselines; the epoch with the highest Pearson
correlation is kept. Your own numbers may have any range, but predictions start near 0: scale them
to a few units. Of one text:

    python train.py --import examples.sts_b --stage adapter --task regression --train-file my.csv"""

import math
import re

import torch.nn.functional as F

from data import TASKS, Task

# not all that float reads: 1_5, inf, digits of other scripts
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)


def pearson(labels, predictions):
    """Their correlation, -1 to 1, or 0 if either is constant; labels, predictions: [examples]"""
    x, y = (values.double() - values.double().mean() for values in (labels, predictions))
    size = (x.norm() * y.norm()).item()
    return (x @ y).item() / size if size > 0 else 0.0


def squared_error(logits, labels):
    return F.mse_loss(logits[:, 0], labels)  # of [B, 1] and [B]


def number_of(logits):
    return logits[:, 0]  # [B, 1] -> [B]


class Regression(Task):
    bounds = -math.inf, math.inf

    def label_index(self, value):
        is_number = NUMBER.fullmatch(str(value).strip())  # str(True) is none
        number, (least, most) = float(value) if is_number else math.nan, self.bounds
        if not (math.isfinite(number) and least <= number <= most):
            raise ValueError(f"label {value!r:.100} is not a number from {least} to {most}")
        return number

    def answer(self, logits):
        return {self.labels[0]: logits.item()}


class Similarity(Regression):
    bounds = 0, 5  # in the hub's test set -1


OF_NUMBERS = {"labels": ["score"], "loss": squared_error, "prediction": number_of}
OF_NUMBERS["scores"] = {"pearson": pearson}
STS_B = ("nyu-mll/glue", "stsb", None)
TASKS["sts_b"] = Similarity(STS_B, ["sentence1", "sentence2"], **OF_NUMBERS)
TASKS["regression"] = Regression(None, ["text_a"], **OF_NUMBERS)  # or ["text_a", "text_b"]
