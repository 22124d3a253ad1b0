"""A finished run, built again from its directory.

    run = load_run("runs/fusion-rte")
    run.predict([("It rains.", "It is wet.")])         # labels and probabilities
    run.fusion_weights([("It rains.", "It is wet.")])  # of every token, at every layer

A run with something of your own needs the module that has it, in a command by --import."""

import argparse
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import data
import experiments.multitask  # noqa: F401  (adds its stage)
import train
from bert import Bert
from data import TASKS, Task, batches, collate, load_split
from formats import adapterhub
from formats.adapterhub import read_run
from formats.files import check_names, error_prefix, note, read_tensors
from formats.kept import files_of, hold_frozen_in, kept_names, without_file
from formats.rows import OWN_COLUMNS, Source, our_rows, source_of
from formats.tokenizer import load_tokenizer, tokenizer_sha256
from fusion import fusion_weights
from runtime import command
from runtime.processes import choose_device, has_bf16, reseed
from runtime.record import examples_sha256, hashes_of, share_trained_on

# A fusion keeps the weights of its last forward, so one thread at a time computes and reads them.
LOCK = threading.Lock()  # no field of a run, which can be pickled


def make_parser(name, description):
    """The options of every command that reads runs."""
    prog = f"python -m experiments.{name}"
    parser = command.Parser(prog=prog, description=description, parents=[command.IMPORT])
    add = parser.add_argument
    add("--task", help="which task of a multi-task run")
    add("--model", help="where the encoder is now, if not where the run found it")
    columns = {"type": command.name_and_text, "action": command.Pairs, "metavar": "OURS=THEIRS"}
    add("--columns", help="of the data, if not those of the run", **columns)
    add("--device", default="auto", choices="auto cpu cuda mps".split())
    return parser


@dataclass(repr=False)
class LoadedRun:
    """A finished run, frozen, in eval mode; precision and active parts are as in its training. Its
    methods take inputs: one, or a list of them. An input is a text; a tuple or list of the texts in
    the order of the task's columns; or a row of the run's files, {column: text}."""

    model: train.Model
    task: Task  # of a multi-task run the one that was asked for
    source: Source  # of its data
    tokenizer: object
    args: argparse.Namespace  # its options
    record: dict  # its run.json
    directory: Path

    @property
    def bert(self):
        return self.model.bert

    @property
    def adapters(self):
        """The names of the fused adapters, in the fusion's order."""
        return [*self.bert.active] if isinstance(self.bert.active, tuple) else []

    def autocast(self):
        return torch.autocast(self.bert.device.type, torch.bfloat16, self.args.dtype == "bfloat16")

    def candidates(self, inputs):
        """[[(text_a, text_b or None)]] of inputs, as in training"""
        task, names, found = self.task, self.source.column_names, []
        inputs = inputs if isinstance(inputs, list) else [inputs]
        rows = [x if isinstance(x, dict) else self.row_of(x) for x in inputs]
        if rows:
            rows = our_rows(rows, names, task.name, task.columns, task.label, has_label=False)
        for number, row in enumerate(rows, 1):
            with error_prefix(f"row {number}"):
                found.append(task.candidates_of(row))
        return found

    def row_of(self, texts):
        """{the files' name of a column: text} of a text, or of texts in the order of the columns"""
        names = [self.source.column_names.get(column, column) for column in self.task.columns]
        values = [texts] if isinstance(texts, str) else texts
        if not isinstance(values, (tuple, list)) or len(values) != len(names):
            raise ValueError(f"{self.task.name} takes {' and '.join(names)}, not {texts!r:.200}")
        return dict(zip(names, values, strict=True))

    def encode(self, inputs):
        """[Example] of inputs, without labels; or what `encode` or `split` has returned."""
        if isinstance(inputs, list) and all(isinstance(one, data.Example) for one in inputs):
            return inputs
        examples = [(candidates, None) for candidates in self.candidates(inputs)]
        return data.encode(self.tokenizer, examples, "tokenizing")

    def split(self, name="validation", data_dir=None):
        """[Example] of a split as in training, of the run's data, or of those in `data_dir`. There,
        --dev-fraction holds out the same examples, unless it has a development file."""
        source = replace(self.source)  # without any rows
        if data_dir:
            source.data_dir, source.files = data_dir, {}
            if source.paths(self.task.name, "validation"):
                source.dev_fraction = None
        limit = self.args.limit_dev if name == "validation" else None
        examples = load_split(self.task, source, name, self.tokenizer, limit)
        has_held_out = name == "train" and source.dev_fraction
        if has_held_out and not self.is_own("validation", self.split(data_dir=data_dir)):
            problem = "the examples that training held out cannot be told from the others"
            raise ValueError(f"{problem}: rows were added, removed or changed since")
        return examples

    def is_own(self, name, examples):
        """Whether these are the run's own examples, as its run.json says."""
        kind = "training" if name == "train" else "development"
        recorded = self.record["inputs"][f"{kind} examples of {self.task.name}"]
        return recorded == examples_sha256(hashes_of(examples))

    def shares_trained_on(self, examples):
        """{"this run" or "adapter NAME": the share of [Example] on which it was trained}, if any"""
        places = {f"adapter {n}": self.directory / "adapters" / n for n in self.record["adapters"]}
        places["this run"] = self.directory
        found = {n: share_trained_on(read_run(place), examples) for n, place in places.items()}
        return {name: share for name, share in found.items() if share}

    @torch.inference_mode()
    def predict(self, inputs):
        """[the task's `answer` to an input, and "truncated": whether a text was cut]"""
        examples, pad = self.encode(inputs), self.bert.config.pad_token_id
        result = [None] * len(examples)
        for indices in batches(examples, 64):
            batch = collate([examples[i] for i in indices], pad)
            with LOCK, self.autocast():
                logits = self.model(batch)  # [B, K]
            if not logits.isfinite().all():
                raise FloatingPointError("the model's outputs are not finite")
            for i, of_one in zip(indices, logits, strict=True):
                result[i] = {**self.task.answer(of_one), "truncated": examples[i].is_cut}
        return result

    def weights_of(self, batch):
        with LOCK, self.autocast():
            self.model(batch)
            return fusion_weights(self.bert)

    @torch.inference_mode()
    def fusion_weights(self, inputs):
        """[{"tokens": T texts, "weights": {location: for every layer a tensor [T, N], or None where
        there is no fusion}}] of inputs, or of each of their choices; N is as in `adapters`."""
        result = []
        for example in self.encode(inputs):
            s = self.weights_of(collate([example], self.bert.config.pad_token_id))
            for c, ids in enumerate(example.input_ids):
                tokens = self.tokenizer.decode_batch([[i] for i in ids], False)
                layers = {location: [None] * len(self.bert.layers) for _, location in sorted(s)}
                for (layer, location), weights in s.items():
                    layers[location][layer] = weights[c, : len(tokens)].float().cpu()
                result.append({"tokens": tokens, "weights": layers})
        return result


