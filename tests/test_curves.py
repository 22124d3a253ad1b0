"""experiments.curves draws what the logs of runs say."""

from conftest import cli, read_lines, write_rows
from experiments import curves
from formats.files import read_json, write_json


def test_picture(runs, tmp_path, monkeypatch):
    """Of a run whose best epoch by F1 is the second; its accuracy is not drawn."""
    figures, run = [], tmp_path / "rte"
    dev = [(0.8, 0.5, 0.9), (0.7, 0.75, 0.1), (0.9, 0.75, 0.1)]
    rows = [
        {"epoch": i, "loss": 1 / i, "dev_loss": loss, "dev_f1": f1, "dev_accuracy": accuracy}
        for i, (loss, f1, accuracy) in enumerate(dev, 1)
    ]
    write_rows(run / "log.jsonl", rows)
    write_json(run / "config.json", read_json(runs / "rte" / "config.json") | {"score": "f1"})
    monkeypatch.setattr(curves, "save_figure", lambda figure, path: figures.append(figure))
    curves.main(cli(f"{run} {runs / 'rte'}", out=tmp_path / "curves.svg"))
    figures[0].draw_without_rendering()
    top = figures[0].legends[0].get_window_extent().y1
    assert all(top <= axes.get_tightbbox().y0 for axes in figures[0].axes)  # covers nothing
    losses, scores = ([[*line.get_ydata()] for line in axes.lines] for axes in figures[0].axes)
    real = read_lines(runs / "rte" / "log.jsonl")
    assert losses == [[row[n] for row in log] for log in (rows, real) for n in ("loss", "dev_loss")]
    accuracies = [row["dev_accuracy"] for row in real]
    assert scores == [[0.5, 0.75, 0.75], [0.75], accuracies, [max(accuracies)]]
