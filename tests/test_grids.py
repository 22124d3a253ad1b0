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
from concurrent.futures import Future
from types import SimpleNamespace
from unittest.mock import patch

import pandas as pd
import pytest
from filelock import FileLock

import child
import conftest
import data
import train
from conftest import change, cli, read_lines, same_tensors, times
from experiments import architecture_search as search
from experiments import composition, grid, report, study, tables
from experiments.load_run import load_run
from formats.files import read_json, write_json
from fusion import FUSIONS

TASKS = ["rte", "sst2", "pick"]
OPTIONS = "--seeds 1 --systems st_a_64 fusion_st_a fusion_paper fusion_mt_a multitask"
RUNS = """
st_a_64-middle-7-1: --stage adapter --adapter pfeiffer --reduction-factor 64 --task middle
    --limit-train 7
fusion_st_a-middle-7-1: --stage fusion --task middle
    --adapters runs/st_a_16-big-1 runs/st_a_16-small-1 runs/st_a_16-middle-7-1 --limit-train 7
fusion_st_a-small-1: --stage fusion --task small
    --adapters runs/st_a_16-big-1 runs/st_a_16-middle-1 runs/st_a_16-small-1
fusion_paper-small-1: --stage fusion --adapters paper --task small
mt_a-7-1: --adapter pal --tasks big middle small --limit-train 7
fusion_mt_a-small-7-1: --stage fusion --import experiments.pal --model runs/mt_a-7-1 --task small
    --adapters runs/mt_a-7-1/adapters/big runs/mt_a-7-1/adapters/middle
    runs/mt_a-7-1/adapters/small --limit-train 7
multitask-7-1: --without-adapters --tasks big middle small --limit-train 7
"""  # some of those that tables plans with these options; the last size is that of `small`


def test_every_system_is_the_run_it_is_meant_to_be(tmp_path):
    for task, size in {"big": 9, "middle": 8, "small": 7}.items():
        rows = [{"text_a": "a", "label": i % 2} for i in range(size)]
        change(tmp_path / task / "train.jsonl", rows)
    place = cli(tasks=["big", "middle", "small"], model="M", data_dir=tmp_path, out=".")
    args = tables.parse([*place, *OPTIONS.split(), *cli("--train-examples 7 -- --epochs 3")])
    found = grid.with_needs(study.cells_of(args, args.seeds).values())
    common = f"--model M --data-dir {tmp_path} --epochs 3"
    for line in RUNS.replace("\n    ", " ").strip().splitlines():
        name, words = line.split(": ")
        expected = f"{common} {words} --seed 1 --out runs/{name} --resume"
        assert " ".join(found[name].words) == expected
        assert found[name].stage in words or found[name].stage == "multitask"


def test_table_2_of_the_papers_accuracies():
    """Finding 4 of section 5.2, and the counts of Table 2, which are 10, 11, 7 and 14 there."""
    args = SimpleNamespace(tasks=list(data.TASKS), systems=[*tables.SYSTEMS, "fusion_paper"])
    theirs, texts = tables.paper_values(args, "bert")
    assert texts.at["rte", "mt_a"] == "77.61 ± 3.21" and texts.at["mnli", "head"] == "54.59"
    assert texts.at["rte", "fusion_paper"] == texts.at["rte", "fusion_st_a"] == "76.82 ± 1.68"
    arrows = tables.arrows(tables.differences(theirs, tables.COMPARISONS))
    assert [*arrows.loc["*↗*"]] == ["9", "10", "7", "14", "9", "10"]  # the last: --adapters paper
    assert arrows.loc["*↘*"].iloc[0] == "1" and arrows.loc["*↘*"].iloc[3] == "0"
    assert arrows.loc[tables.MEAN].iloc[0].startswith("1.28 (")
    assert tables.paper_values(args, "roberta")[1].at["rte", "st_a_16"] == "75.30 ± 0.61"