def load_run(directory, device="cpu", model=None, task=None, columns=None):
    """The LoadedRun of a finished run: train.py's `build` with the recorded options, and then the
    saved tensors. Encoder and tokenizer must be the same. model, task, columns: `make_parser`"""
    directory = Path(directory)
    record = read_finished(directory)
    args = argparse.Namespace(**record["options"])
    args.columns = columns or args.columns
    device, _ = choose_device(device, args.dtype)
    if args.dtype == "bfloat16" and not has_bf16(device.type):  # which takes 100 times as long
        note(f"{directory} was trained in bfloat16, this {device.type} computes it in float32")
        args.dtype = "float32"
    for option, table in train.TABLES.items():  # a fork's has to be imported
        command.look_up(table, getattr(args, option), f"--{option}")
    task = recorded_task(record, directory, task)
    has_encoder = (directory / "model.safetensors").is_file()  # the run has trained it
    args.model = str(model or (directory if has_encoder else record["trained_on"]))
    copies = {name: directory / "adapters" / name for name in record["adapters"]}
    adapters = {n: adapterhub.read(copy, adapterhub.ADAPTER) for n, copy in copies.items()}
    # as in training, for what is drawn and not saved
    with command.alone(is_run=False), torch.random.fork_rng(devices=[]):
        reseed(args.seed)
        bert = Bert.from_pretrained(args.model).to(device)
        reseed(args.seed)
        built = train.build(args, bert, task, adapters)
    if bert.sha256 != record["encoder"]:
        raise ValueError(f"{directory} was trained with another encoder than {args.model}")
    kept = kept_names(built, adapters)
    restore(built, task, directory, kept, files_of(built, adapters))
    hold_frozen_in(built, kept, getattr(torch, args.dtype))
    length = record["tasks"][task.name]["max_length"]
    tokenizer = load_tokenizer(bert.directory, length, bert.config)
    if tokenizer_sha256(tokenizer) != record["inputs"]["tokenizer"]:
        raise ValueError(f"{directory} was trained with another tokenizer than {args.model}")
    built.requires_grad_(False).eval()
    return LoadedRun(built, task, source_of(args), tokenizer, args, record, directory)


def read_finished(directory):
    """The run.json of a finished run"""
    record = read_run(directory)
    if not record or not Path(directory, "metrics.json").is_file():
        advice = "it has no metrics.json (what was saved alone is for --adapters)"
        raise FileNotFoundError(f"no finished run in {directory}: {advice}")
    return record


def recorded_task(record, directory, name=None):
    """The Task of a run, with the columns and labels of its training. name: which of several"""
    names = [*record["tasks"]]
    name = names[0] if name is None and len(names) == 1 else name
    if name not in names:
        raise ValueError(f"{directory} is a run on {', '.join(names)}: choose --task from these")
    found = record["tasks"][name]
    if name in TASKS:
        return replace(TASKS[name], name=name, labels=found["labels"])
    if {*found["columns"]} - {*OWN_COLUMNS} or len(found["labels"]) < 2:
        advice = "if it is a module of yours that adds it to data.TASKS, --import MODULE names that"
        raise ValueError(f"{directory} is a run on {name!r:.50}, which is not known: {advice}")
    return data.own_task(name, found["columns"], found["labels"])


def restore(model, task, directory, kept, parts):
    """Puts all that the run has kept in place, by name."""
    kinds = {"adapter": adapterhub.ADAPTER, "fusion": adapterhub.FUSION, "head": adapterhub.HEAD}
    path = directory / "own.safetensors"
    rest = read_tensors(path) if path.is_file() else {}
    with error_prefix(directory):
        for part, tensors in parts.items():
            word, _, name = part.partition(" ")
            if word in kinds:  # the encoder is there already
                # a multi-task run has its heads there, too
                places = [f"adapters/{name or task.name}", f"heads/{task.name}", ""]
                there = [p for p in places if (directory / p / kinds[word].config).is_file()]
                adapterhub.read(directory / (there or [""])[0], kinds[word]).copy_into(tensors)
        check_names(without_file(model, kept, parts).keys(), rest.keys())
        model.load_state_dict(rest, strict=False)
