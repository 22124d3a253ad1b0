"""experiments.grid and study, and the studies on them: tables, composition, architecture_search."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zlib
from types import SimpleNamespace
from unittest.mock import Mock, patch

import numpy as np
import pandas as pd
import pytest
import torch
from filelock import FileLock

import child
import data
import train
from conftest import change, cli, read_lines, thorough_after_first, times, write_rows
from experiments import architecture_search as search
from experiments import composition, grid, report, study, tables
from experiments.load_run import load_run
from formats.files import read_json, write_json
from fusion import FUSIONS
from reference import GOLDEN

# options of tables: what some of its runs are told; those on several tasks are of multitask
GRIDS = {
    "--seeds 1 --systems st_a_64 st_a_houlsby fusion_mt_a fusion_mt_a_top multitask "
    "-- --epochs 3": """
st_a_64-small-1: adapter --epochs 3 --adapter pfeiffer --reduction-factor 64 --task small --seed 1
st_a_houlsby-small-1: adapter --epochs 3 --adapter houlsby --reduction-factor 16
    --task small --seed 1
mt_a-1: --epochs 3 --adapter pal --tasks big middle small --seed 1
mt_a_top-1: --epochs 3 --adapter pfeiffer --tasks big middle small --seed 1
fusion_mt_a-small-1: fusion --epochs 3 --import experiments.pal --model runs/mt_a-1
    --task small --adapters runs/mt_a-1/adapters/big runs/mt_a-1/adapters/middle
    runs/mt_a-1/adapters/small --seed 1
multitask-1: --epochs 3 --without-adapters --tasks big middle small --seed 1
""",
    "--systems fusion_st_a multitask --seeds 0 --train-examples 7": """
st_a_16-big-0: adapter --adapter pfeiffer --reduction-factor 16 --task big --seed 0
st_a_16-middle-7-0: adapter --adapter pfeiffer --reduction-factor 16 --task middle --limit-train 7
    --seed 0
fusion_st_a-middle-7-0: fusion --task middle --adapters runs/st_a_16-big-0 runs/st_a_16-small-0
    runs/st_a_16-middle-7-0 --limit-train 7 --seed 0
fusion_st_a-small-0: fusion --task small --adapters runs/st_a_16-big-0 runs/st_a_16-middle-0
    runs/st_a_16-small-0 --seed 0
