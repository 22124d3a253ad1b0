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

from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from adapter import ADAPTERS
from experiments import grid, report
from formats.adapterhub import without_effect
from runtime import settings
from runtime.command import run_command

# step: {option: (label, what it sets)}, the paper's outcome first
STEPS = {
    "position": {
        "top": ("top only", "mh_adapter=false output_adapter=true"),
        "bottom": ("bottom only", "mh_adapter=true output_adapter=false"),
        "both": ("both", "mh_adapter=true output_adapter=true"),
    },
    # Without the LayerNorm after the adapter, only the adapter's residual can carry the residual
    # stream x on, and f does not: so "before" is there twice. The paper has it once.
    "pretrained": {
        "before_after": ("before & after", "original_ln_before=true original_ln_after=true"),
        "before": ("before", "original_ln_before=true original_ln_after=false"),
        "before_ln": (
            "before, residual LN(f + x)",
            "original_ln_before=true original_ln_after=false residual_before_ln=false",
        ),
        "after": ("after", "original_ln_before=false original_ln_after=true"),
        "none": ("none", "original_ln_before=false original_ln_after=false"),
    },
    "new": {
        "none": ("none", "ln_before=false ln_after=false"),
        "before": ("before", "ln_before=true ln_after=false"),
        "after": ("after", "ln_before=false ln_after=true"),
        "before_after": ("before & after", "ln_before=true ln_after=true"),
    },
    "residual": {
        "f": ("f", "residual_before_ln=true"),
        "ln": ("LN(f + x)", "residual_before_ln=false"),
        "sum": ("f + x", "residual_before_ln=post_add"),
        "inside": ("before the new LayerNorm", "adapter_residual_before_ln=true"),
    },
    "non_linearity": {
        name: (name, f"non_linearity={name}") for name in ("relu", "leakyrelu", "swish")
    },
}
# Earlier architectures, which the paper's search is said to include: (label, options). Houlsby et
# al.'s LayerNorms come with the activation of their code (GELU) and the initialisation of their
# paper (sigma 0.01).
EXTRAS = {
    "houlsby": (
        "Houlsby et al. (2019), LayerNorms too",
        "--adapter houlsby_recipe --adapter-config init_weights=houlsby",
    ),
    "houlsby_adapters": ("Houlsby et al. (2019), adapters alone", "--adapter houlsby"),
    "bapna": ("Bapna and Firat (2019)", "--adapter bapna"),
}
TITLES = {
    "position": "(a) Adapter positions",
    "pretrained": "(b) Pretrained LayerNorm",
    "new": "(c) New LayerNorm",
    "residual": "(d) Residual",
    "non_linearity": "(e) Non-linearity",
    "extras": "(f) Earlier architectures",
}
LINES = "o- s-- ^-. D: v-".split()  # marker and line of a panel's options


@dataclass(frozen=True)
class Options(grid.Options):
    tasks: tuple = settings.option(
        (), "each is searched by itself; the paper's: sst2 argument commonsense_qa", required=True
    )
    out: Path = grid.operation(Path("runs/search"), "of runs and results; default runs/search")
    reduction_factors: tuple[float, ...] = settings.option((2.0, 8.0, 16.0, 64.0))
    no_extras: bool = settings.option(False, f"leave out {', '.join(EXTRAS)}")
    adapter_options: str = grid.stage_options("adapter")
    full_options: str = grid.stage_options("full")


def sets(step, name):
    """{field: value} of an option."""
    return dict(map(settings.pair, STEPS[step][name][1].split()))


def papers(step):
    return next(iter(STEPS[step]))


def options_of(step, best):
    """({option: configuration}, {option: why it is not trained}) of a step. best: {field: value},
    what the steps before it have chosen"""
    found, skipped = {}, {}
    for name in STEPS[step]:
        try:
            config = ADAPTERS["pfeiffer"](**{**best, **sets(step, name)})
        except ValueError as e:
            skipped[name] = str(e)
            continue
        if reasons := without_effect(config):
            skipped[name] = next(iter(reasons.values()))
        else:
            found[name] = config
    return found, skipped


def architecture(config):
    """A name of it for directories, such as top-before_after-none-f-relu; the same for the same
    architecture."""
    words = []
    for step in STEPS:
        sets_it = (name for name in STEPS[step] if sets(step, name).items() <= vars(config).items())
        words.append(next(sets_it))
    return "-".join([*words, *["inside"] * config.adapter_residual_before_ln])


def changes(config):
    """In what a configuration differs from --adapter pfeiffer: FIELD=VALUE ..., as train.py takes
    it."""
    default = ADAPTERS["pfeiffer"]()
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    return [
        f"{name}={value if isinstance(value, str) else str(value).lower()}"
        for name, value in values.items()
        if value != getattr(default, name)
    ]


def label(step, name):
    return EXTRAS[name][0] if step == "extras" else STEPS[step][name][0]


# --------------------------------------------------------------------------------------------------
# The search


class Run(NamedTuple):
    step: str  # or full, extras
    option: str
    factor: float | None  # None: full fine-tuning
    seed: int
    name: str


