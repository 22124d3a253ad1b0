"""Every kind of checkpoint of the hub loads, bit for bit the same, and a damaged one ends in one
clear error. Google's are in test_tensorflow.py."""

import json
import shutil
import time
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from bert import Bert
from damage import (
    EXPECTED,
    SAFETENSORS,
    attempt,
    bounded,
    damaged,
    fails,
    hidden,
    replaced,
    same,
    tensors,
)
from formats.files import read_bin

# --------------------------------------------------------------------------------------------------
# Hugging Face

HEADS = {
    "cls.predictions.bias": torch.zeros(60),
    "classifier.weight": torch.zeros(3, 32),
    "lm_head.bias": torch.zeros(60),
}
POOLER = {
    "pooler.dense.weight": torch.zeros(32, 32),
    "embeddings.position_ids": torch.arange(24)[None],
}


def old(name):
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
        "LayerNorm.bias", "LayerNorm.beta"
    )


def write_hub(directory, named, kind="model.safetensors"):
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    shutil.copy(SAFETENSORS / "config.json", directory)
    named = {name: tensor.clone() for name, tensor in named.items()}
    save_file(named, directory / kind) if kind.endswith("safetensors") else torch.save(
        named, directory / kind
    )
    return directory


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("prefix", ["", "bert.", "roberta.", "model.bert.", "0.auto_model."])
def test_prefixes_and_old_names(prefix, kind, tmp_path):
    plain = {prefix + name: tensor for name, tensor in tensors().items()}
    assert same(Bert.from_pretrained(write_hub(tmp_path / "a", plain, kind)))
    more = {old(prefix + name): tensor for name, tensor in {**tensors(), **POOLER}.items()}
    bert = Bert.from_pretrained(write_hub(tmp_path / "b", {**HEADS, **more}, kind))
    assert (
        same(bert) and bert.origin["embeddings_norm.bias"] == f"{prefix}embeddings.LayerNorm.beta"
    )


def test_any_alignment(tmp_path):
    """Files of before 2023 have a header of any length, and so tensors at odd addresses."""
    content = (SAFETENSORS / "model.safetensors").read_bytes()
    shutil.copy(SAFETENSORS / "config.json", tmp_path)
    for spaces in (1, 2, 3):
        header = content[8:HEADER] + b" " * spaces
        (tmp_path / "model.safetensors").unlink(missing_ok=True)
        (tmp_path / "model.safetensors").write_bytes(
            len(header).to_bytes(8, "little") + header + content[HEADER:]
        )
        bert = Bert.from_pretrained(tmp_path)
        assert same(bert) and torch.equal(hidden(bert), hidden(Bert.from_pretrained(SAFETENSORS)))


def test_safetensors_come_first(tmp_path):
    directory = write_hub(tmp_path / "both", tensors())
    (directory / "pytorch_model.bin").write_bytes(b"not read")
    (directory / "tf_model.h5").write_bytes(b"not read")
    assert same(Bert.from_pretrained(directory))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_become_float32(dtype, tmp_path):
    bert = Bert.from_pretrained(
        write_hub(tmp_path / "x", {name: t.to(dtype) for name, t in tensors().items()})
    )
    assert all(
        torch.equal(p, EXPECTED[name].to(dtype).float()) for name, p in bert.state_dict().items()
    )


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_what_does_not_fit_is_named(kind, tmp_path):
    name = "embeddings.word_embeddings.weight"
    directory = tmp_path / "x"
    write_hub(directory, {**tensors(), name: torch.zeros(61, 32)}, kind)
    fails(directory, kind, f"{name} has shape [61, 32], config.json says [60, 32]")
    write_hub(directory, {**tensors(), name: torch.zeros(60, 32, dtype=torch.int64)}, kind)
    fails(directory, kind, f"{name} holds torch.int64")
    write_hub(
        directory, {key: t for key, t in tensors().items() if "layer.1.output" not in key}, kind
    )
    fails(
        directory,
        kind,
        "lacks encoder.layer.1.output.dense.weight",
        "encoder.layer.1.output.LayerNorm.bias",
    )
    write_hub(directory, {key: t for key, t in tensors().items() if "layer.1" not in key}, kind)
    fails(directory, kind, "1 layers, config.json says 2")
    write_hub(directory, {**tensors(), "encoder.layer.1.other.weight": torch.zeros(1)}, kind)
    fails(directory, kind, "unknown tensors encoder.layer.1.other.weight")
    write_hub(directory, {**tensors(), "embeddings.LayerNorm.gamma": torch.zeros(32)}, kind)
    fails(
        directory,
        kind,
        "embeddings.LayerNorm.gamma, embeddings.LayerNorm.weight are the same tensor",
    )
    heads = {
        name: torch.zeros(1)
        for name in ("pooler.weight", "bert.pooler.weight", "norm.gamma", "norm.weight")
    }
    Bert.from_pretrained(
        write_hub(directory, {**{f"bert.{key}": t for key, t in tensors().items()}, **heads}, kind)
    )  # any head
    write_hub(directory, {"a\nb": torch.zeros(1), "encoder.layer.1.a\nb": torch.zeros(1)}, kind)
    fails(directory, kind)


