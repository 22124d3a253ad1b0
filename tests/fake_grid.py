"""A grid whose programs of training are a stand-in that takes no time.

The stand-in writes what they would; its accuracy is made up from the run's name, or by FAKE/scores,
{word: points}, from its command. It refuses to run before what it needs is there. FAKE/fail has
"beginning of a run's name: why it fails"; while FAKE/slow is there, runs last until they are told
to stop; FAKE/log gets a line a run.
"""

import json
import os
import shlex
import signal
import sys
import time
import zlib
from pathlib import Path

if __name__ != "__main__":  # the stand-in, which is quick, has no need of these
    from unittest.mock import patch

    import pandas as pd

    import train as training
    from conftest import cli, write_rows
    from experiments import grid
    from runtime.command import run_command


def python(fake):
    """What starts the stand-in in place of Python."""
    return [sys.executable, "-S", __file__, str(fake)]


def train(fake, words):
    out = Path(words[-2])  # a grid's last words are --out OUT and the mode
    with open(fake / "log", "a") as log:
        log.write(f"{out.name}\n")
    name, _, reason = (fake / "fail").read_text().partition(": ")
    if name and out.name.startswith(name):
        print(f"what came before\ntrain.py: {reason}", file=sys.stderr)
        sys.exit(2)
    for word in words:
        if word.startswith(str(out.parent)) and word != str(out):
            assert os.path.isfile(word.split("/adapters/")[0] + "/metrics.json"), word
    out.mkdir(parents=True, exist_ok=True)

    def stop(*_):
        (out / "resume.pt").touch()
        sys.exit(130)

    signal.signal(signal.SIGTERM, stop)
    record = {"options": {"adapters": {}, "model": "M"}}
    record["machine"] = {"command": shlex.join(["train.py", *words])}
    (out / "run.json").write_text(json.dumps(record))
    while (fake / "slow").exists():
        time.sleep(0.02)
    scores = json.loads((fake / "scores").read_text())
    points = sum(scores.get(word, 0) for word in words)
    accuracy = 0.5 + points if scores else zlib.crc32(out.name.encode()) % 1000 / 1000
    result = {"accuracy": accuracy, "trained_parameters": len(words)}
    if "--tasks" in words:
        tasks = words[words.index("--tasks") + 1 :]
        tasks = tasks[: [word[:2] for word in tasks].index("--")]
        result["accuracies"] = {task: accuracy / n for n, task in enumerate(tasks, 1)}
    (out / "metrics.json").write_text(json.dumps(result))
    (out / "resume.pt").unlink(missing_ok=True)


def run_here(args, columns, cells):
    """grid.run with train.py itself, in this process."""
    for cell in grid.with_needs(cells.values()):
        if not cell.metrics.is_file():
            training.main(cell.words)
    places = [(dict(zip(columns, place, strict=True)), cell) for place, cell in cells.items()]
    return pd.DataFrame([grid.row_of(place, cell) for place, cell in places]), {}


class Fake:
    """One of the grids on tiny tasks of 40, 30 and 20 examples: fake("--seeds 0 1 -- --lr 1e-3")
    -> its exit status."""

    def __init__(self, grid, directory, encoder):
        self.grid, self.encoder = grid, encoder
        self.fake, self.out, self.data = (directory / name for name in ("fake", "out", "data"))
        self.fake.mkdir()
        for file, text in {"fail": "", "log": "", "scores": "{}"}.items():
            self.write(file, text)
        for task, n in {"big": 40, "middle": 30, "small": 20, "rte": 20}.items():
            rows = [{"text_a": "a cat", "label": i % 2} for i in range(n)]
            write_rows(self.data / task / "train.jsonl", rows)

    def words(self, text="", **options):
        """Of the command line. What follows -- goes to train.py."""
        given = {"model": self.encoder, "data_dir": self.data, "out": self.out}
        given |= {"tasks": "big middle small".split(), **options}
        return [*cli(**given), *text.split()]

    def __call__(self, text="", **options):
        try:
            with patch.object(grid, "PYTHON", python(self.fake)):
                run_command(self.grid.__name__, self.grid.main, self.words(text, **options))
        except SystemExit as e:
            return e.code
        return 0

    def log(self):
        """The names of the runs so far"""
        return (self.fake / "log").read_text().splitlines()

    def write(self, name, text=""):
        (self.fake / name).write_text(text)


if __name__ == "__main__":
    if sys.argv[1] == "tables":
        from experiments import grid, tables
        from runtime.command import run_command

        grid.PYTHON = python(sys.argv[2])
        run_command("tables", tables.main, sys.argv[3:])
    else:  # of FAKE train.py WORDS, or FAKE -m experiments.multitask WORDS
        train(Path(sys.argv[1]), sys.argv[4 if sys.argv[2] == "-m" else 3 :])
