"""experiments.evaluate: what training has measured, and more, also with adapters masked."""

import json
import shutil
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import train
from conftest import command_line, write_rows
from data import TASKS, batches
from experiments import evaluate as evaluation
from experiments.load_run import load_run, load_run_split


@pytest.fixture
def evaluate(capsys, encoder):
    """evaluate(run, ...): (what the command prints before the closing line, the closing line's
    dictionary)"""

    def evaluate(run, *options):
        capsys.readouterr()
        evaluation.main([str(run), "--device", "cpu", *map(str, options)])
        *lines, last = capsys.readouterr().out.splitlines()
        return lines, json.loads(last)

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


@pytest.fixture(scope="module")
def wide(runs, tmp_path_factory):
    """The fusion of three adapters, whose weights differ, and which speak up: queries 100 times as
    large, V 20 times."""
    run = shutil.copytree(runs / "fusion-rte", tmp_path_factory.mktemp("wide") / "fusion")
    path = run / "model_adapter_fusion.safetensors"
    larger = {"query": 100, "value": 20, "key": 1}
    save_file({name: larger[name.split(".")[-2]] * p for name, p in load_file(path).items()}, path)
    return run


STAGES = [
    ["--stage", "adapter", "--adapter", "bapna"],
    ["--stage", "adapter", "--task", "pick"],
    ["--stage", "fusion"],
    ["--stage", "head"],
    ["--stage", "full"],
    ["--stage", "multitask", "--tasks", "rte", "pick", "--steps-per-epoch", 3],
]


@pytest.mark.parametrize(
    "options, dtype", [*((stage, "bfloat16") for stage in STAGES), (STAGES[2], "float32")]
)
def test_everything_is_as_in_training(
    options, dtype, launch, evaluate, logits, runs, encoder, tmp_path, capsys
):
    """Bit by bit: the small runs guess nearly one class, so the accuracy alone would prove
    little."""
    out, task = (
        tmp_path / "run",
        ["--task", "rte"] * ("--task" not in options and "--tasks" not in options),
    )
    adapters = ["--adapters", runs / "rte", runs / "sst2"] if "fusion" in options else []
    metrics = launch(
        *options,
        *task,
        *adapters,
        "--dtype",
        dtype,
        "--epochs",
        1,
        "--lr",
        "5e-2",
        "--out",
        out,
        "--batch-size",
        8,
        "--limit-dev",
        39,
    )
    before, in_training = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}, [*logits]
    logits.clear()
    for task in metrics["task"].split(","):
        lines, result = evaluate(out, *(["--task", task] if "," in metrics["task"] else []))
        assert result["accuracy"] == metrics.get("accuracies", {task: metrics["accuracy"]})[task]
        assert (result["task"], result["examples"], result["split"]) == (task, 39, "validation")
        assert ("classes" in result) == (task != "pick")
        assert any(
            f"of 39 examples right, accuracy {result['accuracy']:.4f}" in line for line in lines
        )
        assert any("--limit-dev" in line for line in lines)
    assert len(logits) == len(in_training) and all(map(torch.equal, logits, in_training))
    assert (
        torch.cat([batch for batch in logits if batch.shape[1] == logits[0].shape[1]]).std(0).min()
        > 0
    )
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    if options[1] in ("full", "multitask"):
        with pytest.raises(SystemExit) as exit:
            evaluate(out, "--task", task, "--model", encoder)
        assert exit.value.code == 2 and "has an encoder of its own" in capsys.readouterr().err


