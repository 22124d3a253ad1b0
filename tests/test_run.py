"""A run is never lost: killed at any moment, on a full or vanished disk, out of memory, twice at
once."""

import contextlib
import ctypes
import hashlib
import json
import os
import platform
import random
import re
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
import train
from bert import Bert
from conftest import assert_equal, cli, compiles, content, of_stage, thorough, thorough_after_first
from formats.files import atomic_write, write_json, write_tensors
from runtime.command import run_command

ROOT = Path(train.__file__).parent
KILLS = int(os.environ.get("KILLS", 6))  # of either kind, for each stage
SEED = int(os.environ["SEED"])  # conftest.py sets and prints it
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000  # of Linux
MS_RDONLY, MS_REMOUNT, MS_REC, MS_PRIVATE = 1, 32, 16384, 1 << 18
every_stage = pytest.mark.parametrize(
    "stage", thorough_after_first("fusion", "adapter", "multitask")
)


@pytest.fixture(scope="module")
def command(encoder, data_dir, runs):
    """command("fusion", out, "--resume"): words of two epochs of twelve steps, with several tasks
    of eight, saved after every one of them."""
    common = cli("--device cpu --epochs 2 --batch-size 8 --lr 5e-3 --save-minutes 0")
    common += cli(model=encoder, data_dir=data_dir)

    def command(stage, out, text="", **options):
        return [*common, *of_stage(stage, runs, 8), *cli(text, out=out, **options)]

    return command


@pytest.fixture(scope="module")
def whole(command, tmp_path_factory):
    """{stage: (a run that nobody has disturbed, its seconds, its number of file operations)}"""
    out, result = tmp_path_factory.mktemp("whole"), {}
    for stage in ("fusion", "adapter", "fusion", "multitask"):  # the first imports more than others
        shutil.rmtree(out / stage, ignore_errors=True)
        started = time.monotonic()
        before = [(child.die_at, 0, out / stage)]
        process = child.start(command(stage, out / stage), out / "output", before)
        status, text = child.finish(process, out / "output")
        assert status == 0, text
        result[stage] = out / stage, time.monotonic() - started, int(text.split()[-3])
    return result


# --------------------------------------------------------------------------------------------------
# Killed


@every_stage
def test_killed_at_random_moments(stage, command, whole, tmp_path):
    """kill -9 after a random time, anywhere from the start-up to the last file; then --resume, and
    again."""
    reference, seconds, _ = whole[stage]

    def life(worker):
        rng, kills, directory = random.Random(f"{SEED} {stage} {worker}"), 0, 0
        while True:
            out, output = tmp_path / f"{worker}.{directory}", tmp_path / f"{worker}.output"
            process = child.start(command(stage, out, "--resume"), output)
            if kills < KILLS / 2 and child.wait(process, rng.uniform(0, seconds)) is None:
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


@every_stage
def test_killed_before_any_file_operation(stage, command, whole, tmp_path):
    """The process dies ahead of its n-th opening, renaming or removing of a file in --out; the last
    ones in any case."""
    reference, _, count = whole[stage]
    last = {*range(count - 3, count + 1)}
    others = random.Random(f"{SEED} {stage}").sample(range(1, count + 1), min(KILLS - 4, count))

    def die(moment):
        out, output = tmp_path / str(moment), tmp_path / f"{moment}.output"
        process = child.start(command(stage, out), output, [(child.die_at, moment, out)])
        assert child.finish(process, output)[0] == -9
        status, text = child.finish(child.start(command(stage, out, "--resume"), output), output)
        assert status == 0, (moment, text)
        assert_equal(out, reference)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(die, sorted(last | {*others})))


def test_killed_before_any_operation_of_overwrite(command, whole, refused, tmp_path):
    """Until the new run has finished an epoch, the old one comes back with the next command, here
    one that fails, or waits in OUT/replaced."""
    fusion, output, count, kills = whole["fusion"][0], tmp_path / "output", 0, 0
    while True:
        count, kills = count + 1, kills + 1
        out = shutil.copytree(fusion, tmp_path / f"run{count}")
        words = command("adapter", out, "--overwrite --epochs 1")
        process = child.start(words, output, [(child.die_at, count, out)])
        status, text = child.finish(process, output)
        if (out / "resume.pt").exists() and not (out / "replaced").exists():
            break  # the new one has something to keep
        assert status == -signal.SIGKILL, text
        if (out / "resume.pt").exists() and not (out / "replaced.tmp").exists():
            assert_equal(out / "replaced", fusion)
        if kills % 5 == 0 or KILLS >= 100:
            refused([*words, "--lr", "1e38"], "the loss is nan")
            assert_equal(out, fusion)
        shutil.rmtree(out)
        count += count // 5 * (KILLS < 100)
    assert kills > 10


