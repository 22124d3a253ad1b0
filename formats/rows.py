"""Rows as others wrote them, from files or from the hub; they are handed out under our names."""

import contextlib
import csv
import io
import json
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from formats.files import error_prefix, is_file, note
from formats.hub import hub_library

csv.field_size_limit(10**9)  # texts may be longer than its 131,072 characters
OWN_COLUMNS = ("text_a", "text_b", "choices")  # of your own task
LISTS = ("choices", "endings")  # columns that hold a list of texts
INTEGER = r"[-+]?\d+"
DECIMAL = re.compile(r"[-+]?(\d*[.,]\d+|(\d*[.,])?\d+e[-+]?\d+|inf(inity)?)", re.IGNORECASE)
NUMBER = re.compile(f"{INTEGER}|{DECIMAL.pattern}", re.IGNORECASE)
LIST = re.compile(r"""\[.*[,'" ].*\]|\{.*[,:].*\}""", re.DOTALL)  # as a CSV file has it
MULTI_LABEL = "several labels of one example (multi-label) are not supported"
# What other copies of a data set call its columns, {task: {our name: theirs}}, and its labels
SCITAIL = {"premise": "sentence1", "hypothesis": "sentence2", "label": "gold_label"}
OTHER_COLUMNS = {"scitail": SCITAIL, "boolq": {"label": "answer"}}
OTHER_LABELS = {"scitail": {"entailment": "entails"}}  # {task: {their name: ours}}


