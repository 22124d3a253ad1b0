"""experiments/benchmark.py at tiny sizes: not its figures, but that they are what they are called.

PEER_PYTHON, as in test_adapterhub.py, adds the reference library."""

import json
import os
from io import StringIO
from types import SimpleNamespace

import pytest

import child
from bert import BertConfig
from conftest import cli, thorough
from experiments import benchmark

PEER = os.environ.get("PEER_PYTHON")


@pytest.mark.parametrize("adapters, fused", [(0, False), (1, False), (4, True)])
def test_the_floor_counts_the_products(adapters, fused):
    """Per token and layer, BERT takes 4·d² + 2·m·d, its attention 2·T·d, and an adapter 2·r·d; a
    fusion takes less than the textbook form's 2·N·d², and folded only D_n, scores and mixture."""
    B, T, d, m, L, N = 5, 12, 64, 128, 3, adapters
    row = {"kind": "inference", "adapters": N, "fused": fused, "batch": B}
    config, r = BertConfig(100, d, L, 4, m), d // 16
    encoder, tokens = B * T * L * (4 * d * d + 2 * d * m + 2 * T * d), B * T * L
    count = benchmark.multiply_adds(config, row, T)
    if fused:
        R = N * (r + 1)  # columns of all U_n and b_n
        folded = encoder + tokens * (N * r * d + 2 * R * d + 2 * R * N)
        assert benchmark.multiply_adds(config, row, T, folded=True) == folded
        assert folded < count < encoder + tokens * 2 * N * d * d
    else:
        assert count == encoder + tokens * N * 2 * r * d
    if N:
        step = benchmark.multiply_adds(config, {**row, "kind": "step"}, T)
        assert encoder < step < 3 * encoder


def run(encoder, out, capsys, monkeypatch, **options):
    """(the table, {(row, column): result})"""
    found, table = {}, benchmark.table
    monkeypatch.setattr(benchmark, "table", lambda results: found.update(results) or table(results))
    words = "--batch 4 --length 12 --repeats 2 --threads 1"
    benchmark.main(cli(words, model=encoder, out=out, **options))
    assert capsys.readouterr().out.endswith(out.read_text())
    return out.read_text(), found


@thorough
def test_our_side_alone(encoder, tmp_path, capsys, monkeypatch):
    worker = "-m", "experiments.benchmark_worker"
    monkeypatch.setattr(  # one that has imported torch already
        benchmark, "start", lambda spec, options: child.Program([*worker, json.dumps(spec)])
    )
    text, results = run(
        encoder, tmp_path / "table.md", capsys, monkeypatch, rows=["N = 4", "one adapter"]
    )
    fusion, inference = "fusion step, N = 4", "inference, fusion N = 4"
    assert set(results) == {
        *((name, "ours") for name in (fusion, inference, "inference, one adapter")),
        (inference, "folded"),
        (fusion, "bfloat16"),
    }
    for (row, column), result in results.items():
        assert len(result["seconds"]) == 2 and min(result["seconds"]) > 0 and result["floor"] > 0
        assert not os.path.exists("/proc/self/status") or result["memory"] > 0
        label = row if column == "ours" else f"{row}, {column}"
        assert f"| {label} | {sum(result['seconds']) / 2:.3f} (" in text
    assert abs(results[inference, "folded"]["loss"] - results[fusion, "ours"]["loss"]) <= 1e-5
    d, layers, head = 32, 2, 32 * 32 + 32 + 2 * 32 + 2
    assert results[fusion, "ours"]["trained"] == layers * (3 * d * d + 2 * d) + head


@pytest.mark.skipif(not PEER, reason="PEER_PYTHON: no Python with the reference library")
def test_beside_the_reference(encoder, tmp_path, capsys, monkeypatch):
    rows = ["step, N = 4", "one adapter"]
    out = tmp_path / "table.md"
    text, results = run(encoder, out, capsys, monkeypatch, peer_python=PEER, rows=rows)
    for row in ("fusion step, N = 4", "inference, one adapter"):
        mine, theirs = results[row, "ours"], results[row, "reference"]
        assert abs(mine["loss"] - theirs["loss"]) <= 1e-5
        assert theirs["versions"]["adapters"] in text
        ratios = [a / b for a, b in zip(theirs["seconds"], mine["seconds"], strict=True)]
        assert f"| {sum(ratios) / 2:.2f} ({min(ratios):.2f}–{max(ratios):.2f}) |" in text
    row = "fusion step, N = 4"
    assert results[row, "ours"]["trained"] == results[row, "reference"]["trained"]


@pytest.fixture
def fake(monkeypatch):
    """Processes that only write down what they are asked. fake.loss: {column: what it says}"""
    asked = []
    process = SimpleNamespace(kill=int, wait=int, stdin=StringIO(), stdout=StringIO())
    state = SimpleNamespace(asked=asked, loss={})

    def ask(process, key, request=None):
        if request is None:
            return {"loss": state.loss.get(key[1], 1.0)}
        asked.append((key[1], request))
        seconds = 100.0 if request == "warm" else 1.0
        return {"seconds": seconds, "memory": len(asked), "rate": 1.0}

    monkeypatch.setattr(benchmark, "start", lambda spec, options: process)
    monkeypatch.setattr(benchmark, "ask", ask)
    return state


def test_turns_alternate_and_the_first_is_not_counted(fake):
    columns = ["ours", "folded", "reference"]
    specs = {("row", column): {"dtype": "float32"} for column in columns}
    results = benchmark.measure(specs, 3, None)
    turns = ("warm", "go", "go", "go")
    assert fake.asked == [(column, request) for request in turns for column in columns]
    assert all(result["seconds"] == [1.0, 1.0, 1.0] for result in results.values())
    assert [result["memory"] for result in results.values()] == [10, 11, 12]  # the largest


@pytest.mark.parametrize("other", ["folded", "bfloat16", "reference"])
def test_another_loss_is_an_error(fake, other):
    dtype, fake.loss[other] = ("bfloat16", 1.2) if other == "bfloat16" else ("float32", 1.0001)
    specs = {("row", column): {"dtype": dtype} for column in ("ours", other)}
    with pytest.raises(ValueError, match=f"row: the loss is 1.0, but 1.*: {other}"):
        benchmark.measure(specs, 3, None)


def test_a_process_that_fails_is_an_error():
    for line, message in (("", "ended with status 3"), ('{"error": "no memory"}', "no memory")):
        process = SimpleNamespace(stdout=StringIO(line), wait=lambda: 3)
        with pytest.raises(ValueError, match=f"row, folded: .*{message}"):
            benchmark.ask(process, ("row", "folded"))


WRONG = """--rows nonsense | no row has 'nonsense' in its name
--repeats 0 | --repeats must be at least 1
--length 49 | --length 49 is more than the encoder's 48
--peer-python nowhere/python --rows plain | nowhere/python"""


@pytest.mark.parametrize("line", WRONG.splitlines())
def test_errors(encoder, tmp_path, monkeypatch, refused, line):
    words, message = line.split(" | ")
    monkeypatch.chdir(tmp_path)
    words = f"--model {encoder} --length 12 --out table.md {words}".split()
    refused(words, message, name="benchmark.py", main=benchmark.main)
    assert not list(tmp_path.iterdir())
