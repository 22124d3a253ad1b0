"""experiments/benchmark.py at tiny sizes: not its figures, but that they are what they are called.

PEER_PYTHON, as in test_adapterhub.py, puts the reference library into the table."""

import json
import os
import statistics
import sys
from io import StringIO
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import child
from adapter import AdapterConfig, Head, add_adapter
from bert import Bert, BertConfig
from conftest import thorough
from experiments import benchmark
from fusion import add_fusion
from train import predict

PEER = os.environ.get("PEER_PYTHON")


@pytest.mark.parametrize("kind", ["inference", "step"])
@pytest.mark.parametrize(
    "adapters, fused", [(0, False), (1, False), (1, True), (4, True), (16, True)]
)
def test_floor_counts_the_products(kind, adapters, fused):
    if kind == "step" and not adapters:
        pytest.skip("nothing to train")
    B, T = 5, 12
    config = BertConfig(100, 64, 3, 4, 128)
    bert = Bert(config).requires_grad_(False)
    names = [f"a{i}" for i in range(adapters)]
    for name in names:
        add_adapter(bert, name, AdapterConfig.pfeiffer())
    if fused:
        add_fusion(bert, names)
    head = Head({"head_type": "classification", "num_labels": 2, "layers": 2}, config)
    ids = torch.randint(0, 100, (B, T))
    batch = {
        "input_ids": ids,
        "token_type_ids": ids * 0,
        "attention_mask": ids * 0 + 1,
        "labels": ids[:, 0] * 0,
    }
    with (
        FlopCounterMode(display=False) as counter,
        sdpa_kernel(SDPBackend.MATH),
    ):  # it does not know the CPU's own attention
        if kind == "step":
            F.cross_entropy(predict(bert, head, batch, torch.float32), batch["labels"]).backward()
        else:
            with torch.no_grad():
                bert(ids, ids * 0, ids * 0 + 1)
    row = {"kind": kind, "adapters": adapters, "fused": fused, "batch": B}
    least, done = benchmark.multiply_adds(config, row, T), counter.get_total_flops() / 2
    # which also sums over the adapters' columns with products, and picks its order for the way
    # there alone
    if fused:
        assert 0.85 * done < least <= done
    else:
        assert least == done


def test_chain_finds_the_cheapest_order():
    assert benchmark.chain([10, 30, 5, 60], [False] * 3) == 10 * 30 * 5 + 10 * 5 * 60
    # the only weight with a gradient is the last: x first, then a product and its gradient on one
    # side
    assert benchmark.chain([2, 3, 50], [False, True]) == 2 * (2 * 3 * 50)
    assert benchmark.chain([2, 3, 50], [True, True]) == 3 * (2 * 3 * 50)


def run(encoder, data_dir, out, capsys, *options):
    arguments = [
        "--model",
        encoder,
        "--batch",
        4,
        "--length",
        12,
        "--repeats",
        2,
        "--threads",
        1,
        "--data-dir",
        data_dir,
        "--encoder",
        encoder,
        "--out",
        out,
        *options,
    ]
    benchmark.main([str(argument) for argument in arguments])
    assert capsys.readouterr().out.endswith(out.read_text() + "\n")
    values = json.loads(out.with_suffix(".json").read_text())
    return (
        out.read_text(),
        {(result["row"], result["column"]): result for result in values["results"]},
        values,
    )


