"""Commands as processes of their own: closed and broken outputs, signals, a hub that is silent."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import child
from conftest import cli, read_lines, thorough_after_first

ROOT = Path(__file__).parent.parent


def finish(words, **environment):
    options = {"cwd": ROOT, "env": {**os.environ, **environment}}
    return subprocess.run(words, capture_output=True, text=True, timeout=60, **options)


@pytest.fixture
def train(encoder, data_dir, tmp_path):
    """The words of a short run in tmp_path/run."""
    places = {"model": encoder, "data_dir": data_dir, "out": tmp_path / "run"}
    text = "--stage head --task sst2 --epochs 4 --patience 4 --device cpu"
    return [sys.executable, ROOT / "train.py", *cli(text, **places)]


@pytest.mark.parametrize(
    "closed", [*thorough_after_first("| head -1", "<&-", "> /dev/full"), ">&- 2>&-"]
)
def test_closed_streams(closed, train, tmp_path):
    """The run is finished, without a word, and no file of it becomes stdout or stderr."""
    process = finish(["sh", "-c", f'"$@" {closed}', "sh", *train])
    assert (process.returncode, process.stderr) == (0, ""), process.stderr
    log = read_lines(tmp_path / "run" / "log.jsonl")
    assert [line["epoch"] for line in log] == [1, 2, 3, 4]
    assert (tmp_path / "run" / "metrics.json").exists()


def test_letters_and_controls(tmp_path):
    """An ASCII terminal gets escapes, every terminal is spared the control characters of data."""
    words = [sys.executable, "data.py", "caf\u00e9\x1b[2J\x9bb", "--data-dir", tmp_path]
    process = finish(words, PYTHONIOENCODING="ascii")
    assert process.returncode == 2 and process.stderr.count("\n") == 1
    assert "caf\\xe9\\x1b[2J\\x9bb" in process.stderr


def commands():
    """The words after `python` that start each command of this project."""
    for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("experiments/*.py")]):
        if '\nif __name__ == "' in path.read_text() and path.stem != "benchmark_worker":
            yield [path.name] if path.parent == ROOT else ["-m", f"experiments.{path.stem}"]


@pytest.mark.parametrize("words", [*commands()], ids=" ".join)
def test_the_first_line_and_ctrl_c_while_libraries_are_imported(words):
    """In the place of torch there is a module that sends the signal."""
    name, interrupting = words[-1].removeprefix("experiments."), ROOT / "tests" / "interrupting"
    process = finish([sys.executable, *words], PYTHONPATH=str(interrupting))
    said, error = (text.partition(": ")[2] for text in (process.stdout, process.stderr))
    assert (process.returncode, error) == (130, "interrupted\n")
    assert said == "loading PyTorch\n" or name == "predict" and said == ""  # which is for programs


def test_a_library_that_cannot_be_loaded(tmp_path):
    """As without the environment."""
    (tmp_path / "torch.py").write_text("raise ImportError")
    process = finish([sys.executable, "train.py"], PYTHONPATH=str(tmp_path))
    assert process.returncode == 2 and process.stderr.count("\n") == 1
    assert ". .venv/bin/activate" in process.stderr


@pytest.mark.parametrize("name", thorough_after_first("SIGINT", "SIGTERM", "SIGHUP"))
def test_signals(name, train, tmp_path):
    """Each stops the run, which can be continued."""
    process = child.Program([*train[1:], *cli("--epochs 1000 --patience 1000")])
    while not process.stdout.readline().startswith("epoch  1:"):
        assert process.poll() is None
    process.send_signal(signal.Signals[name])
    error = process.stderr.read()
    assert process.wait(60) == 130
    last = process.stdout.read().splitlines()[-1]
    assert last.startswith("stopping after this step") and "a second signal" in last
    resume = f"--resume --out {tmp_path / 'run'}"
    assert error == f"train.py: interrupted, continue with {resume} in the same command\n"
    assert (tmp_path / "run" / "resume.pt").exists()


def test_the_second_signal_ends_at_once():
    """Also where the first is not listened to. What nohup ignores is no signal."""
    code = """
import signal, time
from runtime.processes import deferred_signals
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with deferred_signals():
    print("here", flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    process.stdout.readline()
    for number in (signal.SIGHUP, signal.SIGTERM):
        process.send_signal(number)
        time.sleep(0.3)
        assert process.poll() is None
    process.terminate()
    assert process.wait(5) == -signal.SIGTERM


def test_a_hub_that_does_not_answer(tmp_path):
    """An id that is not in the cache fails within five seconds, imports not counted."""
    code = """
import time
import datasets, huggingface_hub
from formats.encoder import fetch_encoder
started = time.monotonic()
try:
    fetch_encoder("bert-base-uncasde")
except FileNotFoundError as e:
    print(e, "after", time.monotonic() - started)
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        environment = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        process = finish([sys.executable, "-c", code], **environment)
    first, second = process.stdout.splitlines()
    assert process.stderr == "" and "does not answer, so only what has been downloaded" in first
    assert all(text in second for text in ("bert-base-uncasde", address, str(tmp_path)))
    assert float(second.split()[-1]) < 5
