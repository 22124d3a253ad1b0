"""Several processes, as torchrun starts them, here on CPUs with gloo: the numbers of one process,
and nobody waits for ever."""

import json
import os
import pkgutil
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import child
import train
from conftest import assert_equal, cli, content, of_stage, thorough, thorough_after_first

KILL, TERM = signal.SIGKILL, signal.SIGTERM


@pytest.fixture(scope="module")
def command(quiet_encoder, data_dir, runs):
    """command("fusion", out, "--resume"): 33 examples in batches of 16, the last batch is one
    example; no dropout."""
    common = cli("--device cpu --epochs 3 --batch-size 16 --limit-train 33 --lr 5e-3")
    common += cli(model=quiet_encoder, data_dir=data_dir)

    def command(stage, out, text="", **options):
        return [*common, *of_stage(stage, runs, 6), *cli(text, out=out, **options)]

    return command


def start(count, words, output, before=(), own=()):
    """[Process] of what torchrun starts. before: {number of a process: a call ahead of it}; own:
    {number: words of its own}."""
    before, own = dict(before), dict(own)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    common |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    result = []
    for rank in range(count):
        numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        given, calls = [*words, *own.get(rank, [])], [before[rank]] if rank in before else []
        result.append(child.start(given, f"{output}.{rank}", calls, **common, **numbers))
    return result


def together(count, words, output, before=(), own=()):
    """(exit statuses, what each wrote)"""
    started = start(count, words, output, before, own)
    ends = [child.finish(process, f"{output}.{rank}") for rank, process in enumerate(started)]
    return [status for status, _ in ends], [text for _, text in ends]


def assert_close(run, other):
    """The losses are the same but for rounding, the accuracies to the last bit."""
    ours, theirs = content(run)[0], content(other)[0]
    for name, tolerance in (("loss", 1e-5), ("dev_accuracy", 0)):
        values = [line[name] for line in theirs]
        assert [line[name] for line in ours] == pytest.approx(values, abs=tolerance, rel=0)


def tensors_of(run):
    files = {path.relative_to(run): load_file(path) for path in run.rglob("*.safetensors")}
    return {f"{path} {name}": t for path, found in files.items() for name, t in found.items()}


# nothing reads the own LayerNorms of the layer with the adapter: they get no gradient
UNREAD = "--adapter-config layer_norms=true original_ln_before=false original_ln_after=false "
CONFIGURATIONS = [
    *[("multitask", 2, ""), ("adapter", 3, ""), ("head", 2, ""), ("full", 2, "")],
    *[("fusion", 2, "--grad-accumulation 3"), ("adapter", 2, UNREAD + "leave_out=[0]")],
    ("adapter", 3, "--limit-train 2 --limit-dev 1"),  # fewer examples than processes
]


@pytest.mark.parametrize("stage, count, text", thorough_after_first(*CONFIGURATIONS))
def test_the_same_numbers_as_one_process(stage, count, text, command, tmp_path):
    one, many = tmp_path / "one", tmp_path / "many"
    train.main(command(stage, one, text))
    statuses, texts = together(count, command(stage, many, text), tmp_path / "output")
    assert statuses == [0] * count, texts
    assert_close(many, one)
    ours, theirs = tensors_of(many), tensors_of(one)
    assert ours.keys() == theirs.keys() and len(ours) >= 4
    for name in ours:  # Adam divides by the gradient's size: where it is nearly 0, rounding shows
        if not name.endswith("heads.pick.4.bias"):  # the same for all choices: nothing but rounding
            assert torch.allclose(ours[name], theirs[name], atol=1e-3), name
    assert "\nepoch  3: " in texts[0]
    assert all("epoch" not in text for text in texts[1:])  # one voice
    assert json.loads((many / "config.json").read_text())["processes"] == count
    assert not [path for path in many.iterdir() if "tmp" in path.name or path.name == "resume.pt"]


# --------------------------------------------------------------------------------------------------
# One of them is stopped. The functions are called in its process


def run_out():
    raise torch.OutOfMemoryError("CUDA out of memory.")


def explode():
    torch.nn.functional.cross_entropy = lambda logits, *_: logits.sum() * float("inf")


def die_in(path):
    owner, _, name = path.rpartition(".")
    instead = lambda *_, **__: os.kill(os.getpid(), KILL)  # noqa: E731
    setattr(pkgutil.resolve_name(owner), name, instead)


