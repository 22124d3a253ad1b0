"""What a user sees: the first line, the start, the table of epochs, the end, several seeds, help,
and GLUE's submission file."""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

import child
import train
from conftest import command_line
from experiments import evaluate, predict

ROOT = Path(train.__file__).parent


@pytest.fixture
def trained(encoder, data_dir, tmp_path, capsys):
    """trained(...): (the lines on stdout, the closing line's dictionary) of train.py on rte."""

    def trained(*options):
        given = ["--model", encoder, "--data-dir", data_dir, "--device", "cpu", "--task", "rte"]
        command_line([str(word) for word in [*given, "--out", tmp_path / "run", *options]])
        *lines, last = capsys.readouterr().out.splitlines()
        return lines, json.loads(last)

    return trained


def test_start_table_and_end(trained, tmp_path, encoder):
    lines, result = trained("--stage", "adapter", "--epochs", 3, "--lr", "5e-3")
    lines = [line for line in lines if not line.startswith("note: ")]
    start, titles, *epochs = lines[:5]
    for part in (
        f"adapter on rte: encoder {encoder} (0.0 M parameters)",
        f"{result['trained_parameters']:,} parameters are trained, on cpu in float32",
        "96 training and 40 development examples (the most frequent class: accuracy 0.5000)",
        str(tmp_path / "run"),
    ):
        assert part in start
    names = ["epoch", "loss", "dev accuracy", "dev macro f1", "dev f1", "dev matthews", "dev loss"]
    assert re.split("  +", titles.strip()) == [*names, "examples/s", "seconds"]
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    best = 0.0
    for row, entry in zip(epochs, log, strict=True):
        cells = row.replace("best so far", "").split()
        assert len(cells) == 9 and int(cells[0]) == entry["epoch"]
        assert cells[2] == f"{entry['dev_accuracy']:.4f}" and cells[6] == f"{entry['dev_loss']:.4f}"
        assert ("best so far" in row) == (entry["dev_accuracy"] > best)
        best = max(best, entry["dev_accuracy"])
        assert len(row) >= len(titles)  # aligned: each cell ends under its title
    assert lines[5] == "stopped: all 3 epochs are done"
    again, _ = trained("--stage", "adapter", "--epochs", 1, "--out", tmp_path / "short")
    assert "stopped: the only epoch is done" in again
    assert lines[6].startswith(f"best epoch: {result['best_epoch']}, dev accuracy {best:.4f}")
    assert lines[8].startswith("next: python -m experiments.predict ")
    assert result["majority_class_accuracy"] == 0.5
    chosen = log[result["best_epoch"] - 1]
    for name in ("accuracy", "macro_f1", "f1", "matthews"):
        assert result[name] == chosen[f"dev_{name}"]
    assert result["dev_loss"] == chosen["dev_loss"]


def test_early_stopping_says_so(trained):
    """A learning rate that changes nothing: no epoch is better than the first."""
    lines, result = trained("--stage", "head", "--lr", "1e-12", "--patience", 2)
    words = [line for line in lines if line.startswith(("stopped", "accuracy"))]
    assert words[0] == "stopped: early, after epoch 3; 2 epochs without a better dev accuracy"
    learned = result["accuracy"] > result["majority_class_accuracy"]
    assert ("the most frequent class alone gets" in words[1]) == (not learned)


def test_another_score_chooses(launch, tmp_path):
    given = ["--stage", "head", "--task", "sst2", "--epochs", 4, "--lr", "3e-2"]
    for score in ("macro_f1", "matthews", "f1"):
        result = launch(*given, "--score", score, "--out", tmp_path / score)
        log = [json.loads(line) for line in (tmp_path / score / "log.jsonl").open()]
        assert result[score] == max(line[f"dev_{score}"] for line in log)
    for task, score in (("sst2", "loss"), ("pick", "macro_f1")):  # choices are no classes
        with pytest.raises(ValueError, match=f"--score {score}: {task} has accuracy"):
            launch(*given, "--task", task, "--score", score, "--out", tmp_path / "none")


