"""python -m experiments.verify, without a network and without its steps."""

import sys

import pytest

from experiments import verify
from formats.files import read_json

FILE = """def test_right(record_property):
    record_property("org/data main", "0123abc")


def test_order():
    assert [1, 0] == [0, 1], "org/data has the labels [1, 0]"
"""


def test_what_fails_is_named(tmp_path, monkeypatch, capfd):
    """The other steps are taken all the same; the commits of the hub are kept."""
    assert verify.main(["--plan"]) is None
    assert "  table 1: experiments.tables --tasks rte" in capfd.readouterr().out
    monkeypatch.setattr(verify, "RESULTS", tmp_path / "results")
    file = tmp_path / "test_it.py"
    file.write_text(FILE)
    steps = {"hub": f"pytest {file}", "gpu": "none", "two": "train --stage no --task cb"}
    monkeypatch.setattr(verify, "STEPS", steps)
    monkeypatch.setattr(verify, "GPUS", 0)
    with pytest.raises(SystemExit) as e:
        verify.main([])
    (target,), printed = (tmp_path / "results").iterdir(), capfd.readouterr().out
    found = read_json(target / "verified.json")
    assert e.value.code == 1 and found["machine"]["versions"]["python"] in sys.version
    one, two, three = found["outcomes"].values()
    assert (one, three) == ("failed, exit status 1", "failed, exit status 2")
    assert two.startswith("not checked, ") and f"gpu: {two}" in printed
    assert "AssertionError: org/data has the labels [1, 0]" in printed
    assert 'name="org/data main" value="0123abc"' in (target / "hub.xml").read_text()
