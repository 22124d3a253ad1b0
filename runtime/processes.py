"""Devices, several processes as torchrun starts them, and the signals that ask for a stop."""

import contextlib
import os
import signal

import numpy as np
import torch
import torch.distributed as dist


def choose_device(device, dtype, cuda_graphs=False):
    """("auto", "auto") -> (torch.device, torch.dtype), and PyTorch set up for it. Raises ValueError
    for a device that is not there, or that cannot record."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    available |= {"cpu": True}
    if device == "auto":
        device = next(name for name in available if available[name])
    if not available[device]:
        raise ValueError(f"--device {device}: there is no such device on this machine")
    if cuda_graphs and device != "cuda":
        raise ValueError("--cuda-graphs is for a GPU of NVIDIA's")
    if device == "cuda" and dist.is_torchelastic_launched():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if device == "cuda":  # cuDNN's attention, the default on an H100, plans anew for every length
        torch.backends.cuda.enable_cudnn_sdp(False)
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" and torch.cuda.is_bf16_supported() else "float32"
    return torch.device(device), getattr(torch, dtype)


def make_deterministic(device):
    """The same bits twice on a GPU, too; for training, before its first product. An operation that
    has no such form raises RuntimeError, which names it."""
    if device.type != "cuda":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it is only slower


def ranks():
    """(number of this process, how many there are)"""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def all_reduce(tensor):
    """The sum over all processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def gather(found):
    """[what each process has found]"""
    everything = [found] * ranks()[1]
    if dist.is_initialized():
        dist.all_gather_object(everything, found)
    return everything


def sum_gradients(parameters):
    """The sum over all processes, in place. One without a gradient in any of them keeps None."""
    if not dist.is_initialized():
        return
    parameters = [*parameters]
    device = parameters[0].device
    has = all_reduce(torch.tensor([float(p.grad is not None) for p in parameters], device=device))
    used = [p for p, count in zip(parameters, has.tolist(), strict=True) if count]
    for p in used:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    if not used:
        return
    sums = all_reduce(torch.cat([p.grad.flatten() for p in used]))
    for p, part in zip(used, sums.split([p.numel() for p in used]), strict=True):
        p.grad.copy_(part.view_as(p))


def reseed(*numbers):
    """Torch's random numbers become a function of these integers."""
    torch.manual_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))


STOP = {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}


@contextlib.contextmanager
def deferred_signals(notice=""):
    """A list to which the numbers of the signals that ask for a stop are added, in place of what
    they would do. The first prints `notice`, the second ends this process at once. One that is
    ignored, as SIGHUP under nohup, stays so."""
    heard = []

    def hear(number, _):
        heard.append(number)
        if len(heard) == 1 and notice:
            with contextlib.suppress(OSError):  # not `print`, which may be what was interrupted
                os.write(1, f"{notice}\n".encode())
        if len(heard) > 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    wanted = [number for number in STOP if signal.getsignal(number) is not signal.SIG_IGN]
    handlers = {number: signal.signal(number, hear) for number in wanted}
    try:
        yield heard
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
