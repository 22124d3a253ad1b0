"""D: the paper's 16 tasks (section 4.2), your own task, and batches.

A task reduces to K candidate pairs (text_a, text_b or None) and a label. Classification has one candidate per example and
a K-way head; multiple choice has one candidate per choice, and a softmax over their scores.

    task = get_task("rte", data_dir)                                   # or your own, see `own_task`
    tokenizer = load_tokenizer(directory, max_length=128)
    train = load_split(task, "train", tokenizer, data_dir)             # tokenised, cached by `datasets`
    for batch in batches(train, batch_size=32, seed=0): ...

    python data.py TASK [--data-dir DIR] [--model SOURCE]              # what the model will see
"""

import argparse
import csv
import difflib
import glob
import hashlib
import json
import logging
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import datasets
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

# errors are raised, and reported once; `datasets` and the hub log them too, and retry with a line each
logging.getLogger("datasets").setLevel(logging.CRITICAL)
logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
if not sys.stderr.isatty():
    datasets.disable_progress_bars()


@dataclass(frozen=True)
class Task:
    """One row of TASKS. Labels are in a fixed order of ours: a file's own feature names are never used."""

    source: str | None  # hub repository; None: no copy on the hub
    config: str | None  # its configuration
    columns: tuple  # text columns in the order in which `candidates` takes them
    label: str  # label column
    labels: tuple  # label values as the hub writes them; an integer is an index into them
    sizes: tuple  # rows of train and development set
    candidates: Callable = lambda *texts: [(texts[0], texts[1] if len(texts) > 1 else None)]
    # 128 tokens as in the reference; more for texts of paragraphs, of which 128 would cut most: 90 % of imdb's training
    # examples, 47 % of boolq's, 19 % of cosmos_qa's
    max_length: int = 128
    dev: str = "validation"  # the split that serves as development set
    aliases: dict = field(default_factory=dict)  # other names of columns and labels in other copies of the data
    revision: str | None = None
    choices: bool = False  # multiple choice: `labels` are the candidates
    name: str = ""


def fill_blank(sentence, *options):
    return [(sentence.replace("_", option), None) for option in options]


def answers(context, question, *options):
    return [(context, f"{question} {option}") for option in options]


def endings(ctx_a, ctx_b, options):
    return [(ctx_a, f"{ctx_b} {option}") for option in options]


NLI = ("entailment", "neutral", "contradiction")
GLUE = "nyu-mll/glue"

# Section 4.2, in the order of Table 1. Repositories that today's `datasets` can load (no scripts), inputs as AdapterHub's
# own training code builds them (adapter-hub/efficient-task-transfer, itrain/datasets).
TASKS = {
    "mnli": Task(GLUE, "mnli", ("premise", "hypothesis"), "label", NLI, (392702, 9815), dev="validation_matched"),
    "qqp": Task(GLUE, "qqp", ("question1", "question2"), "label", ("not_duplicate", "duplicate"), (363846, 40430)),
    "sst2": Task(GLUE, "sst2", ("sentence",), "label", ("negative", "positive"), (67349, 872)),
    "winogrande": Task("allenai/winogrande", "winogrande_xl", ("sentence", "option1", "option2"), "answer",
                       ("1", "2"), (40398, 1267), fill_blank, choices=True),
    "imdb": Task("stanfordnlp/imdb", "plain_text", ("text",), "label", ("neg", "pos"), (25000, 25000),
                 max_length=384, dev="test"),  # it has no development set
    "hellaswag": Task("Rowan/hellaswag", None, ("ctx_a", "ctx_b", "endings"), "label", ("0", "1", "2", "3"),
                      (39905, 10042), endings, choices=True),
    "social_i_qa": Task("lighteval/siqa", None, ("context", "question", "answerA", "answerB", "answerC"), "label",
                        ("1", "2", "3"), (33410, 1954), answers, choices=True),
    "cosmos_qa": Task("Samsoup/cosmos_qa", None, ("context", "question", "answer0", "answer1", "answer2", "answer3"),
                      "label", ("0", "1", "2", "3"), (25262, 2985), answers, max_length=256, choices=True),
    "scitail": Task("allenai/scitail", "snli_format", ("premise", "hypothesis"), "label", ("entails", "neutral"),
                    (23596, 1304), aliases={"sentence1": "premise", "sentence2": "hypothesis", "gold_label": "label",
                                            "entailment": "entails"}),
    "argument": Task(None, None, ("topic", "sentence"), "annotation",
                     ("NoArgument", "Argument_against", "Argument_for"), (18341, 2042)),
    "commonsense_qa": Task("tau/commonsense_qa", None, ("question", "choices"), "answerKey", ("A", "B", "C", "D", "E"),
                           (9741, 1221), lambda question, choices: [(question, c) for c in choices["text"]],
                           choices=True),
    "boolq": Task("aps/super_glue", "boolq", ("passage", "question"), "label", ("False", "True"), (9427, 3270),
                  max_length=384, aliases={"answer": "label"}),
    "mrpc": Task(GLUE, "mrpc", ("sentence1", "sentence2"), "label", ("not_equivalent", "equivalent"), (3668, 408)),
    "sick": Task("RobZamp/sick", None, ("sentence_A", "sentence_B"), "label", NLI, (4439, 495),
                 revision="refs/convert/parquet"),
    "rte": Task(GLUE, "rte", ("sentence1", "sentence2"), "label", ("entailment", "not_entailment"), (2490, 277)),
    "cb": Task("aps/super_glue", "cb", ("premise", "hypothesis"), "label", ("entailment", "contradiction", "neutral"),
               (250, 56)),  # not MNLI's order
}  # fmt: skip


