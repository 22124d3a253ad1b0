"""What a run is beside its mathematics: directory, log, state, signals, processes, the best epoch.

with open_run(args, device, check) as run:  # locked; an error of the disk ends it in one line
    at = run.open(config, trained, optimizer)  # Progress: none, or where the run was
    run.begin(at)
    model = run.distribute(model)
    with run.guard(at, bert):  # signals wait for the end of a step
        for n, indices in run.steps(batches, at):
            for share, examples in run.micro_batches(indices):
                run.backward(share * loss, share * regularization)
            run.after_step(at)
        run.after_epoch(at, scores)
    run.restore_best()
    result = run.finish(at)
"""

import contextlib
import hashlib
import json
import math
import os
import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from formats.adapterhub import ADAPTER
from formats.files import flush, write_json
from formats.tokenizer import load_tokenizer, tokenizer_digest
from runtime.directory import (
    REPLACED,
    RUN_FILES,
    TEMPORARY,
    clear,
    forget_replaced,
    lock,
    restore,
    set_aside,
)
from runtime.processes import all_reduce, micro_batches, out_of_memory, processes, signals_heard
from runtime.state import Progress, load_state, save_state

# its monitor is a thread for the sake of a bar, which waits for ever where memory is short
tqdm.monitor_interval = 0


@contextlib.contextmanager
def open_run(args, device, check):
    """
    The Run in args.out, locked. check(args) is called again under the lock: another run may have
    ended there meanwhile.

    Raises OSError where the directory cannot be written, ConnectionError if another process of this
    run has ended.
    """
    try:
        if (
            dist.is_torchelastic_launched()
        ):  # nothing is written before all processes have come this far
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        rank, _ = processes()
        made = not args.out.exists()
        with (
            lock(args.out) if rank == 0 else open(os.devnull, "w") as log
        ):  # the first process writes
            try:
                if rank == 0:
                    restore(args.out, log)
                    check(args)
                yield Run(args, log, device, made)
            finally:
                if rank == 0 and args.out.is_dir():
                    restore(args.out, log)
    except (OSError, SafetensorError) as e:
        if processes()[0] == 0:
            clear(args.out, TEMPORARY)
        kept = (
            "; its last state is intact, continue with --resume"
            if (args.out / "resume.pt").exists()
            else ""
        )
        raise OSError(f"stopped, {args.out} cannot be written: {e}{kept}") from e
    except RuntimeError as e:
        if not isinstance(e, dist.DistError) and "gloo" not in str(e):
            raise
        raise ConnectionError(
            "another process of this run has ended: see there for the reason, continue "
            "with --resume"
        ) from e
    if dist.is_initialized():
        dist.destroy_process_group()


def resumes(args):
    """Whether there is a state to go on from, and it is wanted."""
    return args.resume and (args.out / "resume.pt").exists()


