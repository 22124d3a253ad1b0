"""Which of a run's examples its adapters were trained on: a fusion that is trained on what an
adapter knows by heart learns to trust it too much, and a development set that an adapter has seen
says nothing.

A training set's sketch is its 1,000 smallest hashes, of texts and label. To estimate how much of
another set was seen, those of its hashes that are no larger than the sketch's largest are looked up
in it. With hundreds of them the share is good to a few points, with very few it means nothing.
"""

import base64

import numpy as np

SIZE = 1000
NOTABLE = 0.05  # a share that is worth a line


def hashes_of(split):
    """The hashes of a split from `load_split`: uint64 [examples]"""
    return split.with_format("numpy")["hash"][:].view(np.uint64)


def sketch(hashes):
    """As text, for config.json."""
    return base64.b64encode(np.unique(hashes)[:SIZE].tobytes()).decode()


def share_seen(hashes, sketch):
    """The share of examples that are in the set of a sketch, an estimate."""
    seen = np.frombuffer(base64.b64decode(sketch), np.uint64)
    comparable = hashes[hashes <= seen[-1]] if len(seen) == SIZE else hashes
    return float(np.isin(comparable, seen).mean()) if len(comparable) else 0.0


def messages(adapters):
    """What a run says of {name: AdapterRecord}, its --adapters: a line on its training examples,
    and a louder one on its development set."""

    def notable(field):
        shares = {name: getattr(adapter, field) or 0 for name, adapter in adapters.items()}
        return ", ".join(f"{n} {share:.0%}" for n, share in shares.items() if share >= NOTABLE)

    lines = []
    if found := notable("seen_train"):
        lines.append(f"note: adapters that have seen this run's training examples: {found}")
    if found := notable("seen_dev"):
        problem = "adapters that were TRAINED on this run's development examples"
        lines.append(f"WARNING: {problem}: {found}; its scores say little about new examples")
    if unknown := [name for name, adapter in adapters.items() if adapter.seen_train is None]:
        lines.append(f"note: what they were trained on is not recorded of {', '.join(unknown)}")
    return lines
