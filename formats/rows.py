"""Rows of text and labels: from .jsonl, .json, .csv, .tsv and .parquet files, or from the hub, by
`datasets`."""

import contextlib
import csv
import errno
import functools
import glob
import hashlib
import json
import logging
import os
import re
import sys
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np

from formats.hub import hub_answers

READERS = {
    ".jsonl": ("json", {}),
    ".json": ("json", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"delimiter": "\t", "quoting": csv.QUOTE_NONE}),
    ".parquet": ("parquet", {}),
}
csv.field_size_limit(10**9)  # longer texts than 131,072 characters are refused later, or cut


@functools.cache
def library():
    """`datasets`, imported when the first rows are read: it takes more than a second, for which
    --help and a wrong option should not wait."""
    import datasets

    # errors are raised, and reported once; `datasets` logs them too
    logging.getLogger("datasets").setLevel(logging.CRITICAL)
    if sys.stderr is None or not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets


def read_file(directory, task_name, split, other_name=None):
    """(path, rows) of DIR/TASK/SPLIT.jsonl, .json, .csv, .tsv or .parquet. Raises
    FileNotFoundError, or ValueError with file and line."""
    if not directory.is_dir():
        raise FileNotFoundError(f"no data for task {task_name!r}: {directory} is not a directory")
    path = find_file(directory, split, other_name)
    if path is None:
        hint = "; --dev-fraction 0.1 holds a tenth of the training examples out"
        raise FileNotFoundError(
            f"no {split} split for task {task_name!r}: there is no {directory / split}.jsonl"
            f"{hint * (split == 'validation')}"
        )
    return path, with_names(read_rows([path]))


def with_names(rows):
    """Labels that a file has as numbers beside their names, as `datasets` writes it, by name: the
    file's order is its own."""
    for column, feature in rows.features.items():
        if isinstance(feature, library().ClassLabel):
            names = dict(enumerate(feature.names))
            texts = [
                value if value is None else names.get(value, str(value)) for value in rows[column]
            ]
            key = f"{rows._fingerprint}-{column}"
            rows = rows.remove_columns(column, new_fingerprint=key)
            rows = rows.add_column(column, texts, new_fingerprint=f"{key}-names")
    return rows


def by_content(path):
    """A link to a file, which is called by the file's content. The cache of `datasets` goes by path
    and time, so it finds what it has read before, and nothing else. Nor does it take a link's name
    for an address or a pattern, as it does with $HOME and ::."""
    with open(path, "rb") as file:
        name = hashlib.file_digest(file, "sha256").hexdigest()
    place = Path(library().config.HF_DATASETS_CACHE) / "by_content"
    place.mkdir(parents=True, exist_ok=True)
    link, new = place / f"{name}{path.suffix}", place / f"{name}.{os.getpid()}"
    new.unlink(missing_ok=True)
    new.symlink_to(path.absolute())
    if os.utime in os.supports_follow_symlinks:
        os.utime(new, (0, 0), follow_symlinks=False)
    new.replace(link)
    return link


def find_file(directory, split, other_name=None):
    """The file of a split, None if there is none. Others call the validation split dev or val."""
    names = [split, *([other_name] if other_name else [])]
    names += ["dev", "val"] if split == "validation" else []
    paths = [directory / f"{name}{ending}" for name in names for ending in READERS]
    return next((path for path in paths if path.is_file()), None)


