"""Finished runs: load_run, and what reads them, evaluate, predict and fusion_weights."""

import itertools
import json
import math
import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from conftest import change, cli, read_lines
from data import get_task
from docs.weights import make_weights
from experiments import evaluate as evaluation
from experiments import fusion_weights, predict
from experiments.load_run import load_run
from formats.files import read_json, write_json
from formats.rows import Source


def evaluate(run, *options):
    return evaluation.main([str(run), "--device", "cpu", *map(str, options)])


def note(capsys, *words):
    """What evaluate says about the difference from training."""
    capsys.readouterr()
    evaluate(*words)
    return "".join(re.findall("^note: .*", capsys.readouterr().out, re.MULTILINE))


def predicted(capsys, *words):
    """The lines that predict prints."""
    capsys.readouterr()
    predict.main([*map(str, words), "--device", "cpu"])
    return capsys.readouterr().out.splitlines()


def test_what_has_changed_since_is_named(copy, runs, capsys):
    """To the bit; on another machine rounding is no change, and in bf16 it is larger."""
    run = copy(runs / "rte")
    evaluate(run)  # the labels are explained once
    metrics, record = (read_json(run / name) for name in ("metrics.json", "run.json"))
    loss = metrics["dev_loss"]
    elsewhere = {**record, "machine": {**record["machine"], "processor": "other"}}
    in_bf16 = {**elsewhere, "options": {**record["options"], "dtype": "bfloat16"}}
    assert note(capsys, run) == note(capsys, run, "--split", "train") == ""
    for of_run, least in ((record, math.ulp(loss)), (elsewhere, 2e-4), (in_bf16, 2e-2)):
        write_json(run / "run.json", of_run)
        write_json(run / "metrics.json", metrics | {"dev_loss": loss + least})
        assert note(capsys, run).startswith(f"note: metrics.json has loss {loss + least}, now ")
        write_json(run / "metrics.json", metrics | {"dev_loss": loss + least / 40})
        assert (note(capsys, run) == "") == (of_run is not record or loss + least / 40 == loss)


def test_which_rows_are_evaluated(launch, refused, data_dir, tmp_path, capsys):
    """A split of any name. What --dev-fraction held out is never scored as training examples."""
    run, file, there = tmp_path / "run", tmp_path / "rte" / "train.jsonl", tmp_path / "there"
    rows = read_lines(data_dir / "rte" / "train.jsonl")
    change(file, rows)
    words = "--stage head --task rte --epochs 1 --dev-fraction 0.25 --max-length 8"
    accuracy = launch(words, data_dir=tmp_path, out=run)["accuracy"]
    assert evaluate(run, "--split", "train")["examples"] == 72
    assert evaluate(run)["examples"] == 24 and evaluate(run)["accuracy"] == accuracy
    change(there / "rte" / "test.jsonl", rows[:50])
    of_split = evaluate(run, "--split", "test", "--data-dir", there)
    renamed = [{**row, "sentence1": row["idx"], "claim": row["sentence1"]} for row in rows[:50]]
    change(tmp_path / "mine.jsonl", renamed)
    words = ["--file", tmp_path / "mine.jsonl", "--columns", "sentence1=claim"]
    assert of_split["examples"] == 50 and of_split["loss"] == evaluate(run, *words)["loss"]
    assert "WARNING: this run was TRAINED on " in capsys.readouterr().out
    change(file, rows[1:])
    refused([run, "--split", "train"], "held out cannot be told", main=evaluation.main)
    assert note(capsys, run) == "note: these are not the development examples of the training"


