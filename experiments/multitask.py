"""MT-A, the multi-task adapters (section 2.2.2; Stickland and Murray, 2019), and multi-task
learning (section 2.1.2): Θ, and an adapter and a head for each task, are trained jointly.

    python -m experiments.multitask --tasks mnli qqp sst2 mrpc rte --out runs/mt
    python -m experiments.multitask --tasks mnli qqp rte --adapter none     # without adapters
    python train.py --stage fusion --task rte --model runs/mt --adapters runs/mt/adapters/* \\
        --out runs/fusion-mt-rte
    python -m experiments.evaluate runs/mt --task rte

Θ, Φ_1..N <- argmin Σ_n L(D_n; Θ, Φ_n). The run directory is a checkpoint of the new Θ′, with
adapters/TASK in AdapterHub's files (heads/TASK without adapters). This is train.py's loop, except
that each step draws its task.
"""

import math
import shlex
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

import train
from adapter import ADAPTERS, adapter_modules, add_adapter, save_adapter, save_head
from bert import Bert, known_adapters
from data import collate, length_bucketed_batches
from formats.tokenizer import copy_tokenizer
from runtime.command import run_command
from runtime.directory import check_out, is_finished
from runtime.processes import choose_device
from runtime.record import describe
from runtime.run import open_run, result_of_finished
from runtime.settings import COUNT, option, parse, same_option

# Stickland and Murray (2019): 25 epochs of 300 steps for each task
train.STAGES["multitask"] = train.Stage(
    "encoder, an adapter and a head for each of --tasks", 2e-5, 25, None, options_of=("adapter",)
)

WARMUP, WEIGHT_DECAY = 0.1, 0.01  # theirs

hyper_option = partial(option, group="hyper-parameters")


def hidden(name, **changes):
    """An option of train.py that this command does not have."""
    return same_option(train.Settings, name, flag=None, **changes)


@dataclass(frozen=True)
class Settings(train.Settings):
    stage: str = hidden("stage", default="multitask")
    task: str | None = hidden("task")  # all tasks, comma-separated
    tasks: tuple = hyper_option(
        (), "which are trained together", required=True, recorded=False, distinct=True
    )
    sampling: str = hyper_option(
        "annealed",
        "how the next task is drawn (their section 3.3)",
        choices="annealed proportional sqrt round_robin".split(),
    )
    steps_per_epoch: int | None = hyper_option(
        None, "of all tasks; default 300 times their number", valid=COUNT
    )
    adapter: str = same_option(
        train.Settings,
        "adapter",
        default="pal",
        help="architecture; default pal; none: multi-task learning without adapters",
        choices=[*ADAPTERS, "none"],
    )
    lr: float | None = same_option(train.Settings, "lr", help="then linearly to 0; default 2e-5")
    epochs: int | None = same_option(train.Settings, "epochs", help="at most; default 25")
    patience: int | None = same_option(
        train.Settings, "patience", default=None, help="default: it runs through all epochs"
    )
    reduction_factor: float | None = same_option(
        train.Settings,
        "reduction_factor",
        help="d / r; default 16; pal has a size instead (--adapter-config)",
    )
    score: str | None = same_option(
        train.Settings, "score", help="whose mean chooses the best epoch; default the first of all"
    )
    model: str | None = same_option(
        train.Settings, "model", help="encoder; default google-bert/bert-base-uncased"
    )
    out: Path | None = same_option(
        train.Settings, "out", help="run directory; default runs/multitask"
    )
    # options of a run on one task
    adapters: tuple = hidden("adapters")
    fusion: str | None = hidden("fusion")
    fusion_config: dict = hidden("fusion_config")
    train_file: Path | None = hidden("train_file")
    dev_file: Path | None = hidden("dev_file")
    column_names: dict = hidden("column_names")

    def with_defaults(self):
        if self.adapter == "none" and (self.adapter_config or self.reduction_factor):
            raise ValueError(
                "--adapter-config and --reduction-factor change a new adapter, and --adapter none "
                "makes none"
            )
        result = replace(
            super().with_defaults(),
            task=",".join(self.tasks),
            out=self.out or Path("runs/multitask"),
            steps_per_epoch=self.steps_per_epoch or 300 * len(self.tasks),
        )
        return replace(result, patience=result.patience or result.epochs)


