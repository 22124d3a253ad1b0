"""No run is lost, wherever it is stopped. Scores, dropout, attention, random numbers, threads."""

import contextlib
import errno
import fcntl
import functools
import math
import os
import resource
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import child
import train
from bert import attention, dropout
from conftest import assert_equal, change, interrupt, main, thorough, times
from data import CLASS_SCORES, Task, accuracy, f1_of_class, macro_f1
from formats.adapterhub import Saved
from runtime.processes import choose_device, has_bf16, reseed
from runtime.record import SKETCH, never_predicted, share_trained_on, sketch


@pytest.fixture(scope="module")
def whole(command, tmp_path_factory):
    """whole(stage): the directory of a run that nobody has disturbed; each is trained once"""
    place = tmp_path_factory.mktemp("whole")
    return functools.cache(lambda stage: Path(main(command(stage, place / stage))["out"]))


STAGES = ["fusion", *(pytest.param(stage, marks=thorough) for stage in ("full", "multitask"))]
OPERATIONS = "open os.rename os.remove os.mkdir os.rmdir os.truncate".split()


def die_at(count, directory):
    """Kills this process just before its count-th file operation in `directory`; each is said."""
    done = []

    def hook(event, values):
        if event in OPERATIONS and str(values[0]).startswith(str(directory)):
            done.append(event)
            os.write(1, b"(operation)")
            if len(done) == count:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


@pytest.mark.parametrize("stage", STAGES)
def test_killed_before_any_file_operation(stage, command, whole, tmp_path):
    """Opening, renaming or removing a file in --out: the first, some between, and the last ones."""
    out = tmp_path / "whole"
    status, said, error = child.ends(command(stage, out), (die_at, 0, out))
    assert status == 0, error
    assert_equal(out, whole(stage))  # two runs of one command are equal
    count = said.count("(operation)")
    for moment in (1, count // 3, 2 * count // 3, count - 3, count - 2, count - 1, count):
        out = tmp_path / str(moment)
        assert child.ends(command(stage, out), (die_at, moment, out))[0] == -signal.SIGKILL
        status, _, error = child.ends(command(stage, out, "--resume"))
        assert status == 0, (moment, error)
        assert_equal(out, whole(stage))


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=thorough)])
def test_a_signal_and_a_second_process(number, command, refused, tmp_path):
    """A second one refuses. The first can be continued; what nohup ignores is no signal."""
    out = tmp_path / "run"
    words = command("adapter", out, "--epochs 10000 --patience 10000")
    program = child.Program(words, [(signal.signal, signal.SIGHUP, signal.SIG_IGN)])
    while not (out / "log.jsonl").exists():
        assert program.process.is_alive()
        time.sleep(0.05)
    refused([*words, "--resume"], "another process is at work", str(out))
    os.kill(program.process.pid, signal.SIGHUP)
    os.kill(program.process.pid, number)
    status, _, error = program.finish()
    resume = f"--resume --out {out} in the same command"
    assert (status, error) == (130, f"train.py: interrupted, continue with {resume}\n")


def test_a_signal_in_the_last_evaluation(command, tmp_path):
    assert "run is finished" in interrupt(command("adapter", tmp_path / "run"), 34)


def test_overwrite(command, whole, tmp_path):
    """Also after a kill while it cleared the old run. Other files, and what links lead to, stay."""
    out, neighbour = shutil.copytree(whole("fusion"), tmp_path / "run"), tmp_path / "neighbour"
    words = command("adapter", out, "--overwrite")
    assert child.ends(words, (die_at, 5, out))[0] == -signal.SIGKILL
    shutil.copytree(whole("fusion") / "adapters", neighbour)
    shutil.rmtree(out / "adapters", ignore_errors=True)
    (out / "adapters").symlink_to(neighbour)
    (out / "notes").write_text("mine")
    main(words)
    (out / "notes").unlink()
    assert_equal(out, whole("adapter"))
    assert len(list(neighbour.rglob("*.safetensors"))) == 2


@pytest.mark.parametrize("stage", ["head", "multitask"])
def test_weights_are_never_cleared_unasked(stage, command, refused, whole, tmp_path):
    """A copy of a run without metrics.json is no run that is finished, but it holds weights."""
    out = shutil.copytree(whole(stage), tmp_path / "run")
    (out / "metrics.json").unlink()
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for option in ("", "--resume"):
        refused(command("adapter", out, option), "holds a run, or its weights")
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("step", [7, 34])
def test_a_full_disk(step, command, refused, whole, tmp_path, monkeypatch):
    """In training, or in the very last batch: from there on a file takes no more bytes."""
    out, limit = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)
    no_more = resource.setrlimit, resource.RLIMIT_FSIZE, (0, limit[1])
    child.at_step(step, *no_more, put=monkeypatch.setattr)
    try:
        refused(command("fusion", out))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    for _ in range(2):  # the second time there is nothing to do
        main(command("fusion", out, "--resume"))
        assert_equal(out, whole("fusion"))


