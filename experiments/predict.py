"""What does a finished run say about your text, and which of its adapters were used?

    python -m experiments.predict runs/rte "It rains." "It is wet."
    python -m experiments.predict runs/social_i_qa "Kai fell." "Why?" --choices "ice" "fun" "tea"
    python -m experiments.predict runs/sst2 --file rows.jsonl --json    # or - for stdin
    python -m experiments.predict runs/rte --file test.jsonl --out RTE.tsv    # a GLUE submission
    python -m experiments.predict runs/fusion-rte "It rains." "It is wet." --mask qqp sst2
    python -m experiments.predict runs/fusion-rte "It rains." "It is wet." --explain page.html

Texts are given in the order of the task's columns. --mask leaves adapters of a fusion out.

A file is what training reads, .jsonl, .json, .csv, .tsv or .parquet, and has the columns of the
task's training data; the label may be missing, or hidden (-1). On stdin a line is a JSON object, or
texts with tabs between. --json prints one object a line: label, probability, all probabilities, and
whether the text was longer than in training and therefore cut.

--explain, for fusion runs: the weights of every adapter for every token at every layer, as a table
on the terminal (the strongest adapter's letter and its weight in %), and as one HTML page with a
slider over the layers. The page needs nothing but itself; page.html#layer=3 opens at layer 3.
"""

if __name__ == "__main__":
    from runtime.command import announce

    announce("predict.py", stdout_is_data=True)

import contextlib
import csv
import json
import signal
import sys
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from string import ascii_letters

import numpy as np
import torch

from data import (
    TASKS,
    Classification,
    MultipleChoice,
    Task,
    collate,
    length_bucketed_batches,
    own_choices,
    to_candidates,
)
from experiments.load_run import add_encoder, add_import, load_run, task_kind
from formats.rows import READERS, read_rows
from formats.tokenizer import load_tokenizer
from fusion import fusion_weights
from runtime.command import errors_in_one_line
from runtime.options import Parser
from runtime.processes import choose_device
from train import predict
from variants.masking import mask

BATCH_SIZE = 64
WINDOW = 50 * BATCH_SIZE  # inputs that are tokenised and sorted by length together
MOST_EXPLAINED = 50  # a page with more inputs would be of megabytes

# --------------------------------------------------------------------------------------------------
# Input: texts -> row (column -> value) -> candidate pairs, as in training


def as_row(config, choices, texts, options):
    """Texts and, for multiple choice, options -> a row in the task's columns. Raises ValueError for
    a wrong number."""
    name, K = config["task"], len(config["labels"])
    if not choices and options:
        raise ValueError(f"{name} is not multiple choice: it takes no choices")
    if choices and len(options) != K:
        raise ValueError(f"{name} has {K} choices, {len(options)} were given")
    if name in TASKS:
        columns = TASKS[name].columns
        if columns[-1] in ("endings", "choices"):  # one column holds all of them
            options = [{"text": options} if name == "commonsense_qa" else options]
        wanted = columns[: len(columns) - len(options)]
    else:
        usual = ["text_a", "choices"] if choices else ["text_a", "text_b"][: len(texts)]
        columns = config["columns"].get(name, usual)
        wanted = [column for column in columns if column != "choices"]
        options = [options] if choices else []
    if len(texts) + len(options) != len(columns):
        given = "1 text was given" if len(texts) == 1 else f"{len(texts)} texts were given"
        takes = " and ".join([*wanted, "choices"] if choices else wanted)
        raise ValueError(f"{name} takes {takes}: {given}")
    return dict(zip(columns, [*texts, *options], strict=True))


