"""D: the paper's 16 tasks (section 4.2), your own task, and batches.

Every example becomes C candidates, pairs (text_a, text_b or None), and a label. Classification has
one candidate per example and a K-way head; multiple choice has one candidate per choice, and a
softmax over their logits.

    data_source = Source(data_dir)                          # of formats.rows
    task = get_task("rte", data_source)                     # or your own, see `own_task`
    tokenizer = load_tokenizer(directory, max_length=128)   # of formats.tokenizer
    train_set = load_split(task, data_source, "train", tokenizer)
    for indices in batches(train_set, batch_size=32, seed=0):
        batch = collate([train_set[i] for i in indices], pad_token_id=0)"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from formats.adapterhub import check_name
from formats.files import error_prefix, note
from formats.rows import drawn, plain_label
from formats.tokenizer import encode_pairs
from runtime.record import note_unseen_classes

# Scores of labels and predictions, LongTensors [examples] of class indices. As in scikit-learn, a
# class that neither of them has does not count, and 0 / 0 is 0.


def accuracy(labels, predictions):
    """The share of examples that are right, 0 to 1."""
    return (labels == predictions).sum().item() / len(labels)


def f1_of_class(labels, predictions, k):
    """2 · precision · recall / (precision + recall) of class k: 2 TP / (2 TP + FP + FN)"""
    right = ((labels == k) & (predictions == k)).sum().item()
    both = (labels == k).sum().item() + (predictions == k).sum().item()
    return 2 * right / both if both else 0.0


def macro_f1(labels, predictions):
    """The mean of the classes' F1, each class alike."""
    classes = torch.cat([labels, predictions]).unique().tolist()
    return sum(f1_of_class(labels, predictions, k) for k in classes) / len(classes)


# f1, where there are two classes, is that of the second: GLUE's, for MRPC and QQP
CLASS_SCORES = {"accuracy": accuracy, "macro_f1": macro_f1, "f1": partial(f1_of_class, k=1)}


def as_pair(text_a, text_b=None):
    return [(text_a, text_b)]


@dataclass
class Task:
    """One task: how a row becomes candidates and a label, and what logits say. A regression, or
    labels of another kind, need a subclass (examples/sts_b.py)."""

    hub: tuple | None  # repository, configuration, revision on the hub; None: it is not there
    columns: list  # text columns, in the order in which `candidates` takes them
    labels: list  # the names of the classes, in the order of their indices
    candidates: Callable = as_pair  # the texts of `columns` -> [(text_a, text_b or None)]
    label: str = "label"  # the column of the label
    max_length: int = 128  # in tokens; longer pairs are cut
    is_multiple_choice: bool = False  # the labels then name the choices
    loss: Callable = F.cross_entropy  # of logits [B, K] and labels [B], the mean of the batch
    prediction: Callable = partial(torch.argmax, dim=-1)  # logits [B, K] -> predictions [B]
    # {name: function of labels and predictions}; the first chooses the best epoch; larger is better
    scores: dict | None = None  # CLASS_SCORES
    hub_dev: str = "validation"  # the hub's name of the development set
    dev_from_train: int = 0  # the development set is this many training examples
    name: str = ""  # `get_task` fills it in

    def __post_init__(self):
        # case, blanks, zeros before a number, and invisible characters make no difference
        self.indices = {plain_label(label): i for i, label in enumerate(self.labels)}
        if self.scores is None:
            is_binary = len(self.labels) == 2
            self.scores = {n: s for n, s in CLASS_SCORES.items() if is_binary or n != "f1"}

    def candidates_of(self, row):
        """[(text_a, text_b or None)] of a row, {column: its text, or a list of texts}."""
        candidates = self.candidates(*(row[column] for column in self.columns))
        if self.is_multiple_choice and len(candidates) != len(self.labels):
            raise ValueError(f"{len(candidates)} choices, expected {len(self.labels)}")
        return candidates

    def label_index(self, value):
        """The index of a label as the data write it."""
        if (text := plain_label(value)) in self.indices:
            return self.indices[text]
        # the hub has integers, which are indices; but not where the names themselves are digits
        if self.hub and not self.labels[0].isdigit() and text in map(str, range(len(self.labels))):
            found = ", ".join(f"{i} = {label}" for i, label in enumerate(self.labels))
            note(f"{self.name}: integers are read as {found}")  # which is printed only once
            return int(text)
        if text == "-1":
            raise ValueError("the label is hidden (-1): experiments.predict takes such rows")
        raise ValueError(f"label {value!r:.100} is not one of {', '.join(self.labels):.200}")

    def answer(self, logits):
        """What is said of one example, by its logits [K]; JSON can hold it."""
        label = self.labels[self.prediction(logits[None]).item()]
        each = dict(zip(self.labels, logits.softmax(-1).tolist(), strict=True))
        return {"label": label, "probability": each[label], "probabilities": each}


