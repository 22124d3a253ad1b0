"""D: the paper's 16 tasks (section 4.2), your own task, and batches.

Every example becomes C candidates, pairs (text_a, text_b or None), and a label. Classification has
one candidate per example and a K-way head; multiple choice has one candidate per choice, and a
softmax over their scores.

    task = get_task("rte", data_dir)                        # or your own, see `own_task`
    tokenizer = load_tokenizer(directory, max_length=128)   # of formats.tokenizer
    train = load_split(task, "train", tokenizer, data_dir)  # tokenised once, then cached
    for batch in batches(train, batch_size=32, seed=0): ...
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from formats.columns import (
    OWN_COLUMNS,
    apply_column_names,
    by_key,
    check_candidates,
    check_column_names,
    check_own_task,
    check_row,
    encode,
    label_index,
    make_label_ids,
    own_columns,
)
from formats.files import error_prefix
from formats.rows import cached_tokens, find_file, find_split, hold_out, read_rows, set_origin
from runtime.scores import CLASS_SCORES, accuracy, f1


class Classification:
    """A type of task: one of K labels for each example. A type of your own is a subclass."""

    dtype = torch.long  # of labels and predictions
    # larger is better; the first one chooses the best epoch, unless --score does
    scores = CLASS_SCORES

    @staticmethod
    def head(labels):
        """AdapterHub's fields of the prediction head"""
        return {"head_type": "classification", "num_labels": len(labels)}

    @staticmethod
    def loss(logits, labels):
        """logits [B, K], labels [B] -> a scalar, the mean over the batch"""
        return F.cross_entropy(logits, labels)

    @staticmethod
    def predict(logits):
        """logits [B, K] -> [B]"""
        return logits.argmax(-1)

    @staticmethod
    def label(task, value):
        """A raw label, as the data writes it -> its index in task.labels. Raises ValueError that
        shows the value."""
        return label_index(
            value, task.labels, task.label_ids, task.label_aliases, on_hub=task.hub is not None
        )


class MultipleChoice(Classification):
    """The label is the number of the right candidate; each candidate is scored by itself."""

    scores = {"accuracy": accuracy}  # "the first choice" is not a class that could have an F1

    @staticmethod
    def head(labels):
        return {"head_type": "multiple_choice", "num_choices": len(labels)}


@dataclass(frozen=True)
class Task:
    """One task: what its data look like, and how a row becomes candidates."""

    hub: tuple | None  # repository, configuration, revision on the hub; None: it is not there
    columns: tuple  # text columns, in the order in which `candidates` takes them
    labels: tuple  # class names in the order of their indices, as the hub writes them
    sizes: tuple  # rows of training and development set, if they are known
    candidates: Callable = lambda *texts: [(texts[0], texts[1] if len(texts) > 1 else None)]
    label: str = "label"  # the column of the label
    max_length: int = 128  # in tokens; longer pairs are cut
    dev: str = "validation"  # the hub's name of the development set
    dev_from_train: int = 0  # the development set is this many training examples
    hub_sizes: tuple = ()  # rows of the hub's copy, if they differ
    column_aliases: dict = field(default_factory=dict)  # names in other copies -> ours
    label_aliases: dict = field(default_factory=dict)  # the same for labels
    column_names: dict = field(default_factory=dict)  # --columns: {our name: the file's}
    type: type = Classification
    name: str = ""
    files: dict = field(default_factory=dict)  # {split: path}: your own, instead of --data-dir
    unused_columns: tuple = ()  # must be empty in every row: the model would not see them

    @property
    def is_multiple_choice(self):
        return issubclass(self.type, MultipleChoice)

    @property
    def scores(self):
        """{name: function(labels, predictions)} of its type; binary F1 only for two classes."""
        binary = len(self.labels) == 2
        return {name: of for name, of in self.type.scores.items() if binary or of is not f1}

    def source(self, split, data_dir=None, dev_fraction=None, held_out=None):
        """The rows of a split: a formats.rows.Source."""
        theirs = self.files, self.hub, self.dev, self.dev_from_train
        return find_split(self.name, split, data_dir, *theirs, dev_fraction, held_out)

    def texts_and_label(self, row):
        """(texts, label) of a row whose columns have our names. Raises ValueError that names a
        column."""
        aliases, unused = self.column_aliases, self.unused_columns
        return check_row(row, self.columns, self.label, aliases, unused, self.column_names)

    def candidates_of(self, texts):
        """[(text_a, text_b or None)]. Raises ValueError for another number than there are
        choices."""
        candidates = self.candidates(*texts)
        check_candidates(candidates, len(self.labels) if self.is_multiple_choice else None)
        return candidates

    def example(self, row):
        """(candidates, label) of a row. Raises ValueError, also for an unknown label."""
        texts, label = self.texts_and_label(row)
        return self.candidates_of(texts), self.type.label(self, label)

    def note_size(self, where, count, split):
        """A note about another number of rows than the data set has, here or on the hub."""
        known = [of[split == "validation"] for of in (self.sizes, self.hub_sizes) if of]
        if split in ("train", "validation") and known and count not in known:
            print(f"note: {where} has {count} rows, where {known[0]} are expected")

    @cached_property
    def label_ids(self):
        """{label, as written and in lower case: its index}"""
        return make_label_ids(self.labels)


