"""Google's checkpoints are read without TensorFlow, bit for bit, and a damaged one ends in one
clear error."""

import contextlib
import os
import re
import shutil
import subprocess

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensorflow_bundle import block, field, google_name, masked_crc, table, varint, write_data

from bert import Bert
from conftest import thorough
from damage import (
    GOLDEN,
    INDEX,
    ROOT,
    SAFETENSORS,
    TENSORFLOW,
    TENSORFLOW_PYTHON,
    attempt,
    bounded,
    damaged,
    fails,
    hidden,
    replaced,
    same,
    tensors,
)


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
# Hostile files


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Directories that the property-based tests write into again and again."""
    result = {name: tmp_path_factory.mktemp(name) for name in ("google", "tensorflow")}
    shutil.copytree(TENSORFLOW, result["tensorflow"], dirs_exist_ok=True)
    result["entries"] = bundle(result["google"])
    return result


@bounded
@given(content=damaged((TENSORFLOW / INDEX).read_bytes()))
def test_fuzz_index(places, content):
    with replaced(places["google"] / INDEX, content):
        attempt(places["google"])


@thorough
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
