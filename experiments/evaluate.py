"""How good is a finished run: on any split, with other data.

    python -m experiments.evaluate runs/rte
    python -m experiments.evaluate runs/rte --split test --data-dir elsewhere
    python -m experiments.evaluate runs/multitask --task rte

Prints the task's scores, and of each class precision, recall and its row of the confusion matrix;
the last line is one JSON object. What is not given is as it was in the run's training. It writes
nothing.
"""

from dataclasses import dataclass

import torch

import train
from experiments.load_run import Reading, as_trained, load_run
from experiments.report import table
from runtime.command import run_command
from runtime.settings import COUNT, option, parse, same_option

MOST_CLASSES = 12  # with their confusions in the table; the closing line has all


@dataclass(frozen=True)
class Options(Reading):
    split: str = option("validation", "DATA_DIR/TASK/SPLIT.jsonl, or the hub's split of that name")
    data_dir: str | None = option(None, "directory with TASK/SPLIT.jsonl")
    batch_size: int | None = option(None, "examples at once", valid=COUNT)
    dtype: str | None = same_option(train.Settings, "dtype", group=None, default=None)


def by_class(names, labels, predictions):
    """{label: its precision and recall (None without any example), the number of its examples, and
    as which label, in the order of all, how many of them were predicted}"""
    K, classes = len(names), {}
    confusion = torch.bincount(labels * K + predictions, minlength=K * K).view(K, K)
    predicted, rows = confusion.sum(0).tolist(), confusion.tolist()
    for k, name in enumerate(names):
        right, count = rows[k][k], sum(rows[k])
        classes[name] = {
            "precision": right / predicted[k] if predicted[k] else None,
            "recall": right / count if count else None,
            "count": count,
            "confusion": rows[k],
        }
    return classes


def class_table(classes):
    """Lines of a table: columns of the confusion matrix have the number of the label that was
    predicted."""
    rows, few = [], len(classes) <= MOST_CLASSES
    for i, (name, found) in enumerate(classes.items(), 1):
        scores = found["precision"], found["recall"], found["count"]
        name = " ".join(name.split())
        rows.append([f"{i} {name:.30}", *scores, *found["confusion"] * few])
    numbers = [f"as {i}" for i in range(1, len(rows) + 1)] * few
    return table(rows, ["label", "precision", "recall", "count", *numbers])


def main(argv=None):
    options = parse(Options, argv, "python -m experiments.evaluate", __doc__)
    run = load_run(options.run, "cpu", options.model, options.task)
    settings = run.record.options
    task, examples = run.task, run.split(options.split, options.data_dir)
    model, size = as_trained(run, options.device, options.dtype), run.eval_batch_size
    labels, predictions, loss = train.predictions(model, task, examples, options.batch_size or size)
    scores = {name: score(labels, predictions) for name, score in task.scores.items()}
    result = {
        "stage": "eval",
        "run": str(options.run),
        "task": task.name,
        "split": options.split,
        "data_dir": options.data_dir or settings["data_dir"],
        "examples": len(labels),
        **scores,
        "loss": loss,
    }
    shown = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
    print(f"{options.run}, {task.name} {options.split}: {len(labels)} examples, {shown}")
    # the first and the second choice are no classes, nor are numbers
    if task.type.dtype == torch.long and not task.is_multiple_choice:
        result["classes"] = by_class(task.labels, labels, predictions)
        print("", *class_table(result["classes"]), "", sep="\n")
    return result


if __name__ == "__main__":
    run_command("evaluate.py", main)
