"""Composition on a laptop, without any hub: two skills, learned apart from each other, and a target
that needs both.

    make demo
    python -m experiments.demo [--out runs/demo]        # the same, in an environment of your own

The encoder is MiniLM-L6, a small BERT from PyPI; the texts are the docstrings of Python's library,
PyTorch and NumPy. An example is a sentence and a name, and may be wrong in two ways: the name is
that of another docstring, and the sentence's words are shuffled.

    match   does the name belong to the sentence?    (Python's library and PyTorch)
    order   are the words in their order?            (Python's library and PyTorch)
    both    which of the four?                       (NumPy, 240 of its 960 training examples)

In either source the other fault is there in half of the examples, and says nothing of the label.
Whoever has one skill alone is right about one of two questions, and has to guess the other.
"""

import json
import os
import random
from pathlib import Path

import torch

from experiments import composition, grid, report
from experiments.fusion_weights import heat_map, mean_weights
from experiments.load_run import load_run
from experiments.skills import build_tasks
from formats.encoder import find_minilm
from formats.rows import read_rows
from runtime.command import Parser, run_command

OPTIONS = {  # by stage
    "adapter": "--lr 1e-3 --epochs 8 --patience 8",
    "head": "--lr 2e-3 --epochs 4 --patience 4",
    "fusion": "--lr 5e-4 --epochs 6 --patience 6",
}
SKILLS = ["match", "order"]
SOURCE_EPOCHS = "2"
SYSTEMS = "own head_on_match head_on_order fusion".split()
COMMON = "--max-length 40 --batch-size 16 --limit-dev 160 --device cpu --dtype float32".split()


def study_of(out):
    """The runs of the demo: experiments.composition, in part."""
    words = ["--model", "minilm", "--data-dir", str(out / "data"), "--out", str(out)]
    words += ["--target", "both", "--sources", *(str(out / "runs" / skill) for skill in SKILLS)]
    words += ["--systems", *SYSTEMS, "--seeds", "0", "1", "2", "--train-examples", "240"]
    words += [f"--{stage}-options={options}" for stage, options in OPTIONS.items()]
    words += ["--jobs", str(min(os.cpu_count(), 8)), "--overwrite", "--", *COMMON]
    return composition.Study(composition.parse(words))


def source_cells(args):
    """The runs on the skills, which come before those of the study."""
    last = ["--seed", "0", "--epochs", SOURCE_EPOCHS]
    return [grid.cell(args, skill, "adapter", ["--task", skill, *last]) for skill in SKILLS]


def ceiling(accuracies):
    """What one skill alone can reach on the target, and both together, in %."""
    match, order = (accuracies[skill] for skill in SKILLS)
    return 50 * max(match, order), 100 * match * order


def weights_by_text(run):
    """{"text_a": the sentence, "text_b": the name: [layers, N]}: the mean fusion weights of their
    tokens on the development set."""
    found = mean_weights(run, run.split(), ("text_a", "text_b"))
    return {text: torch.stack([of[slot] for slot in sorted(of)]) for text, of in found.items()}


def draw(run, path):
    """The weights of `match` by layer, as means over the development set, and of every token of an
    example."""
    rows = read_rows(Path(run.args.data_dir) / "both" / "validation.jsonl")
    given = max(rows, key=lambda row: len(row["text_b"].split()))  # a name of several words
    means, (example,) = weights_by_text(run), run.fusion_weights([given])
    n = run.adapters.index("match")
    of_tokens = torch.stack(example["weights"]["output"])[:, :, n]  # [layers, T]
    of_texts = torch.stack([means["text_a"][:, n], means["text_b"][:, n]], 1)  # [layers, 2]
    layers = [f"layer {i + 1}" for i in range(len(of_tokens))]
    figure, (left, right) = report.subplots(
        1, 2, (11, 3.2), width_ratios=(2, len(example["tokens"]) + 1)
    )
    heat_map(left, of_texts, layers, ["sentence", "name"])
    image = heat_map(right, of_tokens.double(), layers, example["tokens"])
    left.set_title("development set", fontsize=9)
    right.set_title("an example", fontsize=9)
    figure.suptitle("The weight of `match`; the rest is the weight of `order`", fontsize=10)
    figure.colorbar(image, ax=right, label="fusion weight", fraction=0.05)
    report.save_figure(figure, path)
    return means


def verdict(study, rows):
    """What follows from the table, in a sentence."""
    points = composition.points_of(rows)
    least = {n: (points["fusion"] - points[n]).min() for n in points if n != "fusion"}
    nearest = min(least, key=least.get)
    title = study.systems[nearest].title
    if least[nearest] <= 0:
        return f"The fusion is not ahead with every seed: {title} equals or beats it."
    return (
        f"With every seed the fusion is ahead of every control, by {least[nearest]:.1f} points at "
        f"the least ({title})."
    )


def main(argv=None):
    parser = Parser("python -m experiments.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="default runs/demo")
    out = parser.parse_args(argv).out
    find_minilm()  # or an error that says how to install it
    print("reading the docstrings of Python, PyTorch and NumPy", flush=True)
    build_tasks(out / "data", random.Random(0), SKILLS)
    for task in (*SKILLS, "both"):
        path = out / "data" / task / "train.jsonl"
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        print(f"\n{task}: {len(rows)} examples to train on, for instance")
        lines = [[row["text_a"], row["text_b"], row["label"]] for row in rows[:4]]
        print(*report.table(lines, ["sentence", "name", "label"]), sep="\n", flush=True)

    study = study_of(out)
    sources, results = source_cells(study.args), {}
    count = len(sources) + len(study.cells)
    print(f"\ntraining {count} runs, {study.args.jobs} at a time", flush=True)
    for cells in (sources, [*study.cells.values()]):
        found, failed = grid.run(cells, study.args)
        results |= found
        if failed:
            return grid.end(failed)
    rows = composition.rows_of(study, results)
    one, together = ceiling({name: result["accuracy"] for name, result in results.items()})
    skills = " and ".join(f"`{skill}` {100 * results[skill]['accuracy']:.1f} %" for skill in SKILLS)
    print(f"\nThe skills, each on its own task: {skills}.")
    print(f"With one of them the target's ceiling is about {one:.0f} %: half of that skill's")
    print(f"accuracy, because the other question is guessed. With both it is {together:.0f} %.\n")
    print(*report.table(*composition.table(study.systems, rows)), "", sep="\n")
    print(verdict(study, rows), "\n")
    run = load_run(out / "runs" / "fusion-240-0")
    means, match = draw(run, out / "weights.png"), run.adapters.index("match")
    lines = [
        [str(i + 1), of_a[match].item(), of_b[match].item()]
        for i, (of_a, of_b) in enumerate(zip(means["text_a"], means["text_b"], strict=True))
    ]
    print("The weight of `match` in fusion-240-0, on tokens of the sentence and of the name:")
    print(*report.table(lines, ["layer", "sentence", "name"]), sep="\n")
    print(f"\n{out / 'weights.png'} shows them, and those of every token of an example.")


if __name__ == "__main__":
    run_command("demo.py", main)
