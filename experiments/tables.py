"""The paper's Tables 1 to 4 and Figure 3: every system, on your tasks, with your encoder, beside
the paper's values.

    python -m experiments.tables --data-dir DATA --tasks mnli sst2 mrpc rte cb --seeds 0 1 2 \\
        --out runs/table1 --plan
    python -m experiments.tables --model FacebookAI/roberta-base ...     # Table 4
    python -m experiments.tables ... -- --epochs 10 --limit-train 200

What follows "--" goes to each run; with --limit-train N, targets, and all tasks of a multi-task
run, have few examples, and the sources of a fusion all of theirs. Each number is a run in OUT/runs
(experiments/grid.py). OUT gets results.csv with a row for each of them, results.md and figure3.png,
with --limit-train N results-N.csv and so on. The paper's values are in paper_results.csv."""

from pathlib import Path

import pandas as pd

import data
from bert import Bert
from experiments import grid, report
from runtime import command

# The columns of Table 1, and the two of section 2.1
ALL_SYSTEMS = """head full st_a_2 st_a_16 st_a_64 st_a_houlsby mt_a fusion_st_a fusion_mt_a
    multitask sequential""".split()
STAGES = "head full adapter fusion multitask".split()
PAPER = Path(__file__).parent / "paper_results.csv"  # as arXiv 2005.00247v3 prints them
COMPARISONS = [(f, a) for f in ("fusion_st_a", "fusion_mt_a") for a in ("st_a_16", "mt_a")]
MEAN = "*mean*"  # in italics; no task can be called so
BARS = [(s, "full") for s in ("st_a_16", "fusion_st_a", "mt_a", "fusion_mt_a")]  # of Figure 3


def parse(argv=None):
    parser = grid.make_parser("tables", __doc__, STAGES)
    add = parser.add_argument
    add("--tasks", nargs="+", help="default: those of the paper's 16 that are in --data-dir")
    add("--systems", nargs="+", default=ALL_SYSTEMS, choices=ALL_SYSTEMS, metavar="SYSTEM")
    parser.set_defaults(seeds=[0, 1, 2])
    args = grid.parse(parser, argv)
    behind = command.Parser(add_help=False)
    behind.add_argument("--limit-train", type=command.count)  # for targets alone
    args, args.train_options = behind.parse_known_args(args.train_options, args)
    place, tasks = args.data_dir, data.TASKS
    there = [t for t in tasks if (Path(place, t).is_dir() if place else tasks[t].hub)]
    args.tasks, args.systems = ([*dict.fromkeys(x)] for x in (args.tasks or there, args.systems))
    if not args.tasks:
        raise ValueError(f"{args.data_dir} has none of the paper's tasks: name yours with --tasks")
    return args


def cell_of(args, system, task, seed, is_target=True):
    """The run of a system on a task. args.sizes: {task: its training examples}, of which a target
    may have fewer."""
    _, stage, words = grid.system(system)
    name, needs, limit = f"{system}-{task}", [], args.limit_train
    if stage == "multitask":
        name, task = system, max(args.tasks, key=args.sizes.get)  # has more than N?
        words += ["--tasks", *args.tasks]
    else:
        words += ["--task", task]
    if system == "fusion_st_a":
        needs = [cell_of(args, "st_a_16", one, seed, one == task) for one in args.tasks]
        words += ["--adapters", *(str(need.out) for need in needs)]
    if system == "fusion_mt_a":
        needs = [cell_of(args, "mt_a", task, seed)]
        mt_a = str(needs[0].out)
        words += ["--model", mt_a, "--adapters", *(f"{mt_a}/adapters/{one}" for one in args.tasks)]
    if system == "sequential":
        first = max((one for one in args.tasks if one != task), key=args.sizes.get)
        needs = [cell_of(args, "full", first, seed, False)]
        name, words = f"sequential-{first}-{task}", [*words, "--model", str(needs[0].out)]
    if is_target and limit and limit < args.sizes[task]:
        name, words = f"{name}-{limit}", [*words, "--limit-train", str(limit)]
    return grid.make_cell(args, f"{name}-{seed}", stage, [*words, "--seed", str(seed)], needs)


def cells_of(args):
    """{(task, system, seed): the run that answers it}"""
    return {
        (task, system, seed): cell_of(args, system, task, seed)
        for system in args.systems
        for task in args.tasks
        for seed in args.seeds
        if system != "sequential" or len(args.tasks) > 1
    }


