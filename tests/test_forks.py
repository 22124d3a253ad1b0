"""Forks of one file each: what they train is saved, and a run that is read again computes the same;
what no file of a run could hold is refused before the first step."""

from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import adapter
import fusion
import train
from adapter import Head, adapter_modules, add_adapter, register_head
from conftest import cli
from experiments import evaluate
from experiments.load_run import load_run
from fusion import Fusion, add_fusion
from variants.masking import mask

FUSE = "--stage fusion --task rte --epochs 2 --lr 5e-3"


@pytest.fixture(autouse=True)
def registries():
    with patch.dict(train.STAGES), patch.dict(adapter.HEADS), patch.dict(fusion.FUSIONS):
        yield


@pytest.fixture
def run(launch, runs, tmp_path, monkeypatch):
    """run(command): trains, checks that the run, read again, is the model that was trained, in its
    logits and as it was evaluated -> (the trained model, the run's directory)"""
    models, build, out = [], train.build, tmp_path / "run"

    def keep(*values):
        models.append(build(*values))
        return models[-1]

    def run(command, *more):
        needs_adapters = "--adapters" not in command and ("fusion" in command or "joint" in command)
        given = cli(adapters=[runs / "sst2", runs / "pick"]) if needs_adapters else []
        monkeypatch.setattr(train, "build", keep)
        result = launch(f"{command} --limit-dev 20", *given, *more, out=out)
        (model, _) = models[-1]
        again = load_run(out)
        batch = again.batch(again.encode([("red cat", "red"), ("one", "the dog runs"), ("a", "b")]))
        with torch.inference_mode():
            ours, theirs = (m.eval()(batch) for m in (model, train.Model(again.bert, again.head)))
        assert torch.equal(ours, theirs)
        found = evaluate.main([str(out), "--device", "cpu"])
        assert (found["accuracy"], found["loss"]) == (result["accuracy"], result["dev_loss"])
        return model, out

    return run


def changed(model, runs, name):
    """Whether an adapter of `model` is another than that of its run."""
    saved = load_file(runs / name / "adapter.safetensors")
    _, modules = adapter_modules(model.bert, name)
    return not any(torch.equal(modules[0][2].down.weight, tensor) for tensor in saved.values())


def interrupt():
    raise KeyboardInterrupt


# --------------------------------------------------------------------------------------------------
# Stages


def fusion_and_adapters(settings, bert, task, adapters):
    add_fusion(bert, adapters)
    for name in adapters:
        for _, _, module in adapter_modules(bert, name)[1]:
            module.requires_grad_(True)


def adapter_and_biases(settings, bert, task, adapters):
    train.stage_1(settings, bert, task, adapters)
    biases(settings, bert, task, adapters)


def biases(settings, bert, task, adapters):
    for name, p in bert.own_parameters().items():
        if name.endswith("bias"):
            p.requires_grad_(True)


def test_a_stage_that_trains_fusion_and_adapters(run, runs):
    stage = train.Stage("Ψ and Φ", 5e-3, 2, fusion_and_adapters, options_of=("fusion",))
    train.STAGES["joint"] = stage
    model, out = run("--stage joint --task rte")
    assert all(changed(model, runs, name) for name in ("sst2", "pick"))
    assert not (out / "model.safetensors").exists()  # Θ stays as it is


@pytest.mark.parametrize("name, build", [("both", adapter_and_biases), ("biases", biases)])
def test_a_stage_that_trains_some_of_the_encoder(name, build, run, encoder, launch, tmp_path):
    """Its run has an encoder of its own, and the adapter belongs to that."""
    train.STAGES[name] = train.Stage(name, 5e-3, 2, build, options_of=("adapter",))
    model, out = run(f"--stage {name} --task rte")
    assert {"encoder", "head"} <= train.trained_parts(model)
    before, after = (load_bias(source) for source in (encoder, out))
    assert not torch.equal(before, after)
    if name == "both":
        with pytest.raises(ValueError, match="was trained on an encoder with other weights"):
            launch("--stage fusion --task rte", adapters=out, model=encoder, out=tmp_path / "two")


def load_bias(source):
    return train.Bert.from_pretrained(source).layers[0].query.bias


def test_biases_alone_have_an_optimizer():
    p = nn.Parameter(torch.ones(3))
    assert len(train.make_optimizer({"bias": p}, 1e-3, 0.1).param_groups) == 1
    with pytest.raises(ValueError, match="nothing to train"):
        train.make_optimizer({}, 1e-3, 0.1)


# --------------------------------------------------------------------------------------------------
# Heads


