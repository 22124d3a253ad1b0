"""What a run is: one record, and config.json, its only file.

record = describe(settings, tasks, lengths, encoder, adapters, dtype)
record = record.with_training(...)  # once the data are loaded
record.write(out)
read_record(out)                    # also what earlier versions wrote
read_record(out).check_same(record, problem, advice)  # ValueError: the first difference
"""

import hashlib
import platform
import shlex
import subprocess
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from formats.adapterhub import digest
from formats.files import file_digest, read_json, write_json
from formats.rows import origin
from formats.tokenizer import read_tokenizer, tokenizer_digest
from runtime.seen import hashes_of, share_seen, sketch
from runtime.settings import recorded_values

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = "torch numpy tokenizers safetensors datasets".split()
# entries that may be others when a run is resumed: they describe the machine
MACHINE = "device processor threads processes versions python commit command data_revision".split()


@dataclass(frozen=True)
class TaskRecord:
    labels: list
    columns: list  # of the texts
    type: str  # its class, such as Classification
    max_length: int  # in tokens
    files: dict  # {name: SHA-256} of local files; of the hub's data there is data_revision
    held_out: str | None = None  # digest of the examples that --dev-fraction held out
    sketch: str | None = None  # of the training examples, see runtime/seen.py


@dataclass(frozen=True)
class AdapterRecord:
    sha256: str
    encoder: str | None  # digest of the encoder that it was trained on, None if unknown
    sketch: str | None = None  # of its training examples
    # the shares of this run's examples that are among those
    seen_train: float | None = None
    seen_dev: float | None = None

    def compared_with(self, train_hashes, dev_hashes):
        """The same with the shares of a run's examples that it has seen, where that is known."""
        if self.sketch is None:
            return self
        train, dev = (share_seen(hashes, self.sketch) for hashes in (train_hashes, dev_hashes))
        return replace(self, seen_train=train, seen_dev=dev)


