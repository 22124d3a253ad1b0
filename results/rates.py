"""Accuracy against the learning rate: every way to compose adapters, at every rate, on the targets
of experiments/skills.py, each seed with sources of its own.

    python -m results.rates runs/rates     # what is interrupted goes on by the same command

Before all others come ten seeds of the demo, at rates that the first two chose.

Each run is a line of OUT/rows.jsonl: the last epoch and the best one (chosen on the development
set), each also on examples that chose nothing. OUT/traces.jsonl holds, for each step of some runs
with two adapters, and each layer: how far the scores of the two are apart, s, and the norm of the
gradient of Q. `minimize` of train.py trains; nothing but rows is kept."""

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

import examples.mean_fusion  # noqa: F401  (adds its kind)
import train
from bert import Bert
from data import get_task
from examples.composing import SlowScores
from experiments.skills import OTHERS, SKILLS, build_tasks
from formats.rows import source_of
from formats.sources import find_adapters
from fusion import FUSIONS, Fusion
from runtime.processes import choose_device, reseed


class FastScaled(SlowScores):
    """Scores over √d, of Q and K at 20 times the rate."""

    factor = 1 / 20

    def softmax(self, q_k):
        return super().softmax(q_k / self.query.in_features**0.5)


class QueryOfText(Fusion):
    """The query of section 3.2: Q f, of the feed-forward output, in place of Q h."""

    def forward(self, f, x, add_norm):
        self.f = f
        return super().forward(f, x, add_norm)

    def textbook(self, h, adapters):
        z = torch.stack([adapter.z(h) for adapter in adapters], 2)  # [B, T, N, d]
        s = self.softmax(torch.einsum("btd,btnd->btn", self.query(self.f), self.key(z)))
        return torch.einsum("btn,btnd->btd", s, self.value(z))


FUSIONS |= {"fast_scaled": FastScaled, "query_of_text": QueryOfText}

ADAPTERS = [*SKILLS, "the", "of", *(name for name in OTHERS if name not in ("the", "of"))]
SEEDS, FEW, CHOSEN = range(8), range(5), [5e-4, 2e-3, 5e-3]
RATES = [1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3]
WIDE = ["attention", "scaled", "slow", "gates"]
NARROW = ["mean", "sum", "value_of_sum"]
# head: a new one on the adapter of `order` alone; own: an adapter of the target, for 30 epochs
ALONE = {"head": [5e-4, 2e-3, 5e-3], "own": [5e-4, 1e-3, 2e-3]}
# {setting: (target, N, training examples, epochs, rates of WIDE, seeds)}
SETTINGS = {
    "both, N = 8, 240 steps": ("both", 8, 480, 8, RATES, SEEDS),
    "both, N = 2": ("both", 2, 240, 6, RATES, SEEDS),
    "asked, N = 2": ("asked", 2, 960, 6, RATES[1:5], FEW),
    "both, N = 8": ("both", 8, 240, 6, RATES, SEEDS),
    "both, N = 4": ("both", 4, 240, 6, RATES, FEW),
}
DEMO, DEMO_SEEDS = "both, N = 8, 240 steps", range(10, 20)
DEMO_WAYS = ["attention", "sum", "mean", "head", "own"]
TRACED = ["attention", "scaled", "slow", "fast_scaled", "query_of_text"]  # N = 2, at 5e-4
SOURCE = "--lr 1e-3 --epochs 2 --batch-size 16 --max-length 40"


def grid():
    """[(setting, way, rate, seed)], a seed of all ways and rates after another"""
    yield from (("both, N = 2", way, 5e-4, seed) for seed in SEEDS for way in TRACED)
    for setting, (_, _, _, _, rates, seeds) in SETTINGS.items():
        for seed in seeds:
            yield from ((setting, way, lr, seed) for way in WIDE for lr in rates)
            yield from ((setting, way, lr, seed) for way in NARROW for lr in CHOSEN)
            if setting not in ("both, N = 4", "both, N = 8"):  # there it is as with N = 2
                yield from ((setting, "head", lr, seed) for lr in ALONE["head"])
            if setting == "both, N = 8, 240 steps" and seed < 2:
                yield from ((setting, "own", lr, seed) for lr in ALONE["own"])


def source_words(out, name, seed, dtype):
    """The command that trains a source: a skill on all 2,400 examples, another one on 800."""
    words = f"--stage adapter --task {name} --data-dir {out}/data --out {out}/{dtype}/{name}-{seed}"
    few = "" if name in SKILLS else " --limit-train 800"
    words = f"{words} --model minilm --seed {seed} --dtype {dtype} --overwrite {SOURCE}{few}"
    return words.split()


