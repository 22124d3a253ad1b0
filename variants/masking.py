"""Fusion over some of its adapters: those that are chosen once, or drawn anew for every training
step.

mask(bert, ["qqp"])                           # without it; mask(bert, []): all again
"""

import numpy as np

from fusion import fusions


def mask(bert, names, layers=None):
    """
    Leaves adapters out of the softmax, as scores of -inf would, but without computing them; in all
    layers, or in `layers` (from 0). It replaces an earlier mask there: mask(bert, []) removes it.
    The last adapter of a slot still says what all of them read, masked or not.

    Raises ValueError, and changes nothing, for a name that is not in the fusion, for a layer that
    has none, or if a layer would be left without adapter.
    """
    names, fused_layers = frozenset(names), {layer for (layer, _), _ in fusions(bert)}
    layers = fused_layers if layers is None else set(layers)
    if not fused_layers or layers - fused_layers:
        where = f"layer {min(layers - fused_layers)}, from 0" if fused_layers else "this encoder"
        raise ValueError(f"there is no fusion in {where}")
    chosen = [(layer, fusion) for (layer, _), fusion in fusions(bert) if layer in layers]
    for layer, fusion in chosen:
        if fusion.options is None:
            raise ValueError("adapters of a folded fusion cannot be masked: mask them, then fold")
        if unknown := sorted(names - set(fusion.name.split(","))):
            fused = fusion.name.replace(",", ", ")
            raise ValueError(f"adapter {unknown[0]!r:.120} is not in the fusion of {fused}")
        if set(fusion.adapter_names) <= names:
            has = ", ".join(fusion.adapter_names)
            raise ValueError(f"layer {layer + 1} would be left without adapter: it has {has}")
    for _, fusion in chosen:
        fusion.masked, fusion.weights = names, None


def check_subset(bert, count, adapters):
    """Raises ValueError if Q and K cannot be trained on `count` of the fused adapters
    (--adapters-per-batch), or if a layer could be left without any of them. adapters: their
    names."""
    # the softmax over one is 1, whatever Q and K are; and every layer needs one of those drawn
    N, fewest = len(adapters), min(len(fusion.adapter_names) for _, fusion in fusions(bert))
    least = max(2, N - fewest + 1)
    if not least <= count <= N:
        raise ValueError(
            f"--adapters-per-batch must be in {least} .. {N}, not {count}: {N} adapters are fused, "
            f"{fewest} in the layer that has the fewest"
        )


def mask_all_but(bert, count, adapters, seed):
    """Leaves `count` of the fused adapters unmasked, drawn with `seed`, so that all processes and a
    resumed run draw the same."""
    drawn = np.random.default_rng(seed).permutation(adapters)
    mask(bert, drawn[count:].tolist())
