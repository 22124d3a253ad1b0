"""A run's directory: what belongs to it, who is at work there, and when it is on the disk."""

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

from formats.adapterhub import ADAPTER, FUSION, HEAD
from formats.files import read_json
from formats.tokenizer import TOKENIZER_FILES

WEIGHTS = [files.weights[0] for files in (ADAPTER, HEAD, FUSION)] + ["model.safetensors"]
RUN_FILES = [
    *"resume.pt metrics.json config.json log.jsonl adapters heads".split(),
    *(files.config for files in (ADAPTER, HEAD, FUSION)),
    *WEIGHTS,
    *TOKENIZER_FILES,
]
TEMPORARY = [f"{name}.tmp" for name in RUN_FILES]  # of a killed or failed write


def status(out):
    """What a run's directory holds: "finished" (metrics.json), "interrupted" (a state to go on
    from), or None. A metrics.json that a power cut has damaged counts for nothing beside a
    state."""
    has_state = (out / "resume.pt").exists()
    if (out / "metrics.json").exists():
        try:
            if read_json(out / "metrics.json") or not has_state:
                return "finished"
        except (ValueError, OSError):
            if not has_state:
                return "finished"
    return "interrupted" if has_state else None


def is_finished(out):
    return status(out) == "finished"


def resumes(settings):
    """Whether there is a state to go on from, and it is wanted."""
    return settings.resume and status(settings.out) == "interrupted"


def own_copies(settings):
    """[(name, directory)] of the copies of --adapters in --out, where they are to be used: with
    --resume, by an unfinished run always, by a finished one if the originals are gone. Else []."""
    out, sources = settings.out, settings.adapters
    if not sources or not settings.resume or not (out / "config.json").exists():
        return []
    names = read_json(out / "config.json")["adapters"]
    copies = [(name, out / "adapters" / name) for name in names]
    sources_exist = len(copies) == len(sources) and all(Path(path).is_dir() for path in sources)
    return copies if resumes(settings) or not sources_exist else []


def check_out(settings):
    """Raises ValueError if a run cannot be written to settings.out, or would replace what it
    needs."""
    out = settings.out
    if not out.is_dir():
        if os.path.lexists(out):
            raise ValueError(f"--out {out} is a file, or a link that leads nowhere")
        return
    check_run(out)
    for source in [settings.model, *settings.adapters]:
        path = Path(source)
        if path.is_dir() and path.resolve().is_relative_to(out.resolve()):
            raise ValueError(f"--out {out} would replace {source}, which this run needs")
    if settings.overwrite or resumes(settings):
        return
    weights = [name for name in WEIGHTS if os.path.lexists(out / name)]
    held = {
        "finished": "a finished run"
        + " again (--resume once more reads its result)" * settings.resume,
        "interrupted": "an interrupted run, which --resume continues",
        None: f"{weights[0]}, and no metrics.json of a finished run" if weights else None,
    }[status(out)]
    if held is not None:
        raise ValueError(f"{out} holds {held}: choose another --out, or --overwrite it")


def check_run(out):
    """Raises ValueError for a directory that is neither empty nor a run's. A run's has a
    config.json with a stage and a command; of one that was killed before that was written,
    nothing is there."""
    path = out / "config.json"
    if not path.is_file() and [path for path in out.iterdir() if path.name != "config.json.tmp"]:
        raise ValueError(f"--out {out} holds other files than a run's: choose a new directory")
    if path.is_file() and not {"stage", "command"} <= {*read_json(path)}:
        raise ValueError(f"{path} is not a run's, it has no stage or no command: another --out")


@contextlib.contextmanager
def taken(settings):
    """The directory settings.out is this run's, and locked; if it was made for a run that comes to
    nothing, it goes."""
    out, made = settings.out, not settings.out.exists()
    with lock(out):
        try:
            check_out(settings)  # again: another run may have ended here before the lock was ours
            yield
        finally:
            if made and not any(out.iterdir()):
                out.rmdir()


def clear(out, names):
    """Removes a run's files from its directory, and nothing else; what a link in it leads to
    stays."""
    for path in list(out.iterdir()) if out.is_dir() else []:
        if path.name in names:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


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
