"""variants.masking: fused adapters that take no part."""

from functools import partial

import pytest
import torch

from adapter import AdapterConfig
from bert import Bert
from fusion import Fusion, fusion_weights, fusions
from reference import difference
from test_fusion import fused
from variants.masking import mask

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
