"""What keeps a run alive: the lock on its directory, its log, its checkpoints, signals, processes.
It saves and reports; it does not change what is computed."""

import contextlib
import errno
import json
import math
import os
import shutil
import time
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from tqdm import tqdm

from formats.adapterhub import ADAPTER, FUSION, HEAD, read_run
from formats.files import atomic_write, note, read_json, read_tensors, write_json
from formats.sources import named
from formats.tokenizer import TOKENIZER_FILES
from runtime.processes import all_reduce, deferred_signals, gather, ranks, start_processes
from runtime.record import first_difference, what_decides

SAVE_MINUTES = 5  # between two checkpoints within an epoch
# What a run clears, in this order; by its run.json, a directory is known to be a run's.
RUN_FILES = "resume.pt metrics.json log.jsonl adapters heads model.safetensors config.json".split()
RUN_FILES += [n for kind in (ADAPTER, HEAD, FUSION) for n in (*kind.weights, kind.config)]
RUN_FILES += ["own.safetensors", *TOKENIZER_FILES]
TEMPORARY = [f"{name}.tmp" for name in [*RUN_FILES, "run.json"]]  # of a write that was killed
DAMAGED = "the file is damaged: --overwrite starts anew"
STATE = "epoch step best_epoch best_scores best history".split()  # fields of Run in a checkpoint


def is_begun(out):
    """Whether a directory holds a run that is finished, or that can be continued."""
    files = Path(out, "resume.pt"), Path(out, "metrics.json")
    try:
        return bool(read_run(out)) and any(path.is_file() for path in files)
    except ValueError as e:
        raise ValueError(f"{e}; {DAMAGED}") from e


def check_out(args):
    """Raises ValueError if a run cannot be written to --out, or would replace what it needs."""
    out = Path(args.out)
    if os.path.lexists(out) and not out.is_dir():
        raise ValueError(f"--out {out} is a file, or a link that leads nowhere")
    others = {path.name for path in out.glob("[!.]*")} - {*TEMPORARY}
    if others and not (out / "run.json").is_file():
        raise ValueError(f"--out {out} holds other files than a run's: choose a new directory")
    if args.resume and is_begun(out):
        return
    for path in map(Path, [args.model, *(named(source)[1] for source in args.adapters)]):
        if path.is_dir() and path.resolve().is_relative_to(out.resolve()):
            raise ValueError(f"--out {out} would replace {path}, which this run needs")
    if not args.overwrite and any((out / n).is_file() for n in RUN_FILES if n != "log.jsonl"):
        advice = "choose another --out, --resume to continue it, or --overwrite to replace it"
        raise ValueError(f"--out {out} holds a run, or its weights: {advice}")


@contextlib.contextmanager
def open_run(args, record, model, kept, optimizer):
    """The Run in args.out, whose directory is locked, and cleared unless the run is resumed."""
    run, out = Run(args, record, model, kept, optimizer), Path(args.out)
    notice = "stopping after this step, or this evaluation; a second signal stops without saving"
    first = run.rank == 0  # the process that writes
    out.mkdir(parents=True, exist_ok=True)
    lock = FileLock(out / ".lock", timeout=0, fallback_to_soft=False)
    try:
        if first:
            acquire(lock, out)
        with deferred_signals(notice * first) as run.signals:
            if first:
                check_out(args)  # again: another run may have ended here meanwhile
                clear(out, TEMPORARY)
            run.begin()
            yield run
            if run.signals:  # in the last evaluation, or while the result was written
                raise KeyboardInterrupt
    except FloatingPointError:
        if first and not run.best:  # not one epoch is there to be kept
            clear(out, [*RUN_FILES, "run.json", ".lock"])
            with contextlib.suppress(OSError):  # it may hold other files, too
                out.rmdir()
        raise
    except KeyboardInterrupt as e:
        how = "in place of --overwrite" if args.overwrite else "in the same command"
        advice = f", continue with --resume --out {out} {how}"
        advice = f"; {out} is finished" if (out / "metrics.json").exists() else advice
        raise KeyboardInterrupt(f"interrupted{advice}") from e
    finally:
        lock.release()


def acquire(lock, out):
    """Locks a run's directory. Some file systems cannot: NFS without lockd, SMB, FUSE."""
    try:
        lock.acquire()
    except Timeout as e:
        raise ValueError(f"another process is at work in {out}: choose another --out") from e
    except OSError as e:
        if e.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        problem = f"{lock.lock_file} cannot be locked on this file system ({e.strerror})"
        note(f"{problem}: take care that no other process writes there")


