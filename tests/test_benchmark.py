"""How many products a forward pass and a step take: what docs/benchmarks.md says of them."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from adapter import AdapterConfig, add_adapter
from bert import Bert, BertConfig
from fusion import add_fusion


def multiply_adds(work):
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        work()
    return counter.get_total_flops() / 2


@pytest.mark.parametrize("N, fused", [(0, False), (1, False), (4, True)])
def test_the_products_of_a_forward_pass(N, fused):
    """With more tokens than columns R, a fusion multiplies its weights once, K U and V U, and then
    takes less than the textbook form's d² + 2·N·d² a token: Q, D_n, scores and mixture."""
    B, T, d, m, L, r = 5, 12, 64, 128, 3, 4
    bert = Bert(BertConfig(100, d, L, 4, m)).requires_grad_(False).eval()
    for i in range(N):
        add_adapter(bert, f"a{i}", AdapterConfig.pfeiffer())
    ids, tokens = torch.zeros(B, T, dtype=torch.long), B * T * L
    expected = encoder = tokens * (4 * d * d + 2 * d * m + 2 * T * d)
    if fused:
        add_fusion(bert, [f"a{i}" for i in range(N)])
        R = N * (r + 1)  # columns of all U_n and b_n
        expected += L * 2 * d * d * R
        expected += tokens * (d * d + N * r * d + 2 * R * d + 2 * R * N)
        assert expected < encoder + tokens * (d * d + 2 * N * d * d)
    else:
        expected += tokens * N * 2 * r * d
    assert multiply_adds(lambda: bert(ids, ids, ids)) == expected
    if N:  # no gradient of frozen weights, and none below the first adapter
        step = multiply_adds(lambda: bert(ids, ids, ids).sum().backward())
        assert expected < step < 3 * encoder
