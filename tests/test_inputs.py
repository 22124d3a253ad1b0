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

import datasets
import pytest
import torch
from safetensors.torch import load_file, save_file

import data
import train
from bert import Bert, BertConfig
from conftest import VOCABULARY, cli, write_rows
from formats.tokenizer import load_tokenizer

ROOT = Path(train.__file__).parent
TRAIN = cli("--stage head --task rte --model model --data-dir data --out out --epochs 1")
COMMANDS = {  # name: (module, the words that a case's are appended to)
    "train.py": ("train", TRAIN),
    "train.py alone": ("train", ["--out", "out"]),
    "bert.py": ("bert", []),
    "data.py": ("data", cli("rte --model model --data-dir data")),
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
def edit(path, inside=None, **values):
    """Fields of a JSON file, or of the object `inside` it; None removes one."""
    content = json.loads(Path(path).read_text())
    part = content[inside] if inside else content
    part.update(values)
    for name in [name for name, value in values.items() if value is None]:
        del part[name]
    Path(path).write_text(json.dumps(content))


@later
def tensors(path, function):
    """function(name, tensor) -> tensor, for all of a safetensors file."""
    result = {name: function(name, tensor.clone()) for name, tensor in load_file(path).items()}
    save_file({name: tensor.contiguous() for name, tensor in result.items()}, path)


def spoil(path, value, part=""):
    """One number of every tensor whose name holds `part`."""

    def function(name, tensor):
        if part in name:
            tensor.view(-1)[0] = value
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


class Writes:
    """Unpickled, it writes the file `executed`."""

    def __reduce__(self):
        return open, ("executed", "w")


@later
def pickled(path, content):
    torch.save(content, path)


@later
def small_encoder(**sizes):
    """Another encoder in model/."""
    values = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    values |= dict(intermediate_size=64, max_position_embeddings=48)
    Bert(BertConfig(len(VOCABULARY), **{**values, **sizes})).save_pretrained("model")


def shuffled_vocabulary():
    words = Path("model/vocab.txt").read_text().split()
    put("model/vocab.txt", "\n".join(words[:5] + words[:4:-1]) + "\n")()


NAN = float("nan")
DEEP = b"[" * 100_000 + b"]" * 100_000
LONG = "x" * 300
A_RUN = json.dumps({"stage": "head", "command": "train.py"})
IN_OUT = both(put("out/config.json", A_RUN), put("out/log.jsonl", b""))

# --------------------------------------------------------------------------------------------------
# Arguments: words | what the message says

for line in f"""
--epochs 0 | --epochs must be
--epochs 1.5 | --epochs
--batch-size 0 | --batch-size must be
--batch-size {10**20} | --batch-size
--grad-accumulation 0 | --grad-accumulation must be
--lr 0 | --lr must be
--lr nan | --lr must be
--weight-decay -1 | --weight-decay must be
--warmup 1 | --warmup must be
--limit-train 0 | --limit-train must be
--limit-dev 0 | --limit-dev must be
--max-length 7 | --max-length must be
--max-length 49 | --max-length must be in 8 .. 48
--patience 0 | --patience must be
--save-minutes nan | --save-minutes must be
--dev-fraction 1 | --dev-fraction must be
--seed {2**32} | --seed
--seeds 1 1 | twice
--seeds 1 --seed 2 | --seed
--seeds -1 | --seeds
--score loss | --score loss: rte has accuracy
--task pick --score macro_f1 | --score macro_f1: pick has accuracy
--stage adapter --reduction-factor 0 | --reduction-factor must be a positive number
--stage adapter --reduction-factor 33 | --reduction-factor 33 leaves no bottleneck
--stage adapter --adapter none | --adapter none leaves
--stage sideways | sideways
--speed 9 | --speed 9
--task | --task
--resume --overwrite | choose one
--columns text_a=a text_a=b | --columns
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
--out model/config.json/x | Not a directory
--out /proc/x/y | /proc/x
--out . --overwrite | holds other files
--out model --overwrite | config.json is not a run's
--out runs/rte | --overwrite
--out runs/rte --task rtx --overwrite | unknown task
--out runs/rte --seeds 0 1 --overwrite | is itself a run
{FUSE} runs/none | runs/none
{FUSE} runs/rte/adapter_config.json | there is no directory
{FUSE} runs/rte | two adapters are called 'rte'
{FUSE} runs/mnli | --stage adapter --task mnli
{FUSE} runs/fusion-rte | it is a run of --stage fusion
{FUSE} data | data has no adapter_config.json
{FUSE} paper | cannot be reached
{FUSE} AdapterHub/bert-base-uncased-pf-rte | cannot be reached
{FUSE} --out runs/rte --overwrite | would replace
--stage fusion --adapters runs/fusion-rte/adapters/rte --out runs/fusion-rte --overwrite | replace
""".strip().splitlines():
    words, say = line.split(" | ")
    add(f"{words[:70]} ({say[:20]})", None, say, words)
for line in """
--stage adapter | takes --task
--stage multitask | takes --tasks
--stage multitask --tasks rte rte | each of them once
--stage multitask --tasks rte --steps-per-epoch 0 | --steps-per-epoch
--stage head --task rte --model model | --data-dir
--stage head --task rte --model model | nyu-mll/glue
""".strip().splitlines():
    words, say = line.split(" | ")
    add(f"alone: {words} ({say})", None, say, words, "train.py alone")
add("without arguments", None, "--stage", command="train.py alone")
add("--out is in a loop", None, "loop", "--out loop/x")
if not torch.cuda.is_available():
    add("no such device", None, ["cuda", "no such device"], "--device cuda")
TWO = {"text_a": "a", "label": "x"}, {"text_a": "b", "label": "y"}
for task in ("keys", "training", "a.b", "a,b"):  # the run could not be read again
    add(f"--task {task}", rows(*TWO, task=task), "cannot be an adapter's name", f"--task {task}")
add("bert.py without arguments", None, "SOURCE", command="bert.py")
add("bert.py: no encoder", None, "loop", "loop", "bert.py")
add("data.py: no such option", None, "--speed", "--speed 9", "data.py")

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
    ("label null", pair(b"null") * 2, "'label' is missing"),
    ("label a list", pair(b"[0]"), "label [0]"),
    ("labels of two kinds", pair(b"0") + pair(b'"x"'), "line 2: label 'x'"),
    ("text a list", pair(b"0", b'["a"]'), "'sentence1' holds list"),
    ("text null", pair(b"0", b"null"), "'sentence1' is missing"),
    ("half a surrogate pair", pair(b"0", b'"\\ud800"'), "surrogate"),
    ("invalid UTF-8", pair(b"0") + pair(b"0", b'"caf\xe9"'), "not UTF-8"),
]:
    change, say = put("data/rte/train.jsonl", content), [say] if isinstance(say, str) else say
    add(f"rows: {name}", change, ["data/rte/train.jsonl", *say])