def clear(out, names):
    """Removes a run's files, in this order, and nothing else; what a link leads to stays."""
    for path in (out / name for name in names):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


class Run:
    """Where a run is, and what was best so far: all that a checkpoint holds beside the state of
    model and optimizer. `minimize` of train.py moves it on; here it is recorded and saved.

    record   what run.json is to say
    kept     the names of the tensors in the model's state that the run keeps
    result   under --resume, the metrics of a run that is finished already"""

    def __init__(self, args, record, model, kept, optimizer):
        self.args, self.record, self.out = args, record, Path(args.out)
        self.model, self.kept, self.optimizer = model, kept, optimizer
        self.at_first = {*model.state_dict()}
        self.trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        device = next(iter(self.trainable.values())).device
        start_processes(device)
        self.rank, self.world_size = ranks()
        self.epoch, self.step = 1, 0  # step: how many steps of this epoch are done
        self.best_epoch, self.best_scores = 0, {}  # {score: value}
        self.best = {}  # {name: tensor} of what the run keeps, in the best epoch
        self.loss = torch.zeros((), device=device)  # the sum over the steps of this epoch
        self.history = []  # the lines of log.jsonl
        self.diverged = None  # the FloatingPointError that ended the run, if one did
        self.result, self.bar, self.signals = None, None, []
        self.started = self.saved = time.monotonic()

    def begin(self):
        """Starts the log of a new run, or puts everything back to where the checkpoint was."""
        is_new = not (self.args.resume and is_begun(self.out))
        if not is_new:
            runs = map(what_decides, (read_run(self.out), self.record))
            if difference := first_difference(*runs):
                raise ValueError(f"{self.out} holds a run with {difference}: it needs --overwrite")
            if (self.out / "metrics.json").exists():
                self.result = read_json(self.out / "metrics.json")
                print(f"{self.out} is finished already; its result:", flush=True)
                clear(self.out, ["resume.pt"])  # a kill may have come before it was removed
                return
            try:
                saved = read_tensors(self.out / "resume.pt")
            except ValueError as e:
                raise ValueError(f"{e}; {DAMAGED}") from e
            self.restore(saved)
        weights = sum(p.double().sum().item() for p in self.trainable.values())
        if len({*gather((self.epoch, self.step, weights))}) > 1:
            problem = f"--out {self.out} must be one directory for all processes"
            raise ValueError(f"{problem}, and all that is drawn in `build` the same in each")
        if self.rank == 0:
            if is_new:
                clear(self.out, RUN_FILES)
            write_json(self.out / "run.json", self.record)
            self.write_log()
        print(f"{self.record['summary']}; run directory {self.out}", flush=True)

    def after_step(self, loss):
        """Shows the progress. Saves the state when it is due; after a signal to any process it
        saves, and raises KeyboardInterrupt. Raises FloatingPointError if the loss is not finite,
        as every tenth step sees, and an epoch's last. loss: this process's share of the batch's"""
        steps = self.record["steps_per_epoch"]
        self.loss += all_reduce(loss)
        if self.bar is None:
            self.bar = tqdm(None, "training", steps, leave=False, disable=self.rank > 0 or None)
        self.bar.update(self.step - self.bar.n)
        if self.step % 10 == 0 or self.step == steps:
            mean = self.loss.item() / self.step  # this waits for a GPU
            self.check_finite("loss", mean)
            self.bar.set_postfix(loss=f"{mean:.4f}")
        due = time.monotonic() - self.saved >= 60 * SAVE_MINUTES
        stop, due = all_reduce(torch.tensor([len(self.signals), due])).tolist()
        if stop or due:
            self.checkpoint()
        if stop:
            raise KeyboardInterrupt

    def check_finite(self, what, value):
        if not math.isfinite(value):
            problem = f"the {what} is not finite in epoch {self.epoch}"
            raise FloatingPointError(f"{problem}: a lower --lr may help")

    def log_epoch(self, scores):
        """A line in log.jsonl and on the screen. scores: {name: number, or anything else}"""
        if self.bar is not None:  # None: the epoch was resumed behind its last step
            self.bar.close()
        self.bar = None
        loss = self.loss.item() / self.step
        seconds = round(time.monotonic() - self.started, 2)
        dev = {f"dev_{name}": value for name, value in scores.items()}
        self.history.append({"epoch": self.epoch, "loss": loss, **dev, "seconds": seconds})
        if self.epoch == 1:
            self.note_idle()
        dev = ", ".join(f"{n} {v:.4f}" for n, v in scores.items() if isinstance(v, (int, float)))
        best = "; best so far" * (self.best_epoch == self.epoch)
        line = f"epoch {self.epoch:2}: loss {loss:.4f}; dev {dev}; {seconds:.0f} s{best}"
        self.loss.zero_()
        if self.rank == 0:
            self.write_log()
        print(line, flush=True)

    def note_idle(self):
        """Names what is to be trained and has had no gradient in a whole epoch: Adam has seen none
        but zeros. With several choices, the bias of a head's last layer is rightly one."""
        moments = {n: self.optimizer.state.get(p, {}) for n, p in self.trainable.items()}
        squares = {n: state.get("exp_avg_sq", torch.zeros(1)) for n, state in moments.items()}
        idle = [name for name, square in squares.items() if not square.any()]
        if made := ", ".join(self.model.state_dict().keys() - self.at_first):
            note(f"made while training, so it is not saved: {made:.200}; make it in `build`")
        if 0 < len(idle) < len(squares):  # another optimizer keeps no squares
            names = ", ".join(idle)
            note(f"no gradient has reached {len(idle)} trained parameters in epoch 1: {names:.200}")

    def finish(self, record):
        """Makes the run a finished one. Returns the closing line, or raises why it has diverged."""
        shown = "stage task seed model train_examples dev_examples trained_parameters".split()
        known = {**record, **record["options"]}
        result = {name: known[name] for name in shown} | {"best_epoch": self.best_epoch}
        result |= {"dev_loss" if n == "loss" else n: v for n, v in self.best_scores.items()}
        result |= {"diverged": True} if self.diverged else {}
        result |= {"seconds": round(time.monotonic() - self.started, 2), "out": str(self.out)}
        if self.rank == 0:
            write_json(self.out / "run.json", record)
            write_json(self.out / "metrics.json", result)  # last: with it the run is a finished one
            clear(self.out, ["resume.pt", ".lock"])
        if self.diverged:
            kept = f"epoch {self.best_epoch} is kept in {self.out}"
            raise FloatingPointError(f"{self.diverged}; {kept}")
        majority = record["tasks"].get(self.args.task, {}).get("majority", -math.inf)
        last, losses = self.epoch - 1, [line["dev_loss"] for line in self.history]
        if result.get("accuracy", math.inf) <= majority:
            note("the accuracy is no better than that of the most frequent label")
        if missed := ", ".join(map(repr, result.get("never_predicted", ()))):
            note(f"no development example is predicted as {missed:.300}, but some are labelled so")
        is_rising = self.best_epoch == last or losses[-1] == min(losses)
        if is_rising and result.get("accuracy") != 1:
            advice = "a larger --lr, more --epochs or --patience may help"
            note(f"at the end the score was still rising, or the loss still falling: {advice}")
        best = f"best epoch: {self.best_epoch}, dev {self.args.score} {result[self.args.score]:.4f}"
        print(f"{best}; stopped after epoch {last} of at most {self.args.epochs}", flush=True)
        return result

    def write_log(self):
        with atomic_write(self.out / "log.jsonl") as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in self.history))

    def kept_tensors(self):
        """{name: tensor} of what the run keeps, as it is now."""
        return {n: t.detach() for n, t in self.model.state_dict().items() if n in self.kept}

    def checkpoint(self):
        """Saves everything on which the rest of the run depends: --resume continues to the bit."""
        self.saved = time.monotonic()
        saved = {name: getattr(self, name) for name in STATE}
        saved |= {"own": self.kept_tensors(), "optimizer": self.optimizer.state_dict()}
        saved |= {"loss": self.loss, "seconds": self.saved - self.started}
        if self.rank == 0:
            with atomic_write(self.out / "resume.pt") as temporary, open(temporary, "wb") as file:
                torch.save(saved, file)
        all_reduce(torch.zeros(()))  # no process ends before it is written

    def restore(self, saved):
        if [*saved["own"]] != [*self.kept_tensors()]:
            raise ValueError(f"{self.out}: other parameters were trained: cannot --resume it")
        self.model.load_state_dict(saved["own"], strict=False)
        lrs = [group["lr"] for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(saved["optimizer"])
        for group, lr in zip(self.optimizer.param_groups, lrs, strict=True):
            group["lr"] = lr  # the initial one, from which `minimize` has that of each step
        self.loss.copy_(saved["loss"])
        for name in STATE:
            setattr(self, name, saved[name])
        self.started = time.monotonic() - saved["seconds"]
