"""variants/: what PALs compute, and what they share."""

import math

import torch

from adapter import add_adapter
from bert import Bert
from conftest import randomize
from variants.pal import PALConfig


@torch.no_grad()
def test_a_pal_is_parallel_to_the_whole_layer(encoder):
    """LN(FFN(x') + x' + PAL(x)), x the layer's input, x' what its attention makes of it; the PAL is
    transcribed head by head."""
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
