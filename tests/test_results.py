"""Every table of docs/results.md and docs/benchmarks.md is that of its file in results/."""

import re
from pathlib import Path

import pandas

from experiments.architecture_search import TITLES, label
from experiments.report import markdown
from experiments.table1 import SYSTEMS, title

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "results.md"


def read(name):
    """Every cell is text."""
    path = ROOT / "results" / f"{name}.csv"
    return pandas.read_csv(path, dtype=str, keep_default_na=False)


def as_it_is(name):
    table = read(name)
    return [list(table), *table.values.tolist()]


def low_resource():
    yield ["target", "head", "single adapter", "fusion", "gain (the paper's)"]
    for _, row in read("low_resource_table1").iterrows():
        systems = ("head", "st_a_16", "fusion_st_a")
        cells = [" ± ".join(filter(None, (row[f"{s}_mean"], row[f"{s}_std"]))) for s in systems]
        gains = (
            float(row[f"fusion_st_a_{of}"]) - float(row[f"st_a_16_{of}"])
            for of in ("mean", "paper")
        )
        yield [row["task"], *cells, "{:+.2f} ({:+.2f})".format(*gains)]


def mini():
    table = read("mini_table1")
    systems = [system for system in SYSTEMS if f"{system}_mean" in table]
    yield ["target", *(title(system) for system in systems)]
    # the tasks with three seeds, and the mean of all
    yield from table.tail(6)[["task", *(f"{s}_mean" for s in systems)]].values.tolist()


def mini_counts():
    """Arrows: ↗ better by more than 0.3, ↘ worse by more than 0.3, → between."""
    yield ["", "better", "better or the same"]
    pairs = read("mini_table2").groupby(["fusion", "compared_to"], sort=False)
    for (fusion, other), rows in pairs:
        cells = []
        for arrows in (["↗"], ["↗", "→"]):
            ours, papers = (rows[of].isin(arrows).sum() for of in ("arrow", "paper"))
            cells.append(f"{ours} ({papers}) of {len(rows)}")
        yield [f"{title(fusion)} : {title(other)}", *cells]


def search():
    """Means over the reduction factors; the best of each step in bold."""
    yield ["step", "option", "SST-2", "SciTail"]
    columns = {}
    for task in ("sst2", "scitail"):
        options = read(f"search_{task}").groupby(["step", "option"], sort=False)
        columns[task] = options["accuracy"].agg(lambda values: 100 * values.astype(float).mean())
    means = pandas.concat(columns, axis=1)
    for step, name in TITLES.items():
        cells = means.loc[step].apply(lambda column: column.map("{:.2f}".format))
        if step != "extras":
            for task, option in means.loc[step].idxmax().items():
                cells.loc[option, task] = f"**{cells.loc[option, task]}**"
        for option, row in cells.iterrows():
            yield [name, label(step, option), *row]
            name = ""


def prune():
    yield ["adapters in a layer", "accuracy", "speed"]
    for _, row in read("prune").iterrows():
        if row["k"] in ("14", "7", "1"):
            accuracy, speed = 100 * float(row["accuracy"]), float(row["speed_up"])
            yield [row["k"], f"{accuracy:.1f}", f"{speed:.2f} ×"]


MADE = {table.__name__: table for table in (low_resource, mini, mini_counts, search, prune)}


def test_every_table_is_that_of_its_file():
    tables = re.findall(r"<!-- table: (\w+) -->\n((?:\|.*\n)*)", PAGE.read_text(encoding="utf-8"))
    for name, text in tables:
        header, *rows = MADE[name]() if name in MADE else as_it_is(name)
        assert text == markdown(rows, header), name
    assert len(tables) == 9


def test_tables_of_the_benchmarks_are_extracts():
    """Every cell of docs/benchmarks.md is a value that benchmarks.csv has for this row."""
    values, cells = read("benchmarks").groupby("row")["value"].agg(set), 0
    lines = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").splitlines()
    for line in lines:
        if line.startswith("|") and not re.match(r"\| (---|row[ ,])", line):
            name, *found = (cell.strip() for cell in line.strip("|").split("|"))
            cells += len(found)
            assert {*found} - {"", "–"} <= values.get(name, set()), line
    assert cells > 100
