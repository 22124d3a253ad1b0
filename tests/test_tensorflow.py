"""Google's checkpoints are read without TensorFlow, bit for bit, and a damaged one ends in one
clear error."""

import os
import subprocess
from pathlib import Path

import google_crc32c
import pytest

from bert import Bert
from conftest import rewrite
from formats.tensorflow import table_entries
from reference import GOLDEN, SAFETENSORS, TENSORFLOW, fails, same

PYTHON = Path(os.environ.get("TENSORFLOW_PYTHON", ".venv-tensorflow/bin/python"))
INDEX = "bert_model.ckpt.index"
DATA, EMBEDDINGS = "bert_model.ckpt.data-00000-of-00001", b"bert/embeddings/word_embeddings"

# --------------------------------------------------------------------------------------------------
# A writer of the index, the inverse of formats/tensorflow.py


def varints(*numbers):
    result = bytearray()
    for n in numbers:
        while n >= 0x80:
            result.append(n & 0x7F | 0x80)
            n >>= 7
        result.append(n)
    return bytes(result)


def field(number, value):
    """A field of a protocol-buffer message: an integer or bytes."""
    if isinstance(value, int):
        return varints(number << 3, value)
    return varints(number << 3 | 2, len(value)) + value


def masked_crc(data):
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF).to_bytes(4, "little")


def block(entries):
    """The contents of one block of a LevelDB table: sorted (key, value) pairs, and one restart
    point."""
    result, previous = b"", b""
    for key, value in entries:
        shared = len(os.path.commonprefix([previous, key]))
        result += varints(shared, len(key) - shared, len(value)) + key[shared:] + value
        previous = key
    return result + bytes(4) + (1).to_bytes(4, "little")


def stored(contents, compression=0):
    contents += bytes([compression])
    return contents + masked_crc(contents)


def footer(offset, size):
    """Where the index is, behind where the metaindex would be."""
    return varints(0, 0, offset, size).ljust(40, b"\0") + (0xDB4775248B80FB57).to_bytes(8, "little")


def table(*blocks, index=None, compression=0):
    """A LevelDB table of such blocks, (a key not before its last, contents). index: of their
    places, or another one"""
    result, places = b"", []
    for key, contents in blocks:
        places.append((key, varints(len(result), len(contents))))
        result += stored(contents, compression)
    index = index or block(places)
    return result + stored(index) + footer(len(result), len(index))


@pytest.fixture
def entries(copy):
    """The golden checkpoint's index, as a dictionary. A copy of the checkpoint is in tmp_path/copy,
    whose index `write_index` writes anew."""
    index = (copy(TENSORFLOW) / INDEX).read_bytes()
    return {name.encode("latin-1"): entry for name, entry in table_entries(index).items()}


def write_index(directory, entries, **options):
    content = table((b"~", block(sorted(entries.items()))), **options)
    rewrite(directory / "copy" / INDEX, content)
    return directory / "copy"


# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["encoder-tf", "encoder-tf-shards"])
def test_tensorflow(name):
    """Written by TensorFlow, with pooler, heads, adam_m, adam_v and global_step beside the
    encoder."""
    bert = Bert.from_pretrained(GOLDEN / "bert" / name)
    assert same(bert) and not bert.training
    assert not any(p.requires_grad for p in bert.parameters())
    bert.word_embeddings.weight.data.zero_()  # may be changed, which does not reach the file
    assert same(Bert.from_pretrained(GOLDEN / "bert" / name))


@pytest.mark.skipif(not PYTHON.exists(), reason="TENSORFLOW_PYTHON: no tensorflow-cpu")
@pytest.mark.parametrize("shards", [1, 3])
def test_written_by_tensorflow_now(shards, tmp_path):
    script = Path(__file__).with_name("write_tensorflow.py")
    command = [PYTHON, script, SAFETENSORS, tmp_path / "out", str(shards)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": ""})
    assert len(list((tmp_path / "out").glob("bert_model.ckpt.data-*"))) == shards
    assert same(Bert.from_pretrained(tmp_path / "out"))


def test_several_blocks(entries, tmp_path):
    blocks = [(item[0], block([item])) for item in sorted(entries.items())]
    rewrite(tmp_path / "copy" / INDEX, table(*blocks))
    assert same(Bert.from_pretrained(tmp_path / "copy"))


def test_what_does_not_fit_is_named(entries, tmp_path):
    """By Google's names; the rest is as in test_encoder.py."""
    other, layer = entries.pop(b"bert/embeddings/LayerNorm/beta/adam_m"), "bert/encoder/layer_0"
    dense = f"{layer}/intermediate/dense/kernel"
    misshapen = {**entries, dense.encode(): entries[b"bert/pooler/dense/kernel"]}
    say = f"{dense} has shape [32, 32] in torch.float32, bert_config"
    fails(write_index(tmp_path, misshapen), INDEX, say)
    head = {**entries, b"output_weights": other}  # of a fine-tuned model
    assert same(Bert.from_pretrained(write_index(tmp_path, head)))


CHECKSUM = "does not match its checksum: the file is damaged"


def test_damaged_files(copy):
    """A flipped bit in either block of the index and in a tensor; files that are cut off."""
    directory = copy(TENSORFLOW)
    for name, places in ((INDEX, (0, 100, -60)), (DATA, (0, 40_000))):
        content = (directory / name).read_bytes()
        for place in places:
            damaged = bytearray(content)
            damaged[place] ^= 0x10
            rewrite(directory / name, damaged)
            fails(directory, name, CHECKSUM)
        rewrite(directory / name, content)
    rewrite(directory / DATA, content[:-10_000])
    fails(directory, DATA, "cut off")
    (directory / DATA).unlink()
    fails(directory, DATA)
    for length in (0, 1000, -1):
        rewrite(directory / INDEX, (TENSORFLOW / INDEX).read_bytes()[:length])
        fails(directory, INDEX, "cut off")


def test_what_the_index_says_is_not_in_the_files(entries, tmp_path):
    """Though every checksum is right."""
    for shape, offset, size in (((60, 32), 2**62, 7680), ((2**62, 0), 0, 0), ((60,), 0, 7680)):
        dimensions = b"".join(field(2, field(1, length)) for length in shape)
        fields = field(1, 1) + field(2, dimensions) + field(4, offset) + field(5, size)
        fails(write_index(tmp_path, {**entries, EMBEDDINGS: fields}), EMBEDDINGS.decode(), "shape")
    for offset in (10**6, 2**280):  # of the block of places
        rewrite(tmp_path / "copy" / INDEX, footer(offset, 9)[:40] + footer(0, 0)[40:])
        fails(tmp_path / "copy", INDEX, "damaged")


def test_what_is_not_supported(entries, tmp_path):
    fails(write_index(tmp_path, entries, compression=1), "compressed, which is not supported")
    big_endian = {**entries, b"": entries[b""] + field(2, 1)}
    fails(write_index(tmp_path, big_endian), "big-endian")
    integers = {**entries, EMBEDDINGS: field(1, 3) + entries[EMBEDDINGS][2:]}
    fails(write_index(tmp_path, integers), f"{EMBEDDINGS.decode()} has TensorFlow type 3")
