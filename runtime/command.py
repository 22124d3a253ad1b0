"""How a command begins and ends, and what its output may do to it.

    if __name__ == "__main__":  # above all other imports: torch takes seconds, nothing here does
        from runtime.command import announce

        announce("train.py")

Wrong input ends in one line and exit status 2, Ctrl-C in another line, also while libraries are
imported. What becomes of the output never decides how a command ends (`Console`). Nothing is
changed where another program imports this project.
"""

import contextlib
import json
import os
import re
import signal
import sys
import time
import traceback
from functools import partial

WRONG = ValueError, OSError, FloatingPointError, MemoryError  # their messages are for users
TRACEBACK = "ADAPTERFUSION_TRACEBACK"
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def announce(name, stdout_is_data=False):
    """The first line of a command, before its imports: what is loaded. Where stdout is for another
    program it goes to stderr, which is for errors, and so to a terminal alone."""
    guard_outputs()
    sys.excepthook = partial(error_while_importing, name)
    if callable(signal.getsignal(signal.SIGINT)):  # not ignored, as in the background of a script
        signal.signal(signal.SIGINT, lambda *_: leave(name, "interrupted", 130))
    stream = sys.stderr if stdout_is_data else sys.stdout
    first = int(os.environ.get("RANK", 0)) == 0  # of torchrun's processes, speaks for all
    heard = not stdout_is_data or stream.isatty()
    if first and heard and not {"-h", "--help"} & {*sys.argv[1:]}:
        print(f"{name}: loading PyTorch", file=stream, flush=True)


def guard_outputs():
    for number in (0, 1, 2):  # a file that is opened later must not become stdout or stderr
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w", encoding="utf-8")
        stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, Console(stream))
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")


class Console:
    """
    A text stream that takes everything. Where it is closed, or its reader has gone (`train.py ... |
    head -3`), the rest is not printed, and the work goes on. Control characters, which data may
    hold and a terminal would obey, are printed as escapes. The rest is the stream's own.
    """

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        self.attempt("write", CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text))
        return len(text)

    def flush(self):
        self.attempt("flush")

    def attempt(self, name, *values):
        try:
            getattr(self.stream, name)(*values)
        except (OSError, ValueError):  # no reader, a full disk behind ">", closed
            with contextlib.suppress(OSError, ValueError):  # what waits in its buffer goes nowhere
                with open(os.devnull, "w") as nowhere:
                    os.dup2(nowhere.fileno(), self.stream.fileno())


def say_why(name, message):
    """One line on stderr."""
    print(f"{name}: {' '.join(str(message).split())}", file=sys.stderr, flush=True)


def leave(name, message, status):
    """Ends the process at once, with one line on stderr."""
    say_why(name, message)
    sys.stdout.flush()
    os._exit(status)


def error_while_importing(name, kind, error, trace):
    """What the interpreter calls for an error that nothing has caught."""
    if not issubclass(kind, ImportError):
        return sys.__excepthook__(kind, error, trace)
    how = "activate the environment first: . .venv/bin/activate (make .venv/installed makes it)"
    leave(name, f"{error}; {how}", 2)


def describe_error(error):
    """One line about an exception: its message alone where a user's input explains it, else with
    the exception's name, and how to see where it was raised."""
    message = " ".join(str(error).split())
    if isinstance(error, WRONG) and message:
        return message
    return f"{type(error).__name__}: {message} ({TRACEBACK}=1 in the environment shows where)"


def run_command(name, main, argv=None, interrupted="interrupted"):
    """
    Calls main(argv), and prints what it returns, unless None, as one line of JSON.

    Any exception ends the command with one line on stderr and exit status 2, Ctrl-C with another
    line (interrupted, where the exception says nothing) and exit status 130; of torchrun's
    processes the first one prints. With ADAPTERFUSION_TRACEBACK=1 in the environment the traceback
    is printed, too.
    """
    dist = sys.modules.get("torch.distributed")
    rank = int(os.environ.get("RANK", 0)) if dist and dist.is_torchelastic_launched() else 0
    if rank > 0:
        sys.stdout = open(os.devnull, "w")  # the first process prints for all
    # Ctrl-C raises KeyboardInterrupt again, in place of what `announce` has it do
    if getattr(signal.getsignal(signal.SIGINT), "__module__", None) == __name__:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = main(argv)
        if dist and dist.is_initialized():  # now that the model is gone: its end may wait for it
            dist.destroy_process_group()
        if result is not None:
            print(json.dumps(result))
        return
    except SystemExit:
        raise
    except KeyboardInterrupt as e:
        status, message, prints = 130, str(e) or interrupted, rank == 0
    except BaseException as e:  # a panic of the tokenizers' Rust code is no Exception
        if os.environ.get(TRACEBACK):
            traceback.print_exc()
        status, message = 2, describe_error(e)
        # a lack of memory, or an error of CUDA, may come to one process alone
        prints = rank == 0 or isinstance(e, (MemoryError, RuntimeError))
    if prints:
        say_why(name, message)
    elif status == 2:  # the first to end has torchrun end the others: it must not be a silent one
        time.sleep(3)
    if dist and dist.is_initialized():  # at once: gloo's threads and the interpreter may wait
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)
