"""argmin: one loop for every stage (section 3.1, section 4.1).

    python train.py --stage adapter --task rte                                       # Φ_rte <- argmin L(D_rte; Θ, Φ)
    python train.py --stage fusion --task rte --adapters runs/mnli runs/qqp runs/rte # Ψ <- argmin L(D_rte; Θ, Φ_1..N, Ψ)
    python train.py --stage head | full --task rte                                   # the paper's baselines (section 5.1)
    python train.py --stage multitask --tasks mnli qqp rte                           # Θ, Φ_1..N <- argmin Σ_n L(D_n; Θ, Φ_n)
    python train.py --stage eval --run runs/rte                                      # how good a finished run is

What a stage trains is what requires a gradient; Θ and Φ are otherwise never written to. A run directory holds the best
epoch in AdapterHub's files, and is all that `load_run` needs besides the encoder. `torchrun --nproc_per_node=G train.py ...`
computes the same on G devices: every process takes its share of each batch, the first one writes.
"""

import argparse
import fcntl
import hashlib
import json
import math
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import fields, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from adapter import (
    AdapterConfig,
    Head,
    PALConfig,
    activate,
    add_adapter,
    check_name,
    copy_adapter,
    fetch,
    load_adapter,
    load_head,
    paper_adapters,
    read_adapter_config,
    save_adapter,
    save_head,
    speak,
)
from bert import Bert, read_json, write_json
from data import batch_order, batches, collate, get_task, groups, load_split, load_tokenizer, refuse
from fusion import add_fusion, fusion_regularization, fusions, load_fusion, save_fusion, silence

# Section 4.1 and appendix A.2: ST-A 1e-4 and at most 30 epochs, fusion 5e-5 and at most 10. The paper does not give those
# of its head and full baselines; these are ours. Multi-task training as in Stickland and Murray (2019): 25 epochs of 2400 steps.
DEFAULTS = {  # stage: (learning rate, epochs)
    "adapter": (1e-4, 30),
    "fusion": (5e-5, 10),
    "head": (1e-3, 30),
    "full": (2e-5, 10),
    "multitask": (2e-5, 25),
}
ADAPTERS = {  # --adapter
    **{name: getattr(AdapterConfig, name) for name in ("pfeiffer", "houlsby", "bapna")},
    **{name: getattr(PALConfig, name) for name in ("pal", "low_rank")},
}
EVAL_OPTIONS = ("stage", "run", "split", "task", "mask", "model", "data_dir", "max_length", "batch_size", "limit_dev",
                "strict_data", "device", "dtype")  # fmt: skip
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "merges.txt")


def arguments(argv=None):
    parser = argparse.ArgumentParser(description="Trains one stage of AdapterFusion on one task, or evaluates a finished run.")
    parser.error = refuse  # one line like all errors, without the usage
    add = parser.add_argument
    add("--stage", required=True, choices=[*DEFAULTS, "eval"])
    add("--task", help="one of the paper's 16 tasks, or your own in --data-dir")
    add("--tasks", nargs="+", default=[], help="multitask: all of them")
    add("--adapters", nargs="+", default=[], help="fusion: runs, AdapterHub directories, hub ids; paper: its authors' 16")
    add("--adapters-per-batch", type=int, metavar="K", help="fusion: train each step on K of them, drawn anew; evaluate with all")
    add("--run", help="eval: the directory of a finished run; everything not given is as it was in its training")
    add("--split", help="eval: DATA_DIR/TASK/SPLIT.jsonl, or the hub's split of that name; default validation")
    add("--mask", nargs="+", metavar="ADAPTER", help="eval: without these adapters of a fusion")
    add("--model", default="google-bert/bert-base-uncased", help="encoder: a directory or a hub id")
    add("--data-dir", help="directory with TASK/train.jsonl and TASK/validation.jsonl; without it: the hub")
    add("--out", help="run directory; default runs/TASK, runs/fusion-TASK (likewise head, full), runs/multitask")
    add("--adapter", choices=[*ADAPTERS, "none"], help="architecture of a new adapter; default pfeiffer, multitask pal")
    add("--reduction-factor", type=float, default=16.0, help="hidden size / bottleneck size of a new adapter")
    add("--adapter-config", nargs="+", default=[], metavar="FIELD=VALUE", help="changes single fields of that architecture, "
        "those of AdapterConfig (adapter.py): ln_after=true residual_before_ln=post_add leave_out=[5]")  # fmt: skip
    add("--epochs", type=int, help="at most; default adapter 30, fusion 10, head 30, full 10, multitask 25")
    add("--lr", type=float, help="then linearly to 0; default adapter 1e-4, fusion 5e-5, head 1e-3, full and multitask 2e-5")
    add("--warmup", type=float, help="share of the steps before that, in which it rises from 0; default multitask 0.1, else 0")
    add("--steps-per-epoch", type=int, default=2400, help="multitask")
    add("--sampling", default="annealed", choices=["annealed", "proportional", "sqrt", "round_robin"], help="multitask")
    add("--batch-size", type=int, default=32, help="examples per step, over all devices together")
    add("--grad-accumulation", type=int, default=1, help="run a batch in so many parts: less memory, the same gradients")
    add("--max-length", type=int, help="tokens per candidate; default by task")
    add("--patience", type=int, help="stop after so many epochs without a better dev accuracy; default 5, multitask: never")
    add("--weight-decay", type=float, default=0.0, help="AdamW's; never on biases, LayerNorms and fusion's V")
    add("--seed", type=int, default=0)
    add("--limit-train", type=int, help="train on so many examples, drawn with the seed")
    add("--limit-dev", type=int, help="evaluate on so many development examples, the same for every seed")
    add("--strict-data", action="store_true", help="refuse data with other row counts than the paper's")
    add("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"])
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="auto: bf16 on a GPU that has it")
    add("--compile", action="store_true", help="torch.compile the encoder; on a CPU it needs a C++ compiler")
    add("--save-minutes", type=float, default=5.0, help="how much work an interrupted run may have to repeat")
    add("--resume", action="store_true", help="continue an interrupted run: the same command, and this")
    add("--overwrite", action="store_true", help="replace a run that is already in --out")
    args = parser.parse_args(argv)
    if args.stage == "eval":  # again: an attribute that is there, if only as None, gets no default
        args = parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(vars(args))))
        for name, value in vars(args).items():
            if value is not None and name not in EVAL_OPTIONS:
                raise ValueError(f"--stage eval takes no --{name.replace('_', '-')}: it trains and writes nothing, see --run")
        if args.run is None:
            raise ValueError("--stage eval needs --run: the directory of a finished run")
        return args
    for name in ("run", "split", "mask"):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name} belongs to --stage eval, not to --stage {args.stage}")

    if args.resume and args.overwrite:
        raise ValueError("--resume continues what is in --out, --overwrite replaces it: choose one")
    lr, epochs = DEFAULTS[args.stage]
    args.lr = lr if args.lr is None else args.lr
    args.epochs = epochs if args.epochs is None else args.epochs
    multitask = args.stage == "multitask"
    if multitask and (args.task is not None or not args.tasks or len(set(args.tasks)) < len(args.tasks)):
        raise ValueError("--stage multitask takes --tasks, each of them once, and no --task")
    if not multitask and (args.tasks or args.task is None):
        raise ValueError(f"--stage {args.stage} takes --task, and no --tasks")
    args.adapter = args.adapter or ("pal" if multitask else "pfeiffer")
    args.warmup = (0.1 if multitask else 0.0) if args.warmup is None else args.warmup
    args.patience = (args.epochs if multitask else 5) if args.patience is None else args.patience
    prefix = "" if args.stage == "adapter" else f"{args.stage}-"
    args.adapter_config = dict(map(as_field, args.adapter_config))
    args.out = Path(args.out or ("runs/multitask" if multitask else f"runs/{prefix}{args.task}"))
    args.task, args.tasks = args.task or ",".join(args.tasks), args.tasks or [args.task]
    args.command = shlex.join(["train.py", *(sys.argv[1:] if argv is None else argv)])
    return args


