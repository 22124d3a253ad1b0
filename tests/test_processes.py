"""Several processes, as torchrun starts them, here on CPUs with gloo: the numbers of one process,
and nobody waits for ever."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import child
import runtime.directory
import runtime.processes
import runtime.run
import train
from adapter import AdapterConfig, Head, add_adapter
from bert import Bert, BertConfig
from conftest import command_line, of_stage, thorough, thorough_after_first
from experiments.load_run import load_run


@pytest.fixture(scope="module")
def command(quiet_encoder, data_dir, runs):
    """command("fusion", out, ...): 33 examples in batches of 16, the last batch is one example; no
    dropout."""

    def command(stage, out, *options):
        return [
            "--stage",
            stage,
            "--model",
            quiet_encoder,
            "--data-dir",
            data_dir,
            "--device",
            "cpu",
            *of_stage(stage, runs, 6),
            "--epochs",
            3,
            "--batch-size",
            16,
            "--limit-train",
            33,
            "--lr",
            "5e-3",
            *options,
            "--out",
            out,
        ]

    return command


def start(count, arguments, output, before=None):
    """[Process] of what torchrun starts; before: {number of a process: calls ahead of it}."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    common |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    numbers = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    return [
        child.start(
            arguments, f"{output}.{rank}", (before or {}).get(rank, ()), **common, **numbers[rank]
        )
        for rank in range(count)
    ]


def finish(processes, output):
    """(exit statuses, what each wrote)"""
    ends = [child.finish(process, f"{output}.{rank}") for rank, process in enumerate(processes)]
    return [status for status, _ in ends], [text for _, text in ends]


def log_of(run):
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines], [line["dev_accuracy"] for line in lines]


