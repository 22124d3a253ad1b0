"""Θ, Φ and Ψ have the outputs, files and losses of the reference library, see golden/README.md."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import adapter
import reference
import train
from adapter import activate, load_adapter, load_head, save_adapter, save_head
from bert import Bert
from formats.files import read_json, read_tensors
from fusion import fusion_regularization, fusion_weights, save_fusion
from reference import FIELDS, GOLDEN, TOLERANCE, difference, encoder, run, same_tensors, with_fusion


@pytest.mark.parametrize("name", reference.ENCODERS)
def test_encoder(name, expected, tmp_path):
    """It is written as it was read, bit for bit; an adapter is no part of it."""
    bert = encoder(name)
    adapter.add_adapter(bert, "rte", adapter.AdapterConfig())
    bert.save_pretrained(tmp_path)
    golden = load_file(GOLDEN / name / "encoder" / "model.safetensors")
    golden = {key: tensor for key, tensor in golden.items() if ".pooler." not in key}
    assert same_tensors(load_file(tmp_path / "model.safetensors"), golden)
    assert Bert.from_pretrained(tmp_path).config == bert.config
    activate(bert)
    h = run(bert.double(), expected[name])
    assert difference(h, expected[name]["encoder.last_hidden_state"]) <= reference.ENCODERS[name]


def assert_same_files(ours, theirs, stem, config):
    """All names, tensors and fields are the reference's, but for where the encoder came from."""
    assert {path.name for path in ours.iterdir()} == {f"{stem}.safetensors", config}
    old = theirs / f"pytorch_{stem}.bin"
    tensors = load_file(theirs / f"{stem}.safetensors") if not old.exists() else read_tensors(old)
    assert same_tensors(load_file(ours / f"{stem}.safetensors"), tensors)
    assert {**read_json(ours / config), "model_name": ""} == read_json(theirs / config)


@pytest.mark.parametrize("directory", reference.ADAPTERS)
def test_adapter_and_head(directory, expected, tmp_path):
    """Loaded is frozen, and not yet active; by_layer's head reads the encoder's own pooler."""
    model, name = directory.split("/")
    bert, expected = encoder(model).double(), expected[model]
    assert load_adapter(bert, GOLDEN / directory) == name
    assert not any(p.requires_grad for p in bert.parameters())
    plain = run(bert, expected)
    assert difference(plain, expected["encoder.last_hidden_state"]) <= TOLERANCE
    activate(bert, name)
    h = run(bert, expected)
    assert difference(h, expected[f"{name}.last_hidden_state"]) <= TOLERANCE
    assert difference(h, plain) > 0.5  # not a small correction that a tolerance could hide
    save_adapter(bert, name, tmp_path / "adapter")
    assert_same_files(tmp_path / "adapter", GOLDEN / directory, "adapter", "adapter_config.json")
    if directory in reference.HEADS:
        head = load_head(bert, GOLDEN / directory)
        # the precisions of encoder and head are their own
        for logits in (head(h, expected["attention_mask"]), head.double()(h)):
            assert difference(logits, expected[f"{name}.logits"]) <= TOLERANCE
        name = read_json(GOLDEN / directory / "head_config.json")["name"]
        save_head(head, bert, name, tmp_path / "head")
        assert_same_files(tmp_path / "head", GOLDEN / directory, "model_head", "head_config.json")


@pytest.mark.parametrize("directory", reference.FUSIONS)
def test_fusion(directory, expected, tmp_path):
    model, name = directory.split("/")
    bert, expected = with_fusion(directory).double(), expected[model]
    assert not any(p.requires_grad for p in bert.parameters())
    assert difference(run(bert, expected), expected[f"{name}.last_hidden_state"]) <= TOLERANCE
    weights = fusion_weights(bert)
    assert len(weights) == sum(key.startswith(f"{name}.attention.") for key in expected)
    for (layer, location), s in weights.items():
        location = {"attention": "mh_adapter", "output": "output_adapter"}[location]
        assert difference(s, expected[f"{name}.attention.{layer}.{location}"]) <= TOLERANCE
    assert difference(fusion_regularization(bert), expected[f"{name}.regularization"]) <= TOLERANCE
    save_fusion(bert, tmp_path)
    stem, config = "model_adapter_fusion", "adapter_fusion_config.json"
    assert_same_files(tmp_path, GOLDEN / directory, stem, config)


# Training: the same weights and batches, without dropout, in float64

RUNS = {
    "pfeiffer": "--stage adapter --task rte --adapter pfeiffer",
    "choices": "--stage adapter --task pick",
    "fusion": "--stage fusion --task rte --adapters",
}
WORDS = "--epochs 10 --patience 10 --batch-size 24 --lr 1e-3"
LOSSES = json.loads((GOLDEN / "trajectory.json").read_text())  # {name: the reference's 40}


@pytest.mark.parametrize("name", RUNS)
def test_the_reference_s_losses(name, launch, runs, quiet_encoder, tmp_path, monkeypatch, request):
    """Of 40 steps in float64."""
    tensors = load_file(GOLDEN / "trajectory.safetensors")
    tensors = {n.removeprefix(f"{name}/"): t for n, t in tensors.items() if n.startswith(name)}
    losses, steps, get_task = [], iter(range(40)), train.get_task

    def start(model, *_):
        with torch.no_grad():
            for parameter, p in model.named_parameters():
                p.data = tensors[parameter].double()

    def next_batch(*_):
        step = next(steps)
        T = tensors["attention_mask"][step].sum(1).max()
        batch = {field: tensors[field][step, :, :T].long() for field in FIELDS}
        return batch | {"labels": tensors["labels"][step].long()}

    def keep_loss(logits, labels):
        losses.append(F.cross_entropy(logits, labels))
        return losses[-1]

    torch.set_default_dtype(torch.float64)
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    on_cpu = (torch.device("cpu"), torch.float64)
    monkeypatch.setattr(train, "choose_device", lambda *_: on_cpu)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(train, "evaluate", lambda *_: {"accuracy": 0.5, "loss": 0.5})
    monkeypatch.setattr(train, "hold_frozen_in", start)
    monkeypatch.setattr(train, "collate", next_batch)
    monkeypatch.setattr(train, "get_task", lambda *x: replace(get_task(*x), loss=keep_loss))
    words = f"{WORDS} {RUNS[name]}".split()
    for task in ("rte", "sst2", "pick") if name == "fusion" else ():
        # without run.json, since the digest of the encoder's weights is another one in float64
        words.append(shutil.copytree(runs / task, tmp_path / task))
        (tmp_path / task / "run.json").unlink()
    launch("", *words, model=quiet_encoder, out=tmp_path / "run")
    assert torch.stack(losses).tolist() == pytest.approx(LOSSES[name], rel=0, abs=1e-12)
