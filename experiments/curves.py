"""How did training go? Loss and accuracy of any number of runs, epoch by epoch.

    python -m experiments.curves runs/rte runs/fusion-rte [--out curves.png]

Every RUN is a directory that `train.py` writes, finished or not. The picture has the mean training
loss of each epoch on the left, and on the right the score on the development set that chooses the
best epoch, which is the larger dot. The same is printed as a table, the best epoch with a star.
"""

if __name__ == "__main__":
    from runtime.command import announce

    announce("curves.py")

import argparse
import json
import math
from itertools import cycle
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from formats.files import read_json  # noqa: E402
from runtime.command import errors_in_one_line  # noqa: E402
from runtime.options import Parser  # noqa: E402

MARKERS = "osv^D<>P"  # curves can be told apart without colours


def read_log(run):
    """(name of the score, [(epoch, loss, score)]) of a run. Raises FileNotFoundError or ValueError
    for a directory that has no log of an epoch."""
    path = run / "log.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{run} is not a run: it has no log.jsonl")
    score = read_json(run / "config.json").get("score") or "accuracy"
    points = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            values = json.loads(line)
            point = values["epoch"], values["loss"], values[f"dev_{score}"]
            if not all(type(value) in (int, float) and math.isfinite(value) for value in point):
                raise ValueError("not a number")
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            raise ValueError(
                f"{path}, line {number}: not an epoch with epoch, loss and dev_{score}"
            ) from e
        points.append(point)
    if not points:
        raise ValueError(f"{run} has not finished an epoch yet")
    return score, points


def best(points):
    """The index of the best epoch: the first with the highest score, as in training."""
    scores = [score for _, _, score in points]
    return scores.index(max(scores))


def draw(logs, path):
    """logs: {run: (name of the score, points)}"""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for (run, (_, points)), marker in zip(logs.items(), cycle(MARKERS), strict=False):
        epochs, losses, scores = zip(*points, strict=True)
        left.plot(epochs, losses, f"{marker}-", markersize=4, label=str(run))
        (line,) = right.plot(epochs, scores, f"{marker}-", markersize=4)
        i = best(points)
        right.plot(epochs[i], scores[i], marker, markersize=10, color=line.get_color())
    names = " / ".join(dict.fromkeys(score for score, _ in logs.values()))
    left.set(xlabel="epoch", ylabel="training loss", ylim=(0, None))
    right.set(xlabel="epoch", ylabel=f"{names}, development set")
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=min(len(logs), 3))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def table(logs):
    """Lines of text."""
    width = max(len("run"), *(len(str(run)) for run in logs))
    lines = [f"{'run':{width}}  epoch      loss     score"]
    for run, (_, points) in logs.items():
        for i, (epoch, loss, score) in enumerate(points):
            star = " *" if i == best(points) else ""
            lines.append(f"{str(run):{width}}  {epoch:5}  {loss:8.4f}  {score:8.4f}{star}")
    return lines


def arguments(argv=None):
    parser = Parser(
        prog="python -m experiments.curves",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="finished or not")
    parser.add_argument("--out", type=Path, default=Path("curves.png"), help="the picture")
    return parser.parse_args(argv)


def main(argv=None):
    with errors_in_one_line("curves.py"):
        args = arguments(argv)
        if args.out.suffix not in (".png", ".svg", ".pdf") or not args.out.parent.is_dir():
            raise ValueError(
                f"--out {args.out} is not a .png, .svg or .pdf file in a directory that exists"
            )
        logs = {run: read_log(run) for run in args.runs}
        draw(logs, args.out)
    print("\n".join(table(logs)))
    print(f"\n{args.out}")


if __name__ == "__main__":
    main()
