"""Does fusing help on your task, and what should be fused? A fusion beside every control.

    python -m experiments.composition --target rte --sources mnli qqp sst2 --data-dir DATA \\
        --out runs/composition --seeds 0 1 2
    python -m experiments.composition --target mine --sources runs/mnli AdapterHub/SOME-ADAPTER \\
        -- --train-file mine.csv --dev-fraction 0.2 --columns text_a=review label=stars

A source is a task, whose adapter is trained here, once, or an adapter: a run, an AdapterHub
directory, a hub id, each also as NAME=DIR. If a source is given as an adapter, the systems that
need its data (sequential, multitask) are left out; multitask with --train-examples, too, since it
has no limit for the target alone.

Each number is a run in OUT/runs (experiments/grid.py): the same command again skips what is
finished and continues what was interrupted. OUT gets composition.csv with a row for every run of
this command, composition.png, and composition.md with the tables and what follows from them; what
its fusions attend to is shown by experiments.fusion_weights.

The development set chooses the best epoch, so its accuracies are too high by a little. With --test
every run is also evaluated on the training examples that --train-examples leaves out, on which
nothing was chosen; the tables then show these accuracies.
"""

from pathlib import Path
from typing import NamedTuple

import pandas as pd

import train
from bert import Bert
from experiments import grid, report
from experiments.load_run import load_run
from formats.files import read_json, write_json
from runtime.command import count, run_command
from runtime.record import read_run
from runtime.seen import share_seen

OWN = "own"  # the system whose adapter others fuse


def parse(argv=None):
    stages = "adapter head full fusion multitask".split()
    parser = grid.make_parser("composition", __doc__, "runs/composition", stages)
    add, several = parser.add_argument, {"nargs": "+", "default": []}
    sources = "tasks, or adapters: directories (with a slash: ./mine) or hub ids"
    sizes = "of the target's training set, drawn with the seed; default all"
    add("--target", required=True, help="one of the paper's tasks, or your own")
    add("--sources", nargs="+", required=True, help=sources)
    add("--irrelevant", metavar="SOURCE", help="one more source, which should not help")
    add("--systems", **several, metavar="SYSTEM", help="default all; a wrong one lists them")
    add("--train-examples", **several, type=count, metavar="N", help=f"sizes {sizes}")
    add("--test", action="store_true", help="also on the training examples that are left out")
    return grid.parse(parser, argv, [*grid.OWNED, "--limit-train"])


def label_of(source):
    """What a source is called: its task, NAME of NAME=DIR, or the last part of its path or id."""
    name, is_named, _ = source.partition("=")
    return name if is_named and not Path(source).is_dir() else Path(source).name


def is_adapter(source):
    """Whether a source is an adapter, not a task."""
    return "/" in source


class System(NamedTuple):
    title: str
    stage: str
    adapters: list = ()  # that it takes: labels of sources, or OWN
    words: list = ()  # options that make the system what it is


def systems(args):
    """{name: System}"""
    names = [label_of(source) for source in args.sources]
    mean = ["--import", *args.imports, "examples.mean_fusion", "--fusion", "mean"]
    found = {
        "head": System("new head on Θ", "head"),
        "own": System("the target's own adapter", "adapter"),
        "own_same_epochs": System("own adapter, as many epochs as the fusion", "adapter"),
        "full": System("full fine-tuning", "full"),
    }
    found |= {f"head_on_{n}": System(f"new head on {n}", "head", [n]) for n in names}
    if not any(map(is_adapter, args.sources)):  # these need the sources' data
        found["sequential"] = System("full fine-tuning on each source, then the target", "full")
        if not args.train_examples:
            found["multitask"] = System("sources and target, trained jointly", "multitask")
    own = [*names, OWN]
    found |= {
        "mean": System("even weights of the sources", "fusion", names, mean),
        "mean_with_own": System("even weights of the sources and own", "fusion", own, mean),
        "fusion": System("fusion of the sources", "fusion", names),
        "fusion_with_own": System("fusion of the sources and own", "fusion", own),
        "fusion_of_own": System("fusion of own alone", "fusion", [OWN]),
    }
    for left_out in names if len(names) > 1 else []:
        others = [name for name in names if name != left_out]
        title = f"fusion without {left_out}"
        found[f"fusion_without_{left_out}"] = System(title, "fusion", others)
    if args.irrelevant:
        more = [*names, label_of(args.irrelevant)]
        found["fusion_with_irrelevant"] = System(f"fusion with {more[-1]}, too", "fusion", more)
    return found


# --------------------------------------------------------------------------------------------------
# The runs


