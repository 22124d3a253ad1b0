"""experiments.predict and load_run: the probabilities are the run's, in the order of the lines,
from every kind of input; the page has the fusion's weights, and text stays text."""

import io
import json
import sys

import pytest

from conftest import read_lines
from data import Classification, get_task
from experiments import predict
from experiments.load_run import load_run
from formats.files import read_json

HOSTILE = """</script><script>alert("x")</script><img src=x onerror="alert('x')"> <!-- & 'dog'"""


@pytest.fixture
def say(capsys, monkeypatch):
    """say(run, ..., stdin="...") -> the lines that main prints."""

    def say(*arguments, stdin=""):
        capsys.readouterr()  # of training, for instance
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        predict.main([*map(str, arguments), "--device", "cpu"])
        return capsys.readouterr().out.splitlines()

    return say


def test_a_type_s_own_predictions(runs, monkeypatch):
    """As in evaluation, not the most probable label."""
    monkeypatch.setattr(Classification, "predict", staticmethod(lambda logits: logits.argmin(-1)))
    (found,) = load_run(runs / "rte").predict([["red", "cat"]])
    assert found["probability"] == min(found["probabilities"].values())
    assert found["probability"] == found["probabilities"][found["label"]]


@pytest.mark.parametrize("run, task", [("pick", "pick"), ("fusion-rte", "rte"), ("sst2", "sst2")])
def test_probabilities(run, task, say, runs, data_dir):
    run, file = runs / run, data_dir / task / "validation.jsonl"
    rows, task = read_lines(file), get_task(task, data_dir)
    results = [json.loads(line) for line in say(run, "--file", file, "--json")]
    assert [result.pop("line") for result in results] == list(range(1, len(rows) + 1))
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
        assert [result["line"] for result in results] == [1, 3, 5, 7, 9, 11]
    for results in (*others, load_run(words[0]).predict(texts)):
        for ours, result in zip(first, results, strict=True):
            assert ours["probability"] == pytest.approx(result["probability"], abs=1e-5)
            assert ours["truncated"] == result["truncated"] == (ours["line"] == 7)