@pytest.mark.parametrize("name, task", [("pick", "pick"), ("fusion-rte", "rte"), ("sst2", "sst2")])
def test_every_kind_of_input(name, task, runs, data_dir, tmp_path, capsys, monkeypatch):
    """A file with empty lines, a command's words, Python: the answers that training has counted."""
    run, task = load_run(runs / name), get_task(task, Source(data_dir))
    rows = read_lines(data_dir / task.name / "validation.jsonl")
    answers, right = run.predict(rows), 0
    for row, answer in zip(rows, answers, strict=True):
        found = answer["probabilities"]
        assert list(found) == list(task.labels) and sum(found.values()) == pytest.approx(1)
        assert answer["probability"] == max(found.values()) == found[answer["label"]]
        right += answer["label"] == task.labels[task.label_index(row["label"])]
    assert right / len(rows) == read_json(runs / name / "metrics.json")["accuracy"]
    rows[3][task.columns[0]] = " ".join(["red"] * 100)
    lists, file = [[row[column] for column in task.columns] for row in rows], tmp_path / "a.jsonl"
    of_rows = "\ufeff" + "\r\n\r\n".join(map(json.dumps, rows))
    file.write_text(of_rows, encoding="utf-8", newline="")
    answers = run.predict(lists)
    assert [i for i, answer in enumerate(answers) if answer["truncated"]] == [3]
    assert run.predict([*rows[:5], *lists[5:]]) == answers
    numbered = [{"input": number, **answer} for number, answer in enumerate(answers, 1)]
    assert [*map(json.loads, predicted(capsys, runs / name, "--json", "--file", file))] == numbered
    monkeypatch.setattr(predict, "WINDOW", 7)
    found = predicted(capsys, runs / name, "--file", file)
    assert [line.split("\t")[0] for line in found] == [answer["label"] for answer in answers]
    *texts, last = lists[0]
    texts += last if name == "pick" else [last]
    (line,) = predicted(capsys, runs / name, "--json", *texts)
    one = lists[0][0] if name == "sst2" else tuple(lists[0])
    for answer in (json.loads(line), *run.predict(one), *run.predict(rows[0])):
        assert answer["probability"] == pytest.approx(answers[0]["probability"], abs=1e-5)


def test_threads(loud_fusion):
    """A fusion's weights are those of one's own text."""
    run, texts = load_run(loud_fusion), [(("red " * n).strip(), "cat") for n in range(1, 9)] * 8
    expected = [run.fusion_weights(text)[0]["weights"]["output"][0] for text in texts]
    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(run.fusion_weights, texts)]
    for (of_one,), weights in zip(found, expected, strict=True):
        assert torch.equal(of_one["weights"]["output"][0], weights)
    (one,) = run.fusion_weights(("red cat", "cat"))
    assert one["tokens"] == "[CLS] red cat [SEP] cat [SEP]".split()


@pytest.mark.parametrize("has_bf16", [True, False])
def test_the_precision_is_that_of_the_training(has_bf16, copy, runs, monkeypatch, capsys):
    """Or else fp32, where the processor would emulate bf16."""
    monkeypatch.setattr("experiments.load_run.has_bf16", lambda device: has_bf16)
    path, seen = copy(runs / "fusion-rte"), []
    change(path / "run.json", ('"dtype": "float32"', '"dtype": "bfloat16"'))
    run = load_run(path)
    look = lambda bert, _: seen.append((torch.is_autocast_enabled("cpu"), bert.dtype))  # noqa: E731
    run.bert.register_forward_pre_hook(look)
    run.predict(("red", "cat"))
    run.fusion_weights(("red cat", "cat"))
    fusion_weights.mean_weights(run, run.split()[:2])
    assert seen == 3 * [(has_bf16, torch.bfloat16 if has_bf16 else torch.float32)]
    assert ("computes it in float32" in capsys.readouterr().out) != has_bf16
    monkeypatch.setattr("torch.get_default_dtype", lambda: torch.float64)
    with pytest.raises(ValueError, match="set_default_dtype was called: here it has to be"):
        load_run(path)


