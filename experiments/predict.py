"""What does a finished run say about your text?

    python -m experiments.predict runs/rte "It rains." "It is wet."
    python -m experiments.predict runs/social_i_qa "Kai fell." "Why?" "ice" "fun" "tea"
    python -m experiments.predict runs/sst2 --file rows.jsonl --json
    python -m experiments.predict runs/sst2 --file mine.csv --columns sentence=review
    python -m experiments.predict runs/fusion-rte "It rains." "It is wet." --picture weights.png

Texts are given in the order of the task's columns, choices at the end.

--file reads what training reads, .jsonl, .json, .csv, .tsv or .parquet, with the columns of the
task's training data; the label may be missing, or hidden (-1). --json prints one object a line:
label, probability, all probabilities, and whether the text was longer than in training and
therefore cut; of a file also the number of the row, and as "input" the row with all of its columns.
--picture draws the fusion weights of every token."""

import contextlib
import json
import sys
from pathlib import Path

from experiments.fusion_weights import heat_maps, title_of
from experiments.load_run import COLUMNS, load_run, make_parser
from experiments.report import save_figure
from formats.files import error_prefix
from formats.rows import LISTS, read_rows
from runtime.command import import_modules, run_command


def parse(argv):
    parser = make_parser("predict", __doc__)
    add = parser.add_argument
    add("run", metavar="RUN", help="directory of a finished run")
    add("texts", nargs="*", metavar="TEXT", help="of one input, in the order of the columns")
    add("--file", help="a file that training can read")
    add("--columns", **COLUMNS)
    add("--json", action="store_true", help="one JSON object a line")
    add("--picture", metavar="FILE.png", help="of a fusion's weights")
    args = parser.parse_intermixed_args(argv)
    import_modules(args.imports)
    if bool(args.file) == bool(args.texts):
        raise ValueError("give either texts, or --file")
    if args.picture and args.file:
        raise ValueError("--picture draws a single input: give its texts in place of --file")
    if args.columns and not args.file:
        raise ValueError("--columns goes with --file")
    return args


def line_of_text(answer, candidate):
    """The answer, but for all of its probabilities, and the beginning of the text, for people."""
    shown = [value for value in answer.values() if not isinstance(value, (dict, bool))]
    shown = [f"{value:.3f}" if isinstance(value, float) else str(value) for value in shown]
    text = " ".join(" | ".join(filter(None, candidate)).split())
    return "\t".join([*(" ".join(value.split()) for value in shown), f"{text:.100}"])


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
    task, last, texts = run.task, len(run.task.columns) - 1, args.texts
    if args.file:
        run.source.column_names = args.columns or run.source.column_names
        inputs = read_rows(args.file)
    elif task.columns[last] in LISTS:  # all texts that are left are choices
        inputs = [[*texts[:last], texts[last:]]]
    else:
        inputs = [texts]
    with error_prefix(args.file) if args.file else contextlib.nullcontext():
        candidates, examples = run.candidates(inputs), run.encode(inputs)
    for i, answer in enumerate(run.predict(examples)):
        best = task.labels.index(answer["label"]) if task.is_multiple_choice else 0
        if args.json:
            of_file = {"row": i + 1, "input": inputs[i]} if args.file else {}
            print(json.dumps({**of_file, **answer}, default=str))  # str() of a date
        else:
            print(line_of_text(answer, candidates[i][best]))
        if args.picture:
            draw(run, run.fusion_weights(examples)[best], args.picture)
            print(args.picture, file=sys.stderr)
    cut = sum(example.is_cut for example in examples)
    if cut and not args.json:
        length = run.record["tasks"][task.name]["max_length"]
        print(f"note: {cut} of {len(inputs)} inputs were cut to {length} tokens", file=sys.stderr)


if __name__ == "__main__":
    run_command("predict.py", main)
