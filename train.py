"""argmin: one loop for every stage (section 3.1, section 4.1).

    python train.py --stage adapter --task rte              # Φ_rte <- argmin L(D_rte; Θ, Φ)
    python train.py --stage fusion --task rte --adapters runs/mnli runs/qqp runs/rte
                                                            # Ψ <- argmin L(D_rte; Θ, Φ_1..N, Ψ)
    python train.py --stage head | full --task rte          # the paper's baselines (section 5.1)
    python train.py --stage multitask --tasks mnli qqp rte  # Θ, Φ_1..N <- argmin Σ_n L(D_n; Θ, Φ_n)

What a stage trains is what requires a gradient; Θ and Φ are otherwise never written to. A run
directory holds the best epoch in AdapterHub's files, and is all that `load_run` (experiments) needs
besides the encoder. `torchrun --nproc_per_node=G train.py ...` takes the same steps on G devices.
"""

if __name__ == "__main__":  # the first line comes before torch, which takes seconds
    from runtime.command import announce

    announce("train.py")

import torch
from torch import nn

import variants.pal  # noqa: F401  (registers --adapter pal | low_rank)
from adapter import (
    ADAPTERS,
    Head,
    add_adapter,
    copy_adapters,
    load_adapter,
    read_config,
    save_adapter,
    save_head,
    trained_adapters,
)
from bert import Bert
from data import batches, collate, get_task, length_bucketed_batches, load_split, split_by_length
from formats import adapterhub
from formats.files import write_json
from formats.tokenizer import copy_tokenizer, load_tokenizer
from fusion import FUSIONS, add_fusion, fusion_regularization, save_fusion
from runtime import options
from runtime.command import run_command
from runtime.directory import check_idle, is_finished
from runtime.kernels import AdamW, compile_layers
from runtime.processes import choose_device, rank_and_world_size, report_out_of_memory
from runtime.results import Results, eval_batch_size
from runtime.run import describe_data, describe_encoder, describe_machine, open_run, progress_bar
from runtime.seeds import each_seed
from variants.masking import check_subset, mask, mask_all_but
from variants.multitask import multitask_batches, switch_task

# Section 4.1 and appendix A.2: ST-A 1e-4 and at most 30 epochs, fusion 5e-5 and at most 10. The
# paper does not give those of its head and full baselines; these are ours. Multi-task training as
# in Stickland and Murray (2019): 25 epochs of 300 steps for each task.
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


def add_adapters(args, bert, tasks):
    """Stage 1: a new Φ_n for each task."""
    config = options.new_adapter(args, ADAPTERS, bert.config.hidden_size, len(bert.layers))
    for task in tasks:
        add_adapter(bert, task.name, config)


def fuse_adapters(args, bert):
    """Stage 2: all Φ_n, frozen, and a new Ψ over them. Returns {name: directory}."""
    fused = options.find_adapters(args, read_config, bert.config.model_type)
    for name, directory in fused.items():
        load_adapter(bert, directory, name)
    options.check_encoders(args, read_config, fused, bert.digest)
    add_fusion(bert, fused, FUSIONS[args.fusion])
    if args.adapters_per_batch is not None:
        check_subset(bert, args.adapters_per_batch, list(fused))
    return fused


