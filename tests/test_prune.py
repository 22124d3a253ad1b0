"""experiments.prune: the smaller run is the large one with the others masked, keeps the most active
adapters, in files that everything reads; accuracies by the number of adapters."""

import pandas
import pytest
import torch
from safetensors.torch import load_file

from adapter import read_saved_config
from conftest import IDS, cli
from experiments import evaluate, fusion_weights, prune, publish
from experiments.load_run import load_run
from formats.files import read_json
from variants.masking import mask


@pytest.fixture(scope="module")
def whole(loud_fusion, launch, tmp_path_factory):
    """{"one": a fusion of three adapters, "two": of two that sit at both locations of a layer}"""
    out = tmp_path_factory.mktemp("whole")
    adapters = [out / "rte", out / "sst2"]
    for path in adapters:
        launch(f"--stage adapter --task {path.name} --adapter houlsby --epochs 1", out=path)
    launch("--stage fusion --task rte --epochs 1", adapters=adapters, out=out / "two")
    return {"one": loud_fusion, "two": out / "two"}


def best_adapters(run, keep, leave_out):
    """{layer: the names of the adapters with the largest weights on the training set}, by hand; of
    the last layer the head reads [CLS] alone"""
    names, result = run.adapters, {}
    inputs = fusion_weights.inputs_of(run.bert, run.split("train"))
    weights = fusion_weights.average(run.bert, inputs, ("all", "cls"))
    for layer, tokens in enumerate(("all", "cls")):
        s = sum(s for (i, _), s in weights[tokens].items() if i == layer)
        best = s.argsort(descending=True)[: keep or len(names)]
        result[layer] = set() if layer + 1 in leave_out else {names[n] for n in best}
    return result


@pytest.mark.parametrize(
    "name, keep, leave_out", [("one", 2, []), ("one", 1, []), ("one", None, [2]), ("two", 1, [])]
)
def test_a_smaller_run(name, keep, leave_out, whole, tmp_path):
    run, out = whole[name], tmp_path / "deep" / "out"
    given = {"keep": keep} if keep else {"leave_out": leave_out}
    result = prune.main(cli(f"{run} --device cpu", out=out, **given))
    large = load_run(run)
    expected, names = best_adapters(large, keep, leave_out), large.adapters
    everywhere = set.intersection(*filter(None, expected.values()))
    smaller = load_run(out)
    # the reference reads the last one's configuration in every layer
    assert smaller.adapters[-1] in everywhere or not everywhere
    left = set.union(*expected.values())
    assert set(smaller.adapters) == left == {path.name for path in (out / "adapters").iterdir()}
    for adapter in left:
        old, new = (path / "adapters" / adapter for path in (run, out))
        without = tuple(layer for layer in (0, 1) if adapter not in expected[layer])
        assert read_saved_config(new)[1].leave_out == without
        old, new = (load_file(path / "adapter.safetensors") for path in (old, new))
        gone = tuple(f"layer.{layer}." for layer in without)
        assert new.keys() == {key for key in old if not any(layer in key for layer in gone)}
        assert all(torch.equal(new[key], old[key]) for key in new)

    # plain BERT in layers where all are left out
    before = large.bert(IDS)
    for (layer, _), slot in large.bert.slots():
        if not expected[layer]:
            slot.active = None
        elif slot.fusion is not None:
            mask(large.bert, set(names) - expected[layer], [layer])
    h = smaller.bert(IDS)
    assert (h - large.bert(IDS)).abs().max() < 1e-5 and (h - before).abs().max() > 1e-4

    metrics = read_json(out / "metrics.json")
    accuracies = pandas.read_csv(out / "prune.csv").set_index("k")["accuracy"]
    assert [*accuracies.index] == [*range(len(names), 0, -1)]
    assert accuracies[keep or len(names)] == metrics["accuracy"] == result["accuracy"]
    assert evaluate.main(cli(f"{out} --device cpu"))["accuracy"] == metrics["accuracy"]
    publish.main([str(out), *cli("--encoder tiny", out=tmp_path / "published")])
    card = (tmp_path / "published" / "README.md").read_text()
    assert ("## With `adapters`" in card) == bool(everywhere)  # which else cannot run it
