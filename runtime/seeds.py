"""--seeds: one command, a run for every seed, and the mean and deviation of their scores."""

import math
from dataclasses import replace

from formats.files import read_json, write_json
from runtime.record import is_run


def mean_and_deviation(values):
    """(mean, sample deviation) of numbers; the deviation of one, and both of none, are None."""
    import pandas  # when it is first needed: it takes half a second

    series = pandas.Series([*values], dtype=float)
    found = float(series.mean()), float(series.std())
    return tuple(None if math.isnan(value) else value for value in found)


def each_seed(settings, one):
    """
    one(settings) for every seed of --seeds, in OUT/seed-N. Returns the closing line's dictionary,
    of each score the mean and the sample deviation, which is also written to OUT/seeds.json. Raises
    ValueError if OUT is a run itself, or holds another command's seeds.json.
    """
    out, path = settings.out, settings.out / "seeds.json"
    if is_run(out):
        raise ValueError(f"--out {out} is itself a run: --seeds needs another directory")
    names = {"stage": settings.stage, "task": settings.task}
    if path.exists() and not settings.overwrite:
        old = read_json(path)
        if not settings.resume or {name: old.get(name) for name in names} != names:
            raise ValueError(f"{path} is there already: choose another --out, or --overwrite it")
    results = []
    for seed in settings.seeds:
        print(f"seed {seed}:", flush=True)
        try:
            results.append(one(replace(settings, seeds=(), seed=seed, out=out / f"seed-{seed}")))
        except KeyboardInterrupt as e:
            message = "interrupted, the same command goes on from here with --resume"
            raise KeyboardInterrupt(message) from e
    first = results[0]
    same = "stage task model train_examples dev_examples majority_class_accuracy".split()
    summary = {name: first[name] for name in same} | {"seeds": list(settings.seeds)}
    titles = [n for n in first if n not in same and isinstance(first[n], float) and n != "seconds"]
    for name in titles:
        values = [result[name] for result in results]
        mean, deviation = mean_and_deviation(values)
        summary[name] = {"mean": mean, "deviation": deviation, "values": values}
        shown = "" if deviation is None else f" ± {deviation:.4f}"
        print(f"{name.replace('_', ' '):>14}  {mean:.4f}{shown}")
    summary |= {"seconds": round(sum(result["seconds"] for result in results), 2)}
    summary["out"] = str(out)
    write_json(path, summary)
    return summary
