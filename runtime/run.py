"""What keeps a run alive: the lock on its directory, its log, its checkpoints, signals, processes.
It saves and reports; it does not change what is computed."""

import contextlib
import json
import math
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout
from tqdm import tqdm

from formats.adapterhub import ADAPTER, FUSION, HEAD, read_run
from formats.files import atomic_write, note, read_json, read_tensors, write_json
from formats.tokenizer import TOKENIZER_FILES
from runtime.adapters import named
from runtime.processes import all_reduce, deferred_signals, rank_and_world_size
from runtime.record import first_difference

SAVE_MINUTES = 5  # between two checkpoints within an epoch
# What a run clears, in this order. Its run.json stays until it is replaced: without one, a
# directory is not taken for a run's.
RUN_FILES = "resume.pt metrics.json log.jsonl adapters heads model.safetensors config.json".split()
RUN_FILES += [n for kind in (ADAPTER, HEAD, FUSION) for n in (kind.weights[0], kind.config)]
RUN_FILES += TOKENIZER_FILES
TEMPORARY = [f"{name}.tmp" for name in [*RUN_FILES, "run.json"]]  # of a write that was killed


@dataclass
class State:
    """Where the training is, and what was best so far: a checkpoint holds it."""

    epoch: int = 1
    step: int = 0  # steps of this epoch that are done
    best_epoch: int = 0
    best_scores: dict = field(default_factory=dict)  # {score: value}
    best: dict = field(default_factory=dict)  # {name: trained parameter}


def is_begun(out):
    """Whether a directory holds a run that is finished, or that can be continued."""
    return bool(read_run(out)) and any((Path(out) / name).is_file() for name in RUN_FILES[:2])


def check_out(args):
    """Raises ValueError if a run cannot be written to --out, or would replace what it needs."""
    out = Path(args.out)
    if not out.is_dir():
        if os.path.lexists(out):
            raise ValueError(f"--out {out} is a file, or a link that leads nowhere")
        return
    others = {path.name for path in out.iterdir()} - {".lock", *TEMPORARY}
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
def open_run(args, record, state, trainable, optimizer):
    """The Run in args.out, whose directory is locked, and cleared unless the run is resumed.
    record: what run.json is to say; trainable: {name: trained parameter}."""
    out, on_gpu = Path(args.out), next(iter(trainable.values())).is_cuda
    if dist.is_torchelastic_launched() and not dist.is_initialized():  # before anything is written
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    first = rank_and_world_size()[0] == 0  # the process that writes
    notice = "stopping after this step, or this evaluation; a second signal stops without saving"
    out.mkdir(parents=True, exist_ok=True)
    lock = FileLock(out / ".lock", timeout=0) if first else contextlib.nullcontext()
    try:
        with lock, deferred_signals(notice * first) as signals:
            if first:
                check_out(args)  # again: another run may have ended here meanwhile
                clear(out, TEMPORARY)
            yield Run(args, record, state, trainable, optimizer, signals)
            if signals:  # in the last evaluation, or while the result was written
                raise KeyboardInterrupt
    except FloatingPointError:
        if first and not state.best:  # not one epoch is there to be kept
            clear(out, [*RUN_FILES, "run.json", ".lock"])
            with contextlib.suppress(OSError):  # it may hold other files, too
                out.rmdir()
        raise
    except Timeout as e:
        raise ValueError(f"another process is at work in {out}: choose another --out") from e
    except KeyboardInterrupt as e:
        how = "in place of --overwrite" if args.overwrite else "in the same command"
        advice = f", continue with --resume --out {out} {how}"
        advice = f"; {out} is finished" if (out / "metrics.json").exists() else advice
        raise KeyboardInterrupt(f"interrupted{advice}") from e


def clear(out, names):
    """Removes a run's files, in this order, and nothing else; what a link leads to stays."""
    for path in (out / name for name in names):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


