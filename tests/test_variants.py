"""variants/: what PALs compute, and what they share."""

import math

import torch

from adapter import add_adapter
from bert import Bert
from conftest import IDS, MASK, randomize
from variants.pal import PALConfig


def transcribed(pal, x, mask):
    """z of one PAL, example by example and head by head, without padding."""
    size, z = pal.config.size // pal.config.num_heads, torch.zeros_like(x)
    down, up = pal.projections
    for b in range(len(x)):
        real = int(mask[b].sum())
        y = down(x[b, :real])
        q, k, v = (f(y).split(size, 1) for f in (pal.query, pal.key, pal.value))
        scores = [q_i @ k_i.T / math.sqrt(size) for q_i, k_i in zip(q, k, strict=True)]
        heads = [torch.softmax(s, 1) @ v_i for s, v_i in zip(scores, v, strict=True)]
        y = up(torch.cat(heads, 1))
        z[b, :real] = y * 0.5 * (1 + torch.erf(y / math.sqrt(2)))  # GELU
    return z


@torch.no_grad()
def test_a_pal_is_parallel_to_the_whole_layer(encoder):
    """LN(FFN(x') + x' + PAL(x)), x the layer's input, x' what its attention makes of it."""
    bert = Bert.from_pretrained(encoder).double()
    add_adapter(bert, "a", PALConfig(size=12, num_heads=3))
    randomize(bert, ".adapters.")
    layer, mask, seen = bert.layers[0], MASK.bool(), []
    slot, x = layer.output_add_norm, torch.randn(*IDS.shape, 32, dtype=torch.float64)
    slot.register_forward_pre_hook(lambda _, given: seen.append(given))
    h = layer(x, bert.mask(x, MASK))
    f, inner = seen[0]
    z = transcribed(slot.adapters["a"], x, MASK)
    assert (h - slot.norm(f + inner + z))[mask].abs().max() <= 1e-10
    first, second = (layer.output_add_norm.adapters["a"] for layer in bert.layers)
    assert first.projections == second.projections and first.key is not second.key
