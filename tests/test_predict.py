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

import train
from conftest import read_lines
from data import TASKS, get_task, to_candidates
from experiments import evaluate, predict
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


def alone(model, candidates):
    """The run's probabilities for one input, computed without any batch."""
    states = []
    for pair in candidates:
        encoding = model.tokenizer.encode(*(text for text in pair if text is not None))
        states.append(model.bert(torch.tensor([encoding.ids]), torch.tensor([encoding.type_ids])))
    return model.head(torch.cat([h[:, :1] for h in states])).softmax(-1)[0].tolist()


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
        assert [*found.values()] == pytest.approx(alone(model, candidates), abs=1e-5)
        right += result["label"] == task.labels[label]
    assert right / len(rows) == read_json(run / "metrics.json")["accuracy"]


def test_every_kind_of_input_says_the_same(say, runs, data_dir, tmp_path):
    """A file, with empty lines, which are passed over; JSON and texts between tabs on stdin;
    arguments; and Python."""
    rows = read_lines(data_dir / "rte" / "validation.jsonl")[:6]
    texts = [(row["sentence1"], row["sentence2"]) for row in rows]
    lines, tabs = "\r\n\r\n".join(map(json.dumps, rows)), "\n".join(map("\t".join, texts))
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    run = runs / "rte"
    outputs = [say(run, "--json", "--file", tmp_path / "a.jsonl")]
    outputs += [say(run, "-", "--json", stdin=lines), say(run, "--file", "-", "--json", stdin=tabs)]
    outputs += [[say(run, "--json", *pair)[0] for pair in texts]]
    first, *others = [[json.loads(line) for line in output] for output in outputs]
    assert [result["line"] for result in first] == [1, 3, 5, 7, 9, 11]
    for results in (*others, load_run(run).predict(texts)):
        for ours, result in zip(first, results, strict=True):
            assert ours["label"] == result["label"]
            assert ours["probability"] == pytest.approx(result["probability"], abs=1e-5)


def test_multiple_choice(say, runs):
    options, run = ["red cat", "one dog yes", "a bird"], runs / "pick"
    (result,) = load_run(run).predict([("the question", options)])
    (line,) = say(run, "-", "--json", stdin="\t".join(["the question", *options]))
    assert json.loads(line)["probabilities"] == pytest.approx(result["probabilities"])
    (line,) = say("--device", "cpu", run, "--task", "pick", "the question", "--choices", *options)
    label, probability, text = line.split("\t")
    assert label == result["label"] and text == f"the question | {options[int(label)]}"
    assert float(probability) == pytest.approx(result["probability"], abs=1e-3)


def without_model(name, **changes):
    kind = TASKS[name].kind.__name__ if name in TASKS else "Classification"
    config = {"task": name, "kinds": {name: kind}, "column_names": {}}
    config |= {"labels": list(TASKS[name].labels)} if name in TASKS else {}
    return LoadedRun(None, None, config, task_of(config | changes), None, Path(name))


@pytest.mark.parametrize("name", TASKS)
def test_texts_take_the_place_they_have_in_training(name):
    model, task = without_model(name), TASKS[name]
    options = [f"option {i}" for i in range(len(task.labels))] * task.choices
    short = "winogrande commonsense_qa sst2 imdb".split()
    texts = ["first _", "second"][: 1 if name in short else 2]
    candidates = model.candidates([*texts, options] if options else texts)
    if not task.choices:
        assert candidates == [(*texts, None)[:2]]
    for pair, option in zip(candidates, options, strict=task.choices):
        joined = predict.joined(pair)
        assert joined.count("option") == 1 and option in joined and joined.startswith("first")
        assert ("second" in joined) == (len(texts) == 2)
    for wrong in ([options], [*texts, "more", options], [*texts, [*options, "more"]]):
        with pytest.raises(ValueError):
            model.candidates(wrong)


def test_columns_are_those_of_training():
    """Other names of a task's columns; names that --columns shifts, in files alone; both pairs of
    names in one row; a column that training did not have."""
    boolq, scitail = without_model("boolq"), without_model("scitail")
    assert boolq.candidates({"passage": "p", "question": "q", "answer": True}) == [("p", "q")]
    both = {"sentence1": "a", "sentence2": "b", "premise": "c", "hypothesis": "d"}
    assert scitail.candidates(both) == [("c", "d")]
    assert scitail.candidates({"sentence1": "a", "sentence2": "b"}) == [("a", "b")]
    own = {"labels": ["0", "1"], "columns": {"own": ["text_a", "text_b"]}}
    names = {"text_a": "text_b", "text_b": "text_c"}
    shifted = without_model("own", **own, column_names=names)
    assert shifted.candidates({"text_b": "b", "text_c": "c"}) == [("b", "c")]
    assert shifted.candidates(["a", "b"]) == [("a", "b")]
    single = without_model("own", **{**own, "columns": {"own": ["text_a"]}})
    with pytest.raises(ValueError, match="'text_b' is none of own's"):
        single.candidates({"text_a": "a", "text_b": "b"})


