"""The predictions of an evaluation, put together from all processes."""

import math

import torch

from runtime.processes import all_reduce, rank_and_world_size


def eval_batch_size(batch_size, grad_accumulation):
    """Examples at once in evaluation, which keeps no activations for a backward pass. It depends on
    these two options alone, because padding and the order of sums can tip a close decision."""
    return max(4 * batch_size // grad_accumulation, 1)


class Predictions:
    """
    Label, prediction and loss of every example, in the order of the batches. batch_size is that of
    all G processes together; of each batch this one evaluates every G-th example.
    """

    def __init__(self, examples, batch_size):
        self.rank, self.world_size = rank_and_world_size()
        self.batch_size = batch_size
        self.steps = math.ceil(examples / batch_size)
        self.rows = torch.zeros(3, examples, dtype=torch.float64)  # of other processes: zeros
        self.done = 0  # batches

    def add(self, labels, predictions, loss, finite):
        """This process's share of the next batch, of b examples. labels, predictions: [b]; loss: a
        scalar, their mean; finite: [b], whether the outputs behind the predictions are numbers."""
        first, end = self.done * self.batch_size, (self.done + 1) * self.batch_size
        mine = slice(first + self.rank, end, self.world_size)
        predictions = predictions.double().where(finite, math.nan).cpu()
        losses = loss.double().expand(len(labels))
        self.rows[:, mine] = torch.stack([labels.double(), predictions, losses])
        self.done += 1

    def gather(self, dtype):
        """(labels, predictions, mean loss) of all processes, the former two [examples] in this
        dtype. Raises FloatingPointError where an output was not finite."""
        labels, predictions, losses = all_reduce(self.rows)
        if predictions.isnan().any():
            raise FloatingPointError("the model's outputs are not finite")
        return labels.to(dtype), predictions.to(dtype), losses.mean().item()
