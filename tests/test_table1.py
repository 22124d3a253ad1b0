"""experiments.table1, experiments.grid under it and experiments.report. Most runs here are of a
stand-in for train.py, which takes no time (fake_grid.py)."""

import csv
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
from conftest import cli, thorough, thorough_after_first
from experiments import grid, report, table1
from formats.files import read_json
from reference import GOLDEN


@pytest.fixture
def table(encoder, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setattr(grid, "result_of", fake_grid.result_of)
    return fake_grid.Fake(table1, tmp_path, encoder)


def rows_of(path):
    """{task: row}"""
    with open(path, newline="") as file:
        return {row["task"]: row for row in csv.DictReader(file)}


# --------------------------------------------------------------------------------------------------
# Which runs, and what the tables say


def test_table_2_from_the_papers_accuracies():
    """Finding 4 of section 5.2 and the counts of Table 2: 7 and 14. Of the other two, the paper
    prints 10 and 11; from its own accuracies follow 9 and 10."""
    found = table1.differences(table1.paper(roberta=False), table1.COMPARISONS, list(data.TASKS))
    arrows = {pair: "".join(map(table1.arrow, values.values())) for pair, values in found.items()}
    assert {len(text) for text in arrows.values()} == {16}
    assert [text.count("↗") for text in arrows.values()] == [9, 10, 7, 14]
    # "for 15/16 tasks, the performance remains the same or improves"
    assert arrows["fusion_st_a", "st_a_16"].count("↘") == 1
    assert "↘" not in arrows["fusion_mt_a", "mt_a"]


def test_arrows_at_their_thresholds():
    more = {"a": 70.3, "b": 70.31, "c": 69.7, "d": 69.69, "e": 70.304}
    values = {("st_a_16", task): 70.0 for task in more}
    values |= {("fusion_st_a", task): value for task, value in more.items()}
    (found,) = table1.differences(values, table1.COMPARISONS, more).values()
    assert [table1.arrow(value) for value in found.values()] == list("→↗→↘→")


def build(text, **options):
    """(cells, places, {name: settings}) of tasks of 40,000, 3,000 and 250 examples"""
    sizes = {"big": 40000, "middle": 3000, "small": 250}
    words = cli(tasks=[*sizes], model="M", out=".", **options)
    runs = table1.Runs(table1.arguments([*words, *text.split()]), sizes)
    return runs.cells, runs.places, {name: cell.settings() for name, cell in runs.cells.items()}


# name without the seed: what train.py, or for several tasks multitask, is told
RUNS = """
head-small: head --task small --model M
full-small: full --task small --model M
st_a_2-small: adapter --reduction-factor 2 --task small --model M
st_a_16-small: adapter --reduction-factor 16 --task small --model M
st_a_64-small: adapter --reduction-factor 64 --task small --model M
st_a_houlsby-small: adapter --adapter houlsby --reduction-factor 16 --task small --model M
mt_a: --adapter pal --tasks big middle small --model M
fusion_st_a-small: fusion --task small
    --adapters runs/st_a_16-big-1 runs/st_a_16-middle-1 runs/st_a_16-small-1 --model M
fusion_mt_a-small: fusion --task small --adapters runs/mt_a-1/adapters/big
    runs/mt_a-1/adapters/middle runs/mt_a-1/adapters/small --model runs/mt_a-1
mtl: --adapter none --tasks big middle small --model M
sequential-big-small: full --task small --model runs/full-big-1
sequential-middle-big: full --task big --model runs/full-middle-1
"""


def test_every_system_is_the_run_it_is_meant_to_be():
    cells, places, _ = build("--seeds 0 1 -- --epochs 3")
    assert len(places) == len(table1.SYSTEMS) * 3 * 2
    for line in RUNS.replace("\n    ", " ").strip().splitlines():
        name, words = line.split(": ")
        expected = f"{words} --seed 1 --epochs 3 --out runs/{name}-1"
        if name in ("mt_a", "mtl"):
            assert cells[f"{name}-1"].words()[:2] == ["-m", "experiments.multitask"]
        else:
            expected = f"--stage {expected}"
        assert " ".join(cells[f"{name}-1"].command) == expected
        system, *_, task = name.split("-") if "-" in name else (name, "small")
        assert places[system, task, 1] == f"{name}-1"


def test_few_examples_in_targets_all_in_sources():
    words = "--systems st_a_16 fusion_st_a --seeds 0 1"
    cells, places, settings = build(f"{words} --source-seeds 1 -- --limit-train 200")
    fusion = cells[places["fusion_st_a", "small", 0]]
    assert fusion.needs == ("st_a_16-big-1", "st_a_16-middle-1", "st_a_16-small-200-0")
    limits = [settings[name].limit_train for name in (*fusion.needs, fusion.name)]
    assert limits == [None, None, 200, 200]
    cells, places, _ = build(f"{words} --limit-source 5000 -- --limit-train 1000")
    needs = cells[places["fusion_st_a", "middle", 0]].needs
    # small has 250 examples: neither limit means anything
    assert needs == ("st_a_16-big-5000-0", "st_a_16-middle-1000-0", "st_a_16-small-0")


def test_seeds_and_options():
    words = "--systems st_a_16 fusion_st_a sequential --one-seed big -- --epochs 9"
    options = {"adapter_options": "--lr 5e-4", "source_options": "--epochs 2"}
    cells, places, settings = build(words, **options)
    assert [seed for system, task, seed in places if (system, task) == ("st_a_16", "big")] == [0]
    assert [seed for system, task, seed in places if task == "small"] == [0, 1, 2] * 3
    fusion = cells[places["fusion_st_a", "small", 2]]
    assert fusion.needs == ("st_a_16-big-0-source", "st_a_16-middle-2-source", "st_a_16-small-2")
    made = [settings[name] for name in (*fusion.needs, fusion.name)]
    assert [(run.epochs, run.lr) for run in made] == [(2, 5e-4)] * 2 + [(9, 5e-4), (9, 5e-5)]
    assert cells[places["sequential", "small", 1]].needs == ("full-big-0-source",)


def test_tables_of_a_whole_grid(table, capsys):
    """With the paper's values beside ours."""
    assert table("--seeds 0 1 --jobs 8", tasks=["big", "rte", "small"]) == 0
    log = table.log()
    assert len(log) == len(set(log)) == len(list((table.out / "runs").iterdir()))
    rows = rows_of(table.out / "table1.csv")
    assert (rows["rte"]["full_paper"], rows["rte"]["st_a_16_paper"]) == ("65.41", "71.04")
    # a mean over other tasks is not beside ours
    assert rows["small"]["full_paper"] == rows["mean"]["full_paper"] == ""
    row = rows["small"]
    runs = {path.name: read_json(path / "metrics.json") for path in table.out.glob("runs/*")}
    values = [100 * runs[f"fusion_st_a-small-{seed}"]["accuracy"] for seed in range(2)]
    text = f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"
    assert f"{row['fusion_st_a_mean']} ± {row['fusion_st_a_std']}" == text
    assert row["fusion_st_a_seeds"] == "2" and row["train_examples"] == "20"
    joint = [runs[f"mtl-{seed}"]["accuracies"]["small"] for seed in range(2)]
    assert row["mtl_mean"] == f"{100 * statistics.mean(joint):.2f}"
    page = (table.out / "results.md").read_text()
    assert re.findall("## (.{8})", page) == ["Tables 1", "Table 2:", "Figure 3"]
    assert f"| {text} |" in page and " (71.04) |" in page and str(table.data) not in page
    lines = capsys.readouterr().out.splitlines()
    assert any(text in line for line in lines if line.startswith("small "))  # printed, too
    more = float(row["fusion_st_a_mean"]) - float(row["st_a_16_mean"])
    mark, found = table1.arrow(more), (table.out / "table2.csv").read_text()
    assert f"fusion_st_a,st_a_16,small,{mark},{more:.2f},–\n" in found
    assert f"| small | {mark} (–) |" in page
    assert (table.out / "figure3.png").read_bytes().startswith(b"\x89PNG")

    assert table("--seeds 0 1 --jobs 8", tasks=["big", "rte", "small"]) == 0
    # nothing is run again
    assert table.log() == log and rows_of(table.out / "table1.csv") == rows


def test_table_4(table):
    model = GOLDEN / "roberta" / "encoder"
    assert table("--systems st_a_2 --seeds 0", tasks=["rte"], model=model) == 0
    assert "## Table 4\n" in (table.out / "results.md").read_text()
    assert rows_of(table.out / "table4.csv")["rte"]["st_a_2_paper"] == "61.80"


def test_numbers_are_flush_right():
    lines = report.table([["rte", "1.00 ± 2.00", 71.044], ["", None, 3]], ["task", "a", "b"])
    expected = ["task  a                b", "rte   1.00 ± 2.00  71.04", "      –                3"]
    assert lines == expected


# --------------------------------------------------------------------------------------------------
# Running


def test_a_failure_stops_only_what_needs_it(table, capsys):
    table.write("fail", "st_a_16-big-1: this one fails")
    words = "--systems st_a_16 fusion_st_a --seeds 0 1 --jobs 2"
    assert table(words) == 1
    output = capsys.readouterr().out
    assert "failed: st_a_16-big-1: train.py: this one fails (status 2) (" in output
    assert "failed: fusion_st_a-small-1: not run: it needs st_a_16-big-1, which failed" in output
    rows = rows_of(table.out / "table1.csv").values()
    assert [row["st_a_16_seeds"] for row in rows] == ["1", "2", "2", ""]
    assert [row["fusion_st_a_seeds"] for row in rows] == ["1", "1", "1", ""]
    before = len(table.log())
    table.write("fail")
    assert table(words) == 0
    fusions = [f"fusion_st_a-{task}-1" for task in ("big", "middle", "small")]
    assert sorted(table.log()[before:]) == [*fusions, "st_a_16-big-1"]


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def children(table):
    """How many processes of the stand-in are alive, wherever they belong."""
    words = ["pgrep", "-c", "-f", f"fake_grid.py {table.fake}"]
    return int(subprocess.run(words, capture_output=True).stdout)


@pytest.mark.skipif(not shutil.which("pgrep"), reason="counts processes")
@pytest.mark.parametrize("end", thorough_after_first(*"SIGTERM SIGINT SIGHUP SIGKILL".split()))
def test_no_child_is_left_behind(end, table):
    """However table1 ends. The same command then goes on from what the children have saved."""
    words = "--systems st_a_16 fusion_st_a --seeds 0 --jobs 2"
    table.write("slow")
    process = child.Program([fake_grid.__file__, "table1", *table.words(words)])
    wait_for(lambda: len(list(table.out.glob("runs/*/config.json"))) == 2)
    assert children(table) == 2
    process.send_signal(getattr(signal, end))
    said, status = process.stderr.read(), process.wait(20)
    if end == "SIGKILL":  # they hear of it, and save
        wait_for(lambda: not children(table))
        assert (status, said) == (-9, "")
    else:
        assert status == 130 and said.count("\n") == 1 and "the same command goes on" in said
    assert not children(table)
    assert len(list(table.out.glob("runs/*/resume.pt"))) == 2
    (table.fake / "slow").unlink()
    assert table(words) == 0


def test_other_commands_are_told_apart(table, capsys):
    words = "--systems st_a_16 fusion_st_a --seeds 0"
    assert table(words) == 0
    adapters, fusions = table.log()[:3], table.log()[3:]
    assert table(words, adapter_options="--lr 1e-3") == 2
    assert "st_a_16-big-0 was made by another command" in capsys.readouterr().err
    assert table(words, fusion_options="--epochs 3") == 2 and table.log() == [*adapters, *fusions]

    def made_again(**options):
        before = len(table.log())
        assert table(f"{words} --overwrite", **options) == 0
        return table.log()[before:]

    (table.out / "runs" / "fusion_st_a-big-0" / "metrics.json").unlink()  # begun, not finished
    assert made_again(fusion_options="--epochs 3") == fusions
    for name in fusions:  # by train.py's own --overwrite
        assert "--overwrite\n" in (table.out / "logs" / f"{name}.txt").read_text()
    # what was made from other runs goes with them
    assert made_again(adapter_options="--lr 1e-3") == [*adapters, *fusions]
    # also where an earlier --overwrite was interrupted
    (table.out / "runs" / "st_a_16-big-0" / "metrics.json").unlink()
    assert made_again(adapter_options="--lr 1e-3") == [adapters[0], *fusions]


@thorough
def test_parts_share_the_grid(table):
    words = "--systems st_a_16 fusion_st_a sequential --seeds 0 1"
    for _ in range(2):  # fusions need what the other part has trained
        for part in ("0/2", "1/2"):
            assert table(f"{words} --part {part}") == 0
    log = table.log()
    assert table(words) == 0 and table.log() == log and len(log) == len(set(log))


def test_plan_lists_the_runs_and_writes_nothing(table, capsys, tmp_path):
    assert table("--seeds 0 --plan -- --limit-train 10") == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"st_a_16-small-10-0", "st_a_16-small-0"} <= {*lines}
    assert lines[-1] == f"runs: {len(lines) - 1}, to go: {len(lines) - 1}"
    assert not table.out.exists() and not table.log()
    # one of the paper's tasks is not on the hub: it is looked at before anything is downloaded
    with pytest.raises((ValueError, OSError), match="argument"):
        table1.main(["--plan", "--out", str(tmp_path)])


