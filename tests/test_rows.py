"""formats.rows: files are read as they are written, the lines that errors name, and the hub's
answers (formats.hub)."""

import csv
import json
import os
from functools import partial

import datasets
import huggingface_hub
import pandas
import pytest
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from conftest import rewrite, write_rows
from data import get_task, load_split
from formats import hub, rows
from formats.rows import library, origin, read_rows

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
    assert len(origin(split)["files"][path.name]) == 64


VALUES = ["2020-01-31", "2021-02-28T10:00:00Z", 7, 7.5, 9007199254740993, True, None, [], {"a": 1}]


def test_json_is_read_as_it_is_written(tokenizer, tmp_path):
    """No type is guessed: not of dates, nor of numbers beside others, nor for columns that are not
    in every row, or that nobody uses. A number in a text column is the text that was written."""
    rows = [{"text_a": 7.5, "label": 0}]
    rows += ({"text_a": i, "a": a, f"only {i}": i, "label": i} for i, a in enumerate(VALUES))
    path = tmp_path / "own/train.json"
    path.parent.mkdir()
    path.write_text("\n\n".join(map(json.dumps, rows)), encoding="utf-8-sig")
    assert repr([row for _, row in read_rows(path)]) == repr(rows)
    split = load_split(get_task("own", tmp_path), "train", tokenizer, tmp_path)
    assert split["input_ids"][:] == [[tokenizer.encode(str(row["text_a"])).ids] for row in rows]


@pytest.mark.parametrize("task, names", [("rte", ["not_entailment", "entailment"]), ("mine", "ba")])
def test_labels_with_names_of_their_own(task, names, tokenizer, tmp_path):
    """A parquet file with names for its numbers: they decide, in whatever order."""
    columns = ["sentence1", "sentence2"] if task == "rte" else ["text_a", "text_b"]
    rows = [{**dict.fromkeys(columns, text), "label": i} for i, text in enumerate(names)]
    rows = datasets.Dataset.from_list(rows)
    (tmp_path / task).mkdir()
    rows = rows.cast_column("label", datasets.ClassLabel(names=list(names)))
    rows.to_parquet(tmp_path / task / "train.parquet")
    task = get_task(task, tmp_path)
    split = load_split(task, "train", tokenizer, tmp_path)
    assert [task.labels[i] for i in split["label"]] == list(names)


LINES = [  # ending, content, what is said of it
    ("jsonl", '\n{"text_a": "a", "label": "x"}\n \n{"text_a": "b", "label": ""}', "4: label ''"),
    ("json", '\n[{"text_a": "a", "label": "x"},\n{"text_a": "b", "label": ""}]', "2: label ''"),
    ("json", '[{"text_a": "a", "label": "x"},\n{"text_a"]', "2: broken JSON"),
    ("csv", 'text_a,label\n"a\n\nb",x\n\nb,\n', "6: label ''"),
    ("tsv", 'text_a\tlabel\n"a\tx\n\nb\t\n', "4: label ''"),
]


@pytest.mark.parametrize("ending, content, said", LINES)
def test_errors_name_the_line(ending, content, said, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / f"mine/train.{ending}").write_text(content)
    with pytest.raises(ValueError, match=f"train.{ending}, line {said}"):
        get_task("mine", tmp_path)


def test_a_damaged_cache_is_made_anew(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(library().config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write_rows(tmp_path / "own/train.jsonl", [{"text_a": f"a {i}", "label": i} for i in range(50)])

    def load():
        return load_split(get_task("own", tmp_path), "train", tokenizer, tmp_path)

    before = load()["input_ids"][:]
    (path,) = (tmp_path / "cache").rglob("*.arrow")
    whole = path.read_bytes()
    for content in (b"", b"x" * 300, whole[:-100], whole[: len(whole) // 2]):
        rewrite(path, content)
        assert load()["input_ids"][:] == before
    assert os.listdir(path.parent) == [path.name]


# --------------------------------------------------------------------------------------------------
# The hub


class Answer(Exception):
    """What the hub's library raises for an answer that is an error."""

    response = "the hub's"


def test_what_a_hub_that_answers_has_said(monkeypatch):
    """It is not called one that cannot be reached; and what a branch lacked may be there now."""
    behind = LocalEntryNotFoundError("check")
    behind.__cause__ = Answer("429 Too\nMany")
    errors = [behind, Answer("no\n\nYou may not."), EntryNotFoundError("404")]

    def download(*_, **__):
        raise errors[0]

    lacks = huggingface_hub._CACHED_NO_EXIST
    monkeypatch.setattr(hub, "hub_answers", lambda: True)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: lacks)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    for said in ("does not come from .*: 429 Too Many", "does not come from .*: no You may not."):
        assert hub.download("me/it", "x.json", "0" * 40) is None  # a commit does not change
        with pytest.raises(FileNotFoundError, match=said) as e:
            hub.download("me/it", "x.json")
        assert "cannot be reached" not in str(e.value) and errors.pop(0)
    assert hub.download("me/it", "x.json") is None


def test_the_revision_is_the_commit(tmp_path, monkeypatch, tokenizer):
    """`datasets` keeps the rows of a commit in a directory of that name."""
    commit = "0123456789" * 4
    path = tmp_path / commit / "x.arrow"
    path.parent.mkdir()
    found = datasets.Dataset.from_list([{"sentence": "red", "label": 0}] * 3)
    found.map(lambda row: row, cache_file_name=str(path))
    split = datasets.Dataset.from_file(str(path))
    monkeypatch.setattr(rows, "load_from_hub", lambda *_: {"train": split})
    result = load_split(get_task("sst2"), "train", tokenizer)
    assert origin(result) == {"revision": commit, "files": {}, "held_out": None}
    assert result["label"][:] == [0] * 3
