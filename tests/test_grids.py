"""experiments.grid, and the grids on it: tables, architecture_search and composition."""

import itertools
import math
import re
import shlex
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pandas as pd
import pytest
import torch
from filelock import FileLock

import child
import data
import train
from conftest import change, cli, thorough_after_first, times
from experiments import architecture_search as search
from experiments import composition, grid, tables
from experiments.load_run import load_run
from formats.files import read_json, write_json
from fusion import FUSIONS
from reference import GOLDEN

# options of tables: what some of its runs are told; those on several tasks are of multitask
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
    "--systems sequential -- --lr=1": """
sequential-big-small-2: full --model M --lr=1 --task small --model runs/full-big-2 --seed 2
""",
}


@pytest.mark.parametrize("options", GRIDS)
def test_every_system_is_the_run_it_is_meant_to_be(options):
    sizes = {"big": 40000, "middle": 3000, "small": 250}
    args = tables.parse([*cli(tasks=[*sizes], model="M", out="."), *options.split()])
    args.sizes = sizes
    cells = tables.cells_of(args).values()
    found = {cell.name: cell for one in cells for cell in (*one.needs, one)}
    for line in GRIDS[options].replace("\n    ", " ").strip().splitlines():
        name, expected = line.split(": ")
        stage, cell = re.match(r"\w+ |", expected)[0], found[name]
        assert cell.stage == (stage.strip() or "multitask")
        words = " ".join(cell.words).replace(f"--stage {stage}", "")
        assert f"{stage}{words}" == f"{expected} --out runs/{name} --resume"


def test_table_2_of_the_papers_accuracies():
    """Finding 4 of section 5.2, and the counts of Table 2, which are 10, 11, 7 and 14 there."""
    args = SimpleNamespace(tasks=list(data.TASKS), systems=tables.ALL_SYSTEMS)
    papers = pd.read_csv(tables.PAPER, index_col="task")
    theirs = tables.with_mean(papers[papers["encoder"] == "bert-base-uncased"], args)
    arrows = tables.differences(theirs, tables.COMPARISONS).map(tables.arrow).sum()
    assert [text.count("↗") for text in arrows] == [9, 10, 7, 14]
    assert arrows.iloc[0].count("↘") == 1 and "↘" not in arrows.iloc[3]


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
    monkeypatch.delitem(sys.modules, "examples.mean_fusion", raising=False)  # --import runs it
    with patch.dict(FUSIONS):
        yield started


TASKS = ["rte", "sst2", "pick"]


@pytest.fixture
def table(started, encoder, data_dir, tmp_path):
    """table("--seeds 0 1"): tables, whose runs take no time; their accuracies are made up from
    their names. table.failing: the names of runs that fail"""
    given = {"tasks": TASKS, "model": encoder, "data_dir": data_dir, "out": tmp_path / "out"}

    def table(text, **options):
        tables.main(cli(text, **{**given, **options}))

    def run(cell):
        if cell.name in table.failing or not all(map(grid.is_finished, cell.needs)):
            raise ValueError("this one fails")
        record = {"machine": {"command": shlex.join(sys.argv)}, "inputs": {"encoder": "Θ"}}
        record |= {"options": {"adapters": [], "model": "M"}, "adapters": []}
        write_json(cell.out / "run.json", record)
        each = {task: zlib.crc32(f"{cell.name} {task}".encode()) % 1000 / 1000 for task in TASKS}
        write_json(cell.out / "metrics.json", {"accuracies": each})

    started.run, table.failing = run, []
    return table


def test_tables_of_a_whole_grid(table, started, tmp_path, capsys):
    """Planned, run, and written, beside the paper's values."""
    options, out = "--seeds 0 1 --jobs 8", tmp_path / "out"
    for state in ("to do", "finished"):  # then nothing is run
        with pytest.raises(SystemExit, match="0"):
            table(f"{options} --plan")
        planned = re.findall(rf"^{state} +(\S+): (.*)", capsys.readouterr().out, re.MULTILINE)
        assert {"mt_a-1", "fusion_mt_a-rte-1", "full-pick-0"} < {*dict(planned)}
        assert "--adapter pal --tasks rte sst2 pick --seed 1" in dict(planned)["mt_a-1"]
        assert out.exists() == (state == "finished")
        table(options)
        assert sorted(started.names) == sorted(name for name, _ in planned)

    args = tables.parse(cli(options, tasks=TASKS, out=out))
    args.sizes = dict.fromkeys(TASKS, 96)
    rows = pd.read_csv(out / "results.csv", index_col=["task", "system", "seed"])
    for place, cell in tables.cells_of(args).items():
        accuracy = read_json(cell.out / "metrics.json")["accuracies"][place[0]]
        assert rows["accuracy"][place] == pytest.approx(accuracy)
    page, points = (out / "results.md").read_text(), 100 * rows["accuracy"]
    for (task, _), of in points.groupby(["task", "system"]):
        assert re.search(rf"\| {task} .* {of.mean():.2f} ± {of.std():.2f} ", page)
    assert re.search(r"\| rte .*\(65.41\).*\(71.04\)", page)
    assert (out / "figure3.png").stat().st_size > 5000


