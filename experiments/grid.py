"""Grids of training runs, for tables, composition and architecture_search.

OUT/runs/NAME       the run directory of a cell
OUT/logs/NAME.txt   what the run has printed

A cell is a command, `python train.py ...` or `python -m experiments.multitask ...`. It is finished
when its metrics.json is there, its run.json is this command's, and the runs that it needs are no
newer. The same command again runs what is not finished, and continues what was interrupted."""

import ctypes
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch

import train
from data import get_task
from experiments import multitask, report
from formats.adapterhub import read_run
from formats.files import read_json
from formats.rows import source_of
from runtime import command
from runtime.processes import deferred_signals
from runtime.sources import encoder_of

ROOT = Path(__file__).resolve().parent.parent
PYTHON = [sys.executable]  # what starts the runs
# Options of train.py that a grid sets for each run.
OWNED = """--stage --task --tasks --adapters --adapter --adapter-config --reduction-factor --seed
    --without-adapters --model --data-dir --out --resume --overwrite""".split()

# What is in the tables' files beside the accuracy
MEASURED = """train_examples dev_examples best_epoch trained_parameters epochs lr processor
    commit""".split()
NOTE = """Accuracy in %, mean ± standard deviation over seeds; the best epoch is chosen on the
development set, as in the paper."""
MEAN = "--import examples.mean_fusion --fusion mean"
# {system: (title, stage, options)}. What is behind the last _ of two of them is a source.
SYSTEMS = {
    "head": ("new head on Θ", "head", ""),
    "full": ("full fine-tuning", "full", ""),
    # adapters of one task, and of several (Tables 1 and 3)
    "st_a_2": ("ST-A r=2", "adapter", "--reduction-factor 2"),
    "st_a_16": ("ST-A", "adapter", "--reduction-factor 16"),
    "st_a_64": ("ST-A r=64", "adapter", "--reduction-factor 64"),
    "st_a_houlsby": ("ST-A Houlsby", "adapter", "--adapter houlsby --reduction-factor 16"),
    "mt_a": ("MT-A", "multitask", "--adapter pal"),
    "fusion_st_a": ("Fusion w/ ST-A", "fusion", ""),
    "fusion_mt_a": ("Fusion w/ MT-A", "fusion", ""),
    # without adapters (section 2.1)
    "multitask": ("multi-task learning", "multitask", "--without-adapters"),
    "sequential": ("full fine-tuning on sources, then the target", "full", ""),
    # what is fused, and what a fusion is compared with (composition)
    "head_on_": ("new head on ", "head", ""),
    "own": ("the target's own adapter", "adapter", ""),
    "mean": ("even weights of the sources", "fusion", MEAN),
    "mean_with_own": ("even weights of the sources and own", "fusion", MEAN),
    "fusion": ("fusion of the sources", "fusion", ""),
    "fusion_with_own": ("fusion of the sources and own", "fusion", ""),
    "fusion_of_own": ("fusion of own alone", "fusion", ""),
    "fusion_without_": ("fusion without ", "fusion", ""),
}


def system(name):
    """(title, stage, [options]) of a system; head_on_mnli is "new head on mnli"."""
    found = [key for key in SYSTEMS if key == name or (key[-1] == "_" and name.startswith(key))]
    title, stage, options = SYSTEMS[found[0]]
    return title + name.removeprefix(found[0]), stage, options.split()


def make_parser(name, description, stages):
    """The options that all grids have. stages: those that may have options of their own."""
    parser = command.Parser(f"python -m experiments.{name}", description=description)
    add, environment = parser.add_argument, os.environ.get
    add("--model", default=environment("ADAPTERFUSION_MODEL"), help="encoder, as for train.py")
    add("--data-dir", default=environment("ADAPTERFUSION_DATA_DIR"), help="as for train.py")
    add("--seeds", type=command.seed, nargs="+", default=[0])
    add("--out", type=Path, default=Path("runs", name), help=f"default runs/{name}")
    add("--jobs", type=command.count, help="runs at a time; default one for each GPU, or one")
    add("--overwrite", action="store_true", help="replace runs that another command has made")
    add("--plan", action="store_true", help="list the runs, and run nothing")
    for stage in stages:
        words = {"help": "beside those behind --", "metavar": "'...'"}
        add(f"--{stage}-options", type=shlex.split, default=[], **words)
    return parser


