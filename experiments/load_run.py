"""A finished run, put together again from its directory.

bert, head, config = load_run("runs/rte")
task, split = load_run_split("runs/rte", bert, config)
logits = predict(bert, head, batch, torch.float32)  # of train.py

A run of a kind that is not this project's own, as those of examples/, loads once the module is
imported that makes the kind known: in a command by --import. No run makes its reader execute code.
"""

import argparse
import contextlib
import importlib
import sys
from pathlib import Path

import torch

from adapter import activate, load_adapter, load_head
from bert import Bert
from data import TASKS, Classification, MultipleChoice, get_task, load_split
from formats.adapterhub import check_name, refuse_or_note
from formats.files import read_json
from formats.tokenizer import load_tokenizer
from fusion import fusions, load_fusion
from runtime.options import check_length
from runtime.processes import choose_device
from runtime.run import describe_encoder, program_of
from train import STAGES


def add_import(parser):
    """The option --import of a command that reads runs."""
    parser.add_argument(
        "--import",
        metavar="MODULE",
        action="append",
        type=import_module,
        help="a module that makes the run's kinds known, for instance examples.lora",
    )


def add_encoder(parser):
    """The options of such a command that say which encoder is the run's."""
    parser.add_argument("--model", help="where the encoder is now, if not where the run found it")
    parser.add_argument(
        "--allow-other-encoder", action="store_true", help="even if its weights are others"
    )


def import_module(name):
    try:
        return importlib.import_module(name)
    except (ImportError, TypeError, ValueError) as e:
        raise argparse.ArgumentTypeError(f"{name!r:.100} cannot be imported: {e}") from e


@contextlib.contextmanager
def naming_program(config):
    """An error in the block names the program that has made the run, unless it is train.py or
    imported: that one may know a kind that is unknown here."""
    try:
        yield
    except ValueError as e:
        program = program_of(config)
        if program is None or program[1] in sys.modules:
            raise
        raise ValueError(
            f"{e}; the run was made by {program[0]!s:.100}: if its kind is unknown here, "
            f"evaluate, predict and figure4 learn it by --import {program[1]:.100}"
        ) from e


def task_kind(config, head):
    """The kind of a run's task, one of data.py or of an imported module. Raises ValueError if it is
    neither."""
    known = {kind.__name__: kind for kind in (Classification, MultipleChoice)}
    known |= {task.kind.__name__: task.kind for task in TASKS.values()}
    name = config["kinds"].get(config["task"])
    if name is None:  # a run from before this was written down
        return MultipleChoice if head.config["head_type"] == "multiple_choice" else Classification
    if name not in list(known):
        raise ValueError(f"{config['task']!r:.50} is a task of an unknown kind, {name!r:.50}")
    return known[name]


def is_texts(value):
    return type(value) is list and all(type(text) is str for text in value)


def check_stage(directory, config, stages, what):
    """Raises ValueError, saying what only the runs of these stages are good for, for another one's.
    config: of `read_run_config`."""
    if config["stage"] not in stages:
        these = " and ".join(stages)
        raise ValueError(f"{directory} is of --stage {config['stage']}: only {these} runs {what}")


def read_run_config(directory):
    """config.json of a finished run. Raises FileNotFoundError or ValueError for a directory that is
    none."""
    if not (directory / "metrics.json").is_file():
        raise FileNotFoundError(f"no finished run in {directory}: it has no metrics.json")
    defaults = {
        "adapters": [],
        "data_dir": None,
        "grad_accumulation": 1,
        "limit_dev": None,
        "columns": {},
        "kinds": {},
        "column_names": {},
        "dev_fraction": None,
    }
    config = {**defaults, **with_names_of_today(read_json(directory / "config.json"))}
    stage, labels = config.get("stage"), config.get("labels")
    lengths = config.get("max_length")
    lengths = (
        list(lengths.values()) if stage == "multitask" and type(lengths) is dict else [lengths]
    )
    counts = ["batch_size", "grad_accumulation"]
    if config["limit_dev"] is not None:
        counts.append("limit_dev")
    right = {
        "stage": stage in list(STAGES),
        "adapters": is_texts(config["adapters"]),
        "labels": type(labels) is (dict if stage == "multitask" else list),
        "dtype": config.get("dtype") in ("float32", "bfloat16"),
        "data_dir": type(config["data_dir"]) in (str, type(None)),
        "kinds": type(config["kinds"]) is dict,
        "column_names": type(config["column_names"]) is dict
        and is_texts([*config["column_names"].values()]),
        "dev_fraction": type(config["dev_fraction"]) in (float, type(None)),
        "columns": type(config["columns"]) is dict
        and all(map(is_texts, config["columns"].values())),
        "max_length": bool(lengths) and all(type(n) is int and n > 0 for n in lengths),
        **{name: type(config.get(name)) is str for name in ("task", "model")},
        **{name: type(config.get(name)) is int and config[name] > 0 for name in counts},
    }
    if wrong := [name for name in right if not right[name]]:
        path = directory / "config.json"
        raise ValueError(f"{path}: not the configuration of a run, {wrong[0]} is missing or wrong")
    return config


def with_names_of_today(config):
    """config.json of a run, also of one from before some of its entries were renamed."""
    today = {"Classes": "Classification", "Choices": "MultipleChoice"}
    if isinstance(config.get("kinds"), dict):
        config["kinds"] = {task: today.get(kind, kind) for task, kind in config["kinds"].items()}
    for old, new in {
        "renamed": "column_names",
        "most_frequent_class": "majority_class_accuracy",
    }.items():
        if old in config:
            config[new] = config.pop(old)
    return config


