"""experiments.predict and load_run: the probabilities are the run's, in the order of the rows, from
every kind of input; anything that is no input is refused."""

import io
import json
import os
import shlex
import subprocess
import sys

import pytest
import torch

from bert import Bert
from conftest import cli, read_lines, write_rows
from data import get_task
from experiments import evaluate, fusion_weights, predict
from experiments.load_run import load_run
from formats.files import read_json, write_json

PNG = b"\x89PNG"


@pytest.fixture
def say(capsys, monkeypatch):
    """say(run, ..., stdin="...") -> the lines that main prints."""

    def say(*arguments, stdin=""):
        capsys.readouterr()  # of training, for instance
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        predict.main([*map(str, arguments), "--device", "cpu"])
        return capsys.readouterr().out.splitlines()

    return say


def test_a_task_s_own_predictions(runs):
    """As in evaluation, not the most probable label."""
    run = load_run(runs / "rte")
    run.task.predict = lambda logits: logits.argmin(-1)
    (found,) = run.predict(("red", "cat"))
    assert found["probability"] == min(found["probabilities"].values())
    assert found["probability"] == found["probabilities"][found["label"]]


@pytest.mark.parametrize("run, task", [("pick", "pick"), ("fusion-rte", "rte"), ("sst2", "sst2")])
def test_probabilities(run, task, say, runs, data_dir):
    run, file = runs / run, data_dir / task / "validation.jsonl"
    rows, task = read_lines(file), get_task(task, data_dir)
    results = [json.loads(line) for line in say(run, "--file", file, "--json")]
    assert [result.pop("row") for result in results] == list(range(1, len(rows) + 1))
    assert results == load_run(run).predict(rows)
    right = 0
    for row, result in zip(rows, results, strict=True):
        found = result["probabilities"]
        assert list(found) == list(task.labels) and not result["truncated"]
        assert result["probability"] == max(found.values()) == found[result["label"]]
        assert sum(found.values()) == pytest.approx(1)
        right += result["label"] == task.labels[task.example(row)[1]]
    assert right / len(rows) == read_json(run / "metrics.json")["accuracy"]
    for line, result in zip(say(run, "--file", file), results, strict=True):
        assert line.startswith(f"{result['label']}\t{result['probability']:.3f}\t")


def test_the_precision_is_that_of_the_training(copy, runs, monkeypatch):
    """Whatever reads a run computes as `evaluate` does, so that no label differs."""
    path, forward, seen = copy(runs / "fusion-rte"), Bert.forward, []
    record = read_json(path / "run.json")
    write_json(path / "run.json", record | {"options": record["options"] | {"dtype": "bfloat16"}})

    def recorded(bert, *values, **named):
        seen.append((torch.is_autocast_enabled("cpu"), bert.dtype))
        return forward(bert, *values, **named)

    monkeypatch.setattr(Bert, "forward", recorded)
    run = load_run(path)
    run.predict(("red", "cat"))
    run.fusion_weights(("red", "cat"))
    fusion_weights.mean_weights(run, run.split()[:2])
    evaluate.main([str(path), "--device", "cpu"])
    assert len(seen) == 4 and {*seen} == {(True, torch.bfloat16)}


def test_every_kind_of_input_says_the_same(say, runs, data_dir, tmp_path):
    """A file, with empty lines, which are passed over; JSON on stdin; arguments; and Python. What
    is too long is cut, and it says so."""
    rows = read_lines(data_dir / "rte" / "validation.jsonl")[:6]
    rows[3]["sentence1"] = " ".join(["red"] * 100)
    texts = [[row["sentence1"], row["sentence2"]] for row in rows]
    lines, lists = ("\r\n\r\n".join(map(json.dumps, inputs)) for inputs in (rows, texts))
    file, words = tmp_path / "a.jsonl", (runs / "rte", "--json")
    file.write_text("\ufeff" + lines, encoding="utf-8", newline="")
    outputs = [say(*words, "--file", file), [say(*words, *pair)[0] for pair in texts]]
    outputs += [say(*words, "--file", "-", stdin=given) for given in ("\ufeff" + lines, lists)]
    first, *others = [[json.loads(line) for line in output] for output in outputs]
    for results in (first, *others[1:]):
        assert [result["row"] for result in results] == [1, 2, 3, 4, 5, 6]
    for results in (*others, load_run(words[0]).predict(texts)):
        for ours, result in zip(first, results, strict=True):
            assert ours["probability"] == pytest.approx(result["probability"], abs=1e-5)
            assert ours["truncated"] == result["truncated"] == (ours["row"] == 4)


def test_one_input_is_one_answer(runs):
    """A text is not taken for its characters, nor a row for the names of its columns."""
    for name, one, other in (
        ("sst2", "the red cat", {"sentence": "the red cat"}),
        ("rte", ("red cat", "cat"), {"sentence1": "red cat", "sentence2": "cat", "idx": 7}),
        ("pick", ("red", ["a", "b", "c"]), {"text_a": "red", "choices": ["a", "b", "c"]}),
    ):
        run = load_run(runs / name)
        (answer,) = run.predict(one)
        assert run.predict(other) == [answer]
        several = run.predict([one, other])
        assert [a["probability"] for a in several] == 2 * [pytest.approx(answer["probability"])]
    fusion = load_run(runs / "fusion-rte")
    (weights,) = fusion.fusion_weights(("red cat", "cat"))
    (same,) = fusion.fusion_weights([{"sentence1": "red cat", "sentence2": "cat"}])
    assert weights["tokens"] == same["tokens"] == "[CLS] red cat [SEP] cat [SEP]".split()
    assert torch.equal(weights["weights"]["output"][1], same["weights"]["output"][1])


