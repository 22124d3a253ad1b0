"""One measured row of experiments/benchmark.py on one side, in a process of its own.

    python -m experiments.benchmark_worker SPEC      SPEC: a JSON object, see `rows` in benchmark.py

It runs in this project's environment ("side": "ours") or in the reference library's ("side":
"peer"): what is measured is built by `ours` and `peer`, how it is measured is one piece of code for
both. Once everything is built it prints a line of JSON about itself; then for every line on stdin
("warm" or "go") it runs the row once and prints seconds and peak memory.
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

FIELDS = ("input_ids", "token_type_ids", "attention_mask")
STATUS = Path("/proc/self/status")


def memory(field):
    """VmRSS or VmHWM, its peak, in bytes; None where there is no /proc."""
    if not STATUS.exists():
        return None
    return next(
        int(line.split()[1]) * 1024
        for line in STATUS.read_text().splitlines()
        if line.startswith(field)
    )


def ours(spec, dtype):
    from adapter import activate, load_adapter, load_head
    from bert import Bert
    from fusion import fusion_regularization, load_fusion
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
    if spec["kind"] == "step":  # what train.py holds in fp32 and trains
        for _, slot in bert.slots():
            modules = slot.adapters.values()
            if spec["fused"]:
                modules = [] if slot.fusion is None else [slot.fusion]
            for module in modules:
                module.float().requires_grad_(True)
        head.requires_grad_(True)
    batch = load_file(root / f"batch{spec['batch']}.safetensors")
    if spec["fold"]:
        bert = fold(bert)

    def loss():
        return F.cross_entropy(predict(bert, head, batch, dtype), batch["labels"].to(bert.device))

    return SimpleNamespace(
        idle=idle,
        modules=[bert, head],
        loss=loss,
        regularization=partial(fusion_regularization, bert),
        encode=lambda: bert(
            *(batch[name].to(bert.device) for name in FIELDS)
        ),  # [B, T, d], all positions
        about={},
    )


def peer(spec, dtype):
    import adapters
    import transformers
    from adapters.composition import Fuse

    idle, root = memory("VmRSS"), Path(spec["root"])
    model = adapters.AutoAdapterModel.from_pretrained(root / "encoder")
    names = [
        model.load_adapter(str(root / f"a{i}"), with_head=False, use_safetensors=True)
        for i in range(spec["adapters"])
    ]
    if spec["fused"]:
        model.load_adapter_fusion(
            str(root / f"fusion{len(names)}"), with_head=False, use_safetensors=True
        )
        model.train_adapter_fusion(Fuse(*names))  # freezes the rest, and makes it active
    elif names:
        model.train_adapter(names[0])
    _, head = model.load_head(str(root / "head"), use_safetensors=True)
    model.active_head = head
    model.to(spec["device"])  # in fp32 also with autocast: what its trainer's bf16=True does

    def loss(batch):
        return model(**{name: tensor.to(spec["device"]) for name, tensor in batch.items()}).loss

    batch = (
        None if spec["kind"] == "epoch" else load_file(root / f"batch{spec['batch']}.safetensors")
    )
    return SimpleNamespace(
        idle=idle,
        modules=[model],
        loss=partial(loss, batch),
        loss_of=loss,
        regularization=model.get_fusion_regularization_loss,
        encode=lambda: model.base_model(
            **{name: batch[name].to(spec["device"]) for name in FIELDS}
        ),
        about={
            "transformers": transformers.__version__,
            "adapters": adapters.__version__,
            "attention": model.config._attn_implementation,
        },
    )


# --------------------------------------------------------------------------------------------------
# What a row does: functions of no arguments, to be timed


def training_step(side, spec, loss):
    """Both sides the same: loss, regularisation of a fusion, backward, clipping at norm 1, fused
    AdamW. That is the loop of train.py, and the default of transformers' trainer (optim
    adamw_torch_fused, max_grad_norm 1, no weight decay)."""
    for module in side.modules:
        module.train()  # dropout is on
    parameters = [p for module in side.modules for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0, fused=True)

    def work(*batch):
        optimizer.zero_grad()
        value = loss(*batch)
        if spec["fused"]:
            value = value + side.regularization()
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return work


def clock(work, device, warm):
    """Seconds of one run. On a GPU, unless it is the one that warms up, the mean of ten after a
    first one, which fills the cache of its allocator."""
    start = time.perf_counter()
    work()
    if device == "cpu":
        return time.perf_counter() - start
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    if not warm:
        start = time.perf_counter()
        for _ in range(10):
            work()
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / 10
    torch.cuda.empty_cache()  # this process now waits, and leaves the memory to the others
    return seconds


def matrix_product(spec, dtype):
    """The feed-forward product of one layer, ten times: the rate that the floor is computed
    with."""
    x = torch.randn(spec["tokens"], spec["d"], device=spec["device"], dtype=dtype)
    weight = torch.randn(spec["m"], spec["d"], device=spec["device"], dtype=dtype)

    def work():
        for _ in range(10):
            F.linear(x, weight)

    return work


def our_epoch(spec):
    """train.py itself, one epoch; its log has the seconds of training steps (collation included),
    and with the evaluation."""
    import train

    def measure(warm):
        examples = 64 if warm else spec["examples"]
        run = Path(spec["root"]) / f"run-{spec['task']}-{spec['dtype']}"
        options = {
            "stage": "adapter",
            "task": spec["task"],
            "model": spec["encoder"],
            "data-dir": spec["data_dir"],
            "limit-train": examples,
            "epochs": 1,
            "dtype": spec["dtype"],
            "device": spec["device"],
            "max-length": spec["length"],
            "batch-size": spec["batch"],
            "out": run,
        }
        argv = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        result = train.train(train.arguments([*argv, "--overwrite"]))
        line = json.loads((run / "log.jsonl").read_text())
        seconds = result["train_examples"] / line["examples_per_second"]
        return {
            "seconds": seconds,
            "evaluation": max(line["seconds"] - seconds, 0.0),
            "dev": result["dev_examples"],
        }

    return measure


def peer_epoch(side, spec):
    """The reference's example script, written out: random batches, padded to the full length or to
    the longest in the batch. Without its trainer's own overhead, on examples that are tokenised
    (and where it pads in advance, padded) already."""
    from transformers import default_data_collator

    data = load_file(Path(spec["root"]) / f"{spec['task']}.safetensors")
    ends = data["lengths"].cumsum(0).tolist()
    examples = []
    for start, end, label in zip([0, *ends[:-1]], ends, data["labels"].tolist(), strict=True):
        n, pad = end - start, [0] * (0 if spec["dynamic"] else spec["length"] - (end - start))
        examples.append(
            {
                "input_ids": data["input_ids"][start:end].tolist() + pad,
                "token_type_ids": data["token_type_ids"][start:end].tolist() + pad,
                "attention_mask": [1] * n + pad,
                "labels": label,
            }
        )

    def collate(batch):  # transformers' DataCollatorWithPadding, which would need a tokenizer
        T = max(len(example["input_ids"]) for example in batch)
        padded = {
            name: torch.tensor([e[name] + [0] * (T - len(e[name])) for e in batch])
            for name in FIELDS
        }
        return {**padded, "labels": torch.tensor([example["labels"] for example in batch])}

    step = training_step(side, spec, side.loss_of)

    def measure(warm):
        collator = collate if spec["dynamic"] else default_data_collator
        rows = examples[:64] if warm else examples
        start = time.perf_counter()
        for batch in torch.utils.data.DataLoader(
            rows, spec["batch"], shuffle=True, collate_fn=collator
        ):
            step(batch)
        if spec["device"] == "cuda":
            torch.cuda.synchronize()
        return {"seconds": time.perf_counter() - start}

    return measure


def build(spec):
    """(measure, about): the function that one line on stdin runs, and what to say before."""
    dtype, device = getattr(torch, spec["dtype"]), spec["device"]
    if spec["kind"] == "matrix":
        work = matrix_product(spec, dtype)
        return lambda warm: {"seconds": clock(work, device, warm)}, {}
    if spec["kind"] == "epoch" and spec["side"] == "ours":
        return our_epoch(spec), {}
    side = {"ours": ours, "peer": peer}[spec["side"]](spec, dtype)
    autocast = partial(
        torch.autocast, device, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16
    )
    about = {
        **side.about,
        "parameters": sum(
            p.numel() for m in side.modules for p in m.parameters() if p.requires_grad
        ),
    }
    if spec["kind"] == "epoch":
        side.loss_of = autocast()(side.loss_of)
        return peer_epoch(side, spec), about

    for module in side.modules:
        module.eval()
    loss, encode = autocast()(side.loss), autocast()(side.encode)
    with torch.no_grad():
        about["loss"] = (
            loss().item()
        )  # the same on both sides, or they do not compute the same function
    if spec["compile"]:
        from runtime.kernels import compile_layers

        compile_layers(side.modules[0])
    work = (
        training_step(side, spec, loss)
        if spec["kind"] == "step"
        else torch.inference_mode()(encode)
    )
    if STATUS.exists():
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def measure(warm):
        seconds = clock(work, device, warm)
        if device == "cuda":
            return {"seconds": seconds, "memory": torch.cuda.max_memory_allocated()}
        return {
            "seconds": seconds,
            "memory": STATUS.exists() and memory("VmHWM") - side.idle or None,
        }

    return measure, about


def main():
    spec = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    try:
        torch.set_num_threads(spec["threads"])
        measure, about = build(spec)
        print(json.dumps({**about, "torch": torch.__version__}), file=answers)
        for line in sys.stdin:
            print(json.dumps(measure(line.strip() == "warm")), file=answers)
    except Exception as e:
        print(json.dumps({"error": f"{type(e).__name__}: {e}"}), file=answers)
        raise


if __name__ == "__main__":
    main()
