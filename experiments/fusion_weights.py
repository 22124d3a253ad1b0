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

import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F

from data import batches, length_groups
from experiments.load_run import Reading, check_fusion, load_run, read_finished
from experiments.report import save_figure, subplots, table, write_csv, write_text
from formats.files import read_json
from fusion import fusion_weights, fusions
from runtime.command import run_command
from runtime.processes import choose_device
from runtime.run import progress_bar
from runtime.settings import argument, option, parse, same_option

# Lightness rises with the weight, so it can be read in grey and with any colour vision. In the
# middle black and white text have the same contrast.
COLOURS, MIDDLE = "cividis", 0.465
BATCH_SIZE = 64
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


@dataclass(frozen=True)
class Options:
    runs: tuple[Path, ...] = argument("finished fusion runs, a row each", metavar="RUN")
    out: Path = option(None, "directory for figures, CSV and summary", required=True)
    baseline: tuple[Path, ...] = option((), "runs of single adapters on the target tasks")
    data_dir: str | None = option(None, "where the data are now, if not where the runs had them")
    model: str | None = same_option(Reading, "model")
    imports: str | None = same_option(Reading, "imports")
    overwrite: bool = option(False, "replace earlier figures")
    device: str = same_option(Reading, "device")


def of_cls(types, mask):
    return torch.arange(mask.shape[1]).expand_as(mask) == 0


def of_text(n):
    """The tokens of the first (0) or second text, without [CLS] and the [SEP] that ends it."""

    def chosen(types, mask):
        inside = (types == n) & mask.bool()
        last = inside & ~F.pad(inside[:, 1:], (0, 1))
        return inside & ~last & ~of_cls(types, mask)

    return chosen


# over which tokens a mean is taken: function(token_type_ids, attention_mask) -> [B, T]
TOKENS = {
    "all": lambda types, mask: mask.bool(),
    "cls": of_cls,
    "text_a": of_text(0),
    "text_b": of_text(1),
}


@torch.inference_mode()
def average(bert, inputs, tokens=("all",)):
    """{name: {(layer, location): [N]}} for the `tokens` named, of TOKENS: the fusion weights,
    averaged over those tokens of all (input_ids, token_type_ids, attention_mask), each [B, T]; NaN
    for an adapter that is not in the layer."""
    sums, counts = {name: defaultdict(int) for name in tokens}, defaultdict(int)
    for ids, types, mask in inputs:
        bert(*(tensor.to(bert.device) for tensor in (ids, types, mask)))
        weights = {slot: s.cpu() for slot, s in fusion_weights(bert).items()}
        for name in tokens:
            chosen = TOKENS[name](types, mask)  # [B, T]
            counts[name] += chosen.sum().item()
            for slot, s in weights.items():
                sums[name][slot] += s[chosen].double().sum(0)
    if not all(s.isfinite().all() for of in sums.values() for s in of.values()):
        raise FloatingPointError("the fusion's weights are not finite")
    means = {name: {slot: s / counts[name] for slot, s in of.items()} for name, of in sums.items()}
    for slot, fusion in fusions(bert):
        present = fusion.adapter_names
        absent = torch.tensor([name not in present for name in fusion.name.split(",")])
        for of in means.values():
            of[slot][absent] = math.nan
    return means


def inputs_of(bert, examples, description="fusion weights"):
    """The inputs of `average` for a split, under a progress bar."""
    steps = math.ceil(len(examples) / BATCH_SIZE)
    parts = batches(examples, BATCH_SIZE, bert.config.pad_token_id)
    for batch in progress_bar(parts, description, steps):
        for _, inputs in length_groups(batch):
            yield inputs


def mean_weights_as_trained(model, examples, tokens=("all",), description="fusion weights"):
    """`average` of a Model on a split, in the precision in which it computes."""
    bert, use_bf16 = model.bert, model.dtype == torch.bfloat16
    with torch.autocast(bert.device.type, torch.bfloat16, enabled=use_bf16):
        return average(bert, inputs_of(bert, examples, description), tokens)


def mean_weights(directory, data_dir=None, model=None, device="cpu"):
    """(names of the N adapters, weights as `mean_weights_read` gives them, task) of a fusion run on
    its development set."""
    check_fusion(directory, "have fusion weights")
    run = load_run(directory, device, model)
    inputs = inputs_of(run.bert, run.split(data_dir=data_dir), str(directory))
    return run.adapters, mean_weights_read(run.bert, run.head, inputs), run.task.name


