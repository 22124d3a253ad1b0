"""Finished runs: load_run, and what reads them, evaluate, predict and fusion_weights."""

import json
import math
import os
import pickle
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from statistics import mean

import pytest
import torch

from conftest import change, cli, read_lines, write_rows
from data import Task, get_task
from experiments import evaluate as evaluation
from experiments import fusion_weights, predict
from experiments.load_run import load_run
from formats.files import read_json, write_json
from formats.rows import Source
from runtime.record import never_predicted


def evaluate(run, *options):
    return evaluation.main([str(run), "--device", "cpu", *map(str, options)])


def note(capsys, *words):
    """What evaluate says about the difference from training."""
    capsys.readouterr()
    evaluate(*words)
    return "".join(re.findall("^note: .*", capsys.readouterr().out, re.MULTILINE))


def predicted(capsys, *words):
    """The lines that predict prints."""
    capsys.readouterr()
    predict.main([*map(str, words), "--device", "cpu"])
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("tasks", ["rte sst2 --score macro_f1", "rte pick --without-adapters"])
def test_everything_is_as_in_training(tasks, launch, tmp_path, capsys):
    """On several tasks (on one: test_kinds.py), to the bit; nothing is written."""
    words = "--epochs 1 --steps-per-epoch 3 --lr 5e-2 --batch-size 8 --dtype bfloat16"
    metrics = launch(f"{words} --limit-dev 39 --tasks {tasks}", out=tmp_path)
    assert (tmp_path / "heads").is_dir() == ("--without-adapters" in tasks)
    before, losses = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}, []
    for task, accuracy in metrics["accuracies"].items():
        result = evaluate(tmp_path, "--task", task)
        losses.append(result["loss"])
        assert result["accuracy"] == accuracy
        assert (result["task"], result["examples"], result["split"]) == (task, 39, "validation")
        assert note(capsys, tmp_path, "--task", task) == ""
    assert mean(losses) == metrics["dev_loss"]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    write_json(tmp_path / "metrics.json", {**metrics, "accuracies": {task: 2}})
    said = note(capsys, tmp_path, "--task", task)
    assert f"metrics.json has accuracy 2, now {accuracy}: " in said


def test_what_has_changed_since_is_named(copy, runs, capsys):
    """To the bit; on another machine rounding is no change, and in bf16 it is larger."""
    run = copy(runs / "rte")
    metrics, record = (read_json(run / name) for name in ("metrics.json", "run.json"))
    loss, commit = metrics["dev_loss"], record["machine"]["commit"]
    elsewhere = {**record, "machine": {**record["machine"], "processor": "other"}}
    in_bf16 = {**elsewhere, "options": {**record["options"], "dtype": "bfloat16"}}
    assert note(capsys, run) == ""
    assert note(capsys, run, "--split", "train") == ""  # of which nothing is known
    for of_run, least in ((record, math.ulp(loss)), (elsewhere, 2e-4), (in_bf16, 2e-2)):
        write_json(run / "run.json", of_run)
        write_json(run / "metrics.json", metrics | {"dev_loss": loss + least})
        assert note(capsys, run).startswith(f"note: metrics.json has loss {loss + least}, now ")
        write_json(run / "metrics.json", metrics | {"dev_loss": loss + least / 40})
        assert (note(capsys, run) == "") == (of_run is not record or loss + least / 40 == loss)
    write_json(run / "run.json", record)
    write_json(run / "metrics.json", metrics | {"dev_loss": 3.5})
    text = f"note: metrics.json has loss 3.5, now {loss}: the code, a library, or a value that is"
    assert note(capsys, run) == f"{text} not saved has changed since (commit {commit})"


def test_classes_are_counted():
    labels, predictions = torch.tensor([0, 0, 0, 1, 2, 2]), torch.tensor([0, 0, 1, 0, 1, 1])
    assert evaluation.by_class("xyz", labels, predictions) == [
        ["0 x", 2 / 3, 2 / 3, 3, "2 as 0, 1 as 1"],
        ["1 y", 0, 0, 1, "1 as 0"],
        ["2 z", None, 0, 2, "2 as 1"],
    ]
    found = never_predicted(Task(None, [], [*"xyzw"]), labels, predictions)
    assert found == {"never_predicted": ["z"]}