multitask-7-0: --without-adapters --tasks big middle small --limit-train 7 --seed 0
""",
}


@pytest.mark.parametrize("options", GRIDS)
def test_every_system_is_the_run_it_is_meant_to_be(options, tmp_path):
    for task, size in {"big": 9, "middle": 8, "small": 7}.items():
        rows = [{"text_a": "a", "label": i % 2} for i in range(size)]
        write_rows(tmp_path / task / "train.jsonl", rows)
    place = cli(tasks=["big", "middle", "small"], model="M", data_dir=tmp_path, out=".")
    args = tables.parse([*place, *options.split()])
    found = grid.with_needs(study.cells_of(args, args.seeds).values())
    for line in GRIDS[options].replace("\n    ", " ").strip().splitlines():
        name, expected = line.split(": ")
        stage, cell = re.match(r"\w+ |", expected)[0], found[name]
        assert cell.stage == (stage.strip() or "multitask")
        words = " ".join(cell.words).replace(f"--stage {stage}", "")
        common = f"--model M --data-dir {tmp_path} "
        assert f"{stage}{words.removeprefix(common)}" == f"{expected} --out runs/{name} --resume"


def test_table_2_of_the_papers_accuracies():
    """Finding 4 of section 5.2, and the counts of Table 2, which are 10, 11, 7 and 14 there."""
    args = SimpleNamespace(tasks=list(data.TASKS), systems=tables.SYSTEMS)
    theirs, texts = tables.paper_values(args, "bert")
    assert texts.at["rte", "mt_a"] == "77.61 ± 3.21" and texts.at["mnli", "head"] == "54.59"
    arrows = tables.arrows(tables.differences(theirs, tables.COMPARISONS))
    assert [*arrows.loc["*↗*"]] == ["9", "10", "7", "14"]
    assert arrows.loc["*↘*"].iloc[0] == "1" and arrows.loc["*↘*"].iloc[3] == "0"
    assert arrows.loc[tables.MEAN].iloc[0].startswith("1.28 (")


def test_an_interval_is_students():
    """Its half width, in standard errors, leaves 2.5 % of the t distribution on either side."""
    for n in (3, 5, 14, 15, 40):
        values = pd.Series([-1.0, 1.0] + [0.0] * (n - 2))
        half = float(report.with_interval(1e4 * values)[:-1].split(" to ")[1])
        x = np.linspace(-100, 100, 1_000_001)
        density = (1 + x**2 / (n - 1)) ** (-n / 2)
        share = density[x < half / 1e4 / values.sem()].sum() / density.sum()
        assert share == pytest.approx(0.975, abs=5e-4)
    assert report.with_interval(pd.Series([2.0, np.nan])) == "2.00"


@pytest.fixture
def started(monkeypatch):
    """started.names: of the runs that a grid has started; started.run: what each of them does, in
    this process, one after another."""
    started = SimpleNamespace(names=[], run=lambda cell: train.main(cell.words))

    def process(target, args, daemon):
        cell, status = args[0], 0
        started.names.append(cell.name)
        cell.log.parent.mkdir(parents=True, exist_ok=True)
        cell.log.write_text("what came before\n")
        monkeypatch.setattr(sys, "argv", ["train.py", *cell.words])
        try:
            started.run(cell)
        except (ValueError, OSError) as e:
            cell.log.write_text(f"what came before\ntrain.py: {e}\n")
            status = 2
        return Mock(exitcode=status)

    monkeypatch.setattr(grid.forks, "Process", process)
    monkeypatch.setattr("multiprocessing.connection.wait", lambda running, timeout: [*running])
    monkeypatch.delitem(sys.modules, "examples.mean_fusion", raising=False)  # --import runs it
    with patch.dict(FUSIONS), patch.dict(study.SYSTEMS), patch.dict(train.STAGES):
        yield started


TASKS = ["rte", "sst2", "pick"]


@pytest.fixture
def made_up(started, encoder, data_dir, tmp_path):
    """made_up(tables, "--seeds 0 1"): a study, whose runs take no time; their accuracies are made
    up from their names, or by made_up.accuracy. made_up.failing: the names of runs that fail"""

    def run(cell):
        if cell.name in made_up.failing:
            raise ValueError("this one fails")
        record = {"machine": {"command": shlex.join(sys.argv)}, "inputs": {"encoder": "Θ"}}
        options = vars(cell.options()) | {"adapters": [], "model": "M"}
        write_json(
            cell.out / "run.json", {**record, "options": options, "adapters": [], "tasks": []}
        )
        each = {task: made_up.accuracy(cell, task) for task in TASKS}
        accuracy = {"accuracy": sum(each.values()) / 3, "accuracies": each, "trained_parameters": 9}
        write_json(cell.out / "metrics.json", accuracy)

    def made_up(program, text, **options):
        given = {"model": encoder, "data_dir": data_dir, "out": tmp_path / "out"}
        program.main(cli(text, **{**given, **options}))

    made_up.accuracy = lambda cell, task: zlib.crc32(f"{cell.name} {task}".encode()) % 1000 / 1000
    started.run, made_up.failing = run, []
    return made_up


def test_tables_of_a_whole_grid(made_up, started, encoder, data_dir, tmp_path, capsys):
    """Planned, run, and written, beside the paper's values."""
    options, out = f"--seeds 0 1 --jobs 8 --tasks {' '.join(TASKS)}", tmp_path / "out"
    for state in ("to do", "finished"):  # then nothing is run
        with pytest.raises(SystemExit, match="0"):
            made_up(tables, f"{options} --plan")
        planned = re.findall(rf"^{state} +(\S+): (.*)", capsys.readouterr().out, re.MULTILINE)
        assert {"mt_a-1", "fusion_mt_a-rte-1", "full-pick-0"} < {*dict(planned)}
        assert "--adapter pal --tasks rte sst2 pick --seed 1" in dict(planned)["mt_a-1"]
        assert out.exists() == (state == "finished")
        made_up(tables, options)
        assert sorted(started.names) == sorted(name for name, _ in planned)

    args = tables.parse(cli(options, model=encoder, data_dir=data_dir, out=out))
    rows = pd.read_csv(out / "results.csv", index_col=study.COLUMNS)
    for place, cell in study.cells_of(args, args.seeds).items():
        assert rows["accuracy"][place] == pytest.approx(made_up.accuracy(cell, place[0]))
    page, points = (out / "results.md").read_text(), 100 * rows["accuracy"]
    for (task, _), of in points.groupby(["task", "system"]):
        assert re.search(rf"\| {task} .* {of.mean():.2f} ± {of.std():.2f} ", page)
    assert re.search(r"\| rte .*\(65.41 ± 0.90\).*\(71.04 ± 1.62\)", page)
    assert re.search(r"\| \*lr\* +\| 0.001 +\| 2e-05 +\| 0.0001 ", page)
    assert (out / "figure3.png").stat().st_size > 5000


