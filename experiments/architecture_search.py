"""The architecture search of appendix A.2 (Figures 5, 7, 8 and 9): where the adapter sits, and
which LayerNorms are around it.

    python -m experiments.architecture_search --tasks sst2 --data-dir DATA --out runs/search --plan
    python -m experiments.architecture_search --tasks sst2 ... -- --epochs 10 --dtype bfloat16

What follows "--" goes to each run. For each task, step by step: position of the adapter,
BERT's own LayerNorms, new LayerNorms, the residual, the non-linearity. Every option of a step is
trained at every reduction factor, in OUT/runs (experiments/grid.py); the one with the best mean
accuracy is kept for the steps after it. What has not been searched yet is as in the paper's
outcome, the first option of each step. After each step, OUT/search.md, search.csv and a figure for
each task are written of what is there. A run that diverges in its first epoch counts as 0 %."""

import pandas as pd

from adapter import AdapterConfig
from experiments import grid, report
from runtime.command import run_command

# {step: {option: what it sets}}, the paper's outcome first
STEPS = {
    "position": {
        "top only": dict(mh_adapter=False, output_adapter=True),
        "bottom only": dict(mh_adapter=True, output_adapter=False),
        "both": dict(mh_adapter=True, output_adapter=True),
    },
    # Without the LayerNorm after the adapter, only the adapter's residual can carry the residual
    # stream x on, and f does not: so "before" is there twice. The paper has it once.
    "pretrained LayerNorm": {
        "before & after": dict(original_ln_before=True, original_ln_after=True),
        "before": dict(original_ln_before=True, original_ln_after=False),
        "before, residual LN(f + x)": dict(
            original_ln_before=True, original_ln_after=False, residual_before_ln=False
        ),
        "after": dict(original_ln_before=False, original_ln_after=True),
        "none": dict(original_ln_before=False, original_ln_after=False),
    },
    "new LayerNorm": {
        "none": dict(ln_before=False, ln_after=False),
        "before": dict(ln_before=True, ln_after=False),
        "after": dict(ln_before=False, ln_after=True),
        "before & after": dict(ln_before=True, ln_after=True),
    },
    "residual": {
        "f": dict(residual_before_ln=True),
        "LN(f + x)": dict(residual_before_ln=False),
        "f + x": dict(residual_before_ln="post_add"),
        "before the new LayerNorm": dict(adapter_residual_before_ln=True),
    },
    "non-linearity": {n: dict(non_linearity=n) for n in ("relu", "leakyrelu", "swish")},
}
REDUCTION_FACTORS = 2, 8, 16, 64
COLUMNS = "task step option reduction_factor seed".split()


def options_of(step, best):
    """{option: configuration} of a step, with what the steps before it have chosen, best: {field:
    value}; without the options that are impossible with that, or change nothing."""
    found = {}
    for name, fields in STEPS[step].items():
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


def cells_of(args, task, step, best):
    """{a place in COLUMNS: its run} of a step, with full fine-tuning in the first"""
    cells = {}
    for seed in args.seeds:
        own = ["--task", task, "--seed", str(seed)]
        for option, config in options_of(step, best).items():
            words = changes(config)
            name = "-".join([task, *(words or ["pfeiffer"])])
            words = ["--adapter-config", *words] if words else []
            for r in REDUCTION_FACTORS:
                given = [*words, "--reduction-factor", f"{r:g}", *own]
                cell = grid.make_cell(args, f"{name}-{r:g}-{seed}", "adapter", given)
                cells[task, step, option, r, seed] = cell
        if step == "position":
            full = grid.make_cell(args, f"{task}-full-{seed}", "full", own)
            cells[task, "full", "", None, seed] = full
    return cells


def points_of(rows, step):
    """(means, deviations) in % over the seeds: a row for each option, a column for each factor"""
    rows = rows[rows["step"] == step]
    of = rows.groupby(["option", "reduction_factor"])["accuracy"]
    order = [option for option in STEPS[step] if option in {*rows["option"]}]
    return [100 * values.unstack().loc[order] for values in (of.mean(), of.std())]


