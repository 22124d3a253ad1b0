"""What fusion learned: the paper's Figure 4 (some layers) and Figure 6 (all layers), and section 6
in words.

    python -m experiments.figure4 runs/fusion-rte runs/fusion-cb ... --out figures \\
        [--baseline runs/rte runs/cb ...]

Every RUN is a finished fusion run, a row of each panel: the weights that it gives to its adapters,
averaged over every real token ([CLS] and [SEP] are, padding is not) of its task's development set.
DIR gets figure4.png, figure6.png, weights.csv and summary.txt, which is also printed. Layers are
counted from 1, as in the paper.

Whether a target gains from fusion needs the accuracy of its single adapter: of the runs in
--baseline, or of the finished run that lies beside the fusion's under the task's name, where
`train.py` puts it.
"""

if __name__ == "__main__":
    from runtime.command import announce

    announce("figure4.py")

import math
from collections import Counter
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import torch

from data import batches, split_by_length
from experiments.load_run import add_encoder, add_import, check_stage, load_run, load_run_split
from experiments.report import save_figure, write_csv
from formats.files import read_json
from fusion import fusion_weights
from runtime.command import errors_in_one_line
from runtime.options import Parser
from runtime.processes import choose_device

# Lightness rises with the weight, so that it can be read in grey, and with any colour vision.
COLOURS = "cividis"
WRITTEN = ("figure4.png", "figure6.png", "weights.csv", "summary.txt")


def inputs_of(bert, examples):
    """(input_ids, token_type_ids, attention_mask) of all batches of a split, for `average`."""
    return (
        inputs
        for batch in batches(examples, 64, bert.config.pad_token_id)
        for _, inputs in split_by_length(batch)
    )


@torch.inference_mode()
def average(bert, inputs):
    """{(layer, location): [N]}: the fusion weights, averaged over the real tokens of all
    (input_ids, token_type_ids, attention_mask), each [B, T]."""
    sums, tokens = {}, 0
    for ids, types, mask in inputs:
        bert(*(tensor.to(bert.device) for tensor in (ids, types, mask)))
        real = mask.bool()  # [B, T]
        tokens += real.sum().item()
        for slot, s in fusion_weights(bert).items():
            sums[slot] = sums.get(slot, 0) + s.cpu()[real].double().sum(0)
    if not all(weights.isfinite().all() for weights in sums.values()):
        raise FloatingPointError("the fusion's weights are not finite")
    return {slot: weights / tokens for slot, weights in sums.items()}


def mean_weights(
    run, data_dir=None, model=None, device="cpu", limit=None, allow_other_encoder=False
):
    """(names of the N adapters, {(layer, location): [N]}, task) of a fusion run on its development
    set, or on `limit` examples of it. Raises ValueError or OSError for another run, or without its
    data."""
    bert, _, config = load_run(run, device, model=model, allow_other_encoder=allow_other_encoder)
    check_stage(run, config, ["fusion"], "have fusion weights")
    task, examples = load_run_split(run, bert, config, data_dir=data_dir, limit=limit)
    return config["adapters"], average(bert, inputs_of(bert, examples)), task.name


def spread(weights):
    """Entropy of N weights / log N: 0 for a single adapter, 1 for all alike."""
    return torch.special.entr(weights).sum().item() / math.log(max(2, len(weights)))


SAME = ("model", "data_sha256", "dev_examples")  # what a run and its baseline must agree on


def differs(run, baseline):
    """What a baseline has otherwise than a fusion, in words, or None. data_sha256 holds the
    training examples, too, which --limit-train draws with the seed: only runs of one seed can agree
    on it."""
    ours, theirs = read_json(run / "config.json"), read_json(baseline / "config.json")
    names = {
        "model": "encoder",
        "dev_examples": "development examples",
        "data_sha256": "data, or tokens of them,",
    }
    for name in SAME:
        drawn = ours.get("seed") != theirs.get("seed") and ours.get("limit_train")
        if name == "data_sha256" and drawn:
            continue
        if ours.get(name) != theirs.get(name):
            values = "" if name == "data_sha256" else f": {theirs.get(name)}, not {ours.get(name)}"
            return f"other {names[name]} than {run}{values}"
    return None


