"""experiments/figure4.py: the weights are the reference library's, averaged over real tokens; the
picture is legible; the words follow from the numbers."""

import csv
import math
import re
import shutil

import matplotlib.pyplot as plt
import pytest
import torch
from safetensors.torch import load_file

from conftest import cli
from data import get_task, load_split
from experiments import figure4
from experiments.load_run import load_run
from experiments.report import subplots
from formats.files import read_json, write_json
from formats.tokenizer import load_tokenizer
from fusion import fusion_weights
from reference import FP32_TOLERANCE, FUSIONS, GOLDEN, with_fusion

INPUTS = ("input_ids", "token_type_ids", "attention_mask")


@pytest.fixture(scope="module")
def fused(runs, launch, tmp_path_factory):
    """Three fusion runs: rte over three adapters; sst2 over two, of which one is not in layer 2;
    rte over one at both locations of a layer."""
    out = tmp_path_factory.mktemp("figure4")
    adapter, fusion = "--stage adapter --task rte --epochs 1", "--stage fusion --epochs 1 --lr 5e-3"
    launch(f"{adapter} --adapter houlsby", out=out / "houlsby")
    launch(f"{adapter} --adapter-config leave_out=[1]", out=out / "low" / "rte")
    two = [out / "low" / "rte", runs / "sst2"]
    launch(f"{fusion} --task sst2", adapters=two, out=out / "sst2")
    launch(f"{fusion} --task rte", adapters=out / "houlsby", out=out / "both")
    return [runs / "fusion-rte", out / "sst2", out / "both"]


@pytest.mark.parametrize("directory", FUSIONS)
def test_the_mean_is_the_reference_librarys_over_real_tokens(directory):
    model, name = directory.split("/")
    bert, expected = with_fusion(directory), load_file(GOLDEN / model / "expected.safetensors")
    inputs = [expected[key] for key in INPUTS]
    real = expected["attention_mask"].bool()
    assert not real.all()
    pads = zip(inputs, (bert.config.pad_token_id, 0, 0), strict=True)
    longer = [torch.nn.functional.pad(tensor, (0, 3), value=pad) for tensor, pad in pads]
    rows = [[tensor[i : i + 1, : real[i].sum()] for tensor in inputs] for i in range(len(real))]
    for batches in ([inputs], [longer], rows):
        weights = figure4.average(bert, batches)
        assert len(weights) == sum(key.startswith(f"{name}.attention.") for key in expected)
        for (layer, location), s in weights.items():
            location = {"attention": "mh_adapter", "output": "output_adapter"}[location]
            reference = expected[f"{name}.attention.{layer}.{location}"][real].mean(0)
            assert (s - reference).abs().max() <= FP32_TOLERANCE