def held_out(count, split, part):
    """The places of "train" or "validation" among the rows of one file, in their order. part: of
    the development set, a fraction, or a number, which is at most half of the file. The draw is the
    same for every seed."""
    drawn = np.random.default_rng(0).permutation(count)
    n = min(part, count // 2) if isinstance(part, int) else round(part * count)
    if not 0 < n < count:
        asked = "the development set" if isinstance(part, int) else f"--dev-fraction {part}"
        raise ValueError(f"{asked} would be all or none of {count} training examples")
    return np.sort(drawn[:n] if split == "validation" else drawn[n:])


def read_rows(paths):
    """The rows of files of one kind. Raises ValueError naming file and line if they cannot be read
    or are empty."""
    datasets, path, reader = library(), paths[0], READERS[paths[0].suffix][0]
    options = options_of(path)
    if reader == "json":
        check_json(path)
    if reader == "csv":  # every cell is text: 007 and 1.10 are not 7 and 1.1
        names = [check_table(path, options) for path in paths][0]
        text = datasets.Features(dict.fromkeys(names, datasets.Value("string")))
        options = {
            **options,
            "keep_default_na": False,
            "names": names,
            "header": 0,
            "features": text,
        }
    with naming_the_cache():
        files = [glob.escape(str(by_content(path))) for path in paths]
    given = {"path": reader, "data_files": files, "split": "train", **options}
    try:
        with naming_the_cache():
            try:
                rows = datasets.load_dataset(**given)
            except Exception as e:
                if isinstance(e, OSError) or isinstance(e.__cause__, OSError):
                    raise
                if reader == "json":
                    check_json(path, thorough=True)  # it is the file
                # or what the cache has of it, which is then made anew, once
                rows = datasets.load_dataset(**given, download_mode="force_redownload")
            if reader == "json" and any(has_times(kind) for kind in rows.features.values()):
                rows = as_written(path, rows)
    except CacheError:
        raise
    except Exception as e:  # each format raises its own kinds
        if reader == "json":
            check_json(path, thorough=True)
        if path.stat().st_size == 0 or "corresponds to no data" in str(e):
            raise ValueError(f"{path} is empty") from e
        reason = str(e.__cause__ or e).strip().splitlines()
        reason = reason[0] if reason else repr(e)
        raise ValueError(f"{path}: not a readable {path.suffix[1:]} file: {reason:.200}") from e
    if len(rows) == 0:
        raise ValueError(f"{path} is empty")
    return rows


def options_of(path):
    """How a file is to be read. A .csv file whose first line has semicolons and no comma is
    separated by semicolons, as spreadsheets write it where the comma is a decimal sign."""
    options = READERS[path.suffix][1]
    if path.suffix == ".csv" and path.is_file():
        with open(path, encoding="utf-8-sig", errors="replace") as file:
            first = file.readline()
        if ";" in first and "," not in first:
            return {**options, "delimiter": ";"}
    return options


class CacheError(OSError):
    """It is the cache of `datasets` that is at fault, not a file of data."""


@contextlib.contextmanager
def naming_the_cache():
    """Turns what a full or read-only disk, or a limit, does to the cache into a CacheError."""
    try:
        yield
    except Exception as e:
        error = e.__cause__ if isinstance(e.__cause__, (OSError, RuntimeError)) else e
        cache = library().config.HF_DATASETS_CACHE
        number = getattr(error, "errno", None)
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG):
            raise CacheError(
                f"the cache of `datasets`, {cache}, cannot be written: {os.strerror(number)}; the "
                "environment variable HF_DATASETS_CACHE names another"
            ) from e
        inside = str(cache) in str(getattr(error, "filename", None) or "")
        if inside and isinstance(error, OSError):
            raise CacheError(
                f"the cache of `datasets` cannot be written: {error}; the environment variable "
                "HF_DATASETS_CACHE names another"
            ) from e
        if "can't start new thread" in str(error):
            raise CacheError("no more threads can be started: raise the limit, ulimit -u") from e
        raise


def has_times(kind):
    """Whether a feature is a time, or a list or an object with one."""
    if isinstance(kind, library().Value):
        return kind.dtype.startswith(("timestamp", "date", "time", "duration"))
    inside = kind.values() if isinstance(kind, dict) else [getattr(kind, "feature", None)]
    return any(has_times(part) for part in inside if part is not None)


def as_written(path, rows):
    """The rows of a JSON file in which `datasets` has taken texts for times, 2020-01-31 for
    instance. They are texts."""
    text = path.read_text(encoding="utf-8-sig")
    is_list = path.suffix == ".json" and text.startswith("[")
    values = json.loads(text) if is_list else [json.loads(x) for x in text.split("\n") if x.strip()]
    result = library().Dataset.from_list(values)
    result._fingerprint = hashlib.sha256(rows._fingerprint.encode()).hexdigest()[:16]
    return result


