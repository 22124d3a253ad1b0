"""The rows of a task: its columns, and how candidates and label become tokens. A candidate is a
pair (text_a, text_b or None)."""

import contextlib
import difflib
import inspect
from pathlib import Path

from formats.rows import count_choices, has_task, label_values, rename, select_columns

LONGEST_TEXT = 1_000_000  # characters


def check_own_task(name, data_dir, known):
    """Raises ValueError if neither `data_dir` nor `known`, the paper's tasks, has one of this
    name."""
    if has_task(data_dir, name):
        return
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"the paper's are {', '.join(known)};"
    own = f"{data_dir}/{name}" if data_dir else "--data-dir DIR with DIR/TASK/train.jsonl"
    raise ValueError(f"unknown task {name!r}: {hint} your own task needs {own}")


def own_columns(path, rows, column_names, labels=None):
    """(text columns, labels, whether it is multiple choice) of an own task's rows in the file
    `path`. column_names: {our name of a column: the file's}; labels: if they are known already."""
    rows = rename(rows, column_names)
    if "choices" in rows.column_names:
        columns = ("text_a", "choices") if "text_a" in rows.column_names else ("choices",)
        return columns, tuple(str(i) for i in range(count_choices(path, rows))), True
    columns = ("text_a", "text_b") if "text_b" in rows.column_names else ("text_a",)
    return columns, tuple(label_values(path, rows) if labels is None else labels), False


def select(task, where, rows):
    """Rows with the columns of a task alone, by its names of them."""
    rows = rename(rows, task.column_names)
    return select_columns(where, rows, [task.label, *task.columns], task.aliases)


@contextlib.contextmanager
def naming_columns(columns):
    """Raises ValueError in place of the errors of a function that takes a row's values apart."""
    try:
        yield
    except (TypeError, KeyError, AttributeError) as e:
        names = ", ".join(columns)
        raise ValueError(f"columns {names} do not hold what the task expects ({e})") from e


def check_candidates(candidates, choices=None):
    """Raises ValueError for a text that is too long, or another number of candidates than
    `choices`, where that is given."""
    longest = max((len(text) for pair in candidates for text in pair if text), default=0)
    if longest > LONGEST_TEXT:
        raise ValueError(f"a text of {longest:,} characters, at most {LONGEST_TEXT:,} are read")
    if choices is not None and len(candidates) != choices:
        raise ValueError(f"{len(candidates)} choices, expected {choices}")


def make_label_ids(labels):
    """{label, as it is and in small letters: its place among them}; the first of several alike
    counts."""
    spelled = {label: i for i, label in enumerate(labels)}
    small = {label.lower(): i for i, label in reversed([*enumerate(labels)])}
    return {**small, **spelled}


def label_index(value, labels, label_ids, aliases, of_the_hub):
    """
    The place in `labels` of a label as the data writes it. label_ids: `make_label_ids`; aliases:
    {other name: label}; of_the_hub: whether an integer may be the place itself. Raises ValueError
    that shows the value.
    """
    text = str(value).strip()
    text = aliases.get(text, text).lower()
    if type(value) in (str, int, bool):
        if str(value) in label_ids:  # own labels may differ in case alone
            return label_ids[str(value)]
        if text in label_ids:  # "1".."3" and own integer labels come as their own names
            return label_ids[text]
        if of_the_hub and not labels[0].isdigit() and text in map(str, range(len(labels))):
            return int(text)  # the hub's integers
    if text == "-1":
        raise ValueError("the label is hidden (-1): experiments.predict --out writes a submission")
    raise ValueError(f"label {value!r:.100} is not one of {', '.join(labels):.200}")


def encode(tokenizer, examples):
    """[(candidates, label)] -> the columns of a split: input_ids and token_type_ids, for every
    candidate a list of ids; label; length, the tokens of the longest candidate."""
    pairs = [pair for candidates, _ in examples for pair in candidates]
    # in Rust, on all cores
    encodings = iter(tokenizer.encode_batch([a if b is None else (a, b) for a, b in pairs]))
    groups = [[next(encodings) for _ in candidates] for candidates, _ in examples]
    return {
        "input_ids": [[encoding.ids for encoding in group] for group in groups],
        "token_type_ids": [[encoding.type_ids for encoding in group] for group in groups],
        "label": [label for _, label in examples],
        "length": [max(len(encoding.ids) for encoding in group) for group in groups],
    }


def source_code(*things):
    """The text of the files of functions and classes, and of this one: what other code has made is
    to be made anew."""
    files = {__file__, *map(inspect.getfile, things)}
    return sorted(Path(file).read_text(encoding="utf-8") for file in files)
