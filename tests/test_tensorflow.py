"""Google's checkpoints are read without TensorFlow, bit for bit."""

import pytest
import torch

from bert import Bert
from formats.tensorflow import bundle_tensor, protobuf
from reference import GOLDEN, TENSORFLOW, fails, same

INDEX, DATA = "bert_model.ckpt.index", "bert_model.ckpt.data-00000-of-00001"


@pytest.mark.parametrize("name", ["encoder-tf", "encoder-tf-shards"])
def test_tensorflow(name):
    """Written by TensorFlow, with pooler, heads and Adam's moments beside the encoder."""
    bert = Bert.from_pretrained(GOLDEN / "bert" / name)
    assert same(bert) and not bert.training
    assert not any(p.requires_grad for p in bert.parameters())
    bert.word_embeddings.weight.data.zero_()  # may be changed, which does not reach the file
    assert same(Bert.from_pretrained(GOLDEN / "bert" / name))


def test_a_step_in_the_name(copy):
    """As training leaves its checkpoints; but one alone may be there."""
    directory = copy(TENSORFLOW)
    for path in directory.glob("bert_model.ckpt.*"):
        path.rename(directory / path.name.replace("bert_model.ckpt", "model.ckpt-1000000"))
    assert same(Bert.from_pretrained(directory))
    (directory / "model.ckpt-900000.index").write_bytes(b"")
    fails(directory, "bert_config.json and *model.ckpt*.index, one alone")


def test_files_that_are_cut_off(copy):
    directory = copy(TENSORFLOW)
    for name, length in ((DATA, -10_000), (INDEX, -1), (INDEX, 1000), (INDEX, 0)):
        (directory / name).write_bytes((TENSORFLOW / name).read_bytes()[:length])
        fails(directory, name, "cut off")
    (directory / INDEX).write_bytes((TENSORFLOW / INDEX).read_bytes())
    (directory / DATA).unlink()
    fails(directory, DATA)


def test_types_of_numbers(tmp_path):
    """bfloat16 is read; a variable in slices is refused."""
    tensor, index = torch.tensor([1.5, -3e38]).bfloat16(), tmp_path / "x.index"
    data = tensor.view(torch.int16).numpy().tobytes()
    index.with_name("x.data-00000-of-00001").write_bytes(data)
    shape = b"\x12\x04\x12\x02\x08\x02"  # [2]
    whole = protobuf(b"\x08\x0e" + shape + b"\x28\x04")  # 4 bytes
    assert torch.equal(bundle_tensor("a", whole, index, 1), tensor)
    with pytest.raises(ValueError, match="a in .* is cut off, or damaged"):
        bundle_tensor("a", protobuf(b"\x08\x0e" + shape + b"\x3a\0\x3a\0"), index, 1)