def as_candidates(config, choices, row):
    """A row -> [(text_a, text_b or None)], checked as in training. Raises ValueError for a column
    that is missing or wrong."""
    named = {
        ours: row[name] for ours, name in config.get("column_names", {}).items() if name in row
    }
    row = {**row, **named}
    if config["task"] in TASKS:
        task = TASKS[config["task"]]
        row = {task.aliases.get(column, column): value for column, value in row.items()}
    else:
        given = [column for column in ("text_a", "text_b") if row.get(column) is not None]
        usual = [*given, "choices"] if choices else given
        columns = config["columns"].get(config["task"], usual)
        if more := [column for column in given if column not in columns]:
            raise ValueError(
                f"column {more[0]!r} is one that {config['task']} did not have in training"
            )
        if choices and not isinstance(row.get("choices"), (list, str, type(None))):
            raise ValueError(
                f"column 'choices' holds {type(row['choices']).__name__}, expected a list"
            )
        task = Task(None, None, tuple(columns), (), ())
        if choices:
            task = replace(task, candidates=own_choices, kind=MultipleChoice)
    for column in ("endings", "choices"):
        if column in task.columns and isinstance(row.get(column), str):
            raise ValueError(f"column {column!r} holds a text, expected a list")
    # a label is asked for: that of a class will do
    kind, labels = MultipleChoice if choices else Classification, tuple(config["labels"])
    task = replace(task, labels=labels, kind=kind)
    candidates, _ = to_candidates(task, {**row, task.label: labels[0]})
    for text in (text for pair in candidates for text in pair if text is not None):
        # raises ValueError for half a character, which JSON and the command line can smuggle in
        text.encode()
    return candidates


def read_inputs(path, config, choices):
    """[(line number, candidates, row)] of a file, or of stdin ("-"); empty lines are passed over.
    Raises OSError, or ValueError that names the line."""
    name = "stdin" if path == "-" else path
    if path != "-" and Path(path).suffix not in READERS:
        endings = ", ".join(READERS)
        raise ValueError(f"--file {path}: only {endings} are read, and - for stdin")
    if path != "-" and Path(path).suffix in (".json", ".csv", ".parquet"):
        return read_table(Path(path), config, choices)
    content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    try:
        # not splitlines, which would also split at characters inside a text
        lines = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as e:
        line = content[: e.start].count(b"\n") + 1
        raise ValueError(f"{name}, line {line}: not UTF-8 text") from e
    lines = [(i, line.rstrip("\r")) for i, line in enumerate(lines, 1) if line.strip()]
    if not lines:
        raise ValueError(f"{name} is empty")
    as_json = lines[0][1].lstrip().startswith("{") if path == "-" else Path(path).suffix == ".jsonl"
    header = lines.pop(0)[1].split("\t") if not as_json and path != "-" else None
    if not lines:
        raise ValueError(f"{name} has no line after the one that names the columns")
    rows = []
    for i, line in lines:
        try:
            fields = line.split("\t")
            if as_json:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("not a JSON object")
            elif header is None:
                texts = max(0, len(fields) - len(config["labels"])) if choices else len(fields)
                row = as_row(config, choices, fields[:texts], fields[texts:])
            else:
                if len(fields) != len(header):
                    raise ValueError(f"{len(fields)} fields, the first line has {len(header)}")
                row = dict(zip(header, fields, strict=True))
            rows.append((i, as_candidates(config, choices, row), row))
        except json.JSONDecodeError as e:
            raise ValueError(f"{name}, line {i}: broken JSON: {e.msg} at column {e.colno}") from e
        except (ValueError, RecursionError) as e:
            raise ValueError(f"{name}, line {i}: {e}") from e
    return rows


def read_table(path, config, choices):
    """The same of a file that training reads as a whole."""
    if not path.is_file():
        raise FileNotFoundError(f"--file {path}: there is no such file")
    rows = []
    for line, row in read_rows(path):
        try:
            rows.append((line, as_candidates(config, choices, row), row))
        except ValueError as e:
            raise ValueError(f"{path}, line {line}: {e}") from e
    return rows


# --------------------------------------------------------------------------------------------------
# Output

# GLUE's server takes 0 and 1 for these tasks, and the names of the classes for the others
GLUE_NUMBERS = ("sst2", "mrpc", "qqp")


