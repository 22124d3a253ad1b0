"""Whether an adapter was trained on this run's development examples: the run's scores then say
little about new examples.

A run records a sketch of its training set, the 1,000 smallest hashes of its examples. To estimate
which share of another set was seen, those of its hashes that are no larger than the sketch's
largest are looked up in it; from fewer than 20 of them nothing is concluded.
"""

import base64

import numpy as np

SIZE, FEW = 1000, 20


def sketch(examples):
    """The sketch of [Example], as text."""
    hashes = np.array([example.hash for example in examples], np.uint64)
    return base64.b64encode(np.unique(hashes)[:SIZE].tobytes()).decode()


def share_seen(examples, sketch):
    """The share of [Example] that are in the set of a sketch, an estimate; 0 where too few can be
    compared."""
    hashes = np.array([example.hash for example in examples], np.uint64)
    seen = np.frombuffer(base64.b64decode(sketch), np.uint64)
    if len(seen) == SIZE:  # otherwise the sketch is the whole set
        hashes = hashes[hashes <= seen[-1]]
        if len(hashes) < FEW:
            return 0.0
    return float(np.isin(hashes, seen).mean())
