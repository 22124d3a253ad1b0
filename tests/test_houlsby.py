"""Houlsby et al.'s recipe: LayerNorms of a task's own, and the initialisation near the identity."""

import copy
import math

import pytest
import torch

from adapter import activate, adapter_modules, add_adapter
from bert import Bert, BertConfig
from conftest import IDS, MASK
from variants.houlsby import HoulsbyRecipeConfig, layer_norm_slots


@pytest.mark.parametrize(
    "name, std, cut", [("bert", 0.02, 5), ("houlsby", 0.01, 2), ("houlsby_code", 0.001, 2)]
)
def test_initial_weights(name, std, cut):
    """A normal distribution, for Houlsby et al. cut at 2σ; biases are 0."""
    torch.manual_seed(0)
    bert = Bert(BertConfig(10, 256, 1, 2, 8, max_position_embeddings=4))
    add_adapter(bert, "a", HoulsbyRecipeConfig(reduction_factor=2, initialization=name))
    adapter = bert.layers[0].output_add_norm.adapters["a"]
    share = math.erf(1 / 2**0.5) / math.erf(cut / 2**0.5)  # within 1σ
    for linear in (adapter.down, adapter.up):
        x = linear.weight.detach().abs() / std
        assert x.max() <= cut and not linear.bias.any()
        assert abs((x < 1).float().mean() - share) < 4 * 0.5 / 2**7.5  # four standard errors


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"output_adapter": False, "ln_after": True}])
def test_own_layer_norms_stand_in_for_bert_s(encoder, changes):
    """The same as an encoder whose LayerNorms are those, with the adapter alone."""
    torch.manual_seed(0)
    bert, other = Bert.from_pretrained(encoder), Bert.from_pretrained(encoder)
    plain = bert(IDS, None, MASK)
    add_adapter(bert, "a", HoulsbyRecipeConfig(**changes))
    modules = adapter_modules(bert, "a")
    own = {key: norm.adapters["a"] for key, norm in layer_norm_slots(bert).items()}
    config = modules[0, "attention"].config
    # as in adapter-bert: tanh-GELU, initial weights of σ = 1e-3, all LayerNorms trained
    assert (config.initialization, config.non_linearity) == ("houlsby_code", "gelu_new")
    assert len(own) == 2 * 2 + 1 and len(modules) - len(own) == (2 if changes else 4)
    for key, norm in layer_norm_slots(bert).items():
        assert torch.equal(norm.weight, own[key].weight) and norm.eps == own[key].eps
    for name, p in bert.named_parameters():
        if ".adapters." in name:
            p.add_(torch.randn_like(p), alpha=0.3)
    for key, module in modules.items():
        if key not in own:
            slot = other.slots[key]
            slot.adapters["a"], slot.active = copy.deepcopy(module), "a"
    for key, norm in layer_norm_slots(other).items():
        norm.load_state_dict(own[key].state_dict())
    assert torch.equal(bert(IDS, None, MASK), other(IDS, None, MASK))
    activate(bert)
    assert torch.equal(bert(IDS, None, MASK), plain)
