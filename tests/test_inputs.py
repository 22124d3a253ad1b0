"""Wrong input, systematically: every command, every kind of file. One line on stderr, exit status
2, nothing written.

Beside the tests of single modules (damaged checkpoints: test_encoder.py and test_tensorflow.py,
adapter files: test_adapterhub.py) this goes through the commands, in a directory of their own that
holds model/, data/ and runs/.
"""

import contextlib
import gzip
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import datasets
import pytest
import torch
from safetensors.torch import load_file, save_file

import bert
import data
import train
from conftest import VOCABULARY, command_line, thorough, thorough_after_first
from experiments import (
    architecture_search,
    demo,
    evaluate,
    figure4,
    loading,
    predict,
    prune,
    publish,
    table1,
)
from formats.tokenizer import load_tokenizer

ROOT = Path(train.__file__).parent
TRAIN = [
    "--stage",
    "head",
    "--task",
    "rte",
    "--model",
    "model",
    "--data-dir",
    "data",
    "--out",
    "out",
    "--epochs",
    "1",
    "--device",
    "cpu",
]
COMMANDS = {  # command: (its main, the arguments that a case's are appended to)
    "train.py": (command_line, TRAIN),
    "bert.py": (bert.main, []),
    "data.py": (data.main, ["rte", "--model", "model", "--data-dir", "data"]),
    "publish.py": (publish.main, ["--anyway", "--encoder", "me/bert", "--out", "out"]),
    "loading.py": (loading.main, []),
    "demo.py": (demo.main, []),
    "evaluate.py": (evaluate.main, ["--device", "cpu"]),
    "predict.py": (predict.main, ["--device", "cpu"]),
    "figure4.py": (figure4.main, ["--out", "out", "--device", "cpu"]),
    "prune.py": (prune.main, ["--out", "out", "--device", "cpu"]),
    "table1": (
        lambda: sys.exit(table1.main()),
        ["--model", "model", "--data-dir", "data", "--tasks", "rte", "--out", "out"],
    ),
    "architecture_search": (
        lambda: sys.exit(architecture_search.main()),
        [
            "--model",
            "model",
            "--data-dir",
            "data",
            "--tasks",
            "rte",
            "--out",
            "out",
            "--reduction-factors",
            "16",
        ],
    ),
}
CASES = {}  # name: (command, what is changed beforehand, arguments, what the message says)


def case(name, say, *arguments, change=None, command="train.py"):
    assert name not in CASES
    CASES[name] = (command, change, arguments, [say] if isinstance(say, str) else say)


# --------------------------------------------------------------------------------------------------
# What changes the files: functions of no argument, called in the directory of the case


def put(path, content):
    def change():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).unlink(missing_ok=True)
        Path(path).write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def rows(*rows, task="mine", file="train.jsonl"):
    """The same rows for training and development."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    return both(
        put(f"data/{task}/{file}", text),
        put(f"data/{task}/{file.replace('train', 'validation')}", text),
    )


def both(*changes):
    return lambda: [change() for change in changes]


def edit(path, *, remove=(), inside=None, **values):
    """Fields of a JSON file, or of the object `inside` it."""

    def change():
        content = json.loads(Path(path).read_text())
        part = content[inside] if inside else content
        part.update(values)
        for name in remove:
            del part[name]
        Path(path).write_text(json.dumps(content))

    return change


def tensors(path, function):
    """function(name, tensor) -> tensor, of a safetensors file; of the same path with .bin, written
    as PyTorch's."""

    def change():
        source = (
            Path(path)
            if path.endswith(".safetensors")
            else next(Path(path).parent.glob("*.safetensors"))
        )
        result = {
            name: function(name, tensor.clone()) for name, tensor in load_file(source).items()
        }
        source.unlink()
        save_file(result, path)

    return change


def spoil(value, part=""):
    """One number of every tensor whose name holds `part`."""

    def function(name, tensor):
        if part in name:
            tensor.view(-1)[0] = value
        return tensor

    return function


def link(path, target):
    def change():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink(missing_ok=True)
        Path(path).symlink_to(target)

    return change


def special(path, kind):
    def change():
        shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink(missing_ok=True)
        if kind == "directory":
            Path(path).mkdir(parents=True)
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "socket":
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(path)
        elif kind == "unreadable":
            put(path, b"{}")()
            Path(path).chmod(0)

    return change


def folder(path):
    return lambda: Path(path).mkdir(parents=True)


class Writes:
    """Unpickled, it writes the file `executed`."""

    def __reduce__(self):
        return open, ("executed", "w")


def pickled(path, content, remove=()):
    def change():
        for name in remove:
            Path(name).unlink()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        if path.endswith("resume.pt"):  # so it is a run's directory
            IN_OUT()
        torch.save(content() if callable(content) else content, path)

    return change


def cache_in(place):
    """`datasets` is to have its cache there; the fixture `box` puts it back."""
    datasets.config.HF_DATASETS_CACHE = Path(place)


KINDS = ("directory", "fifo", "socket")
IN_OUT = both(
    put("out/config.json", json.dumps({"stage": "head", "command": "train.py"})),
    put("out/log.jsonl", b""),
)
DEEP = b"[" * 100_000 + b"]" * 100_000
LONG = "x" * 300
# --------------------------------------------------------------------------------------------------
# Arguments

for option, value, say in [
    ("--epochs", "1.5", "--epochs"),
    ("--epochs", "", "--epochs"),
    ("--epochs", "1" + "0" * 20, "--epochs"),
    ("--batch-size", "1" + "0" * 20, "--batch-size"),
    ("--batch-size", "-1", "--batch-size"),
    ("--seed", str(2**32), "--seed"),
    ("--seed", "1e3", "--seed"),
    ("--lr", "-inf", "--lr"),
    ("--lr", "1e-400", "--lr"),
    ("--weight-decay", "nan", "--weight-decay"),
    ("--weight-decay", "inf", "--weight-decay"),
    ("--limit-train", "-5", "--limit-train"),
    ("--max-length", "0", "--max-length"),
    ("--max-length", "9" * 30, "--max-length"),
    ("--patience", "-1", "--patience"),
    ("--save-minutes", "nan", "--save-minutes"),
    ("--grad-accumulation", "0", "--grad-accumulation"),
    ("--task", "", "unknown task ''"),
    ("--task", ".", "unknown task"),
    ("--task", "a\0b", "unknown task"),
    ("--task", "../data/rte", "unknown task"),
    ("--task", "rte/", "unknown task"),
    ("--task", LONG, "too long"),
    ("--task", "a\nb", "unknown task"),
    ("--data-dir", "data/rte/train.jsonl", "not a directory"),
    ("--data-dir", "a\0b", "not a directory"),
    ("--data-dir", LONG, "too long"),
    ("--data-dir", "/dev/zero", "not a directory"),
    ("--model", "", "no encoder in"),
    ("--model", "model/config.json", "config.json"),
    ("--model", LONG, "too long"),
    ("--model", "a\nb", "no local directory"),
    ("--model", "model/../..", "no encoder in"),
    ("--model", "/dev/zero", "/dev/zero"),
    ("--out", "/dev/zero", "is a file"),
    ("--out", "model/config.json/x", "Not a directory"),
    ("--out", LONG, "too long"),
    ("--out", "/proc/x/y", "/proc/x"),
    ("--out", ".", "holds other files"),
]:
    case(f"{option} {value[:12]!r}", say, option, value)
