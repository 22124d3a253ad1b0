"""The tables of docs/results.md, docs/silent.md and README.md, from the files in results/.

    print(table("mini"))  # what follows <!-- table: mini --> on a page

A table without a function of its own here is its file, results/NAME.csv, as it is.
"""

from functools import partial
from pathlib import Path

import pandas
import torch

from experiments import composition
from experiments.architecture_search import TITLES, label
from experiments.fusion_weights import SHOWN, normalized_entropy
from experiments.report import markdown, with_deviation
from experiments.tables import SYSTEMS, title
from runtime.seeds import mean_and_deviation

RESULTS = Path(__file__).parent.parent / "results"
PAPER = Path(__file__).parent / "paper_results.csv"


def read(name):
    """Every cell is text."""
    return pandas.read_csv(RESULTS / f"{name}.csv", dtype=str, keep_default_na=False)


def readme():
    """The demo's."""
    yield ["accuracy in %, four classes", "seed 0", "seed 1", "seed 2", "mean ± deviation"]
    for _, row in read("demo").iterrows():
        seeds = row[["seed 0", "seed 1", "seed 2"]]
        yield [row["system"], *seeds, f"{row['mean']} ± {row['deviation']}"]


def readme_composed():
    """Which adapters to fuse: on the target of two skills, and on two tasks of the paper."""
    papers = pandas.read_csv(PAPER).query("encoder == 'bert-base-uncased'").set_index("task")
    found = [composition_rows("both", 240), base_rows("rte", 400), base_rows("mrpc", 400)]
    found = [composition.by_seed(with_best_head(rows)) for rows in found]
    found[0]["cross"] = composition.by_seed(pandas.read_csv(RESULTS / "cross_fitting.csv"))["cross"]
    yield ["accuracy in %", "two skills, 240", "RTE, 400", "MRPC, 400", "the paper's RTE, MRPC"]
    titles = {name: system.title for name, system in composed_systems("both").items()}
    titles["best_head"] = "new head on a source, chosen on the development set"
    titles["cross"] = "cross-fitting: sources, and own adapters of two halves"
    same = {"own": "st_a_16", "full": "full", "fusion_with_own": "fusion_st_a"}
    names = "own full best_head fusion fusion_with_own cross mean"
    for name in names.split():
        cells = [
            with_deviation(*mean_and_deviation(of[name].values())) if name in of else "–"
            for of in found
        ]
        theirs = "–"
        if name in same:
            theirs = ", ".join(f"{papers.loc[task, same[name]]:.2f}" for task in ("rte", "mrpc"))
        yield [titles[name], *cells, theirs]


def mini():
    """The tasks with three seeds, and the mean of all."""
    targets = read("mini_table1")
    systems = [system for system in SYSTEMS if f"{system}_mean" in targets]
    yield ["target", *map(title, systems)]
    yield from targets.tail(6)[["task", *(f"{s}_mean" for s in systems)]].values.tolist()


def mini_counts():
    """Arrows: ↗ better by more than 0.3, ↘ worse by more than 0.3, → between."""
    yield ["", "better", "better or the same"]
    pairs = read("mini_table2").groupby(["fusion", "compared_to"], sort=False)
    for (fusion, other), rows in pairs:
        cells = []
        for arrows in (["↗"], ["↗", "→"]):
            ours, papers = (rows[of].isin(arrows).sum() for of in ("arrow", "paper"))
            cells.append(f"{ours} ({papers}) of {len(rows)}")
        yield [f"{title(fusion)} : {title(other)}", *cells]


def search():
    """Means over the reduction factors; the best of each step in bold."""
    yield ["step", "option", "SST-2", "SciTail"]
    columns = {}
    for task in ("sst2", "scitail"):
        options = read(f"search_{task}").groupby(["step", "option"], sort=False)
        columns[task] = options["accuracy"].agg(lambda values: 100 * values.astype(float).mean())
    means = pandas.concat(columns, axis=1)
    for step, name in TITLES.items():
        cells = means.loc[step].map("{:.2f}".format)
        if step != "extras":
            for task, option in means.loc[step].idxmax().items():
                cells.loc[option, task] = f"**{cells.loc[option, task]}**"
        for option, row in cells.iterrows():
            yield [name, label(step, option), *row]
            name = ""


