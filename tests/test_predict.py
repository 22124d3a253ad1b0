"""experiments/predict.py: the probabilities are the run's, in the order of the lines, from every
kind of input; the page shows the fusion's weights, its slider works, and text stays text."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pytest
import torch
from safetensors.torch import load_file, save_file

from bert import Bert
from conftest import write_rows
from data import TASKS, get_task, to_candidates
from experiments import predict
from experiments.load_run import load_run
from formats.tokenizer import load_tokenizer
from fusion import fusion_weights

CHROMIUM = (
    os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
)
needs_chromium = pytest.mark.skipif(
    not CHROMIUM, reason="no chromium: CHROMIUM names one, or apt-get install chromium"
)
HOSTILE = (
    '</script><script>document.title = "hacked"</script>'
    """<img src=x onerror="document.title = 'hacked'"> <!-- & 'dog'"""
)


@pytest.fixture
def say(capsys, monkeypatch):
    """say(run, ..., stdin="...") -> the lines that main prints."""

    def say(*arguments, stdin=b""):
        capsys.readouterr()  # of training, for instance
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        predict.main([*map(str, arguments), "--device", "cpu"])
        return capsys.readouterr().out.splitlines()

    return say


@pytest.fixture(scope="module")
def fusion(runs, tmp_path_factory):
    """The fusion run with larger queries, so that its weights differ between adapters, tokens and
    layers."""
    run = shutil.copytree(runs / "fusion-rte", tmp_path_factory.mktemp("predict") / "fusion")
    path = run / "model_adapter_fusion.safetensors"
    save_file(
        {name: 100 * p if ".query." in name else p for name, p in load_file(path).items()}, path
    )
    return run


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def alone(run, tokenizer, candidates):
    """The run's probabilities for one input, computed without any batch."""
    bert, head, _ = load_run(run)
    encodings = [
        tokenizer.encode(a) if b is None else tokenizer.encode(a, b) for a, b in candidates
    ]
    with torch.no_grad():
        h = [
            bert(torch.tensor([encoding.ids]), torch.tensor([encoding.type_ids]))[:, :1]
            for encoding in encodings
        ]
        return head(torch.cat(h)).softmax(-1)[0]


@pytest.mark.parametrize(
    "stage, task", [("adapter", "pick"), ("fusion", "rte"), ("head", "sst2"), ("full", "rte")]
)
def test_probabilities(stage, task, say, runs, launch, encoder, data_dir, tmp_path):
    run = {"adapter": runs / "pick", "fusion": runs / "fusion-rte"}.get(stage, tmp_path / stage)
    if not run.exists():
        launch("--stage", stage, "--task", task, "--epochs", 1, "--lr", "1e-3", "--out", run)
    rows = read(data_dir / task / "validation.jsonl")
    results = [
        json.loads(line)
        for line in say(run, "--file", data_dir / task / "validation.jsonl", "--json")
    ]
    assert [result["line"] for result in results] == list(range(1, len(rows) + 1))
    assert not any(result["truncated"] for result in results)

    tokenizer, task = load_tokenizer(encoder, 48), get_task(task, data_dir)
    right = 0
    for i, (row, result) in enumerate(zip(rows, results, strict=True)):
        candidates, label = to_candidates(task, row)
        assert list(result["probabilities"]) == list(task.labels)
        assert (
            result["probability"]
            == max(result["probabilities"].values())
            == result["probabilities"][result["label"]]
        )
        if i % 7 == 0:
            expected = alone(run, tokenizer, candidates).tolist()
            assert list(result["probabilities"].values()) == pytest.approx(expected, abs=1e-5)
        right += result["label"] == task.labels[label]
    assert right / len(rows) == json.loads((run / "metrics.json").read_text())["accuracy"]


