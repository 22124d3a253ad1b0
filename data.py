"""D: the paper's 16 tasks (section 4.2), your own task, and batches.

A task reduces to C candidate pairs (text_a, text_b or None) and a label. Classification has one
candidate per example and a K-way head; multiple choice has one candidate per choice, and a softmax
over their scores.

    task = get_task("rte", data_dir)                        # or your own, see `own_task`
    tokenizer = load_tokenizer(directory, max_length=128)   # of formats.tokenizer
    train = load_split(task, "train", tokenizer, data_dir)  # tokenised, cached by `datasets`
    for batch in batches(train, batch_size=32, seed=0): ...

    python data.py TASK [--data-dir DIR] [--model SOURCE]   # what the model will see
"""

if __name__ == "__main__":
    from runtime.command import announce

    announce("data.py")

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from formats import task_rows
from formats.hub_data import HUB
from formats.rows import check_row, check_size, map_cached, naming_line, read_file, read_split
from runtime.command import run_command
from runtime.scores import CLASS_SCORES, accuracy


class Classification:
    """A kind of task: one of K labels for each example. Its functions are not bound to a task."""

    dtype = torch.long  # of labels and predictions
    scores = CLASS_SCORES  # the first one chooses the best epoch, unless --score does

    def head(labels):
        """AdapterHub's fields of the prediction head"""
        return {"head_type": "classification", "num_labels": len(labels)}

    def loss(logits, labels):
        """logits [B, K], labels [B] -> a scalar, the mean"""
        return F.cross_entropy(logits, labels)

    def predict(logits):
        """logits [B, K] -> [B]"""
        return logits.argmax(-1)

    def label(task, value):
        """A label as the data writes it -> its index in task.labels. Raises ValueError that shows
        the value."""
        from_hub = task.source is not None
        return task_rows.label_index(value, task.labels, task.label_ids, task.aliases, from_hub)


class MultipleChoice(Classification):
    """Multiple choice: a label is a candidate's place; each candidate is scored by itself."""

    scores = {"accuracy": accuracy}  # the first and the second choice are no classes

    def head(labels):
        return {"head_type": "multiple_choice", "num_choices": len(labels)}


@dataclass(frozen=True)
class Task:
    """One row of TASKS. Labels are in a fixed order of ours: a file's own feature names are never
    used."""

    source: str | None  # hub repository; None: no copy on the hub
    config: str | None  # its configuration
    columns: tuple  # text columns in the order in which `candidates` takes them
    labels: tuple  # label values as the hub writes them; an integer is an index into them
    sizes: tuple  # rows of train and development set; (): any number
    candidates: Callable = lambda *texts: [(texts[0], texts[1] if len(texts) > 1 else None)]
    label: str = "label"  # its column
    # At 128 tokens, as in the reference, longer texts are cut: of the examples at hand 12 % of
    # rte's and cb's, 19 % of cosmos_qa's, 47 % of boolq's, 90 % of imdb's. So these have more, by
    # which 0.4 % of cb's are cut, 0.7 % of boolq's, 25 % of imdb's, none of rte's and cosmos_qa's.
    # At 128, 0.4 % of mnli's are, under 0.1 % of the others'. hellaswag's 200 is AdapterHub's.
    max_length: int = 128
    dev: str = "validation"  # the split that serves as development set
    held_out: int = 0  # training examples that do, where there is no other than the test set
    hub_sizes: tuple = ()  # rows of the hub's copy, if they are others
    aliases: dict = field(default_factory=dict)  # other names of columns and labels in other copies
    revision: str | None = None
    column_names: dict = field(
        default_factory=dict
    )  # --columns: {our name of a column: the file's}
    kind: type = Classification
    name: str = ""

    @property
    def choices(self):
        """Whether it is multiple choice."""
        return issubclass(self.kind, MultipleChoice)

    @property
    def scores(self):
        """{name: function(labels, predictions)} of its kind, the F1 of one class only for two."""
        two = len(self.labels) == 2
        return {name: score for name, score in self.kind.scores.items() if two or name != "f1"}

    @cached_property
    def label_ids(self):
        """{label, as it is and in small letters: its index}"""
        return task_rows.make_label_ids(self.labels)


