"""experiments.tables, and experiments.grid under it. Most runs here are of a stand-in for train.py,
which takes no time (fake_grid.py)."""

import itertools
import re
import shutil
import signal
import statistics
import subprocess
import time
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

import child
import data
import fake_grid
from conftest import cli, thorough_after_first
from experiments import grid, tables
from formats.files import read_json
from reference import GOLDEN


@pytest.fixture
def table(encoder, tmp_path):
    return fake_grid.Fake(tables, tmp_path, encoder)


# options of a grid: what some of its runs are told; those on several tasks are of multitask
GRIDS = {
    "--seeds 1 -- --epochs 3": """
st_a_64-small-1: adapter --model M --epochs 3 --reduction-factor 64 --task small --seed 1
st_a_houlsby-small-1: adapter --model M --epochs 3 --adapter houlsby --reduction-factor 16
    --task small --seed 1
mt_a-1: --model M --epochs 3 --adapter pal --tasks big middle small --seed 1
fusion_mt_a-small-1: fusion --model M --epochs 3 --task small --model runs/mt_a-1 --adapters
    runs/mt_a-1/adapters/big runs/mt_a-1/adapters/middle runs/mt_a-1/adapters/small --seed 1
multitask-1: --model M --epochs 3 --without-adapters --tasks big middle small --seed 1
sequential-middle-big-1: full --model M --epochs 3 --task big --model runs/full-middle-1 --seed 1
""",
    "--systems fusion_st_a multitask --seeds 0 -- --limit-train 200": """
st_a_16-big-0: adapter --model M --reduction-factor 16 --task big --seed 0
st_a_16-small-200-0: adapter --model M --reduction-factor 16 --task small --limit-train 200 --seed 0
fusion_st_a-small-200-0: fusion --model M --task small --adapters runs/st_a_16-big-0
    runs/st_a_16-middle-0 runs/st_a_16-small-200-0 --limit-train 200 --seed 0
multitask-200-0: --model M --without-adapters --tasks big middle small --limit-train 200 --seed 0
""",
    "--systems fusion_st_a sequential --one-seed big -- --lr=1": """
fusion_st_a-small-2: fusion --model M --lr=1 --task small --adapters runs/st_a_16-big-0
    runs/st_a_16-middle-2 runs/st_a_16-small-2 --seed 2
sequential-big-small-2: full --model M --lr=1 --task small --model runs/full-big-0 --seed 2
""",
}


@pytest.mark.parametrize("options", GRIDS)
def test_every_system_is_the_run_it_is_meant_to_be(options):
    sizes = {"big": 40000, "middle": 3000, "small": 250}
    args = tables.parse([*cli(tasks=[*sizes], model="M", out="."), *options.split()])
    args.sizes = sizes
    found = {cell.name: cell for cell in grid.with_needs(tables.cells_of(args).values())}
    for line in GRIDS[options].replace("\n    ", " ").strip().splitlines():
        name, expected = line.split(": ")
        stage, cell = re.match(r"\w+ |", expected)[0], found[name]
        several = ["-m", "experiments.multitask"]
        assert cell.program == ([str(grid.ROOT / "train.py")] if stage else several)
        words = " ".join(cell.words).replace(f"--stage {stage}", "")
        assert f"{stage}{words}" == f"{expected} --out runs/{name} --resume"


def test_table_2_of_the_papers_accuracies():
    """Finding 4 of section 5.2, and two counts of Table 2, 7 and 14; of the others, which are 10
    and 11 there, 9 and 10."""
    args = SimpleNamespace(tasks=list(data.TASKS), systems=tables.SYSTEMS)
    papers = pd.read_csv(tables.PAPER, index_col="task")
    theirs = tables.with_mean(papers[papers["encoder"] == "bert-base-uncased"], args)
    found = tables.differences(theirs, tables.COMPARISONS).values()
    arrows = ["".join(map(tables.arrow, values)) for values in found]
    assert [text.count("↗") for text in arrows] == [9, 10, 7, 14]
    assert arrows[0].count("↘") == 1 and "↘" not in arrows[3]


def test_tables_of_a_whole_grid(table, capsys):
    """Planned, run, and written, beside the paper's values."""
    words, tasks = "--seeds 0 1 --jobs 8", ["big", "rte", "small"]
    assert table(f"{words} --plan", tasks=tasks) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line for line in lines if not line.startswith("note: ")]
    assert not table.out.exists()
    for _ in range(2):  # the second time nothing is run
        assert table(words, tasks=tasks) == 0
        assert sorted(table.log()) == sorted(names)

    page, rows = (table.out / "results.md").read_text(), pd.read_csv(table.out / "results.csv")
    means = {}
    for system, task in itertools.product(tables.SYSTEMS, tasks):
        name = f"{system}-{task}"
        if system in ("mt_a", "multitask"):
            name = system
        elif system == "sequential":  # after the largest of the others
            name = f"sequential-{'rte' if task == 'big' else 'big'}-{task}"
        runs = [read_json(table.out / f"runs/{name}-{seed}/metrics.json") for seed in (0, 1)]
        values = [100 * run.get("accuracies", {task: run["accuracy"]})[task] for run in runs]
        found = rows[(rows["system"] == system) & (rows["task"] == task)]
        assert (100 * found["accuracy"]).tolist() == pytest.approx(values)
        mean, deviation = statistics.mean(values), statistics.stdev(values)
        means[system, task] = round(mean, 2)
        assert re.search(rf"\| {task} .*{re.escape(f'{mean:.2f} ± {deviation:.2f}')}", page)
    row = next(line for line in page.splitlines() if line.startswith("| rte "))
    assert "(65.41)" in row and "(71.04)" in row
    mark = tables.arrow(means["fusion_st_a", "small"] - means["st_a_16", "small"])
    assert re.search(rf"\| small +\| {mark} \(–\)", page)
    assert (table.out / "figure3.png").stat().st_size > 5000


