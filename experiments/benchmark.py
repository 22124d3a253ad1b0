"""What does a step cost, in time and memory, here and in the reference library?

    make .venv-peer/installed                             # the reference, in its own environment
    python -m experiments.benchmark --peer-python .venv-peer/bin/python --out table.md
    python -m experiments.benchmark --rows "fusion step" --repeats 3          # our side alone

Every measurement runs in a process of its own (benchmark_worker.py). Ours and the reference's load
the same files (the same random weights, the same batch), and must compute the same loss. In every
repeat their processes follow each other, and a ratio is taken within a repeat; so it hardly depends
on other load.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
from safetensors.torch import save_file

from adapter import AdapterConfig, Head, add_adapter, save_adapter, save_head
from bert import Bert, BertConfig
from experiments.report import markdown, write_text
from fusion import add_fusion, save_fusion
from runtime.command import run_command
from runtime.processes import choose_device
from runtime.settings import COUNT, option, parse, recorded_values

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = "row;ours, s;reference, s;reference / ours;peak memory, GB;reference, GB;floor, s".split(
    ";"
)
HEAD = {"head_type": "classification", "num_labels": 2, "layers": 2}


@dataclass(frozen=True)
class Options:
    peer_python: str | None = option(
        None, "a Python with experiments/requirements-peer.txt; without it only ours is measured"
    )
    rows: tuple = option((), "only the rows with one of these texts in their names")
    repeats: int = option(5, valid=COUNT)
    batch: int = option(8, "examples; a quarter of it for a step with 64 adapters", valid=COUNT)
    length: int = option(128, "tokens, without padding", valid=COUNT)
    model: str | None = option(None, "default: random weights, the size of BERT-base")
    device: str = option("cpu", choices=["cpu", "cuda"])
    dtype: str = option("float32", choices=["float32", "bfloat16"])
    out: Path | None = option(None, "a file for the table, in Markdown")


def wanted_rows(options):
    """{name: row}"""
    small = max(options.batch // 4, 1)

    def row(kind, adapters, fused, batch=options.batch):
        return {"kind": kind, "adapters": adapters, "fused": fused, "batch": batch}

    rows = {
        "stage 1 step": row("step", 1, False),
        **{f"fusion step, N = {n}": row("step", n, True) for n in (1, 4, 16)},
        f"fusion step, N = 64, {small} × {options.length}": row("step", 64, True, small),
        "inference, plain encoder": row("inference", 0, False),
        "inference, one adapter": row("inference", 1, False),
        **{f"inference, fusion N = {n}": row("inference", n, True) for n in (1, 4, 16, 64)},
    }
    wanted = [name for name in rows if any(text in name for text in options.rows or [""])]
    if not wanted:
        raise ValueError(f"--rows: there are only {'; '.join(rows)}")
    return {name: rows[name] for name in wanted}


def columns_of(row, options, root):
    """{column: what its process is to do}"""
    place = {"root": root, "device": options.device, "dtype": options.dtype}
    ours = {**row, **place, "side": "ours"}
    columns = {"ours": ours}
    if row["kind"] == "step" and options.dtype == "float32":
        columns["bfloat16"] = {**ours, "dtype": "bfloat16"}
    if options.peer_python:
        columns["reference"] = {**ours, "side": "peer"}
    return columns


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
    (root / "head").mkdir()
    save_head(head, bert, "task", root / "head")
    names = [f"a{i}" for i in range(max(row["adapters"] for row in rows))]
    for name in names:
        add_adapter(bert, name, AdapterConfig.pfeiffer())
        noise(bert)
        save_adapter(bert, name, root / name)
    for n in {row["adapters"] for row in rows if row["fused"]}:
        add_fusion(bert, names[:n])
        noise(bert)
        save_fusion(bert, root / f"fusion{n}")
    for batch in {row["batch"] for row in rows}:
        ids = torch.randint(0, bert.config.vocab_size, (batch, length))
        inputs = {"input_ids": ids, "token_type_ids": ids * 0, "attention_mask": ids * 0 + 1}
        labels = torch.randint(0, 2, (batch,))
        save_file({**inputs, "labels": labels}, root / f"batch{batch}.safetensors")


def measure(columns, repeats, peer_python=None):
    """{column: {"seconds": [of each repeat], ...}}. columns: of `columns_of`"""
    own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(torch.get_num_threads())}
    environment = {**os.environ, **own}
    results = {column: {} for column in columns}
    for _ in range(repeats):
        for column, spec in columns.items():
            python = os.path.abspath(peer_python if spec["side"] == "peer" else sys.executable)
            words = [python, "-m", "experiments.benchmark_worker", json.dumps(spec)]
            done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
            if done.returncode != 0:
                why = done.stderr.strip().splitlines()[-1:]
                raise ValueError(f"{column}: status {done.returncode}: {' '.join(why)}")
            for name, value in json.loads(done.stdout.splitlines()[-1]).items():
                results[column].setdefault(name, []).append(value)
            loss, expected = results[column]["loss"][0], results["ours"]["loss"][0]
            if not abs(loss - expected) <= (1e-5 if spec["dtype"] == "float32" else 0.1):
                raise ValueError(f"{column}: the loss is {loss}, in ours {expected}")
    return results


def spread(values, digits=2):
    """median (smallest–largest)"""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def table_rows(name, results):
    """Of one row: ours, and what the reference took in the same repeats."""
    rows, theirs = [], results.get("reference")
    for column, ours in results.items():
        if column == "reference":
            continue
        title = name if column == "ours" else f"{name}, {column}"
        reference = ratio = their_memory = "–"
        if theirs:
            pairs = zip(theirs["seconds"], ours["seconds"], strict=True)
            reference, ratio = spread(theirs["seconds"], 3), spread([a / b for a, b in pairs])
            their_memory = f"{max(theirs['memory']) / 1e9:.2f}"
        memory, floor = max(ours["memory"]) / 1e9, f"{statistics.median(ours['floor']):.3f}"
        seconds = spread(ours["seconds"], 3)
        rows.append([title, seconds, reference, ratio, memory, their_memory, floor])
    return rows


def main(argv=None):
    options = parse(Options, argv, "python -m experiments.benchmark", __doc__)
    choose_device(options.device, options.dtype)
    rows, cells = wanted_rows(options), []
    torch.manual_seed(0)
    bert = Bert.from_pretrained(options.model) if options.model else Bert(BertConfig())
    with tempfile.TemporaryDirectory() as root:
        write_inputs(bert, Path(root), rows.values(), options.length)
        for name, row in rows.items():
            print(name, flush=True)
            columns = columns_of(row, options, root)
            cells += table_rows(name, measure(columns, options.repeats, options.peer_python))
    about = f"{date.today()}, torch {torch.__version__}, {torch.get_num_threads()} threads"
    text = f"{markdown(cells, COLUMNS)}\n{about}: {recorded_values(options)}\n"
    print(text)
    if options.out:
        write_text(options.out, text)


if __name__ == "__main__":
    run_command("benchmark.py", main)
