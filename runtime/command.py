"""How a command begins and ends. Nothing is imported here that takes time: torch takes seconds."""

import gc
import json
import os
import signal
import sys


def announce(name, stream=None):
    """The first line of a command, before its imports. Ctrl-C during them ends it in one line. On
    stderr, which is for errors, it is for a terminal alone."""
    signal.signal(signal.SIGINT, lambda *_: leave(name, "interrupted", 130))
    gc.disable()  # imports make much that stays, a tenth of their time is looking for what does not
    stream = stream or sys.stdout
    first = int(os.environ.get("RANK", 0)) == 0  # of torchrun's processes, speaks for all
    heard = stream is sys.stdout or stream.isatty()
    if first and heard and not {"-h", "--help"} & {*sys.argv[1:]}:
        print(f"{name}: loading PyTorch", file=stream, flush=True)


def leave(name, message, status):
    """Ends the process at once, with one line on stderr."""
    print(f"{name}: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(status)


def hear_interrupts():
    """Ctrl-C raises KeyboardInterrupt again, and garbage is collected, after `announce`."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
    if callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, signal.default_int_handler)


def run_command(name, main, argv=None):
    """Calls main, and prints what it returns as one line of JSON. For what it raises on wrong input
    or after Ctrl-C, one line on stderr and the exit status 2 or 130."""
    import torch.distributed as dist

    rank = int(os.environ.get("RANK", 0)) if dist.is_torchelastic_launched() else 0
    if rank > 0:
        sys.stdout = open(os.devnull, "w")  # the first process prints for all
    hear_interrupts()
    try:
        result = main(argv)
        if dist.is_initialized():  # now that the model is gone, whose end may wait for the group's
            dist.destroy_process_group()
        print(json.dumps(result))
        return
    except (ValueError, OSError, FloatingPointError, MemoryError) as e:
        status, message = 2, e
        prints = rank == 0 or isinstance(e, MemoryError)  # which may be one process's alone
    except KeyboardInterrupt as e:
        status, message, prints = 130, str(e) or "interrupted", rank == 0
    if prints:
        print(f"{name}: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
    if dist.is_initialized():  # at once: gloo's threads and the interpreter may wait for each other
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)
