"""JSON and tensors in files: reading them raises an error of one line that names the file; writing
them leaves the old file or the new one, whatever happens meanwhile."""

import contextlib
import hashlib
import json
import os
import warnings
from pathlib import Path

import safetensors.numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file


def listed(names):
    """The first names of a list, for a message."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


@contextlib.contextmanager
def error_prefix(place):
    """Puts the name of a file or directory before the message of a ValueError."""
    try:
        yield
    except ValueError as e:
        raise ValueError(f"{place}: {e}") from e


def read_json(path):
    """The object in a JSON file. Raises ValueError that names file and line."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path}: not JSON: {e}") from e
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def file_digest(path):
    """SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(*paths):
    """Returns when files, and the names in directories, are on the disk."""
    for path in paths:
        if path.is_file() or (path.is_dir() and os.name != "nt"):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


@contextlib.contextmanager
def atomic_write(path, ending=".tmp"):
    """A temporary path to write to. It replaces `path` once its content is on the disk, so that a
    power cut leaves the old file or the new one; after an error it is removed."""
    temporary = Path(f"{path}{ending}")
    try:
        yield temporary
        fsync(temporary)
        temporary.replace(path)
        fsync(temporary.parent)
    except BaseException as e:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(e, OSError) and e.errno and not e.filename:  # a full disk, for instance
            e.filename = str(path)
        raise


def write_json(path, value):
    """Writes JSON; the file is replaced as a whole."""
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_tensors(path, tensors):
    """Writes {name: tensor} as fp32 safetensors; the file is replaced as a whole."""
    arrays = {n: t.detach().float().cpu().contiguous().numpy() for n, t in tensors.items()}
    with atomic_write(path) as temporary:
        temporary.write_bytes(safetensors.numpy.save(arrays, metadata={"format": "pt"}))


def read_tensors(path):
    """{name: tensor} of a .safetensors file, as views of the mapped file, or of a PyTorch file.
    Raises ValueError that names the file."""
    if Path(path).suffix != ".safetensors":
        return read_bin(path)
    try:
        return load_file(path)
    except (SafetensorError, ValueError, KeyError) as e:
        raise ValueError(f"{path}: not a readable safetensors file: {e}") from e


def read_bin(path):
    """All tensors of a PyTorch file. Only tensors are unpickled: a file with anything else is
    refused, not executed."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of a pickle's protocol, ahead of an error
            tensors = torch.load(path, map_location="cpu", weights_only=True)
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
            raise ValueError("not a dictionary of tensors")
    except Exception as e:  # torch raises many kinds here
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise ValueError(f"{path}: not a file of tensors alone, refused: {reason}") from e
    return tensors
