"""Google's checkpoints are read without TensorFlow, bit for bit, and a damaged one ends in one
clear error."""

import os
import subprocess
from pathlib import Path

import pytest

from bert import Bert
from reference import GOLDEN, SAFETENSORS, TENSORFLOW, fails, same

PYTHON = Path(os.environ.get("TENSORFLOW_PYTHON", ".venv-tensorflow/bin/python"))
INDEX, DATA = "bert_model.ckpt.index", "bert_model.ckpt.data-00000-of-00001"


@pytest.mark.parametrize("name", ["encoder-tf", "encoder-tf-shards"])
def test_tensorflow(name):
    """Written by TensorFlow, with pooler, heads and Adam's moments beside the encoder."""
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


def test_a_step_in_the_name(copy):
    """As training leaves its checkpoints; but one alone may be there."""
    directory = copy(TENSORFLOW)
    for path in directory.glob("bert_model.ckpt.*"):
        path.rename(directory / path.name.replace("bert_model.ckpt", "model.ckpt-1000000"))
    assert same(Bert.from_pretrained(directory))
    (directory / "model.ckpt-900000.index").write_bytes(b"")
    fails(directory, "bert_config.json and *model.ckpt*.index, one alone")


def rewrite(path, content):
    """The old file may still be mapped."""
    path.unlink()
    path.write_bytes(content)


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
