"""What a run is beside its mathematics: directory, log, state, signals, processes, the best epoch.

with open_run(args, device, check) as run:  # locked; an error of the disk ends it in one line
    at = run.open(config, trained, optimizer)  # Progress: the start, or where the run was
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
import shlex
import subprocess
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from formats.adapterhub import ADAPTER
from formats.files import fsync, write_json
from formats.tokenizer import read_tokenizer, tokenizer_digest
from runtime.directory import (
    REPLACED,
    RUN_FILES,
    TEMPORARY,
    clear,
    forget_replaced,
    lock,
    restore,
    resumes,
    set_aside,
)
from runtime.kernels import compiler_failed
from runtime.processes import (
    all_reduce,
    deferred_signals,
    micro_batches,
    out_of_memory,
    rank_and_world_size,
)
from runtime.state import Progress, load_state, save_state

# its monitor is a thread for the sake of a bar, which waits for ever where memory is short
tqdm.monitor_interval = 0

STOPPING = "stopping after this step, or this evaluation; a second signal stops without saving"


@contextlib.contextmanager
def open_run(args, device, check):
    """
    The Run in args.out, locked. check(args) is called again under the lock: another run may have
    ended there meanwhile.

    Raises OSError where the directory cannot be written, ConnectionError if another process of this
    run has ended.
    """
    try:
        # nothing is written before all processes have come this far
        if dist.is_torchelastic_launched():
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        rank, _ = rank_and_world_size()
        made = not args.out.exists()
        # the first process writes
        with lock(args.out) if rank == 0 else open(os.devnull, "w") as log:
            try:
                if rank == 0:
                    restore(args.out, log)
                    check(args)
                yield Run(args, log, device, made)
            finally:
                if rank == 0 and args.out.is_dir():
                    restore(args.out, log)
    except KeyboardInterrupt as e:
        kept = (args.out / "resume.pt").exists()
        saved = f", continue with --resume --out {args.out} in the same command" if kept else ""
        raise KeyboardInterrupt(f"interrupted{saved}") from e
    except (OSError, SafetensorError) as e:
        if rank_and_world_size()[0] == 0:
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


def progress_bar(batches, description, total):
    """The batches of an evaluation, under a bar where somebody looks."""
    return tqdm(
        batches, description, total, leave=False, disable=rank_and_world_size()[0] > 0 or None
    )


class Run:
    def __init__(self, args, log, device, made):
        self.args, self.log, self.device = args, log, device
        self.made = made  # whether the directory is new
        self.out = args.out
        self.rank, self.world = rank_and_world_size()
        self.best, self.history = {}, []
        self.failure = None  # a loss that is not finite, after an epoch that was finished
        self.headed = False  # whether the table of epochs has its first line
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
            fsync(*self.out.rglob("*"), self.out)  # before a state depends on them
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

    def announce(self, bert):
        """One line before the first step: what is trained on what, and where."""
        c = self.config
        own = [bert.get_parameter(name) for name in bert.origin]
        self.say(
            f"{c['stage']} on {c['task']}: encoder {c['model']} "
            f"({sum(p.numel() for p in own) / 1e6:.1f} M parameters), "
            f"{c['trained_parameters']:,} parameters are trained, on {c['device']} in "
            f"{c['dtype']}; {c['train_examples']:,} training and {c['dev_examples']:,} development "
            f"examples{self.constant_answer()}; run directory {self.out}"
        )

    def constant_answer(self):
        share = self.config["majority_class_accuracy"]
        return "" if share is None else f" (the most frequent class: accuracy {share:.4f})"

    def say(self, *lines):
        if self.rank == 0:
            print(*lines, sep="\n", flush=True)

    @contextlib.contextmanager
    def guard(self, at, model):
        """
        Around the loop. Ctrl-C, SIGTERM and SIGHUP are heard between steps, where the state is
        whole: `after_step` raises KeyboardInterrupt; a second one ends the process at once. One
        that has ended PyTorch's compiler, too, interrupts the run where that is. Raises
        MemoryError and, where --compile fails, ValueError that say how to go on, and
        FloatingPointError for a loss that is not finite; after a finished epoch it waits until
        `finish` has kept that.
        """
        self.announce(model)
        try:
            with deferred_signals(STOPPING * (self.rank == 0)) as self.signals:
                yield
        except RuntimeError as e:
            resume = "with --resume and " if (self.out / "resume.pt").exists() else ""
            if compiler_failed(e):
                if self.signals:
                    raise KeyboardInterrupt from e
                from torch._inductor.runtime.cache_dir_utils import cache_dir

                raise ValueError(
                    f"--compile failed ({str(e).splitlines()[0]}): continue {resume}without it, or "
                    f"remove {cache_dir()}, where a process that was killed may have left PyTorch "
                    "half of a file"
                ) from e
            if not out_of_memory(e):
                raise
            where = "in evaluation"
            if model.training:
                shape = self.batch["input_ids"].shape
                where = "on a batch of {} examples, {} x {} tokens".format(
                    len(self.batch["labels"]), *shape
                )
            raise MemoryError(
                f"{self.device} ran out of memory {where}: continue {resume or 'with '}"
                f"--grad-accumulation {2 * self.args.grad_accumulation}, which gives the same "
                "gradients, or start again with a smaller --batch-size"
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
            best = f", best dev {self.args.score} {at.score:.4f}" if at.best_epoch else ""
            self.bar.set_postfix_str(f"loss {at.loss / at.step:.4f}, {speed:.0f} examples/s{best}")
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
        scores: {task: {score: value}} on the development sets, the loss among them. The best
        epoch's parameters are kept, which is the first with the highest mean of the score that
        --score names.
        """
        means = mean_scores(scores)
        score = means[self.args.score]
        if math.isnan(score):
            raise ValueError(f"--score {self.args.score} is no number in epoch {at.epoch}")
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
        self.show(line, at.best_epoch == at.epoch)
        at.epoch, at.step, at.loss = at.epoch + 1, 0, 0.0
        self.save(at)

    def show(self, line, best):
        """A row of the table of epochs; over the first one stand the names of the columns."""
        columns = ["epoch", "loss", *(name for name in line if name.startswith("dev_"))]
        columns += ["examples_per_second", "seconds"]
        titles = [name.replace("_per_second", "/s").replace("_", " ") for name in columns]
        if not self.headed:
            self.say("  ".join(f"{title:>8}" for title in titles))
            self.headed = True
        cells = []
        for name, title in zip(columns, titles, strict=True):
            digits = {"epoch": 0, "examples_per_second": 1, "seconds": 1}.get(name, 4)
            cells.append(f"{line[name]:>{max(8, len(title))}.{digits}f}")
        self.say("  ".join(cells) + "  best so far" * best)

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
        means = mean_scores(at.scores)
        if "loss" in means:
            means["dev_loss"] = means.pop("loss")
        fields = (
            *("stage", "task", "seed", "train_examples", "dev_examples"),
            *("trained_parameters", "majority_class_accuracy"),
        )
        result = {name: self.config[name] for name in fields}
        result |= {"model": self.args.model, "best_epoch": at.best_epoch, **means}
        if self.args.stage == "multitask":
            result["accuracies"] = {
                task: found[self.args.score] for task, found in at.scores.items()
            }
        result |= {"seconds": round(at.seconds, 2), "out": str(self.out)}
        if self.rank == 0:
            fsync(*self.out.rglob("*"), self.out)
            # last: a directory with it is a finished run
            write_json(self.out / "metrics.json", result)
            (self.out / "resume.pt").unlink(missing_ok=True)
        if self.failure:
            raise self.failure
        self.say(*self.closing_words(at, result))
        return result

    def closing_words(self, at, result):
        """Why the run stopped, its best epoch, whether it has learned anything, and what to try
        next."""
        last, args = at.epoch - 1, self.args
        if last >= args.epochs:
            every = f"all {args.epochs} epochs are" if args.epochs > 1 else "the only epoch is"
            yield f"stopped: {every} done"
        else:
            yield (
                f"stopped: early, after epoch {last}; {args.patience} epochs without a better dev "
                f"{args.score}"
            )
        yield f"best epoch: {at.best_epoch}, dev {args.score} {at.score:.4f}"
        if (share := result["majority_class_accuracy"]) is not None and "accuracy" in result:
            if result["accuracy"] > share:
                more = round((result["accuracy"] - share) * result["dev_examples"])
                yield (
                    f"accuracy {result['accuracy']:.4f}: {more} of {result['dev_examples']} "
                    f"development examples more than always the most frequent class ({share:.4f})"
                )
            else:
                yield (
                    f"accuracy {result['accuracy']:.4f}, where the most frequent class alone gets "
                    f"{share:.4f}: try another --lr, more --epochs, or more training examples"
                )
        yield f"next: {next_command(self.out, self.config)}"


