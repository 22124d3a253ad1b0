"""The encoder: its inputs, and its attention."""

from dataclasses import dataclass

import pytest
import torch

from bert import ENCODERS, BertConfig, attention
from reference import difference, encoder


def test_attention_in_training_is_the_one_in_evaluation():
    """They are written differently on a CPU; with a dropout of almost nothing they must agree."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 5, 4, 7, 8, dtype=torch.float64)
    mask = (torch.arange(7) < torch.tensor([1, 3, 7, 6, 2])[:, None])[:, None, None]
    for m in (mask, None):
        assert difference(attention(q, k, v, m, 1e-9), attention(q, k, v, m, 0.0)) <= 1e-8


def test_inputs():
    """Without token types all are 0, without a mask all tokens are real; no more than fit."""
    bert, ids = encoder("bert"), torch.tensor([[2, 7, 8, 3]])
    assert torch.equal(bert(ids), bert(ids, torch.zeros_like(ids), torch.ones_like(ids)))
    for name, longest in (("bert", 24), ("roberta", 22)):  # of 24, RoBERTa's first position is 2
        encoder(name)(torch.full((1, longest), 5))
        with pytest.raises(ValueError, match=f"{longest + 1} tokens"):
            encoder(name)(torch.full((1, longest + 1), 5))


def test_configurations():
    """RoBERTa's padding where config.json does not say it, and a fork's fields, of any value."""
    assert ENCODERS["roberta"].config_class.from_json("", {}).max_length == 510

    @dataclass
    class Config(BertConfig):
        rope_theta: float = 10000.0
        memory_tokens: int = 0

    assert Config.from_json("", {"rope_theta": 500.0}) == Config(rope_theta=500.0)
