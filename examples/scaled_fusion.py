"""Scaled dot products, as in Vaswani et al. (2017): the softmax of scores / √d, which the paper's
fusion leaves out. The weights start, and stay longer, near 1/N.

    python examples/scaled_fusion.py --stage fusion --task rte --fusion scaled \
        --adapters runs/mnli runs/rte
    python -m experiments.figure4 runs/fusion-rte --out figures --import examples.scaled_fusion

`--fusion-config power=0.25` divides by the fourth root of d instead.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # found from any directory

import train
from fusion import Fusion, register
from runtime.command import run_command


class ScaledFusion(Fusion):
    options = {"kind": "scaled"}  # what adapter_fusion_config.json has beside the paper's fusion
    config = {"power": 0.5}  # fields of its own, which are saved with it

    def attend(self, scores):
        """Every form of the fusion, the textbook's and the fast one, comes through here."""
        return super().attend(scores / self.query.in_features ** self.config["power"])


register("scaled", ScaledFusion)

if __name__ == "__main__":
    run_command("scaled_fusion.py", train.main)
