"""What a user sees: the start, the table of epochs, the end, several seeds, and help."""

import json
import os
import re
import statistics

import pytest

import child
import train
from conftest import read_lines


@pytest.fixture
def trained(launch, tmp_path, capsys):
    """trained(...): (the lines on stdout, the closing line's dictionary) of train.py on rte."""

    def trained(text):
        result = launch(text, task="rte", out=tmp_path / "run")
        lines = capsys.readouterr().out.splitlines()
        return [line for line in lines if not line.startswith("note: ")], result

    return trained


def test_start_table_and_end(trained, tmp_path, encoder):
    lines, result = trained("--stage adapter --epochs 3 --lr 5e-3")
    start, titles, *epochs = lines[:5]
    trains = f"{result['trained_parameters']:,} parameters are trained, on cpu in float32"
    assert f"adapter on rte: encoder {encoder} (0.0 M parameters), {trains}" in start
    assert "96 training and 40 development examples" in start and str(tmp_path / "run") in start
    names = ["epoch", "loss", "dev accuracy", "dev macro f1", "dev f1", "dev matthews", "dev loss"]
    assert re.split("  +", titles.strip()) == [*names, "examples/s", "seconds"]
    log = read_lines(tmp_path / "run" / "log.jsonl")
    best = 0.0
    for row, entry in zip(epochs, log, strict=True):
        cells = row.replace("best so far", "").split()
        assert len(cells) == 9 and int(cells[0]) == entry["epoch"]
        assert cells[2] == f"{entry['dev_accuracy']:.4f}" and cells[6] == f"{entry['dev_loss']:.4f}"
        assert ("best so far" in row) == (entry["dev_accuracy"] > best)
        best = max(best, entry["dev_accuracy"])
    assert lines[5] == "stopped: all 3 epochs are done"
    assert lines[6].startswith(f"best epoch: {result['best_epoch']}, dev accuracy {best:.4f}")
    assert lines[8].startswith("next: python -m experiments.predict ")
    chosen = log[result["best_epoch"] - 1]
    for name in ("accuracy", "macro_f1", "f1", "matthews"):
        assert result[name] == chosen[f"dev_{name}"]
    assert result["dev_loss"] == chosen["dev_loss"] and result["majority_class_accuracy"] == 0.5


def test_early_stopping_says_so(trained):
    """A learning rate that changes nothing: no epoch is better than the first."""
    lines, _ = trained("--stage head --lr 1e-12 --patience 2")
    assert "stopped: early, after epoch 3; 2 epochs without a better dev accuracy" in lines


def test_another_score_chooses(launch, tmp_path):
    words = "--stage head --task sst2 --epochs 4 --lr 3e-2 --score f1"
    result = launch(words, out=tmp_path / "run")
    log = read_lines(tmp_path / "run" / "log.jsonl")
    best = max(log, key=lambda line: line["dev_accuracy"])
    assert result["f1"] == max(line["dev_f1"] for line in log) > best["dev_f1"]


def test_seeds(trained, launch, tmp_path):
    words, out = "--stage head --epochs 1 --lr 3e-2", tmp_path / "run"
    lines, summary = trained(f"{words} --seeds 3 5")
    own = [json.loads((out / f"seed-{n}" / "metrics.json").read_text()) for n in (3, 5)]
    values = [metrics["accuracy"] for metrics in own]
    assert summary["accuracy"]["values"] == values
    assert summary["accuracy"]["mean"] == statistics.mean(values)
    assert summary["accuracy"]["deviation"] == statistics.stdev(values)
    assert summary == json.loads((out / "seeds.json").read_text())
    assert any(re.match(r" +accuracy  0\.\d{4} ± \d\.\d{4}$", line) for line in lines)
    alone = launch(words, task="rte", seed=5, out=tmp_path / "alone")
    assert alone["accuracy"] == values[1] and alone["dev_loss"] == own[1]["dev_loss"]
    _, again = trained(f"{words} --seeds 3 5 7 --resume")  # two are read, the third is trained
    assert again["accuracy"]["values"][:2] == values and len(again["accuracy"]["values"]) == 3


def test_help_names_defaults_and_ends_with_examples():
    for command in ("train.py", "bert.py", "data.py"):
        status, text, error = child.output([command, "--help"])
        assert (status, error) == (0, "") and "usage: " in text
        if command == "train.py":
            for stage in train.STAGES:
                assert re.search(rf"^  {stage} +\w+", text, re.MULTILINE)
            assert "default 32" in " ".join(text.split())
            assert text[text.index("examples:") :].count("python train.py") == 3


def test_files_have_the_users_permissions(launch, tmp_path):
    before = os.umask(0o027)
    launch("--stage adapter --task rte --epochs 1", out=tmp_path / "run")
    os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "run").iterdir()}
    assert set(modes.values()) == {0o640}, modes