class MultitaskModel(nn.Module):
    """The models of all tasks, which share the encoder, as one module."""

    def __init__(self, bert, heads, dtype):
        super().__init__()
        self.bert = bert
        models = {name: train.Model(bert, head, dtype) for name, head in heads.items()}
        self.models = nn.ModuleDict(models)

    def of_task(self, name):
        """The model of a task; its adapter is the active one. `activate` would freeze all."""
        for _, slot in self.bert.slots():
            slot.active = name
        return self.models[name]

    def forward(self, name, batch):
        return self.of_task(name)(batch)


def build(settings, tasks, device, dtype):
    bert = Bert.from_pretrained(settings.model).to(device)
    torch.manual_seed(settings.seed)
    if settings.adapter != "none":
        for name in tasks:
            add_adapter(bert, name, train.new_adapter_config(settings, bert))
    for p in bert.own_parameters().values():
        p.requires_grad_(True)
    for name in known_adapters(bert):
        config, modules = adapter_modules(bert, name)
        for p in [p for _, _, module in modules for p in config.trainable_parameters(module)]:
            p.requires_grad_(True)
    heads = {name: train.task_head(settings, task, bert) for name, task in tasks.items()}
    return MultitaskModel(bert, heads, dtype)


def task_probabilities(sizes, sampling, epoch, epochs):
    """The probability of each task to be the next, by the sizes of their training sets. Stickland
    and Murray (2019), section 3.3: size^α, where α falls from 1 to 0.2 over the epochs
    ("annealed"), or is 1 ("proportional") or 0.5 ("sqrt")."""
    annealed = 1 - 0.8 * (epoch - 1) / max(epochs - 1, 1)
    alpha = {"annealed": annealed, "proportional": 1.0, "sqrt": 0.5}[sampling]
    return np.asarray(sizes) ** alpha / (np.asarray(sizes) ** alpha).sum()


def multitask_batches(lengths, sampling, steps, batch_size, seed, epoch, epochs):
    """[(index of the task, its examples)] for each of the `steps` of an epoch. lengths: in tokens,
    of each task's examples."""
    tasks, drawn = len(lengths), []
    # earlier epochs' draws, too: each task continues where it stopped
    for e in range(1, epoch + 1):
        if sampling == "round_robin":
            drawn.append(np.arange((e - 1) * steps, e * steps) % tasks)
        else:
            p = task_probabilities([len(task) for task in lengths], sampling, e, epochs)
            drawn.append(np.random.default_rng((seed, e)).choice(tasks, steps, p=p))
    seen = np.bincount(np.concatenate([*drawn[:-1], []]).astype(int), minlength=tasks)
    result, orders = [], {}
    for n in drawn[-1].tolist():
        passes, step = divmod(seen[n], math.ceil(len(lengths[n]) / batch_size))
        if (n, passes) not in orders:
            orders[n, passes] = length_bucketed_batches(lengths[n], batch_size, (seed, passes, n))
        result.append((n, orders[n, passes][step]))
        seen[n] += 1
    return result


def evaluate(model, tasks, dev_sets, settings):
    """{score: mean over the tasks}, of the scores that all tasks have, and "accuracies": {task: the
    score that chooses the best epoch}"""
    found = {
        name: train.evaluate(model.of_task(name), task, dev_sets[name], settings.eval_batch_size)
        for name, task in tasks.items()
    }
    shared = [
        name for name in next(iter(found.values())) if all(name in of for of in found.values())
    ]
    means = {name: sum(of[name] for of in found.values()) / len(found) for name in shared}
    return {**means, "accuracies": {name: of[settings.score] for name, of in found.items()}}


