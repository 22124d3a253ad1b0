"""experiments/curves.py draws and prints what the logs of runs say."""

import json

import pytest

from experiments import curves


@pytest.fixture
def run(tmp_path):
    """A directory as train.py leaves it after three epochs, of which the second is the best."""
    directory = tmp_path / "rte"
    directory.mkdir()
    (directory / "config.json").write_text('{"stage": "adapter", "score": "accuracy"}')
    scores = [(0.9, 0.5), (0.6, 0.75), (0.4, 0.75)]
    lines = [
        json.dumps({"epoch": i, "loss": loss, "dev_accuracy": accuracy, "seconds": 1.0})
        for i, (loss, accuracy) in enumerate(scores, 1)
    ]
    (directory / "log.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def test_the_log_of_a_real_run_is_read(runs):
    for name in ("rte", "fusion-rte"):
        score, points = curves.read_log(runs / name)
        result = json.loads((runs / name / "metrics.json").read_text())
        assert score == "accuracy" and [epoch for epoch, _, _ in points] == [1, 2]
        assert points[curves.best(points)][0] == result["best_epoch"]
        assert points[curves.best(points)][2] == result["accuracy"]


def test_table_and_picture(run, tmp_path, capsys):
    picture = tmp_path / "curves.png"
    curves.main([str(run), "--out", str(picture)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1:] for line in lines[1:4]] == [
        ["1", "0.9000", "0.5000"],
        ["2", "0.6000", "0.7500", "*"],
        ["3", "0.4000", "0.7500"],
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_is_drawn(run, tmp_path, monkeypatch):
    drawn = []
    plot = curves.plt.Axes.plot
    monkeypatch.setattr(
        curves.plt.Axes, "plot", lambda self, *a, **k: drawn.append(a[:2]) or plot(self, *a, **k)
    )
    curves.draw({run: curves.read_log(run)}, tmp_path / "curves.svg")
    epochs = (1, 2, 3)
    assert drawn == [(epochs, (0.9, 0.6, 0.4)), (epochs, (0.5, 0.75, 0.75)), (2, 0.75)]


def test_another_score_is_drawn(run):
    (run / "config.json").write_text('{"score": "f1"}')
    (run / "log.jsonl").write_text(
        '{"epoch": 1, "loss": 0.5, "dev_accuracy": 0.9, "dev_f1": 0.2}\n'
    )
    assert curves.read_log(run) == ("f1", [(1, 0.5, 0.2)])


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda run: (run / "log.jsonl").unlink(), "is not a run: it has no log.jsonl"),
        (lambda run: (run / "log.jsonl").write_text(""), "has not finished an epoch yet"),
        (lambda run: (run / "log.jsonl").write_text("{}\n"), "log.jsonl, line 1: not an epoch"),
        (lambda run: (run / "log.jsonl").write_text("[1]\n"), "log.jsonl, line 1: not an epoch"),
        (
            lambda run: (run / "log.jsonl").write_text(
                '{"epoch": 1, "loss": NaN, "dev_accuracy": 1}\n'
            ),
            "log.jsonl, line 1: not an epoch",
        ),
        (lambda run: (run / "config.json").write_text("{"), "config.json, line 1: not JSON"),
    ],
)
def test_a_directory_that_is_no_run(run, tmp_path, capsys, spoil, message):
    spoil(run)
    with pytest.raises(SystemExit) as exit:
        curves.main([str(run), "--out", str(tmp_path / "curves.png")])
    err = capsys.readouterr().err
    assert exit.value.code == 2 and message in err and err.count("\n") == 1
    assert not (tmp_path / "curves.png").exists()


@pytest.mark.parametrize("out", ["curves.txt", "nowhere/curves.png"])
def test_a_picture_that_cannot_be_written(run, tmp_path, capsys, out):
    with pytest.raises(SystemExit) as exit:
        curves.main([str(run), "--out", str(tmp_path / out)])
    assert exit.value.code == 2 and "--out" in capsys.readouterr().err
