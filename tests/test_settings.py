"""Options: what a command line says, what the environment and earlier runs say for it, and data in
files of one's own."""

import shutil
from dataclasses import dataclass

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import child
import train
from conftest import cli, read_lines
from data import length_bucketed_batches
from experiments import evaluate
from experiments.inspect import inspect_task, share_that_meets_again
from experiments.report import write_csv
from formats.files import read_json, write_json
from runtime.settings import COUNT, argument, difference, free_names, like, option, parse, record


@dataclass(frozen=True)
class Options:
    run: str = argument("where")
    epochs: int | None = option(None, "at most", valid=COUNT)
    names: tuple = option((), "several")
    fields: dict = option({}, "pairs", flag="--set")
    fast: bool = option(False, "without waiting", recorded=False, free=True)
    seed: int | None = like(train.Settings, "seed", default=3)


def test_a_dataclass_is_a_command_line_and_a_record():
    words = cli("here --epochs 2 --names a b --set x=1 y=z=[2] --fast")
    options = parse(Options, words, "demo", "What it does.")
    assert options == Options("here", 2, ("a", "b"), {"x": 1, "y": "z=[2]"}, True, 3)
    values = {"run": "here", "epochs": 2, "names": ["a", "b"], "fields": {"x": 1, "y": "z=[2]"}}
    assert record(options) == {**values, "seed": 3} and free_names(Options) == {"fast"}
    assert difference(values, {**values, "run": "there"}) == ("run", "here", "there")
    assert difference(values, {**values, "run": "there"}, free={"run"}) is None
    for wrong, say in (
        ("here --epochs 0", "--epochs must be at least 1, and under 10"),
        ("here --set x", "--set takes NAME=VALUE"),
        ("here --set x=1 x=2", "--set has 'x' twice"),
        ("here there", "unrecognized arguments: there"),
    ):
        with pytest.raises(ValueError, match=say):
            parse(Options, wrong.split(), "demo", "")


def test_the_environment_and_earlier_runs_name_the_encoder(
    runs, encoder, quiet_encoder, data_dir, tmp_path, monkeypatch
):
    """A fusion takes the encoder that its adapters' runs recorded, and does not guess."""
    fusion = cli("--stage fusion --task rte --epochs 1 --device cpu --limit-train 8")
    monkeypatch.setenv("ADAPTERFUSION_DATA_DIR", str(data_dir))
    adapters = [runs / "rte", runs / "sst2"]
    train.main([*fusion, *cli(adapters=adapters, out=tmp_path / "fusion")])
    config = read_json(tmp_path / "fusion" / "config.json")
    assert config["model"] == str(encoder) and config["data_dir"] == str(data_dir)
    head = cli("--stage adapter --task sst2 --epochs 1 --device cpu --limit-train 8")
    monkeypatch.setenv("ADAPTERFUSION_MODEL", str(quiet_encoder))
    train.main([*head, *cli(out=tmp_path / "sst2")])
    assert read_json(tmp_path / "sst2" / "config.json")["model"] == str(quiet_encoder)
    inspect_task(["rte"])  # python data.py rte
    monkeypatch.delenv("ADAPTERFUSION_MODEL")
    with pytest.raises(ValueError, match="different encoders .*: add --model"):
        train.main([*fusion, *cli(adapters=[runs / "rte", tmp_path / "sst2"], out=tmp_path / "x")])


def test_copies_remember_the_encoder_of_their_adapters(runs, quiet_encoder, data_dir, tmp_path):
    """Whatever was allowed once is asked for again: of the copies that a fusion keeps."""
    shutil.copytree(quiet_encoder, tmp_path / "other")
    weights = load_file(tmp_path / "other" / "model.safetensors")
    save_file({name: t * 1.01 for name, t in weights.items()}, tmp_path / "other/model.safetensors")
    words = cli("--stage fusion --task rte --epochs 1 --device cpu --limit-train 8")
    words += cli(model=tmp_path / "other", data_dir=data_dir)
    sources = cli(adapters=[runs / "rte", runs / "sst2"])
    train.main([*words, *sources, *cli("--allow-other-encoder", out=tmp_path / "fusion")])
    copies = cli(adapters=[tmp_path / "fusion" / "adapters" / name for name in ("rte", "sst2")])
    with pytest.raises(ValueError, match="encoder with other weights"):
        train.main([*words, *copies, *cli(out=tmp_path / "x")])


