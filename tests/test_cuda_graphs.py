"""--cuda-graphs: a recorded step is the step. Without a GPU, a graph is a function."""

import contextlib
import itertools
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

import child
import train
from adapter import Adapter
from conftest import assert_equal, interrupt
from fast.recorded import Recorded, padded
from runtime.run import Run

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# with dropout, batches of 20 and 16 pairs of up to 27 tokens: several shapes, in turn
COMMON = f"--task rte --batch-size 20 --epochs 4 --device {DEVICE} --cuda-graphs"
Z = Adapter.z


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    """Where there is no GPU: for what records and replays."""
    if DEVICE == "cuda":
        return
    choose_device = train.choose_device
    monkeypatch.setattr(train, "choose_device", lambda *given: choose_device(*given[:2]))
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", torch.set_rng_state)
    monkeypatch.setattr(Recorded, "record", record)


def record(self, step, batch):
    """As of a graph: Python runs, nothing is computed."""
    random = torch.get_rng_state()
    before = [p.grad.clone() for p in self.parameters]
    loss = step(batch).clone()
    for p, grad in zip(self.parameters, before, strict=True):
        p.grad.copy_(grad)
    torch.set_rng_state(random)
    return SimpleNamespace(replay=lambda: loss.copy_(step(batch))), loss


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("stage", ["adapter", "fusion", "head", "full"])
def test_recorded_losses_are_the_eager_ones(stage, parts, command, tmp_path, monkeypatch):
    """So are all files, also of a run that was interrupted; no digit differs in 20 steps."""
    losses, after_step = [], Run.after_step

    def keep(run, loss):
        losses.append(loss.item())
        after_step(run, loss)

    def eager(model, task, args, batch, share):
        return train.gradients(model, task, args, padded(batch, model.bert), share)

    monkeypatch.setattr(Run, "after_step", keep)
    more = f"{COMMON} --grad-accumulation {parts}"
    interrupt(command(stage, tmp_path / "recorded", more), 7)
    train.main(command(stage, tmp_path / "recorded", f"{more} --resume"))
    monkeypatch.setattr(train, "Recorded", lambda *_: eager)
    train.main(command(stage, tmp_path / "eager", more))
    assert len(losses) == 40 and losses[:20] == losses[20:] and len({*losses}) == 20
    assert_equal(tmp_path / "recorded", tmp_path / "eager")


def test_what_a_step_does_not_use_has_no_gradient():
    """In each step, replayed or not. Tokens that are added are no real ones."""
    p, q = (torch.ones(1, device=DEVICE, requires_grad=True) for _ in range(2))

    def function(model, task, args, batch, share):
        loss = share * p.sum() * (batch["input_ids"] * batch["attention_mask"]).sum()
        loss.backward()
        return loss.detach()

    config, device = SimpleNamespace(pad_token_id=7), torch.device(DEVICE)
    model = SimpleNamespace(bert=SimpleNamespace(config=config, max_length=24, device=device))
    compute = Recorded(function, [p, q], "float32", 2)
    for length in (15, 15, 15, 17, 3, 24, 1, 30):
        ids = torch.ones(2, length, dtype=torch.long)
        batch = {"input_ids": ids, "token_type_ids": ids, "attention_mask": ids}
        assert compute(model, None, None, batch, 0.5).item() == length
        assert p.grad.item() == length and q.grad is None
        p.grad = None


@pytest.mark.parametrize("more", ["", "--batch-size 48"])  # five steps an epoch; two
def test_what_has_changed_since(more, command, tmp_path, monkeypatch):
    """A temperature that falls from step to step, as a number of Python's."""
    calls = itertools.count()
    monkeypatch.setattr(Adapter, "z", lambda adapter, h: Z(adapter, h) * 1.1 ** next(calls))
    with pytest.raises(ValueError, match="has changed since it was recorded.*without --cuda"):
        train.main(command("adapter", tmp_path / "run", f"{COMMON} {more} --epochs 8 --patience 8"))


def ask_for_a_number():
    Adapter.z = lambda adapter, h: Z(adapter, h) * h.mean().abs().item()


@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA")
def test_what_cannot_be_recorded(command, tmp_path):
    """In a process of its own, which cannot go on."""
    status, _, error = child.ends(command("adapter", tmp_path, COMMON), (ask_for_a_number,))
    assert status == 2 and "cannot be recorded" in error and "Traceback" not in error
