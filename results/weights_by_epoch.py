"""What does a fusion come to trust, and when? Its weights after every epoch, in log.jsonl.

    python train.py --stage fusion --task rte --adapters runs/mnli runs/qqp runs/rte \\
        --import results.weights_by_epoch

A line of log.jsonl gets "weights" and "weights_cls": of each adapter the mean over the layers that
have it, and over all tokens of the development set or over [CLS] alone. Those of the best epoch are
in metrics.json, too. Training itself is the same; an epoch's evaluation takes twice as long.
"""

import torch

import train
from experiments.fusion_weights import mean_weights_as_trained
from fusion import fusions

evaluate = train.evaluate


def evaluate_with_weights(model, task, examples, batch_size):
    """As train.evaluate, and {"weights": {adapter: mean}, "weights_cls": the same} of a fusion."""
    scores = evaluate(model, task, examples, batch_size)
    if found := fusions(model.bert):
        names = found[0][1].name.split(",")
        means = mean_weights_as_trained(model, examples, ("all", "cls"))
        for key, tokens in (("weights", "all"), ("weights_cls", "cls")):
            of_layers = torch.stack([*means[tokens].values()])  # [layers, N], NaN where it is not
            scores[key] = dict(zip(names, of_layers.nanmean(0).tolist(), strict=True))
    return scores


train.evaluate = evaluate_with_weights
