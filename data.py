"""D: the paper's 16 tasks (section 4.2), your own task, and batches.

A task reduces to C candidate pairs (text_a, text_b or None) and a label. Classification has one
candidate per example and a K-way head; multiple choice has one candidate per choice, and a softmax
over their scores.

    task = get_task("rte", data_dir)                        # or your own, see `own_task`
    tokenizer = load_tokenizer(directory, max_length=128)   # of formats.tokenizer
    train = load_split(task, "train", tokenizer, data_dir)  # tokenised once, then cached
    for batch in batches(train, batch_size=32, seed=0): ...

    python data.py TASK [--data-dir DIR] [--model SOURCE]   # what the model will see
"""

if __name__ == "__main__":
    from runtime.command import announce

    announce("data.py")

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from formats import task_rows
from formats.files import error_prefix
from formats.rows import cached, check_size, find_file, find_split, hold_out, read_rows, set_origin
from runtime.command import run_command
from runtime.scores import CLASS_SCORES, accuracy


class Classification:
    """A type of task: one of K labels for each example."""

    dtype = torch.long  # of labels and predictions
    scores = CLASS_SCORES  # the first one chooses the best epoch, unless --score does

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
        """A label as the data writes it -> its index in task.labels. Raises ValueError that shows
        the value."""
        from_hub = task.source is not None
        return task_rows.label_index(value, task.labels, task.label_ids, task.aliases, from_hub)


class MultipleChoice(Classification):
    """The label is the number of the right candidate; each candidate is scored by itself."""

    scores = {"accuracy": accuracy}  # "the first choice" is not a class that could have an F1

    @staticmethod
    def head(labels):
        return {"head_type": "multiple_choice", "num_choices": len(labels)}


@dataclass(frozen=True)
class Task:
    """One task: what its data look like, and how a row becomes candidates."""

    source: str | None  # hub repository; None: not on the hub
    config: str | None  # its configuration
    columns: tuple  # text columns, in the order in which `candidates` takes them
    labels: tuple  # as the hub writes them, in our order; an integer is an index into them
    sizes: tuple  # rows of training and development set; (): any number
    candidates: Callable = lambda *texts: [(texts[0], texts[1] if len(texts) > 1 else None)]
    label: str = "label"  # the column of the label
    max_length: int = 128  # in tokens; longer pairs are cut
    dev: str = "validation"  # the hub's name of the development set
    held_out: int = 0  # the development set is this many training examples
    hub_sizes: tuple = ()  # rows of the hub's copy, if they differ from the paper's
    aliases: dict = field(default_factory=dict)  # other copies' names of columns and labels -> ours
    revision: str | None = None  # of the hub repository
    column_names: dict = field(default_factory=dict)  # --columns: {our name: the file's}
    kind: type = Classification
    name: str = ""
    files: dict = field(default_factory=dict)  # {split: path}, of your own in place of a directory
    absent: tuple = ()  # columns that a row must not fill, because the model would not see them

    @property
    def choices(self):
        """Whether it is multiple choice."""
        return issubclass(self.kind, MultipleChoice)

    @property
    def scores(self):
        """{name: function(labels, predictions)} of its type; F1 of one class only if there are
        two."""
        two = len(self.labels) == 2
        return {name: score for name, score in self.kind.scores.items() if two or name != "f1"}

    @cached_property
    def label_ids(self):
        """{label, as written and in lower case: its index}"""
        return task_rows.make_label_ids(self.labels)


# How the texts of a row become candidates, as in AdapterHub's own training code
# (adapter-hub/efficient-task-transfer, itrain/datasets)


def fill_blank(sentence, *options):
    return [(sentence.replace("_", option), None) for option in options]


def answers(context, question, *options):
    return [(context, f"{question} {option}") for option in options]


def endings(ctx_a, ctx_b, options):
    return [(ctx_a, f"{ctx_b} {option}") for option in options]


def question_choices(question, choices):
    """choices["label"] says which of choices["text"] is answer A, which is B, and so on."""
    return [(question, text) for text in task_rows.by_key(choices, "ABCDE")]


def own_choices(*texts):
    """([text_a,] choices) -> candidates"""
    return [(texts[0], choice) if len(texts) == 2 else (choice, None) for choice in texts[-1]]


def row(columns, labels, sizes, max_length=128, **more):
    """A row of the table; columns and labels are written as words of one string."""
    words = tuple(columns.split()), tuple(labels.split())
    return Task(None, None, *words, sizes, max_length=max_length, **more)


def choices(columns, labels, sizes, candidates, max_length=128, **more):
    """A row of the table, of a multiple-choice task"""
    more |= {"candidates": candidates, "kind": MultipleChoice}
    return row(columns, labels, sizes, max_length, **more)


