"""Grids of training runs, for the studies (experiments/study.py): commands, `python train.py ...`
or `python -m experiments.multitask ...`, some of which take an adapter, or the encoder, of others.
The same command again runs what is not finished, and continues what was interrupted."""

import math
import multiprocessing
import multiprocessing.connection
import os
import shlex
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch

import train
from bert import Bert
from data import get_task, load_split
from experiments import multitask
from formats.adapterhub import read_run
from formats.files import read_json
from formats.rows import drawn, source_of
from formats.sources import find_adapters, named
from formats.tokenizer import load_tokenizer, tokenizer_sha256
from runtime import command
from runtime.processes import deferred_signals
from runtime.record import data_inputs, first_difference, hashes_of

# Runs are forked from a process that has imported all of this: 3 seconds less for each. A script of
# your own that calls a grid needs `if __name__ == "__main__":`, as always with multiprocessing.
forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload([__name__, "torch._dynamo"])

MEASURED = """train_examples dev_examples best_epoch trained_parameters epochs lr processor
    commit""".split()  # of a row, beside the accuracy
HOW = "--resume", "--overwrite"  # one of them is a cell's last word
KEPT = {}  # {places, and the times of the files there: what was found in them}


class Cell(NamedTuple):
    name: str
    out: Path
    stage: str
    words: list  # the arguments of its program
    needs: list  # the cells whose adapter, or encoder, it takes
    key: tuple = ()  # what it is in a study

    @property
    def log(self):
        return self.out.parent.parent / "logs" / f"{self.name}.txt"

    def options(self):
        """As its program parses its arguments, with the ValueErrors of that."""
        return (multitask if self.stage == "multitask" else train).parse(self.words)

    def difference(self, words):
        """ "NAME = VALUE, not VALUE" of its first option that other words have differently."""
        if self.words != words:
            options, others = self.options(), self._replace(words=words).options()
            return first_difference(vars(options), vars(others))


def with_needs(cells):
    """{name: cell} of cells and of all that they need, which comes first"""
    every = {}
    for cell in cells:
        for one in [*with_needs(cell.needs).values(), cell]:
            other = every.setdefault(one.name.lower(), one)  # on some file systems, U is u
            if difference := other.difference(one.words):
                raise ValueError(f"{one.out} would be two runs, {difference}: rename a task")
    return {cell.name: cell for cell in every.values()}


def record_of(cell):
    """The run.json of its run if that has ended, else {}. Raises ValueError for another command's
    run, unless it is to be overwritten."""
    if not (cell.out / "metrics.json").is_file():
        return {}
    record = read_run(cell.out)
    words = [w for w in shlex.split(record["machine"]["command"])[1:] if w not in HOW]
    if difference := cell._replace(words=[*words, cell.words[-1]]).difference(cell.words):
        if cell.words[-1] == "--overwrite":
            return {}
        problem = f"{cell.out} is a finished run with {difference}"
        raise ValueError(f"{problem}: --overwrite trains it again, another --out keeps it")
    return record


def is_finished(cell, record, asks_hub=True):
    """Whether it has ended, see `record_of`, and every input in its run.json is what lies there
    now; with asks_hub=False, what is on the hub counts as unchanged."""
    if not record:
        return False
    options = cell.options()
    now = record["inputs"] | inputs_now(options, asks_hub)
    for name in record["tasks"]:
        now |= data_now(options, name)
    return now == record["inputs"]


def stamp(*places):
    """Files, directories and hub ids, and the times of the files there"""
    paths = [path for place in places for path in (Path(place), *Path(place).glob("*"))]
    return places, *((path, path.stat().st_mtime_ns) for path in paths if path.is_file())


def inputs_now(options, asks_hub):
    """{input: digest} of encoder and adapters, as a new run would record them; with asks_hub=False,
    of those in directories."""
    now, model_type = {}, None
    if asks_hub or Path(options.model).is_dir():
        if (key := stamp(options.model)) not in KEPT:
            bert = Bert.from_pretrained(options.model)
            tokenizer = tokenizer_sha256(load_tokenizer(bert.directory, 128, bert.config))
            KEPT[key] = {"encoder": bert.sha256, "tokenizer": tokenizer}, bert.config.model_type
        now, model_type = KEPT[key]
    for source, place in [(source, named(source)[1]) for source in options.adapters]:
        if asks_hub or Path(place).is_dir():
            if (key := (source, stamp(place))) not in KEPT:
                found = find_adapters([source], model_type)
                KEPT[key] = {f"adapter {name}": saved.sha256() for name, saved in found.items()}
            now = now | KEPT[key]
    return now


def data_now(options, name):
    """What run.json would say of a task's data as they are now. A file is read once."""
    source, splits = source_of(options), ("train", "validation")
    paths = [path for split in splits for path in source.paths(name, split) or ()]
    if (key := (repr(source), name, stamp(*paths))) not in KEPT:
        task = get_task(name, source)
        KEPT[key] = [hashes_of(load_split(task, source, split, None)) for split in splits]
    train_set, dev_set = KEPT[key]
    train_set = train_set[drawn(len(train_set), options.limit_train, options.seed)]
    return data_inputs(name, train_set, dev_set[drawn(len(dev_set), options.limit_dev, 0)])


def unfinished(cells, asks_hub=True):
    """[cell] of those, and of all that they need, that have to be run"""
    todo = {}
    for name, cell in with_needs(cells).items():
        record = record_of(cell)  # or an error, before any run begins
        if any(need.name in todo for need in cell.needs) or not is_finished(cell, record, asks_hub):
            todo[name] = cell
    return [*todo.values()]


