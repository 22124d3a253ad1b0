"""The command line of train.py: its options, which of them a run records, and which make no sense.

An option is entered here alone. What `settings` records of it must be the same to --resume, unless
it is listed as FREE in state.py.
"""

import argparse
import json
import math
import os
import shlex
import shutil
import sys
from dataclasses import fields
from pathlib import Path

from formats.adapterhub import check_encoder, fetch, paper_adapters, without_effect
from formats.files import read_json
from runtime.directory import check_out, resumes
from runtime.settings import resolved

FREE = {"data_dir", "data_revision"}  # deleted once no command imports this file


class Parser(argparse.ArgumentParser):
    """One whose errors are one line like all others, without the usage. They are raised as
    ValueError."""

    def error(self, message):
        raise ValueError(message)


STAGE_HELP = {
    "adapter": "stage 1: a new adapter and head on a frozen encoder",
    "fusion": "stage 2: a new fusion over --adapters, which stay frozen, and a head",
    "head": "baseline: the head alone",
    "full": "baseline: all weights of the encoder, and the head",
    "multitask": "baseline: encoder, an adapter and a head for each of --tasks, together",
}

EXAMPLES = """examples:
  python train.py --stage adapter --task rte --data-dir data
  python train.py --stage fusion --task rte --data-dir data --adapters runs/mnli runs/qqp runs/rte
  python train.py --stage adapter --task mine --data-dir data --dev-fraction 0.1 \\
      --columns text_a=review label=stars --seeds 0 1 2
"""


class Help(argparse.RawDescriptionHelpFormatter):
    """Names the default of every option whose text does not speak of one."""

    def _get_help_string(self, action):
        text = action.help or ""
        plain = isinstance(action.default, (int, float, str)) and action.default is not False
        if plain and action.default != argparse.SUPPRESS and "default" not in text:
            return f"{text}{'; ' * bool(text)}default {action.default}".replace("%", "%%")
        return text


