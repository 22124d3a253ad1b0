"""MT-A (section 2.2.2): who is sampled, what is trained, what a run leaves behind, and fusion over
it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook as after_step
from torch.optim.optimizer import register_optimizer_step_pre_hook as before_step

import data
from bert import Bert
from experiments import evaluate
from experiments.load_run import load_run
from experiments.multitask import multitask_batches
from runtime.adapters import encoder_of

TASKS, KINDS = ["sst2", "rte", "pick"], ["pal", "pfeiffer", "none"]
MULTITASK = "--tasks sst2 rte --lr 1e-3"


@pytest.fixture(scope="module")
def multitask(launch, tmp_path_factory):
    """Finished multi-task runs, by architecture."""
    out = tmp_path_factory.mktemp("multitask")
    common = "--epochs 2 --steps-per-epoch 20 --lr 2e-3"
    return {name: launch(common, tasks=TASKS, adapter=name, out=out / name) for name in KINDS}


def drawn(lengths, epoch, sampling, steps_per_epoch=50, epochs=5):
    """[(number of a task, its examples)] of an epoch's steps"""
    return multitask_batches(lengths, sampling, steps_per_epoch, 8, 3, epoch, epochs)


SAMPLING = [("annealed", 1, 1.0), ("annealed", 3, 0.6), ("annealed", 5, 0.2)]
SAMPLING += [("proportional", 4, 1.0), ("sqrt", 2, 0.5)]


@pytest.mark.parametrize("sampling, epoch, alpha", SAMPLING)
def test_the_sampler_matches_its_formula(sampling, epoch, alpha):
    """χ² of a long draw: with two degrees of freedom it is above 13.8 once in a thousand draws; the
    seed is fixed."""
    lengths, steps = [np.ones(n, dtype=int) for n in (10, 100, 2000)], 30_000
    numbers = [number for number, _ in drawn(lengths, epoch, sampling, steps)]
    counts = np.bincount(numbers, minlength=3)

    def chi_squared(alpha):
        weights = np.array([10.0, 100.0, 2000.0]) ** alpha
        expected = steps * weights / weights.sum()
        return ((counts - expected) ** 2 / expected).sum()

    assert chi_squared(alpha) < 13.8
    assert chi_squared(alpha - 0.1) > 13.8 and chi_squared(alpha + 0.1) > 13.8


def test_round_robin():
    epochs = [drawn([np.ones(9)] * 3, epoch, "round_robin", 4) for epoch in (1, 2)]
    assert [n for epoch in epochs for n, _ in epoch] == [0, 1, 2, 0, 1, 2, 0, 1]


@pytest.mark.parametrize("sampling", ["annealed", "round_robin"])
def test_every_task_goes_through_all_of_its_examples(sampling):
    """Before any of them comes a second time, also across epochs."""
    sizes, seen = (20, 33, 100), [[], [], []]
    lengths = [np.random.default_rng(n).integers(5, 40, n) for n in sizes]
    for epoch in range(1, 6):
        for number, indices in drawn(lengths, epoch, sampling):
            seen[number] += indices.tolist()
    for size, examples in zip(sizes, seen, strict=True):
        turns = [examples[start : start + size] for start in range(0, len(examples), size)]
        assert len(turns) > 1 and all(len({*turn}) == len(turn) for turn in turns)


@pytest.mark.parametrize("adapter", KINDS)
def test_a_run(adapter, multitask):
    result = multitask[adapter]
    out, accuracies = Path(result["out"]), result["accuracies"]
    assert result["task"] == "sst2,rte,pick" and [*accuracies] == TASKS
    assert result["accuracy"] == pytest.approx(sum(accuracies.values()) / 3)
    # AdapterHub's library takes "adapters" for its own, and fails
    assert "adapters" not in json.loads((out / "config.json").read_text())
    for task in TASKS:
        found = evaluate.main([str(out), "--task", task, "--device", "cpu"])
        assert found["accuracy"] == accuracies[task]
    with pytest.raises(ValueError, match="several tasks: choose --task from sst2, rte"):
        load_run(out)


@pytest.mark.parametrize("adapter", ["pal", "pfeiffer"])
def test_fusion_over_it(adapter, multitask, launch, tmp_path):
    """On Θ′, which its adapters belong to, and not on Θ."""
    out = Path(multitask[adapter]["out"])
    theta = {name: p.clone() for name, p in Bert.from_pretrained(out).named_parameters()}
    options = {"adapters": [out / "adapters" / task for task in TASKS], "out": tmp_path / "fusion"}
    fuse = "--stage fusion --task rte --epochs 1 --lr 1e-3"
    with pytest.raises(ValueError, match="was trained on an encoder with other weights than"):
        launch(fuse, **options)
    assert encoder_of(options["adapters"]) == str(out)  # without --model
    launch(fuse, model=out, **options)
    bert, _, config = load_run(tmp_path / "fusion")
    assert config["adapters"] == TASKS
    assert all(torch.equal(bert.get_parameter(name), p) for name, p in theta.items())


# --------------------------------------------------------------------------------------------------
# Bert-n-Pals' optimizer


def test_the_learning_rate(launch, tmp_path):
    """warmup_linear: x / warmup, and from there on 1 - x."""
    rates = []
    hook = before_step(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    launch(f"{MULTITASK} --epochs 2 --steps-per-epoch 10 --warmup 0.25", out=tmp_path / "run")
    hook.remove()
    assert np.allclose(rates, [1e-3 * (k / 5 if k < 5 else 1 - k / 20) for k in range(20)])


def test_momentum_goes_on_between_a_task_s_batches(launch, tmp_path):
    """Gradients are filled with zeros: what another task's batch leaves alone still moves, as Adam
    with a gradient of zero does. Transcribed: m <- 0.9 m, v <- 0.999 v, p <- p - lr m̂ /
    (√v̂ + ε)."""
    before, moved = {}, []

    def keep(optimizer, *_):
        for p, state in optimizer.state.items():
            if p.grad is not None and not p.grad.any():
                values = p, state["exp_avg"], state["exp_avg_sq"], state["step"]
                before[p] = [value.detach().clone() for value in values]

    def compare(optimizer, *_):
        lr = optimizer.param_groups[0]["lr"]
        for after, (p, m, v, t) in before.items():
            m_hat, v_hat = 0.9 * m / (1 - 0.9 ** (t + 1)), 0.999 * v / (1 - 0.999 ** (t + 1))
            assert torch.allclose(after, p - lr * m_hat / (v_hat.sqrt() + 1e-8), atol=1e-7)
            moved.append(not torch.allclose(after, p, atol=1e-9))
        before.clear()

    hooks = before_step(keep), after_step(compare)
    options = "--adapter pfeiffer --epochs 1 --steps-per-epoch 8 --sampling round_robin"
    launch(f"{MULTITASK} --weight-decay 0 {options}", out=tmp_path / "run")
    for hook in hooks:
        hook.remove()
    assert sum(moved) > 10


def test_each_task_has_its_own_length(launch, tmp_path, monkeypatch):
    lengths = {"sst2": 20, "rte": 31}
    for name, length in lengths.items():
        monkeypatch.setitem(data.TASKS, name, replace(data.TASKS[name], max_length=length))
    launch(f"{MULTITASK} --epochs 1 --steps-per-epoch 2", out=tmp_path / "run")
    for name, length in lengths.items():
        assert load_run(tmp_path / "run", task=name).config["max_length"] == length
