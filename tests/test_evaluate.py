"""experiments.evaluate: what training has measured, and more, also with adapters masked."""

import json

import pytest
import torch
from torch import nn

import train
from conftest import cli, read_lines, write_rows
from data import batches
from experiments import evaluate as evaluation
from experiments.load_run import load_run

EVALUATE = {"name": "evaluate.py", "main": evaluation.main}


@pytest.fixture
def evaluate(capsys, encoder):
    """evaluate(run, ...): (the lines before the closing one, the closing line's dictionary)"""

    def evaluate(run, *options):
        capsys.readouterr()
        result = evaluation.main([str(run), "--device", "cpu", *map(str, options)])
        return capsys.readouterr().out.splitlines(), json.loads(json.dumps(result))

    return evaluate


@pytest.fixture
def logits(monkeypatch):
    """A list to which every evaluation adds its logits, batch by batch."""
    seen, forward = [], train.Model.forward

    def recorded(model, batch):
        result = forward(model, batch)
        if not model.training:
            seen.append(result)
        return result

    monkeypatch.setattr(train.Model, "forward", recorded)
    return seen


STAGES = """
--stage adapter --task rte --adapter bapna
--stage adapter --task pick
--stage fusion --task rte
--stage full --task rte --lr 5e-3
--tasks rte pick --steps-per-epoch 3
""".strip().splitlines()


@pytest.mark.parametrize("options", STAGES)
def test_everything_is_as_in_training(
    options, launch, evaluate, logits, runs, encoder, tmp_path, refused
):
    """Bit by bit: the small runs guess nearly one class, so the accuracy alone would prove
    little."""
    out = tmp_path / "run"
    adapters = ["--adapters", runs / "rte", runs / "sst2"] if "fusion" in options else []
    common = "--epochs 1 --lr 5e-2 --batch-size 8 --limit-dev 39 --dtype bfloat16"
    metrics = launch(f"{common} {options}", *adapters, out=out)
    before, in_training = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}, [*logits]
    logits.clear()
    for task in metrics["task"].split(","):
        lines, result = evaluate(out, *(["--task", task] if "," in metrics["task"] else []))
        assert result["accuracy"] == metrics.get("accuracies", {task: metrics["accuracy"]})[task]
        assert (result["task"], result["examples"], result["split"]) == (task, 39, "validation")
        assert ("classes" in result) == (task != "pick")
        assert f"39 examples, accuracy {result['accuracy']:.4f}" in "\n".join(lines)
    assert len(logits) == len(in_training) and all(map(torch.equal, logits, in_training))
    same = [batch for batch in logits if batch.shape[1] == logits[0].shape[1]]
    assert torch.cat(same).std(0).min() > 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    if metrics["stage"] in ("full", "multitask"):
        words = [out, "--task", task, "--model", encoder]
        refused(words, "has an encoder of its own", **EVALUATE)


def test_report(runs, data_dir, evaluate, tmp_path, monkeypatch):
    """Against a count by hand, on a split of another name in another directory. The model is one
    that adds up ids."""

    def forward(model, batch):
        return nn.functional.one_hot(batch["input_ids"].sum(1) // 3 % 2, 2).float()

    monkeypatch.setattr(train.Model, "forward", forward)
    rows = read_lines(data_dir / "rte" / "train.jsonl")[:50]
    write_rows(tmp_path / "rte" / "test.jsonl", rows)
    lines, result = evaluate(runs / "rte", "--split", "test", "--data-dir", tmp_path)
    run = load_run(runs / "rte")
    run.config["limit_dev"] = 7  # which is about the development set
    assert len(run.split("validation", data_dir)) == 7
    split = run.split("test", tmp_path)
    assert len(split) == result["examples"] == 50
    found = [(b["labels"].item(), b["input_ids"].sum().item() // 3 % 2) for b in batches(split, 1)]
    confusion = [[found.count((k, j)) for j in range(2)] for k in range(2)]
    assert min(map(min, confusion)) > 0 and [*result["classes"]] == run.config["labels"]
    assert result["accuracy"] == (confusion[0][0] + confusion[1][1]) / 50
    for k, (label, values) in enumerate(result["classes"].items()):
        precision = confusion[k][k] / sum(row[k] for row in confusion)
        recall, count = confusion[k][k] / sum(confusion[k]), sum(confusion[k])
        assert [*values.values()] == [precision, recall, count, confusion[k]]
        cells = [k + 1, label, f"{precision:.2f}", f"{recall:.2f}", count, *confusion[k]]
        assert [*map(str, cells)] in map(str.split, lines)

    write_rows(tmp_path / "rte" / "ones.jsonl", [{**row, "label": 1} for row in rows])
    words = cli("--split ones --batch-size 7", data_dir=tmp_path)
    _, result = evaluate(runs / "rte", *words)
    nothing = result["classes"]["entailment"]
    assert nothing["recall"] is None and nothing["count"] == 0
    assert result["accuracy"] == result["classes"]["not_entailment"]["recall"] > 0


def test_held_out_rows(launch, evaluate, refused, data_dir, tmp_path):
    """The rows that --dev-fraction held out are never scored as training examples; of other rows it
    is not known which they are."""
    rows, file = read_lines(data_dir / "rte" / "train.jsonl"), tmp_path / "rte" / "train.jsonl"
    write_rows(file, rows)
    run, words = tmp_path / "run", "--stage head --task rte --epochs 1 --dev-fraction 0.25"
    result = launch(words, data_dir=tmp_path, out=run)
    assert evaluate(run, "--split", "train")[1]["examples"] == 72
    found = evaluate(run)[1]
    assert (found["examples"], found["accuracy"]) == (24, result["accuracy"])
    write_rows(file, rows[1:])
    for split in ("train", "validation"):
        refused([run, "--split", split], "held out cannot be told from the others", **EVALUATE)
    file.parent.rename(tmp_path / "gone")
    refused([run], "there is no", **EVALUATE)


def test_mask_on_the_command_line(loud_fusion, evaluate, logits, runs, refused):
    assert evaluate(loud_fusion)[1]["masked"] == []
    assert evaluate(loud_fusion, "--mask", "sst2", "pick")[1]["masked"] == ["sst2", "pick"]
    whole, masked = logits
    assert (masked - whole).abs().max() > 1e-3
    refused([loud_fusion, "--mask", "rte", "sst2", "pick"], "would be left without", **EVALUATE)
    refused([runs / "sst2", "--mask", "rte"], "there is no fusion", **EVALUATE)
    refused([loud_fusion, "--task", "sst2"], "a run on 'rte', not on 'sst2'", **EVALUATE)