def test_every_kind_of_input_says_the_same(say, runs, data_dir, tmp_path):
    rows = [row for row in read(data_dir / "rte" / "validation.jsonl")[:6]]
    write_rows(tmp_path / "rows.jsonl", rows)
    (tmp_path / "rows.jsonl").write_bytes(
        b"\xef\xbb\xbf" + (tmp_path / "rows.jsonl").read_bytes().replace(b"\n", b"\r\n\r\n")
    )
    columns = ("sentence1", "sentence2")
    text = "".join("\t".join(row[column] for column in columns) + "\n" for row in rows)
    (tmp_path / "rows.tsv").write_text(
        "sentence2\tidx\tsentence1\n"
        + "".join(f"{row['sentence2']}\t7\t{row['sentence1']}\n" for row in rows)
    )
    outputs = [
        say(runs / "rte", "--file", tmp_path / "rows.jsonl", "--json"),
        say(runs / "rte", "--file", tmp_path / "rows.tsv", "--json"),
        say(runs / "rte", "--file", "-", "--json", stdin=text.encode()),
        say(
            runs / "rte",
            "-",
            "--json",
            stdin="".join(json.dumps(row) + "\n" for row in rows).encode(),
        ),
        [say(runs / "rte", *(row[column] for column in columns), "--json")[0] for row in rows],
    ]
    results = [[json.loads(line) for line in lines] for lines in outputs]
    assert [result["line"] for result in results[0]] == [
        1,
        3,
        5,
        7,
        9,
        11,
    ]  # empty lines are passed over
    assert [result["line"] for result in results[1]] == [2, 3, 4, 5, 6, 7]
    for kind in results[1:]:
        for result, first in zip(kind, results[0], strict=True):
            assert result["label"] == first["label"]
            assert result["probability"] == pytest.approx(first["probability"], abs=1e-5)


def test_multiple_choice(say, runs):
    options = ["red cat", "one dog yes", "a bird"]
    (line,) = say(runs / "pick", "the question", "--choices", *options, "--json")
    result = json.loads(line)
    (line,) = say(
        runs / "pick", "--file", "-", "--json", stdin="\t".join(["the question", *options]).encode()
    )
    assert json.loads(line)["probabilities"] == pytest.approx(result["probabilities"])
    (line,) = say(
        "--model",
        load_run(runs / "pick")[0].directory,
        runs / "pick",
        "--device",
        "cpu",
        "the question",
        "--choices",
        *options,
    )
    label, probability, text = line.split("\t")
    assert label == result["label"] and float(probability) == pytest.approx(
        result["probability"], abs=1e-3
    )
    assert text == f"the question | {options[int(label)]}"


@pytest.mark.parametrize("name", TASKS)
def test_texts_take_the_place_they_have_in_training(name):
    task = TASKS[name]
    config = {"task": name, "labels": list(task.labels)}
    options = [f"option {i}" for i in range(len(task.labels))] * task.choices
    count = {
        "winogrande": 1,
        "commonsense_qa": 1,
        "hellaswag": 2,
        "social_i_qa": 2,
        "cosmos_qa": 2,
        "sst2": 1,
        "imdb": 1,
    }
    texts = ["first _", "second"][: count.get(name, 2)]
    row = predict.as_row(config, task.choices, texts, options)
    assert set(row) == set(task.columns)
    candidates = predict.as_candidates(config, task.choices, row)
    if not task.choices:
        assert candidates == [(*texts, None)[:2]]
    for pair, option in zip(candidates, options, strict=task.choices):
        joined = predict.joined(pair)
        assert joined.count("option") == 1 and option in joined and joined.startswith("first")
        assert ("second" in joined) == (len(texts) == 2)
    for wrong in ([], [*texts, "more"]):
        with pytest.raises(ValueError, match=name):
            predict.as_row(config, task.choices, wrong, options)
    with pytest.raises(ValueError, match="choices"):
        predict.as_row(config, task.choices, texts, [*options, "more"])


def test_other_columns_of_the_same_task():
    config = {"task": "boolq", "labels": ["False", "True"]}
    assert predict.as_candidates(
        config, False, {"passage": "p", "question": "q", "answer": True}
    ) == [("p", "q")]


def test_long_inputs_are_cut_and_it_says_so(say, runs, capsys, monkeypatch):
    line = " ".join(["red"] * 100)
    stdin = f"one\tred\n{line}\t{line}\n".encode()
    assert [
        json.loads(line)["truncated"] for line in say(runs / "rte", "-", "--json", stdin=stdin)
    ] == [False, True]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    predict.main([str(runs / "rte"), "-"])
    assert "1 of 2 inputs were cut to 48 tokens" in capsys.readouterr().err


