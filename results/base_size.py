"""The runs of results/base_size.sh as rows in base_size*.csv, and base_size.png.

    python results/base_size.py runs/base

Rows of other runs, such as another machine's, stay in the files.
"""

import sys
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from experiments import pages, report
from formats.files import read_json

HERE = Path(__file__).parent
KEY = ["target", "train_examples", "system", "seed"]
SHOWN = {
    "fusion_without": ("without the own adapter", "tab:orange"),
    "fusion_with": ("with it", "tab:blue"),
    "fusion_half": ("with that of one half, on the other", "tab:green"),
}


def merged(name, rows, key):
    """The rows in the place of those of the same key in the file, which is written."""
    path = HERE / name
    if path.is_file():
        rows = pd.concat([pd.read_csv(path), rows]).drop_duplicates(key, keep="last")
    rows = rows.sort_values(key, kind="stable")
    rows.to_csv(path, index=False)
    return rows


def epochs(study, rows):
    """A row for each epoch of each fusion of a study."""
    for _, row in rows[rows["system"].str.contains("fusion|cross|mean")].iterrows():
        run = study / "runs" / f"{row['run']}-{row['train_examples']}-{row['seed']}"
        own = [row["target"], f"{row['target']}-half-0", f"{row['target']}-half-1"]
        for line in pd.read_json(run / "log.jsonl", lines=True).to_dict("records"):
            of_own = {
                f"own_{tokens}": sum(line[tokens].get(name, 0) for name in own)
                for tokens in ("weights", "weights_cls")
            }
            values = {
                "epoch": line["epoch"],
                "loss": line["loss"],
                "accuracy": line["dev_accuracy"],
            }
            yield {**row[KEY], **values, **of_own}


def draw(rows):
    settings = [*rows.groupby(KEY[:2]).groups]
    columns = {
        "accuracy": "development accuracy, %",
        "loss": "training loss",
        "own_weights": "weight of the own adapter",
    }
    figure, panels = report.subplots(
        len(settings), 3, (12, 3.2 * len(settings)), squeeze=False, sharex=True
    )
    for line, (target, size) in zip(panels, settings, strict=True):
        found = rows.query("target == @target and train_examples == @size")
        for axes, (column, title) in zip(line, columns.items(), strict=True):
            factor = 100 if column == "accuracy" else 1
            for system, (label, colour) in SHOWN.items():
                of = found[found["system"] == system]
                for _, run in of.groupby("seed"):
                    axes.plot(run["epoch"], factor * run[column], color=colour, alpha=0.25)
                mean = factor * of.groupby("epoch")[column].mean()
                axes.plot(mean.index, mean, color=colour, label=label)
                if column == "own_weights":
                    cls = of.groupby("epoch")["own_weights_cls"].mean()
                    axes.plot(cls.index, cls, "--", color=colour)
            axes.set_ylabel(title)
            axes.grid(alpha=0.3)
        line[0].set_title(f"{target}, {size} examples")
        line[2].set_title("dashed: at [CLS]", fontsize=9)
        line[2].set_ylim(0, 1)
    for axes in panels[-1]:
        axes.set_xlabel("epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
    panels[0, 0].legend(fontsize=8)
    report.save_figure(figure, HERE / "base_size.png")


def main(base):
    found, by_epoch = [], []
    for path in sorted(base.glob("*/composition.csv")):
        rows = pd.read_csv(path)
        rows["run"] = rows["system"]
        rows["system"] = rows["system"].replace(pages.BASE_NAMES)
        by_epoch += epochs(path.parent, rows)
        found.append(rows.drop(columns="run"))
    merged("base_size.csv", pd.concat(found), KEY)
    draw(merged("base_size_epochs.csv", pd.DataFrame(by_epoch), [*KEY, "epoch"]))
    sources = [
        {"source": metrics.parent.name, **read_json(metrics)}
        for metrics in sorted(base.glob("sources/*/metrics.json"))
    ]
    columns = ["source", "accuracy", "best_epoch"]
    merged("base_size_sources.csv", pd.DataFrame(sources)[columns], ["source"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
