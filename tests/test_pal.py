"""The task layers of multi-task training (Stickland and Murray, 2019): what they compute, their
files, fusion over them."""

import math

import pytest
import torch
from torch import nn

from adapter import AdapterConfig, activate, add_adapter, load_adapter, save_adapter
from bert import Bert, BertConfig
from conftest import IDS, MASK
from fusion import add_fusion, fusions
from variants.pal import PALConfig

PAL = PALConfig.pal(size=12, num_heads=3)


def with_adapters(encoder, *configs, names="abc"):
    torch.manual_seed(0)
    bert = Bert.from_pretrained(encoder).double()
    for name, config in zip(names, configs, strict=False):
        add_adapter(bert, name, config)
    for name, p in bert.named_parameters():
        if ".adapters." in name:
            nn.init.normal_(p, std=0.3)
    return bert


def gelu(x):
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def transcribed(adapter, x, mask):
    """z of one PAL, example by example and head by head, without padding."""
    size, z = adapter.config.size // adapter.config.num_heads, torch.zeros_like(x)
    for b in range(len(x)):
        real = int(mask[b].sum())
        y = adapter.down(x[b, :real])
        linear = adapter.query, adapter.key, adapter.value
        q, k, v = (part(y).split(size, 1) for part in linear)
        scores = [q_i @ k_i.T / math.sqrt(size) for q_i, k_i in zip(q, k, strict=True)]
        heads = [torch.softmax(s, 1) @ v_i for s, v_i in zip(scores, v, strict=True)]
        z[b, :real] = gelu(adapter.up(torch.cat(heads, 1)))
    return z


@torch.no_grad()
def test_it_is_parallel_to_the_whole_layer(encoder):
    """LN(FFN(x') + x' + PAL(x)), with x the layer's input and x' what its attention sub-layer made
    of it; fused, LN(f + o + x') with o = V Σ s_n z_n and s = softmax((Q h + b_Q)·(K z_n + b_K)),
    h = LN(f + x')."""
    bert = with_adapters(encoder, PAL, PAL)
    layer, mask, seen = bert.layers[0], MASK.bool(), []
    slot, x = layer.output_add_norm, torch.randn(*IDS.shape, 32, dtype=torch.float64)
    slot.register_forward_pre_hook(lambda _, given: seen.append(given))
    activate(bert, "a")
    alone = layer(x, mask[:, None, None])
    f, inner, _ = seen[0]
    z = torch.stack([transcribed(slot.adapters[name], x, MASK) for name in "ab"], 2)
    assert (alone - slot.norm(f + inner + z[:, :, 0]))[mask].abs().max() <= 1e-10
    add_fusion(bert, ["a", "b"])
    for _, fusion in fusions(bert):
        for p in fusion.parameters():
            nn.init.normal_(p, std=0.3)
    fused, h, fusion = layer(x, mask[:, None, None]), slot.norm(f + inner), slot.fusion
    s = torch.einsum("btd,btnd->btn", fusion.query(h), fusion.key(z)).softmax(-1)
    o = torch.einsum("btn,btnd->btd", s, fusion.value(z))
    assert (fused - slot.norm(f + o + inner))[mask].abs().max() <= 1e-10
    assert (fusion.weights - s)[mask].abs().max() <= 1e-10
    for name in ("a", "a,b"):  # in the last layer only the first token, but it attends to all
        activate(bert, name)
        first = bert(IDS, None, MASK, cls_only=True)
        assert (first - bert(IDS, None, MASK)[:, :1]).abs().max() <= 1e-10


def trained(bert):
    return sum(p.numel() for p in bert.parameters() if p.requires_grad)


def test_what_layers_share(encoder, tmp_path):
    pal, d, size = with_adapters(encoder, PAL), 32, 12
    projections, per_layer = d * size + size + size * d + d, 3 * (size * size + size)
    assert trained(pal) == projections + 2 * per_layer
    save_adapter(pal, "a", tmp_path)
    load_adapter(again := Bert.from_pretrained(encoder), tmp_path)
    for bert in (pal, again):
        first, second = (layer.output_add_norm.adapters["a"] for layer in bert.layers)
        assert first.down is second.down and first.up is second.up
        assert first.query is not second.query
    with torch.device("meta"):
        bert = Bert(BertConfig())
        add_adapter(bert, "a", PALConfig.pal())
    # the paper: 1.13 times BERT-base's parameters for eight tasks
    total = sum(p.numel() for p in bert.parameters()) + 7 * trained(bert)
    assert 1.12 < total / 110e6 < 1.14


def test_different_kinds_and_locations_cannot_be_fused(encoder):
    for config, say in (
        (PAL, "of different kinds cannot be fused: pal in a, bottleneck in b"),
        (AdapterConfig.houlsby(), "at different locations .*: attention and output in a, output"),
    ):
        bert = with_adapters(encoder, config, AdapterConfig.pfeiffer())
        with pytest.raises(ValueError, match=say):
            add_fusion(bert, ["a", "b"])