for value, say in [
    ("inf", "--reduction-factor"),
    ("1e-300", "reduction"),
    ("-inf", "--reduction-factor"),
]:
    case(f"--reduction-factor {value}", say, "--stage", "adapter", f"--reduction-factor={value}")
case("--model is a loop", "loop", "--model", "loop", change=link("loop", "loop"))
case("--out is a loop", "loop", "--out", "loop", change=link("loop", "loop"))
case("--out is in a loop", "loop", "--out", "loop/x", change=link("loop", "loop"))
case(
    "--data-dir is a loop",
    "loop is not a directory",
    "--data-dir",
    "loop",
    change=link("loop", "loop"),
)
case(
    "a task in a task's directory",
    "unknown task 'rte/a'",
    "--task",
    "rte/a",
    change=folder("data/rte/a"),
)
for name in ("keys", "training", "_modules", "a.b", "a,b", "a\nb"):
    case(
        f"a task that cannot be an adapter {name!r}",
        "cannot be an adapter's name",
        "--task",
        name,
        "--stage",
        "adapter",
        change=rows({"text_a": "a", "label": 0}, {"text_a": "b", "label": 1}, task=name),
    )
for value, say in [
    ("", "adapter_config.json"),
    ("runs/rte/adapter_config.json", "is no directory, as an adapter is"),
    (LONG, "too long"),
    ("a\0b", "a"),
    ("a\nb", "no local directory"),
    ("../../x", "no directory"),
    ("/dev/zero", "/dev/zero"),
    ("loop", "loop"),
    ("paper", "cannot be reached"),
    ("runs/mnli", "--stage adapter --task mnli"),
    ("nowhere/mnli", "no local directory"),
    ("data/mnli", "--stage adapter --task mnli"),
    ("runs/fusion-rte", "it is a run of --stage fusion: leave it out"),
    ("data", "so it holds no adapter: leave it out"),
]:
    case(
        f"--adapters {value[:9]!r}",
        say,
        "--stage",
        "fusion",
        "--adapters",
        "runs/rte",
        value,
        change=link("loop", "loop"),
    )

case("bert.py without arguments", "SOURCE", command="bert.py")
case("bert.py with an option", "SOURCE", "--model", command="bert.py")
case("bert.py: a text that is none", "codec", "model", "a\udcff", command="bert.py")
for value in ("a\0b", LONG, "a\nb", "loop", "/dev/zero", "model/config.json"):
    case(
        f"bert.py {value[:9]!r}",
        value[:9].split()[0].split("\0")[0],
        value,
        command="bert.py",
        change=link("loop", "loop"),
    )
case(
    "--seeds in the directory of a run",
    "is itself a run: --seeds needs another directory",
    "--stage",
    "adapter",
    "--seeds",
    "0",
    "1",
    "--overwrite",
    "--out",
    "runs/rte",
)
case("data.py: no such option", "--speed", "--speed", "9", command="data.py")
case("data.py: one text too many", "unrecognized", "sst2", command="data.py")
case("publish.py without a run", "run", command="publish.py")
for value in (LONG, "loop", "/dev/zero", "runs/rte/config.json", "runs/../../x"):
    case(
        f"publish.py {value[:12]!r}",
        value[:9].split("\0")[0],
        value,
        command="publish.py",
        change=link("loop", "loop"),
    )
case(
    "publish.py: --out is a loop",
    "loop",
    "runs/rte",
    "--out",
    "loop",
    command="publish.py",
    change=link("loop", "loop"),
)
case(
    "publish.py: --out is in a loop",
    "loop",
    "runs/rte",
    "--out",
    "loop/x",
    command="publish.py",
    change=link("loop", "loop"),
)
case(
    "publish.py: --out below a file",
    "config.json",
    "runs/rte",
    "--out",
    "runs/rte/config.json/x",
    command="publish.py",
)
for option, value in [
    ("--runs", "0"),
    ("--runs", "few"),
    ("--threads", "0"),
    ("--peer-python", "no/such/python"),
]:
    case(f"loading.py {option} {value}", option, option, value, command="loading.py")
case("demo.py --seed", "--seed", "--seed", "few", command="demo.py")
case(
    "demo.py --out is a file", "model/config.json", "--out", "model/config.json", command="demo.py"
)
case(
    "demo.py --out is a loop",
    "loop",
    "--out",
    "loop",
    command="demo.py",
    change=link("loop", "loop"),
)
LOOP = link("loop", "loop")
for command in ("evaluate.py", "predict.py", "figure4.py", "prune.py"):
    first = {"prune.py": ["--keep", "1"]}.get(command, [])
    texts = ["a text", "another"] if command == "predict.py" else []
    for value in (LONG, "loop", "/dev/zero", "runs/rte/config.json", "runs/../../x", "a\0b", ""):
        say = "no finished run" if value != LONG else "too long"
        case(
            f"{command}: a run called {value[:12]!r}",
            say,
            *first,
            value,
            *texts,
            command=command,
            change=LOOP,
        )
    words = [*first, "runs/fusion-rte", *texts]
    for option, value, say in [
        ("--device", "tpu", "--device"),
        ("--model", "loop", "loop"),
        ("--model", LONG, "too long"),
        ("--model", "data", "no encoder in"),
        ("--nonsense", "1", "--nonsense"),
    ]:
        case(
            f"{command} {option} {value[:9]}",
            say,
            *words,
            option,
            value,
            command=command,
            change=LOOP,
        )
    for value in ("loop", "nowhere", "/dev/zero", LONG) if not texts else ():
        say = value if value != LONG else "too long"
        case(
            f"{command} --data-dir {value[:9]}",
            say,
            *words,
            "--data-dir",
            value,
            command=command,
            change=LOOP,
        )
for command in ("figure4.py", "prune.py", "table1", "architecture_search"):
    words = {"figure4.py": ["runs/fusion-rte"], "prune.py": ["runs/fusion-rte", "--keep", "1"]}.get(
        command, []
    )
    for value, say in [
        ("loop", "loop"),
        ("loop/x", "loop"),
        ("model/config.json", "config.json"),
        ("/dev/zero", "/dev/zero"),
        ("model/config.json/x", "config.json"),
        (LONG, "too long"),
        ("/proc/x", "/proc"),
    ]:
        case(
            f"{command} --out {value[:19]}",
            say,
            *words,
            "--out",
            value,
            command=command,
            change=LOOP,
        )
for command in ("table1", "architecture_search"):
    for option, value, say in [
        ("--model", "loop", "loop"),
        ("--model", LONG, "too long"),
        ("--data-dir", "loop", "loop"),
        ("--data-dir", LONG, "too long"),
        ("--tasks", "", "unknown task"),
        ("--tasks", LONG, "too long"),
        ("--tasks", "../data/rte", "unknown task"),
        ("--seeds", str(2**32), "--seed"),
        ("--jobs", "many", "--jobs"),
        ("--launch", "", "--launch"),
        ("--x", "1", "--x"),
    ]:
        case(f"{command} {option} {value[:12]!r}", say, option, value, command=command, change=LOOP)
    case(
        f"{command}: rows of null",
        "line 1: not a JSON object",
        command=command,
        change=put("data/rte/train.jsonl", b"null\n"),
    )
case("prune.py without an aim", "--keep, --leave-out", "runs/fusion-rte", command="prune.py")
case(
    "prune.py --out .",
    "already there",
    "runs/fusion-rte",
    "--keep",
    "1",
    "--out",
    ".",
    command="prune.py",
)
case(
    "prune.py of an adapter's run",
    "only fusion runs",
    "runs/rte",
    "--keep",
    "1",
    command="prune.py",
)
case("figure4.py of an adapter's run", "only fusion runs", "runs/rte", command="figure4.py")
case(
    "figure4.py: an empty baseline",
    "no finished run",
    "runs/fusion-rte",
    "--baseline",
    "model",
    command="figure4.py",
)