class Run:
    def __init__(self, args, log, device, made):
        self.args, self.log, self.device = args, log, device
        self.made = made  # whether the directory is new
        self.out = args.out
        self.rank, self.world = processes()
        self.best, self.history = {}, []
        self.failure = None  # a loss that is not finite, after an epoch that was finished
        self.batch = None  # the last one, for the message when memory runs out

    def open(self, config, trained, optimizer):
        """
        Progress at the start of the loop. config: what config.json is to say; trained: {name:
        parameter}. Raises ValueError if the state that is there belongs to another command.
        """
        self.config, self.trained, self.optimizer = config, trained, optimizer
        at, self.is_new = Progress(), not resumes(self.args)
        if self.rank > 0:
            torch.manual_seed(self.args.seed + self.rank)  # dropout of its own
        if not self.is_new:
            config |= self.adapter_digests()
            state = self.out / "resume.pt"
            at, self.best, self.history = load_state(state, config, trained, optimizer, self.device)
        step = (at.epoch - 1) * config["steps_per_epoch"] + at.step
        expected = [self.world * step, self.world * step**2]
        if all_reduce(torch.tensor([step, step**2])).tolist() != expected:
            raise ValueError(
                f"--out {self.out} must be one directory for all processes: they found different "
                "states there"
            )
        if self.rank == 0:
            if self.args.overwrite:
                set_aside(self.out)
            clear(self.out, RUN_FILES + TEMPORARY if self.is_new else TEMPORARY)
            if self.is_new:  # from here on the directory is a run's
                write_json(self.out / "config.json", config)
        return at

    def begin(self, at):
        """Writes config.json, and the log as far as it was."""
        if self.rank == 0:
            self.config |= self.adapter_digests()
            write_json(self.out / "config.json", self.config)
            flush(*self.out.rglob("*"), self.out)  # before a state depends on them
            self.log.truncate(0)
            self.log.write("".join(json.dumps(line) + "\n" for line in self.history))
        self.started = time.monotonic() - at.seconds
        self.saved = time.monotonic()

    def adapter_digests(self):
        """config.json's entries of the run's own copies of the fused adapters: {name: SHA-256} of
        their weights, and of their configurations."""
        result = {}
        for field, file in (
            ("adapter_sha256", ADAPTER.weights[0]),
            ("adapter_config_sha256", ADAPTER.config),
        ):
            result[field] = {}
            for name in self.config.get("adapters", []):
                path = self.out / "adapters" / name / file
                there = path.is_file()
                digest = hashlib.sha256(path.read_bytes()).hexdigest() if there else None
                result[field][name] = digest
        return result

    def distribute(self, model):
        """The model as all processes train it: only what is trained is synchronised, the mean of
        the gradients, in the backward pass."""
        if self.world > 1:
            # other tasks' adapters; own LayerNorms where the adapter reads and leaves without them
            unused = self.args.stage == "multitask" or self.args.adapter_config.get(
                "layer_norms", False
            )
            model = DistributedDataParallel(model, init_sync=False, find_unused_parameters=unused)
            for p in self.trained.values():
                dist.broadcast(p.detach(), 0)
        self.model = model
        return model

    @contextlib.contextmanager
    def guard(self, at, model):
        """
        Around the loop. Ctrl-C, SIGTERM and SIGHUP are heard between steps, where the state is
        whole: `after_step` raises KeyboardInterrupt; a second one ends the process at once. Raises
        MemoryError that says how to go on, and FloatingPointError for a loss that is not finite;
        after a finished epoch it waits until `finish` has kept that.
        """
        try:
            with signals_heard() as self.signals:
                yield
        except RuntimeError as e:
            if not out_of_memory(e):
                raise
            where = "in evaluation"
            if model.training:
                shape = self.batch["input_ids"].shape
                where = "on a batch of {} examples, {} x {} tokens".format(
                    len(self.batch["labels"]), *shape
                )
            resume = "--resume and " if (self.out / "resume.pt").exists() else ""
            raise MemoryError(
                f"{self.device} ran out of memory {where}: continue with "
                f"{resume}--grad-accumulation "
                f"{2 * self.args.grad_accumulation}, which gives the same gradients, or start "
                "again with a smaller --batch-size"
            ) from e
        except FloatingPointError as e:
            broken = [
                name
                for name, p in model.named_parameters()
                if not (p.requires_grad or p.isfinite().all())
            ]
            advice = (
                f"the encoder's {broken[0]} holds values that are not finite"
                if broken
                else "a lower --lr may help"
            )
            kept = (
                f"epoch {at.best_epoch} is kept in {self.out}"
                if self.best
                else "no epoch was finished, nothing is kept"
            )
            self.failure = FloatingPointError(f"{e}: stopped, {kept}; {advice}")
            if not self.best:
                if self.rank == 0:
                    clear(self.out, [*RUN_FILES, *TEMPORARY])
                    if not (self.out / REPLACED).is_dir():
                        clear(self.out, ["log.jsonl"])
                    if self.made and not any(self.out.iterdir()):
                        self.out.rmdir()
                raise self.failure from e

    def steps(self, batches, at):
        """The steps of an epoch that are still to be done, under a progress bar."""
        total, self.first, self.seen = self.config["steps_per_epoch"], at.step, 0
        self.epoch_started = time.monotonic()
        self.epoch_loss = torch.tensor(at.loss, device=self.device)
        bar = tqdm(
            batches[at.step :],
            f"epoch {at.epoch}",
            total,
            initial=at.step,
            leave=False,
            disable=self.rank > 0 or None,
        )
        self.bar = bar
        for n, indices in bar:
            self.step_loss = torch.zeros((), device=self.device)
            self.seen += len(indices)
            yield n, indices
        self.trained_for = time.monotonic() - self.epoch_started

    def micro_batches(self, indices):
        """(share of the batch, examples) of this process; the gradients are synchronised with the
        last one's."""
        parts = micro_batches(indices, self.args.grad_accumulation)
        for i, (share, examples) in enumerate(parts):
            self.model.require_backward_grad_sync = i == len(parts) - 1  # DistributedDataParallel's
            yield share, examples.tolist()

    def backward(self, loss, penalty=0):
        """Adds the gradients of loss + penalty; only the loss is reported."""
        self.step_loss += loss.detach()
        (self.world * (loss + penalty)).backward()  # world: the mean over the processes is taken

    def after_step(self, at):
        """Progress by one step; the state is saved if it is time. Raises KeyboardInterrupt after a
        signal, once it is."""
        self.epoch_loss += all_reduce(self.step_loss)
        at.step += 1
        if at.step % 10 == 0 or at.step == self.config["steps_per_epoch"]:
            at.loss = self.epoch_loss.item()  # the sum over the epoch: once not finite, it stays so
            if not math.isfinite(at.loss):
                raise FloatingPointError(f"the loss is {at.loss} in epoch {at.epoch}")
            speed = (
                self.args.batch_size
                * (at.step - self.first)
                / (time.monotonic() - self.epoch_started)
            )
            self.bar.set_postfix_str(
                f"loss {at.loss / at.step:.4f}, {speed:.0f} examples/s, dev {max(at.score, 0):.4f}"
            )
        due = time.monotonic() - self.saved >= 60 * self.args.save_minutes
        stop, due = all_reduce(
            torch.tensor([len(self.signals), due])
        ).tolist()  # what one process knows, all must
        if stop or due:
            at.loss = self.epoch_loss.item()
            self.save(at)
            if stop:
                raise KeyboardInterrupt

    def after_epoch(self, at, scores):
        """
        scores: {task: {score: value}} on the development sets. The best epoch's parameters are
        kept, which is the first with the highest mean of the score that --score names.
        """
        names = [
            name
            for name in next(iter(scores.values()))
            if all(name in found for found in scores.values())
        ]
        means = {
            name: sum(found[name] for found in scores.values()) / len(scores) for name in names
        }
        score = means[self.args.score]
        if score > at.score:
            at.score, at.scores, at.best_epoch = score, scores, at.epoch
            self.best = {name: p.detach().cpu().clone() for name, p in self.trained.items()}
        line = {"epoch": at.epoch, "loss": at.loss / self.config["steps_per_epoch"]}
        line |= {f"dev_{name}": value for name, value in means.items()}
        if self.args.stage == "multitask":
            line["accuracies"] = {task: found[self.args.score] for task, found in scores.items()}
        line["examples_per_second"] = round(self.seen / self.trained_for, 1)
        line["seconds"] = round(time.monotonic() - self.started, 2)
        self.history.append(line)
        self.log.write(json.dumps(line) + "\n")
        print(
            f"epoch {at.epoch}: loss {line['loss']:.4f}, dev {self.args.score} {score:.4f}, "
            f"{line['examples_per_second']} examples/s",
            flush=True,
        )
        at.epoch, at.step, at.loss = at.epoch + 1, 0, 0.0
        self.save(at)

    def save(self, at):
        at.seconds = time.monotonic() - self.started
        state = self.out / "resume.pt"
        save_state(
            state,
            self.config,
            self.trained,
            self.optimizer,
            self.device,
            at,
            self.best,
            self.history,
        )
        self.saved = time.monotonic()
        if self.rank == 0 and at.best_epoch > 0:
            forget_replaced(self.out)

    def restore_best(self):
        """Puts the best epoch's parameters in place."""
        with torch.no_grad():
            for name, p in self.trained.items():
                p.copy_(self.best[name])

    def finish(self, at):
        """Makes the run a finished one, and returns the closing line. Raises the failure that
        `guard` has kept."""
        means = {self.args.score: at.score}
        for name in next(iter(at.scores.values())):
            values = [found[name] for found in at.scores.values() if name in found]
            means.setdefault(name, sum(values) / len(values))
        fields = ("stage", "task", "seed", "train_examples", "dev_examples", "trained_parameters")
        result = {name: self.config[name] for name in fields}
        result |= {"model": self.args.model, "best_epoch": at.best_epoch, **means}
        if self.args.stage == "multitask":
            result["accuracies"] = {
                task: found[self.args.score] for task, found in at.scores.items()
            }
        result |= {"seconds": round(at.seconds, 2), "out": str(self.out)}
        if self.rank == 0:
            flush(*self.out.rglob("*"), self.out)
            write_json(
                self.out / "metrics.json", result
            )  # last: a directory with it is a finished run
            (self.out / "resume.pt").unlink(missing_ok=True)
        if self.failure:
            raise self.failure
        return result


