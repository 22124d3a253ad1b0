"""Houlsby et al.'s recipe: LayerNorms of a task's own, and the initialisation near the identity."""

import copy
import math

import pytest
import torch

from adapter import AdapterConfig, activate, adapter_modules, add_adapter
from bert import Bert, BertConfig
from conftest import IDS, MASK
from experiments import evaluate
from experiments.load_run import load_run
from variants.houlsby import HoulsbyRecipeConfig, layer_norm_slots

SHAPES = {
    "houlsby": HoulsbyRecipeConfig.houlsby_recipe(reduction_factor=4),
    "top, not in layer 0": HoulsbyRecipeConfig(leave_out=[0]),
    "bottom": HoulsbyRecipeConfig.houlsby_recipe(
        output_adapter=False, ln_before=True, ln_after=True
    ),
}


# --------------------------------------------------------------------------------------------------
# Initialisation


@pytest.mark.parametrize(
    "name, std, cut", [("bert", 0.02, 5), ("houlsby", 0.01, 2), ("houlsby_code", 0.001, 2)]
)
def test_initial_weights(name, std, cut):
    """A normal distribution, for Houlsby et al. cut at 2σ; biases are 0."""
    torch.manual_seed(0)
    bert = Bert(BertConfig(10, 256, 1, 2, 8, max_position_embeddings=4))
    add_adapter(bert, "a", HoulsbyRecipeConfig(reduction_factor=2, init_weights=name))
    adapter = bert.layers[0].output_add_norm.adapters["a"]
    for linear in (adapter.down, adapter.up):
        x = linear.weight.detach().abs() / std
        assert x.max() <= cut and not linear.bias.any()
        for end in (0.5, 1, 1.5):  # four standard errors of 2¹⁵ draws
            share = math.erf(end / 2**0.5) / math.erf(cut / 2**0.5)
            assert abs((x < end).float().mean() - share) < 4 * 0.5 / 2**7.5


# --------------------------------------------------------------------------------------------------
# A task's own LayerNorms


def norms_of(bert, name):
    slots = layer_norm_slots(bert)
    return {key: norm.adapters[name] for key, norm in slots if name in norm.adapters}


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
def test_own_layer_norms_stand_in_for_bert_s(encoder, shape):
    """The same as an encoder whose LayerNorms are those, with the adapter alone; and other adapters
    see nothing of it."""
    torch.manual_seed(0)
    bert, other = Bert.from_pretrained(encoder), Bert.from_pretrained(encoder)
    plain = bert(IDS, None, MASK)
    fields = vars(AdapterConfig())
    alone = {name: value for name, value in vars(SHAPES[shape]).items() if name in fields}
    add_adapter(bert, "alone", AdapterConfig(**alone))
    add_adapter(bert, "a", SHAPES[shape])
    own = norms_of(bert, "a")
    assert len(own) == 2 * 2 + 1 and not norms_of(bert, "alone")
    for key, norm in layer_norm_slots(bert):
        assert torch.equal(norm.weight, own[key].weight) and torch.equal(norm.bias, own[key].bias)
        assert own[key].eps == norm.eps
    for name, p in bert.named_parameters():
        if ".adapters." in name:
            p.add_(torch.randn_like(p), alpha=0.3)
    slots = dict(other.slots())
    for key, _, module in adapter_modules(bert, "a")[1]:
        if key not in own:
            slots[key].adapters["a"], slots[key].active = copy.deepcopy(module), "a"
    for key, norm in layer_norm_slots(other):
        norm.load_state_dict(own[key].state_dict())
    assert torch.equal(bert(IDS, None, MASK), other(IDS, None, MASK))
    first = bert(IDS, None, MASK, cls_only=True)
    assert (bert(IDS, None, MASK)[:, :1] - first).abs().max() < 1e-5
    activate(bert, "alone")
    alone = bert(IDS, None, MASK)
    activate(bert, None)
    assert torch.equal(bert(IDS, None, MASK), plain) and (alone - plain).abs().max() > 0.1


def test_multitask_with_own_layer_norms(launch, encoder, tmp_path):
    """Each task its own LayerNorms, all else of Θ is shared and trained; Θ's own LayerNorms are
    never used and stay."""
    words = "--tasks sst2 rte --adapter houlsby_recipe --epochs 1 --steps-per-epoch 8 --lr 5e-3"
    result = launch(words, out=tmp_path / "mt")
    before, found = Bert.from_pretrained(encoder), {}
    after = Bert.from_pretrained(tmp_path / "mt")  # a checkpoint without anything of the tasks
    assert not torch.equal(after.layers[0].query.weight, before.layers[0].query.weight)
    for key, norm in layer_norm_slots(after):
        assert torch.equal(norm.weight, dict(layer_norm_slots(before))[key].weight), key
    for task in ("sst2", "rte"):
        again = evaluate.main([str(tmp_path / "mt"), "--task", task, "--device", "cpu"])
        assert again["accuracy"] == result["accuracies"][task]
        found[task] = norms_of(load_run(tmp_path / "mt", task=task).bert, task)
    for key, norm in found["rte"].items():
        assert not torch.equal(found["sst2"][key].bias, norm.bias)


def test_houlsby_s_recipe_is_their_code_s(encoder):
    """adapter-bert: tanh-GELU, initial weights of σ = 1e-3, LayerNorms trained."""
    bert = Bert.from_pretrained(encoder)
    add_adapter(bert, "a", HoulsbyRecipeConfig.houlsby_recipe())
    config, modules = adapter_modules(bert, "a")
    assert (config.init_weights, config.non_linearity) == ("houlsby_code", "gelu_new")
    adapters = [module for _, _, module in modules if not isinstance(module, torch.nn.LayerNorm)]
    assert len(adapters) == 4 and len(modules) == 4 + 5