def write_submission(path, rows, answers):
    """GLUE's file: of every input its index, the row's own `idx` where it has one, and the
    answer."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(["index", "prediction"])
        for i, ((_, _, row), value) in enumerate(zip(rows, answers, strict=True)):
            writer.writerow([row.get("idx", row.get("index", i)), value])


@torch.inference_mode()
def predictions(bert, head, tokenizer, inputs, kind):
    """(probabilities, encodings of the candidates) of every input, a list of candidates, in their
    order; a number in place of the probabilities where the kind of task predicts one. Batches hold
    inputs of similar length."""
    for start in range(0, len(inputs), WINDOW):
        window = inputs[start : start + WINDOW]
        encoded = iter(
            tokenizer.encode_batch(
                [a if b is None else (a, b) for pairs in window for a, b in pairs]
            )
        )
        encodings = [[next(encoded) for _ in pairs] for pairs in window]
        probabilities = [None] * len(window)
        lengths = np.array([max(len(encoding.ids) for encoding in group) for group in encodings])
        for indices in length_bucketed_batches(lengths, BATCH_SIZE):
            logits = predict(
                bert, head, as_batch(bert, [encodings[i] for i in indices]), torch.float32
            )
            if not logits.isfinite().all():
                raise FloatingPointError("the model's outputs are not finite")
            found = logits.softmax(-1) if kind.dtype == torch.long else kind.predict(logits)
            for i, values in zip(indices, found.tolist(), strict=True):
                probabilities[i] = values
        yield from zip(probabilities, encodings, strict=True)


def as_batch(bert, encodings):
    rows = {
        "input_ids": [[encoding.ids for encoding in group] for group in encodings],
        "token_type_ids": [[encoding.type_ids for encoding in group] for group in encodings],
        "label": [0] * len(encodings),
    }
    return collate(rows, bert.config.pad_token_id)


@torch.inference_mode()
def weights_of(bert, tokenizer, encodings):
    """Of one input's candidates: [{"tokens": T texts, "weights": {location: for every layer [T, N],
    or None without fusion}}]"""
    batch = as_batch(bert, [encodings])
    names = ("input_ids", "token_type_ids", "attention_mask")
    bert(*(batch[name].to(bert.device) for name in names))
    s = {slot: weights.cpu() for slot, weights in fusion_weights(bert).items()}
    layers = range(bert.config.num_hidden_layers)
    locations = sorted({location for _, location in s})
    result = []
    for c, encoding in enumerate(encodings):
        tokens = [tokenizer.decode([id], skip_special_tokens=False) for id in encoding.ids]
        weights = {
            location: [
                s[layer, location][c, : len(tokens)] if (layer, location) in s else None
                for layer in layers
            ]
            for location in locations
        }
        result.append({"tokens": tokens, "weights": weights})
    return result


def shown(text, width=100):
    """A text on one line of a terminal, of which no character is a command to it."""
    text = "".join(character if character.isprintable() else " " for character in text).strip()
    return text if len(text) <= width else text[: width - 1] + "…"


def tables(candidates, names, letters):
    """Lines: for every token, the strongest adapter at every layer and its weight in %."""
    yield "  ".join(
        f"{letter} = {shown(name)}" for letter, name in zip(letters, names, strict=True)
    )
    for candidate in candidates:
        if len(candidates) > 1:
            yield shown(candidate["text"])
        for location, layers in candidate["weights"].items():
            title = f"{location}, layer" if len(candidate["weights"]) > 1 else "layer"
            yield f"{title:>16}" + "".join(f"{i:>6}" for i in range(1, len(layers) + 1))
            for t, token in enumerate([*candidate["tokens"], "(mean)"]):
                line = f"{shown(token, 16):>16}"
                for weights in layers:
                    if weights is None:
                        line += f"{'-':>6}"
                        continue
                    s = weights.mean(0) if t == len(weights) else weights[t]
                    line += f" {letters[s.argmax()]}{100 * s.max():4.0f}"
                yield line


# Okabe and Ito's colours, which most kinds of colour vision tell apart; more adapters get hues at
# the golden angle
COLOURS = ["#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#999999"]

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
      content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>Which adapter spoke?</title>
<style>
  body { font: 16px/1.5 system-ui, sans-serif; color: #111; background: #fff;
         max-width: 72rem; margin: 1rem auto; padding: 0 1rem }
  h1 { font-size: 1.3rem } h2 { font-size: 1rem; margin-bottom: .3rem }
  h3 { font-size: .9rem; margin: .3rem 0 }
  .controls { position: sticky; top: 0; background: #fff; padding: .6rem 0;
              border-bottom: 1px solid #bbb }
  .controls span { white-space: nowrap } .controls select { max-width: min(24rem, 80vw) }
  .controls input { width: min(24rem, 50vw); vertical-align: middle }
  .tokens { display: flex; flex-wrap: wrap; gap: .25rem }
  .token { font: inherit; color: #111; border: 1px solid #777; border-radius: .25rem;
           padding: 0 .35rem; text-align: center }
  .token span { display: block; white-space: pre; font-family: ui-monospace, monospace }
  .token small { display: block; font-size: .75rem }
  .token:hover, .token:focus { outline: 3px solid #111 }
  table { border-collapse: collapse }
  th, td { padding: .1rem .5rem; text-align: left; font-weight: normal }
  th { border: 1px solid #777; text-align: center } td:nth-child(3) { width: 16rem }
  .bar { height: .9rem; outline: 1px solid #777 }
</style>
</head>
<body>
<h1 id="title"></h1>
<div class="controls">
  <label id="chooser" hidden>input <select id="example"></select></label>
  <span>
    <label for="layer">layer</label>
    <input id="layer" type="range" min="1" step="1" value="1">
    <output id="shown" for="layer"></output>
  </span>
</div>
<p id="prediction"></p>
<main id="inputs"></main>
<h2 id="heading"></h2>
<table aria-labelledby="heading"><tbody id="legend"></tbody></table>
<p>A token has the colour and the letter of its strongest adapter; the number is that adapter's
weight in %, and the deeper the colour, the larger. Point at a token, or move to it with Tab, for
all its weights.</p>
<noscript>This page needs JavaScript. It loads nothing.</noscript>
<script type="application/json" id="data">DATA</script>
<script>
"use strict";
const get = (id) => document.getElementById(id);
const data = JSON.parse(get("data").textContent);

// text reaches the page through textContent and attributes only, so none of it is ever markup
function make(tag, parent, text = "", name = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  element.className = name;
  parent.append(element);
  return element;
}

const rows = data.adapters.map((adapter) => {
  const row = make("tr", get("legend"));
  const letter = make("th", row, adapter.letter);
  letter.scope = "row";
  letter.style.background = `color-mix(in srgb, ${adapter.colour} 75%, white)`;
  make("td", row, adapter.name);
  const bar = make("div", make("td", row), "", "bar");
  bar.style.background = adapter.colour;
  return { bar, value: make("td", row) };
});

function legend(heading, weights) {
  get("heading").textContent = heading;
  rows.forEach(({ bar, value }, n) => {
    bar.style.width = `${100 * weights[n]}%`;
    value.textContent = weights[n].toFixed(3);
  });
}

function show() {
  const layer = get("layer").valueAsNumber, example = data.examples[get("example").value];
  get("shown").textContent = `${layer} of ${data.layers}`;
  get("prediction").textContent = `${example.label}, probability ${example.probability.toFixed(3)}`
    + (example.truncated ? `; cut to ${data.max_length} tokens, as in training` : "");
  get("inputs").replaceChildren();
  const all = [];  // weights of every token shown
  const mean = () => legend(`Mean over the tokens, layer ${layer}`,
    data.adapters.map((_, n) => all.reduce((sum, s) => sum + s[n], 0) / Math.max(1, all.length)));
  for (const candidate of example.candidates) {
    make("h2", get("inputs"), candidate.text);
    for (const [where, layers] of Object.entries(candidate.weights)) {
      if (Object.keys(candidate.weights).length > 1) {
        make("h3", get("inputs"), `after the ${where} sub-layer`);
      }
      if (!layers[layer - 1]) {
        make("p", get("inputs"), "no adapters in this layer");
        continue;
      }
      const line = make("div", get("inputs"), "", "tokens");
      layers[layer - 1].forEach((s, t) => {
        const best = s.indexOf(Math.max(...s)), { letter, colour } = data.adapters[best];
        const token = make("button", line, "", "token");
        make("span", token, candidate.tokens[t]);
        make("small", token, `${letter} ${Math.round(100 * s[best])}`);
        const share = Math.round(75 * s[best]);
        token.style.background = `color-mix(in srgb, ${colour} ${share}%, white)`;
        token.title = data.adapters.map(({ name }, n) => `${name} ${s[n].toFixed(3)}`).join("\\n");
        token.onmouseenter = token.onfocus =
          () => legend(`${candidate.tokens[t]}, layer ${layer}`, s);
        token.onmouseleave = token.onblur = mean;
        all.push(s);
      });
    }
  }
  mean();
}

function follow() {  // page.html#layer=3&example=2
  const asked = new URLSearchParams(location.hash.slice(1));
  get("layer").value = asked.get("layer") || 1;  // the browser keeps it within the slider's range
  const example = Math.max(1, asked.get("example") || 1);
  get("example").value = Math.min(example, data.examples.length) - 1 || 0;
  show();
}

document.title = `${data.run}: which adapter spoke?`;
get("title").textContent = document.title;
get("layer").max = data.layers;
get("chooser").hidden = data.examples.length === 1;
data.examples.forEach(({ candidates }, i) => {
  make("option", get("example"), `${i + 1}: ${candidates[0].text}`).value = i;
});
get("layer").addEventListener("input", show);
get("example").addEventListener("input", show);
window.addEventListener("hashchange", follow);
follow();
</script>
</body>
</html>
"""


