"""Grids of training runs, for tables, composition and architecture_search.

OUT/runs/NAME       the run directory of a cell
OUT/logs/NAME.txt   what the run has printed

A grid is a list of commands, `python train.py ...` or `python -m experiments.multitask ...`. Those
that take an adapter, or the encoder, of others come after them. The same command again runs what is
not finished, and continues what was interrupted."""

import math
import multiprocessing
import os
import shlex
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch

import train
from data import get_task
from experiments import multitask, report
from formats.adapterhub import ADAPTER, read, read_run
from formats.files import read_json
from formats.rows import source_of
from formats.sources import encoder_of, named
from runtime import command
from runtime.processes import deferred_signals

# Runs are forked from a process that has imported all of this: 3 seconds less for each. A script of
# your own that calls a grid needs `if __name__ == "__main__":`, as always with multiprocessing.
forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload([__name__, "torch._dynamo"])

# Options of train.py that a grid sets for each run.
OWNED = """--stage --task --tasks --adapters --adapter --adapter-config --reduction-factor --seed
    --without-adapters --model --data-dir --out --resume --overwrite""".split()

# What is in the tables' files beside the accuracy
MEASURED = """train_examples dev_examples best_epoch trained_parameters epochs lr processor
    commit""".split()
NOTE = """Accuracy in %, mean ± standard deviation over seeds; the best epoch is chosen on the
development set, as in the paper."""
EVEN_WEIGHTS = "--import examples.mean_fusion --fusion mean"
# {system: (title, stage, options)}. One that ends in _ is followed by a source: head_on_mnli
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
    "sequential": ("full fine-tuning, first on the largest other task", "full", ""),
    # what is fused, and what a fusion is compared with (composition)
    "head_on_": ("new head on ", "head", ""),
    "own": ("the target's own adapter", "adapter", ""),
    "mean": ("even weights of the sources", "fusion", EVEN_WEIGHTS),
    "mean_with_own": ("even weights of the sources and own", "fusion", EVEN_WEIGHTS),
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
    words = {"help": "more options, for the runs of this stage", "metavar": "'...'"}
    for stage in stages:
        add(f"--{stage}-options", type=shlex.split, default=[], **words)
    return parser


def parse(parser, argv, owned=OWNED):
    """The options of a grid; `train_options` are the words behind --. Raises ValueError for one
    that is `owned` among them. Without --model the encoder is that of the adapters among --sources,
    which have a slash."""
    given = list(sys.argv[1:] if argv is None else argv)
    end = given.index("--") if "--" in given else len(given)
    args = parser.parse_args(given[:end])
    args.train_options, args.command = given[end + 1 :], f"{parser.prog} {shlex.join(given)}"
    lists = [words for name, words in vars(args).items() if name.endswith("_options")]
    if found := {word.split("=")[0] for words in lists for word in words} & {*owned}:
        where = "does not belong behind --, nor into the options of a stage"
        raise ValueError(f"{min(found)} {where}: the grid sets it for each run")
    adapters = [source for source in getattr(args, "sources", []) if "/" in source]
    args.model = args.model or encoder_of(adapters) or "google-bert/bert-base-uncased"
    return args


class Cell(NamedTuple):
    """A run of the grid."""

    name: str
    out: Path
    stage: str  # of train.py, or "multitask"
    words: list  # the arguments of its program
    needs: list  # the cells whose adapter, or encoder, it takes; they need none themselves

    @property
    def log(self):
        return self.out.parent.parent / "logs" / f"{self.name}.txt"

    def options(self):
        """What its program reads in its arguments. Raises ValueError for what it would refuse."""
        return (multitask if self.stage == "multitask" else train).parse(self.words)


def make_cell(args, name, stage, words, needs=()):
    """words: the options that make this run what it is, after the user's, so that these win."""
    out = args.out / "runs" / name
    if stage != "multitask":
        words = ["--stage", stage, *words]
    data_dir = ["--data-dir", args.data_dir] if args.data_dir else []
    users = [*args.train_options, *getattr(args, f"{stage}_options")]
    mode = "--overwrite" if args.overwrite else "--resume"
    words = ["--model", args.model, *data_dir, *users, *words, "--out", str(out), mode]
    return Cell(name, out, stage, words, [*needs])


def is_finished(cell):
    """Whether the run has its metrics.json, and was made from the adapters, and the run whose
    encoder it takes, as they are now. Raises ValueError for another command's run, unless it is to
    be overwritten."""
    if not (cell.out / "metrics.json").is_file() or not all(map(is_finished, cell.needs)):
        return False
    record = read_run(cell.out)
    made_by = shlex.split(record["machine"]["command"])[1:]
    if made_by[:-1] != cell.words[:-1]:  # the last is --resume or --overwrite
        if cell.words[-1] == "--overwrite":
            return False
        i = max(1, len(os.path.commonprefix([made_by, cell.words])))  # the first that differs
        theirs, ours = (" ".join(words[i - 1 : i + 1]) for words in (made_by, cell.words))
        problem = f"{cell.out} is a finished run with {theirs}, not {ours}"
        raise ValueError(f"{problem}: --overwrite trains it again, another --out keeps it")
    options, then = record["options"], record["inputs"]
    now = {"encoder": read_run(options["model"]).get("encoder", then["encoder"])}
    for name, source in zip(record["adapters"], options["adapters"], strict=True):
        now[f"adapter {name}"] = read(named(source)[1], ADAPTER).sha256()
    return {**then, **now} == then


