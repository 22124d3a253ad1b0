"""The architecture search of appendix A.2 (Figures 5, 7, 8 and 9): where the adapter sits, and
which LayerNorms are around it.

    python -m experiments.architecture_search --tasks sst2 --data-dir DATA --out runs/search --plan
    python -m experiments.architecture_search --tasks sst2 ... -- --epochs 10 --dtype bfloat16

What follows "--" goes to each train.py. For each task, step by step: position of the adapter,
BERT's own LayerNorms, new LayerNorms, the residual, the non-linearity. Every option of a step is
trained at every reduction factor, in OUT/runs (experiments/grid.py); the one with the best mean
accuracy is kept for the steps after it. What has not been searched yet is as in the paper's
outcome, the first option of each step. After each step, OUT/search.md, search.csv and a figure for
each task are written of what is there.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path

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
PAPERS = {step: next(iter(options)) for step, options in STEPS.items()}  # outcome of each step
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
REDUCTION_FACTORS = 2.0, 8.0, 16.0, 64.0
LINES = "o- s-- ^-. D: v-".split()  # marker and line of a panel's options


@dataclass(frozen=True)
class Options(grid.Options):
    tasks: tuple = settings.option(
        (), "each is searched by itself; the paper's: sst2 argument commonsense_qa", required=True
    )
    out: Path = settings.unrecorded(Path("runs/search"), "of runs and results; default runs/search")
    adapter_options: str = grid.stage_options("adapter")
    full_options: str = grid.stage_options("full")


def sets(step, name):
    """{field: value} of an option."""
    return dict(map(settings.pair, STEPS[step][name][1].split()))


def options_of(step, best):
    """{option: configuration} of a step, without those that have no effect, or no meaning, beside
    what the steps before it have chosen: best, {field: value}"""
    found = {}
    for name in STEPS[step]:
        with contextlib.suppress(ValueError):
            config = ADAPTERS["pfeiffer"](**{**best, **sets(step, name)})
            if not without_effect(config):
                found[name] = config
    return found


def changes(config):
    """In what a configuration differs from --adapter pfeiffer: [FIELD=VALUE], as for train.py."""
    default = ADAPTERS["pfeiffer"]()
    return [
        f"{name}={value if isinstance(value, str) else str(value).lower()}"
        for name, value in vars(config).items()
        if value != getattr(default, name)
    ]


def label(step, name):
    return EXTRAS[name][0] if step == "extras" else STEPS[step][name][0]


class Search:
    """Of one task. cells: {(step, option, reduction factor, seed): cell}; results: {name: closing
    line}; best: {field: value} and winners: {step: option}, what the steps have chosen."""

    def __init__(self, options, task):
        self.options, self.task, self.cells = options, task, {}
        self.results, self.best, self.winners = {}, {}, {}

    def add_step(self, step):
        """Returns the cells of a step."""
        before = len(self.cells)
        for option, config in options_of(step, self.best).items():
            words = changes(config)
            name = "-".join(words) or "pfeiffer"
            self.add(step, option, name, ["--adapter-config", *words] if words else [])
        if step == "position":
            self.add("full", "full", "full", [], stage="full", factors=[None])
            for option, (_, words) in EXTRAS.items():
                self.add("extras", option, option, words.split())
        return list(self.cells.values())[before:]

    def add(self, step, option, name, words, stage="adapter", factors=None):
        """A cell for each reduction factor and seed. name: the architecture's"""
        for factor in factors or REDUCTION_FACTORS:
            size = [] if factor is None else ["--reduction-factor", f"{factor:g}"]
            for seed in self.options.seeds:
                run = "-".join([self.task, name, *size[1:], str(seed)])
                given = ["--task", self.task, *words, *size]
                cell = grid.cell(self.options, run, stage, given, seed)
                self.cells[step, option, factor, seed] = cell

    def over_seeds(self, *where):
        """(mean, standard deviation) in % of the cells of a step, of one option of it, or of that
        with one reduction factor; None twice unless all of them are finished"""
        names = [cell.name for place, cell in self.cells.items() if place[: len(where)] == where]
        if not self.results.keys() >= {*names}:
            return None, None
        return report.percent(self.results[name]["accuracy"] for name in names)

    def means(self, step):
        """{option: mean accuracy in % over all reduction factors and seeds}"""
        options = dict.fromkeys(place[1] for place in self.cells if place[0] == step)
        return {option: self.over_seeds(step, option)[0] for option in options}

    def table(self, step):
        """(rows, header): the accuracies of each option; in bold the winner"""
        rows, factors = [], REDUCTION_FACTORS
        for option, mean in self.means(step).items():
            name = label(step, option) + " (the paper's)" * (option == PAPERS.get(step))
            name = f"**{name}**" if option == self.winners.get(step) else name
            values = [self.over_seeds(step, option, factor) for factor in factors]
            rows.append([name, *(report.with_deviation(*value) for value in values), mean])
        return rows, ["", *(f"r = {factor:g}" for factor in factors), "mean"]


