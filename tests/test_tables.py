"""experiments.tables, and experiments.grid under it. Most runs here are of a stand-in for train.py,
which takes no time (fake_grid.py)."""

import csv
import itertools
import re
import shutil
import signal
import statistics
import subprocess
import time

import pytest
import torch

import child
import data
import fake_grid
from conftest import cli, thorough_after_first
from experiments import grid, tables
from experiments.grid import ROOT
from formats.files import read_json, write_json
from reference import GOLDEN


@pytest.fixture
def table(encoder, tmp_path, monkeypatch):
    monkeypatch.setattr(grid, "difference", fake_grid.difference)
    return fake_grid.Fake(tables, tmp_path, encoder)


def rows_of(path):
    """{task: row}"""
    with open(path, newline="") as file:
        return {row["task"]: row for row in csv.DictReader(file)}


# options of a grid: what some of its runs are told; those on several tasks are of multitask
GRIDS = {
    "--seeds 1 -- --epochs 3": """
st_a_64-small-1: adapter --model M --epochs 3 --reduction-factor 64 --task small --seed 1
st_a_houlsby-small-1: adapter --model M --epochs 3 --adapter houlsby --reduction-factor 16
    --task small --seed 1
mt_a-1: --model M --epochs 3 --adapter pal --tasks big middle small --seed 1
fusion_mt_a-small-1: fusion --epochs 3 --task small --model runs/mt_a-1 --adapters
    runs/mt_a-1/adapters/big runs/mt_a-1/adapters/middle runs/mt_a-1/adapters/small --seed 1
mtl-1: --model M --epochs 3 --without-adapters --tasks big middle small --seed 1
sequential-middle-big-1: full --epochs 3 --task big --model runs/full-middle-1 --seed 1""",
    "--systems fusion_st_a mtl --seeds 0 -- --limit-train 200": """
st_a_16-big-0: adapter --model M --reduction-factor 16 --task big --seed 0
st_a_16-small-200-0: adapter --model M --reduction-factor 16 --task small --limit-train 200 --seed 0
fusion_st_a-small-200-0: fusion --model M --task small --limit-train 200 --adapters
    runs/st_a_16-big-0 runs/st_a_16-middle-0 runs/st_a_16-small-200-0 --seed 0
mtl-200-0: --model M --without-adapters --tasks big middle small --limit-train 200 --seed 0""",
    "--systems fusion_st_a sequential --one-seed big -- --lr=1": """
fusion_st_a-small-2: fusion --model M --lr=1 --task small --adapters runs/st_a_16-big-0
    runs/st_a_16-middle-2 runs/st_a_16-small-2 --seed 2
sequential-big-small-2: full --lr=1 --task small --model runs/full-big-0 --seed 2""",
}


@pytest.mark.parametrize("options", GRIDS)
def test_every_system_is_the_run_it_is_meant_to_be(options):
    sizes = {"big": 40000, "middle": 3000, "small": 250}
    words = [*cli(tasks=[*sizes], model="M", out="."), *options.split()]
    runs = tables.Runs(tables.parse(words), sizes)
    for line in GRIDS[options].replace("\n    ", " ").strip().splitlines():
        name, expected = line.split(": ")
        program, *words = runs.cells[name].command
        assert program == str(ROOT / "train.py") or words.pop(0) == "experiments.multitask"
        stage = "" if name.startswith("mt") else "--stage "
        assert " ".join(words) == f"{stage}{expected} --out runs/{name} --resume"


def test_table_2_of_the_papers_accuracies():
    """Finding 4 of section 5.2, and two counts of Table 2, 7 and 14; of the others, which are 10
    and 11 there, 9 and 10."""
    found = tables.differences(tables.paper(roberta=False), tables.COMPARISONS, list(data.TASKS))
    arrows = ["".join(map(tables.arrow, values.values())) for values in found.values()]
    assert [text.count("↗") for text in arrows] == [9, 10, 7, 14]
    assert arrows[0].count("↘") == 1 and "↘" not in arrows[3]


def test_tables_of_a_whole_grid(table, capsys):
    """Planned, run in two parts, and written, beside the paper's values."""
    words, tasks = "--seeds 0 1 --jobs 8", ["big", "rte", "small"]
    assert table(f"{words} --plan", tasks=tasks) == 0
    *names, last = capsys.readouterr().out.splitlines()
    assert last == f"runs: {len(names)}, to go: {len(names)}" and not table.out.exists()
    for part in ("0/2", "1/2", "0/2", "1/2"):  # some need what the other part has trained
        assert table(f"{words} --part {part}", tasks=tasks) == 0
    assert table(words, tasks=tasks) == 0
    assert sorted(table.log()) == sorted(names)  # nothing is run again

    page = (table.out / "results.md").read_text()
    rows = rows_of(table.out / "table1.csv")
    for system, task in itertools.product(tables.SYSTEMS, tasks):
        name = f"{system}-{task}"
        if system in ("mt_a", "mtl"):
            name = system
        elif system == "sequential":  # after the largest of the others
            name = f"sequential-{'rte' if task == 'big' else 'big'}-{task}"
        runs = [read_json(table.out / f"runs/{name}-{seed}/metrics.json") for seed in (0, 1)]
        values = [100 * run.get("accuracies", {task: run["accuracy"]})[task] for run in runs]
        mean, deviation = f"{statistics.mean(values):.2f}", f"{statistics.stdev(values):.2f}"
        of_system = [rows[task][f"{system}_{what}"] for what in ("mean", "std", "seeds")]
        assert of_system == [mean, deviation, "2"]
        assert re.search(rf"\| {task} .*{re.escape(f'{mean} ± {deviation}')}", page)
    assert (rows["rte"]["full_paper"], rows["rte"]["st_a_16_paper"]) == ("65.41", "71.04")
    assert rows["mean"]["full_paper"] == ""  # of other tasks
    more = float(rows["small"]["fusion_st_a_mean"]) - float(rows["small"]["st_a_16_mean"])
    mark, pairs = tables.arrow(more), (table.out / "table2.csv").read_text()
    assert f"fusion_st_a,st_a_16,small,{mark},{more:.2f},–\n" in pairs
    assert f"| small | {mark} (–) |" in page and (table.out / "figure3.png").is_file()


