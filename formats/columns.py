"""The columns of data files that others wrote: their names, texts and labels, and how candidates
become tokens. A candidate is a pair (text_a, text_b or None)."""

import hashlib
import re
import unicodedata
from pathlib import Path

from formats.files import error_prefix

OWN_COLUMNS = ("text_a", "text_b", "choices")  # of your own task


def check_own_task(name, data_dir, known):
    """Raises ValueError if neither `data_dir` nor `known`, the table of tasks, has one of this
    name."""
    if data_dir is None or Path(name).name != name or not (Path(data_dir) / name).is_dir():
        own = f"{data_dir}/{name}" if data_dir else "--data-dir DIR with DIR/TASK/train.jsonl"
        own += ", or --train-file FILE"
        names = ", ".join(known)
        raise ValueError(f"unknown task {name!r}: there are {names}; your own needs {own}")


def apply_column_names(row, names):
    """A row under our names of its columns; names: {our name of a column: the file's}, all of which
    are replaced at the same time."""
    names = names or {}
    rest = {name: value for name, value in row.items() if name not in {*names, *names.values()}}
    return rest | {ours: row[theirs] for ours, theirs in names.items() if theirs in row}


def check_column_names(names, columns, where, row):
    """Raises ValueError for a name that renames none of the columns that are read: one that is
    misspelt would be left out without a word. row: the first of the file `where`, under the file's
    own column names"""
    for ours, theirs in (names or {}).items():
        given = f"--columns {ours}={theirs}"
        if ours not in columns:
            raise ValueError(f"{given}: the task takes no {ours!r}; it takes {', '.join(columns)}")
        if theirs not in row:
            raise ValueError(f"{given}: {where} has no such column; it has {', '.join(row):.200}")


def own_columns(where, rows, names):
    """(text columns, labels) of your own task. rows: (line, row) one after another; names: {our
    name of a column: the file's}. Raises ValueError that names the line."""
    filled, values, choices = set(), set(), 0
    for i, (line, row) in enumerate(rows):
        if i == 0:
            check_column_names(names, (*OWN_COLUMNS, "label"), where, row)
        with error_prefix(f"{where}, line {line}"):
            row = apply_column_names(row, names)
            if i == 0 and "choices" in row:
                choices = len(row["choices"]) if isinstance(row["choices"], list) else 0
                if choices < 2:
                    raise ValueError("'choices' must be a list of at least two texts")
            filled |= {column for column in OWN_COLUMNS if row.get(column) is not None}
            if not choices:
                check_own_label(row, names)
                values.add(str(row["label"]))
    if choices:
        columns = ("text_a", "choices") if "text_a" in filled else ("choices",)
        return columns, tuple(str(i) for i in range(choices))
    columns = ("text_a", "text_b") if "text_b" in filled else ("text_a",)
    return columns, tuple(sorted_labels(where, values))


def missing(column, row, names):
    """Why a column cannot be read, with the columns as the file calls them."""
    if column in row:
        return f"column {column!r} is empty"
    columns = ", ".join((names or {}).get(name, name) for name in row) or "none: it is empty"
    return f"no column {column!r}; it has {columns:.200}"


def check_own_label(row, names):
    """Raises ValueError unless it is a text or an integer."""
    if "label" not in row:
        why = missing("label", row, names)
        raise ValueError(f"{why}: --columns label=NAME says which one it is")
    value = row["label"]
    if value is None or value == "":
        raise ValueError(f"label {value!r} is empty")
    if re.fullmatch(r"[-+]?\d*\.\d+(e[-+]?\d+)?", str(value)):
        advice = "classes are texts or integers; for a regression see examples/sts_b.py"
        raise ValueError(f"label {str(value):.100} is a decimal number: {advice}")
    if type(value) not in (str, int, bool):
        raise ValueError(f"label {value!r:.100} is neither a text nor an integer")


def sorted_labels(where, values):
    """Numbers by value, texts by their letters. Raises ValueError for labels that only look
    different, or where all are the same."""
    alike = {unicodedata.normalize("NFC", value).strip() for value in values}
    if len(alike) < len(values):
        raise ValueError(
            f"{where}: labels that differ in blanks at their ends, or in how an accent is written: "
            f"make them one: {', '.join(map(ascii, sorted(values))):.300}"
        )
    if len(values) == 1:
        raise ValueError(f"{where}: all labels are {[*values][0]!r:.100}: nothing to learn")
    numbers = all(value.removeprefix("-").isdecimal() for value in values)
    return sorted(values, key=lambda value: (int(value), value) if numbers else value)