# --------------------------------------------------------------------------------------------------
# Data


def pair(label, a=b'"a"'):
    return b'{"sentence1": %s, "sentence2": "b", "label": %s}\n' % (a, label)


for name, content, say in [
    ("nested 100,000 deep", pair(DEEP), "line 1"),
    ("nested 1,000 deep, in line 2", pair(b"0") + pair(DEEP[99_000:101_000]), "line 2"),
    ("objects nested 100,000 deep", pair(b'{"a":' * 100_000 + b"1" + b"}" * 100_000), "line 1"),
    ("null", b"null\n", "line 1: not a JSON object"),
    ("null in line 3", pair(b"0") * 2 + b"null\n", "line 3: not a JSON object"),
    ("numbers", b"1\n2\n", "line 1: not a JSON object"),
    ("lists", b"[]\n[]\n", "line 1: not a JSON object"),
    ("empty objects", b"{}\n{}\n", "is empty"),
    ("blank lines", b"\n \n\n", "is empty"),
    ("a key twice", pair(b'0, "label": 1'), "twice"),
    ("NaN", pair(b"NaN"), "label nan"),
    ("Infinity", pair(b"-Infinity"), "label -inf"),
    ("an integer of 400 digits", pair(b"1" + b"0" * 400), "line 1"),
    ("an integer of 5,000 digits", pair(b"1" + b"0" * 5000), "line 1"),
    ("an integer of 5,000 digits in broken JSON", pair(b"1" + b"0" * 5000) + b"{", "line 1"),
    ("label 2^63", pair(b"9223372036854775808"), "line 1"),
    ("label 0.0", pair(b"0.0"), "label 0.0"),
    ("label null", pair(b"null") * 2, "'label' is missing"),
    ("label a list", pair(b"[0]"), "label [0]"),
    ("label an object", pair(b'{"a": 1}'), "label {'a': 1}"),
    ("label ''", pair(b'""'), "label ''"),
    ("labels of two kinds", pair(b"0") + pair(b'"x"'), "line 2: label 'x'"),
    ("label a long text", pair(b'"' + b"no " * 100_000 + b'"'), "label 'no no"),
    ("text a list", pair(b"0", b'["a"]'), "'sentence1' holds list"),
    ("text an object", pair(b"0", b'{"a": 1}'), "'sentence1' holds dict"),
    ("text true", pair(b"0", b"true"), "'sentence1' holds bool"),
    ("text null", pair(b"0", b"null"), "'sentence1' is missing"),
    ("text NaN", pair(b"0", b"NaN"), "'sentence1' is missing"),
    (
        "text of 1,000,001 characters",
        pair(b"0", b'"' + b"a" * 1_000_001 + b'"'),
        "1,000,001 characters",
    ),
    ("half a surrogate pair", pair(b"0", b'"\\ud800"'), "surrogate"),
    ("NUL in a text", pair(b"0", b'"a\0b"'), "line 1"),
    ("cut off", pair(b"0") + pair(b"0")[:-9], "line 2: broken JSON"),
    ("invalid UTF-8", pair(b"0") + pair(b"0", b'"caf\xe9"'), "not UTF-8"),
    ("a surrogate in UTF-8", pair(b"0", b'"\xed\xa0\x80"'), "not UTF-8"),
    ("UTF-16", pair(b"0").decode().encode("utf-16"), "not UTF-8"),
    ("UTF-32", pair(b"0").decode().encode("utf-32"), "not UTF-8"),
    ("compressed", gzip.compress(pair(b"0")), "not UTF-8"),
    ("a picture", b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "not UTF-8"),
    ("zeros", bytes(10_000), "line 1"),
    (
        "many columns",
        json.dumps(dict.fromkeys(map(str, range(2000)), 1)).encode(),
        "no column 'label'",
    ),
]:
    case(
        f"rows: {name}", ["data/rte/train.jsonl", say], change=put("data/rte/train.jsonl", content)
    )
for name in ("nested 100,000 deep", "null", "half a surrogate pair", "a picture", "label a list"):
    command, change, arguments, say = CASES[f"rows: {name}"]
    case(f"data.py rows: {name}", say, *arguments, change=change, command="data.py")

for name, file, content, say in [
    (
        "CSV, unclosed quote",
        "csv",
        'sentence1,sentence2,label\na,b,0\n"c,d,1\n',
        "line 3: unexpected end of data",
    ),
    ("CSV, one value too many", "csv", "sentence1,sentence2,label\na,b,0\nc,d,1,2\n", "line 3"),
    ("CSV, label missing", "csv", "sentence1,sentence2,label\na,b,\n", "label ''"),
    ("CSV, header alone", "csv", "sentence1,sentence2,label\n", "is empty"),
    ("CSV, no header", "csv", "a,b,0\nc,d,1\n", "no column 'label'"),
    (
        "CSV, a column twice",
        "csv",
        "sentence1,sentence1,label\na,b,0\n",
        "line 1: two columns are called 'sentence1'",
    ),
    ("CSV, UTF-16", "csv", "sentence1,sentence2,label\na,b,0\n".encode("utf-16"), "not UTF-8"),
    (
        "CSV, more values than names in line 2",
        "csv",
        "sentence1,sentence2,label\na,b,0,1\nc,d,1,2\n",
        "line 2: 4 fields",
    ),
    (
        "CSV, one value too few",
        "csv",
        "sentence1,sentence2,label\na,b,0\n\nc,1\n",
        "line 4: 2 fields, the first line has 3",
    ),
    (
        "CSV, 0.0 behind a text of two lines",
        "csv",
        'sentence1,sentence2,label\n"a\nb",b,0\nc,d,0.0\n',
        "line 4: label '0.0'",
    ),
    ("CSV, binary", "csv", bytes(range(256)) * 9, "train.csv"),
    ("CSV, empty", "csv", "", "is empty"),
    ("TSV that is CSV", "tsv", "sentence1,sentence2,label\na,b,0\n", "no column 'label'"),
    ("parquet that is text", "parquet", pair(b"0"), "not a readable parquet file"),
    ("parquet, empty", "parquet", b"", "is empty"),
    ("JSON, nested 100,000 deep", "json", b'{"label": ' + DEEP + b"}", "line 1"),
    ("JSON, a list nested 100,000 deep", "json", b'[{"label": ' + DEEP + b"}]", "line 1"),
    ("JSON, null", "json", b"null", "not a JSON object"),
    ("JSON, a list of null", "json", b"[null]", "not a JSON object"),
    ("JSON, a list of numbers", "json", b"[1, 2]", "not a JSON object"),
    ("JSON, an empty list", "json", b"[]", "is empty"),
    (
        "JSON, rows in a field",
        "json",
        json.dumps({"data": [{"label": 0}]}),
        "no column 'label'; it has data",
    ),
    ("JSON, broken in line 3", "json", '[{"label": 0},\n\n"a"', "line 3: broken JSON"),
]:
    change = both(
        lambda: Path("data/rte/train.jsonl").unlink(), put(f"data/rte/train.{file}", content)
    )
    case(f"rows: {name}", [f"data/rte/train.{file}", say], change=change)