# Texts of a row -> candidates, as in AdapterHub's adapter-hub/efficient-task-transfer


def fill_blank(sentence, *options):
    return [(sentence.replace("_", option), None) for option in options]


def answers(context, question, *options):
    return [(context, f"{question} {option}") for option in options]


def with_endings(ctx_a, ctx_b, options):
    return [(ctx_a, f"{ctx_b} {option}") for option in options]


def with_choices(*texts):
    """([text,] choices) -> candidates; choices: a list of texts, as formats/rows.py makes it of the
    dictionary {"label": letters, "text": texts} that CommonsenseQA has on the hub"""
    *before, choices = texts
    return [(*before, choice) if before else (choice, None) for choice in choices]


NLI = "entailment neutral contradiction".split()
UKP = "NoArgument Argument_against Argument_for".split()
# The number of a choice is no class, so F1 would mean nothing.
CHOICE = {"is_multiple_choice": True, "scores": {"accuracy": accuracy}}

# Section 4.2, in the order of Table 1: place on the hub, columns, labels, and the length in tokens
# where it is not 128 (docs/silent.md). Where the hub has several copies, this is one without a
# loading script, since `datasets` no longer runs any.
# fmt: off
TASKS = {
    "mnli": Task(("nyu-mll/glue", "mnli", None), "premise hypothesis".split(), NLI,
                 hub_dev="validation_matched"),
    "qqp": Task(("nyu-mll/glue", "qqp", None), "question1 question2".split(),
                "not_duplicate duplicate".split()),
    "sst2": Task(("nyu-mll/glue", "sst2", None), "sentence".split(), "negative positive".split()),
    "winogrande": Task(("allenai/winogrande", "winogrande_xl", None),
                       "sentence option1 option2".split(), "1 2".split(),
                       fill_blank, label="answer", **CHOICE),
    "imdb": Task(("stanfordnlp/imdb", "plain_text", None), "text".split(), "neg pos".split(),
                 max_length=384, dev_from_train=2000),
    "hellaswag": Task(("Rowan/hellaswag", None, None), "ctx_a ctx_b endings".split(),
                      "0 1 2 3".split(), with_endings, max_length=200, **CHOICE),
    "social_i_qa": Task(("lighteval/siqa", None, None),
                        "context question answerA answerB answerC".split(), "1 2 3".split(),
                        answers, **CHOICE),
    "cosmos_qa": Task(("Samsoup/cosmos_qa", None, None),
                      "context question answer0 answer1 answer2 answer3".split(), "0 1 2 3".split(),
                      answers, max_length=256, **CHOICE),
    "scitail": Task(("allenai/scitail", "snli_format", None), "premise hypothesis".split(),
                    "entails neutral".split()),  # formats/rows.py renames the hub's columns
    "argument": Task(None, "topic sentence".split(), UKP, label="annotation"),
    "commonsense_qa": Task(("tau/commonsense_qa", None, None), "question choices".split(),
                           "A B C D E".split(), with_choices, "answerKey", **CHOICE),
    "boolq": Task(("aps/super_glue", "boolq", None), "passage question".split(),
                  "False True".split(), max_length=384),
    "mrpc": Task(("nyu-mll/glue", "mrpc", None), "sentence1 sentence2".split(),
                 "not_equivalent equivalent".split()),
    "sick": Task(("RobZamp/sick", None, "refs/convert/parquet"),
                 "sentence_A sentence_B".split(), NLI),
    "rte": Task(("nyu-mll/glue", "rte", None), "sentence1 sentence2".split(),
                "entailment not_entailment".split(), max_length=290),
    "cb": Task(("aps/super_glue", "cb", None), "premise hypothesis".split(),
               "entailment contradiction neutral".split(), max_length=256),
}
# fmt: on


def get_task(name, data_source):
    """The paper's task of that name, or your own: any other, with data. May raise ValueError."""
    check_name(name)  # its adapter has the same
    if name in TASKS:
        return replace(TASKS[name], name=name)
    if data_source.paths(name, "train"):  # [] or None, which stands for the hub: there is none
        return own_task(name, *data_source.columns_and_labels(name))
    place = f"{data_source.data_dir or 'DIR'}/{name}/train.jsonl"
    needed = f"your own needs --train-file FILE, or --data-dir DIR with {place}"
    raise ValueError(f"unknown task {name!r}: there are {', '.join(TASKS)}; {needed}")


