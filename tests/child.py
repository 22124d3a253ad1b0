"""train.py in processes of its own that can be killed, limited and put side by side. They are
forked from one that has imported torch and `datasets` already, which takes seconds."""

import multiprocessing.connection
import os
import signal
import sys
import threading

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["train", "torch._dynamo", "pytest", "datasets", "pandas"])
one_at_a_time = (
    threading.Lock()
)  # to start a process is also to look for the ends of others, each of which is told once


def start(arguments, output, before=(), **environment):
    """Process: python train.py ARGUMENTS, stdout and stderr go to the file `output`. before: calls
    (function, *arguments) ahead of it."""
    arguments = [str(argument) for argument in arguments]
    process = context.Process(target=main, args=(arguments, str(output), list(before), environment))
    with one_at_a_time:
        process.start()
    return process


def wait(process, timeout=None):
    """Its exit status, None if it is still running after so many seconds."""
    multiprocessing.connection.wait([process.sentinel], timeout)
    with one_at_a_time:
        return process.exitcode


def main(arguments, output, before, environment):
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(environment)
    import runtime.run
    import train
    from runtime.command import run_command

    runtime.run.tqdm.set_lock(
        threading.RLock()
    )  # its own is a semaphore, which a killed process leaves behind
    for function, *values in before:
        function(*values)
    run_command("train.py", train.main, arguments)
    print(f"{operations} file operations", flush=True)


def finish(process, output, timeout=120):
    """(exit status, what it wrote), once it has ended."""
    status = wait(process, timeout)
    assert status is not None, f"still running after {timeout} s"
    with open(output) as file:
        return status, file.read()


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