class MeanHead(Head):
    """The mean over the real tokens, and parameters of its own names."""

    def __init__(self, config, bert_config):
        super().__init__(config, bert_config)
        d = bert_config.hidden_size
        self.mlp = nn.Sequential(nn.Linear(d, d), nn.Tanh())
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, h, mask):
        assert h.shape[:2] == mask.shape
        mean = (h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.logits(self.mlp(self.scale * mean))


@pytest.mark.parametrize("task", ["rte", "pick"])
def test_a_head_of_its_own(task, launch, encoder, tmp_path):
    """It gets every token with the mask; its parameters come back; and it is loaded by its name."""
    register_head("mean", MeanHead)
    words = f"--stage adapter --task {task} --head mean --epochs 2 --lr 5e-3"
    result = launch(words, out=tmp_path / "run")
    found = evaluate.main([str(tmp_path / "run"), "--device", "cpu"])
    assert (found["accuracy"], found["loss"]) == (result["accuracy"], result["dev_loss"])
    head = load_run(tmp_path / "run").head
    assert type(head) is MeanHead and head.scale != 1
    ids = torch.tensor([[2, 7, 8, 9, 3, 0], [2, 11, 3, 0, 0, 0]]).repeat_interleave(3, 0)
    mask, labels = (ids != 0).long(), torch.zeros(6 // (3 if task == "pick" else 1))
    bert, logits = train.Bert.from_pretrained(encoder).double(), []
    for n in (4, 6):  # padding does not count
        given = {"input_ids": ids, "token_type_ids": 0 * ids, "attention_mask": mask}
        batch = {name: torch.nn.functional.pad(x, (0, n)) for name, x in given.items()}
        logits.append(train.Model(bert, head.double())({**batch, "labels": labels}))
    assert torch.allclose(*logits)
    del adapter.HEADS["mean"]
    with pytest.raises(ValueError, match="a head of the kind 'mean' is not known"):
        load_run(tmp_path / "run")


# --------------------------------------------------------------------------------------------------
# Fusions


class ByExample(Fusion):
    """One softmax for each example, of the mean over its real tokens."""

    file_tag = {"kind": "by_example"}

    def compose(self, h, adapters, layer_input=None):
        _, mask = layer_input
        real = torch.ones_like(h[..., :1]) if mask is None else mask[:, 0, 0, :, None].to(h.dtype)
        z = torch.stack([adapter.z(h, layer_input) for adapter in adapters], 2)  # [B, T, N, d]
        mean = (real * h).sum(1, keepdim=True) / real.sum(1, keepdim=True)  # [B, 1, d]
        scores = torch.einsum("bod,btnd->btn", self.query(mean), self.key(z))
        scores = (real * scores).sum(1, keepdim=True) / real.sum(1, keepdim=True)  # [B, 1, N]
        s = self.weigh(scores)[:, 0]  # [B, N]
        return self.value(torch.einsum("bn,btnd->btd", s, z))


class Scaled(Fusion):
    """A scalar for each adapter, by position, beside the softmax; it knows nothing of masks."""

    file_tag = {"kind": "scaled_sum"}
    order_matters_because = "its scalars belong to the positions of the adapters"

    def __init__(self, name, adapter_names, *values, **config):
        super().__init__(name, adapter_names, *values, **config)
        self.scalar = nn.Parameter(torch.ones(len(adapter_names)))
        self.gate = nn.Linear(1, 1)
        self.deep = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))

    def compose(self, h, adapters, layer_input=None):
        z = torch.stack([adapter.z(h, layer_input) for adapter in adapters], 2)
        z = z * self.deep(self.gate(self.scalar[: len(adapters), None]))
        s = self.weigh(torch.einsum("btd,btnd->btn", self.query(h), self.key(z)))
        return self.value(torch.einsum("btn,btnd->btd", s, z))

    def weigh(self, scores):
        self.weights = scores.softmax(-1).detach()
        return scores.softmax(-1)


class ScaledThroughAttend(Scaled):
    file_tag = {"kind": "scaled_attend"}
    weigh = Fusion.weigh


def test_a_fusion_by_example(run):
    fusion.register("by_example", ByExample)
    model, out = run(f"{FUSE} --fusion by_example")
    again = load_run(out)
    again.bert.double()
    for _, one in fusion.fusions(again.bert):
        one.query.weight *= 100
    batch = again.batch(again.encode([("red cat", "red"), ("one", "the dog runs")]))
    short = {name: batch[name][:1, : batch["attention_mask"][0].sum()] for name in list(batch)[:3]}
    model = train.Model(again.bert, again.head.double())
    alone = model({**short, "labels": batch["labels"][:1]})
    assert torch.allclose(model(batch)[:1], alone)  # whatever it is padded to
    ByExample.mixes_tokens = False  # a promise that it does not keep: the last layer sees [CLS]
    assert not torch.allclose(model(batch)[:1], alone)
    del ByExample.mixes_tokens