def fill_blank(sentence, *options):
    return [(sentence.replace("_", option), None) for option in options]


def answers(context, question, *options):
    return [(context, f"{question} {option}") for option in options]


def endings(ctx_a, ctx_b, options):
    return [(ctx_a, f"{ctx_b} {option}") for option in options]


def question_choices(question, choices):
    return [(question, choice) for choice in choices["text"]]


def own_choices(*texts):
    """([text_a,] choices) -> candidates"""
    return [(texts[0], choice) if len(texts) == 2 else (choice, None) for choice in texts[-1]]


# Section 4.2, in the order of Table 1; inputs as AdapterHub's own training code builds them
# (adapter-hub/efficient-task-transfer, itrain/datasets).
TASKS = {
    "mnli": Task(**HUB["mnli"]),
    "qqp": Task(**HUB["qqp"]),
    "sst2": Task(**HUB["sst2"]),
    "winogrande": Task(**HUB["winogrande"], candidates=fill_blank, kind=MultipleChoice),
    "imdb": Task(**HUB["imdb"], max_length=384),
    "hellaswag": Task(**HUB["hellaswag"], candidates=endings, kind=MultipleChoice, max_length=200),
    "social_i_qa": Task(**HUB["social_i_qa"], candidates=answers, kind=MultipleChoice),
    "cosmos_qa": Task(**HUB["cosmos_qa"], candidates=answers, kind=MultipleChoice, max_length=256),
    "scitail": Task(**HUB["scitail"]),
    "argument": Task(**HUB["argument"]),
    "commonsense_qa": Task(
        **HUB["commonsense_qa"], candidates=question_choices, kind=MultipleChoice
    ),
    "boolq": Task(**HUB["boolq"], max_length=384),
    "mrpc": Task(**HUB["mrpc"]),
    "sick": Task(**HUB["sick"]),
    "rte": Task(**HUB["rte"], max_length=290),
    "cb": Task(**HUB["cb"], max_length=256),
}


def get_task(name, data_dir=None, labels=None, split="train", columns=None):
    """
    The paper's task of that name, or your own: any other name, with data in `data_dir`/NAME.

    labels: those of an earlier run of your own task; otherwise they are read from the file of
    `split`. columns: {column: its name in the files}. Raises ValueError for an unknown task,
    FileNotFoundError for a missing directory.
    """
    if data_dir is not None and not Path(data_dir).is_dir():
        raise FileNotFoundError(f"--data-dir {data_dir} is not a directory")
    if name in TASKS:
        return replace(TASKS[name], name=name, column_names=columns or {})
    task_rows.check_own_task(name, data_dir, TASKS)
    return replace(own_task(name, data_dir, labels, split, columns), column_names=columns or {})


def own_task(name, data_dir, labels, split, columns):
    """
    Your own task. Columns `text_a`, `text_b` (optional) and `label` (strings or integers, their
    sorted values are the classes), or `choices` (a list of texts, the same number in every row),
    `label` (the index of the right one, from 0) and optionally `text_a`.
    """
    path, rows = read_file(Path(data_dir) / name, name, split)
    columns, labels, choices = task_rows.own_columns(path, rows, columns, labels)
    if choices:
        return Task(None, None, columns, labels, (), own_choices, kind=MultipleChoice, name=name)
    return Task(None, None, columns, labels, (), name=name)


def to_candidates(task, row):
    """One row -> (candidates, label). Raises ValueError for a missing value or an unknown label."""
    texts = check_row(row, task.columns, task.label)
    with task_rows.naming_columns(task.columns):
        candidates = [(a, b) for a, b in task.candidates(*texts)]
    task_rows.check_candidates(candidates, len(task.labels) if task.choices else None)
    return candidates, task.kind.label(task, row[task.label])


