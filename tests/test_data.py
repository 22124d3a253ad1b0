"""The 16 tasks in the hub's columns, your own task, and batches."""

import json
import random
from dataclasses import replace

import datasets
import numpy as np
import pytest
import torch

import data
from conftest import sentence, write_rows
from data import (
    TASKS,
    Classification,
    batches,
    get_task,
    length_bucketed_batches,
    load_split,
    split_by_length,
    to_candidates,
)
from experiments import evaluate, predict
from formats.rows import check_size, held_out, read_split
from formats.tokenizer import load_tokenizer

# One row of every task as the hub has it, and what becomes of it
ROWS = {
    "mnli": ({"premise": "p", "hypothesis": "h", "label": 2, "idx": 0}, [("p", "h")], 2),
    "qqp": ({"question1": "p", "question2": "q", "label": 1, "idx": 0}, [("p", "q")], 1),
    "sst2": ({"sentence": "p ", "label": 0, "idx": 0}, [("p ", None)], 0),
    "winogrande": (
        {"sentence": "so _ won", "option1": "Al", "option2": "Bo", "answer": "2"},
        [("so Al won", None), ("so Bo won", None)],
        1,
    ),
    "imdb": ({"text": "p", "label": 1}, [("p", None)], 1),
    "hellaswag": (
        {
            "ind": 1,
            "activity_label": "x",
            "ctx_a": "A.",
            "ctx_b": "he",
            "ctx": "A. he",
            "endings": ["a", "b", "c", "d"],
            "source_id": "",
            "split": "val",
            "split_type": "",
            "label": "3",
        },
        [("A.", "he a"), ("A.", "he b"), ("A.", "he c"), ("A.", "he d")],
        3,
    ),
    "social_i_qa": (
        {
            "context": "c",
            "question": "q",
            "answerA": "x",
            "answerB": "y",
            "answerC": "z",
            "label": "1\n",
        },
        [("c", "q x"), ("c", "q y"), ("c", "q z")],
        0,
    ),
    "cosmos_qa": (
        {
            "id": "",
            "context": "c",
            "question": "q",
            "answer0": "w",
            "answer1": "x",
            "answer2": "y",
            "answer3": "z",
            "label": 2,
        },
        [("c", "q w"), ("c", "q x"), ("c", "q y"), ("c", "q z")],
        2,
    ),
    "scitail": (
        {
            "sentence1": "p",
            "sentence2": "h",
            "gold_label": "entailment",
            "annotator_labels": ["entailment"],
        },
        [("p", "h")],
        0,
    ),
    "argument": (
        {"topic": "t", "sentence": "s", "annotation": "Argument_for", "set": "train"},
        [("t", "s")],
        2,
    ),
    "commonsense_qa": (
        {
            "id": "",
            "question": "q",
            "question_concept": "c",
            "answerKey": "E",
            "choices": {"label": list("ABCDE"), "text": list("vwxyz")},
        },
        [("q", "v"), ("q", "w"), ("q", "x"), ("q", "y"), ("q", "z")],
        4,
    ),
    "boolq": ({"question": "q", "passage": "p", "idx": 0, "label": 1}, [("p", "q")], 1),
    "mrpc": ({"sentence1": "p", "sentence2": "q", "label": 0, "idx": 0}, [("p", "q")], 0),
    "sick": (
        {
            "id": "1",
            "sentence_A": "p",
            "sentence_B": "q",
            "label": "NEUTRAL",
            "relatedness_score": 3.0,
        },
        [("p", "q")],
        1,
    ),
    "rte": ({"sentence1": "p", "sentence2": "h", "label": 0, "idx": 0}, [("p", "h")], 0),
    "cb": ({"premise": "p", "hypothesis": "h", "label": 1, "idx": 0}, [("p", "h")], 1),
}


def test_all_16_tasks_are_there():
    assert set(ROWS) == set(TASKS) and len(TASKS) == 16