def mean_weights_read(bert, head, inputs):
    """`average` over all tokens ("all"), at [CLS] ("cls"), and over the tokens that reach the head
    ("read"): all of them, but in the last layer [CLS] alone if the head reads no other."""
    found = average(bert, inputs, SHOWN)
    found["read"] = dict(found["all"])
    if vars(type(head)).get("cls_only", False):  # the same test as in train.Model.forward
        last = len(bert.layers) - 1
        found["read"] |= {slot: s for slot, s in found["cls"].items() if slot[0] == last}
    return found


def normalized_entropy(weights):
    """Entropy of a layer's weights over its largest possible value: 0 if one adapter has all the
    weight, 1 if all have the same."""
    present = weights[~weights.isnan()]
    return torch.special.entr(present).sum().item() / math.log(max(2, len(present)))


def heat_map(axes, values, rows, columns, top=1.0):
    """Draws fusion weights, a table [rows, columns] of 0 .. top, with the number in every cell; a
    cell is blank where the table has NaN. Returns the image, for a colour bar."""
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


def slot_names(slots):
    """Titles of (layer, location) pairs; the location is named where there are two."""
    several = len({location for _, location in slots}) > 1
    return [f"layer {layer + 1}" + f", {location}" * several for layer, location in slots]


def figure_4_layers(count):
    """From 0: the paper's layers 1, 7, 9 and 12 of 12; in other encoders those at their depth."""
    return {0, math.ceil(count * 7 / 12) - 1, math.ceil(count * 9 / 12) - 1, count - 1}


def draw(values, slots, rows, columns, out):
    """Figures 4 and 6 of all tokens and of [CLS], on one scale. values: {tokens: those of
    `arrange`}; slots, columns: of `arrange`"""
    top = math.ceil(10 * max(of.nan_to_num().max().item() for of in values.values())) / 10
    titles, some = slot_names(slots), figure_4_layers(1 + max(layer for layer, _ in slots))
    papers = [i for i, (layer, _) in enumerate(slots) if layer in some]
    for tokens, suffix in (("all", ""), ("cls", "_cls")):
        for name, shown in (("figure4", papers), ("figure6", [*range(len(slots))])):
            chosen, path = [titles[i] for i in shown], out / f"{name}{suffix}.png"
            heat_maps(values[tokens][shown], chosen, rows, columns, top, SHOWN[tokens], path)


def heat_maps(values, titles, rows, columns, top, tokens, path):
    """values: a [targets, adapters] table for every title; tokens: words for those of the means"""
    panels = len(titles)
    across = math.ceil(math.sqrt(panels))
    down = math.ceil(panels / across)
    left, below = (0.085 * max(map(len, names)) + 0.7 for names in (rows, columns))  # in inches
    width = left + across * (len(columns) * 0.34 + 0.3) + 1.2
    height = below + down * (len(rows) * 0.34 + 0.4) + 0.3
    shared = {"sharex": True, "sharey": True, "squeeze": False}  # names at the outer panels alone
    figure, axes = subplots(down, across, (max(4.5, width), max(3, height)), **shared)
    for i, title in enumerate(titles):
        panel = axes.flat[i]
        image = heat_map(panel, values[i], rows, columns, top)
        panel.set_title(title, fontsize=9)
        panel.tick_params(labelbottom=i + across >= panels)  # also above a gap in the last row
    for panel in axes.flat[panels:]:
        panel.set_visible(False)
    figure.suptitle(f"What each target task takes from each adapter: {tokens}", fontsize=10)
    figure.supylabel("target task", fontsize=9)
    blank = " (blank: not in this layer of this target)" if values.isnan().any() else ""
    figure.supxlabel(f"adapter{blank}", fontsize=9)
    figure.colorbar(image, ax=axes, label="mean fusion weight", fraction=0.05, shrink=0.9)
    save_figure(figure, path)


def single_accuracies(runs, baselines):
    """For each fusion the mean accuracy of the single adapters that are on its task, encoder and
    data, or None. With --limit-train, the data of another seed are others."""

    def on(record):
        task, encoder = record.options["task"], record.encoder_sha256
        return task, encoder, record.data_sha256, record.dev_examples

    found, wanted = defaultdict(list), [on(read_finished(run)) for run in runs]
    for directory in baselines:
        record = read_finished(directory)
        score = read_json(directory / "metrics.json").get("accuracy")
        if record.stage == "adapter" and on(record) in wanted and score is not None:
            found[on(record)].append(score)
        else:
            problem = "is not a single adapter with the task, encoder and data of a fusion"
            print(f"note: --baseline {directory} {problem}")
    return [mean(found[run]) if run in found else None for run in wanted]


