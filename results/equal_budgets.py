"""What equal_budgets.sh needs beside train.py.

python -m results.equal_budgets folds DATA    # CB, and 1,000 examples of RTE, in five parts, which
                                              # take turns: three train, one chooses, one is scored
python -m results.equal_budgets best RUN ...  # the best of these runs, by the part that chooses
python -m results.equal_budgets rows RUN ...  # their rows, with the accuracy on the scored part"""

import random
import sys
from pathlib import Path

import pandas as pd

from results.one_source import best_of, row_of, write

PLACE = Path("runs/equal_budgets")


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


def best(*directories):
    print(best_of(directories))


def rows(*directories):
    """Of runs in runs/equal_budgets/TASK-FOLD/SYSTEM-RATE"""
    found = []
    for run in map(Path, directories):
        (task, fold), system = run.parent.name.split("-"), run.name.partition("-")[0]
        row = {"task": task, "fold": fold, "system": system}
        row["is_chosen"] = best_of(sorted(run.parent.glob(f"{system}-*"))) == run
        found.append({**row, **row_of(run, PLACE / "data" / fold / "scored")})
    pd.DataFrame(found).to_csv(PLACE / "equal_budgets.csv", index=False)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
