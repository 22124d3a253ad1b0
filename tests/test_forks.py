"""A fork: a module of one's own, named by --import, with an entry in each dictionary; and what must
not be lost in silence."""

import contextlib
import importlib
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

import train
from adapter import ADAPTERS, HEADS, AdapterConfig, Head, adapter_modules, add_adapter
from bert import ENCODERS, Bert
from conftest import cli, read_lines, tiny_encoder
from data import TASKS
from experiments import evaluate
from experiments.load_run import load_run
from formats.files import read_json
from fusion import FUSIONS, add_fusion

MODULE = """
import adapter, bert, data, fusion, train

class OwnBert(bert.Bert):
    def positions(self, input_ids):
        return super().positions(input_ids) + 3

class OwnFusion(fusion.Fusion):
    def softmax(self, scores):
        return super().softmax(scores / 32**0.5)

class OwnHead(adapter.Head):
    def forward(self, h, mask):
        return super().forward((h * mask[..., None]).sum(1, keepdim=True))

def adapter_and_biases(args, encoder, task):
    config = adapter.ADAPTERS[args.adapter](**args.adapter_config)
    adapter.add_adapter(encoder, task.name, config)
    for name, p in encoder.own_parameters().items():
        p.requires_grad_(name.endswith("bias"))

bert.ENCODERS["own"] = OwnBert
adapter.ADAPTERS["own"] = lambda **fields: adapter.AdapterConfig(**{"ln_before": True} | fields)
fusion.FUSIONS["own"] = OwnFusion
adapter.HEADS["own"] = OwnHead
train.STAGES["own"] = {"lr": 5e-3, "epochs": 2, "build": adapter_and_biases}
data.TASKS["sts_b"] = data.Task(
    None, ("sentence1", "sentence2"), ("score",),
    loss=lambda logits, labels: (logits[:, 0] - labels).square().mean(),
    predict=lambda logits: logits[:, 0],
    all_scores={"closeness": lambda labels, scores: -(labels - scores).abs().mean().item()},
)
"""
RUNS = {
    "encoder": "--stage full --task rte",
    "adapter": "--stage adapter --task rte --adapter own",
    "fusion": "--stage fusion --task rte --fusion own",
    "head": "--stage head --task rte --head own",
    "stage": "--stage own --task rte --reduction-factor 4",
    "task": "--stage adapter --task sts_b",
}


@contextlib.contextmanager
def forgotten_afterwards():
    with contextlib.ExitStack() as stack:
        for table in (ENCODERS, ADAPTERS, FUSIONS, HEADS, train.STAGES, TASKS):
            stack.enter_context(patch.dict(table))
        stack.callback(sys.modules.pop, "own_fork", None)
        yield


