"""Does fusing help on your task, and what should be fused? A fusion beside every control.

    python -m experiments.composition --target rte --sources mnli qqp sst2 --data-dir DATA \\
        --out runs/composition --seeds 0 1 2
    python -m experiments.composition --target mine --sources runs/mnli AdapterHub/SOME-ADAPTER \\
        -- --train-file mine.csv --dev-fraction 0.2 --columns text_a=review label=stars

A source is a task, whose adapter is trained here, once (--paired: with each seed), or an adapter: a
run, an AdapterHub directory, a hub id, each also as NAME=DIR. Of several targets, each has the same
sources, but for itself.

Each number is a run in OUT/runs. OUT gets composition.csv with a row for every run of this command,
composition.md with the tables, and composition.png."""

from pathlib import Path

import pandas as pd

from adapter import load_adapter
from bert import Bert
from experiments import grid, report, study
from formats.sources import find_adapters, named
from runtime.command import run_command

SYSTEMS = """head head_on_ own full mean mean_with_own fusion fusion_with_own fusion_of_own
    fusion_without_""".split()


def parse(argv=None):
    parser, words = study.make_parser("composition", __doc__, argv)
    add = parser.add_argument
    add("--target", dest="tasks", nargs="+", required=True, help="tasks of the paper, or your own")
    sources = "tasks, or adapters: directories (with a slash: ./mine) or hub ids"
    add("--sources", nargs="+", required=True, help=sources)
    known = f"default {' '.join(SYSTEMS)}; a wrong one lists all. _ stands for each source"
    add("--systems", nargs="+", default=SYSTEMS, metavar="SYSTEM", help=known)
    args = parser.parse_args(words)
    found, args.sources = args.sources, {}  # {name: the place of an adapter, or None for a task}
    for name, place in [named(one) if "/" in one else (one, None) for one in found]:
        name = name or Path(place).name
        if name.lower() in [n.lower() for n in (*args.sources, *(args.tasks if place else ()))]:
            advice = "NAME=DIR gives a source another name"
            raise ValueError(f"two adapters would be called {name.lower()!r}: {advice}")
        args.sources[name] = place
    names = args.sources
    args.systems = [s + n for s in args.systems for n in (names if s[-1] == "_" else [""])]
    study.check(args)
    if adapters := [f"{name}={place}" for name, place in names.items() if place]:
        bert = Bert.from_pretrained(args.model)  # they must all be there, and for the encoder
        for name, found in find_adapters(adapters, bert.config.model_type).items():
            load_adapter(bert, found, name)
    return args


def main(argv=None):
    args = parse(argv)
    rows, failed = study.run(args)
    parts = ["Measured on held-out examples, but in the last column."] * bool(args.test)
    groups = {  # of one target and size
        f"{task}, {size or 'all'} training examples": of
        for (task, size), of in rows.groupby(["task", "limit_train"], sort=False)
    }
    if groups:
        study.figure(args.out / "composition.png", rows)
        means = {n: study.points_of(of).apply(report.with_deviation) for n, of in groups.items()}
        systems = pd.DataFrame(means, rows["system"].unique()).fillna("")
        parts.append(report.frame(systems.rename(lambda name: study.system(name)[0])))
    for title, of in groups.items():
        parts += [f"## {title}", report.markdown(*study.table(of))]
    study.write_results(args, "composition", rows, parts)
    grid.end(failed)


if __name__ == "__main__":
    run_command("composition", main)