def own_task(name, columns, labels):
    """Your own task, by the columns and labels of its training file."""
    if len(labels) < 2:
        raise ValueError(f"{name}: one label, or one choice, {labels}, leaves nothing to learn")
    if "choices" in columns:
        return Task(None, columns, labels, with_choices, name=name, **CHOICE)
    return Task(None, columns, labels, name=name)


class Example(NamedTuple):
    input_ids: tuple  # of C candidates, NumPy int32 [T] each
    token_type_ids: tuple
    label: int  # in another kind of task a float, or a tuple; None where it is not known
    hash: int  # of texts and label; run.json has the 1,000 smallest of a training set
    is_cut: bool  # whether it was longer than --max-length


def load_split(task, data_source, split, tokenizer, limit=None, seed=0):
    """[Example] of a split, tokenised. With --dev-fraction, or for a task with `dev_from_train`,
    both "train" and "validation" are taken from the training examples. limit: keep only this many,
    drawn with `seed`. Without a tokenizer (None) they have no ids, for their hashes alone. Raises
    FileNotFoundError if the data are not there, and ValueError naming the file and the row for one
    that does not fit."""
    where, rows = data_source.read_split(task, split)  # {number of a row: row}
    examples, numbered = [], [*rows.items()]
    for number, row in (numbered[i] for i in drawn(len(rows), limit, seed)):
        with error_prefix(f"{where}: row {number}"):
            examples.append((task.candidates_of(row), task.label_index(row[task.label])))
    result = encode(tokenizer, examples, f"tokenizing {task.name} {split}")
    note_unseen_classes(f"{where}, {split}", task, result)
    return result


def encode(tokenizer, examples, title):
    """[(candidates, label)] -> [Example]. The tokenizer uses all cores."""
    result = []
    for start in tqdm(range(0, len(examples), 1000), title, leave=False, disable=None):
        chunk = examples[start : start + 1000]
        pairs = [pair for candidates, _ in chunk for pair in candidates]
        found = encode_pairs(tokenizer, pairs) if tokenizer else [((), (), False)] * len(pairs)
        encodings = iter(found)
        for candidates, label in chunk:
            ids, types, is_cut = zip(*(next(encodings) for _ in candidates), strict=True)
            digest = hashlib.sha256(repr((candidates, label)).encode()).digest()
            digest = int.from_bytes(digest[:8], "little")
            result.append(Example(ids, types, label, digest, any(is_cut)))
    return result


def batches(examples, batch_size, seed=None):
    """The indices of every batch of one epoch; each example is in exactly one of them. Batches hold
    examples of similar length, so that little is padding: a random order is sorted by length within
    windows of 50 batches, or of a quarter of all batches if that is less, so that even in a small
    task an example has other neighbours in every epoch; then the batches are shuffled. seed: an
    integer, or several. Without one (evaluation) everything is sorted, longest first."""
    lengths = np.array([max(map(len, example.input_ids)) for example in examples])
    if seed is None:
        order = np.argsort(-lengths, kind="stable")
        return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(lengths))
    batches_in_window = max(1, min(50, len(lengths) // batch_size // 4))
    window = batches_in_window * batch_size
    result = []
    for start in range(0, len(order), window):
        near = order[start : start + window]
        near = near[np.argsort(lengths[near], kind="stable")]
        result += [near[i : i + batch_size] for i in range(0, len(near), batch_size)]
    return [result[i] for i in rng.permutation(len(result))]


def collate(examples, pad_token_id):
    """B examples -> LongTensors input_ids, token_type_ids, attention_mask [B·C, T], an example's
    candidates one after another, T the length of the longest; and, if the examples have any, labels
    [B]: class indices, or floats; [B, n] if each is a tuple of n."""
    ids = [torch.from_numpy(x).long() for example in examples for x in example.input_ids]
    types = [torch.from_numpy(x).long() for example in examples for x in example.token_type_ids]
    batch = {"input_ids": pad_sequence(ids, True, pad_token_id)}
    batch["token_type_ids"] = pad_sequence(types, True)  # True: [B·C, T], not [T, B·C]
    batch["attention_mask"] = pad_sequence([torch.ones_like(x) for x in ids], True)
    if examples[0].label is not None:
        batch["labels"] = torch.tensor([example.label for example in examples])
    return batch
