"""Rows of text and labels, as they are written: from .jsonl, .json, .csv, .tsv and .parquet files,
or from the hub; their splits; and the cache of what the rows become, their tokens."""

import csv
import functools
import hashlib
import inspect
import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from formats import hub
from formats.files import file_digest

csv.field_size_limit(10**9)  # texts may be longer than its 131,072 characters


@functools.cache
def import_datasets():
    """The library, imported when it is first needed: it takes more than a second."""
    hub.import_huggingface_hub()
    import datasets

    # Errors are raised, and reported once; downloads are announced by a line.
    logging.getLogger("datasets").setLevel(logging.CRITICAL)
    datasets.disable_progress_bars()
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # no request to a counter elsewhere
    return datasets


class Lines:
    """The lines of a file of UTF-8 text; `number` is that of the last one."""

    def __init__(self, path):
        self.path, self.number = path, 0

    def __iter__(self):
        with open(self.path, "rb") as file:
            for self.number, line in enumerate(file, 1):
                yield line.decode("utf-8-sig" if self.number == 1 else "utf-8")


def jsonl_rows(lines):
    return (json.loads(line.strip()) for line in lines if line.strip())


def json_rows(lines):
    """A list of objects, or else objects in lines, as in .jsonl"""
    text = "".join(lines)
    if not text.lstrip().startswith("["):
        yield from jsonl_rows(lines)
        return
    lines.number = 1  # from where a JSONDecodeError counts
    for lines.number, row in enumerate(json.loads(text), 1):
        yield row


def csv_rows(lines, **dialect):
    table = csv.reader(lines, strict=True, **dialect)
    header = next(table, [])
    if twice := [name for name in header if header.count(name) > 1]:
        raise ValueError(f"two columns are called {twice[0]!r:.100}")
    for cells in table:
        if cells and len(cells) != len(header):
            raise ValueError(f"{len(cells)} fields, the first line has {len(header)}")
        if cells:
            yield dict(zip(header, cells, strict=True))


def parquet_rows(lines):
    """Labels that the file has as numbers beside their names, as `datasets` writes it, by name: the
    file's order is its own."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(lines.path) as file:
        described = json.loads((file.schema_arrow.metadata or {}).get(b"huggingface", "{}"))
        features = described.get("info", {}).get("features", {})
        names = {c: dict(enumerate(f["names"])) for c, f in features.items() if "names" in f}
        for batch in file.iter_batches(1000):
            for row in batch.to_pylist():
                lines.number += 1
                for column, name in names.items():
                    row[column] = name.get(row[column], row[column])
                yield row


READERS = {
    ".jsonl": jsonl_rows,
    ".json": json_rows,
    ".csv": csv_rows,
    ".tsv": functools.partial(csv_rows, delimiter="\t", quoting=csv.QUOTE_NONE),
    ".parquet": parquet_rows,
}


def read_rows(path):
    """(line, row) of a file, one after another: values as they are written, of CSV and TSV all
    texts. line: in which the row ends; in a JSON list and in parquet the row's number. Raises
    ValueError that names file and line."""
    path, lines, row = Path(path), Lines(path), None
    if path.suffix not in READERS:
        raise ValueError(f"{path}: only {', '.join(READERS)} can be read")
    if not path.is_file():  # a pipe would never end
        raise FileNotFoundError(f"{path} is not a file")
    try:
        for row in READERS[path.suffix](lines):
            if not isinstance(row, dict):
                raise ValueError("not a JSON object")
            yield lines.number, row
    except (csv.Error, ValueError, RecursionError, OSError) as e:  # OSError: of a damaged parquet
        line, reason = lines.number, e
        if isinstance(e, json.JSONDecodeError):
            line, reason = line + e.lineno - 1, f"broken JSON: {e.msg} at column {e.colno}"
        raise ValueError(f"{path}, line {line}: {reason}") from e
    if row is None:
        raise ValueError(f"{path} is empty")


def find_file(directory, split, dev="validation", required=True):
    """DIR/TASK/SPLIT.jsonl, .json, .csv, .tsv or .parquet. Others call the validation split dev or
    val, or what `dev` says. Raises FileNotFoundError, or returns None if it is not required."""
    names = [split, dev, "dev", "val"] if split == "validation" else [split]
    for path in (directory / f"{name}{ending}" for name in names for ending in READERS):
        if path.is_file():
            return path
    if not required:
        return None
    found = ", ".join(sorted(path.name for path in directory.glob("*"))) or "nothing"
    hint = "; --dev-fraction 0.1 holds out a tenth of the training examples"
    raise FileNotFoundError(
        f"no {split} split for task {directory.name!r}: there is no {directory / split}.jsonl, "
        f"{directory} has {found:.200}{hint * (split == 'validation')}"
    )


@dataclass(frozen=True)
class Source:
    """The rows of a split: where they are, and what tells them from others."""

    where: str  # in messages
    read: Callable  # () -> (line, row), one after another
    digest: str  # of the content
    files: dict = field(default_factory=dict)  # {name: SHA-256} of local files
    revision: str | None = None  # of the hub's data set
    dev_share: float | int | None = None  # share, or number, of these rows that are for development


def of_files(where, *paths, keep=lambda row: True):
    """The Source of local files. keep: function(row), whether the row belongs to it"""
    files = {path.name: file_digest(path) for path in paths}

    def read():
        return ((line, row) for path in paths for line, row in read_rows(path) if keep(row))

    return Source(str(where), read, repr(files), files)


def of_ukp(directory, split):
    """UKP's corpus as it is distributed: one file a topic, the split in the column `set`."""
    wanted, paths = "val" if split == "validation" else split, sorted(directory.glob("*.tsv"))
    source = of_files(directory, *paths, keep=lambda row: row.get("set") == wanted)
    if not any(source.read()):
        raise FileNotFoundError(f"{directory} has no train.jsonl, nor .tsv files with set {wanted}")
    return source


