"""run.json, what a run is: its options, the SHA-256 of each of its inputs, and the machine.

{"options": {...}, "adapters": names of --adapters, in their order, "inputs": {"encoder": SHA-256,
 "adapter rte": ..., "training examples": ...}, "encoder": SHA-256 of the encoder to which what the
 run has trained belongs, "trained_on": where that is, "tasks": {"rte": {..., "sketch": of its
 training examples}}, "machine": {...}}"""

import contextlib
import hashlib
import json
import math
import platform
import shlex
import subprocess
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from formats.files import note
from formats.tokenizer import tokenizer_sha256
from runtime.processes import CPU

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = "torch numpy tokenizers safetensors".split()
# Where things are, and how to compute: under --resume, they may differ. Digests are compared.
MAY_DIFFER = """out resume overwrite device cuda_graphs grad_accumulation model data_dir
    train_file dev_file""".split()
SKETCH = 1000


def what_decides(record):
    """{option or input: its value, or how its SHA-256 begins}"""
    inputs = {name: digest[:12] for name, digest in record["inputs"].items()}
    return {**record["options"], "adapters": record["adapters"], **inputs}


def first_difference(old, new):
    """ "NAME = VALUE, not VALUE" of the first option or input in which two runs differ, or None."""
    for name in {**old, **new}:
        if name not in MAY_DIFFER and old.get(name) != new.get(name):
            return f"{name} = {old.get(name)}, not {new.get(name)}"


def hashes_of(examples):
    return np.array([example.hash for example in examples], np.uint64)


def examples_sha256(hashes):
    """SHA-256 of examples by their `hashes_of`: by the texts and the labels."""
    return hashlib.sha256(hashes.tobytes()).hexdigest()


def data_inputs(task_name, train_hashes, dev_hashes):
    """The inputs in run.json that are a task's data."""
    sets = {"training": train_hashes, "development": dev_hashes}
    return {f"{n} examples of {task_name}": examples_sha256(hashes) for n, hashes in sets.items()}


def sketch(examples):
    """The 1,000 smallest hashes of [Example], as text."""
    return np.unique(hashes_of(examples))[:SKETCH].tobytes().hex()


def share_trained_on(run, examples):
    """Estimates on which share of [Example] an adapter was trained. Its run.json has the 1,000
    smallest hashes of each training set; among these, the examples whose hashes are no larger are
    looked up, if there are at least 20. Below 5 % it is 0, and where there is no run.json."""
    share, hashes = 0.0, hashes_of(examples)
    for task in run.get("tasks", {}).values():
        seen = np.frombuffer(bytes.fromhex(task["sketch"]), np.uint64)
        near = hashes[hashes <= seen[-1]] if len(seen) == SKETCH else hashes
        if len(near) >= 20 or len(seen) < SKETCH:
            share = max(share, float(np.isin(near, seen).mean()))
    return share if share >= 0.05 else 0


def note_unseen_classes(place, task, examples):
    """Notes that a class has no example, or a choice is never right. place: of the examples"""
    seen = {example.label for example in examples}
    unseen = [repr(name) for i, name in enumerate(task.labels) if i not in seen]
    if unseen and all(isinstance(label, int) for label in seen):
        note(f"{place}: no example of {task.name} is {' or '.join(unseen):.300}")


def never_predicted(task, labels, predictions):
    """{"never_predicted": [class that some examples have, and none is predicted as]}, or {}"""
    are_classes = labels.ndim == 1 and labels.dtype == torch.long and not task.is_multiple_choice
    missed = sorted({*labels.tolist()} - {*predictions.tolist()}) if are_classes else []
    return {"never_predicted": [task.labels[k] for k in missed]} if missed else {}


def describe(args, model, tokenizer, adapters, data):
    """What run.json is to say; prints what is strange about the data. adapters: {name: Saved}, or a
    ValueError for another tokenizer; data: [(task, training set, development set)]"""
    bert = model.bert
    inputs = {"encoder": bert.sha256, "tokenizer": tokenizer_sha256(tokenizer)}
    for name, saved in adapters.items():
        inputs[f"adapter {name}"] = saved.sha256()
        if saved.run.get("inputs", inputs)["tokenizer"] != inputs["tokenizer"]:
            raise ValueError(f"{saved.directory} was trained with another tokenizer")
    if args.stage == "fusion":
        note("the training loss holds the fusion's penalty, the development loss does not")
    tasks, warnings = {}, []
    for task, train_set, dev_set in data:
        train_hashes, dev_hashes = hashes_of(train_set), hashes_of(dev_set)
        inputs |= data_inputs(task.name, train_hashes, dev_hashes)
        if (cut := sum(example.is_cut for example in train_set) / len(train_set)) > 0.1:
            note(f"{cut:.0%} of {task.name}'s training examples are cut to --max-length tokens")
        if (both := np.isin(dev_hashes, train_hashes).mean()) >= 0.05:
            problem = f"{both:.0%} of the development examples are training examples, too"
            note(f"{task.name}: {problem}: on these, the scores say nothing about new texts")
        about = {"columns": task.columns, "labels": task.labels, "max_length": task.max_length}
        if len(task.labels) > 1:  # what a constant answer would have
            counts = Counter(str(example.label) for example in dev_set)
            about["majority"] = max(counts.values()) / len(dev_set)
        tasks[task.name] = {**about, "sketch": sketch(train_set)}
        for name, saved in adapters.items():
            if share := share_trained_on(saved.run, dev_set):
                problem = f"{name} was TRAINED on {share:.0%} of this run's development examples"
                warnings.append(f"adapter {problem}, or on equal ones: scores say little")
                print(f"WARNING: {warnings[-1]}")
    train = sum(len(train_set) for _, train_set, _ in data)
    dev = sum(len(dev_set) for _, _, dev_set in data)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    millions = sum(p.numel() for p in bert.theta().values()) / 1e6
    summary = f"{args.stage} on {args.task}: encoder {args.model} ({millions:.1f} M parameters), "
    summary += f"{trained:,} parameters are trained, on {bert.device.type} in {args.dtype}, "
    summary += f"with --lr {args.lr:g} for at most {args.epochs} epochs; "
    summary += f"{train:,} training and {dev:,} development examples"
    return {
        "summary": summary,
        "options": json.loads(json.dumps(vars(args))),  # as `read_run` will return them
        "adapters": [*adapters],
        "inputs": inputs,
        "encoder": bert.sha256,
        "trained_on": str(Path(args.model).resolve()) if Path(args.model).is_dir() else args.model,
        "tasks": tasks,
        "warnings": warnings,
        "train_examples": train,
        "dev_examples": dev,
        "steps_per_epoch": math.ceil(train / args.batch_size),
        "trained_parameters": trained,
        "machine": machine(bert.device),
    }


def machine(device):
    """Where a run was computed, and with what; of the repository the commit, or None."""
    amx = ", AMX" if CPU.get("amx_bf16") else ""
    command = "git --git-dir=.git --work-tree=. --no-optional-locks describe"
    command = f"{command} --always --dirty --abbrev=40 --exclude=*".split()
    commit = None
    with contextlib.suppress(OSError):  # there is no git
        commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else device.type,
        "processor": torch.backends.cpu.get_cpu_capability() + amx,
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version()} | {n: version(n) for n in PACKAGES},
        "commit": commit or None,
        "command": shlex.join(sys.argv),
    }
