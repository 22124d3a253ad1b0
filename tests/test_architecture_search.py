"""experiments.architecture_search. Most runs here are of a stand-in for train.py, which takes no
time."""

import contextlib
import csv
import io
import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from adapter import ADAPTERS, AdapterConfig
from conftest import command_line, thorough, write_rows
from experiments import architecture_search as search
from experiments import grid
from experiments.load_run import load_run
from runtime.options import configure

# Writes the metrics of a run: accuracy 0.5 and what FAKE/scores gives for each word of the command.
# FAKE/fail has lines "beginning of a run's name: why it fails", FAKE/log gets a line a run.
FAKE = """
import json, os, sys
fake, words = sys.argv[1], sys.argv[3:]
out = words[words.index("--out") + 1]
name = os.path.basename(out)
with open(fake + "/log", "a") as file:
    file.write(name + "\\n")
for line in open(fake + "/fail"):
    if name.startswith(line.split(": ")[0]):
        print("train.py: " + line.split(": ", 1)[1], file=sys.stderr)
        sys.exit(2)
scores = json.load(open(fake + "/scores"))
os.makedirs(out, exist_ok=True)
open(out + "/log.jsonl", "a").close()
accuracy = 0.5 + sum(scores.get(word, 0) for word in words)
result = {"seconds": 1.0, "accuracy": accuracy, "trained_parameters": len(words),
          "dev_examples": 40}
json.dump(result, open(out + "/metrics.json", "w"))
"""


@pytest.fixture
def run(encoder, tmp_path, monkeypatch):
    """run(...): the search with the stand-in on a tiny task -> its exit status. It draws nothing,
    unless run.draw()."""
    draw = search.figure
    monkeypatch.setattr(search, "figure", lambda *_: None)
    fake = tmp_path / "fake"
    fake.mkdir()
    (fake / "train.py").write_text(FAKE)
    (fake / "log").touch()
    (fake / "fail").touch()
    for task in ("one", "two"):
        for split in ("train", "validation"):
            write_rows(
                tmp_path / "data" / task / f"{split}.jsonl",
                [{"text_a": "a cat", "label": i % 2} for i in range(40)],
            )

    def run(*words, tasks=("one",), scores=()):
        (fake / "scores").write_text(json.dumps(dict(scores)))
        own, rest = grid.split([str(word) for word in words])
        try:
            return search.main(
                [
                    "--model",
                    str(encoder),
                    "--data-dir",
                    str(tmp_path / "data"),
                    "--tasks",
                    *tasks,
                    "--out",
                    str(run.out),
                    "--launch",
                    f"{sys.executable} -S {fake}/train.py {fake}",
                    "--jobs",
                    "4",
                    "--reduction-factors",
                    "2",
                    "8",
                    *own,
                    "--",
                    "--device",
                    "cpu",
                    *rest,
                ]
            )
        except SystemExit as e:
            return e.code

    run.out, run.fake, run.data = tmp_path / "out", fake, tmp_path / "data"
    run.draw = lambda: monkeypatch.setattr(search, "figure", draw)
    run.log = lambda: (fake / "log").read_text().split()
    run.rows = lambda: list(csv.DictReader(io.StringIO((run.out / "search.csv").read_text())))
    return run


def chains(steps=tuple(search.STEPS), best=()):
    """Every (step, option, AdapterConfig) that a search can come to, whatever wins."""
    if steps:
        for option, config in search.options_of(steps[0], dict(best))[0].items():
            yield steps[0], option, config
            yield from chains(steps[1:], {**dict(best), **search.STEPS[steps[0]][1][option][1]})