def test_a_failure_stops_only_what_needs_it(table, capsys):
    """The encoder is a RoBERTa, so the paper's values are those of Table 4."""
    table.write("fail", "st_a_16-rte-1: this one fails")
    words = "--systems st_a_16 fusion_st_a --seeds 0 1 --jobs 2"
    places = {"model": GOLDEN / "roberta" / "encoder", "tasks": ["rte", "small"]}
    assert table(words, **places) == 1
    output = capsys.readouterr().out
    assert "failed: st_a_16-rte-1: train.py: this one fails (status 2, " in output
    assert "fusion_st_a-small-1: not run: it needs st_a_16-rte-1, which failed" in output
    rows = rows_of(table.out / "table4.csv").values()
    found = [[row[f"{name}_seeds"] for row in rows] for name in ("st_a_16", "fusion_st_a")]
    assert found == [["1", "2", ""], ["1", "1", ""]]
    assert [row["st_a_16_paper"] for row in rows] == ["75.30", "", ""]
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
    """However table1 ends. The same command then goes on from what the children have saved."""

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


def test_overwrite(table):
    words = "--systems st_a_16 fusion_st_a --seeds 0"
    assert table(words) == 0
    log = table.log()
    # what was made from other runs goes with them, also after an interruption
    assert table(f"{words} --overwrite", adapter_options="--lr 1e-3") == 0
    assert table.log() == [*log, *log]
    (table.out / "runs" / "st_a_16-big-0" / "metrics.json").unlink()
    assert table(f"{words} --overwrite", adapter_options="--lr 1e-3") == 0
    assert table.log() == [*log, *log, log[0], *log[3:]]


def test_gpus_and_cores_are_shared_out(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv(devices := "CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv(threads := "OMP_NUM_THREADS", raising=False)

    def shares(name, jobs):
        return [grid.environment(slot, jobs).get(name) for slot in range(jobs)]

    assert shares(devices, 1) == ["0,1,2,3"] and shares(devices, 6) == [*"012301"]
    assert shares(threads, 2) == ["3", "3"]
    monkeypatch.setenv(devices, "5,7")  # the user's
    monkeypatch.setenv(threads, "5")
    assert shares(devices, 2) == ["5", "7"] and shares(threads, 2) == ["5", "5"]


def test_examples_that_are_held_out_are_not_counted(table):
    assert table("--systems head --seeds 0 -- --dev-fraction 0.25", tasks=["big", "small"]) == 0
    rows = rows_of(table.out / "table1.csv")
    assert [rows[task]["train_examples"] for task in ("big", "small")] == ["30", "15"]
    assert table("--systems head --seeds 0 -- --train-file f.jsonl", tasks=["big", "small"]) == 2


def test_the_tables_hold_accuracies_whatever_chooses_the_best_epoch(launch, tmp_path):
    words = "--tasks rte sst2 --without-adapters --epochs 1 --steps-per-epoch 2 --score macro_f1"
    result = launch(words, out=tmp_path / "run")
    accuracies = [grid.accuracy(result, task) for task in ("rte", "sst2")]
    assert statistics.mean(accuracies) == pytest.approx(result["accuracy"])
    assert result["macro_f1"] != pytest.approx(result["accuracy"])


def test_a_small_grid_for_real(encoder, data_dir, tmp_path):
    """With train.py itself. A finished run is another's if it has other options, or was made from
    what has been trained again in another way."""
    out, model = tmp_path / "out", shutil.copytree(encoder, tmp_path / "model")
    words = cli("--tasks rte --systems fusion_st_a --seeds 0", model=model, data_dir=data_dir)
    words += cli(out=out)
    behind = cli("-- --epochs 2 --device cpu --limit-train 90 --max-length 20")
    tables.main([*words, *behind])
    accuracy = read_json(out / "runs/fusion_st_a-rte-90-0/metrics.json")["accuracy"]
    row = rows_of(out / "table1-90.csv")["rte"]
    assert row["fusion_st_a_mean"] == f"{100 * accuracy:.2f}"

    with pytest.raises(ValueError, match="epochs = 2, not 3"):
        tables.main([*words, *behind, "--epochs", "3"])
    with pytest.raises(ValueError, match="max_length = 20, not None"):
        tables.main([*words, *behind[:-2]])
    path = out / "runs/st_a_16-rte-90-0/run.json"
    write_json(path, {**(run := read_json(path)), "options": {**run["options"], "lr": 0.5}})
    with pytest.raises(ValueError, match="an adapter that .*st_a_16-rte-90-0 no longer has"):
        tables.main([*words, "--adapter-options", "--lr 0.5", *behind])
    write_json(path, run)
    write_json(model / "run.json", {"encoder": "another"})
    with pytest.raises(ValueError, match="an encoder that .*model no longer has"):
        tables.main([*words, *behind])