def find_baselines(runs, given):
    """{task: mean dev accuracy of the single adapters}. Raises ValueError or OSError for a `given`
    run that is not one, or that differs from the fusion in encoder, data or number of development
    examples; a run beside the fusion's that differs is passed over."""
    found = {}
    tasks = [(run, read_json(run / "metrics.json").get("task")) for run in runs]
    for directory in given:
        if not (directory / "metrics.json").is_file():
            raise FileNotFoundError(
                f"--baseline {directory}: no finished run in it, it has no metrics.json"
            )
        metrics = read_json(directory / "metrics.json")
        if metrics.get("stage") != "adapter":
            raise ValueError(
                f"--baseline {directory} is of --stage {metrics.get('stage')}, not a single adapter"
            )
        if "accuracy" not in metrics:
            raise ValueError(f"--baseline {directory}: its task has no accuracy")
        for run in [run for run, task in tasks if task == metrics.get("task")]:
            if (why := differs(run, directory)) is not None:
                raise ValueError(f"--baseline {directory} has {why}: they cannot be compared")
        found.setdefault(metrics["task"], []).append(metrics["accuracy"])
    for run in runs:
        task = read_json(run / "metrics.json")["task"]
        beside = run.resolve().parent / task / "metrics.json"
        if (
            task not in found
            and beside.is_file()
            and (metrics := read_json(beside)).get("stage") == "adapter"
            and "accuracy" in metrics
            and differs(run, beside.parent) is None
        ):
            found[task] = [metrics["accuracy"]]
    return {task: sum(accuracies) / len(accuracies) for task, accuracies in found.items()}


# --------------------------------------------------------------------------------------------------
# The figure


def slot_names(slots):
    """Titles of (layer, location) pairs; the location is named where there are two."""
    if len({location for _, location in slots}) > 1:
        return [f"layer {layer + 1}, {location}" for layer, location in slots]
    return [f"layer {layer + 1}" for layer, _ in slots]


def figure_4_layers(count):
    """The paper's layers 1, 7, 9 and 12 of 12, and those at the same depth in other encoders, from
    0."""
    return {0, math.ceil(count * 7 / 12) - 1, math.ceil(count * 9 / 12) - 1, count - 1}


def heatmaps(values, titles, rows, columns, top, path):
    """values: a [targets, adapters] table for every title, NaN where a target has no such adapter;
    one scale, 0 to top."""
    panels = len(titles)
    rows, columns = (
        [name if len(name) <= 32 else f"{name[:31]}…" for name in names]
        for names in (rows, columns)
    )
    across, size = arrangement(panels, rows, columns)
    figure, axes = plt.subplots(
        math.ceil(panels / across), across, figsize=size, squeeze=False, layout="constrained"
    )
    # parse_math: no name of an adapter is a formula
    text = {"fontsize": 8, "parse_math": False}
    for i, panel in enumerate(axes.flat):
        if i >= panels:
            panel.set_visible(False)
            continue
        image = heatmap(panel, values[i], top)
        panel.set_title(titles[i], fontsize=9)
        panel.set_yticks(range(len(rows)), rows if i % across == 0 else [""] * len(rows), **text)
        names = columns if i + across >= panels else [""] * len(columns)
        panel.set_xticks(range(len(columns)), names, rotation=90, **text)
        panel.tick_params(length=2)
    figure.supylabel("target task", fontsize=9)
    hatched = " (hatched: not among the target's)" if values.isnan().any() else ""
    figure.supxlabel(f"adapter{hatched}", fontsize=9)
    figure.colorbar(image, ax=axes, label="mean fusion weight", fraction=0.05, shrink=0.9)
    save_figure(figure, path)


def with_numbers(columns):
    """Whether a heatmap says its numbers: with many adapters they would be too small to read."""
    return columns <= 10


def arrangement(panels, rows, columns):
    """(panels side by side, (width, height) of the figure in inches): near to landscape, with few
    empty places. rows, columns: the names of targets and adapters"""
    cell = 0.46 if with_numbers(len(columns)) else 0.22
    width, height = len(columns) * cell + 0.2, len(rows) * cell + 0.4
    # what the names take on the left and, upright, below
    left, below = (0.085 * max(map(len, names)) + 0.5 for names in (rows, columns))

    def size(across):
        total_height = below + math.ceil(panels / across) * height
        # at least the room that the labels of the axes and the bar need
        return max(4, left + across * width + 1), max(3, total_height)

    def ugliness(across):
        ratio = size(across)[0] / size(across)[1]
        return abs(math.log(ratio / 1.4)) + 2 * (-panels % across) / panels

    across = min(range(1, panels + 1), key=ugliness)
    return across, size(across)


