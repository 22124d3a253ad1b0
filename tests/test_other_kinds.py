"""What experiments do with a kind of adapter or fusion that AdapterHub's library does not have, as
a fork may register one: what they cannot do is refused in one line that names the kind."""

from dataclasses import dataclass

import pytest

from adapter import ADAPTERS, KINDS, AdapterConfig
from experiments import evaluate, prune, publish
from fusion import FUSIONS, Fusion


@dataclass(frozen=True)
class ForkConfig(AdapterConfig):
    """A bottleneck adapter under another name."""

    architecture = "fork"

    @classmethod
    def fork(cls, **changes):
        return cls(**changes)


class EvenFusion(Fusion):
    """Every adapter has the same weight, whatever the scores."""

    options = {"kind": "even"}

    def attend(self, scores):
        return super().attend(0 * scores)


@pytest.fixture(scope="module")
def others(launch, runs, tmp_path_factory):
    """Runs: an adapter of the other kind, a fusion of it and another one, the other fusion of
    AdapterHub's adapters."""
    out, options = tmp_path_factory.mktemp("others"), ["--epochs", 1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KINDS, "fork", ForkConfig)
        patch.setitem(ADAPTERS, "fork", ForkConfig.fork)
        patch.setitem(FUSIONS, "even", EvenFusion)
        for task in ("rte", "sst2"):
            kind = ["--adapter", "fork", "--out", out / task]
            launch("--stage", "adapter", "--task", task, *options, *kind)
        fusion = ["--stage", "fusion", "--task", "rte", *options, "--adapters"]
        launch(*fusion, out / "rte", out / "sst2", "--out", out / "fused")
        even = ["--fusion", "even", "--out", out / "even"]
        launch(*fusion, runs / "rte", runs / "sst2", *even)
        yield out


@pytest.mark.parametrize(
    "main, run, say",
    [
        (publish.main, "rte", "AdapterHub's library has no adapters like rte (ForkConfig)"),
        (publish.main, "fused", "AdapterHub's library has no adapters like rte (ForkConfig)"),
        (publish.main, "even", "AdapterHub's library has no fusions like this one (EvenFusion)"),
        (prune.main, "fused", "adapters like rte (ForkConfig) cannot be pruned"),
        (prune.main, "even", "fusions like this one (EvenFusion) cannot be pruned"),
    ],
)
def test_another_kind_is_refused_by_name(others, tmp_path, refused, main, run, say):
    options = ["--keep", "1"] if main is prune.main else []
    refused([others / run, *options, "--out", tmp_path / "out"], say, main=main)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("run", ["rte", "fused", "even"])
def test_but_it_is_evaluated(others, capsys, run):
    evaluate.main([str(others / run), "--device", "cpu"])
    assert "examples right" in capsys.readouterr().out