@pytest.mark.parametrize("name", TASKS)
def test_hub_columns(name, tokenizer, tmp_path):
    """A row in the hub's columns and types, through the hub's code path, to candidates and
    label."""
    row, candidates, label = ROWS[name]
    rows = datasets.Dataset.from_list([row] * 3)
    task = get_task(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "read_split", lambda *args: ("the hub", rows, np.arange(3), "abc123"))
        split = load_split(task, "train", tokenizer)
    assert split.info.description == "abc123"
    assert split["label"][:] == [label] * 3
    assert (
        len(split[0]["input_ids"]) == len(candidates) == (len(task.labels) if task.choices else 1)
    )
    for ids, (a, b) in zip(split[0]["input_ids"], candidates, strict=True):
        assert ids == tokenizer.encode(*[text for text in (a, b) if text is not None]).ids
    renamed = {task.aliases.get(column, column): value for column, value in row.items()}
    assert to_candidates(task, renamed) == (candidates, label)


def test_other_copies_of_the_data(tokenizer, tmp_path):
    """SciTail's tsv_format and Google's own BoolQ differ in columns and label values."""
    for name, row in [
        ("scitail", {"premise": "p", "hypothesis": "h", "label": "neutral"}),
        ("boolq", {"question": "q", "passage": "p", "answer": True}),
    ]:
        write_rows(tmp_path / name / "train.jsonl", [row])
        assert load_split(get_task(name, tmp_path), "train", tokenizer, tmp_path)["label"][:] == [1]


def test_the_hub_is_asked_for_what_the_table_says(monkeypatch, tokenizer, tmp_path):
    """A local directory that imitates the hub, loaded by the same code: only the address is
    replaced."""
    asked, load_dataset = [], datasets.load_dataset
    datasets.Dataset.from_list([ROWS["mnli"][0]]).to_parquet(
        tmp_path / "mnli" / "validation_matched.parquet"
    )

    def hub(source, config, split, revision):
        asked.append((source, config, split, revision))
        return load_dataset(
            "parquet", data_files={split: str(tmp_path / config / f"{split}.parquet")}, split=split
        )

    monkeypatch.setattr(datasets, "load_dataset", hub)
    split = load_split(get_task("mnli"), "validation", tokenizer)
    assert asked == [("nyu-mll/glue", "mnli", "validation_matched", None)]
    assert split["label"][:] == [2]


def test_argument_as_distributed(tokenizer, tmp_path):
    """Eight topic files, quoting off, the split in a column; without them, where to ask."""
    with pytest.raises(FileNotFoundError, match="tudatalib"):
        load_split(get_task("argument"), "train", tokenizer)
    columns = [
        "topic",
        "retrievedUrl",
        "archivedUrl",
        "sentenceHash",
        "sentence",
        "annotation",
        "set",
    ]
    (tmp_path / "argument").mkdir()
    for topic in ("abortion", "school_uniforms"):
        rows = [
            [topic, "u", "u", "h", f'"{part} is open', label, part]
            for part, label in (
                ("train", "NoArgument"),
                ("val", "Argument_for"),
                ("test", "Argument_against"),
            )
        ]
        text = "".join("\t".join(row) + "\n" for row in [columns, *rows])
        (tmp_path / "argument" / f"{topic}.tsv").write_text(text)
    task = get_task("argument", tmp_path)
    assert load_split(task, "train", tokenizer, tmp_path)["label"][:] == [0, 0]
    dev = load_split(task, "validation", tokenizer, tmp_path)
    assert dev["label"][:] == [2, 2] and load_split(
        replace(task, sizes=()), "test", tokenizer, tmp_path
    )["label"][:] == [1, 1]
    assert dev[0]["input_ids"] == [tokenizer.encode("abortion", '"val is open').ids]


def test_row_counts(tokenizer, tmp_path, capsys):
    write_rows(tmp_path / "cb" / "train.jsonl", [ROWS["cb"][0]] * 4)
    load_split(get_task("cb", tmp_path), "train", tokenizer, tmp_path)
    assert "has 4 rows" in (shown := capsys.readouterr().out) and "250" in shown
    with pytest.raises(ValueError, match="has 4 rows.*250"):
        load_split(get_task("cb", tmp_path), "train", tokenizer, tmp_path, strict=True)


