"""experiments/figure4.py: the weights are the reference library's, averaged over real tokens; the
picture is legible; the words follow from the numbers."""

import csv
import math
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from conftest import cli, read_lines
from experiments import figure4
from experiments.load_run import load_run
from formats.files import read_json, write_json
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
    out, single = tmp_path / "out", fused[0].parent / "rte"
    figure4.main([*map(str, fused), *cli("--device cpu", out=out, baseline=[single, *fused])])
    printed = capsys.readouterr().out
    written = {path.name for path in out.iterdir()}
    assert written == {"figure4.png", "figure6.png", "weights.csv", "summary.txt"}
    assert (out / "summary.txt").read_text() in printed
    assert [f"note: --baseline {run} is no" in printed for run in (single, fused[0])] == [0, 1]

    with open(out / "weights.csv", newline="") as file:
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
    accuracy = 100 * read_json(single / "metrics.json")["accuracy"]
    assert re.search(rf"\(fusion-rte\) .* {accuracy:.2f} ", printed)


def test_multiple_choice_counts_every_candidate(runs, launch, data_dir, tmp_path):
    adapters, run = [runs / "rte", runs / "pick"], tmp_path / "run"
    launch("--stage fusion --task pick --epochs 1", adapters=adapters, out=run)
    _, weights, _ = figure4.mean_weights(run)
    rows = read_lines(data_dir / "pick" / "validation.jsonl")
    seen = [found["weights"]["output"][0] for found in load_run(run).fusion_weights(rows)]
    assert len(seen) == 3 * 40
    assert torch.allclose(weights[0, "output"], torch.cat(seen).mean(0).double(), atol=1e-5)


def test_only_the_papers_layers_are_in_figure_4():
    assert figure4.figure_4_layers(12) == {0, 6, 8, 11}
    assert figure4.figure_4_layers(1) == {0} and figure4.figure_4_layers(2) == {0, 1}


def test_the_tables_of_section_6():
    """Three targets, two of them without a layer or their own adapter."""
    slots, columns = [(0, "output"), (1, "output")], ["cb", "mnli"]
    nan = math.nan
    of_layers = [[0.1, 0.9], [0.1, 0.9], [nan, nan]], [[0.5, 0.5], [0.2, 0.8], [nan, 1.0]]
    values = torch.tensor(of_layers, dtype=torch.float64)
    targets = [("cb", "cb", 0.8, 0.7), ("mnli", "mnli", 0.8, None), ("cb (2)", "cb", None, None)]
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


def test_single_adapters_are_averaged_if_they_compare(runs, tmp_path):
    accuracy = read_json(runs / "rte" / "metrics.json")["accuracy"]
    seed = shutil.copytree(runs / "rte", tmp_path / "seed-1")
    write_json(seed / "metrics.json", {"accuracy": 0.1})
    given = [runs / "rte", seed, runs / "sst2", runs / "fusion-rte"]
    for name in ("encoder_sha256", "dev_examples", "data_sha256"):
        other = shutil.copytree(seed, tmp_path / name)
        write_json(other / "config.json", read_json(seed / "config.json") | {name: "another"})
        given.append(other)
    fusions = [runs / "fusion-rte"] * 2
    found = figure4.single_accuracies(fusions, given)
    assert found == [pytest.approx((accuracy + 0.1) / 2)] * 2
    assert figure4.single_accuracies(fusions, given[2:]) == [None] * 2


def test_errors(runs, tmp_path, refused):
    for words, message in (
        ([runs / "rte", "--out", tmp_path / "out"], "is of --stage adapter"),
        ([runs / "fusion-rte", "--out", runs], "already there: choose another --out"),
    ):
        refused(words, message, name="figure4.py", main=figure4.main)
    assert not list(tmp_path.iterdir())