def damaged_parquet(start, end):
    def change():
        Path("data/rte/train.jsonl").unlink()
        rows = datasets.Dataset.from_list(
            [{"sentence1": str(i), "sentence2": "b", "label": 0} for i in range(500)]
        )
        rows.to_parquet("data/rte/train.parquet")
        content = Path("data/rte/train.parquet").read_bytes()
        start_, end_ = start % len(content), end % len(content)
        Path("data/rte/train.parquet").write_bytes(
            content[:start_] + b"\xff" * (end_ - start_) + content[end_:]
        )

    return change


case("rows: parquet, damaged at its end", "train.parquet", change=damaged_parquet(-60, -20))
case("rows: parquet, damaged at its start", "train.parquet", change=damaged_parquet(4, 60))

A, B = {"text_a": "a", "label": "x"}, {"text_a": "b", "label": "y"}
for name, given, say in [
    ("label null", [A, {**A, "label": None}], "line 2: label None"),
    ("labels are lists", [{**A, "label": ["x"]}], "label ['x']"),
    ("labels are objects", [{**A, "label": {"x": 1}}], "label {'x': 1}"),
    ("labels are 0.5", [{**A, "label": 0.5}, {**B, "label": 1}], "label 0.5"),
    (
        "text_b null",
        [{**A, "text_b": "b"}, {**B, "text_b": None}],
        "line 2: column 'text_b' is missing",
    ),
    ("text_a null", [{**A, "text_a": None}, B], "column 'text_a' is missing"),
    ("choices null", [{"choices": None, "label": 0}], "'choices' must be a list"),
    ("choices a text", [{"choices": "ab", "label": 0}], "'choices' must be a list"),
    (
        "choices an object",
        [{"choices": {"a": "b", "c": "d"}, "label": 0}],
        "'choices' must be a list",
    ),
    ("one choice", [{"choices": ["a"], "label": 0}], "'choices' must be a list of at least two"),
    ("choices of null", [{"choices": ["a", None], "label": 0}], "does not hold a list of texts"),
    ("choices of numbers", [{"choices": [1, 2], "label": 0}], "does not hold a list of texts"),
    (
        "choices of lists",
        [{"choices": [["a"], ["b"]], "label": 0}],
        "does not hold a list of texts",
    ),
    (
        "choices missing in line 2",
        [{"choices": ["a", "b"], "label": 0}, {"label": 0}],
        "line 2: no column 'choices'",
    ),
    ("choice -1", [{"choices": ["a", "b"], "label": -1}], "the label is hidden (-1)"),
    ("choice true", [{"choices": ["a", "b"], "label": True}], "label True"),
    ("choice 1.0", [{"choices": ["a", "b"], "label": 1.0}], "label 1.0"),
]:
    case(f"own task: {name}", ["data/mine/train.jsonl", say], "--task", "mine", change=rows(*given))
for name, row in [
    ("null", ["a", None, "c", "d"]),
    ("a text", "abcd"),
    ("an object", dict(zip("abcd", "abcd", strict=True))),
    ("of lists", [["a"], ["b"], ["c"], ["d"]]),
]:
    change = rows({"ctx_a": "a", "ctx_b": "b", "endings": row, "label": "0"}, task="hellaswag")
    case(
        f"hellaswag: endings {name}",
        "'endings' does not hold a list of texts",
        "--task",
        "hellaswag",
        change=change,
    )
for name, row in [
    ("a text", {"text": "abcde"}),
    ("without text", {"label": ["A"]}),
    ("a list", ["a", "b", "c", "d", "e"]),
]:
    change = rows({"question": "q", "choices": row, "answerKey": "A"}, task="commonsense_qa")
    case(f"commonsense_qa: choices {name}", "choices", "--task", "commonsense_qa", change=change)

for kind in KINDS:
    case(f"train.jsonl is a {kind}", "no train split", change=special("data/rte/train.jsonl", kind))
case("train.jsonl is a loop", "no train split", change=link("data/rte/train.jsonl", "train.jsonl"))
case("train.jsonl leads nowhere", "no train split", change=link("data/rte/train.jsonl", "nowhere"))
case("train.jsonl is /dev/zero", "no train split", change=link("data/rte/train.jsonl", "/dev/zero"))
case(
    "train.jsonl.gz",
    "no train split",
    change=both(special("data/rte/train.jsonl", "nothing"), put("data/rte/train.jsonl.gz", b"x")),
)
case(
    "a file in the task's place",
    "not a directory",
    change=both(special("data/rte", "nothing"), put("data/rte", b"x")),
)
case(
    "validation.jsonl of a wrong kind",
    ["validation.jsonl", "line 1"],
    change=put("data/rte/validation.jsonl", b"1\n"),
)
if os.geteuid() != 0:  # root may read everything
    case(
        "unreadable train.jsonl",
        "train.jsonl",
        change=special("data/rte/train.jsonl", "unreadable"),
    )
    case("unreadable config.json", "config.json", change=special("model/config.json", "unreadable"))

# --------------------------------------------------------------------------------------------------
# Encoders

for values in [
    {"vocab_size": 9_999_999, "hidden_size": 9_999_998, "intermediate_size": 9_999_999},  # 400 TB
    {"max_position_embeddings": 9_999_999},
    {"num_attention_heads": 0},
    {"hidden_size": 1e2},
    {"num_hidden_layers": 10**400},
    {"model_type": "a\nb"},
    {"hidden_act": LONG},
]:
    name = next(iter(values))
    case(
        f"config.json: {name} {str(values[name])[:9]!r}",
        "model",
        change=edit("model/config.json", **values),
    )
for name, content, say in [
    ("nested", DEEP, "config.json"),
    ("NaN", b"NaN", "expected a JSON object"),
    ("UTF-16", "{}".encode("utf-16"), "not JSON"),
]:
    case(
        f"config.json: {name}",
        say,
        "model",
        change=put("model/config.json", content),
        command="bert.py",
    )
for kind in KINDS:
    case(
        f"config.json is a {kind}", "no encoder in model", change=special("model/config.json", kind)
    )
    case(
        f"model.safetensors is a {kind}",
        "no encoder in model",
        change=special("model/model.safetensors", kind),
    )
case(
    "model.safetensors is a loop",
    "no encoder",
    change=link("model/model.safetensors", "model.safetensors"),
)
case(
    "model.safetensors is /dev/zero",
    "no encoder",
    change=link("model/model.safetensors", "/dev/zero"),
)
case("config.json is /dev/zero", "no encoder", change=link("model/config.json", "/dev/zero"))