def test_report(runs, data_dir, evaluate, tmp_path, monkeypatch):
    """Against a count by hand, on a split of another name in another directory. The model is one
    that adds up ids."""

    def predict(bert, head, batch, dtype):
        return nn.functional.one_hot(batch["input_ids"].sum(1) // 3 % 2, 2).float()

    monkeypatch.setattr(train, "predict", predict)
    rows = [
        json.loads(line) for line in (data_dir / "rte" / "train.jsonl").read_text().splitlines()
    ][:50]
    write_rows(tmp_path / "rte" / "test.jsonl", rows)
    lines, result = evaluate(runs / "rte", "--split", "test", "--data-dir", tmp_path)
    assert not any(line.startswith("note") for line in lines)

    bert, _, config = load_run(runs / "rte")
    _, split = load_run_split(runs / "rte", bert, config, "test", tmp_path)
    for name, examples in (
        ("validation", 7),
        ("test", 50),
    ):  # --limit-dev is about the development set
        cut = {**config, "limit_dev": 7}
        directory = tmp_path if name == "test" else data_dir
        assert len(load_run_split(runs / "rte", bert, cut, name, directory)[1]) == examples
    pairs = np.array(
        [
            (batch["labels"].item(), batch["input_ids"].sum().item() // 3 % 2)
            for batch in batches(split, 1)
        ]
    )
    assert min((pairs == (k, j)).all(1).sum() for k in range(2) for j in range(2)) > 0
    assert result["accuracy"] == (pairs[:, 0] == pairs[:, 1]).mean() and result["examples"] == 50
    assert result["labels"] == list(TASKS["rte"].labels) == list(result["classes"])
    for k, label in enumerate(result["labels"]):
        assert result["confusion"][k] == [((pairs == (k, j)).all(1)).sum() for j in range(2)]
        right = (pairs == (k, k)).all(1).sum()
        values = result["classes"][label]
        assert values["count"] == (pairs[:, 0] == k).sum() and values["recall"] == pytest.approx(
            right / values["count"]
        )
        assert values["precision"] == pytest.approx(right / (pairs[:, 1] == k).sum())
        (line,) = (line for line in lines if line.split()[:2] == [str(k + 1), label])
        assert line.split()[2:] == [
            f"{values['precision']:.3f}",
            f"{values['recall']:.3f}",
            str(values["count"]),
            *map(str, result["confusion"][k]),
        ]

    write_rows(tmp_path / "rte" / "ones.jsonl", [{**row, "label": 1} for row in rows])
    lines, result = evaluate(
        runs / "rte",
        "--split",
        "ones",
        "--data-dir",
        tmp_path,
        "--batch-size",
        7,
        "--max-length",
        12,
    )
    assert (
        result["classes"]["entailment"]["recall"] is None
        and result["classes"]["entailment"]["count"] == 0
    )
    assert "-" in next(line for line in lines if "1 entailment" in line).split()
    assert result["accuracy"] == result["classes"]["not_entailment"]["recall"] > 0


def test_your_own_task_needs_no_other_split(runs, data_dir, evaluate, tmp_path):
    (tmp_path / "pick").mkdir()
    (tmp_path / "pick" / "test.jsonl").write_bytes(
        (data_dir / "pick" / "validation.jsonl").read_bytes()
    )
    _, result = evaluate(runs / "pick", "--split", "test", "--data-dir", tmp_path)
    assert (
        result["accuracy"] == json.loads((runs / "pick" / "metrics.json").read_text())["accuracy"]
    )


def test_your_own_task_has_the_columns_of_its_training(
    launch, evaluate, data_dir, tmp_path, capsys
):
    """text_b may be missing from a task, but not from a file of a task that was trained with it."""
    rows = [
        json.loads(line) for line in (data_dir / "rte" / "train.jsonl").read_text().splitlines()
    ]
    for name in ("text_b", "hypothesis"):
        split = [
            {"text_a": row["sentence1"], name: row["sentence2"], "label": row["label"]}
            for row in rows
        ]
        write_rows(tmp_path / "mine" / f"{name}.jsonl", split)
    for split in ("train", "validation"):
        shutil.copyfile(tmp_path / "mine" / "text_b.jsonl", tmp_path / "mine" / f"{split}.jsonl")
    launch(
        "--stage",
        "adapter",
        "--task",
        "mine",
        "--data-dir",
        tmp_path,
        "--epochs",
        1,
        "--out",
        tmp_path / "run",
    )
    assert evaluate(tmp_path / "run", "--split", "text_b")[1]["examples"] == len(rows)
    with pytest.raises(SystemExit):
        evaluate(tmp_path / "run", "--split", "hypothesis")
    assert "['text_a', 'text_b'], the hypothesis split" in capsys.readouterr().err


def test_a_table_of_many_classes_stays_narrow():
    labels = [f"label {i}" * (1 + 9 * (i == 3)) for i in range(150)]
    right, predictions = torch.arange(150), torch.arange(150).roll(1)
    result = {"examples": 150, **evaluation.by_class(labels, right, predictions)}
    lines = list(evaluation.table(result))
    assert (
        len(lines) == 151 and max(map(len, lines)) < 80 and len({len(line) for line in lines}) == 1
    )


def test_of_many_classes_only_what_occurs_is_told():
    """30,000 classes: a square matrix of them would have 900 million cells."""
    names = [f"class {i}" for i in range(30_000)]
    right, predictions = torch.tensor([7, 7, 29_999]), torch.tensor([7, 8, 29_999])
    started = time.process_time()  # also beside other work
    result = {"examples": 3, **evaluation.by_class(names, right, predictions)}
    assert time.process_time() - started < 2
    assert result["confusion"] == {
        "class 7": {"class 7": 1, "class 8": 1},
        "class 29999": {"class 29999": 1},
    }
    assert result["classes"]["class 7"] == {"precision": 1.0, "recall": 0.5, "count": 2}
    assert result["classes"]["class 8"] == {"precision": 0.0, "recall": None, "count": 0}
    assert len(list(evaluation.table(result))) == 4


def test_options_of_training_are_refused(runs, data_dir, tmp_path, capsys, encoder, monkeypatch):
    rows = [
        json.loads(line) for line in (data_dir / "rte" / "train.jsonl").read_text().splitlines()
    ][:5]
    write_rows(
        tmp_path / "rte" / "nolabel.jsonl",
        [{k: v for k, v in row.items() if k != "label"} for row in rows],
    )
    write_rows(tmp_path / "rte" / "hidden.jsonl", [{**row, "label": -1} for row in rows])
    write_rows(
        tmp_path / "pick" / "train.jsonl", [{"text_a": "a", "choices": ["a", "b"], "label": 0}] * 5
    )
    broken = shutil.copytree(runs / "rte", tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "batch_size": "32"}))
    no_stage = shutil.copytree(broken, tmp_path / "no stage")
    (no_stage / "config.json").write_text(json.dumps({**config, "stage": ["adapter"]}))
    other = tmp_path / "other"
    other.mkdir()
    before = sorted(tmp_path.rglob("*"))
    run, fusion = [runs / "rte"], [runs / "fusion-rte"]
    for arguments, say in (
        ([], "required: run"),
        ([*run, "--epochs", 3], "unrecognized arguments: --epochs"),
        ([*run, "--seed", 0], "unrecognized arguments: --seed"),
        ([*run, "--out", tmp_path / "x"], "unrecognized arguments: --out"),
        ([*run, "--overwrite"], "unrecognized arguments: --overwrite"),
        ([*run, "--task", "sst2"], "a run on 'rte', not on 'sst2'"),
        ([other], "no finished run"),
        ([broken], "not the configuration of a run"),
        ([no_stage], "not the configuration of a run"),
        ([*run, "--split", "test"], "no test split"),
        ([*run, "--data-dir", tmp_path / "none"], "not a directory"),
        ([*run, "--data-dir", tmp_path, "--split", "nolabel"], "no column 'label'"),
        ([*run, "--data-dir", tmp_path, "--split", "hidden"], "line 1: the label is hidden (-1)"),
        ([*run, "--max-length", 1000], "--max-length must be in 8 .. 48"),
        ([*run, "--batch-size", 0], "--batch-size"),
        ([*run, "--model", other], str(other)),
        ([*run, "--mask", "rte"], "no fusion"),
        ([*fusion, "--mask", "mnli"], "'mnli' is not in the fusion of rte, sst2, pick"),
        ([*fusion, "--mask", "rte", "sst2", "pick"], "layer 1 would be left without"),
        (
            [runs / "pick", "--data-dir", tmp_path, "--split", "train"],
            "different labels, or choices",
        ),
    ):
        with pytest.raises(SystemExit) as exit:
            evaluation.main([*map(str, arguments)])
        output = capsys.readouterr()
        assert exit.value.code == 2 and output.out == "" and output.err.count("\n") == 1, output
        assert output.err.startswith("evaluate.py: ") and say in output.err
    for option in ("--run", "--split", "--mask"):
        with pytest.raises(SystemExit) as exit:
            command_line(["--stage", "adapter", "--task", "rte", option, "x"])
        assert (
            exit.value.code == 2 and f"unrecognized arguments: {option}" in capsys.readouterr().err
        )
    assert sorted(tmp_path.rglob("*")) == before

    monkeypatch.setattr(
        train,
        "predict",
        lambda bert, head, batch, dtype: torch.full((len(batch["labels"]), 2), torch.nan),
    )
    with pytest.raises(SystemExit) as exit:
        evaluation.main([str(runs / "rte")])
    assert (
        exit.value.code == 2
        and capsys.readouterr().err == "evaluate.py: the model's outputs are not finite\n"
    )


def test_mask_on_the_command_line(wide, evaluate, logits, tmp_path):
    """Masking the last two leaves what a run of the first alone gives."""
    _, whole = evaluate(wide)
    _, masked = evaluate(wide, "--mask", "sst2", "pick")
    one = shutil.copytree(wide, tmp_path / "one")
    for name in ("sst2", "pick"):
        shutil.rmtree(one / "adapters" / name)
    config, path = json.loads((one / "config.json").read_text()), one / "adapter_fusion_config.json"
    (one / "config.json").write_text(json.dumps({**config, "adapters": ["rte"]}))
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "adapter_names": ["rte"], "name": "rte"})
    )
    evaluate(one)
    assert masked["masked"] == ["sst2", "pick"] and whole["masked"] == []
    whole, masked, alone = logits
    assert (masked - alone).abs().max() < 1e-5 and (masked - whole).abs().max() > 1e-3
