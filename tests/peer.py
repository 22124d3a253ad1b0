"""python tests/peer.py DIRECTORY reads plan.json there, and writes the logits of each run that
AdapterHub's own library does not refuse. PEER_PYTHON has tests/requirements-peer.txt."""

import json
import sys
from pathlib import Path

import torch
from adapters import AutoAdapterModel
from safetensors.torch import load_file, save_file

FIELDS = ("input_ids", "token_type_ids", "attention_mask")
torch.manual_seed(0)
directory, outputs, options = Path(sys.argv[1]), {}, {"use_safetensors": True, "with_head": True}
for key, case in json.loads((directory / "plan.json").read_text()).items():
    every = load_file(case["inputs"])
    model = AutoAdapterModel.from_pretrained(case["model"]).eval()
    try:
        for path in case["adapters"]:
            model.load_adapter(path, set_active=path == case["adapters"][0], **options)
        if "fusion" in case:
            model.load_adapter_fusion(case["fusion"], set_active=True, **options)
    except (AttributeError, KeyError, TypeError):  # so it refuses what it does not know
        continue
    outputs[key] = model(**{n: every[n].view(case["shape"]) for n in FIELDS}).logits
outputs = {name: t.detach().contiguous() for name, t in outputs.items()}
save_file(outputs, directory / "read.safetensors")
