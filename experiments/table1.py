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
import copy
import csv
import io
import math
import statistics
import sys
from pathlib import Path

import matplotlib.pyplot as plt

import data
from experiments import figure4, grid, plan
from experiments.grid import Cell
from experiments.report import (
    encoder_name,
    for_terminal,
    markdown,
    mean_and_deviation,
    options_in_words,
    save_figure,
    two_decimals,
    what_is_measured,
    with_deviation,
    write_csv,
    write_text,
)
from formats.files import read_json, write_json
from runtime.command import errors_in_one_line
from runtime.options import Parser
from runtime.processes import choose_device

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
# the systems that need no other run: (stage, its options)
SINGLE = {
    "head": ("head", []),
    "full": ("full", []),
    "st_a_2": ("adapter", ["--reduction-factor", "2"]),
    "st_a_16": ("adapter", ["--reduction-factor", "16"]),
    "st_a_64": ("adapter", ["--reduction-factor", "64"]),
    "st_a_houlsby": ("adapter", ["--adapter", "houlsby", "--reduction-factor", "16"]),
}
STAGES = ("head", "full", "adapter", "fusion", "multitask")
PAPER = Path(__file__).parent / "paper_results.csv"

# For --plan: tokens per candidate under BERT's uncased vocabulary, cut at the task's maximum. They
# are means of 1,000 training examples; those of argument and sick are estimates.
TOKENS = {
    "mnli": 40,
    "qqp": 31,
    "sst2": 13,
    "winogrande": 24,
    "imdb": 252,
    "hellaswag": 78,
    "social_i_qa": 30,
    "cosmos_qa": 102,
    "scitail": 40,
    "argument": 35,
    "commonsense_qa": 20,
    "boolq": 136,
    "mrpc": 54,
    "sick": 25,
    "rte": 67,
    "cb": 78,
}
WEIGHT_EXAMPLES = 1000  # fusion weights are means over at most so many development examples


def arguments(argv):
    args, rest = grid.own_arguments(parser(), argv)
    for name in ("tasks", "systems", "seeds", "sequence"):
        if getattr(args, name) is not None:
            setattr(args, name, grid.distinct(getattr(args, name)))
    args.limit_train = take_limit_train(rest)
    for name in ("limit_train", "limit_source", "one_seed_above"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(
                f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}"
            )
    grid.complete(args, rest, (*STAGES, "source"), (*grid.OWNED, "--limit-train"))
    args.tasks = args.tasks or tasks_in(args.data_dir)
    args.part = as_part(args.part)
    check(args)
    return args


