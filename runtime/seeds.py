"""--seeds: one command, a run for every seed, and what they have in common."""

import argparse
import statistics

from formats.files import write_json


def each_seed(args, one):
    """
    one(args) for every seed of --seeds, in OUT/seed-N. Returns the closing line's dictionary: of
    each score the mean and the sample deviation. It is also OUT/seeds.json. Raises ValueError if
    OUT is a run itself.
    """
    if (args.out / "config.json").exists():
        raise ValueError(f"--out {args.out} is itself a run: --seeds needs another directory")
    results = []
    for seed in args.seeds:
        own = argparse.Namespace(**{**vars(args), "seed": seed, "out": args.out / f"seed-{seed}"})
        own.seeds = None
        print(f"seed {seed}:", flush=True)
        try:
            results.append(one(own))
        except KeyboardInterrupt as e:
            message = "interrupted, the same command goes on from here with --resume"
            raise KeyboardInterrupt(message) from e
    first = results[0]
    same = ("stage", "task", "model", "train_examples", "dev_examples", "majority_class_accuracy")
    summary = {name: first[name] for name in same} | {"seeds": args.seeds}
    titles = [n for n in first if n not in same and isinstance(first[n], float) and n != "seconds"]
    for name in titles:
        values = [result[name] for result in results]
        spread = statistics.stdev(values) if len(values) > 1 else None
        summary[name] = {"mean": statistics.mean(values), "deviation": spread, "values": values}
        shown = "" if spread is None else f" ± {spread:.4f}"
        print(f"{name.replace('_', ' '):>14}  {summary[name]['mean']:.4f}{shown}")
    summary |= {"seconds": round(sum(result["seconds"] for result in results), 2)}
    summary["out"] = str(args.out)
    write_json(args.out / "seeds.json", summary)
    return summary
