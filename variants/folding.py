"""A fusion for inference: the products of weights are computed once, ahead of time, so that each
token needs only three products of size d × R."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from fusion import Fusion, are_low_rank, bottlenecks, up_projections


class FoldedFusion(nn.Module):
    """Fusion.low_rank with Uᵀ Kᵀ Q and V U multiplied. It is not for training, and has no file."""

    options = None

    def __init__(self, fusion, adapters):
        super().__init__()
        self.name, self.adapter_names = fusion.name, fusion.adapter_names
        self.masked, self.weights = fusion.masked, None
        # without dropout on the scores, b_K does not change the softmax
        Q, K, V = (fusion.query.weight, fusion.key.weight, fusion.value.weight)
        U, membership = up_projections(fusion.unmasked(adapters), Q.dtype)  # [d, R], [R, N]
        self.register_buffer("to_scores", (K @ U).T @ Q)  # [R, d]
        self.register_buffer("to_scores_bias", fusion.query.bias @ K @ U)  # [R]
        self.register_buffer("to_output", V @ U)  # [d, R]
        self.register_buffer("membership", membership)

    unmasked = Fusion.unmasked

    def forward(self, f, x, norm, adapters, layer_input=None):
        """As Fusion.forward."""
        last = adapters[-1]
        h, residual = last.inputs(f, x, norm)
        a = bottlenecks(h, self.unmasked(adapters))  # [B·T, R]
        scores = (
            F.linear(h.flatten(0, 1), self.to_scores, self.to_scores_bias) * a
        ) @ self.membership
        s = scores.softmax(-1)  # [B·T, N]
        self.weights = s.view(*h.shape[:2], -1)
        output = F.linear((s @ self.membership.T) * a, self.to_output).view(h.shape)
        return last.add_and_norm(output + residual, x, norm)


@torch.no_grad()
def fold(bert):
    """
    An encoder for inference with the same outputs and fusion weights, in which every active fusion
    is folded. It shares all other modules' weights with `bert`, which stays as it is. A
    fusion that is not of the paper's kind, or whose adapters are no bottlenecks, stays as it is.
    """
    shared = {id(p): p for p in bert.parameters()}
    folded = copy.deepcopy(bert, shared).eval()
    for _, slot in folded.slots():
        if type(slot.fusion) is Fusion and slot.active == slot.fusion.name:
            adapters = [slot.adapters[name] for name in slot.fusion.adapter_names]
            if are_low_rank(adapters):
                slot.fusion = FoldedFusion(slot.fusion, adapters).to(bert.dtype)
    return folded