def parse(parser, argv, more_owned=None):
    """The options of a grid; `train_options` are the words behind --. Raises ValueError for one of
    OWNED among them, or of more_owned, {option: what to do instead}. Without --model the encoder is
    that of the adapters among --sources, which have a slash."""
    given = list(sys.argv[1:] if argv is None else argv)
    end = given.index("--") if "--" in given else len(given)
    args = parser.parse_args(given[:end])
    args.train_options, args.command = given[end + 1 :], f"{parser.prog} {shlex.join(given)}"
    words = [word for name in vars(args) if name.endswith("_options") for word in vars(args)[name]]
    owned = {**dict.fromkeys(OWNED, "the grid sets it for each run"), **(more_owned or {})}
    if found := {word.split("=")[0] for word in words} & {*owned}:
        where = "does not belong behind --, nor into the options of a stage"
        raise ValueError(f"{min(found)} {where}: {owned[min(found)]}")
    adapters = [source for source in getattr(args, "sources", []) if "/" in source]
    args.model = args.model or encoder_of(adapters) or "google-bert/bert-base-uncased"
    return args


# --------------------------------------------------------------------------------------------------
# Cells


class Cell(NamedTuple):
    """A run of the grid."""

    name: str
    out: Path
    stage: str  # of train.py, or "multitask"
    words: list  # the arguments of its program
    needs: list  # the cells that must be finished before it

    @property
    def metrics(self):
        return self.out / "metrics.json"

    @property
    def log(self):
        return self.out.parent.parent / "logs" / f"{self.name}.txt"

    def options(self):
        """What its program reads in its arguments. Raises ValueError for what it would refuse."""
        return (multitask if self.stage == "multitask" else train).parse(self.words)


def cell(args, name, stage, words, needs=()):
    """words: the options that make this run what it is, after the user's, which replace none."""
    out = args.out / "runs" / name
    if stage != "multitask":
        words = ["--stage", stage, *words]
    data_dir = ["--data-dir", args.data_dir] if args.data_dir else []
    users = [*args.train_options, *getattr(args, f"{stage}_options")]
    mode = "--overwrite" if args.overwrite else "--resume"
    words = ["--model", args.model, *data_dir, *users, *words, "--out", str(out), mode]
    return Cell(name, out, stage, words, [*needs])


def with_needs(cells):
    """The cells and all that they need, each once; first those that need nothing. Raises ValueError
    if names of tasks, joined by hyphens, give two runs one name."""
    levels, found = [[*cells]], {}
    while levels[-1]:
        levels.append([need for cell in levels[-1] for need in cell.needs])
    for cell in (cell for level in reversed(levels) for cell in level):
        if found.setdefault(cell.name, cell).words != cell.words:
            raise ValueError(f"two runs would be called {cell.name}: rename one of the tasks")
    return [*found.values()]


def is_finished(cell):
    """Raises ValueError for a run that another command has made, unless it is to be overwritten."""
    if not cell.metrics.is_file():
        return False
    made_by = shlex.split(read_run(cell.out)["machine"]["command"])[1:]
    differ = [i for i, (a, b) in enumerate(zip(made_by[:-1], cell.words, strict=False)) if a != b]
    if differ or len(made_by) != len(cell.words):  # the last is --resume or --overwrite
        if cell.words[-1] == "--overwrite":
            return False
        first = min([*differ, len(made_by) - 1])
        then, now = (" ".join(words[first - 1 : first + 1]) for words in (made_by, cell.words))
        problem = f"{cell.out} is a finished run with {then}, not {now}"
        raise ValueError(f"{problem}: --overwrite trains it again, another --out keeps it")
    ended = cell.metrics.stat().st_mtime
    return all(is_finished(one) and one.metrics.stat().st_mtime <= ended for one in cell.needs)


def train_examples(args, tasks):
    """{task: the number of its training examples}, without those that are held out"""
    sizes = {}
    for name in tasks:
        options = cell(args, name, "full", ["--task", name]).options()
        if options.train_file and len(tasks) > 1:
            raise ValueError(f"--train-file is of one task, not of {', '.join(tasks)}")
        source = source_of(options)
        task = get_task(name, source)
        sizes[name] = len(source.read_split(task, "train")[1])
    return sizes


# --------------------------------------------------------------------------------------------------
# Running them


