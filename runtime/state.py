"""The checkpoint from which an interrupted run is resumed: everything that the rest of it depends
on."""

import zipfile

import torch
import torch.distributed as dist

from formats.files import atomic_write
from runtime.processes import rank_and_world_size
from runtime.settings import difference

STATE_FORMAT = 9


def save_state(path, config, state, trainable, optimizer, device, history, seconds):
    """Writes the checkpoint; it is on the disk under another name before it takes the old one's
    place. config: what the run that resumes must have in common with this one; history: the lines
    of the log."""
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
        "config": config,
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
    """Puts what `load_state` has read in place, to the bit."""
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


def load_state(path, config, free, trainable):
    """The checkpoint at `path`, a dictionary. Raises ValueError if it is damaged, of another
    version, of a run that differs from `config` in an entry that is not `free`, or that trains
    other parameters."""
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
    if found := difference(saved["config"], config, free):
        name, before, now = found
        raise ValueError(
            f"{path} belongs to a run with {name} = {before}, not {now}: cannot --resume it, "
            "--overwrite starts anew"
        )
    theirs, ours = (
        {name: list(p.shape) for name, p in parameters.items()}
        for parameters in (saved["trained"], trainable)
    )
    if found := difference(theirs, ours):
        name, before, now = found
        raise ValueError(
            f"{path} belongs to a run whose trained parameter {name} was {before}, not {now}: "
            "cannot --resume it"
        )
    return saved