def parser():
    parser = Parser(
        prog="python -m experiments.table1",
        description="Runs the grid of Table 1 and writes the paper's tables.",
        epilog="Everything after -- goes to each train.py.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    grid.add_options(parser, "runs/table1")
    add("--tasks", nargs="+", help="default: those of the paper's 16 that are in --data-dir")
    add(
        "--systems",
        nargs="+",
        default=list(SYSTEMS),
        choices=list(SYSTEMS),
        metavar="SYSTEM",
        help=" ".join(SYSTEMS),
    )
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add(
        "--one-seed-above",
        type=int,
        metavar="N",
        help="targets and sources with more than N training examples get the first seed only",
    )
    add(
        "--one-seed", nargs="+", default=[], metavar="TASK", help="so do these, whatever their size"
    )
    add(
        "--source-seeds",
        nargs="+",
        type=int,
        help="seeds of source adapters; default --seeds. A fusion of seed s takes the "
        "sources of seed s, or where there is none the first; its target's own adapter has seed s",
    )
    add(
        "--limit-source", type=int, metavar="N", help="cut source tasks to N training examples, too"
    )
    add(
        "--source-options",
        default="",
        metavar="'...'",
        help="options of train.py for sources' runs, after all others; of one "
        "word alone: --source-options=--compile",
    )
    add(
        "--sequence",
        nargs="+",
        default=[],
        metavar="TASK",
        help="sequential: full fine-tuning on these tasks, in this "
        "order, then on the target, which is left out of them; default: the largest other one "
        "of --tasks",
    )
    add(
        "--mt-adapter",
        default="pal",
        help="--adapter of mt_a; default pal, Stickland and Murray's own",
    )
    grid.add_stage_options(parser, STAGES)
    add(
        "--part",
        default="0/1",
        metavar="I/N",
        help="run every N-th run only, from the I-th on, for job arrays",
    )
    add("--report", action="store_true", help="run nothing, write the tables from what is finished")
    return parser


def take_limit_train(rest):
    """The number after --limit-train, or None. It means the targets here: the option is removed
    from `rest`, the words for each train.py, and put into the commands of the targets."""
    given = grid.options(rest).get("--limit-train")
    if given is None:
        return None
    if not given.isdigit():
        raise ValueError(f"--limit-train must be a positive number, not {given!r}")
    place = next(i for i, word in enumerate(rest) if word.split("=")[0] == "--limit-train")
    del rest[place : place + 1 + ("=" not in rest[place])]
    return int(given)


def tasks_in(data_dir):
    """Those of the paper's tasks that are in the directory; without one, all."""
    there = [task for task in data.TASKS if data_dir is None or (Path(data_dir) / task).is_dir()]
    if not there:
        raise ValueError(
            f"--data-dir {data_dir} holds none of the paper's tasks: name yours with --tasks"
        )
    return there


def as_part(text):
    """The text "2/16" as (2, 16)."""
    i, _, n = text.partition("/")
    if not (i.isdigit() and n.isdigit() and int(i) < int(n)):
        raise ValueError(f"--part must be I/N with I in 0 .. N-1, not {text!r}")
    return int(i), int(n)


def check(args):
    """Raises ValueError for arguments that do not go together."""
    if unknown := [task for task in args.one_seed if task not in args.tasks]:
        raise ValueError(
            f"--one-seed {unknown[0]!r:.50} is none of --tasks: {', '.join(args.tasks)}"
        )
    if args.overwrite and (args.report or args.part != (0, 1)):
        raise ValueError(
            "--overwrite removes runs: not with --report, which makes none, or --part, beside "
            "which others run"
        )
    if args.mt_adapter == "none" and "fusion_mt_a" in args.systems:
        raise ValueError("--mt-adapter none leaves fusion_mt_a no adapters to fuse: see --systems")
    count = grid.options([*args.rest, *args.options["fusion"]]).get("--adapters-per-batch", "")
    fuses = {"fusion_st_a", "fusion_mt_a"} & {*args.systems}
    if fuses and count.isdigit() and not 2 <= int(count) <= len(args.tasks):
        raise ValueError(
            f"--adapters-per-batch must be in 2 .. {len(args.tasks)}, the number of --tasks, "
            f"not {count}"
        )


# --------------------------------------------------------------------------------------------------
# The grid


def build(args, sizes):
    """
    (cells, places): the runs, each after those that it needs, and {(system, task, seed): name of
    the run that answers it}. sizes: {task: training examples}
    """
    runs, places = Runs(args, sizes), {}
    for system in args.systems:
        for task in args.tasks:
            for seed in runs.seeds_of(args.seeds, task, args.limit_train):
                name = runs.of_system(system, task, seed)
                if name is not None:
                    places[system, task, seed] = name
    return list(runs.cells.values()), places


class Runs:
    """The runs of a grid. Each method adds those of one kind, or finds the same ones where they
    have been added, and returns the name of the last."""

    def __init__(self, args, sizes):
        self.args, self.sizes, self.cells = args, sizes, {}

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
        stage, words = SINGLE[system]
        limit = self.args.limit_source if source else self.args.limit_train
        with_options = source and bool(self.args.options["source"])
        words = ["--task", task, *words]
        return self.add(f"{system}-{task}", stage, task, seed, words, limit, source=with_options)

    def joint(self, system, seed):
        """One model of all tasks; with --limit-train, all of them are cut."""
        adapter = self.args.mt_adapter if system == "mt_a" else "none"
        words = ["--tasks", *self.args.tasks, "--adapter", adapter]
        largest = max(self.args.tasks, key=self.sizes.get)
        return self.add(system, "multitask", largest, seed, words, self.args.limit_train)

    def fusion_of_single_adapters(self, task, seed):
        needs = []
        for other in self.args.tasks:
            if other == task:
                needs.append(self.single("st_a_16", task, seed))
            else:
                seed_of_other = self.source_seed(other, seed)
                needs.append(self.single("st_a_16", other, seed_of_other, source=True))
        adapters = [f"{{out}}/runs/{need}" for need in needs]
        return self.fusion("fusion_st_a", task, seed, adapters, needs)

    def fusion_of_joint_adapters(self, task, seed):
        need = self.joint("mt_a", seed)
        adapters = [f"{{out}}/runs/{need}/adapters/{other}" for other in self.args.tasks]
        return self.fusion("fusion_mt_a", task, seed, adapters, [need], f"{{out}}/runs/{need}")

    def fusion(self, system, task, seed, adapters, needs, model=None):
        words, limit = ["--task", task, "--adapters", *adapters], self.args.limit_train
        return self.add(f"{system}-{task}", "fusion", task, seed, words, limit, model, needs)

    def sequential(self, task, seed):
        """Full fine-tuning on other tasks, then on the target."""
        others = [other for other in self.args.tasks if other != task]
        largest = sorted(others, key=self.sizes.get)[-1:]
        before = [other for other in self.args.sequence or largest if other != task]
        if not before:
            return None
        previous = self.sequence_of_sources(before, seed)
        return self.continued(previous, before, task, seed, self.args.limit_train)

    def sequence_of_sources(self, tasks, seed):
        """Full fine-tuning on one task after the other."""
        *earlier, last = tasks
        seed = self.source_seed(last, seed)
        if not earlier:
            return self.single("full", last, seed, source=True)
        previous = self.sequence_of_sources(earlier, seed)
        source = bool(self.args.options["source"])
        return self.continued(previous, earlier, last, seed, self.args.limit_source, source)

    def continued(self, previous, before, task, seed, limit, source=False):
        """Full fine-tuning of the encoder of another run, `previous`, which was on the tasks
        `before`."""
        name, model = f"sequential-{'+'.join(before)}-{task}", f"{{out}}/runs/{previous}"
        words, needs = ["--task", task], [previous]
        return self.add(name, "full", task, seed, words, limit, model, needs, source)

    def add(self, name, stage, task, seed, words, limit=None, model=None, needs=(), source=False):
        """A run of other examples or options has another name. task: which of its tasks decides
        whether `limit` cuts anything."""
        args = self.args
        if limit is not None and limit >= self.sizes[task]:
            limit = None
        words = ["--stage", stage, *words, "--model", model or args.model, "--seed", str(seed)]
        if args.data_dir:
            words += ["--data-dir", args.data_dir]
        if limit is not None:
            name += f"-{limit}"
            words += ["--limit-train", str(limit)]
        name += f"-{seed}"
        words += [*args.rest, *args.options[stage]]
        if source:
            name += "-source"
            words += args.options["source"]
        self.cells.setdefault(name, Cell(name, tuple(words), tuple(needs)))
        return name

    def seeds_of(self, given, task, limit):
        above, examples = self.args.one_seed_above, min(self.sizes[task], limit or math.inf)
        if task in self.args.one_seed or above is not None and examples > above:
            return given[:1]
        return given

    def source_seed(self, task, seed):
        """The same seed, or where the task has no source of that seed the first."""
        given = self.args.source_seeds or self.args.seeds
        there = self.seeds_of(given, task, self.args.limit_source)
        return seed if seed in there else there[0]


def collect(args, places):
    """{(system, task): (mean, standard deviation, number of seeds)} in %, of what is finished"""
    found = {}
    for (system, task, _), name in places.items():
        result = grid.metrics(args.out, name)
        if result is not None:
            accuracy = result["accuracies"][task] if "accuracies" in result else result["accuracy"]
            found.setdefault((system, task), []).append(accuracy)
    return {key: (*mean_and_deviation(values), len(values)) for key, values in found.items()}


def paper(roberta):
    """{(system, task): accuracy in %} as the paper prints it, for BERT-base (Tables 1 and 3) or
    RoBERTa-base (Table 4)"""
    with open(PAPER, newline="") as file:
        rows = [
            row for row in csv.DictReader(file) if row["encoder"].startswith("roberta") == roberta
        ]
    return {
        (system, row["task"]): float(row[system])
        for row in rows
        for system in SYSTEMS
        if row.get(system)
    }


# --------------------------------------------------------------------------------------------------
# Tables


def mean_of(values, tasks):
    """The mean over the tasks of {task: value}. None unless there is a value for each: means over
    different tasks cannot be compared."""
    values = [values.get(task) for task in tasks]
    return None if None in values else statistics.mean(values)


def beside_the_papers(text, printed):
    """71.04 (70.50): ours, and in brackets the paper's value where it prints one."""
    return text if printed is None else f"{text} ({printed:.2f})"


def accuracy_table(title, path, systems, args, sizes, ours, theirs):
    """Tables 1, 3 and 4: mean ± standard deviation (the paper's). Writes the CSV, returns the
    Markdown."""
    lines, rows = [], []
    for task in args.tasks:
        examples = min(sizes[task], args.limit_train or sizes[task])
        counts = sorted({ours[s, task][2] for s in systems if (s, task) in ours})
        # 1–3 where some systems have one seed and others three
        seeds = "–".join(map(str, counts[:1] + counts[1:][-1:])) or "0"
        lines.append([task, f"{examples:,}", seeds])
        rows.append([task, examples])
        for s in systems:
            mean, deviation, n = ours.get((s, task), (None, None, 0))
            printed = theirs.get((s, task))
            lines[-1].append(beside_the_papers(with_deviation(mean, deviation), printed))
            rows[-1] += [two_decimals(value, "") for value in (mean, deviation)]
            rows[-1] += [n, two_decimals(printed, "")]
    lines.append(["mean", "", ""])
    rows.append(["mean", ""])
    for s in systems:
        means = {task: value[0] for (system, task), value in ours.items() if system == s}
        papers = {task: value for (system, task), value in theirs.items() if system == s}
        mean, printed = mean_of(means, args.tasks), mean_of(papers, args.tasks)
        lines[-1].append(beside_the_papers(two_decimals(mean), printed))
        rows[-1] += [two_decimals(mean, ""), "", "", two_decimals(printed, "")]
    columns = [f"{s}_{kind}" for s in systems for kind in ("mean", "std", "seeds", "paper")]
    write_csv(path, ["task", "train_examples", *columns], rows)
    header = ["task", "training examples", "seeds", *(SYSTEMS[s] for s in systems)]
    return markdown(title, header, lines)


def arrow(difference):
    """Table 2's: better or worse by more than 0.3 points, or the same."""
    if difference is None:
        return "–"
    if difference > 0.3:
        return "↗"
    return "↘" if difference < -0.3 else "→"


COMPARISONS = [
    ("fusion_st_a", "st_a_16"),
    ("fusion_st_a", "mt_a"),
    ("fusion_mt_a", "st_a_16"),
    ("fusion_mt_a", "mt_a"),
]


def differences(values, pairs, tasks):
    """{(one, other): {task: values of one - values of other}} for the pairs of systems that have
    any; rounded as printed, so that a table's arrows agree with its numbers."""
    result = {}
    for pair in pairs:
        here = {
            task: round(round(values[pair[0], task], 2) - round(values[pair[1], task], 2), 2)
            for task in tasks
            if (pair[0], task) in values and (pair[1], task) in values
        }
        if here:
            result[pair] = here
    return result


def table2(path, args, ours, theirs):
    """Arrows of fusion against the adapters alone; in brackets those that follow from the
    accuracies the paper prints."""
    mine, printed = (differences(values, COMPARISONS, args.tasks) for values in (ours, theirs))
    header, lines, rows = ["compared to"], [[task] for task in args.tasks], []
    better, not_worse = ["better"], ["better or the same"]
    for (one, other), here in mine.items():
        header.append(f"{SYSTEMS[one]} : {SYSTEMS[other]}")
        there = printed.get((one, other), {})
        for line, task in zip(lines, args.tasks, strict=True):
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
    write_csv(path, ["fusion", "compared_to", "task", "arrow", "difference", "paper"], rows)
    return markdown(
        "Table 2: fusion compared to adapters alone", header, [*lines, better, not_worse]
    )


# --------------------------------------------------------------------------------------------------
# Figure 3

# system: (colour, hatching) of its bars
BARS = {
    "st_a_16": ("white", "//"),
    "fusion_st_a": ("black", ""),
    "mt_a": ("0.8", ".."),
    "fusion_mt_a": ("0.45", ""),
}


def figure3(path, args, ours, theirs, roberta):
    """Bars of the difference to full fine-tuning, and the paper's below. Returns False where there
    is nothing to draw."""
    pairs = [(system, "full") for system in BARS]
    here, there = (
        {system: values for (system, _), values in differences(values, pairs, args.tasks).items()}
        for values in (ours, theirs)
    )
    if not here:
        return False
    rows = [
        [system, task, two_decimals(value)]
        for system, values in here.items()
        for task, value in values.items()
    ]
    write_csv(path.with_suffix(".csv"), ["system", "task", "difference_to_full"], rows)
    panels = {f"here: {args.encoder}": here}
    if there:
        panels[f"paper: {'RoBERTa' if roberta else 'BERT'}-base"] = there
    size = (max(6.5, 0.75 * len(args.tasks) + 1.5), 2.4 * len(panels) + 0.8)
    figure, all_axes = plt.subplots(
        len(panels), figsize=size, sharex=True, squeeze=False, layout="constrained"
    )
    for axes, (title, values) in zip(all_axes[:, 0], panels.items(), strict=True):
        draw_bars(axes, {system: values.get(system, {}) for system in here}, args.tasks)
        axes.set(title=title, ylabel="accuracy − full, points", xlim=(-0.6, len(args.tasks) - 0.4))
    turned = {"rotation": 45, "ha": "right"} if len(args.tasks) > 4 else {}
    axes.set_xticks(range(len(args.tasks)), args.tasks, **turned)
    handles = {}
    for axes in all_axes[:, 0]:
        of_panel, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, of_panel, strict=True))
    below = {"loc": "outside lower center", "ncols": len(handles), "frameon": False}
    figure.legend(handles.values(), handles.keys(), **below)
    save_figure(figure, path)
    return True


