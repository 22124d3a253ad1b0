"""`python -m results.rates_figure OUT`: of rows and traces in OUT (results/rates.py), rates.csv,
rates_traces.csv, demo.csv, rates.png, mechanism.png, and the tables of docs/results.md."""

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.report import markdown, save_figure, subplots, with_interval, write_text
from results.rates import DEMO, DEMO_SEEDS, SETTINGS, TRACED

TITLES = {
    "attention": "attention",
    "scaled": "scores over √d",
    "slow": "Q, K at lr / 20",
    "gates": "gates",
    "mean": "even weights, V",
    "sum": "sum",
    "value_of_sum": "V · sum",
    "head": "head on order",
    "own": "own adapter",
}
PLOTTED = [way for way in TITLES if way not in ("own", "value_of_sum")]
KEYS = "setting way lr seed dtype".split()
MEASURED = "last_dev last_test best_dev best_test best_epoch diverged trained".split()


def one_skill(rows, setting):
    """What a head on `order` gives at its best rate, in points: there is one for each target and
    number of examples."""
    setting = setting if setting in (DEMO, "asked, N = 2") else "both, N = 2"
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
    settings = [s for s in SETTINGS if s in set(rows["setting"])]
    picture, panels = subplots(1, len(settings), (3.1 * len(settings) + 1.6, 3.4), squeeze=False)
    for panel, setting in zip(panels.flat, settings, strict=True):
        of_setting = rows[rows["setting"] == setting]
        for number, way in enumerate(PLOTTED):
            of = of_setting[of_setting["way"] == way]
            if not len(of):
                continue
            means = 100 * of.groupby("lr")["best_test"].mean()
            style = {"color": f"C{number}", "label": TITLES[way]}
            dashed = "--" if way in ("mean", "sum", "head") else "-"
            panel.plot(means.index, means, dashed, linewidth=1.5, **style)
            x = of["lr"] * (1 + 0.03 * (number - 3))
            panel.plot(x, 100 * of["best_test"], "o", markersize=2.5, alpha=0.5, color=f"C{number}")
        panel.set(xscale="log", title=setting, xlabel="learning rate")
        panel.set_xticks([1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3])
        panel.set_xticklabels(["1e-4", "2e-4", "5e-4", "1e-3", "2e-3", "5e-3"], fontsize=7)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels.flat[0].set_ylabel("held-out accuracy, %")
    handles, labels = panels.flat[0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside right center", fontsize=8, frameon=False)
    save_figure(picture, path)


def table_of_rates(rows):
    """A row for each way and setting: the rate, the mean with its interval, how many are locked"""
    lines = []
    for setting in SETTINGS:
        of_setting, limit = rows[rows["setting"] == setting], one_skill(rows, setting) + 5
        for way in TITLES:
            of = of_setting[of_setting["way"] == way]
            if of["seed"].nunique() < 2:
                continue
            rate, best = chosen(of)
            _, last = chosen(of, "last_test")
            locked = [
                f"{(100 * at['best_test'].fillna(0) < limit).sum()} of {len(at)}"
                for _, at in of.groupby("lr")
            ]
            line = [setting, TITLES[way], f"{rate:g}", with_interval(best), with_interval(last)]
            lines.append([*line, ", ".join(locked)])
    header = "setting,way,rate,best epoch,last epoch,locked by rate".split(",")
    return markdown(lines, header)


def read_traces(out):
    """A row for each traced run and step: means over the layers but the last. s of the skill that
    is learned later, the one with the lower accuracy at the end."""
    rows = {}
    for line in (out / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows[tuple(row[key] for key in KEYS)] = row
    found = []
    for line in (out / "traces.jsonl").read_text().splitlines():
        one = json.loads(line)
        row, trace = rows[tuple(one["key"])], np.array(one["trace"])  # [steps, layers, 4]
        match, order = row["skills"][-1]
        first = "order" if row["skills"][0][1] > row["skills"][0][0] else "match"
        for step, layers in enumerate(trace, 1):
            gap, s, _, norm = layers[:-1].mean(0)
            cls = layers[-1, 2]
            found.append([row["way"], row["seed"], step, gap, s, cls, norm, first, match, order])
    columns = "way seed step gap s_match s_match_cls q_gradient first match order".split()
    traces = pd.DataFrame(found, columns=columns).round(4)
    return traces[traces["step"].isin([1, 2, *range(5, 91, 5)])]


def draw_mechanism(traces, path):
    """For each traced way: gap, s of `match`, gradient of Q, by step; locked seeds in red"""
    ways = [way for way in TRACED if way in set(traces["way"])]
    titles = {**TITLES, "fast_scaled": "over √d, Q, K at 20 lr", "query_of_text": "query f"}
    picture, panels = subplots(3, len(ways), (2.3 * len(ways) + 0.6, 5), sharex=True, sharey="row")
    for column, way in enumerate(ways):
        for _, of in traces[traces["way"] == way].groupby("seed"):
            is_locked = min(of["match"].iloc[0], of["order"].iloc[0]) < 0.6
            style = {"color": "C3" if is_locked else "C0", "alpha": 0.8, "linewidth": 1}
            for row, name in enumerate(("gap", "s_match", "q_gradient")):
                panels[row, column].plot(of["step"], of[name], **style)
        panels[0, column].set_title(titles[way], fontsize=9)
        panels[2, column].set(xlabel="step", yscale="log")
    for row, name in enumerate(("gap of the scores", "s of match", "‖∂Q‖")):
        panels[row, 0].set_ylabel(name)
    save_figure(picture, path)


def main(out, results=Path("results")):
    lines = (out / "rows.jsonl").read_text().splitlines()
    rows = pd.DataFrame(map(json.loads, lines))[[*KEYS, *MEASURED]]
    is_demo = (rows["setting"] == DEMO) & rows["seed"].isin(DEMO_SEEDS)
    demo = rows[is_demo].drop(columns="setting").sort_values(["dtype", "way", "seed"])
    rows = rows[~is_demo].sort_values(KEYS)
    write_text(results / "rates.csv", rows.to_csv(index=False))
    draw_rates(rows, results / "rates.png")
    print(table_of_rates(rows))
    if len(demo):
        demo = demo.rename(columns={"way": "system", "best_test": "test_accuracy"})
        demo["system"] = demo["system"].replace(
            {"attention": "fusion", "mean": "even", "head": "head_on_order"}
        )
        write_text(results / "demo.csv", demo.to_csv(index=False))
        points = 100 * demo.pivot_table("test_accuracy", ["dtype", "seed"], "system")
        for dtype, of in points.groupby("dtype"):
            for name in of:
                lead = with_interval(of["fusion"] - of[name])
                print(dtype, name, [f"{v:.1f}" for v in of[name]], with_interval(of[name]), lead)
    traces = read_traces(out)
    write_text(results / "rates_traces.csv", traces.to_csv(index=False))
    draw_mechanism(traces, results / "mechanism.png")
    ends = traces.groupby(["way", "seed"]).last()
    at_20 = traces[traces["step"] == 20].set_index(["way", "seed"])
    print(ends[["match", "order", "first"]].join(at_20[["gap", "s_match"]]).to_string())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
