"""experiments/prune.py: the smaller run is the large one with the others masked, keeps the most
active adapters, in files that everything reads; accuracies by the number of adapters."""

import csv
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter import read_config
from bert import Bert
from conftest import cli
from experiments import evaluate, figure4, predict, prune, publish
from experiments.load_run import load_run, load_run_split
from formats.adapterhub import run_encoder
from runtime.command import run_command
from variants.masking import mask

IDS = torch.tensor([[2, 5, 6, 7, 3], [2, 9, 3, 11, 12]])


@pytest.fixture(scope="module")
def whole(runs, launch, tmp_path_factory):
    """{"one": a fusion of three adapters, "two": of two that sit at both locations of a layer,
    "alone": of a single one}, with queries so large that each layer has its own favourite, and
    values so large that it matters which adapters take part."""
    out = tmp_path_factory.mktemp("whole")
    shutil.copytree(runs / "fusion-rte", out / "one")
    houlsby = [out / "h-rte", out / "h-sst2"]
    for task, path in zip(("rte", "sst2"), houlsby, strict=True):
        launch(f"--stage adapter --task {task} --adapter houlsby --epochs 1", out=path)
    for name, adapters in (("two", houlsby), ("alone", [runs / "rte"])):
        words = "--stage fusion --task rte --epochs 1"
        launch(words, adapters=adapters, out=out / name)
    for name in ("one", "two", "alone"):
        path = out / name / "model_adapter_fusion.safetensors"
        factors = {"query": 100, "key": 1, "value": 20}
        tensors = {key: factors[key.split(".")[-2]] * p for key, p in load_file(path).items()}
        save_file(tensors, path)
    return {name: out / name for name in ("one", "two", "alone")}


