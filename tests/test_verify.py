"""python -m experiments.verify, without a network and without its steps."""

import sys

import pytest

from experiments import verify
from formats.files import read_json

FILE = """def test_right(record_property):
    record_property("org/data main", "{commit}")


def test_order():
    assert [1, 0] == [0, 1], "org/data has the labels [1, 0]"
"""


def test_what_fails_is_named(tmp_path, monkeypatch, capsys):
    """The other steps are taken all the same; a commit that has changed since is said."""
    assert verify.main(["--plan"]) is None
    assert "  fusion_st_a-cb-2: train --stage fusion" in capsys.readouterr().out
    monkeypatch.setattr(verify, "OUT", tmp_path)
    monkeypatch.setattr(verify, "RESULTS", tmp_path / "results")
    file = tmp_path / "test_it.py"
    steps = {"hub": f"pytest {file}", "gpu": "none", "st_a_16-cb-0": "train --stage no --task cb"}
    monkeypatch.setattr(verify, "STEPS", steps)
    monkeypatch.setattr(verify, "GPUS", 0)
    for commit in ("one", "two"):
        file.write_text(FILE.format(commit=commit))
        with pytest.raises(SystemExit) as e:
            verify.main([])
        (path,), printed = (tmp_path / "results").glob("*.json"), capsys.readouterr().out
        found, checks = read_json(path), read_json(path)["checks"]
        assert e.value.code == 1 and found["machine"]["versions"]["python"] in sys.version
        outcomes = ["passed", "failed", "not checked", "failed"]
        assert [check["outcome"] for check in checks.values()] == outcomes
        assert "FAILED hub: test_order: AssertionError: org/data has the labels [1, 0]" in printed
        assert "FAILED st_a_16-cb-0: train.py: " in printed and "NOT CHECKED gpu: " in printed
        assert ("moved: {'org/data main': 'one'}" in printed) == (commit == "two")
