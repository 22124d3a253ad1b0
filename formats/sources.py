"""Which saved adapters --adapters names, and on which encoder they were trained."""

from pathlib import Path

from formats.adapterhub import ADAPTER, paper_adapters, read, read_run
from formats.files import is_file, note, read_tensors


def find_adapters(sources, model_type):
    """{name: Saved} of --adapters: runs, AdapterHub directories or hub ids, also as NAME=DIR, or
    "paper". Raises ValueError for a name twice, FileNotFoundError for what is not there."""
    if sources == ["paper"]:
        sources = [f"{name}={hub}" for name, hub in paper_adapters(model_type).items()]
    found = {}
    for source in sources:
        name, place = named(source)
        check_there(place)
        saved = read(place, ADAPTER)
        beside = saved.directory.parent
        run = beside.parent if beside.name == "adapters" else saved.directory
        if is_file(run / "own.safetensors"):  # what else it has trained
            names = ", ".join(read_tensors(run / "own.safetensors"))
            note(f"{run} has more than its adapter, which is used here without {names:.300}")
        name = name or saved.name
        if str(name).lower() in [str(n).lower() for n in found]:  # on some file systems rte is RTE
            raise ValueError(f"two adapters are called {name!r}: NAME={place} gives another name")
        found[name] = saved
    return found


def named(source):
    """NAME=DIR -> (NAME, DIR); DIR -> (None, DIR)"""
    name, is_named, place = source.partition("=")
    return (name, place) if is_named and not Path(source).is_dir() else (None, source)


def check_there(place):
    """Raises FileNotFoundError for a directory without an adapter, or what can be no hub id."""
    directory, parts = Path(place), Path(place).parts
    is_path = str(place)[:1] in ".~" or parts[0] == "runs" or Path(parts[0]).is_dir()
    is_hub_id = len(parts) == 2 and not is_path
    if not is_hub_id and not (directory / ADAPTER.config).is_file():
        advice = "--stage adapter, or --resume, makes one; a hub id is OWNER/NAME"
        if inside := sorted(path.parent for path in directory.glob(f"[!.]*/{ADAPTER.config}")):
            advice = f"there are {', '.join(map(str, inside)):.300}"
        advice = f"it is a file, give {directory.parent}" if directory.is_file() else advice
        raise FileNotFoundError(f"no adapter in {place}: {advice}")


def encoder_of(sources):
    """The encoder of the first run among --adapters, or None. May raise FileNotFoundError."""
    for source in sources if sources != ["paper"] else []:
        place = named(source)[1]
        check_there(place)
        if run := read_run(place):
            return run["trained_on"]
