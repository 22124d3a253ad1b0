"""What fusion learned: the paper's Figure 4 (some layers) and Figure 6 (all layers), and what
section 6 reads from them, as tables.

    python -m experiments.fusion_weights runs/fusion-rte runs/fusion-cb ... --out figures \\
        [--baseline runs/rte runs/cb ...]

Every RUN is a finished fusion run and becomes a row of each panel: the weights that it gives to its
adapters, averaged over its task's development set, once over all tokens ([CLS] and [SEP] included,
padding not), as in the paper, and once at [CLS] alone, the only token of the last layer that the
head reads. DIR gets figure4.png and figure6.png (all tokens), figure4_cls.png and figure6_cls.png,
weights.csv and summary.txt, which is also printed. Layers are counted from 1. Runs of single
adapters after --baseline show what a fusion has gained.
"""

import itertools
import math
from collections import defaultdict, namedtuple
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F
from tqdm import tqdm

from data import batches, collate
from experiments.load_run import load_run, make_parser, read_finished
from experiments.report import save_figure, subplots, table, write_csv, write_text
from formats.adapterhub import FUSION
from formats.files import read_json
from fusion import fusion_weights, fusions
from runtime.command import import_modules, run_command
from train import autocast

# Lightness rises with the weight, so it can be read in grey and with any colour vision. In the
# middle black and white text have the same contrast.
COLOURS, MIDDLE = "cividis", 0.465
SHOWN = {"all": "all tokens", "cls": "[CLS] alone"}
LEGEND = """weight: mean over the layers and the tokens that are read: all of them, but in the last
layer [CLS] alone, because AdapterHub's head reads no other token.
even: what each adapter has if none is preferred.
own: the adapter of the target's task; own first: in how many layers it has the largest weight.
fusion, single, gain: accuracy on the development set, in %; single is the mean of the adapters in
--baseline that are on the fusion's task, encoder and data (–: none is).
entropy, by layer, of the mean weights: 0.00 if one adapter has all the weight, 1.00 if all have
the same; it is also high if each token prefers another adapter. In the last layer the row of all
tokens is mostly over tokens that nothing reads: only the row of [CLS] says how that layer's weight
is spread."""


# A fusion run, which is a row of every figure and table. weights: of `weights_by_name`; single: the
# accuracy of the task's own adapter
Target = namedtuple("Target", "run task label weights accuracy single")


def parse(argv):
    parser = make_parser("fusion_weights", __doc__)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="finished fusion runs, a row each")
    add("--out", required=True, metavar="DIR", help="for figures, CSV and summary")
    add("--baseline", nargs="+", default=[], metavar="RUN", help="single adapters on the targets")
    add("--data-dir", help="where the data are now, if not where the runs had them")
    add("--overwrite", action="store_true", help="replace earlier figures")
    args = parser.parse_args(argv)
    import_modules(args.imports)
    if Path(args.out).exists() and not (args.overwrite and Path(args.out).is_dir()):
        raise ValueError(f"{args.out} is already there: choose another --out, or --overwrite")
    for run in args.runs:
        stage = read_finished(run)["options"]["stage"]
        if not Path(run, FUSION.config).is_file():
            raise ValueError(f"{run} is of --stage {stage}: only fusion runs have fusion weights")
    return args


def choose_tokens(which, batch):
    """The tokens, [B, T], over which a mean is taken: "all" but the padding, "cls", or those of
    "text_a" or "text_b", without [CLS] and the [SEP] that ends the text."""
    real, is_cls = batch["attention_mask"].bool(), torch.zeros_like(batch["input_ids"]).bool()
    is_cls[:, 0] = True
    if which in SHOWN:
        return {"all": real, "cls": is_cls}[which]
    text = real & (batch["token_type_ids"] == ("text_a", "text_b").index(which))
    is_last = text & ~F.pad(text[:, 1:], (0, 1))
    return text & ~is_last & ~is_cls


@torch.inference_mode()
def mean_weights(run, examples, tokens=("all",)):
    """{tokens: {(layer, location): [N]}}: the fusion weights of a LoadedRun, averaged over those
    `tokens` of all [Example] that `choose_tokens` names. N is in the order of run.adapters, and 0
    for an adapter that is not in the layer."""
    bert, counts = run.bert, dict.fromkeys(tokens, 0)
    sums = {of: defaultdict(float) for of in tokens}
    for indices in tqdm(batches(examples, 64), str(run.directory), leave=False, disable=None):
        batch = collate([examples[i] for i in indices], bert.config.pad_token_id)
        names = "input_ids", "token_type_ids", "attention_mask"
        with autocast(run.args, bert.device):
            bert(*(batch[name].to(bert.device) for name in names))
        for of in tokens:
            chosen = choose_tokens(of, batch)
            counts[of] += chosen.sum().item()
            for slot, s in fusion_weights(bert).items():  # [B, T, N]
                sums[of][slot] += s.cpu()[chosen].double().sum(0)
    return {of: {slot: s / counts[of] for slot, s in slots.items()} for of, slots in sums.items()}