def get_task(name, data_dir=None, labels=None, split="train"):
    """
    The paper's task of that name, or your own: any other name, with data in `data_dir`/NAME.

    labels: those of an earlier run of your own task; otherwise they are read from the file of `split`.
    Raises ValueError for an unknown task, FileNotFoundError for a missing directory.
    """
    if data_dir is not None and not Path(data_dir).is_dir():
        raise FileNotFoundError(f"--data-dir {data_dir} is not a directory")
    if name in TASKS:
        return replace(TASKS[name], name=name)
    if data_dir is None or not (Path(data_dir) / name).is_dir() or Path(name).name != name or name in ("", ".."):
        near = difflib.get_close_matches(name, TASKS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"the paper's are {', '.join(TASKS)};"
        own = f"{data_dir}/{name}" if data_dir else "--data-dir DIR with DIR/TASK/train.jsonl"
        raise ValueError(f"unknown task {name!r}: {hint} your own task needs {own}")
    return own_task(name, data_dir, labels, split)


def own_task(name, data_dir, labels, split):
    """
    Your own task. Columns `text_a`, `text_b` (optional) and `label` (strings or integers, their sorted values are the
    classes), or `choices` (a list of texts, the same number in every row), `label` (the index of the right one, from 0)
    and optionally `text_a`.
    """
    path, rows = read_file(Path(data_dir) / name, name, split)
    if "choices" in rows.column_names:
        given = rows[0]["choices"]
        if not isinstance(given, list) or len(given) < 2:
            raise ValueError(f"{path}, line 1: 'choices' must be a list of at least two texts")
        columns = ("text_a", "choices") if "text_a" in rows.column_names else ("choices",)
        labels = tuple(str(i) for i in range(len(given)))
        return Task(None, None, columns, "label", labels, (), own_choices, choices=True, name=name)
    columns = ("text_a", "text_b") if "text_b" in rows.column_names else ("text_a",)
    if labels is None:
        values = set()
        for i, value in enumerate(rows["label"] if "label" in rows.column_names else []):
            if type(value) not in (str, int, bool) or value == "":
                raise ValueError(f"{path}, line {line_of(path, i)}: label {value!r:.100} is neither a text nor an integer")
            values.add(str(value))
        numbers = all(value.removeprefix("-").isdecimal() for value in values)
        labels = sorted(values, key=lambda value: (int(value), value) if numbers else value)
        if len(labels) == 1:
            raise ValueError(f"{path}: all labels are {labels[0]!r:.100}, there is nothing to learn")
    return Task(None, None, columns, "label", tuple(labels), (), name=name)


def own_choices(*texts):
    """([text_a,] choices) -> candidates"""
    return [(texts[0], choice) if len(texts) == 2 else (choice, None) for choice in texts[-1]]


# ----------------------------------------------------------------------------------------------------------------------
# Rows: from a file or the hub to candidate pairs and a label

READERS = {
    ".jsonl": ("json", {}),
    ".json": ("json", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"delimiter": "\t", "quoting": csv.QUOTE_NONE}),
    ".parquet": ("parquet", {}),
}
csv.field_size_limit(10**9)  # longer texts than 131,072 characters are refused later, or cut


