"""Which saved adapters --adapters names, and on which encoder they were trained."""

from pathlib import Path

from formats.adapterhub import ADAPTER, paper_adapters, read
from formats.hub import is_local
from runtime.record import read_run


def find_adapters(sources, model_type):
    """
    {name: directory} of the adapters that --adapters names: runs, AdapterHub directories or hub
    ids, each as DIR or as NAME=DIR, or "paper" for its authors' 16. Raises ValueError if two have
    the same name, FileNotFoundError, which says what to do, for one that is not there.
    """
    if sources == ["paper"]:
        sources = [f"{name}={hub}" for name, hub in paper_adapters(model_type).items()]
    found = {}
    for source in sources:
        name, place = named(source)
        check_there(place)
        saved = read(place, ADAPTER)
        name = name or saved.name
        # RTE and rte are the same directory on some file systems
        if same := [other for other in found if other.lower() == str(name).lower()]:
            advice = f"NAME={place} gives one of them another name"
            raise ValueError(f"two adapters are called {name!r}, {found[same[0]]} too: {advice}")
        found[name] = str(saved.directory)
    return found


def copied_adapters(out, sources):
    """[NAME=DIR] of a run's own copies of its adapters, with which it is resumed, because the
    originals may be gone by now. Raises ValueError if --adapters names others."""
    names = [*read_run(out)["options"]["adapters"]]
    given = [named(source) for source in sources]
    given = [name or (read(p, ADAPTER).name if Path(p).is_dir() else None) for name, p in given]
    known = all(name in (None, one) for name, one in zip(given, names, strict=False))
    if sources != ["paper"] and (len(given) != len(names) or not known):
        raise ValueError(f"{out} was begun with --adapters {', '.join(names)}: cannot --resume it")
    return [f"{name}={out}/adapters/{name}" for name in names]


def named(source):
    """NAME=DIR -> (NAME, DIR); DIR -> (None, DIR)"""
    name, is_named, place = source.partition("=")
    return (name, place) if is_named and not Path(source).is_dir() else (None, source)


def check_there(place):
    """Raises FileNotFoundError for a directory without an adapter."""
    directory = Path(place)
    if directory.is_dir() and not (directory / ADAPTER.config).is_file():
        raise FileNotFoundError(f"{place} has no {ADAPTER.config}: it is no run of --stage adapter")
    if not directory.is_dir() and is_local(place):
        how = f"train it with --stage adapter --task {directory.name:.50}"
        raise FileNotFoundError(f"there is no directory {place!r}: {how}")


def encoder_of(sources):
    """The encoder on which the runs among --adapters were trained, None if none of them says.
    Raises ValueError if they differ, FileNotFoundError for a directory without an adapter."""
    runs = {}
    for source in sources:
        place = named(source)[1]
        check_there(place)
        if run := read_run(place):
            runs.setdefault(run["trained_on"], place)
    if len(runs) > 1:
        found = ", ".join(f"{place} on {model}" for model, place in runs.items())
        raise ValueError(f"--adapters were trained on different encoders ({found}): add --model")
    return next(iter(runs), None)
