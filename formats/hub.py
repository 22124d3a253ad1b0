"""Files from the Hugging Face hub, or from its cache where there is no network."""

import functools
from pathlib import Path

from formats.files import note


def is_local(source):
    """Whether something that is not there was meant as a path: it is no hub id, or begins with a
    directory that is there, or with that of the runs."""
    first, slash, rest = str(source).partition("/")
    is_path = first[:1] in ".~" or "/" in rest or "\\" in first
    return is_path or (bool(slash) and (first == "runs" or Path(first).is_dir()))


@functools.cache
def hub_library():
    """huggingface_hub, imported when it is needed, which takes half a second. It, and `datasets`,
    would wait for a silent hub without end: after four seconds they are told to be offline."""
    import huggingface_hub

    huggingface_hub.logging.set_verbosity_error()  # errors are raised, and reported once
    huggingface_hub.utils.disable_progress_bars()
    hub = huggingface_hub.constants
    try:
        if not hub.HF_HUB_OFFLINE:
            huggingface_hub.get_session().head(hub.ENDPOINT, timeout=4, follow_redirects=False)
    except Exception:  # no name, no route, a proxy's error, no answer
        hub.HF_HUB_OFFLINE = True
        note(f"{hub.ENDPOINT} does not answer, so only its cache is used")
    return huggingface_hub


def download(repo_id, *patterns):
    """The local directory with those files of a hub repository whose names fit the patterns."""
    if is_local(repo_id):
        raise FileNotFoundError(f"there is no directory {str(repo_id)!r}")
    hub = hub_library()
    print(f"loading {', '.join(patterns)} of {repo_id} from the hub, or its cache", flush=True)
    try:
        return Path(hub.snapshot_download(repo_id, allow_patterns=patterns))
    except Exception as e:  # no network, not found, no access, no id, a full disk: of many kinds
        reason = " ".join(str(e).split())[:300] or type(e).__name__
        places = f"at {hub.constants.ENDPOINT} nor in its cache, {hub.constants.HF_HUB_CACHE}"
        raise FileNotFoundError(f"{repo_id} is no directory, nor {places} ({reason})") from e
