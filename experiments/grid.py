"""Runs a grid of training commands, its cells, for tables, architecture_search and composition.

OUT/runs/NAME       the run directory of a cell: a finished run is not run again, any other goes on
OUT/logs/NAME.txt   what the run has printed

Each run is a process of its own, `python train.py ...` or `python -m experiments.multitask ...`.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

import train
from experiments import multitask
from formats.files import read_json
from formats.rows import dev_size, hold_out, read_split
from runtime import command
from runtime.processes import deferred_signals, end_with_parent
from runtime.record import first_difference, read_run

ROOT = Path(__file__).resolve().parent.parent
PYTHON = [sys.executable]  # what starts the runs
# Options of train.py that a grid sets for each run.
OWNED = """--stage --task --tasks --adapters --adapter --adapter-config --reduction-factor --seed
    --without-adapters --model --data-dir --import --out --resume --overwrite""".split()
NO_RESULT = "model data_dir out jobs overwrite plan part".split()  # they decide about no result


def make_parser(name, description, out, stages):
    """The options that all grids have. stages: those that may have options of their own."""
    epilog = "What is behind -- goes to each run, of train.py and of experiments.multitask."
    parser = command.Parser(f"python -m experiments.{name}", description=description, epilog=epilog)
    add, environment = parser.add_argument, os.environ.get
    model = environment("ADAPTERFUSION_MODEL", "google-bert/bert-base-uncased")
    add("--model", default=model, help="encoder, as for train.py")
    add("--data-dir", default=environment("ADAPTERFUSION_DATA_DIR"), help="as for train.py")
    add("--seeds", type=command.seed, nargs="+", default=[0])
    add("--out", type=Path, default=Path(out), help=f"of runs and results; default {out}")
    add("--jobs", type=command.count, help="runs at a time; default one for each GPU, or one")
    add("--overwrite", action="store_true", help="replace runs that another command has made")
    add("--plan", action="store_true", help="list the runs, and run nothing")
    add("--import", dest="imports", nargs="+", default=[], metavar="MODULE", help="as for train.py")
    for stage in stages:
        words = {"type": shlex.split, "default": [], "metavar": "'...'"}
        add(f"--{stage}-options", **words, help="of this stage alone, beside those behind --")
    return parser


def parse(parser, argv, owned=OWNED):
    """The options of a grid; `train_options` are the words behind --. Raises ValueError for one of
    `owned` among them."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:end])
    args.train_options = words[end + 1 :]
    for name in [name for name in vars(args) if name.endswith("_options")]:
        where = "behind --" if name == "train_options" else f"in --{name.replace('_', '-')}"
        for flag in {word.split("=")[0] for word in getattr(args, name)} & {*owned}:
            raise ValueError(f"{flag} does not belong {where}: the grid sets it for each run")
    return args


class Cell(NamedTuple):
    """A run of the grid."""

    name: str
    out: Path
    command: list  # a program and its arguments
    options: argparse.Namespace  # what the program reads there
    needs: list  # the names of the cells that must be finished before it

    @property
    def log(self):
        return self.out.parent.parent / "logs" / f"{self.name}.txt"


def cell(args, name, stage, words, needs=()):
    """words: the options that make this run what it is. They come last, so that none of the user's
    replaces them. Raises ValueError for options that training refuses before it loads anything."""
    out, shared = args.out / "runs" / name, []
    shared += ["--import", *args.imports] if args.imports else []
    shared += [] if "--model" in words else ["--model", args.model]
    shared += ["--data-dir", args.data_dir] if args.data_dir else []
    words = [*shared, *args.train_options, *getattr(args, f"{stage}_options"), *words]
    words += ["--out", str(out), "--overwrite" if args.overwrite else "--resume"]
    if stage == "multitask":
        program, options = ["-m", "experiments.multitask"], multitask.parse(words)
    else:
        words = ["--stage", stage, *words]
        program, options = [str(ROOT / "train.py")], train.parse(words)
    return Cell(name, out, [*program, *words], options, list(needs))


def train_examples(args, tasks):
    """{task: the number of its training examples}, without those that are held out"""
    options = {name: cell(args, name, "full", ["--task", name]).options for name in tasks}
    if len(tasks) > 1 and options[tasks[0]].train_file:
        raise ValueError(f"--train-file is of one task, not of {', '.join(tasks)}")
    found, sizes = [train.find_task(options[name], name) for name in tasks], {}
    for task in sorted(found, key=lambda task: task.hub is not None):  # local ones fail at once
        count, size = len(read_split(task, "train")[1]), dev_size(task)
        sizes[task.name] = len(hold_out(count, size)[0]) if size else count
    return sizes


# --------------------------------------------------------------------------------------------------
# Finished runs


def difference(cell):
    """In what a finished run differs from what its cell would be, in words, or None."""
    run, options = read_run(cell.out), json.loads(json.dumps(vars(cell.options)))
    for name, flag in (("score", "--score"), ("max_length", "--max-length"), ("dtype", "--dtype")):
        if options[name] in (None, "auto") and flag not in run["machine"]["command"]:
            options[name] = run["options"][name]  # not given, then or now: training fills it in
    if found := first_difference(run, {"options": options, "inputs": run["inputs"]}):
        return found
    # The runs whose adapters and encoder it took may have been trained again, in another way.
    for copy in filter(None, map(read_run, cell.out.glob("adapters/*"))):
        source = copy["options"]["out"]
        if first_difference(copy, read_run(source) or copy):
            return f"an adapter that {source} no longer has"
    if read_run(options["model"]).get("encoder") not in (None, run["inputs"]["encoder"]):
        return f"an encoder that {options['model']} no longer has"
    return None


