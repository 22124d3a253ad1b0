"""The paper's Tables 1 to 4 and Figure 3: every system, on your tasks, with your encoder, beside
the paper's values.

    python -m experiments.tables --data-dir DATA --tasks mnli sst2 mrpc rte cb --seeds 0 1 2 \\
        --out runs/table1 --plan
    python -m experiments.tables --model FacebookAI/roberta-base ...     # Table 4
    python -m experiments.tables ... --train-examples 200 -- --epochs 10

What follows "--" goes to each run. With --train-examples N, targets, and all tasks of a multi-task
run, have few examples, and the sources of a fusion all of theirs. Each number is a run in OUT/runs.
OUT gets results.csv with a row for each of them, results.md and figure3.png. The paper's values are
in paper_results.csv."""

from pathlib import Path

import pandas as pd

import data
from bert import Bert
from experiments import grid, report, study
from runtime.command import run_command

# The columns of Table 1, and the two of section 2.1
SYSTEMS = """head full st_a_2 st_a_16 st_a_64 st_a_houlsby mt_a fusion_st_a fusion_mt_a
    multitask sequential""".split()
PAPER = Path(__file__).parent / "paper_results.csv"  # as arXiv 2005.00247v3 prints them
COMPARISONS = [(f, a) for f in ("fusion_st_a", "fusion_mt_a") for a in ("st_a_16", "mt_a")]
BARS = [(s, "full") for s in ("st_a_16", "fusion_st_a", "mt_a", "fusion_mt_a")]  # of Figure 3
MEAN = "*mean*"  # in italics; no task can be called so


def parse(argv=None):
    parser, words = study.make_parser("tables", __doc__, argv)
    add = parser.add_argument
    add("--tasks", nargs="+", help="default: those of the paper's 16 that are in --data-dir")
    known = f"default {' '.join(SYSTEMS)}; a wrong one lists all"
    add("--systems", nargs="+", default=SYSTEMS, metavar="SYSTEM", help=known)
    parser.set_defaults(seeds=[0, 1, 2], paired=True, own="st_a_16", maker="st_a_16")
    args = parser.parse_args(words)
    place, tasks = args.data_dir, data.TASKS
    there = [t for t in tasks if (Path(place, t).is_dir() if place else tasks[t].hub)]
    args.tasks, args.systems = ([*dict.fromkeys(x)] for x in (args.tasks or there, args.systems))
    if not args.tasks:
        raise ValueError(f"{args.data_dir} has none of the paper's tasks: name yours with --tasks")
    args.sources = dict.fromkeys(args.tasks)
    study.check(args)
    return args


# Results: DataFrames of accuracies in %, a row for each task and a column for each system


def with_mean(values, args):
    """The tasks and systems of the options, and the mean of each system that has a value for each
    task: means over different tasks cannot be compared."""
    values = values.reindex(index=args.tasks, columns=args.systems).astype(float)
    values.loc[MEAN] = values.mean(skipna=False)
    return values


def paper_values(args, encoder):
    """(the means that the paper prints, the same as texts with deviations)"""
    texts = pd.read_csv(PAPER, index_col="task", dtype=str)  # BERT-base, and RoBERTa-base (Table 4)
    texts = texts[texts["encoder"].str.startswith(encoder)].drop(columns="encoder")
    means = with_mean(texts.replace(" .*", "", regex=True).astype(float), args)
    return means, texts.reindex_like(means).fillna(means.map("{:.2f}".format))


def accuracy_table(args, rows, ours, texts):
    """(rows, header) of Tables 1, 3 and 4: mean ± standard deviation (the paper's)"""
    of, lines = rows.groupby(["task", "system"])["accuracy"], []
    deviations, counts = 100 * of.std(), of.count()
    for task in ours.index:
        seeds = " or ".join(map(str, sorted({*counts.get(task, [])})))
        line = [task, args.sizes.get(task, ""), seeds]  # "": of the mean
        for name in args.systems:
            text = report.with_deviation(ours.at[task, name], deviations.get((task, name)))
            line.append(f"{text} ({texts.at[task, name]})".removesuffix(" (nan)"))
        lines.append(line)
    titles = [study.system(name)[0] for name in args.systems]
    return lines, ["task", "training examples", "seeds", *titles]


