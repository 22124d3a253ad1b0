"""Devices, and several processes as torchrun starts them: each takes every G-th example of a
batch."""

import contextlib
import ctypes
import os
import signal
import sys

import numpy as np
import torch
import torch.distributed as dist


def choose_device(device, dtype):
    """("auto", "auto") -> (torch.device, torch.dtype), and PyTorch set up for it. Raises ValueError
    for a device that is not there."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    available["cpu"] = True
    if device == "auto":
        device = next(name for name in available if available[name])
    if not available[device]:
        raise ValueError(f"--device {device}: there is no such device on this machine")
    if device == "cuda" and dist.is_torchelastic_launched():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if device == "cuda":  # cuDNN's attention, the default on an H100, plans anew for every length
        torch.backends.cuda.enable_cudnn_sdp(False)
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" and torch.cuda.is_bf16_supported() else "float32"
    return torch.device(device), getattr(torch, dtype)


def rank_and_world_size():
    """(number of this process, how many there are)"""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def all_reduce(tensor):
    """The sum over all processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def micro_batches(rows, count):
    """
    The part of a batch that this process computes: at most `count` pairs (weight, rows), the weight
    being their share of the whole batch. Without an example of its own it takes one with weight 0,
    because the others wait for its gradients.
    """
    rank, world_size = rank_and_world_size()
    mine = rows[rank::world_size]
    if len(mine) == 0:
        return [(0.0, rows[:1].tolist())]
    parts = np.array_split(mine, min(count, len(mine)))
    return [(len(part) / len(rows), part.tolist()) for part in parts]


STOP = [signal.SIGINT, signal.SIGTERM]  # Ctrl-C, a scheduler
if os.name != "nt":
    STOP.append(signal.SIGHUP)  # a closed terminal


@contextlib.contextmanager
def deferred_signals(notice="", again=None):
    """A list to which the numbers of the signals that ask for a stop are added, in place of what
    they would do. The first prints `notice`. The second ends this process at once, or calls `again`
    where that is given. One that is ignored, as nohup has SIGHUP ignored, stays so."""
    heard = []

    def hear(number, _):
        heard.append(number)
        if len(heard) == 1 and notice:
            end_of_bar = "\n" * os.isatty(2)
            with contextlib.suppress(OSError):  # not `print`, which may be what was interrupted
                os.write(1, f"{end_of_bar}{notice}\n".encode())
        if len(heard) > 1 and again is not None:
            again()
        elif len(heard) > 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    wanted = [number for number in STOP if signal.getsignal(number) is not signal.SIG_IGN]
    handlers = {number: signal.signal(number, hear) for number in wanted}
    try:
        yield heard
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def end_with_parent():
    """For a new child process, on Linux: SIGTERM when its parent ends, also where that is killed
    and can tell nobody."""
    if prctl is not None:
        prctl(1, int(signal.SIGTERM))  # PR_SET_PDEATHSIG


def out_of_memory(error):
    """Whether a RuntimeError of PyTorch says that there is no memory left."""
    # the last two on a CPU: PyTorch's allocator, and oneDNN
    words = "can't allocate memory", "could not create a primitive"
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)
