"""A smaller fusion: without the adapters that it hardly uses, or without all adapters in some
layers (AdapterDrop, section 8.2).

    python -m experiments.prune runs/fusion-rte --keep 8 --out runs/fusion-rte-8
    python -m experiments.prune runs/fusion-rte --keep 8 --leave-out 1 2 12 --out ...

Each layer keeps the K adapters with the largest mean fusion weight on examples of the target's
training file (whichever of them the run itself was trained on), over all tokens, but in the last
layer over [CLS] alone if the head reads no other. Q, K and V stay as they were; nothing is trained
again. To help you choose K, the score on the development set is printed for every K, and written to
prune.csv. Layers are counted from 1.

OUT is a run as train.py writes it, in AdapterHub's files. An adapter's `leave_out` names the layers
in which it was pruned; an adapter that was pruned in all layers is gone.
"""

import copy
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from adapter import read_saved_config, save_adapter
from bert import activate
from experiments.fusion_weights import inputs_of, mean_weights_read
from experiments.load_run import Reading, as_trained, check_fusion, load_run, unknown_kind
from experiments.report import write_csv
from formats.adapterhub import digest
from formats.files import read_json, write_json
from fusion import fusions, save_fusion
from runtime.command import run_command
from runtime.processes import choose_device
from runtime.settings import COUNT, argument, option, parse, same_option
from train import evaluate


@dataclass(frozen=True)
class Options:
    run: Path = argument("a finished fusion run")
    keep: int | None = option(None, "adapters that stay in each layer; default all", valid=COUNT)
    leave_out: tuple[int, ...] = option((), "no adapters there; from 1", metavar="LAYER")
    out: Path = option(None, "directory of the smaller run", required=True)
    limit: int = option(
        1000, "measure the weights on at most so many training examples", valid=COUNT
    )
    data_dir: str | None = option(None, "default: where the run had it")
    model: str | None = same_option(Reading, "model")
    imports: str | None = same_option(Reading, "imports")
    allow_other_encoder: bool = same_option(Reading, "allow_other_encoder")
    device: str = same_option(Reading, "device")


def check(options, bert, head, names):
    if unknown := unknown_kind(bert, head):
        raise ValueError(f"{options.run}: {unknown} cannot be pruned")
    layers = {layer + 1 for (layer, _), _ in fusions(bert)}
    if options.keep is not None and options.keep > len(names):
        raise ValueError(f"--keep must be in 1 .. {len(names)}, the adapters of {options.run}")
    if not set(options.leave_out) < layers:
        raise ValueError(f"--leave-out takes layers with adapters, not all of {sorted(layers)}")
    configs = [adapter.config for _, slot in bert.slots() for adapter in slot.adapters.values()]
    fields = configs[0].residual_fields()
    if len({tuple(getattr(config, field) for field in fields) for config in configs}) > 1:
        raise ValueError(
            f"the adapters of {options.run} differ in {', '.join(fields)}, where the last one "
            "decides for all"
        )


def weights_by_layer(bert, head, examples):
    """{layer: [N]}: the mean fusion weights, summed over the locations of a layer with two."""
    result = {}
    for (layer, _), s in mean_weights_read(bert, head, inputs_of(bert, examples))["read"].items():
        result[layer] = result.get(layer, 0) + s.nan_to_num(-1.0)  # -1: not in this layer
    return result


def pruned(bert, names, weights, k, left_out):
    """(a copy of an encoder that has only the k adapters of each layer with the largest weights,
    and none in the layers left out; their names in the order of its fusion). names: of all"""
    bert, kept = copy.deepcopy(bert), {}
    for layer in weights.keys() - {layer - 1 for layer in left_out}:
        best = weights[layer].argsort(descending=True, stable=True)[:k]
        kept[layer] = {names[n] for n in best if weights[layer][n] >= 0}
    names = [name for name in names if any(name in there for there in kept.values())]
    everywhere = [name for name in names if all(name in there for there in kept.values())]
    if everywhere:  # the reference uses the last one's configuration in every layer
        names = [name for name in names if name != everywhere[-1]] + everywhere[-1:]
    for (layer, _), slot in bert.slots():
        for name in set(slot.adapters) - kept.get(layer, set()):
            del slot.adapters[name]
        for name, adapter in slot.adapters.items():
            without = [i for i in range(len(bert.layers)) if name not in kept.get(i, ())]
            adapter.config = replace(adapter.config, leave_out=tuple(without))
        if slot.fusion is not None and slot.adapters:
            slot.fusion.name = ",".join(names)
            slot.fusion.adapter_names = [name for name in names if name in slot.adapters]
        else:
            slot.fusion = None
    activate(bert, ",".join(names))
    return bert, names


