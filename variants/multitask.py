"""MT-A's training (section 2.2.2; Stickland and Murray, 2019): which task's batch is next, and
whose adapter takes part in it."""

import math

import numpy as np

from data import length_bucketed_batches


def task_probabilities(sizes, sampling, epoch, epochs):
    """Of each task to be the next, by the sizes of their training sets. Stickland and Murray
    (2019), section 3.3: size^α, with an α that falls from 1 to 0.2 over the epochs ("annealed"), of
    1 ("proportional") or 0.5 ("sqrt")."""
    alpha = {
        "annealed": 1 - 0.8 * (epoch - 1) / max(epochs - 1, 1),
        "proportional": 1.0,
        "sqrt": 0.5,
    }[sampling]
    return np.asarray(sizes) ** alpha / (np.asarray(sizes) ** alpha).sum()


def multitask_batches(args, lengths, epoch):
    """[(index of the task, its examples)] for every step of an epoch. lengths: in tokens, of each
    task's examples."""
    drawn = []  # by epoch, also of those before: each task goes on in its own data where it stopped
    for e in range(1, epoch + 1):
        if args.sampling == "round_robin":
            drawn.append(
                np.arange((e - 1) * args.steps_per_epoch, e * args.steps_per_epoch) % len(lengths)
            )
        else:
            p = task_probabilities([len(task) for task in lengths], args.sampling, e, args.epochs)
            drawn.append(
                np.random.default_rng((args.seed, e)).choice(
                    len(lengths), args.steps_per_epoch, p=p
                )
            )
    taken = np.bincount(np.concatenate([*drawn[:-1], []]).astype(int), minlength=len(lengths))
    result, orders = [], {}
    for n in drawn[-1].tolist():
        turn, step = divmod(taken[n], math.ceil(len(lengths[n]) / args.batch_size))
        if (n, turn) not in orders:
            orders[n, turn] = length_bucketed_batches(
                lengths[n], args.batch_size, (args.seed, turn, n)
            )
        result.append((n, orders[n, turn][step]))
        taken[n] += 1
    return result


def switch_task(bert, args, task):
    """Multi-task training turns to the adapter of one task, where each task has one. Unlike
    `activate` it freezes nothing."""
    if args.stage == "multitask" and args.adapter != "none":
        for _, slot in bert.slots():
            slot.active = task.name
