"""Files from the Hugging Face hub, or from its cache where there is no network."""

import functools
from pathlib import Path

from formats.files import note


@functools.cache
def hub_library():
    """(huggingface_hub, why the hub cannot be reached, or ""). For a hub that does not answer, it
    and `datasets` would wait for ever. So after four seconds they are told to be offline."""
    import huggingface_hub

    huggingface_hub.logging.set_verbosity_error()  # errors are raised, and reported once
    huggingface_hub.utils.disable_progress_bars()
    hub, problem = huggingface_hub.constants, ""
    try:
        if not hub.HF_HUB_OFFLINE:
            huggingface_hub.get_session().head(hub.ENDPOINT, timeout=4, follow_redirects=False)
    except Exception as e:  # no name, no route, a proxy's error, a certificate, no answer
        hub.HF_HUB_OFFLINE, problem = True, f"{type(e).__name__}: {e}"
        note(f"{hub.ENDPOINT} does not answer ({problem}), so only its cache is used")
    return huggingface_hub, problem


def download(repo_id, *patterns):
    """The local directory with those files of a hub repository whose names fit the patterns."""
    hub, problem = hub_library()
    print(f"loading {', '.join(patterns)} of {repo_id} from the hub, or its cache", flush=True)
    try:
        return Path(hub.snapshot_download(repo_id, allow_patterns=patterns))
    except Exception as e:  # no network, not found, no access, no id, a full disk: of many kinds
        places = f"at {hub.constants.ENDPOINT} nor in its cache, {hub.constants.HF_HUB_CACHE}"
        raise FileNotFoundError(f"{repo_id} is no directory, nor {places} ({problem or e})") from e