validation = put("data/rte/validation.jsonl", b"1\n")
add("validation.jsonl of a number", validation, "validation.jsonl, line 1")
add("validation.jsonl missing", gone("data/rte/validation.jsonl"), ["validation", "rte"])
add("data.py rows: null", put("data/rte/train.jsonl", b"null\n"), "line 1", command="data.py")

table = put("data/rte/train.csv", "sentence1,sentence2,label\na,b,0,1\nc,d,1,2\n")
change = both(gone("data/rte/train.jsonl"), table)  # tests/test_rows.py has more of these
add("rows: one value too many", change, "data/rte/train.csv, line 2: 4 fields")

A, B = TWO
for name, given, say in [
    ("no label", [{"target": "x", "text_a": "a"}], "no column 'label'; it has target, text_a"),
    ("one label", [A, A], "nothing to learn"),
    ("label null", [A, {**A, "label": None}], "line 2: label None"),
    ("labels are 0.5", [{**A, "label": 0.5}, {**B, "label": 1}], "label 0.5"),
    ("labels with a blank", [A, {**B, "label": "x "}], "make them one"),
    ("labels é", [{**A, "label": t} for t in ("\u00e9", "e\u0301")], "make them one"),
    ("text_b null", [{**A, "text_b": "b"}, {**B, "text_b": None}], "line 2: column 'text_b'"),
    ("one choice", [{"choices": ["a"], "label": 0}], "'choices' must be a list of at least two"),
    ("choices of null", [{"choices": ["a", None], "label": 0}], "does not hold a list of texts"),
    ("fewer choices", [{"choices": c, "label": 0} for c in (["a", "b"], ["a"])], "line 2"),
    ("choice 2 of 2", [{"choices": ["a", "b"], "label": 2}], "label 2"),
    ("choice -1", [{"choices": ["a", "b"], "label": -1}], "the label is hidden (-1)"),
]:
    say = ["data/mine/train.jsonl", say]
    add(f"own task: {name}", rows(*given), say, "--task mine")
