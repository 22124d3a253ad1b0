"""Studies: systems × tasks × sizes of their training sets × seeds, where each place is a training
run (experiments/grid.py). composition, tables and architecture_search are lists of systems, and
what each prints. A file that --import names may add to SYSTEMS.

Where a stage has several options, --choose-seeds run them all, and for each system, task and size
those with the best mean accuracy on the development set are run with --seeds. This set also chooses
the best epoch; --test measures on examples by which nothing was chosen."""

import itertools
import math
import os
import shlex
import sys
from pathlib import Path

import train
from data import get_task, load_split
from experiments import grid, report
from experiments.load_run import load_run, recorded_task
from formats.adapterhub import read_run
from formats.files import read_json, write_json
from formats.rows import Source, source_of
from formats.sources import check_there, encoder_of, named
from runtime import command
from runtime.record import examples_sha256, hashes_of

EVEN_WEIGHTS = "--import examples.composing --fusion mean"
# {system: (title, stage, options, which adapters it takes)}. Which: those of "all" sources; the
# target's "own"; of "one" source, with which the system's name ends; of all "others" but that; or a
# multi-task system, whose Θ′ and adapters it takes. A name with _ at its end stands for several.
SYSTEMS = {
    "head": ("new head on Θ", "head", "", ""),
    "full": ("full fine-tuning", "full", "", ""),
    # adapters of one task, and of several (Tables 1 and 3); without any (section 2.1.2)
    "st_a_2": ("ST-A r=2", "adapter", "--adapter pfeiffer --reduction-factor 2", ""),
    "st_a_16": ("ST-A", "adapter", "--adapter pfeiffer --reduction-factor 16", ""),
    "st_a_64": ("ST-A r=64", "adapter", "--adapter pfeiffer --reduction-factor 64", ""),
    "st_a_houlsby": ("ST-A Houlsby", "adapter", "--adapter houlsby --reduction-factor 16", ""),
    "mt_a": ("MT-A", "multitask", "--adapter pal", ""),
    "mt_a_top": ("MT-A of section 2.2.3", "multitask", "--adapter pfeiffer", ""),
    "fusion_st_a": ("Fusion w/ ST-A", "fusion", "", "all own"),
    "fusion_paper": ("Fusion w/ the authors' 16", "fusion", "--adapters paper", ""),
    "fusion_mt_a": ("Fusion w/ MT-A", "fusion", "--import experiments.pal", "mt_a"),
    "fusion_mt_a_top": ("Fusion w/ MT-A of section 2.2.3", "fusion", "", "mt_a_top"),
    "multitask": ("multi-task learning", "multitask", "--without-adapters", ""),
    # what is fused, and what a fusion is compared with (composition)
    "head_on_": ("new head on ", "head", "", "one"),
    "source": ("the source's adapter", "adapter", "", ""),
    "own": ("the target's own adapter", "adapter", "", ""),
    "mean": ("even weights of the sources", "fusion", EVEN_WEIGHTS, "all"),
    "mean_with_own": ("even weights of the sources and own", "fusion", EVEN_WEIGHTS, "all own"),
    "fusion": ("fusion of the sources", "fusion", "", "all"),
    "fusion_with_own": ("fusion of the sources and own", "fusion", "", "all own"),
    "fusion_of_own": ("fusion of own alone", "fusion", "", "own"),
    "fusion_without_": ("fusion without ", "fusion", "", "others"),
}
COLUMNS = "task system limit_train seed".split()  # 0: no limit
NOTE = """Accuracy in %, mean ± standard deviation over seeds; the best epoch is chosen on the
development set, as in the paper. Of differences the mean, and its 95 % interval by t."""


def system(name):
    """(title, stage, options, which adapters)"""
    return command.look_up(SYSTEMS, name, "--systems")


