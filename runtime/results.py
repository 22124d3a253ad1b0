"""What an evaluation has found, put together from all processes."""

import math

import torch

from runtime.processes import all_reduce, rank_and_world_size


def eval_batch_size(batch_size, grad_accumulation):
    """Examples at once in evaluation, which needs less memory. It stays the same, because padding
    and the order of sums can tip a close call."""
    return max(4 * batch_size // grad_accumulation, 1)


class Results:
    """
    Label, prediction and loss of every example, in the order of the batches. Of a batch, which has
    batch_size examples for each of the G processes, this one evaluates every G-th.
    """

    def __init__(self, examples, batch_size):
        self.rank, self.world = rank_and_world_size()
        self.size = batch_size * self.world  # of a batch of all processes
        self.steps = math.ceil(examples / self.size)
        self.rows = torch.zeros(3, examples, dtype=torch.float64)  # of other processes: zeros
        self.done = 0  # batches

    def add(self, labels, predictions, loss, finite):
        """This process's share of the next batch, of b examples. labels, predictions: [b]; loss: a
        scalar, their mean; finite: [b], whether the outputs behind the predictions are numbers."""
        here = slice(self.done * self.size + self.rank, (self.done + 1) * self.size, self.world)
        predictions = predictions.double().where(finite, math.nan).cpu()
        losses = loss.double().expand(len(labels))
        self.rows[:, here] = torch.stack([labels.double(), predictions, losses])
        self.done += 1

    def gathered(self, dtype):
        """(labels, predictions, mean loss) of all processes, the former two [examples] in this
        dtype. Raises FloatingPointError where an output was not finite."""
        labels, predictions, losses = all_reduce(self.rows)
        if predictions.isnan().any():
            raise FloatingPointError("the model's outputs are not finite")
        return labels.to(dtype), predictions.to(dtype), losses.mean().item()