def page(run, config, layers, examples, letters):
    """The HTML page. All data in it are one JSON value, in which no < is left to end its script
    tag."""
    names = config["adapters"]
    colours = [*COLOURS, *(f"hsl({137.5 * n % 360} 70% 50%)" for n in range(len(names)))]
    adapters = [
        {"name": name, "letter": letter, "colour": colour}
        for name, letter, colour in zip(names, letters, colours, strict=False)
    ]
    data = {
        "run": run,
        "layers": layers,
        "max_length": config["max_length"],
        "adapters": adapters,
        "examples": examples,
    }
    text = json.dumps(data, default=lambda weights: weights.double().round(decimals=4).tolist())
    return PAGE.replace("DATA", text.replace("<", "\\u003c"))


def joined(pair):
    return " | ".join(text for text in pair if text is not None)


def check(args):
    """Raises ValueError for arguments that make no sense."""
    if args.file is not None and (args.texts or args.choices):
        raise ValueError("give the texts, or --file, but not both")
    if args.file is None and not args.texts and not args.choices:
        raise ValueError("there is no text: give one, or --file")
    if args.explain and (args.explain.is_dir() or not args.explain.parent.is_dir()):
        why = "a directory" if args.explain.is_dir() else "its directory is missing"
        raise ValueError(f"--explain {args.explain}: {why}")
    if args.out and (args.file is None or args.explain or args.json):
        raise ValueError("--out goes with --file alone, without --explain and --json")
    if args.out and (args.out.is_dir() or not args.out.parent.is_dir()):
        why = "a directory" if args.out.is_dir() else "its directory is missing"
        raise ValueError(f"--out {args.out}: {why}")


