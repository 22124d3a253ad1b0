"""--cuda-graphs: steps that are recorded once and then replayed, so that the GPU does not wait for
Python (ms before and after: docs/benchmarks.md)."""

import math

import torch
import torch.nn.functional as F

AGAIN = "start it again with --overwrite and without --cuda-graphs"
MULTIPLE = 16  # lengths are rounded up to it, so that there are few shapes to record


class Recorded:
    """`gradients` of train.py, as a CUDA graph for each shape of a batch. The first batch of a
    shape is computed as ever, which warms up; the second is recorded; then the graph is replayed.

    A replay repeats what Python decided when the step was recorded. So one call in `every` is
    compared with the function: loss and norm of the gradients must be the same, to `rel_tol`.

    A graph adds to gradients at addresses that stay. So each parameter has one tensor for its
    gradient, which is 0 where a step begins; what a step does not use has None, as ever."""

    def __init__(self, function, parameters, dtype, steps_per_epoch):
        self.function, self.parameters = function, [*parameters]
        self.rel_tol = 1e-3 if dtype == "bfloat16" else 1e-5
        self.every = min(steps_per_epoch, 500)
        self.graphs = {}  # {shape: None, or (graph, the batch that it reads, its loss, used)}
        self.gradients = {}  # {parameter: its tensor}
        self.pool, self.stream = None, torch.cuda.Stream()
        self.calls, self.is_due = 0, True

    def __call__(self, model, task, args, batch, share):
        """As the function. A graph reads the batch, and this part's share of it, from tensors."""
        batch, device = padded(batch, model.bert), model.bert.device
        batch["share"] = torch.tensor(share)
        if device.type == "cuda":  # from pinned memory, a copy does not wait for the GPU
            batch = {n: x.pin_memory().to(device, non_blocking=True) for n, x in batch.items()}

        def step(batch):
            # a graph would go on using weights as autocast had cast them when it was recorded
            with torch.autocast(device.type, enabled=False, cache_enabled=False):
                return self.function(model, task, args, batch, batch["share"])

        self.is_due |= self.calls % self.every == 0
        self.calls += 1
        shape = tuple(tensor.shape for tensor in batch.values())
        if shape not in self.graphs:
            self.graphs[shape] = None
            return self.eager(step, batch)
        if is_new := self.graphs[shape] is None:
            static = {name: tensor.clone() for name, tensor in batch.items()}
            (graph, loss), used = self.into_gradients(self.record, step, static)
            self.graphs[shape] = graph, static, loss, used
        graph, static, loss, used = self.graphs[shape]
        for name, tensor in batch.items():
            static[name].copy_(tensor)
        if self.is_due and not is_new:  # a new graph would be compared with itself
            self.is_due = False
            self.compare(step, batch, lambda: self.replay(graph, loss, used))
        else:
            self.replay(graph, loss, used)
        return loss

    def start_at_zero(self, parameters):
        """Gives those that have no gradient their tensor."""
        for p in parameters:
            if p not in self.gradients:
                self.gradients[p] = torch.empty_like(p)
            if p.grad is None:
                p.grad = self.gradients[p].zero_()

    def into_gradients(self, compute, *given):
        """(what it returns, the parameters to whose gradients it adds)"""
        idle, used = {p for p in self.parameters if p.grad is None}, set()
        self.start_at_zero(idle)
        hooks = [p.register_post_accumulate_grad_hook(used.add) for p in self.parameters]
        result = compute(*given)
        for hook in hooks:
            hook.remove()
        for p in idle - used:
            p.grad = None
        return result, used

    def eager(self, step, batch):
        """The loss of the step itself, on the stream on which it is recorded."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            loss, _ = self.into_gradients(step, batch)
        torch.cuda.current_stream().wait_stream(self.stream)
        return loss

    def record(self, step, batch):
        """(graph, the loss that it writes). Nothing is computed."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                loss = step(batch)
        except Exception as e:  # PyTorch is then in a state from which one cannot go on
            if isinstance(reason := e.__context__ or e, torch.OutOfMemoryError):
                raise reason from None
            raise ValueError(f"a step cannot be recorded: {reason}; {AGAIN}") from e
        self.pool = self.pool or graph.pool()
        return graph, loss

    def replay(self, graph, loss, used):
        self.start_at_zero(used)
        graph.replay()
        return loss

    def compare(self, step, batch, replay):
        """Computes the step, and then replays it from the same random numbers and gradients."""
        random, found = torch.cuda.get_rng_state(), []
        before = {p: None if p.grad is None else p.grad.clone() for p in self.parameters}
        for compute in (lambda: self.eager(step, batch), replay):
            torch.cuda.set_rng_state(random)
            for p, grad in before.items():
                p.grad = None if grad is None else p.grad.copy_(grad)
            loss = compute().item()
            new = {p: p.grad for p in self.parameters if p.grad is not None}
            added = [g if before[p] is None else g - before[p] for p, g in new.items()]
            found += [(loss, torch.stack([grad.norm() for grad in added]).norm().item())]
        for now, then in zip(*found, strict=True):
            is_same = math.isclose(now, then, rel_tol=self.rel_tol, abs_tol=1e-6)
            if not is_same and math.isfinite(now):  # `Run` says what is not finite
                raise ValueError(f"what a step computes has changed since it was recorded; {AGAIN}")


def padded(batch, bert):
    """A batch whose length is a multiple, if the encoder takes as much; what is added is masked."""
    T = batch["input_ids"].shape[1]
    more = max(min(math.ceil(T / MULTIPLE) * MULTIPLE, bert.max_length) - T, 0)
    values = {"input_ids": bert.config.pad_token_id, "token_type_ids": 0, "attention_mask": 0}
    return {**batch, **{n: F.pad(batch[n], (0, more), value=v) for n, v in values.items()}}