def arguments(argv, stages, adapters, fusions):
    """
    The options as a namespace. stages: {name: (default learning rate, default epochs)}; adapters,
    fusions: names of kinds. Raises ValueError for what cannot be parsed.
    """
    parser = Parser(
        description="Trains one stage of AdapterFusion on one task.\n\n"
        + "\n".join(f"  {name:10} {what}" for name, what in STAGE_HELP.items()),
        epilog=EXAMPLES,
        formatter_class=Help,
    )
    add = parser.add_argument
    add("--stage", required=True, choices=list(stages), help="see above")
    add("--task", help="one of the paper's 16 tasks, or your own in --data-dir")
    add("--tasks", nargs="+", default=[], help="multitask: all of them")
    add(
        "--adapters",
        nargs="+",
        default=[],
        help="fusion: runs, AdapterHub directories, hub ids; paper: its authors' 16",
    )
    add(
        "--adapters-per-batch",
        type=int,
        metavar="K",
        help="fusion: train each step on K of them, drawn anew; evaluate with all",
    )
    add("--fusion", default="attention", choices=list(fusions), help="kind of fusion")
    add("--model", default="google-bert/bert-base-uncased", help="encoder: a directory or a hub id")
    add(
        "--allow-other-encoder",
        action="store_true",
        help="fusion: take adapters that were trained on another encoder of the same shape",
    )
    add_data_options(parser)
    add(
        "--out",
        help="run directory; default runs/TASK, runs/fusion-TASK (likewise head, full), "
        "runs/multitask",
    )
    add(
        "--adapter",
        choices=[*adapters, "none"],
        help="architecture of a new adapter; default pfeiffer, multitask pal",
    )
    add(
        "--reduction-factor",
        type=float,
        default=16.0,
        help="hidden size / bottleneck size of a new adapter",
    )
    add(
        "--adapter-config",
        nargs="+",
        default=[],
        metavar="FIELD=VALUE",
        help="changes single fields of that architecture, "
        "those of AdapterConfig (adapter.py): ln_after=true residual_before_ln=post_add "
        "leave_out=[5]",
    )
    add(
        "--score",
        help="what chooses the best epoch: macro_f1, matthews, f1 of two classes; default "
        "accuracy, or the first score of another kind of task",
    )
    add(
        "--epochs",
        type=int,
        help="at most; default adapter 30, fusion 10, head 30, full 10, multitask 25",
    )
    add(
        "--lr",
        type=float,
        help="then linearly to 0; default adapter 1e-4, fusion 5e-5, head 1e-3, full and "
        "multitask 2e-5",
    )
    add(
        "--warmup",
        type=float,
        help="share of the steps before that, in which it rises from 0; default multitask "
        "0.1, else 0",
    )
    add("--steps-per-epoch", type=int, help="multitask; default 300 for each task")
    add(
        "--sampling",
        default="annealed",
        choices=["annealed", "proportional", "sqrt", "round_robin"],
        help="multitask",
    )
    add("--batch-size", type=int, default=32, help="examples per step, over all devices together")
    add(
        "--grad-accumulation",
        type=int,
        default=1,
        help="run a batch in so many parts: less memory, the same gradients",
    )
    add(
        "--max-length",
        type=int,
        help="tokens per candidate; default 128, for texts of paragraphs 256 or 384",
    )
    add(
        "--patience",
        type=int,
        help="stop after so many epochs without a better dev score; default 5, multitask: never",
    )
    add(
        "--weight-decay",
        type=float,
        help="AdamW's; never on biases, LayerNorms and fusion's V; default multitask 0.01, else 0",
    )
    add("--seed", type=int, help="default 0")
    add(
        "--seeds",
        type=int,
        nargs="+",
        help="a run for each of them, in OUT/seed-N; at the end their mean and sample deviation",
    )
    add(
        "--limit-train",
        type=int,
        help="train on so many examples, drawn with the seed; default: all",
    )
    add(
        "--limit-dev",
        type=int,
        help="evaluate on so many development examples, the same for every seed",
    )
    add(
        "--strict-data",
        action="store_true",
        help="refuse data with other row counts than the paper's",
    )
    add("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"], help="auto: the best")
    add(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16"],
        help="auto: bf16 on a GPU that has it",
    )
    add(
        "--compile",
        action="store_true",
        help="torch.compile each layer; on a CPU slower than without, and it needs a C++ compiler",
    )
    add(
        "--save-minutes",
        type=float,
        default=5.0,
        help="how much work an interrupted run may have to repeat",
    )
    add(
        "--resume",
        action="store_true",
        help="continue an interrupted run: the same command, and this",
    )
    add("--overwrite", action="store_true", help="replace a run that is already in --out")
    args = parser.parse_args(argv)

    if args.seeds and len(set(args.seeds)) < len(args.seeds):
        raise ValueError("--seeds has one of them twice")
    if args.seeds and args.seed is not None:
        raise ValueError("--seed is one run's and --seeds are of several: choose one")
    if args.seeds and "TORCHELASTIC_RUN_ID" in os.environ:
        raise ValueError("--seeds is of one process: start a run for each --seed under torchrun")
    check_seeds("seeds", args.seeds or [])
    args.seed = 0 if args.seed is None else args.seed
    if args.resume and args.overwrite:
        raise ValueError("--resume continues what is in --out, --overwrite replaces it: choose one")
    lr, epochs = stages[args.stage]
    args.lr = lr if args.lr is None else args.lr
    args.epochs = epochs if args.epochs is None else args.epochs
    multitask = args.stage == "multitask"
    if multitask and (
        args.task is not None
        or not args.tasks
        or len({*map(str.lower, args.tasks)}) < len(args.tasks)
    ):
        raise ValueError("--stage multitask takes --tasks, each of them once, and no --task")
    if not multitask and (args.tasks or args.task is None):
        raise ValueError(f"--stage {args.stage} takes --task, and no --tasks")
    args.adapter = args.adapter or ("pal" if multitask else "pfeiffer")
    args.warmup = (0.1 if multitask else 0.0) if args.warmup is None else args.warmup
    if args.weight_decay is None:
        args.weight_decay = 0.01 if multitask else 0.0
    if multitask and args.steps_per_epoch is None:
        args.steps_per_epoch = 300 * len(args.tasks)
    args.patience = (args.epochs if multitask else 5) if args.patience is None else args.patience
    prefix = "" if args.stage == "adapter" else f"{args.stage}-"
    args.adapter_config = dict(map(as_field, args.adapter_config))
    args.lengths = None  # by task, see choose_lengths
    args.origins = {}  # {name: what --adapters says}, see find_adapters
    args.column_names = as_columns(args.column_names)
    args.out = Path(args.out or ("runs/multitask" if multitask else f"runs/{prefix}{args.task}"))
    args.task, args.tasks = args.task or ",".join(args.tasks), args.tasks or [args.task]
    args.command = shlex.join(sys.argv if argv is None else ["train.py", *argv])
    return args