def parse(name, description, argv, systems, **defaults):
    """The options of a study. Reads the data: args.sizes, {task: its training examples}."""
    argv = sys.argv[1:] if argv is None else argv
    end = argv.index("--") if "--" in argv else len(argv)
    given, rest = argv[:end], argv[end + 1 :]
    prog = f"python -m experiments.{name}"
    command.IMPORT.parse_known_args(given)  # imports, which may add a stage
    parser = command.Parser(prog, description=description, parents=[command.IMPORT])
    add, seeds = parser.add_argument, {"type": command.seed, "nargs": "+"}
    # fmt: off
    add("--tasks", "--target", nargs="+", required=True, help="of the paper, or your own")
    add("--sources", nargs="+", help="tasks, or adapters: ./mine, or hub ids; default the tasks")
    add("--systems", nargs="+", default=systems, metavar="SYSTEM", help=f"default "
        f"{' '.join(systems)}; a wrong one lists all. _ stands for each source")
    add("--model", default=os.environ.get("ADAPTERFUSION_MODEL"), help="as for train.py")
    add("--data-dir", default=os.environ.get("ADAPTERFUSION_DATA_DIR"), help="as for train.py")
    add("--seeds", default=[0], **seeds)
    add("--choose-seeds", default=[], help="to choose among several options of a stage", **seeds)
    add("--train-examples", type=command.count, nargs="+", default=[0], metavar="N", help="at most "
        "so many of each target's, drawn with the seed; default all")
    add("--test", metavar="DIR", help="also on DIR/TASK/validation.*")
    add("--paired", action="store_true", help="train the sources again with each seed")
    add("--out", type=Path, default=Path("runs", name), help=f"default runs/{name}")
    add("--jobs", type=command.count, help="runs at a time; default one for each GPU, or one")
    add("--cluster", metavar="ADDRESS", help="of a Dask scheduler, for the runs: docs/tables.md")
    add("--overwrite", action="store_true", help="replace runs that another command has made")
    add("--plan", action="store_true", help="list the runs, and run nothing")
    for stage in [*train.STAGES, "source"]:
        add(f"--{stage}-options", type=shlex.split, nargs="+", metavar="'...'", help="for the runs "
            "of this stage; of a source's adapter: default those of adapters")
    # fmt: on
    # the systems that train the target's own adapter, and those of the sources
    parser.set_defaults(**{"own_system": "own", "source_system": "source", **defaults})
    args = parser.parse_args(given)
    args.command, args.chosen = f"{prog} {shlex.join(argv)}", {}
    args.settings = {name: getattr(args, f"{name}_options") or [[]] for name in train.STAGES}
    args.settings["source"] = args.source_options or args.settings["adapter"]
    are_several = max(map(len, args.settings.values())) > 1
    if {*args.seeds} & {*args.choose_seeds} or (are_several and not args.choose_seeds):
        raise ValueError("several options of a stage need --choose-seeds, other ones than --seeds")
    if args.source_options and args.source_system != "source":
        raise ValueError("--source-options: here a source's adapter has --adapter-options")
    for task in args.tasks if args.test else ():
        if not Source(args.test).paths(task, "validation"):
            raise ValueError(f"--test: there is no {Path(args.test, task)}/validation.jsonl")
    if args.test and args.data_dir and Path(args.test).samefile(args.data_dir):
        raise ValueError("--test must not be --data-dir, whose development sets choose")

    found, args.sources = args.sources or args.tasks, {}  # {name: an adapter's place, or None}
    for name, place in [named(one) if "/" in one else (one, None) for one in found]:
        name = name or Path(place).name
        if name.lower() in [n.lower() for n in (*args.sources, *(args.tasks if place else ()))]:
            raise ValueError(f"two adapters would be called {name.lower()!r}: NAME=DIR renames one")
        args.sources[name] = place
    places = [place for place in args.sources.values() if place]
    for place in places:
        check_there(place)
    for key in [key for key in SYSTEMS if key[-1] == "_"]:
        title, *others, which = SYSTEMS[key]
        for n in args.sources:
            SYSTEMS[key + n] = (title + n, *others, f"{which} {n}")
    args.systems = [s + n for s in args.systems for n in (args.sources if s[-1] == "_" else [""])]

    args.model = args.model or encoder_of(places) or "google-bert/bert-base-uncased"
    if found := {"--model", "--data-dir", "--stage", "--task", "--adapters", "--seed"} & {*rest}:
        raise ValueError(f"{min(found)} does not belong behind --: the study sets it for each run")
    data_dir = ["--data-dir", args.data_dir] if args.data_dir else []
    args.common = ["--model", args.model, *data_dir, *rest]  # of every run
    words = [*args.common, "--stage", "full", "--task", args.tasks[0], "--out", str(args.out / "x")]
    options = train.parse(words)
    # the targets, and the sources that are trained here
    names = dict.fromkeys([*args.tasks, *(n for n, place in args.sources.items() if not place)])
    if options.train_file and len(names) > 1:
        problem = f"--train-file is of {args.tasks[0]} alone, not of {[*names][-1]}"
        raise ValueError(f"{problem}: take a finished run, with a slash: runs/NAME")
    source = source_of(options)
    args.sizes = {n: len(source.read_split(get_task(n, source), "train")[1]) for n in names}
    return args