def mean_scores(scores):
    """{task: {score: value}} -> {score: mean over the tasks}, of the scores that all of them
    have."""
    tasks = list(scores.values())
    names = [name for name in tasks[0] if all(name in found for found in tasks)]
    return {name: sum(found[name] for found in tasks) / len(tasks) for name in names}


def next_command(out, config):
    """What to try with a run that has just finished."""
    stage, place = config["stage"], shlex.quote(str(out))
    program = program_of(config)
    fork = f" --import {program[1]}" if program else ""  # what makes its kinds known
    if stage == "multitask":
        first = shlex.quote(next(iter(config["labels"])))
        return f"python -m experiments.evaluate {place} --task {first}{fork}"
    if stage == "fusion":
        figures = shlex.quote(f"{out}-figures")
        return f"python -m experiments.figure4 {place} --out {figures}{fork}"
    columns = config["columns"][config["task"]]
    if {"choices", "endings"} & {*columns}:
        return f"python -m experiments.evaluate {place}{fork}"
    texts = " ".join(shlex.quote(f"<{column}>") for column in columns)
    return f"python -m experiments.predict {place} {texts}{fork}"


def program_of(config):
    """(path, name of the module) of the program that made a run, None for train.py itself. One that
    was started by its whole path is a module of this directory, or the file alone."""
    command = config.get("command")
    try:
        program = Path(shlex.split(command)[0] if type(command) is str else "train.py")
    except (ValueError, IndexError):
        return None
    root = Path(__file__).resolve().parent.parent
    if program.is_absolute():
        program = Path(program.relative_to(root) if program.is_relative_to(root) else program.name)
    module = ".".join(part for part in program.with_suffix("").parts if part.isidentifier())
    return None if program.name == "train.py" or not module else (program, module)


