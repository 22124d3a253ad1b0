"""The paper's Tables 1 to 4 and Figure 3: every system, on your tasks, with your encoder, beside
the paper's values.

    python -m experiments.tables --data-dir DATA --tasks mnli sst2 mrpc rte cb --seeds 0 1 2 \\
        --out runs/table1 --plan
    python -m experiments.tables --model FacebookAI/roberta-base ...     # Table 4
    python -m experiments.tables ... -- --epochs 10 --limit-train 200

What follows "--" goes to each run; with --limit-train N, targets have few examples and source tasks
all of theirs. Each number is a run in OUT/runs (experiments/grid.py). OUT gets results.md, and CSV
and PNG beside it; with --limit-train N they are results-N.md and so on, so that both kinds can
share a directory and their source adapters. The paper's values are in paper_results.csv.
"""

import statistics
from pathlib import Path

import pandas

import data
from bert import Bert
from experiments import grid, report
from experiments.report import two_decimals
from runtime import command

# {system: (title in Table 1, stage, options)}; the last two are section 2.1's, and no column
SYSTEMS = {
    "head": ("Head", "head", []),
    "full": ("Full", "full", []),
    "st_a_2": ("ST-A r=2", "adapter", ["--reduction-factor", "2"]),
    "st_a_16": ("ST-A", "adapter", ["--reduction-factor", "16"]),
    "st_a_64": ("ST-A r=64", "adapter", ["--reduction-factor", "64"]),
    "st_a_houlsby": ("ST-A Houlsby", "adapter", "--adapter houlsby --reduction-factor 16".split()),
    "mt_a": ("MT-A", "multitask", ["--adapter", "pal"]),
    "fusion_st_a": ("Fusion w/ ST-A", "fusion", []),
    "fusion_mt_a": ("Fusion w/ MT-A", "fusion", []),
    "mtl": ("Multi-task", "multitask", ["--without-adapters"]),
    "sequential": ("Sequential", "full", []),
}
STAGES = "head full adapter fusion multitask".split()
PAPER = Path(__file__).parent / "paper_results.csv"  # as arXiv 2005.00247v3 prints them
TITLES = {system: title for system, (title, _, _) in SYSTEMS.items()}


def part(text):
    """ "3/16" -> (3, 16)"""
    i, n = map(int, text.split("/"))
    if not 0 <= i < n:
        raise ValueError
    return i, n


def parse(argv=None):
    parser = grid.make_parser("tables", __doc__, "runs/table1", STAGES)
    add = parser.add_argument
    add("--tasks", nargs="+", help="default: those of the paper's 16 that are in --data-dir")
    add("--systems", nargs="+", default=[*SYSTEMS], choices=SYSTEMS, metavar="SYSTEM")
    add("--one-seed", nargs="+", default=[], metavar="TASK", help="these get the first seed only")
    add("--part", type=part, default=(0, 1), metavar="I/N", help="every N-th run, for job arrays")
    parser.set_defaults(seeds=[0, 1, 2])
    args = grid.parse(parser, argv)
    behind = command.Parser(add_help=False)
    behind.add_argument("--limit-train", type=command.count)  # for targets alone
    args, args.train_options = behind.parse_known_args(args.train_options, args)
    place = args.data_dir
    there = [task for task in data.TASKS if place is None or Path(place, task).is_dir()]
    args.tasks = args.tasks or there
    if not args.tasks:
        raise ValueError(f"{place} has none of the paper's tasks: name yours with --tasks")
    if unknown := {*args.one_seed} - {*args.tasks}:
        raise ValueError(f"--one-seed {min(unknown)} is none of --tasks: {', '.join(args.tasks)}")
    return args


