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

import time
from dataclasses import dataclass

import torch

import train
from experiments.load_run import Reading, cast, load_run, load_run_split
from experiments.report import table
from runtime.command import run_command
from runtime.results import eval_batch_size
from runtime.settings import COUNT, like, option, parse
from variants.masking import mask

MOST_CLASSES = 12  # in the table; the closing line has all


@dataclass(frozen=True)
class Options(Reading):
    split: str = option("validation", "DATA_DIR/TASK/SPLIT.jsonl, or the hub's split of that name")
    mask: tuple = option((), "without these adapters of a fusion", metavar="ADAPTER")
    data_dir: str | None = option(None, "directory with TASK/SPLIT.jsonl")
    max_length: int | None = option(None, "tokens per candidate", valid=COUNT)
    batch_size: int | None = option(None, "examples at once", valid=COUNT)
    limit_dev: int | None = option(None, "evaluate on this many examples", valid=COUNT)
    strict_data: bool = like(train.Settings, "strict_data", group=None)
    device: str = like(train.Settings, "device", group=None)
    dtype: str | None = like(train.Settings, "dtype", group=None, default=None)


def evaluate_split(options):
    """(task, labels, predictions, mean loss, the run's configuration)"""
    run, allow = options.run, options.allow_other_encoder
    bert, head, config = load_run(
        run, model=options.model, task=options.task, allow_other_encoder=allow
    )
    if options.mask:
        mask(bert, options.mask)
    split = options.split, options.data_dir, options.max_length, options.limit_dev
    task, examples = load_run_split(run, bert, config, *split, options.strict_data)
    _, dtype = cast(bert, head, config, options.device, options.dtype)
    size = options.batch_size or eval_batch_size(config["batch_size"], config["grad_accumulation"])
    return task, *train.evaluate(bert, head, task, examples, size, dtype), config


def by_class(names, labels, predictions):
    """The closing line's fields about classes: labels; precision and recall (None without any
    example) and count of each class; and the confusion matrix, a row for each label."""
    K = len(names)
    confusion = torch.bincount(labels * K + predictions, minlength=K * K).view(K, K)
    classes = {}
    sums = confusion.diagonal(), confusion.sum(0), confusion.sum(1)
    for name, right, predicted, count in zip(names, *(n.tolist() for n in sums), strict=True):
        classes[name] = {
            "precision": right / predicted if predicted else None,
            "recall": right / count if count else None,
            "count": count,
        }
    return {"labels": [*names], "classes": classes, "confusion": confusion.tolist()}


def class_table(result):
    """(rows, header): for each class its scores and, unless there are many, its row of the
    confusion matrix, under the number of the class that was predicted."""
    few, rows = len(result["labels"]) <= MOST_CLASSES, []
    for i, label in enumerate(result["labels"]):
        values = result["classes"][label]
        scores = [values["precision"], values["recall"]]
        scores = ["-" if value is None else f"{value:.3f}" for value in scores]
        name = f"{i + 1} {' '.join(label.split()):.30}"
        rows.append([name, *scores, values["count"], *result["confusion"][i] * few])
    numbers = [f"as {i}" for i in range(1, len(rows) + 1)]
    return rows, ["label", "precision", "recall", "count", *numbers * few]


def main(argv=None):
    options = parse(Options, argv, "python -m experiments.evaluate", __doc__)
    started = time.monotonic()
    task, labels, predictions, loss, config = evaluate_split(options)
    scores = {name: score(labels, predictions) for name, score in task.scores.items()}
    result = {
        "stage": "eval",
        "run": str(options.run),
        "task": task.name,
        "split": options.split,
        "data_dir": options.data_dir or config["data_dir"],
        "masked": list(options.mask),
        "examples": len(labels),
        **scores,
        "loss": loss,
    }
    right = f"{len(labels)} examples"
    if task.kind.dtype == torch.long:
        right = f"{(labels == predictions).sum().item()} of {right} right"
    shown = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
    print(f"{options.run}, {task.name} {options.split}: {right}, {shown}")
    if options.split == "validation" and config["limit_dev"] and options.limit_dev is None:
        limit = config["limit_dev"]
        print(f"note: at most {limit} examples, as in training; --limit-dev takes another number")
    # the first and the second choice are no classes, nor are numbers
    if task.kind.dtype == torch.long and not task.choices:
        result |= by_class(task.labels, labels, predictions)
        print("", *table(*class_table(result)), "", sep="\n")
    return {**result, "seconds": round(time.monotonic() - started, 2)}


if __name__ == "__main__":
    run_command("evaluate.py", main)
