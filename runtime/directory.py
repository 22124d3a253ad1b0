"""A run's directory: what belongs to it, who is at work there, and when it is on the disk."""

import contextlib
import os
import shutil
from pathlib import Path

from filelock import FileLock, Timeout

from formats.adapterhub import ADAPTER, FUSION, HEAD
from formats.tokenizer import TOKENIZER_FILES
from runtime.record import is_run, read_record

WEIGHTS = [*(files.weights[0] for files in (ADAPTER, HEAD, FUSION)), "model.safetensors"]
RUN_FILES = [
    *"resume.pt metrics.json config.json log.jsonl adapters heads".split(),
    *(files.config for files in (ADAPTER, HEAD, FUSION)),
    *WEIGHTS,
    *TOKENIZER_FILES,
]
LOCK = ".lock"
TEMPORARY = [f"{name}.tmp" for name in RUN_FILES]  # of a killed or failed write


def status(out):
    """What a run's directory holds: "finished" (metrics.json, which is written last),
    "interrupted" (a state to go on from), or None."""
    if (out / "metrics.json").exists() and (out / "config.json").exists():
        return "finished"
    return "interrupted" if (out / "resume.pt").exists() else None


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
    copies = [(name, out / "adapters" / name) for name in read_record(out).loaded_adapters]
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
    ended = ", which another process has just ended: --resume shows its result" * settings.resume
    held = {
        "finished": f"a finished run{ended}",
        "interrupted": "an interrupted run, which --resume continues",
        None: next((name for name in WEIGHTS if (out / name).exists()), None),  # of a copy
    }[status(out)]
    if held is not None:
        raise ValueError(f"{out} holds {held}: choose another --out, or --overwrite it")


def check_run(out):
    """Raises ValueError for a directory that is neither empty nor a run's. Of a run that was killed
    before its config.json was written, nothing else is there."""
    if (out / "config.json").is_file():
        if not is_run(out):
            where = f"{out}/config.json is not a run's, it has no stage or no command"
            raise ValueError(f"{where}: choose another --out")
    elif {path.name for path in out.iterdir()} - {"config.json.tmp", LOCK}:
        raise ValueError(f"--out {out} holds other files than a run's: choose a new directory")


@contextlib.contextmanager
def locked(settings):
    """The directory settings.out is this run's until the block, or the process, ends, however it
    ends. If it was made for a run that comes to nothing, it goes. Raises ValueError if another
    process is at work there."""
    out, made = settings.out, not settings.out.exists()
    out.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(out / LOCK, timeout=0):
            try:
                check_out(settings)  # again: another run may have ended here meanwhile
                yield
            finally:
                with contextlib.suppress(OSError):  # Windows, where it is open
                    (out / LOCK).unlink()  # filelock looks whether its file is still there
    except Timeout as e:
        raise ValueError(
            f"another process is at work in {out}: wait for it, or choose another --out"
        ) from e
    finally:
        if made and not any(out.iterdir()):
            out.rmdir()


def clear(out, names):
    """Removes a run's files from its directory, in this order, and nothing else; what a link in it
    leads to stays."""
    for path in (out / name for name in names):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
