"""A batch in parts, also in several processes, as torchrun starts them, and on a GPU: the same."""

import os
import socket
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

import child
import train
from conftest import assert_equal, content, interrupt, main, thorough
from runtime.processes import gather, start_processes, sum_gradients


@pytest.fixture
def quietly(command, quiet_encoder):
    """33 examples in batches of 16, the last batch is one example; no dropout."""
    options = {"model": quiet_encoder, "epochs": 3, "batch_size": 16, "limit_train": 33}
    return partial(command, **options)


def environment(count):
    """Where so many processes meet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count)}


def together(words, before=()):
    """(statuses, each stdout, each stderr) of a process for each. before: (rank, what it calls)"""
    programs, common = [], environment(len(words))
    for rank, given in enumerate(words):
        calls = before[1:] if before and before[0] == rank else ()
        programs.append(child.Program(given, calls, **common, RANK=str(rank), LOCAL_RANK=str(rank)))
    return zip(*(program.finish() for program in programs), strict=True)


def assert_close(run, other):
    """The losses are the same but for rounding, the accuracies to the last bit."""
    for name, tolerance in (("loss", 1e-5), ("dev_accuracy", 0)):
        ours, theirs = ([line[name] for line in content(out)[0]] for out in (run, other))
        assert ours == pytest.approx(theirs, abs=tolerance, rel=0)


CASES = [  # stage, processes, options
    ("fusion", 1, "--grad-accumulation 3"),
    ("multitask", 1, "--grad-accumulation 3"),
    # the last batch has three examples: one process has two parts, the other one
    ("adapter", 2, "--grad-accumulation 2 --limit-train 35"),
    # there are fewer examples than processes
    pytest.param("adapter", 3, "--limit-train 2 --limit-dev 1", marks=thorough),
    *[pytest.param(stage, 2, "", marks=thorough) for stage in train.STAGES],
]


@pytest.mark.parametrize("stage, count, text", CASES)
def test_the_same_numbers_in_parts(stage, count, text, quietly, tmp_path):
    one, many = tmp_path / "one", tmp_path / "many"
    main(quietly(stage, one, f"{text} --grad-accumulation 1"))
    statuses, said, errors = together([quietly(stage, many, text)] * count)
    assert not any(statuses), errors
    assert "\nepoch  3: " in said[0] and not any(said[1:])  # one voice
    assert_close(many, one)
    for path in one.rglob("*.safetensors"):
        ours, theirs = load_file(many / path.relative_to(one)), load_file(path)
        for name in ours.keys() | theirs.keys():
            # Adam divides by the gradient's size: where it is nearly 0, rounding shows
            if name != "heads.pick.4.bias":  # the same for all choices: nothing but rounding
                assert torch.allclose(ours[name], theirs[name], atol=1e-3), name


def exchange(rank, environment):
    """What a process gathers, and gradients of parameters that both, one and none of them have"""
    os.environ.update(environment, RANK=str(rank))
    start_processes(torch.device("cpu"))
    both, one, none = (torch.nn.Parameter(torch.zeros(2, 2)) for _ in range(3))
    before = both.grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T  # not contiguous
    one.grad = torch.ones(2, 2) if rank == 1 else None
    sum_gradients([both, one, none])
    assert both.grad is before and none.grad is None
    return gather({"rank": rank}), both.grad.tolist(), one.grad.tolist()


def test_what_processes_exchange():
    with ProcessPoolExecutor(2, child.context) as pool:
        found = [*pool.map(exchange, range(2), [environment(2)] * 2)]
    assert found == [([{"rank": 0}, {"rank": 1}], [[2, 6], [4, 8]], [[1, 1], [1, 1]])] * 2


def test_resume(command, quietly, tmp_path):
    """One hears the signal: both stop. Two go on to the same bits; three do without dropout."""
    before, cut, quiet = (1, (child.at_step, 5, child.stop)), tmp_path / "cut", tmp_path / "quiet"
    outs = tmp_path / "whole", cut, tmp_path / "elsewhere"
    whole, resumed, elsewhere = (command("adapter", out, "--resume") for out in outs)
    together([whole] * 2)
    statuses, _, errors = together([resumed] * 2, before)
    assert statuses == (130, 130) and not errors[1]
    statuses, _, errors = together([resumed, elsewhere])
    assert statuses == (2, 2) and "one directory for all processes" in errors[0]
    together([resumed] * 2)
    assert_equal(cut, tmp_path / "whole")
    main(quietly("adapter", tmp_path / "one"))
    together([quietly("adapter", quiet)] * 2, before)
    together([quietly("adapter", quiet, "--resume")] * 3)
    assert_close(quiet, tmp_path / "one")


def explode():
    import train  # the one that runs, as a program

    train.fusion_regularization = lambda _: torch.tensor(float("inf"))


ERRORS = [  # options, what is called in a process, which process says what
    ("--lr -1", (), 0, "--lr: must be"),
    ("", (1, (child.at_step, 1, divmod, 1, 0)), 1, "ZeroDivisionError"),
    ("", (1, (child.at_step, 5, explode)), 0, "epoch 1 is kept"),
]


@pytest.mark.parametrize("text, before, voice, message", ERRORS)
def test_errors_end_all_processes(text, before, voice, message, quietly, tmp_path):
    """With one line, and never a traceback."""
    statuses, _, errors = together([quietly("adapter", tmp_path, text)] * 2, before)
    assert all(statuses) and errors[voice].count("\n") == 1 and message in errors[voice]
    # torchrun would end the second one before it says the same
    assert voice == 1 or errors[1] in ("", errors[0].replace(":", ", process 1:", 1))
    assert not any("Traceback" in error for error in errors)
    assert (tmp_path / "metrics.json").exists() == ("is kept" in message)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("stage", train.STAGES)
def test_a_gpu(stage, command, quietly, tmp_path):
    """It trains as a CPU does. In bf16 with dropout, a repeated run ends in the same bits."""
    gpu, cpu, whole, again, cut = (tmp_path / name for name in "gpu cpu whole again cut".split())
    main(quietly(stage, gpu, "--device cuda --dtype float32 --epochs 2"))
    main(quietly(stage, cpu, "--epochs 2"))
    ours, theirs = ([line["loss"] for line in content(out)[0]] for out in (gpu, cpu))
    assert ours == pytest.approx(theirs, abs=1e-4) and len(ours) == 2
    main(command(stage, whole, "--device cuda --dtype bfloat16"))
    main(command(stage, again, "--device cuda --dtype bfloat16"))
    interrupt(command(stage, cut, "--device cuda --dtype bfloat16"), 15)
    main(command(stage, cut, "--device cuda --dtype bfloat16 --resume"))
    assert_equal(again, whole)
    assert_equal(cut, whole)
    assert content(whole)[1]["options"]["dtype"] == "bfloat16"
