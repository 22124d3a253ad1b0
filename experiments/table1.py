"""The paper's Tables 1 to 4 and Figure 3: every system, on your tasks, with your encoder, beside
the paper's values.

    python -m experiments.table1 --data-dir DATA --tasks mnli sst2 mrpc rte cb --seeds 0 1 2 \\
        --out runs/table1 --plan
    python -m experiments.table1 --model FacebookAI/roberta-base ...     # Table 4

What follows "--" goes to each train.py; with --limit-train N, targets have few examples and source
tasks all of theirs:

    python -m experiments.table1 ... -- --epochs 10 --dtype bfloat16
    python -m experiments.table1 ... -- --limit-train 200

Each number is a run of train.py in OUT/runs (experiments/grid.py): the same command again skips
what is finished, continues what was interrupted and tries again what failed. Results:
OUT/results.md, and as CSV and PNG beside it; with --limit-train N they are called results-N.md and
so on, so that both kinds can share a directory and their source adapters.

`paper_results.csv` holds the accuracies that Tables 1, 3 and 4 of the paper print (arXiv
2005.00247v3).
"""

if __name__ == "__main__":
    from runtime.command import announce

    announce("table1")

import contextlib
import csv
import io
import shlex
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

import data
from experiments import figure4, grid, report
from experiments.report import two_decimals
from formats.files import read_json, write_json
from runtime.command import run_command
from runtime.processes import choose_device
from runtime.settings import COUNT, SEED, Parser, check_values, option

# as Table 1 calls them; the last two are section 2.1's and have no column there
SYSTEMS = {
    "head": "Head",
    "full": "Full",
    "st_a_2": "ST-A r=2",
    "st_a_16": "ST-A",
    "st_a_64": "ST-A r=64",
    "st_a_houlsby": "ST-A Houlsby",
    "mt_a": "MT-A",
    "fusion_st_a": "Fusion w/ ST-A",
    "fusion_mt_a": "Fusion w/ MT-A",
    "mtl": "Multi-task",
    "sequential": "Sequential",
}
# the systems that need no other run: stage and options
SINGLE = {
    "head": "head",
    "full": "full",
    "st_a_2": "adapter --reduction-factor 2",
    "st_a_16": "adapter --reduction-factor 16",
    "st_a_64": "adapter --reduction-factor 64",
    "st_a_houlsby": "adapter --adapter houlsby --reduction-factor 16",
}
PAPER = Path(__file__).parent / "paper_results.csv"
WEIGHT_EXAMPLES = 1000  # fusion weights are means over at most so many development examples


def is_part(text):
    i, _, n = text.partition("/")
    return i.isdigit() and n.isdigit() and int(i) < int(n)


@dataclass(frozen=True)
class Options(grid.Options):
    tasks: tuple = option((), "default: those of the paper's 16 that are in --data-dir")
    seeds: tuple[int, ...] = option((0, 1, 2), valid=SEED)
    out: Path = option(Path("runs/table1"), "directory of runs and results; default runs/table1")
    systems: tuple = option(
        tuple(SYSTEMS), " ".join(SYSTEMS), choices=list(SYSTEMS), metavar="SYSTEM"
    )
    one_seed: tuple = option((), "these get the first seed only", metavar="TASK")
    source_seeds: tuple[int, ...] | None = option(
        None,
        "seeds of source adapters; default --seeds. A fusion of seed s takes the sources of seed "
        "s, or where there is none the first; its target's own adapter has seed s",
        valid=SEED,
    )
    limit_train: int | None = option(None, "cut targets to N examples", valid=COUNT, metavar="N")
    limit_source: int | None = option(
        None, "cut source tasks to N examples, too", valid=COUNT, metavar="N"
    )
    source_options: str = option(
        "",
        "options of train.py for sources' runs, after all others; of one word alone: "
        "--source-options=--compile",
        metavar="'...'",
    )
    head_options: str = grid.stage_options("head")
    full_options: str = grid.stage_options("full")
    adapter_options: str = grid.stage_options("adapter")
    fusion_options: str = grid.stage_options("fusion")
    multitask_options: str = grid.stage_options("multitask")
    part: str = option(
        "0/1",
        "run every N-th run only, from the I-th on, for job arrays",
        metavar="I/N",
        valid=("I/N with I in 0 .. N-1", is_part),
    )