@pytest.mark.parametrize("n, quantile", [(3, 4.303), (5, 2.776), (14, 2.160), (40, 2.023)])
def test_an_interval_is_students(n, quantile):
    """97.5 % of the t distribution with n - 1 degrees of freedom are below the quantile."""
    values = pd.Series([-1.0, 1.0] + [0.0] * (n - 2))
    assert report.half_interval(values) == pytest.approx(quantile * values.sem(), rel=1e-3)
    for few, said in (([1.0, 2.0], "1.50"), ([0.1] * 3, "0.10")):
        assert report.with_interval(pd.Series(few)) == said


@pytest.fixture
def started(monkeypatch):
    """.names: of the runs that a grid has started; .run: what each does, in this process."""
    started = SimpleNamespace(names=[], run=lambda cell: train.main(cell.words))

    def submit(executor, function, cell, *how):
        future, status = Future(), 0
        started.names.append(cell.name)
        monkeypatch.setattr(sys, "argv", ["train.py", *cell.words])
        try:
            started.run(cell)
        except (ValueError, OSError) as e:
            with open(cell.log, "a") as log:
                log.write(f"what came before\ntrain.py: {e}\nof another process\n")
            status = 2
        future.set_result(status)
        return future

    monkeypatch.setattr(grid.ThreadPoolExecutor, "submit", submit)
    monkeypatch.delitem(sys.modules, "examples.composing", raising=False)  # --import runs it
    with patch.dict(FUSIONS), patch.dict(study.SYSTEMS), patch.dict(train.STAGES):
        yield started


@pytest.fixture
def made_up(started, encoder, data_dir, tmp_path, monkeypatch):
    """made_up(tables, "--seeds 0 1"): a study without training; .accuracy: of a run, on a task"""

    def run(cell):
        options = {**vars(cell.options()), "adapters": [], "model": "M"}
        record = {"options": options, "adapters": [], "tasks": {}, "inputs": {}, "warnings": []}
        write_json(cell.out / "run.json", {**record, "machine": {"command": shlex.join(sys.argv)}})
        each = {task: made_up.accuracy(cell, task) for task in TASKS}
        accuracy = {"accuracy": sum(each.values()) / 3, "accuracies": each, "trained_parameters": 9}
        write_json(cell.out / "metrics.json", accuracy)

    def made_up(program, text, **more):
        program.main(cli(text, model=encoder, data_dir=data_dir, out=tmp_path / "out", **more))

    monkeypatch.setattr(grid, "inputs_now", lambda *_: {})
    made_up.accuracy = lambda cell, task: zlib.crc32(f"{cell.name} {task}".encode()) % 1000 / 1000
    started.run = run
    return made_up


def test_tables_of_a_whole_grid(made_up, started, encoder, data_dir, tmp_path, capsys):
    """Planned, run, and written, beside the paper's values."""
    options, out = f"--seeds 0 1 --jobs 8 --tasks {' '.join(TASKS)}", tmp_path / "out"
    with pytest.raises(SystemExit, match="0"):
        made_up(tables, f"{options} --plan")
    planned = re.findall(r"^to do +(\S+): ", capsys.readouterr().out, re.MULTILINE)
    assert {"mt_a-1", "fusion_mt_a-rte-1", "full-pick-0"} < {*planned} and not out.exists()
    for _ in range(2):  # the second time nothing is run
        made_up(tables, options)
        assert sorted(started.names) == sorted(planned)
    args = tables.parse(cli(options, model=encoder, data_dir=data_dir, out=out))
    rows = pd.read_csv(out / "results.csv", index_col=study.COLUMNS)
    for place, cell in study.cells_of(args, args.seeds).items():
        assert rows["accuracy"][place] == pytest.approx(made_up.accuracy(cell, place[0]))
    page, points = (out / "results.md").read_text(), 100 * rows["accuracy"]
    for (task, _), of in points.groupby(["task", "system"]):
        assert re.search(rf"\| {task} .* {of.mean():.2f} ± {of.std():.2f} ", page)
    assert re.search(r"\| rte .*\(65.41 ± 0.90\).*\(71.04 ± 1.62\)", page)
    assert (out / "figure3.png").is_file()