def as_field(word):
    """ln_after=true -> ("ln_after", True). A value is JSON; a bare word is a string."""
    field, equals, value = word.partition("=")
    if not equals:
        raise ValueError(f"--adapter-config takes FIELD=VALUE, not {word!r:.50}")
    try:
        return field, json.loads(value)
    except (ValueError, RecursionError):
        return field, value


def check_counts(args):
    for name in ("epochs", "batch_size", "grad_accumulation", "patience", "limit_train", "limit_dev", "max_length",
                 "steps_per_epoch"):  # fmt: skip
        if getattr(args, name) is not None and not 1 <= getattr(args, name) < 10**9:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, and under 10^9, not {getattr(args, name)}")


def check(args):
    """Raises ValueError for arguments that make no sense, before anything is loaded."""
    check_counts(args)
    if not 0 < args.lr < math.inf:
        raise ValueError(f"--lr must be a positive number, not {args.lr}")
    if not 0 <= args.warmup < 1:
        raise ValueError(f"--warmup must be in [0, 1), not {args.warmup}")
    if args.adapter == "none" and args.stage == "adapter":
        raise ValueError("--adapter none leaves --stage adapter nothing to train: see --stage head and --stage full")
    if args.adapter_config:
        if args.stage not in ("adapter", "multitask") or args.adapter == "none":
            raise ValueError("--adapter-config belongs to a new adapter: --stage adapter or multitask, and no --adapter none")
        try:
            new_config(args.adapter, 1, args.adapter_config)  # whatever the bottleneck: see build
        except ValueError as e:
            raise ValueError(f"--adapter-config: {e}") from e
    if not 0 <= args.weight_decay < math.inf:
        raise ValueError(f"--weight-decay must be 0 or more, not {args.weight_decay}")
    if not 0 <= args.save_minutes < math.inf:
        raise ValueError(f"--save-minutes must be 0 (after every step) or more, not {args.save_minutes}")
    if not 0 <= args.seed < 2**32:
        raise ValueError(f"--seed must be in 0 .. 2^32 - 1, not {args.seed}")
    if args.stage == "fusion" and not args.adapters:
        raise ValueError("--stage fusion needs --adapters: the run directories of stage 1")
    if args.stage != "fusion" and args.adapters:
        raise ValueError(f"--adapters belongs to --stage fusion, not to --stage {args.stage}")
    if args.adapters_per_batch is not None and args.stage != "fusion":
        raise ValueError(f"--adapters-per-batch belongs to --stage fusion, not to --stage {args.stage}")
    if args.adapters_per_batch is not None and args.compile:
        raise ValueError("--compile and --adapters-per-batch do not go together: every subset would be compiled anew")
    if (args.out.exists() or args.out.is_symlink()) and not args.out.is_dir():
        raise ValueError(f"--out {args.out} is a file, or a link that leads nowhere")
    if args.out.is_dir() and any(args.out.iterdir()) and not (args.out / "log.jsonl").exists():
        raise ValueError(f"--out {args.out} holds other files than a run's: choose an empty or a new directory")
    for source in (args.model, *args.adapters):
        inside = (Path(source).resolve(), *Path(source).resolve().parents) if Path(source).is_dir() else ()
        if args.out.is_dir() and args.out.resolve() in inside:
            raise ValueError(f"--out {args.out} would replace {source}, which this run needs")
    if (args.out / "metrics.json").exists() and not args.overwrite:
        raise ValueError(f"{args.out} already holds a finished run: choose another --out, or --overwrite it")
    if (args.out / "resume.pt").exists() and not (args.overwrite or args.resume):
        raise ValueError(f"{args.out} holds an interrupted run: continue it with --resume, or --overwrite it")
    if args.compile and not shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")):
        raise ValueError("--compile needs a C++ compiler: install g++, or name one in the environment variable CXX")


