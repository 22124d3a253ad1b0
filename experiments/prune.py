"""A smaller fusion: without the adapters that it hardly uses, or without all adapters in some
layers (AdapterDrop, section 8.2).

    python -m experiments.prune runs/fusion-rte --keep 8 --out runs/fusion-rte-8
    python -m experiments.prune runs/fusion-rte --keep 8 --leave-out 1 2 12 --out ...

Layers are counted from 1, as in figure4.

In every layer the K adapters stay that have the largest mean fusion weight on the target's training
set (at most --limit examples of it, and every real token of them); the development set is for the
accuracy. What is measured for all K, from all adapters down to one, is printed, and lies in OUT as
prune.csv and prune.png: accuracy, and the speed of the encoder in examples per second, as it is and
folded (variants/folding.py), on one batch of development examples of middle length. The K's take
turns, so that other load on the machine hits all of them: a speed-up is the median of those of each
turn.

OUT is a run as train.py writes it, in AdapterHub's files: an adapter's `leave_out` names the layers
in which it was pruned, one that was pruned everywhere is gone. Q, K and V stay as they were;
nothing is trained again.
"""

if __name__ == "__main__":
    from runtime.command import announce

    announce("prune.py")

import hashlib
import json
import math
import os
import shlex
import shutil
import statistics
import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from adapter import save_adapter
from data import batches, split_by_length
from experiments.figure4 import average, inputs_of
from experiments.load_run import (
    add_encoder,
    cast,
    check_stage,
    load_run,
    load_run_split,
    read_run_config,
    unknown_kind,
)
from experiments.report import save_figure, write_csv
from formats.files import read_json, write_json
from fusion import fusions, save_fusion
from runtime.command import errors_in_one_line
from runtime.options import Parser
from runtime.processes import choose_device
from runtime.results import eval_batch_size
from runtime.run import describe_encoder
from runtime.settings import resolved
from train import evaluate
from variants.folding import fold
from variants.masking import mask

SPEED_BATCH = 32  # examples at once, where the speed is measured
ROUNDS = 7  # how often that is


def activities(bert, names, examples):
    """{layer: {adapter: mean fusion weight}} on some examples, a mean over the locations of a layer
    with two."""
    result = {}
    for (layer, _), s in average(bert, inputs_of(bert, examples)).items():
        for name, weight in zip(names, s.tolist(), strict=True):
            values = result.setdefault(layer, {})
            values[name] = values.get(name, 0) + weight
    return result


def strongest(activity, present, k, left_out):
    """{layer: the K adapters that stay, in the fusion's order}. present: {layer: its adapters}"""
    kept = {}
    for layer, names in present.items():
        best = sorted(names, key=lambda name: -activity[layer][name])[:k]
        kept[layer] = [name for name in names if name in best and layer not in left_out]
    return kept


def activate_only(bert, modules, kept):
    """Activates the fusion with the adapters in `kept` alone, in layers where there are any.
    modules: {(layer, location): Fusion}, of all layers"""
    name = next(fusion.name for fusion in modules.values())
    for (layer, location), slot in bert.slots():
        slot.fusion = modules.get((layer, location)) if kept.get(layer) else None
        slot.active = name if kept.get(layer) else None  # a fusion of one has its adapter's name
    for (layer, _), fusion in fusions(bert):
        mask(bert, {*fusion.adapter_names} - {*kept[layer]}, [layer])


# --------------------------------------------------------------------------------------------------
# Accuracy and speed


