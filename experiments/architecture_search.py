"""The architecture search of appendix A.2 (Figures 5, 7, 8 and 9): where the adapter sits, and
which LayerNorms are around it.

    python -m experiments.architecture_search --tasks sst2 --data-dir DATA --out runs/search --plan
    python -m experiments.architecture_search --tasks sst2 ... -- --epochs 10 --dtype bfloat16

What follows "--" goes to each train.py. For each task, step by step: position of the adapter,
BERT's own LayerNorms, new LayerNorms, the residual, the non-linearity. Every option of a step is
trained at every reduction factor; the one with the best mean accuracy is kept for the steps after
it. What has not been searched yet is as in the paper's outcome, the first option of each step (what
it was there is not printed).

Each number is a run of train.py in OUT/runs (experiments/grid.py): the same command again skips
what is finished, continues what was interrupted and tries again what failed; an architecture that
comes up twice is trained once. After each step, OUT/search.md, search.csv and the figures are
written of what is there.
"""

if __name__ == "__main__":
    from runtime.command import announce

    announce("architecture_search")

import argparse
import statistics
import sys
from dataclasses import fields

import matplotlib.pyplot as plt

from adapter import AdapterConfig
from experiments import grid, plan
from experiments.grid import Cell
from experiments.report import (
    encoder_name,
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
from formats.adapterhub import without_effect
from runtime.command import errors_in_one_line
from runtime.options import Parser

# step: (title, {option: (label, fields of AdapterConfig)}), the paper's outcome first
STEPS = {
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
            # Without the LayerNorm after the adapter, only the adapter's residual can carry the
            # residual stream x on, and f does not.
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
# earlier architectures, which the paper's search is said to include: (label, configuration)
EXTRAS = {
    "houlsby": (
        "Houlsby et al. (2019), LayerNorms too",
        AdapterConfig.houlsby_recipe(init_weights="houlsby"),
    ),
    "houlsby_adapters": ("Houlsby et al. (2019), adapters alone", AdapterConfig.houlsby()),
    "bapna": ("Bapna and Firat (2019)", AdapterConfig.bapna()),
}
# (marker, line style) of a panel's options
LINES = [("o", "-"), ("s", "--"), ("^", "-."), ("D", ":"), ("v", (0, (5, 1, 1, 1, 1, 1)))]
STAGES = ("adapter", "full")


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
    grid.add_stage_options(parser, STAGES)
    args, rest = grid.own_arguments(parser, argv)
    for name in ("tasks", "seeds", "reduction_factors"):
        setattr(args, name, grid.distinct(getattr(args, name)))
    grid.complete(args, rest, STAGES)
    return args


# --------------------------------------------------------------------------------------------------
# The steps


def cell(args, task, seed, config=None, factor=None):
    """One run: an adapter of this architecture, or without one the whole encoder."""
    name, stage, words = "full", "full", []
    if config is not None:
        name, stage = f"{architecture(config)}-{factor:g}", "adapter"
        words = ["--reduction-factor", f"{factor:g}"]
        if changed := changes(config):
            words += ["--adapter-config", *changed]
    words = ["--stage", stage, "--task", task, *words, "--model", args.model, "--seed", str(seed)]
    if args.data_dir:
        words += ["--data-dir", args.data_dir]
    return Cell(f"{task}-{name}-{seed}", (*words, *args.rest, *args.options[stage]))


def changes(config):
    """In what a configuration differs from --adapter pfeiffer: FIELD=VALUE ..., as train.py takes
    it."""
    papers, words = AdapterConfig.pfeiffer(), []
    for field in fields(config):
        value = getattr(config, field.name)
        if value != getattr(papers, field.name):
            text = value if isinstance(value, str) else str(value).lower()
            words.append(f"{field.name}={text}")
    return words


def architecture(config):
    """A name of it for directories, such as top-before_after-none-f-relu; the same for the same
    architecture."""
    words = []
    for _, options in STEPS.values():
        for option, (_, values) in options.items():
            if values.items() <= vars(config).items():
                words.append(option)
                break
    if config.adapter_residual_before_ln:
        words.append("inside")
    if config.layer_norms:
        words.append("layer_norms")
    if config.init_weights != "bert":
        words.append(config.init_weights)
    return "-".join(words)


def options_of(step, best):
    """({option: AdapterConfig}, {option: why it is not trained}) of a step. best: {field: value},
    what the steps before it have chosen"""
    found, skipped = {}, {}
    for option, (_, values) in STEPS[step][1].items():
        try:
            config = AdapterConfig(**{**best, **values})
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

    def add(task, step, option, config, factors=args.reduction_factors):
        for seed in args.seeds:
            for factor in factors:
                one = cell(args, task, seed, config, factor)
                cells[one.name] = one
                places[task, step, option, factor, seed] = one.name

    for task in tasks:
        for option, config in options_of(step, best[task])[0].items():
            add(task, step, option, config)
        if step == next(iter(STEPS)):
            add(task, "full", "full", None, factors=[None])
            if args.extras:
                for option, (_, config) in EXTRAS.items():
                    add(task, "extras", option, config)
    return list(cells.values()), places


def collect(args, places, task, step):
    """{option: {factor: [metrics of each seed]}} of what is finished"""
    found = {}
    for (other, at, option, factor, _), name in places.items():
        if (other, at) == (task, step):
            results = found.setdefault(option, {}).setdefault(factor, [])
            if result := grid.metrics(args.out, name):
                results.append(result)
    return found


def mean(args, by_factor):
    """Mean accuracy in % over all reduction factors and seeds; None if one of them has no
    result."""
    results = [result for results in by_factor.values() for result in results]
    if len(results) < len(by_factor) * len(args.seeds):
        return None
    return statistics.mean(100 * result["accuracy"] for result in results)


def winner(args, places, task, step, failed):
    """The option with the best mean, of equals the first. An option whose runs diverged has lost;
    None while any other option lacks a result."""
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


def write_results(args, places, skipped, winners):
    """All tables and figures, of what is finished. Returns the path of the Markdown file."""
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for (*where, factor, seed), name in places.items():
        if result := grid.metrics(args.out, name):
            factor = "" if factor is None else f"{factor:g}"
            accuracy = f"{result['accuracy']:.6f}"
            rows.append([*where, factor, seed, accuracy, result["trained_parameters"]])
    header = "task step option reduction_factor seed accuracy trained_parameters".split()
    write_csv(args.out / "search.csv", header, rows)
    parts = ["# Architecture search", "", caption(args), ""]
    for task in args.tasks:
        parts += report(args, places, skipped, winners, task)
    return write_text(args.out / "search.md", "\n".join(parts))


def caption(args):
    lines = [
        what_is_measured(args),
        "Each step keeps what was best in those before it and has the paper's outcome for those "
        "after it. Best: highest mean over the reduction factors.",
        "The pretrained LayerNorm before the adapter alone is there twice: with f as the "
        "adapter's residual, as in the other options, where nothing carries the residual stream x "
        "on, and with LN(f + x).",
    ]
    return "\n".join([*lines, *options_in_words(args)])


def report(args, places, skipped, winners, task):
    """The part of a task: a table and a sentence for each step, and the figures."""
    first, last = next(iter(STEPS)), list(STEPS)[-1]
    full = collect(args, places, task, "full")["full"][None]
    full = mean_and_deviation(result["accuracy"] for result in full)
    lines = [f"## {task}", "", f"Full fine-tuning: {with_deviation(*full)}."]
    if finished := all_results(collect(args, places, task, first)):
        examples = finished[0]["dev_examples"]
        lines.append(
            f"One of the {examples:,} development examples is {100 / examples:.2f} points."
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
        for option, reason in skipped.get((task, step), {}).items():
            lines.append(f"Not run: {label(step, option)}. {reason}.\n")
    if (task, last) in winners:
        lines += [outcome(args, places, winners, task), ""]
    for name, steps in {task: list(STEPS)[:3], f"{task}-2": [*list(STEPS)[3:], "extras"]}.items():
        shown = [(step, *panels[step]) for step in steps if step in panels]
        if any(all_results(found) for _, _, found in shown):
            figure(args.out / f"{name}.png", task, args, shown, full[0])
            lines += [f"![{', '.join(title for _, title, _ in shown)}]({name}.png)", ""]
    return lines


def all_results(found):
    """Those in {option: {factor: [metrics of each seed]}}"""
    return [
        result
        for by_factor in found.values()
        for results in by_factor.values()
        for result in results
    ]


def table(args, step, title, found, best):
    lines = []
    for option, by_factor in found.items():
        name = label(step, option)
        parameters = [
            f"{results[0]['trained_parameters']:,}" for results in by_factor.values() if results
        ]
        values = [
            with_deviation(*mean_and_deviation(result["accuracy"] for result in results))
            for results in by_factor.values()
        ]
        shown = " … ".join(dict.fromkeys([parameters[0], parameters[-1]])) if parameters else "–"
        lines.append(
            [
                f"**{name}**" if option == best else name,
                *values,
                two_decimals(mean(args, by_factor)),
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
    best = {}
    for step in STEPS:
        best |= STEPS[step][1][winners[task, step]][1]
    words = changes(AdapterConfig(**best))
    last = list(STEPS)[-1]
    value = mean(args, collect(args, places, task, last)[winners[task, last]])
    command = "`--adapter pfeiffer`"
    if words:
        command = f"`--adapter pfeiffer --adapter-config {' '.join(words)}`"
    else:
        return f"**What is left at the end is the paper's architecture**, {command}: {value:.2f}."
    first = next(iter(STEPS))
    papers_option = next(iter(STEPS[first][1]))
    papers = mean(args, collect(args, places, task, first)[papers_option])
    beside = (
        "" if papers is None else f"; the paper's architecture, `--adapter pfeiffer`: {papers:.2f}"
    )
    return (
        f"**What is left at the end is not the paper's architecture**, but {command}: "
        f"{value:.2f}{beside}."
    )


def figure(path, task, args, panels, full):
    """Accuracy over the reduction factor: a panel for each step, a curve for each option, full
    fine-tuning as a line. What has learned nothing is named in the legend alone, so that it does
    not press the other curves together."""
    size = (4.2 * len(panels), 4.6)
    shape, axes = plt.subplots(
        1, len(panels), figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    results = [result for _, _, found in panels for result in all_results(found)]
    best = max((100 * result["accuracy"] for result in results), default=0)
    factors = sorted(args.reduction_factors)
    for panel, (step, title, found) in zip(axes[0], panels, strict=True):
        if full is not None:
            panel.axhline(full, color="black", linewidth=2.2, alpha=0.35, label="full fine-tuning")
        for (option, by_factor), (marker, line) in zip(found.items(), LINES, strict=False):
            style = {"marker": marker, "linestyle": line, "linewidth": 1.4, "markersize": 5}
            draw_curve(panel, label(step, option), by_factor, best - 15, style)
        panel.set_xscale("log", base=2)
        panel.set_xticks(factors, [f"{factor:g}" for factor in factors])
        panel.minorticks_off()
        panel.set(title=title, xlabel="reduction factor")
        panel.grid(color="0.88", linewidth=0.6)
        panel.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False, handlelength=3.5
        )
    axes[0, 0].set_ylabel(f"{task}: accuracy, %")
    save_figure(shape, path)


def draw_curve(panel, name, by_factor, lowest, style):
    """Mean and deviation by factor; only a line in the legend for a curve that is all below
    `lowest`."""
    points = [
        (factor, *mean_and_deviation(result["accuracy"] for result in results))
        for factor, results in sorted(by_factor.items())
        if results
    ]
    if not points:
        return
    factors, means, deviations = zip(*points, strict=True)
    if max(means) < lowest:
        name = f"{name}: {min(means):.0f} to {max(means):.0f} %, not shown"
        panel.plot([], [], label=name, **style)
        return
    errors = None if None in deviations else deviations
    panel.errorbar(factors, means, errors, capsize=2, label=name, **style)


# --------------------------------------------------------------------------------------------------


def print_plan(args, sizes, config, directory):
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
    total = plan.print_runs(list(cells.values()), args, sizes, config, directory, {})
    if assumed:
        print(
            "taken to end as in the paper, which decides what is run after it: "
            f"{', '.join(assumed)}"
        )
    print(total, flush=True)


def search(args):
    """Runs step after step, and writes the results after each. Returns the exit status."""
    best, tasks = {task: {} for task in args.tasks}, args.tasks
    winners, skipped, places, failed = {}, {}, {}, {}
    for step, (title, _) in STEPS.items():
        print(f"{title}: {', '.join(tasks)}", flush=True)
        for task in tasks:
            skipped[task, step] = options_of(step, best[task])[1]
            for option, reason in skipped[task, step].items():
                print(f"{task}: {label(step, option)} is not run: {reason}", flush=True)
        cells, of_step = build(args, tasks, step, best)
        places |= of_step
        grid.check(cells, args.out, args.overwrite)
        failed |= grid.run(cells, args.out, args.jobs, args.cuda, args.launch)
        for task in tasks:
            option = winner(args, places, task, step, failed)
            if option is not None:
                winners[task, step] = option
                best[task] |= STEPS[step][1][option][1]
                found = collect(args, places, task, step)
                print(f"{task}: {sentence(args, step, found, option)}", flush=True)
        path = write_results(args, places, skipped, winners)
        tasks = [task for task in tasks if (task, step) in winners]
        if not tasks:
            break
    print(path, flush=True)
    return grid.report(failed, args.out)


def run(args):
    """The whole command. Returns its exit status."""
    config, directory = plan.find_encoder(args.model, whole=not args.plan)
    args.encoder = encoder_name(args.model, config)
    for factor in args.reduction_factors:
        AdapterConfig(reduction_factor=factor)  # raises ValueError for what no adapter takes
        if factor > config.hidden_size:
            raise ValueError(
                f"--reduction-factors: {factor:g} leaves no bottleneck in hidden size "
                f"{config.hidden_size}"
            )
    sizes = plan.sizes(args.tasks, args.data_dir)
    for one in build(args, args.tasks, next(iter(STEPS)), {task: {} for task in args.tasks})[0]:
        grid.parse(one, args.out)
    if args.plan:
        print_plan(args, sizes, config, directory)
        return 0
    return search(args)


def main(argv=None):
    """Returns the exit status."""
    with errors_in_one_line("architecture_search", interrupted=grid.INTERRUPTED):
        return run(arguments(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