def cell_of(args, task, name, size, seed, setting=None):
    """The run of a system, with those that it needs; None if it is none for this task. setting: the
    number of its stage's options, default the chosen one"""
    _, stage, options, which = system(name)
    is_joint = stage == "multitask"  # which is a program of its own, and trains all tasks
    needs, adapters, theta = [], [], []
    others = [n for n in args.sources if n != task]
    taken = {"": [], "all": others, "own": [task], "all own": [*others, task]}
    for n in others:
        taken |= {f"one {n}": [n], f"others {n}": [other for other in others if other != n]}
    taken |= {f"one {task}": [], f"others {task}": []}  # it is no source of its own: no run
    is_of_all = is_joint or which not in taken  # a multi-task system, or what takes from one
    if size >= (max(args.sizes.values()) if is_of_all else args.sizes[task]):
        size = 0  # all
    key = "" if is_joint else task, name, size  # a joint run is chosen once, by its mean
    settings = args.settings["source" if name == "source" else stage]
    setting = args.chosen.get(key, 0) if setting is None else setting
    if which not in taken:
        needs = [cell_of(args, task, which, size, seed)]
        adapters = [f"{needs[0].out}/adapters/{n}" for n in args.sizes]
        theta = ["--model", str(needs[0].out)]
    for n in taken.get(which, []):
        place = args.sources.get(n)
        if n == task:
            needs.append(cell_of(args, n, args.own_system, size, seed))
        elif not place:
            seed_of_source = seed if args.paired else args.seeds[0]
            needs.append(cell_of(args, n, args.source_system, 0, seed_of_source))
        adapters.append(f"{n}={place}" if place else str(needs[-1].out))
    if which and not adapters:
        return None
    words = [*args.common, *([] if is_joint else ["--stage", stage])]
    words += [*settings[setting], *options.split(), *theta]
    words += ["--tasks", *args.sizes] if is_joint else ["--task", task]
    words += ["--adapters", *adapters] if adapters else []
    words += ["--limit-train", str(size)] if size else []
    parts = [name, *[task] * (not is_joint), *[size] * (size > 0)]
    parts += [f"setting{setting + 1}"] * (len(settings) > 1)
    out = args.out / "runs" / "-".join(map(str, [*parts, seed]))
    words += ["--seed", str(seed), "--out", str(out)]
    words += ["--overwrite" if args.overwrite else "--resume"]
    return grid.Cell(out.name, out, stage, words, needs, key)


def cells_of(args, seeds):
    """{a place in COLUMNS: its run}"""
    places = itertools.product(args.tasks, args.systems, args.train_examples, seeds)
    cells = {place: cell_of(args, *place) for place in places}
    return {place: cell for place, cell in cells.items() if cell}


def candidates(args, has_needs):
    """{(*a place in COLUMNS, setting): its run} of the systems whose stage has several options"""
    found = {}
    for cell in grid.with_needs(cells_of(args, args.choose_seeds).values()).values():
        count = len(args.settings["source" if cell.key[1] == "source" else cell.stage])
        if count > 1 and bool(cell.needs) == has_needs:
            for seed, i in itertools.product(args.choose_seeds, range(count)):
                found[*cell.key, seed, i] = cell_of(args, *cell.key, seed, i)
    return found


def run(args):
    """(a DataFrame with a row for each finished place, {name of a run: why it failed})"""
    if args.plan:  # as if the first options were the best
        every = candidates(args, False) | candidates(args, True) | cells_of(args, args.seeds)
        grid.plan([*every.values()])
    for has_needs in (False, True):  # what takes adapters takes the chosen ones
        rows, failed = grid.run(args, [*COLUMNS, "setting"], candidates(args, has_needs))
        grid.end(grid.not_diverged(failed))
        if rows["accuracy"].isna().any():
            raise ValueError("options cannot be chosen for a task without accuracy")
        # not means: a run that has diverged counts as 0
        sums = rows.groupby([*COLUMNS[:3], "setting"])["accuracy"].sum()
        best = sums.groupby(level=COLUMNS[:3]).idxmax()
        args.chosen |= {place[:3]: place[3] for place in best}
    cells = cells_of(args, args.seeds)
    rows, failed = grid.run(args, COLUMNS, cells)
    if args.test:
        places = rows[COLUMNS].itertuples(index=False, name=None)
        rows["test_accuracy"] = [held_out_accuracy(args, cells[p], p[0]) for p in places]
    return rows, failed