def test_a_failure_stops_only_what_needs_it(made_up, started, tmp_path, capsys):
    """The encoder is a RoBERTa, so the paper's values are those of Table 4."""
    options = "--systems st_a_16 fusion_st_a --seeds 0 1 --jobs 2 --tasks rte pick"
    model = GOLDEN / "roberta" / "encoder"
    made_up.failing.append("st_a_16-rte-1")
    with pytest.raises(SystemExit, match="1"):
        made_up(tables, options, model=model)
    output = capsys.readouterr().out
    assert "failed: st_a_16-rte-1: train.py: this one fails (status 2, " in output
    for name in ("fusion_st_a-rte-1", "fusion_st_a-pick-1"):
        assert f"failed: {name}: st_a_16-rte-1 is not finished, which it needs" in output
    rows = pd.read_csv(tmp_path / "out" / "results.csv")
    runs = ["-".join(map(str, run)) for run in rows[["system", "task", "seed"]].to_numpy()]
    fused = {"fusion_st_a-rte-0", "fusion_st_a-pick-0"}
    assert {*runs} == {"st_a_16-rte-0", "st_a_16-pick-0", "st_a_16-pick-1", *fused}
    assert "(75.30 ± 0.61)" in (tmp_path / "out" / "results.md").read_text()
    made_up.failing.clear()
    made_up(tables, options, model=model)
    assert {*started.names[-3:]} == {"fusion_st_a-rte-1", "fusion_st_a-pick-1", "st_a_16-rte-1"}


def test_options_are_chosen_on_other_seeds(made_up, started, tmp_path):
    """For each system, those of what it needs first; sources are trained again with each seed."""
    rates = {"adapter": {"1": 0.2, "2": 0.6}, "fusion": {"3": 0.5, "4": 0.1}, "multitask": {}}

    def accuracy(cell, task):
        assert cell.stage != "fusion" or all("--lr 2" in shlex.join(n.words) for n in cell.needs)
        return rates[cell.stage].get(f"{vars(cell.options())['lr']:g}", 0.3)

    made_up.accuracy = accuracy
    words = "--target rte sst2 --sources sst2 pick --systems own fusion multitask --paired "
    words += "--adapter-options=--lr=1 --choose-seeds 5 6 --seeds 0 1"
    many = {"adapter_options": ["--lr 1", "--lr 2"], "fusion_options": ["--lr 3", "--lr 4"]}
    made_up(composition, words, **many)
    rows = pd.read_csv(tmp_path / "out" / "composition.csv")
    assert rows.groupby("system")["lr"].unique().map(list).to_dict() == {
        "own": [2.0],
        "fusion": [3.0],
        "multitask": [2e-5],
    }
    assert {*rows["seed"]} == {0, 1} and len(rows) == 2 * 2 * 3
    assert "fusion-rte-setting2-6" in started.names and "fusion-rte-setting2-1" not in started.names
    assert {"source-sst2-setting2-0", "source-sst2-setting2-1"} < {*started.names}
    assert (tmp_path / "out" / "composition.png").stat().st_size > 5000
    page = " ".join((tmp_path / "out" / "composition.md").read_text().split())
    assert "| fusion of the sources | 50.00 ± 0.00 | 50.00 ± 0.00 |" in page