NLI = "entailment neutral contradiction"
UKP = "NoArgument Argument_against Argument_for"
TSV_FORMAT = {"sentence1": "premise", "sentence2": "hypothesis", "gold_label": "label"}
TSV_FORMAT |= {"entailment": "entails"}

# Section 4.2, in the order of Table 1: columns, labels, rows of training and development set, and
# the length in tokens. At 128, the reference's, 0.4 % of mnli's examples are cut and under 0.1 % of
# most others', but 12 % of rte's and cb's, 19 % of cosmos_qa's, 47 % of boolq's and 90 % of imdb's.
# So these have more, which cuts none of rte's and cosmos_qa's, 0.4 % of cb's, 0.7 % of boolq's and
# 25 % of imdb's. hellaswag's 200 is AdapterHub's.
TASKS = {
    "mnli": row("premise hypothesis", NLI, (392702, 9815), dev="validation_matched"),
    "qqp": row("question1 question2", "not_duplicate duplicate", (363846, 40430)),
    "sst2": row("sentence", "negative positive", (67349, 872)),
    "winogrande": choices(
        "sentence option1 option2", "1 2", (40398, 1267), fill_blank, label="answer"
    ),
    "imdb": row("text", "neg pos", (23000, 2000), 384, held_out=2000),
    "hellaswag": choices("ctx_a ctx_b endings", "0 1 2 3", (39905, 10042), endings, 200),
    "social_i_qa": choices(
        "context question answerA answerB answerC", "1 2 3", (33410, 1954), answers
    ),
    "cosmos_qa": choices(
        "context question answer0 answer1 answer2 answer3", "0 1 2 3", (25262, 2985), answers, 256
    ),
    "scitail": row("premise hypothesis", "entails neutral", (23596, 1304), aliases=TSV_FORMAT),
    "argument": row("topic sentence", UKP, (18341, 2042), label="annotation"),
    "commonsense_qa": choices(
        "question choices", "A B C D E", (9741, 1221), question_choices, label="answerKey"
    ),
    "boolq": row("passage question", "False True", (9427, 3270), 384, aliases={"answer": "label"}),
    "mrpc": row("sentence1 sentence2", "not_equivalent equivalent", (3668, 408)),
    "sick": row("sentence_A sentence_B", NLI, (4500, 500), hub_sizes=(4439, 495)),
    "rte": row("sentence1 sentence2", "entailment not_entailment", (2490, 277), 290),
    "cb": row("premise hypothesis", "entailment contradiction neutral", (250, 56), 256),
}
# Where they are on the hub, in repositories that `datasets` 5 can read, because they hold no
# loading script: repository, configuration, revision.
HUB = {
    "mnli": ("nyu-mll/glue", "mnli", None),
    "qqp": ("nyu-mll/glue", "qqp", None),
    "sst2": ("nyu-mll/glue", "sst2", None),
    "winogrande": ("allenai/winogrande", "winogrande_xl", None),
    "imdb": ("stanfordnlp/imdb", "plain_text", None),
    "hellaswag": ("Rowan/hellaswag", None, None),
    "social_i_qa": ("lighteval/siqa", None, None),
    "cosmos_qa": ("Samsoup/cosmos_qa", None, None),
    "scitail": ("allenai/scitail", "snli_format", None),
    "argument": (None, None, None),
    "commonsense_qa": ("tau/commonsense_qa", None, None),
    "boolq": ("aps/super_glue", "boolq", None),
    "mrpc": ("nyu-mll/glue", "mrpc", None),
    "sick": ("RobZamp/sick", None, "refs/convert/parquet"),
    "rte": ("nyu-mll/glue", "rte", None),
    "cb": ("aps/super_glue", "cb", None),
}
for name, (source, config, revision) in HUB.items():
    where = {"source": source, "config": config, "revision": revision}
    TASKS[name] = replace(TASKS[name], name=name, **where)


def get_task(name, data_dir=None, labels=None, split="train", columns=None, files=None):
    """
    The paper's task of that name, or your own: any other name, with data in `data_dir`/NAME, or in
    `files`, {"train": path, "validation": path}.

    labels: those of an earlier run of your own task; otherwise they are read from the file of
    `split`. columns: {our name of a column: the files'}. Raises ValueError for an unknown task,
    FileNotFoundError for a missing directory.
    """
    if data_dir is not None and not Path(data_dir).is_dir():
        raise FileNotFoundError(f"--data-dir {data_dir} is not a directory")
    for path in (files or {}).values():
        if not Path(path).is_file():  # a pipe would never end
            raise FileNotFoundError(f"{path} is not a file")
    if name in TASKS:
        task = TASKS[name]
    else:
        if files:
            path = files[split]
        else:
            task_rows.check_own_task(name, data_dir, TASKS)
            path = find_file(Path(data_dir) / name, split)
        task = own_task(*task_rows.own_columns(path, read_rows(path), columns, labels))
    task_rows.check_column_names(columns, task)
    return replace(task, name=name, column_names=columns or {}, files=files or {})


