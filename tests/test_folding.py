"""variants.folding: the folded fusion is the one that was folded, which stays as it is. (Its
outputs are also compared for every kind in test_kinds.py, and under masks in test_masking.py.)"""

import pytest
import torch
from torch import nn

from adapter import add_adapter
from fusion import add_fusion, fusion_weights, save_fusion
from reference import difference, encoder
from test_fusion import MIXTURES
from variants.folding import fold


@pytest.mark.parametrize("configs", MIXTURES.values(), ids=MIXTURES)
def test_folded_is_textbook(configs):
    torch.manual_seed(0)
    bert = encoder("bert").double()
    for i, config in enumerate(configs):
        add_adapter(bert, f"adapter {i}", config)
    add_fusion(bert, [f"adapter {i}" for i in range(len(configs))])
    for name, parameter in bert.named_parameters():
        if ".adapters." in name or ".fusion." in name:
            nn.init.normal_(parameter, std=0.3)
    before = {name: (p, p.clone(), p.requires_grad) for name, p in bert.named_parameters()}
    folded, ids = fold(bert), torch.randint(5, 40, (4, 9))
    with torch.no_grad():
        assert difference(bert(ids), folded(ids)) <= 1e-10
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