def arguments(argv):
    description = "Runs the grid of Table 1 and writes the paper's tables."
    options = grid.read_options(Options, argv, "table1", description)
    behind = Parser(add_help=False, allow_abbrev=False)  # --limit-train means the targets here
    behind.add_argument("--limit-train", type=int, default=options.limit_train)
    given, rest = behind.parse_known_args(options.train_options)
    options = replace(options, limit_train=given.limit_train, train_options=tuple(rest))
    check_values(options)
    grid.check_owned(options, [*grid.OWNED, "--limit-train"])
    if not options.tasks:
        place = options.data_dir
        there = [task for task in data.TASKS if place is None or (Path(place) / task).is_dir()]
        if not there:
            raise ValueError(
                f"--data-dir {place} holds none of the paper's tasks: name yours with --tasks"
            )
        options = replace(options, tasks=tuple(there))
    if unknown := [task for task in options.one_seed if task not in options.tasks]:
        known = ", ".join(options.tasks)
        raise ValueError(f"--one-seed {unknown[0]!r:.50} is none of --tasks: {known}")
    if options.overwrite and options.part != "0/1":
        raise ValueError("--overwrite removes runs: not with --part, beside which others run")
    return options


# --------------------------------------------------------------------------------------------------
# The grid


def build(options, sizes):
    """
    (cells, places): the runs, each after those that it needs, and {(system, task, seed): name of
    the run that answers it}. sizes: {task: training examples}
    """
    runs, places = Runs(options, sizes), {}
    for system in options.systems:
        for task in options.tasks:
            for seed in runs.seeds_of(task, options.seeds):
                name = runs.of_system(system, task, seed)
                if name is not None:
                    places[system, task, seed] = name
    return list(runs.cells.values()), places


class Runs:
    """The runs of a grid. Each method adds those of one kind, or finds the same ones where they
    have been added, and returns the name of the last."""

    def __init__(self, options, sizes):
        self.options, self.sizes, self.cells = options, sizes, {}

    def of_system(self, system, task, seed):
        """None for a sequence without another task before the target."""
        if system in SINGLE:
            return self.single(system, task, seed)
        if system in ("mt_a", "mtl"):
            return self.joint(system, seed)
        if system == "fusion_st_a":
            return self.fusion_of_single_adapters(task, seed)
        if system == "fusion_mt_a":
            return self.fusion_of_joint_adapters(task, seed)
        return self.sequential(task, seed)

    def single(self, system, task, seed, source=False):
        words = [*SINGLE[system].split(), "--task", task]
        return self.add(f"{system}-{task}", words, task, seed, source=source)

    def joint(self, system, seed):
        """One model of all tasks; with --limit-train, all of them are cut."""
        tasks, adapter = self.options.tasks, {"mt_a": "pal", "mtl": "none"}[system]
        words = ["multitask", "--tasks", *tasks, "--adapter", adapter]
        return self.add(system, words, max(tasks, key=self.sizes.get), seed)

    def fusion_of_single_adapters(self, task, seed):
        needs = []
        for other in self.options.tasks:
            source = other != task
            of_seed = self.source_seed(other, seed) if source else seed
            needs.append(self.single("st_a_16", other, of_seed, source))
        adapters = [f"{{out}}/runs/{need}" for need in needs]
        words = ["fusion", "--task", task, "--adapters", *adapters]
        return self.add(f"fusion_st_a-{task}", words, task, seed, needs=needs)

    def fusion_of_joint_adapters(self, task, seed):
        need = self.joint("mt_a", seed)
        model = f"{{out}}/runs/{need}"
        adapters = [f"{model}/adapters/{other}" for other in self.options.tasks]
        words = ["fusion", "--task", task, "--adapters", *adapters]
        return self.add(f"fusion_mt_a-{task}", words, task, seed, model, [need])

    def sequential(self, task, seed):
        """Full fine-tuning on the largest other task, then on the target."""
        others = [other for other in self.options.tasks if other != task]
        if not others:
            return None
        first = max(others, key=self.sizes.get)
        need = self.single("full", first, self.source_seed(first, seed), source=True)
        words, model = ["full", "--task", task], f"{{out}}/runs/{need}"
        return self.add(f"sequential-{first}-{task}", words, task, seed, model, [need])

    def add(self, name, words, task, seed, model=None, needs=(), source=False):
        """words: the stage, and its options; task: which of its tasks decides whether a limit cuts
        anything. A run of other examples or options has another name."""
        options, (stage, *words) = self.options, words
        limit = options.limit_source if source else options.limit_train
        if limit is not None and limit < self.sizes[task]:
            name += f"-{limit}"
            words += ["--limit-train", str(limit)]
        name += f"-{seed}"
        words = grid.command(options, stage, words, seed, model)
        if source and options.source_options:
            name += "-source"
            words = (*words, *shlex.split(options.source_options))
        self.cells.setdefault(name, grid.Cell(name, words, tuple(needs)))
        return name

    def seeds_of(self, task, given):
        return given[:1] if task in self.options.one_seed else given

    def source_seed(self, task, seed):
        """The same seed, or where the task has no source of that seed the first."""
        there = self.seeds_of(task, self.options.source_seeds or self.options.seeds)
        return seed if seed in there else there[0]


