"""Everything about a run except the mathematics: its directory, log, checkpoints and messages.

with open_run(settings, config, device) as run:  # locked; signals wait for the end of a step
    run.restore(state, trained, optimizer)       # the saved state under --resume
    model = run.distribute(network, trained)     # DistributedDataParallel under torchrun
    for batch in run.progress(batches, state):
        ...
        run.checkpoint_if_due(state)             # ends the run after a signal
    run.log_epoch(state, scores)
    run.checkpoint(state)
    result = run.finish(state)

A run saves and reports; it never changes the state that it is given, but to restore it.
"""

import contextlib
import hashlib
import json
import platform
import shlex
import subprocess
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from formats.files import atomic_write, fsync, read_json, write_json
from formats.rows import find_split, origin
from formats.tokenizer import read_tokenizer, tokenizer_digest
from runtime import directory
from runtime.directory import RUN_FILES, TEMPORARY, clear
from runtime.processes import all_reduce, deferred_signals, out_of_memory, rank_and_world_size
from runtime.results import mean_scores
from runtime.settings import difference, free_names
from runtime.state import load_state, restore_state, save_state

# Its monitor is a thread that only refreshes the bar, and waits forever where memory is short.
tqdm.monitor_interval = 0

STOPPING = "stopping after this step, or this evaluation; a second signal stops without saving"

# What config.json records of the machine, which may be another one when a run is resumed.
MACHINE = "device threads processes versions python commit command data_revision".split()


@contextlib.contextmanager
def open_run(settings, config, device):
    """The Run in settings.out, whose directory is locked, and cleared unless the run is resumed.
    config: what config.json is to say. Exceptions inside say how to go on."""
    out = settings.out

    def if_saved(advice):
        return advice if (out / "resume.pt").exists() else ""

    try:
        if dist.is_torchelastic_launched():
            # nothing is written before all processes have come this far
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        first = rank_and_world_size()[0] == 0  # the process that writes
        mine = directory.taken(settings) if first else contextlib.nullcontext()
        with mine, deferred_signals(STOPPING if first else "") as signals:
            yield Run(settings, config, device, signals)
    except KeyboardInterrupt as e:
        advice = if_saved(f", continue with --resume --out {out} in the same command")
        raise KeyboardInterrupt(f"interrupted{advice}") from e
    except OSError as e:
        if rank_and_world_size()[0] == 0:
            clear(out, TEMPORARY)
        advice = if_saved("; its last state is intact, continue with --resume")
        raise OSError(f"stopped, {out} cannot be written: {e}{advice}") from e
    except RuntimeError as e:
        if not isinstance(e, dist.DistError) and "gloo" not in str(e):
            raise
        ended = "another process of this run has ended: see there for the reason"
        raise ConnectionError(f"{ended}, continue with --resume") from e


def progress_bar(batches, description, total, initial=0):
    """The batches, under a progress bar on a terminal."""
    hidden = rank_and_world_size()[0] > 0 or None
    return tqdm(batches, description, total, leave=False, disable=hidden, initial=initial)