def train_jointly(settings):
    """As train.train, on all tasks."""
    settings = settings.with_defaults()
    if settings.resume and is_finished(settings.out):
        return finished_result(settings)
    check_out(settings)

    device, dtype = choose_device(settings.device, settings.dtype)
    tasks = {name: train.find_task(settings, name) for name in settings.tasks}
    model = build(settings, tasks, device, dtype)
    bert = model.bert
    settings, by_task = for_tasks(settings, tasks, bert)
    data_sets = {n: train.load_data(by_task[n], task, bert) for n, task in tasks.items()}
    train_sets = {name: train_set for name, (train_set, _) in data_sets.items()}
    dev_sets = {name: dev_set for name, (_, dev_set) in data_sets.items()}
    lengths = [examples.with_format("numpy")["length"][:] for examples in train_sets.values()]
    steps, names = settings.steps_per_epoch, [*tasks]
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = train.make_optimizer(trainable, settings.lr, WEIGHT_DECAY)
    record = describe_run(settings, by_task, tasks, bert, dtype)
    record = record.with_training(train.trained_parts(model), trainable, steps, data_sets, device)

    state = train.TrainState(loss=torch.zeros((), device=device))
    save_best = partial(save, settings.out, model, state, trainable)
    with open_run(settings, record, device, save_best) as run:
        run.start(state, trainable, optimizer)
        for p in optimizer.state:  # of a task whose batch was seen before the interruption
            p.grad = torch.zeros_like(p)
        ddp_model = run.distribute(model, find_unused_parameters=True)  # of the other tasks
        while state.epoch <= settings.epochs and (
            state.epoch - state.best_epoch <= settings.patience
        ):
            drawing = settings.sampling, steps, settings.batch_size, settings.seed
            drawn = multitask_batches(lengths, *drawing, state.epoch, settings.epochs)
            model.train()
            for n, indices in run.progress(drawn[state.step :], state):
                name, task, examples = names[n], tasks[names[n]], train_sets[names[n]]
                done = ((state.epoch - 1) * steps + state.step) / (steps * settings.epochs)
                train.set_lr(optimizer, settings.lr * lr_factor(done))
                step_loss = torch.zeros((), device=device)
                for weight, part in run.micro_batches(indices):
                    batch = collate(examples[part], bert.config.pad_token_id)
                    loss = task.type.loss(ddp_model(name, batch), batch["labels"].to(device))
                    (weight * loss).backward()
                    step_loss += weight * loss.detach()
                nn.utils.clip_grad_norm_(trainable.values(), 1.0)
                optimizer.step()
                # Zeros instead of None: Adam's momentum goes on moving the idle tasks' adapters, as
                # in Stickland and Murray's code.
                optimizer.zero_grad(set_to_none=False)
                state.loss += run.mean(step_loss)
                state.step += 1
                run.after_step(state)

            scores = evaluate(model, tasks, dev_sets, settings)
            if scores[settings.score] > state.best_score:
                state.keep_best(scores, scores[settings.score], trainable)
            run.log_epoch(state, scores)
            state.next_epoch()
            run.checkpoint(state)
        return run.finish(state)


def lr_factor(done):
    """Linearly down to 0, after a warm-up from 0 to 1, from which it drops to 1 - WARMUP, as in
    Google's BERT. done: the share of all steps that is done."""
    return done / WARMUP if done < WARMUP else 1 - done


def for_tasks(settings, tasks, bert):
    """(settings with a score that all tasks have, {task: the same with its own length})"""
    first, *others = tasks.values()
    shared = [name for name in first.scores if all(name in task.scores for task in others)]
    if settings.score not in (None, *shared) or not shared:
        raise ValueError(f"--score: all of --tasks have {', '.join(shared) or 'none in common'}")
    settings = replace(settings, score=settings.score or shared[0])
    return settings, {n: settings.for_task(task, bert.config) for n, task in tasks.items()}


def describe_run(settings, by_task, tasks, bert, dtype):
    """As train.describe_run."""
    lengths = {name: settings.max_length for name, settings in by_task.items()}
    return describe(settings, tasks, lengths, bert, {}, dtype)


def save(out, model, state, trainable):
    """A checkpoint of Θ′, and of each task the adapter and the head."""
    state.load_best(trainable)
    bert = model.bert
    bert.save_pretrained(out)
    copy_tokenizer(bert.directory, out)
    bert.source = str(out)  # the encoder to which the adapters belong
    for name, model_of_task in model.models.items():
        has_adapter = name in known_adapters(bert)
        directory = out / ("adapters" if has_adapter else "heads") / name
        if has_adapter:
            save_adapter(bert, name, directory)
        save_head(model_of_task.head, bert, name, directory)


def finished_result(settings, bert=None):
    """As train.finished_result."""
    _, dtype = choose_device(settings.device, settings.dtype)
    tasks = {name: train.find_task(settings, name) for name in settings.tasks}
    bert = bert or Bert.from_pretrained(settings.model)
    settings, by_task = for_tasks(settings, tasks, bert)
    return result_of_finished(settings, describe_run(settings, by_task, tasks, bert, dtype))


def main(argv=None):
    words = sys.argv[1:] if argv is None else argv
    settings = parse(Settings, words, "python -m experiments.multitask", __doc__).with_defaults()
    settings = replace(settings, command=shlex.join(["-m", "experiments.multitask", *words]))
    return train_jointly(settings)


if __name__ == "__main__":
    run_command("multitask", main)
