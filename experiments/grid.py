"""Runs a grid of train.py commands, its cells, each in a directory of its own. table1 and
architecture_search share it.

    adapter = Cell("rte", ("--stage", "adapter", "--task", "rte"))
    fusion = Cell(
        "fusion",
        ("--stage", "fusion", "--task", "rte", "--adapters", "{out}/runs/rte"),
        needs=("rte",),
    )
    check([adapter, fusion], out)                  # what is in `out` was made by these commands
    failed = run([adapter, fusion], out, jobs=2)   # {name: reason}
    metrics(out, "fusion")["accuracy"]

OUT/runs/NAME        a cell's run directory; one with metrics.json is finished and not run again,
                     any other is resumed
OUT/logs/NAME.json   the command that it was made with, and those of the cells that it needs
OUT/logs/NAME.txt    what train.py printed; locked while it runs, so that no second process runs
                     the same cell
"""

import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import train
from formats.files import read_json, write_json
from runtime.command import first_line
from runtime.directory import is_finished
from runtime.processes import deferred_signals, end_with_parent

TRAIN = Path(__file__).resolve().parent.parent / "train.py"
INTERRUPTED = "interrupted; the same command goes on from here"


@dataclass(frozen=True)
class Cell:
    """
    command: the arguments of train.py without --out, in which "{out}" stands for the grid's
    directory; needs: names of the cells whose directories it reads.
    """

    name: str
    command: tuple
    needs: tuple = ()


def metrics(out, name):
    """What train.py wrote of a finished cell, else None."""
    run = Path(out) / "runs" / name
    return read_json(run / "metrics.json") if is_finished(run) else None


def command(cell, out):
    """The arguments of train.py. --resume starts a run that has not been started, too."""
    text = [argument.replace("{out}", str(out)) for argument in cell.command]
    return [*text, "--out", f"{out}/runs/{cell.name}", "--resume"]


def parse(cell, out):
    """The cell's arguments as train.py understands them. Raises ValueError for those that train.py
    rejects before it loads anything; what is in the cell's directory is not looked at, see
    `check`."""
    args = train.arguments(command(cell, out))
    args.out = args.out / "new"
    train.check(args)
    return args


# --------------------------------------------------------------------------------------------------
# What is there already


def record(cell, cells):
    """What is written down of a cell: its command, and those of what it was made from."""
    by_name = {other.name: other for other in cells}
    return {
        "command": list(cell.command),
        "needs": {name: record(by_name[name], cells) for name in cell.needs},
    }


def difference(old, new):
    """In words, how two records differ; None if they do not."""
    if old is None:
        return "without a record of its command"
    if old["command"] != new["command"]:
        before, now = (options(values["command"]) for values in (old, new))
        key = next((key for key in [*now, *before] if before.get(key) != now.get(key)), None)
        if key is None:
            return "with its options in another order"
        old, new = (
            f"with {key} {values[key]}".strip() if key in values else f"without {key}"
            for values in (before, now)
        )
        return f"{old}, and is now to be {new}"
    if list(old["needs"]) != list(new["needs"]):
        return f"from {', '.join(old['needs'])}"
    for name in new["needs"]:
        if found := difference(old["needs"][name], new["needs"][name]):
            return f"from {name} {found}"
    return None


def options(words):
    """["--task", "rte", "--seed", "0"] -> {"--task": "rte", "--seed": "0"}; of an option that is
    given twice the last one counts."""
    result, key = {}, None
    for word in words:
        if word.startswith("--"):
            key, _, value = word.partition("=")
            result[key] = value
        else:
            result[key] = f"{result[key]} {word}".strip()
    return result


