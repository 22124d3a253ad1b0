"""Does fusing help on your task, and what should be fused? A fusion beside every control.

    python -m experiments.composition --target rte --sources mnli qqp sst2 --data-dir DATA \\
        --out runs/composition --seeds 0 1 2
    python -m experiments.composition --target mine --sources runs/mnli AdapterHub/SOME-ADAPTER

A source is a task, whose adapter is trained here, once, or an adapter: a run, an AdapterHub
directory, a hub id. If a source is given as an adapter, the systems that need its data (sequential,
multitask) are skipped, with a note; multitask with --train-examples, too, since it has no limit for
the target alone.

Each number is a run in OUT/runs (experiments/grid.py): the same command again skips what is
finished and continues what was interrupted. OUT gets composition.csv with a row for every run of
this command, weights.csv with the weights of its fusions, composition.png, and composition.md with
the tables and what follows from them.

The development set chooses the best epoch, so its accuracies are too high by a little. With --test
every run is also evaluated on the training examples that --train-examples leaves out, on which
nothing was chosen; the tables then show these accuracies.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pandas as pd

import train
from experiments import grid, report
from experiments.fusion_weights import mean_weights_as_trained
from experiments.load_run import as_trained, load_run
from experiments.report import mean_and_deviation
from formats.files import file_digest, read_json, write_json
from fusion import fusions
from runtime.command import run_command
from runtime.record import read_record
from runtime.seen import NOTABLE, hashes_of, share_seen
from runtime.settings import COUNT, option, parse, unrecorded


@dataclass(frozen=True)
class Options(grid.Options):
    target: str = option(None, "one of the paper's tasks, or your own", required=True)
    sources: tuple = option(
        (), "tasks, or adapters: directories (with a slash: ./mine) or hub ids", required=True
    )
    irrelevant: str | None = option(None, "one more source, which should not help")
    systems: tuple = option(
        (), "such as own fusion mean (--systems ? lists all); default all", metavar="SYSTEM"
    )
    train_examples: tuple[int, ...] = option(
        (), "sizes of the target's training set, drawn with the seed; default all", valid=COUNT
    )
    test: bool = option(False, "also evaluate on the training examples that are left out")
    out: Path = unrecorded(Path("runs/composition"), "default runs/composition")
    adapter_options: str = grid.stage_options("adapter")
    head_options: str = grid.stage_options("head")
    full_options: str = grid.stage_options("full")
    fusion_options: str = grid.stage_options("fusion")
    multitask_options: str = grid.stage_options("multitask")


OWN = "own"  # a system whose adapter other systems fuse


def label_of(source):
    """What a source is called: its task, or the last part of its path or hub id."""
    return Path(source).name


def is_adapter(source):
    """Whether a source is an adapter, not a task."""
    return "/" in source


class System(NamedTuple):
    title: str
    stage: str
    adapters: tuple = ()  # that it takes: labels of sources, or OWN
    words: tuple = ()  # options that make the system what it is, so they override the user's


def systems(options):
    """{name: System}"""
    names = [label_of(source) for source in options.sources]
    modules = ",".join(filter(None, [options.imports, "examples.mean_fusion"]))
    mean = ["--import", modules, "--fusion", "mean"]
    found = {
        "head": System("new head on Θ", "head"),
        "own": System("the target's own adapter", "adapter"),
        "own_same_epochs": System("own adapter, as many epochs as the fusion", "adapter"),
        "full": System("full fine-tuning", "full"),
    }
    found |= {f"head_on_{n}": System(f"new head on {n}", "head", [n]) for n in names}
    if not any(map(is_adapter, options.sources)):  # these need the sources' data
        found["sequential"] = System("full fine-tuning on each source, then the target", "full")
        if not options.train_examples:
            found["multitask"] = System("sources and target, trained jointly", "multitask")
    found |= {
        "mean": System("even weights of the sources", "fusion", names, mean),
        "mean_with_own": System(
            "even weights of the sources and own", "fusion", [*names, "own"], mean
        ),
        "fusion": System("fusion of the sources", "fusion", names),
        "fusion_with_own": System("fusion of the sources and own", "fusion", [*names, "own"]),
        "fusion_of_own": System("fusion of own alone", "fusion", ["own"]),
    }

    for left_out in names if len(names) > 1 else []:
        others = [name for name in names if name != left_out]
        title = f"fusion without {left_out}"
        found[f"fusion_without_{left_out}"] = System(title, "fusion", others)
    if options.irrelevant:
        more = [*names, label_of(options.irrelevant)]
        found["fusion_with_irrelevant"] = System(f"fusion with {more[-1]}, too", "fusion", more)
    return found


# --------------------------------------------------------------------------------------------------
# The runs


class Study:
    """
    cells: {name: cell}, each after those that it needs; places: {(system, training examples or
    None, seed): name of the cell}
    """

    def __init__(self, options):
        grid.check_owned(options, ["--limit-train"])
        self.options, self.cells, self.places = options, {}, {}
        self.systems = systems(options)
        if unknown := [name for name in options.systems if name not in self.systems]:
            known = ", ".join(self.systems)
            raise ValueError(f"--systems {unknown[0]!r:.50}: there are {known}")
        size = grid.train_examples([options.target], options.data_dir)[options.target]
        self.target_size, asked = size, max(options.train_examples, default=size)
        if asked > size:
            raise ValueError(f"--train-examples {asked}: {options.target} has only {size}")
        if options.test and asked == size:
            raise ValueError(f"--test needs --train-examples below {size}: nothing is left over")
        self.adapters = {}  # {label of a source: (directory, cells that it needs)}
        for source in filter(None, [*options.sources, options.irrelevant]):
            label = label_of(source)
            if label == OWN:
                raise ValueError(f"a source cannot be called {label!r}: that is a system's name")
            if label in (*self.adapters, options.target):
                raise ValueError(f"two adapters would be called {label!r}")
            self.adapters[label] = source, ()
            if not is_adapter(source):
                name = self.add(f"source-{source}", "adapter", source)
                self.adapters[source] = str(self.cells[name].out), [name]
        for size in options.train_examples or [None]:
            for seed in options.seeds:
                for system in options.systems or self.systems:
                    self.places[system, size, seed] = self.of_system(system, size, seed)

    def of_system(self, system, size, seed):
        _, stage, adapters, last = self.systems[system]
        options, model, needs, given = self.options, None, [], []
        for adapter in adapters:
            if adapter == OWN:
                own = self.of_system(adapter, size, seed)
                directory, needed = str(self.cells[own].out), [own]
            else:
                directory, needed = self.adapters[adapter]
            given, needs = [*given, directory], [*needs, *needed]
        if system == "sequential":
            for source in options.sources:
                name = self.add(f"full-{source}", "full", source, needs, model)
                model, needs = str(self.cells[name].out), [name]
        if system == "multitask":
            words = ["--tasks", *options.sources, options.target, "--adapter", "none"]
        else:
            words = ["--task", options.target]
            words += ["--adapters", *given] if given else []
            words += ["--limit-train", str(size)] if size else []
        if system == "own_same_epochs":
            epochs = str(self.fusion_epochs())
            last = ["--epochs", epochs, "--patience", epochs]
        name = "-".join(map(str, filter(None, [system, size]))) + f"-{seed}"
        self.cells[name] = grid.cell(options, name, stage, words, seed, model, needs, last)
        return name

    def add(self, name, stage, source, needs=(), model=None):
        """A run on a source, which all seeds share. Returns its name."""
        options = self.options
        words, seed = ["--task", source], options.seeds[0]
        self.cells[name] = grid.cell(options, name, stage, words, seed, model, needs)
        return name

    def fusion_epochs(self):
        words = ["--stage", "fusion", "--task", self.options.target, "--adapters", "any"]
        given = shlex.split(self.options.train_options) + shlex.split(self.options.fusion_options)
        settings = parse(
            train.Settings, [*words, "--model", self.options.model, *given], "train.py", ""
        )
        return settings.with_defaults().epochs


# --------------------------------------------------------------------------------------------------
# Results


def measured(study, name):
    """
    What is computed once for a finished run, and kept in OUT/measured: of a fusion the names of its
    "adapters", and their "weights" on the development set, {tokens: [[layer, location, [N]]]}; with
    --test the "test_accuracy" on the training examples that the run was not given, and the number
    of these "test_examples".
    """
    run, path = study.cells[name].out, study.options.out / "measured" / f"{name}.json"
    found, made_from = {}, file_digest(run / "metrics.json")
    if path.is_file():
        found = read_json(path)
    test = study.options.test
    if found.get("metrics") == made_from and (not test or "test_accuracy" in found):
        return found
    loaded, found = load_run(run, task=study.options.target), {"metrics": made_from}
    model = as_trained(loaded, "cpu" if loaded.record.device == "cpu" else "auto")
    data_dir = study.options.data_dir
    if fusions(model.bert):
        dev_set = loaded.split(data_dir=data_dir)
        weights = mean_weights_as_trained(model, dev_set, ("all", "cls"), name)
        found["adapters"] = loaded.adapters
        found["weights"] = {
            tokens: [[*place, s.tolist()] for place, s in sorted(of.items())]
            for tokens, of in weights.items()
        }
    if test:
        examples, size = loaded.left_over(data_dir), loaded.eval_batch_size
        if not len(examples):
            raise ValueError(f"--test: {name} was trained on all examples, so none is left over")
        for adapter, of in loaded.record.loaded_adapters.items():
            share = of.sketch and share_seen(hashes_of(examples), of.sketch)
            if (share or 0) >= NOTABLE:
                left = f"{share:.0%} of the left-over examples"
                print(f"WARNING: {name}: adapter {adapter} was TRAINED on {left}", flush=True)
        # not train.evaluate, which --import may have replaced
        labels, predicted, _ = train.predictions(model, loaded.task, examples, size)
        found["test_accuracy"] = loaded.task.scores["accuracy"](labels, predicted)
        found["test_examples"] = len(examples)
        percent = 100 * found["test_accuracy"]
        print(f"{name}: {percent:.2f} % on {len(examples)} left-over examples", flush=True)
    path.parent.mkdir(exist_ok=True)
    write_json(path, found)
    return found


def rows_of(study, results):
    """A row for every finished run, as a DataFrame."""
    test, target, rows = study.options.test, study.options.target, []
    for (system, size, seed), name in study.places.items():
        if name not in results:
            continue
        result, record = results[name], read_record(study.cells[name].out)
        tested = {"test_accuracy": measured(study, name)["test_accuracy"]} if test else {}
        rows.append(
            {
                "target": target,
                "train_examples": size or study.target_size,
                "system": system,
                "seed": seed,
                "accuracy": grid.accuracy(result, target),
                **tested,
                "best_epoch": result["best_epoch"],
                "epochs": record.options["epochs"],
                "lr": record.options["lr"],
                "trained_parameters": result["trained_parameters"],
                "processor": record.processor,
                "commit": record.commit,
            }
        )
    return pd.DataFrame(rows)


def by_seed(rows, column=None):
    """{system: {seed: accuracy in %}}, in the order of the rows, which are of one size. column:
    default the left-over examples' where they were asked for, else the development set's"""
    column = column or ("test_accuracy" if "test_accuracy" in rows else "accuracy")
    return {
        system: dict(zip(of["seed"], 100 * of[column], strict=True))
        for system, of in rows.groupby("system", sort=False)
    }


def gain(accuracies, system, other):
    """(mean, least) of the differences between two systems, seed by seed; (None, None) if no seed
    has run with both"""
    both = accuracies[system].keys() & accuracies[other].keys()
    differences = [accuracies[system][seed] - accuracies[other][seed] for seed in both]
    return (mean_and_deviation(differences)[0], min(differences)) if both else (None, None)


def table(systems, rows):
    """(rows, header) of the systems on one size of the target's training set. systems: {name:
    System}"""
    accuracies, lines = by_seed(rows), []
    for system, of_seeds in accuracies.items():
        first = rows[rows["system"] == system].iloc[0]
        difference, least = None, None
        if "fusion" in accuracies and system != "fusion":
            difference, least = gain(accuracies, "fusion", system)
        budget = f"{first['lr']:g}", str(first["epochs"]), f"{first['trained_parameters']:,}"
        values = ", ".join(f"{value:.1f}" for value in of_seeds.values())
        mean = report.with_deviation(*mean_and_deviation(of_seeds.values()))
        cells = [values, mean, difference, least]
        if "test_accuracy" in rows:
            cells.append(mean_and_deviation(by_seed(rows, "accuracy")[system].values())[0])
        lines.append([systems[system].title, *budget, *cells])
    header = "system,lr,epochs,trained parameters,by seed,mean,fusion minus it,at the least"
    return lines, [*header.split(","), *["development set"] * ("test_accuracy" in rows)]


def conclusion(systems, rows):
    """One sentence: which system won, over which control, and by how much."""
    seeds = set.intersection(*(set(of) for of in by_seed(rows).values()))  # that all systems have
    if not seeds:
        return "No seed has run with every system, so there is nothing to compare."
    accuracies = by_seed(rows[rows["seed"].isin(seeds)])
    means = {system: mean_and_deviation(of.values())[0] for system, of in accuracies.items()}
    composed = [name for name in means if len(systems[name].adapters) > 1]
    controls = [name for name in means if name not in composed]
    if not composed or not controls:
        return "There is no fusion of several adapters, or no control, to compare."
    best, control = (max(names, key=means.get) for names in (composed, controls))
    if means[best] > means[control]:
        winner, other, kind = best, control, "the best control"
    else:
        winner, other, kind = control, best, "the best fusion of several adapters"
    difference, least = gain(accuracies, winner, other)
    over = "with one seed"
    if len(seeds) > 1:
        over = f"in the mean over {len(seeds)} seeds, by {least:.1f} at the least"
    ahead = f"ahead of {kind} ({systems[other].title}) by {difference:.1f} points {over}"
    return f"Best is: {systems[winner].title}, {ahead}."


def weights_of(study, results):
    """The weights of every fusion on the development set, a row for each layer and adapter."""
    rows = []
    for (system, size, seed), name in study.places.items():
        if name not in results or study.systems[system].stage != "fusion":
            continue
        found = measured(study, name)
        for where, of_layers in found["weights"].items():
            for layer, location, weights in of_layers:
                place = [system, size or study.target_size, seed, layer + 1, location, where]
                rows += [[*place, *pair] for pair in zip(found["adapters"], weights, strict=True)]
    columns = "system train_examples seed layer location tokens adapter weight".split()
    return pd.DataFrame(rows, columns=columns)


def dots(axes, systems, names, rows):
    """A line of dots for each of the names, a dot for each seed; fusions in another colour."""
    accuracies = by_seed(rows)
    for y, name in enumerate(names):
        values = [*accuracies.get(name, {}).values()]
        colour = "tab:orange" if len(systems[name].adapters) > 1 else "tab:blue"
        axes.plot(values, [y] * len(values), "o", color=colour, alpha=0.5)
        if values:  # none where no run of this size has ended
            axes.plot(mean_and_deviation(values)[0], y, "|", color="black", markersize=14)
    axes.set_xlabel("accuracy, %")
    axes.grid(axis="x", alpha=0.3)


def figure(path, study, rows):
    """Accuracies of the systems, a dot for each seed; a panel for each size of training set."""
    sizes = sorted(rows["train_examples"].unique())
    names = [name for name in study.systems if name in set(rows["system"])][::-1]
    size = (3 + 3.2 * len(sizes), 1.2 + 0.3 * len(names))
    shape, panels = report.subplots(1, len(sizes), size, sharey=True, squeeze=False)
    for axes, count in zip(panels.flat, sizes, strict=True):
        dots(axes, study.systems, names, rows[rows["train_examples"] == count])
        axes.set_title(f"{count} training examples")
    panels.flat[0].set_yticks(range(len(names)), [study.systems[name].title for name in names])
    report.save_figure(shape, path)


def write_results(study, results, config):
    """All files in OUT. Returns the path of the Markdown file, and its tables as text."""
    out, rows = study.options.out, rows_of(study, results)
    report.write_text(out / "composition.csv", rows.to_csv(index=False))
    weights = weights_of(study, results)
    report.write_text(out / "weights.csv", weights.to_csv(index=False, float_format="%.4f"))
    figure(out / "composition.png", study, rows)
    measured_on = "the development set"
    if study.options.test:
        measured_on = "the training examples that the run was not given; in the last column, on "
        measured_on += "the development set"
    more = "The two columns after the mean: the fusion of the sources minus the system, over the "
    more += "seeds that both have, in the mean and at the least."
    parts = [
        f"# What to fuse for {study.options.target}",
        "",
        grid.caption(study.options, config, more, measured_on),
    ]
    text = []
    for size, of_size in rows.groupby("train_examples"):
        shown = table(study.systems, of_size)
        said = conclusion(study.systems, of_size)
        parts += ["", f"## {size} training examples", "", report.markdown(*shown), said]
        text += ["", f"{size} training examples", *report.table(*shown), "", said]
    parts += ["", "![Accuracy of each system](composition.png)", ""]
    return report.write_text(out / "composition.md", "\n".join(parts)), text


def main(argv=None):
    description = "Trains a fusion on a target, and every control beside it."
    options = grid.read_options(Options, argv, "composition", description)
    alone = [source for source in options.sources if is_adapter(source)]
    if alone and (not options.systems or {"sequential", "multitask"} & {*options.systems}):
        print(f"left out: sequential and multitask need the data of {', '.join(alone)}")
    study = Study(options)
    cells = list(study.cells.values())
    if options.plan:
        return grid.print_plan(cells, options)
    config = grid.encoder(options.model).config
    results, failed = grid.run(cells, options)
    if results.keys() & {*study.places.values()}:
        path, text = write_results(study, results, config)
        print(*text, "", path, sep="\n", flush=True)
    grid.end(failed)


if __name__ == "__main__":
    run_command("composition", main)
