"""How good is a finished run: on any split, with other data.

    python -m experiments.evaluate runs/rte --split test --data-dir elsewhere
    python -m experiments.evaluate runs/rte --file mine.csv --columns sentence1=premise label=gold
    python -m experiments.evaluate runs/multitask --task rte

Prints the task's scores, and how many examples of each class were predicted as which; the last line
is one JSON object. What is not given is as it was in the run's training, whose development set is
the default: there it says where metrics.json has another result."""

from dataclasses import replace

import pandas as pd

import train
from data import load_split
from experiments.load_run import load_run, make_parser
from experiments.report import frame
from formats.files import read_json
from runtime import command, record
from runtime.processes import choose_device, set_deterministic


def differences(run, scores):
    """ "accuracy 1.0, now 0.2": where metrics.json differs, elsewhere by more than rounding."""
    metrics, machine = read_json(run.directory / "metrics.json"), run.record["machine"]
    before = {"loss": metrics["dev_loss"]} | metrics
    if "accuracies" in metrics:  # of several tasks
        before = {"accuracy": metrics["accuracies"].get(run.task.name)}
    here, dtype = record.machine(run.bert.device), run.record["options"]["dtype"]
    is_same = all(machine[name] == here[name] for name in ("device", "processor", "threads"))
    is_same &= run.args.dtype == dtype
    rounding = 0 if is_same else 1e-2 if dtype == "bfloat16" else 1e-4
    found = []
    for name, now in scores.items():
        then = before.get(name, now)
        if abs(now - then) > rounding * max(1, abs(then)):
            found.append(f"{name} {then}, now {now}")
    return ", ".join(found)


def main(argv=None):
    parser = make_parser("evaluate", __doc__)
    add = parser.add_argument
    add("run", metavar="RUN", help="directory of a finished run")
    add("--split", help="DATA_DIR/TASK/SPLIT.jsonl, or the hub's of that name; default validation")
    add("--data-dir", help="directory with TASK/SPLIT.jsonl")
    add("--file", help="with labels, in place of a split")
    args = parser.parse_args(argv)
    if args.file and (args.split or args.data_dir):
        raise ValueError("--file is in place of --split and --data-dir")
    set_deterministic(choose_device(args.device, "auto")[0])  # as in training
    run = load_run(args.run, args.device, args.model, args.task, args.columns)
    task, split = run.task, args.file or args.split or "validation"
    if args.file:
        source = replace(run.source, files={"file": args.file})
        examples = load_split(task, source, "file", run.tokenizer)
    else:
        examples = run.split(split, args.data_dir)
    for name, share in run.shares_trained_on(examples).items() if split != "train" else ():
        print(f"WARNING: {name} was TRAINED on {share:.0%} of these examples, or on equal ones")
    labels, predictions, loss = train.predictions(run.model, task, examples, run.args)
    scores = {name: score(labels, predictions) for name, score in task.scores.items()}
    result = {"stage": "eval", "run": args.run, "task": task.name, "split": split}
    result |= {"examples": len(examples), **scores, "loss": loss}
    titles = {"f1": f"f1 of {task.labels[-1]!r}"}  # of class 1 of two, see data.py
    shown = ", ".join(f"{titles.get(name, name)} {value:.4f}" for name, value in scores.items())
    print(f"{args.run}, {task.name} {split}: {len(examples)} examples, {shown}")
    if split == "validation" and not run.is_own(split, examples):
        print("note: these are not the development examples of the training")
    elif split == "validation" and (found := differences(run, {**scores, "loss": loss})):
        since = f"since (commit {run.record['machine']['commit']})"
        print(f"note: metrics.json has {found}: code, library or an unsaved value changed {since}")
    if "macro_f1" in scores:  # labels are classes, not choices' numbers, or a regression's
        counts = pd.crosstab(labels.numpy(), predictions.numpy())
        counts = counts.rename(lambda k: f"{k} {task.labels[k]}")
        print(f"\nexamples by label (rows) and prediction (columns)\n{frame(counts)}")
    return result


if __name__ == "__main__":
    command.run_command("evaluate.py", main)