def budgets(rows):
    """(rows, header): the learning rate and the epochs of each system"""
    of = rows.assign(lr=rows["lr"].map("{:g}".format)).groupby("system", sort=False)
    found = of[["lr", "epochs"]].agg(lambda values: ", ".join(map(str, sorted({*values}))))
    return [[study.system(n)[0], *of] for n, *of in found.itertuples()], ["", "lr", "epochs"]


def differences(values, pairs):
    """A column "one − other" for each of the pairs of systems that are there; rounded as printed,
    so that a table's arrows agree with its numbers."""
    values, found = values.drop(MEAN).round(2), {}
    for pair in pairs:
        if {*pair} <= {*values}:
            one, other = (values[name] for name in pair)
            found[" − ".join(study.system(name)[0] for name in pair)] = (one - other).round(2)
    return pd.DataFrame(found, index=values.index)


def arrows(values):
    """Table 2's, of differences: better or worse by more than 0.3 points, or the same; and how
    often each of them, and the mean of the differences with its interval over tasks."""
    signs = values.map(
        lambda v: "–" if pd.isna(v) else "↗" if v > 0.3 else "↘" if v < -0.3 else "→"
    )
    counts = {f"*{mark}*": (signs == mark).sum().map(str) for mark in "↗→↘"}
    return pd.concat([signs, pd.DataFrame({**counts, MEAN: values.apply(report.with_interval)}).T])


def figure3(path, ours, theirs):
    """Bars of differences to full fine-tuning, and below them the paper's."""
    figure, panels = report.subplots(2, 1, (max(6.5, 0.75 * len(ours)), 7), sharex=True)
    for axes, title, values in zip(panels, ("here", "the paper's"), (ours, theirs), strict=True):
        style = {"title": title, "ylabel": "accuracy, points", "width": 0.8}
        differences(values, BARS).plot.bar(ax=axes, **style)
    report.save_figure(figure, path)


def pages(args, rows, encoder):
    """[text] of the tables of one size; figure3.png is drawn"""
    column = "test_accuracy" if args.test else "accuracy"
    rows = rows.assign(accuracy=rows[column])
    ours = with_mean(100 * rows.pivot_table("accuracy", "task", "system"), args)
    theirs, texts = paper_values(args, encoder)
    size = rows["limit_train"].iloc[0] if len(rows) else 0
    suffix = f"-{size}" if size else ""
    yield (
        f"## {'Table 4' if encoder == 'roberta' else 'Tables 1 and 3'}"
        + f", {size} examples" * bool(size)
    )
    yield "In brackets: the paper's. The means, too, are over the tasks listed here."
    yield report.markdown(*accuracy_table(args, rows, ours, texts))
    yield report.markdown(*budgets(rows))
    found = arrows(differences(ours, COMPARISONS))
    if not found.empty:
        found += " (" + arrows(differences(theirs, COMPARISONS)) + ")"
        yield "## Table 2: fusion compared to adapters alone"
        yield report.markdown(found.reset_index().to_numpy().tolist(), ["compared", *found])
        yield """↗ better by more than 0.3 points, ↘ worse by more than 0.3, → between; how often
        each, and the mean over the tasks. In brackets: the same of the paper's accuracies."""
    if not differences(ours, BARS).empty:
        figure3(args.out / f"figure3{suffix}.png", ours, theirs)
        yield f"## Figure 3: difference to full fine-tuning\n\n![](figure3{suffix}.png)"


def main(argv=None):
    args = parse(argv)
    encoder = Bert.from_pretrained(args.model).config.model_type  # if it is damaged, found now
    rows, failed = study.run(args)
    parts = [text for _, of in rows.groupby("limit_train") for text in pages(args, of, encoder)]
    study.write_results(args, "results", rows, parts)
    grid.end(failed)


if __name__ == "__main__":
    run_command("tables", main)
