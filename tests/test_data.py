"""The 16 tasks in the hub's columns, your own task, and batches."""

import json
import random

import datasets
import numpy as np
import pytest

import data
from conftest import cli, sentence, write_rows
from data import TASKS, Classification, batches, get_task, load_split, split_by_length
from data import length_bucketed_batches as bucketed
from experiments import evaluate, predict
from formats import rows
from formats.rows import check_size, origin
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


@pytest.fixture
def on_hub(monkeypatch):
    """on_hub(split=rows, ...): the hub has these rows. Returns what it was asked for."""
    asked = []

    def on_hub(**splits):
        def load_dataset(*address, **more):
            asked.append((*address, more["revision"]))
            return {name: datasets.Dataset.from_list(found) for name, found in splits.items()}

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return asked

    rows.load_from_hub.cache_clear()
    yield on_hub
    rows.load_from_hub.cache_clear()


@pytest.mark.parametrize("name", TASKS)
def test_hub_columns(name, tokenizer, on_hub, tmp_path):
    """A row in the hub's columns and types, by the code that reads the hub (of the UKP's corpus, a
    file), to tokens and label; all splits are loaded at once."""
    assert set(ROWS) == set(TASKS) and len(TASKS) == 16
    (row, candidates, label), task = ROWS[name], get_task(name)
    asked = on_hub(**{"train": [row] * 3, task.dev: [row] * 4})
    write_rows(tmp_path / "argument" / "train.jsonl", [row] * 3)
    where = tmp_path if name == "argument" else None
    split = load_split(task, "train", tokenizer, where)
    assert split["label"][:] == [label] * (2 if name == "imdb" else 3)
    for ids, (a, b) in zip(split[0]["input_ids"], candidates, strict=True):
        assert ids == tokenizer.encode(*[text for text in (a, b) if text is not None]).ids
    assert data.to_candidates(task, row) == (candidates, label)
    if name not in ("argument", "imdb"):
        assert len(load_split(task, "validation", tokenizer)) == 4
        assert asked == [(task.source, task.config, task.revision)]


def test_answer_keys_belong_to_their_texts():
    """commonsense_qa may list its choices in any order."""
    task, row = get_task("commonsense_qa"), ROWS["commonsense_qa"][0]
    shuffled = {"label": list("CABED"), "text": list("xvwzy")}
    assert data.to_candidates(task, {**row, "choices": shuffled})[0] == [("q", c) for c in "vwxyz"]
    for label, text in ((list("AABCD"), list("vwxyz")), (list("ABCDE"), list("vwxy"))):
        with pytest.raises(ValueError, match="one text for each of ABCDE"):
            data.to_candidates(task, {**row, "choices": {"label": label, "text": text}})


def test_other_copies_of_the_data():
    """SciTail's tsv_format and Google's own BoolQ differ in columns and label values; in a row with
    both, the columns that are ours count."""
    tsv = words("premise hypothesis label", "p", "h", "neutral")
    assert data.to_candidates(get_task("scitail"), tsv) == ([("p", "h")], 1)
    both = {**tsv, **words("sentence1 sentence2 gold_label", "x", "y", "entailment")}
    assert data.to_candidates(get_task("scitail"), both) == ([("p", "h")], 1)
    boolq = words("question passage answer", "q", "p", True)
    assert data.to_candidates(get_task("boolq"), boolq) == ([("p", "q")], 1)


def test_argument_as_distributed(tokenizer, tmp_path):
    """Eight topic files, quoting off, the split in a column; without them, where to ask."""
    with pytest.raises(FileNotFoundError, match="tudatalib"):
        load_split(get_task("argument"), "train", tokenizer)
    (tmp_path / "argument").mkdir()
    labels = {"train": "NoArgument", "val": "Argument_for", "test": "Argument_against"}
    for topic in ("abortion", "school_uniforms"):
        lines = [f'{topic}\tu\t"{part} is open\t{label}\t{part}' for part, label in labels.items()]
        text = "\n".join(["topic\turl\tsentence\tannotation\tset", *lines])
        (tmp_path / "argument" / f"{topic}.tsv").write_text(text)
    for i, split in enumerate(("train", "test", "validation")):
        found = load_split(get_task("argument", tmp_path), split, tokenizer, tmp_path)
        assert found["label"][:] == [i, i]
    assert found[0]["input_ids"] == [tokenizer.encode("abortion", '"val is open').ids]


