"""argmin: one loop for every stage (section 3.1, section 4.1).

    python train.py --stage adapter --task rte              # Φ_rte <- argmin L(D_rte; Θ, Φ)
    python train.py --stage fusion --task rte --adapters runs/mnli runs/qqp runs/rte
                                                            # Ψ <- argmin L(D_rte; Θ, Φ_1..N, Ψ)
    python train.py --stage head | full --task rte          # the paper's baselines (section 5.1)
    python train.py --stage multitask --tasks mnli qqp rte  # Θ, Φ_1..N <- argmin Σ_n L(D_n; Θ, Φ_n)

What a stage trains is what requires a gradient; Θ and Φ are otherwise never written to. A run
directory holds the best epoch in AdapterHub's files, and is all that `load_run` (experiments) needs
besides the encoder. `torchrun --nproc_per_node=G train.py ...` computes the same on G devices.
"""

import runtime.console  # noqa: F401  (first: Ctrl-C during imports, closed outputs)

# isort: split
import json
import math
import os
import shutil
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import variants.houlsby  # noqa: F401  (kinds of adapters: --adapter-config layer_norms=true,
import variants.pal  # noqa: F401      --adapter pal | low_rank)
from adapter import (
    ADAPTERS,
    KINDS,
    Head,
    add_adapter,
    load_adapter,
    save_adapter,
    save_head,
    set_active,
)
from bert import Bert
from data import batch_order, batches, collate, get_task, length_groups, load_split
from formats import adapterhub
from formats.files import read_json, write_json
from formats.tokenizer import TOKENIZER_FILES, load_tokenizer
from fusion import FUSIONS, add_fusion, fusion_regularization, save_fusion
from runtime import options
from runtime.directory import check_idle, is_finished
from runtime.processes import all_reduce, choose_device, memory_named, processes
from runtime.run import describe_data, describe_encoder, describe_machine, open_run, resumes
from variants.masking import check_subset, mask, mask_all_but
from variants.multitask import multitask_batches

# Section 4.1 and appendix A.2: ST-A 1e-4 and at most 30 epochs, fusion 5e-5 and at most 10. The
# paper does not give those of its head and full baselines; these are ours. Multi-task training as
# in Stickland and Murray (2019): 25 epochs of 2400 steps.
STAGES = {  # learning rate, epochs
    "adapter": (1e-4, 30),
    "fusion": (5e-5, 10),
    "head": (1e-3, 30),
    "full": (2e-5, 10),
    "multitask": (2e-5, 25),
}


def arguments(argv=None):
    return options.arguments(argv, STAGES, ADAPTERS, FUSIONS)


def check(args):
    """Raises ValueError for arguments that make no sense, before anything is loaded."""
    options.check(args, ADAPTERS)


def build(args, tasks, device, dtype):
    """The encoder with what the stage trains plugged in, and a new head for each task. Frozen
    weights are held in `dtype`, trained ones in fp32. Returns (bert, heads, {name: directory} of
    fused adapters)."""
    bert = Bert.from_pretrained(args.model)
    if args.max_length is None:
        longest = max(task.max_length for task in tasks)
        args.max_length = min(longest, bert.config.max_length)
    check_length(args.max_length, bert)
    bert.to(device, torch.float32 if args.stage in ("full", "multitask") else dtype)
    torch.manual_seed(args.seed)
    fused = {}
    if args.stage in ("adapter", "multitask") and args.adapter != "none":
        add_adapters(args, bert, tasks)
    if args.stage in ("full", "multitask"):
        bert.requires_grad_(True)
    if args.stage == "fusion":
        fused = fuse_adapters(args, bert)
    heads = nn.ModuleList()
    for task in tasks:
        label2id = {label: i for i, label in enumerate(task.labels)}
        config = {**task.kind.head(task.labels), "layers": 2, "label2id": label2id}
        heads.append(Head(config, bert.config).to(device))
    return bert, heads, fused


def check_length(max_length, bert):
    longest = bert.config.max_length
    if not 8 <= max_length <= longest:
        raise ValueError(
            f"--max-length must be in 8 .. {longest} for this encoder, not {max_length}"
        )


