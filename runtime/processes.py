"""Devices, several processes as torchrun starts them, and the signals that ask for a stop."""

import contextlib
import os
import signal
import threading

import numpy as np
import torch
import torch.distributed as dist

from formats.files import error_prefix

# {name: whether the processor has it}; {} with a PyTorch that is too old to say it, as 2.9
CPU = getattr(torch.cpu, "get_capabilities", dict)()
STOP = {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}


def choose_device(device, dtype, cuda_graphs=False):
    """("auto", "auto") -> (torch.device, torch.dtype), and PyTorch set up. May raise ValueError."""
    if torch.get_default_dtype() != torch.float32:  # another library may have set it
        raise ValueError("torch.set_default_dtype was called: here it has to be torch.float32")
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if device == "auto":
        device = "cuda" if cuda else "mps" if mps else "cpu"
    if (device == "cuda" and not cuda) or (device == "mps" and not mps):
        raise ValueError(f"--device {device}: there is no such device on this machine")
    if cuda_graphs and device != "cuda":
        raise ValueError("--cuda-graphs is for a GPU of NVIDIA's")
    if device == "cuda" and is_one_of_several():
        number = dist.get_node_local_rank(int(os.environ.get("RANK", 0)))
        torch.cuda.set_device(number % torch.cuda.device_count())
    if device == "cuda":  # cuDNN's attention, the default on an H100, plans anew for every length
        torch.backends.cuda.enable_cudnn_sdp(False)
    if dtype == "auto":
        dtype = "bfloat16" if has_bf16(device) else "float32"
    return torch.device(device), getattr(torch, dtype)


def has_bf16(device):
    """Whether a device ("cpu", "cuda", "mps") computes bfloat16 itself: emulated, it is slower."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device == "cpu" and (CPU.get("avx512_bf16", False) or CPU.get("amx_bf16", False))


def set_deterministic(device):
    """The same bits twice on a GPU, too, or a RuntimeError that names the operation."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # it is only slower


def reseed(*numbers):
    """Makes random numbers a function of these integers, such as seed, epoch, step and process.
    They are mixed, not packed into one number: of a seed, a CPU's generator reads 32 bits."""
    torch.manual_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))


def is_one_of_several():
    """Whether torchrun, deepspeed, or a script for srun or mpirun has started several processes."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def start_processes(device):
    """Connects several processes, each of which comes here. May raise ValueError."""
    if is_one_of_several() and not dist.is_initialized():
        with error_prefix("WORLD_SIZE is set: start several processes with torchrun"):
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")


def ranks():
    """(number of this process, how many there are)"""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def all_reduce(tensor):
    """The sum over all processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def sum_gradients(parameters):
    """Adds up the gradients of all processes, in place: a recorded step goes on adding to these
    tensors. What has no gradient in any process keeps None. parameters: a list, the same in all"""
    if not dist.is_initialized():
        return
    counts = all_reduce(torch.tensor([int(p.grad is not None) for p in parameters])).tolist()
    for p, count in zip(parameters, counts, strict=True):
        if count > 0:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            all_reduce(p.grad)


def gather(found):
    """[found] of every process, in their order. found: any object that can be pickled"""
    every = [found] * ranks()[1]
    if dist.is_initialized():
        dist.all_gather_object(every, found)
    return every


@contextlib.contextmanager
def deferred_signals(notice):
    """A list to which the numbers of the signals that ask for a stop are added, in place of what
    they would do. The first prints `notice`, the second ends this process at once. One that is
    ignored, as SIGHUP under nohup, stays so. Outside the main thread, Python hears none."""
    heard = []

    def hear(number, _):
        heard.append(number)
        if len(heard) > 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if notice:
            with contextlib.suppress(OSError):  # not `print`, which may be what was interrupted
                os.write(1, f"{notice}\n".encode())

    is_main = threading.current_thread() is threading.main_thread()
    wanted = [n for n in STOP if is_main and signal.getsignal(n) is not signal.SIG_IGN]
    handlers = {number: signal.signal(number, hear) for number in wanted}
    try:
        yield heard
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
