"""The runs of results/base_size.sh as rows in base_size*.csv, and base_size.png.

    python results/base_size.py runs/base

Rows of runs that are not in this directory stay in the files. A run of the same target, size,
system and seed, on any machine, replaces the rows of the one before.
"""

import sys
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from experiments import pages, report
from formats.files import read_json

HERE = Path(__file__).parent
RUN = ["target", "train_examples", "system", "seed"]
SHOWN = {
    pages.FUSION_OF_SOURCES: ("without the own adapter", "tab:orange"),
    "fusion_with_own": ("with the own adapter", "tab:blue"),
    "fusion_half": ("with one of half 0, Ψ trained on half 1", "tab:green"),
}


def merged(name, rows, run=RUN):
    """Replaces the rows of the same runs in the file, writes it, and returns all of them."""
    path = HERE / name
    if path.is_file():
        before = pd.read_csv(path)
        same = before[run].apply(tuple, axis=1).isin(rows[run].apply(tuple, axis=1))
        rows = pd.concat([before[~same], rows])
    rows = rows.sort_values(run, kind="stable")
    rows.to_csv(path, index=False)
    return rows


def epochs(study, rows):
    """A row for each epoch of each fusion of a study."""
    for _, row in rows[rows["system"].str.contains("fusion|cross|mean")].iterrows():
        run = study / "runs" / f"{row['system']}-{row['train_examples']}-{row['seed']}"
        own = [row["target"], *(f"{row['target']}-half-{n}" for n in (0, 1))]
        for logged in pd.read_json(run / "log.jsonl", lines=True).to_dict("records"):
            yield {
                **row[RUN],
                "epoch": logged["epoch"],
                "loss": logged["loss"],
                "accuracy": logged["dev_accuracy"],
                "own_weight": sum(logged["weights"].get(name, 0) for name in own),
                "own_weight_cls": sum(logged["weights_cls"].get(name, 0) for name in own),
            }


def draw(rows):
    settings = [*rows.groupby(RUN[:2]).groups]
    columns = {
        "accuracy": "development accuracy, %",
        "loss": "training loss",
        "own_weight": "weight of the own adapter",
    }
    figure, panels = report.subplots(
        len(settings), 3, (12, 3.2 * len(settings)), squeeze=False, sharex=True
    )
    for row, (target, size) in zip(panels, settings, strict=True):
        found = rows.query("target == @target and train_examples == @size")
        for axes, (column, title) in zip(row, columns.items(), strict=True):
            factor = 100 if column == "accuracy" else 1
            for system, (label, colour) in SHOWN.items():
                if column == "own_weight" and system == pages.FUSION_OF_SOURCES:
                    continue  # it has none
                of = found[found["system"] == system]
                for _, run in of.groupby("seed"):
                    axes.plot(run["epoch"], factor * run[column], color=colour, alpha=0.25)
                mean = factor * of.groupby("epoch")[column].mean()
                axes.plot(mean.index, mean, color=colour, label=label)
                if column == "own_weight":
                    cls = of.groupby("epoch")["own_weight_cls"].mean()
                    axes.plot(cls.index, cls, "--", color=colour)
            axes.set_ylabel(title)
            axes.grid(alpha=0.3)
        row[0].set_title(f"{target}, {size} examples")
        row[2].set_title("dashed: at [CLS]", fontsize=9)
        row[2].set_ylim(0, 1)
    for axes in panels[-1]:
        axes.set_xlabel("epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
    panels[0, 0].legend(fontsize=8)
    report.save_figure(figure, HERE / "base_size.png")


def main(base):
    studies = {path.parent: pd.read_csv(path) for path in sorted(base.glob("*/composition.csv"))}
    if not studies:
        sys.exit(f"{base} has no TARGET-SIZE/composition.csv: run results/base_size.sh first")
    named = [[], [], []]
    for study, rows in studies.items():
        target, _, *more = study.name.split("-")  # such as rte-400-8-sources
        weights = pd.read_csv(study / "weights.csv").assign(target=target)
        by_epoch = pd.DataFrame(epochs(study, rows))
        for tables, table in zip(named, (rows, weights, by_epoch), strict=True):
            names = table["system"].replace("fusion", pages.FUSION_OF_SOURCES)
            tables.append(table.assign(system=["_".join([name, *more]) for name in names]))
    rows, weights, by_epoch = map(pd.concat, named)
    merged("base_size.csv", rows)
    merged("base_size_weights.csv", weights)
    draw(merged("base_size_epochs.csv", by_epoch))
    sources = [
        {"source": metrics.parent.name, **read_json(metrics)}
        for metrics in sorted(base.glob("sources/*/metrics.json"))
    ]
    columns = ["source", "accuracy", "best_epoch"]
    merged("base_size_sources.csv", pd.DataFrame(sources)[columns], ["source"])


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/base"))