class Run:
    def __init__(self, settings, config, device, signals):
        self.settings, self.device = settings, device
        self.signals = signals  # the numbers of those that have come
        self.out = settings.out
        self.rank, self.world_size = rank_and_world_size()
        self.config = config = {**config, "processes": self.world_size}
        self.is_new = not directory.resumes(settings)
        self.history = []  # the lines of log.jsonl
        if self.rank == 0:
            if settings.overwrite:
                directory.set_aside(self.out)
            clear(self.out, RUN_FILES + TEMPORARY if self.is_new else TEMPORARY)
            if self.is_new:  # from here on the directory is a run's
                write_json(self.out / "config.json", config)

    def restore(self, state, trained, optimizer):
        """Sets `state`, the parameters {name: parameter}, the optimizer and the random numbers to
        what the last checkpoint holds, if the run is resumed. Then its directory and log are as
        they were."""
        self.trained, self.optimizer = trained, optimizer
        seconds = 0.0
        if self.rank > 0:
            torch.manual_seed(self.settings.seed + self.rank)  # dropout of its own
        if not self.is_new:
            # the tokens are compared, in whatever files they are
            free = free_names(self.settings) | {*MACHINE, "data_files"}
            saved = load_state(self.out / "resume.pt", self.config, free)
            restore_state(saved, state, trained, optimizer, self.device)
            self.history, seconds = saved["history"], saved["seconds"]
            self.note_other_program()
        step = (state.epoch - 1) * self.config["steps_per_epoch"] + state.step
        expected = [self.world_size * step, self.world_size * step**2]
        if all_reduce(torch.tensor([step, step**2])).tolist() != expected:
            found = "must be one directory for all processes: they found different states there"
            raise ValueError(f"--out {self.out} {found}")
        if self.rank == 0:
            write_json(self.out / "config.json", self.config)
            with atomic_write(self.out / "log.jsonl") as temporary:
                temporary.write_text("".join(json.dumps(line) + "\n" for line in self.history))
            fsync(*self.out.rglob("*"), self.out)  # before a state depends on them
        self.started = time.monotonic() - seconds
        self.saved = time.monotonic()
        self.announce()

    def distribute(self, model, trained, unused=False):
        """The model as all processes train it: DistributedDataParallel takes the mean of the
        gradients of what is trained. unused: whether a step may leave out some of that."""
        if self.world_size > 1:
            model = DistributedDataParallel(model, init_sync=False, find_unused_parameters=unused)
            for p in trained.values():
                dist.broadcast(p.detach(), 0)
        return model

    def seconds(self):
        """What the run has taken so far, before an interruption, too."""
        return time.monotonic() - self.started

    def say(self, *lines):
        if self.rank == 0:
            print(*lines, sep="\n", flush=True)

    def announce(self):
        """One line before the first step: what is trained on what, and where."""
        c = self.config
        self.say(
            f"{c['stage']} on {c['task']}: encoder {c['model']} "
            f"({c['encoder_parameters'] / 1e6:.1f} M parameters), "
            f"{c['trained_parameters']:,} parameters are trained, on {c['device']} in "
            f"{c['dtype']}; {c['train_examples']:,} training and {c['dev_examples']:,} development "
            f"examples; run directory {self.out}"
        )

    def note_other_program(self):
        """A fork's program may compute something else: a run that goes on under another one says
        so."""
        before = program_of(read_json(self.out / "config.json"))
        if (now := program_of(self.config)) != before:
            names = [program[0] if program else "train.py" for program in (before, now)]
            self.say(f"note: begun by {names[0]}, continued by {names[1]}")

    # ----------------------------------------------------------------------------------------------
    # During training

    def progress(self, batches, state):
        """The rest of an epoch's batches, [(task, its examples)], under a progress bar."""
        started, self.seen = time.monotonic(), 0
        steps = self.config["steps_per_epoch"]
        self.bar = progress_bar(batches, f"epoch {state.epoch}", steps, state.step)
        for n, rows in self.bar:
            self.seen += len(rows)
            yield n, rows
        self.trained_for = time.monotonic() - started

    def report_step(self, state):
        """The loss beside the progress bar."""
        best = f", best dev {self.settings.score} {state.best_score:.4f}" * (state.best_epoch > 0)
        self.bar.set_postfix_str(f"loss {state.loss.item() / state.step:.4f}{best}")

    def checkpoint_if_due(self, state):
        """Saves the state after --save-minutes. After a signal to any of the processes it saves,
        too, and then raises KeyboardInterrupt."""
        due = time.monotonic() - self.saved >= 60 * self.settings.save_minutes
        stop, due = all_reduce(torch.tensor([len(self.signals), due])).tolist()
        if stop or due:
            self.checkpoint(state)
        if stop:
            raise KeyboardInterrupt

    def checkpoint(self, state):
        """Saves the state, from which --resume continues to the bit."""
        config = {name: value for name, value in self.config.items() if name not in MACHINE}
        parts = state, self.trained, self.optimizer, self.device
        save_state(self.out / "resume.pt", config, *parts, self.history, self.seconds())
        self.saved = time.monotonic()
        if self.rank == 0 and state.best_epoch > 0:
            directory.forget_replaced(self.out)

    def log_epoch(self, state, scores):
        """A line in log.jsonl, and one on the screen. scores: {task: {score: value}}"""
        means, loss = mean_scores(scores), state.loss.item()
        line = {"epoch": state.epoch, "loss": loss / self.config["steps_per_epoch"]}
        line |= {f"dev_{name}": value for name, value in means.items()}
        if self.config["stage"] == "multitask":
            line["accuracies"] = {task: of[self.settings.score] for task, of in scores.items()}
        line["examples_per_second"] = round(self.seen / self.trained_for, 1)
        line["seconds"] = round(self.seconds(), 2)
        self.history.append(line)
        if self.rank == 0:
            with open(self.out / "log.jsonl", "a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")
        dev = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in means.items())
        best = "; best so far" * (state.best_epoch == state.epoch)
        seconds = f"{line['seconds']:.0f} s"
        self.say(f"epoch {state.epoch:2}: loss {line['loss']:.4f}; dev {dev}; {seconds}{best}")

    # ----------------------------------------------------------------------------------------------
    # The end

    def explain_not_finite(self, error, state, bert):
        """A FloatingPointError that says what is kept and what may help. If no epoch was finished,
        the run's files are removed."""
        advice = "a lower --lr may help"
        for name, p in bert.named_parameters():
            if not p.requires_grad and not p.isfinite().all():
                advice = f"the encoder's {name} holds values that are not finite"
                break
        kept = f"epoch {state.best_epoch} is kept in {self.out}"
        if state.best_epoch == 0:
            kept = "no epoch was finished, nothing is kept"
            if self.rank == 0:
                clear(self.out, RUN_FILES + TEMPORARY)
        return FloatingPointError(f"{error}: stopped, {kept}; {advice}")

    def explain(self, error, batch):
        """The exception to raise for PyTorch's RuntimeError: one that says how to go on where
        memory ran out, otherwise itself. batch: None in evaluation."""
        if not out_of_memory(error):
            return error
        resume = "with --resume and " * (self.out / "resume.pt").exists()
        where = "in evaluation"
        if batch is not None:
            candidates, tokens = batch["input_ids"].shape
            where = f"on a batch of {len(batch['labels'])} examples, {candidates} x {tokens} tokens"
        return MemoryError(
            f"{self.device} ran out of memory {where}: continue {resume or 'with '}"
            f"--grad-accumulation {2 * self.settings.grad_accumulation}, which gives the same "
            "gradients, or start again with a smaller --batch-size"
        )

    def finish(self, state, failure=None):
        """Makes the run a finished one, and returns the closing line. Raises `failure`, which has
        ended the training after an epoch that is kept."""
        c, means = self.config, mean_scores(state.best_scores)
        if "loss" in means:
            means["dev_loss"] = means.pop("loss")
        fields = "stage task seed train_examples dev_examples trained_parameters "
        fields += "majority_class_accuracy"
        result = {name: c[name] for name in fields.split()}
        result |= {"model": self.settings.model, "best_epoch": state.best_epoch, **means}
        if c["stage"] == "multitask":
            score = self.settings.score
            result["accuracies"] = {task: of[score] for task, of in state.best_scores.items()}
        result |= {"seconds": round(self.seconds(), 2), "out": str(self.out)}
        if self.rank == 0:
            fsync(*self.out.rglob("*"), self.out)
            # last: a directory with it is a finished run
            write_json(self.out / "metrics.json", result)
            (self.out / "resume.pt").unlink(missing_ok=True)
        if failure is not None:
            raise failure
        self.say(*self.closing_words(state, result))
        return result

    def closing_words(self, state, result):
        """Why the run stopped, its best epoch, whether it has learned anything, and what to try
        next."""
        last, settings = state.epoch - 1, self.settings
        if last >= settings.epochs:
            every = f"all {settings.epochs} epochs are" if last > 1 else "the only epoch is"
            yield f"stopped: {every} done"
        else:
            without = f"{settings.patience} epochs without a better dev {settings.score}"
            yield f"stopped: early, after epoch {last}; {without}"
        yield f"best epoch: {state.best_epoch}, dev {settings.score} {state.best_score:.4f}"
        share, accuracy = result["majority_class_accuracy"], result.get("accuracy")
        if share is not None and accuracy is not None:
            advice = ": try another --lr, more --epochs, or more training examples"
            said = f"accuracy {accuracy:.4f}, majority-class baseline {share:.4f}"
            yield said + (advice if accuracy <= share else "")
        if settings.stage == "adapter" and result["train_examples"] < 2000 and settings.lr <= 1e-4:
            better = "--lr 5e-4 to 1e-3 and more --epochs did better in docs/results.md"
            yield f"hint: on a few hundred examples {better}"
        yield f"next: {next_command(self.out, self.config)}"


