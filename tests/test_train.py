"""Training learns; defaults, learning rates, where the encoder is from, and what would be lost."""

import pytest
import torch
from torch import nn

import train
from adapter import AdapterConfig, add_adapter, save_adapter
from bert import Bert
from conftest import cli, randomize, write_tasks
from experiments import multitask
from experiments.fusion_weights import mean_weights
from experiments.load_run import load_run


def test_both_stages_learn(launch, encoder, tmp_path):
    """Classification and multiple choice, far above chance on examples that they have not seen; a
    fusion finds the adapter that knows the target task beside two of random weights."""
    data_dir = write_tasks(tmp_path / "data", 300)
    words = "--stage adapter --patience 25 --lr 1e-2 --batch-size 8 --reduction-factor 2"
    for task, epochs, least in (("sst2", 10, 0.8), ("pick", 3, 0.55)):
        given = {"task": task, "epochs": epochs, "data_dir": data_dir, "out": tmp_path / task}
        assert launch(words, **given)["accuracy"] > least
    bert = Bert.from_pretrained(encoder)
    for name in ("noise", "more_noise"):
        add_adapter(bert, name, AdapterConfig.pfeiffer(reduction_factor=2))
        randomize(bert, f".{name}.")
        save_adapter(bert, name, tmp_path / name)
    words = "--stage fusion --task sst2 --batch-size 16 --patience 12 --epochs 12 --lr 1e-2"
    adapters = [tmp_path / name for name in ("noise", "sst2", "more_noise")]
    result = launch(words, adapters=adapters, data_dir=data_dir, out=tmp_path / "run")
    assert result["accuracy"] > 0.75
    run = load_run(tmp_path / "run")
    shares = [s[1].item() for s in mean_weights(run, run.split())["all"].values()]
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
    assert train.parse([*fusion, "--model", "one"]).model == "one"


def test_groups_of_parameters_learn_at_their_rates(launch, tmp_path, monkeypatch):
    params, before, adamw = [], [], torch.optim.AdamW

    def two_groups(groups, **options):
        params.extend(groups[0]["params"])
        before.extend(p.detach().clone() for p in params)
        slow, fast = ({"params": half} for half in (params[:2], params[2:]))
        return adamw([slow | {"lr_factor": 0.1}, fast | {"lr_factor": 1.0}], **options)

    monkeypatch.setattr(torch.optim, "AdamW", two_groups)
    launch("--stage head --task rte --lr 1e-3 --epochs 1 --limit-train 8", out=tmp_path / "run")
    changes = [(p - q).abs().max().item() for p, q in zip(params, before, strict=True)]
    assert changes == pytest.approx([1e-4, 1e-4, 1e-3, 1e-3], rel=0.05)  # Adam's first step


ZEROS = torch.zeros(3)
LOST = [  # what a stage of one's own adds to the encoder, and the message
    ("", "prompt", nn.Parameter(ZEROS), "does not say what prompt is called in a checkpoint"),
    ("layers.0", "adapters", nn.ModuleDict({"x": nn.Linear(2, 2)}), "x.weight would be trained"),
    ("layers.0.output_add_norm", "mean", nn.Buffer(ZEROS), "holds buffers: bert.layers"),
]


@pytest.mark.parametrize("place, name, added, message", LOST)
def test_what_would_be_lost_is_refused(place, name, added, message, launch, tmp_path, monkeypatch):
    """Before the first step, with nothing written."""

    def build(args, bert, task):
        setattr(bert.get_submodule(place), name, added)

    monkeypatch.setitem(train.STAGES, "lossy", {"build": build, "lr": 1e-3, "epochs": 1})
    with pytest.raises(ValueError, match=message):
        launch("--stage lossy --task rte", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