new_label = put("data/mine/validation.jsonl", json.dumps({**A, "label": "z"}))
new_label = both(rows(A, B), new_label)
add("own task: a new label", new_label, ["validation.jsonl", "'z'"], "--task mine")
hellaswag = {"ctx_a": "a", "ctx_b": "b", "endings": ["a", None, "c", "d"], "label": "0"}
change = rows(hellaswag, task="hellaswag")
add("hellaswag: endings", change, "does not hold a list of texts", "--task hellaswag")
change = rows({"question": "q", "answerKey": "A", "choices": ["a"]}, task="commonsense_qa")
add("commonsense_qa: choices", change, "choices", "--task commonsense_qa")
add("train.jsonl is a pipe", pipe("data/rte/train.jsonl"), "no train split")
not_directory = both(gone("data/rte"), put("data/rte", b"x"))
add("a file in the task's place", not_directory, "not a directory")


@later
def cache_in(place):
    """`datasets` is to have its cache there; the fixture `box` puts it back."""
    datasets.config.HF_DATASETS_CACHE = Path(place)


add("no cache", cache_in("/proc"), ["the cache of `datasets`", "HF_DATASETS_CACHE"])

# --------------------------------------------------------------------------------------------------
# Encoders and tokenizers

WEIGHTS = "model/model.safetensors"
too_large = edit("model/config.json", vocab_size=10**13)  # more memory than there is
add("config.json: vocab_size", too_large, "model")
add("config.json: hidden_size", edit("model/config.json", hidden_size=1e2), "hidden_size")
add("config.json nested", put("model/config.json", DEEP), "config.json", "model", "bert.py")
add("model.safetensors is a pipe", pipe(WEIGHTS), "no encoder in model")
add("no weights", gone(WEIGHTS), ["no encoder", "model.safetensors"])
change = spoil(WEIGHTS, NAN, "layer.1.attention.output.dense.weight")
add("an encoder with NaN", change, "attention_dense.weight", "--stage adapter")
add("bert.py: an encoder with NaN", change, "attention_dense.weight", "model", "bert.py")
overflow = tensors(WEIGHTS, lambda _, t: t * 1e38)
add("an encoder whose numbers overflow", overflow, "the loss is nan")
add("--lr 1e38", None, ["nan", "nothing is kept", "--lr"], "--lr 1e38 --batch-size 8")
one_segment = tensors(WEIGHTS, lambda name, t: t[:1] if "token_type" in name else t)
one_segment = both(edit("model/config.json", type_vocab_size=1), one_segment)
add("an encoder of one segment", one_segment, "2 kinds of segments, the encoder 1")
add("bert.py: one segment", one_segment, "2 kinds of segments", "model", "bert.py")
add("no tokenizer", gone("model/vocab.txt"), "tokenizer")