def read_file(directory, task_name, split, other_name=None):
    """(path, rows) of DIR/TASK/SPLIT.jsonl, .json, .csv, .tsv or .parquet. Raises FileNotFoundError, or ValueError with
    file and line."""
    if not directory.is_dir():
        raise FileNotFoundError(f"no data for task {task_name!r}: {directory} is not a directory")
    names = [split] if other_name in (None, split) else [split, other_name]
    paths = [directory / f"{name}{ending}" for name in names for ending in READERS]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise FileNotFoundError(f"no {split} split for task {task_name!r}: there is no {directory / split}.jsonl")
    return path, read_rows([path])


def read_rows(paths):
    """The rows of files of one kind. Raises ValueError naming file and line if they cannot be read or are empty."""
    path, (reader, options) = paths[0], READERS[paths[0].suffix]
    if reader == "json":
        check_json(path)
    if reader == "csv":  # every cell is text: 007 and 1.10 are not 7 and 1.1
        names = [check_table(path, options) for path in paths][0]
        text = datasets.Features(dict.fromkeys(names, datasets.Value("string")))
        options = {**options, "keep_default_na": False, "names": names, "header": 0, "features": text}
    try:
        files = [glob.escape(str(path)) for path in paths]
        rows = datasets.load_dataset(reader, data_files=files, split="train", **options)
    except Exception as e:  # each format raises its own kinds
        if reader == "json":
            check_json(path, thorough=True)
        if path.stat().st_size == 0 or "corresponds to no data" in str(e):
            raise ValueError(f"{path} is empty") from e
        reason = str(e.__cause__ or e).strip().splitlines()
        reason = reason[0] if reason else repr(e)
        raise ValueError(f"{path}: not a readable {path.suffix[1:]} file: {reason:.200}") from e
    if len(rows) == 0:
        raise ValueError(f"{path} is empty")
    return rows


def check_table(path, options):
    """The header of a .csv or .tsv file. Raises ValueError that names the first line with another number of fields: pandas would
    fill it up, or take its first column for row names."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file, **options)
            header = next(lines, [])
            for row in lines:
                if row and len(row) != len(header):
                    raise ValueError(f"{len(row)} fields, the first line has {len(header)}")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path}: not UTF-8 text") from e
    except (ValueError, csv.Error) as e:
        raise ValueError(f"{path}, line {lines.line_num}: {e}") from e
    if not header:
        raise ValueError(f"{path} is empty")
    if len(set(header)) < len(header):
        raise ValueError(f"{path}, line 1: two columns are called {Counter(header).most_common(1)[0][0]!r:.100}")
    return header


def check_json(path, thorough=False):
    """
    Raises ValueError that names the first line which is not a JSON object in UTF-8; a .json file may also be a list of them.

    pyarrow ends in a segmentation fault where the first line is `null`, or a value is nested deeply: before it reads a file,
    the lines that could be such are parsed, after an error (thorough) all.
    """
    number = 0
    try:
        with open(path, encoding="utf-8-sig") as file:
            is_list = path.suffix == ".json" and file.read(1) == "["
            file.seek(0)
            for line in [file.read()] if is_list else file:
                number += 1
                if thorough or not line.startswith("{") or line.count("[") + line.count("{") > 500:
                    value = json.loads(line.rstrip()) if line.strip() else {}
                    if not all(isinstance(row, dict) for row in (value if is_list else [value])):
                        raise ValueError("not a JSON object")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path}: not UTF-8 text") from e
    except json.JSONDecodeError as e:
        raise ValueError(f"{path}, line {number + e.lineno - 1}: broken JSON: {e.msg} at column {e.colno}") from e
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path}, line {number}: {e}") from e


def line_of(where, index):
    """The line of a .jsonl, .csv or .tsv file in which a row begins; elsewhere the row's number."""
    path = Path(where)
    if path.suffix not in (".jsonl", ".csv", ".tsv") or not path.is_file():
        return index + 1
    starts, begin = [], 1
    with open(path, encoding="utf-8-sig", newline="") as file:
        if path.suffix == ".jsonl":
            starts = [number for number, line in enumerate(file, 1) if line.strip()]
        else:
            lines = csv.reader(file, **READERS[path.suffix][1])
            for row in lines:
                starts += [begin] * bool(row)
                begin = lines.line_num + 1
            del starts[0]  # the header
    return starts[index]