def test_evaluate_has_the_same_scores(runs, capsys):
    metrics = json.loads((runs / "rte" / "metrics.json").read_text())
    evaluate.main([str(runs / "rte"), "--device", "cpu"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    for name in ("accuracy", "macro_f1", "f1", "matthews"):
        assert found[name] == metrics[name]
    assert found["loss"] == pytest.approx(metrics["dev_loss"], abs=1e-6)


def test_seeds(trained, launch, tmp_path):
    lines, summary = trained("--stage", "head", "--epochs", 1, "--seeds", 3, 5, "--lr", "3e-2")
    own = [json.loads((tmp_path / f"run/seed-{n}/metrics.json").read_text()) for n in (3, 5)]
    values = [metrics["accuracy"] for metrics in own]
    assert summary["accuracy"]["values"] == values
    assert summary["accuracy"]["mean"] == statistics.mean(values)
    assert summary["accuracy"]["deviation"] == statistics.stdev(values)
    assert summary == json.loads((tmp_path / "run" / "seeds.json").read_text())
    assert any(re.match(r" +accuracy  0\.\d{4} ± \d\.\d{4}$", line) for line in lines)
    alone = launch(
        *("--stage", "head", "--task", "rte", "--epochs", 1, "--seed", 5, "--lr", "3e-2"),
        *("--out", tmp_path / "alone"),
    )
    assert alone["accuracy"] == values[1] and alone["dev_loss"] == own[1]["dev_loss"]
    _, again = trained(
        *("--stage", "head", "--epochs", 1, "--seeds", 3, 5, 7, "--lr", "3e-2", "--resume")
    )  # the two are read, the third is trained
    assert again["accuracy"]["values"][:2] == values and len(again["accuracy"]["values"]) == 3


@pytest.mark.parametrize(
    "words, say",
    [
        (["--seeds", "1", "1"], "twice"),
        (["--seeds", "1", "--seed", "2"], "choose one"),
        (["--seeds", "-1"], "2^32"),
        (["--dev-fraction", "1"], "between 0 and 1"),
    ],
)
def test_options_that_make_no_sense(trained, tmp_path, capsys, words, say):
    with pytest.raises(SystemExit) as exit:
        trained("--stage", "head", *words)
    error = capsys.readouterr().err
    assert exit.value.code == 2 and error.count("\n") == 1 and say in error
    assert not (tmp_path / "run").exists()


def test_help_names_defaults_and_ends_with_examples(capsys):
    with pytest.raises(SystemExit) as exit:
        command_line(["--help"])
    text = capsys.readouterr().out
    assert exit.value.code == 0
    for stage in train.STAGES:
        assert re.search(rf"^  {stage} +\w+", text, re.MULTILINE)
    for words in (
        "default 300 for each task",
        "default annealed",
        "default 32",
        "else 0",
        "default 16.0",
    ):
        assert words in " ".join(text.split())
    assert text[text.index("examples:") :].count("python train.py") == 3


@pytest.mark.parametrize("command", ["bert.py", "data.py"])
def test_help_is_help(command):
    status, out, error = child.output([command, "--help"])
    assert (status, error) == (0, "") and "usage: " in out


def test_the_first_line_comes_before_torch():
    """And Ctrl-C during the imports is one line."""
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "train.py", "--stage", "adapter"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "train.py: loading PyTorch\n"
    assert time.monotonic() - started < 2
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "train.py: interrupted\n")


def test_data_that_no_hub_answers_for(encoder, tmp_path, capsys):
    words = ["--stage", "head", "--task", "rte", "--model", encoder, "--out", tmp_path / "run"]
    with pytest.raises(SystemExit) as exit:
        command_line([str(word) for word in words])
    error = capsys.readouterr().err
    assert exit.value.code == 2 and error.count("\n") == 1
    for text in ("nyu-mll/glue rte, train", "cannot be reached", os.environ["HF_HOME"]):
        assert text in error
    assert not (tmp_path / "run").exists()


def test_files_have_the_users_permissions(launch, tmp_path):
    before = os.umask(0o027)
    try:
        launch("--stage", "adapter", "--task", "rte", "--epochs", 1, "--out", tmp_path / "run")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "run").iterdir()}
    assert set(modes.values()) == {0o640}, modes


def hidden(data_dir, path, task="rte"):
    """A test set as GLUE has it: idx, and -1 for every label."""
    lines = (data_dir / task / "validation.jsonl").read_text().splitlines()
    rows = [{**json.loads(line), "label": -1, "idx": 100 + i} for i, line in enumerate(lines)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("task", ["rte", "sst2"])
def test_a_glue_submission(runs, data_dir, tmp_path, capsys, task):
    hidden(data_dir, tmp_path / task / "test.jsonl", task)
    file, out = tmp_path / task / "test.jsonl", tmp_path / "predictions.tsv"
    given = [str(runs / task), "--file", str(file), "--device", "cpu"]
    predict.main([*given, "--json"])
    labels = [json.loads(line)["label"] for line in capsys.readouterr().out.splitlines()]
    predict.main([*given, "--out", str(out)])
    assert capsys.readouterr().out == f"{out}: 40 predictions\n"
    names = {"negative": "0", "positive": "1"} if task == "sst2" else {}
    expected = [f"{100 + i}\t{names.get(label, label)}" for i, label in enumerate(labels)]
    assert out.read_text().splitlines() == ["index\tprediction", *expected]
    with pytest.raises(SystemExit):
        evaluate.main(
            [str(runs / task), "--split", "test", "--data-dir", str(tmp_path), "--device", "cpu"]
        )
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "experiments.predict --out" in error


def test_a_submission_is_of_a_file(runs, tmp_path, capsys):
    with pytest.raises(SystemExit):
        predict.main([str(runs / "rte"), "a", "b", "--out", str(tmp_path / "out.tsv")])
    assert "--out goes with --file alone" in capsys.readouterr().err