def choose_device(device, dtype):
    """("auto", "auto") -> (torch.device, torch.dtype). Raises ValueError for a device that is not there."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if device == "auto":
        device = next(name for name in available if available[name])
    if not available[device]:
        raise ValueError(f"--device {device}: there is no such device on this machine")
    if device == "cuda" and dist.is_torchelastic_launched():
        here = int(os.environ["LOCAL_WORLD_SIZE"])
        if here > torch.cuda.device_count():
            raise ValueError(f"torchrun started {here} processes on a machine with {torch.cuda.device_count()} GPUs")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" and torch.cuda.is_bf16_supported() else "float32"
    return torch.device(device), getattr(torch, dtype)


def new_config(adapter, reduction_factor, changes):
    """The configuration that --adapter stands for, with the changes of --adapter-config. PALs have a size of their own in place
    of a reduction factor. Raises ValueError, naming the field, for a change that is wrong or would change nothing."""
    preset, pal = ADAPTERS[adapter], adapter in ("pal", "low_rank")
    known = [field.name for field in fields(preset.__self__) if field.name != "reduction_factor"]
    for field in changes:
        if field == "reduction_factor" and not pal:
            raise ValueError("reduction_factor is set by --reduction-factor")
        if field not in known:
            raise ValueError(f"{field!r:.50} is no field of --adapter {adapter}, which has {', '.join(known)}")
    config = preset(**({} if pal else {"reduction_factor": reduction_factor}), **changes)
    for field, reason in ({} if pal else config.without_effect()).items():
        if field in changes:
            raise ValueError(reason)
    return config


def check_length(max_length, bert):
    if not 8 <= max_length <= bert.config.max_length:
        raise ValueError(f"--max-length must be in 8 .. {bert.config.max_length} for this encoder, not {max_length}")


def build(args, tasks, device, dtype):
    """The encoder with what the stage trains plugged in, and a new head for each task. Frozen weights are held in `dtype`,
    trained ones in fp32. Returns (bert, heads, [(name, directory) of fused adapters])."""
    bert = Bert.from_pretrained(args.model)
    if args.max_length is None:
        args.max_length = min(max(task.max_length for task in tasks), bert.config.max_length)
    check_length(args.max_length, bert)
    bert.to(device, torch.float32 if args.stage in ("full", "multitask") else dtype)
    torch.manual_seed(args.seed)
    fused = []
    if args.stage in ("adapter", "multitask") and args.adapter != "none":
        if not 0 < args.reduction_factor <= bert.config.hidden_size:
            raise ValueError(
                f"--reduction-factor {args.reduction_factor:g} leaves no bottleneck in hidden size {bert.config.hidden_size}"
            )
        factor = int(args.reduction_factor) if args.reduction_factor.is_integer() else args.reduction_factor
        config = new_config(args.adapter, factor, args.adapter_config)
        if not {*config.leave_out} <= {*range(len(bert.layers))}:
            layers = f"0 .. {len(bert.layers) - 1}"
            raise ValueError(f"--adapter-config: leave_out {list(config.leave_out)!r:.50} has others than the layers {layers}")
        for task in tasks:
            add_adapter(bert, task.name, config)
    if args.stage in ("full", "multitask"):
        bert.requires_grad_(True)
    if args.stage == "fusion":
        sources = [pair for s in args.adapters for pair in (paper_adapters(bert) if s == "paper" else [(None, s)])]
        if resumes(args) and (args.out / "config.json").exists():  # the run's own copies: a source may be gone, or newer
            sources = [(name, args.out / "adapters" / name) for name in read_json(args.out / "config.json")["adapters"]]
        for name, source in sources:
            directory = fetch(source)
            name, _, values = read_adapter_config(directory, name)
            if name in dict(fused):
                raise ValueError(f"two adapters are called {name!r}: {dict(fused)[name]} and {directory}")
            trained_on = Path(str(values.get("model_name") or args.model)).name
            if trained_on != Path(args.model).name:
                print(f"note: {source} was trained on {trained_on!r:.100}, not on {args.model}")
            fused.append((load_adapter(bert, directory, name), directory))
        add_fusion(bert, [name for name, _ in fused])
        K, N = args.adapters_per_batch, len(fused)
        if K is not None and not 2 <= K <= N:  # the softmax over one is 1, whatever Q and K are
            raise ValueError(f"--adapters-per-batch must be in 2 .. {N}, the number of --adapters, not {K}: Q and K learn "
                             "nothing from one")  # fmt: skip
        for (layer, _), fusion in fusions(bert) if K is not None else ():
            if (here := len(fusion.adapter_names)) <= N - K:
                raise ValueError(f"--adapters-per-batch must be {N - here + 1} or more, not {K}: layer {layer + 1} has {here} of "
                                 f"the {N} adapters, and one has to be among those drawn")  # fmt: skip
    heads = nn.ModuleList()
    for task in tasks:
        config = {"head_type": "multiple_choice", "num_choices": len(task.labels), "layers": 2}
        if not task.choices:
            config = {"head_type": "classification", "num_labels": len(task.labels), "layers": 2}
        config["label2id"] = {label: i for i, label in enumerate(task.labels)}
        heads.append(Head(config, bert.config).to(device))
    return bert, heads, fused


def predict(bert, head, batch, dtype):
    """Logits [B, K] of a batch from data.py."""
    cls, order = [], []
    with torch.autocast(bert.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        for rows, inputs in groups(batch):
            cls.append(bert(*(tensor.to(bert.device) for tensor in inputs), cls_only=True))  # [B, T] -> [B, 1, d]
            order.append(rows)
        h = torch.cat(cls)[torch.cat(order).argsort().to(bert.device)]  # [B·C, 1, d], an example's candidates in a row
        return head(h).float()


@torch.inference_mode()
def evaluate(bert, head, split, batch_size, dtype):
    """(labels, predictions) of a split, [examples] each, in the order of `batches`. Leaves bert and head in eval mode. Raises
    FloatingPointError for logits that are not finite."""
    rank, world = processes()
    bert.eval(), head.eval()
    size, pairs = batch_size * world, torch.zeros(2, len(split), dtype=torch.long)
    for i, batch in enumerate(batches(split, size, bert.config.pad_token_id, rank=rank, world=world)):
        logits = predict(bert, head, batch, dtype)
        predictions = logits.argmax(-1).where(logits.isfinite().all(-1), -1)
        pairs[:, i * size + rank : (i + 1) * size : world] = torch.stack([batch["labels"], predictions.cpu()])
    labels, predictions = total(pairs)  # elsewhere each process has zeros
    if (predictions < 0).any():
        raise FloatingPointError("the model's outputs are not finite")
    return labels, predictions


def prepare(args):
    """Everything that can be wrong with a command is found here, before anything is written."""
    check(args)
    if (args.out / "log.jsonl").exists():
        lock(args.out, fcntl.LOCK_SH).close()  # says so now if another process is at work there
    device, dtype = choose_device(args.device, args.dtype)
    tasks = [get_task(name, args.data_dir) for name in args.tasks]
    bert, heads, fused = build(args, tasks, device, dtype)
    tokenizer = load_tokenizer(bert.directory, args.max_length, bert.config.vocab_size, bert.config.type_vocab_size)
    options = {"data_dir": args.data_dir, "strict": args.strict_data}
    train_splits = [load_split(task, "train", tokenizer, limit=args.limit_train, seed=args.seed, **options) for task in tasks]
    dev_splits = [load_split(task, "validation", tokenizer, limit=args.limit_dev, **options) for task in tasks]
    return tasks, bert, heads, fused, train_splits, dev_splits, device, dtype


def task_probabilities(sizes, sampling, epoch, epochs):
    """Of each task to be the next, by the sizes of their training sets. Stickland and Murray (2019), section 3.3: size^α, with
    an α that falls from 1 to 0.2 over the epochs ("annealed"), of 1 ("proportional") or 0.5 ("sqrt")."""
    alpha = {"annealed": 1 - 0.8 * (epoch - 1) / max(epochs - 1, 1), "proportional": 1.0, "sqrt": 0.5}[sampling]
    return np.asarray(sizes) ** alpha / (np.asarray(sizes) ** alpha).sum()


def schedule(args, lengths, epoch):
    """[(number of the task, its examples)] for every step of an epoch. lengths: in tokens, of each task's examples."""
    if args.stage != "multitask":
        return [(0, indices) for indices in batch_order(lengths[0], args.batch_size, (args.seed, epoch))]
    drawn = []  # by epoch, also of those before: each task goes on in its own data where it stopped
    for e in range(1, epoch + 1):
        if args.sampling == "round_robin":
            drawn.append(np.arange((e - 1) * args.steps_per_epoch, e * args.steps_per_epoch) % len(lengths))
        else:
            p = task_probabilities([len(task) for task in lengths], args.sampling, e, args.epochs)
            drawn.append(np.random.default_rng((args.seed, e)).choice(len(lengths), args.steps_per_epoch, p=p))
    taken = np.bincount(np.concatenate([*drawn[:-1], []]).astype(int), minlength=len(lengths))
    result, orders = [], {}
    for number in drawn[-1].tolist():
        turn, step = divmod(taken[number], math.ceil(len(lengths[number]) / args.batch_size))
        if (number, turn) not in orders:
            orders[number, turn] = batch_order(lengths[number], args.batch_size, (args.seed, turn, number))
        result.append((number, orders[number, turn][step]))
        taken[number] += 1
    return result


