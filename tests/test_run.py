"""A run is never lost: killed at any moment, on a full or vanished disk, out of memory, twice at
once."""

import contextlib
import ctypes
import json
import os
import platform
import random
import re
import resource
import shutil
import signal
import subprocess
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import test_processes
import torch
from safetensors.torch import load_file, save_file

import child
import train
from bert import Bert
from conftest import assert_equal, cli, compiles, content, of_stage, thorough_after_first
from experiments import evaluate
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
    state["format"] = 0
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
        *("--max-length 9", "--reduction-factor 2"),
    ):
        name, value = change.removeprefix("--").replace("-", "_", 1).split()
        refused([*resume, *change.split()], "holds a finished run with", f"{name} = ")
    refused([*resume, "--stage", "head"], "holds a finished run with stage = adapter")
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
        (model, lambda: reverse_words(model / "vocab.txt"), "tokenizer_sha256"),
        (
            out,
            lambda: change_tensors(copy / "adapter.safetensors", lambda t: t * 2),
            "adapter_digests",
        ),
        (
            out,
            lambda: replace_in(copy / "adapter_config.json", '"relu"', '"gelu"'),
            "adapter_digests",
        ),
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
ONEDNN = RuntimeError("could not create a primitive")


@pytest.mark.parametrize("error", [GPU, CPU, ONEDNN])
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
    assert len(first) == 9 and max(gradient.abs().max() for gradient in first[0]) > 0.001
    for other in others:
        for ours, theirs in zip(first[0], other[0], strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    assert losses == pytest.approx([losses[0]] * 4, abs=1e-5)


def test_the_config_says_what_a_run_was_made_with(whole):
    config = json.loads((whole["fusion"][0] / "config.json").read_text())
    assert config["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert {"torch", "numpy", "tokenizers", "safetensors", "datasets"} == set(config["versions"])
    assert config["python"] == platform.python_version()
    assert config["command"].startswith("train.py ") and "--save-minutes 0" in config["command"]
    found = [config[name] for name in ("device", "dtype", "threads", "processes")]
    assert found == ["cpu", "float32", 1, 1]
    assert [*config["adapter_digests"]] == [*config["adapter_encoders"]] == config["adapters"]


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


# --------------------------------------------------------------------------------------------------
# Which run is this? A finished run, an unfinished one and --seeds give the same answer

OPTIONS = "--max-length 9|--score f1|--dtype bfloat16|--patience 9|--weight-decay 0.1|--limit-dev 9"


@pytest.fixture(scope="module")
def places(encoder, data_dir, runs, tmp_path_factory):
    """Copies of the encoder, the data and two adapters, to be changed and put back."""
    out = tmp_path_factory.mktemp("places")
    for name, source in (("model", encoder), ("data", data_dir), ("runs", runs)):
        shutil.copytree(source, out / name)
    return out


@pytest.fixture(scope="module")
def both(command, places, tmp_path_factory):
    """(a finished fusion, one that was stopped in its second epoch, the words of either)"""
    out = tmp_path_factory.mktemp("both")
    options = {"model": places / "model", "data_dir": places / "data"}
    options["adapters"] = [places / "runs" / name for name in ("rte", "pick")]

    def words(out, text=""):
        return command("fusion", out, f"--allow-other-encoder {text}", **options)

    train.main(words(out / "finished"))
    before = [(test_processes.at_step, 15, test_processes.stop, signal.SIGTERM)]
    process = child.start(words(out / "cut"), out / "output", before)
    assert child.finish(process, out / "output")[0] == 130
    return out / "finished", out / "cut", words


def answers(both, tmp_path, text=""):
    """What --resume of a copy of either says: "" where it goes on, or has nothing to do."""
    for run in both[:2]:
        out = shutil.copytree(run, tmp_path / run.name)
        try:
            train.main(both[2](out, f"--resume {text}"))
            yield ""
        except (ValueError, OSError) as e:
            yield str(e)


@pytest.mark.parametrize("option", OPTIONS.split("|"))
def test_another_option_is_free_or_refused_but_the_same_for_both(option, both, tmp_path):
    said = list(answers(both, tmp_path, option))
    name = option.split()[0].removeprefix("--").replace("-", "_")
    assert said == ["", ""] or all(name in text for text in said), said


def swap_labels(path):
    text = path.read_text().replace('"label": 1', '"label": 2').replace('"label": 0', '"label": 1')
    path.write_text(text.replace('"label": 2', '"label": 0'))


OTHER_FILES = [  # (what changes, how, what the finished run's message says)
    ("data/sst2/train.jsonl", swap_labels, "data_files"),
    ("data/sst2/validation.jsonl", swap_labels, "data_files"),
    ("data/sst2/train.jsonl", Path.unlink, "sst2"),
    ("model/model.safetensors", lambda p: change_tensors(p, lambda t: t + 1e-3), "encoder"),
    ("model/vocab.txt", reverse_words, "sha256"),
    ("runs/rte/adapter.safetensors", lambda p: change_tensors(p, lambda t: t * 2), "rte"),
]


@pytest.mark.parametrize("place, change, say", OTHER_FILES)
def test_other_files_at_the_same_path_are_another_command(
    place, change, say, both, places, tmp_path
):
    """Also for a finished run. One that goes on does so with its own copies of the adapters."""
    path = places / place
    before = path.read_bytes()
    change(path)
    finished, cut = answers(both, tmp_path)
    path.write_bytes(before)
    assert say in finished
    assert cut == "" if place.startswith("runs") else cut != ""


def test_nothing_else_is_another_command(both, tmp_path):
    assert list(answers(both, tmp_path)) == ["", ""]


def test_seeds_are_of_one_command(command, refused, encoder, data_dir, tmp_path):
    """A seed's finished run is read by --resume only where it is one of this command and data."""
    out, data = tmp_path / "out", shutil.copytree(data_dir, tmp_path / "data")
    words = command("head", out, "--epochs 1 --resume", data_dir=data)
    train.main([*words, "--seeds", "0"])
    for option in ("--max-length 9", "--score f1"):
        refused([*words, *option.split(), "--seeds", "0", "1"], option.split()[0][2:5])
    swap_labels(data / "sst2" / "train.jsonl")
    refused([*words, "--seeds", "0", "1"], "data_files")


# --------------------------------------------------------------------------------------------------
# Nothing is lost that nobody asked to lose


@pytest.mark.parametrize("stage", ["full", "multitask", "adapter", "fusion"])
def test_weights_are_never_cleared_unasked(stage, command, refused, tmp_path):
    """A copy of a run without metrics.json is no run that is finished, but it holds weights."""
    out = tmp_path / "run"
    train.main(command(stage, out, "--epochs 1"))
    (out / "metrics.json").unlink()
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for option in ("", "--resume", "--seeds 0 1"):
        refused(command("head", out, option), "--o")
        refused(command(stage, out, option), "--o")
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_hard_linked_log_keeps_its_lines(command, interrupted, whole, tmp_path):
    """As backups of unchanged files are made."""
    out = shutil.copytree(whole["adapter"][0], tmp_path / "run")
    os.link(out / "log.jsonl", tmp_path / "first")
    first = (tmp_path / "first").read_text()
    interrupted("adapter", out, "--overwrite")
    os.link(out / "log.jsonl", tmp_path / "second")
    second = (tmp_path / "second").read_text()
    train.main(command("adapter", out, "--resume"))
    assert (tmp_path / "first").read_text() == first and first.count("\n") == 2
    assert (tmp_path / "second").read_text() == second and second.count("\n") == 1
    assert_equal(out, whole["adapter"][0])


def test_the_seeds_of_a_stranger_stay(command, refused, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "seeds.json").write_text("mine")
    refused(command("head", out, "--epochs 1 --seeds 0 1"), "seeds.json")
    assert (out / "seeds.json").read_text() == "mine"
    train.main(command("head", out, "--epochs 1 --seeds 0 1 --overwrite"))
    assert json.loads((out / "seeds.json").read_text())["seeds"] == [0, 1]
    refused(command("head", out, "--epochs 1 --seeds 0"), "--overwrite")


def test_a_run_that_was_set_aside_is_mentioned(command, refused, interrupted, whole, tmp_path):
    """Where the run that replaces it was interrupted."""
    out = shutil.copytree(whole["fusion"][0], tmp_path / "run")
    interrupted("adapter", out, "--overwrite", step=5)
    for name, main, words in [
        ("evaluate.py", evaluate.main, [out, "--device", "cpu"]),
        ("train.py", train.main, command("fusion", tmp_path / "new", adapters=[out])),
    ]:
        refused(words, str(out / "replaced"), name=name, main=main)
