"""MT-A's training (section 2.2.2; Stickland and Murray, 2019): which task's batch is next, and
whose adapter is active in it."""

import math

import numpy as np

from data import length_bucketed_batches


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
    for e in range(1, epoch + 1):  # those before, too: each task goes on in its data
        if sampling == "round_robin":
            drawn.append(np.arange((e - 1) * steps, e * steps) % tasks)
        else:
            p = task_probabilities([len(task) for task in lengths], sampling, e, epochs)
            drawn.append(np.random.default_rng((seed, e)).choice(tasks, steps, p=p))
    taken = np.bincount(np.concatenate([*drawn[:-1], []]).astype(int), minlength=tasks)
    result, orders = [], {}
    for n in drawn[-1].tolist():
        pass_, step = divmod(taken[n], math.ceil(len(lengths[n]) / batch_size))
        if (n, pass_) not in orders:
            orders[n, pass_] = length_bucketed_batches(lengths[n], batch_size, (seed, pass_, n))
        result.append((n, orders[n, pass_][step]))
        taken[n] += 1
    return result


def switch_task(bert, name):
    """Makes one task's adapter the active one. Unlike `activate` it freezes nothing."""
    for _, slot in bert.slots():
        slot.active = name