class Run:
    """result: under --resume, the metrics of a run that is finished already."""

    def __init__(self, args, record, state, trainable, optimizer, signals):
        self.args, self.record, self.state, self.signals = args, record, state, signals
        self.trainable, self.optimizer, self.out = trainable, optimizer, Path(args.out)
        self.device = next(iter(trainable.values())).device
        self.rank, self.world_size = rank_and_world_size()
        self.history, self.result, self.bar = [], None, None
        self.loss = torch.zeros((), device=self.device)  # the sum over the steps of this epoch
        self.started = self.saved = time.monotonic()
        if self.rank > 0:
            torch.manual_seed(args.seed + self.rank)  # dropout of its own
        is_new = not (args.resume and is_begun(self.out))
        if not is_new:
            if difference := first_difference(read_run(self.out), record):
                advice = "cannot --resume it, --overwrite starts anew"
                raise ValueError(f"{self.out} holds a run with {difference}: {advice}")
            if (self.out / "metrics.json").exists():
                self.result = read_json(self.out / "metrics.json")
                print(f"{self.out} is finished already; its result:", flush=True)
                clear(self.out, ["resume.pt"])  # a kill may have come before it was removed
                return
            self.restore()
        done = torch.tensor([state.epoch, state.step])
        if not torch.equal(all_reduce(done.clone()), self.world_size * done):
            raise ValueError(f"--out {self.out} must be one directory for all processes")
        if self.rank == 0:
            clear(self.out, RUN_FILES if is_new else [])
            write_json(self.out / "run.json", record)
            self.write_log()
        print(f"{record['summary']}; run directory {self.out}", flush=True)

    def after_step(self, loss):
        """Saves the state when it is due; after a signal to any of the processes it saves, and
        raises KeyboardInterrupt. Raises FloatingPointError if the loss is not finite, which is
        looked at in every tenth step. loss: Σ share · loss of this process's parts of the batch"""
        state, steps = self.state, self.record["steps_per_epoch"]
        self.loss += all_reduce(loss) / self.world_size
        if self.bar is None:
            self.bar = tqdm(None, "training", steps, leave=False, disable=self.rank > 0 or None)
        self.bar.update(state.step - self.bar.n)
        if state.step % 10 == 0 or state.step == steps:
            self.check_finite("loss", self.loss.item())  # this waits for a GPU
        due = time.monotonic() - self.saved >= 60 * SAVE_MINUTES
        stop, due = all_reduce(torch.tensor([len(self.signals), due])).tolist()
        if stop or due:
            self.checkpoint()
        if stop:
            raise KeyboardInterrupt

    def check_finite(self, what, value):
        if not math.isfinite(value):
            problem = f"the {what} is not finite in epoch {self.state.epoch}"
            raise FloatingPointError(f"{problem}: a lower --lr may help")

    def after_epoch(self, scores):
        """A line in log.jsonl and on the screen, and a checkpoint. The state is that of the next
        epoch. scores: what evaluation returned, {name: number, or anything to be logged}"""
        self.bar = self.bar and self.bar.close()
        epoch, loss = self.state.epoch - 1, self.loss.item() / self.record["steps_per_epoch"]
        seconds = round(time.monotonic() - self.started, 2)
        dev = {f"dev_{name}": value for name, value in scores.items()}
        self.history.append({"epoch": epoch, "loss": loss, **dev, "seconds": seconds})
        self.loss.zero_()
        if self.rank == 0:
            self.write_log()
        self.checkpoint()
        dev = ", ".join(f"{n} {v:.4f}" for n, v in scores.items() if isinstance(v, (int, float)))
        best = "; best so far" * (self.state.best_epoch == epoch)
        print(f"epoch {epoch:2}: loss {loss:.4f}; dev {dev}; {seconds:.0f} s{best}", flush=True)

    def finish(self, record, diverged):
        """Makes the run a finished one, once the files of the best epoch are there. Returns the
        closing line, or raises `diverged`, the error that ended it. record: run.json's content"""
        state, args = self.state, self.args
        result = {name: record["options"][name] for name in ("stage", "task", "seed", "model")}
        sizes = ("train_examples", "dev_examples", "trained_parameters")
        result |= {name: record[name] for name in sizes} | {"best_epoch": state.best_epoch}
        result |= {"dev_loss" if n == "loss" else n: v for n, v in state.best_scores.items()}
        result |= {"diverged": True} if diverged else {}
        result |= {"seconds": round(time.monotonic() - self.started, 2), "out": str(self.out)}
        if self.rank == 0:
            write_json(self.out / "run.json", record)
            write_json(self.out / "metrics.json", result)  # last: with it the run is a finished one
            clear(self.out, ["resume.pt", ".lock"])
        if diverged:
            raise FloatingPointError(f"{diverged}; epoch {state.best_epoch} is kept in {self.out}")
        majority = record["tasks"].get(args.task, {}).get("majority", -1)
        if result.get("accuracy", 2) <= majority:
            note("no better than the most frequent label: more --epochs, --patience, may help")
        best = f"best epoch: {state.best_epoch}, dev {args.score} {result[args.score]:.4f}"
        print(f"{best}; stopped after epoch {state.epoch - 1} of at most {args.epochs}", flush=True)
        return result

    def write_log(self):
        with atomic_write(self.out / "log.jsonl") as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in self.history))

    def checkpoint(self):
        """Saves everything on which the rest of the run depends: --resume continues to the bit."""
        random = torch.get_rng_state()
        if self.device.type == "cuda":
            random = torch.cat([random, torch.cuda.get_rng_state(self.device)])
        randoms = [torch.empty_like(random) for _ in range(self.world_size)]  # of every process
        dist.all_gather(randoms, random) if self.world_size > 1 else randoms[0].copy_(random)
        self.saved = time.monotonic()
        saved = {
            "state": vars(self.state),
            "loss": self.loss,
            "trained": {name: p.detach() for name, p in self.trainable.items()},
            "optimizer": self.optimizer.state_dict(),
            "random": randoms,
            "history": self.history,
            "seconds": time.monotonic() - self.started,
        }
        if self.rank == 0:
            with atomic_write(self.out / "resume.pt") as temporary, open(temporary, "wb") as file:
                torch.save(saved, file)
        all_reduce(torch.zeros(()))  # no process ends before it is written

    def restore(self):
        """Puts everything back to where the last checkpoint was."""
        path = self.out / "resume.pt"
        saved = read_tensors(path)
        if [*saved["trained"]] != [*self.trainable]:
            raise ValueError(f"{path}: other parameters were trained: cannot --resume it")
        vars(self.state).update(saved["state"])
        self.loss.copy_(saved["loss"])
        with torch.no_grad():
            for name, p in self.trainable.items():
                p.copy_(saved["trained"][name])
        self.optimizer.load_state_dict(saved["optimizer"])
        if len(saved["random"]) == self.world_size:  # otherwise dropout has other numbers
            random, n = saved["random"][self.rank], len(torch.get_rng_state())
            torch.set_rng_state(random[:n])
            if self.device.type == "cuda" and len(random) > n:
                torch.cuda.set_rng_state(random[n:], self.device)
        self.history, self.started = saved["history"], time.monotonic() - saved["seconds"]