# Results: DataFrames of accuracies in %, a row for each task and a column for each system


def with_mean(values, args):
    """The tasks and systems of the options, and the mean of each system that has a value for each
    task: means over different tasks cannot be compared."""
    values = values.reindex(index=args.tasks, columns=args.systems).astype(float)
    values.loc[MEAN] = values.mean(skipna=False)
    return values


def accuracy_table(args, rows, ours, theirs):
    """(rows, header) of Tables 1, 3 and 4: mean ± standard deviation (the paper's)"""
    of, lines = rows.groupby(["task", "system"])["accuracy"], []
    deviations, counts = 100 * of.std(), of.count()
    for task in ours.index:
        seeds = " or ".join(map(str, sorted({*counts.get(task, [])})))
        size = args.sizes.get(task, "")  # "": of the mean
        line = [task, size and min(size, args.limit_train or size), seeds]
        for system in args.systems:
            mean, printed = ours.at[task, system], theirs.at[task, system]
            text = report.with_deviation(mean, deviations.get((task, system)))
            line.append(text if pd.isna(printed) else f"{text} ({printed:.2f})")
        lines.append(line)
    titles = [grid.system(system)[0] for system in args.systems]
    return lines, ["task", "training examples", "seeds", *titles]


def differences(values, pairs):
    """A column "one − other" for each of the pairs of systems that are there; rounded as printed,
    so that a table's arrows agree with its numbers."""
    values, found = values.drop(MEAN).round(2), {}
    for pair in pairs:
        if {*pair} <= {*values}:
            one, other = (values[system] for system in pair)
            found[" − ".join(grid.system(system)[0] for system in pair)] = (one - other).round(2)
    return pd.DataFrame(found, index=values.index)


def arrow(difference):
    """Table 2's: better or worse by more than 0.3 points, or the same."""
    if pd.isna(difference):
        return "–"
    if abs(difference) <= 0.3:
        return "→"
    return "↗" if difference > 0 else "↘"


def figure3(path, ours, theirs):
    """Bars of differences to full fine-tuning, and below them the paper's."""
    figure, panels = report.subplots(2, 1, (max(6.5, 0.75 * len(ours)), 7), sharex=True)
    for axes, title, values in zip(panels, ("here", "the paper's"), (ours, theirs), strict=True):
        style = {"title": title, "ylabel": "accuracy, points", "width": 0.8}
        differences(values, BARS).plot.bar(ax=axes, **style)
    report.save_figure(figure, path)


def write_results(args, rows, encoder):
    """All files in OUT, of what is finished."""
    suffix = f"-{args.limit_train}" if args.limit_train else ""
    ours = with_mean(100 * rows.pivot_table("accuracy", "task", "system"), args)
    papers = pd.read_csv(PAPER, index_col="task")  # of BERT-base, and of RoBERTa-base (Table 4)
    theirs = with_mean(papers[papers["encoder"].str.startswith(encoder)], args)
    parts = [
        f"## {'Table 4' if encoder == 'roberta' else 'Tables 1 and 3'}",
        "In brackets: the paper's. The means, too, are over the tasks listed here.",
        report.markdown(*accuracy_table(args, rows, ours, theirs)),
    ]
    arrows = differences(ours, COMPARISONS).map(arrow)
    if not arrows.empty:
        arrows += " (" + differences(theirs, COMPARISONS).map(arrow) + ")"
        parts += [
            "## Table 2: fusion compared to adapters alone",
            report.markdown(arrows.reset_index().to_numpy().tolist(), ["compared", *arrows]),
            "↗ better by more than 0.3 points, ↘ worse by more than 0.3, → between. In brackets: "
            "the same rule, applied to the accuracies that the paper prints.",
        ]
    if not differences(ours, BARS).empty:
        figure3(args.out / f"figure3{suffix}.png", ours, theirs)
        parts += [f"## Figure 3: difference to full fine-tuning\n\n![](figure3{suffix}.png)"]
    grid.write_results(args, f"results{suffix}", rows, parts)


def main(argv=None):
    args = parse(argv)
    args.sizes = grid.train_examples(args, args.tasks)
    encoder = Bert.from_pretrained(args.model).config.model_type  # if it is damaged, found now
    rows, failed = grid.run(args, ["task", "system", "seed"], cells_of(args))
    write_results(args, rows, encoder)
    grid.end(failed)


if __name__ == "__main__":
    command.run_command("tables", main)
