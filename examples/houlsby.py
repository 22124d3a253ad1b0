"""Houlsby et al.'s own recipe (2019), as a stage: two adapters in a layer that start small, and
BERT's LayerNorms trained with them.

    python train.py --import examples.houlsby --stage houlsby --task rte
    python -m experiments.evaluate runs/houlsby-rte --import examples.houlsby

The preset `houlsby` of adapter.py, which is AdapterHub's, starts larger, has another activation
and leaves the LayerNorms alone. Here all that is as in Houlsby et al.'s code (adapter-bert), but
not their optimizer, with weight decay 0.01 and a warm-up over a tenth of the steps. The LayerNorms
are saved in the run's own.safetensors. A fusion of such adapters would be one without them: in
AdapterFusion all adapters share BERT's."""

from torch import nn

import train
from adapter import AdapterConfig, adapter_modules, add_adapter


def build(args, bert, task):
    config = AdapterConfig.houlsby(**{"non_linearity": "gelu_new", **args.adapter_config})
    add_adapter(bert, task.name, config)
    for adapter in adapter_modules(bert, task.name).values():
        for linear in (adapter.down, adapter.up):  # nearly the identity; 0.01 in their paper
            nn.init.trunc_normal_(linear.weight, std=0.001, a=-0.002, b=0.002)
    for module in bert.modules():
        if isinstance(module, nn.LayerNorm):
            module.requires_grad_(True)


train.STAGES["houlsby"] = {"lr": 3e-4, "epochs": 20, "build": build}
