"""The 16 tasks in the hub's columns, your own data as they come, and batches, with any Unicode."""

import csv
import json
import math
import re
from functools import partial

import datasets
import numpy as np
import pandas
import pyarrow.parquet
import pytest

from conftest import GOLDEN, change
from data import TASKS, Example, Task, batches, collate, get_task, load_split, own_task
from experiments.load_run import LoadedRun
from formats.rows import Source, our_rows, own_labels, read_rows, text_of
from formats.tokenizer import load_tokenizer


def words(columns, *values):
    """words("a b", 1, 2) -> {"a": 1, "b": 2}"""
    return dict(zip(columns.split(), values, strict=True))


PAIR, ONE, QUESTION = [("p", "q")], [("p", None)], [("q", choice) for choice in "vwxyz"]
CONTEXT = [("c", f"q {choice}") for choice in "wxyz"]
FILLED = [("Al won", None), ("Bo won", None)]
KEYS = {"label": list("CABED"), "text": list("xvwzy")}  # in any order
SOCIAL_I_QA = "context question answerA answerB answerC label"
COSMOS_QA = "context question answer0 answer1 answer2 answer3 label"
ROWS = [  # of every task as the hub has it: columns and values, candidates, index of the label
    ("mnli", words("premise hypothesis label idx", "p", "q", 2, 0), PAIR, 2),
    ("qqp", words("question1 question2 label idx", "p", "q", 1, 0), PAIR, 1),
    ("sst2", words("sentence label idx", "p", 0, 0), ONE, 0),
    ("winogrande", words("sentence option1 option2 answer", "_ won", "Al", "Bo", "2"), FILLED, 1),
    ("imdb", words("text label", "p", 1), ONE, 1),
    ("hellaswag", words("ctx_a ctx_b ctx endings label", *"cq", "c q", [*"wxyz"], "3"), CONTEXT, 3),
    ("social_i_qa", words(SOCIAL_I_QA, *"cqwxy", "1\n"), CONTEXT[:3], 0),
    ("cosmos_qa", words(COSMOS_QA, *"cqwxyz", 2), CONTEXT, 2),
    ("scitail", words("sentence1 sentence2 gold_label", "p", "q", "entailment"), PAIR, 0),
    ("argument", words("topic sentence annotation", "p", "q", "Argument_for"), PAIR, 2),
    ("commonsense_qa", words("question answerKey choices", "q", "E", KEYS), QUESTION, 4),
    ("boolq", words("question passage label", "q", "p", 1), PAIR, 1),
    ("mrpc", words("sentence1 sentence2 label", "p", "q", 0), PAIR, 0),
    ("sick", words("sentence_A sentence_B label", "p", "q", "NEUTRAL"), PAIR, 1),
    ("rte", words("sentence1 sentence2 label", "p", "q", 0), PAIR, 0),
    ("cb", words("premise hypothesis label", "p", "q", 1), PAIR, 1),
    # other copies: SciTail's tsv_format, Google's BoolQ, labels by name
    ("scitail", words("premise hypothesis label", "p", "q", "neutral"), PAIR, 1),
    ("boolq", words("question passage answer", "q", "p", True), PAIR, 1),
    ("rte", words("sentence1 sentence2 label", "p", "q", "not_entailment"), PAIR, 1),
]


@pytest.mark.parametrize("name, row, candidates, label", ROWS)
def test_hub_columns(name, row, candidates, label, tokenizer, tmp_path, monkeypatch):
    """To tokens and a label; in prediction, too, also of texts in their order."""
    assert {name for name, *_ in ROWS} == set(TASKS) and len(TASKS) == 16
    change(tmp_path / "argument" / "train.jsonl", [row] * 3)
    source, asked = Source(tmp_path if name == "argument" else None), set()
    task = get_task(name, source)

    def load_dataset(*address, revision):
        asked.add((*address, revision))
        counts = {"train": 3, task.hub_dev: 4}
        return {split: datasets.Dataset.from_list([row] * n) for split, n in counts.items()}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    train_set = load_split(task, source, "train", tokenizer)
    assert [example.label for example in train_set] == [label] * (2 if name == "imdb" else 3)
    for ids, (a, b) in zip(train_set[0].input_ids, candidates, strict=True):
        assert [*ids] == tokenizer.encode(*[text for text in (a, b) if text is not None]).ids
    texts = [{"premise": "p", "hypothesis": "q", **row}[column] for column in task.columns]
    run = LoadedRun(None, task, source, *[None] * 4)
    assert run.candidates(row) == run.candidates([texts]) == [candidates]
    if name != "argument":
        n = 1 if name == "imdb" else 4
        assert len(load_split(task, source, "validation", tokenizer)) == n
        assert asked == {task.hub}


