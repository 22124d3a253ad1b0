"""experiments/benchmark.py at tiny sizes: not its figures, but that they are what they are
called."""

import json
import os
from types import SimpleNamespace

import pytest
import torch

from adapter import AdapterConfig, add_adapter
from bert import Bert, BertConfig
from conftest import cli
from experiments import benchmark
from experiments.benchmark_worker import multiply_adds
from fusion import add_fusion
from reference import PEER


@pytest.mark.parametrize("N, fused", [(0, False), (1, False), (4, True)])
def test_the_floor_counts_the_products(N, fused):
    """Per token and layer, BERT takes 4·d² + 2·m·d, its attention 2·T·d, and an adapter 2·r·d; with
    more tokens than columns R, a fusion multiplies its weights once, 3·d²·R, and then takes less
    than the textbook form's 2·N·d²: D_n, scores and mixture."""
    B, T, d, m, L, r = 5, 12, 64, 128, 3, 4
    encoder, tokens = B * T * L * (4 * d * d + 2 * d * m + 2 * T * d), B * T * L
    bert = Bert(BertConfig(100, d, L, 4, m)).requires_grad_(False).eval()
    for i in range(N):
        add_adapter(bert, f"a{i}", AdapterConfig.pfeiffer())
    if fused:
        add_fusion(bert, [f"a{i}" for i in range(N)])
    ids = torch.zeros(B, T, dtype=torch.long)
    count = multiply_adds(lambda: bert(ids, ids, ids))
    if fused:
        R = N * (r + 1)  # columns of all U_n and b_n
        once = L * (3 * d * d * R + d * R)  # the latter for b_Q
        each_token = N * r * d + 2 * R * d + 2 * R * N
        assert count == encoder + once + tokens * each_token < encoder + tokens * 2 * N * d * d
    else:
        assert count == encoder + tokens * N * 2 * r * d
    if N:  # no gradient of frozen weights, and none below the first adapter
        step = multiply_adds(lambda: bert(ids, ids, ids).sum().backward())
        assert count < step < 3 * encoder


@pytest.mark.skipif(not PEER and "THOROUGH" not in os.environ, reason="THOROUGH=1 or PEER_PYTHON")
def test_a_table(encoder, tmp_path, capsys, monkeypatch):
    results, table_rows, out = {}, benchmark.table_rows, tmp_path / "table.md"
    monkeypatch.setattr(
        benchmark, "table_rows", lambda *row: results.update([row]) or table_rows(*row)
    )
    words = cli("--batch 4 --length 12 --repeats 2", model=encoder, out=out, rows="N = 4")
    benchmark.main(words + (cli(peer_python=PEER) if PEER else []))
    text, (step, inference) = out.read_text(), results.values()
    assert capsys.readouterr().out.endswith(text + "\n")
    assert [*step] == ["ours", "bfloat16", *["reference"] * bool(PEER)]
    assert [*inference] == ["ours", *["reference"] * bool(PEER)]
    for result in [*step.values(), *inference.values()]:
        assert len(result["seconds"]) == 2 and min(result["seconds"] + result["floor"]) > 0
        assert not os.path.exists("/proc/self/status") or min(result["memory"]) > 0
        assert f" | {sum(result['seconds']) / 2:.3f} (" in text
    d, layers, head = 32, 2, 32 * 32 + 32 + 2 * 32 + 2
    assert step["ours"]["trained"] == [layers * (3 * d * d + 2 * d) + head] * 2
    if PEER:
        assert step["reference"]["trained"] == step["ours"]["trained"]
        pairs = zip(step["reference"]["seconds"], step["ours"]["seconds"], strict=True)
        low, high = sorted(theirs / mine for theirs, mine in pairs)
        assert f"| {(low + high) / 2:.2f} ({low:.2f}–{high:.2f}) |" in text


@pytest.mark.parametrize("dtype, error", [("float32", 0.0001), ("bfloat16", 0.2)])
def test_turns_alternate_and_losses_are_equal(dtype, error, monkeypatch):
    asked, losses, status = [], {}, 0

    def run(words, **_):
        asked.append(json.loads(words[-1])["column"])
        out = json.dumps({"loss": losses.get(asked[-1], 1.0), "seconds": len(asked)})
        return SimpleNamespace(returncode=status, stdout=out, stderr="why\nno memory\n")

    monkeypatch.setattr(benchmark.subprocess, "run", run)
    columns = ["ours", "bfloat16", "reference"]
    specs = {name: {"side": "ours", "dtype": dtype, "column": name} for name in columns}
    assert benchmark.measure(specs, 3)["bfloat16"]["seconds"] == [2, 5, 8]
    assert asked == columns * 3
    losses["reference"] = 1.0 + error
    with pytest.raises(ValueError, match=f"reference: the loss is {1 + error}, in ours 1.0"):
        benchmark.measure(specs, 3)
    status = 3
    with pytest.raises(ValueError, match="ours: status 3: no memory"):
        benchmark.measure(specs, 3)
