"""runtime/: dropout and attention, scores, which examples an adapter has seen, and devices, random
numbers, threads and streams as commands meet them."""

import io
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bert import attention, dropout
from formats.files import read_json
from reference import difference
from runtime.command import run_command
from runtime.processes import choose_device, has_bf16, reseed
from runtime.record import SKETCH, share_trained_on, sketch
from runtime.scores import accuracy, f1, f1_of_class, macro_f1


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
    assert difference(trained, evaluated) <= 1e-8


def test_scores():
    """By hand, of three classes: F1 of 1/2, 4/5 and 0."""
    labels, predictions = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 2, 1, 1, 1, 0])
    assert accuracy(labels, predictions) == pytest.approx(3 / 6)
    assert [f1_of_class(labels, predictions, k) for k in range(4)] == [1 / 2, 4 / 5, 0, 0]
    assert f1(labels, predictions) == 4 / 5  # of the second class
    assert macro_f1(labels, predictions) == pytest.approx((1 / 2 + 4 / 5 + 0) / 3)


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
    dev, words = tmp_path / "dev", "--stage adapter --task rte --epochs 1"
    launch(words, train_file=dev_file, dev_file=train_file, out=dev)
    assert "all development examples are" not in capsys.readouterr().out
    launch(f"{words} --limit-train 40 --dev-fraction 0.5", train_file=dev_file, out=tmp_path / "b")
    launch(words, train_file=dev_file, dev_file=dev_file, out=tmp_path / "same")
    assert capsys.readouterr().out.count("all development examples are training examples") == 1
    words, copy = "--stage fusion --task rte --epochs 1", tmp_path / "fusion" / "adapters" / "rte"
    launch(words, adapters=[dev, runs / "sst2"], out=tmp_path / "fusion")
    assert read_json(copy / "run.json") == read_json(dev / "run.json")
    for adapter in (dev, copy, runs / "rte"):
        capsys.readouterr()
        words = "--stage head --task rte --epochs 1 --overwrite"
        result = launch(words, adapters=adapter, out=tmp_path / "head")
        text, printed = "WARNING: adapter rte was TRAINED on 100% of this", capsys.readouterr().out
        assert (text in printed) == (adapter != runs / "rte")
        assert ("no better than that of the most frequent label" in printed) == (
            result["accuracy"] <= 0.5
        )


def test_auto_is_bfloat16_where_the_hardware_has_it(monkeypatch):
    for found, dtype in (
        ({"avx512_bf16": True, "amx_bf16": False}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
        ({"avx2": True, "avx512_bf16": False}, torch.float32),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=found: found)
        assert choose_device("cpu", "auto") == (torch.device("cpu"), dtype)
    emulated = lambda including_emulation=True: including_emulation  # noqa: E731  (on a T4)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", emulated)
    assert not has_bf16("cuda")


def test_random_numbers_are_a_function_of_all_integers():
    """Also of those that 32 bits cannot hold side by side."""

    def draw(*numbers):
        reseed(*numbers)
        return torch.rand(()).item()

    numbers = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2**31, 1, 2), (0, 1, 2**20 + 2)]
    assert len({draw(*one) for one in numbers}) == 5
    assert draw(0, 1, 2) == draw(0, 1, 2)


def test_a_thread_trains(launch, tmp_path):
    """Without hearing signals, which Python gives to the main thread alone."""
    with ThreadPoolExecutor() as pool:
        words = "--stage head --task rte --epochs 1"
        assert pool.submit(launch, words, out=tmp_path / "run").result()["best_epoch"] == 1


def test_any_stream_is_written_to(monkeypatch):
    """A notebook's can do no more than this one; `>&-` leaves none."""
    for stream in (None, io.StringIO()):
        monkeypatch.setattr(sys, "stdout", stream)
        run_command("train.py", lambda _: {"a": 1})
    assert stream.getvalue() == '{"a": 1}\n'
