"""Several processes, as torchrun starts them, here on CPUs with gloo: the numbers of one process,
and nobody waits for ever."""

import os
import pkgutil
import shutil
import signal
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import child
from conftest import assert_equal, cli, content, main, of_stage, thorough, thorough_after_first


@pytest.fixture(scope="module")
def command(quiet_encoder, data_dir, runs):
    """command("fusion", out, "--resume"): 33 examples in batches of 16, the last batch is one
    example; no dropout."""
    common = cli("--device cpu --epochs 3 --batch-size 16 --limit-train 33 --lr 5e-3")
    common += cli(model=quiet_encoder, data_dir=data_dir)

    def command(stage, out, text="", **options):
        return [*common, *of_stage(stage, runs, 6), *cli(text, out=out, **options)]

    return command


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
UNREAD = "--adapter houlsby_recipe --adapter-config original_ln_after=false "
CONFIGURATIONS = [
    *[("multitask", 2, ""), ("adapter", 3, ""), ("head", 2, ""), ("full", 2, "")],
    *[("fusion", 2, "--grad-accumulation 3"), ("adapter", 2, UNREAD + "leave_out=[0]")],
    ("adapter", 3, "--limit-train 2 --limit-dev 1"),  # fewer examples than processes
]


@pytest.mark.parametrize("stage, count, text", thorough_after_first(*CONFIGURATIONS))
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
    assert content(many)[1]["processes"] == count


# --------------------------------------------------------------------------------------------------
# One of them is stopped. The functions are called in its process


def run_out():
    raise torch.OutOfMemoryError("CUDA out of memory.")


def explode():
    torch.nn.functional.cross_entropy = lambda logits, *_: logits.sum() * float("inf")


def die_in(path):
    owner, _, name = path.rpartition(".")
    setattr(pkgutil.resolve_name(owner), name, lambda *_, **__: child.stop(signal.SIGKILL))


@pytest.fixture(scope="module")
def undisturbed(command, encoder, tmp_path_factory):
    """(a finished run of two processes, with dropout; the words of the same in another place)"""

    def words(out):
        text = "--epochs 2 --save-minutes 0 --resume"
        return [command("adapter", out, text, model=encoder)] * 2

    out = tmp_path_factory.mktemp("undisturbed")
    assert together(words(out / "run"))[0] == [0, 0]
    return out / "run", words


def test_resume(command, undisturbed, tmp_path):
    """One of two processes hears the signal: both stop. Two continue to the same result, bit by
    bit; one and three to the same to 1e-5, where there is no dropout."""
    before, cut, one = (1, (child.at_step, 5, child.stop)), tmp_path / "cut", tmp_path / "one"
    run, words = undisturbed
    statuses, _, errors = together(words(cut), before)
    assert statuses == [130, 130] and not errors[1]
    assert f"continue with --resume --out {cut}" in errors[0]
    statuses, _, errors = together([words(cut)[0], words(tmp_path / "elsewhere")[0]])
    assert statuses == [2, 2] and "one directory for all processes" in errors[0]
    assert together(words(cut))[0] == [0, 0]
    assert_equal(cut, run)
    main(command("adapter", one))
    assert together([command("adapter", tmp_path / "quiet")] * 2, before)[0] == [130, 130]
    for count in (1, 3):
        out = shutil.copytree(tmp_path / "quiet", tmp_path / str(count))
        statuses, _, errors = together([command("adapter", out, "--resume")] * count)
        assert statuses == [0] * count, errors
        assert_close(out, one)


PHASES = """
0 torch.save
1 bert.Bert.from_pretrained
0 train.load_split
1 torch.distributed.broadcast
0 train.evaluate
1 torch.distributed.destroy_process_group
0 train.save
1 train.Model.forward
"""  # which process is killed, what it was about to do


@pytest.mark.parametrize("phase", thorough_after_first(*PHASES.strip().splitlines()))
def test_killed_in_any_phase(phase, undisturbed, tmp_path):
    """torchrun ends the others when one is killed; here nobody does, and they end by themselves or
    wait. The same command continues, or starts where nothing had been saved, and comes to the
    end."""
    (run, words), rank = undisturbed, int(phase[0])
    started = start(words(tmp_path / "out"), (rank, (die_in, phase[2:])))
    assert started[rank].wait() == -signal.SIGKILL
    other = started[1 - rank]
    for number in (signal.SIGTERM, signal.SIGKILL):  # as torchrun does
        if other.poll(3) is None:
            other.send_signal(number)
    assert "Traceback" not in other.finish()[2]
    statuses, _, errors = together(words(tmp_path / "out"))
    assert statuses == [0, 0], errors
    assert_equal(tmp_path / "out", run)


def test_errors_end_all_processes(command, tmp_path):
    """With one line, and never a traceback."""

    def ends(text="", before=()):
        statuses, _, errors = together([command("adapter", tmp_path / "run", text)] * 2, before)
        assert not any("Traceback" in error for error in errors), errors
        return statuses, *errors

    statuses, said, other = ends("--lr -1")
    assert statuses == [2, 2] and said.count("\n") == 1 and "--lr must be" in said and other == ""
    assert not (tmp_path / "run").exists()
    statuses, _, other = ends(before=(1, (child.at_step, 1, run_out)))
    assert statuses[0] > 0 and statuses[1] == 2 and other.count("\n") == 1
    assert "ran out of memory on 8 examples" in other
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
    assert (tmp_path / "run" / "resume.pt").exists()