def test_gpus_and_cores_are_shared_out(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)

    def shares(name, jobs, launch="python"):
        options = grid.Options(launch=launch)
        return [grid.environment(slot, jobs, options).get(name) for slot in range(jobs)]

    devices, threads = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"
    assert shares(devices, 1) == ["0,1,2,3"] and shares(devices, 2) == ["0,2", "1,3"]
    assert shares(devices, 4) == [*"0123"] and shares(devices, 6) == [*"012301"]
    assert shares(threads, 1) == [None] and shares("OMP_WAIT_POLICY", 1) == [None]
    assert shares(threads, 2) == ["3"] * 2 and shares(threads, 16) == ["1"] * 16
    assert shares(threads, 2, "torchrun --nproc_per_node=8") == [None] * 2
    monkeypatch.setenv(devices, "5,7")  # the user's
    monkeypatch.setenv(threads, "5")
    assert shares(devices, 2) == ["5", "7"] and shares(threads, 2) == ["5", "5"]


WRONG = """--launch no-such-program | no-such-program
--part 3/3 | --part must be I/N
--fusion-options=--task=x | --task does not belong in --fusion-options
--fusion-options=--epochs=0 | --epochs must be at least 1
-- --see 3 | --see does not belong behind --
--one-seed huge | --one-seed 'huge' is none of --tasks: big, middle, small"""