def test_files(fused, tmp_path, capsys):
    figure4.main([*map(str, fused), *cli("--device cpu", out=tmp_path / "out")])
    printed = capsys.readouterr().out
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert set(files) == set(figure4.WRITTEN) and files["summary.txt"].decode() in printed

    with open(tmp_path / "out" / "weights.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    adapters = list(rows[0])[4:]
    assert adapters == ["rte", "sst2", "pick"]  # the targets' own first, in the order of the rows
    filled = {}
    for row in rows:
        weights = {name: float(row[name]) for name in adapters if row[name]}
        assert sum(weights.values()) == pytest.approx(1, abs=1e-6)
        filled[row["run"], row["layer"], row["location"]] = list(weights)
    one, two, both = map(str, fused)
    assert filled == {
        **{(one, layer, "output"): adapters for layer in "12"},
        (two, "1", "output"): ["rte", "sst2"],
        (two, "2", "output"): ["sst2"],  # where there is no other
        **{(both, layer, at): ["rte"] for layer in "12" for at in ("attention", "output")},
    }

    assert all(f"\n{label} " in printed for label in ("rte (fusion-rte)", "rte (both)", "sst2"))
    assert all(f"{run}: fusion weights" in printed for run in fused)  # before each of them
    metrics = read_json(fused[0].parent / "rte" / "metrics.json")  # found beside the fusion's run
    assert re.search(rf"\(fusion-rte\) .* {100 * metrics['accuracy']:.2f} ", printed)


def test_multiple_choice_counts_every_candidate(runs, launch, encoder, data_dir, tmp_path):
    adapters = [runs / "rte", runs / "pick"]
    words = "--stage fusion --task pick --epochs 1"
    launch(words, adapters=adapters, out=tmp_path / "run")
    _, weights, _ = figure4.mean_weights(tmp_path / "run")
    (bert, _, _), task = load_run(tmp_path / "run"), get_task("pick", data_dir)
    seen = []
    with torch.no_grad():
        for row in load_split(task, "validation", load_tokenizer(encoder, 48), data_dir):
            for ids, types in zip(row["input_ids"], row["token_type_ids"], strict=True):
                bert(torch.tensor([ids]), torch.tensor([types]))
                seen.append(fusion_weights(bert)[0, "output"][0])
    assert len(seen) == 3 * 40
    assert torch.allclose(weights[0, "output"], torch.cat(seen).mean(0).double(), atol=1e-5)


def test_only_the_papers_layers_are_in_figure_4():
    assert figure4.figure_4_layers(12) == {0, 6, 8, 11}
    for count in (1, 2, 3, 6, 24):
        assert {0, count - 1} <= figure4.figure_4_layers(count) <= set(range(count))


@pytest.mark.parametrize("panels, M, N", [(1, 1, 1), (5, 2, 3), (4, 4, 16)])
def test_the_picture_is_legible(panels, M, N, tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(figure4, "save_figure", lambda figure, path: kept.append(figure))
    names = ["rte", "a long name that would not end before the page does", "$x_$y^", "mnli"]
    values = torch.rand(panels, M, N, dtype=torch.float64)
    values[-1, -1, -1] = torch.nan
    titles, columns = [f"layer {i}" for i in range(panels)], (names * 4)[:N]
    figure4.heat_maps(values, titles, names[:M], columns, tmp_path / "a.png")
    (figure,) = kept
    figure.savefig(tmp_path / "a.png")
    shown = [axes for axes in figure.axes if axes.get_visible()]
    texts = [text for text in figure.findobj(plt.Text) if text.get_text().strip()]
    boxes = [t.get_window_extent() for t in texts if t.axes is None or t.axes in shown]
    inside = figure.bbox
    assert len(boxes) > N and all(inside.x0 <= b.x0 and b.x1 <= inside.x1 for b in boxes)
    assert all(inside.y0 <= b.y0 and b.y1 <= inside.y1 for b in boxes)  # no label is cut
    drawn = [axes for axes in shown if axes.images]
    assert len(drawn) == panels and len({axes.images[0].get_clim() for axes in drawn}) == 1
    assert drawn[-1].images[0].get_array().mask[-1, -1] == 1  # blank
    for axes in drawn:
        width = axes.get_window_extent().width / N
        assert all(text.get_window_extent().width < width for text in axes.texts)


def luminance(colours):
    """WCAG 2.1's relative luminance of RGB colours [..., 3]."""
    linear = torch.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    return linear @ torch.tensor([0.2126, 0.7152, 0.0722], dtype=torch.float64)


def test_every_number_is_readable_on_its_cell():
    """Text needs a contrast of 4.5 : 1 (WCAG 2.1, AA). In grey, too, more is lighter."""
    steps = luminance(torch.tensor(plt.colormaps[figure4.COLOURS](range(256)))[:, :3])
    assert (steps.diff() > 0).all()
    _, axes = subplots()
    values = torch.linspace(0, 0.8, 50, dtype=torch.float64)[None]
    image = figure4.heat_map(axes, values, [""], [""] * 50, top=0.8)
    for text, value in zip(axes.texts, values[0].tolist(), strict=True):
        assert text.get_text() == f"{value:.2f}"
        behind = luminance(torch.tensor(image.cmap(image.norm(value)))[:3].double()).item()
        front = {"black": 0.0, "white": 1.0}[text.get_color()]
        high, low = max(front, behind), min(front, behind)
        assert (high + 0.05) / (low + 0.05) >= 4.5


def test_spread():
    nan = math.nan
    for weights, entropy in (
        ([0.0, 1.0, 0.0], 0),
        ([0.5, 0.5, 0.0, 0.0], 0.5),
        ([0.5, 0.5, nan, nan], 1),  # all alike, of the adapters that are in the layer
        ([1.0, nan, nan], 0),
    ):
        assert figure4.spread(torch.tensor(weights)) == pytest.approx(entropy)


def test_the_tables_of_section_6():
    """Three targets, two of them without a layer or their own adapter."""
    slots, columns = [(0, "output"), (1, "output")], ["cb", "mnli"]
    nan = math.nan
    of_layers = [[0.1, 0.9], [0.1, 0.9], [nan, nan]], [[0.5, 0.5], [0.2, 0.8], [nan, 1.0]]
    values = torch.tensor(of_layers, dtype=torch.float64)
    targets = [
        figure4.Target("cb", "cb", 0.8, 0.7),
        figure4.Target("mnli", "mnli", 0.8, None),
        figure4.Target("cb (2)", "cb", None, 0.7),
    ]
    rows, _ = figure4.strengths_table(targets, columns, values)
    assert rows == [
        # relative to an even mixture: of two adapters 0.3 is 0.6 of an even weight
        ["cb", "mnli", *map(pytest.approx, (1.4, 0.6)), "1 of 2", 80, 70, "+10.00"],
        ["mnli", "mnli", *map(pytest.approx, (1.7, 1.7)), "2 of 2", 80, None, None],
        ["cb (2)", "mnli", 1, None, None, None, None, None],
    ]
    rows, header = figure4.entropy_table(targets, slots, values)
    assert header == ["entropy", "1", "2"]
    assert rows[0] == ["cb", pytest.approx(0.469, abs=1e-3), pytest.approx(1)]
    assert rows[2] == ["cb (2)", None, 0]


def test_baselines_are_averaged_and_must_be_comparable(runs, tmp_path):
    """A run with something else is refused where it is given, and passed over where it only lies
    beside the fusion."""
    seed, accuracy = shutil.copytree(runs / "rte", tmp_path / "seed-1"), 0.1
    metrics, config = (read_json(runs / "rte" / f"{name}.json") for name in ("metrics", "config"))
    write_json(seed / "metrics.json", metrics | {"accuracy": accuracy})
    fusion = runs / "fusion-rte"
    found = figure4.find_baselines([fusion], [runs / "rte", seed])
    assert found == {"rte": pytest.approx((metrics["accuracy"] + accuracy) / 2)}
    for name, value in ("model", "/elsewhere"), ("dev_examples", 39), ("data_sha256", "0" * 64):
        run = shutil.copytree(runs / "rte", tmp_path / name / "rte")
        write_json(run / "config.json", config | {name: value})
        with pytest.raises(ValueError, match=f"--baseline {run} is not .*{name} is {value}, that"):
            figure4.find_baselines([fusion], [run])
        beside = shutil.copytree(fusion, tmp_path / name / "fusion-rte")
        assert figure4.find_baselines([beside], []) == {}
    assert figure4.find_baselines([fusion], []) == {"rte": metrics["accuracy"]}


def test_errors(runs, tmp_path, refused):
    fusion, out = runs / "fusion-rte", tmp_path / "out"
    for words, message in (
        ([runs / "rte", "--out", out], "is of --stage adapter"),
        ([fusion, "--out", out, "--baseline", fusion], "not the run of a single adapter"),
        ([fusion, "--out", runs / "rte" / "metrics.json"], "is a file"),
    ):
        refused(words, message, name="figure4.py", main=figure4.main)
    assert not list(tmp_path.iterdir())
