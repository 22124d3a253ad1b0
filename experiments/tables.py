"""The paper's Tables 1 to 4 and Figure 3: every system, on your tasks, with your encoder, beside
the paper's values.

    python -m experiments.tables --data-dir DATA --tasks mnli sst2 mrpc rte cb --seeds 0 1 2 \\
        --out runs/table1 --plan
    python -m experiments.tables --model FacebookAI/roberta-base ...     # Table 4
    python -m experiments.tables ... -- --epochs 10 --limit-train 200

What follows "--" goes to each train.py; with --limit-train N, targets have few examples and source
tasks all of theirs. Each number is a run in OUT/runs (experiments/grid.py). The results are
OUT/results.md, and CSV and PNG beside it; with --limit-train N results-N.md and so on, so that both
kinds can share a directory and their source adapters.

`paper_results.csv` holds the accuracies that Tables 1, 3 and 4 of the paper print (arXiv
2005.00247v3).
"""

import shlex
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

import pandas

import data
from experiments import grid, report
from experiments.report import two_decimals
from runtime.command import run_command
from runtime.settings import COUNT, SEED, Parser, check_values, option, unrecorded

# {system: (title in Table 1, stage and options)}; the last two are section 2.1's, and no column
SYSTEMS = {
    "head": ("Head", "head"),
    "full": ("Full", "full"),
    "st_a_2": ("ST-A r=2", "adapter --reduction-factor 2"),
    "st_a_16": ("ST-A", "adapter --reduction-factor 16"),
    "st_a_64": ("ST-A r=64", "adapter --reduction-factor 64"),
    "st_a_houlsby": ("ST-A Houlsby", "adapter --adapter houlsby --reduction-factor 16"),
    "mt_a": ("MT-A", "multitask --adapter pal"),
    "fusion_st_a": ("Fusion w/ ST-A", "fusion"),
    "fusion_mt_a": ("Fusion w/ MT-A", "fusion"),
    "mtl": ("Multi-task", "multitask --adapter none"),
    "sequential": ("Sequential", "full"),
}
PAPER = Path(__file__).parent / "paper_results.csv"


def is_part(text):
    i, _, n = text.partition("/")
    return i.isdigit() and n.isdigit() and int(i) < int(n)


PART = "I/N with I in 0 .. N-1", is_part


@dataclass(frozen=True)
class Options(grid.Options):
    tasks: tuple = option((), "default: those of the paper's 16 that are in --data-dir")
    seeds: tuple[int, ...] = option((0, 1, 2), valid=SEED)
    out: Path = unrecorded(Path("runs/table1"), "of runs and results; default runs/table1")
    systems: tuple = option(
        tuple(SYSTEMS), " ".join(SYSTEMS), choices=list(SYSTEMS), metavar="SYSTEM"
    )
    one_seed: tuple = option((), "these get the first seed only", metavar="TASK")
    limit_train: int | None = option(None, valid=COUNT, flag=None)  # of targets, from behind --
    head_options: str = grid.stage_options("head")
    full_options: str = grid.stage_options("full")
    adapter_options: str = grid.stage_options("adapter")
    fusion_options: str = grid.stage_options("fusion")
    multitask_options: str = grid.stage_options("multitask")
    part: str = unrecorded(
        "0/1", "every N-th run only, from the I-th on, for job arrays", metavar="I/N", valid=PART
    )


def arguments(argv):
    description = "Runs the grid of Table 1 and writes the paper's tables."
    options = grid.read_options(Options, argv, "tables", description)
    behind = Parser(add_help=False, allow_abbrev=False)
    behind.add_argument("--limit-train", type=int)
    given, rest = behind.parse_known_args(shlex.split(options.train_options))
    options = replace(options, limit_train=given.limit_train, train_options=shlex.join(rest))
    check_values(options)
    grid.check_owned(options, ["--limit-train"])
    if not options.tasks:
        place = options.data_dir
        there = [task for task in data.TASKS if place is None or (Path(place) / task).is_dir()]
        if not there:
            raise ValueError(f"{place} has none of the paper's tasks: name yours with --tasks")
        options = replace(options, tasks=tuple(there))
    if unknown := [task for task in options.one_seed if task not in options.tasks]:
        known = ", ".join(options.tasks)
        raise ValueError(f"--one-seed {unknown[0]!r:.50} is none of --tasks: {known}")
    return options


