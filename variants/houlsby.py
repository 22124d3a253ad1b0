"""Houlsby et al.'s own recipe (2019; adapter-bert): their adapters with their initialisation, and
LayerNorms of the task's own in place of BERT's. AdapterHub's `houlsby` (adapter.py) has neither."""

from dataclasses import dataclass
from functools import partial

from torch import nn

from adapter import AdapterConfig, register

# How D and U start: small, so that the adapter is nearly the identity. Houlsby et al. cut their
# normal distributions at two standard deviations.
INIT_WEIGHTS = {
    "bert": partial(nn.init.normal_, std=0.02),  # as in the paper's own adapters
    "houlsby": partial(nn.init.trunc_normal_, std=0.01, a=-0.02, b=0.02),  # in their paper
    "houlsby_code": partial(nn.init.trunc_normal_, std=0.001, a=-0.002, b=0.002),  # in their code
}


@dataclass(frozen=True)
class HoulsbyRecipeConfig(AdapterConfig):
    """
    Houlsby et al.'s architecture as in their code, with the tanh form of GELU. Their training
    (weight decay 0.01, warm-up over 0.1 of the steps, lr 3e-4) and their head are not part of it.

    init_weights   bert | houlsby | houlsby_code, see INIT_WEIGHTS
    layer_norms    copies of all of BERT's LayerNorms are trained with the adapter and replace them
                   while it is active; always True, and marks the files

    Raises ValueError, naming the field, for an invalid value.
    """

    init_weights: str = "houlsby_code"
    layer_norms: bool = True

    architecture = "layer_norms"
    # z_n has a meaning only in the residual stream that the adapter's own LayerNorms make, and in a
    # fusion all adapters share one
    cannot_fuse_because = "adapters that come with LayerNorms of their own cannot be fused"

    def __post_init__(self):
        super().__post_init__()
        if self.init_weights not in INIT_WEIGHTS:
            known = ", ".join(INIT_WEIGHTS)
            raise ValueError(f"init_weights must be one of {known}, not {self.init_weights!r:.50}")
        if self.layer_norms is not True:
            raise ValueError("layer_norms is always true here: --adapter houlsby has none")

    @classmethod
    def houlsby_recipe(cls, **changes):
        own = {"mh_adapter": True, "non_linearity": "gelu_new", "original_ln_before": False}
        return cls(**{**own, **changes})

    def make_modules(self, bert):
        """Those of the adapter, then a copy of each of BERT's LayerNorms."""
        result = super().make_modules(bert)
        if result:
            sits_at = {key for key, _, _ in result}
            reads_norm = self.original_ln_before or self.original_ln_after
            for key, slot in layer_norm_slots(bert):
                copy = slot.new_copy()
                layer, location = key
                copy.is_used = reads_norm or (layer, location.removesuffix(".norm")) not in sits_at
                result.append((key, slot, copy))
        return result

    def tensor_names(self, module):
        if isinstance(module, nn.LayerNorm):
            return {f"adapter_layer_norm.{part}": part for part in ("weight", "bias")}
        return super().tensor_names(module)

    def trainable_parameters(self, module):
        """All, but of LayerNorms that nothing reads, where the adapter goes around them."""
        return module.parameters() if getattr(module, "is_used", True) else []

    def initialize(self, linear):
        INIT_WEIGHTS[self.init_weights](linear.weight)
        nn.init.zeros_(linear.bias)


class LayerNormSlot(nn.LayerNorm):
    """A slot (as AddNorm is): one of BERT's LayerNorms, which the active adapter may replace with
    its copy."""

    def __init__(self, norm):
        super().__init__(norm.normalized_shape, norm.eps)
        self.weight, self.bias = norm.weight, norm.bias
        self.adapters, self.fusion, self.active = nn.ModuleDict(), None, None

    def new_copy(self):
        copy = nn.LayerNorm(self.normalized_shape, self.eps, device=self.weight.device)
        copy.load_state_dict({"weight": self.weight, "bias": self.bias})
        return copy

    def forward(self, x):
        return self.adapters[self.active](x) if self.active in self.adapters else super().forward(x)


def layer_norm_slots(bert):
    """[(key, LayerNormSlot)] of all LayerNorms of BERT, which are made slots of the encoder."""
    places = {(None, "embeddings.norm"): (bert, "embeddings_norm")}
    for i, layer in enumerate(bert.layers):
        places[i, "attention.norm"] = layer.attention_add_norm, "norm"
        places[i, "output.norm"] = layer.output_add_norm, "norm"
    for key, (owner, name) in places.items():
        if key not in bert.extra_slots:
            bert.extra_slots[key] = LayerNormSlot(getattr(owner, name))
            setattr(owner, name, bert.extra_slots[key])
    return [(key, bert.extra_slots[key]) for key in places]


register("houlsby_recipe", HoulsbyRecipeConfig)
