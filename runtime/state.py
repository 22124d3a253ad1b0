"""The state from which an interrupted run is resumed: everything that the rest of it depends on."""

import math
import zipfile
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist

from formats.files import atomic_write
from runtime.processes import out_of_memory, rank_and_world_size

STATE_FORMAT = 7

# What may differ between a resumed run and the one that it continues. Everything else that
# config.json records must be the same.
FREE = {
    "patience",
    "grad_accumulation",
    "data_dir",  # the data themselves are compared
    "data_revision",
    "device",
    "compile",
    "threads",
    "processes",
    "versions",
    "python",
    "commit",
    "command",
}


@dataclass
class Progress:
    """Where a run is."""

    epoch: int = 1
    step: int = 0  # of this epoch, done
    loss: float = 0.0  # sum over these steps
    best_epoch: int = 0
    score: float = -math.inf  # of the best epoch
    scores: dict = field(default_factory=dict)  # of the best epoch: {task: {score: value}}
    seconds: float = 0.0


def save_state(path, config, trained, optimizer, device, at, best, history):
    """Writes the state; it is on the disk under another name before it takes the old one's
    place."""
    rank, world = rank_and_world_size()
    random = torch.get_rng_state()
    if device.type == "cuda":
        random = torch.cat([random, torch.cuda.get_rng_state(device)])
    randoms = [torch.empty_like(random) for _ in range(world)]
    dist.all_gather(randoms, random) if world > 1 else randoms[0].copy_(random)
    if rank > 0:
        return
    state = {
        "format": STATE_FORMAT,
        "config": {name: value for name, value in config.items() if name not in FREE},
        "trained": {name: p.detach() for name, p in trained.items()},
        "optimizer": optimizer.state_dict(),
        "random": randoms,
        "progress": asdict(at),
        "best": best,
        "history": history,
    }
    with atomic_write(path) as temporary:
        try:
            with open(temporary, "wb") as file:
                torch.save(state, file)
        except RuntimeError as e:  # PyTorch's, on top of the OSError of a full disk or without one
            if out_of_memory(e):
                raise
            raise OSError(str(e.__context__ or e).splitlines()[0]) from e


def load_state(path, config, trained, optimizer, device):
    """
    (Progress, best, history) of an interrupted run; weights, optimizer and random state are put in
    place.

    Raises ValueError for a damaged state, one of another version of this file, or one of another
    command.
    """
    rank, world = rank_and_world_size()
    try:
        if not path.is_file():
            raise ValueError("a directory or a pipe")
        with zipfile.ZipFile(path) as file:  # torch does not look at the checksums
            if file.testzip() is not None:
                raise ValueError("wrong checksum")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:  # zipfile and torch raise many kinds here
        raise ValueError(
            f"{path} is damaged and cannot be continued: start again with --overwrite"
        ) from e
    if not isinstance(state, dict) or state.get("format") != STATE_FORMAT:
        raise ValueError(
            f"{path} was written by another version of train.py: continue with that, or "
            "--overwrite it"
        )
    if not isinstance(state.get("config"), dict):
        raise ValueError(f"{path} does not say of which run it is: start again with --overwrite")
    for name in [*state["config"], *config]:
        old, new = state["config"].get(name), config.get(name)
        if name not in FREE and old != new:
            raise ValueError(
                f"{path} belongs to a run with {name} = {old}, not {new}: cannot --resume it"
            )
    try:
        with torch.no_grad():
            for name, p in trained.items():
                if state["trained"][name].shape != p.shape:
                    raise ValueError(f"{name} has another shape")
                p.copy_(state["trained"][name])
        optimizer.load_state_dict(state["optimizer"])
        # zeros, where a batch was seen: multi-task training fills gradients, and drops none
        for p in trained.values():
            if p in optimizer.state:
                p.grad = torch.zeros_like(p)
        if len(state["random"]) == world:  # otherwise dropout goes on with other numbers
            random, n = state["random"][rank], len(torch.get_rng_state())
            torch.set_rng_state(random[:n])
            if device.type == "cuda" and len(random) > n:
                torch.cuda.set_rng_state(random[n:], device)
        at, best, history = Progress(**state["progress"]), state["best"], state["history"]
        right = at.best_epoch == 0 or {*best} == {*trained}
        if not right or not all(
            type(value) is type(getattr(Progress(), name)) for name, value in vars(at).items()
        ):
            raise ValueError("its progress")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as e:
        if isinstance(e, RuntimeError) and out_of_memory(e):
            raise
        raise ValueError(
            f"{path} is not what train.py has written, and cannot be continued: start again with "
            f"--overwrite ({e})"
        ) from e
    return at, best, history
