"""MT-A (section 2.2.2): who is sampled, what is trained, what a run leaves behind, and fusion over
it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import train
from adapter import load_adapter
from bert import Bert
from conftest import command_line, dev_batches
from experiments import prune, publish
from experiments.load_run import load_run
from variants.multitask import task_probabilities

TASKS = ["sst2", "rte", "pick"]


@pytest.fixture(scope="module")
def multitask(launch, tmp_path_factory):
    """Finished multi-task runs, by architecture."""
    out = tmp_path_factory.mktemp("multitask")
    common = [
        "--stage",
        "multitask",
        "--tasks",
        *TASKS,
        "--epochs",
        2,
        "--steps-per-epoch",
        20,
        "--lr",
        "2e-3",
    ]
    return {
        name: launch(*common, "--adapter", name, "--out", out / name)
        for name in ("pal", "low_rank", "pfeiffer", "none")
    }


def options(**changes):
    return SimpleNamespace(
        **{
            "stage": "multitask",
            "sampling": "annealed",
            "steps_per_epoch": 50,
            "epochs": 5,
            "seed": 3,
            "batch_size": 8,
            **changes,
        }
    )


@pytest.mark.parametrize(
    "sampling, epoch, alpha",
    [
        ("annealed", 1, 1.0),
        ("annealed", 3, 0.6),
        ("annealed", 5, 0.2),
        ("proportional", 4, 1.0),
        ("sqrt", 2, 0.5),
    ],
)
def test_the_sampler_matches_its_formula(sampling, epoch, alpha):
    """χ² of a long draw: with two degrees of freedom it is above 13.8 once in a thousand draws; the
    seed is fixed."""
    lengths = [np.ones(n, dtype=int) for n in (10, 100, 2000)]
    steps = 30_000
    drawn = train.epoch_batches(options(sampling=sampling, steps_per_epoch=steps), lengths, epoch)
    weights = np.array([10.0, 100.0, 2000.0]) ** alpha
    expected = steps * weights / weights.sum()
    counts = np.bincount([number for number, _ in drawn], minlength=3)
    assert ((counts - expected) ** 2 / expected).sum() < 13.8
    for wrong in (alpha - 0.1, alpha + 0.1):  # and the test is able to fail
        other = np.array([10.0, 100.0, 2000.0]) ** wrong
        other = steps * other / other.sum()
        assert ((counts - other) ** 2 / other).sum() > 13.8


def test_one_epoch_anneals_from_the_start():
    assert task_probabilities([1, 3], "annealed", 1, 1).tolist() == [0.25, 0.75]


def test_round_robin():
    drawn = [
        number
        for epoch in (1, 2)
        for number, _ in train.epoch_batches(
            options(sampling="round_robin", steps_per_epoch=4), [np.ones(9)] * 3, epoch
        )
    ]
    assert drawn == [0, 1, 2, 0, 1, 2, 0, 1]


@pytest.mark.parametrize("sampling", ["annealed", "round_robin"])
def test_every_task_goes_through_all_of_its_examples(sampling):
    """Before any of them comes a second time, also across epochs."""
    sizes = (20, 33, 100)
    lengths = [np.random.default_rng(n).integers(5, 40, n) for n in sizes]
    seen = [[], [], []]
    for epoch in range(1, 6):
        for number, indices in train.epoch_batches(options(sampling=sampling), lengths, epoch):
            seen[number] += indices.tolist()
    for size, examples in zip(sizes, seen, strict=True):
        assert len(examples) > size
        for start in range(0, len(examples), size):
            turn = examples[start : start + size]
            assert len(set(turn)) == len(turn)
    assert (
        train.epoch_batches(options(), lengths, 3)[7][1].tolist()
        == train.epoch_batches(options(), lengths, 3)[7][1].tolist()
    )


@pytest.mark.parametrize("adapter", ["pal", "low_rank", "pfeiffer", "none"])
def test_a_run(adapter, multitask, encoder, data_dir):
    result = multitask[adapter]
    out = Path(result["out"])
    assert result["task"] == "sst2,rte,pick" and set(result["accuracies"]) == set(TASKS)
    assert result["accuracy"] == pytest.approx(sum(result["accuracies"].values()) / 3)
    before, after = (
        Bert.from_pretrained(encoder),
        Bert.from_pretrained(out),
    )  # Θ′, a checkpoint for --model
    # what no batch has touched (positions and words that do not occur) stays
    changed = [
        name
        for name, p in before.named_parameters()
        if not torch.equal(p, after.get_parameter(name))
    ]
    assert len(changed) > 0.9 * len(list(before.parameters()))
    config = json.loads((out / "config.json").read_text())
    assert "adapters" not in config  # AdapterHub's library takes it for its own, and fails
    assert (out / "vocab.txt").exists() and (out / "adapters").exists() == (adapter != "none")
    for task in TASKS:
        bert, head, config = load_run(out, task=task)
        assert config["task"] == task and not any(p.requires_grad for p in bert.parameters())
        with torch.inference_mode():
            some = dev_batches(encoder, data_dir, task)
            right = sum(
                (
                    train.predict(bert, head, batch, torch.float32).argmax(-1) == batch["labels"]
                ).sum()
                for batch in some
            )
        assert right.item() / 40 == pytest.approx(result["accuracies"][task])
    for task, why in (
        (None, "choose one with --task: sst2, rte"),
        ("mnli", "'mnli' is none of them"),
    ):
        with pytest.raises(ValueError, match=f"several tasks, {why}"):
            load_run(out, task=task)


def test_what_needs_another_stage_says_so(multitask, encoder, tmp_path, capsys):
    out = multitask["pfeiffer"]["out"]
    cases = {
        "only adapter and fusion runs can be published": (publish, [out, "--encoder", "me/bert"]),
        "only fusion runs can be pruned": (prune, [out, "--keep", "1"]),
    }
    for why, (command, words) in cases.items():
        with pytest.raises(SystemExit):
            command.main([*words, "--out", str(tmp_path / "out")])
        assert f"is of --stage multitask: {why}" in capsys.readouterr().err
    bert = Bert.from_pretrained(encoder)
    with pytest.raises(FileNotFoundError, match="a multi-task run's adapters are in .*/adapters"):
        load_adapter(bert, out)
    (tmp_path / "seeds.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="it holds a run for each seed, as .*/seed-0"):
        load_adapter(bert, tmp_path)


def test_its_encoder_is_the_one_it_ended_with(multitask, tmp_path):
    out = shutil.copytree(multitask["none"]["out"], tmp_path / "run")
    weights = load_file(out / "model.safetensors")
    weights["bert.embeddings.LayerNorm.bias"][0] += 1e-3
    save_file(weights, out / "model.safetensors")
    with pytest.raises(ValueError, match="was trained with another encoder than that in"):
        load_run(out, task="rte")


@pytest.mark.parametrize("adapter", ["pal", "pfeiffer"])
def test_fusion_over_it(adapter, multitask, launch, tmp_path, capsys):
    out = shutil.copytree(
        multitask[adapter]["out"], tmp_path / Path(multitask[adapter]["out"]).name
    )
    theta = {name: p.clone() for name, p in Bert.from_pretrained(out).named_parameters()}
    adapters = [out / "adapters" / task for task in TASKS]
    fuse = ["--stage", "fusion", "--task", "rte", "--adapters", *adapters, "--out", tmp_path / "x"]
    with pytest.raises(ValueError, match="was trained on an encoder with other weights than"):
        launch(*fuse)  # Θ, where these belong to Θ′
    launch(
        "--stage",
        "fusion",
        "--task",
        "rte",
        "--model",
        out,
        "--adapters",
        *adapters,
        "--epochs",
        1,
        "--lr",
        "1e-3",
        "--out",
        tmp_path / "fusion",
    )
    assert "was trained on" not in capsys.readouterr().out
    bert, _, config = load_run(tmp_path / "fusion")
    assert config["adapters"] == TASKS
    for name, p in theta.items():
        assert torch.equal(bert.get_parameter(name), p)
    for task in TASKS:
        ours, theirs = (
            load_file(run / "adapters" / task / "adapter.safetensors")
            for run in (tmp_path / "fusion", out)
        )
        assert ours.keys() == theirs.keys() and all(
            torch.equal(ours[name], theirs[name]) for name in ours
        )
    assert json.loads((tmp_path / "fusion" / "metrics.json").read_text())["accuracy"] > 0.4


def test_the_learning_rate(launch, tmp_path, monkeypatch):
    """Bert-n-Pals' warmup_linear: x / warmup, and from there on 1 - x."""
    rates, step = [], train.AdamW.step

    def spy(self, *values):
        rates.append([group["lr"] for group in self.param_groups])
        return step(self, *values)

    monkeypatch.setattr(train.AdamW, "step", spy)
    launch(
        "--stage",
        "multitask",
        "--tasks",
        "sst2",
        "rte",
        "--epochs",
        2,
        "--steps-per-epoch",
        10,
        "--lr",
        "1e-3",
        "--warmup",
        0.25,
        "--out",
        tmp_path / "run",
    )
    expected = [1e-3 * (k / 20 / 0.25 if k / 20 < 0.25 else 1 - k / 20) for k in range(20)]
    assert np.allclose(rates, np.array(expected)[:, None])