@functools.cache
def load_from_hub(source, config, revision):
    """{split: rows} of a data set, all of which `datasets` downloads at once."""
    if hub.hub_answers():
        print(f"loading the data set {source} {config or ''} from the hub", flush=True)
    return import_datasets().load_dataset(source, config, revision=revision)


def of_hub(repository, configuration, revision, split):
    where = f"{repository} {configuration or ''}".strip() + f", {split}"
    try:
        rows = load_from_hub(repository, configuration, revision)[split]
    except Exception as e:  # network, hub and format each raise their own kinds
        problem = f"{where} cannot be loaded from the hub ({hub.reason_of(e)})"
        raise FileNotFoundError(f"{problem}; --data-dir takes local files") from e
    commit = Path(rows.cache_files[0]["filename"]).parent.name if rows.cache_files else ""
    revision = commit if re.fullmatch("[0-9a-f]{40}", commit) else revision

    def read():
        tables = rows.with_format("arrow").iter(1000)
        return enumerate((row for table in tables for row in table.to_pylist()), 1)

    return Source(where, read, rows._fingerprint, revision=revision)


def find_split(name, split, data_dir, files, hub, dev, dev_from_train, fraction, held_out):
    """
    The Source of "train", "validation" or another split of the data called `name`: in `files`,
    {split: path}, in `data_dir`/NAME, or in a data set of the hub, (repository, configuration,
    revision), where the development set is called `dev`.

    Where there is no development set, "validation" are training examples, always the same ones, and
    "train" the others: `dev_from_train` of them, or the fraction that is asked for. held_out: see
    `hold_out`. Raises FileNotFoundError, or ValueError for a fraction that is not needed.
    """
    on_hub, dev_file = data_dir is None and not files, files.get("validation")
    if data_dir is not None and not files:
        directory = Path(data_dir) / name
        dev_file = find_file(directory, "validation", dev, required=False)
    if fraction and (dev_file or (on_hub and not dev_from_train)):
        if not held_out:
            where = dev_file or "the hub"
            raise ValueError(f"--dev-fraction: {where} has a development set already")
        fraction = None  # other data than those of the run that held examples out
    dev_share = None
    if not dev_file and split in ("train", "validation"):
        dev_share = fraction or dev_from_train or None
    wanted = "train" if dev_share else split
    if on_hub:
        if hub is None:
            where = "tudatalib.ulb.tu-darmstadt.de/handle/tudatalib/2345 has it, for "
            where = where if name == "argument" else "it needs "
            raise FileNotFoundError(f"{name} is not on the hub; {where}--data-dir")
        source = of_hub(*hub, dev if wanted == "validation" else wanted)
    elif files:
        if wanted not in files:
            raise FileNotFoundError(f"no {wanted} split: --dev-file or --dev-fraction gives one")
        source = of_files(files[wanted], Path(files[wanted]))
    elif name == "argument" and directory.is_dir() and not any(directory.glob("train.*")):
        source = of_ukp(directory, wanted)
    else:
        path = find_file(directory, wanted, dev)
        source = of_files(path, path)
    return replace(source, dev_share=dev_share)


