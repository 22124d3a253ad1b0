"""The golden encoder, what a checkpoint that was read is compared with, and files that are
damaged."""

import contextlib
import os
import time
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from bert import Bert

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


# --------------------------------------------------------------------------------------------------
# Hostile files: the right tensors or one clear error; no hang, and no more memory than the files
# have


def attempt(directory, succeeds=None):
    size = sum(path.stat().st_size for path in directory.iterdir())
    started = time.process_time()  # also beside other work
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
    assert time.process_time() - started < 5
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


def tries(count):
    """How many examples a property is tried on: a fifth, unless in `make test-all`."""
    return count if "THOROUGH" in os.environ else count // 5


bounded = settings(
    max_examples=tries(250),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@contextlib.contextmanager
def replaced(path, content):
    """Writes a file anew, for one example: the old one may still be mapped."""
    original = path.rename(f"{path}.original")
    try:
        path.write_bytes(content)
        yield
    finally:
        original.replace(path)
