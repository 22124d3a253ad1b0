"""config.json: what a run is, made of plain values, and how two runs are compared.

Its entries are those of the command, the tasks, the encoder, the adapters, the data and the
machine. A finished run, and one that --resume continues, must have all of them in common with the
command, except what may change (`free_names`) and the machine.
"""

import hashlib
import platform
import shlex
import subprocess
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from formats.adapterhub import digest
from formats.files import read_json
from formats.rows import find_split, origin
from formats.tokenizer import read_tokenizer, tokenizer_digest
from runtime.adapters import run_encoder
from runtime.settings import difference, free_names, record

# What describes the machine, which may be another one when a run is resumed.
MACHINE = "device threads processes versions python commit command data_revision".split()
ROOT = Path(__file__).resolve().parent.parent


def describe(settings, labels, tasks, encoder, adapters, dtype):
    """
    What a run must have in common with a command, before its data are loaded.

    settings: a dataclass of options; labels: of the task, or {task: labels}; tasks: {name: Task};
    encoder: a Bert; adapters: of `describe_adapters`. Only their values are read.
    """
    files = {
        name: describe_files(task, settings.data_dir, settings.dev_fraction)
        for name, task in tasks.items()
    }
    result = record(settings) | {
        "model": absolute(settings.model),
        "data_dir": settings.data_dir and absolute(settings.data_dir),
        "train_file": settings.train_file and str(settings.train_file.resolve()),
        "dev_file": settings.dev_file and str(settings.dev_file.resolve()),
        "labels": labels,
        "columns": {name: list(task.columns) for name, task in tasks.items()},
        "kinds": {name: task.type.__name__ for name, task in tasks.items()},
        "data_files": {name: digests for name, digests in files.items() if digests},
        "dtype": str(dtype).removeprefix("torch."),
        "encoder_parameters": sum(p.numel() for p in encoder.own_parameters().values()),
        "encoder_sha256": encoder.digest,
        "tokenizer_sha256": describe_tokenizer(encoder.directory, encoder.config.max_length),
    }
    result["sources"] = result.pop("adapters")  # as given: they may be gone by the end
    if adapters:  # AdapterHub's library reads "adapters" in a checkpoint's config.json as its own
        result["adapters"] = [*adapters]
        result["adapter_digests"] = {name: of["sha256"] for name, of in adapters.items()}
        # of the encoders that they were trained on, None if unknown
        result["adapter_encoders"] = {name: of["encoder"] for name, of in adapters.items()}
    return result


def absolute(source):
    """A directory's absolute path; a hub id as it is."""
    return str(Path(source).resolve()) if Path(source).is_dir() else source


def describe_adapters(directories, configs):
    """{name: {"sha256", "encoder"}} of saved adapters; both {name: ...}"""
    return {
        name: {"sha256": digest(path, configs[name]), "encoder": run_encoder(path)}
        for name, path in directories.items()
    }


def describe_tokenizer(directory, max_length):
    """The digest of an encoder's tokenizer."""
    tokenizer = read_tokenizer(directory)  # which has been checked
    tokenizer.enable_truncation(max_length, strategy="longest_first")
    return tokenizer_digest(tokenizer)


def describe_files(task, data_dir, dev_fraction):
    """{file: SHA-256} of a task's local files; of the hub's data sets there is the revision."""
    if data_dir is None and not task.files:
        return {}
    splits = [find_split(task, name, data_dir, dev_fraction) for name in ("train", "validation")]
    return splits[0].files | splits[1].files


def describe_data(train_sets, dev_sets):
    """Digests of all tokens and labels and of the examples held out for development, the revision
    of the hub's data, and the sizes; train_sets, dev_sets: one for each task."""
    result = hashlib.sha256()
    for split in (*train_sets, *dev_sets):
        for rows in split.with_format("arrow").iter(10_000):
            for name in ("input_ids", "token_type_ids", "label"):
                values = rows[name].combine_chunks()
                while hasattr(values.type, "value_type"):  # lists, in lists for the candidates
                    result.update(values.value_lengths().to_numpy().tobytes())
                    values = values.flatten()
                result.update(values.to_numpy().tobytes())
    origins = [origin(split) for split in train_sets]
    revisions = ",".join(of["revision"] for of in origins if of["revision"])
    return {
        "data_sha256": result.hexdigest(),
        "data_revision": revisions or None,
        "held_out": [of["held_out"] for of in origins],  # digests, where --dev-fraction did
        "train_examples": sum(map(len, train_sets)),
        "dev_examples": sum(map(len, dev_sets)),
        "majority_class_accuracy": majority_class_accuracy(dev_sets),
    }


def majority_class_accuracy(dev_sets):
    """The accuracy of always giving the most frequent label, the mean over the development sets;
    None where labels are no classes."""
    shares = []
    for split in dev_sets:
        labels = split.with_format("numpy")["label"][:]
        if labels.dtype.kind != "i":
            return None
        shares.append(np.bincount(labels).max() / len(labels))
    return float(np.mean(shares))


def describe_machine(device, command):
    """Where and how a run was made."""
    packages = "torch numpy tokenizers safetensors datasets".split()
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in packages},
        "python": platform.python_version(),
        "commit": commit(),
        "command": command,
    }


def commit():
    """The commit of this file's repository, not of one that is around it or in the environment;
    with changes that are not committed "-dirty" is behind it. None without a repository."""
    command = "git --git-dir=.git --work-tree=. --no-optional-locks describe --always --dirty"
    command = [*command.split(), "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


def check_finished(settings, config):
    """Raises ValueError, naming the first difference, if the finished run in settings.out was made
    by another command than `config` describes, or with another encoder, data or adapters. What its
    config.json lacks, its version did not record."""
    old = read_json(settings.out / "config.json")
    old = {name: old.get(name, value) for name, value in config.items()}
    if found := difference(old, config, free_names(settings) | {*MACHINE}):
        name, before, now = found
        raise ValueError(
            f"{settings.out} holds a finished run with {name} = {before}, not {now}: choose "
            "another --out, or --overwrite it"
        )


def read_result(out):
    """The closing line of the finished run in `out`."""
    (out / "resume.pt").unlink(missing_ok=True)  # where a kill came between the two
    return read_json(out / "metrics.json")


def program_of(config):
    """(path, name of the module) of the program that made a run, None for train.py itself and the
    commands of experiments. One that was started by its whole path is a module of this directory,
    or the file alone."""
    first, *others = shlex.split(config.get("command") or "train.py")
    program = Path(first if first != "-m" else f"{others[0].replace('.', '/')}.py")
    if program.is_absolute():
        program = Path(program.relative_to(ROOT) if program.is_relative_to(ROOT) else program.name)
    module = ".".join(part for part in program.with_suffix("").parts if part.isidentifier())
    ours = program.name == "train.py" or module.startswith("experiments.")
    return None if ours or not module else (program, module)


def next_command(out, config):
    """What to try with a run that has just finished."""
    place = shlex.quote(str(out))
    program = program_of(config)
    fork = f" --import {program[1]}" if program else ""  # what makes its kinds known
    if "fusion" in config["trained_parts"]:
        figures = shlex.quote(f"{out}-figures")
        return f"python -m experiments.figure4 {place} --out {figures}{fork}"
    first, *others = map(shlex.quote, config["columns"])
    if others:  # Fusion w/ MT-A
        fusion = f"--task {first} --model {place} --adapters {place}/adapters/*"
        return f"python train.py --stage fusion {fusion} --out {place}-fusion-{first}"
    return f"python -m experiments.predict {place} --file FILE{fork}"
