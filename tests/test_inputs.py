"""Wrong input: each ends in one line on stderr and exit status 2, with nothing written.

The tables hold one case for each check and place: arguments, what the message says, and what is
changed beforehand. They are run in a directory of their own, which holds model/, data/ and runs/.
"""

import importlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing

import data
import train
from bert import Bert
from conftest import VOCABULARY, Writes, cli
from formats.tokenizer import load_tokenizer

ROOT = Path(train.__file__).parent
TRAIN = cli("--stage head --task rte --model model --data-dir data --out out --epochs 1")
COMMANDS = {  # name: (module, the words that a case's are appended to)
    "train.py": ("train", TRAIN),
    "train.py alone": ("train", ["--out", "out"]),
    "multitask": ("experiments.multitask", cli("--model model --data-dir data --out out")),
    "evaluate": ("experiments.evaluate", []),
    "predict": ("experiments.predict", []),
    "figure4": ("experiments.figure4", ["--out", "out"]),
    "publish": ("experiments.publish", cli("--encoder me/bert --out out")),
    "prune": ("experiments.prune", cli("--out out --keep 1")),
}
FUSE = "--stage fusion --adapters runs/rte runs/sst2"
CASES = {}  # name: (command, arguments, what the message says, changes)


def add(name, words, say, *changes, command="train.py"):
    assert name not in CASES, name
    say = [say] if isinstance(say, str) else say
    CASES[name] = command, shlex.split(words), say, changes


# --------------------------------------------------------------------------------------------------
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


def with_nan(path, part):
    """The first number of every tensor whose name holds `part`."""

    def function(name, tensor):
        if part in name:
            tensor.view(-1)[0] = float("nan")
        return tensor

    return tensors(path, function)


@later
def gone(path):
    shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink()


@later
def pipe(path):
    """In the place of a file: whoever opens it waits forever."""
    Path(path).unlink()
    os.mkfifo(path)


pickled = later(torch.save)


def shuffle_vocabulary():
    words = Path("model/vocab.txt").read_text().split()
    put("model/vocab.txt", "\n".join(words[:5] + words[:4:-1]))()


# --------------------------------------------------------------------------------------------------
# Arguments: words | what the message says

WRONG = "epochs 0|batch-size 0|grad-accumulation 0|lr nan|weight-decay -1|warmup 1|limit-train 0"
WRONG += "|limit-dev 0|patience 0|save-minutes nan|dev-fraction 1|max-length 49"
WRONG += f"|seed {2**32}|reduction-factor 0"
for words in WRONG.split("|"):
    add(f"--{words}", f"--{words}", f"--{words.split()[0]} must be")
for line in f"""
--epochs 1.5 | --epochs
--seeds 1 1 | twice
--adapter-config ln_after=true ln_after=false | one name is given twice: ln_after
--seeds 1 --seed 2 | --seed and --seeds exclude each other
--score loss | --score loss: rte has accuracy
--stage adapter --reduction-factor 33 | --reduction-factor 33 leaves no bottleneck
--resume --overwrite | --overwrite and --resume exclude each other
--stage adapter --adapters runs/rte | --adapters belongs to --stage fusion or head
--stage fusion | --stage fusion needs --adapters
--stage multitask | python -m experiments.multitask
--head nosuch | --head
--dev-file data/rte/validation.jsonl | --dev-file goes with --train-file
--task rtee | unknown task 'rtee': the paper's are
--task ../data/rte | unknown task
--data-dir nowhere | nowhere is not a directory
--model data | no encoder in
--model model/config.json | config.json
--model google-bert/bert-base-uncased | cannot be reached
--out model/config.json | is a file
--out . --overwrite | holds other files
--out model --overwrite | config.json is not a run's
--out runs/rte | --overwrite
--out runs/rte --task rtx --overwrite | unknown task
--out runs/rte --seeds 0 1 --overwrite | is itself a run
{FUSE} runs/none | runs/none
{FUSE} runs/rte | two adapters are called 'rte'
{FUSE} runs/mnli | --stage adapter --task mnli
{FUSE} runs/fusion-rte | it is a run of --stage fusion
{FUSE} data | data has no adapter_config.json
{FUSE} paper | cannot be reached
{FUSE} --out runs/rte --overwrite | would replace
--stage fusion --adapters runs/fusion-rte/adapters/rte --out runs/fusion-rte --overwrite | replace
""".strip().splitlines():
    words, say = line.split(" | ")
    add(f"{words[:70]} ({say[:20]})", words, say)
