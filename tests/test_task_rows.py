"""formats.task_rows: what a stranger's row may hold, and what becomes of it."""

from dataclasses import replace

import pytest

from conftest import write_rows
from data import get_task, load_split, own_task, to_candidates
from formats import task_rows


@pytest.mark.parametrize("names", ["text_b text_c", "text_c text_b", "text_b text_a"])
def test_columns_are_renamed_at_the_same_time(names, tokenizer, tmp_path):
    """Names that shift or change places: every text where it belongs."""
    texts = {"text_a": "blue", "text_b": "red", "text_c": "cat"}
    write_rows(tmp_path / "own/train.jsonl", [{**texts, "label": i} for i in range(2)])
    a, b = names.split()
    task = get_task("own", tmp_path, column_names={"text_a": a, "text_b": b})
    split = load_split(task, "train", tokenizer, tmp_path)
    assert split[0]["input_ids"] == [tokenizer.encode(texts[a], texts[b]).ids]


@pytest.mark.parametrize("names", [{"text_b": "texd_b"}, {"texd_b": "text_b"}])
def test_misspelt_columns_are_not_left_out(names, tmp_path):
    write_rows(tmp_path / "own/train.jsonl", [{"text_a": "red", "label": i} for i in range(2)])
    for task, takes in (("own", "text_a, label"), ("rte", "sentence1, sentence2, label")):
        with pytest.raises(ValueError, match=f"--columns .* there is no column .* takes {takes}"):
            get_task(task, tmp_path, column_names=names)


PAIR, CHOICE = {"text_a": "a", "text_b": "b"}, {"choices": ["x", "y"]}
OWN = [  # rows of the training file, labels, columns, classes
    ([{"text_a": "a", "text_b": None}, {"text_a": "b"}, {}], [10, 9, 2], "text_a", "2 9 10"),
    ([{"text_a": "a"}, PAIR], ["b", "a"], "text_a text_b", "a b"),
    ([{"text_a": "a"}, {"text_a": "b"}], [True, False], "text_a", "False True"),
    ([CHOICE, {**CHOICE, "text_a": "a"}], [0, 1], "text_a choices", "0 1"),
]


@pytest.mark.parametrize("rows, labels, columns, classes", OWN)
def test_columns_and_classes_of_your_own_task(rows, labels, columns, classes, tmp_path):
    """Columns are those that any row has, classes are sorted."""
    rows = [{**row, "label": label} for row, label in zip(rows, labels, strict=True)]
    write_rows(tmp_path / "own/train.jsonl", rows)
    task = get_task("own", tmp_path)
    assert (task.columns, task.labels) == (tuple(columns.split()), tuple(classes.split()))
    assert [task.labels[task.type.label(task, x)] for x in labels] == [str(x) for x in labels]


BAD = [  # columns of training, another row, what is said of it
    ("text_a", PAIR, "column 'text_b' is none of mine's, which are text_a"),
    ("choices", {"text_a": "a", **CHOICE}, "column 'text_a' is none of mine's"),
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

    def index(value, on_hub=False):
        return task_rows.label_index(value, labels, places, {"nope": "no"}, on_hub)

    assert [index(value) for value in ("Yes", " yes\n", "NO", "nope")] == [0, 0, 2, 1]
    assert [index(value, on_hub=True) for value in (2, "1")] == [2, 1]
    for value in (1, 3, None, 0.0, "maybe"):
        with pytest.raises(ValueError, match=f"label {value!r} is not one of Yes, no, NO"):
            index(value)
    with pytest.raises(ValueError, match="hidden"):
        index(-1, on_hub=True)
