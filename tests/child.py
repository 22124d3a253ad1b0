"""train.py in processes of its own that can be killed, limited and put side by side. They are
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


def start(arguments, output, before=(), **environment):
    """Process: python train.py ARGUMENTS, stdout and stderr go to the file `output`. before: calls
    (function, *arguments) ahead of it."""
    arguments = [str(argument) for argument in arguments]
    process = context.Process(target=main, args=(arguments, str(output), list(before), environment))
    process.start()
    return process


def wait(process, timeout=None):
    """Its exit status, None if it is still running after so many seconds."""
    process.join(timeout)
    return process.exitcode


def main(arguments, output, before, environment):
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(environment)
    from tqdm import tqdm

    import train
    from runtime.command import run_command

    # its own is a semaphore, which a killed process leaves behind
    tqdm.set_lock(threading.RLock())
    for function, *values in before:
        function(*values)
    run_command("train.py", train.main, arguments)
    print(f"{operations} file operations", flush=True)


def finish(process, output, timeout=120):
    """(exit status, what it wrote), once it has ended."""
    status = wait(process, timeout)
    assert status is not None, f"still running after {timeout} s"
    return status, Path(output).read_text()


class Program:
    """`python WORDS`, as subprocess.Popen starts it with pipes of text. All is as in a process that
    is started anew, sys.argv, __main__, signals, stdout and stderr; only imports have been made."""

    def __init__(self, words):
        pipes = (context.Pipe(duplex=False) for _ in range(3))
        (stdin, ours), (out, stdout), (error, stderr) = pipes
        theirs = [stdin, stdout, stderr]
        words = [str(word) for word in words]
        self.process = context.Process(target=run_program, args=(words, theirs), daemon=True)
        self.process.start()
        self.stdin = open(os.dup(ours.fileno()), "w")
        self.stdout, self.stderr = open(os.dup(out.fileno())), open(os.dup(error.fileno()))
        for end in (ours, out, error, *theirs):
            end.close()

    def send_signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def wait(self, timeout=None):
        status = wait(self.process, timeout)
        assert status is not None, f"still running after {timeout} s"
        return status

    def poll(self):
        return wait(self.process, 0)

    def kill(self):
        self.process.kill()


def output(words):
    """(exit status, stdout, stderr) of `python WORDS`, whose stderr is short."""
    program = Program(words)
    program.stdin.close()
    out, error = program.stdout.read(), program.stderr.read()
    return program.wait(60), out, error


def run_program(words, ends):
    for number, end in enumerate(ends):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdin = open(0, closefd=False)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", 1, closefd=False)
    os.chdir(ROOT)
    if words[0] == "-m":
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

    steps, predict = [], train.predict

    def instead(*given):
        steps.append(1)
        if len(steps) == n:
            function(*values)
        return predict(*given)

    put(train, "predict", instead)


def stop(number=signal.SIGTERM):
    """A signal for this process."""
    os.kill(os.getpid(), number)
