"""STS-B of GLUE (Cer et al., 2017), a regression: how alike are two sentences, from 0 to 5?

    python train.py --import examples.sts_b --stage adapter --task sts_b
    python -m experiments.evaluate runs/sts_b --import examples.sts_b
    python -m experiments.predict runs/sts_b "A man sleeps." "A dog runs." --import examples.sts_b

The loss is the squared error, as in GLUE's baselines; the epoch with the highest Pearson
correlation is kept."""

import torch.nn.functional as F

from data import TASKS, Task


def pearson(labels, predictions):
    """Their correlation, -1 to 1, or 0 if either is constant; labels, predictions: [examples]"""
    x, y = (values.double() - values.double().mean() for values in (labels, predictions))
    size = (x.norm() * y.norm()).item()
    return (x @ y).item() / size if size > 0 else 0.0


def squared_error(logits, labels):
    """[B, 1] and [B] -> the mean"""
    return F.mse_loss(logits[:, 0], labels)


def number_of(logits):
    """[B, 1] -> [B]"""
    return logits[:, 0]


class Similarity(Task):
    def label_index(self, value):
        number = float(value)
        if not 0 <= number <= 5:  # in the hub's test set -1
            raise ValueError(f"label {value!r:.100} is not a number from 0 to 5")
        return number

    def answer(self, logits):
        return {self.labels[0]: logits.item()}


TASKS["sts_b"] = Similarity(
    hub=("nyu-mll/glue", "stsb", None),
    columns=["sentence1", "sentence2"],
    labels=["score"],
    loss=squared_error,
    predict=number_of,
    scores={"pearson": pearson},
)
