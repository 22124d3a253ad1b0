"""The architecture search of appendix A.2 (Figures 5, 7, 8 and 9): where the adapter sits, and
which LayerNorms are around it.

    python -m experiments.architecture_search --tasks sst2 --data-dir DATA --out runs/search --plan
    python -m experiments.architecture_search --tasks sst2 ... -- --epochs 10 --dtype bfloat16   # "--": for each train.py

For each task, step by step: position of the adapter, BERT's own LayerNorms, new LayerNorms, the
residual, the non-linearity. Every option of a step is trained at every reduction factor; the one
with the best mean accuracy is kept for the steps after it. What has not been searched yet is as in
the paper's outcome, the first option of each step (what it was there is not printed).

Each number is a run of train.py in OUT/runs (experiments/grid.py): the same command again skips
what is finished, continues what was interrupted and tries again what failed; an architecture that
comes up twice is trained once. After each step, OUT/search.md, search.csv and the figures are
written of what is there.
"""

import runtime.console  # noqa: F401  (first: Ctrl-C during imports, closed outputs)

# isort: split
import argparse
import shlex
import statistics
import sys
from dataclasses import fields

import matplotlib

from bert import Bert
from experiments import grid
from experiments.grid import Cell
from experiments.table1 import markdown, number, write_csv
from formats.adapterhub import without_effect
from variants.houlsby import RecipeConfig

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

STEPS = {  # step: (title, {option: (label, fields of RecipeConfig)}), the paper's outcome first
    "position": (
        "Adapter positions",
        {
            "top": ("top only", {"mh_adapter": False, "output_adapter": True}),
            "bottom": ("bottom only", {"mh_adapter": True, "output_adapter": False}),
            "both": ("both", {"mh_adapter": True, "output_adapter": True}),
        },
    ),
    "pretrained": (
        "Pretrained LayerNorm",
        {
            "before_after": (
                "before & after",
                {"original_ln_before": True, "original_ln_after": True},
            ),
            "before": ("before", {"original_ln_before": True, "original_ln_after": False}),
            # without the LayerNorm after the adapter, nothing but its residual can carry the
            # residual stream x on: f does not
            "before_ln": (
                "before, residual after it",
                {
                    "original_ln_before": True,
                    "original_ln_after": False,
                    "residual_before_ln": False,
                },
            ),
            "after": ("after", {"original_ln_before": False, "original_ln_after": True}),
            "none": ("none", {"original_ln_before": False, "original_ln_after": False}),
        },
    ),
    "new": (
        "New LayerNorm",
        {
            "none": ("none", {"ln_before": False, "ln_after": False}),
            "before": ("before", {"ln_before": True, "ln_after": False}),
            "after": ("after", {"ln_before": False, "ln_after": True}),
            "before_after": ("before & after", {"ln_before": True, "ln_after": True}),
        },
    ),
    "residual": (
        "Residual",
        {
            "f": ("f", {"residual_before_ln": True}),
            "ln": ("LN(f + x)", {"residual_before_ln": False}),
            "sum": ("f + x", {"residual_before_ln": "post_add"}),
            "inside": ("before the new LayerNorm", {"adapter_residual_before_ln": True}),
        },
    ),
    "non_linearity": (
        "Non-linearity",
        {name: (name, {"non_linearity": name}) for name in ("relu", "leakyrelu", "swish")},
    ),
}
EXTRAS = {  # what the search is said to include: label, configuration
    "houlsby": (
        "Houlsby et al. (2019), LayerNorms too",
        RecipeConfig.houlsby(layer_norms=True, init_weights="houlsby"),
    ),
    "houlsby_adapters": ("Houlsby et al. (2019), adapters alone", RecipeConfig.houlsby()),
    "bapna": ("Bapna and Firat (2019)", RecipeConfig.bapna()),
}
OWNED = (
    "--stage",
    "--task",
    "--tasks",
    "--adapters",
    "--adapter",
    "--adapter-config",
    "--reduction-factor",
    "--seed",
    "--model",
    "--data-dir",
    "--out",
    "--resume",
    "--overwrite",
)
LINES = [
    ("o", "-"),
    ("s", "--"),
    ("^", "-."),
    ("D", ":"),
    ("v", (0, (5, 1, 1, 1, 1, 1))),
]  # of a panel's options
from runtime.options import Parser


