"""Both stages and the baselines: what is trained, what is left alone, what is written, and that it
reads back exactly."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import train
from adapter import AdapterConfig, activate, add_adapter, load_adapter
from bert import Bert
from conftest import of_stage
from experiments import multitask
from experiments.load_run import as_trained, load_run
from fusion import add_fusion
from runtime.settings import parse


@pytest.fixture
def berts(monkeypatch):
    """Every encoder that is loaded from now on."""
    result, load = [], Bert.from_pretrained

    def keep(source):
        result.append(load(source))
        return result[-1]

    monkeypatch.setattr(Bert, "from_pretrained", keep)
    return result


@pytest.mark.parametrize("stage", ["adapter", "fusion", "head", "full"])
def test_a_stage_trains_exactly_what_it_should(stage, launch, runs, berts, tmp_path, monkeypatch):
    """Every new tensor moves, and nothing else by a single bit: neither Θ nor another Φ."""
    before, groups, make_optimizer = {}, [], train.make_optimizer

    def look(*values):
        before.update((name, p.detach().clone()) for name, p in berts[-1].named_parameters())
        optimizer = make_optimizer(*values)
        groups.extend(optimizer.param_groups)
        return optimizer

    monkeypatch.setattr(train, "make_optimizer", look)
    words = of_stage(stage, runs, 8)
    result = launch("--epochs 1 --lr 1e-2 --weight-decay 0.1", *words, out=tmp_path / "run")
    after = dict(berts[-1].named_parameters())
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    part = {"adapter": "adapters.sst2.", "fusion": ".fusion.", "head": "no name", "full": ""}[stage]
    new = {name for name in before if part in name}
    if stage == "full":  # words and positions that do not occur stay
        assert len(changed) > 0.9 * len(before)
    else:
        assert changed == new
    head = 32 * 32 + 32 + 32 * 2 + 2
    assert result["trained_parameters"] == sum(before[name].numel() for name in new) + head
    # weight decay spares biases, LayerNorms and V
    decayed, spared = ([tuple(p.shape) for p in group["params"]] for group in groups)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all(len(shape) == 2 for shape in decayed)
    if stage == "fusion":
        assert sorted(decayed) == [(2, 32)] + [(32, 32)] * 5  # head, and two layers of Q and K
        assert sorted(spared) == [(2,)] + [(32,)] * 5 + [(32, 32)] * 2  # all biases, and V


def test_the_penalty_is_part_of_every_step(launch, runs, tmp_path, monkeypatch):
    """Once in each of three, however many parts a batch has."""
    penalty = torch.zeros((), requires_grad=True)
    monkeypatch.setattr(train, "fusion_regularization", lambda _: penalty)
    launch("--epochs 1 --grad-accumulation 2", *of_stage("fusion", runs, 8), out=tmp_path / "run")
    assert penalty.grad == 3


def test_requires_grad_is_the_contract(encoder, runs):
    """What is added is trained; what is loaded or activated is frozen."""
    bert = Bert.from_pretrained(encoder)
    for act, part in (
        (lambda: load_adapter(bert, runs / "rte"), "no name"),
        (lambda: add_adapter(bert, "new", AdapterConfig.houlsby(reduction_factor=4)), ".new."),
        (lambda: activate(bert, "rte"), "no name"),
        (lambda: load_adapter(bert, runs / "sst2"), "no name"),
        (lambda: add_fusion(bert, ["rte", "sst2"]), ".fusion."),
    ):
        act()
        assert all(p.requires_grad == (part in name) for name, p in bert.named_parameters())


def test_run_directories(runs):
    common = {*"config.json metrics.json log.jsonl head_config.json model_head.safetensors".split()}
    adapter = {"adapter_config.json", "adapter.safetensors"}
    fusion = {"adapter_fusion_config.json", "model_adapter_fusion.safetensors", "adapters"}
    assert {path.name for path in (runs / "rte").iterdir()} == common | adapter
    assert {path.name for path in (runs / "fusion-rte").iterdir()} == common | fusion
    for name in ("rte", "sst2", "pick"):
        copy = runs / "fusion-rte" / "adapters" / name / "adapter.safetensors"
        assert copy.read_bytes() == (runs / name / "adapter.safetensors").read_bytes()
    metrics = json.loads((runs / "rte" / "metrics.json").read_text())
    promised = "stage task seed model best_epoch accuracy train_examples seconds out"
    assert {*promised.split()} <= {*metrics}


def test_it_learns(launch, tmp_path):
    """Classification and multiple choice, far above chance on examples that it has not seen."""
    words = "--stage adapter --patience 25 --lr 1e-2 --batch-size 8 --reduction-factor 2"
    for task, epochs, chance in (("sst2", 25, 0.55), ("pick", 5, 0.35)):
        result = launch(words, task=task, epochs=epochs, out=tmp_path / task)
        assert result["accuracy"] > chance + 0.2


def test_limits_are_drawn_with_the_seed(launch, tmp_path):
    """The training examples; the development examples are the same for every seed."""

    def run(name, limits, seed):
        words = f"--stage adapter --task rte --epochs 1 --limit-dev 7 {limits}"
        result = launch(words, seed=seed, out=tmp_path / name)
        digest = json.loads((tmp_path / name / "config.json").read_text())["data_sha256"]
        weights = (tmp_path / name / "adapter.safetensors").read_bytes()
        return digest, result["train_examples"], result["dev_examples"], weights

    first, other = (run(f"ten {seed}", "--limit-train 10", seed) for seed in (3, 4))
    assert first[1:3] == (10, 7) and run("again", "--limit-train 10", 3) == first
    assert first[0] != other[0] and first[3] != other[3]
    assert run("all 3", "", 3)[:3] == run("all 4", "", 4)[:3]  # 96 and 7


def test_bfloat16_holds_frozen_weights_in_bf16_and_trained_ones_in_fp32(
    launch, runs, berts, tmp_path
):
    words = "--stage fusion --task rte --epochs 1 --dtype bfloat16"
    launch(words, adapters=[runs / "rte", runs / "sst2"], out=tmp_path / "run")
    for name, p in berts[-1].named_parameters():
        assert p.dtype == (torch.float32 if ".fusion." in name else torch.bfloat16), name
    saved = load_file(tmp_path / "run" / "model_adapter_fusion.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    logits = []
    for dtype in ("bfloat16", "float32"):
        model = load_run(tmp_path / "run")
        batch = model.batch(model.encode([("red cat", "red"), ("one", "the dog runs")]))
        with torch.inference_mode():
            logits.append(as_trained(model, "cpu", dtype)(batch))
    assert logits[0].dtype == torch.float32 and torch.allclose(*logits, atol=0.1)


def test_full_run_is_a_checkpoint(launch, encoder, tmp_path):
    """Sequential fine-tuning: the directory of a fully fine-tuned run is a --model."""
    one, two, words = tmp_path / "one", tmp_path / "two", "--stage full --epochs 1 --lr 1e-3"
    launch(words, task="rte", out=one)
    before, after = (Bert.from_pretrained(source).word_embeddings for source in (encoder, one))
    assert not torch.equal(before.weight, after.weight)
    assert launch(words, task="sst2", model=one, out=two)["model"] == str(one)
    shutil.rmtree(one)
    load_run(two)


DEFAULTS = {
    # section 4.1, appendix A.2
    "adapter": {"lr": 1e-4, "epochs": 30, "patience": 5, "reduction_factor": 16, "batch_size": 32},
    "fusion": {"lr": 5e-5, "epochs": 10, "patience": 5, "weight_decay": 0, "warmup": 0},
    # Bert-n-Pals, run_multi_task.py: 300 steps for each task
    "multitask": {"lr": 2e-5, "epochs": 25, "steps_per_epoch": 600, "warmup": 0.1},
}


@pytest.mark.parametrize("stage", DEFAULTS)
def test_the_defaults(stage, runs):
    words = [word for word in of_stage(stage, runs, 8) if word not in ("--steps-per-epoch", "8")]
    options = multitask.Settings if stage == "multitask" else train.Settings
    settings = parse(options, words, "", "").with_defaults()
    expected = DEFAULTS[stage]
    assert {name: getattr(settings, name) for name in expected} == expected
