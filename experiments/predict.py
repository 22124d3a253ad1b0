"""What does a finished run say about your text?

    python -m experiments.predict runs/rte "It rains." "It is wet."
    python -m experiments.predict runs/social_i_qa "Kai fell." "Why?" --choices "ice" "fun" "tea"
    python -m experiments.predict runs/sst2 --file rows.jsonl --json    # or - for stdin
    python -m experiments.predict runs/sst2 --file mine.csv --columns sentence=review
    python -m experiments.predict runs/fusion-rte "It rains." "It is wet." --picture weights.png

Texts are given in the order of the task's columns.

--file reads what training reads, .jsonl, .json, .csv, .tsv or .parquet, with the columns of the
task's training data; the label may be missing, or hidden (-1). A line of stdin is a JSON object, or
a JSON list of texts. --json prints one object a line: label, probability, all probabilities, and
whether the text was longer than in training and therefore cut; of a file also the number of the
row, and as "input" the row with all of its columns. --picture draws the fusion weights of every
token."""

import contextlib
import json
import sys
from pathlib import Path

from experiments.fusion_weights import heat_maps, title_of
from experiments.load_run import COLUMNS, load_run, make_parser
from experiments.report import save_figure
from formats.files import error_prefix
from formats.rows import read_rows
from runtime.command import import_modules, run_command

WINDOW = 3200  # inputs that are computed, and printed, together


def parse(argv):
    parser = make_parser("predict", __doc__)
    add = parser.add_argument
    add("run", metavar="RUN", help="directory of a finished run")
    add("texts", nargs="*", metavar="TEXT", help="of one input, in the order of the columns")
    add("--choices", nargs="+", metavar="TEXT", help="the options of a multiple-choice task")
    add("--file", help="a file that training can read, or - for stdin")
    add("--columns", **COLUMNS)
    add("--json", action="store_true", help="one JSON object a line")
    add("--picture", metavar="FILE.png", help="of a fusion's weights")
    args = parser.parse_intermixed_args(argv)
    import_modules(args.imports)
    if bool(args.file) == bool(args.texts or args.choices):
        raise ValueError("give either texts, or --file")
    if args.picture and args.file:
        raise ValueError("--picture draws a single input: give its texts in place of --file")
    if args.columns and not args.file:
        raise ValueError("--columns goes with --file")
    return args


def read_inputs(args, run):
    """Inputs for `LoadedRun.predict`. Raises ValueError naming a row that does not fit the task."""
    if args.file is None:
        return [[*args.texts, args.choices] if args.choices else args.texts]
    where, inputs = "stdin" if args.file == "-" else args.file, []
    if args.file == "-":
        rows = filter(str.strip, sys.stdin.buffer.read().decode("utf-8-sig").split("\n"))
    else:
        rows = read_rows(args.file)
    for i, row in enumerate(rows, 1):
        with error_prefix(f"{where}, row {i}"):
            inputs.append(json.loads(row) if args.file == "-" else row)
            run.candidates(inputs[-1])
    return inputs


def line_of_text(labels, answer, candidate):
    """label, probability and the beginning of the text, for people."""
    text = " ".join(" | ".join(filter(None, candidate)).split())
    if "label" not in answer:  # of a regression
        return f"{answer[labels[0]]:.3f}\t{text:.100}"
    return f"{' '.join(answer['label'].split())}\t{answer['probability']:.3f}\t{text:.100}"


def draw(run, found, path):
    """A picture of what `run.fusion_weights` found of one input, a panel for each layer."""
    at = {(i, of): s for of, layers in found["weights"].items() for i, s in enumerate(layers, 1)}
    panels = {title_of(*slot): at[slot].T for slot in sorted(at) if at[slot] is not None}
    save_figure(heat_maps(panels, run.adapters, found["tokens"]), Path(path))


def main(argv=None):
    args = parse(argv)
    with contextlib.redirect_stdout(sys.stderr):  # notes; stdout is for predictions
        run = load_run(args.run, args.device, args.model, args.task)
    if args.picture and not run.adapters:
        raise ValueError(f"--picture: {args.run} has no fusion")
    run.use_columns(args.columns)
    inputs, labels, cut = read_inputs(args, run), run.task.labels, 0
    for start in range(0, len(inputs), WINDOW):
        window = inputs[start : start + WINDOW]
        for i, (given, answer) in enumerate(zip(window, run.predict(window), strict=True), start):
            cut += answer["truncated"]
            best = labels.index(answer["label"]) if run.task.is_multiple_choice else 0
            if args.json:
                of_file = {"row": i + 1, "input": given} if args.file else {}
                print(json.dumps({**of_file, **answer}, default=str))  # str() of a date
            else:
                print(line_of_text(labels, answer, run.candidates(given)[best]))
            if args.picture:
                draw(run, run.fusion_weights([given])[best], args.picture)
                print(args.picture, file=sys.stderr)
    if cut and not args.json:
        length = run.record["tasks"][run.task.name]["max_length"]
        print(f"note: {cut} of {len(inputs)} inputs were cut to {length} tokens", file=sys.stderr)


if __name__ == "__main__":
    run_command("predict.py", main)