def answer(args):
    """Prints a line for every input, and writes the page or the submission. Raises ValueError and
    OSError before the first line."""
    if args.texts == ["-"] and args.file is None:
        args.texts, args.file = [], "-"
    check(args)
    device, _ = choose_device(args.device, "float32")
    with contextlib.redirect_stdout(sys.stderr):  # of notes; stdout is the predictions'
        bert, head, config = load_run(
            args.run,
            device,
            model=args.model,
            task=args.task,
            allow_other_encoder=args.allow_other_encoder,
        )
    if args.explain and config["stage"] != "fusion":
        why = f"{args.run} is of --stage {config['stage']}, where no adapters share a token"
        raise ValueError(f"--explain needs a fusion run: {why}")
    if args.mask:
        mask(bert, args.mask)
    choices, kind = head.config["head_type"] == "multiple_choice", task_kind(config, head)
    if args.explain and kind.dtype != torch.long:
        raise ValueError(f"--explain is for tasks with labels, {config['task']} has numbers")
    if args.file is not None:
        rows = read_inputs(args.file, config, choices)
    else:
        row = as_row(config, choices, args.texts, args.choices)
        rows = [(1, as_candidates(config, choices, row), row)]
    if args.explain and len(rows) > MOST_EXPLAINED:
        raise ValueError(f"--explain takes at most {MOST_EXPLAINED} inputs, there are {len(rows)}")
    tokenizer = load_tokenizer(bert.directory, config["max_length"], bert.config.vocab_size)
    found = predictions(bert, head, tokenizer, [candidates for _, candidates, _ in rows], kind)

    labels = config["labels"]
    letters = list(islice(cycle(ascii_letters), len(config["adapters"])))
    cut, examples, lines, answers = 0, [], [], []
    for (number, candidates, _), (probabilities, encodings) in zip(rows, found, strict=True):
        if kind.dtype != torch.long:
            truncated = any(encoding.overflowing for encoding in encodings)
            cut += truncated
            answers.append(probabilities)
            if args.out:
                continue
            result = {labels[0]: probabilities, "truncated": truncated}
            line = json.dumps({"line": number} | result if args.file else result)
            text = f"{probabilities:.3f}\t{shown(joined(candidates[0]))}"
            print(line if args.json else text)
            continue
        best = int(np.argmax(probabilities))
        result = {
            "label": labels[best],
            "probability": probabilities[best],
            "probabilities": dict(zip(labels, probabilities, strict=True)),
            "truncated": any(encoding.overflowing for encoding in encodings),
        }
        cut += result["truncated"]
        answers.append(best if config["task"] in GLUE_NUMBERS else labels[best])
        if args.out:
            continue
        if args.json:
            line = json.dumps({"line": number} | result if args.file else result)
        else:
            text = joined(candidates[best if choices else 0])
            line = f"{shown(labels[best])}\t{probabilities[best]:.3f}\t{shown(text)}"
        if not args.explain:
            print(line)
            continue
        lines.append(line)  # with a page, lines wait until it is written
        explained = explain(bert, tokenizer, candidates, encodings, labels if choices else None)
        summary = {name: result[name] for name in ("label", "probability", "truncated")}
        examples.append({**summary, "candidates": explained})
        if not args.json:
            lines += tables(explained, config["adapters"], letters)
    if args.explain:
        layers = bert.config.num_hidden_layers
        text = page(args.run.resolve().name, config, layers, examples, letters)
        args.explain.write_text(text, encoding="utf-8")
        if not args.json:
            lines.append(f"{args.explain}: the same as a page")
        print("\n".join(lines))
    if args.out:
        write_submission(args.out, rows, answers)
        print(f"{args.out}: {len(rows)} predictions")
    if cut and not args.json:
        print(
            f"note: {cut} of {len(rows)} inputs were cut to {config['max_length']} tokens, as in "
            "training",
            file=sys.stderr,
        )


