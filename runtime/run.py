"""Everything about a run except the mathematics: its directory, log, checkpoints and messages.

with open_run(settings, record, device, save) as run:  # locked; signals wait for the end of a step
    run.start(state, trainable, optimizer)             # from the saved state under --resume
    ddp_model = run.distribute(model)                  # DistributedDataParallel under torchrun
    for indices in run.progress(batches, state):
        for weight, part in run.micro_batches(indices):
            ...
        run.after_step(state)                          # reports; saves when due; ends on a signal
    run.log_epoch(state, scores)
    run.checkpoint(state)
    result = run.finish(state)                         # the best epoch's parameters are saved

A run saves and reports; it never changes the state that it is given, but to restore it.
"""

import contextlib
import json
import math
import shlex
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from formats.files import atomic_write, fsync, read_json, write_json
from runtime import directory
from runtime.directory import RUN_FILES, TEMPORARY, clear
from runtime.processes import (
    all_reduce,
    deferred_signals,
    micro_batches,
    out_of_memory,
    rank_and_world_size,
)
from runtime.record import read_record
from runtime.seen import messages
from runtime.settings import changeable
from runtime.state import load_state, restore_state, save_state

# Its monitor is a thread that only refreshes the bar, and waits forever where memory is short.
tqdm.monitor_interval = 0

SAVE_MINUTES = 5  # between two checkpoints within an epoch
STILL_IMPROVING = 0.01  # of the score that chooses the best epoch, from an epoch to the next
STOPPING = "stopping after this step, or this evaluation; a second signal stops without saving"


@contextlib.contextmanager
def open_run(settings, record, device, save):
    """The Run in settings.out, whose directory is locked, and cleared unless the run is resumed.
    record: what config.json is to say; save: a function of no argument that writes the files of the
    best epoch. Exceptions inside say how to go on. After a FloatingPointError the best epoch is
    saved nevertheless."""
    out = settings.out

    def if_saved(advice):
        return advice if (out / "resume.pt").exists() else ""

    try:
        if dist.is_torchelastic_launched():
            # nothing is written before all processes have come this far
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        first = rank_and_world_size()[0] == 0  # the process that writes
        mine = directory.locked(settings) if first else contextlib.nullcontext()
        with mine, deferred_signals(STOPPING if first else "") as signals:
            run = Run(settings, record, device, save, signals)
            try:
                yield run
                if signals:  # in the last evaluation, or while the result was written
                    raise KeyboardInterrupt
            except FloatingPointError as e:
                raise run.not_finite(e) from e
            except RuntimeError as e:
                if out_of_memory(e) and run.model is not None:
                    raise run.without_memory() from e
                raise
    except KeyboardInterrupt as e:
        advice = if_saved(f", continue with --resume --out {out} in the same command")
        if directory.is_finished(out):
            advice = f"; {out} is finished"
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


def result_of_finished(settings, record):
    """The closing line of the finished run in settings.out. Raises ValueError, naming the first
    difference, if it is not a run of `record`: of another command, encoder, adapter or file of
    data; and if its files are no longer those that it wrote."""
    problem = f"{settings.out} holds a finished run with"
    advice = "choose another --out, or --overwrite it"
    before = read_record(settings.out)
    before.check_same(record, problem, advice, changeable(settings))
    before.check_files(settings.out)
    clear(settings.out, ["resume.pt"])  # where a kill came after metrics.json and before its end
    return read_json(settings.out / "metrics.json")


