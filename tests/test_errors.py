"""Wrong input: one clear line on stderr, exit status 2, nothing written, nothing lost."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train
from bert import Bert, BertConfig
from conftest import VOCABULARY, command_line, write_rows
from experiments.load_run import load_run


def test_unknown_task(fails, data_dir):
    fails("--task", "rtee", say="did you mean 'rte'?")
    fails("--task", "mnlii", say=["'mnlii'", "'mnli'"])
    fails("--task", "..", say="unknown task")


def test_missing_data(fails, tmp_path, data_dir):
    fails("--data-dir", tmp_path / "nowhere", say=[str(tmp_path / "nowhere"), "not a directory"])
    fails("--task", "mnli", say=["mnli", "not a directory"])
    (tmp_path / "data" / "rte").mkdir(parents=True)
    shutil.copy(data_dir / "rte" / "train.jsonl", tmp_path / "data" / "rte")
    fails("--data-dir", tmp_path / "data", say=["validation", "rte"])


@pytest.mark.parametrize(
    "split, text, say",
    [
        ("train", "", "empty"),
        ("validation", "", "empty"),
        (
            "train",
            '{"sentence1": "a", "sentence2": "b", "label": 1}\n{"sentence1": "a", \n',
            ["line 2", "JSON"],
        ),
        ("train", '{"sentence1": "a", "label": 1}\n', ["line 1", "'sentence2'"]),
        ("validation", '{"sentence1": "a", "sentence2": "b"}\n', ["line 1", "'label'"]),
        (
            "train",
            '{"sentence1": "a", "sentence2": "b", "label": 1}\n{"sentence2": "b"}\n',
            ["line 2", "'sentence1'"],
        ),
        (
            "train",
            '{"sentence1": "a", "sentence2": "b", "label": 2}\n',
            ["line 1", "label 2", "not_entailment"],
        ),
        (
            "train",
            '{"sentence1": "a", "sentence2": "b", "label": "maybe"}\n',
            ["line 1", "'maybe'"],
        ),
        ("train", '{"sentence1": "a", "sentence2": "b", "label": [1]}\n', ["line 1", "label [1]"]),
        (
            "train",
            '{"sentence1": ["a"], "sentence2": "b", "label": 1}\n',
            ["line 1", "'sentence1'", "list"],
        ),
        ("train", "[1, 2]\n", ["line 1", "not a JSON object"]),
    ],
)
def test_broken_rows(fails, tmp_path, data_dir, split, text, say):
    shutil.copytree(data_dir / "rte", tmp_path / "data" / "rte")
    path = tmp_path / "data" / "rte" / f"{split}.jsonl"
    path.write_text(text)
    fails(
        "--data-dir", tmp_path / "data", say=[str(path), *([say] if isinstance(say, str) else say)]
    )


def test_binary_rows(fails, tmp_path, data_dir):
    shutil.copytree(data_dir / "rte", tmp_path / "data" / "rte")
    path = tmp_path / "data" / "rte" / "train.jsonl"
    path.write_bytes(bytes(range(256)) * 10)
    fails("--data-dir", tmp_path / "data", say=str(path))


def test_own_task(fails, tmp_path):
    for name, rows, say in [
        ("one_label", [{"text_a": "a", "label": "x"}] * 3, "nothing to learn"),
        ("no_text", [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}], "'text_a'"),
        ("floats", [{"text_a": "a", "label": 0.5}, {"text_a": "b", "label": 1.5}], "0.5"),
        (
            "few_choices",
            [{"choices": ["a", "b"], "label": 0}, {"choices": ["a"], "label": 0}],
            ["line 2", "1 choices"],
        ),
        ("far_choice", [{"choices": ["a", "b"], "label": 2}], "label 2"),
    ]:
        for split in ("train", "validation"):
            write_rows(tmp_path / "data" / name / f"{split}.jsonl", rows)
        fails("--data-dir", tmp_path / "data", "--task", name, say=say)
    for split, label in (("train", "x"), ("validation", "z")):
        write_rows(
            tmp_path / "data" / "new" / f"{split}.jsonl",
            [{"text_a": "a", "label": label}, {"text_a": "b", "label": "y"}],
        )
    fails("--data-dir", tmp_path / "data", "--task", "new", say=["validation.jsonl", "'z'"])


def test_fusion_without_usable_adapters(fails, runs, tmp_path, encoder):
    fails(stage="fusion", say="--adapters")
    fails("--adapters", runs / "rte", say="--stage fusion")
    fails("--adapters", runs / "rte", runs / "none", stage="fusion", say="none")
    fails(
        "--adapters", runs / "fusion-rte", stage="fusion", say=["fusion-rte", "adapter_config.json"]
    )
    fails(
        "--adapters",
        runs / "rte",
        runs / "rte",
        stage="fusion",
        say="two adapters are called 'rte'",
    )

    torch.manual_seed(0)
    Bert(BertConfig(len(VOCABULARY), 16, 2, 2, 64, max_position_embeddings=48)).save_pretrained(
        tmp_path / "narrow"
    )
    Bert(BertConfig(len(VOCABULARY), 32, 1, 2, 64, max_position_embeddings=48)).save_pretrained(
        tmp_path / "shallow"
    )
    for name in ("narrow", "shallow"):
        shutil.copy(encoder / "vocab.txt", tmp_path / name)
    fails(
        "--adapters",
        runs / "rte",
        "--model",
        tmp_path / "narrow",
        stage="fusion",
        say=["hidden_size 32", "16"],
    )
    fails(
        "--adapters",
        runs / "rte",
        "--model",
        tmp_path / "shallow",
        stage="fusion",
        say="encoder.layer.1",
    )

    broken = shutil.copytree(runs / "rte", tmp_path / "broken")
    (broken / "adapter.safetensors").write_bytes(b"not tensors")
    fails("--adapters", broken, stage="fusion", say="adapter.safetensors")
    (broken / "adapter.safetensors").unlink()
    fails("--adapters", broken, stage="fusion", say=["no weights", "adapter.safetensors"])
    config = json.loads((broken / "adapter_config.json").read_text())
    config["config"]["is_parallel"] = True
    (broken / "adapter_config.json").write_text(json.dumps(config))
    fails("--adapters", broken, stage="fusion", say="is_parallel")
    (broken / "adapter_config.json").write_text("{")
    fails("--adapters", broken, stage="fusion", say=["adapter_config.json", "line 1"])


def test_model(fails, tmp_path, encoder):
    (tmp_path / "empty").mkdir()
    fails("--model", tmp_path / "empty", say="no encoder")
    shutil.copytree(
        encoder, tmp_path / "no_weights", ignore=shutil.ignore_patterns("*.safetensors")
    )
    fails("--model", tmp_path / "no_weights", say=["no encoder", "model.safetensors"])
    shutil.copytree(encoder, tmp_path / "no_tokenizer", ignore=shutil.ignore_patterns("vocab.txt"))
    fails("--model", tmp_path / "no_tokenizer", say="tokenizer")
    shutil.copytree(encoder, tmp_path / "other_vocabulary")
    (tmp_path / "other_vocabulary" / "vocab.txt").write_text("\n".join([*VOCABULARY, "more"]))
    fails(
        "--model",
        tmp_path / "other_vocabulary",
        say=[str(len(VOCABULARY) + 1), str(len(VOCABULARY))],
    )


def test_no_network(fails):
    fails(
        "--model",
        "google-bert/bert-base-uncased",
        say=["cannot be reached", "bert_config.json", "model.safetensors"],
    )
    fails(
        "--adapters", "AdapterHub/bert-base-uncased-pf-rte", stage="fusion", say="cannot be reached"
    )


def test_no_network_for_data(fails, encoder, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        command_line(
            [
                "--stage",
                "head",
                "--task",
                "rte",
                "--model",
                str(encoder),
                "--out",
                str(tmp_path / "out"),
            ]
        )
    error = capsys.readouterr().err
    assert (
        exit.value.code == 2
        and error.count("\n") == 1
        and "--data-dir" in error
        and "nyu-mll/glue" in error
    )


def test_finished_run_is_not_overwritten(fails, launch, runs, tmp_path):
    run = shutil.copytree(runs / "rte", tmp_path / "out")
    content = {path: path.read_bytes() for path in run.iterdir()}
    fails("--out", run, say=["finished run", "--overwrite"])
    fails(
        "--out", run, "--task", "rtx", "--overwrite", say="did you mean"
    )  # nothing is lost before the new run starts
    assert {path: path.read_bytes() for path in run.iterdir()} == content
    (run / "notes.txt").write_text("mine")
    result = launch("--stage", "head", "--task", "rte", "--epochs", 1, "--out", run, "--overwrite")
    assert (
        result["stage"] == "head"
        and (run / "notes.txt").exists()
        and not (run / "adapter.safetensors").exists()
    )


def test_out_is_a_file(fails, tmp_path):
    (tmp_path / "file").write_text("")
    fails("--out", tmp_path / "file", say="is a file")


def test_out_holds_something_else(fails, launch, encoder, runs, tmp_path):
    model = shutil.copytree(encoder, tmp_path / "model")
    fails("--out", model, "--overwrite", say="config.json is not a run's")
    fails("--out", tmp_path, "--overwrite", say="holds other files")
    launch("--stage", "full", "--task", "rte", "--epochs", 1, "--out", tmp_path / "full")
    content = {path: path.read_bytes() for path in (tmp_path / "full").iterdir()}
    fails(
        "--out",
        tmp_path / "full",
        "--model",
        tmp_path / "full",
        "--overwrite",
        stage="full",
        say="would replace",
    )
    assert {path: path.read_bytes() for path in (tmp_path / "full").iterdir()} == content
    fusion = shutil.copytree(runs / "fusion-rte", tmp_path / "fusion")
    fails(
        "--out",
        fusion,
        "--adapters",
        fusion / "adapters" / "rte",
        "--overwrite",
        stage="fusion",
        say="would replace",
    )


@pytest.mark.parametrize(
    "option, value",
    [
        ("--reduction-factor", "1000"),
        ("--reduction-factor", "0"),
        ("--reduction-factor", "-2"),
        ("--reduction-factor", "nan"),
        ("--reduction-factor", "33"),
        ("--epochs", "0"),
        ("--batch-size", "0"),
        ("--lr", "0"),
        ("--lr", "nan"),
        ("--lr", "inf"),
        ("--patience", "0"),
        ("--limit-train", "0"),
        ("--limit-dev", "0"),
        ("--max-length", "7"),
        ("--max-length", "49"),
        ("--seed", "-1"),
        ("--weight-decay", "-1"),
    ],
)
def test_numbers_that_do_not_fit(fails, option, value):
    fails(option, value, say=option)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_missing_device(fails):
    fails("--device", "cuda", say=["cuda", "no such device"])


@pytest.mark.parametrize(
    "option, value",
    [
        ("--stage", "sideways"),
        ("--adapter", "sideways"),
        ("--dtype", "sideways"),
        ("--device", "sideways"),
        ("--epochs", "few"),
        ("--lr", "slow"),
        ("--speed", "9"),
    ],
)
def test_arguments(fails, option, value):
    fails(option, value, say=[option, value])


def test_missing_arguments(capsys):
    for argv in ([], ["--stage", "adapter"], ["--stage", "adapter", "--task"]):
        with pytest.raises(SystemExit) as exit:
            command_line(argv)
        assert exit.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_non_finite_loss_without_a_finished_epoch(fails):
    fails("--lr", "1e38", "--batch-size", 8, say=["nan", "nothing is kept", "--lr"])


def test_non_finite_loss_keeps_the_best_epoch(encoder, data_dir, tmp_path, monkeypatch, capsys):
    calls, cross_entropy = [], torch.nn.functional.cross_entropy

    def explode(logits, labels):
        calls.append(1)
        return cross_entropy(logits, labels) * (
            float("inf") if len(calls) > 14 else 1
        )  # 12 batches an epoch

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", explode)
    with pytest.raises(SystemExit) as exit:
        command_line(
            [
                "--stage",
                "adapter",
                "--task",
                "rte",
                "--model",
                str(encoder),
                "--data-dir",
                str(data_dir),
                "--batch-size",
                "8",
                "--out",
                str(tmp_path / "out"),
            ]
        )
    error = capsys.readouterr().err.splitlines()
    assert exit.value.code == 2 and len(error) == 1 and "epoch 1 is kept" in error[0]
    monkeypatch.undo()
    assert load_run(tmp_path / "out")[2]["task"] == "rte"


def test_load_run_refuses_what_is_none(tmp_path, encoder):
    with pytest.raises(FileNotFoundError, match="no finished run"):
        load_run(tmp_path)
    with pytest.raises(FileNotFoundError, match="no finished run"):
        load_run(encoder)


def test_as_a_user_sees_it(encoder, data_dir, tmp_path):
    """A process of its own: the line is all there is on stderr, import-time warnings included."""
    write_rows(
        tmp_path / "data" / "rte" / "train.jsonl",
        [{"sentence1": "a", "sentence2": "b", "label": 7}],
    )
    shutil.copy(data_dir / "rte" / "validation.jsonl", tmp_path / "data" / "rte")
    command = [
        sys.executable,
        "train.py",
        "--stage",
        "adapter",
        "--task",
        "rte",
        "--model",
        encoder,
        "--data-dir",
        tmp_path / "data",
        "--out",
        tmp_path / "out",
    ]
    done = subprocess.run(command, cwd=Path(train.__file__).parent, capture_output=True, text=True)
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert (
        done.stderr.count("\n") == 1
        and "line 1: label 7 is not one of entailment, not_entailment" in done.stderr
    )
