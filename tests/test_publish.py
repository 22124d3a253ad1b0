"""experiments.publish: a folder ready for upload, and a card that says what is in it."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from experiments import publish


@pytest.mark.parametrize("run", ["rte", "pick", "fusion-rte"])
def test_published_folder(runs, tmp_path, capsys, monkeypatch, encoder, run):
    monkeypatch.chdir(tmp_path)
    publish.main([str(runs / run), "--encoder", encoder.name, "--anyway"])
    assert "published" in capsys.readouterr().out
    folder, repository = (
        tmp_path / "published" / run,
        {"README.md", "head_config.json", "model_head.safetensors"},
    )
    kind = "adapter_fusion_config.json" if run == "fusion-rte" else "adapter_config.json"
    expected = repository | (
        {kind, "model_adapter_fusion.safetensors", "adapters"}
        if run == "fusion-rte"
        else {kind, "adapter.safetensors"}
    )
    assert {path.name for path in folder.iterdir()} == expected
    assert [path.name for path in folder.parent.iterdir()] == [run]
    for path in folder.rglob("*.safetensors"):
        same, original = load_file(path), load_file(runs / run / path.relative_to(folder))
        assert same.keys() == original.keys() and all(
            torch.equal(same[name], original[name]) for name in same
        )
    for path in (path for path in folder.rglob("*") if path.suffix in (".json", ".md")):
        assert str(encoder) not in path.read_text() and str(runs) not in path.read_text()
    metrics, card = (
        json.loads((runs / run / "metrics.json").read_text()),
        (folder / "README.md").read_text(),
    )
    tag = {"pick": "adapterhub:pick"}.get(run, "adapterhub:nli/rte")
    front = card.split("---\n")[1].splitlines()
    assert card.startswith("---\n") and {f'- "{tag}"', "- adapters", "- bert"} <= set(front)
    assert (
        f"{metrics['accuracy']:.4f}, {metrics['dev_examples']} examples" in card
        and encoder.name in card
    )
    if run != "pick":
        assert '"entailment", "not_entailment"' in card
    if run == "fusion-rte":
        assert sorted(path.name for path in (folder / "adapters").iterdir()) == [
            "pick",
            "rte",
            "sst2",
        ]


def test_a_card_names_changes_of_the_architecture(launch, tmp_path, encoder):
    changes = ["--adapter-config", "ln_after=true", "non_linearity=gelu"]
    launch(
        "--stage", "adapter", "--task", "rte", "--epochs", 1, *changes, "--out", tmp_path / "run"
    )
    publish.publish(tmp_path / "run", tmp_path / "out", "USER/it", str(encoder), anyway=True)
    assert (
        '(pfeiffer, reduction factor 16, ln_after true, non_linearity "gelu")'
        in (tmp_path / "out" / "README.md").read_text()
    )


def test_publishing_refuses(runs, launch, tmp_path, capsys):
    def fails(*arguments, say):
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        with pytest.raises(SystemExit) as exit:
            publish.main([str(argument) for argument in arguments])
        error = capsys.readouterr().err
        assert (
            exit.value.code == 2
            and error.count("\n") == 1
            and error.startswith("publish.py: ")
            and say in error
        )
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before

    out = tmp_path / "out"
    fails(runs / "none", "--out", out, say="no finished run")
    launch("--stage", "head", "--task", "rte", "--epochs", 1, "--out", tmp_path / "head")
    fails(tmp_path / "head", "--out", out, say="--stage head")
    norms = ["--adapter-config", "layer_norms=true", "--out", tmp_path / "norms"]
    launch("--stage", "adapter", "--task", "rte", "--epochs", 1, *norms)
    fails(tmp_path / "norms", "--out", out, say="AdapterHub's library has no adapters like rte")
    run = shutil.copytree(runs / "rte", tmp_path / "run")
    fails(run, "--out", out, say="--encoder")  # it was a local directory
    given = ["--encoder", "tiny", "--anyway"]
    fails(run, "--out", run, "--overwrite", say="the run itself")
    fails(run, "--out", run / "config.json", say="a file")
    fails(run, "--out", tmp_path / "head", say="not empty")
    fails(
        run, "--out", tmp_path / "head", "--overwrite", say="not a folder that this command wrote"
    )
    fails(run, "--out", out, "--model", tmp_path / "nowhere", say="no directory")
    fails(run, "--out", out, "--repo", "a\nb", *given, say="unprintable")
    metrics = (run / "metrics.json").read_text()
    (run / "metrics.json").write_text("{}")
    fails(run, "--out", out, *given, say="metrics.json")
    nothing = {**json.loads(metrics), "accuracy": 0.5, "majority_class_accuracy": 0.5}
    (run / "metrics.json").write_text(json.dumps(nothing))
    fails(run, "--out", out, *given[:2], say="learned nothing")
    (run / "metrics.json").write_text(metrics)
    weights = (run / "adapter.safetensors").read_bytes()
    (run / "adapter.safetensors").write_bytes(weights[:-100])
    fails(run, "--out", out, say="adapter.safetensors")
    (run / "adapter.safetensors").write_bytes(weights)
    assert not out.exists()

    publish.main(
        [
            str(run),
            "--out",
            str(out),
            "--encoder",
            "google-bert/bert-base-uncased",
            "--repo",
            "me/it",
            "--anyway",
            *("--license", "cc-by-4.0", "--code", "https://example.org/code"),
        ]
    )
    card = (out / "README.md").read_text()
    assert (
        'base_model: "google-bert/bert-base-uncased"' in card
        and 'snapshot_download("me/it")' in card
    )
    front = card.split("---\n")[1]
    for line in (
        'license: "cc-by-4.0"',
        'language: "en"',
        'datasets:\n- "nyu-mll/glue"',
        "metrics:\n- accuracy\n- f1\n- matthews_correlation\n",
    ):
        assert line in front
    found = json.loads(metrics)
    assert f"| Matthews' correlation on the development set | {found['matthews']:.4f} |" in card
    assert f"| macro-F1 on the development set | {found['macro_f1']:.4f} |" in card
    assert "<https://example.org/code>" in card and "96 examples, the best of" in card
    assert (
        json.loads((out / "adapter_config.json").read_text())["model_name"]
        == "google-bert/bert-base-uncased"
    )
    fails(run, "--out", out, say="not empty")
    (out / ".git").mkdir()
    (out / ".git" / "config").write_text("mine")
    publish.main([str(runs / "fusion-rte"), "--out", str(out), "--overwrite", *given])
    assert (out / ".git" / "config").read_text() == "mine" and not (
        out / "adapter_config.json"
    ).exists()
    assert (out / "adapters/sst2/adapter.safetensors").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head", "norms", "out", "run"]