@torch.inference_mode()
def seconds(bert, inputs, dtype):
    """Of one pass of the encoder over the groups of a batch."""
    if bert.device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    with torch.autocast(bert.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        for group in inputs:
            bert(*group, cls_only=True)
    if bert.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def scores_of(bert, head, config, task, split, dtype):
    """({score: value}, mean loss)"""
    size = eval_batch_size(config["batch_size"], config["grad_accumulation"])
    labels, predictions, loss = evaluate(bert, head, task, split, size, dtype)
    scores = {name: score(labels, predictions) for name, score in task.scores.items()}
    return scores, loss


def measure(bert, head, config, task, split, settings, dtype):
    """[{"accuracy", "speed", "folded"}] for every {layer: active adapters}; the speeds in
    examples/s, one for each round."""
    modules = dict(fusions(bert))
    rows = []
    for kept in settings:
        activate_only(bert, modules, kept)
        scores, _ = scores_of(bert, head, config, task, split, dtype)
        rows.append({"accuracy": scores["accuracy"], "speed": [], "folded": []})
    size = min(SPEED_BATCH, len(split))
    all_batches = batches(split, size, bert.config.pad_token_id)
    middle = next(islice(all_batches, len(split) // size // 2, None))
    inputs = [[tensor.to(bert.device) for tensor in group] for _, group in split_by_length(middle)]
    for i in range(-1, ROUNDS):  # the first is to warm up
        for kept, row in zip(settings, rows, strict=True):
            activate_only(bert, modules, kept)
            for form, encoder in (("speed", bert), ("folded", fold(bert))):
                speed = len(middle["labels"]) / seconds(encoder, inputs, dtype)
                if i >= 0:
                    row[form].append(speed)
    return rows


def table(rows):
    """Lines. rows: of `measure`, with k and left_out; the speed-ups are over the first, which is
    the whole run."""
    yield (
        f"{'k':>4}  accuracy  {'examples/s (slowest to fastest)':>32}  speed-up  "
        f"{'folded':>32}  speed-up"
    )
    for row in rows:
        cells = []
        for form in ("speed", "folded"):
            middle = statistics.median(row[form])
            cells += [
                f"{middle:.1f} ({min(row[form]):.1f} to {max(row[form]):.1f})",
                f"{speed_up(row, rows[0], form):.2f}",
            ]
        note = ""
        if row["left_out"]:
            layers = "layers" if len(row["left_out"]) > 1 else "layer"
            note = f"  without {layers} {', '.join(map(str, row['left_out']))}"
        yield (
            f"{row['k']:>4}  {row['accuracy']:>8.4f}  {cells[0]:>32}  {cells[1]:>8}  "
            f"{cells[2]:>32}  {cells[3]:>8}{note}"
        )


def speed_ups(row, first, form):
    """Of every round."""
    return [speed / whole for speed, whole in zip(row[form], first[form], strict=True)]


def speed_up(row, first, form):
    """The median of them."""
    return statistics.median(speed_ups(row, first, form))


def write_rows(rows, path):
    """Writes prune.csv. rows: as `table` takes them"""
    header = ["k", "left_out", "accuracy"]
    lines = [[row["k"], " ".join(map(str, row["left_out"])), row["accuracy"]] for row in rows]
    for form in ("speed", "folded"):
        header += [f"{form}_{kind}" for kind in ("median", "slowest", "fastest", "up")]
        for line, row in zip(lines, rows, strict=True):
            line += [statistics.median(row[form]), min(row[form]), max(row[form])]
            line.append(speed_up(row, rows[0], form))
    write_csv(path, header, lines)


def draw(rows, keep, examples, title, path):
    """Accuracy, and speed-up over the whole run, by k. The bars of the accuracy are the standard
    error of a share of so many examples, those of the speed-up its smallest and largest value."""
    whole, rows = rows[0], [row for row in rows if row["left_out"] == rows[-1]["left_out"]]
    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(6, 5.5), layout="constrained")
    ks = [row["k"] for row in rows]
    shares = [row["accuracy"] for row in rows]
    errors = [100 * math.sqrt(share * (1 - share) / examples) for share in shares]
    above.errorbar(
        ks,
        [100 * share for share in shares],
        errors,
        fmt="o-",
        color="black",
        markersize=4,
        linewidth=1,
        capsize=2,
    )
    above.axhline(
        100 * whole["accuracy"],
        color="0.5",
        linewidth=1,
        linestyle=":",
        label=f"all {whole['k']} in all layers",
    )
    above.set_ylabel(f"accuracy, % (± standard error,\n{examples:,} dev examples)")
    above.legend(fontsize=8)
    for form, label, line in (("folded", "folded", "o-"), ("speed", "not folded", "s--")):
        colour = "black" if form == "folded" else "0.5"
        ups = [speed_up(row, whole, form) for row in rows]
        spread = [
            [up - min(speed_ups(row, whole, form)) for up, row in zip(ups, rows, strict=True)],
            [max(speed_ups(row, whole, form)) - up for up, row in zip(ups, rows, strict=True)],
        ]
        style = {"fmt": line, "color": colour, "markersize": 4, "linewidth": 1, "capsize": 2}
        below.errorbar(ks, ups, spread, label=label, **style)
    below.set_ylabel(f"speed-up over all {whole['k']}")
    below.legend(fontsize=8)
    without = ""
    if rows[0]["left_out"]:
        without = f" (none in layer {', '.join(map(str, rows[0]['left_out']))})"
    below.set_xlabel(f"adapters per layer{without}")
    below.xaxis.get_major_locator().set_params(integer=True)
    if len(ks) <= 20:
        below.set_xticks(ks)
    for panel in (above, below):
        panel.axvline(keep, color="0.85", linewidth=6, zorder=0)  # what OUT keeps
        panel.grid(alpha=0.3)
    above.set_title(title, fontsize=10, parse_math=False)
    save_figure(figure, path)


# --------------------------------------------------------------------------------------------------
# The smaller run


def write_run(run, model, kept, changes, out):
    """A finished run in `out`, without metrics.json: the adapters in `kept`, bit by bit, Ψ, head
    and configuration."""
    bert, _, config = load_run(run, model=model, allow_other_encoder=True)  # checked before
    layers = [layer for layer in kept if kept[layer]]
    names = [name for name in config["adapters"] if any(name in kept[layer] for layer in layers)]
    everywhere = [name for name in names if all(name in kept[layer] for layer in layers)]
    if everywhere:  # the reference reads the last one's configuration in every layer
        names = [name for name in names if name != everywhere[-1]] + everywhere[-1:]
    else:
        print(
            "note: no adapter is in all layers with a fusion: the `adapters` library reads the "
            "files, but runs no such fusion"
        )
    remove_others(bert, names, kept)
    for name in names:
        # with the encoder that it was trained on, not where that is now
        saved = read_json(run / "adapters" / name / "adapter_config.json")
        source, bert.source = bert.source, saved.get("model_name")
        save_adapter(bert, name, out / "adapters" / name)
        bert.source = source
    save_fusion(bert, out)
    for name in ("head_config.json", "model_head.safetensors", "log.jsonl"):
        if (run / name).is_file():
            shutil.copyfile(run / name, out / name)
    files = {name: out / "adapters" / name / "adapter.safetensors" for name in names}
    sums = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    config = {**config, **changes, "adapters": names, "adapter_sha256": sums}
    write_json(out / "config.json", config)


def remove_others(bert, names, kept):
    """Takes out of the encoder all adapters that are not in `kept`, and the fusions that have none
    left. names: all that are left, in the fusion's order"""
    for (layer, _), slot in bert.slots():
        for name in [name for name in slot.adapters if name not in kept.get(layer, ())]:
            del slot.adapters[name]
        if slot.fusion is not None and slot.adapters:
            slot.fusion.name = ",".join(names)
            slot.fusion.adapter_names = [name for name in names if name in slot.adapters]
        else:
            slot.fusion = None
        for name, adapter in slot.adapters.items():
            without = [i for i in range(len(bert.layers)) if name not in kept.get(i, ())]
            adapter.config = replace(adapter.config, leave_out=tuple(without))


# --------------------------------------------------------------------------------------------------
# The command


def check(args):
    """Raises ValueError for arguments that make no sense, before anything is loaded."""
    if args.keep is None and not args.leave_out:
        raise ValueError(
            "give --keep, --leave-out, or both: how many adapters stay in a layer, which layers "
            "stay without"
        )
    if args.limit < 1:
        raise ValueError(f"--limit must be at least 1, not {args.limit}")
    occupied = args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir()))
    if occupied or args.out.is_symlink():
        raise ValueError(f"--out {args.out} is already there: choose an empty or a new directory")