@dataclass(frozen=True)
class Record:
    """What config.json says of a run. In the file, `options` stand beside the other entries."""

    options: dict  # {name: value} of the command; and every entry that is not named below
    tasks: dict  # {name: TaskRecord}
    # {name: AdapterRecord} of --adapters. Not "adapters", which AdapterHub's library reads in a
    # checkpoint's config.json as its own.
    loaded_adapters: dict
    dtype: str | None = None
    encoder_class: str | None = None  # what computes it, such as Bert
    encoder_parameters: int | None = None
    encoder_sha256: str | None = None  # of the encoder at the start
    tokenizer_sha256: str | None = None
    # the data: digest of all tokens and labels, the commit of the hub's
    data_sha256: str | None = None
    data_revision: str | None = None
    train_examples: int | None = None
    dev_examples: int | None = None
    majority_class_accuracy: float | None = None  # None where labels are no classes
    # training
    steps_per_epoch: int | None = None
    trained_parts: list | None = None  # as train.trained_parts names them
    trained_parameters: int | None = None
    # the machine
    device: str | None = None
    processor: str | None = None
    threads: int | None = None
    processes: int | None = None
    versions: dict = field(default_factory=dict)
    python: str | None = None
    commit: str | None = None
    command: str | None = None
    # what came later
    weights_sha256: str | None = None  # of the encoder that the run has trained, and saved here
    saved_files: dict | None = None  # {file: SHA-256} of the weights that the run ended with

    @property
    def stage(self):
        return self.options["stage"]

    @property
    def final_encoder(self):
        """The digest of the encoder that the run ended with."""
        return self.weights_sha256 or self.encoder_sha256

    def with_training(self, parts, trainable, steps, data, device):
        """The same with what is known once the data are loaded. parts: what is trained; trainable:
        {name: its parameter}; steps: of an epoch; data: {task: (training set, development
        set)}"""
        origins = {name: origin(train_set) for name, (train_set, _) in data.items()}
        revisions = [of["revision"] for of in origins.values() if of["revision"]]
        train_sets, dev_sets = zip(*data.values(), strict=True)
        hashes = {name: hashes_of(train_set) for name, (train_set, _) in data.items()}
        tasks = {
            name: replace(task, held_out=origins[name]["held_out"], sketch=sketch(hashes[name]))
            for name, task in self.tasks.items()
        }
        sets = np.concatenate([*hashes.values()]), np.concatenate([*map(hashes_of, dev_sets)])
        return replace(
            self,
            tasks=tasks,
            loaded_adapters={
                name: adapter.compared_with(*sets) for name, adapter in self.loaded_adapters.items()
            },
            data_sha256=data_digest([*train_sets, *dev_sets]),
            data_revision=",".join(revisions) or None,
            train_examples=sum(map(len, train_sets)),
            dev_examples=sum(map(len, dev_sets)),
            majority_class_accuracy=majority_class_accuracy(dev_sets),
            steps_per_epoch=steps,
            trained_parts=sorted(parts),
            trained_parameters=sum(p.numel() for p in trainable.values()),
            device=torch.cuda.get_device_name() if device.type == "cuda" else device.type,
            processor=processor(),
            threads=torch.get_num_threads(),
            versions={name: version(name) for name in PACKAGES},
            python=platform.python_version(),
            commit=commit(),
        )

    def with_files(self, directory):
        """The same with the digests of the weights that lie in the run's directory, and of the
        files that say what they are."""
        directory = Path(directory)
        found = [*directory.rglob("*.safetensors"), *directory.rglob("*_config.json")]
        digests = {path.relative_to(directory).as_posix(): file_digest(path) for path in found}
        return replace(self, saved_files=dict(sorted(digests.items())))

    def check_files(self, directory, names=None):
        """Raises ValueError if one of `saved_files`, which runs of earlier versions did not record,
        was exchanged, changed or removed. names: of the files to check, default all"""
        saved = self.saved_files or {}
        for name in saved.keys() if names is None else saved.keys() & names:
            path, sha256 = Path(directory) / name, saved[name]
            if not path.is_file() or file_digest(path) != sha256:
                problem = "is missing, or is not the file with which the run ended"
                raise ValueError(f"{path} {problem}: restore it, or train {directory} again")

    def write(self, directory):
        values = asdict(self)
        write_json(Path(directory) / "config.json", {**values.pop("options"), **values})

    def entries(self):
        """{name in words: value} of everything in which two records are compared."""
        values = asdict(self)
        found = values.pop("options")
        for what in ("tasks", "loaded_adapters"):
            found[what.replace("_", " ")] = list(values[what])
            for name, parts in values.pop(what).items():
                parts.pop("sketch")  # data_sha256 says the same
                found |= {f"{part} of {name}": value for part, value in parts.items()}
        return found | {name: values[name] for name in values if name not in found}

    def check_same(self, now, problem, advice, changeable=()):
        """
        Raises ValueError, naming the first difference, if this record is of another run than `now`.
        What one of them does not say does not count: its version did not record it, or `now` is a
        command before its data are loaded.

        problem, advice: what stands before and behind the difference; changeable: entries that may
        differ, besides those of the machine.
        """
        before, after = self.entries(), now.entries()
        skipped = {*changeable, *MACHINE, "sources", "weights_sha256"}  # whose digests are compared
        for name in (name for name in after if name in before and name not in skipped):
            unknown = None in (before[name], after[name]) and name not in self.options
            if before[name] != after[name] and not unknown:
                difference = f"{name} = {before[name]}, not {after[name]}"
                raise ValueError(f"{problem} {difference}: {advice}")

    def modules(self):
        """The names of the modules that whoever reads the run must import."""
        given, program = self.options.get("imports"), self.program()
        return [*(given.split(",") if given else []), *(program[1:] if program else [])]

    def program(self):
        """(path, name of the module) of the program that made the run, None for train.py itself and
        the commands of experiments. One that was started by its whole path is a module of this
        directory, or the file alone."""
        first, *others = shlex.split(self.command or "train.py")
        program = Path(first if first != "-m" else f"{others[0].replace('.', '/')}.py")
        if program.is_absolute():
            inside = program.is_relative_to(ROOT)
            program = Path(program.relative_to(ROOT) if inside else program.name)
        parts = [part for part in program.with_suffix("").parts if part not in (".", "..", "-c")]
        ours = parts in ([], ["train"]) or parts[0] == "experiments"
        return None if ours else (program, ".".join(parts))


def describe(settings, tasks, lengths, encoder, adapters, dtype):
    """
    The Record of a command before its data are loaded: what a finished run must have in common with
    it.

    settings: a dataclass of options; tasks: {name: Task}; lengths: {name: tokens}; encoder: a Bert;
    adapters: {name: (directory, its configuration)} of --adapters. Only their values are read.
    """
    options = recorded_values(settings) | {
        "model": absolute(settings.model),
        "data_dir": settings.data_dir and absolute(settings.data_dir),
        "train_file": settings.train_file and str(settings.train_file.resolve()),
        "dev_file": settings.dev_file and str(settings.dev_file.resolve()),
    }
    options["sources"] = options.pop("adapters")  # as given: they may be gone by the end
    return Record(
        options,
        {name: describe_task(task, lengths[name], settings) for name, task in tasks.items()},
        {
            name: AdapterRecord(
                digest(path, config), encoder_of_adapter(path), sketch_of_adapter(path)
            )
            for name, (path, config) in adapters.items()
        },
        dtype=str(dtype).removeprefix("torch."),
        command=settings.command,
        encoder_class=type(encoder).__qualname__,
        encoder_parameters=sum(p.numel() for p in encoder.own_parameters().values()),
        encoder_sha256=encoder.digest,
        tokenizer_sha256=describe_tokenizer(encoder.directory, encoder.config.max_length),
    )