def test_argument_as_distributed(tokenizer, tmp_path):
    """Eight topic files, quoting off, the split in a column."""
    labels = {"train": "NoArgument", "val": "Argument_for", "test": "Argument_against"}
    for topic in ("abortion", "school_uniforms"):
        text = "topic\turl\tsentence\tannotation\tset\n"
        text += "".join(f'{topic}\tu\t"{part} is open\t{labels[part]}\t{part}\n' for part in labels)
        change(tmp_path / "argument" / f"{topic}.tsv", text)
    source = Source(tmp_path)
    for i, split in enumerate(("train", "test", "validation")):
        found = load_split(get_task("argument", source), source, split, tokenizer)
        assert [example.label for example in found] == [i] * 2
    assert [*found[0].input_ids[0]] == tokenizer.encode("abortion", '"val is open').ids


WRITERS = {  # others' code
    "jsonl": partial(pandas.DataFrame.to_json, orient="records", lines=True),
    "json": partial(pandas.DataFrame.to_json, orient="records", indent=2),
    "csv": partial(pandas.DataFrame.to_csv, index=False, encoding="utf-8-sig"),  # with a BOM
    "CSV": partial(pandas.DataFrame.to_csv, index=False, sep=";"),  # where 1,5 is a decimal number
    "Csv": partial(pandas.DataFrame.to_csv, index=False, lineterminator="\r"),  # an old Mac's
    "tsv": partial(pandas.DataFrame.to_csv, index=False, sep="\t", quoting=csv.QUOTE_NONE),
    "parquet": pandas.DataFrame.to_parquet,
}


@pytest.mark.parametrize("ending", WRITERS)
def test_file_formats(ending, tmp_path):
    """Values are read as they are written; of CSV and TSV all are texts."""
    values = [('the "red; cat', "NA, or 1,5", 0), ("007", "1.10", 1)]
    path = tmp_path / f"train.{ending}"
    rows = [{**words("sentence1 sentence2 label", *of_row), "a, b": "c"} for of_row in values]
    WRITERS[ending](pandas.DataFrame(rows), path)
    kind = int if ending in ("jsonl", "json", "parquet") else str
    found = read_rows(path)
    assert found == [{**row, "label": kind(row["label"])} for row in rows]
    assert [get_task("rte", Source()).label_index(row["label"]) for row in found] == [0, 1]


def test_the_names_of_labels_in_parquet_decide(tmp_path):
    label = datasets.ClassLabel(names=["1", "0"])
    features = datasets.Features({"text_a": datasets.Value("string"), "label": label})
    for name, labels in (("own", [0, 1, 0]), ("hidden", [0, 1, -1])):
        rows = datasets.Dataset.from_dict({"text_a": [*"abc"], "label": labels}, features)
        rows.to_parquet(tmp_path / name / "train.parquet")
    task = get_task("own", source := Source(tmp_path))
    found = [row["label"] for row in source.read_split(task, "train")[1].values()]
    assert (task.labels, found) == (["0", "1"], ["1", "0", "1"])
    with pytest.raises(ValueError, match="hidden/train.parquet: row 3: the label is empty"):
        get_task("hidden", source)


def test_columns_that_the_task_does_not_use(tmp_path):
    change(tmp_path / "own/train.csv", "text_a,label,,,note,note\na,x,,,1,2\nb,y,,,3,4\n")
    assert get_task("own", Source(tmp_path)).labels == ["x", "y"]
    days = pyarrow.array([10**8, 0], pyarrow.date32())  # for one of which Python has no date
    table = pyarrow.table({"text_a": ["a", "b"], "label": ["x", "z"], "day": days})
    pyarrow.parquet.write_table(table, tmp_path / "own/train.parquet")
    (tmp_path / "own/train.csv").rename(tmp_path / "own/._train.parquet")  # beside it, as of macOS
    assert get_task("own", Source(tmp_path)).labels == ["x", "z"]


