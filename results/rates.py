"""Accuracy against the learning rate: every way to compose adapters, at every rate, on the targets
of experiments/skills.py, each seed with sources of its own.

    OMP_NUM_THREADS=1 python -m results.rates runs/rates     # interrupted, it goes on

Before all others come ten seeds of the demo, at rates that seeds 0 and 1 chose; then every target,
a seed after another; among them the demo in float32.

Each run is a line of OUT/rows.jsonl: the last epoch and the best one (chosen on the development
set), each also on examples that chose nothing. `minimize` of train.py trains; nothing but rows is
kept."""

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

import examples.composing  # noqa: F401  (adds its kinds)
import train
from bert import Bert
from data import get_task
from experiments.skills import OTHERS, SKILLS, build_tasks
from formats.rows import source_of
from formats.sources import find_adapters
from runtime.processes import choose_device, reseed

ADAPTERS = [*SKILLS, "the", "of", *(name for name in OTHERS if name not in ("the", "of"))]
SEEDS, FEW, CHOSEN = range(8), range(5), [5e-4, 2e-3, 5e-3]
RATES = [1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3]
WIDE = ["attention", "scaled", "slow", "gates"]
NARROW = {
    "mean": CHOSEN,
    "sum": [*CHOSEN, 2e-2],
    "value_of_sum": [1e-4, 2e-4, *CHOSEN],
    "static": RATES[1:],
}
# head: a new one on the adapter of `order` alone; own: an adapter of the target, for 20 epochs
ALONE = {"head": [5e-4, 2e-3, 5e-3], "own": [1e-3, 2e-3]}
# {setting: (target, N, training examples, epochs, rates of WIDE, seeds)}
SETTINGS = {
    "both, N = 2": ("both", 2, 240, 6, RATES, SEEDS),
    "both, N = 8": ("both", 8, 240, 6, RATES, SEEDS),
    "asked, N = 2": ("asked", 2, 960, 6, RATES[1:5], FEW),
    "both, N = 8, 240 steps": ("both", 8, 480, 8, RATES, SEEDS),
    "both, N = 4": ("both", 4, 240, 6, RATES, FEW),
}
DEMO, DEMO_SEEDS = "both, N = 6, 180 steps", range(10, 20)
EVERY = SETTINGS | {DEMO: ("both", 6, 240, 12, None, None)}
# the rates of which seeds 0 and 1 choose one; the last ones are not trained in float32
DEMO_WAYS = {"attention": RATES[1:5], **NARROW, **ALONE, "scaled": RATES[2:]}
DEMO_WAYS |= {"scalearn": [2e-3, 5e-3, 2e-2, 5e-2, 1e-1]}
FEW_WAYS = "attention sum mean static head own".split()
SOURCE = "--lr 1e-3 --epochs 2 --batch-size 16 --max-length 40"


def grid(settings):
    """[(setting, way, rate, seed)]"""
    for setting, (_, _, _, _, rates, seeds) in settings.items():
        for seed in seeds:
            yield from ((setting, way, lr, seed) for way in WIDE for lr in rates)
            yield from ((setting, way, lr, seed) for way in NARROW for lr in NARROW[way])
            if setting not in ("both, N = 4", "both, N = 8"):  # there it is as with N = 2
                yield from ((setting, "head", lr, seed) for lr in ALONE["head"])


def source_words(out, name, seed, dtype):
    """The command that trains a source, on all 2,400 examples of its task"""
    words = f"--stage adapter --task {name} --data-dir {out}/data --out {out}/{dtype}/{name}-{seed}"
    words = f"{words} --model minilm --seed {seed} --dtype {dtype} --overwrite {SOURCE}"
    return words.split()


def train_source(out, name, seed, dtype):
    torch.set_num_threads(1)
    if not Path(out, dtype, f"{name}-{seed}", "metrics.json").is_file():
        sys.stdout = open(os.devnull, "w")
        train.main(source_words(out, name, seed, dtype))


