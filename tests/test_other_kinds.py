"""A fork's own kinds of adapters and fusions: what must not go wrong in silence; and what the
experiments cannot do with them is refused in one line that names the kind."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from adapter import (
    ADAPTERS,
    KINDS,
    Adapter,
    AdapterConfig,
    add_adapter,
    find_adapter,
    load_adapter,
    register,
    save_adapter,
)
from bert import Bert
from conftest import IDS, MASK, cli
from experiments import evaluate, prune, publish
from experiments.load_run import load_run
from fusion import FUSIONS, Fusion, add_fusion, fusions, load_fusion, save_fusion
from fusion import register as register_fusion
from variants.pal import PALConfig


@dataclass(frozen=True)
class ForkConfig(AdapterConfig):
    """A bottleneck adapter under another name."""

    architecture = "fork"

    @classmethod
    def fork(cls, **changes):
        return cls(**changes)


class EvenFusion(Fusion):
    """Every adapter has the same weight, whatever the scores."""

    options = {"kind": "even"}

    def attend(self, scores):
        return super().attend(0 * scores)


class TopFusion(Fusion):
    """Only the k largest scores count; a gate of its own scales the result."""

    options = {"kind": "top"}
    config = {"k": 1}

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
    before = [(table, dict(table)) for table in (ADAPTERS, KINDS, FUSIONS)]
    register(ForkConfig, "fork")
    register_fusion("even", EvenFusion)
    register_fusion("top", TopFusion)
    yield
    for table, content in before:
        table.clear()
        table.update(content)


def new_bert(encoder, names="ab", **changes):
    torch.manual_seed(0)
    bert = Bert.from_pretrained(encoder)
    for name in names:
        add_adapter(bert, name, AdapterConfig(reduction_factor=4, **changes))
    return bert


# --------------------------------------------------------------------------------------------------
# What would go wrong in silence


def test_a_kind_replaces_no_other():
    before = dict(KINDS), dict(ADAPTERS), dict(FUSIONS)

    class WithoutName(AdapterConfig):
        pass

    class SecondPAL(PALConfig):
        pass

    class Second(ForkConfig):
        architecture = "second"

    for kind, name in ((WithoutName, "x"), (SecondPAL, "x"), (Second, "pfeiffer")):
        with pytest.raises(ValueError, match=kind.__name__):
            register(kind, *([name] if hasattr(kind, name) else []))
    for name, kind in (("attention", EvenFusion), ("other", type("Other", (Fusion,), {}))):
        with pytest.raises(ValueError, match=kind.__name__):
            register_fusion(name, kind)
    assert before == (KINDS, ADAPTERS, FUSIONS)


@dataclass(frozen=True)
class OutsideConfig(AdapterConfig):
    """Its slots are no submodules of the encoder."""

    architecture = "outside"

    def modules(self, bert):
        slot = bert.more_slots[0, "outside"] = nn.Module()
        slot.adapters, slot.fusion, slot.active = nn.ModuleDict(), None, None
        return [((0, "outside"), slot, Adapter(self, bert.config.hidden_size, 2))]


def test_a_slot_that_the_encoder_does_not_own(encoder):
    bert = new_bert(encoder, "")
    with pytest.raises(ValueError, match=r"\(0, 'outside'\) of adapter 'a' is no submodule"):
        add_adapter(bert, "a", OutsideConfig())
    assert not any(slot.adapters for _, slot in bert.slots())


class Stacked(Adapter):
    """A frozen adapter, of a language say, under a new one; it counts its steps in a buffer."""

    def __init__(self, config, hidden_size, r):
        super().__init__(config, hidden_size, r)
        self.language = nn.Linear(hidden_size, hidden_size)
        self.register_buffer("steps", torch.zeros(1))

    def z(self, h, layer_input=None):
        return super().z(self.language(h))


@dataclass(frozen=True)
class StackedConfig(ForkConfig):
    architecture = "stacked"

    def modules(self, bert):
        d, slot = bert.config.hidden_size, bert.layers[0].output_add_norm
        return [((0, "output"), slot, Stacked(self, d, 4))]

    def tensor_names(self, module):
        return super(AdapterConfig, self).tensor_names(module)  # of all parameters and buffers

    def trained(self, module):
        return [*module.down.parameters(), *module.up.parameters()]


def test_a_part_that_stays_frozen_and_a_buffer_are_saved(encoder, tmp_path, monkeypatch):
    monkeypatch.setitem(KINDS, "stacked", StackedConfig)
    bert = new_bert(encoder, "")
    add_adapter(bert, "a", StackedConfig())
    trained = [name.split(".a.")[1] for name, p in bert.named_parameters() if p.requires_grad]
    assert trained == ["down.weight", "down.bias", "up.weight", "up.bias"]
    find_adapter(bert, "a")[1][0][2].steps += 3
    save_adapter(bert, "a", tmp_path)
    again = new_bert(encoder, "")
    load_adapter(again, tmp_path)
    ours, theirs = (b.layers[0].output_add_norm.adapters["a"].state_dict() for b in (bert, again))
    assert theirs["steps"] == 3 and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not Stacked.low_rank and Adapter.low_rank  # its z is another

    forgetful = {"adapter_up.weight": "up.weight"}
    monkeypatch.setattr(StackedConfig, "tensor_names", lambda self, module: forgetful)
    with pytest.raises(ValueError, match="tensor_names of StackedConfig forgets"):
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
    assert [one.config for _, one in fusions(again)] == [{"k": 2}] * 2
    assert torch.equal(again(IDS, None, MASK), bert(IDS, None, MASK))
    assert ((fusions(again)[0][1].weights > 0).sum(-1) == 2).all()

    class Wide(Fusion):  # kinds that differ only in an option that cannot be chosen
        options = {"kind": "wide", "by": 2}

    class Wider(Fusion):
        options = {"kind": "wide", "by": 3}

    class Unnamed(Fusion):
        options = {"by": 2}

    for kind in (Wide, Wider, Unnamed):
        monkeypatch.setitem(FUSIONS, kind.__name__, kind)
    for kind in (Wide, Wider, Unnamed):
        add_fusion(bert, "abc", kind)
        save_fusion(bert, tmp_path / kind.__name__)
        load_fusion(bert, tmp_path / kind.__name__)
        assert {type(one) for _, one in fusions(bert)} == {kind}
    monkeypatch.delitem(FUSIONS, "Unnamed")  # it is not the paper's fusion with another field
    with pytest.raises(ValueError, match="a fusion with by = 2 is not supported"):
        load_fusion(bert, tmp_path / "Unnamed")
    with pytest.raises(ValueError, match="'kk' is no field of TopFusion: k"):
        add_fusion(bert, "abc", TopFusion, kk=2)


def test_a_tensor_that_would_not_be_found_is_not_written(encoder, tmp_path):
    bert = new_bert(encoder, "ab")
    add_fusion(bert, "ab")
    fusions(bert)[0][1].temperature = nn.Parameter(torch.ones(1))  # no word.word
    with pytest.raises(ValueError, match="cannot be called temperature"):
        save_fusion(bert, tmp_path / "fusion")
    assert not (tmp_path / "fusion").exists()


def test_what_the_last_adapter_decides_is_said(encoder, capsys):
    """As in the reference, the last adapter's configuration says what all of them read."""
    bert = new_bert(encoder, "a", original_ln_before=False)
    add_adapter(bert, "b", AdapterConfig(reduction_factor=8))
    add_fusion(bert, "ab")
    ab, said = bert(IDS, None, MASK), capsys.readouterr().out
    assert said.startswith("note: original_ln_before is False in a, True in b: ")
    assert said.count("\n") == 1  # nothing of the bottleneck's size
    add_fusion(bert, "ba")
    assert not torch.allclose(bert(IDS, None, MASK), ab, atol=1e-3)


