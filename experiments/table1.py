"""The paper's Tables 1 to 4 and Figure 3: every system, on your tasks, with your encoder, beside
the paper's values.

    python -m experiments.table1 --data-dir DATA --tasks mnli sst2 mrpc rte cb --seeds 0 1 2 --out
    runs/table1 --plan
    python -m experiments.table1 ... -- --epochs 10 --dtype bfloat16     # what follows "--" goes to each train.py
    python -m experiments.table1 ... -- --limit-train 200                # low-resource targets, sources at full size
    python -m experiments.table1 --model FacebookAI/roberta-base ...     # Table 4

Each number is a run of train.py in OUT/runs (experiments/grid.py): the same command again skips
what is finished, continues what was interrupted and tries again what failed. Results:
OUT/results.md, and as CSV and PNG beside it; with --limit-train N they are called results-N.md and
so on, so that both kinds can share a directory and their source adapters.

`paper_results.csv` holds the accuracies that Tables 1, 3 and 4 of the paper print (arXiv
2005.00247v3).
"""

import runtime.console  # noqa: F401  (first: Ctrl-C during imports, closed outputs)

# isort: split
import contextlib
import copy
import csv
import io
import shlex
import statistics
import sys
from pathlib import Path

import matplotlib

import data
from bert import Bert
from experiments import figure4, grid
from experiments.grid import Cell
from formats.files import read_json, write_json
from runtime.processes import choose_device

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

