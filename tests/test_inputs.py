"""Wrong input: each ends in one line on stderr and exit status 2, with nothing written."""

import importlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from safetensors.torch import load_file, save_file

import train
from bert import Bert
from child import ROOT
from conftest import cli, write_rows

# A case is a command, in a directory of its own with model/, data/ and runs/; what the line says;
# and {file: how it is changed beforehand}. Each is of a check of what would otherwise pass.
BOX = "--model model --data-dir data --out out"
TRAIN = f"--stage head --task rte {BOX} --epochs 1"
FUSE, SET = "--stage fusion --adapters runs/rte runs/sst2", "--stage adapter --adapter-config"
NOTHING_CHANGED = f"""
--epochs 0 | --epochs: must be
--lr 1e38 --batch-size 8 | the loss is not finite in epoch 1: a lower --lr may help
--max-length 49 | --max-length must be in 8 .. 48
--score loss | --score loss: rte has accuracy
{SET} ln_after=true ln_after=false | one name twice
{SET} reduction_factor='{{"2":4,"default":2}}' | the encoder has layers 0 to 1, and no 2
{SET} ln_affter=true | unexpected keyword argument 'ln_affter'
{SET} ln_after=yes | ln_after must be one of True, False, not 'yes'
--stage adapter --adapters runs/rte | --stage adapter takes no --adapters
--stage fusion | --stage fusion needs --adapters
--stage distill | there are adapter, fusion, head, full
--dev-file data/rte/validation.jsonl | --dev-file goes with --train-file
--dev-fraction 0.5 | --dev-fraction: rte has a development set already
--columns sentnce2=b | --columns sentnce2=b: the task takes sentence1, sentence2, label, and
--task argument | no train split for task 'argument'
--task rtee | unknown task 'rtee'
--task half | 'half' cannot be an adapter's name
--task a.b | 'a.b' cannot be an adapter's name
--data-dir nowhere | nowhere is not a directory
--model ./x | there is no directory './x'
--out model/config.json | is a file
--out model --overwrite | holds other files
{FUSE} x=runs/sst2 y=runs/sst2 X=runs/sst2 | two adapters are called 'X'
{FUSE} runs/fusion-rte | no adapter in runs/fusion-rte: --stage adapter, or --resume
{FUSE} --out runs/rte --overwrite | would replace
multitask: {BOX} --tasks rte rte | one task twice
tables: {BOX} --tasks rte -- --seed 3 | --seed
composition: {BOX} --target rte --sources rtee | unknown task 'rtee'
evaluate: runs/fusion-rte --task sst2 | a run on rte, not on 'sst2'
evaluate: runs/rte --model data | no encoder in data
evaluate: runs | no finished run in runs
"""
CASES = [(*line.split(" | "), {}) for line in NOTHING_CHANGED.strip().splitlines()]


def times(factor, part=""):
    """Multiplies those tensors of a file whose name has this part."""

    def change(path):
        found = {n: t * factor if part in n else t.clone() for n, t in load_file(path).items()}
        save_file(found, path)

    return change


NAN, RTE, TOKENS = float("nan"), "data/rte/train.jsonl", "model/vocab.txt"
WEIGHTS, CONFIG = "model/model.safetensors", "model/config.json"
A, B = {"text_a": "a", "label": "x"}, {"text_a": "b", "label": "y"}
CASES += [  # a change is (old text, new text), a function of the path, or all of the file
    ("", "row 1: label 2 is not one of entail", {RTE: ('"label": 1', '"label": 2')}),
    ("", "row 1: the label is hidden (-1)", {RTE: ('"label": 1', '"label": -1')}),
    ("", "row 1: column 'sentence1' holds list", {RTE: ('"sentence1":', '"sentence1": [], "x":')}),
    ("", "row 1: no column 'sentence2'", {RTE: ("sentence2", "x")}),
    ("", "no validation split", {"data/rte/validation.jsonl": Path.unlink}),
    ("", "layer.1.output.dense.weight", {WEIGHTS: times(NAN, "1.output.dense.w")}),
    ("", "30 tokens and 2 types", {TOKENS: ("red\n", "red\nx\n")}),
    ("", "'distilbert' is not known: there are bert", {CONFIG: ('e": "bert', 'e": "distilbert')}),
    ("", "absolute position", {CONFIG: ('"absolute"', '"relative_key"')}),
    (FUSE, "not finite", {"runs/rte/adapter.safetensors": times(NAN, "down.0.weight")}),
    (FUSE, "trained on an encoder with other weights than model", {WEIGHTS: times(1.5)}),
    ("evaluate: runs/rte --model model", "another encoder", {WEIGHTS: times(1.5)}),
    ("evaluate: runs/rte --model model", "tokenizer", {TOKENS: ("red\ngreen", "green\nred")}),
    ("predict: runs/rte a b", "'distill' is", {"runs/rte/run.json": ('"adapter"', '"distill"')}),
]
MINE = "--task mine --train-file mine.csv --dev-fraction 0.5 --columns"
for columns, say in [  # the messages have the file's own names, whatever is renamed
    ("text_a=Review label=gold", "--columns text_a=Review: the task takes text_a, text_b, choices"),
    ("labl=gold", "text_b, choices, label, and mine.csv has Review (raw), id, gold"),
    ("text_a=id text_b=gold", "no column 'label'; it has Review (raw), id, gold"),
]:
    CASES.append((f"{MINE} {columns}", say, {"mine.csv": "Review (raw),id,gold\na,1,x\nb,2,y\n"}))
