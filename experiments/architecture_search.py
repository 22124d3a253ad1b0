"""The architecture search of appendix A.2 (Figures 5, 7, 8 and 9): where the adapter sits, and
which LayerNorms are around it.

    python -m experiments.architecture_search --tasks sst2 --data-dir DATA --out runs/search --plan
    python -m experiments.architecture_search --tasks sst2 ... -- --epochs 10 --dtype bfloat16

What follows "--" goes to each run. For each task, step by step: position of the adapter,
BERT's own LayerNorms, new LayerNorms, the residual, the non-linearity. Every option of a step is
trained at every reduction factor, in OUT/runs (experiments/grid.py); the one with the best mean
accuracy is kept for the steps after it. What has not been searched yet is as in the paper's
outcome, the first option of each step. After each step, OUT/search.md, search.csv and a figure for
each task are written of what is there.
"""

from adapter import AdapterConfig
from bert import Bert
from experiments import grid, report
from runtime.command import run_command

# step: {option: (label, what it sets)}, the paper's outcome first
STEPS = {
    "position": {
        "top": ("top only", dict(mh_adapter=False, output_adapter=True)),
        "bottom": ("bottom only", dict(mh_adapter=True, output_adapter=False)),
        "both": ("both", dict(mh_adapter=True, output_adapter=True)),
    },
    # Without the LayerNorm after the adapter, only the adapter's residual can carry the residual
    # stream x on, and f does not: so "before" is there twice. The paper has it once.
    "pretrained": {
        "before_after": ("before & after", dict(original_ln_before=True, original_ln_after=True)),
        "before": ("before", dict(original_ln_before=True, original_ln_after=False)),
        "before_ln": (
            "before, residual LN(f + x)",
            dict(original_ln_before=True, original_ln_after=False, residual_before_ln=False),
        ),
        "after": ("after", dict(original_ln_before=False, original_ln_after=True)),
        "none": ("none", dict(original_ln_before=False, original_ln_after=False)),
    },
    "new": {
        "none": ("none", dict(ln_before=False, ln_after=False)),
        "before": ("before", dict(ln_before=True, ln_after=False)),
        "after": ("after", dict(ln_before=False, ln_after=True)),
        "before_after": ("before & after", dict(ln_before=True, ln_after=True)),
    },
    "residual": {
        "f": ("f", dict(residual_before_ln=True)),
        "ln": ("LN(f + x)", dict(residual_before_ln=False)),
        "sum": ("f + x", dict(residual_before_ln="post_add")),
        "inside": ("before the new LayerNorm", dict(adapter_residual_before_ln=True)),
    },
    "non_linearity": {n: (n, dict(non_linearity=n)) for n in ("relu", "leakyrelu", "swish")},
}
PAPERS = {step: next(iter(options)) for step, options in STEPS.items()}  # outcome of each step
# Earlier architectures, which the paper's search is said to include: (label, options). Houlsby et
# al.'s LayerNorms come with the activation of their code (GELU) and the initialisation of their
# paper (sigma 0.01).
EXTRAS = {
    "houlsby": (
        "Houlsby et al. (2019), LayerNorms too",
        "--adapter houlsby_recipe --adapter-config initialization=houlsby",
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


def options_of(step, best):
    """{option: configuration} of a step, with what the steps before it have chosen, best: {field:
    value}; without the options that are impossible with that, or change nothing."""
    found = {}
    for name, (_, fields) in STEPS[step].items():
        try:
            config = AdapterConfig(**{**best, **fields})
        except ValueError:  # f + x, where the adapter reads f
            continue
        if not config.residual_before_ln and not config.original_ln_before:
            continue  # what the adapter reads is f, as in the first option
        if config.adapter_residual_before_ln and not config.ln_after:
            continue  # there is no new LayerNorm
        found[name] = config
    return found


def changes(config):
    """In what a configuration differs from --adapter pfeiffer: [FIELD=VALUE], as for train.py."""
    default, given = vars(AdapterConfig()), vars(config).items()
    return [f"{name}={str(value).lower()}" for name, value in given if value != default[name]]


def label(step, name):
    return EXTRAS[name][0] if step == "extras" else STEPS[step][name][0]


class Search:
    """Of one task. cells: {(step, option, reduction factor, seed): cell}; results: {name: metrics};
    best: {field: value} and winners: {step: option}, what the steps have chosen."""

    def __init__(self, args, task):
        self.args, self.task, self.cells = args, task, {}
        self.results, self.best, self.winners = {}, {}, {}

    def add_step(self, step):
        """Returns the cells of a step."""
        before = len(self.cells)
        for option, config in options_of(step, self.best).items():
            words = changes(config)
            name = "-".join(words) or "pfeiffer"
            self.add((step, option), name, ["--adapter-config", *words] if words else [])
        if step == "position":
            for option, (_, words) in EXTRAS.items():
                self.add(("extras", option), option, words.split())
            for seed in self.args.seeds:
                self.add_cell(("full", "full", None, seed), "full", f"full-{seed}", [])
        return [*self.cells.values()][before:]

    def add(self, place, name, words):
        """A cell for each reduction factor and seed. name: the architecture's"""
        for factor in REDUCTION_FACTORS:
            for seed in self.args.seeds:
                given = [*words, "--reduction-factor", f"{factor:g}"]
                self.add_cell((*place, factor, seed), "adapter", f"{name}-{factor:g}-{seed}", given)

    def add_cell(self, place, stage, name, words):
        words = ["--task", self.task, *words, "--seed", str(place[-1])]
        self.cells[place] = grid.cell(self.args, f"{self.task}-{name}", stage, words)

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


def write_results(searches, args, config):
    """All tables and figures, of what is finished."""
    rule = "Each step keeps what was best in those before it (bold: the highest mean over the "
    rule += "reduction factors) and has the paper's outcome for those after it."
    found, lines = [], ["# Architecture search\n", grid.caption(args, config, rule) + "\n"]
    for search in searches:
        for (step, option, factor, seed), cell in search.cells.items():
            if result := search.results.get(cell.name):
                place = [search.task, step, option, f"{factor:g}" if factor else "", seed]
                found.append([*place, f"{result['accuracy']:.6f}", result["trained_parameters"]])
        full = report.with_deviation(*search.over_seeds("full"))
        lines += [f"## {search.task}\n", f"Full fine-tuning: {full}.\n"]
        for step, title in TITLES.items():
            rows, header = search.table(step)
            lines += [f"### {title}\n", report.markdown(rows, header)] if rows else []
        figure(args.out / f"{search.task}.png", search)
        lines += [f"![Accuracy by reduction factor]({search.task}.png)\n"]
    header = "task step option reduction_factor seed accuracy trained_parameters".split()
    report.write_csv(args.out / "search.csv", header, found)
    report.write_text(args.out / "search.md", "\n".join(lines))


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


def run(searches, args):
    """Task after task and step after step, and writes the results after each."""
    config = Bert.from_pretrained(args.model).config  # if it is damaged, that is found now
    lost = {}  # {name: reason}
    for search in searches:
        for step, options in STEPS.items():
            print(f"{search.task}, {TITLES[step]}", flush=True)
            results, failed = grid.run(search.add_step(step), args)
            search.results |= results
            lost |= failed
            # one that lacks a result, because its loss diverged, has lost
            means = {o: mean for o, mean in search.means(step).items() if mean is not None}
            broken = [why for why in failed.values() if "nothing is kept" not in why]
            if means and not broken:
                search.winners[step] = winner = max(means, key=means.get)
                search.best |= options[winner][1]
            write_results([one for one in searches if one.cells], args, config)
            print(*report.table(*search.table(step)), sep="\n", flush=True)
            if broken or not means:
                break
    print(args.out / "search.md", flush=True)
    grid.end(lost)


def plan(searches, args):
    """Lists the runs of all steps, as if each ended as in the paper."""
    cells = {}
    for search in searches:
        for step, options in STEPS.items():
            cells |= {cell.name: cell for cell in search.add_step(step)}
            search.best |= options[PAPERS[step]][1]
    grid.print_plan([*cells.values()], args)
    print("What follows a step is listed as if the step ended as in the paper.")


def main(argv=None):
    stages = ["adapter", "full"]
    parser = grid.make_parser("architecture_search", __doc__, "runs/search", stages)
    tasks = "each is searched by itself; the paper's: sst2 argument commonsense_qa"
    parser.add_argument("--tasks", nargs="+", required=True, help=tasks)
    args = grid.parse(parser, argv)
    grid.train_examples(args, args.tasks)  # data that are not there are missed now
    searches = [Search(args, task) for task in args.tasks]
    plan(searches, args) if args.plan else run(searches, args)


if __name__ == "__main__":
    run_command("architecture_search", main)
