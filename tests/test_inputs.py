"""Wrong input: each ends in one line on stderr and exit status 2, with nothing written."""

import importlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

import train
from bert import Bert
from child import ROOT
from conftest import change, cli, times

# A case is a command, in a directory of its own with model/, data/ and runs/; what the line says;
# and {file: how it is changed beforehand}. Each is of a check of what would otherwise pass.
BOX, RTE = "--model model --data-dir data --out out", "data/rte/train.jsonl"
TRAIN = f"--stage head --task rte {BOX} --epochs 1"
FUSE, SET = "--stage fusion --adapters runs/rte runs/sst2", "--stage adapter --adapter-config"
MINE = f"{BOX} --target mine --sources"  # of the 96 rows of a file 24 are held out
FILE = f"-- --train-file {RTE} --columns text_a=sentence1 text_b=sentence2 --dev-fraction 0.25"
NOTHING_CHANGED = f"""
--epochs 0 | --epochs: must be
--lr 1e38 --batch-size 8 | the loss is not finite in epoch 1: a lower --lr may help
--max-length 49 | --max-length must be in 8 .. 48
--score loss | --score loss: rte has accuracy
{SET} reduction_factor='{{"2":4,"default":2}}' | the encoder has layers 0 to 1, and no 2
{SET} non_linearity=elu | non_linearity must be one of gelu, gelu_new, relu, silu, swish, leakyrelu
--stage adapter --adapters runs/rte | --stage adapter takes no --adapters
--stage fusion | --stage fusion needs --adapters
--cuda-graphs --device cpu | --cuda-graphs is for a GPU
multitask: {BOX} --tasks rte sst2 --cuda-graphs | --cuda-graphs is for a run on one task
--dev-file data/rte/validation.jsonl | --dev-file goes with --train-file
--dev-fraction 0.5 | --dev-fraction: rte has a development set already
--columns sentnce2=b | --columns sentnce2=...: the task, or its files, have only sentence1, sent
--task argument | no train split for task 'argument': there is no data/argument/train.jsonl
--task a.b | 'a.b' cannot be an adapter's name
--data-dir nowhere | there is no nowhere/rte/train.jsonl
--model ./x | ./x is no directory
--out model/config.json | is a file
--out model --overwrite | holds other files
{FUSE} x=runs/sst2 y=runs/sst2 X=runs/sst2 | two adapters are called 'X'
{FUSE} runs | no adapter in runs: there are runs/pick, runs/rte, runs/sst2
{FUSE} x=runs/rte/adapter.safetensors | it is a file, give runs/rte
--model model/model.safetensors | is a file: give its directory, model
{FUSE} --out runs/rte --overwrite | would replace
multitask: {BOX} --tasks rte --adapters runs/rte | --stage multitask takes no --adapters
multitask: {BOX} --tasks a b --train-file {RTE} | --train-file is of one task, not of a, b
composition: {BOX} --target rte --sources rtee | unknown task 'rtee'
composition: {MINE} a/rte b/RTE {FILE} | two adapters would be called 'rte'
composition: {MINE} a/rte sst2 {FILE} | --train-file is of mine alone, not of sst2
composition: {MINE} runs/rte --head-options '--lr 1' '--lr 2' {FILE} | need --choose-seeds
composition: {MINE} runs/rte --systems fusio {FILE} | there are head, full
composition: {BOX} --target rte --sources sst2 --test runs | there is no runs/rte/validation.jsonl
composition: {BOX} --target rte --sources sst2 --test data | --test must not be --data-dir
tables: {BOX} --tasks rte --source-options '--lr 1' | here a source's adapter has --adapter-options
architecture_search: {BOX} --tasks rte --train-examples 5 6 | the search takes one
composition: {MINE} runs/rte is/not/there --plan {FILE} | no adapter in is/not/there
evaluate: runs/fusion-rte --task sst2 | a run on rte: choose --task from
evaluate: runs/rte --model data | no encoder in data
evaluate: runs | no finished run in runs
predict: runs/rte --import examples.lora 1.5 | '1.5' is not a module's name: --import takes all
"""
CASES = [(*line.split(" | "), {}) for line in NOTHING_CHANGED.strip().splitlines()]