def arguments(argv):
    parser = Parser(
        prog="python -m experiments.architecture_search",
        description="Searches the adapter's architecture, as appendix A.2.",
        epilog="Everything after -- goes to each train.py.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    grid.add_options(parser, "runs/search")
    add(
        "--tasks",
        nargs="+",
        required=True,
        help="each is searched by itself; the paper's: sst2 argument commonsense_qa",
    )
    add("--seeds", nargs="+", type=int, default=[0])
    add("--reduction-factors", nargs="+", type=float, default=[2, 8, 16, 64])
    add(
        "--extras",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also train " + ", ".join(EXTRAS),
    )
    for stage in ("adapter", "full"):
        add(
            f"--{stage}-options",
            default="",
            metavar="'...'",
            help=f"options of train.py for --stage {stage} alone, after those that follow --",
        )
    own, rest = grid.split(argv)
    args = parser.parse_args(own)
    grid.refuse_owned(rest, OWNED, "behind --")
    args.rest, args.options = rest, {}
    for stage in ("adapter", "full"):
        args.options[stage] = shlex.split(getattr(args, f"{stage}_options"))
        grid.refuse_owned(args.options[stage], OWNED, f"in --{stage}-options")
    for name in ("tasks", "seeds", "reduction_factors"):
        setattr(args, name, list(dict.fromkeys(getattr(args, name))))
    grid.complete(args, rest)
    return args


# --------------------------------------------------------------------------------------------------
# The steps


def cell(args, task, seed, config=None, factor=None):
    """One run: an adapter of this architecture, or without one the whole encoder."""
    if config is None:
        name, stage, words = "full", "full", []
    else:
        name, stage, words = (
            f"{architecture(config)}-{factor:g}",
            "adapter",
            ["--reduction-factor", f"{factor:g}"],
        )
        words += ["--adapter-config", *changes(config)] if changes(config) else []
    words = ["--stage", stage, "--task", task, *words, "--model", args.model, "--seed", str(seed)]
    words += ["--data-dir", args.data_dir] if args.data_dir else []
    return Cell(f"{task}-{name}-{seed}", (*words, *args.rest, *args.options[stage]))


def changes(config):
    """In what a configuration differs from --adapter pfeiffer: FIELD=VALUE ..., as train.py takes
    it."""
    found = {field.name: getattr(config, field.name) for field in fields(config)}
    found = {
        name: value
        for name, value in found.items()
        if value != getattr(RecipeConfig.pfeiffer(), name)
    }
    return [
        f"{name}={value if isinstance(value, str) else str(value).lower()}"
        for name, value in found.items()
    ]


def architecture(config):
    """A name of it for directories, such as top-before_after-none-f-relu; the same for the same
    architecture."""
    words = [
        next(
            option
            for option, (_, values) in options.items()
            if values.items() <= vars(config).items()
        )
        for _, options in STEPS.values()
    ]
    words += ["inside"] * config.adapter_residual_before_ln + ["layer_norms"] * config.layer_norms
    return "-".join([*words, config.init_weights] if config.init_weights != "bert" else words)


def options_of(step, best):
    """({option: RecipeConfig}, {option: why it is not one}) of a step, after what is best so far,
    {field: value}"""
    found, skipped = {}, {}
    for option, (_, values) in STEPS[step][1].items():
        try:
            config = RecipeConfig(**{**best, **values})
        except ValueError as e:
            skipped[option] = str(e)
            continue
        if reasons := without_effect(config):
            skipped[option] = next(iter(reasons.values()))
        else:
            found[option] = config
    return found, skipped


def build(args, tasks, step, best):
    """(cells, places): the runs of a step, and {(task, step, option, factor, seed): name}. best:
    {task: {field: value}}"""
    cells, places = {}, {}

    def add(task, step, option, config):
        for seed in args.seeds:
            for factor in args.reduction_factors if config else [None]:
                one = cell(args, task, seed, config, factor)
                cells[one.name] = one
                places[task, step, option, factor, seed] = one.name

    for task in tasks:
        for option, config in options_of(step, best[task])[0].items():
            add(task, step, option, config)
        if step == next(iter(STEPS)):
            add(task, "full", "full", None)
            for option, (_, config) in EXTRAS.items() if args.extras else ():
                add(task, "extras", option, config)
    return list(cells.values()), places


def collect(args, places, task, step):
    """{option: {factor: [metrics of each seed]}} of what is finished"""
    found = {}
    for (other, at, option, factor, _), name in places.items():
        if (other, at) == (task, step):
            result = grid.metrics(args.out, name)
            found.setdefault(option, {}).setdefault(factor, []).extend([result] if result else [])
    return found


def mean(args, by_factor):
    """Mean accuracy in % over all reduction factors and seeds; None if one of them has no
    result."""
    results = [result for results in by_factor.values() for result in results]
    if len(results) < len(by_factor) * len(args.seeds):
        return None
    return statistics.mean(100 * result["accuracy"] for result in results)


def winner(args, places, task, step, failed):
    """The option with the best mean, of equals the first; one that diverged has lost. None while
    another has no result."""
    means = {
        option: mean(args, found) for option, found in collect(args, places, task, step).items()
    }
    names = {
        option: [name for key, name in places.items() if key[:3] == (task, step, option)]
        for option in means
    }
    for option in means:
        reasons = [
            failed.get(name, "") for name in names[option] if grid.metrics(args.out, name) is None
        ]
        if any("no epoch was finished" not in reason for reason in reasons):
            return None
    trained = {option: value for option, value in means.items() if value is not None}
    return max(trained, key=trained.get, default=None)


# --------------------------------------------------------------------------------------------------
# Results


def label(step, option):
    if step == "extras":
        return EXTRAS[option][0]
    return STEPS[step][1][option][0] if step in STEPS else "full fine-tuning"


def spread(values):
    """Accuracies of the seeds, 0..1 -> (mean, standard deviation or None) in %"""
    values = [100 * value for value in values]
    return (
        statistics.mean(values) if values else None,
        statistics.stdev(values) if len(values) > 1 else None,
    )


def write_results(args, places, skipped, winners):
    """All tables and figures, of what is finished. Returns the path of the Markdown file."""
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for (task, step, option, factor, seed), name in places.items():
        if result := grid.metrics(args.out, name):
            factor = "" if factor is None else f"{factor:g}"
            rows.append(
                [
                    task,
                    step,
                    option,
                    factor,
                    seed,
                    f"{result['accuracy']:.6f}",
                    result["trained_parameters"],
                ]
            )
    header = [
        "task",
        "step",
        "option",
        "reduction_factor",
        "seed",
        "accuracy",
        "trained_parameters",
    ]
    write_csv(args.out / "search.csv", header, rows)
    parts = ["# Architecture search", "", caption(args), ""]
    for task in args.tasks:
        parts += report(args, places, skipped, winners, task)
    temporary = args.out / "search.md.tmp"
    temporary.write_text("\n".join(parts), encoding="utf-8")
    return temporary.replace(args.out / "search.md")


def caption(args):
    lines = [grid.about(args)]
    lines.append(
        "Each step keeps what was best in those before it and has the paper's outcome for those "
        "after it. Best: highest "
        "mean over the reduction factors."
    )
    lines.append(
        "The pretrained LayerNorm before the adapter alone is there twice: with f as the "
        "adapter's residual, as in the "
        "other options, where nothing carries the residual stream x on, and with LN(f + x)."
    )
    return "\n".join([*lines, *grid.options_in_words(args)])


def report(args, places, skipped, winners, task):
    """The part of a task: a table and a sentence for each step, and the figures."""
    first = next(iter(STEPS))
    full = spread(
        [result["accuracy"] for result in collect(args, places, task, "full")["full"][None]]
    )
    examples = [
        result["dev_examples"]
        for found in collect(args, places, task, first).values()
        for results in found.values()
        for result in results
    ]
    lines = [f"## {task}", "", f"Full fine-tuning: {text(*full)}."]
    if examples:
        lines.append(
            f"One of the {examples[0]:,} development examples is {100 / examples[0]:.2f} points."
        )
    lines.append("")
    panels = {}
    for letter, step in zip("abcdef", [*STEPS, "extras"], strict=True):
        found = collect(args, places, task, step)
        if not found:
            continue
        title = f"({letter}) {STEPS[step][0] if step in STEPS else 'Earlier architectures'}"
        panels[step] = title, found
        lines.append(table(args, step, title, found, winners.get((task, step))))
        if (task, step) in winners:
            lines += [sentence(args, step, found, winners[task, step]), ""]
        lines += [
            f"Not run: {label(step, option)}. {reason}.\n"
            for option, reason in skipped.get((task, step), {}).items()
        ]
    if (task, list(STEPS)[-1]) in winners:
        lines += [outcome(args, places, winners, task), ""]
    for name, steps in {task: list(STEPS)[:3], f"{task}-2": [*list(STEPS)[3:], "extras"]}.items():
        shown = [(step, *panels[step]) for step in steps if step in panels]
        if any(
            results
            for _, _, found in shown
            for by_factor in found.values()
            for results in by_factor.values()
        ):
            figure(args.out / f"{name}.png", task, args, shown, full[0])
            lines += [f"![{', '.join(title for _, title, _ in shown)}]({name}.png)", ""]
    return lines


def text(value, std=None):
    return number(value) + (f" ± {std:.2f}" if std is not None else "")


def table(args, step, title, found, best):
    lines = []
    for option, by_factor in found.items():
        name = label(step, option)
        parameters = [
            f"{results[0]['trained_parameters']:,}" for results in by_factor.values() if results
        ]
        values = [
            text(*spread([result["accuracy"] for result in results]))
            for results in by_factor.values()
        ]
        shown = " … ".join(dict.fromkeys([parameters[0], parameters[-1]])) if parameters else "–"
        lines.append(
            [
                f"**{name}**" if option == best else name,
                *values,
                number(mean(args, by_factor)),
                shown,
            ]
        )
    factors = [f"r = {factor:g}" for factor in args.reduction_factors]
    return "#" + markdown(title, ["", *factors, "mean", "trained parameters"], lines)


def sentence(args, step, found, best):
    """Which option won, by how much, and what the paper found."""
    means = {option: mean(args, by_factor) for option, by_factor in found.items()}
    diverged = [label(step, option) for option, value in means.items() if value is None]
    others = {
        option: value for option, value in means.items() if value is not None and option != best
    }
    words = f"Best: {label(step, best)}"
    if others:
        second = max(others, key=others.get)
        above = means[best] - others[second]
        words += (
            f", {above:.2f} points above {label(step, second)}"
            if above
            else f", the same as {label(step, second)}"
        )
    words += f". The loss diverged in runs of: {', '.join(diverged)}." if diverged else "."
    paper = next(iter(STEPS[step][1]))
    known = (
        "The paper's"
        if step in list(STEPS)[:3]
        else "The paper's (its figures do not show this step)"
    )
    words += f" {known}: {label(step, paper)}"
    if paper == best:
        return words + ", too."
    return words + (
        f", {means[best] - means[paper]:.2f} points below." if means.get(paper) is not None else "."
    )


def outcome(args, places, winners, task):
    """The architecture that is left at the end, beside the paper's."""
    *_, (last, option) = ((step, winners[task, step]) for step in STEPS)
    best = {
        field: value
        for step in STEPS
        for field, value in STEPS[step][1][winners[task, step]][1].items()
    }
    words = changes(RecipeConfig(**best))
    value = mean(args, collect(args, places, task, last)[option])
    command = (
        f"`--adapter pfeiffer --adapter-config {' '.join(words)}`"
        if words
        else "`--adapter pfeiffer`"
    )
    if not words:
        return f"**What is left at the end is the paper's architecture**, {command}: {value:.2f}."
    papers = mean(
        args, collect(args, places, task, next(iter(STEPS)))[next(iter(STEPS["position"][1]))]
    )
    papers = (
        f"; the paper's architecture, `--adapter pfeiffer`: {papers:.2f}"
        if papers is not None
        else ""
    )
    return (
        f"**What is left at the end is not the paper's architecture**, but {command}: "
        f"{value:.2f}{papers}."
    )


def figure(path, task, args, panels, full):
    """Accuracy over the reduction factor: a panel for each step, a curve for each option, full
    fine-tuning as a line. What has learned nothing is named in the legend alone, so that it doesn't
    press the other curves together."""
    shape, axes = plt.subplots(
        1,
        len(panels),
        figsize=(4.2 * len(panels), 4.6),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    best = max(
        (
            100 * result["accuracy"]
            for _, _, found in panels
            for by_factor in found.values()
            for results in by_factor.values()
            for result in results
        ),
        default=0,
    )
    for panel, (step, title, found) in zip(axes[0], panels, strict=True):
        if full is not None:
            panel.axhline(full, color="black", linewidth=2.2, alpha=0.35, label="full fine-tuning")
        for (option, by_factor), (marker, style) in zip(found.items(), LINES, strict=False):
            points = [
                (factor, *spread([result["accuracy"] for result in results]))
                for factor, results in sorted(by_factor.items())
                if results
            ]
            if points:
                factors, means, stds = zip(*points, strict=True)
                if max(means) < best - 15:
                    panel.plot(
                        [],
                        [],
                        marker=marker,
                        linestyle=style,
                        linewidth=1.4,
                        markersize=5,
                        label=f"{label(step, option)}: {min(means):.0f} to {max(means):.0f} "
                        "%, not shown",
                    )
                    continue
                panel.errorbar(
                    factors,
                    means,
                    None if None in stds else stds,
                    marker=marker,
                    linestyle=style,
                    capsize=2,
                    linewidth=1.4,
                    markersize=5,
                    label=label(step, option),
                )
        panel.set_xscale("log", base=2)
        panel.set_xticks(
            sorted(args.reduction_factors),
            [f"{factor:g}" for factor in sorted(args.reduction_factors)],
        )
        panel.minorticks_off()
        panel.set(title=title, xlabel="reduction factor")
        panel.grid(color="0.88", linewidth=0.6)
        panel.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False, handlelength=3.5
        )
    axes[0, 0].set_ylabel(f"{task}: accuracy, %")
    shape.savefig(path, dpi=150)
    plt.close(shape)


# --------------------------------------------------------------------------------------------------


def plan(args, sizes, bert):
    """Prints the runs of all steps, and how long they take at most. An undecided step is taken to
    end as in the paper."""
    cells, best, assumed = {}, {task: {} for task in args.tasks}, []
    for step in STEPS:
        of_step, places = build(args, args.tasks, step, best)
        cells |= {one.name: one for one in of_step}
        for task in args.tasks:
            option = winner(args, places, task, step, {})
            if option is None:
                option = next(iter(STEPS[step][1]))
                assumed.append(f"{task} ({step})")
            best[task] |= STEPS[step][1][option][1]
    total = grid.plan(list(cells.values()), args, sizes, bert, {})
    if assumed:
        print(
            "taken to end as in the paper, which decides what is run after it: "
            f"{', '.join(assumed)}"
        )
    print(total, flush=True)


def main(argv=None):
    try:
        args = arguments(sys.argv[1:] if argv is None else argv)
        bert = Bert.from_pretrained(args.model)
        args.encoder = grid.encoder_name(args.model, bert)
        for factor in args.reduction_factors:
            RecipeConfig(reduction_factor=factor)  # says so at once of what no adapter takes
            if factor > bert.config.hidden_size:
                raise ValueError(
                    f"--reduction-factors: {factor:g} leaves no bottleneck in hidden size "
                    f"{bert.config.hidden_size}"
                )
        sizes = grid.sizes(args.tasks, args.data_dir)
        best, winners, skipped, places, failed = {task: {} for task in args.tasks}, {}, {}, {}, {}
        for one in build(args, args.tasks, next(iter(STEPS)), best)[0]:
            grid.parse(one, args.out)
        if args.plan:
            plan(args, sizes, bert)
            return 0
        tasks = args.tasks
        for step, (title, _) in STEPS.items():
            print(f"{title}: {', '.join(tasks)}", flush=True)
            for task in tasks:
                skipped[task, step] = options_of(step, best[task])[1]
                for option, reason in skipped[task, step].items():
                    print(f"{task}: {label(step, option)} is not run: {reason}", flush=True)
            cells, here = build(args, tasks, step, best)
            places |= here
            grid.check(cells, args.out, args.overwrite)
            failed |= grid.run(cells, args.out, args.jobs, args.cuda, args.launch)
            for task in tasks:
                option = winner(args, places, task, step, failed)
                if option is not None:
                    winners[task, step] = option
                    best[task] |= STEPS[step][1][option][1]
                    print(
                        f"{task}: {sentence(args, step, collect(args, places, task, step), option)}",
                        flush=True,
                    )
            path = write_results(args, places, skipped, winners)
            tasks = [task for task in tasks if (task, step) in winners]
            if not tasks:
                break
        print(path, flush=True)
        return grid.report(failed, args.out)
    except (ValueError, OSError) as e:
        print(f"architecture_search: {' '.join(str(e).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "architecture_search: interrupted; the same command goes on from here", file=sys.stderr
        )
        return 130


if __name__ == "__main__":
    sys.exit(main())
