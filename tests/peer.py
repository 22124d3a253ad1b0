"""The other side of the tests that need PEER_PYTHON: what AdapterHub's own library reads, computes
and trains.

    python tests/peer.py read | grid | examples | pooler | trainer DIRECTORY

It needs what experiments/requirements-peer.txt lists. DIRECTORY holds plan.json; the outputs become
read.safetensors and so on there.

read      loads adapters, heads and fusions that this project wrote, and runs its cards' Python
grid      computes with many architectures, with the weights in weights.safetensors; what the
          library refused becomes refused.json
examples  examples/lora.py, with the weights in weights.safetensors
pooler    writes an encoder with pooler, an adapter, and the head that the library makes of
          BertForSequenceClassification's; the outputs are that model's
trainer   trains an adapter or a fusion on batches.pt; outputs the losses
"""

import json
import re
import sys
from pathlib import Path

import adapters
import huggingface_hub
import torch
from adapters import AutoAdapterModel, BnConfig, LoRAConfig
from adapters.composition import Fuse
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

FIELDS = ("input_ids", "token_type_ids", "attention_mask")
directory = Path(sys.argv[2])
plan = json.loads((directory / "plan.json").read_text())
outputs = {}


def read():
    """Hidden states, logits, fusion weights and regularisation, as outputs[key.h] and so on."""
    for case in plan["read"]:
        every = load_file(case["inputs"])
        inputs = {name: every[name] for name in FIELDS}
        model = AutoAdapterModel.from_pretrained(case["model"]).eval()
        options, fusion = {"use_safetensors": case.get("safe", True)}, case.get("fusion")
        names = [model.load_adapter(path, with_head=False, **options) for path in case["adapters"]]
        model.set_active_adapters(names[0])
        if fusion:
            model.load_adapter_fusion(fusion, set_active=True, **options)
        result = model.base_model(**inputs, output_adapter_fusion_attentions=bool(fusion))
        outputs[f"{case['key']}.h"] = result.last_hidden_state
        if "head" in case:
            _, head = model.load_head(case["head"], **options)
            choices = model.heads[head].config.get("num_choices")
            if choices:
                inputs = {n: t.view(-1, choices, t.shape[-1]) for n, t in inputs.items()}
            outputs[f"{case['key']}.logits"] = model(**inputs, head=head).logits
        if fusion:
            for layer, locations in result.adapter_fusion_attentions[",".join(names)].items():
                for location, weights in locations.items():
                    outputs[f"{case['key']}.{layer}.{location}"] = torch.as_tensor(weights)
            for name, p in model.named_parameters():  # the library sums over what can be trained
                p.requires_grad_("adapter_fusion_layer." in name)
            outputs[f"{case['key']}.regularization"] = model.get_fusion_regularization_loss()
    for case in plan["cards"]:  # the card's second block of Python is for this library
        huggingface_hub.snapshot_download = lambda repo, case=case: case["folder"]
        card = (Path(case["folder"]) / "README.md").read_text()
        blocks = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
        names = {name: t.view(case["shape"]) for name, t in load_file(case["inputs"]).items()}
        exec(blocks[1], names)
        outputs[case["key"]] = names["logits"]


@torch.no_grad()
def grid():
    """In float64: outputs[the configuration's number]; weights are named
    LAYER.LOCATION.PART.BOTTLENECK."""
    weights, refused = load_file(directory / "weights.safetensors"), {}
    inputs = load_file(directory / "inputs.safetensors")
    model = AutoAdapterModel.from_pretrained(plan["encoder"]).double().eval()
    for number, config in enumerate(plan["configs"]):
        name = f"a{number}"  # the library keeps the configuration of a deleted name
        model.add_adapter(name, config=BnConfig(**config))
        for layer, block in enumerate(model.base_model.encoder.layer):
            for location, slot in (("attention", block.attention.output), ("output", block.output)):
                if name in slot.adapters:
                    adapter = slot.adapters[name]
                    for part, p in adapter.named_parameters():
                        p.data = weights[f"{layer}.{location}.{part}.{adapter.down_sample}"]
        model.set_active_adapters(name)
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


@torch.no_grad()
def pooler():
    sizes = dict(vocab_size=40, hidden_size=32, intermediate_size=64, max_position_embeddings=24)
    config = BertConfig(**sizes, num_hidden_layers=2, num_attention_heads=4, num_labels=3)
    static = BertForSequenceClassification(config)
    for p in static.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.2)
    static.save_pretrained(directory / "encoder")
    model = AutoAdapterModel.from_pretrained(directory / "encoder")
    model.add_adapter("a", config="pfeiffer")
    for name, p in model.named_parameters():
        if ".adapters." in name:
            torch.nn.init.normal_(p, std=0.3)
    model.save_adapter(directory / "adapter", "a", with_head=False)
    model.save_head(directory / "head", "default")
    adapters.init(static)
    static.load_adapter(str(directory / "adapter"), set_active=True)
    outputs["ids"] = torch.randint(5, 40, (4, 9))
    outputs["logits"] = static.eval()(outputs["ids"]).logits


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
commands = [read, grid, examples, pooler, trainer]
{command.__name__: command for command in commands}[sys.argv[1]]()
outputs = {name: t.detach().contiguous() for name, t in outputs.items()}
save_file(outputs, directory / f"{sys.argv[1]}.safetensors")
