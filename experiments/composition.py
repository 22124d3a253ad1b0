"""Does fusing help on your task, and what should be fused? A fusion beside every control.

    python -m experiments.composition --target rte --sources mnli qqp sst2 --data-dir DATA \\
        --out runs/composition --seeds 0 1 2
    python -m experiments.composition --target mine --sources runs/mnli AdapterHub/SOME-ADAPTER \\
        -- --train-file mine.csv --dev-fraction 0.2 --columns text_a=review label=stars

A source is a task, whose adapter is trained here, once, or an adapter: a run, an AdapterHub
directory, a hub id, each also as NAME=DIR.

Each number is a run in OUT/runs (experiments/grid.py). OUT gets composition.csv with a row for
every run of this command, and composition.md with the tables, and what the development set chooses
among the new heads, the target's own adapter, the fusion of the sources, and that with own.

The development set chooses the best epoch, so its accuracies are too high by a little. With --test
every run is also evaluated on the training examples that --train-examples leaves out, on which
nothing was chosen; the tables then show these accuracies."""

import itertools
import math
from pathlib import Path

import train
from adapter import load_adapter
from bert import Bert
from data import get_task
from experiments import grid, report
from experiments.load_run import load_run
from formats.adapterhub import read_run
from formats.files import read_json, write_json
from formats.rows import source_of
from formats.sources import find_adapters, named
from runtime.command import count, run_command
from runtime.record import share_trained_on

OWN = None  # stands for the target's own adapter among the names of sources
COLUMNS = "task system limit_train seed".split()


def parse(argv=None):
    parser = grid.make_parser("composition", __doc__, "adapter head full fusion".split())
    add, several = parser.add_argument, {"nargs": "+", "default": []}
    sources = "tasks, or adapters: directories (with a slash: ./mine) or hub ids"
    sizes = "of the target's training set, drawn with the seed; default all"
    add("--target", required=True, help="one of the paper's tasks, or your own")
    add("--sources", nargs="+", required=True, help=sources)
    add("--systems", **several, metavar="SYSTEM", help="default all; a wrong one lists them")
    add("--train-examples", **several, type=count, metavar="N", help=f"sizes {sizes}")
    add("--test", action="store_true", help="also on the training examples that are left out")
    args = grid.parse(parser, argv, [*grid.OWNED, "--limit-train"])  # it is --train-examples
    # {name: the place of an adapter, which has a slash, or None for a task}
    sources = [named(source) if "/" in source else (source, None) for source in args.sources]
    sources = [(name or Path(place).name, place) for name, place in sources]
    names = [name.lower() for name in (args.target, *(name for name, _ in sources))]
    if twice := [name for name in names if names.count(name) > 1]:
        advice = "NAME=DIR gives a source another name"
        raise ValueError(f"two adapters would be called {twice[0]!r}: {advice}")
    args.sources = dict(sources)
    known = systems(args)
    if unknown := [name for name in args.systems if name not in known]:
        raise ValueError(f"--systems {unknown[0]!r:.50}: there are {', '.join(known)}")
    args.systems = args.systems or [*known]
    return args


def systems(args):
    """{system: the adapters that it takes, names of sources or OWN}"""
    names = [*args.sources]
    found = {"head": [], **{f"head_on_{name}": [name] for name in names}, "own": [], "full": []}
    found |= {"mean": names, "mean_with_own": [*names, OWN]}
    found |= {"fusion": names, "fusion_with_own": [*names, OWN], "fusion_of_own": [OWN]}
    if len(names) > 1:
        found |= {f"fusion_without_{n}": [name for name in names if name != n] for n in names}
    return found


def check(args):
    """Raises ValueError for what would give a wrong result."""
    options = grid.make_cell(args, "full", "full", ["--task", args.target]).options()
    adapters = [f"{name}={place}" for name, place in args.sources.items() if place]
    tasks = [name for name, place in args.sources.items() if place is None]
    if tasks and options.train_file:
        problem = f"--train-file is of {args.target}, {tasks[0]} would be trained on it, too"
        raise ValueError(f"{problem}: take a finished run as the source, runs/{tasks[0]}")
    for name in tasks:
        get_task(name, source_of(options))  # or an error: a run is named with a slash
    size = grid.train_examples(args, [args.target])[args.target]
    if (asked := max(args.train_examples, default=size)) > size:
        raise ValueError(f"--train-examples {asked}: {args.target} has only {size}")
    if args.test and asked == size:
        raise ValueError(f"--test needs --train-examples below {size}: nothing is left over")
    if adapters:  # must all be there, and for the encoder
        bert = Bert.from_pretrained(args.model)
        for name, found in find_adapters(adapters, bert.config.model_type).items():
            load_adapter(bert, found, name)


def cells_of(args):
    """{a place in COLUMNS: its run}"""
    places = itertools.product(args.systems, args.train_examples or [None], args.seeds)
    return {(args.target, *place): cell_of(args, *place) for place in places}


