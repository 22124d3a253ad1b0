"""Stage 2 with one more adapter, for the target task itself, that is trained together with Ψ while
all others stay frozen. In the paper every fused adapter is trained alone, in stage 1.

    python examples/fusion_with_own_adapter.py --stage fusion --task rte \
        --adapters runs/mnli runs/qqp
    python -m experiments.evaluate runs/fusion-rte

The run is an ordinary fusion run of AdapterHub's files, with the new adapter among its adapters/.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # found from any directory

import train
from adapter import AdapterConfig, add_adapter, find_adapter
from fusion import Fusion, add_fusion
from runtime.command import run_command


def add_fusion_and_adapter(bert, adapter_names, kind=Fusion, **config):
    """As fusion.add_fusion, over one adapter more. What requires a gradient afterwards is what
    train.py trains and saves: Ψ, and the new adapter."""
    add_adapter(bert, "own", AdapterConfig.pfeiffer())
    add_fusion(bert, [*adapter_names, "own"], kind, **config)
    for _, _, module in find_adapter(bert, "own")[1]:
        module.requires_grad_(True)


if __name__ == "__main__":
    train.add_fusion = add_fusion_and_adapter
    run_command("fusion_with_own_adapter.py", train.main)
