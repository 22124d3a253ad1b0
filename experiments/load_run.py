"""A finished run, put together again from its directory.

    model = load_run("runs/fusion-rte")
    model.predict([("It rains.", "It is wet.")])         # labels and probabilities
    model.fusion_weights([("It rains.", "It is wet.")])  # of every token, at every layer

A run of another program than train.py is read once its module is imported, in a command by
--import. No run makes its reader execute code.
"""

import argparse
import importlib
import itertools
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

import experiments.multitask  # noqa: F401  (registers its stage)
import train
from adapter import Head, activate, load_adapter, load_head
from bert import Bert
from data import TASKS, Task, collate, length_bucketed_batches, load_split, own_task
from formats.adapterhub import ADAPTER, FUSION
from formats.files import read_json
from formats.task_rows import apply_column_names, check_candidates, check_row, encode_pairs
from formats.tokenizer import load_tokenizer
from fusion import fusion_weights, fusions, load_fusion
from runtime.adapters import refuse_or_note
from runtime.processes import choose_device
from runtime.record import describe_tokenizer, program_of
from runtime.run import progress_bar
from runtime.settings import argument, option

BATCH_SIZE = 64  # of predictions


def import_fork(name):
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        where = "--import takes the name of a module that is found from here, or by PYTHONPATH"
        raise argparse.ArgumentTypeError(f"{e}: {where}, such as examples.lora") from e


@dataclass(frozen=True)
class Reading:
    """Options of every command that reads runs."""

    run: Path = argument("the directory of a finished run")
    task: str | None = option(None, "which task of a multi-task run")
    model: str | None = option(None, "where the encoder is now, if not where the run found it")
    allow_other_encoder: bool = option(False, "even if the encoder's weights are others")
    imports: str | None = option(
        None,
        "a module that the run needs, for instance examples.lora",
        flag="--import",
        metavar="MODULE",
        action=import_fork,
    )


@dataclass
class LoadedRun:
    """A finished run, frozen, in eval mode, with everything active that was active in training.
    bert, head, config = load_run(...) takes the first three."""

    bert: Bert
    head: Head
    config: dict  # config.json; of a multi-task run the entries of the one task
    task: Task
    tokenizer: object
    directory: Path

    def __iter__(self):
        return iter((self.bert, self.head, self.config))

    def candidates(self, given):
        """
        An input -> [(text_a, text_b or None)], as in training. given: a text; the texts in the
        order of the task's columns, with multiple choice the choices behind them as one list; or a
        row of a file, {column: value}. Raises ValueError for an input that does not fit.
        """
        task, is_row = self.task, isinstance(given, dict)
        row = apply_column_names(given, task.column_names) if is_row else self.as_row(given)
        texts, _ = check_row({**row, task.label: "not looked at"}, task)
        candidates = task.candidates(*texts)
        check_candidates(candidates, len(task.labels) if task.is_multiple_choice else None)
        return candidates

    def as_row(self, given):
        """Texts in the order of the task's columns -> {column: text}."""
        name, columns = self.task.name, self.task.columns
        texts = [given] if isinstance(given, str) else list(given)
        if texts and not isinstance(texts[-1], str):  # the choices, as one list
            options = list(texts.pop())
            if columns[-1] in ("choices", "endings"):  # one column holds all of them
                options = [{"text": options} if name == "commonsense_qa" else options]
            texts += options
        if len(texts) != len(columns):
            raise ValueError(f"{name} takes {' and '.join(columns)}, not {given!r:.200}")
        return dict(zip(columns, texts, strict=True))

    def encode(self, inputs):
        """Inputs -> of each the encodings of its candidates. Raises ValueError."""
        groups = [self.candidates(given) for given in inputs]
        encodings = iter(encode_pairs(self.tokenizer, itertools.chain(*groups)))
        return [[next(encodings) for _ in group] for group in groups]

    def batch(self, groups):
        rows = {
            "input_ids": [[encoding.ids for encoding in group] for group in groups],
            "token_type_ids": [[encoding.type_ids for encoding in group] for group in groups],
            "label": [0] * len(groups),
        }
        return collate(rows, self.bert.config.pad_token_id)

    def split(self, name="validation", data_dir=None, limit=None):
        """A split as in training, from its data unless there is a `data_dir`; `limit`: examples at
        most, else as many development examples as there. Raises as load_split does."""
        config, task = self.config, self.task
        data_dir = data_dir or config["data_dir"]
        limit = limit or (config["limit_dev"] if name == "validation" else None)
        if data_dir is None:  # --train-file and --dev-file
            files = {"train": config["train_file"], "validation": config["dev_file"]}
            task = replace(task, files={name: path for name, path in files.items() if path})
        held_out = {"dev_fraction": config["dev_fraction"], "held_out": config["held_out"][0]}
        return load_split(task, name, self.tokenizer, data_dir, limit, **held_out)

    @torch.inference_mode()
    def predict(self, inputs):
        """
        [{"label", "probability", "probabilities": {label: probability}, "truncated"}] of inputs as
        `candidates` takes them. truncated: whether a text was longer than in training, and cut. A
        task that predicts a number has {its one label: the number, "truncated"}.
        """
        groups = self.encode(inputs)
        lengths = np.array([max(len(encoding.ids) for encoding in group) for group in groups])
        result = [None] * len(groups)
        batches = length_bucketed_batches(lengths, BATCH_SIZE)
        model = train.Model(self.bert, self.head)
        for rows in progress_bar(batches, "predicting", len(batches)):
            batch = self.batch([groups[i] for i in rows])
            logits = model(batch)  # [B, K]
            if not logits.isfinite().all():
                raise FloatingPointError("the model's outputs are not finite")
            classes = self.task.type.dtype == torch.long
            values = logits.softmax(-1) if classes else self.task.type.predict(logits)
            for i, value in zip(rows, values.tolist(), strict=True):
                result[i] = {self.task.labels[0]: value}
                if classes:
                    best, labels = int(np.argmax(value)), self.task.labels
                    result[i] = {"label": labels[best], "probability": value[best]}
                    result[i]["probabilities"] = dict(zip(labels, value, strict=True))
                result[i]["truncated"] = any(encoding.overflowing for encoding in groups[i])
        return result

    @torch.inference_mode()
    def fusion_weights(self, inputs):
        """
        [{"tokens": T texts, "weights": {location: for every layer a tensor [T, N], or None where
        there is no fusion}}] of inputs; with multiple choice one for each of their choices. The N
        adapters are in the order of config["adapters"]. Raises ValueError for other runs.
        """
        result = []
        for group in self.encode(inputs):
            batch = self.batch([group])
            names = "input_ids", "token_type_ids", "attention_mask"
            self.bert(*(batch[name].to(self.bert.device) for name in names))
            s = {slot: weights.cpu() for slot, weights in fusion_weights(self.bert).items()}
            for c, encoding in enumerate(group):
                tokens = self.tokenizer.decode_batch([[i] for i in encoding.ids], False)
                layers = {location: [None] * len(self.bert.layers) for _, location in sorted(s)}
                for (layer, location), weights in s.items():
                    layers[location][layer] = weights[c, : len(tokens)]
                result.append({"tokens": tokens, "weights": layers})
        return result