class Runs:
    """
    The runs of a grid, each after those that it needs; what several systems need is there once.

    cells: {name: cell}; places: {(system, task, seed): name of the run that answers it}. sizes:
    {task: training examples}
    """

    def __init__(self, options, sizes):
        self.options, self.sizes, self.cells, self.places = options, sizes, {}, {}
        for system in options.systems:
            for task in options.tasks:
                for seed in self.seeds_of(task, options.seeds):
                    if name := self.of_system(system, task, seed):
                        self.places[system, task, seed] = name

    def of_system(self, system, task, seed):
        """The name of the run that answers a system, which is added with those that it needs. None
        for a sequence without another task before the target."""
        tasks, others = self.options.tasks, [one for one in self.options.tasks if one != task]
        name, words, needs, model = f"{system}-{task}", ["--task", task], [], None
        if system in ("mt_a", "mtl"):  # with --limit-train, all tasks are cut
            name, words, task = system, ["--tasks", *tasks], self.largest(tasks)
        elif system == "fusion_st_a":
            own = self.of_system("st_a_16", task, seed)
            needs = [own if one == task else self.source("st_a_16", one, seed) for one in tasks]
            words += ["--adapters", *map(self.out, needs)]
        elif system == "fusion_mt_a":
            needs = [self.of_system("mt_a", task, seed)]
            model = self.out(needs[0])
            words += ["--adapters", *(f"{model}/adapters/{one}" for one in tasks)]
        elif system == "sequential":
            if not others:
                return None
            first = self.largest(others)
            needs = [self.source("full", first, seed)]
            name, model = f"{system}-{first}-{task}", self.out(needs[0])
        return self.add(name, system, words, task, seed, needs, model)

    def source(self, system, task, seed):
        """A run on a source task, of the same seed, or where the task has none of it the first."""
        seeds = self.seeds_of(task, self.options.seeds)
        seed = seed if seed in seeds else seeds[0]
        return self.add(f"{system}-{task}", system, ["--task", task], task, seed, source=True)

    def add(self, name, system, words, task, seed, needs=(), model=None, source=False):
        """task: the one whose size decides whether a limit cuts anything. A run of other examples
        or options has another name."""
        options, (stage, *first) = self.options, SYSTEMS[system][1].split()
        words = [*first, *words]
        limit = None if source else options.limit_train
        if limit is not None and limit < self.sizes[task]:
            name += f"-{limit}"
            words += ["--limit-train", str(limit)]
        name += f"-{seed}"
        self.cells[name] = grid.cell(options, name, stage, words, seed, model, needs)
        return name

    def out(self, name):
        return str(self.cells[name].out)

    def largest(self, tasks):
        return max(tasks, key=self.sizes.get)

    def seeds_of(self, task, given):
        return given[:1] if task in self.options.one_seed else given


def collect(results, places):
    """{(system, task): {"mean", "std", "count"}} of the accuracies in %, one a seed, of what is
    finished"""
    rows = [
        (system, task, 100 * grid.accuracy(results[name], task))
        for (system, task, _), name in places.items()
        if name in results
    ]
    found = pandas.DataFrame(rows, columns=["system", "task", "accuracy"])
    by_place = found.groupby(["system", "task"])["accuracy"]
    return by_place.agg(["mean", "std", "count"]).to_dict("index")


def paper(roberta):
    """{(system, task): accuracy in %} as the paper prints it, for BERT-base (Tables 1 and 3) or
    RoBERTa-base (Table 4)"""
    table = pandas.read_csv(PAPER)
    table = table[table["encoder"].str.contains("roberta") == roberta].drop(columns="encoder")
    values = table.melt("task", var_name="system").dropna()
    return values.set_index(["system", "task"])["value"].to_dict()


def title(system):
    return SYSTEMS[system][0]


def with_means(values, tasks):
    """{(system, task or "mean"): value}. A system has a mean where it has a value for each task:
    means over different tasks cannot be compared."""
    result = dict(values)
    for system in SYSTEMS:
        own = [values[system, task] for task in tasks if (system, task) in values]
        if len(own) == len(tasks):
            result[system, "mean"] = statistics.mean(own)
    return result


def accuracy_table(path, systems, examples, found, ours, theirs):
    """Tables 1, 3 and 4: mean ± standard deviation (the paper's), written to a CSV file; returns
    (rows, header) for people. examples: {task: how many it is trained on}"""
    lines, rows = [], []
    for task in [*examples, "mean"]:
        places = [(system, task) for system in systems]
        seeds = sorted({found[place]["count"] for place in places if place in found})
        lines.append([task, str(examples.get(task, "")), " or ".join(map(str, seeds))])
        rows.append([task, examples.get(task, "")])
        for place in places:
            mean, printed, of = ours.get(place), theirs.get(place), found.get(place, {})
            text = report.with_deviation(mean, of.get("std"))
            lines[-1].append(text if printed is None else f"{text} ({printed:.2f})")
            mean, std, printed = (two_decimals(v, "") for v in (mean, of.get("std"), printed))
            rows[-1] += [mean, std, of.get("count", ""), printed]
    columns = [f"{system}_{kind}" for system in systems for kind in "mean std seeds paper".split()]
    report.write_csv(path, ["task", "train_examples", *columns], rows)
    return lines, ["task", "training examples", "seeds", *map(title, systems)]


def arrow(difference):
    """Table 2's: better or worse by more than 0.3 points, or the same."""
    if difference is None:
        return "–"
    if difference > 0.3:
        return "↗"
    return "↘" if difference < -0.3 else "→"


COMPARISONS = [
    (fusion, adapters)
    for fusion in ("fusion_st_a", "fusion_mt_a")
    for adapters in ("st_a_16", "mt_a")
]


