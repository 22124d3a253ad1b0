"""A run is never lost: killed at any moment, on a full or vanished disk, out of memory, twice at
once."""

import contextlib
import ctypes
import hashlib
import json
import os
import platform
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import child
import runtime.directory
import runtime.run
import train
from conftest import (
    assert_equal,
    command_line,
    compiles,
    content,
    of_stage,
    thorough,
    thorough_after_first,
)
from formats.files import write_json, write_tensors
from runtime.command import run_command
from runtime.state import Progress, save_state

KILLS = int(os.environ.get("KILLS", 6))  # of either kind, for each stage
SEED = int(os.environ["SEED"])  # conftest.py sets and prints it
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000  # of Linux
MS_RDONLY, MS_REMOUNT, MS_REC, MS_PRIVATE = 1, 32, 16384, 1 << 18


@pytest.fixture(scope="module")
def command(encoder, data_dir, runs):
    """command("fusion", out, ...): arguments of two epochs of twelve steps, with several tasks of
    eight, saved after every one of them."""

    def command(stage, out, *options):
        return [
            "--stage",
            stage,
            "--model",
            encoder,
            "--data-dir",
            data_dir,
            "--device",
            "cpu",
            *of_stage(stage, runs, 8),
            "--epochs",
            2,
            "--batch-size",
            8,
            "--lr",
            "5e-3",
            "--save-minutes",
            0,
            *options,
            "--out",
            out,
        ]

    return command


@pytest.fixture(scope="module")
def whole(command, tmp_path_factory):
    """For each stage a run that nobody has disturbed, how long it took, and how many file
    operations."""
    out, result = tmp_path_factory.mktemp("whole"), {}
    for stage in (
        "adapter",
        "fusion",
        "adapter",
        "fusion",
        "multitask",
    ):  # the second is not the first to import anything
        shutil.rmtree(out / stage, ignore_errors=True)
        started = time.monotonic()
        process = child.start(
            command(stage, out / stage), out / "output", [(child.die_at, 0, out / stage)]
        )
        status, output = child.finish(process, out / "output")
        assert status == 0, output
        result[stage] = out / stage, time.monotonic() - started, int(output.split()[-3])
    return result


@pytest.mark.parametrize("stage", thorough_after_first("fusion", "adapter", "multitask"))
def test_killed_at_random_moments(stage, command, whole, tmp_path):
    """kill -9 after a random time, anywhere from the start-up to the last file; then --resume, and
    again."""
    reference, seconds, _ = whole[stage]

    def life(worker):
        rng, kills, directory = random.Random(f"{SEED} {stage} {worker}"), 0, 0
        while True:
            out, output = tmp_path / f"{worker}.{directory}", tmp_path / f"{worker}.output"
            process = child.start(command(stage, out, "--resume"), output)
            if kills < KILLS / 2:
                if child.wait(process, rng.uniform(0, seconds)) is None:
                    process.kill()
                    kills += child.wait(process) == -9
                    continue
            status, text = child.finish(process, output)
            assert status == 0, text
            assert_equal(out, reference)
            if kills >= KILLS / 2:
                return kills
            directory += 1

    with ThreadPoolExecutor(2) as pool:
        assert sum(pool.map(life, range(2))) >= KILLS


@pytest.mark.parametrize("stage", thorough_after_first("fusion", "adapter", "multitask"))
def test_killed_before_any_file_operation(stage, command, whole, tmp_path):
    """The process dies ahead of its n-th opening, renaming or removing of a file in --out; the last
    ones in any case."""
    reference, _, operations = whole[stage]
    last = set(range(operations - 3, operations + 1))
    moments = last | set(
        random.Random(f"{SEED} {stage}").sample(
            range(1, operations + 1), min(KILLS - len(last), operations)
        )
    )

    def die(moment):
        out, output = tmp_path / str(moment), tmp_path / f"{moment}.output"
        process = child.start(command(stage, out), output, [(child.die_at, moment, out)])
        assert child.finish(process, output)[0] == -9
        status, text = child.finish(child.start(command(stage, out, "--resume"), output), output)
        assert status == 0, (moment, text)
        assert_equal(out, reference)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(die, sorted(moments)))


