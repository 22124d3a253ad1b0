"""experiments.table1, experiments.grid under it and experiments.report. Most runs here are of a
stand-in for train.py, which takes no time (fake_grid.py)."""

import csv
import json
import re
import shutil
import signal
import statistics
import time
from pathlib import Path

import pytest
import torch

import child
import data
import fake_grid
from conftest import cli, thorough, thorough_after_first, write_rows
from experiments import grid, report, table1

ROOT = Path(__file__).parent.parent


@pytest.fixture
def table(encoder, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setattr(grid, "result_of", fake_grid.result_of)
    return fake_grid.Fake(table1, tmp_path, encoder)


def rows_of(path):
    """{task: row}"""
    with open(path, newline="") as file:
        return {row["task"]: row for row in csv.DictReader(file)}


def metrics(out, name):
    return json.loads((out / "runs" / name / "metrics.json").read_text())


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
    assert table1.paper(roberta=True)["fusion_st_a", "cb"] == 92.86
    assert table1.paper(roberta=False)["fusion_st_a", "cb"] == 92.14


def test_arrows_at_their_thresholds():
    values = {("st_a_16", task): 70.0 for task in "abcde"}
    for task, more in zip("abcde", (0.3, 0.31, -0.3, -0.31, 0.304), strict=True):
        values["fusion_st_a", task] = 70 + more
    (found,) = table1.differences(values, table1.COMPARISONS, "abcde").values()
    assert [table1.arrow(value) for value in found.values()] == list("→↗→↘→")


def build(text, **options):
    """(cells, places, {name: settings}) of tasks of 40,000, 3,000 and 250 examples"""
    sizes = {"big": 40000, "middle": 3000, "small": 250}
    own, _, rest = text.partition("-- ")
    words = [*cli(own, tasks=[*sizes], out="OUT", **options), "--", *rest.split()]
    runs = table1.Runs(table1.arguments(words), sizes)
    return runs.cells, runs.places, {name: cell.settings() for name, cell in runs.cells.items()}


def test_every_system_is_the_run_it_is_meant_to_be():
    cells, places, settings = build("--seeds 0 1 -- --epochs 3")
    assert len(places) == len(table1.SYSTEMS) * 3 * 2 and set(places.values()) <= set(cells)
    stages = {"head": "head", "full": "full", "sequential": "full"}
    stages |= {"mt_a": "multitask", "mtl": "multitask"}
    stages |= {"fusion_st_a": "fusion", "fusion_mt_a": "fusion"}
    kinds = {"adapter": "pfeiffer", "st_a_houlsby": "houlsby", "mt_a": "pal", "mtl": "none"}
    for (system, task, seed), name in places.items():
        run, stage = settings[name], stages.get(system, "adapter")
        assert (run.stage, run.seed, run.epochs, run.limit_train) == (stage, seed, 3, None)
        assert run.task == (None if stage == "multitask" else task) and run.resume
        factor = {"st_a_2": 2, "st_a_64": 64}.get(system, 16 if stage == "adapter" else None)
        assert run.reduction_factor == factor and run.out == Path("OUT/runs") / name
        assert run.adapter == kinds.get(system, kinds.get(stage))

    def of(*place):
        return settings[places[place]]

    tasks = ("big", "middle", "small")
    sources = tuple(f"OUT/runs/st_a_16-{task}-1" for task in tasks)
    assert of("fusion_st_a", "small", 1).adapters == sources
    assert of("fusion_mt_a", "small", 1).model == "OUT/runs/mt_a-1"
    joint = tuple(f"OUT/runs/mt_a-1/adapters/{task}" for task in tasks)
    assert of("fusion_mt_a", "small", 1).adapters == joint and of("mt_a", "big", 1).tasks == tasks
    assert of("sequential", "small", 0).model == "OUT/runs/full-big-0"
    assert of("sequential", "big", 0).model == "OUT/runs/full-middle-0"
    names = list(cells)
    for i, cell in enumerate(cells.values()):  # the order in which they can be run
        assert set(cell.needs) <= set(names[:i])


def test_few_examples_in_targets_all_in_sources():
    words = "--systems st_a_16 fusion_st_a --seeds 0 1"
    cells, places, settings = build(f"{words} --source-seeds 1 -- --limit-train 200")
    assert settings[places["st_a_16", "small", 0]].limit_train == 200
    fusion = cells[places["fusion_st_a", "small", 0]]
    assert settings[fusion.name].limit_train == 200
    assert fusion.needs == ("st_a_16-big-1", "st_a_16-middle-1", "st_a_16-small-200-0")
    assert [settings[name].limit_train for name in fusion.needs] == [None, None, 200]
    # the same sources: they are not trained again where both share a directory
    assert build(words)[0]["st_a_16-big-1"] == cells["st_a_16-big-1"]

    cells, places, settings = build(f"{words} --limit-source 5000 -- --limit-train 1000")
    needs = cells[places["fusion_st_a", "middle", 0]].needs
    assert [settings[name].limit_train for name in needs] == [5000, 1000, None]
    # 250 examples: neither limit means anything
    assert places["st_a_16", "small", 0] == "st_a_16-small-0"


def test_seeds_and_options():
    words = "--systems st_a_16 fusion_st_a sequential --one-seed big -- --epochs 9"
    options = {"adapter_options": "--lr 5e-4", "source_options": "--epochs 2"}
    cells, places, settings = build(words, **options)
    assert [seed for system, task, seed in places if (system, task) == ("st_a_16", "big")] == [0]
    of_small = [seed for system, task, seed in places if (system, task) == ("sequential", "small")]
    assert of_small == [0, 1, 2]
    fusion = cells[places["fusion_st_a", "small", 2]]
    assert fusion.needs == ("st_a_16-big-0-source", "st_a_16-middle-2-source", "st_a_16-small-2")
    assert [settings[name].epochs for name in fusion.needs] == [2, 2, 9]
    assert {settings[name].lr for name in fusion.needs} == {5e-4}
    assert settings[fusion.name].lr == 5e-5
    assert cells[places["sequential", "small", 1]].needs == ("full-big-0-source",)


def test_tables_of_a_whole_grid(table, capsys):
    assert table("--seeds 0 1 --jobs 8") == 0
    log = table.log()
    assert len(log) == len(set(log)) == len(list((table.out / "runs").iterdir()))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"0 of {len(log)} runs are finished, {len(log)} to go"
    ends = [line for line in lines if " left" in line]
    assert [int(line.split("; ")[1].split()[0]) for line in ends] == list(range(1, len(log)))[::-1]
    assert all(re.search(r" left, about \d+:\d\d:\d\d$", line) for line in ends)

    row = rows_of(table.out / "table1.csv")["small"]
    values = [100 * metrics(table.out, f"fusion_st_a-small-{s}")["accuracy"] for s in range(2)]
    text = f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"
    assert f"{row['fusion_st_a_mean']} ± {row['fusion_st_a_std']}" == text
    assert row["fusion_st_a_seeds"] == "2"
    joint = [metrics(table.out, f"mtl-{seed}")["accuracies"]["small"] for seed in range(2)]
    assert row["mtl_mean"] == f"{100 * statistics.mean(joint):.2f}"
    page = (table.out / "results.md").read_text()
    assert re.findall("## (.{7,8})", page) == ["Table 1", "Table 3:", "Table 2:", "Figure 3"]
    assert f"| {text} |" in page and str(table.data) not in page
    assert any(text in line for line in lines if line.startswith("small "))  # printed, too
    assert lines[-1] == str(table.out / "results.md")
    difference = float(row["fusion_st_a_mean"]) - float(row["st_a_16_mean"])
    found = (table.out / "table2.csv").read_text()
    assert f"fusion_st_a,st_a_16,small,{table1.arrow(difference)},{difference:.2f}," in found
    assert (table.out / "figure3.png").read_bytes().startswith(b"\x89PNG")

    before = table.results()
    assert table("--seeds 0 1 --jobs 8") == 0 and table.log() == log  # nothing is run again
    assert table.results() == before
    again = capsys.readouterr().out.splitlines()
    assert again[0] == f"{len(log)} of {len(log)} runs are finished, 0 to go"
    assert again[1:] == lines[1 - len(again) :]


def test_the_papers_values_are_beside_ours(table):
    row = {"sentence1": "a cat", "sentence2": "a dog"}
    for split in ("train", "validation"):
        path = table.data / "rte" / f"{split}.jsonl"
        write_rows(path, [row | {"label": i % 2} for i in range(20)])
    assert table("--systems full st_a_16 --seeds 0", tasks=["rte", "small"]) == 0
    rows = rows_of(table.out / "table1.csv")
    assert (rows["rte"]["full_paper"], rows["rte"]["st_a_16_paper"]) == ("65.41", "71.04")
    # a mean over other tasks is not beside ours
    assert rows["small"]["full_paper"] == rows["mean"]["full_paper"] == ""
    assert " (71.04) |" in (table.out / "results.md").read_text()
    roberta = ROOT / "tests" / "golden" / "roberta" / "encoder"
    out = table.out.parent / "roberta"
    assert table("--systems st_a_2 st_a_16 --seeds 0", tasks=["small"], model=roberta, out=out) == 0
    assert (out / "table4.csv").exists() and not (out / "table1.csv").exists()


def test_text_tables():
    rows, header = [["rte", "1.00 ± 2.00", 71.044], ["", None, 3]], ["task", "a", "b"]
    expected = ["task  a                b", "rte   1.00 ± 2.00  71.04", "      –                3"]
    assert report.table(rows, header) == expected
    assert report.markdown(rows, header).splitlines()[2] == "| rte | 1.00 ± 2.00 | 71.04 |"


# --------------------------------------------------------------------------------------------------
# Running


def test_a_failure_stops_only_what_needs_it(table, capsys):
    table.write("fail", "st_a_16-big-1: this one fails")
    words = "--systems st_a_16 fusion_st_a --seeds 0 1 --jobs 2"
    assert table(words) == 1
    output = capsys.readouterr().out
    assert "failed: st_a_16-big-1: this one fails" in output
    assert "failed: fusion_st_a-small-1: not run: it needs st_a_16-big-1, which failed" in output
    assert "failed runs: 4" in output
    rows = rows_of(table.out / "table1.csv")
    assert rows["big"]["st_a_16_seeds"] == "1" and rows["small"]["st_a_16_seeds"] == "2"
    assert rows["small"]["fusion_st_a_seeds"] == "1"

    before = len(table.log())
    table.write("fail")
    assert table(words) == 0
    again = sorted(line.split()[0] for line in table.log()[before:])
    fusions = [f"fusion_st_a-{task}-1" for task in ("big", "middle", "small")]
    assert again == [*fusions, "st_a_16-big-1"]


@pytest.mark.parametrize(
    "said, status, reason",
    [
        ("", -9, "loading PyTorch (killed by signal 9)"),
        ("KeyError: 1\n", 1, "loading PyTorch (status 1)"),
        ("train.py: no such task\nbye\n", 2, "no such task"),
    ],
)
def test_why_a_run_failed(tmp_path, said, status, reason):
    cell = grid.Cell("a", tmp_path / "runs" / "a", ())
    cell.log.parent.mkdir()
    log = "\n$ a\ntrain.py: another time\n\n$ b\ntrain.py: loading PyTorch\n"
    cell.log.write_text(log + said)
    assert grid.failure(cell, status) == reason


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def children(table):
    """Processes of the stand-in that are alive, wherever they belong."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        found += [path] * (str(table.fake).encode() in words)
    return found


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="counts processes in /proc")
@pytest.mark.parametrize(
    "end", thorough_after_first("SIGTERM", "SIGINT", "SIGHUP", "SIGKILL", "deaf")
)
def test_no_child_is_left_behind(end, table, tmp_path):
    """However table1 ends, with a reader of its output that has gone. The same command then goes on
    from what the children have saved."""
    words = "--systems st_a_16 fusion_st_a --seeds 0 --jobs 2"
    assert table(words, out=tmp_path / "undisturbed") == 0
    shutil.rmtree(table.fake / "listening")
    table.write("slow")
    if end == "deaf":  # children that do not stop on SIGTERM
        table.write("deaf")
    start = tmp_path / "start.py"
    start.write_text(
        "from runtime.command import announce, run_command\nannounce('table1')\n"
        f"import sys\nsys.path.append({str(Path(__file__).parent)!r})\n"
        "import fake_grid\nfrom experiments import grid, table1\n"
        "grid.result_of = fake_grid.result_of\nrun_command('table1', table1.main)\n"
    )
    process = child.Program([start, *table.words(words)])
    listening = table.fake / "listening"
    try:
        wait_for(lambda: listening.exists() and len(list(listening.iterdir())) == 2)
        assert len(children(table)) == 2
        process.stdout.close()
        process.send_signal(getattr(signal, end, signal.SIGINT))
        if end == "deaf":
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
        said = process.stderr.read()
        status = process.wait(20)
    finally:
        process.kill()
        process.wait()
    if end == "SIGKILL":  # they hear of it, and save
        wait_for(lambda: not children(table))
        assert (status, said) == (-9, "")
    else:
        assert status == 130 and said.count("\n") == 1 and "the same command goes on" in said
    assert not children(table)
    if end != "deaf":
        assert len(list(table.out.glob("runs/*/resume.pt"))) == 2
    (table.fake / "slow").unlink()
    assert table(words) == 0
    assert table.results() == table.results(tmp_path / "undisturbed")


def test_other_commands_are_told_apart(table, capsys):
    words = "--systems st_a_16 fusion_st_a --seeds 0"
    assert table(words) == 0
    log = table.log()
    assert table(words, adapter_options="--lr 1e-3") == 2
    assert "st_a_16-big-0 was made by another command (such runs: 6)" in capsys.readouterr().err
    assert table(words, fusion_options="--epochs 3") == 2 and table.log() == log
    (table.out / "runs" / "fusion_st_a-big-0" / "metrics.json").unlink()  # begun, not finished
    assert table(f"{words} --overwrite", fusion_options="--epochs 3") == 0
    fusions = [f"fusion_st_a-{task}-0" for task in ("big", "middle", "small")]
    assert sorted(line.split()[0] for line in table.log()[len(log) :]) == fusions
    for name in fusions:  # by train.py's own --overwrite, which keeps the old run for a while
        assert "--overwrite\n" in (table.out / "logs" / f"{name}.txt").read_text()
    # what was made from other runs goes with them
    assert table(f"{words} --overwrite", adapter_options="--lr 1e-3") == 0
    assert len(table.log()) == len(log) + 3 + 6
    # also where an earlier --overwrite was interrupted
    (table.out / "runs" / "st_a_16-big-0" / "metrics.json").unlink()
    assert table(f"{words} --overwrite", adapter_options="--lr 1e-3") == 0
    again = sorted(line.split()[0] for line in table.log()[len(log) + 3 + 6 :])
    assert again == [*fusions, "st_a_16-big-0"]


@thorough
def test_parts_share_the_grid(table):
    words = "--systems st_a_16 fusion_st_a sequential --seeds 0 1"
    for _ in range(2):  # fusions need what the other part has trained
        for part in ("0/2", "1/2"):
            assert table(f"{words} --part {part}") == 0
    log = table.log()
    assert table(words) == 0 and table.log() == log and len(log) == len(set(log))
    assert len(rows_of(table.out / "table1.csv")) == 4


def test_plan_lists_the_runs_and_writes_nothing(table, capsys):
    assert table("--seeds 0 --plan -- --limit-train 10") == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"st_a_16-small-10-0", "st_a_16-small-0"} <= {*lines}
    assert lines[-1] == f"runs: {len(lines) - 1}, to go: {len(lines) - 1}"
    assert not table.out.exists() and not table.log()


def test_a_plan_that_must_fail_downloads_nothing(tmp_path):
    """One of the paper's tasks is not on the hub: it is looked at first."""
    with pytest.raises((ValueError, OSError), match="argument"):
        table1.main(["--plan", "--out", str(tmp_path)])


def test_gpus_and_cores_are_shared_out(monkeypatch):
    options = grid.Options()
    torchrun = grid.Options(launch="torchrun --nproc_per_node=8")
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)

    def visible(jobs):
        shares = [grid.environment(slot, jobs, 4, options) for slot in range(jobs)]
        return [share["CUDA_VISIBLE_DEVICES"] for share in shares]

    assert visible(1) == ["0,1,2,3"] and visible(2) == ["0,2", "1,3"]
    assert visible(4) == [*"0123"] and visible(6) == [*"012301"]
    for jobs, threads in ((2, "3"), (7, "1"), (16, "1")):
        share = grid.environment(0, jobs, 0, options)
        assert share["OMP_NUM_THREADS"] == share["RAYON_NUM_THREADS"] == threads
    alone = grid.environment(0, 1, 0, options)
    assert not {"OMP_NUM_THREADS", "OMP_WAIT_POLICY"} & alone.keys()
    assert "OMP_NUM_THREADS" not in grid.environment(0, 2, 1, torchrun)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")  # the user's
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert visible(2) == ["5", "7"]
    assert grid.environment(0, 2, 0, options)["OMP_NUM_THREADS"] == "5"


