"""JSON and tensors in files: reading them raises an error of one line that names the file; writing
them leaves the old file or the new one, whatever happens meanwhile."""

import contextlib
import hashlib
import json
import warnings
from pathlib import Path

import safetensors.numpy
import torch
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
    """The object in a JSON file. Raises ValueError that names the file."""
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


@contextlib.contextmanager
def atomic_write(path):
    """A temporary path to write to, which then replaces `path`; after an error it is removed."""
    temporary = Path(f"{path}.tmp")
    try:
        yield temporary
        temporary.replace(path)
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
    """{name: tensor} of a .safetensors file, as views of the mapped file, or of a PyTorch file, of
    which only tensors are unpickled: one with anything else is refused, not executed. Raises
    ValueError that names the file."""
    try:
        if Path(path).suffix == ".safetensors":
            return load_file(path)
        with warnings.catch_warnings(action="ignore"):  # of a pickle's protocol, ahead of an error
            tensors = torch.load(path, map_location="cpu", weights_only=True)
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
            raise ValueError("not a dictionary of tensors")
        return tensors
    except FileNotFoundError:
        raise
    except Exception as e:  # torch raises many kinds here
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise ValueError(f"{path}: not a file of tensors alone, refused: {reason}") from e