@pytest.mark.parametrize("kind", RUNS)
def test_an_entry_of_each_dictionary(kind, launch, runs, encoder, data_dir, tmp_path, monkeypatch):
    """Trained, evaluated with --import, and without it refused in a line that names the entry."""
    (tmp_path / "own_fork.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    out, words = tmp_path / "run", cli(f"{RUNS[kind]} --epochs 2 --lr 5e-3 --import own_fork")
    words += cli(adapters=[runs / "rte", runs / "sst2"]) if kind == "fusion" else []
    with forgotten_afterwards():
        if kind == "encoder":
            importlib.import_module("own_fork")
            (tmp_path / "encoder").mkdir()
            words += cli(model=tiny_encoder("own", tmp_path / "encoder"))
        if kind == "stage":  # train.py by itself is not the module in which STAGES is found
            words += cli("--device cpu", model=encoder, data_dir=data_dir, out=out)
            environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
            subprocess.run([sys.executable, train.__file__, *words], env=environment, check=True)
            result = read_json(out / "metrics.json")
        else:
            result = launch("", *words, out=out)
    with pytest.raises(ValueError, match="'(own|sts_b)'.*--import"):
        load_run(out)
    with forgotten_afterwards():
        again = evaluate.main(cli(f"{out} --device cpu --import own_fork"))
        assert again["loss"] == result["dev_loss"]
    if kind == "stage":  # it has trained a part of the encoder, to which its adapter belongs
        before, after = Bert.from_pretrained(encoder), Bert.from_pretrained(out)
        assert not torch.equal(before.layers[0].query.bias, after.layers[0].query.bias)
        assert torch.equal(before.layers[0].query.weight, after.layers[0].query.weight)
        with pytest.raises(ValueError, match="was trained on an encoder with other weights"):
            launch("--stage fusion --task rte", adapters=out, model=encoder, out=tmp_path / "two")


def fusion_and_adapters(args, bert, task):
    add_adapter(bert, "new", AdapterConfig(reduction_factor=8))
    add_fusion(bert, [*args.adapters, "new"])
    for name in bert.adapters:
        for module in adapter_modules(bert, name).values():
            module.requires_grad_(True)


def test_a_stage_with_two_learning_rates(launch, runs, tmp_path, monkeypatch):
    """Ψ, and every Φ at a tenth of its rate, is an edit of one line; what evaluation returns is
    logged."""
    two = """
    phi = [p for name, p in trainable.items() if ".adapters." in name]
    others = [p for name, p in trainable.items() if ".adapters." not in name]
    groups = [{"params": phi, "lr_factor": 0.1}, {"params": others, "lr_factor": 1.0}]"""
    source, edits = re.subn(r"\n    groups = .*", two, Path(train.__file__).read_text("utf-8"))
    assert edits == 1
    fork = vars(types.ModuleType("fork"))
    exec(source, fork)
    monkeypatch.setattr(train, "train", fork["train"])
    fork["evaluate"] = lambda *given: {**train.evaluate(*given), "classes": [1, 2]}
    for stages in (train.STAGES, fork["STAGES"]):
        monkeypatch.setitem(stages, "own", {"build": fusion_and_adapters})
    words, out = (
        "--stage own --task rte --limit-train 8 --batch-size 8 --epochs 1",
        tmp_path / "run",
    )
    result = launch(words, lr=1e-3, adapters=[runs / "rte", runs / "sst2"], out=out)
    assert read_lines(out / "log.jsonl")[0]["dev_classes"] == [1, 2]

    run, phi = load_run(out), "layers.0.output_add_norm.adapters.sst2.up.weight"
    assert train.evaluate(run.model, run.task, run.split(), run.args)["loss"] == result["dev_loss"]
    before = load_run(runs / "sst2").bert.get_parameter(phi)
    V = run.bert.layers[0].output_add_norm.fusion.value.weight
    for change, lr in ((run.bert.get_parameter(phi) - before, 1e-4), (V - torch.eye(32), 1e-3)):
        assert change.abs().max().item() == pytest.approx(lr, rel=0.05)  # Adam's first step


def a_prompt(args, bert, task):
    bert.prompt = nn.Parameter(torch.zeros(3))


def an_adapter_elsewhere(args, bert, task):
    bert.layers[0].adapters = nn.ModuleDict({"lost": nn.Linear(2, 2)})


def a_buffer(args, bert, task):
    bert.layers[0].output_add_norm.register_buffer("mean", torch.zeros(3))


class PoolerHead(Head):
    def __init__(self, config, bert_config):
        super().__init__({**config, "use_pooler": True}, bert_config)


LOST = [
    (a_prompt, "does not say what prompt is called in a checkpoint"),
    (an_adapter_elsewhere, "adapters.lost.weight would be trained, and no file"),
    (a_buffer, "output_add_norm.mean is a buffer"),
    (lambda *_: None, "head.pooler.weight would be trained, and no file"),
]


@pytest.mark.parametrize("build, message", LOST)
def test_what_would_be_lost_is_refused(build, message, launch, tmp_path, monkeypatch):
    """Before the first step, with nothing written."""
    monkeypatch.setitem(train.STAGES, "own", {"build": build, "lr": 1e-3, "epochs": 1})
    monkeypatch.setitem(HEADS, "pooler", PoolerHead)
    head = "pooler" if "pooler" in message else "cls"
    with pytest.raises(ValueError, match=message):
        launch(f"--stage own --task rte --head {head}", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