WRONG = """--jobs 0 | --jobs must be at least 1
--launch no-such-program | no-such-program
--part 3/3 | --part must be I/N
--fusion-options=--task=x | --task does not belong in --fusion-options
--fusion-options=--limit-train=5 | --limit-train does not belong
--fusion-options=--epochs=0 | --epochs must be at least 1
-- --see 3 | --see does not belong behind --
-- --limit-train 0 | --limit-train must be at least 1
--one-seed huge | --one-seed 'huge' is none of --tasks: big, middle, small"""


@pytest.mark.parametrize("line", WRONG.splitlines())
def test_wrong_input_ends_in_one_line(table, capsys, line):
    words, say = line.split(" | ")
    assert table(words) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1 and error[0].startswith("table1: ") and say in error[0]
    assert not (table.out / "runs").exists() and table.log() == []


# --------------------------------------------------------------------------------------------------
# With train.py itself


def test_a_small_grid_for_real(encoder, data_dir, tmp_path):
    places = {"model": tmp_path / "encoder", "data_dir": tmp_path / "data", "out": tmp_path / "out"}
    shutil.copytree(encoder, places["model"])
    shutil.copytree(data_dir, places["data_dir"])
    words = cli("--tasks rte pick --systems fusion_st_a --seeds 0 --jobs 2", **places)
    words += "-- --epochs 2 --lr 5e-3 --device cpu --limit-train 96".split()
    table1.main(words)
    out = places["out"]
    # both tasks have 96 examples: an adapter is its own target's and the other's source
    names = ["fusion_st_a-pick-0", "fusion_st_a-rte-0", "st_a_16-pick-0", "st_a_16-rte-0"]
    assert sorted(path.name for path in (out / "runs").iterdir()) == names
    config = json.loads((out / "runs" / "fusion_st_a-pick-0" / "config.json").read_text())
    assert config["adapters"] == ["rte", "pick"] and config["train_examples"] == 96
    accuracy = 100 * metrics(out, "fusion_st_a-rte-0")["accuracy"]
    assert rows_of(out / "table1-96.csv")["rte"]["fusion_st_a_mean"] == f"{accuracy:.2f}"
    text = (out / "results-96.md").read_text()
    assert "limit-train `96`" in text and "train-options `--epochs 2 --lr 5e-3" in text
    assert str(tmp_path) not in text  # nothing of this machine

    def refused(say, *more):
        grid.encoder.cache_clear()
        with pytest.raises(ValueError, match=say):
            table1.main([*words, *more])

    # the same paths, but not what the runs were made from
    refused("epochs = 2, not 3", "--epochs", "3")
    source = out / "runs" / "st_a_16-rte-0" / "adapter.safetensors"
    paths = [places["model"] / "model.safetensors", source, places["data_dir"] / "rte/train.jsonl"]
    changes = [(b"", b"\0\0\0\0"), (b"", b"\0\0\0\0"), (b'"label": 0', b'"label": 1')]
    says = ["encoder_sha256", "fusion_st_a-rte-0.*adapter_digests", "st_a_16-rte-0.*data"]
    for path, (old, new), say in zip(paths, changes, says, strict=True):
        before = path.read_bytes()
        path.write_bytes(before.replace(old, new, 1) if old else before[: -len(new)] + new)
        refused(say)
        path.write_bytes(before)