def heatmap(panel, values, top):
    """One panel, without names: values [targets, adapters]. Returns the image."""
    panel.set_facecolor("white")
    for y, x in torch.nonzero(values.isnan()).tolist():  # blank, and not to be taken for a weight
        style = {"fill": False, "hatch": "////", "edgecolor": "0.75", "linewidth": 0}
        panel.add_patch(plt.Rectangle((x - 0.5, y - 0.5), 1, 1, **style))
    colours = matplotlib.colormaps[COLOURS]
    image = panel.imshow(values.numpy(), cmap=colours, vmin=0, vmax=top)
    if with_numbers(values.shape[1]):
        for y, x in torch.nonzero(~values.isnan()).tolist():
            value = values[y, x].item()
            colour = "black" if value > 0.45 * top else "white"
            panel.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)
    return image


# --------------------------------------------------------------------------------------------------
# In words


def describe(label, names, weights, task, metrics, baseline):
    """Lines about one target."""
    titles = dict(zip(weights, slot_names(weights), strict=True))
    mean = torch.stack(list(weights.values())).mean(0)
    strongest = ", ".join(f"{names[n]} {mean[n]:.3f}" for n in mean.argsort(descending=True)[:3])
    lines = [f"{label}: {len(names)} adapters", f"  strongest, mean over layers: {strongest}"]
    if task in names:
        own = names.index(task)
        where = ", ".join(titles[slot] for slot, s in weights.items() if s.argmax() == own)
        lines.append(
            f"  its own ({task}) is the strongest in: {where or 'no layer'}; mean weight "
            f"{mean[own]:.3f}, {len(names) * mean[own]:.2f} of an even one (1/{len(names)})"
        )
    else:
        lines.append(f"  no adapter of its own task ({task}) is among them")
    by_layer = ", ".join(
        f"{title.removeprefix('layer ')}: {spread(weights[slot]):.2f}"
        for slot, title in titles.items()
    )
    lines.append(f"  entropy by layer (0 one adapter, 1 all alike): {by_layer}")
    if baseline is not None:
        gain = 100 * (metrics["accuracy"] - baseline)
        lines.append(
            f"  dev accuracy: fusion {100 * metrics['accuracy']:.1f} %, single adapter "
            f"{100 * baseline:.1f} %, gain {gain:+.1f} points"
        )
    return lines


def last_layer(targets):
    """A sentence: are the weights of the last layer the most spread? targets: [(label, names,
    weights, ...)]"""
    yes, last, before = 0, [], []
    for _, _, weights, *_ in targets:
        top = max(layer for layer, _ in weights)
        spreads = {slot: spread(s) for slot, s in weights.items()}
        yes += max(spreads, key=spreads.get)[0] == top
        last += [value for (layer, _), value in spreads.items() if layer == top]
        before += [value for (layer, _), value in spreads.items() if layer < top]
    return (
        f"The last layer is the most spread: so in {yes} of {len(targets)} targets; mean entropy "
        f"{mean_of(last)} there, {mean_of(before)} in the layers before."
    )


def own_adapters(targets):
    """A sentence: do tasks that do not gain prefer their own adapter? Its weight counts in units of
    1/N, what an even mixture would give it. Fusions of another number of adapters, or of another
    encoder, are not compared with each other."""
    kinds = {(len(names), metrics.get("model")) for _, names, _, _, metrics, _ in targets}
    if len(kinds) > 1:
        return (
            "Tasks that do not gain prefer their own adapter: not compared, the fusions differ in "
            "the number of adapters or in the encoder; draw those alone that agree."
        )
    # does it gain? -> [(share of layers where its own is the strongest, its mean weight · N)]
    found = {True: [], False: []}
    for _, names, weights, task, metrics, baseline in targets:
        if baseline is not None and task in names:
            s, own = torch.stack(list(weights.values())), names.index(task)
            share = (s.argmax(1) == own).double().mean().item()
            relative = len(names) * s[:, own].mean().item()
            found[metrics["accuracy"] > baseline].append((share, relative))
    start = "Tasks that do not gain prefer their own adapter: "
    if not found[True] and not found[False]:
        return (
            start
            + "cannot be told without the accuracy of a target's single adapter (--baseline) and "
            "the adapter itself."
        )
    sentences = []
    for gains, of_tasks in found.items():
        if of_tasks:
            share, own = (mean_of(values) for values in zip(*of_tasks, strict=True))
            sentences.append(
                f"{len(of_tasks)} with{'' if gains else 'out'} a gain: own adapter the strongest "
                f"in {share} of the layers, its mean weight {own} of an even one (1/N)"
            )
    if len(sentences) == 1:
        return start + f"there is nothing to compare with; {sentences[0]}."
    weight = {gains: sum(own for _, own in pairs) / len(pairs) for gains, pairs in found.items()}
    return start + f"{'yes' if weight[False] > weight[True] else 'no'}; {'; '.join(sentences)}."