def collect(results, places):
    """{(system, task): (mean, standard deviation, number of seeds)} in %, of what is finished"""
    found = {}
    for (system, task, _), name in places.items():
        if name in results:
            found.setdefault((system, task), []).append(grid.accuracy(results[name], task))
    return {key: (*report.mean_and_deviation(values), len(values)) for key, values in found.items()}


def paper(roberta):
    """{(system, task): accuracy in %} as the paper prints it, for BERT-base (Tables 1 and 3) or
    RoBERTa-base (Table 4)"""
    with open(PAPER, newline="") as file:
        rows = [row for row in csv.DictReader(file) if roberta == ("roberta" in row["encoder"])]
    return {
        (system, row["task"]): float(row[system])
        for row in rows
        for system in SYSTEMS
        if row.get(system)
    }


# --------------------------------------------------------------------------------------------------
# Tables: each function writes a CSV file, and returns (title, header, rows) for people


def beside_the_papers(text, printed):
    """71.04 (70.50): ours, and in brackets the paper's value where it prints one."""
    return text if printed is None else f"{text} ({printed:.2f})"


def mean_of(values, system, tasks):
    """None unless there is a value for each task: means over different tasks cannot be compared."""
    values = [values.get((system, task)) for task in tasks]
    return None if None in values else statistics.mean(values)


def accuracy_table(title, path, systems, options, sizes, ours, theirs):
    """Tables 1, 3 and 4: mean ± standard deviation (the paper's)."""
    lines, rows, tasks = [], [], options.tasks
    for task in tasks:
        examples = min(sizes[task], options.limit_train or sizes[task])
        counts = sorted({ours[s, task][2] for s in systems if (s, task) in ours})
        # 1–3 where some systems have one seed and others three
        seeds = "–".join(map(str, counts[:1] + counts[1:][-1:])) or "0"
        lines.append([task, f"{examples:,}", seeds])
        rows.append([task, examples])
        for s in systems:
            mean, deviation, n = ours.get((s, task), (None, None, 0))
            printed = theirs.get((s, task))
            lines[-1].append(beside_the_papers(report.with_deviation(mean, deviation), printed))
            rows[-1] += [two_decimals(value, "") for value in (mean, deviation)]
            rows[-1] += [n, two_decimals(printed, "")]
    lines.append(["mean", "", ""])
    rows.append(["mean", ""])
    means = {key: mean for key, (mean, _, _) in ours.items()}
    for s in systems:
        mean, printed = (mean_of(values, s, tasks) for values in (means, theirs))
        lines[-1].append(beside_the_papers(two_decimals(mean), printed))
        rows[-1] += [two_decimals(mean, ""), "", "", two_decimals(printed, "")]
    columns = [f"{s}_{kind}" for s in systems for kind in ("mean", "std", "seeds", "paper")]
    report.write_csv(path, ["task", "train_examples", *columns], rows)
    return title, ["task", "training examples", "seeds", *(SYSTEMS[s] for s in systems)], lines


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


def table2(path, options, ours, theirs):
    """Arrows of fusion against the adapters alone; in brackets those that follow from the
    accuracies the paper prints."""
    tasks = options.tasks
    mine, printed = (differences(values, COMPARISONS, tasks) for values in (ours, theirs))
    header, lines, rows = ["compared to"], [[task] for task in tasks], []
    better, not_worse = ["better"], ["better or the same"]
    for (one, other), here in mine.items():
        header.append(f"{SYSTEMS[one]} : {SYSTEMS[other]}")
        there = printed.get((one, other), {})
        for line, task in zip(lines, tasks, strict=True):
            value, papers = here.get(task), there.get(task)
            text = arrow(value) if value is None else f"{arrow(value)} {value:+.2f}"
            line.append(text if papers is None else f"{text} ({arrow(papers)} {papers:+.2f})")
            if value is not None:
                papers = "" if papers is None else arrow(papers)
                rows.append([one, other, task, arrow(value), two_decimals(value), papers])
        for line, counted in ((better, "↗"), (not_worse, "↗→")):
            count, papers = (
                f"{sum(arrow(value) in counted for value in values.values())}/{len(values)}"
                for values in (here, there)
            )
            line.append(f"{count} ({papers})" if there else count)
    report.write_csv(path, ["fusion", "compared_to", "task", "arrow", "difference", "paper"], rows)
    return "Table 2: fusion compared to adapters alone", header, [*lines, better, not_worse]


