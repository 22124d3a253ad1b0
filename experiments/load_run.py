"""A finished run, put together again from its directory.

bert, head, config = load_run("runs/rte")
task, split = load_run_split("runs/rte", bert, config)
logits = predict(bert, head, batch, torch.float32)  # of train.py
"""

from dataclasses import replace
from pathlib import Path

import torch

from adapter import activate, load_adapter, load_head
from bert import Bert
from data import get_task, load_split
from formats.adapterhub import check_name
from formats.files import read_json
from formats.tokenizer import load_tokenizer
from fusion import load_fusion
from runtime.processes import choose_device
from runtime.run import describe_encoder
from train import STAGES, check_length


def is_texts(value):
    return type(value) is list and all(type(text) is str for text in value)


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
    }
    config = {**defaults, **read_json(directory / "config.json")}
    stage, labels = config.get("stage"), config.get("labels")
    counts = ["max_length", "batch_size", "grad_accumulation"]
    if config["limit_dev"] is not None:
        counts.append("limit_dev")
    right = {
        "stage": stage in list(STAGES),
        "adapters": is_texts(config["adapters"]),
        "labels": type(labels) is (dict if stage == "multitask" else list),
        "dtype": config.get("dtype") in ("float32", "bfloat16"),
        "data_dir": type(config["data_dir"]) in (str, type(None)),
        "columns": type(config["columns"]) is dict
        and all(map(is_texts, config["columns"].values())),
        **{name: type(config.get(name)) is str for name in ("task", "model")},
        **{name: type(config.get(name)) is int and config[name] > 0 for name in counts},
    }
    if wrong := [name for name in right if not right[name]]:
        path = directory / "config.json"
        raise ValueError(f"{path}: not the configuration of a run, {wrong[0]} is missing or wrong")
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
    found = describe_encoder(bert)
    if own:  # it has been trained
        del found["encoder_sha256"]
    if other := [name for name in found if config.get(name) not in (None, found[name])]:
        what = other[0].removesuffix("_sha256")
        problem = f"{directory} was trained with another {what} than that in {bert.directory}"
        if not allow_other_encoder:
            raise ValueError(f"{problem}: --allow-other-encoder takes it all the same")
        print(f"note: {problem}")
    if stage == "multitask":
        if type(labels.get(task)) is not list:
            raise ValueError(
                f"{directory} holds several tasks, and {task!r:.50} is none of them: "
                f"{', '.join(labels)}"
            )
        config |= {"task": task, "labels": labels[task]}
        check_name(task)
        directory /= f"{'heads' if config.get('adapter') == 'none' else 'adapters'}/{task}"
    if stage == "adapter" or stage == "multitask" and config.get("adapter") != "none":
        activate(bert, load_adapter(bert, directory))
    if stage == "fusion":
        for name in config["adapters"]:
            check_name(name)  # it is a directory's
            load_adapter(bert, directory / "adapters" / name)
        load_fusion(bert, directory)
    head = load_head(bert, directory)
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
    check_length(max_length, bert)
    task = get_task(config["task"], data_dir, config["labels"], split)
    if list(task.labels) != config["labels"]:
        raise ValueError(f"{run} and {task.name} in {data_dir} have different labels, or choices")
    columns = config["columns"].get(
        task.name, [*task.columns]
    )  # text_b of your own task is optional, but not now
    if columns != [*task.columns]:
        raise ValueError(
            f"{run} has read the columns {columns!r:.100}, the {split} split in {data_dir} has "
            f"{[*task.columns]}"
        )
    if split not in ("train", "validation"):
        task = replace(task, sizes=())  # the paper's are of these two
    tokenizer = load_tokenizer(
        bert.directory, max_length, bert.config.vocab_size, bert.config.type_vocab_size
    )
    return task, load_split(task, split, tokenizer, data_dir, limit=limit, strict=strict)


def cast(bert, head, config, device, dtype=None):
    """(device, dtype): moves a loaded run there, its weights held as in training, those that its
    stage trained in fp32. Without dtype, that of its training."""
    device, dtype = choose_device(device, dtype or config["dtype"])
    trained = {"head": (), "adapter": (".adapters.",), "fusion": (".fusion.",)}.get(
        config["stage"], ("",)
    )
    for name, p in bert.named_parameters():
        if not any(part in name for part in trained):
            p.data = p.data.to(dtype)
    bert.to(device), head.to(device)
    return device, dtype
