"""A run is never lost: killed at any moment, on a full disk, out of memory, twice at once."""

import contextlib
import resource
import shutil
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

import child
import train
from conftest import assert_equal, content, main, thorough_after_first

every_stage = pytest.mark.parametrize("stage", train.STAGES)


@pytest.fixture(scope="module")
def command(commands, encoder):
    """Two epochs of twelve steps, with several tasks of eight, saved after every one of them."""
    words = "--device cpu --epochs 2 --batch-size 8 --lr 5e-3"
    return commands(words, 8, model=encoder)


def ends(words, *before):
    """(exit status, stdout, stderr) of a run in another process. before: calls ahead of it"""
    return child.Program(child.training(words), before).finish()


@pytest.fixture(scope="module")
def whole(command, tmp_path_factory):
    """whole(stage): the directory of a run that nobody has disturbed"""
    place = tmp_path_factory.mktemp("whole")

    def whole(stage):
        if not (place / stage).exists():
            main(command(stage, place / stage))
        return place / stage

    return whole


@pytest.fixture
def interrupted(command, at_step):
    """interrupted(stage, out): a run that was stopped in its second epoch"""

    def interrupted(stage, out, **options):
        at_step(15, child.stop)
        with pytest.raises(KeyboardInterrupt):
            main(command(stage, out, **options))

    return interrupted


@every_stage
def test_interrupted_and_resumed_is_the_same(stage, command, interrupted, whole, tmp_path):
    interrupted(stage, tmp_path / "run")
    main(command(stage, tmp_path / "run", "--resume"))
    assert_equal(tmp_path / "run", whole(stage))


STAGES = thorough_after_first("fusion", *(stage for stage in train.STAGES if stage != "fusion"))