class Study:
    """
    cells: {name: cell}, each after those that it needs; places: {(system, training examples or
    None, seed): name of the cell}
    """

    def __init__(self, args):
        self.args, self.cells, self.places, self.systems = args, {}, {}, systems(args)
        if unknown := [name for name in args.systems if name not in self.systems]:
            known = ", ".join(self.systems)
            raise ValueError(f"--systems {unknown[0]!r:.50}: there are {known}")
        words = ["--task", args.target, "--adapters", "any"]
        self.options = grid.cell(args, "fusion", "fusion", words).options  # of every fusion
        self.target_size = size = grid.train_examples(args, [args.target])[args.target]
        if (asked := max(args.train_examples, default=size)) > size:
            raise ValueError(f"--train-examples {asked}: {args.target} has only {size}")
        if args.test and asked == size:
            raise ValueError(f"--test needs --train-examples below {size}: nothing is left over")
        self.sources = {}  # {label: source}
        for source in filter(None, [*args.sources, args.irrelevant]):
            label = label_of(source)
            if label in (OWN, args.target, *self.sources):
                advice = f"NAME={source} gives this one another name"
                raise ValueError(f"two adapters would be called {label!r}: {advice}")
            if self.options.train_file and not is_adapter(source):
                problem = f"--train-file is of {args.target}, {source} would be trained on it, too"
                raise ValueError(f"{problem}: take a finished run as the source, runs/{source}")
            self.sources[label] = source
        for size in args.train_examples or [None]:
            for seed in args.seeds:
                for system in args.systems or self.systems:
                    self.places[system, size, seed] = self.of_system(system, size, seed)

    def of_system(self, system, size, seed):
        """The name of the cell of a system, which is added with those that it needs."""
        args, (_, stage, adapters, last) = self.args, self.systems[system]
        words, needs = ["--task", args.target], []
        words += ["--limit-train", str(size)] if size else []
        words += ["--adapters"] if adapters else []
        for label in adapters:
            directory, needed = self.adapter(label, size, seed)
            words, needs = [*words, directory], [*needs, *needed]
        if system == "sequential":
            for source in args.sources:
                before = ["--model", self.out(needs[0])] if needs else []
                given = ["--task", source, *before]
                needs = [self.add(f"full-{source}", "full", given, args.seeds[0], needs)]
            words += ["--model", self.out(needs[0])]
        if system == "multitask":
            words = ["--tasks", *args.sources, args.target, "--without-adapters"]
        if system == "own_same_epochs":
            epochs = str(self.options.epochs)
            words += ["--epochs", epochs, "--patience", epochs]
        name = "-".join(map(str, filter(None, [system, size]))) + f"-{seed}"
        return self.add(name, stage, [*words, *last], seed, needs)

    def adapter(self, label, size, seed):
        """(directory, cells that it needs) of the target's own adapter, or of a source's"""
        if label != OWN and is_adapter(self.sources[label]):
            return self.sources[label], []
        if label == OWN:
            name = self.of_system(OWN, size, seed)
        else:  # which all seeds share
            name = self.add(f"source-{label}", "adapter", ["--task", label], self.args.seeds[0])
        return self.out(name), [name]

    def add(self, name, stage, words, seed, needs=()):
        words = [*words, "--seed", str(seed)]
        self.cells[name] = grid.cell(self.args, name, stage, words, needs)
        return name

    def out(self, name):
        return str(self.cells[name].out)


# --------------------------------------------------------------------------------------------------
# Results


def left_over_accuracy(study, name):
    """On the training examples that a run was not given; computed once, and kept in a file."""
    run, path = study.cells[name].out, study.args.out / "test" / f"{name}.json"
    if path.is_file() and path.stat().st_mtime > (run / "metrics.json").stat().st_mtime:
        return read_json(path)["accuracy"]
    loaded = load_run(run, study.options.device, task=study.args.target)
    examples = loaded.left_over()
    labels, predicted, _ = train.predict(loaded.model, loaded.task, examples, loaded.args)
    accuracy = loaded.task.scores["accuracy"](labels, predicted)
    print(f"{name}: {100 * accuracy:.2f} % of {len(examples)} left-over examples", flush=True)
    for adapter, directory in loaded.args.adapters.items():
        for task in read_run(directory).get("tasks", {}).values():
            if (share := share_seen(examples, task["sketch"])) >= 0.05:
                print(f"WARNING: {name}: {adapter} was TRAINED on {share:.0%} of them", flush=True)
    path.parent.mkdir(exist_ok=True)
    write_json(path, {"accuracy": accuracy})
    return accuracy


def rows_of(study, results):
    """A row for every finished run, as a DataFrame."""
    rows, target = [], study.args.target
    for (system, size, seed), name in study.places.items():
        if result := results.get(name):
            run = read_run(study.cells[name].out)
            row = {"target": target, "train_examples": size or study.target_size}
            row |= {"system": system, "seed": seed, "accuracy": grid.accuracy(result, target)}
            row |= {"test_accuracy": left_over_accuracy(study, name)} if study.args.test else {}
            row |= {"best_epoch": result["best_epoch"], "epochs": run["options"]["epochs"]}
            row |= {"lr": run["options"]["lr"], "trained_parameters": result["trained_parameters"]}
            row |= {key: run["machine"][key] for key in ("processor", "commit")}
            rows.append(row)
    return pd.DataFrame(rows)


def points_of(rows, column=None):
    """Accuracies in %, a row for each seed and a column for each system, of rows of one size.
    column: default the left-over examples' where they were asked for, else the development set's"""
    column = column or ("test_accuracy" if "test_accuracy" in rows else "accuracy")
    points = 100 * rows.pivot(index="seed", columns="system", values=column)
    return points[rows["system"].unique()]