def train_source(out, name, seed, dtype):
    torch.set_num_threads(1)
    if not Path(out, dtype, f"{name}-{seed}", "metrics.json").is_file():
        sys.stdout = open(os.devnull, "w")
        train.main(source_words(out, name, seed, dtype))


class Trial:
    """What `minimize` needs of a run, without its files. Traces s of two adapters."""

    def __init__(self, args, model, optimizer, is_traced):
        self.args, self.model, self.optimizer = args, model, optimizer
        self.rank, self.world_size, self.record, self.diverged = 0, 1, {}, None
        self.epoch, self.step, self.best_epoch, self.best_scores, self.best = 1, 0, 0, {}, {}
        self.history, self.trace, self.norms = [], [], {}
        slots = model.bert.slots.items() if is_traced else ()
        self.fusions = {layer: slot.fusion for (layer, _), slot in slots if slot.fusion is not None}
        for layer, fusion in self.fusions.items():
            fusion.query.weight.register_hook(self.keep_norm(layer))

    def keep_norm(self, layer):
        return lambda gradient: self.norms.update({layer: gradient.norm().item()})

    def kept_tensors(self):
        named = self.model.named_parameters()
        return {name: p.detach() for name, p in named if p.requires_grad}

    def after_step(self, loss):
        if self.fusions:
            self.trace.append([self.of_layer(n, f) for n, f in self.fusions.items()])

    def of_layer(self, layer, fusion):
        """[|score of one − score of the other|, s of the first; at [CLS]: s of it; ‖∂Q‖]"""
        s = fusion.s.float().clamp(min=1e-30)  # [B, T, 2]
        gap = (s[..., 0] / s[..., 1]).log().abs().mean().item()
        found = [gap, s[..., 0].mean().item(), s[:, 0, 0].mean().item(), self.norms[layer]]
        return [float(f"{value:.4g}") for value in found]

    def log_epoch(self, scores):
        self.history.append({**scores, "epoch": self.epoch})

    def checkpoint(self):
        pass

    def check_finite(self, what, value):
        if not value < float("inf"):
            raise FloatingPointError(what)


def words_of(out, setting, way, lr, seed, dtype):
    """The words behind `train.py` of a run."""
    target, n, examples, epochs, _, _ = SETTINGS[setting]
    sources, stage = ADAPTERS[:n], f"--stage fusion --fusion {way}"
    if way == "head":
        sources, stage = ["order"], "--stage head"
    if way == "own":
        sources, stage, epochs = [], "--stage adapter", 30
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
    """A run as `train` of train.py has it, up to its files: (row, trace)."""
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
    trial = Trial(args, model, optimizer, setting == "both, N = 2" and lr == 5e-4 and way in TRACED)

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
    return row | {"seconds": round(time.time() - began, 1)}, trial.trace


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
    with ProcessPoolExecutor(jobs, context, max_tasks_per_child=40) as pool:
        sources, futures = {}, {}
        for key in todo:
            needed = [(name, *key[3:]) for name in ADAPTERS[: SETTINGS[key[0]][1]]]
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
    key, (row, trace) = futures.pop(future), future.result()
    if trace:
        append(out / "traces.jsonl", {"key": key, "trace": trace})
    append(out / "rows.jsonl", row)
    print(*key, {n: row.get(n) for n in ("last_test", "best_test", "seconds")}, flush=True)


def demo_rates(out, ways):
    """{way of the demo: the rate with the best development accuracy in seeds 0 and 1}"""
    found = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    best = {}
    for way in ways:
        of = [
            row for row in found if (row["setting"], row["way"]) == (DEMO, way) and row["seed"] < 2
        ]
        mean = {row["lr"]: 0.0 for row in of}
        for row in of:
            mean[row["lr"]] += row.get("best_dev", 0) / 2
        best[way] = max(mean, key=mean.get)
    return best


if __name__ == "__main__":
    out, dtype = Path(sys.argv[1]), str(choose_device("cpu", "auto")[1]).removeprefix("torch.")
    every = [(*key, dtype) for key in grid()]
    traced = [
        key for key in every if key[0] == "both, N = 2" and key[1] in TRACED and key[2] == 5e-4
    ]
    main(out, traced)
    for ways in (DEMO_WAYS[:-1], DEMO_WAYS[-1:]):
        choosing = [key for key in every if key[0] == DEMO and key[1] in ways and key[3] < 2]
        main(out, [key for key in choosing if key[1] != "attention" or 2e-4 <= key[2] <= 2e-3])
        rates = demo_rates(out, ways).items()
        main(out, [(DEMO, way, lr, seed, dtype) for seed in DEMO_SEEDS for way, lr in rates])
    rates = demo_rates(out, DEMO_WAYS).items()
    main(out, [(DEMO, way, lr, seed, "float32") for seed in DEMO_SEEDS for way, lr in rates])
    main(out, every)
