"""A run's directory: what belongs to it, who is at work there, and when it is on the disk."""

import fcntl
import os
import shutil
from pathlib import Path

from formats.adapterhub import ADAPTER, FUSION, HEAD
from formats.tokenizer import TOKENIZER_FILES

RUN_FILES = [
    "resume.pt",
    "metrics.json",
    "config.json",
    *(name for files in (ADAPTER, HEAD, FUSION) for name in (files.config, files.weights[0])),
    "model.safetensors",
    *TOKENIZER_FILES,
    "adapters",
    "heads",
]
TEMPORARY = [f"{name}.tmp" for name in RUN_FILES] + [
    ".tmp??????"
]  # of a killed or failed write; the last is safetensors' own


def check_out(out, needed, overwrite, resume):
    """Raises ValueError if a run cannot be written to `out`. needed: directories, or hub ids, that
    it must not replace."""
    if (out.exists() or out.is_symlink()) and not out.is_dir():
        raise ValueError(f"--out {out} is a file, or a link that leads nowhere")
    if out.is_dir() and any(out.iterdir()) and not (out / "log.jsonl").exists():
        raise ValueError(
            f"--out {out} holds other files than a run's: choose an empty or a new directory"
        )
    for source in needed:
        inside = (
            (Path(source).resolve(), *Path(source).resolve().parents)
            if Path(source).is_dir()
            else ()
        )
        if out.is_dir() and out.resolve() in inside:
            raise ValueError(f"--out {out} would replace {source}, which this run needs")
    if (out / "metrics.json").exists() and not overwrite:
        raise ValueError(
            f"{out} already holds a finished run: choose another --out, or --overwrite it"
        )
    if (out / "resume.pt").exists() and not (overwrite or resume):
        raise ValueError(
            f"{out} holds an interrupted run: continue it with --resume, or --overwrite it"
        )


def clear(out, patterns):
    """Removes a run's files from its directory, and nothing else. log.jsonl stays until the last:
    it marks a directory as a run's, and is locked."""
    for path in [path for pattern in patterns for path in out.glob(pattern)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def resumes(args):
    """Whether there is a state to go on from, and it is wanted."""
    return args.resume and (args.out / "resume.pt").exists()


def check_idle(out):
    """Raises ValueError if another process is at work in a run's directory."""
    if (out / "log.jsonl").exists():
        lock(out, fcntl.LOCK_SH).close()


def lock(out, kind=fcntl.LOCK_EX):
    """log.jsonl, open for appending, and locked until it is closed or the process ends, however it
    ends."""
    out.mkdir(parents=True, exist_ok=True)
    log = open(out / "log.jsonl", "a", buffering=1)  # line by line
    try:
        fcntl.flock(log, kind | fcntl.LOCK_NB)
    except BlockingIOError as e:
        log.close()
        raise ValueError(
            f"another process is at work in {out}: wait for it, or choose another --out"
        ) from e
    except OSError:
        pass  # a file system without locks
    return log


def flush(*paths):
    """Returns when files, and the names in directories, are on the disk."""
    for path in paths:
        if path.is_file() or path.is_dir():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def resolved(source):
    """A directory's absolute path; a hub id as it is."""
    return str(Path(source).resolve()) if Path(source).is_dir() else source
