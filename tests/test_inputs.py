"""Wrong input: each ends in one line on stderr and exit status 2, with nothing written.

The tables hold one case for each check and place: (what is changed beforehand, what the message
says, arguments). They are run in a directory of their own, which holds model/, data/, runs/, and
`loop`, a link to itself.
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
from conftest import VOCABULARY, cli
from formats.tokenizer import load_tokenizer

ROOT = Path(train.__file__).parent
TRAIN = cli("--stage head --task rte --model model --data-dir data --out out --epochs 1")
COMMANDS = {  # name: (module, the words that a case's are appended to)
    "train.py": ("train", TRAIN),
    "train.py alone": ("train", ["--out", "out"]),
    "bert.py": ("bert", []),
    "evaluate": ("experiments.evaluate", []),
    "predict": ("experiments.predict", []),
    "figure4": ("experiments.figure4", ["--out", "out"]),
    "publish": ("experiments.publish", cli("--anyway --encoder me/bert --out out")),
    "prune": ("experiments.prune", cli("--out out --keep 1")),
}
FUSE = "--stage fusion --adapters runs/rte runs/sst2"
CASES = {}  # name: (command, change, what the message says, words)


def add(name, change, say, words="", command="train.py"):
    assert name not in CASES, name
    CASES[name] = command, change, [say] if isinstance(say, str) else say, shlex.split(words)


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
def both(*changes):
    for change in changes:
        change()


def rows(*rows, task="mine"):
    """The same rows for training and development."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    return both(*(put(f"data/{task}/{split}.jsonl", text) for split in ("train", "validation")))


@later
def edit(path, **values):
    """Fields of a JSON file."""
    Path(path).write_text(json.dumps({**json.loads(Path(path).read_text()), **values}))


@later
def tensors(path, function):
    """function(name, tensor) -> tensor, for all of a safetensors file."""
    result = {name: function(name, tensor.clone()) for name, tensor in load_file(path).items()}
    save_file({name: tensor.contiguous() for name, tensor in result.items()}, path)


def with_nan(path, part=""):
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


class Writes:
    """Unpickled, it writes the file `executed`."""

    def __reduce__(self):
        return open, ("executed", "w")


def shuffled_vocabulary():
    words = Path("model/vocab.txt").read_text().split()
    put("model/vocab.txt", "\n".join(words[:5] + words[:4:-1]) + "\n")()


DEEP = b"[" * 100_000 + b"]" * 100_000
LONG = "x" * 300

# --------------------------------------------------------------------------------------------------
# Arguments: words | what the message says

WRONG = "epochs 0|batch-size 0|grad-accumulation 0|lr nan|weight-decay -1|warmup 1|limit-train 0"
WRONG += "|limit-dev 0|patience 0|save-minutes nan|dev-fraction 1|steps-per-epoch 0|max-length 49"
for words in WRONG.split("|"):
    add(f"--{words}", None, f"--{words.split()[0]} must be", f"--{words}")