def differences(values, pairs, tasks):
    """{(one, other): {task: values of one - values of other}} for the pairs of systems that have
    any; rounded as printed, so that a table's arrows agree with its numbers."""
    result = {}
    for one, other in pairs:
        both = [task for task in tasks if {(one, task), (other, task)} <= values.keys()]
        if both:
            result[one, other] = {
                task: round(round(values[one, task], 2) - round(values[other, task], 2), 2)
                for task in both
            }
    return result


def table2(path, tasks, ours, theirs):
    """Arrows of fusion against the adapters alone, written to a CSV file; returns (rows, header)
    for people. In brackets those that follow from the accuracies the paper prints."""
    mine, printed = (differences(values, COMPARISONS, tasks) for values in (ours, theirs))
    rows = [
        [*pair, task, arrow(value), two_decimals(value), arrow(printed.get(pair, {}).get(task))]
        for pair, here in mine.items()
        for task, value in here.items()
    ]
    report.write_csv(path, ["fusion", "compared_to", "task", "arrow", "difference", "paper"], rows)
    cells = {(one, other, task): f"{mark} ({paper})" for one, other, task, mark, _, paper in rows}
    header = ["compared to", *(" : ".join(map(title, pair)) for pair in mine)]
    return [[task, *(cells.get((*pair, task)) for pair in mine)] for task in tasks], header


BARS = {  # of Figure 3, {system: colour and hatching}
    "st_a_16": {"color": "white", "hatch": "//"},
    "fusion_st_a": {"color": "black"},
    "mt_a": {"color": "0.8", "hatch": ".."},
    "fusion_mt_a": {"color": "0.45"},
}


def figure3(path, tasks, here, there):
    """Bars of differences to full fine-tuning, ours and below them the paper's. here, there:
    {(system, "full"): {task: difference}}"""
    width, size = 0.8 / len(here), (max(6.5, 0.75 * len(tasks) + 1.5), 5.6)
    figure, both = report.subplots(2, figsize=size, sharex=True)
    for axes, name, panel in zip(both, ("here", "the paper's"), (here, there), strict=True):
        for i, pair in enumerate(here):
            bars, shift = panel.get(pair, {}), (i - (len(here) - 1) / 2) * width
            places = [tasks.index(task) + shift for task in bars]
            style = {"edgecolor": "black", "linewidth": 0.6, **BARS[pair[0]]}
            axes.bar(places, list(bars.values()), width, label=title(pair[0]), **style)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.grid(axis="y", color="0.85", linewidth=0.5)
        axes.set_axisbelow(True)
        axes.set(title=name, ylabel="accuracy − full, points", xlim=(-0.6, len(tasks) - 0.4))
    axes.set_xticks(range(len(tasks)), tasks, rotation=45, ha="right")
    handles = both[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=len(here), frameon=False)
    report.save_figure(figure, path)


def write_results(options, runs, results, config):
    """All tables and the figure, of what is finished; prints the table of accuracies."""
    roberta, tasks, limit = config.model_type == "roberta", options.tasks, options.limit_train
    found, theirs = collect(results, runs.places), with_means(paper(roberta), tasks)
    ours = with_means({place: of["mean"] for place, of in found.items()}, tasks)
    examples = {task: min(runs.sizes[task], limit or runs.sizes[task]) for task in tasks}

    def path(name):
        return options.out / (name.replace(".", f"-{limit}.") if limit else name)

    papers, name = ("Table 4", "table4.csv") if roberta else ("Tables 1 and 3", "table1.csv")
    note = f"In brackets: the paper's {papers}; the means, too, are over the tasks listed here."
    table = accuracy_table(path(name), options.systems, examples, found, ours, theirs)
    parts = ["# Results\n", grid.caption(options, config, note) + "\n"]
    parts += [f"## {papers}\n", report.markdown(*table)]
    if differences(ours, COMPARISONS, tasks):
        parts += [
            "## Table 2: fusion compared to adapters alone\n",
            report.markdown(*table2(path("table2.csv"), tasks, ours, theirs)),
            "↗ better by more than 0.3 points, ↘ worse by more than 0.3, → between. In brackets: "
            "the same rule, applied to the accuracies that the paper prints.\n",
        ]
    pairs = [(system, "full") for system in BARS]
    here, there = (differences(values, pairs, tasks) for values in (ours, theirs))
    if here:
        figure3(path("figure3.png"), tasks, here, there)
        parts += ["## Figure 3: difference to full fine-tuning\n"]
        parts += [f"![Figure 3]({path('figure3.png').name})\n"]
    report.write_text(path("results.md"), "\n".join(parts))
    print(*report.table(*table), "", path("results.md"), sep="\n", flush=True)


def main(argv=None):
    options = arguments(argv)
    runs = Runs(options, grid.train_examples(options.tasks, options.data_dir))
    cells = list(runs.cells.values())
    if options.plan:
        return grid.print_plan(cells, options)
    config = grid.encoder(options.model).config  # if it is damaged, that is found now
    results, failed = grid.run(cells, options, tuple(map(int, options.part.split("/"))))
    if options.part == "0/1" or len(results) == len(cells):
        write_results(options, runs, results, config)
    grid.end(failed)


if __name__ == "__main__":
    run_command("tables", main)
