"""Rows as others wrote them, dictionaries of columns: from .jsonl, .json, .csv, .tsv and .parquet
files, or from the hub."""

import csv
import json
import re
import unicodedata
from pathlib import Path

import numpy as np

from formats.files import error_prefix
from formats.hub import hub_library

csv.field_size_limit(10**9)  # texts may be longer than its 131,072 characters
ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")


def read_rows(path):
    """[row] of a file; values as they are written, of CSV and TSV all texts. Raises ValueError that
    names the file, and FileNotFoundError."""
    path = Path(path)
    if path.suffix not in ENDINGS:
        raise ValueError(f"{path}: only {', '.join(ENDINGS)} can be read")
    if not path.is_file():  # a pipe would never end
        raise FileNotFoundError(f"{path} is not a file")
    try:
        if path.suffix == ".parquet":
            rows = parquet_rows(path)
        elif path.suffix in (".csv", ".tsv"):
            rows = csv_rows(path)
        else:
            rows = json_rows(path)
    except (ValueError, OSError, RecursionError, csv.Error) as e:  # pyarrow's are subclasses
        raise ValueError(f"{path}: {e}") from e
    if not rows:
        raise ValueError(f"{path} is empty")
    return rows


def json_rows(path):
    """A list of objects, or an object in each line; empty lines do not count."""
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix == ".json" and text.lstrip().startswith("["):
        rows = json.loads(text)
    else:
        rows = []
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                with error_prefix(f"line {number}"):
                    rows.append(json.loads(line))
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"row {number}: not a JSON object")
    return rows


def csv_rows(path):
    tabs = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if path.suffix == ".tsv" else {}
    with open(path, encoding="utf-8-sig", newline="") as file:
        header, *rows = [cells for cells in csv.reader(file, strict=True, **tabs) if cells] or [[]]
    if twice := [name for name in header if header.count(name) > 1]:
        raise ValueError(f"two columns are called {twice[0]!r:.100}")
    for number, row in enumerate(rows, 1):
        if len(row) != len(header):
            raise ValueError(f"row {number} has {len(row)} fields, the first line {len(header)}")
    return [dict(zip(header, row, strict=True)) for row in rows]


def parquet_rows(path):
    """Labels that the file has as numbers beside their names, as `datasets` writes it, by name: the
    file's order is its own."""
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    described = json.loads((table.schema.metadata or {}).get(b"huggingface", "{}"))
    features = described.get("info", {}).get("features", {})
    rows = table.to_pylist()
    for column, feature in features.items():
        if "names" in feature:
            names = dict(enumerate(feature["names"]))
            for row in rows:
                row[column] = names.get(row[column], row[column])
    return rows


def find_file(directory, names, required=True):
    """DIR/NAME.jsonl, .json, .csv, .tsv or .parquet, with the first of the names that is there.
    Raises FileNotFoundError, or returns None if it is not required."""
    directory = Path(directory)
    for path in (directory / f"{name}{ending}" for name in names for ending in ENDINGS):
        if path.is_file():
            return path
    if not required:
        return None
    found = ", ".join(sorted(path.name for path in directory.glob("*"))) or "nothing"
    problem = f"no {names[0]} split for task {directory.name!r}: {directory} has {found:.200}"
    raise FileNotFoundError(problem)


def hub_rows(repository, configuration, revision, split):
    """[row] of a data set on the hub."""
    hub_library()  # asks whether there is a network
    import datasets  # takes more than a second: when it is first needed

    datasets.disable_progress_bars()
    print(f"loading {repository} {configuration or ''} from the hub, or its cache", flush=True)
    try:
        found = datasets.load_dataset(repository, configuration, revision=revision)[split]
    except Exception as e:  # network, hub and format each raise their own kinds
        reason = " ".join(str(e).split())[:300]
        problem = f"{repository}, {split}, cannot be loaded from the hub ({reason})"
        raise FileNotFoundError(f"{problem}; --data-dir takes local files") from e
    return [row for table in found.with_format("arrow").iter(1000) for row in table.to_pylist()]