def test_own_labels_are_sorted(tmp_path):
    for labels, expected in [
        ([10, 9, 2], ("2", "9", "10")),
        (["b", "a"], ("a", "b")),
        ([True, False], ("False", "True")),
    ]:
        write_rows(
            tmp_path / "mine" / "train.jsonl", [{"text_a": "a", "label": label} for label in labels]
        )
        task = get_task("mine", tmp_path)
        assert task.labels == expected
        assert [Classification.label(task, label) for label in labels] == [
            expected.index(str(label)) for label in labels
        ]
    with pytest.raises(ValueError, match="'c'"):
        Classification.label(task, "c")


@pytest.mark.parametrize(
    "name, value",
    [
        ("rte", 2),
        ("rte", -1),
        ("rte", "01"),
        ("rte", 1.0),
        ("rte", None),
        ("social_i_qa", "0"),
        ("social_i_qa", 0),
        ("winogrande", 0),
        ("winogrande", ""),
        ("commonsense_qa", ""),
        ("scitail", "contradiction"),
    ],
)
def test_unknown_labels_are_errors(name, value):
    with pytest.raises(ValueError, match="label"):
        to_candidates(
            get_task(name),
            {
                **{c: v for c, v in ROWS[name][0].items()},
                TASKS[name].label: value,
                "premise": "p",
                "hypothesis": "h",
            },
        )


def test_tokenised_data_is_cached(encoder, tmp_path, monkeypatch):
    """A second start does not tokenise; another text, tokenizer or max_length does."""
    write_rows(tmp_path / "rte" / "train.jsonl", [ROWS["rte"][0]] * 3)
    calls, encode = [], data.to_candidates
    monkeypatch.setattr(data, "example", lambda *args: calls.append(1) or encode(*args))

    def load(max_length=48):
        calls.clear()
        load_split(
            get_task("rte", tmp_path), "train", load_tokenizer(encoder, max_length), tmp_path
        )
        return len(calls)

    assert [load(), load(), load(40), load(40), load()] == [3, 0, 3, 0, 0]
    write_rows(tmp_path / "rte" / "train.jsonl", [ROWS["rte"][0]] * 4)
    assert [load(), load()] == [4, 0]


@pytest.mark.parametrize("n", [1, 31, 32, 33, 1600, 5000])
@pytest.mark.parametrize("seed", [None, (0, 1)])
def test_no_example_is_lost_or_doubled(n, seed):
    lengths = np.random.default_rng(0).integers(5, 128, n)
    order = length_bucketed_batches(lengths, 32, seed)
    assert sorted(np.concatenate(order).tolist()) == list(range(n))
    assert len(order) == -(-n // 32)


def test_epochs_differ_and_repeat():
    lengths = np.random.default_rng(0).integers(5, 128, 500)
    one, again, two = (
        [batch.tolist() for batch in length_bucketed_batches(lengths, 32, (0, epoch))]
        for epoch in (1, 1, 2)
    )
    assert one == again != two


@pytest.mark.parametrize("choices", [1, 4])
def test_little_padding(choices, encoder, tmp_path):
    """Under 5 % of the tokens where there are over 1,000 examples of mixed length, against a third
    in random batches."""
    rng = random.Random(0)
    rows = []
    for i in range(1500):
        length = max(4, min(38, int(rng.lognormvariate(2.5, 0.5))))
        texts = [sentence(rng, length + rng.randint(-2, 2) * (choices > 1)) for _ in range(choices)]
        rows.append(
            {"choices": texts, "label": 0} if choices > 1 else {"text_a": texts[0], "label": i % 2}
        )
    write_rows(tmp_path / "own" / "train.jsonl", rows)
    split = load_split(get_task("own", tmp_path), "train", load_tokenizer(encoder, 48), tmp_path)
    real = total = seen = 0
    for batch in batches(split, 32, seed=(0, 1)):
        assert batch["input_ids"].shape[0] == choices * len(
            batch["labels"]
        )  # an example's choices stay together
        seen += len(batch["labels"])
        parts = list(split_by_length(batch))
        assert sorted(torch.cat([rows for rows, _ in parts]).tolist()) == list(
            range(len(batch["input_ids"]))
        )
        for _, (ids, _, mask) in parts:
            real += mask.sum().item()
            total += ids.numel()
    assert seen == 1500 and real == sum(len(ids) for row in split["input_ids"] for ids in row)
    assert 1 - real / total < 0.05


def test_collate(encoder, data_dir):
    split = load_split(
        get_task("pick", data_dir), "validation", load_tokenizer(encoder, 48), data_dir
    )
    batch = next(batches(split, 8, pad_token_id=7))
    assert (
        batch["input_ids"].shape == batch["token_type_ids"].shape == batch["attention_mask"].shape
    )
    assert batch["input_ids"].shape[0] == 24 and batch["labels"].shape == (8,)
    padding = batch["attention_mask"] == 0
    assert (batch["input_ids"][padding] == 7).all() and (
        batch["token_type_ids"][padding] == 0
    ).all()
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())


