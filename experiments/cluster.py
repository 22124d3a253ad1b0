"""The workers of a Dask cluster, on which experiments/grid.py runs a study's runs (--cluster)."""

import contextlib
import logging
import multiprocessing
import tempfile
from pathlib import Path


@contextlib.contextmanager
def executor(address, out):
    """A concurrent.futures.Executor of the scheduler's workers. Raises ValueError for a scheduler,
    or a worker, that cannot run what a study in this directory submits."""
    try:
        import distributed
    except ImportError as e:
        raise ValueError("--cluster needs Dask: pip install -r requirements-cluster.txt") from e
    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)  # the grid says what is lost
    how = "docs/tables.md says how it is started"
    try:
        client = distributed.Client(address, timeout=10)
        client.run_on_scheduler(why_not)  # it reads what is submitted
    except (OSError, ValueError, ImportError) as e:
        raise ValueError(f"--cluster {address}: no such scheduler ({e}); {how}") from e
    with client:
        print(f"asking the workers of {address}, or waiting for the first one", flush=True)
        client.wait_for_workers(1)
        seen = next(place for place in (out, *out.resolve().parents) if place.is_dir())
        with tempfile.NamedTemporaryFile(dir=seen) as file:
            found = client.run(why_not, Path.cwd(), Path(file.name).resolve(), on_error="return")
        for worker, problem in found.items():
            if problem:
                raise ValueError(f"--cluster {address}: worker {worker}: {problem}; {how}")
        yield client.get_executor(pure=False)


def why_not(*places):
    """What keeps a worker from running a study's runs, or None; called there."""
    import experiments.grid  # noqa: F401  (or an error)

    if unseen := [str(place) for place in places if not place.exists()]:
        return f"it does not see {unseen[0]}, which has to be shared"
    if multiprocessing.current_process().daemon:
        return "it may have no processes without DASK_DISTRIBUTED__WORKER__DAEMON=False"


def is_wanted():
    """Whether the task in whose thread this is called is still to be done: not if its study, or the
    scheduler, which closes its workers, has ended."""
    from distributed import get_worker

    worker = get_worker()
    task = worker.state.tasks.get(worker.get_current_task())
    is_open = worker.status.name in ("running", "paused")
    return is_open and task is not None and task.state == "executing"
