"""What keeps a GPU busy: copies that do not wait, and recorded steps."""

import math

import torch

AGAIN = "start it again with --overwrite and without --cuda-graphs"


def on_device(batch, device):
    """{name: tensor} there. A copy to a GPU does not wait for it: it starts from pinned memory."""
    is_cuda = device.type == "cuda"
    pinned = {n: x.pin_memory() if is_cuda and not x.is_cuda else x for n, x in batch.items()}
    return {name: tensor.to(device, non_blocking=is_cuda) for name, tensor in pinned.items()}


class Recorded:
    """A function of a batch, its last argument, that adds to the gradients of `parameters` and
    returns the loss; recorded as a CUDA graph for each shape of the batch and then replayed, so
    that the GPU does not wait for Python (ms before and after: docs/benchmarks.md).

    A replay repeats what Python decided when the step was recorded. So one call in `every` is
    compared with the function: loss and norm of the gradients must be the same, to a relative 1e-3
    where products are in bf16."""

    def __init__(self, function, parameters, dtype, every):
        self.function, self.parameters, self.every = function, [*parameters], every
        self.rel_tol = 1e-3 if dtype == "bfloat16" else 1e-5
        self.graphs, self.pool, self.stream = {}, None, torch.cuda.Stream()
        self.calls, self.is_due = 0, True
        for p in self.parameters:  # a gradient that is made in a graph would be that graph's own
            p.grad = torch.zeros_like(p)

    def __call__(self, *given):
        *others, batch = given
        self.is_due |= self.calls % self.every == 0
        self.calls += 1
        shape = tuple(tensor.shape for tensor in batch.values())
        if shape not in self.graphs:  # the first step of a shape is computed as ever: it warms up
            self.graphs[shape] = None
            return self.compute(*given)
        is_new = self.graphs[shape] is None
        if is_new:
            self.graphs[shape] = self.record(*others, {n: x.clone() for n, x in batch.items()})
        graph, static, loss = self.graphs[shape]
        for name, tensor in batch.items():
            static[name].copy_(tensor)
        if self.is_due and not is_new:  # a new graph would be compared with itself
            self.is_due = False
            self.compare(graph, loss, given)
        else:
            graph.replay()
        return loss

    def compute(self, *given):
        """The function itself, on the stream on which it is recorded."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            loss = self.function(*given)
        torch.cuda.current_stream().wait_stream(self.stream)
        return loss

    def record(self, *given):
        """(graph, the batch that it reads, the loss that it writes)"""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                loss = self.function(*given)
        except Exception as e:  # PyTorch is then in a state from which one cannot go on
            if isinstance(reason := e.__context__ or e, torch.OutOfMemoryError):
                raise reason from None
            raise ValueError(f"a step cannot be recorded: {reason}; {AGAIN}") from e
        self.pool = self.pool or graph.pool()
        return graph, given[-1], loss

    def compare(self, graph, loss, given):
        """Computes the step, and then replays it from the same random numbers and gradients."""
        random, before = torch.cuda.get_rng_state(), [p.grad.clone() for p in self.parameters]

        def loss_and_norm(loss):
            added = [p.grad - grad for p, grad in zip(self.parameters, before, strict=True)]
            return loss.item(), torch.stack([grad.norm() for grad in added]).norm().item()

        eager = loss_and_norm(self.compute(*given))
        torch.cuda.set_rng_state(random)
        for p, grad in zip(self.parameters, before, strict=True):
            p.grad.copy_(grad)
        graph.replay()
        for now, then in zip(eager, loss_and_norm(loss), strict=True):
            is_same = math.isclose(now, then, rel_tol=self.rel_tol, abs_tol=1e-6)
            if not is_same and math.isfinite(now):  # `Run` says what is not finite
                raise ValueError(f"what a step computes has changed since it was recorded; {AGAIN}")