def mean_of(values):
    return f"{sum(values) / len(values):.3f}" if values else "-"


# --------------------------------------------------------------------------------------------------


def read_targets(args):
    """[(label, names, weights, task, metrics, baseline or None)] of the runs"""
    device, _ = choose_device(args.device, "float32")
    found = [
        mean_weights(run, args.data_dir, args.model, device, None, args.allow_other_encoder)
        for run in args.runs
    ]
    baselines = find_baselines(args.runs, args.baseline)
    many = Counter(task for _, _, task in found)
    targets = []
    for run, (names, weights, task) in zip(args.runs, found, strict=True):
        # a target is called by its task, by its run too where another has the same
        label = task if many[task] == 1 else f"{task} ({run.resolve().name})"
        metrics = read_json(run / "metrics.json")
        targets.append((label, names, weights, task, metrics, baselines.get(task)))
    return targets


def draw(args):
    """Writes all files, and returns the lines of the summary."""
    if args.out.exists() and not args.out.is_dir():
        raise ValueError(f"--out {args.out} is a file")
    there = [name for name in WRITTEN if (args.out / name).exists()]
    if there and not args.overwrite:
        raise ValueError(f"{args.out / there[0]} is already there: another --out, or --overwrite")
    targets = read_targets(args)
    # columns: the targets' own adapters in the order of the rows, so that they lie on the diagonal,
    # then the others
    available = [name for _, names, *_ in targets for name in names]
    tasks = [task for _, _, _, task, *_ in targets if task in available]
    columns = list(dict.fromkeys([*tasks, *available]))
    slots = sorted({slot for _, _, weights, *_ in targets for slot in weights})
    values = torch.full((len(slots), len(targets), len(columns)), torch.nan, dtype=torch.float64)
    for y, (_, names, weights, *_) in enumerate(targets):
        for slot, s in weights.items():
            values[slots.index(slot), y, [columns.index(name) for name in names]] = s

    args.out.mkdir(parents=True, exist_ok=True)
    labels, titles = [label for label, *_ in targets], slot_names(slots)
    top = math.ceil(10 * values.nan_to_num().max().item()) / 10
    some = figure_4_layers(1 + max(layer for layer, _ in slots))
    for name, chosen in (
        ("figure4.png", [i for i, slot in enumerate(slots) if slot[0] in some]),
        ("figure6.png", list(range(len(slots)))),
    ):
        heatmaps(values[chosen], [titles[i] for i in chosen], labels, columns, top, args.out / name)
    rows = []
    for run, (_, names, weights, task, *_) in zip(args.runs, targets, strict=True):
        for (layer, location), s in weights.items():
            by_name = dict(zip(names, s.tolist(), strict=True))
            cells = [by_name.get(name, "") for name in columns]
            rows.append([run, task, layer + 1, location, *cells])
    write_csv(args.out / "weights.csv", ["run", "target", "layer", "location", *columns], rows)
    lines = [line for target in targets for line in describe(*target)]
    lines += [
        "",
        "What the paper observes (section 6), here",
        f"  {last_layer(targets)}",
        f"  {own_adapters(targets)}",
    ]
    (args.out / "summary.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return lines


def main(argv=None):
    parser = Parser(
        prog="python -m experiments.figure4",
        description="Heatmaps of fusion weights, target tasks by adapters, and what they say.",
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="finished fusion runs, one row each"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="directory for the figures, the CSV and the summary"
    )
    parser.add_argument(
        "--baseline",
        nargs="+",
        type=Path,
        default=[],
        help="runs of single adapters on the target tasks",
    )
    parser.add_argument(
        "--data-dir", help="directory with TASK/validation.jsonl; default: where each run had it"
    )
    add_encoder(parser)
    add_import(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace earlier figures")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"])
    with errors_in_one_line("figure4.py"):
        args = parser.parse_args(argv)
        lines = draw(args)
    print("\n".join(lines))
    print(f"\n{args.out}: figure4.png, figure6.png, weights.csv, summary.txt")


if __name__ == "__main__":
    main()