def hold_out(source, examples, split, recorded=None):
    """
    (indices of "train" or "validation" among the examples of one file; digest of the content of
    those held out). `source.dev_share` of the examples are held out, a fraction, or a number, which
    is at most half of them; the draw is the same for every seed. recorded: the digest that an
    earlier run had; raises ValueError if these are others.
    """
    digests = [hashlib.sha256(repr(example).encode()).digest() for example in examples]
    count, share = len(digests), source.dev_share
    drawn = np.random.default_rng(0).permutation(count)
    n = min(share, count // 2) if isinstance(share, int) else round(share * count)
    if not 0 < n < count:
        raise ValueError(f"the development set would be {n} of {count} training examples")
    held = np.sort(drawn[:n])
    digest = hashlib.sha256(b"".join(digests[i] for i in held)).hexdigest()
    if recorded not in (None, digest):
        problem = "the examples that training held out cannot be told from the others"
        raise ValueError(f"{source.where}: {problem}: rows were added, removed or changed since")
    return held if split == "validation" else np.sort(drawn[n:]), digest


def text_of_file(thing):
    """The file in which a class or a function is defined, as text; None where there is none, as for
    those of an interactive session."""
    try:
        return Path(inspect.getfile(thing)).read_text(encoding="utf-8")
    except (OSError, TypeError):
        return None


def cached_tokens(key, code, examples, floats):
    """A datasets.Dataset of tokens, labels and lengths, dictionaries of columns from the function
    `examples`, which `datasets` keeps in its cache: it is called once for each key, as long as the
    files with `code`, classes and functions, stay as they are. floats: whether labels are numbers,
    not indices."""
    import pyarrow

    datasets = import_datasets()
    integer = datasets.Value("int32")
    ids, label = datasets.List(datasets.List(integer)), datasets.Value("float32")
    columns = {"input_ids": ids, "token_type_ids": ids, "length": integer}
    columns["hash"] = datasets.Value("int64")
    features = datasets.Features({**columns, "label": label if floats else integer})
    fingerprint = datasets.fingerprint.Hasher.hash([key, floats, [*map(text_of_file, code)]])
    try:
        return datasets.Dataset.from_generator(examples, features, fingerprint=fingerprint)
    except datasets.exceptions.DatasetGenerationError as e:
        raise e.__cause__ from None  # of `examples`
    except (OSError, pyarrow.ArrowException) as e:
        place = f"remove {datasets.config.HF_DATASETS_CACHE}/generator"
        problem = f"the cache of `datasets` cannot be written, or is damaged ({e})"
        raise OSError(f"{problem}: {place}, or HF_DATASETS_CACHE=DIR names another") from e


def set_origin(tokens, source, held_out):
    """Notes in a split what it was made of."""
    values = {"revision": source.revision, "held_out": held_out}
    tokens.info.description = json.dumps(values)


def origin(split):
    """{"revision": the commit of the hub's data set, or None; "files": {name: SHA-256} of local
    files; "held_out": the digest of the examples held out of the training set, or None} of a split
    from `load_split`."""
    return json.loads(split.info.description)
