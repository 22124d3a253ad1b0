"""Grids of training runs, for the studies (experiments/study.py): commands, `python train.py ...`
or `python -m experiments.multitask ...`, some of which take an adapter, or the encoder, of others.
The same command again runs what is not finished, and continues what was interrupted."""

import contextlib
import logging
import math
import multiprocessing.connection
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch
from filelock import FileLock, Timeout

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
POLLING = threading.Lock()  # `start` polls all processes; a status that two threads read is lost
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


def state_of(cell, of_needs=(), asks_hub=True):
    """ "finished" if its run has ended and every input in its run.json is what lies there now (with
    asks_hub=False, as far as it is not on the hub); else "to do", or "refused", as by `Run.begin`.
    of_needs: the states of what it needs. Raises ValueError for a run of another command."""
    if not (cell.out / "metrics.json").is_file():
        return "to do"
    record, options, how = read_run(cell.out), cell.options(), cell.words[-1]
    words = [w for w in shlex.split(record["machine"]["command"])[1:] if w not in HOW]
    difference = cell._replace(words=[*words, how]).difference(cell.words)
    if difference and how == "--resume":
        problem = f"{cell.out} is a finished run with {difference}"
        raise ValueError(f"{problem}: --overwrite trains it again, another --out keeps it")
    if difference or "to do" in of_needs:
        return "to do"
    now = record["inputs"] | inputs_now(options, asks_hub)
    for name in record["tasks"]:
        now |= data_now(options, name)
    if now != record["inputs"]:
        return "refused" if how == "--resume" else "to do"
    return "to do" if "refused" in of_needs else "finished"


def stamp(*places):
    """Files, directories and hub ids, and the times of the files there"""
    paths = [path for place in places for path in (Path(place), *Path(place).glob("*"))]
    return places, *((path, path.stat().st_mtime_ns) for path in paths if path.is_file())


def inputs_now(options, asks_hub):
    """{input: digest} of encoder and adapters now; with asks_hub=False, of those in directories."""
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


def states_of(cells, asks_hub=True):
    """{name: its state} of `with_needs`; raises ValueError before any run begins."""
    states = {}
    for name, cell in with_needs(cells).items():
        states[name] = state_of(cell, {states[need.name] for need in cell.needs}, asks_hub)
    return states


def plan(cells):
    """Lists the runs, and ends the command. Nothing is downloaded."""
    states = states_of(cells, asks_hub=False)
    for name, cell in with_needs(cells).items():
        print(f"{states[name]:8} {name}: {shlex.join(cell.words)}")
    count = sum(state != "finished" for state in states.values())
    print(f"{count} to do; where options are to be chosen, as if the first were the best")
    sys.exit(0)


def run(args, columns, cells):
    """Runs what is not finished of {place: its cell}, and of what these need, --jobs at a time. A
    place has a value for each of `columns`. Returns (a DataFrame with a row for each finished
    place, {name: reason} of failed cells). After a signal, raises KeyboardInterrupt."""
    states, every = states_of(cells.values()), with_needs(cells.values())
    todo = [every[name] for name, state in states.items() if state != "finished"]
    if every:
        counts = f"{len(todo)} of {len(every)} runs to do"
        print(f"{counts}; finished ones are kept, also after an edit of code", flush=True)
    for cell in todo:
        cell.options()  # what a run would refuse is refused before any begins
    failed = run_all(todo, args) if todo else {}
    finished = [(place, cell) for place, cell in cells.items() if cell.name not in failed]
    rows = [row_of(dict(zip(columns, place, strict=True)), cell) for place, cell in finished]
    return pd.DataFrame(rows, columns=[*columns, "accuracy", *MEASURED]), failed


