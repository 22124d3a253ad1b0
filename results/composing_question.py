"""python -m results.composing_question RUN ...: fusions of composing.sh on `asked`, a seed each:
the mean weight of `match` at [CLS], by layer and by the skill that the text asks for, on the
development set: composing_question.csv and .png."""

import sys
from pathlib import Path

import pandas as pd
import torch

from experiments import report
from experiments.load_run import load_run
from experiments.skills import SKILLS
from formats.rows import read_rows

COLUMNS, rows = ["question", "layer", "seed"], []
for directory in sys.argv[1:]:
    run = load_run(directory)
    for row in read_rows(Path(run.args.data_dir, "asked", "validation.jsonl")):
        (found,) = run.fusion_weights((row["text_a"], row["text_b"]))
        at_cls = torch.stack(found["weights"]["output"])[:, 0]  # [layers, N]
        question, s = row["text_b"].split(":")[0], at_cls[:, run.adapters.index("match")].tolist()
        rows += [(question, layer, run.args.seed, weight) for layer, weight in enumerate(s, 1)]
means = pd.DataFrame(rows, columns=[*COLUMNS, "match"]).groupby(COLUMNS)["match"].mean()
means.round(4).to_csv("results/composing_question.csv")

figure, axes = report.subplots(1, 1, (5, 3))
for question, colour, style in zip(SKILLS, ("C0", "C1"), ("-", "--"), strict=True):
    points = means[question].unstack()  # [layer, seed]
    axes.plot(points, f"o{style}", color=colour, alpha=0.5, markersize=3, linewidth=0.8)
    axes.plot(points.mean(axis=1), style, color=colour, linewidth=2.5, label=f"{question}:")
axes.set(xlabel="layer", ylabel="weight of match at [CLS]", ylim=(0, 1), xticks=points.index)
axes.legend(title="the text asks for")
report.save_figure(figure, Path("results/composing_question.png"))
