"""The encoder's inputs."""

import pytest
import torch

from bert import ENCODERS, BertConfig
from reference import encoder


def test_inputs():
    """Without token types all are 0, without a mask all tokens are real; as many as fit."""
    bert, ids = encoder("bert"), torch.tensor([[2, 7, 8, 3]])
    assert torch.equal(bert(ids), bert(ids, torch.zeros_like(ids), torch.ones_like(ids)))
    for name, longest in (("bert", 24), ("roberta", 22)):  # of 24, RoBERTa's first position is 2
        assert encoder(name).max_length == longest
        encoder(name)(torch.full((1, longest), 5))
        with pytest.raises(IndexError):
            encoder(name)(torch.full((1, longest + 1), 5))


def test_roberta_s_padding_where_config_json_does_not_say_it():
    with torch.device("meta"):
        assert ENCODERS["roberta"](BertConfig(model_type="roberta")).max_length == 510