def draw_bars(axes, values, tasks):
    """Bars side by side for every task. values: {system: {task: points}}"""
    width = 0.8 / len(values)
    for i, (system, by_task) in enumerate(values.items()):
        shift = (i - (len(values) - 1) / 2) * width
        color, hatch = BARS[system]
        axes.bar(
            [tasks.index(task) + shift for task in by_task],
            list(by_task.values()),
            width,
            color=color,
            hatch=hatch,
            edgecolor="black",
            linewidth=0.6,
            label=SYSTEMS[system],
        )
    axes.axhline(0, color="black", linewidth=0.8)
    axes.grid(axis="y", color="0.85", linewidth=0.5)
    axes.set_axisbelow(True)


# --------------------------------------------------------------------------------------------------
# Fusion weights


def mean_weights(run, model, data_dir, device):
    """{"adapters": names, "slots": {"0 output": [N weights], ...}} of a fusion run: s, averaged
    over the real tokens of its development set, in fp32. Kept in the run's directory."""
    path = run / "fusion_weights.json"
    if path.is_file():
        return read_json(path)
    print(f"fusion weights of {run.name}", flush=True)
    limit = min(WEIGHT_EXAMPLES, read_json(run / "config.json").get("limit_dev") or WEIGHT_EXAMPLES)
    with contextlib.redirect_stdout(io.StringIO()):  # train.py has printed the notes already
        names, weights, _ = figure4.mean_weights(run, data_dir, model, device, limit)
    result = {
        "adapters": names,
        "slots": {f"{layer} {place}": s.tolist() for (layer, place), s in weights.items()},
    }
    write_json(path, result)
    return result


