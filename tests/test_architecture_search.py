"""experiments.architecture_search. Most runs here are of a stand-in for train.py, which takes no
time (fake_grid.py)."""

import json
from collections import Counter
from dataclasses import replace

import pandas as pd
import pytest

import fake_grid
from conftest import cli
from experiments import architecture_search as search
from experiments import grid
from experiments.load_run import load_run

SCORES = {
    **{"mh_adapter=true": 0.1, "output_adapter=false": 0.2, "original_ln_before=false": 0.02},
    **{"ln_after=true": 0.05, "ln_before=true": -0.01, "adapter_residual_before_ln=true": 0.01},
    **{"non_linearity=swish": -0.005, "non_linearity=leakyrelu": -0.001, "8": 0.03, "full": 0.15},
}


def test_each_step_goes_on_from_the_best(encoder, tmp_path, capsys, monkeypatch):
    """Nothing is built on a step that lacks a run, which the same command tries again; but what
    diverges has lost, though it was ahead here."""
    words = "--seeds 0 1 --jobs 4"
    monkeypatch.setattr(search, "REDUCTION_FACTORS", (2.0, 8.0))
    run = fake_grid.Fake(search, tmp_path, encoder)
    run.write("scores", json.dumps(SCORES))
    bottom, reason = "big-mh_adapter=true-output_adapter=false-2", "nothing is kept"
    run.write("fail", f"{bottom}: the disk is full")
    assert run(words, tasks=["big"]) == 1 and not (run.out / "search.csv").exists()
    run.write("fail", f"{bottom}: the loss is nan, {reason}")
    assert run(words, tasks=["big"]) == 1
    assert f"failed: {bottom}-0: train.py: the loss is nan, {reason}" in capsys.readouterr().out
    text, rows = (run.out / "search.md").read_text(), pd.read_csv(run.out / "search.csv")
    best = ["both", "after", "after", "before the new LayerNorm", "relu (the paper's)"]
    winners = [line.split("**")[1] for line in text.splitlines() if line.startswith("| **")]
    assert winners == best and "Full fine-tuning: 65.00 ± 0.00." in text
    line = next(line for line in text.splitlines() if "**both**" in line)
    assert [*map(str.strip, line.split("|"))][2:5] == ["60.00 ± 0.00", "63.00 ± 0.00", "61.50"]
    is_swish = (rows["option"] == "swish") & (rows["reduction_factor"] == 8) & (rows["seed"] == 1)
    swish = 0.5 + 0.1 + 0.02 + 0.05 + 0.01 + 0.03 - 0.005  # upon what was best before
    assert rows[is_swish]["accuracy"].tolist() == [pytest.approx(swish)]
    # an architecture that comes up again is not run again
    twice = [name for name, count in Counter(run.log()).items() if count > 1]
    assert sorted(twice) == [f"{bottom}-0", f"{bottom}-1"]
    assert (run.out / "big.png").stat().st_size > 5000


def test_a_search_for_real(encoder, data_dir, tmp_path, monkeypatch):
    """Every run is train.py's own, but in this process; its architecture is that of its name."""
    monkeypatch.setattr(grid, "run", fake_grid.run_here)
    monkeypatch.setattr(search, "REDUCTION_FACTORS", (8.0,))
    places = {"model": encoder, "data_dir": data_dir, "out": tmp_path}
    words = cli("--tasks sst2 -- --device cpu --epochs 1 --lr 5e-3")
    search.main([*cli(**places), *words, "--limit-train", "32"])
    for out in tmp_path.glob("runs/sst2-*"):
        slots = load_run(out).bert.slots.values()
        if slots := [slot.adapters["sst2"] for slot in slots if slot.adapters]:
            config = replace(slots[0].config, reduction_factor=16)
            words = search.changes(config) or ["pfeiffer"]
            assert out.name == "-".join(["sst2", *words, "8", "0"])
            assert len(slots) == 2 * (config.mh_adapter + config.output_adapter)
    rows = pd.read_csv(tmp_path / "search.csv").set_index("option")["trained_parameters"]
    assert rows["both"] > rows["top only"] == rows["bottom only"]
