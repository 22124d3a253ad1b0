"""Commands in processes of their own, forked from one that has made the imports: they are slow."""

import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import threading
from pathlib import Path

import runtime.run
from bert import Bert

ROOT = Path(__file__).parent.parent
runtime.run.SAVE_MINUTES = 0  # after every step, in this process and in each that is forked

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["train", "torch._dynamo", "pytest", "datasets", "pandas"])


class Program:
    """`python train.py WORDS`, or multitask. before: calls (function, *arguments) ahead of it"""

    def __init__(self, words, before=(), **environment):
        self.directory = tempfile.TemporaryDirectory()
        self.files = [Path(self.directory.name, name) for name in ("stdout", "stderr")]
        given = [str(word) for word in words], self.files, list(before), environment
        self.process = context.Process(target=run_program, args=given, daemon=True)
        self.process.start()

    def finish(self):
        """(exit status, stdout, stderr) once it has ended"""
        self.process.join(120)
        assert not self.process.is_alive(), "still running after two minutes"
        return self.process.exitcode, *(file.read_text() for file in self.files)


def ends(words, *before):
    """(exit status, stdout, stderr) of a run in another process. before: calls ahead of it"""
    return Program(words, before).finish()


def run_program(words, files, before, environment):
    """What it prints goes into two files."""
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", 1, closefd=False)
    os.chdir(ROOT)
    os.environ.update(environment)
    # its own is a semaphore, which a killed process leaves behind
    runtime.run.tqdm.set_lock(threading.RLock())
    for function, *values in before:
        function(*values)
    name = "experiments.multitask" if "--tasks" in words else "train"
    sys.argv = [name, *words]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def at_step(n, function, *values, put=setattr):
    """The run calls the function in its n-th step from now on, batches of evaluation included."""
    steps, forward = [], Bert.forward

    def instead(*given):
        steps.append(1)
        if len(steps) == n:
            function(*values)
        return forward(*given)

    put(Bert, "forward", instead)


def stop(number=signal.SIGTERM):
    """A signal for this process."""
    os.kill(os.getpid(), number)
