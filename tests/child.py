"""Commands in processes of their own that can be killed, limited and put side by side. They are
forked from one that has imported torch and `datasets` already, which takes seconds."""

import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).parent.parent

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["train", "torch._dynamo", "pytest", "datasets", "pandas"])


class Program:
    """`python WORDS` with pipes of text, as in a process started anew; only imports have been made.
    before: calls (function, *arguments) ahead of the command, which may change its modules."""

    def __init__(self, words, before=(), **environment):
        (out, stdout), (error, stderr) = (context.Pipe(duplex=False) for _ in range(2))
        given = [str(word) for word in words], (stdout, stderr), list(before), environment
        self.process = context.Process(target=run_program, args=given, daemon=True)
        self.process.start()
        self.stdout, self.stderr = open(os.dup(out.fileno())), open(os.dup(error.fileno()))
        for end in (out, error, stdout, stderr):
            end.close()

    def send_signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def poll(self, timeout=0):
        """Its exit status, None if it is still running after so many seconds."""
        self.process.join(timeout)
        return self.process.exitcode

    def wait(self, timeout=120):
        status = self.poll(timeout)
        assert status is not None, f"still running after {timeout} s"
        return status

    def finish(self):
        """(exit status, stdout, stderr) once it has ended, which are short."""
        return self.wait(), self.stdout.read(), self.stderr.read()


def training(words):
    """The command that takes options of training: train.py, or the one for several --tasks."""
    return ["-m", "experiments.multitask", *words] if "--tasks" in words else ["train.py", *words]


def ends(words, *before):
    """(exit status, stdout, stderr) of a run in another process. before: calls ahead of it"""
    return Program(training(words), before).finish()


def run_program(words, ends, before, environment):
    for number, end in enumerate(ends, 1):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", 1, closefd=False)
    os.chdir(ROOT)
    os.environ.update(environment)
    from tqdm import tqdm

    import runtime.run

    runtime.run.SAVE_MINUTES = 0  # after every step

    # its own is a semaphore, which a killed process leaves behind
    tqdm.set_lock(threading.RLock())
    for function, *values in before:
        function(*values)
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
    if operations:
        print(operations, "file operations", flush=True)


operations = 0


def die_at(count, directory):
    """Kills this process just before its count-th file operation in `directory`; 0: only counts."""

    def hook(event, values):
        global operations
        if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"):
            if str(values[0]).startswith(str(directory)):
                operations += 1
                if operations == count:
                    os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def at_step(n, function, *values, put=setattr):
    """The run calls the function in its n-th step from now on, batches of evaluation included."""
    from bert import Bert

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
