"""Files from the Hugging Face hub, or from its cache where there is no network."""

import functools
import logging
import re
import threading
from pathlib import Path

# errors are raised, and reported once; the hub's library logs them too, and retries with a line
# each
logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


SECONDS = 4  # for the hub to answer


def is_local(source):
    """Whether something that is not there was meant as a path: it is no hub id, or begins with a
    directory that is there, or with that of the runs."""
    source = str(source)
    if re.match(r"[./~]", source) or source.count("/") > 1 or "\\" in source:
        return True
    first, slash, _ = source.partition("/")
    return bool(slash) and (first == "runs" or "\0" not in first and Path(first).is_dir())


@functools.cache
def hub_answers():
    """Whether the hub answers within SECONDS, asked once. If not, its libraries are told that there
    is no network: they would try for minutes."""
    import datasets
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    answers = []

    def ask():
        try:
            get_session().head(constants.ENDPOINT, timeout=SECONDS)
            answers.append(True)
        except Exception:  # no name, no route, a proxy's error, time-out: of many kinds
            pass

    thread = threading.Thread(target=ask, daemon=True)  # looking up a name has no time-out
    thread.start()
    thread.join(SECONDS)
    if not answers:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        print(
            f"note: {constants.ENDPOINT} does not answer, so only what has been downloaded before "
            "is used"
        )
    return bool(answers)


def download(repo_id, filename, revision=None):
    """Path of one file of a hub repository, from the cache when there is no network; None if it
    has no such file.

    Raises FileNotFoundError if the hub cannot be reached and the cache does not have it, or the id
    is not one."""
    repo_id = str(repo_id)
    if is_local(repo_id):
        raise FileNotFoundError(f"there is no directory {repo_id!r}")
    # imported here: most runs read local files, and the library takes half a second to import
    from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.constants import ENDPOINT, HF_HUB_CACHE
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        if try_to_load_from_cache(repo_id, filename, revision=revision) is _CACHED_NO_EXIST:
            return None
        hub_answers()
        return Path(hf_hub_download(repo_id, filename, revision=revision))
    except LocalEntryNotFoundError as e:  # a kind of EntryNotFoundError: must come first
        raise FileNotFoundError(
            f"{repo_id!r} is no local directory, not in the cache {HF_HUB_CACHE}, and the "
            f"Hugging Face hub cannot be reached ({ENDPOINT})"
        ) from e
    except EntryNotFoundError:
        return None
    except (
        Exception
    ) as e:  # not found, no access, no id, a broken proxy, a full disk: of many kinds
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise FileNotFoundError(
            f"{repo_id!r} is no local directory, and does not come from the hub: {reason}"
        ) from e


def commit_of(path):
    """The commit that a file of `download` is from: with it, other files fit, and cached ones need
    no network."""
    return path.parent.name if path.parent.parent.name == "snapshots" else None
