"""A fork's own kinds of adapters and fusions: what must not go wrong in silence."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from adapter import (
    ADAPTERS,
    ARCHITECTURES,
    Adapter,
    AdapterConfig,
    adapter_modules,
    add_adapter,
    load_adapter,
    register,
    save_adapter,
)
from bert import Bert
from conftest import IDS, MASK
from experiments import evaluate, prune, publish
from experiments.load_run import load_run
from fusion import FUSIONS, Fusion, add_fusion, fusions, load_fusion, save_fusion
from fusion import register as register_fusion
from variants.houlsby import HoulsbyRecipeConfig
from variants.pal import PALConfig


class TopFusion(Fusion):
    """Only the k largest scores count; a gate of its own scales the result."""

    file_tag = {"kind": "top"}
    config_defaults = {"k": 1}

    def __init__(self, name, adapter_names, hidden_size, dropout, **config):
        super().__init__(name, adapter_names, hidden_size, dropout, **config)
        self.gate = nn.Linear(hidden_size, 1)

    def attend(self, scores):
        least = scores.topk(self.config["k"], -1).values[..., -1:]
        return super().attend(scores.masked_fill(scores < least, -torch.inf))

    def compose(self, h, adapters, layer_input=None):
        return self.gate(h).sigmoid() * super().compose(h, adapters, layer_input)


@pytest.fixture(autouse=True, scope="module")
def registered():
    """What is registered here is forgotten after these tests."""
    register_fusion("top", TopFusion)
    yield
    del FUSIONS["top"]


def new_bert(encoder, names="ab", **changes):
    torch.manual_seed(0)
    bert = Bert.from_pretrained(encoder)
    for name in names:
        add_adapter(bert, name, AdapterConfig(reduction_factor=4, **changes))
    return bert


def test_a_kind_replaces_no_other():
    before = dict(ARCHITECTURES), dict(ADAPTERS), dict(FUSIONS)
    second_pal = type("SecondPAL", (PALConfig,), {})
    other_pfeiffer = type("Second", (AdapterConfig,), {"architecture": "second"})
    for name, kind in (
        ("pal", second_pal),
        ("pfeiffer", other_pfeiffer),
        ("pfeiffer", HoulsbyRecipeConfig),  # which has a name already
    ):
        with pytest.raises(ValueError, match=kind.__name__):
            register(name, kind)
    for name, kind, say in (
        ("attention", TopFusion, "--fusion attention is already registered for Fusion"),
        ("other", type("Other", (Fusion,), {}), "Other has the file_tag of Fusion"),
    ):
        with pytest.raises(ValueError, match=say):
            register_fusion(name, kind)
    assert before == (ARCHITECTURES, ADAPTERS, FUSIONS)


@dataclass(frozen=True)
class CountingConfig(AdapterConfig):
    """Trains U alone, and has a buffer."""

    architecture = "counting"

    def make_modules(self, bert):
        adapter = Adapter(self, bert.config.hidden_size, 4)
        adapter.register_buffer("steps", torch.zeros(1))
        return [((0, "output"), bert.layers[0].output_add_norm, adapter)]

    def tensor_names(self, module):
        return super(AdapterConfig, self).tensor_names(module)  # of all parameters and buffers

    def trainable_parameters(self, module):
        return [*module.up.parameters()]


def test_a_part_that_stays_frozen_and_a_buffer_are_saved(encoder, tmp_path, monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "counting", CountingConfig)
    bert = new_bert(encoder, "")
    add_adapter(bert, "a", CountingConfig())
    trained = [name.split(".a.")[1] for name, p in bert.named_parameters() if p.requires_grad]
    assert trained == ["up.weight", "up.bias"]
    adapter_modules(bert, "a")[1][0][2].steps += 3
    save_adapter(bert, "a", tmp_path)
    again = new_bert(encoder, "")
    load_adapter(again, tmp_path)
    ours, theirs = (b.layers[0].output_add_norm.adapters["a"].state_dict() for b in (bert, again))
    assert theirs["steps"] == 3 and all(torch.equal(ours[name], theirs[name]) for name in ours)
    forgetful = {"adapter_up.weight": "up.weight"}
    monkeypatch.setattr(CountingConfig, "tensor_names", lambda self, module: forgetful)
    with pytest.raises(ValueError, match="tensor_names of CountingConfig omits"):
        save_adapter(bert, "a", tmp_path)


def test_all_options_of_a_fusion_decide(encoder, tmp_path, monkeypatch):
    bert = new_bert(encoder, "abc")
    add_fusion(bert, "abc", TopFusion, k=2)
    for _, one in fusions(bert):
        nn.init.normal_(one.gate.weight, std=0.5)
    save_fusion(bert, tmp_path / "two")
    again = new_bert(encoder, "abc")
    load_fusion(again, tmp_path / "two")
    assert {type(one) for _, one in fusions(again)} == {TopFusion}
    assert torch.equal(again(IDS, None, MASK), bert(IDS, None, MASK))
    assert ((fusions(again)[0][1].weights > 0).sum(-1) == 2).all()

    class Unnamed(Fusion):
        file_tag = {"by": 2}

    add_fusion(bert, "abc", Unnamed)
    save_fusion(bert, tmp_path / "unnamed")
    with pytest.raises(ValueError, match="a fusion with by = 2 is not supported"):
        load_fusion(bert, tmp_path / "unnamed")  # it is not the paper's with another field
    monkeypatch.setitem(FUSIONS, "unnamed", Unnamed)
    load_fusion(bert, tmp_path / "unnamed")
    assert {type(one) for _, one in fusions(bert)} == {Unnamed}
    with pytest.raises(ValueError, match="TopFusion has no field 'kk', its fields: k"):
        add_fusion(bert, "abc", TopFusion, kk=2)


def test_what_the_last_adapter_decides_is_said(encoder, capsys):
    """As in the reference, the last adapter's configuration says what all of them read."""
    bert = new_bert(encoder, "a", original_ln_before=False)
    add_adapter(bert, "b", AdapterConfig(reduction_factor=8))
    add_fusion(bert, "ab")
    ab, said = bert(IDS, None, MASK), capsys.readouterr().out
    assert said.startswith(
        "note: the adapters differ in original_ln_before (False in a, True in b):"
    )
    assert said.count("\n") == 1  # nothing of the bottleneck's size
    add_fusion(bert, "ba")
    assert not torch.allclose(bert(IDS, None, MASK), ab, atol=1e-3)


def test_commands_with_a_kind_that_is_not_adapterhub_s(launch, runs, tmp_path, refused):
    """It is trained and evaluated; publish and prune name it."""
    out, adapters = tmp_path / "run", [runs / "rte", runs / "sst2"]
    words = "--stage fusion --task rte --epochs 1 --fusion top --fusion-config k=2"
    result = launch(words, adapters=adapters, out=out)
    assert [one.config for _, one in fusions(load_run(out).bert)] == [{"k": 2}] * 2
    assert evaluate.main([str(out), "--device", "cpu"])["accuracy"] == result["accuracy"]
    words, kind = [out, "--out", tmp_path / "out"], "fusions like this one (TopFusion)"
    refused(words, f"AdapterHub's library has no {kind}", main=publish.main)
    refused([*words, "--keep", "1"], f"{kind} cannot be pruned", main=prune.main)
    assert not (tmp_path / "out").exists()
