"""variants.folding: the folded fusion computes what the fusion does, which stays as it is. (Every
kind is folded in test_kinds.py, and other mixtures of adapters, with masks, in test_masking.py.)"""

import pytest
import torch

from fusion import fusion_weights, save_fusion
from reference import FUSIONS, difference, run, with_fusion
from variants.folding import fold


@pytest.mark.parametrize("directory", FUSIONS)
def test_folded_is_the_fusion(directory, expected):
    bert, inputs = with_fusion(directory).double(), expected[directory.split("/")[0]]
    before = {name: (p, p.clone(), p.requires_grad) for name, p in bert.named_parameters()}
    folded = fold(bert)
    assert difference(run(folded, inputs), run(bert, inputs)) <= 1e-10
    s, folded_s = fusion_weights(bert), fusion_weights(folded)
    assert s.keys() == folded_s.keys()
    assert all(difference(s[key], folded_s[key]) <= 1e-10 for key in s)
    # nothing is held twice
    for name, p in bert.named_parameters():
        parameter, value, requires_grad = before[name]
        assert p is parameter and torch.equal(p, value) and p.requires_grad == requires_grad
    assert all(p is before[name][0] for name, p in folded.named_parameters())
    with pytest.raises(ValueError, match="folded"):
        save_fusion(folded, "never-written")
