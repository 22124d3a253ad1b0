"""How fast, in how much memory, and how far from what the hardware allows? One table, beside the
reference library.

    python -m experiments.benchmark --peer-python .venv-peer/bin/python --out docs/benchmarks.md \\
        --data-dir DATA --encoder MINILM  # these two: one epoch of rte and sst2, end to end
    python -m experiments.benchmark --rows "fusion step" --repeats 3

Every cell is a process of its own (benchmark_worker.py), ours and the reference's built from the
same files: the same random weights, the same batch, and before anything is timed the same loss. The
processes of a group take turns, repeat by repeat; those that wait, sleep. Times are medians
(fastest to slowest), ratios are taken within a repeat.
"""

if __name__ == "__main__":
    from runtime.command import announce

    announce("benchmark")

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

import torch
from safetensors.torch import save_file

from adapter import AdapterConfig, Head, activate, add_adapter, save_adapter, save_head
from bert import Bert, BertConfig
from data import TASKS, get_task, load_split
from formats.tokenizer import load_tokenizer
from fusion import add_fusion, save_fusion
from runtime.command import errors_in_one_line
from runtime.options import Parser
from runtime.processes import choose_device

ROOT = Path(__file__).resolve().parent.parent
FUSIONS = (1, 4, 16, 64)

# --------------------------------------------------------------------------------------------------
# The rows