class Writes:
    """Unpickled, it writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("legacy", [False, True])
def test_bin_holds_tensors_alone(legacy, tmp_path):
    path, victim = tmp_path / "pytorch_model.bin", tmp_path / "written"
    torch.save({**tensors(), "x": Writes(victim)}, path, _use_new_zipfile_serialization=not legacy)
    shutil.copy(SAFETENSORS / "config.json", tmp_path)
    fails(tmp_path, str(path), "refused")
    assert not victim.exists()
    torch.save(tensors(), path, _use_new_zipfile_serialization=not legacy)
    assert same(Bert.from_pretrained(tmp_path))
    sparse, large, nowhere = (
        torch.eye(3).to_sparse(),
        torch.zeros(1).expand(2**24, 2**24),
        torch.zeros(2, device="meta"),
    )
    for content in (
        [1, 2],
        {"a": 1},
        {1: torch.eye(3)},
        {"a": sparse},
        {"a": large},
        {"a": nowhere},
    ):
        torch.save(content, path, _use_new_zipfile_serialization=not legacy)
        with pytest.raises(ValueError, match="refused"):
            read_bin(path)
    for content in (b"", b"garbage", b"PK\3\4", path.read_bytes()[:50]):
        path.write_bytes(content)
        fails(tmp_path, str(path), "refused")


@pytest.mark.parametrize(
    "values",
    [
        {"hidden_size": 0},
        {"hidden_size": "32"},
        {"hidden_size": 33},
        {"hidden_size": 2**40},
        {"vocab_size": True},
        {"num_attention_heads": 5},
        {"num_hidden_layers": 9_999_999},
        {"intermediate_size": None},
        {"hidden_act": "cube"},
        {"hidden_act": ["gelu"]},
        {"hidden_act": {}},
        {"is_decoder": True},
        {"model_type": "gpt2"},
        {"model_type": []},
        {"layer_norm_eps": "x"},
        {"layer_norm_eps": float("nan")},
        {"hidden_dropout_prob": 1.5},
        {"classifier_dropout": "x"},
        {"pad_token_id": None},
        {"pad_token_id": -1},
        {"pad_token_id": 60},
        {"pad_token_id": 30, "model_type": "roberta"},
        {"position_embedding_type": "relative_key"},
    ],
    ids=str,
)
def test_config_is_checked(values, copy):
    directory = copy(SAFETENSORS)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **values}))
    started = time.perf_counter()
    fails(
        directory, "config.json", "layers" if "num_hidden_layers" in values else next(iter(values))
    )
    assert time.perf_counter() - started < 2


def test_nothing_there(tmp_path):
    fails(tmp_path, "no encoder in", "config.json", "bert_config.json")
    shutil.copy(SAFETENSORS / "config.json", tmp_path)
    fails(tmp_path, "no encoder in")
    for content in (b"", b"[1]", b"{", b"\xff", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"):
        shutil.copy(SAFETENSORS / "model.safetensors", tmp_path)
        (tmp_path / "config.json").write_bytes(content)
        fails(tmp_path, str(tmp_path / "config.json"))


# --------------------------------------------------------------------------------------------------
# Hostile files


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A directory that the property-based tests write into again and again."""
    result = {"hub": tmp_path_factory.mktemp("hub")}
    shutil.copytree(SAFETENSORS, result["hub"], dirs_exist_ok=True)
    return result


HEADER = 8 + int.from_bytes((SAFETENSORS / "model.safetensors").read_bytes()[:8], "little")


@bounded
@given(data=st.data())
def test_fuzz_safetensors(places, data):
    """The header, with its own length or with the length put right, and files that are cut off."""
    path = places["hub"] / "model.safetensors"
    content = path.read_bytes()
    what = data.draw(st.sampled_from(["header", "header with length", "length", "cut"]))
    if what == "length":
        content = data.draw(st.integers(0, 2**64 - 1)).to_bytes(8, "little") + content[8:]
    elif what == "cut":
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        header = data.draw(damaged(content[8:HEADER]))
        length = len(header) if what == "header with length" else HEADER - 8
        content = length.to_bytes(8, "little") + header + content[HEADER:]
    with replaced(path, content):
        attempt(places["hub"])


