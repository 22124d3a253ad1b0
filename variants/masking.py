"""Fusion over some of its adapters: which of them take part, for good or drawn anew for every
training step.

mask(bert, ["qqp"])                           # without it; mask(bert, []): all again
"""

import numpy as np

from fusion import fusions


def mask(bert, names, layers=None):
    """
    Leaves adapters out of the softmax, as scores of -inf would, but without the work; in all
    layers, or in `layers` (from 0). What was masked there before is not any more: after
    mask(bert, []) all take part. What the adapters of a slot read is still the last one's choice,
    masked or not.

    Raises ValueError, and changes nothing, for a name that is not in the fusion, for a layer that
    has none, or if a layer would be left without adapter.
    """
    names, there = frozenset(names), {layer for (layer, _), _ in fusions(bert)}
    layers = there if layers is None else set(layers)
    if not there or layers - there:
        where = f"layer {min(layers - there)}, from 0" if there else "this encoder"
        raise ValueError(f"there is no fusion in {where}")
    here = [(layer, fusion) for (layer, _), fusion in fusions(bert) if layer in layers]
    for layer, fusion in here:
        if fusion.options is None:
            raise ValueError("adapters of a folded fusion cannot be masked: mask them, then fold")
        if unknown := sorted(names - set(fusion.name.split(","))):
            fused = fusion.name.replace(",", ", ")
            raise ValueError(f"adapter {unknown[0]!r:.120} is not in the fusion of {fused}")
        if set(fusion.adapter_names) <= names:
            has = ", ".join(fusion.adapter_names)
            raise ValueError(f"layer {layer + 1} would be left without adapter: it has {has}")
    for _, fusion in here:
        fusion.masked, fusion.weights = names, None


def check_subset(bert, count, adapters):
    """Raises ValueError if Q and K cannot be trained on `count` of the fused adapters
    (--adapters-per-batch), or if a layer could be left without any of them. adapters: their
    names."""
    N = len(adapters)
    if not 2 <= count <= N:  # the softmax over one is 1, whatever Q and K are
        why = ": Q and K learn nothing from one" if count == 1 else ""
        raise ValueError(
            f"--adapters-per-batch must be in 2 .. {N}, the number of --adapters, not {count}{why}"
        )
    for (layer, _), fusion in fusions(bert):
        if (here := len(fusion.adapter_names)) <= N - count:
            raise ValueError(
                f"--adapters-per-batch must be {N - here + 1} or more, not {count}: layer "
                f"{layer + 1} has {here} of the {N} "
                "adapters, and one has to be among those drawn"
            )


def mask_all_but(bert, count, adapters, draw):
    """Leaves `count` of the fused adapters unmasked; draw: what makes all processes, and a resumed
    run, draw alike."""
    drawn = np.random.default_rng(draw).permutation(adapters)
    mask(bert, drawn[count:].tolist())