@pytest.mark.parametrize(
    "name, keep, leave_out",
    [("one", 2, []), ("one", 1, []), ("one", None, [2]), ("two", 1, []), ("alone", None, [2])],
)
def test_a_smaller_run(name, keep, leave_out, whole, capsys, tmp_path):
    run, out = whole[name], tmp_path / "deep" / "out"
    given = {"keep": keep} if keep else {"leave_out": leave_out}
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    result = prune.main(cli(f"{run} --device cpu", out=out, **given))
    lines = capsys.readouterr().out.splitlines()
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert [path.name for path in out.parent.iterdir()] == ["out"]

    # by hand: which adapters have the largest weights on the training set
    whole_bert, _, config = load_run(run)
    names, (_, examples) = config["adapters"], load_run_split(run, whole_bert, config, "train")
    weights = figure4.average(whole_bert, figure4.inputs_of(whole_bert, examples))
    expected = {}
    for layer in (0, 1):
        s = sum(s for (i, _), s in weights.items() if i == layer)
        best = {names[n] for n in s.argsort(descending=True)[: keep or len(names)]}
        expected[layer] = set() if layer + 1 in leave_out else best
    everywhere = set.intersection(*(adapters for adapters in expected.values() if adapters))
    assert any(line.startswith("note: no adapter") for line in lines) != bool(everywhere)

    bert, _, config = load_run(out)
    # the reference reads the last one's configuration in every layer
    assert config["adapters"][-1] in everywhere or not everywhere
    for (layer, location), slot in bert.slots():
        there = expected[layer] if name == "two" or location == "output" else set()
        assert set(slot.adapters) == there
        assert slot.fusion is None or set(slot.fusion.adapter_names) == there
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
    # are left out; also of a fusion of one, whose name is its adapter's, too
    large, _, _ = load_run(run)
    for (layer, _), slot in large.slots():
        if not expected[layer]:
            slot.active = None
        elif slot.fusion is not None:
            mask(large, set(names) - expected[layer], [layer])
    with torch.no_grad():
        assert (bert(IDS) - large(IDS)).abs().max() < 1e-5
        assert (bert(IDS) - whole_bert(IDS)).abs().max() > 1e-4

    # everything reads it, and its accuracy is the measured one
    metrics = json.loads((out / "metrics.json").read_text())
    with open(out / "prune.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    N, skipped = len(names), bool(leave_out)
    assert [int(row["k"]) for row in rows] == [N] * skipped + list(range(N, 0, -1))
    assert [row["left_out"] for row in rows] == [""] * skipped + ["2" * skipped] * N
    assert float(rows[0]["accuracy"]) == result["accuracy_of_all"]
    (row,) = (row for row in rows[skipped:] if int(row["k"]) == (keep or N))
    assert float(row["accuracy"]) == metrics["accuracy"] == result["accuracy"]
    assert metrics["out"] == str(out) and config["pruned"]["from"] == str(run)
    run_command("evaluate.py", evaluate.main, cli(f"{out} --device cpu"))
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["accuracy"] == metrics["accuracy"]
    run_command("predict.py", predict.main, cli(f"{out} red one --device cpu"))
    assert sorted(figure4.mean_weights(out)[0]) == sorted(left)
    publish.main([str(out), *cli("--encoder tiny", out=tmp_path / "published")])
    card = (tmp_path / "published" / "README.md").read_text()
    assert ("## With `adapters`" in card) == bool(everywhere)


def test_another_encoder_stays_another_encoder(whole, encoder, tmp_path, capsys):
    """A run that was pruned on an encoder with other weights is refused as its source is."""
    other = shutil.copytree(encoder, tmp_path / "other")
    bert = Bert.from_pretrained(other)
    bert.layers[0].query.bias.data += 0.01
    bert.save_pretrained(other)
    arguments = cli(f"{whole['one']} --keep 1 --device cpu", model=other, out=tmp_path / "out")
    with pytest.raises(ValueError, match="another encoder"):
        prune.main(arguments)
    prune.main([*arguments, "--allow-other-encoder"])
    assert capsys.readouterr().out.count("trained with another encoder") == 1
    recorded, source = (
        json.loads((path / "config.json").read_text()) for path in (tmp_path / "out", whole["one"])
    )
    trained_on = source["encoder_sha256"]
    assert recorded["encoder_sha256"] == trained_on
    for adapter in recorded["adapters"]:  # which a new fusion asks
        assert run_encoder(tmp_path / "out" / "adapters" / adapter) == trained_on
    with pytest.raises(ValueError, match="another encoder"):
        load_run(tmp_path / "out")
    load_run(tmp_path / "out", model=encoder)  # the one that the adapters were trained on


@pytest.fixture(scope="module")
def mixed(runs, launch, tmp_path_factory):
    """A fusion over adapters of which the last one decides what all read."""
    out = tmp_path_factory.mktemp("mixed")
    launch("--stage adapter --task rte --adapter bapna --epochs 1", out=out / "bapna")
    path = out / "bapna" / "adapter_config.json"
    values = json.loads(path.read_text())
    changed = {**values["config"], "original_ln_before": False}
    path.write_text(json.dumps({**values, "name": "other", "config": changed}))
    adapters = [runs / "sst2", out / "bapna"]
    launch("--stage fusion --task rte --epochs 1", adapters=adapters, out=out / "mixed")
    return out / "mixed"


WRONG = """ONE | --keep, --leave-out, or both
ONE --keep 0 | --keep must be at least 1
ONE --keep 4 | --keep must be in 1 .. 3
ONE --leave-out 3 | layers with adapters, which are [1, 2]
ONE --leave-out 1 2 | --leave-out takes some of
ONE --keep 2 --out ONE | already there
ADAPTER --keep 2 | is of --stage adapter
MIXED --keep 1 | the last one decides for all"""


@pytest.mark.parametrize("line", WRONG.splitlines())
def test_errors(line, whole, runs, mixed, tmp_path, refused):
    words, message = line.split(" | ")
    places = {"ONE": whole["one"], "ADAPTER": runs / "rte", "MIXED": mixed}
    words = [places.get(word, word) for word in words.split()]
    refused([*cli(out=tmp_path / "out"), *words], message, name="prune.py", main=prune.main)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error, status", [(OSError("full"), 2), (KeyboardInterrupt(), 130)])
def test_nothing_is_half_written(error, status, whole, tmp_path, capsys, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(prune, "write_run", fail)
    with pytest.raises(SystemExit) as exit:
        arguments = cli(f"{whole['one']} --keep 2 --device cpu", out=tmp_path / "out")
        run_command("prune.py", prune.main, arguments, "interrupted, nothing is written")
    assert exit.value.code == status and capsys.readouterr().err.count("\n") == 1
    assert not list(tmp_path.iterdir())