def read_split(task, split, data_dir=None):
    """(where, rows, revision): the rows of "train", "validation" or another split, from `data_dir`, or the hub without one."""
    if data_dir is not None:
        directory = Path(data_dir) / task.name
        if task.name == "argument" and directory.is_dir() and not list(directory.glob("train.*")):
            return *read_argument(directory, split), None
        return *read_file(directory, task.name, split, task.dev if split == "validation" else None), None
    if task.source is None:
        raise FileNotFoundError(
            "the UKP Sentential Argument Mining Corpus is not on the hub: request it at "
            "tudatalib.ulb.tu-darmstadt.de/handle/tudatalib/2345 and put its eight .tsv files into DATA_DIR/argument"
        )
    name = task.dev if split == "validation" else split
    where = f"{task.source} {task.config or ''}".strip() + f", {name}"
    try:
        rows = datasets.load_dataset(task.source, task.config, split=name, revision=task.revision)
    except Exception as e:  # network, hub and format each raise their own kinds
        reason = (str(e).strip().splitlines() or [repr(e)])[0]
        raise FileNotFoundError(f"{where} cannot be loaded from the hub ({reason}); --data-dir takes local files") from e
    urls = [url.split("@")[1].split("/")[0] for url in rows.download_checksums or {} if "@" in url]
    return where, rows, urls[0] if urls else task.revision


def read_argument(directory, split):
    """(where, rows) of UKP's corpus as it is distributed: one file a topic, the split in the column `set`."""
    paths = sorted(directory.glob("*.tsv"))
    if not paths:
        raise FileNotFoundError(f"no train.jsonl and no topic .tsv files of UKP's corpus in {directory}")
    rows = read_rows(paths)
    if "set" not in rows.column_names:
        raise ValueError(f"{paths[0]}: no column 'set'; it has {', '.join(rows.column_names):.200}")
    wanted = "val" if split == "validation" else split
    rows = rows.filter(lambda values: [value == wanted for value in values], batched=True, input_columns="set")
    if len(rows) == 0:
        raise ValueError(f"{directory}: no row with set = {wanted}")
    return directory, rows


def label_index(task, value):
    """A label as the data writes it -> its index in task.labels. Raises ValueError that shows the value."""
    labels = [label.lower() for label in task.labels]
    text = str(value).strip()
    text = task.aliases.get(text, text).lower()
    if type(value) in (str, int, bool) and str(value) in task.labels:  # own labels may differ in case alone
        return task.labels.index(str(value))
    if type(value) in (str, int, bool) and text in labels:  # "1".."3" and own integer labels come as their own names
        return labels.index(text)
    if task.source is not None and not labels[0].isdigit() and text in map(str, range(len(labels))):  # the hub's integers
        return int(text)
    raise ValueError(f"label {value!r:.100} is not one of {', '.join(task.labels):.200}")