def finished(settings, config):
    """The closing line of the finished run in settings.out. Raises ValueError if it was made by
    another command, encoder, data or adapters than `config` describes. What its config.json lacks,
    its version did not record."""
    old = read_json(settings.out / "config.json")
    old = {name: old.get(name, value) for name, value in config.items()}
    if found := difference(old, config, free_names(settings) | {*MACHINE}):
        name, before, now = found
        raise ValueError(
            f"{settings.out} holds a finished run with {name} = {before}, not {now}: choose "
            "another --out, or --overwrite it"
        )
    (settings.out / "resume.pt").unlink(missing_ok=True)
    return read_json(settings.out / "metrics.json")


def next_command(out, config):
    """What to try with a run that has just finished."""
    stage, place = config["stage"], shlex.quote(str(out))
    program = program_of(config)
    fork = f" --import {program[1]}" if program else ""  # what makes its kinds known
    if stage == "fusion":
        figures = shlex.quote(f"{out}-figures")
        return f"python -m experiments.figure4 {place} --out {figures}{fork}"
    first = shlex.quote(next(iter(config["columns"])))
    task = f" --task {first}" if stage == "multitask" else ""
    return f"python -m experiments.predict {place} --file FILE{task}{fork}"


def program_of(config):
    """(path, name of the module) of the program that made a run, None for train.py itself. One that
    was started by its whole path is a module of this directory, or the file alone."""
    program = Path(shlex.split(config.get("command") or "train.py")[0])
    root = Path(__file__).resolve().parent.parent
    if program.is_absolute():
        program = Path(program.relative_to(root) if program.is_relative_to(root) else program.name)
    module = ".".join(part for part in program.with_suffix("").parts if part.isidentifier())
    return None if program.name == "train.py" or not module else (program, module)


