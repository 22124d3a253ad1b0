"""formats.rows: every format of a file with rows, and the lines that errors name."""

import json

import datasets
import pytest

import data
from conftest import write_rows
from data import get_task, load_split


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "tsv", "parquet"])
def test_file_formats(ending, tokenizer, tmp_path):
    rows = [
        {"sentence1": 'the "red cat', "sentence2": "NA, or None", "label": 0},
        {"sentence1": "a", "sentence2": "b", "label": 1},
    ]
    path = tmp_path / "rte" / f"train.{ending}"
    path.parent.mkdir()
    if ending == "jsonl":
        write_rows(path, rows)
    elif ending == "json":
        path.write_text(json.dumps(rows))
    elif ending == "tsv":
        path.write_text(
            "".join(
                "\t".join(map(str, values)) + "\n"
                for values in (rows[0], *(row.values() for row in rows))
            )
        )
    else:
        getattr(datasets.Dataset.from_list(rows), f"to_{ending}")(path)
    split = load_split(get_task("rte", tmp_path), "train", tokenizer, tmp_path)
    assert split["label"][:] == [0, 1]
    assert split[0]["input_ids"] == [
        tokenizer.encode(rows[0]["sentence1"], rows[0]["sentence2"]).ids
    ]


@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_cells_are_texts(ending, tmp_path):
    """What looks like a number stays as it is written, in every split; the classes 1 to 10 are
    sorted as numbers."""
    comma = "," if ending == "csv" else "\t"
    cells = [["007", "10"], ["1.10", "2"], ["1e3", "01"], ["NA", "1"]]
    path = tmp_path / "mine" / f"train.{ending}"
    path.parent.mkdir()
    path.write_text("".join(comma.join(row) + "\n" for row in [["text_a", "label"], *cells]))
    _, rows = data.read_file(path.parent, "mine", "train")
    assert [[row["text_a"], row["label"]] for row in rows] == cells
    assert get_task("mine", tmp_path).labels == ("01", "1", "2", "10")


def test_lines_are_counted_as_in_the_file(tokenizer, tmp_path):
    lines = {
        "jsonl": '\n{"text_a": "a", "label": "x"}\n \n{"text_a": "b", "label": ""}\n',
        "csv": 'text_a,label\n"a\n\nb",x\n\nb,\n',
        "tsv": 'text_a\tlabel\n"a\tx\n\nb\t\n',
    }
    for (ending, text), line in zip(lines.items(), (4, 6, 4), strict=True):
        write_rows(tmp_path / ending / "train.jsonl", [])
        (tmp_path / ending / "train.jsonl").unlink()
        (tmp_path / ending / f"train.{ending}").write_text(text)
        with pytest.raises(ValueError, match=f"train.{ending}, line {line}: label ''"):
            get_task(ending, tmp_path)