def as_columns(words):
    """["label=gold"] -> {"label": "gold"}. Raises ValueError for another form, or a name that is
    there twice."""
    pairs = [word.partition("=") for word in words]
    for word, (ours, _, theirs) in zip(words, pairs, strict=True):
        if not ours or not theirs:
            raise ValueError(f"--columns takes COLUMN=NAME, not {word!r:.50}")
    for names in zip(*((ours, theirs) for ours, _, theirs in pairs), strict=True):
        if len(set(names)) < len(names):
            raise ValueError("--columns has a name twice")
    return {ours: theirs for ours, _, theirs in pairs}


def check_seeds(option, seeds):
    for seed in seeds:
        if not 0 <= seed < 2**32:
            raise ValueError(f"--{option} must be in 0 .. 2^32 - 1, not {seed}")


def as_field(word):
    """ln_after=true -> ("ln_after", True). A value is JSON; a bare word is a string."""
    name, equals, value = word.partition("=")
    if not equals:
        raise ValueError(f"--adapter-config takes FIELD=VALUE, not {word!r:.50}")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


def add_data_options(parser):
    """Where the data are and how to read them, which data.py asks, too."""
    add = parser.add_argument
    add(
        "--data-dir",
        help="directory with TASK/train.jsonl and TASK/validation.jsonl; without it: the hub",
    )
    add(
        "--columns",
        nargs="+",
        default=[],
        dest="column_names",
        metavar="COLUMN=NAME",
        help="what the files call the columns: text_a=premise text_b=hypothesis label=gold",
    )
    add(
        "--dev-fraction",
        type=float,
        help="hold this share of the training examples out for development, where --data-dir has "
        "no file for it; the same ones for every seed",
    )


def check_counts(args, names):
    """Raises ValueError for a given count that is below 1, or too large."""
    for name in names:
        if getattr(args, name) is not None and not 1 <= getattr(args, name) < 10**9:
            raise ValueError(
                f"--{name.replace('_', '-')} must be at least 1, and under 10^9, not "
                f"{getattr(args, name)}"
            )