def hold_out(count, size):
    """(indices of the training set, of the development set) among the examples of one file. size: a
    share of them, or a number of examples, at most half of them. The draw is the same for every
    seed. Raises ValueError where either would be empty."""
    n = min(size, count // 2) if isinstance(size, int) else round(size * count)
    if not 0 < n < count:
        raise ValueError(f"the development set would be {n} of {count} training examples")
    drawn = np.random.default_rng(0).permutation(count)
    return np.sort(drawn[n:]), np.sort(drawn[:n])


def dev_size(task):
    """What is held out of the training file: a share of its examples, or their number; None where
    the development set is a file, or a split of the hub, of its own. Raises ValueError for a
    --dev-fraction that is not needed."""
    has_dev = task.dev_from_train == 0
    if task.files or task.data_dir:
        has_dev = bool(split_files(task, "validation", required=False))
    if has_dev and task.dev_fraction:
        raise ValueError(f"--dev-fraction: {task.name} has a development set already")
    return None if has_dev else task.dev_fraction or task.dev_from_train or None


def split_files(task, split, required=True):
    """[path] of the local files with a split's rows; [] where there are none and none are
    required."""
    if task.files:
        if not task.files.get(split) and required:
            raise FileNotFoundError(f"no {split} split: --dev-file or --dev-fraction gives one")
        return [Path(task.files[split])] if task.files.get(split) else []
    directory = Path(task.data_dir) / task.name
    names = [split, task.hub_dev, "dev", "val"] if split == "validation" else [split]
    ukp = sorted(directory.glob("*.tsv")) if task.name == "argument" else []
    if ukp and find_file(directory, ["train"], required=False) is None:
        return ukp  # UKP's corpus as it is distributed: one file a topic, all splits in each
    path = find_file(directory, names, required)
    return [path] if path else []


def read_split(task, split):
    """(its place, for messages; all of its rows), where "validation" is the training file if the
    development set is a part of it."""
    if split == "validation" and dev_size(task):
        split = "train"
    if not task.files and not task.data_dir:
        if task.hub is None:
            ukp = "; its place is tudatalib.ulb.tu-darmstadt.de/handle/tudatalib/2345"
            advice = "--data-dir or --train-file takes it" + ukp * (task.name == "argument")
            raise FileNotFoundError(f"{task.name} is not on the hub: {advice}")
        rows = hub_rows(*task.hub, task.hub_dev if split == "validation" else split)
        return f"{task.hub[0]}, {split}", rows
    paths = split_files(task, split)
    rows = [row for path in paths for row in read_rows(path)]
    if len(paths) > 1:
        wanted = "val" if split == "validation" else split
        rows = [row for row in rows if row.get("set") == wanted]
    return str(paths[0] if len(paths) == 1 else paths[0].parent), rows


def check_column_names(task, known, where, row):
    """Raises ValueError for one of --columns that renames nothing: one that is misspelt would be
    left out without a word. row: the first of the file `where`"""
    for ours, theirs in task.column_names.items():
        given = f"--columns {ours}={theirs}"
        if ours not in known:
            raise ValueError(f"{given}: the task takes no {ours!r}; it takes {', '.join(known)}")
        if theirs not in row:
            raise ValueError(f"{given}: {where} has no such column; it has {', '.join(row):.200}")


def own_labels(rows):
    """The classes of your own task: numbers by value, texts by their letters. Raises ValueError for
    what is no class, and for labels that only look different."""
    values = [row.get("label") for row in rows]
    for value in values:
        if value is None or value == "" or type(value) not in (str, int, bool, float):
            raise ValueError(f"a label is {value!r:.100}, which is empty, or no text")
        if re.fullmatch(r"[-+]?\d*\.\d+(e[-+]?\d+)?", str(value)):
            advice = "classes are texts or integers; for a regression see examples/sts_b.py"
            raise ValueError(f"label {value} is a decimal number: {advice}")
    values = {str(value) for value in values}
    if len({unicodedata.normalize("NFC", value).strip() for value in values}) < len(values):
        problem = "labels differ in blanks at their ends, or in how an accent is written"
        raise ValueError(f"{problem}: make them one: {', '.join(map(ascii, sorted(values))):.300}")
    if len(values) == 1:
        raise ValueError(f"all labels are {[*values][0]!r:.100}: nothing to learn")
    numbers = all(value.removeprefix("-").isdecimal() for value in values)
    return sorted(values, key=lambda value: (int(value), value) if numbers else value)
