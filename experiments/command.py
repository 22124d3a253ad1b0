"""How the commands of this folder end when something is wrong with their input."""

import contextlib
import sys


@contextlib.contextmanager
def errors_in_one_line(command, *more, interrupted="interrupted"):
    """
    Around the work of a command: wrong input ends it with one line on stderr and exit status 2,
    Ctrl-C with another line and exit status 130.

    Wrong input is ValueError and OSError, FloatingPointError for a model's outputs, MemoryError;
    more: other exceptions that are reported like them; interrupted: what is said after Ctrl-C.
    """
    try:
        yield
    except (ValueError, OSError, FloatingPointError, MemoryError, *more) as e:
        print(f"{command}: {' '.join(str(e).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"{command}: {interrupted}", file=sys.stderr)
        sys.exit(130)
