"""Every kind of checkpoint of the hub loads, bit for bit the same, and what does not fit is named.
Google's are in test_tensorflow.py."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from bert import Bert
from child import ROOT
from conftest import fill_hub_cache
from formats.encoder import by_hub_name, sha256_of
from formats.files import read_json, read_tensors, write_json
from formats.tokenizer import TOKENIZER_FILES
from reference import SAFETENSORS, fails, golden_tensors, same

# heads, pooler, and a buffer of older versions, outside the encoder and inside
OUTSIDE = "cls.predictions.bias classifier.weight lm_head.bias bert.norm.gamma".split()
INSIDE = "pooler.dense.weight norm.weight embeddings.position_ids".split()
KINDS = ["model.safetensors", "pytorch_model.bin", "pytorch_model.bin of before 2020"]


def write_hub(directory, named, kind="model.safetensors"):
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(SAFETENSORS / "config.json", directory)
    named = {name: tensor.clone() for name, tensor in named.items()}
    if kind.endswith("safetensors"):
        save_file(named, directory / kind)
    else:
        path = directory / "pytorch_model.bin"
        torch.save(named, path, _use_new_zipfile_serialization=kind.endswith(".bin"))
    return directory


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefix", ["", "roberta.", "0.auto_model."])
def test_prefixes_and_old_names(prefix, kind, tmp_path):
    named = golden_tensors() | dict.fromkeys(INSIDE, torch.arange(24)[None])
    more = dict.fromkeys(OUTSIDE, torch.zeros(3))
    for name, tensor in named.items():
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        more[prefix + name.replace("LayerNorm.bias", "LayerNorm.beta")] = tensor
    assert same(Bert.from_pretrained(write_hub(tmp_path, more, kind)))


def test_any_alignment(copy):
    """Files of before 2023 have a header of any length, and so tensors at odd addresses."""
    path = copy(SAFETENSORS) / "model.safetensors"
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = content[8:end] + b" "
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    (path.parent / "pytorch_model.bin").write_bytes(b"not read where there is the other")
    bert = Bert.from_pretrained(path.parent)
    assert same(bert) and bert(torch.tensor([[2, 7, 3]])).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_become_float32(dtype, tmp_path):
    written = {name: tensor.to(dtype) for name, tensor in golden_tensors().items()}
    bert = Bert.from_pretrained(write_hub(tmp_path, written))
    assert bert.sha256 == sha256_of({name: tensor.float() for name, tensor in written.items()})
    assert all(parameter.dtype == torch.float32 for parameter in bert.parameters())


WORDS = "embeddings.word_embeddings.weight"
MISFITS = [  # tensors that are added, a part of the names that are left out, words of the message
    ({WORDS: torch.zeros(61, 32)}, None, "[61, 32] in torch.float32, config.json says [60, 32]"),
    ({WORDS: torch.zeros(60, 32).long()}, None, f"{WORDS} is [60, 32] in torch.int64"),
    ({}, "1.output.dense", "lacks encoder.layer.1.output.dense.bias, encoder.layer.1.output"),
    ({"encoder.layer.2.x": torch.zeros(1)}, None, "unknown tensors encoder.layer.2.x"),
    ({"embeddings.LayerNorm.gamma": torch.zeros(32)}, None, "the same tensor, embeddings.Layer"),
]


def test_what_does_not_fit_is_named(tmp_path):
    for added, left_out, message in MISFITS:
        kept = {n: t for n, t in golden_tensors().items() if left_out is None or left_out not in n}
        fails(write_hub(tmp_path / "x", {**kept, **added}), "model.safetensors", message)


def test_a_size_that_no_file_says(tmp_path):
    types = {"embeddings.token_type_embeddings.weight": torch.zeros(16, 32)}
    path = write_hub(tmp_path, {**golden_tensors(), **types}) / "config.json"
    config = read_json(path)
    write_json(path, {name: config[name] for name in config if name != "type_vocab_size"})
    fails(tmp_path, "is [16, 32]", "config.json, which has no type_vocab_size, makes it [2, 32]")


EMBEDDING = "bert/embeddings/word_embeddings"
NAMES = [  # names in a file, those that are the encoder's
    (f"{EMBEDDING} {EMBEDDING}/BERTAdam {EMBEDDING}/lamb/m_1 bert/embeddings/x", [0, 3]),
    (f"a/{EMBEDDING} {EMBEDDING} bert.encoder.layer.0.x encoder.layer.0.y", [1, 2]),
    (f"old.{WORDS} bert.{WORDS} a.bert.{WORDS}", [1]),
    (f"old.{WORDS} old.encoder.x", [0, 1]),
    (
        f"context.{WORDS} question.{WORDS}",
        "several encoders, prefixes context., question., and none",
    ),
]


@pytest.mark.parametrize("names, expected", NAMES)
def test_which_tensors_are_the_encoder_s(names, expected):
    """An optimizer has its own beside each variable, and a file can hold several encoders."""
    tensors = {name: i for i, name in enumerate(names.split())}
    if isinstance(expected, list):
        assert [*by_hub_name(tensors, "bert").values()] == expected
    else:
        with pytest.raises(ValueError, match=expected):
            by_hub_name(tensors, "bert")


class Writes:
    """Unpickled, it makes a file."""

    def __reduce__(self):
        return open, ("executed", "w")


def test_what_is_pickled_is_not_executed(tmp_path, monkeypatch, recwarn):
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Writes()}, "file.bin", pickle_protocol=4)
    with pytest.raises(ValueError, match="file.bin: not a file of tensors alone, refused"):
        read_tensors("file.bin")
    assert not Path("executed").exists() and not recwarn.list  # the message is the only line
    torch.load("file.bin", weights_only=False)["a"].close()
    assert Path("executed").exists()  # as it would have


def test_only_needed_files_are_downloaded(hub):
    (root, asked), needed = hub, {"config.json", "model.safetensors", *TOKENIZER_FILES}
    fails("some/bert", "404 some/bert", "config.json and model.safetensors")
    asked.clear()
    shutil.copytree(SAFETENSORS, root / "some/bert")
    bert = Bert.from_pretrained("some/bert")
    assert same(bert) and bert.source == "some/bert" and {*asked} == needed
    write_hub(root / "some/other", golden_tensors(), "pytorch_model.bin")
    assert same(Bert.from_pretrained("some/other"))
    assert {*asked} == needed | {"pytorch_model.bin"}


def test_cache_without_network():  # offline, see conftest.py
    fill_hub_cache(Path(constants.HF_HUB_CACHE) / "models--some--cached", SAFETENSORS)
    assert same(Bert.from_pretrained("some/cached"))


def test_a_hub_that_does_not_answer(tmp_path):
    """An id that is not in the cache fails within five seconds, imports not counted."""
    code = """
import time, datasets, huggingface_hub
from formats.encoder import fetch_encoder
started = time.monotonic()
try:
    fetch_encoder("bert-base-uncasde")
except FileNotFoundError as e:
    print(e, "after", time.monotonic() - started)
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        variables = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        command, options = [sys.executable, "-c", code], {"cwd": ROOT, "timeout": 60}
        options |= {"env": os.environ | variables, "capture_output": True, "text": True}
        process = subprocess.run(command, **options)
    message = process.stdout.splitlines()[-1]
    assert process.stderr == ""
    assert all(text in message for text in ("bert-base-uncasde", address, str(tmp_path)))
    assert float(message.split()[-1]) < 5
