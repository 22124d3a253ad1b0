"""experiments/prune.py: the smaller run is the large one with the others masked, keeps the most
active adapters, in files that everything reads; accuracy and speed by the number of adapters."""

import csv
import json
import shutil
from unittest.mock import Mock

import matplotlib.pyplot as plt
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from adapter import read_config
from experiments import evaluate, figure4, predict, prune, publish
from experiments.load_run import load_run, load_run_split
from fusion import fusion_weights, fusions
from variants.masking import mask

IDS = torch.tensor([[2, 5, 6, 7, 3], [2, 9, 3, 11, 12]])


@pytest.fixture(scope="module")
def whole(runs, launch, tmp_path_factory):
    """{"one": a fusion of three adapters, "two": of two that sit at both locations of a layer,
    "alone": of a single one}, with queries so large that each layer has its own favourite, and
    values so large that it matters who speaks."""
    out, result = tmp_path_factory.mktemp("whole"), {}
    shutil.copytree(runs / "fusion-rte", out / "one")
    for task in ("rte", "sst2"):
        launch(
            "--stage",
            "adapter",
            "--task",
            task,
            "--adapter",
            "houlsby",
            "--epochs",
            1,
            "--out",
            out / f"h-{task}",
        )
    launch(
        "--stage",
        "fusion",
        "--task",
        "rte",
        "--adapters",
        out / "h-rte",
        out / "h-sst2",
        "--epochs",
        1,
        "--out",
        out / "two",
    )
    launch(
        "--stage",
        "fusion",
        "--task",
        "rte",
        "--adapters",
        runs / "rte",
        "--epochs",
        1,
        "--out",
        out / "alone",
    )
    for name in ("one", "two", "alone"):
        path, larger = (
            out / name / "model_adapter_fusion.safetensors",
            {"query": 100, "key": 1, "value": 20},
        )
        save_file({key: larger[key.split(".")[-2]] * p for key, p in load_file(path).items()}, path)
        result[name] = out / name
    return result


def main(capsys, *arguments):
    """(lines, the closing line's dictionary)"""
    capsys.readouterr()
    prune.main([*map(str, arguments), "--device", "cpu"])
    *lines, last = capsys.readouterr().out.splitlines()
    return lines, json.loads(last)


