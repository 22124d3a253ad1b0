"""What does a finished run say about your text, and which of its adapters did it use?

    python -m experiments.predict runs/rte "It rains." "It is wet."
    python -m experiments.predict runs/social_i_qa "Kai fell." "Why?" --choices "ice" "fun" "tea"
    python -m experiments.predict runs/sst2 --file rows.jsonl --json    # or - for stdin
    python -m experiments.predict runs/rte --file test.jsonl --out RTE.tsv    # a GLUE submission
    python -m experiments.predict runs/fusion-rte "It rains." "It is wet." --mask qqp sst2
    python -m experiments.predict runs/fusion-rte "It rains." "It is wet." --explain page.html

Texts are given in the order of the task's columns.

--file reads what training reads, .jsonl, .csv, .tsv or .parquet, with the columns of the task's
training data; the label may be missing, or hidden (-1). A line of stdin is a JSON object, or texts
with tabs between. --json prints one object a line: label, probability, all probabilities, and
whether the text was longer than in training and therefore cut.

--explain, for fusion runs, shows the weight of every adapter for every token at every layer: as a
table on the terminal (the letter of the adapter with the largest weight, and that weight in %), and
as an HTML page with a slider over the layers. The page is a single file; page.html#layer=3 opens at
layer 3.
"""

if __name__ == "__main__":
    from runtime.command import announce

    announce("predict.py", stdout_is_data=True)

import contextlib
import json
import signal
import sys
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from string import ascii_letters

import torch

from experiments.load_run import Reading, load_run
from experiments.report import table, write_csv, write_text
from formats.files import error_prefix
from formats.rows import read_rows
from runtime.command import run_command
from runtime.processes import choose_device
from runtime.settings import argument, like, option, parse
from train import Settings
from variants.masking import mask

WINDOW = 3200  # inputs that are sorted by length together
MOST_EXPLAINED = 50  # a page with more inputs would have megabytes
GLUE_NUMBERS = ("sst2", "mrpc", "qqp")  # for these GLUE's server takes 0 and 1, else names
# Okabe and Ito's colours, which most kinds of colour vision tell apart
COLOURS = "#e69f00 #56b4e9 #009e73 #f0e442 #0072b2 #d55e00 #cc79a7 #999999".split()


@dataclass(frozen=True)
class Options(Reading):
    texts: tuple = argument("the input's texts, in the order of the task's columns", default=())
    choices: tuple = option((), "the options of a multiple-choice task")
    file: str | None = option(None, "a file that training can read, or - for stdin")
    out: Path | None = option(None, "write index and prediction of a --file, for GLUE's server")
    json: bool = option(False, "one JSON object a line")
    explain: Path | None = option(
        None, "the fusion weights of each token and layer, as a page", metavar="PAGE.html"
    )
    mask: tuple = option((), "without these adapters of a fusion", metavar="ADAPTER")
    device: str = like(Settings, "device", group=None)


def check(options):
    """Raises ValueError for options that contradict each other, or would destroy the input."""
    if (options.file is None) == (not options.texts and not options.choices):
        raise ValueError("give either texts, or --file")
    if options.out and (options.file is None or options.explain or options.json):
        raise ValueError("--out goes with --file alone, without --explain and --json")
    for name in ("explain", "out"):
        if path := getattr(options, name):
            if path.exists() and not path.is_file():  # a device would be replaced by a file
                raise ValueError(f"--{name} {path} is not a file")
            if not path.parent.is_dir():
                raise ValueError(f"--{name} {path} lies in no directory that is there")
            if options.file and path.resolve() == Path(options.file).resolve():
                raise ValueError(f"--{name} {path} would replace the input, --file")


# --------------------------------------------------------------------------------------------------
# Input


def read_stdin(model):
    """(line, input) of stdin: JSON objects, or texts between tabs."""
    with error_prefix("stdin"):
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    K, objects = len(model.task.labels), text.lstrip().startswith("{")
    for i, line in enumerate(text.split("\n"), 1):
        if objects and line.strip():
            with error_prefix(f"stdin, line {i}"):
                yield i, json.loads(line)
        elif line.strip():
            fields = line.rstrip("\r").split("\t")
            yield i, [*fields[:-K], fields[-K:]] if model.task.choices else fields


def read_inputs(options, model):
    """[(line, input)], all of which fit the task. Raises ValueError that names file and line."""
    if options.file is None:
        given = [*options.texts, options.choices] if options.choices else [*options.texts]
        model.candidates(given)
        return [(1, given)]
    where = "stdin" if options.file == "-" else options.file
    inputs = list(read_stdin(model) if options.file == "-" else read_rows(where))
    if not inputs:
        raise ValueError("stdin is empty")
    for line, given in inputs:
        with error_prefix(f"{where}, line {line}"):
            model.candidates(given)
    return inputs


# --------------------------------------------------------------------------------------------------
# Output


def printable(text, width=100):
    """A text on one line of a terminal, with every control character replaced by a blank."""
    text = "".join(letter if letter.isprintable() else " " for letter in text).strip()
    return text if len(text) <= width else text[: width - 1] + "…"


def joined(pair):
    return " | ".join(text for text in pair if text is not None)


def line_of_text(model, candidates, answer):
    """label, probability and text, for people."""
    if "label" not in answer:
        return f"{answer[model.task.labels[0]]:.3f}\t{printable(joined(candidates[0]))}"
    best = model.task.labels.index(answer["label"]) if model.task.choices else 0
    text = printable(joined(candidates[best]))
    return f"{printable(answer['label'])}\t{answer['probability']:.3f}\t{text}"


