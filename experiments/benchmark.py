"""What does a step cost, in time and memory, here and in the reference library?

    make .venv-peer/installed                             # the reference, in its own environment
    python -m experiments.benchmark --peer-python .venv-peer/bin/python --out table.md
    python -m experiments.benchmark --rows "fusion step" --repeats 3          # our side alone

Every measurement runs in a process of its own (benchmark_worker.py): an encoder of BERT-base's size
with random weights, and full batches of 128 tokens. The reference loads what ours has saved, and
must compute the same loss. In every repeat their processes follow each other, and a ratio is taken
within a repeat, so that other load on the machine hardly changes it."""

import json
import os
import subprocess
import sys
import tempfile

import pandas as pd
import torch

from experiments.report import markdown, write_text
from runtime.command import Parser, count, run_command
from runtime.processes import choose_device

ROWS = {"stage 1 step": 1, **{f"fusion step, N = {n}": n for n in (1, 4, 16, 64)}}
ROWS |= {"inference, one adapter": 1, **{f"inference, fusion N = {n}": n for n in (1, 4, 16)}}
COLUMNS = "row;side;seconds;ratio to ours;peak memory, GB".split(";")


def parse(argv):
    parser = Parser("python -m experiments.benchmark", description=__doc__)
    add, reference = parser.add_argument, "experiments/requirements-peer.txt"
    add("--peer-python", help=f"a Python with {reference}; without it only ours is measured")
    add("--rows", nargs="+", default=[""], help="only rows with one of these texts in their names")
    add("--repeats", type=count, default=5)
    add("--batch", type=count, default=8, help="examples; a quarter of them with 64 adapters")
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--dtype", default="float32", choices=["float32", "bfloat16"])
    add("--out", help="a file for the table, in Markdown")
    return parser.parse_args(argv)


def run_worker(python, spec):
    """What one process has measured: {"loss", "trained", "seconds", "memory"}"""
    own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(torch.get_num_threads())}
    words = [python, "-m", "experiments.benchmark_worker", json.dumps(spec)]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **own})
    if done.returncode != 0:
        raise ValueError(f"{spec['side']}: {' '.join(done.stderr.strip().splitlines()[-1:])}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(name, args, root):
    """{"ours" | "peer": a DataFrame with a row for each repeat} of one row of the table"""
    spec = {"N": ROWS[name], "fused": "fusion" in name, "trains": "step" in name, "root": root}
    spec |= {"batch": max(args.batch // (4 if ROWS[name] == 64 else 1), 1)}
    spec |= {"device": args.device, "dtype": args.dtype}
    pythons, found = {"ours": sys.executable}, []
    if args.peer_python:
        pythons["peer"] = args.peer_python
        run_worker(sys.executable, {**spec, "side": "save"})
    for _ in range(args.repeats):
        found += [{"side": s, **run_worker(p, {**spec, "side": s})} for s, p in pythons.items()]
    found = pd.DataFrame(found)
    if not found["loss"].max() - found["loss"].min() <= (1e-5 if args.dtype == "float32" else 0.1):
        raise ValueError(f"{name}: both sides must have one loss, not {[*found['loss']]}")
    return {side: of.reset_index() for side, of in found.groupby("side")}


def spread(values):
    """median (smallest–largest)"""
    return f"{values.median():.3f} ({values.min():.3f}–{values.max():.3f})"


def main(argv=None):
    args, rows = parse(argv), []
    choose_device(args.device, args.dtype)  # or an error
    names = [name for name in ROWS if any(text in name for text in args.rows)]
    if not names:
        raise ValueError(f"--rows: there are only {'; '.join(ROWS)}")
    for name in names:
        print(name, flush=True)
        with tempfile.TemporaryDirectory() as root:
            found = measure(name, args, root)
        for side, of in found.items():
            ratio = spread(of["seconds"] / found["ours"]["seconds"])
            rows.append([name, side, spread(of["seconds"]), ratio, of["memory"].max() / 1e9])
    about = f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.batch} × 128"
    text = f"{markdown(rows, COLUMNS)}\n{about} tokens, {args.device}, {args.dtype}\n"
    print(text)
    if args.out:
        write_text(args.out, text)


if __name__ == "__main__":
    run_command("benchmark", main)
