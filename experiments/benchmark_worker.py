"""One row of experiments/benchmark.py on one side, in a process of its own:

    python -m experiments.benchmark_worker SPEC               SPEC: JSON, see `measure` there

"side": "ours" runs in this project's environment, "peer" in the reference library's. The last line
is JSON: the loss, how many parameters are trained, seconds, and peak memory in bytes.
"""

import importlib
import json
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # AdamW imports it: a library's memory is not the row's
import torch.nn.functional as F
from safetensors.torch import load_file

FIELDS = "input_ids", "token_type_ids", "attention_mask"


def memory(field):
    """VmRSS, or VmHWM, its peak, in bytes; 0 where there is no /proc."""
    path = Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def ours(spec, root):
    """(model, three functions: loss of a batch, its hidden states, a fusion's regularization)"""
    import train
    from adapter import activate, load_adapter, load_head
    from bert import Bert
    from fusion import fusion_regularization, load_fusion

    bert = Bert.from_pretrained(root / "encoder").to(spec["device"])
    names = [load_adapter(bert, root / f"a{i}") for i in range(spec["adapters"])]
    activate(bert, names[0] if names else None)
    if spec["fused"]:
        load_fusion(bert, root / f"fusion{len(names)}")
    trained = ".fusion." if spec["fused"] else ".adapters."
    for name, p in bert.named_parameters():
        p.requires_grad_(trained in name)
    model = train.Model(bert, load_head(bert, root / "head").requires_grad_(True))
    train.hold_frozen_in(model, getattr(torch, spec["dtype"]))
    return (
        model,
        lambda batch: F.cross_entropy(model(batch), batch["labels"]),
        lambda batch: bert(*(batch[name] for name in FIELDS)),
        lambda: fusion_regularization(bert),
    )


def peer(spec, root):
    """The same of the reference library, in fp32 also under autocast, as in its trainer."""
    import adapters
    from adapters.composition import Fuse

    model = adapters.AutoAdapterModel.from_pretrained(root / "encoder")
    files = {"with_head": False, "use_safetensors": True}
    names = [model.load_adapter(str(root / f"a{i}"), **files) for i in range(spec["adapters"])]
    if spec["fused"]:
        model.load_adapter_fusion(str(root / f"fusion{len(names)}"), **files)
        model.train_adapter_fusion(Fuse(*names))  # activates it and freezes the rest
    elif names:
        model.train_adapter(names[0])
    _, model.active_head = model.load_head(str(root / "head"), use_safetensors=True)
    model.to(spec["device"])
    return (
        model,
        lambda batch: model(**batch).loss,
        lambda batch: model.base_model(**{name: batch[name] for name in FIELDS}),
        model.get_fusion_regularization_loss,
    )


def main():
    spec = json.loads(sys.argv[1])
    importlib.import_module({"ours": "train", "peer": "adapters"}[spec["side"]])
    idle, root, cuda = memory("VmRSS"), Path(spec["root"]), spec["device"] == "cuda"
    model, loss, encode, regularization = {"ours": ours, "peer": peer}[spec["side"]](spec, root)
    batch = load_file(root / f"batch{spec['batch']}.safetensors", spec["device"])
    is_half = spec["dtype"] == "bfloat16"
    autocast = torch.autocast(spec["device"], torch.bfloat16, enabled=is_half)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0, fused=True)

    def step():  # the loop of train.py, and the default of transformers' trainer
        with autocast:
            total = loss(batch)
        (total + regularization() if spec["fused"] else total).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    @autocast
    def inference():
        encode(batch)

    model.eval()
    with torch.no_grad(), autocast:  # what must be the same on both sides
        result = {"loss": loss(batch).item(), "trained": sum(p.numel() for p in parameters)}
    model.train(spec["kind"] == "step")  # then with dropout
    work, times = step if spec["kind"] == "step" else inference, 10 if cuda else 1
    work()  # warms up
    if memory("VmRSS"):
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(times):
        work()
    if cuda:
        torch.cuda.synchronize()
    result["seconds"] = (time.perf_counter() - start) / times
    result["memory"] = torch.cuda.max_memory_allocated() if cuda else memory("VmHWM") - idle
    print(json.dumps(result))


if __name__ == "__main__":
    main()