# --------------------------------------------------------------------------------------------------
# What config.json says


def describe_encoder(bert):
    """Digests of the encoder's weights and of its tokenizer."""
    tokenizer = read_tokenizer(bert.directory)  # which has been checked
    tokenizer.enable_truncation(bert.config.max_length, strategy="longest_first")
    return {"encoder_sha256": bert.digest, "tokenizer_sha256": tokenizer_digest(tokenizer)}


def describe_data(train_sets, dev_sets):
    """Digests of all tokens and labels and of the examples held out for development, the revision
    of the hub's data, and the sizes."""
    digest = hashlib.sha256()
    for split in (*train_sets, *dev_sets):
        for rows in split.with_format("arrow").iter(10_000):
            for name in ("input_ids", "token_type_ids", "label"):
                values = rows[name].combine_chunks()
                while hasattr(values.type, "value_type"):  # lists, in lists for the candidates
                    digest.update(values.value_lengths().to_numpy().tobytes())
                    values = values.flatten()
                digest.update(values.to_numpy().tobytes())
    origins = [origin(split) for split in train_sets]
    revisions = ",".join(of["revision"] for of in origins if of["revision"])
    return {
        "data_sha256": digest.hexdigest(),
        "data_revision": revisions or None,
        "held_out": [of["held_out"] for of in origins],  # digests, where --dev-fraction did
        "train_examples": sum(map(len, train_sets)),
        "dev_examples": sum(map(len, dev_sets)),
        "majority_class_accuracy": majority_class_accuracy(dev_sets),
    }


def describe_files(tasks, data_dir, dev_fraction):
    """The SHA-256 of each task's local files, {task: {file: digest}}; of the hub's there is the
    revision."""
    return {
        "data_files": {
            task.name: find_split(task, "train", data_dir, dev_fraction).files
            | find_split(task, "validation", data_dir, dev_fraction).files
            for task in tasks
            if data_dir is not None or task.files
        }
    }


def majority_class_accuracy(dev_sets):
    """The accuracy of always giving the most frequent label, the mean over the development sets;
    None where labels are no classes."""
    shares = []
    for split in dev_sets:
        labels = split.with_format("numpy")["label"][:]
        if labels.dtype.kind != "i":
            return None
        shares.append(np.bincount(labels).max() / len(labels))
    return float(np.mean(shares))


def describe_machine(device, command):
    """Where and how a run was made."""
    packages = "torch numpy tokenizers safetensors datasets".split()
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in packages},
        "python": platform.python_version(),
        "commit": commit(),
        "command": command,
    }


def commit():
    """The commit of this file's repository, not of one that is around it or in the environment;
    with changes that are not committed "-dirty" is behind it. None without a repository."""
    command = "git --git-dir=.git --work-tree=. --no-optional-locks describe --always --dirty"
    command = [*command.split(), "--abbrev=40", "--exclude=*"]
    here = Path(__file__).resolve().parent.parent
    try:
        done = subprocess.run(command, cwd=here, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None