SPECIAL = VOCABULARY[:5]
TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"},
}
MANY = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "a", "type_id": 0}}] * 60,
    "pair": [{"SpecialToken": {"id": "a", "type_id": 0}}] * 60,
    "special_tokens": {"a": {"id": "a", "ids": [0], "tokens": ["a"]}},
}
for name, file, content, say in [
    ("empty vocab.txt", "vocab.txt", b"", "vocab.txt has no [PAD]"),
    ("binary vocab.txt", "vocab.txt", bytes(range(256)), "cannot be read"),
    ("vocab.txt of one line", "vocab.txt", " ".join(VOCABULARY), "vocab.txt has no [PAD]"),
    ("vocab.txt in UTF-16", "vocab.txt", "\n".join(VOCABULARY).encode("utf-16"), "cannot be read"),
    ("tokenizer_config.json is a list", "tokenizer_config.json", b"[1]", "cannot be read"),
    ("tokenizer_config.json is nested", "tokenizer_config.json", DEEP, "cannot be read"),
    ("tokenizer.json is {}", "tokenizer.json", b"{}", "cannot be read"),
    ("tokenizer.json is nested", "tokenizer.json", DEEP, "cannot be read"),
    ("tokenizer.json is binary", "tokenizer.json", bytes(range(256)), "cannot be read"),
    ("tokenizer.json adds no [CLS]", "tokenizer.json", json.dumps(TOKENIZER), "adds 0 tokens"),
    (
        "tokenizer.json adds 60 tokens",
        "tokenizer.json",
        json.dumps({**TOKENIZER, "post_processor": MANY}),
        "adds 60 tokens",
    ),
    (
        "tokenizer.json knows no [UNK]",
        "tokenizer.json",
        json.dumps({**TOKENIZER, "model": {**TOKENIZER["model"], "vocab": {"a": 0}}}),
        "cannot be read",
    ),
    (
        "tokenizer.json has gaps",
        "tokenizer.json",
        json.dumps(
            {**TOKENIZER, "model": {**TOKENIZER["model"], "vocab": {"a": 9999, "[UNK]": 1}}}
        ),
        "knows 10000 tokens",
    ),
]:
    case(name, ["model", say], change=put(f"model/{file}", content))
for name, vocab, merges, say in [
    ("ids beyond the encoder", {"a": 10**6}, "", "tokens, the encoder"),
    ("no <s>", {str(i): i for i in range(len(VOCABULARY))}, "", "tokens, the encoder"),
    ("negative ids", {"a": -1}, "", "cannot be read"),
    ("a list", ["a"], "", "cannot be read"),
    ("merges of nothing", {"a": 0, "b": 1}, "#version: 0.2\na b\n", "cannot be read"),
]:
    change = both(
        lambda: Path("model/vocab.txt").unlink(),
        put("model/vocab.json", json.dumps(vocab)),
        put("model/merges.txt", merges),
    )
    case(f"vocab.json: {name}", ["model", say], change=change)
one_segment = both(
    edit("model/config.json", type_vocab_size=1),
    tensors(
        "model/model.safetensors", lambda name, t: t[:1].clone() if "token_type" in name else t
    ),
)
case("an encoder of one segment", "2 kinds of segments, the encoder 1", change=one_segment)
case(
    "bert.py: an encoder of one segment",
    "2 kinds of segments",
    "model",
    change=one_segment,
    command="bert.py",
)
for value in (float("nan"), float("inf")):
    change = tensors(
        "model/model.safetensors", spoil(value, "layer.1.attention.output.dense.weight")
    )
    for stage in ("head", "adapter"):
        case(
            f"an encoder with {value}, stage {stage}",
            "attention_dense.weight",
            "--stage",
            stage,
            change=change,
        )
    case(
        f"bert.py: an encoder with {value}",
        "attention_dense.weight",
        "model",
        change=change,
        command="bert.py",
    )
case(
    "an encoder whose numbers overflow",
    "the loss is nan",
    change=tensors("model/model.safetensors", lambda name, t: t * 1e38),
)

# --------------------------------------------------------------------------------------------------
# Adapters, fusions, runs

FUSE = ["--stage", "fusion", "--adapters", "runs/rte", "runs/sst2"]
CONFIG, WEIGHTS = "runs/rte/adapter_config.json", "runs/rte/adapter.safetensors"
for part in ("adapter_down.0.weight", "adapter_up.bias"):
    for value in (float("nan"), float("inf"), float("-inf")):
        case(
            f"adapter: {value} in {part}",
            [part, "not finite", WEIGHTS],
            *FUSE,
            change=tensors(WEIGHTS, spoil(value, part)),
        )
for name, function, say in [
    ("of integers", lambda name, t: t.long(), "must be a float"),
    ("of complex numbers", lambda name, t: t.to(torch.complex64), "must be a float"),
    ("in float64 beyond float32", lambda name, t: t.double() + 1e300, "not finite"),
    (
        "in float8 with NaN",
        lambda name, t: spoil(float("nan"))(name, t).to(torch.float8_e4m3fn),
        "not finite",
    ),
    ("of one dimension more", lambda name, t: t[None].clone(), "here it must be a float"),
    ("empty", lambda name, t: t[:0].clone(), "here it must be a float"),
]:
    case(f"adapter: tensors {name}", [WEIGHTS, say], *FUSE, change=tensors(WEIGHTS, function))
for name, content in [
    ("nested", DEEP),
    ("null", b"null"),
    ("UTF-16", "{}".encode("utf-16")),
    ("binary", bytes(range(256))),
    ("5,000 digits", b'{"hidden_size": ' + b"9" * 5000 + b"}"),
    ("empty", b""),
]:
    case(f"adapter_config.json: {name}", CONFIG, *FUSE, change=put(CONFIG, content))
for name in ("../x", "/x", "..", "a\0b", "a\nb", LONG, "", ["a"], 1e400, {}):
    case(
        f"adapter called {str(name)[:9]!r}",
        [CONFIG, "cannot be an adapter's name"],
        *FUSE,
        change=edit(CONFIG, name=name),
    )
for values in [
    {"reduction_factor": float("nan")},
    {"reduction_factor": 10**400},
    {"reduction_factor": 0.1},
    {"leave_out": [10**400] * 9},
    {"non_linearity": "x" * 10**6},
    {"residual_before_ln": [[]]},
    {"original_ln_before": "yes"},
    {"reduction_factor": {"default": {}}},
]:
    name = next(iter(values))
    say = "float" if values[name] in (10**400, 0.1) else name
    case(
        f"adapter_config.json: {name} {str(values[name])[:9]}",
        ["runs/rte", say],
        *FUSE,
        change=edit(CONFIG, inside="config", **values),
    )
del CASES[
    "adapter_config.json: leave_out [10000000"
]  # layers that the encoder does not have are no error
for kind in KINDS:
    case(
        f"adapter_config.json is a {kind}",
        "has no adapter_config.json",
        *FUSE,
        change=special(CONFIG, kind),
    )
    case(f"adapter.safetensors is a {kind}", "no weights", *FUSE, change=special(WEIGHTS, kind))
case(
    "adapter.safetensors is a loop",
    "no weights",
    *FUSE,
    change=link(WEIGHTS, "adapter.safetensors"),
)
case("--out is the adapter", "would replace", *FUSE, "--out", "runs/rte", "--overwrite")

