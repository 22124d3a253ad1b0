"""The golden encoder, what a checkpoint that was read is compared with, and files that are
damaged."""

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
from reference import GOLDEN

ROOT = Path(__file__).parent.parent
SAFETENSORS, TENSORFLOW = GOLDEN / "bert" / "encoder", GOLDEN / "bert" / "encoder-tf"
INDEX = "bert_model.ckpt.index"


def golden_tensors():
    """The golden encoder's tensors, without prefix and pooler."""
    every = load_file(SAFETENSORS / "model.safetensors")
    return {n.removeprefix("bert."): tensor for n, tensor in every.items() if "pooler" not in n}


EXPECTED = Bert.from_pretrained(SAFETENSORS).state_dict()


def same(bert):
    """Bit-identical parameters."""
    return all(torch.equal(p, EXPECTED[name]) for name, p in bert.state_dict().items())


def fails(directory, *words):
    """Loading ends in one error of one line with these words in it."""
    with pytest.raises((ValueError, FileNotFoundError)) as e:
        Bert.from_pretrained(directory)
    message = str(e.value)
    assert "\n" not in message and all(word in message for word in words), message


def attempt(directory):
    """The right tensors, or else the one clear error that is returned; no hang, and no more memory
    than the files have."""
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
    assert peak < 4 * size + 2_000_000  # Python's objects for the model and the index included
    assert time.process_time() - started < 5
    assert same(bert) if error is None else "\n" not in error and str(directory) in error, error
    return error


@st.composite
def damaged(draw, content, most=4):
    """content after a few changes: parts replaced, set to zero, removed, inserted, or cut off."""
    for _ in range(draw(st.integers(1, most))):
        i, j = sorted(draw(st.integers(0, len(content))) for _ in range(2))
        few = draw(st.binary(min_size=1, max_size=12))
        part = draw(st.sampled_from([b"", few, content[j : j + 40], bytes(min(j - i, 40))]))
        behind = draw(st.sampled_from([i, i + len(part), j, len(content)]))
        content = content[:i] + part + content[behind:]
    return content


def tries(count):
    """How many examples a property is tried on: a fifth, unless in `make test-all`."""
    return count if "THOROUGH" in os.environ else count // 5


unhurried = dict(deadline=None, derandomize=True, database=None)
unhurried = settings(suppress_health_check=list(HealthCheck), **unhurried)
bounded = settings(unhurried, max_examples=tries(250))


def rewrite(path, content):
    """The old file may still be mapped."""
    path.unlink()
    path.write_bytes(content)
