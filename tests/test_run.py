"""A run is never lost: killed at any moment, on a full or vanished disk, out of memory, twice at
once."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import zipfile
from importlib.metadata import version
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

import child
from conftest import assert_equal, cli, content, main, of_stage, thorough_after_first

KILLS = 6  # of each stage
STOPPED = child.at_step, 15, child.stop  # in the second epoch


@pytest.fixture(scope="module")
def command(encoder, data_dir, runs):
    """command("fusion", out, "--resume"): words of two epochs of twelve steps, with several tasks
    of eight, saved after every one of them."""
    common = cli("--device cpu --epochs 2 --batch-size 8 --lr 5e-3 --save-minutes 0")
    common += cli(model=encoder, data_dir=data_dir)

    def command(stage, out, text="", **options):
        return [*common, *of_stage(stage, runs, 8), *cli(text, out=out, **options)]

    return command


def ends(words, *before, **options):
    """(exit status, stdout, stderr) of a run in another process. before: calls ahead of it"""
    return child.Program(child.training(words), before).finish(**options)


@pytest.fixture(scope="module")
def whole(command, tmp_path_factory):
    """{stage: a run that nobody has disturbed}; beside it STAGE.output tells the number of its file
    operations"""
    out, stages = tmp_path_factory.mktemp("whole"), ("fusion", "adapter", "multitask")
    for stage in stages:
        status, said, error = ends(command(stage, out / stage), (child.die_at, 0, out / stage))
        assert status == 0, error
        (out / f"{stage}.output").write_text(said)
    return {stage: out / stage for stage in stages}


# --------------------------------------------------------------------------------------------------
# Killed


@pytest.mark.parametrize("stage", thorough_after_first("fusion", "adapter", "multitask"))
def test_killed_before_any_file_operation(stage, command, whole, tmp_path):
    """The process dies ahead of its n-th opening, renaming or removing of a file in --out; the last
    ones in any case."""
    count = int(whole[stage].with_suffix(".output").read_text().split()[-3])
    last = range(count - 3, count + 1)
    others = random.Random(0).sample(range(1, count + 1), min(KILLS - 4, count))
    for moment in {*last, *others}:
        out = tmp_path / str(moment)
        assert ends(command(stage, out), (child.die_at, moment, out))[0] == -signal.SIGKILL
        status, _, error = ends(command(stage, out, "--resume"))
        assert status == 0, (moment, error)
        assert_equal(out, whole[stage])


def test_two_runs_of_one_command_are_equal(command, whole, tmp_path):
    main(command("fusion", tmp_path / "again"))
    assert_equal(tmp_path / "again", whole["fusion"])


# --------------------------------------------------------------------------------------------------
# --resume and --overwrite


def test_a_state_that_is_torn_or_old(command, refused, whole, tmp_path):
    """Or of another command, or beside a metrics.json that is empty, as a power cut leaves it. A
    hard link to the log, as backups of unchanged files are made, keeps its lines."""
    out, backup = tmp_path / "run", tmp_path / "backup"
    assert ends(command("adapter", out), STOPPED)[0] == 130
    os.link(out / "log.jsonl", backup)
    resume, path = command("adapter", out, "--resume"), out / "resume.pt"
    good, log = path.read_bytes(), backup.read_text()
    with zipfile.ZipFile(path) as file:
        tensor = max(file.infolist(), key=lambda info: info.file_size)
        middle = good.index(file.read(tensor)) + tensor.file_size // 2
    flipped = good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :]
    for bad in (b"", good[: len(good) // 2], good[:-1], flipped):
        path.write_bytes(bad)
        refused(resume, "resume.pt is damaged", "--overwrite")
        assert path.read_bytes() == bad and (out / "log.jsonl").read_text() == log
    path.write_bytes(good)
    torch.save({**torch.load(path), "format": 0}, path)
    refused(resume, "resume.pt was written by another version")
    path.write_bytes(good)
    refused(command("adapter", out), "interrupted run", "--resume")
    (out / "metrics.json").touch()
    main(resume)
    assert_equal(out, whole["adapter"])
    assert backup.read_text() == log
    (out / "metrics.json").write_bytes(b"")
    refused(resume, "metrics.json")


def test_the_sources_of_a_fusion_may_go(command, refused, runs, whole, tmp_path):
    """The run goes on with its own copies, also where a source has changed in the meantime."""
    sources = [shutil.copytree(runs / name, tmp_path / name) for name in ("rte", "pick")]
    out = tmp_path / "run"
    assert ends(command("fusion", out, adapters=sources), STOPPED)[0] == 130
    shutil.rmtree(sources[0])
    shutil.copy(runs / "rte" / "adapter.safetensors", sources[1])
    refused(command("fusion", out, "--resume"), "sources")
    main(command("fusion", out, "--resume", adapters=sources))
    ours, theirs = (content(run) for run in (out, whole["fusion"]))
    assert ours[1].pop("sources") != theirs[1].pop("sources") and ours == theirs


def test_the_second_process_in_a_directory_refuses(command, refused, whole, tmp_path):
    out = tmp_path / "run"
    long = command("adapter", out, "--epochs 10000 --patience 10000")
    process = child.Program(["train.py", *long])
    while not (out / "resume.pt").exists():
        assert process.poll(0.01) is None
    for option in ("--resume", "--overwrite"):
        refused([*long, option], "another process is at work", str(out))
    process.kill()
    assert process.wait() == -signal.SIGKILL
    main(command("adapter", out, "--overwrite"))
    assert_equal(out, whole["adapter"])


def test_overwrite(command, whole, tmp_path):
    """Also if it is killed while it clears the old run. Links in that are removed, and not what
    they lead to; other files stay."""
    out, neighbour = shutil.copytree(whole["fusion"], tmp_path / "run"), tmp_path / "neighbour"
    words = command("adapter", out, "--overwrite")
    for moment in (2, 3, 5, 8):
        assert ends(words, (child.die_at, moment, out))[0] == -signal.SIGKILL
    shutil.copytree(whole["fusion"] / "adapters", neighbour)
    shutil.rmtree(out / "adapters", ignore_errors=True)
    (out / "adapters").symlink_to(neighbour)
    (out / "notes").write_text("mine")
    main(words)
    (out / "notes").unlink()
    assert_equal(out, whole["adapter"])
    assert len(list(neighbour.rglob("*.safetensors"))) == 2


@pytest.mark.parametrize("stage", ["multitask", "adapter", "fusion"])
def test_weights_are_never_cleared_unasked(stage, command, refused, whole, tmp_path):
    """A copy of a run without metrics.json is no run that is finished, but it holds weights."""
    out = shutil.copytree(whole[stage], tmp_path / "run")
    (out / "metrics.json").unlink()
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for option in ("", "--resume", "--seeds 0 1"):
        refused(command("head", out, option), "--o")
        refused(command(stage, out, option), "--o")
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


# --------------------------------------------------------------------------------------------------
# The disk


def test_what_a_state_depends_on_is_flushed_before_it(command, tmp_path, monkeypatch):
    """No file takes another's name before its content is on the disk, and the state is written
    after config.json and the adapters' copies are."""
    out, flushed, sync, replace = tmp_path / "run", set(), os.fsync, Path.replace

    def fsync(descriptor):
        flushed.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def rename(path, target):
        if out in path.parents:  # not the cache of `datasets`
            assert path.stat().st_ino in flushed, path
        if Path(target).name == "resume.pt":
            needed = [out / "config.json", *out.glob("adapters/*/*")]
            assert len(needed) == 5 and all(file.stat().st_ino in flushed for file in needed)
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", rename)
    main(command("fusion", out, "--epochs 1"))


