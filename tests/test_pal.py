"""The task layers of multi-task training (Stickland and Murray, 2019): what they compute and
share."""

import math

import torch
from torch import nn

from adapter import add_adapter, load_adapter, save_adapter
from bert import Bert
from conftest import IDS, MASK
from runtime.record import write_run
from variants.pal import PALConfig


def with_pal(encoder):
    torch.manual_seed(0)
    bert = Bert.from_pretrained(encoder).double()
    add_adapter(bert, "a", PALConfig(size=12, num_heads=3))
    for p in filter(lambda p: p.requires_grad, bert.parameters()):
        nn.init.normal_(p, std=0.3)
    return bert


def transcribed(adapter, x, mask):
    """z of one PAL, example by example and head by head, without padding."""
    size, z = adapter.config.size // adapter.config.num_heads, torch.zeros_like(x)
    for b in range(len(x)):
        real = int(mask[b].sum())
        y = adapter.down(x[b, :real])
        q, k, v = (f(y).split(size, 1) for f in (adapter.query, adapter.key, adapter.value))
        scores = [q_i @ k_i.T / math.sqrt(size) for q_i, k_i in zip(q, k, strict=True)]
        heads = [torch.softmax(s, 1) @ v_i for s, v_i in zip(scores, v, strict=True)]
        y = adapter.up(torch.cat(heads, 1))
        z[b, :real] = y * 0.5 * (1 + torch.erf(y / math.sqrt(2)))  # GELU
    return z


@torch.no_grad()
def test_it_is_parallel_to_the_whole_layer(encoder):
    """LN(FFN(x') + x' + PAL(x)), x the layer's input, x' what its attention makes of it."""
    bert = with_pal(encoder)
    layer, mask, seen = bert.layers[0], MASK.bool(), []
    slot, x = layer.output_add_norm, torch.randn(*IDS.shape, 32, dtype=torch.float64)
    slot.register_forward_pre_hook(lambda _, given: seen.append(given))
    h = layer(x, mask[:, None, None])
    f, inner, *_ = seen[0]
    z = transcribed(slot.adapters["a"], x, MASK)
    assert (h - slot.norm(f + inner + z))[mask].abs().max() <= 1e-10


def test_what_layers_share(encoder, tmp_path):
    pal, d, size = with_pal(encoder), 32, 12
    projections, per_layer = d * size + size + size * d + d, 3 * (size * size + size)
    trained = sum(p.numel() for p in pal.parameters() if p.requires_grad)
    assert trained == projections + 2 * per_layer
    save_adapter(pal, "a", tmp_path)
    write_run(tmp_path, {"options": {"adapter": "pal"}, "encoder": pal.sha256})
    load_adapter(again := Bert.from_pretrained(encoder), tmp_path)
    first, second = (layer.output_add_norm.adapters["a"] for layer in again.layers)
    assert first.down is second.down and first.up is second.up
