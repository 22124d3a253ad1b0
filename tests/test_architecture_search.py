"""experiments.architecture_search. Most runs here are of a stand-in for train.py, which takes no
time (fake_grid.py)."""

import csv
import json

import pytest

import fake_grid
import train
from adapter import ADAPTERS
from conftest import cli
from experiments import architecture_search as search
from experiments import grid, report
from experiments.load_run import load_run


@pytest.fixture
def run(encoder, tmp_path, monkeypatch):
    """run("--seeds 0 1", scores={word of a command: points}) -> the exit status of a search on one
    task at two reduction factors. It draws nothing, unless run.draws is True."""
    monkeypatch.setattr(grid, "result_of", fake_grid.result_of)
    fake = fake_grid.Fake(search, tmp_path, encoder)
    draw = search.figure
    monkeypatch.setattr(search, "figure", lambda *values: fake.draws and draw(*values))

    def run(text="", scores=None, tasks=("big",)):
        fake.write("scores", json.dumps(scores or {}))
        own, _, rest = text.partition("-- ")
        return fake(f"{own} --jobs 4 --reduction-factors 2 8 -- {rest}", tasks=list(tasks))

    fake.draws, fake.run = False, run
    fake.text = lambda: (fake.out / "search.md").read_text()
    return fake


def rows_of(out):
    with open(out / "search.csv", newline="") as file:
        return list(csv.DictReader(file))


def chains(steps=tuple(search.STEPS), best=()):
    """Every (step, option, configuration) that a search can come to, whatever wins."""
    if steps:
        for option, config in search.options_of(steps[0], dict(best)).items():
            yield steps[0], option, config
            yield from chains(steps[1:], {**dict(best), **search.sets(steps[0], option)})


def test_the_options_are_the_papers():
    """In the end everything but the sizes can be come to, and every configuration has a name."""
    assert [*search.PAPERS.values()] == ["top", "before_after", "none", "f", "relu"]
    assert next(config for _, _, config in chains()) == ADAPTERS["pfeiffer"]()
    # after the paper's outcome, and where the adapter has a LayerNorm of its own
    assert [len(search.options_of(step, {})) for step in search.STEPS] == [3, 5, 4, 3, 3]
    assert "inside" in search.options_of("residual", {"ln_after": True})
    assert "sum" not in search.options_of("residual", {"original_ln_before": False})
    configs = {config for *_, config in chains()}
    assert len({tuple(search.changes(config)) for config in configs}) == len(configs) > 300


SCORES = """mh_adapter=true 0.1 output_adapter=false -0.04 original_ln_before=false 0.02
    ln_after=true 0.05 ln_before=true -0.01 adapter_residual_before_ln=true 0.01
    non_linearity=swish -0.005 non_linearity=leakyrelu -0.001 8 0.03 full 0.2""".split()


def winners(run):
    """Of the steps, as search.md prints them in bold"""
    return [line.split("**")[1] for line in run.text().splitlines() if line.startswith("| **")]


def test_each_step_goes_on_from_the_best(run):
    scores = dict(zip(SCORES[::2], map(float, SCORES[1::2]), strict=True))
    assert run.run(scores=scores) == 0
    best = ["both", "after", "after", "before the new LayerNorm", "relu (the paper's)"]
    assert winners(run) == best
    assert "Full fine-tuning: 70.00." in run.text()
    assert "| **both** | 60.00 | 63.00 | 61.50 |\n" in run.text()
    words = "mh_adapter=true original_ln_before=false ln_after=true adapter_residual_before_ln=true"
    assert all({*words.split()} <= {*name.split("-")} for name in run.log()[-3:])
    rows = rows_of(run.out)
    found = {(r["step"], r["option"], r["reduction_factor"]): r["accuracy"] for r in rows}
    swish = 0.5 + 0.1 + 0.02 + 0.05 + 0.01 + 0.03 - 0.005
    assert float(found["non_linearity", "swish", "8"]) == pytest.approx(swish)
    assert found["full", "full", ""] == "0.700000"


