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
    "bottom": AdapterConfig(
        mh_adapter=True, output_adapter=False, ln_before=True, ln_after=True, layer_norms=True
    ),
}


# --------------------------------------------------------------------------------------------------
# Initialisation


def distance(sample, cdf):
    """Kolmogorov-Smirnov: the largest difference between the empirical distribution of a sample and
    a distribution."""
    x, _ = sample.double().flatten().sort()
    steps = torch.arange(len(x) + 1, dtype=torch.float64) / len(x)
    return max((cdf(x) - steps[:-1]).abs().max(), (cdf(x) - steps[1:]).abs().max()).item()


def normal(x, std):
    return 0.5 * (1 + torch.erf(x / std / math.sqrt(2)))


def truncated(x):
    """N(0, 0.01), cut at two standard deviations"""
    low, high = (normal(torch.tensor(end, dtype=torch.float64), 0.01) for end in (-0.02, 0.02))
    return ((normal(x, 0.01) - low) / (high - low)).clamp(0, 1)


def test_initial_weights():
    torch.manual_seed(0)
    bert = Bert(BertConfig(10, 256, 1, 2, 8, max_position_embeddings=4))
    add_adapter(bert, "bert", AdapterConfig(reduction_factor=2))
    add_adapter(bert, "houlsby", AdapterConfig(reduction_factor=2, init_weights="houlsby"))
    laws = {"bert": lambda x: normal(x, 0.02), "houlsby": truncated}
    for name, adapter in bert.layers[0].output_add_norm.adapters.items():
        for linear in (adapter.down, adapter.up):
            assert not linear.bias.any() and linear.weight.numel() == 2**15
            critical = 1.95 / math.sqrt(
                linear.weight.numel()
            )  # passed once in a thousand draws; the seed is fixed
            for law, cdf in laws.items():
                assert (distance(linear.weight, cdf) < critical) == (law == name)
            assert (linear.weight.abs().max() <= 0.02) == (name == "houlsby")


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
    return {
        key: norm.adapters[name] for key, norm in layer_norm_slots(bert) if name in norm.adapters
    }


def noise(bert, name):
    """Random weights for an adapter and its LayerNorms."""
    own = [p for norm in norms_of(bert, name).values() for p in norm.parameters()]
    own += [
        p
        for _, slot in bert.slots()
        if name in slot.adapters
        for p in slot.adapters[name].parameters()
    ]
    with torch.no_grad():
        for p in own:
            p.add_(torch.randn_like(p), alpha=0.3)


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
        assert torch.equal(norm.weight, norm.adapters["a"].weight) and torch.equal(
            norm.bias, norm.adapters["a"].bias
        ), key
        assert norm.adapters["a"].eps == norm.eps
    trained = {id(p) for p in bert.parameters() if p.requires_grad}
    modules = [
        *own.values(),
        *(slot.adapters["a"] for _, slot in bert.slots() if "a" in slot.adapters),
    ]
    assert trained == {id(p) for module in modules for p in module.parameters()}

    with torch.no_grad():
        for name in ("a", "alone"):
            noise(bert, name)
        for _, slot in other.slots():
            slot.active = "a"
        for (_, slot), (_, ours) in zip(other.slots(), bert.slots(), strict=False):
            if "a" in ours.adapters:
                slot.adapters["a"] = copy.deepcopy(ours.adapters["a"])
        for key, norm in layer_norm_slots(other):
            norm.load_state_dict(own[key].state_dict())
        assert torch.equal(bert(IDS, None, MASK), other(IDS, None, MASK))
        assert (
            bert(IDS, None, MASK)[:, :1] - bert(IDS, None, MASK, cls_only=True)
        ).abs().max() < 1e-5
        activate(bert, "alone")
        alone = bert(IDS, None, MASK)
        activate(bert, None)
        assert torch.equal(bert(IDS, None, MASK), plain) and (alone - plain).abs().max() > 0.1


@pytest.mark.parametrize("shape", SHAPES)
def test_files_with_own_layer_norms(encoder, tmp_path, shape):
    torch.manual_seed(0)
    bert = Bert.from_pretrained(encoder)
    add_adapter(bert, "a", SHAPES[shape])
    noise(bert, "a")
    save_adapter(bert, "a", tmp_path / "a")
    values = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert values["config"]["architecture"] == "layer_norms"  # which adapters 1.3.0 refuses
    tensors = load_file(tmp_path / "a" / "adapter.safetensors")
    names = [name for name in tensors if "layer_norm" in name]
    assert (
        len(names) == 2 * (2 * 2 + 1)
        and "bert.embeddings.adapters.a.adapter_layer_norm.bias" in names
    )
    again = Bert.from_pretrained(encoder)
    activate(again, load_adapter(again, tmp_path / "a", "b"))
    with torch.no_grad():
        assert torch.equal(again(IDS, None, MASK), bert(IDS, None, MASK))
    assert not any(p.requires_grad for p in again.parameters())

    def refused(change, say):
        changed = dict(tensors)
        change(changed)
        save_file(changed, tmp_path / "a" / "adapter.safetensors")
        with pytest.raises(ValueError, match=say) as error:
            load_adapter(again, tmp_path / "a", "c")
        assert "\n" not in str(error.value) and not norms_of(again, "c")
        assert not any("c" in slot.adapters for _, slot in again.slots())

    for name in names:
        place = name.removeprefix("bert.").replace(".adapters.a", "")
        refused(lambda changed, name=name: changed.pop(name), f"{place} is missing")
    refused(
        lambda changed: changed.update({name: torch.zeros(31)}),
        r"is torch.float32 \[31\], here it must be a float \[32\]",
    )
    refused(lambda changed: changed.update({name: torch.full((32,), math.nan)}), "not finite")
    refused(
        lambda changed: changed.update(
            {"bert.embeddings.adapters.a.adapter_up.bias": torch.zeros(32)}
        ),
        "without a place",
    )
    values["config"]["layer_norms"] = False
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(values))
    refused(lambda changed: None, "tensors without a place here: embeddings.adapter_layer_norm")
    values["config"]["layer_norms"] = "yes"
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(values))
    refused(lambda changed: None, "layer_norms must be true or false")


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
    for (key, norm), (_, old) in zip(
        layer_norm_slots(after), layer_norm_slots(before), strict=True
    ):
        assert torch.equal(norm.weight, old.weight), key
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
    """adapter-bert: tanh-GELU, weights from a normal of σ = 1e-3 cut at 2σ, biases 0, LayerNorms
    trained."""
    torch.manual_seed(0)
    bert = Bert.from_pretrained(encoder)
    add_adapter(bert, "a", AdapterConfig.houlsby_recipe(reduction_factor=1))
    adapters = [slot.adapters["a"] for key, slot in bert.slots() if not key[1].endswith("norm")]
    assert len(adapters) == 4 and len(layer_norm_slots(bert)) == 5
    weights = torch.cat(
        [p.detach().flatten() for a in adapters for p in (a.down.weight, a.up.weight)]
    )
    assert (
        weights.abs().max() <= 0.002 and 0.0008 < weights.std() < 0.00092
    )  # 0.88 σ, once cut at 2σ
    assert not any(linear.bias.any() for a in adapters for linear in (a.down, a.up))
    x = torch.linspace(-3, 3, 99)
    tanh = 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    assert torch.allclose(adapters[0].act(x), tanh, atol=1e-6)