def check(args, adapters):
    """Raises ValueError for arguments that make no sense, before anything is loaded. adapters:
    {--adapter: preset}"""
    check_counts(
        args,
        [
            "epochs",
            "batch_size",
            "grad_accumulation",
            "patience",
            "limit_train",
            "limit_dev",
            "max_length",
            "steps_per_epoch",
        ],
    )
    if args.dev_fraction is not None and not 0 < args.dev_fraction < 1:
        raise ValueError(f"--dev-fraction must be between 0 and 1, not {args.dev_fraction}")
    if not 0 < args.lr < math.inf:
        raise ValueError(f"--lr must be a positive number, not {args.lr}")
    if not 0 <= args.warmup < 1:
        raise ValueError(f"--warmup must be in [0, 1), not {args.warmup}")
    if args.adapter == "none" and args.stage == "adapter":
        raise ValueError(
            "--adapter none leaves --stage adapter nothing to train: see --stage head and "
            "--stage full"
        )
    if args.adapter_config:
        if args.stage not in ("adapter", "multitask") or args.adapter == "none":
            raise ValueError(
                "--adapter-config belongs to a new adapter: --stage adapter or multitask, and no "
                "--adapter none"
            )
        try:
            configure(adapters[args.adapter], 1, args.adapter_config)  # whatever the bottleneck
        except ValueError as e:
            raise ValueError(f"--adapter-config: {e}") from e
    if not 0 <= args.weight_decay < math.inf:
        raise ValueError(f"--weight-decay must be 0 or more, not {args.weight_decay}")
    if not 0 <= args.save_minutes < math.inf:
        raise ValueError(
            f"--save-minutes must be 0 (after every step) or more, not {args.save_minutes}"
        )
    check_seeds("seed", [args.seed])
    if args.stage == "fusion" and not args.adapters:
        raise ValueError("--stage fusion needs --adapters: the run directories of stage 1")
    for name, default in (("adapters", []), ("adapters_per_batch", None), ("fusion", "attention")):
        if args.stage != "fusion" and getattr(args, name) != default:
            raise ValueError(
                f"--{name.replace('_', '-')} belongs to --stage fusion, not to --stage {args.stage}"
            )
    if args.adapters_per_batch is not None and args.compile:
        raise ValueError(
            "--compile and --adapters-per-batch do not go together: every subset would be "
            "compiled anew"
        )
    check_out(args.out, [args.model, *args.adapters], args.overwrite, args.resume)
    if args.compile and not shutil.which(
        os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    ):
        raise ValueError(
            "--compile needs a C++ compiler: install g++, or name one in the environment "
            "variable CXX"
        )


def configure(preset, reduction_factor, changes):
    """
    The configuration that --adapter stands for, with the changes of --adapter-config. A kind may
    have a size of its own in place of a reduction factor. Raises ValueError, naming the field, for
    a change that is wrong or would change nothing.
    """
    known = [field.name for field in fields(preset.__self__)]
    takes_factor = "reduction_factor" in known
    for name in changes:
        if name == "reduction_factor" and takes_factor:
            raise ValueError("reduction_factor is set by --reduction-factor")
        if name not in known:
            known = ", ".join(field for field in known if field != "reduction_factor")
            raise ValueError(
                f"{name!r:.50} is no field of --adapter {preset.__name__}, which has {known}"
            )
    config = preset(**({"reduction_factor": reduction_factor} if takes_factor else {}), **changes)
    for name, reason in without_effect(config).items():
        if name in changes:
            raise ValueError(reason)
    return config


def new_adapter(args, adapters, hidden_size, layers):
    """The configuration of --adapter with all its options, for an encoder of this size. Raises
    ValueError."""
    factor = args.reduction_factor
    if not 0 < factor <= hidden_size:
        raise ValueError(
            f"--reduction-factor {factor:g} leaves no bottleneck in hidden size {hidden_size}"
        )
    factor = int(factor) if factor.is_integer() else factor
    config = configure(adapters[args.adapter], factor, args.adapter_config)
    left_out = list(getattr(config, "leave_out", ()))
    if not {*left_out} <= {*range(layers)}:
        raise ValueError(
            f"--adapter-config: leave_out {left_out!r:.50} has others than the layers 0 .. "
            f"{layers - 1}"
        )
    return config