def test_which_rows_are_evaluated(launch, refused, data_dir, tmp_path, capsys):
    """A split of any name. What --dev-fraction held out is never scored as training examples; of
    other rows it is not known which they are, and that they are others is said."""
    run, file, there = tmp_path / "run", tmp_path / "rte" / "train.jsonl", tmp_path / "there"
    rows = read_lines(data_dir / "rte" / "train.jsonl")
    write_rows(file, rows)
    words = "--stage head --task rte --epochs 1 --dev-fraction 0.25 --max-length 8"
    accuracy = launch(words, data_dir=tmp_path, out=run)["accuracy"]
    assert "% of rte's training examples are cut to --max-length" in capsys.readouterr().out
    assert evaluate(run, "--split", "train")["examples"] == 72
    assert evaluate(run)["examples"] == 24 and evaluate(run)["accuracy"] == accuracy
    write_rows(there / "rte" / "test.jsonl", rows[:50])
    of_split = evaluate(run, "--split", "test", "--data-dir", there)
    renamed = [{**row, "sentence1": row["idx"], "claim": row["sentence1"]} for row in rows[:50]]
    write_rows(tmp_path / "mine.jsonl", renamed)
    words = ["--file", tmp_path / "mine.jsonl", "--columns", "sentence1=claim"]
    assert of_split["examples"] == 50 and of_split["loss"] == evaluate(run, *words)["loss"]
    assert "WARNING: this run was TRAINED on " in capsys.readouterr().out
    words = ["--file", file, "--columns", "sentence1=gone"]
    refused([run, *words], f"{file}: no column 'gone'", main=predict.main)
    refused([run, "--file", "x", "--split", "test"], "in place of", main=evaluation.main)
    write_rows(file, rows[1:])
    refused([run, "--split", "train"], "held out cannot be told", main=evaluation.main)
    assert note(capsys, run) == "note: these are not the development examples of the training"
    file.unlink()
    with pytest.raises(FileNotFoundError, match="no train split for task 'rte'"):
        load_run(run).split("train")


@pytest.mark.parametrize("name, task", [("pick", "pick"), ("fusion-rte", "rte"), ("sst2", "sst2")])
def test_every_kind_of_input_says_the_same(name, task, runs, data_dir, tmp_path, capsys):
    """A file, with empty lines, which are passed over, the words of a command, and Python: the
    answers are those that were counted in training. What is too long is cut, and it says so."""
    run, task = load_run(runs / name), get_task(task, Source(data_dir))
    rows = read_lines(data_dir / task.name / "validation.jsonl")
    answers, right = run.predict(rows), 0
    for row, answer in zip(rows, answers, strict=True):
        found = answer["probabilities"]
        assert list(found) == list(task.labels) and sum(found.values()) == pytest.approx(1)
        assert answer["probability"] == max(found.values()) == found[answer["label"]]
        right += answer["label"] == task.labels[task.label_index(row["label"])]
    assert right / len(rows) == read_json(runs / name / "metrics.json")["accuracy"]

    rows[3][task.columns[0]] = " ".join(["red"] * 100)
    lists, file = [[row[column] for column in task.columns] for row in rows], tmp_path / "a.jsonl"
    of_rows = "\ufeff" + "\r\n\r\n".join(map(json.dumps, rows))
    file.write_text(of_rows, encoding="utf-8", newline="")
    answers = run.predict(lists)
    assert [i for i, answer in enumerate(answers) if answer["truncated"]] == [3]
    numbered = [{"input": number, **answer} for number, answer in enumerate(answers, 1)]
    assert [*map(json.loads, predicted(capsys, runs / name, "--json", "--file", file))] == numbered
    assert run.predict([*rows[:5], *lists[5:]]) == answers
    write_rows(file, [{f"my {column}": value for column, value in row.items()} for row in rows])
    names = [f"{column}=my {column}" for column in task.columns]
    lines = predicted(capsys, runs / name, "--file", file, "--columns", *names)
    for line, answer in zip(lines, answers, strict=True):
        assert line.startswith(f"{answer['label']}\t{answer['probability']:.3f}\t")
    *texts, last = lists[0]
    texts += last if name == "pick" else [last]
    (line,) = predicted(capsys, runs / name, "--json", *texts)
    one = lists[0][0] if name == "sst2" else tuple(lists[0])
    for answer in (json.loads(line), *run.predict(one), *run.predict(rows[0])):
        assert answer["probability"] == pytest.approx(answers[0]["probability"], abs=1e-5)

    run.task.prediction = lambda logits: logits.argmin(-1)  # a task's own, not the most probable
    (found,) = run.predict(rows[:1])
    least = min(found["probabilities"].values())
    assert found["probability"] == found["probabilities"][found["label"]] == least