def run(args):
    """Trains, and returns the closing line's dictionary. Raises ValueError and OSError for wrong input and what cannot be
    written, FloatingPointError for a loss that is not finite (the best epoch before it is saved), MemoryError, and
    KeyboardInterrupt after Ctrl-C or SIGTERM."""
    *prepared, device, dtype = prepare(args)
    try:
        if dist.is_torchelastic_launched():  # nothing is written before all processes have come this far
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        rank, _ = processes()
        with lock(args.out) if rank == 0 else open(os.devnull, "w") as log:  # the first process writes
            if rank == 0:
                check(args)  # again: another run may have ended there in the meantime
            result = train(args, log, *prepared, device, dtype)
    except (OSError, SafetensorError) as e:
        if processes()[0] == 0:
            clear(args.out, TEMPORARY)
        kept = "; its last state is intact, continue with --resume" if (args.out / "resume.pt").exists() else ""
        raise OSError(f"stopped, {args.out} cannot be written: {e}{kept}") from e
    except RuntimeError as e:
        if not isinstance(e, dist.DistError) and "gloo" not in str(e):
            raise
        raise ConnectionError("another process of this run has ended: see there for the reason, continue with --resume") from e
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


class Model(nn.Module):
    """`predict` as the one module that DistributedDataParallel asks for."""

    def __init__(self, bert, heads):
        super().__init__()
        self.bert, self.heads = bert, heads

    def forward(self, number, batch, dtype):
        return predict(self.bert, self.heads[number], batch, dtype)


