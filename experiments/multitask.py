"""MT-A, the multi-task adapters (section 2.2.2; Stickland and Murray, 2019), and multi-task
learning (section 2.1.2): Θ, and an adapter and a head for each task, are trained jointly.

    python -m experiments.multitask --tasks mnli qqp sst2 mrpc rte --out runs/mt
    python -m experiments.evaluate runs/mt --task rte

Θ, Φ_1..N <- argmin Σ_n L(D_n; Θ, Φ_n). The run directory is a checkpoint of the new Θ′, with
adapters/TASK in AdapterHub's files (heads/TASK without adapters). This is train.py's loop, except
that each step draws its task. Its defaults are Stickland and Murray's; other options train.py's."""

import math
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

import train
from adapter import ADAPTERS, activate, adapter_modules, add_adapter, save_adapter, save_head
from bert import Bert
from data import batches, get_task
from experiments import pal  # noqa: F401  (its adapters, the default)
from formats import adapterhub
from formats.files import write_json, write_tensors
from formats.kept import without_file
from formats.rows import source_of
from formats.tokenizer import copy_tokenizer
from runtime import command
from runtime.processes import choose_device, reseed, set_deterministic
from runtime.record import describe
from runtime.run import open_run

WARMUP, WEIGHT_DECAY = 0.1, 0.01


def add_parts(args, bert, task):
    """Trains all of Θ, and a new adapter of the task; `load_run` calls it for one task of a run."""
    if not args.without_adapters:
        add_adapter(bert, task.name, ADAPTERS[args.adapter](**args.adapter_config))
    bert.requires_grad_(True)


STAGE = {"lr": 2e-5, "epochs": 25, "options": train.OF_ADAPTER, "build": add_parts}
train.STAGES["multitask"] = STAGE


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
    if args.train_file and len(args.tasks) > 1:
        raise ValueError(f"--train-file is of one task, not of {', '.join(args.tasks)}")
    if args.cuda_graphs:  # a replay gives a gradient to every parameter, also of the other tasks
        raise ValueError("--cuda-graphs is for a run on one task")
    args.task = ",".join(args.tasks)
    args.patience = args.patience or args.epochs
    args.steps_per_epoch = args.steps_per_epoch or 300 * len(args.tasks)
    return args


class OneOfSeveral(train.Model):
    """The model of one task, whose adapter a forward pass activates; all share the encoder."""

    def __init__(self, bert, head, task):
        super().__init__(bert, head)
        self.task = task

    def forward(self, batch):
        activate(self.bert, self.task.name if self.bert.adapter_configs else None)
        return super().forward(batch)


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
    seen, drawn = np.zeros(len(names), int), []  # seen: batches of each task so far
    for e in range(1, epoch + 1):
        seen += np.bincount(drawn, minlength=len(names))  # in the epoch before
        p = task_probabilities(sizes, e, args.epochs)
        drawn = np.random.default_rng((args.seed, e)).choice(len(names), args.steps_per_epoch, p=p)
    for n in drawn.tolist():  # in this epoch
        examples = train_sets[names[n]]
        passes, step = divmod(int(seen[n]), math.ceil(len(examples) / args.batch_size))
        if (n, passes) not in orders:
            orders[n, passes] = batches(examples, args.batch_size, (args.seed, passes, n))
        result.append((names[n], orders[n, passes][step]))
        seen[n] += 1
    return result


def schedule(done):
    """Linearly from 0 to 1, then at once to 1 - WARMUP, then linearly to 0, as in Google's BERT."""
    return done / WARMUP if done < WARMUP else 1 - done


def train_jointly(args):
    """As train.train, on all tasks."""
    device, dtype = choose_device(args.device, args.dtype)
    set_deterministic(device)
    reseed(args.seed)
    bert = Bert.from_pretrained(args.model).to(device)
    whole = nn.Module()  # all that is trained: the encoder with every adapter, and {task: head}
    whole.bert, whole.heads = bert, nn.ModuleDict()
    source, models, data = source_of(args), {}, []
    reseed(args.seed)
    for name in args.tasks:
        settled, task = train.settle(args, get_task(name, source), bert, dtype)
        args.score = settled.score  # the first task's, which the others must have, too
        add_parts(args, bert, task)
        whole.heads[name] = train.new_head(args, task, bert)
        models[name] = OneOfSeveral(bert, whole.heads[name], task)
        tokenizer, *sets = train.load_data(args, task, source, bert)
        data.append((task, *sets))
    args.dtype = settled.dtype  # but not its max_length: each task has one of its own
    kept = {*whole.state_dict()}
    trainable = [p for p in whole.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trainable if p.ndim > 1], "weight_decay": WEIGHT_DECAY}]
    groups += [{"params": [p for p in trainable if p.ndim <= 1]}]  # biases, and LayerNorms
    optimizer = torch.optim.AdamW(groups, args.lr, weight_decay=0.0, fused=device.type != "mps")
    record = describe(args, whole, tokenizer, {}, data)
    record["steps_per_epoch"] = args.steps_per_epoch
    train_sets = {task.name: train_set for task, train_set, _ in data}

    def steps(epoch):
        drawn = multitask_batches(args, train_sets, epoch)
        return [(models[n], models[n].task, [train_sets[n][i] for i in ids]) for n, ids in drawn]

    def evaluation():  # the mean over the tasks of each score that all of them have
        found = {t.name: train.evaluate(models[t.name], t, dev_set, args) for t, _, dev_set in data}
        shared = set.intersection(*map(set, found.values())) - {"never_predicted"}
        means = {n: sum(of[n] for of in found.values()) / len(found) for n in sorted(shared)}
        accuracies = {name: of["accuracy"] for name, of in found.items() if "accuracy" in of}
        return {**means, "accuracies": accuracies}

    # Adam's momentum goes on moving an idle adapter, as in Stickland and Murray's code.
    def fill_idle(optimizer, *_):
        for p in optimizer.state:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad

    optimizer.register_step_pre_hook(fill_idle)

    with open_run(args, record, whole, kept, optimizer) as run:
        if run.result:
            return run.result
        train.minimize(run, steps, schedule, evaluation)
        if run.rank == 0:
            record = save(whole, args.out, record, kept)
        return run.finish(record)


def save(whole, out, record, kept):
    """A checkpoint of Θ′; of each task the adapter and the head; in own.safetensors the rest."""
    bert, out = whole.bert, Path(out)
    parts = {"encoder": bert.theta()}
    sha256, bert.source = bert.save_pretrained(out), str(out.resolve())
    record = {**record, "encoder": sha256, "trained_on": bert.source}  # what adapters belong to
    copy_tokenizer(bert.directory, out)
    for name, head in whole.heads.items():
        parts[f"head {name}"] = adapterhub.head_tensors(head)
        directory = out / ("adapters" if name in bert.adapter_configs else "heads") / name
        if name in bert.adapter_configs:
            save_adapter(bert, name, directory)
            parts[f"adapter {name}"] = adapterhub.slot_tensors(adapter_modules(bert, name))
        save_head(head, bert, name, directory)
        write_json(directory / "run.json", record)
    if rest := without_file(whole, kept, parts):
        write_tensors(out / "own.safetensors", rest)
    return record


def main(argv=None):
    with command.alone():
        return train_jointly(parse(argv))


if __name__ == "__main__":
    command.run_command("multitask", main)
