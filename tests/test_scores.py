"""The scores of classification, by hand."""

import pytest
import torch

from runtime.scores import accuracy, f1, f1_of_class, macro_f1


def test_known_values():
    """TP 6, FN 2, FP 1, TN 3: precision 6/7, recall 6/8."""
    labels = torch.tensor([1] * 8 + [0] * 4)
    predictions = torch.tensor([1] * 6 + [0] * 2 + [1] + [0] * 3)
    assert f1(labels, predictions) == pytest.approx(12 / 15)
    assert f1_of_class(labels, predictions, 0) == pytest.approx(6 / 9)
    assert macro_f1(labels, predictions) == pytest.approx((12 / 15 + 6 / 9) / 2)
    # always the same answer, the wrong one
    assert f1(labels, torch.zeros(12, dtype=torch.long)) == 0
    # three classes: F1 of 1/2, 4/5 and 0
    labels, predictions = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 2, 1, 1, 1, 0])
    assert accuracy(labels, predictions) == pytest.approx(3 / 6)
    assert macro_f1(labels, predictions) == pytest.approx((1 / 2 + 4 / 5 + 0) / 3)
