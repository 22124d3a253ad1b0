"""A finished run, put together again from its directory.

    model = load_run("runs/fusion-rte")
    model.predict([("It rains.", "It is wet.")])         # labels and probabilities
    model.fusion_weights([("It rains.", "It is wet.")])  # of every token, at every layer

A run of another program than train.py is read once its module is imported, in a command by
--import. No run makes its reader execute code.
"""

import itertools
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
from formats.columns import apply_column_names, encode_pairs
from formats.tokenizer import load_tokenizer
from fusion import fusion_weights, fusions, load_fusion
from runtime.directory import is_finished
from runtime.forks import imports_option
from runtime.predictions import eval_batch_size
from runtime.processes import choose_device
from runtime.record import Record, describe_tokenizer, read_record
from runtime.run import progress_bar
from runtime.seen import hashes_of
from runtime.settings import argument, option, same_option

BATCH_SIZE = 64  # of predictions


@dataclass(frozen=True)
class Reading:
    """Options of every command that reads runs."""

    run: Path = argument("the directory of a finished run")
    task: str | None = option(None, "which task of a multi-task run")
    model: str | None = option(None, "where the encoder is now, if not where the run found it")
    device: str = same_option(train.Settings, "device", group=None)
    imports: str | None = imports_option()


@dataclass
class LoadedRun:
    """A finished run, frozen, in eval mode, with everything active that was active in training.
    bert, head, record = load_run(...) takes the first three."""

    bert: Bert
    head: Head
    record: Record  # what config.json says
    task: Task  # of a multi-task run the one that was asked for
    tokenizer: object
    directory: Path
    adapters: list  # names, of a fusion in its order

    def __iter__(self):
        return iter((self.bert, self.head, self.record))

    def candidates(self, given):
        """
        An input -> [(text_a, text_b or None)], as in training. given: a text; the texts in the
        order of the task's columns, with multiple choice the choices behind them as one list; or a
        row of a file, {column: value}. Raises ValueError for an input that does not fit.
        """
        task, is_row = self.task, isinstance(given, dict)
        row = apply_column_names(given, task.column_names) if is_row else self.as_row(given)
        texts, _ = task.texts_and_label({**row, task.label: "not looked at"})
        return task.candidates_of(texts)

    def as_row(self, given):
        """Texts in the order of the task's columns -> {column: text}."""
        name, columns = self.task.name, self.task.columns
        takes = f"{name} takes {' and '.join(columns)}, not {given!r:.200}"
        if not isinstance(given, (str, list, tuple)):
            raise ValueError(takes)
        texts = [given] if isinstance(given, str) else list(given)
        if texts and isinstance(texts[-1], (list, tuple)):  # the choices, as one list
            options = list(texts.pop())
            if columns[-1] in ("choices", "endings"):  # one column holds all of them
                options = [{"text": options} if name == "commonsense_qa" else options]
            texts += options
        if len(texts) != len(columns):
            raise ValueError(takes)
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

    def split(self, name="validation", data_dir=None, limit=None, seed=0):
        """A split as in training, from its data unless there is a `data_dir`; `limit`: examples at
        most, drawn with `seed`, else as many development examples as there. Raises as load_split
        does."""
        options, task = self.record.options, self.task
        data_dir = data_dir or options["data_dir"]
        limit = limit or (options["limit_dev"] if name == "validation" else None)
        if data_dir is None:  # --train-file and --dev-file, which multi-task runs do not have
            files = {"train": options.get("train_file"), "validation": options.get("dev_file")}
            task = replace(task, files={name: path for name, path in files.items() if path})
        held_out, share = self.record.tasks[task.name].held_out, options["dev_fraction"]
        given = {"limit": limit, "seed": seed, "dev_fraction": share, "held_out": held_out}
        return load_split(task, name, self.tokenizer, data_dir, **given)

    def left_over(self, data_dir=None):
        """The training examples that --limit-train has not drawn: nothing was chosen on them."""
        options = self.record.options
        every = self.split("train", data_dir)
        drawn = self.split("train", data_dir, options["limit_train"], options["seed"])
        known = np.isin(hashes_of(every), hashes_of(drawn))
        return every.select(np.flatnonzero(~known))

    @property
    def eval_batch_size(self):
        options = self.record.options
        return eval_batch_size(options["batch_size"], options["grad_accumulation"])

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
            found = zip(rows, self.task.type.predict(logits).tolist(), logits, strict=True)
            for i, value, of_labels in found:
                result[i] = {self.task.labels[0]: value}
                if self.task.type.dtype == torch.long:
                    each = dict(zip(self.task.labels, of_labels.softmax(-1).tolist(), strict=True))
                    best = self.task.labels[value]
                    result[i] = {"label": best, "probability": each[best], "probabilities": each}
                result[i]["truncated"] = any(encoding.overflowing for encoding in groups[i])
        return result

    @torch.inference_mode()
    def fusion_weights(self, inputs):
        """
        [{"tokens": T texts, "weights": {location: for every layer a tensor [T, N], or None where
        there is no fusion}}] of inputs; with multiple choice one for each of their choices. The N
        adapters are in the order of `adapters`. Raises ValueError for other runs.
        """
        result = []
        for group in self.encode(inputs):
            batch = self.batch([group])
            names = "input_ids", "token_type_ids", "attention_mask"
            self.bert(*(batch[name].to(self.bert.device) for name in names))
            s = fusion_weights(self.bert)
            for c, encoding in enumerate(group):
                tokens = self.tokenizer.decode_batch([[i] for i in encoding.ids], False)
                layers = {location: [None] * len(self.bert.layers) for _, location in sorted(s)}
                for (layer, location), weights in s.items():
                    layers[location][layer] = weights[c, : len(tokens)].cpu()
                result.append({"tokens": tokens, "weights": layers})
        return result