@dataclass
class Source:
    """Where a task's data are, as a command says it, and the rows that were read there."""

    data_dir: str | None = None  # has TASK/train.jsonl; without it and without files, the hub
    files: dict = field(default_factory=dict)  # {split: path}: --train-file, --dev-file
    column_names: dict = field(default_factory=dict)  # --columns: {our name: the files'}
    dev_fraction: float | None = None  # the share of the training examples that is held out
    rows: dict = field(default_factory=dict, init=False)  # {path, or a split of the hub: its rows}

    def paths(self, name, split):
        """[path] of the files with a task's split, of UKP's several; None: it is on the hub."""
        if self.files:
            return [Path(self.files[split])] if self.files.get(split) else []
        if not self.data_dir:
            return None
        directory = Path(self.data_dir, name)
        if name == "argument" and not [*directory.glob("train.*")]:
            return sorted(directory.glob("[!.]*.tsv"))
        paths = sorted(p for p in directory.glob(f"{split}.*") if p.suffix.lower() in READERS)
        if len(paths) > 1:
            raise ValueError(f"two files for one split, {split}: {paths[0]} and {paths[1]}")
        return paths

    def read_files(self, name, split):
        """(their place, for messages; [row] as it is there) of a split. A file is parsed once."""
        paths = self.paths(name, split)
        for path in paths:
            self.rows[path] = self.rows.get(path) or read_rows(path)
        rows = [row for path in paths for row in self.rows[path]]
        if name == "argument" and rows and "set" in rows[0]:  # a file of UKP's has all splits
            wanted = "val" if split == "validation" else split
            rows = [row for row in rows if row.get("set") == wanted]
        if not rows:
            advice = f"there is no {self.data_dir}/{name}/{split}.jsonl"
            advice = "--dev-file, --dev-fraction or --file gives one" if self.files else advice
            raise FileNotFoundError(f"no {split} split for task {name!r}: {advice}")
        return str(paths[0] if len(paths) == 1 else Path(self.data_dir, name)), rows

    def read_split(self, task, split):
        """(its place, for messages; {number of a row: row}) of a split, as `our_rows` has them.
        What is held out of the training file for development is the same for every seed."""
        paths = self.paths(task.name, "validation")
        has_dev = not task.dev_from_train if paths is None else bool(paths)
        if has_dev and self.dev_fraction:
            raise ValueError(f"--dev-fraction: {task.name} has a development set already")
        size = 0 if has_dev else (self.dev_fraction or task.dev_from_train)
        is_part = size and split in ("train", "validation")
        file = "train" if is_part else split
        if paths is None:
            where = f"{task.name} on the hub, {file}"
            rows = self.rows[where] = self.rows.get(where) or hub_rows(task, file)
        else:
            where, rows = self.read_files(task.name, file)
        with error_prefix(where, is_read=True):
            rows = our_rows(rows, self.column_names, task.name, task.columns, task.label)
        cells = [row[column] for row in rows for column in task.columns]
        texts = [text for x in cells for text in (x if isinstance(x, list) else [x])]
        if empty := texts.count(""):
            note(f"{where}: empty cells are read as empty texts, {empty} of them")
        if not is_part:
            return where, dict(enumerate(rows, 1))
        n = min(size, len(rows) // 2) if isinstance(size, int) else round(size * len(rows))
        if not 0 < n < len(rows):
            raise ValueError(f"the development set would be {n} of {len(rows)} training examples")
        held_out, is_dev = {*drawn(len(rows), n, 0)}, split == "validation"
        return where, {i + 1: row for i, row in enumerate(rows) if (i in held_out) == is_dev}

    def columns_and_labels(self, name):
        """Those of your own task, by its training file (docs/python.md)."""
        where, rows = self.read_files(name, "train")
        with error_prefix(where, is_read=True):
            rows = our_rows(rows, self.column_names, name)
            columns = [column for column in OWN_COLUMNS if column in rows[0]]
            if "choices" not in columns:
                return columns, own_labels([row["label"] for row in rows])
            return columns, [str(i) for i in range(len(rows[0]["choices"]))]


def source_of(args):
    """The Source that a command names, by the options of train.py."""
    files = {"train": args.train_file, "validation": args.dev_file} if args.train_file else {}
    return Source(None if files else args.data_dir, files, args.columns, args.dev_fraction)


def drawn(count, limit, seed):
    """Which of so many examples a limit keeps, in their order."""
    few = limit is not None and limit < count
    return np.random.default_rng(seed).permutation(count)[:limit] if few else range(count)


def our_rows(rows, names, task_name, columns=None, label="label", has_label=True):
    """[row] with these columns alone, under our names; texts are as `text_of` reads them. names:
    {our name: theirs}, all replaced at the same time, so that two columns can change places;
    columns: default those of your own task that are not empty. What a row leaves out is empty.
    Raises ValueError for a column that is not there, is none of the task's, or would go unread."""
    there = dict.fromkeys(name for row in rows for name in row)
    others = OTHER_COLUMNS.get(task_name, {}).items()
    names = {our: other for our, other in others if our not in there and other in there} | names
    ours = [*(columns or ()), label, *OWN_COLUMNS]
    # a column that --columns gives one of our names is not read under its own any more
    theirs = {name: name for name in ours if name not in names.values()} | names
    found = [c for c in OWN_COLUMNS if not all(is_empty(row.get(theirs.get(c))) for row in rows)]
    columns = columns or found or ["text_a"]
    for column in [*columns, label] if has_label else columns:
        if theirs.get(column) not in there:
            problem = f"no column {names.get(column, column)!r}; it has {', '.join(there):.200}"
            raise ValueError(f"{problem}: --columns {column}=NAME, as in the file's header")
    if unknown := names.keys() - {*columns, label}:
        only = ", ".join([*columns, label])
        raise ValueError(f"--columns {min(unknown)}=...: the task, or its files, have only {only}")
    twice = {f"{column} (twice)" for column in OWN_COLUMNS} & there.keys()
    if {*columns} < {*OWN_COLUMNS} and (unread := {*found, *twice} - {*columns}):
        raise ValueError(f"column {min(unread)!r} is none of {', '.join(columns)}")
    result, other_labels = [], OTHER_LABELS.get(task_name, {})
    for number, row in enumerate(rows, 1):
        with error_prefix(f"row {number}"):
            result.append({column: text_of(row.get(theirs[column]), column) for column in columns})
            if has_label:
                value = row.get(theirs[label])
                if is_empty(value):
                    raise ValueError("the label is empty")
                result[-1][label] = other_labels.get(str(value).strip(), value)
    return result


def text_of(value, column):
    """The text in a cell: a number is a text, and an empty cell an empty one. In one of LISTS it is
    a list of texts; CommonsenseQA has {"label": keys, "text": texts}, whose order is the keys'."""
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    if column in LISTS:
        if isinstance(value, dict) and value.keys() == {"label", "text"}:
            value = [text for _, text in sorted(zip(value["label"], value["text"], strict=True))]
        if not isinstance(value, (list, tuple)) or not all(isinstance(x, str) for x in value):
            raise ValueError(f"column {column!r} does not hold a list of texts")
        return [text_of(text, None) for text in value]
    if is_empty(value):
        return ""
    if not isinstance(value, (str, int, float)):
        raise ValueError(f"column {column!r} holds {type(value).__name__}, expected a text")
    # half a surrogate pair, as of an emoji that was cut in two, is no character
    return re.sub("[\ud800-\udfff]", "\ufffd", str(value))


def is_empty(cell):
    """Whether it is "", None or NaN: as files have it, and pandas."""
    return cell is None or (isinstance(cell, (str, float)) and (cell == "" or cell != cell))


def read_rows(path):
    """[row] of a file, of CSV and TSV all texts. Raises ValueError, or OSError, naming the file."""
    path, ending = Path(path), Path(path).suffix.lower()
    if ending not in READERS:
        raise ValueError(f"{path}: only {', '.join(READERS)} can be read")
    if not is_file(path):
        raise FileNotFoundError(f"{path} is not a file")
    with error_prefix(path, is_read=True):
        try:
            rows = READERS[ending](path)
        except UnicodeDecodeError as e:
            raise ValueError(f"save it as UTF-8 (Excel: CSV UTF-8): {e}") from e
        if not rows or not all(isinstance(row, dict) for row in rows):
            raise ValueError("it is empty, or a row is no JSON object")
    return rows


def json_rows(path):
    """A list of objects, or an object in each line; empty lines do not count."""
    text = path.read_bytes().decode("utf-8-sig")
    read = json.JSONDecoder(object_pairs_hook=object_of).decode
    if text.lstrip().startswith("["):
        return read(text)
    rows = []
    for number, line in enumerate(re.split("\r\n?|\n", text), 1):
        if line.strip():
            with error_prefix(f"line {number}"):
                rows.append(read(line))
    return rows


def csv_rows(path):
    """Empty lines do not count, but in a file of one column, where each is an empty text."""
    text, options = path.read_bytes().decode("utf-8-sig"), {}
    first_line = re.split("[\r\n]", text, maxsplit=1)[0]
    if path.suffix.lower() == ".tsv":
        options = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    elif first_line.count(";") > first_line.count(","):  # Excel's, where the comma is a decimal one
        options = {"delimiter": ";"}
        note(f"{path}: its columns are read as separated by semicolons")
    lines = []
    try:
        for cells in csv.reader(io.StringIO(text, newline=""), strict=True, **options):
            if cells or (lines and len(lines[0]) == 1):
                lines.append(cells or [""])
    except csv.Error as e:
        raise ValueError(f"row {len(lines)}: a quotation mark is not closed ({e})") from e
    header, *rows = lines or [[]]
    for number, row in enumerate(rows, 1):
        if len(row) != len(header):
            found = f"row {number} has {len(row)} fields, the first line {len(header)}"
            raise ValueError(f"{found}, if {options.get('delimiter', ',')!r} separates them")
        if header[-1] in row[-1] and [cell.strip('\ufeff"') for cell in row] == header:
            raise ValueError(f"row {number} is the header again: are these several files?")
    header = unique(header)
    return [dict(zip(header, row, strict=True)) for row in rows]


def unique(names):
    return [name if names.count(name) == 1 else f"{name} (twice)" for name in names]


def object_of(pairs):
    """A JSON object, of which json.loads would take the last of two values without a word."""
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError(f"a name is there twice: {pairs!r:.200}")
    return found


def parquet_rows(path):
    """Labels that the file has as numbers beside their names, a ClassLabel of `datasets`, are read
    by name: the file's order is its own. A hidden one, -1, has no name, and is empty."""
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(path).read()
    columns = dict(zip(unique(table.column_names), table.columns, strict=True))
    for name, column in columns.items():  # what a task does not use may hold anything
        with contextlib.suppress(Exception):  # Python has no date before 1, nor any time zone
            columns[name] = column.to_pylist()
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    described = json.loads((table.schema.metadata or {}).get(b"huggingface", "{}"))
    for column, feature in described.get("info", {}).get("features", {}).items():
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel":
            classes = dict(enumerate(feature["names"]))
            for row in rows:
                if column in row:
                    row[column] = classes.get(row[column])
    return rows


READERS = {".jsonl": json_rows, ".json": json_rows, ".csv": csv_rows, ".tsv": csv_rows}
READERS[".parquet"] = parquet_rows


def hub_rows(task, split):
    """[row] of a split on the hub."""
    if task.hub is None:
        raise FileNotFoundError(f"{task.name} is not on the hub: --data-dir takes local files")
    repository, name, revision = task.hub
    hub_library()  # asks whether there is a network
    import datasets  # takes more than a second: when it is first needed

    datasets.disable_progress_bars()
    print(f"loading {repository} {name or ''} from the hub, or its cache", flush=True)
    found = datasets.load_dataset(repository, name, revision=revision)
    return found[task.hub_dev if split == "validation" else split].to_list()


def plain_label(value):
    """What decides which class a label is: not case, blanks, hidden characters, leading zeros."""
    text = str(value).lower()
    hidden = {c for c in text if unicodedata.category(c) in ("Cc", "Cf") and not c.isspace()}
    hidden |= {chr(i) for i in range(0xFE00, 0xFE10)}  # which choose a form of what is before them
    text = unicodedata.normalize("NFKC", "".join(c for c in text if c not in hidden))
    text = " ".join(text.lower().split())
    return str(int(text)) if re.fullmatch(INTEGER, text) else text


def own_labels(values):
    """The classes of your own task, sorted, which are noted. Raises ValueError if all are numbers
    and one is a decimal, for what is no text, and for labels that are one by `plain_label`."""
    are_names = any(not NUMBER.fullmatch(str(value)) for value in values)  # 401.9, V45.81
    for value in values:
        is_one = isinstance(value, (str, int, float)) and not LIST.fullmatch(str(value))
        if not is_one or (DECIMAL.fullmatch(str(value)) and not are_names):
            problem = "for a regression see examples/sts_b.py" if is_one else MULTI_LABEL
            classes = "classes are texts, or integers (0, not 0.0)"
            raise ValueError(f"a label is {value!r:.100}: {classes}; {problem}")
    counts = Counter(map(str, values))
    alike = Counter(map(plain_label, counts))
    if several := [label for label in counts if alike[plain_label(label)] > 1]:
        problem = "labels differ in case, in blanks, or in what cannot be seen"
        shown = ", ".join(map(ascii, several)).replace("  ", r" \x20")
        raise ValueError(f"{problem}: make them one: {shown:.300}")
    for label in counts:
        parts = re.split("[,;|]", label)
        if len(parts) > 1 and all(plain_label(part) in alike for part in parts):
            raise ValueError(f"the label {label!r:.100} is several others: {MULTI_LABEL}")
    are_numbers = all(re.fullmatch(INTEGER, label) for label in counts)
    if "-1" in counts and not are_numbers:
        raise ValueError("labels are names, and -1, which is a hidden label")
    names = sorted(counts, key=int if are_numbers else None)
    found = ", ".join(f"{name} ({counts[name]} examples)" for name in names)
    of_two = f"; f1 is that of {names[-1]!r}" * (len(names) == 2)
    note(f"the labels are {len(names)} classes: {found:.300}{of_two}")
    return names
