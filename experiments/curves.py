"""How did training go? Losses and scores of any number of runs, epoch by epoch.

    python -m experiments.curves runs/rte runs/fusion-rte [--out curves.png]

Every RUN is a directory that `train.py` writes, finished or not. The picture shows each run's
training and development loss, and the score on the development set that chooses its best epoch.
"""

from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from experiments.report import save_figure, subplots
from formats.rows import read_rows
from runtime.command import run_command
from runtime.record import read_record
from runtime.settings import argument, option, parse

MARKERS = "osv^D<>P"  # curves can be told apart without colours


@dataclass(frozen=True)
class Options:
    runs: tuple[Path, ...] = argument("finished or not", metavar="RUN")
    out: Path = option(Path("curves.png"), "the picture: .png, .svg or .pdf")


def read_log(run):
    """(name of the score, [(epoch, training loss, dev loss, score)], index of the best) of a run"""
    score = read_record(run).options["score"]
    names = "epoch", "loss", "dev_loss", f"dev_{score}"
    points = [[row[name] for name in names] for _, row in read_rows(run / "log.jsonl")]
    scores = [value for *_, value in points]
    return score, points, scores.index(max(scores))  # the first of equal ones, as in training


def draw(logs, path):
    """logs: {run: what `read_log` returns}"""
    figure, (left, right) = subplots(1, 2, (9.2, 3.6 + 0.2 * len(logs)))
    for (run, (score, points, best)), marker in zip(logs.items(), cycle(MARKERS), strict=False):
        epochs, losses, dev_losses, values = zip(*points, strict=True)
        (line,) = left.plot(epochs, losses, f"{marker}-", markersize=4)
        style = {"color": line.get_color(), "marker": marker, "markersize": 4}
        left.plot(epochs, dev_losses, "--", fillstyle="none", **style)
        right.plot(epochs, values, "-", label=f"{run} ({score})", **style)
        right.plot(epochs[best], values[best], **style | {"markersize": 10})
    left.set(title="Loss (dashed: development set)", ylabel="mean loss of an example")
    right.set(title="Score on the development set", ylabel="score (large: best epoch)")
    for axes in (left, right):
        axes.set(xlabel="epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    figure.legend(fontsize=7, loc="outside lower center")  # of both: each run has one style
    save_figure(figure, path)


def main(argv=None):
    options = parse(Options, argv, "python -m experiments.curves", __doc__)
    draw({run: read_log(run) for run in options.runs}, options.out)
    print(options.out)


if __name__ == "__main__":
    run_command("curves.py", main)