def test_long_inputs_are_cut_and_it_says_so(runs, capsys):
    long = " ".join(["red"] * 100)
    answers = load_run(runs / "rte").predict([("one", "red"), (long, long)])
    assert [answer["truncated"] for answer in answers] == [False, True]
    predict.main([str(runs / "rte"), long, "one"])
    assert "note: 1 of 1 inputs were cut to 48 tokens" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------
# Fusion weights


def page_data(path):
    script = r'<script type="application/json" id="data">(.*?)</script>'
    (content,) = re.findall(script, path.read_text(), re.DOTALL)
    return json.loads(content)


def test_the_explanation_is_the_fusions_weights(say, loud_fusion, tmp_path):
    text = "red\x1b[2J\x07 cat\r\n\u202e", "the dog sleeps ."
    page, model = tmp_path / "page.html", load_run(loud_fusion)
    lines = say(loud_fusion, *text, "--explain", page)
    data, encoding = page_data(page), model.tokenizer.encode(*text)
    with torch.no_grad():
        model.bert(torch.tensor([encoding.ids]), torch.tensor([encoding.type_ids]))
    s = fusion_weights(model.bert)
    (ours,) = model.fusion_weights([text])
    (candidate,) = data["examples"][0]["candidates"]
    assert candidate["tokens"] == ours["tokens"] == encoding.tokens
    assert candidate["text"] == " | ".join(text)
    assert [adapter["name"] for adapter in data["adapters"]] == ["rte", "sst2", "pick"]
    for layer, weights in enumerate(candidate["weights"]["output"]):
        assert (torch.tensor(weights) - s[layer, "output"][0]).abs().max() < 1e-4
        assert torch.equal(ours["weights"]["output"][layer], s[layer, "output"][0])

    assert all(letter.isprintable() for line in lines for letter in line.replace("\t", ""))
    label, probability, _ = lines[0].split("\t")
    assert data["examples"][0]["label"] == label
    assert f"{data['examples'][0]['probability']:.3f}" == probability
    assert lines[1] == "a = rte  b = sst2  c = pick" and lines[2].split() == ["layer", "1", "2"]
    layers = [torch.cat([w[0], w[0].mean(0, keepdim=True)]) for w in s.values()]
    for line, token, *rows in zip(lines[3:-1], [*encoding.tokens, "(mean)"], *layers, strict=True):
        cells = [("abc"[weights.argmax()], f"{100 * weights.max():.0f}") for weights in rows]
        assert line.split() == [token, *cells[0], *cells[1]]
    # it is one file
    assert not re.search(r"https?:|//\w|url\(|@import|\ssrc=|\shref=", page.read_text())
    assert "default-src 'none'" in page.read_text()

    masked = say(loud_fusion, *text, "--mask", "rte", "sst2", "--explain", page)
    cells = [line.split() for line in masked if line.split()[:1] == ["(mean)"]]
    assert cells == [["(mean)", *["c", "100"] * 2]]  # what is left has all the weight


def test_both_locations_and_every_choice_are_explained(say, launch, tmp_path):
    launch("--stage adapter --task pick --adapter houlsby --epochs 1", out=tmp_path / "pick")
    words = "--stage fusion --task pick --epochs 1"
    launch(words, adapters=tmp_path / "pick", out=tmp_path / "run")
    choices = ["--choices", "a", "the cat", "one two three"]
    lines = say(tmp_path / "run", "red", *choices, "--explain", tmp_path / "page.html")
    candidates = page_data(tmp_path / "page.html")["examples"][0]["candidates"]
    texts = [f"{i}: red | {choice}" for i, choice in enumerate(choices[1:])]
    assert [candidate["text"] for candidate in candidates] == texts
    for candidate, tokens in zip(candidates, (5, 6, 7), strict=True):  # without padding
        assert list(candidate["weights"]) == ["attention", "output"]
        assert {len(s) for layers in candidate["weights"].values() for s in layers} == {tokens}
    titles = [line.split()[0] for line in lines if "layer" in line]
    assert titles == ["attention,", "output,"] * 3


def test_hostile_text_stays_text(say, loud_fusion, tmp_path):
    """Texts, tokens, adapters, labels and the run's name."""
    path = tmp_path / "page.html"
    say(loud_fusion, HOSTILE, "one", "--explain", path)
    data = json.loads(json.dumps(page_data(path)).replace('"[UNK]"', json.dumps(HOSTILE)))
    data["run"] = data["examples"][0]["label"] = data["adapters"][0]["name"] = HOSTILE
    path.write_text(predict.page(data))
    assert path.read_text().count("<script") == 2 and "<img" not in path.read_text()
    assert page_data(path) == data


# --------------------------------------------------------------------------------------------------
# What is refused, and what is said