def test_a_failure_stops_only_what_needs_it(table, started, tmp_path, capsys):
    """The encoder is a RoBERTa, so the paper's values are those of Table 4."""
    options = "--systems st_a_16 fusion_st_a --seeds 0 1 --jobs 2"
    places = {"model": GOLDEN / "roberta" / "encoder", "tasks": ["rte", "pick"]}
    table.failing.append("st_a_16-rte-1")
    with pytest.raises(SystemExit, match="1"):
        table(options, **places)
    output = capsys.readouterr().out
    assert re.search(r"; 5 of 8 runs are finished after \d+ s\n", output)
    for name in ("st_a_16-rte-1", "fusion_st_a-pick-1"):
        assert f"failed: {name}: train.py: this one fails (status 2, " in output
    rows = pd.read_csv(tmp_path / "out" / "results.csv")
    runs = ["-".join(map(str, run)) for run in rows[["system", "task", "seed"]].to_numpy()]
    fused = {"fusion_st_a-rte-0", "fusion_st_a-pick-0"}
    assert {*runs} == {"st_a_16-rte-0", "st_a_16-pick-0", "st_a_16-pick-1", *fused}
    assert "(75.30)" in (tmp_path / "out" / "results.md").read_text()
    table.failing.clear()
    table(options, **places)
    assert {*started.names[-3:]} == {"fusion_st_a-rte-1", "fusion_st_a-pick-1", "st_a_16-rte-1"}


def test_what_counts_as_finished(started, encoder, data_dir, tmp_path, copy, capsys):
    """A run of the same command, made from the adapters and the encoder that lie there. Another
    command's is refused; --overwrite replaces it, and all that was made from it."""
    adapter, fusion = names = "st_a_16-rte-90-0", "fusion_st_a-rte-90-0"
    words = cli("--tasks rte --systems fusion_st_a --seeds 0", model=copy(encoder))

    def starts(*names, epochs=1, options=""):
        started.names.clear()
        behind = cli("-- --device cpu --limit-train 90", epochs=epochs)
        tables.main([*words, *cli(options, data_dir=data_dir, out=tmp_path / "out"), *behind])
        assert started.names == [*names]

    starts(*names)
    starts()
    row, out = pd.read_csv(tmp_path / "out" / "results-90.csv").iloc[0], tmp_path / "out" / "runs"
    metrics = read_json(out / fusion / "metrics.json")
    assert (row["accuracy"], row["train_examples"]) == (metrics["accuracy"], 90)
    with pytest.raises(ValueError, match="is a finished run with --epochs 1, not --epochs 2: "):
        starts(epochs=2)
    starts(*names, epochs=2, options="--overwrite")
    change(out / adapter / "adapter.safetensors", times(1.5))
    with pytest.raises(SystemExit):
        starts(epochs=2)
    assert "holds a run with adapter rte = " in capsys.readouterr().out
    assert pd.read_csv(tmp_path / "out" / "results-90.csv").empty
    starts(fusion, epochs=2, options="--overwrite")
    write_json(tmp_path / "copy" / "run.json", {"encoder": "trained again since"})
    with pytest.raises(SystemExit):
        starts(*names, epochs=2)


def test_three_at_a_time(monkeypatch, capsys):
    """They share GPUs and cores; it is never silent for long. Each takes 400 seconds."""
    given, clock = [], SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    clock.sleep = lambda _: setattr(clock, "now", clock.now + 1)

    class Process:
        exitcode = property(lambda _: 0 if clock.now > 400 else None)

        def __init__(self, target, args, daemon):
            self.start = lambda: given.append(args[1:])

    monkeypatch.setattr(grid, "time", clock)
    monkeypatch.setattr(grid.forks, "Process", Process)
    monkeypatch.setattr(grid, "outcome", lambda cell, *_: cell.name)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")  # the user's
    grid.run_all([grid.Cell(name, Path(), "full", [], []) for name in "abc"], 3, [])
    assert given == [("5", 2), ("7", 2), ("5", 2)]
    *waiting, last = capsys.readouterr().out.splitlines()
    assert last == "a; b; c; 3 of 3 runs are finished after 401 s"
    said = [int(line.removeprefix("0 of 3 runs are finished after ")[:-2]) for line in waiting]
    assert said[0] < 15 and all(b < 1.5 * a + 10 for a, b in itertools.pairwise(said))