# How the texts of a row become candidates, as in AdapterHub's own training code
# (adapter-hub/efficient-task-transfer, itrain/datasets)


def fill_blank(sentence, *options):
    if "_" not in sentence:
        raise ValueError("column 'sentence' has no blank, _")
    return [(sentence.replace("_", option), None) for option in options]


def answers(context, question, *options):
    return [(context, f"{question} {option}") for option in options]


def endings(ctx_a, ctx_b, options):
    return [(ctx_a, f"{ctx_b} {option}") for option in options]


def question_choices(question, choices):
    """choices["label"] says which of choices["text"] is answer A, which is B, and so on."""
    return [(question, text) for text in by_key(choices, "ABCDE")]


def own_choices(*texts):
    """([text_a,] choices) -> candidates"""
    return [(texts[0], choice) if len(texts) == 2 else (choice, None) for choice in texts[-1]]


def classification(hub, columns, labels, sizes, max_length=128, revision=None, **more):
    """A Task. hub ("repository configuration"), columns and labels are each given as one string of
    words."""
    if hub is not None:
        repository, *configuration = hub.split()
        hub = repository, configuration[0] if configuration else None, revision
    columns, labels = tuple(columns.split()), tuple(labels.split())
    return Task(hub, columns, labels, sizes, max_length=max_length, **more)


def multiple_choice(hub, columns, labels, sizes, candidates, max_length=128, **more):
    more |= {"candidates": candidates, "type": MultipleChoice}
    return classification(hub, columns, labels, sizes, max_length, **more)


NLI = "entailment neutral contradiction"
UKP = "NoArgument Argument_against Argument_for"
SCITAIL_COLUMNS = {"sentence1": "premise", "sentence2": "hypothesis", "gold_label": "label"}

# Section 4.2, in the order of Table 1: place on the hub, columns, labels, rows of training and
# development set (the data sets' own; the paper gives none), and the length in tokens where it is
# not 128. The repositories hold no loading script, so that `datasets` 5 can read them. Where the
# reference's 128 tokens would cut many examples the length is ours (docs/silent.md).
TASKS = {
    "mnli": classification(
        "nyu-mll/glue mnli", "premise hypothesis", NLI, (392702, 9815), dev="validation_matched"
    ),
    "qqp": classification(
        "nyu-mll/glue qqp", "question1 question2", "not_duplicate duplicate", (363846, 40430)
    ),
    "sst2": classification("nyu-mll/glue sst2", "sentence", "negative positive", (67349, 872)),
    "winogrande": multiple_choice(
        "allenai/winogrande winogrande_xl",
        "sentence option1 option2",
        "1 2",
        (40398, 1267),
        fill_blank,
        label="answer",
    ),
    "imdb": classification(
        "stanfordnlp/imdb plain_text", "text", "neg pos", (23000, 2000), 384, dev_from_train=2000
    ),
    "hellaswag": multiple_choice(
        "Rowan/hellaswag", "ctx_a ctx_b endings", "0 1 2 3", (39905, 10042), endings, 200
    ),
    "social_i_qa": multiple_choice(
        "lighteval/siqa",
        "context question answerA answerB answerC",
        "1 2 3",
        (33410, 1954),
        answers,
    ),
    "cosmos_qa": multiple_choice(
        "Samsoup/cosmos_qa",
        "context question answer0 answer1 answer2 answer3",
        "0 1 2 3",
        (25262, 2985),
        answers,
        256,
    ),
    "scitail": classification(
        "allenai/scitail snli_format",
        "premise hypothesis",
        "entails neutral",
        (23596, 1304),
        column_aliases=SCITAIL_COLUMNS,
        label_aliases={"entailment": "entails"},
    ),
    "argument": classification(None, "topic sentence", UKP, (18341, 2042), label="annotation"),
    "commonsense_qa": multiple_choice(
        "tau/commonsense_qa",
        "question choices",
        "A B C D E",
        (9741, 1221),
        question_choices,
        label="answerKey",
    ),
    "boolq": classification(
        "aps/super_glue boolq",
        "passage question",
        "False True",
        (9427, 3270),
        384,
        column_aliases={"answer": "label"},
    ),
    "mrpc": classification(
        "nyu-mll/glue mrpc", "sentence1 sentence2", "not_equivalent equivalent", (3668, 408)
    ),
    "sick": classification(
        "RobZamp/sick",
        "sentence_A sentence_B",
        NLI,
        (4500, 500),
        revision="refs/convert/parquet",
        hub_sizes=(4439, 495),
    ),
    "rte": classification(
        "nyu-mll/glue rte", "sentence1 sentence2", "entailment not_entailment", (2490, 277), 290
    ),
    "cb": classification(
        "aps/super_glue cb",
        "premise hypothesis",
        "entailment contradiction neutral",
        (250, 56),
        256,
    ),
}
TASKS = {name: replace(task, name=name) for name, task in TASKS.items()}