@pytest.mark.parametrize("name", ["loss", "accuracy"])
def test_what_is_not_finite(name, command, refused, monkeypatch, tmp_path):
    """On development examples, one's own score, too: the best epoch so far is kept, and marked."""
    found = {"accuracy": 0.5, "loss": 1.0}
    evaluate = Mock(side_effect=[found, {**found, name: math.nan}])
    monkeypatch.setattr(train, "evaluate", evaluate)
    problem = f"development {name} is not finite in epoch 2", f"epoch 1 is kept in {tmp_path}"
    refused(command("adapter", tmp_path), *problem)
    result = main(command("adapter", tmp_path, "--resume"))
    assert result["diverged"] and result["best_epoch"] == 1 and evaluate.call_count == 2


OTHER = [  # options; a copied input, a file in it and its change; what the run says
    ("--adapters {runs}/pick {runs}/rte", None, "adapters = "),
    ("", ("runs", "rte/adapter.safetensors", times(2)), "holds a run with adapter rte = "),
    ("--grad-accumulation 2", None, ""),
    ("", ("model", "vocab.txt", ("", "")), ""),  # the same files elsewhere
    ("--max-length 9", None, "max_length = 48, not 9"),
    ("", ("data_dir", "sst2/train.jsonl", (": 1", ": 0")), "training examples of sst2"),
    ("", ("data_dir", "sst2/validation.jsonl", (": 1", ": 0")), "development examples of sst2"),
    ("", ("model", "config.json", ('heads": 2', 'heads": 4')), "or another configuration"),
    ("", ("model", "config.json", ('dropout_prob": 0.1', 'dropout_prob": 0.2')), ""),
    ("", ("model", "vocab.txt", ("red\ngreen", "green\nred")), "tokenizer"),
]


@pytest.fixture(scope="module")
def cut(command, tmp_path_factory):
    """A run that was stopped in its second epoch."""
    out = tmp_path_factory.mktemp("cut") / "run"
    interrupt(command("fusion", out), 15)
    return out


@pytest.mark.parametrize("case", OTHER)
def test_resume_knows_another_command(case, command, whole, cut, encoder, data_dir, runs, tmp_path):
    """With another option, or with other files: a finished run, and one that was stopped."""
    text, changed, wanted = case
    given = {"model": encoder, "data_dir": data_dir, "runs": runs}
    if changed:
        name, file, how = changed
        given[name] = shutil.copytree(given[name], tmp_path / name)
        change(given[name] / file, how)
    text, runs = f"--resume {text}".format(**given), given.pop("runs")
    given["adapters"] = [runs / "rte", runs / "pick"]
    for source in (whole("fusion"), cut):
        out = shutil.copytree(source, tmp_path / source.name)
        with pytest.raises(ValueError, match=wanted) if wanted else contextlib.nullcontext():
            main(command("fusion", out, text, **given))


@pytest.mark.parametrize("share", [0, 0.5])
@pytest.mark.parametrize("name", ["run.json", "resume.pt"])
def test_a_damaged_file(name, share, command, cut, refused, tmp_path):
    """As after a crash of the machine, or on a full quota."""
    out = shutil.copytree(cut, tmp_path / "cut")
    content = (out / name).read_bytes()
    (out / name).write_bytes(content[: int(share * len(content))])
    say = "no JSON object" if name == "run.json" else "damaged: --overwrite"
    refused(command("fusion", out, "--resume"), str(out / name), say)
    main(command("fusion", out, "--overwrite"))


def test_a_file_system_without_locks(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "none here")))
    main(command("head", tmp_path / "run"))
    assert f"note: {tmp_path / 'run' / '.lock'} cannot be locked" in capsys.readouterr().out


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout(p):
    torch.manual_seed(0)
    x = (torch.rand(1000, 1001) + 0.5).requires_grad_()  # an odd number of elements
    y = dropout(x, p, training=True)
    kept = y != 0
    deviation = math.sqrt(p * (1 - p))  # of one; here those of all, and of rows and columns
    assert abs(kept.float().mean() - (1 - p)) < 4 * deviation / 1000
    for dim in (0, 1):
        assert (kept.float().mean(dim) - (1 - p)).abs().max() < 6 * deviation / 1000**0.5
    assert torch.allclose(y[kept], x[kept] / (1 - p))
    y.sum().backward()
    assert torch.allclose(x.grad, kept / (1 - p))
    assert not torch.equal(dropout(x, p, training=True) != 0, kept)