def test_threads_and_processes(loud_fusion):
    """A fusion's weights are those of one's own text; a run can be handed to another process."""
    run, texts = load_run(loud_fusion), [(("red " * n).strip(), "cat") for n in range(1, 9)] * 8
    expected = [run.fusion_weights(text)[0]["weights"]["output"][0] for text in texts]
    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(run.fusion_weights, texts)]
    for (of_one,), weights in zip(found, expected, strict=True):
        assert torch.equal(of_one["weights"]["output"][0], weights)
    copied = pickle.loads(pickle.dumps(run))
    assert copied.predict(texts) == run.predict(texts)


@pytest.mark.parametrize("has_bf16", [True, False])
def test_the_precision_is_that_of_the_training(has_bf16, copy, runs, monkeypatch, capsys):
    """Or else fp32, where the processor would emulate bf16."""
    monkeypatch.setattr("experiments.load_run.has_bf16", lambda device: has_bf16)
    path, seen = copy(runs / "fusion-rte"), []
    change(path / "run.json", ('"dtype": "float32"', '"dtype": "bfloat16"'))
    run = load_run(path)
    run.bert.register_forward_pre_hook(
        lambda bert, _: seen.append((torch.is_autocast_enabled("cpu"), bert.dtype))
    )
    run.predict(("red", "cat"))
    (weights,) = run.fusion_weights(("red cat", "cat"))
    fusion_weights.mean_weights(run, run.split()[:2])
    assert seen == 3 * [(has_bf16, torch.bfloat16 if has_bf16 else torch.float32)]
    assert ("computes it in float32" in capsys.readouterr().out) != has_bf16
    assert weights["tokens"] == "[CLS] red cat [SEP] cat [SEP]".split()
    monkeypatch.setattr("torch.get_default_dtype", lambda: torch.float64)
    with pytest.raises(ValueError, match="set_default_dtype was called: here it has to be"):
        load_run(path)


NO_INPUTS = {  # one text of two, two inputs of one text each, and the like
    "rte": ["red", ["red", "cat"], ("red", "cat", "cat"), ("red", ["cat"]), None],
    "pick": ["red", ("red", "a", "b", "c"), ("red", ["a", "b"]), ("red", ["a", "b", 3])],
    "sst2": [("red", "cat"), [("red", "cat")], {"sentence": ["red"]}, {"red"}, 5],
}
NO_INPUTS["sst2"] += [[["red"], []], [{"sentence": "red"}, ("cat", "cat")]]


@pytest.mark.parametrize("name", NO_INPUTS)
def test_anything_else_is_refused(name, runs):
    """By the names of the task's columns, or of the one that is wrong."""
    run = load_run(runs / name)
    for given in NO_INPUTS[name]:
        columns = " and ".join(run.task.columns)
        wrong = "holds .*, expected a text|does not hold a list of texts|, expected 3"
        with pytest.raises(ValueError, match=f"{name} takes {columns}, not|{wrong}"):
            run.predict(given)
    assert run.predict([]) == []
    with pytest.raises(ValueError, match="no fusion"):
        run.fusion_weights(run.split()[:1])


def test_pictures(runs, tmp_path, refused):
    path, words = tmp_path / "weights.png", ("red cat", "cat")
    predict.main([str(runs / "fusion-rte"), *words, *cli("--device cpu", picture=path)])
    assert path.read_bytes().startswith(b"\x89PNG")
    for more, text in ((words, "no fusion is active"), (("--file", "x.csv"), "a single input")):
        refused([runs / "rte", *more, *cli("--device cpu", picture=path)], text, main=predict.main)


def test_head_ends_it_quietly(runs, tmp_path):
    """`| head` closes the pipe before all is written, and `| true` before the first line. What only
    pictures need may not be installed."""
    (tmp_path / "matplotlib.py").write_text("raise ImportError")
    write_rows(tmp_path / "rows.jsonl", [{"sentence": "red cat"}] * 600)
    program = f"{sys.executable} -m experiments.predict {runs / 'sst2'} --device cpu"
    buffered = os.environ | {"PYTHONUNBUFFERED": "", "PYTHONPATH": tmp_path}  # little comes last
    for words in (f"--json --file {tmp_path}/rows.jsonl | head -n 1", "cat | true"):
        command = ["bash", "-c", f"set -o pipefail; {program} {words}"]
        done = subprocess.run(command, capture_output=True, text=True, env=buffered)
        said = [text for text in done.stderr.splitlines() if not text.startswith("note: ")]
        assert (done.returncode, said) == (141, [])  # as SIGPIPE would end it