def check_row(row, columns, label, aliases, unused, names):
    """
    (texts of the columns, label) of a row. Numbers are texts; `endings` and `choices` are lists of
    texts, or on the hub dictionaries with one. Raises ValueError, naming the column, for what does
    not fit or would be left out without a word.

    label: the column of the label; aliases: {name in other copies: ours}, which count where ours
    are not there; unused: columns that must be empty; names: by which the row was renamed
    """
    for other, column in aliases.items():
        if row.get(column) is None and other in row:
            row = {**row, column: row[other]}
    for column in unused:
        if row.get(column) is not None:
            known = ", ".join(columns)
            raise ValueError(f"column {column!r} is none of the task's, which are {known}")
    for column in (label, *columns):
        if (value := row.get(column)) is None or value != value:  # NaN
            raise ValueError(missing(column, row, names))
    texts = []
    for column in columns:
        value = row[column]
        if column in ("endings", "choices"):
            of_the_hub = isinstance(value, dict) and column == "choices" and not unused
            options = value.get("text") if of_the_hub else value
            if not isinstance(options, list) or not all(type(option) is str for option in options):
                raise ValueError(f"column {column!r} does not hold a list of texts")
        elif type(value) not in (str, int, float):
            raise ValueError(f"column {column!r} holds {type(value).__name__}, expected a text")
        texts.append(str(value) if type(value) in (int, float) else value)
    return texts, row[label]


def by_key(choices, keys):
    """{"label": the key of each text, "text": texts} -> the texts, in the order of `keys`"""
    found = (choices.get("label") or list(keys)) if isinstance(choices, dict) else []
    if sorted(map(str, found)) != list(keys) or len(choices["text"]) != len(keys):
        raise ValueError(f"'choices' must hold one text for each of {keys}, not {choices!r:.100}")
    return [choices["text"][found.index(key)] for key in keys]


def check_candidates(candidates, choices=None):
    """Raises ValueError for a text with half a character, as JSON can write one, or for another
    number of candidates than `choices`, where that is given."""
    for text in (text for pair in candidates for text in pair if text):
        text.encode()
    if choices is not None and len(candidates) != choices:
        raise ValueError(f"{len(candidates)} choices, expected {choices}")


def make_label_ids(labels):
    """{label, as written and in lower case: its index}; the first of several alike counts."""
    lower = {label.lower(): i for i, label in reversed([*enumerate(labels)])}
    return {**lower, **{label: i for i, label in enumerate(labels)}}


def label_index(value, labels, label_ids, aliases, on_hub):
    """The index in `labels` of a label as the data writes it. label_ids: `make_label_ids`; aliases:
    {other name: label}; on_hub: whether an integer may be the index itself, as on the hub."""
    text = str(value).strip()
    text = aliases.get(text, text).lower()
    for name in (str(value), text):  # own labels may differ in case alone
        if name in label_ids:  # labels made of digits are names, not indices
            return label_ids[name]
    if on_hub and not labels[0].isdigit() and text in map(str, range(len(labels))):
        return int(text)  # the hub's integers
    if text == "-1":
        raise ValueError("the label is hidden (-1): experiments.predict takes such rows")
    raise ValueError(f"label {value!r:.100} is not one of {', '.join(labels):.200}")


def encode_pairs(tokenizer, pairs):
    """The tokenizer's encodings of candidates, made on all cores."""
    return tokenizer.encode_batch([a if b is None else (a, b) for a, b in pairs])


def encode(tokenizer, examples):
    """[(candidates, label)] -> of each example the columns of a split: input_ids and
    token_type_ids, for every candidate a list of ids; label; length, the tokens of the longest
    candidate; hash, of the texts and the label."""
    encodings = iter(encode_pairs(tokenizer, [p for candidates, _ in examples for p in candidates]))
    for candidates, label in examples:
        group = [next(encodings) for _ in candidates]
        digest = hashlib.sha256(repr((candidates, label)).encode()).digest()
        yield {
            "input_ids": [encoding.ids for encoding in group],
            "token_type_ids": [encoding.type_ids for encoding in group],
            "label": label,
            "length": max(len(encoding.ids) for encoding in group),
            "hash": int.from_bytes(digest[:8], "little", signed=True),
        }
