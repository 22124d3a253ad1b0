"""Runs walkthrough.py cell by cell, says which cell is being run, and writes the executed page.

python docs/execute.py runs/walkthrough.ipynb
"""

import sys
import threading
import time
from pathlib import Path

import jupytext
from nbclient import NotebookClient


def tick(done, started):
    """Shows how long a cell has been running, on a terminal, until it is done."""
    while not done.wait(1):
        print(f"\r    {time.monotonic() - started:.0f} s", end="", flush=True)
    print("\r", end="")


def execute(source, target):
    notebook = jupytext.read(source)
    notebook.metadata["language_info"] = {"name": "python"}  # for the colours of a page
    client = NotebookClient(notebook, kernel_name="python3", record_timing=False)
    client.resources = {"metadata": {"path": str(source.parent)}}
    title, started = "", time.monotonic()
    with client.setup_kernel():
        for i, cell in enumerate(notebook.cells):
            cell.metadata.clear()  # what jupytext notes of the source
            if cell.cell_type == "markdown":
                headings = [line for line in cell.source.splitlines() if line.startswith("#")]
                title = headings[-1].strip("# ") if headings else title
                continue
            print(f"cell {i + 1} of {len(notebook.cells)}: {title}", flush=True)
            done = threading.Event()
            clock = threading.Thread(target=tick, args=(done, time.monotonic()), daemon=True)
            if sys.stdout.isatty():
                clock.start()
            try:
                client.execute_cell(cell, i)
            finally:
                done.set()
                if clock.is_alive():
                    clock.join()
    jupytext.write(notebook, target)
    print(f"{target}: {time.monotonic() - started:.0f} seconds")


if __name__ == "__main__":
    execute(Path(__file__).with_name("walkthrough.py"), Path(sys.argv[1]))