def test_options_of_a_fusion_on_the_command_line(launch, runs, tmp_path):
    adapters = [runs / "rte", runs / "sst2"]
    words = "--stage fusion --task rte --epochs 1 --fusion top --fusion-config k=2"
    launch(words, adapters=adapters, out=tmp_path / "run")
    bert, _, config = load_run(tmp_path / "run")
    assert [one.config for _, one in fusions(bert)] == [{"k": 2}] * 2
    assert config["fusion_config"] == {"k": 2}


# --------------------------------------------------------------------------------------------------
# What experiments cannot do


@pytest.fixture(scope="module")
def others(launch, runs, registered, tmp_path_factory):
    """Runs: an adapter of the other kind, a fusion of it and another one, the other fusion of
    AdapterHub's adapters."""
    out = tmp_path_factory.mktemp("others")
    for task in ("rte", "sst2"):
        launch(f"--stage adapter --task {task} --adapter fork --epochs 1", out=out / task)
    fuse = "--stage fusion --task rte --epochs 1"
    launch(fuse, out=out / "fused", adapters=[out / "rte", out / "sst2"])
    even = cli("--fusion even", adapters=[runs / "rte", runs / "sst2"])
    launch(fuse, *even, out=out / "even")
    return out


def test_another_kind_is_refused_by_name(others, tmp_path, refused):
    for run, kind in (
        ("rte", "adapters like rte (ForkConfig)"),
        ("fused", "adapters like rte (ForkConfig)"),
        ("even", "fusions like this one (EvenFusion)"),
    ):
        words = [others / run, "--out", tmp_path / "out"]
        refused(words, f"AdapterHub's library has no {kind}", main=publish.main)
        if run != "rte":
            refused([*words, "--keep", "1"], f"{kind} cannot be pruned", main=prune.main)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("run", ["rte", "fused", "even"])
def test_but_it_is_evaluated(others, capsys, run):
    evaluate.main([str(others / run), "--device", "cpu"])
    assert "examples right" in capsys.readouterr().out
