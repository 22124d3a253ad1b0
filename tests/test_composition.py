"""experiments.composition and the demo on it: what they print and write is what their runs say."""

import hashlib
import random
import sys
from unittest.mock import patch

import pandas as pd
import pytest

import train
from conftest import cli, thorough
from data import load_split
from experiments import composition, demo, grid, multitask, skills
from experiments.load_run import load_run
from formats.files import read_json
from fusion import FUSIONS

DOCSTRINGS = {
    library: [
        (f"{name}_{i}", [f"The {name} {i} of {library} says a {word} and runs."])
        for i in range(60)
        for name, word in (("cat", "red"), ("dog", "blue"))
    ]
    for library in ("std", "numpy", "torch")
}


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """The runs of a grid, one after another."""

    def run(cells, args):
        found = {}
        for cell in cells:
            program, *words = cell.command
            main = multitask.main if program == "-m" else train.main
            found[cell.name] = main(words[1:] if program == "-m" else words)
        return found, {}

    monkeypatch.setattr(grid, "run", run)
    monkeypatch.delitem(sys.modules, "examples.mean_fusion", raising=False)  # --import runs it
    with patch.dict(FUSIONS):
        yield


def test_every_control_beside_the_fusion(runs, encoder, data_dir, tmp_path, capsys):
    out = tmp_path / "out"
    words = cli("--target rte --seeds 0 1", model=encoder, data_dir=data_dir, out=out)
    words += cli("--train-examples 48", sources=["sst2", runs / "pick"], irrelevant="pick")
    with pytest.raises(ValueError, match="two adapters would be called 'pick'"):
        composition.main(words)
    words = [*words[:-2], "--fusion-options", "--fusion attention"]  # the control's is still mean
    composition.main([*words, "--", *cli("--device cpu --epochs 1 --lr 5e-3")])
    printed = " ".join(capsys.readouterr().out.split())
    assert f"left out: sequential and multitask need the data of {runs / 'pick'}" in printed

    rows = pd.read_csv(out / "composition.csv")
    names = "head own own_same_epochs full head_on_sst2 head_on_pick mean mean_with_own fusion "
    names += "fusion_with_own fusion_of_own fusion_without_sst2 fusion_without_pick"
    assert [*dict.fromkeys(rows["system"])] == names.split() and len(rows) == 2 * 13
    for row in rows.itertuples():
        run = out / "runs" / f"{row.system}-48-{row.seed}"
        options = read_json(run / "run.json")["options"]
        assert row.accuracy == read_json(run / "metrics.json")["accuracy"]
        assert options["limit_train"] == row.train_examples == 48 and options["seed"] == row.seed
        if row.system.startswith(("fusion", "mean")):
            fused = [f"own-48-{row.seed}", "source-sst2"]
            fused = [str(out / "runs" / name) for name in fused] + [str(runs / "pick")]
            copies = [read_json(path)["options"]["out"] for path in run.glob("adapters/*/run.json")]
            assert {*copies} <= {*fused} and len(copies) == len(options["adapters"])
            assert options["fusion"] == ("mean" if "mean" in row.system else "attention")
    points = rows.pivot(index="seed", columns="system", values="accuracy") * 100
    for system in names.split():
        if system != "fusion":
            gain = points["fusion"] - points[system]
            values = ", ".join(f"{value:.1f}" for value in points[system])
            mean = f"{points[system].mean():.2f} ± {points[system].std():.2f}"
            assert f"{values} {mean} {gain.mean():.2f} {gain.min():.2f}" in printed
    assert (out / "composition.png").stat().st_size > 5000


def test_controls_that_need_the_sources_data(runs, encoder, data_dir, tmp_path, capsys):
    out, words = tmp_path / "out", cli("--target rte --sources sst2 pick --train-examples 24 48")
    words += cli("--systems sequential fusion_with_irrelevant", irrelevant=runs / "rte")
    words += cli("--test", model=encoder, data_dir=data_dir, out=out)
    with pytest.raises(ValueError, match="two adapters would be called 'rte'"):
        composition.main(words)
    for size, message in ((96, "--test needs --train-examples below 96"), (97, "rte has only 96")):
        with pytest.raises(ValueError, match=message):
            composition.main([str(size) if word == "48" else word for word in words])
    with pytest.raises(ValueError, match="--limit-train does not belong behind --"):
        composition.main([*words, *cli("-- --limit-train 7")])
    (tmp_path / "odd").symlink_to(runs / "rte")
    words[words.index("--irrelevant") + 1] = str(tmp_path / "odd")
    composition.main([*words, "--", *cli("--device cpu --epochs 1")])
    printed = capsys.readouterr().out
    assert "WARNING: fusion_with_irrelevant-24-0: rte was TRAINED on 100% of them" in printed
    rows = pd.read_csv(out / "composition.csv")
    assert [*rows["train_examples"]] == [24] * 2 + [48] * 2
    for row in rows.itertuples():  # asked for what they were not trained on
        name = f"{row.system}-{row.train_examples}-{row.seed}"
        run = load_run(out / "runs" / name, task="rte")
        drawn = load_split(
            train.find_task(run.args, "rte"), "train", run.tokenizer, row.train_examples, row.seed
        )
        every, drawn, left = (
            {example.hash for example in split}
            for split in (run.split("train"), drawn, run.left_over())
        )
        assert left == every - drawn and len(left) == 96 - row.train_examples
        found = train.evaluate(run.model, run.task, run.left_over(), run.args)
        assert row.test_accuracy == found["accuracy"]
    chain = [read_json(out / f"runs/{name}/run.json")["options"]["model"] for name in CHAIN]
    assert chain == [str(encoder), str(out / "runs/full-sst2"), str(out / "runs/full-pick")]


