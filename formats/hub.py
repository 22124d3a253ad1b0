"""Files from the Hugging Face hub, or from its cache where there is no network."""

import functools
import os
import re
import sys
import threading
from pathlib import Path

SECONDS = 4  # for the hub to answer


@functools.cache
def library():
    """`huggingface_hub`, imported when it is first needed: most runs read local files, and it takes
    half a second."""
    if "HF_ENDPOINT" in os.environ:  # `datasets` appends "/datasets/..." to it as it is
        os.environ["HF_ENDPOINT"] = os.environ["HF_ENDPOINT"].rstrip("/")
    import huggingface_hub

    # Errors are raised, and reported once; downloads are announced by a line, since the bars of
    # several files move the cursor.
    huggingface_hub.logging.set_verbosity_error()
    huggingface_hub.utils.disable_progress_bars()
    return huggingface_hub


def is_local(source):
    """Whether something that is not there was meant as a path: it is no hub id, or begins with a
    directory that is there, or with that of the runs."""
    source = str(source)
    if re.match(r"[./~]", source) or source.count("/") > 1 or "\\" in source:
        return True
    first, slash, _ = source.partition("/")
    return bool(slash) and (first == "runs" or Path(first).is_dir())


def reason_of(error):
    """Why a hub's library gave up, in one line: what the hub answered, if that is what is behind
    the error, or else the whole of its message."""
    cause = error
    while cause is not None and getattr(cause, "response", None) is None:
        cause = cause.__cause__ or cause.__context__
    error = cause or error
    return " ".join(str(error).split())[:600] or type(error).__name__


@functools.cache
def hub_answers():
    """Whether the hub answers within SECONDS, whatever it says, asked once. If not, its libraries
    are told that there is no network: they would try for minutes."""
    constants, session = library().constants, library().get_session
    if constants.HF_HUB_OFFLINE:
        return False
    answers = []

    def ask():
        try:
            # a mirror's first page may lead to a host that cannot be reached
            session().head(constants.ENDPOINT, timeout=SECONDS, follow_redirects=False)
            answers.append(True)
        except Exception:  # no name, no route, a proxy's error, time-out: of many kinds
            pass

    thread = threading.Thread(target=ask, daemon=True)  # looking up a name has no time-out
    thread.start()
    thread.join(SECONDS)
    if not answers:
        constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:  # else it reads the constant when it is imported
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True
        note = "does not answer, so only what has been downloaded before is used"
        print(f"note: {constants.ENDPOINT} {note}")
    return bool(answers)


def download(repo_id, filename, revision=None):
    """Path of one file of a hub repository, from the cache when there is no network; None if it
    has no such file. Raises FileNotFoundError for one that cannot be had."""
    repo_id = str(repo_id)
    if is_local(repo_id):
        raise FileNotFoundError(f"there is no directory {repo_id!r}")
    constants = library().constants
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        cached = library().try_to_load_from_cache(repo_id, filename, revision=revision)
        reached = hub_answers()
        known_to_lack_it = cached is library()._CACHED_NO_EXIST
        if known_to_lack_it and (revision or not reached):
            return None  # without a commit: the branch may have it by now
        if cached is None and reached:
            print(f"downloading {filename} of {repo_id}", flush=True)
        return Path(library().hf_hub_download(repo_id, filename, revision=revision))
    except LocalEntryNotFoundError as e:  # an EntryNotFoundError, so it must come first
        reason = f"{constants.ENDPOINT} does not give it: {reason_of(e.__cause__ or e)}"
        if not reached:
            reason = f"the Hugging Face hub cannot be reached ({constants.ENDPOINT})"
        lacks = f"is no local directory, not in the cache {constants.HF_HUB_CACHE}, and {reason}"
        raise FileNotFoundError(f"{repo_id!r} {lacks}") from e
    except EntryNotFoundError:
        return None
    except Exception as e:  # not found, no access, no id, a full disk: of many kinds
        raise FileNotFoundError(
            f"{repo_id!r} is no local directory, and does not come from the hub: {reason_of(e)}"
        ) from e


def commit_of(path):
    """The commit that a file of `download` is from: with it, other files fit, and cached ones need
    no network."""
    return path.parent.name if path.parent.parent.name == "snapshots" else None
