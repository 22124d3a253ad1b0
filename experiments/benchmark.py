"""What does a step cost, in time and memory, here and in the reference library?

    make .venv-peer/installed                             # the reference, in its own environment
    python -m experiments.benchmark --peer-python .venv-peer/bin/python --out table.md
    python -m experiments.benchmark --rows "fusion step" --repeats 3          # our side alone

Every measurement runs in a process of its own (benchmark_worker.py). Ours and the reference's load
the same files (the same random weights, the same batch), and they must compute the same loss before
anything is timed. The processes of a group then take turns, repeat by repeat, while the others
sleep; so a ratio, which is taken within a repeat, hardly depends on other load.
"""

if __name__ == "__main__":
    from runtime.command import announce

    announce("benchmark.py")

import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from adapter import AdapterConfig, Head, add_adapter, save_adapter, save_head
from bert import Bert, BertConfig
from experiments.report import markdown, write_text
from fusion import add_fusion, save_fusion
from runtime.command import run_command
from runtime.processes import choose_device
from runtime.settings import COUNT, option, parse
from variants.folding import fold

ROOT = Path(__file__).resolve().parent.parent
HEAD = {"head_type": "classification", "num_labels": 2, "layers": 2}


@dataclass(frozen=True)
class Options:
    peer_python: str | None = option(
        None, "a Python with experiments/requirements-peer.txt; without it only ours is measured"
    )
    rows: tuple = option((), "only the rows with one of these texts in their names")
    repeats: int = option(5, "after one that warms up", valid=COUNT)
    batch: int = option(8, "examples; a quarter of it for 64 adapters", valid=COUNT)
    length: int = option(128, "tokens, without padding", valid=COUNT)
    model: str | None = option(
        None, "an encoder's directory; default: random weights, the size of BERT-base"
    )
    device: str = option("cpu", choices=["cpu", "cuda"])
    dtype: str = option("float32", choices=["float32", "bfloat16"])
    threads: int = option(torch.get_num_threads(), valid=COUNT)
    compile: bool = option(False, "measure our steps with torch.compile as well")
    out: Path | None = option(None, "a file for the table, in Markdown")


