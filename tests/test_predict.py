"""experiments/predict.py and `load_run`: the probabilities are the run's, in the order of the
lines, from every kind of input; the page has the fusion's weights, and text stays text."""

import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from conftest import read_lines
from data import TASKS, get_task, to_candidates
from experiments import predict
from experiments.load_run import LoadedRun, load_run, task_of
from formats.files import read_json, write_json
from fusion import fusion_weights

PREDICT = {"name": "predict.py", "main": predict.main}
HOSTILE = (
    '</script><script>document.title = "hacked"</script>'
    """<img src=x onerror="document.title = 'hacked'"> <!-- & 'dog'"""
)


@pytest.fixture
def say(capsys, monkeypatch):
    """say(run, ..., stdin="...") -> the lines that main prints."""

    def say(*arguments, stdin=""):
        capsys.readouterr()  # of training, for instance
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        predict.main([*map(str, arguments), "--device", "cpu"])
        return capsys.readouterr().out.splitlines()

    return say


@pytest.mark.parametrize("run, task", [("pick", "pick"), ("fusion-rte", "rte"), ("sst2", "sst2")])
def test_probabilities(run, task, say, runs, data_dir):
    run, file = runs / run, data_dir / task / "validation.jsonl"
    model = load_run(run)
    rows, task = read_lines(file), get_task(task, data_dir)
    results = [json.loads(line) for line in say(run, "--file", file, "--json")]
    assert [result.pop("line") for result in results] == list(range(1, len(rows) + 1))
    assert results == model.predict(rows)
    right = 0
    for row, result in zip(rows, results, strict=True):
        candidates, label = to_candidates(task, row)
        assert candidates == model.candidates(row) and not result["truncated"]
        found = result["probabilities"]
        assert list(found) == list(task.labels)
        assert result["probability"] == max(found.values()) == found[result["label"]]
        assert sum(found.values()) == pytest.approx(1)
        right += result["label"] == task.labels[label]
    assert right / len(rows) == read_json(run / "metrics.json")["accuracy"]


def test_every_kind_of_input_says_the_same(say, runs, data_dir, tmp_path):
    """A file, with empty lines, which are passed over; JSON on stdin; arguments; and Python."""
    rows = read_lines(data_dir / "rte" / "validation.jsonl")[:6]
    texts = [[row["sentence1"], row["sentence2"]] for row in rows]
    lines, lists = ("\r\n\r\n".join(map(json.dumps, inputs)) for inputs in (rows, texts))
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    words = runs / "rte", "--json"
    outputs = [say(*words, "--file", tmp_path / "a.jsonl")]
    outputs += [say(*words, "--file", "-", stdin=given) for given in ("\ufeff" + lines, lists)]
    outputs += [[say(*words, *pair)[0] for pair in texts]]
    first, *others = [[json.loads(line) for line in output] for output in outputs]
    assert [result["line"] for result in first] == [1, 3, 5, 7, 9, 11]
    for results in (*others, load_run(words[0]).predict(texts)):
        for ours, result in zip(first, results, strict=True):
            assert ours["label"] == result["label"]
            assert ours["probability"] == pytest.approx(result["probability"], abs=1e-5)


def without_model(name, **changes):
    kind = TASKS[name].type.__name__ if name in TASKS else "Classification"
    config = {"task": name, "kinds": {name: kind}, "column_names": {}}
    config |= {"labels": list(TASKS[name].labels)} if name in TASKS else {}
    return LoadedRun(None, None, config, task_of(config | changes), None, Path(name))


@pytest.mark.parametrize("name", TASKS)
def test_texts_take_the_place_they_have_in_training(name):
    model, task = without_model(name), TASKS[name]
    options = [f"option {i}" for i in range(len(task.labels))] * task.is_multiple_choice
    short = "winogrande commonsense_qa sst2 imdb".split()
    texts = ["first _", "second"][: 1 if name in short else 2]
    candidates = model.candidates([*texts, tuple(options)] if options else texts)
    if not task.is_multiple_choice:
        assert candidates == [(*texts, None)[:2]]
    for pair, option in zip(candidates, options, strict=task.is_multiple_choice):
        joined = predict.joined(pair)
        assert joined.count("option") == 1 and option in joined and joined.startswith("first")
        assert ("second" in joined) == (len(texts) == 2)
    for wrong in ([options], [*texts, "more", options], [*texts, [*options, "more"]]):
        with pytest.raises(ValueError):
            model.candidates(wrong)


def test_columns_that_were_renamed_in_training():
    """Names that --columns shifts, in files alone."""
    own = {"labels": ["0", "1"], "columns": {"own": ["text_a", "text_b"]}}
    shifted = without_model("own", **own, column_names={"text_a": "text_b", "text_b": "text_c"})
    assert shifted.candidates({"text_b": "b", "text_c": "c"}) == [("b", "c")]
    assert shifted.candidates(["a", "b"]) == [("a", "b")]


