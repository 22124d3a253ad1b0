"""experiments.fusion_weights: what a fusion has learned, in figures and numbers."""

import itertools
import math
import re
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from conftest import cli
from experiments import fusion_weights
from experiments.load_run import load_run
from formats.files import read_json, write_json


def test_the_weights_are_means_over_real_tokens(runs, loud_fusion, launch, tmp_path):
    """In the last layer over each [CLS]. One run has two fusions a layer, and less in layer 2."""
    out, second = tmp_path / "out", tmp_path / "second"
    rte, sst2, words = tmp_path / "rte", tmp_path / "sst2", "--stage adapter --adapter houlsby"
    launch(f"{words} --epochs 1 --task rte --adapter-config leave_out=[1]", out=rte)
    launch(f"{words} --epochs 1 --task sst2", out=sst2)
    launch("--stage fusion --task sst2 --epochs 1", adapters=[rte, sst2], out=second)
    fusion_weights.main([str(loud_fusion), str(second), *cli("--device cpu", out=out)])
    files = "figure4.png figure6.png summary.txt weights.csv"
    assert sorted(path.name for path in out.iterdir()) == files.split()
    rows, count = pd.read_csv(out / "weights.csv"), 0
    found = dict([*rows.groupby(["run", "layer", "location"])])
    assert [*found[str(second), 2, "output"]["adapter"]] == ["sst2"]  # rte is not there
    for directory in (loud_fusion, second):
        run = load_run(directory)
        seen = [example["weights"] for example in run.fusion_weights(run.split())]
        for location, layer in itertools.product(seen[0], (0, 1)):
            read = slice(1) if layer == 1 else slice(None)  # [CLS], or all
            s = torch.cat([weights[location][layer][read] for weights in seen])  # [T, N]
            of = found[str(directory), layer + 1, location]
            weights = of.set_index("adapter")["weight"].reindex(run.adapters).fillna(0)
            assert weights.tolist() == pytest.approx(s.mean(0).tolist(), abs=1e-5)
            count += len(of)
    assert count == len(rows)
    accuracy = read_json(loud_fusion / "metrics.json")["accuracy"]
    assert re.search(rf"\| +{100 * accuracy:.2f} \|\n", (out / "summary.txt").read_text())


@pytest.mark.parametrize("other", ["mnli", *fusion_weights.COLUMNS])
def test_what_section_6_reads(other, tmp_path):
    """Three targets, one of them without an own adapter. An adapter may have any name."""
    weights = [  # target, its own adapter, accuracy, layer, {adapter: weight}
        ("cb", "mine", 0.8, 1, {other: 0.9, "mine": 0.1}),
        ("cb", "mine", 0.8, 2, {other: 0.5, "mine": 0.5}),
        ("rte", other, math.nan, 1, {other: 0.9, "mine": 0.1}),
        ("rte", other, math.nan, 2, {other: 0.8, "mine": 0.2}),
        ("cb (2)", None, math.nan, 2, {other: 1.0}),
    ]
    rows = [["run", *key, "output", *pair] for *key, of in weights for pair in of.items()]
    rows = pd.DataFrame(rows, columns=fusion_weights.COLUMNS)
    found, header = fusion_weights.strengths_table(rows)
    assert [line[:5] for line in found[:2]] == [
        ["cb", other, pytest.approx(0.7), "mine", pytest.approx(0.3)],
        ["rte", other, pytest.approx(0.85), other, pytest.approx(0.85)],
    ]
    assert found[2][:3] == ["cb (2)", other, 1] and found[2][4] is None
    assert found[0][5] == pytest.approx(80) and len(header) == 6
    if other == "adapter":
        fusion_weights.draw(rows, tmp_path)
    assert fusion_weights.figure_4_layers(12) == {1, 7, 9, 12}


OWN = [  # {the name of an adapter here: the tasks in its run.json}, and the own one
    ({"rte": "sst2", "mine": "rte"}, "mine"),  # two that were renamed
    ({"pick": "pick", "rte": None}, "rte"),  # of the hub, without a run.json
    ({"sst2": "sst2 rte", "rte": "sst2 rte"}, "rte"),  # of a multi-task run
    ({"pick": "pick", "sst2": "sst2"}, None),
]


@pytest.mark.parametrize("adapters, own", OWN)
def test_the_own_adapter_is_known_by_its_training(adapters, own, tmp_path):
    for name, tasks in adapters.items():
        if tasks:
            path = tmp_path / "adapters" / name / "run.json"
            write_json(path, {"tasks": {task: {} for task in tasks.split()}})
    task = SimpleNamespace(name="rte")
    run = SimpleNamespace(directory=tmp_path, adapters=[*adapters], task=task)
    assert fusion_weights.own_adapter(run) == own