@pytest.mark.parametrize(
    "task, split, count, said",
    [
        ("cb", "train", 4, "has 4 rows, the cb of the paper has 250"),
        ("sick", "train", 4439, ""),
        ("sick", "train", 4400, "of the paper has 4500, the hub's copy has 4439"),
        ("sick", "test", 4906, ""),  # the paper gives no size of a test set
    ],
)
def test_row_counts(task, split, count, said, capsys):
    check_size("here", count, TASKS[task], split, strict=False)
    assert said in (shown := capsys.readouterr().out) and bool(shown) == bool(said)
    if said:
        with pytest.raises(ValueError, match=said):
            check_size("here", count, TASKS[task], split, strict=True)


@pytest.mark.parametrize(
    "labels, expected", [([10, 9, 2], "2 9 10"), (["b", "a"], "a b"), ([True, False], "False True")]
)
def test_own_labels_are_sorted(labels, expected, tmp_path):
    write_rows(tmp_path / "mine/train.jsonl", [words("text_a label", "a", x) for x in labels])
    task, expected = get_task("mine", tmp_path), expected.split()
    assert list(task.labels) == expected
    found = [Classification.label(task, label) for label in labels]
    assert found == [expected.index(str(label)) for label in labels]
    with pytest.raises(ValueError, match="'c'"):
        Classification.label(task, "c")


def test_tokenised_data_is_cached(encoder, tmp_path, monkeypatch):
    """A second start does not tokenise; another text, tokenizer or max_length does."""
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


# --------------------------------------------------------------------------------------------------
# Batches


def test_epochs_differ():
    lengths = np.random.default_rng(0).integers(5, 128, 500)
    one, two = (np.concatenate(bucketed(lengths, 32, (0, epoch))) for epoch in (1, 2))
    assert (one != two).any()


@pytest.mark.parametrize("choices", [1, 4])
def test_little_padding(choices, encoder, tmp_path):
    """Under 5 % of the tokens where there are over 6,400 examples of mixed length, against a third
    in random batches."""
    rng, written = random.Random(0), []
    for i in range(6500):
        length = max(4, min(38, int(rng.lognormvariate(2.5, 0.5))))
        texts = [sentence(rng, length + rng.randint(-2, 2) * (choices > 1)) for _ in range(choices)]
        several = {"choices": texts, "label": 0}
        written.append(several if choices > 1 else {"text_a": texts[0], "label": i % 2})
    write_rows(tmp_path / "own" / "train.jsonl", written)
    split = load_split(get_task("own", tmp_path), "train", load_tokenizer(encoder, 48), tmp_path)
    real = total = 0
    for batch in batches(split, 32, seed=(0, 1)):
        for _, (ids, _, mask) in split_by_length(batch):
            real += mask.sum().item()
            total += ids.numel()
    assert real == sum(len(ids) for row in split["input_ids"] for ids in row)
    assert 1 - real / total < 0.05


# --------------------------------------------------------------------------------------------------
# Your own data as they come


def mine(n):
    rng = random.Random(1)
    gold = ["no", "yes"] * n
    return [words("premise hypothesis gold", sentence(rng), sentence(rng), x) for x in gold[:n]]


NAMES = "--columns text_a=premise text_b=hypothesis label=gold"


@pytest.mark.parametrize("separator", [",", ";"])
def test_own_columns_and_a_held_out_development_set(launch, tmp_path, separator, capsys):
    """One .csv file, other names of columns, no development file: trains, evaluates, predicts."""
    lines = [separator.join(row.values()) for row in mine(60)]
    (tmp_path / "mine").mkdir()
    text = "\n".join([separator.join(mine(1)[0]), *lines])
    (tmp_path / "mine/train.csv").write_text(text)
    head = "--stage head --task mine --epochs 1"

    def train(more="", out="none"):
        return launch(*cli(f"{head} {more}", data_dir=tmp_path, out=tmp_path / out))

    with pytest.raises(FileNotFoundError, match="--dev-fraction"):
        train(NAMES)
    with pytest.raises(ValueError, match="no column 'label'; it has premise, hypothesis, gold"):
        train()
    result = train(f"{NAMES} --dev-fraction 0.2", "run")
    assert (result["train_examples"], result["dev_examples"]) == (48, 12)
    train(f"{NAMES} --dev-fraction 0.2 --seed 7", "other")
    configs = [json.loads((tmp_path / n / "config.json").read_text()) for n in ("run", "other")]
    assert configs[0]["data_sha256"] == configs[1]["data_sha256"]  # the same ones for every seed
    found = evaluate.main([str(tmp_path / "run"), "--device", "cpu"])
    capsys.readouterr()
    assert (found["examples"], found["accuracy"]) == (12, result["accuracy"])
    predict.main([str(tmp_path / "run"), "--file", str(tmp_path / "mine" / "train.csv")])
    assert len(capsys.readouterr().out.splitlines()) == 60


