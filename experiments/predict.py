"""What does a finished run say about your text, and which of its adapters did it use?

    python -m experiments.predict runs/rte "It rains." "It is wet."
    python -m experiments.predict runs/social_i_qa "Kai fell." "Why?" --choices "ice" "fun" "tea"
    python -m experiments.predict runs/sst2 --file rows.jsonl --json    # or - for stdin
    python -m experiments.predict runs/fusion-rte "It rains." "It is wet." --explain page.html

Texts are given in the order of the task's columns.

--file reads what training reads, .jsonl, .json, .csv, .tsv or .parquet, with the columns of the
task's training data; the label may be missing, or hidden (-1). A line of stdin is a JSON object, or
a JSON list of texts. --json prints one object a line: label, probability, all probabilities, and
whether the text was longer than in training and therefore cut.

--explain, for fusion runs, writes the weight of every adapter for every token at every layer as an
HTML page with a slider over the layers. The page is a single file.
"""

import contextlib
import json
import signal
import sys
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from string import ascii_letters

from experiments.load_run import Reading, check_fusion, load_run
from experiments.report import write_text
from formats.files import error_prefix
from formats.rows import read_rows
from runtime.command import run_command
from runtime.processes import choose_device
from runtime.settings import argument, option, parse

WINDOW = 3200  # inputs that are sorted by length together
# Okabe and Ito's colours, which most kinds of colour vision tell apart
COLOURS = "#e69f00 #56b4e9 #009e73 #f0e442 #0072b2 #d55e00 #cc79a7 #999999".split()


@dataclass(frozen=True)
class Options(Reading):
    texts: tuple = argument("the input's texts, in the order of the task's columns", default=())
    choices: tuple = option((), "the options of a multiple-choice task")
    file: str | None = option(None, "a file that training can read, or - for stdin")
    json: bool = option(False, "one JSON object a line")
    explain: Path | None = option(
        None, "the fusion weights of each token and layer, as a page", metavar="PAGE.html"
    )


def check(options):
    if (options.file is None) == (not options.texts and not options.choices):
        raise ValueError("give either texts, or --file")
    if options.explain and options.explain.suffix != ".html":  # so no run's file is replaced
        raise ValueError(f"--explain {options.explain} is not an .html file")
    if options.explain and not options.explain.parent.is_dir():
        raise ValueError(f"--explain: there is no directory {options.explain.parent}")


def read_stdin():
    """(line, input) of stdin, JSON in every line that is not empty."""
    for i, line in enumerate(sys.stdin.buffer, 1):
        if line.strip():
            with error_prefix(f"stdin, line {i}"):
                yield i, json.loads(line.decode("utf-8-sig"))


def read_inputs(options, model):
    """[(line, input)]. Raises ValueError that names file and line of one that does not fit the
    task."""
    if options.file is None:
        return [(1, [*options.texts, options.choices] if options.choices else options.texts)]
    where = "stdin" if options.file == "-" else options.file
    inputs = list(read_stdin() if options.file == "-" else read_rows(where))
    for line, given in inputs:
        with error_prefix(f"{where}, line {line}"):
            model.candidates(given)
    if not inputs:
        raise ValueError("stdin is empty")
    return inputs


def joined(pair):
    return " | ".join(text for text in pair if text is not None)


def line_of_text(model, candidates, answer):
    """label, probability and the beginning of the text, for people."""
    best = model.task.labels.index(answer["label"]) if model.task.is_multiple_choice else 0
    text = f"{' '.join(joined(candidates[best]).split()):.100}"
    if "label" not in answer:
        return f"{answer[model.task.labels[0]]:.3f}\t{text}"
    return f"{' '.join(answer['label'].split())}\t{answer['probability']:.3f}\t{text}"


def explain(model, given, answer):
    """What the page shows of an input."""
    labels = model.task.labels if model.task.is_multiple_choice else [None]
    texts = [joined(pair) for pair in model.candidates(given)]
    texts = [f"{k}: {text}" if k else text for k, text in zip(labels, texts, strict=True)]
    found = zip(texts, model.fusion_weights([given]), strict=True)
    return {
        **{name: answer[name] for name in ("label", "probability", "truncated")},
        "candidates": [{"text": text, **weights} for text, weights in found],
    }


def page_data(model):
    """What the page shows of the run: its adapters, with their letters and colours."""
    colours = [*COLOURS, *(f"hsl({137.5 * n % 360} 70% 50%)" for n in range(len(model.adapters)))]
    keys = zip(model.adapters, cycle(ascii_letters), colours, strict=False)
    return {
        "run": model.directory.resolve().name,
        "layers": len(model.bert.layers),
        "adapters": [{"name": n, "letter": letter, "colour": c} for n, letter, c in keys],
    }


def page(data):
    """The HTML page. All data in it is one JSON value, in which no < is left to end its script
    tag."""
    text = json.dumps(data, default=lambda weights: weights.double().round(decimals=4).tolist())
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return template.replace("DATA", text.replace("<", "\\u003c"))


def main(argv=None):
    options = parse(Options, argv, "python -m experiments.predict", __doc__)
    check(options)
    device, _ = choose_device(options.device, "float32")
    given = options.model, options.task, options.allow_other_encoder
    with contextlib.redirect_stdout(sys.stderr):  # notes; stdout is for predictions
        model = load_run(options.run, device, *given)
    if options.explain:
        check_fusion(options.run, "can be explained")
        if model.task.type.dtype.is_floating_point:
            raise ValueError(f"{options.run} predicts a number: only classes can be explained")
    inputs = read_inputs(options, model)
    cut, examples = 0, []
    for start in range(0, len(inputs), WINDOW):
        window = inputs[start : start + WINDOW]
        answers = model.predict([given for _, given in window])
        for (line, given), answer in zip(window, answers, strict=True):
            cut += answer["truncated"]
            if options.json:
                print(json.dumps({"line": line, **answer} if options.file else answer))
            else:
                print(line_of_text(model, model.candidates(given), answer))
            if options.explain:
                examples.append(explain(model, given, answer))
    if options.explain:
        path = write_text(options.explain, page({**page_data(model), "examples": examples}))
        print(f"the fusion's weights are in {path}", file=sys.stderr)
    if cut and not options.json:
        length = model.record.tasks[model.task.name].max_length
        print(f"note: {cut} of {len(inputs)} inputs were cut to {length} tokens", file=sys.stderr)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # so that `predict ... | head` ends quietly
    run_command("predict.py", main)
