"""A run warns of adapters that were trained on its development examples."""

from types import SimpleNamespace

import numpy as np

from conftest import cli
from runtime.seen import SIZE, share_seen, sketch


def test_a_share_is_estimated():
    hashes = np.random.default_rng(0).integers(0, 2**64, 30_000, np.uint64).tolist()
    examples = [SimpleNamespace(hash=number) for number in hashes]
    for seen, others, share in ((20_000, 10_000, 2 / 3), (500, 1000, 1 / 3), (10_000, 0, 1)):
        other = [*examples[:seen], *examples[20_000 : 20_000 + others]]
        assert abs(share_seen(other, sketch(examples[:20_000])) - share) < 0.05
    small = sketch(examples[: SIZE // 2])
    assert share_seen(examples[:SIZE], small) == 0.5 and share_seen(examples[SIZE:], small) == 0
    assert share_seen(examples[:100], sketch(examples)) == 0  # about three can be compared
    assert share_seen(examples[:10], small) == 1  # the sketch is the whole set


def test_what_adapters_have_seen(launch, runs, data_dir, tmp_path, capsys):
    """Also of a copy that a fusion keeps; training examples are no reason for a warning."""
    train_file, dev_file = (data_dir / "rte" / f"{name}.jsonl" for name in ("train", "validation"))
    dev, words = tmp_path / "dev", "--stage adapter --task rte --epochs 1"
    launch(words, train_file=dev_file, dev_file=train_file, out=dev)
    fuse = "--stage fusion --task rte --epochs 1"
    launch(fuse, adapters=[dev, runs / "sst2"], out=tmp_path / "fusion")
    for adapter, warned in (
        (dev, True),
        (tmp_path / "fusion/adapters/rte", True),
        (runs / "rte", False),
        (runs / "sst2", False),
    ):
        capsys.readouterr()
        out = tmp_path / "head"
        launch("--stage head --task rte --epochs 1 --overwrite", *cli(adapters=[adapter]), out=out)
        text = "WARNING: adapter rte was TRAINED on 100% of this run's development examples"
        assert (text in capsys.readouterr().out) == warned