def prune():
    yield ["adapters in a layer", "accuracy", "speed"]
    for _, row in read("prune").iterrows():
        if row["k"] in ("14", "7", "1"):
            accuracy, speed = 100 * float(row["accuracy"]), float(row["speed_up"])
            yield [row["k"], f"{accuracy:.1f}", f"{speed:.2f} ×"]


SKILLS = {"both": ("match", "order"), "all": ("match", "order", "spelling")}  # of a target


def composed_systems(target):
    """{name: System} of the study of composition"""
    options = composition.Options(target=target, sources=SKILLS[target], irrelevant="spelling")
    return composition.systems(options)


def composition_rows(target, size=None):
    rows = pandas.read_csv(RESULTS / "composition.csv")
    rows = rows[rows["target"] == target]
    return rows if size is None else rows[rows["train_examples"] == size]


def printed(systems, rows):
    """As experiments.composition prints it."""
    lines, header = composition.table(systems, rows)
    yield header
    yield from lines


FUSION_OF_SOURCES = "fusion_without_own"  # what base_size.csv calls composition's "fusion"


def variants(systems, titles):
    """`systems`, and behind them one more for each of `titles`, {name: title}."""
    return systems | {name: composition.System(title, "fusion") for name, title in titles.items()}


def base_systems():
    """{name: System} of the study on an encoder of BERT-base's size. A variant's system has the
    variant's name behind its own: `cross_8_epochs` is `cross` in runs/base/rte-400-8-epochs."""
    sources = "mnli", "qqp", "sst2", "scitail"
    found = composition.systems(composition.Options(target="rte", sources=sources))
    more = {
        f"{FUSION_OF_SOURCES}_8_sources": "fusion of eight sources",
        "fusion_with_own_8_sources": "fusion of eight sources and own",
        "cross_8_epochs": "cross-fitting, eight epochs",
        "fusion_with_own_low_lr": "fusion of the sources and own, at a lower rate",
    }
    return variants(found, more)


def read_base_size(name):
    """The systems have the names that experiments.composition gives them."""
    rows = pandas.read_csv(RESULTS / f"{name}.csv")
    return rows.replace({"system": {FUSION_OF_SOURCES: "fusion"}})


def base_rows(target, size):
    """In the order of the systems."""
    rows = read_base_size("base_size")
    rows = rows[(rows["target"] == target) & (rows["train_examples"] == size)]
    order = [*base_systems()]
    rows = rows.sort_values("seed").sort_values(
        "system", key=lambda names: names.map(order.index), kind="stable"
    )
    if rows["test_accuracy"].isna().all():  # nothing was left over for a test set
        rows = rows.drop(columns="test_accuracy")
    return rows


def with_best_head(rows):
    """The rows and those of best_head: with each seed, of the new heads the one with the best
    accuracy on the development set."""
    heads = rows[rows["system"].str.startswith("head_on_")]
    best = heads.loc[heads.groupby("seed")["accuracy"].idxmax()]
    return pandas.concat([rows, best.assign(system="best_head")])


def base_size_sources():
    yield ["source", "accuracy in %"]
    rows = pandas.read_csv(RESULTS / "base_size_sources.csv").set_index("source")
    for name in ("mnli", "qqp", "sst2", "scitail", "mrpc", "boolq", "imdb", "cb"):
        yield [name, 100 * rows.loc[name, "accuracy"]]


def base_size(target, size):
    return printed(base_systems(), base_rows(target, size))


def composed(target, size):
    return printed(composed_systems(target), composition_rows(target, size))