def train(args, log, tasks, bert, heads, fused, train_splits, dev_splits, device, dtype):
    """The loop, from the start or from where resume.pt left it, and the files of the best epoch. log: log.jsonl, locked."""
    rank, world = processes()
    named = {f"bert.{name}": p for name, p in bert.named_parameters() if p.requires_grad}
    named |= {f"heads.{name}": p for name, p in heads.named_parameters()}
    parameters = list(named.values())
    decayed = [name for name, p in named.items() if p.ndim > 1 and not name.endswith("fusion.value.weight")]
    optimizer = torch.optim.AdamW(
        [
            {"params": [named[name] for name in decayed], "weight_decay": args.weight_decay},
            {"params": [p for name, p in named.items() if name not in decayed], "weight_decay": 0.0},
        ],
        lr=args.lr,
        fused=device.type != "mps",
    )
    multitask = args.stage == "multitask"
    lengths = [np.asarray(split.with_format("numpy")["length"][:]) for split in train_splits]
    steps_per_epoch = args.steps_per_epoch if multitask else math.ceil(len(lengths[0]) / args.batch_size)
    total_steps = steps_per_epoch * args.epochs
    digest = hashlib.sha256()  # of the data, as far as a look at every text is not needed
    for split in (*train_splits, *dev_splits):
        columns = split.with_format("numpy")
        digest.update(columns["length"][:].tobytes() + columns["label"][:].tobytes())
    config = {
        **settings(args),
        "data_sha256": digest.hexdigest(),
        "labels": {task.name: list(task.labels) for task in tasks} if multitask else list(tasks[0].labels),
        "columns": {task.name: list(task.columns) for task in tasks},
        # a checkpoint's config.json has none: there AdapterHub's library takes "adapters" for its own
        **({} if args.stage in ("full", "multitask") else {"adapters": [name for name, _ in fused]}),
        "steps_per_epoch": steps_per_epoch,
        "data_revision": ",".join(split.info.description for split in train_splits).strip(",") or None,
        "train_examples": sum(map(len, train_splits)),
        "dev_examples": sum(map(len, dev_splits)),
        "trained_parameters": sum(p.numel() for p in parameters),
        "dtype": str(dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else device.type,
        "compile": args.compile,
        "threads": torch.get_num_threads(),
        "processes": world,
        "versions": {name: version(name) for name in ("torch", "numpy", "tokenizers", "safetensors", "datasets")},
        "python": platform.python_version(),
        "commit": commit(),
        "command": args.command,
    }

    position = {"epoch": 1, "step": 0, "loss": 0.0, "best_epoch": 0, "accuracy": -1.0, "seconds": 0.0}
    best, history = {}, []
    if rank > 0:
        torch.manual_seed(args.seed + rank)  # dropout of its own
    if resumes(args):
        position, best, history = load_state(args.out / "resume.pt", config, named, optimizer, device)
    step = (position["epoch"] - 1) * steps_per_epoch + position["step"]
    if total(torch.tensor([step, step**2])).tolist() != [world * step, world * step**2]:
        raise ValueError(f"--out {args.out} must be one directory for all processes: they found different states there")
    if rank == 0:
        clear(args.out, TEMPORARY if resumes(args) else RUN_FILES + TEMPORARY)
        if not resumes(args):
            for name, directory in fused:  # copied first: the sources may be gone by the end
                copy_adapter(bert, directory, name, args.out / "adapters" / name)
        files = {name: args.out / "adapters" / name / "adapter.safetensors" for name, _ in fused}
        config["adapter_sha256"] = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
        write_json(args.out / "config.json", config)
        log.truncate(0)
        log.write("".join(json.dumps(line) + "\n" for line in history))

    if args.compile:
        bert.compile(dynamic=True)
    model = Model(bert, heads)
    if world > 1:  # only what is trained is synchronised: the mean of the gradients, in the backward pass
        # other tasks' adapters; own LayerNorms where the adapter has neither original_ln_before nor original_ln_after
        unused = multitask or args.adapter_config.get("layer_norms", False)
        model = DistributedDataParallel(model, init_sync=False, find_unused_parameters=unused)
        for p in parameters:
            dist.broadcast(p.detach(), 0)

    started = time.monotonic() - position["seconds"]
    saved = time.monotonic()
    failure = None
    signals = []  # Ctrl-C and SIGTERM are heard between steps, where the state is whole
    handlers = {number: signal.signal(number, lambda number, _: signals.append(number))
                for number in (signal.SIGINT, signal.SIGTERM)}  # fmt: skip
    bert.train(), heads.train()  # dropout in the frozen encoder stays on, as in the reference
    try:
        while position["epoch"] <= args.epochs and position["epoch"] - position["best_epoch"] <= args.patience:
            epoch, epoch_started, first, seen = position["epoch"], time.monotonic(), position["step"], 0
            epoch_loss = torch.tensor(position["loss"], device=device)
            order = schedule(args, lengths, epoch)[first:]
            bar = tqdm(order, f"epoch {epoch}", steps_per_epoch, initial=first, leave=False, disable=rank > 0 or None)
            for number, indices in bar:
                progress = ((epoch - 1) * steps_per_epoch + position["step"]) / total_steps
                decay = (1 - progress) / (1 - args.warmup)
                for group in optimizer.param_groups:
                    group["lr"] = args.lr * (decay if progress >= args.warmup else progress / args.warmup)
                if multitask and args.adapter != "none":
                    speak(bert, tasks[number].name)
                if args.adapters_per_batch is not None:  # a draw that all processes, and a resumed run, make alike
                    drawn = np.random.default_rng((args.seed, epoch, position["step"] + 1)).permutation(config["adapters"])
                    silence(bert, drawn[args.adapters_per_batch :].tolist())
                optimizer.zero_grad()
                step_loss = torch.zeros((), device=device)
                portions = parts(indices, args.grad_accumulation)
                for i, (share, examples) in enumerate(portions):
                    batch = collate(train_splits[number][examples.tolist()], bert.config.pad_token_id)
                    model.require_backward_grad_sync = i == len(portions) - 1  # DistributedDataParallel: once per step
                    loss = F.cross_entropy(model(number, batch, dtype), batch["labels"].to(device))
                    step_loss += share * loss.detach()
                    if args.stage == "fusion":
                        loss = loss + fusion_regularization(bert)
                    (world * share * loss).backward()  # world: the gradients' mean over the processes is taken
                epoch_loss += total(step_loss)
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                position["step"] += 1
                seen += len(indices)
                if position["step"] % 10 == 0 or position["step"] == steps_per_epoch:
                    position["loss"] = epoch_loss.item()  # the sum over the epoch: once not finite, it stays so
                    if not math.isfinite(position["loss"]):
                        raise FloatingPointError(f"the loss is {position['loss']} in epoch {epoch}")
                    speed = args.batch_size * (position["step"] - first) / (time.monotonic() - epoch_started)
                    bar.set_postfix_str(
                        f"loss {position['loss'] / position['step']:.4f}, {speed:.0f} examples/s, "
                        f"dev {max(position['accuracy'], 0):.4f}"
                    )
                due = time.monotonic() - saved >= 60 * args.save_minutes
                stop, due = total(torch.tensor([len(signals), due])).tolist()  # what one process knows, all must
                if stop or due:
                    position |= {"loss": epoch_loss.item(), "seconds": time.monotonic() - started}
                    save_state(args.out / "resume.pt", config, named, optimizer, device, position, best, history)
                    saved = time.monotonic()
                    if stop:
                        raise KeyboardInterrupt

            trained, accuracies = time.monotonic(), {}
            if args.adapters_per_batch is not None:
                silence(bert, [])
            for task, head, split in zip(tasks, heads, dev_splits, strict=True):
                if multitask and args.adapter != "none":
                    speak(bert, task.name)
                labels, predictions = evaluate(bert, head, split, eval_batch_size(config), dtype)
                accuracies[task.name] = (labels == predictions).sum().item() / len(labels)
            bert.train(), heads.train()
            accuracy = sum(accuracies.values()) / len(accuracies)
            if accuracy > position["accuracy"]:
                position |= {"accuracy": accuracy, "best_epoch": epoch, "accuracies": accuracies}
                best = {name: p.detach().cpu().clone() for name, p in named.items()}
            history.append({"epoch": epoch, "loss": position["loss"] / steps_per_epoch, "dev_accuracy": accuracy,
                            **({"accuracies": accuracies} if multitask else {}),
                            "examples_per_second": round(seen / (trained - epoch_started), 1),
                            "seconds": round(time.monotonic() - started, 2)})  # fmt: skip
            log.write(json.dumps(history[-1]) + "\n")
            print(f"epoch {epoch}: loss {history[-1]['loss']:.4f}, dev accuracy {accuracy:.4f}, "
                  f"{history[-1]['examples_per_second']} examples/s", flush=True)  # fmt: skip
            position |= {"epoch": epoch + 1, "step": 0, "loss": 0.0, "seconds": time.monotonic() - started}
            save_state(args.out / "resume.pt", config, named, optimizer, device, position, best, history)
            saved = time.monotonic()
    except RuntimeError as e:
        if not out_of_memory(e):
            raise
        where = "in evaluation"
        if bert.training:
            where = "on a batch of {} examples, {} x {} tokens".format(len(batch["labels"]), *batch["input_ids"].shape)
        resume = "--resume and " if (args.out / "resume.pt").exists() else ""
        raise MemoryError(
            f"{device} ran out of memory {where}: continue with {resume}--grad-accumulation {2 * args.grad_accumulation}, "
            "which gives the same gradients, or start again with a smaller --batch-size"
        ) from e
    except FloatingPointError as e:
        broken = [name for name, p in bert.named_parameters() if not (p.requires_grad or p.isfinite().all())]
        advice = f"the encoder's {broken[0]} holds values that are not finite" if broken else "a lower --lr may help"
        kept = f"epoch {position['best_epoch']} is kept in {args.out}" if best else "no epoch was finished, nothing is kept"
        failure = FloatingPointError(f"{e}: stopped, {kept}; {advice}")
        if not best:
            if rank == 0:
                clear(args.out, [*RUN_FILES, *TEMPORARY, "log.jsonl"])
                if not any(args.out.iterdir()):
                    args.out.rmdir()
            raise failure from e
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    with torch.no_grad():
        for name, p in named.items():
            p.copy_(best[name])
    result = {
        **{name: config[name] for name in ("stage", "task", "seed", "train_examples", "dev_examples", "trained_parameters")},
        "model": args.model,
        "best_epoch": position["best_epoch"],
        "accuracy": position["accuracy"],
        **({"accuracies": position["accuracies"]} if multitask else {}),
        "seconds": round(position["seconds"], 2),
        "out": str(args.out),
    }
    if rank == 0:
        save_run(args, bert, heads, config)
        flush(*args.out.rglob("*"), args.out)
        write_json(args.out / "metrics.json", result)  # last: a directory with metrics.json is a finished run
        flush(args.out / "metrics.json", args.out)
        (args.out / "resume.pt").unlink(missing_ok=True)
    if failure:
        raise failure
    return result


def out_of_memory(error):
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)  # the latter on a CPU


