"""Runs a grid of train.py commands, its cells, each in a directory of its own. table1 and
architecture_search share it.

adapter = Cell("rte", ("--stage", "adapter", "--task", "rte")) fusion = Cell("fusion", ("--stage",
"fusion", "--task", "rte", "--adapters", "{out}/runs/rte"), needs=("rte",))
check([adapter, fusion], out)                  # that what is in `out` was made by the same commands
failed = run([adapter, fusion], out, jobs=2)   # {name: reason}
metrics(out, "fusion")["accuracy"]

OUT/runs/NAME        a cell's run directory; one with metrics.json is finished and not run again, any other is resumed
OUT/logs/NAME.json   the command that it was made with, and those of the cells that it needs
OUT/logs/NAME.txt    what train.py printed; locked while it runs, so that no second process runs the same cell
"""

import contextlib
import fcntl
import io
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

import data
import train
from adapter import ADAPTERS, Head, activate, add_adapter
from bert import Bert
from formats.files import read_json, write_json
from formats.tokenizer import load_tokenizer
from fusion import add_fusion
from runtime.directory import is_finished
from runtime.options import configure
from runtime.processes import STOP, choose_device, end_with_parent

TRAIN = Path(__file__).resolve().parent.parent / "train.py"


@dataclass(frozen=True)
class Cell:
    name: str
    # for train.py, without --out; "{out}" stands for the grid's directory, wherever that is
    command: tuple
    needs: tuple = ()  # names of the cells whose directories it reads


def metrics(out, name):
    """What train.py wrote of a finished cell, else None."""
    run = Path(out) / "runs" / name
    return read_json(run / "metrics.json") if is_finished(run) else None


def command(cell, out):
    """The arguments of train.py. --resume starts a run that has not been started, too."""
    text = [argument.replace("{out}", str(out)) for argument in cell.command]
    return [*text, "--out", f"{out}/runs/{cell.name}", "--resume"]


def parse(cell, out):
    """The cell's arguments as train.py understands them. Raises ValueError for those that it
    refuses at once; what is in the cell's directory is left out of that, see `check`."""
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
    """In words, how two records differ; None if they don't."""
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
    """["--task", "rte", "--seed", "0"] -> {"--task": "rte", "--seed": "0"}; the last of a repeated
    one counts"""
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
            if found := difference(
                read_json(path) if path.is_file() else None, record(cell, cells)
            ):
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