SYSTEMS = {  # as Table 1 calls them; the last two are section 2.1's and have no column there
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
SINGLE = {  # system: (stage, its options), the systems that need no other run
    "head": ("head", []),
    "full": ("full", []),
    "st_a_2": ("adapter", ["--reduction-factor", "2"]),
    "st_a_16": ("adapter", ["--reduction-factor", "16"]),
    "st_a_64": ("adapter", ["--reduction-factor", "64"]),
    "st_a_houlsby": ("adapter", ["--adapter", "houlsby", "--reduction-factor", "16"]),
}
STAGES = ("head", "full", "adapter", "fusion", "multitask")
OWNED = (
    "--stage",
    "--task",
    "--tasks",
    "--adapters",
    "--adapter",
    "--adapter-config",
    "--reduction-factor",
    "--seed",
    "--limit-train",
    "--model",
    "--data-dir",
    "--out",
    "--resume",
    "--overwrite",
)
PAPER = Path(__file__).parent / "paper_results.csv"

# For --plan: tokens per candidate under BERT's uncased vocabulary, cut at the task's maximum; means
# of 1,000 training examples, those of argument and sick estimated
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
WEIGHT_EXAMPLES = 1000  # fusion weights are averaged over at most so many dev examples
from runtime.options import Parser


def arguments(argv):
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
    for stage in STAGES:
        add(
            f"--{stage}-options",
            default="",
            metavar="'...'",
            help=f"options of train.py for --stage {stage} alone, after those that follow --",
        )
    add(
        "--part",
        default="0/1",
        metavar="I/N",
        help="run every N-th run only, from the I-th on, for job arrays",
    )
    add("--report", action="store_true", help="run nothing, write the tables from what is finished")
    own, rest = grid.split(argv)
    args = parser.parse_args(own)

    # train.py's --limit-train means the targets here, and is put into each command
    args.limit_train = grid.options(rest).get("--limit-train")
    if args.limit_train is not None:
        if not args.limit_train.isdigit():
            raise ValueError(f"--limit-train must be a positive number, not {args.limit_train!r}")
        place = next(i for i, word in enumerate(rest) if word.split("=")[0] == "--limit-train")
        del rest[place : place + 1 + ("=" not in rest[place])]
        args.limit_train = int(args.limit_train)
    for name in ("limit_train", "limit_source", "one_seed_above"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(
                f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}"
            )
    grid.refuse_owned(rest, OWNED, "behind --")
    args.rest = rest
    args.options = {}
    for stage in (*STAGES, "source"):
        args.options[stage] = shlex.split(getattr(args, f"{stage}_options"))
        grid.refuse_owned(args.options[stage], OWNED, f"in --{stage}-options")
    if args.tasks is None:
        here = [
            task
            for task in data.TASKS
            if args.data_dir is None or (Path(args.data_dir) / task).is_dir()
        ]
        if not here:
            raise ValueError(
                f"--data-dir {args.data_dir} holds none of the paper's tasks: name yours "
                "with --tasks"
            )
        args.tasks = here
    if unknown := [task for task in args.one_seed if task not in args.tasks]:
        raise ValueError(
            f"--one-seed {unknown[0]!r:.50} is none of --tasks: {', '.join(args.tasks)}"
        )
    for name in ("tasks", "systems", "seeds", "sequence"):
        setattr(args, name, list(dict.fromkeys(getattr(args, name))))
    part = args.part.split("/")
    if (
        len(part) != 2
        or not all(number.isdigit() for number in part)
        or not int(part[0]) < int(part[1])
    ):
        raise ValueError(f"--part must be I/N with I in 0 .. N-1, not {args.part!r}")
    args.part = int(part[0]), int(part[1])
    if args.overwrite and (args.report or args.part != (0, 1)):
        raise ValueError(
            "--overwrite removes runs: not with --report, which makes none, or --part, beside "
            "which others run"
        )
    if args.mt_adapter == "none" and "fusion_mt_a" in args.systems:
        raise ValueError("--mt-adapter none leaves fusion_mt_a no adapters to fuse: see --systems")
    K = grid.options([*rest, *args.options["fusion"]]).get("--adapters-per-batch")
    if (
        K
        and K.isdigit()
        and not 2 <= int(K) <= len(args.tasks)
        and {"fusion_st_a", "fusion_mt_a"} & {*args.systems}
    ):
        raise ValueError(
            f"--adapters-per-batch must be in 2 .. {len(args.tasks)}, the number of "
            f"--tasks, not {K}"
        )
    grid.complete(args, rest)
    return args


# --------------------------------------------------------------------------------------------------
# The grid


def build(args, sizes):
    """
    (cells, places): the runs, each after those that it needs, and {(system, task, seed): name of
    the run that answers it}. sizes: {task: training examples}
    """
    cells, places = {}, {}

    def add(name, stage, task, seed, words, limit=None, model=None, needs=(), source=False):
        """Adds a run, or finds the same one. A run of other examples or options has another
        name."""
        limit = limit if limit and limit < sizes[task] else None
        name = "-".join(
            [name, *([str(limit)] if limit else []), str(seed), *(["source"] if source else [])]
        )
        words = ["--stage", stage, *words, "--model", model or args.model, "--seed", str(seed)]
        words += ["--data-dir", args.data_dir] if args.data_dir else []
        words += ["--limit-train", str(limit)] if limit else []
        words += [*args.rest, *args.options[stage], *(args.options["source"] if source else [])]
        cells.setdefault(name, Cell(name, tuple(words), tuple(needs)))
        return name

    def single(system, task, seed, source=False):
        stage, words = SINGLE[system]
        limit = args.limit_source if source else args.limit_train
        source = source and bool(args.options["source"])
        return add(
            f"{system}-{task}", stage, task, seed, ["--task", task, *words], limit, source=source
        )

    def joint(system, seed):
        """One model of all tasks; with --limit-train, all of them are cut."""
        words = [
            "--tasks",
            *args.tasks,
            "--adapter",
            args.mt_adapter if system == "mt_a" else "none",
        ]
        return add(
            system, "multitask", max(args.tasks, key=sizes.get), seed, words, args.limit_train
        )

    def fusion(system, task, seed, adapters, needs, model=None):
        words = ["--task", task, "--adapters", *adapters]
        return add(f"{system}-{task}", "fusion", task, seed, words, args.limit_train, model, needs)

    def seeds(given, task, limit):
        many = (
            args.one_seed_above is not None
            and min(sizes[task], limit or sizes[task]) > args.one_seed_above
        )
        return given[:1] if many or task in args.one_seed else given

    def source_seed(task, seed):
        there = seeds(args.source_seeds or args.seeds, task, args.limit_source)
        return seed if seed in there else there[0]

    def chain(before, seed):
        """Full fine-tuning on one task after the other, as sources."""
        *earlier, last = before
        seed = source_seed(last, seed)
        if not earlier:
            return single("full", last, seed, source=True)
        previous, source = chain(earlier, seed), bool(args.options["source"])
        return add(
            f"sequential-{'+'.join(earlier)}-{last}",
            "full",
            last,
            seed,
            ["--task", last],
            args.limit_source,
            f"{{out}}/runs/{previous}",
            [previous],
            source,
        )

    for system in args.systems:
        for task in args.tasks:
            for seed in seeds(args.seeds, task, args.limit_train):
                if system in SINGLE:
                    name = single(system, task, seed)
                elif system in ("mt_a", "mtl"):
                    name = joint(system, seed)
                elif system == "fusion_st_a":
                    needs = [
                        single("st_a_16", other, seed)
                        if other == task
                        else single("st_a_16", other, source_seed(other, seed), source=True)
                        for other in args.tasks
                    ]
                    name = fusion(
                        system, task, seed, [f"{{out}}/runs/{need}" for need in needs], needs
                    )
                elif system == "fusion_mt_a":
                    need = joint("mt_a", seed)
                    adapters = [f"{{out}}/runs/{need}/adapters/{other}" for other in args.tasks]
                    name = fusion(system, task, seed, adapters, [need], f"{{out}}/runs/{need}")
                else:  # sequential
                    largest = sorted(
                        (other for other in args.tasks if other != task), key=sizes.get
                    )[-1:]
                    before = [other for other in args.sequence or largest if other != task]
                    if not before:
                        continue
                    previous = chain(before, seed)
                    name = add(
                        f"sequential-{'+'.join(before)}-{task}",
                        "full",
                        task,
                        seed,
                        ["--task", task],
                        args.limit_train,
                        f"{{out}}/runs/{previous}",
                        [previous],
                    )
                places[system, task, seed] = name
    return list(cells.values()), places


def collect(args, places):
    """{(system, task): (mean, standard deviation, number of seeds)} in %, of what is finished"""
    found = {}
    for (system, task, _), name in places.items():
        result = grid.metrics(args.out, name)
        if result is not None:
            accuracy = result["accuracies"][task] if "accuracies" in result else result["accuracy"]
            found.setdefault((system, task), []).append(100 * accuracy)
    return {
        key: (
            statistics.mean(values),
            statistics.stdev(values) if len(values) > 1 else None,
            len(values),
        )
        for key, values in found.items()
    }


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
# Tables and figure


def write_csv(path, header, rows):
    temporary = Path(f"{path}.tmp")
    with open(temporary, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])
    temporary.replace(path)