def weights_by_name(run, examples):
    """{tokens: {(layer, location): {adapter in that layer: its mean weight}}}, where tokens is
    "all", "cls", or those that are "read": all, but in the last layer [CLS] alone if the head reads
    no other."""
    means, result = mean_weights(run, examples, SHOWN), defaultdict(dict)
    for slot, fusion in fusions(run.bert).items():
        for tokens in SHOWN:
            of_name = dict(zip(run.adapters, means[tokens][slot].tolist(), strict=True))
            result[tokens][slot] = {name: of_name[name] for name in fusion.adapter_names}
        is_cls_only = slot[0] == len(run.bert.layers) - 1 and run.model.reads_cls_only()
        result["read"][slot] = result["cls" if is_cls_only else "all"][slot]
    return result


def heat_map(axes, values, rows, columns, top=1.0):
    """Draws fusion weights, a tensor [rows, columns] of 0 .. top, with the number in every cell; a
    cell is blank where it has NaN. Returns the image, for a colour bar."""
    image = axes.imshow(values.numpy(), cmap=COLOURS, vmin=0, vmax=top, aspect="auto")
    for y, row in enumerate(values.tolist()):
        for x, value in enumerate(row):
            if not math.isnan(value):
                colour = "black" if image.norm(value) > MIDDLE else "white"
                axes.text(x, y, f"{value:.2f}", color=colour, fontsize=6, ha="center", va="center")
    names = {"fontsize": 8, "parse_math": False}  # no name of an adapter is a formula
    axes.set_yticks(range(len(rows)), rows, **names)
    axes.set_xticks(range(len(columns)), columns, rotation=90, **names)
    axes.tick_params(length=2)
    return image


def heat_maps(panels, rows, columns, top=1.0):
    """A figure with a heat map for each of {title: tensor [rows, columns]}."""
    across = math.ceil(math.sqrt(len(panels)))
    down = math.ceil(len(panels) / across)
    left, below = (0.085 * max(map(len, names)) + 0.7 for names in (rows, columns))  # in inches
    width = left + across * (len(columns) * 0.34 + 0.3) + 1.2
    height = below + down * (len(rows) * 0.34 + 0.4) + 0.3
    shared = {"sharex": True, "sharey": True, "squeeze": False}  # names at the outer panels alone
    figure, axes = subplots(down, across, (max(4.5, width), max(3, height)), **shared)
    for i, (title, values) in enumerate(panels.items()):
        panel = axes.flat[i]
        image = heat_map(panel, values, rows, columns, top)
        panel.set_title(title, fontsize=9)
        panel.tick_params(labelbottom=i + across >= len(panels))  # also above a gap at the end
    for panel in axes.flat[len(panels) :]:
        panel.set_visible(False)
    figure.colorbar(image, ax=axes, label="fusion weight", fraction=0.05, shrink=0.9)
    return figure


def slot_names(slots):
    """Titles of (layer, location) pairs; the location is named where there are two."""
    several = len({location for _, location in slots}) > 1
    return [f"layer {layer + 1}" + f", {location}" * several for layer, location in slots]


def figure_4_layers(count):
    """From 0: the paper's layers 1, 7, 9 and 12 of 12; in other encoders those at their depth."""
    return {0, math.ceil(count * 7 / 12) - 1, math.ceil(count * 9 / 12) - 1, count - 1}


def draw(targets, slots, columns, out):
    """Figures 4 and 6 of all tokens and of [CLS], on one scale."""
    shown = [target.weights[tokens].values() for target in targets for tokens in SHOWN]
    largest = max(s for layers in shown for layer in layers for s in layer.values())
    top, some = math.ceil(10 * largest) / 10, figure_4_layers(1 + max(slots)[0])
    labels, titles = [target.label for target in targets], slot_names(slots)
    for tokens, suffix in (("all", ""), ("cls", "_cls")):
        figure_4, figure_6 = {}, {}
        for slot, title in zip(slots, titles, strict=True):
            rows = [target.weights[tokens].get(slot, {}) for target in targets]
            values = [[row.get(name, math.nan) for name in columns] for row in rows]
            figure_6[title] = torch.tensor(values, dtype=torch.float64)
            if slot[0] in some:
                figure_4[title] = figure_6[title]
        for name, panels in (("figure4", figure_4), ("figure6", figure_6)):
            figure = heat_maps(panels, labels, columns, top)
            title = f"What each target task takes from each adapter: mean, {SHOWN[tokens]}"
            figure.suptitle(title, fontsize=10)
            figure.supylabel("target task", fontsize=9)
            is_blank = any(values.isnan().any() for values in panels.values())
            blank = " (blank: not in this layer of this target)" * is_blank
            figure.supxlabel(f"adapter{blank}", fontsize=9)
            save_figure(figure, out / f"{name}{suffix}.png")


