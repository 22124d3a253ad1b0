"""runtime.kernels: dropout is what it says, and attention the same with and without it."""

import math

import pytest
import torch

from reference import difference
from runtime.kernels import attention, dropout


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout(p):
    torch.manual_seed(0)
    x = (torch.rand(1000, 1001) + 0.5).requires_grad_()  # an odd number of elements
    y = dropout(x, p, training=True)
    kept = y != 0
    # four standard deviations of the share, and of the shares of single rows and columns
    assert abs(kept.float().mean() - (1 - p)) < 4 * math.sqrt(p * (1 - p) / x.numel())
    for dim in (0, 1):
        assert (kept.float().mean(dim) - (1 - p)).abs().max() < 6 * math.sqrt(p * (1 - p) / 1000)
    assert torch.allclose(y[kept], x[kept] / (1 - p))
    y.sum().backward()
    assert torch.allclose(x.grad, kept / (1 - p))
    assert not torch.equal(dropout(x, p, training=True) != 0, kept)
    assert dropout(x, p, training=False) is x and dropout(x, 0.0, training=True) is x


@pytest.mark.parametrize("has_mask", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_attention_in_training_is_the_one_in_evaluation(has_mask, has_bias):
    """They are written differently on a CPU; with a dropout of almost nothing they must agree."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 5, 4, 7, 8, dtype=torch.float64)
    bias = torch.randn(1, 4, 7, 7) if has_bias else None
    mask = (torch.arange(7) < torch.tensor([1, 3, 7, 6, 2])[:, None])[:, None, None]
    mask = mask if has_mask else None
    trained, evaluated = (attention(q, k, v, mask, p, bias) for p in (1e-9, 0.0))
    assert difference(trained, evaluated) <= 1e-8