def test_two_runs_of_one_command_are_equal(command, whole, tmp_path):
    out = tmp_path / "again"
    status, text = child.finish(
        child.start(command("fusion", out), tmp_path / "output"), tmp_path / "output"
    )
    assert status == 0, text
    assert_equal(out, whole["fusion"][0])


@pytest.fixture
def fails(capsys):
    """fails(arguments, text, ...): train.main ends with one line that holds the texts, and status
    2."""

    def fails(arguments, *say):
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            command_line([str(argument) for argument in arguments])
        error = capsys.readouterr().err
        assert exit.value.code == 2 and error.count("\n") == 1, error
        assert all(text in error for text in say), error

    return fails


@pytest.fixture
def interrupted(command, at_step, tmp_path):
    """interrupted(stage, directory, ...): a run that Ctrl-C has stopped in its second epoch."""

    def interrupted(stage, out, *options):
        at_step(15, lambda: os.kill(os.getpid(), 2))
        with pytest.raises(SystemExit) as exit:
            command_line([str(argument) for argument in command(stage, out, *options)])
        assert exit.value.code == 130
        return out

    return interrupted


def test_a_state_that_is_torn_or_old_or_of_another_command(
    interrupted, command, fails, whole, tmp_path
):
    out = interrupted("adapter", tmp_path / "run")
    resume = [*command("adapter", out), "--resume"]
    good = (out / "resume.pt").read_bytes()
    with zipfile.ZipFile(out / "resume.pt") as file:
        tensor = max(file.infolist(), key=lambda info: info.file_size)
        middle = good.index(file.read(tensor)) + tensor.file_size // 2
    flipped = good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :]
    log = (out / "log.jsonl").read_text()
    for bad in (b"", b"state", good[:100], good[: len(good) // 2], good[:-1], flipped):
        (out / "resume.pt").write_bytes(bad)
        fails(resume, "resume.pt is damaged", "--overwrite")
        assert (out / "resume.pt").read_bytes() == bad and (out / "log.jsonl").read_text() == log
    (out / "resume.pt").write_bytes(good)
    state = torch.load(out / "resume.pt")
    del state["format"]
    torch.save(state, out / "resume.pt")
    fails(resume, "resume.pt was written by another version")
    (out / "resume.pt").write_bytes(good)
    fails([*resume, "--lr", "0.1"], "lr = 0.005, not 0.1")
    fails(command("adapter", out), "interrupted run", "--resume")
    command_line([str(argument) for argument in resume])
    assert_equal(out, whole["adapter"][0])


def test_a_finished_run_of_another_command(command, fails, whole, tmp_path, encoder, monkeypatch):
    out = shutil.copytree(whole["adapter"][0], tmp_path / "run")
    resume, before = [*command("adapter", out), "--resume"], content(out)
    for option, value, say in [
        ("--seed", 9, "seed = 0, not 9"),
        ("--lr", "0.1", "lr = 0.005, not 0.1"),
        ("--epochs", 9, "epochs"),
        ("--adapter", "houlsby", "adapter = pfeiffer, not houlsby"),
        ("--limit-train", 9, "limit_train"),
        ("--max-length", 9, "max_length"),
        ("--reduction-factor", 2, "reduction_factor"),
        ("--data-dir", tmp_path, "data_dir"),
        ("--model", tmp_path, "model"),
    ]:
        fails([*resume, option, value], "holds a finished run with", say)
    fails([*resume, "--overwrite"], "choose one")
    monkeypatch.chdir(encoder.parent)
    command_line(
        [str(argument) for argument in [*resume, "--model", encoder.name]]
    )  # the same, spelt otherwise
    assert content(out) == before


def test_other_data_is_another_command(interrupted, command, fails, data_dir, tmp_path):
    out = interrupted("adapter", tmp_path / "run")
    other = shutil.copytree(data_dir, tmp_path / "data")
    resume = [*command("adapter", out), "--resume", "--data-dir", other]
    path = other / "sst2" / "validation.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[1], lines[0], *lines[2:]]) + "\n")
    fails(resume, "data_sha256")
    path.write_text("\n".join(lines) + "\n")
    command_line([str(argument) for argument in resume])  # the same data elsewhere


def test_the_sources_of_a_fusion_may_go(command, interrupted, fails, runs, whole, tmp_path):
    """The run goes on with its own copies, also where a source has changed in the meantime."""
    sources = [shutil.copytree(runs / name, tmp_path / name) for name in ("rte", "pick")]
    out = interrupted("fusion", tmp_path / "run", "--adapters", *sources)
    shutil.rmtree(sources[0])
    shutil.copy(runs / "rte" / "adapter.safetensors", sources[1])
    resume = [*command("fusion", out), "--resume"]
    fails(resume, "sources")
    command_line([str(argument) for argument in [*resume, "--adapters", *sources]])
    ours, theirs = (content(run) for run in (out, whole["fusion"][0]))
    assert ours[1].pop("sources") != theirs[1].pop("sources") and ours == theirs


def test_the_second_process_in_a_directory_refuses(command, fails, whole, tmp_path):
    out, output = tmp_path / "run", tmp_path / "output"
    long = [*command("adapter", out), "--epochs", 10_000, "--patience", 10_000]
    process = child.start(long, output)
    while not (out / "resume.pt").exists():
        assert child.wait(process, 0.01) is None
    for option in ("--resume", "--overwrite"):
        fails([*long, option], "another process is at work", str(out))
    assert child.wait(process, 0) is None
    process.kill()
    assert child.wait(process) == -9
    process = child.start([*long, "--resume"], output)  # a lock does not outlive its process
    assert child.wait(process, 1.5) is None
    process.kill()
    assert child.wait(process) == -9

    out = tmp_path / "both"
    processes = [child.start(command("adapter", out), tmp_path / f"{i}") for i in range(2)]
    ends = sorted(child.finish(process, tmp_path / f"{i}") for i, process in enumerate(processes))
    assert [status for status, _ in ends] == [0, 2] and ends[1][1].count("train.py: ") == 1
    assert_equal(out, whole["adapter"][0])
    fails(command("adapter", out), "finished run")


def small_disk(directory):
    """Mounts a file system of its own on a directory, for this process alone. False where that is
    not permitted."""
    directory.mkdir()
    libc, user, group = ctypes.CDLL(None), os.getuid(), os.getgid()
    for flags in (CLONE_NEWNS, CLONE_NEWUSER | CLONE_NEWNS):
        if libc.unshare(flags) == 0:
            if flags & CLONE_NEWUSER:  # who is nobody there until told
                for name, text in (
                    ("setgroups", "deny"),
                    ("uid_map", f"{user} {user} 1"),
                    ("gid_map", f"{group} {group} 1"),
                ):
                    Path("/proc/self", name).write_text(text)
            libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None)
            return libc.mount(b"tmpfs", str(directory).encode(), b"tmpfs", 0, b"size=512k") == 0
    return False


def on_a_full_disk(directory, result, at_the_end):
    """To be called in a child: the disk is full from the 15th step on, or when the final files are
    written; then no longer, and the run is continued, and copied to `result`."""
    mounted, train_main, state, calls = small_disk(directory), train.main, [], []
    owner, name = (train, "save") if at_the_end else (torch.nn.functional, "cross_entropy")
    function = getattr(owner, name)

    def full(*values):
        calls.append(1)
        if len(calls) == (1 if at_the_end else 15):
            state.append((directory / "run" / "resume.pt").read_bytes())
            if mounted:
                with (
                    contextlib.suppress(OSError),
                    open(directory / "ballast", "wb", buffering=0) as ballast,
                ):
                    while True:
                        ballast.write(bytes(1024))
            else:
                resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
        return function(*values)

    def main(arguments):
        setattr(owner, name, full)
        with contextlib.suppress(SystemExit):
            run_command("train.py", train_main, arguments)
        setattr(owner, name, function)
        assert (directory / "run" / "resume.pt").read_bytes() == state[0]
        assert not [path for path in (directory / "run").rglob("*") if "tmp" in path.name]
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        if mounted:
            (directory / "ballast").unlink()
        print(
            "a file system of 512 KiB" if mounted else "no right to mount: files of at most 10 kB"
        )
        line = train_main([*arguments, "--resume"])
        shutil.copytree(directory / "run", result)
        return line

    train.main = main


@pytest.mark.parametrize("stage, at_the_end", [("adapter", False), ("fusion", True)])
def test_a_full_disk(stage, at_the_end, command, whole, tmp_path):
    disk, output = tmp_path / "disk", tmp_path / "output"
    before = [(on_a_full_disk, disk, tmp_path / "result", at_the_end)]
    status, text = child.finish(child.start(command(stage, disk / "run"), output, before), output)
    assert status == 0, text
    errors = [line for line in text.splitlines() if line.startswith("train.py: ")]
    assert len(errors) == 1 and "Traceback" not in text, text
    assert str(disk / "run") in errors[0] and "continue with --resume" in errors[0]
    assert "No space left" in errors[0] or (
        "File too large" in errors[0] and "no right to mount" in text
    )
    assert_equal(tmp_path / "result", whole[stage][0])


def on_disks_of_all_sizes(directory, result):
    """To be called in a child: writes a state, tensors and JSON where so many bytes are left, for
    many numbers, and then ends the process."""
    mounted = small_disk(directory)
    path, ballast = directory / "file", directory / "ballast"
    weight = torch.nn.Parameter(torch.ones(40_000))  # 160 kB
    optimizer = torch.optim.SGD([weight])
    old = b"the old state"

    def state(path):
        values = ({}, {"x": weight}, optimizer, torch.device("cpu"), Progress(), {}, [])
        save_state(path, *values)

    writers = {
        "state": state,
        "tensors": lambda path: write_tensors(path, {"x": weight}),
        "json": lambda path: write_json(path, {"x": "a" * 100_000}),
    }
    counts = {}
    for name, write in writers.items():
        for left in range(0, 240_000, 4096 if mounted else 10_000):
            path.write_bytes(old)
            if mounted:
                ballast.write_bytes(bytes(500_000 - left - 8192))
                os.sync()
            else:
                resource.setrlimit(resource.RLIMIT_FSIZE, (left, resource.RLIM_INFINITY))
            try:
                write(path)
                counts[name, "written"] = counts.get((name, "written"), 0) + 1
                assert path.read_bytes() != old
            except OSError:
                counts[name, "refused"] = counts.get((name, "refused"), 0) + 1
                assert path.read_bytes() == old
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            assert {*os.listdir(directory)} <= {"file", "ballast"}, os.listdir(directory)
            path.unlink(), ballast.unlink(missing_ok=True)
    result.write_text(json.dumps({" ".join(key): value for key, value in counts.items()}))
    os._exit(0)


def test_full_disks_over_a_range_of_sizes(tmp_path):
    """The old file is intact or the new one is there; no temporary file is left."""
    before = [(on_disks_of_all_sizes, tmp_path / "disk", tmp_path / "result")]
    status, text = child.finish(child.start([], tmp_path / "output", before), tmp_path / "output")
    assert status == 0, text
    counts = json.loads((tmp_path / "result").read_text())
    assert len(counts) == 6 and min(counts.values()) >= 5, counts


@pytest.mark.parametrize("what", ["trained", "optimizer", "progress", "best", "shape", "random"])
def test_a_state_that_was_edited(what, command, fails, interrupted, tmp_path):
    out = interrupted("adapter", tmp_path / "run")
    state = torch.load(out / "resume.pt", weights_only=True)
    name = next(iter(state["trained"]))
    if what == "shape":
        state["trained"][name] = state["trained"][name][:1]
    elif what == "trained":
        del state["trained"][name]
    elif what == "progress":
        state["progress"]["epoch"] = "two"
    elif what == "best":
        del state["best"][name]
    else:
        state[what] = {"optimizer": {}, "random": None}[what]
    torch.save(state, out / "resume.pt")
    fails([*command("adapter", out), "--resume"], "resume.pt", "--overwrite")


def read_only(directory, run):
    """To be called in a child: `directory` holds a copy of `run`, and cannot be written to."""
    if small_disk(directory):
        shutil.copytree(run, directory / "run")
        assert (
            ctypes.CDLL(None).mount(
                None, str(directory).encode(), None, MS_REMOUNT | MS_RDONLY, None
            )
            == 0
        )
    else:
        assert os.getuid() != 0, (
            "root writes anywhere, and cannot mount here: run the tests as another user"
        )
        shutil.copytree(run, directory / "run")
        for path in (directory / "run", directory):
            path.chmod(0o500)


def test_a_read_only_directory(command, whole, tmp_path):
    for i, (name, options) in enumerate((("new", ()), ("run", ("--overwrite",)))):
        disk, output = tmp_path / f"disk{i}", tmp_path / "output"
        process = child.start(
            [*command("adapter", disk / name), *options],
            output,
            [(read_only, disk, whole["adapter"][0])],
        )
        status, text = child.finish(process, output)
        error = [line for line in text.splitlines() if not line.startswith("note: ")]
        assert (
            status == 2
            and len(error) == 1
            and error[0].startswith("train.py: ")
            and str(disk / name) in error[0]
        ), text
        assert "Read-only" in error[0] or "Permission" in error[0]


@pytest.mark.parametrize("what", ["texts", "encoder", "vocabulary", "weights", "options"])
def test_resume_with_something_else_at_the_same_path(
    what, encoder, data_dir, command, fails, interrupted, tmp_path
):
    """Other texts of equal length, another encoder, permuted words, other copies of adapters."""
    data, model = tmp_path / "data", tmp_path / "model"
    shutil.copytree(data_dir, data), shutil.copytree(encoder, model)
    places = ["--data-dir", data, "--model", model]
    out = interrupted("fusion", tmp_path / "run", *places, "--allow-other-encoder")
    if what == "texts":
        path = data / "sst2" / "train.jsonl"
        path.write_text(path.read_text().replace("cat", "dog"))
    if what == "encoder":
        weights = load_file(model / "model.safetensors")
        name = "bert.encoder.layer.1.output.dense.bias"
        weights[name] = weights[name] + 1
        save_file(weights, model / "model.safetensors")
    if what == "vocabulary":
        path = model / "vocab.txt"
        words = path.read_text().split()
        path.write_text("\n".join(words[:5] + words[:4:-1]) + "\n")
    if what == "weights":
        path = out / "adapters" / "rte" / "adapter.safetensors"
        save_file({name: t * 2 for name, t in load_file(path).items()}, path)
    if what == "options":
        path = out / "adapters" / "rte" / "adapter_config.json"
        path.write_text(path.read_text().replace('"relu"', '"gelu"'))
    say = {
        "texts": "data_sha256",
        "encoder": "other weights",
        "vocabulary": "data_sha256",
        "weights": "adapter_sha256",
        "options": "adapter_config_sha256",
    }
    fails([*command("fusion", out, *places), "--resume"], say[what])


def test_overwrite_keeps_the_old_run_until_there_is_a_new_one(
    command, fails, at_step, whole, tmp_path, monkeypatch
):
    """An epoch of the new run must have been finished; its failures before that leave the old one.
    Links in it are removed, and not what they lead to."""
    fusion, neighbour = whole["fusion"][0], tmp_path / "neighbour"
    out = shutil.copytree(fusion, tmp_path / "run")

    def exhaust():
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def stop():
        os.kill(os.getpid(), signal.SIGTERM)

    overwrite = [*command("adapter", out), "--overwrite"]
    fails([*overwrite, "--lr", "1e38"], "the loss is nan")
    assert_equal(out, fusion)
    at_step(1, exhaust)
    fails([*overwrite, "--save-minutes", 5], "ran out of memory")
    assert_equal(out, fusion)
    at_step(5, stop)
    with pytest.raises(KeyboardInterrupt):
        train.main([str(argument) for argument in overwrite])
    assert_equal(out / "replaced", fusion)
    train.main([str(argument) for argument in [*command("adapter", out), "--resume"]])
    assert_equal(out, whole["adapter"][0])
    shutil.copytree(fusion / "adapters", neighbour)
    (out / "adapters").symlink_to(neighbour)
    train.main([str(argument) for argument in overwrite])
    assert_equal(out, whole["adapter"][0])
    assert len(list(neighbour.rglob("*.safetensors"))) == 2


def test_killed_before_any_operation_of_overwrite(command, whole, tmp_path):
    """From `set_aside` to the first epoch: the old run is there, or it is when the next process
    has begun, or the new one is continued."""
    fusion, output, count = whole["fusion"][0], tmp_path / "output", 0
    while True:
        count += 1
        out = shutil.copytree(fusion, tmp_path / f"run{count}")
        before = [(child.die_at, count, out)]
        arguments = [*command("adapter", out), "--overwrite", "--epochs", 1]
        status, text = child.finish(child.start(arguments, output, before), output)
        if (out / "resume.pt").exists() and not (out / "replaced").exists():
            break  # the new one has something to keep
        assert status == -signal.SIGKILL, text
        if not (out / "resume.pt").exists() or (out / "replaced.tmp").exists():
            log = runtime.directory.lock(out)
            runtime.directory.restore(out, log)
            log.close()
            runtime.directory.clear(out, runtime.directory.TEMPORARY)
            assert_equal(out, fusion)
        else:
            assert_equal(out / "replaced", fusion)
        shutil.rmtree(out)
        count += count // 5 * (KILLS < 100)
    assert count > 20


def test_damaged_metrics_beside_a_state(command, fails, at_step, whole, tmp_path):
    """As a power cut leaves them on file systems that write names before content."""
    out = tmp_path / "run"

    def stop():
        os.kill(os.getpid(), signal.SIGTERM)

    at_step(20, stop)
    with pytest.raises(KeyboardInterrupt):
        train.main([str(argument) for argument in command("adapter", out)])
    (out / "metrics.json").write_bytes(b"")
    train.main([str(argument) for argument in [*command("adapter", out), "--resume"]])
    assert_equal(out, whole["adapter"][0])
    (out / "metrics.json").write_bytes(b"")
    fails([*command("adapter", out), "--resume"], "metrics.json")


def test_what_a_state_depends_on_is_flushed_before_it(command, tmp_path, monkeypatch):
    """No file takes another's name before its content is on the disk, and the state is written
    after config.json and the adapters' copies are."""
    out, flushed, order, sync, replace = tmp_path / "run", set(), [], os.fsync, Path.replace

    def fsync(descriptor):
        flushed.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def rename(path, target):
        if out in path.parents:  # not the cache of `datasets`
            assert path.stat().st_ino in flushed, path
        if Path(target).name == "resume.pt":
            needed = [out / "config.json", *out.glob("adapters/*/*")]
            assert len(needed) == 5 and all(file.stat().st_ino in flushed for file in needed)
        order.append(Path(target).name)
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", rename)
    train.main([str(argument) for argument in [*command("fusion", out), "--epochs", 1]])
    assert order.index("config.json") < order.index("resume.pt")
    assert order[-1] == "metrics.json"


def test_a_directory_that_vanishes_under_the_run(command, fails, at_step, whole, tmp_path):
    neighbour = shutil.copytree(whole["adapter"][0], tmp_path / "neighbour")
    for step in (1, 15, 24):
        at_step(step, lambda: shutil.rmtree(tmp_path / "run"))
        fails(
            command("adapter", tmp_path / "run"), str(tmp_path / "run"), "No such file or directory"
        )
        assert not (tmp_path / "run").exists()
    assert_equal(neighbour, whole["adapter"][0])


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't "
            "allocate memory"
        ),
    ],
)
def test_out_of_memory(error, command, fails, whole, tmp_path, monkeypatch):
    calls, predict = [], train.predict
    out = tmp_path / "run"

    def exhaust(bert, head, batch, dtype):
        calls.append(batch["input_ids"].shape)
        if len(calls) in limit:
            raise error
        return predict(bert, head, batch, dtype)

    monkeypatch.setattr(train, "predict", exhaust)
    limit = {1}
    with pytest.raises(SystemExit):  # the shape of the first batch
        command_line([str(argument) for argument in command("adapter", out)])
    rows, length = calls.pop()
    shape = f"8 examples, {rows} x {length} tokens"
    fails(command("adapter", out), shape, "continue with --grad-accumulation 2", "--batch-size")
    calls.clear()
    limit = {14}  # after 12 steps, in the second batch of evaluation
    fails(command("adapter", out), "in evaluation", "with --resume and --grad-accumulation 2")
    limit = {}
    command_line([str(argument) for argument in [*command("adapter", out), "--resume"]])
    assert_equal(out, whole["adapter"][0])


