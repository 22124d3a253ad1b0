"""What does a step cost, in time and memory, here and in the reference library?

    make .venv-peer/installed                             # the reference, in its own environment
    python -m experiments.benchmark --peer-python .venv-peer/bin/python --out table.md
    python -m experiments.benchmark --rows "fusion step" --repeats 3          # our side alone

Every measurement runs in a process of its own (benchmark_worker.py). Ours and the reference's load
the same files, with the same random weights and the same batch, and must compute the same loss. In
every repeat their processes follow each other, and a ratio is taken within a repeat, so that other
load on the machine hardly changes it.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

import torch
from safetensors.torch import save_file

from adapter import AdapterConfig, Head, add_adapter, save_adapter, save_head
from bert import Bert, BertConfig
from experiments.report import markdown, write_text
from fusion import add_fusion, save_fusion
from runtime.command import Parser, count, run_command
from runtime.processes import choose_device

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = "row;ours, s;reference, s;reference / ours;peak memory, GB;reference, GB".split(";")
HEAD = {"head_type": "classification", "num_labels": 2, "layers": 2}


def parse(argv):
    parser = Parser("python -m experiments.benchmark", description=__doc__)
    add, reference = parser.add_argument, "experiments/requirements-peer.txt"
    add("--peer-python", help=f"a Python with {reference}; without it only ours is measured")
    add("--rows", nargs="+", default=[""], help="only rows with one of these texts in their names")
    add("--repeats", type=count, default=5)
    add("--batch", type=count, default=8, help="examples; a quarter of them with 64 adapters")
    add("--length", type=count, default=128, help="tokens, without padding")
    add("--model", help="default: random weights, the size of BERT-base")
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--dtype", default="float32", choices=["float32", "bfloat16"])
    add("--out", help="a file for the table, in Markdown")
    return parser.parse_args(argv)


def wanted_rows(args):
    """{name of a row: what the worker is to do, (kind, adapters, whether they are fused, batch)}"""
    batch, small = args.batch, max(args.batch // 4, 1)
    rows = {"stage 1 step": ("step", 1, False, batch)}
    rows |= {f"fusion step, N = {n}": ("step", n, True, batch) for n in (1, 4, 16)}
    rows[f"fusion step, N = 64, {small} × {args.length}"] = "step", 64, True, small
    rows["inference, plain encoder"] = "inference", 0, False, batch
    rows["inference, one adapter"] = "inference", 1, False, batch
    rows |= {f"inference, fusion N = {n}": ("inference", n, True, batch) for n in (1, 4, 16, 64)}
    wanted = {name: row for name, row in rows.items() if any(text in name for text in args.rows)}
    if not wanted:
        raise ValueError(f"--rows: there are only {'; '.join(rows)}")
    return wanted


def write_inputs(bert, root, rows, length):
    """What both sides read: an encoder, adapters, fusions and a head in AdapterHub's files, all
    weights random, and full batches without padding."""

    def noise(module):  # large enough for the loss to show one wrong part
        for p in module.parameters():
            if p.requires_grad:
                p.data.add_(torch.randn_like(p), alpha=0.03)

    bert.save_pretrained(root / "encoder")
    head = Head(HEAD, bert.config)
    noise(head)
    save_head(head, bert, "task", root / "head")
    names = [f"a{i}" for i in range(max(adapters for _, adapters, _, _ in rows))]
    for name in names:
        add_adapter(bert, name, AdapterConfig.pfeiffer())
        noise(bert)
        save_adapter(bert, name, root / name)
    for n in {adapters for _, adapters, fused, _ in rows if fused}:
        add_fusion(bert, names[:n])
        noise(bert)
        save_fusion(bert, root / f"fusion{n}")
    for batch in {batch for *_, batch in rows}:
        ids = torch.randint(0, bert.config.vocab_size, (batch, length))
        inputs = {"input_ids": ids, "token_type_ids": ids * 0, "attention_mask": ids * 0 + 1}
        inputs["labels"] = torch.randint(0, 2, (batch,))
        save_file(inputs, root / f"batch{batch}.safetensors")


def measure(row, args, root):
    """{column: {"seconds": [of each repeat], "memory": ..., ...}} of one row"""
    keys = "kind", "adapters", "fused", "batch"
    ours = dict(zip(keys, row, strict=True), root=root, device=args.device, dtype=args.dtype)
    columns = {"ours": {**ours, "side": "ours"}}
    if row[0] == "step" and args.dtype == "float32":
        columns["bfloat16"] = {**ours, "side": "ours", "dtype": "bfloat16"}
    if args.peer_python:
        columns["reference"] = {**ours, "side": "peer"}
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(torch.get_num_threads())}
    results = {column: {} for column in columns}
    for _ in range(args.repeats):
        for column, spec in columns.items():
            python = os.path.abspath(args.peer_python) if column == "reference" else sys.executable
            words = [python, "-m", "experiments.benchmark_worker", json.dumps(spec)]
            streams = {"capture_output": True, "text": True}
            done = subprocess.run(words, cwd=ROOT, env={**os.environ, **offline}, **streams)
            if done.returncode != 0:
                why = " ".join(done.stderr.strip().splitlines()[-1:])
                raise ValueError(f"{column}: status {done.returncode}: {why}")
            for name, value in json.loads(done.stdout.splitlines()[-1]).items():
                results[column].setdefault(name, []).append(value)
            loss, expected = results[column]["loss"][0], results["ours"]["loss"][0]
            if not abs(loss - expected) <= (1e-5 if spec["dtype"] == "float32" else 0.1):
                raise ValueError(f"{column}: the loss is {loss}, in ours {expected}")
    return results


def spread(values, digits):
    """median (smallest–largest)"""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def table_rows(name, results):
    """Of one row: ours in each precision, and what the reference took in the same repeats."""
    rows, theirs = [], results.get("reference")
    for column, ours in results.items():
        row = [name if column == "ours" else f"{name}, {column}", spread(ours["seconds"], 3)]
        row += ["–", "–", max(ours["memory"]) / 1e9, "–"]
        if theirs:
            pairs = zip(theirs["seconds"], ours["seconds"], strict=True)
            row[2:4] = spread(theirs["seconds"], 3), spread([a / b for a, b in pairs], 2)
            row[5] = max(theirs["memory"]) / 1e9
        rows += [row] if column != "reference" else []
    return rows


def main(argv=None):
    args, lines = parse(argv), []
    choose_device(args.device, args.dtype)  # or an error
    rows = wanted_rows(args)
    torch.manual_seed(0)
    bert = Bert.from_pretrained(args.model) if args.model else Bert(BertConfig())
    with tempfile.TemporaryDirectory() as root:
        write_inputs(bert, Path(root), rows.values(), args.length)
        for name, row in rows.items():
            print(name, flush=True)
            lines += table_rows(name, measure(row, args, root))
    about = f"{date.today()}, torch {torch.__version__}, {torch.get_num_threads()} threads, "
    about += f"{args.batch} × {args.length} tokens, {args.device}, {args.dtype}"
    text = f"{markdown(lines, COLUMNS)}\n{about}\n"
    print(text)
    if args.out:
        write_text(args.out, text)


if __name__ == "__main__":
    run_command("benchmark", main)
