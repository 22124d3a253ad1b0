"""formats.task_rows: what a stranger's row may hold, and what becomes of it; runtime.results."""

import math
from dataclasses import replace

import pytest
import torch

import data
from conftest import write_rows
from data import get_task, load_split, own_task, to_candidates
from formats import task_rows
from formats.task_rows import apply_column_names
from runtime.results import Results


def test_columns_are_renamed_at_the_same_time():
    for names, row, expected in (
        ({}, {"a": 1}, {"a": 1}),
        ({"a": "b", "b": "c"}, {"b": 2, "c": 3}, {"a": 2, "b": 3}),
        ({"a": "b", "b": "a"}, {"a": 1, "b": 2, "c": 3}, {"a": 2, "b": 1, "c": 3}),
        ({"a": "b", "c": "b"}, {"b": 2}, {"a": 2, "c": 2}),
        ({"a": "a", "b": "no"}, {"a": 1}, {"a": 1}),
    ):
        assert apply_column_names(row, names) == expected
    with pytest.raises(ValueError, match="--columns a=b: there is a column 'a' already"):
        apply_column_names({"a": 1, "b": 2}, {"a": "b"})


def test_renamed_columns_are_trained_on(tokenizer, tmp_path):
    """Names that shift: every text where it belongs."""
    rows = [{"text_b": "red", "text_c": "cat", "label": i} for i in range(2)]
    write_rows(tmp_path / "own/train.jsonl", rows)
    task = get_task("own", tmp_path, columns={"text_a": "text_b", "text_b": "text_c"})
    split = load_split(task, "train", tokenizer, tmp_path)
    assert split[0]["input_ids"] == [tokenizer.encode("red", "cat").ids]


@pytest.mark.parametrize("names", [{"text_b": "texd_b"}, {"texd_b": "text_b"}, {"choices": "c"}])
def test_misspelt_columns_are_not_left_out(names, tmp_path):
    rows = [{"text_a": "red", "label": i} for i in range(2)]
    write_rows(tmp_path / "own/train.jsonl", rows)
    with pytest.raises(ValueError, match="--columns .* there is no column .* takes text_a, label"):
        get_task("own", tmp_path, columns=names)
    with pytest.raises(ValueError, match="takes sentence1, sentence2, label"):
        get_task("rte", tmp_path, columns=names)


PAIR, CHOICE = {"text_a": "a", "text_b": "b"}, {"choices": ["x", "y"]}
OWN = [  # rows of the training file, columns or what is said of them
    ([{"text_a": "a"}, {"text_a": "b"}], "text_a"),
    ([{"text_a": "a", "text_b": None}, {"text_a": "b"}], "text_a"),
    ([PAIR, PAIR], "text_a text_b"),
    ([{"text_a": "a"}, PAIR], "text_a text_b"),
    ([CHOICE, CHOICE], "choices"),
    ([CHOICE, {**CHOICE, "text_a": "a"}], "text_a choices"),
    ([CHOICE, {**CHOICE, **PAIR}], ValueError("train.jsonl, line 2: 'text_b' beside 'choices'")),
]


@pytest.mark.parametrize("rows, expected", OWN)
def test_columns_of_your_own_task(rows, expected, tmp_path):
    """Those that any row has, in whatever row they begin."""
    write_rows(tmp_path / "own/train.jsonl", [{**row, "label": i} for i, row in enumerate(rows)])
    if isinstance(expected, str):
        assert get_task("own", tmp_path).columns == tuple(expected.split())
    else:
        with pytest.raises(ValueError, match=str(expected)):
            get_task("own", tmp_path)


BAD = [  # columns of training, another row, what is said of it
    ("text_a", PAIR, "column 'text_b' is one that mine did not have in training"),
    ("text_a", {"text_a": "a", **CHOICE}, "column 'choices' is one that mine did not have"),
    ("choices", {"text_a": "a", **CHOICE}, "column 'text_a' is one that mine did not have"),
    ("text_a text_b", {"text_a": "a"}, "no column 'text_b'; it has text_a, label"),
    ("text_a", {"text_a": float("nan")}, "column 'text_a' is missing"),
    ("choices", {"choices": {"text": ["x", "y"]}}, "does not hold a list of texts"),
    ("choices", {"choices": ["x", "y", "z"]}, "3 choices, expected 2"),
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


def test_what_other_code_has_made_is_made_anew():
    code = task_rows.source_code(data.load_split, data.to_candidates)
    assert len(code) == 2 and any("def load_split" in text for text in code)


def test_results_keep_the_order_of_the_batches():
    results = Results(5, 2)
    assert (results.batch_size, results.steps) == (2, 3)
    for labels, loss in (([0, 1], 1.0), ([1, 1], 2.0), ([0], 4.0)):
        labels = torch.tensor(labels)
        results.add(labels, 1 - labels, torch.tensor(loss), labels >= 0)
    labels, predictions, loss = results.gathered(torch.long)
    assert labels.tolist() == [0, 1, 1, 1, 0] and predictions.tolist() == [1, 0, 0, 0, 1]
    assert loss == (1 + 1 + 2 + 2 + 4) / 5


def test_outputs_that_are_not_finite():
    results = Results(2, 2)
    logits = torch.tensor([[0.0, 1.0], [math.inf, 0.0]])
    right = logits.isfinite().all(-1)
    results.add(torch.tensor([1, 0]), logits.argmax(-1), torch.tensor(0.5), right)
    with pytest.raises(FloatingPointError, match="not finite"):
        results.gathered(torch.long)