def collect(cells, overwrite, results):
    """Adds the metrics of the finished ones to results, {name: metrics}, where those of all that
    they need must be. Raises ValueError for a run that another command has made; with overwrite it
    counts as not finished."""
    for cell in cells:
        if results.keys() >= {*cell.needs} and (cell.out / "metrics.json").is_file():
            found = difference(cell)
            if found and not overwrite:
                advice = "--overwrite trains it again, another --out keeps it"
                raise ValueError(f"{cell.out} is a finished run with {found}: {advice}")
            if not found:
                results[cell.name] = read_json(cell.out / "metrics.json")
    return results


def accuracy(result, task=None):
    """Of a run, 0 to 1; of one on several tasks that of `task`, or without it their mean."""
    found = result.get("accuracies", {}).get(task, result.get("accuracy"))
    if found is None:
        raise ValueError("the tables are of accuracies, and this task has none among its scores")
    return found


# --------------------------------------------------------------------------------------------------
# Running them


def print_plan(cells, args):
    results = collect(cells, args.overwrite, {})
    for cell in cells:
        print(f"{cell.name:60} {'finished' * (cell.name in results)}".rstrip())
    print(f"runs: {len(cells)}, to go: {len(cells) - len(results)}", flush=True)


def run(cells, args, part=(0, 1)):
    """
    Runs the cells that are not finished, --jobs at a time; a cell comes after those that it needs.
    part: (i, n), every n-th one from the i-th on, if other parts have finished what it needs.

    Returns ({name: metrics} of finished cells, {name: reason} of failed ones); a failure stops only
    what needs it. After a signal, raises KeyboardInterrupt once the runs have saved their state.
    """
    results, failed, running = collect(cells, args.overwrite, {}), {}, {}
    todo = [cell for cell in cells[part[0] :: part[1]] if cell.name not in results]
    jobs = args.jobs or torch.cuda.device_count() or 1
    print(f"{len(results)} of {len(cells)} runs are finished, {len(todo)} to go", flush=True)
    with deferred_signals("stopping; the runs save their state") as signals:
        try:
            while not signals:
                for slot, (cell, process) in [*running.items()]:
                    if process.poll() is not None:
                        del running[slot]
                        said = settle(cell, process.returncode, args.overwrite, results, failed)
                        print(f"{cell.name}: {said}; {len(todo) + len(running)} left", flush=True)
                for cell in [*todo]:
                    if len(running) < jobs and results.keys() >= {*cell.needs}:
                        todo.remove(cell)
                        slot = min({*range(jobs)} - running.keys())
                        print(f"{cell.name}: see {cell.log}", flush=True)
                        running[slot] = cell, start(cell, environment(slot, jobs))
                if not running:
                    break
                time.sleep(0.05)
        finally:
            for _, process in running.values():
                process.terminate()
            for _, process in running.values():
                process.wait()
    if signals:
        raise KeyboardInterrupt("interrupted; the same command goes on from here")
    for cell in todo:
        if broken := failed.keys() & {*cell.needs}:
            failed[cell.name] = f"not run: it needs {min(broken)}, which failed"
    return results, failed


def start(cell, environment):
    words = [*PYTHON, *cell.command]
    cell.log.parent.mkdir(parents=True, exist_ok=True)
    with open(cell.log, "ab") as log:
        log.write(f"\n$ {shlex.join(words)}\n".encode())
        log.flush()
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        # a session of its own: Ctrl-C reaches it through this process alone
        own = {"start_new_session": True, "preexec_fn": end_with_parent}
        return subprocess.Popen(words, env=environment, **streams, **own)


def environment(slot, jobs):
    """Of the run in one of `jobs` slots: its share of the GPUs and of the cores. What the user has
    set stays as it is."""
    values, gpus = dict(os.environ), torch.cuda.device_count()
    if gpus:
        every = ",".join(map(str, range(gpus)))
        devices = values.get("CUDA_VISIBLE_DEVICES", every).split(",")
        values["CUDA_VISIBLE_DEVICES"] = ",".join(devices[slot % len(devices) :: jobs])
    if jobs > 1:
        values.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // jobs)))
        values.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # who waits leaves the core to the others
    return values


def settle(cell, status, overwrite, results, failed):
    """Puts a run that has ended among the results or the failed ones. Returns which, in words."""
    last = cell.log.read_text(encoding="utf-8", errors="replace").strip().split("\n")[-1]
    if cell.name in collect([cell], overwrite, results):  # after a loss of NaN, with a note
        said = f"{100 * accuracy(results[cell.name]):.2f} %"
        return said + f" (note: {last})" * (status != 0)
    failed[cell.name] = f"{last} (status {status}, {cell.log})"
    return f"FAILED, {last}"


def caption(args, config, more, measured_on="the development set"):
    """What stands above the results: the encoder, and every option that decides about them."""
    name = Path(args.model).absolute().name if Path(args.model).is_dir() else args.model
    words = []
    for option, value in vars(args).items():
        if value and option not in NO_RESULT:
            text = shlex.join(map(str, value)) if isinstance(value, list) else value
            words.append(f"{option.replace('_', '-')} `{text}`")
    return (
        f"Encoder: {name} ({config.num_hidden_layers} layers, hidden size {config.hidden_size}). "
        f"Accuracy in % on {measured_on}, mean ± standard deviation over seeds; the best epoch is "
        f"chosen on the development set, as in the paper.\n{more}\nOptions: {', '.join(words)}."
    )


def end(failed):
    """The last lines, and exit status 1 where runs have failed."""
    for name, reason in failed.items():
        print(f"failed: {name}: {reason}", flush=True)
    if failed:
        print(f"failed runs: {len(failed)}; the same command tries them again", flush=True)
        sys.exit(1)