def test_the_options_are_the_papers():
    """Figure 5 and the legends of Figures 7 to 9; in the end everything but the sizes can be come
    to."""
    found = {}
    for step, option, config in chains():
        found.setdefault((step, option), []).append(config)
    expected = {
        ("position", "top"): "not c.mh_adapter and c.output_adapter",
        ("position", "bottom"): "c.mh_adapter and not c.output_adapter",
        ("position", "both"): "c.mh_adapter and c.output_adapter",
        ("pretrained", "before_after"): "c.original_ln_before and c.original_ln_after",
        (
            "pretrained",
            "before",
        ): "c.original_ln_before and not c.original_ln_after and c.residual_before_ln is True",
        (
            "pretrained",
            "before_ln",
        ): "c.original_ln_before and not c.original_ln_after and c.residual_before_ln is False",
        ("pretrained", "after"): "not c.original_ln_before and c.original_ln_after",
        ("pretrained", "none"): "not c.original_ln_before and not c.original_ln_after",
        ("new", "none"): "not c.ln_before and not c.ln_after",
        ("new", "before"): "c.ln_before and not c.ln_after",
        ("new", "after"): "not c.ln_before and c.ln_after",
        ("new", "before_after"): "c.ln_before and c.ln_after",
        ("residual", "f"): "c.residual_before_ln is True and not c.adapter_residual_before_ln",
        ("residual", "ln"): "c.residual_before_ln is False and c.original_ln_before",
        ("residual", "sum"): "c.residual_before_ln == 'post_add' and c.original_ln_before",
        ("residual", "inside"): "c.adapter_residual_before_ln and c.ln_after",
        **{
            ("non_linearity", name): f"c.non_linearity == {name!r}"
            for name in ("relu", "leakyrelu", "swish")
        },
    }
    assert found.keys() == expected.keys()
    for key, text in expected.items():
        assert all(eval(text, {"c": config}) for config in found[key]), key
    paper = [next(iter(options)) for _, options in search.STEPS.values()]
    assert paper == ["top", "before_after", "none", "f", "relu"]
    assert next(config for _, _, config in chains()) == AdapterConfig.pfeiffer()
    first = {
        "position": 3,
        "pretrained": 5,
        "new": 4,
        "residual": 3,
        "non_linearity": 3,
    }  # what follows the paper's outcome
    assert {step: len(search.options_of(step, {})[0]) for step in search.STEPS} == first


def test_a_name_is_one_architecture():
    names, configs = (
        {},
        {config for *_, config in chains()} | {config for _, config in search.EXTRAS.values()},
    )
    for config in configs:
        assert names.setdefault(search.architecture(config), config) == config
    assert len(names) == len(configs) and len(configs) > 300
    assert search.architecture(AdapterConfig.pfeiffer()) == "top-before_after-none-f-relu"
    assert search.architecture(AdapterConfig.bapna()) == "top-before-before-ln-relu"
    assert (
        search.architecture(search.EXTRAS["houlsby"][1]) == "both-after-none-f-layer_norms-houlsby"
    )


def test_train_makes_of_a_command_what_it_is_meant_to():
    args = search.arguments(
        ["--tasks", "rte", "--data-dir", "d", "--full-options", "--lr 1e-5", "--", "--lr", "1e-3"]
    )
    for config in [config for *_, config in chains()][::7] + [
        config for _, config in search.EXTRAS.values()
    ]:
        parsed = grid.parse(search.cell(args, "rte", 3, config, 8.0), Path("nowhere"))
        made = configure(ADAPTERS[parsed.adapter], parsed.reduction_factor, parsed.adapter_config)
        assert made == AdapterConfig(**{**vars(config), "reduction_factor": 8.0})
        assert (parsed.stage, parsed.task, parsed.seed, parsed.lr, parsed.data_dir) == (
            "adapter",
            "rte",
            3,
            1e-3,
            "d",
        )
    full = grid.parse(search.cell(args, "rte", 3), Path("nowhere"))
    assert (full.stage, full.lr, full.adapter_config) == ("full", 1e-5, {})


def winners(run):
    """{step: option} in the order of search.md, from what it prints in bold"""
    bold = [
        line.split("**")[1]
        for line in (run.out / "search.md").read_text().splitlines()
        if line.startswith("| **")
    ]
    return dict(zip(search.STEPS, bold, strict=False))


