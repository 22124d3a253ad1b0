"""PALs, and examples/: LoRA, a regression, MPNet, runs as a user makes them."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import test_kinds  # noqa: F401  (first: it notes what there is without examples)
import train
from adapter import activate, adapter_modules, add_adapter
from bert import Bert
from conftest import cli, randomize, tiny_encoder, write_rows
from data import TASKS
from examples.sts_b import pearson
from experiments import evaluate, predict
from experiments.load_run import load_run
from experiments.pal import PALConfig
from test_kinds import examples, inputs, new_bert  # noqa: F401  (a fixture for all tests here)


@torch.no_grad()
def test_a_pal_is_parallel_to_the_whole_layer(encoder):
    """LN(FFN(x') + x' + PAL(x)), x the layer's input, x' what its attention makes of it."""
    bert = Bert.from_pretrained(encoder).double()
    add_adapter(bert, "a", PALConfig(size=12, num_heads=3))
    randomize(bert, ".adapters.")
    layer, seen = bert.layers[0], []
    slot, x = layer.output_add_norm, torch.randn(3, 6, 32, dtype=torch.float64)
    slot.register_forward_pre_hook(lambda _, given: seen.append(given))
    h = layer(x, None)
    (f, inner), pal = seen[0], slot.adapters["a"]
    (down, up), size = pal.projections, 12 // 3
    q, k, v = (project(down(x)).split(size, -1) for project in (pal.query, pal.key, pal.value))
    scores = [q_i @ k_i.mT / math.sqrt(size) for q_i, k_i in zip(q, k, strict=True)]
    heads = [torch.softmax(s, -1) @ v_i for s, v_i in zip(scores, v, strict=True)]
    y = up(torch.cat(heads, -1))
    z = y * 0.5 * (1 + torch.erf(y / math.sqrt(2)))  # GELU
    assert (h - slot.norm(f + inner + z)).abs().max() <= 1e-10
    first, second = (layer.output_add_norm.adapters["a"] for layer in bert.layers)
    assert first.projections == second.projections and first.key is not second.key


@torch.no_grad()
def test_lora_is_a_product_added_to_the_weights(encoder):
    """W + (alpha / r) B A"""
    bert, merged = new_bert(encoder, "lora", "a"), Bert.from_pretrained(encoder).double()
    for (layer, location), module in adapter_modules(bert, "a").items():
        linear = getattr(merged.layers[layer], location.removeprefix("attention.self."))
        linear.weight += 8 / 8 * module.B.weight @ module.A.weight
    assert (bert(*inputs()) - merged(*inputs())).abs().max() < 1e-12
    activate(bert)
    assert (bert(*inputs()) - merged(*inputs())).abs().max() > 0.1


def test_a_regression(encoder, tmp_path, monkeypatch, capsys):
    """As a user trains it, from another directory, on numbers of any range."""
    x, y = torch.tensor([1.0, 2.0, 3.0, 5.0]), torch.tensor([2.0, 1.0, 4.0, 90.0])
    assert pearson(x, y) == pytest.approx(torch.corrcoef(torch.stack([x, y]))[0, 1].item())
    assert pearson(x, torch.ones(4)) == 0.0
    assert TASKS["sts_b"].label_index("2.5") == 2.5
    for label in (math.nan, -1, "5.1"):
        with pytest.raises(ValueError, match=f"{label!r} is not a number from 0 to 5"):
            TASKS["sts_b"].label_index(label)
    rows = [{"text_a": "red", "label": f"{20 * n - 200}.5"} for n in range(20)]
    write_rows(tmp_path / "own.jsonl", rows)
    words = cli("--stage adapter --task regression --epochs 1 --dev-fraction 0.25", model=encoder)
    words += cli("--import examples.sts_b --device cpu --train-file own.jsonl --out run")
    command = [sys.executable, Path(train.__file__).resolve(), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["dev_loss"] > 1000
    monkeypatch.chdir(tmp_path)  # the run has its file's name as it was given
    predict.main(["run", "red cat", "--device", "cpu", "--json"])
    (score,) = load_run("run").predict(["red cat"])
    assert json.loads(capsys.readouterr().out)["score"] == pytest.approx(score["score"])
    monkeypatch.delitem(TASKS, "regression")
    with pytest.raises(ValueError, match="'regression', which is not known: .*--import"):
        load_run("run")


def test_mpnet(launch, refused, tmp_path):
    """Frozen in bf16; the paper's adapters are for other encoders."""
    model, out = tiny_encoder("mpnet", tmp_path / "mpnet"), tmp_path / "run"
    result = launch("--stage adapter --task rte --epochs 1 --dtype bfloat16", model=model, out=out)
    assert evaluate.main(cli(f"{out} --device cpu"))["accuracy"] == result["accuracy"]
    words = cli("--stage fusion --task rte --adapters paper", model=model, out=tmp_path / "x")
    refused(words, "not for mpnet")
