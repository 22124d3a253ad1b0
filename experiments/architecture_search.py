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

import statistics
from dataclasses import dataclass, field, fields
from pathlib import Path

import train
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
            "before, residual after it",
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
# (marker, line style) of a panel's options
LINES = [("o", "-"), ("s", "--"), ("^", "-."), ("D", ":"), ("v", (0, (5, 1, 1, 1, 1, 1)))]


@dataclass(frozen=True)
class Options(grid.Options):
    tasks: tuple = settings.option(
        (), "each is searched by itself; the paper's: sst2 argument commonsense_qa", required=True
    )
    out: Path = settings.option(
        Path("runs/search"), "directory of runs and results; default runs/search"
    )
    reduction_factors: tuple[float, ...] = settings.option((2.0, 8.0, 16.0, 64.0))
    no_extras: bool = settings.option(False, f"leave out {', '.join(EXTRAS)}")
    adapter_options: str = grid.stage_options("adapter")
    full_options: str = grid.stage_options("full")


def sets(step, name):
    """{field: value} of an option."""
    return settings.pairs("", STEPS[step][name][1].split())


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


@dataclass
class Search:
    options: Options
    best: dict  # task: {field: value}, what its steps have chosen
    # (task, step): {option: {factor: [name of each seed's run]}}
    places: dict = field(default_factory=dict)
    results: dict = field(default_factory=dict)  # name: closing line
    failed: dict = field(default_factory=dict)  # name: reason
    skipped: dict = field(default_factory=dict)  # (task, step): {option: reason}
    winners: dict = field(default_factory=dict)  # (task, step): option

    def build(self, tasks, step):
        """The cells of a step, whose places are noted."""
        cells = {}

        def add(task, step, option, stage, name, words, factors):
            by_factor = self.places.setdefault((task, step), {}).setdefault(option, {})
            for factor in factors:
                size = [] if factor is None else ["--reduction-factor", f"{factor:g}"]
                by_factor[factor] = []
                for seed in self.options.seeds:
                    run = "-".join([task, name, *size[1:], str(seed)])
                    given = ["--task", task, *words, *size]
                    cells[run] = grid.Cell(run, grid.command(self.options, stage, given, seed))
                    by_factor[factor].append(run)

        factors = self.options.reduction_factors
        for task in tasks:
            found, self.skipped[task, step] = options_of(step, self.best[task])
            for option, config in found.items():
                words = ["--adapter-config", *changes(config)] if changes(config) else []
                add(task, step, option, "adapter", architecture(config), words, factors)
            if step == "position":
                add(task, "full", "full", "full", "full", [], [None])
                for option, (_, words) in EXTRAS.items() if not self.options.no_extras else ():
                    add(task, "extras", option, "adapter", option, words.split(), factors)
        return list(cells.values())

    def found(self, task, step):
        """{option: {factor: [closing line of each seed]}} of what is finished"""
        return {
            option: {
                factor: [self.results[name] for name in names if name in self.results]
                for factor, names in by_factor.items()
            }
            for option, by_factor in self.places.get((task, step), {}).items()
        }

    def means(self, task, step):
        """{option: mean accuracy in % over all reduction factors and seeds}; None if one of them
        has no result"""
        result = {}
        for option, by_factor in self.found(task, step).items():
            done = [100 * r["accuracy"] for results in by_factor.values() for r in results]
            complete = len(done) == len(by_factor) * len(self.options.seeds)
            result[option] = statistics.mean(done) if complete else None
        return result

    def winner(self, task, step):
        """The option with the best mean, of equals the first. An option whose runs diverged has
        lost; None while any other option lacks a result."""
        by_option = self.places[task, step].values()
        names = [n for by_factor in by_option for names in by_factor.values() for n in names]
        missing = [self.failed.get(name, "") for name in names if name not in self.results]
        if any("no epoch was finished" not in reason for reason in missing):
            return None
        trained = {o: mean for o, mean in self.means(task, step).items() if mean is not None}
        return max(trained, key=trained.get, default=None)

    def run(self, config):
        """Runs step after step, and writes the results after each. config: of the encoder"""
        tasks = self.options.tasks
        for step in STEPS:
            print(f"{TITLES[step]}: {', '.join(tasks)}", flush=True)
            cells = self.build(tasks, step)
            results, failed = grid.run(cells, self.options)
            self.results |= results
            self.failed |= failed
            for task in tasks:
                if option := self.winner(task, step):
                    self.winners[task, step] = option
                    self.best[task] |= sets(step, option)
                    print(f"{task}: {self.sentence(task, step)}", flush=True)
            path = write_results(self, config)
            tasks = [task for task in tasks if (task, step) in self.winners]
            if not tasks:
                break
        print(path, flush=True)
        grid.end(self.failed)

    def plan(self):
        """Lists the runs of all steps. An undecided step is taken to end as in the paper."""
        cells, assumed = {}, []
        for step in STEPS:
            of_step = self.build(self.options.tasks, step)
            cells |= {cell.name: cell for cell in of_step}
            self.results |= grid.finished(of_step, self.options)[0]
            for task in self.options.tasks:
                option = self.winner(task, step)
                assumed += [f"{task} ({step})"] if option is None else []
                self.best[task] |= sets(step, option or papers(step))
        grid.print_plan(list(cells.values()), self.options)
        if assumed:
            print(f"taken to end as in the paper, which decides what follows: {', '.join(assumed)}")

    # ----------------------------------------------------------------------------------------------
    # In words

    def sentence(self, task, step):
        """Which option won, by how much, and what the paper found."""
        means, best, paper = self.means(task, step), self.winners[task, step], papers(step)
        diverged = [label(step, option) for option, value in means.items() if value is None]
        others = {o: value for o, value in means.items() if value is not None and o != best}
        words = f"Best: {label(step, best)}"
        if others:
            second = max(others, key=others.get)
            above = f"{means[best] - others[second]:.2f} points above"
            tie = means[best] == others[second]
            words += f", {'the same as' if tie else above} {label(step, second)}"
        words += "." + f" The loss diverged in runs of: {', '.join(diverged)}." * bool(diverged)
        shown = step in list(STEPS)[:3]
        words += f" The paper's{'' if shown else ' (its figures do not show this step)'}: "
        words += label(step, paper)
        if paper == best:
            return words + ", too."
        below = (
            "" if means.get(paper) is None else f", {means[best] - means[paper]:.2f} points below"
        )
        return words + below + "."

    def outcome(self, task):
        """The architecture that is left at the end, beside the paper's."""
        last = list(STEPS)[-1]
        value = self.means(task, last)[self.winners[task, last]]
        words = " ".join(changes(ADAPTERS["pfeiffer"](**self.best[task])))
        is_it = "**What is left at the end is"
        if not words:
            return f"{is_it} the paper's architecture**, `--adapter pfeiffer`: {value:.2f}."
        command = f"`--adapter pfeiffer --adapter-config {words}`"
        paper = self.means(task, "position")[papers("position")]
        beside = "" if paper is None else f"; the paper's, `--adapter pfeiffer`: {paper:.2f}"
        return f"{is_it} not the paper's architecture**, but {command}: {value:.2f}{beside}."


