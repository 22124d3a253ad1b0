"""Fusion over some of its adapters.

mask(bert, ["qqp"])                           # leaves qqp out; mask(bert, []) brings it back
"""

from fusion import fusions


def mask(bert, names, layers=None):
    """
    Leaves adapters out of the softmax: their scores become -∞, in all layers, or in `layers` (from
    0). It replaces an earlier mask there: mask(bert, []) removes it. The last adapter of a slot
    still decides what all of them read, masked or not.

    Raises ValueError, and changes nothing, for a name that is not in the fusion, for a layer that
    has none, or if a layer would be left without adapter. A fusion of your own whose weights do not
    come from `Fusion.weigh` raises ValueError in its next forward pass.
    """
    names, fused_layers = frozenset(names), {layer for (layer, _), _ in fusions(bert)}
    layers = fused_layers if layers is None else set(layers)
    if not fused_layers or layers - fused_layers:
        where = f"layer {min(layers - fused_layers)}, from 0" if fused_layers else "this encoder"
        raise ValueError(f"there is no fusion in {where}")
    chosen = [(layer, fusion) for (layer, _), fusion in fusions(bert) if layer in layers]
    for layer, fusion in chosen:
        if unknown := sorted(names - set(fusion.name.split(","))):
            fused = fusion.name.replace(",", ", ")
            raise ValueError(f"adapter {unknown[0]!r:.120} is not in the fusion of {fused}")
        if set(fusion.adapter_names) <= names:
            has = ", ".join(fusion.adapter_names)
            raise ValueError(f"layer {layer}, from 0, would be left without adapter: it has {has}")
    for _, fusion in chosen:
        fusion.masked, fusion.weights = names, None
