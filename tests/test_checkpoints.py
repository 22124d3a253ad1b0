"""Every kind of checkpoint loads, bit for bit the same, and a damaged one ends in one clear
error."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import bert as bert_module
from bert import Bert
from experiments.loading import block, field, google_name, masked_crc, table, varint, write_data
from formats.files import read_bin
from formats.tokenizer import load_tokenizer

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"
SAFETENSORS, TENSORFLOW = GOLDEN / "bert" / "encoder", GOLDEN / "bert" / "encoder-tf"
INDEX = "bert_model.ckpt.index"

# a Python that has tensorflow-cpu
TENSORFLOW_PYTHON = Path(
    os.environ.get("TENSORFLOW_PYTHON", ROOT / ".venv-tensorflow" / "bin" / "python")
)


def tensors(directory=SAFETENSORS):
    """The golden encoder's tensors, without prefix and pooler."""
    every = {
        name.removeprefix("bert."): tensor
        for name, tensor in load_file(directory / "model.safetensors").items()
    }
    return {name: tensor for name, tensor in every.items() if not name.startswith("pooler")}


EXPECTED = Bert.from_pretrained(SAFETENSORS).state_dict()
INPUT = load_file(GOLDEN / "bert" / "expected.safetensors")


def same(bert):
    """Bit-identical parameters, and so hidden states."""
    state = bert.state_dict()
    return state.keys() == EXPECTED.keys() and all(
        torch.equal(state[name], EXPECTED[name]) for name in state
    )


def hidden(bert):
    with torch.no_grad():
        return bert(INPUT["input_ids"], INPUT["token_type_ids"], INPUT["attention_mask"])