# ----------------------------------------------------------------------------------------------------------------------
# --stage eval: how good a finished run is


def evaluate_run(args):
    """Prints it, and returns the closing line's dictionary; writes nothing. What is None in args is as it was in training.
    Raises ValueError and OSError for wrong input, FloatingPointError and MemoryError."""
    if dist.is_torchelastic_launched():
        raise ValueError("--stage eval is a single process: start it without torchrun")
    check_counts(args)
    started = time.monotonic()
    bert, head, config = load_run(args.run, model=args.model, task=args.task)
    if args.mask:
        silence(bert, args.mask)
    split = args.split or "validation"
    task, examples = load_run_split(
        args.run, bert, config, split, args.data_dir, args.max_length, args.limit_dev, bool(args.strict_data)
    )
    if (task.choices, len(task.labels)) != (head.config["head_type"] == "multiple_choice", head.num_outputs):
        raise ValueError(f"{args.run}: its head is not one for {task.name}")
    device, dtype = hold(bert, head, config, args.device or "auto", args.dtype)
    size = args.batch_size or eval_batch_size(config)
    try:
        labels, predictions = evaluate(bert, head, examples, size, dtype)
    except RuntimeError as e:
        if not out_of_memory(e):
            raise
        raise MemoryError(f"{device} ran out of memory: try a --batch-size under {size}") from e
    right = (labels == predictions).sum().item()
    result = {"stage": "eval", "run": str(args.run), "task": task.name, "split": split,
              "data_dir": args.data_dir or config["data_dir"], "masked": args.mask or [],
              "examples": len(labels), "accuracy": right / len(labels)}  # fmt: skip
    print(f"{args.run}, {task.name} {split}: {right} of {len(labels)} examples right, accuracy {result['accuracy']:.4f}")
    if split == "validation" and config["limit_dev"] and args.limit_dev is None:
        print(f"note: at most {config['limit_dev']} examples, as in training; --limit-dev takes another number")
    if not task.choices:  # the first and the second choice are no classes
        K = len(task.labels)
        confusion = torch.bincount(labels * K + predictions, minlength=K * K).view(K, K)  # [label, prediction]
        result |= {"labels": list(task.labels), "classes": per_class(task.labels, confusion), "confusion": confusion.tolist()}
        print("\n".join(["", *table(result), ""]))
    return {**result, "seconds": round(time.monotonic() - started, 2)}


def per_class(labels, confusion):
    """{label: precision, recall (None: of nothing) and count} from confusion [label, prediction]"""
    columns = (confusion.diagonal().tolist(), confusion.sum(0).tolist(), confusion.sum(1).tolist())
    return {label: {"precision": right / predicted if predicted else None, "recall": right / n if n else None, "count": n}
            for label, right, predicted, n in zip(labels, *columns, strict=True)}  # fmt: skip


def table(result, most=12):
    """Lines: a class each, with its row of the confusion matrix where there are not more than `most` classes."""
    K, width = len(result["labels"]), len(str(result["examples"])) + 2
    names = [f"{i} {' '.join(label.split()):.30}" for i, label in enumerate(result["labels"], 1)]
    left = max(map(len, names))
    predicted = "  predicted as" + "".join(f"{i:>{width}}" for i in range(1, K + 1)) if K <= most else ""
    yield f"{'label':{left}}  precision  recall{'count':>{max(width, 7)}}{predicted}"
    for name, values, row in zip(names, result["classes"].values(), result["confusion"], strict=True):
        shares = ["-" if values[key] is None else f"{values[key]:.3f}" for key in ("precision", "recall")]
        cells = " " * len("  predicted as") + "".join(f"{n:>{width}}" for n in row) if K <= most else ""
        yield f"{name:{left}}  {shares[0]:>9}  {shares[1]:>6}{values['count']:>{max(width, 7)}}{cells}"