def strengths_table(targets, columns, values):
    """(rows, header): the strongest adapter of each target and its weight; that of the target's own
    adapter; an even weight, which is what each would have if none were preferred; in how many
    layers the own one is the strongest; accuracies in %. targets: [(label, task, accuracy of the
    fusion, of the single adapter)]; values: of `arrange`"""
    rows = []
    for (label, task, fusion, single), weights in zip(targets, values.unbind(1), strict=True):
        weights = weights[~weights.isnan().all(1)]  # [slots, adapters]
        present, weights = ~weights.isnan(), weights.nan_to_num()
        means, even = weights.mean(0), (1 / present.sum(1)).mean().item()
        best, own, own_first = means.argmax().item(), None, None
        if task in columns and present[:, n := columns.index(task)].any():
            own = means[n].item()
            own_first = f"{(weights.argmax(1) == n).sum().item()} of {len(weights)}"
        accuracies = [None if value is None else 100 * value for value in (fusion, single)]
        gain = None if None in accuracies else f"{accuracies[0] - accuracies[1]:+.2f}"
        strengths = [columns[best], means[best].item(), own, even, own_first]
        rows.append([label, *strengths, *accuracies, gain])
    header = "target,strongest,its weight,own weight,even,own first,fusion,single,gain"
    return rows, header.split(",")


def entropy_table(targets, slots, values):
    """(rows, header): `normalized_entropy` of every layer's weights, over all tokens and at [CLS].
    values: {tokens: those of `arrange`}"""
    rows = []
    for y, (label, *_) in enumerate(targets):
        for tokens, title in SHOWN.items():
            of_layers = values[tokens][:, y]
            entropies = (None if s.isnan().all() else normalized_entropy(s) for s in of_layers)
            rows.append([label, title, *entropies])
    titles = [title.removeprefix("layer ") for title in slot_names(slots)]
    return rows, ["entropy", "tokens", *titles]


def arrange(found):
    """(slots, columns, {tokens: values [slots, targets, columns]}) of what `mean_weights` returns
    of each target: NaN where an adapter is not in a layer of the target. The targets' own adapters
    come first and in the order of the rows, so they lie on the diagonal."""
    available = [name for names, _, _ in found for name in names]
    own = [task for _, _, task in found if task in available]
    columns = list(dict.fromkeys([*own, *available]))
    slots = sorted({slot for _, weights, _ in found for slot in weights["all"]})
    shape, values = (len(slots), len(found), len(columns)), {}
    for tokens in found[0][1]:
        values[tokens] = torch.full(shape, torch.nan, dtype=torch.float64)
        for y, (names, weights, _) in enumerate(found):
            for slot, s in weights[tokens].items():
                values[tokens][slots.index(slot), y, [columns.index(name) for name in names]] = s
    return slots, columns, values


def main(argv=None):
    options = parse(Options, argv, "python -m experiments.fusion_weights", __doc__)
    runs, out = options.runs, options.out
    if out.exists() and not (options.overwrite and out.is_dir()):
        raise ValueError(f"{out} is already there: choose another --out, or --overwrite")
    device, _ = choose_device(options.device, "float32")
    singles, found = single_accuracies(runs, options.baseline), []
    given = options.data_dir, options.model, device
    for run in runs:
        print(f"{run}: fusion weights on its development set", flush=True)
        found.append(mean_weights(run, *given))
    slots, columns, values = arrange(found)
    tasks, targets = [task for _, _, task in found], []
    for run, task, single in zip(runs, tasks, singles, strict=True):
        label = task if tasks.count(task) == 1 else f"{task} ({run.resolve().name})"
        targets.append((label, task, read_json(run / "metrics.json").get("accuracy"), single))

    out.mkdir(parents=True, exist_ok=True)
    draw(values, slots, [label for label, *_ in targets], columns, out)
    rows = [
        [runs[y], tasks[y], slots[x][0] + 1, slots[x][1], tokens, *values[tokens][x, y].tolist()]
        for y, x in (~values["all"].isnan().all(2)).T.nonzero().tolist()
        for tokens in SHOWN
    ]
    header = ["run", "target", "layer", "location", "tokens", *columns]
    write_csv(out / "weights.csv", header, rows)
    strengths = strengths_table(targets, columns, values["read"])
    tables = strengths, entropy_table(targets, slots, values)
    text = "\n\n".join("\n".join(table(*one)) for one in tables) + f"\n\n{LEGEND}\n"
    print(text)
    print(write_text(out / "summary.txt", text).parent)


if __name__ == "__main__":
    run_command("fusion_weights.py", main)