def example(task, row):
    """One row -> (candidates, label index). Raises ValueError for a missing value or an unknown label."""
    texts = []
    for column in task.columns:
        value = row.get(column)
        if value is None or value != value:  # NaN: what pandas makes of a missing text
            raise ValueError(f"column {column!r} is missing")
        if column in ("endings", "choices"):
            options = value.get("text") if isinstance(value, dict) else value
            if not isinstance(options, list) or not all(type(option) is str for option in options):
                raise ValueError(f"column {column!r} does not hold a list of texts")
        else:
            if type(value) not in (str, int, float):
                raise ValueError(f"column {column!r} holds {type(value).__name__}, expected a text")
            value = str(value)
        texts.append(value)
    if row.get(task.label) is None:
        raise ValueError(f"column {task.label!r} is missing")
    try:
        candidates = [(a, b) for a, b in task.candidates(*texts)]
    except (TypeError, KeyError, AttributeError) as e:
        raise ValueError(f"columns {', '.join(task.columns)} do not hold what the task expects ({e})") from e
    if (longest := max((len(text) for pair in candidates for text in pair if text), default=0)) > 1_000_000:
        raise ValueError(f"a text of {longest:,} characters, at most 1,000,000 are read")
    if task.choices and len(candidates) != len(task.labels):
        raise ValueError(f"{len(candidates)} choices, expected {len(task.labels)}")
    return candidates, label_index(task, row[task.label])


def load_split(task, split, tokenizer, data_dir=None, limit=None, seed=0, strict=False):
    """
    One split, tokenised: a datasets.Dataset with `input_ids` and `token_type_ids` (for every candidate a list of ids),
    `label`, and `length` (tokens of the longest candidate). The revision that was loaded is in `info.description`.
    Tokenising runs on all cores and is cached by `datasets`, keyed by data, tokenizer and this file.

    limit: keep that many examples, drawn with `seed`. strict: a row count unlike the task's is an error, not a warning.
    Raises FileNotFoundError without the data, ValueError naming file and line for a row that does not fit.
    """
    where, rows, revision = read_split(task, split, data_dir)
    for other, column in task.aliases.items():
        if other in rows.column_names and column not in rows.column_names:
            rows = rows.rename_column(other, column)
    missing = [column for column in (*task.columns, task.label) if column not in rows.column_names]
    if missing:
        raise ValueError(f"{where}, line 1: no column {missing[0]!r}; it has {', '.join(rows.column_names):.200}")
    if task.sizes and len(rows) != (expected := task.sizes[split != "train"]):
        message = f"{where} has {len(rows)} rows, the {task.name} of the paper has {expected}"
        if strict:
            raise ValueError(message)
        print(f"note: {message}")
    rows = rows.select_columns([*task.columns, task.label])
    order = np.arange(len(rows))
    if limit is not None and limit < len(rows):
        order = np.random.default_rng(seed).permutation(len(rows))[:limit]
        rows = rows.select(order)

    def tokenize(columns, indices):
        pairs, counts, labels = [], [], []
        for i, *values in zip(indices, *columns.values(), strict=True):
            try:
                candidates, label = example(task, dict(zip(columns, values, strict=True)))
            except ValueError as e:
                raise ValueError(f"{where}, line {line_of(where, order[i])}: {e}") from e
            pairs += [a if b is None else (a, b) for a, b in candidates]
            counts.append(len(candidates))
            labels.append(label)
        encodings = iter(tokenizer.encode_batch(pairs))  # in Rust, on all cores
        encodings = [[next(encodings) for _ in range(count)] for count in counts]
        return {
            "input_ids": [[encoding.ids for encoding in group] for group in encodings],
            "token_type_ids": [[encoding.type_ids for encoding in group] for group in encodings],
            "label": labels,
            "length": [max(len(encoding.ids) for encoding in group) for group in encodings],
        }

    ids = datasets.List(datasets.List(datasets.Value("int32")))
    number = datasets.Value("int32")
    key = [rows._fingerprint, tokenizer.to_str(), task.name, task.labels, Path(__file__).read_text()]
    result = rows.map(
        tokenize,
        batched=True,
        with_indices=True,
        remove_columns=rows.column_names,
        features=datasets.Features(input_ids=ids, token_type_ids=ids, label=number, length=number),
        new_fingerprint=hashlib.sha256(repr(key).encode()).hexdigest()[:32],
        desc=f"tokenizing {task.name} {split}",
    )
    result.info.description = revision or ""
    return result


# ----------------------------------------------------------------------------------------------------------------------
# Tokens