for words, say in [
    ("--stage head --task rte --model model", ["--data-dir", "nyu-mll/glue"]),
    ("", "--stage"),
]:
    add(f"no other words than {words}", words, say, command="train.py alone")
for words, say in [
    ("", "--tasks"),
    ("--tasks rte rte", "--tasks has rte twice"),
    ("--tasks rte sst2 --steps-per-epoch 0", "--steps-per-epoch must be"),
    ("--tasks rte sst2 --adapter none --adapter-config ln_after=true", "--adapter none makes none"),
]:
    add(f"multitask {words}", words, say, command="multitask")
if not torch.cuda.is_available():
    add("no such device", "--device cuda", ["cuda", "no such device"])
A, B = {"text_a": "a", "label": "x"}, {"text_a": "b", "label": "y"}
for task in ("keys", "training", "a.b", "a,b"):  # the run could not be read again
    words = f"--task {task}"
    add(words, words, "cannot be an adapter's name", put_rows(A, B, task=task))

# --------------------------------------------------------------------------------------------------
# Data


def pair(label, a=b'"a"'):
    return b'{"sentence1": %s, "sentence2": "b", "label": %s}\n' % (a, label)


for name, content, say in [
    ("null in line 3", pair(b"0") * 2 + b"null\n", "line 3: not a JSON object"),
    ("cut off", pair(b"0") + pair(b"0")[:-9], "line 2: broken JSON"),
    ("a column missing", b'{"sentence1": "a", "label": 1}\n', "line 1: no column 'sentence2'"),
    ("label 2", pair(b"2"), "line 1: label 2 is not one of entailment, not_entailment"),
    ("label 0.0", pair(b"0.0"), "label 0.0"),
    ("text a list", pair(b"0", b'["a"]'), "'sentence1' holds list"),
    ("text null", pair(b"0", b"null"), "'sentence1' is missing"),
    ("half a surrogate pair", pair(b"0", b'"\\ud800"'), "surrogate"),
    ("invalid UTF-8", pair(b"0") + pair(b"0", b'"caf\xe9"'), "utf-8"),
]:
    file = "data/rte/train.jsonl"
    add(f"rows: {name}", "", [file, say], put(file, content))
for name, given, say in [
    ("no label", [{"target": "x", "text_a": "a"}], "no column 'label'; it has target, text_a"),
    ("one label", [A, A], "nothing to learn"),
    ("label null", [A, {**A, "label": None}], "line 2: label None"),
    ("labels are 0.5", [{**A, "label": 0.5}, {**B, "label": 1}], "label 0.5"),
    ("labels with a blank", [A, {**A, "label": "x "}], "make them one"),
    ("labels é", [{**A, "label": t} for t in ("\u00e9", "e\u0301")], "make them one"),
    ("text_b null", [{**A, "text_b": "b"}, {**B, "text_b": None}], "line 2: column 'text_b'"),
    ("one choice", [{"choices": ["a"], "label": 0}], "'choices' must be a list of at least two"),
    ("fewer choices", [{"choices": c, "label": 0} for c in (["a", "b"], ["a"])], "line 2"),
    ("choice 2 of 2", [{"choices": ["a", "b"], "label": 2}], "label 2"),
    ("choice -1", [{"choices": ["a", "b"], "label": -1}], "the label is hidden (-1)"),
]:
    say = ["data/mine/train.jsonl", say]
    add(f"own task: {name}", "--task mine", say, put_rows(*given))
dev = put("data/mine/validation.jsonl", json.dumps({**A, "label": "z"}))
add("own task: a new label", "--task mine", ["validation.jsonl", "'z'"], put_rows(A, B), dev)
add("no validation.jsonl", "", ["validation", "rte"], gone("data/rte/validation.jsonl"))
add("train.jsonl is a pipe", "", "no train split", pipe("data/rte/train.jsonl"))

# --------------------------------------------------------------------------------------------------
# Encoders and tokenizers

WEIGHTS = "model/model.safetensors"
nested = put("model/config.json", b"[" * 100_000 + b"]" * 100_000)
add("config.json nested", "", "config.json", nested)
add("model.safetensors is a pipe", "", "no encoder in model", pipe(WEIGHTS))
add("no weights", "", ["no encoder", "model.safetensors"], gone(WEIGHTS))
nan = with_nan(WEIGHTS, "layer.1.attention.output.dense.weight")
add("an encoder with NaN", "--stage adapter", "attention_dense.weight", nan)
overflow = tensors(WEIGHTS, lambda _, t: t * 1e38)
add("an encoder whose numbers overflow", "", "the loss is nan", overflow)
add("--lr 1e38", "--lr 1e38 --batch-size 8", ["nan", "nothing is kept", "--lr"])
add("no tokenizer", "", "tokenizer", gone("model/vocab.txt"))