HEAD, FUSION = "runs/rte/head_config.json", "runs/fusion-rte/adapter_fusion_config.json"
for name, run, say, change in [
    (
        "head with NaN",
        "rte",
        "not finite",
        tensors("runs/rte/model_head.safetensors", spoil(float("nan"))),
    ),
    ("head of other labels", "rte", "model_head", edit(HEAD, inside="config", num_labels=3)),
    ("head of 10^400 labels", "rte", "num_labels", edit(HEAD, inside="config", num_labels=10**400)),
    ("head of no labels", "rte", "num_labels", edit(HEAD, inside="config", num_labels=[2])),
    ("head, layers a list", "rte", "layers", edit(HEAD, inside="config", layers=[2])),
    (
        "head, activation an object",
        "rte",
        "activation",
        edit(HEAD, inside="config", activation_function={}),
    ),
    ("head config nested", "rte", "head_config.json", put(HEAD, DEEP)),
    (
        "fusion with NaN",
        "fusion-rte",
        "not finite",
        tensors("runs/fusion-rte/model_adapter_fusion.safetensors", spoil(float("nan"), "value")),
    ),
    (
        "fusion with infinity",
        "fusion-rte",
        "not finite",
        tensors(
            "runs/fusion-rte/model_adapter_fusion.safetensors", spoil(float("inf"), "key.bias")
        ),
    ),
    (
        "fusion of other shapes",
        "fusion-rte",
        "must be a float",
        tensors("runs/fusion-rte/model_adapter_fusion.safetensors", lambda name, t: t[:-1].clone()),
    ),
    ("fusion config nested", "fusion-rte", "adapter_fusion_config.json", put(FUSION, DEEP)),
    ("fusion of ../x", "fusion-rte", "../x", edit(FUSION, adapter_names=["rte", "../x"])),
    ("fusion of NUL", "fusion-rte", "fused", edit(FUSION, adapter_names=["a\0b"])),
    ("fusion of 300 characters", "fusion-rte", "fused", edit(FUSION, adapter_names=[LONG])),
    ("fusion of nothing", "fusion-rte", "fusion", edit(FUSION, adapter_names=[], name=[])),
    (
        "fusion, dropout NaN",
        "fusion-rte",
        "dropout_prob",
        edit(FUSION, inside="config", dropout_prob=float("nan")),
    ),
    (
        "fusion without an adapter's copy",
        "fusion-rte",
        "sst2",
        lambda: shutil.rmtree("runs/fusion-rte/adapters/sst2"),
    ),
    ("run of no stage", "rte", "config.json", edit("runs/rte/config.json", stage=["adapter"])),
    (
        "run of another stage",
        "rte",
        "adapter_fusion_config.json",
        edit("runs/rte/config.json", stage="fusion"),
    ),
    (
        "run without a model",
        "rte",
        "model is missing or wrong",
        edit("runs/rte/config.json", remove=["model"]),
    ),
    ("run with model 5", "rte", "config.json", edit("runs/rte/config.json", model=5)),
    ("run with model NUL", "rte", "no local directory", edit("runs/rte/config.json", model="a\0b")),
    ("run with model ../x", "rte", "../x", edit("runs/rte/config.json", model="../x")),
    (
        "run whose task is ../x",
        "rte",
        "cannot be an adapter's name",
        edit("runs/rte/config.json", task="../x"),
    ),
    ("run whose task is another", "rte", "sst2", edit("runs/rte/config.json", task="sst2")),
    (
        "run whose task is a number",
        "rte",
        "task is missing or wrong",
        edit("runs/rte/config.json", task=5),
    ),
    (
        "run without labels",
        "rte",
        "labels is missing or wrong",
        edit("runs/rte/config.json", remove=["labels"]),
    ),
    ("run with labels 5", "rte", "config.json", edit("runs/rte/config.json", labels=5)),
    ("run, config.json nested", "rte", "config.json", put("runs/rte/config.json", DEEP)),
    (
        "run, config.json missing",
        "rte",
        "config.json",
        lambda: Path("runs/rte/config.json").unlink(),
    ),
    ("run, metrics.json a list", "rte", "metrics.json", put("runs/rte/metrics.json", b"[1]")),
    (
        "run, metrics.json cut off",
        "rte",
        "metrics.json",
        put("runs/rte/metrics.json", b'{"accuracy": 0.'),
    ),
    ("run, accuracy a text", "rte", "metrics.json", edit("runs/rte/metrics.json", accuracy="high")),
    ("run, accuracy a list", "rte", "metrics.json", edit("runs/rte/metrics.json", accuracy=[1])),
]:
    case(f"publish.py: {name}", say, f"runs/{run}", change=change, command="publish.py")
    if run == "fusion-rte":
        case(f"figure4.py: {name}", say, f"runs/{run}", change=change, command="figure4.py")
        case(
            f"prune.py: {name}",
            say,
            f"runs/{run}",
            "--keep",
            "1",
            change=change,
            command="prune.py",
        )
    elif "metrics.json" not in say and "../x" not in name:  # neither is read
        case(
            f"predict.py: {name}",
            say,
            f"runs/{run}",
            "a text",
            "another",
            change=change,
            command="predict.py",
        )
        case(f"evaluate.py: {name}", say, f"runs/{run}", change=change, command="evaluate.py")
for name in ("../rte", "../../rte", "/rte", "a\0b", "a\nb", LONG):
    case(
        f"publish.py: a fusion run of {name[:9]!r}",
        "cannot be an adapter's name",
        "runs/fusion-rte",
        command="publish.py",
        change=edit("runs/fusion-rte/config.json", adapters=["rte", "sst2", name]),
    )
for kind in ("directory", "fifo"):
    case(
        f"publish.py: config.json is a {kind}",
        "config.json",
        "runs/rte",
        change=special("runs/rte/config.json", kind),
        command="publish.py",
    )
    case(
        f"publish.py: metrics.json is a {kind}",
        "no finished run",
        "runs/rte",
        command="publish.py",
        change=special("runs/rte/metrics.json", kind),
    )

for name, content in [
    ("code", Writes),
    ("tensors and code", lambda: {"config": {}, "trained": {"x": Writes()}}),
    ("another kind", {"x": torch.ones(2)}),
    ("a list", [1, 2]),
    ("a tensor", torch.ones(2)),
    ("nothing in it", {"config": {}}),
    ("a state without weights", {"config": {}, "trained": {}, "optimizer": {}, "random": None}),
    ("config a list", {"config": [1]}),
    ("an unknown setting", {"config": {"speed": 9}}),
]:
    case(
        f"resume.pt: {name}", "out/resume.pt", "--resume", change=pickled("out/resume.pt", content)
    )
for name, content in [("empty", b""), ("binary", bytes(range(256)) * 99), ("text", b"resume")]:
    change = both(put("out/resume.pt", content), IN_OUT)
    case(f"resume.pt: {name}", "out/resume.pt", "--resume", change=change)
for kind in ("directory", "fifo"):
    change = both(IN_OUT, special("out/resume.pt", kind))
    case(f"resume.pt is a {kind}", "out/resume.pt", "--resume", change=change)
LOG = put("out/log.jsonl", b'{"epoch": 1}\n')
for name, change in [
    ("a log.jsonl of another program", LOG),
    ("an encoder and a log.jsonl", both(LOG, put("out/model.safetensors", b"weights"))),
    ("another's config.json", both(LOG, put("out/config.json", b'{"model_type": "bert"}'))),
    ("an empty log.jsonl and notes", both(put("out/log.jsonl", b""), put("out/notes", b"x"))),
    ("a link for config.json", both(LOG, link("out/config.json", "../runs/rte/config.json"))),
    ("a link for log.jsonl", link("out/log.jsonl", "../runs/rte/log.jsonl")),
]:
    for option in ("--overwrite", "--resume"):
        case(f"{option} of a directory with {name}", "out", option, change=change)
case("--lr 1e38 beside a stranger's log", "holds other files", "--lr", "1e38", change=LOG)
case(
    "--resume: config.json {}",
    "config.json is not",
    "--resume",
    change=put("out/config.json", b"{}"),
)
case(
    "--resume: config.json is damaged",
    "config.json",
    "--resume",
    change=put("out/config.json", b""),
)
for content in (b"[1]", b"{", DEEP):
    case(
        f"--resume: metrics.json {content[:2]}",
        "metrics.json",
        "--resume",
        "--out",
        "runs/rte",
        change=put("runs/rte/metrics.json", content),
    )

