"""Which of a run's examples its adapters were trained on: a fusion that is trained on what an
adapter knows by heart learns to trust it too much, and a development set that an adapter has seen
says nothing.

A training set's sketch is its 1,000 smallest hashes, of texts and label. To estimate how much of
another set was seen, those of its hashes that are no larger than the sketch's largest are looked up
in it. With hundreds of them the share is good to a few points; from fewer than 20 none is
estimated, as where the adapter was trained on hundreds of times as many examples as the other set
has.
"""

import base64

import numpy as np

SIZE, FEW = 1000, 20
NOTABLE = 0.05  # a share that is worth a line


def hashes_of(split):
    """The hashes of a split from `load_split`: uint64 [examples]"""
    return split.with_format("numpy")["hash"][:].view(np.uint64)


def sketch(hashes):
    """The 1,000 smallest hashes, as text for config.json."""
    return base64.b64encode(np.unique(hashes)[:SIZE].tobytes()).decode()


def share_seen(hashes, sketch):
    """The share of examples that are in the set of a sketch, an estimate; None where too few can
    be compared."""
    seen = np.frombuffer(base64.b64decode(sketch), np.uint64)
    if len(seen) < SIZE:  # the sketch is the whole set
        return float(np.isin(hashes, seen).mean()) if len(hashes) else 0.0
    comparable = hashes[hashes <= seen[-1]]
    return float(np.isin(comparable, seen).mean()) if len(comparable) >= FEW else None


def messages(adapters):
    """The lines that a run prints about its --adapters, {name: AdapterRecord}: a note on those that
    have seen its training examples, a warning on those that were trained on its development set,
    and notes on those of which it is not known."""

    def notable(field):
        shares = {name: getattr(adapter, field) or 0 for name, adapter in adapters.items()}
        return ", ".join(f"{n} {share:.0%}" for n, share in shares.items() if share >= NOTABLE)

    lines = []
    if found := notable("seen_train"):
        lines.append(f"note: adapters that have seen this run's training examples: {found}")
    if found := notable("seen_dev"):
        problem = "adapters that were TRAINED on this run's development examples"
        lines.append(f"WARNING: {problem}: {found}; its scores say little about new examples")
    if unknown := [name for name, adapter in adapters.items() if adapter.sketch is None]:
        lines.append(
            f"note: adapters whose training examples are not recorded: {', '.join(unknown)}"
        )
    if few := [n for n, a in adapters.items() if a.sketch and None in (a.seen_train, a.seen_dev)]:
        problem = "adapters trained on too many examples to tell whether this run's are among them"
        lines.append(f"note: {problem}: {', '.join(few)}")
    return lines
