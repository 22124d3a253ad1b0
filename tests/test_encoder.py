"""Encoders of the hub, and Google's without TensorFlow, load bit for bit; damage is named."""

import shutil
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from torch import nn

import bert as bert_file
import formats.hub
from bert import Bert, BertConfig
from conftest import GOLDEN, same_tensors
from formats.encoder import by_hub_name, sha256_of
from formats.files import read_json, read_tensors, write_json
from formats.tokenizer import TOKENIZER_FILES

SAFETENSORS, TENSORFLOW = GOLDEN / "bert" / "encoder", GOLDEN / "bert" / "encoder-tf"
EXPECTED = Bert.from_pretrained(SAFETENSORS).state_dict()
# heads, pooler, and a buffer of older versions, outside the encoder and inside
OUTSIDE = "cls.predictions.bias classifier.weight lm_head.bias bert.norm.gamma".split()
INSIDE = "pooler.dense.weight norm.weight embeddings.position_ids".split()
# the golden BERT's tensors by the names of the hub, without prefix and pooler
NAMED = load_file(SAFETENSORS / "model.safetensors")
NAMED = {n.removeprefix("bert."): tensor for n, tensor in NAMED.items() if "pooler" not in n}


def same(bert):
    return same_tensors(bert.state_dict(), EXPECTED)


def fails(directory, *words):
    """Loading ends in one error of one line with these words in it."""
    with pytest.raises((ValueError, FileNotFoundError)) as e:
        Bert.from_pretrained(directory)
    message = str(e.value)
    assert "\n" not in message and all(word in message for word in words), message


def write_hub(directory, named, file="model.safetensors", is_zip=True):
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(SAFETENSORS / "config.json", directory)
    named = {name: tensor.clone() for name, tensor in named.items()}
    if file == "model.safetensors":
        save_file(named, directory / file)
    else:
        named |= {n: nn.Parameter(t) for n, t in named.items() if t.is_floating_point() and is_zip}
        torch.save(named, directory / file, _use_new_zipfile_serialization=is_zip)
    return directory


KINDS = [  # a prefix, a file, whether it is a zip archive, which a .bin of before 2020 is not
    ("", "model.safetensors", None, torch.bfloat16),
    ("roberta.", "pytorch_model.bin", True, torch.float16),
    ("0.auto_model.", "pytorch_model.bin", False, torch.float32),
]


@pytest.mark.parametrize("prefix, file, is_zip, dtype", KINDS)
def test_prefixes_old_names_and_other_precisions(prefix, file, is_zip, dtype, tmp_path):
    named = {name: tensor.to(dtype) for name, tensor in NAMED.items()}
    more = dict.fromkeys(OUTSIDE, torch.zeros(3))
    for name, tensor in (named | dict.fromkeys(INSIDE, torch.arange(24)[None])).items():
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        more[prefix + name.replace("LayerNorm.bias", "LayerNorm.beta")] = tensor
    bert = Bert.from_pretrained(write_hub(tmp_path, more, file, is_zip))
    named = {name: tensor.float() for name, tensor in named.items()}
    assert bert.sha256 == sha256_of(named, asdict(bert.config)) and bert.dtype == torch.float32
    assert all(torch.equal(p, named[bert.hub_name(n)]) for n, p in bert.named_parameters())


WORDS, TYPES = "embeddings.word_embeddings.weight", "embeddings.token_type_embeddings.weight"
MISFITS = [  # tensors that are added, the part of a name that is left out, words of the message
    ({TYPES: torch.zeros(16, 32)}, "nothing", "is [16, 32], the configuration (or its default)"),
    ({WORDS: torch.zeros(60, 32).long()}, "nothing", f"{WORDS} is [60, 32] in torch.int64"),
    ({}, "1.output.dense", "lacks encoder.layer.1.output.dense.bias, encoder.layer.1.output"),
    ({"encoder.layer.2.x": torch.zeros(1)}, "nothing", "unknown tensors encoder.layer.2.x"),
]


@pytest.mark.parametrize("added, left_out, message", MISFITS)
def test_what_does_not_fit_is_named(added, left_out, message, tmp_path):
    """Where config.json does not say how many types there are, too."""
    kept = {n: t for n, t in NAMED.items() if left_out not in n}
    path = write_hub(tmp_path, {**kept, **added}) / "config.json"
    write_json(path, {n: v for n, v in read_json(path).items() if n != "type_vocab_size"})
    fails(tmp_path, "model.safetensors", message)