def test_a_text_cannot_command_the_terminal(say, runs, tmp_path):
    nasty = "red\x1b[2J\x07 cat\r\ndog\u202e"
    lines = say(runs / "fusion-rte", nasty, "one", "--explain", tmp_path / "page.html")
    assert all(character.isprintable() for line in lines for character in line.replace("\t", ""))
    assert lines[0].endswith("dog  | one")


# --------------------------------------------------------------------------------------------------
# Which adapter spoke


def page_data(path):
    (content,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL
    )
    return json.loads(content)


def test_the_explanation_is_the_fusions_weights(say, fusion, tmp_path):
    lines = say(fusion, "red cat", "the dog sleeps .", "--explain", tmp_path / "page.html")
    data = page_data(tmp_path / "page.html")
    bert, _, config = load_run(fusion)
    encoding = load_tokenizer(bert.directory, 48).encode("red cat", "the dog sleeps .")
    with torch.no_grad():
        bert(torch.tensor([encoding.ids]), torch.tensor([encoding.type_ids]))
    expected = fusion_weights(bert)

    (candidate,) = data["examples"][0]["candidates"]
    assert (
        candidate["tokens"] == encoding.tokens and candidate["text"] == "red cat | the dog sleeps ."
    )
    assert (
        [adapter["name"] for adapter in data["adapters"]]
        == config["adapters"]
        == ["rte", "sst2", "pick"]
    )
    assert len(candidate["weights"]["output"]) == data["layers"] == 2
    for layer, weights in enumerate(candidate["weights"]["output"]):
        assert (torch.tensor(weights) - expected[layer, "output"][0]).abs().max() < 1e-4

    label, probability, _ = lines[0].split("\t")
    assert (
        data["examples"][0]["label"] == label
        and f"{data['examples'][0]['probability']:.3f}" == probability
    )
    assert lines[1] == "a = rte  b = sst2  c = pick" and lines[2].split() == ["layer", "1", "2"]
    means = [expected[layer, "output"][0].mean(0, keepdim=True) for layer in (0, 1)]
    tokens = [*encoding.tokens, "(mean)"]
    for t, (token, line) in enumerate(zip(tokens, lines[3 : 3 + len(tokens)], strict=True)):
        cells = [token]
        for layer in (0, 1):
            s = torch.cat([expected[layer, "output"][0], means[layer]])[t]
            cells += ["abc"[s.argmax()], f"{100 * s.max():.0f}"]
        assert line.split() == cells


def test_both_locations_and_every_choice_are_explained(say, runs, launch, tmp_path):
    options = ["--adapter", "houlsby", "--epochs", 1, "--lr", "5e-3"]
    launch("--stage", "adapter", "--task", "pick", "--out", tmp_path / "pick", *options)
    launch(
        "--stage",
        "fusion",
        "--task",
        "pick",
        "--adapters",
        tmp_path / "pick",
        "--epochs",
        1,
        "--out",
        tmp_path / "run",
    )
    choices = ["--choices", "a", "the cat", "one two three"]
    lines = say(tmp_path / "run", "red", *choices, "--explain", tmp_path / "page.html")
    candidates = page_data(tmp_path / "page.html")["examples"][0]["candidates"]
    assert [candidate["text"] for candidate in candidates] == [
        "0: red | a",
        "1: red | the cat",
        "2: red | one two three",
    ]
    for candidate, tokens in zip(
        candidates, (5, 6, 7), strict=True
    ):  # each without the others' padding
        assert list(candidate["weights"]) == ["attention", "output"]
        assert all(
            len(weights) == tokens for layers in candidate["weights"].values() for weights in layers
        )
    assert [line.split()[:2] for line in lines if "layer" in line] == [
        ["attention,", "layer"],
        ["output,", "layer"],
    ] * 3


