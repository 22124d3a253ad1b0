"""experiments.fusion_weights: weights are means over real tokens; tables follow from them."""

import csv
import itertools
import shutil

import pytest
import torch

from conftest import cli, read_lines
from experiments import fusion_weights
from experiments.load_run import load_run
from formats.files import read_json, write_json


@pytest.fixture(scope="module")
def fused(runs, loud_fusion, launch, tmp_path_factory):
    """Four fusion runs: rte over three adapters; sst2 over two, of which one is not in layer 2; rte
    over one at both locations of a layer; pick, which has three candidates."""
    out = tmp_path_factory.mktemp("figure4")
    adapter, fusion = "--stage adapter --task rte --epochs 1", "--stage fusion --epochs 1 --lr 5e-3"
    launch(f"{adapter} --adapter houlsby", out=out / "houlsby")
    launch(f"{adapter} --adapter-config leave_out=[1]", out=out / "low" / "rte")
    for task, *adapters in (
        ("sst2", out / "low" / "rte", runs / "sst2"),
        ("rte", out / "houlsby"),
        ("pick", runs / "rte", runs / "pick"),
    ):
        launch(f"{fusion} --task {task}", adapters=adapters, out=out / task)
    return [loud_fusion, out / "sst2", out / "rte", out / "pick"]


