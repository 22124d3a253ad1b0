"""Rows as others wrote them, dictionaries of columns, from files or from the hub."""

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
from formats.hub import hub_library, one_line

csv.field_size_limit(10**9)  # texts may be longer than its 131,072 characters
OWN_COLUMNS = ("text_a", "text_b", "choices")  # of your own task


@dataclass
class Source:
    """Where a task's data are, as a command says it, and the rows that were read there."""

    data_dir: str | None = None  # has TASK/train.jsonl; without it and without files, the hub
    files: dict = field(default_factory=dict)  # {split: path}: --train-file, --dev-file
    column_names: dict = field(default_factory=dict)  # --columns: {our name: the files'}
    dev_fraction: float | None = None  # the share of the training examples that is held out
    rows: dict = field(default_factory=dict, init=False)  # {path, or a split of the hub: its rows}

    def paths(self, task, split):
        """[path] of the files with a split's rows, of UKP's several; None: it is on the hub."""
        if self.files:
            return [Path(self.files[split])] if self.files.get(split) else []
        if not self.data_dir:
            return None
        paths = sorted(Path(self.data_dir, task.name).glob("*"))
        if task.name == "argument" and "train" not in [path.stem for path in paths]:
            return [path for path in paths if path.suffix == ".tsv"]
        names = {split, task.hub_dev, "dev", "val"} if split == "validation" else {split}
        found = [path for path in paths if path.stem in names and path.suffix.lower() in READERS]
        if len(found) > 1:
            raise ValueError(f"two files for one split, {split}: {found[0]} and {found[1]}")
        return [path for path in found if is_file(path)]

    def read_all(self, task, split):
        """(its place, for messages; [row]) of a whole split; a file is parsed once."""
        paths, where = self.paths(task, split), f"{task.name} on the hub, {split}"
        if paths is None:
            self.rows[where] = self.rows.get(where) or hub_rows(task, split)
            return where, self.rows[where]
        where = str(paths[0] if len(paths) == 1 else Path(self.data_dir or "", task.name))
        aliases = (*task.column_aliases.values(), *self.column_names.values())
        used = {*OWN_COLUMNS, "set", *task.columns, task.label, *aliases}
        for path in paths:
            self.rows[path] = self.rows.get(path) or read_rows(path, used)
        rows = [row for path in paths for row in self.rows[path]]
        if len(paths) > 1:  # UKP's corpus has all splits in a file
            wanted = "val" if split == "validation" else split
            rows = [row for row in rows if row.get("set") == wanted]
        if not rows:
            found = ", ".join(sorted(path.name for path in Path(where).glob("*"))) or "nothing"
            advice = "--dev-file or --dev-fraction gives one" if self.files else f"found {found}"
            raise FileNotFoundError(f"no {split} split for task {task.name!r}: {advice:.300}")
        return where, rows

    def read_split(self, task, split):
        """(its place, for messages; {number of a row: row}) of a split. What the training file
        holds for development, a share or a number of its rows, is the same for every seed."""
        paths = self.paths(task, "validation")
        has_dev = task.dev_from_train == 0 if paths is None else paths
        if has_dev and self.dev_fraction:
            raise ValueError(f"--dev-fraction: {task.name} has a development set already")
        size = None if has_dev else self.dev_fraction or task.dev_from_train
        if not size or split not in ("train", "validation"):
            where, rows = self.read_all(task, split)
            return where, dict(enumerate(rows, 1))
        where, rows = self.read_all(task, "train")
        n = min(size, len(rows) // 2) if isinstance(size, int) else round(size * len(rows))
        if not 0 < n < len(rows):
            raise ValueError(f"the development set would be {n} of {len(rows)} training examples")
        drawn = np.random.default_rng(0).permutation(len(rows)).tolist()
        drawn = drawn[:n] if split == "validation" else drawn[n:]
        return where, {i + 1: rows[i] for i in sorted(drawn)}


def source_of(args):
    """The Source that a command names, by the options of train.py."""
    files = {"train": args.train_file, "validation": args.dev_file} if args.train_file else {}
    return Source(None if files else args.data_dir, files, args.columns, args.dev_fraction)


def is_empty(cell):
    """Whether it is "", None or NaN: as files have it, and pandas."""
    return cell is None or (isinstance(cell, (str, float)) and (cell == "" or cell != cell))


def no_surrogates(text):
    """The text with U+FFFD for half a surrogate pair, as of an emoji that was cut in two."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def read_rows(path, used=None):
    """[row] of a file; values as they are written, of CSV and TSV all texts. used: the columns that
    matter, if not all. Raises ValueError, or FileNotFoundError, that names the file."""
    path, ending = Path(path), Path(path).suffix.lower()
    if ending not in READERS:
        raise ValueError(f"{path}: only {', '.join(READERS)} can be read")
    if not is_file(path):  # a pipe would never end
        raise FileNotFoundError(f"{path} is not a file")
    try:
        rows = READERS[ending](path, used)
    except UnicodeDecodeError as e:
        line = 1 + e.object.count(b"\n", 0, e.start)
        raise ValueError(f"{path}, line {line}, is not UTF-8: save it as UTF-8") from e
    except Exception as e:
        raise ValueError(f"{path}: {e}") from e
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} is empty, or a row is no JSON object")
    return rows


def json_rows(path, used):
    """A list of objects, or an object in each line; empty lines do not count."""
    text = path.read_bytes().decode("utf-8-sig")
    if text.lstrip().startswith("["):
        return json.loads(text)
    rows = []
    for number, line in enumerate(re.split("\r\n?|\n", text), 1):
        if line.strip():
            with error_prefix(f"line {number}"):
                rows.append(json.loads(line))
    return rows


def csv_rows(path, used):
    tabs = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if path.suffix.lower() == ".tsv" else {}
    file = io.StringIO(path.read_bytes().decode("utf-8-sig"), newline="")
    reader, lines, first = csv.reader(file, strict=True, **tabs), [], 1  # line of the next row
    try:
        for cells in reader:
            lines += [cells] if cells else []
            first = reader.line_num + 1
    except csv.Error as e:
        problem = f"a quotation mark is not closed, or not doubled ({e})"
        raise ValueError(f"in the row that begins in line {first}, {problem}") from e
    header, *rows = lines or [[]]
    header = [name if header.count(name) == 1 else f"{name} (twice)" for name in header]
    for number, row in enumerate(rows, 1):
        if len(row) != len(header):
            raise ValueError(f"row {number} has {len(row)} fields, the first line {len(header)}")
    return [dict(zip(header, row, strict=True)) for row in rows]


def parquet_rows(path, used):
    """Columns that are not used are None. Labels that the file has as numbers beside their names,
    a ClassLabel of `datasets`, are read by name: the file's order is its own."""
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    names = file.schema_arrow.names
    table = file.read([name for name in names if used is None or name in used])
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


def hub_rows(task, split):
    """[row] of a split on the hub."""
    if task.hub is None:
        raise FileNotFoundError(f"{task.name} is not on the hub: --data-dir takes local files")
    repository, name, revision = task.hub
    _, problem = hub_library()  # asks whether there is a network
    import datasets  # takes more than a second: when it is first needed

    datasets.disable_progress_bars()
    print(f"loading {repository} {name or ''} from the hub, or its cache", flush=True)
    try:
        found = datasets.load_dataset(repository, name, revision=revision)
        return found[task.hub_dev if split == "validation" else split].to_list()
    except Exception as e:  # network, hub and format each raise their own kinds
        reason = f"{split}, cannot be loaded from the hub ({problem or one_line(e)})"
        raise FileNotFoundError(f"{repository}, {reason}; --data-dir takes local files") from e


def own_labels(rows):
    """The classes of your own task: numbers by value, texts by their letters. Raises ValueError for
    what is no class, and for labels that only look different; says what the classes are."""
    values = [no_surrogates(x) if isinstance(x := row.get("label"), str) else x for row in rows]
    for number, value in enumerate(values, 1):
        if is_empty(value):
            raise ValueError(f"row {number}: the label is empty")
        decimal = re.fullmatch(r"[-+]?\d*\.\d+(e[-+]?\d+)?", str(value))
        if decimal or type(value) not in (str, int, bool):
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
    of_two = f"; f1 is that of {names[1]!r}" * (len(names) == 2)
    note(f"the labels are {len(names)} classes: {found:.300}{of_two}")
    return names