TOKENIZER = {
    **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder")),
    **{"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}},
    "model": {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"},
}
FRAME = [{"SpecialToken": {"id": "a", "type_id": 0}}]


def text(name, segment=0):
    return {"Sequence": {"id": name, "type_id": segment}}


def template(pair, single=None, frame=FRAME):
    """tokenizer.json with templates of its own."""
    single = [text("A")] if single is None else single
    special = {"a": {"id": "a", "ids": [0], "tokens": ["a"]}}
    templates = {"single": [*frame, *single], "pair": [*frame, *pair], "special_tokens": special}
    return {**TOKENIZER, "post_processor": {"type": "TemplateProcessing", **templates}}


GAPS = {**TOKENIZER, "model": {**TOKENIZER["model"], "vocab": {"a": 9999, "[UNK]": 1}}}
for name, file, content, say in [
    ("empty", "vocab.txt", "", "not found in the vocabulary"),
    ("binary", "vocab.txt", bytes(range(256)), "cannot be read"),
    ("one word more", "vocab.txt", "\n".join([*VOCABULARY, "x"]), f"{len(VOCABULARY) + 1} tokens"),
    ("a list", "tokenizer_config.json", [1], "cannot be read"),
    ("nested", "tokenizer.json", DEEP, "cannot be read"),
    ("no [CLS]", "tokenizer.json", TOKENIZER, "adds 0 tokens"),
    ("60 tokens more", "tokenizer.json", template([], (), FRAME * 60), "adds 60 tokens"),
    ("gaps", "tokenizer.json", GAPS, "knows 10000 tokens"),
    ("one text of two", "tokenizer.json", template([text("A")]), "drops one of two texts"),
    ("segments", "tokenizer.json", template([text("A"), text("B", 7)]), "8 kinds of segments"),
]:
    content = content if isinstance(content, (str, bytes)) else json.dumps(content)
    add(f"{file}: {name}", put(f"model/{file}", content), ["model", say])

# --------------------------------------------------------------------------------------------------
# Adapters and fusions

CONFIG, FILE = "runs/rte/adapter_config.json", "runs/rte/adapter.safetensors"
for name, change, say in [
    ("NaN", spoil(FILE, NAN, "adapter_down.0.weight"), [FILE, "not finite"]),
    ("integers", tensors(FILE, lambda _, t: t.long()), [FILE, "must be a float"]),
    ("another shape", tensors(FILE, lambda _, t: t[None]), [FILE, "here it must be a float"]),
    ("no weights", gone(FILE), ["no weights", "adapter.safetensors"]),
    ("broken JSON", put(CONFIG, b"{"), [CONFIG, "line 1"]),
    ("name ../x", edit(CONFIG, name="../x"), [CONFIG, "cannot be an adapter's name"]),
    ("is_parallel", edit(CONFIG, "config", is_parallel=True), "is_parallel"),
    ("factor NaN", edit(CONFIG, "config", reduction_factor=NAN), "reduction_factor"),
    ("activation", edit(CONFIG, "config", non_linearity="x"), "non_linearity"),
    ("a text", edit(CONFIG, "config", original_ln_before="yes"), "original_ln_before"),
    ("RTE", edit("runs/sst2/adapter_config.json", name="RTE"), "two adapters are called 'RTE'"),
]:
    add(f"adapter: {name}", change, say, FUSE)
for sizes, say in [({"hidden_size": 16}, "hidden_size 32"), ({"num_hidden_layers": 1}, "layer.1")]:
    words = f"{FUSE} --allow-other-encoder"
    add(f"adapters on an encoder of {sizes}", small_encoder(**sizes), say, words)

RUN, HEAD = "runs/rte/config.json", "runs/rte/head_config.json"
FUSION = "runs/fusion-rte/adapter_fusion_config.json"
FUSION_FILE = "runs/fusion-rte/model_adapter_fusion.safetensors"
for name, change, say in [
    ("head with NaN", spoil("runs/rte/model_head.safetensors", NAN), "not finite"),
    ("head of other labels", edit(HEAD, "config", num_labels=3), "model_head"),
    ("no stage", edit(RUN, stage=["adapter"]), "config.json"),
    ("no model", edit(RUN, model=None), "model"),
    ("task ../x", edit(RUN, task="../x"), "../x"),
    ("no labels", edit(RUN, labels=None), "labels"),
    ("no config.json", gone(RUN), "config.json"),
]:
    add(f"evaluate a run: {name}", change, say, "runs/rte", "evaluate")
for name, change, say in [
    ("NaN", spoil(FUSION_FILE, NAN, "value"), "not finite"),
    ("other shapes", tensors(FUSION_FILE, lambda _, t: t[:-1]), "must be a float"),
    ("a copy is missing", gone("runs/fusion-rte/adapters/sst2"), "sst2"),
]:
    add(f"evaluate a fusion: {name}", change, say, "runs/fusion-rte", "evaluate")

# --------------------------------------------------------------------------------------------------
# States, other people's directories, pickles

code = {"config": {}, "trained": {"x": Writes()}}
for name, change in [
    ("code", pickled("out/resume.pt", code)),
    ("a list", pickled("out/resume.pt", [1, 2])),
    ("binary", put("out/resume.pt", bytes(range(256)) * 99)),
]:
    add(f"resume.pt: {name}", both(IN_OUT, change), "out/resume.pt", "--resume")
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
CODE = {"x": torch.ones(2), "y": Writes()}
for file, command, words in [
    ("model/pytorch_model.bin", "train.py", ""),
    ("runs/rte/pytorch_adapter.bin", "train.py", FUSE),
    ("runs/rte/pytorch_model_head.bin", "evaluate", "runs/rte"),
    ("runs/fusion-rte/pytorch_model_adapter_fusion.bin", "evaluate", "runs/fusion-rte"),
]:
    safe = file.replace("pytorch_", "").replace(".bin", ".safetensors")
    change = both(gone(safe), pickled(file, CODE))
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
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", datasets.config.HF_DATASETS_CACHE)
    return tmp_path


def listing(directory):
    """{path: time of its last change}, None for a directory"""
    paths = directory.rglob("*")
    return {path: None if path.is_dir() else path.lstat().st_mtime_ns for path in paths}


@pytest.fixture
def time_limit():
    late = []

    def stop(*_):
        late.append("not done after 20 s")
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    assert not late


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
    assert line.startswith(("bert", "data", "train", *COMMANDS))
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


def test_texts_that_only_look_wrong(box):
    """Empty, of unknown tokens alone, with NUL and control characters, behind a byte-order mark:
    all train."""
    texts = ["", "\u2603\u2603", "\0\x01\x1b[2J", "\ufeff", "\u202eabc", "x" * 10_000, "[PAD]"]
    found = [{"sentence1": a, "sentence2": b, "label": 0} for a in texts for b in texts]
    for split in ("train", "validation"):
        path = Path(f"data/rte/{split}.jsonl")
        write_rows(path, found)
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    result = train.main(TRAIN)
    assert result["train_examples"] == result["dev_examples"] == len(found)


def tokens():
    tokenizer = load_tokenizer("model", 32)
    return data.load_split(data.get_task("rte", "data"), "train", tokenizer, "data")["input_ids"][:]


def test_the_same_path_and_time_with_other_content(box):
    path, before = Path("data/rte/train.jsonl"), tokens()
    times = path.stat()
    path.write_text(path.read_text().replace("cat", "dog"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert tokens() != before and len(tokens()) == len(before)


def test_another_encoder_is_allowed_on_request(box, capsys):
    OTHER()
    train.main([*TRAIN, *FUSE.split(), ALLOW])
    assert capsys.readouterr().out.count("note: runs/rte was trained on an encoder with other") == 1


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


def test_out_of_memory_while_the_model_is_built(box, refused, monkeypatch):
    def build(*_):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] can't allocate memory: 9 bytes")

    for error in (build, lambda *_: bytearray(10**15)):
        monkeypatch.setattr(Bert, "from_pretrained", error)
        refused(TRAIN, "out of memory")
