"""D: the paper's 16 tasks (section 4.2), your own task, and batches.

Every example becomes C candidates, pairs (text_a, text_b or None), and a label. Classification has
one candidate per example and a K-way head; multiple choice has one candidate per choice, and a
softmax over their scores.

    source = Source(data_dir)                               # of formats.rows
    task = get_task("rte", source)                          # or your own, see `own_task`
    tokenizer = load_tokenizer(directory, max_length=128)   # of formats.tokenizer
    train_set = load_split(task, source, "train", tokenizer)
    for indices in batches(train_set, batch_size=32, seed=0):
        batch = collate([train_set[i] for i in indices], pad_token_id=0)"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from formats.adapterhub import check_name
from formats.files import error_prefix, note
from formats.rows import OWN_COLUMNS, is_empty, no_surrogates, own_labels
from runtime.scores import CLASS_SCORES, accuracy


@dataclass
class Task:
    """One task: what its data look like, and how a row becomes candidates."""

    hub: tuple | None  # repository, configuration, revision on the hub; None: it is not there
    columns: list  # text columns, in the order in which `candidates` takes them
    # Class names in the order of their indices, as the hub writes them; one alone makes a
    # regression, with `loss`, `predict` and `all_scores` of its own (examples/sts_b.py).
    labels: list
    candidates: Callable = lambda *texts: [(texts[0], texts[1] if len(texts) > 1 else None)]
    label: str = "label"  # the column of the label
    max_length: int = 128  # in tokens; longer pairs are cut
    is_multiple_choice: bool = False  # the labels then name the choices
    loss: Callable = F.cross_entropy  # of logits [B, K] and labels [B], the mean of the batch
    predict: Callable = lambda logits: logits.argmax(-1)  # logits [B, K] -> [B]
    all_scores: dict = field(default_factory=lambda: CLASS_SCORES)
    hub_dev: str = "validation"  # the hub's name of the development set
    dev_from_train: int = 0  # the development set is this many training examples
    column_aliases: dict = field(default_factory=dict)  # {our name: that in other copies}
    label_aliases: dict = field(default_factory=dict)
    name: str = ""  # `get_task` fills it in

    def __post_init__(self):
        self.indices = {label.strip().lower(): i for i, label in enumerate(self.labels)}

    @property
    def scores(self):
        """{name: function of labels and predictions}; larger is better, and the first one chooses
        the best epoch. "f1" is that of the positive class, the second of two."""
        return {n: s for n, s in self.all_scores.items() if n != "f1" or len(self.labels) == 2}

    def collect(self, logits, batch):
        """What evaluation keeps of a batch: (labels, predictions)."""
        return batch["labels"], self.predict(logits)

    def example(self, row):
        """A row -> (candidates, index of its label). Raises ValueError, naming the column."""
        if is_empty(row[self.label]):
            raise ValueError("the label is empty")
        return self.candidates_of(row), self.label_index(row[self.label])

    def with_our_names(self, row, column_names, needed=()):
        """A row under our names of its columns, {our name: that in the row}, all replaced at the
        same time: two can change places. Raises ValueError for a row without one of `needed`."""
        ours = {our: row[their] for our, their in column_names.items() if their in row}
        renamed = {*column_names, *column_names.values()}
        found = {name: value for name, value in row.items() if name not in renamed} | ours
        for column, other in self.column_aliases.items():
            if found.get(column) is None and other in found:
                found[column] = found[other]
        if absent := [column_names.get(name, name) for name in needed if name not in found]:
            raise ValueError(f"no column {absent[0]!r}; it has {', '.join(row) or 'none':.200}")
        return found

    def candidates_of(self, row):
        """[(text_a, text_b or None)] of a row with our names."""
        is_own = {*self.columns} <= {*OWN_COLUMNS}
        for column in OWN_COLUMNS if is_own else ():  # one that training lacks would go unread
            if column not in self.columns and not is_empty(row.get(column)):
                raise ValueError(f"column {column!r} is none of {', '.join(self.columns)}")
        candidates = self.candidates(*(self.text(row[column], column) for column in self.columns))
        if self.is_multiple_choice and len(candidates) != len(self.labels):
            raise ValueError(f"{len(candidates)} choices, expected {len(self.labels)}")
        return [(no_surrogates(a), b if b is None else no_surrogates(b)) for a, b in candidates]

    def text(self, value, column):
        """The text in a column; `endings` and `choices` hold a list of texts, or on the hub a
        dictionary with one. A number is a text, and an empty cell an empty one."""
        if column in ("endings", "choices"):
            texts = value["text"] if self.hub and isinstance(value, dict) else value
            if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                raise ValueError(f"column {column!r} does not hold a list of texts")
            return value  # for `question_choices` the whole dictionary
        if type(value) not in (str, int, float) and not is_empty(value):
            raise ValueError(f"column {column!r} holds {type(value).__name__}, expected a text")
        return "" if is_empty(value) else str(value)

    def label_index(self, value):
        """The index of a label as the data write it; for a regression, the number."""
        text = no_surrogates(str(value)).strip()
        text = self.label_aliases.get(text, text)
        if len(self.labels) == 1:
            return float(text)
        if text.lower() in self.indices:
            return self.indices[text.lower()]
        # the hub's integers; labels made of digits are names, not indices
        if self.hub and not self.labels[0].isdigit() and text in map(str, range(len(self.labels))):
            names = ", ".join(f"{i} = {label}" for i, label in enumerate(self.labels))
            note(f"{self.name}: integers are read as {names}")
            return int(text)
        if text == "-1":
            raise ValueError("the label is hidden (-1): experiments.predict takes such rows")
        raise ValueError(f"label {value!r:.100} is not one of {', '.join(self.labels):.200}")


# How the texts of a row become candidates, as in AdapterHub's own training code
# (adapter-hub/efficient-task-transfer, itrain/datasets)


def fill_blank(sentence, *options):
    return [(sentence.replace("_", option), None) for option in options]


def answers(context, question, *options):
    return [(context, f"{question} {option}") for option in options]


def with_endings(ctx_a, ctx_b, options):
    return [(ctx_a, f"{ctx_b} {option}") for option in options]


def question_choices(question, choices):
    """choices["label"] says which of choices["text"] is answer A, which is B, and so on."""
    if isinstance(choices, list):
        choices = {"text": choices}
    by_key = dict(zip(choices.get("label") or "ABCDE", choices["text"], strict=True))
    return [(question, by_key[key]) for key in sorted(by_key)]


def own_choices(*texts):
    """([text_a,] choices) -> candidates"""
    return [(texts[0], choice) if len(texts) == 2 else (choice, None) for choice in texts[-1]]


NLI = "entailment neutral contradiction".split()
UKP = "NoArgument Argument_against Argument_for".split()
SCITAIL = {"premise": "sentence1", "hypothesis": "sentence2", "label": "gold_label"}
# The number of a choice is no class, so F1 would mean nothing.
CHOICE = {"is_multiple_choice": True, "all_scores": {"accuracy": accuracy}}

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
                       fill_blank, "answer", **CHOICE),
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
                    "entails neutral".split(), column_aliases=SCITAIL,
                    label_aliases={"entailment": "entails"}),
    "argument": Task(None, "topic sentence".split(), UKP, label="annotation"),
    "commonsense_qa": Task(("tau/commonsense_qa", None, None), "question choices".split(),
                           "A B C D E".split(), question_choices, "answerKey", **CHOICE),
    "boolq": Task(("aps/super_glue", "boolq", None), "passage question".split(),
                  "False True".split(), max_length=384, column_aliases={"label": "answer"}),
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


def get_task(name, source):
    """The paper's task of that name, or your own: any other name, with data in the `source`. Raises
    ValueError for an unknown task, FileNotFoundError for a missing directory or file."""
    check_name(name)  # its adapter has the same
    directory = source.data_dir
    if directory is not None and not Path(directory).is_dir():
        raise FileNotFoundError(f"--data-dir {directory} is not a directory")
    is_there = directory and Path(directory, name).is_dir()
    if name in TASKS:
        task = replace(TASKS[name], name=name)
    elif source.files or is_there:
        task = own_task(name, source)
    else:
        place = f"{directory or 'DIR'}/{name}/train.jsonl"
        needed = f"your own needs --train-file FILE, or --data-dir DIR with {place}"
        raise ValueError(f"unknown task {name!r}: there are {', '.join(TASKS)}; {needed}")
    if unknown := source.column_names.keys() - {*task.columns, task.label}:
        known = ", ".join([*task.columns, task.label])
        raise ValueError(f"--columns {min(unknown)}=...: the task, or its files, have only {known}")
    return task


def own_task(name, source):
    """Your own task is what its training file has: `text_a`, `text_b` (optional) and `label`
    (strings or integers, whose sorted values are the classes); or `choices` (a list of texts, as
    many in every row), `label` (the index of the right one, from 0) and optionally `text_a`."""
    task = Task(None, [], [], name=name)
    where, theirs = source.read_all(task, "train")
    rows = [task.with_our_names(row, source.column_names) for row in theirs]
    columns = [n for n in OWN_COLUMNS if any(not is_empty(row.get(n)) for row in rows)]
    with error_prefix(where):
        if "label" not in rows[0] or not columns:
            missing = "text_a" if "label" in rows[0] else "label"
            wanted = source.column_names.get(missing, missing)
            problem = f"no column {wanted!r}, or it is empty; it has {', '.join(theirs[0]):.200}"
            raise ValueError(f"{problem}: --columns {missing}=NAME says which one it is")
        if "choices" not in columns:
            return with_columns(name, columns, own_labels(rows))
        if "text_b" in columns:
            raise ValueError("column 'text_b' has no place beside 'choices'")
        choices = rows[0].get("choices")
        if not isinstance(choices, list) or len(choices) < 2:
            raise ValueError("'choices' must be a list of at least two texts")
        return with_columns(name, columns, [str(i) for i in range(len(choices))])


def with_columns(name, columns, labels):
    """Your own task with these columns and labels."""
    more = {"candidates": own_choices, **CHOICE} if "choices" in columns else {}
    return Task(None, columns, labels, name=name, **more)


class Example(NamedTuple):
    input_ids: list  # of C candidates, int32 [T] each
    token_type_ids: list
    label: int | float
    hash: int  # of the texts and the label: was this example seen before? (runtime/record.py)
    is_cut: bool  # whether a text was longer than --max-length


def load_split(task, source, split, tokenizer, limit=None, seed=0):
    """[Example] of a split, tokenised. "train" and "validation" are parts of the training file with
    --dev-fraction. limit: keep so many examples, drawn with `seed`. Raises FileNotFoundError if the
    data are not there, ValueError naming the file and the row for one that does not fit."""
    where, rows = source.read_split(task, split)  # {number of a row: row}
    numbers, examples, empty = [*rows], [], 0
    if limit is not None and limit < len(rows):
        numbers = np.array(numbers)[np.random.default_rng(seed).permutation(len(rows))[:limit]]
    needed = [*task.columns, task.label]
    for number in numbers:
        with error_prefix(f"{where}, row {number}"):
            row = task.with_our_names(rows[number], source.column_names, needed)
            examples.append(task.example(row))
            empty += sum(is_empty(row[column]) for column in task.columns)
    if empty:
        note(f"{where}, {split}: empty cells are read as empty texts, {empty} of them")
    unseen = {*range(len(task.labels))} - {label for _, label in examples}
    if unseen and len(task.labels) > 1 and not task.is_multiple_choice:
        unseen = [repr(task.labels[i]) for i in sorted(unseen)]
        note(f"{task.name}: no example of its {split} split is {' or '.join(unseen):.300}")
    return encode(tokenizer, examples, f"tokenizing {task.name} {split}")


def encode(tokenizer, examples, title):
    """[(candidates, label)] -> [Example]. The tokenizer takes all cores."""
    result = []
    for start in tqdm(range(0, len(examples), 1000), title, leave=False, disable=None):
        chunk = examples[start : start + 1000]
        pairs = [pair for candidates, _ in chunk for pair in candidates]
        encodings = iter(tokenizer.encode_batch([a if b is None else (a, b) for a, b in pairs]))
        for candidates, label in chunk:
            found = [next(encodings) for _ in candidates]
            digest = hashlib.sha256(repr((candidates, label)).encode()).digest()
            ids = [np.array(encoding.ids, np.int32) for encoding in found]
            types = [np.array(encoding.type_ids, np.int32) for encoding in found]
            is_cut = any(encoding.overflowing for encoding in found)
            result.append(Example(ids, types, label, int.from_bytes(digest[:8], "little"), is_cut))
    return result


def batches(examples, batch_size, seed=None):
    """The indices of every batch of one epoch; each example is in exactly one of them. Batches hold
    examples of similar length, so that little is padding: a random order is sorted by length within
    windows of 50 batches, and the batches are shuffled. Below 200 batches a window is a quarter of
    them, so that in a small task, too, an example has other neighbours in every epoch. seed: an
    integer, or several. Without one (evaluation) everything is sorted, longest first."""
    lengths = np.array([max(map(len, example.input_ids)) for example in examples])
    if seed is None:
        order = np.argsort(-lengths, kind="stable")
        return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(lengths))
    window = batch_size * max(1, min(50, len(lengths) // (4 * batch_size)))
    result = []
    for start in range(0, len(order), window):
        near = order[start : start + window]
        near = near[np.argsort(lengths[near], kind="stable")]
        result += [near[i : i + batch_size] for i in range(0, len(near), batch_size)]
    return [result[i] for i in rng.permutation(len(result))]


def collate(examples, pad_token_id, multiple=1, max_length=math.inf):
    """B examples -> LongTensors input_ids, token_type_ids, attention_mask [B·C, T], an example's
    candidates one after another; and labels [B], class indices, or the floats of a regression. T is
    that of the longest, rounded up to a multiple, but to max_length at most."""
    ids = [ids for example in examples for ids in example.input_ids]
    types = [types for example in examples for types in example.token_type_ids]
    T = max(map(len, ids))
    T = max(T, min(math.ceil(T / multiple) * multiple, max_length))
    input_ids = torch.full((len(ids), T), pad_token_id)
    token_type_ids, attention_mask = torch.zeros_like(input_ids), torch.zeros_like(input_ids)
    for i, length in enumerate(map(len, ids)):
        input_ids[i, :length] = torch.from_numpy(ids[i])
        token_type_ids[i, :length] = torch.from_numpy(types[i])
        attention_mask[i, :length] = 1
    return {
        "input_ids": input_ids,
        "token_type_ids": token_type_ids,
        "attention_mask": attention_mask,
        "labels": torch.tensor([example.label for example in examples]),
    }
