"""A smaller fusion: without the adapters that it hardly uses, or without all adapters in some
layers (AdapterDrop, section 8.2).

    python -m experiments.prune runs/fusion-rte --keep 8 --out runs/fusion-rte-8
    python -m experiments.prune runs/fusion-rte --keep 8 --leave-out 1 2 12 --out ...    # layers count from 1, as in figure4

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

import runtime.console  # noqa: F401  (first: Ctrl-C during imports, closed outputs)

# isort: split
import csv
import hashlib
import json
import os
import shlex
import shutil
import statistics
import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from adapter import save_adapter  # noqa: E402
from data import batches, length_groups  # noqa: E402
from experiments.figure4 import average, inputs_of  # noqa: E402
from experiments.load_run import cast, load_run, load_run_split  # noqa: E402
from formats.files import read_json, write_json  # noqa: E402
from fusion import fusions, save_fusion  # noqa: E402
from runtime.directory import resolved  # noqa: E402
from runtime.options import Parser
from runtime.processes import choose_device  # noqa: E402
from runtime.run import describe_encoder  # noqa: E402
from train import eval_batch_size, evaluate  # noqa: E402
from variants.folding import fold  # noqa: E402
from variants.masking import mask  # noqa: E402

SPEED_BATCH, ROUNDS = 32, 7  # examples at once; how often the speed is measured


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


def let_speak(bert, modules, kept):
    """Only those in `kept` speak from now on. modules: {(layer, location): Fusion}, of all
    layers"""
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


def measure(bert, head, config, task, split, settings, dtype):
    """[{"accuracy", "speed", "folded"}] for every {layer: adapters that speak}; the speeds in
    examples/s, one for each round."""
    modules = dict(fusions(bert))
    rows = []
    for kept in settings:
        let_speak(bert, modules, kept)
        labels, predictions = evaluate(
            bert,
            head,
            task,
            split,
            eval_batch_size(config["batch_size"], config["grad_accumulation"]),
            dtype,
        )
        rows.append(
            {
                "accuracy": (labels == predictions).sum().item() / len(labels),
                "speed": [],
                "folded": [],
            }
        )
    size = min(SPEED_BATCH, len(split))
    middle = next(
        islice(batches(split, size, bert.config.pad_token_id), len(split) // size // 2, None)
    )
    inputs = [[tensor.to(bert.device) for tensor in group] for _, group in length_groups(middle)]
    for i in range(-1, ROUNDS):  # the first is to warm up
        for kept, row in zip(settings, rows, strict=True):
            let_speak(bert, modules, kept)
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
        note = (
            f"  without layer{'s' * (len(row['left_out']) > 1)} "
            f"{', '.join(map(str, row['left_out']))}" * bool(row["left_out"])
        )
        yield (
            f"{row['k']:>4}  {row['accuracy']:>8.4f}  {cells[0]:>32}  {cells[1]:>8}  "
            f"{cells[2]:>32}  {cells[3]:>8}{note}"
        )


def speed_ups(row, first, form):
    """Of every round."""
    return [speed / whole for speed, whole in zip(row[form], first[form], strict=True)]


def speed_up(row, first, form):
    return statistics.median(speed_ups(row, first, form))


def write_csv(rows, path):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        header = [
            f"{form}_{kind}"
            for form in ("speed", "folded")
            for kind in ("median", "slowest", "fastest", "up")
        ]
        writer.writerow(["k", "left_out", "accuracy", *header])
        for row in rows:
            speeds = [
                [
                    statistics.median(row[form]),
                    min(row[form]),
                    max(row[form]),
                    speed_up(row, rows[0], form),
                ]
                for form in ("speed", "folded")
            ]
            writer.writerow(
                [
                    row["k"],
                    " ".join(map(str, row["left_out"])),
                    row["accuracy"],
                    *speeds[0],
                    *speeds[1],
                ]
            )


def draw(rows, keep, title, path):
    """Accuracy, and speed-up over the whole run, by k."""
    whole, rows = rows[0], [row for row in rows if row["left_out"] == rows[-1]["left_out"]]
    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(6, 5.5), layout="constrained")
    ks = [row["k"] for row in rows]
    above.plot(ks, [100 * row["accuracy"] for row in rows], "o-", color="black", markersize=4)
    above.axhline(
        100 * whole["accuracy"],
        color="0.5",
        linewidth=1,
        linestyle=":",
        label=f"all {whole['k']} in all layers",
    )
    above.set_ylabel("accuracy, %")
    above.legend(fontsize=8)
    for form, label, line in (("folded", "folded", "o-"), ("speed", "not folded", "s--")):
        colour = "black" if form == "folded" else "0.5"
        ups = [speed_up(row, whole, form) for row in rows]
        spread = [
            [up - min(speed_ups(row, whole, form)) for up, row in zip(ups, rows, strict=True)],
            [max(speed_ups(row, whole, form)) - up for up, row in zip(ups, rows, strict=True)],
        ]
        below.errorbar(
            ks,
            ups,
            spread,
            fmt=line,
            color=colour,
            markersize=4,
            linewidth=1,
            capsize=2,
            label=label,
        )
    below.set_ylabel(f"speed-up over all {whole['k']}")
    below.legend(fontsize=8)
    without = f" (none in layer {', '.join(map(str, rows[0]['left_out']))})" * bool(
        rows[0]["left_out"]
    )
    below.set_xlabel(f"adapters per layer{without}")
    below.xaxis.get_major_locator().set_params(integer=True)
    if len(ks) <= 20:
        below.set_xticks(ks)
    for panel in (above, below):
        panel.axvline(keep, color="0.85", linewidth=6, zorder=0)  # what OUT keeps
        panel.grid(alpha=0.3)
    above.set_title(title, fontsize=10, parse_math=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


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
    for (layer, _), slot in bert.slots():
        for name in [name for name in slot.adapters if name not in kept.get(layer, ())]:
            del slot.adapters[name]
        if slot.fusion is not None and slot.adapters:
            slot.fusion.name, slot.fusion.adapter_names = (
                ",".join(names),
                [name for name in names if name in slot.adapters],
            )
        else:
            slot.fusion = None
    for name in names:
        adapters = [slot.adapters[name] for _, slot in bert.slots() if name in slot.adapters]
        without = [i for i in range(len(bert.layers)) if name not in kept.get(i, ())]
        for adapter in adapters:
            adapter.config = replace(adapter.config, leave_out=tuple(without))
        source, bert.source = (
            bert.source,
            read_json(run / "adapters" / name / "adapter_config.json").get("model_name"),
        )
        save_adapter(
            bert, name, out / "adapters" / name
        )  # with the encoder that it was trained on, not where that is now
        bert.source = source
    save_fusion(bert, out)
    for name in ("head_config.json", "model_head.safetensors", "log.jsonl"):
        if (run / name).is_file():
            shutil.copyfile(run / name, out / name)
    files = {name: out / "adapters" / name / "adapter.safetensors" for name in names}
    sums = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    write_json(
        out / "config.json", {**config, **changes, "adapters": names, "adapter_sha256": sums}
    )
    if not everywhere:
        print(
            "note: no adapter is in all layers with a fusion: the `adapters` library reads the "
            "files, but runs no such fusion"
        )


def prune(args):
    """Measures, and writes OUT. Raises ValueError and OSError before anything is there."""
    if args.keep is None and not args.leave_out:
        raise ValueError(
            "give --keep, --leave-out, or both: how many adapters stay in a layer, which layers "
            "stay without"
        )
    if args.limit < 1:
        raise ValueError(f"--limit must be at least 1, not {args.limit}")
    if (
        args.out.exists()
        and (not args.out.is_dir() or any(args.out.iterdir()))
        or args.out.is_symlink()
    ):
        raise ValueError(f"--out {args.out} is already there: choose an empty or a new directory")
    bert, head, config = load_run(
        args.run, model=args.model, allow_other_encoder=args.allow_other_encoder
    )
    if config["stage"] != "fusion":
        raise ValueError(
            f"{args.run} is of --stage {config['stage']}: only fusion runs can be pruned"
        )
    N = len(config["adapters"])
    if args.keep is not None and not 1 <= args.keep <= N:
        raise ValueError(
            f"--keep must be in 1 .. {N}, the number of adapters in {args.run}, not {args.keep}"
        )
    present = {layer: fusion.adapter_names for (layer, _), fusion in fusions(bert)}
    for layer in args.leave_out:
        if layer - 1 not in present:
            raise ValueError(
                f"--leave-out {layer}: the layers with adapters are "
                f"{', '.join(str(i + 1) for i in present)}"
            )
    left_out = sorted({layer - 1 for layer in args.leave_out})
    if len(left_out) == len(present):
        raise ValueError("--leave-out leaves no layer with adapters")
    configs = [slot.adapters[name].config for _, slot in bert.slots() for name in slot.adapters]
    reading = ("original_ln_before", "original_ln_after", "residual_before_ln")
    if len({tuple(getattr(config, field, None) for field in reading) for config in configs}) > 1:
        raise ValueError(
            f"the adapters of {args.run} differ in {', '.join(reading)}, where the last one "
            "decides for all: "
            "without it the others would read something else; see --mask"
        )
    task, split = load_run_split(args.run, bert, config, "validation", args.data_dir)
    _, seen = load_run_split(args.run, bert, config, "train", args.data_dir, limit=args.limit)
    device, _ = choose_device(args.device, "float32")
    args.out.parent.mkdir(parents=True, exist_ok=True)  # before the long work: it may be impossible
    temporary = args.out.with_name(
        f".{args.out.name}.{os.getpid()}"
    )  # OUT is there when it is whole
    temporary.mkdir()
    try:
        activity = activities(bert.to(device), config["adapters"], seen)
        device, dtype = cast(bert, head, config, args.device)

        keep = args.keep or N
        rows = [{"k": N, "left_out": []}] if left_out else []
        rows += [{"k": k, "left_out": [layer + 1 for layer in left_out]} for k in range(N, 0, -1)]
        for row in rows:
            row["kept"] = strongest(
                activity, present, row["k"], [layer - 1 for layer in row["left_out"]]
            )
        print(
            f"measuring accuracy ({len(split)} examples) and speed of {args.run} at "
            f"{len(rows)} sizes",
            flush=True,
        )
        measured = measure(bert, head, config, task, split, [row["kept"] for row in rows], dtype)
        rows = [{**row, **values} for row, values in zip(rows, measured, strict=True)]
        chosen = next(
            row for row in rows if row["k"] == keep and len(row["left_out"]) == len(left_out)
        )

        kept = {layer + 1: names for layer, names in chosen["kept"].items()}
        changes = {
            "pruned": {
                "from": str(args.run.resolve()),
                "keep": args.keep,
                "leave_out": chosen["left_out"],
                "limit": args.limit,
                "kept": kept,
                "command": args.command,
            }
        }
        if args.model is not None:
            changes["model"] = resolved(args.model)
            changes |= describe_encoder(bert)
        if args.data_dir is not None:
            changes["data_dir"] = resolved(args.data_dir)
        write_run(args.run, args.model, chosen["kept"], changes, temporary)
        metrics = read_json(args.run / "metrics.json")
        write_json(temporary / "metrics.json", metrics)
        bert, head, config = load_run(temporary)  # from its own files, so they are whole
        _, dtype = cast(bert, head, config, args.device)
        labels, predictions = evaluate(
            bert,
            head,
            task,
            split,
            eval_batch_size(config["batch_size"], config["grad_accumulation"]),
            dtype,
        )
        accuracy = (labels == predictions).sum().item() / len(labels)
        metrics |= {
            "model": config["model"],
            "accuracy": accuracy,
            "dev_examples": len(labels),
            "out": str(args.out),
        }
        write_json(temporary / "metrics.json", metrics)
        write_csv(rows, temporary / "prune.csv")
        draw(rows, keep, f"{args.run.resolve().name}: {N} adapters", temporary / "prune.png")
        temporary.rename(args.out)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
    print("\n".join(table(rows)))
    print(
        f"{args.out}: {len(config['adapters'])} of {N} adapters, at most {keep} a layer, accuracy "
        f"{accuracy:.4f}; "
        "prune.png, prune.csv"
    )
    return {
        "run": str(args.run),
        "out": str(args.out),
        "keep": args.keep,
        "left_out": chosen["left_out"],
        "adapters": config["adapters"],
        "accuracy": accuracy,
        "accuracy_of_all": rows[0]["accuracy"],
        **{f"{form}_up": speed_up(chosen, rows[0], form) for form in ("speed", "folded")},
    }


def main(argv=None):
    parser = Parser(
        description="Prunes a fusion, and measures accuracy and speed by the number of adapters."
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
    parser.add_argument("--model", help="where the encoder is now, if not where the run found it")
    parser.add_argument(
        "--allow-other-encoder", action="store_true", help="even if its weights are others"
    )
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"])
    try:
        args = parser.parse_args(argv)
        args.command = shlex.join(["experiments.prune", *(sys.argv[1:] if argv is None else argv)])
        result = prune(args)
    except (ValueError, OSError, FloatingPointError, torch.OutOfMemoryError) as e:
        print(f"prune.py: {' '.join(str(e).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("prune.py: interrupted, nothing is written", file=sys.stderr)
        sys.exit(130)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