def test_bert_py_alone(tmp_path):
    """In a folder of its own, on what safetensors reads."""
    shutil.copy(bert_file.__file__, tmp_path)
    fields = read_json(SAFETENSORS / "config.json")
    code = f"""
import torch
from bert import Bert, BertConfig
from safetensors.torch import load_file
known = {{n: v for n, v in {fields}.items() if n in BertConfig.__dataclass_fields__}}
tensors = load_file("{SAFETENSORS}/model.safetensors")
bert = Bert.from_tensors(BertConfig(**known), tensors)
torch.save(bert(torch.tensor([[2, 7, 3]])), "h.pt")"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    h = Bert.from_pretrained(SAFETENSORS)(torch.tensor([[2, 7, 3]]))
    assert torch.equal(torch.load(tmp_path / "h.pt"), h)


@pytest.mark.parametrize("kind, prefix", [("Bert", ""), ("", "bert."), ("Roberta", "roberta.")])
def test_without_model_type_nothing_is_guessed(kind, prefix, tmp_path):
    """As in 2019. RoBERTa's tensors have BERT's names and shapes, and give other hidden states."""
    tensors = {prefix + name: tensor for name, tensor in NAMED.items()}
    path = write_hub(tmp_path, tensors) / "config.json"
    fields = {n: v for n, v in read_json(path).items() if n != "model_type"}
    write_json(path, {**fields, "architectures": [f"{kind}ForMaskedLM"]})
    if kind == "Roberta":
        fails(tmp_path, f'{path} has no "model_type"')
    else:
        assert same(Bert.from_pretrained(tmp_path))


def test_which_tensors_are_the_encoder_s():
    """An optimizer has its own beside each variable, and a file can hold several encoders."""
    google = "bert/embeddings/word_embeddings"
    for names, own in (
        (f"{google} {google}/BERTAdam {google}/lamb/m_1 bert/embeddings/x", [0, 3]),
        (f"a/{google} {google} bert.encoder.layer.0.x encoder.layer.0.y", [1, 2]),
        (f"old.{WORDS} bert.{WORDS} a.bert.{WORDS}", [1]),
        (f"old.{WORDS} old.encoder.x", [0, 1]),
    ):
        tensors = {name: i for i, name in enumerate(names.split())}
        assert [*by_hub_name(tensors, "bert").values()] == own
    with pytest.raises(ValueError, match="several encoders, prefixes context., question., and"):
        by_hub_name({f"context.{WORDS}": 0, f"question.{WORDS}": 1}, "bert")


def test_what_is_pickled_is_not_executed(tmp_path, monkeypatch, recwarn):
    class Writes:
        def __reduce__(self):
            return open, ("executed", "w")

    monkeypatch.chdir(tmp_path)
    torch.save({"a": Writes()}, "file.bin", pickle_protocol=4)
    with pytest.raises(ValueError, match="file.bin: not a file of tensors alone, refused") as error:
        read_tensors("file.bin")
    assert "weights_only" not in str(error.value)  # PyTorch's advice to execute it
    assert not Path("executed").exists() and not recwarn.list  # the message is the only line


def test_only_needed_files_are_downloaded(hub):
    (root, asked), needed = hub, {"config.json", "model.safetensors", *TOKENIZER_FILES}
    fails("some/bert", "404 some/bert", "config.json and model.safetensors")
    shutil.copytree(SAFETENSORS, root / "some/bert")
    bert = Bert.from_pretrained("some/bert")
    assert same(bert) and bert.source == "some/bert" and {*asked} == needed
    write_hub(root / "some/other", NAMED, "pytorch_model.bin")
    assert same(Bert.from_pretrained("some/other"))
    assert {*asked} == needed | {"pytorch_model.bin"}


def test_a_hub_that_does_not_answer(monkeypatch):
    """Within five seconds it is said why."""
    monkeypatch.setattr(formats.hub, "hub_library", formats.hub.hub_library.__wrapped__)  # anew
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        started = time.monotonic()
        fails("some/bert", f"at {address} nor in its cache, {constants.HF_HUB_CACHE}", "timed out")
    assert time.monotonic() - started < 5


def test_inputs():
    """Without token types all are 0, without a mask all tokens are real; as many as fit."""
    bert, ids = Bert.from_pretrained(SAFETENSORS), torch.tensor([[2, 7, 8, 3]])
    assert torch.equal(bert(ids), bert(ids, torch.zeros_like(ids), torch.ones_like(ids)))
    for name, longest in (("bert", 24), ("roberta", 22)):  # of 24, RoBERTa's first position is 2
        bert = Bert.from_pretrained(GOLDEN / name / "encoder")
        assert bert.max_length == longest
        bert(torch.full((1, longest), 5))
    assert BertConfig(model_type="roberta").pad_token_id == 1  # where config.json does not name it


def test_tensorflow(copy):
    """With pooler, heads and Adam's moments; also with a step in the name, but one alone."""
    for name in ("encoder-tf", "encoder-tf-shards"):
        bert = Bert.from_pretrained(GOLDEN / "bert" / name)
        assert same(bert) and not bert.training
        assert not any(p.requires_grad for p in bert.parameters())
    directory = copy(TENSORFLOW)
    for path in directory.glob("bert_model.ckpt.*"):
        path.rename(directory / path.name.replace("bert_model.ckpt", "model.ckpt-1000000"))
    (directory / "._model.ckpt-1000000.index").write_bytes(b"")  # macOS puts it there
    assert same(Bert.from_pretrained(directory))
    (directory / "model.ckpt-900000.index").write_bytes(b"")
    fails(directory, "bert_config.json and *model.ckpt*.index, one alone")


def test_files_that_are_cut_off(copy):
    index, data = "bert_model.ckpt.index", "bert_model.ckpt.data-00000-of-00001"
    directory = copy(TENSORFLOW)
    for name, length in ((data, -10_000), (index, -1), (index, 1000), (index, 0)):
        (directory / name).write_bytes((TENSORFLOW / name).read_bytes()[:length])
        fails(directory, name, "cut off")
    (directory / index).write_bytes((TENSORFLOW / index).read_bytes())
    (directory / data).unlink()
    fails(directory, data)
