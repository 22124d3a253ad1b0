"""How a command ends: with its result as one line of JSON, or with one line about what is wrong."""

import json
import os
import sys
import time
import traceback

WRONG = ValueError, OSError, FloatingPointError, MemoryError  # their messages are for users
TRACEBACK = "ADAPTERFUSION_TRACEBACK"


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
        line = " ".join(message.split())
        print(f"{name}: {line}", file=sys.stderr, flush=True)
    elif status == 2:  # the first to end has torchrun end the others: it must not be a silent one
        time.sleep(3)
    if dist and dist.is_initialized():  # at once: gloo's threads and the interpreter may wait
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)