class Trial:
    """What `minimize` needs of a run, without its files."""

    def __init__(self, args, model, optimizer):
        self.args, self.model, self.optimizer = args, model, optimizer
        self.rank, self.world_size, self.record, self.diverged = 0, 1, {}, None
        self.epoch, self.step, self.best_epoch, self.best_scores, self.best = 1, 0, 0, {}, {}
        self.history = []

    def kept_tensors(self):
        named = self.model.named_parameters()
        return {name: p.detach() for name, p in named if p.requires_grad}

    def after_step(self, loss):
        pass

    def log_epoch(self, scores):
        self.history.append({**scores, "epoch": self.epoch})

    def checkpoint(self):
        pass

    def check_finite(self, what, value):
        if not value < float("inf"):
            raise FloatingPointError(what)


def words_of(out, setting, way, lr, seed, dtype):
    """The words behind `train.py` of a run."""
    target, n, examples, epochs, _, _ = EVERY[setting]
    sources, stage = ADAPTERS[:n], f"--stage fusion --fusion {way}"
    if way == "head":
        sources, stage = ["order"], "--stage head"
    if way == "own":
        sources, stage, epochs = [], "--stage adapter", 20
    words = f"{stage} --task {target} --data-dir {out}/data --model minilm --max-length 40 "
    words += f"--batch-size 16 --limit-train {examples} --epochs {epochs} --patience {epochs} "
    words += f"--lr {lr} --seed {seed} --dtype {dtype} --out {out}/none"
    adapters = [f"{out}/{dtype}/{name}-{seed}" for name in sources]
    return [*words.split(), *(["--adapters", *adapters] if adapters else [])]


def of_skills(task, labels, predictions):
    """Of `both`, the accuracy in each of its two questions."""
    pairs = zip(labels.tolist(), predictions.tolist(), strict=True)
    named = [(task.labels[i].split(", "), task.labels[j].split(", ")) for i, j in pairs]
    of_one = range(len(named[0][0]))
    return [round(sum(a[k] == b[k] for a, b in named) / len(named), 4) for k in of_one]


def run(out, *place):
    """A run as `train` of train.py has it, up to its files. Returns its row."""
    torch.set_num_threads(1)
    began, stdout = time.time(), sys.stdout
    sys.stdout = open(os.devnull, "w")  # notes, which are the same in all
    setting, way, lr, seed, _ = place
    args = train.parse(words_of(out, *place))
    device, dtype = choose_device("cpu", args.dtype)
    data_source = source_of(args)
    task = get_task(args.task, data_source)
    reseed(args.seed)
    bert = Bert.from_pretrained(args.model)
    args, task = train.settle(args, task, bert, dtype)
    adapters = find_adapters(args.adapters, "bert")
    reseed(args.seed)
    model = train.build(args, bert, task, adapters)
    tokenizer, train_set, dev_set = train.load_data(args, task, data_source, bert)
    test_args = train.parse([*words_of(out, *place), "--data-dir", f"{out}/test"])
    test_set = train.load_split(task, source_of(test_args), "validation", tokenizer)
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    for p in frozen:
        p.data = p.data.to(dtype)
    optimizer = torch.optim.AdamW(trained, args.lr, weight_decay=0.0, fused=True)
    trial = Trial(args, model, optimizer)

    def steps(epoch):
        order = train.batches(train_set, args.batch_size, (args.seed, epoch))
        return [(model, task, [train_set[i] for i in indices]) for indices in order]

    large = argparse.Namespace(**{**vars(args), "batch_size": 64})  # which is faster

    def test():
        return train.evaluate(model, task, test_set, large)["accuracy"]

    def evaluation():
        labels, predicted, loss = train.predictions(model, task, dev_set, large)
        accuracy = task.scores["accuracy"](labels, predicted)
        found = {"accuracy": accuracy, "loss": loss, "skills": of_skills(task, labels, predicted)}
        return found | ({"test": test()} if trial.epoch == args.epochs else {})

    row = {"setting": setting, "way": way, "lr": lr, "seed": seed, "dtype": args.dtype}
    try:
        train.minimize(trial, steps, lambda done: 1 - done, evaluation)
        last = trial.history[-1]
        best = last["test"] if trial.best_epoch == args.epochs else test()
        row |= {"last_dev": last["accuracy"], "last_test": last.get("test"), "best_test": best}
        row |= {"best_dev": trial.best_scores["accuracy"], "best_epoch": trial.best_epoch}
    except FloatingPointError:
        row |= {"best_epoch": 0}  # it diverged in its first epoch
    row |= {"diverged": trial.diverged is not None, "trained": sum(p.numel() for p in trained)}
    row |= {"devs": [round(h["accuracy"], 4) for h in trial.history]}
    row |= {"skills": [h["skills"] for h in trial.history]}
    row |= {"losses": [round(h["loss"], 4) for h in trial.history]}
    sys.stdout = stdout
    return row | {"seconds": round(time.time() - began, 1)}