for file, command, *arguments in [
    ("model/pytorch_model.bin", "train.py"),
    ("model/pytorch_model.bin", "bert.py", "model"),
    ("runs/rte/pytorch_adapter.bin", "train.py", *FUSE),
    ("runs/rte/pytorch_model_head.bin", "publish.py", "runs/rte"),
    ("runs/fusion-rte/pytorch_model_adapter_fusion.bin", "publish.py", "runs/fusion-rte"),
]:
    safe = file.replace("pytorch_", "").replace(".bin", ".safetensors")
    for name, content in [
        ("code", Writes),
        ("tensors and code", lambda: {"x": torch.ones(2), "y": Writes()}),
    ]:
        case(
            f"{command} {file}: {name}",
            [file, "refused"],
            *arguments,
            change=pickled(file, content, remove=[safe]),
            command=command,
        )

# --------------------------------------------------------------------------------------------------
# Another encoder of the same shape, outputs that are not finite, labels that look alike

OTHER = tensors("model/model.safetensors", lambda name, t: t * 1.5)
HERE = both(  # adapters of these runs are on model/
    *(edit(f"runs/{run}/config.json", model="model") for run in ("rte", "sst2"))
)


def shuffled_vocabulary():
    words = Path("model/vocab.txt").read_text().split()
    put("model/vocab.txt", "\n".join(words[:5] + words[:4:-1]) + "\n")()


for name, change, say in [
    ("other weights", OTHER, ["other weights", "--allow-other-encoder"]),
    ("weights that are gone and new", both(OTHER, OTHER), "--allow-other-encoder"),
]:
    case(f"fusion of adapters of {name}", say, *FUSE, change=both(HERE, change))
for command, *arguments in (
    ("evaluate.py", "runs/rte"),
    ("predict.py", "runs/rte", "a text", "another"),
    ("figure4.py", "runs/fusion-rte"),
    ("prune.py", "runs/fusion-rte", "--keep", "1"),
):
    for name, change in (("encoder", OTHER), ("tokenizer", shuffled_vocabulary)):
        case(
            f"{command}: another {name}",
            [f"another {name} than", "--allow-other-encoder"],
            *arguments,
            "--model",
            "model",
            change=change,
            command=command,
        )
    case(
        f"{command}: outputs that are not finite",
        "not finite",
        *arguments,
        "--model",
        "model",
        "--allow-other-encoder",
        change=tensors("model/model.safetensors", lambda name, t: t * 1e38),
        command=command,
    )
for name, labels in [
    ("with a blank", ("yes", "yes ")),
    ("composed and not", ("caf\u00e9", "cafe\u0301")),
]:
    case(
        f"labels {name}",
        ["data/mine/train.jsonl", "make them one"],
        "--task",
        "mine",
        change=rows(*({"text_a": "a", "label": label} for label in labels)),
    )
case(
    "figure4.py: figures that are there",
    "--overwrite",
    "runs/fusion-rte",
    change=put("out/summary.txt", b"mine"),
    command="figure4.py",
)
case(
    "own task: no column label",
    ["data/mine/train.jsonl", "no column 'label'; it has target, text_a"],
    "--task",
    "mine",
    change=rows({"target": "x", "text_a": "a"}),
)
for name in ("keys", "a.b", "a,b"):
    case(
        f"a task whose run could not be evaluated {name!r}",
        "cannot be an adapter's name",
        "--task",
        name,
        change=rows({"text_a": "a", "label": 0}, {"text_a": "b", "label": 1}, task=name),
    )
for name in ('a"); import os; ("', "a|b", "a`b"):
    case(
        f"publish.py: an encoder called {name}",
        "no name for an encoder",
        "runs/rte",
        "--encoder",
        name,
        command="publish.py",
    )
case(
    "the cache of datasets cannot be written",
    ["the cache of `datasets`", "HF_DATASETS_CACHE"],
    change=lambda: cache_in("/proc"),
)
case(
    "tokenizer.json with a pattern that does not end",
    ["model", "retry-limit"],
    change=put(
        "model/tokenizer.json",
        json.dumps(
            {
                **TOKENIZER,
                "post_processor": {"type": "BertProcessing", "sep": ["a", 0], "cls": ["a", 0]},
                "pre_tokenizer": {
                    "type": "Split",
                    "pattern": {"Regex": "(a+)+$"},
                    "behavior": "Isolated",
                    "invert": False,
                },
            }
        ),
    ),
)
case(
    "two adapters whose names differ in case alone",
    "two adapters are called 'RTE'",
    *FUSE,
    "runs/RTE",
    change=both(
        lambda: shutil.copytree("runs/rte", "runs/RTE"),
        edit("runs/RTE/adapter_config.json", name="RTE"),
    ),
)
FRAME = [{"SpecialToken": {"id": "a", "type_id": 0}}]


def template(pair, single=({"Sequence": {"id": "A", "type_id": 0}},), ids=(0,)):
    """tokenizer.json with templates of its own."""
    special = {"a": {"id": "a", "ids": list(ids), "tokens": ["a"]}}
    templates = {"single": FRAME + list(single), "pair": FRAME + pair, "special_tokens": special}
    processor = {"type": "TemplateProcessing", **templates}
    return put("model/tokenizer.json", json.dumps({**TOKENIZER, "post_processor": processor}))


