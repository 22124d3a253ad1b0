"""How a command begins and ends: argparse with errors of one line, types of options, and the result
as one line of JSON."""

import argparse
import importlib
import json
import math
import os
import sys
import time
import traceback

WRONG = ValueError, OSError, FloatingPointError  # their messages are for users


class Parser(argparse.ArgumentParser):
    """argparse, whose errors become ValueErrors, and so one line like all others."""

    def __init__(self, *names, **options):
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(*names, allow_abbrev=False, formatter_class=formatter, **options)

    def error(self, message):
        raise ValueError(message)


def number(kind, test, words):
    """A type= of argparse: a number for which test(number) holds; words say what that means."""

    def read(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not test(value):
            raise argparse.ArgumentTypeError(f"must be {words}, not {text}")
        return value

    return read


count = number(int, lambda n: 1 <= n < 10**9, "an integer of at least 1")
seed = number(int, lambda n: 0 <= n < 2**32, "an integer in 0 .. 2^32 - 1")
positive = number(
    lambda t: int(t) if t.isdecimal() else float(t), lambda x: 0 < x < math.inf, "a positive number"
)
fraction = number(float, lambda x: 0 < x < 1, "between 0 and 1")


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
    except (ValueError, RecursionError):
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


def import_modules(names):
    """Imports the modules that --import names, which add to dictionaries such as ADAPTERS."""
    for name in names:
        importlib.import_module(name)


def run_command(name, main, argv=None):
    """Calls main(argv), and prints what it returns, unless None, as one line of JSON. Any exception
    ends the command with one line on stderr and exit status 2, Ctrl-C with another line and 130.
    ADAPTERFUSION_TRACEBACK=1 in the environment shows tracebacks, too."""
    dist = sys.modules.get("torch.distributed")
    rank = int(os.environ.get("RANK", 0)) if dist and dist.is_torchelastic_launched() else 0
    if rank > 0:
        sys.stdout = open(os.devnull, "w")  # the first process prints for all
    for stream in (sys.stdout, sys.stderr):  # an output that cannot show a label escapes it
        stream.reconfigure(errors="backslashreplace")
    status, message = 0, ""
    try:
        if (result := main(argv)) is not None:
            print(json.dumps(result))
        sys.stdout.flush()  # here, where a closed pipe can be caught
    except SystemExit:
        raise
    except BrokenPipeError:  # of `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
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
    if dist and dist.is_initialized():  # at once: gloo's threads and the interpreter may wait
        os._exit(status)
    if status:
        sys.exit(status)