def of_words(pair=""):
    """tokenizer.json of whole words. pair: what it makes of two texts, where it adds a token."""
    tokenizer = Tokenizer(WordLevel({"a": 0, "[UNK]": 1}, "[UNK]"))
    if pair:
        special = {"special_tokens": [("a", 0)]}
        tokenizer.post_processor = TemplateProcessing(single="a $A", pair=pair, **special)
    return tokenizer.to_str()


ONE_OF_TWO = of_words("a $A $B").replace('"id":"B"', '"id":"A"')
for name, file, content, say in [
    ("empty", "vocab.txt", "", "not found in the vocabulary"),
    ("binary", "vocab.txt", bytes(range(256)), "cannot be read"),
    ("one word more", "vocab.txt", "\n".join([*VOCABULARY, "x"]), f"{len(VOCABULARY) + 1} tokens"),
    ("no [CLS]", "tokenizer.json", of_words(), "adds 0 tokens"),
    ("one text of two", "tokenizer.json", ONE_OF_TWO, "drops one of two texts"),
    ("segments", "tokenizer.json", of_words("a $A $B:7"), "8 kinds of segments"),
]:
    add(f"{file}: {name}", "", ["model", say], put(f"model/{file}", content))

# --------------------------------------------------------------------------------------------------
# Adapters and fusions

CONFIG, FILE = "runs/rte/adapter_config.json", "runs/rte/adapter.safetensors"
for name, say, change in [
    ("NaN", [FILE, "not finite"], with_nan(FILE, "adapter_down.0.weight")),
    ("another shape", [FILE, "here it must be a float"], tensors(FILE, lambda _, t: t[None])),
    ("no weights", ["no weights", "adapter.safetensors"], gone(FILE)),
    ("broken JSON", [CONFIG, "line 1"], put(CONFIG, b"{")),
    ("RTE", "two adapters are called 'RTE'", edit("runs/sst2/adapter_config.json", name="RTE")),
]:
    add(f"adapter: {name}", FUSE, say, change)

FUSION = "runs/fusion-rte"
FUSION_FILE = f"{FUSION}/model_adapter_fusion.safetensors"
for name, run, say, change in [
    ("head with NaN", "runs/rte", "not finite", with_nan("runs/rte/model_head.safetensors", "")),
    ("task ../x", "runs/rte", "../x", edit("runs/rte/config.json", task="../x")),
    ("no config.json", "runs/rte", "config.json", gone("runs/rte/config.json")),
    ("NaN", FUSION, "not finite", with_nan(FUSION_FILE, "value")),
    ("a copy is missing", FUSION, "sst2", gone(f"{FUSION}/adapters/sst2")),
]:
    add(f"evaluate {run}: {name}", run, say, change, command="evaluate")

# --------------------------------------------------------------------------------------------------
# States, other people's directories, pickles

CODE = {"x": torch.ones(2), "y": Writes()}
a_run = put("out/config.json", json.dumps({"stage": "head", "command": "train.py"}))
state = put("out/log.jsonl", b""), pickled(CODE, "out/resume.pt")
add("resume.pt with code", "--resume", "out/resume.pt", a_run, *state)
LOG = put("out/log.jsonl", b'{"epoch": 1}\n')
for name, *changes in [
    ("a log.jsonl of another program", LOG),
    ("an encoder and a log.jsonl", LOG, put("out/model.safetensors", b"weights")),
    ("another's config.json", LOG, put("out/config.json", b'{"model_type": "bert"}')),
    ("notes", put("out/notes", b"x")),
]:
    for option in ("--overwrite", "--resume"):
        add(f"{option} of {name}", option, "out", *changes)
add("--lr 1e38 beside a stranger's log", "--lr 1e38", "holds other files", LOG)
for file, command, words in [
    ("model/pytorch_model.bin", "train.py", ""),
    ("runs/rte/pytorch_adapter.bin", "train.py", FUSE),
    ("runs/rte/pytorch_model_head.bin", "evaluate", "runs/rte"),
    ("runs/fusion-rte/pytorch_model_adapter_fusion.bin", "evaluate", "runs/fusion-rte"),
]:
    safe = file.replace("pytorch_", "").replace(".bin", ".safetensors")
    changes = gone(safe), pickled(CODE, file)
    add(f"{file} with code", words, [file, "refused"], *changes, command=command)

# --------------------------------------------------------------------------------------------------
# Another encoder of the same shape, outputs that are not finite

