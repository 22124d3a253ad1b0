"""What text_or_library.sh trains: two fusions as the paper's text has them, where it differs from
the reference library, and a head that reads all tokens."""

import torch
from torch import nn

from adapter import Head, register_head
from fusion import Fusion, register


class QueryF(Fusion):
    """The query is f, the output of the feed-forward sub-layer (section 3.2), not LN(f + x)."""

    file_tag = {"query": "f"}
    mixes_tokens = False

    def forward(self, f, x, norm, adapters, layer_input=None):
        h, residual = adapters[-1].inputs(f, x, norm)
        z = torch.stack([adapter.z(h, layer_input) for adapter in adapters], 2)  # [B, T, N, d]
        s = self.weigh(torch.einsum("btd,btnd->btn", self.query(f), self.key(z)))  # [B, T, N]
        o = torch.einsum("btn,btnd->btd", s, self.value(z))
        return adapters[-1].add_and_norm(o + residual, x, norm)


class RandomV(Fusion):
    """V starts from N(0, std) beside its diagonal (section 4.1), not from 1e-6."""

    file_tag = {"kind": "random V"}
    config_defaults = {"std": 1e-6}
    mixes_tokens = False

    def __init__(self, *values, **config):
        super().__init__(*values, **config)
        with torch.no_grad(), torch.random.fork_rng():  # all else starts as in the other fusion
            nn.init.normal_(self.value.weight, std=self.config["std"]).fill_diagonal_(1.0)


class MeanHead(Head):
    """The mean over the real tokens takes the place of [CLS]."""

    def forward(self, h, mask):
        mask = mask[..., None].to(h.dtype)  # [B·C, T, 1]
        return self.logits((h * mask).sum(1) / mask.sum(1))


register("query_f", QueryF)
register("random_v", RandomV)
register_head("mean", MeanHead)
