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

WRONG = ValueError, OSError, FloatingPointError, MemoryError  # their messages are for users
TRACEBACK = "ADAPTERFUSION_TRACEBACK"


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
        raise argparse.ArgumentTypeError(
            f"takes NAME=VALUE, in quotes if it has blanks, not {word!r:.50}"
        )
    return name, text


def name_and_value(word):
    """ln_after=true -> ("ln_after", True): JSON, or else a text"""
    name, text = name_and_text(word)
    try:
        return name, json.loads(text)
    except (ValueError, RecursionError):
        return name, text


def look_up(table, name, what):
    """table[name], of a dictionary to which --import may add. Raises ValueError, which says what
    the name was to be."""
    if name not in table:
        advice = f"there are {', '.join(table)}; --import MODULE names a file that adds one"
        raise ValueError(f"{what} {name!r:.50} is not known: {advice}")
    return table[name]


def import_modules(names):
    """Imports the modules that --import names, which add to dictionaries such as ADAPTERS."""
    try:
        for name in names:
            importlib.import_module(name)
    except ModuleNotFoundError as e:
        advice = "--import takes names such as examples.lora, of files here or on PYTHONPATH"
        raise ValueError(f"{e}: {advice}") from e


def run_command(name, main, argv=None):
    """Calls main(argv), and prints what it returns, unless None, as one line of JSON. Any exception
    ends the command with one line on stderr and exit status 2, Ctrl-C with another line and 130; of
    torchrun's processes the first one prints. ADAPTERFUSION_TRACEBACK=1 shows tracebacks, too."""
    dist = sys.modules.get("torch.distributed")
    rank = int(os.environ.get("RANK", 0)) if dist and dist.is_torchelastic_launched() else 0
    if rank > 0:
        sys.stdout = open(os.devnull, "w")  # the first process prints for all
    try:
        result = main(argv)
        if dist and dist.is_initialized():  # now that the model is gone: its end may wait for it
            dist.destroy_process_group()
        if result is not None:
            print(json.dumps(result))
        sys.stdout.flush()  # here, where a closed pipe can be caught
        return
    except SystemExit:
        raise
    except BrokenPipeError:  # of `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except KeyboardInterrupt as e:
        status, message, prints = 130, str(e) or "interrupted", rank == 0
    except BaseException as e:  # a panic of the tokenizers' Rust code is no Exception
        if os.environ.get(TRACEBACK):
            traceback.print_exc()
        status, message = 2, str(e)
        if not isinstance(e, WRONG) or not message:  # no message of ours: where was it raised?
            message = f"{type(e).__name__}: {e} ({TRACEBACK}=1 in the environment shows where)"
        # a lack of memory, or an error of CUDA, may come to one process alone
        prints = rank == 0 or isinstance(e, (MemoryError, RuntimeError))
    if prints:
        print(f"{name}: {' '.join(message.split())}", file=sys.stderr, flush=True)
    elif status == 2:  # the first to end has torchrun end the others: it must not be a silent one
        time.sleep(3)
    if dist and dist.is_initialized():  # at once: gloo's threads and the interpreter may wait
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)