def append(path, value):
    with open(path, "a") as file:
        file.write(json.dumps(value) + "\n")


def main(out, runs):
    """runs: [(setting, way, rate, seed, dtype)]"""
    if not (out / "test").is_dir():
        build_tasks(out / "data", random.Random(0))
        for target in ("both", "asked"):  # in place of the development set
            for split, name in (("train", "train"), ("validation", "test")):
                place = out / "test" / target / f"{split}.jsonl"
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes((out / "data" / target / f"{name}.jsonl").read_bytes())
    rows, done = out / "rows.jsonl", set()
    if rows.is_file():
        found = map(json.loads, rows.read_text().splitlines())
        done = {tuple(row[n] for n in "setting way lr seed dtype".split()) for row in found}
    todo = [run for run in dict.fromkeys(runs) if run not in done]
    jobs, context = int(os.environ.get("JOBS", 2)), multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["results.rates"])
    with ProcessPoolExecutor(jobs, context) as pool:
        sources, futures = {}, {}
        for key in todo:
            needed = [(name, *key[3:]) for name in ADAPTERS[: EVERY[key[0]][1]]]
            for one in needed:
                sources[one] = sources.get(one) or pool.submit(train_source, out, *one)
            for one in needed:
                sources[one].result()
            futures[pool.submit(run, out, *key)] = key
            if len(futures) == 2 * jobs:
                collect(out, futures)
        while futures:
            collect(out, futures)


def collect(out, futures):
    """Writes the rows of what has ended; waits for one."""
    future = next(as_completed(futures))
    key, row = futures.pop(future), future.result()
    append(out / "rows.jsonl", row)
    print(*key, {n: row.get(n) for n in ("last_test", "best_test", "seconds")}, flush=True)


def demo_rates(out, ways):
    """{way of the demo: the rate with the best development accuracy in seeds 0 and 1}"""
    found = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    best = {}
    for way in ways:
        of = [row for row in found if row["setting"] == DEMO and row["way"] == way]
        of = [row for row in of if row["seed"] < 2]
        mean = {row["lr"]: 0.0 for row in of}
        for row in of:
            mean[row["lr"]] += row.get("best_dev", 0) / 2
        best[way] = max(mean, key=mean.get)
    return best


if __name__ == "__main__":
    out, dtype = Path(sys.argv[1]), str(choose_device("cpu", "auto")[1]).removeprefix("torch.")
    ways = {way: DEMO_WAYS[way] for way in (*FEW_WAYS, *DEMO_WAYS)}
    choosing = [(DEMO, way, lr, seed) for seed in range(2) for way in ways for lr in ways[way]]
    main(out, [(*key, dtype) for key in choosing])
    demo = [(DEMO, way, lr, s) for s in DEMO_SEEDS for way, lr in demo_rates(out, ways).items()]
    main(out, [(*key, dtype) for key in demo])
    every = [(*key, dtype) for key in grid(SETTINGS)]
    main(out, [key for key in every if key[0] in ("both, N = 2", "both, N = 8")])
    main(out, [key for key in every if key[0] == "asked, N = 2"])
    main(out, [(*key, "float32") for key in demo if key[1] in FEW_WAYS])
    main(out, every)