def test_options_are_chosen_on_other_seeds(made_up, started, tmp_path):
    """For each system, those of what it needs first; a multi-task run has the best mean."""
    rates = {"adapter": {"1": 0.2, "2": 0.6}, "fusion": {"3": 0.5, "4": 0.1}}
    rates["multitask"] = {"5": 0.2, "6": 0.4}

    def accuracy(cell, task):
        wanted = "--lr 6" if "--import" in cell.words else "--lr 2"  # fusion_mt_a
        assert cell.stage != "fusion" or all(wanted in shlex.join(n.words) for n in cell.needs)
        best_of_one = cell.stage == "multitask" and task == TASKS[-1]
        found = rates[cell.stage].get(f"{vars(cell.options())['lr']:g}", 0.3)
        return 0.5 - found if best_of_one else found

    made_up.accuracy = accuracy
    words = "--target rte sst2 pick --systems own fusion multitask fusion_mt_a --paired "
    words += "--train-examples 5000 6000 --choose-seeds 5 6 --seeds 0 1"
    many = {"adapter_options": ["--lr 1", "--lr 2"], "fusion_options": ["--lr 3", "--lr 4"]}
    made_up(composition, words, **many, multitask_options=["--lr 5", "--lr 6"])
    rows = pd.read_csv(tmp_path / "out" / "composition.csv")
    found = rows.groupby("system")["lr"].unique().map(list).to_dict()
    assert found == {"own": [2.0], "fusion": [3.0], "multitask": [6.0], "fusion_mt_a": [3.0]}
    assert {*rows["seed"]} == {0, 1} and len(rows) == 3 * 4 * 2 * 2
    assert "fusion-rte-setting2-6" in started.names and "fusion-rte-setting2-1" not in started.names
    assert {"source-sst2-setting2-0", "source-sst2-setting2-1"} < {*started.names}
    assert (tmp_path / "out" / "composition.png").is_file()


def test_what_counts_as_finished(started, encoder, data_dir, tmp_path, copy, capsys):
    """A run of the same command, made from the data, adapters and encoder that lie there."""
    adapter, fusion = names = "st_a_16-rte-0", "fusion_st_a-rte-0"
    data_dir = shutil.copytree(data_dir, tmp_path / "data")
    words = cli("--tasks rte --systems fusion_st_a --seeds 0", model=copy(encoder))
    words += cli(data_dir=data_dir, out=tmp_path / "out")

    def starts(*names, epochs=1, options=()):
        started.names.clear()
        tables.main([*words, *options, *cli("-- --device cpu --limit-train 90", epochs=epochs)])
        assert started.names == [*names]

    def is_refused(what, *names, **options):
        with pytest.raises(SystemExit):
            starts(*names, **options)
        assert f"holds a run with {what}" in capsys.readouterr().out

    starts(*names)
    starts()
    for file, split in (("train", "training"), ("validation", "development")):
        before = (path := data_dir / "rte" / f"{file}.jsonl").read_text()
        path.write_text(before.replace('label": 1', 'label": 0'))
        is_refused(f"{split} examples of rte = ", adapter)
        path.write_text(before)
    starts()
    with pytest.raises(ValueError, match="is a finished run with epochs = 1, not 2: "):
        starts(epochs=2)
    done = tmp_path / "out" / "runs" / adapter / "metrics.json"  # as if it had to be trained first
    done.rename(done.with_suffix(".old"))
    with pytest.raises(ValueError, match=f"{fusion} is a finished run"):
        starts(options=["--fusion-options", "--lr 1"])
    done.with_suffix(".old").rename(done)
    assert not started.names
    starts(*names, epochs=2, options=["--overwrite"])
    change(tmp_path / "out" / "runs" / adapter / "adapter.safetensors", times(1.5))
    is_refused("adapter rte = ", epochs=2)
    starts(fusion, epochs=2, options=["--overwrite"])
    change(tmp_path / "copy" / "model.safetensors", times(1.5))
    is_refused("encoder = ", adapter, epochs=2)
    with pytest.raises(SystemExit):
        starts(epochs=2, options=["--plan"])
    assert re.findall(r"(?m)^(\w+) +\S+-rte-0: ", capsys.readouterr().out) == ["refused"] * 2


def say_where(cell, gpu, threads, folder):
    """In place of `work`: where it runs; b is killed."""
    cell.out.mkdir(parents=True)
    cell.log.write_text(f"{gpu} {threads}")
    time.sleep(0.1)
    if cell.name == "b":
        os.kill(os.getpid(), signal.SIGKILL)


