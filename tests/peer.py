"""The other side of the tests that need PEER_PYTHON: what AdapterHub's own library reads, computes
and trains.

    python tests/peer.py read | grid | examples | trainer DIRECTORY

It needs what experiments/requirements-peer.txt lists. DIRECTORY holds plan.json; the outputs become
read.safetensors and so on there.

read      loads adapters, fusions and whole runs that this project wrote
grid      computes with many architectures and saves their adapters; what the library refused
          becomes refused.json
examples  examples/lora.py, with the weights in weights.safetensors
trainer   trains an adapter or a fusion on batches.pt; outputs the losses
"""

import json
import sys
from pathlib import Path

import adapters
import torch
from adapters import AutoAdapterModel, BnConfig, LoRAConfig
from adapters.composition import Fuse
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader
from transformers import TrainingArguments

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
def grid():
    """In float64: outputs[NUMBER] of each configuration, and its adapter in aNUMBER."""
    refused = {}
    inputs = load_file(directory / "inputs.safetensors")
    model = AutoAdapterModel.from_pretrained(plan["encoder"]).double().eval()
    for number, config in enumerate(plan["configs"]):
        name = f"a{number}"  # the library keeps the configuration of a deleted name
        torch.manual_seed(0)
        model.add_adapter(name, config=BnConfig(**config))
        for key, p in model.named_parameters():
            if f".adapters.{name}." in key:
                p.data = (p + 0.3 * torch.randn_like(p)).double()
        model.set_active_adapters(name)
        # with ln_before tensors have two names, which the library cannot write as safetensors
        options = {"with_head": False, "use_safetensors": not config["ln_before"]}
        model.save_adapter(directory / name, name, **options)
        try:
            outputs[str(number)] = model.base_model(**inputs).last_hidden_state
        except Exception as e:
            refused[number] = f"{type(e).__name__}: {e}"
        model.delete_adapter(name)
    try:
        model.load_adapter(plan["cannot_read"], use_safetensors=True)
    except Exception as e:
        refused["own"] = f"{type(e).__name__}: {e}"
    (directory / "refused.json").write_text(json.dumps(refused))


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


class Trainer(adapters.AdapterTrainer):
    """The library's, on our batches; it adds fusion's penalty after each step to the gradients of
    the next one, so that only the first step lacks it: here it has it, too."""

    losses = []

    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, batch_size=None, shuffle=False)

    def training_step(self, model, inputs, *rest):
        if plan["fusion"] and not self.losses:
            model.base_model.get_fusion_regularization_loss().backward()
        loss = super().training_step(model, inputs, *rest)
        self.losses.append(loss.double())
        return loss


def trainer():
    batches, options = torch.load(directory / "batches.pt"), {"use_safetensors": True}
    model = AutoAdapterModel.from_pretrained(plan["encoder"])
    names = [model.load_adapter(path, with_head=False, **options) for path in plan["adapters"]]
    if plan["fusion"]:
        model.load_adapter_fusion(plan["fusion"], **options)
        model.train_adapter_fusion(Fuse(*names))
    else:
        model.train_adapter(names[0])
    model.load_head(plan["head"], **options)
    arguments = TrainingArguments(
        output_dir=str(directory / "peer"),
        max_steps=len(batches),
        learning_rate=plan["lr"],
        lr_scheduler_type="linear",
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    Trainer(model=model.double(), args=arguments, train_dataset=batches).train()
    outputs["losses"] = torch.stack(Trainer.losses)


torch.manual_seed(0)
commands = [read, grid, examples, trainer]
{command.__name__: command for command in commands}[sys.argv[1]]()
outputs = {name: t.detach().contiguous() for name, t in outputs.items()}
save_file(outputs, directory / f"{sys.argv[1]}.safetensors")