def test_another_error_keeps_its_traceback(command, tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("a mistake in the code")

    monkeypatch.setattr(train, "predict", broken)
    with pytest.raises(RuntimeError, match="a mistake"):
        command_line([str(argument) for argument in command("adapter", tmp_path / "run")])


@pytest.mark.parametrize(
    "stage, task", thorough_after_first(("fusion", "sst2"), ("adapter", "pick"), ("full", "rte"))
)
def test_grad_accumulation_gives_the_same_gradients(
    stage, task, command, quiet_encoder, tmp_path, monkeypatch
):
    clip, gradients = torch.nn.utils.clip_grad_norm_, []

    def keep(parameters, norm):
        gradients[-1].append([p.grad.clone() for p in parameters])
        return clip(parameters, norm)

    monkeypatch.setattr(train.torch.nn.utils, "clip_grad_norm_", keep)
    for k in (1, 3, 8, 11):  # 96 examples: batches of 11, the last of 8
        gradients.append([])
        command_line(
            [
                str(argument)
                for argument in command(
                    stage,
                    tmp_path / str(k),
                    "--model",
                    quiet_encoder,
                    "--task",
                    task,
                    "--batch-size",
                    11,
                    "--epochs",
                    1,
                    "--grad-accumulation",
                    k,
                )
            ]
        )
    assert (
        len(gradients[0]) == 9 and max(gradient.abs().max() for gradient in gradients[0][0]) > 0.01
    )
    for other in gradients[1:]:
        for ours, theirs in zip(gradients[0][0], other[0], strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    logs = [content(tmp_path / str(k))[0] for k in (1, 3, 8, 11)]
    for log in logs:
        assert log[0]["loss"] == pytest.approx(logs[0][0]["loss"], abs=1e-5)


def test_compile_without_a_compiler(command, fails, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    fails([*command("adapter", tmp_path / "run"), "--compile"], "--compile needs a C++ compiler")
    assert not (tmp_path / "run").exists()


@thorough
def test_a_compiler_that_fails(command, tmp_path):
    """Or what it has left in PyTorch's cache. A process of its own: PyTorch reads CXX once."""
    environment = {"CXX": "false", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "train.py", *map(str, command("adapter", tmp_path / "run")), "--compile"],
        cwd=Path(train.__file__).parent,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and len(lines) == 1, done.stderr
    assert (
        "--compile failed (InvalidCxxCompiler: " in lines[0] and "continue without it" in lines[0]
    )
    assert str(tmp_path / "cache") in lines[0]


def test_a_compiler_that_a_signal_has_ended(command, at_step, tmp_path):
    """Ctrl-C in a terminal ends the C++ compiler, too: then it is not this that has failed."""
    from torch._dynamo.exc import BackendCompilerFailed

    def stop():
        os.kill(os.getpid(), signal.SIGINT)
        raise BackendCompilerFailed(print, RuntimeError("C++ compile error"), None)

    at_step(1, stop)
    with pytest.raises(KeyboardInterrupt, match="^interrupted$"):
        train.main([str(argument) for argument in command("adapter", tmp_path / "run")])


@thorough
def test_compiling_processes_do_not_hear_signals(tmp_path):
    """PyTorch has them for a GPU, and waits forever for those that a signal has ended. Here it has
    none, the test makes it believe otherwise."""
    code = """
import os, signal, time, types
import torch._inductor.async_compile as inductor
from runtime.kernels import compile_layers
signal.signal(signal.SIGTERM, lambda *_: print("heard", flush=True))
inductor.has_triton_package = lambda: True
compile_layers(types.SimpleNamespace(layers=[]))
pool = inductor.AsyncCompile.process_pool()
pool.submit(os.getpid).result()
work = pool.submit(time.sleep, 1)
print("here", flush=True)
work.result()
print("done", flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(train.__file__).parent,
        env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout.readline() == "here\n"
    os.killpg(process.pid, signal.SIGTERM)
    try:
        assert process.communicate(timeout=30)[0] == "heard\ndone\n"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0


@compiles
@pytest.mark.parametrize("stage", train.STAGES)
def test_compile(stage, command, quiet_encoder, tmp_path):
    logs = []
    for options in ([], ["--compile"]):
        out, output = tmp_path / f"run{len(options)}", tmp_path / "output"
        process = child.start([*command(stage, out, "--model", quiet_encoder), *options], output)
        status, text = child.finish(process, output, timeout=300)
        assert status == 0, text
        logs.append(content(out)[0])
    for plain, compiled in zip(*logs, strict=True):
        assert compiled["loss"] == pytest.approx(plain["loss"], abs=1e-5)
        assert compiled["dev_accuracy"] == plain["dev_accuracy"]


def test_the_config_says_what_a_run_was_made_with(whole, runs):
    config = json.loads((whole["fusion"][0] / "config.json").read_text())
    assert config["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert {"torch", "numpy", "tokenizers", "safetensors", "datasets"} == set(config["versions"])
    assert config["python"] == platform.python_version()
    assert (
        config["command"].startswith("train.py --stage fusion --model ")
        and "--save-minutes 0" in config["command"]
    )
    assert (config["device"], config["dtype"], config["threads"], config["processes"]) == (
        "cpu",
        "float32",
        1,
        1,
    )
    for name in ("rte", "pick"):  # copied bit by bit, so the hash is also that of the source
        assert (
            config["adapter_sha256"][name]
            == hashlib.sha256((runs / name / "adapter.safetensors").read_bytes()).hexdigest()
        )


def test_the_commit(tmp_path, monkeypatch):
    def git(*arguments):
        options = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", *options, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    code = tmp_path / "runtime" / "run.py"
    code.parent.mkdir()
    monkeypatch.setattr(runtime.run, "__file__", str(code))
    code.write_text("one")
    assert runtime.run.commit() is None
    git("init", "-q")
    assert runtime.run.commit() is None
    git("add", "runtime/run.py")
    git("commit", "-qm", "one")
    head = git("rev-parse", "HEAD").strip()
    assert len(head) == 40 and runtime.run.commit() == head
    (tmp_path / "notes").write_text("not part of the code")
    assert runtime.run.commit() == head
    code.write_text("two")
    assert runtime.run.commit() == f"{head}-dirty"
    with monkeypatch.context() as other:
        other.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
        other.setenv("GIT_WORK_TREE", str(tmp_path / "elsewhere"))
        assert runtime.run.commit() == f"{head}-dirty"
    monkeypatch.setattr(runtime.run, "__file__", str(tmp_path / "below" / "runtime" / "run.py"))
    (tmp_path / "below" / "runtime").mkdir(parents=True)
    assert runtime.run.commit() is None  # the repository is another's
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(runtime.run, "__file__", str(code))
    assert runtime.run.commit() is None


def test_a_run_that_another_process_has_finished_meanwhile(command, whole, tmp_path):
    """--resume looked before it loaded, and found no end yet."""
    out = shutil.copytree(whole["adapter"][0], tmp_path / "run")
    with pytest.raises(ValueError, match="finished run"):
        train.train(
            train.arguments([str(argument) for argument in [*command("adapter", out), "--resume"]])
        )
    assert_equal(out, whole["adapter"][0])
    (out / "resume.pt").write_bytes(b"killed before it was removed")
    command_line([str(argument) for argument in [*command("adapter", out), "--resume"]])
    assert_equal(out, whole["adapter"][0])