@thorough
def test_equal_options_end_as_in_the_paper(run, capsys):
    assert run("--seeds", 0, 1) == 0
    assert winners(run) == {
        "position": "top only",
        "pretrained": "before & after",
        "new": "none",
        "residual": "f",
        "non_linearity": "relu",
    }
    said, text = capsys.readouterr().out, (run.out / "search.md").read_text()
    assert "Best: top only, the same as bottom only. The paper's: top only, too." in text
    assert (
        "**What is left at the end is the paper's architecture**, `--adapter pfeiffer`: 50.00."
        in text
    )
    assert (
        "before the new LayerNorm is not run: adapter_residual_before_ln=true needs the "
        "new LayerNorm" in said
    )
    # 3 positions, 4 more of BERT's LayerNorms, 3 new, 2 residuals, 2 non-linearities, and Houlsby's
    # twice: Bapna's is there
    log = run.log()
    assert len(log) == len(set(log)) == (3 + 4 + 3 + 2 + 2 + 3) * 2 * 2 + 2
    assert len(run.rows()) == (3 + 5 + 4 + 3 + 3 + 3) * 2 * 2 + 2
    assert str(run.data) not in text and str(run.out) not in text
    before = {
        path.name: path.read_bytes() for path in run.out.iterdir() if path.suffix in (".md", ".csv")
    }
    assert run("--seeds", 0, 1) == 0 and run.log() == log  # nothing is run again
    assert {
        path.name: path.read_bytes() for path in run.out.iterdir() if path.suffix in (".md", ".csv")
    } == before


def test_each_step_goes_on_from_the_best(run, capsys):
    scores = {
        "mh_adapter=true": 0.1,
        "output_adapter=false": -0.04,
        "original_ln_before=false": 0.02,
        "ln_after=true": 0.05,
        "ln_before=true": -0.01,
        "adapter_residual_before_ln=true": 0.01,
        "non_linearity=swish": -0.005,
        "non_linearity=leakyrelu": -0.001,
        "8": 0.03,
        "full": 0.2,
    }
    assert run("--no-extras", scores=scores) == 0
    text = (run.out / "search.md").read_text()
    assert winners(run) == {
        "position": "both",
        "pretrained": "after",
        "new": "after",
        "residual": "before the new LayerNorm",
        "non_linearity": "relu",
    }
    assert (
        "Best: both, 4.00 points above bottom only. The paper's: top only, 10.00 points below."
        in text
    )
    assert (
        "Best: after, 1.00 points above before & after. The paper's: none, 5.00 points below."
        in text
    )
    assert (
        "Not run: LN(f + x). residual_before_ln=false takes LN(f + x), which "
        "original_ln_before=false leaves out." in text
    )
    assert (
        "Full fine-tuning: 70.00." in text
        and "One of the 40 development examples is 2.50 points." in text
    )
    assert "| **both** | 60.00 | 63.00 | 61.50 |" in text
    words = "mh_adapter=true original_ln_before=false ln_after=true adapter_residual_before_ln=true"
    assert (
        f"`--adapter pfeiffer --adapter-config {words}`: 69.50; the paper's architecture, "
        "`--adapter pfeiffer`: 51.50." in text
    )
    assert not any("houlsby" in name or "-swish-layer" in name for name in run.log())
    assert all(name.startswith("one-both-after-after-f-") for name in run.log()[-3:])
    found = {(row["step"], row["option"], row["reduction_factor"]): row for row in run.rows()}
    assert float(found["non_linearity", "swish", "8"]["accuracy"]) == pytest.approx(
        0.5 + 0.1 + 0.02 + 0.05 + 0.01 + 0.03 - 0.005
    )
    assert found["full", "full", ""]["accuracy"] == "0.700000"


@thorough
def test_the_residual_stays_what_the_second_step_has_chosen(run):
    """BERT's LayerNorm before, with the residual after it, wins: so it is until the step of the
    residual compares it with f."""
    scores = {
        "original_ln_after=false": 0.01,
        "residual_before_ln=false": 0.02,
        "original_ln_before=false": -0.1,
    }
    assert run("--no-extras", scores=scores) == 0
    assert (
        winners(run)["pretrained"] == "before, residual after it"
        and winners(run)["residual"] == "LN(f + x)"
    )
    assert {"one-top-before-before-ln-relu-2-0", "one-top-before-none-ln-swish-8-0"} <= set(
        run.log()
    )
    assert "one-top-before-before-f-relu-2-0" not in run.log()