def rows(args):
    """[{name: row}] by group, a group being what takes turns. The step with 64 adapters has a
    quarter of the batch."""
    small = max(args.batch // 4, 1)
    shape = f", {small} × {args.length}"

    def row(kind, adapters, fused, batch=args.batch):
        return {"kind": kind, "adapters": adapters, "fused": fused, "batch": batch}

    groups = [
        {
            "stage 1 step": row("step", 1, False),
            **{f"fusion step, N = {n}": row("step", n, True) for n in FUSIONS[:-1]},
        },
        {
            "stage 1 step" + shape: row("step", 1, False, small),
            f"fusion step, N = {FUSIONS[-1]}{shape}": row("step", FUSIONS[-1], True, small),
        },
        {
            "inference, plain encoder": row("inference", 0, False),
            "inference, one adapter": row("inference", 1, False),
            **{f"inference, fusion N = {n}": row("inference", n, True) for n in FUSIONS},
        },
    ]
    if args.data_dir:
        groups += [
            {f"epoch, {task}": {**row("epoch", 1, False, 32), "task": task}}
            for task in ("rte", "sst2")
        ]
    if args.rows:
        groups = [
            {name: row for name, row in group.items() if any(word in name for word in args.rows)}
            for group in groups
        ]
    groups = [group for group in groups if group]
    if not groups:
        raise ValueError(f"no row has {' or '.join(map(repr, args.rows))} in its name")
    return groups


def cells(name, row, args):
    """The processes of a row: {(row, column): spec}."""
    base = {
        "side": "ours",
        "dtype": args.dtype,
        "device": args.device,
        "threads": args.threads,
        "root": str(args.root),
        "length": args.length,
        "fold": False,
        "compile": False,
        **row,
    }
    peer = {**base, "side": "peer"}
    result = {(name, "ours"): base}
    if row["kind"] == "inference" and row["fused"]:
        result[name, "folded"] = {**base, "fold": True}
    if args.dtype == "float32" and (
        name in ("stage 1 step", "fusion step, N = 16") or row["kind"] == "epoch"
    ):
        result[name, "bfloat16"] = {**base, "dtype": "bfloat16"}
    if args.compile and name in ("stage 1 step", "fusion step, N = 16"):
        for (_, column), spec in list(result.items()):
            name_of = "compiled" if column == "ours" else f"{column}, compiled"
            result[name, name_of] = {**spec, "compile": True}
    if row["kind"] != "epoch":
        result[name, "reference"] = peer
    else:
        for (_, column), spec in list(result.items()):
            result[name, column] = {
                **spec,
                "data_dir": args.data_dir,
                "encoder": args.encoder,
                "examples": args.limit_train,
                "length": args.epoch_length,
            }
        peer = {**peer, "root": str(args.root / "epoch"), "length": args.epoch_length}
        result[name, "reference"] = {**peer, "dynamic": False}
        result[name, "reference, dynamic"] = {**peer, "dynamic": True}
    return {key: spec for key, spec in result.items() if args.peer_python or spec["side"] == "ours"}


def multiply_adds(config, row, length, folded=False):
    """
    The fewest multiply-adds of a row, elementwise work and sums aside. Of a training step: no
    gradient of frozen weights, nothing behind the first adapter on the way back, and of the last
    layer only keys and values beside what [CLS] needs.
    """
    d, m, L = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    B, T, N, step = row["batch"], length, row["adapters"], row["kind"] == "step"
    R = N * AdapterConfig.pfeiffer().bottleneck_size(d, 0)
    total = 3 * B * (d * d + 2 * d) if step else 0  # the head
    for layer in range(L):
        first, last = layer == 0, step and layer == L - 1
        n = B if last else B * T
        linear = B * T * 2 * d * d + n * (
            2 * d * d + 2 * d * m
        )  # keys, values; queries, output, feed-forward
        attention = n * T * d  # q·k, and as much for s·v; the way back has two of each
        total += linear + 2 * attention + (linear + 4 * attention if step and not first else 0)
        if (
            folded
        ):  # D h, the scores, the mixture; R + N columns, as fusion.py counts biases among them
            total += n * d * (R + 2 * (R + N))
        elif row["fused"]:
            total += chain([n, d, R], [step and not first, False])  # D h
            total += chain(
                [n, d, d, d, R + N], [step and not first, step, step, False]
            )  # the scores: h, Q, K, Z
            total += chain([n, R + N, d, d], [step, False, step])  # the mixture: s ⊙ a, Z, V
        else:
            total += chain([n, d, R], [step and not first, step]) + chain(
                [n, R, d], [step, step]
            )  # D h, U a
    return total


def chain(sizes, gradients):
    """The fewest multiply-adds, over all orders, of a product of matrices, the i-th being sizes[i]
    × sizes[i + 1], together with the gradients of those for which gradients[i] says so: a product
    costs as much again for each side that needs one."""
    if len(gradients) == 1:
        return 0
    return min(
        chain(sizes[: k + 1], gradients[:k])
        + chain(sizes[k:], gradients[k:])
        + sizes[0] * sizes[k] * sizes[-1] * (1 + any(gradients[:k]) + any(gradients[k:]))
        for k in range(1, len(gradients))
    )


# --------------------------------------------------------------------------------------------------
# What both sides read


def write_weights(bert, root, fusions, labels=2):
    """An encoder, as many adapters as the largest fusion has, the fusions and a head, all random
    and in AdapterHub's files."""
    bert.save_pretrained(root / "encoder")
    names = [f"a{i}" for i in range(max(fusions))]
    head = Head({"head_type": "classification", "num_labels": labels, "layers": 2}, bert.config)

    def noise(parameters):  # enough that one wrong part shows in the loss
        with torch.no_grad():
            for p in parameters:
                p.add_(torch.randn_like(p), alpha=0.03)

    noise(head.parameters())
    (root / "head").mkdir()
    save_head(head, bert, "task", root / "head")
    for name in names:
        add_adapter(bert, name, AdapterConfig.pfeiffer())
        noise(p for p in bert.parameters() if p.requires_grad)
        save_adapter(bert, name, root / name)
    for n in fusions:
        add_fusion(bert, names[:n])
        noise(p for p in bert.parameters() if p.requires_grad)
        save_fusion(bert, root / f"fusion{n}")
    activate(bert, None)


def write_batch(config, root, batch, length):
    """A full batch, without padding."""
    ids = torch.randint(0, config.vocab_size, (batch, length))
    save_file(
        {
            "input_ids": ids,
            "token_type_ids": torch.zeros_like(ids),
            "attention_mask": torch.ones_like(ids),
            "labels": torch.randint(0, 2, (batch,)),
        },
        root / f"batch{batch}.safetensors",
    )


def write_examples(task, bert, args):
    """The training examples that train.py draws, tokenised, for the reference."""
    tokenizer = load_tokenizer(bert.directory, args.epoch_length, bert.config.vocab_size)
    split = load_split(
        get_task(task, args.data_dir),
        "train",
        tokenizer,
        args.data_dir,
        limit=args.limit_train,
        seed=0,
    )
    ids, types = ([row[0] for row in split[name][:]] for name in ("input_ids", "token_type_ids"))
    save_file(
        {
            "input_ids": torch.tensor(sum(ids, [])),
            "token_type_ids": torch.tensor(sum(types, [])),
            "lengths": torch.tensor([len(row) for row in ids]),
            "labels": torch.tensor(split["label"][:]),
        },
        args.root / "epoch" / f"{task}.safetensors",
    )
    return len(split)


# --------------------------------------------------------------------------------------------------
# Measuring


def start(spec, args):
    python = args.peer_python if spec["side"] == "peer" else sys.executable
    # threads that wait must not take the cores of the process whose turn it is
    environment = {
        **os.environ,
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": str(args.threads),
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.Popen(
        [python, "-m", "experiments.benchmark_worker", json.dumps(spec)],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def ask(process, key, request=None):
    """The next line of a process, after a request. Raises RuntimeError if there is none, or if it
    is an error."""
    if request and process.poll() is None:
        process.stdin.write(request + "\n")
        process.stdin.flush()
    line = process.stdout.readline()
    result = (
        json.loads(line) if line else {"error": f"its process ended with status {process.wait()}"}
    )
    if "error" in result:
        raise RuntimeError(f"{key[0]}, {key[1]}: {result['error']}")
    return result


def measure(specs, repeats, args):
    """{(row, column): {"seconds": [...], ...}} of processes that take turns; the first turn warms
    up."""
    processes = {key: start(spec, args) for key, spec in specs.items()}
    try:
        results = {key: {**ask(process, key), "seconds": []} for key, process in processes.items()}
        for (name, column), result in results.items():
            if "loss" in result:
                expected = results[name, "ours"]["loss"]
                tolerance = 1e-5 if specs[name, column]["dtype"] == "float32" else 0.1
                if not abs(result["loss"] - expected) <= tolerance:
                    raise RuntimeError(
                        f"{name}: the loss is {expected}, but {result['loss']} here: {column}"
                    )
        for turn in range(repeats + 1):
            for key, process in processes.items():
                result = ask(process, key, "go" if turn else "warm")
                if not turn and specs[key].get("compile"):
                    results[key]["first"] = result["seconds"]
                if turn:
                    results[key]["seconds"].append(result.pop("seconds"))
                    for name, value in result.items():
                        results[key].setdefault(name, []).append(value)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
            process.stdin.close(), process.stdout.close()
    return results


def run(args, config):
    """Every group in turn -> {(row, column): result}; floors are in seconds, from the matrix
    product in the same group."""
    results = {}
    for group in rows(args):
        specs = {
            key: spec for name, row in group.items() for key, spec in cells(name, row, args).items()
        }
        epoch = any(row["kind"] == "epoch" for row in group.values())
        if not epoch:
            batch, kind = (next(iter(group.values()))[name] for name in ("batch", "kind"))
            for dtype in {spec["dtype"]: None for spec in specs.values()}:
                specs["matrix product", dtype] = {
                    "side": "ours",
                    "kind": "matrix",
                    "dtype": dtype,
                    "device": args.device,
                    "threads": args.threads,
                    "tokens": batch * args.length,
                    "d": config.hidden_size,
                    "m": config.intermediate_size,
                }
        print(f"benchmark: {', '.join(group)}: {len(specs)} processes", file=sys.stderr)
        measured = measure(specs, min(args.repeats, 3) if epoch else args.repeats, args)
        for (name, column), result in measured.items():
            if name == "matrix product":
                product = 10 * batch * args.length * config.hidden_size * config.intermediate_size
                result["multiply_adds_per_second"] = product / statistics.median(result["seconds"])
                name = f"{name}, {batch} × {args.length} tokens, {kind}"
            results[name, column] = result
        for (name, column), spec in specs.items():
            if name in group and not epoch and spec["side"] == "ours":
                rate = measured["matrix product", spec["dtype"]]["multiply_adds_per_second"]
                results[name, column]["floor"] = (
                    multiply_adds(config, group[name], args.length, column == "folded") / rate
                )
    return results


# --------------------------------------------------------------------------------------------------
# The report


def ratios(results, above, below):
    """Repeat by repeat, [] where one of the two was not measured."""
    if above not in results or below not in results:
        return []
    return [
        a / b for a, b in zip(results[above]["seconds"], results[below]["seconds"], strict=True)
    ]


def spread(values, digits=2):
    """median (smallest–largest)"""
    if not values:
        return "–"
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return (
        f"{statistics.median(values):.{digits}f} "
        f"({min(values):.{digits}f}–{max(values):.{digits}f})"
    )


def peak(result):
    """Bytes, None where it was not measured."""
    return max((value for value in result.get("memory", []) if value), default=None)


def table(header, lines):
    return "\n".join(
        "| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *lines]
    )


def main_table(results):
    lines = []
    for (name, column), mine in results.items():
        if column.startswith("reference") or name.startswith("matrix product"):
            continue
        # an epoch stands beside both of the reference's ways to pad
        against = [c for n, c in results if n == name and c.startswith("reference")] or [
            "reference"
        ]
        for reference in against:
            theirs = results.get((name, reference), {})
            label = name if column == "ours" else f"{name}, {column}"
            if len(against) > 1:
                label += ", reference dynamic" if "dynamic" in reference else ", reference padded"
            memories = [
                f"{peak(result) / 1e9:.2f}" if peak(result) else "–" for result in (mine, theirs)
            ]
            parameters = mine.get("parameters") if "inference" not in name else None
            floor = (
                [spread([s / mine["floor"] for s in mine["seconds"]])] if "floor" in mine else ["–"]
            )
            lines.append(
                [
                    label,
                    spread(mine["seconds"], 3),
                    spread(theirs.get("seconds", []), 3),
                    spread(ratios(results, (name, reference), (name, column))),
                    *memories,
                    f"{parameters:,}" if parameters else "–",
                    f"{mine['floor']:.3f}" if "floor" in mine else "–",
                    *floor,
                ]
            )
    return table(
        [
            "row",
            "ours, s",
            "reference, s",
            "reference / ours",
            "peak memory, GB",
            "reference, GB",
            "trained parameters",
            "floor, s",
            "ours / floor",
        ],
        lines,
    )


def evaluation(results):
    """({task: share of a run's time that its dev evaluations take}, {epoch: costs}): the cost is
    what an example takes in `evaluate` over what it takes in training, where it was measured; the
    shares are those of the dearest. {}, {} without."""
    costs = {}
    for (name, column), result in results.items():
        if column == "ours" and "evaluation" in result:
            costs[name] = [
                evaluated / result["dev"][0] / (seconds / result["examples"])
                for seconds, evaluated in zip(result["seconds"], result["evaluation"], strict=True)
            ]
    cost = max((statistics.median(values) for values in costs.values()), default=0)
    shares = {
        name: cost * task.sizes[1] / (cost * task.sizes[1] + task.sizes[0])
        for name, task in TASKS.items()
    }
    return shares if costs else {}, costs


def targets(results, args):
    """[(what, ">=" or "<=", bound, measured values)]: the targets of this project, [] where one
    could not be measured."""
    stage1, fusion = "stage 1 step", "fusion step, N = 16"
    small = f", {max(args.batch // 4, 1)} × {args.length}"
    stage1_small, fusion64 = stage1 + small, f"fusion step, N = 64{small}"
    plain, fusion_inference = "inference, plain encoder", "inference, fusion N = 16"

    def against(name, reference="reference"):
        return ratios(results, (name, reference), (name, "ours"))

    peaks = [peak(results.get((fusion, column), {})) for column in ("ours", "reference")]
    memory = [peaks[0] / peaks[1]] if all(peaks) else []
    compiled = results.get((stage1, "compiled"), {"seconds": []})
    cpu = [
        ("fusion step, N = 16: reference / ours", ">=", 5.0, against(fusion)),
        ("fusion step, N = 16: our peak memory / the reference's", "<=", 0.35, memory),
        ("fusion step, N = 64: reference / ours", ">=", 10.0, against(fusion64)),
        (
            "fusion step, N = 64 / our single-adapter step",
            "<=",
            2.5,
            ratios(results, (fusion64, "ours"), (stage1_small, "ours")),
        ),
        (
            "fusion step, N = 16 / our single-adapter step",
            "<=",
            1.45,
            ratios(results, (fusion, "ours"), (stage1, "ours")),
        ),
        (
            "inference, N = 16 folded / the plain encoder, all positions of both",
            "<=",
            1.3,
            ratios(results, (fusion_inference, "folded"), (plain, "ours")),
        ),
        ("stage 1 step: ours / reference", "<=", 0.95, [1 / ratio for ratio in against(stage1)]),
        (
            "stage 1 step: our fp32 / our bf16",
            ">=",
            2.5,
            ratios(results, (stage1, "ours"), (stage1, "bfloat16")),
        ),
        (
            "fusion step, N = 16: our fp32 / our bf16",
            ">=",
            2.5,
            ratios(results, (fusion, "ours"), (fusion, "bfloat16")),
        ),
        ("epoch of rte: reference padded / ours", ">=", 1.7, against("epoch, rte")),
        ("epoch of sst2: reference padded / ours", ">=", 5.0, against("epoch, sst2")),
        (
            "epoch of rte: reference with dynamic padding / ours",
            ">=",
            1.6,
            against("epoch, rte", "reference, dynamic"),
        ),
        (
            "epoch of sst2: reference with dynamic padding / ours",
            ">=",
            1.6,
            against("epoch, sst2", "reference, dynamic"),
        ),
        (
            "evaluation: largest share of a run on the 16 tasks",
            "<=",
            0.10,
            [max(shares.values())] if (shares := evaluation(results)[0]) else [],
        ),
    ]
    cuda = [
        (
            "GPU, bf16: share of the matrix rate in stage 1 with --compile",
            ">=",
            0.4,
            [compiled["floor"] / seconds for seconds in compiled["seconds"]],
        ),
        (
            "GPU, bf16: fusion step, N = 16 / our single-adapter step",
            "<=",
            1.6,
            ratios(results, (fusion, "ours"), (stage1, "ours")),
        ),
        ("GPU, bf16: fusion step, N = 16: reference / ours", ">=", 4.0, against(fusion)),
    ]
    on_gpu = args.device == "cuda" and args.dtype == "bfloat16"
    on_cpu = args.device == "cpu" and args.dtype == "float32"
    return [
        (*target[:3], target[3] if on else [])
        for on, part in ((on_cpu, cpu), (on_gpu, cuda))
        for target in part
    ]


def machine(args):
    """What the figures depend on: {"processor": ..., ...}"""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(
        line.split("\t", 1) for line in cpuinfo.split("\n\n")[0].splitlines() if "\t" in line
    )
    model = (
        fields.get("model name", "").removeprefix(": ").strip()
        or platform.processor()
        or platform.machine()
    )
    units = [
        name
        for flag, name in (("amx_bf16", "AMX"), ("avx512_bf16", "AVX512_BF16"))
        if flag in cpuinfo.split()
    ]
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if args.peer_python:
        code = (
            "import adapters, json, torch, transformers; print(json.dumps({'adapters': "
            "adapters.__version__, "
        )
        code += (
            "'transformers': transformers.__version__, 'torch of the reference': "
            "torch.__version__}))"
        )
        done = subprocess.run([args.peer_python, "-c", code], capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise ValueError(
                f"--peer-python {args.peer_python} cannot import the reference library: {reason}"
            )
        versions |= json.loads(done.stdout.splitlines()[-1])
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "threads": args.threads,
        "bf16 units": ", ".join(units) or "neither AMX nor AVX512_BF16",
        "gpu": torch.cuda.get_device_name() if args.device == "cuda" else None,
        "system": f"{platform.system()} {platform.release()}",
        "versions": versions,
    }


def explanation(about, args):
    """Paragraphs: what was measured, and what the columns mean."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    gpu = f", {about['gpu']}" if about["gpu"] else ""
    peak_memory = (
        "peak RSS while the row runs, minus RSS after the imports, before the model is built"
    )
    if args.device == "cuda":
        peak_memory = "the most that is allocated on the GPU"
    epochs = about["epochs"] or "left out, they need --data-dir and --encoder"
    return [
        f"{about['date']}. {about['processor']}, {about['cores']} cores, {args.threads} threads, "
        f"bf16 units: {about['bf16 units']} ({amx(about)}){gpu}; {about['system']}; {versions}.",
        f"Encoder: {about['encoder']}. {args.dtype}, batch {args.batch} × {args.length} unless "
        f"said, no padding; dropout on in training. {args.repeats} repeats (an epoch: "
        f"{min(args.repeats, 3)}), after one that warms up. Median (fastest–slowest).\n",
        "*step*: forward, cross-entropy, backward, clipping at norm 1, fused AdamW, both sides; a "
        "Pfeiffer adapter, reduction factor 16, and AdapterHub's default head. *inference*: the "
        "encoder, all positions, both sides and folded or not. "
        f"*peak memory*: {peak_memory}. *floor*: the fewest multiply-adds that the row needs, at "
        "the rate of the feed-forward matrix product in the same group. *epoch*: training steps "
        "and collation of batches of 32, at most 128 tokens, without loading, tokenisation and "
        f"evaluation; {epochs}. Ours is train.py; the reference is its model in a plain loop over "
        "random batches, padded to the full length (the settings of its example script) or to the "
        "longest of the batch (dynamic).\n",
    ]


def amx(about):
    return "AMX" if "AMX" in about["bf16 units"].split(", ") else "no AMX"


def report(results, about, args):
    """The Markdown that is printed, and written to --out."""
    lines = ["# Benchmarks\n", f"`{about['command']}`\n", *explanation(about, args)]
    lines.append(main_table(results))
    rates = [
        f"{name.removeprefix('matrix product, ')}, {column}: "
        f"{2e-9 * result['multiply_adds_per_second']:,.0f} GFLOP/s"
        for (name, column), result in results.items()
        if name.startswith("matrix")
    ]
    lines.append(f"\nRate of the matrix product: {'; '.join(rates) or 'not measured'}.")
    first = [
        f"{name}, {column} {result['first']:.0f} s"
        for (name, column), result in results.items()
        if "first" in result
    ]
    if first:
        lines.append(f"\nThe first step, in which torch.compile compiles: {'; '.join(first)}.")
    if not args.peer_python:
        lines.append("\nWithout --peer-python: our side alone.")
    shares, costs = evaluation(results)
    if shares:
        found = "; ".join(f"{name} {spread(values)}" for name, values in costs.items())
        rows = [
            [name, *(f"{size:,}" for size in TASKS[name].sizes), f"{share:.1%}"]
            for name, share in shares.items()
        ]
        lines += [
            "\n## Evaluation\n",
            f"What an example takes in evaluation over what it takes in training: {found}. One "
            "evaluation an epoch, the sizes of the 16 tasks, and the larger of these make, of a "
            "run's time:\n",
            table(["task", "train", "dev", "share"], rows),
        ]
    lines += ["\n## Targets\n", targets_table(results, about, args)]
    return "\n".join(lines) + "\n"


def targets_table(results, about, args):
    rows = []
    for what, sign, bound, values in targets(results, args):
        met = "not measured"
        if values:
            median = statistics.median(values)
            met = "met" if (median >= bound if sign == ">=" else median <= bound) else "not met"
            if "bf16" in what and not what.startswith("GPU"):
                met += f" ({amx(about)})"
        rows.append([what, f"{'≥' if sign == '>=' else '≤'} {bound:g}", spread(values), met])
    return table(["what", "target", "measured", ""], rows)


def arguments(argv):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--peer-python",
        help="a Python with experiments/requirements-peer.txt; without it: our side alone",
    )
    add("--rows", nargs="+", help="only rows with one of these texts in their names")
    add("--repeats", type=int, default=5)
    add("--batch", type=int, default=8)
    add("--length", type=int, default=128)
    add("--model", help="an encoder's directory; default: the size of BERT-base, random weights")
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--dtype", default="float32", choices=["float32", "bfloat16"])
    add("--threads", type=int, default=torch.get_num_threads())
    add("--compile", action="store_true", help="also with torch.compile: stage 1, and fusion of 16")
    add(
        "--data-dir",
        help="for the epochs: DIR/rte and DIR/sst2 with train.jsonl and validation.jsonl",
    )
    add("--encoder", help="for the epochs: an encoder's directory, MiniLM-L6 in our figures")
    add("--limit-train", type=int, default=1000, help="examples of an epoch")
    add("--out", type=Path, help="FILE.md; writes FILE.json beside it")
    args = parser.parse_args(argv)
    for name in ("repeats", "batch", "length", "threads", "limit_train"):
        if getattr(args, name) < 1:
            raise ValueError(
                f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}"
            )
    if bool(args.data_dir) != bool(args.encoder):
        raise ValueError("the epochs need both --data-dir and --encoder")
    if args.peer_python and not os.access(args.peer_python, os.X_OK):
        raise ValueError(f"--peer-python {args.peer_python} is not a program")
    if args.out and (args.out.suffix != ".md" or not args.out.parent.is_dir()):
        raise ValueError(f"--out {args.out} is not a .md file in a directory that exists")
    choose_device(args.device, args.dtype)
    for name in (
        "data_dir",
        "encoder",
        "peer_python",
    ):  # the processes run elsewhere; a venv's python stays a link
        if getattr(args, name):
            setattr(args, name, str(Path(getattr(args, name)).absolute()))
    return args


def size(config):
    return f"{config.num_hidden_layers} layers, hidden size {config.hidden_size}"


def benchmark(args, command):
    rows(args)  # an unknown row is found before anything is written
    torch.manual_seed(0)
    about = {"date": date.today().isoformat(), "command": command, **machine(args), "epochs": None}
    bert = Bert.from_pretrained(args.model) if args.model else Bert(BertConfig())
    config = bert.config
    if args.length > config.max_length:
        raise ValueError(f"--length {args.length} is more than the encoder's {config.max_length}")
    about["encoder"] = (
        f"{size(config)}, {Path(args.model).name if args.model else 'random weights'}"
    )
    with tempfile.TemporaryDirectory() as directory:
        args.root = Path(directory)
        needed = {
            row["batch"]: row
            for group in rows(args)
            for row in group.values()
            if row["kind"] != "epoch"
        }
        fusions = sorted(
            {row["adapters"] for group in rows(args) for row in group.values() if row["fused"]}
            | {1}
        )
        if needed:
            write_weights(bert, args.root, fusions)
        for batch in needed:
            write_batch(config, args.root, batch, args.length)
        examples = {}  # task -> how many train it
        tasks = [
            row["task"] for group in rows(args) for row in group.values() if row["kind"] == "epoch"
        ]
        if tasks:
            small = Bert.from_pretrained(args.encoder)
            args.epoch_length = min(128, small.config.max_length)
            (args.root / "epoch").mkdir()
            for task in tasks:
                examples[task] = write_examples(task, small, args)
            write_weights(small, args.root / "epoch", [1])
            about["epochs"] = ", ".join(f"{n:,} examples of {task}" for task, n in examples.items())
            about["epochs"] += f" (--limit-train), {size(small.config)}"
        results = run(args, config)
    for (name, _), result in results.items():
        if name.startswith("epoch"):
            result["examples"] = examples[name.removeprefix("epoch, ")]
    return results, about


def main(argv=None):
    with errors_in_one_line("benchmark", RuntimeError):
        args = arguments(argv)
        words = sys.argv[1:] if argv is None else argv
        command = shlex.join(["python", "-m", "experiments.benchmark", *words])
        results, about = benchmark(args, command)
    text = report(results, about, args)
    print(text)
    if args.out:
        args.out.write_text(text)
        values = json.dumps(measurements(results, about, args), indent=1)
        args.out.with_suffix(".json").write_text(values + "\n")


def measurements(results, about, args):
    """Everything in the report, and every single measurement."""
    found = [
        {"what": what, "target": f"{sign} {bound}", "measured": values}
        for what, sign, bound, values in targets(results, args)
    ]
    shares, _ = evaluation(results)
    settings = {name: value for name, value in vars(args).items() if name not in ("root", "out")}
    measured = [
        {"row": row, "column": column, **result} for (row, column), result in results.items()
    ]
    return {
        **about,
        "settings": settings,
        "results": measured,
        "targets": found,
        "evaluation_share": shares,
    }


if __name__ == "__main__":
    main()