def json_values():
    leaves = (
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=5)
        | st.integers(-3, 100)
    )
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    )


@bounded
@given(data=st.data())
def test_fuzz_config(places, data):
    path = places["hub"] / "config.json"
    content = path.read_bytes()
    if data.draw(st.booleans()):
        content = data.draw(damaged(content))
    else:
        config = json.loads(content)
        names = st.sampled_from(sorted({*config, "classifier_dropout", "position_embedding_type"}))
        content = json.dumps(
            {**config, **data.draw(st.dictionaries(names, json_values(), max_size=3))}
        ).encode()
    with replaced(path, content):
        attempt(places["hub"])


@bounded
@given(
    content=st.binary(max_size=200)
    | damaged((SAFETENSORS / "model.safetensors").read_bytes()[:400])
)
def test_fuzz_bin(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "fuzzed.bin"
    path.write_bytes(content)
    with pytest.raises(ValueError) as e:
        read_bin(path)
    assert "\n" not in str(e.value)


# --------------------------------------------------------------------------------------------------
# The hub

DIRECTORIES = (
    "bert_config.json and bert_model.ckpt.*",
    "config.json and model.safetensors (or pytorch_model.bin)",
)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A directory in the hub's place. Returns (its repository some/bert, the list of files that
    were asked for)."""
    asked = []

    def hf_hub_download(repo_id, filename, revision=None):
        asked.append(filename)
        if not (tmp_path / repo_id / filename).exists():
            raise EntryNotFoundError(f"404 {filename}")
        return str(tmp_path / repo_id / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    shutil.copytree(SAFETENSORS, tmp_path / "some" / "bert")
    return tmp_path / "some" / "bert", asked


def test_only_needed_files_are_downloaded(hub):
    repository, asked = hub
    for name in (
        "tf_model.h5",
        "flax_model.msgpack",
        "pytorch_model.bin",
        "vocab.json",
        "merges.txt",
    ):
        (repository / name).write_bytes(b"not needed")
    bert = Bert.from_pretrained("some/bert")
    assert same(bert) and bert.source == "some/bert"
    assert asked == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "vocab.txt",
        "tokenizer_config.json",
    ]
    asked.clear()
    (repository / "tokenizer.json").write_text("{}")
    Bert.from_pretrained("some/bert")
    assert asked == ["config.json", "model.safetensors", "tokenizer.json"]
    asked.clear()
    (repository / "model.safetensors").unlink()
    write_hub(repository.parent / "other", tensors(), "pytorch_model.bin")
    assert same(Bert.from_pretrained("some/other"))
    assert (
        asked[:3] == ["config.json", "model.safetensors", "pytorch_model.bin"]
        and "tf_model.h5" not in asked
    )


def test_hub_repository_without_an_encoder(hub):
    repository, _ = hub
    (repository / "model.safetensors").unlink()
    fails("some/bert", "neither model.safetensors nor pytorch_model.bin", *DIRECTORIES)
    (repository / "config.json").unlink()
    fails("some/bert", "no config.json", *DIRECTORIES)


def test_no_network():
    fails("some/never-downloaded", "cannot be reached", *DIRECTORIES)  # offline, see conftest.py
    fails("not an id", *DIRECTORIES)


@pytest.mark.parametrize(
    "path", ["./x", "../x", "/no/such/place", "~/bert", "a/b/c", "a\\b", ".", "no/such/"]
)
def test_what_looks_like_a_path_does_not_wait_for_the_network(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda *_, **__: pytest.fail("asked the network")
    )
    fails(path, "no encoder in" if path == "." else "there is no directory")


@pytest.mark.parametrize("name, task", [("mnli", "mnli"), ("full-mnli", "mnli")])
def test_a_run_that_is_not_there(name, task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = fails(f"runs/{name}", f"train it with --stage full --task {task};")
    assert f"there is no directory 'runs/{name}'" in message


def test_cache_without_network():
    """As a first run leaves the hub's cache: files of one commit, and notes of those that the
    repository does not have."""
    repository, commit = Path(constants.HF_HUB_CACHE) / "models--some--cached", "0123456789" * 4
    for folder, names in {
        "snapshots": ("config.json", "model.safetensors", "vocab.txt"),
        ".no_exist": ("tokenizer.json", "tokenizer_config.json"),
    }.items():
        (repository / folder / commit).mkdir(parents=True)
        for name in names:
            (repository / folder / commit / name).write_bytes(
                (SAFETENSORS / name).read_bytes() if folder == "snapshots" else b""
            )
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    assert same(Bert.from_pretrained("some/cached"))