NO_INPUTS = {  # one text of two, two inputs of one text each, and the like
    "rte": ["red", ["red", "cat"], ("red", "cat", "cat"), ("red", ["cat"]), None],
    "pick": [("red", "a", "b", "c"), ("red", ["a", "b"]), ("red", ["a", "b", 3])],
    "sst2": [("red", "cat"), {"sentence": ["red"]}, {"red"}, [{"sentence": "red"}, ("cat", "cat")]],
}


@pytest.mark.parametrize("name", NO_INPUTS)
def test_anything_else_is_refused(name, runs):
    """By the names of the task's columns, or of the one that is wrong."""
    run = load_run(runs / name)
    for given in NO_INPUTS[name]:
        wrong = "holds .*, expected a text|does not hold a list of texts|, expected 3"
        with pytest.raises(ValueError, match=f"{name} takes .*, not|{wrong}"):
            run.predict(given)
    with pytest.raises(ValueError, match="no fusion"):
        run.fusion_weights(run.split()[:1])


def test_pictures(runs, tmp_path, refused, monkeypatch):
    """Also where no shell has seen the ~."""
    monkeypatch.setenv("HOME", str(tmp_path))
    path, words = tmp_path / "weights.png", ("red cat", "cat")
    predict.main([str(runs / "fusion-rte"), *words, *cli("--device cpu --picture=~/weights.png")])
    assert path.read_bytes().startswith(b"\x89PNG")
    words = [runs / "rte", *words, *cli("--device cpu", picture=path)]
    refused(words, "no fusion is active", main=predict.main)


def test_the_weights_on_the_page(runs, loud_fusion):
    """They are what `fusion_weights` returns; the steps of a token follow from each other."""
    both, asked, pair = load_run(loud_fusion), load_run(runs / "fusion-rte"), ("the red cat", "dog")
    row = {"text_a": pair[0], "text_b": pair[1], "label": "right, shuffled"}
    made = make_weights(both, asked, [row])
    readings, step = made["sentences"][0]["readings"], made["step"]
    for way, run in {"": both, **dict.fromkeys(asked.adapters, asked)}.items():
        (found,) = run.fusion_weights([(pair[0], f"{way}: dog" if way else "dog")])
        s = torch.stack(found["weights"]["output"])
        assert torch.allclose(torch.tensor(readings.pop(way)["s"]), s, atol=5.1e-4)
    x, f, o, V_z, s, total = (torch.tensor(step[n]) for n in "x f o V_z s sum".split())
    of_token = both.fusion_weights([pair])[0]["weights"]["output"][step["layer"]]
    assert not readings and torch.allclose(s, of_token[step["token"]], atol=5.1e-4)
    assert torch.allclose(s @ V_z, o, atol=0.02) and torch.allclose(f + o + x, total, atol=0.002)


def test_the_weights_are_means_over_real_tokens(runs, loud_fusion, launch, tmp_path):
    """In the last layer over each [CLS], or with --all-tokens. One run has less in layer 2."""
    out, second = tmp_path / "out", tmp_path / "second"
    rte, sst2, words = tmp_path / "rte", tmp_path / "sst2", "--stage adapter --adapter houlsby"
    launch(f"{words} --epochs 1 --task rte --adapter-config leave_out=[1]", out=rte)
    launch(f"{words} --epochs 1 --task sst2 --limit-dev 9", out=sst2)
    launch("--stage fusion --task sst2 --epochs 1", adapters=[rte, sst2], out=second)
    for option, first in (("--all-tokens", slice(None)), ("", slice(1))):
        words = [str(loud_fusion), str(second), *cli(f"{option} --device cpu", out=out)]
        fusion_weights.main(words)
        rows = pd.read_csv(out / "weights.csv")
        found = dict([*rows.groupby(["run", "layer", "location"])])
        assert [*found[str(second), 2, "output"]["adapter"]] == ["sst2"]  # rte is not there
        assert dict(zip(rows["target"], rows["own"], strict=True)) == {"rte": "rte", "sst2": "sst2"}
        assert rows.groupby("target")["own_accuracy"].count().gt(0).tolist() == [True, False]
        for directory in (loud_fusion, second):
            run = load_run(directory)
            seen = [example["weights"] for example in run.fusion_weights(run.split())]
            for location, layer in itertools.product(seen[0], (0, 1)):
                read = first if layer == 1 else slice(None)
                s = torch.cat([weights[location][layer][read] for weights in seen])  # [T, N]
                of = found[str(directory), layer + 1, location]
                weights = of.set_index("adapter")["weight"].reindex(run.adapters).fillna(0)
                assert weights.tolist() == pytest.approx(s.mean(0).tolist(), abs=1e-5)