def check(cells, out, overwrite=False):
    """
    Compares what is in `out` with the commands at hand. Raises ValueError, naming the first
    difference, if something there was made by another command; with overwrite, such cells are
    removed instead, to be run again.
    """
    if (out.exists() or out.is_symlink()) and not out.is_dir():
        raise ValueError(f"--out {out} is a file, or a link that leads nowhere")
    other = {}
    for cell in cells:
        if (out / "runs" / cell.name).exists():
            path = out / "logs" / f"{cell.name}.json"
            old = read_json(path) if path.is_file() else None
            if found := difference(old, record(cell, cells)):
                other[cell.name] = found
    if other and not overwrite:
        name, found = next(iter(other.items()))
        raise ValueError(
            f"{out / 'runs' / name} was made {found}: choose another --out, or --overwrite such "
            f"runs ({len(other)})"
        )
    for name in other:
        if busy(out, name):
            raise ValueError(
                f"{out / 'runs' / name} is being run by another process: it must end before it is "
                "overwritten"
            )
    for name in other:
        shutil.rmtree(out / "runs" / name)
        (out / "logs" / f"{name}.json").unlink(missing_ok=True)


def lock(out, name):
    """The log file of a cell, open and locked, or None if another process has it. A child that
    writes to it holds the lock as long as it lives, also when this process is killed: the cell
    cannot be started twice."""
    (out / "logs").mkdir(parents=True, exist_ok=True)
    file = open(out / "logs" / f"{name}.txt", "ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError:
        pass  # a file system without locks
    return file


def busy(out, name):
    """Whether a process is running the cell."""
    if not (out / "logs" / f"{name}.txt").exists():
        return False
    log = lock(out, name)
    if log is not None:
        log.close()
    return log is None


# --------------------------------------------------------------------------------------------------
# Running


def environment(slot, jobs, cuda, launch=()):
    """
    Of the job in one of `jobs` slots: its share of the GPUs and of the cores. What the user has set
    stays as it is.

    launch: what comes before train.py in a command. torchrun gives each of its processes one
    thread, unless it finds another number in its environment: it is left alone.
    """
    values = dict(os.environ)
    if cuda:
        every = ",".join(map(str, range(torch.cuda.device_count())))
        devices = (values.get("CUDA_VISIBLE_DEVICES") or every).split(",")
        own = devices[slot::jobs] or [devices[slot % len(devices)]]
        values["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    if jobs > 1:
        # a thread that waits must leave its core to the other jobs
        values.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        if not any("torchrun" in word or "torch.distributed" in word for word in launch):
            threads = str(max(1, cores() // jobs))
            values.setdefault("OMP_NUM_THREADS", threads)
            values.setdefault("RAYON_NUM_THREADS", threads)  # of the tokenizers
    return values


def cores():
    """How many this process may use."""
    affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if affinity else os.cpu_count() or 1


def unfinished(cells, out, part=(0, 1)):
    """The cells that are to be run: every n-th of those that are not finished, without any that
    needs what other parts have not finished."""
    done, todo = {cell.name for cell in cells if metrics(out, cell.name)}, []
    for cell in cells[part[0] :: part[1]]:
        possible = done | {other.name for other in todo}
        if cell.name not in done and possible.issuperset(cell.needs):
            todo.append(cell)
    return todo


def devices(jobs, cuda):
    """How many work at a time: the CPU is one."""
    return min(jobs, torch.cuda.device_count()) if cuda else 1


def run(cells, out, jobs=1, cuda=False, launch=(sys.executable,), part=(0, 1), hours=None):
    """
    Runs all cells that are not finished, `jobs` at a time, in the order of the list, where a cell
    comes after those that it needs. Returns {name: reason} of what failed; a failure only stops the
    cells that need it. A process that an earlier, killed call has started may still be running a
    cell: then its end is waited for.

    launch: what comes before train.py in a command. part: (i, n), every n-th cell only, the i-th
    first; cells that need what other parts have not finished are left to a later call. hours:
    {name: those that are expected of it}, for the time left. Raises KeyboardInterrupt, after
    Ctrl-C, SIGTERM or SIGHUP, once the children have saved their state.
    """
    runner = Runner(cells, out, jobs, cuda, launch, part, hours)

    def kill_all():
        for child in runner.running.values():
            kill(child.process)

    with deferred_signals(again=kill_all) as signals:
        try:
            while (runner.todo or runner.running) and not signals:
                runner.look_after_children()
                runner.start_what_can_start()
                runner.show()
                time.sleep(0.05)
            if signals:
                raise KeyboardInterrupt
        finally:
            stop([child.process for child in runner.running.values()], runner.status)
    return runner.failed


@dataclass
class Child:
    """A cell that is being run."""

    cell: Cell
    process: subprocess.Popen
    started: float  # time.monotonic()
    log_start: int  # where in the cell's log this process began to write
    from_start: bool  # or continued


class Runner:
    """Which cells of a grid are to be run, are running, and have ended. The arguments are those of
    `run`."""

    def __init__(self, cells, out, jobs, cuda, launch, part, hours):
        self.cells, self.out, self.jobs, self.cuda, self.launch = cells, out, jobs, cuda, launch
        self.done = {cell.name for cell in cells if metrics(out, cell.name)}
        self.todo = unfinished(cells, out, part)
        self.left = len(self.todo)
        self.failed = {}  # name: reason
        self.running = {}  # slot: Child
        self.clock = Clock(hours or {}, jobs, devices(jobs, cuda))
        self.status = tqdm(bar_format="{desc}", leave=False, disable=None)  # on a terminal alone
        self.shown = ""
        where = "" if part == (0, 1) else f" in part {part[0]}/{part[1]}"
        finished = f"{len(self.done)} of {len(cells)} runs are finished"
        print(f"{finished}, {self.left} to go{where}", flush=True)
        # cells that another process is running
        self.waiting = {cell.name for cell in self.todo if busy(out, cell.name)}
        for name in self.waiting:
            print(f"{name}: another process is running it, its end is waited for", flush=True)

    def look_after_children(self):
        for slot, child in list(self.running.items()):
            if child.process.poll() is not None:
                del self.running[slot]
                log = self.out / "logs" / f"{child.cell.name}.txt"
                reason = failure_reason(log, child.log_start, child.process.returncode)
                seconds = time.monotonic() - child.started
                if reason is None and child.from_start:
                    self.clock.finished(child.cell.name, seconds)
                self.settle(child.cell, seconds, reason)

    def start_what_can_start(self):
        for cell in list(self.todo):
            broken = [name for name in cell.needs if name in self.failed]
            if broken:
                self.todo.remove(cell)
                self.settle(cell, 0, f"not run: it needs {broken[0]}, which failed")
            elif cell.name in self.waiting and not busy(self.out, cell.name):
                self.waiting.remove(cell.name)
            elif len(self.running) + len(self.waiting) < self.jobs:
                if self.done.issuperset(cell.needs):
                    self.start(cell)

    def start(self, cell):
        """Starts a cell, unless another process has started or finished it."""
        log = lock(self.out, cell.name)
        if log is None:  # another process has started it since the last look
            self.waiting.add(cell.name)
            return
        self.todo.remove(cell)
        with log:  # closed here, so that the lock is the child's alone
            if metrics(self.out, cell.name):  # finished by the process that was waited for
                self.settle(cell, metrics(self.out, cell.name)["seconds"])
                return
            slot = next(slot for slot in range(self.jobs) if slot not in self.running)
            write_json(self.out / "logs" / f"{cell.name}.json", record(cell, self.cells))
            words = [*self.launch, str(TRAIN), *command(cell, self.out)]
            log.write(f"\n$ {shlex.join(words)}\n".encode())
            log.flush()
            log_start = log.tell()
            from_start = not (self.out / "runs" / cell.name).exists()
            process = subprocess.Popen(
                words,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment(slot, self.jobs, self.cuda, self.launch),
                start_new_session=True,  # Ctrl-C reaches the child through this process, once
                preexec_fn=end_with_parent,
            )
            self.running[slot] = Child(cell, process, time.monotonic(), log_start, from_start)

    def settle(self, cell, seconds, reason=None):
        """Prints one line about a cell that has ended. A run whose loss diverged has kept its best
        epoch: it has both metrics and a reason."""
        self.left -= 1
        result = metrics(self.out, cell.name)
        self.status.clear()
        if result is None:
            self.failed[cell.name] = reason
            print(f"{cell.name}: FAILED, {reason}; {self.left} left", flush=True)
            return
        self.done.add(cell.name)
        accuracies = result.get("accuracies") or {cell.name: result["accuracy"]}
        accuracy = 100 * sum(accuracies.values()) / len(accuracies)
        note = f" (note: {reason})" if reason else ""
        left = f"{self.left} left{self.time_left()}"
        print(f"{cell.name}: {accuracy:.2f} %, {seconds:.0f} s; {left}{note}", flush=True)

    def show(self):
        """A line on a terminal, while runs are going on."""
        names = ", ".join(child.cell.name for child in self.running.values())
        text = f"{runs(self.left)} left{self.time_left()}; now {names}"
        text = text[: shutil.get_terminal_size().columns - 1]
        if self.running and text != self.shown:
            self.shown = text
            self.status.set_description_str(text)

    def time_left(self):
        """In words, as far as it is known."""
        now, seconds = time.monotonic(), {cell.name: 0 for cell in self.todo}
        seconds |= {child.cell.name: now - child.started for child in self.running.values()}
        known = self.clock.seconds and self.left
        return f", about {in_words(self.clock.time_left(seconds))}" if known else ""


class Clock:
    """How long a grid still takes, from what was expected of its runs and what finished ones took.
    hours: {name: hours}, as if a run had one of the devices for itself"""

    def __init__(self, hours, jobs, devices):
        self.seconds = {name: 3600 * value for name, value in hours.items()}
        self.jobs, self.devices = jobs, devices
        self.expected = self.took = 0.0  # seconds of the finished runs

    def finished(self, name, seconds):
        self.expected += self.seconds.get(name, 0.0)
        self.took += seconds

    def time_left(self, seconds):
        """seconds: {name: how long it has been running} of all runs that are not finished."""
        share = self.took / self.expected if self.expected else self.jobs / self.devices
        left = [
            max(0.0, share * self.seconds.get(name, 0.0) - passed)
            for name, passed in seconds.items()
        ]
        return sum(left) / self.jobs


def runs(count):
    return f"{count} run" if count == 1 else f"{count} runs"


def in_words(seconds):
    minutes = max(1, round(seconds / 60))
    return f"{minutes} min" if minutes < 90 else f"{seconds / 3600:.1f} hours"


def stop(processes, status):
    """Ends children: SIGTERM, on which train.py saves its state; a second signal has killed them.
    Nothing is printed before, since that may fail."""
    for process in processes:
        process.terminate()
    status.close()
    if processes:
        print(f"stopping {runs(len(processes))}; what has been done is saved first", flush=True)
    for process in processes:
        process.wait()


def kill(process):
    """Ends a child and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def failure_reason(log, start, status):
    """Why a child failed: the last line that it wrote after position `start` of its log. None if it
    did not fail."""
    if status == 0:
        return None
    with open(log, "rb") as file:
        file.seek(start)
        text = file.read().decode(errors="replace")
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    lines = [line for line in lines if line != first_line("train.py")]
    own = [line for line in lines if line.startswith("train.py: ")]
    last = (own or lines or ["it said nothing"])[-1].removeprefix("train.py: ")
    if status == 2:
        return last
    return f"{last} (killed by signal {-status})" if status < 0 else f"{last} (status {status})"


def report(failed, out):
    """The lines at the end, and the exit status."""
    for name, reason in failed.items():
        log = out / "logs" / f"{name}.txt"
        print(f"failed: {name}: {reason}{f' ({log})' if log.exists() else ''}", flush=True)
    if failed:
        print(f"{runs(len(failed))} failed; the same command tries again", flush=True)
    return int(bool(failed))


# --------------------------------------------------------------------------------------------------
# Command line

OWNED = (  # options of train.py that a grid sets for each run
    "--stage",
    "--task",
    "--tasks",
    "--adapters",
    "--adapter",
    "--adapter-config",
    "--reduction-factor",
    "--seed",
    "--model",
    "--data-dir",
    "--out",
    "--resume",
    "--overwrite",
)


def split(argv):
    """(own arguments, those after "--", which go to train.py)"""
    argv = list(argv)
    place = argv.index("--") if "--" in argv else len(argv)
    return argv[:place], argv[place + 1 :]


def own_arguments(parser, argv):
    """(what the grid's parser understands, the words after "--")"""
    own, rest = split(argv)
    args, unknown = parser.parse_known_args(own)
    if unknown:
        parser.error(
            f"unrecognized arguments: {' '.join(unknown)} (options of train.py follow after --)"
        )
    return args, rest


def check_not_owned(words, owned, where):
    """Raises ValueError for an option of train.py that the grid sets itself. argparse also takes
    beginnings of an option's name."""
    for word in words:
        name = word.split("=")[0]
        is_option = name.startswith("--") and len(name) > 2
        if is_option and any(option.startswith(name) for option in owned):
            raise ValueError(f"{name} does not belong {where}: the grid sets it for each run")


def add_options(parser, out):
    """The options that all grids share."""
    add = parser.add_argument
    add("--model", default="google-bert/bert-base-uncased", help="encoder: a directory or a hub id")
    add(
        "--data-dir",
        help="directory with TASK/train.jsonl and TASK/validation.jsonl; without it: the hub",
    )
    add(
        "--out",
        type=Path,
        default=Path(out),
        help=f"directory of all runs and results; default {out}",
    )
    add(
        "--jobs",
        type=int,
        help="runs at a time, which share GPUs and cores; default one a GPU, without GPU one",
    )
    add(
        "--launch",
        default=shlex.quote(sys.executable),
        metavar="'...'",
        help="what starts train.py, such as 'torchrun --standalone --nproc_per_node=8'",
    )
    add("--overwrite", action="store_true", help="do runs again that were made by another command")
    add(
        "--plan", action="store_true", help="print the runs and the expected hours, and run nothing"
    )


def add_stage_options(parser, stages):
    for stage in stages:
        parser.add_argument(
            f"--{stage}-options",
            default="",
            metavar="'...'",
            help=f"options of train.py for --stage {stage} alone, after those that follow --",
        )


def complete(args, rest, stages, owned=OWNED):
    """
    Sets what follows from the parsed arguments, and from those for train.py, `rest`:

        args.rest, args.options   options of train.py, for all runs and {stage: for its runs}
        args.jobs, args.cuda      how many runs at a time, and whether they are on GPUs
        args.launch               what comes before train.py, as a list

    Raises ValueError for options that are the grid's own, and for what cannot be run.
    """
    check_not_owned(rest, owned, "behind --")
    args.rest, args.options = rest, {}
    for stage in stages:
        args.options[stage] = shlex.split(getattr(args, f"{stage}_options"))
        check_not_owned(args.options[stage], owned, f"in --{stage}-options")
    args.cuda = torch.cuda.is_available() and options(rest).get("--device") not in ("cpu", "mps")
    if args.jobs is None:
        args.jobs = max(1, torch.cuda.device_count() if args.cuda else 1)
    if args.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, not {args.jobs}")
    args.launch = shlex.split(args.launch)
    if not args.launch or shutil.which(args.launch[0]) is None:
        raise ValueError(f"--launch: there is no program {' '.join(args.launch)!r}")


def distinct(values):
    """Each of the values once, in their order."""
    return list(dict.fromkeys(values))