def explain(bert, tokenizer, candidates, encodings, choices):
    """[{"text", "tokens", "weights"}] of an input's candidates; choices: their names, or None"""
    result = []
    for i, weights in enumerate(weights_of(bert, tokenizer, encodings)):
        text = joined(candidates[i])
        result.append({"text": f"{choices[i]}: {text}" if choices else text, **weights})
    return result


def main(argv=None):
    parser = Parser(
        prog="python -m experiments.predict",
        description="Predicts with a finished run, and shows which adapters were used.",
    )
    parser.add_argument("run", type=Path, help="any finished run")
    parser.add_argument(
        "texts", nargs="*", help="the input's texts, in the order of the task's columns"
    )
    parser.add_argument(
        "--choices", nargs="+", default=[], help="the options of a multiple-choice task"
    )
    parser.add_argument("--file", help="a file that training reads, or - for stdin")
    parser.add_argument(
        "--out", type=Path, help="write index and prediction of a --file, as GLUE's server takes it"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument(
        "--explain",
        type=Path,
        metavar="PAGE.html",
        help="which adapters were used, by token and layer; fusion runs only",
    )
    parser.add_argument(
        "--mask",
        nargs="+",
        default=[],
        metavar="ADAPTER",
        help="without these adapters of a fusion",
    )
    parser.add_argument("--task", help="which task of a multi-task run")
    add_encoder(parser)
    add_import(parser)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"])
    with errors_in_one_line("predict.py"):
        answer(parser.parse_intermixed_args(argv))  # texts may come after options


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # so that `predict ... | head` ends quietly
    main()