def test_imdb_chooses_its_epoch_on_training_examples(encoder, tmp_path):
    """2,000 of them, the same ones for every seed, and none of the test set; a validation file goes
    first."""
    rows = [{"text": f"{word} {i}", "label": i % 2} for i, word in enumerate(["red", "cat"] * 3000)]
    write_rows(tmp_path / "imdb" / "train.jsonl", rows)
    write_rows(tmp_path / "imdb" / "test.jsonl", [{"text": "dog", "label": 0}] * 7)
    tokenizer, task = load_tokenizer(encoder, 48), get_task("imdb", tmp_path)
    assert task.sizes == (23000, 2000)
    where, dev, places, _ = read_split(task, "validation", tmp_path)
    _, train, others, _ = read_split(task, "train", tmp_path)
    assert len(dev) == 2000 and len(train) == 4000
    assert sorted([*places, *others]) == list(range(6000))
    assert [row["text"] for row in dev] == [rows[i]["text"] for i in places]
    again = load_split(task, "validation", tokenizer, tmp_path, seed=5)
    assert (
        again["label"][:] == dev["label"][:]
        and len(load_split(task, "test", tokenizer, tmp_path)) == 7
    )
    rows[int(places[3])]["label"] = 9  # errors name the line of the file
    write_rows(tmp_path / "imdb" / "train.jsonl", rows)
    with pytest.raises(ValueError, match=f"line {places[3] + 1}: label 9"):
        load_split(task, "validation", tokenizer, tmp_path)
    write_rows(tmp_path / "imdb" / "train.jsonl", rows[:4])
    write_rows(tmp_path / "imdb" / "validation.jsonl", rows[:3])
    assert len(load_split(task, "train", tokenizer, tmp_path)) == 4
    assert len(load_split(task, "validation", tokenizer, tmp_path)) == 3


@pytest.mark.parametrize(
    "count, said",
    [(4500, ""), (4439, ""), (4400, "of the paper has 4500, the hub's copy has 4439")],
)
def test_sick_has_two_sizes(count, said, capsys):
    check_size("here", count, TASKS["sick"], "train", strict=False)
    assert said in capsys.readouterr().out if said else not capsys.readouterr().out


def test_the_paper_gives_no_size_of_a_test_set(capsys):
    check_size("here", 4906, TASKS["sick"], "test", strict=True)
    assert not capsys.readouterr().out


def test_lengths_that_cut_little():
    assert {name: task.max_length for name, task in TASKS.items() if task.max_length != 128} == {
        "imdb": 384,
        "hellaswag": 200,
        "cosmos_qa": 256,
        "boolq": 384,
        "rte": 290,
        "cb": 256,
    }


# --------------------------------------------------------------------------------------------------
# One's own data as it comes


def own_rows(n):
    rng = random.Random(1)
    return [
        {"premise": sentence(rng), "hypothesis": sentence(rng), "gold": "yes" if i % 2 else "no"}
        for i in range(n)
    ]


def as_csv(rows, separator=","):
    return "".join(
        separator.join(values) + "\n" for values in [rows[0].keys(), *(r.values() for r in rows)]
    )