def test_what_section_6_reads():
    """Four targets, one of them without an own adapter."""
    weights = [  # target, its own adapter, accuracies, layer, the weights
        ("cb", "mine", 0.8, 0.7, 1, {"b": 0.9, "mine": 0.1}),
        ("cb", "mine", 0.8, 0.7, 2, {"b": 0.5, "mine": 0.5}),
        ("rte", "b", 0.9, 0.6, 2, {"b": 1.0, "mine": 0.0}),
        ("sick", "b", 0.9, 0.8, 2, {"b": 0.9, "mine": 0.8}),
        ("cb (2)", None, math.nan, math.nan, 2, {"b": 1.0}),
    ]
    rows = [  # the columns in the order of COLUMNS
        ["run", target, own, accuracy, of_own, layer, "output", *pair]
        for target, own, accuracy, of_own, layer, of in weights
        for pair in of.items()
    ]
    (found, _), notes = fusion_weights.summary(pd.DataFrame(rows, columns=fusion_weights.COLUMNS))
    shared, nan = math.exp(-0.9 * math.log(0.9) - 0.1 * math.log(0.1)), math.nan
    expected = [
        ["cb", "b", 0.7, "mine", 0.3, 80, 10, shared, 2],
        ["rte", "b", 1, "b", 1, 90, 30, nan, 1],
        ["sick", "b", 0.9, "b", 0.9, 90, 10, nan, nan],
        ["cb (2)", "b", 1, None, nan, nan, nan, nan, 1],
    ]
    pd.testing.assert_frame_equal(pd.DataFrame(found), pd.DataFrame(expected), check_dtype=False)
    r = torch.corrcoef(torch.tensor([[0.3, 1.0, 0.9], [10.0, 30.0, 10.0]]))[0, 1]
    assert notes[0].startswith("sick: s is NO DISTRIBUTION")
    assert notes[1:] == [f"Own weight and gain, over 3 targets: correlation {r:.2f}"]


OWN = [  # {the name of an adapter here: the tasks in its run.json}, and the own one
    ({"rte": "sst2", "mine": "rte"}, "mine"),  # two that were renamed
    ({"rte": "rte-others", "mine": "rte"}, "mine"),  # one of other examples
    ({"mine": "rte", "again": "rte"}, None),  # two of the same
    ({"sst2": "sst2 rte", "rte": "sst2 rte"}, "rte"),  # of a multi-task run
    ({"pick": "pick", "rte": None}, "rte"),  # of the hub, without a run.json
    ({"pick": "pick", "sst2": "sst2"}, None),
]


@pytest.mark.parametrize("adapters, own", OWN)
def test_the_own_adapter_is_known_by_its_training(adapters, own, tmp_path):
    for name, tasks in adapters.items():
        if tasks:
            path = tmp_path / "adapters" / name / "run.json"
            sets = dict(task.partition("-")[::2] for task in tasks.split())  # {task: of others}
            inputs = {f"training examples of {task}": others for task, others in sets.items()}
            write_json(path, {"tasks": sets, "inputs": inputs})
    run = SimpleNamespace(directory=tmp_path, adapters=[*adapters])
    run.task, run.record = SimpleNamespace(name="rte"), {"inputs": {"training examples of rte": ""}}
    assert fusion_weights.own_adapter(run) == own