def write_results(searches, options, config):
    """All tables and figures, of what is finished."""
    rule = (
        "Each step keeps what was best in those before it (bold: the highest mean over the "
        "reduction factors) and has the paper's outcome for those after it."
    )
    found, lines = [], ["# Architecture search", "", grid.caption(options, config, rule), ""]
    for search in searches:
        for (step, option, factor, seed), cell in search.cells.items():
            if result := search.results.get(cell.name):
                place = [search.task, step, option, f"{factor:g}" if factor else "", seed]
                found.append([*place, f"{result['accuracy']:.6f}", result["trained_parameters"]])
        full = report.with_deviation(*search.over_seeds("full"))
        lines += [f"## {search.task}", "", f"Full fine-tuning: {full}.", ""]
        for step, title in TITLES.items():
            rows, header = search.table(step)
            if rows:
                lines += [f"### {title}", "", report.markdown(rows, header)]
        figure(options.out / f"{search.task}.png", search)
        lines += [f"![Accuracy by reduction factor]({search.task}.png)", ""]
    header = "task step option reduction_factor seed accuracy trained_parameters".split()
    report.write_csv(options.out / "search.csv", header, found)
    report.write_text(options.out / "search.md", "\n".join(lines))


def figure(path, search):
    """Accuracy over the reduction factor: a panel for each step, a curve for each option, full
    fine-tuning as a line."""
    factors, (full, _) = sorted(REDUCTION_FACTORS), search.over_seeds("full")
    shape, panels = report.subplots(2, 3, (13, 10), sharey=True)
    for panel, (step, title) in zip(panels.flat, TITLES.items(), strict=True):
        if full is not None:
            panel.axhline(full, color="black", linewidth=2.2, alpha=0.35, label="full fine-tuning")
        for option, line in zip(search.means(step), LINES, strict=False):
            means = [search.over_seeds(step, option, factor)[0] for factor in factors]
            panel.plot(factors, means, line, label=label(step, option))
        panel.set_xscale("log", base=2)
        panel.set_xticks(factors, [f"{factor:g}" for factor in factors])
        panel.set(title=title, xlabel="reduction factor", ylabel="accuracy, %")
        panel.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    report.save_figure(shape, path)


def run(searches, options, config):
    """Task after task and step after step, and writes the results after each. config: of the
    encoder"""
    lost = {}  # {name: reason}
    for search in searches:
        for step in STEPS:
            print(f"{search.task}, {TITLES[step]}", flush=True)
            results, failed = grid.run(search.add_step(step), options)
            search.results |= results
            lost |= failed
            # one that lacks a result, because its loss diverged, has lost
            means = {o: mean for o, mean in search.means(step).items() if mean is not None}
            broken = [why for why in failed.values() if "no epoch was finished" not in why]
            if means and not broken:
                search.winners[step] = winner = max(means, key=means.get)
                search.best |= sets(step, winner)
            write_results([one for one in searches if one.cells], options, config)
            print(*report.table(*search.table(step)), sep="\n", flush=True)
            if broken or not means:
                break
    print(options.out / "search.md", flush=True)
    grid.end(lost)


def plan(searches, options):
    """Lists the runs of all steps, as if each ended as in the paper."""
    cells = {}
    for search in searches:
        for step in STEPS:
            cells |= {cell.name: cell for cell in search.add_step(step)}
            search.best |= sets(step, PAPERS[step])
    grid.print_plan(list(cells.values()), options)
    print("What follows a step is listed as if the step ended as in the paper.")


def main(argv=None):
    description = "Searches the adapter's architecture, as appendix A.2."
    options = grid.read_options(Options, argv, "architecture_search", description)
    grid.train_examples(options.tasks, options.data_dir)  # whatever is not there is found now
    searches = [Search(options, task) for task in options.tasks]
    if options.plan:
        plan(searches, options)
    else:
        run(searches, options, grid.encoder(options.model).config)


if __name__ == "__main__":
    run_command("architecture_search", main)
