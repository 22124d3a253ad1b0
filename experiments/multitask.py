"""MT-A, the multi-task adapters (section 2.2.2; Stickland and Murray, 2019), and multi-task
learning (section 2.1.2): Θ, and an adapter and a head for each task, are trained jointly.

    python -m experiments.multitask --tasks mnli qqp sst2 mrpc rte --out runs/mt
    python -m experiments.multitask --tasks mnli qqp rte --without-adapters
    python train.py --stage fusion --task rte --model runs/mt --adapters runs/mt/adapters/* \\
        --out runs/fusion-mt-rte
    python -m experiments.evaluate runs/mt --task rte

Θ, Φ_1..N <- argmin Σ_n L(D_n; Θ, Φ_n). The run directory is a checkpoint of the new Θ′, with
adapters/TASK in AdapterHub's files (heads/TASK without adapters). This is train.py's loop, except
that each step draws its task. Its defaults are Stickland and Murray's: PALs, 25 epochs of 300 steps
for each task, lr 2e-5 with a warm-up, weight decay 0.01. Other options are those of train.py."""

import argparse
import math
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import train
from adapter import ADAPTERS, add_adapter, save_adapter, save_head, set_active
from bert import Bert
from data import batches, get_task
from formats.files import write_json
from formats.rows import source_of
from formats.tokenizer import copy_tokenizer
from runtime import command
from runtime.processes import choose_device, make_deterministic
from runtime.record import describe
from runtime.run import State, open_run

WARMUP, WEIGHT_DECAY = 0.1, 0.01


def add_parts(args, bert, task):
    """Trains all of Θ, and a new adapter of the task; `load_run` calls it for one task of a run."""
    if not args.without_adapters:
        add_adapter(bert, task.name, ADAPTERS[args.adapter](**args.adapter_config))
    bert.requires_grad_(True)


train.STAGES["multitask"] = {"lr": 2e-5, "epochs": 25, "build": add_parts}


def parse(argv=None):
    parser = train.make_parser("python -m experiments.multitask", __doc__)
    parser.add_argument("--tasks", nargs="+", required=True, help="are trained together")
    parser.add_argument("--without-adapters", action="store_true", help="multi-task learning")
    parser.add_argument("--steps-per-epoch", type=command.count, help="default 300 for each task")
    parser.set_defaults(adapter="pal", patience=None, out="runs/multitask")
    words = ["--stage", "multitask", "--task", "multitask"]
    args = train.parse([*words, *(sys.argv[1:] if argv is None else argv)], parser)
    if len({*args.tasks}) < len(args.tasks):
        raise ValueError(f"--tasks names one task twice: {' '.join(args.tasks)}")
    if args.cuda_graphs:  # a replay gives a gradient to every parameter, also of the other tasks
        raise ValueError("--cuda-graphs is for a run on one task")
    args.task = ",".join(args.tasks)
    args.patience = args.patience or args.epochs
    args.steps_per_epoch = args.steps_per_epoch or 300 * len(args.tasks)
    return args


class MultitaskModel(nn.Module):
    """A model of each task, {task: train.Model}; all share the encoder. A forward pass is that of
    the task that was set last, whose adapter is the active one."""

    def __init__(self, models):
        super().__init__()
        self.models = nn.ModuleDict(models)
        self.bert = next(iter(models.values())).bert

    def set_task(self, name):
        set_active(self.bert, name if name in self.bert.adapter_configs else None)
        self.task = name

    def forward(self, batch):
        return self.models[self.task](batch)


def build(args, tasks, bert):
    """All of it is trained."""
    first, *others = tasks.values()
    models = {first.name: train.build(args, bert, first, {})}
    for task in others:
        add_parts(args, bert, task)
        models[task.name] = train.Model(bert, train.new_head(args, task, bert))
    return MultitaskModel(models)


def task_probabilities(sizes, epoch, epochs):
    """The probability of each task to be the next, by the sizes of their training sets. Stickland
    and Murray (2019), section 3.3: size^α, where α falls from 1 to 0.2 over the epochs."""
    alpha = 1 - 0.8 * (epoch - 1) / max(epochs - 1, 1)
    return np.asarray(sizes) ** alpha / (np.asarray(sizes) ** alpha).sum()


def multitask_batches(args, train_sets, epoch):
    """[(task, its examples)] for each step of an epoch. train_sets: {task: [Example]}. Each task
    goes on where it stopped in the epoch before, so earlier epochs are drawn, too."""
    names, sizes = [*train_sets], [len(examples) for examples in train_sets.values()]
    orders, result = {}, []  # orders: {(task, how often it has been through its examples): batches}
    seen = np.zeros(len(names), int)  # batches of each task so far
    for e in range(1, epoch + 1):
        p = task_probabilities(sizes, e, args.epochs)
        drawn = np.random.default_rng((args.seed, e)).choice(len(names), args.steps_per_epoch, p=p)
        if e < epoch:
            seen += np.bincount(drawn, minlength=len(names))
    for n in drawn.tolist():
        examples = train_sets[names[n]]
        passes, step = divmod(int(seen[n]), math.ceil(len(examples) / args.batch_size))
        if (n, passes) not in orders:
            orders[n, passes] = batches(examples, args.batch_size, (args.seed, passes, n))
        result.append((names[n], orders[n, passes][step]))
        seen[n] += 1
    return result


