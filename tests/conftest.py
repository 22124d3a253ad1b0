"""A tiny encoder and tiny tasks, written once for the whole suite; HUB_TESTS alone need the hub."""

import json
import os
import random
import shutil
import signal
import tempfile
from functools import partial
from pathlib import Path
from unittest.mock import Mock

if "HUB_TESTS" not in os.environ:
    # before `datasets` is imported: its cache starts empty
    os.environ |= {"HF_HOME": tempfile.mkdtemp(), "HF_HUB_OFFLINE": "1"}
# for tensors as small as these, and beside other work, one thread is faster
os.environ.setdefault("OMP_NUM_THREADS", "1")

# a suite in the background of a script ignores both, and so would all that it starts
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

import huggingface_hub  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from huggingface_hub.errors import RepositoryNotFoundError  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import child  # noqa: E402  (from here on, every run saves its state after every step)
import train  # noqa: E402
from bert import ENCODERS, BertConfig  # noqa: E402
from experiments import load_run, multitask  # noqa: E402
from formats.tokenizer import load_tokenizer  # noqa: E402
from runtime.command import run_command  # noqa: E402
from runtime.record import MAY_DIFFER  # noqa: E402

# runs in bf16 are loaded as they were trained, also where a processor only emulates it
load_run.has_bf16 = lambda _: True

GOLDEN = Path(__file__).parent / "golden"  # written by the reference library

thorough = pytest.mark.skipif("THOROUGH" not in os.environ, reason="in `make test-all`: THOROUGH=1")

WORDS = "red green blue cat dog bird runs sleeps sings the a one two not and . ? yes no".split()
WORDS += "question answer topic because or".split()
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]


@pytest.fixture(scope="session")
def encoder(tmp_path_factory):
    """Directory of a BERT with random weights large enough to tell inputs apart."""
    return tiny_encoder("bert", tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="session")
def quiet_encoder(tmp_path_factory):
    """The same without dropout."""
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return tiny_encoder("bert", tmp_path_factory.mktemp("quiet"), **quiet)


def tiny_encoder(kind, directory, **fields):
    """Writes an encoder of one of bert.ENCODERS, by its name there."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=len(VOCABULARY), hidden_size=32, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=2, intermediate_size=64, max_position_embeddings=48)
    bert = ENCODERS[kind](BertConfig(**sizes, **fields, pad_token_id=0, model_type=kind))
    for p in bert.parameters():
        torch.nn.init.normal_(p, std=0.15) if p.ndim > 1 else p.data.add_(0.1 * torch.randn_like(p))
    directory.mkdir(exist_ok=True)
    bert.save_pretrained(directory)
    (directory / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    return directory


def change(path, how):
    """how: rows or a text, of which the file is made, (old text, new text), or a function of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(how, list):
        path.write_text("".join(json.dumps(row) + "\n" for row in how))
    elif isinstance(how, tuple):
        path.write_text(path.read_text().replace(*how, 1))
    elif isinstance(how, str):
        path.write_text(how)
    else:
        how(path)


def times(factor, part=""):
    """Multiplies those tensors of a file whose name has this part."""

    def change(path):
        found = {n: t * factor if part in n else t.clone() for n, t in load_file(path).items()}
        save_file(found, path)

    return change


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def sentence(rng, length=None):
    return " ".join(rng.choice(WORDS) for _ in range(length or rng.randint(2, 12)))


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("data"), 96)


def write_tasks(directory, train_examples):
    """rte (is the text repeated?), sts_b and own (its pairs, a number), sst2 (a colour?), pick."""
    rng = random.Random(0)
    for split, n in (("train", train_examples), ("validation", 40)):
        tasks = {"rte": [], "sts_b": [], "sst2": [], "pick": []}
        for i in range(n):
            text = sentence(rng)
            row = {"sentence1": text, "sentence2": text if i % 2 else sentence(rng)}
            tasks["rte"].append({**row, "label": 1 - i % 2, "idx": i})
            tasks["sts_b"].append({**row, "label": i % 2 * (5 - i % 5)})
        for _ in range(n):
            text = sentence(rng)
            has_colour = not {"red", "green", "blue"}.isdisjoint(text.split())
            tasks["sst2"].append({"sentence": text, "label": int(has_colour)})
        for i in range(n):
            choices = [sentence(rng, 4) for _ in range(3)]
            choices[i % 3] += " yes"
            tasks["pick"].append({"text_a": sentence(rng, 5), "choices": choices, "label": i % 3})
        for task, rows in {**tasks, "own": tasks["sts_b"]}.items():
            change(directory / task / f"{split}.jsonl", rows)
    return directory


def cli(text="", **options):
    """cli("--epochs 2", out=path) -> the words of a command line; the text is split at blanks."""
    words = text.split()
    for name, value in options.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return words


def main(words):
    """The main function of train.py, or of the command that takes several --tasks."""
    return (multitask if "--tasks" in words else train).main(words)