WRONG = {
    "task and tasks": (
        ["--stage", "multitask", "--task", "rte", "--tasks", "sst2"],
        "takes --tasks",
    ),
    "no tasks": (["--stage", "multitask"], "takes --tasks"),
    "twice": (["--stage", "multitask", "--tasks", "rte", "rte"], "each of them once"),
    "tasks of a single stage": (
        ["--stage", "full", "--task", "rte", "--tasks", "sst2"],
        "takes --task",
    ),
    "no task": (["--stage", "head"], "takes --task"),
    "nothing to train": (
        ["--stage", "adapter", "--task", "rte", "--adapter", "none"],
        "--adapter none",
    ),
    "warm-up without end": (
        ["--stage", "multitask", "--tasks", "rte", "--warmup", "1"],
        "--warmup",
    ),
    "no steps": (
        ["--stage", "multitask", "--tasks", "rte", "--steps-per-epoch", "0"],
        "--steps-per-epoch",
    ),
    "adapters": (
        ["--stage", "multitask", "--tasks", "rte", "--adapters", "x"],
        "--adapters belongs to",
    ),
}


@pytest.mark.parametrize("arguments, text", WRONG.values(), ids=WRONG)
def test_wrong_arguments(arguments, text, encoder, data_dir, tmp_path, capsys):
    with pytest.raises(SystemExit) as e:
        command_line(
            [
                *arguments,
                "--model",
                str(encoder),
                "--data-dir",
                str(data_dir),
                "--out",
                str(tmp_path / "out"),
            ]
        )
    lines = capsys.readouterr().err.splitlines()
    assert (
        e.value.code == 2
        and len(lines) == 1
        and text in lines[0]
        and not (tmp_path / "out").exists()
    )


