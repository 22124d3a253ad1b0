"""The task-specific layers of MT-A (section 2.2.2): projected attention layers, parallel to a whole
layer of BERT (Stickland and Murray, 2019). AdapterHub's library has none: the files are our own."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn

from adapter import BaseAdapterConfig, register
from formats.adapterhub import check_leave_out
from runtime.kernels import attention


@dataclass(frozen=True)
class PALConfig(BaseAdapterConfig):
    """
    Projected attention layers, 1.1 times BERT-base's parameters for eight tasks.

    size        the dimension in which it attends
    num_heads   attention heads there
    leave_out   layers (from 0) without one

    All layers share the projections from d to that size, and back.
    Raises ValueError, naming the field, for an invalid value.
    """

    size: int = 204
    num_heads: int = 6  # as their code has it; 12 in their paper
    leave_out: tuple = ()

    architecture = "pal"

    def __post_init__(self):
        if type(self.size) is not int or not 0 < self.size < 10**5:
            raise ValueError(f"size must be an integer in 1 .. 99999, not {self.size!r:.50}")
        heads = self.num_heads
        if type(heads) is not int or heads < 1 or self.size % heads:
            raise ValueError(f"num_heads must divide the size, not {heads!r:.50}")
        check_leave_out(self)
        object.__setattr__(self, "leave_out", tuple(self.leave_out))

    def make_modules(self, bert):
        found = []
        for (layer, location), slot in bert.slots():
            if location == "output" and layer not in self.leave_out:
                shared = found[0][2] if found else None
                found.append(((layer, location), slot, PAL(self, bert.config, shared)))
        return found

    def tensor_names(self, module):
        """The projections that all layers share are written with the first one."""
        names = super().tensor_names(module)
        shared = ("down.", "up.") if module.shares else ()
        return {theirs: ours for theirs, ours in names.items() if not ours.startswith(shared)}

    def residual_fields(self):
        return []


class PAL(nn.Module):
    """
    x is the input of a whole layer of BERT, at whose end z is added: LN(f + z + x'), where x' is
    the input of the feed-forward sub-layer. Its attention needs no other tokens than those of
    `layer_input`, which is always whole, so it need not say `mixes_tokens`.

    z = GELU(U·g(D·x + b_D) + b_U), where g is self-attention without output matrix, as in Stickland
    and Murray's code (Bert-n-Pals, modeling.py: BERTPals).
    """

    def __init__(self, config, bert_config, shared=None):
        super().__init__()
        d, size = bert_config.hidden_size, config.size
        self.config = config
        self.shares = shared is not None
        self.attention_dropout = bert_config.attention_probs_dropout_prob
        self.down = shared.down if shared else nn.Linear(d, size)
        self.up = shared.up if shared else nn.Linear(size, d)
        for name in ("query", "key", "value"):
            setattr(self, name, nn.Linear(size, size))
        for linear in self.children():
            if not (shared and linear in (shared.down, shared.up)):
                nn.init.normal_(linear.weight, std=bert_config.initializer_range)
                nn.init.zeros_(linear.bias)

    def inputs(self, f, x, norm):
        """What fusion's query reads, and the residual, as in the paper's own adapter."""
        return norm(f + x), f

    def z(self, h, layer_input):
        """layer_input: x [B, T, d] and mask [B, 1, 1, T] -> [B, T, d], of the first token alone if
        h has no other."""
        x, mask = layer_input
        y = self.down(x)  # d -> size
        q, k, v = (
            part(y).unflatten(2, (self.config.num_heads, -1)).transpose(1, 2)  # [B, H, T, size/H]
            for part in (self.query, self.key, self.value)
        )
        y = attention(q, k, v, mask, self.attention_dropout if self.training else 0.0)
        y = y.transpose(1, 2).flatten(2)  # [B, T, size]
        return F.gelu(self.up(y))[:, : h.shape[1]]  # size -> d

    def add_and_norm(self, output, x, norm):
        return norm(output + x)

    def forward(self, f, x, norm, layer_input):
        """As Adapter.forward."""
        return norm(f + self.z(f, layer_input) + x)


register("pal", PALConfig)
