"""examples/: LoRA beside the reference library, a regression, MPNet, runs as a user makes them."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import test_kinds  # noqa: F401  (first: it notes what there is without examples)
import train
from adapter import adapter_modules
from bert import Bert, activate
from conftest import cli, tiny_encoder
from data import TASKS
from examples.sts_b import pearson
from experiments import evaluate, predict
from experiments.load_run import load_run
from formats.files import write_json
from reference import FIELDS, ask_peer, needs_peer
from runtime.scores import CLASS_SCORES
from test_kinds import examples, inputs, new_bert  # noqa: F401  (a fixture for all tests here)


@needs_peer
def test_lora_is_the_reference_s(encoder, tmp_path):
    bert = new_bert(encoder, "lora", "a", torch.float32)
    weights = {
        f"{layer}.{location.split('.')[-1]}.{part}": p.detach()
        for (layer, location), module in adapter_modules(bert, "a").items()
        for part, p in module.named_parameters()
    }
    save_file(weights, tmp_path / "weights.safetensors")
    save_file(dict(zip(FIELDS, inputs(), strict=True)), tmp_path / "inputs.safetensors")
    write_json(tmp_path / "plan.json", {"encoder": str(encoder)})
    ask_peer("peer.py", "examples", tmp_path)
    theirs = load_file(tmp_path / "examples.safetensors")["lora"]
    assert (bert(*inputs()) - theirs).abs().max() < 2e-5
    activate(bert)
    assert (bert(*inputs()) - theirs).abs().max() > 0.1


def test_a_regression(launch, tmp_path, capsys):
    x, y = torch.tensor([1.0, 2.0, 3.0, 5.0]), torch.tensor([2.0, 1.0, 4.0, 90.0])
    assert pearson(x, y) == pytest.approx(torch.corrcoef(torch.stack([x, y]))[0, 1].item())
    assert pearson(x, torch.ones(4)) == 0.0
    assert TASKS["sts_b"].label_index("2.5") == 2.5
    for label in (math.nan, -1, "5.1"):
        with pytest.raises(ValueError, match=f"{label!r} is not a number from 0 to 5"):
            TASKS["sts_b"].label_index(label)
    launch("--stage adapter --task sts_b --epochs 1", out=tmp_path / "run")
    capsys.readouterr()
    predict.main([str(tmp_path / "run"), "red cat", "red dog", "--device", "cpu", "--json"])
    (score,) = load_run(tmp_path / "run").predict([["red cat", "red dog"]])
    assert json.loads(capsys.readouterr().out)["score"] == pytest.approx(score["score"])


def test_a_score_must_be_a_number(launch, monkeypatch, tmp_path):
    monkeypatch.setitem(CLASS_SCORES, "none", lambda *_: math.nan)
    with pytest.raises(ValueError, match="--score none is not a number"):
        launch("--stage head --task rte --epochs 1 --score none", out=tmp_path / "run")


def test_an_example_is_a_program(encoder, data_dir, tmp_path):
    """As a user starts it, from another directory."""
    words = cli("--stage adapter --task rte --adapter lora --adapter-config r=2 --epochs 1")
    words += cli("--device cpu", model=encoder, data_dir=data_dir, out=tmp_path / "run")
    command = [sys.executable, Path(train.__file__).resolve().parent / "examples/lora.py", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["trained_parameters"] == 2 * 256 + 1122
    again = evaluate.main(cli(f"{tmp_path}/run --device cpu --import examples.lora"))
    assert again["accuracy"] == result["accuracy"]


def test_mpnet(launch, refused, tmp_path):
    """A fusion in bf16, and full fine-tuning, which moves the table of distances; what AdapterHub's
    library has no encoder for is refused by name."""
    model, out = tmp_path / "mpnet", tmp_path / "run"
    model.mkdir()
    tiny_encoder("mpnet", model)
    launch("--stage adapter --task rte --epochs 1", model=model, out=tmp_path / "rte")
    words = "--stage fusion --task rte --epochs 1 --dtype bfloat16"
    result = launch(words, model=model, adapters=tmp_path / "rte", out=out)
    assert evaluate.main(cli(f"{out} --device cpu"))["accuracy"] == result["accuracy"]
    launch("--stage full --task rte --epochs 1 --lr 1e-3 --overwrite", model=model, out=out)
    before, after = (
        Bert.from_pretrained(directory).relative_attention_bias.weight for directory in (model, out)
    )
    assert (before != after).any(1).sum() > 12  # of 32 rows, those of the distances that occur
    words = cli("--stage fusion --task rte --adapters paper", model=model, out=tmp_path / "x")
    refused(words, "not for mpnet")
