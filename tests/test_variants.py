"""variants/: what PALs and Houlsby et al.'s recipe compute and share, and how they begin."""

import copy
import math

import pytest
import torch

from adapter import activate, adapter_modules, add_adapter
from bert import Bert, BertConfig
from conftest import IDS, MASK, randomize
from variants.houlsby import HoulsbyRecipeConfig, layer_norm_slots
from variants.pal import PALConfig


@pytest.fixture
def bert(encoder):
    torch.manual_seed(0)
    return Bert.from_pretrained(encoder)


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
def test_a_pal_is_parallel_to_the_whole_layer(bert):
    """LN(FFN(x') + x' + PAL(x)), x the layer's input, x' what its attention makes of it."""
    add_adapter(bert.double(), "a", PALConfig(size=12, num_heads=3))
    randomize(bert, ".adapters.")
    layer, mask, seen = bert.layers[0], MASK.bool(), []
    slot, x = layer.output_add_norm, torch.randn(*IDS.shape, 32, dtype=torch.float64)
    slot.register_forward_pre_hook(lambda _, given: seen.append(given))
    h = layer(x, mask[:, None, None])
    f, inner = seen[0]
    z = transcribed(slot.adapters["a"], x, MASK)
    assert (h - slot.norm(f + inner + z))[mask].abs().max() <= 1e-10
    first, second = (layer.output_add_norm.adapters["a"] for layer in bert.layers)
    assert first.projections == second.projections and first.key is not second.key


@pytest.mark.parametrize("name, std", [("bert", 0.02), ("houlsby", 0.01), ("houlsby_code", 0.001)])
def test_initial_weights(name, std):
    """A normal distribution, for Houlsby et al. cut at 2σ; biases are 0."""
    torch.manual_seed(0)
    bert, cut = Bert(BertConfig(10, 256, 1, 2, 8, max_position_embeddings=4)), name != "bert"
    add_adapter(bert, "a", HoulsbyRecipeConfig(reduction_factor=2, initialization=name))
    adapter = bert.layers[0].output_add_norm.adapters["a"]
    for linear in (adapter.down, adapter.up):
        x = linear.weight.detach() / std
        assert x.std().item() == pytest.approx(0.88 if cut else 1, abs=0.015)
        assert (x.abs().max() <= 2) == cut and not linear.bias.any()


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"output_adapter": False, "ln_after": True}])
def test_own_layer_norms_stand_in_for_bert_s(bert, encoder, changes):
    """The same as an encoder whose LayerNorms are those, with the adapter alone."""
    other, plain = Bert.from_pretrained(encoder), bert(IDS, None, MASK)
    add_adapter(bert, "a", HoulsbyRecipeConfig(**changes))
    modules = adapter_modules(bert, "a")
    own = {key: norm.adapters["a"] for key, norm in layer_norm_slots(bert).items()}
    config = modules[0, "attention"].config  # as in adapter-bert: tanh-GELU, σ = 1e-3
    assert (config.initialization, config.non_linearity) == ("houlsby_code", "gelu_new")
    assert len(own) == 2 * 2 + 1 and len(modules) - len(own) == (2 if changes else 4)
    for key, norm in layer_norm_slots(bert).items():
        assert torch.equal(norm.weight, own[key].weight) and norm.eps == own[key].eps
    randomize(bert, ".adapters.")
    for key, module in modules.items():
        if key not in own:
            slot = other.slots[key]
            slot.adapters["a"], slot.active = copy.deepcopy(module), "a"
    for key, norm in layer_norm_slots(other).items():
        norm.load_state_dict(own[key].state_dict())
    assert torch.equal(bert(IDS, None, MASK), other(IDS, None, MASK))
    activate(bert)
    assert torch.equal(bert(IDS, None, MASK), plain)