def row_groups(options):
    """[{name: row}]: the rows of a group take turns."""
    small = max(options.batch // 4, 1)
    suffix = f", {small} × {options.length}"

    def row(kind, adapters, fused, batch=options.batch):
        return {"kind": kind, "adapters": adapters, "fused": fused, "batch": batch}

    groups = [
        {"stage 1 step": row("step", 1, False)}
        | {f"fusion step, N = {n}": row("step", n, True) for n in (1, 4, 16)},
        {"stage 1 step" + suffix: row("step", 1, False, small)}
        | {"fusion step, N = 64" + suffix: row("step", 64, True, small)},
        {"inference, plain encoder": row("inference", 0, False)}
        | {"inference, one adapter": row("inference", 1, False)}
        | {f"inference, fusion N = {n}": row("inference", n, True) for n in (1, 4, 16, 64)},
    ]
    wanted = options.rows or [""]
    groups = [
        {name: row for name, row in group.items() if any(text in name for text in wanted)}
        for group in groups
    ]
    if not any(groups):
        raise ValueError(f"no row has {' or '.join(map(repr, options.rows))} in its name")
    return [group for group in groups if group]


def columns_of(row, options, same):
    """{column: what its process is to do}; same: what all processes have in common"""
    ours = {**row, **same, "side": "ours", "dtype": options.dtype, "fold": False, "compile": False}
    columns = {"ours": ours}
    if row["kind"] == "inference" and row["fused"]:
        columns["folded"] = {**ours, "fold": True}
    if row["kind"] == "step" and options.dtype == "float32":
        columns["bfloat16"] = {**ours, "dtype": "bfloat16"}
    if row["kind"] == "step" and options.compile:
        columns["compiled"] = {**ours, "compile": True}
    if options.peer_python:
        columns["reference"] = {**ours, "side": "peer"}
    return columns


# --------------------------------------------------------------------------------------------------
# What both sides read, and the floor


def write_inputs(bert, root, rows, length):
    """An encoder, adapters, fusions and a head in AdapterHub's files, all weights random, and full
    batches without padding."""

    def noise(parameters):  # large enough for the loss to show one wrong part
        with torch.no_grad():
            for p in parameters:
                p.add_(torch.randn_like(p), alpha=0.03)

    bert.save_pretrained(root / "encoder")
    head = Head(HEAD, bert.config)
    noise(head.parameters())
    (root / "head").mkdir()
    save_head(head, bert, "task", root / "head")
    names = [f"a{i}" for i in range(max(row["adapters"] for row in rows))]
    for name in names:
        add_adapter(bert, name, AdapterConfig.pfeiffer())
        noise(p for p in bert.parameters() if p.requires_grad)
        save_adapter(bert, name, root / name)
    for n in {row["adapters"] for row in rows if row["fused"]}:
        add_fusion(bert, names[:n])
        noise(p for p in bert.parameters() if p.requires_grad)
        save_fusion(bert, root / f"fusion{n}")
    for batch in {row["batch"] for row in rows}:
        ids = torch.randint(0, bert.config.vocab_size, (batch, length))
        inputs = {"input_ids": ids, "token_type_ids": ids * 0, "attention_mask": ids * 0 + 1}
        labels = torch.randint(0, 2, (batch,))
        save_file({**inputs, "labels": labels}, root / f"batch{batch}.safetensors")


def multiply_adds(config, row, length, folded=False):
    """How many our own form of a row takes, counted without computing anything. A training step
    needs no gradient of frozen weights and none below the first adapter, and of the last layer only
    what [CLS] reads."""
    with torch.device("meta"):
        bert = Bert(config).requires_grad_(False)
        for i in range(row["adapters"]):
            add_adapter(bert, f"a{i}", AdapterConfig.pfeiffer())
        if row["fused"]:
            add_fusion(bert, [f"a{i}" for i in range(row["adapters"])])
        head = Head(HEAD, config)
        ids = torch.zeros(row["batch"], length, dtype=torch.long)
        bert = fold(bert) if folded else bert
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            if row["kind"] == "step":
                head(bert(ids, ids, ids, cls_only=True)).sum().backward()
            else:
                with torch.no_grad():
                    bert(ids, ids, ids)
    return counter.get_total_flops() / 2


# --------------------------------------------------------------------------------------------------
# Measuring


def start(spec, options):
    python = options.peer_python if spec["side"] == "peer" else sys.executable
    environment = {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
    environment["OMP_WAIT_POLICY"] = "PASSIVE"  # who waits leaves the cores to the others
    return subprocess.Popen(
        [os.path.abspath(python), "-m", "experiments.benchmark_worker", json.dumps(spec)],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def ask(process, key, request=None):
    """The next line of a process, after a request."""
    if request and process.poll() is None:
        process.stdin.write(request + "\n")
        process.stdin.flush()
    line = process.stdout.readline()
    ended = {"error": "" if line else f"its process ended with status {process.wait()}"}
    answer = json.loads(line) if line else ended
    if "error" in answer:
        raise ValueError(f"{', '.join(key)}: {answer['error']}")
    return answer


def measure(specs, repeats, options):
    """{(row, column): {"seconds": [of each repeat], ...}} of processes that take turns."""
    processes = {key: start(spec, options) for key, spec in specs.items()}
    try:
        results = {key: ask(process, key) for key, process in processes.items()}
        for (name, column), result in results.items():
            result |= {"seconds": [], "rates": [], "memory": 0}
            expected, loss = results[name, "ours"]["loss"], result["loss"]
            tolerance = 1e-5 if specs[name, column]["dtype"] == "float32" else 0.1
            if not abs(loss - expected) <= tolerance:
                raise ValueError(f"{name}: the loss is {expected}, but {loss} here: {column}")
        for repeat in range(repeats + 1):
            print(f"  repeat {repeat} of {repeats}", flush=True)
            for key, process in processes.items():
                answer = ask(process, key, "go" if repeat else "warm")
                if repeat:
                    results[key]["seconds"].append(answer["seconds"])
                    results[key]["rates"].append(answer["rate"])
                    results[key]["memory"] = max(answer["memory"], results[key]["memory"])
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
            process.stdin.close(), process.stdout.close()
    return results


def measure_group(group, config, options, root):
    """{(row, column): result} of a group's rows; `floor`: the seconds that the multiply-adds of a
    row take at the rate of a feed-forward layer's matrix product, measured in the same turns."""
    same = {"root": str(root), "device": options.device, "threads": options.threads}
    same["product"] = options.length, config.hidden_size, config.intermediate_size
    specs = {
        (name, column): spec
        for name, row in group.items()
        for column, spec in columns_of(row, options, same).items()
    }
    print(f"{', '.join(group)}: {len(specs)} processes", flush=True)
    results = measure(specs, options.repeats, options)
    for (name, column), result in results.items():
        if column != "reference":
            needed = multiply_adds(config, group[name], options.length, column == "folded")
            result["floor"] = needed / statistics.median(result["rates"])
    return results


# --------------------------------------------------------------------------------------------------
# The report


def spread(values, digits=2):
    """median (smallest–largest)"""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def table(results):
    """Rows of text: ours, and what the reference took in the same repeats."""
    rows = []
    for (name, column), ours in results.items():
        theirs = results.get((name, "reference"))
        if column == "reference":
            continue
        cells = [name if column == "ours" else f"{name}, {column}", spread(ours["seconds"], 3)]
        cells += ["–", "–", f"{ours['memory'] / 1e9:.2f}", "–", f"{ours['floor']:.3f}"]
        if theirs:
            pairs = zip(theirs["seconds"], ours["seconds"], strict=True)
            cells[2:4] = spread(theirs["seconds"], 3), spread([a / b for a, b in pairs])
            cells[5] = f"{theirs['memory'] / 1e9:.2f}"
        rows.append(cells)
    return rows


COLUMNS = (
    "row; ours, s; reference, s; reference / ours; peak memory, GB; reference, GB; floor, s"
).split("; ")


def describe(results, config, options):
    """What the figures depend on."""
    cpuinfo = Path("/proc/cpuinfo")
    cpus = re.findall(r"model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "")
    machine = [*cpus[:1], f"{os.cpu_count()} cores", f"{options.threads} threads"]
    machine += [torch.cuda.get_device_name()] if options.device == "cuda" else []
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for result in results.values():
        versions |= result["versions"]
    machine += [f"{name} {version}" for name, version in versions.items()]
    weights = Path(options.model).name if options.model else "random weights"
    return (
        f"{date.today()}. {', '.join(machine)}. Encoder: {config.num_hidden_layers} layers, hidden "
        f"size {config.hidden_size}, {weights}; {options.dtype}, {options.batch} × "
        f"{options.length} tokens unless said. {options.repeats} repeats, median "
        "(fastest–slowest). docs/benchmarks.md says what the columns mean."
    )


def measure_all(options):
    """({(row, column): result}, the encoder's configuration)"""
    choose_device(options.device, options.dtype)
    groups = row_groups(options)
    torch.manual_seed(0)
    bert = Bert.from_pretrained(options.model) if options.model else Bert(BertConfig())
    config, results = bert.config, {}
    if options.length > config.max_length:
        raise ValueError(
            f"--length {options.length} is more than the encoder's {config.max_length}"
        )
    with tempfile.TemporaryDirectory() as directory:
        rows = [row for group in groups for row in group.values()]
        write_inputs(bert, Path(directory), rows, options.length)
        for group in groups:
            results |= measure_group(group, config, options, Path(directory))
    return results, config


def main(argv=None):
    options = parse(Options, argv, "python -m experiments.benchmark", __doc__)
    command = "python -m experiments.benchmark " + shlex.join(argv or sys.argv[1:])
    results, config = measure_all(options)
    about = describe(results, config, options)
    text = "\n".join([markdown(table(results), COLUMNS), f"`{command}`\n", about])
    print(text)
    if options.out:
        write_text(options.out, text + "\n")


if __name__ == "__main__":
    run_command("benchmark.py", main)