@pytest.mark.parametrize("stage", STAGES)
def test_killed_before_any_file_operation(stage, command, whole, tmp_path):
    """The process dies ahead of an opening, renaming or removing of a file in --out: the first one,
    some between, and the last ones."""
    out = tmp_path / "whole"
    status, said, error = ends(command(stage, out), (child.die_at, 0, out))
    assert status == 0, error
    assert_equal(out, whole(stage))  # two runs of one command are equal
    count = int(said.split()[-3])
    for moment in (1, count // 3, 2 * count // 3, count - 3, count - 2, count - 1, count):
        out = tmp_path / str(moment)
        assert ends(command(stage, out), (child.die_at, moment, out))[0] == -signal.SIGKILL
        status, _, error = ends(command(stage, out, "--resume"))
        assert status == 0, (moment, error)
        assert_equal(out, whole(stage))


def test_the_second_process_in_a_directory_refuses(command, refused, whole, tmp_path):
    out = tmp_path / "run"
    long = command("adapter", out, "--epochs 10000 --patience 10000")
    process = child.Program(["train.py", *long])
    while not (out / "resume.pt").exists():
        assert process.poll(0.01) is None
    for option in ("--resume", "--overwrite"):
        refused([*long, option], "another process is at work", str(out))
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    refused(command("adapter", out), "holds a run", "--resume")
    main(command("adapter", out, "--overwrite"))
    assert_equal(out, whole("adapter"))


def test_overwrite(command, whole, tmp_path):
    """Also after a kill while it cleared the old run. Links in that are removed, and not what
    they lead to; other files stay."""
    out, neighbour = shutil.copytree(whole("fusion"), tmp_path / "run"), tmp_path / "neighbour"
    words = command("adapter", out, "--overwrite")
    assert ends(words, (child.die_at, 5, out))[0] == -signal.SIGKILL
    shutil.copytree(whole("fusion") / "adapters", neighbour)
    shutil.rmtree(out / "adapters", ignore_errors=True)
    (out / "adapters").symlink_to(neighbour)
    (out / "notes").write_text("mine")
    main(words)
    (out / "notes").unlink()
    assert_equal(out, whole("adapter"))
    assert len(list(neighbour.rglob("*.safetensors"))) == 2


@every_stage
def test_weights_are_never_cleared_unasked(stage, command, refused, whole, tmp_path):
    """A copy of a run without metrics.json is no run that is finished, but it holds weights."""
    out = shutil.copytree(whole(stage), tmp_path / "run")
    (out / "metrics.json").unlink()
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for option in ("", "--resume"):
        refused(command("head", out, option), "--o")
        refused(command(stage, out, option), "--o")
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("step", [7, 28])
def test_a_full_disk(step, command, refused, at_step, whole, tmp_path):
    """In training, and in the last batch of the last evaluation: from there on a file takes no more
    bytes. --resume of the run that was continued has nothing to do."""
    out, limit = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)
    at_step(step, resource.setrlimit, resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        refused(command("fusion", out))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    for _ in range(2):
        main(command("fusion", out, "--resume"))
        assert_equal(out, whole("fusion"))


GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
CPU = RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")


def test_out_of_memory(command, refused, at_step, whole, tmp_path):
    out = tmp_path / "run"
    cure = "continue with --grad-accumulation 2"
    for error in (GPU, CPU):
        at_step(1, Mock(side_effect=error))
        refused(command("adapter", out), "ran out of memory", cure, "smaller --batch-size")
    at_step(14, Mock(side_effect=GPU))  # after 12 steps, in the second batch of evaluation
    refused(command("adapter", out), "continue with --resume and --grad-accumulation 2")
    main(command("adapter", out, "--resume"))
    assert_equal(out, whole("adapter"))


GRADIENTS = [(stage, "sst2") for stage in train.STAGES if stage != "multitask"]


@pytest.mark.parametrize("stage, task", [*GRADIENTS, ("adapter", "pick")])
def test_grad_accumulation(stage, task, command, quiet_encoder, tmp_path, monkeypatch):
    """However many parts a batch has, the gradients are the same."""
    clip, found = torch.nn.utils.clip_grad_norm_, {}

    def keep(parameters, norm):
        parameters = list(parameters)
        found.setdefault(k, [p.grad.clone() for p in parameters])  # of the first step
        return clip(parameters, norm)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", keep)
    options = {"model": quiet_encoder, "task": task, "batch_size": 11, "epochs": 1}
    for k in (1, 3):  # 96 examples: batches of 11, the last of 8
        main(command(stage, tmp_path / str(k), grad_accumulation=k, **options))
    (line,), (first,) = (content(tmp_path / str(k))[0] for k in (3, 1))
    assert line["loss"] == pytest.approx(first["loss"], abs=1e-5)
    for ours, theirs in zip(found[3], found[1], strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    assert max(gradient.abs().max() for gradient in found[1]) > 0.001


# Which run is this? A finished run and one that was stopped give the same answer


@pytest.fixture(scope="module")
def both(command, encoder, data_dir, runs, tmp_path_factory):
    """(a directory with a run that is `finished` and one that was `cut` in its second epoch, beside
    the `model`, `data` and `runs` that they need; a copy of it; the words of either run)"""
    place, backup = (tmp_path_factory.mktemp("both") / name for name in ("place", "backup"))
    for name, source in (("model", encoder), ("data", data_dir), ("runs", runs)):
        shutil.copytree(source, place / name)

    def words(out, text=""):
        given = {"model": "model", "data_dir": "data", "adapters": ["runs/rte", "runs/pick"]}
        return [*command("fusion", out, **given), *text.split()]

    with contextlib.chdir(place), pytest.MonkeyPatch.context() as patch:
        main(words("finished"))
        child.at_step(15, child.stop, put=patch.setattr)
        with pytest.raises(KeyboardInterrupt):
            main(words("cut"))
    shutil.copytree(place, backup)
    return place, backup, words


def replaced(old, new):
    return lambda path: path.write_text(path.read_text().replace(old, new, 1))


def double(path):
    save_file({name: 2 * tensor for name, tensor in load_file(path).items()}, path)


def move(path):
    path.rename(path.with_name("elsewhere"))


DATA, ENCODER, ADAPTER = "data/sst2/train.jsonl", "model/model.safetensors", "adapter.safetensors"
other_label = replaced('"label": 1', '"label": 0')
OTHER_ENCODER = "was trained on an encoder with other weights"
# (options, what changes, how, a word of what the finished run says and the other one; "": nothing)
COMMANDS = [
    ("--grad-accumulation 2", "", None, ""),
    ("--data-dir data --model ./model", "", None, ""),  # spelt otherwise
    ("--max-length 9", "", None, "max_length = 48, not 9"),
    ("--score f1", "", None, "score = accuracy, not f1"),
    ("--seed 9", "", None, "seed = 0, not 9"),
    ("", DATA, other_label, "training examples of sst2"),
    ("", DATA.replace("train", "validation"), other_label, "development examples of sst2"),
    ("", ENCODER, double, OTHER_ENCODER),
    ("", "model/vocab.txt", replaced("red\ngreen", "green\nred"), "tokenizer"),
    # a run goes on with its own copies of the adapters
    ("", f"runs/rte/{ADAPTER}", double, ""),
    ("", "runs/rte", move, ""),
    ("--adapters runs/rte", "", None, "was begun with --adapters rte, pick"),
    ("--adapters runs/rte runs/pick runs/sst2", "", None, "was begun with --adapters rte, pick"),
    ("", f"RUN/adapters/rte/{ADAPTER}", double, "adapter rte"),
]


@pytest.mark.parametrize("text, place, change, wanted", COMMANDS)
def test_resume_knows_another_command(text, place, change, wanted, both, monkeypatch):
    """With another option, or with other files at the same path."""
    here, backup, words = both
    for name in ("finished", "cut"):
        shutil.rmtree(here)
        monkeypatch.chdir(shutil.copytree(backup, here))
        if change:
            change(Path(place.replace("RUN", name)))
        said = ""
        try:
            main(words(name, f"--resume {text}"))
        except ValueError as e:
            said = str(e)
        assert wanted in said and (said == "") == (wanted == "")
