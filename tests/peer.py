"""The other side of test_adapterhub.py and test_adapter_config.py: what AdapterHub's own library
writes, reads, computes, trains.

    python tests/peer.py write | read | grid | examples DIRECTORY

It needs what experiments/requirements-peer.txt lists; DIRECTORY holds plan.json.

write   adapters, heads and fusions with random weights: .bin in DIRECTORY/theirs/ENCODER/NAME,
        safetensors in NAME-safe, outputs in DIRECTORY/theirs.safetensors, what it refused in
        DIRECTORY/refused-write.json
read    loads what this project wrote, runs the Python of its cards, and trains: outputs in
        DIRECTORY/read.safetensors
grid    computes with many architectures, with the weights in DIRECTORY/weights.safetensors:
        outputs in grid.safetensors, and what it refused in refused-grid.json
examples  the kinds of examples/, with the weights in DIRECTORY/weights.safetensors: outputs in
        examples.safetensors
"""

import json
import re
import sys
from pathlib import Path

import huggingface_hub
import torch
from adapters import AutoAdapterModel, BnConfig, LoRAConfig, ParBnConfig
from adapters.composition import Fuse
from safetensors.torch import load_file, save_file

directory = Path(sys.argv[2])
plan = json.loads((directory / "plan.json").read_text())
outputs, refused = {}, {}


def attempt(key, function, *args, **options):
    """Calls it, and notes the exception, where a test wants to know that there is one."""
    try:
        function(*args, **options)
    except Exception as e:
        refused[key] = f"{type(e).__name__}: {e}"


def spread(parameters, generator):
    """Random weights at which an error shows: nothing stays at its default, and no softmax is 0 or
    1."""
    for name, p in parameters:
        noise = torch.randn(p.shape, generator=generator)
        if name.endswith("value.weight"):
            p.data = torch.eye(len(p)) + 0.05 * noise
        elif p.ndim > 1:
            p.data = (0.4 if "fusion" in name else 1.0) / p.shape[-1] ** 0.5 * noise
        else:
            p.data = (1 if "norm" in name and name.endswith("weight") else 0) + 0.2 * noise


@torch.no_grad()
def compute(key, model, inputs, fusion=None, head=None, choices=1):
    """Hidden states, the head's logits, fusion weights and regularisation, as `outputs[key.h]` and
    so on."""
    model.eval()
    result = model.base_model(**inputs, output_adapter_fusion_attentions=fusion is not None)
    outputs[f"{key}.h"] = result.last_hidden_state
    if head:
        shape = (
            (-1, choices, inputs["input_ids"].shape[-1])
            if choices > 1
            else inputs["input_ids"].shape
        )
        outputs[f"{key}.logits"] = model(
            **{name: t.view(shape) for name, t in inputs.items()}, head=head
        ).logits
    if fusion is not None:
        for layer, locations in result.adapter_fusion_attentions[fusion].items():
            for location, weights in locations.items():
                outputs[f"{key}.{layer}.{location}"] = torch.as_tensor(weights)
        for (
            name,
            p,
        ) in model.named_parameters():  # the library sums over every fusion that can be trained
            p.requires_grad_(f"adapter_fusion_layer.{fusion}." in name)
        outputs[f"{key}.regularization"] = model.get_fusion_regularization_loss()


def add_head(model, name, head):
    if head["head_type"] == "classification":
        model.add_classification_head(name, num_labels=head["num_labels"], layers=head["layers"])
    else:
        model.add_multiple_choice_head(name, num_choices=head["num_choices"], layers=head["layers"])


def write():
    for encoder, source in plan["encoders"].items():
        inputs = load_file(directory / f"{encoder}.safetensors")
        model, generator = (
            AutoAdapterModel.from_pretrained(source),
            torch.Generator().manual_seed(7),
        )
        target = directory / "theirs" / encoder
        target.mkdir(parents=True)
        for name, config in plan["adapters"].items():
            model.add_adapter(name, config=BnConfig(**config))
        for name, head in plan["heads"].items():
            add_head(model, name, head)
        for members in plan["fusions"].values():
            model.add_adapter_fusion(members)
        ours = re.compile(r"\.adapters\.|fusion_layer|^heads")
        spread([item for item in model.named_parameters() if ours.search(item[0])], generator)
        for name in plan["adapters"]:
            model.set_active_adapters(name)
            head = plan["heads"].get(name)
            compute(
                f"{encoder}.{name}",
                model,
                inputs,
                None,
                head and name,
                (head or {}).get("num_choices", 1),
            )
            model.save_adapter(str(target / name), name, with_head=head is not None)
            attempt(
                f"{encoder}.{name}",
                model.save_adapter,
                str(target / f"{name}-safe"),
                name,
                use_safetensors=True,
                with_head=head is not None,
            )
        for name, members in plan["fusions"].items():
            model.set_active_adapters(Fuse(*members))
            compute(f"{encoder}.{name}", model, inputs, ",".join(members))
            model.save_adapter_fusion(str(target / name), Fuse(*members))
            model.save_adapter_fusion(
                str(target / f"{name}-safe"), Fuse(*members), use_safetensors=True
            )
        for members in plan["cannot"]:
            attempt(",".join(members), model.add_adapter_fusion, members)
    save_file(
        {name: t.contiguous() for name, t in outputs.items()}, directory / "theirs.safetensors"
    )