def describe_task(task, max_length, settings):
    files = {}
    if settings.data_dir is not None or task.files:
        for split in ("train", "validation"):
            source = task.source(split, settings.data_dir, settings.dev_fraction)
            for name, sha256 in source.files.items():
                if files.get(name, sha256) != sha256:  # another directory's file of that name
                    name = f"{split}/{name}"
                files[name] = sha256
    return TaskRecord(list(task.labels), list(task.columns), task.type.__name__, max_length, files)


def absolute(source):
    """A directory's absolute path; a hub id as it is."""
    return str(Path(source).resolve()) if Path(source).is_dir() else source


def describe_tokenizer(directory, max_length):
    """The digest of an encoder's tokenizer."""
    tokenizer = read_tokenizer(directory)
    tokenizer.enable_truncation(max_length, strategy="longest_first")
    return tokenizer_digest(tokenizer)


def data_digest(splits):
    """SHA-256 of all tokens and labels."""
    result = hashlib.sha256()
    for split in splits:
        for rows in split.with_format("arrow").iter(10_000):
            for name in ("input_ids", "token_type_ids", "label"):
                values = rows[name].combine_chunks()
                while hasattr(values.type, "value_type"):  # lists, in lists for the candidates
                    result.update(values.value_lengths().to_numpy().tobytes())
                    values = values.flatten()
                result.update(values.to_numpy().tobytes())
    return result.hexdigest()


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


def processor():
    """The processor's name, and the instructions that torch uses on it: "AMD EPYC, AVX2"."""
    found = torch.cpu.get_capabilities()
    names = [found.get("cpu_name"), torch.backends.cpu.get_cpu_capability()]
    return ", ".join(filter(None, [*names, "AMX" if found.get("amx_bf16") else None]))


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


# --------------------------------------------------------------------------------------------------
# Reading


OF_A_RUN = {"stage", "command"}  # what no other config.json has


def is_run(directory):
    """Whether a directory holds a run, finished or not: its config.json has a stage and a
    command."""
    path = Path(directory) / "config.json"
    return path.is_file() and OF_A_RUN <= read_json(path).keys()


def read_record(directory):
    """The Record of the run in a directory. Raises FileNotFoundError without a config.json,
    ValueError for one that is not a run's."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"no run in {directory}: it has no config.json")
    values = read_json(path)
    if not OF_A_RUN <= values.keys():
        raise ValueError(f"{path} is not a run's: it has no stage, or no command")
    tasks = {name: TaskRecord(**task) for name, task in values.pop("tasks").items()}
    loaded = values.pop("loaded_adapters").items()
    adapters = {name: AdapterRecord(**adapter) for name, adapter in loaded}
    names = {field.name for field in fields(Record)}
    own = {name: value for name, value in values.items() if name in names}
    options = {name: value for name, value in values.items() if name not in names}
    return Record(options, tasks, adapters, **own)


def record_around(directory):
    """(the run's directory, its Record) of a run, or of an adapter in one; (None, None) of any
    other directory."""
    runs = [Path(directory).absolute()]
    if runs[0].parent.name == "adapters":
        runs.append(runs[0].parent.parent)
    for run in filter(is_run, runs):
        return run, read_record(run)
    return None, None


def encoder_of_adapter(directory):
    """The digest of the encoder that a run's adapter belongs to: the one it was trained on, or
    where training changed the encoder, too, the one it ended with. None where no run says.
    directory: that of the run, or of the adapter in it"""
    record, copy = origin_of_adapter(directory)
    return copy.encoder if copy else record and record.final_encoder


def sketch_of_adapter(directory):
    """The sketch of the examples that an adapter was trained on, None where no run says."""
    record, copy = origin_of_adapter(directory)
    task = record and record.tasks.get(Path(directory).name, [*record.tasks.values()][0])
    return copy.sketch if copy else task and task.sketch


def origin_of_adapter(directory):
    """(the Record of the run that an adapter is in, its AdapterRecord there if it is a copy of one
    of --adapters); either may be None"""
    run, record = record_around(directory)
    # a fusion's copies are not its own, and --allow-other-encoder may have let them in
    inside = record is not None and run != Path(directory).absolute()
    return record, record.loaded_adapters.get(Path(directory).name) if inside else None
