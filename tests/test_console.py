"""Commands as processes of their own: closed and broken outputs, signals, a hub that is silent."""

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import child
from conftest import thorough_after_first
from runtime.command import Console

ROOT = Path(__file__).parent.parent


@pytest.fixture
def train(encoder, data_dir, tmp_path):
    """Arguments of a short run in tmp_path/run."""
    words = ["--stage", "head", "--task", "sst2", "--model", encoder, "--data-dir", data_dir]
    words += ["--epochs", 4, "--patience", 4, "--device", "cpu", "--out", tmp_path / "run"]
    return [sys.executable, ROOT / "train.py", *map(str, words)]


def test_a_reader_that_goes_away(train, tmp_path):
    """train.py ... | head -1: the run is finished, without a word."""
    process = child.Program(train[1:])
    process.stdout.readline()
    process.stdout.close()
    error = process.stderr.read()
    assert (process.wait(), error) == (0, "")
    assert (tmp_path / "run" / "metrics.json").exists()


@pytest.mark.parametrize(
    "closed", thorough_after_first("<&- >&- 2>&-", "<&-", ">&-", "2>&-", "> /dev/full")
)
def test_closed_streams(closed, train, tmp_path):
    """No file of the run becomes stdout or stderr."""
    words = ["sh", "-c", f'exec "$@" {closed}', "sh", *train]
    process = subprocess.run(words, capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, ""), process.stderr
    log = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in log] == [1, 2, 3, 4]


def test_predict_without_stdin(runs):
    words = [sys.executable, "-m", "experiments.predict", runs / "rte", "-", "--device", "cpu"]
    process = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *words], cwd=ROOT, capture_output=True, text=True
    )
    assert (process.returncode, process.stderr) == (2, "predict.py: stdin is empty\n")


def test_letters_and_controls(tmp_path):
    """An ASCII terminal gets escapes, every terminal is spared the control characters of data."""
    words = [sys.executable, ROOT / "data.py", "caf\u00e9\x1b[2J\x9bb", "--data-dir", tmp_path]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    process = subprocess.run(words, capture_output=True, env=environment)
    assert process.returncode == 2 and process.stderr.count(b"\n") == 1
    assert b"caf\\xe9\\x1b[2J\\x9bb" in process.stderr
    stream = io.StringIO()
    print("\x1b]0;title\x07 \x9b2J\r\t\x7f caf\u00e9", file=Console(stream))
    assert stream.getvalue() == "\\x1b]0;title\\x07 \\x9b2J\r\t\\x7f caf\u00e9\n"


def commands():
    """The words after `python` that start each command of this project."""
    files = [*ROOT.glob("*.py"), *(ROOT / "experiments").glob("*.py")]
    for path in sorted(path for path in files if '\nif __name__ == "' in path.read_text()):
        if path.stem != "benchmark_worker":  # which benchmark.py talks to
            yield [path.name] if path.parent == ROOT else ["-m", f"experiments.{path.stem}"]


@pytest.mark.parametrize("words", [*commands()], ids=" ".join)
def test_the_first_line_and_ctrl_c_while_libraries_are_imported(words):
    """In the place of torch there is a module that is interrupted."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "interrupting")}

    def start(*more):
        started = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, *words, *more],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        said = process.stdout.readline()
        assert not said or time.monotonic() - started < 2
        more, error = process.communicate()
        assert process.returncode == -signal.SIGINT
        return said + more, error

    name = words[-1].removeprefix("experiments.").removesuffix(".py")
    said, error = (re.sub(rf"^{name}(.py)?: ", "", text) for text in start())
    data = name == "predict"  # its stdout is for programs
    assert (said, error) == ("" if data else "loading PyTorch\n", "interrupted\n")
    assert start("--help")[0] == ""


@pytest.mark.parametrize(
    "number", thorough_after_first(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
)
def test_signals(number, train, tmp_path):
    """Each stops the run, which can be continued."""
    process = child.Program([*train[1:], "--epochs", "1000", "--patience", "1000"])
    while process.stdout.readline().split()[:1] != ["1"]:  # the first epoch's row
        assert process.poll() is None
    process.send_signal(number)
    error = process.stderr.read()
    assert process.wait(60) == 130
    last = process.stdout.read().splitlines()[-1]
    assert last.startswith("stopping after this step") and "a second signal" in last
    assert "continue with --resume" in error and error.count("\n") == 1
    assert (tmp_path / "run" / "resume.pt").exists()


def test_nohup_is_obeyed(train, tmp_path):
    words = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *train]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_the_second_signal_ends_at_once():
    """Also where the first is not listened to."""
    code = """
import time
from runtime.processes import deferred_signals
with deferred_signals():
    print("here", flush=True)
    for _ in range(600):
        time.sleep(0.1)
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    process.stdout.readline()
    process.terminate()
    time.sleep(0.5)
    assert process.poll() is None
    process.terminate()
    assert process.wait(5) == -signal.SIGTERM


@pytest.mark.parametrize("kind", thorough_after_first("nobody", "silent"))
def test_a_hub_that_does_not_answer(kind, tmp_path):
    """An id that is not in the cache fails within five seconds, imports not counted."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        if kind == "nobody":
            server.close()
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path)}
        del environment["HF_HUB_OFFLINE"]
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
        process = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=environment
        )
    said = process.stdout.splitlines()
    assert process.stderr == "" and "does not answer, so only what has been downloaded" in said[0]
    assert "bert-base-uncasde" in said[1] and address in said[1] and str(tmp_path) in said[1]
    assert float(said[1].split()[-1]) < 5
