"""experiments/curves.py draws what the logs of runs say."""

import pytest

from conftest import cli, write_rows
from experiments import curves
from formats.files import read_json, write_json


@pytest.fixture
def run(tmp_path):
    """A directory as train.py leaves it after three epochs, of which the second is the best."""
    values, lines = [(0.9, 0.8, 0.5), (0.6, 0.7, 0.75), (0.4, 0.9, 0.75)], []
    for i, (a, b, c) in enumerate(values, 1):
        lines.append({"epoch": i, "loss": a, "dev_loss": b, "dev_f1": c, "dev_accuracy": 0.1})
    write_rows(tmp_path / "rte" / "log.jsonl", lines)
    write_json(tmp_path / "rte" / "config.json", {"stage": "adapter", "score": "f1"})
    return tmp_path / "rte"


def test_the_log_of_a_real_run_is_read(runs):
    score, points, best = curves.read_log(runs / "fusion-rte")
    result = read_json(runs / "fusion-rte" / "metrics.json")
    found = dict(zip(["best_epoch", "loss", "dev_loss", score], points[best], strict=True))
    assert score == "accuracy" and [point[0] for point in points] == [1, 2]
    assert all(result[name] == found[name] for name in ("best_epoch", "dev_loss", "accuracy"))


def test_picture(run, runs, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(curves, "save_figure", lambda figure, path: drawn.append(figure))
    curves.main(cli(f"{run} {runs / 'rte'}", out=tmp_path / "curves.svg"))
    losses, scores = drawn[0].axes
    drawn = [list(line.get_ydata()) for line in (*losses.lines[:2], *scores.lines[:2])]
    assert drawn == [[0.9, 0.6, 0.4], [0.8, 0.7, 0.9], [0.5, 0.75, 0.75], [0.75]]
    assert losses.get_ylim()[0] > 0  # fitted to the data
    labels = [text.get_text() for text in scores.get_legend().get_texts()]
    assert labels == [f"{run}: f1", f"{runs / 'rte'}: accuracy"]
