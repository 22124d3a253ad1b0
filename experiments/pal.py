"""The task-specific layers of MT-A (section 2.2.2): projected attention layers, parallel to a whole
layer of BERT (Stickland and Murray, 2019). AdapterHub's library has none: the files are our own.
They are for experiments/multitask.py; elsewhere: --import experiments.pal --adapter pal"""

from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import nn

from adapter import ADAPTERS, Adapter
from bert import attention


@dataclass
class PALConfig:
    """Projected attention layers; all of them share the projections from d to `size`, and back."""

    size: int = 204  # in which it attends; for eight tasks, 1.1 times BERT-base's parameters
    num_heads: int = 6  # as their code has it; 12 in their paper
    leave_out: list = field(default_factory=list)  # layers (from 0) without one

    def __post_init__(self):
        if self.size % self.num_heads:
            raise ValueError(f"num_heads must divide the size {self.size}, not {self.num_heads}")

    def modules(self, bert):
        """{(layer, "output"): PAL}. Hooks tell it the layer's input, and free that behind it."""
        modules, shared = {}, None
        for i, layer in enumerate(bert.layers):
            if i not in self.leave_out:
                pal = modules[i, "output"] = PAL(self, bert.config, shared)
                shared = shared or pal
                layer.register_forward_pre_hook(pal.remember, with_kwargs=True)
                layer.register_forward_hook(pal.forget)
        return modules


class PAL(nn.Module):
    """x is the input of a whole layer; z is added at its end: LN(f + z + x'), x' as in Adapter.

    z = GELU(U·g(D·x + b_D) + b_U), where g is self-attention without output matrix, as in Stickland
    and Murray's code (Bert-n-Pals, modeling.py: BERTPals)."""

    def __init__(self, config, bert_config, shared=None):
        super().__init__()
        d, size = bert_config.hidden_size, config.size
        self.config = config
        self.attention_dropout = bert_config.attention_probs_dropout_prob
        self.query, self.key, self.value = (nn.Linear(size, size) for _ in range(3))
        if shared is None:
            self.down, self.up = nn.Linear(d, size), nn.Linear(size, d)
        for linear in self.children():
            nn.init.normal_(linear.weight, std=bert_config.initializer_range)
            nn.init.zeros_(linear.bias)
        first = shared or self  # which alone has them as parameters: a tuple registers nothing
        self.projections = first.down, first.up

    def remember(self, layer, args, kwargs):
        """x: the layer's input [B, T, d]; bias: only the padding of `Bert.attention_bias`"""
        self.layer_x, bias = (*args, *kwargs.values())
        self.bias = bias
        if bias is not None:  # [B, 1, 1, T]
            self.bias = -1e30 * (bias.amax((1, 2), keepdim=True) < -1e29).to(bias.dtype)

    def forget(self, layer, args, output):
        self.layer_x, self.bias = None, None

    # what fusion's query reads, the residual, and the end of the sub-layer
    h_and_residual, close = Adapter.h_and_residual, Adapter.close

    def z(self, h):
        """Of the layer's input, whatever h is: [B, T, d]"""
        down, up = self.projections
        y = down(self.layer_x)  # [B, T, d] -> [B, T, size]
        q, k, v = (
            part(y).unflatten(2, (self.config.num_heads, -1)).transpose(1, 2)  # [B, H, T, size/H]
            for part in (self.query, self.key, self.value)
        )
        p = self.attention_dropout if self.training else 0.0
        y = attention(q, k, v, self.bias, p).transpose(1, 2).flatten(2)  # [B, T, size]
        return F.gelu(up(y))  # [B, T, size] -> [B, T, d]

    def forward(self, f, x, norm):
        return norm(f + self.z(f) + x)


ADAPTERS["pal"] = PALConfig
