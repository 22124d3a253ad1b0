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

import copy
import shlex
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from adapter import read_config, save_adapter
from bert import activate
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


def check_run(options, bert, config):
    """Raises ValueError for a run that cannot be pruned, or not like this."""
    if unknown := unknown_kind(bert):
        raise ValueError(
            f"{options.run}: {unknown} cannot be pruned, only the paper's fusion over bottleneck "
            "adapters"
        )
    N, layers = len(config["adapters"]), {layer + 1 for (layer, _), _ in fusions(bert)}
    if options.keep is not None and options.keep > N:
        raise ValueError(f"--keep must be in 1 .. {N}, the adapters of {options.run}")
    if not set(options.leave_out) < layers:
        raise ValueError(
            f"--leave-out takes some of the layers with adapters, which are {sorted(layers)}"
        )
    reading = ("original_ln_before", "original_ln_after", "residual_before_ln")
    configs = [adapter.config for _, slot in bert.slots() for adapter in slot.adapters.values()]
    if len({tuple(getattr(config, field) for field in reading) for config in configs}) > 1:
        raise ValueError(
            f"the adapters of {options.run} differ in {', '.join(reading)}, where the last one "
            "decides for all: without it the others would read something else; see --mask"
        )


# --------------------------------------------------------------------------------------------------
# Which adapters stay


def mean_by_layer(bert, names, examples):
    """{layer: {adapter: mean fusion weight}}, summed over the locations of a layer with two."""
    result = {}
    for (layer, _), s in average(bert, inputs_of(bert, examples)).items():
        values = result.setdefault(layer, dict.fromkeys(names, 0.0))
        for name, weight in zip(names, s.nan_to_num().tolist(), strict=True):
            values[name] += weight
    return result


def strongest(bert, mean, k, left_out):
    """{layer: the k adapters that stay, in the fusion's order}; left_out: layers from 1"""
    kept = {}
    for (layer, _), fusion in fusions(bert):
        names = fusion.adapter_names
        best = sorted(names, key=lambda name: -mean[layer][name])[:k]
        kept[layer] = [name for name in names if name in best and layer + 1 not in left_out]
    return kept


def pruned(bert, names, kept):
    """(a copy of an encoder that has the adapters in `kept` alone, and no fusion in layers where
    there are none; their names in the order of its fusion). names: of all adapters"""
    bert, layers = copy.deepcopy(bert), [layer for layer in kept if kept[layer]]
    names = [name for name in names if any(name in kept[layer] for layer in layers)]
    everywhere = [name for name in names if all(name in kept[layer] for layer in layers)]
    if everywhere:  # the reference reads the last one's configuration in every layer
        names = [name for name in names if name != everywhere[-1]] + everywhere[-1:]
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
    activate(bert, ",".join(names))
    return bert, names


def scores_of(bert, head, config, task, split, device):
    """{score: value} on a split, its mean loss included, in the precision of training."""
    _, dtype = cast(bert, head, config, device)
    size = eval_batch_size(config["batch_size"], config["grad_accumulation"])
    labels, predictions, loss = evaluate(bert, head, task, split, size, dtype)
    scores = {name: score(labels, predictions) for name, score in task.scores.items()}
    return {**scores, "dev_loss": loss}


# --------------------------------------------------------------------------------------------------
# The smaller run


def write_run(run, bert, names, changes, out):
    """A finished run in `out`, without metrics.json. Its adapters are those of `bert`, bit by bit;
    Ψ, the head and the configuration are the larger run's, including which encoder it was trained
    on."""
    for name in names:
        directory, file = out / "adapters" / name, "adapter_config.json"
        save_adapter(bert, name, directory)
        saved = read_json(run / "adapters" / name / file)  # what else it says stays
        write_json(directory / file, {**saved, "config": read_json(directory / file)["config"]})
    save_fusion(bert, out)
    for name in ("head_config.json", "model_head.safetensors", "log.jsonl"):
        if (run / name).is_file():
            shutil.copyfile(run / name, out / name)
    config = {**read_json(run / "config.json"), **changes, "adapters": names}
    config["adapter_digests"] = {}
    for name in names:
        directory = out / "adapters" / name
        config["adapter_digests"][name] = digest(directory, read_config(directory, name)[1])
    config["adapter_encoders"] = {  # those of their training, also after --allow-other-encoder
        name: run_encoder(run / "adapters" / name) for name in names
    }
    write_json(out / "config.json", config)


def main(argv=None):
    options = parse(Options, argv, "python -m experiments.prune", __doc__)
    command = shlex.join(["experiments.prune", *(sys.argv[1:] if argv is None else argv)])
    run, out, left_out = options.run, options.out, tuple(sorted(set(options.leave_out)))
    if options.keep is None and not left_out:
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
    names, N = config["adapters"], len(config["adapters"])
    task, split = load_run_split(run, bert, config, "validation", options.data_dir)
    _, seen = load_run_split(run, bert, config, "train", options.data_dir, limit=options.limit)
    device, _ = choose_device(options.device, "float32")
    out.parent.mkdir(parents=True, exist_ok=True)  # before the long work: it may be impossible
    with tempfile.TemporaryDirectory(dir=out.parent) as directory:
        print(f"{run}: mean fusion weights on {len(seen)} training examples", flush=True)
        mean = mean_by_layer(bert.to(device), names, seen)
        print(f"accuracy on {len(split)} development examples, by adapters in a layer", flush=True)
        sizes, rows = [(N, ()), *((k, left_out) for k in range(N, 0, -1))], []
        for k, without in dict.fromkeys(sizes):
            smaller, _ = pruned(bert, names, strongest(bert, mean, k, without))
            found = scores_of(smaller, head, config, task, split, options.device)
            rows.append([k, " ".join(map(str, without)), found["accuracy"]])
            text = f"  without layers {rows[-1][1]}" if without else ""
            print(f"{k:>4}  {found['accuracy']:.4f}{text}", flush=True)
            if (k, without) == (options.keep or N, left_out):
                scores = found

        kept = strongest(bert, mean, options.keep or N, left_out)
        smaller, left = pruned(bert.cpu(), names, kept)
        if any(there and left[-1] not in there for there in kept.values()):
            print(
                "note: no adapter is in all layers with a fusion: the `adapters` library reads the "
                "files, but runs no such fusion"
            )
        record = {"from": str(run.resolve()), "keep": options.keep, "limit": options.limit}
        record |= {"leave_out": left_out, "command": command}
        record["kept"] = {layer + 1: there for layer, there in kept.items()}
        moved = {name: getattr(options, name) for name in ("model", "data_dir")}
        moved = {name: resolved(place) for name, place in moved.items() if place is not None}
        complete = Path(directory) / "run"  # takes the place of --out in the end
        complete.mkdir()
        write_run(run, smaller, left, {**moved, "pruned": record}, complete)
        write_csv(complete / "prune.csv", ["k", "left_out", "accuracy"], rows)
        said = {"model": moved.get("model", config["model"]), "dev_examples": len(split)}
        metrics = {**read_json(run / "metrics.json"), **said, "out": str(out), **scores}
        write_json(complete / "metrics.json", metrics)
        complete.rename(out)
    accuracy, most = scores["accuracy"], options.keep or N
    print(f"{out}: {len(left)} of {N} adapters, at most {most} a layer, accuracy {accuracy:.4f}")
    result = {"run": str(run), "out": str(out), "keep": options.keep, "left_out": left_out}
    return {**result, "adapters": left, "accuracy": accuracy, "accuracy_of_all": rows[0][2]}


if __name__ == "__main__":
    run_command("prune.py", main, interrupted="interrupted, nothing is written")