def test_three_at_a_time(monkeypatch, tmp_path):
    """They share GPUs and cores. A run that is killed fails alone, with what needs it."""
    monkeypatch.setattr(grid, "work", say_where)
    monkeypatch.setattr(grid, "state_of", lambda cell: "finished" * (cell.name != "b"))
    monkeypatch.setattr(grid, "row_of", lambda *_: {"accuracy": 0.5})
    monkeypatch.setattr(grid.torch, "get_num_threads", lambda: 7)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")  # the user's
    cells = {}
    for name in "abcde":  # d needs a, e needs b
        needs = [cells[{"d": "a", "e": "b"}[name]]] if name in "de" else []
        cells[name] = grid.Cell(name, tmp_path / "runs" / name, "full", [], needs)
    failed = grid.run_all(cells.values(), SimpleNamespace(jobs=3, cluster=None))
    assert failed.keys() == {"b", "e"} and "status -9" in failed["b"]
    assert [cells[name].log.read_text() for name in "abc"] == ["5 2", "7 2", "5 2"]
    assert not cells["e"].log.exists()


# what words of a command add to the accuracy
POINTS = {"mh_adapter=true": 0.1, "output_adapter=false": 0.2, "original_ln_before=false": 0.02}
POINTS |= {"ln_after=true": 0.05, "adapter_residual_before_ln=true": 0.01, "8": 0.03, "full": 0.15}


def test_a_search_goes_on_from_the_best(launch, made_up, tmp_path):
    """Nothing is built on a step that lacks a run; what diverges has lost, though it was ahead."""
    with pytest.raises(FloatingPointError) as diverged:
        launch("--stage adapter --task sst2 --lr 1e30", out=tmp_path / "run")

    def accuracy(cell, task):
        if cell.name.startswith("mh_adapter=true-output_adapter=false") and "8" not in cell.words:
            raise ValueError(made_up.reason)
        return 0.4 + sum(POINTS.get(word, 0) for word in cell.words)

    made_up.accuracy = accuracy
    out, words = tmp_path / "out", "--tasks sst2 rte --seeds 0 1"
    for reason in ("the disk is full", str(diverged.value)):
        assert not (out / "search.csv").exists()
        made_up.reason = reason
        with pytest.raises(SystemExit):
            made_up(search, words)
    text, rows = (out / "search.md").read_text(), pd.read_csv(out / "search.csv")
    best = ["both", "after", "after", "before the new LayerNorm", "relu"]
    assert re.findall(r"^\| \*\*(.*?)\*\*", text, re.MULTILINE) == sorted(best * 2, key=best.index)
    assert re.search(r"\*\*both\*\* +(\| +5[03].00 ± 0.00 +){4}\| +50.75 \|", text)
    found = rows[(rows["option"] == "swish") & (rows["reduction_factor"] == 8)]
    upon = 0.4 + 0.1 + 0.02 + 0.05 + 0.01 + 0.03  # what was best before
    assert found["accuracy"].tolist() == 4 * [pytest.approx(upon)]


@pytest.fixture
def dask(tmp_path):
    """A scheduler and two workers, processes as a user starts them. .address, .scheduler"""
    pytest.importorskip("distributed")
    file, started, log = tmp_path / "scheduler.json", [], open(tmp_path / "dask.txt", "ab")
    how = {"cwd": child.ROOT, "stdout": log, "stderr": log}
    how["env"] = os.environ | {"PYTHONPATH": ".", "DASK_DISTRIBUTED__WORKER__DAEMON": "False"}
    for words in ("scheduler --port 0", *["worker --nthreads 1"] * 2):
        words = f"-m dask {words} --host 127.0.0.1 --no-dashboard --scheduler-file {file}"
        started.append(subprocess.Popen([sys.executable, *words.split()], **how))
    while not file.is_file():
        assert started[0].poll() is None
        time.sleep(0.1)
    yield SimpleNamespace(address=read_json(file)["address"], scheduler=started[0])
    for process in started:
        process.terminate()
    for process in started:
        process.wait(60)