def test_what_counts_as_finished(started, encoder, data_dir, tmp_path, copy, capsys):
    """A run of the same command, made from the data, adapters and encoder that lie there. Another
    command's is refused; --overwrite replaces it, and all that was made from it."""
    adapter, fusion = names = "st_a_16-rte-0", "fusion_st_a-rte-0"
    data_dir = shutil.copytree(data_dir, tmp_path / "data")
    words = cli("--tasks rte --systems fusion_st_a --seeds 0", model=copy(encoder))

    def starts(*names, epochs=1, options=""):
        started.names.clear()
        behind = cli("-- --device cpu --limit-train 90", epochs=epochs)
        tables.main([*words, *cli(options, data_dir=data_dir, out=tmp_path / "out"), *behind])
        assert started.names == [*names]

    starts(*names)
    starts()
    row, out = pd.read_csv(tmp_path / "out" / "results.csv").iloc[0], tmp_path / "out" / "runs"
    metrics = read_json(out / fusion / "metrics.json")
    assert (row["accuracy"], row["train_examples"]) == (metrics["accuracy"], 90)
    for file, split in (("train", "training"), ("validation", "development")):
        before = (path := data_dir / "rte" / f"{file}.jsonl").read_text()
        path.write_text(before.replace('label": 1', 'label": 0'))
        with pytest.raises(SystemExit):
            starts(adapter)
        assert f"holds a run with {split} examples of rte = " in capsys.readouterr().out
        path.write_text(before)
    starts()
    with pytest.raises(ValueError, match="is a finished run with --epochs 1, not --epochs 2: "):
        starts(epochs=2)
    starts(*names, epochs=2, options="--overwrite")
    change(out / adapter / "adapter.safetensors", times(1.5))
    with pytest.raises(SystemExit):
        starts(epochs=2)
    assert "holds a run with adapter rte = " in capsys.readouterr().out
    assert pd.read_csv(tmp_path / "out" / "results.csv").empty
    starts(fusion, epochs=2, options="--overwrite")
    write_json(tmp_path / "copy" / "run.json", {"encoder": "trained again since"})
    with pytest.raises(SystemExit):
        starts(*names, epochs=2)


def say_where(cell, gpu, threads):
    """In place of `work`: where it runs; b is killed."""
    cell.out.mkdir(parents=True)
    cell.log.parent.mkdir(exist_ok=True)
    cell.log.write_text(f"{gpu} {threads}")
    time.sleep(0.1)
    if cell.name == "b":
        os.kill(os.getpid(), signal.SIGKILL)


def test_three_at_a_time(monkeypatch, tmp_path, capsys):
    """They share GPUs and cores. A run that is killed fails alone, with what needs it."""
    monkeypatch.setattr(grid, "work", say_where)
    monkeypatch.setattr(grid, "is_finished", lambda cell: cell.name != "b")
    monkeypatch.setattr(grid, "row_of", lambda *_: {"accuracy": 0.5})
    monkeypatch.setattr(grid.torch, "get_num_threads", lambda: 7)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")  # the user's
    cells = {}
    for name in "abcde":  # d needs a, e needs b
        needs = [cells[{"d": "a", "e": "b"}[name]]] if name in "de" else []
        cells[name] = grid.Cell(name, tmp_path / "runs" / name, "full", [], needs)
    failed = grid.run_all(cells.values(), 3, [])
    assert failed.keys() == {"b", "e"} and "status -9" in failed["b"]
    assert [cells[name].log.read_text() for name in "abc"] == ["5 2", "7 2", "5 2"]
    assert not cells["e"].log.exists()
    assert re.search(r"d: 50.00 %.*; 5 of 5 after \d+ s\n$", capsys.readouterr().out)


# what words of a command add to the accuracy
POINTS = {"mh_adapter=true": 0.1, "output_adapter=false": 0.2, "original_ln_before=false": 0.02}
POINTS |= {"ln_after=true": 0.05, "adapter_residual_before_ln=true": 0.01, "8": 0.03, "full": 0.15}