for line in f"""
--epochs 1.5 | --epochs
--batch-size {10**20} | --batch-size
--seed {2**32} | --seed
--seeds 1 1 | twice
--seeds 1 --seed 2 | --seed
--score loss | --score loss: rte has accuracy
--stage adapter --reduction-factor 0 | --reduction-factor must be a positive number
--stage adapter --reduction-factor 33 | --reduction-factor 33 leaves no bottleneck
--stage adapter --adapter none | --adapter none leaves
--speed 9 | --speed 9
--resume --overwrite | choose one
--stage adapter --adapters runs/rte | --adapters belongs to --stage fusion or head
--stage fusion | --stage fusion needs --adapters
--tasks sst2 | takes --task
--stage multitask --tasks sst2 | takes --tasks
--task rtee | did you mean 'rte'?
--task ../data/rte | unknown task
--task {LONG} | too long
--data-dir nowhere | nowhere is not a directory
--data-dir data/rte/train.jsonl | not a directory
--model data | no encoder in
--model model/config.json | config.json
--model /dev/zero | /dev/zero
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
    add(f"{words[:70]} ({say[:20]})", None, say, words)
add("without --task", None, "takes --task", "--stage adapter", "train.py alone")
add("without --tasks", None, "takes --tasks", "--stage multitask", "train.py alone")
words = "--stage multitask --tasks rte rte"
add("--tasks", None, "each of them once", words, "train.py alone")
words = "--stage head --task rte --model model"
add("without --data-dir", None, ["--data-dir", "nyu-mll/glue"], words, "train.py alone")
add("without arguments", None, "--stage", command="train.py alone")
add("--out is in a loop", None, "loop", "--out loop/x")
if not torch.cuda.is_available():
    add("no such device", None, ["cuda", "no such device"], "--device cuda")
A, B = {"text_a": "a", "label": "x"}, {"text_a": "b", "label": "y"}
for task in ("keys", "training", "a.b", "a,b"):  # the run could not be read again
    add(f"--task {task}", rows(A, B, task=task), "cannot be an adapter's name", f"--task {task}")
add("bert.py: no encoder", None, "loop", "loop", "bert.py")

# --------------------------------------------------------------------------------------------------
# Data


def pair(label, a=b'"a"'):
    return b'{"sentence1": %s, "sentence2": "b", "label": %s}\n' % (a, label)


for name, content, say in [
    ("null in line 3", pair(b"0") * 2 + b"null\n", "line 3: not a JSON object"),
    ("cut off", pair(b"0") + pair(b"0")[:-9], "line 2: broken JSON"),
    ("a column missing", b'{"sentence1": "a", "label": 1}\n', ["line 1", "'sentence2'"]),
    ("label 2", pair(b"2"), ["line 1", "label 2", "not_entailment"]),
    ("label 0.0", pair(b"0.0"), "label 0.0"),
    ("labels of two kinds", pair(b"0") + pair(b'"x"'), "line 2: label 'x'"),
    ("text a list", pair(b"0", b'["a"]'), "'sentence1' holds list"),
    ("text null", pair(b"0", b"null"), "'sentence1' is missing"),
    ("half a surrogate pair", pair(b"0", b'"\\ud800"'), "surrogate"),
    ("invalid UTF-8", pair(b"0") + pair(b"0", b'"caf\xe9"'), "not UTF-8"),
]:
    change, say = put("data/rte/train.jsonl", content), [say] if isinstance(say, str) else say
    add(f"rows: {name}", change, ["data/rte/train.jsonl", *say])
add("no validation.jsonl", gone("data/rte/validation.jsonl"), ["validation", "rte"])
for name, given, say in [
    ("no label", [{"target": "x", "text_a": "a"}], "no column 'label'; it has target, text_a"),
    ("one label", [A, A], "nothing to learn"),
    ("label null", [A, {**A, "label": None}], "line 2: label None"),
    ("labels are 0.5", [{**A, "label": 0.5}, {**B, "label": 1}], "label 0.5"),
    ("labels with a blank", [A, {**B, "label": "x "}], "make them one"),
    ("labels é", [{**A, "label": t} for t in ("\u00e9", "e\u0301")], "make them one"),
    ("text_b null", [{**A, "text_b": "b"}, {**B, "text_b": None}], "line 2: column 'text_b'"),
    ("one choice", [{"choices": ["a"], "label": 0}], "'choices' must be a list of at least two"),
    ("fewer choices", [{"choices": c, "label": 0} for c in (["a", "b"], ["a"])], "line 2"),
    ("choice 2 of 2", [{"choices": ["a", "b"], "label": 2}], "label 2"),
    ("choice -1", [{"choices": ["a", "b"], "label": -1}], "the label is hidden (-1)"),
]:
    say = ["data/mine/train.jsonl", say]
    add(f"own task: {name}", rows(*given), say, "--task mine")
change = put("data/mine/validation.jsonl", json.dumps({**A, "label": "z"}))
change = both(rows(A, B), change)
add("own task: a new label", change, ["validation.jsonl", "'z'"], "--task mine")
add("train.jsonl is a pipe", pipe("data/rte/train.jsonl"), "no train split")
change = both(gone("data/rte"), put("data/rte", b"x"))
add("a file in the task's place", change, "not a directory")


# --------------------------------------------------------------------------------------------------
# Encoders and tokenizers

WEIGHTS = "model/model.safetensors"
add("config.json nested", put("model/config.json", DEEP), "config.json", "model", "bert.py")
add("model.safetensors is a pipe", pipe(WEIGHTS), "no encoder in model")
add("no weights", gone(WEIGHTS), ["no encoder", "model.safetensors"])
change = with_nan(WEIGHTS, "layer.1.attention.output.dense.weight")
add("an encoder with NaN", change, "attention_dense.weight", "--stage adapter")
overflow = tensors(WEIGHTS, lambda _, t: t * 1e38)
add("an encoder whose numbers overflow", overflow, "the loss is nan")
add("--lr 1e38", None, ["nan", "nothing is kept", "--lr"], "--lr 1e38 --batch-size 8")
one_segment = tensors(WEIGHTS, lambda name, t: t[:1] if "token_type" in name else t)
one_segment = both(edit("model/config.json", type_vocab_size=1), one_segment)
add("an encoder of one segment", one_segment, "2 kinds of segments, the encoder 1")
add("no tokenizer", gone("model/vocab.txt"), "tokenizer")


def of_words(pair="", **vocabulary):
    """tokenizer.json of whole words. pair: what it makes of two texts, where it adds a token."""
    tokenizer = Tokenizer(WordLevel({"a": 0, "[UNK]": 1, **vocabulary}, "[UNK]"))
    if pair:
        special = {"special_tokens": [("a", 0)]}
        tokenizer.post_processor = TemplateProcessing(single="a $A", pair=pair, **special)
    return tokenizer.to_str()


ONE_OF_TWO = of_words("a $A $B").replace('"id":"B"', '"id":"A"')
for name, file, content, say in [
    ("empty", "vocab.txt", "", "not found in the vocabulary"),
    ("binary", "vocab.txt", bytes(range(256)), "cannot be read"),
    ("one word more", "vocab.txt", "\n".join([*VOCABULARY, "x"]), f"{len(VOCABULARY) + 1} tokens"),
    ("nested", "tokenizer.json", DEEP, "cannot be read"),
    ("no [CLS]", "tokenizer.json", of_words(), "adds 0 tokens"),
    ("gaps", "tokenizer.json", of_words(b=9999), "knows 10000 tokens"),
    ("one text of two", "tokenizer.json", ONE_OF_TWO, "drops one of two texts"),
    ("segments", "tokenizer.json", of_words("a $A $B:7"), "8 kinds of segments"),
]:
    add(f"{file}: {name}", put(f"model/{file}", content), ["model", say])

# --------------------------------------------------------------------------------------------------
# Adapters and fusions

CONFIG, FILE = "runs/rte/adapter_config.json", "runs/rte/adapter.safetensors"
for name, change, say in [
    ("NaN", with_nan(FILE, "adapter_down.0.weight"), [FILE, "not finite"]),
    ("another shape", tensors(FILE, lambda _, t: t[None]), [FILE, "here it must be a float"]),
    ("no weights", gone(FILE), ["no weights", "adapter.safetensors"]),
    ("broken JSON", put(CONFIG, b"{"), [CONFIG, "line 1"]),
    ("RTE", edit("runs/sst2/adapter_config.json", name="RTE"), "two adapters are called 'RTE'"),
]:
    add(f"adapter: {name}", change, say, FUSE)

FUSION = "runs/fusion-rte"
FUSION_FILE = f"{FUSION}/model_adapter_fusion.safetensors"
for name, run, change, say in [
    ("head with NaN", "runs/rte", with_nan("runs/rte/model_head.safetensors"), "not finite"),
    ("task ../x", "runs/rte", edit("runs/rte/config.json", task="../x"), "../x"),
    ("no config.json", "runs/rte", gone("runs/rte/config.json"), "config.json"),
    ("NaN", FUSION, with_nan(FUSION_FILE, "value"), "not finite"),
    ("a copy is missing", FUSION, gone(f"{FUSION}/adapters/sst2"), "sst2"),
]:
    add(f"evaluate {run}: {name}", change, say, run, "evaluate")

# --------------------------------------------------------------------------------------------------
# States, other people's directories, pickles

CODE = {"x": torch.ones(2), "y": Writes()}
a_run = put("out/config.json", json.dumps({"stage": "head", "command": "train.py"}))
change = both(a_run, put("out/log.jsonl", b""), pickled(CODE, "out/resume.pt"))
add("resume.pt with code", change, "out/resume.pt", "--resume")
LOG = put("out/log.jsonl", b'{"epoch": 1}\n')
for name, change in [
    ("a log.jsonl of another program", LOG),
    ("an encoder and a log.jsonl", both(LOG, put("out/model.safetensors", b"weights"))),
    ("another's config.json", both(LOG, put("out/config.json", b'{"model_type": "bert"}'))),
    ("notes", put("out/notes", b"x")),
]:
    for option in ("--overwrite", "--resume"):
        add(f"{option} of {name}", change, "out", option)
add("--lr 1e38 beside a stranger's log", LOG, "holds other files", "--lr 1e38")
for file, command, words in [
    ("model/pytorch_model.bin", "train.py", ""),
    ("runs/rte/pytorch_adapter.bin", "train.py", FUSE),
    ("runs/rte/pytorch_model_head.bin", "evaluate", "runs/rte"),
    ("runs/fusion-rte/pytorch_model_adapter_fusion.bin", "evaluate", "runs/fusion-rte"),
]:
    safe = file.replace("pytorch_", "").replace(".bin", ".safetensors")
    change = both(gone(safe), pickled(CODE, file))
    add(f"{file} with code", change, [file, "refused"], words, command)

# --------------------------------------------------------------------------------------------------
# Another encoder of the same shape, outputs that are not finite

OTHER = tensors(WEIGHTS, lambda _, t: t * 1.5)
HERE = [edit(f"runs/{run}/config.json", model="model") for run in ("rte", "sst2")]
ALLOW = "--allow-other-encoder"
add("adapters of another encoder", both(*HERE, OTHER), ["other weights", ALLOW], FUSE)
for command, words in {
    "evaluate": "runs/rte",
    "predict": "runs/rte 'a text' another",
    "figure4": "runs/fusion-rte",
    "prune": "runs/fusion-rte",
}.items():
    for name, change in (("encoder", OTHER), ("tokenizer", shuffled_vocabulary)):
        say = [f"another {name} than", ALLOW]
        add(f"{command}: another {name}", change, say, f"{words} --model model", command)
    words = f"{words} --model model {ALLOW}"
    add(f"{command}: outputs that are not finite", overflow, "not finite", words, command)
for name, change in (("encoder", OTHER), ("tokenizer", shuffled_vocabulary)):
    change = both(*HERE, change)
    add(f"publish: another {name}", change, f"another {name} than", "runs/rte", "publish")

# --------------------------------------------------------------------------------------------------


@pytest.fixture
def box(encoder, data_dir, runs, tmp_path, monkeypatch):
    """A directory with model/, data/, runs/ and loop, to be changed; the working directory."""
    for name, source in (("model", encoder), ("data", data_dir), ("runs", runs)):
        shutil.copytree(source, tmp_path / name)
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def listing(directory):
    """{path: time of its last change}, None for a directory"""
    paths = directory.rglob("*")
    return {path: None if path.is_dir() else path.lstat().st_mtime_ns for path in paths}


@pytest.fixture
def time_limit():
    def stop(*_):
        pytest.fail("not done after 20 s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", CASES)
def test_wrong_input(name, box, refused, monkeypatch, time_limit):
    command, change, say, words = CASES[name]
    module, common = COMMANDS[command]
    main = importlib.import_module(module).main
    if change:
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


def test_the_digest_is_of_the_numbers(box):
    """The same in another kind of file, another for a single other number."""
    first = Bert.from_pretrained("model")
    shutil.copytree("model", "bin")
    torch.save(load_file(WEIGHTS), "bin/pytorch_model.bin")
    gone("bin/model.safetensors")()
    assert Bert.from_pretrained("bin").digest == first.digest
    first.layers[1].query.bias.data[3] += 1e-7
    first.save_pretrained("other")
    assert Bert.from_pretrained("other").digest != first.digest
