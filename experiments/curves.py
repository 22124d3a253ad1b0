"""How did training go? Losses and scores of any number of runs, epoch by epoch.

    python -m experiments.curves runs/rte runs/fusion-rte [--out curves.png]

Every RUN is a directory that `train.py` writes, finished or not. The picture shows each run's
training and development loss, and the score on the development set that chooses its best epoch.
The same is printed as a table.
"""

if __name__ == "__main__":
    from runtime.command import announce

    announce("curves.py")

from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from experiments.report import save_figure, subplots, table
from formats.files import read_json
from formats.rows import read_rows
from runtime.command import run_command
from runtime.settings import argument, option, parse

MARKERS = "osv^D<>P"  # curves can be told apart without colours


@dataclass(frozen=True)
class Options:
    runs: tuple[Path, ...] = argument("finished or not", metavar="RUN")
    out: Path = option(Path("curves.png"), "the picture: .png, .svg or .pdf")


def read_log(run):
    """(name of the score, [(epoch, training loss, dev loss, score)]) of a run."""
    score = read_json(run / "config.json").get("score") or "accuracy"
    names = "epoch", "loss", "dev_loss", f"dev_{score}"
    return score, [[row[name] for name in names] for _, row in read_rows(run / "log.jsonl")]


def best(points):
    """The index of the best epoch: the first with the highest score, as in training."""
    scores = [score for *_, score in points]
    return scores.index(max(scores))


def draw(logs, path):
    """logs: {run: what `read_log` returns}. A score has a panel of its own."""
    scores = list(dict.fromkeys(score for score, _ in logs.values()))
    figure, (left, *others) = subplots(1, 1 + len(scores), (4.6 * (1 + len(scores)), 4))
    for (run, (score, points)), marker in zip(logs.items(), cycle(MARKERS), strict=False):
        epochs, losses, dev_losses, values = zip(*points, strict=True)
        (line,) = left.plot(epochs, losses, f"{marker}-", markersize=4, label=f"{run}: training")
        colour, i = line.get_color(), best(points)
        style = {"color": colour, "markersize": 4, "label": f"{run}: development"}
        left.plot(epochs, dev_losses, f"{marker}--", fillstyle="none", **style)
        right = others[scores.index(score)]
        right.plot(epochs, values, f"{marker}-", color=colour, markersize=4, label=str(run))
        label = f"best epoch of {run}, the one that is kept"
        right.plot(epochs[i], values[i], marker, color=colour, markersize=10, label=label)
    left.set(title="Loss", ylabel="mean loss of an example")
    for score, right in zip(scores, others, strict=True):
        right.set(title="Score on the development set", ylabel=score)
    for axes in (left, *others):
        axes.set(xlabel="epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    save_figure(figure, path)


def main(argv=None):
    options = parse(Options, argv, "python -m experiments.curves", __doc__)
    if options.out.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--out {options.out} is not a .png, .svg or .pdf file")
    logs = {run: read_log(run) for run in options.runs}
    draw(logs, options.out)
    rows = [
        [str(run), epoch, *(f"{value:.4f}" for value in values), "best" * (i == best(points))]
        for run, (_, points) in logs.items()
        for i, (epoch, *values) in enumerate(points)
    ]
    print(*table(rows, ["run", "epoch", "loss", "dev loss", "score", ""]), sep="\n")
    print(f"\n{options.out}")


if __name__ == "__main__":
    run_command("curves.py", main)