def run_all(todo, args):
    """Runs each cell once what it needs has ended, --jobs at a time, on one of the GPUs or on
    --cluster. Returns {name: why it is not finished}. A kill would end a ProcessPoolExecutor."""
    gpus = ",".join(map(str, range(torch.cuda.device_count())))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", gpus).split(",")
    jobs, threads = args.jobs or torch.cuda.device_count() or 1, torch.get_num_threads()
    if args.cluster:  # its scheduler knows how many at a time, its workers have their GPUs
        place, jobs, gpus = on_cluster(args.cluster, args.out), args.jobs or len(todo), [None]
    else:
        place, threads = contextlib.nullcontext(ThreadPoolExecutor(jobs)), max(1, threads // jobs)
    waiting, running, failed = {cell.name: cell for cell in todo}, {}, {}
    free, started, notice = [*range(jobs)], time.time(), "stopping; the runs save their state"
    with place as executor, deferred_signals(notice) as signals, executor:
        wanted = is_wanted if args.cluster else lambda: not signals
        try:
            while (waiting or running) and not signals:
                pending = waiting.keys() | {cell.name for cell, *_ in running.values()}
                for name, cell in [*waiting.items()]:
                    if lost := [need.name for need in cell.needs if need.name in failed]:
                        failed[name] = f"{lost[0]} is not finished, which it needs"
                        del waiting[name]
                    elif free and not any(need.name in pending for need in cell.needs):
                        cell.log.parent.mkdir(parents=True, exist_ok=True)
                        cell.log.touch()
                        number, size = free.pop(0), cell.log.stat().st_size
                        how = wanted, gpus[number % len(gpus)], threads, Path.cwd()
                        future = executor.submit(run_alone, cell, size, *how)
                        running[future] = waiting.pop(name), number, size
                for future in wait(running, 0.5, FIRST_COMPLETED).done:
                    if signals:  # which have stopped this run, too
                        break
                    cell, number, size = running.pop(future)
                    free.append(number)
                    if future.cancelled():
                        lost = f"the scheduler of --cluster {args.cluster} is gone"
                        raise ConnectionError(f"{lost}; the same command goes on with what is left")
                    said = outcome(cell, size, future.exception() or future.result(), failed)
                    said += f"; {len(todo) - len(waiting) - len(running)} of {len(todo)}"
                    print(f"{cell.name}: {said} after {time.time() - started:.0f} s", flush=True)
        except Exception:
            signals.append(None)  # the other runs are stopped here, too
            raise
        finally:
            for future in running:
                future.cancel()
    if signals:
        raise KeyboardInterrupt("interrupted; the same command goes on with what is not finished")
    return failed


def outcome(cell, size, status, failed):
    """What is said of a run that has ended; `failed` gets the error in its log beyond `size`."""
    if state_of(cell) == "finished":  # also one that diverged: its best epoch is kept
        return f"{100 * row_of({}, cell)['accuracy']:.2f} %{', DIVERGED' * bool(status)}"
    lines = cell.log.read_bytes()[size:].decode(errors="replace").strip().split("\n")
    lines += [line for line in lines if line.startswith(("train.py: ", "multitask: "))]
    failed[cell.name] = f"{lines[-1]} (status {status}, {cell.log})"
    return f"FAILED, {failed[cell.name]}"


@contextlib.contextmanager
def on_cluster(address, out):
    """The Executor of a Dask cluster. Raises ValueError for one that could not run a study."""
    try:
        import distributed
    except ImportError as e:
        raise ValueError("--cluster needs Dask: pip install -r requirements-cluster.txt") from e
    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)  # the grid says what is lost
    problem, how = f"--cluster {address}", "docs/tables.md says how it is started"
    try:
        client = distributed.Client(address, timeout=10)
        client.run_on_scheduler(why_not)  # it reads what is submitted
    except (OSError, ValueError, ImportError) as e:
        raise ValueError(f"{problem}: no such scheduler ({e}); {how}") from e
    with client:
        print(f"asking the workers of {address}, or waiting for the first one", flush=True)
        client.wait_for_workers(1)
        seen = next(place for place in (out, *out.resolve().parents) if place.is_dir())
        with tempfile.NamedTemporaryFile(dir=seen) as file:
            found = client.run(why_not, Path.cwd(), Path(file.name).resolve(), on_error="return")
        for worker, reason in found.items():
            if reason:
                raise ValueError(f"{problem}: worker {worker}: {reason}; {how}")
        yield client.get_executor(pure=False)


def why_not(*places):
    """What keeps a worker from running a study's runs, or None; called there."""
    if unseen := [str(place) for place in places if not place.exists()]:
        return f"it does not see {unseen[0]}, which has to be shared"
    if multiprocessing.current_process().daemon:
        return "it may have no processes without DASK_DISTRIBUTED__WORKER__DAEMON=False"


def is_wanted():
    """Whether this thread's task is still wanted: not if its study, or the scheduler, has ended."""
    from distributed import get_worker

    worker = get_worker()
    task = worker.state.tasks.get(worker.get_current_task())
    is_open = worker.status.name in ("running", "paused")
    return is_open and task is not None and task.state == "executing"


def run_alone(cell, size, wanted, *how):
    """Runs a cell in a process of its own, which stops when it is not wanted. Its exit status."""
    if (how[-1] / cell.log).stat().st_size > size:  # its worker has died: it goes on here
        cell = cell._replace(words=[*cell.words[:-1], "--resume"])
    process = forks.Process(target=work, args=(cell, *how), daemon=True)
    with POLLING:
        process.start()
    while not multiprocessing.connection.wait([process.sentinel], 0.5):
        if not wanted():
            process.terminate()  # it saves its state
            multiprocessing.connection.wait([process.sentinel])
    with POLLING:
        return process.exitcode


def work(cell, gpu, threads, folder):
    """What the process of a run does. What it prints is added to its log."""
    os.setsid()  # Ctrl-C reaches it through the grid alone
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.chdir(folder)
    with open(cell.log, "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    torch.set_num_threads(threads)
    name, program = ("multitask", multitask) if cell.stage == "multitask" else ("train.py", train)
    sys.argv = [name, *cell.words]
    print(f"\n$ {shlex.join(sys.argv)}", flush=True)
    lock = cell.out / ".lock"
    if lock.is_file():  # one that has lost its study, or its worker, may be saving its state
        with contextlib.suppress(Timeout, OSError), FileLock(lock, 20, fallback_to_soft=False):
            pass
    command.run_command(name, program.main)


def end_with_parent():
    """Ends this run when the study, or the worker, that has started it is gone, killed or not."""
    multiprocessing.parent_process().join()
    os.kill(os.getpid(), signal.SIGTERM)  # it saves its state
    time.sleep(10)
    os.kill(os.getpid(), signal.SIGKILL)


def row_of(place, cell):
    """What a finished run has measured, and with what; of a regression, accuracy is NaN."""
    result, record = read_json(cell.out / "metrics.json"), read_run(cell.out)
    found = {**record["options"], **record["machine"], **result}
    mean = result.get("accuracy", math.nan)
    accuracy = result.get("accuracies", {}).get(place.get("task"), mean)
    return {**place, "accuracy": accuracy, **{name: found.get(name) for name in MEASURED}}


def not_diverged(failed):
    """All but those that diverged in their first epoch, by the words of `Run.check_finite`."""
    return {name: why for name, why in failed.items() if "not finite in epoch 1:" not in why}


def end(failed):
    """The last lines, and exit status 1 where runs have failed."""
    for name, reason in failed.items():
        print(f"failed: {name}: {reason}", flush=True)
    if failed:
        sys.exit(1)
