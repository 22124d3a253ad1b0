"""What docs/python.md shows runs as it stands."""

import re
import shutil
from pathlib import Path

import matplotlib

import train

ROOT = Path(train.__file__).parent
PROGRAMS = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(encoding="utf-8"), re.DOTALL
)
matplotlib.use("Agg")


def test_a_finished_run(runs, tmp_path, monkeypatch, capsys):
    shutil.copytree(runs, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    names = {}
    for program in PROGRAMS[:2]:
        exec(program, names)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all("entailment" in line for line in lines[:2])
    assert (tmp_path / "fusion_weights.png").stat().st_size > 5000


def test_training(encoder, data_dir, tmp_path, monkeypatch):
    shutil.copytree(data_dir, tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(PROGRAMS[2].replace("google-bert/bert-base-uncased", str(encoder)), names)
    assert names["fusion"]["out"] == "runs/short/fusion"
    assert (tmp_path / "runs/short/fusion/metrics.json").is_file()
