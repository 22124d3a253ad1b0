"""MT-A (section 2.2.2): who is sampled, what is trained, what a run leaves behind, and fusion over
it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook as after_step
from torch.optim.optimizer import register_optimizer_step_pre_hook as before_step

from bert import Bert
from data import Example
from experiments import multitask
from experiments.load_run import load_run
from experiments.multitask import multitask_batches
from runtime.adapters import encoder_of

TASKS = ["sst2", "rte", "pick"]


def drawn(train_sets, epoch, steps_per_epoch=50):
    """[(number of a task, its examples)] of an epoch's steps"""
    args = SimpleNamespace(steps_per_epoch=steps_per_epoch, batch_size=8, seed=3, epochs=5)
    return multitask_batches(args, dict(enumerate(train_sets)), epoch)


def with_lengths(lengths):
    """Examples with so many tokens"""
    return [Example([np.zeros(n)], [np.zeros(n)], 0, 0, False) for n in lengths]


@pytest.mark.parametrize("epoch, alpha", [(1, 1.0), (3, 0.6), (5, 0.2)])
def test_the_sampler_matches_its_formula(epoch, alpha):
    """Shares of a long draw: an exponent that is wrong by 0.1 would show."""
    train_sets, steps = [with_lengths([1] * n) for n in (10, 100, 2000)], 30_000
    numbers = [number for number, _ in drawn(train_sets, epoch, steps)]
    weights = np.array([10.0, 100.0, 2000.0]) ** alpha
    shares = np.bincount(numbers, minlength=3) / steps
    assert np.allclose(shares, weights / weights.sum(), atol=0.008)


def test_every_task_goes_through_all_of_its_examples():
    """Before any of them comes a second time, also across epochs."""
    sizes, seen = (20, 33, 100), [[], [], []]
    train_sets = [with_lengths(np.random.default_rng(n).integers(5, 40, n)) for n in sizes]
    for epoch in range(1, 6):
        for number, indices in drawn(train_sets, epoch):
            seen[number] += indices.tolist()
    for size, examples in zip(sizes, seen, strict=True):
        turns = [examples[start : start + size] for start in range(0, len(examples), size)]
        assert len(turns) > 1 and all(len({*turn}) == len(turn) for turn in turns)


@pytest.mark.parametrize("adapter", ["--adapter pal", "--adapter pfeiffer", "--without-adapters"])
def test_a_run_and_fusion_over_it(adapter, launch, tmp_path):
    """On Θ′, which its adapters belong to, and not on Θ."""
    out, words = tmp_path / "run", f"--epochs 1 --steps-per-epoch 9 --lr 2e-3 {adapter}"
    result = launch(words, tasks=TASKS, out=out)
    accuracies = result["accuracies"]
    assert result["task"] == "sst2,rte,pick" and [*accuracies] == TASKS
    assert result["accuracy"] == pytest.approx(sum(accuracies.values()) / 3)
    with pytest.raises(ValueError, match="several tasks: choose --task from sst2, rte"):
        load_run(out)
    if "without" in adapter:
        assert not (out / "adapters").exists()
        return
    theta = {name: p.clone() for name, p in Bert.from_pretrained(out).named_parameters()}
    options = {"adapters": [out / "adapters" / task for task in TASKS], "out": tmp_path / "fusion"}
    fuse = "--stage fusion --task rte --epochs 1 --lr 1e-3"
    with pytest.raises(ValueError, match="was trained on an encoder with other weights than"):
        launch(fuse, **options)
    assert encoder_of(map(str, options["adapters"])) == str(out)  # without --model
    launch(fuse, model=out, **options)
    run = load_run(tmp_path / "fusion")
    bert = run.bert
    assert run.adapters == TASKS
    assert all(torch.equal(bert.get_parameter(name), p) for name, p in theta.items())


def test_bert_n_pals_optimizer(launch, tmp_path, monkeypatch):
    """warmup_linear: x / warmup, and from there on 1 - x. Gradients are filled with zeros: what
    another task's batch leaves alone still moves."""
    rates, before, moved = [], {}, []

    def keep(optimizer, *_):
        rates.append(optimizer.param_groups[0]["lr"])
        left = (p for p in optimizer.state if p.grad is not None and not p.grad.any())
        before.update((p, p.detach().clone()) for p in left)

    def compare(*_):
        moved.extend(not torch.equal(p, value) for p, value in before.items())
        before.clear()

    monkeypatch.setattr(multitask, "WARMUP", 0.25)
    hooks = before_step(keep), after_step(compare)
    words = "--tasks sst2 rte --lr 1e-3 --adapter pfeiffer"
    launch(f"{words} --epochs 2 --steps-per-epoch 4", out=tmp_path / "run")
    for hook in hooks:
        hook.remove()
    assert np.allclose(rates, [1e-3 * (k / 2 if k < 2 else 1 - k / 8) for k in range(8)])
    assert sum(moved) > 10
