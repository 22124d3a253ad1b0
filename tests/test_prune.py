"""experiments/prune.py: the smaller run is the large one with the others masked, keeps the most
active adapters, in files that everything reads; accuracies by the number of adapters."""

import csv
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from adapter import read_config
from bert import Bert
from conftest import IDS, cli
from experiments import evaluate, figure4, predict, prune, publish
from experiments.load_run import load_run
from formats.files import read_json
from runtime.adapters import run_encoder
from variants.masking import mask


@pytest.fixture(scope="module")
def whole(loud_fusion, launch, tmp_path_factory):
    """{"one": a fusion of three adapters, "two": of two that sit at both locations of a layer}"""
    out = tmp_path_factory.mktemp("whole")
    houlsby = [out / "h-rte", out / "h-sst2"]
    for task, path in zip(("rte", "sst2"), houlsby, strict=True):
        launch(f"--stage adapter --task {task} --adapter houlsby --epochs 1", out=path)
    launch("--stage fusion --task rte --epochs 1", adapters=houlsby, out=out / "two")
    return {"one": loud_fusion, "two": out / "two"}


@pytest.mark.parametrize(
    "name, keep, leave_out", [("one", 2, []), ("one", 1, []), ("one", None, [2]), ("two", 1, [])]
)
def test_a_smaller_run(name, keep, leave_out, whole, tmp_path):
    run, out = whole[name], tmp_path / "deep" / "out"
    given = {"keep": keep} if keep else {"leave_out": leave_out}
    result = prune.main(cli(f"{run} --device cpu", out=out, **given))
    assert [path.name for path in out.parent.iterdir()] == ["out"]

    # by hand: which adapters have the largest weights on the training set
    loaded = load_run(run)
    whole_bert, names, examples = loaded.bert, loaded.config["adapters"], loaded.split("train")
    weights, expected = figure4.average(whole_bert, figure4.inputs_of(whole_bert, examples)), {}
    for layer in (0, 1):
        s = sum(s for (i, _), s in weights.items() if i == layer)
        best = {names[n] for n in s.argsort(descending=True)[: keep or len(names)]}
        expected[layer] = set() if layer + 1 in leave_out else best
    everywhere = set.intersection(*(adapters for adapters in expected.values() if adapters))

    bert, _, config = load_run(out)
    # the reference reads the last one's configuration in every layer
    assert config["adapters"][-1] in everywhere or not everywhere
    left = {adapter for adapters in expected.values() for adapter in adapters}
    assert set(config["adapters"]) == left == {path.name for path in (out / "adapters").iterdir()}
    for adapter in left:
        old, new = (path / "adapters" / adapter for path in (run, out))
        _, adapter_config, values = read_config(new)
        assert adapter_config.leave_out == tuple(i for i in (0, 1) if adapter not in expected[i])
        assert values["model_name"] == read_config(old)[2]["model_name"]
        old, new = (load_file(path / "adapter.safetensors") for path in (old, new))
        pruned = [f"layer.{i}." for i in adapter_config.leave_out]
        assert new.keys() == {key for key in old if not any(layer in key for layer in pruned)}
        assert all(torch.equal(new[key], old[key]) for key in new)  # bit by bit

    # the same function as the large one with the others masked, and plain BERT in layers where all
    # are left out
    large, _, _ = load_run(run)
    for (layer, _), slot in large.slots():
        if not expected[layer]:
            slot.active = None
        elif slot.fusion is not None:
            mask(large, set(names) - expected[layer], [layer])
    with torch.no_grad():
        assert (bert(IDS) - large(IDS)).abs().max() < 1e-5
        assert (bert(IDS) - whole_bert(IDS)).abs().max() > 1e-4

    # everything reads it, and its accuracies are the measured ones
    metrics = read_json(out / "metrics.json")
    with open(out / "prune.csv", newline="") as file:
        accuracies = {int(row["k"]): float(row["accuracy"]) for row in csv.DictReader(file)}
    assert [*accuracies] == [*range(len(names), 0, -1)]
    assert accuracies[keep or len(names)] == metrics["accuracy"] == result["accuracy"]
    # --resume of the larger run's command would compare these, and refuses
    assert config["adapter_digests"] != load_run(run).config["adapter_digests"]
    assert metrics["out"] == str(out) and config["pruned"]["from"] == str(run)
    assert evaluate.main(cli(f"{out} --device cpu"))["accuracy"] == metrics["accuracy"]
    predict.main(cli(f"{out} red one --device cpu"))
    assert sorted(figure4.mean_weights(out)[0]) == sorted(left)
    publish.main([str(out), *cli("--encoder tiny", out=tmp_path / "published")])
    card = (tmp_path / "published" / "README.md").read_text()
    assert ("## With `adapters`" in card) == bool(everywhere)  # which else cannot run it
    if keep == 2:  # once more
        again = prune.main(cli(f"{out} --keep {keep} --device cpu", out=tmp_path / "again"))
        assert again["accuracy"] == metrics["accuracy"]


def test_another_encoder_stays_another_encoder(whole, encoder, tmp_path):
    """A run that is pruned on an encoder with other weights is refused as its source is."""
    other = shutil.copytree(encoder, tmp_path / "other")
    bert = Bert.from_pretrained(other)
    bert.layers[0].query.bias.data += 0.01
    bert.save_pretrained(other)
    out = tmp_path / "out"
    arguments = cli(f"{whole['one']} --keep 1 --device cpu", model=other, out=out)
    with pytest.raises(ValueError, match="another encoder"):
        prune.main(arguments)
    prune.main([*arguments, "--allow-other-encoder"])
    with pytest.raises(ValueError, match="another encoder"):
        load_run(out, model=other)
    trained_on = load_run(out).config["encoder_sha256"]
    for adapter in read_json(out / "config.json")["adapters"]:  # which a new fusion asks
        assert run_encoder(out / "adapters" / adapter) == trained_on


def test_adapters_of_which_the_last_one_decides_what_all_read(whole):
    bert, head, config = load_run(whole["one"])
    adapter = bert.layers[0].output_add_norm.adapters["rte"]
    adapter.config = replace(adapter.config, original_ln_before=False)
    with pytest.raises(ValueError, match="the last one decides for all"):
        prune.check(prune.Options(whole["one"], keep=1), bert, head, config["adapters"])


WRONG = """ONE | --keep, --leave-out, or both
ONE --keep 4 | --keep must be in 1 .. 3
ONE --leave-out 3 | layers with adapters: [1, 2]
ONE --leave-out 1 2 | --leave-out takes some of
ONE --keep 2 --out ONE | already there
ADAPTER --keep 2 | is of --stage adapter"""


@pytest.mark.parametrize("line", WRONG.splitlines())
def test_errors(line, whole, runs, tmp_path, refused):
    words, message = line.split(" | ")
    places = {"ONE": whole["one"], "ADAPTER": runs / "rte"}
    words = [places.get(word, word) for word in words.split()]
    refused([*cli(out=tmp_path / "out"), *words], message, name="prune.py", main=prune.main)
    assert not list(tmp_path.iterdir())
