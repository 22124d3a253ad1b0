"""Notes and errors, which name their file; JSON and tensors in files. Writing leaves the old file
or the new one."""

import contextlib
import functools
import json
import os
import warnings
from pathlib import Path

import safetensors.numpy
import torch
from safetensors.torch import load_file


@functools.cache
def note(text):
    """Prints a line that is good to know, once in a run: see `alone` in runtime/command.py."""
    print(f"note: {text}", flush=True)


@contextlib.contextmanager
def error_prefix(place, is_read=False):
    """Puts `place` before a ValueError's message; with is_read, of all but FileNotFoundError."""
    try:
        yield
    except ValueError as e:
        raise ValueError(f"{place}: {e}") from e
    except Exception as e:
        if not is_read or isinstance(e, FileNotFoundError):
            raise
        problem = f"it cannot be read: damaged, or too new? ({type(e).__name__}: {e})"
        raise ValueError(f"{place}: {problem}") from e


def is_file(path):
    """Whether a file is there. Raises FileNotFoundError for a dead link or a pointer of git-lfs."""
    if os.path.lexists(path) and not os.path.exists(path):
        raise FileNotFoundError(f"{path} is a link that leads nowhere")
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        if file.read(40) == b"version https://git-lfs.github.com/spec/":
            raise FileNotFoundError(f"{path} is a pointer of git-lfs, not the file: git lfs pull")
    return True


def read_json(path):
    """The object in a JSON file. Raises ValueError that names the file."""
    with error_prefix(f"{path}: no JSON object", is_read=True):
        return dict(json.loads(Path(path).read_text(encoding="utf-8-sig")))


@contextlib.contextmanager
def atomic_write(path):
    """A path to write to, which replaces `path`, or after an error goes. The directory is made."""
    path = Path(path).expanduser()
    temporary = Path(f"{path}.tmp")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path, value):
    """Writes JSON; the file is replaced as a whole."""
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_tensors(path, tensors):
    """Writes {name: tensor} as safetensors, floats as fp32; the file is replaced as a whole."""
    fp32 = {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}
    arrays = {n: tensor.detach().cpu().contiguous().numpy() for n, tensor in fp32.items()}
    with atomic_write(path) as temporary:
        temporary.write_bytes(safetensors.numpy.save(arrays, metadata={"format": "pt"}))


def read_tensors(path):
    """{name: tensor} of a .safetensors file, as views of the mapped file, or of a PyTorch file, of
    which only tensors are unpickled: one with anything else is refused, not executed."""
    is_file(path)  # or says why not
    try:
        if Path(path).suffix == ".safetensors":
            return load_file(path)
        with warnings.catch_warnings(action="ignore"):  # of a pickle's protocol, ahead of an error
            found = dict(torch.load(path, map_location="cpu", weights_only=True))
        return {n: t.detach() if isinstance(t, torch.nn.Parameter) else t for n, t in found.items()}
    except Exception as e:  # of many kinds; torch advises to allow that anything is executed
        reason = f"not a file of tensors alone, refused ({type(e).__name__})"
        raise ValueError(f"{path}: {reason}") from e


def check_names(needed, found):
    """Raises ValueError for names of tensors that are not found, or not needed."""
    for problem, names in (("lacks", needed - found), ("has unknown tensors", found - needed)):
        if names:
            raise ValueError(f"it {problem} {', '.join(sorted(names)):.300}")


def check_tensor(name, tensor, shape, needed):
    """Raises ValueError for a tensor that is not of this shape, of floats, and finite."""
    if tensor.shape != shape or not tensor.is_floating_point():
        found = f"{name} is {list(tensor.shape)} in {tensor.dtype}"
        raise ValueError(f"{found}, {needed} {list(shape)}, in floats")
    if not tensor.isfinite().all():
        raise ValueError(f"{name} holds values that are not finite")
