"""The presets, --adapter-config, and, with PEER_PYTHON (tests/reference.py), every architecture of
the paper's grid beside the reference library."""

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from adapter import (
    Adapter,
    AdapterConfig,
    activate,
    adapter_modules,
    add_adapter,
    load_adapter,
    save_adapter,
)
from experiments.load_run import load_run
from reference import FIELDS, ask_peer, difference, encoder, needs_peer, run
from variants.houlsby import HoulsbyRecipeConfig


def test_fields_of_the_preset_are_changed(launch, tmp_path):
    words = "ln_after=true residual_before_ln=post_add leave_out=[1] non_linearity=swish"
    command = "--stage adapter --task rte --epochs 1 --reduction-factor 4 --adapter bapna"
    launch(f"{command} --adapter-config {words} mh_adapter=true", out=tmp_path / "run")
    run = load_run(tmp_path / "run")
    changes = {"mh_adapter": True, "ln_after": True, "residual_before_ln": "post_add"}
    changes |= {"non_linearity": "swish", "leave_out": [1]}
    assert run.bert.adapters["rte"] == AdapterConfig.bapna(**changes, reduction_factor=4)
    assert [*adapter_modules(run.bert, "rte")] == [(0, "attention"), (0, "output")]


def z(adapter, h):
    return adapter.up(adapter.act(adapter.down(h)))


def test_the_presets_are_what_their_papers_write():
    torch.manual_seed(0)
    norm, (f, x) = nn.LayerNorm(32), torch.randn(2, 2, 5, 32)
    presets = AdapterConfig.pfeiffer, AdapterConfig.houlsby, AdapterConfig.bapna
    adapters = nn.ModuleList(Adapter(preset(), 32, 4) for preset in presets)
    for p in adapters.parameters():
        nn.init.normal_(p)
    pfeiffer, houlsby, bapna = adapters
    h = norm(f + x)
    for adapter, expected in (
        (pfeiffer, norm(f + z(pfeiffer, h) + x)),
        (houlsby, norm(f + z(houlsby, f) + x)),
        (bapna, h + z(bapna, bapna.norm_before(h))),
    ):
        assert torch.allclose(adapter(f, x, norm), expected, atol=1e-5)


TWICE = list(itertools.product((True, False), repeat=2))  # before, after
CHOICES = {  # fields, and the values that they take together
    "mh_adapter output_adapter": [(False, True), (True, False), (True, True)],
    "original_ln_before original_ln_after": TWICE,
    "ln_before ln_after": TWICE,
    "residual_before_ln": [(True,), (False,), ("post_add",)],
    "adapter_residual_before_ln": [(False,), (True,)],
    "non_linearity reduction_factor": [("swish", 8)],
}
GRID = [
    dict(zip(" ".join(CHOICES).split(), itertools.chain(*values), strict=True))
    for values in itertools.product(*CHOICES.values())
]


def has_an_effect(config):
    """Whether all of its fields have one: a residual before a LayerNorm that is not there, and f
    instead of what is read, where that is f, are the same as their opposite."""
    reads_f = not config.residual_before_ln and not config.original_ln_before
    return not reads_f and not (config.adapter_residual_before_ln and not config.ln_after)


@torch.no_grad()
@needs_peer
def test_every_architecture_of_the_grid(expected, tmp_path):
    """In float64; two outputs are the same only where a field has no effect."""
    bert, inputs = encoder("bert").double(), {name: expected["bert"][name] for name in FIELDS}
    save_file(inputs, tmp_path / "inputs.safetensors")
    add_adapter(bert, "own", HoulsbyRecipeConfig())
    save_adapter(bert, "own", tmp_path / "own")
    plan = {"encoder": bert.directory, "configs": GRID, "cannot_read": tmp_path / "own"}
    (tmp_path / "plan.json").write_text(json.dumps(plan, default=str))
    ask_peer("peer.py", "grid", tmp_path)
    theirs = load_file(tmp_path / "grid.safetensors")
    refused, meaningful = json.loads((tmp_path / "refused.json").read_text()), []
    # without the word for the architecture it would load the rest, and compute something else
    assert refused["own"] == "KeyError: 'HoulsbyRecipeConfig'"
    for number, options in enumerate(GRID):
        if str(number) in refused:  # f + x is the input of a LayerNorm that is off
            assert "UnboundLocalError" in refused[str(number)]
            with pytest.raises(ValueError, match="'post_add' needs original_ln_before"):
                AdapterConfig(**options)
            continue
        activate(bert, name := load_adapter(bert, tmp_path / f"a{number}"))
        a, b = run(bert, inputs), theirs[str(number)]
        assert bert.adapters[name] == AdapterConfig(**options)
        assert a.dtype == b.dtype == torch.float64
        assert difference(a, b) <= 1e-10 * b.abs().max() and b.abs().max() > 0.1, options
        if has_an_effect(AdapterConfig(**options)):
            meaningful.append(b.numpy().round(6).tobytes())
    every = {h.numpy().round(6).tobytes() for h in theirs.values()}
    assert len(theirs) == 240 and len(meaningful) == len({*meaningful}) == len(every)