def load_run(
    directory, device="cpu", dtype=torch.float32, model=None, task=None, allow_other_encoder=False
):
    """
    (bert, head, config) of a finished run, frozen, in eval mode, everything active that was active
    in training.

    Needs the directory, and the encoder that config.json names unless the run has one of its own
    (full, multitask); `model` says where that encoder is now. `task` is which of a multi-task run's
    is meant; another run has but one. Raises FileNotFoundError or ValueError for a directory that
    is not a finished run, and for an encoder or a tokenizer that is not the one of its training,
    unless `allow_other_encoder`.
    """
    directory = Path(directory)
    config = read_run_config(directory)
    stage, labels = config["stage"], config["labels"]
    own = stage in ("full", "multitask")
    if own and model is not None:
        raise ValueError(
            f"{directory} has an encoder of its own: --model is for runs that take another's"
        )
    if stage != "multitask" and task not in (None, config["task"]):
        raise ValueError(f"{directory} is a run on {config['task']!r:.50}, not on {task!r:.50}")
    bert = Bert.from_pretrained(directory if own else model or config["model"]).to(device, dtype)
    found, expected = describe_encoder(bert), config
    if own:  # it has been trained
        expected = {**config, "encoder_sha256": config.get("weights_sha256")}
    if other := [name for name in found if expected.get(name) not in (None, found[name])]:
        what = other[0].removesuffix("_sha256")
        problem = f"{directory} was trained with another {what} than that in {bert.directory}"
        refuse_or_note(problem, allow_other_encoder)
    if stage == "multitask":
        if type(labels.get(task)) is not list:
            which = "choose one with --task" if task is None else f"{task!r:.50} is none of them"
            raise ValueError(f"{directory} holds several tasks, {which}: {', '.join(labels)}")
        config |= {"task": task, "labels": labels[task]}
        if isinstance(config["max_length"], dict):
            config["max_length"] = config["max_length"].get(task)
        check_name(task)
        directory /= f"{'heads' if config.get('adapter') == 'none' else 'adapters'}/{task}"
    with naming_program(config):
        if stage == "adapter" or stage == "multitask" and config.get("adapter") != "none":
            activate(bert, load_adapter(bert, directory))
        if stage == "fusion":
            # also one that was trained together with the fusion, and that no --adapters named
            for path in sorted((directory / "adapters").iterdir()):
                load_adapter(bert, path)
            load_fusion(bert, directory)
        head = load_head(bert, directory)
        task_kind(config, head)
    if head.num_outputs != len(config["labels"]):
        raise ValueError(
            f"{directory}: its head is for {head.num_outputs} labels, config.json has "
            f"{len(config['labels'])}"
        )
    return bert, head, config


def load_run_split(
    run, bert, config, split="validation", data_dir=None, max_length=None, limit=None, strict=False
):
    """(task, split) of a run that `load_run` has loaded, from the data and at the length of its
    training unless others are given; `limit`: examples at most, else as many development examples
    as there. Raises as load_split does."""
    data_dir, max_length = data_dir or config["data_dir"], max_length or config["max_length"]
    limit = limit or (config["limit_dev"] if split == "validation" else None)
    check_length(max_length, bert.config.max_length)
    # a part of the training file; other data have splits of their own
    held_out = data_dir == config["data_dir"] and split in ("train", "validation")
    fraction = config["dev_fraction"] if held_out else None
    file = split if fraction is None else "train"
    with naming_program(config):
        task = get_task(config["task"], data_dir, config["labels"], file, config["column_names"])
    if list(task.labels) != config["labels"]:
        raise ValueError(f"{run} and {task.name} in {data_dir} have different labels, or choices")
    # text_b of your own task is optional in training, but not afterwards
    columns = config["columns"].get(task.name, [*task.columns])
    if columns != [*task.columns]:
        raise ValueError(
            f"{run} has read the columns {columns!r:.100}, the {split} split in {data_dir} has "
            f"{[*task.columns]}"
        )
    tokenizer = load_tokenizer(
        bert.directory, max_length, bert.config.vocab_size, bert.config.type_vocab_size
    )
    given = {"limit": limit, "strict": strict, "dev_fraction": fraction}
    return task, load_split(task, split, tokenizer, data_dir, **given)


def unknown_kind(bert):
    """What there is in an encoder beyond bottleneck adapters and the paper's fusion, in words, such
    as "adapters like rte (PALConfig)"; None if there is nothing else."""
    for _, slot in bert.slots():
        for name, adapter in slot.adapters.items():
            if adapter.config.architecture is not None:
                return f"adapters like {name} ({type(adapter.config).__name__})"
    for _, fusion in fusions(bert):
        if fusion.options != {}:  # in which a kind differs from the paper
            return f"fusions like this one ({type(fusion).__name__})"
    return None


def cast(bert, head, config, device, dtype=None):
    """(device, dtype): moves a loaded run there, its weights held as in training, those that its
    stage trained in fp32. Without dtype, that of its training."""
    device, dtype = choose_device(device, dtype or config["dtype"])
    parts = {"head": (), "adapter": (".adapters.",), "fusion": (".fusion.",)}
    trained = parts.get(config["stage"], ("",))  # full and multitask train everything
    for name, p in bert.named_parameters():
        if not any(part in name for part in trained):
            p.data = p.data.to(dtype)
    bert.to(device), head.to(device)
    return device, dtype