def cross_fitting():
    """What to do about the own adapter, on the target of two skills."""
    fused = "fusion of the sources and own"
    titles = {
        "own_short_own": "own adapter, five epochs",
        "fusion_with_own_short_own": f"{fused}, which has had five epochs",
        "fusion_with_own_low_lr": f"{fused}, at a lower rate",
    }
    found = [pandas.read_csv(RESULTS / "cross_fitting.csv")]
    for variant in ("low_lr", "short_own"):
        rows = pandas.read_csv(RESULTS / f"cross_fitting_{variant}.csv")
        found.append(rows.assign(system=rows["system"] + f"_{variant}"))
    return printed(variants(composed_systems("both"), titles), pandas.concat(found))


def composition_sizes():
    """Of the seed that all sizes have."""
    rows = composition_rows("both").query("seed == 0")
    of_size = rows.pivot(index="system", columns="train_examples", values="accuracy")
    yield ["seed 0", *(f"{size} examples" for size in of_size)]
    for name, system in composed_systems("both").items():
        if name in of_size.index and of_size.loc[name].notna().all():
            yield [system.title, *(f"{100 * value:.1f}" for value in of_size.loc[name])]


def composition_epochs():
    """The fusion of the two skills after each epoch, beside the reference library's."""
    rows = pandas.read_csv(RESULTS / "composition_epochs.csv")
    yield ["seed", "side", "best", *(f"epoch {n}" for n in sorted(rows["epoch"].unique()))]
    for (seed, side), of in rows.groupby(["seed", "side"]):
        values = 100 * of["accuracy"]
        yield [str(seed), side, *(f"{value:.1f}" for value in [values.max(), *values])]


def base_size_entropy():
    """By layer, of the mean weights over all tokens and at [CLS]: means over the targets with 400
    examples, and their seeds."""
    rows = read_base_size("base_size_weights").query("train_examples == 400")
    titles = {name: system.title for name, system in base_systems().items()}
    yield ["", "runs", "tokens", *(str(layer) for layer in sorted(rows["layer"].unique()))]
    by_run = rows.groupby(["system", "tokens", "layer", "target", "train_examples", "seed"])
    entropy = by_run["weight"].agg(lambda s: normalized_entropy(torch.tensor([*s])))
    for name in ("fusion", "fusion_with_own"):
        for tokens, shown in SHOWN.items():
            of_layers = entropy[name, tokens].unstack("layer")
            yield [titles[name], str(len(of_layers)), shown, *of_layers.mean()]


VARIANTS = {
    "fusion": "as it is, like the library's",
    "query_f": "the query is f",
    "random_v": "V starts from N(0, 1e-6) beside its diagonal",
    "random_v_larger": "V starts from N(0, 0.01) beside its diagonal",
    "without_last": "without the last layer",
    "pruned": "the same, taken out after training",
    "mean": "the head reads the mean over the tokens",
    "without_last_mean": "the same, without the last layer",
}


def text_or_library():
    rows = pandas.read_csv(RESULTS / "text_or_library.csv")
    yield ["fusion", "by seed", "mean", "development set, by seed", "mean"]
    for variant, name in VARIANTS.items():
        of = 100 * rows[rows["variant"] == variant][["test_accuracy", "accuracy"]]
        by_seed = [", ".join(map("{:.1f}".format, of[column])) for column in of]
        yield [name, by_seed[0], of["test_accuracy"].mean(), by_seed[1], of["accuracy"].mean()]


TABLES = readme, readme_composed, mini, mini_counts, search, prune
TABLES += base_size_sources, base_size_entropy, cross_fitting
TABLES += composition_sizes, composition_epochs, text_or_library
MADE = {made.__name__: made for made in TABLES} | {
    "base_size_rte": partial(base_size, "rte", 400),
    "base_size_mrpc": partial(base_size, "mrpc", 400),
    "base_size_cb": partial(base_size, "cb", 250),
    "base_size_rte_all": partial(base_size, "rte", 2490),
    "composition_2": partial(composed, "both", 240),
    "composition_3": partial(composed, "all", 480),
}


def table(name):
    """A table of the pages, in Markdown."""
    if name not in MADE:
        rows = read(name)
        return markdown(rows.values.tolist(), list(rows))
    header, *rows = MADE[name]()
    return markdown(rows, header)