def table(systems, rows):
    """(rows, header) of the systems on one size of the target's training set. systems: {name:
    System}"""
    points, on_dev, lines = points_of(rows), points_of(rows, "accuracy").mean(), []
    for system in points:
        first, values = rows[rows["system"] == system].iloc[0], points[system].dropna()
        lead = (points["fusion"] - values).dropna() if "fusion" in points else values[:0]
        line = [systems[system].title, f"{first['lr']:g}", str(first["epochs"])]
        line += [f"{first['trained_parameters']:,}", ", ".join(f"{v:.1f}" for v in values)]
        line.append(report.with_deviation(*report.mean_and_deviation(values)))
        line += [lead.mean(), lead.min()] if system != "fusion" else [None, None]
        lines.append(line + [on_dev[system]] * ("test_accuracy" in rows))
    header = "system,lr,epochs,trained parameters,by seed,mean,fusion minus it,at the least"
    return lines, [*header.split(","), *["development set"] * ("test_accuracy" in rows)]


def conclusion(systems, rows):
    """One sentence: which system won, over which control, and by how much."""
    points = points_of(rows).dropna()  # of the seeds with which all systems have run
    if points.empty:
        return "No seed has run with every system, so there is nothing to compare."
    means = points.mean()
    composed = [name for name in points if len(systems[name].adapters) > 1]
    controls = [name for name in points if name not in composed]
    if not composed or not controls:
        return "There is no fusion of several adapters, or no control, to compare."
    winner, other, kind = means[composed].idxmax(), means[controls].idxmax(), "the best control"
    if means[winner] <= means[other]:
        winner, other, kind = other, winner, "the best fusion of several adapters"
    lead, over = points[winner] - points[other], "with one seed"
    if len(lead) > 1:
        over = f"in the mean over {len(lead)} seeds, by {lead.min():.1f} at the least"
    ahead = f"ahead of {kind} ({systems[other].title}) by {lead.mean():.1f} points {over}"
    return f"Best is: {systems[winner].title}, {ahead}."


def figure(path, study, rows):
    """Accuracies of the systems, a dot for each seed, those of fusions in another colour; a panel
    for each size of training set."""
    sizes = sorted(rows["train_examples"].unique())
    names = [name for name in study.systems if name in {*rows["system"]}][::-1]
    size = (3 + 3.2 * len(sizes), 1.2 + 0.3 * len(names))
    shape, panels = report.subplots(1, len(sizes), size, sharey=True, squeeze=False)
    for axes, train_examples in zip(panels.flat, sizes, strict=True):
        for name, values in points_of(rows[rows["train_examples"] == train_examples]).items():
            y, several = names.index(name), len(study.systems[name].adapters) > 1
            colour = "tab:orange" if several else "tab:blue"
            axes.plot(values, [y] * len(values), "o", color=colour, alpha=0.5)
            axes.plot(values.mean(), y, "|", color="black", markersize=14)
        axes.set(title=f"{train_examples} training examples", xlabel="accuracy, %")
        axes.grid(axis="x", alpha=0.3)
    panels.flat[0].set_yticks(range(len(names)), [study.systems[name].title for name in names])
    report.save_figure(shape, path)


def write_results(study, results, config):
    """All files in OUT; prints the tables."""
    out, rows, measured_on = study.args.out, rows_of(study, results), "the development set"
    report.write_text(out / "composition.csv", rows.to_csv(index=False))
    figure(out / "composition.png", study, rows)
    if study.args.test:
        left_out = "the training examples that the run was not given"
        measured_on = f"{left_out}; in the last column, on the development set"
    more = "The two columns after the mean: the fusion of the sources minus the system, over the "
    more += "seeds that both have, in the mean and at the least."
    caption = grid.caption(study.args, config, more, measured_on)
    parts = [f"# What to fuse for {study.args.target}", "", caption, ""]
    for size, of_size in rows.groupby("train_examples"):
        shown, said = table(study.systems, of_size), conclusion(study.systems, of_size)
        parts += [f"## {size} training examples", "", report.markdown(*shown), said, ""]
        print("", f"{size} training examples", *report.table(*shown), "", said, sep="\n")
    parts += ["![Accuracy of each system](composition.png)", ""]
    print("", report.write_text(out / "composition.md", "\n".join(parts)), sep="\n", flush=True)


def main(argv=None):
    args = parse(argv)
    alone = [source for source in args.sources if is_adapter(source)]
    if alone and not args.systems:
        print(f"left out: sequential and multitask need the data of {', '.join(alone)}")
    study = Study(args)
    cells = [*study.cells.values()]
    if args.plan:
        return grid.print_plan(cells, args)
    config = Bert.from_pretrained(args.model).config  # if it is damaged, that is found now
    results, failed = grid.run(cells, args)
    if results.keys() & {*study.places.values()}:
        write_results(study, results, config)
    grid.end(failed)


if __name__ == "__main__":
    run_command("composition", main)