def single_accuracies(runs, baselines):
    """For each fusion the mean accuracy of the single adapters that are on its task, encoder and
    data, or None. With --limit-train, the data of another seed are others."""

    def basis(record):
        task, inputs = record["options"]["task"], record["inputs"]
        names = "encoder", f"training examples of {task}", f"development examples of {task}"
        return task, *(inputs.get(name) for name in names)

    found, wanted = defaultdict(list), [basis(read_finished(run)) for run in runs]
    for directory in baselines:
        record, accuracy = read_finished(directory), accuracy_of(directory)
        is_single = record["options"]["stage"] == "adapter" and accuracy is not None
        if is_single and basis(record) in wanted:
            found[basis(record)].append(accuracy)
        else:
            problem = "is not a single adapter with the task, encoder and data of a fusion"
            print(f"note: --baseline {directory} {problem}")
    return [mean(found[run]) if run in found else None for run in wanted]


def accuracy_of(run):
    return read_json(Path(run, "metrics.json")).get("accuracy")


def strengths_table(targets, columns):
    """(rows, header): the strongest adapter of each target and its weight; that of the target's own
    adapter; an even weight, which is what each would have if none were preferred; in how many
    layers the own one is the strongest; accuracies in %"""
    rows = []
    for target in targets:
        layers, task = [*target.weights["read"].values()], target.task
        means = {name: mean(s.get(name, 0.0) for s in layers) for name in columns}
        best, even = max(means, key=means.get), mean(1 / len(s) for s in layers)
        own, own_first = None, None
        if any(task in s for s in layers):
            own = means[task]
            own_first = f"{sum(max(s, key=s.get) == task for s in layers)} of {len(layers)}"
        scores = target.accuracy, target.single
        fusion, single = (None if value is None else 100 * value for value in scores)
        gain = None if None in scores else f"{fusion - single:+.2f}"
        rows.append([target.label, best, means[best], own, even, own_first, fusion, single, gain])
    header = "target,strongest,its weight,own weight,even,own first,fusion,single,gain"
    return rows, header.split(",")


def normalized_entropy(weights):
    """Entropy of a layer's weights over its largest possible value: 0 if one adapter has all the
    weight, 1 if all have the same."""
    entropy = torch.special.entr(torch.as_tensor(weights, dtype=torch.float64)).sum().item()
    return entropy / math.log(max(2, len(weights)))


def entropy_table(targets, slots):
    """(rows, header): `normalized_entropy` of every layer, over all tokens and at [CLS]"""
    rows = []
    for target in targets:
        for tokens, title in SHOWN.items():
            layers = [target.weights[tokens].get(slot) for slot in slots]
            entropies = [normalized_entropy([*s.values()]) if s else None for s in layers]
            rows.append([target.label, title, *entropies])
    titles = [title.removeprefix("layer ") for title in slot_names(slots)]
    return rows, ["entropy", "tokens", *titles]


def main(argv=None):
    args = parse(argv)
    targets, available, out = [], [], Path(args.out)
    tasks = [read_finished(run)["options"]["task"] for run in args.runs]
    singles = single_accuracies(args.runs, args.baseline)
    for directory, task, single in zip(args.runs, tasks, singles, strict=True):
        print(f"{directory}: fusion weights on its development set", flush=True)
        run = load_run(directory, args.device, args.model, args.task)
        weights = weights_by_name(run, run.split(data_dir=args.data_dir))
        label = task if tasks.count(task) == 1 else f"{task} ({Path(directory).resolve().name})"
        targets.append(Target(directory, task, label, weights, accuracy_of(directory), single))
        available += run.adapters
    slots = sorted({slot for target in targets for slot in target.weights["all"]})
    # The targets' own adapters come first and in the order of the rows: they lie on the diagonal.
    columns = [*dict.fromkeys([*(task for task in tasks if task in available), *available])]

    out.mkdir(parents=True, exist_ok=True)
    draw(targets, slots, columns, out)
    rows = []
    for target in targets:
        for slot, tokens in itertools.product(target.weights["all"], SHOWN):
            cells = map(target.weights[tokens][slot].get, columns)
            rows.append([target.run, target.task, slot[0] + 1, slot[1], tokens, *cells])
    write_csv(out / "weights.csv", "run target layer location tokens".split() + columns, rows)
    tables = strengths_table(targets, columns), entropy_table(targets, slots)
    text = "\n\n".join("\n".join(table(*one)) for one in tables) + f"\n\n{LEGEND}\n"
    print(text)
    print(write_text(out / "summary.txt", text).parent)


if __name__ == "__main__":
    run_command("fusion_weights.py", main)
