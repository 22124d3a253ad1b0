"""Commands as processes of their own: signals, and a hub that is silent."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import child
from conftest import cli, thorough_after_first

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