NO_INPUTS = {  # one text of two, two inputs of one text each, and the like
    "rte": ["red", ["red", "cat"], ("red", "cat", "cat"), ("red", ["cat"]), ("red", None), None],
    "pick": ["red", ("red", "a", "b", "c"), ("red", ["a", "b"]), ("red", ["a", "b", 3])],
    "sst2": [("red", "cat"), [("red", "cat")], [["red"], []], {"sentence": ["red"]}, {"red"}, 5],
}


def test_anything_else_is_refused(runs):
    """By the names of the task's columns, or of the one that is wrong."""
    for name, inputs in NO_INPUTS.items():
        run = load_run(runs / name)
        columns = " and ".join(run.task.columns)
        for given in inputs:
            words = rf"{name} takes {columns}, not|column '|choices, expected 3"
            with pytest.raises(ValueError, match=words):
                run.predict(given)
    with pytest.raises(ValueError, match="rte takes sentence1 and sentence2, not 'red'"):
        load_run(runs / "fusion-rte").fusion_weights("red")
    with pytest.raises(ValueError, match="no fusion"):
        load_run(runs / "rte").fusion_weights(("red", "cat"))


def test_rows_have_the_files_names_or_ours(launch, data_dir, tmp_path):
    """Where the run had --columns; and columns under the names that other copies of a task have."""
    pair = ("red cat sleeps", "the dog")
    for task, a, b, label, more in (
        (
            "nli",
            "text_b",
            "hypothesis",
            "gold",
            "--columns text_a=text_b text_b=hypothesis label=gold",
        ),
        ("scitail", "sentence1", "sentence2", "gold_label", ""),
    ):
        for split in ("train", "validation"):
            rows = read_lines(data_dir / "rte" / f"{split}.jsonl")
            labels = [["entails", "neutral"][row["label"]] for row in rows]
            texts = [(row["sentence1"], row["sentence2"]) for row in rows]
            rows = [{a: t, b: u, label: x} for (t, u), x in zip(texts, labels, strict=True)]
            write_rows(tmp_path / task / f"{split}.jsonl", rows)
        words = f"--stage head --epochs 1 --limit-train 8 --task {task} {more}"
        launch(words, out=tmp_path / f"{task}-run", data_dir=tmp_path)
        run = load_run(tmp_path / f"{task}-run")
        for names in ((a, b), tuple(run.task.columns)):
            assert run.candidates(dict(zip(names, pair, strict=True))) == [pair], names


def test_where_the_data_are_now(launch, data_dir, tmp_path):
    rows = read_lines(data_dir / "sst2" / "train.jsonl")
    write_rows(tmp_path / "a.jsonl", [{"text_a": r["sentence"], "label": r["label"]} for r in rows])
    words = "--stage head --task own --epochs 1 --dev-fraction 0.5 --max-length 8"
    launch(words, train_file=tmp_path / "a.jsonl", out=tmp_path / "run")
    run = load_run(tmp_path / "run")
    with pytest.raises(FileNotFoundError, match="no test split .* --data-dir takes DIR/own/test"):
        run.split("test")
    (tmp_path / "a.jsonl").rename(tmp_path / "b.jsonl")
    with pytest.raises(FileNotFoundError, match="a.jsonl is not a file; --data-dir takes DIR/own"):
        run.split()


def test_training_says_how_many_texts_it_cuts(launch, tmp_path, capsys):
    launch("--stage head --task rte --epochs 1 --max-length 8", out=tmp_path / "run")
    assert "% of rte's training examples are cut to --max-length tokens" in capsys.readouterr().out


def test_pictures(say, runs, tmp_path, refused):
    """A panel for each layer, of the choice that was made."""
    path, words = tmp_path / "weights.png", ("red cat", "cat")
    say(runs / "fusion-rte", *words, "--picture", path)
    assert path.read_bytes().startswith(PNG)
    for more, text in ((words, "has no fusion"), (("--file", "-"), "a single input")):
        given = [runs / "rte", *more, "--picture", path, "--device", "cpu"]
        refused(given, text, name="predict.py", main=predict.main)


def test_head_ends_it_quietly(runs, tmp_path):
    """`| head` closes the pipe before all is written, and `| true` before the first line."""
    write_rows(tmp_path / "rows.jsonl", [{"sentence": "red cat"}] * 600)
    command = [sys.executable, "-m", "experiments.predict", *cli(str(runs / "sst2"), device="cpu")]
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}  # so that little is written at the very end
    for words, reader in (("--json --file rows.jsonl", "head -n 1"), ("cat", "true")):
        words = words.replace("rows", str(tmp_path / "rows"))
        line = f"set -o pipefail; {shlex.join(command)} {words} | {reader}"
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=buffered)
        said = [text for text in done.stderr.splitlines() if not text.startswith("note: ")]
        assert (done.returncode, said) == (0, [])