def fails(directory, *words):
    """Loading ends in one error of one line with these words in it."""
    with pytest.raises((ValueError, FileNotFoundError)) as e:
        Bert.from_pretrained(directory)
    message = str(e.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    return message


@pytest.fixture
def copy(tmp_path):
    """A copy of a golden encoder to damage."""

    def make(source):
        shutil.copytree(source, tmp_path / "copy", dirs_exist_ok=True)
        return tmp_path / "copy"

    return make


# --------------------------------------------------------------------------------------------------
# TensorFlow


def bundle(directory, change=lambda arrays: None, shards=1):
    """The golden encoder as a bundle of our own writing, its variables changed; returns the index
    as a dictionary."""
    directory.mkdir(exist_ok=True)
    shutil.copy(TENSORFLOW / "bert_config.json", directory)
    arrays = {google_name(name): tensor.numpy() for name, tensor in tensors().items()}
    arrays = {name: array.T if name.endswith("kernel") else array for name, array in arrays.items()}
    change(arrays)
    entries = write_data(directory / "bert_model.ckpt", arrays, shards)
    write_index(directory, entries)
    return entries


def write_index(directory, entries, **options):
    (directory / INDEX).write_bytes(table([(b"~", block(sorted(entries.items())))], **options))


@pytest.mark.parametrize("name", ["encoder-tf", "encoder-tf-shards"])
def test_tensorflow(name):
    """Written by TensorFlow, with pooler, heads, adam_m, adam_v and global_step beside the
    encoder."""
    bert = Bert.from_pretrained(GOLDEN / "bert" / name)
    assert same(bert) and torch.equal(hidden(bert), hidden(Bert.from_pretrained(SAFETENSORS)))
    assert not any(p.requires_grad for p in bert.parameters()) and not bert.training
    assert (
        bert.origin["layers.1.query.weight"] == "bert/encoder/layer_1/attention/self/query/kernel"
    )
    bert.word_embeddings.weight.data.zero_()  # may be changed, which does not reach the file
    assert same(Bert.from_pretrained(GOLDEN / "bert" / name))


@pytest.mark.skipif(
    not TENSORFLOW_PYTHON.exists(), reason="TENSORFLOW_PYTHON names no Python with tensorflow-cpu"
)
@pytest.mark.parametrize("shards", [1, 3])
def test_written_by_tensorflow_now(shards, tmp_path):
    command = [
        TENSORFLOW_PYTHON,
        ROOT / "tests" / "write_tensorflow.py",
        SAFETENSORS,
        tmp_path / "out",
        str(shards),
    ]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": ""})
    assert len(list((tmp_path / "out").glob("bert_model.ckpt.data-*"))) == shards
    bert = Bert.from_pretrained(tmp_path / "out")
    assert same(bert) and torch.equal(hidden(bert), hidden(Bert.from_pretrained(SAFETENSORS)))


def test_own_writer_and_several_blocks(tmp_path):
    """The writer that the other tests use makes what TensorFlow makes; tables of many blocks,
    too."""
    entries = sorted(bundle(tmp_path).items())
    assert same(Bert.from_pretrained(tmp_path))
    blocks = [
        (entries[i : i + 5][-1][0], block(entries[i : i + 5])) for i in range(0, len(entries), 5)
    ]
    (tmp_path / INDEX).write_bytes(table(blocks))
    assert same(Bert.from_pretrained(tmp_path))


def test_names_are_listed(tmp_path):
    def remove(arrays):
        for kind in ("kernel", "bias"):
            del arrays[f"bert/encoder/layer_1/output/dense/{kind}"]

    def add(arrays):
        arrays["bert/encoder/layer_0/new/kernel"] = arrays["other/gamma"] = arrays[
            "bert/embeddings/LayerNorm/beta"
        ]

    def add_layer(arrays):
        arrays["bert/encoder/layer_2/output/dense/bias"] = arrays[
            "bert/encoder/layer_1/output/dense/bias"
        ]

    bundle(tmp_path, remove)
    fails(
        tmp_path,
        INDEX,
        "lacks encoder.layer.1.output.dense.weight, encoder.layer.1.output.dense.bias",
    )
    bundle(tmp_path, add)
    fails(tmp_path, INDEX, "unknown variables bert/encoder/layer_0/new/kernel, other/gamma")
    bundle(tmp_path, add_layer)
    fails(tmp_path, INDEX, "3 layers, bert_config.json says 2")


def test_shapes_are_named(tmp_path):
    name = "bert/encoder/layer_0/intermediate/dense/kernel"

    def change(arrays):
        arrays[name] = arrays[name][:-1]

    bundle(tmp_path, change)
    fails(tmp_path, INDEX, f"{name} has shape [48, 31], bert_config.json says [48, 32]")


def test_every_damaged_byte_is_found(copy):
    """In the index (but for the footer's padding) and in the data; a tensor that is not needed may
    be damaged."""
    directory = copy(TENSORFLOW)
    index = (directory / INDEX).read_bytes()
    used = len(index) - 48 + len(index[-48:-8].rstrip(b"\0"))
    metaindex = index[
        -48
    ]  # the place of an empty block that nobody reads: 2 handles in the footer, it is the first
    assert metaindex
    for position in [*range(0, used, 7), *range(len(index) - 8, len(index))]:
        damaged = bytearray(index)
        damaged[position] ^= 0x10
        (directory / INDEX).write_bytes(damaged)
        with contextlib.suppress(ValueError, FileNotFoundError):
            assert same(Bert.from_pretrained(directory)) and used - 60 < position < used, position
    (directory / INDEX).write_bytes(index)

    data = directory / "bert_model.ckpt.data-00000-of-00001"
    content, found = data.read_bytes(), 0
    for position in range(0, len(content), 997):
        damaged = bytearray(content)
        damaged[position] ^= 1
        data.write_bytes(damaged)
        try:
            assert same(Bert.from_pretrained(directory))
        except ValueError as e:
            assert "does not match its checksum" in str(e) and data.name in str(e)
            found += 1
    assert found > 60


def test_missing_and_short_data(copy):
    directory = copy(GOLDEN / "bert" / "encoder-tf-shards")
    data = directory / "bert_model.ckpt.data-00001-of-00003"
    data.write_bytes(data.read_bytes()[:-10_000])
    fails(directory, data.name)
    data.unlink()
    fails(directory, data.name, "not there")


def test_not_supported_says_what_to_do(tmp_path):
    entries = bundle(tmp_path)
    words = "not supported: save it again with tf.compat.v1.train.Saver"
    write_index(tmp_path, entries, compression=1)
    fails(tmp_path, "snappy", words)
    write_index(tmp_path, {**entries, b"": entries[b""] + field(2, 1)})
    fails(tmp_path, "big-endian", words)
    name = b"bert/embeddings/word_embeddings"
    slices = {
        name: entries[name] + field(7, b""),
        b"\0" + name + b"\xff\x01": entries[name],
    }  # as TensorFlow keeps slices
    write_index(tmp_path, {**entries, **slices})
    fails(tmp_path, "bert/embeddings/word_embeddings", "slices", words)
    write_index(tmp_path, {**entries, name: field(1, 3) + entries[name][2:]})
    fails(tmp_path, "bert/embeddings/word_embeddings has TensorFlow type 3")


def handle(offset, size):
    return varint(offset) + varint(size)


def footer(*handles):
    return b"".join(handles).ljust(40, b"\0") + bytes.fromhex("57fb808b247547db")


def stored(contents):
    return contents + b"\0" + masked_crc(contents + b"\0")


HUGE = 2**63 - 1
BLOCK = block([(b"a", b"1"), (b"b", b"2")])
OWN = block([(b"a", handle(0, len(block([(b"a", handle(0, 0))]))))])
NESTED = block([(b"a", handle(0, len(BLOCK))), (b"b", handle(5, len(BLOCK) - 5))])
LONG = (
    varint(0) + varint(20_000) + varint(0) + b"x" * 20_000
)  # a name, and names that begin with it
TABLES = {
    "empty": b"",
    "magic alone": bytes.fromhex("57fb808b247547db"),
    "no handles": footer(),
    "endless varint": footer(b"\xff" * 40),
    "index block beyond the file": footer(handle(0, 0), handle(HUGE, HUGE)),
    "size of 2^70": footer(handle(0, 0), handle(0, 2**69)),
    "index block over the footer": footer(handle(0, 0), handle(0, 48)),
    "empty block": stored(b"") + footer(handle(0, 0), handle(0, 0)),
    "restarts beyond the block": stored(b"\xff" * 4) + footer(handle(0, 0), handle(0, 4)),
    "negative restarts": stored(b"\xff\xff\xff\x7f" * 3) + footer(handle(0, 0), handle(0, 12)),
    "index block is its own block": stored(OWN) + footer(handle(0, 0), handle(0, len(OWN))),
    "handle without a size": stored(BLOCK) + footer(handle(0, 0), handle(0, len(BLOCK))),
    "shared beyond the key": table([(b"a", varint(9) + varint(1) + varint(0) + b"a" + block([]))]),
    "value beyond the block": table(
        [(b"a", varint(0) + varint(1) + varint(HUGE) + b"a" + block([]))]
    ),
    "key beyond the block": table(
        [(b"a", varint(0) + varint(HUGE) + varint(0) + b"a" + block([]))]
    ),
    "cut in an entry": table([(b"a", b"\x80" + block([]))]),
    "names from nothing": table(
        [(b"a", LONG + (varint(20_000) + varint(1) + varint(0) + b"x") * 20_000 + block([]))]
    ),
    "the same block often": None,
    "nested blocks": stored(stored(BLOCK))
    + stored(NESTED)
    + footer(handle(0, 0), handle(len(BLOCK) + 10, len(NESTED))),
    "the same name twice": table([(b"a", BLOCK), (b"b", BLOCK)]),
    "no header": table([(b"a", BLOCK)]),
    "header is no message": table([(b"a", block([(b"", b"\xff" * 20)]))]),
    "an endless field": table([(b"a", block([(b"", varint(8 << 3 | 2) + varint(HUGE))]))]),
    "a group": table([(b"a", block([(b"", varint(8 << 3 | 3))]))]),
}


def repeated_block():
    """An index block whose handles all lead to one large block."""
    large = block([(b"", field(1, 1)), *((b"%06d" % i, b"") for i in range(20_000))])
    places = block([(b"%06d" % i, handle(0, len(large))) for i in range(20_000)])
    return (
        stored(large) + stored(places) + footer(handle(0, 0), handle(len(large) + 5, len(places)))
    )


@pytest.mark.parametrize("name", TABLES)
def test_hostile_table(name, tmp_path):
    shutil.copy(TENSORFLOW / "bert_config.json", tmp_path)
    (tmp_path / INDEX).write_bytes(repeated_block() if TABLES[name] is None else TABLES[name])
    error = attempt(tmp_path, succeeds=False)
    assert ("overlap" in error) == ("often" in name or "nested" in name), error


def entry(dtype=1, dimensions=(60, 32), shard=0, offset=0, size=60 * 32 * 4):
    shape = b"".join(field(2, field(1, length)) for length in dimensions)
    return field(1, dtype) + field(2, shape) + field(3, shard) + field(4, offset) + field(5, size)


ENTRIES = {
    "size": entry(size=HUGE),
    "offset": entry(offset=HUGE),
    "shard": entry(shard=HUGE),
    "type": entry(dtype=HUGE),
    "negative": entry(dimensions=(2**64 - 1, 2**64 - 1)),
    "zero": entry(dimensions=(2**62, 0), size=0),
    "scalar": entry(dimensions=()),
    "many dimensions": entry(dimensions=(1,) * 1000),
    "many large dimensions": entry(dimensions=(2**62,) * 100_000),
    "other shape": entry(dimensions=(32, 60)),
    "no shape": field(1, 1) + field(5, 4),
    "shape is a number": field(1, 1) + field(2, 7),
    "empty": b"",
    "numbers are bytes": field(1, b"\1") + field(3, b"\1") + field(4, b"\1") + field(5, b"\1"),
    "checksum": entry(),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_hostile_entry(name, tmp_path):
    entries = bundle(tmp_path)
    write_index(tmp_path, {**entries, b"bert/embeddings/word_embeddings": ENTRIES[name]})
    attempt(tmp_path, succeeds=False)


def test_overlapping_tensors_are_refused(tmp_path):
    """Small files could ask for as much memory as they like."""
    entries = bundle(tmp_path)
    kernels = {
        name: value for name, value in entries.items() if name.endswith(b"output/dense/kernel")
    }
    write_index(
        tmp_path,
        {**entries, **dict.fromkeys(kernels, entries[b"bert/encoder/layer_1/output/dense/kernel"])},
    )
    fails(tmp_path, "bert_model.ckpt.data-00000-of-00001")


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
# Hostile files: the right tensors or one clear error; no hang, and no more memory than the files
# have


def attempt(directory, succeeds=None):
    size = sum(path.stat().st_size for path in directory.iterdir())
    started = time.perf_counter()
    tracemalloc.start()
    try:
        bert, error = Bert.from_pretrained(directory), None
    except (ValueError, FileNotFoundError) as e:
        bert, error = None, str(e)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert (
        peak < 4 * size + 2_000_000
    )  # the model's own Python objects, and those of the index, are in the constant
    assert time.perf_counter() - started < 5
    if error is None:
        assert succeeds is not False and same(bert)
    else:
        assert not succeeds and "\n" not in error and str(directory) in error, error
    return error


@st.composite
def damaged(draw, content, most=4):
    """content after a few changes: bytes set, parts removed, inserted or moved, or cut off."""
    for _ in range(draw(st.integers(1, most))):
        i, j = sorted(draw(st.integers(0, len(content))) for _ in range(2))
        k = draw(st.integers(0, len(content)))
        kind = draw(
            st.sampled_from(["set", "set", "flip", "cut", "remove", "insert", "splice", "zero"])
        )
        few = draw(st.binary(min_size=1, max_size=12))
        content = {
            "set": content[:i] + few + content[i + len(few) :],
            "flip": content[:i]
            + bytes(byte ^ (1 << k % 8) for byte in content[i : i + 1])
            + content[i + 1 :],
            "cut": content[:k],
            "remove": content[:i] + content[min(j, i + 40) :],
            "insert": content[:i] + few + content[i:],
            "splice": content[:k] + content[i : min(j, i + 300)] + content[k:],
            "zero": content[:i] + bytes(min(j - i, 40)) + content[min(j, i + 40) :],
        }[kind]
    return content


bounded = settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Directories that the property-based tests write into again and again."""
    result = {name: tmp_path_factory.mktemp(name) for name in ("hub", "google", "tensorflow")}
    shutil.copytree(SAFETENSORS, result["hub"], dirs_exist_ok=True)
    shutil.copytree(TENSORFLOW, result["tensorflow"], dirs_exist_ok=True)
    result["entries"] = bundle(result["google"])
    return result


@contextlib.contextmanager
def replaced(path, content):
    """Writes a file anew, for one example: the old one may still be mapped."""
    original = path.rename(f"{path}.original")
    try:
        path.write_bytes(content)
        yield
    finally:
        original.replace(path)


@bounded
@given(content=damaged((TENSORFLOW / INDEX).read_bytes()))
def test_fuzz_index(places, content):
    with replaced(places["google"] / INDEX, content):
        attempt(places["google"])


@bounded
@given(data=st.data())
def test_fuzz_index_with_right_checksums(places, data):
    """The entries, the handles, or one tensor's entry are damaged, and the checksums are right."""
    entries = dict(places["entries"])
    what = data.draw(st.sampled_from(["block", "handles", "entry", "entry"]))
    if what == "entry":
        name = data.draw(st.sampled_from(sorted(entries)))
        entries[name] = data.draw(damaged(entries[name], most=2))
    contents = block(sorted(entries.items()))
    if what == "block":
        contents = data.draw(damaged(contents))
    content = table([(b"~", contents)])
    if what == "handles":
        index_block = data.draw(damaged(block([(b"~", handle(0, len(contents)))])))
        content = (
            stored(contents)
            + stored(index_block)
            + footer(handle(0, 0), handle(len(contents) + 5, len(index_block)))
        )
    with replaced(places["google"] / INDEX, content):
        error = attempt(places["google"])
        assert what == "handles" or not re.search(r"block at \d+ does not match", error or "")


@bounded
@given(content=damaged((TENSORFLOW / "bert_model.ckpt.data-00000-of-00001").read_bytes()))
def test_fuzz_data(places, content):
    with replaced(places["tensorflow"] / "bert_model.ckpt.data-00000-of-00001", content):
        attempt(places["tensorflow"])


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


# --------------------------------------------------------------------------------------------------
# Tokens


def test_roberta_tokens(tmp_path):
    directory = GOLDEN / "roberta" / "encoder"
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(directory / name, tmp_path)
    whole, parts = load_tokenizer(directory, 30), load_tokenizer(tmp_path, 30)
    for texts in [
        ("the cat sat on the mat.", "the dog"),
        ("The  man",),
        (" a", ""),
        ("the park, the park", "a"),
    ]:
        a, b = whole.encode(*texts), parts.encode(*texts)
        assert (a.ids, a.type_ids, a.tokens) == (b.ids, b.type_ids, b.tokens)
    tokens = parts.encode("the cat", "the dog").tokens
    middle = tokens.index("</s>")
    assert (
        tokens[0] == "<s>"
        and tokens[middle : middle + 2] == ["</s>", "</s>"]
        and tokens[-1] == "</s>"
    )
    assert tokens.count("</s>") == 3 and set(parts.encode("the cat", "the dog").type_ids) == {0}
    assert "".join(tokens[1:middle]) == "theĠcat"


@pytest.mark.parametrize(
    "words, config, cased",
    [
        ("the cat", None, False),
        ("the The", None, True),
        ("the É", None, True),
        ("the ##s ##S", None, True),
        (
            "the ℝ ##ℝ ™",
            None,
            False,
        ),  # upper-case, but not to be lowered: so it is in Google's uncased vocabulary
        ("the The", {"do_lower_case": True}, False),
        ("the cat", {"do_lower_case": False}, True),
        ("the The", {}, True),
    ],
)
def test_cased_or_uncased(words, config, cased, tmp_path):
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words.split()]) + "\n"
    )
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokens = load_tokenizer(tmp_path, 9).encode("THE the").tokens
    assert tokens == (
        ["[CLS]", "[UNK]", "the", "[SEP]"] if cased else ["[CLS]", "the", "the", "[SEP]"]
    )


