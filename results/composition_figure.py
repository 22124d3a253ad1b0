"""The rows of results/composition.sh in results/composition*.csv, and composition.png.

python results/composition_figure.py runs
"""

import sys
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from experiments import composition, pages, report

HERE = Path(__file__).parent
LINES = {
    "fusion": "tab:orange",
    "full": "tab:green",
    "head_on_order": "tab:purple",
    "own": "tab:blue",
}


def collect(directories, name):
    """One table of the files of all directories, where a source is called by its task alone."""
    rows = pd.concat(pd.read_csv(Path(directory) / name) for directory in directories)
    columns = rows.columns.intersection(["system", "adapter"])
    rows[columns] = rows[columns].replace("source-", "", regex=True)
    return rows


def panel(axes, target, size):
    systems = pages.composed_systems(target)
    rows = pages.composition_rows(target, size)
    names = [name for name in systems if name in set(rows["system"])]
    names.sort(key=lambda name: rows.loc[rows["system"] == name, "accuracy"].mean())
    composition.dots(axes, systems, names, rows)
    axes.set_yticks(range(len(names)), [systems[name].title for name in names], fontsize=8)
    skills = {"both": "two skills", "all": "three skills"}[target]
    axes.set_title(f"{skills}, {size} examples")


def by_size(axes):
    systems = pages.composed_systems("both")
    for name, colour in LINES.items():
        sizes = pages.composition_rows("both").query("system == @name")
        axes.plot(sizes["train_examples"], 100 * sizes["accuracy"], "o", color=colour, alpha=0.4)
        means = 100 * sizes.groupby("train_examples")["accuracy"].mean()
        axes.plot(means.index, means, color=colour, label=systems[name].title)
    axes.set_xscale("log")
    ticks = [60, 120, 240, 960]
    axes.set_xticks(ticks, ticks)
    axes.minorticks_off()
    axes.set(title="two skills", xlabel="training examples of the target", ylabel="accuracy, %")
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)


def epochs(runs):
    """Of the fusion of two skills, ours beside reference.csv of results/reference_fusion.py."""
    theirs = pd.read_csv(runs / "reference.csv").assign(side="reference")
    logs = [theirs]
    for seed in theirs["seed"].unique():
        log = pd.read_json(runs / f"composition-2/runs/fusion-240-{seed}/log.jsonl", lines=True)
        log = log[["epoch", "dev_accuracy"]].rename(columns={"dev_accuracy": "accuracy"})
        logs.append(log.assign(seed=seed, side="ours"))
    return pd.concat(logs)[["side", "seed", "epoch", "accuracy"]].sort_values(["side", "seed"])


def main(runs):
    directories = sorted(path.parent for path in runs.glob("composition-*/composition.csv"))
    rows = collect(directories, "composition.csv")
    rows.to_csv(HERE / "composition.csv", index=False)
    weights = collect(directories, "weights.csv")
    weights.to_csv(HERE / "composition_weights.csv", index=False, float_format="%.4f")
    epochs(runs).to_csv(HERE / "composition_epochs.csv", index=False)
    figure, (left, middle, right) = report.subplots(1, 3, (15, 4.5))
    panel(left, "both", 240)
    by_size(middle)
    panel(right, "all", 480)
    report.save_figure(figure, HERE / "composition.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