def read_csv(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    "name, keep, leave_out",
    [("one", 2, []), ("one", 1, []), ("one", None, [2]), ("two", 1, []), ("alone", None, [2])],
)
def test_a_smaller_run(name, keep, leave_out, whole, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(prune, "ROUNDS", 2)
    run, out = whole[name], tmp_path / "deep" / "out"
    options = [
        *(["--keep", keep] if keep else []),
        *(["--leave-out", *leave_out] if leave_out else []),
    ]
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    lines, result = main(capsys, run, *options, "--out", out)
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert [path.name for path in out.parent.iterdir()] == ["out"]

    # by hand: who is the most active on the training set
    bert, _, config = load_run(run)
    names, (_, examples) = config["adapters"], load_run_split(run, bert, config, "train")
    weights = figure4.average(bert, figure4.inputs_of(bert, examples))
    layers = {layer: sum(s for (i, _), s in weights.items() if i == layer) for layer in (0, 1)}
    expected = {}
    for layer, s in layers.items():
        best = [names[n] for n in s.argsort(descending=True)[: keep or len(names)]]
        expected[layer] = set() if layer + 1 in leave_out else set(best)

    everywhere = set.intersection(*(adapters for adapters in expected.values() if adapters))
    assert any(line.startswith("note: no adapter") for line in lines) != bool(everywhere)

    bert, _, config = load_run(out)
    assert (
        config["adapters"][-1] in everywhere or not everywhere
    )  # the reference reads its configuration in every layer
    for (layer, _), slot in bert.slots():
        assert set(slot.adapters) in (
            [expected[layer]] if name == "two" else [expected[layer], set()]
        )
        assert slot.fusion is None or set(slot.fusion.adapter_names) == expected[layer]
    left = {adapter for adapters in expected.values() for adapter in adapters}
    assert set(config["adapters"]) == left == {path.name for path in (out / "adapters").iterdir()}
    for adapter in left:
        _, adapter_config, values = read_config(out / "adapters" / adapter)
        assert adapter_config.leave_out == tuple(i for i in (0, 1) if adapter not in expected[i])
        assert values["model_name"] == read_config(run / "adapters" / adapter)[2]["model_name"]
        old, new = (
            load_file(directory / "adapters" / adapter / "adapter.safetensors")
            for directory in (run, out)
        )
        assert new.keys() == {
            key for key in old if not any(f"layer.{i}." in key for i in adapter_config.leave_out)
        }
        assert all(torch.equal(new[key], old[key]) for key in new)  # bit by bit

    # the same function as the large one with the others masked, and no adapters where all are left
    # out
    large, _, _ = load_run(run)
    for (layer, _), slot in large.slots():
        if layer + 1 in leave_out:
            slot.fusion, slot.active = None, None
        elif slot.fusion is not None:
            mask(large, set(names) - expected[layer], [layer])
    with torch.no_grad():
        assert (bert(IDS) - large(IDS)).abs().max() < 1e-5
        assert (bert(IDS) - load_run(run)[0](IDS)).abs().max() > 1e-4
    for key, s in fusion_weights(large).items():
        assert torch.allclose(
            s[..., [names.index(name) for name in config["adapters"]]],
            fusion_weights(bert)[key],
            atol=1e-5,
        )

    # everything reads it, and its accuracy is the measured one
    metrics = json.loads((out / "metrics.json").read_text())
    assert result["accuracy"] == metrics["accuracy"] and metrics["out"] == str(out)
    assert config["pruned"]["from"] == str(run) and config["pruned"]["keep"] == keep
    evaluate.main([str(out), "--device", "cpu"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["accuracy"] == metrics["accuracy"]
    predict.main([str(out), "red", "one", "--device", "cpu"])
    assert sorted(figure4.mean_weights(out)[0]) == sorted(left)
    publish.publish(out, tmp_path / "published", "USER/it", "tiny", anyway=True)
    assert ("## With `adapters`" in (tmp_path / "published" / "README.md").read_text()) == bool(
        everywhere
    )

    # the curve
    rows, N = read_csv(out / "prune.csv"), len(names)
    assert [int(row["k"]) for row in rows] == [N] * bool(leave_out) + list(range(N, 0, -1))
    assert [row["left_out"] for row in rows] == [""] * bool(leave_out) + [
        " ".join(map(str, leave_out))
    ] * N
    assert (
        float(rows[0]["accuracy"]) == result["accuracy_of_all"] and float(rows[0]["folded_up"]) == 1
    )
    (row,) = (row for row in rows[bool(leave_out) :] if int(row["k"]) == (keep or N))
    assert float(row["accuracy"]) == metrics["accuracy"]
    for row in rows:
        assert (
            0
            < float(row["speed_slowest"])
            <= float(row["speed_median"])
            <= float(row["speed_fastest"])
        )
        assert float(row["speed_up"]) > 0
        assert any(
            line.split()[:2] == [row["k"], f"{float(row['accuracy']):.4f}"] for line in lines
        )
    with Image.open(out / "prune.png") as image:
        assert min(image.size) > 200


def test_what_is_measured_is_what_is_written(whole, capsys, tmp_path, monkeypatch):
    """Of a fusion of one, whose name is its adapter's, too."""
    monkeypatch.setattr(prune, "ROUNDS", 1)
    main(capsys, whole["alone"], "--leave-out", 2, "--out", tmp_path / "out")
    bert, _, _ = load_run(whole["alone"])
    prune.activate_only(bert, dict(fusions(bert)), {0: ["rte"], 1: []})
    with torch.no_grad():
        assert (bert(IDS) - load_run(tmp_path / "out")[0](IDS)).abs().max() < 1e-5


def test_the_speeds_take_turns(whole, monkeypatch):
    """Every form of every size once a round, after one round that is not counted, at the right
    size."""
    seen = []

    def seconds(bert, inputs, dtype):
        count = {len(fusion.adapter_names) - len(fusion.masked) for _, fusion in fusions(bert)}
        seen.append((type(fusions(bert)[0][1]).__name__, *count))
        return 1 / len(seen)

    bert, head, config = load_run(whole["one"])
    task, split = load_run_split(whole["one"], bert, config)
    names = config["adapters"]
    settings = [{0: names[:k], 1: names[-k:]} for k in (3, 2, 1)]
    monkeypatch.setattr(prune, "seconds", seconds)
    rows = prune.measure(bert, head, config, task, split, settings, torch.float32)
    turn = [(form, k) for k in (3, 2, 1) for form in ("Fusion", "FoldedFusion")]
    assert seen == turn * (1 + prune.ROUNDS)
    assert rows[1]["folded"] == [32 * (6 * i + 4) for i in range(1, 1 + prune.ROUNDS)]
    assert (
        prune.speed_up({"speed": [2, 30, 2]}, {"speed": [1, 10, 2]}, "speed") == 2
    )  # of each round, not of the medians
    lines = list(
        prune.table(
            [{**row, "k": k, "left_out": []} for row, k in zip(rows, (3, 2, 1), strict=True)]
        )
    )
    assert len(lines) == 4 and len({len(line) for line in lines}) == 1


def test_the_picture_is_legible(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(prune.plt, "close", kept.append)
    for N, left_out in ((16, [1, 2, 12]), (40, [])):
        rows = [{"k": N, "left_out": []}] * bool(left_out) + [
            {"k": k, "left_out": left_out} for k in range(N, 0, -1)
        ]
        rows = [
            {
                **row,
                "accuracy": 0.7,
                "speed": [9 / row["k"], 10 / row["k"]],
                "folded": [9 / row["k"]] * 2,
            }
            for row in rows
        ]
        prune.draw(
            rows, 1, 400, "$x_$ and a long name of a run, longer than many", tmp_path / "a.png"
        )
        box, (width, height) = kept[-1].get_tightbbox(), kept[-1].get_size_inches()
        assert (
            0 <= box.x0 and box.x1 <= width and 0 <= box.y0 and box.y1 <= height
        )  # no label is cut
        styles = {
            line.get_linestyle() for line in kept[-1].axes[1].lines if len(line.get_xdata()) == N
        }
        assert {"-", "--"} <= styles  # told apart without colour
    monkeypatch.undo()
    for figure in kept:
        plt.close(figure)


def test_errors(whole, runs, launch, data_dir, tmp_path, capsys, monkeypatch):
    options = ["--reduction-factor", 4, "--epochs", 1]
    launch(
        "--stage",
        "adapter",
        "--task",
        "rte",
        "--adapter",
        "bapna",
        *options,
        "--out",
        tmp_path / "bapna",
    )
    path = tmp_path / "bapna" / "adapter_config.json"
    values = json.loads(path.read_text())
    path.write_text(
        json.dumps(
            {**values, "name": "other", "config": {**values["config"], "original_ln_before": False}}
        )
    )
    adapters = ["--adapters", runs / "sst2", tmp_path / "bapna"]
    launch("--stage", "fusion", "--task", "rte", *adapters, *options, "--out", tmp_path / "mixed")
    shutil.copytree(data_dir / "rte", tmp_path / "data" / "rte")
    (tmp_path / "data" / "rte" / "train.jsonl").unlink()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    run, keep = whole["one"], ["--keep", 2]
    for arguments, say in (
        ([run], "--keep, --leave-out, or both"),
        ([run, "--keep", 0], "--keep must be in 1 .. 3"),
        ([run, "--keep", 4], "--keep must be in 1 .. 3"),
        ([run, "--keep", "all"], "--keep"),
        ([run, "--leave-out", 0], "layers with adapters are 1, 2"),
        ([run, "--leave-out", 3], "layers with adapters are 1, 2"),
        ([run, "--leave-out", 1, 2], "no layer with adapters"),
        ([run, *keep, "--limit", 0], "--limit"),
        ([run, *keep, "--out", tmp_path / "full"], "already there"),
        ([run, *keep, "--out", tmp_path / "full" / "file"], "already there"),
        ([run, *keep, "--out", run], "already there"),
        ([run, *keep, "--model", tmp_path], str(tmp_path)),
        ([run, *keep, "--data-dir", tmp_path / "data"], "no train split"),
        ([runs / "rte", *keep], "is of --stage adapter"),
        ([tmp_path, *keep], "no finished run"),
        ([tmp_path / "mixed", "--keep", 1], "the last one decides for all"),
    ):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(SystemExit) as exit:
            prune.main(
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
        assert exit.value.code == 2 and error.startswith("prune.py: ") and error.count("\n") == 1, (
            error
        )
        assert say in error, error
        assert sorted(tmp_path.rglob("*")) == before

    monkeypatch.setattr(prune, "ROUNDS", 1)  # nothing half-written

    for error, status, say in (
        (OSError("No space left on device"), 2, "No space left"),
        (KeyboardInterrupt, 130, "interrupted"),
    ):
        monkeypatch.setattr(prune, "draw", Mock(side_effect=error))
        with pytest.raises(SystemExit) as exit:
            prune.main([str(run), "--keep", "2", "--out", str(tmp_path / "out"), "--device", "cpu"])
        output = capsys.readouterr().err
        assert exit.value.code == status and say in output and output.count("\n") == 1
        assert sorted(tmp_path.rglob("*")) == before
