"""How good is a finished run: on any split, with other data.

    python -m experiments.evaluate runs/rte
    python -m experiments.evaluate runs/rte --split test --data-dir elsewhere
    python -m experiments.evaluate runs/rte --file mine.csv --columns sentence1=premise label=gold
    python -m experiments.evaluate runs/multitask --task rte

Prints the task's scores, and of each class precision, recall and as which classes its examples were
predicted; the last line is one JSON object, with the classes if they are no more than 50. What is
not given is as it was in the run's training. On the development set of the training it says where
the result is no longer what metrics.json has. It writes nothing."""

from collections import Counter, defaultdict
from dataclasses import replace

import train
from data import load_split
from experiments.load_run import COLUMNS, load_run, make_parser
from experiments.report import markdown
from formats.files import read_json
from runtime import command, record

MANY = 50  # classes: a line that lists more cannot be read


def by_class(names, labels, predictions):
    """{label: its precision and recall (None without any example), the number of its examples, and
    {label that was predicted: how often}, the most frequent first}"""
    confusion, predicted, classes = defaultdict(Counter), Counter(predictions.tolist()), {}
    for label, prediction in zip(labels.tolist(), predictions.tolist(), strict=True):
        confusion[label][names[prediction]] += 1
    for k, name in enumerate(names):
        right, count = confusion[k][name], confusion[k].total()
        precision = right / predicted[k] if predicted[k] else None
        classes[name] = {"precision": precision, "recall": right / count if count else None}
        classes[name] |= {"count": count, "confusion": dict(confusion[k].most_common())}
    return classes


def class_table(classes):
    """In the last column a label is its index; there are the 20 that were predicted most often."""
    index, rows = {name: i for i, name in enumerate(classes)}, []
    for name, of in classes.items():
        found = [f"{count} as {index[other]}" for other, count in of["confusion"].items()]
        text = ", ".join(found[:20] + ["…"] * (len(found) > 20))
        rows.append([f"{index[name]} {name}", of["precision"], of["recall"], of["count"], text])
    return markdown(rows, ["label", "precision", "recall", "count", "predicted"])


def differences(run, scores):
    """Where {score: value} and metrics.json differ: "accuracy 1.0000, now 0.2000", or "" if not."""
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
    parser.add_argument("--split", help=split)
    parser.add_argument("--data-dir", help="directory with TASK/SPLIT.jsonl")
    parser.add_argument("--file", help="with labels, in place of a split")
    parser.add_argument("--columns", **COLUMNS)
    args = parser.parse_args(argv)
    if args.file and (args.split or args.data_dir):
        raise ValueError("--file is in place of --split and --data-dir")
    args.split = args.split or (None if args.file else "validation")
    command.import_modules(args.imports)
    run = load_run(args.run, args.device, args.model, args.task)
    task = run.task
    run.use_columns(args.columns)
    if args.file:
        source = replace(run.source, files={"file": args.file})
        examples = load_split(task, source, "file", run.tokenizer)
    else:
        examples = run.split(args.split, args.data_dir)
    labels, predictions, loss = train.predict(run.model, task, examples, run.args)
    scores = {name: score(labels, predictions) for name, score in task.scores.items()}
    result = {"stage": "eval", "run": args.run, "task": task.name, "split": args.split}
    result["data_dir"] = None if args.file else args.data_dir or run.source.data_dir
    result |= {"file": args.file, "examples": len(labels), **scores, "loss": loss}
    titles = {"f1": f"f1 of {task.labels[-1]!r}"}  # of class 1 of two, see runtime/scores.py
    shown = ", ".join(f"{titles.get(name, name)} {value:.4f}" for name, value in scores.items())
    print(f"{args.run}, {task.name} {args.file or args.split}: {len(labels)} examples, {shown}")
    if args.split == "validation" and not run.is_own("validation", examples):
        print("note: these are not the development examples of the training")
    elif args.split == "validation" and (found := differences(run, {**scores, "loss": loss})):
        since = f"has changed since (commit {run.record['machine']['commit']})"
        why = f"the code, a library, or a value that is not saved {since}"
        print(f"note: metrics.json has {found}: {why}")
    # the first and the second choice are no classes, nor are numbers
    if len(task.labels) > 1 and not task.is_multiple_choice:
        classes = by_class(task.labels, labels, predictions)
        print(f"\n{class_table(classes)}")
        result |= {"classes": classes} if len(classes) <= MANY else {}
    return result


if __name__ == "__main__":
    command.run_command("evaluate.py", main)