def test_long_inputs_are_cut_and_it_says_so(runs, capsys):
    long = " ".join(["red"] * 100)
    answers = load_run(runs / "rte").predict([("one", "red"), (long, long)])
    assert [answer["truncated"] for answer in answers] == [False, True]
    predict.main([str(runs / "rte"), long, "one"])
    assert "note: 1 of 1 inputs were cut to 48 tokens" in capsys.readouterr().err


def page_data(path):
    script = r'<script type="application/json" id="data">(.*?)</script>'
    (content,) = re.findall(script, path.read_text(), re.DOTALL)
    return json.loads(content)


def test_the_explanation_is_the_fusions_weights(say, loud_fusion, tmp_path):
    text = "red\x1b[2J\x07 cat\r\n\u202e", HOSTILE
    page, model = tmp_path / "page.html", load_run(loud_fusion)
    say(loud_fusion, *text, "--explain", page)
    data, encoding = page_data(page), model.tokenizer.encode(*text)
    with torch.no_grad():
        model.bert(torch.tensor([encoding.ids]), torch.tensor([encoding.type_ids]))
    s = fusion_weights(model.bert)
    (ours,) = model.fusion_weights([text])
    (example,) = data["examples"]
    (candidate,) = example["candidates"]
    assert candidate["tokens"] == ours["tokens"] == encoding.tokens
    assert candidate["text"] == " | ".join(text)
    assert [adapter["name"] for adapter in data["adapters"]] == ["rte", "sst2", "pick"]
    for layer, weights in enumerate(candidate["weights"]["output"]):
        assert (torch.tensor(weights) - s[layer, "output"][0]).abs().max() < 1e-4
        assert torch.equal(ours["weights"]["output"][layer], s[layer, "output"][0])
    # it is one file
    assert not re.search(r"https?:|//\w|url\(|@import|\ssrc=\"|\shref=", page.read_text())
    assert "default-src 'none'" in page.read_text()
    # text stays text: also tokens, adapters, labels and the run's name
    data = json.loads(json.dumps(data).replace('"[UNK]"', json.dumps(HOSTILE)))
    data["run"] = data["examples"][0]["label"] = data["adapters"][0]["name"] = HOSTILE
    page.write_text(predict.page(data))
    assert page.read_text().count("<script") == 2 and "<img" not in page.read_text()
    assert page_data(page) == data


def test_both_locations_and_every_choice_are_explained(say, launch, tmp_path):
    launch("--stage adapter --task pick --adapter houlsby --epochs 1", out=tmp_path / "pick")
    words = "--stage fusion --task pick --epochs 1"
    launch(words, adapters=tmp_path / "pick", out=tmp_path / "run")
    choices = ["--choices", "a", "the cat", "one two three"]
    (line,) = say(tmp_path / "run", "red", *choices, "--explain", tmp_path / "page.html")
    label, _, text = line.split("\t")
    assert text == f"red | {choices[1 + int(label)]}"
    candidates = page_data(tmp_path / "page.html")["examples"][0]["candidates"]
    texts = [f"{i}: red | {choice}" for i, choice in enumerate(choices[1:])]
    assert [candidate["text"] for candidate in candidates] == texts
    for candidate, tokens in zip(candidates, (5, 6, 7), strict=True):  # without padding
        assert list(candidate["weights"]) == ["attention", "output"]
        assert {len(s) for layers in candidate["weights"].values() for s in layers} == {tokens}


@pytest.mark.parametrize(
    "words, stdin, message",
    [
        ("rte", "", "give either texts, or --file"),
        ("rte red", "", "rte takes sentence1 and sentence2, not"),
        ("pick red one", "", "'choices' does not hold a list"),
        ("rte red one\udcff", "", "surrogates"),
        ("rte --file -", '["red", "one"]\n["red"]\n', "stdin, line 2: rte takes"),
        ("rte --file -", '{"sentence1": "a", "sentence2": "\\ud800"}', "stdin, line 1: 'utf-8'"),
        ("rte red one --explain page.html", "", "only fusion runs can be explained"),
        ("fusion-rte --file a.jsonl --explain ./a.jsonl", "", "is not an .html file"),
        ("rte --file -", "", "stdin is empty"),
    ],
)
def test_errors(words, stdin, message, refused, runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, *words = words.split()
    Path("a.jsonl").write_text('{"sentence1": "a", "sentence2": "b"}\n')
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
    refused([runs / run, *words], message, **PREDICT)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def changed(run, copy, **changes):
    """A copy of a run with other entries in its config.json."""
    shutil.copytree(run, copy)
    write_json(copy / "config.json", read_json(copy / "config.json") | changes)
    return copy


def test_labels_and_kinds_that_are_others(refused, runs, tmp_path):
    """config.json and head_config.json must agree on the order of the labels."""
    run = changed(runs / "rte", tmp_path / "run", labels=["not_entailment", "entailment"])
    refused([run, "a", "b"], "different labels", **PREDICT)
    run = changed(runs / "rte", tmp_path / "unknown", kinds={"rte": "Unknown"})
    refused([run, "a", "b"], "an unknown type, 'Unknown'", **PREDICT)
    run = changed(runs / "rte", tmp_path / "stage", stage="distill")
    refused([run, "a", "b"], "an unknown stage, 'distill'", **PREDICT)
