"""What fusion learned: the paper's Figure 4 (some layers) and Figure 6 (all layers), and section 6
in words.

    python -m experiments.figure4 runs/fusion-rte runs/fusion-cb ... --out figures [--baseline
    runs/rte runs/cb ...]

Every RUN is a finished fusion run, a row of each panel: the weights that it gives to its adapters,
averaged over every real token ([CLS] and [SEP] are, padding is not) of its task's development set.
DIR gets figure4.png, figure6.png, weights.csv and summary.txt, which is also printed. Layers are
counted from 1, as in the paper.

Whether a target gains from fusion needs the accuracy of its single adapter: of the runs in
--baseline, or of the finished run that lies beside the fusion's under the task's name, where
`train.py` puts it.
"""

import runtime.console  # noqa: F401  (first: Ctrl-C during imports, closed outputs)

# isort: split
import csv
import math
import sys
from collections import Counter
from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from data import batches, length_groups  # noqa: E402
from experiments.load_run import load_run, load_run_split  # noqa: E402
from formats.files import read_json  # noqa: E402
from fusion import fusion_weights  # noqa: E402
from runtime.options import Parser
from runtime.processes import choose_device  # noqa: E402

# lightness rises with the weight, so it can be read in grey, and with any colour vision
COLOURS = "cividis"
WRITTEN = ("figure4.png", "figure6.png", "weights.csv", "summary.txt")


def inputs_of(bert, examples):
    """What `average` takes, of a split."""
    return (
        inputs
        for batch in batches(examples, 64, bert.config.pad_token_id)
        for _, inputs in length_groups(batch)
    )


@torch.inference_mode()
def average(bert, inputs):
    """{(layer, location): [N]}: the fusion weights, averaged over the real tokens of all
    (input_ids, token_type_ids, attention_mask), each [B, T]."""
    total, tokens = {}, 0
    for ids, types, mask in inputs:
        bert(*(tensor.to(bert.device) for tensor in (ids, types, mask)))
        real = mask.bool()  # [B, T]
        tokens += real.sum().item()
        for slot, s in fusion_weights(bert).items():
            total[slot] = total.get(slot, 0) + s.cpu()[real].double().sum(0)
    if not all(weights.isfinite().all() for weights in total.values()):
        raise FloatingPointError("the fusion's weights are not finite")
    return {slot: weights / tokens for slot, weights in total.items()}


def mean_weights(
    run, data_dir=None, model=None, device="cpu", limit=None, allow_other_encoder=False
):
    """(names of the N adapters, {(layer, location): [N]}, task) of a fusion run on its development
    set, or on `limit` examples of it. Raises ValueError or OSError for another run, or without its
    data."""
    bert, _, config = load_run(run, device, model=model, allow_other_encoder=allow_other_encoder)
    if config["stage"] != "fusion":
        raise ValueError(
            f"{run} is of --stage {config['stage']}: only fusion runs have fusion weights"
        )
    task, examples = load_run_split(run, bert, config, data_dir=data_dir, limit=limit)
    return config["adapters"], average(bert, inputs_of(bert, examples)), task.name


def spread(weights):
    """Entropy of N weights / log N: 0 for a single adapter, 1 for all alike."""
    return torch.special.entr(weights).sum().item() / math.log(max(2, len(weights)))


def find_baselines(runs, given):
    """{task: mean dev accuracy of the single adapters}. Raises ValueError or OSError for a `given`
    run that is not one."""
    found = {}
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
        found.setdefault(metrics["task"], []).append(metrics["accuracy"])
    for run in runs:
        task = read_json(run / "metrics.json")["task"]
        beside = run.resolve().parent / task / "metrics.json"
        if (
            task not in found
            and beside.is_file()
            and (metrics := read_json(beside)).get("stage") == "adapter"
        ):
            found[task] = [metrics["accuracy"]]
    return {task: sum(accuracies) / len(accuracies) for task, accuracies in found.items()}


# --------------------------------------------------------------------------------------------------
# The figure


def slot_names(slots):
    """Titles of (layer, location) pairs; the location is named where there are two."""
    several = len({location for _, location in slots}) > 1
    return [f"layer {layer + 1}" + f", {location}" * several for layer, location in slots]


def figure_4_layers(count):
    """The paper's layers 1, 7, 9 and 12 of 12, and those at the same depth in other encoders, from
    0."""
    return {0, math.ceil(count * 7 / 12) - 1, math.ceil(count * 9 / 12) - 1, count - 1}


