"""variants.masking: fused adapters that take no part, and training on a few of them at a time."""

from functools import partial

import pytest
import torch

from adapter import AdapterConfig
from bert import Bert
from experiments.load_run import load_run
from fusion import Fusion, fusion_weights, fusions
from reference import difference
from test_fusion import fused
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


def attend_without(fusion, masked, scores):
    """Fusion.attend with -inf for some of the scores."""
    out = torch.tensor([name in masked for name in fusion.adapter_names])
    return Fusion.attend(fusion, scores.masked_fill(out, -torch.inf))


@pytest.mark.parametrize("masked", ["a0", "a0 a1", "last", "a1 last"])
@pytest.mark.parametrize("configs", MIXTURES.values(), ids=MIXTURES)
def test_a_mask_is_minus_infinity(configs, masked, encoder):
    """Also of the last adapter, whose configuration says what all of them read."""
    bert = fused(Bert.from_pretrained(encoder), configs).requires_grad_(False)
    masked = masked.replace("last", f"a{len(configs) - 1}").split()
    whole = bert(IDS)
    mask(bert, masked)
    o, s = bert(IDS), fusion_weights(bert)
    folded = fold(bert)
    assert difference(folded(IDS), o) < 1e-10 and torch.equal(fold(folded)(IDS), folded(IDS))
    assert all(difference(fusion_weights(folded)[key], s[key]) < 1e-10 for key in s)
    with pytest.raises(ValueError, match="then fold"):
        mask(folded, ["a1"])
    mask(bert, [])
    with pytest.raises(ValueError, match="run a batch"):  # the last weights are of other masks
        fusion_weights(bert)
    assert torch.equal(bert(IDS), whole) and difference(o, whole) > 1e-3
    for _, fusion in fusions(bert):
        fusion.compose, fusion.attend = fusion.textbook, partial(attend_without, fusion, masked)
    assert difference(bert(IDS), o) < 1e-10
    for key, weights in fusion_weights(bert).items():
        assert difference(weights, s[key]) < 1e-10
        assert (s[key][..., [int(name[1:]) for name in masked]] == 0).all()


# --------------------------------------------------------------------------------------------------
# --adapters-per-batch


def test_a_few_adapters_per_batch(launch, runs, tmp_path, monkeypatch):
    """Every step draws anew, the same in all layers; evaluation is over all; K = N is as without.
    That a resumed run draws the same is tested in test_kinds.py."""
    seen, compose = [], Fusion.compose

    def watched(self, h, adapters, layer_input=None):
        seen.append((self.training, tuple(self.unmasked(self.adapter_names))))
        assert len(adapters) == len(seen[-1][1])
        return compose(self, h, adapters, layer_input)

    def fuse(name, **options):
        adapters = [runs / name for name in ("rte", "sst2", "pick")]
        words = "--stage fusion --task rte --epochs 1 --lr 5e-3 --batch-size 4"
        launch(words, adapters=adapters, out=tmp_path / name, **options)
        return (tmp_path / name / "model_adapter_fusion.safetensors").read_bytes()

    monkeypatch.setattr(Fusion, "compose", watched)
    two = fuse("two", adapters_per_batch=2)
    steps = [names for training, names in seen if training]
    assert steps[::2] == steps[1::2] and len(steps) == 2 * 24  # two layers
    assert all(len(names) == 2 for names in steps) and len(set(steps)) == 3
    assert {names for training, names in seen if not training} == {("rte", "sst2", "pick")}
    bert, _, config = load_run(tmp_path / "two")
    assert config["adapters_per_batch"] == 2
    assert all(not fusion.masked for _, fusion in fusions(bert))
    assert fuse("three", adapters_per_batch=3) == fuse("all") != two
    with pytest.raises(ValueError, match="must be in 2 .. 3"):
        fuse("four", adapters_per_batch=4)
