"""MPNet (Song et al., 2020), an encoder without token types, with RoBERTa's positions, and with a
learned bias on the attention scores, by head and by the distance between the two tokens.

    python train.py --import examples.mpnet --stage adapter --task rte \
        --model sentence-transformers/all-mpnet-base-v2  # of BERT-base's size
    python -m experiments.evaluate runs/rte --import examples.mpnet"""

import torch

from bert import ENCODERS, Bert, Roberta


class MPNet(Roberta):
    HUB_NAMES = Bert.HUB_NAMES | {
        "query": "attention.attn.q",
        "key": "attention.attn.k",
        "value": "attention.attn.v",
        "attention_dense": "attention.attn.o",
        "attention_add_norm.norm": "attention.LayerNorm",
        "relative_attention_bias": "encoder.relative_attention_bias",
    }

    def __init__(self, config):
        config.type_vocab_size = 0  # which config.json does not say
        super().__init__(config)
        self.relative_attention_bias = torch.nn.Embedding(32, config.num_attention_heads)

    def attention_bias(self, x, attention_mask):
        """Added to q kᵀ / √(d/H) in every layer: [B, H, T, T], or [1, H, T, T] without padding"""
        position = torch.arange(x.shape[1], device=x.device)
        distance = position[None, :] - position[:, None]  # [T, T], of the key from the query
        rows = self.relative_attention_bias(bucket_of(distance))  # [T, T, H]
        bias = rows.permute(2, 0, 1)[None]  # [1, H, T, T]
        padding = super().attention_bias(x, attention_mask)  # [B, 1, 1, T]
        return bias if padding is None else bias + padding


def bucket_of(distance):
    """The row of the table for each distance, as in T5 (Raffel et al., 2020): each direction has 8
    for one distance each, 8 for ranges that grow geometrically up to 128, and on in the last."""
    n = distance.abs()
    far = torch.log(n.clamp(min=1).float() / 8) / torch.tensor(16.0).log()  # 16 = 128 / 8
    far = (8 + (8 * far).long()).clamp(max=15)
    return torch.where(n < 8, n, far) + 16 * (distance > 0).long()


ENCODERS["mpnet"] = MPNet
