"""experiments.publish: a folder ready for upload, and a card that says what is in it."""

import re
from html.parser import HTMLParser

import pytest
import torch
from safetensors.torch import load_file

from conftest import cli, write_rows
from experiments import publish
from formats.files import read_json


@pytest.mark.parametrize("run", ["rte", "pick", "fusion-rte"])
def test_published_folder(runs, tmp_path, capsys, monkeypatch, encoder, run):
    monkeypatch.chdir(tmp_path)
    publish.main([str(runs / run), "--encoder", encoder.name])
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
    if fusion:
        assert {path.name for path in (folder / "adapters").iterdir()} == {"pick", "rte", "sst2"}
    card = (folder / "README.md").read_text()
    assert {"- adapters", "- bert"} <= set(card.splitlines())
    labels = "3 choices" if run == "pick" else '"entailment", "not_entailment"'
    assert labels in card and encoder.name in card


def test_the_card_says_what_is_known(launch, tmp_path):
    run, name = tmp_path / "run", "google-bert/bert-base-uncased"
    words = "--stage adapter --task rte --epochs 1 --adapter-config ln_after=true"
    metrics = launch(f"{words} non_linearity=gelu", out=run)
    publish.main([str(run), *cli(f"--encoder {name} --repo me/it", out=tmp_path / "out")])
    card = unescaped((tmp_path / "out" / "README.md").read_text())
    for text in f"""
base_model: "{name}"
snapshot_download("me/it")
datasets: ["nyu-mll/glue"]
Adapter (pfeiffer, reduction_factor 16, ln_after true, non_linearity "gelu")
{metrics["accuracy"]:.4f}, 40 examples
| matthews there | {metrics["matthews"]:.4f} |
96 examples, the best of
""".strip().splitlines():
        assert text in card
    assert read_json(tmp_path / "out" / "adapter_config.json")["model_name"] == name


def unescaped(text):
    return re.sub(r"&#(\d+);", lambda found: chr(int(found[1])), text)


LABELS = ["<img src=x onerror=alert(1)>", "</script>", "![a](https://b) | `c`\n## d", "not_so"]


def test_labels_from_data_are_text_in_the_card(launch, tmp_path):
    """Neither HTML nor Markdown sees anything in them that it obeys."""
    rows = [{"text_a": f"cat {i}", "label": LABELS[i % 4]} for i in range(16)]
    for split in ("train", "validation"):
        write_rows(tmp_path / "own" / f"{split}.jsonl", rows)
    launch("--stage adapter --task own --epochs 1", data_dir=tmp_path, out=tmp_path / "run")
    publish.main([str(tmp_path / "run"), *cli("--encoder tiny", out=tmp_path / "out")])
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
    head, norms = tmp_path / "head", tmp_path / "norms"
    launch("--stage head --task rte --epochs 1", out=head)
    launch("--stage adapter --task rte --epochs 1 --adapter houlsby_recipe", out=norms)
    for message, run, *words in (
        ("--stage head", head),
        ("AdapterHub's library has no adapters like rte", norms),
        ("say with --encoder", runs / "rte"),  # it was a local directory
        ("is already there", runs / "rte", "--out", head),
        ("is no name for", runs / "rte", "--encoder", "tiny", "--repo", "a\nb"),
        ("is no name for", runs / "rte", "--encoder", "<script>"),
    ):
        words = [run, "--out", tmp_path / "out", *words]
        refused(words, message, name="publish.py", main=publish.main)
    assert {path.name for path in tmp_path.iterdir()} == {"head", "norms"}
