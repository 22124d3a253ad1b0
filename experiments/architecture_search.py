"""The architecture search of appendix A.2: where the adapter sits, and which LayerNorms are around
it (Figure 5).

    python -m experiments.architecture_search --tasks sst2 argument commonsense_qa -- --epochs 10

Every option of a step is trained on each task at every reduction factor; the one with the best mean
accuracy is kept for the steps after it. What has not been searched yet is as in the paper's
outcome, the first option of each step. OUT gets search.md and search.csv, after each step; --plan
lists the first one. A run that diverges in its first epoch counts as 0 %."""

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
NOTE = """Bold: the highest mean over tasks and reduction factors, which the steps after it keep.
The first option is the paper's outcome, which steps have before they are searched. Equal size:
r = 16 where a layer has two adapters (both, houlsby), r = 8 where it has one."""


def add_systems(step, best):
    """Puts each option of a step, at each reduction factor, into study.SYSTEMS; with the first step
    also OTHERS, and Full. Returns {system: (step, option, factor)}. best: [FIELD=VALUE] so far"""
    options, found, default = {}, {}, vars(AdapterConfig())
    for option, words in STEPS[step].items():
        with contextlib.suppress(ValueError):  # f + x, where the adapter reads f
            c = AdapterConfig(**dict(map(name_and_value, [*best, *words.split()])))
            # where the adapter reads f, its residual LN(f + x) is f, the first option again
            is_again = not c.residual_before_ln and not c.original_ln_before
            has_no_effect = c.adapter_residual_before_ln and not c.ln_after
            if not is_again and not has_no_effect:
                changed = [f"{n}={str(v).lower()}" for n, v in vars(c).items() if v != default[n]]
                of_adapter = " ".join(["--adapter-config", *changed]) if changed else ""
                options[option] = "-".join(changed) or "pfeiffer", of_adapter
    if step == "position":
        found["full"] = step, "full", None
        options |= {name: (name, f"--adapter {name}") for name in OTHERS}
    for (option, (name, of_adapter)), r in itertools.product(options.items(), REDUCTION_FACTORS):
        words = f"{of_adapter} --reduction-factor {r}"
        study.SYSTEMS[f"{name}-{r}"] = f"{option}, r = {r}", "adapter", words, ""
        found[f"{name}-{r}"] = step, option, r
    return found


def page(step, rows, winner):
    """[text] of the tables of a step, one for each task"""
    for task, of in rows.groupby("task", sort=False):
        points = 100 * of.set_index(["option", "reduction_factor"])["accuracy"]
        found = points.groupby(level=[0, 1], sort=False)  # without Full, which has no factor
        texts = found.agg(report.with_deviation).unstack().rename(columns="r = {:g}".format)
        texts["mean"] = found.mean().unstack().mean(axis=1)
        if step == "position":
            yield f"{task}: full fine-tuning {report.with_deviation(points['full'])}."
        yield f"## {step}, {task}\n\n{report.frame(texts.rename({winner: f'**{winner}**'}))}"


def main(argv=None):
    args = study.parse("architecture_search", __doc__, argv, ["full"])
    if args.test or len(args.train_examples) > 1:
        raise ValueError("the search takes one of --train-examples, and no --test")
    frames, parts, best, lost = [], [NOTE], [], {}
    for step, options in STEPS.items():
        print(step, flush=True)
        places = add_systems(step, best)
        args.systems = [*places]
        rows, failed = study.run(args)
        lost |= failed
        if grid.not_diverged(failed):
            break  # nothing is built on a step that lacks a run
        every = pd.DataFrame(study.cells_of(args, args.seeds).keys(), columns=study.COLUMNS)
        rows = every.merge(rows, how="left").fillna({"accuracy": 0.0})  # of a run that diverged
        rows[["step", "option", "reduction_factor"]] = [places[name] for name in rows["system"]]
        means = rows.groupby("option", sort=False)["accuracy"].mean()
        winner = means[means.index.isin(options)].idxmax()
        best += options[winner].split()
        frames.append(rows)
        parts += page(step, rows, winner)
        study.write_results(args, "search", pd.concat(frames), parts)
    grid.end(lost)


if __name__ == "__main__":
    run_command("architecture_search", main)
