"""experiments.publish: a folder ready for upload, and a card that says what is in it."""

import re

from conftest import cli, write_rows
from experiments import publish
from formats.files import read_json


def unescaped(text):
    return re.sub(r"&#(\d+);", lambda found: chr(int(found[1])), text)


LABELS = ["<img src=x onerror=alert(1)>", "</script>", "![a](https://b) | `c`\n## d", "not_so"]


def test_the_card_says_what_is_known(launch, tmp_path):
    """Neither HTML nor Markdown sees anything in texts from data that it obeys."""
    rows, name = [{"text_a": f"cat {i}", "label": LABELS[i % 4]} for i in range(16)], "google/bert"
    for split in ("train", "validation"):
        write_rows(tmp_path / "own" / f"{split}.jsonl", rows)
    words = "--stage adapter --task own --epochs 1 --adapter-config ln_after=true"
    metrics = launch(f"{words} non_linearity=gelu", data_dir=tmp_path, out=tmp_path / "run")
    publish.main(cli(f"{tmp_path}/run --encoder {name} --repo me/it", out=tmp_path / "out"))
    card = (tmp_path / "out" / "README.md").read_text()
    for text in (
        f"base_model: {name}",
        'Adapter (pfeiffer, reduction_factor 16, ln_after true, non_linearity "gelu")',
        f"| macro_f1 there | {metrics['macro_f1']:.4f} |",
    ):
        assert text in unescaped(card)
    assert read_json(tmp_path / "out" / "adapter_config.json")["model_name"] == name
    assert not re.search("<[a-z/!]", card)
    (line,) = re.findall(r"\| task \| `own`: (.*) \|\n", card)
    assert not re.search(r"[][()<>!`|\\*#~:/]", re.sub(r"&#\d+;", "", line))
    assert all(f'"{label}"' in unescaped(line) for label in LABELS)
