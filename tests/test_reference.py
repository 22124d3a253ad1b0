"""Θ, Φ and Ψ compute in float64 what the reference library has computed in fp32, and read and write
its files (tests/golden/README.md)."""

import pytest
import torch
from safetensors.torch import load_file

import reference
from adapter import (
    AdapterConfig,
    activate,
    add_adapter,
    load_adapter,
    load_head,
    save_adapter,
    save_head,
)
from bert import Bert
from formats.files import read_json, read_tensors
from fusion import fusion_regularization, fusion_weights, save_fusion
from reference import GOLDEN, TOLERANCE, difference, encoder, run, with_fusion


@pytest.mark.parametrize("name", reference.ENCODERS)
def test_encoder(name, expected):
    h = run(encoder(name).double(), expected[name])
    assert difference(h, expected[name]["encoder.last_hidden_state"]) <= reference.ENCODERS[name]


def same_tensors(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def assert_same_files(ours, theirs, stem, config):
    """One file of weights and one of JSON are the reference's, with the same names, tensors and
    fields. model_name is where the encoder came from, which the golden sets left empty."""
    assert {path.name for path in ours.iterdir()} == {f"{stem}.safetensors", config}
    old = theirs / f"pytorch_{stem}.bin"
    tensors = load_file(theirs / f"{stem}.safetensors") if not old.exists() else read_tensors(old)
    assert same_tensors(load_file(ours / f"{stem}.safetensors"), tensors)
    assert {**read_json(ours / config), "model_name": ""} == read_json(theirs / config)


@pytest.mark.parametrize("directory", reference.ADAPTERS)
def test_adapter_and_head(directory, expected, tmp_path):
    """Loaded is not yet active; the head of by_layer reads the encoder's pretrained pooler."""
    model, name = directory.split("/")
    bert, expected = encoder(model).double(), expected[model]
    assert load_adapter(bert, GOLDEN / directory) == name
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


def test_saved_encoder_reads_back_bit_identical(tmp_path):
    for name in reference.ENCODERS:
        bert = encoder(name)
        add_adapter(bert, "rte", AdapterConfig.pfeiffer())  # what is plugged in is no part of it
        bert.save_pretrained(tmp_path / name)
        golden = load_file(GOLDEN / name / "encoder" / "model.safetensors")
        golden = {key: tensor for key, tensor in golden.items() if ".pooler." not in key}
        assert same_tensors(load_file(tmp_path / name / "model.safetensors"), golden)
        assert Bert.from_pretrained(tmp_path / name).config == bert.config
