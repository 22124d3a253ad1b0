"""How experiments report: tables and pictures. A table is rows of cells, and a header of titles. A
file replaces an earlier one only once it is complete."""

import math

from tabulate import tabulate

from formats.files import atomic_write

# Student's t, 97.5 %, by degrees of freedom from 1
T975 = "12.706 4.303 3.182 2.776 2.571 2.447 2.365 2.306 2.262 2.228 2.201 2.179 2.160 2.145 2.131"


def two_decimals(value, missing="–"):
    """A number as text; None and NaN are missing."""
    return missing if value is None or math.isnan(value) else f"{value:z.2f}"  # z: never -0.00


def with_deviation(values):
    """71.04 ± 0.52, of a Series; the deviation is left out where there is none."""
    return " ± ".join(filter(None, (two_decimals(values.mean()), two_decimals(values.std(), ""))))


def half_interval(values):
    """Half the width of the mean's 95 % interval by t; NaN of a single value."""
    t, n = [float(quantile) for quantile in T975.split()], values.count()
    return values.sem() * (t[n - 2] if n - 2 < len(t) else 1.96 + 2.45 / (n - 1))  # right to 0.01


def with_interval(values):
    """1.38 (0.01 to 2.75): the mean, and that interval; not of one or two, or of equal values."""
    mean, half = values.mean(), half_interval(values)
    if values.count() < 3 or half < 0.005:
        return two_decimals(mean)
    return f"{two_decimals(mean)} ({two_decimals(mean - half)} to {two_decimals(mean + half)})"


def markdown(rows, header):
    """A table in Markdown: floats with two decimals, None as –, numbers flush right."""
    is_text = [any(isinstance(row[i], str) for row in rows) for i in range(len(header))]
    rows = [[v if isinstance(v, (str, int)) else two_decimals(v) for v in row] for row in rows]
    align = ["left" if text else "right" for text in is_text]
    return tabulate(rows, header, "pipe", colalign=align, disable_numparse=True) + "\n"


def frame(values):
    """A DataFrame as such a table."""
    return markdown([[*row] for row in values.itertuples()], ["", *map(str, values)])


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
