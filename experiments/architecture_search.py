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

import contextlib
import itertools

import pandas as pd

from adapter import AdapterConfig
from experiments import grid, report, study
from runtime.command import name_and_value, run_command

# {step: {option: what it sets}}, the paper's outcome first, which is the default
STEPS = {
    "position": {
        "top only": "",
        "bottom only": "mh_adapter=true output_adapter=false",
        "both": "mh_adapter=true",
    },
    # Without the LayerNorm after the adapter, only the adapter's residual can carry the residual
    # stream x on, and f does not: so "before" is there twice. The paper has it once.
    "pretrained LayerNorm": {
        "before & after": "",
        "before": "original_ln_after=false",
        "before, residual LN(f + x)": "original_ln_after=false residual_before_ln=false",
        "after": "original_ln_before=false",
        "none": "original_ln_before=false original_ln_after=false",
    },
    "new LayerNorm": {
        "none": "",
        "before": "ln_before=true",
        "after": "ln_after=true",
        "before & after": "ln_before=true ln_after=true",
    },
    "residual": {
        "f": "residual_before_ln=true",
        "LN(f + x)": "residual_before_ln=false",
        "f + x": "residual_before_ln=post_add",
        "before the new LayerNorm": "adapter_residual_before_ln=true",
    },
    "non-linearity": {n: f"non_linearity={n}" for n in ("relu", "leakyrelu", "swish")},
}
REDUCTION_FACTORS = 2, 8, 16, 64
OTHERS = "houlsby", "bapna"  # of adapter.ADAPTERS, beside the positions
DEFAULT = vars(AdapterConfig())


def add_systems(step, best):
    """Puts each option of a step, at each reduction factor, into study.SYSTEMS. Returns {system:
    (step, option, factor)}; with the first step come the architectures of others, and Full. best:
    [FIELD=VALUE] of the steps before; what is impossible with that, or changes nothing, is not
    there."""
    options, found = {}, {}
    for option, words in STEPS[step].items():
        with contextlib.suppress(ValueError):  # f + x, where the adapter reads f
            c = AdapterConfig(**dict(map(name_and_value, [*best, *words.split()])))
            reads_f = not c.residual_before_ln and not c.original_ln_before  # as in the first one
            if not reads_f and (c.ln_after or not c.adapter_residual_before_ln):
                changed = {n: v for n, v in vars(c).items() if v != DEFAULT[n]}
                changed = [f"{n}={str(v).lower()}" for n, v in changed.items()]
                told = " ".join(["--adapter-config", *changed]) if changed else ""
                options[option] = "-".join(changed) or "pfeiffer", told
    if step == "position":
        found["full"] = "full", "", 0
        options |= {name: (name, f"--adapter {name}") for name in OTHERS}
    for (option, (name, told)), r in itertools.product(options.items(), REDUCTION_FACTORS):
        words = f"{told} --reduction-factor {r:g}"
        study.SYSTEMS[f"{name}-{r:g}"] = f"{option}, r = {r:g}", "adapter", words, ""
        found[f"{name}-{r:g}"] = step, option, r
    return found


def points_of(rows, step):
    """Accuracies in %, {(option, reduction factor): those of all seeds and tasks}"""
    rows = rows[rows["step"] == step]
    return (100 * rows["accuracy"]).groupby([rows["option"], rows["reduction_factor"]], sort=False)


def table(rows, step, winner):
    """The accuracies of each option on a task; in bold the winner over all tasks."""
    of, first = points_of(rows, step), [*STEPS[step]][0]
    texts, means = of.agg(report.with_deviation).unstack(), of.mean().unstack()
    texts = texts.rename(columns="r = {:g}".format).assign(mean=means.mean(axis=1))
    if step == "position":
        equal = [means.at[name, 16 if name in ("both", "houlsby") else 8] for name in means.index]
        texts["at equal size"] = equal
    texts.index = [f"**{n}**" if n == winner else n for n in texts.index]
    return texts.rename(index={n: f"{n} (the paper's)" for n in (first, f"**{first}**")})


def write_results(args, rows, winners):
    """All files in OUT, of what is finished. winners: {step: its winner}"""
    parts = [
        """Each step keeps what was best in those before it (bold: the highest mean over tasks
and reduction factors) and has the paper's outcome for those after it. At equal size: r = 16 where a
layer has two adapters, r = 8 where it has one."""
    ]
    size = {"figsize": (4.3 * len(winners), 4), "sharey": True, "squeeze": False}
    for task, of in rows.groupby("task", sort=False):
        full = 100 * of[of["step"] == "full"]["accuracy"]
        text = report.with_deviation(full)
        parts.append(f"## {task}\n\nFull fine-tuning: {text}.\n\n![]({task}.png)")
        picture, panels = report.subplots(1, len(winners), **size)
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
    study.check(args, [*study.OWNED, "--adapter", "--adapter-config", "--reduction-factor"])
    if args.plan:  # as if each step ended as in the paper; `run` exits
        args.systems = [*dict.fromkeys(name for step in STEPS for name in add_systems(step, []))]
        study.run(args)
    frames, best, winners, lost = [], [], {}, {}
    for step, options in STEPS.items():
        print(step, flush=True)
        places = add_systems(step, best)
        args.systems = [*places]
        rows, failed = study.run(args)
        lost |= failed
        if grid.not_diverged(failed):
            break  # nothing is built on a step that lacks a run
        zeros = pd.DataFrame(study.cells_of(args, args.seeds).keys(), columns=study.COLUMNS)
        rows = pd.concat([rows, zeros.assign(accuracy=0.0)])  # of a run that diverged
        rows = rows.drop_duplicates(study.COLUMNS)
        rows[["step", "option", "reduction_factor"]] = [places[name] for name in rows["system"]]
        frames.append(rows)
        rows = pd.concat(frames)
        means = points_of(rows, step).mean().unstack().mean(axis=1)
        winners[step] = means[means.index.isin(options)].idxmax()
        best += options[winners[step]].split()
        write_results(args, rows, winners)
    grid.end(lost)


if __name__ == "__main__":
    run_command("architecture_search", main)