def add_adapters(args, bert, tasks):
    """Stage 1: a new Φ_n for each task."""
    d, layers = bert.config.hidden_size, len(bert.layers)
    factor = args.reduction_factor
    if not 0 < factor <= d:
        raise ValueError(f"--reduction-factor {factor:g} leaves no bottleneck in hidden size {d}")
    factor = int(factor) if factor.is_integer() else factor
    config = options.configure(ADAPTERS[args.adapter], factor, args.adapter_config)
    if not {*config.leave_out} <= {*range(layers)}:
        raise ValueError(
            f"--adapter-config: leave_out {list(config.leave_out)!r:.50} has others than "
            "the layers "
            f"0 .. {layers - 1}"
        )
    for task in tasks:
        add_adapter(bert, task.name, config)


def fuse_adapters(args, bert):
    """Stage 2: all Φ_n, frozen, and a new Ψ over them. Returns {name: directory}."""
    sources = []
    for source in args.adapters:
        paper = adapterhub.paper_adapters(bert.config.model_type) if source == "paper" else []
        sources += paper or [(None, source)]
    if resumes(args) and (args.out / "config.json").exists():
        # the run's own copies: a source may be gone, or newer
        names = read_json(args.out / "config.json")["adapters"]
        sources = [(name, args.out / "adapters" / name) for name in names]
    fused = {}
    for name, source in sources:
        directory = adapterhub.fetch(source)
        name, _, values = adapterhub.read_adapter_config(directory, KINDS, name)
        for other in fused:  # rte and RTE are one name to some file systems
            if other.lower() == name.lower():
                both = f"{fused[other]} and {directory}"
                raise ValueError(f"two adapters are called {name!r}: {both}")
        fused[load_adapter(bert, directory, name)] = directory
        given = (args.model, bert.digest, args.allow_other_encoder)
        adapterhub.check_encoder(source, directory, values, *given)
    add_fusion(bert, fused, FUSIONS[args.fusion])
    if args.adapters_per_batch is not None:
        check_subset(bert, args.adapters_per_batch, list(fused))
    return fused