SEQUENCES = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
for name, change, say in [
    ("drops the second text", template(SEQUENCES[:1]), "drops the second"),
    (
        "has segments beyond the encoder",
        template([SEQUENCES[0], {"Sequence": {"id": "B", "type_id": 7}}]),
        "8 kinds of segments",
    ),
    (
        "has segments beyond the encoder for one text",
        template(
            SEQUENCES,
            ({"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "a", "type_id": 5}}),
        ),
        "6 kinds of segments",
    ),
    ("adds ids beyond the encoder", template(SEQUENCES, ids=(9999,)), "knows 10000 tokens"),
]:
    case(f"tokenizer.json {name}", ["model", say], change=change)

# --------------------------------------------------------------------------------------------------


@pytest.fixture
def box(encoder, data_dir, runs, tmp_path, monkeypatch):
    """A directory with model/, data/ and runs/, to be changed; the working directory."""
    for name, source in (("model", encoder), ("data", data_dir), ("runs", runs)):
        shutil.copytree(source, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", datasets.config.HF_DATASETS_CACHE)
    return tmp_path


def listing(directory):
    """Everything in a directory: {path: (kind and rights, size, time of change)}; of directories
    only the rights."""
    result = {}
    for folder, folders, files in os.walk(directory):
        for path in (Path(folder, name) for name in folders + files):
            s = path.lstat()
            result[path] = (
                (s.st_mode,)
                if path in map(Path(folder).joinpath, folders)
                else (s.st_mode, s.st_size, s.st_mtime_ns)
            )
    return result


@contextlib.contextmanager
def time_limit(seconds):
    def stop(*_):
        pytest.fail(f"not done after {seconds} s")  # no Exception, so nothing catches it

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check(command, error, say):
    lines = error.splitlines(keepends=True)
    error = "".join(line for line in lines if not line.startswith("note: "))  # of the run it read
    assert error.count("\n") == 1 and error.endswith("\n"), error[:2000]
    assert (
        error.startswith(f"{command.split()[0]}: ")
        and "Traceback" not in error
        and len(error) < 1500
    ), error[:2000]
    for text in say:
        assert text in error, error


@pytest.mark.parametrize("name", CASES)
def test_wrong_input(name, box, capsys, monkeypatch):
    command, change, arguments, say = CASES[name]
    main, common = COMMANDS[command]
    if change:
        change()
    before = listing(box)
    monkeypatch.setattr(sys, "argv", [*command.split()[:1], *common, *arguments])
    capsys.readouterr()
    with time_limit(20), pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 2
    check(command, capsys.readouterr().err, say)
    assert listing(box) == before


def test_the_table_is_large():
    assert len(CASES) >= 60 and {command for command, *_ in CASES.values()} == set(COMMANDS)


def finish(command, *arguments):
    """A command in a process of its own: (status, stderr, peak memory in bytes, seconds)."""
    started = time.monotonic()
    with open("stderr", "w") as error:
        process = subprocess.Popen(
            [sys.executable, ROOT / command, *arguments], stdout=subprocess.DEVNULL, stderr=error
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    text = Path("stderr").read_text()
    Path("stderr").unlink()
    return (
        process.returncode,
        text,
        usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        time.monotonic() - started,
    )


@pytest.mark.parametrize(
    "name", thorough_after_first("adapter: nan in adapter_up.bias", "rows: null")
)
def test_as_a_user_sees_it(name, box):
    """Processes of their own: warnings, crashes and threads of libraries would show here."""
    command, change, arguments, say = CASES[name]
    change()
    before = listing(box)
    status, error, _, _ = finish(command, *COMMANDS[command][1], *arguments)
    assert status == 2
    check(command, error, say)
    assert listing(box) == before


@thorough
def test_a_line_of_100_MB(box):
    Path("data/rte/train.jsonl").write_bytes(pair(b"0", b'"' + b"the " * 25_000_000 + b'"'))
    status, error, memory, seconds = finish("train.py", *TRAIN)
    assert status == 2
    check("train.py", error, ["data/rte/train.jsonl, line 1", "100,000,000 characters"])
    assert memory < 2.5e9 and seconds < 60
    assert not Path("out").exists()


@pytest.mark.parametrize(
    "name",
    ["[x]*?", "**", "{a,b}", "a\nb", "a b#%20", "https:", "\u202e\U0001f600", ".hidden", "'\""],
)
def test_names_that_only_look_wrong(name, box, capsys):
    """Directories may be called anything: they are no patterns, addresses or options."""
    Path(name).mkdir()
    for part in ("data", "model"):
        Path(part).rename(Path(name, part))
    command_line(
        [
            *TRAIN,
            "--data-dir",
            f"{name}/data",
            "--model",
            f"{name}/model",
            "--out",
            f"{name}/out",
            "--limit-train",
            "8",
        ]
    )
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["train_examples"] == 8


def test_right_input_that_looks_wrong(box, capsys):
    """Empty texts, unknown tokens alone, one class, NUL and control characters as escapes, a
    byte-order mark: all train."""
    texts = [
        "",
        "\u2603\u2603",
        "\0\x01\x1b[2J",
        "\ufeff",
        "\u202eabc",
        "\U0001f600",
        " " * 10_000,
        "x" * 10_000,
        "[CLS] [PAD]",
    ]
    lines = "".join(
        json.dumps({"sentence1": a, "sentence2": b, "label": 0}) + "\n"
        for a in texts
        for b in texts
    )
    for split in ("train", "validation"):
        Path(f"data/rte/{split}.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    command_line(TRAIN)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["train_examples"] == result["dev_examples"] == len(texts) ** 2


def test_the_same_path_and_time_with_other_content(box):
    """Rows and encoders are known by their content: a link that is switched, an archive with fixed
    times."""
    path, task = Path("data/rte/train.jsonl"), data.get_task("rte", "data")
    tokenizer = load_tokenizer("model", 32)
    before = data.load_split(task, "train", tokenizer, "data")["input_ids"][:]
    times = path.stat()
    path.write_text(path.read_text().replace("cat", "dog"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = data.load_split(task, "train", tokenizer, "data")["input_ids"][:]
    assert before != after and len(before) == len(after)


@pytest.mark.parametrize("task, names", [("rte", ["not_entailment", "entailment"]), ("mine", "ba")])
def test_labels_with_names_of_their_own(task, names, box):
    """A parquet file with names for its numbers: they decide, in whatever order."""
    columns = ["sentence1", "sentence2"] if task == "rte" else ["text_a", "text_b"]
    labels = datasets.ClassLabel(names=list(names))
    features = {**dict.fromkeys(columns, datasets.Value("string")), "label": labels}
    found = [{**dict.fromkeys(columns, text), "label": i} for i, text in enumerate(names)]
    Path("data", task).mkdir(exist_ok=True)
    Path("data", task, "train.jsonl").unlink(missing_ok=True)
    rows = datasets.Dataset.from_list(found, features=datasets.Features(features))
    rows.to_parquet(f"data/{task}/train.parquet")
    task = data.get_task(task, "data")
    split = data.load_split(task, "train", load_tokenizer("model", 32), "data")
    assert [task.labels[i] for i in split["label"]] == list(names)


def test_another_encoder_is_allowed_on_request(box, capsys):
    OTHER()
    train.main([*TRAIN, *FUSE, "--allow-other-encoder"])
    assert capsys.readouterr().out.count("note: runs/rte was trained on an encoder with other") == 1


def test_the_digest_is_of_the_numbers(encoder, tmp_path):
    """The same in another kind of file, another for a single other number."""
    first = bert.Bert.from_pretrained(encoder)
    shutil.copytree(encoder, tmp_path / "bin")
    torch.save(load_file(encoder / "model.safetensors"), tmp_path / "bin/pytorch_model.bin")
    (tmp_path / "bin/model.safetensors").unlink()
    assert bert.Bert.from_pretrained(tmp_path / "bin").digest == first.digest
    first.layers[1].query.bias.data[3] += 1e-7
    first.save_pretrained(tmp_path / "other")
    assert bert.Bert.from_pretrained(tmp_path / "other").digest != first.digest


def damaged(value, rng):
    """A JSON value with one place changed."""
    value = json.loads(json.dumps(value))
    part = value
    while True:
        key = rng.choice(list(part) if isinstance(part, dict) else range(len(part)))
        inside = part[key]
        if isinstance(inside, (dict, list)) and inside and rng.random() < 0.8:
            part = inside
            continue
        part[key] = rng.choice([None, -1, 2**40, "", "x" * 1000, [], {}, True, 1e300])
        return value


def test_damaged_tokenizers(box):
    """They load, or are refused in a line. A panic of the Rust side is no Exception."""
    rng = random.Random(int(os.environ["SEED"]))
    source = Path(ROOT / "tests/golden/roberta/encoder/tokenizer.json")
    for _ in range(100):
        content = damaged(json.loads(source.read_text()), rng)
        Path("model/tokenizer.json").write_text(json.dumps(content))
        try:
            tokenizer = load_tokenizer("model", 32, 10**6, 2)
            tokenizer.encode("a text", "another")
        except ValueError as e:
            assert "model" in str(e) and "\n" not in str(e)


def test_many_labels_are_looked_up_at_once():
    task = data.Task(None, None, ("text_a",), tuple(f"c{i}" for i in range(30_000)), ())
    started = time.process_time()  # also beside other work
    found = [task.kind.label(task, f"C{i}") for i in range(20_000)]
    assert found == list(range(20_000)) and time.process_time() - started < 2


def test_out_of_memory_while_the_model_is_built(box, capsys, monkeypatch):
    def build(*_):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] can't allocate memory: 9 bytes")

    for error in (build, lambda *_: bytearray(10**15)):
        monkeypatch.setattr(train, "build", error)
        with pytest.raises(SystemExit) as exit:
            command_line(TRAIN)
        assert exit.value.code == 2
        check("train.py", capsys.readouterr().err, ["out of memory"])
