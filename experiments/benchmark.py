"""What does a step cost, in time and memory, here and in the reference library?

    python -m experiments.benchmark --peer-python .venv-peer/bin/python --dtype float32 bfloat16

Every measurement runs in a process of its own: an encoder of BERT-base's size with random weights,
and full batches of 128 tokens. The reference loads what ours has saved, and must compute the same
loss. In every repeat the processes follow each other, and a ratio is taken within a repeat, so that
other load on the machine hardly changes it."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch._dynamo  # AdamW imports it: a library's memory is not the row's
import torch.nn.functional as F

from fast.recorded import Recorded
from runtime.command import Parser, count, run_command
from runtime.processes import choose_device

ROWS = {"stage 1 step": 1, **{f"fusion step, N = {n}": n for n in (1, 4, 16, 64)}}


def ours(row, root, save=False):
    """(model, its loss on a batch); save: what the reference loads"""
    import train
    from adapter import AdapterConfig, Head, add_adapter, save_adapter, save_head
    from bert import Bert, BertConfig
    from fusion import add_fusion, fusion_regularization, save_fusion

    torch.manual_seed(0)
    bert, names = Bert(BertConfig()), [f"a{i}" for i in range(ROWS[row])]
    for name in names:
        add_adapter(bert, name, AdapterConfig.pfeiffer())
    if "fusion" in row:
        add_fusion(bert, names)
    head = Head({"head_type": "classification", "num_labels": 2, "layers": 2}, bert.config)
    if save:
        bert.save_pretrained(root / "encoder")
        save_head(head, bert, "task", root / "head")
        for name in names:
            save_adapter(bert, name, root / name)
        if "fusion" in row:
            save_fusion(bert, root / "fusion")
    model = train.Model(bert, head)
    return model, lambda b: F.cross_entropy(model(b), b["labels"]) + fusion_regularization(bert)


def peer(row, root):
    """The same of the reference library."""
    import adapters
    from adapters.composition import Fuse

    model = adapters.AutoAdapterModel.from_pretrained(root / "encoder")
    names, files = [f"a{i}" for i in range(ROWS[row])], {"with_head": False}
    for name in names:
        model.load_adapter(str(root / name), use_safetensors=True, **files)
    if "fusion" in row:
        model.load_adapter_fusion(str(root / "fusion"), use_safetensors=True, **files)
        model.train_adapter_fusion(Fuse(*names))  # activates it and freezes the rest
    else:
        model.train_adapter(names[0])
    _, model.active_head = model.load_head(str(root / "head"), use_safetensors=True)
    penalty = model.get_fusion_regularization_loss if "fusion" in row else lambda: 0
    return model, lambda batch: model(**batch).loss + penalty()


def peak_memory():
    """Of this process so far, in bytes."""
    return 1024 * int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])


def measure(side, row, root, batch_size, device, dtype):
    """Prints the loss, seconds, and bytes above the imported libraries, as JSON."""
    __import__("adapters" if side == "peer" else "train")  # before `idle` is measured
    idle, in_bf16 = peak_memory(), dtype == "bfloat16"
    model, loss_of = (peer if side == "peer" else ours)(row, Path(root))
    trained = [p for p in model.parameters() if p.requires_grad]
    if side != "peer":  # which has fp32 also under autocast, as in its trainer
        choose_device(device, dtype)  # sets PyTorch up, as in train.py
        for p in {*model.parameters()} - {*trained}:
            p.data = p.data.to(getattr(torch, dtype))
    for module in model.modules() if side == "textbook" else ():
        if hasattr(module, "fast_form"):
            module.fast_form = None
    model.to(device).eval()
    ids = torch.arange(batch_size * 128, device=device).view(-1, 128) % 1000
    batch = {"input_ids": ids, "token_type_ids": ids * 0, "attention_mask": ids * 0 + 1}
    batch["labels"] = ids[:, 0] % 2
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0, fused=True)

    def gradients(model, task, args, batch, share):  # as train.py's
        with torch.autocast(device, torch.bfloat16, in_bf16):
            loss = share * loss_of(batch)
        loss.backward()
        return loss.detach()

    loss = gradients(model, None, None, batch, 1.0).item()
    optimizer.zero_grad()
    model.train()  # with dropout
    compute = Recorded(gradients, trained, dtype, 500) if side == "recorded" else gradients
    warm_up, steps = (3, 10) if device == "cuda" else (1, 1)  # the second one is recorded
    for number in range(warm_up + steps):  # a step as in train.py, and in transformers' trainer
        if number == warm_up:
            start = time.perf_counter()
        last = compute(model, None, None, batch, 1.0)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        last.item()  # waits for a GPU
    seconds = (time.perf_counter() - start) / steps
    peak = peak_memory() - idle if device == "cpu" else torch.cuda.max_memory_allocated()
    print(json.dumps({"loss": loss, "seconds": seconds, "memory": peak}))


def run(python, *given):
    """What `measure` prints in a process of its own"""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(torch.get_num_threads())}
    code = f"from experiments.benchmark import measure; measure(*{given})"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=env)
    if done.returncode != 0:
        raise ValueError(f"{given[0]}: {done.stderr[-300:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(argv=None):
    from experiments.report import markdown  # needs what the reference's has not

    parser = Parser("python -m experiments.benchmark", description=__doc__)
    add = parser.add_argument
    add("--peer-python", help="with tests/requirements-peer.txt; without, only ours is measured")
    add("--rows", nargs="+", default=[""], help="only rows with one of these texts in their names")
    add("--repeats", type=count, default=5)
    add("--batch", type=count, default=8, help="examples; a quarter of them with 64 adapters")
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--dtype", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    add("--cuda-graphs", action="store_true", help="also our steps as they are recorded on a GPU")
    add("--textbook", action="store_true", help="also a fusion by the equations, term by term")
    args, lines = parser.parse_args(argv), []
    for dtype in args.dtype:
        choose_device(args.device, dtype, args.cuda_graphs)  # or an error
    sides = ["ours", *["recorded"] * args.cuda_graphs, *["textbook"] * args.textbook]
    sides += ["peer"] * bool(args.peer_python)
    for row in [row for row in ROWS if any(text in row for text in args.rows)]:
        print(row, file=sys.stderr, flush=True)
        batch = max(args.batch // 4, 1) if ROWS[row] == 64 else args.batch
        found = {(side, dtype): [] for dtype in args.dtype for side in sides}
        with tempfile.TemporaryDirectory() as root:
            ours(row, Path(root), save=True)
            for side, dtype in [*found] * args.repeats:
                python = args.peer_python if side == "peer" else sys.executable
                one = run(python, side, row, root, batch, args.device, dtype)
                found[side, dtype].append(one)
        losses = [one["loss"] for results in found.values() for one in results]
        if not max(losses) - min(losses) <= (1e-5 if args.dtype == ["float32"] else 0.1):
            raise ValueError(f"{row}: all sides must have one loss, not {losses}")
        for (side, dtype), results in found.items():
            seconds = [one["seconds"] for one in results]
            pairs = zip(results, found["ours", dtype], strict=True)  # which followed each other
            ratios = [a["seconds"] / b["seconds"] for a, b in pairs]
            memory = max(one["memory"] for one in results) / 1e9
            spread = [f"{median(x):.3f} ({min(x):.3f}–{max(x):.3f})" for x in (seconds, ratios)]
            lines.append([row, side, dtype, *spread, memory])
    print(markdown(lines, "row,side,dtype,seconds,ratio to ours,peak memory in GB".split(",")))
    threads = torch.get_num_threads()
    print(f"torch {torch.__version__}, {threads} threads, {args.batch} × 128 tokens, {args.device}")


if __name__ == "__main__":
    run_command("benchmark", main)