def test_a_failure_stops_only_what_needs_it(table, capsys):
    """The encoder is a RoBERTa, so the paper's values are those of Table 4."""
    table.write("fail", "st_a_16-rte-1: this one fails")
    words = "--systems st_a_16 fusion_st_a --seeds 0 1 --jobs 2"
    places = {"model": GOLDEN / "roberta" / "encoder", "tasks": ["rte", "small"]}
    assert table(words, **places) == 1
    output = capsys.readouterr().out
    assert "failed: st_a_16-rte-1: train.py: this one fails (status 2, " in output
    assert "fusion_st_a-small-1: not run: it needs st_a_16-rte-1, which failed" in output
    counts = pd.read_csv(table.out / "results.csv").groupby(["system", "task"]).size()
    assert counts.to_dict() == {
        **{("st_a_16", "rte"): 1, ("st_a_16", "small"): 2},
        **{("fusion_st_a", "rte"): 1, ("fusion_st_a", "small"): 1},
    }
    assert "(75.30)" in (table.out / "results.md").read_text()
    table.write("fail")
    assert table(words, **places) == 0
    assert {*table.log()[-3:]} == {"fusion_st_a-rte-1", "fusion_st_a-small-1", "st_a_16-rte-1"}


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.skipif(not shutil.which("pgrep"), reason="counts processes")
@pytest.mark.parametrize("end", thorough_after_first(*"SIGTERM SIGINT SIGHUP SIGKILL".split()))
def test_no_child_is_left_behind(end, table):
    """However tables ends. The same command then goes on from what the children have saved."""

    def children():
        words = ["pgrep", "-c", "-f", f"fake_grid.py {table.fake}"]
        return int(subprocess.run(words, capture_output=True).stdout)

    words = "--systems st_a_16 fusion_st_a --seeds 0 --jobs 2"
    table.write("slow")
    process = child.Program([fake_grid.__file__, "tables", table.fake, *table.words(words)])
    wait_for(lambda: len(list(table.out.glob("runs/*/run.json"))) == 2)
    assert children() == 2
    process.send_signal(getattr(signal, end))
    said, status = process.stderr.read(), process.wait(20)
    if end == "SIGKILL":  # they hear of it, and save
        wait_for(lambda: not children())
        assert (status, said) == (-9, "")
    else:
        assert status == 130 and said.count("\n") == 1 and "the same command goes on" in said
    assert not children() and len(list(table.out.glob("runs/*/resume.pt"))) == 2
    (table.fake / "slow").unlink()
    assert table(words) == 0


def test_what_counts_as_finished(table, capsys):
    """A run of another command is refused, or replaced with --overwrite; what was made from it goes
    with it, also after an interruption."""
    words, options = "--systems st_a_16 fusion_st_a --seeds 0", {"adapter_options": "--lr 1e-3"}
    assert table(words) == 0
    log = table.log()
    assert table(words, **options) == 2 and "--overwrite trains it again" in capsys.readouterr().err
    assert table(f"{words} --overwrite", **options) == 0
    assert table.log() == [*log, *log]
    (table.out / "runs" / "st_a_16-big-0" / "metrics.json").unlink()
    assert table(f"{words} --overwrite", **options) == 0
    assert table.log() == [*log, *log, log[0], *log[3:]]


def test_gpus_and_cores_are_shared_out(monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(grid.subprocess, "Popen", lambda *_, env, **__: started.append(env))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")  # the user's
    for number in range(3):
        grid.start(grid.Cell("name", tmp_path / "runs" / "name", [], [], []), number, 2)
    assert [env["CUDA_VISIBLE_DEVICES"] for env in started] == ["5", "7", "5"]
    assert {env["OMP_NUM_THREADS"] for env in started} == {"3"}


def test_the_tables_hold_accuracies_whatever_chooses_the_best_epoch(launch, tmp_path):
    words = "--tasks rte sst2 --without-adapters --epochs 1 --steps-per-epoch 2 --score macro_f1"
    result = launch(words, out=tmp_path / "run")
    cell = grid.Cell("run", tmp_path / "run", [], [], [])
    accuracies = [grid.row_of({"task": task}, cell)["accuracy"] for task in ("rte", "sst2")]
    assert statistics.mean(accuracies) == pytest.approx(result["accuracy"])
    assert result["macro_f1"] != pytest.approx(result["accuracy"])


def test_a_small_grid_for_real(encoder, data_dir, tmp_path):
    """With train.py itself."""
    out, words = tmp_path / "out", "--tasks rte --systems fusion_st_a --seeds 0"
    words = cli(words, model=encoder, data_dir=data_dir, out=out)
    behind = cli("-- --epochs 2 --device cpu --limit-train 90 --max-length 20")
    for _ in range(2):
        tables.main([*words, *behind])
    metrics = out / "runs/fusion_st_a-rte-90-0/metrics.json"
    row = pd.read_csv(out / "results-90.csv").iloc[0]
    assert (row["accuracy"], row["train_examples"]) == (read_json(metrics)["accuracy"], 90)
    for old, new in (("--epochs 2", "--epochs 3"), (" --max-length 20", "")):
        with pytest.raises(ValueError, match="is a finished run with .*, not .*--overwrite"):
            tables.main([*words, *" ".join(behind).replace(old, new).split()])
