"""A smaller fusion: without the adapters that it hardly uses, or without all adapters in some
layers (AdapterDrop, section 8.2).

    python -m experiments.prune runs/fusion-rte --keep 8 --out runs/fusion-rte-8
    python -m experiments.prune runs/fusion-rte --keep 8 --leave-out 1 2 12 --out ...

In every layer the K adapters stay that have the largest mean fusion weight on the target's training
set. Q, K and V stay as they were; nothing is trained again. To help you choose K, the accuracy on
the development set is printed for every K, and written to prune.csv. Layers are counted from 1.

OUT is a run as train.py writes it, in AdapterHub's files. An adapter's `leave_out` names the layers
in which it was pruned; an adapter that was pruned in all layers is gone.
"""

if __name__ == "__main__":
    from runtime.command import announce

    announce("prune.py")

import contextlib
import io
import os
import shlex
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from adapter import read_config, save_adapter
from experiments.figure4 import average, inputs_of
from experiments.load_run import (
    cast,
    check_stage,
    load_run,
    load_run_split,
    read_run_config,
    unknown_kind,
)
from experiments.report import write_csv
from formats.adapterhub import digest, run_encoder
from formats.files import read_json, write_json
from fusion import fusions, save_fusion
from runtime.command import run_command
from runtime.processes import choose_device
from runtime.results import eval_batch_size
from runtime.settings import COUNT, argument, option, parse, resolved
from train import evaluate
from variants.masking import mask


@dataclass(frozen=True)
class Options:
    run: Path = argument("a finished fusion run")
    keep: int | None = option(
        None, "adapters that stay in each layer; default: all", metavar="K", valid=COUNT
    )
    leave_out: tuple[int, ...] = option((), "no adapters there; from 1", metavar="LAYER")
    out: Path = option(None, "directory of the smaller run", required=True)
    limit: int = option(
        1000, "training examples to see the fusion weights on, at most", valid=COUNT
    )
    data_dir: str | None = option(None, "default: where the run had it")
    model: str | None = option(None, "where the encoder is now, if not where the run found it")
    allow_other_encoder: bool = option(False, "even if the encoder's weights are others")
    device: str = option("auto", choices=["auto", "cpu", "cuda", "mps"])


def mean_by_layer(bert, names, examples):
    """{layer: {adapter: mean fusion weight}}, summed over the locations of a layer with two."""
    result = {}
    for (layer, _), s in average(bert, inputs_of(bert, examples)).items():
        values = result.setdefault(layer, dict.fromkeys(names, 0.0))
        for name, weight in zip(names, s.nan_to_num().tolist(), strict=True):
            values[name] += weight
    return result


def strongest(mean, present, k, left_out):
    """{layer: the k adapters that stay, in the fusion's order}. present: {layer: its adapters};
    left_out: layers from 1"""
    kept = {}
    for layer, names in present.items():
        best = sorted(names, key=lambda name: -mean[layer][name])[:k]
        kept[layer] = [name for name in names if name in best and layer + 1 not in left_out]
    return kept


def activate_only(bert, modules, kept):
    """Activates the fusion with the adapters in `kept` alone, and plain BERT in layers where there
    are none. modules: {(layer, location): Fusion}, of all layers"""
    name = next(fusion.name for fusion in modules.values())
    for (layer, location), slot in bert.slots():
        slot.fusion = modules.get((layer, location)) if kept.get(layer) else None
        slot.active = name if kept.get(layer) else None
    for (layer, _), fusion in fusions(bert):
        mask(bert, set(fusion.adapter_names) - set(kept[layer]), [layer])


def scores_of(bert, head, config, task, split, dtype):
    """{score: value} on a split, its mean loss included."""
    size = eval_batch_size(config["batch_size"], config["grad_accumulation"])
    labels, predictions, loss = evaluate(bert, head, task, split, size, dtype)
    scores = {name: score(labels, predictions) for name, score in task.scores.items()}
    return {**scores, "dev_loss": loss}


# --------------------------------------------------------------------------------------------------
# The smaller run


def write_run(options, kept, changes, out):
    """A finished run in `out`, without metrics.json. Its adapters are those in `kept`, bit by bit;
    Ψ, the head and the configuration are the larger run's, including which encoder it was trained
    on."""
    with contextlib.redirect_stdout(io.StringIO()):  # its notes have been printed
        bert, _, config = load_run(options.run, model=options.model, allow_other_encoder=True)
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
        directory, file = out / "adapters" / name, "adapter_config.json"
        save_adapter(bert, name, directory)
        saved = read_json(options.run / "adapters" / name / file)  # what else it says stays
        write_json(directory / file, {**saved, "config": read_json(directory / file)["config"]})
    save_fusion(bert, out)
    for name in ("head_config.json", "model_head.safetensors", "log.jsonl"):
        if (options.run / name).is_file():
            shutil.copyfile(options.run / name, out / name)
    config = {**read_json(options.run / "config.json"), **changes, "adapters": names}
    config["adapter_digests"] = {}
    for name in names:
        directory = out / "adapters" / name
        config["adapter_digests"][name] = digest(directory, name, read_config(directory, name)[1])
    config["adapter_encoders"] = {  # those of their training, also after --allow-other-encoder
        name: run_encoder(options.run / "adapters" / name) for name in names
    }
    write_json(out / "config.json", config)


def remove_others(bert, names, kept):
    """Removes all adapters that are not in `kept`, and the fusions that have none left. names: of
    all that stay somewhere, in the fusion's order"""
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


