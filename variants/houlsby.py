"""Houlsby et al.'s own recipe (2019; adapter-bert): their adapters with their initialisation, and
LayerNorms of the task's own in place of BERT's. AdapterHub's `houlsby` (adapter.py) has neither."""

from dataclasses import dataclass
from functools import partial

from torch import nn

from adapter import ADAPTERS, AdapterConfig

# How D and U start: small, so that the adapter is nearly the identity. Houlsby et al. cut their
# normal distributions at two standard deviations.
INITIALIZATIONS = {
    "bert": partial(nn.init.normal_, std=0.02),  # as in the paper's own adapters
    "houlsby": partial(nn.init.trunc_normal_, std=0.01, a=-0.02, b=0.02),  # in their paper
    "houlsby_code": partial(nn.init.trunc_normal_, std=0.001, a=-0.002, b=0.002),  # in their code
}


@dataclass
class HoulsbyRecipeConfig(AdapterConfig):
    """Houlsby et al.'s architecture as in their code, with the tanh form of GELU, and copies of all
    of BERT's LayerNorms, which are trained with the adapter and replace them while it is active.
    Their training (weight decay 0.01, warm-up over 0.1 of the steps, lr 3e-4) and their head are
    not part of it. It cannot be fused: z_n has a meaning only in the residual stream that its
    LayerNorms make, and in a fusion all adapters share one.

    initialization   bert | houlsby | houlsby_code, see INITIALIZATIONS"""

    mh_adapter: bool = True
    non_linearity: str = "gelu_new"
    original_ln_before: bool = False
    initialization: str = "houlsby_code"

    def __post_init__(self):
        super().__post_init__()
        if self.initialization not in INITIALIZATIONS:
            known = ", ".join(INITIALIZATIONS)
            raise ValueError(f"initialization must be one of {known}, not {self.initialization!r}")

    def modules(self, bert):
        """Those of the adapter, then a copy of each of BERT's LayerNorms."""
        modules = super().modules(bert)
        for adapter in modules.values():
            INITIALIZATIONS[self.initialization](adapter.down.weight)
            INITIALIZATIONS[self.initialization](adapter.up.weight)
        reads_norm = self.original_ln_before or self.original_ln_after
        for key, slot in layer_norm_slots(bert).items() if modules else ():
            norm = nn.LayerNorm(slot.normalized_shape, slot.eps, device=slot.weight.device)
            norm.load_state_dict({"weight": slot.weight, "bias": slot.bias})
            layer, location = key
            if (layer, location.removesuffix(".norm")) in modules and not reads_norm:
                norm.requires_grad_(False)  # the adapter goes around it: it has no gradient
            modules[key] = norm
        return modules


class LayerNormSlot(nn.LayerNorm):
    """One of BERT's LayerNorms, which the active adapter may replace with its copy; with the
    attributes of an AddNorm."""

    def __init__(self, norm):
        super().__init__(norm.normalized_shape, norm.eps)
        self.weight, self.bias = norm.weight, norm.bias
        self.adapters, self.fusion, self.active = nn.ModuleDict(), None, None

    def forward(self, x):
        return super().forward(x) if self.active is None else self.adapters[self.active](x)


def layer_norm_slots(bert):
    """{(layer, location): LayerNormSlot} of all LayerNorms of BERT, which are made slots."""
    places = {(None, "embeddings.norm"): (bert, "embeddings_norm")}
    for i, layer in enumerate(bert.layers):
        places[i, "attention.norm"] = layer.attention_add_norm, "norm"
        places[i, "output.norm"] = layer.output_add_norm, "norm"
    for key, (owner, name) in places.items():
        if key not in bert.slots:
            bert.slots[key] = LayerNormSlot(getattr(owner, name))
            setattr(owner, name, bert.slots[key])
    return {key: bert.slots[key] for key in places}


ADAPTERS["houlsby_recipe"] = HoulsbyRecipeConfig
