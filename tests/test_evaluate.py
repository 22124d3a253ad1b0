"""experiments.evaluate: what training has measured, and more, and whether it still is so."""

import pytest
import torch

import train
from conftest import read_lines, write_rows
from data import collate
from experiments import evaluate as evaluation
from experiments.load_run import load_run
from formats.files import read_json, write_json


def evaluate(run, *options):
    return evaluation.main([str(run), "--device", "cpu", *map(str, options)])


@pytest.fixture
def note(capsys):
    """note(run, ...): the line that evaluate prints about the difference from training, or None"""

    def note(*words):
        capsys.readouterr()
        evaluate(*words)
        lines = [s for s in capsys.readouterr().out.splitlines() if s.startswith("note: ")]
        return lines[0] if lines else None

    return note


STAGES = """
--stage adapter --task pick
--stage fusion --task rte
--stage full --task rte --lr 5e-3
--tasks rte pick --steps-per-epoch 3
""".strip().splitlines()


@pytest.mark.parametrize("options", STAGES)
def test_everything_is_as_in_training(options, launch, runs, tmp_path, monkeypatch, note):
    """Bit by bit: the small runs guess nearly one class, so the accuracy alone would prove little.
    Nothing is written. Where the code has changed meanwhile, the difference is named."""
    logits, forward = [], train.Model.forward

    def recorded(model, batch):
        result = forward(model, batch)
        if not model.training:
            logits.append(result)
        return result

    monkeypatch.setattr(train.Model, "forward", recorded)
    adapters = ["--adapters", runs / "rte", runs / "sst2"] if "fusion" in options else []
    common = "--epochs 1 --lr 5e-2 --batch-size 8 --limit-dev 39 --dtype bfloat16"
    metrics = launch(f"{common} {options}", *adapters, out=tmp_path / "run")
    before, count = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}, len(logits)
    accuracies = metrics.get("accuracies", {metrics["task"]: metrics["accuracy"]})
    for task, accuracy in accuracies.items():
        result = evaluate(tmp_path / "run", "--task", task)
        assert result["accuracy"] == accuracy
        assert (result["task"], result["examples"], result["split"]) == (task, 39, "validation")
        assert ("classes" in result) == (task != "pick")
    in_training, now = logits[:count], logits[count:]
    assert len(now) == count and all(map(torch.equal, now, in_training))
    same = [batch for batch in now if batch.shape[1] == now[0].shape[1]]
    assert torch.cat(same).std(0).min() > 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before

    words = tmp_path / "run", "--task", [*accuracies][0]
    assert note(*words) is None
    monkeypatch.setattr(train.Model, "forward", lambda *values: -forward(*values))
    result, commit = evaluate(*words), read_json(tmp_path / "run" / "run.json")["machine"]["commit"]
    old = {"accuracy": accuracies[words[2]], "loss": metrics.get("dev_loss")}
    if "--tasks" in options:
        del old["loss"]  # of all tasks together
    line = note(*words)
    assert all(f"{name} {value:.4f}" in line.split("now")[0] for name, value in old.items())
    assert all(f"{result[name]:.4f}" in line.split("now")[1] for name in old)
    assert line.endswith(f"the code or a library has changed since (commit {commit})")


def test_rounding_is_no_change(copy, runs, note):
    """It is larger in bf16, on another machine. Of other examples nothing is known."""
    run = copy(runs / "rte")
    metrics, record = (read_json(run / name) for name in ("metrics.json", "run.json"))
    write_json(run / "metrics.json", metrics | {"dev_loss": metrics["dev_loss"] + 2e-5})
    assert note(run) is None
    write_json(run / "metrics.json", metrics | {"dev_loss": metrics["dev_loss"] + 2e-3})
    assert f"metrics.json has loss {metrics['dev_loss'] + 2e-3:.4f}, now" in note(run)
    assert note(run, "--split", "train") is None
    record["options"]["dtype"] = "bfloat16"
    write_json(run / "run.json", record)
    assert "loss" in note(run)
    write_json(run / "run.json", record | {"machine": record["machine"] | {"processor": "other"}})
    assert note(run) is None


def test_classes_are_counted(runs, data_dir, tmp_path, monkeypatch):
    """Against a count by hand, on a split of another name in another directory. The model is one
    that adds up ids."""

    def guess(batch):
        return batch["input_ids"].sum(1) // 3 % 2

    monkeypatch.setattr(train.Model, "forward", lambda _, batch: torch.eye(2)[guess(batch)])
    write_rows(tmp_path / "rte" / "test.jsonl", read_lines(data_dir / "rte" / "train.jsonl")[:50])
    result = evaluate(runs / "rte", "--split", "test", "--data-dir", tmp_path)
    split = load_run(runs / "rte").split("test", tmp_path)
    found = [(example.label, guess(collate([example], 0)).item()) for example in split]
    confusion = [[found.count((k, j)) for j in range(2)] for k in range(2)]
    assert min(map(min, confusion)) > 0 and result["examples"] == 50
    assert result["accuracy"] == (confusion[0][0] + confusion[1][1]) / 50
    for k, values in enumerate(result["classes"].values()):
        precision = confusion[k][k] / (confusion[0][k] + confusion[1][k])
        recall, count = confusion[k][k] / sum(confusion[k]), sum(confusion[k])
        assert [*values.values()] == [precision, recall, count, confusion[k]]


def test_held_out_rows(launch, refused, data_dir, tmp_path, note):
    """What --dev-fraction held out is never scored as training examples; of other rows it is not
    known which they are, and that they are others is said."""
    rows, file = read_lines(data_dir / "rte" / "train.jsonl"), tmp_path / "rte" / "train.jsonl"
    write_rows(file, rows)
    run, words = tmp_path / "run", "--stage head --task rte --epochs 1 --dev-fraction 0.25"
    accuracy = launch(words, data_dir=tmp_path, out=run)["accuracy"]
    assert evaluate(run, "--split", "train")["examples"] == 72
    assert evaluate(run)["examples"] == 24 and evaluate(run)["accuracy"] == accuracy
    write_rows(file, rows[1:])
    refused([run, "--split", "train"], "held out cannot be told", main=evaluation.main)
    assert note(run) == "note: these are not the development examples of the training"
