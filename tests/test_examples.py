"""PALs, and examples/: LoRA, fusions, a soup of adapters, a regression."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

import test_kinds  # noqa: F401  (first: it notes what there is without examples)
import train
from adapter import AdapterConfig, activate, adapter_modules, add_adapter
from bert import Bert
from conftest import change, cli, randomize
from data import TASKS
from examples import composing
from examples.sts_b import pearson
from experiments import predict
from experiments.load_run import load_run
from experiments.pal import PALConfig
from fusion import FUSIONS, add_fusion, fusion_regularization
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


def test_what_the_fusions_compute():
    """For each token o, by its equation."""
    torch.manual_seed(0)
    h, M = torch.randn(2, 3, 8), torch.randn(4, 8, 8)
    z = torch.einsum("btd,nde->btne", h, M)  # [B, T, N, d]
    adapters = [SimpleNamespace(z=lambda h, M_n=M_n: h @ M_n) for M_n in M]
    found, scores, V_z = {}, {}, {}
    kinds = (
        "sum value_of_sum static mean scalearn scalearn_uniform router gates scaled slow top_one"
    )
    for kind in kinds.split():
        fusion = FUSIONS[kind]([*"abcd"], 8, 0.1).eval().requires_grad_(False)
        for p in fusion.parameters():
            p += 0.3 * torch.randn_like(p)
        found[kind] = fusion, fusion.textbook(h, adapters)
        if hasattr(fusion, "query"):
            scores[kind] = (fusion.query(h)[:, :, None] * fusion.key(z)).sum(-1)  # [B, T, N]
        if hasattr(fusion, "value"):
            V_z[kind] = z @ fusion.value.weight.T
    largest = scores["top_one"].argmax(-1)[..., None, None].expand(2, 3, 1, 8)
    router = torch.softmax(h @ found["router"][0].gate.weight.T, -1)[..., None]
    omega, omega_1 = (found[kind][0].omega for kind in ("scalearn", "scalearn_uniform"))
    delta = found["static"][0].delta
    expected = {
        "sum": z.sum(2),
        "value_of_sum": V_z["value_of_sum"].sum(2),
        "static": torch.einsum("n,btnd->btd", (1 + 20 * delta[:, 0]) / 4, V_z["static"]),
        "mean": V_z["mean"].mean(2),
        "scalearn": torch.einsum("nd,btnd->btd", omega, z),
        "scalearn_uniform": torch.einsum("n,btnd->btd", omega_1[:, 0], z),
        "router": (router * z).sum(2),
        "gates": (2 / (1 + (-scores["gates"][..., None]).exp()) * V_z["gates"]).sum(2),
        "scaled": ((scores["scaled"] / 8**0.5).softmax(-1)[..., None] * V_z["scaled"]).sum(2),
        "slow": ((scores["slow"] / 400).softmax(-1)[..., None] * V_z["slow"]).sum(2),
        "top_one": V_z["top_one"].gather(2, largest)[:, :, 0],
    }
    for kind, o in expected.items():
        assert torch.allclose(found[kind][1], o, atol=1e-5), kind


def test_the_balance_of_a_router(encoder):
    """0 where all adapters are given the same; of padding it knows nothing."""
    bert = new_bert(encoder, "pfeiffer", "ab").train()
    add_fusion(bert, "ab", FUSIONS["router"])
    bert(*inputs())
    assert fusion_regularization(bert).item() == pytest.approx(0, abs=1e-12)
    randomize(bert.eval(), ".fusion.")
    bert(*inputs())
    penalty = fusion_regularization(bert)
    bert(*inputs(padding=5))
    assert penalty > 1e-4 and torch.allclose(fusion_regularization(bert), penalty, rtol=1e-9)


def test_a_soup(encoder, runs, refused, command, tmp_path):
    """The average of the weights."""
    words = command("soup", tmp_path / "x", adapters=[runs / "rte", runs / "pick"])
    refused(words, "of one architecture")
    bert = new_bert(encoder, "pfeiffer", "a")
    add_adapter(bert, "b", AdapterConfig.pfeiffer())
    randomize(bert, ".adapters.b.")
    composing.soup(None, bert, SimpleNamespace(name="rte"))
    for slot in bert.slots.values():
        if slot.adapters:
            a, b, mean = (slot.adapters[name].state_dict() for name in ("a", "b", "rte"))
            assert all(torch.equal(mean[part], (a[part] + b[part]) / 2) for part in mean)


def test_a_regression(encoder, tmp_path, monkeypatch, capsys):
    """On numbers of any range."""
    x, y = torch.tensor([1.0, 2.0, 3.0, 5.0]), torch.tensor([2.0, 1.0, 4.0, 90.0])
    assert pearson(x, y) == pytest.approx(torch.corrcoef(torch.stack([x, y]))[0, 1].item())
    assert TASKS["sts_b"].label_index("2.5") == 2.5
    for label in ("5.1", "1_5", True, "\u0661", "nan"):  # all but the first are numbers for `float`
        with pytest.raises(ValueError, match=f"{label!r} is not a number from 0 to 5"):
            TASKS["sts_b"].label_index(label)
    monkeypatch.chdir(tmp_path)
    rows = [{"text_a": "red", "label": f"{20 * n - 200}.5"} for n in range(20)]
    change(tmp_path / "own.jsonl", rows)
    words = cli("--stage adapter --task regression --epochs 1 --dev-fraction 0.25", model=encoder)
    words += cli("--import examples.sts_b --device cpu --train-file own.jsonl --out run")
    assert train.main(words)["dev_loss"] > 1000
    capsys.readouterr()
    predict.main(["run", "red cat", "--device", "cpu", "--json"])
    (score,) = load_run("run").predict(["red cat"])
    assert json.loads(capsys.readouterr().out)["score"] == pytest.approx(score["score"])


def test_slow_scores_are_attention_s_at_a_twentieth_of_the_rate():
    """The same s at first; one step of Adam moves Q and K, as they are used, 20 times less."""
    made, used = [], []
    for kind in ("attention", "slow"):
        torch.manual_seed(0)
        made.append(FUSIONS[kind]([*"ab"], 8, 0.0))
        scale = 1 if kind == "attention" else 20
        before = {n: p.detach().clone() / scale for n, p in made[-1].query.named_parameters()}
        scores = (made[-1].query(torch.ones(1, 1, 8)) * made[-1].key(torch.eye(2, 8))).sum(-1)
        s = made[-1].softmax(scores[None])
        s[..., 0].sum().backward()
        torch.optim.Adam(made[-1].parameters(), 1e-3, eps=0).step()
        after = {n: p / scale - before[n] for n, p in made[-1].query.named_parameters()}
        used.append((s, before["weight"], after["weight"]))
    (s, start, moved), (slow_s, slow_start, slow_moved) = used
    assert torch.allclose(s, slow_s) and torch.allclose(start, slow_start)
    assert torch.allclose(moved, 20 * slow_moved, rtol=1e-3, atol=1e-7)
