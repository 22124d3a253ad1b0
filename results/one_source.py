"""What one_source.sh needs beside train.py and results/further.py.

python -m results.one_source split DATA       # MRPC, 1,000 training examples of it held out
python -m results.one_source permute RUN OUT  # an adapter of the same numbers, in other places
python -m results.one_source rate RUN ...     # the learning rate of the best of these runs
python -m results.one_source rows RUN ...     # their rows, with the accuracy on the held-out"""

import sys
from pathlib import Path

import pandas as pd
import torch

import results.further  # noqa: F401  (its stages, and the kind of encoder)
import train
from adapter import load_adapter, save_adapter
from bert import Bert
from experiments.load_run import load_run
from formats.adapterhub import ADAPTER, read, read_run
from formats.files import read_json, write_json

PLACE = Path("runs/one_source")
MEASURED = "seed accuracy best_epoch trained_parameters train_examples dev_examples seconds".split()


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{row}\n" for row in rows))


def split(data):
    train_rows, dev = (
        Path(data, "mrpc", f"{name}.jsonl").read_text().splitlines()
        for name in ("train", "validation")
    )
    write(PLACE / "data/mrpc/train.jsonl", train_rows[:-1000])
    write(PLACE / "data/mrpc/validation.jsonl", dev[:300])
    write(PLACE / "held_out/mrpc/validation.jsonl", train_rows[-1000:])


@torch.no_grad()
def permute(directory, out):
    bert = Bert.from_pretrained(read_run(directory)["options"]["model"])
    name = load_adapter(bert, read(directory, ADAPTER))
    torch.manual_seed(0)
    for path, p in bert.named_parameters():
        if ".adapters." in path:
            p.copy_(p.flatten()[torch.randperm(p.numel())].view_as(p))
    save_adapter(bert, name, out)


def best_of(directories):
    return max(directories, key=lambda one: read_json(Path(one, "metrics.json"))["accuracy"])


def rate(*directories):
    print(read_run(best_of(directories))["options"]["lr"])


def row_of(directory, held_out):
    """What a run has measured, also on the examples in held_out, which is kept in a file. "right":
    0 or 1 for each of them, by length, as for all systems"""
    kept, result = directory / "held_out.json", read_json(directory / "metrics.json")
    if not kept.is_file():
        run = load_run(directory)
        examples = run.split("validation", held_out)
        labels, predictions, _ = train.predictions(run.model, run.task, examples, run.args)
        right = (labels == predictions).int().tolist()
        found = {"held_out": sum(right) / len(right), "held_out_examples": len(right)}
        write_json(kept, {**found, "right": "".join(map(str, right))})
    options, machine = (read_run(directory)[key] for key in ("options", "machine"))
    row = {"lr": options["lr"], "epochs": options["epochs"], **read_json(kept)}
    row |= {name: result[name] for name in MEASURED}
    return row | {name: machine[name] for name in ("processor", "commit")}


def rows(*directories):
    runs = [Path(directory) for directory in directories]
    found = [{"system": r.name[:-2], **row_of(r, PLACE / "held_out")} for r in runs]
    pd.DataFrame(found).to_csv(PLACE / "one_source.csv", index=False)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