def test_what_is_in_a_cell(tokenizer, tmp_path, capsys):
    """Of any file, or input: a number is a text, half a character U+FFFD, nothing an empty text."""
    cells = ["", None, float("nan"), "red\ud83d", "red \U0001f600", 7]
    rows = [{"text_a": "cat", "text_b": cell, "label": "x"} for cell in cells]
    change(tmp_path / "own/train.jsonl", [*rows, {**rows[0], "label": "z"}])
    task = get_task("own", source := Source(tmp_path, dev_fraction=0.5))
    splits = [load_split(task, source, split, tokenizer) for split in ("train", "validation")]
    texts, said = [*[""] * 4, "red\ufffd", "red \U0001f600", "7"], capsys.readouterr().out
    expected = [tokenizer.encode("cat", text).ids for text in texts]
    assert sorted([*example.input_ids[0]] for example in sum(splits, [])) == sorted(expected)
    assert sum(map(int, re.findall("empty texts, ([0-9]+) of them", said))) == 4
    assert re.search("train.jsonl, (train|validation): no example of own is 'z'", said)
    run = LoadedRun(None, task, source, *[None] * 4)
    assert run.candidates(rows) == [[("cat", text)] for text in texts[1:]]
    numpy = [*np.array(["red", "7"]), np.int64(7), np.float64("nan")]
    assert [text_of(value, "text_a") for value in numpy] == ["red", "7", "7", ""]
    # an empty line of one column is a row, with several it is none
    for text, ours in (("\n\na\n\n", ["", "a", ""]), (",label\n\na,x\n", ["a"])):
        change(tmp_path / "a.csv", f"text_a{text}")
        assert [row["text_a"] for row in read_rows(tmp_path / "a.csv")] == ours


def test_columns_have_the_files_names():
    """Which may be ours in another place; in prediction, too."""
    names = {"text_a": "text_b", "text_b": "claim", "label": "gold"}
    theirs = words("text_b claim gold", "p", "q", "x")
    assert our_rows([theirs], names, "own") == [words("text_a text_b label", "p", "q", "x")]
    task, source = own_task("own", ["text_a", "text_b"], ["x", "y"]), Source(column_names=names)
    run = LoadedRun(None, task, source, *[None] * 4)
    for given in (theirs, ("p", "q")):
        assert run.candidates(given) == [PAIR]


LABELS = [  # in a training file, and the classes, or what is wrong
    (["10", "9", "-1", "9"], ["-1", "9", "10"]),
    (["None", "for", "against"], ["None", "against", "for"]),
    ([True, 0, False], ["0", "False", "True"]),
    (["red, white", "red"], ["red", "red, white"]),
    (["V45.81", "401.9", 7], ["401.9", "7", "V45.81"]),  # of which one is no number
    (["neg", "pos", "NEG"], "labels differ in case, .* make them one: 'neg', 'NEG'"),
    (["a b", "y", "a  b"], r"make them one: 'a b', 'a \\x20b'"),
    (["\xe8", "e\u0300", "y"], r"make them one: '\\xe8', 'e\\u0300'"),
    (["a\u200bb", "y", "ab"], "cannot be seen"),
    (["joy", "anger", "joy, anger"], "the label 'joy, anger' is several others: .*multi-label"),
    (["01", 1, 2], "make them one: '01', '1'"),
    ([0, 1, float("nan")], "row 3: the label is empty"),
    *[([0, 1, v], "a label is .*: classes are texts, or int") for v in (1e-9, math.inf, ".5")],
    *[([0, v], "multi-label") for v in ([0, 1], {"a": 1}, "['x', 'y']", "[0 1]")],
    (["neg", "pos", "-1"], "-1, which is a hidden label"),
]


@pytest.mark.parametrize("values, expected", LABELS)
def test_labels_that_only_look_different_are_one_too_many(values, expected):
    if isinstance(expected, list):
        assert own_labels(values) == expected
    else:
        rows = [{"text_a": "a", "label": value} for value in values]
        with pytest.raises(ValueError, match=expected):
            own_labels([row["label"] for row in our_rows(rows, {}, "own")])


def test_labels_by_name_and_by_place(capsys):
    labels = ["Yes", "no", "other "]
    own = Task(None, ["a"], labels)
    assert [*map(own.label_index, ("yes", " YES\n", "other", "other "))] == [0, 0, 2, 2]
    on_hub = Task(("somewhere", None, None), ["a"], labels, name="x")
    assert [*map(on_hub.label_index, (2, "1", 0))] == [2, 1, 0]
    assert "x: integers are read as 0 = Yes, 1 = no, 2 = other" in capsys.readouterr().out
    for value in (1, 3, None, 0.0, "maybe"):
        with pytest.raises(ValueError, match=f"label {value!r} is not one of Yes, no, other"):
            own.label_index(value)
    with pytest.raises(ValueError, match="label '0' is not one of 1, 2"):
        get_task("winogrande", Source()).label_index("0")  # its labels are no indices