@pytest.fixture
def begun(encoder, data_dir, tmp_path):
    """begun("--systems full", "--epochs 9"): a study, a process, of which two runs have begun."""

    def begun(text, behind):
        words = cli(text, model=encoder, data_dir=data_dir, out=tmp_path / "out")
        words += cli(f"-- --device cpu --dtype float32 --patience 9999 {behind}")
        command, pipe = [sys.executable, "-m", "experiments.tables", *words], subprocess.PIPE
        process = subprocess.Popen(command, cwd=child.ROOT, stdout=pipe, stderr=pipe, text=True)
        logs = tmp_path / "out" / "logs"
        while sum("epoch  2:" in path.read_text() for path in logs.glob("*")) < 2:
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        return process

    return begun


ENDS = [("--jobs 2", "study", signal.SIGTERM, 130), ("--jobs 2", "study", signal.SIGKILL, -9)]
ENDS += [("--cluster {}", *end[1:]) for end in ENDS]
ENDS += [("--cluster {}", "scheduler", signal.SIGKILL, 2)]
ENDS[2:] = [pytest.param(*end, marks=conftest.thorough) for end in ENDS[2:]]


@pytest.mark.parametrize("place, who, number, status", ENDS)
def test_no_run_is_left_behind(place, who, number, status, begun, tmp_path, request):
    """They end and have saved what they had; there is one piece of advice."""
    dask = request.getfixturevalue("dask") if "cluster" in place else SimpleNamespace(address="")
    place = place.format(dask.address)
    study = begun(f"--tasks rte --systems full --seeds 0 1 {place}", "--epochs 9999")
    (study if who == "study" else dask.scheduler).send_signal(number)
    output, error = study.communicate(timeout=60)
    assert study.returncode == status and error.count("\n") == (status != -9), error
    assert error.count("the same command goes on") == (status != -9) and "--resume" not in output
    for saved in (tmp_path / "out" / "runs" / f"full-rte-{seed}" / "resume.pt" for seed in (0, 1)):
        FileLock(saved.with_name(".lock"), timeout=9).acquire()  # which a run would hold
        assert saved.is_file()


@conftest.thorough
def test_a_worker_that_is_killed(begun, dask, tmp_path):
    """The other one goes on with its run. The table is that of one machine, to the bit."""
    from distributed import Client

    text = "--tasks rte sst2 --systems st_a_16 fusion_st_a --overwrite"
    begun(f"{text} --jobs 2", "--epochs 40").communicate()
    alone = (out := tmp_path / "out").rename(tmp_path / "alone")
    study = begun(f"{text} --cluster {dask.address}", "--epochs 40")
    with Client(dask.address) as client:
        os.kill([*client.run(os.getpid).values()][0], signal.SIGKILL)
    output, error = study.communicate(timeout=100)
    assert study.returncode == 0 and not error
    assert (out / "results.csv").read_text() == (alone / "results.csv").read_text()
    for run in alone.glob("runs/*"):
        conftest.assert_equal(run, out / "runs" / run.name)
    tries = [path.read_text().count("$ train.py") for path in (out / "logs").iterdir()]
    assert sorted(tries) == [1] * 11 + [2]


def test_a_cluster_that_is_none(encoder, data_dir, refused, tmp_path, monkeypatch):
    words = cli("--tasks rte --systems head --cluster here", model=encoder, data_dir=data_dir)
    words += cli(out=tmp_path / "out")
    monkeypatch.setitem(sys.modules, "distributed", None)
    refused(words, "needs Dask: pip install -r requirements-cluster.txt", main=tables.main)
    monkeypatch.delitem(sys.modules, "distributed")
    pytest.importorskip("distributed")
    refused(words, "--cluster here: no such scheduler (missing port", main=tables.main)
    assert not (tmp_path / "out").exists()
    assert "does not see" in grid.why_not(tmp_path, tmp_path / "elsewhere")
    monkeypatch.setattr("multiprocessing.current_process", lambda: SimpleNamespace(daemon=True))
    assert "DAEMON=False" in grid.why_not(tmp_path)