def write_run(run, bert, names, record, out):
    """A finished run in `out`, without metrics.json: the adapters of `bert`, bit by bit, and else
    what the larger run has. record: of the larger run, with `pruned` set"""
    adapters = {}
    for name in names:
        directory, file = out / "adapters" / name, "adapter_config.json"
        save_adapter(bert, name, directory)
        saved = read_json(run / "adapters" / name / file)  # what else it says stays
        write_json(directory / file, {**saved, "config": read_json(directory / file)["config"]})
        # new digests, so that the larger run's command with --resume refuses this directory
        sha256 = digest(directory, read_saved_config(directory, name)[1])
        adapters[name] = replace(record.loaded_adapters[name], sha256=sha256)
    save_fusion(bert, out)
    for name in ("head_config.json", "model_head.safetensors", "log.jsonl"):
        shutil.copyfile(run / name, out / name)
    replace(record, loaded_adapters=adapters).with_files(out).write(out)


def main(argv=None):
    options = parse(Options, argv, "python -m experiments.prune", __doc__)
    run, out, left_out = options.run, options.out, options.leave_out
    if options.keep is None and not left_out:
        raise ValueError("give --keep, --leave-out, or both")
    if out.exists() or out.is_symlink():
        raise ValueError(f"--out {out} is already there")
    allow = options.allow_other_encoder
    check_fusion(run, "can be pruned")
    loaded = load_run(run, model=options.model, allow_other_encoder=allow)
    bert, names = loaded.bert, loaded.adapters
    check(options, bert, loaded.head, names)
    task, split = loaded.task, loaded.split("validation", options.data_dir)
    seen = loaded.split("train", options.data_dir, options.limit)
    device, _ = choose_device(options.device, "float32")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as directory:  # fails before the long work
        print(f"{run}: mean fusion weights on {len(seen)} training examples", flush=True)
        weights = weights_by_layer(bert.to(device), loaded.head, seen)
        score = loaded.record.options["score"]
        print(f"{score} on {len(split)} development examples, by adapters in a layer", flush=True)
        scores = {}
        for k in range(len(names), 0, -1):
            smaller, _ = pruned(bert, names, weights, k, left_out)
            model = as_trained(replace(loaded, bert=smaller), options.device)
            scores[k] = evaluate(model, task, split, loaded.eval_batch_size)
            scores[k]["dev_loss"] = scores[k].pop("loss")
            print(f"{k:>4}  {scores[k][score]:.4f}", flush=True)

        k = options.keep or len(names)
        smaller, left = pruned(bert.cpu(), names, weights, k, left_out)
        pruned_by = {"from": str(run.resolve()), "keep": options.keep, "leave_out": left_out}
        metrics = {**read_json(run / "metrics.json"), **scores[k], "out": str(out)}
        complete = Path(directory) / "run"
        write_run(run, smaller, left, replace(loaded.record, pruned=pruned_by), complete)
        rows = [(count, found[score]) for count, found in scores.items()]
        write_csv(complete / "prune.csv", ["k", score], rows)
        write_json(complete / "metrics.json", {**metrics, "dev_examples": len(split)})
        complete.rename(out)
    print(f"{out}: {len(left)} of {len(names)} adapters, at most {k} in a layer")
    return {"run": str(run), "out": str(out), "adapters": left, score: metrics[score]}


if __name__ == "__main__":
    run_command("prune.py", main, interrupted="interrupted, nothing is written")