def majority_class_accuracy(splits):
    """The accuracy of always the same answer, the best of them: a mean over the development sets;
    None where labels are no classes."""
    shares = []
    for split in splits:
        labels = split.with_format("numpy")["label"][:]
        if labels.dtype.kind != "i":
            return None
        shares.append(np.bincount(labels).max() / len(labels))
    return float(np.mean(shares))


def describe_encoder(bert):
    """What config.json says of the encoder: digests of its weights and of its tokenizer."""
    tokenizer = read_tokenizer(bert.directory)  # which has been checked
    tokenizer.enable_truncation(bert.config.max_length, strategy="longest_first")
    return {"encoder_sha256": bert.digest, "tokenizer_sha256": tokenizer_digest(tokenizer)}


def data_digest(splits):
    """SHA-256 of all tokens and labels."""
    digest = hashlib.sha256()
    for split in splits:
        for rows in split.with_format("arrow").iter(10_000):
            for name in ("input_ids", "token_type_ids", "label"):
                values = rows[name].combine_chunks()
                while hasattr(values.type, "value_type"):  # lists, in lists for the candidates
                    digest.update(values.value_lengths().to_numpy().tobytes())
                    values = values.flatten()
                digest.update(values.to_numpy().tobytes())
    return digest.hexdigest()


def describe_data(args, tasks, fused, train_splits, dev_splits):
    """What config.json says of the data and the fused adapters."""
    revisions = ",".join(split.info.description for split in train_splits).strip(",")
    labels = {task.name: list(task.labels) for task in tasks}
    result = {
        "data_sha256": data_digest([*train_splits, *dev_splits]),
        "data_revision": revisions or None,
        "train_examples": sum(map(len, train_splits)),
        "dev_examples": sum(map(len, dev_splits)),
        "labels": labels if args.stage == "multitask" else labels[tasks[0].name],
        "columns": {task.name: list(task.columns) for task in tasks},
        "kinds": {task.name: task.kind.__name__ for task in tasks},
        "majority_class_accuracy": majority_class_accuracy(dev_splits),
    }
    if args.stage not in ("full", "multitask"):
        # a checkpoint's config.json has none: there AdapterHub's library takes "adapters" for its
        # own
        result["adapters"] = list(fused)
    return result


def describe_machine(args, device, dtype):
    """What config.json says of where and how a run was made."""
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else device.type,
        "compile": args.compile,
        "threads": torch.get_num_threads(),
        "processes": rank_and_world_size()[1],
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