def predict(bert, head, batch, dtype):
    """Logits [B, K] of a batch from data.py."""
    cls, order = [], []
    with torch.autocast(bert.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        for rows, inputs in split_by_length(batch):
            inputs = (tensor.to(bert.device) for tensor in inputs)
            cls.append(bert(*inputs, cls_only=True))  # [B, T] -> [B, 1, d]
            order.append(rows)
        order = torch.cat(order).argsort().to(bert.device)
        h = torch.cat(cls)[order]  # [B·C, 1, d], an example's C candidates together
        return head(h).float()


@torch.inference_mode()
def evaluate(bert, head, task, split, batch_size, dtype):
    """(labels, predictions, mean loss) of a split, [examples] each, in the order of `batches`.
    Leaves bert and head in eval mode. Raises FloatingPointError for logits that are not finite."""
    rank, world = rank_and_world_size()
    bert.eval(), head.eval()
    results = Results(len(split), batch_size)
    parts = batches(split, results.size, bert.config.pad_token_id, rank=rank, world=world)
    for batch in progress_bar(parts, f"evaluating {task.name}", results.steps):
        logits = predict(bert, head, batch, dtype)  # [B, K]
        predictions = task.kind.predict(logits)
        loss = task.kind.loss(logits.cpu(), batch["labels"])  # the mean of the batch
        results.add(batch["labels"], predictions, loss, logits.isfinite().all(-1))
    return results.gathered(task.kind.dtype)


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
    return AdamW(groups, lr=args.lr, fused=device.type != "mps")


def set_learning_rate(optimizer, args, at, steps_per_epoch):
    """Linearly down to 0 (section 4.1), after a warm-up from 0, as in Google's BERT."""
    step = (at.epoch - 1) * steps_per_epoch + at.step
    progress = step / (steps_per_epoch * args.epochs)
    factor = 1 - progress if progress >= args.warmup else progress / args.warmup
    for group in optimizer.param_groups:
        group["lr"] = args.lr * factor


def epoch_batches(args, lengths, epoch):
    """[(index of the task, its examples)] for every step of an epoch. lengths: in tokens, of each
    task's examples."""
    if args.stage == "multitask":
        return multitask_batches(args, lengths, epoch)
    return [
        (0, indices)
        for indices in length_bucketed_batches(lengths[0], args.batch_size, (args.seed, epoch))
    ]


def choose_adapters(bert, args, task, at, fused):
    """Who takes part in a step: one task's adapter in multi-task training; in stage 2 all, unless
    --adapters-per-batch has some of them drawn."""
    switch_task(bert, args, task)
    if args.adapters_per_batch is not None:
        draw = (args.seed, at.epoch, at.step + 1)
        mask_all_but(bert, args.adapters_per_batch, list(fused), draw)


def evaluate_all(bert, heads, tasks, splits, args, dtype):
    """{task: {score: value}} on the development sets, with no adapter masked."""
    if args.adapters_per_batch is not None:
        mask(bert, [])
    result, size = {}, eval_batch_size(args.batch_size, args.grad_accumulation)
    for task, head, split in zip(tasks, heads, splits, strict=True):
        switch_task(bert, args, task)
        labels, predictions, loss = evaluate(bert, head, task, split, size, dtype)
        scores = {name: score(labels, predictions) for name, score in task.scores.items()}
        result[task.name] = {**scores, "loss": loss}
    bert.train(), heads.train()
    return result


def prepare(args):
    """Everything that can be wrong with a command is found here, before anything is written."""
    check(args)
    check_idle(args.out)
    device, dtype = choose_device(args.device, args.dtype)
    tasks = [get_task(name, args.data_dir, columns=args.column_names) for name in args.tasks]
    for task in tasks:
        adapterhub.check_name(task.name)  # which all its files have
    options.choose_score(args, [task.scores for task in tasks])
    bert, heads, fused = build(args, tasks, device, dtype)
    sizes = bert.config.vocab_size, bert.config.type_vocab_size
    options.choose_lengths(args, tasks, bert.config.max_length)
    given = {"data_dir": args.data_dir, "strict": args.strict_data}
    given["dev_fraction"] = args.dev_fraction
    of_train = {"limit": args.limit_train, "seed": args.seed, **given}
    of_dev = {"limit": args.limit_dev, **given}
    train_splits, dev_splits = [], []
    for task in tasks:
        tokenizer = load_tokenizer(bert.directory, args.lengths[task.name], *sizes)
        train_splits.append(load_split(task, "train", tokenizer, **of_train))
        dev_splits.append(load_split(task, "validation", tokenizer, **of_dev))
    return tasks, bert, heads, fused, train_splits, dev_splits, device, dtype


def train(args):
    """One stage, from the start or from where it was interrupted. Returns the closing line's
    dictionary. Raises ValueError and OSError for wrong input, FloatingPointError for a loss that is
    not finite (the best epoch before it is saved), MemoryError, and KeyboardInterrupt after Ctrl-C,
    SIGTERM or SIGHUP."""
    tasks, bert, heads, fused, train_splits, dev_splits, device, dtype = prepare(args)
    trained = {f"bert.{name}": p for name, p in bert.named_parameters() if p.requires_grad}
    trained |= {f"heads.{name}": p for name, p in heads.named_parameters()}
    optimizer = make_optimizer(args, trained, device)
    lengths = [split.with_format("numpy")["length"][:] for split in train_splits]
    pad = bert.config.pad_token_id
    steps_per_epoch = len(epoch_batches(args, lengths, 1))
    with open_run(args, device, check) as run:
        config = {
            **options.settings(args),
            **describe_data(args, tasks, fused, train_splits, dev_splits),
            **describe_encoder(bert),
            **describe_machine(args, device, dtype),
            "steps_per_epoch": steps_per_epoch,
            "trained_parameters": sum(p.numel() for p in trained.values()),
        }
        at = run.open(config, trained, optimizer)
        if run.is_new and run.rank == 0:  # their sources may be gone by the end
            copy_adapters(fused, args.out / "adapters", bert.config)
        run.begin(at)
        if args.compile:
            compile_layers(bert)
        model = run.distribute(Model(bert, heads))
        bert.train(), heads.train()  # dropout in the frozen encoder stays on, as in the reference
        with run.guard(at, bert):
            while at.epoch <= args.epochs and at.epoch - at.best_epoch <= args.patience:
                for n, indices in run.steps(epoch_batches(args, lengths, at.epoch), at):
                    set_learning_rate(optimizer, args, at, steps_per_epoch)
                    choose_adapters(bert, args, tasks[n], at, fused)
                    # with zeros Adam's momentum goes on between batches (Stickland and Murray)
                    optimizer.zero_grad(set_to_none=args.stage != "multitask")
                    for share, examples in run.micro_batches(indices):
                        batch = run.batch = collate(train_splits[n][examples], pad)
                        logits = model(n, batch, dtype)  # [B, K]
                        loss = tasks[n].kind.loss(logits, batch["labels"].to(device))
                        l2 = fusion_regularization(bert)  # on V; 0 without fusion (section 4.1)
                        run.backward(share * loss, share * l2)
                    nn.utils.clip_grad_norm_(trained.values(), 1.0)
                    optimizer.step()
                    run.after_step(at)
                run.after_epoch(at, evaluate_all(bert, heads, tasks, dev_splits, args, dtype))
        run.restore_best()
        if run.rank == 0:
            save(args, bert, heads, config)
        return run.finish(at)


def save(args, bert, heads, config):
    """The files of a run, metrics.json excepted."""
    write_json(args.out / "config.json", config)
    if args.stage in ("full", "multitask"):  # also a checkpoint directory, which --model accepts
        bert.save_pretrained(args.out)
        copy_tokenizer(bert.directory, args.out)
    if args.stage == "adapter":
        save_adapter(bert, args.task, args.out)
    if args.stage == "fusion":
        save_fusion(bert, args.out)
        for name in trained_adapters(bert):  # a fork may train one together with Ψ
            save_adapter(bert, name, args.out / "adapters" / name)
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
    """What a command line says, from Python: main(["--stage", "adapter", "--task", "rte"]). Returns
    the closing line's dictionary, and raises as `train` does."""
    args = arguments(argv)
    return each_seed(args, train_or_report) if args.seeds else train_or_report(args)


def train_or_report(args):
    """A finished run of the same command needs no training: --resume reads its result."""
    if args.resume and is_finished(args.out):
        result = options.finished(args)
        (args.out / "resume.pt").unlink(missing_ok=True)
        return result
    with report_out_of_memory():
        return train(args)


if __name__ == "__main__":
    run_command("train.py", main)
