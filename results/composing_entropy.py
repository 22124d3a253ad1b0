"""python -m results.composing_entropy, after composing.sh: the entropy of s before training and at
its end, and the accuracy, of attention with and without √d. Trains the runs that are missing."""

import math
from itertools import product
from unittest.mock import patch

import pandas as pd
import torch

import train
from experiments.load_run import load_run
from experiments.skills import OTHERS, SKILLS

TARGETS, RATES = {"eight": [*SKILLS, *OTHERS], "two": [*SKILLS]}, {1: "5e-4", 2: "2e-3"}
KINDS = {"fusion": "", "scaled": "--import examples.composing --fusion scaled"}


def measure(run):
    """(entropy of s in nats, mean over layers and tokens; [layers, N], mean weights over tokens)"""
    found = [one["weights"]["output"] for one in run.fusion_weights(run.split())]
    s = torch.cat([torch.stack(of).double() for of in found], 1)  # [layers, tokens, N]
    return -torch.special.xlogy(s, s).sum(-1).mean().item(), s.mean(1)


rows, place = [], "runs/composing"
for (target, sources), kind, i, seed in product(TARGETS.items(), KINDS, RATES, range(5)):
    out = f"{place}/{target}/runs"
    words = f"""--model minilm --data-dir {place}/data --max-length 40 --batch-size 16 --task both
        --stage fusion --limit-train 240 --lr {RATES[i]} --epochs 6 {KINDS[kind]} --seed {seed}
        --out {out}/{kind}-both-240-setting{i}-{seed} --resume --adapters"""
    result = train.main([*words.split(), *(f"{out}/source-{name}-{seed}" for name in sources)])
    with patch("experiments.load_run.restore"):  # as it was built, before training
        start, _ = measure(load_run(result["out"]))
    end, s = measure(load_run(result["out"]))
    row = [target, kind, RATES[i], seed, result["accuracy"], math.log(len(sources)), start, end]
    rows.append([*row, (s.max(1).values > 0.9).sum().item(), *s.max(0).values[:2].tolist()])
names = "target system lr seed accuracy ln_N at_step_0 at_end layers_above_0.9 match order".split()
pd.DataFrame(rows, columns=names).round(4).to_csv("results/composing_entropy.csv", index=False)
