"""The checkpoint from which an interrupted run is resumed: everything that the rest of it depends
on."""

import zipfile
from dataclasses import dataclass

import torch
import torch.distributed as dist

from formats.files import atomic_write
from runtime.processes import out_of_memory, rank_and_world_size
from runtime.settings import difference

STATE_FORMAT = 8


@dataclass
class Saved:
    """What a checkpoint holds."""

    state: dict  # the fields of the state of the training loop
    trained: dict  # {name: tensor}
    optimizer: dict
    random: list  # of every process
    history: list  # the lines of the log
    seconds: float

    def restore(self, state, trained, optimizer, device):
        """Puts it in place, to the bit."""
        for name, value in self.state.items():
            setattr(state, name, value.to(device) if isinstance(value, torch.Tensor) else value)
        with torch.no_grad():
            for name, p in trained.items():
                p.copy_(self.trained[name])
        optimizer.load_state_dict(self.optimizer)
        # zeros, where a batch was seen: multi-task training fills gradients, and drops none
        for p in trained.values():
            if p in optimizer.state:
                p.grad = torch.zeros_like(p)
        rank, world_size = rank_and_world_size()
        if len(self.random) == world_size:  # otherwise dropout goes on with other numbers
            random, n = self.random[rank], len(torch.get_rng_state())
            torch.set_rng_state(random[:n])
            if device.type == "cuda" and len(random) > n:
                torch.cuda.set_rng_state(random[n:], device)


def save_state(path, config, state, trained, optimizer, device, history, seconds):
    """Writes the checkpoint; it is on the disk under another name before it takes the old one's
    place. config: what the run that resumes must have in common with this one."""
    rank, world_size = rank_and_world_size()
    random = torch.get_rng_state()
    if device.type == "cuda":
        random = torch.cat([random, torch.cuda.get_rng_state(device)])
    randoms = [torch.empty_like(random) for _ in range(world_size)]
    dist.all_gather(randoms, random) if world_size > 1 else randoms[0].copy_(random)
    if rank > 0:
        return
    saved = Saved(
        vars(state),
        {name: p.detach() for name, p in trained.items()},
        optimizer.state_dict(),
        randoms,
        history,
        seconds,
    )
    with atomic_write(path) as temporary:
        try:
            with open(temporary, "wb") as file:
                torch.save({"format": STATE_FORMAT, "config": config, **vars(saved)}, file)
        except RuntimeError as e:  # PyTorch's, on top of the OSError of a full disk
            if out_of_memory(e):
                raise
            raise OSError(str(e.__context__ or e).splitlines()[0]) from e


def load_state(path, config, free):
    """The Saved checkpoint at `path`. Raises ValueError if it is damaged, of another version, or of
    a run that differs from `config` in an entry that is not `free`."""
    try:
        with zipfile.ZipFile(path) as file:  # torch does not look at the checksums
            if file.testzip() is not None:
                raise ValueError("wrong checksum")
        saved = torch.load(path, map_location="cpu", weights_only=True)
        version, old = saved.pop("format", None), saved.pop("config", {})
    except Exception as e:  # zipfile and torch raise many kinds here
        raise ValueError(
            f"{path} is damaged and cannot be continued: start again with --overwrite"
        ) from e
    if version != STATE_FORMAT:
        raise ValueError(
            f"{path} was written by another version of train.py: continue with that, or "
            "--overwrite it"
        )
    if found := difference(old, config, free):
        name, before, now = found
        raise ValueError(
            f"{path} belongs to a run with {name} = {before}, not {now}: cannot --resume it"
        )
    return Saved(**saved)