@pytest.mark.parametrize("separator", [",", ";"])
def test_own_columns_and_a_held_out_development_set(launch, tmp_path, separator, capsys):
    """One .csv file, other names of columns, no development file: trains, evaluates, predicts."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.csv").write_text(as_csv(own_rows(60), separator))
    columns = ["--columns", "text_a=premise", "text_b=hypothesis", "label=gold"]
    given = ["--stage", "head", "--task", "mine", "--data-dir", tmp_path, "--epochs", 1]
    with pytest.raises(FileNotFoundError, match="--dev-fraction"):
        launch(*given, *columns, "--out", tmp_path / "none")
    with pytest.raises(ValueError, match="no column 'label'; it has premise, hypothesis, gold"):
        launch(*given, "--out", tmp_path / "none")
    given += [*columns, "--dev-fraction", "0.2"]
    result = launch(*given, "--out", tmp_path / "run")
    assert (result["train_examples"], result["dev_examples"]) == (48, 12)
    other = launch(*given, "--seed", 7, "--out", tmp_path / "other")
    configs = [json.loads((tmp_path / n / "config.json").read_text()) for n in ("run", "other")]
    assert configs[0]["data_sha256"] == configs[1]["data_sha256"]  # the same ones for every seed
    assert other["dev_examples"] == 12
    found = evaluate.main([str(tmp_path / "run"), "--device", "cpu"])
    capsys.readouterr()
    assert (found["examples"], found["accuracy"]) == (12, result["accuracy"])
    predict.main([str(tmp_path / "run"), "--file", str(tmp_path / "mine" / "train.csv")])
    assert len(capsys.readouterr().out.splitlines()) == 60


def test_the_parts_of_a_held_out_draw():
    train, dev = (held_out(50, split, 0.1) for split in ("train", "validation"))
    assert len(dev) == 5 and sorted([*train, *dev]) == list(range(50))
    assert len(held_out(50, "validation", 10)) == 10  # a number, at most a half
    assert len(held_out(50, "validation", 100)) == 25
    for fraction in (0.001, 0.999):
        with pytest.raises(ValueError, match="^--dev-fraction .* all or none"):
            held_out(50, "train", fraction)
    with pytest.raises(ValueError, match="^the development set would be all or none of 1 "):
        held_out(1, "train", 10)


@pytest.mark.parametrize("name", ["dev.jsonl", "val.csv"])
def test_other_names_of_the_development_file(launch, tmp_path, name):
    (tmp_path / "mine").mkdir()
    rows = [{"text_a": row["premise"], "label": row["gold"]} for row in own_rows(40)]
    write_rows(tmp_path / "mine" / "train.jsonl", rows)
    if name.endswith("csv"):
        (tmp_path / "mine" / name).write_text(as_csv(rows[:10]))
    else:
        write_rows(tmp_path / "mine" / name, rows[:10])
    given = ["--stage", "head", "--task", "mine", "--data-dir", tmp_path, "--epochs", 1]
    assert launch(*given, "--out", tmp_path / "run")["dev_examples"] == 10
    with pytest.raises(ValueError, match=f"--dev-fraction: .*{name} has a development set"):
        launch(*given, "--dev-fraction", 0.5, "--out", tmp_path / "none")


@pytest.mark.parametrize(
    "words, say",
    [
        (["text_a"], "COLUMN=NAME"),
        (["text_a=premise", "text_b=premise"], "twice"),
        (["text_a=absent"], "no column 'absent'"),
        (["premise=gold"], "already"),
    ],
)
def test_columns_that_do_not_fit(launch, tmp_path, words, say):
    write_rows(tmp_path / "mine" / "train.jsonl", own_rows(20))
    with pytest.raises(ValueError, match=say):
        launch(
            *("--stage", "head", "--task", "mine", "--data-dir", tmp_path, "--dev-fraction", 0.5),
            *("--columns", *words, "--out", tmp_path / "none"),
        )
    assert not (tmp_path / "none").exists()


def test_fractions_are_no_classes(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.csv").write_text("text_a,label\na,0.5\nb,1.0\nc,0.25\n")
    with pytest.raises(ValueError, match="train.csv, line 2: label '0.5' is neither"):
        get_task("mine", tmp_path)