def check_table(path, options):
    """The header of a .csv or .tsv file. Raises ValueError that names the first line with another
    number of fields: pandas would fill it up, or take its first column for row names."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file, **options)
            header = next(lines, [])
            for row in lines:
                if row and len(row) != len(header):
                    raise ValueError(f"{len(row)} fields, the first line has {len(header)}")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path}: not UTF-8 text") from e
    except (ValueError, csv.Error) as e:
        raise ValueError(f"{path}, line {lines.line_num}: {e}") from e
    if not header:
        raise ValueError(f"{path} is empty")
    if len(set(header)) < len(header):
        raise ValueError(
            f"{path}, line 1: two columns are called {Counter(header).most_common(1)[0][0]!r:.100}"
        )
    return header


def check_json(path, thorough=False):
    """Raises ValueError that names the first line which is not a JSON object in UTF-8; a .json
    file may also be a list of them.

    pyarrow ends in a segmentation fault where the first line is `null`, or a value is nested
    deeply: before it reads a file, the lines that could be such are parsed, after an error
    (thorough) all."""
    number = 0
    try:
        with open(path, encoding="utf-8-sig") as file:
            is_list = path.suffix == ".json" and file.read(1) == "["
            file.seek(0)
            for line in [file.read()] if is_list else file:
                number += 1
                if thorough or not line.startswith("{") or line.count("[") + line.count("{") > 500:
                    value = json.loads(line.rstrip()) if line.strip() else {}
                    if not all(isinstance(row, dict) for row in (value if is_list else [value])):
                        raise ValueError("not a JSON object")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path}: not UTF-8 text") from e
    except json.JSONDecodeError as e:
        raise ValueError(
            f"{path}, line {number + e.lineno - 1}: broken JSON: {e.msg} at column {e.colno}"
        ) from e
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path}, line {number}: {e}") from e


def line_of(where, index):
    """The line of a .jsonl, .csv or .tsv file in which a row begins; elsewhere the row's number."""
    path = Path(where)
    if path.suffix not in (".jsonl", ".csv", ".tsv") or not path.is_file():
        return index + 1
    starts, begin = [], 1
    with open(path, encoding="utf-8-sig", newline="") as file:
        if path.suffix == ".jsonl":
            starts = [number for number, line in enumerate(file, 1) if line.strip()]
        else:
            lines = csv.reader(file, **options_of(path))
            for row in lines:
                starts += [begin] * bool(row)
                begin = lines.line_num + 1
            del starts[0]  # the header
    return starts[index]


def read_argument(directory, split):
    """(where, rows) of UKP's corpus as it is distributed: one file a topic, the split in the column
    `set`."""
    paths = sorted(directory.glob("*.tsv"))
    if not paths:
        raise FileNotFoundError(
            f"no train.jsonl and no topic .tsv files of UKP's corpus in {directory}"
        )
    rows = read_rows(paths)
    if "set" not in rows.column_names:
        raise ValueError(f"{paths[0]}: no column 'set'; it has {', '.join(rows.column_names):.200}")
    wanted = "val" if split == "validation" else split
    rows = rows.filter(
        lambda values: [value == wanted for value in values], batched=True, input_columns="set"
    )
    if len(rows) == 0:
        raise ValueError(f"{directory}: no row with set = {wanted}")
    return directory, rows


def read_split(task, split, data_dir=None, fraction=None):
    """
    (where, rows, their places in the file, revision) of "train", "validation" or another split,
    from `data_dir`, or the hub without one. Where there is no development set, "validation" are
    training examples, always the same ones, and "train" the others: as many as the task says
    (`Task.held_out`), or the fraction that is asked for.
    """
    directory = None if data_dir is None else Path(data_dir) / task.name
    there = directory is not None and find_file(directory, "validation", task.dev)
    if fraction is not None and (there or (directory is None and not task.held_out)):
        raise ValueError(f"--dev-fraction: {there or 'the hub'} has a development set already")
    part = task.held_out if fraction is None else fraction
    if not part or there or split not in ("train", "validation"):
        where, rows, revision = read_whole_split(task, split, directory)
        return where, rows, np.arange(len(rows)), revision
    where, rows, revision = read_whole_split(task, "train", directory)
    order = held_out(len(rows), split, part)
    return where, rows.select(order), order, revision


