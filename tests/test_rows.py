"""Files are read as they are written; what becomes of a row; a hub that is silent."""

import csv
import os
import socket
import subprocess
import sys
from functools import partial

import datasets
import pandas
import pytest

from child import ROOT
from conftest import write_rows
from data import get_task, load_split
from formats import columns
from formats.rows import read_rows

WRITERS = {  # others' code
    "jsonl": partial(pandas.DataFrame.to_json, orient="records", lines=True),
    "csv": partial(pandas.DataFrame.to_csv, index=False),
    "tsv": partial(pandas.DataFrame.to_csv, index=False, sep="\t", quoting=csv.QUOTE_NONE),
    "parquet": pandas.DataFrame.to_parquet,
}


@pytest.mark.parametrize("ending", WRITERS)
def test_file_formats(ending, tokenizer, tmp_path):
    rows = [
        {"sentence1": 'the "red cat', "sentence2": "NA, or None", "label": 0},
        {"sentence1": "007", "sentence2": "1.10", "label": 1},
    ]
    path = tmp_path / f"rte/train.{ending}"
    path.parent.mkdir()
    WRITERS[ending](pandas.DataFrame(rows), path)
    texts = ending in ("csv", "tsv")
    found = [row for _, row in read_rows(path)]
    assert found == [{**row, "label": str(row["label"]) if texts else row["label"]} for row in rows]
    split = load_split(get_task("rte", tmp_path), "train", tokenizer, tmp_path)
    assert split["label"][:] == [0, 1]
    assert split[0]["input_ids"] == [tokenizer.encode('the "red cat', "NA, or None").ids]


def test_labels_with_names_of_their_own(tokenizer, tmp_path):
    """A parquet file with names for its numbers: they decide, in whatever order."""
    names = ["not_entailment", "entailment"]  # rte has them the other way round
    rows = [{"sentence1": "a", "sentence2": "b", "label": i} for i in range(2)]
    rows = datasets.Dataset.from_list(rows).cast_column("label", datasets.ClassLabel(names=names))
    (tmp_path / "rte").mkdir()
    rows.to_parquet(tmp_path / "rte" / "train.parquet")
    split = load_split(get_task("rte", tmp_path), "train", tokenizer, tmp_path)
    assert split["label"][:] == [1, 0]


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


def test_labels_by_name_and_by_place():
    labels = ("Yes", "no", "NO")
    places = columns.make_label_ids(labels)  # the first of several alike

    def index(value, on_hub=False):
        return columns.label_index(value, labels, places, {"nope": "no"}, on_hub)

    assert [*map(index, ("Yes", "yes", " yes\n", "NO", "nope"))] == [0, 0, 0, 2, 1]
    assert [index(value, on_hub=True) for value in (2, "1")] == [2, 1]
    for value in (1, 3, None, 0.0, "maybe"):
        with pytest.raises(ValueError, match=f"label {value!r} is not one of Yes, no, NO"):
            index(value)


def test_a_hub_that_does_not_answer(tmp_path):
    """An id that is not in the cache fails within five seconds, imports not counted."""
    code = """
import time, datasets, huggingface_hub
from formats.encoder import fetch_encoder
started = time.monotonic()
try:
    fetch_encoder("bert-base-uncasde")
except FileNotFoundError as e:
    print(e, "after", time.monotonic() - started)
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        variables = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        options = {"cwd": ROOT, "env": os.environ | variables, "timeout": 60}
        process = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, **options
        )
    first, second = process.stdout.splitlines()
    assert process.stderr == "" and "does not answer, so only what has been downloaded" in first
    assert all(text in second for text in ("bert-base-uncasde", address, str(tmp_path)))
    assert float(second.split()[-1]) < 5
