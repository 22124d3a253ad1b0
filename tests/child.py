"""Commands in processes of their own that can be killed, limited and put side by side. They are
forked from one that has imported torch and `datasets` already, which takes seconds."""

import contextlib
import importlib
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
    """`python WORDS`, as subprocess.Popen starts it with pipes of text. All is as in a process that
    is started anew, sys.argv, __main__, signals, stdout and stderr; only imports have been made.
    before: calls (function, *arguments) ahead of the command, which may change its modules."""

    def __init__(self, words, before=(), cwd=ROOT, **environment):
        pipes = (context.Pipe(duplex=False) for _ in range(3))
        (stdin, ours), (out, stdout), (error, stderr) = pipes
        theirs = [stdin, stdout, stderr]
        given = [str(word) for word in words], theirs, list(before), cwd, environment
        self.process = context.Process(target=run_program, args=given, daemon=True)
        self.process.start()
        self.stdin = open(os.dup(ours.fileno()), "w")
        self.stdout, self.stderr = open(os.dup(out.fileno())), open(os.dup(error.fileno()))
        for end in (ours, out, error, *theirs):
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

    def finish(self, timeout=120):
        """(exit status, stdout, stderr) once it has ended, which are short."""
        self.stdin.close()
        return self.wait(timeout), self.stdout.read(), self.stderr.read()


def training(words):
    """The command that takes options of training: train.py, or the one for several --tasks."""
    return ["-m", "experiments.multitask", *words] if "--tasks" in words else ["train.py", *words]


def output(words):
    return Program(words).finish()


def run_program(words, ends, before, cwd, environment):
    for number, end in enumerate(ends):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdin = open(0, closefd=False)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", 1, closefd=False)
    os.chdir(cwd)
    os.environ.update(environment)
    from tqdm import tqdm

    import runtime.run

    runtime.run.SAVE_MINUTES = 0  # after every step

    # its own is a semaphore, which a killed process leaves behind
    tqdm.set_lock(threading.RLock())
    if before:
        from runtime.command import run_command

        start = 2 if words[0] == "-m" else 1
        name = words[start - 1].removesuffix(".py")
        main = importlib.import_module(name).main
        for function, *values in before:
            function(*values)
        run_command(words[start - 1], main, words[start:])
        print(operations, "file operations", flush=True)
    elif words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


operations = 0


def die_at(count, directory):
    """Ends this process as a power cut would, just before its count-th file operation in
    `directory`; 0: only counts."""

    def hook(event, values):
        global operations
        if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"):
            if str(values[0]).startswith(str(directory)):
                operations += 1
                if operations == count:
                    os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def at_step(n, function, *values, put=setattr):
    """The run calls the function in its n-th step from now on; the batches of evaluation count,
    too."""
    import train

    steps, forward = [], train.Model.forward

    def instead(*given):
        steps.append(1)
        if len(steps) == n:
            function(*values)
        return forward(*given)

    put(train.Model, "forward", instead)


def stop(number=signal.SIGTERM):
    """A signal for this process."""
    os.kill(os.getpid(), number)