def weights_tables(path, args, cells, places):
    """Mean weight of each adapter per target, averaged over layers and seeds. Writes the CSV,
    returns the Markdown."""
    by_name = {cell.name: cell for cell in cells}
    texts, rows = [], []
    for system in ("fusion_st_a", "fusion_mt_a"):
        table = {}  # target: {adapter: weights}
        for (which, task, seed), name in places.items():
            if which != system or grid.metrics(args.out, name) is None:
                continue
            options = grid.parse(by_name[name], args.out)
            device, _ = choose_device(options.device, options.dtype)
            found = mean_weights(args.out / "runs" / name, options.model, args.data_dir, device)
            for slot, weights in found["slots"].items():
                for adapter, weight in zip(found["adapters"], weights, strict=True):
                    rows.append([system, task, seed, *slot.split(), adapter, f"{weight:.4f}"])
                    table.setdefault(task, {}).setdefault(adapter, []).append(weight)
        lines = []
        for task, of_adapters in table.items():
            means = {other: f"{statistics.mean(of_adapters[other]):.2f}" for other in args.tasks}
            means[task] = f"**{means[task]}**"
            lines.append([task, *means.values()])
        if lines:
            title = f"{SYSTEMS[system]}: mean weight of each adapter"
            texts.append(markdown(title, ["target", *args.tasks], lines))
    if rows:
        write_csv(path, ["system", "target", "seed", "layer", "place", "adapter", "weight"], rows)
        texts.append(
            f"Averaged over the real tokens of the development set (at most {WEIGHT_EXAMPLES:,} "
            "examples), layers and seeds; the target's own adapter in bold; even weights would be "
            f"{1 / len(args.tasks):.2f}.\n"
        )
    return texts


