"""Options: what a command line says, what the environment and earlier runs say for it, and data in
files of one's own."""

import json
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
from experiments.inspect import inspect_task
from runtime.settings import COUNT, argument, difference, free_names, like, option, parse, record


@dataclass(frozen=True)
class Options:
    run: str = argument("where")
    epochs: int | None = option(None, "at most", valid=COUNT)
    names: tuple = option((), "several")
    fields: dict = option({}, "pairs", flag="--set")
    fast: bool = option(False, "without waiting", recorded=False, may_change=True)
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
        ("here --set x", "--set: takes NAME=VALUE, not 'x'"),
        ("here there", "unrecognized arguments: there"),
    ):
        with pytest.raises(ValueError, match=say):
            parse(Options, wrong.split(), "demo", "")


def test_the_environment_and_earlier_runs_name_the_encoder(
    runs, encoder, quiet_encoder, data_dir, tmp_path, monkeypatch
):
    """A fusion takes the encoder that its adapters' runs recorded, and does not guess."""
    monkeypatch.setenv("ADAPTERFUSION_DATA_DIR", str(data_dir))
    fusion = "--stage fusion --task rte"

    def model(text, out, **options):
        words = f"{text} --epochs 1 --device cpu --limit-train 8"
        return train.main(cli(words, out=tmp_path / out, **options))["model"]

    assert model(fusion, "a", adapters=[runs / "rte", runs / "sst2"]) == str(encoder)
    monkeypatch.setenv("ADAPTERFUSION_MODEL", str(quiet_encoder))
    assert model("--stage adapter --task sst2", "sst2") == str(quiet_encoder)
    inspect_task(["rte"])  # python -m experiments.inspect task rte
    monkeypatch.delenv("ADAPTERFUSION_MODEL")
    both = [runs / "rte", tmp_path / "sst2"]
    with pytest.raises(ValueError, match="different encoders .*: add --model"):
        model(fusion, "x", adapters=both)
    # --model chooses one of them: here the two have the same weights
    assert model(fusion, "y", adapters=both, model=encoder) == str(encoder)


def test_copies_remember_the_encoder_of_their_adapters(launch, runs, encoder, tmp_path, capsys):
    """Whatever was allowed once is asked for again: of the copies that a fusion keeps."""
    other = shutil.copytree(encoder, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    save_file({name: t * 1.01 for name, t in weights.items()}, other / "model.safetensors")

    def fuse(directory, text, out):
        adapters = [directory / "rte", directory / "sst2"]
        words = f"--stage fusion --task rte --epochs 1 --limit-train 8 {text}"
        launch(words, model=other, adapters=adapters, out=tmp_path / out)

    fuse(runs, "--allow-other-encoder", "fusion")
    for directory in (runs, tmp_path / "fusion" / "adapters"):
        with pytest.raises(ValueError, match="encoder with other weights"):
            fuse(directory, "", "x")
    capsys.readouterr()
    evaluate.main([str(tmp_path / "fusion"), "--device", "cpu"])
    assert "fuses adapters of another encoder: rte, sst2" in capsys.readouterr().out


def test_files_of_your_own(launch, data_dir, tmp_path):
    """CSV with columns of one's own names, wherever it lies; a run knows its files again."""
    for split in ("train", "validation"):
        rows = read_lines(data_dir / "sst2" / f"{split}.jsonl")
        lines = [f"{i},{row['sentence']},{row['label']}\n" for i, row in enumerate(rows)]
        (tmp_path / f"{split} set.csv").write_text("id,review,stars\n" + "".join(lines))
    words = "--stage adapter --epochs 2 --lr 5e-3"
    own = cli("--task stars --columns text_a=review label=stars", out=tmp_path / "run")
    own += cli(train_file=tmp_path / "train set.csv", dev_file=tmp_path / "validation set.csv")
    result = launch(words, *own)
    expected = launch(words, task="sst2", out=tmp_path / "same")
    assert result["accuracy"] == expected["accuracy"] and result["train_examples"] == 96
    again = evaluate.main([str(tmp_path / "run"), "--device", "cpu"])
    assert again["accuracy"] == result["accuracy"]
    shutil.copyfile(tmp_path / "validation set.csv", tmp_path / "train set.csv")
    with pytest.raises(ValueError, match="holds a finished run with data_files"):
        launch(words, *own, "--resume")


def test_examples_of_a_small_task_meet_others_in_the_next_epoch():
    """Of the pairs in one batch, few are in one batch of the next epoch."""
    lengths, place = np.random.default_rng(0).integers(5, 128, 20_000), np.empty(20_000)
    for count, most in ((250, 0.15), (2500, 0.2), (20_000, 0.06)):
        first, second = (length_bucketed_batches(lengths[:count], 32, (0, n)) for n in (1, 2))
        for i, rows in enumerate(second):
            place[rows] = i
        pairs = sum(len(rows) * (len(rows) - 1) for rows in first)
        again = sum((place[rows] == place[rows][:, None]).sum() - len(rows) for rows in first)
        assert again / pairs < most
    batches = length_bucketed_batches(lengths, 32, seed=0)
    longest = sum(len(rows) * lengths[rows].max() for rows in batches)
    assert 1 - lengths.sum() / longest < 0.05


@dataclass(frozen=True)
class WithTemperature(train.Settings):
    temperature: float = option(1.0, "of a fork's loss")


def test_an_option_of_a_fork_is_recorded_and_compared(encoder, data_dir, tmp_path, at_step, capsys):
    """A run that another program continues says so."""
    words = cli("--stage head --task rte --epochs 1 --device cpu --limit-train 8")
    words += cli(model=encoder, data_dir=data_dir, out=tmp_path / "run")
    at_step(1, child.stop)
    with pytest.raises(KeyboardInterrupt):
        train.main([*words, "--temperature", "2"], settings_class=WithTemperature)
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    assert config["temperature"] == 2.0
    path.write_text(json.dumps(config | {"command": "examples/lora.py --stage head"}))
    train.main([*words, "--temperature", "2", "--resume"], settings_class=WithTemperature)
    assert "note: begun by examples/lora.py, continued by train.py" in capsys.readouterr().out
    with pytest.raises(ValueError, match="temperature = 2.0, not 1.0"):
        train.main([*words, "--resume"], settings_class=WithTemperature)
