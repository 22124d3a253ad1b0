"""One row of experiments/benchmark.py on one side, in a process of its own:

    python -m experiments.benchmark_worker SPEC              SPEC: JSON, see `columns_of` there

"side": "ours" runs in this project's environment, "peer" in the reference library's. Both sides
build their model here and are measured by the same code. When everything is built, the process
prints a line of JSON about itself; then, for each line on stdin ("warm" or "go"), it runs the row
once and prints seconds, peak memory, and the rate of a matrix product.
"""

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

FIELDS = "input_ids", "token_type_ids", "attention_mask"


def memory(field):
    """VmRSS, or VmHWM, its peak, in bytes; 0 where there is no /proc."""
    path = Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def ours(spec, dtype, batch):
    from adapter import activate, load_adapter, load_head
    from bert import Bert
    from fusion import fusion_regularization, load_fusion
    from runtime.kernels import compile_layers
    from runtime.processes import choose_device
    from train import predict
    from variants.folding import fold

    idle, root = memory("VmRSS"), Path(spec["root"])
    choose_device(spec["device"], spec["dtype"])  # as train.py does, which also sets PyTorch up
    bert = Bert.from_pretrained(root / "encoder").to(spec["device"], dtype)
    names = [load_adapter(bert, root / f"a{i}") for i in range(spec["adapters"])]
    if spec["fused"]:
        load_fusion(bert, root / f"fusion{len(names)}")
    elif names:
        activate(bert, names[0])
    head = load_head(bert, root / "head")
    if spec["kind"] == "step":  # what train.py trains, it holds in fp32
        for _, slot in bert.slots():
            modules = [slot.fusion] if spec["fused"] else slot.adapters.values()
            for module in filter(None, modules):
                module.float().requires_grad_(True)
        head.requires_grad_(True)
    bert = fold(bert) if spec["fold"] else bert
    return SimpleNamespace(
        idle=idle,
        modules=[bert, head],
        loss=lambda: F.cross_entropy(
            predict(bert, head, batch, dtype), batch["labels"].to(bert.device)
        ),
        regularization=partial(fusion_regularization, bert),
        encode=lambda: bert(*(batch[name].to(bert.device) for name in FIELDS)),
        compile=partial(compile_layers, bert),
        versions={},
    )


def peer(spec, dtype, batch):
    import adapters
    import transformers
    from adapters.composition import Fuse

    idle, root = memory("VmRSS"), Path(spec["root"])
    model = adapters.AutoAdapterModel.from_pretrained(root / "encoder")
    files = {"with_head": False, "use_safetensors": True}
    names = [model.load_adapter(str(root / f"a{i}"), **files) for i in range(spec["adapters"])]
    if spec["fused"]:
        model.load_adapter_fusion(str(root / f"fusion{len(names)}"), **files)
        model.train_adapter_fusion(Fuse(*names))  # activates it and freezes the rest
    elif names:
        model.train_adapter(names[0])
    _, model.active_head = model.load_head(str(root / "head"), use_safetensors=True)
    model.to(spec["device"])  # in fp32 also where autocast computes in bf16, as in its trainer
    on_device = {name: lambda name=name: batch[name].to(spec["device"]) for name in batch}
    return SimpleNamespace(
        idle=idle,
        modules=[model],
        loss=lambda: model(**{name: get() for name, get in on_device.items()}).loss,
        regularization=model.get_fusion_regularization_loss,
        encode=lambda: model.base_model(**{name: on_device[name]() for name in FIELDS}),
        versions={"adapters": adapters.__version__, "transformers": transformers.__version__},
    )


def training_step(side, spec, loss):
    """Both sides take the same step: loss, a fusion's regularization, backward, clipping at norm 1
    and fused AdamW, which is the loop of train.py and the default of transformers' trainer."""
    for module in side.modules:
        module.train()  # dropout is on
    parameters = [p for module in side.modules for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0, fused=True)

    def step():
        optimizer.zero_grad()
        (loss() + (side.regularization() if spec["fused"] else 0)).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return step


def matrix_product(spec, dtype):
    """(a feed-forward layer's product, ten times, as a function; its multiply-adds)"""
    length, d, m = spec["product"]
    x = torch.randn(spec["batch"] * length, d, device=spec["device"], dtype=dtype)
    weight = torch.randn(m, d, device=spec["device"], dtype=dtype)
    y = x.new_empty(len(x), m)  # new memory would cost more than the product of a small batch
    return lambda: [torch.mm(x, weight.T, out=y) for _ in range(10)], 10 * y.numel() * d


def clock(work, device, times):
    """Seconds of one run, the mean of several."""
    start = time.perf_counter()
    for _ in range(times):
        work()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / times


def build(spec):
    """(what the row does, as a function of no arguments; what to say about it; bytes that the
    process held before)"""
    dtype = getattr(torch, spec["dtype"])
    batch = load_file(Path(spec["root"]) / f"batch{spec['batch']}.safetensors")
    side = {"ours": ours, "peer": peer}[spec["side"]](spec, dtype, batch)
    autocast = torch.autocast(spec["device"], torch.bfloat16, enabled=dtype == torch.bfloat16)
    loss, encode = autocast(side.loss), autocast(side.encode)
    for module in side.modules:
        module.eval()
    with torch.no_grad():
        value = loss().item()  # must be the same on both sides
    if spec["compile"] and spec["side"] == "ours":
        side.compile()
    step = spec["kind"] == "step"
    work = training_step(side, spec, loss) if step else torch.inference_mode()(encode)
    trained = sum(p.numel() for m in side.modules for p in m.parameters() if p.requires_grad)
    return work, {"loss": value, "trained": trained, "versions": side.versions}, side.idle


def main():
    spec = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    try:
        torch.set_num_threads(spec["threads"])
        cuda = spec["device"] == "cuda"
        work, about, idle = build(spec)
        if memory("VmRSS"):
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        print(json.dumps(about), file=answers)
        product, multiply_adds = matrix_product(spec, getattr(torch, spec["dtype"]))
        for line in sys.stdin:
            seconds = clock(work, spec["device"], 1)
            if cuda and line.strip() == "go":  # the first run has filled the allocator's cache
                seconds = clock(work, spec["device"], 10)
            peak = torch.cuda.max_memory_allocated() if cuda else memory("VmHWM") - idle
            rate = multiply_adds / clock(product, spec["device"], 1)
            if cuda:
                torch.cuda.empty_cache()  # leaves the memory to the others while this one waits
            print(json.dumps({"seconds": seconds, "memory": peak, "rate": rate}), file=answers)
    except Exception as e:
        print(json.dumps({"error": f"{type(e).__name__}: {e}"}), file=answers)
        raise


if __name__ == "__main__":
    main()
