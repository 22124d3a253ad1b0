"""Several processes, as torchrun starts them, here on CPUs with gloo: the numbers of one process,
and nobody waits for ever."""

import os
import signal
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import child
import train
from conftest import assert_equal, content, main, thorough, thorough_after_first


@pytest.fixture(scope="module")
def command(commands, quiet_encoder):
    """33 examples in batches of 16, the last batch is one example; no dropout."""
    words = "--device cpu --epochs 3 --batch-size 16 --limit-train 33 --lr 5e-3"
    return commands(words, 6, model=quiet_encoder)


def start(words, before=()):
    """[Program] of what torchrun starts: words of each. before: (rank, what is called in it)"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    common |= {"TORCHELASTIC_RUN_ID": "test", "WORLD_SIZE": str(len(words))}
    result = []
    for rank, given in enumerate(words):
        calls = before[1:] if before and before[0] == rank else ()
        numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        result.append(child.Program(child.training(given), calls, **common, **numbers))
    return result


def together(words, before=()):
    """(exit statuses, the stdout of each, the stderr of each)"""
    ends = [program.finish() for program in start(words, before)]
    return tuple(map(list, zip(*ends, strict=True)))


def assert_close(run, other):
    """The losses are the same but for rounding, the accuracies to the last bit."""
    for name, tolerance in (("loss", 1e-5), ("dev_accuracy", 0)):
        ours, theirs = ([line[name] for line in content(out)[0]] for out in (run, other))
        assert ours == pytest.approx(theirs, abs=tolerance, rel=0)


# nothing reads the own LayerNorms of the layer with the adapter: they get no gradient
UNREAD = "--adapter houlsby_recipe --adapter-config original_ln_after=false leave_out=[0]"
CASES = [(stage, 2, "") for stage in reversed(train.STAGES)]
CASES += [("fusion", 3, "--grad-accumulation 3"), ("adapter", 2, UNREAD)]
# the last batch has three examples: one process has two parts, the other one
CASES.insert(0, ("adapter", 2, "--grad-accumulation 2 --limit-train 35"))
CASES += [("adapter", 3, "--limit-train 2 --limit-dev 1")]  # fewer examples than processes


@pytest.mark.parametrize("stage, count, text", thorough_after_first(*CASES))
def test_the_same_numbers_as_one_process(stage, count, text, command, tmp_path):
    one, many = tmp_path / "one", tmp_path / "many"
    main(command(stage, one, text))
    statuses, said, errors = together([command(stage, many, text)] * count)
    assert statuses == [0] * count, errors
    assert_close(many, one)
    for path in one.rglob("*.safetensors"):
        ours, theirs = load_file(many / path.relative_to(one)), load_file(path)
        for name in ours.keys() | theirs.keys():
            # Adam divides by the gradient's size: where it is nearly 0, rounding shows
            if name != "heads.pick.4.bias":  # the same for all choices: nothing but rounding
                assert torch.allclose(ours[name], theirs[name], atol=1e-3), name
    assert "\nepoch  3: " in said[0] and not any(said[1:])  # one voice


def test_resume(command, encoder, tmp_path):
    """One of two processes hears the signal: both stop. Two continue to the same result, bit by
    bit; three to the same to 1e-5, where there is no dropout."""
    before, cut, quiet = (1, (child.at_step, 5, child.stop)), tmp_path / "cut", tmp_path / "quiet"

    def words(name):
        text = "--epochs 2 --resume"
        return [command("adapter", tmp_path / name, text, model=encoder)] * 2

    assert together(words("whole"))[0] == [0, 0]
    statuses, _, errors = together(words("cut"), before)
    assert statuses == [130, 130] and not errors[1]
    assert f"continue with --resume --out {cut}" in errors[0]
    statuses, _, errors = together([words("cut")[0], words("elsewhere")[0]])
    assert statuses == [2, 2] and "one directory for all processes" in errors[0]
    assert together(words("cut"))[0] == [0, 0]
    assert_equal(cut, tmp_path / "whole")
    main(command("adapter", tmp_path / "one"))
    assert together([command("adapter", quiet)] * 2, before)[0] == [130, 130]
    assert together([command("adapter", quiet, "--resume")] * 3)[0] == [0, 0, 0]
    assert_close(quiet, tmp_path / "one")


def run_out():
    raise torch.OutOfMemoryError("CUDA out of memory.")


def explode():
    train.fusion_regularization = lambda _: torch.tensor(float("inf"))


def test_errors_end_all_processes(command, tmp_path):
    """With one line, and never a traceback."""

    def ends(text="", before=()):
        statuses, _, errors = together([command("adapter", tmp_path / "run", text)] * 2, before)
        assert not any("Traceback" in error for error in errors), errors
        return statuses, *errors

    statuses, said, other = ends("--lr -1")
    assert statuses == [2, 2] and said.count("\n") == 1 and "--lr: must be" in said and other == ""
    statuses, _, other = ends(before=(1, (child.at_step, 1, run_out)))
    assert statuses[0] > 0 and statuses[1] == 2 and other.count("\n") == 1
    assert "cpu ran out of memory" in other
    statuses, said, other = ends(before=(1, (child.at_step, 5, explode)))
    assert statuses == [2, 2] and "epoch 1 is kept" in said and other == ""
    assert (tmp_path / "run" / "metrics.json").exists()


@thorough
def test_as_a_user_starts_it(command, tmp_path):
    """torchrun itself; Ctrl-C reaches it and its processes."""
    words = "-m torch.distributed.run --standalone --nproc_per_node=2 train.py".split()
    words += map(str, command("head", tmp_path / "run", "--epochs 500 --patience 500"))
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    options |= {"cwd": child.ROOT, "start_new_session": True}
    process = subprocess.Popen([sys.executable, *words], **options)
    while not (line := process.stdout.readline()).startswith("epoch  2:"):
        assert line, process.stderr.read()
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert f"train.py: interrupted, continue with --resume --out {tmp_path / 'run'}" in errors