# what words of a command add to the accuracy
POINTS = {"mh_adapter=true": 0.1, "output_adapter=false": 0.2, "original_ln_before=false": 0.02}
POINTS |= {"ln_after=true": 0.05, "adapter_residual_before_ln=true": 0.01, "8": 0.03, "full": 0.15}


def test_a_search_goes_on_from_the_best(launch, encoder, data_dir, tmp_path, capsys, monkeypatch):
    """Nothing is built on a step that lacks a run; what diverges has lost, though it was ahead."""
    failing, commands = "sst2-mh_adapter=true-output_adapter=false-2", {}
    with pytest.raises(FloatingPointError) as diverged:
        launch("--stage adapter --task sst2 --lr 1e30", out=tmp_path / "run")

    def run(args, columns, cells):
        rows, failed = [], {}
        assert len({cell.name for cell in cells.values()}) == len(cells)
        for place, cell in cells.items():
            assert commands.setdefault(cell.name, cell.words) == cell.words
            cell.options()  # which train.py understands
            if cell.name.startswith(failing):
                failed[cell.name] = reason
            else:
                rows.append([*place, 0.5 + sum(POINTS.get(word, 0) for word in cell.words)])
        return pd.DataFrame(rows, columns=[*columns, "accuracy"]), failed

    monkeypatch.setattr(grid, "run", run)
    monkeypatch.setattr(search, "REDUCTION_FACTORS", (2.0, 8.0))
    words = cli("--tasks sst2 --seeds 0 1", model=encoder, data_dir=data_dir, out=tmp_path)
    for reason in ("the disk is full", f"train.py: {diverged.value} (status 2, log.txt)"):
        assert not (tmp_path / "search.csv").exists()
        with pytest.raises(SystemExit):
            search.main(words)
        assert f"failed: {failing}-0: {reason}" in capsys.readouterr().out
    text, rows = (tmp_path / "search.md").read_text(), pd.read_csv(tmp_path / "search.csv")
    best = ["both", "after", "after", "before the new LayerNorm", "relu (the paper's)"]
    assert re.findall(r"^\| \*\*(.*?)\*\*", text, re.MULTILINE) == best
    assert "Full fine-tuning: 65.00 ± 0.00." in text
    assert len(re.findall(r"r = 2 +\| r = 8 +\| +mean", text)) == len(best)
    assert re.search(r"\*\*both\*\* +\| 60.00 ± 0.00 +\| 63.00 ± 0.00 +\| +61.50 ", text)
    found = rows[(rows["option"] == "swish") & (rows["reduction_factor"] == 8)]
    upon = 0.5 + 0.1 + 0.02 + 0.05 + 0.01 + 0.03  # what was best before
    assert found["accuracy"].tolist() == 2 * [pytest.approx(upon)]
    assert (tmp_path / "sst2.png").stat().st_size > 5000


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


SYSTEMS = """head= head_on_sst2=sst2 head_on_pick=pick own= full= mean=sst2,pick
    mean_with_own=sst2,pick,rte fusion=sst2,pick fusion_with_own=sst2,pick,rte fusion_of_own=rte
    fusion_without_sst2=pick fusion_without_pick=sst2"""
ADAPTERS = dict(word.split("=") for word in SYSTEMS.split())  # of composition's systems