def check_run(args, bert, config):
    """Raises ValueError for a run that cannot be pruned, or not like this."""
    if unknown := unknown_kind(bert):
        raise ValueError(
            f"{args.run}: {unknown} cannot be pruned, only the paper's fusion over bottleneck "
            "adapters"
        )
    N = len(config["adapters"])
    if args.keep is not None and not 1 <= args.keep <= N:
        raise ValueError(
            f"--keep must be in 1 .. {N}, the number of adapters in {args.run}, not {args.keep}"
        )
    there = distinct_layers(bert)
    for layer in args.leave_out:
        if layer - 1 not in there:
            raise ValueError(
                f"--leave-out {layer}: the layers with adapters are "
                f"{', '.join(str(i + 1) for i in there)}"
            )
    if len({*args.leave_out}) == len(there):
        raise ValueError("--leave-out leaves no layer with adapters")
    configs = [slot.adapters[name].config for _, slot in bert.slots() for name in slot.adapters]
    reading = ("original_ln_before", "original_ln_after", "residual_before_ln")
    if len({tuple(getattr(config, field) for field in reading) for config in configs}) > 1:
        raise ValueError(
            f"the adapters of {args.run} differ in {', '.join(reading)}, where the last one "
            "decides for all: without it the others would read something else; see --mask"
        )


