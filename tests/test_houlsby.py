"""Houlsby et al.'s recipe: LayerNorms of a task's own, and the initialisation near the identity."""

import copy
import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import train
from adapter import (
    AdapterConfig,
    activate,
    add_adapter,
    find_adapter,
    layer_norm_slots,
    load_adapter,
    save_adapter,
)
from bert import Bert, BertConfig
from conftest import IDS, MASK, cli, dev_batches
from experiments.load_run import load_run
from fusion import add_fusion

SHAPES = {
    "houlsby": AdapterConfig.houlsby(layer_norms=True, reduction_factor=4),
    "top, not in layer 0": AdapterConfig.pfeiffer(layer_norms=True, leave_out=[0]),
    "bottom": AdapterConfig.houlsby(
        layer_norms=True, output_adapter=False, ln_before=True, ln_after=True
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
    add_adapter(bert, "a", AdapterConfig(reduction_factor=2, init_weights=name))
    adapter = bert.layers[0].output_add_norm.adapters["a"]
    for linear in (adapter.down, adapter.up):
        x = linear.weight.detach().abs() / std
        assert x.max() <= cut and not linear.bias.any()
        for end in (0.5, 1, 1.5):  # four standard errors of 2¹⁵ draws
            share = math.erf(end / 2**0.5) / math.erf(cut / 2**0.5)
            assert abs((x < end).float().mean() - share) < 4 * 0.5 / 2**7.5


def test_how_a_saved_adapter_was_initialised_does_not_matter(encoder, runs, tmp_path):
    source = shutil.copytree(runs / "rte", tmp_path / "rte")
    values = json.loads((source / "adapter_config.json").read_text())
    assert values["config"]["init_weights"] == "bert"
    for init_weights in ("mam_adapter", None, ["x"], "houlsby"):
        values["config"]["init_weights"] = init_weights
        (source / "adapter_config.json").write_text(json.dumps(values))
        bert = Bert.from_pretrained(encoder)
        load_adapter(bert, source)
        config = bert.layers[0].output_add_norm.adapters["rte"].config
        assert config.init_weights == ("houlsby" if init_weights == "houlsby" else "bert")


# --------------------------------------------------------------------------------------------------
# A task's own LayerNorms


def norms_of(bert, name):
    slots = layer_norm_slots(bert)
    return {key: norm.adapters[name] for key, norm in slots if name in norm.adapters}


def noise(bert, name):
    """Random weights for an adapter and its LayerNorms."""
    for _, _, module in find_adapter(bert, name)[1]:
        for p in module.parameters():
            p.data.add_(torch.randn_like(p), alpha=0.3)


@pytest.mark.parametrize("shape", SHAPES)
def test_own_layer_norms_stand_in_for_bert_s(encoder, shape):
    """The same as an encoder whose LayerNorms are those, with the adapter alone; and other adapters
    see nothing of it."""
    torch.manual_seed(0)
    bert, other = Bert.from_pretrained(encoder), Bert.from_pretrained(encoder)
    plain = bert(IDS, None, MASK)
    add_adapter(bert, "alone", AdapterConfig(**{**vars(SHAPES[shape]), "layer_norms": False}))
    add_adapter(bert, "a", SHAPES[shape])
    own = norms_of(bert, "a")
    assert len(own) == 2 * 2 + 1 and not norms_of(bert, "alone")
    for key, norm in layer_norm_slots(bert):
        for part, value in norm.state_dict().items():
            assert "adapters" in part or torch.equal(value, own[key].get_parameter(part))
        assert own[key].eps == norm.eps
    with torch.no_grad():
        for name in ("a", "alone"):
            noise(bert, name)
        slots = dict(other.slots())
        for key, _, module in find_adapter(bert, "a")[1]:
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


@pytest.mark.parametrize("shape", SHAPES)
def test_files_with_own_layer_norms(encoder, tmp_path, shape):
    torch.manual_seed(0)
    bert, again = Bert.from_pretrained(encoder), Bert.from_pretrained(encoder)
    add_adapter(bert, "a", SHAPES[shape])
    noise(bert, "a")
    save_adapter(bert, "a", tmp_path / "a")
    values = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert values["config"]["architecture"] == "layer_norms"  # which adapters 1.3.0 refuses
    tensors = load_file(tmp_path / "a" / "adapter.safetensors")
    names = [name for name in tensors if "layer_norm" in name]
    assert len(names) == 2 * (2 * 2 + 1)

    def refused(say, left_out=None, more=(), **config):
        changed = {name: tensor for name, tensor in tensors.items() if name != left_out}
        save_file({**changed, **dict(more)}, tmp_path / "a" / "adapter.safetensors")
        options = {**values, "config": {**values["config"], **config}}
        (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(options))
        before = again.state_dict().keys()
        with pytest.raises(ValueError, match=say) as error:
            load_adapter(again, tmp_path / "a", "c")
        assert "\n" not in str(error.value) and again.state_dict().keys() == before

    for name in names:
        place = name.removeprefix("bert.").replace(".adapters.a", "")
        refused(f"it lacks {place}", left_out=name)
    say = r"is torch.float32 \[31\], here it must be a float \[32\]"
    refused(say, more={name: torch.zeros(31)})
    refused("not finite", more={name: torch.full((32,), math.nan)})
    odd = "bert.embeddings.adapters.a.adapter_up.bias"
    refused("without a place", more={odd: torch.zeros(32)})
    say = "tensors without a place here: embeddings.adapter_layer_norm"
    refused(say, layer_norms=False)


def accuracy(run, encoder, data_dir, name, **options):
    bert, head, _ = load_run(run, **options)
    batch = dev_batches(encoder, data_dir, name, 40)[0]
    predictions = train.predict(bert, head, batch, torch.float32).argmax(-1)
    return bert, (predictions == batch["labels"]).float().mean()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_with_own_layer_norms(launch, encoder, data_dir, tmp_path, dtype):
    own = cli("--adapter houlsby --adapter-config layer_norms=true init_weights=houlsby")
    options = cli(f"--epochs 2 --lr 5e-3 --dtype {dtype}", out=tmp_path / "run")
    result = launch("--stage adapter --task sst2", *own, *options)
    bert, right = accuracy(tmp_path / "run", encoder, data_dir, "sst2", dtype=getattr(torch, dtype))
    untouched = Bert.from_pretrained(encoder).to(getattr(torch, dtype))
    for name, p in untouched.named_parameters():
        assert torch.equal(bert.get_parameter(name), p), name
    for key, norm in layer_norm_slots(bert):
        for kind in ("weight", "bias"):
            assert not torch.equal(getattr(norm, kind), getattr(norm.adapters["sst2"], kind)), key
    r, d = 2, 32
    head = d * d + d + 2 * d + 2
    assert result["trained_parameters"] == 4 * (2 * r * d + r + d) + 5 * 2 * d + head
    assert dtype == "bfloat16" or right == pytest.approx(result["accuracy"])


def test_multitask_with_own_layer_norms(launch, encoder, data_dir, tmp_path):
    """Each task its own LayerNorms, all else of Θ is shared and trained; Θ's own LayerNorms are
    never used and stay."""
    text = "--stage multitask --tasks sst2 rte --epochs 1 --steps-per-epoch 8 --lr 5e-3"
    own = cli("--adapter pfeiffer --adapter-config layer_norms=true")
    result = launch(text, *own, out=tmp_path / "mt")
    before, found = Bert.from_pretrained(encoder), {}
    after = Bert.from_pretrained(tmp_path / "mt")  # a checkpoint without anything of the tasks
    assert not torch.equal(after.layers[0].query.weight, before.layers[0].query.weight)
    for key, norm in layer_norm_slots(after):
        assert torch.equal(norm.weight, dict(layer_norm_slots(before))[key].weight), key
    for task in ("sst2", "rte"):
        bert, right = accuracy(tmp_path / "mt", encoder, data_dir, task, task=task)
        found[task] = norms_of(bert, task)
        assert right == pytest.approx(result["accuracies"][task])
    for key, norm in found["rte"].items():
        assert not torch.equal(found["sst2"][key].bias, norm.bias)


def test_they_cannot_be_fused(encoder):
    bert = Bert.from_pretrained(encoder)
    add_adapter(bert, "a", AdapterConfig())
    add_adapter(bert, "b", AdapterConfig(layer_norms=True))
    say = r"LayerNorms of their own \(layer_norms\) cannot be fused: b$"
    for names in (["a", "b"], ["b"]):
        with pytest.raises(ValueError, match=say):
            add_fusion(bert, names)


def test_houlsby_s_recipe_is_their_code_s(encoder):
    """adapter-bert: tanh-GELU, initial weights of σ = 1e-3, LayerNorms trained."""
    bert = Bert.from_pretrained(encoder)
    add_adapter(bert, "a", AdapterConfig.houlsby_recipe())
    config, modules = find_adapter(bert, "a")
    assert config.init_weights == "houlsby_code"
    adapters = [module for _, _, module in modules if not isinstance(module, torch.nn.LayerNorm)]
    assert len(adapters) == 4 and len(modules) == 4 + 5
    x = torch.linspace(-3, 3, 99)
    tanh = 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    assert torch.allclose(adapters[0].act(x), tanh, atol=1e-6)