def read_finished(directory):
    """The Record of a finished run. Raises FileNotFoundError for a directory that holds none."""
    if not is_finished(Path(directory)):
        raise FileNotFoundError(f"no finished run in {directory}: it has no metrics.json")
    record = read_record(directory)
    if record.stage not in train.STAGES:  # of a fork: it would be read as a head on Θ
        advice = "--import MODULE names the fork that registers it"
        raise ValueError(f"{directory} is of an unknown stage, {record.stage!r:.50}: {advice}")
    return record


def check_fusion(directory, what):
    """Raises ValueError, saying what only runs with a fusion are good for, for another run."""
    if not (Path(directory) / FUSION.config).is_file():
        stage = read_finished(directory).stage
        raise ValueError(f"{directory} is of --stage {stage}: only fusion runs {what}")


def task_of(record, name):
    """The Task of a run, with the columns and labels of its training."""
    trained, labels = record.tasks[name], tuple(record.tasks[name].labels)
    types = {task.type.__name__: task.type for task in TASKS.values()}
    if trained.type not in types:
        raise ValueError(f"{name!r:.50} is a task of an unknown type, {trained.type!r:.50}")
    task = TASKS[name] if name in TASKS else own_task(trained.columns, labels)
    names = record.options.get("column_names", {})
    return replace(task, name=name, labels=labels, type=types[trained.type], column_names=names)


def place_of(directory, record, name):
    """(name of the run's task, directory of the task's files). name: which of several. Raises
    ValueError if the run does not have the task."""
    names = [*record.tasks]
    if record.stage != "multitask":
        if name not in (None, *names):
            raise ValueError(f"{directory} is a run on {names[0]!r:.50}, not on {name!r:.50}")
        return names[0], directory
    if name not in names:
        raise ValueError(f"{directory} holds several tasks: choose --task from {', '.join(names)}")
    has_adapters = record.options["adapter"] != "none"
    return name, directory / ("adapters" if has_adapters else "heads") / name


def check_encoders(bert, directory, record):
    """Raises ValueError for an encoder or a tokenizer that is not the one with which the training
    has ended."""
    tokenizer = describe_tokenizer(bert.directory, bert.config.max_length)
    for what, digest, expected in (
        ("encoder", bert.digest, record.final_encoder),
        ("tokenizer", tokenizer, record.tokenizer_sha256),
    ):
        if digest != expected:
            other = f"another {what} than that in {bert.directory}"
            raise ValueError(f"{directory} was trained with {other}")


def plug_in(bert, directory, place):
    """Loads and activates what the files of a run hold: its own adapter, its fusion over adapters/,
    or one of these alone. place: where the task's own files are. Returns the head."""
    names = []
    if place == directory:  # not of a multi-task run, where they are the other tasks'
        found = (directory / "adapters").glob(f"*/{ADAPTER.config}")
        names = sorted(path.parent.name for path in found)
    for name in names:
        load_adapter(bert, directory / "adapters" / name)
    if (directory / FUSION.config).is_file():
        load_fusion(bert, directory)
    elif (place / ADAPTER.config).is_file():
        activate(bert, load_adapter(bert, place))
    elif names:  # a head on one of them
        activate(bert, *names)
    return load_head(bert, place)


def load_run(directory, device="cpu", model=None, task=None):
    """
    The LoadedRun of a finished run.

    model: where the encoder is now, if not where config.json says; task: which of a multi-task
    run's is meant. Raises FileNotFoundError or ValueError for a directory that is not a finished
    run, for files of the run that were changed since, and for an encoder or a tokenizer that is not
    the one of its training.
    """
    directory = Path(directory)
    record = read_finished(directory)
    record.check_files(directory)
    name, place = place_of(directory, record, task)
    task = task_of(record, name)
    own = record.weights_sha256 is not None
    if own and model is not None:
        raise ValueError(f"{directory} has an encoder of its own, which --model cannot replace")
    bert = Bert.from_pretrained(directory if own else model or record.options["model"]).to(device)
    check_encoders(bert, directory, record)
    head = plug_in(bert, directory, place)
    adapters = [*record.loaded_adapters]
    if fused := fusions(bert):  # a fork may fuse more than --adapters
        adapters = fused[0][1].name.split(",")
    if head.config["label2id"] != {label: i for i, label in enumerate(task.labels)}:
        raise ValueError(f"{place}: config.json and head_config.json have different labels")
    length = record.tasks[name].max_length
    sizes = bert.config.vocab_size, bert.config.type_vocab_size
    tokenizer = load_tokenizer(bert.directory, length, *sizes)
    return LoadedRun(bert, head, record, task, tokenizer, directory, adapters)


def as_trained(run, device, dtype=None):
    """The Model of a LoadedRun on a device, its weights held as in training, those of parts that
    were trained in fp32. Without dtype, that of its training."""
    device, dtype = choose_device(device, dtype or run.record.dtype)
    model = train.Model(run.bert, run.head, dtype)
    train.cast_parts(model, dtype, run.record.trained_parts)
    return model.to(device)