OTHERS = {"encoder": tensors(WEIGHTS, lambda _, t: t * 1.5), "tokenizer": shuffle_vocabulary}
HERE = [edit(f"runs/{run}/config.json", model="model") for run in ("rte", "sst2")]
ALLOW = "--allow-other-encoder"
add("adapters of another encoder", FUSE, ["other weights", ALLOW], *HERE, OTHERS["encoder"])
for command, words in {
    "evaluate": "runs/rte",
    "predict": "runs/rte 'a text' another",
    "figure4": "runs/fusion-rte",
    "prune": "runs/fusion-rte",
}.items():
    words = f"{words} --model model"
    for name, other in OTHERS.items():
        say = [f"another {name} than", ALLOW]
        add(f"{command}: another {name}", words, say, other, command=command)
    name, words = f"{command}: outputs that are not finite", f"{words} {ALLOW}"
    add(name, words, "not finite", overflow, command=command)
for name, other in OTHERS.items():
    name, say = f"publish: another {name}", f"another {name} than"
    add(name, "runs/rte", say, *HERE, other, command="publish")

# --------------------------------------------------------------------------------------------------


@pytest.fixture
def box(encoder, data_dir, runs, tmp_path, monkeypatch):
    """A directory with model/, data/ and runs/, to be changed; the working directory. What waits
    for input that never comes is ended after 20 s."""
    for name, source in (("model", encoder), ("data", data_dir), ("runs", runs)):
        shutil.copytree(source, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("not done after 20 s"))
    signal.alarm(20)
    yield tmp_path
    signal.alarm(0)


def listing(directory):
    """{path: time of its last change}, None for a directory"""
    paths = directory.rglob("*")
    return {path: None if path.is_dir() else path.lstat().st_mtime_ns for path in paths}


@pytest.mark.parametrize("name", CASES)
def test_wrong_input(name, box, refused, monkeypatch):
    command, words, say, changes = CASES[name]
    module, common = COMMANDS[command]
    main = importlib.import_module(module).main
    for change in changes:
        change()
    before = listing(box)
    monkeypatch.setattr(sys, "argv", [command.split()[0], *common, *words])
    line = refused([], *say, main=lambda _: main())
    assert line.startswith(("train.py: ", *COMMANDS))
    assert listing(box) == before


def test_any_exception_is_one_line(box, refused, monkeypatch, capsys):
    """What nobody has thought of, too; the environment shows where."""

    def broken(*_):
        raise AttributeError("'NoneType' object has\nno attribute 'x'")

    monkeypatch.setattr(Bert, "from_pretrained", broken)
    line = refused(TRAIN, "train.py: AttributeError: 'NoneType' object has no attribute 'x' (")
    variable = line.rpartition("(")[2].partition("=1")[0]
    monkeypatch.setenv(variable, "1")
    with pytest.raises(SystemExit):
        train.run_command("train.py", train.main, TRAIN)
    assert "in broken" in capsys.readouterr().err and not Path("out").exists()


def test_a_user_sees_one_line(box):
    """A process of its own: warnings, crashes and threads of libraries would show here."""
    put("data/rte/train.jsonl", pair(b"7"))()
    words = [sys.executable, ROOT / "train.py", *TRAIN]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2 and not Path("out").exists()
    assert done.stderr.count("\n") == 1 and "line 1: label 7 is not one of entail" in done.stderr


# --------------------------------------------------------------------------------------------------
# What only looks wrong


@pytest.mark.parametrize("name", ["[x]*?{a,b}", "a\nb#%20 '\"", "https:", "\u202e\U0001f600", "~"])
def test_names_that_only_look_wrong(name, box, monkeypatch):
    """Directories may be called anything: they are no patterns, addresses or options."""
    monkeypatch.setenv("HOME", str(box / "runs"))
    Path(name).mkdir()
    for part in ("data", "model"):
        Path(part).rename(Path(name, part))
    places = {"model": f"{name}/model", "data_dir": f"{name}/data", "out": f"{name}/out"}
    assert train.main([*TRAIN, *cli("--limit-train 8", **places)])["train_examples"] == 8


def test_the_same_path_and_time_with_other_content(box):
    path, tokenizer, found = Path("data/rte/train.jsonl"), load_tokenizer("model", 32), []
    times = path.stat()
    for word in ("cat", "dog"):
        path.write_text(path.read_text().replace("cat", word))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        split = data.load_split(data.get_task("rte", "data"), "train", tokenizer, "data")
        found.append(split["input_ids"][:])
    assert found[0] != found[1] and len(found[0]) == len(found[1])
