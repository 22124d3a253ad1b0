"""Smaller data: of each task at most so many training examples, and a fifth of that of other ones
to develop on.

python results/cut.py DATA OUT NUMBER
"""

import random
import sys
from pathlib import Path

source, out, number = sys.argv[1:]

for path in sorted(Path(source).glob("*/train.jsonl")):
    rows = [row for row in path.read_bytes().split(b"\n") if row]
    random.Random(0).shuffle(rows)
    few = min(int(number), len(rows) * 5 // 6)
    target = Path(out, path.parent.name)
    target.mkdir(parents=True, exist_ok=True)
    for split, part in (("train", rows[:few]), ("validation", rows[few : few + few // 5])):
        (target / f"{split}.jsonl").write_bytes(b"\n".join(part) + b"\n")