def table(rows, step, winner):
    """(rows, header): the accuracies of each option; in bold the winner"""
    (means, deviations), lines = points_of(rows, step), []
    for option, mean in means.mean(axis=1).items():
        name = option + " (the paper's)" * (option == [*STEPS[step]][0])
        pairs = zip(means.loc[option], deviations.loc[option], strict=True)
        values = [report.with_deviation(*pair) for pair in pairs]
        lines.append([f"**{name}**" if option == winner else name, *values, mean])
    return lines, ["", *(f"r = {r:g}" for r in means), "mean"]


def write_results(args, found):
    """All files in OUT, of what is finished. found: {task: (rows, {step: its winner})}"""
    parts = [
        "Each step keeps what was best in those before it (bold: the highest mean over the "
        "reduction factors) and has the paper's outcome for those after it."
    ]
    for task, (rows, winners) in found.items():
        full = 100 * rows[rows["step"] == "full"]["accuracy"]
        text = report.with_deviation(full.mean(), full.std())
        parts.append(f"## {task}\n\nFull fine-tuning: {text}.\n\n![]({task}.png)")
        for step, winner in winners.items():
            parts += [f"### {step}", report.markdown(*table(rows, step, winner))]
        figure(args.out / f"{task}.png", rows, [*winners], full.mean())
    grid.write_results(args, "search", pd.concat([rows for rows, _ in found.values()]), parts)


def figure(path, rows, steps, full):
    """Accuracy over the reduction factor: a panel for each step, a curve for each option."""
    options = {"sharey": True, "squeeze": False}
    picture, panels = report.subplots(1, len(steps), (4.3 * len(steps), 4), **options)
    for panel, step in zip(panels.flat, steps, strict=True):
        means = points_of(rows, step)[0].T.rename(index="r = {:g}".format)
        means.plot(ax=panel, title=step, marker="o", xlabel="", ylabel="accuracy, %")
        panel.axhline(full, color="black", alpha=0.4, label="full fine-tuning")
        panel.legend()
    report.save_figure(picture, path)


def main(argv=None):
    """Task after task and step after step, and writes the results after each."""
    parser = grid.make_parser("architecture_search", __doc__, ["adapter", "full"])
    tasks = "each is searched by itself; the paper's: sst2 argument commonsense_qa"
    parser.add_argument("--tasks", nargs="+", required=True, help=tasks)
    args = grid.parse(parser, argv)
    grid.train_examples(args, args.tasks)  # data that are not there are missed now
    if args.plan:  # as if each step ended as in the paper; `run` exits
        cells = [cells_of(args, task, step, {}) for task in args.tasks for step in STEPS]
        grid.run(args, COLUMNS, {place: cell for of in cells for place, cell in of.items()})
    found, lost = {}, {}  # lost: {name of a run: why}
    for task in args.tasks:
        frames, best, winners = [], {}, {}
        for step, options in STEPS.items():
            print(f"{task}, {step}", flush=True)
            cells = cells_of(args, task, step, best)
            rows, failed = grid.run(args, COLUMNS, cells)
            diverged = {name for name, why in failed.items() if "not finite in epoch 1:" in why}
            zeros = [[*place, 0.0] for place, cell in cells.items() if cell.name in diverged]
            frames += [rows, pd.DataFrame(zeros, columns=[*COLUMNS, "accuracy"])]
            lost |= failed
            if failed.keys() - diverged:
                break  # nothing is built on a step that lacks a run
            rows = pd.concat(frames)
            winners[step] = points_of(rows, step)[0].mean(axis=1).idxmax()
            best |= options[winners[step]]
            found[task] = rows, winners
            write_results(args, found)
    grid.end(lost)


if __name__ == "__main__":
    run_command("architecture_search", main)