class Search:
    """Of one task."""

    def __init__(self, options, task):
        self.options, self.task, self.runs = options, task, []
        self.results, self.failed = {}, {}  # {name: closing line}, {name: reason}
        self.best = {}  # {field: value}: what the steps have chosen
        self.winners, self.skipped = {}, {}  # {step: option}, {step: {option: reason}}

    def build(self, step):
        """The cells of a step, whose runs are noted."""
        cells, factors = {}, self.options.reduction_factors

        def add(step, option, stage, name, words, factors):
            for factor in factors:
                size = [] if factor is None else ["--reduction-factor", f"{factor:g}"]
                for seed in self.options.seeds:
                    run = "-".join([self.task, name, *size[1:], str(seed)])
                    given = ["--task", self.task, *words, *size]
                    cells[run] = grid.cell(self.options, run, stage, given, seed)
                    self.runs.append(Run(step, option, factor, seed, run))

        found, self.skipped[step] = options_of(step, self.best)
        for option, config in found.items():
            words = ["--adapter-config", *changes(config)] if changes(config) else []
            add(step, option, "adapter", architecture(config), words, factors)
        if step == "position":
            add("full", "full", "full", "full", [], [None])
            for option, (_, words) in EXTRAS.items() if not self.options.no_extras else ():
                add("extras", option, "adapter", option, words.split(), factors)
        return list(cells.values())

    def names(self, step, **which):
        """Of a step's runs, or of those with one option=, one factor=."""
        wanted = {"step": step, **which}.items()
        return [run.name for run in self.runs if wanted <= run._asdict().items()]

    def found(self, step, **which):
        """The closing lines of those of them that are finished."""
        return [self.results[name] for name in self.names(step, **which) if name in self.results]

    def over_seeds(self, step, **which):
        """(mean, standard deviation) in %"""
        return report.mean_and_deviation(r["accuracy"] for r in self.found(step, **which))

    def means(self, step):
        """{option: mean accuracy in % over all reduction factors and seeds}; None if one of them
        has no result"""
        result = {}
        for option in dict.fromkeys(run.option for run in self.runs if run.step == step):
            done = self.found(step, option=option)
            complete = len(done) == len(self.names(step, option=option))
            result[option] = self.over_seeds(step, option=option)[0] if complete else None
        return result

    def winner(self, step):
        """The option with the best mean, of equals the first. An option whose runs diverged has
        lost; None while any other option lacks a result."""
        missing = [self.failed.get(n, "") for n in self.names(step) if n not in self.results]
        if any("no epoch was finished" not in reason for reason in missing):
            return None
        trained = {o: mean for o, mean in self.means(step).items() if mean is not None}
        return max(trained, key=trained.get, default=None)

    # ----------------------------------------------------------------------------------------------
    # In words

    def sentence(self, step):
        """Which option won, by how much, and what the paper found."""
        means, best, paper = self.means(step), self.winners[step], papers(step)
        trained = {option: mean for option, mean in means.items() if mean is not None}
        words = f"Best: {label(step, best)}"
        if others := [option for option in trained if option != best]:
            second = max(others, key=trained.get)
            words += f", {trained[best] - trained[second]:.2f} points above {label(step, second)}"
        if diverged := [label(step, option) for option in means if option not in trained]:
            words += f". The loss diverged in runs of: {', '.join(diverged)}"
        shown = step in ("position", "pretrained", "new")
        words += f". The paper's{'' if shown else ' (its figures do not show this step)'}: "
        words += label(step, paper)
        if paper == best:
            return words + ", too."
        below = f", {trained[best] - trained[paper]:.2f} points below" if paper in trained else ""
        return words + below + "."

    def outcome(self):
        """The architecture that is left at the end, beside the paper's."""
        last, changed = list(STEPS)[-1], changes(ADAPTERS["pfeiffer"](**self.best))
        value = self.means(last)[self.winners[last]]
        paper = report.two_decimals(self.means("position")[papers("position")])
        words = "--adapter pfeiffer" + (f" --adapter-config {' '.join(changed)}" if changed else "")
        return (
            f"**What is left at the end is {'not ' * bool(changed)}the paper's architecture**: "
            f"{value:.2f} with `{words}`, {paper} with `--adapter pfeiffer`."
        )


# --------------------------------------------------------------------------------------------------
# Results


def write_results(searches, options, config):
    """All tables and figures, of what is finished. Returns the path of the Markdown file."""
    rows = []
    for search in searches:
        for step, option, factor, seed, name in search.runs:
            if result := search.results.get(name):
                size = "" if factor is None else f"{factor:g}"
                numbers = [f"{result['accuracy']:.6f}", result["trained_parameters"]]
                rows.append([search.task, step, option, size, seed, *numbers])
    header = "task step option reduction_factor seed accuracy trained_parameters".split()
    report.write_csv(options.out / "search.csv", header, rows)
    above = grid.caption(
        options,
        config,
        "Each step keeps what was best in those before it and has the paper's outcome for those "
        "after it. Best: highest mean over the reduction factors.",
    )
    lines = ["# Architecture search", "", above, ""]
    for search in searches:
        lines += task_results(search)
    return report.write_text(options.out / "search.md", "\n".join(lines))