def held_out_accuracy(args, cell, task):
    """On examples that the run was not given; computed once, and kept in a file."""
    path, record = args.out / "test" / cell.name / f"{task}.json", read_run(cell.out)
    source = Source(args.test, column_names=record["options"]["columns"])
    held_out = load_split(recorded_task(record, cell.out, task), source, "validation", None)
    of = {"run": read_json(cell.out / "metrics.json"), "inputs": record["inputs"]}
    of["on"] = examples_sha256(hashes_of(held_out))
    kept = read_json(path) if path.is_file() else {}
    if kept.get("of") != of:
        run = load_run(cell.out, task=task)
        run.args.limit_dev = None  # it is about development sets
        examples = run.split(data_dir=args.test)
        accuracy = train.evaluate(run.model, run.task, examples, run.args).get("accuracy", math.nan)
        kept = {"accuracy": accuracy, "examples": len(examples), "of": of}
        kept["trained_on"] = run.shares_trained_on(examples)
        write_json(path, kept)
    said = f"{100 * kept['accuracy']:.2f} % of {kept['examples']} examples of --test"
    print(f"{cell.name}: {said}", flush=True)
    for name, share in kept["trained_on"].items():
        print(f"WARNING: {cell.name}: {name} was TRAINED on {share:.0%} of them")
    return kept["accuracy"]


def points(rows):
    """Accuracies in %: of held-out examples where --test asked for them, or on development sets"""
    return 100 * rows["test_accuracy" if "test_accuracy" in rows else "accuracy"]


def points_of(rows):
    """The same of one task and size, a row for each seed and a column for each system"""
    rows = rows.assign(points=points(rows))
    return rows.pivot(index="seed", columns="system", values="points")[rows["system"].unique()]


def table(rows):
    """(rows, header): each system, and the fusion minus it, paired by seed"""
    of_seeds, lines = points_of(rows), []
    for name, of in rows.groupby("system", sort=False):
        first, values = of.iloc[0], of_seeds[name].dropna()
        line = [system(name)[0], f"{first['lr']:g}", str(first["epochs"])]
        line += [f"{first['trained_parameters']:,}", ", ".join(f"{v:.1f}" for v in values)]
        is_compared = name != "fusion" and "fusion" in of_seeds
        lead = report.with_interval(of_seeds["fusion"] - values) if is_compared else None
        lines.append([*line, report.with_deviation(values), lead])
    return lines, "system,lr,epochs,trained parameters,by seed,mean,fusion minus it".split(",")


def caveats(args, rows):
    """[text] on what a table of one task and size rests, and each warning of its runs once."""
    cells, (task, size) = cells_of(args, args.seeds), rows[["task", "dev_examples"]].iloc[0]
    places = rows[COLUMNS].itertuples(index=False, name=None)
    records = [read_run(cells[place].out) for place in places]
    majority = records[0]["tasks"].get(task, {}).get("majority", math.nan)
    shared = f", of which {majority:.1%} have the most frequent label" if majority > 0 else ""
    yield f"{size} development examples{shared}."
    weak = rows[rows["accuracy"] <= majority]["system"].unique()
    if titles := ", ".join(system(name)[0] for name in weak):
        yield f"No better than that, with at least one seed: {titles}."
    yield from dict.fromkeys(f"WARNING: {text}" for one in records for text in one["warnings"])


def figure(path, rows):
    """A panel for each task and size: a line for each system, a dot for each seed, and the mean"""
    groups, names = [*rows.groupby(["task", "limit_train"], sort=False)], rows["system"].unique()
    size = 2.4 * len(groups) + 2.5, 0.3 * len(names) + 1
    picture, panels = report.subplots(1, len(groups), size, sharey=True, squeeze=False)
    for panel, ((task, limit), of) in zip(panels.flat, groups, strict=True):
        points = points_of(of).reindex(columns=names[::-1])
        y = range(len(names))
        panel.plot(points.T, y, "o", markersize=4, alpha=0.7)
        panel.plot(points.mean(), y, "k|", markersize=14)
        panel.set_yticks(y, [system(name)[0] for name in points])
        panel.set(title=f"{task}, {limit or 'all'} examples", xlabel="accuracy, %")
    report.save_figure(picture, path)


def write_results(args, name, rows, parts):
    """OUT/NAME.csv, and OUT/NAME.md of the parts, a text each, which is printed."""
    report.write_text(args.out / f"{name}.csv", rows.to_csv(index=False))
    held_out = [f"Measured on the examples of --test {args.test}."] * bool(args.test)
    text = "\n\n".join([f"    {args.command}", NOTE, *held_out, *map(str.strip, parts)])
    print("", text, report.write_text(args.out / f"{name}.md", f"{text}\n"), sep="\n", flush=True)
