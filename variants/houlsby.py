"""Houlsby et al.'s recipe (2019) beside their architecture, which the paper does not have: an
initialisation near the identity, and copies of BERT's LayerNorms that are trained with the
adapter."""

from dataclasses import dataclass
from functools import partial

from torch import nn

from adapter import ADAPTERS, KINDS, AdapterConfig
from formats.adapterhub import LAYER_NORM

# Near the identity, and cut at two standard deviations: 0.01 in their paper, 0.001 in their code
# (adapter-bert)
INIT_WEIGHTS = {
    "bert": partial(nn.init.normal_, std=0.02),
    "houlsby": partial(nn.init.trunc_normal_, std=0.01, a=-0.02, b=0.02),
    "houlsby_code": partial(nn.init.trunc_normal_, std=0.001, a=-0.002, b=0.002),
}


@dataclass(frozen=True)
class RecipeConfig(AdapterConfig):
    """
    AdapterConfig, and

    init_weights   bert: weights from N(0, 0.02); houlsby: N(0, 0.01), as in their paper;
                   houlsby_code: N(0, 0.001), as in their code; both cut at two sigma
    layer_norms    a copy of every LayerNorm of BERT (of the embeddings' and of layers without
                   adapter, too) that is trained with the adapter and takes its place.
                   AdapterHub's library cannot read such files
    """

    init_weights: str = "bert"
    layer_norms: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.init_weights not in list(INIT_WEIGHTS):
            raise ValueError(
                f"init_weights {self.init_weights!r:.50} is not one of {', '.join(INIT_WEIGHTS)}"
            )

    @classmethod
    def houlsby_recipe(cls, **changes):
        """All of it, as in their code, which has the tanh form of GELU. (AdapterHub's preset, and
        so the column ST-A Houlsby of Table 1, has swish, and neither of the two below.)"""
        own = {"non_linearity": "gelu_new", "init_weights": "houlsby_code", "layer_norms": True}
        return cls.houlsby(**{**own, **changes})

    @property
    def architecture(self):
        """In a file: the library, which has no such field, would read the rest. So it refuses."""
        return "layer_norms" if self.layer_norms else None

    @property
    def no_fusion(self):
        """h, and with it z_n, comes from a stream that the adapter's LayerNorms have changed: no
        other adapter could take part in it."""
        return (
            "adapters that come with LayerNorms of their own (layer_norms) cannot be fused"
            if self.layer_norms
            else None
        )

    def initialize(self, linear):
        INIT_WEIGHTS[self.init_weights](linear.weight)
        nn.init.zeros_(linear.bias)

    def modules(self, bert):
        found = super().modules(bert)
        if self.layer_norms and found:
            found += [(key, slot, slot.copy()) for key, slot in own_layer_norms(bert)]
        return found

    def tensor_names(self, module):
        if isinstance(module, nn.LayerNorm):
            return {f"{LAYER_NORM}.{kind}": kind for kind in ("weight", "bias")}
        return super().tensor_names(module)


class OwnLayerNorm(nn.LayerNorm):
    """One of BERT's LayerNorms, with the copies that take its place: a slot of the encoder, as
    AddNorm is."""

    def __init__(self, norm):
        super().__init__(norm.normalized_shape, norm.eps)
        self.weight, self.bias = norm.weight, norm.bias
        self.adapters, self.fusion, self.active = nn.ModuleDict(), None, None

    def copy(self):
        copy = nn.LayerNorm(self.normalized_shape, self.eps, device=self.weight.device)
        copy.load_state_dict({"weight": self.weight, "bias": self.bias})
        return copy

    def forward(self, x):
        return self.adapters[self.active](x) if self.active in self.adapters else super().forward(x)


def own_layer_norms(bert):
    """[(key, slot)] of all LayerNorms of BERT, which become slots where they are not yet."""
    places = {(None, "embeddings.norm"): (bert, "embeddings_norm")}
    for i, layer in enumerate(bert.layers):
        places[i, "attention.norm"] = layer.attention_add_norm, "norm"
        places[i, "output.norm"] = layer.output_add_norm, "norm"
    for key, (owner, name) in places.items():
        if key not in bert.more_slots:
            bert.more_slots[key] = OwnLayerNorm(getattr(owner, name))
            setattr(owner, name, bert.more_slots[key])
    return [(key, bert.more_slots[key]) for key in places]


KINDS |= dict.fromkeys((None, "layer_norms"), RecipeConfig)
ADAPTERS |= {
    name: getattr(RecipeConfig, name) for name in ("pfeiffer", "houlsby", "bapna", "houlsby_recipe")
}