def heatmaps(values, titles, rows, columns, top, path):
    """values: a [targets, adapters] table for every title, NaN where a target has no such adapter;
    one scale, 0 to top."""
    M, N, panels = len(rows), len(columns), len(titles)
    rows, columns = (
        [name if len(name) <= 32 else f"{name[:31]}…" for name in names]
        for names in (rows, columns)
    )
    numbers = N <= 10  # else they would be too small to read
    cell = 0.46 if numbers else 0.22  # inches
    width, height = N * cell + 0.2, M * cell + 0.4
    # inches that the labels take on the left and below (upright), by their length
    left, below = (0.085 * max(map(len, names)) + 0.5 for names in (rows, columns))

    def size(across):
        rest = math.ceil(panels / across) * height
        return max(4, left + across * width + 1), max(
            3, below + rest
        )  # room for the labels of the axes and the bar

    def ugliness(across):  # near to landscape, few empty places
        return (
            abs(math.log(size(across)[0] / size(across)[1] / 1.4)) + 2 * (-panels % across) / panels
        )

    across = min(range(1, panels + 1), key=ugliness)
    figure, axes = plt.subplots(
        math.ceil(panels / across),
        across,
        figsize=size(across),
        squeeze=False,
        layout="constrained",
    )
    colours = matplotlib.colormaps[COLOURS]
    for i, panel in enumerate(axes.flat):
        if i >= panels:
            panel.set_visible(False)
            continue
        panel.set_facecolor("white")
        for y, x in torch.nonzero(
            values[i].isnan()
        ).tolist():  # blank, and not to be taken for a weight
            panel.add_patch(
                plt.Rectangle(
                    (x - 0.5, y - 0.5),
                    1,
                    1,
                    fill=False,
                    hatch="////",
                    edgecolor="0.75",
                    linewidth=0,
                )
            )
        image = panel.imshow(values[i].numpy(), cmap=colours, vmin=0, vmax=top)
        for y, x in torch.nonzero(~values[i].isnan()).tolist() if numbers else ():
            value = values[i, y, x].item()
            colour = "black" if value > 0.45 * top else "white"
            panel.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)
        panel.set_title(titles[i], fontsize=9)
        # no text of ours is a formula, whatever an adapter is called
        text = {"fontsize": 8, "parse_math": False}
        panel.set_yticks(range(M), rows if i % across == 0 else [""] * M, **text)
        panel.set_xticks(
            range(N), columns if i + across >= panels else [""] * N, rotation=90, **text
        )
        panel.tick_params(length=2)
    figure.supylabel("target task", fontsize=9)
    figure.supxlabel(
        "adapter (hatched: not among the target's)" if values.isnan().any() else "adapter",
        fontsize=9,
    )
    figure.colorbar(image, ax=axes, label="mean fusion weight", fraction=0.05, shrink=0.9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


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
        where = (
            ", ".join(titles[slot] for slot, s in weights.items() if s.argmax() == own)
            or "no layer"
        )
        lines.append(
            f"  its own ({task}) is the strongest in: {where}; mean weight {mean[own]:.3f}, "
            "even would be "
            f"{1 / len(names):.3f}"
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
            f"{100 * baseline:.1f} %, "
            f"gain {gain:+.1f} points"
        )
    return lines


def last_layer(targets):
    """Is the last layer the most spread? targets: [(label, names, weights, ...)]"""
    yes, last, before = 0, [], []
    for _, _, weights, *_ in targets:
        top = max(layer for layer, _ in weights)
        spreads = {slot: spread(s) for slot, s in weights.items()}
        yes += max(spreads, key=spreads.get)[0] == top
        last += [value for (layer, _), value in spreads.items() if layer == top]
        before += [value for (layer, _), value in spreads.items() if layer < top]
    return (
        f"The last layer is the most spread: so in {yes} of {len(targets)} targets; mean entropy "
        f"{mean_of(last)} there, "
        f"{mean_of(before)} in the layers before."
    )


def own_adapters(targets):
    """Do tasks that do not gain prefer their own adapter?"""
    groups = {
        True: [],
        False: [],
    }  # gains? -> [(share of layers where its own is the strongest, its mean weight)]
    for _, names, weights, task, metrics, baseline in targets:
        if baseline is not None and task in names:
            s, own = torch.stack(list(weights.values())), names.index(task)
            share = (s.argmax(1) == own).double().mean().item()
            groups[metrics["accuracy"] > baseline].append((share, s[:, own].mean().item()))
    start = "Tasks that do not gain prefer their own adapter: "
    if not groups[True] and not groups[False]:
        return (
            start
            + "cannot be told without the accuracy of a target's single adapter (--baseline) and "
            "the adapter itself."
        )
    parts = []
    for gains, group in groups.items():
        if group:
            share, own = (mean_of(values) for values in zip(*group, strict=True))
            parts.append(
                f"{len(group)} with{'' if gains else 'out'} a gain: own adapter the strongest in "
                f"{share} of the "
                f"layers, its mean weight {own}"
            )
    if len(parts) == 1:
        return start + f"there is nothing to compare with; {parts[0]}."
    weight = {gains: sum(own for _, own in group) / len(group) for gains, group in groups.items()}
    return start + f"{'yes' if weight[False] > weight[True] else 'no'}; {'; '.join(parts)}."


def mean_of(values):
    return f"{sum(values) / len(values):.3f}" if values else "-"


# --------------------------------------------------------------------------------------------------


def draw(args):
    if args.out.exists() and not args.out.is_dir():
        raise ValueError(f"--out {args.out} is a file")
    there = [name for name in WRITTEN if (args.out / name).exists()]
    if there and not args.overwrite:
        raise ValueError(f"{args.out / there[0]} is already there: another --out, or --overwrite")
    device, _ = choose_device(args.device, "float32")
    targets = [
        mean_weights(run, args.data_dir, args.model, device, None, args.allow_other_encoder)
        for run in args.runs
    ]
    baselines = find_baselines(args.runs, args.baseline)
    many = Counter(task for _, _, task in targets)
    targets = [  # a target is called by its task, by its run too where another has the same
        (
            task if many[task] == 1 else f"{task} ({run.resolve().name})",
            names,
            weights,
            task,
            read_json(run / "metrics.json"),
            baselines.get(task),
        )
        for run, (names, weights, task) in zip(args.runs, targets, strict=True)
    ]

    # columns: the targets' own adapters in the order of the rows, so that they lie on the diagonal,
    # then the others
    available = [name for _, names, *_ in targets for name in names]
    columns = [
        name
        for name in dict.fromkeys([task for _, _, _, task, *_ in targets] + available)
        if name in available
    ]
    slots = sorted({slot for _, _, weights, *_ in targets for slot in weights})
    values = torch.full((len(slots), len(targets), len(columns)), torch.nan, dtype=torch.float64)
    for y, (_, names, weights, *_) in enumerate(targets):
        for slot, s in weights.items():
            values[slots.index(slot), y, [columns.index(name) for name in names]] = s

    args.out.mkdir(parents=True, exist_ok=True)
    labels = [label for label, *_ in targets]
    top = math.ceil(10 * values.nan_to_num().max().item()) / 10
    some = figure_4_layers(1 + max(layer for layer, _ in slots))
    for name, chosen in (
        ("figure4.png", [i for i, slot in enumerate(slots) if slot[0] in some]),
        ("figure6.png", list(range(len(slots)))),
    ):
        titles = slot_names(slots)
        heatmaps(values[chosen], [titles[i] for i in chosen], labels, columns, top, args.out / name)
    with open(args.out / "weights.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "target", "layer", "location", *columns])
        for run, (_, names, weights, task, *_) in zip(args.runs, targets, strict=True):
            for (layer, location), s in weights.items():
                cells = dict(zip(names, s.tolist(), strict=True))
                writer.writerow(
                    [run, task, layer + 1, location, *(cells.get(name, "") for name in columns)]
                )
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
        description="Heatmaps of fusion weights, target tasks by adapters, and what they say."
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
    parser.add_argument("--model", help="where the encoder is now, if not where the runs found it")
    parser.add_argument(
        "--allow-other-encoder", action="store_true", help="even if its weights are others"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace earlier figures")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"])
    try:
        args = parser.parse_args(argv)
        lines = draw(args)
    except (ValueError, OSError, FloatingPointError) as e:
        print(f"figure4.py: {' '.join(str(e).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("figure4.py: interrupted", file=sys.stderr)
        sys.exit(130)
    print("\n".join(lines))
    print(f"\n{args.out}: figure4.png, figure6.png, weights.csv, summary.txt")


if __name__ == "__main__":
    main()
