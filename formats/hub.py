"""Files from the Hugging Face hub, or from its cache where there is no network."""

import logging
import re
from pathlib import Path

# errors are raised, and reported once; the hub's library logs them too, and retries with a line
# each
logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def download(repo_id, filename, revision=None):
    """Path of one file of a hub repository, from the cache when there is no network; None if it
    has no such file.

    Raises FileNotFoundError if the hub cannot be reached and the cache does not have it, or the id
    is not one."""
    repo_id = str(repo_id)
    if re.match(r"[./~]", repo_id) or repo_id.count("/") > 1 or "\\" in repo_id:  # no hub id
        raise FileNotFoundError(f"there is no directory {repo_id!r}")
    # imported here: most runs read local files, and the library takes half a second to import
    from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        if try_to_load_from_cache(repo_id, filename, revision=revision) is _CACHED_NO_EXIST:
            return None
        return Path(hf_hub_download(repo_id, filename, revision=revision))
    except LocalEntryNotFoundError as e:  # a kind of EntryNotFoundError: must come first
        raise FileNotFoundError(
            f"{repo_id!r} is no local directory, and the Hugging Face hub cannot be reached"
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
