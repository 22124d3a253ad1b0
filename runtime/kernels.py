"""What PyTorch does slowly, most of it only on a CPU, done faster. The functions are the same,
their random numbers are not: dropout rounds p to 1/65,536 and draws from a stream of its own, and
new embeddings are uniform."""

import math
from inspect import unwrap

import torch
import torch.nn.functional as F
from torch import nn


def dropout(x, p, training):
    """F.dropout, on a CPU in a third of its time: from 16 random bits for each element, so that p
    is rounded to a multiple of 1/65,536."""
    if not training or p == 0 or x.device.type != "cpu":
        return F.dropout(x, p, training)
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    keep = bits.view(torch.int16)[: x.numel()].view(x.shape) >= round(2**16 * p) - 2**15
    return (x * keep).mul_(1 / (1 - p))


def embedding(rows, d):
    """nn.Embedding, but uniform: normal numbers on the meta device cost `from_pretrained` a second
    (torch imports sympy for them)."""
    return nn.Embedding.from_pretrained(torch.empty(rows, d).uniform_(-0.035, 0.035), freeze=False)


def attention(q, k, v, mask, p):
    """softmax(q kᵀ / √(d/H)) v over the real tokens, each weight dropped with probability p: [B, H,
    T, d/H] each -> q's shape. F.scaled_dot_product_attention, on a CPU with the dropout above."""
    if p == 0 or q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)
    scores = q / math.sqrt(q.shape[-1]) @ k.transpose(-1, -2)  # [B, H, T, T]
    if mask is not None:
        scores += scores.new_zeros(mask.shape).masked_fill(~mask, torch.finfo(scores.dtype).min)
    return dropout(scores.softmax(-1), p, training=True) @ v


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW, which imports PyTorch's compiler only to tell it to keep out, one or two
    seconds before the first step. Here the same functions are called without it."""

    add_param_group = unwrap(torch.optim.AdamW.add_param_group)
    load_state_dict = unwrap(torch.optim.AdamW.load_state_dict)
    state_dict = unwrap(torch.optim.AdamW.state_dict)
    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))
    zero_grad = unwrap(torch.optim.AdamW.zero_grad)
