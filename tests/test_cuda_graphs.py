"""--cuda-graphs: a recorded step is the step. Only where there is a GPU of NVIDIA's."""

import random

import pytest
import torch

import child
import train
from adapter import Adapter
from conftest import assert_equal
from runtime.run import Run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")

# batches of 20 and 16 pairs of up to 27 tokens: several shapes, in turn
COMMON = "--task rte --batch-size 20 --epochs 4 --device cuda --cuda-graphs --grad-accumulation"
Z = Adapter.z


@pytest.fixture
def words(command):
    """words(stage, out): of a run with dropout"""
    return lambda stage, out, more="1": command(stage, out, f"{COMMON} {more}")


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", ["adapter", "fusion", "head", "full"])
def test_recorded_losses_are_the_eager_ones(stage, dtype, parts, words, tmp_path, monkeypatch):
    """And so are all files, also of a run that was interrupted; no digit differs in 20 steps."""
    losses, after_step, more = [], Run.after_step, f"{parts} --dtype {dtype}"

    def keep(run, loss):
        losses.append(loss.item())
        if len(losses) == 27:  # in the second run
            child.stop()
        after_step(run, loss)

    monkeypatch.setattr(Run, "after_step", keep)
    train.main(words(stage, tmp_path / "recorded", more))
    with pytest.raises(KeyboardInterrupt):
        train.main(words(stage, tmp_path / "cut", more))
    train.main([*words(stage, tmp_path / "cut", more), "--resume"])
    monkeypatch.setattr(train, "Recorded", lambda function, *_: function)  # with the same lengths
    train.main(words(stage, tmp_path / "eager", more))
    assert len(losses) == 60 and losses[:20] == losses[20:40] == losses[40:]
    assert len({*losses}) == 20
    assert_equal(tmp_path / "cut", tmp_path / "recorded")
    assert_equal(tmp_path / "recorded", tmp_path / "eager")


class Falling:
    """A temperature that falls from step to step, as a number of Python's."""

    factor = 1.0

    def __call__(self, adapter, h):
        self.factor *= 0.9
        return Z(adapter, h) / self.factor


def at_random(adapter, h):
    return Z(adapter, h) * random.uniform(1, 100)


@pytest.mark.parametrize("more", ["1", "1 --batch-size 48"])  # five steps an epoch; two
@pytest.mark.parametrize("edit", [Falling(), at_random], ids=["falling", "random"])
def test_what_has_changed_since(edit, more, words, tmp_path, monkeypatch):
    monkeypatch.setattr(Adapter, "z", lambda adapter, h: edit(adapter, h))
    with pytest.raises(ValueError, match="has changed since it was recorded.*without --cuda"):
        train.main(words("adapter", tmp_path / "run", f"{more} --epochs 8 --patience 8"))


def ask_for_a_number():
    Adapter.z = lambda adapter, h: Z(adapter, h) * h.mean().abs().item()


def test_what_cannot_be_recorded(words, tmp_path):
    """In a process of its own, which cannot go on."""
    status, _, error = child.ends(words("adapter", tmp_path), (ask_for_a_number,))
    assert status == 2 and "cannot be recorded" in error and "Traceback" not in error
