"""The paper's Tables 1 to 4 and Figure 3: every system, on your tasks, with your encoder, beside
the paper's values (paper_results.csv).

    python -m experiments.tables --data-dir DATA --tasks mnli sst2 mrpc rte cb --out runs/table1

OUT gets results.csv, results.md and figure3.png."""

from pathlib import Path

import pandas as pd

from bert import Bert
from experiments import grid, report, study
from runtime.command import run_command

# The columns of Table 1, and section 2.1.2
SYSTEMS = """head full st_a_2 st_a_16 st_a_64 st_a_houlsby mt_a fusion_st_a fusion_mt_a
    multitask""".split()
PAPER = Path(__file__).parent / "paper_results.csv"  # as arXiv 2005.00247v3 prints them
COMPARISONS = [(f"fusion_{n}", a) for n in ("st_a", "mt_a", "paper") for a in ("st_a_16", "mt_a")]
BARS = [(s, "full") for s in ("st_a_16", "fusion_st_a", "mt_a", "fusion_mt_a")]  # of Figure 3
MEAN = "*mean*"  # in italics; no task can be called so


def parse(argv=None):
    st_a = {"own_system": "st_a_16", "source_system": "st_a_16"}
    return study.parse("tables", __doc__, argv, SYSTEMS, seeds=[0, 1, 2], paired=True, **st_a)


def with_mean(values, args):
    """Accuracies in %, [tasks, systems], and the mean of each system that has all tasks."""
    values = values.reindex(index=args.tasks, columns=args.systems).astype(float)
    values.loc[MEAN] = values.mean(skipna=False)
    return values


def paper_values(args, encoder):
    """(the means that the paper prints, the same as texts with deviations)"""
    texts = pd.read_csv(PAPER, index_col="task", dtype=str)  # BERT-base, and RoBERTa-base (Table 4)
    texts = texts[texts["encoder"].str.startswith(encoder)].drop(columns="encoder")
    texts["fusion_paper"] = texts["fusion_st_a"]  # of the adapters that its authors published
    means = with_mean(texts.replace(" .*", "", regex=True).astype(float), args)
    return means, texts.reindex_like(means).fillna(means.map(report.two_decimals))


def differences(values, pairs):
    """A column "one − other" for each of the pairs that are there, rounded as it is printed."""
    values, found = values.drop(MEAN).round(2), {}
    for one, other in pairs:
        if {one, other} <= {*values}:
            title = f"{study.system(one)[0]} − {study.system(other)[0]}"
            found[title] = values[one] - values[other]
    return pd.DataFrame(found, values.index).round(2)


def arrows(values):
    """Table 2's, of differences; how often each, and the mean with its interval over tasks."""
    signs = values.map(lambda v: "↗" if v > 0.3 else "↘" if v < -0.3 else "→", na_action="ignore")
    signs = signs.fillna("–")
    counts = {f"*{mark}*": (signs == mark).sum().map(str) for mark in "↗→↘"}
    return pd.concat([signs, pd.DataFrame({**counts, MEAN: values.apply(report.with_interval)}).T])


def page(args, rows, encoder):
    """[text] of the tables of one size; draws figure3.png, of differences to full fine-tuning."""
    size = rows["limit_train"].iloc[0]
    suffix, of_size = f"-{size}" * bool(size), f" of {size} training examples" * bool(size)
    of = study.points(rows).groupby([rows["task"], rows["system"]])
    ours, (theirs, printed) = with_mean(of.mean().unstack(), args), paper_values(args, encoder)
    texts = of.agg(report.with_deviation).unstack().reindex_like(ours)
    texts = texts.fillna(ours.map(report.two_decimals)) + " (" + printed + ")"
    for name in ("lr", "epochs"):
        each = rows.groupby("system")[name].unique()
        texts.loc[f"*{name}*"] = each.map(lambda values: ", ".join(map("{:g}".format, values)))
    texts = texts.rename(columns=lambda name: study.system(name)[0])
    yield f"""## {"Table 4" if encoder == "roberta" else "Tables 1 and 3"}{of_size}\n
In brackets: the paper's. The means, too, are over the tasks listed here."""
    yield report.frame(texts.fillna("").map(lambda text: text.removesuffix(" (–)")))
    if not (found := differences(ours, COMPARISONS)).empty:
        yield """## Table 2: fusion compared to adapters alone\n
↗ better by more than 0.3 points, ↘ worse by more than 0.3, → between; how often each, and the mean
over the tasks. In brackets: the same of the paper's accuracies."""
        yield report.frame(arrows(found) + " (" + arrows(differences(theirs, COMPARISONS)) + ")")
    if not differences(ours, BARS).empty:
        figure, panels = report.subplots(2, 1, (max(6.5, 0.75 * len(ours)), 7), sharex=True)
        for axes, title, values in zip(panels, ("here", "paper"), (ours, theirs), strict=True):
            differences(values, BARS).plot.bar(ax=axes, title=title, ylabel="points", width=0.8)
        report.save_figure(figure, args.out / f"figure3{suffix}.png")
        yield f"## Figure 3: difference to full fine-tuning\n\n![](figure3{suffix}.png)"


def main(argv=None):
    args = parse(argv)
    if not args.plan:  # if it is damaged, found now
        encoder = Bert.from_pretrained(args.model).config.model_type
    rows, failed = study.run(args)
    parts = [text for _, of in rows.groupby("limit_train") for text in page(args, of, encoder)]
    study.write_results(args, "results", rows, parts)
    grid.end(failed)


if __name__ == "__main__":
    run_command("tables", main)
