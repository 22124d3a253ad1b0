"""`python -m results.rates_figure OUT`: of the rows in OUT (results/rates.py), rates.csv, demo.csv,
rates_table.csv and rates.png, which docs/results.md shows."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.report import half_interval, save_figure, subplots, with_interval, write_text
from results.rates import DEMO, DEMO_SEEDS, RATES, WIDE

LONG = "both, N = 8, 240 steps"
TITLES = {
    "attention": "attention",
    "scaled": "scores over √d",
    "slow": "Q, K at lr / 20",
    "gates": "gates",
    "mean": "even weights, V",
    "sum": "sum",
    "value_of_sum": "V · sum",
    "static": "static weights, V",
    "head": "head on order",
    "own": "own adapter",
}
PLOTTED = {"attention": "C0", "scaled": "C1", "slow": "C2", "gates": "C3", "static": "black"}
PLOTTED |= {"value_of_sum": "C4", "mean": "C5", "sum": "C6"}  # {way: colour}
PANELS = {
    "both, N = 2": "two skills, 90 steps",
    "both, N = 4": "and two others, 90 steps",
    "both, N = 8": "and six others, 90 steps",
    "both, N = 8, 240 steps": "and six others, 240 steps",
    "asked, N = 2": "the text asks for one skill, 360 steps",
}
KEYS = "setting way lr seed dtype".split()
MEASURED = "last_dev last_test best_dev best_test best_epoch diverged trained".split()


def one_skill(rows, setting):
    """What a head on `order` gives at its best rate, in points: there is one for each target and
    number of examples."""
    setting = setting if setting in (LONG, "asked, N = 2") else "both, N = 2"
    of = rows[(rows["setting"] == setting) & (rows["way"] == "head")]
    return 100 * of.groupby("lr")["best_test"].mean().max() if len(of) else np.nan


def chosen(of, score="best_test"):
    """(the rate of most seeds, a Series of test accuracies in points): for each seed, at the rate
    that is best on the development set in the mean of all other seeds"""
    dev = of.pivot(index="seed", columns="lr", values=score.replace("test", "dev")).fillna(0)
    test = 100 * of.pivot(index="seed", columns="lr", values=score)
    rates = {seed: dev.drop(seed).mean().idxmax() for seed in dev.index}
    return pd.Series(rates).mode()[0], pd.Series({s: test.loc[s, lr] for s, lr in rates.items()})


def draw_rates(rows, path):
    """A panel for each setting; a line of means, a dot for each seed; the legend in the last"""
    there = {s: title for s, title in PANELS.items() if (rows["setting"] == s).any()}
    across = math.ceil(math.sqrt(len(there) + 1))
    down = math.ceil((len(there) + 1) / across)
    picture, panels = subplots(down, across, (3.6 * across, 3.1 * down), sharex=True)
    for panel, (setting, title) in zip(panels.flat, there.items(), strict=False):
        of_setting = rows[rows["setting"] == setting]
        for number, (way, colour) in enumerate(PLOTTED.items()):
            of = of_setting[of_setting["way"] == way].dropna(subset="best_test")
            means = 100 * of.groupby("lr")["best_test"].mean()
            dashed = "-" if way in WIDE else "--"
            panel.plot(means.index, means, dashed, color=colour, label=TITLES[way])
            x = of["lr"] * (1 + 0.03 * (number - 3))
            panel.plot(x, 100 * of["best_test"], "o", markersize=2.5, alpha=0.5, color=colour)
        one = one_skill(rows, setting)
        panel.axhline(one, color="0.4", linestyle=":", label="a head on one adapter")
        panel.set(xscale="log", title=title, ylabel="held-out accuracy, %")
        panel.set_xticks([*RATES, 2e-2])
        panel.set_xticklabels(["1e-4", "2e-4", "5e-4", "1e-3", "2e-3", "5e-3", "2e-2"])
        panel.tick_params(labelsize=8, labelbottom=True)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        panel.set_xlabel("learning rate", fontsize=8)
    for panel in panels.flat[len(there) :]:
        panel.axis("off")
    panels.flat[-1].legend(*panels.flat[0].get_legend_handles_labels(), loc="center")
    save_figure(picture, path)


def table_of_rates(rows):
    """A row for each setting and way: the rate that most seeds get from the others, the mean of
    held-out accuracies with its 95 % interval, in points, and at every rate how many seeds are
    locked: best epoch less than five points above a head on one adapter"""
    lines = []
    for setting, title in PANELS.items():
        of_setting, limit = rows[rows["setting"] == setting], one_skill(rows, setting) + 5
        for way, name in TITLES.items():
            of = of_setting[of_setting["way"] == way]
            if of["seed"].nunique() < 2:
                continue
            rate, best = chosen(of)
            half = half_interval(best)
            line = {"setting": title, "way": name, "rate": f"{rate:g}", "seeds": len(best)}
            line |= {"mean": best.mean(), "low": best.mean() - half, "high": best.mean() + half}
            line |= {"sd": best.std(), "last_epoch": chosen(of, "last_test")[1].mean()}
            for lr, at in of.groupby("lr"):
                test = 100 * at["best_test"].fillna(0)
                line[f"locked_at_{lr:g}"] = (test < limit - 1e-6).sum()
            lines.append(line)
    table = pd.DataFrame(lines).round(2)
    locked = table.filter(like="locked").astype("Int64")
    return pd.concat([table.drop(columns=locked), locked], axis=1)


def main(out, results=Path("results")):
    lines = (out / "rows.jsonl").read_text().splitlines()
    rows = pd.DataFrame(map(json.loads, lines))[[*KEYS, *MEASURED]]
    is_demo = rows["setting"] == DEMO
    demo = rows[is_demo].drop(columns="setting").sort_values(["dtype", "way", "lr", "seed"])
    rows = rows[~is_demo].sort_values(KEYS)
    rows = pd.concat([rows[rows["setting"] == setting] for setting in PANELS])
    named = rows.replace({"setting": PANELS})
    write_text(results / "rates.csv", named.to_csv(index=False))
    draw_rates(rows, results / "rates.png")
    write_text(results / "rates_table.csv", table_of_rates(rows).to_csv(index=False))
    if len(demo):
        demo = demo.rename(columns={"way": "system", "best_test": "test_accuracy"})
        demo["system"] = demo["system"].replace(
            {"attention": "fusion", "mean": "even", "head": "head_on_order"}
        )
        write_text(results / "demo.csv", demo.to_csv(index=False))
        demo = demo[demo["seed"].isin(DEMO_SEEDS)]  # others chose the rates
        points = 100 * demo.pivot_table("test_accuracy", ["dtype", "seed"], "system")
        for dtype, of in points.groupby("dtype"):
            for name in of:
                lead = with_interval(of["fusion"] - of[name])
                print(dtype, name, [f"{v:.1f}" for v in of[name]], with_interval(of[name]), lead)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
