"""Google's checkpoints are read without TensorFlow, bit for bit, and a damaged one ends in one
clear error."""

import os
import shutil
import subprocess
from pathlib import Path

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert import Bert
from damage import INDEX, SAFETENSORS, TENSORFLOW, attempt, bounded, damaged, fails, rewrite, same
from formats.tensorflow import table_entries
from reference import GOLDEN

PYTHON = Path(os.environ.get("TENSORFLOW_PYTHON", ".venv-tensorflow/bin/python"))
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


def test_every_damaged_byte_is_found(copy):
    """But where nothing is read: in the index's metaindex block and the padding of its footer, and
    in tensors that are not needed."""
    directory = copy(TENSORFLOW)
    for name, step, harmless in ((INDEX, 11, 6), (DATA, 1499, 14)):
        content, errors = (directory / name).read_bytes(), []
        for position in range(0, len(content), step):
            flipped = bytes([content[position] ^ 0x10])
            rewrite(directory / name, content[:position] + flipped + content[position + 1 :])
            errors.append(attempt(directory))
        rewrite(directory / name, content)
        assert 0 < errors.count(None) <= harmless
    assert all(error is None or "does not match its checksum" in error for error in errors)
    rewrite(directory / DATA, content[:-10_000])
    fails(directory, DATA)
    (directory / DATA).unlink()
    fails(directory, DATA)


def test_what_is_not_supported(entries, tmp_path):
    fails(write_index(tmp_path, entries, compression=1), "compressed, which is not supported")
    big_endian = {**entries, b"": entries[b""] + field(2, 1)}
    fails(write_index(tmp_path, big_endian), "big-endian")
    integers = {**entries, EMBEDDINGS: field(1, 3) + entries[EMBEDDINGS][2:]}
    fails(write_index(tmp_path, integers), f"{EMBEDDINGS.decode()} has TensorFlow type 3")


# --------------------------------------------------------------------------------------------------
# Hostile files

HUGE = 2**63 - 1
LARGE = block([(b"", field(1, 1)), *((b"%06d" % i, b"") for i in range(5_000))])
PLACES = block([(b"%06d" % i, varints(0, len(LARGE))) for i in range(5_000)])
LONG = varints(0, 20_000, 0) + b"x" * 20_000 + (varints(20_000, 1, 0) + b"x") * 20_000
TABLES = {
    "endless varint": footer(2**280, 0)[:40] + footer(0, 0)[40:],
    "index block beyond the file": footer(HUGE, HUGE),
    "negative restarts": stored(b"\xff\xff\xff\x7f" * 3) + footer(0, 12),
    "names from nothing": table((b"a", LONG + block([]))),
    "the same block often": table((b"", LARGE), index=PLACES),
}


@pytest.mark.parametrize("name", TABLES)
def test_hostile_table(name, tmp_path):
    shutil.copy(TENSORFLOW / "bert_config.json", tmp_path)
    (tmp_path / INDEX).write_bytes(TABLES[name])
    error = attempt(tmp_path)
    assert error and ("overlap" in error) == ("often" in name), error


def entry(dimensions=(60, 32), offset=0, size=60 * 32 * 4):
    shape = b"".join(field(2, field(1, length)) for length in dimensions)
    return field(1, 1) + field(2, shape) + field(3, 0) + field(4, offset) + field(5, size)


def test_hostile_entries(entries, tmp_path):
    offset, zero = entry(offset=HUGE), entry(dimensions=(2**62, 0), size=0)
    large, without_checksum = entry(dimensions=(2**62,) * 100_000), entry()
    for hostile in (offset, zero, large, without_checksum):
        assert attempt(write_index(tmp_path, {**entries, EMBEDDINGS: hostile}))
    # tensors that overlap: small files could ask for as much memory as they like
    kernels = [name for name in entries if name.endswith(b"output/dense/kernel")]
    overlapping = {**entries, **dict.fromkeys(kernels, entries[kernels[-1]])}
    fails(write_index(tmp_path, overlapping), DATA)


@bounded
@given(data=st.data())
def test_fuzz_index_with_right_checksums(entries, tmp_path, data):
    """The entries, the handles, or one tensor's entry are damaged, and the checksums are right."""
    entries = dict(entries)
    what = data.draw(st.sampled_from(["block", "handles", "entry", "entry"]))
    if what == "entry":
        name = data.draw(st.sampled_from(sorted(entries)))
        entries[name] = data.draw(damaged(entries[name], most=2))
    contents = block(sorted(entries.items()))
    if what == "block":
        contents = data.draw(damaged(contents))
    index = block([(b"~", varints(0, len(contents)))])
    if what == "handles":
        index = data.draw(damaged(index))
    rewrite(tmp_path / "copy" / INDEX, table((b"~", contents), index=index))
    attempt(tmp_path / "copy")
