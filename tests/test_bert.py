"""The encoder: its inputs, its shorter ways, and its size."""

import pytest
import torch

from adapter import activate, load_adapter
from bert import Bert, BertConfig, attention
from reference import ADAPTERS, FIELDS, FUSIONS, GOLDEN, difference, encoder, run, with_fusion


@pytest.mark.parametrize("directory", [*ADAPTERS[:3], *FUSIONS])
def test_cls_only_is_the_first_token(directory, expected):
    name = directory.split("/")[0]
    bert = with_fusion(directory) if directory in FUSIONS else encoder(name)
    if directory in ADAPTERS:
        activate(bert, load_adapter(bert, GOLDEN / directory))
    first = bert(*(expected[name][field] for field in FIELDS), cls_only=True)
    assert difference(first, run(bert, expected[name])[:, :1]) <= 1e-5


def test_attention_in_training_is_the_one_in_evaluation():
    """They are written differently on a CPU; with a dropout of almost nothing they must agree."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 5, 4, 7, 8, dtype=torch.float64)
    mask = (torch.arange(7) < torch.tensor([1, 3, 7, 6, 2])[:, None])[:, None, None]
    for m in (mask, None):
        assert difference(attention(q, k, v, m, 1e-9), attention(q, k, v, m, 0.0)) <= 1e-8


def test_attention_can_be_replaced():
    """As a fork does for ALiBi, say: what `Layer.attention` gets, and that its result is used."""
    bert, ids = encoder("bert"), torch.tensor([[2, 7, 8, 3], [2, 9, 3, 0]])
    before, seen = bert(ids, None, ids != 0), []

    def mean(q, k, v, mask):
        seen.append((q.shape, k.shape, v.shape, mask.shape))
        return v.mean(2, keepdim=True).expand(q.shape)

    for layer in bert.layers:
        layer.attention = mean
    assert not torch.allclose(bert(ids, None, ids != 0), before, atol=1e-3)
    heads = bert.config.num_attention_heads
    shape = (2, heads, 4, bert.config.hidden_size // heads)
    assert seen == [(shape, shape, shape, (2, 1, 1, 4))] * len(bert.layers)


def test_defaults_of_the_inputs(expected):
    """Without token types all are 0, without a mask all tokens are real."""
    bert, ids = encoder("bert"), torch.tensor([[2, 7, 8, 3]])
    assert torch.equal(bert(ids), bert(ids, torch.zeros_like(ids), torch.ones_like(ids)))
    bert(torch.ones(1, 24, dtype=torch.long))
    with pytest.raises(ValueError, match="25 tokens"):
        bert(torch.ones(1, 25, dtype=torch.long))
    with pytest.raises(ValueError, match="23 tokens"):  # positions 2 to 23
        encoder("roberta")(torch.ones(1, 23, dtype=torch.long))


def test_base_sizes():
    """BERT-base without pooler."""
    with torch.device("meta"):
        bert = Bert(BertConfig())
    assert sum(parameter.numel() for parameter in bert.parameters()) == 108_891_648
