"""Wrong input: each ends in one line on stderr and exit status 2, with nothing written.

The table holds one case for each check of what would otherwise pass: arguments, what the message
says, and what is changed beforehand. A case has a directory of its own, which holds model/, data/
and runs/.
"""

import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import train
from bert import Bert
from conftest import VOCABULARY, cli

ROOT = Path(train.__file__).parent
TRAIN = cli("--stage head --task rte --model model --data-dir data --out out --epochs 1")
COMMANDS = {  # name: (module, the words that a case's are appended to)
    "train.py": ("train", TRAIN),
    "multitask": ("experiments.multitask", cli("--model model --data-dir data --out out")),
    "evaluate": ("experiments.evaluate", []),
    "predict": ("experiments.predict", []),
    "fusion_weights": ("experiments.fusion_weights", ["--out", "out"]),
    "fusion_weights alone": ("experiments.fusion_weights", []),
    "tables": (
        "experiments.tables",
        cli("--model model --data-dir data --out out --tasks rte sst2"),
    ),
}
SET = "--stage adapter --adapter-config"
FUSE = "--stage fusion --adapters runs/rte runs/sst2"
CASES = {}  # name: (command, arguments, what the message says, changes)


def add(name, words, say, *changes, command="train.py"):
    assert name not in CASES, name
    say = [say] if isinstance(say, str) else say
    CASES[name] = command, shlex.split(words), say, changes


# What changes the files. put("a", "b") is a function of no argument, called in the directory of the
# case; so are the others.


def later(function):
    return lambda *values, **named: partial(function, *values, **named)


@later
def put(path, content):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(content if isinstance(content, bytes) else content.encode())