def get_task(name, data_dir=None, column_names=None, files=None):
    """
    The paper's task of that name, or your own: any other name, with data in `data_dir`/NAME, or in
    `files`, {"train": path, "validation": path}.

    column_names: {our name of a column: the files'}. Raises ValueError for an unknown task,
    FileNotFoundError for a missing directory.
    """
    if data_dir is not None and not Path(data_dir).is_dir():
        raise FileNotFoundError(f"--data-dir {data_dir} is not a directory")
    for path in (files or {}).values():
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path} is not a file")
    if name in TASKS:
        task = TASKS[name]
    else:
        if files:
            path = files["train"]
        else:
            check_own_task(name, data_dir, TASKS)
            path = find_file(Path(data_dir) / name, "train")
        task = own_task(*own_columns(path, read_rows(path), column_names))
    return replace(task, name=name, column_names=column_names or {}, files=files or {})


def own_task(names, labels):
    """
    Your own task. Columns `text_a`, `text_b` (optional) and `label` (strings or integers, their
    sorted values are the classes), or `choices` (a list of texts, the same number in every row),
    `label` (the index of the right one, from 0) and optionally `text_a`. names: which of text_a,
    text_b and choices the data have
    """
    unused = tuple(column for column in OWN_COLUMNS if column not in names)
    task = Task(None, tuple(names), tuple(labels), (), unused_columns=unused)
    if "choices" in names:
        task = replace(task, candidates=own_choices, type=MultipleChoice)
    return task


def load_split(
    task, split, tokenizer, data_dir=None, limit=None, seed=0, dev_fraction=None, held_out=None
):
    """
    One split, tokenised: a datasets.Dataset with `input_ids` and `token_type_ids` (for every
    candidate a list of ids), `label`, `length` (tokens of the longest candidate), and `hash`, a
    number that depends on the texts and the label alone. Tokenising runs on all cores and is
    cached. `formats.rows.origin(split)` says what it was made of.

    limit: keep that many examples, drawn with `seed`. dev_fraction: share of the training file that
    is held out where there is no development file. held_out: the digest of the examples that an
    earlier run has held out, which must be the same. Raises FileNotFoundError if the data are not
    there, ValueError naming file and line for a row that does not fit.
    """
    source = task.source(split, data_dir, dev_fraction, held_out)

    def examples(chosen):
        """(candidates, label) of the chosen rows, bool [rows], in the order of the file"""
        for line, values in itertools.compress(source.read(), chosen):
            with error_prefix(f"{source.where}, line {line}"):
                values = apply_column_names(values, task.column_names)
                yield task.example(values)

    def tokenize():
        title = f"tokenizing {task.name} {split}"
        rows = iter(tqdm(examples(wanted), title, leave=False, disable=None))
        while chunk := list(itertools.islice(rows, 1000)):
            yield from encode(tokenizer, chunk)

    if task.column_names:
        _, first = next(source.read())
        check_column_names(task.column_names, (*task.columns, task.label), source.where, first)
    count = sum(1 for _ in source.read())
    indices, digest = np.arange(count), None
    if source.dev_share is not None:
        indices, digest = hold_out(source, examples(np.ones(count, bool)), split, held_out)
    if dev_fraction is None:
        task.note_size(source.where, len(indices), split)
    if limit is not None and limit < len(indices):
        indices = indices[np.random.default_rng(seed).permutation(len(indices))[:limit]]
    wanted = np.zeros(count, bool)
    wanted[indices] = True

    # what another task or other code has made is to be made anew
    key = [source.digest, wanted.tobytes(), split, replace(task, files={}), tokenizer.to_str()]
    code = load_split, check_row, read_rows, task.candidates, task.type
    result = cached_tokens(key, code, tokenize, task.type.dtype.is_floating_point)
    if limit is not None:  # the rows come in the order of the file: restore the drawn order
        result = result.select(np.searchsorted(np.sort(indices), indices))
    set_origin(result, source, digest)
    return result