def eval_batch_size(config):
    """Examples at once, as in the evaluations of training: padding and order of products decide about close calls."""
    return max(4 * config["batch_size"] // config["grad_accumulation"], 1)


def hold(bert, head, config, device, dtype=None):
    """(device, dtype): moves a loaded run there, its weights held as `build` does, those that its stage trains in fp32. Without
    dtype, that of its training."""
    device, dtype = choose_device(device, dtype or config["dtype"])
    trained = {"head": (), "adapter": (".adapters.", "norms."), "fusion": ("_norm.fusion.",)}.get(config["stage"], ("",))
    for name, p in bert.named_parameters():
        if not any(part in name for part in trained):
            p.data = p.data.to(dtype)
    bert.to(device), head.to(device)
    return device, dtype


# ----------------------------------------------------------------------------------------------------------------------
# Run directories


def save_run(args, bert, heads, config):
    """The files of a run, metrics.json excepted."""
    write_json(args.out / "config.json", config)
    if args.stage in ("full", "multitask"):  # also a checkpoint directory, which --model accepts
        bert.save_pretrained(args.out)
        for name in TOKENIZER_FILES:
            if (bert.directory / name).is_file():
                shutil.copyfile(bert.directory / name, args.out / name)
    if args.stage == "adapter":
        save_adapter(bert, args.task, args.out)
    if args.stage == "fusion":
        save_fusion(bert, args.out)
    if args.stage != "multitask":
        save_head(heads[0], bert, args.task, args.out)
        return
    bert.source = str(args.out)  # what these adapters belong to
    for name, head in zip(args.tasks, heads, strict=True):
        directory = args.out / ("heads" if args.adapter == "none" else "adapters") / name
        if args.adapter != "none":
            save_adapter(bert, name, directory)
        directory.mkdir(parents=True, exist_ok=True)
        save_head(head, bert, name, directory)


def is_texts(value):
    return type(value) is list and all(type(text) is str for text in value)


def load_run(directory, device="cpu", dtype=torch.float32, model=None, task=None):
    """
    (bert, head, config) of a finished run, frozen, in eval mode, everything active that was active in training.

    Needs the directory, and the encoder that config.json names unless the run has one of its own (full, multitask); `model`
    says where that encoder is now. `task` is which of a multi-task run's is meant; another run has but one.
    `predict(bert, head, batch, dtype)` gives its logits.
    Raises FileNotFoundError or ValueError for a directory that is not a finished run.
    """
    directory = Path(directory)
    if not (directory / "metrics.json").is_file():
        raise FileNotFoundError(f"no finished run in {directory}: it has no metrics.json")
    config = {"adapters": [], "data_dir": None, "grad_accumulation": 1, "limit_dev": None, "columns": {},
              **read_json(directory / "config.json")}  # fmt: skip
    stage, adapters, labels = (config.get(name) for name in ("stage", "adapters", "labels"))
    counts = ("max_length", "batch_size", "grad_accumulation", *(["limit_dev"] if config["limit_dev"] is not None else []))
    right = {
        "stage": stage in list(DEFAULTS),
        "adapters": is_texts(adapters),
        "labels": type(labels) is (dict if stage == "multitask" else list),
        "dtype": config.get("dtype") in ("float32", "bfloat16"),
        "data_dir": type(config["data_dir"]) in (str, type(None)),
        "columns": type(config["columns"]) is dict and all(map(is_texts, config["columns"].values())),
        **{name: type(config.get(name)) is str for name in ("task", "model")},
        **{name: type(config.get(name)) is int and config[name] > 0 for name in counts},
    }
    if wrong := [name for name in right if not right[name]]:
        raise ValueError(f"{directory / 'config.json'}: not the configuration of a run, {wrong[0]} is missing or wrong")
    own = stage in ("full", "multitask")
    if own and model is not None:
        raise ValueError(f"{directory} has an encoder of its own: --model is for runs that take another's")
    if stage != "multitask" and task not in (None, config["task"]):
        raise ValueError(f"{directory} is a run on {config['task']!r:.50}, not on {task!r:.50}")
    bert = Bert.from_pretrained(directory if own else model or config["model"]).to(device, dtype)
    if stage == "multitask":
        if type(labels.get(task)) is not list:
            raise ValueError(f"{directory} holds several tasks, and {task!r:.50} is none of them: {', '.join(labels)}")
        config |= {"task": task, "labels": labels[task]}
        check_name(task)
        directory /= f"{'heads' if config.get('adapter') == 'none' else 'adapters'}/{task}"
    if stage == "adapter" or stage == "multitask" and config.get("adapter") != "none":
        activate(bert, load_adapter(bert, directory))
    if stage == "fusion":
        for name in adapters:
            check_name(name)  # it is a directory's
            load_adapter(bert, directory / "adapters" / name)
        load_fusion(bert, directory)
    head = load_head(bert, directory)
    if head.num_outputs != len(config["labels"]):
        raise ValueError(f"{directory}: its head is for {head.num_outputs} labels, config.json has {len(config['labels'])}")
    return bert, head, config


def load_run_split(run, bert, config, split="validation", data_dir=None, max_length=None, limit=None, strict=False):
    """(task, split) of a run that `load_run` has loaded, from the data and at the length of its training unless others are
    given; `limit`: examples at most, else as many development examples as there. Raises as load_split does."""
    data_dir, max_length = data_dir or config["data_dir"], max_length or config["max_length"]
    limit = limit or (config["limit_dev"] if split == "validation" else None)
    check_length(max_length, bert)
    task = get_task(config["task"], data_dir, config["labels"], split)
    if list(task.labels) != config["labels"]:
        raise ValueError(f"{run} and {task.name} in {data_dir} have different labels, or choices")
    columns = config["columns"].get(task.name, [*task.columns])  # text_b of your own task is optional, but not now
    if columns != [*task.columns]:
        raise ValueError(f"{run} has read the columns {columns!r:.100}, the {split} split in {data_dir} has {[*task.columns]}")
    if split not in ("train", "validation"):
        task = replace(task, sizes=())  # the paper's are of these two
    tokenizer = load_tokenizer(bert.directory, max_length, bert.config.vocab_size, bert.config.type_vocab_size)
    return task, load_split(task, split, tokenizer, data_dir, limit=limit, strict=strict)


RUN_FILES = ["resume.pt", "metrics.json", "config.json", "adapter_config.json", "adapter.safetensors", "head_config.json",
             "model_head.safetensors", "adapter_fusion_config.json", "model_adapter_fusion.safetensors",
             "model.safetensors", *TOKENIZER_FILES, "adapters", "heads"]  # fmt: skip
TEMPORARY = [f"{name}.tmp" for name in RUN_FILES] + [".tmp??????"]  # of a killed or failed write; the last is safetensors' own


def clear(out, patterns):
    """Removes a run's files from its directory, and nothing else. log.jsonl stays until the last: it marks a directory as a
    run's, and is locked."""
    for path in [path for pattern in patterns for path in out.glob(pattern)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def lock(out, kind=fcntl.LOCK_EX):
    """log.jsonl, open for appending, and locked until it is closed or the process ends, however it ends."""
    out.mkdir(parents=True, exist_ok=True)
    log = open(out / "log.jsonl", "a", buffering=1)  # line by line
    try:
        fcntl.flock(log, kind | fcntl.LOCK_NB)
    except BlockingIOError as e:
        log.close()
        raise ValueError(f"another process is at work in {out}: wait for it, or choose another --out") from e
    except OSError:
        pass  # a file system without locks
    return log


def flush(*paths):
    """Returns when files, and the names in directories, are on the disk."""
    for path in paths:
        if path.is_file() or path.is_dir():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def resumes(args):
    return args.resume and (args.out / "resume.pt").exists()


def resolved(source):
    """A directory's absolute path; a hub id as it is."""
    return str(Path(source).resolve()) if Path(source).is_dir() else source


def settings(args):
    """What config.json says of a command, None where its stage has no such thing."""
    names = ("stage", "task", "seed", "lr", "epochs", "batch_size", "grad_accumulation", "max_length", "patience", "weight_decay",
             "limit_train", "limit_dev", "adapters_per_batch", "adapter_config", "warmup")  # fmt: skip
    new, multitask = args.stage in ("adapter", "multitask"), args.stage == "multitask"
    return {
        **{name: getattr(args, name) for name in names},
        "data_dir": args.data_dir and resolved(args.data_dir),
        "model": resolved(args.model),
        "sources": args.adapters,  # as given: they may be gone when the run is continued
        "adapter": args.adapter if new else None,
        "reduction_factor": args.reduction_factor if new else None,
        "sampling": args.sampling if multitask else None,
        **({"steps_per_epoch": args.steps_per_epoch} if multitask else {}),  # elsewhere the data says
    }


def finished(args):
    """The closing line of the finished run in --out. Raises ValueError if it is not one of this command."""
    result, config = read_json(args.out / "metrics.json"), read_json(args.out / "config.json")
    if (result.get("stage"), result.get("task")) != (args.stage, args.task):
        raise ValueError(f"{args.out} holds a finished run of --stage {result.get('stage')} on {result.get('task')}")
    given = {name: value for name, value in settings(args).items() if name in (*RESUME_NEEDS, "data_dir")}
    if args.max_length is None:  # by task
        del given["max_length"]
    for name, value in given.items():
        if name in config and config[name] != value:
            raise ValueError(f"{args.out} holds a finished run with {name} = {config[name]}, not {value}")
    return result


STATE_FORMAT = 4
RESUME_NEEDS = ("stage", "task", "labels", "columns", "data_sha256", "model", "adapters", "sources", "adapters_per_batch",
                "adapter", "reduction_factor", "adapter_config", "seed", "lr", "epochs", "batch_size", "max_length",
                "weight_decay", "limit_train", "limit_dev", "train_examples", "dtype", "warmup", "sampling",
                "steps_per_epoch")  # fmt: skip


def save_state(path, config, named, optimizer, device, position, best, history):
    """Everything that the rest of a run depends on. It is on the disk under another name before it takes the old one's place."""
    rank, world = processes()
    random = torch.get_rng_state()
    if device.type == "cuda":
        random = torch.cat([random, torch.cuda.get_rng_state(device)])
    randoms = [torch.empty_like(random) for _ in range(world)]
    dist.all_gather(randoms, random) if world > 1 else randoms[0].copy_(random)
    if rank > 0:
        return
    state = {
        "format": STATE_FORMAT,
        "config": {name: config.get(name) for name in RESUME_NEEDS},
        "trained": {name: p.detach() for name, p in named.items()},
        "optimizer": optimizer.state_dict(),
        "random": randoms,
        "position": position,
        "best": best,
        "history": history,
    }
    temporary = Path(f"{path}.tmp")
    with open(temporary, "wb") as file:
        torch.save(state, file)
    flush(temporary)
    temporary.replace(path)
    flush(path.parent)


def load_state(path, config, named, optimizer, device):
    """(position, best, history) of an interrupted run; weights, optimizer and random state are put in place.
    Raises ValueError for a damaged state, one of another version of this file, or one of another command."""
    rank, world = processes()
    try:
        if not path.is_file():
            raise ValueError("a directory or a pipe")
        with zipfile.ZipFile(path) as file:  # torch does not look at the checksums
            if file.testzip() is not None:
                raise ValueError("wrong checksum")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:  # zipfile and torch raise many kinds here
        raise ValueError(f"{path} is damaged and cannot be continued: start again with --overwrite") from e
    if not isinstance(state, dict) or state.get("format") != STATE_FORMAT:
        raise ValueError(f"{path} was written by another version of train.py: continue with that, or --overwrite it")
    for name, value in state["config"].items():
        if config.get(name) != value:
            raise ValueError(f"{path} belongs to a run with {name} = {value}, not {config.get(name)}: cannot --resume it")
    with torch.no_grad():
        for name, p in named.items():
            p.copy_(state["trained"][name])
    optimizer.load_state_dict(state["optimizer"])
    if len(state["random"]) == world:  # otherwise dropout goes on with other numbers
        random, n = state["random"][rank], len(torch.get_rng_state())
        torch.set_rng_state(random[:n])
        if device.type == "cuda" and len(random) > n:
            torch.cuda.set_rng_state(random[n:], device)
    return state["position"], state["best"], state["history"]


def commit():
    """The commit of this file's repository, "-dirty" behind it with changes that are not committed; None without one."""
    here = Path(__file__).resolve().parent
    command = ["git", "--no-optional-locks", "-C", here, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(here.parent)}  # not the repository of a directory above
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None


# ----------------------------------------------------------------------------------------------------------------------
# Several processes, as torchrun starts them. Each takes every G-th example of a batch.


def processes():
    """(number of this process, how many there are)"""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def total(tensor):
    """The sum over all processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def parts(indices, count):
    """What this process does of a batch: (share of the batch, examples), at most `count` of them. Without an example of its
    own it takes one with share 0, because the others wait for its gradients."""
    rank, world = processes()
    mine = indices[rank::world]
    if len(mine) == 0:
        return [(0.0, indices[:1])]
    return [(len(part) / len(indices), part) for part in np.array_split(mine, min(count, len(mine)))]


def main(argv=None):
    rank = int(os.environ.get("RANK", 0)) if dist.is_torchelastic_launched() else 0
    if rank > 0:
        sys.stdout = open(os.devnull, "w")  # the first process speaks for all
    try:
        args = arguments(argv)
        if args.stage == "eval":
            result = evaluate_run(args)
        elif args.resume and (args.out / "metrics.json").exists():  # nothing is left to do
            result = finished(args)
            (args.out / "resume.pt").unlink(missing_ok=True)
        else:
            result = run(args)
        print(json.dumps(result))
        return
    except (ValueError, OSError, FloatingPointError, MemoryError) as e:
        status, message, speaks = 2, e, rank == 0 or isinstance(e, MemoryError)  # which may be one process's alone
    except KeyboardInterrupt:
        saved = f", continue with --resume --out {args.out}" if args.out and (args.out / "resume.pt").exists() else ""
        status, message, speaks = 130, f"interrupted{saved}", rank == 0
    if speaks:
        print(f"train.py: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
    if dist.is_initialized():  # at once: gloo's threads and the interpreter may wait for each other at its end
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
