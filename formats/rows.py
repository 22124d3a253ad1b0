"""Rows as others wrote them, dictionaries of columns, from files or from the hub."""

import csv
import json
import re
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np

from formats.files import error_prefix, note
from formats.hub import hub_library

csv.field_size_limit(10**9)  # texts may be longer than its 131,072 characters


def read_rows(path, task=None):
    """[row] of a file; values as they are written, of CSV and TSV all texts. Columns that `task`
    does not use may hold anything. Raises ValueError, or FileNotFoundError, that names the file."""
    path, ending = Path(path), Path(path).suffix.lower()
    if ending not in READERS:
        raise ValueError(f"{path}: only {', '.join(READERS)} can be read")
    if not path.is_file():  # a pipe would never end
        raise FileNotFoundError(f"{path} is not a file")
    is_used = bool  # any column that has a name
    if task:
        own = ("text_a", "text_b", "choices", "label", "set")
        names = (*task.columns, task.label, *task.column_names.values(), *task.column_aliases)
        is_used = {*own, *names}.__contains__
    try:
        rows = READERS[ending](path, is_used)
    except Exception as e:
        raise ValueError(f"{path}: {e}") from e
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} is empty, or a row is no JSON object")
    return rows


def json_rows(path, is_used):
    """A list of objects, or an object in each line; empty lines do not count."""
    text = path.read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        return json.loads(text)
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            with error_prefix(f"line {number}"):
                rows.append(json.loads(line))
    return rows


def csv_rows(path, is_used):
    tabs = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if path.suffix.lower() == ".tsv" else {}
    with open(path, encoding="utf-8-sig", newline="") as file:
        header, *rows = [cells for cells in csv.reader(file, strict=True, **tabs) if cells] or [[]]
    if twice := [name for name in header if header.count(name) > 1 and is_used(name)]:
        raise ValueError(f"two columns are called {twice[0]!r:.100}")
    for number, row in enumerate(rows, 1):
        if len(row) != len(header):
            raise ValueError(f"row {number} has {len(row)} fields, the first line {len(header)}")
    return [dict(zip(header, row, strict=True)) for row in rows]


def parquet_rows(path, is_used):
    """Columns that are not used are None. Labels that the file has as numbers beside their names,
    a ClassLabel of `datasets`, are read by name: the file's order is its own."""
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    names = file.schema_arrow.names
    table = file.read([name for name in names if is_used(name)])
    rows = [{**dict.fromkeys(names), **row} for row in table.to_pylist()]
    described = json.loads((file.schema_arrow.metadata or {}).get(b"huggingface", "{}"))
    for column, feature in described.get("info", {}).get("features", {}).items():
        is_class = isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
        if is_class and column in table.column_names:
            classes = dict(enumerate(feature["names"]))
            for row in rows:
                row[column] = classes.get(row[column], row[column])
    return rows


READERS = {".jsonl": json_rows, ".json": json_rows, ".csv": csv_rows, ".tsv": csv_rows}
READERS[".parquet"] = parquet_rows


