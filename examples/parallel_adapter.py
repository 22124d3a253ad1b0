"""Parallel adapters (He et al., Towards a Unified View of Parameter-Efficient Transfer Learning,
ICLR 2022): an adapter that reads what the feed-forward sub-layer reads, not what it computes.

    python examples/parallel_adapter.py --stage adapter --task rte --adapter parallel
    python examples/parallel_adapter.py --stage fusion --task rte --adapters runs/mnli runs/rte
    python -m experiments.evaluate runs/rte --import examples.parallel_adapter

One adapter computes what the `adapters` library does with ParBnConfig. Not so a fusion of them:
there the library adds x twice, here it stays once, as without adapters. The files are our own.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # found from any directory

import train
from adapter import Adapter, Kind, register
from formats.adapterhub import bottleneck_names
from runtime.command import run_command


@dataclass(frozen=True)
class ParallelConfig(Kind):
    """reduction_factor: bottleneck r = hidden_size // reduction_factor, at least 1; scaling: of the
    adapter's output."""

    reduction_factor: float = 16
    scaling: float = 4.0

    architecture = "parallel"  # in adapter_config.json
    # what Adapter asks for, and is always so here
    non_linearity, ln_before, ln_after, original_ln_after = "relu", False, False, True

    def __post_init__(self):
        if not self.reduction_factor > 0 or not math.isfinite(self.scaling):
            raise ValueError(f"reduction_factor and scaling cannot be {self}")

    @classmethod
    def parallel(cls, **changes):
        return cls(**changes)

    def modules(self, bert):
        d = bert.config.hidden_size
        r = max(int(d // self.reduction_factor), 1)
        return [
            (key, slot, ParallelAdapter(self, d, r))
            for key, slot in bert.slots()
            if key[1] == "output"
        ]

    def tensor_names(self, module):
        return bottleneck_names(ln_before=False, ln_after=False)

    def fields_in_stream(self):
        return []  # whatever the fields, it reads x and its residual is f

    def initialize(self, linear):
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)


class ParallelAdapter(Adapter):
    """LN(f + z + x) with z = s·(U·relu(D·x + b_D) + b_U), x the sub-layer's input. Its z is
    Adapter's, so the fast form of the fusion holds for it, too."""

    def __init__(self, config, hidden_size, bottleneck_size):
        super().__init__(config, hidden_size, bottleneck_size)
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))  # U stays 0, so z is 0 at first

    def inputs(self, f, x, norm):
        return x, f

    def up_projection(self):
        return self.config.scaling * self.up.weight, self.config.scaling * self.up.bias


register(ParallelConfig, "parallel")

if __name__ == "__main__":
    run_command("parallel_adapter.py", train.main)