@pytest.mark.parametrize("number", thorough_after_first(TERM, KILL))
def test_resume(number, encoder, command, tmp_path):
    """One of two processes hears the signal: both stop. Two continue to the same result, bit by
    bit, one and three to the same to 1e-5 where there is no dropout."""
    output, before = tmp_path / "output", {1: (child.at_step, 5, child.stop, number)}
    for counts, model in (((2,), {"model": encoder}), ((1, 2, 3), {})):
        reference, cut = tmp_path / f"whole{counts}", tmp_path / f"cut{counts}"
        options = {"text": "--save-minutes 0 --resume", **model}
        assert together(2, command("adapter", reference, **options), output)[0] == [0, 0]
        statuses, texts = together(2, command("adapter", cut, **options), output, before)
        if number == TERM:
            assert statuses == [130, 130] and not texts[1]
            assert f"continue with --resume --out {cut}" in texts[0]
        else:
            assert statuses[1] == -number and statuses[0] > 0 and "Traceback" not in texts[0], texts
        for count in counts:
            out = shutil.copytree(cut, tmp_path / f"{count} of {counts}")
            statuses, texts = together(count, command("adapter", out, **options), output)
            assert statuses == [0] * count, texts
            if count == 2:
                assert_equal(out, reference)
            assert_close(out, reference)


PHASES = """
0 torch.save
1 bert.Bert.from_pretrained
0 train.load_split
1 torch.distributed.broadcast
0 train.evaluate
1 torch.distributed.destroy_process_group
0 train.save
"""  # which process is killed, what it was about to do


@pytest.fixture(scope="module")
def undisturbed(command, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed")
    words = command("adapter", out / "run", "--epochs 2 --save-minutes 0")
    assert together(2, words, out / "output")[0] == [0, 0]
    return out / "run"


@pytest.mark.parametrize("phase", thorough_after_first(*PHASES.strip().splitlines()))
def test_killed_in_any_phase(phase, command, undisturbed, tmp_path):
    """torchrun ends the others when one is killed; here nobody does, and they end by themselves or
    wait. The same command continues, or starts where nothing had been saved, and comes to the
    end."""
    output, out, rank = tmp_path / "output", tmp_path / "out", int(phase[0])
    words = command("adapter", out, "--epochs 2 --save-minutes 0 --resume")
    started = start(2, words, output, {rank: (die_in, phase[2:])})
    assert child.finish(started[rank], f"{output}.{rank}")[0] == -KILL
    other = started[1 - rank]
    if child.wait(other, 3) is None:
        other.terminate()  # as torchrun does
        if child.wait(other, 3) is None:
            other.kill()
    assert "Traceback" not in Path(f"{output}.{1 - rank}").read_text()
    statuses, texts = together(2, words, output)
    assert statuses == [0, 0], texts
    assert_equal(out, undisturbed)


def test_errors_end_all_processes(command, tmp_path):
    """With one line, and never a traceback."""

    def ends(name, text="", before=(), own=()):
        words = command("adapter", tmp_path / name, text)
        statuses, texts = together(2, words, tmp_path / "output", before, own)
        assert not any("Traceback" in text for text in texts), texts
        return statuses, *texts

    statuses, said, other = ends("a", "--lr -1")
    assert statuses == [2, 2] and said.count("\n") == 1 and "--lr must be" in said and other == ""
    assert not (tmp_path / "a").exists()
    statuses, _, other = ends("b", before={1: (child.at_step, 1, run_out)})
    assert statuses[0] > 0 and statuses[1] == 2 and other.count("\n") == 1
    assert "ran out of memory on a batch of 8 examples" in other
    statuses, said, other = ends("c", before={1: (child.at_step, 5, explode)})
    assert statuses == [2, 2] and "epoch 1 is kept" in said and other == ""
    assert (tmp_path / "c" / "metrics.json").exists()
    assert ends("d", before={1: (child.at_step, 5, child.stop, TERM)})[0] == [130, 130]
    statuses, said, _ = ends("d", "--resume", own={1: ["--out", tmp_path / "elsewhere"]})
    assert statuses == [2, 2] and "one directory for all processes" in said


@thorough
def test_as_a_user_starts_it(command, tmp_path):
    """torchrun itself; Ctrl-C reaches it and its processes."""
    words = "-m torch.distributed.run --standalone --nproc_per_node=2 train.py".split()
    words += map(str, command("head", tmp_path / "run", "--epochs 500 --patience 500"))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    root = Path(train.__file__).parent
    process = subprocess.Popen([sys.executable, *words], cwd=root, start_new_session=True, **pipes)
    while not (line := process.stdout.readline()).startswith("epoch  2:"):
        assert line, process.stderr.read()
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert f"train.py: interrupted, continue with --resume --out {tmp_path / 'run'}" in errors
    assert (tmp_path / "run" / "resume.pt").exists()
