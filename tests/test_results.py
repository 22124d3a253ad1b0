"""Every table of docs/results.md is made from its file in results/. After a file has changed,
`python -m tests.test_results` writes the tables again."""

import csv
import re
from pathlib import Path
from statistics import mean

from experiments.architecture_search import TITLES, label
from experiments.table1 import SYSTEMS, title

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "results.md"


def read(name):
    with open(ROOT / "results" / f"{name}.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def as_it_is(name):
    rows = read(name)
    return [list(rows[0]), *(list(row.values()) for row in rows)]


def low_resource():
    yield ["target", "head", "single adapter", "fusion", "gain (the paper's)"]
    for row in read("low_resource_table1"):
        systems = ("head", "st_a_16", "fusion_st_a")
        cells = [" ± ".join(filter(None, (row[f"{s}_mean"], row[f"{s}_std"]))) for s in systems]
        gains = (
            float(row[f"fusion_st_a_{of}"]) - float(row[f"st_a_16_{of}"])
            for of in ("mean", "paper")
        )
        yield [row["task"], *cells, "{:+.2f} ({:+.2f})".format(*gains)]


def mini():
    rows = read("mini_table1")
    systems = [system for system in SYSTEMS if f"{system}_mean" in rows[0]]
    yield ["target", *(title(system) for system in systems)]
    for row in rows[-6:]:  # the tasks with three seeds, and the mean of all
        yield [row["task"], *(row[f"{system}_mean"] for system in systems)]


def mini_counts():
    """Arrows: ↗ better by more than 0.3, ↘ worse by more than 0.3, → between."""
    yield ["", "better", "better or the same"]
    pairs = {}
    for row in read("mini_table2"):
        pairs.setdefault((row["fusion"], row["compared_to"]), []).append(row)
    for (fusion, other), rows in pairs.items():
        ours, papers = ([row[of] for row in rows] for of in ("arrow", "paper"))
        counts = [
            f"{sum(a in arrows for a in ours)} ({sum(a in arrows for a in papers)}) of {len(rows)}"
            for arrows in ("↗", "↗→")
        ]
        yield [f"{title(fusion)} : {title(other)}", *counts]


def search():
    """Means over the reduction factors; the best of each step in bold."""
    yield ["step", "option", "SST-2", "SciTail"]
    columns = []
    for task in ("sst2", "scitail"):
        found = {}
        for row in read(f"search_{task}"):
            options = found.setdefault(row["step"], {})
            options.setdefault(row["option"], []).append(100 * float(row["accuracy"]))
        columns.append(found)
    for step, name in TITLES.items():
        means = [{option: mean(of) for option, of in found[step].items()} for found in columns]
        best = [max(of, key=of.get) if step != "extras" else None for of in means]
        for option in means[0]:
            cells = (
                ("**{:.2f}**" if option == winner else "{:.2f}").format(of[option])
                for of, winner in zip(means, best, strict=True)
            )
            yield [name, label(step, option), *cells]
            name = ""


def prune():
    yield ["adapters in a layer", "accuracy", "speed", "folded"]
    for row in read("prune"):
        if row["k"] in ("14", "7", "1"):
            speeds = (f"{float(row[name]):.2f} ×" for name in ("speed_up", "folded_up"))
            yield [row["k"], f"{100 * float(row['accuracy']):.1f}", *speeds]


MADE = {table.__name__: table for table in (low_resource, mini, mini_counts, search, prune)}
TABLES = [*MADE, "demo", "full", "rte_fusions", "rte_control"]


def written(text):
    """The page with its tables made anew: each stands below `<!-- table: NAME -->`."""

    def anew(found):
        header, *rows = MADE[found[2]]() if found[2] in MADE else as_it_is(found[2])
        lines = [header, ["---"] * len(header), *rows]
        return found[1] + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)

    return re.sub(r"(<!-- table: (\w+) -->\n)(?:\|.*\n)*", anew, text)


def test_every_table_is_that_of_its_file():
    text = PAGE.read_text(encoding="utf-8")
    assert text == written(text), "run python -m tests.test_results"
    assert set(re.findall(r"<!-- table: (\w+) -->", text)) == set(TABLES)
    starts = re.findall(r"(?<!\|)\n(\|.*)\n\|[-| ]+\|\n", text)
    assert len(starts) == len(TABLES), "a table without a file"


def test_tables_of_the_benchmarks_are_extracts():
    """Every cell of docs/benchmarks.md is a value that benchmarks.csv has for this row."""
    values, cells = {}, 0
    for row in read("benchmarks"):
        values.setdefault(row["row"], set()).add(row["value"])
    lines = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").splitlines()
    for line in lines:
        if line.startswith("|") and not re.match(r"\| (---|row[ ,])", line):
            name, *found = (cell.strip() for cell in line.strip("|").split("|"))
            cells += len(found)
            assert {*found} - {"", "–"} <= values.get(name, set()), line
    assert cells > 100


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
