"""How experiments report: tables and pictures. A table is rows of cells, and a header of titles. A
file replaces an earlier one only once it is complete."""

import math
import re

from formats.files import atomic_write

NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+( ?%)?|[-–]?")  # or nothing, where there is no number


def two_decimals(value, missing="–"):
    """A number as text; None and NaN are missing."""
    return missing if value is None or math.isnan(value) else f"{value:z.2f}"  # z: never -0.00


def with_deviation(mean, deviation):
    """71.04 ± 0.52; the deviation is left out where there is none."""
    return " ± ".join(filter(None, (two_decimals(mean), two_decimals(deviation, ""))))


def as_text(value):
    """A cell of a table: a float with two decimals, – for None, anything else as it is."""
    return two_decimals(value) if value is None or isinstance(value, float) else str(value)


def markdown(rows, header):
    """A table in Markdown, one text, with aligned columns; numbers are flush right."""
    lines, columns = [[as_text(value) for value in row] for row in [header, *rows]], []
    for title, *cells in zip(*lines, strict=True):
        width = max(3, *map(len, [title, *cells]))
        right = all(NUMBER.fullmatch(cell) for cell in cells)
        cells = [title, "-" * (width - right) + ":" * right, *cells]
        columns.append([cell.rjust(width) if right else cell.ljust(width) for cell in cells])
    return "".join("| " + " | ".join(cells) + " |\n" for cells in zip(*columns, strict=True))


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