def plan(cells):
    """Lists the runs, and ends the command. Nothing is downloaded."""
    todo = unfinished(cells, asks_hub=False)
    for name, cell in with_needs(cells).items():
        state, record = "to do" if cell in todo else "finished", record_of(cell)
        if record and cell.words[-1] == "--resume" and not is_finished(cell, record, False):
            state = "refused"  # by `Run.begin`
        print(f"{state:8} {name}: {shlex.join(cell.words)}")
    print(f"{len(todo)} to do; where options are to be chosen, as if the first were the best")
    sys.exit(0)


def run(args, columns, cells):
    """Runs what is not finished of {place: its cell}, and of what these need, --jobs at a time. A
    place has a value for each of `columns`. Returns (a DataFrame with a row for each finished
    place, {name: reason} of failed cells). After a signal, raises KeyboardInterrupt once the runs
    have saved their state."""
    todo, every = unfinished(cells.values()), with_needs(cells.values())
    if every:
        counts = f"{len(todo)} of {len(every)} runs to do"
        print(f"{counts}; finished ones are kept, also after an edit of code", flush=True)
    for cell in todo:
        cell.options()  # what a run would refuse is refused before any begins
    with deferred_signals("stopping; the runs save their state") as signals:
        failed = run_all(todo, args.jobs or torch.cuda.device_count() or 1, signals)
    if signals:
        raise KeyboardInterrupt("interrupted; the same command goes on with what is not finished")
    finished = [(place, cell) for place, cell in cells.items() if cell.name not in failed]
    rows = [row_of(dict(zip(columns, place, strict=True)), cell) for place, cell in finished]
    return pd.DataFrame(rows, columns=[*columns, "accuracy", *MEASURED]), failed


def run_all(todo, jobs, signals):
    """Runs each cell once what it needs has ended, `jobs` at a time, each on one of the GPUs.
    Returns {name: why it is not finished}. Not with a ProcessPoolExecutor: there, a run that is
    killed would end all others."""
    gpus = ",".join(map(str, range(torch.cuda.device_count())))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", gpus).split(",")
    threads, free, started = max(1, torch.get_num_threads() // jobs), [*range(jobs)], time.time()
    waiting, running, failed = {cell.name: cell for cell in todo}, {}, {}
    while (waiting or running) and not signals:
        pending = waiting.keys() | {cell.name for cell, *_ in running.values()}
        for cell in [*waiting.values()]:
            if lost := [need.name for need in cell.needs if need.name in failed]:
                failed[waiting.pop(cell.name).name] = f"{lost[0]} is not finished, which it needs"
            elif free and not any(need.name in pending for need in cell.needs):
                number = free.pop(0)
                given = waiting.pop(cell.name), gpus[number % len(gpus)], threads
                process = forks.Process(target=work, args=given, daemon=True)
                process.start()
                running[process.sentinel] = cell, process, number
        for sentinel in multiprocessing.connection.wait(running, timeout=0.5):
            cell, process, number = running.pop(sentinel)
            process.join()
            free.append(number)
            if is_finished(cell, record_of(cell)):  # also one that diverged: its best epoch is kept
                said = f"{100 * row_of({}, cell)['accuracy']:.2f} %"
                said += ", DIVERGED" * (process.exitcode != 0)
            else:
                lines = cell.log.read_text(encoding="utf-8", errors="replace").strip().split("\n")
                failed[cell.name] = f"{lines[-1]} (status {process.exitcode}, {cell.log})"
                said = f"FAILED, {failed[cell.name]}"
            done = f"{len(todo) - len(waiting) - len(running)} of {len(todo)}"
            print(f"{cell.name}: {said}; {done} after {time.time() - started:.0f} s", flush=True)
    for _, process, _ in running.values():
        process.terminate()  # it saves its state
    for _, process, _ in running.values():
        process.join()
    return failed


def work(cell, gpu, threads):
    """What the process of a run does. What it prints is added to its log."""
    os.setsid()  # Ctrl-C reaches it through the grid alone
    cell.log.parent.mkdir(parents=True, exist_ok=True)
    with open(cell.log, "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    torch.set_num_threads(threads)
    name, program = ("multitask", multitask) if cell.stage == "multitask" else ("train.py", train)
    sys.argv = [name, *cell.words]
    print(f"\n$ {shlex.join(sys.argv)}", flush=True)
    command.run_command(name, program.main)


def row_of(place, cell):
    """What a finished run has measured, and with what. Its accuracy is 0 to 1, or NaN of a
    regression; of a multi-task run that of the place's task, or without a place the mean."""
    result, record = read_json(cell.out / "metrics.json"), read_run(cell.out)
    found = {**record["options"], **record["machine"], **result}
    mean = result.get("accuracy", math.nan)
    accuracy = result.get("accuracies", {}).get(place.get("task"), mean)
    return {**place, "accuracy": accuracy, **{name: found.get(name) for name in MEASURED}}


def not_diverged(failed):
    """All but those that diverged in their first epoch, by the words of `Run.check_finite`. Of one
    that diverged later, the best epoch is kept: it is finished."""
    return {name: why for name, why in failed.items() if "not finite in epoch 1:" not in why}


def end(failed):
    """The last lines, and exit status 1 where runs have failed."""
    for name, reason in failed.items():
        print(f"failed: {name}: {reason}", flush=True)
    if failed:
        sys.exit(1)
