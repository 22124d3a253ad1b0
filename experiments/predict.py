"""What does a finished run say about your text?

    python -m experiments.predict runs/fusion-rte "It rains." "It is wet." --picture weights.png
    python -m experiments.predict runs/social_i_qa "Kai fell." "Why?" "ice" "fun" "tea"
    python -m experiments.predict runs/sst2 --file mine.csv --columns sentence=review --json

Texts are given in the order of the task's columns, choices at the end. --file reads what training
reads; the label may be missing, or hidden (-1). --json also has the input's number, from 1, all
probabilities, and whether the text was longer than in training, and cut."""

import contextlib
import json
import math
import sys
import textwrap
from pathlib import Path

from tqdm import tqdm

from data import encode
from experiments.load_run import load_run, make_parser
from formats.files import error_prefix
from formats.rows import LISTS, read_rows
from runtime.command import run_command

WINDOW = 1000  # inputs that are computed before their answers are printed


def line_of_text(answer, candidate):
    """For people: the answer, with one probability, and the beginning of the text."""
    shown = [value for value in answer.values() if not isinstance(value, (dict, bool))]
    shown = [f"{value:.3f}" if isinstance(value, float) else str(value) for value in shown]
    text = " | ".join(filter(None, candidate))
    return "\t".join([*shown, textwrap.shorten(text, 100, placeholder=" …")])


def draw(run, found, path):
    """Draws what `run.fusion_weights` found, a panel for each layer; in the last, [CLS] alone."""
    from experiments.fusion_weights import heat_maps, title_of  # pandas takes most of a second
    from experiments.report import save_figure

    panels = {}
    for layer in range(len(run.bert.layers)):
        for location, weights in found["weights"].items():
            if weights[layer] is not None:
                panels[title_of(layer + 1, location)] = s = weights[layer].T.clone()  # [N, T]
                s[:, 1 if layer == len(weights) - 1 else len(s.T) :] = math.nan
    save_figure(heat_maps(panels, run.adapters, found["tokens"]), Path(path))


def main(argv=None):
    parser = make_parser("predict", __doc__)
    add = parser.add_argument
    add("run", metavar="RUN", help="directory of a finished run")
    add("texts", nargs="*", metavar="TEXT", help="of one input, in the order of the columns")
    add("--file", help="a file that training can read")
    add("--json", action="store_true", help="one JSON object a line")
    add("--picture", metavar="FILE.png", help="of a fusion's weights")
    args = parser.parse_intermixed_args(argv)
    if bool(args.file) == bool(args.texts):
        raise ValueError("give either texts, or --file")
    if args.picture and args.file:
        raise ValueError("--picture draws a single input: give its texts in place of --file")
    with contextlib.redirect_stdout(sys.stderr):  # notes; stdout is for predictions
        run = load_run(args.run, args.device, args.model, args.task, args.columns)
        inputs = read_rows(args.file) if args.file else [args.texts]
    task, last = run.task, len(run.task.columns) - 1
    if args.texts and task.columns[last] in LISTS:  # all texts that are left are choices
        inputs = [[*args.texts[:last], args.texts[last:]]]
    with error_prefix(args.file or "TEXT"):
        of_inputs, cut = run.candidates(inputs), 0  # all are checked before the first is computed
    hides_bar = sys.stdout.isatty() or None  # None: also where stderr is no terminal
    for start in tqdm(range(0, len(inputs), WINDOW), "predicting", leave=False, disable=hides_bar):
        window = of_inputs[start : start + WINDOW]
        examples = encode(run.tokenizer, [(one, None) for one in window], "tokenizing")
        answers = zip(window, run.predict(examples), strict=True)
        for number, (candidates, answer) in enumerate(answers, start + 1):
            best = task.labels.index(answer["label"]) if task.is_multiple_choice else 0
            if args.picture:
                draw(run, run.fusion_weights(examples)[best], args.picture)
                print(f"the weights of each token are drawn in {args.picture}", file=sys.stderr)
            line = json.dumps({"input": number, **answer}) if args.json else ""
            print(line or line_of_text(answer, candidates[best]))
        sys.stdout.flush()
        cut += sum(example.is_cut for example in examples)
    if cut and not args.json:
        print(f"note: {cut} of {len(inputs)} inputs were cut, see --max-length", file=sys.stderr)


if __name__ == "__main__":
    run_command("predict.py", main)