def predict(bert, head, batch, dtype):
    """Logits [B, K] of a batch from data.py."""
    cls, order = [], []
    with torch.autocast(bert.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        for rows, inputs in length_groups(batch):
            inputs = (tensor.to(bert.device) for tensor in inputs)
            cls.append(bert(*inputs, cls_only=True))  # [B, T] -> [B, 1, d]
            order.append(rows)
        order = torch.cat(order).argsort().to(bert.device)
        h = torch.cat(cls)[order]  # [B·C, 1, d], an example's C candidates in a row
        return head(h).float()


@torch.inference_mode()
def evaluate(bert, head, task, split, batch_size, dtype):
    """(labels, predictions) of a split, [examples] each, in the order of `batches`. Leaves bert
    and head in eval mode. Raises FloatingPointError for logits that are not finite."""
    rank, world = processes()
    bert.eval(), head.eval()
    size, pairs = batch_size * world, torch.zeros(2, len(split), dtype=torch.float64)
    for i, batch in enumerate(
        batches(split, size, bert.config.pad_token_id, rank=rank, world=world)
    ):
        logits = predict(bert, head, batch, dtype)
        predictions = task.kind.predict(logits).double().where(logits.isfinite().all(-1), math.nan)
        here = slice(i * size + rank, (i + 1) * size, world)
        pairs[:, here] = torch.stack([batch["labels"].double(), predictions.cpu()])
    labels, predictions = all_reduce(pairs)  # elsewhere each process has zeros
    if predictions.isnan().any():
        raise FloatingPointError("the model's outputs are not finite")
    return labels.to(task.kind.dtype), predictions.to(task.kind.dtype)


class Model(nn.Module):
    """`predict` as the one module that DistributedDataParallel asks for."""

    def __init__(self, bert, heads):
        super().__init__()
        self.bert, self.heads = bert, heads

    def forward(self, n, batch, dtype):
        return predict(self.bert, self.heads[n], batch, dtype)


def make_optimizer(args, trained, device):
    """AdamW (section 4.1). Weight decay spares biases, LayerNorms and fusion's V."""
    decayed = [
        n for n, p in trained.items() if p.ndim > 1 and not n.endswith("fusion.value.weight")
    ]
    groups = [
        {"params": [trained[name] for name in decayed], "weight_decay": args.weight_decay},
        {"params": [p for name, p in trained.items() if name not in decayed], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.lr, fused=device.type != "mps")


def set_learning_rate(optimizer, args, at, steps_per_epoch):
    """Up from 0 over the warm-up, then linearly down to 0 (section 4.1)."""
    step = (at.epoch - 1) * steps_per_epoch + at.step
    progress = step / (steps_per_epoch * args.epochs)
    decay = (1 - progress) / (1 - args.warmup)
    for group in optimizer.param_groups:
        group["lr"] = args.lr * (decay if progress >= args.warmup else progress / args.warmup)


def epoch_batches(args, lengths, epoch):
    """[(index of the task, its examples)] for every step of an epoch. lengths: in tokens, of each
    task's examples."""
    if args.stage == "multitask":
        return multitask_batches(args, lengths, epoch)
    return [
        (0, indices) for indices in batch_order(lengths[0], args.batch_size, (args.seed, epoch))
    ]


def choose_adapters(bert, args, task, at, fused):
    """Who takes part in a step: one task's adapter in multi-task training; in stage 2 all, unless
    --adapters-per-batch has some of them drawn."""
    if args.stage == "multitask" and args.adapter != "none":
        set_active(bert, task.name)
    if args.adapters_per_batch is not None:
        draw = (args.seed, at.epoch, at.step + 1)
        mask_all_but(bert, args.adapters_per_batch, list(fused), draw)


def evaluate_all(bert, heads, tasks, splits, args, dtype):
    """{task: {score: value}} on the development sets, with all adapters."""
    if args.adapters_per_batch is not None:
        mask(bert, [])
    result, size = {}, eval_batch_size(args.batch_size, args.grad_accumulation)
    for task, head, split in zip(tasks, heads, splits, strict=True):
        if args.stage == "multitask" and args.adapter != "none":
            set_active(bert, task.name)
        labels, predictions = evaluate(bert, head, task, split, size, dtype)
        result[task.name] = {
            name: score(labels, predictions) for name, score in task.kind.scores.items()
        }
    bert.train(), heads.train()
    return result


def eval_batch_size(batch_size, grad_accumulation):
    """Examples at once in evaluation, which needs less memory. The same ever after: padding and
    order of products decide about close calls."""
    return max(4 * batch_size // grad_accumulation, 1)


def prepare(args):
    """Everything that can be wrong with a command is found here, before anything is written."""
    check(args)
    check_idle(args.out)
    device, dtype = choose_device(args.device, args.dtype)
    tasks = [get_task(name, args.data_dir) for name in args.tasks]
    for task in tasks:
        adapterhub.check_name(task.name)  # which all its files have
    args.score = choose_score(args.score, tasks)
    bert, heads, fused = build(args, tasks, device, dtype)
    sizes = bert.config.vocab_size, bert.config.type_vocab_size
    tokenizer = load_tokenizer(bert.directory, args.max_length, *sizes)
    given = {"data_dir": args.data_dir, "strict": args.strict_data}
    limits = {
        "train": {"limit": args.limit_train, "seed": args.seed},
        "validation": {"limit": args.limit_dev},
    }
    splits = {
        name: [load_split(task, name, tokenizer, **limit, **given) for task in tasks]
        for name, limit in limits.items()
    }
    return tasks, bert, heads, fused, splits["train"], splits["validation"], device, dtype


def choose_score(name, tasks):
    """What chooses the best epoch: --score, or the first score that the tasks have."""
    known = [
        name for name in tasks[0].kind.scores if all(name in task.kind.scores for task in tasks)
    ]
    if name is not None and name not in known:
        raise ValueError(f"--score {name}: {tasks[0].name} has {', '.join(known)}")
    return name or known[0]


def train(args):
    """One stage, from the start or from where it was interrupted. Returns the closing line's
    dictionary. Raises ValueError and OSError for wrong input, FloatingPointError for a loss that is
    not finite (the best epoch before it is saved), MemoryError, and KeyboardInterrupt after Ctrl-C
    or SIGTERM."""
    tasks, bert, heads, fused, train_splits, dev_splits, device, dtype = prepare(args)
    trained = {f"bert.{name}": p for name, p in bert.named_parameters() if p.requires_grad}
    trained |= {f"heads.{name}": p for name, p in heads.named_parameters()}
    optimizer = make_optimizer(args, trained, device)
    lengths = [np.asarray(split.with_format("numpy")["length"][:]) for split in train_splits]
    steps_per_epoch = len(epoch_batches(args, lengths, 1))
    with open_run(args, device, check) as run:
        config = {
            **options.settings(args),
            **describe_tasks(args, tasks, fused),
            **describe_data(train_splits, dev_splits),
            **describe_encoder(bert),
            **describe_machine(args, device, dtype),
            "steps_per_epoch": steps_per_epoch,
            "trained_parameters": sum(p.numel() for p in trained.values()),
        }
        at = run.open(config, trained, optimizer)
        if run.is_new:
            copy_adapters(args, bert, fused)
        run.begin(at)
        if args.compile:
            bert.compile(dynamic=True)
        model = run.distribute(Model(bert, heads))
        bert.train(), heads.train()  # dropout in the frozen encoder stays on, as in the reference
        with run.guard(at, bert):
            while at.epoch <= args.epochs and at.epoch - at.best_epoch <= args.patience:
                for n, indices in run.steps(epoch_batches(args, lengths, at.epoch), at):
                    set_learning_rate(optimizer, args, at, steps_per_epoch)
                    choose_adapters(bert, args, tasks[n], at, fused)
                    optimizer.zero_grad()
                    for share, examples in run.micro_batches(indices):
                        batch = run.batch = collate(
                            train_splits[n][examples], bert.config.pad_token_id
                        )
                        logits = model(n, batch, dtype)
                        loss = tasks[n].kind.loss(logits, batch["labels"].to(device))
                        l2 = (
                            fusion_regularization(bert) if args.stage == "fusion" else 0
                        )  # section 4.1
                        run.backward(share * loss, share * l2)
                    nn.utils.clip_grad_norm_(trained.values(), 1.0)
                    optimizer.step()
                    run.after_step(at)
                run.after_epoch(at, evaluate_all(bert, heads, tasks, dev_splits, args, dtype))
        run.restore_best()
        if run.rank == 0:
            save(args, bert, heads, config)
        return run.finish(at)


def describe_tasks(args, tasks, fused):
    """What config.json says of labels, columns and fused adapters."""
    labels = {task.name: list(task.labels) for task in tasks}
    result = {
        "labels": labels if args.stage == "multitask" else labels[tasks[0].name],
        "columns": {task.name: list(task.columns) for task in tasks},
    }
    # a checkpoint's config.json has none: there AdapterHub's library takes "adapters" for its own
    return result | ({} if args.stage in ("full", "multitask") else {"adapters": list(fused)})


def copy_adapters(args, bert, fused):
    """The fused adapters, into the run: their sources may be gone by the end."""
    for name, directory in fused.items() if processes()[0] == 0 else ():
        header = adapterhub.header(name, bert.config, bert.source)
        adapterhub.copy_adapter(directory, KINDS, name, args.out / "adapters" / name, header)


def save(args, bert, heads, config):
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
        save_head(head, bert, name, directory)


def main(argv=None):
    rank = int(os.environ.get("RANK", 0)) if dist.is_torchelastic_launched() else 0
    if rank > 0:
        sys.stdout = open(os.devnull, "w")  # the first process prints for all
    try:
        args = arguments(argv)
        if args.resume and is_finished(args.out):  # nothing is left to do
            result = options.finished(args)
            (args.out / "resume.pt").unlink(missing_ok=True)
        else:
            with memory_named():
                result = train(args)
        print(json.dumps(result))
        return
    except (ValueError, OSError, FloatingPointError, MemoryError) as e:
        status, message = 2, e
        prints = rank == 0 or isinstance(e, MemoryError)  # which may be one process's alone
    except KeyboardInterrupt:
        kept = args.out and (args.out / "resume.pt").exists()
        saved = f", continue with --resume --out {args.out}" if kept else ""
        status, message, prints = 130, f"interrupted{saved}", rank == 0
    if prints:
        print(f"train.py: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
    if dist.is_initialized():  # at once: gloo's threads and the interpreter may wait for each other
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
