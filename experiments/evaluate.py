"""How good is a finished run: on any split, with other data, without some of its adapters.

    python -m experiments.evaluate runs/rte
    python -m experiments.evaluate runs/rte --split test --data-dir elsewhere
    python -m experiments.evaluate runs/fusion-rte --mask qqp sst2
    python -m experiments.evaluate runs/multitask --task rte

Prints the task's scores, and of each class precision, recall and its row of the confusion matrix;
the last line is one JSON object. What is not given is as it was in the run's training. It writes
nothing.
"""

if __name__ == "__main__":
    from runtime.command import announce

    announce("evaluate.py")

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist

from experiments.load_run import add_encoder, add_import, cast, load_run, load_run_split
from runtime.command import errors_in_one_line
from runtime.options import Parser, check_counts
from runtime.processes import out_of_memory
from runtime.results import eval_batch_size
from train import evaluate
from variants.masking import mask

MOST_CLASSES = 100  # with all of their confusion matrix in the closing line


def arguments(argv=None):
    parser = Parser(
        prog="python -m experiments.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("run", type=Path, help="the directory of a finished run")
    add(
        "--split",
        default="validation",
        help="DATA_DIR/TASK/SPLIT.jsonl, or the hub's split of that name",
    )
    add("--task", help="which of a multi-task run's")
    add(
        "--mask",
        nargs="+",
        default=[],
        metavar="ADAPTER",
        help="without these adapters of a fusion",
    )
    add_encoder(parser)
    add("--data-dir", help="directory with TASK/SPLIT.jsonl")
    add("--max-length", type=int, help="tokens per candidate")
    add("--batch-size", type=int, help="examples at once")
    add("--limit-dev", type=int, help="evaluate on so many examples")
    add(
        "--strict-data",
        action="store_true",
        help="refuse data with other row counts than the paper's",
    )
    add("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"])
    add("--dtype", choices=["auto", "float32", "bfloat16"])
    add_import(parser)
    return parser.parse_args(argv)


def evaluate_run(args):
    """Prints how good the run is, and returns the closing line's dictionary. Raises ValueError and
    OSError for wrong input, FloatingPointError and MemoryError."""
    if dist.is_torchelastic_launched():
        raise ValueError("an evaluation is a single process: start it without torchrun")
    check_counts(args, ["max_length", "batch_size", "limit_dev"])
    started = time.monotonic()
    task, labels, predictions, loss, config = predict_split(args)
    scores = {name: score(labels, predictions) for name, score in task.scores.items()}
    result = {
        "stage": "eval",
        "run": str(args.run),
        "task": task.name,
        "split": args.split,
        "data_dir": args.data_dir or config["data_dir"],
        "masked": args.mask,
        "examples": len(labels),
        **scores,
        "loss": loss,
    }
    shown = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
    right = f"{len(labels)} examples"
    if task.kind.dtype == torch.long:
        right = f"{(labels == predictions).sum().item()} of {right} right"
    print(f"{args.run}, {task.name} {args.split}: {right}, {shown}")
    if args.split == "validation" and config["limit_dev"] and args.limit_dev is None:
        print(
            f"note: at most {config['limit_dev']} examples, as in training; --limit-dev takes "
            "another number"
        )
    # the first and the second choice are no classes, nor are numbers
    if task.kind.dtype == torch.long and not task.choices:
        result |= by_class(task.labels, labels, predictions)
        print("\n".join(["", *table(result), ""]))
    return {**result, "seconds": round(time.monotonic() - started, 2)}


def predict_split(args):
    """(task, labels, predictions, mean loss, the run's configuration)"""
    bert, head, config = load_run(
        args.run, model=args.model, task=args.task, allow_other_encoder=args.allow_other_encoder
    )
    if args.mask:
        mask(bert, args.mask)
    task, examples = load_run_split(
        args.run,
        bert,
        config,
        args.split,
        args.data_dir,
        args.max_length,
        args.limit_dev,
        args.strict_data,
    )
    multiple_choice = head.config["head_type"] == "multiple_choice"
    if (task.choices, len(task.labels)) != (multiple_choice, head.num_outputs):
        raise ValueError(f"{args.run}: its head is not one for {task.name}")
    device, dtype = cast(bert, head, config, args.device, args.dtype)
    size = args.batch_size or eval_batch_size(config["batch_size"], config["grad_accumulation"])
    try:
        labels, predictions, loss = evaluate(bert, head, task, examples, size, dtype)
    except RuntimeError as e:
        if not out_of_memory(e):
            raise
        raise MemoryError(f"{device} ran out of memory: try a --batch-size under {size}") from e
    return task, labels, predictions, loss, config


def by_class(names, labels, predictions):
    """The closing line's fields about classes: their labels, precision and recall (None: of
    nothing) and count of each, and the confusion matrix, a row for each label. Of more than
    MOST_CLASSES only what occurs: {label: values}, {label: {prediction: count}}."""
    K = len(names)
    right = torch.bincount(labels[labels == predictions], minlength=K).tolist()
    predicted = torch.bincount(predictions, minlength=K).tolist()
    counts = torch.bincount(labels, minlength=K).tolist()
    here = range(K) if K <= MOST_CLASSES else [k for k in range(K) if counts[k] or predicted[k]]
    classes = {
        names[k]: {
            "precision": right[k] / predicted[k] if predicted[k] else None,
            "recall": right[k] / counts[k] if counts[k] else None,
            "count": counts[k],
        }
        for k in here
    }
    cells, numbers = torch.unique(labels * K + predictions, return_counts=True)
    if K <= MOST_CLASSES:
        confusion = [[0] * K for _ in names]
        for cell, number in zip(cells.tolist(), numbers.tolist(), strict=True):
            confusion[cell // K][cell % K] = number
    else:
        confusion = {}
        for cell, number in zip(cells.tolist(), numbers.tolist(), strict=True):
            confusion.setdefault(names[cell // K], {})[names[cell % K]] = number
    return {"labels": [names[k] for k in here], "classes": classes, "confusion": confusion}


def table(result, most=12):
    """Lines: a class each, with its row of the confusion matrix where there are not more than
    `most` classes."""
    K, width = len(result["labels"]), len(str(result["examples"])) + 2
    names = [f"{i} {' '.join(label.split()):.30}" for i, label in enumerate(result["labels"], 1)]
    left, right = max(map(len, names)), max(width, 7)
    header = f"{'label':{left}}  precision  recall{'count':>{right}}"
    title = "  predicted as"
    square = K <= most and isinstance(result["confusion"], list)
    if square:
        header += title + "".join(f"{i:>{width}}" for i in range(1, K + 1))
    yield header
    rows = result["confusion"] if square else [()] * K
    for name, values, row in zip(names, result["classes"].values(), rows, strict=True):
        precision, recall = (
            "-" if values[key] is None else f"{values[key]:.3f}" for key in ("precision", "recall")
        )
        line = f"{name:{left}}  {precision:>9}  {recall:>6}{values['count']:>{right}}"
        if square:
            line += " " * len(title) + "".join(f"{n:>{width}}" for n in row)
        yield line


def main(argv=None):
    with errors_in_one_line("evaluate.py"):
        result = evaluate_run(arguments(argv))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