def test_two_runs_of_one_command_are_equal(command, whole, tmp_path):
    train.main(command("fusion", tmp_path / "again"))
    assert_equal(tmp_path / "again", whole["fusion"][0])


# --------------------------------------------------------------------------------------------------
# --resume and --overwrite


@pytest.fixture
def interrupted(command, at_step):
    """interrupted(stage, out, ...): a run that was stopped in its second epoch."""

    def interrupted(stage, out, *words, step=15, **options):
        at_step(step, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(KeyboardInterrupt):
            train.main([*command(stage, out, **options), *words])
        return out

    return interrupted


def test_a_state_that_is_torn_or_old_or_of_another_command(
    interrupted, command, refused, whole, tmp_path
):
    out = interrupted("adapter", tmp_path / "run")
    resume = command("adapter", out, "--resume")
    good = (out / "resume.pt").read_bytes()
    with zipfile.ZipFile(out / "resume.pt") as file:
        tensor = max(file.infolist(), key=lambda info: info.file_size)
        middle = good.index(file.read(tensor)) + tensor.file_size // 2
    flipped = good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :]
    log = (out / "log.jsonl").read_text()
    for bad in (b"", b"state", good[: len(good) // 2], good[:-1], flipped):
        (out / "resume.pt").write_bytes(bad)
        refused(resume, "resume.pt is damaged", "--overwrite")
        assert (out / "resume.pt").read_bytes() == bad and (out / "log.jsonl").read_text() == log
    (out / "resume.pt").write_bytes(good)
    state = torch.load(out / "resume.pt")
    del state["format"]
    torch.save(state, out / "resume.pt")
    refused(resume, "resume.pt was written by another version")
    (out / "resume.pt").write_bytes(good)
    refused([*resume, "--lr", "0.1"], "lr = 0.005, not 0.1")
    refused(command("adapter", out), "interrupted run", "--resume")
    train.main(resume)
    assert_equal(out, whole["adapter"][0])


def test_a_finished_run_of_another_command(command, refused, whole, tmp_path, encoder, monkeypatch):
    out = shutil.copytree(whole["adapter"][0], tmp_path / "run")
    resume, before = command("adapter", out, "--resume"), content(out)
    for change in (
        *("--seed 9", "--lr 0.1", "--epochs 9", "--adapter houlsby", "--limit-train 9"),
        *(
            "--max-length 9",
            "--reduction-factor 2",
            f"--data-dir {tmp_path}",
            f"--model {tmp_path}",
        ),
    ):
        name, value = change.removeprefix("--").replace("-", "_", 1).split()
        say = f"{name} = " if name not in ("data_dir", "model") else name
        refused([*resume, *change.split()], "holds a finished run with", say)
    refused([*resume, "--stage", "head"], "holds a finished run of --stage adapter")
    monkeypatch.chdir(encoder.parent)
    train.main([*resume, "--model", encoder.name])  # the same, spelt otherwise
    assert content(out) == before


def test_a_run_that_another_process_has_finished_meanwhile(command, whole, tmp_path, monkeypatch):
    """--resume looked before it loaded, and found no end yet."""
    out, load = tmp_path / "run", Bert.from_pretrained

    def meanwhile(source):
        shutil.copytree(whole["adapter"][0], out)
        return load(source)

    with monkeypatch.context() as patch, pytest.raises(ValueError, match="finished run"):
        patch.setattr(Bert, "from_pretrained", meanwhile)
        train.main(command("adapter", out, "--resume"))
    assert_equal(out, whole["adapter"][0])
    (out / "resume.pt").write_bytes(b"killed before it was removed")
    train.main(command("adapter", out, "--resume"))
    assert_equal(out, whole["adapter"][0])


def replace_in(path, old, new):
    path.write_text(path.read_text().replace(old, new))


def reverse_words(path):
    words = path.read_text().split()
    path.write_text("\n".join(words[:5] + words[:4:-1]) + "\n")


def change_tensors(path, function):
    save_file({name: function(t) for name, t in load_file(path).items()}, path)


def test_resume_with_something_else_at_the_same_path(
    encoder, data_dir, command, refused, interrupted, tmp_path
):
    """Other texts of equal length, rows in another order, another encoder, permuted words, other
    copies of adapters. The same data elsewhere are the same."""
    data, model = tmp_path / "data", tmp_path / "model"
    shutil.copytree(data_dir, data), shutil.copytree(encoder, model)
    rows = (data / "sst2" / "validation.jsonl").read_text().splitlines(keepends=True)
    out = interrupted("fusion", tmp_path / "run", data_dir=data, model=model)
    copy = out / "adapters" / "rte"
    for place, change, say in [
        (data, lambda: replace_in(data / "sst2" / "train.jsonl", "cat", "dog"), "data_sha256"),
        (data, lambda: replace_in(data / "sst2" / "validation.jsonl", rows[0], ""), "data_sha256"),
        (model, lambda: change_tensors(model / "model.safetensors", lambda t: t + 1e-3), "encoder"),
        (model, lambda: reverse_words(model / "vocab.txt"), "data_sha256"),
        (out, lambda: change_tensors(copy / "adapter.safetensors", lambda t: t * 2), "sha256"),
        (out, lambda: replace_in(copy / "adapter_config.json", '"relu"', '"gelu"'), "sha256"),
    ]:
        shutil.copytree(place, tmp_path / "kept")
        change()
        resume = command(
            "fusion", out, "--resume --allow-other-encoder", data_dir=data, model=model
        )
        refused(resume, say)
        shutil.rmtree(place)
        (tmp_path / "kept").rename(place)
    train.main(command("fusion", out, "--resume", model=model))


def test_the_sources_of_a_fusion_may_go(command, interrupted, refused, runs, whole, tmp_path):
    """The run goes on with its own copies, also where a source has changed in the meantime."""
    sources = [shutil.copytree(runs / name, tmp_path / name) for name in ("rte", "pick")]
    out = interrupted("fusion", tmp_path / "run", adapters=sources)
    shutil.rmtree(sources[0])
    shutil.copy(runs / "rte" / "adapter.safetensors", sources[1])
    refused(command("fusion", out, "--resume"), "sources")
    train.main(command("fusion", out, "--resume", adapters=sources))
    ours, theirs = (content(run) for run in (out, whole["fusion"][0]))
    assert ours[1].pop("sources") != theirs[1].pop("sources") and ours == theirs


def test_the_second_process_in_a_directory_refuses(command, refused, whole, tmp_path):
    out, output = tmp_path / "run", tmp_path / "output"
    long = command("adapter", out, "--epochs 10000 --patience 10000")
    process = child.start(long, output)
    while not (out / "resume.pt").exists():
        assert child.wait(process, 0.01) is None
    for option in ("--resume", "--overwrite"):
        refused([*long, option], "another process is at work", str(out))
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


def test_overwrite_keeps_the_old_run_until_there_is_a_new_one(
    command, refused, at_step, interrupted, whole, tmp_path
):
    """An epoch of the new run must have been finished; its failures before that leave the old one.
    Links in it are removed, and not what they lead to; other files stay."""
    fusion, neighbour = whole["fusion"][0], tmp_path / "neighbour"
    out = shutil.copytree(fusion, tmp_path / "run")

    def exhaust():
        raise torch.OutOfMemoryError("CUDA out of memory.")

    overwrite = command("adapter", out, "--overwrite")
    refused([*overwrite, "--lr", "1e38"], "the loss is nan")
    assert_equal(out, fusion)
    at_step(1, exhaust)
    refused([*overwrite, "--save-minutes", 5], "ran out of memory")
    assert_equal(out, fusion)
    interrupted("adapter", out, "--overwrite", step=5)
    assert_equal(out / "replaced", fusion)
    train.main(command("adapter", out, "--resume"))
    assert_equal(out, whole["adapter"][0])
    shutil.copytree(fusion / "adapters", neighbour)
    (out / "adapters").symlink_to(neighbour)
    (out / "notes").write_text("mine")
    train.main(overwrite)
    (out / "notes").unlink()
    assert_equal(out, whole["adapter"][0])
    assert len(list(neighbour.rglob("*.safetensors"))) == 2


# --------------------------------------------------------------------------------------------------
# The disk


def test_damaged_metrics_beside_a_state(command, refused, interrupted, whole, tmp_path):
    """As a power cut leaves them on file systems that write names before content."""
    out = interrupted("adapter", tmp_path / "run", step=20)
    (out / "metrics.json").write_bytes(b"")
    train.main(command("adapter", out, "--resume"))
    assert_equal(out, whole["adapter"][0])
    (out / "metrics.json").write_bytes(b"")
    refused(command("adapter", out, "--resume"), "metrics.json")


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
    train.main(command("fusion", out, "--epochs 1"))
    assert order.index("config.json") < order.index("resume.pt")
    assert order[-1] == "metrics.json"


def test_a_directory_that_vanishes_under_the_run(command, refused, at_step, whole, tmp_path):
    neighbour = shutil.copytree(whole["adapter"][0], tmp_path / "neighbour")
    out = tmp_path / "run"
    for step in (1, 15, 24):
        at_step(step, lambda: shutil.rmtree(out))
        refused(command("adapter", out), str(out), "No such file or directory")
        assert not out.exists()
    assert_equal(neighbour, whole["adapter"][0])


def small_disk(directory):
    """Mounts a file system of its own on a directory, for this process alone. False where that is
    not permitted."""
    directory.mkdir()
    libc, user, group = ctypes.CDLL(None), os.getuid(), os.getgid()
    for flags in (CLONE_NEWNS, CLONE_NEWUSER | CLONE_NEWNS):
        if libc.unshare(flags) == 0:
            if flags & CLONE_NEWUSER:  # who is nobody there until told
                Path("/proc/self/setgroups").write_text("deny")
                Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
                Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
            libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None)
            return libc.mount(b"tmpfs", str(directory).encode(), b"tmpfs", 0, b"size=512k") == 0
    return False


def limit_file_size(size=resource.RLIM_INFINITY):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def on_a_full_disk(directory, result, at_the_end):
    """To be called in a child: the disk is full from the 15th step on, or when the final files are
    written; then no longer, and the run is continued, and copied to `result`."""
    mounted, train_main, state, calls = small_disk(directory), train.main, [], []
    owner, name = (train, "save") if at_the_end else (torch.nn.functional, "cross_entropy")
    function, run = getattr(owner, name), directory / "run"

    def full(*values):
        calls.append(1)
        if len(calls) == (1 if at_the_end else 15):
            state.append((run / "resume.pt").read_bytes())
            if mounted:
                ballast = open(directory / "ballast", "wb", buffering=0)
                with ballast, contextlib.suppress(OSError):
                    while True:
                        ballast.write(bytes(1024))
            else:
                limit_file_size(10_000)
        return function(*values)

    def main(arguments):
        setattr(owner, name, full)
        with contextlib.suppress(SystemExit):
            run_command("train.py", train_main, arguments)
        setattr(owner, name, function)
        assert (run / "resume.pt").read_bytes() == state[0]
        assert not [path for path in run.rglob("*") if "tmp" in path.name]
        limit_file_size()
        if mounted:
            (directory / "ballast").unlink()
        print("a file system of 512 KiB" if mounted else "no right to mount: files of 10 kB")
        line = train_main([*arguments, "--resume"])
        shutil.copytree(run, result)
        return line

    train.main = main


@pytest.mark.parametrize("stage, at_the_end", [("adapter", False), ("fusion", True)])
def test_a_full_disk(stage, at_the_end, command, whole, tmp_path):
    disk, output = tmp_path / "disk", tmp_path / "output"
    before = [(on_a_full_disk, disk, tmp_path / "result", at_the_end)]
    status, text = child.finish(child.start(command(stage, disk / "run"), output, before), output)
    assert status == 0, text
    (error,) = (line for line in text.splitlines() if line.startswith("train.py: "))
    assert str(disk / "run") in error and "continue with --resume" in error
    assert ("File too large" if "no right to mount" in text else "No space left") in error
    assert_equal(tmp_path / "result", whole[stage][0])


def on_disks_of_all_sizes(directory, result):
    """To be called in a child: writes a state, tensors and JSON where so many bytes are left, for
    many numbers, and then ends the process."""
    mounted = small_disk(directory)
    path, ballast = directory / "file", directory / "ballast"
    values, old = {"x": torch.ones(40_000)}, b"the old file"  # 160 kB

    def state(path):
        with atomic_write(path) as temporary, open(temporary, "wb") as file:
            torch.save(values, file)

    writers = [state, lambda path: write_tensors(path, values)]
    writers.append(lambda path: write_json(path, {"x": "a" * 100_000}))
    counts = {}
    for i, write in enumerate(writers):
        for left in range(0, 240_000, 4096 if mounted else 10_000):
            path.write_bytes(old)
            if mounted:
                ballast.write_bytes(bytes(500_000 - left - 8192))
            else:
                limit_file_size(left)
            try:
                write(path)
                end = "written"
            except (OSError, RuntimeError):  # the latter is PyTorch's
                end = "refused"
            assert (path.read_bytes() == old) == (end == "refused")
            counts[f"{i} {end}"] = counts.get(f"{i} {end}", 0) + 1
            limit_file_size()
            assert {*os.listdir(directory)} <= {"file", "ballast"}, os.listdir(directory)
            path.unlink(), ballast.unlink(missing_ok=True)
    result.write_text(json.dumps(counts))
    os._exit(0)


def test_full_disks_over_a_range_of_sizes(tmp_path):
    """The old file is intact or the new one is there; no temporary file is left."""
    before = [(on_disks_of_all_sizes, tmp_path / "disk", tmp_path / "result")]
    status, text = child.finish(child.start([], tmp_path / "output", before), tmp_path / "output")
    assert status == 0, text
    counts = json.loads((tmp_path / "result").read_text())
    assert len(counts) == 6 and min(counts.values()) >= 5, counts


def read_only(directory, run):
    """To be called in a child: `directory` holds a copy of `run`, and cannot be written to."""
    mounted = small_disk(directory)
    shutil.copytree(run, directory / "run")
    if mounted:
        flags, libc = MS_REMOUNT | MS_RDONLY, ctypes.CDLL(None)
        assert libc.mount(None, str(directory).encode(), None, flags, None) == 0
        return
    assert os.getuid() != 0, "root writes anywhere, and cannot mount here: try another user"
    for path in (directory / "run", directory):
        path.chmod(0o500)


@pytest.mark.parametrize("name, option", [("new", ""), ("run", "--overwrite")])
def test_a_read_only_directory(name, option, command, whole, tmp_path):
    disk, output = tmp_path / "disk", tmp_path / "output"
    before = [(read_only, disk, whole["adapter"][0])]
    process = child.start(command("adapter", disk / name, option), output, before)
    status, text = child.finish(process, output)
    (error,) = (line for line in text.splitlines() if not line.startswith("note: "))
    assert status == 2 and error.startswith("train.py: ") and str(disk / name) in error
    assert "Read-only" in error or "Permission" in error


# --------------------------------------------------------------------------------------------------
# Memory and numbers


GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
CPU = RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")


@pytest.mark.parametrize("error", [GPU, CPU])
def test_out_of_memory(error, command, refused, at_step, whole, tmp_path):
    out = tmp_path / "run"

    def exhaust():
        raise error

    at_step(1, exhaust)
    line = refused(command("adapter", out), "continue with --grad-accumulation 2", "--batch-size")
    assert re.search(r"on a batch of 8 examples, 8 x \d+ tokens", line)
    at_step(14, exhaust)  # after 12 steps, in the second batch of evaluation
    refused(command("adapter", out), "in evaluation", "with --resume and --grad-accumulation 2")
    train.main(command("adapter", out, "--resume"))
    assert_equal(out, whole["adapter"][0])


def test_a_loss_that_is_not_finite_keeps_the_best_epoch(command, refused, tmp_path, monkeypatch):
    calls, cross_entropy = [], torch.nn.functional.cross_entropy

    def explode(*values):
        calls.append(1)
        return cross_entropy(*values) * (float("inf") if len(calls) > 18 else 1)

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", explode)
    refused(command("adapter", tmp_path / "run"), "epoch 1 is kept")
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["best_epoch"] == 1


@pytest.mark.parametrize(
    "stage, task", thorough_after_first(("fusion", "sst2"), ("adapter", "pick"), ("full", "rte"))
)
def test_grad_accumulation_gives_the_same_gradients(
    stage, task, command, quiet_encoder, tmp_path, monkeypatch
):
    clip, gradients, losses = torch.nn.utils.clip_grad_norm_, [], []

    def keep(parameters, norm):
        parameters = list(parameters)
        gradients[-1].append([p.grad.clone() for p in parameters])
        return clip(parameters, norm)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", keep)
    options = {"model": quiet_encoder, "task": task, "batch_size": 11, "epochs": 1}
    for k in (1, 3, 8, 11):  # 96 examples: batches of 11, the last of 8
        gradients.append([])
        train.main(command(stage, tmp_path / str(k), grad_accumulation=k, **options))
        losses.append(content(tmp_path / str(k))[0][0]["loss"])
    first, *others = gradients
    assert len(first) == 9 and max(gradient.abs().max() for gradient in first[0]) > 0.01
    for other in others:
        for ours, theirs in zip(first[0], other[0], strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    assert losses == pytest.approx([losses[0]] * 4, abs=1e-5)


def test_the_config_says_what_a_run_was_made_with(whole, runs):
    config = json.loads((whole["fusion"][0] / "config.json").read_text())
    assert config["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert {"torch", "numpy", "tokenizers", "safetensors", "datasets"} == set(config["versions"])
    assert config["python"] == platform.python_version()
    assert config["command"].startswith("train.py ") and "--save-minutes 0" in config["command"]
    found = [config[name] for name in ("device", "dtype", "threads", "processes")]
    assert found == ["cpu", "float32", 1, 1]
    for name in ("rte", "pick"):  # copied bit by bit, so the hash is also that of the source
        digest = hashlib.sha256((runs / name / "adapter.safetensors").read_bytes()).hexdigest()
        assert config["adapter_sha256"][name] == digest


def test_the_commit(command, tmp_path, monkeypatch):
    """That of this repository, whatever repository the environment names."""
    words = "git --no-optional-locks describe --always --dirty --abbrev=40 --exclude=*".split()
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    head = done.stdout.strip() if (ROOT / ".git").exists() else None
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    train.main(command("adapter", tmp_path / "run", "--epochs 1 --limit-train 8"))
    assert json.loads((tmp_path / "run" / "config.json").read_text())["commit"] == head


# --------------------------------------------------------------------------------------------------
# --compile


def test_compile_without_a_compiler(command, refused, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    refused(command("adapter", tmp_path / "run", "--compile"), "--compile needs a C++ compiler")
    assert not (tmp_path / "run").exists()


@thorough
def test_a_compiler_that_fails(command, tmp_path):
    """Or what it has left in PyTorch's cache. A process of its own: PyTorch reads CXX once."""
    environment = {"CXX": "false", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    words = [sys.executable, ROOT / "train.py", *command("adapter", tmp_path / "run", "--compile")]
    environment = {**os.environ, **environment}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    for text in ("--compile failed (InvalidCxxCompiler: ", "without it", str(tmp_path / "cache")):
        assert text in done.stderr


def test_a_compiler_that_a_signal_has_ended(command, at_step, tmp_path):
    """Ctrl-C in a terminal ends the C++ compiler, too: then it is not this that has failed."""
    from torch._dynamo.exc import BackendCompilerFailed

    def stop():
        os.kill(os.getpid(), signal.SIGINT)
        raise BackendCompilerFailed(print, RuntimeError("C++ compile error"), None)

    at_step(1, stop)
    with pytest.raises(KeyboardInterrupt, match="^interrupted$"):
        train.main(command("adapter", tmp_path / "run"))


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
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    options = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    words = [sys.executable, "-c", code]
    process = subprocess.Popen(words, cwd=ROOT, env=environment, **options)
    assert process.stdout.readline() == "here\n"
    os.killpg(process.pid, signal.SIGTERM)
    try:
        assert process.communicate(timeout=30)[0] == "heard\ndone\n"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@compiles
@pytest.mark.parametrize("stage", train.STAGES)
def test_compile(stage, command, quiet_encoder, tmp_path):
    logs = []
    for option in ("", "--compile"):
        out, output = tmp_path / f"run{option}", tmp_path / "output"
        process = child.start(command(stage, out, option, model=quiet_encoder), output)
        status, text = child.finish(process, output, timeout=300)
        assert status == 0, text
        logs.append(content(out)[0])
    for plain, compiled in zip(*logs, strict=True):
        assert compiled["loss"] == pytest.approx(plain["loss"], abs=1e-5)
        assert compiled["dev_accuracy"] == plain["dev_accuracy"]
