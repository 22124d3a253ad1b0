"""The demo's tasks, the runs that it plans, and what it concludes from their rows."""

import json
import random
import sys
from collections import Counter
from unittest.mock import patch

import pandas as pd
import pytest

import train
from experiments import demo, skills, study
from experiments.grid import with_needs
from fusion import FUSIONS

WORDS = "a list of the items is given back in this function to every array with shape".split()


def bag(words):
    return tuple(sorted(words))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(the demo's directory with its tasks, made of random sentences; {sentence: its name})"""
    rng, out = random.Random(0), tmp_path_factory.mktemp("demo")
    bags = {bag(rng.sample(WORDS, rng.randint(5, 12))) for _ in range(500)}
    texts = [" ".join(rng.sample(one, len(one))) for one in sorted(bags)]
    names = {text: rng.choice(["sum", "eye of two", "tests", "is nan"]) for text in texts}
    found = [(name.replace(" ", "_"), [text]) for text, name in names.items()]
    with patch.object(skills, "docstrings", lambda library: found):
        skills.build_tasks(out / "data", random.Random(0))
    return out, names


def test_what_a_label_says(made):
    """Each label, and in `asked` each question with each answer, is equally frequent."""
    out, names = made
    of_words = {bag(text.split()): name for text, name in names.items()}
    every = [*skills.SKILLS, *skills.TARGETS, *skills.OTHERS]
    tests = [(task, "test") for task in skills.TARGETS]  # of sentences that are in no other split
    for task, split in [*((task, "train") for task in every), *tests]:
        counts = Counter()
        for line in (out / "data" / task / f"{split}.jsonl").read_text().splitlines():
            text, name, label = json.loads(line).values()
            assert (len(text.split()) > 10) == (split == "test")
            question, _, name = name.rpartition(": ")
            counts[question, label] += 1
            faults = of_words[bag(text.split())] != name, text not in names
            said = {n: two[f] for (n, two), f in zip(skills.SKILLS.items(), faults, strict=True)}
            if task == "both":
                assert label == ", ".join(said.values())
            elif task == "asked":
                assert (label == "yes") == faults[["match", "order"].index(question)]
            elif task in said:
                assert label == said[task]
            else:
                assert not any(faults) and (label == "yes") == skills.OTHERS[task](text, name)
        assert len(counts) == (4 if task in skills.TARGETS else 2)
        assert len({*counts.values()}) == 1


@pytest.mark.parametrize("target, systems", [("both", 5), ("asked", 3)])
def test_its_runs(made, monkeypatch, target, systems):
    """The systems with each seed, and the sources; all ways to compose have as many epochs."""
    monkeypatch.delitem(sys.modules, "examples.composing", raising=False)  # --import runs it
    with patch.dict(FUSIONS), patch.dict(train.STAGES), patch.dict(study.SYSTEMS):
        args = demo.parse(made[0], target)
        cells = with_needs(study.cells_of(args, args.seeds).values())
        options = [cell.options() for cell in cells.values()]
    others = "the of long two_words".split() if target == "both" else ()
    sources = [*skills.SKILLS, *others]
    counts = dict.fromkeys(sources, 1) | {target: systems * len(demo.SEEDS)}
    assert Counter(one.task for one in options) == counts
    assert len({one.epochs for one in options if one.stage == "fusion"}) == 1
    assert all(directory.name in cells for directory in demo.fusions(made[0], target))


@pytest.mark.parametrize("second, is_locked", [(0.60, True), (0.62, False)])
def test_its_verdict(second, is_locked):
    """Below a head on one skill and five points, a seed has locked."""
    table = {"head_on_order": [0.54, 0.58], "fusion": [0.76, second]}
    rows = [[n, seed, v] for n, of in table.items() for seed, v in enumerate(of)]
    said = demo.verdict(pd.DataFrame(rows, columns=["system", "seed", "accuracy"]))
    assert said.startswith(f"Attention, by seed: 76.0%, {second:.1%}.")
    assert ("Seed 1 is hardly better" in said) == is_locked and "Seed 0" not in said


@pytest.mark.parametrize("lead, said", [(9, "even, head"), (0, "head")])
def test_what_ten_seeds_have_earned(monkeypatch, lead, said):
    """Attention leads `sum` by 8, 9, or 10 points; `even`, too, or not at all."""
    rows = [["sum", seed, "float32", 0.40] for seed in range(10, 19)]
    rows += [["head_on_order", seed, "float32", 0.40] for seed in range(10, 19)]
    rows += [["even", seed, "float32", 0.49 - lead / 100] for seed in range(10, 19)]
    rows += [["fusion", seed, "float32", 0.48 + seed % 3 / 100] for seed in range(10, 19)]
    columns = ["system", "seed", "dtype", "test_accuracy"]
    monkeypatch.setattr(pd, "read_csv", lambda _: pd.DataFrame(rows, columns=columns))
    found = demo.earned()
    assert f"float32: attention is clearly ahead of {said}_on_order, sum.\n" in found
    assert ("Its lead is not clear over even: 0.00" in found) == (lead == 0)
    assert found.endswith("\n0 of its 9 seeds lock.")
