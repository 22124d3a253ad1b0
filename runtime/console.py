"""What a command does before anything else: import this first.

Output never decides how a command ends. Where stdout or stderr is closed, or its reader has gone
(`train.py ... | head -3`), the rest is not printed, and the work goes on. Letters that a terminal
does not know are printed as escapes, and so are control characters, which data may hold and a
terminal would obey. Ctrl-C while libraries are imported ends in one line.

Nothing is changed where another program imports this project.
"""

import contextlib
import os
import re
import sys
from pathlib import Path

CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


class Console:
    """A text stream that takes everything. What is not written here is the stream's own."""

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


def is_ours():
    """Whether the program that runs is a command of this project."""
    here = Path(__file__).resolve().parent.parent
    main = getattr(sys.modules["__main__"], "__file__", None)
    return main is not None and Path(main).resolve().parent in (here, here / "experiments")


def interrupted(kind, error, trace):
    """What the interpreter calls for an error that nothing has caught."""
    if not issubclass(kind, KeyboardInterrupt):
        return sys.__excepthook__(kind, error, trace)
    print(f"{Path(sys.argv[0]).name}: interrupted", file=sys.stderr, flush=True)


def begin():
    for number in (0, 1, 2):  # a file that is opened later must not become stdout or stderr
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w", encoding="utf-8")
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, Console(stream))
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")
    sys.excepthook = interrupted


if is_ours():
    begin()