# --------------------------------------------------------------------------------------------------
# All results


def write_results(args, cells, places, sizes, roberta):
    """All tables and the figure, of what is finished. Returns the path of the Markdown file, and
    the tables of accuracies in it."""
    results, theirs = collect(args, places), paper(roberta)
    ours = {key: mean for key, (mean, _, _) in results.items()}
    suffix = f"-{args.limit_train}" if args.limit_train else ""

    def path(name, kind="csv"):
        return args.out / f"{name}{suffix}.{kind}"

    def accuracies(title, name, systems):
        return accuracy_table(title, path(name), systems, args, sizes, results, theirs)

    args.out.mkdir(parents=True, exist_ok=True)
    parts = ["# Results", "", caption(args, roberta), ""]
    tables = []
    if roberta:  # Table 4 has all reduction factors
        tables.append(accuracies("Table 4", "table4", args.systems))
    else:
        first = [s for s in args.systems if s not in ("st_a_2", "st_a_64")]
        third = [s for s in ("st_a_2", "st_a_16", "st_a_64") if s in args.systems]
        if first:
            tables.append(accuracies("Table 1", "table1", first))
        if third and third != ["st_a_16"]:
            tables.append(accuracies("Table 3: reduction factors", "table3", third))
    parts += tables
    if differences(ours, COMPARISONS, args.tasks):
        parts.append(table2(path("table2"), args, ours, theirs))
        parts.append(
            "↗ better by more than 0.3 points, ↘ worse by more than 0.3, → between. In brackets: "
            "the same rule, applied to the accuracies that the paper prints.\n"
        )
    if figure3(path("figure3", "png"), args, ours, theirs, roberta):
        parts += ["## Figure 3: difference to full fine-tuning", ""]
        parts += [f"![Figure 3]({path('figure3', 'png').name})", ""]
    parts += weights_tables(path("fusion_weights"), args, cells, places)
    return write_text(path("results", "md"), "\n".join(parts)), tables