def interrupt(words, n, number=signal.SIGTERM):
    """Runs a command that a signal stops in its n-th step; what it says."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt) as stopped:
        child.at_step(n, child.stop, number, put=patch.setattr)
        main(words)
    return str(stopped.value)


@pytest.fixture(scope="session")
def launch(encoder, data_dir):
    """launch("--stage head --task rte", out=path): what `main` returns, on the tiny data."""

    def launch(text, *words, **options):
        common = cli("--device cpu --dtype float32", model=encoder, data_dir=data_dir)
        return main([*common, *cli(text), *map(str, words), *cli(**options)])

    return launch


@pytest.fixture(scope="session")
def runs(launch, tmp_path_factory):
    """Finished runs: adapters on three tasks (three architectures), and their fusion."""
    out, common = tmp_path_factory.mktemp("runs"), "--epochs 2 --lr 5e-3"
    factors = {"rte": 16, "sst2": 4, "pick": 8}
    for task, factor in factors.items():
        launch(f"--stage adapter --task {task} {common}", reduction_factor=factor, out=out / task)
    adapters = [out / task for task in factors]
    launch(f"--stage fusion --task rte {common}", adapters=adapters, out=out / "fusion-rte")
    return out


@pytest.fixture(scope="session")
def loud_fusion(runs, tmp_path_factory):
    """The fusion run with weights that differ between adapters, tokens and layers."""
    run = shutil.copytree(runs / "fusion-rte", tmp_path_factory.mktemp("loud") / "fusion")
    for factor, part in ((100, ".query."), (20, ".value.")):
        times(factor, part)(run / "model_adapter_fusion.safetensors")
    return run


@pytest.fixture(scope="session")
def command(encoder, data_dir, runs):
    """command("fusion", out, "--resume", epochs=1): the words of a run of two short epochs."""

    def command(stage, out, more="", **options):
        words = cli("--task sst2 --device cpu --dtype float32 --epochs 2 --batch-size 8 --lr 5e-3")
        words += cli(stage=stage, model=encoder, data_dir=data_dir, out=out)
        if stage == "multitask":
            words += cli("--tasks sst2 pick --steps-per-epoch 8")
        if stage == "fusion":
            words += cli(adapters=[runs / "rte", runs / "pick"])
        return [*words, *cli(**options), *more.split()]

    return command


@pytest.fixture
def copy(tmp_path):
    """copy(directory): tmp_path/copy, to be damaged."""
    return partial(shutil.copytree, dst=tmp_path / "copy", dirs_exist_ok=True)


@pytest.fixture
def refused(capsys):
    """refused(words, "text", ...): a command ends with status 2 and one line, with the texts."""

    def refused(words, *texts, main=main):
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            run_command("train.py", main, [str(word) for word in words])
        error = capsys.readouterr().err
        lines = [line for line in error.splitlines() if not line.startswith("note: ")]
        assert exit.value.code == 2 and len(lines) == 1 and len(lines[0]) < 1500, error
        assert error.endswith("\n") and "Traceback" not in error, error
        assert all(text in lines[0] for text in texts), error

    return refused


def content(run):
    """Log, run.json and metrics.json, without times and places; the bytes of all other files."""
    log, kept = read_lines(run / "log.jsonl"), ("epoch", "loss", "dev_accuracy")
    log = [{name: line[name] for name in kept if name in line} for line in log]
    record, metrics = (json.loads((run / f"{n}.json").read_text()) for n in ("run", "metrics"))
    del record["machine"], metrics["seconds"], metrics["out"]
    record["trained_on"] = record["trained_on"].replace(str(run), "--out")
    for name in MAY_DIFFER:
        record["options"].pop(name, None)
    apart = "run.json metrics.json log.jsonl .lock".split()  # the last of one that was killed
    files = [path for path in run.rglob("*") if path.is_file() and path.name not in apart]
    texts = {path.relative_to(run): path.read_bytes() for path in files}
    return log, record, metrics, {n: t.replace(bytes(run), b"--out") for n, t in texts.items()}


def assert_equal(run, other):
    assert content(run) == content(other)


def same_tensors(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def randomize(bert, part):
    """Weights at which an error shows: nothing stays at its default, no softmax is 0 or 1."""
    for name, tensor in bert.state_dict().items():
        if part in name:
            tensor += 0.2 * torch.randn_like(tensor)


@pytest.fixture
def tokenizer(encoder):
    return load_tokenizer(encoder, 48)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """(a directory in place of the hub, hub/OWNER/NAME/FILE; the files that were asked for)"""
    root, asked = tmp_path / "hub", []

    def snapshot_download(repo_id, allow_patterns):
        asked.extend(allow_patterns)
        if not (root / repo_id).is_dir():
            raise RepositoryNotFoundError(f"404 {repo_id}", response=Mock())
        return str(root / repo_id)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return root, asked
