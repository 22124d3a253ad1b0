"""The other side of the tests that need PEER_PYTHON: what AdapterHub's own library reads and
computes.

    python tests/peer.py read | examples DIRECTORY

It needs what experiments/requirements-peer.txt lists. DIRECTORY holds plan.json; the outputs become
read.safetensors and so on there.

read      loads adapters, fusions and whole runs that this project wrote
examples  examples/lora.py, with the weights in weights.safetensors
"""

import json
import sys
from pathlib import Path

import torch
from adapters import AutoAdapterModel, LoRAConfig
from safetensors.torch import load_file, save_file

FIELDS = ("input_ids", "token_type_ids", "attention_mask")
directory = Path(sys.argv[2])
plan = json.loads((directory / "plan.json").read_text())
outputs = {}


def read():
    """outputs[key] of an adapter or a fusion are hidden states, those of a run, which has a head
    and inputs of its own shape, are logits."""
    for key, case in plan["read"].items():
        every = load_file(case["inputs"])
        model = AutoAdapterModel.from_pretrained(case["model"]).eval()
        options = {"use_safetensors": case.get("safe", True), "with_head": "shape" in case}
        for path in case["adapters"]:
            model.load_adapter(path, set_active=path == case["adapters"][0], **options)
        if "fusion" in case:
            model.load_adapter_fusion(case["fusion"], set_active=True, **options)
        if "shape" in case:
            outputs[key] = model(**{n: every[n].view(case["shape"]) for n in FIELDS}).logits
        else:
            outputs[key] = model.base_model(**{n: every[n] for n in FIELDS}).last_hidden_state


@torch.no_grad()
def examples():
    """outputs["lora"], of examples/lora.py; weights are named LAYER.MODULE.PARAMETER."""
    weights = load_file(directory / "weights.safetensors")
    inputs = load_file(directory / "inputs.safetensors")
    model = AutoAdapterModel.from_pretrained(plan["encoder"]).eval()
    model.add_adapter("lora", config=LoRAConfig(r=8, alpha=8))
    for i, layer in enumerate(model.base_model.encoder.layer):
        for part in ("query", "value"):
            lora = getattr(layer.attention.self, part).loras["lora"]
            lora.lora_A.data = weights[f"{i}.{part}.A.weight"]
            lora.lora_B.data = weights[f"{i}.{part}.B.weight"]
    model.set_active_adapters("lora")
    outputs["lora"] = model.base_model(**inputs).last_hidden_state


torch.manual_seed(0)
commands = [read, examples]
{command.__name__: command for command in commands}[sys.argv[1]]()
outputs = {name: t.detach().contiguous() for name, t in outputs.items()}
save_file(outputs, directory / f"{sys.argv[1]}.safetensors")
