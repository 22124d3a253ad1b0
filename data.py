"""D: the paper's 16 tasks (section 4.2), your own task, and batches.

Every example becomes C candidates, pairs (text_a, text_b or None), and a label. Classification has
one candidate per example and a K-way head; multiple choice has one candidate per choice, and a
softmax over their scores.

    task = get_task("rte", data_dir)                        # or your own, see `own_task`
    tokenizer = load_tokenizer(directory, max_length=128)   # of formats.tokenizer
    train_set = load_split(task, "train", tokenizer)
    for indices in batches(train_set, batch_size=32, seed=0):
        batch = collate([train_set[i] for i in indices], pad_token_id=0)
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from formats.files import error_prefix, note
from formats.rows import check_column_names, dev_size, hold_out, own_labels, read_split
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
    column_aliases: dict = field(default_factory=dict)  # {name in other copies: ours}
    label_aliases: dict = field(default_factory=dict)
    # What the command says; `get_task` fills these in.
    name: str = ""
    data_dir: str | None = None
    files: dict = field(default_factory=dict)  # {split: path}: --train-file, --dev-file
    column_names: dict = field(default_factory=dict)  # --columns: {our name: the files'}
    dev_fraction: float | None = None

    @property
    def scores(self):
        """{name: function of labels and predictions}; larger is better, and the first one chooses
        the best epoch. "f1" is that of the positive class, the second of two."""
        has_positive = len(self.labels) == 2
        return {n: score for n, score in self.all_scores.items() if n != "f1" or has_positive}

    def example(self, row):
        """A row -> (candidates, index of its label). Raises ValueError, naming the column."""
        row = self.with_our_names(row)
        if row.get(self.label) is None:
            raise ValueError(self.missing(self.label, row))
        return self.candidates_of(row), self.label_index(row[self.label])

    def with_our_names(self, row):
        """A row under our names of its columns. All names are replaced at the same time, so that
        two columns can change places."""
        ours = {our: row[their] for our, their in self.column_names.items() if their in row}
        renamed = {*self.column_names, *self.column_names.values()}
        row = {name: value for name, value in row.items() if name not in renamed} | ours
        for other, column in self.column_aliases.items():
            if row.get(column) is None and other in row:
                row[column] = row[other]
        return row

    def candidates_of(self, row):
        """[(text_a, text_b or None)] of a row with our names."""
        # text_b in the development file of a task whose training file has none would go unread.
        is_own = {*self.columns} <= {*OWN_COLUMNS}
        for column in OWN_COLUMNS:
            if is_own and row.get(column) is not None and column not in self.columns:
                known = ", ".join(self.columns)
                raise ValueError(f"column {column!r} is none of the task's, which are {known}")
        candidates = self.candidates(*(self.text(row, column) for column in self.columns))
        if self.is_multiple_choice and len(candidates) != len(self.labels):
            raise ValueError(f"{len(candidates)} choices, expected {len(self.labels)}")
        return candidates

    def text(self, row, column):
        """The text in a column; `endings` and `choices` hold a list of texts, or on the hub a
        dictionary with one. A number is a text."""
        value = row.get(column)
        if value is None or value != value:  # NaN
            raise ValueError(self.missing(column, row))
        if column in ("endings", "choices"):
            texts = value["text"] if self.hub and isinstance(value, dict) else value
            if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                raise ValueError(f"column {column!r} does not hold a list of texts")
            return value  # for `question_choices` the whole dictionary
        if type(value) not in (str, int, float):
            raise ValueError(f"column {column!r} holds {type(value).__name__}, expected a text")
        return str(value)

    def missing(self, column, row):
        """Why a column cannot be read, with the columns as the file calls them."""
        if column in row:
            return f"column {column!r} is empty"
        theirs = ", ".join(self.column_names.get(name, name) for name in row) or "none"
        return f"no column {self.column_names.get(column, column)!r}; it has {theirs:.200}"

    def label_index(self, value):
        """The index of a label as the data write it; for a regression, the number."""
        text = self.label_aliases.get(str(value).strip(), str(value).strip())
        lower = [label.strip().lower() for label in self.labels]
        if len(self.labels) == 1:
            return float(text)
        if text.lower() in lower:
            return lower.index(text.lower())
        # the hub's integers; labels made of digits are names, not indices
        if self.hub and not self.labels[0].isdigit() and text in map(str, range(len(lower))):
            if self.files or self.data_dir:
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
SCITAIL = {"sentence1": "premise", "sentence2": "hypothesis", "gold_label": "label"}
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
                  "False True".split(), max_length=384, column_aliases={"answer": "label"}),
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
OWN_COLUMNS = ("text_a", "text_b", "choices")


def get_task(name, data_dir=None, column_names=None, files=None, dev_fraction=None):
    """The paper's task of that name, or your own: any other name, with data in `data_dir`/NAME, or
    in `files`, {"train": path, "validation": path}. column_names: {our name of a column: the
    files'}; dev_fraction: share of the training examples that is held out for development. Raises
    ValueError for an unknown task, FileNotFoundError for a missing directory or file."""
    if data_dir is not None and not Path(data_dir).is_dir():
        raise FileNotFoundError(f"--data-dir {data_dir} is not a directory")
    command = {"name": name, "data_dir": data_dir, "files": files or {}}
    command |= {"column_names": column_names or {}, "dev_fraction": dev_fraction}
    if name in TASKS:
        return replace(TASKS[name], **command)
    is_there = data_dir and Path(name).name == name and Path(data_dir, name).is_dir()
    if not files and not is_there:
        place = f"{data_dir or 'DIR'}/{name}/train.jsonl"
        needed = f"your own needs --train-file FILE, or --data-dir DIR with {place}"
        raise ValueError(f"unknown task {name!r}: there are {', '.join(TASKS)}; {needed}")
    return own_task(replace(Task(None, [], []), **command))


def own_task(task):
    """Your own task is what its training file has: `text_a`, `text_b` (optional) and `label`
    (strings or integers, whose sorted values are the classes); or `choices` (a list of texts, as
    many in every row), `label` (the index of the right one, from 0) and optionally `text_a`."""
    where, rows = read_split(task, "train")
    check_column_names(task, (*OWN_COLUMNS, "label"), where, rows[0])
    rows = [task.with_our_names(row) for row in rows]
    columns = [name for name in OWN_COLUMNS if any(row.get(name) is not None for row in rows)]
    with error_prefix(where):
        if "label" not in rows[0]:
            advice = "--columns label=NAME says which one it is"
            raise ValueError(f"{task.missing('label', rows[0])}: {advice}")
        if "choices" in columns:
            if "text_b" in columns:
                raise ValueError("column 'text_b' has no place beside 'choices'")
            choices = rows[0].get("choices")
            if not isinstance(choices, list) or len(choices) < 2:
                raise ValueError("'choices' must be a list of at least two texts")
            labels = map(str, range(len(choices)))
        else:
            labels = own_labels(rows)
    return with_columns(task, columns or ["text_a"], labels)  # a row will be said to lack text_a


def with_columns(task, columns, labels):
    """The task with these columns and labels."""
    more = {"candidates": own_choices, **CHOICE} if "choices" in columns else {}
    return replace(task, columns=list(columns), labels=list(labels), **more)


class Example(NamedTuple):
    input_ids: list  # of C candidates, int32 [T] each
    token_type_ids: list
    label: int | float
    hash: int  # of the texts and the label: was this example seen before? (runtime/record.py)
    is_cut: bool  # whether a text was longer than --max-length


def load_split(task, split, tokenizer, limit=None, seed=0):
    """[Example] of a split, tokenised. "train" and "validation" are parts of the training file with
    --dev-fraction. limit: keep so many examples, drawn with `seed`. Raises FileNotFoundError if the
    data are not there, ValueError naming the file and the row for one that does not fit."""
    where, rows = read_split(task, split)
    check_column_names(task, (*task.columns, task.label), where, rows[0])
    chosen = range(len(rows))
    if (size := dev_size(task)) and split in ("train", "validation"):
        train_indices, dev_indices = hold_out(len(rows), size)
        chosen = dev_indices if split == "validation" else train_indices
    if limit is not None and limit < len(chosen):
        chosen = np.asarray(chosen)[np.random.default_rng(seed).permutation(len(chosen))[:limit]]
    examples = []
    for i in chosen:
        with error_prefix(f"{where}, row {i + 1}"):
            examples.append(task.example(rows[i]))
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
            number = int.from_bytes(digest[:8], "little")
            result.append(Example(ids, types, label, number, is_cut))
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


def collate(examples, pad_token_id):
    """B examples -> LongTensors input_ids, token_type_ids, attention_mask [B·C, T], an example's
    candidates one after another; and labels [B], class indices, or the floats of a regression"""
    ids = [ids for example in examples for ids in example.input_ids]
    types = [types for example in examples for types in example.token_type_ids]
    T = max(map(len, ids))
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