def task_results(search):
    """The part of a task: a table and a sentence for each step, and the figures."""
    full = search.over_seeds("full")
    lines = [f"## {search.task}", "", f"Full fine-tuning: {report.with_deviation(*full)}."]
    for step, title in TITLES.items():
        if search.names(step):
            lines += ["", f"### {title}", "", step_table(search, step)]
            if step in search.winners:
                lines += [search.sentence(step), ""]
            for option, reason in search.skipped.get(step, {}).items():
                lines += [f"Not run: {label(step, option)}. {reason}.", ""]
    if list(STEPS)[-1] in search.winners:
        lines += [search.outcome(), ""]
    for name, steps in {search.task: [*TITLES][:3], f"{search.task}-2": [*TITLES][3:]}.items():
        if shown := [step for step in steps if search.found(step)]:
            figure(search.options.out / f"{name}.png", search, shown, full[0])
            lines += [f"![{', '.join(TITLES[step] for step in shown)}]({name}.png)", ""]
    return lines


def step_table(search, step):
    rows, factors = [], search.options.reduction_factors
    for option, mean in search.means(step).items():
        name = label(step, option)
        best = search.winners.get(step) == option
        values = [search.over_seeds(step, option=option, factor=factor) for factor in factors]
        values = [report.with_deviation(*value) for value in values]
        sizes = [f"{r['trained_parameters']:,}" for r in search.found(step, option=option)]
        size = " … ".join(dict.fromkeys([sizes[0], sizes[-1]])) if sizes else "–"
        rows.append([f"**{name}**" if best else name, *values, mean, size])
    header = ["", *(f"r = {factor:g}" for factor in factors), "mean", "trained parameters"]
    return report.markdown(rows, header)


def figure(path, search, steps, full):
    """Accuracy over the reduction factor: a panel for each step, a curve for each option, full
    fine-tuning as a line. What is more than 15 points below the best is cut off, so that it does
    not press the other curves together."""
    size, factors = (4.2 * len(steps), 4.6), sorted(search.options.reduction_factors)
    shape, ((*panels,),) = report.subplots(1, len(steps), size, sharey=True, squeeze=False)
    for panel, step in zip(panels, steps, strict=True):
        if full is not None:
            panel.axhline(full, color="black", linewidth=2.2, alpha=0.35, label="full fine-tuning")
        for option, line in zip(search.means(step), LINES, strict=False):
            points = [(f, *search.over_seeds(step, option=option, factor=f)) for f in factors]
            if points := [point for point in points if point[1] is not None]:
                xs, means, deviations = zip(*points, strict=True)
                errors = None if None in deviations else deviations
                style = {"fmt": line, "linewidth": 1.4, "markersize": 5, "capsize": 2}
                panel.errorbar(xs, means, errors, label=label(step, option), **style)
        panel.set_xscale("log", base=2)
        panel.set_xticks(factors, [f"{factor:g}" for factor in factors])
        panel.minorticks_off()
        panel.set(title=TITLES[step], xlabel="reduction factor")
        panel.grid(color="0.88", linewidth=0.6)
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16)}
        panel.legend(frameon=False, handlelength=3.5, **below)
    best = max(100 * result["accuracy"] for step in steps for result in search.found(step))
    panel.set_ylim(bottom=max(panel.get_ylim()[0], best - 15))
    panels[0].set_ylabel(f"{search.task}: accuracy, %")
    report.save_figure(shape, path)


# --------------------------------------------------------------------------------------------------
# The command


def run(searches, options, config):
    """Task after task and step after step, and writes the results after each. config: of the
    encoder"""
    for search in searches:
        for step in STEPS:
            print(f"{search.task}, {TITLES[step]}", flush=True)
            results, failed = grid.run(search.build(step), options)
            search.results |= results
            search.failed |= failed
            if option := search.winner(step):
                search.winners[step] = option
                search.best |= sets(step, option)
                print(search.sentence(step), flush=True)
            path = write_results(searches, options, config)
            if option is None:
                break
    print(path, flush=True)
    grid.end({name: reason for search in searches for name, reason in search.failed.items()})


def plan(searches, options):
    """Lists the runs of all steps, as if each ended as in the paper."""
    cells = {}
    for search in searches:
        for step in STEPS:
            cells |= {cell.name: cell for cell in search.build(step)}
            search.best |= sets(step, papers(step))
    grid.print_plan(list(cells.values()), options)
    print("What follows a step is listed as if the step ended as in the paper.")


def main(argv=None):
    description = "Searches the adapter's architecture, as appendix A.2."
    options = grid.read_options(Options, argv, "architecture_search", description)
    grid.check_owned(options)
    grid.train_examples(options.tasks, options.data_dir)  # whatever is not there is found now
    searches = [Search(options, task) for task in options.tasks]
    if options.plan:
        plan(searches, options)
    else:
        run(searches, options, grid.encoder(options.model).config)


if __name__ == "__main__":
    run_command("architecture_search", main)