@thorough
def test_what_diverges_has_lost(run, capsys):
    reason = "the loss is nan in epoch 1: stopped, no epoch was finished, nothing is kept"
    (run.fake / "fail").write_text(f"one-both-before_after-none-f-relu-2: {reason}")
    assert run("--no-extras", scores={"mh_adapter=true": 0.1, "output_adapter=false": -0.2}) == 1
    assert winners(run)["position"] == "top only" and len(winners(run)) == 5
    text = (run.out / "search.md").read_text()
    assert "The loss diverged in runs of: both. The paper's: top only, too." in text
    assert "| both | – | 60.00 | – |" in text
    assert (
        "failed: one-both-before_after-none-f-relu-2-0: the loss is nan" in capsys.readouterr().out
    )
    before = len(run.log())
    (run.fake / "fail").write_text(
        ""
    )  # it was the learning rate of an older version, say: then both wins, and all follows
    assert run("--no-extras", scores={"mh_adapter=true": 0.1, "output_adapter=false": -0.2}) == 0
    assert winners(run)["position"] == "both" and len(run.log()) == before + 1 + (4 + 3 + 2 + 2) * 2


def test_figures(run, monkeypatch):
    """One curve for each option, told apart without colour, over the reduction factors on a
    logarithmic axis, and a line."""
    shown = []
    monkeypatch.setattr(plt, "close", shown.append)
    (run.fake / "fail").write_text("one-both-before_after-none-f-relu-2: no epoch was finished")
    assert run("--seeds", 0, 1, scores={"8": 0.1, "full": 0.2}) == 1  # without drawing
    run.draw()
    assert run("--seeds", 0, 1) == 1
    for name in ("one.png", "one-2.png"):
        assert (run.out / name).read_bytes().startswith(b"\x89PNG") and f"({name})" in (
            run.out / "search.md"
        ).read_text()
    first, second = shown[-2:]
    assert [len(axes.containers) for axes in (*first.axes, *second.axes)] == [3, 5, 4, 3, 3, 3]
    for axes in (*first.axes, *second.axes):
        assert axes.get_xscale() == "log" and [
            tick.get_text() for tick in axes.get_xticklabels()
        ] == ["2", "8"]
        assert (
            list(axes.lines[0].get_ydata()) == [70, 70]
            and axes.lines[0].get_label() == "full fine-tuning"
        )
        curves = [curve.lines[0] for curve in axes.containers]
        assert len({(line.get_marker(), str(line._dash_pattern)) for line in curves}) == len(curves)
        assert len({line.get_marker() for line in curves}) == len(curves)
        for line in curves:
            assert list(zip(*line.get_data(), strict=True)) in ([(2, 50), (8, 60)], [(8, 60)])
        box = axes.get_legend().get_window_extent()  # in pixels, and inside the figure
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= first.bbox.x1 + 1
    assert [len(curve.lines[0].get_xdata()) for curve in first.axes[0].containers] == [
        2,
        2,
        1,
    ]  # the diverged one


def test_a_failure_stops_its_task_alone(run, capsys):
    (run.fake / "fail").write_text("one-bottom: the disk is full")
    assert run("--no-extras", tasks=("one", "two")) == 1
    said = capsys.readouterr().out
    assert "failed: one-bottom-before_after-none-f-relu-2-0: the disk is full" in said
    rows = run.rows()
    assert {row["step"] for row in rows if row["task"] == "one"} == {"position", "full"}
    assert {row["step"] for row in rows if row["task"] == "two"} == {*search.STEPS, "full"}
    (run.fake / "fail").write_text("")
    assert run("--no-extras", tasks=("one", "two")) == 0
    rows = run.rows()
    assert len({(row["task"], row["step"]) for row in rows}) == 2 * 6
    again = {name for name in run.log() if run.log().count(name) > 1}
    assert again == {f"one-bottom-before_after-none-f-relu-{factor}-0" for factor in (2, 8)}


@thorough
def test_another_command_is_told_apart(run, capsys):
    assert run("--no-extras") == 0
    log = run.log()
    assert run("--no-extras", "--", "--lr", "1e-3") == 2
    assert (
        "was made without --lr, and is now to be with --lr 1e-3" in capsys.readouterr().err
        and run.log() == log
    )
    assert run("--no-extras", "--full-options", "--lr 1e-3", "--overwrite") == 0
    assert run.log()[len(log) :] == ["one-full-0"]