def distinct_layers(bert):
    """The layers with a fusion, each once, from 0."""
    return list(dict.fromkeys(layer for (layer, _), _ in fusions(bert)))


def prune(args):
    """Measures, and writes OUT. Raises ValueError and OSError before anything is there."""
    check(args)
    check_stage(args.run, read_run_config(args.run), ["fusion"], "can be pruned")
    bert, head, config = load_run(
        args.run, model=args.model, allow_other_encoder=args.allow_other_encoder
    )
    check_run(args, bert, config)
    task, split = load_run_split(args.run, bert, config, "validation", args.data_dir)
    _, seen = load_run_split(args.run, bert, config, "train", args.data_dir, limit=args.limit)
    device, _ = choose_device(args.device, "float32")
    args.out.parent.mkdir(parents=True, exist_ok=True)  # before the long work: it may be impossible
    temporary = args.out.with_name(f".{args.out.name}.{os.getpid()}")
    temporary.mkdir()
    try:
        activity = activities(bert.to(device), config["adapters"], seen)
        _, dtype = cast(bert, head, config, args.device)
        rows = measure_all(args, bert, head, config, task, split, activity, dtype)
        keep, left_out = args.keep or len(config["adapters"]), sorted({*args.leave_out})
        chosen = next(row for row in rows if (row["k"], row["left_out"]) == (keep, left_out))
        small, metrics = write_and_reload(args, bert, chosen, task, split, temporary)
        write_rows(rows, temporary / "prune.csv")
        title = f"{args.run.resolve().name}: {len(config['adapters'])} adapters"
        draw(rows, keep, len(split), title, temporary / "prune.png")
        temporary.rename(args.out)  # OUT is there when it is whole
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
    print("\n".join(table(rows)))
    print(
        f"{args.out}: {len(small['adapters'])} of {len(config['adapters'])} adapters, at most "
        f"{keep} a layer, accuracy {metrics['accuracy']:.4f}; prune.png, prune.csv"
    )
    return {
        "run": str(args.run),
        "out": str(args.out),
        "keep": args.keep,
        "left_out": left_out,
        "adapters": small["adapters"],
        "accuracy": metrics["accuracy"],
        "accuracy_of_all": rows[0]["accuracy"],
        **{f"{form}_up": speed_up(chosen, rows[0], form) for form in ("speed", "folded")},
    }


