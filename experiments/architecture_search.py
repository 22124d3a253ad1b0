"""The architecture search of appendix A.2 (Figures 5, 7, 8 and 9): where the adapter sits, and
which LayerNorms are around it.

    python -m experiments.architecture_search --data-dir DATA --out runs/search --plan
    python -m experiments.architecture_search --tasks sst2 ... -- --epochs 10 --dtype bfloat16

What follows "--" goes to each run. Step by step: position of the adapter (with Houlsby's and
Bapna's), BERT's own LayerNorms, new LayerNorms, the residual, the non-linearity. Every option of a
step is trained on each task at every reduction factor, in OUT/runs; the one with the best mean
accuracy is kept for the steps after it. What has not been searched yet is as in the paper's
outcome, the first option of each step. After each step, OUT/search.md, search.csv and a figure for
each task are written of what is there. A run that diverges in its first epoch counts as 0 %."""

import pandas as pd

from adapter import ADAPTERS, AdapterConfig
from experiments import grid, report, study
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
OTHERS = "houlsby", "bapna"  # of adapter.ADAPTERS, beside the positions


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


def add_systems(step, best):
    """Puts each option of a step, at each reduction factor, into study.SYSTEMS. Returns {system:
    (step, option, factor)}; with the first step come the architectures of others, and Full."""
    found, configs = {}, options_of(step, best)
    if step == "position":
        found["full"] = "full", "", 0
        configs |= {name: ADAPTERS[name]() for name in OTHERS}
    for option, config in configs.items():
        for r in REDUCTION_FACTORS:
            words = changes(config)
            name = "-".join([*(words or ["pfeiffer"]), f"{r:g}"])
            words = ["--adapter-config", *words] if words else []
            words = " ".join([*words, "--reduction-factor", f"{r:g}"])
            study.SYSTEMS[name] = f"{option}, r = {r:g}", "adapter", words, ""
            found[name] = step, option, r
    return found


def points_of(rows, step):
    """(means, deviations) in % over the seeds: a row for each option, a column for each factor"""
    rows = rows[rows["step"] == step]
    of = rows.groupby(["option", "reduction_factor"])["accuracy"]
    order = [option for option in (*STEPS[step], *OTHERS) if option in {*rows["option"]}]
    return [100 * values.unstack().loc[order] for values in (of.mean(), of.std())]


def table(rows, step, winner):
    """(rows, header): the accuracies of each option on a task; in bold the winner over all tasks.
    At equal size, an option with two adapters a layer has half as large ones."""
    (means, deviations), lines = points_of(rows, step), []
    for option, mean in means.mean(axis=1).items():
        name = option + " (the paper's)" * (option == [*STEPS[step]][0])
        pairs = zip(means.loc[option], deviations.loc[option], strict=True)
        values = [report.with_deviation(*pair) for pair in pairs]
        equal = means.at[option, 16 if option in ("both", "houlsby") else 8]
        values += [mean, equal if step == "position" else None]
        lines.append([f"**{name}**" if option == winner else name, *values])
    return lines, ["", *(f"r = {r:g}" for r in means), "mean", "at equal size"]


def write_results(args, rows, winners):
    """All files in OUT, of what is finished. winners: {step: its winner}"""
    parts = [
        "Each step keeps what was best in those before it (bold: the highest mean over tasks and "
        "reduction factors) and has the paper's outcome for those after it. At equal size: r = 16 "
        "where a layer has two adapters, r = 8 where it has one."
    ]
    for task, of in rows.groupby("task", sort=False):
        full = 100 * of[of["step"] == "full"]["accuracy"]
        text = report.with_deviation(full.mean(), full.std())
        parts.append(f"## {task}\n\nFull fine-tuning: {text}.\n\n![]({task}.png)")
        for step, winner in winners.items():
            parts += [f"### {step}", report.markdown(*table(of, step, winner))]
        figure(args.out / f"{task}.png", of, [*winners], full.mean())
    study.write_results(args, "search", rows, parts)


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
    """Step after step, and writes the results after each."""
    parser, words = study.make_parser("architecture_search", __doc__, argv)
    parser.add_argument("--tasks", nargs="+", default="sst2 argument commonsense_qa".split())
    args = parser.parse_args(words)
    owned = [*study.OWNED, "--adapter", "--adapter-config", "--reduction-factor"]
    study.check(args, owned)
    if args.plan:  # as if each step ended as in the paper; `run` exits
        args.systems = [*dict.fromkeys(name for step in STEPS for name in add_systems(step, {}))]
        study.run(args)
    frames, best, winners, lost = [], {}, {}, {}
    for step, options in STEPS.items():
        print(step, flush=True)
        places = add_systems(step, best)
        args.systems = [*places]
        rows, failed = study.run(args)
        lost |= failed
        if study.not_diverged(failed):
            break  # nothing is built on a step that lacks a run
        every = [(*place, 0.0) for place in study.cells_of(args, args.seeds)]
        zeros = pd.DataFrame(every, columns=[*study.COLUMNS, "accuracy"])
        rows = pd.concat([rows, zeros]).drop_duplicates(study.COLUMNS)  # 0 of a run that diverged
        rows[["step", "option", "reduction_factor"]] = [places[name] for name in rows["system"]]
        frames.append(rows)
        rows = pd.concat(frames)
        means = points_of(rows, step)[0].mean(axis=1)
        winners[step] = means[means.index.isin(options)].idxmax()
        best |= options[winners[step]]
        write_results(args, rows, winners)
    grid.end(lost)


if __name__ == "__main__":
    run_command("architecture_search", main)
