"""The 16 tasks in the hub's columns, your own data as they come, and batches."""

import functools

import datasets
import numpy as np
import pytest

import data
from conftest import write_rows
from data import TASKS, get_task, length_groups, load_split
from formats import rows
from formats.rows import note_size, origin
from formats.tokenizer import load_tokenizer


def words(columns, *values):
    """words("a b", 1, 2) -> {"a": 1, "b": 2}"""
    return dict(zip(columns.split(), values, strict=True))


PAIR, ONE, QUESTION = [("p", "q")], [("p", None)], [("q", choice) for choice in "vwxyz"]
CONTEXT = [("c", f"q {choice}") for choice in "wxyz"]
FILLED = [("Al won", None), ("Bo won", None)]
KEYS = {"label": list("ABCDE"), "text": list("vwxyz")}
SOCIAL_I_QA = "context question answerA answerB answerC label"
COSMOS_QA = "context question answer0 answer1 answer2 answer3 label"
# One row of every task as the hub has it: (columns and values, candidates, index of the label)
ROWS = {
    "mnli": (words("premise hypothesis label idx", "p", "q", 2, 0), PAIR, 2),
    "qqp": (words("question1 question2 label idx", "p", "q", 1, 0), PAIR, 1),
    "sst2": (words("sentence label idx", "p", 0, 0), ONE, 0),
    "winogrande": (words("sentence option1 option2 answer", "_ won", "Al", "Bo", "2"), FILLED, 1),
    "imdb": (words("text label", "p", 1), ONE, 1),
    "hellaswag": (words("ctx_a ctx_b ctx endings label", *"cq", "c q", [*"wxyz"], "3"), CONTEXT, 3),
    "social_i_qa": (words(SOCIAL_I_QA, *"cqwxy", "1\n"), CONTEXT[:3], 0),
    "cosmos_qa": (words(COSMOS_QA, *"cqwxyz", 2), CONTEXT, 2),
    "scitail": (words("sentence1 sentence2 gold_label", "p", "q", "entailment"), PAIR, 0),
    "argument": (words("topic sentence annotation", "p", "q", "Argument_for"), PAIR, 2),
    "commonsense_qa": (words("question answerKey choices", "q", "E", KEYS), QUESTION, 4),
    "boolq": (words("question passage label", "q", "p", 1), PAIR, 1),
    "mrpc": (words("sentence1 sentence2 label", "p", "q", 0), PAIR, 0),
    "sick": (words("sentence_A sentence_B label", "p", "q", "NEUTRAL"), PAIR, 1),
    "rte": (words("sentence1 sentence2 label", "p", "q", 0), PAIR, 0),
    "cb": (words("premise hypothesis label", "p", "q", 1), PAIR, 1),
}


@pytest.mark.parametrize("name", TASKS)
def test_hub_columns(name, tokenizer, tmp_path, monkeypatch):
    """A row in the hub's columns and types, by the code that reads the hub (of the UKP's corpus, a
    file), to tokens and label; all splits are loaded at once."""
    assert set(ROWS) == set(TASKS) and len(TASKS) == 16
    (row, candidates, label), task, asked = ROWS[name], get_task(name), []

    def load_dataset(*address, revision):
        asked.append((*address, revision))
        counts = {"train": 3, task.dev: 4}
        return {split: datasets.Dataset.from_list([row] * n) for split, n in counts.items()}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(rows, "load_from_hub", functools.cache(rows.load_from_hub.__wrapped__))
    write_rows(tmp_path / "argument" / "train.jsonl", [row] * 3)
    where = tmp_path if name == "argument" else None
    split = load_split(task, "train", tokenizer, where)
    assert split["label"][:] == [label] * (2 if name == "imdb" else 3)
    for ids, (a, b) in zip(split[0]["input_ids"], candidates, strict=True):
        assert ids == tokenizer.encode(*[text for text in (a, b) if text is not None]).ids
    assert data.to_candidates(task, row) == (candidates, label)
    if name not in ("argument", "imdb"):
        assert len(load_split(task, "validation", tokenizer)) == 4
        assert asked == [task.hub]


def test_answer_keys_belong_to_their_texts():
    """commonsense_qa may list its choices in any order."""
    assert data.question_choices("q", words("label text", [*"CABED"], [*"xvwzy"])) == QUESTION
    for label, text in (("AABCD", "vwxyz"), ("ABCDE", "vwxy")):
        with pytest.raises(ValueError, match="one text for each of ABCDE"):
            data.question_choices("q", words("label text", [*label], [*text]))


def test_other_copies_of_the_data():
    """SciTail's tsv_format and Google's own BoolQ differ in columns and label values; in a row with
    both, the columns that are ours count."""
    tsv = words("premise hypothesis label", "p", "q", "neutral")
    both = {**tsv, **words("sentence1 sentence2 gold_label", "x", "y", "entailment")}
    boolq = words("question passage answer", "q", "p", True)
    for task, row in (("scitail", tsv), ("scitail", both), ("boolq", boolq)):
        assert data.to_candidates(get_task(task), row) == (PAIR, 1)


