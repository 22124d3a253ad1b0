"""One row of experiments/benchmark.py on one side, in a process of its own:

    python -m experiments.benchmark_worker SPEC              SPEC: JSON, see `columns_of` there

"side": "ours" runs in this project's environment, "peer" in the reference library's. Both sides
build their model here and are measured by the same code. The last line is JSON: the loss, how many
parameters are trained, seconds, peak memory in bytes, and the floor: the seconds that the row's
multiply-adds take at the rate of a feed-forward layer's matrix product.
"""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch._dynamo  # AdamW and the counter import it: a library's memory is not the row's
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

FIELDS = "input_ids", "token_type_ids", "attention_mask"


def memory(field):
    """VmRSS, or VmHWM, its peak, in bytes; 0 where there is no /proc."""
    path = Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def ours(spec, batch):
    from adapter import activate, load_adapter, load_head
    from bert import Bert
    from fusion import fusion_regularization, load_fusion
    from runtime.processes import choose_device
    from train import Model, cast_parts, trained_parts

    idle, root = memory("VmRSS"), Path(spec["root"])
    bert = Bert.from_pretrained(root / "encoder")
    names = [load_adapter(bert, root / f"a{i}") for i in range(spec["adapters"])]
    if spec["fused"]:
        load_fusion(bert, root / f"fusion{len(names)}")
    elif names:
        activate(bert, names[0])
    head = load_head(bert, root / "head")
    device, dtype = choose_device(spec["device"], spec["dtype"])
    trained = ".fusion." if spec["fused"] else ".adapters."
    for name, p in bert.named_parameters():
        p.requires_grad_(trained in name)
    model = Model(bert, head.requires_grad_(True), dtype).to(device)
    cast_parts(model, dtype, trained_parts(model))  # as in training
    return SimpleNamespace(
        idle=idle,
        model=model,
        loss=lambda: F.cross_entropy(model(batch), batch["labels"].to(device)),
        regularization=lambda: fusion_regularization(bert),
        encode=lambda: bert(*(batch[name].to(device) for name in FIELDS)),
    )


def peer(spec, batch):
    import adapters
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

    def given(*names):
        return {name: batch[name].to(spec["device"]) for name in names}

    return SimpleNamespace(
        idle=idle,
        model=model,
        loss=lambda: model(**given(*FIELDS, "labels")).loss,
        regularization=model.get_fusion_regularization_loss,
        encode=lambda: model.base_model(**given(*FIELDS)),
    )


def training_step(side, loss, fused):
    """Both sides take the same step: loss, a fusion's regularization, backward, clipping at norm 1
    and fused AdamW, which is the loop of train.py and the default of transformers' trainer."""
    side.model.train()  # dropout is on
    parameters = [p for p in side.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0, fused=True)

    def step():
        optimizer.zero_grad()
        (loss() + (side.regularization() if fused else 0)).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return step


def matrix_product(spec, dtype, tokens):
    """(a feed-forward layer's product, as a function; its multiply-adds)"""
    config = json.loads((Path(spec["root"]) / "encoder" / "config.json").read_text())
    d, m = config["hidden_size"], config["intermediate_size"]
    x = torch.randn(tokens, d, device=spec["device"], dtype=dtype)
    weight = torch.randn(m, d, device=spec["device"], dtype=dtype)
    y = x.new_empty(tokens, m)  # new memory would cost more than the product of a small batch
    return lambda: torch.mm(x, weight.T, out=y), tokens * d * m


def multiply_adds(work):
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        work()
    return counter.get_total_flops() / 2


def clock(work, times):
    """Seconds of one run, the mean of several."""
    start = time.perf_counter()
    for _ in range(times):
        work()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / times


def main():
    spec = json.loads(sys.argv[1])
    cuda, dtype = spec["device"] == "cuda", getattr(torch, spec["dtype"])
    batch = load_file(Path(spec["root"]) / f"batch{spec['batch']}.safetensors")
    side = {"ours": ours, "peer": peer}[spec["side"]](spec, batch)
    autocast = torch.autocast(spec["device"], torch.bfloat16, enabled=dtype == torch.bfloat16)
    loss, encode = autocast(side.loss), autocast(side.encode)
    side.model.eval()
    with torch.no_grad():  # what must be the same on both sides
        result = {"loss": loss().item()}
    step = spec["kind"] == "step"
    work = training_step(side, loss, spec["fused"]) if step else torch.no_grad()(encode)
    result["trained"] = sum(p.numel() for p in side.model.parameters() if p.requires_grad)
    product, of_product = matrix_product(spec, dtype, batch["input_ids"].numel())
    products = multiply_adds(work) / of_product  # as many take as long as the row's
    clock(work, 1), clock(product, 1)  # they warm up
    if memory("VmRSS"):
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    result["seconds"] = clock(work, 10 if cuda else 1)
    result["memory"] = torch.cuda.max_memory_allocated() if cuda else memory("VmHWM") - side.idle
    result["floor"] = products * clock(product, 10)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
