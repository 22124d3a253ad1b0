"""variants.masking: fused adapters that take no part, and training on a few of them at a time."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import child
import fusion as fusion_module
from adapter import AdapterConfig, add_adapter
from bert import Bert
from conftest import assert_equal
from experiments.load_run import load_run
from fusion import add_fusion, fusion_regularization, fusion_weights, fusions
from variants.folding import fold
from variants.masking import mask

# --------------------------------------------------------------------------------------------------
# Masks

MIXTURES = {
    "different": [
        AdapterConfig.pfeiffer(reduction_factor=2, original_ln_before=False),
        AdapterConfig.bapna(reduction_factor=4),
        AdapterConfig.pfeiffer(reduction_factor=4, leave_out=(1,)),
        AdapterConfig.pfeiffer(residual_before_ln=False, non_linearity="gelu"),
    ],
    "both places": [AdapterConfig.houlsby(reduction_factor=r) for r in (2, 4, 8)],
}
IDS = torch.tensor([[2, 5, 6, 7, 3], [2, 9, 3, 11, 12]])


def fused(encoder, configs):
    """In float64, with weights at which an error shows."""
    torch.manual_seed(0)
    bert = Bert.from_pretrained(encoder).double()
    for i, config in enumerate(configs):
        add_adapter(bert, f"a{i}", config)
    add_fusion(bert, [f"a{i}" for i in range(len(configs))])
    for name, parameter in bert.named_parameters():
        if ".adapters." in name or ".fusion." in name:
            nn.init.normal_(parameter, std=0.3)
    return bert.eval()


def literal(fusion, masked):
    """Fusion.compose as the textbook form, with -inf for some of the scores."""

    def compose(h, adapters, layer_input=None):
        normed = [adapter.norm_before(h) if adapter.norm_before else h for adapter in adapters]
        pairs = zip(adapters, normed, strict=True)
        z = torch.stack([adapter.up(adapter.act(adapter.down(x))) for adapter, x in pairs], 2)
        scores = torch.einsum("btd,btnd->btn", fusion.query(h), fusion.key(z))
        out = [n for n, name in enumerate(fusion.adapter_names) if name in masked]
        scores[..., out] = -torch.inf
        s = scores.softmax(-1)
        fusion.weights = s
        return torch.einsum("btn,btnd->btd", s, fusion.value(z))

    return compose


@pytest.mark.parametrize("masked", ["a0", "a0 a1", "last", "a1 last"])
@pytest.mark.parametrize("configs", MIXTURES.values(), ids=MIXTURES)
def test_a_mask_is_minus_infinity(configs, masked, encoder, monkeypatch):
    """Also of the last adapter, whose configuration says what all of them read."""
    bert, masked = fused(encoder, configs), masked.replace("last", f"a{len(configs) - 1}").split()
    with torch.no_grad():
        whole = bert(IDS)
        mask(bert, masked)
        o, s = bert(IDS), fusion_weights(bert)
        folded = fold(bert)
        assert (folded(IDS) - o).abs().max() < 1e-10 and torch.equal(fold(folded)(IDS), folded(IDS))
        with pytest.raises(ValueError, match="not for training"):
            fusion_regularization(folded)
        assert all((fusion_weights(folded)[key] - s[key]).abs().max() < 1e-10 for key in s)
        with pytest.raises(ValueError, match="then fold"):
            mask(folded, ["a1"])
        mask(bert, [])
        with pytest.raises(ValueError, match="run a batch"):  # the last weights are of other masks
            fusion_weights(bert)
        assert torch.equal(bert(IDS), whole)
        for _, fusion in fusions(bert):
            monkeypatch.setattr(fusion, "compose", literal(fusion, masked))
        assert (bert(IDS) - o).abs().max() < 1e-10
    for key, weights in fusion_weights(bert).items():
        assert (weights - s[key]).abs().max() < 1e-10 and (s[key].sum(-1) - 1).abs().max() < 1e-10
        assert (s[key][..., [int(name[1:]) for name in masked]] == 0).all()
    assert (o - whole).abs().max() > 1e-3


# --------------------------------------------------------------------------------------------------
# --adapters-per-batch


def test_a_few_adapters_per_batch(launch, runs, tmp_path, monkeypatch):
    """Every step draws anew, the same in all layers; evaluation is over all; K = N is as
    without."""
    seen, compose = [], fusion_module.Fusion.compose

    def watched(self, h, adapters, layer_input=None):
        seen.append((self.training, tuple(self.unmasked(self.adapter_names))))
        assert len(adapters) == len(seen[-1][1])
        return compose(self, h, adapters, layer_input)

    words = "--stage fusion --task rte --epochs 1 --lr 5e-3 --batch-size 4"
    adapters = [runs / name for name in ("rte", "sst2", "pick")]
    monkeypatch.setattr(fusion_module.Fusion, "compose", watched)
    launch(words, adapters=adapters, adapters_per_batch=2, out=tmp_path / "two")
    steps = [names for training, names in seen if training]
    assert steps[::2] == steps[1::2] and len(steps) == 2 * 24  # two layers
    assert all(len(names) == 2 for names in steps) and len(set(steps)) == 3
    assert {names for training, names in seen if not training} == {("rte", "sst2", "pick")}
    config = json.loads((tmp_path / "two" / "config.json").read_text())
    assert config["adapters_per_batch"] == 2
    assert all(not fusion.masked for _, fusion in fusions(load_run(tmp_path / "two").bert))

    launch(words, adapters=adapters, adapters_per_batch=3, out=tmp_path / "three")
    launch(words, adapters=adapters, out=tmp_path / "all")
    file = "model_adapter_fusion.safetensors"
    two, three, every = (load_file(tmp_path / name / file) for name in ("two", "three", "all"))
    assert all(torch.equal(three[name], every[name]) for name in every)
    assert any(not torch.equal(two[name], every[name]) for name in every)
    with pytest.raises(ValueError, match="must be in 2 .. 3"):
        launch(words, adapters=adapters, adapters_per_batch=4, out=tmp_path / "four")


def test_a_resumed_run_draws_the_same(launch, runs, tmp_path, at_step):
    words = "--stage fusion --task rte --epochs 2 --lr 5e-3 --batch-size 8 --save-minutes 0"
    given = {"adapters": [runs / name for name in ("rte", "sst2", "pick")], "adapters_per_batch": 2}
    launch(words, **given, out=tmp_path / "whole")

    at_step(20, child.stop)  # in the second epoch: one has 12 steps
    with pytest.raises(KeyboardInterrupt):
        launch(words, **given, out=tmp_path / "run")
    launch(f"{words} --resume", **given, out=tmp_path / "run")
    assert_equal(tmp_path / "run", tmp_path / "whole")