NAN, TOKENS = float("nan"), "model/vocab.txt"
WEIGHTS, CONFIG = "model/model.safetensors", "model/config.json"
ADDED, BESIDE = "model/added_tokens.json", "model/tokenizer_config.json"
A, B = {"text_a": "a", "label": "x"}, {"text_a": "b", "label": "y"}
CSV = {"mine.csv": "Review (raw),id,gold\na,1,x\nb,2,y\n"}
COLUMNS = "--task mine --train-file mine.csv --dev-fraction 0.5 --columns"
FIVE, TWO = "--train-examples 5 --systems head", {"data/u/train.jsonl": [A, B] * 3}
TWO["data/u-5/train.jsonl"] = [A, B]
PEFT = '{"peft_type": "LORA", "r": 8}'
JAPANESE = '"tokenizer_class": "BertJapaneseTokenizer", "model_type"'
OF_9 = '{"added_tokens_decoder": {"9": {"content": "[E1]"}}}'  # its number would be another one
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
CASES += [
    ("", "row 1: the label is hidden (-1)", {RTE: ('"label": 1', '"label": -1')}),
    ("", "two files for one split, validation: ", {"data/rte/validation.csv": "sentence1"}),
    ("", "config.json has no num_attention_heads", {CONFIG: ("num_attention_heads", "n_heads")}),
    ("", "layer.1.output.dense.weight", {WEIGHTS: times(NAN, "1.output.dense.w")}),
    ("", "30 tokens and 2 types", {TOKENS: ("red\n", "red\nx\n")}),
    ("", "absolute position", {CONFIG: ('"absolute"', '"relative_key"')}),
    (FUSE, "of the peft library, LORA: not supp", {"runs/rte/adapter_config.json": PEFT}),
    (FUSE, "not finite", {"runs/rte/adapter.safetensors": times(NAN, "down.0.weight")}),
    (FUSE, "trained on an encoder with other weights, or another config", {WEIGHTS: times(1.5)}),
    ("evaluate: merged", "saved alone is for --adapters", {"merged/adapter_config.json": "{}"}),
    ("evaluate: runs/rte --model model", "another encoder", {WEIGHTS: times(1.5)}),
    ("evaluate: runs/rte --model model", "tokenizer", {TOKENS: ("red\ngreen", "green\nred")}),
    ("", f"{ADDED} is a link that leads nowhere", {ADDED: lambda path: path.symlink_to("gone")}),
    ("", "tokenizer_class = 'BertJapaneseTokenizer'", {CONFIG: ('"model_type"', JAPANESE)}),
    # which needs tokenizer.json
    ("", "tokenizer_class = 'Roberta", {BESIDE: '{"tokenizer_class": "RobertaTokenizer"}'}),
    ("", "truncation_side = 'left'", {BESIDE: '{"truncation_side": "left"}'}),
    ("", "image_token = ", {"model/special_tokens_map.json": '{"image_token": "<i>"}'}),
    ("", "added token '[E1]' is number", {ADDED: '{"[E1]": 9}'}),
    ("", "added token '[E1]' is number", {BESIDE: OF_9}),
    (f"{COLUMNS} text_a=Review label=gold", "no column 'Review'; it has Review (raw)", CSV),
    ("", "model: tokenizer.json: it cannot be read: damaged", {"model/tokenizer.json": '{"a": 1}'}),
    (f"composition: {BOX} --target u u-5 {FIVE}", "task = u, not u-5: rename", TWO),  # head-u-5-0
]
for path in (RTE, WEIGHTS, TOKENS, BESIDE):
    CASES.append((FUSE, f"{path} is a pointer of git-lfs, not the file", {path: POINTER}))
X, Y = {"choices": ["a", "b"], "label": 0}, {"choices": ["a", "b"], "label": 1}
for file, content, say in [  # the training file of a task of one's own: rows, or all of it
    ("train.jsonl", [A, A], "leaves nothing to learn"),
    ("train.jsonl", [X, {**Y, "choices": ["a"]}], "row 2: 1 choices, expected 2"),
    ("train.jsonl", '{"text_a": "a", "label": "x"}\n{"text_a"', "line 2: "),
    ("train.jsonl", '{"text_a": "a", "label": "x", "label": "y"}', "line 1: a name is there twice"),
    ("train.csv", "text_a,label\na,x\n\ufefftext_a,label\nb,y\n", "row 2 is the header again"),
    ("train.csv", "text_a,text_b,text_b,label\na,b,c,x\n", "column 'text_b (twice)' is none of"),
    ("train.jsonl", "null\n", "a row is no JSON object"),
    ("train.csv", "text_a,label\na,x,y\n", "row 1 has 3 fields, the first line 2"),
    ("train.csv", 'text_a,label\n"a\nb",x\n\n"b,y\n', "row 2: a quotation mark is not closed"),
    ("train.csv", lambda p: p.write_bytes(b"a\n\x92"), "save it as UTF-8 (Excel: CSV UTF-8)"),
]:
    CASES.append(("--task mine", say, {f"data/mine/{file}": content}))
both = {"data/mine/train.jsonl": [A, B], "data/mine/validation.jsonl": [{**A, "text_b": "b"}]}
CASES.append(("--task mine", "column 'text_b' is none of text_a", both))


@pytest.fixture
def box(encoder, data_dir, runs, tmp_path, monkeypatch):
    """A directory with model/, data/ and runs/, to be changed; the working directory."""
    for name, source in (("model", encoder), ("data", data_dir), ("runs", runs)):
        shutil.copytree(source, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
    refused(cli(TRAIN), "train.py: AttributeError: no x (with ADAPTERFUSION_TRACEBACK=1")
    assert not Path("out").exists()


def test_a_user_sees_one_line(box):
    """In a process of its own. A label that the terminal cannot show is no error."""
    change(Path("data/mine/train.jsonl"), [A, {**B, "label": "\u6b63"}])
    change(Path("data/mine/validation.jsonl"), [{**A, "label": 7}])
    words = [sys.executable, ROOT / "train.py", *cli(f"{TRAIN} --task mine")]
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, capture_output=True, text=True, env=ascii_only)
    assert done.returncode == 2 and r"f1 is that of '\u6b63'" in done.stdout
    assert not Path("out").exists()
    assert done.stderr.count("\n") == 1 and r"label 7 is not one of x, \u6b63" in done.stderr