def caption(args, roberta):
    """What the numbers are, and everything in which this grid is smaller than the paper's."""
    tables = "RoBERTa-base, Table 4" if roberta else "BERT-base-uncased, Tables 1 and 3"
    lines = [
        what_is_measured(args),
        f"In brackets: the paper's {tables}; the means, too, are over the tasks listed here.",
    ]
    if args.limit_train:
        lines.append(
            f"Each target is cut to {args.limit_train:,} training examples, drawn with the seed; "
            "multi-task models see so many of each task."
        )
    if args.limit_train or args.limit_source:
        sources = "all" if not args.limit_source else f"at most {args.limit_source:,}"
        lines.append(
            "Source adapters, and what sequential fine-tuning begins with, are trained on "
            f"{sources} of their task's examples."
        )
    if args.one_seed_above:
        lines.append(f"Tasks of more than {args.one_seed_above:,} training examples have one seed.")
    if args.one_seed:
        lines.append(f"One seed only: {', '.join(args.one_seed)}.")
    if args.source_seeds:
        lines.append(f"Source adapters have seeds {', '.join(map(str, args.source_seeds))}.")
    return "\n".join([*lines, *options_in_words(args)])


# --------------------------------------------------------------------------------------------------


def print_plan(args, cells, sizes, config, directory):
    """Prints the runs, and how long they and the paper's whole grid take at most on this
    machine."""
    measured = {}
    runs = plan.print_runs(cells, args, sizes, config, directory, measured)
    print(f"this grid: {runs}", flush=True)

    whole = copy.copy(args)
    whole.tasks, whole.systems = list(data.TASKS), list(SYSTEMS)
    whole.data_dir, whole.out = None, args.out / "paper"
    whole.limit_train = whole.limit_source = whole.one_seed_above = whole.source_seeds = None
    whole.sequence, whole.one_seed, whole.options = [], [], {stage: [] for stage in args.options}
    given = grid.options(args.rest)
    whole.rest = [
        word for key in ("--device", "--dtype") if key in given for word in (key, given[key])
    ]
    rows = {name: task.sizes[0] for name, task in data.TASKS.items()}
    tasks = {
        name: (*task.sizes, TOKENS[name] * (len(task.labels) if task.choices else 1))
        for name, task in data.TASKS.items()
    }
    cells, _ = build(whole, rows)
    found = plan.hours(cells, whole.out, tasks, config, measured)
    total = sum(hours for _, _, hours in found.values())
    print(
        f"the paper's grid with this encoder: 16 tasks in full, {len(SYSTEMS)} systems, "
        f"{len(args.seeds)} seeds, train.py's defaults: {len(cells)} runs, at most "
        f"{total / grid.devices(args.jobs, args.cuda):,.0f} hours",
        flush=True,
    )


