"""How experiments report: tables as text and Markdown, CSV files and pictures. A table is rows of
cells, and a header of titles. A file replaces an earlier one only once it is complete."""

import math
import re
import statistics

from formats.files import atomic_write

NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+( ?%)?|[-–]?")  # or nothing, where there is no number


def mean_and_deviation(values):
    """(mean, sample deviation) of numbers; the deviation of one, and both of none, are None."""
    values = [*values]
    mean = statistics.mean(values) if values else None
    return mean, statistics.stdev(values) if len(values) > 1 else None


def percent(accuracies):
    """Accuracies of several seeds, 0 to 1 -> (mean, sample deviation) in %"""
    return mean_and_deviation(100 * accuracy for accuracy in accuracies)


def two_decimals(value, missing="–"):
    """A number as text; None and NaN are missing."""
    return missing if value is None or math.isnan(value) else f"{value:z.2f}"  # z: never -0.00


def with_deviation(mean, deviation):
    """71.04 ± 0.52; the deviation is left out where there is none."""
    return " ± ".join(filter(None, (two_decimals(mean), two_decimals(deviation, ""))))


def as_text(value):
    """A cell of a table: a float with two decimals, – for None, anything else as it is."""
    return two_decimals(value) if value is None or isinstance(value, float) else str(value)


def table(rows, header):
    """The lines of a table in aligned columns; numbers are flush right."""
    lines, columns = [[as_text(value) for value in row] for row in [header, *rows]], []
    for cells in zip(*lines, strict=True):
        width = max(map(len, cells))
        right = all(NUMBER.fullmatch(cell) for cell in cells[1:])
        columns.append([cell.rjust(width) if right else cell.ljust(width) for cell in cells])
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]


def markdown(rows, header):
    """A table in Markdown, one text."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(map(as_text, line)) + " |\n" for line in lines)


def write_csv(path, header, rows):
    """None and NaN are empty."""
    import pandas  # takes half a second: when it is first needed

    table = pandas.DataFrame(rows, columns=header, dtype=object)  # which leaves integers alone
    write_text(path, table.to_csv(index=False, lineterminator="\n"))


def write_text(path, text):
    """Returns the path."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def subplots(rows=1, columns=1, figsize=None, **options):
    """As pyplot's with `layout="constrained"`, but for a file: it never opens a window."""
    from matplotlib.figure import Figure  # takes most of a second: not for tables alone

    figure = Figure(figsize=figsize, layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def save_figure(figure, path):
    """Draws into a file of the kind that its ending names."""
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:], dpi=150)