# --------------------------------------------------------------------------------------------------
# python bert.py


def command(*arguments):
    process = subprocess.run(
        [sys.executable, ROOT / "bert.py", *arguments], capture_output=True, text=True, cwd=ROOT
    )
    return process.returncode, process.stdout, process.stderr


def test_command_line(capsys, monkeypatch):
    code, out, err = command(TENSORFLOW, "the cat ran")
    assert code == 0 and not err
    assert (
        "hidden_size=32" in out
        and "[CLS] the cat ran [SEP]" in out
        and str(TENSORFLOW / INDEX) in out
    )
    total = sum(p.numel() for p in EXPECTED.values())
    assert f"{total:,} parameters" in out
    rows = [
        line.split(maxsplit=2)
        for line in out.splitlines()
        if " from " in line and "parameters" not in line
    ]
    assert len(rows) == 12 and sum(int(row[0].replace(",", "")) for row in rows) == total
    assert "bert/encoder/layer_*/attention/self/query/kernel" in out
    # the hidden states are those of the safetensors twin
    monkeypatch.setattr(sys, "argv", ["bert.py", str(SAFETENSORS), "the cat ran"])
    bert_module.main()
    assert capsys.readouterr().out.splitlines()[-1] == out.splitlines()[-1]


def test_command_line_errors(capsys, monkeypatch, tmp_path):
    code, out, err = command(str(tmp_path))
    assert (
        code == 2 and not out and err.startswith("bert.py: no encoder in") and err.count("\n") == 1
    )
    shutil.copytree(SAFETENSORS, tmp_path / "more")
    with open(tmp_path / "more" / "vocab.txt", "a") as file:
        file.write("more\n")
    for arguments in (
        [str(tmp_path / "more")],
        [],
        ["a", "b", "c"],
        ["--help"],
        [str(tmp_path / "missing")],
        ["a/b/c", "text"],
    ):
        monkeypatch.setattr(sys, "argv", ["bert.py", *arguments])
        with pytest.raises(SystemExit) as e:
            bert_module.main()
        captured = capsys.readouterr()
        assert e.value.code == 2 and captured.out == "" and captured.err.count("\n") == 1
