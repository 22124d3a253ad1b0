"""Does fusing help on your task, and what should be fused? A fusion beside every control.

    python -m experiments.composition --target rte --sources mnli qqp sst2 --data-dir DATA
    python -m experiments.composition --target mine --sources runs/mnli AdapterHub/SOME-ADAPTER \\
        -- --train-file mine.csv --dev-fraction 0.2 --columns text_a=review label=stars

A source is a task, whose adapter is trained here, or an adapter, also as NAME=DIR. Each of several
targets has the same sources, but for itself. OUT gets composition.csv, .md and .png."""

from experiments import grid, report, study
from runtime.command import run_command

SYSTEMS = """head head_on_ own full mean mean_with_own fusion fusion_with_own fusion_of_own
    fusion_without_""".split()


def parse(argv=None):
    return study.parse("composition", __doc__, argv, SYSTEMS)


def main(argv=None):
    args = parse(argv)
    rows, failed = study.run(args)
    parts = []
    if len(rows):
        study.figure(args.out / "composition.png", rows)
        for (task, size), of in rows.groupby(["task", "limit_train"], sort=False):
            title = f"## {task}, {size or 'all'} training examples"
            parts += [title, report.markdown(*study.table(of)), *study.caveats(args, of)]
    study.write_results(args, "composition", rows, parts)
    grid.end(failed)


if __name__ == "__main__":
    run_command("composition", main)
