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
    "tables": ("experiments.tables", cli("--model model --data-dir data --out out --tasks rte")),
}


def later(function):
    """later(f)(x) is a function of no argument, called in the directory of the case."""
    return lambda *values, **named: partial(function, *values, **named)


@later
def put(path, text):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


@later
def rows(*rows, task="mine"):
    """The same rows for training and development."""
    for split in ("train", "validation"):
        put(f"data/{task}/{split}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))()


@later
def edit(path, **values):
    Path(path).write_text(json.dumps({**json.loads(Path(path).read_text()), **values}))


@later
def times(path, factor, part=""):
    """Multiplies those tensors of a file whose name has this part."""
    found = {n: t * factor if part in n else t.clone() for n, t in load_file(path).items()}
    save_file(found, path)


def shuffle_vocabulary():
    put("model/vocab.txt", "\n".join([*VOCABULARY[:5], *VOCABULARY[:4:-1]]))()


FUSE, SET = "--stage fusion --adapters runs/rte runs/sst2", "--stage adapter --adapter-config"
MINE = "--task mine --train-file mine.csv --dev-fraction 0.5 --columns"
CASES = []  # (command, arguments, what the message says, changes)
for line in f"""
--epochs 0 | --epochs: must be
--lr nan | --lr: must be
--max-length 49 | --max-length must be in 8 .. 48
{SET} ln_after=true ln_after=false | one name twice
--score loss | --score loss: rte has accuracy
{SET} reduction_factor='{{"2":4,"default":2}}' | the encoder has layers 0 to 1, and no 2
{SET} ln_affter=true | unexpected keyword argument 'ln_affter'
{SET} ln_after=yes | ln_after must be one of True, False, not 'yes'
--stage adapter --adapters runs/rte | --stage adapter takes no --adapters
--stage fusion | --stage fusion needs --adapters
--stage distill | there are adapter, fusion, head, full
--dev-file data/rte/validation.jsonl | --dev-file goes with --train-file
--dev-fraction 0.5 | --dev-fraction: rte has a development set already
--columns sentnce2=b | --columns sentnce2=b: the task takes sentence1, sentence2, label, and
--columns sentence2=b | and data/rte/train.jsonl has sentence1, sentence2
--task argument | no train split for task 'argument'
--task rtee | unknown task 'rtee'
--data-dir nowhere | nowhere is not a directory
--model ./x | there is no directory './x'
--model google-bert/bert-base-uncased | does not come from
--import examples.lor | No module named 'examples.lor'
--out model/config.json | is a file
--out . --overwrite | holds other files
--out model --overwrite | holds other files
--out runs/rte | --overwrite
{FUSE} runs/none | runs/none
{FUSE} runs/rte | two adapters are called 'rte'
{FUSE} x=runs/sst2 y=runs/sst2 X=runs/sst2 | two adapters are called 'X'
{FUSE} runs/mnli | --stage adapter --task mnli
{FUSE} runs/fusion-rte | it is no run of --stage adapter
{FUSE} data | data has no adapter_config.json
{FUSE} --out runs/rte --overwrite | would replace
multitask: --tasks rte rte | one task twice
tables: -- --seed 3 | --seed
evaluate: runs/fusion-rte --task sst2 | a run on rte, not on 'sst2'
evaluate: runs/rte --model data | no encoder in data
evaluate: runs | no finished run in runs
fusion_weights: runs/rte | runs/rte
predict: runs/rte red | rte takes sentence1 and sentence2, not
""".strip().splitlines():
    command, words, say = re.fullmatch(r"(?:([a-z_]+): )?(.+) \| (.+)", line).groups("train.py")
    CASES.append((command, words, say, []))


def add(words, say, *changes, command="train.py"):
    CASES.append((command, words, say, changes))


def pair(label, a="a"):
    return {"sentence1": a, "sentence2": "b", "label": label}


A, B = {"text_a": "a", "label": "x"}, {"text_a": "b", "label": "y"}
X, Y = {"choices": ["a", "b"], "label": 0}, {"choices": ["a", "b"], "label": 1}
for given, say in [  # rows of rte
    ([pair(2)], "row 1: label 2 is not one of entailment, not_entailment"),
    ([pair(0), pair(0, ["a"])], "row 2: column 'sentence1' holds list"),
    ([pair(0, None)], "row 1: column 'sentence1' is empty"),
    ([{"sentence1": "a", "label": 1}], "row 1: no column 'sentence2'"),
    ([pair(-1)], "the label is hidden (-1)"),
]:
    add("--task rte", say, rows(*given, task="rte"))
for given, say in [  # of a task of one's own
    ([{"target": "x", "text_a": "a"}], "no column 'label'; it has target, text_a"),
    ([A, A], "nothing to learn"),
    ([A, {**A, "label": None}], "None"),
    ([A, {**A, "label": ""}], "''"),
    ([{**A, "label": 0.5}, {**B, "label": 1}], "a label is 0.5"),
    ([{**A, "text_b": "b"}, {**B, "text_b": None}], "row 2: column 'text_b'"),
    ([{"choices": ["a"], "label": 0}], "'choices' must be a list of at least two"),
    ([X, {**Y, "choices": ["a"]}], "row 2: 1 choices, expected 2"),
    ([X, {**Y, "choices": {"text": ["a", "b"]}}], "not hold a list of texts"),
    ([{**X, "label": 2}], "label 2"),
]:
    add("--task mine", say, rows(*given))
dev = put("data/mine/validation.jsonl", json.dumps({**A, "text_b": "b"}))
add("--task mine", "column 'text_b' is none of the task's", rows(A, B), dev)
for name in ("keys", "a.b"):
    add(f"--task {name}", "cannot be an adapter's name", rows(A, B, task=name))
for ending, content, say in [
    ("jsonl", json.dumps(A) + '\n{"text_a"', "line 2: "),
    ("jsonl", "null\n", "a row is no JSON object"),
    ("csv", "text_a,label\na,x,y\n", "row 1 has 3 fields, the first line 2"),
    ("csv", "text_a,label\na\n", "row 1 has 1 fields, the first line 2"),
    ("csv", "label,label\na,x\n", "two columns are called 'label'"),
]:
    add("--task mine", say, put(f"data/mine/train.{ending}", content))
HAS = "mine.csv has Review (raw), id, gold"
for names, say in [  # the file's own names, whatever is renamed
    ("text_a=Review label=gold", "--columns text_a=Review: the task takes text_a, text_b, choices"),
    ("labl=gold", f"labl=gold: the task takes text_a, text_b, choices, label, and {HAS}"),
    ("text_a=id text_b=gold", "no column 'label'; it has Review (raw), id, gold"),
]:
    add(f"{MINE} {names}", say, put("mine.csv", "Review (raw),id,gold\na,1,x\nb,2,y\n"))
add("", "no validation split", Path("data/rte/validation.jsonl").unlink)

# Encoders, tokenizers, adapters, other people's directories
WEIGHTS, FILE = "model/model.safetensors", "runs/rte/adapter.safetensors"
add(
    "",
    "layer.1.attention.output.dense.weight",
    times(WEIGHTS, float("nan"), "1.attention.output.d"),
)
add("--lr 1e38 --batch-size 8", "nothing is kept; a lower --lr may help")
add("", f"{len(VOCABULARY) + 1} tokens", put("model/vocab.txt", "\n".join([*VOCABULARY, "x"])))
say = "model_type 'distilbert' is not known: there are bert, roberta"
add("", say, edit("model/config.json", model_type="distilbert"))
add("", "absolute position", edit("model/config.json", position_embedding_type="relative_key"))
add(FUSE, "not finite", times(FILE, float("nan"), "adapter_down.0.weight"))
add(FUSE, "trained on an encoder with other weights than model", times(WEIGHTS, 1.5))
for change, say in ((times(WEIGHTS, 1.5), "another encoder"), (shuffle_vocabulary, "tokenizer")):
    add("runs/rte --model model", say, change, command="evaluate")
recorded = json.dumps({"options": {"stage": "distill", "dtype": "float32"}, "tasks": {}})
unknown = put("runs/rte/run.json", recorded)
add("runs/rte a b", "--stage 'distill' is not known", unknown, command="predict")
for option in ("--overwrite", "--resume"):
    add(option, "holds other files", put("out/log.jsonl", '{"epoch": 1}\n'))


@pytest.fixture
def box(encoder, data_dir, runs, tmp_path, monkeypatch):
    """A directory with model/, data/ and runs/, to be changed; the working directory."""
    for name, source in (("model", encoder), ("data", data_dir), ("runs", runs)):
        shutil.copytree(source, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "command, words, say, changes", CASES, ids=[f"{c[1]}: {c[2]}" for c in CASES]
)
def test_wrong_input(command, words, say, changes, box, refused):
    module, common = COMMANDS[command]
    main = importlib.import_module(module).main
    for change in changes:
        change()
    before = {path: path.lstat().st_mtime_ns for path in box.rglob("*")}
    refused([*common, *shlex.split(words)], say, name=command, main=main)
    after = {path: path.lstat().st_mtime_ns for path in box.rglob("*")}
    assert after == before


def test_any_exception_is_one_line(box, refused, monkeypatch):
    """What nobody has thought of, too."""
    monkeypatch.setattr(Bert, "from_pretrained", Mock(side_effect=AttributeError("no\nx")))
    refused(TRAIN, "train.py: AttributeError: no x (ADAPTERFUSION_TRACEBACK=1 in the environment")
    assert not Path("out").exists()


def test_a_user_sees_one_line(box):
    """A process of its own: warnings, crashes and threads of libraries would show here."""
    rows(pair(7), task="rte")()
    words = [sys.executable, ROOT / "train.py", *TRAIN]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2 and not Path("out").exists()
    assert done.stderr.count("\n") == 1 and "row 1: label 7 is not one of entail" in done.stderr


def test_a_name_that_only_looks_wrong(box):
    """Directories may be called anything: they are no patterns."""
    name = "[x]*?{a,b} #%20 é"
    Path(name).mkdir()
    for part in ("data", "model"):
        Path(part).rename(Path(name, part))
    places = {"model": f"{name}/model", "data_dir": f"{name}/data", "out": f"{name}/out"}
    assert train.main([*TRAIN, *cli("--limit-train 8", **places)])["train_examples"] == 8
