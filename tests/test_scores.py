"""The scores of classification, by hand and, where it is installed, against scikit-learn."""

import json
import random
import subprocess
from os import environ

import pytest
import torch

from runtime.scores import accuracy, f1, f1_of_class, macro_f1, matthews


def test_known_values():
    """TP 6, FN 2, FP 1, TN 3: precision 6/7, recall 6/8."""
    labels = torch.tensor([1] * 8 + [0] * 4)
    predictions = torch.tensor([1] * 6 + [0] * 2 + [1] + [0] * 3)
    assert f1(labels, predictions) == pytest.approx(12 / 15)
    assert f1_of_class(labels, predictions, 0) == pytest.approx(6 / 9)
    assert macro_f1(labels, predictions) == pytest.approx((12 / 15 + 6 / 9) / 2)
    assert matthews(labels, predictions) == pytest.approx((6 * 3 - 1 * 2) / (7 * 8 * 4 * 5) ** 0.5)
    # always the same answer
    constant = torch.ones(12, dtype=torch.long)
    assert matthews(labels, constant) == 0 and f1(labels, constant) == pytest.approx(16 / 20)


PEER = """
import json, sys
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
for line in sys.stdin:
    a, b = json.loads(line)
    binary = f1_score(a, b, zero_division=0) if {*a, *b} <= {0, 1} else None
    macro = f1_score(a, b, average="macro", zero_division=0)
    print(json.dumps([accuracy_score(a, b), macro, binary, matthews_corrcoef(a, b)]))
"""


@pytest.mark.skipif("PEER_PYTHON" not in environ, reason="make test-peers: needs scikit-learn")
def test_scikit_learn():
    rng, cases = random.Random(0), []
    for K in (2, 2, 2, 3, 5) * 20:
        n = rng.randint(1, 60)
        cases.append([[rng.randrange(K) for _ in range(n)] for _ in "ab"])
    cases += [[[0, 0, 0], [0, 0, 0]], [[1, 1], [0, 0]], [[0, 1, 1], [1, 1, 1]]]
    command, given = [environ["PEER_PYTHON"], "-c", PEER], "\n".join(map(json.dumps, cases))
    said = subprocess.run(
        command, input=given, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    for (labels, predictions), line in zip(cases, said.splitlines(), strict=True):
        a, b = torch.tensor(labels), torch.tensor(predictions)
        theirs = json.loads(line)
        assert [accuracy(a, b), macro_f1(a, b)] == pytest.approx(theirs[:2])
        assert theirs[2] is None or f1(a, b) == pytest.approx(theirs[2])
        assert matthews(a, b) == pytest.approx(theirs[3], abs=1e-9)
