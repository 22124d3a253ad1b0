"""The data of minilm_table1.csv: at most 10,000 training and 2,000 development examples of a task.

python results/cut.py DATA OUT
"""

import random
import sys
from pathlib import Path

source, out = map(Path, sys.argv[1:])
for path in sorted(source.glob("*/*.jsonl")):
    most = {"train": 10_000, "validation": 2_000}[path.stem]
    rows = [row for row in path.read_bytes().split(b"\n") if row]
    if len(rows) > most:
        rows = [rows[i] for i in sorted(random.Random(0).sample(range(len(rows)), most))]
    (out / path.parent.name).mkdir(parents=True, exist_ok=True)
    (out / path.parent.name / path.name).write_bytes(b"\n".join(rows) + b"\n")