def tensors_of(run):
    files = {path.relative_to(run): load_file(path) for path in run.rglob("*.safetensors")}
    return {
        f"{path} {name}": tensor
        for path, tensors in files.items()
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize(
    "stage, count",
    [("adapter", 2), ("adapter", 3), ("fusion", 2), ("head", 2), ("full", 2), ("multitask", 2)],
)
def test_the_same_numbers_as_one_process(stage, count, command, tmp_path):
    accumulation = ["--grad-accumulation", 3] if stage == "fusion" else []
    options = []
    if (stage, count) == (
        "adapter",
        2,
    ):  # nothing reads the own LayerNorms of the layer with the adapter: they get no gradient
        options = [
            "--adapter-config",
            "layer_norms=true",
            "original_ln_before=false",
            "original_ln_after=false",
            "leave_out=[0]",
        ]
    command_line([str(argument) for argument in command(stage, tmp_path / "one", *options)])
    processes = start(
        count, command(stage, tmp_path / "many", *options, *accumulation), tmp_path / "output"
    )
    statuses, texts = finish(processes, tmp_path / "output")
    assert statuses == [0] * count, texts
    (losses, accuracies), (one_losses, one_accuracies) = (
        log_of(tmp_path / "many"),
        log_of(tmp_path / "one"),
    )
    assert (
        losses == pytest.approx(one_losses, abs=1e-5)
        and accuracies == one_accuracies
        and len(losses) == 3
    )
    ours, theirs = tensors_of(tmp_path / "many"), tensors_of(tmp_path / "one")
    assert ours.keys() == theirs.keys() and len(ours) >= 4
    for name in ours:  # Adam divides by the gradient's size: where it is nearly 0, rounding shows
        if not name.endswith(
            "heads.pick.4.bias"
        ):  # is the same for all choices, so its gradient is nothing but rounding
            assert torch.allclose(ours[name], theirs[name], atol=1e-3), name
    assert (
        "\n       3  " in texts[0]
        and json.loads(texts[0].splitlines()[-2])["train_examples"] % 33 == 0
    )
    assert all("epoch" not in text for text in texts[1:])  # one voice
    assert json.loads((tmp_path / "many" / "config.json").read_text())["processes"] == count
    assert not [
        path
        for path in (tmp_path / "many").iterdir()
        if "tmp" in path.name or path.name == "resume.pt"
    ]


def test_fewer_examples_than_processes(command, data_dir, tmp_path):
    for split, count in (("train", 2), ("validation", 1)):
        (tmp_path / "sst2").mkdir(exist_ok=True)
        lines = (data_dir / "sst2" / f"{split}.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / "sst2" / f"{split}.jsonl").write_text("".join(lines[:count]))
    options, output = ["--data-dir", tmp_path], tmp_path / "output"
    command_line([str(argument) for argument in command("adapter", tmp_path / "one", *options)])
    statuses, texts = finish(
        start(3, command("adapter", tmp_path / "many", *options), output), output
    )
    assert statuses == [0, 0, 0], texts
    assert log_of(tmp_path / "many")[0] == pytest.approx(log_of(tmp_path / "one")[0], abs=1e-5)
    assert log_of(tmp_path / "many")[1] == log_of(tmp_path / "one")[1]


def test_every_example_once(monkeypatch):
    for world in range(1, 6):
        for size in (1, 2, 3, 7, 16, 33):
            for count in (1, 2, 5):
                indices, seen, shares = np.arange(100, 100 + size), [], 0
                for rank in range(world):
                    monkeypatch.setattr(
                        runtime.processes, "processes", lambda rank=rank, world=world: (rank, world)
                    )
                    mine = runtime.processes.micro_batches(indices, count)
                    assert 1 <= len(mine) <= count and all(
                        len(examples) > 0 for _, examples in mine
                    )
                    seen += [i for share, examples in mine if share > 0 for i in examples]
                    shares += sum(share for share, _ in mine)
                    assert all(
                        share in (0, pytest.approx(len(examples) / size))
                        for share, examples in mine
                    )
                assert sorted(seen) == list(indices) and shares == pytest.approx(1)


def stop_at(step, number):
    """To be called in a child: a signal for this process in the middle of its n-th step."""
    steps, cross_entropy = [], torch.nn.functional.cross_entropy

    def instead(*values):
        steps.append(1)
        if len(steps) == step:
            os.kill(os.getpid(), number)
        return cross_entropy(*values)

    torch.nn.functional.cross_entropy = instead


@pytest.mark.parametrize("number", thorough_after_first(signal.SIGTERM, signal.SIGKILL))
def test_resume(number, encoder, command, tmp_path):
    """One of two processes hears the signal: both stop. Two continue to the same result, bit by
    bit, one and three to the same without dropout, and to the end with it."""
    for dropout, model in ((True, ["--model", encoder]), (False, [])):
        options = [*model, "--save-minutes", 0, "--resume"]
        output = tmp_path / "output"
        reference = tmp_path / f"whole-{dropout}"
        assert finish(start(2, command("adapter", reference, *options), output), output)[0] == [
            0,
            0,
        ]
        cut = tmp_path / f"cut-{dropout}"
        statuses, texts = finish(
            start(2, command("adapter", cut, *options), output, {1: [(stop_at, 5, number)]}), output
        )
        if number == signal.SIGTERM:
            assert (
                statuses == [130, 130]
                and f"continue with --resume --out {cut}" in texts[0]
                and not texts[1]
            )
        else:
            assert statuses[1] == -number and statuses[0] > 0 and "Traceback" not in texts[0], texts
        for count in (1, 2, 3):
            out = shutil.copytree(cut, tmp_path / f"{count}-{dropout}")
            statuses, texts = finish(
                start(count, command("adapter", out, *options), output), output
            )
            assert statuses == [0] * count, texts
            ours, theirs = tensors_of(out), tensors_of(reference)
            if count == 2:
                assert log_of(out) == log_of(reference) and all(
                    torch.equal(ours[name], theirs[name]) for name in theirs
                )
            elif not dropout:
                assert log_of(out)[0] == pytest.approx(log_of(reference)[0], abs=1e-5)


PHASES = {  # what a process is about to do when it is killed
    "state": (runtime.run.Run, "save"),
    "encoder": (train, "build"),
    "tokens": (train, "load_split"),
    "start": (runtime.run.Run, "begin"),
    "evaluation": (train, "evaluate"),
    "end": (runtime.run.Run, "restore_best"),
    "files": (runtime.run.Run, "finish"),
}


def die_in(phase):
    """To be called in a child."""
    owner, name = PHASES[phase]
    setattr(owner, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))


IN_ANY_PHASE = ["--epochs", 2, "--save-minutes", 0, "--resume"]


@pytest.fixture(scope="module")
def undisturbed(command, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed")
    output = out / "output"
    arguments = command("adapter", out / "run", *IN_ANY_PHASE)
    statuses, texts = finish(start(2, arguments, output), output)
    assert statuses == [0, 0], texts
    return out / "run"


@pytest.mark.parametrize("phase", thorough_after_first(*PHASES))
def test_killed_in_any_phase(phase, command, undisturbed, tmp_path):
    """torchrun ends the others when one is killed; here nobody does, and they end by themselves or
    wait. The same command continues, or starts where nothing had been saved, and comes to the
    end."""
    output, out = tmp_path / "output", tmp_path / "out"
    rank = list(PHASES).index(phase) % 2
    arguments = command("adapter", out, *IN_ANY_PHASE)
    processes = start(2, arguments, output, {rank: [(die_in, phase)]})
    assert child.finish(processes[rank], f"{output}.{rank}")[0] == -signal.SIGKILL
    other = processes[1 - rank]
    if child.wait(other, 3) is None:
        other.terminate()  # as torchrun does
        if child.wait(other, 3) is None:
            other.kill()
    assert "Traceback" not in Path(f"{output}.{1 - rank}").read_text()
    statuses, texts = finish(start(2, arguments, output), output)
    assert statuses == [0, 0], texts
    ours, theirs = tensors_of(out), tensors_of(undisturbed)
    assert log_of(out) == log_of(undisturbed) and ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def out_of_memory():
    """To be called in a child."""

    def predict(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    train.predict = predict


def explode(step):
    """To be called in a child: from the n-th step on its losses are not finite."""
    steps, cross_entropy = [], torch.nn.functional.cross_entropy

    def instead(*values):
        steps.append(1)
        return cross_entropy(*values) * (float("inf") if len(steps) >= step else 1)

    torch.nn.functional.cross_entropy = instead


def find_nothing():
    """To be called in a child, whose machine does not see the others' directory."""
    runtime.run.resumes = lambda _: False


def take_longer(factor):
    """To be called in a child: whatever it waits for takes longer."""
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(factor * seconds)


def test_a_silent_process_does_not_end_first(command, tmp_path):
    """torchrun would end the one that says why."""
    output = tmp_path / "output"
    before = {0: [(time.sleep, 1)], 1: [(take_longer, 20)]}
    processes = start(2, command("adapter", tmp_path / "a", "--lr", -1), output, before)
    assert child.finish(processes[0], f"{output}.0")[0] == 2
    assert child.wait(processes[1], 0) is None
    processes[1].kill()


def test_errors_end_all_processes(command, tmp_path):
    output = tmp_path / "output"
    statuses, texts = finish(
        start(2, command("adapter", tmp_path / "a", "--lr", -1), output), output
    )
    assert (
        statuses == [2, 2]
        and texts[0].count("\n") == 1
        and "--lr must be" in texts[0]
        and texts[1] == ""
    )
    assert not (tmp_path / "a").exists()

    statuses, texts = finish(
        start(2, command("adapter", tmp_path / "b"), output, {1: [(out_of_memory,)]}), output
    )
    assert (
        statuses[1] == 2
        and "ran out of memory on a batch of 8 examples" in texts[1]
        and texts[1].count("\n") == 1
    )
    assert statuses[0] > 0 and "Traceback" not in texts[0]

    statuses, texts = finish(
        start(2, command("adapter", tmp_path / "c"), output, {1: [(explode, 5)]}), output
    )
    assert statuses == [2, 2] and "epoch 1 is kept" in texts[0] and texts[1] == ""
    assert load_run(tmp_path / "c")[2]["task"] == "sst2"

    before = {1: [(find_nothing,)]}
    statuses, texts = finish(
        start(2, command("adapter", tmp_path / "e"), output, {1: [(stop_at, 5, signal.SIGTERM)]}),
        output,
    )
    assert statuses == [130, 130]
    statuses, texts = finish(
        start(2, command("adapter", tmp_path / "e", "--resume"), output, before), output
    )
    assert statuses == [2, 2] and "one directory for all processes" in texts[0] and texts[1] == ""

    (tmp_path / "d").mkdir()
    with runtime.directory.lock(tmp_path / "d"):
        statuses, texts = finish(start(2, command("adapter", tmp_path / "d"), output), output)
    assert statuses == [2, 2] and "another process is at work" in texts[0] and texts[1] == ""


@thorough
def test_as_a_user_starts_it(command, tmp_path):
    """torchrun itself; Ctrl-C reaches it and its processes."""
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        "train.py",
    ]
    options = ["--epochs", "500", "--patience", "500"]
    arguments = [str(argument) for argument in command("head", tmp_path / "run", *options)]
    process = subprocess.Popen(
        [*torchrun, *arguments],
        cwd=Path(train.__file__).parent,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (line := process.stdout.readline()).startswith("       2  "):
        assert line, process.stderr.read()
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert f"train.py: interrupted, continue with --resume --out {tmp_path / 'run'}" in errors
    assert (tmp_path / "run" / "resume.pt").exists()


def test_bytes_per_step():
    """What BERT-base's processes exchange: gradients of the Pfeiffer adapters (16) and of the
    head."""
    with torch.device("meta"):
        bert = Bert(BertConfig(30522, 768, 12, 12, 3072)).requires_grad_(False)
        add_adapter(bert, "rte", AdapterConfig.pfeiffer())
    assert sum(p.numel() for p in bert.parameters() if p.requires_grad) == 894_528
    head = Head({"head_type": "classification", "num_labels": 2, "layers": 2}, bert.config)
    assert sum(p.numel() for p in head.parameters()) == 592_130
