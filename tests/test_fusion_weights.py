"""experiments.fusion_weights: what a fusion has learned, in figures and numbers."""

import itertools
import math
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from conftest import cli
from experiments import fusion_weights
from experiments.load_run import load_run
from formats.files import write_json


def test_the_weights_are_means_over_real_tokens(runs, loud_fusion, launch, tmp_path):
    """With --cls, in the last layer over each [CLS]. One run has two fusions a layer, and less in
    layer 2."""
    out, second = tmp_path / "out", tmp_path / "second"
    rte, sst2, words = tmp_path / "rte", tmp_path / "sst2", "--stage adapter --adapter houlsby"
    launch(f"{words} --epochs 1 --task rte --adapter-config leave_out=[1]", out=rte)
    own = launch(f"{words} --epochs 1 --task sst2", out=sst2)
    fused = launch("--stage fusion --task sst2 --epochs 1", adapters=[rte, sst2], out=second)
    for option, first in (("", slice(None)), ("--cls", slice(1))):
        words = [str(loud_fusion), str(second), *cli(f"{option} --device cpu", out=out)]
        fusion_weights.main(words)
        rows, count = pd.read_csv(out / "weights.csv"), 0
        found = dict([*rows.groupby(["run", "layer", "location"])])
        assert [*found[str(second), 2, "output"]["adapter"]] == ["sst2"]  # rte is not there
        for directory in (loud_fusion, second):
            run = load_run(directory)
            seen = [example["weights"] for example in run.fusion_weights(run.split())]
            for location, layer in itertools.product(seen[0], (0, 1)):
                read = first if layer == 1 else slice(None)
                s = torch.cat([weights[location][layer][read] for weights in seen])  # [T, N]
                of = found[str(directory), layer + 1, location]
                weights = of.set_index("adapter")["weight"].reindex(run.adapters).fillna(0)
                assert weights.tolist() == pytest.approx(s.mean(0).tolist(), abs=1e-5)
                count += len(of)
        assert count == len(rows)
    files = "figure4.png figure6.png summary.txt weights.csv"
    assert sorted(path.name for path in out.iterdir()) == files.split()
    gain = 100 * (fused["accuracy"] - own["accuracy"])
    assert f"| {100 * fused['accuracy']:.2f} | {gain:.2f} |" in " ".join(
        (out / "summary.txt").read_text().split()
    )


@pytest.mark.parametrize("other", ["mnli", *fusion_weights.COLUMNS])
def test_what_section_6_reads(other, tmp_path):
    """Four targets, one of them without an own adapter. An adapter may have any name."""
    weights = [  # target, its own adapter, accuracies, layer, the weights
        ("cb", "mine", 0.8, 0.7, 1, {other: 0.9, "mine": 0.1}),
        ("cb", "mine", 0.8, 0.7, 2, {other: 0.5, "mine": 0.5}),
        ("rte", other, 0.9, 0.6, 1, {other: 0.9, "mine": 0.1}),
        ("rte", other, 0.9, 0.6, 2, {other: 1.0, "mine": 0.0}),
        ("sick", other, 0.9, 0.8, 2, {other: 0.9, "mine": 0.8}),
        ("cb (2)", None, math.nan, math.nan, 2, {other: 1.0}),
    ]
    rows = [  # the columns in the order of COLUMNS
        ["run", target, own, accuracy, of_own, layer, "output", *pair]
        for target, own, accuracy, of_own, layer, of in weights
        for pair in of.items()
    ]
    rows = pd.DataFrame(rows, columns=fusion_weights.COLUMNS)
    (found, header), notes = fusion_weights.summary(rows)
    shared = math.exp(-0.9 * math.log(0.9) - 0.1 * math.log(0.1))
    expected = [
        ["cb", other, 0.7, "mine", 0.3, 80, 10, shared, 2],
        ["rte", other, 0.95, other, 0.95, 90, 30, shared, 1],
        ["sick", other, 0.9, other, 0.9, 90, 10, None, None],
        ["cb (2)", other, 1, None, None, None, None, None, 1],
    ]
    found = [[None if pd.isna(value) else value for value in line] for line in found]
    for line, values in zip(found, expected, strict=True):
        near = [pytest.approx(v) if type(v) in (int, float) else v for v in values]
        assert line == near and len(line) == len(header)
    r = torch.corrcoef(torch.tensor([[0.3, 0.95, 0.9], [10.0, 30.0, 10.0]]))[0, 1]
    assert notes[0].startswith(
        "sick: s is NO DISTRIBUTION, its mean weights add up to 1.70 to 1.70"
    )
    assert notes[1:] == [f"Own weight and gain, over 3 targets: correlation {r:.2f}"]
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