def test_argument_as_distributed(tokenizer, tmp_path):
    """Eight topic files, quoting off, the split in a column; without them, where to ask."""
    with pytest.raises(FileNotFoundError, match="tudatalib"):
        load_split(get_task("argument"), "train", tokenizer)
    (tmp_path / "argument").mkdir()
    labels = {"train": "NoArgument", "val": "Argument_for", "test": "Argument_against"}
    for topic in ("abortion", "school_uniforms"):
        text = "topic\turl\tsentence\tannotation\tset\n"
        text += "".join(f'{topic}\tu\t"{part} is open\t{labels[part]}\t{part}\n' for part in labels)
        (tmp_path / "argument" / f"{topic}.tsv").write_text(text)
    for i, split in enumerate(("train", "test", "validation")):
        found = load_split(get_task("argument", tmp_path), split, tokenizer, tmp_path)
        assert found["label"][:] == [i, i]
    assert found[0]["input_ids"] == [tokenizer.encode("abortion", '"val is open').ids]


def test_row_counts(capsys):
    """Those of the paper, and of the hub's copy of sick; the paper gives no size of a test set."""
    for split, count in (("train", 4500), ("train", 4439), ("test", 4906)):
        note_size("here", count, TASKS["sick"], split)
    assert capsys.readouterr().out == ""
    note_size("here", 4400, TASKS["sick"], "train")
    said = "note: here has 4400 rows, the sick of the paper has 4500\n"
    assert capsys.readouterr().out == said


def test_tokenised_data_is_cached(encoder, tmp_path, monkeypatch):
    """A second start does not tokenise; another text or max_length does."""
    calls, encode = [], data.task_rows.encode
    monkeypatch.setattr(data.task_rows, "encode", lambda *x: calls.append(len(x[1])) or encode(*x))

    def load(count, max_length=48):
        calls.clear()
        write_rows(tmp_path / "rte" / "train.jsonl", [ROWS["rte"][0]] * count)
        tokenizer = load_tokenizer(encoder, max_length)
        assert len(load_split(get_task("rte", tmp_path), "train", tokenizer, tmp_path)) == count
        return sum(calls)

    assert [load(3), load(3), load(3, 40), load(3, 40), load(3)] == [3, 0, 3, 0, 0]
    assert [load(2500), load(2500)] == [2500, 0]


def test_little_padding_where_choices_differ_in_length():
    """32 questions with four choices of 4 to 39 tokens: 9 in 20 would be padding."""
    lengths = np.random.default_rng(0).integers(4, 40, (32, 4))
    ids = [[[1] * n for n in row] for row in lengths]
    batch = data.collate({"input_ids": ids, "token_type_ids": ids, "label": [0] * 32}, 0)
    total = sum(group.numel() for _, (group, _, _) in length_groups(batch))
    assert 1 - lengths.sum() / batch["input_ids"].numel() > 0.4
    assert 1 - lengths.sum() / total < 0.2


def test_one_csv_file_with_columns_of_its_own(tokenizer, tmp_path):
    """A part of it is held out, the same for every seed; or another file is the development set."""
    text = "\n".join(["review,gold", *(f"red {i},{'yes' if i % 2 else 'no'}" for i in range(60))])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/train.csv").write_text(text)
    with pytest.raises(ValueError, match="no column 'label'; it has review, gold"):
        get_task("mine", tmp_path)
    task = get_task("mine", tmp_path, column_names={"text_a": "review", "label": "gold"})

    def load(split, fraction=None, seed=0):
        return load_split(task, split, tokenizer, tmp_path, seed=seed, dev_fraction=fraction)

    with pytest.raises(FileNotFoundError, match="--dev-fraction"):
        load("validation")
    assert [len(load(split, 0.2)) for split in ("train", "validation")] == [48, 12]
    assert origin(load("train", 0.2, seed=7))["held_out"] == origin(load("train", 0.2))["held_out"]
    (tmp_path / "mine/val.csv").write_text(text)
    assert len(load("validation")) == 60
    with pytest.raises(ValueError, match="--dev-fraction: .*val.csv has a development set"):
        load("train", 0.5)


def test_imdb_chooses_its_epoch_on_training_examples(tokenizer, tmp_path):
    """2,000 of them, and none of the test set; a validation file goes first."""
    written = [{"text": "red", "label": i % 2} for i in range(6000)]
    write_rows(tmp_path / "imdb" / "train.jsonl", written)
    task = get_task("imdb", tmp_path)
    dev = load_split(task, "validation", tokenizer, tmp_path)
    train = load_split(task, "train", tokenizer, tmp_path, seed=5)
    assert (len(train), len(dev)) == (4000, 2000)
    assert dev["label"][:] != [0] * 2000 and sum(dev["label"][:]) + sum(train["label"][:]) == 3000
    write_rows(tmp_path / "imdb" / "train.jsonl", written[:4])
    write_rows(tmp_path / "imdb" / "validation.jsonl", written[:3])
    sizes = [len(load_split(task, x, tokenizer, tmp_path)) for x in ("train", "validation")]
    assert sizes == [4, 3]
