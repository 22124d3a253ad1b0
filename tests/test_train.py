"""Both stages and the baselines: what is trained, what is written, that it learns, and the paper's
defaults."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

import train
from adapter import AdapterConfig, add_adapter, save_adapter
from bert import Bert
from conftest import cli, of_stage
from data import collate
from experiments import multitask
from experiments.load_run import load_run
from fusion import fusion_weights

TRAINED = {  # parts of the names of trained parameters
    "adapter": r"\.adapters\.sst2\.|^head\.",
    "fusion": r"\.fusion\.|^head\.",
    "head": r"^head\.",
    "full": r"",
    "multitask": r"",
}


@pytest.mark.parametrize("stage", train.STAGES)
def test_what_a_stage_trains(stage, launch, runs, tmp_path, monkeypatch):
    """All of it moves, and nothing else does, by a single bit."""
    models, before = [], {}
    module = multitask if stage == "multitask" else train
    build = module.build

    def remember(*values):
        models.append(build(*values))
        before.update({n: p.detach().clone() for n, p in models[0].named_parameters()})
        return models[0]

    monkeypatch.setattr(module, "build", remember)
    result = launch("--epochs 1 --lr 1e-2", *of_stage(stage, runs, 24), out=tmp_path / "run")
    trained = {name: p for name, p in models[0].named_parameters() if p.requires_grad}
    assert {*trained} == {name for name in before if re.search(TRAINED[stage], name)}
    assert result["trained_parameters"] == sum(p.numel() for p in trained.values())
    moved = {n for n, p in models[0].named_parameters() if not torch.equal(p, before[n])}
    # the last bias of a multiple-choice head is the same for all choices
    assert {*trained} - {"models.pick.head.layers.4.bias"} <= moved <= {*trained}


def test_run_directories(runs):
    common = {*"run.json metrics.json log.jsonl head_config.json model_head.safetensors".split()}
    adapter = {"adapter_config.json", "adapter.safetensors"}
    fusion = {"adapter_fusion_config.json", "model_adapter_fusion.safetensors", "adapters"}
    for name, own in (("rte", adapter), ("fusion-rte", fusion)):
        assert {path.name for path in (runs / name).iterdir()} == common | own
    metrics = json.loads((runs / "rte" / "metrics.json").read_text())
    promised = "stage task seed model best_epoch accuracy train_examples seconds out"
    assert {*promised.split()} <= {*metrics}


@pytest.fixture(scope="module")
def learned(launch, tmp_path_factory):
    """Adapters that were trained for as long as it takes to learn: {task: its run's metrics}"""
    out = tmp_path_factory.mktemp("learned")
    words = "--stage adapter --patience 25 --lr 1e-2 --batch-size 8 --reduction-factor 2"
    epochs = {"sst2": 25, "pick": 5}
    return {task: launch(words, task=task, epochs=n, out=out / task) for task, n in epochs.items()}


def test_stage_1_learns(learned):
    """Classification and multiple choice, far above chance on examples that it has not seen."""
    assert learned["sst2"]["accuracy"] > 0.75 and learned["pick"]["accuracy"] > 0.55


def test_stage_2_learns(learned, launch, encoder, tmp_path):
    """It finds the adapter that knows the target task beside two of random weights."""
    bert, start = Bert.from_pretrained(encoder), torch.Generator().manual_seed(0)
    for name in ("noise", "more_noise"):
        add_adapter(bert, name, AdapterConfig.pfeiffer(reduction_factor=2))
        for parameter, p in bert.named_parameters():
            if f".{name}." in parameter:
                p.data.normal_(std=0.1, generator=start)
        save_adapter(bert, name, tmp_path / name)
    adapters = [tmp_path / "noise", learned["sst2"]["out"], tmp_path / "more_noise"]
    words = "--stage fusion --task sst2 --batch-size 16 --patience 12"
    found = {}
    for name, text in (("before", "--epochs 1 --lr 1e-12"), ("after", "--epochs 12 --lr 1e-2")):
        result = launch(f"{words} {text}", adapters=adapters, seed=0, out=tmp_path / name)
        run = load_run(tmp_path / name)
        batch = collate(run.encode(["red cat", "one dog runs", "the green bird . blue"]), 0)
        run.model(batch)
        real = batch["attention_mask"].bool()
        shares = [s[real[:, : s.shape[1]]].mean(0) for s in fusion_weights(run.bert).values()]
        found[name] = result["accuracy"], torch.stack(shares).mean(0)[1].item()
    (accuracy, share), (better, larger) = found["before"], found["after"]
    assert better > 0.75 and better > accuracy + 0.1  # chance is 0.55
    assert abs(share - 1 / 3) < 0.05 and larger > 0.5


def test_limits_are_drawn_with_the_seed(encoder, data_dir):
    """The training examples; the development examples are the same for every seed."""

    def ids(seed, text=""):
        words = cli(f"--stage head --task rte --seed {seed} --limit-dev 7 {text}")
        args = train.parse([*words, *cli(model=encoder, data_dir=data_dir)])
        _, *splits = train.load_data(
            args, train.find_task(args, "rte"), Bert.from_pretrained(encoder)
        )
        return [[example.hash for example in split] for split in splits]

    (ten, dev), again, (others, same) = (ids(n, "--limit-train 10") for n in (3, 3, 4))
    assert again == [ten, dev] and (len(ten), len(dev)) == (10, 7)
    assert others != ten and same == dev
    assert ids(3)[0] == ids(4)[0] and len(ids(3)[0]) == 96


def test_bfloat16(launch, runs, tmp_path, monkeypatch):
    """Frozen weights are held in it, trained ones in fp32, and so are the files."""
    models, build = [], train.build
    monkeypatch.setattr(train, "build", lambda *x: models.append(build(*x)) or models[-1])
    words = "--stage fusion --task rte --epochs 1 --dtype bfloat16"
    launch(words, adapters=[runs / "rte", runs / "sst2"], out=tmp_path / "run")
    for name, p in models[0].named_parameters():
        assert p.dtype == (torch.float32 if p.requires_grad else torch.bfloat16), name
    saved = load_file(tmp_path / "run" / "model_adapter_fusion.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}


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
    "adapter": {"lr": 1e-4, "epochs": 30, "patience": 5, "batch_size": 32},
    "fusion": {"lr": 5e-5, "epochs": 10, "patience": 5},
    # Bert-n-Pals, run_multi_task.py: 300 steps for each task
    "multitask": {"lr": 2e-5, "epochs": 25, "patience": 25, "steps_per_epoch": 600},
}


@pytest.mark.parametrize("stage", DEFAULTS)
def test_the_defaults(stage, runs):
    words = [word for word in of_stage(stage, runs, 8) if word not in ("--steps-per-epoch", "8")]
    args = (multitask if stage == "multitask" else train).parse([str(word) for word in words])
    assert {name: getattr(args, name) for name in DEFAULTS[stage]} == DEFAULTS[stage]
