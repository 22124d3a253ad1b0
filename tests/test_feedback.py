"""What a user sees: the start, a line for each epoch, the end, several seeds, and help."""

import json
import re
import statistics

import pytest

import child
from conftest import read_lines


@pytest.fixture
def trained(launch, tmp_path, capsys):
    """trained(...): (the lines on stdout, the closing line's dictionary) of train.py on sst2."""

    def trained(text):
        result = launch(text, task="sst2", out=tmp_path / "run")
        lines = capsys.readouterr().out.splitlines()
        return [line for line in lines if not line.startswith("note: ")], result

    return trained


def test_start_epochs_and_end(trained, tmp_path, encoder):
    """The score that was asked for chooses the epoch, here another one than accuracy would."""
    words = "--stage head --epochs 4 --lr 3e-2 --score f1"
    (start, *epochs, stopped, best, _, after), result = trained(words)
    trains = f"{result['trained_parameters']:,} parameters are trained, on cpu in float32"
    assert f"head on sst2: encoder {encoder} (0.0 M parameters), {trains}" in start
    assert "96 training and 40 development examples" in start and str(tmp_path / "run") in start
    log, so_far = read_lines(tmp_path / "run" / "log.jsonl"), 0.0
    for line, entry in zip(epochs, log, strict=True):
        assert line.startswith(f"epoch  {entry['epoch']}: loss {entry['loss']:.4f}; dev accuracy ")
        assert f" {entry['dev_accuracy']:.4f}, macro f1 {entry['dev_macro_f1']:.4f}, " in line
        assert line.endswith("best so far") == (entry["dev_f1"] > so_far)
        so_far = max(so_far, entry["dev_f1"])
    assert stopped == "stopped: all 4 epochs are done"
    assert best == f"best epoch: {result['best_epoch']}, dev f1 {so_far:.4f}"
    assert after == f"next: python -m experiments.predict {tmp_path / 'run'} --file FILE"
    chosen = log[result["best_epoch"] - 1]
    assert chosen["dev_accuracy"] < max(line["dev_accuracy"] for line in log)
    assert all(chosen[f"dev_{n}"] == result[n] for n in ("accuracy", "macro_f1", "f1", "matthews"))
    assert chosen["dev_loss"] == result["dev_loss"]


def test_early_stopping_says_so(trained):
    """A learning rate that changes nothing: no epoch is better than the first."""
    lines, _ = trained("--stage head --lr 1e-12 --patience 2")
    assert "stopped: early, after epoch 3; 2 epochs without a better dev accuracy" in lines


def test_seeds(trained, launch, tmp_path):
    words, out = "--stage head --epochs 1 --lr 3e-2", tmp_path / "run"
    lines, summary = trained(f"{words} --seeds 3 5")
    own = [json.loads((out / f"seed-{n}" / "metrics.json").read_text()) for n in (3, 5)]
    values = [metrics["accuracy"] for metrics in own]
    mean, deviation = statistics.mean(values), statistics.stdev(values)
    assert summary["accuracy"] == {"mean": mean, "deviation": deviation, "values": values}
    assert summary == json.loads((out / "seeds.json").read_text())
    assert any(re.match(r" +accuracy  0\.\d{4} ± \d\.\d{4}$", line) for line in lines)
    alone = launch(words, task="sst2", seed=5, out=tmp_path / "alone")
    assert alone["accuracy"] == values[1] and alone["dev_loss"] == own[1]["dev_loss"]
    _, again = trained(f"{words} --seeds 3 5 7 --resume")  # two are read, the third is trained
    assert again["accuracy"]["values"][:2] == values and len(again["accuracy"]["values"]) == 3


def test_help_names_defaults_and_ends_with_examples():
    status, text, error = child.output(["train.py", "--help"])
    assert (status, error) == (0, "") and "default 32" in " ".join(text.split())
    for stage in ("adapter", "fusion", "head", "full"):
        assert re.search(rf"^  {stage} +\w+", text, re.MULTILINE)
    assert text[text.index("examples:") :].count("python train.py") == 3