def run(args):
    """The whole command. Returns its exit status."""
    config, directory = plan.find_encoder(args.model, whole=not args.plan)
    args.encoder = encoder_name(args.model, config)
    both = plan.sizes(grid.distinct([*args.tasks, *args.sequence]), args.data_dir)
    sizes = {task: rows for task, (rows, _) in both.items()}
    cells, places = build(args, sizes)
    for cell in cells:
        grid.parse(cell, args.out)
    if args.plan:
        if not args.overwrite:
            grid.check(cells, args.out)
        print_plan(args, cells, both, config, directory)
        return 0
    grid.check(cells, args.out, args.overwrite)
    failed = {}
    if not args.report:
        hours = plan.estimate(cells, args, both, config, directory)
        failed = grid.run(cells, args.out, args.jobs, args.cuda, args.launch, args.part, hours)
    if args.part == (0, 1) or all(grid.metrics(args.out, cell.name) for cell in cells):
        roberta = config.model_type == "roberta"
        path, tables = write_results(args, cells, places, sizes, roberta)
        print(*map(for_terminal, tables), path, sep="\n\n", flush=True)
    return grid.report(failed, args.out)


def main(argv=None):
    """Returns the exit status."""
    with errors_in_one_line("table1", interrupted=grid.INTERRUPTED):
        return run(arguments(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