def test_a_search_goes_on_from_the_best(launch, made_up, tmp_path, capsys):
    """Nothing is built on a step that lacks a run; what diverges has lost, though it was ahead. The
    architectures of others are shown beside, and do not win."""
    failing = "mh_adapter=true-output_adapter=false"
    with pytest.raises(FloatingPointError) as diverged:
        launch("--stage adapter --task sst2 --lr 1e30", out=tmp_path / "run")

    def accuracy(cell, task):
        if cell.name.startswith(failing) and "8" not in cell.words:
            raise ValueError(reason)
        return 0.4 + sum(POINTS.get(word, 0) for word in cell.words)

    made_up.accuracy = accuracy
    out, words = tmp_path / "out", "--tasks sst2 rte --seeds 0 1"
    for reason in ("the disk is full", str(diverged.value)):
        assert not (out / "search.csv").exists()
        with pytest.raises(SystemExit):
            made_up(search, words)
        assert f"failed: {failing}-2-sst2-0: train.py: {reason}" in capsys.readouterr().out
    text, rows = (out / "search.md").read_text(), pd.read_csv(out / "search.csv")
    best = ["both", "after", "after", "before the new LayerNorm", "relu"]
    assert re.findall(r"^\| \*\*(.*?)\*\*", text, re.MULTILINE) == sorted(best * 2, key=best.index)
    assert "sst2: full fine-tuning 55.00 ± 0.00." in text
    assert re.search(r"\*\*both\*\* +(\| +5[03].00 ± 0.00 +){4}\| +50.75 \| +50.00 \|", text)
    assert re.search(r"\| houlsby +\|", text) and re.search(r"\| bapna +\|", text)
    found = rows[(rows["option"] == "swish") & (rows["reduction_factor"] == 8)]
    upon = 0.4 + 0.1 + 0.02 + 0.05 + 0.01 + 0.03  # what was best before
    assert found["accuracy"].tolist() == 4 * [pytest.approx(upon)]
    assert (out / "new_LayerNorm.png").stat().st_size > 5000


@pytest.mark.parametrize("end", thorough_after_first(*"SIGTERM SIGINT SIGHUP".split()))
def test_no_run_is_left_behind(end, encoder, data_dir, tmp_path):
    """However tables ends. They have saved what they had, and give one piece of advice."""
    words = cli("--tasks rte --systems full --seeds 0 1 --jobs 2", model=encoder, out=tmp_path)
    words += [*cli(data_dir=data_dir), *cli("-- --epochs 9999 --patience 9999 --device cpu")]
    command, pipe = [sys.executable, "-m", "experiments.tables", *words], subprocess.PIPE
    process = subprocess.Popen(command, cwd=child.ROOT, stdout=pipe, stderr=pipe, text=True)
    while sum("epoch  2:" in path.read_text() for path in tmp_path.glob("logs/*")) < 2:
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(getattr(signal, end))
    output, error = process.communicate(timeout=60)
    assert process.returncode == 130 and error.count("\n") == 1
    assert "the same command goes on" in error and "--resume" not in output
    for saved in (tmp_path / "runs" / f"full-rte-{seed}" / "resume.pt" for seed in (0, 1)):
        assert saved.is_file()
        FileLock(saved.with_name(".lock"), timeout=0).acquire()  # which a run would hold


CONTROLS = """head= head_on_sst2=sst2 head_on_pick=pick own= full= mean=sst2,pick
    mean_with_own=sst2,pick,rte fusion=sst2,pick fusion_with_own=sst2,pick,rte fusion_of_own=rte
    fusion_without_sst2=pick fusion_without_pick=sst2 mine_pick=sst2"""
ADAPTERS = dict(word.split("=") for word in CONTROLS.split())  # of composition's systems
MINE = """
import train
from adapter import activate
from experiments.study import SYSTEMS

def build(args, bert, task):
    activate(bert, [*bert.adapter_configs][0])

train.STAGES["further"] = {"lr": 1e-3, "epochs": 1, "build": build}
SYSTEMS["mine_"] = "a stage of my own without ", "further", "--import mine", "others"
"""


