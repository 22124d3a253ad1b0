"""MT-A (section 2.2.2): who is sampled, what a run leaves behind, and fusion over it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train
from bert import Bert
from conftest import cli
from data import Example
from experiments import multitask
from experiments.load_run import load_run

TASKS = ["sst2", "rte", "pick"]


def drawn(lengths, epoch, steps_per_epoch):
    """[(number of a task, its examples)] of an epoch's steps; lengths: of each task's texts"""
    args = SimpleNamespace(steps_per_epoch=steps_per_epoch, batch_size=8, seed=3, epochs=5)
    sets = [[Example([np.zeros(n)], [np.zeros(n)], 0, 0, False) for n in task] for task in lengths]
    return multitask.multitask_batches(args, dict(enumerate(sets)), epoch)


@pytest.mark.parametrize("epoch, alpha", [(1, 1.0), (3, 0.6), (5, 0.2)])
def test_the_sampler_matches_its_formula(epoch, alpha):
    """An exponent that is wrong by 0.1 would show."""
    sizes, steps = np.array([10, 100, 2000]), 30_000
    numbers = [number for number, _ in drawn([[1] * n for n in sizes], epoch, steps)]
    shares = np.bincount(numbers, minlength=3) / steps
    assert np.allclose(shares, sizes**alpha / (sizes**alpha).sum(), atol=0.008)


def test_every_task_goes_through_all_of_its_examples():
    """Before any of them comes a second time, also across epochs."""
    sizes, seen = (20, 33, 100), [[], [], []]
    lengths = [np.random.default_rng(n).integers(5, 40, n) for n in sizes]
    for epoch in range(1, 6):
        for number, indices in drawn(lengths, epoch, 50):
            seen[number] += indices.tolist()
    for size, examples in zip(sizes, seen, strict=True):
        turns = [examples[start : start + size] for start in range(0, len(examples), size)]
        assert len(turns) > 1 and all(len({*turn}) == len(turn) for turn in turns)


def test_a_run_and_fusion_over_it(launch, tmp_path):
    """On Θ′, which its adapters belong to, and not on Θ."""
    out = tmp_path / "run"
    result = launch("--epochs 1 --steps-per-epoch 9 --lr 2e-3", tasks=TASKS, out=out)
    accuracies = result["accuracies"]
    assert result["task"] == "sst2,rte,pick" and [*accuracies] == TASKS
    assert result["accuracy"] == pytest.approx(sum(accuracies.values()) / 3)
    with pytest.raises(ValueError, match="on sst2, rte, pick: choose --task from"):
        load_run(out)
    adapters, fuse = [out / "adapters" / task for task in TASKS], "--stage fusion --task rte"
    assert train.parse(cli(fuse, adapters=adapters)).model == str(out)  # which their runs recorded
    launch(f"{fuse} --epochs 1", adapters=adapters, out=tmp_path / "fusion", model=out)
    run, theta = load_run(tmp_path / "fusion"), Bert.from_pretrained(out)
    assert all(torch.equal(run.bert.get_parameter(n), p) for n, p in theta.named_parameters())


def test_bert_n_pals_optimizer(launch, tmp_path, monkeypatch):
    """warmup_linear: x / warmup, then 1 - x. What another task's batch leaves alone still moves."""
    rates, moved = [], []

    class Watched(torch.optim.AdamW):
        def step(self):
            rates.append(self.param_groups[0]["lr"])
            idle = [p for p in self.state if p.grad is not None and not p.grad.any()]
            before = [p.detach().clone() for p in idle]
            super().step()
            moved.extend(not is_same for is_same in map(torch.equal, idle, before))

    monkeypatch.setattr(torch.optim, "AdamW", Watched)
    monkeypatch.setattr(multitask, "WARMUP", 0.25)
    words = "--tasks sst2 rte --lr 1e-3 --adapter pfeiffer"
    launch(f"{words} --epochs 2 --steps-per-epoch 4", out=tmp_path / "run")
    assert np.allclose(rates, [1e-3 * (k / 2 if k < 2 else 1 - k / 8) for k in range(8)])
    assert sum(moved) > 10