@pytest.mark.parametrize("has_mask", [True, False])
def test_attention_in_training_is_the_one_in_evaluation(has_mask):
    """They are written differently on a CPU; with a dropout of almost nothing they must agree."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 5, 4, 7, 8, dtype=torch.float64)
    mask = (torch.arange(7) >= torch.tensor([1, 3, 7, 6, 2])[:, None])[:, None, None] * -1e30
    trained, evaluated = (attention(q, k, v, mask if has_mask else None, p) for p in (1e-9, 0.0))
    assert (trained - evaluated).abs().max() <= 1e-8


def test_scores():
    """By hand, of three classes: F1 of 1/2, 4/5 and 0; and one of four that is never predicted."""
    labels, predictions = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 2, 1, 1, 1, 0])
    assert accuracy(labels, predictions) == pytest.approx(3 / 6)
    assert [f1_of_class(labels, predictions, k) for k in range(4)] == [1 / 2, 4 / 5, 0, 0]
    assert CLASS_SCORES["f1"](labels, predictions) == 4 / 5  # of the second class
    assert macro_f1(labels, predictions) == pytest.approx((1 / 2 + 4 / 5 + 0) / 3)
    found = never_predicted(Task(None, [], [*"xyzw"]), labels, torch.tensor([0, 0, 1, 0, 1, 1]))
    assert found == {"never_predicted": ["z"]}


def test_a_share_is_estimated():
    hashes = np.random.default_rng(0).integers(0, 2**64, 30_000, np.uint64).tolist()
    examples = [SimpleNamespace(hash=number) for number in hashes]
    sketches = [sketch(examples[:size]) for size in (20_000, SKETCH // 2)]
    large, small = ({"tasks": {"x": {"sketch": found}}} for found in sketches)
    assert abs(share_trained_on(large, examples) - 2 / 3) < 0.05
    assert share_trained_on(large, examples[:10_000]) == 1
    assert share_trained_on(small, examples[:SKETCH]) == 0.5
    assert share_trained_on(large, examples[:100]) == 0  # about five can be compared


def test_what_adapters_have_seen(launch, runs, data_dir, tmp_path, capsys):
    """Also of a copy that a fusion keeps; training examples are no reason for a warning."""
    train_file, dev_file = (data_dir / "rte" / f"{name}.jsonl" for name in ("train", "validation"))
    dev, half = tmp_path / "dev", tmp_path / "half.jsonl"
    lines = [path.read_text().splitlines(True)[:4] for path in (train_file, dev_file)]
    half.write_text("".join(sum(lines, [])))
    launch("--stage adapter --task rte --epochs 1", train_file=dev_file, dev_file=half, out=dev)
    assert "50% of the development examples are training examples" in capsys.readouterr().out
    words, copy = "--stage fusion --task rte --epochs 1", tmp_path / "fusion" / "adapters" / "rte"
    launch(words, adapters=[dev, runs / "sst2"], out=tmp_path / "fusion")
    for adapter in (dev, copy, runs / "rte"):
        capsys.readouterr()
        words = "--stage head --task rte --epochs 1 --overwrite"
        launch(words, adapters=adapter, out=tmp_path / "head")
        is_warned = "adapter rte was TRAINED on 100% of this" in capsys.readouterr().out
        assert is_warned == (adapter != runs / "rte")


def test_the_whole_name_of_an_encoder_counts(tmp_path, monkeypatch, capsys):
    """Of an adapter without a run. What is not known for sure is said; . is a directory."""
    monkeypatch.chdir(tmp_path)
    for theirs, ours, said in (
        ("bert-base-cased", "google-bert/bert-base-cased", ""),
        ("bert-base-cased", "dbmdz/bert-base-cased", None),
        ("x", "b/x", "note: an adapter was made for 'x', the encoder is b/x"),
        ("a/x", ".", "note: place was made for 'a/x', the encoder is in ."),
    ):
        saved = Saved("place", {"model_name": theirs}, {}, "x", [], {}, {})
        bert = SimpleNamespace(source=ours, sha256=None, config=SimpleNamespace(model_type="bert"))
        with pytest.raises(ValueError) if said is None else contextlib.nullcontext():
            saved.check_encoder(bert)
        assert capsys.readouterr().out.strip() == (said or "")


@pytest.mark.parametrize("is_there, dtype", [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_bfloat16_where_the_hardware_has_it(is_there, dtype, monkeypatch):
    found = {"avx2": True, "avx512_bf16": is_there, "amx_bf16": False}
    monkeypatch.setattr("runtime.processes.CPU", found)
    assert choose_device("cpu", "auto") == (torch.device("cpu"), dtype)
    emulated = lambda including_emulation=True: including_emulation  # noqa: E731  (on a T4)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", emulated)
    assert not has_bf16("cuda")


def test_random_numbers_are_a_function_of_all_integers():
    """Also of those that 32 bits cannot hold side by side."""
    numbers = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2**31, 1, 2), (0, 1, 2**20 + 2), (0, 1, 2)]
    drawn = [reseed(*one) or torch.rand(()).item() for one in numbers]
    assert len({*drawn}) == 5 and drawn[0] == drawn[-1]


def test_threads_train_one_after_another(whole, command, tmp_path):
    out = [tmp_path / str(i) for i in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(main, [command("head", one) for one in out])]
    for one in out:
        assert_equal(one, whole("head"))
