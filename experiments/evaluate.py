"""How good is a finished run: on any split, with other data.

    python -m experiments.evaluate runs/rte
    python -m experiments.evaluate runs/rte --split test --data-dir elsewhere
    python -m experiments.evaluate runs/multitask --task rte

Prints the task's scores, and of each class precision, recall and its row of the confusion matrix;
the last line is one JSON object. What is not given is as it was in the run's training. On the
development set of the training it says where the result is no longer what metrics.json has. It
writes nothing.
"""

import torch

import train
from experiments.load_run import load_run, make_parser
from experiments.report import markdown
from formats.files import read_json
from runtime import record
from runtime.command import import_modules, run_command


def by_class(names, labels, predictions):
    """{label: its precision and recall (None without any example), the number of its examples, and
    as which label, in the order of all, how many of them were predicted}"""
    K, classes = len(names), {}
    confusion = torch.bincount(labels * K + predictions, minlength=K * K).view(K, K)
    predicted = confusion.sum(0).tolist()
    for k, (name, row) in enumerate(zip(names, confusion.tolist(), strict=True)):
        precision = row[k] / predicted[k] if predicted[k] else None
        recall = row[k] / sum(row) if sum(row) else None
        classes[name] = {"precision": precision, "recall": recall, "count": sum(row)}
        classes[name]["confusion"] = row
    return classes


def class_table(classes):
    """The last columns have the index of the label that was predicted."""
    rows = [
        [f"{i} {name}", of["precision"], of["recall"], of["count"], *of["confusion"]]
        for i, (name, of) in enumerate(classes.items())
    ]
    predicted = [f"as {i}" for i in range(len(rows))]
    return markdown(rows, ["label", "precision", "recall", "count", *predicted])


def differences(run, scores):
    """In which of {score: value} a run's metrics.json differs: "accuracy 1.0000, now 0.2000", or an
    empty text."""
    metrics, then = read_json(run.directory / "metrics.json"), run.record["machine"]
    before = {"loss": metrics["dev_loss"]} | metrics
    if "accuracies" in metrics:  # of several tasks
        before = {"accuracy": metrics["accuracies"].get(run.task.name)}
    # Less than the four decimals that are shown is rounding. In bf16 that is more, where sums are
    # taken in another order: on another device, or with another number of threads.
    now, names = record.machine(run.bert.device), ("device", "processor", "threads")
    is_elsewhere = any(then[name] != now[name] for name in names)
    rounding = 1e-2 if is_elsewhere and run.args.dtype == "bfloat16" else 1e-4
    before = {name: before[name] for name in scores if before.get(name) is not None}
    found = [n for n, x in before.items() if abs(scores[n] - x) > rounding * max(1, abs(x))]
    old = ", ".join(f"{name} {before[name]:.4f}" for name in found)
    return f"{old}, now {', '.join(f'{scores[name]:.4f}' for name in found)}" if found else ""


def main(argv=None):
    parser = make_parser("evaluate", __doc__)
    parser.add_argument("run", metavar="RUN", help="directory of a finished run")
    split = "DATA_DIR/TASK/SPLIT.jsonl, or the hub's split of that name; default validation"
    parser.add_argument("--split", default="validation", help=split)
    parser.add_argument("--data-dir", help="directory with TASK/SPLIT.jsonl")
    args = parser.parse_args(argv)
    import_modules(args.imports)
    run = load_run(args.run, args.device, args.model, args.task)
    task, examples = run.task, run.split(args.split, args.data_dir)
    labels, predictions, loss = train.predict(run.model, task, examples, run.args)
    scores = {name: score(labels, predictions) for name, score in task.scores.items()}
    result = {
        "stage": "eval",
        "run": args.run,
        "task": task.name,
        "split": args.split,
        "data_dir": args.data_dir or run.args.data_dir,
        "examples": len(labels),
        **scores,
        "loss": loss,
    }
    shown = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
    print(f"{args.run}, {task.name} {args.split}: {len(labels)} examples, {shown}")
    if args.split == "validation" and not run.is_own("validation", examples):
        print("note: these are not the development examples of the training")
    elif args.split == "validation" and (found := differences(run, {**scores, "loss": loss})):
        why = f"the code or a library has changed since (commit {run.record['machine']['commit']})"
        print(f"note: metrics.json has {found}: {why}")
    # the first and the second choice are no classes, nor are numbers
    if len(task.labels) > 1 and not task.is_multiple_choice:
        result["classes"] = by_class(task.labels, labels, predictions)
        print(f"\n{class_table(result['classes'])}")
    return result


if __name__ == "__main__":
    run_command("evaluate.py", main)
