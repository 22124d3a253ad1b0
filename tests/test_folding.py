"""variants.folding: the folded fusion is the textbook one, and the reference library's."""

import pytest
import torch

from fusion import fusion_weights, save_fusion
from reference import FUSIONS, difference, encoder, run, with_fusion
from test_fusion import MIXTURES, fused
from variants.folding import fold


@pytest.mark.parametrize("configs", MIXTURES.values(), ids=MIXTURES)
def test_folded_is_textbook(configs):
    bert = fused(encoder("bert"), configs)
    before = {name: (p, p.clone(), p.requires_grad) for name, p in bert.named_parameters()}
    folded = fold(bert)
    ids = torch.randint(5, 40, (4, 9))
    with torch.no_grad():
        o, folded_o = bert(ids), folded(ids)
    assert difference(o, folded_o) <= 1e-10
    assert o.std() > 0.1  # the comparison is of something
    for (key, s), (folded_key, folded_s) in zip(
        fusion_weights(bert).items(), fusion_weights(folded).items(), strict=True
    ):
        assert key == folded_key and difference(s, folded_s) <= 1e-10
    # the encoder that was folded is as it was, and nothing is held twice
    for name, p in bert.named_parameters():
        assert (
            p is before[name][0]
            and torch.equal(p, before[name][1])
            and p.requires_grad == before[name][2]
        )
    assert all(p is before[name][0] for name, p in folded.named_parameters())
    with pytest.raises(ValueError, match="folded"):
        save_fusion(folded, "never-written")


@pytest.mark.parametrize("directory", FUSIONS)
def test_folded_is_the_reference_s(directory, expected):
    bert, inputs = with_fusion(directory), expected[directory.split("/")[0]]
    assert difference(run(fold(bert), inputs), run(bert, inputs)) <= 1e-5