def test_a_directory_that_vanishes_under_the_run(command, refused, at_step, tmp_path):
    out = tmp_path / "run"
    for step in (1, 13, 28):  # in training, in evaluation, before the last files
        at_step(step, shutil.rmtree, out)
        refused(command("adapter", out), str(out), "No such file or directory")
        assert not out.exists()


@pytest.mark.parametrize("stage, step", [("adapter", 7), ("fusion", 28)])
def test_a_full_disk(stage, step, command, refused, at_step, whole, tmp_path):
    """In training, and in the last batch of the last evaluation: from there on a file takes no more
    bytes. --resume of the run that was continued has nothing to do."""
    out, limit = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)
    at_step(step, resource.setrlimit, resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        line = refused(command(stage, out), str(out), "cannot be written")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "File too large" in line and "its last state is intact, continue with --resume" in line
    for _ in range(2):
        main(command(stage, out, "--resume"))
        assert_equal(out, whole[stage])


def test_a_read_only_directory(command, refused):
    """Linux lets nobody, not even root, make a directory in /sys."""
    refused(command("adapter", "/sys/run"), "stopped, /sys/run cannot be written")


# --------------------------------------------------------------------------------------------------
# Memory, numbers


GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
CPU = RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")
ONEDNN = RuntimeError("could not create a primitive")


def test_out_of_memory(command, refused, at_step, whole, tmp_path):
    out = tmp_path / "run"
    cure = "continue with --grad-accumulation 2"
    for error in (GPU, CPU, ONEDNN):
        at_step(1, Mock(side_effect=error))
        refused(command("adapter", out), "on 8 examples", cure, "smaller --batch-size")
    at_step(14, Mock(side_effect=GPU))  # after 12 steps, in the second batch of evaluation
    refused(command("adapter", out), "in evaluation", "with --resume and --grad-accumulation 2")
    main(command("adapter", out, "--resume"))
    assert_equal(out, whole["adapter"])


@pytest.mark.parametrize(
    "stage, task", thorough_after_first(("fusion", "sst2"), ("adapter", "pick"), ("full", "rte"))
)
def test_grad_accumulation(stage, task, command, quiet_encoder, tmp_path, monkeypatch):
    """However many parts a batch has, the gradients are the same."""
    clip, found = torch.nn.utils.clip_grad_norm_, {}

    def keep(parameters, norm):
        parameters = list(parameters)
        found.setdefault(k, [p.grad.clone() for p in parameters])  # of the first step
        return clip(parameters, norm)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", keep)
    options = {"model": quiet_encoder, "task": task, "batch_size": 11, "epochs": 1}
    for k in (1, 3, 8, 11):  # 96 examples: batches of 11, the last of 8
        main(command(stage, tmp_path / str(k), grad_accumulation=k, **options))
        (line,), (first,) = (content(tmp_path / str(run))[0] for run in (k, 1))
        assert line["loss"] == pytest.approx(first["loss"], abs=1e-5)
        for ours, theirs in zip(found[k], found[1], strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    assert max(gradient.abs().max() for gradient in found[1]) > 0.001


def test_the_config_says_what_a_run_was_made_with(whole):
    config = json.loads((whole["fusion"] / "config.json").read_text())
    assert config["versions"]["torch"] == version("torch")
    assert "--save-minutes 0" in config["command"]
    found = [config[name] for name in ("device", "dtype", "threads", "processes")]
    assert found == ["cpu", "float32", 1, 1]
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=child.ROOT, capture_output=True, text=True
    )
    head = done.stdout.strip() if (child.ROOT / ".git").exists() else "None"
    assert str(config["commit"]).removesuffix("-dirty") == head


# --------------------------------------------------------------------------------------------------
# Which run is this? A finished run, one that was stopped, and --seeds give the same answer


@pytest.fixture(scope="module")
def both(command, encoder, data_dir, runs, tmp_path_factory):
    """(a directory with a run that is `finished` and one that was `cut` in its second epoch, beside
    the `model`, `data` and `runs` that they need; the words of either)"""
    place = tmp_path_factory.mktemp("both")
    for name, source in (("model", encoder), ("data", data_dir), ("runs", runs)):
        shutil.copytree(source, place / name)
    options = {"model": place / "model", "data_dir": place / "data"}
    options["adapters"] = [place / "runs" / name for name in ("rte", "pick")]

    def words(out, text=""):
        return [*command("fusion", out, "--allow-other-encoder", **options), *text.split()]

    main(words(place / "finished"))
    assert ends(words(place / "cut"), STOPPED)[0] == 130
    return place, words


def answers(both, tmp_path, text=""):
    """What --resume of a copy of either says: "" where it goes on, or has nothing to do."""
    place, words = both
    for name in ("finished", "cut"):
        out = shutil.copytree(place / name, tmp_path / name)
        try:
            main(words(out, f"--resume {text}"))
            yield ""
        except (ValueError, OSError) as e:
            yield str(e)


@pytest.mark.parametrize("option", "--max-length 9|--score f1|--seed 9|--limit-dev 9".split("|"))
def test_another_option_is_another_command(option, both, tmp_path):
    name = option.split()[0].removeprefix("--").replace("-", "_")
    assert all(f"with {name} = " in text for text in answers(both, tmp_path, option))


def test_what_is_the_same_command(both, data_dir, tmp_path, monkeypatch):
    """The data may lie elsewhere, a path may be spelt otherwise."""
    monkeypatch.chdir(both[0])
    words = f"--data-dir {data_dir} --model model --grad-accumulation 2 --save-minutes 5"
    assert list(answers(both, tmp_path, words)) == ["", ""]


def replaced(old, new):
    return lambda path: path.write_text(path.read_text().replace(old, new, 1))


def double(path):
    save_file({name: 2 * tensor for name, tensor in load_file(path).items()}, path)


other_label = replaced('"label": 1', '"label": 0')
OTHER_FILES = [  # (what changes, how, what the finished run says, what the other one says)
    ("data/sst2/train.jsonl", other_label, "data_files", "data_sha256"),
    ("data/sst2/validation.jsonl", other_label, "data_files", "data_sha256"),
    ("model/model.safetensors", double, "encoder_sha256", "encoder_sha256"),
    ("model/vocab.txt", replaced("red\ngreen", "green\nred"), "tokenizer", "tokenizer_sha256"),
    # a run that goes on does so with its own copies of the adapters
    ("runs/rte/adapter.safetensors", double, "adapter_digests", ""),
    ("cut/adapters/rte/adapter.safetensors", double, "", "adapter_digests"),
    ("cut/adapters/rte/adapter_config.json", replaced("relu", "gelu"), "", "adapter_digests"),
]


@pytest.mark.parametrize("place, change, finished, cut", OTHER_FILES)
def test_other_files_are_another_command(place, change, finished, cut, both, tmp_path):
    """At the same path."""
    path = both[0] / place
    before = path.read_bytes()
    change(path)
    said = list(answers(both, tmp_path))
    path.write_bytes(before)
    for text, wanted in zip(said, (finished, cut), strict=True):
        assert wanted in text and (text == "") == (wanted == "")


def test_seeds_are_of_one_command(command, refused, data_dir, tmp_path):
    """A stranger's seeds.json stays, and --resume reads a seed's finished run only where it is one
    of this command and data."""
    out, data = tmp_path / "out", shutil.copytree(data_dir, tmp_path / "data")
    words = command("head", out, "--epochs 1 --seeds 0 1", data_dir=data)
    out.mkdir()
    (out / "seeds.json").write_text("mine")
    refused(words, "seeds.json")
    assert (out / "seeds.json").read_text() == "mine"
    main([*words, "--overwrite"])
    assert json.loads((out / "seeds.json").read_text())["seeds"] == [0, 1]
    refused(words, "--overwrite")
    other_label(data / "sst2" / "train.jsonl")
    refused([*words, "--resume"], "data_files")
