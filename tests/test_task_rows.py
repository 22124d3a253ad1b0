"""formats.task_rows: what a stranger's row may hold, and what becomes of it."""

from dataclasses import replace

import pytest

from conftest import write_rows
from data import get_task, load_split, own_task, to_candidates
from formats import task_rows
from formats.task_rows import apply_column_names


def test_columns_are_renamed_at_the_same_time():
    swapped = apply_column_names({"a": 1, "b": 2, "c": 3}, {"a": "b", "b": "a"})
    assert swapped == {"a": 2, "b": 1, "c": 3}
    with pytest.raises(ValueError, match="--columns a=b: there is a column 'a' already"):
        apply_column_names({"a": 1, "b": 2}, {"a": "b"})


def test_renamed_columns_are_trained_on(tokenizer, tmp_path):
    """Names that shift: every text where it belongs."""
    rows = [{"text_b": "red", "text_c": "cat", "label": i} for i in range(2)]
    write_rows(tmp_path / "own/train.jsonl", rows)
    task = get_task("own", tmp_path, columns={"text_a": "text_b", "text_b": "text_c"})
    split = load_split(task, "train", tokenizer, tmp_path)
    assert split[0]["input_ids"] == [tokenizer.encode("red", "cat").ids]


@pytest.mark.parametrize("names", [{"text_b": "texd_b"}, {"texd_b": "text_b"}])
def test_misspelt_columns_are_not_left_out(names, tmp_path):
    write_rows(tmp_path / "own/train.jsonl", [{"text_a": "red", "label": i} for i in range(2)])
    for task, takes in (("own", "text_a, label"), ("rte", "sentence1, sentence2, label")):
        with pytest.raises(ValueError, match=f"--columns .* there is no column .* takes {takes}"):
            get_task(task, tmp_path, columns=names)


PAIR, CHOICE = {"text_a": "a", "text_b": "b"}, {"choices": ["x", "y"]}
OWN = [  # rows of the training file, columns
    ([{"text_a": "a", "text_b": None}, {"text_a": "b"}], "text_a"),
    ([{"text_a": "a"}, PAIR], "text_a text_b"),
    ([CHOICE, {**CHOICE, "text_a": "a"}], "text_a choices"),
]


@pytest.mark.parametrize("rows, expected", OWN)
def test_columns_of_your_own_task(rows, expected, tmp_path):
    """Those that any row has, in whatever row they begin."""
    write_rows(tmp_path / "own/train.jsonl", [{**row, "label": i} for i, row in enumerate(rows)])
    assert get_task("own", tmp_path).columns == tuple(expected.split())


BAD = [  # columns of training, another row, what is said of it
    ("text_a", PAIR, "column 'text_b' is one that mine did not have in training"),
    ("choices", {"text_a": "a", **CHOICE}, "column 'text_a' is one that mine did not have"),
    ("text_a text_b", {"text_a": "a"}, "no column 'text_b'; it has text_a, label"),
    ("text_a", {"text_a": float("nan")}, "column 'text_a' is missing"),
    ("choices", {"choices": {"text": ["x", "y"]}}, "does not hold a list of texts"),
]


@pytest.mark.parametrize("columns, row, said", BAD)
def test_nothing_is_left_out_without_a_word(columns, row, said):
    task = replace(own_task(columns.split(), ("0", "1")), name="mine")
    with pytest.raises(ValueError, match=said):
        to_candidates(task, {**row, "label": 0})


def test_labels_by_name_and_by_place():
    labels = ("Yes", "no", "NO")
    places = task_rows.make_label_ids(labels)
    assert places == {"Yes": 0, "no": 1, "NO": 2, "yes": 0}  # the first of several alike

    def index(value, from_hub=False):
        return task_rows.label_index(value, labels, places, {"nope": "no"}, from_hub)

    assert [index(value) for value in ("Yes", " yes\n", "NO", "nope")] == [0, 0, 2, 1]
    assert [index(value, from_hub=True) for value in (2, "1")] == [2, 1]
    for value in (1, 3, None, 0.0, "maybe"):
        with pytest.raises(ValueError, match=f"label {value!r} is not one of Yes, no, NO"):
            index(value)
    with pytest.raises(ValueError, match="hidden"):
        index(-1, from_hub=True)