@later
def put_rows(*rows, task="mine"):
    """The same rows for training and development."""
    for split in ("train", "validation"):
        put(f"data/{task}/{split}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))()


@later
def edit(path, **values):
    """Fields of a JSON file."""
    Path(path).write_text(json.dumps({**json.loads(Path(path).read_text()), **values}))


@later
def tensors(path, function):
    """function(name, tensor) -> tensor, for all of a safetensors file."""
    result = {name: function(name, tensor.clone()) for name, tensor in load_file(path).items()}
    save_file({name: tensor.contiguous() for name, tensor in result.items()}, path)


@later
def edit_task(run, **values):
    """Fields of its only task in a run's config.json."""
    path = Path(run, "config.json")
    ((name, task),) = json.loads(path.read_text())["tasks"].items()
    edit(path, tasks={name: {**task, **values}})()


@later
def rename(adapter, name):
    """A copy of an adapter, under this name."""
    shutil.copytree(adapter, path := Path("renamed", name))
    (path / "config.json").unlink()
    edit(path / "adapter_config.json", name=name)()


def with_nan(path, part):
    """In all tensors whose name holds `part`."""
    return tensors(path, lambda name, t: t * float("nan") if part in name else t)


def shuffle_vocabulary():
    words = Path("model/vocab.txt").read_text().split()
    put("model/vocab.txt", "\n".join(words[:5] + words[:4:-1]))()


# Arguments: words | what the message says
WRONG = f"epochs 0|lr nan|dev-fraction 1|seed {2**32}|max-length 49"
for words in WRONG.split("|"):  # of each kind of range one
    add(f"--{words}", f"--{words}", f"--{words.split()[0]} must be")
for line in f"""
--adapter-config ln_after=true ln_after=false | one name is given twice: ln_after
--score loss | --score loss: rte has accuracy
--stage adapter --reduction-factor 33 | reduction_factor 33 leaves no bottleneck
{SET} reduction_factor=99 | reduction_factor 99 leaves no bottleneck
{SET} reduction_factor='{{"2":4,"default":2}}' | reduction_factor names layer 2, outside 0 .. 1
{SET} reduction_factor='{{"first":4}}' | 'first' must be a layer, such as "0", or "default"
--resume --overwrite | --overwrite and --resume exclude each other
--stage adapter --adapters runs/rte | --adapters belongs to --stage fusion or head
--stage fusion | --stage fusion needs --adapters
--stage multitask | python -m experiments.multitask
--dev-file data/rte/validation.jsonl | --dev-file goes with --train-file
--dev-fraction 0.5 | --dev-fraction: data/rte/validation.jsonl has a development set
--columns sentnce2=b | the task takes no 'sentnce2'; it takes sentence1, sentence2, label
--columns sentence2=b | data/rte/train.jsonl has no such column; it has sentence1, sentence2
--task argument | no train split for task 'argument'
--data-dir nowhere | nowhere is not a directory
--model ./x | there is no directory './x'
--model google-bert/bert-base-uncased | cannot be reached
--out model/config.json | is a file
--out /sys/run | stopped, /sys/run cannot be written
--out . --overwrite | holds other files
--out model --overwrite | config.json is not a run's
--out runs/rte | --overwrite
{FUSE} runs/none | runs/none
{FUSE} runs/rte | two adapters are called 'rte'
{FUSE} runs/mnli | --stage adapter --task mnli
{FUSE} runs/fusion-rte | it is a run of --stage fusion
{FUSE} data | data has no adapter_config.json
{FUSE} paper | cannot be reached
{FUSE} --out runs/rte --overwrite | would replace
{SET} ln_affter=true | has no 'ln_affter', its fields are mh_adapter
{SET} ln_after | NAME=VALUE, not 'ln_after'
{SET} ln_after=yes | ln_after must be one of True, False, not 'yes'
{SET} leave_out=[2] | leave_out [2] names layers outside 0 .. 1
{SET} adapter_residual_before_ln=true | needs the new LayerNorm
{SET} size=8 --adapter pal --reduction-factor 8 | --adapter pal has no 'reduction_factor'
--stage fusion --adapters runs/fusion-rte/adapters/rte --out runs/fusion-rte --overwrite | replace
multitask: --tasks rte rte | --tasks has rte twice
multitask: --tasks rte sst2 --steps-per-epoch 0 | --steps-per-epoch must be
multitask: --tasks rte sst2 --adapter none --adapter-config ln_after=true | none makes none
tables: --part 3/3 | --part must be I/N
tables: --fusion-options=--task=x | --task does not belong in --fusion-options
tables: -- --see 3 | --see does not belong behind --
tables: --one-seed huge | --one-seed 'huge' is none of --tasks: rte, sst2
evaluate: runs/fusion-rte --task sst2 | a run on 'rte', not on 'sst2'
evaluate: runs/rte --import examples.lor | No module named 'examples.lor'
fusion_weights: runs/rte | is of --stage adapter
fusion_weights alone: runs/fusion-rte --out runs | already there: choose another --out
predict: runs/rte | give either texts, or --file
predict: runs/rte red | rte takes sentence1 and sentence2, not
predict: runs/pick red one | 'choices' does not hold a list
""".strip().splitlines():
    command, words, say = re.fullmatch(r"(?:([a-z_ ]+): )?(.+) \| (.+)", line).groups("train.py")
    add(f"{command} {words[:70]} ({say[:20]})", words, say, command=command)
for change, say in [
    (edit_task("runs/rte", labels=["not_entailment", "entailment"]), "different labels"),
    (edit_task("runs/rte", type="Unknown"), "an unknown type, 'Unknown'"),
    (edit("runs/rte/config.json", stage="distill"), "an unknown stage, 'distill'"),
]:
    add(f"predict: {say}", "runs/rte a b", say, change, command="predict")
words = "--stage fusion --adapters runs/rte renamed/RTE"
add(words, words, "two adapters are called", rename("runs/rte", "RTE"))
A, B = {"text_a": "a", "label": "x"}, {"text_a": "b", "label": "y"}
for task in ("keys", "a.b"):  # the run could not be read again
    words = f"--task {task}"
    add(words, words, "cannot be an adapter's name", put_rows(A, B, task=task))

# Data: (a training file, its content, what the message says of it)


def pair(label, a='"a"'):
    return f'{{"sentence1": {a}, "sentence2": "b", "label": {label}}}\n'


LINE, EMPTY = json.dumps(A), '{"text_a": "b", "label": ""}'
for file, content, say in [
    ("rte/train.jsonl", pair(0) * 2 + "null\n", "line 3: not a JSON object"),
    ("rte/train.jsonl", '{"sentence1": "a", "label": 1}\n', "line 1: no column 'sentence2'"),
    ("rte/train.jsonl", pair(2), "line 1: label 2 is not one of entailment, not_entailment"),
    ("rte/train.jsonl", pair(0, '["a"]'), "'sentence1' holds list"),
    ("rte/train.jsonl", pair(0, "null"), "'sentence1' is empty"),
    # the line, in every format
    ("mine/train.jsonl", f"\n{LINE}\n \n{EMPTY}", "4: label ''"),
    ("mine/train.json", f"\n[{LINE},\n{EMPTY}]", "2: label ''"),
    ("mine/train.json", f'[{LINE},\n{{"text_a"]', "2: broken JSON"),
    ("mine/train.csv", 'text_a,label\n"a\n\nb",x\n\nb,\n', "6: label ''"),
    ("mine/train.csv", "text_a,label\na,x,y\n", "2: 3 fields, the first line has 2"),
    ("mine/train.csv", "label,label\na,x\n", "two columns are called 'label'"),
    ("mine/train.tsv", 'text_a\tlabel\n"a\tx\n\nb\t\n', "4: label ''"),
]:
    words, say = f"--task {Path(file).parent}", [f"data/{file}", say]
    add(" ".join(say), words, say, put(f"data/{file}", content))
X, Y = {"choices": ["a", "b"], "label": 0}, {"choices": ["a", "b"], "label": 1}
for name, given, say in [
    ("no label", [{"target": "x", "text_a": "a"}], "no column 'label'; it has target, text_a"),
    ("one label", [A, A], "nothing to learn"),
    ("label null", [A, {**A, "label": None}], "line 2: label None"),
    ("labels are 0.5", [{**A, "label": 0.5}, {**B, "label": 1}], "label 0.5"),
    ("a blank", [A, {**A, "label": "x "}], "labels that differ in blanks at their ends"),
    ("labels in two forms", [{**A, "label": "é"}, {**A, "label": "e\u0301"}], "make them one"),
    ("text_b null", [{**A, "text_b": "b"}, {**B, "text_b": None}], "line 2: column 'text_b'"),
    ("one choice", [{"choices": ["a"], "label": 0}], "'choices' must be a list of at least two"),
    ("fewer choices", [X, {**Y, "choices": ["a"]}], "line 2"),
    ("choices by key", [X, {**Y, "choices": {"text": ["a", "b"]}}], "not hold a list of texts"),
    ("choice 2 of 2", [{**X, "label": 2}], "label 2"),
    ("choice -1", [{**X, "label": -1}], "the label is hidden (-1)"),
]:
    say = ["data/mine/train.jsonl", say]
    add(f"own task: {name}", "--task mine", say, put_rows(*given))
for row, say in [  # of the development set
    ({**A, "label": "z"}, "'z'"),
    ({**A, "text_b": "b"}, "column 'text_b' is none of the task's, which are text_a"),
]:
    say, dev = ["validation.jsonl", say], put("data/mine/validation.jsonl", json.dumps(row))
    add(f"own task: {say[1]}", "--task mine", say, put_rows(A, B), dev)
HAS = "it has Review (raw), id, gold"
for names, say in [  # the file's own names, whatever is renamed
    ("text_a=Review label=gold", ["text_a=Review: ", f"mine.csv has no such column; {HAS}"]),
    ("label=golf", ["label=golf: ", f"mine.csv has no such column; {HAS}"]),
    ("labl=gold", "the task takes no 'labl'; it takes text_a, text_b, choices, label"),
    ("label=gold", f"no column 'text_a'; {HAS}"),
    ("text_a=id text_b=gold", f"no column 'label'; {HAS}: --columns label=NAME"),
]:
    words = f"--task mine --train-file mine.csv --dev-fraction 0.5 --columns {names}"
    add(words, words, say, put("mine.csv", "Review (raw),id,gold\na,1,x\nb,2,y\n"))
add("no validation.jsonl", "", "--dev-fraction 0.1", Path("data/rte/validation.jsonl").unlink)

# Encoders and tokenizers
WEIGHTS = "model/model.safetensors"
nan = with_nan(WEIGHTS, "layer.1.attention.output.dense.weight")
add("an encoder with NaN", "--stage adapter", "attention_dense.weight", nan)
add("--lr 1e38", "--lr 1e38 --batch-size 8", ["nan", "nothing is kept", "--lr"])
more, whole_words = "\n".join([*VOCABULARY, "x"]), Tokenizer(WordLevel({"a": 0}, "a")).to_str()
say = f"{len(VOCABULARY) + 1} tokens"
add("one word more than the encoder has", "", ["model", say], put("model/vocab.txt", more))
say = ["model_type 'distilbert' is not one of bert, roberta", "docs/forking.md", "--import"]
add("an encoder of another type", "", say, edit("model/config.json", model_type="distilbert"))
add("no [CLS]", "", ["model", "adds 0 tokens"], put("model/tokenizer.json", whole_words))

# Adapters and fusions
FILE = "runs/rte/adapter.safetensors"
RECORDED = "runs/rte/config.json"
change = [with_nan(FILE, "adapter_down.0.weight"), edit(RECORDED, saved_files=None)]
add("adapter: NaN", FUSE, [FILE, "not finite"], *change)
for run, file in (("rte", "model_head"), ("fusion-rte", "model_adapter_fusion")):
    path = f"runs/{run}/{file}.safetensors"
    change = [with_nan(path, "weight"), edit(f"runs/{run}/config.json", saved_files=None)]
    add(f"{file}: NaN", f"runs/{run}", "not finite", *change, command="evaluate")
say, twice = "is not the file with which the run ended", tensors(FILE, lambda _, t: 2 * t)
add("exchanged weights", "runs/rte", [FILE, say], twice, command="evaluate")
add("exchanged weights, fused", FUSE, [FILE, say], twice)
gone = Path("runs/rte/head_config.json").unlink
add("a file is gone", "runs/rte", ["head_config.json is missing", say], gone, command="evaluate")

# Other people's directories
LOG = put("out/log.jsonl", b'{"epoch": 1}\n')
for name, *changes in [
    ("a log.jsonl of another program", LOG),
    ("another's config.json", LOG, put("out/config.json", b'{"model_type": "bert"}')),
]:
    for option in ("--overwrite", "--resume"):
        add(f"{option} of {name}", option, "out", *changes)
add("--lr 1e38 beside a stranger's log", "--lr 1e38", "holds other files", LOG)

# Another encoder of the same shape, outputs that are not finite
OTHERS = {"encoder": tensors(WEIGHTS, lambda _, t: t * 1.5), "tokenizer": shuffle_vocabulary}
HERE = [edit(f"runs/{run}/config.json", model="model") for run in ("rte", "sst2")]
add("adapters of another encoder", FUSE, "other weights", *HERE, OTHERS["encoder"])
for name, other in OTHERS.items():
    words, say = "runs/rte --model model", f"another {name} than"
    add(f"evaluate: another {name}", words, say, other, command="evaluate")


@pytest.fixture
def box(encoder, data_dir, runs, tmp_path, monkeypatch):
    """A directory with model/, data/ and runs/, to be changed; the working directory."""
    for name, source in (("model", encoder), ("data", data_dir), ("runs", runs)):
        shutil.copytree(source, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", CASES)
def test_wrong_input(name, box, refused, monkeypatch):
    command, words, say, changes = CASES[name]
    module, common = COMMANDS[command]
    main = importlib.import_module(module).main
    for change in changes:
        change()
    before = {path: path.lstat().st_mtime_ns for path in box.rglob("*")}
    monkeypatch.setattr(sys, "argv", [command.split()[0], *common, *words])
    line = refused([], *say, main=lambda _: main())
    assert line.startswith(("train.py: ", *COMMANDS))
    after = {path: path.lstat().st_mtime_ns for path in box.rglob("*")}
    assert after == before


def test_any_exception_is_one_line(box, refused, monkeypatch):
    """What nobody has thought of, too."""
    monkeypatch.setattr(Bert, "from_pretrained", Mock(side_effect=AttributeError("no\nx")))
    refused(TRAIN, "train.py: AttributeError: no x (ADAPTERFUSION_TRACEBACK=1 in the environment")
    assert not Path("out").exists()


def test_a_user_sees_one_line(box):
    """A process of its own: warnings, crashes and threads of libraries would show here."""
    put("data/rte/train.jsonl", pair(7))()
    words = [sys.executable, ROOT / "train.py", *TRAIN]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2 and not Path("out").exists()
    assert done.stderr.count("\n") == 1 and "line 1: label 7 is not one of entail" in done.stderr


def test_a_name_that_only_looks_wrong(box):
    """Directories may be called anything: they are no patterns."""
    name = "[x]*?{a,b} #%20 é"
    Path(name).mkdir()
    for part in ("data", "model"):
        Path(part).rename(Path(name, part))
    places = {"model": f"{name}/model", "data_dir": f"{name}/data", "out": f"{name}/out"}
    assert train.main([*TRAIN, *cli("--limit-train 8", **places)])["train_examples"] == 8
