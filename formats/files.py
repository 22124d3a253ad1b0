"""JSON and tensors in files: read with one line of complaint, written so that a reader sees the old
file or the new one."""

import contextlib
import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file


def listed(names, most=4):
    """The first few names of a list, for a message of one line."""
    shown = [name if name.isprintable() and len(name) < 200 else repr(name[:200]) for name in names]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(shown[:most]) + more


@contextlib.contextmanager
def error_prefix(place):
    """Puts the name of a file or directory before the message of a ValueError."""
    try:
        yield
    except ValueError as e:
        raise ValueError(f"{place}: {e}") from e


def read_json(path):
    """The object in a JSON file. Raises ValueError that names file and line."""
    if Path(path).exists() and not Path(path).is_file():  # a pipe would never end
        raise ValueError(f"{path} is not a file")
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as e:
        raise ValueError(f"{path}, line {e.lineno}: not JSON: {e.msg}") from e
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path}: not JSON: {e}") from e
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def fsync(*paths):
    """Returns when files, and the names in directories, are on the disk."""
    for path in paths:
        if path.is_file() or path.is_dir():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


@contextlib.contextmanager
def atomic_write(path):
    """A temporary path to write to. It takes the place of `path` once its content is on the disk,
    so that a power cut leaves the old file or the new one; after an error it is removed."""
    temporary = Path(f"{path}.tmp")
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
    """Writes JSON under a temporary name and renames it."""
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def umask():
    """The permissions that new files of this process do not get; they can only be read by setting
    them."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def write_tensors(path, tensors):
    """Writes {name: tensor} as fp32 safetensors, under a temporary name, and renames it."""
    parts = {}  # what is there under two names is written twice
    for name, tensor in tensors.items():
        tensor = tensor.detach().float().cpu().contiguous()
        twice = any(tensor.data_ptr() == other.data_ptr() for other in parts.values())
        parts[name] = tensor.clone() if twice else tensor
    with atomic_write(path) as temporary:
        try:
            save_file(parts, temporary, metadata={"format": "pt"})
            temporary.chmod(0o666 & ~umask())  # safetensors makes it the owner's alone
        except SafetensorError as e:  # a full disk, for instance
            for left in temporary.parent.glob(".tmp??????"):  # safetensors' own temporary file
                left.unlink(missing_ok=True)
            raise OSError(f"{path} cannot be written: {e}") from e


def read_tensors(path):
    """{name: tensor} of a .safetensors file or a PyTorch file. Raises ValueError that names it."""
    return read_safetensors(path) if Path(path).suffix == ".safetensors" else read_bin(path)


def read_safetensors(path):
    """All tensors of a safetensors file: views of the mapped file, read when they are first
    used."""
    try:
        return load_file(path)
    except (SafetensorError, ValueError, KeyError) as e:
        raise ValueError(f"{path}: not a readable safetensors file: {e}") from e


def read_bin(path):
    """All tensors of a PyTorch file. Nothing but tensors is unpickled: a file with anything else is
    refused, not executed."""
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:  # torch raises many kinds here
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise ValueError(f"{path}: not a file of tensors alone, refused: {reason}") from e
    size = Path(path).stat().st_size

    def plain(name, tensor):
        return (
            isinstance(name, str)
            and isinstance(tensor, torch.Tensor)
            and tensor.layout == torch.strided
            and tensor.device.type == "cpu"
            and tensor.nbytes <= size
        )

    if not isinstance(tensors, dict) or not all(plain(*item) for item in tensors.items()):
        raise ValueError(f"{path}: not a dictionary of plain tensors, refused")
    return tensors