def test_every_control(runs, encoder, data_dir, tmp_path, capsys, started):
    words = cli("--target rte --seeds 0 1", model=encoder, data_dir=data_dir, out=tmp_path)
    words += cli("--train-examples 48", sources=["sst2", runs / "pick"])
    words += ["--fusion-options", "--fusion attention"]  # the control's is still mean
    composition.main([*words, "--", *cli("--device cpu --epochs 1 --lr 5e-3")])
    printed = capsys.readouterr().out.replace("|", " ").splitlines()

    rows = pd.read_csv(tmp_path / "composition.csv")
    assert [*dict.fromkeys(rows["system"])] == [*ADAPTERS] and len(rows) == 2 * len(ADAPTERS)
    for row in rows.itertuples():
        run = tmp_path / "runs" / f"{row.system}-48-{row.seed}"
        record = read_json(run / "run.json")
        options = record["options"]
        assert row.accuracy == read_json(run / "metrics.json")["accuracy"]
        assert options["limit_train"] == row.train_examples == 48 and options["seed"] == row.seed
        assert ",".join(record["adapters"]) == ADAPTERS[row.system]
        sources = [str(run.with_name(name)) for name in (f"own-48-{row.seed}", "source-sst2")]
        for path in run.glob("adapters/*/run.json"):
            assert read_json(path)["options"]["out"] in (*sources, str(runs / "pick"))
        if row.system.startswith(("fusion", "mean")):
            assert options["fusion"] == ("mean" if "mean" in row.system else "attention")
    points = rows.pivot(index="seed", columns="system", values="accuracy") * 100
    for system in ADAPTERS.keys() - {"fusion"}:
        gain = points["fusion"] - points[system]
        values = ", ".join(f"{value:.1f}" for value in points[system])
        mean = f"{points[system].mean():.2f} ± {points[system].std():.2f}"
        numbers = f"{values} {mean} {gain.mean():.2f} {gain.min():.2f}"
        assert any(" ".join(line.split()).endswith(numbers) for line in printed)


def test_what_is_left_over(runs, encoder, data_dir, tmp_path, capsys, started):
    """--test asks every run for what it was not trained on. All options of train.py reach the
    target, and what is held out of its file is not a part of that."""
    rows, file = (data_dir / "rte" / "train.jsonl").read_text(), tmp_path / "mine.jsonl"
    file.write_text(rows.replace("sentence1", "question").replace("sentence2", "answer"))
    words = cli("--target mine --systems fusion --test --seeds 1", model=encoder, out=tmp_path)
    words += cli("--train-examples 24 48", sources=[f"other={runs / 'rte'}", runs / "pick"])
    behind = cli("-- --device cpu --epochs 1 --dev-fraction 0.25", train_file=file)
    behind += cli("--columns text_a=question text_b=answer")
    composition.main([*words, *behind])
    assert "WARNING: fusion-24-1: other was TRAINED on 100% of them" in capsys.readouterr().out
    rows = pd.read_csv(tmp_path / "composition.csv")
    assert [*rows["train_examples"]] == [24, 48]
    for row in rows.itertuples():
        run = load_run(tmp_path / "runs" / f"fusion-{row.train_examples}-1")
        assert run.adapters == ["other", "pick"] and run.task.columns == ["text_a", "text_b"]
        source, size = run.source_in(), row.train_examples
        drawn = data.load_split(run.task, source, "train", run.tokenizer, size, 1)
        left = run.left_over()
        assert run.is_own("train", drawn) and len(left) == 72 - row.train_examples
        assert {example.hash for example in left}.isdisjoint(example.hash for example in drawn)
        found = train.evaluate(run.model, run.task, left, run.args)
        assert row.test_accuracy == found["accuracy"]


def test_the_encoder_is_that_of_the_sources(runs, encoder, data_dir, monkeypatch):
    monkeypatch.delenv("ADAPTERFUSION_MODEL", raising=False)
    words = cli("--target own --systems fusion own", sources=["sst2", runs / "rte"])
    cells = composition.cells_of(composition.parse([*words, *cli(data_dir=data_dir)]))
    assert {cell.options().model for cell in cells.values()} == {str(encoder)}


def test_what_the_development_set_chooses():
    """Among heads, own, the fusion, and the fusion with own; other systems are no choice."""
    accuracies = {"own": (0.5, 0.8), "head_on_a": (0.6, 0.6), "fusion": (0.6, 0.7), "full": (1, 1)}
    rows = pd.DataFrame(accuracies).rename_axis("seed").melt(var_name="system", ignore_index=False)
    rows = rows.rename(columns={"value": "accuracy"}).reset_index()
    rows = rows.assign(test_accuracy=1 - rows["accuracy"], dev_examples=100)
    (first, second), header = composition.choices(rows)
    assert first[:3] == ["0", "new head on a", "fusion of the sources"]  # ties keep the order
    assert first[3:] == pytest.approx([0, math.sqrt(48), 40, 0])
    assert second[:3] == ["1", "the target's own adapter", "fusion of the sources"]
    assert second[3:] == pytest.approx([10, math.sqrt(16 + 21), 20, -10])
    assert len(header) == len(first)