def check_run(options, bert, config):
    """Raises ValueError for a run that cannot be pruned, or not like this."""
    if unknown := unknown_kind(bert):
        raise ValueError(
            f"{options.run}: {unknown} cannot be pruned, only the paper's fusion over bottleneck "
            "adapters"
        )
    N, layers = len(config["adapters"]), {layer + 1 for (layer, _), _ in fusions(bert)}
    if options.keep is not None and options.keep > N:
        raise ValueError(
            f"--keep must be in 1 .. {N}, the number of adapters in {options.run}, not "
            f"{options.keep}"
        )
    if unknown := sorted(set(options.leave_out) - layers):
        has = ", ".join(map(str, sorted(layers)))
        raise ValueError(f"--leave-out {unknown[0]}: the layers with adapters are {has}")
    if set(options.leave_out) == layers:
        raise ValueError("--leave-out leaves no layer with adapters")
    reading = ("original_ln_before", "original_ln_after", "residual_before_ln")
    configs = [adapter.config for _, slot in bert.slots() for adapter in slot.adapters.values()]
    if len({tuple(getattr(config, field) for field in reading) for config in configs}) > 1:
        raise ValueError(
            f"the adapters of {options.run} differ in {', '.join(reading)}, where the last one "
            "decides for all: without it the others would read something else; see --mask"
        )


def accuracies(options, bert, head, config, mean, task, split, dtype):
    """[k, layers left out, accuracy] of the whole run and then for all K down to one, printed as
    they are found."""
    modules, N = dict(fusions(bert)), len(config["adapters"])
    present = {layer: fusion.adapter_names for (layer, _), fusion in modules.items()}
    print(f"accuracy on {len(split)} development examples, by adapters in a layer", flush=True)
    sizes, rows = [(N, ()), *((k, options.leave_out) for k in range(N, 0, -1))], []
    for k, left_out in dict.fromkeys(sizes):
        activate_only(bert, modules, strongest(mean, present, k, left_out))
        accuracy = scores_of(bert, head, config, task, split, dtype)["accuracy"]
        without = " ".join(map(str, left_out))
        print(f"{k:>4}  {accuracy:.4f}{'  without layers ' * bool(without)}{without}", flush=True)
        rows.append([k, without, accuracy])
    return rows, strongest(mean, present, options.keep or N, options.leave_out)


@contextlib.contextmanager
def complete(out):
    """A directory to write to, which takes the place of `out` at the end, or is removed."""
    out.parent.mkdir(parents=True, exist_ok=True)  # before the long work: it may be impossible
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    temporary.mkdir()
    try:
        yield temporary
        temporary.rename(out)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)


def main(argv=None):
    options = parse(Options, argv, "python -m experiments.prune", __doc__)
    options = replace(options, leave_out=tuple(sorted(set(options.leave_out))))
    command = shlex.join(["experiments.prune", *(sys.argv[1:] if argv is None else argv)])
    run, out = options.run, options.out
    if options.keep is None and not options.leave_out:
        raise ValueError(
            "give --keep, --leave-out, or both: how many adapters stay in a layer, which layers "
            "stay without"
        )
    if out.is_symlink() or out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out} is already there: choose an empty or a new directory")
    check_stage(run, read_run_config(run), ["fusion"], "can be pruned")
    given = {"model": options.model, "allow_other_encoder": options.allow_other_encoder}
    bert, head, config = load_run(run, **given)
    check_run(options, bert, config)
    task, split = load_run_split(run, bert, config, "validation", options.data_dir)
    _, seen = load_run_split(run, bert, config, "train", options.data_dir, limit=options.limit)
    device, _ = choose_device(options.device, "float32")
    with complete(out) as temporary:
        print(f"{run}: mean fusion weights on {len(seen)} training examples", flush=True)
        mean = mean_by_layer(bert.to(device), config["adapters"], seen)
        _, dtype = cast(bert, head, config, options.device)
        rows, kept = accuracies(options, bert, head, config, mean, task, split, dtype)
        write_csv(temporary / "prune.csv", ["k", "left_out", "accuracy"], rows)
        pruned = {"from": str(run.resolve()), "keep": options.keep, "limit": options.limit}
        pruned |= {"leave_out": options.leave_out, "command": command}
        pruned["kept"] = {layer + 1: names for layer, names in kept.items()}
        moved = {name: getattr(options, name) for name in ("model", "data_dir")}
        moved = {name: resolved(place) for name, place in moved.items() if place is not None}
        write_run(options, kept, {**moved, "pruned": pruned}, temporary)

        metrics = read_json(run / "metrics.json")
        write_json(temporary / "metrics.json", metrics)
        print("accuracy of the smaller run, read from its own files", flush=True)
        with contextlib.redirect_stdout(io.StringIO()):
            bert, head, config = load_run(temporary, allow_other_encoder=True)
        _, dtype = cast(bert, head, config, options.device)
        scores = scores_of(bert, head, config, task, split, dtype)
        said = {"model": config["model"], "dev_examples": len(split), "out": str(out)}
        write_json(temporary / "metrics.json", {**metrics, **said, **scores})
    left, N, accuracy = config["adapters"], rows[0][0], scores["accuracy"]
    keep = options.keep or N
    print(f"{out}: {len(left)} of {N} adapters, at most {keep} a layer, accuracy {accuracy:.4f}")
    result = {"run": str(run), "out": str(out), "keep": options.keep}
    result |= {"left_out": options.leave_out, "adapters": left}
    return {**result, "accuracy": accuracy, "accuracy_of_all": rows[0][2]}


if __name__ == "__main__":
    run_command("prune.py", main, interrupted="interrupted, nothing is written")