def test_the_page_is_one_file(say, fusion, tmp_path):
    say(fusion, "red", "one", "--explain", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert not re.search(r"https?:|//\w|url\(|@import|\ssrc=|\shref=", text)
    assert "default-src 'none'" in text


class Page(HTMLParser):
    """What a browser made of the page: its tags, the tokens on display, the text of elements by
    id."""

    def __init__(self, dom):
        super().__init__()
        self.tags, self.tokens, self.texts, self.open = [], [], {}, []
        self.feed(dom)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append(tag)
        if attributes.get("class") == "token":
            self.tokens.append([attributes["title"], ""])
        if tag not in ("meta", "input", "br", "img", "link"):
            self.open.append(attributes.get("id"))

    def handle_endtag(self, tag):
        self.open.pop()

    def handle_data(self, text):
        for id in filter(None, self.open):
            self.texts[id] = self.texts.get(id, "") + text
        if self.tokens and "inputs" in self.open and text.strip():
            self.tokens[-1][1] += text + " "


def browse(path, tmp_path, fragment=""):
    """(Page, console lines) of headless Chromium."""
    result = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            "--v=0",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom",
            f"{path.as_uri()}{fragment}",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "</html>" in result.stdout, result.stderr
    return Page(result.stdout), [line for line in result.stderr.splitlines() if ":CONSOLE" in line]


def titles(data, layer):
    """What pointing at every token must show."""
    (candidate,) = data["examples"][0]["candidates"]
    return [
        "\n".join(
            f"{adapter['name']} {value:.3f}"
            for adapter, value in zip(data["adapters"], s, strict=True)
        )
        for s in candidate["weights"]["output"][layer - 1]
    ]


def rounded(page_titles):
    return [
        [float(number) for number in re.findall(r"(?<= )\d\.\d{3}", title)] for title in page_titles
    ]


@needs_chromium
def test_the_page_in_a_browser(say, fusion, tmp_path):
    path = tmp_path / "page.html"
    say(fusion, "red cat", "the dog sleeps .", "--explain", path)
    data = page_data(path)

    def check(page, layer):
        assert page.texts["shown"] == f"{layer} of 2" and f"layer {layer}" in page.texts["heading"]
        expected = rounded(titles(data, layer))
        for values, s in zip(rounded(title for title, _ in page.tokens), expected, strict=True):
            assert values == pytest.approx(s, abs=0.0011)
        tokens = data["examples"][0]["candidates"][0]["tokens"]
        assert [text.split()[:2] for _, text in page.tokens] == [
            [token, "abc"[s.index(max(s))]] for token, s in zip(tokens, expected, strict=True)
        ]

    best = [[s.index(max(s)) for s in rounded(titles(data, layer))] for layer in (1, 2)]
    assert best[0] != best[1] and len(set(best[0] + best[1])) > 1  # a mistake would show
    page, console = browse(path, tmp_path)
    assert console == []
    check(page, 1)
    page, console = browse(path, tmp_path, "#layer=2")
    assert console == []
    check(page, 2)
    # a user moves the slider, and points at the second token
    moved = tmp_path / "moved.html"
    moved.write_text(
        path.read_text().replace(
            "</body>",
            """<script>
        const slider = document.getElementById("layer");
        slider.value = 2;
        slider.dispatchEvent(new Event("input", { bubbles: true }));
        document.querySelectorAll(".token")[1].focus();
        console.error("probe");
        </script></body>""",
        )
    )
    page, console = browse(moved, tmp_path)
    assert len(console) == 1 and "probe" in console[0]  # so that errors would have been seen above
    assert page.texts["shown"] == "2 of 2" and page.texts["heading"] == "red, layer 2"
    shown = [float(number) for number in re.findall(r"\d\.\d{3}", page.texts["legend"])]
    assert shown == pytest.approx(rounded(titles(data, 2))[1], abs=0.0011)


@needs_chromium
def test_hostile_text_stays_text(say, fusion, tmp_path):
    path = tmp_path / "page.html"
    say(fusion, HOSTILE, "one", "--explain", path)
    honest, _ = browse(path, tmp_path)
    # tokens, adapters, labels and the run's name can be hostile, too
    data = page_data(path)
    examples = json.loads(json.dumps(data["examples"]).replace('"[UNK]"', json.dumps(HOSTILE)))
    examples[0]["label"] = examples[0]["candidates"][0]["tokens"][1] = HOSTILE
    config = {"adapters": [HOSTILE, "sst2", "pick"], "max_length": 48}
    path.write_text(predict.page(HOSTILE, config, 2, examples, "abc"))
    hostile, console = browse(path, tmp_path)
    assert console == []
    for page in (honest, hostile):
        assert page.tags.count("script") == 2 and "img" not in page.tags
        assert HOSTILE in page.texts["inputs"]
    assert hostile.texts["title"] == f"{HOSTILE}: which adapter spoke?"
    assert HOSTILE in hostile.texts["legend"] and HOSTILE in hostile.texts["prediction"]
    assert honest.tags == hostile.tags


# --------------------------------------------------------------------------------------------------
# Errors


def test_errors(runs, launch, encoder, tmp_path, capsys, monkeypatch):
    for split in ("train", "validation"):
        write_rows(
            tmp_path / "data" / "single" / f"{split}.jsonl",
            [{"text_a": text, "label": text} for text in ("red", "one")],
        )
    single = tmp_path / "single"
    launch(
        "--stage",
        "full",
        "--task",
        "single",
        "--data-dir",
        tmp_path / "data",
        "--epochs",
        1,
        "--out",
        single,
    )
    capsys.readouterr()

    def write(name, content):
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    rte, sst2, pick, fusion = (runs / name for name in ("rte", "sst2", "pick", "fusion-rte"))
    page = tmp_path / "page.html"
    broken = shutil.copytree(rte, tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if key != "labels"})
    )
    cases = [
        ([tmp_path / "nowhere", "red"], "no finished run"),
        ([broken, "red", "one"], "not the configuration of a run"),
        ([rte, "red", "one", "--model", tmp_path], str(tmp_path)),
        ([rte], "no text"),
        ([rte, "red"], "rte takes sentence1 and sentence2: 1 text was given"),
        ([rte, "red", "one", "two"], "3 texts were given"),
        ([sst2, "red", "one"], "sst2 takes sentence: 2 texts"),
        ([rte, "red", "one", "--choices", "a", "b"], "not multiple choice"),
        ([pick, "red"], "3 choices, 0 were given"),
        ([pick, "red", "--choices", "a", "b"], "3 choices, 2 were given"),
        (
            [pick, "red", "one", "--choices", "a", "b", "c"],
            "pick takes text_a and choices: 2 texts",
        ),
        ([pick, "--choices", "a", "b", "c"], "pick takes text_a and choices: 0 texts"),
        ([single, "red", "one"], "single takes text_a: 2 texts"),
        (
            [single, "--file", write("h.jsonl", b'{"text_a": "a", "text_b": "b"}\n')],
            "line 1: column 'text_b' is one that single",
        ),
        (
            [
                pick,
                "--file",
                write("i.jsonl", b'{"text_a": "a", "choices": {"text": ["b", "c"]}}\n'),
            ],
            "'choices' holds dict",
        ),
        ([rte, "red", "one", "--task", "sst2"], "is a run on 'rte', not on 'sst2'"),
        ([single, "red", "--model", encoder], "has an encoder of its own"),
        ([rte, "red", "one\udcff"], "surrogates"),
        ([rte, "red", "one", "--file", "-"], "not both"),
        ([rte, "--file", tmp_path / "missing.jsonl"], "missing.jsonl"),
        ([rte, "--file", write("rows.txt", b"red")], "only .jsonl, .json, .csv, .tsv, .parquet"),
        ([rte, "--file", write("empty.jsonl", b"\n \n")], "empty.jsonl is empty"),
        ([rte, "--file", "-"], "stdin is empty"),
        ([rte, "--file", write("header.tsv", b"sentence1\tsentence2\n")], "no line after"),
        (
            [
                rte,
                "--file",
                write("a.jsonl", b'{"sentence1": "a", "sentence2": "b"}\n{"sentence1"\n'),
            ],
            "line 2: broken JSON",
        ),
        ([rte, "--file", write("b.jsonl", b"\n[1]\n")], "line 2: not a JSON object"),
        (
            [rte, "--file", write("c.jsonl", b'{"sentence1": "a"}\n')],
            "line 1: no column 'sentence2'",
        ),
        (
            [rte, "--file", write("d.jsonl", b'{"sentence1": "a", "sentence2": ["b"]}\n')],
            "line 1: column 'sentence2' holds list",
        ),
        (
            [rte, "--file", write("e.jsonl", b'{"sentence1": "a", "sentence2": "\\ud800"}\n')],
            "line 1: 'utf-8'",
        ),
        (
            [rte, "--file", write("f.jsonl", b'{"sentence1": "a", "sentence2": "b"}\n\xff\n')],
            "line 2: not UTF-8",
        ),
        ([rte, "--file", write("g.jsonl", b"[" * 100_000 + b"\n")], "line 1"),
        (
            [rte, "--file", write("a.tsv", b"sentence1\tsentence2\na\tb\na\n")],
            "line 3: 1 fields, the first line has 2",
        ),
        (
            [rte, "--file", write("b.tsv", b"one\ttwo\na\tb\n")],
            "line 2: column 'sentence1' is missing",
        ),
        (
            [pick, "--file", write("c.tsv", b"text_a\tchoices\na\tabc\n")],
            "line 2: column 'choices' holds a text",
        ),
        ([rte, "--file", "-", b"red\tone\nred\n"], "stdin, line 2: rte takes"),
        ([pick, "--file", "-", b"red\tone\n"], "stdin, line 1: pick has 3 choices, 2 were given"),
        ([rte, "red", "one", "--explain", page], "--explain needs a fusion run"),
        ([fusion, "red", "one", "--explain", tmp_path], "a directory"),
        ([fusion, "red", "one", "--explain", tmp_path / "no" / "page.html"], "is missing"),
        (
            [fusion, "--file", "-", "--explain", page, b"red\tone\n" * 51],
            "at most 50 inputs, there are 51",
        ),
        ([rte, "red", "one", "--mask", "rte"], "no fusion"),
        ([fusion, "red", "one", "--mask", "mnli"], "'mnli' is not in the fusion"),
        (
            [fusion, "red", "one", "--mask", "rte", "sst2", "pick"],
            "layer 1 would be left without adapter",
        ),
        ([rte, "red", "one", "--beams", "3"], "--beams"),
    ]
    before = sorted(tmp_path.rglob("*"))
    for arguments, text in cases:
        stdin = b"".join(argument for argument in arguments if isinstance(argument, bytes))
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as exit:
            predict.main(
                [str(argument) for argument in arguments if not isinstance(argument, bytes)]
            )
        out, error = capsys.readouterr()
        assert (
            exit.value.code == 2
            and out == ""
            and error.startswith("predict.py: ")
            and error.count("\n") == 1
        ), error
        assert text in error
        assert sorted(tmp_path.rglob("*")) == before