# --------------------------------------------------------------------------------------------------
# Results


def write_results(search, config):
    """All tables and figures, of what is finished. Returns the path of the Markdown file."""
    out, rows = search.options.out, []
    for where, options in search.places.items():
        for option, by_factor in options.items():
            for factor, names in by_factor.items():
                for seed, name in zip(search.options.seeds, names, strict=True):
                    if result := search.results.get(name):
                        size = "" if factor is None else f"{factor:g}"
                        row = [f"{result['accuracy']:.6f}", result["trained_parameters"]]
                        rows.append([*where, option, size, seed, *row])
    header = "task step option reduction_factor seed accuracy trained_parameters".split()
    report.write_csv(out / "search.csv", header, rows)
    above = grid.caption(
        search.options,
        config,
        "Each step keeps what was best in those before it and has the paper's outcome for those "
        "after it. Best: highest mean over the reduction factors.",
        "The pretrained LayerNorm before the adapter alone is there twice: with f as the "
        "adapter's residual, as in the other options, where nothing carries the residual stream x "
        "on, and with LN(f + x).",
    )
    parts = ["# Architecture search", "", above, ""]
    for task in search.options.tasks:
        parts += task_results(search, task)
    return report.write_text(out / "search.md", "\n".join(parts))


def all_results(found):
    return [r for by_factor in found.values() for results in by_factor.values() for r in results]


def of_seeds(results):
    return report.mean_and_deviation(result["accuracy"] for result in results)


