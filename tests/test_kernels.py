"""runtime.kernels: dropout is what it says."""

import math

import pytest
import torch

from runtime.kernels import dropout


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