def read_run_config(directory):
    """config.json of a finished run. Raises FileNotFoundError for a directory that holds none."""
    directory = Path(directory)
    if not (directory / "metrics.json").is_file():
        raise FileNotFoundError(f"no finished run in {directory}: it has no metrics.json")
    config = read_json(directory / "config.json")
    if config["stage"] not in train.STAGES:  # of a fork: it would be read as a head on Θ
        raise ValueError(
            f"{directory} is of an unknown stage, {config['stage']!r:.50}: --import MODULE names "
            "the fork that registers it"
        )
    return {"adapters": [], **config}  # full and multitask runs have none


def check_fusion(directory, what):
    """Raises ValueError, saying what only runs with a fusion are good for, for another run."""
    if not (Path(directory) / FUSION.config).is_file():
        stage = read_run_config(directory)["stage"]
        raise ValueError(f"{directory} is of --stage {stage}: only fusion runs {what}")


def note_other_program(directory, config):
    """Says so where neither train.py nor anything imported has made a run: without it, its kinds
    are unknown, and what else it changes has no effect. No module is recommended: it could be a
    file of the run's directory, which may be a stranger's."""
    program, module = program_of(config) or (None, None)
    if program is not None and module not in sys.modules:
        how = "evaluate, predict and figure4 do by --import MODULE"
        made = f"the run was made by {program!s:.100}, which is not imported ({how})"
        print(f"note: {directory}: {made}")


def task_of(config):
    """The Task of a run, with the columns and labels of its training."""
    name, labels = config["task"], tuple(config["labels"])
    types = {task.type.__name__: task.type for task in TASKS.values()}
    type = config["kinds"][name]
    if type not in types:
        raise ValueError(f"{name!r:.50} is a task of an unknown type, {type!r:.50}")
    task = TASKS[name] if name in TASKS else own_task(config["columns"][name], labels)
    columns = config["column_names"]
    return replace(task, name=name, labels=labels, type=types[type], column_names=columns)


def of_one_task(directory, config, task):
    """(config.json as if a multi-task run were one on this task, directory of the task's files).
    Raises ValueError if the run does not have the task."""
    names = list(config["labels"])
    if task not in names:
        raise ValueError(f"{directory} holds several tasks: choose --task from {', '.join(names)}")
    config = {**config, **{name: config[name][task] for name in ("labels", "max_length")}}
    config |= {"task": task, "held_out": [config["held_out"][names.index(task)]]}
    return config, directory / ("heads" if config["adapter"] == "none" else "adapters") / task


