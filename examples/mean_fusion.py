"""Even weights instead of attention: how much of AdapterFusion's gain is the attention's?

    python examples/mean_fusion.py --stage fusion --task rte --fusion mean \
        --adapters runs/mnli runs/rte
    python -m experiments.evaluate runs/fusion-rte --import examples.mean_fusion

o = V · 1/N Σ_n z_n, where V is trained as in the paper. AdapterSoup (Chronopoulou et al., 2023)
averages the adapters' weights instead, which is the same for linear ones only.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # found from any directory

import train
from fusion import Fusion, register
from runtime.command import run_command


class MeanFusion(Fusion):
    options = {"kind": "mean", "query": False, "key": False}  # its adapter_fusion_config.json

    def __init__(self, *values):
        super().__init__(*values)
        self.query = self.key = None

    def textbook(self, h, adapters, layer_input=None):
        self.weights = h.new_full((*h.shape[:2], len(adapters)), 1 / len(adapters))  # [B, T, N]
        z = torch.stack([adapter.z(h, layer_input) for adapter in adapters], 2)  # [B, T, N, d]
        return self.value(z).mean(2)

    def compose(self, h, adapters, layer_input=None):
        """The same, with V applied once."""
        self.weights = h.new_full((*h.shape[:2], len(adapters)), 1 / len(adapters))
        return self.value(sum(adapter.z(h, layer_input) for adapter in adapters) / len(adapters))


register("mean", MeanFusion)

if __name__ == "__main__":
    run_command("mean_fusion.py", train.main)
