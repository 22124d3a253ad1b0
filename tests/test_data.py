"""The 16 tasks in the hub's columns, your own data as they come, and batches."""

import functools
import os
from dataclasses import replace

import datasets
import numpy as np
import pytest

import data
from conftest import write_rows
from data import TASKS, get_task, length_bucketed_batches, load_split
from experiments.load_run import LoadedRun
from formats import rows
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
    file), to tokens and label, and to the same in prediction; all splits are loaded at once."""
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
    assert task.example(row) == (candidates, label)
    texts = [{"premise": "p", "hypothesis": "q", **row}[column] for column in task.columns]
    if name == "commonsense_qa":
        texts[1] = texts[1]["text"]
    elif task.is_multiple_choice and name != "hellaswag":  # options in columns of their own
        texts = [*texts[: -len(candidates)], texts[-len(candidates) :]]
    run = LoadedRun(None, None, None, task, None, None, [])
    assert run.candidates(row) == run.candidates(texts) == candidates
    if name not in ("argument", "imdb"):
        assert len(load_split(task, "validation", tokenizer)) == 4
        assert asked == [task.hub]


def test_other_copies_of_the_data():
    """SciTail's tsv_format and Google's own BoolQ have other columns and label values; the choices
    of commonsense_qa may come in any order."""
    tsv = words("premise hypothesis label", "p", "q", "neutral")
    boolq = words("question passage answer", "q", "p", True)
    for task, row in (("scitail", tsv), ("boolq", boolq)):
        assert get_task(task).example(row) == (PAIR, 1)
    assert data.question_choices("q", words("label text", [*"CABED"], [*"xvwzy"])) == QUESTION


def test_argument_as_distributed(tokenizer, tmp_path):
    """Eight topic files, quoting off, the split in a column."""
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


def test_tokenised_data_is_cached(encoder, tmp_path, monkeypatch):
    """A second start does not tokenise; another text does, at the same path and time, and another
    max_length."""
    calls, encode = [], data.encode
    monkeypatch.setattr(data, "encode", lambda *x: calls.append(len(x[1])) or encode(*x))

    def load(count, max_length=48, text="red"):
        calls.clear()
        path = tmp_path / "rte" / "train.jsonl"
        write_rows(path, [{**ROWS["rte"][0], "sentence1": text}] * count)
        os.utime(path, ns=(0, 0))
        tokenizer = load_tokenizer(encoder, max_length)
        split = load_split(get_task("rte", tmp_path), "train", tokenizer, tmp_path)
        assert split["input_ids"][:] == [[tokenizer.encode(text, "q").ids]] * count
        return sum(calls)

    assert [load(3), load(3), load(3, 40), load(3, 40), load(3)] == [3, 0, 3, 0, 0]
    assert [load(3, text="cat"), load(3, text="cat"), load(2500), load(2500)] == [3, 0, 2500, 0]


def test_another_task_has_other_tokens(tokenizer, tmp_path):
    """On the same file, under the same name, with functions that stand in one file or in none."""
    write_rows(
        tmp_path / "rte" / "train.jsonl", [{"sentence1": "p", "sentence2": "q", "label": "x"}]
    )
    x, y = dict(label_aliases={"x": "entailment"}), dict(label_aliases={"x": "not_entailment"})
    second = functools.partial(lambda at, *texts: [(texts[at], None)], 1)
    for changes, candidate, label in (
        (x, ("p", "q"), 0),
        (y, ("p", "q"), 1),
        ({**x, "candidates": lambda a, b: [(a, None)]}, ("p",), 0),
        ({**x, "candidates": lambda a, b: [(b, a)]}, ("q", "p"), 0),
        ({**x, "candidates": second}, ("q",), 0),
    ):
        task = replace(get_task("rte", tmp_path), **changes)
        (found,) = load_split(task, "train", tokenizer, tmp_path)
        assert found["input_ids"] == [tokenizer.encode(*candidate).ids] and found["label"] == label


def test_examples_of_a_small_task_meet_others_in_the_next_epoch():
    """Of the pairs in one batch, few are in one batch of the next epoch."""
    lengths, place = np.random.default_rng(0).integers(5, 128, 20_000), np.empty(20_000)
    for count, most in ((250, 0.15), (2500, 0.2), (20_000, 0.06)):
        first, second = (length_bucketed_batches(lengths[:count], 32, (0, n)) for n in (1, 2))
        for i, batch in enumerate(second):
            place[batch] = i
        pairs = sum(len(batch) * (len(batch) - 1) for batch in first)
        again = sum((place[batch] == place[batch][:, None]).sum() - len(batch) for batch in first)
        assert again / pairs < most
    batches = length_bucketed_batches(lengths, 32, seed=0)
    assert sorted(np.concatenate(batches)) == [*range(20_000)]
    longest = sum(len(batch) * lengths[batch].max() for batch in batches)
    assert 1 - lengths.sum() / longest < 0.05


def test_imdb_chooses_its_epoch_on_training_examples(tokenizer, tmp_path):
    """2,000 of them, the same for every seed; a validation file goes first."""
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
