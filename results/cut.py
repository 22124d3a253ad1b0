"""Makes the data of minilm_table1.csv: of each task of DATA, at most 10,000 training and 2,000
development examples.

    python results/cut.py DATA OUT
"""

import random
import sys
from pathlib import Path

source, out = map(Path, sys.argv[1:])
for task in sorted(path for path in source.iterdir() if path.is_dir()):
    (out / task.name).mkdir(parents=True, exist_ok=True)
    for split, most in (("train", 10_000), ("validation", 2_000)):
        with open(task / f"{split}.jsonl", encoding="utf-8", newline="\n") as file:
            rows = [row for row in file.read().split("\n") if row]
        if len(rows) > most:
            rows = [rows[i] for i in sorted(random.Random(0).sample(range(len(rows)), most))]
        (out / task.name / f"{split}.jsonl").write_text(
            "\n".join(rows) + "\n", encoding="utf-8", newline="\n"
        )
