"""What the cells of walkthrough.py use: `from page import *` in a notebook of this folder."""

import contextlib
import csv
import inspect
import io
import json
import os
import random
import sys
import textwrap
import time
import warnings
from pathlib import Path

root = Path(__file__).resolve().parent.parent
os.chdir(root)
sys.path.insert(0, str(root))
warnings.filterwarnings("ignore", message="IProgress not found")  # notebooks' progress bars

import datasets
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from IPython.display import Image, Markdown, display

import train
from adapter import ADAPTERS, Adapter, AdapterConfig, Head, add_adapter
from bert import AddNorm, Bert, Layer, activate
from data import TASKS, batches, get_task, load_split
from experiments import composition, curves, demo, evaluate, grid
from experiments.fusion_weights import average, heat_map, inputs_of, normalized_entropy
from experiments.load_run import load_run
from experiments.multitask import MultitaskModel, task_probabilities
from experiments.report import markdown
from experiments.skills import build_tasks
from formats.tokenizer import load_tokenizer
from fusion import Fusion, add_fusion, fusion_regularization, fusion_weights

plt.rcParams["figure.dpi"] = 90
torch.set_printoptions(precision=3, sci_mode=False, linewidth=110)
torch.manual_seed(0)
datasets.disable_progress_bars()
started = time.monotonic()


def show(*things, folded=False):
    """The source of functions, methods and classes, as it stands in the repository today."""
    for thing in things:
        lines, number = inspect.getsourcelines(thing)
        file = Path(inspect.getsourcefile(thing)).resolve().relative_to(root)
        code = f"```python\n{textwrap.dedent(''.join(lines))}```"
        title = f"{file}, line {number}"
        if folded:
            text = f"<details><summary>{title}: {thing.__qualname__}, {len(lines)} lines</summary>"
            display(Markdown(f"{text}\n\n{code}\n\n</details>"))
        else:
            display(Markdown(f"`{title}`:\n\n{code}"))


def tabulate(rows, header):
    """A table on the page."""
    display(Markdown(markdown(rows, header)))


def quietly(function, *values):
    """Calls a function without what it prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        return function(*values)


def read_table(path):
    """The rows of a CSV file, {column: text} each."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def percent(share):
    return f"{100 * share:.1f} %"