@thorough
def test_our_side_alone(encoder, data_dir, tmp_path, capsys, monkeypatch):
    worker = "-m", "experiments.benchmark_worker"
    monkeypatch.setattr(  # one that has imported torch already
        benchmark, "start", lambda spec, args: child.Program([*worker, json.dumps(spec)])
    )
    text, results, values = run(
        encoder,
        data_dir,
        tmp_path / "table.md",
        capsys,
        "--rows",
        "N = 4",
        "epoch, rte",
        "--limit-train",
        90,
    )
    rows = {
        "fusion step, N = 4": ("ours",),
        "inference, fusion N = 4": ("ours", "folded"),
        "epoch, rte": ("ours", "bfloat16"),
    }
    expected = {(row, column) for row, columns in rows.items() for column in columns}
    assert {key for key in results if not key[0].startswith("matrix")} == expected
    for (row, column), result in results.items():
        assert len(result["seconds"]) == 2 and min(result["seconds"]) > 0
        if row.startswith(("fusion", "inference")):
            assert result["floor"] > 0
            assert not os.path.exists("/proc/self/status") or min(result["memory"]) > 0
            assert (
                abs(result["loss"] - results["fusion step, N = 4", "ours"]["loss"]) <= 1e-5
            )  # folded, too
        if row != "epoch, rte" and not row.startswith("matrix"):
            label = row if column == "ours" else f"{row}, {column}"
            assert f"| {label} | {statistics.median(result['seconds']):.3f} (" in text
    d, layers, head = 32, 2, 32 * 32 + 32 + 2 * 32 + 2
    assert (
        results["fusion step, N = 4", "ours"]["parameters"] == layers * (3 * d * d + 2 * d) + head
    )
    assert results["epoch, rte", "ours"]["dev"] == [40, 40] and "90 examples of rte" in text
    assert len(values["evaluation_share"]) == 16
    met = {target["what"]: target["measured"] for target in values["targets"]}
    assert (
        not met["fusion step, N = 16: reference / ours"]
        and text.count("not measured") == len(met) - 1
    )


@pytest.mark.skipif(not PEER, reason="PEER_PYTHON: no Python with the reference library")
def test_beside_the_reference(encoder, data_dir, tmp_path, capsys):
    text, results, _ = run(
        encoder,
        data_dir,
        tmp_path / "table.md",
        capsys,
        "--peer-python",
        PEER,
        "--rows",
        "step, N = 4",
        "one adapter",
        "sst2",
    )
    for row in ("fusion step, N = 4", "inference, one adapter"):
        mine, theirs = results[row, "ours"], results[row, "reference"]
        assert abs(mine["loss"] - theirs["loss"]) <= 1e-5 and theirs["adapters"] in text
    row = "fusion step, N = 4"
    assert results[row, "ours"]["parameters"] == results[row, "reference"]["parameters"]
    padded, dynamic = (
        results["epoch, sst2", "reference"],
        results["epoch, sst2", "reference, dynamic"],
    )
    r, head = 2, 32 * 32 + 32 + 2 * 32 + 2
    assert padded["parameters"] == dynamic["parameters"] == 2 * (2 * 32 * r + r + 32) + head
    for label, reference in (("reference padded", padded), ("reference dynamic", dynamic)):
        assert (
            f"| epoch, sst2, {label} | " in text
            and f"| {statistics.median(reference['seconds']):.3f} (" in text
        )


def test_turns_alternate_and_the_first_is_not_counted(monkeypatch):
    asked = []

    def ask(process, key, request=None):
        if request is None:
            return {"loss": 1.0}
        asked.append((*key, request))
        return {"seconds": 100.0 if request == "warm" else 1.0}

    nothing = SimpleNamespace(kill=lambda: 0, wait=lambda: 0, stdin=StringIO(), stdout=StringIO())
    monkeypatch.setattr(benchmark, "start", lambda spec, args: nothing)
    monkeypatch.setattr(benchmark, "ask", ask)
    keys = [("row", "ours"), ("row", "folded"), ("row", "reference")]
    results = benchmark.measure(dict.fromkeys(keys, {"dtype": "float32"}), 3, None)
    assert asked == [(*key, request) for request in ("warm", "go", "go", "go") for key in keys]
    assert all(result["seconds"] == [1.0, 1.0, 1.0] for result in results.values())