def test_files_of_your_own(encoder, data_dir, tmp_path):
    """CSV with columns of one's own names, wherever it lies; a run knows its files again."""
    for split in ("train", "validation"):
        rows = read_lines(data_dir / "sst2" / f"{split}.jsonl")
        rows = [[i, row["sentence"], row["label"]] for i, row in enumerate(rows)]
        write_csv(tmp_path / f"{split} set.csv", ["id", "review", "stars"], rows)
    words = cli("--stage adapter --task stars --epochs 2 --lr 5e-3 --device cpu", model=encoder)
    words += cli("--columns text_a=review label=stars", train_file=tmp_path / "train set.csv")
    files = cli(dev_file=tmp_path / "validation set.csv")
    result = train.main([*words, *files, *cli(out=tmp_path / "run")])
    same = cli("--stage adapter --task sst2 --epochs 2 --lr 5e-3 --device cpu", model=encoder)
    expected = train.main([*same, *cli(data_dir=data_dir, out=tmp_path / "same")])
    assert result["accuracy"] == expected["accuracy"] and result["train_examples"] == 96
    again = evaluate.main([str(tmp_path / "run"), "--device", "cpu"])
    assert again["accuracy"] == result["accuracy"]
    shutil.copyfile(tmp_path / "validation set.csv", tmp_path / "train set.csv")
    with pytest.raises(ValueError, match="holds a finished run with data_files"):
        train.main([*words, *files, *cli("--resume", out=tmp_path / "run")])


def test_examples_of_a_small_task_meet_others_in_the_next_epoch():
    lengths = np.random.default_rng(0).integers(5, 128, 20_000)
    for count, most in ((250, 0.15), (2500, 0.2), (20_000, 0.06)):
        assert share_that_meets_again(lengths[:count]) < most
    batches = length_bucketed_batches(lengths, 32, seed=0)
    longest = sum(len(rows) * lengths[rows].max() for rows in batches)
    assert 1 - lengths.sum() / longest < 0.05


@dataclass(frozen=True)
class WithTemperature(train.Settings):
    temperature: float = option(1.0, "of a fork's loss")


def test_an_option_of_a_fork_is_recorded_and_compared(encoder, data_dir, tmp_path, capsys):
    words = cli("--stage head --task rte --epochs 1 --device cpu --limit-train 8 --save-minutes 0")
    words += cli(model=encoder, data_dir=data_dir, out=tmp_path / "run")
    train.main([*words, "--temperature", "2"], options=WithTemperature)
    assert read_json(tmp_path / "run" / "config.json")["temperature"] == 2.0
    with pytest.raises(ValueError, match="temperature = 2.0, not 1.0"):
        train.main([*words, "--resume"], options=WithTemperature)


def test_a_run_that_another_program_continues_says_so(encoder, data_dir, tmp_path, at_step, capsys):
    words = cli("--stage head --task rte --epochs 2 --device cpu --limit-train 8 --save-minutes 0")
    words += cli(model=encoder, data_dir=data_dir, out=tmp_path / "run")
    at_step(1, child.stop)
    with pytest.raises(KeyboardInterrupt):
        train.main(words)
    path = tmp_path / "run" / "config.json"
    write_json(path, read_json(path) | {"command": "examples/lora.py --stage head"})
    train.main([*words, "--resume"])
    assert "note: begun by examples/lora.py, continued by train.py" in capsys.readouterr().out


def test_a_hint_where_examples_are_few(launch, capsys, tmp_path):
    launch("--stage adapter --task rte --epochs 1", out=tmp_path / "low")
    assert "hint: on a few hundred examples --lr 5e-4 to 1e-3" in capsys.readouterr().out
    launch("--stage adapter --task rte --epochs 1 --lr 1e-3", out=tmp_path / "high")
    assert "hint:" not in capsys.readouterr().out
