"""Files from the Hugging Face hub, or from its cache where there is no network."""

import functools
import re
from pathlib import Path


def is_local(source):
    """Whether something that is not there was meant as a path: it is no hub id, or begins with a
    directory that is there, or with that of the runs."""
    source = str(source)
    if re.match(r"[./~]", source) or source.count("/") > 1 or "\\" in source:
        return True
    first, slash, _ = source.partition("/")
    return bool(slash) and (first == "runs" or Path(first).is_dir())


@functools.cache
def hub_library():
    """huggingface_hub, imported when it is first needed: that takes half a second, and most runs
    read local files. If the hub does not answer within four seconds, the library is told that there
    is no network, and so is `datasets`, if it is imported later: they would try for minutes."""
    import huggingface_hub

    huggingface_hub.logging.set_verbosity_error()  # errors are raised, and reported once
    huggingface_hub.utils.disable_progress_bars()
    hub = huggingface_hub.constants
    try:
        if not hub.HF_HUB_OFFLINE:
            huggingface_hub.get_session().head(hub.ENDPOINT, timeout=4, follow_redirects=False)
    except Exception:  # no name, no route, a proxy's error, no answer
        hub.HF_HUB_OFFLINE = True
        print(f"note: {hub.ENDPOINT} does not answer, so only its cache is used", flush=True)
    return huggingface_hub


def download(repo_id, *patterns):
    """The local directory with those files of a hub repository whose names fit the patterns. Raises
    FileNotFoundError where they cannot be had."""
    if is_local(repo_id):
        raise FileNotFoundError(f"there is no directory {str(repo_id)!r}")
    huggingface_hub = hub_library()
    print(f"loading {', '.join(patterns)} of {repo_id} from the hub, or its cache", flush=True)
    try:
        return Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=patterns))
    except Exception as e:  # no network, not found, no access, no id, a full disk: of many kinds
        reason = " ".join(str(e).split())[:300] or type(e).__name__
        hub, cache = huggingface_hub.constants.ENDPOINT, huggingface_hub.constants.HF_HUB_CACHE
        where = f"does not come from {hub}, nor from the cache {cache}"
        raise FileNotFoundError(
            f"{str(repo_id)!r} is no local directory, and {where} ({reason})"
        ) from e