def load_tokenizer(directory, max_length, vocab_size=None, type_vocab_size=None):
    """
    The tokenizer of an encoder's directory: tokenizer.json, vocab.txt (WordPiece, BERT), or vocab.json and merges.txt
    (byte-level BPE, RoBERTa). Adds [CLS] a [SEP] b [SEP], or <s> a </s></s> b </s>, and cuts the longer of two texts first.

    A vocabulary with upper-case entries is a cased one, unless tokenizer_config.json says otherwise.
    Raises FileNotFoundError if none is there, ValueError for one that cannot be read, or that knows more than the
    `vocab_size` tokens and `type_vocab_size` kinds of segments of the encoder.
    """
    directory = Path(directory)
    try:
        if (directory / "tokenizer.json").is_file():
            tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        elif (directory / "vocab.txt").is_file():
            tokenizer = wordpiece(directory)
        elif (directory / "vocab.json").is_file() and (directory / "merges.txt").is_file():
            tokenizer = byte_level_bpe(directory)
        else:
            raise FileNotFoundError(f"no tokenizer in {directory}: it needs tokenizer.json or vocab.txt")
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode("\u2603")  # fails without a token for what is unknown
        frame = tokenizer.encode("", "")  # [CLS] [SEP] [SEP]
    except FileNotFoundError:
        raise
    except Exception as e:  # the Rust side raises bare Exceptions
        raise ValueError(f"{directory}: its tokenizer cannot be read: {str(e).splitlines()[0]}") from e
    known = max(tokenizer.get_vocab().values(), default=-1) + 1
    if vocab_size is not None and known > vocab_size:
        raise ValueError(f"the tokenizer in {directory} knows {known} tokens, the encoder {vocab_size}")
    if not 1 <= len(frame) <= max_length - 2:
        raise ValueError(f"{directory}: its tokenizer adds {len(frame)} tokens to a pair, of at most {max_length}")
    if type_vocab_size is not None and max(frame.type_ids) >= type_vocab_size:
        raise ValueError(f"the tokenizer in {directory} knows {max(frame.type_ids) + 1} kinds of segments, "
                         f"the encoder {type_vocab_size}")  # fmt: skip
    tokenizer.enable_truncation(max_length, strategy="longest_first")
    return tokenizer


