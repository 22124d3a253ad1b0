"""experiments/figure4.py: the weights are the reference library's, averaged over real tokens; the
picture is legible; the words follow from the numbers."""

import csv
import json
import shutil
from unittest.mock import Mock

import matplotlib.pyplot as plt
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from data import get_task, load_split
from experiments import figure4
from experiments.load_run import load_run
from formats.tokenizer import load_tokenizer
from fusion import fusion_weights
from reference import FUSIONS, GOLDEN, TOLERANCE, with_fusion

INPUTS = ("input_ids", "token_type_ids", "attention_mask")


@pytest.fixture(scope="module")
def fusions(runs, launch, tmp_path_factory):
    """Three fusion runs: rte over three adapters, sst2 over two of them, rte over one at both
    locations of a layer."""
    out = tmp_path_factory.mktemp("figure4")
    options = ["--epochs", 1, "--lr", "5e-3"]
    launch(
        "--stage",
        "adapter",
        "--task",
        "rte",
        "--adapter",
        "houlsby",
        "--out",
        out / "houlsby",
        *options,
    )
    launch(
        "--stage",
        "fusion",
        "--task",
        "sst2",
        "--adapters",
        runs / "rte",
        runs / "sst2",
        "--out",
        out / "sst2",
        *options,
    )
    launch(
        "--stage",
        "fusion",
        "--task",
        "rte",
        "--adapters",
        out / "houlsby",
        "--out",
        out / "both",
        *options,
    )
    return [runs / "fusion-rte", out / "sst2", out / "both"]


def read_csv(directory):
    with open(directory / "weights.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("directory", FUSIONS)
def test_the_mean_is_the_reference_librarys_over_real_tokens(directory):
    model, name = directory.split("/")
    bert, expected = with_fusion(directory), load_file(GOLDEN / model / "expected.safetensors")
    inputs = [expected[key] for key in INPUTS]
    real = expected["attention_mask"].bool()
    assert not real.all()
    longer = [
        torch.nn.functional.pad(tensor, (0, 3), value=pad)
        for tensor, pad in zip(inputs, (bert.config.pad_token_id, 0, 0), strict=True)
    ]
    rows = [[tensor[i : i + 1, : real[i].sum()] for tensor in inputs] for i in range(len(real))]
    for batches in ([inputs], [longer], rows):
        weights = figure4.average(bert, batches)
        assert len(weights) == sum(key.startswith(f"{name}.attention.") for key in expected)
        for (layer, location), s in weights.items():
            location = {"attention": "mh_adapter", "output": "output_adapter"}[location]
            reference = expected[f"{name}.attention.{layer}.{location}"][real].mean(0)
            assert (s - reference).abs().max() <= TOLERANCE


def test_files(fusions, encoder, data_dir, tmp_path, capsys):
    figure4.main([*map(str, fusions), "--out", str(tmp_path / "out"), "--device", "cpu"])
    printed = capsys.readouterr().out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "figure4.png",
        "figure6.png",
        "weights.csv",
        "summary.txt",
    }
    assert (tmp_path / "out" / "summary.txt").read_text() in printed

    rows = read_csv(tmp_path / "out")
    adapters = list(rows[0])[4:]
    assert adapters == ["rte", "sst2", "pick"]  # the targets' own first, in the order of the rows
    assert [(row["target"], row["layer"], row["location"]) for row in rows] == [
        ("rte", "1", "output"),
        ("rte", "2", "output"),
        ("sst2", "1", "output"),
        ("sst2", "2", "output"),
        ("rte", "1", "attention"),
        ("rte", "1", "output"),
        ("rte", "2", "attention"),
        ("rte", "2", "output"),
    ]
    for row in rows:
        filled = {name: float(row[name]) for name in adapters if row[name]}
        assert sum(filled.values()) == pytest.approx(1, abs=1e-6)
        assert (
            list(filled)
            == {0: adapters, 1: ["rte", "sst2"], 2: ["rte"]}[
                [str(run) for run in fusions].index(row["run"])
            ]
        )

    # the same, from every development example on its own
    bert, _, config = load_run(fusions[0])
    split = load_split(get_task("rte"), "validation", load_tokenizer(encoder, 48), data_dir)
    seen = []
    with torch.no_grad():
        for row in split:
            bert(torch.tensor(row["input_ids"]), torch.tensor(row["token_type_ids"]))
            seen.append(fusion_weights(bert)[1, "output"][0])
    expected = torch.cat(seen).mean(0)
    for name, value in zip(config["adapters"], expected.tolist(), strict=True):
        assert float(rows[1][name]) == pytest.approx(value, abs=1e-5)

    assert (
        printed.count("rte (fusion-rte):") == 1
        and printed.count("rte (both):") == 1
        and printed.count("\nsst2:") == 1
    )
    single, fused = (
        json.loads((run / "metrics.json").read_text())["accuracy"]
        for run in (fusions[0].parent / "rte", fusions[0])
    )
    assert (
        f"fusion {100 * fused:.1f} %, single adapter {100 * single:.1f} %" in printed
    )  # found beside the fusion's run
    for name in ("figure4.png", "figure6.png"):
        with Image.open(tmp_path / "out" / name) as image:
            assert min(image.size) > 200