def read():
    for case in plan["read"]:
        inputs = load_file(directory / f"{case['encoder']}.safetensors")
        model = AutoAdapterModel.from_pretrained(
            case.get("model") or plan["encoders"][case["encoder"]]
        )
        options = {"use_safetensors": case.get("safe", True)}
        names = [model.load_adapter(path, with_head=False, **options) for path in case["adapters"]]
        model.set_active_adapters(names[0])
        fusion, head, choices = None, None, 1
        if case.get("fusion"):
            model.load_adapter_fusion(case["fusion"], set_active=True, **options)
            fusion = ",".join(names)
        if case.get("head"):
            _, head = model.load_head(case["head"], **options)
            choices = model.heads[head].config.get("num_choices", 1)
        compute(case["key"], model, inputs, fusion, head, choices)
    for case in plan["cards"]:  # the card's second block of Python is for this library
        inputs = load_file(directory / f"{case['encoder']}.safetensors")
        huggingface_hub.snapshot_download = lambda repo, case=case: case["folder"]
        blocks = re.findall(
            r"```python\n(.*?)```", (Path(case["folder"]) / "README.md").read_text(), re.DOTALL
        )
        names = {name: t.view(case["shape"]) for name, t in inputs.items()}
        exec(blocks[1], names)
        outputs[case["key"]] = names["logits"]
    for case in plan["train"]:
        train(case)
    save_file(
        {name: t.detach().contiguous() for name, t in outputs.items()},
        directory / "read.safetensors",
    )


def train(case):
    """The training of one stage from given weights on given batches, written out as the reference's
    trainer does it."""
    torch.manual_seed(0)
    model = AutoAdapterModel.from_pretrained(case["encoder"])
    names = [
        model.load_adapter(path, with_head=False, use_safetensors=True) for path in case["adapters"]
    ]
    if case["fusion"]:
        model.load_adapter_fusion(case["fusion"], use_safetensors=True, with_head=False)
        model.train_adapter_fusion(Fuse(*names))
    else:
        model.train_adapter(names[0])
    _, head = model.load_head(case["head"], use_safetensors=True)
    model.active_head = head
    model.train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=case["lr"], weight_decay=0.0)
    losses, batches = [], load_file(case["batches"])
    for step in range(case["steps"]):
        for group in optimizer.param_groups:
            group["lr"] = case["lr"] * (1 - step / case["steps"])
        fields = ("input_ids", "token_type_ids", "attention_mask", "labels")
        loss = model(**{name: batches[f"{step}.{name}"] for name in fields}).loss
        if case["fusion"]:
            loss = loss + model.get_fusion_regularization_loss()
        losses.append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
    outputs[f"{case['key']}.losses"] = torch.stack(losses)
    outputs.update({f"{case['key']}.{name}": p for name, p in trained.items()})


@torch.no_grad()
def grid():
    """In float64: outputs[the configuration's number]; weights are named
    LAYER.LOCATION.PART.BOTTLENECK."""
    inputs, weights = (
        load_file(directory / "inputs.safetensors"),
        load_file(directory / "weights.safetensors"),
    )
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
    attempt("own", model.load_adapter, plan["cannot_read"], use_safetensors=True)
    save_file({name: t.contiguous() for name, t in outputs.items()}, directory / "grid.safetensors")


@torch.no_grad()
def examples():
    """outputs[name of the adapter, or of the fusion of two]; weights are named
    ADAPTER.LAYER.MODULE.PARAMETER."""
    weights = load_file(directory / "weights.safetensors")
    inputs = load_file(directory / "inputs.safetensors")
    model = AutoAdapterModel.from_pretrained(plan["encoder"]).eval()
    for name in ("a", "b"):
        model.add_adapter(name, config=ParBnConfig(reduction_factor=plan["reduction_factor"]))
    model.add_adapter_fusion(["a", "b"])
    model.add_adapter("lora", config=LoRAConfig(r=8, alpha=8))
    for i, layer in enumerate(model.base_model.encoder.layer):
        for name in ("a", "b"):
            adapter = layer.output.adapters[name]
            for ours, theirs in (("down", adapter.adapter_down[0]), ("up", adapter.adapter_up)):
                theirs.weight.data = weights[f"{name}.{i}.{ours}.weight"]
                theirs.bias.data = weights[f"{name}.{i}.{ours}.bias"]
        for part, p in layer.output.adapter_fusion_layer["a,b"].named_parameters():
            p.data = weights[f"a,b.{i}.{part}"]
        for part in ("query", "value"):
            lora = getattr(layer.attention.self, part).loras["lora"]
            lora.lora_A.data = weights[f"lora.{i}.{part}.A.weight"]
            lora.lora_B.data = weights[f"lora.{i}.{part}.B.weight"]
    for name, active in (("a", "a"), ("lora", "lora"), ("a,b", Fuse("a", "b"))):
        model.set_active_adapters(active)
        outputs[name] = model.base_model(**inputs).last_hidden_state.contiguous()
    save_file(outputs, directory / "examples.safetensors")


{"write": write, "read": read, "grid": grid, "examples": examples}[sys.argv[1]]()
(directory / f"refused-{sys.argv[1]}.json").write_text(json.dumps(refused))
