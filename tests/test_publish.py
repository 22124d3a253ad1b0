"""experiments.publish: a folder ready for upload, and a card that says what is in it."""

import re
import shutil
from html.parser import HTMLParser

import pytest
import torch
from safetensors.torch import load_file

from conftest import cli, write_rows
from experiments import publish
from formats.files import read_json, write_json


@pytest.mark.parametrize("run", ["rte", "pick", "fusion-rte"])
def test_published_folder(runs, tmp_path, capsys, monkeypatch, encoder, run):
    monkeypatch.chdir(tmp_path)
    publish.main([str(runs / run), "--encoder", encoder.name, "--anyway"])
    assert "published" in capsys.readouterr().out
    folder, fusion = tmp_path / "published" / run, run == "fusion-rte"
    expected = "README.md head_config.json model_head.safetensors".split()
    of_fusion = "adapter_fusion_config.json model_adapter_fusion.safetensors adapters".split()
    expected += of_fusion if fusion else ["adapter_config.json", "adapter.safetensors"]
    assert {path.name for path in folder.iterdir()} == set(expected)
    assert [path.name for path in folder.parent.iterdir()] == [run]
    for path in folder.rglob("*.safetensors"):
        same, original = load_file(path), load_file(runs / run / path.relative_to(folder))
        assert same.keys() == original.keys()
        assert all(torch.equal(same[name], original[name]) for name in same)
    for path in (path for path in folder.rglob("*") if path.suffix in (".json", ".md")):
        assert str(encoder) not in path.read_text() and str(runs) not in path.read_text()
    metrics = read_json(runs / run / "metrics.json")
    card = (folder / "README.md").read_text()
    tag = {"pick": "adapterhub:pick"}.get(run, "adapterhub:nli/rte")
    front = card.split("---\n")[1].splitlines()
    assert card.startswith("---\n") and {f'- "{tag}"', "- adapters", "- bert"} <= set(front)
    assert f"{metrics['accuracy']:.4f}, {metrics['dev_examples']} examples" in card
    labels = "3 choices" if run == "pick" else '"entailment", "not_entailment"'
    assert labels in card and encoder.name in card
    if fusion:
        assert {path.name for path in (folder / "adapters").iterdir()} == {"pick", "rte", "sst2"}


def test_a_card_names_changes_of_the_architecture(launch, tmp_path):
    words = "--stage adapter --task rte --epochs 1 --adapter-config ln_after=true"
    launch(f"{words} non_linearity=gelu", out=tmp_path / "run")
    publish.main([str(tmp_path / "run"), *cli("--encoder tiny --anyway", out=tmp_path / "out")])
    what = '(pfeiffer, reduction factor 16, ln_after true, non_linearity "gelu")'
    assert what in unescaped((tmp_path / "out" / "README.md").read_text())


def unescaped(text):
    return re.sub(r"&#(\d+);", lambda found: chr(int(found[1])), text)


LABELS = ["<img src=x onerror=alert(1)>", "</script>", "![a](https://b) | `c`\n## d", "not_so"]


def test_labels_from_data_are_text_in_the_card(launch, tmp_path):
    """Neither HTML nor Markdown sees anything in them that it obeys."""
    rows = [{"text_a": f"cat {i}", "label": LABELS[i % 4]} for i in range(16)]
    for split in ("train", "validation"):
        write_rows(tmp_path / "own" / f"{split}.jsonl", rows)
    launch("--stage adapter --task own --epochs 1", data_dir=tmp_path, out=tmp_path / "run")
    publish.main([str(tmp_path / "run"), *cli("--encoder tiny --anyway", out=tmp_path / "out")])
    card, tags = (tmp_path / "out" / "README.md").read_text(), []
    parser = HTMLParser()
    parser.handle_starttag = parser.handle_endtag = lambda tag, *attributes: tags.append(tag)
    parser.feed(card)
    assert tags == []
    (line,) = [line for line in card.splitlines() if line.startswith("| task |")]
    shown = line.removeprefix("| task | `own`: ").removesuffix(" |")
    assert not re.search(r"[][()<>!`|\\*#~:/]", re.sub(r"&#\d+;", "", shown))
    for label in LABELS:
        assert f'"{label}"' in unescaped(line)


def test_publishing_refuses(runs, launch, tmp_path, refused):
    def is_refused(message, *words):
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        refused(words, message, name="publish.py", main=publish.main)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before

    out, head, norms = tmp_path / "out", tmp_path / "head", tmp_path / "norms"
    run, tiny = shutil.copytree(runs / "rte", tmp_path / "run"), ["--encoder", "tiny", "--anyway"]
    launch("--stage head --task rte --epochs 1", out=head)
    launch("--stage adapter --task rte --epochs 1 --adapter-config layer_norms=true", out=norms)
    is_refused("--stage head", head, "--out", out)
    is_refused("AdapterHub's library has no adapters like rte", norms, "--out", out)
    is_refused("say with --encoder", run, "--out", out)  # it was a local directory
    is_refused("not empty", run, "--out", head)
    for place in (head, run):
        is_refused("not a folder that this command wrote", run, "--out", place, "--overwrite")
    is_refused("is no name for", run, "--out", out, "--repo", "a\nb", *tiny)
    is_refused("is no name for", run, "--out", out, "--code", "https://a.b/<script>", *tiny)
    metrics = read_json(run / "metrics.json")
    nothing = {"accuracy": 0.5, "majority_class_accuracy": 0.5}
    write_json(run / "metrics.json", metrics | nothing)
    is_refused("learned nothing", run, "--out", out, "--encoder", "tiny")
    assert not out.exists()


def test_the_card_says_what_is_known(runs, tmp_path):
    out, name = tmp_path / "out", "google-bert/bert-base-uncased"
    words = f"--encoder {name} --repo me/it --anyway --license cc-by-4.0"
    publish.main([str(runs / "rte"), *cli(words, out=out, code="https://example.org/code")])
    card, metrics = (out / "README.md").read_text(), read_json(runs / "rte" / "metrics.json")
    for text in f"""
base_model: "{name}"
snapshot_download("me/it")
license: "cc-by-4.0"
language: "en"
datasets: ["nyu-mll/glue"]
- matthews_correlation
| Matthews' correlation on the development set | {metrics["matthews"]:.4f} |
| macro-F1 on the development set | {metrics["macro_f1"]:.4f} |
<https://example.org/code>
96 examples, the best of
""".strip().splitlines():
        assert text in card
    assert read_json(out / "adapter_config.json")["model_name"] == name


def test_another_run_replaces_a_folder_but_not_what_else_is_in_it(runs, tmp_path):
    out, tiny = tmp_path / "out", ["--encoder", "tiny", "--anyway"]
    publish.main([str(runs / "rte"), "--out", str(out), *tiny])
    (out / ".git").mkdir()
    (out / ".git" / "config").write_text("mine")
    publish.main([str(runs / "fusion-rte"), "--out", str(out), "--overwrite", *tiny])
    assert (out / ".git" / "config").read_text() == "mine"
    assert not (out / "adapter_config.json").exists()
    assert (out / "adapters/sst2/adapter.safetensors").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
