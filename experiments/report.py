"""The tables, files and pictures in which experiments report their results."""

import csv
import shlex
import shutil
import statistics
from pathlib import Path

import matplotlib.pyplot as plt

plt.switch_backend("Agg")  # pictures go into files, never to a window


def mean_and_deviation(accuracies):
    """Accuracies of several seeds, 0 to 1 -> (mean, standard deviation) in %; the deviation of one
    seed, and both of none, are None."""
    values = [100 * accuracy for accuracy in accuracies]
    return (
        statistics.mean(values) if values else None,
        statistics.stdev(values) if len(values) > 1 else None,
    )


def two_decimals(value, missing="–"):
    return missing if value is None else f"{value:.2f}"


def with_deviation(mean, deviation):
    """71.04 ± 0.52; the deviation is left out where there is none."""
    return two_decimals(mean) + ("" if deviation is None else f" ± {deviation:.2f}")


def markdown(title, header, rows):
    """A titled table. rows: texts, as many in each as in the header."""
    lines = [f"## {title}", "", "| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows), ""])


def for_terminal(table):
    """A table of `markdown` as aligned columns. Those that the terminal has no room for stand below
    the others, after the first column again."""
    title, _, header, _, *rows = table.rstrip("\n").split("\n")
    columns = list(zip(*(row[2:-2].split(" | ") for row in (header, *rows)), strict=True))
    first, *columns = [[cell.ljust(max(map(len, cells))) for cell in cells] for cells in columns]
    room, blocks = shutil.get_terminal_size((100, 0)).columns, []
    for cells in columns:
        if not blocks or sum(2 + len(block[0]) for block in blocks[-1]) + len(cells[0]) > room:
            blocks.append([first])
        blocks[-1].append(cells)
    lines = [title.lstrip("# ")]
    for block in blocks:
        lines += ["", *("  ".join(cells).rstrip() for cells in zip(*block, strict=True))]
    return "\n".join(lines)


def write_csv(path, header, rows):
    """Writes the file under another name first, so that it is never there in half."""
    temporary = Path(f"{path}.tmp")
    with open(temporary, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])
    temporary.replace(path)


def write_text(path, text):
    """As write_csv. Returns the path."""
    temporary = Path(f"{path}.tmp")
    temporary.write_text(text, encoding="utf-8")
    return temporary.replace(path)


def save_figure(figure, path):
    figure.savefig(path, dpi=150)
    plt.close(figure)


# --------------------------------------------------------------------------------------------------
# What stands above the results of a grid


def encoder_name(model, config):
    """How results call an encoder: of a directory the last part alone, so that nothing of this
    machine stands in them."""
    name = Path(model).absolute().name if Path(model).is_dir() else model
    return f"{name} ({config.num_hidden_layers} layers, hidden size {config.hidden_size})"


def what_is_measured(args):
    seeds = ", ".join(map(str, args.seeds))
    over = f"seed {seeds}"
    if len(args.seeds) > 1:
        over = f"mean ± standard deviation over seeds {seeds}"
    return (
        f"Encoder: {args.encoder}. Accuracy on the development set in %, {over}; the best epoch "
        "is chosen on the same set, as in the paper."
    )


def options_in_words(args):
    """Lines: the options of train.py, for all runs and for those of single stages."""
    given = {"all": args.rest, **args.options}
    return [
        f"Options of {stage} runs: `{shlex.join(words)}`."
        for stage, words in given.items()
        if words
    ]