X, Y = {"choices": ["a", "b"], "label": 0}, {"choices": ["a", "b"], "label": 1}
for file, content, say in [  # the training file of a task of one's own: rows, or all of it
    ("train.jsonl", [A, A], "nothing to learn"),
    ("train.jsonl", [A, {**A, "label": None}], "a label is None"),
    ("train.jsonl", [{**A, "label": 0.5}, {**B, "label": 1}], "a label is 0.5"),
    ("train.jsonl", [{**A, "text_b": "b"}, {**B, "text_b": None}], "row 2: column 'text_b' is em"),
    ("train.jsonl", [{"choices": ["a"], "label": 0}], "'choices' must be a list of at least two"),
    ("train.jsonl", [X, {**Y, "choices": ["a"]}], "row 2: 1 choices, expected 2"),
    ("train.jsonl", [X, {**Y, "choices": {"text": ["a", "b"]}}], "not hold a list of texts"),
    ("train.jsonl", '{"text_a": "a", "label": "x"}\n{"text_a"', "line 2: "),
    ("train.jsonl", "null\n", "a row is no JSON object"),
    ("train.csv", "text_a,label\na,x,y\n", "row 1 has 3 fields, the first line 2"),
    ("train.csv", "label,label\na,x\n", "two columns are called 'label'"),
]:
    CASES.append(("--task mine", say, {f"data/mine/{file}": content}))
both = {"data/mine/train.jsonl": [A, B], "data/mine/dev.jsonl": [{**A, "text_b": "b"}]}
CASES.append(("--task mine", "column 'text_b' is none of the task's, which are text_a", both))


@pytest.fixture
def box(encoder, data_dir, runs, tmp_path, monkeypatch):
    """A directory with model/, data/ and runs/, to be changed; the working directory."""
    for name, source in (("model", encoder), ("data", data_dir), ("runs", runs)):
        shutil.copytree(source, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def change(path, how):
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(how, list):
        write_rows(path, how)
    elif isinstance(how, tuple):
        path.write_text(path.read_text().replace(*how, 1))
    elif isinstance(how, str):
        path.write_text(how)
    else:
        how(path)


@pytest.mark.parametrize("line, say, changes", CASES)
def test_wrong_input(line, say, changes, box, refused):
    command, _, words = line.rpartition(": ")
    main = importlib.import_module(f"experiments.{command}").main if command else train.main
    for path, how in changes.items():
        change(Path(path), how)
    before = {path: path.lstat().st_mtime_ns for path in box.rglob("*")}
    refused(shlex.split(words if command else f"{TRAIN} {words}"), say, main=main)
    assert {path: path.lstat().st_mtime_ns for path in box.rglob("*")} == before


def test_any_exception_is_one_line(box, refused, monkeypatch):
    """What nobody has thought of, too."""
    monkeypatch.setattr(Bert, "from_pretrained", Mock(side_effect=AttributeError("no\nx")))
    say = "train.py: AttributeError: no x (with ADAPTERFUSION_TRACEBACK=1"
    refused(cli(TRAIN), say)
    assert not Path("out").exists()


def test_a_user_sees_one_line(box):
    """A process of its own: warnings, crashes and threads of libraries would show here."""
    change(Path(RTE), ('"label": 1', '"label": 7'))
    words = [sys.executable, ROOT / "train.py", *cli(TRAIN)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2 and not Path("out").exists()
    assert done.stderr.count("\n") == 1 and "row 1: label 7 is not one of entail" in done.stderr
