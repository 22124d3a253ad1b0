"""Forks of one file each, beyond the kinds in test_kinds.py: stages of their own, and what must not
go wrong in silence."""

from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from torch import nn

import adapter
import bert
import fusion
import train
from adapter import (
    AdapterConfig,
    BaseAdapterConfig,
    Head,
    adapter_modules,
    add_adapter,
    register,
    save_adapter,
)
from bert import Bert
from conftest import IDS, cli, randomize
from experiments import evaluate
from experiments.load_run import load_run
from fusion import Fusion, add_fusion
from variants.houlsby import HoulsbyRecipeConfig
from variants.pal import PALConfig


@pytest.fixture(autouse=True)
def registries():
    tables = (train.STAGES, adapter.HEADS, adapter.ADAPTERS, adapter.ARCHITECTURES, fusion.FUSIONS)
    with patch.dict(tables[0]), patch.dict(tables[1]), patch.dict(tables[2]):
        with patch.dict(tables[3]), patch.dict(tables[4]):
            yield


def add_stage(build, of="adapter"):
    train.STAGES["own"] = train.Stage("a stage of its own", 5e-3, 2, build, options_of=(of,))


def biases(settings, bert, task, adapters):
    for name, p in bert.own_parameters().items():
        if name.endswith("bias"):
            p.requires_grad_(True)


def adapter_and_biases(settings, bert, task, adapters):
    train.stage_1(settings, bert, task, adapters)
    biases(settings, bert, task, adapters)


def fusion_with_a_new_adapter(settings, bert, task, adapters):
    add_adapter(bert, "own", AdapterConfig.pfeiffer())
    add_fusion(bert, [*adapters, "own"])
    for _, _, module in adapter_modules(bert, "own")[1]:
        module.requires_grad_(True)


@pytest.mark.parametrize("build", [biases, adapter_and_biases, fusion_with_a_new_adapter])
def test_a_stage_of_its_own(build, launch, runs, encoder, tmp_path):
    """What it trains is saved, and evaluated as in training; an encoder's adapter belongs to it."""
    of_fusion, out = build is fusion_with_a_new_adapter, tmp_path / "run"
    add_stage(build, "fusion" if of_fusion else "adapter")
    given = cli(adapters=[runs / "sst2", runs / "pick"]) if of_fusion else []
    result = launch("--stage own --task rte --epochs 2", *given, out=out)
    again = evaluate.main([str(out), "--device", "cpu"])
    assert (again["accuracy"], again["loss"]) == (result["accuracy"], result["dev_loss"])
    if of_fusion:
        assert {path.name for path in (out / "adapters").iterdir()} == {"sst2", "pick", "own"}
        assert not (out / "model.safetensors").exists()  # Θ stays as it is
        return
    before, after = (Bert.from_pretrained(source) for source in (encoder, out))
    assert not torch.equal(before.layers[0].query.bias, after.layers[0].query.bias)
    assert torch.equal(before.layers[0].query.weight, after.layers[0].query.weight)
    if build is adapter_and_biases:
        with pytest.raises(ValueError, match="was trained on an encoder with other weights"):
            launch("--stage fusion --task rte", adapters=out, model=encoder, out=tmp_path / "two")


def a_prompt(settings, bert, task, adapters):
    bert.prompt = nn.Parameter(torch.zeros(3))


def a_frozen_adapter(settings, bert, task, adapters):
    train.stage_1(settings, bert, task, adapters)
    bert.requires_grad_(False)


def an_adapter_elsewhere(settings, bert, task, adapters):
    train.stage_1(settings, bert, task, adapters)
    bert.layers[0].adapters = nn.ModuleDict({"lost": nn.Linear(2, 2)})


class PoolerHead(Head):
    def __init__(self, config, bert_config):
        super().__init__({**config, "use_pooler": True}, bert_config)


LOST = [
    (a_prompt, "does not say what a checkpoint calls prompt"),
    (a_frozen_adapter, "'rte' is neither trained nor one of --adapters"),
    (an_adapter_elsewhere, "adapters.lost.weight would be trained, and no file"),
    (train.stage_1, "head.pooler.weight would be trained, and no file"),
]