def length_bucketed_batches(lengths, batch_size, seed=None):
    """
    Indices of every batch of one epoch. Batches hold examples of similar length, so that little is
    padding: a random order is sorted by length within windows of 50 batches, and the batches are
    shuffled. A window is at most a quarter of the examples, so that those of a small task meet
    others in every epoch, as with plain shuffling. Without a seed (evaluation) everything is
    sorted, longest first. Every index occurs exactly once.
    """
    if seed is None:
        order = np.argsort(-lengths, kind="stable")
        return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(lengths))
    window = max(1, min(50, len(lengths) // (4 * batch_size)))
    result = []
    for start in range(0, len(order), window * batch_size):
        part = order[start : start + window * batch_size]
        part = part[np.argsort(lengths[part], kind="stable")]
        result += [part[i : i + batch_size] for i in range(0, len(part), batch_size)]
    return [result[i] for i in rng.permutation(len(result))]


def collate(rows, pad_token_id):
    """rows: {"input_ids": B lists of C lists, ...} -> LongTensors input_ids, token_type_ids,
    attention_mask [B·C, T], an example's candidates one after another; and labels [B], class
    indices, or the floats of a regression"""
    ids = [candidate for row in rows["input_ids"] for candidate in row]
    types = [candidate for row in rows["token_type_ids"] for candidate in row]
    T = max(len(candidate) for candidate in ids)
    input_ids = torch.full((len(ids), T), pad_token_id)
    token_type_ids, attention_mask = torch.zeros_like(input_ids), torch.zeros_like(input_ids)
    for i, (candidate, segments) in enumerate(zip(ids, types, strict=True)):
        input_ids[i, : len(candidate)] = torch.tensor(candidate)
        token_type_ids[i, : len(candidate)] = torch.tensor(segments)
        attention_mask[i, : len(candidate)] = 1
    return {
        "input_ids": input_ids,
        "token_type_ids": token_type_ids,
        "attention_mask": attention_mask,
        "labels": torch.tensor(rows["label"]),
    }


def length_groups(batch):
    """
    The inputs of the encoder, in C groups: (indices [B] of candidates in the batch, [input_ids,
    token_type_ids, attention_mask] of these, [B, T] each).

    The candidates of one multiple-choice example differ in length, so they are sorted by length
    into C groups of B candidates, and each group is cut to its longest. Classification has one
    group, the batch itself.
    """
    C = len(batch["input_ids"]) // len(batch["labels"])
    lengths = batch["attention_mask"].sum(1)
    order = lengths.argsort(stable=True) if C > 1 else torch.arange(len(lengths))
    names = "input_ids", "token_type_ids", "attention_mask"
    for indices in order.chunk(C):
        T = lengths[indices].max()
        yield indices, [batch[name][indices, :T] for name in names]


def batches(split, batch_size, pad_token_id=0, seed=None, rank=0, world_size=1):
    """The batches of one epoch over a split from `load_split`, as `collate` makes them; of each
    batch, the share of process `rank`."""
    lengths = split.with_format("numpy")["length"][:]
    for indices in length_bucketed_batches(lengths, batch_size, seed):
        if len(mine := indices[rank::world_size]) > 0:
            yield collate(split[mine.tolist()], pad_token_id)
