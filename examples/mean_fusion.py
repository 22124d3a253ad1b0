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
    mixes_tokens = False
    file_tag = {"kind": "mean", "query": False, "key": False}  # in adapter_fusion_config.json

    def __init__(self, *values, **config):
        super().__init__(*values, **config)
        self.query = self.key = None

    def textbook(self, h, adapters, layer_input=None):
        s = self.even(h, len(adapters))  # [B, T, N]
        z = torch.stack([adapter.z(h, layer_input) for adapter in adapters], 2)  # [B, T, N, d]
        return torch.einsum("btn,btnd->btd", s, self.value(z))

    def compose(self, h, adapters, layer_input=None):
        """The same, with V applied once."""
        s = self.even(h, len(adapters)).unbind(-1)  # N times [B, T]
        z = [adapter.z(h, layer_input) for adapter in adapters]  # N times [B, T, d]
        return self.value(sum(s_n[..., None] * z_n for s_n, z_n in zip(s, z, strict=True)))

    def even(self, h, N):
        """The softmax of equal scores: 1/N."""
        return self.weigh(h.new_zeros(*h.shape[:2], N))


register("mean", MeanFusion)

if __name__ == "__main__":
    run_command("mean_fusion.py", train.main)