def lr_factor(done):
    """Linearly down to 0, after a warm-up from 0 to 1, from which it drops to 1 - WARMUP, as in
    Google's BERT. done: the share of all steps that is done."""
    return done / WARMUP if done < WARMUP else 1 - done


def evaluate(model, tasks, dev_sets, args):
    """{score: its mean over the tasks} where all have it, and "accuracies" {task: its accuracy}"""
    found = {}
    for name, task in tasks.items():
        model.set_task(name)
        found[name] = train.evaluate(model.models[name], task, dev_sets[name], args)
    shared = set.intersection(*map(set, found.values()))
    means = {name: sum(of[name] for of in found.values()) / len(found) for name in sorted(shared)}
    accuracies = {name: of["accuracy"] for name, of in found.items() if "accuracy" in of}
    return {**means, "accuracies": accuracies}


def train_jointly(args):
    """As train.train, on all tasks."""
    device, dtype = choose_device(args.device, args.dtype)
    make_deterministic(device)
    args.dtype = str(dtype).removeprefix("torch.")
    sources = {name: source_of(args) for name in args.tasks}
    tasks = {name: get_task(name, source) for name, source in sources.items()}
    args.score = args.score or "accuracy"  # which all must have
    bert, data = Bert.from_pretrained(args.model).to(device), []
    model = build(args, tasks, bert)
    for task in tasks.values():
        own = argparse.Namespace(**vars(args))  # with a length of its own
        tokenizer, train_set, dev_set = train.load_data(own, task, sources[task.name], bert)
        data.append((task, train_set, dev_set))
    train_sets = {task.name: train_set for task, train_set, _ in data}
    dev_sets = {task.name: dev_set for task, _, dev_set in data}
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for one in model.models.values():
        train.check_saved(one)
    decayed = [p for p in trainable.values() if p.ndim > 1]  # no biases, no LayerNorms
    spared = [p for p in trainable.values() if p.ndim <= 1]
    groups = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, weight_decay=WEIGHT_DECAY, fused=device.type != "mps")

    state = State()
    record = describe(args, bert, tokenizer, {}, data, trainable)
    record["steps_per_epoch"] = steps = args.steps_per_epoch
    with open_run(args, record, state, trainable, optimizer) as run:
        if run.result:
            return run.result
        for p in optimizer.state:  # of a task whose batch was seen before the interruption
            p.grad = torch.zeros_like(p)
        ddp_model = model
        if run.world_size > 1:  # a step leaves out the other tasks' parts
            ddp_model = DistributedDataParallel(model, find_unused_parameters=True)
        diverged = None
        try:
            while state.epoch <= args.epochs and state.epoch - state.best_epoch <= args.patience:
                model.train()
                for name, indices in multitask_batches(args, train_sets, state.epoch)[state.step :]:
                    done = ((state.epoch - 1) * steps + state.step) / (steps * args.epochs)
                    for group in optimizer.param_groups:
                        group["lr"] = args.lr * lr_factor(done)
                    model.set_task(name)
                    examples = [train_sets[name][i] for i in indices]
                    given = ddp_model, bert, tasks[name], examples, run
                    loss = train.backward(train.gradients, *given)
                    nn.utils.clip_grad_norm_(trainable.values(), 1.0)
                    optimizer.step()
                    # Zeros instead of None: Adam's momentum goes on moving the idle tasks'
                    # adapters, as in Stickland and Murray's code.
                    optimizer.zero_grad(set_to_none=False)
                    state.step += 1
                    run.after_step(loss)

                scores = evaluate(model, tasks, dev_sets, args)
                for name in ("loss", args.score):
                    run.check_finite(f"development {name}", scores[name])
                if scores[args.score] > state.best_scores.get(args.score, -math.inf):
                    state.best_epoch, state.best_scores = state.epoch, scores
                    state.best = {name: p.detach().cpu().clone() for name, p in trainable.items()}
                state.epoch, state.step = state.epoch + 1, 0
                run.after_epoch(scores)
        except FloatingPointError as e:
            if not state.best:
                raise
            diverged = e

        for name, p in trainable.items():
            p.data.copy_(state.best[name])
        if run.rank == 0:
            record = save(model, args.out, record)
        return run.finish(record, diverged)


def save(model, out, record):
    """A checkpoint of Θ′, and of each task the adapter and the head."""
    bert, out = model.bert, Path(out)
    bert.source = str(out.resolve())  # what the adapters belong to
    record = {**record, "encoder": bert.save_pretrained(out), "trained_on": bert.source}
    copy_tokenizer(bert.directory, out)
    for name, model_of_task in model.models.items():
        has_adapter = name in bert.adapter_configs
        directory = out / ("adapters" if has_adapter else "heads") / name
        if has_adapter:
            save_adapter(bert, name, directory)
        save_head(model_of_task.head, bert, name, directory)
        write_json(directory / "run.json", record)
    return record


def main(argv=None):
    return train_jointly(parse(argv))


if __name__ == "__main__":
    command.run_command("multitask", main)