def test_what_diverges_has_lost(run, capsys, monkeypatch):
    """Otherwise all is equal, and ends as in the paper. The figure: a curve for each option, told
    apart without colour, over the reduction factors on a logarithmic axis, and a line."""
    shown, save = [], report.save_figure
    monkeypatch.setattr(report, "save_figure", lambda *v: (shown.append(v[0]), save(*v)))
    run.draws, reason = True, "the loss is nan in epoch 1: stopped, no epoch was finished"
    run.write("fail", f"big-mh_adapter=true-2: {reason}")
    assert run.run("--seeds 0 1", scores={"8": 0.1, "full": 0.2}) == 1
    said, text, log = capsys.readouterr().out, run.text(), run.log()
    assert f"failed: big-mh_adapter=true-2-0: train.py: {reason}" in said
    paper = [label for label, _ in (search.STEPS[s][o] for s, o in search.PAPERS.items())]
    assert winners(run) == [f"{label} (the paper's)" for label in paper]
    assert "| both | – | 60.00 ± 0.00 | – |" in text
    assert str(run.data) not in text and str(run.out) not in text
    # 3 positions, 4 more of BERT's LayerNorms, 3 new, 2 residuals, 2 non-linearities, 3 extras
    assert len(log) == len(set(log)) == (3 + 4 + 3 + 2 + 2 + 3) * 2 * 2 + 2
    assert len(rows_of(run.out)) == (3 + 5 + 4 + 3 + 3 + 3) * 2 * 2 + 2 - 2

    assert "(big.png)" in text and (run.out / "big.png").read_bytes().startswith(b"\x89PNG")
    assert [len(axes.lines) - 1 for axes in shown[-1].axes] == [3, 5, 4, 3, 3, 3]
    for axes in shown[-1].axes:
        line, *curves = axes.lines
        assert axes.get_xscale() == "log" and list(line.get_ydata()) == [70, 70]
        assert len({curve.get_marker() for curve in curves}) == len(curves)
        for curve in curves:  # the diverged one has one point
            assert list(curve.get_xdata()) == [2, 8]
            assert str(curve.get_ydata(orig=False)) in ("[50. 60.]", "[nan 60.]")


def test_a_failed_run_is_tried_again(run, capsys):
    """Nothing is built on a step that lacks a run."""
    run.write("fail", "big-pfeiffer-2: the disk is full")
    assert run.run(tasks=("big", "small")) == 1
    assert "failed: big-pfeiffer-2-0: train.py: the disk is full" in capsys.readouterr().out
    found = {row["step"] for row in rows_of(run.out) if row["task"] == "big"}
    assert found == {"position", "full", "extras"}
    run.write("fail")
    before = len(run.log())
    assert run.run(tasks=("big", "small")) == 0
    assert {(row["task"], row["step"]) for row in rows_of(run.out)} == {
        (task, step) for task in ("big", "small") for step in (*search.TITLES, "full")
    }
    assert all(name.startswith("big-") for name in run.log()[before:])


def test_a_search_for_real(encoder, data_dir, tmp_path, monkeypatch):
    """Every run is train.py's own, but in this process."""

    def here(cells, options):
        for cell in cells:
            if not grid.result_of(cell, options):
                train.main([*cell.command, "--resume"])
        return grid.finished(cells, options), {}

    monkeypatch.setattr(grid, "run", here)
    places = {"model": encoder, "data_dir": data_dir, "out": tmp_path / "real"}
    words = cli("--tasks sst2 --reduction-factors 8", **places)
    search.main([*words, *"-- --device cpu --epochs 1 --lr 5e-3".split()])
    names = {path.name for path in (tmp_path / "real" / "runs").iterdir()}
    for _, _, config in chains():
        if (name := "-".join(["sst2", *(search.changes(config) or ["pfeiffer"]), "8-0"])) in names:
            bert, _, _ = load_run(tmp_path / "real" / "runs" / name)
            slots = [slot.adapters for _, slot in bert.slots() if "sst2" in slot.adapters]
            made = search.changes(slots[0]["sst2"].config)
            assert {*made} == {*search.changes(config), "reduction_factor=8"}
            assert len(slots) == 2 * (config.mh_adapter + config.output_adapter)
    rows, best = rows_of(tmp_path / "real"), {}
    for step in search.STEPS:  # the search by hand
        found = {row["option"]: float(row["accuracy"]) for row in rows if row["step"] == step}
        assert list(found) == list(search.options_of(step, best))
        best |= search.sets(step, max(found, key=found.get))
    parameters = {row["option"]: int(row["trained_parameters"]) for row in rows}
    order = "full houlsby houlsby_adapters bapna top".split()
    sizes = [parameters[name] for name in order]
    assert sizes == sorted(sizes, reverse=True) and len({*sizes}) == 5