def load_split(
    task, split, tokenizer, data_dir=None, limit=None, seed=0, strict=False, dev_fraction=None
):
    """
    One split, tokenised: a datasets.Dataset with `input_ids` and `token_type_ids` (for every
    candidate a list of ids), `label`, and `length` (tokens of the longest candidate). The revision
    that was loaded is in `info.description`. Tokenising runs on all cores and is cached.

    limit: keep that many examples, drawn with `seed`. dev_fraction: the part of the training file
    that is the validation split, where there is no file of it. strict: a row count unlike the
    task's is an error, not a warning. Raises FileNotFoundError without the data, ValueError naming
    file and line for a row that does not fit.
    """
    where, rows, order, revision = read_split(task, split, data_dir, dev_fraction)
    rows = task_rows.select(task, where, rows)
    if dev_fraction is None:
        check_size(where, len(rows), task, split, strict)
    if limit is not None and limit < len(rows):
        some = np.random.default_rng(seed).permutation(len(rows))[:limit]
        rows, order = rows.select(some), order[some]

    def tokenize(columns, indices):
        found = []
        for i, *values in zip(indices, *columns.values(), strict=True):
            with naming_line(where, order[i]):
                found.append(to_candidates(task, dict(zip(columns, values, strict=True))))
        return task_rows.encode(tokenizer, found)

    # what the tokens depend on beside the rows: the cache of `datasets` is keyed by it
    code = task_rows.source_code(load_split, task.candidates, task.kind)
    key = [tokenizer.to_str(), task.name, task.labels, code]
    floats = task.kind.dtype.is_floating_point
    result = map_cached(rows, tokenize, key, floats, f"tokenizing {task.name} {split}")
    result.info.description = revision or ""
    return result


def length_bucketed_batches(lengths, batch_size, seed=None, window=50):
    """
    Indices of every batch of one epoch. Batches hold examples of similar length, so that little is
    padding: a random order is sorted by length within windows of 50 batches, and the batches are
    shuffled. Without a seed (evaluation) everything is sorted, longest first. Every index occurs
    exactly once.
    """
    if seed is None:
        order = np.argsort(-lengths, kind="stable")
        return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(lengths))
    result = []
    for start in range(0, len(order), window * batch_size):
        part = order[start : start + window * batch_size]
        part = part[np.argsort(lengths[part], kind="stable")]
        result += [part[i : i + batch_size] for i in range(0, len(part), batch_size)]
    return [result[i] for i in rng.permutation(len(result))]


def collate(rows, pad_token_id):
    """rows: {"input_ids": B lists of C lists, ...} -> LongTensors input_ids, token_type_ids,
    attention_mask [B·C, T], an example's candidates one after another, and labels [B]"""
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


def split_by_length(batch):
    """
    What the encoder sees of a batch: (rows, [input_ids, token_type_ids, attention_mask]) with C
    groups of B candidates.

    The candidates of one multiple-choice example differ in length, so they are grouped by length
    and each group is cut to its longest. `rows` [B] are the places of its candidates in the batch.
    Classification has one group, the batch itself.
    """
    C = len(batch["input_ids"]) // len(batch["labels"])
    lengths = batch["attention_mask"].sum(1)
    order = lengths.argsort(stable=True) if C > 1 else torch.arange(len(lengths))
    names = "input_ids", "token_type_ids", "attention_mask"
    for rows in order.chunk(C):
        T = lengths[rows].max()
        yield rows, [batch[name][rows, :T] for name in names]


def batches(split, batch_size, pad_token_id=0, seed=None, rank=0, world=1):
    """The batches of one epoch over a split from `load_split`, as `collate` makes them; of each,
    the share of one of `world` processes."""
    lengths = split.with_format("numpy")["length"][:]
    for indices in length_bucketed_batches(lengths, batch_size, seed):
        if len(mine := indices[rank::world]) > 0:
            yield collate(split[mine.tolist()], pad_token_id)


def main(argv=None):
    from experiments.inspect import inspect_task

    return inspect_task(argv)


if __name__ == "__main__":
    run_command("data.py", main)