def describe_encoder(bert):
    """What config.json says of the encoder: digests of its weights and of its tokenizer."""
    tokenizer = load_tokenizer(bert.directory, bert.config.max_length)
    return {"encoder_sha256": bert.digest, "tokenizer_sha256": tokenizer_digest(tokenizer)}


def describe_data(train_splits, dev_splits):
    """What config.json says of the data; the digest is that of all tokens and labels."""
    digest = hashlib.sha256()
    for split in (*train_splits, *dev_splits):
        for rows in split.with_format("arrow").iter(10_000):
            for name in ("input_ids", "token_type_ids", "label"):
                values = rows[name].combine_chunks()
                while hasattr(values.type, "value_type"):  # lists, in lists for the candidates
                    digest.update(values.value_lengths().to_numpy().tobytes())
                    values = values.flatten()
                digest.update(values.to_numpy().tobytes())
    revisions = ",".join(split.info.description for split in train_splits).strip(",")
    return {
        "data_sha256": digest.hexdigest(),
        "data_revision": revisions or None,
        "train_examples": sum(map(len, train_splits)),
        "dev_examples": sum(map(len, dev_splits)),
    }


def describe_machine(args, device, dtype):
    """What config.json says of where and how a run was made."""
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else device.type,
        "compile": args.compile,
        "threads": torch.get_num_threads(),
        "processes": processes()[1],
        "versions": {
            name: version(name)
            for name in ("torch", "numpy", "tokenizers", "safetensors", "datasets")
        },
        "python": platform.python_version(),
        "commit": commit(),
        "command": args.command,
    }


def commit():
    """The commit of this file's repository, "-dirty" behind it with changes that are not committed;
    None without one."""
    here = Path(__file__).resolve().parent.parent
    command = [
        "git",
        "--no-optional-locks",
        "-C",
        here,
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    ]
    # not the repository of a directory above, nor one that the environment names
    environment = {name: value for name, value in os.environ.items() if name[:4] != "GIT_"}
    environment["GIT_CEILING_DIRECTORIES"] = str(here.parent)
    try:
        return (
            subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=10
            ).stdout.strip()
            or None
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
