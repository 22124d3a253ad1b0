"""A run's directory: what belongs to it, who is at work there, and when it is on the disk."""

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

from formats.adapterhub import ADAPTER, FUSION, HEAD
from formats.files import fsync, read_json
from formats.tokenizer import TOKENIZER_FILES

WEIGHTS = [files.weights[0] for files in (ADAPTER, HEAD, FUSION)] + ["model.safetensors"]
RUN_FILES = [
    *"resume.pt metrics.json config.json log.jsonl adapters heads".split(),
    *(files.config for files in (ADAPTER, HEAD, FUSION)),
    *WEIGHTS,
    *TOKENIZER_FILES,
]
# of a killed or failed write
TEMPORARY = [*(f"{name}.tmp" for name in RUN_FILES), "forgotten.tmp"]

# With --overwrite the old run waits here until the new one has finished an epoch. The first is its
# name while the files are on their way there or back.
MOVING, REPLACED, FORGOTTEN = "replaced.tmp", "replaced", "forgotten.tmp"


def check_out(out, needed, overwrite, resume):
    """Raises ValueError if a run cannot be written to `out`. needed: directories, or hub ids, that
    it must not replace."""
    if not out.is_dir():
        if os.path.lexists(out):
            raise ValueError(f"--out {out} is a file, or a link that leads nowhere")
        return
    check_run(out)
    for source in needed:
        path = Path(source)
        if path.is_dir() and path.resolve().is_relative_to(out.resolve()):
            raise ValueError(f"--out {out} would replace {source}, which this run needs")
    if overwrite:
        return
    if is_finished(out):
        held = "a finished run" + " again (--resume once more reads its result)" * resume
    elif (out / "resume.pt").exists():
        held = None if resume else "an interrupted run, which --resume continues"
    else:
        weights = [name for name in WEIGHTS if os.path.lexists(out / name)]
        held = f"{weights[0]}, and no metrics.json of a finished run" if weights else None
    if held is not None:
        raise ValueError(f"{out} holds {held}: choose another --out, or --overwrite it")


def check_run(out):
    """Raises ValueError for a directory that is neither empty nor a run's. A run's has a
    config.json with a stage and a command; of one that was killed before that was written,
    nothing is there."""
    places = [out / name / "config.json" for name in ("", MOVING, REPLACED)]
    path = next((path for path in places if path.is_file()), None)
    if path is None and [path for path in out.iterdir() if path.name != "config.json.tmp"]:
        raise ValueError(f"--out {out} holds other files than a run's: choose a new directory")
    if path is not None and not {"stage", "command"} <= {*read_json(path)}:
        raise ValueError(f"{path} is not a run's, it has no stage or no command: another --out")


def is_finished(out):
    """Whether `out` holds a finished run: with metrics.json. One that a power cut has damaged
    counts for nothing beside a state from which the run can be finished."""
    if not (out / "metrics.json").exists():
        return False
    try:
        return bool(read_json(out / "metrics.json"))
    except (ValueError, OSError):
        return not (out / "resume.pt").exists()


@contextlib.contextmanager
def taken(settings):
    """The directory settings.out is this run's: locked, and a run that was set aside comes back if
    this one comes to nothing."""
    out, made = settings.out, not settings.out.exists()
    with lock(out):
        try:
            put_back(out)
            # again: another run may have ended here before the lock was ours
            needed = [settings.model, *settings.adapters]
            check_out(out, needed, settings.overwrite, settings.resume)
            yield
        finally:
            put_back(out)
            if made and not any(out.iterdir()):
                out.rmdir()


def resumes(settings):
    """Whether there is a state to go on from, and it is wanted."""
    return settings.resume and (settings.out / "resume.pt").exists()


def clear(out, names):
    """Removes a run's files from its directory, and nothing else; what a link in it leads to
    stays."""
    for path in list(out.iterdir()) if out.is_dir() else []:
        if path.name in names:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def set_aside(out):
    """Moves the run in `out` into the directory REPLACED, where `put_back` finds it. What waits
    there already is a finished run, and what is in `out` has not come as far."""
    if (out / REPLACED).is_dir():
        return clear(out, RUN_FILES)
    (out / MOVING).mkdir()
    for name in RUN_FILES:
        if os.path.lexists(out / name):
            (out / name).rename(out / MOVING / name)
    (out / MOVING).rename(out / REPLACED)
    fsync(out)


def put_back(out):
    """Puts the run that was set aside back, unless the new one is at work with a state of its own,
    or finished. Also after a kill at any moment of set_aside or of this."""
    if (out / REPLACED).is_dir():
        if (out / "metrics.json").exists():
            return forget_replaced(out)
        if (out / "resume.pt").exists():
            return
        clear(out, RUN_FILES)
        (out / REPLACED).rename(out / MOVING)
    if (out / MOVING).is_dir():
        for path in (out / MOVING).iterdir():
            path.rename(out / path.name)
        (out / MOVING).rmdir()


def forget_replaced(out):
    """The old run goes, all of it at once."""
    if (out / REPLACED).is_dir():
        (out / REPLACED).rename(out / FORGOTTEN)
        shutil.rmtree(out / FORGOTTEN)


@contextlib.contextmanager
def lock(out):
    """The directory is this process's until the block, or the process, ends, however it ends.
    Raises ValueError if it is another's."""
    out.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        os.close(descriptor)
        raise ValueError(
            f"another process is at work in {out}: wait for it, or choose another --out"
        ) from e
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        os.close(descriptor)