def own_task(columns, labels):
    """
    Your own task. Columns `text_a`, `text_b` (optional) and `label` (strings or integers, their
    sorted values are the classes), or `choices` (a list of texts, the same number in every row),
    `label` (the index of the right one, from 0) and optionally `text_a`.
    """
    absent = tuple(column for column in task_rows.OWN_COLUMNS if column not in columns)
    task = Task(None, None, tuple(columns), tuple(labels), (), absent=absent)
    if "choices" in columns:
        task = replace(task, candidates=own_choices, kind=MultipleChoice)
    return task


def to_candidates(task, row):
    """One row, under our names of its columns -> (candidates, label). Raises ValueError for a
    missing value or an unknown label."""
    texts, label = task_rows.check_row(row, task)
    candidates = task.candidates(*texts)
    task_rows.check_candidates(candidates, len(task.labels) if task.choices else None)
    return candidates, task.kind.label(task, label)


def load_split(
    task,
    split,
    tokenizer,
    data_dir=None,
    limit=None,
    seed=0,
    strict=False,
    dev_fraction=None,
    held_out=None,
):
    """
    One split, tokenised: a datasets.Dataset with `input_ids` and `token_type_ids` (for every
    candidate a list of ids), `label`, and `length` (tokens of the longest candidate). Tokenising
    runs on all cores and is cached. `formats.rows.origin(split)` says what it was made of.

    limit: keep that many examples, drawn with `seed`. dev_fraction: the part of the training file
    that is the validation split, where there is no file of it. held_out: what `origin` said of the
    examples that an earlier run held out, which must be the same. strict: a row count unlike the
    task's is an error, not a warning. Raises FileNotFoundError without the data, ValueError naming
    file and line for a row that does not fit.
    """
    source = find_split(task, split, data_dir, dev_fraction, held_out)

    def examples(wanted):
        """(candidates, label) of the rows that are wanted, in the order of the file"""
        for line, values in itertools.compress(source.read(), wanted):
            with error_prefix(f"{source.where}, line {line}"):
                values = task_rows.apply_column_names(values, task.column_names)
                yield to_candidates(task, values)

    def tokenize():
        chosen = iter(
            tqdm(examples(wanted), f"tokenizing {task.name} {split}", leave=False, disable=None)
        )
        while chunk := list(itertools.islice(chosen, 1000)):
            yield task_rows.encode(tokenizer, chunk)

    wanted = np.ones(sum(1 for _ in source.read()), dtype=bool)
    places, digest = np.arange(len(wanted)), None
    if source.part is not None:
        places, digest = hold_out(source, examples(wanted), split, held_out)
    if dev_fraction is None:
        check_size(source.where, len(places), task, split, strict)
    if limit is not None and limit < len(places):
        places = places[np.random.default_rng(seed).permutation(len(places))[:limit]]
    wanted[:] = False
    wanted[places] = True

    names = split, task.name, task.labels, task.columns, task.label, task.column_names
    code = task_rows.source_code(load_split, task.candidates, task.kind)
    key = [source.digest, wanted.tobytes(), names, tokenizer.to_str(), code]
    result = cached(key, tokenize(), task.kind.dtype.is_floating_point)
    if (places[1:] < places[:-1]).any():  # drawn
        result = result.select(np.searchsorted(np.sort(places), places))
    set_origin(result, source, digest)
    return result


def length_bucketed_batches(lengths, batch_size, seed=None, window=50):
    """
    Indices of every batch of one epoch. Batches hold examples of similar length, so that little is
    padding: a random order is sorted by length within windows of 50 batches, and the batches are
    shuffled. A window is at most a quarter of the examples, so that those of a small task meet
    others in every epoch, as where one shuffles without regard to length. Without a seed
    (evaluation) everything is sorted, longest first. Every index occurs exactly once.
    """
    if seed is None:
        order = np.argsort(-lengths, kind="stable")
        return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(lengths))
    window = max(1, min(window, len(lengths) // (4 * batch_size)))
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


def batches(split, batch_size, pad_token_id=0, seed=None, rank=0, world_size=1):
    """The batches of one epoch over a split from `load_split`, as `collate` makes them; of each,
    the share of one of `world_size` processes."""
    lengths = split.with_format("numpy")["length"][:]
    for indices in length_bucketed_batches(lengths, batch_size, seed):
        if len(mine := indices[rank::world_size]) > 0:
            yield collate(split[mine.tolist()], pad_token_id)


def main(argv=None):
    from experiments.inspect import inspect_task

    return inspect_task(argv)


if __name__ == "__main__":
    run_command("data.py", main)
