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

import itertools

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
    for (option, config), r in itertools.product(configs.items(), REDUCTION_FACTORS):
        words = ["--adapter-config", *changes(config)] if changes(config) else []
        name = "-".join([*(words[1:] or ["pfeiffer"]), f"{r:g}"])
        words = " ".join([*words, f"--reduction-factor {r:g}"])
        study.SYSTEMS[name] = f"{option}, r = {r:g}", "adapter", words, ""
        found[name] = step, option, r
    return found


def points_of(rows, step):
    """Accuracies in %, {(option, reduction factor): those of all seeds and tasks}"""
    rows = rows[rows["step"] == step]
    return (100 * rows["accuracy"]).groupby([rows["option"], rows["reduction_factor"]], sort=False)


def table(rows, step, winner):
    """The accuracies of each option on a task; in bold the winner over all tasks."""
    of = points_of(rows, step)
    texts, means = of.agg(report.with_deviation).unstack(), of.mean().unstack()
    texts = texts.rename(columns="r = {:g}".format).assign(mean=means.mean(axis=1))
    if step == "position":
        equal = [means.at[name, 16 if name in ("both", "houlsby") else 8] for name in means.index]
        texts = texts.assign(**{"at equal size": equal})
    mark = {winner: f"**{winner}**"}
    return texts.rename(
        index=lambda n: mark.get(n, n) + " (the paper's)" * (n == [*STEPS[step]][0])
    )


def write_results(args, rows, winners):
    """All files in OUT, of what is finished. winners: {step: its winner}"""
    parts = [
        """Each step keeps what was best in those before it (bold: the highest mean over tasks
and reduction factors) and has the paper's outcome for those after it. At equal size: r = 16 where a
layer has two adapters, r = 8 where it has one."""
    ]
    options = {"sharey": True, "squeeze": False}
    for task, of in rows.groupby("task", sort=False):
        full = 100 * of[of["step"] == "full"]["accuracy"]
        text = f"Full fine-tuning: {report.with_deviation(full)}."
        parts.append(f"## {task}\n\n{text}\n\n![]({task}.png)")
        picture, panels = report.subplots(1, len(winners), (4.3 * len(winners), 4), **options)
        for panel, (step, winner) in zip(panels.flat, winners.items(), strict=True):
            parts.append(f"### {step}\n\n{report.frame(table(of, step, winner))}")
            curves = points_of(of, step).mean().unstack().T.rename(index="r = {:g}".format)
            curves.plot(ax=panel, title=step, marker="o", xlabel="", ylabel="accuracy, %")
            panel.axhline(full.mean(), color="black", alpha=0.4, label="full fine-tuning")
            panel.legend()
        report.save_figure(picture, args.out / f"{task}.png")
    study.write_results(args, "search", rows, parts)


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
        if grid.not_diverged(failed):
            break  # nothing is built on a step that lacks a run
        every = [(*place, 0.0) for place in study.cells_of(args, args.seeds)]
        zeros = pd.DataFrame(every, columns=[*study.COLUMNS, "accuracy"])
        rows = pd.concat([rows, zeros]).drop_duplicates(study.COLUMNS)  # 0 of a run that diverged
        rows[["step", "option", "reduction_factor"]] = [places[name] for name in rows["system"]]
        frames.append(rows)
        rows = pd.concat(frames)
        means = points_of(rows, step).mean().unstack().mean(axis=1)
        winners[step] = means[means.index.isin(options)].idxmax()
        best |= options[winners[step]]
        write_results(args, rows, winners)
    grid.end(lost)


if __name__ == "__main__":
    run_command("architecture_search", main)