def test_plan_writes_nothing(run, capsys):
    assert run("--plan", "--seeds", 0, 1, "--", "--limit-train", 10, "--epochs", 2) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(
        line.split()[:4] == ["one-top-before_after-none-f-swish-8-1", "10", "×", "2"]
        for line in lines
    )
    assert (
        "one (position), one (pretrained), one (new), one (residual), one (non_linearity)"
        in lines[-2]
    )
    assert (
        lines[-1].startswith(f"{(3 + 4 + 3 + 2 + 2 + 3) * 2 * 2 + 2} runs, at most")
        and not run.out.exists()
    )


@pytest.mark.parametrize(
    "words, say",
    [
        (
            ["--reduction-factors", "2", "64"],
            "--reduction-factors: 64 leaves no bottleneck in hidden size 32",
        ),
        (["--reduction-factors", "0.01"], "reduction_factor must be a number of at least 0.1"),
        (["--reduction-factors", "few"], "--reduction-factors"),
        (["--seeds", "-1"], "--seed"),
        (["--tasks", "three"], "three"),
        (["--model", "nowhere/at/all"], "nowhere/at/all"),
        (["--jobs", "0"], "--jobs must be at least 1"),
        (["--full-options", "--epochs 0"], "--epochs must be at least 1"),
        (
            ["--adapter-options", "--adapter-config ln_after=true"],
            "--adapter-config does not belong in --adapter-options",
        ),
        (["--", "--adapter", "bapna"], "--adapter does not belong behind --"),
        (["--", "--nonsense"], "--nonsense"),
    ],
)
def test_wrong_input_ends_in_one_line(run, capsys, words, say):
    assert run(*words) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1 and error[0].startswith("architecture_search: ") and say in error[0]
    assert not run.out.exists() and run.log() == []


def test_a_search_for_real(run, encoder, data_dir, tmp_path, monkeypatch, capsys):
    """Every run is train.py's own, but in this process."""

    def here(cells, out, *_):
        for cell in cells:
            if grid.metrics(out, cell.name) is None:
                (out / "logs").mkdir(parents=True, exist_ok=True)
                (out / "logs" / f"{cell.name}.json").write_text(
                    json.dumps(grid.record(cell, cells))
                )
                with contextlib.redirect_stdout(io.StringIO()):
                    command_line(grid.command(cell, out))
        return {}

    monkeypatch.setattr(grid, "run", here)
    words = [
        "--model",
        encoder,
        "--data-dir",
        data_dir,
        "--tasks",
        "sst2",
        "--out",
        tmp_path / "real",
        "--reduction-factors",
        8,
        "--",
        "--device",
        "cpu",
        "--epochs",
        1,
        "--lr",
        "5e-3",
    ]
    assert search.main([str(word) for word in words]) == 0, capsys.readouterr()
    names = {path.name for path in (tmp_path / "real" / "runs").iterdir()}
    for _, _, config in chains():
        if (name := f"sst2-{search.architecture(config)}-8-0") in names:
            bert, _, _ = load_run(tmp_path / "real" / "runs" / name)
            adapters = [
                slot.adapters["sst2"] for _, slot in bert.slots() if "sst2" in slot.adapters
            ]
            assert adapters[0].config == AdapterConfig(**{**vars(config), "reduction_factor": 8})
            assert len(adapters) == 2 * (config.mh_adapter + config.output_adapter)
    rows = list(csv.DictReader(open(tmp_path / "real" / "search.csv", newline="")))
    best = {}
    for step in search.STEPS:  # the search by hand
        found = {row["option"]: float(row["accuracy"]) for row in rows if row["step"] == step}
        assert list(found) == list(search.options_of(step, best)[0])
        best |= search.STEPS[step][1][max(found, key=found.get)][1]
    last = search.changes(AdapterConfig(**best))
    assert " ".join(last) in (tmp_path / "real" / "search.md").read_text()
    parameters = {row["option"]: int(row["trained_parameters"]) for row in rows}
    assert (
        parameters["full"]
        > parameters["houlsby"]
        > parameters["houlsby_adapters"]
        > parameters["bapna"]
        > parameters["top"]
    )
