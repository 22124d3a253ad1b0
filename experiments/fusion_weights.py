"""What fusion learned: the paper's Figure 6 (Figure 4 has four of its layers), and what section 6
reads from it, as tables.

    python -m experiments.fusion_weights runs/fusion-rte runs/fusion-cb ... --out figures

Every RUN becomes a row of each panel: the weights that it gives to its adapters, averaged over its
task's development set and over all tokens but the padding; in the last layer over [CLS], the one
token of it that adapter.Head reads, so the only one for which the fusion there was trained.
--all-tokens is the paper's own figure, with all of them there, too. DIR gets figure6.png,
weights.csv and summary.txt. Layers are counted from 1."""

import math
from collections import Counter, defaultdict
from pathlib import Path

import pandas as pd
import torch

from data import batches, collate
from experiments.load_run import load_run, make_parser, read_finished
from experiments.report import markdown, save_figure, subplots, write_text
from formats.adapterhub import ADAPTER, FUSION, read, read_run
from formats.files import note, read_json
from fusion import active_fusions
from runtime.command import run_command

# Lightness rises with the weight; in the middle, black and white text have the same contrast.
COLOURS, MIDDLE = "cividis", 0.465
# Columns of weights.csv, which has a row for each adapter in each layer
COLUMNS = "run target own accuracy own_accuracy layer location adapter weight".split()
LEGEND = """weight: mean over the layers and the tokens.
own: the adapter trained on the target's training examples, by its run.json, or else its name.
accuracy: the fusion's on the development set, in %.
gain: accuracy minus that of the own adapter's run, if it is still there, on the same examples.
spread: e to the power of the entropy of the mean weights, N where N adapters have even ones: in the
mean of the layers before the last; in the last layer."""


@torch.inference_mode()
def mean_weights(run, examples, all_tokens=False):
    """{(layer, location): [N]}: a LoadedRun's fusion weights, averaged over all tokens of [Example]
    but the padding; in the last layer over [CLS], unless all_tokens. N: as run.adapters"""
    sums, counts = defaultdict(float), Counter()
    last = None if all_tokens else len(run.bert.layers) - 1
    for indices in batches(examples, 64):
        batch = collate([examples[i] for i in indices], run.bert.config.pad_token_id)
        is_token = batch["attention_mask"].bool()  # [B, T]
        for (layer, location), s in run.weights_of(batch).items():  # [B, T, N]
            of_read = s[:, 0] if layer == last else s.cpu()[is_token]
            sums[layer, location] += of_read.double().sum(0).cpu()
            counts[layer, location] += len(of_read)
    return {slot: sums[slot] / counts[slot] for slot in sums}


def own_adapter(run):
    """The name of the fused adapter that was trained on the target's training examples, by the
    digest in its run.json, or else its name; None, and a note, if that is not one alone."""
    records = {name: read_run(run.directory / "adapters" / name) for name in run.adapters}
    task, own = run.task.name, []
    for name, record in records.items():
        digest = record.get("inputs", {}).get(f"training examples of {task}")
        if digest == run.record["inputs"][f"training examples of {task}"]:
            own += [name] * (name == task or len(record["tasks"]) == 1)
    own = own or [name for name in records if name == task and not records[name]]
    if len(own) != 1:
        found = " and ".join(own) or "none of its adapters"
        return note(f"{run.directory}: no own adapter, for {found} was trained on its examples")
    return own[0]


def own_accuracy(run, own):
    """The own adapter's development accuracy, if its run is there, unchanged, on the same set."""
    record = read_run(run.directory / "adapters" / str(own))
    out, inputs = Path(record.get("options", {}).get("out", "")), run.record["inputs"]
    if own is not None and (out / "metrics.json").is_file() and (out / ADAPTER.config).is_file():
        if read(out, ADAPTER).sha256() == inputs[f"adapter {own}"]:
            dev_set = f"development examples of {run.task.name}"
            if record["inputs"].get(dev_set) == inputs[dev_set]:
                return read_json(out / "metrics.json").get("accuracy", math.nan)
            note(f"{run.directory}: no gain, for {out} has another development set")
    return math.nan


def rows_of(run, target, means):
    """A row for each layer, location, and adapter there, as a DataFrame of COLUMNS"""
    own, rows = own_adapter(run), []
    accuracy = read_json(run.directory / "metrics.json").get("accuracy", math.nan)
    place = [str(run.directory), target, own, accuracy, own_accuracy(run, own)]
    for (layer, location), fusion in active_fusions(run.bert).items():
        s = dict(zip(run.adapters, means[layer, location].tolist(), strict=True))
        rows += [[*place, layer + 1, location, name, s[name]] for name in fusion.adapter_names]
    return pd.DataFrame(rows, columns=COLUMNS)


def heat_map(axes, values, rows, columns, top=1.0):
    """Draws a tensor [rows, columns] of 0 .. top, with numbers; NaN is blank. Returns the image."""
    image = axes.imshow(values.numpy(), cmap=COLOURS, vmin=0, vmax=top, aspect="auto")
    for y, row in enumerate(values.tolist()):
        for x, value in enumerate(row):
            if not math.isnan(value):
                colour = "black" if image.norm(value) > MIDDLE else "white"
                axes.text(x, y, f"{value:.2f}", color=colour, fontsize=6, ha="center", va="center")
    names = {"fontsize": 8, "parse_math": False}  # no name of an adapter is a formula
    axes.set_yticks(range(len(rows)), rows, **names)
    axes.set_xticks(range(len(columns)), columns, rotation=90, **names)
    return image


