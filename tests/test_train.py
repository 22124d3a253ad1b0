"""Training learns; defaults, learning rates, where the encoder is from, and what is saved."""

import shutil
from dataclasses import field, make_dataclass
from unittest.mock import Mock

import pytest
import torch

import adapter
import train
from bert import AddNorm, Bert
from conftest import assert_equal, cli, interrupt, main, read_lines, write_tasks
from experiments import multitask
from experiments.fusion_weights import mean_weights
from experiments.load_run import load_run
from formats.files import write_tensors


def test_both_stages_learn(launch, runs, tmp_path):
    """Far above chance; a fusion finds the adapter that knows the target task beside two others."""
    data_dir = write_tasks(tmp_path / "data", 300)
    words = "--stage adapter --patience 25 --lr 1e-2 --batch-size 8 --reduction-factor 2"
    for task, epochs, least in (("sst2", 10, 0.8), ("pick", 3, 0.55)):
        given = {"task": task, "epochs": epochs, "data_dir": data_dir, "out": tmp_path / task}
        assert launch(words, **given)["accuracy"] > least
    words = "--stage fusion --task sst2 --batch-size 16 --patience 12 --epochs 12 --lr 1e-2"
    adapters = [runs / "rte", tmp_path / "sst2", tmp_path / "pick"]
    result = launch(words, adapters=adapters, data_dir=data_dir, out=tmp_path / "run")
    assert result["accuracy"] > 0.75
    run = load_run(tmp_path / "run")
    shares = [s[1].item() for s in mean_weights(run, run.split()).values()]
    assert max(shares) > 0.5  # 1/3 at first


DEFAULTS = {
    # section 4.1, appendix A.2
    "--stage adapter --task rte": {"lr": 1e-4, "epochs": 30, "patience": 5, "batch_size": 32},
    "--stage fusion --task rte --adapters RUN": {"lr": 5e-5, "epochs": 10, "patience": 5},
    # Bert-n-Pals, run_multi_task.py: 300 steps for each task
    "--tasks rte sst2": {"lr": 2e-5, "epochs": 25, "patience": 25, "steps_per_epoch": 600},
}


@pytest.mark.parametrize("text", DEFAULTS)
def test_the_defaults(text, runs):
    parse = multitask.parse if "--tasks" in text else train.parse
    args = parse(cli(text.replace("RUN", str(runs / "rte"))))
    assert {name: getattr(args, name) for name in DEFAULTS[text]} == DEFAULTS[text]


def test_the_environment_and_earlier_runs_name_the_encoder(runs, encoder, monkeypatch):
    """A fusion takes the encoder that its adapters' runs recorded."""
    fusion = cli("--stage fusion --task rte", adapters=[runs / "rte", runs / "sst2"])
    assert train.parse(fusion).model == str(encoder)
    monkeypatch.setenv("ADAPTERFUSION_MODEL", "another")
    monkeypatch.setenv("ADAPTERFUSION_DATA_DIR", "data")
    args = train.parse(fusion)
    assert (args.model, args.data_dir) == ("another", "data")
    resumed = train.parse([*fusion, "--resume", "--out", str(runs / "fusion-rte")])
    assert resumed.model == str(encoder)  # its own


@pytest.mark.parametrize("score", ["accuracy", "f1"])
@pytest.mark.parametrize(
    "scores, losses, best, last",
    [("5555555", "9577777", 2, 4), ("5655555", "9999111", 2, 4), ("5556665", "3211129", 4, 6)],
)
def test_the_best_epoch(score, scores, losses, best, last, command, tmp_path, monkeypatch):
    """By --score; of equal ones that with the smaller loss. --patience begins there."""
    pairs = zip(scores, losses, strict=True)
    found = [{"accuracy": 1, "f1": 1, score: int(one), "loss": int(loss)} for one, loss in pairs]
    monkeypatch.setattr(train, "evaluate", Mock(side_effect=found))
    result = main(command("head", tmp_path, epochs=7, patience=2, score=score))
    assert result["best_epoch"] == best and result[score] == int(scores[best - 1])
    assert len(read_lines(tmp_path / "log.jsonl")) == last


def test_groups_of_parameters(command, tmp_path, monkeypatch):
    """Each learns at its rate; what an optimizer keeps in them is resumed."""
    rates = []

    class Counting(torch.optim.AdamW):
        def __init__(self, groups, **options):
            params = groups[0]["params"]
            slow, fast = {"params": params[:2], "lr": 1e-4}, {"params": params[2:]}
            super().__init__([slow, fast], **{**options, "lr": 1e-3})

        def step(self):
            rates.append([group["lr"] for group in self.param_groups])
            for group in self.param_groups:
                group["k"] = group.get("k", 0) + 1
                group["lr"] /= group["k"]
            super().step()

    monkeypatch.setattr(torch.optim, "AdamW", Counting)
    main(command("head", tmp_path / "whole"))
    assert rates[0] == [1e-4, 1e-3] and rates[12] == pytest.approx([5e-5, 5e-4])  # of 24 steps
    interrupt(command("head", tmp_path / "cut"), 9)
    main(command("head", tmp_path / "cut", "--resume"))
    assert_equal(tmp_path / "cut", tmp_path / "whole")


def test_an_adapter_that_is_not_all_of_its_run(launch, runs, tmp_path, capsys):
    """What else the run has trained is not taken along, and that is said."""
    run = shutil.copytree(runs / "rte", tmp_path / "rte")
    write_tensors(run / "own.safetensors", {"bert.layers.0.query.bias": torch.zeros(32)})
    launch("--stage head --task rte --epochs 1", adapters=run, out=tmp_path / "head")
    assert "which is used here without bert.layers.0.query.bias" in capsys.readouterr().out


def test_fields_of_an_edit_come_back(runs, encoder, tmp_path, monkeypatch):
    """Of AdapterConfig itself. `scaling` is something else in AdapterHub's library."""
    new = [("scaling", float, field(default=1.0))]
    AdapterConfig = make_dataclass("AdapterConfig", new, bases=(adapter.AdapterConfig,))
    monkeypatch.setattr(adapter, "AdapterConfig", AdapterConfig)
    bert = Bert.from_pretrained(encoder)
    adapter.add_adapter(bert, "a", AdapterConfig.pfeiffer(scaling=3.0))
    adapter.save_adapter(bert, "a", tmp_path)
    adapter.load_adapter(bert, tmp_path, "again")
    adapter.load_adapter(bert, runs / "rte")  # which is older than the edit
    assert [config.scaling for config in bert.adapter_configs.values()] == [3, 3, 1]


def test_what_no_gradient_reaches_is_named(launch, tmp_path, monkeypatch, capsys):
    """It would be saved as trained, with its first values."""
    forward = AddNorm.forward

    def edited(slot, *given):
        slot.register_buffer("late", torch.zeros(1))
        return forward(slot, *given).detach()

    monkeypatch.setattr(AddNorm, "forward", edited)
    launch("--stage adapter --task rte --epochs 1", out=tmp_path / "run")
    text = capsys.readouterr().out
    assert "no gradient has reached 8 trained parameters in epoch 1: bert.layers.0" in text
    assert "made while training, so it is not saved: bert.layers." in text
