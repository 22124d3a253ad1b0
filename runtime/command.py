"""How a command begins and ends: argparse with errors of one line, types of options, and the result
as one line of JSON."""

import argparse
import contextlib
import importlib
import json
import math
import os
import sys
import threading
import time
import traceback

import torch.distributed as dist

from formats.files import note
from runtime.processes import is_one_of_several

PATHS = """--out --model --data-dir --train-file --dev-file --adapters --sources --file --picture
    --test run runs""".split()
WRONG = ValueError, OSError, FloatingPointError  # their messages are for users
RANDOM_LOCK = threading.RLock()  # torch's random numbers are shared by all threads


class Parser(argparse.ArgumentParser):
    """argparse, whose errors become ValueErrors, and so one line like all others."""

    def __init__(self, *names, **options):
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(*names, allow_abbrev=False, formatter_class=formatter, **options)

    def error(self, message):
        raise ValueError(message)

    def add_argument(self, *names, **options):
        """In a path, ~/x or NAME=~/x, ~ is the user's directory, also without a shell."""
        if names[0] in PATHS:
            kind, home = options.get("type", str), os.path.expanduser
            options["type"] = lambda text: kind("=".join(map(home, text.split("=", 1))))
        return super().add_argument(*names, **options)


def count(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, not {text}")
    return int(text)


def seed(text):
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"must be an integer in 0 .. 2^32 - 1, not {text}")
    return int(text)


def positive(text):
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, not {text}")
    return int(text) if text.isdecimal() else float(text)


def fraction(text):
    if not 0 < float(text) < 1:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, not {text}")
    return float(text)


def name_and_text(word):
    """text_a=review -> ("text_a", "review")"""
    name, _, text = word.partition("=")
    if not name or not text:
        raise argparse.ArgumentTypeError(f"takes NAME=VALUE, not {word!r:.50}")
    return name, text


def name_and_value(word):
    """ln_after=true -> ("ln_after", True): JSON, or else a text"""
    name, text = name_and_text(word)
    try:
        return name, json.loads(text)
    except ValueError:
        return name, text


class Pairs(argparse.Action):
    """An option of several NAME=VALUE, as a dictionary."""

    def __init__(self, **options):
        super().__init__(nargs="+", default={}, **options)

    def __call__(self, parser, args, pairs, option):
        if len(dict(pairs)) < len(pairs):
            parser.error(f"{option} has one name twice")
        setattr(args, self.dest, dict(pairs))


def look_up(table, name, what):
    """table[name], of a dictionary to which --import may add. Raises ValueError."""
    if name not in table:
        known = f"there are {', '.join(table)}; --import MODULE names a file that adds one"
        raise ValueError(f"{what} {name!r:.50} is not known: {known}")
    return table[name]


class Import(argparse.Action):
    """--import MODULE ...: imports them at once, since they may add to what other options take."""

    def __call__(self, parser, args, names, option):
        for name in names:
            if not all(part.isidentifier() for part in name.split(".")):
                parser.error(f"{name!r:.50} is not a module's name: --import takes all behind it")
            importlib.import_module(name)
        setattr(args, self.dest, [*getattr(args, self.dest), *names])


IMPORT = Parser(add_help=False)  # one of the `parents` of a command's parser
# fmt: off
IMPORT.add_argument("--import", dest="imports", nargs="+", action=Import, default=[],
    metavar="MODULE", help="files of your own, that add to a dictionary such as ADAPTERS")
# fmt: on


@contextlib.contextmanager
def alone(is_run=True):
    """Other threads wait while this one trains a run, or (is_run=False) builds a model."""
    with RANDOM_LOCK:
        if is_run:
            note.cache_clear()  # a new run says them again
        yield


def run_command(name, main, argv=None):
    """Calls main(argv), and prints what it returns, unless None, as one line of JSON. Any exception
    ends the command with one line on stderr and exit status 2, Ctrl-C with another line and 130."""
    rank = int(os.environ.get("RANK", 0)) if is_one_of_several() else 0
    if rank > 0 or sys.stdout is None:  # the first process prints for all; >&- closes an output
        sys.stdout = open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
    for stream in (sys.stdout, sys.stderr):  # an output that cannot show a label escapes it
        if hasattr(stream, "reconfigure"):  # a notebook's has not
            stream.reconfigure(errors="backslashreplace")
    status, message = 0, ""
    try:
        if (result := main(argv)) is not None:
            print(json.dumps(result))
        sys.stdout.flush()  # here, where a closed pipe can be caught
    except SystemExit:
        raise
    except BrokenPipeError:  # of `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = 141  # quietly, as a program that SIGPIPE ends
    except KeyboardInterrupt as e:
        status, message = 130, str(e) or "interrupted"
    except BaseException as e:  # a panic of the tokenizers' Rust code is no Exception
        if os.environ.get("ADAPTERFUSION_TRACEBACK"):
            traceback.print_exc()
        status, message = 2, str(e)
        if not isinstance(e, WRONG) or not message:  # no message of ours: where was it raised?
            message = f"{type(e).__name__}: {e} (with ADAPTERFUSION_TRACEBACK=1 it says where)"
    if message and rank == 0:
        print(f"{name}: {' '.join(message.split())}", file=sys.stderr, flush=True)
    elif status == 2:  # as a rule the first process says the same, and torchrun ends this one
        time.sleep(3)
        print(f"{name}, process {rank}: {' '.join(message.split())}", file=sys.stderr, flush=True)
    if dist.is_initialized():  # at once: gloo's threads and the interpreter may wait
        os._exit(status)
    if status:
        sys.exit(status)