def write_submission(path, model, inputs, answers):
    """A file for GLUE's server: for each input its index, the row's own `idx` where it has one, and
    the answer."""
    labels, rows = model.task.labels, []
    for i, ((_, row), answer) in enumerate(zip(inputs, answers, strict=True)):
        row = row if isinstance(row, dict) else {}
        value = answer.get("label", answer.get(labels[0]))
        value = labels.index(value) if model.task.name in GLUE_NUMBERS else value
        rows.append([row.get("idx", row.get("index", i)), value])
    write_csv(path, ["index", "prediction"], rows, delimiter="\t")


def explain(model, given, answer):
    """What the page shows of an input."""
    labels = model.task.labels if model.task.choices else [None]
    texts = [joined(pair) for pair in model.candidates(given)]
    texts = [f"{k}: {text}" if k else text for k, text in zip(labels, texts, strict=True)]
    found = zip(texts, model.fusion_weights([given]), strict=True)
    return {
        **{name: answer[name] for name in ("label", "probability", "truncated")},
        "candidates": [{"text": text, **weights} for text, weights in found],
    }


def tables(example, adapters):
    """Lines: for every token, the adapter with the largest weight at every layer, and that weight
    in %. adapters: of `page_data`"""
    letters = [adapter["letter"] for adapter in adapters]
    yield "  ".join(f"{one['letter']} = {printable(one['name'])}" for one in adapters)

    def cell(s):  # [N]
        return f"{letters[s.argmax()]} {100 * s.max():3.0f}"

    for candidate in example["candidates"]:
        if len(example["candidates"]) > 1:
            yield printable(candidate["text"])
        tokens = [printable(token, 16) for token in candidate["tokens"]]
        for location, layers in candidate["weights"].items():
            columns = [
                ["-"] * (len(tokens) + 1) if s is None else [*map(cell, s), cell(s.mean(0))]
                for s in layers
            ]
            title = f"{location}, layer" if len(candidate["weights"]) > 1 else "layer"
            header = [title, *map(str, range(1, len(layers) + 1))]
            yield from table([*zip([*tokens, "(mean)"], *columns, strict=True)], header, wrap=True)


def page_data(model):
    """What the page shows of the run: its adapters, with their letters and colours."""
    names = model.config["adapters"]
    colours = [*COLOURS, *(f"hsl({137.5 * n % 360} 70% 50%)" for n in range(len(names)))]
    found = zip(names, cycle(ascii_letters), colours, strict=False)
    return {
        "run": model.directory.resolve().name,
        "layers": len(model.bert.layers),
        "max_length": model.config["max_length"],
        "adapters": [{"name": n, "letter": letter, "colour": c} for n, letter, c in found],
        "examples": [],
    }


def page(data):
    """The HTML page. All data in it is one JSON value, in which no < is left to end its script
    tag."""
    text = json.dumps(data, default=lambda weights: weights.double().round(decimals=4).tolist())
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return template.replace("DATA", text.replace("<", "\\u003c"))


# --------------------------------------------------------------------------------------------------
# The command


def load(options):
    """The run on its device, with what --mask leaves of it."""
    device, _ = choose_device(options.device, "float32")
    with contextlib.redirect_stdout(sys.stderr):  # notes; stdout is for predictions
        given = options.model, options.task, options.allow_other_encoder
        model = load_run(options.run, device, torch.float32, *given)
    if options.explain and model.config["stage"] != "fusion":
        stage = model.config["stage"]
        raise ValueError(f"--explain needs a fusion run: {options.run} is of --stage {stage}")
    if options.explain and model.task.kind.dtype != torch.long:
        raise ValueError(f"--explain is for tasks with labels, {model.task.name} has numbers")
    if options.mask:
        mask(model.bert, options.mask)
    return model


def main(argv=None):
    options = parse(Options, argv, "python -m experiments.predict", __doc__)
    if options.texts == ("-",) and options.file is None:
        options = replace(options, texts=(), file="-")
    check(options)
    model = load(options)
    inputs = read_inputs(options, model)
    if options.explain and len(inputs) > MOST_EXPLAINED:
        raise ValueError(f"--explain takes {MOST_EXPLAINED} inputs at most, not {len(inputs)}")
    answers, data = [], page_data(model)
    for start in range(0, len(inputs), WINDOW):
        window = inputs[start : start + WINDOW]
        found = model.predict([given for _, given in window])
        for (line, given), answer in zip(window, found, strict=True):
            answers.append(answer)
            if options.json:
                print(json.dumps({"line": line, **answer} if options.file else answer))
            elif options.out is None:
                print(line_of_text(model, model.candidates(given), answer))
            if options.explain:
                data["examples"].append(explain(model, given, answer))
                if not options.json:
                    print(*tables(data["examples"][-1], data["adapters"]), sep="\n")
    if options.explain:
        write_text(options.explain, page(data))
        if not options.json:
            print(f"{options.explain}: the same as a page")
    if options.out:
        write_submission(options.out, model, inputs, answers)
        print(f"{options.out}: {len(inputs)} predictions")
    cut = sum(answer["truncated"] for answer in answers)
    if cut and not options.json:
        length = model.config["max_length"]
        note = f"note: {cut} of {len(inputs)} inputs were cut to {length} tokens, as in training"
        print(note, file=sys.stderr)


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # so that `predict ... | head` ends quietly
    run_command("predict.py", main)