def heat_maps(panels, rows, columns, top=1.0):
    """A figure with a heat map for each of {title: tensor [rows, columns]}."""
    across = math.ceil(math.sqrt(len(panels)))
    down = math.ceil(len(panels) / across)
    width, height = across * (len(columns) * 0.34 + 0.3), down * (len(rows) * 0.34 + 0.4)
    shared = {"sharex": True, "sharey": True, "squeeze": False}  # names at the outer panels alone
    figure, axes = subplots(down, across, (width + 3.5, height + 2.5), **shared)  # in inches
    for i, (title, values) in enumerate(panels.items()):
        image = heat_map(axes.flat[i], values, rows, columns, top)
        axes.flat[i].set_title(title, fontsize=9)
        axes.flat[i].tick_params(labelbottom=i + across >= len(panels))  # also above a gap
    for panel in axes.flat[len(panels) :]:
        panel.set_visible(False)
    figure.colorbar(image, ax=axes, label="fusion weight", fraction=0.05, shrink=0.9)
    return figure


def title_of(layer, location):
    return f"layer {layer}" + f", {location}" * (location != "output")


def draw(rows, out):
    """Figure 6. The own adapters come first, in the order of the targets: on the diagonal."""
    names = [*dict.fromkeys([*rows["own"].dropna(), *rows["adapter"]])]
    labels, top = rows["target"].unique(), math.ceil(10 * rows["weight"].max()) / 10
    panels = {}
    for slot, of in rows.groupby(["layer", "location"]):
        values = of.pivot(index="target", columns="adapter", values="weight")
        values = values.reindex(index=labels, columns=names)
        panels[title_of(*slot)] = torch.tensor(values.to_numpy().copy())
    figure = heat_maps(panels, labels, names, top)
    figure.suptitle("Mean weight of each adapter", fontsize=10)
    figure.supylabel("target task", fontsize=9)
    figure.supxlabel("adapter (blank: not in this layer of this target)", fontsize=9)
    save_figure(figure, out / "figure6.png")


def summary(rows):
    """(rows, header) of summary.txt, a row for each target, see LEGEND; and [a line below it]"""
    lines, notes = [], []
    for target, of in rows.groupby("target", sort=False):
        s = of.pivot(index=["layer", "location"], columns="adapter", values="weight").fillna(0)
        own, accuracy, of_own = of[["own", "accuracy", "own_accuracy"]].iloc[0]
        means, is_last = s.mean(), s.index.get_level_values("layer") == of["layer"].max()
        sums = s.sum(axis=1)
        spread = (s * -s.where(s > 0, 1).map(math.log)).sum(axis=1).map(math.exp)
        if (s < 0).any(axis=None) or (sums - 1).abs().max() > 0.02:  # which is more than rounding
            spread *= math.nan
            found = f"its sums are {sums.min():.2f} to {sums.max():.2f}, not a softmax's"
            notes.append(f"{target}: s is NO DISTRIBUTION: {found}")
        line = [target, means.idxmax(), means.max(), own, means.get(own), 100 * accuracy]
        gain = 100 * (accuracy - of_own)
        lines.append([*line, gain, spread[~is_last].mean(), spread[is_last].mean()])
    pairs = pd.DataFrame([(line[4], line[6]) for line in lines], dtype=float).dropna()
    if len(pairs) > 2:
        r = pairs.corr().iloc[0, 1]
        notes.append(f"Own weight and gain, over {len(pairs)} targets: correlation {r:.2f}")
    names = "target,strongest,its weight,own,own weight,accuracy,gain,spread,in the last layer"
    return (lines, names.split(",")), notes


def main(argv=None):
    parser = make_parser("fusion_weights", __doc__)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="finished fusion runs, a row each")
    add("--out", required=True, type=Path, metavar="DIR", help="for figure, CSV and summary")
    add("--data-dir", help="where the data are now, if not where the runs had them")
    add("--all-tokens", action="store_true", help="also in the last layer, as in the paper")
    args = parser.parse_args(argv)
    tasks = [read_finished(run)["options"]["task"] for run in args.runs]
    for run in args.runs:
        if not Path(run, FUSION.config).is_file():
            raise ValueError(f"{run} has no fusion")
    frames, out = [], args.out
    for directory, task in zip(args.runs, tasks, strict=True):
        print(f"{directory}: fusion weights on its development set", flush=True)
        run = load_run(directory, args.device, args.model, args.task, args.columns)
        target = task if tasks.count(task) == 1 else f"{task} ({directory})"
        means = mean_weights(run, run.split(data_dir=args.data_dir), args.all_tokens)
        frames.append(rows_of(run, target, means))
    rows = pd.concat(frames)
    draw(rows, out)
    write_text(out / "weights.csv", rows.to_csv(index=False))
    table, notes = summary(rows)
    text = "\n".join([markdown(*table), *notes, LEGEND, ""])
    print(text)
    print(write_text(out / "summary.txt", text).parent)


if __name__ == "__main__":
    run_command("fusion_weights.py", main)