@pytest.mark.parametrize("build, message", LOST)
def test_what_cannot_be_saved_is_refused(build, message, launch, tmp_path):
    """Before the first step, with nothing written."""
    add_stage(build)
    adapter.register_head("pooler", PoolerHead)
    head = "pooler" if "pooler" in message else "cls"
    with pytest.raises(ValueError, match=message):
        launch(f"--stage own --task rte --head {head}", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


class Gated(Fusion):
    file_tag = {"kind": "gated"}


def test_a_kind_replaces_no_other():
    second_pal = type("SecondPAL", (PALConfig,), {})
    for register_kind, name, kind in (
        (register, "pal", second_pal),
        (register, "pfeiffer", HoulsbyRecipeConfig),  # which has a name already
        (adapter.register_head, "cls", PoolerHead),
        (fusion.register, "attention", Gated),
        (fusion.register, "other", type("Other", (Fusion,), {})),  # its files are Fusion's
        # this field changes nothing in AdapterHub's files, so these are, too
        (fusion.register, "other", type("Other", (Fusion,), {"file_tag": {"regularization": 0}})),
    ):
        with pytest.raises(ValueError, match=f"{kind.__name__}|{name} "):
            register_kind(name, kind)
    with pytest.raises(ValueError, match="there is already an encoder 'bert'"):
        bert.register(type("SecondBert", (Bert,), {}))


class Twice(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class TwiceConfig(AdapterConfig):
    architecture = "twice"

    def make_modules(self, bert):
        found = super().make_modules(bert)
        for _, _, module in found:
            module.down = Twice(module.down.in_features, module.down.out_features)
        return found


def test_a_layer_of_an_adapter_that_computes_something_else(encoder):
    """The fusion does not take its weights for those of a plain one."""
    register("twice", TwiceConfig)  # a class without a classmethod of this name
    bert = Bert.from_pretrained(encoder)
    for name in "ab":
        add_adapter(bert, name, adapter.ADAPTERS["twice"](reduction_factor=4))
    add_fusion(bert, ["a", "b"])
    randomize(bert, "add_norm")
    slot = bert.layers[0].output_add_norm
    h, adapters = torch.randn(2, 3, bert.config.hidden_size), [*slot.adapters.values()]
    assert torch.allclose(
        slot.fusion.compose(h, adapters), slot.fusion.textbook(h, adapters), atol=1e-4
    )


class Constant(nn.Module):
    """An adapter that is no subclass of Adapter, and knows nothing of its configuration."""

    def __init__(self, hidden_size):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, f, x, norm, layer_input):
        return norm(f + x + self.bias)


@dataclass(frozen=True)
class ConstantConfig(BaseAdapterConfig):
    architecture = "constant"
    cannot_fuse_because = "it has no z"

    def make_modules(self, bert):
        return [(key, slot, Constant(bert.config.hidden_size)) for key, slot in bert.slots()]


def test_an_adapter_from_nothing(launch, tmp_path):
    register("constant", ConstantConfig)
    launch("--stage adapter --task rte --adapter constant --epochs 1", out=tmp_path / "run")
    assert adapter_modules(load_run(tmp_path / "run").bert, "rte")[0] == ConstantConfig()


def test_a_tensor_without_a_name_is_not_left_out(encoder, tmp_path, monkeypatch):
    bert = Bert.from_pretrained(encoder)
    add_adapter(bert, "a", AdapterConfig())
    monkeypatch.setattr(AdapterConfig, "tensor_names", lambda *_: {"adapter_up.bias": "up.bias"})
    with pytest.raises(ValueError, match="tensor_names of AdapterConfig omits"):
        save_adapter(bert, "a", tmp_path)


def test_the_last_adapter_decides_what_all_read(encoder, capsys):
    """As in the reference; where they differ in it, a note says so."""
    bert, outputs = Bert.from_pretrained(encoder), []
    add_adapter(bert, "a", AdapterConfig(original_ln_before=False))
    add_adapter(bert, "b", AdapterConfig(reduction_factor=8))
    for names in ("ab", "ba"):
        torch.manual_seed(0)
        add_fusion(bert, names)
        outputs.append(bert(IDS))
    assert not torch.allclose(*outputs, atol=1e-3)
    assert "differ in original_ln_before (False in a, True in b):" in capsys.readouterr().out