class Run:
    def __init__(self, settings, record, device, save, signals):
        self.settings, self.device, self.save = settings, device, save
        self.signals = signals  # the numbers of those that have come
        self.out = settings.out
        self.rank, self.world_size = rank_and_world_size()
        self.record = replace(record, processes=self.world_size)
        self.is_new = not directory.resumes(settings)
        self.history = []  # the lines of log.jsonl
        self.model = self.ddp_model = None  # until `distribute`
        if self.rank == 0:
            clear(self.out, TEMPORARY)
            if self.is_new:  # config.json, which makes the directory a run's, is always there
                clear(self.out, [name for name in RUN_FILES if name != "config.json"])
                self.record.write(self.out)

    def start(self, state, trainable, optimizer):
        """From where the run was interrupted, if it is resumed: sets `state`, the parameters {name:
        parameter}, the optimizer and the random numbers to what the last checkpoint holds, and
        restores the log. config.json is that of the command which goes on."""
        self.state, self.trainable, self.optimizer = state, trainable, optimizer
        seconds = 0.0
        if self.rank > 0:
            torch.manual_seed(self.settings.seed + self.rank)  # dropout of its own
        if not self.is_new:
            saved = load_state(self.out / "resume.pt")
            self.check_same_run()
            restore_state(saved, state, trainable, optimizer, self.device)
            self.history, seconds = saved["history"], saved["seconds"]
        step = (state.epoch - 1) * self.record.steps_per_epoch + state.step
        expected = [self.world_size * step, self.world_size * step**2]
        if all_reduce(torch.tensor([step, step**2])).tolist() != expected:
            found = "must be one directory for all processes: they found different states there"
            raise ValueError(f"--out {self.out} {found}")
        if self.rank == 0:
            self.record.write(self.out)
            with atomic_write(self.out / "log.jsonl") as temporary:
                temporary.write_text("".join(json.dumps(line) + "\n" for line in self.history))
            fsync(*self.out.rglob("*"), self.out)  # before a state depends on them
        self.started = time.monotonic() - seconds
        self.saved = time.monotonic()
        self.announce()

    def distribute(self, model, find_unused_parameters=False):
        """The model as all processes train it, itself but under torchrun: DistributedDataParallel
        takes the mean of the gradients. find_unused_parameters: whether a step may leave out some
        of what is trained."""
        self.model = self.ddp_model = model
        if self.world_size > 1:
            for p in self.trainable.values():
                dist.broadcast(p.detach(), 0)
            self.ddp_model = DistributedDataParallel(
                model, init_sync=False, find_unused_parameters=find_unused_parameters
            )
        return self.ddp_model

    def seconds(self):
        """What the run has taken so far, before an interruption, too."""
        return time.monotonic() - self.started

    def say(self, *lines):
        if self.rank == 0:
            print(*lines, sep="\n", flush=True)

    def announce(self):
        """One line before the first step: what is trained on what, and where."""
        r = self.record
        self.say(
            f"{r.stage} on {', '.join(r.tasks)}: encoder {r.options['model']} "
            f"({r.encoder_parameters / 1e6:.1f} M parameters), "
            f"{r.trained_parameters:,} parameters are trained, on {r.device} in {r.dtype}; "
            f"{r.train_examples:,} training and {r.dev_examples:,} development examples, "
            f"{r.steps_per_epoch:,} steps an epoch; run directory {self.out}"
        )
        for line in messages(r.loaded_adapters):
            self.say(line)

    def check_same_run(self):
        """Raises ValueError if the interrupted run in --out is another command's. A fork's program
        may compute something else: a run that goes on under another one says so."""
        before, now = read_record(self.out), self.record
        # the tokens are compared, in whatever files they are
        files = {f"files of {task}" for task in now.tasks}
        problem = f"{self.out} holds a run with"
        advice = "cannot --resume it, --overwrite starts anew"
        before.check_same(now, problem, advice, changeable(self.settings) | files)
        # entries of others in config.json stay
        self.record = replace(now, options={**before.options, **now.options})
        if before.program() != now.program():
            names = [r.program()[0] if r.program() else "train.py" for r in (before, now)]
            self.say(f"note: begun by {names[0]}, continued by {names[1]}")

    # ----------------------------------------------------------------------------------------------
    # During training

    def progress(self, batches, state):
        """The rest of an epoch's batches, under a progress bar."""
        started, self.seen = time.monotonic(), 0  # examples
        steps = self.record.steps_per_epoch
        self.bar = progress_bar(batches, f"epoch {state.epoch}", steps, state.step)
        yield from self.bar
        self.trained_for = time.monotonic() - started

    def micro_batches(self, indices):
        """The parts of a batch that this process computes, at most --grad-accumulation: (weight,
        indices). The weights make Σ weight · (mean loss of the part) the mean loss of the batch,
        where DistributedDataParallel takes the mean over the processes, in the last part's backward
        pass."""
        self.seen += len(indices)
        parts = micro_batches(indices, self.settings.grad_accumulation)
        for i, (share, part) in enumerate(parts):
            self.ddp_model.require_backward_grad_sync = i == len(parts) - 1
            self.examples = len(part)
            yield self.world_size * share, part

    def mean(self, value):
        """The mean over the processes, in place."""
        return all_reduce(value).div_(self.world_size)

    def after_step(self, state):
        """Shows the loss, and saves the state after SAVE_MINUTES. After a signal to any of the
        processes it saves, too, and then raises KeyboardInterrupt. Raises FloatingPointError for a
        loss that is not finite."""
        if state.step % 10 == 0 or state.step == self.record.steps_per_epoch:
            loss = state.loss.item()  # the sum over the epoch; this waits for a GPU
            if not math.isfinite(loss):
                raise FloatingPointError(f"the loss is {loss} in epoch {state.epoch}")
            best = f", best dev {self.settings.score} {state.best_score:.4f}"
            best *= state.best_epoch > 0
            self.bar.set_postfix_str(f"loss {loss / state.step:.4f}{best}")
        due = time.monotonic() - self.saved >= 60 * SAVE_MINUTES
        stop, due = all_reduce(torch.tensor([len(self.signals), due])).tolist()
        if stop or due:
            self.checkpoint(state)
        if stop:
            raise KeyboardInterrupt

    def checkpoint(self, state):
        """Saves the state, from which --resume continues to the bit."""
        parts = state, self.trainable, self.optimizer, self.device
        save_state(self.out / "resume.pt", *parts, self.history, self.seconds())
        self.saved = time.monotonic()

    def log_epoch(self, state, scores):
        """A line in log.jsonl, and one on the screen. scores: {name: a number, or a dictionary
        which is logged as it is}. Raises ValueError if the one that chooses the best epoch is not a
        number."""
        if math.isnan(scores[self.settings.score]):
            raise ValueError(f"--score {self.settings.score} is not a number")
        loss = state.loss.item() / self.record.steps_per_epoch
        numbers = {name: value for name, value in scores.items() if not isinstance(value, dict)}
        line = {"epoch": state.epoch, "loss": loss}
        line |= {f"dev_{name}": value for name, value in numbers.items()}
        line |= {name: value for name, value in scores.items() if name not in numbers}
        if self.seen:  # none, where a resumed run had only to be evaluated
            line["examples_per_second"] = round(self.seen / self.trained_for, 1)
        line["seconds"] = round(self.seconds(), 2)
        self.history.append(line)
        if self.rank == 0:
            with open(self.out / "log.jsonl", "a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")
        dev = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in numbers.items())
        for each in (value for value in scores.values() if isinstance(value, dict)):
            dev += f" ({', '.join(f'{name} {value:.4f}' for name, value in each.items())})"
        best = "; best so far" * (state.best_epoch == state.epoch)
        seconds = f"{line['seconds']:.0f} s"
        self.say(f"epoch {state.epoch:2}: loss {line['loss']:.4f}; dev {dev}; {seconds}{best}")

    # ----------------------------------------------------------------------------------------------
    # The end

    def not_finite(self, error):
        """Saves the best epoch, and returns a FloatingPointError that says what is kept and what
        may help. If no epoch was finished, the run's files are removed."""
        advice = "a lower --lr may help"
        for name, p in self.model.named_parameters():
            if not p.requires_grad and not p.isfinite().all():
                name = name.split("bert.")[-1]
                advice = f"the encoder's {name} holds values that are not finite"
                break
        if self.state.best_epoch > 0:
            kept = f"epoch {self.state.best_epoch} is kept in {self.out}"
            self.write_result(self.state)
        else:
            kept = "no epoch was finished, nothing is kept"
            if self.rank == 0:
                clear(self.out, RUN_FILES + TEMPORARY)
        return FloatingPointError(f"{error}: stopped, {kept}; {advice}")

    def without_memory(self):
        """A MemoryError that says how to go on."""
        resume = "with --resume and " * (self.out / "resume.pt").exists()
        where = f"on {self.examples} examples at once" if self.model.training else "in evaluation"
        return MemoryError(
            f"{self.device} ran out of memory {where}: continue {resume or 'with '}"
            f"--grad-accumulation {2 * self.settings.grad_accumulation}, which gives the same "
            "gradients, or start again with a smaller --batch-size"
        )

    def finish(self, state):
        """Makes the run a finished one, and returns the closing line."""
        result = self.write_result(state)
        self.say(*self.closing_words(state, result))
        return result

    def write_result(self, state):
        """Calls `save`, and writes metrics.json."""
        scores = dict(state.best_scores)
        if "loss" in scores:
            scores["dev_loss"] = scores.pop("loss")
        result = {name: self.record.options[name] for name in ("stage", "task", "seed")}
        names = "train_examples dev_examples trained_parameters majority_class_accuracy"
        result |= {name: getattr(self.record, name) for name in names.split()}
        result |= {"model": self.settings.model, "best_epoch": state.best_epoch, **scores}
        result |= {"seconds": round(self.seconds(), 2), "out": str(self.out)}
        if self.rank == 0:
            self.save()
            read_record(self.out).with_files(self.out).write(self.out)
            fsync(*self.out.rglob("*"), self.out)
            # last: a directory with it is a finished run
            write_json(self.out / "metrics.json", result)
            (self.out / "resume.pt").unlink(missing_ok=True)
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
        scores = [line[f"dev_{settings.score}"] for line in self.history]
        if state.best_epoch == last > 1 and scores[-1] - scores[-2] > STILL_IMPROVING:
            better = f"{scores[-1] - scores[-2]:.4f} better than the one before"
            yield f"hint: the last epoch is the best, and {better}: more --epochs may help"
        share, accuracy = result["majority_class_accuracy"], result.get("accuracy")
        if share is not None and accuracy is not None:
            advice = ": try another --lr, more --epochs, or more training examples"
            said = f"accuracy {accuracy:.4f}, majority-class baseline {share:.4f}"
            yield said + (advice if accuracy <= share else "")
        if settings.stage == "adapter" and result["train_examples"] < 2000 and settings.lr <= 1e-4:
            yield "hint: on small training sets the runs of docs/results.md take --lr 5e-4 to 1e-3"
        yield f"next: {self.next_command()}"

    def next_command(self):
        """What to try with the run, once it has finished."""
        place, modules = shlex.quote(str(self.out)), self.record.modules()
        fork = f" --import {','.join(modules)}" if modules else ""  # what makes its kinds known
        if "fusion" in self.record.trained_parts:
            figures = shlex.quote(f"{self.out}-figures")
            return f"python -m experiments.fusion_weights {place} --out {figures}{fork}"
        first, *others = map(shlex.quote, self.record.tasks)
        options = self.record.options
        if others and options["adapter"] != "none":  # Fusion w/ MT-A
            fusion = f"--task {first} --model {place} --adapters {place}/adapters/*"
            if options["data_dir"]:
                fusion += f" --data-dir {shlex.quote(options['data_dir'])}"
            if options["dev_fraction"]:
                fusion += f" --dev-fraction {options['dev_fraction']}"
            return f"python train.py --stage fusion {fusion} --out {place}-fusion-{first}{fork}"
        task = f" --task {first}" * (self.record.stage == "multitask")
        return f"python -m experiments.predict {place}{task} --file FILE{fork}"
