"""differences.csv: what the pages say of the rows here, with intervals.

    python -m results.differences

A line is a difference of accuracies in points, paired by seed, or, of means over seeds, paired by
task: mean, 95 % by t, least, greatest. Over seeds it speaks of other draws of the target's examples
and weights, with these very sources and, where nothing is held out, this development set; over
tasks of tasks like these on this encoder, as if they were drawn independently."""

from pathlib import Path

import pandas as pd

from experiments.report import half_width

HERE = Path(__file__).parent
OVER_TASKS = """fusion_st_a-st_a_16 fusion_st_a-full fusion_st_a-mt_a fusion_st_a-multitask
    fusion_st_a-fusion_of_own fusion_mt_a-mt_a fusion_mt_a-st_a_16 st_a_16-full mt_a-full"""
OVER_SEEDS = """fusion-own fusion-closest_head fusion-full fusion-full_12 fusion-mean
    fusion-one_skill fusion-other_skill fusion-multitask fusion_with_own-own
    fusion_with_own-fusion fusion_with_own-mean_with_own fusion_with_own-fusion_with_own_low_lr
    fusion_of_mnli-head_on_mnli_again fusion_of_mnli-further_mnli_1e-4
    fusion_of_mnli-further_mnli fusion_of_mnli-fusion query_f-fusion random_v-fusion
    without_last-fusion up-head further-head further-up fusion_of_one-head fusion_of_one-up
    fusion_of_one-further fusion_of_four-head fusion_of_four-fusion_of_one
    fusion_of_four-fusion_with_permuted fusion_with_permuted-fusion_of_one"""
NAMES = {"head_on_order": "closest_head", "head_on_mnli": "closest_head"}
NAMES |= {"fusion_without_match": "other_skill", "fusion_without_order": "one_skill"}
NAMES |= {"fusion_without_own": "fusion", "variant": "system", "mtl": "multitask"}


def points(rows, index, value="accuracy"):
    """A column for each system; value: where held-out examples are measured"""
    rows = rows.rename(columns=NAMES).assign(value=rows[value].fillna(rows["accuracy"]))
    return 100 * rows.replace({"system": NAMES}).pivot_table("value", index, "system")


def differences(study, table, over):
    for pair in (OVER_TASKS if over == "tasks" else OVER_SEEDS).split():
        a, b = pair.split("-", 1)
        if a in table and b in table:
            found = (table[a] - table[b]).dropna()
            half = half_width(found)
            bounds = (found.mean() - half, found.mean() + half, found.min(), found.max())
            yield study, f"{a} - {b}", over, len(found), found.mean(), *bounds


def main():
    read = {path.stem: pd.read_csv(path) for path in HERE.glob("*.csv")}
    paper = pd.read_csv(HERE.parent / "experiments" / "paper_results.csv")
    paper = paper[paper["encoder"] == "bert-base-uncased"].set_index("task").drop(columns="encoder")
    paper = paper.replace(" ±.*", "", regex=True).astype(float)  # without deviations
    table = points(read["minilm_table1"], "task")
    control = points(pd.concat([read["minilm_table1"], read["minilm_control"]]), "task")
    of_tasks = {"minilm_table1": table, "minilm_table1 without cb": table.drop("cb")}
    found = table.drop(["winogrande", "boolq", "rte"])
    of_tasks["minilm_table1 without winogrande, boolq, rte"] = found
    of_tasks |= {"the paper": paper, "the paper, these 14 tasks": paper.loc[table.index]}
    of_tasks["minilm_table1 minus the paper"] = table - paper.loc[table.index, table.columns]
    of_tasks["minilm_control"] = control.dropna(subset="fusion_of_own")
    for name in ("mini_table1", "low_resource_table1"):
        found = read[name].set_index("task").drop("mean").filter(regex="_mean$")
        found.columns = found.columns.str.removesuffix("_mean")
        of_tasks[name] = found.rename(columns=NAMES)
    of_seeds = {"text_or_library": points(read["text_or_library"], "seed", "test_accuracy")}
    for name, value in {"composition": "accuracy", "base_size": "test_accuracy"}.items():
        for (target, size), rows in read[name].groupby(["target", "train_examples"]):
            of_seeds[f"{name}, {target}, {size}"] = points(rows, "seed", value)
    of_seeds["one_source"] = points(read["one_source"], "seed", "held_out")
    lines = [line for study in of_tasks for line in differences(study, of_tasks[study], "tasks")]
    lines += [line for study in of_seeds for line in differences(study, of_seeds[study], "seeds")]
    header = "study difference over n mean low high least greatest".split()
    lines = pd.DataFrame(lines, columns=header).query("n > 1").round(2)
    lines.to_csv(HERE / "differences.csv", index=False)


if __name__ == "__main__":
    main()