def hold_out(count, size):
    """(indices of the training set, of the development set) among the examples of one file. size: a
    share of them, or a number, at most half of them. The draw is the same for every seed."""
    n = min(size, count // 2) if isinstance(size, int) else round(size * count)
    if not 0 < n < count:
        raise ValueError(f"the development set would be {n} of {count} training examples")
    drawn = np.random.default_rng(0).permutation(count)
    return np.sort(drawn[n:]), np.sort(drawn[:n])


def dev_size(task):
    """What is held out of the training file: a share of its examples, or their number; None where
    the development set is a file, or a split of the hub, of its own."""
    is_local = task.files or task.data_dir
    has_dev = split_files(task, "validation") if is_local else task.dev_from_train == 0
    if has_dev and task.dev_fraction:
        raise ValueError(f"--dev-fraction: {task.name} has a development set already")
    return None if has_dev else task.dev_fraction or task.dev_from_train or None


def split_files(task, split):
    """[path] of the local files with a split's rows: one, none, or UKP's, one for each topic."""
    if task.files:
        return [Path(task.files[split])] if task.files.get(split) else []
    paths = [path for path in sorted(Path(task.data_dir, task.name).glob("*")) if path.is_file()]
    if task.name == "argument" and "train" not in [path.stem for path in paths]:
        return [path for path in paths if path.suffix == ".tsv"]
    names = [split, task.hub_dev, "dev", "val"] if split == "validation" else [split]
    there = {path.stem + path.suffix.lower(): path for path in paths}
    return [there[n + ending] for n in names for ending in READERS if n + ending in there][:1]


def read_split(task, split):
    """(its place, for messages; all of its rows), where "validation" is the training file if the
    development set is a part of it."""
    if split == "validation" and dev_size(task):
        split = "train"
    if not task.files and not task.data_dir:
        return f"{task.hub and task.hub[0]}, {split}", hub_rows(task, split)
    paths, directory = split_files(task, split), Path(task.data_dir or "", task.name)
    if not paths:
        found = ", ".join(sorted(path.name for path in directory.glob("*"))) or "nothing"
        needed = "--dev-file or --dev-fraction gives one" if split == "validation" else "none given"
        advice = needed if task.files else f"{directory} has {found:.200}"
        raise FileNotFoundError(f"no {split} split for task {task.name!r}: {advice}")
    rows = [row for path in paths for row in read_rows(path, task)]
    if len(paths) == 1:
        return str(paths[0]), rows
    wanted = "val" if split == "validation" else split  # UKP's corpus has all splits in a file
    return str(directory), [row for row in rows if row.get("set") == wanted]


def hub_rows(task, split):
    """[row] of a split on the hub."""
    if task.hub is None:
        raise FileNotFoundError(f"{task.name} is not on the hub: --data-dir takes local files")
    repository, name, revision = task.hub
    hub_library()  # asks whether there is a network
    import datasets  # takes more than a second: when it is first needed

    datasets.disable_progress_bars()
    print(f"loading {repository} {name or ''} from the hub, or its cache", flush=True)
    try:
        found = datasets.load_dataset(repository, name, revision=revision)
        return found[task.hub_dev if split == "validation" else split].to_list()
    except Exception as e:  # network, hub and format each raise their own kinds
        problem = f"{repository}, {split}, cannot be loaded from the hub"
        reason = " ".join(str(e).split())[:300]
        raise FileNotFoundError(f"{problem} ({reason}); --data-dir takes local files") from e


def check_column_names(task, known, where, row):
    """Raises ValueError for one of --columns that renames nothing. row: the first of `where`"""
    for ours, theirs in task.column_names.items():
        if ours not in known or theirs not in row:
            names = f"the task takes {', '.join(known)}, and {where} has {', '.join(row):.200}"
            raise ValueError(f"--columns {ours}={theirs}: {names}")


def own_labels(rows):
    """The classes of your own task: numbers by value, texts by their letters. Raises ValueError for
    what is no class, and for labels that only look different; says what the classes are."""
    values = [row.get("label") for row in rows]
    for value in values:
        decimal = re.fullmatch(r"[-+]?\d*\.\d+(e[-+]?\d+)?", str(value))
        if value == "" or decimal or type(value) not in (str, int, bool):
            advice = "classes are texts or integers; for a regression see examples/sts_b.py"
            raise ValueError(f"a label is {value!r:.100}: {advice}")
    counts, alike = Counter(map(str, values)), {}
    for label in counts:
        plain = unicodedata.normalize("NFKC", label).strip().casefold()
        plain = int(plain) if re.fullmatch(r"[-+]?\d+", plain) else plain
        alike.setdefault(plain, []).append(label)
    if several := [labels for labels in alike.values() if len(labels) > 1]:
        problem = "labels differ in case, in blanks at their ends, or in how they are written"
        raise ValueError(f"{problem}: make them one: {', '.join(map(ascii, several[0])):.300}")
    if len(counts) == 1:
        raise ValueError(f"all labels are {[*counts][0]!r:.100}: nothing to learn")
    texts = {label for label in alike if isinstance(label, str)}
    if len(texts) < len(alike) and (empty := texts & {"nan", "none", "null"}):
        raise ValueError(f"labels are numbers, and {min(empty)!r}: a value is missing")
    # `parquet_rows` gives classes their names, and leaves -1 an integer
    if -1 in alike and (texts or (-1 in values and any(type(value) is str for value in values))):
        raise ValueError("labels are names, and -1, which is a hidden label")
    names = sorted(counts, key=None if texts else int)
    found = ", ".join(f"{name} ({counts[name]} examples)" for name in names)
    note(f"the labels are {len(names)} classes: {found:.300}")
    return names
