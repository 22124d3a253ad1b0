"""What the cells of walkthrough.py use: `from page import *` in a notebook of this folder."""

import contextlib
import inspect
import io
import json
import os
import random
import sys
import textwrap
from pathlib import Path

root = Path(__file__).resolve().parent.parent
os.chdir(root)
sys.path.insert(0, str(root))

import matplotlib.pyplot as plt
import pandas as pd
import torch
import torch.nn.functional as F
from IPython.display import Markdown, display

import train
from adapter import Adapter, AdapterConfig, Head, add_adapter
from bert import AddNorm, Bert, Layer
from data import batches, collate, get_task, load_split
from experiments import demo, study
from experiments.fusion_weights import heat_map, mean_weights
from experiments.load_run import load_run
from experiments.report import markdown, with_interval
from fast.low_rank import low_rank
from formats.rows import Source
from formats.tokenizer import load_tokenizer
from fusion import Fusion, add_fusion, fusion_regularization

plt.rcParams["figure.dpi"] = 90
torch.set_printoptions(precision=3, sci_mode=False, linewidth=110)
torch.manual_seed(0)


def show(*things, first="", last=None):
    """The source of functions, methods and classes, as it stands in the repository today; or of it
    only the lines from the one with the text `first` to the one with the text `last`."""
    for thing in things:
        lines, number = inspect.getsourcelines(thing)
        if last:
            start, end = (next(i for i, s in enumerate(lines) if t in s) for t in (first, last))
            lines, number = lines[start : end + 1], number + start
        file = Path(inspect.getsourcefile(thing)).resolve().relative_to(root)
        code = textwrap.dedent("".join(lines))
        display(Markdown(f"`{file}`, line {number}:\n\n```python\n{code}```"))


def tabulate(rows, header):
    display(Markdown(markdown(rows, header)))


def quietly(function, *values):
    """Calls a function without what it prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        return function(*values)


def at_chosen_rates(rows):
    """Test accuracy by seed, in points; each at the learning rate that is best on the development
    sets of all other seeds."""
    dev = rows.pivot(index="seed", columns="lr", values="best_dev")
    test = rows.pivot(index="seed", columns="lr", values="best_test")
    rates = {seed: dev.drop(seed).mean().idxmax() for seed in dev.index}
    return pd.Series({seed: 100 * test.loc[seed, lr] for seed, lr in rates.items()})