def task_results(search, task):
    """The part of a task: a table and a sentence for each step, and the figures."""
    full = of_seeds(all_results(search.found(task, "full")))
    lines = [f"## {task}", "", f"Full fine-tuning: {report.with_deviation(*full)}."]
    if done := all_results(search.found(task, "position")):
        n = done[0]["dev_examples"]
        lines.append(f"One of the {n:,} development examples is {100 / n:.2f} points.")
    panels = {}
    for step, title in TITLES.items():
        if found := search.found(task, step):
            panels[step] = found
            lines += ["", f"### {title}", "", step_table(search, task, step, found)]
            if (task, step) in search.winners:
                lines += [search.sentence(task, step), ""]
            for option, reason in search.skipped.get((task, step), {}).items():
                lines += [f"Not run: {label(step, option)}. {reason}.", ""]
    if (task, list(STEPS)[-1]) in search.winners:
        lines += [search.outcome(task), ""]
    for name, steps in {task: list(TITLES)[:3], f"{task}-2": list(TITLES)[3:]}.items():
        shown = {step: panels[step] for step in steps if step in panels}
        if any(all_results(found) for found in shown.values()):
            figure(search.options.out / f"{name}.png", task, search.options, shown, full[0])
            titles = ", ".join(TITLES[step] for step in shown)
            lines += [f"![{titles}]({name}.png)", ""]
    return lines


def step_table(search, task, step, found):
    rows, means = [], search.means(task, step)
    for option, by_factor in found.items():
        name = label(step, option)
        best = search.winners.get((task, step)) == option
        values = [report.with_deviation(*of_seeds(results)) for results in by_factor.values()]
        sizes = [
            f"{results[0]['trained_parameters']:,}" for results in by_factor.values() if results
        ]
        size = " … ".join(dict.fromkeys([sizes[0], sizes[-1]])) if sizes else "–"
        rows.append([f"**{name}**" if best else name, *values, means[option], size])
    factors = [f"r = {factor:g}" for factor in search.options.reduction_factors]
    return report.markdown(rows, ["", *factors, "mean", "trained parameters"])


def figure(path, task, options, panels, full):
    """Accuracy over the reduction factor: a panel for each step, a curve for each option, full
    fine-tuning as a line. An option that is more than 15 points below the best is named in the
    legend alone, so that it does not press the other curves together."""
    shape, axes = report.subplots(
        1, len(panels), figsize=(4.2 * len(panels), 4.6), sharey=True, squeeze=False
    )
    best = max(100 * r["accuracy"] for found in panels.values() for r in all_results(found))
    factors = sorted(options.reduction_factors)
    for panel, (step, found) in zip(axes[0], panels.items(), strict=True):
        if full is not None:
            panel.axhline(full, color="black", linewidth=2.2, alpha=0.35, label="full fine-tuning")
        for (option, by_factor), (marker, line) in zip(found.items(), LINES, strict=False):
            style = {"marker": marker, "linestyle": line, "linewidth": 1.4, "markersize": 5}
            points = [(f, *of_seeds(by_factor[f])) for f in factors if by_factor[f]]
            if points:
                xs, means, deviations = zip(*points, strict=True)
                name = label(step, option)
                if max(means) < best - 15:
                    name += f": {min(means):.0f} to {max(means):.0f} %, not shown"
                    panel.plot([], [], label=name, **style)
                else:
                    errors = None if None in deviations else deviations
                    panel.errorbar(xs, means, errors, capsize=2, label=name, **style)
        panel.set_xscale("log", base=2)
        panel.set_xticks(factors, [f"{factor:g}" for factor in factors])
        panel.minorticks_off()
        panel.set(title=TITLES[step], xlabel="reduction factor")
        panel.grid(color="0.88", linewidth=0.6)
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16)}
        panel.legend(frameon=False, handlelength=3.5, **below)
    axes[0, 0].set_ylabel(f"{task}: accuracy, %")
    report.save_figure(shape, path)


# --------------------------------------------------------------------------------------------------


def main(argv=None):
    description = "Searches the adapter's architecture, as appendix A.2."
    options = grid.read_options(Options, argv, "architecture_search", description)
    grid.check_owned(options)
    grid.train_examples(options.tasks, options.data_dir)  # whatever is not there is found now
    search = Search(options, best={task: {} for task in options.tasks})
    cells = search.build(options.tasks, "position")
    commands = [grid.settings_of(cell, options.out) for cell in cells]  # wrong ones are found now
    if options.plan:
        return search.plan()
    bert = grid.encoder(options.model)
    for command in commands:  # and so is a factor that leaves no bottleneck
        if command.stage == "adapter":
            train.new_adapter_config(command, bert)
    search.run(bert.config)


if __name__ == "__main__":
    run_command("architecture_search", main, interrupted=grid.INTERRUPTED)