@pytest.mark.parametrize("task, share, dev", [("imdb", None, 2000), ("own", 0.25, 1500)])
def test_development_examples_of_the_training_file(task, share, dev, tokenizer, tmp_path):
    """Every row is in one of the two, drawn alike for every seed; a validation file goes first."""
    rows = [{"text": f"x{i}", "text_a": f"x{i}", "label": i % 2} for i in range(6000)]
    change(tmp_path / task / "train.jsonl", rows)

    def hashes(split, seed=0, limit=None, share=share):
        source = Source(tmp_path, dev_fraction=share)
        found = load_split(get_task(task, source), source, split, tokenizer, limit, seed)
        return {example.hash for example in found}

    train_set, dev_set = hashes("train"), hashes("validation")
    assert (len(train_set), len(dev_set), len(train_set | dev_set)) == (6000 - dev, dev, 6000)
    assert hashes("validation", seed=5) == dev_set
    drawn = [hashes("train", seed, limit=100) for seed in (0, 1)]
    assert all(len(part) == 100 and part < train_set for part in drawn) and drawn[0] != drawn[1]
    change(tmp_path / task / "validation.jsonl", rows[:3])
    assert [len(hashes(split, share=None)) for split in ("train", "validation")] == [6000, 3]


def test_examples_of_a_small_task_meet_others_in_the_next_epoch():
    """Few pairs of a batch meet again there; every example is in one batch; little is padding."""
    lengths, place = np.random.default_rng(0).integers(5, 128, 20_000), np.empty(20_000)
    examples = [Example([np.empty(n)], [], 0, 0, False) for n in lengths]
    for count, most in ((250, 0.15), (2500, 0.2), (20_000, 0.06)):
        first, second = (batches(examples[:count], 32, (0, epoch)) for epoch in (1, 2))
        for i, batch in enumerate(second):
            place[batch] = i
        pairs = sum(len(batch) * (len(batch) - 1) for batch in first)
        again = sum((place[batch] == place[batch][:, None]).sum() - len(batch) for batch in first)
        assert again / pairs < most
        assert sorted(np.concatenate(first)) == [*range(count)]
    padded = sum(len(batch) * lengths[batch].max() for batch in first)
    assert 1 - lengths.sum() / padded < 0.05
    pairs = [Example([np.empty(2), np.empty(n)], [], 0, 0, False) for n in (3, 9, 5, 9, 4)]
    assert [*np.concatenate(batches(pairs, 2))] == [1, 3, 2, 4, 0]  # evaluation: the longest first


# control characters, marks that combine or change direction, joiners, line ends, very long words
HARD = ["\0", "\x1b", "\r\n", "\t", " ", "", "\u0301" * 20, "x" * 300, "\u65e5" * 100, "\u0085"]
HARD += "\u202e \u200d \ufeff \ufffd \uffff \u0130 \u1e9e \ufdfa \U0010ffff \u2028".split(" ")
HARD += ["\u00a0", "\u3000", "\U0001f468\u200d\U0001f469", "[SEP]", "</s>", "##ing", "the cat, a"]


@pytest.mark.parametrize("kind", ["uncased", "roberta"])
def test_no_example_is_lost(kind, tmp_path):
    """From JSON lines to a batch: every row, with its label, and the tokens of both choices."""
    tokenizer = load_tokenizer(GOLDEN / "tokenizers" / kind, 40)
    rows = [{"text_a": a, "choices": [a + b, b]} for a, b in zip(HARD, HARD[::-1], strict=True)]
    rows = [{**row, "label": i % 2} for i, row in enumerate(rows)]
    lines = [json.dumps(row, ensure_ascii=row["label"] == 0) for row in rows]
    (tmp_path / "pick").mkdir()
    (tmp_path / "pick/train.jsonl").write_text("\n".join(lines), encoding="utf-8", newline="")
    source = Source(tmp_path)
    batch = collate(load_split(get_task("pick", source), source, "train", tokenizer), 7)
    tokenizer.enable_padding(pad_id=7)
    pairs = [(row["text_a"], choice) for row in rows for choice in row["choices"]]
    expected = tokenizer.encode_batch(pairs)
    assert batch["input_ids"].tolist() == [one.ids for one in expected]
    assert batch["token_type_ids"].tolist() == [one.type_ids for one in expected]
    assert batch["attention_mask"].tolist() == [one.attention_mask for one in expected]
    assert batch["labels"].tolist() == [row["label"] for row in rows]