def environment(slot, jobs, cuda):
    """Of the job in one of `jobs` slots: its share of the GPUs and of the cores."""
    values = dict(os.environ)
    if cuda:
        devices = values.get("CUDA_VISIBLE_DEVICES") or ",".join(
            map(str, range(torch.cuda.device_count()))
        )
        devices = devices.split(",")
        values["CUDA_VISIBLE_DEVICES"] = ",".join(
            devices[slot::jobs] or [devices[slot % len(devices)]]
        )
    if jobs > 1:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        threads = str(max(1, cores // jobs))
        # PASSIVE: a thread that waits leaves its core to the other jobs
        for name, value in {
            "OMP_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": "PASSIVE",
            "RAYON_NUM_THREADS": threads,
        }.items():
            values.setdefault(name, value)
    return values


def run(cells, out, jobs=1, cuda=False, launch=(sys.executable,), part=(0, 1)):
    """
    Runs all cells that are not finished, `jobs` at a time, in the order of the list, where a cell
    comes after those that it needs. Returns {name: reason} of what failed; a failure only stops the
    cells that need it. A process that an earlier, killed call has started may still be running a
    cell: then its end is waited for.

    launch: what comes before train.py in a command. part: (i, n), every n-th cell only, the i-th
    first; cells that need what other parts have not finished are left to a later call. Raises
    KeyboardInterrupt, after Ctrl-C, SIGTERM or SIGHUP, once the children have saved their state.
    """
    done = {cell.name for cell in cells if metrics(out, cell.name)}
    todo = []
    for cell in cells[part[0] :: part[1]]:
        if cell.name not in done and {*cell.needs} <= {*done, *(other.name for other in todo)}:
            todo.append(cell)
    later = "" if part == (0, 1) else f" in part {part[0]}/{part[1]}"
    print(f"{len(done)} of {len(cells)} runs are finished, {len(todo)} to go{later}", flush=True)
    failed, running = {}, {}
    waiting = {cell.name for cell in todo if busy(out, cell.name)}
    for name in waiting:
        print(f"{name}: another process is running it, its end is waited for", flush=True)
    left = len(todo)

    def settle(cell, seconds, reason=None):
        """One line of a cell that has ended."""
        nonlocal left
        left -= 1
        result = metrics(out, cell.name)
        if result is None:
            failed[cell.name] = reason
            print(f"{cell.name}: FAILED, {reason}; {left} left", flush=True)
        else:  # a run that diverged has kept its best epoch
            done.add(cell.name)
            accuracies = result.get("accuracies") or {cell.name: result["accuracy"]}
            accuracy = 100 * sum(accuracies.values()) / len(accuracies)
            note = f" (note: {reason})" if reason else ""
            print(f"{cell.name}: {accuracy:.2f} %, {seconds:.0f} s; {left} left{note}", flush=True)

    signals = []

    def hear(number, _):
        signals.append(number)
        if len(signals) > 1:  # at once
            for _, process, _, _ in running.values():
                kill(process)

    wanted = [number for number in STOP if signal.getsignal(number) is not signal.SIG_IGN]
    handlers = {number: signal.signal(number, hear) for number in wanted}
    try:
        while (todo or running) and not signals:
            for slot, (cell, process, started, start) in list(running.items()):
                if process.poll() is not None:
                    del running[slot]
                    reason = last_words(
                        out / "logs" / f"{cell.name}.txt", start, process.returncode
                    )
                    settle(cell, time.monotonic() - started, reason)
            for cell in list(todo):
                broken = [name for name in cell.needs if name in failed]
                if broken:
                    todo.remove(cell)
                    settle(cell, 0, f"not run: it needs {broken[0]}, which failed")
                elif cell.name in waiting and not busy(out, cell.name):
                    waiting.remove(cell.name)
                elif len(running) + len(waiting) < jobs and done.issuperset(cell.needs):
                    log = lock(out, cell.name)
                    if log is None:  # since a moment ago
                        waiting.add(cell.name)
                        continue
                    todo.remove(cell)
                    with log:  # closed here, and with it the lock is the child's alone
                        if metrics(out, cell.name):  # by the process that was waited for
                            settle(cell, metrics(out, cell.name)["seconds"])
                            continue
                        slot = next(slot for slot in range(jobs) if slot not in running)
                        write_json(out / "logs" / f"{cell.name}.json", record(cell, cells))
                        words = [*launch, str(TRAIN), *command(cell, out)]
                        log.write(f"\n$ {shlex.join(words)}\n".encode())
                        log.flush()
                        start = log.tell()
                        # a session of its own: Ctrl-C reaches it through us, once
                        process = subprocess.Popen(
                            words,
                            stdout=log,
                            stderr=log,
                            stdin=subprocess.DEVNULL,
                            env=environment(slot, jobs, cuda),
                            start_new_session=True,
                            preexec_fn=end_with_parent,
                        )
                        running[slot] = cell, process, time.monotonic(), start
            time.sleep(0.05)
        if signals:
            raise KeyboardInterrupt
    finally:
        if running:
            stop([process for _, process, _, _ in running.values()])
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return failed


def stop(processes):
    """Ends children: SIGTERM, on which train.py saves its state; a second signal has killed them.
    Nothing is printed before, since that may fail."""
    for process in processes:
        process.terminate()
    print(f"stopping {len(processes)} runs, they save their state first", flush=True)
    for process in processes:
        process.wait()


def kill(process):
    """Ends a child and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def last_words(log, start, status):
    """Why a child failed: the last line that it wrote after position `start` of its log. None if it
    did not fail."""
    if status == 0:
        return None
    with open(log, "rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").split("\n")
    lines = [line.strip() for line in lines if line.strip()]
    said = [line for line in lines if line.startswith("train.py: ")] or lines or ["it said nothing"]
    ended = f"killed by signal {-status}" if status < 0 else f"status {status}"
    return (
        f"{said[-1].removeprefix('train.py: ')} ({ended})"
        if status != 2
        else said[-1].removeprefix("train.py: ")
    )


def report(failed, out):
    """The lines at the end, and the exit status."""
    for name, reason in failed.items():
        log = out / "logs" / f"{name}.txt"
        print(f"failed: {name}: {reason}{f' ({log})' if log.exists() else ''}", flush=True)
    if failed:
        print(f"{len(failed)} runs failed; the same command tries them again", flush=True)
    return int(bool(failed))


# --------------------------------------------------------------------------------------------------
# How long it will take


def measure(args, adapters, model):
    """
    ((a, b), (c, d)): a training step on n tokens takes about a + b·n seconds on this machine, and
    evaluation c + d·n. From a few steps on random tokens, with the encoder and what the arguments
    (of train.py) plug in; fusion is over `adapters`.
    """
    device, dtype = choose_device(args.device, args.dtype)
    bert = Bert.from_pretrained(model).to(
        device, torch.float32 if args.stage in ("full", "multitask") else dtype
    )
    one = args.stage in ("adapter", "multitask") and args.adapter != "none"
    names = [f"task{i}" for i in range(adapters if args.stage == "fusion" else int(one))]
    for name in names:
        factor = min(args.reduction_factor, bert.config.hidden_size)
        add_adapter(bert, name, configure(ADAPTERS[args.adapter], factor, args.adapter_config))
    if args.stage == "fusion":
        add_fusion(bert, names)
    elif names:
        activate(bert, names[0])
    if args.stage in ("full", "multitask"):
        bert.requires_grad_(True)
    head = Head({"head_type": "classification", "num_labels": 2, "layers": 2}, bert.config).to(
        device
    )
    trained = [p for p in [*bert.parameters(), *head.parameters()] if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=device.type != "mps")
    rows = args.batch_size if device.type == "cuda" else min(args.batch_size, 8)
    lengths = [min(T, bert.config.max_length) for T in (24, 96)]

    def wait():
        if device.type == "cuda":
            torch.cuda.synchronize()

    def train_step(batch):
        loss = torch.nn.functional.cross_entropy(
            train.predict(bert, head, batch, dtype), batch["labels"].to(device)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def eval_step(batch):
        with torch.inference_mode():
            train.predict(bert, head, batch, dtype)

    result = []
    for step in (train_step, eval_step):
        bert.train(step is train_step), head.train(step is train_step)
        seconds = []
        for T in lengths:
            ids = torch.randint(bert.config.vocab_size // 2, bert.config.vocab_size, (rows, T))
            batch = {
                "input_ids": ids,
                "token_type_ids": torch.zeros_like(ids),
                "attention_mask": torch.ones_like(ids),
                "labels": torch.zeros(rows, dtype=torch.long),
            }
            times = []
            for _ in range(4):  # the first one warms up
                wait()
                started = time.perf_counter()
                step(batch)
                wait()
                times.append(time.perf_counter() - started)
            seconds.append(min(times[1:]))
        slope = max(0.0, seconds[1] - seconds[0]) / (rows * max(1, lengths[1] - lengths[0]))
        result.append((max(0.0, seconds[0] - slope * rows * lengths[0]), slope))
    return result


def tokens(task, data_dir, words, bert):
    """How many an example has in the mean of 500, with all of its candidates. words: the options of
    train.py."""
    task = data.get_task(task, data_dir)
    longest = options(words).get("--max-length") or min(task.max_length, bert.config.max_length)
    tokenizer = load_tokenizer(bert.directory, int(longest), bert.config.vocab_size)
    with contextlib.redirect_stdout(io.StringIO()):
        sample = data.load_split(task, "train", tokenizer, data_dir, limit=500)
    return sum(len(ids) for candidates in sample["input_ids"] for ids in candidates) / len(sample)


def hours(cells, out, tasks, model, measured):
    """
    {name: (examples per epoch, epochs, hours at most)}: every epoch trained, none saved by early
    stopping.

    tasks: {name: (training examples, dev examples, tokens of an example)}; measured: a dictionary
    in which measurements are kept from one call to the next.
    """
    result = {}
    for cell in cells:
        args = parse(cell, out)
        names = getattr(args, "tasks", None) or [args.task]
        train_rows, dev_rows, tokens = zip(*(tasks[name] for name in names), strict=True)
        limited = [min(n, args.limit_train or n) for n in train_rows]
        steps = getattr(args, "steps_per_epoch", None) if args.stage == "multitask" else None
        examples = steps * args.batch_size if steps else sum(limited)
        mean = sum(n * T for n, T in zip(limited, tokens, strict=True)) / sum(
            limited
        )  # as if sampled by size
        # the size of the bottleneck hardly matters, the number of adapters and how far down the
        # gradient goes do
        changes = {
            field: args.adapter_config.get(field)
            for field in ("mh_adapter", "output_adapter", "layer_norms")
        }
        architecture = (
            (args.adapter, *changes.values()) if args.stage == "adapter" else len(args.adapters)
        )
        key = (args.stage, architecture, args.batch_size, args.device, args.dtype)
        if key not in measured:
            measured[key] = measure(args, len(args.adapters), model)
        (a, b), (c, d) = measured[key]
        epoch = examples / args.batch_size * a + examples * mean * b
        for n, T in zip(dev_rows, tokens, strict=True):
            n = min(n, args.limit_dev or n)
            epoch += n / (4 * args.batch_size) * c + n * T * d
        result[cell.name] = examples, args.epochs, args.epochs * epoch / 3600
    return result


def at_once(args):
    """By how many devices the hours are to be divided."""
    return min(args.jobs, torch.cuda.device_count()) if args.cuda else 1


def plan(cells, args, sizes, bert, measured):
    """Prints every run with its hours, and returns the sum in words. sizes: as `sizes` gives them;
    measured: as `hours`."""
    tasks = {
        task: (*rows, tokens(task, args.data_dir, args.rest, bert)) for task, rows in sizes.items()
    }
    print("measuring a few steps of each kind of run ...", flush=True)
    found = hours(cells, args.out, tasks, args.model, measured)
    todo = 0.0
    print(f"{'run':60} {'examples × epochs':>20} {'hours, at most':>15}")
    for name, (examples, epochs, cost) in found.items():
        finished = metrics(args.out, name) is not None
        todo += 0.0 if finished else cost
        print(
            f"{name:60} {f'{examples:,} × {epochs}':>20} "
            f"{'finished' if finished else f'{cost:.2f}':>15}"
        )
    devices = at_once(args)
    where = (
        f"{devices} GPU{'s' if devices > 1 else ''}"
        if args.cuda
        else f"CPU, {os.cpu_count()} cores"
    )
    total = sum(cost for _, _, cost in found.values())
    return (
        f"{len(found)} runs, at most {total / devices:.1f} hours on this machine ({where}), "
        f"{todo / devices:.1f} of them to "
        "go; early stopping ends most runs sooner"
    )


def sizes(tasks, data_dir):
    """{task: (training examples, development examples)}"""
    return {
        task: tuple(
            len(data.read_split(data.get_task(task, data_dir), split, data_dir)[1])
            for split in ("train", "validation")
        )
        for task in tasks
    }


# --------------------------------------------------------------------------------------------------
# What stands above the results


def encoder_name(model, bert):
    """Of a directory the last part alone: nothing of this machine in the results."""
    name = Path(model).absolute().name if Path(model).is_dir() else model
    return f"{name} ({bert.config.num_hidden_layers} layers, hidden size {bert.config.hidden_size})"


def about(args):
    seeds = ", ".join(map(str, args.seeds))
    seeds = (
        f"mean ± standard deviation over seeds {seeds}" if len(args.seeds) > 1 else f"seed {seeds}"
    )
    return (
        f"Encoder: {args.encoder}. Accuracy on the development set in %, {seeds}; the best epoch "
        "is chosen on the same "
        "set, as in the paper."
    )


def options_in_words(args):
    """Lines: the options of train.py, for all runs and for those of single stages."""
    given = {"all": args.rest, **args.options}
    return [
        f"Options of {stage} runs: `{shlex.join(words)}`."
        for stage, words in given.items()
        if words
    ]


# --------------------------------------------------------------------------------------------------
# Command line


def split(argv):
    """(own arguments, those after "--", which go to train.py)"""
    argv = list(argv)
    place = argv.index("--") if "--" in argv else len(argv)
    return argv[:place], argv[place + 1 :]


def refuse_owned(words, owned, where):
    """Raises ValueError for an option of train.py that the grid sets itself; argparse also takes
    beginnings of names."""
    for word in words:
        name = word.split("=")[0]
        if (
            name.startswith("--")
            and len(name) > 2
            and any(option.startswith(name) for option in owned)
        ):
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


def complete(args, words):
    """Sets args.jobs, how many runs at a time, args.cuda, whether they are on GPUs, and args.launch
    as a list. words: those for train.py. Raises ValueError."""
    cuda = torch.cuda.is_available() and options(words).get("--device") not in ("cpu", "mps")
    jobs = args.jobs if args.jobs is not None else max(1, torch.cuda.device_count() if cuda else 1)
    if jobs < 1:
        raise ValueError(f"--jobs must be at least 1, not {jobs}")
    args.launch = shlex.split(args.launch)
    if not args.launch or shutil.which(args.launch[0]) is None:
        raise ValueError(f"--launch: there is no program {' '.join(args.launch)!r}")
    args.jobs, args.cuda = jobs, cuda
