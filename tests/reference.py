"""What the reference library has written (tests/golden/README.md), and that library itself."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import examples.mpnet  # noqa: F401  (one of the encoders)
from adapter import load_adapter
from bert import Bert
from formats.files import read_json
from fusion import load_fusion

GOLDEN = Path(__file__).parent / "golden"
TOLERANCE = 1e-5  # of what float64 computes here, against fp32 outputs of the reference
FP32_TOLERANCE = 4e-5  # of what fp32 computes here, on any processor
ENCODERS = {"bert": 1e-5, "roberta": 1e-5, "mpnet": 1e-10}  # of fp32 and float64 outputs
FIELDS = ("input_ids", "token_type_ids", "attention_mask")
SAFETENSORS, TENSORFLOW = GOLDEN / "bert" / "encoder", GOLDEN / "bert" / "encoder-tf"
EXPECTED = Bert.from_pretrained(SAFETENSORS).state_dict()


def directories(file):
    """Every golden directory that holds such a file, as bert/pfeiffer."""
    return [str(path.parent.relative_to(GOLDEN)) for path in sorted(GOLDEN.glob(f"*/*/{file}"))]


ADAPTERS, HEADS = directories("adapter_config.json"), directories("head_config.json")
FUSIONS = directories("adapter_fusion_config.json")
assert (len(ADAPTERS), len(HEADS), len(FUSIONS)) == (15, 6, 3)


def encoder(name):
    return Bert.from_pretrained(GOLDEN / name / "encoder")


def golden_tensors():
    """The golden BERT's tensors, without prefix and pooler."""
    every = load_file(SAFETENSORS / "model.safetensors")
    return {n.removeprefix("bert."): tensor for n, tensor in every.items() if "pooler" not in n}


def same(bert):
    """The golden BERT's parameters, bit for bit."""
    return all(torch.equal(p, EXPECTED[name]) for name, p in bert.state_dict().items())


def same_tensors(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def fails(directory, *words):
    """Loading ends in one error of one line with these words in it."""
    with pytest.raises((ValueError, FileNotFoundError)) as e:
        Bert.from_pretrained(directory)
    message = str(e.value)
    assert "\n" not in message and all(word in message for word in words), message


def run(bert, inputs):
    with torch.no_grad():
        return bert(*(inputs[name] for name in FIELDS))


def with_fusion(directory):
    """An encoder with a golden fusion and the adapters that it names."""
    model, _ = directory.split("/")
    bert = encoder(model)
    for name in read_json(GOLDEN / directory / "adapter_fusion_config.json")["adapter_names"]:
        load_adapter(bert, GOLDEN / model / name)
    load_fusion(bert, GOLDEN / directory)
    return bert


def difference(a, b):
    assert a.shape == b.shape
    return (a - b).abs().max().item()


PEER = os.environ.get("PEER_PYTHON")
needs_peer = pytest.mark.skipif(not PEER, reason="PEER_PYTHON, with the reference library")