@pytest.mark.parametrize("line", WRONG.splitlines())
def test_wrong_input_ends_in_one_line(table, capsys, line):
    words, say = line.split(" | ")
    assert table(words) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1 and error[0].startswith("table1: ") and say in error[0]
    assert not (table.out / "runs").exists() and table.log() == []


def test_a_small_grid_for_real(encoder, data_dir, tmp_path):
    """With train.py itself."""
    out, own_data = tmp_path / "out", shutil.copytree(data_dir, tmp_path / "data")
    places = {"model": encoder, "data_dir": own_data, "out": out}
    words = cli("--tasks rte pick --systems fusion_st_a --seeds 0 --jobs 2", **places)
    words += "-- --epochs 2 --lr 5e-3 --device cpu --limit-train 96".split()
    table1.main(words)
    runs = out / "runs"
    # both tasks have 96 examples: an adapter is its own target's and the other's source
    names = ["fusion_st_a-pick-0", "fusion_st_a-rte-0", "st_a_16-pick-0", "st_a_16-rte-0"]
    assert sorted(path.name for path in runs.iterdir()) == names
    accuracy = 100 * read_json(runs / "fusion_st_a-rte-0" / "metrics.json")["accuracy"]
    assert rows_of(out / "table1-96.csv")["rte"]["fusion_st_a_mean"] == f"{accuracy:.2f}"
    text = (out / "results-96.md").read_text()
    assert "limit-train `96`" in text and "train-options `--epochs 2 --lr 5e-3" in text

    def refused(say, *more):
        with pytest.raises(ValueError, match=say):
            table1.main([*words, *more])

    refused("epochs = 2, not 3", "--epochs", "3")
    # the same paths, but not what the runs were made from
    source, rows = runs / "st_a_16-rte-0" / "adapter.safetensors", own_data / "rte" / "train.jsonl"
    source.write_bytes(source.read_bytes()[:-4] + bytes(4))
    refused("fusion_st_a-rte-0.*adapter_digests")
    rows.write_text(rows.read_text().replace('"label": 0', '"label": 1', 1))
    refused("st_a_16-rte-0.*data")