def read_whole_split(task, split, directory):
    """(where, rows, revision) of a split as it is stored; directory: DATA_DIR/TASK, or None for the
    hub."""
    if directory is not None:
        if task.name == "argument" and directory.is_dir() and not list(directory.glob("train.*")):
            return *read_argument(directory, split), None
        other_name = task.dev if split == "validation" else None
        return *read_file(directory, task.name, split, other_name), None
    if task.source is None:
        raise FileNotFoundError(
            "the UKP Sentential Argument Mining Corpus is not on the hub: request it at "
            "tudatalib.ulb.tu-darmstadt.de/handle/tudatalib/2345 and put its eight .tsv files "
            "into DATA_DIR/argument"
        )
    name = task.dev if split == "validation" else split
    where = f"{task.source} {task.config or ''}".strip() + f", {name}"
    answers = hub_answers()
    try:
        rows = library().load_dataset(task.source, task.config, split=name, revision=task.revision)
    except Exception as e:  # network, hub and format each raise their own kinds
        reason = (str(e).strip().splitlines() or [repr(e)])[0]
        if not answers:
            cache = library().config.HF_DATASETS_CACHE
            reason = f"it cannot be reached, and the cache {cache} does not have them"
        raise FileNotFoundError(
            f"{where} cannot be loaded from the hub ({reason}); --data-dir takes local files"
        ) from e
    urls = [url.split("@")[1].split("/")[0] for url in rows.download_checksums or {} if "@" in url]
    return where, rows, urls[0] if urls else task.revision


def has_task(data_dir, name):
    """Whether `data_dir` has a directory of that name, which is not one elsewhere."""
    if data_dir is None or name in ("", "..") or Path(name).name != name:
        return False
    return (Path(data_dir) / name).is_dir()


def select_columns(where, rows, columns, aliases):
    """Rows with these columns alone, which may have other names in the file. Raises ValueError for
    one that is missing."""
    for other, column in aliases.items():
        if other in rows.column_names and column not in rows.column_names:
            rows = rows.rename_column(other, column)
    if missing := [column for column in columns if column not in rows.column_names]:
        there = ", ".join(rows.column_names)
        raise ValueError(f"{where}, line 1: no column {missing[0]!r}; it has {there:.200}")
    return rows.select_columns(columns)


def check_size(where, count, task, split, strict):
    """A note, or if it is strict a ValueError, about another number of rows than the paper's and
    the hub's."""
    if split not in ("train", "validation"):
        return
    which = split == "validation"
    known = [sizes[which] for sizes in (task.sizes, task.hub_sizes) if sizes]
    if known and count not in known:
        message = f"{where} has {count} rows, the {task.name} of the paper has {known[0]}"
        message += "".join(f", the hub's copy has {other}" for other in known[1:])
        if strict:
            raise ValueError(message)
        print(f"note: {message}")


@contextlib.contextmanager
def naming_line(where, index):
    """Puts file and line of a row before the message of a ValueError."""
    try:
        yield
    except ValueError as e:
        raise ValueError(f"{where}, line {line_of(where, index)}: {e}") from e


