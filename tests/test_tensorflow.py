"""Google's checkpoints are read without TensorFlow, bit for bit, and a damaged one ends in one
clear error."""

import os
import re
import shutil
import subprocess

import google_crc32c
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bert import Bert
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
    golden_tensors,
    hidden,
    replaced,
    same,
)

# --------------------------------------------------------------------------------------------------
# A writer of TensorFlow's checkpoints, the inverse of formats/tensorflow.py


def varint(n):
    result = bytearray()
    while n >= 0x80:
        result.append(n & 0x7F | 0x80)
        n >>= 7
    return bytes([*result, n])


def varints(*numbers):
    return b"".join(map(varint, numbers))


def field(number, value):
    """A field of a protocol-buffer message: an integer or bytes."""
    if isinstance(value, int):
        return varints(number << 3, value)
    return varints(number << 3 | 2, len(value)) + value


def masked_crc(data):
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF).to_bytes(4, "little")


def block(entries):
    """The contents of one block of a LevelDB table: sorted (key, value) pairs, a restart point at
    every 16th."""
    result, restarts, previous = b"", [], b""
    for i, (key, value) in enumerate(entries):
        if i % 16 == 0:
            restarts.append(len(result))
            previous = b""
        shared = len(os.path.commonprefix([previous, key]))
        result += varints(shared, len(key) - shared, len(value)) + key[shared:] + value
        previous = key
    return result + b"".join(n.to_bytes(4, "little") for n in [*restarts, len(restarts)])


def stored(contents):
    contents += b"\0"  # not compressed
    return contents + masked_crc(contents)


def footer(*handles):
    return b"".join(varints(*handle) for handle in handles).ljust(40, b"\0") + MAGIC


MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")


def table(blocks):
    """A LevelDB table of such blocks: [(a key not before its last, contents)]."""
    result, places = b"", []
    for key, contents in [*blocks, (None, block([]))]:  # the last one is the metaindex
        places.append((key, varints(len(result), len(contents))))
        result += stored(contents)
    index, metaindex = block(places[:-1]), (len(result) - len(stored(block([]))), len(block([])))
    return result + stored(index) + footer(metaindex, (len(result), len(index)))


def google_name(name):
    """encoder.layer.0.output.dense.weight -> bert/encoder/layer_0/output/dense/kernel"""
    name = name.replace("layer.", "layer_").replace("_embeddings.weight", "_embeddings")
    name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
    name = name.replace("LayerNorm.bias", "LayerNorm.beta")
    return "bert/" + name.replace(".weight", ".kernel").replace(".", "/")


def bundle(directory, change=lambda arrays: None):
    """Writes the golden encoder, its variables changed; returns the index as a dictionary."""
    directory.mkdir(exist_ok=True)
    shutil.copy(TENSORFLOW / "bert_config.json", directory)
    arrays = {google_name(name): tensor.numpy() for name, tensor in golden_tensors().items()}
    arrays = {name: array.T if name.endswith("kernel") else array for name, array in arrays.items()}
    change(arrays)
    entries, data = {b"": field(1, 1)}, b""
    for name, array in sorted(arrays.items()):
        content = np.ascontiguousarray(array, "<f4").tobytes()
        shape = b"".join(field(2, field(1, length)) for length in array.shape)
        place = field(3, 0) + field(4, len(data)) + field(5, len(content))
        checksum = varint(6 << 3 | 5) + masked_crc(content)
        entries[name.encode()] = field(1, 1) + field(2, shape) + place + checksum
        data += content
    (directory / "bert_model.ckpt.data-00000-of-00001").write_bytes(data)
    write_index(directory, entries)
    return entries


def write_index(directory, entries):
    (directory / INDEX).write_bytes(table([(b"~", block(sorted(entries.items())))]))


# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["encoder-tf", "encoder-tf-shards"])
def test_tensorflow(name):
    """Written by TensorFlow, with pooler, heads, adam_m, adam_v and global_step beside the
    encoder."""
    bert = Bert.from_pretrained(GOLDEN / "bert" / name)
    assert same(bert) and torch.equal(hidden(bert), hidden(Bert.from_pretrained(SAFETENSORS)))
    assert not any(p.requires_grad for p in bert.parameters()) and not bert.training
    origin = bert.origin["layers.1.query.weight"]
    assert origin == "bert/encoder/layer_1/attention/self/query/kernel"
    bert.word_embeddings.weight.data.zero_()  # may be changed, which does not reach the file
    assert same(Bert.from_pretrained(GOLDEN / "bert" / name))


@pytest.mark.skipif(
    not TENSORFLOW_PYTHON.exists(), reason="TENSORFLOW_PYTHON names no Python with tensorflow-cpu"
)
@pytest.mark.parametrize("shards", [1, 3])
def test_written_by_tensorflow_now(shards, tmp_path):
    command = [TENSORFLOW_PYTHON, ROOT / "tests" / "write_tensorflow.py", SAFETENSORS]
    command += [tmp_path / "out", str(shards)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": ""})
    assert len(list((tmp_path / "out").glob("bert_model.ckpt.data-*"))) == shards
    assert same(Bert.from_pretrained(tmp_path / "out"))


def test_own_writer_and_several_blocks(tmp_path):
    """The writer above makes what TensorFlow makes; tables of many blocks, too."""
    entries = sorted(bundle(tmp_path).items())
    assert same(Bert.from_pretrained(tmp_path))
    parts = [entries[i : i + 5] for i in range(0, len(entries), 5)]
    (tmp_path / INDEX).write_bytes(table([(part[-1][0], block(part)) for part in parts]))
    assert same(Bert.from_pretrained(tmp_path))


def test_what_does_not_fit_is_named(tmp_path):
    """By Google's names; the rest is as in test_encoder.py."""
    dense, norm = "bert/encoder/layer_0/new/kernel", "bert/embeddings/LayerNorm/beta"
    kernel = "bert/encoder/layer_0/intermediate/dense/kernel"
    bundle(tmp_path, lambda arrays: arrays.update({dense: arrays[norm]}))
    fails(tmp_path, INDEX, f"unknown tensors {dense}")
    bundle(tmp_path, lambda arrays: arrays.update({kernel: arrays[kernel][:-1]}))
    fails(tmp_path, INDEX, f"{kernel} has shape [48, 31] in torch.float32, bert_config")
    bundle(tmp_path, lambda arrays: arrays.update({"output_weights": arrays[norm]}))
    assert same(Bert.from_pretrained(tmp_path))  # the head of a fine-tuned model


def test_every_damaged_byte_is_found(copy):
    """But where nothing is read: in the index's metaindex block and the padding of its footer, and
    in tensors that are not needed."""
    directory = copy(TENSORFLOW)
    index, data = directory / INDEX, directory / "bert_model.ckpt.data-00000-of-00001"
    for path, step, harmless in ((index, 7, 9), (data, 997, 20)):
        content, unnoticed = path.read_bytes(), 0
        for position in range(0, len(content), step):
            damaged = bytearray(content)
            damaged[position] ^= 0x10
            path.write_bytes(damaged)
            try:
                assert same(Bert.from_pretrained(directory))
                unnoticed += 1
            except (ValueError, FileNotFoundError) as e:
                assert path == index or f"{data.name} does not match its checksum" in str(e)
        path.write_bytes(content)
        assert 0 < unnoticed <= harmless, (path, unnoticed)


def test_missing_and_short_data(copy):
    directory = copy(GOLDEN / "bert" / "encoder-tf-shards")
    data = directory / "bert_model.ckpt.data-00001-of-00003"
    data.write_bytes(data.read_bytes()[:-10_000])
    fails(directory, data.name)
    data.unlink()
    fails(directory, data.name, "not there")


def test_what_is_not_supported(tmp_path):
    entries, name = bundle(tmp_path), b"bert/embeddings/word_embeddings"
    write_index(tmp_path, {**entries, b"": entries[b""] + field(2, 1)})
    fails(tmp_path, "big-endian")
    write_index(tmp_path, {**entries, name: field(1, 1) + field(7, b"")})  # in parts elsewhere
    fails(tmp_path, f"{name.decode()}: shape [] in float32 is not 0 bytes")
    write_index(tmp_path, {**entries, name: field(1, 3) + entries[name][2:]})
    fails(tmp_path, f"{name.decode()} has TensorFlow type 3")


# --------------------------------------------------------------------------------------------------
# Hostile files

HUGE = 2**63 - 1
BLOCK = block([(b"a", b"1"), (b"b", b"2")])
NESTED = block([(b"a", varints(0, len(BLOCK))), (b"b", varints(5, len(BLOCK) - 5))])
LARGE = block([(b"", field(1, 1)), *((b"%06d" % i, b"") for i in range(5_000))])
PLACES = block([(b"%06d" % i, varints(0, len(LARGE))) for i in range(5_000)])
LONG = varints(0, 20_000, 0) + b"x" * 20_000 + (varints(20_000, 1, 0) + b"x") * 20_000


def one_block(entries):
    """A table of one block, in which `entries` stands for the entries."""
    return table([(b"a", entries + block([]))])


def two_blocks(contents, index):
    """A table of one block, whose index says that there are more."""
    return stored(contents) + stored(index) + footer((0, 0), (len(contents) + 5, len(index)))


TABLES = {
    "empty": b"",
    "endless varint": footer((2**280,)),
    "index block beyond the file": footer((0, 0), (HUGE, HUGE)),
    "empty block": stored(b"") + footer((0, 0), (0, 0)),
    "negative restarts": stored(b"\xff\xff\xff\x7f" * 3) + footer((0, 0), (0, 12)),
    "shared beyond the key": one_block(varints(9, 1, 0) + b"a"),
    "value beyond the block": one_block(varints(0, 1, HUGE) + b"a"),
    "names from nothing": one_block(LONG),
    "the same block often": two_blocks(LARGE, PLACES),
    "nested blocks": two_blocks(stored(BLOCK), NESTED),
    "the same name twice": table([(b"a", BLOCK), (b"b", BLOCK)]),
    "no header": table([(b"a", BLOCK)]),
    "an endless field": table([(b"a", block([(b"", varints(8 << 3 | 2, HUGE))]))]),
    "a group": table([(b"a", block([(b"", varint(8 << 3 | 3))]))]),
}


@pytest.mark.parametrize("name", TABLES)
def test_hostile_table(name, tmp_path):
    shutil.copy(TENSORFLOW / "bert_config.json", tmp_path)
    (tmp_path / INDEX).write_bytes(TABLES[name])
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
    "zero": entry(dimensions=(2**62, 0), size=0),
    "many large dimensions": entry(dimensions=(2**62,) * 100_000),
    "other shape": entry(dimensions=(32, 60)),
    "shape is a number": field(1, 1) + field(2, 7),
    "empty": b"",
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
    kernels = [name for name in entries if name.endswith(b"output/dense/kernel")]
    write_index(tmp_path, {**entries, **dict.fromkeys(kernels, entries[kernels[-1]])})
    fails(tmp_path, "bert_model.ckpt.data-00000-of-00001")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory that the property-based test writes into again and again, and its index."""
    directory = tmp_path_factory.mktemp("google")
    return directory, bundle(directory)


@bounded
@given(data=st.data())
def test_fuzz_index_with_right_checksums(place, data):
    """The entries, the handles, or one tensor's entry are damaged, and the checksums are right."""
    directory, entries = place[0], dict(place[1])
    what = data.draw(st.sampled_from(["block", "handles", "entry", "entry"]))
    if what == "entry":
        name = data.draw(st.sampled_from(sorted(entries)))
        entries[name] = data.draw(damaged(entries[name], most=2))
    contents = block(sorted(entries.items()))
    if what == "block":
        contents = data.draw(damaged(contents))
    content = table([(b"~", contents)])
    if what == "handles":
        index_block = data.draw(damaged(block([(b"~", varints(0, len(contents)))])))
        content = two_blocks(contents, index_block)
    with replaced(directory / INDEX, content):
        error = attempt(directory)
        assert what == "handles" or not re.search(r"block at \d+ does not match", error or "")