class Runs:
    """
    The runs of a grid, each after those that it needs; what several systems need is there once.

    cells: {name: cell}; places: {(system, task, seed): name of the run that answers it}; sizes:
    {task: training examples}
    """

    def __init__(self, args, sizes):
        self.args, self.sizes, self.cells, self.places = args, sizes, {}, {}
        for system in args.systems:
            for task in args.tasks:
                for seed in self.seeds_of(task):
                    if name := self.of_system(system, task, seed):
                        self.places[system, task, seed] = name

    def of_system(self, system, task, seed):
        """The name of the run that answers a system, which is added with those that it needs. None
        for a sequence without another task before the target."""
        tasks, others = self.args.tasks, [one for one in self.args.tasks if one != task]
        name, words, needs = f"{system}-{task}", ["--task", task], []
        words += self.limit(task)
        if system in ("mt_a", "mtl"):
            name, words = system, ["--tasks", *tasks, *self.limit(max(tasks, key=self.sizes.get))]
        elif system == "fusion_st_a":
            own = self.of_system("st_a_16", task, seed)
            needs = [own if one == task else self.source("st_a_16", one, seed) for one in tasks]
            words += ["--adapters", *map(self.out, needs)]
        elif system == "fusion_mt_a":
            needs = [self.of_system("mt_a", task, seed)]
            model = self.out(needs[0])
            words += ["--model", model, "--adapters", *(f"{model}/adapters/{t}" for t in tasks)]
        elif system == "sequential":
            if not others:
                return None
            first = max(others, key=self.sizes.get)
            needs = [self.source("full", first, seed)]
            name, words = f"{system}-{first}-{task}", [*words, "--model", self.out(needs[0])]
        return self.add(name, system, words, seed, needs)

    def limit(self, task):
        """--limit-train for a target, or for the largest of several, where it cuts anything."""
        limit = self.args.limit_train
        return ["--limit-train", str(limit)] if limit and limit < self.sizes[task] else []

    def source(self, system, task, seed):
        """A run on a source task, of the same seed, or where the task has none of it the first."""
        seeds = self.seeds_of(task)
        seed = seed if seed in seeds else seeds[0]
        return self.add(f"{system}-{task}", system, ["--task", task], seed)

    def add(self, name, system, words, seed, needs=()):
        """A run of other examples has another name."""
        _, stage, first = SYSTEMS[system]
        if "--limit-train" in words:
            name += f"-{self.args.limit_train}"
        name, words = f"{name}-{seed}", [*first, *words, "--seed", str(seed)]
        self.cells[name] = grid.cell(self.args, name, stage, words, needs)
        return name

    def out(self, name):
        return str(self.cells[name].out)

    def seeds_of(self, task):
        return self.args.seeds[:1] if task in self.args.one_seed else self.args.seeds


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
    return lines, ["task", "training examples", "seeds", *map(TITLES.get, systems)]


def arrow(difference):
    """Table 2's: better or worse by more than 0.3 points, or the same."""
    if difference is None:
        return "–"
    if difference > 0.3:
        return "↗"
    return "↘" if difference < -0.3 else "→"


COMPARISONS = [(f, st) for f in ("fusion_st_a", "fusion_mt_a") for st in ("st_a_16", "mt_a")]


def differences(values, pairs, tasks):
    """{(one, other): {task: values of one - values of other}} for the pairs of systems that have
    any; rounded as printed, so that a table's arrows agree with its numbers."""
    rounded, result = {place: round(value, 2) for place, value in values.items()}, {}
    for one, other in pairs:
        both = [task for task in tasks if {(one, task), (other, task)} <= values.keys()]
        of = {task: round(rounded[one, task] - rounded[other, task], 2) for task in both}
        result |= {(one, other): of} if of else {}
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
    header = ["compared to", *(" : ".join(map(TITLES.get, pair)) for pair in mine)]
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
            axes.bar(places, list(bars.values()), width, label=TITLES[pair[0]], **style)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.grid(axis="y", color="0.85", linewidth=0.5)
        axes.set_axisbelow(True)
        axes.set(title=name, ylabel="accuracy − full, points", xlim=(-0.6, len(tasks) - 0.4))
    axes.set_xticks(range(len(tasks)), tasks, rotation=45, ha="right")
    handles = both[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=len(here), frameon=False)
    report.save_figure(figure, path)


def write_results(args, runs, results, config):
    """All tables and the figure, of what is finished; prints the table of accuracies."""
    roberta, tasks, limit = config.model_type == "roberta", args.tasks, args.limit_train
    found, theirs = collect(results, runs.places), with_means(paper(roberta), tasks)
    ours = with_means({place: of["mean"] for place, of in found.items()}, tasks)
    examples = {task: min(runs.sizes[task], limit or runs.sizes[task]) for task in tasks}

    def path(name):
        return args.out / (name.replace(".", f"-{limit}.") if limit else name)

    papers, name = ("Table 4", "table4.csv") if roberta else ("Tables 1 and 3", "table1.csv")
    note = f"In brackets: the paper's {papers}; the means, too, are over the tasks listed here."
    table = accuracy_table(path(name), args.systems, examples, found, ours, theirs)
    parts = ["# Results\n", grid.caption(args, config, note) + "\n"]
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
    args = parse(argv)
    runs = Runs(args, grid.train_examples(args, args.tasks))
    cells = [*runs.cells.values()]
    if args.plan:
        return grid.print_plan(cells, args)
    config = Bert.from_pretrained(args.model).config  # if it is damaged, that is found now
    results, failed = grid.run(cells, args, args.part)
    if args.part == (0, 1) or len(results) == len(cells):
        write_results(args, runs, results, config)
    grid.end(failed)


if __name__ == "__main__":
    command.run_command("tables", main)
