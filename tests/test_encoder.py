"""Every kind of checkpoint of the hub loads, bit for bit the same, and a damaged one ends in one
clear error. Google's are in test_tensorflow.py."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from bert import Bert
from conftest import Writes, fill_hub_cache
from formats.encoder import digest_of
from reference import SAFETENSORS, fails, golden_tensors, same

# heads, pooler, and a buffer of older versions, outside the encoder and inside
OUTSIDE = "cls.predictions.bias classifier.weight lm_head.bias bert.norm.gamma".split()
INSIDE = "pooler.dense.weight norm.weight embeddings.position_ids".split()


def write_hub(directory, named, kind="model.safetensors"):
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(SAFETENSORS / "config.json", directory)
    named = {name: tensor.clone() for name, tensor in named.items()}
    (save_file if kind.endswith("safetensors") else torch.save)(named, directory / kind)
    return directory


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("prefix", ["", "roberta.", "0.auto_model."])
def test_prefixes_and_old_names(prefix, kind, tmp_path):
    named = golden_tensors() | dict.fromkeys(INSIDE, torch.arange(24)[None])
    more = dict.fromkeys(OUTSIDE, torch.zeros(3))
    for name, tensor in named.items():
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        more[prefix + name.replace("LayerNorm.bias", "LayerNorm.beta")] = tensor
    bert = Bert.from_pretrained(write_hub(tmp_path, more, kind))
    assert same(bert)
    assert bert.checkpoint_names["embeddings_norm.bias"] == f"{prefix}embeddings.LayerNorm.beta"


def test_any_alignment(copy):
    """Files of before 2023 have a header of any length, and so tensors at odd addresses."""
    directory = copy(SAFETENSORS)
    header = CONTENT[8:HEADER] + b" "
    length = len(header).to_bytes(8, "little")
    (directory / "model.safetensors").write_bytes(length + header + CONTENT[HEADER:])
    (directory / "pytorch_model.bin").write_bytes(b"not read where there is the other")
    bert = Bert.from_pretrained(directory)
    assert same(bert) and bert(torch.tensor([[2, 7, 3]])).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_become_float32(dtype, tmp_path):
    written = {name: tensor.to(dtype) for name, tensor in golden_tensors().items()}
    bert = Bert.from_pretrained(write_hub(tmp_path, written))
    assert bert.digest == digest_of({name: tensor.float() for name, tensor in written.items()})
    assert all(parameter.dtype == torch.float32 for parameter in bert.parameters())


WORDS = "embeddings.word_embeddings.weight"
MISFITS = [  # tensors that are added, a part of the names that are left out, words of the message
    ({WORDS: torch.zeros(61, 32)}, None, "[61, 32] in torch.float32, config.json says [60, 32]"),
    ({WORDS: torch.zeros(60, 32).long()}, None, f"{WORDS} has shape [60, 32] in torch.int64"),
    ({}, "1.output.dense", "lacks encoder.layer.1.output.dense.weight, encoder.layer.1.output"),
    ({"encoder.layer.1.x\ny": torch.zeros(1)}, None, r"unknown tensors 'encoder.layer.1.x\ny'"),
    ({"embeddings.LayerNorm.gamma": torch.zeros(32)}, None, "LayerNorm.weight are the same tensor"),
]


def test_what_does_not_fit_is_named(tmp_path):
    for added, left_out, message in MISFITS:
        kept = {n: t for n, t in golden_tensors().items() if left_out is None or left_out not in n}
        fails(write_hub(tmp_path / "x", {**kept, **added}), "model.safetensors", message)


@pytest.mark.parametrize("legacy", [False, True])
def test_bin_holds_tensors_alone(legacy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(SAFETENSORS / "config.json", tmp_path)
    path = tmp_path / "pytorch_model.bin"
    for content in ([1, 2], {"a": 1}, {"a": Writes()}):
        torch.save(content, path, _use_new_zipfile_serialization=not legacy)
        fails(tmp_path, str(path), "refused")
    assert not (tmp_path / "executed").exists()
    path.write_bytes(path.read_bytes()[:50])
    fails(tmp_path, str(path), "refused")
    torch.save(golden_tensors(), path, _use_new_zipfile_serialization=not legacy)
    assert same(Bert.from_pretrained(tmp_path))


CONFIGS = [{"hidden_size": size} for size in (33, 2**40, "32")]
CONFIGS += [{"num_hidden_layers": 9_999_999}, {"hidden_act": "cube"}, {"is_decoder": True}]
CONFIGS += [{"model_type": []}, {"layer_norm_eps": float("nan")}, {"hidden_dropout_prob": 1.5}]
CONFIGS += [{"pad_token_id": 60}, {"pad_token_id": 30, "model_type": "roberta"}]
CONFIGS += [{"position_embedding_type": "relative_key"}]


@pytest.mark.parametrize("values", CONFIGS)
def test_config_is_checked(values, copy):
    path = copy(SAFETENSORS) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    fails(path.parent, "config.json", next(iter(values)))


NEEDED = "config.json and model.safetensors", "bert_config.json and bert_model.ckpt.index"


def test_nothing_there(tmp_path):
    fails(tmp_path, "no encoder in", *NEEDED)
    shutil.copy(SAFETENSORS / "model.safetensors", tmp_path)
    for content in (b"", b"[1]", b"\xff"):
        (tmp_path / "config.json").write_bytes(content)
        fails(tmp_path, str(tmp_path / "config.json"))


CONTENT = (SAFETENSORS / "model.safetensors").read_bytes()
HEADER = 8 + int.from_bytes(CONTENT[:8], "little")


DAMAGED = {
    "empty": b"",
    "cut off in the header": CONTENT[: HEADER // 2],
    "cut off in the last tensor": CONTENT[:-1],
    "no JSON": CONTENT[:8] + b"x" + CONTENT[9:],
    "a field's name": CONTENT.replace(b"data_offsets", b"data_0ffsets", 1),
    "a shorter header": (HEADER - 9).to_bytes(8, "little") + CONTENT[8:],
    "a header longer than the file": (2**63).to_bytes(8, "little") + CONTENT[8:],
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_damaged_safetensors(content, copy):
    (copy(SAFETENSORS) / "model.safetensors").write_bytes(content)
    fails(copy.keywords["dst"], "model.safetensors: not a readable safetensors file")


# --------------------------------------------------------------------------------------------------
# The hub


def test_only_needed_files_are_downloaded(hub):
    (root, asked), repository = hub, hub[0] / "some/bert"
    fails("some/bert", "no config.json", *NEEDED)
    asked.clear()
    shutil.copytree(SAFETENSORS, repository)
    bert = Bert.from_pretrained("some/bert")
    assert same(bert) and bert.source == "some/bert"
    first = ["config.json", "model.safetensors", "tokenizer.json"]
    assert asked == [*first, "vocab.txt", "tokenizer_config.json"]
    asked.clear()
    (repository / "tokenizer.json").write_text("{}")
    Bert.from_pretrained("some/bert")
    assert asked == first
    write_hub(root / "some/other", golden_tensors(), "pytorch_model.bin")
    assert same(Bert.from_pretrained("some/other"))


@pytest.mark.parametrize("path", "./x ~/bert a/b/c a\\b . no/such/ runs/mnli".split())
def test_what_looks_like_a_path_does_not_wait_for_the_network(path, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fails(path, "no encoder in" if path == "." else f"there is no directory {path!r}")
    assert hub[1] == []


def test_cache_without_network():  # offline, see conftest.py
    fill_hub_cache(Path(constants.HF_HUB_CACHE) / "models--some--cached", SAFETENSORS)
    assert same(Bert.from_pretrained("some/cached"))
