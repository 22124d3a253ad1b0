"""Runs say which of their examples the adapters have seen."""

import shutil

import numpy as np

from conftest import cli
from runtime.record import read_record
from runtime.seen import SIZE, share_seen, sketch


def test_a_share_is_estimated():
    hashes = np.random.default_rng(0).integers(0, 2**64, 30_000, np.uint64)
    for seen, others, share in ((20_000, 10_000, 2 / 3), (500, 1000, 1 / 3), (10_000, 0, 1)):
        other = np.concatenate([hashes[:seen], hashes[20_000 : 20_000 + others]])
        assert abs(share_seen(other, sketch(hashes[:20_000])) - share) < 0.05
    small = sketch(hashes[: SIZE // 2])
    assert share_seen(hashes[:SIZE], small) == 0.5 and share_seen(hashes[SIZE:], small) == 0
    assert share_seen(hashes[:100], sketch(hashes)) is None  # of 30,000: about three are compared
    assert share_seen(hashes[:10], small) == 1  # the sketch is the whole set


def test_what_adapters_have_seen(launch, runs, data_dir, tmp_path, capsys):
    """Some of the training examples, the development set, or it is unknown; and a copy that a
    fusion keeps says the same."""
    train_file, dev_file = (data_dir / "rte" / f"{name}.jsonl" for name in ("train", "validation"))
    words, half, dev = "--stage adapter --task rte --epochs 1", tmp_path / "half", tmp_path / "dev"
    launch(words, "--limit-train", 48, out=half)
    launch(words, train_file=dev_file, dev_file=train_file, out=dev)
    bare = shutil.copytree(half, tmp_path / "bare")
    (bare / "config.json").unlink()
    for adapter, share, said in (
        (half, (0.5, 0.0), "note: adapters that have seen this run's training examples: rte 50%"),
        (dev, (0.0, 1.0), "WARNING: adapters that were TRAINED on this run's development"),
        (bare, (None, None), "note: adapters whose training examples are not recorded: rte"),
        (runs / "fusion-rte/adapters/rte", (1.0, 0.0), "training examples: rte 100%"),
        (runs / "sst2", (0.0, 0.0), None),
    ):
        capsys.readouterr()
        out, allow = tmp_path / "head", "--overwrite"
        launch("--stage head --task rte --epochs 1", *cli(allow, adapters=[adapter]), out=out)
        printed = capsys.readouterr().out
        assert said in printed if said else "have seen this" not in printed
        (found,) = read_record(out).loaded_adapters.values()
        assert (found.seen_train, found.seen_dev) == share
