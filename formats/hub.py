"""Files from the Hugging Face hub, or from its cache where there is no network."""

import contextlib
import functools
import re
import sys
import threading
from pathlib import Path

SECONDS = 4  # for the hub to answer


@functools.cache
def import_huggingface_hub():
    """The library, imported when it is first needed: most runs read local files, and it takes half
    a second."""
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
    answer = error
    while answer is not None and getattr(answer, "response", None) is None:
        answer = answer.__cause__ or answer.__context__
    return " ".join(str(answer or error).split())[:600] or type(error).__name__


@functools.cache
def hub_answers():
    """Whether the hub answers within SECONDS, whatever it says, asked once. If not, its libraries
    are told that there is no network: they would try for minutes."""
    library = import_huggingface_hub()
    constants, session = library.constants, library.get_session
    if constants.HF_HUB_OFFLINE:
        return False
    answers = []

    def ask():
        with contextlib.suppress(Exception):  # no name, no route, a proxy's error, time-out
            # a mirror's first page may lead to a host that cannot be reached
            session().head(constants.ENDPOINT, timeout=SECONDS, follow_redirects=False)
            answers.append(True)

    thread = threading.Thread(target=ask, daemon=True)  # looking up a name has no time-out
    thread.start()
    thread.join(SECONDS)
    if not answers:
        constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:  # else it reads the constant when it is imported
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True
        so = "so only what has been downloaded before is used"
        print(f"note: {constants.ENDPOINT} does not answer, {so}")
    return bool(answers)


def download(repo_id, filename, revision=None):
    """Path of one file of a hub repository, from the cache when there is no network; None if it
    has no such file. Raises FileNotFoundError for one that cannot be had."""
    repo_id = str(repo_id)
    if is_local(repo_id):
        raise FileNotFoundError(f"there is no directory {repo_id!r}")
    reached, library = hub_answers(), import_huggingface_hub()
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        cached = library.try_to_load_from_cache(repo_id, filename, revision=revision)
        if cached is library._CACHED_NO_EXIST and (revision or not reached):
            return None  # without a commit: the branch may have it by now
        if cached is None and reached:
            print(f"downloading {filename} of {repo_id}", flush=True)
        return Path(library.hf_hub_download(repo_id, filename, revision=revision))
    except Exception as e:  # not found, no access, no id, a full disk: of many kinds
        if isinstance(e, EntryNotFoundError) and not isinstance(e, LocalEntryNotFoundError):
            return None
        hub, cache = library.constants.ENDPOINT, library.constants.HF_HUB_CACHE
        reason = f"does not come from {hub}: {reason_of(e)}"
        if not reached:
            reason = f"is not in the cache {cache}, and {hub} cannot be reached"
        raise FileNotFoundError(f"{repo_id!r} is no local directory, and {reason}") from e


def commit_of(path):
    """The commit that a file of `download` is from: with it, other files fit, and cached ones need
    no network."""
    return path.parent.name if path.parent.parent.name == "snapshots" else None
