"""LoRA (Hu et al., 2022): the queries and values of every layer are W x + (alpha / r) B A x.

    python train.py --import examples.lora --stage adapter --task rte --adapter lora \
        --adapter-config r=4
    python -m experiments.evaluate runs/rte --import examples.lora

This is what the `adapters` library computes for LoRAConfig(r=8, alpha=8), in files of our own."""

from dataclasses import dataclass

from torch import nn

from adapter import ADAPTERS


@dataclass
class LoRAConfig:
    r: int = 8  # the rank
    alpha: float = 8

    def __post_init__(self):
        if not isinstance(self.r, int) or self.r < 1:
            raise ValueError(f"r must be an integer of at least 1, not {self.r!r:.50}")

    def modules(self, bert):  # {(layer, location): new module}
        found = {}
        for i, layer in enumerate(bert.layers):
            for name in ("query", "value"):
                key = i, f"attention.self.{name}"
                if key not in bert.slots:  # an earlier adapter may have made it
                    bert.slots[key] = LinearSlot(getattr(layer, name))
                    setattr(layer, name, bert.slots[key])
                found[key] = LoRA(self, bert.slots[key])
        return found


class LoRA(nn.Module):
    def __init__(self, config, linear):
        super().__init__()
        self.scaling = config.alpha / config.r
        self.A = nn.Linear(linear.in_features, config.r, bias=False)
        self.B = nn.Linear(config.r, linear.out_features, bias=False)
        nn.init.zeros_(self.B.weight)

    def forward(self, x):
        return self.scaling * self.B(self.A(x))


class LinearSlot(nn.Linear):
    """A linear map of BERT as a place for adapters, with the attributes of AddNorm."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.adapters, self.fusion, self.active = nn.ModuleDict(), None, None

    def forward(self, x):
        y = super().forward(x)
        return y if self.active is None else y + self.adapters[self.active](x)


ADAPTERS["lora"] = LoRAConfig
