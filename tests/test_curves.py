"""experiments/curves.py draws and prints what the logs of runs say."""

import json

import pytest

from conftest import cli
from experiments import curves


@pytest.fixture
def run(tmp_path):
    """A directory as train.py leaves it after three epochs, of which the second is the best."""
    directory = tmp_path / "rte"
    directory.mkdir()
    (directory / "config.json").write_text('{"stage": "adapter", "score": "f1"}')
    values = [(0.9, 0.8, 0.5), (0.6, 0.7, 0.75), (0.4, 0.9, 0.75)]
    lines = [
        json.dumps({"epoch": i, "loss": a, "dev_loss": b, "dev_f1": c, "dev_accuracy": 0.1})
        for i, (a, b, c) in enumerate(values, 1)
    ]
    (directory / "log.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def test_the_log_of_a_real_run_is_read(runs):
    score, points = curves.read_log(runs / "fusion-rte")
    result = json.loads((runs / "fusion-rte" / "metrics.json").read_text())
    epoch, _, dev_loss, accuracy = points[curves.best(points)]
    assert score == "accuracy" and [point[0] for point in points] == [1, 2]
    assert [epoch, accuracy, dev_loss] == [
        result[name] for name in ("best_epoch", "accuracy", "dev_loss")
    ]


def test_table_and_picture(run, runs, tmp_path, capsys, monkeypatch):
    drawn = []
    monkeypatch.setattr(curves, "save_figure", lambda figure, path: drawn.append(figure))
    curves.main(cli(f"{run} {runs / 'rte'}", out=tmp_path / "curves.svg"))
    lines = [line.split()[1:] for line in capsys.readouterr().out.splitlines()[1:4]]
    assert lines[0] == ["1", "0.9000", "0.8000", "0.5000"]
    assert [line[4:] for line in lines] == [[], ["best"], []]
    losses, *scores = drawn[0].axes
    assert [list(line.get_ydata()) for line in losses.lines[:2]] == [
        [0.9, 0.6, 0.4],
        [0.8, 0.7, 0.9],
    ]
    assert losses.get_ylim()[0] > 0  # fitted to the data
    assert [axes.get_ylabel() for axes in scores] == ["f1", "accuracy"]  # no scale for both
    best = scores[0].lines[1]
    assert ([*best.get_xdata()], [*best.get_ydata()]) == ([2], [0.75])
    assert "best epoch" in scores[0].get_legend().get_texts()[1].get_text()


@pytest.mark.parametrize(
    "file, content, message",
    [
        ("log.jsonl", "", "log.jsonl is empty"),
        ("log.jsonl", "{", "log.jsonl, line 1"),
        ("config.json", "{", "config.json: not JSON"),
    ],
)
def test_a_directory_that_is_no_run(run, tmp_path, refused, file, content, message):
    (run / file).write_text(content)
    words = cli(str(run), out=tmp_path / "curves.png")
    refused(words, message, name="curves.py", main=curves.main)
    assert not (tmp_path / "curves.png").exists()