def train_examples(args, tasks):
    """{task: the number of its training examples}, without those that are held out"""
    sizes = {}
    for name in tasks:
        options = make_cell(args, name, "full", ["--task", name]).options()
        if options.train_file and len(tasks) > 1:
            raise ValueError(f"--train-file is of one task, not of {', '.join(tasks)}")
        source = source_of(options)
        sizes[name] = len(source.read_split(get_task(name, source), "train")[1])
    return sizes


def run(args, columns, cells):
    """Runs the cells that are not finished, and those that they need, --jobs at a time. cells:
    {place: its cell}, where a place has a value for each of `columns`, one of which is "task".
    Returns (a DataFrame with a row for each finished place, {name: reason} of failed cells). After
    a signal, raises KeyboardInterrupt once the runs have saved their state."""
    needed = [need for cell in cells.values() for need in cell.needs]
    every = {cell.name: cell for cell in [*needed, *cells.values()]}.values()
    every = sorted(every, key=lambda cell: len(cell.needs) > 0)  # first those that need none
    todo = [cell for cell in every if not is_finished(cell)]
    if args.plan:
        for cell in every:
            state = "to do" if cell in todo else "finished"
            print(f"{state:8} {cell.name}: {shlex.join(cell.words)}")
        sys.exit(0)
    for cell in todo:
        cell.options()  # what a run would refuse is refused before any begins
    with deferred_signals("stopping; the runs save their state") as signals:
        failed = run_all(todo, args.jobs or torch.cuda.device_count() or 1, signals)
    if signals:
        then = "begins the interrupted runs again" if args.overwrite else "goes on from here"
        raise KeyboardInterrupt(f"interrupted; the same command {then}")
    finished = {place: cell for place, cell in cells.items() if is_finished(cell)}
    rows = [row_of(dict(zip(columns, p, strict=True)), cell) for p, cell in finished.items()]
    return pd.DataFrame(rows, columns=[*columns, "accuracy", *MEASURED]), failed


def run_all(todo, jobs, signals):
    """Runs cells in their order, each once what it needs has ended, each on one of the GPUs. Says
    how far it is after every run, and now and then. Returns {name: why it is not finished}."""
    gpus = ",".join(map(str, range(torch.cuda.device_count())))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", gpus).split(",")
    waiting, running, failed = [*todo], {}, {}  # running: {number: (a cell, its process)}
    started, said = time.monotonic(), 0
    while (waiting or running) and not signals:
        for number in range(jobs):
            busy = [cell.name for cell, _ in running.values()]
            is_ready = waiting and not any(need.name in busy for need in waiting[0].needs)
            if is_ready and number not in running:
                cell = waiting.pop(0)
                given = cell, gpus[number % len(gpus)], max(1, torch.get_num_threads() // jobs)
                running[number] = cell, forks.Process(target=work, args=given, daemon=True)
                running[number][1].start()
        time.sleep(0.05)
        seconds, ended = time.monotonic() - started, []
        for number, (cell, process) in [*running.items()]:
            if process.exitcode is not None:
                del running[number]
                ended.append(outcome(cell, process.exitcode, failed))
        if ended or seconds > 1.25 * said + 10:
            done = len(todo) - len(waiting) - len(running) - len(failed)
            ended.append(f"{done} of {len(todo)} runs are finished after {seconds:.0f} s")
            print("; ".join(ended), flush=True)
            said = seconds
    for _, process in running.values():
        process.terminate()  # it saves its state
    for _, process in running.values():
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


def outcome(cell, status, failed):
    """How a run has ended, in words. If it is not finished, `failed` gets its name, and why."""
    last = cell.log.read_text(encoding="utf-8", errors="replace").strip().split("\n")[-1]
    if is_finished(cell):  # also one that diverged: its best epoch is kept, and its status is 2
        accuracy, note = row_of({}, cell)["accuracy"], f", {last}" * (status != 0)
        return f"{cell.name}: {100 * accuracy:.2f} %{note}"
    failed[cell.name] = f"{last} (status {status}, {cell.log})"
    return f"{cell.name}: FAILED, {last}"


def row_of(place, cell):
    """What a finished run has measured, and with what. Its accuracy is 0 to 1, or NaN of a
    regression; of a run on several tasks that of the place's task, without a place their mean."""
    result, record = read_json(cell.out / "metrics.json"), read_run(cell.out)
    found = {**record["options"], **record["machine"], **result}
    mean = result.get("accuracy", math.nan)
    accuracy = result.get("accuracies", {}).get(place.get("task"), mean)
    return {**place, "accuracy": accuracy, **{name: found.get(name) for name in MEASURED}}


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
