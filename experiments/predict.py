"""What does a finished run say about your text?

    python -m experiments.predict runs/rte "It rains." "It is wet."
    python -m experiments.predict runs/social_i_qa "Kai fell." "Why?" --choices "ice" "fun" "tea"
    python -m experiments.predict runs/sst2 --file rows.jsonl --json    # or - for stdin

Texts are given in the order of the task's columns.

--file reads what training reads, .jsonl, .json, .csv, .tsv or .parquet, with the columns of the
task's training data; the label may be missing, or hidden (-1). A line of stdin is a JSON object, or
a JSON list of texts. --json prints one object a line: label, probability, all probabilities, and
whether the text was longer than in training and therefore cut.
"""

import contextlib
import json
import signal
import sys
from dataclasses import dataclass

from experiments.load_run import Reading, load_run
from formats.files import error_prefix
from formats.rows import read_rows
from runtime.command import run_command
from runtime.processes import choose_device
from runtime.settings import argument, option, parse

WINDOW = 3200  # inputs that are sorted by length together


@dataclass(frozen=True)
class Options(Reading):
    texts: tuple = argument("the input's texts, in the order of the task's columns", default=())
    choices: tuple = option((), "the options of a multiple-choice task")
    file: str | None = option(None, "a file that training can read, or - for stdin")
    json: bool = option(False, "one JSON object a line")


def check(options):
    if (options.file is None) == (not options.texts and not options.choices):
        raise ValueError("give either texts, or --file")


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


def main(argv=None):
    options = parse(Options, argv, "python -m experiments.predict", __doc__)
    check(options)
    device, _ = choose_device(options.device, "float32")
    with contextlib.redirect_stdout(sys.stderr):  # notes; stdout is for predictions
        model = load_run(options.run, device, options.model, options.task)
    inputs = read_inputs(options, model)
    cut = 0
    for start in range(0, len(inputs), WINDOW):
        window = inputs[start : start + WINDOW]
        answers = model.predict([given for _, given in window])
        for (line, given), answer in zip(window, answers, strict=True):
            cut += answer["truncated"]
            if options.json:
                print(json.dumps({"line": line, **answer} if options.file else answer))
            else:
                print(line_of_text(model, model.candidates(given), answer))
    if cut and not options.json:
        length = model.record.tasks[model.task.name].max_length
        print(f"note: {cut} of {len(inputs)} inputs were cut to {length} tokens", file=sys.stderr)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # so that `predict ... | head` ends quietly
    run_command("predict.py", main)