def check_encoders(bert, directory, config, allow_other_encoder):
    """Raises ValueError, or prints a note if that is allowed, for an encoder or a tokenizer that is
    not the one with which the training has ended."""
    trained = config.get("weights_sha256", config["encoder_sha256"])  # the former of Θ′
    expected = {"encoder": trained, "tokenizer": config["tokenizer_sha256"]}
    tokenizer = describe_tokenizer(bert.directory, bert.config.max_length)
    for what, digest in {"encoder": bert.digest, "tokenizer": tokenizer}.items():
        if digest != expected[what]:
            problem = f"{directory} was trained with another {what} than that in {bert.directory}"
            refuse_or_note(problem, allow_other_encoder)
    encoders = config.get("adapter_encoders", {})
    if others := [name for name in encoders if encoders[name] not in (None, trained)]:
        print(f"note: {directory} fuses adapters of another encoder: {', '.join(others)}")


def plug_in(bert, directory, part):
    """Loads and activates what the files of a run hold: its own adapter, its fusion over adapters/,
    or one of these alone. part: where the task's own files are. Returns the head."""
    names = []
    if part == directory:  # not of a multi-task run, where they are the other tasks'
        names = sorted(path.name for path in (directory / "adapters").glob("*"))
    for name in names:
        load_adapter(bert, directory / "adapters" / name)
    if (directory / FUSION.config).is_file():
        load_fusion(bert, directory)
    elif (part / ADAPTER.config).is_file():
        activate(bert, load_adapter(bert, part))
    elif names:  # a head on one of them
        activate(bert, *names)
    return load_head(bert, part)


def load_run(directory, device="cpu", model=None, task=None, allow_other_encoder=False):
    """
    The LoadedRun of a finished run.

    Needs the directory, and the encoder that config.json names unless the run has trained one of
    its own (full, multitask); `model` says where that encoder is now. `task` is which of a
    multi-task run's is meant. Raises FileNotFoundError or ValueError for a directory that is not a
    finished run, and for an encoder or a tokenizer that is not the one of its training, unless
    `allow_other_encoder`.
    """
    directory = part = Path(directory)
    config = read_run_config(directory)
    if config["stage"] == "multitask":
        config, part = of_one_task(directory, config, task)
    elif task not in (None, config["task"]):
        raise ValueError(f"{directory} is a run on {config['task']!r:.50}, not on {task!r:.50}")
    note_other_program(directory, config)
    run_task = task_of(config)
    own = "weights_sha256" in config
    if own and model is not None:
        raise ValueError(f"{directory} has an encoder of its own, which --model cannot replace")
    bert = Bert.from_pretrained(directory if own else model or config["model"]).to(device)
    check_encoders(bert, directory, config, allow_other_encoder)
    head = plug_in(bert, directory, part)
    if fused := fusions(bert):  # a fork may fuse more than --adapters
        config["adapters"] = fused[0][1].name.split(",")
    if head.config["label2id"] != {label: i for i, label in enumerate(config["labels"])}:
        raise ValueError(f"{part}: config.json and head_config.json have different labels")
    sizes = config["max_length"], bert.config.vocab_size, bert.config.type_vocab_size
    tokenizer = load_tokenizer(bert.directory, *sizes)
    return LoadedRun(bert, head, config, run_task, tokenizer, directory)


def unknown_kind(bert, head):
    """What a model has beyond bottleneck adapters, the paper's fusion and AdapterHub's head, in
    words, such as "adapters like rte (PALConfig)"; None if there is nothing else."""
    for _, slot in bert.slots():
        for name, adapter in slot.adapters.items():
            if adapter.config.architecture is not None:
                return f"adapters like {name} ({type(adapter.config).__name__})"
        if slot.fusion is not None and slot.fusion.file_tag != {}:  # it differs from the paper's
            return f"fusions like this one ({type(slot.fusion).__name__})"
    return None if type(head) is Head else f"heads like this one ({type(head).__name__})"


def as_trained(run, device, dtype=None):
    """The Model of a LoadedRun on a device, its weights held as in training, those of parts that
    were trained in fp32. Without dtype, that of its training."""
    device, dtype = choose_device(device, dtype or run.config["dtype"])
    model = train.Model(run.bert, run.head, dtype)
    train.cast_parts(model, dtype, trained_parts(run.config))
    return model.to(device)


def trained_parts(config):
    """What a run has trained, as train.trained_parts says it."""
    if "trained_parts" in config:
        return config["trained_parts"]
    task = config["task"]  # earlier versions had these stages alone
    of_stage = {"adapter": [f"adapter {task}"], "fusion": ["fusion"], "head": []}
    return of_stage.get(config["stage"], ["encoder", f"adapter {task}"])
