"""What equal_budgets.sh needs beside train.py.

python -m results.equal_budgets folds DATA    # CB, and 1,000 examples of RTE, in five parts, which
                                              # take turns: three train, one chooses, one is scored
python -m results.equal_budgets best RUN ...  # the best of these runs, by the part that chooses
python -m results.equal_budgets rows RUN ...  # their rows, with the accuracy on the scored part"""

import random
import sys
from pathlib import Path

import pandas as pd

import train
from experiments.load_run import load_run
from formats.adapterhub import read_run
from formats.files import read_json, write_json

PLACE = Path("runs/equal_budgets")
MEASURED = "seed accuracy best_epoch trained_parameters train_examples dev_examples seconds".split()


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{row}\n" for row in rows))


def folds(data):
    for task in ("cb", "rte"):
        files = [Path(data, task, f"{name}.jsonl") for name in ("train", "validation")]
        rows = [row for file in files for row in file.read_text().splitlines()]
        random.Random(0).shuffle(rows)
        parts = [rows[:1000][i::5] for i in range(5)]
        for fold in range(5):
            scored, chooses, *rest = parts[fold:] + parts[:fold]
            place = PLACE / "data" / str(fold)
            write(place / task / "train.jsonl", sum(rest, []))
            write(place / task / "validation.jsonl", chooses)
            write(place / "scored" / task / "validation.jsonl", scored)


def best_of(runs):
    return max(runs, key=lambda run: read_json(Path(run, "metrics.json"))["accuracy"])


def best(*runs):
    print(best_of(runs))


def rows(*directories):
    """Of runs in runs/equal_budgets/TASK-FOLD/SYSTEM-RATE. "right": 0 or 1 for each scored example,
    by length, as for all systems; it is kept in the run."""
    found = []
    for run in map(Path, directories):
        (task, fold), system = run.parent.name.split("-"), run.name.partition("-")[0]
        kept, record, result = run / "held_out.json", read_run(run), read_json(run / "metrics.json")
        if not kept.is_file():
            loaded = load_run(run)
            examples = loaded.split("validation", PLACE / "data" / fold / "scored")
            labels, predicted, _ = train.predictions(
                loaded.model, loaded.task, examples, loaded.args
            )
            right = (labels == predicted).int().tolist()
            of = {"held_out": sum(right) / len(right), "held_out_examples": len(right)}
            write_json(kept, {**of, "right": "".join(map(str, right))})
        row = {"task": task, "fold": fold, "system": system}
        row["is_chosen"] = best_of(sorted(run.parent.glob(f"{system}-*"))) == run
        row |= {name: record["options"][name] for name in ("lr", "epochs")} | read_json(kept)
        row |= {name: result[name] for name in MEASURED}
        found.append(row | {name: record["machine"][name] for name in ("processor", "commit")})
    pd.DataFrame(found).to_csv(PLACE / "equal_budgets.csv", index=False)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
