"""Smaller data. Of each task at most 10,000 training and 2,000 development examples, or, with a
number, at most so many training examples, and a fifth of that of other ones to develop on.

python results/cut.py DATA OUT [NUMBER]
"""

import random
import sys
from pathlib import Path

source, out, *number = sys.argv[1:]


def write(name, rows):
    path = Path(out, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\n".join(rows) + b"\n")


for path in sorted(Path(source).glob("*/*.jsonl")):
    name, most = path.relative_to(source), {"train": 10_000, "validation": 2_000}[path.stem]
    rows = [row for row in path.read_bytes().split(b"\n") if row]
    if number and path.stem == "train":
        random.Random(0).shuffle(rows)
        few = min(int(number[0]), len(rows) * 5 // 6)
        write(name, rows[:few])
        write(name.with_name("validation.jsonl"), rows[few : few + few // 5])
    elif not number:
        if len(rows) > most:
            rows = [rows[i] for i in sorted(random.Random(0).sample(range(len(rows)), most))]
        write(name, rows)