def run(args, columns, cells):
    """Runs the cells that are not finished, and those that they need, --jobs at a time. cells:
    {place: its cell}, where a place has a value for each of `columns`, one of which is "task".
    Returns (a DataFrame with a row for each finished place, {name: reason} of failed cells); a
    failure stops only what needs it. After a signal, raises KeyboardInterrupt once the runs have
    saved their state."""
    every = with_needs(cells.values())
    todo = [cell for cell in every if not is_finished(cell)]
    if args.plan:
        states = ["to do" if cell in todo else "finished" for cell in every]
        needs = [", ".join(need.name for need in cell.needs) for cell in every]
        rows = [[c.name, c.stage, s, n] for c, s, n in zip(every, states, needs, strict=True)]
        print(report.markdown(rows, ["run", "stage", "state", "needs"]), end="")
        sys.exit(0)
    for cell in todo:
        cell.options()  # what a run would refuse is refused before any begins
    print(f"{len(every) - len(todo)} of {len(every)} runs are finished", flush=True)
    jobs, futures = args.jobs or torch.cuda.device_count() or 1, {}

    def work(cell):
        """Runs a cell after those that it needs. Returns why it is not finished then, or None."""
        for need in cell.needs:
            if need.name in futures:
                futures[need.name].result()  # waits for its end
            if not is_finished(need):
                return f"not run: it needs {need.name}, which failed"
        if signals:
            return "interrupted"
        process = start(cell, todo.index(cell), jobs)
        while process.poll() is None and not signals:
            time.sleep(0.05)
        if signals:
            process.terminate()  # it saves its state
        status = process.wait()
        last = cell.log.read_text(encoding="utf-8", errors="replace").strip().split("\n")[-1]
        if status == 0:
            os.utime(cell.metrics)  # a run that was finished already is not written again
        if is_finished(cell):  # also with a note, after a loss that was not finite
            accuracy, note = row_of({}, cell)["accuracy"], f", {last}" * (status != 0)
            print(f"{cell.name}: {100 * accuracy:.2f} %{note}", flush=True)
            return None
        if not signals:
            print(f"{cell.name}: FAILED, {last}", flush=True)
        return f"{last} (status {status}, {cell.log})"

    with deferred_signals("stopping; the runs save their state") as signals:
        with ThreadPoolExecutor(jobs) as pool:
            for cell in todo:  # each after those that it needs, which no thread then waits to begin
                futures[cell.name] = pool.submit(work, cell)
    if signals:
        then = "begins the interrupted runs again" if args.overwrite else "goes on from here"
        raise KeyboardInterrupt(f"interrupted; the same command {then}")
    finished = {place: cell for place, cell in cells.items() if is_finished(cell)}
    rows = [row_of(dict(zip(columns, p, strict=True)), cell) for p, cell in finished.items()]
    failed = {name: future.result() for name, future in futures.items() if future.result()}
    return pd.DataFrame(rows, columns=[*columns, "accuracy", *MEASURED]), failed


def row_of(place, cell):
    """What a finished run has measured, and with what; the accuracy is 0 to 1, NaN of a regression,
    and of a run on several tasks that on the place's, or their mean."""
    result, run = read_json(cell.metrics), read_run(cell.out)
    found = {**run["options"], **run["machine"], **result}
    mean = result.get("accuracy", math.nan)
    accuracy = result.get("accuracies", {}).get(place.get("task"), mean)
    return {**place, "accuracy": accuracy, **{name: found.get(name) for name in MEASURED}}


prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def end_with_parent():
    """Of a new process, on Linux: it gets SIGTERM where the grid is killed and can tell nobody."""
    if prctl is not None:
        prctl(1, int(signal.SIGTERM))  # PR_SET_PDEATHSIG


def start(cell, number, jobs):
    """The process of a run, with its share of the cores and one of the GPUs."""
    several = ["-m", "experiments.multitask"]
    program = several if cell.stage == "multitask" else [str(ROOT / "train.py")]
    words = [*PYTHON, *program, *cell.words]
    gpus = ",".join(map(str, range(torch.cuda.device_count())))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", gpus).split(",")
    own = {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]}
    own |= {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // jobs))}
    cell.log.parent.mkdir(parents=True, exist_ok=True)
    with open(cell.log, "ab") as log:
        log.write(f"\n$ {shlex.join(words)}\n".encode())
        log.flush()
        options = {"env": {**os.environ, **own}, "stdin": subprocess.DEVNULL, "stdout": log}
        # a session of its own: Ctrl-C reaches it through this process alone
        options |= {"stderr": log, "start_new_session": True, "preexec_fn": end_with_parent}
        return subprocess.Popen(words, **options)


def write_results(args, name, rows, parts):
    """OUT/NAME.csv, and OUT/NAME.md of the parts, a text each, which is printed."""
    report.write_text(args.out / f"{name}.csv", rows.to_csv(index=False))
    text = "\n\n".join([f"    {args.command}", NOTE, *map(str.strip, parts)])
    print("", text, report.write_text(args.out / f"{name}.md", f"{text}\n"), sep="\n", flush=True)


def end(failed):
    """The last lines, and exit status 1 where runs have failed."""
    for name, reason in failed.items():
        print(f"failed: {name}: {reason}", flush=True)
    if failed:
        sys.exit(1)