# --------------------------------------------------------------------------------------------------
# Figure 3

BARS = {  # system: colour and hatching of its bars
    "st_a_16": {"color": "white", "hatch": "//"},
    "fusion_st_a": {"color": "black"},
    "mt_a": {"color": "0.8", "hatch": ".."},
    "fusion_mt_a": {"color": "0.45"},
}


def figure3(path, options, ours, theirs, titles):
    """Bars of the difference to full fine-tuning, and the paper's below; titles: of the two. False
    where there is nothing to draw."""
    tasks, pairs = list(options.tasks), [(system, "full") for system in BARS]
    panels = [differences(values, pairs, tasks) for values in (ours, theirs)]
    if not panels[0]:
        return False
    rows = [
        [system, task, two_decimals(value)]
        for (system, _), values in panels[0].items()
        for task, value in values.items()
    ]
    report.write_csv(path.with_suffix(".csv"), ["system", "task", "difference_to_full"], rows)
    shown, panels = list(panels[0]), [panel for panel in panels if panel]
    size = max(6.5, 0.75 * len(tasks) + 1.5), 2.4 * len(panels) + 0.8
    figure, all_axes = report.subplots(len(panels), figsize=size, sharex=True, squeeze=False)
    width = 0.8 / len(shown)
    for axes, title, panel in zip(all_axes[:, 0], titles, panels, strict=False):
        for i, pair in enumerate(shown):
            shift = (i - (len(shown) - 1) / 2) * width
            places = [tasks.index(task) + shift for task in panel.get(pair, {})]
            style = {"edgecolor": "black", "linewidth": 0.6, **BARS[pair[0]]}
            heights = list(panel.get(pair, {}).values())
            axes.bar(places, heights, width, label=SYSTEMS[pair[0]], **style)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.grid(axis="y", color="0.85", linewidth=0.5)
        axes.set_axisbelow(True)
        axes.set(title=title, ylabel="accuracy − full, points", xlim=(-0.6, len(tasks) - 0.4))
    turned = {"rotation": 45, "ha": "right"} if len(tasks) > 4 else {}
    axes.set_xticks(range(len(tasks)), tasks, **turned)
    bars, labels = all_axes[0, 0].get_legend_handles_labels()
    figure.legend(bars, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    report.save_figure(figure, path)
    return True


# --------------------------------------------------------------------------------------------------
# Fusion weights


def mean_weights(run, result, model, data_dir, device):
    """[(layer from 1, location, adapter, weight)] of a fusion run: s, averaged over the real tokens
    of its development set, in fp32. Kept beside the run's closing line, `result`."""
    path = run / "fusion_weights.json"
    if path.is_file() and (kept := read_json(path))["run"] == result:
        return kept["weights"]
    print(f"fusion weights of {run.name}", flush=True)
    limit = min(WEIGHT_EXAMPLES, read_json(run / "config.json").get("limit_dev") or WEIGHT_EXAMPLES)
    with contextlib.redirect_stdout(io.StringIO()):  # train.py has printed the notes already
        names, weights, _ = figure4.mean_weights(run, data_dir, model, device, limit)
    found = [
        (layer + 1, location, name, round(weight, 6))
        for (layer, location), s in weights.items()
        for name, weight in zip(names, s.tolist(), strict=True)
    ]
    write_json(path, {"run": result, "weights": found})
    return found


def weights_tables(path, options, cells, places, results):
    """Mean weight of each adapter per target, averaged over layers and seeds: writes the CSV,
    returns the Markdown."""
    by_name = {cell.name: cell for cell in cells}
    texts, rows = [], []
    for system in ("fusion_st_a", "fusion_mt_a"):
        found = {}  # target: {adapter: weights}
        for (which, task, seed), name in places.items():
            if which != system or name not in results:
                continue
            settings = grid.settings_of(by_name[name], options.out)
            device, _ = choose_device(settings.device, settings.dtype)
            run, model = options.out / "runs" / name, settings.model
            for row in mean_weights(run, results[name], model, options.data_dir, device):
                rows.append([system, task, seed, *row[:3], f"{row[3]:.4f}"])
                found.setdefault(task, {}).setdefault(row[2], []).append(row[3])
        lines = []
        for task, of_adapters in found.items():
            means = {other: f"{statistics.mean(of_adapters[other]):.2f}" for other in options.tasks}
            means[task] = f"**{means[task]}**"
            lines.append([task, *means.values()])
        if lines:
            title = f"{SYSTEMS[system]}: mean weight of each adapter"
            texts += [f"## {title}\n", report.markdown(lines, ["target", *options.tasks])]
    if rows:
        header = "system target seed layer place adapter weight".split()
        report.write_csv(path, header, rows)
        texts.append(
            f"Averaged over the real tokens of the development set (at most {WEIGHT_EXAMPLES:,} "
            "examples), layers and seeds; the target's own adapter in bold; even weights would be "
            f"{1 / len(options.tasks):.2f}.\n"
        )
    return texts


# --------------------------------------------------------------------------------------------------
# All results


def write_results(options, cells, places, results, sizes, config):
    """All tables and the figure, of what is finished. Returns the path of the Markdown file, and
    the tables of accuracies in it."""
    roberta = config.model_type == "roberta"
    found, theirs = collect(results, places), paper(roberta)
    ours = {key: mean for key, (mean, _, _) in found.items()}
    suffix = f"-{options.limit_train}" if options.limit_train else ""

    def path(name, kind="csv"):
        return options.out / f"{name}{suffix}.{kind}"

    first = [s for s in options.systems if s not in ("st_a_2", "st_a_64")]
    third = [s for s in ("st_a_2", "st_a_16", "st_a_64") if s in options.systems]
    wanted = [("table1", "Table 1", first)] if first else []
    if third and third != ["st_a_16"]:
        wanted.append(("table3", "Table 3: reduction factors", third))
    if roberta:  # Table 4 has all reduction factors
        wanted = [("table4", "Table 4", options.systems)]
    tables = [
        accuracy_table(title, path(name), systems, options, sizes, found, theirs)
        for name, title, systems in wanted
    ]
    parts = ["# Results\n", caption(options, config, roberta) + "\n"]
    for title, header, rows in tables:
        parts += [f"## {title}\n", report.markdown(rows, header)]
    if differences(ours, COMPARISONS, options.tasks):
        title, header, rows = table2(path("table2"), options, ours, theirs)
        parts += [f"## {title}\n", report.markdown(rows, header)]
        parts.append(
            "↗ better by more than 0.3 points, ↘ worse by more than 0.3, → between. In brackets: "
            "the same rule, applied to the accuracies that the paper prints.\n"
        )
    titles = (
        f"here: {grid.encoder_name(options, config)}",
        f"paper: {'RoBERTa' if roberta else 'BERT'}-base",
    )
    if figure3(path("figure3", "png"), options, ours, theirs, titles):
        parts += ["## Figure 3: difference to full fine-tuning\n"]
        parts += [f"![Figure 3]({path('figure3', 'png').name})\n"]
    parts += weights_tables(path("fusion_weights"), options, cells, places, results)
    return report.write_text(path("results", "md"), "\n".join(parts)), tables


def caption(options, config, roberta):
    """What the numbers are, and everything in which this grid is smaller than the paper's."""
    tables = "RoBERTa-base, Table 4" if roberta else "BERT-base-uncased, Tables 1 and 3"
    lines = [f"In brackets: the paper's {tables}; the means, too, are over the tasks listed here."]
    if options.limit_train:
        lines.append(
            f"Each target is cut to {options.limit_train:,} training examples, drawn with the "
            "seed; multi-task models see so many of each task."
        )
    if options.limit_train or options.limit_source:
        sources = f"at most {options.limit_source:,}" if options.limit_source else "all"
        lines.append(
            "Source adapters, and what sequential fine-tuning begins with, are trained on "
            f"{sources} of their task's examples."
        )
    if options.one_seed:
        lines.append(f"One seed only: {', '.join(options.one_seed)}.")
    if options.source_seeds:
        lines.append(f"Source adapters have seeds {', '.join(map(str, options.source_seeds))}.")
    return grid.caption(options, config, *lines)


def main(argv=None):
    options = arguments(argv)
    sizes = grid.train_examples(options.tasks, options.data_dir)
    cells, places = build(options, sizes)
    for cell in cells:
        grid.settings_of(cell, options.out)  # a wrong option is found now
    if options.plan:
        return grid.print_plan(cells, options)
    config = grid.encoder(options.model).config  # if it is damaged, that is found now
    results, failed = grid.run(cells, options, tuple(map(int, options.part.split("/"))))
    if options.part == "0/1" or len(results) == len(cells):
        path, tables = write_results(options, cells, places, results, sizes, config)
        for title, header, rows in tables:
            print(f"{title}\n", *report.table(rows, header, wrap=True), "", sep="\n")
        print(path, flush=True)
    grid.end(failed)


if __name__ == "__main__":
    run_command("table1", main, interrupted=grid.INTERRUPTED)