def cell_of(args, system, size, seed):
    """The run of a system on so many training examples, with the runs that it needs."""
    _, stage, words = grid.system(system)
    names, needs, places = systems(args)[system], {}, {}
    for name in names:
        if name is OWN:
            needs[name] = cell_of(args, "own", size, seed)
        elif args.sources[name] is None:  # a task, whose adapter all seeds share
            given = ["--task", name, "--seed", str(args.seeds[0])]
            needs[name] = grid.make_cell(args, f"source-{name}", "adapter", given)
        places[name] = needs[name].out if name in needs else f"{name}={args.sources[name]}"
    words += ["--task", args.target, "--seed", str(seed)]
    words += ["--adapters", *map(str, places.values())] if names else []
    words += ["--limit-train", str(size)] if size else []
    name = "-".join(str(part) for part in (system, size, seed) if part is not None)
    return grid.make_cell(args, name, stage, words, needs.values())


def left_over_accuracy(args, cell):
    """On the training examples that a run was not given; computed once, and kept in a file."""
    path, metrics = args.out / "test" / f"{cell.name}.json", read_json(cell.out / "metrics.json")
    if path.is_file() and (kept := read_json(path))["of"] == metrics:
        return kept["accuracy"]
    run = load_run(cell.out, cell.options().device, task=args.target)
    examples = run.left_over()
    scores = train.evaluate(run.model, run.task, examples, run.args)
    accuracy = scores.get("accuracy", math.nan)
    print(f"{cell.name}: {100 * accuracy:.2f} % of {len(examples)} left-over examples", flush=True)
    for name in run.record["adapters"]:
        if share := share_trained_on(read_run(cell.out / "adapters" / name), examples):
            print(f"WARNING: {cell.name}: {name} was TRAINED on {share:.0%} of them")
    write_json(path, {"accuracy": accuracy, "of": metrics})
    return accuracy


def points_of(rows, column=None):
    """Accuracies in %, a row for each seed and a column for each system, of rows of one size.
    column: default the left-over examples' where they were asked for, else the development set's"""
    column = column or ("test_accuracy" if "test_accuracy" in rows else "accuracy")
    points = 100 * rows.pivot(index="seed", columns="system", values=column)
    return points[rows["system"].unique()]


def table(rows):
    """(rows, header) of the systems on one size of the target's training set"""
    points, on_dev, lines = points_of(rows), points_of(rows, "accuracy").mean(), []
    for system in points:
        first, values = rows[rows["system"] == system].iloc[0], points[system].dropna()
        is_compared = system != "fusion" and "fusion" in points
        lead = (points["fusion"] - values).dropna() if is_compared else values[:0]
        line = [grid.system(system)[0], f"{first['lr']:g}", str(first["epochs"])]
        line += [f"{first['trained_parameters']:,}", ", ".join(f"{v:.1f}" for v in values)]
        line.append(report.with_deviation(values.mean(), values.std()))
        line += [lead.mean(), lead.min()]
        lines.append(line + [on_dev[system]] * ("test_accuracy" in rows))
    header = "system,lr,epochs,trained parameters,by seed,mean,fusion minus it,at the least"
    return lines, [*header.split(","), *["development set"] * ("test_accuracy" in rows)]


def choices(rows):
    """(rows, header): what the development set of each seed chooses, how far ahead it is of the
    second, the standard error of that, and how both did on the examples left over"""
    kinds, lines = "head|head_on_.*|own|fusion|fusion_with_own", []
    for seed, of_seed in rows[rows["system"].str.fullmatch(kinds)].groupby("seed"):
        if len(of_seed) > 1:
            both = of_seed.nlargest(2, "accuracy")  # ties keep the order
            first, second = both.to_dict("records")
            variances = both["accuracy"] * (1 - both["accuracy"]) / both["dev_examples"]
            titles = [grid.system(system)[0] for system in both["system"]]
            margin = 100 * (first["accuracy"] - second["accuracy"])
            lines.append([str(seed), *titles, margin, 100 * math.sqrt(variances.sum())])
            if "test_accuracy" in rows:
                accuracy = first["test_accuracy"]
                lines[-1] += [100 * accuracy, 100 * (accuracy - second["test_accuracy"])]
    header = "seed,the development set chooses,ahead of,by,standard error"
    left_over = ["left-over accuracy", "minus the second's"] * ("test_accuracy" in rows)
    return lines, [*header.split(","), *left_over]


def main(argv=None):
    args = parse(argv)
    check(args)
    cells = cells_of(args)
    rows, failed = grid.run(args, COLUMNS, cells)
    parts = [
        "The two columns after the mean: the fusion of the sources minus the system, over the "
        "seeds that both have, in the mean and at the least. In the last table, the standard error "
        "is that of two independent accuracies; on the same examples it is smaller."
    ]
    if args.test:
        finished = [cells[place] for place in rows[COLUMNS].itertuples(index=False, name=None)]
        rows["test_accuracy"] = [left_over_accuracy(args, cell) for cell in finished]
        parts.append("Measured on left-over training examples; the development set's are named so.")
    for size, of_size in rows.groupby("train_examples"):
        tables = report.markdown(*table(of_size)), report.markdown(*choices(of_size))
        parts += [f"## {size} training examples", *tables]
    grid.write_results(args, "composition", rows, parts)
    grid.end(failed)


if __name__ == "__main__":
    run_command("composition", main)
