"""experiments.evaluate: what training has measured, and more, also with adapters masked."""

import json
import shutil

import pytest
import torch
from torch import nn

import train
from conftest import cli, read_lines, write_rows
from data import TASKS, batches
from experiments import evaluate as evaluation
from experiments.load_run import load_run, load_run_split
from formats.files import read_json, write_json

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
    seen, predict = [], train.predict

    def recorded(bert, *arguments):
        result = predict(bert, *arguments)
        if not bert.training:
            seen.append(result)
        return result

    monkeypatch.setattr(train, "predict", recorded)
    return seen


STAGES = """
adapter --task rte --adapter bapna
adapter --task pick
fusion --task rte
full --task rte --lr 5e-3
multitask --tasks rte pick --steps-per-epoch 3
""".strip().splitlines()


@pytest.mark.parametrize("options", STAGES)
def test_everything_is_as_in_training(
    options, launch, evaluate, logits, runs, encoder, tmp_path, refused
):
    """Bit by bit: the small runs guess nearly one class, so the accuracy alone would prove
    little."""
    out = tmp_path / "run"
    adapters = ["--adapters", runs / "rte", runs / "sst2"] if "fusion" in options else []
    common = "--epochs 1 --lr 5e-2 --batch-size 8 --limit-dev 39 --dtype bfloat16 --stage"
    metrics = launch(f"{common} {options}", *adapters, out=out)
    before, in_training = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}, [*logits]
    logits.clear()
    for task in metrics["task"].split(","):
        lines, result = evaluate(out, *(["--task", task] if "," in metrics["task"] else []))
        assert result["accuracy"] == metrics.get("accuracies", {task: metrics["accuracy"]})[task]
        assert (result["task"], result["examples"], result["split"]) == (task, 39, "validation")
        assert ("classes" in result) == (task != "pick")
        printed = "\n".join(lines)
        assert f"of 39 examples right, accuracy {result['accuracy']:.4f}" in printed
        assert "--limit-dev" in printed
    assert len(logits) == len(in_training) and all(map(torch.equal, logits, in_training))
    same = [batch for batch in logits if batch.shape[1] == logits[0].shape[1]]
    assert torch.cat(same).std(0).min() > 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    if options[:4] in ("full", "mult"):
        words = [out, "--task", task, "--model", encoder]
        refused(words, "has an encoder of its own", **EVALUATE)


def test_report(runs, data_dir, evaluate, tmp_path, monkeypatch):
    """Against a count by hand, on a split of another name in another directory. The model is one
    that adds up ids."""

    def predict(bert, head, batch, dtype):
        return nn.functional.one_hot(batch["input_ids"].sum(1) // 3 % 2, 2).float()

    monkeypatch.setattr(train, "predict", predict)
    rows = read_lines(data_dir / "rte" / "train.jsonl")[:50]
    write_rows(tmp_path / "rte" / "test.jsonl", rows)
    lines, result = evaluate(runs / "rte", "--split", "test", "--data-dir", tmp_path)
    bert, _, config = load_run(runs / "rte")
    cut = {**config, "limit_dev": 7}  # which is about the development set
    assert len(load_run_split(runs / "rte", bert, cut, "validation", data_dir)[1]) == 7
    _, split = load_run_split(runs / "rte", bert, cut, "test", tmp_path)
    assert len(split) == result["examples"] == 50
    found = [(b["labels"].item(), b["input_ids"].sum().item() // 3 % 2) for b in batches(split, 1)]
    confusion = [[found.count((k, j)) for j in range(2)] for k in range(2)]
    assert min(map(min, confusion)) > 0 and result["confusion"] == confusion
    assert result["accuracy"] == (confusion[0][0] + confusion[1][1]) / 50
    assert result["labels"] == list(TASKS["rte"].labels) == list(result["classes"])
    for k, label in enumerate(result["labels"]):
        values, count = result["classes"][label], sum(confusion[k])
        precision = confusion[k][k] / sum(row[k] for row in confusion)
        assert values == {"precision": precision, "recall": confusion[k][k] / count, "count": count}
        (line,) = (line for line in lines if line.split()[:2] == [str(k + 1), label])
        cells = [f"{precision:.3f}", f"{values['recall']:.3f}", count, *confusion[k]]
        assert line.split()[2:] == list(map(str, cells))

    write_rows(tmp_path / "rte" / "ones.jsonl", [{**row, "label": 1} for row in rows])
    words = cli("--split ones --batch-size 7 --max-length 12", data_dir=tmp_path)
    _, result = evaluate(runs / "rte", *words)
    nothing = result["classes"]["entailment"]
    assert nothing["recall"] is None and nothing["count"] == 0
    assert result["accuracy"] == result["classes"]["not_entailment"]["recall"] > 0


def test_your_own_task_has_the_columns_of_its_training(
    launch, evaluate, refused, data_dir, tmp_path
):
    """text_b may be missing from a task, but not from a file of a task that was trained with it."""
    rows = read_lines(data_dir / "rte" / "train.jsonl")
    for split, name in (("train", "text_b"), ("validation", "text_b"), ("other", "hypothesis")):
        columns = {"sentence1": "text_a", "sentence2": name, "label": "label"}
        renamed = [{columns[c]: row[c] for c in columns} for row in rows]
        write_rows(tmp_path / "mine" / f"{split}.jsonl", renamed)
    words = "--stage adapter --task mine --epochs 1"
    launch(words, data_dir=tmp_path, out=tmp_path / "run")
    assert evaluate(tmp_path / "run", "--split", "train")[1]["examples"] == len(rows)
    refused([tmp_path / "run", "--split", "other"], "no column 'text_b'", **EVALUATE)


ERRORS = """
rte --task sst2 | a run on 'rte', not on 'sst2'
rte --split test | no test split
rte --max-length 1000 | --max-length must be in 8 .. 48
rte --mask rte | no fusion
fusion-rte --mask rte sst2 pick | layer 1 would be left without
""".strip().splitlines()


@pytest.mark.parametrize("line", ERRORS)
def test_errors(line, runs, refused):
    words, message = line.split(" | ")
    run, *words = words.split()
    refused([runs / run, *words], message, **EVALUATE)


def test_a_run_that_was_put_aside_is_mentioned(runs, tmp_path, refused):
    """After a kill in the first epoch of --overwrite."""
    run = tmp_path / "run"
    shutil.copytree(runs / "rte", run / "replaced")
    refused([run], f"--overwrite has put aside is in {run / 'replaced'}", **EVALUATE)


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


def test_mask_on_the_command_line(loud_fusion, evaluate, logits, tmp_path):
    """Masking the last two leaves what a run of the first alone gives."""
    _, whole = evaluate(loud_fusion)
    _, masked = evaluate(loud_fusion, "--mask", "sst2", "pick")
    one = shutil.copytree(loud_fusion, tmp_path / "one")
    for name in ("sst2", "pick"):
        shutil.rmtree(one / "adapters" / name)
    alone = {"config": {"adapters": ["rte"]}}
    alone["adapter_fusion_config"] = {"adapter_names": ["rte"], "name": "rte"}
    for name, values in alone.items():
        write_json(one / f"{name}.json", read_json(one / f"{name}.json") | values)
    evaluate(one)
    assert masked["masked"] == ["sst2", "pick"] and whole["masked"] == []
    whole, masked, alone = logits
    assert (masked - alone).abs().max() < 1e-5 and (masked - whole).abs().max() > 1e-3
