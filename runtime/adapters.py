"""Which saved adapters a command takes, and on which encoder they were trained."""

from pathlib import Path

from formats.adapterhub import ADAPTER, fetch, paper_adapters, read_adapter_config
from formats.hub import is_local
from runtime.record import encoder_of_adapter, record_around


def find_adapter(source):
    """The local directory of an adapter; a hub id is downloaded first. Raises FileNotFoundError,
    which says what to do."""
    directory = Path(source)
    if directory.is_dir() and not (directory / ADAPTER.config).is_file():
        _, record = record_around(directory)
        hint = f": it is a run of --stage {record.stage}" if record else ""
        if record and record.stage == "multitask" and (directory / "adapters").is_dir():
            hint = f": its adapters are in {source}/adapters"
        raise FileNotFoundError(f"{source} has no {ADAPTER.config}{hint}")
    if not directory.is_dir() and is_local(source):
        how = f"train it with --stage adapter --task {directory.name:.50}"
        raise FileNotFoundError(f"there is no directory {str(source)!r}: {how}")
    return fetch(source)


def check_encoder(source, directory, values, model, digest):
    """Raises ValueError if a saved adapter was trained on another encoder than `model`, whose
    weights have this digest. An adapter that comes from no run records only
    its encoder's name, which says little where `model` is a directory: then a different name is
    only noted."""
    trained_on = Path(str(values.get("model_name") or model)).name
    theirs = encoder_of_adapter(directory)
    if theirs is not None and theirs != digest:
        raise ValueError(f"{source} was trained on an encoder with other weights than {model}")
    if theirs is None and trained_on != Path(model).name:
        problem = f"{source} was trained on {trained_on!r:.100}, not on {model}"
        if not Path(model).is_dir():
            raise ValueError(problem)
        print(f"note: {problem}")


def check_unchanged(directory):
    """Raises ValueError if the files of a run's adapter are not those with which the run ended."""
    run, record = record_around(directory)
    if record is not None:
        inside = Path(directory).absolute().relative_to(run)
        record.check_files(
            run, {(inside / name).as_posix() for name in (ADAPTER.config, *ADAPTER.weights)}
        )


def resolve_adapters(sources, encoder, model, digest):
    """{name: directory} of saved adapters that are to be fused. sources: directories, hub ids,
    pairs (name, directory), or "paper" for its authors' 16; encoder: its configuration, model: its
    name, digest: that of its weights. Raises ValueError if two have the same name, or if one was
    trained on another encoder or has changed since; FileNotFoundError for one that is not there."""
    pairs, found = [], {}
    for source in sources:
        pair = source if isinstance(source, tuple) else (None, source)
        pairs += paper_adapters(encoder.model_type) if source == "paper" else [pair]
    for name, source in pairs:
        directory = find_adapter(source)
        name, _, values = read_adapter_config(directory, name)
        # RTE and rte are the same directory on some file systems
        same = [d for other, d in found.items() if other.lower() == name.lower()]
        if same:
            raise ValueError(f"two adapters are called {name!r}: {same[0]} and {directory}")
        check_encoder(source, directory, values, model, digest)
        check_unchanged(directory)
        found[name] = directory
    return found


def encoder_of_runs(sources):
    """The encoder that the runs among `sources` have recorded; None if none has. Raises ValueError
    if they differ, FileNotFoundError for a directory without an adapter."""
    models = {}
    for source in sources:
        if is_local(source):
            find_adapter(source)  # raises FileNotFoundError if there is none
        run, record = record_around(source)
        if record:
            model = str(run) if record.weights_sha256 else record.options["model"]
            models.setdefault(model, source)
    if len(models) > 1:
        found = ", ".join(f"{source} on {model}" for model, source in models.items())
        raise ValueError(f"--adapters were trained on different encoders ({found}): add --model")
    return next(iter(models), None)