def test_masked_adapters_do_not_speak(say, fusion, tmp_path):
    text = ("red cat", "one dog")
    (whole,), (masked,) = (
        say(fusion, *text, "--json"),
        say(fusion, *text, "--mask", "sst2", "--json"),
    )
    assert json.loads(whole)["probability"] != json.loads(masked)["probability"]
    lines = say(
        fusion, *text, "--mask", "rte", "sst2", "--explain", tmp_path / "page.html"
    )  # c is left, with all the weight
    tokens = [line.split() for line in lines if line.split()[:1] in (["red"], ["one"], ["(mean)"])]
    assert len(tokens) == 3 and all(cells[1:] == ["c", "100"] * 2 for cells in tokens)


def test_the_encoder_may_have_moved(say, runs, encoder, tmp_path):
    moved = shutil.copytree(encoder, tmp_path / "encoder")
    run = shutil.copytree(runs / "rte", tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "model": str(tmp_path / "gone")}))
    assert Bert.from_pretrained(moved).directory == moved
    assert say(run, "red", "one", "--model", moved) == say(runs / "rte", "red", "one")


def test_notes_are_no_predictions(runs, tmp_path, capsys):
    run = shutil.copytree(runs / "rte", tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "encoder_sha256": "0" * 64}))
    predict.main([str(run), "red", "one", "--device", "cpu", "--json", "--allow-other-encoder"])
    said = capsys.readouterr()
    assert json.loads(said.out)["label"] and said.err.startswith("note: ")
