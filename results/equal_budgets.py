"""What equal_budgets.sh needs beside train.py.

python -m results.equal_budgets folds DATA    # CB, and 1,000 examples of RTE, in five parts, which
                                              # take turns: three train, one chooses, one is scored
python -m results.equal_budgets best RUN ...  # the best of these runs, by the part that chooses
python -m results.equal_budgets rows RUN ...  # their rows, with the accuracy on the scored part,
                                              # and every difference between the best of a system"""

import itertools
import random
import sys
from pathlib import Path

import pandas as pd

import train
from experiments.load_run import load_run
from experiments.report import with_interval, write_text
from formats.adapterhub import read_run
from formats.files import read_json, write_json

PLACE = Path("runs/equal_budgets")
MEASURED = "seed accuracy best_epoch trained_parameters train_examples dev_examples seconds".split()


def folds(data):
    for task in ("cb", "rte"):
        files = [Path(data, task, f"{name}.jsonl") for name in ("train", "validation")]
        rows = [f"{row}\n" for file in files for row in file.read_text().splitlines()]
        random.Random(0).shuffle(rows)
        parts = [rows[:1000][i::5] for i in range(5)]
        for fold in range(5):
            scored, chooses, *rest = parts[fold:] + parts[:fold]
            place = PLACE / "data" / str(fold)
            write_text(place / task / "train.jsonl", "".join(sum(rest, [])))
            write_text(place / task / "validation.jsonl", "".join(chooses))
            write_text(place / "scored" / task / "validation.jsonl", "".join(scored))


def best(*runs):
    print(max(runs, key=lambda run: read_json(Path(run, "metrics.json"))["accuracy"]))


def right(run, fold):
    """The accuracy on the scored part, and 0 or 1 for each of its examples; kept in the run."""
    kept = run / "held_out.json"
    if not kept.is_file():
        loaded = load_run(run)
        examples = loaded.split("validation", PLACE / "data" / fold / "scored")
        labels, predicted, _ = train.predictions(loaded.model, loaded.task, examples, loaded.args)
        found = (labels == predicted).int().tolist()
        share = {"held_out": sum(found) / len(found), "held_out_examples": len(found)}
        write_json(kept, {**share, "right": "".join(map(str, found))})
    return read_json(kept)


def rows(*directories):
    """Of runs in runs/equal_budgets/TASK-FOLD/SYSTEM-RATE"""
    found = []
    for run in sorted(map(Path, directories)):
        (task, fold), system = run.parent.name.split("-"), run.name.partition("-")[0]
        record, result = read_run(run), read_json(run / "metrics.json")
        row = {"task": task, "fold": fold, "system": system}
        row |= {name: record["options"][name] for name in ("lr", "epochs")} | right(run, fold)
        row |= {name: result[name] for name in MEASURED}
        found.append(row | {name: record["machine"][name] for name in ("processor", "commit")})
    found = pd.DataFrame(found)
    chosen = found.groupby(["task", "fold", "system"])["accuracy"].idxmax()
    found.insert(3, "is_chosen", found.index.isin(chosen))
    found.to_csv("results/equal_budgets.csv", index=False)
    lines = ["task,system,minus,over folds,over all scored examples"]  # the mean (95 % interval)
    for task, of in found[found["is_chosen"]].groupby("task"):
        shares = 100 * of.pivot(index="fold", columns="system", values="held_out")
        bits = of.groupby("system")["right"].sum().map(list).map(pd.Series)  # texts: fold by fold
        for one, other in itertools.permutations(shares, 2):
            differences = 100 * (bits[one].astype(int) - bits[other].astype(int))
            intervals = with_interval(shares[one] - shares[other]), with_interval(differences)
            lines.append(",".join([task, one, other, *intervals]))
    write_text(Path("results/equal_budgets_differences.csv"), "\n".join(lines) + "\n")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