def measure_all(args, bert, head, config, task, split, activity, dtype):
    """[{"k", "left_out", "kept", ...}] for all K from all adapters down to one, the rest as
    `measure` gives it. The first row is the whole run. left_out counts layers from 1, as on the
    command line, kept from 0."""
    N, left_out = len(config["adapters"]), sorted({*args.leave_out})
    rows = [{"k": k, "left_out": left_out} for k in range(N, 0, -1)]
    if left_out:
        rows.insert(0, {"k": N, "left_out": []})
    present = {layer: fusion.adapter_names for (layer, _), fusion in fusions(bert)}
    for row in rows:
        without = [layer - 1 for layer in row["left_out"]]
        row["kept"] = strongest(activity, present, row["k"], without)
    print(
        f"measuring accuracy ({len(split)} examples) and speed of {args.run} at {len(rows)} sizes",
        flush=True,
    )
    measured = measure(bert, head, config, task, split, [row["kept"] for row in rows], dtype)
    return [{**row, **values} for row, values in zip(rows, measured, strict=True)]


def write_and_reload(args, bert, chosen, task, split, directory):
    """Writes the smaller run, and loads it from its own files, so they are whole. Returns its
    config.json and metrics.json."""
    pruned = {
        "from": str(args.run.resolve()),
        "keep": args.keep,
        "leave_out": chosen["left_out"],
        "limit": args.limit,
        "kept": {layer + 1: names for layer, names in chosen["kept"].items()},
        "command": args.command,
    }
    changes = {"pruned": pruned}
    if args.model is not None:
        changes["model"] = resolved(args.model)
        changes |= describe_encoder(bert)
    if args.data_dir is not None:
        changes["data_dir"] = resolved(args.data_dir)
    write_run(args.run, args.model, chosen["kept"], changes, directory)
    metrics = read_json(args.run / "metrics.json")
    write_json(directory / "metrics.json", metrics)
    bert, head, config = load_run(directory)
    _, dtype = cast(bert, head, config, args.device)
    scores, loss = scores_of(bert, head, config, task, split, dtype)
    metrics |= {
        "model": config["model"],
        **scores,
        "dev_loss": loss,
        "dev_examples": len(split),
        "out": str(args.out),
    }
    write_json(directory / "metrics.json", metrics)
    return config, metrics


def main(argv=None):
    parser = Parser(
        prog="python -m experiments.prune",
        description="Prunes a fusion, and measures accuracy and speed by the number of adapters.",
    )
    parser.add_argument("run", type=Path, help="a finished fusion run")
    parser.add_argument(
        "--keep", type=int, metavar="K", help="adapters that stay in each layer; default: all"
    )
    parser.add_argument(
        "--leave-out",
        type=int,
        nargs="+",
        default=[],
        metavar="LAYER",
        help="no adapters there; from 1",
    )
    parser.add_argument("--out", type=Path, required=True, help="directory of the smaller run")
    parser.add_argument(
        "--limit",
        type=int,
        default=1000,
        help="training examples to see the fusion weights on, at most",
    )
    parser.add_argument("--data-dir", help="default: where the run had it")
    add_encoder(parser)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"])
    ended = "interrupted, nothing is written"
    with errors_in_one_line("prune.py", torch.OutOfMemoryError, interrupted=ended):
        args = parser.parse_args(argv)
        args.command = shlex.join(["experiments.prune", *(sys.argv[1:] if argv is None else argv)])
        result = prune(args)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
