"""LoRA (Hu et al., Low-Rank Adaptation of Large Language Models, ICLR 2022): in every layer, query
and value are W x + (alpha / r) B A x in place of W x.

    python examples/lora.py --stage adapter --task rte --adapter lora --adapter-config r=4
    python -m experiments.evaluate runs/rte --import examples.lora

Computes what the `adapters` library does with LoRAConfig(r=8, alpha=8). The files are our own.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # found from any directory

import train
from adapter import BaseAdapterConfig, register
from runtime.command import run_command


@dataclass(frozen=True)
class LoRAConfig(BaseAdapterConfig):
    """r: the rank; alpha: B A x is multiplied with alpha / r."""

    r: int = 8
    alpha: float = 8

    architecture = "query_value_lora"  # "lora" are the library's files
    cannot_fuse_because = (
        "LoRA changes weights and has no output of its own that a fusion could mix"
    )

    def make_modules(self, bert):
        """BERT's linear maps become slots where they are not yet."""
        found = []
        for i, layer in enumerate(bert.layers):
            for name in ("query", "value"):
                key, linear = (i, f"attention.self.{name}"), getattr(layer, name)
                if key not in bert.extra_slots:
                    bert.extra_slots[key] = LinearSlot(linear)
                    setattr(layer, name, bert.extra_slots[key])
                found.append((key, bert.extra_slots[key], LoRA(self, linear)))
        return found


class LoRA(nn.Module):
    def __init__(self, config, linear):
        super().__init__()
        self.scaling = config.alpha / config.r
        self.A = nn.Linear(linear.in_features, config.r, bias=False)  # Kaiming-uniform at first
        self.B = nn.Linear(config.r, linear.out_features, bias=False)
        nn.init.zeros_(self.B.weight)

    def forward(self, x):
        return self.scaling * self.B(self.A(x))


class LinearSlot(nn.Linear):
    """One of BERT's linear maps, and what is plugged into it: a slot, as AddNorm is."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.adapters, self.fusion, self.active = nn.ModuleDict(), None, None

    def forward(self, x):
        y = super().forward(x)
        return y + self.adapters[self.active](x) if self.active in self.adapters else y


register("lora", LoRAConfig)

if __name__ == "__main__":
    run_command("lora.py", train.main)