def test_the_defaults_are_stickland_and_murray_s():
    """Bert-n-Pals, run_multi_task.py: 300 steps for each task, weight decay 0.01, warm-up 0.1."""
    args = train.arguments(["--stage", "multitask", "--tasks", *TASKS])
    assert (args.steps_per_epoch, args.weight_decay, args.warmup, args.lr, args.epochs) == (
        900,
        0.01,
        0.1,
        2e-5,
        25,
    )
    single = train.arguments(["--stage", "adapter", "--task", "rte"])
    assert (single.weight_decay, single.warmup) == (0.0, 0.0)


def test_momentum_goes_on_between_a_task_s_batches(launch, tmp_path, monkeypatch):
    """Bert-n-Pals fills gradients with zeros: what another task's batch leaves alone still moves,
    as Adam with a gradient of zero does. Transcribed: m <- 0.9 m, v <- 0.999 v, p <- p - lr m̂ /
    (√v̂ + ε)."""
    seen, step = [], train.AdamW.step

    def spy(self, *values):
        group = self.param_groups[0]
        before = {p: (p.detach().clone(), *moments(self, p)) for p in group["params"]}
        step(self, *values)
        for p in group["params"]:
            if p.grad is not None and not p.grad.any() and before[p][1] is not None:
                seen.append((*before[p], p.detach().clone(), group["lr"], group["weight_decay"]))

    def moments(optimizer, p):
        state = optimizer.state.get(p, {})
        if not state:
            return None, None, 0
        return state["exp_avg"].clone(), state["exp_avg_sq"].clone(), int(state["step"])

    monkeypatch.setattr(train.AdamW, "step", spy)
    launch(
        "--stage",
        "multitask",
        "--tasks",
        "sst2",
        "rte",
        "--adapter",
        "pfeiffer",
        "--epochs",
        1,
        "--steps-per-epoch",
        8,
        "--lr",
        "1e-3",
        "--sampling",
        "round_robin",
        "--out",
        tmp_path / "run",
    )
    moved = 0
    for p, m, v, t, after, lr, decay in seen:
        m, v, t = 0.9 * m, 0.999 * v, t + 1
        m_hat, v_hat = m / (1 - 0.9**t), v / (1 - 0.999**t)
        expected = p * (1 - lr * decay) - lr * m_hat / (v_hat.sqrt() + 1e-8)
        assert torch.allclose(after, expected, atol=1e-7)
        moved += not torch.allclose(after, p * (1 - lr * decay), atol=1e-9)
    assert moved > 10


def test_each_task_has_its_own_length(launch, encoder, data_dir, tmp_path, monkeypatch):
    seen, load = [], train.load_split

    def spy(task, split, tokenizer, *rest, **options):
        seen.append((task.name, tokenizer.truncation["max_length"]))
        return load(task, split, tokenizer, *rest, **options)

    lengths = {"sst2": 20, "rte": 31}
    get_task = train.get_task
    monkeypatch.setattr(
        train,
        "get_task",
        lambda name, *rest, **given: replace(
            get_task(name, *rest, **given), max_length=lengths[name]
        ),
    )
    monkeypatch.setattr(train, "load_split", spy)
    out = tmp_path / "run"
    options = [
        "--stage",
        "multitask",
        "--tasks",
        "sst2",
        "rte",
        "--epochs",
        1,
        "--steps-per-epoch",
        2,
    ]
    launch(*options, "--out", out)
    assert set(seen) == {("sst2", 20), ("rte", 31)}
    assert json.loads((out / "config.json").read_text())["max_length"] == lengths
    assert load_run(out, task="rte").config["max_length"] == 31