def test_files(fused, runs, data_dir, tmp_path):
    """The weights are the means of what load_run shows of each token, padding not included, and of
    each [CLS]; which adapter is the strongest follows from what is read."""
    out, single = tmp_path / "out", runs / "rte"
    words = cli("--device cpu", out=out, baseline=[single, *fused])
    fusion_weights.main([*map(str, fused), *words])
    written = {path.name for path in out.iterdir()}
    figures = {f"figure{n}{tokens}.png" for n in (4, 6) for tokens in ("", "_cls")}
    assert written == {*figures, "weights.csv", "summary.txt"}
    with open(out / "weights.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[5:] == ["rte", "sst2", "pick"]  # the targets' own, in their order
    found = {(row["run"], row["layer"], row["location"], row["tokens"]): row for row in rows}
    assert found[str(fused[1]), "2", "output", "cls"]["rte"] == ""  # not in this layer
    summary = (out / "summary.txt").read_text().splitlines()
    for run, line in zip(fused, summary[1:], strict=False):
        model = load_run(run)
        examples = read_lines(data_dir / model.task.name / "validation.jsonl")
        seen = [example["weights"] for example in model.fusion_weights(examples)]
        read = []  # of the last layer [CLS] alone
        for location, layer in itertools.product(seen[0], (0, 1)):
            every = [weights[location][layer] for weights in seen]  # [T, N] each
            means = {
                "all": torch.cat(every).mean(0),
                "cls": torch.stack([s[0] for s in every]).mean(0),
            }
            read.append(means["cls" if layer else "all"])
            for tokens, mean in means.items():
                row = found.pop((str(run), str(layer + 1), location, tokens))
                for name, weight in zip(model.adapters, mean.tolist(), strict=True):
                    assert float(row[name] or 0) == pytest.approx(weight, abs=1e-5)
        assert f" {torch.stack(read).mean(0).max().item():.2f} " in line
    assert not found

    ours, theirs = (read_json(run / "metrics.json")["accuracy"] for run in (fused[0], single))
    numbers = f"{100 * ours:.2f} {100 * theirs:.2f} {100 * (ours - theirs):+.2f}"
    assert any("(fusion)" in line and " ".join(line.split()).endswith(numbers) for line in summary)


def test_which_tokens(loud_fusion, data_dir, monkeypatch):
    """Those of a text are between [CLS] and [SEP], or between two [SEP]; what is read in the last
    layer depends on the head."""
    run, last = load_run(loud_fusion), (1, "output")
    examples, means = run.split(), {"text_a": [], "text_b": []}
    for seen in run.fusion_weights(read_lines(data_dir / "rte" / "validation.jsonl")):
        s, end = seen["weights"]["output"][1], seen["tokens"].index("[SEP]")
        means["text_a"].append(s[1:end])
        means["text_b"].append(s[end + 1 : -1])
    found = fusion_weights.mean_weights(run, examples, means)
    for text, of_examples in means.items():
        assert torch.allclose(found[text][last], torch.cat(of_examples).double().mean(0))
    weights = fusion_weights.weights_by_name(run, examples)
    assert weights["read"][last] == weights["cls"][last] != weights["all"][last]
    monkeypatch.setattr(run.model, "reads_cls_only", lambda: False)
    assert fusion_weights.weights_by_name(run, examples)["read"] == weights["all"]


def target(label, task, layers, accuracy=None, single=None):
    """A row with these weights, {name: weight} of each layer, of all tokens and of those that are
    read; at [CLS] the layers have changed places."""
    weights = {(layer, "output"): s for layer, s in enumerate(layers) if s}
    cls = {(layer, "output"): s for layer, s in enumerate(reversed(layers)) if s}
    weights = {"all": weights, "read": weights, "cls": cls}
    return fusion_weights.Target("run", task, label, weights, accuracy, single)


def test_the_tables_of_section_6():
    """Three targets, two of them without a layer or their own adapter."""
    targets = [
        target("cb", "cb", [{"cb": 0.1, "mnli": 0.9}, {"cb": 0.5, "mnli": 0.5}], 0.8, 0.7),
        target("mnli", "mnli", [{"cb": 0.1, "mnli": 0.9}, {"cb": 0.2, "mnli": 0.8}], 0.8),
        target("cb (2)", "cb", [{}, {"mnli": 1.0}]),
    ]
    assert fusion_weights.strengths_table(targets, ["cb", "mnli"])[0] == [
        ["cb", "mnli", *map(pytest.approx, (0.7, 0.3, 0.5)), "1 of 2", 80, 70, "+10.00"],
        ["mnli", "mnli", *map(pytest.approx, (0.85, 0.85, 0.5)), "2 of 2", 80, None, None],
        ["cb (2)", "mnli", 1, None, 1, None, None, None, None],
    ]
    rows, _ = fusion_weights.entropy_table(targets, [(0, "output"), (1, "output")])
    assert rows[0] == ["cb", "all tokens", pytest.approx(0.469, abs=1e-3), pytest.approx(1)]
    assert rows[1] == ["cb", "[CLS] alone", pytest.approx(1), pytest.approx(0.469, abs=1e-3)]
    assert rows[4] == ["cb (2)", "all tokens", None, 0]
    assert fusion_weights.figure_4_layers(12) == {0, 6, 8, 11}


def test_all_figures_have_one_scale(tmp_path, monkeypatch):
    """Also where the largest weight is at [CLS], in a layer that Figure 4 leaves out."""
    drawn, slots = [], [(layer, "output") for layer in range(6)]
    monkeypatch.setattr(fusion_weights, "save_figure", lambda figure, path: drawn.append(figure))
    one = target("cb", "cb", [{"cb": 0.5, "mnli": 0.5}] * 6)
    one.weights["cls"][1, "output"] = {"cb": 0.85, "mnli": 0.15}
    fusion_weights.draw([one], slots, ["cb", "mnli"], tmp_path)
    scales = [{of.images[0].get_clim() for of in figure.axes if of.images} for figure in drawn]
    assert scales == [{(0, 0.9)}] * 4
    titles = [of.get_title() for of in drawn[0].axes if of.images]
    assert titles == ["layer 1", "layer 4", "layer 5", "layer 6"]


def test_single_adapters_are_averaged_if_they_compare(runs, tmp_path):
    accuracy = read_json(runs / "rte" / "metrics.json")["accuracy"]
    seed = shutil.copytree(runs / "rte", tmp_path / "seed-1")
    write_json(seed / "metrics.json", {"accuracy": 0.1})
    others = [runs / "sst2", runs / "fusion-rte"]
    record = read_json(seed / "run.json")
    for name in [name for name in record["inputs"] if name != "tokenizer"]:
        others.append(shutil.copytree(seed, tmp_path / name))
        changed = {**record, "inputs": record["inputs"] | {name: "another"}}
        write_json(others[-1] / "run.json", changed)
    found = fusion_weights.single_accuracies([runs / "fusion-rte"], [runs / "rte", seed, *others])
    assert found == [pytest.approx((accuracy + 0.1) / 2)]
    assert fusion_weights.single_accuracies([runs / "fusion-rte"], others) == [None]