def find_adapters(args, read_config, model_type):
    """{name: directory} of --adapters. Raises ValueError if two have the same name,
    FileNotFoundError for one that is not there."""
    sources = []
    for source in args.adapters:
        sources += paper_adapters(model_type) if source == "paper" else [(None, source)]
    if resumes(args) and (args.out / "config.json").exists():
        # the run's own copies: a source may be gone, or newer
        names = read_json(args.out / "config.json")["adapters"]
        sources = [(name, args.out / "adapters" / name) for name in names]
    found = {}
    for name, source in sources:
        directory = fetch(source)
        name = read_config(directory, name)[0]
        for other in found:  # rte and RTE are one name to some file systems
            if other.lower() == name.lower():
                both = f"{found[other]} and {directory}"
                raise ValueError(f"two adapters are called {name!r}: {both}")
        found[name] = directory
        args.origins[name] = source  # for messages: a hub id says more than its place in the cache
    return found


def check_encoders(args, read_config, found, digest):
    """Raises ValueError if one of the adapters {name: directory} was trained on another encoder
    than the one with this digest, unless --allow-other-encoder."""
    for name, directory in found.items():
        values = read_config(directory, name)[2]
        source, allow = args.origins[name], args.allow_other_encoder
        check_encoder(source, directory, values, args.model, digest, allow)


def choose_lengths(args, tasks, longest):
    """args.lengths = {task: tokens}, by --max-length or else by task, of an encoder that takes
    `longest` tokens. Raises ValueError."""
    args.lengths = {task.name: args.max_length or min(task.max_length, longest) for task in tasks}
    for length in args.lengths.values():
        check_length(length, longest)


def check_length(max_length, longest):
    if not 8 <= max_length <= longest:
        raise ValueError(
            f"--max-length must be in 8 .. {longest} for this encoder, not {max_length}"
        )


def choose_score(args, scores):
    """--score, or else the first that all tasks have; scores: {name: function} of each. Raises
    ValueError."""
    known = [name for name in scores[0] if all(name in other for other in scores)]
    if args.score is not None and args.score not in known:
        raise ValueError(f"--score {args.score}: {args.tasks[0]} has {', '.join(known)}")
    args.score = args.score or known[0]


# How a run goes on, not what it computes; or recorded as it was found: device, dtype, compile
NOT_RECORDED = {
    "lengths",
    "origins",
    "out",
    "resume",
    "overwrite",
    "save_minutes",
    "strict_data",
    "allow_other_encoder",
    "device",
    "dtype",
    "compile",
    "tasks",
    "seeds",
    "command",
}


def settings(args):
    """What config.json says of a command, None where its stage has no such thing."""
    values = {name: value for name, value in vars(args).items() if name not in NOT_RECORDED}
    # as given: they may be gone when the run is continued
    values["sources"] = values.pop("adapters")
    values["model"] = resolved(args.model)
    if args.lengths is not None:
        values["max_length"] = (
            args.lengths if args.stage == "multitask" else args.lengths[args.task]
        )
    values["data_dir"] = args.data_dir and resolved(args.data_dir)
    belongs = {
        "adapter": args.stage in ("adapter", "multitask"),
        "reduction_factor": args.stage in ("adapter", "multitask"),
        "fusion": args.stage == "fusion",
        "sampling": args.stage == "multitask",
    }
    values |= {name: None for name, yes in belongs.items() if not yes}
    if args.stage != "multitask":
        del values["steps_per_epoch"]  # the data says
    return values


def finished(args):
    """The closing line of the finished run in --out. Raises ValueError if it is not one of this
    command."""
    result, config = read_json(args.out / "metrics.json"), read_json(args.out / "config.json")
    if (result.get("stage"), result.get("task")) != (args.stage, args.task):
        raise ValueError(
            f"{args.out} holds a finished run of --stage {result.get('stage')} on "
            f"{result.get('task')}"
        )
    by_task = [name for name in ("max_length", "score") if getattr(args, name) is None]
    for name, value in settings(args).items():
        if name in FREE - {"data_dir"} or name in by_task or name not in config:
            continue
        if config[name] != value:
            raise ValueError(
                f"{args.out} holds a finished run with {name} = {config[name]}, not {value}"
            )
    return result
