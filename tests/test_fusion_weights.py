"""experiments.fusion_weights: weights are means over real tokens; tables follow from them."""

import itertools
import math
import shutil

import pandas as pd
import pytest
import torch

from conftest import cli, read_lines
from experiments import fusion_weights
from experiments.load_run import load_run
from formats.files import read_json, write_json


@pytest.fixture(scope="module")
def fused(runs, loud_fusion, launch, tmp_path_factory):
    """Three fusion runs: rte over three adapters; sst2 over two, of which one is not in layer 2;
    rte over one at both locations of a layer."""
    out = tmp_path_factory.mktemp("figure4")
    adapter, fusion = "--stage adapter --task rte --epochs 1", "--stage fusion --epochs 1 --lr 5e-3"
    launch(f"{adapter} --adapter houlsby", out=out / "houlsby")
    launch(f"{adapter} --adapter-config leave_out=[1]", out=out / "low" / "rte")
    low = [out / "low" / "rte", runs / "sst2"]
    launch(f"{fusion} --task sst2", adapters=low, out=out / "sst2")
    launch(f"{fusion} --task rte", adapters=[out / "houlsby"], out=out / "rte")
    return [loud_fusion, out / "sst2", out / "rte"]


def test_files(fused, runs, data_dir, tmp_path):
    """The weights are the means of what load_run shows of each token, padding not included, and of
    each [CLS]; which adapter is the strongest follows from what is read."""
    out, single = tmp_path / "out", runs / "rte"
    words = cli("--device cpu", out=out, baseline=[single, *fused])
    fusion_weights.main([*map(str, fused), *words])
    written = {path.name for path in out.iterdir()}
    figures = {f"figure{n}{tokens}.png" for n in (4, 6) for tokens in ("", "_cls")}
    assert written == {*figures, "weights.csv", "summary.txt"}
    rows = pd.read_csv(out / "weights.csv")
    names = [*rows.columns.drop(fusion_weights.KEYS)]
    assert names == ["rte", "sst2", "pick"]  # the targets' own, in their order
    found = rows.set_index(["run", "layer", "location", "tokens"])
    assert math.isnan(found.at[(str(fused[1]), 2, "output", "cls"), "rte"])  # not in this layer
    summary, count = (out / "summary.txt").read_text().splitlines(), 0
    for run, line in zip(fused, summary[2:], strict=False):
        model = load_run(run)
        examples = read_lines(data_dir / model.task.name / "validation.jsonl")
        seen = [example["weights"] for example in model.fusion_weights(examples)]
        read = []  # of the last layer [CLS] alone
        for location, layer in itertools.product(seen[0], (0, 1)):
            every = [weights[location][layer] for weights in seen]  # [T, N] each
            means = {"all": torch.cat(every).mean(0), "cls": torch.stack([s[0] for s in every])}
            means["cls"] = means["cls"].mean(0)
            read.append(means["cls" if layer else "all"])
            for tokens, mean in means.items():
                row = found.loc[str(run), layer + 1, location, tokens]
                assert row["is_read"] == (tokens == ("cls" if layer else "all"))
                weights = row[model.adapters].fillna(0).tolist()
                assert weights == pytest.approx(mean.tolist(), abs=1e-5)
                count += 1
        assert f" {torch.stack(read).mean(0).max().item():.2f} " in line
    assert count == len(found)

    ours, theirs = (100 * read_json(run / "metrics.json")["accuracy"] for run in (fused[0], single))
    line = next(line for line in summary if "(fusion)" in line)
    numbers = [*map(str.strip, line.split("|"))][-4:-1]
    assert numbers == [f"{ours:.2f}", f"{theirs:.2f}", f"{ours - theirs:.2f}"]


def row(target, layer, tokens, weights, is_read=True, accuracies=(math.nan, math.nan)):
    task = target.split()[0]
    key = ["run", target, task, *accuracies, layer, "output", tokens, is_read, 0.0]
    return {**dict(zip(fusion_weights.KEYS, key, strict=True)), **weights}


def test_what_section_6_reads():
    """Three targets, two of them without a layer or their own adapter; of the last layer of the
    first one [CLS] is read."""
    rows = [row("cb", 1, "all", {"cb": 0.1, "mnli": 0.9}, True, (0.8, 0.7))]
    rows += [row("cb", 2, "all", {"cb": 0.9, "mnli": 0.1}, False)]
    rows += [row("cb", 2, "cls", {"cb": 0.5, "mnli": 0.5})]
    rows += [row("mnli", 1, "all", {"cb": 0.1, "mnli": 0.9})]
    rows += [row("mnli", 2, "all", {"cb": 0.2, "mnli": 0.8})]
    rows += [row("cb (2)", 2, "all", {"mnli": 1.0})]
    found, header = fusion_weights.strengths_table(pd.DataFrame(rows))
    assert [line[:6] for line in found] == [
        ["cb", "mnli", *map(pytest.approx, (0.7, 0.3, 0.5)), "1 of 2"],
        ["mnli", "mnli", *map(pytest.approx, (0.85, 0.85, 0.5)), "2 of 2"],
        ["cb (2)", "mnli", 1, None, 1, None],
    ]
    assert found[0][6:] == pytest.approx([80, 70, 10]) and len(header) == 9
    assert fusion_weights.normalized_entropy([0.1, 0.9]) == pytest.approx(0.469, abs=1e-3)
    assert fusion_weights.normalized_entropy([0.2] * 5) == pytest.approx(1)
    assert fusion_weights.normalized_entropy([1.0]) == 0


def test_all_figures_have_one_scale(tmp_path, monkeypatch):
    """Also where the largest weight is at [CLS], in a layer that Figure 4 leaves out."""
    drawn, rows = [], []
    monkeypatch.setattr(fusion_weights, "save_figure", lambda figure, path: drawn.append(figure))
    for layer in range(1, 13):
        rows += [row("cb", layer, "all", {"cb": 0.5, "mnli": 0.5})]
        largest = 0.85 if layer == 2 else 0.5
        rows += [row("cb", layer, "cls", {"cb": largest, "mnli": 1 - largest})]
    fusion_weights.draw(pd.DataFrame(rows), tmp_path)
    scales = [{of.images[0].get_clim() for of in figure.axes if of.images} for figure in drawn]
    assert scales == [{(0, 0.9)}] * 4
    titles = [of.get_title() for of in drawn[0].axes if of.images]
    assert titles == ["layer 1", "layer 7", "layer 9", "layer 12"]  # the paper's


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
    found = fusion_weights.single_accuracy(runs / "fusion-rte", [runs / "rte", seed, *others])
    assert found == pytest.approx((accuracy + 0.1) / 2)
    assert math.isnan(fusion_weights.single_accuracy(runs / "fusion-rte", others))
