"""Studies: systems × tasks × sizes of their training sets × seeds, where each place is a training
run (experiments/grid.py). tables, composition and architecture_search are lists of systems, and
what each prints.

    python -m experiments.composition --target both --sources match order --seeds 0 1 2 \\
        --fusion-options '--lr 5e-4' '--lr 2e-3' --choose-seeds 5 6     # the better rate of the two
    python -m experiments.composition ... --import my_systems --systems own my_system

A file that --import names may add to SYSTEMS, and to the dictionaries of the five files.

Where a stage has several options, --choose-seeds run them all, and for each system, task and size
those with the best mean accuracy on the development set are run with --seeds. It also chooses the
best epoch; --test asks examples on which nothing was chosen."""

import argparse
import itertools
import math
import os
import shlex
import sys
from pathlib import Path

import train
from data import get_task
from experiments import grid, report
from experiments.load_run import load_run
from formats.adapterhub import read_run
from formats.files import read_json, write_json
from formats.rows import source_of
from formats.sources import encoder_of
from runtime import command
from runtime.record import share_trained_on

EVEN_WEIGHTS = "--import examples.mean_fusion --fusion mean"
# {system: (title, stage, options, which adapters it takes)}. A name that ends in _ is followed by
# that of a source. Which: the "one" behind the name; "all" sources, or all "others"; the target's
# "own"; or, from Θ′ on, those of a multi-task system. "largest": Θ of full fine-tuning on the
# largest other task.
SYSTEMS = {
    "head": ("new head on Θ", "head", "", ""),
    "full": ("full fine-tuning", "full", "", ""),
    # adapters of one task, and of several (Tables 1 and 3)
    "st_a_2": ("ST-A r=2", "adapter", "--adapter pfeiffer --reduction-factor 2", ""),
    "st_a_16": ("ST-A", "adapter", "--adapter pfeiffer --reduction-factor 16", ""),
    "st_a_64": ("ST-A r=64", "adapter", "--adapter pfeiffer --reduction-factor 64", ""),
    "st_a_houlsby": ("ST-A Houlsby", "adapter", "--adapter houlsby --reduction-factor 16", ""),
    "mt_a": ("MT-A", "multitask", "--adapter pal", ""),
    "mt_a_top": ("MT-A of section 2.2.3", "multitask", "--adapter pfeiffer", ""),
    "fusion_st_a": ("Fusion w/ ST-A", "fusion", "", "all own"),
    "fusion_mt_a": ("Fusion w/ MT-A", "fusion", "--import experiments.pal", "mt_a"),
    "fusion_mt_a_top": ("Fusion w/ MT-A of section 2.2.3", "fusion", "", "mt_a_top"),
    # without adapters (section 2.1)
    "multitask": ("multi-task learning", "multitask", "--without-adapters", ""),
    "sequential": ("full fine-tuning, first on the largest other task", "full", "", "largest"),
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
CHOICES = "system target limit_train setting seed".split()
NOTE = """Accuracy in %, mean ± standard deviation over seeds; the best epoch is chosen on the
development set, as in the paper. Of differences the mean, and its 95 % interval by t."""
# Options of train.py that a study sets for each run
OWNED = """--stage --task --tasks --adapters --seed --without-adapters --model --data-dir --out
    --resume --overwrite""".split()


def system(name):
    """(title, stage, [options], which adapters, the source behind the name)"""
    ends = [key for key in SYSTEMS if key[-1] == "_" and name.startswith(key)]
    key = max(ends, key=len) if ends and name not in SYSTEMS else name
    title, stage, options, which = command.look_up(SYSTEMS, key, "--systems")
    return title + name.removeprefix(key), stage, options.split(), which, name.removeprefix(key)


def make_parser(name, description, argv):
    """(the parser of a study, with the options that all have; the words before --). Imports what
    --import names, which may add a stage."""
    given = list(sys.argv[1:] if argv is None else argv)
    end = given.index("--") if "--" in given else len(given)
    first, prog = command.Parser(add_help=False), f"python -m experiments.{name}"
    first.add_argument("--import", dest="imports", nargs="+", default=[], metavar="MODULE")
    command.import_modules(first.parse_known_args(given[:end])[0].imports)
    parser = command.Parser(prog, description=description, parents=[first])
    add, environment = parser.add_argument, os.environ.get
    seeds = {"type": command.seed, "nargs": "+"}
    # fmt: off
    add("--model", default=environment("ADAPTERFUSION_MODEL"), help="encoder, as for train.py")
    add("--data-dir", default=environment("ADAPTERFUSION_DATA_DIR"), help="as for train.py")
    add("--seeds", default=[0], **seeds)
    add("--choose-seeds", default=[], help="to choose among several options of a stage", **seeds)
    add("--train-examples", type=command.count, nargs="+", default=[0], metavar="N", help="at most "
        "so many of each target's, drawn with the seed; default all")
    add("--test", nargs="?", const="left over", metavar="DIR", help="also on the training examples "
        "that --train-examples leaves out, or on DIR/TASK/validation.*")
    add("--paired", action="store_true", help="train the sources again with each seed")
    add("--out", type=Path, default=Path("runs", name), help=f"default runs/{name}")
    add("--jobs", type=command.count, help="runs at a time; default one for each GPU, or one")
    add("--overwrite", action="store_true", help="replace runs that another command has made")
    add("--plan", action="store_true", help="list the runs, and run nothing")
    words = {"type": shlex.split, "nargs": "+", "metavar": "'...'"}
    for stage in train.STAGES:
        add(f"--{stage}-options", default=[[]], help="for the runs of this stage", **words)
    add("--source-options", help="for adapters of sources, in place of --adapter-options", **words)
    # fmt: on
    parser.set_defaults(command=f"{prog} {shlex.join(given)}", train_options=given[end + 1 :])
    parser.set_defaults(sources={}, chosen={}, own="own", maker="source")
    return parser, given[:end]


def check(args, owned=OWNED):
    """Reads the data: args.sizes, {task: its training examples}. Without --model the encoder is
    that of the adapters in args.sources. Raises ValueError for what would give a wrong result."""
    args.settings = {stage: getattr(args, f"{stage}_options") for stage in train.STAGES}
    args.settings["source"] = args.source_options or args.settings["adapter"]
    several = [*args.settings.values()]
    every = {
        word.split("=")[0] for words in [args.train_options, *sum(several, [])] for word in words
    }
    if found := every & {*owned}:
        where = "does not belong behind --, nor into the options of a stage"
        raise ValueError(f"{min(found)} {where}: the study sets it for each run")
    if {*args.seeds} & {*args.choose_seeds} or (
        not args.choose_seeds and max(map(len, several)) > 1
    ):
        raise ValueError("several options of a stage need --choose-seeds, other ones than --seeds")
    encoder = encoder_of([place for place in args.sources.values() if place])
    args.model = args.model or encoder or "google-bert/bert-base-uncased"
    names = [*args.tasks, *(name for name, place in args.sources.items() if not place)]
    args.sizes = dict.fromkeys(names, 0)  # of the targets, and of the sources that are trained here
    options = grid.make_cell(args, "data", "full", ["--task", args.tasks[0]]).options()
    if options.train_file and len(args.sizes) > 1:
        problem = f"--train-file is of {names[0]}, {names[-1]} would be trained on it, too"
        raise ValueError(f"{problem}: take a finished run as the source, runs/{names[-1]}")
    source = source_of(options)
    for name in args.sizes:  # or an error: a run is named with a slash
        args.sizes[name] = len(source.read_split(get_task(name, source), "train")[1])
    least = min(args.sizes[name] for name in args.tasks)
    if args.test == "left over" and not 0 < max(args.train_examples) < least:
        raise ValueError(f"--test needs --train-examples below {least}: nothing is left over")


def cell_of(args, name, task, size, seed, setting=None):
    """The run of a system, with those that it needs; None if it is none for this task. setting: the
    number of its stage's options, default the chosen one"""
    _, stage, words, which, one = system(name)
    settings = args.settings["source" if name == "source" else stage]
    setting = args.chosen.get((name, task, size), 0) if setting is None else setting
    others, is_joint = [n for n in args.sources if n != task], stage == "multitask"
    largest = sorted({*args.tasks} - {task}, key=args.sizes.get)[-1:]
    taken = {"one": [one], "others": [n for n in others if n != one], "all": others}
    taken |= {"own": [task], "all own": [*others, task], "largest": largest, "": []}
    if one and one not in args.sources:
        raise ValueError(f"--systems {name}: {one} is none of the sources")
    if (one and one == task) or (which and not taken.get(which, True)):
        return None
    needs, adapters, theta = [], [], []
    if which not in taken or which == "largest":  # a multi-task system's Θ′ and adapters, or Θ
        place = (which, task, size) if which not in taken else ("full", *largest, 0)
        needs = [cell_of(args, *place, seed)]
        theta = ["--model", str(needs[0].out)]
        adapters = [f"{needs[0].out}/adapters/{n}" for n in args.sizes if which != "largest"]
    for n in taken[which] if not theta else []:
        place = args.sources.get(n)
        if n == task:
            needs.append(cell_of(args, args.own, n, size, seed))
        elif not place:
            needs.append(cell_of(args, args.maker, n, 0, seed if args.paired else args.seeds[0]))
        adapters.append(f"{n}={place}" if place else str(needs[-1].out))
    words = [*settings[setting], *words, *theta]
    words += ["--tasks", *args.sizes] if is_joint else ["--task", task]
    words += ["--adapters", *adapters] if adapters else []
    is_part = 0 < size < (max(args.sizes.values()) if is_joint else args.sizes[task])
    words += ["--limit-train", str(size)] if is_part else []
    parts = [name, *[task] * (not is_joint), *[size] * is_part]
    parts += [f"setting{setting + 1}"] * (len(settings) > 1)
    run, words = "-".join(map(str, [*parts, seed])), [*words, "--seed", str(seed)]
    return grid.make_cell(args, run, stage, words, needs)._replace(key=(name, task, size))


def cells_of(args, seeds):
    """{a place in COLUMNS: its run}"""
    places = itertools.product(args.tasks, args.systems, args.train_examples, seeds)
    cells = {(t, name, *rest): cell_of(args, name, t, *rest) for t, name, *rest in places}
    return {place: cell for place, cell in cells.items() if cell}


def candidates(args, has_needs):
    """{a place in CHOICES: its run} of the systems whose stage has several options"""
    found = {}
    for cell in grid.with_needs(cells_of(args, args.choose_seeds).values()).values():
        count = len(args.settings["source" if cell.key[0] == "source" else cell.stage])
        if count > 1 and bool(cell.needs) == has_needs:
            for i, seed in itertools.product(range(count), args.choose_seeds):
                found[*cell.key, i, seed] = cell_of(args, *cell.key, seed, i)
    return found


def run(args):
    """(a DataFrame with a row for each finished place, {name of a run: why it failed})"""
    cells = cells_of(args, args.seeds)
    if args.plan:  # as if the first options were the best
        every = [candidates(args, False), candidates(args, True), cells]
        grid.plan([cell for of in every for cell in of.values()])
    for has_needs in (False, True):
        rows, failed = grid.run(args, CHOICES, candidates(args, has_needs))
        grid.end(grid.not_diverged(failed))
        if rows["accuracy"].isna().any():
            raise ValueError(
                "a task without accuracy: the options of a stage cannot be chosen by it"
            )
        sums = rows.pivot_table("accuracy", CHOICES[:3], "setting", "sum")  # a lost run counts 0
        args.chosen |= sums.idxmax(axis=1).to_dict() if len(sums) else {}
    cells = cells_of(args, args.seeds)
    rows, failed = grid.run(args, COLUMNS, cells)
    if args.test:
        places = rows[COLUMNS].itertuples(index=False, name=None)
        rows["test_accuracy"] = [held_out_accuracy(args, cells[p], p[0]) for p in places]
    return rows, failed


def held_out_accuracy(args, cell, task):
    """On examples that the run was not given; computed once, and kept in a file."""
    path, metrics = args.out / "test" / f"{cell.name}-{task}.json", cell.out / "metrics.json"
    whole = argparse.Namespace(**{**vars(cell.options()), "limit_train": None})
    since = [file.stat().st_mtime for file in sorted(Path(args.test, task).glob("*"))]
    of = {"run": read_json(metrics), "on": args.test, "since": since}
    of["data"] = grid.data_now(whole, task)
    if path.is_file() and (kept := read_json(path))["of"] == of:
        return kept["accuracy"]
    run = load_run(cell.out, task=task)
    examples = run.left_over() if args.test == "left over" else run.split(data_dir=args.test)
    scores = train.evaluate(run.model, run.task, examples, run.args)
    accuracy = scores.get("accuracy", math.nan)
    print(f"{cell.name}: {100 * accuracy:.2f} % of {len(examples)} held-out examples", flush=True)
    for name in run.record["adapters"]:
        if share := share_trained_on(read_run(cell.out / "adapters" / name), examples):
            print(f"WARNING: {cell.name}: {name} was TRAINED on {share:.0%} of them")
    write_json(path, {"accuracy": accuracy, "of": of})
    return accuracy


# Results of one task and size, and their files


def points_of(rows):
    """Accuracies in %, a row for each seed and a column for each system: of the held-out examples
    where they were asked for, else of the development set"""
    column = "test_accuracy" if "test_accuracy" in rows else "accuracy"
    points = 100 * rows.pivot(index="seed", columns="system", values=column)
    return points[rows["system"].unique()]


def table(rows, reference="fusion"):
    """(rows, header): each system, and the reference minus it, paired by seed"""
    points, lines = points_of(rows), []
    for name, of in rows.groupby("system", sort=False):
        first, values = of.iloc[0], points[name].dropna()
        line = [system(name)[0], f"{first['lr']:g}", str(first["epochs"])]
        line += [f"{first['trained_parameters']:,}", ", ".join(f"{v:.1f}" for v in values)]
        is_compared = name != reference and reference in points
        lead = report.with_interval(points[reference] - values) if is_compared else None
        line += [report.with_deviation(values), lead]
        lines.append([*line, *[100 * of["accuracy"].mean()] * ("test_accuracy" in rows)])
    header = f"system,lr,epochs,trained parameters,by seed,mean,{reference} minus it".split(",")
    return lines, [*header, *["development set"] * ("test_accuracy" in rows)]


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
    text = "\n\n".join([f"    {args.command}", NOTE, *map(str.strip, parts)])
    print("", text, report.write_text(args.out / f"{name}.md", f"{text}\n"), sep="\n", flush=True)