def test_multiple_choice_counts_every_candidate(runs, launch, encoder, data_dir, tmp_path):
    adapters = ["--adapters", runs / "rte", runs / "pick"]
    launch(
        "--stage", "fusion", "--task", "pick", *adapters, "--epochs", 1, "--out", tmp_path / "run"
    )
    _, weights, _ = figure4.mean_weights(tmp_path / "run")
    bert, _, _ = load_run(tmp_path / "run")
    seen = []
    with torch.no_grad():
        for row in load_split(
            get_task("pick", data_dir), "validation", load_tokenizer(encoder, 48), data_dir
        ):
            for ids, types in zip(row["input_ids"], row["token_type_ids"], strict=True):
                bert(torch.tensor([ids]), torch.tensor([types]))
                seen.append(fusion_weights(bert)[0, "output"][0])
    assert len(seen) == 3 * 40
    assert torch.allclose(weights[0, "output"], torch.cat(seen).mean(0).double(), atol=1e-5)


def test_only_the_papers_layers_are_in_figure_4():
    assert figure4.figure_4_layers(12) == {0, 6, 8, 11}
    for count in (1, 2, 3, 6, 24):
        assert {0, count - 1} <= figure4.figure_4_layers(count) <= set(range(count))


def test_the_picture_is_legible(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(figure4.plt, "close", kept.append)
    names = ["rte", "a long name that would not end before the page does", "$x_$y^", "mnli"]
    shapes = [(1, 1, 1), (5, 2, 3), (4, 4, 16)]
    for panels, M, N in shapes:
        values = torch.rand(panels, M, N, dtype=torch.float64)
        values[0, 0, 0] = torch.nan
        columns = (names * 4)[:N]
        figure4.heatmaps(
            values,
            [f"layer {i}" for i in range(panels)],
            names[:M],
            columns,
            0.8,
            tmp_path / "a.png",
        )
    for figure, (panels, _, N) in zip(kept, shapes, strict=True):
        figure.canvas.draw()
        inside = figure.bbox
        texts = [
            text
            for text in figure.findobj(plt.Text)
            if text.get_text().strip() and text.get_visible()
        ]
        drawn = [
            text.get_window_extent()
            for text in texts
            if text.axes is None or text.axes.get_visible()
        ]
        assert len(drawn) > N
        for box in drawn:  # no label is cut
            assert (
                inside.x0 <= box.x0
                and box.x1 <= inside.x1
                and inside.y0 <= box.y0
                and box.y1 <= inside.y1
            )
        images = [panel.images[0] for panel in figure.axes if panel.images]
        assert len(images) == panels and {image.get_clim() for image in images} == {
            (0, 0.8)
        }  # one scale
        assert images[0].get_array().mask[0, 0] == 1  # blank
        bottom = [
            [label.get_text() for label in panel.get_xticklabels()]
            for panel in figure.axes
            if panel.images
        ][-1]
        assert len(bottom) == N and "rte" in bottom
    monkeypatch.undo()
    for figure in kept:
        plt.close(figure)

    steps = torch.tensor(plt.colormaps[figure4.COLOURS](range(256)))[:, :3]
    linear = torch.where(steps <= 0.04045, steps / 12.92, ((steps + 0.055) / 1.055) ** 2.4)
    luminance = linear @ torch.tensor([0.2126, 0.7152, 0.0722], dtype=torch.float64)
    assert (luminance.diff() > 0).all()  # in grey, too, more is lighter


def test_spread():
    assert figure4.spread(torch.tensor([0.0, 1.0, 0.0])) == 0
    assert figure4.spread(torch.full((5,), 0.2)) == pytest.approx(1)
    assert figure4.spread(torch.tensor([1.0])) == 0
    assert figure4.spread(torch.tensor([0.5, 0.5, 0.0, 0.0])) == pytest.approx(0.5)


def target(name, own, accuracy, baseline, last=0.5):
    """A target with two adapters, its own and another one, in two layers; the weights of its own
    are given."""
    weights = {
        (0, "output"): torch.tensor([own, 1 - own]),
        (1, "output"): torch.tensor([last, 1 - last]),
    }
    return name, [name, "other"], weights, name, {"accuracy": accuracy}, baseline


def test_the_papers_observations_are_checked():
    gains, loses = target("cb", 0.1, 0.8, 0.7), target("mnli", 0.9, 0.8, 0.8)
    text = figure4.own_adapters([gains, loses])
    assert ": yes; " in text and "1 with a gain" in text and "1 without a gain" in text
    assert ": no; " in figure4.own_adapters(
        [target("cb", 0.9, 0.8, 0.7), target("mnli", 0.1, 0.8, 0.8)]
    )
    assert "nothing to compare" in figure4.own_adapters([gains, gains])
    assert "--baseline" in figure4.own_adapters([target("cb", 0.1, 0.8, None)])
    assert "in 1 of 2 targets" in figure4.last_layer([gains, target("x", 0.4, 0.8, None, last=0.1)])
    lines = "\n".join(figure4.describe(*target("cb", 0.1, 0.75, 0.7, last=0.8)))
    assert (
        "other 0.550, cb 0.450" in lines
        and "strongest in: layer 2;" in lines
        and "+5.0 points" in lines
    )
    assert "no layer" in "\n".join(figure4.describe(*target("cb", 0.1, 0.75, 0.7, last=0.4)))


def test_baselines_are_averaged(runs, tmp_path):
    shutil.copytree(runs / "rte", tmp_path / "seed-1")
    metrics = json.loads((runs / "rte" / "metrics.json").read_text())
    (tmp_path / "seed-1" / "metrics.json").write_text(
        json.dumps({**metrics, "accuracy": metrics["accuracy"] + 0.1})
    )
    found = figure4.find_baselines([runs / "fusion-rte"], [runs / "rte", tmp_path / "seed-1"])
    assert found == {"rte": pytest.approx(metrics["accuracy"] + 0.05)}


def test_an_interrupt_is_one_line(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(figure4, "average", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit) as exit:
        figure4.main([str(runs / "fusion-rte"), "--out", str(tmp_path / "out"), "--device", "cpu"])
    assert exit.value.code == 130 and capsys.readouterr().err == "figure4.py: interrupted\n"
    assert not (tmp_path / "out").exists()


def test_errors(runs, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    fusion = runs / "fusion-rte"
    (tmp_path / "data").mkdir()
    for arguments, say in (
        ([runs / "rte"], "is of --stage adapter"),
        ([fusion, runs / "rte"], "is of --stage adapter"),
        ([tmp_path / "nowhere"], "no finished run"),
        ([fusion, "--data-dir", tmp_path / "data"], "no data for task 'rte'"),
        ([fusion, "--baseline", fusion], "is of --stage fusion"),
        ([fusion, "--baseline", tmp_path / "nowhere"], "nowhere"),
        ([fusion, "--out", tmp_path / "file"], "is a file"),
        ([], "RUN"),
        ([fusion, "--layer", "3"], "--layer"),
    ):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(SystemExit) as exit:
            figure4.main(
                [
                    *map(
                        str,
                        ["--out", tmp_path / "out", *arguments][
                            0 if "--out" not in arguments else 2 :
                        ],
                    )
                ]
            )
        error = capsys.readouterr().err
        assert (
            exit.value.code == 2 and error.startswith("figure4.py: ") and error.count("\n") == 1
        ), error
        assert say in error
        assert sorted(tmp_path.rglob("*")) == before


def test_a_baseline_with_something_else_is_refused(runs, tmp_path):
    """By name, where it is given; passed over, where it only lies beside the fusion."""
    config = json.loads((runs / "rte" / "config.json").read_text())
    changes = {
        "model": ("/elsewhere/encoder", "encoder.*/elsewhere/encoder"),
        "dev_examples": (39, "development examples.*39, not 40"),
        "data_sha256": ("0" * 64, "data"),
    }
    for name, (value, say) in changes.items():
        run = shutil.copytree(runs / "rte", tmp_path / name / "rte")
        (run / "config.json").write_text(json.dumps({**config, name: value}))
        with pytest.raises(ValueError, match=f"--baseline {run} has other {say}"):
            figure4.find_baselines([runs / "fusion-rte"], [run])
        beside = shutil.copytree(runs / "fusion-rte", tmp_path / name / "fusion-rte")
        assert figure4.find_baselines([beside], []) == {}
    assert "rte" in figure4.find_baselines([runs / "fusion-rte"], [])


def test_own_weights_are_relative_to_an_even_mixture(capsys):
    """Of two adapters 0.1 is 0.2 of an even weight. Fusions of 2 and 3 adapters, or over two
    encoders, do not come into one sentence."""
    gains, loses = target("cb", 0.1, 0.8, 0.7), target("mnli", 0.9, 0.8, 0.8, last=0.9)
    text = figure4.own_adapters([gains, loses])
    assert "its mean weight 0.600 of an even one" in text and "1.800 of an even one" in text
    assert "0.60 of an even one (1/2)" in "\n".join(figure4.describe(*gains))
    label, names, weights, task, metrics, baseline = loses
    three = {
        slot: torch.cat([weight * 0.5, torch.tensor([0.5])]) for slot, weight in weights.items()
    }
    wider = (label, [*names, "third"], three, task, metrics, baseline)
    other = (label, names, weights, task, {**metrics, "model": "another"}, baseline)
    for different in (wider, other):
        assert ": not compared, " in figure4.own_adapters([gains, different])