@pytest.mark.parametrize(
    "words, stdin, message",
    [
        ("rte", "", "give either texts, or --file"),
        ("rte red", "", "rte takes sentence1 and sentence2, not"),
        ("pick red one --choices a b c", "", "pick takes text_a and 3 choices, not"),
        ("rte red one\udcff", "", "surrogates"),
        ("rte -", "", "stdin is empty"),
        ("rte -", "red\tone\nred\n", "stdin, line 2: rte takes"),
        ("rte -", '{"sentence1": "a"}', "stdin, line 1: no column 'sentence2'"),
        ("rte -", '{"sentence1": "a", "sentence2": "b"}\n[1]', "stdin, line 2: rte takes"),
        ("rte -", '{"sentence1": "a", "sentence2": "\\ud800"}', "stdin, line 1: 'utf-8'"),
        ("rte --file a.jsonl --out a.jsonl", "", "would replace the input"),
        ("fusion-rte --file a.jsonl --explain ./a.jsonl", "", "would replace the input"),
        ("rte red one --out a.tsv", "", "--out goes with --file alone"),
        ("rte red one --explain page.html", "", "--explain needs a fusion run"),
        ("fusion-rte red one --explain no/page.html", "", "lies in no directory"),
        ("fusion-rte red one --explain .", "", "is not a file"),
        ("fusion-rte - --explain page.html", "red\tone\n" * 51, "50 inputs at most"),
        ("fusion-rte red one --mask mnli", "", "'mnli' is not in the fusion"),
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


def test_the_encoder_may_have_moved(say, runs, encoder, tmp_path):
    moved = shutil.copytree(encoder, tmp_path / "encoder")
    run = changed(runs / "rte", tmp_path / "run", model=str(tmp_path / "gone"))
    assert say(run, "red", "one", "--model", moved) == say(runs / "rte", "red", "one")


def changed(run, copy, **changes):
    """A copy of a run with other entries in its config.json."""
    shutil.copytree(run, copy)
    write_json(copy / "config.json", read_json(copy / "config.json") | changes)
    return copy


def test_labels_that_were_swapped(refused, runs, tmp_path):
    """config.json and head_config.json must agree on the order of the labels."""
    run = changed(runs / "rte", tmp_path / "run", labels=["not_entailment", "entailment"])
    refused([run, "a", "b"], "different labels", **PREDICT)


def test_notes_are_no_predictions(runs, tmp_path, capsys):
    """Another encoder than that of the training, and adapters of another than the fusion's."""
    other = changed(runs / "rte", tmp_path / "other", encoder_sha256="0" * 64)
    mixed = changed(runs / "fusion-rte", tmp_path / "mixed", adapter_encoders={"pick": "0" * 64})
    for run, options, note in (
        (other, ["--allow-other-encoder"], "was trained with another encoder"),
        (mixed, [], "fuses adapters of another encoder: pick"),
    ):
        predict.main([str(run), "red", "one", "--device", "cpu", "--json", *options])
        said = capsys.readouterr()
        assert json.loads(said.out)["label"] and said.err.startswith("note: ") and note in said.err


# --------------------------------------------------------------------------------------------------
# Runs of other programs


FORK = """import train

def predict(bert, head, batch, dtype, usual=train.predict):
    return -usual(bert, head, batch, dtype)  # a head that is read the other way round

train.predict = predict
if __name__ == "__main__":
    run_command("my_fork.py", train.main)
"""


def test_what_a_fork_changes_is_in_effect_once_it_is_imported(runs, tmp_path, monkeypatch, capsys):
    (tmp_path / "my_fork.py").write_text(FORK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    run = changed(runs / "rte", tmp_path / "run", command="my_fork.py --stage adapter --task rte")
    words = [str(run), "red", "one", "--device", "cpu", "--json"]
    predict.main(words)
    said = capsys.readouterr()
    assert f"note: {run}: the run was made by my_fork.py, which is not imported (" in said.err
    monkeypatch.setattr(train, "predict", train.predict)  # to be restored
    predict.main([*words, "--import", "my_fork"])
    forked = capsys.readouterr()
    assert forked.err == ""
    first, second = json.loads(said.out), json.loads(forked.out)
    assert first["probability"] == pytest.approx(second["probability"])
    assert first["label"] != second["label"]
    evaluate.main([str(run), "--device", "cpu"])
    assert "not imported" not in capsys.readouterr().out
    sys.modules.pop("my_fork")


def test_a_run_of_an_unknown_kind(runs, tmp_path, refused):
    """A stranger's run may name a program that came with it: it is named, and not recommended."""
    command = "got/run/payload.py --stage x"
    run = changed(runs / "rte", tmp_path / "run", command=command, kinds={"rte": "Unknown"})
    error = refused([run, "red", "one"], "an unknown kind, 'Unknown'", **PREDICT)
    assert error.count("payload") == 1