def wordpiece(directory):
    """BERT's tokenizer from vocab.txt, one token a line."""
    words = (directory / "vocab.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n")
    vocab = {word.rstrip("\r"): i for i, word in enumerate(words)}
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    lacking = [token for token in special[:4] if token not in vocab]
    if lacking:
        raise ValueError(f"vocab.txt has no {lacking[0]}")
    cased = any(word != word.lower() for word in vocab if not word.startswith("["))  # not isupper(): uncased ones have "ℝ"
    config = directory / "tokenizer_config.json"
    if config.is_file():
        cased = not json.loads(config.read_text(encoding="utf-8")).get("do_lower_case", not cased)
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special if token in vocab])
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not cased)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"]))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def byte_level_bpe(directory):
    """RoBERTa's tokenizer from vocab.json and merges.txt."""
    vocab = json.loads((directory / "vocab.json").read_text(encoding="utf-8"))
    lines = (directory / "merges.txt").read_text(encoding="utf-8").split("\n")
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    if not all("".join(pair) in vocab for pair in merges):  # else the library panics
        raise ValueError("merges.txt joins what vocab.json does not have")
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token in ("<s>", "<pad>", "</s>", "<unk>")]
        + [AddedToken("<mask>", lstrip=True, special=True)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    sep, cls = (("</s>", tokenizer.token_to_id("</s>")), ("<s>", tokenizer.token_to_id("<s>")))
    tokenizer.post_processor = processors.RobertaProcessing(sep, cls, trim_offsets=True, add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


# ----------------------------------------------------------------------------------------------------------------------
# Batches


def batch_order(lengths, batch_size, seed=None, window=50):
    """
    Indices of every batch of one epoch. Batches hold examples of similar length, so that little is padding: a random order
    is sorted by length within windows of 50 batches, and the batches are shuffled. Without a seed (evaluation) everything
    is sorted, longest first. Every index occurs exactly once.
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
    """rows: {"input_ids": B lists of C lists, ...} -> LongTensors input_ids, token_type_ids, attention_mask [B·C, T], the
    candidates of an example in a row, and labels [B]"""
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


def groups(batch):
    """
    What the encoder sees of a batch: (rows, [input_ids, token_type_ids, attention_mask]) with C groups of B candidates.

    The candidates of one multiple-choice example differ in length, so they are grouped by length and each group is cut to
    its longest. `rows` [B] are the places of its candidates in the batch. Classification has one group, the batch itself.
    """
    C = len(batch["input_ids"]) // len(batch["labels"])
    lengths = batch["attention_mask"].sum(1)
    order = lengths.argsort(stable=True) if C > 1 else torch.arange(len(lengths))
    for rows in order.chunk(C):
        T = lengths[rows].max()
        yield rows, [batch[name][rows, :T] for name in ("input_ids", "token_type_ids", "attention_mask")]


def batches(split, batch_size, pad_token_id=0, seed=None, rank=0, world=1):
    """The batches of one epoch over a split from `load_split`, as `collate` makes them; of each, the share of one of `world`
    processes."""
    lengths = split.with_format("numpy")["length"][:]
    for indices in batch_order(lengths, batch_size, seed):
        if len(mine := indices[rank::world]) > 0:
            yield collate(split[mine.tolist()], pad_token_id)


def refuse(message):
    raise ValueError(message)


def main():
    parser = argparse.ArgumentParser(description="Shows what the model will see of a task.")
    parser.add_argument("task")
    parser.add_argument("--data-dir", help="directory with TASK/train.jsonl and TASK/validation.jsonl; without it: the hub")
    parser.add_argument("--model", default="google-bert/bert-base-uncased", help="an encoder, for its tokenizer")
    parser.error = refuse  # one line like all errors, without the usage
    from bert import checkpoint_files, fetch_encoder, read_config

    try:
        args = parser.parse_args()
        task = get_task(args.task, args.data_dir)
        directory = fetch_encoder(args.model)
        config = read_config(checkpoint_files(directory)[0])  # as train.py has it, so that it finds the tokens in the cache
        task = replace(task, max_length=min(task.max_length, config.max_length))
        tokenizer = load_tokenizer(directory, task.max_length, config.vocab_size, config.type_vocab_size)
        splits = {name: load_split(task, name, tokenizer, args.data_dir) for name in ("train", "validation")}
    except (OSError, ValueError) as e:
        print(f"data.py: {' '.join(str(e).split())}", file=sys.stderr)
        sys.exit(2)
    print(f"{args.task}: {'one of ' + str(len(task.labels)) + ' choices' if task.choices else ', '.join(task.labels)}")
    for name, split in splits.items():
        lengths = split.with_format("numpy")["length"][:]
        counts = Counter(split["label"][:])
        balance = ", ".join(f"{label} {counts[i] / len(split):.1%}" for i, label in enumerate(task.labels))
        tokens = " / ".join(f"{np.percentile(lengths, p):.0f}" for p in (5, 50, 95, 100))
        masks = [mask for batch in islice(batches(split, 32, seed=0), 100) for _, (_, _, mask) in groups(batch)]
        padding = 1 - sum(mask.sum().item() for mask in masks) / sum(mask.numel() for mask in masks)
        print(f"{name}: {len(split):,} examples; {balance}")
        print(f"    {tokens} tokens (5th, 50th, 95th, 100th percentile), {np.mean(lengths >= task.max_length):.1%} at the "
              f"limit of {task.max_length}, {padding:.1%} padding in batches of 32")  # fmt: skip
    for row in splits["train"].select(range(min(3, len(splits["train"])))):
        print(f"\n{task.labels[row['label']]}")
        for i, (ids, types) in enumerate(zip(row["input_ids"], row["token_type_ids"], strict=True)):
            print("  *" if task.choices and i == row["label"] else "   ", end="")
            for segment in sorted(set(types)):
                tokens = [tokenizer.id_to_token(id) for id, type in zip(ids, types, strict=True) if type == segment]
                print(f" {segment}: {' '.join(tokens)}", end="")
            print()


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # so that `python data.py rte | head` ends quietly
    main()
