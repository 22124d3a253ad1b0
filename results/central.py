"""`python -m results.central`: of the rows in central.csv, held-out accuracies, every difference of
two systems: on each task whether it is above 0.3 points, on how many tasks, and the mean over tasks
with its 95 % interval, as experiments.tables has it in Table 2."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pandas as pd

from experiments import report, study, tables

rows = pd.read_csv("results/central.csv")
args = SimpleNamespace(tasks=rows["task"].unique(), systems=rows["system"].unique())
means = study.points(rows).groupby([rows["task"], rows["system"]]).mean().unstack()
pairs = itertools.permutations(args.systems, 2)  # both directions
found = tables.arrows(tables.differences(tables.with_mean(means, args), pairs)).T
report.write_text(Path("results/central_differences.csv"), found.to_csv())