@pytest.mark.parametrize("kind", [Scaled, ScaledThroughAttend])
def test_a_fusion_with_parameters_of_its_own(kind, run, launch, runs, at_step, tmp_path):
    """Parameter, Linear and Sequential come back; --resume goes on; a mask is right or refused."""
    fusion.register("own", kind)
    model, out = run(f"{FUSE} --fusion own")
    (_, first), *_ = fusion.fusions(model.bert)
    assert not torch.equal(first.scalar, torch.ones(2))
    again = load_run(out)
    batch = again.batch(again.encode([("red cat", "red"), ("one", "the dog runs")]))
    model, logits = train.Model(again.bert, again.head), []
    mask(again.bert, ["sst2"])
    if kind is Scaled:
        with pytest.raises(ValueError, match="Scaled cannot leave adapters out"):
            model(batch)
        return
    for _ in range(2):  # what is masked has no effect
        logits.append(model(batch))
        for _, _, module in adapter_modules(again.bert, "sst2")[1]:
            module.up.weight.data.normal_()
    assert torch.equal(*logits)
    words, given = (
        f"{FUSE} --fusion own --limit-dev 20 --save-minutes 0",
        [runs / "sst2", runs / "pick"],
    )
    at_step(3, interrupt)
    with pytest.raises(KeyboardInterrupt):
        launch(words, adapters=given, out=tmp_path / "cut")
    launch(words, "--resume", adapters=given, out=tmp_path / "cut")
    file = "model_adapter_fusion.safetensors"
    assert (tmp_path / "cut" / file).read_bytes() == (out / file).read_bytes()


def test_a_state_of_other_parameters_is_refused(launch, runs, at_step, tmp_path):
    """A fork that was changed between an interruption and --resume."""
    fusion.register("own", Scaled)
    given = {"adapters": [runs / "sst2", runs / "pick"], "out": tmp_path / "run"}
    at_step(3, interrupt)
    with pytest.raises(KeyboardInterrupt):
        launch(f"{FUSE} --fusion own --save-minutes 0", **given)

    class Renamed(Scaled):
        def __init__(self, *values, **config):
            super().__init__(*values, **config)
            self.renamed = self.deep
            del self.deep

    fusion.FUSIONS["own"] = Renamed
    with pytest.raises(ValueError, match="trained parameter .*deep.*weight was .*cannot --resume"):
        launch(f"{FUSE} --fusion own --save-minutes 0 --resume", **given)


# --------------------------------------------------------------------------------------------------
# What cannot be saved


def a_prompt(settings, bert, task, adapters):
    bert.prompt = nn.Parameter(torch.zeros(3))


def a_frozen_adapter(settings, bert, task, adapters):
    train.stage_1(settings, bert, task, adapters)
    bert.requires_grad_(False)


def an_adapter_elsewhere(settings, bert, task, adapters):
    train.stage_1(settings, bert, task, adapters)
    bert.layers[0].adapters = nn.ModuleDict({"lost": nn.Linear(2, 2)})


class PoolerHead(Head):
    def __init__(self, config, bert_config):
        super().__init__({**config, "use_pooler": True}, bert_config)


@pytest.mark.parametrize(
    "build, message",
    [
        (a_prompt, "no place for the parameter prompt"),
        (a_frozen_adapter, "'rte' is neither trained nor one of --adapters"),
        (an_adapter_elsewhere, "adapters.lost.weight would be trained, and no file"),
    ],
)
def test_what_cannot_be_saved_is_refused(build, message, launch, tmp_path):
    """Before the first step, with nothing written."""
    train.STAGES["lost"] = train.Stage("lost", 1e-3, 1, build, options_of=("adapter",))
    with pytest.raises(ValueError, match=message):
        launch("--stage lost --task rte", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_trained_pooler_is_refused(launch, tmp_path):
    register_head("pooler", PoolerHead)
    with pytest.raises(ValueError, match="head.pooler.weight would be trained, and no file"):
        launch("--stage adapter --task rte --head pooler", out=tmp_path / "run")


def test_an_adapter_that_is_added_beside_those_that_are_fused(run):
    """It is trained together with Ψ, and saved with the others."""

    def build(settings, bert, task, adapters):
        add_adapter(bert, "own", adapter.AdapterConfig.pfeiffer())
        own = [module for _, _, module in adapter_modules(bert, "own")[1]]
        add_fusion(bert, [*adapters, "own"])
        for module in own:
            module.requires_grad_(True)

    train.STAGES["joint"] = train.Stage("joint", 5e-3, 2, build, options_of=("fusion",))
    _, out = run("--stage joint --task rte")
    assert {path.name for path in (out / "adapters").iterdir()} == {"sst2", "pick", "own"}