@pytest.mark.parametrize("other", ["folded", "bfloat16", "reference"])
def test_another_loss_is_an_error(monkeypatch, other):
    dtype, difference = ("bfloat16", 0.2) if other == "bfloat16" else ("float32", 1e-4)
    nothing = SimpleNamespace(kill=lambda: 0, wait=lambda: 0, stdin=StringIO(), stdout=StringIO())
    monkeypatch.setattr(benchmark, "start", lambda spec, args: nothing)
    monkeypatch.setattr(
        benchmark, "ask", lambda process, key: {"loss": 1.0 + difference * (key[1] == other)}
    )
    with pytest.raises(RuntimeError, match=f"row: the loss is 1.0, but 1.*: {other}"):
        benchmark.measure(
            {("row", column): {"dtype": dtype} for column in ("ours", other)}, 3, None
        )


def test_targets_are_ratios_within_a_repeat():
    args = SimpleNamespace(device="cpu", dtype="float32", batch=8, length=128)
    name = "fusion step, N = 16"
    results = {
        (name, "ours"): {"seconds": [1.0, 2.0, 1.0], "memory": [10, 30, 10]},
        (name, "reference"): {"seconds": [5.0, 12.0, 4.0], "memory": [100, 90, 90]},
        ("stage 1 step", "ours"): {"seconds": [1.0, 1.0, 1.0], "memory": [None] * 3},
    }
    found = {what: values for what, _, _, values in benchmark.targets(results, args) if values}
    assert found == {
        "fusion step, N = 16: reference / ours": [5.0, 6.0, 4.0],
        "fusion step, N = 16: our peak memory / the reference's": [0.3],
        "fusion step, N = 16 / our single-adapter step": [1.0, 2.0, 1.0],
    }
    args.device, args.dtype = "cuda", "bfloat16"  # other targets
    assert {what[:3] for what, _, _, values in benchmark.targets(results, args) if values} == {
        "GPU"
    }


@pytest.mark.parametrize(
    "options, message",
    [
        (["--rows", "nonsense"], "no row has 'nonsense' in its name"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--length", "49"], "--length 49 is more than the encoder's 48"),
        (["--model", "nowhere/at/all"], "nowhere/at/all"),
        (["--data-dir", "."], "need both --data-dir and --encoder"),
        (
            ["--data-dir", "nowhere", "--encoder", "ENCODER", "--rows", "epoch"],
            "nowhere is not a directory",
        ),
        (["--peer-python", "nowhere/python"], "is not a program"),
        (["--peer-python", sys.executable], "cannot import the reference library"),
        (["--out", "nowhere/table.md"], "--out nowhere/table.md"),
        (["--device", "cuda"], "there is no such device"),
        (["--batch", "x"], "--batch"),
    ],
)
def test_errors(encoder, tmp_path, monkeypatch, capsys, options, message):
    if "cuda" in options and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.chdir(tmp_path)
    options = [str(encoder) if option == "ENCODER" else option for option in options]
    with pytest.raises(SystemExit) as error:
        benchmark.main(["--model", str(encoder), "--length", "12", "--out", "table.md", *options])
    captured = capsys.readouterr()
    assert error.value.code == 2 and captured.out == "" and not list(tmp_path.iterdir())
    assert (
        captured.err.startswith("benchmark: ")
        and captured.err.count("\n") == 1
        and message in captured.err
    )


def test_a_dead_process_is_an_error(encoder, tmp_path, monkeypatch, capsys):
    worker = "import sys; sys.exit(3)"
    start = benchmark.subprocess.Popen
    monkeypatch.setattr(
        benchmark.subprocess,
        "Popen",
        lambda command, **options: start([command[0], "-c", worker], **options),
    )
    with pytest.raises(SystemExit) as error:
        benchmark.main(
            [
                "--model",
                str(encoder),
                "--length",
                "12",
                "--rows",
                "N = 1",
                "--out",
                str(tmp_path / "table.md"),
            ]
        )
    assert error.value.code == 2 and not list(tmp_path.iterdir())
    assert "its process ended with status 3" in capsys.readouterr().err
