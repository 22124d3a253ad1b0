"""The checkpoint from which an interrupted run is resumed: everything that the rest of it depends
on."""

import zipfile

import torch
import torch.distributed as dist

from formats.files import atomic_write
from runtime.processes import rank_and_world_size

STATE_FORMAT = 10


def save_state(path, state, trainable, optimizer, device, history, seconds):
    """Writes the checkpoint; it is on the disk under another name before it takes the old one's
    place. history: the lines of the log."""
    rank, world_size = rank_and_world_size()
    random = torch.get_rng_state()
    if device.type == "cuda":
        random = torch.cat([random, torch.cuda.get_rng_state(device)])
    randoms = [torch.empty_like(random) for _ in range(world_size)]
    dist.all_gather(randoms, random) if world_size > 1 else randoms[0].copy_(random)
    if rank > 0:
        return
    saved = {
        "format": STATE_FORMAT,
        "state": vars(state),
        "trained": {name: p.detach() for name, p in trainable.items()},
        "optimizer": optimizer.state_dict(),
        "random": randoms,  # of every process
        "history": history,
        "seconds": seconds,
    }
    with atomic_write(path) as temporary:
        try:
            with open(temporary, "wb") as file:
                torch.save(saved, file)
        except RuntimeError as e:  # PyTorch's, on top of the OSError of a full disk
            if isinstance(e.__context__, OSError):
                raise e.__context__ from None
            raise


def restore_state(saved, state, trainable, optimizer, device):
    """Puts what `load_state` has read in place, to the bit. Raises ValueError if other parameters
    were trained."""
    before, now = (
        {name: list(p.shape) for name, p in parameters.items()}
        for parameters in (saved["trained"], trainable)
    )
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            shapes = f"{name} was {before.get(name)}, not {now.get(name)}"
            raise ValueError(f"the run's trained parameter {shapes}: cannot --resume it")
    for name, value in saved["state"].items():
        setattr(state, name, value.to(device) if isinstance(value, torch.Tensor) else value)
    with torch.no_grad():
        for name, p in trainable.items():
            p.copy_(saved["trained"][name])
    optimizer.load_state_dict(saved["optimizer"])
    rank, world_size = rank_and_world_size()
    if len(saved["random"]) == world_size:  # otherwise dropout goes on with other numbers
        random, n = saved["random"][rank], len(torch.get_rng_state())
        torch.set_rng_state(random[:n])
        if device.type == "cuda" and len(random) > n:
            torch.cuda.set_rng_state(random[n:], device)


def load_state(path):
    """The checkpoint at `path`, a dictionary. Raises ValueError if it is damaged, or of another
    version."""
    try:
        with zipfile.ZipFile(path) as file:  # torch does not look at the checksums
            if file.testzip() is not None:
                raise ValueError("wrong checksum")
        saved = torch.load(path, map_location="cpu", weights_only=True)
        version = saved.get("format")
    except Exception as e:  # zipfile and torch raise many kinds here
        raise ValueError(
            f"{path} is damaged and cannot be continued: start again with --overwrite"
        ) from e
    if version != STATE_FORMAT:
        raise ValueError(
            f"{path} was written by another version of train.py: continue with that, or "
            "--overwrite it"
        )
    return saved
