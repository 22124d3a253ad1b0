"""One row of experiments/benchmark.py on one side, in the environment of that side. SPEC is JSON,
see `measure` there; so is the last line: the loss, how many parameters are trained, seconds, and
the peak of memory above the imported libraries in bytes.

    python -m experiments.benchmark_worker SPEC"""

import json
import re
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # AdamW imports it: a library's memory is not the row's


def peak_memory():
    """Of this process so far, in bytes."""
    return 1024 * int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])


def ours(spec, root, names):
    """(model, its loss on a batch, memory before it)"""
    import train
    from adapter import AdapterConfig, Head, add_adapter, save_adapter, save_head
    from bert import Bert, BertConfig
    from fusion import add_fusion, fusion_regularization, save_fusion

    torch.manual_seed(0)
    idle, bert = peak_memory(), Bert(BertConfig())
    for name in names:
        add_adapter(bert, name, AdapterConfig.pfeiffer())
    if spec["fused"]:
        add_fusion(bert, names)
    head = Head({"head_type": "classification", "num_labels": 2, "layers": 2}, bert.config)
    model = train.Model(bert, head)
    if spec["side"] == "save":  # for the reference
        bert.save_pretrained(root / "encoder")
        save_head(head, bert, "task", root / "head")
        for name in names:
            save_adapter(bert, name, root / name)
        if spec["fused"]:
            save_fusion(bert, root / "fusion")
    train.hold_frozen_in(model, getattr(torch, spec["dtype"]))
    cross_entropy = torch.nn.functional.cross_entropy
    return model, lambda b: cross_entropy(model(b), b["labels"]) + fusion_regularization(bert), idle


def peer(spec, root, names):
    """The same of the reference library, in fp32 also under autocast, as in its trainer."""
    import adapters
    from adapters.composition import Fuse

    idle, model = peak_memory(), adapters.AutoAdapterModel.from_pretrained(root / "encoder")
    files = {"with_head": False, "use_safetensors": True}
    for name in names:
        model.load_adapter(str(root / name), **files)
    if spec["fused"]:
        model.load_adapter_fusion(str(root / "fusion"), **files)
        model.train_adapter_fusion(Fuse(*names))  # activates it and freezes the rest
    else:
        model.train_adapter(names[0])
    _, model.active_head = model.load_head(str(root / "head"), use_safetensors=True)
    penalty = model.get_fusion_regularization_loss if spec["fused"] else int
    return model, lambda batch: model(**batch).loss + penalty(), idle


def main(spec):
    device, names = spec["device"], [f"a{i}" for i in range(spec["N"])]
    build = peer if spec["side"] == "peer" else ours
    model, loss, idle = build(spec, Path(spec["root"]), names)
    model.to(device)
    ids = torch.arange(spec["batch"] * 128, device=device).view(-1, 128) % 1000
    batch = {"input_ids": ids, "token_type_ids": ids * 0, "attention_mask": ids * 0 + 1}
    batch["labels"] = ids[:, 0] % 2
    autocast = torch.autocast(device, torch.bfloat16, spec["dtype"] == "bfloat16")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0, fused=True)

    def step():  # the loop of train.py, and the default of transformers' trainer
        with torch.set_grad_enabled(model.training), autocast:
            total = loss(batch)
        if model.training:
            total.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return total.item()  # waits for a GPU

    model.eval()
    result = {"loss": step(), "trained": sum(p.numel() for p in trained)}
    model.train(spec["trains"])  # with dropout
    step()  # warms up
    start, times = time.perf_counter(), 10 if device == "cuda" else 1
    for _ in range(times):
        step()
    result["seconds"] = (time.perf_counter() - start) / times
    peak = peak_memory() - idle if device == "cpu" else torch.cuda.max_memory_allocated()
    print(json.dumps({**result, "memory": peak}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
