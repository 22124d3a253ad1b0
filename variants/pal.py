"""The task-specific layers of MT-A (section 2.2.2): projected attention layers, parallel to a whole
layer of BERT (Stickland and Murray, 2019). AdapterHub's library has none: the files are our own."""

from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import nn

from adapter import ADAPTERS
from runtime import kernels


@dataclass
class PALConfig:
    """
    Projected attention layers, 1.1 times BERT-base's parameters for eight tasks.

    size        the dimension in which it attends
    num_heads   attention heads there
    leave_out   layers (from 0) without one

    All layers share the projections from d to that size, and back.
    """

    size: int = 204
    num_heads: int = 6  # as their code has it; 12 in their paper
    leave_out: list = field(default_factory=list)

    def __post_init__(self):
        if self.size % self.num_heads:
            raise ValueError(f"num_heads must divide the size {self.size}, not {self.num_heads}")

    def modules(self, bert):
        """{(layer, "output"): PAL}"""
        modules, shared = {}, None
        for layer, location in bert.slots:
            if location == "output" and layer not in self.leave_out:
                shared = modules[layer, location] = PAL(self, bert.config, shared)
        return modules


class PAL(nn.Module):
    """
    x is the input of a whole layer of BERT, at whose end z is added: LN(f + z + x'), where x' is
    the input of the feed-forward sub-layer.

    z = GELU(U·g(D·x + b_D) + b_U), where g is self-attention without output matrix, as in Stickland
    and Murray's code (Bert-n-Pals, modeling.py: BERTPals).
    """

    def __init__(self, config, bert_config, shared=None):
        super().__init__()
        d, size = bert_config.hidden_size, config.size
        self.config = config
        self.attention_dropout = bert_config.attention_probs_dropout_prob
        self.query, self.key, self.value = (nn.Linear(size, size) for _ in range(3))
        new = [self.query, self.key, self.value]
        self.down = shared.down if shared else nn.Linear(d, size)
        self.up = shared.up if shared else nn.Linear(size, d)
        for linear in new if shared else [*new, self.down, self.up]:
            nn.init.normal_(linear.weight, std=bert_config.initializer_range)
            nn.init.zeros_(linear.bias)

    def h_and_residual(self, f, x, norm):
        """What fusion's query reads, and the residual, as in the paper's own adapter."""
        return norm(f + x), f

    def z(self, h, layer_x, mask):
        """layer_x: the layer's input [B, T, d], mask: [B, 1, 1, T] -> [B, T, d]"""
        y = self.down(layer_x)  # [B, T, d] -> [B, T, size]
        q, k, v = (
            part(y).unflatten(2, (self.config.num_heads, -1)).transpose(1, 2)  # [B, H, T, size/H]
            for part in (self.query, self.key, self.value)
        )
        y = kernels.attention(q, k, v, mask, self.attention_dropout if self.training else 0.0)
        return F.gelu(self.up(y.transpose(1, 2).flatten(2)))  # [B, T, size] -> [B, T, d]

    def close(self, output, x, norm):
        return norm(output + x)

    def forward(self, f, x, norm, layer_x, mask):
        """As Adapter.forward."""
        return norm(f + self.z(f, layer_x, mask) + x)


ADAPTERS["pal"] = PALConfig