CONTROLS = """head= head_on_sst2=sst2 head_on_pick=pick own= full= mean=sst2,pick
    mean_with_own=sst2,pick,rte fusion=sst2,pick fusion_with_own=sst2,pick,rte fusion_of_own=rte
    fusion_without_sst2=pick fusion_without_pick=sst2"""
ADAPTERS = dict(word.split("=") for word in CONTROLS.split())  # of composition's systems


def test_every_control(runs, encoder, data_dir, started):
    """The encoder is that of the sources."""
    words = cli("--target rte --seeds 0 1 --train-examples 48", data_dir=data_dir)
    words += cli(sources=["sst2", runs / "pick"], systems=[*composition.SYSTEMS])
    words += ["--fusion-options", "--fusion attention"]
    args = composition.parse(words)
    cells = study.cells_of(args, args.seeds)
    assert [*dict.fromkeys(system for _, system, _, _ in cells)] == [*ADAPTERS]
    of_seed = {"sst2": "source-sst2-0", "rte": "own-rte-48-{}"}
    for (_, system, limit, seed), cell in cells.items():
        options, taken = cell.options(), ADAPTERS[system].split(",") if ADAPTERS[system] else []
        places = [of_seed.get(name, f"pick={runs / 'pick'}").format(seed) for name in taken]
        assert [path.removeprefix("runs/composition/runs/") for path in options.adapters] == places
        assert (options.model, options.limit_train, options.seed) == (str(encoder), limit, seed)
        if cell.stage == "fusion":  # the options of the stage do not reach the even weights
            assert options.fusion == ("mean" if "mean" in system else "attention")


def test_what_is_held_out(runs, encoder, data_dir, tmp_path, capsys, started):
    """--test asks every run for the same examples. All options of train.py reach the target."""
    rows, file = (data_dir / "rte" / "train.jsonl").read_text(), tmp_path / "mine.jsonl"
    file.write_text(rows.replace("sentence1", "question").replace("sentence2", "answer"))
    change(tmp_path / "test" / "mine" / "validation.jsonl", read_lines(file)[:30])
    words = cli("--target mine --systems own fusion", out=tmp_path, test=tmp_path / "test")
    words += cli("--train-examples 24 48", sources=[f"other={runs / 'rte'}", runs / "pick"])
    behind = cli("--seeds 1 -- --device cpu --epochs 1 --dev-fraction 0.25", train_file=file)
    behind += cli("--columns text_a=question text_b=answer")
    composition.main([*words, *behind])
    printed = " ".join(capsys.readouterr().out.replace("|", " ").split())
    assert "WARNING: fusion-mine-24-1: adapter other was TRAINED on 100% of them" in printed
    once = r"\n\n24 development examples, of .*(\n\nNo better .*)?\n\nWARNING: adapter other was .*"
    assert len(re.findall(once, (tmp_path / "composition.md").read_text())) == 2  # of each size
    rows = pd.read_csv(tmp_path / "composition.csv").set_index(["system", "train_examples"])
    for size in (24, 48):
        run = load_run(tmp_path / "runs" / f"fusion-mine-{size}-1")
        assert run.adapters == ["other", "pick"] and run.task.columns == ["text_a", "text_b"]
        drawn = data.load_split(run.task, run.source, "train", run.tokenizer, size, 1)
        assert run.is_own("train", drawn)
        examples = run.split(data_dir=tmp_path / "test")
        found = train.evaluate(run.model, run.task, examples, run.args)
        assert rows["test_accuracy"]["fusion", size] == found["accuracy"]
        own, fused = (100 * rows["test_accuracy"][system, size] for system in ("own", "fusion"))
        assert f"{own:.1f} {own:.2f} {fused - own:.2f} " in printed
    change(tmp_path / "test" / "mine" / "validation.jsonl", read_lines(file)[:7])
    for _ in range(2):  # computed, and then kept
        composition.main([*words, *behind])
        printed = capsys.readouterr().out
        assert "% of 7 examples of --test" in printed and "WARNING: fusion-mine-24-1: " in printed


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
    assert same_tensors(run.model.head.state_dict(), before.model.head.state_dict())
    assert same_tensors(run.bert.state_dict(), later.bert.state_dict())
