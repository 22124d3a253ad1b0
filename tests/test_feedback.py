"""What a user sees: the start, a line for each epoch, the end, signals."""

import os
import signal
import subprocess
import sys
import time

import pytest

import child
import train
from conftest import cli, read_lines, thorough_after_first


@pytest.fixture
def trained(launch, tmp_path, capsys):
    """trained(...): (the lines on stdout, the closing line's dictionary) of train.py on sst2."""

    def trained(text):
        result = launch(text, task="sst2", out=tmp_path / "run")
        lines = capsys.readouterr().out.splitlines()
        return [line for line in lines if not line.startswith("note: ")], result

    return trained


def test_the_score_chooses_the_epoch(trained, tmp_path):
    """Here another one than accuracy would."""
    words = "--stage head --epochs 4 --lr 3e-2 --score f1"
    (_, *epochs, end), result = trained(words)
    log = read_lines(tmp_path / "run" / "log.jsonl")
    scores = [line["dev_f1"] for line in log]
    records = [f1 > max(scores[:i], default=0) for i, f1 in enumerate(scores)]
    assert [line.endswith("best so far") for line in epochs] == records
    assert end.startswith(f"best epoch: {result['best_epoch']}, dev f1 {max(scores):.4f} (always")
    assert end.endswith("stopped after epoch 4 of at most 4")
    chosen = log[result["best_epoch"] - 1]
    assert chosen["dev_accuracy"] < max(line["dev_accuracy"] for line in log)
    assert (chosen["dev_f1"], chosen["dev_loss"]) == (result["f1"], result["dev_loss"])


def test_early_stopping(trained):
    """A learning rate that changes nothing: no epoch is better than the first."""
    lines, _ = trained("--stage head --lr 1e-12 --patience 2")
    assert lines[-1].endswith("stopped after epoch 3 of at most 30")


@pytest.mark.parametrize("name", thorough_after_first("SIGINT", "SIGTERM", "SIGHUP"))
def test_a_signal_stops_a_run_which_can_be_continued(name, encoder, data_dir, tmp_path):
    words = cli("--stage head --task sst2 --epochs 1000 --patience 1000 --device cpu")
    words += cli(model=encoder, data_dir=data_dir, out=tmp_path / "run")
    process = child.Program(["train.py", *words])
    while not process.stdout.readline().startswith("epoch  1:"):
        assert process.poll() is None
    process.send_signal(signal.Signals[name])
    error = process.stderr.read()
    assert process.wait(60) == 130
    last = process.stdout.read().splitlines()[-1]
    assert last.startswith("stopping after this step") and "a second signal" in last
    resume = f"--resume --out {tmp_path / 'run'}"
    assert error == f"train.py: interrupted, continue with {resume} in the same command\n"


def test_a_signal_in_the_last_evaluation(runs, data_dir, tmp_path, monkeypatch):
    """The run is finished."""
    evaluate = train.evaluate

    def stop(*given):
        os.kill(os.getpid(), signal.SIGINT)
        return evaluate(*given)

    monkeypatch.setattr(train, "evaluate", stop)
    words = cli("--stage head --task sst2 --epochs 1 --device cpu")
    words += cli(adapters=runs / "rte", data_dir=data_dir)
    with pytest.raises(KeyboardInterrupt, match="one is finished"):
        train.main([*words, *cli(out=tmp_path / "one")])


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
    options = {"cwd": child.ROOT, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", code], **options)
    process.stdout.readline()
    for number in (signal.SIGHUP, signal.SIGTERM):
        process.send_signal(number)
        time.sleep(0.3)
        assert process.poll() is None
    process.terminate()
    assert process.wait(5) == -signal.SIGTERM