def map_cached(rows, function, key, floats, description):
    """
    Rows as function(columns, indices) makes them, in batches: lists of lists of ids, label, length.
    The cache of `datasets` is keyed by the rows and `key`. floats: whether labels are numbers, not
    indices.
    """
    import pyarrow

    datasets = library()
    ids, integer = datasets.List(datasets.List(datasets.Value("int32"))), datasets.Value("int32")
    label = datasets.Value("float32") if floats else integer
    features = datasets.Features(input_ids=ids, token_type_ids=ids, label=label, length=integer)
    content = repr([rows._fingerprint, *key])
    given = {
        "batched": True,
        "with_indices": True,
        "remove_columns": rows.column_names,
        "features": features,
        "new_fingerprint": hashlib.sha256(content.encode()).hexdigest()[:32],
        "desc": description,
    }
    try:
        with naming_the_cache():
            try:
                return rows.map(function, **given)
            except pyarrow.ArrowException:
                return rows.map(function, load_from_cache_file=False, **given)
    except pyarrow.ArrowException as e:
        cache = datasets.config.HF_DATASETS_CACHE
        raise CacheError(f"the cache of `datasets`, {cache}, is damaged: remove it: {e}") from e
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:  # the tokenizer's Rust side panics with one of these
        raise ValueError(f"its tokenizer failed: {(str(e).splitlines() or [e])[0]:.200}") from e


def rename(rows, columns):
    """columns: {our name of a column: the file's}. Raises ValueError for one that is not there, or
    a name that would be there twice."""
    for ours, theirs in (columns or {}).items():
        if theirs not in rows.column_names:
            has = ", ".join(rows.column_names)
            raise ValueError(
                f"--columns {ours}={theirs}: there is no column {theirs!r}; {has:.200}"
            )
        if ours in rows.column_names and ours != theirs:
            raise ValueError(f"--columns {ours}={theirs}: there is a column {ours!r} already")
        rows = rows if ours == theirs else rows.rename_column(theirs, ours)
    return rows


def count_choices(path, rows):
    """How many choices the first row has. Raises ValueError if they are no list of at least two."""
    given = rows[0]["choices"]
    if not isinstance(given, list) or len(given) < 2:
        raise ValueError(f"{path}, line 1: 'choices' must be a list of at least two texts")
    return len(given)


def label_values(path, rows):
    """The sorted values of the column `label`: numbers by value, texts by their letters. Raises
    ValueError, naming the line, for what is neither a text nor an integer, or where all are the
    same."""
    if "label" not in rows.column_names:
        raise ValueError(
            f"{path}, line 1: no column 'label'; it has {', '.join(rows.column_names):.200}: "
            "--columns label=NAME says which one it is"
        )
    values = set()
    for i, value in enumerate(rows["label"]):
        fraction = isinstance(value, str) and re.fullmatch(r"[-+]?\d*\.\d+(e[-+]?\d+)?", value)
        if type(value) not in (str, int, bool) or value == "" or fraction:
            raise ValueError(
                f"{path}, line {line_of(path, i)}: label {value!r:.100} is neither a text nor "
                "an integer"
            )
        values.add(str(value))
    numbers = all(value.removeprefix("-").isdecimal() for value in values)
    alike = {}
    for value in sorted(values):
        other = alike.setdefault(unicodedata.normalize("NFC", value).strip(), value)
        if other != value:
            raise ValueError(
                f"{path}: the labels {ascii(other):.100} and {ascii(value):.100} differ in blanks "
                "at their ends, or in how an accent is written: make them one"
            )
    labels = sorted(values, key=lambda value: (int(value), value) if numbers else value)
    if len(labels) == 1:
        raise ValueError(f"{path}: all labels are {labels[0]!r:.100}, there is nothing to learn")
    return labels


def check_row(row, columns, label):
    """The texts of a row's `columns`; numbers are texts, `endings` and `choices` lists of texts, or
    dictionaries with one. Raises ValueError, naming the column, for a text or label that is missing
    or of another kind."""
    texts = []
    for column in columns:
        value = row.get(column)
        if value is None or value != value:  # NaN: what pandas makes of a missing text
            raise ValueError(f"column {column!r} is missing")
        if column in ("endings", "choices"):
            options = value.get("text") if isinstance(value, dict) else value
            if not isinstance(options, list) or not all(type(option) is str for option in options):
                raise ValueError(f"column {column!r} does not hold a list of texts")
        else:
            if type(value) not in (str, int, float):
                raise ValueError(f"column {column!r} holds {type(value).__name__}, expected a text")
            value = str(value)
        texts.append(value)
    if row.get(label) is None:
        raise ValueError(f"column {label!r} is missing")
    return texts