def markdown(title, header, rows):
    lines = [f"## {title}", "", "| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows), ""])


def number(value, places=2):
    return "–" if value is None else f"{value:.{places}f}"


def mean_of(systems_values, tasks):
    """The mean over the tasks, None unless there is a value for each: means over different tasks
    cannot be compared."""
    values = [systems_values.get(task) for task in tasks]
    return None if None in values else statistics.mean(values)


def accuracy_table(title, path, systems, args, sizes, ours, theirs):
    """Tables 1, 3 and 4: mean ± standard deviation (the paper's). Writes the CSV, returns the
    Markdown."""
    used = {task: min(sizes[task], args.limit_train or sizes[task]) for task in args.tasks}
    header, lines, rows = (
        ["task", "training examples", "seeds", *(SYSTEMS[s] for s in systems)],
        [],
        [],
    )
    for task in args.tasks:
        values, cells = [task, used[task]], []
        for s in systems:
            mean, std, n = ours.get((s, task), (None, None, 0))
            printed = theirs.get((s, task))
            values += [number(value) if value is not None else "" for value in (mean, std)] + [n]
            values.append("" if printed is None else number(printed))
            text = number(mean) + (f" ± {std:.2f}" if std is not None else "")
            cells.append(text + ("" if printed is None else f" ({printed:.2f})"))
        counts = sorted({ours[s, task][2] for s in systems if (s, task) in ours})
        lines.append(
            [
                task,
                f"{used[task]:,}",
                "–".join(map(str, counts[:1] + counts[1:][-1:])) or "0",
                *cells,
            ]
        )
        rows.append(values)
    lines.append(["mean", "", ""])
    rows.append(["mean", ""])
    for s in systems:
        mean = mean_of(
            {task: value[0] for (system, task), value in ours.items() if system == s}, args.tasks
        )
        printed = mean_of(
            {task: value for (system, task), value in theirs.items() if system == s}, args.tasks
        )
        lines[-1].append(number(mean) + ("" if printed is None else f" ({printed:.2f})"))
        rows[-1] += [
            "" if mean is None else number(mean),
            "",
            "",
            "" if printed is None else number(printed),
        ]
    columns = [f"{s}_{kind}" for s in systems for kind in ("mean", "std", "seeds", "paper")]
    write_csv(path, ["task", "train_examples", *columns], rows)
    return markdown(title, header, lines)


def arrow(difference):
    """Table 2's: better or worse by more than 0.3 points, or the same"""
    return (
        "–"
        if difference is None
        else "↗"
        if difference > 0.3
        else "↘"
        if difference < -0.3
        else "→"
    )


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
    total, same = ["better"], ["better or the same"]
    for one, other in mine:
        header.append(f"{SYSTEMS[one]} : {SYSTEMS[other]}")
        here, there = mine[one, other], printed.get((one, other), {})
        for line, task in zip(lines, args.tasks, strict=True):
            value = here.get(task)
            text = arrow(value) + (f" {value:+.2f}" if value is not None else "")
            line.append(
                text + (f" ({arrow(there[task])} {there[task]:+.2f})" if task in there else "")
            )
            if value is not None:
                rows.append(
                    [
                        one,
                        other,
                        task,
                        arrow(value),
                        number(value),
                        arrow(there[task]) if task in there else "",
                    ]
                )
        for line, good in ((total, "↗"), (same, "↗→")):
            counts = [
                f"{sum(arrow(value) in good for value in values.values())}/{len(values)}"
                for values in (here, there)
            ]
            line.append(counts[0] + (f" ({counts[1]})" if there else ""))
    write_csv(path, ["fusion", "compared_to", "task", "arrow", "difference", "paper"], rows)
    return markdown("Table 2: fusion compared to adapters alone", header, [*lines, total, same])


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
    panels = [
        (f"here: {args.encoder}", differences(ours, pairs, args.tasks)),
        (f"paper: {'RoBERTa' if roberta else 'BERT'}-base", differences(theirs, pairs, args.tasks)),
    ]
    if not panels[0][1]:
        return False
    write_csv(
        path.with_suffix(".csv"),
        ["system", "task", "difference_to_full"],
        [
            [system, task, number(value)]
            for (system, _), here in panels[0][1].items()
            for task, value in here.items()
        ],
    )
    panels = [panel for panel in panels if panel[1]]
    size = (max(6.5, 0.75 * len(args.tasks) + 1.5), 2.4 * len(panels) + 0.8)
    figure, all_axes = plt.subplots(
        len(panels), figsize=size, sharex=True, squeeze=False, layout="constrained"
    )
    shown = [system for system in BARS if (system, "full") in panels[0][1]]
    width = 0.8 / len(shown)
    for axes, (title, found) in zip(all_axes[:, 0], panels, strict=True):
        for i, system in enumerate(shown):
            here = found.get((system, "full"), {})
            places = [args.tasks.index(task) + (i - (len(shown) - 1) / 2) * width for task in here]
            color, hatch = BARS[system]
            axes.bar(
                places,
                list(here.values()),
                width,
                color=color,
                hatch=hatch,
                edgecolor="black",
                linewidth=0.6,
                label=SYSTEMS[system],
            )
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set(title=title, ylabel="accuracy − full, points", xlim=(-0.6, len(args.tasks) - 0.4))
        axes.grid(axis="y", color="0.85", linewidth=0.5)
        axes.set_axisbelow(True)
    axes.set_xticks(
        range(len(args.tasks)),
        args.tasks,
        rotation=45 if len(args.tasks) > 4 else 0,
        ha="right" if len(args.tasks) > 4 else "center",
    )
    handles = {
        label: handle
        for axes in all_axes[:, 0]
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=len(handles),
        frameon=False,
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True


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
    with contextlib.redirect_stdout(io.StringIO()):  # its notes have been made
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
        table = {}
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
        lines = [
            [
                task,
                *(
                    f"**{text}**" if other == task else text
                    for other in args.tasks
                    for text in [f"{statistics.mean(table[task][other]):.2f}"]
                ),
            ]
            for task in table
        ]
        if lines:
            title = f"{SYSTEMS[system]}: mean weight of each adapter"
            texts.append(markdown(title, ["target", *args.tasks], lines))
    if rows:
        write_csv(path, ["system", "target", "seed", "layer", "place", "adapter", "weight"], rows)
        texts.append(
            f"Averaged over the real tokens of the development set (at most {WEIGHT_EXAMPLES:,} "
            "examples), layers and "
            "seeds; the target's own adapter in bold; even weights would be "
            f"{1 / len(args.tasks):.2f}.\n"
        )
    return texts


# --------------------------------------------------------------------------------------------------


def write_results(args, cells, places, sizes, roberta):
    """All tables and the figure, of what is finished. Returns the path of the Markdown file."""
    results, theirs = collect(args, places), paper(roberta)
    ours = {key: mean for key, (mean, _, _) in results.items()}
    suffix = f"-{args.limit_train}" if args.limit_train else ""

    def path(name, kind="csv"):
        return args.out / f"{name}{suffix}.{kind}"

    args.out.mkdir(parents=True, exist_ok=True)
    first = [s for s in args.systems if s not in ("st_a_2", "st_a_64")]
    third = [s for s in ("st_a_2", "st_a_16", "st_a_64") if s in args.systems]
    parts = ["# Results", "", caption(args, roberta), ""]
    if roberta:  # Table 4 has all reduction factors
        parts.append(
            accuracy_table("Table 4", path("table4"), args.systems, args, sizes, results, theirs)
        )
    else:
        if first:
            parts.append(
                accuracy_table("Table 1", path("table1"), first, args, sizes, results, theirs)
            )
        if third and third != ["st_a_16"]:
            parts.append(
                accuracy_table(
                    "Table 3: reduction factors",
                    path("table3"),
                    third,
                    args,
                    sizes,
                    results,
                    theirs,
                )
            )
    if differences(ours, COMPARISONS, args.tasks):
        parts.append(table2(path("table2"), args, ours, theirs))
        parts.append(
            "↗ better by more than 0.3 points, ↘ worse by more than 0.3, → between. In brackets: "
            "the same rule, applied "
            "to the accuracies that the paper prints.\n"
        )
    if figure3(path("figure3", "png"), args, ours, theirs, roberta):
        parts += [
            "## Figure 3: difference to full fine-tuning",
            "",
            f"![Figure 3]({path('figure3', 'png').name})",
            "",
        ]
    parts += weights_tables(path("fusion_weights"), args, cells, places)
    temporary = path("results", "md.tmp")
    temporary.write_text("\n".join(parts), encoding="utf-8")
    return temporary.replace(path("results", "md"))


def caption(args, roberta):
    """What the numbers are, and everything in which this grid is smaller than the paper's."""
    lines = [grid.about(args)]
    lines.append(
        "In brackets: the paper's "
        f"{'RoBERTa-base, Table 4' if roberta else 'BERT-base-uncased, Tables 1 and 3'}; the "
        "means, too, are over the tasks listed here."
    )
    if args.limit_train:
        lines.append(
            f"Each target is cut to {args.limit_train:,} training examples, drawn with the seed; "
            "multi-task models see "
            "so many of each task."
        )
    if args.limit_train or args.limit_source:
        sources = "all" if not args.limit_source else f"at most {args.limit_source:,}"
        lines.append(
            "Source adapters, and what sequential fine-tuning begins with, are trained on "
            f"{sources} of their task's "
            "examples."
        )
    if args.one_seed_above:
        lines.append(f"Tasks of more than {args.one_seed_above:,} training examples have one seed.")
    if args.one_seed:
        lines.append(f"One seed only: {', '.join(args.one_seed)}.")
    if args.source_seeds:
        lines.append(f"Source adapters have seeds {', '.join(map(str, args.source_seeds))}.")
    return "\n".join([*lines, *grid.options_in_words(args)])


def plan(args, cells, sizes, bert):
    """Prints the runs, and how long they and the paper's whole grid take at most on this
    machine."""
    measured = {}
    print(f"this grid: {grid.plan(cells, args, sizes, bert, measured)}", flush=True)

    whole = copy.copy(args)
    whole.tasks, whole.systems, whole.data_dir, whole.out = (
        list(data.TASKS),
        list(SYSTEMS),
        None,
        args.out / "paper",
    )
    whole.limit_train = whole.limit_source = whole.one_seed_above = whole.source_seeds = None
    whole.sequence, whole.one_seed, whole.options = [], [], {stage: [] for stage in args.options}
    whole.rest = [
        word
        for key in ("--device", "--dtype")
        if key in grid.options(args.rest)
        for word in (key, grid.options(args.rest)[key])
    ]
    rows = {name: task.sizes[0] for name, task in data.TASKS.items()}
    tasks = {
        name: (*task.sizes, TOKENS[name] * (len(task.labels) if task.choices else 1))
        for name, task in data.TASKS.items()
    }
    cells, _ = build(whole, rows)
    total = sum(
        time for _, _, time in grid.hours(cells, whole.out, tasks, args.model, measured).values()
    )
    print(
        f"the paper's grid with this encoder: 16 tasks in full, {len(SYSTEMS)} systems, "
        f"{len(args.seeds)} seeds, train.py's "
        f"defaults: {len(cells)} runs, at most {total / grid.at_once(args):,.0f} hours",
        flush=True,
    )


def main(argv=None):
    try:
        args = arguments(sys.argv[1:] if argv is None else argv)
        bert = Bert.from_pretrained(args.model)
        args.encoder = grid.encoder_name(args.model, bert)
        both = grid.sizes(dict.fromkeys([*args.tasks, *args.sequence]), args.data_dir)
        sizes = {task: rows for task, (rows, _) in both.items()}
        cells, places = build(args, sizes)
        for cell in cells:
            grid.parse(cell, args.out)
        if args.plan:
            if not args.overwrite:
                grid.check(cells, args.out)
            plan(args, cells, both, bert)
            return 0
        grid.check(cells, args.out, args.overwrite)
        failed = {}
        if not args.report:
            failed = grid.run(cells, args.out, args.jobs, args.cuda, args.launch, args.part)
        if args.part == (0, 1) or all(grid.metrics(args.out, cell.name) for cell in cells):
            print(
                write_results(args, cells, places, sizes, bert.config.model_type == "roberta"),
                flush=True,
            )
        return grid.report(failed, args.out)
    except (ValueError, OSError, FloatingPointError) as e:
        print(f"table1: {' '.join(str(e).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("table1: interrupted; the same command goes on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