@pytest.mark.parametrize("name", ["dev.jsonl", "val.csv"])
def test_other_names_of_the_development_file(tokenizer, tmp_path, name):
    written = [{"text_a": row["premise"], "label": row["gold"]} for row in mine(40)]
    write_rows(tmp_path / "mine/train.jsonl", written)
    write_rows(path := tmp_path / "mine" / name, written[:10])
    if name.endswith("csv"):
        lines = [f"{row['text_a']},{row['label']}" for row in written[:10]]
        path.write_text("\n".join(["text_a,label", *lines]))
    task = get_task("mine", tmp_path)
    assert len(load_split(task, "validation", tokenizer, tmp_path)) == 10
    with pytest.raises(ValueError, match=f"--dev-fraction: .*{name} has a development set"):
        load_split(task, "train", tokenizer, tmp_path, dev_fraction=0.5)


# --------------------------------------------------------------------------------------------------
# Examples that are held out as development set


def test_imdb_chooses_its_epoch_on_training_examples(encoder, tmp_path):
    """2,000 of them, the same ones for every seed, and none of the test set; a validation file goes
    first."""
    written = [{"text": f"{word}", "label": i % 2} for i, word in enumerate(["red", "cat"] * 3000)]
    write_rows(tmp_path / "imdb" / "train.jsonl", written)
    tokenizer, task = load_tokenizer(encoder, 48), get_task("imdb", tmp_path)
    dev = load_split(task, "validation", tokenizer, tmp_path)
    train = load_split(task, "train", tokenizer, tmp_path, seed=5)
    assert (len(train), len(dev)) == (4000, 2000)
    assert dev["label"][:] != [0] * 2000 and sum(dev["label"][:]) + sum(train["label"][:]) == 3000
    again = load_split(task, "validation", tokenizer, tmp_path, seed=5)
    assert again["label"][:] == dev["label"][:]
    for i in range(100, 6000):  # errors name the line of the file
        written[i]["label"] = 9
    write_rows(tmp_path / "imdb" / "train.jsonl", written)
    with pytest.raises(ValueError, match="line 101: label 9"):
        load_split(task, "validation", tokenizer, tmp_path)
    write_rows(tmp_path / "imdb" / "train.jsonl", written[:4])
    write_rows(tmp_path / "imdb" / "validation.jsonl", written[:3])
    sizes = [len(load_split(task, x, tokenizer, tmp_path)) for x in ("train", "validation")]
    assert sizes == [4, 3]


def test_held_out_examples_are_known_by_their_content(tokenizer, tmp_path):
    """The same ones are found at another path to the same data; where rows were added, changed or
    removed, the split is refused. Other data may have a development set of their own."""
    write_rows(tmp_path / "a/mine/train.jsonl", own_rows := mine(50))

    def load(directory, split="validation", recorded=None):
        names = {"text_a": "premise", "text_b": "hypothesis", "label": "gold"}
        task = get_task("mine", directory, columns=names)
        more = {"dev_fraction": 0.1, "held_out": recorded}
        return load_split(task, split, tokenizer, directory, **more)

    dev, train = load(tmp_path / "a"), load(tmp_path / "a", "train")
    recorded = origin(dev)["held_out"]
    assert (len(dev), len(train)) == (5, 45) and origin(train)["held_out"] == recorded
    (tmp_path / "a").rename(tmp_path / "b")
    again = load(f"{tmp_path}/./b/", recorded=recorded)
    assert again["input_ids"][:] == dev["input_ids"][:]
    held = np.random.default_rng(0).permutation(50)[0]
    other = [*own_rows[:held], {**own_rows[held], "premise": "no"}, *own_rows[held + 1 :]]
    for changed in ([*own_rows, *own_rows], own_rows[1:], other):
        write_rows(tmp_path / "b/mine/train.jsonl", changed)
        for split in ("train", "validation"):
            with pytest.raises(ValueError, match="rows were added, removed or changed"):
                load(tmp_path / "b", split, recorded)
    write_rows(tmp_path / "b/mine/dev.jsonl", own_rows[:7])
    assert len(load(tmp_path / "b", recorded=recorded)) == 7
