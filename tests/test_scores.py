"""The scores of classification, against their definitions and, where it is installed,
scikit-learn."""

import random
import subprocess
from os import environ

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.scores import accuracy, f1, f1_of_class, macro_f1, matthews


def by_definition(labels, predictions):
    """The same scores from precision, recall and the correlation of the indicator matrices, one
    example at a time."""
    classes = sorted({*labels, *predictions})

    def f1_of(k):
        pairs = list(zip(labels, predictions, strict=True))
        right = sum(a == b == k for a, b in pairs)
        precision = right / max(1, sum(b == k for _, b in pairs))
        recall = right / max(1, sum(a == k for a, _ in pairs))
        return 2 * precision * recall / (precision + recall) if right else 0.0

    def covariance(one, other):
        total = 0.0
        for k in classes:
            x, y = [value == k for value in one], [value == k for value in other]
            mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
            total += sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
        return total

    spread = covariance(labels, labels) * covariance(predictions, predictions)
    return {
        "macro_f1": sum(map(f1_of, classes)) / len(classes),
        "f1": f1_of(1),
        "matthews": covariance(labels, predictions) / spread**0.5 if spread > 1e-12 else 0.0,
    }


answers = st.integers(2, 5).flatmap(
    lambda K: st.lists(st.tuples(st.integers(0, K - 1), st.integers(0, K - 1)), min_size=1)
)


@given(answers)
def test_definitions(pairs):
    labels, predictions = map(list, zip(*pairs, strict=True))
    a, b = torch.tensor(labels), torch.tensor(predictions)
    expected = by_definition(labels, predictions)
    assert macro_f1(a, b) == pytest.approx(expected["macro_f1"], abs=1e-9)
    assert f1(a, b) == f1_of_class(a, b, 1) == pytest.approx(expected["f1"], abs=1e-9)
    assert matthews(a, b) == pytest.approx(expected["matthews"], abs=1e-6)
    assert accuracy(a, b) == sum(a == b for a, b in pairs) / len(pairs)


def test_known_values():
    """TP 6, FN 2, FP 1, TN 3: precision 6/7, recall 6/8."""
    labels = torch.tensor([1] * 8 + [0] * 4)
    predictions = torch.tensor([1] * 6 + [0] * 2 + [1] + [0] * 3)
    assert f1(labels, predictions) == pytest.approx(12 / 15)
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
    import json

    rng, cases = random.Random(0), []
    for K in (2, 2, 2, 3, 5) * 20:
        n = rng.randint(1, 60)
        cases.append([[rng.randrange(K) for _ in range(n)] for _ in "ab"])
    cases += [[[0, 0, 0], [0, 0, 0]], [[1, 1], [0, 0]], [[0, 1, 1], [1, 1, 1]]]
    done = subprocess.run(
        [environ["PEER_PYTHON"], "-c", PEER],
        input="\n".join(map(json.dumps, cases)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for (labels, predictions), line in zip(cases, done.stdout.splitlines(), strict=True):
        a, b = torch.tensor(labels), torch.tensor(predictions)
        theirs = json.loads(line)
        assert [accuracy(a, b), macro_f1(a, b)] == pytest.approx(theirs[:2])
        assert theirs[2] is None or f1(a, b) == pytest.approx(theirs[2])
        assert matthews(a, b) == pytest.approx(theirs[3], abs=1e-9)
