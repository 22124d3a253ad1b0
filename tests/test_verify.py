"""python -m experiments.verify, without a network and without its steps."""

import pytest

from experiments import verify
from formats.files import read_json

FILE = """def test_right():
    pass


def test_order():
    assert [1, 0] == [0, 1], "org/data has the labels [1, 0]"
"""


def test_what_fails_is_named(tmp_path, monkeypatch, capsys):
    """The other steps are taken all the same."""
    monkeypatch.setattr(verify, "OUT", tmp_path)
    monkeypatch.setattr(verify, "RESULTS", tmp_path / "results")
    file = tmp_path / "test_it.py"
    file.write_text(FILE)
    steps = {"hub": f"pytest {file}", "gpu": "none", "st_a_16-cb-0": "train --stage no --task cb"}
    monkeypatch.setattr(verify, "STEPS", steps)
    monkeypatch.setattr(verify, "GPUS", 0)
    with pytest.raises(SystemExit, match="True"):  # exit status 1
        verify.main([])
    (path,), printed = (tmp_path / "results").glob("*.json"), capsys.readouterr().out
    outcomes = [check["outcome"] for check in read_json(path)["checks"].values()]
    assert outcomes == ["passed", "failed", "not checked", "failed"]
    assert "FAILED hub: test_order: AssertionError: org/data has the labels [1, 0]" in printed
    assert "FAILED st_a_16-cb-0: train.py: " in printed and "NOT CHECKED gpu: " in printed