CHAIN = ("full-sst2", "full-pick", "sequential-24-0")


def test_a_target_from_a_file(runs, encoder, data_dir, tmp_path, refused):
    """All options of train.py reach the target, and what is held out of its file is not counted."""
    rows, file = (data_dir / "rte" / "train.jsonl").read_text(), tmp_path / "mine.jsonl"
    file.write_text(rows.replace("sentence1", "question").replace("sentence2", "answer"))
    words = cli("--target mine --systems fusion", model=encoder, out=tmp_path / "out")
    behind = cli("-- --device cpu --epochs 1 --dev-fraction 0.25", train_file=file)
    behind += ["--columns", "text_a=question", "text_b=answer"]
    named = [f"ours={runs / 'rte'}", str(runs / "pick")]
    tasks = [*words, *cli(sources=[named[0], "sst2"], data_dir=data_dir), *behind]
    refused(
        tasks,
        "--train-file is of mine, sst2 would be trained on it, too",
        name="composition",
        main=composition.main,
    )
    composition.main([*words, *cli(sources=named), *behind])
    row = pd.read_csv(tmp_path / "out" / "composition.csv").iloc[0]
    assert row["train_examples"] == 72
    run = read_json(tmp_path / "out" / "runs" / "fusion-0" / "run.json")
    assert run["tasks"]["mine"]["columns"] == ["text_a", "text_b"] and run["train_examples"] == 72
    assert [*run["options"]["adapters"]] == ["ours", "pick"]


def test_the_sentence_says_who_won_and_by_how_much():
    args = composition.parse(cli("--target t --sources a b"))
    systems = composition.systems(args)
    accuracies = {"own": (50, 60), "head_on_a": (60, 61), "fusion": (64, 62)}
    rows = [(s, seed, x / 100) for s, both in accuracies.items() for seed, x in enumerate(both)]
    rows = pd.DataFrame(rows, columns=["system", "seed", "accuracy"])
    said = composition.conclusion(systems, rows)
    assert "fusion of the sources, ahead of the best control (new head on a) by 2.5" in said
    assert "by 1.0 at the least" in said
    # only seeds that all systems have are compared
    said = composition.conclusion(systems, rows.drop(index=1))  # own's second
    assert "by 4.0 points with one seed." in said
    with_others = rows.assign(seed=[0, 1, 2, 3, 4, 5])
    assert "nothing to compare" in composition.conclusion(systems, with_others)
    with pytest.raises(ValueError, match="none among its scores"):  # a regression's
        grid.accuracy({"pearson": 0.5})
    rows.loc[rows["system"] == "fusion", "accuracy"] = 0.4
    said = composition.conclusion(systems, rows)
    assert "new head on a, ahead of the best fusion of several adapters" in said


def test_the_tasks_of_the_demo_are_always_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(skills, "docstrings", lambda library: DOCSTRINGS[library])
    skills.build_tasks(tmp_path, random.Random(0), demo.SKILLS)
    written = b"".join(path.read_bytes() for path in sorted(tmp_path.glob("*/*.jsonl")))
    assert hashlib.sha256(written).hexdigest()[:16] == "358c76d911e6a965"


@thorough
def test_the_demo(encoder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(skills, "docstrings", lambda library: DOCSTRINGS[library])
    monkeypatch.setattr(demo, "find_minilm", lambda: encoder)
    monkeypatch.setattr(skills, "SIZES", {"source": (24, 12), "target": (240, 12)})
    monkeypatch.setattr(demo, "OPTIONS", {"adapter": "--epochs 1", "fusion": "--epochs 1"})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "minilm").symlink_to(encoder)
    demo.main(["--out", "demo"])
    printed = " ".join(capsys.readouterr().out.split())
    for system in demo.SYSTEMS:
        runs = [f"demo/runs/{system}-240-{seed}" for seed in (0, 1, 2)]
        each = [100 * read_json(f"{run}/metrics.json")["accuracy"] for run in runs]
        assert ", ".join(f"{value:.1f}" for value in each) in printed