def test_every_control(runs, encoder, data_dir, tmp_path, capsys, started, monkeypatch):
    """And a system, and a stage with options, that a module of the user's adds. The encoder is that
    of the sources."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("ADAPTERFUSION_MODEL", raising=False)
    words = cli("--target rte --seeds 0 1 --train-examples 48", data_dir=data_dir, out=tmp_path)
    words += cli(sources=["sst2", runs / "pick"], systems=[*composition.SYSTEMS, "mine_pick"])
    words += ["--import", "mine", "--further-options", "--lr 2e-3 --epochs 1"]
    words += ["--fusion-options", "--fusion attention"]  # the control's is still mean
    composition.main([*words, "--", *cli("--device cpu --epochs 1 --lr 5e-3")])
    printed = capsys.readouterr().out.replace("|", " ").splitlines()
    rows = pd.read_csv(tmp_path / "composition.csv")
    assert [*dict.fromkeys(rows["system"])] == [*ADAPTERS] and len(rows) == 2 * len(ADAPTERS)
    for row in rows.itertuples():
        run = tmp_path / "runs" / f"{row.system}-rte-48-{row.seed}"
        record = read_json(run / "run.json")
        options = record["options"]
        assert options["model"] == str(encoder)
        assert row.accuracy == read_json(run / "metrics.json")["accuracy"]
        assert options["limit_train"] == row.train_examples == 48 and options["seed"] == row.seed
        assert ",".join(record["adapters"]) == ADAPTERS[row.system]
        sources = [str(run.with_name(name)) for name in (f"own-rte-48-{row.seed}", "source-sst2-0")]
        for path in run.glob("adapters/*/run.json"):
            assert read_json(path)["options"]["out"] in (*sources, str(runs / "pick"))
        if row.system.startswith(("fusion", "mean")):
            assert options["fusion"] == ("mean" if "mean" in row.system else "attention")
    points = rows.pivot(index="seed", columns="system", values="accuracy") * 100
    for system in ADAPTERS.keys() - {"fusion"}:
        gain = report.with_interval(points["fusion"] - points[system])
        values = ", ".join(f"{value:.1f}" for value in points[system])
        mean = f"{points[system].mean():.2f} ± {points[system].std():.2f}"
        assert any(" ".join(line.split()).endswith(f"{values} {mean} {gain}") for line in printed)


def test_what_is_held_out(runs, encoder, data_dir, tmp_path, capsys, started):
    """--test asks every run for what it was not trained on, or for the same examples. All options
    of train.py reach the target, and what is held out of its file is not a part of that."""
    rows, file = (data_dir / "rte" / "train.jsonl").read_text(), tmp_path / "mine.jsonl"
    file.write_text(rows.replace("sentence1", "question").replace("sentence2", "answer"))
    words = cli("--target mine --systems fusion --test --seeds 1", model=encoder, out=tmp_path)
    words += cli("--train-examples 24 48", sources=[f"other={runs / 'rte'}", runs / "pick"])
    behind = cli("-- --device cpu --epochs 1 --dev-fraction 0.25", train_file=file)
    behind += cli("--columns text_a=question text_b=answer")
    composition.main([*words, *behind])
    warning = "WARNING: fusion-mine-24-1: adapter other was TRAINED on 100% of them"
    assert warning in capsys.readouterr().out
    rows = pd.read_csv(tmp_path / "composition.csv")
    assert [*rows["train_examples"]] == [24, 48]
    for row in rows.itertuples():
        run = load_run(tmp_path / "runs" / f"fusion-mine-{row.train_examples}-1")
        assert run.adapters == ["other", "pick"] and run.task.columns == ["text_a", "text_b"]
        size = row.train_examples
        drawn = data.load_split(run.task, run.source, "train", run.tokenizer, size, 1)
        left = run.left_over()
        assert run.is_own("train", drawn) and len(left) == 72 - row.train_examples
        assert {example.hash for example in left}.isdisjoint(example.hash for example in drawn)
        found = train.evaluate(run.model, run.task, left, run.args)
        assert row.test_accuracy == found["accuracy"]
    write_rows(tmp_path / "test" / "mine" / "validation.jsonl", read_lines(file)[:7])
    words[words.index("--test")] = f"--test={tmp_path / 'test'}"
    composition.main([*words, *behind])
    assert "% of 7 held-out examples" in capsys.readouterr().out


def test_what_is_forgotten(launch, tmp_path, monkeypatch):
    """docs/tables.md: the head of the first task, on the Θ of the second"""
    page = (child.ROOT / "docs" / "tables.md").read_text()
    (code,) = re.findall(r"^```python\n(import train\n.*?)^```", page, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    first, second = "runs/full-mnli", "runs/full-rte"
    launch("--stage full --task pick --epochs 1", out=first)
    launch("--stage full --task rte --epochs 1", out=second, model=first)
    exec(code, found := {})
    before, later, run = load_run(first), load_run(second), found["run"]
    for ours, theirs in ((run.model.head, before.model.head), (run.bert, later.bert)):
        assert all(map(torch.equal, ours.state_dict().values(), theirs.state_dict().values()))
    assert not torch.equal(before.bert.layers[0].query.weight, run.bert.layers[0].query.weight)
