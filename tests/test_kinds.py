"""Every kind of adapter, fusion, head, encoder and task, those of examples/ and the forks below
included, has the same properties. A new kind is tested by being in its dictionary."""

import argparse
import contextlib
import copy
import importlib
import signal
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

import child
import train
from adapter import (
    ADAPTERS,
    HEADS,
    Adapter,
    AdapterConfig,
    Head,
    adapter_modules,
    add_adapter,
    load_adapter,
    save_adapter,
)
from bert import ENCODERS, Bert, activate
from conftest import WORDS, assert_equal, cli, randomize, tiny_encoder
from data import TASKS
from experiments.load_run import load_run
from fusion import (
    FUSIONS,
    Fusion,
    add_fusion,
    fusion_regularization,
    fusions,
    load_fusion,
    save_fusion,
)
from runtime.record import write_run
from runtime.scores import CLASS_SCORES


class OwnConfig(AdapterConfig):
    def modules(self, bert):
        d = bert.config.hidden_size
        return {key: Own(self, d, self.bottleneck_size(d, 0)) for key in super().modules(bert)}


class Own(Adapter):
    """It trains U alone, and its z, with a constant in a buffer, is no bottleneck's."""

    def __init__(self, *values):
        super().__init__(*values)
        self.down.requires_grad_(False)
        self.register_buffer("factor", torch.tensor([4.0]), persistent=False)

    def z(self, h, layer_x=None, mask=None):
        return (self.factor * super().z(h)).to(h.dtype)


class ByExample(Fusion):
    """One softmax for each example, of the mean over its real tokens; with an option and parameters
    of its own, one of them a scalar for each adapter."""

    def __init__(self, adapter_names, hidden_size, dropout, power=1.0):
        super().__init__(adapter_names, hidden_size, dropout)
        self.power = power
        self.scalar = nn.Parameter(torch.ones(len(adapter_names)))
        self.deep = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))

    def forward(self, f, x, add_norm, layer_x=None, mask=None):
        adapters = [add_norm.adapters[name] for name in self.adapter_names]
        h, residual = adapters[-1].h_and_residual(f, x, add_norm.norm)
        z = torch.stack([adapter.z(h, layer_x, mask) for adapter in adapters], 2)  # [B, T, N, d]
        z = z * self.deep(self.scalar[:, None])
        scores = torch.einsum("btd,btnd->btn", self.query(h), self.key(z))
        real = torch.ones_like(h[..., :1]) if mask is None else mask[:, 0, 0, :, None]
        scores = (real * scores).sum(1, keepdim=True) / real.sum(1, keepdim=True)
        s = self.softmax(self.power * scores)  # [B, 1, N]
        o = self.value((s[..., None] * z).sum(2))
        return adapters[-1].close(o + residual, x, add_norm.norm)


class MeanHead(Head):
    """It reads the mean over the real tokens."""

    def __init__(self, config, bert_config):
        super().__init__(config, bert_config)
        self.mlp = nn.Sequential(nn.Linear(bert_config.hidden_size, bert_config.hidden_size))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, h, mask):
        mean = (h * mask[..., None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None]
        return super().forward(self.mlp(self.scale * mean))


EXAMPLES = sorted(path.stem for path in Path(train.__file__).parent.glob("examples/[!_]*.py"))
with patch.dict(ADAPTERS), patch.dict(FUSIONS), patch.dict(HEADS), patch.dict(TASKS):
    for name in EXAMPLES:
        importlib.import_module(f"examples.{name}")
    ADAPTERS["own"], FUSIONS["by_example"], HEADS["mean"] = OwnConfig, ByExample, MeanHead
    KINDS = [(table, dict(table)) for table in (ADAPTERS, FUSIONS, HEADS, TASKS)]
ADAPTER_KINDS, FUSION_KINDS, HEAD_KINDS, EVERY_TASK = (kinds for _, kinds in KINDS)


@pytest.fixture(autouse=True, scope="module")
def examples():
    """The other tests know nothing of these kinds."""
    with contextlib.ExitStack() as stack:
        for table, kinds in KINDS:
            stack.enter_context(patch.dict(table, kinds))
        yield


BOTTLENECKS = ("pfeiffer", "houlsby", "bapna")
WITHOUT_Z = ("houlsby_recipe", "lora")  # which cannot be fused
FUSED = [kind for kind in ADAPTER_KINDS if kind not in WITHOUT_Z]
every_adapter = pytest.mark.parametrize("kind", ADAPTER_KINDS)
every_fused_adapter = pytest.mark.parametrize("kind", FUSED)
FUSION_FIELDS = {"by_example": {"power": 2.0}}
# where a kind has such fields, the second and the third adapter differ from the first
VARIED = {
    "a": {},
    "b": {"reduction_factor": 4, "size": 12, "num_heads": 3},
    "c": {"reduction_factor": 8, "non_linearity": "gelu"},
}
TASK_KINDS = [EVERY_TASK[name] for name in ("mnli", "social_i_qa", "sts_b")]  # 3, 3 and 1 outputs


def new_bert(encoder, kind, names="ab", dtype=torch.float64, device="cpu"):
    """The tiny encoder with adapters of one kind and different weights."""
    torch.manual_seed(1)
    bert = Bert.from_pretrained(encoder).to(device, dtype)
    for name in names:
        fields = vars(ADAPTERS[kind]()).keys() & VARIED[name].keys()
        add_adapter(bert, name, ADAPTERS[kind](**{field: VARIED[name][field] for field in fields}))
    randomize(bert, ".adapters.")
    return bert


def fuse(bert, names, fusion_kind):
    """A new fusion with such weights."""
    add_fusion(bert, names, FUSIONS[fusion_kind], **FUSION_FIELDS.get(fusion_kind, {}))
    randomize(bert, ".fusion.")


def new_head(name, task, bert):
    return train.new_head(argparse.Namespace(head=name), task, bert)


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """{kind: directory} of a tiny encoder of every kind"""
    root = tmp_path_factory.mktemp("encoders")
    for kind in ENCODERS:
        (root / kind).mkdir()
    return {kind: tiny_encoder(kind, root / kind) for kind in ENCODERS}


def alone_and_fused(bert, kind):
    """None for the adapter that is active now, then each kind of fusion once it is."""
    yield None
    for fusion_kind in FUSIONS if kind in FUSED else ():
        fuse(bert, "ab", fusion_kind)
        yield fusion_kind


BATCH = ("input_ids", "token_type_ids", "attention_mask")


def inputs(padding=0):
    """input_ids, token_type_ids, attention_mask [3, 7 + padding]; lengths 7, 4 and 2"""
    torch.manual_seed(2)
    ids = torch.randint(5, 5 + len(WORDS), (3, 7))
    mask = (torch.arange(7) < torch.tensor([7, 4, 2])[:, None]).long()
    given = ids * mask, torch.randint(0, 2, (3, 7)) * mask, mask
    return [torch.nn.functional.pad(tensor, (0, padding)) for tensor in given]


def batch_of(padding=0):
    return dict(zip(BATCH, inputs(padding), strict=True))


def close(ours, theirs):
    return torch.allclose(ours, theirs, rtol=1e-9, atol=1e-11)


def outputs_and_gradients(bert, given):
    torch.manual_seed(3)  # the same is dropped
    h = bert(*given)
    trained = [p for p in bert.parameters() if p.requires_grad]
    return [h, *torch.autograd.grad(h.pow(3).sum(), trained)]


@every_fused_adapter
@pytest.mark.parametrize("fusion_kind", FUSION_KINDS)
@pytest.mark.parametrize("names", ["ab", "abc"])
def test_the_form_that_is_used_is_the_textbooks(encoder, kind, fusion_kind, names):
    """With many tokens and few, with dropout, and in any order of the adapters."""
    bert = new_bert(encoder, kind, names)
    fuse(bert, names, fusion_kind)
    textbook = copy.deepcopy(bert)
    for fusion in fusions(textbook).values():
        fusion.low_rank = fusion.textbook
    many = inputs()
    for training in (False, True):
        for given in (many, [tensor[1:2, :4] for tensor in many]):
            both = [outputs_and_gradients(b.train(training), given) for b in (bert, textbook)]
            assert all(map(close, *both))
            for key, fusion in fusions(bert).items():
                assert close(fusion.s, fusions(textbook)[key].s)
    h = bert.eval()(*many)
    sums = torch.stack([fusion.s.sum(-1) for fusion in fusions(bert).values()])
    assert close(sums, torch.ones_like(sums))
    if fusion_kind != "by_example":  # whose scalars belong to the positions of the adapters
        add_fusion(bert, names[::-1], FUSIONS[fusion_kind])
        for key, fusion in fusions(bert).items():
            fusion.load_state_dict(fusions(textbook)[key].state_dict())
        assert close(bert(*many), h)
    activate(bert)  # the adapters do speak
    assert not torch.allclose(bert(*many), h, atol=1e-3)


class Drop(nn.Module):
    """Dropout that was drawn before."""

    def __init__(self, kept):
        super().__init__()
        self.kept = kept

    def forward(self, scores):
        return scores * self.kept


@every_fused_adapter
@pytest.mark.parametrize("training", [False, True])
def test_leaving_adapters_out(quiet_encoder, kind, training, monkeypatch):
    """A fusion over the other names with the same Q, K and V equals one with scores of -∞, of
    which dropout in training makes no NaN."""
    bert = new_bert(quiet_encoder, kind, "abc")
    fuse(bert, "abc", "attention")
    fewer = copy.deepcopy(bert)
    add_fusion(fewer, "ac")
    kept = 2.0 * torch.randint(0, 2, (3, 7, 3)) if training else torch.ones(3, 7, 3)
    left_out = torch.tensor([False, True, False])
    for key, fusion in fusions(bert).items():
        fusions(fewer)[key].load_state_dict(fusion.state_dict())
        fusion.dropout, fusions(fewer)[key].dropout = Drop(kept), Drop(kept[..., ~left_out])
    theirs = outputs_and_gradients(fewer, inputs())
    softmax = Fusion.softmax
    monkeypatch.setattr(
        Fusion, "softmax", lambda self, x: softmax(self, x.masked_fill(left_out, -torch.inf))
    )
    ours = outputs_and_gradients(bert, inputs())
    assert (ours[0] - theirs[0]).abs().max() < 1e-12 and all(map(close, ours, theirs))
    for key, fusion in fusions(bert).items():
        assert close(fusion.s[..., ~left_out], fusions(fewer)[key].s)
    monkeypatch.undo()
    assert not torch.allclose(bert(*inputs()), ours[0], atol=1e-3)


class Twice(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("what", ["z", "a layer"])
def test_a_fusion_checks_itself(encoder, what, tmp_path, monkeypatch):
    """What is edited in an adapter is refused where the fusion's faster form would not see it."""
    bert = new_bert(encoder, "pfeiffer")
    add_fusion(bert, "ab")
    save_fusion(bert, tmp_path)
    if what == "z":
        z = Adapter.z
        monkeypatch.setattr(Adapter, "z", lambda self, h, *rest: 0.5 * z(self, h, *rest))
    else:
        for adapter in adapter_modules(bert, "b").values():
            adapter.up.__class__ = Twice
    for make in (lambda: add_fusion(bert, "ab"), lambda: load_fusion(bert, tmp_path)):
        with pytest.raises(ValueError, match="low_rank no longer computes"):
            make()


def test_what_cannot_be_fused_is_refused_by_name(encoder):
    """And the fusion that is there stays; adapters of different kinds can be mixed."""
    bert = new_bert(encoder, "pfeiffer", "a")
    problems = {"houlsby": "different locations", **dict.fromkeys(WITHOUT_Z, "no output z")}
    for kind in ADAPTERS:
        add_adapter(bert, kind, ADAPTERS[kind]())
        before = fusions(bert)
        if kind in problems:
            with pytest.raises(
                ValueError, match=f"{kind}.*{problems[kind]}|{problems[kind]}.*{kind}"
            ):
                add_fusion(bert, ["a", kind])
            assert fusions(bert) == before
        else:
            add_fusion(bert, ["a", kind])
            assert bert(*inputs()).isfinite().all()


def test_the_last_adapter_decides_what_all_read(encoder):
    """As in the reference."""
    bert, outputs = Bert.from_pretrained(encoder), []
    add_adapter(bert, "a", AdapterConfig(original_ln_before=False))
    add_adapter(bert, "b", AdapterConfig(reduction_factor=8))
    for names in ("ab", "ba"):
        torch.manual_seed(0)
        add_fusion(bert, names)
        outputs.append(bert(*inputs()))
    assert not torch.allclose(*outputs, atol=1e-3)


@every_adapter
def test_saved_and_loaded_bit_for_bit(encoder, kind, tmp_path):
    bert = new_bert(encoder, kind, dtype=torch.float32)
    for name in "ab":
        save_adapter(bert, name, tmp_path / name)
        write_run(tmp_path / name, {"options": {"adapter": kind}, "encoder": bert.sha256})
    for fusion_kind in alone_and_fused(bert, kind):
        again = Bert.from_pretrained(encoder)
        assert [load_adapter(again, tmp_path / name) for name in "ab"] == ["a", "b"]
        if fusion_kind is None:
            activate(again, "b")
        else:
            fields = FUSION_FIELDS.get(fusion_kind, {})
            save_fusion(bert, tmp_path / "fusion")
            options = {"fusion": fusion_kind, "fusion_config": fields}
            write_run(tmp_path / "fusion", {"options": options})
            load_fusion(again, tmp_path / "fusion")
            assert {type(fusion) for fusion in fusions(again).values()} == {FUSIONS[fusion_kind]}
        assert not any(p.requires_grad for p in again.parameters())
        assert torch.equal(bert(*inputs()), again(*inputs()))
        ours, theirs = bert.state_dict(), again.state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours.keys() | theirs.keys())


@every_adapter
def test_exactly_what_is_new_is_trained(encoder, kind):
    """A step moves the adapter, then the fusion, and nothing else by a single bit."""
    bert = new_bert(encoder, kind, dtype=torch.float32)
    for fusion_kind in alone_and_fused(bert, kind):
        part = ".fusion." if fusion_kind else ".adapters.b."
        new = {name for name, _ in bert.named_parameters() if part in name}
        if kind == "own" and not fusion_kind:
            new = {name for name in new if ".down." not in name}
        if fusion_kind == "mean":
            new = {name for name in new if ".value." in name}
        trained = {name: p for name, p in bert.named_parameters() if p.requires_grad}
        assert trained.keys() == new
        before = {name: p.detach().clone() for name, p in bert.named_parameters()}
        (bert(*inputs()).pow(3).sum() + fusion_regularization(bert)).backward()
        torch.optim.AdamW(trained.values(), 0.1).step()
        changed = {n for n, p in bert.named_parameters() if not torch.equal(p, before[n])}
        assert changed == new


@torch.no_grad()
@every_adapter
@pytest.mark.parametrize("encoder_kind", ENCODERS)
def test_padding_other_examples_and_the_cls_shortcut_change_nothing(encoders, encoder_kind, kind):
    bert = new_bert(encoders[encoder_kind], kind)
    heads = [(name, new_head(name, task, bert).double()) for name in HEADS for task in TASK_KINDS]
    for fusion_kind in alone_and_fused(bert, kind):
        ids, types, mask = inputs()
        h, long = bert(ids, types, mask), bert(*inputs(padding=9))[:, :7]
        assert close(h[mask.bool()], long[mask.bool()])
        assert close(h[1:2, :4], bert(ids[1:2, :4], types[1:2, :4], mask[1:2, :4]))
        is_built_in = kind in BOTTLENECKS and fusion_kind in (None, "attention")
        is_built_in = is_built_in and encoder_kind in ("bert", "roberta")
        for name, head in heads:
            model = train.Model(bert, head).eval()
            assert model.reads_cls_only() == (is_built_in and name == "cls")
            for padding in (0, 5):
                ours = model(batch_of(padding))
                assert torch.allclose(ours, head(h, mask).float(), atol=1e-6)


# (stage, kind of adapter, kind of fusion) as train.py combines them
STEPS = [("head", None, None), ("full", None, None)]
STEPS += [("adapter", kind, None) for kind in ADAPTER_KINDS]
STEPS += [("fusion", kind, fusion_kind) for kind in FUSED for fusion_kind in FUSION_KINDS]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("stage, kind, fusion_kind", STEPS, ids=str)
def test_a_step_in_bf16(encoder, stage, kind, fusion_kind, device):
    """`meta` is a device that computes nothing, mixes with no other, and has no autocast."""
    bert = new_bert(encoder, kind, "ab" if kind else "", torch.float32, device)
    if stage == "fusion":
        fuse(bert, "ab", fusion_kind)
    if stage == "full":
        bert.requires_grad_(True)
    args, dtype = argparse.Namespace(dtype="bfloat16"), torch.bfloat16
    every = [(head, task) for head in HEADS for task in TASK_KINDS]
    for name, task in every if stage == "head" else every[:1]:
        model = train.Model(bert, new_head(name, task, bert)).train()
        if device == "cpu":
            train.hold_frozen_in(model, dtype)
        examples = 1 if task.is_multiple_choice else 3
        labels = torch.zeros(examples, dtype=torch.float if len(task.labels) == 1 else torch.long)
        with train.autocast(args, bert.device) if device == "cpu" else contextlib.nullcontext():
            logits = model(batch_of())
        assert logits.dtype == torch.float32 and logits.device.type == device
        assert task.predict(logits).shape == labels.shape
        (task.loss(logits, labels.to(device)) + fusion_regularization(bert)).backward()
        trained = [p for p in model.parameters() if p.requires_grad]
        gradients = [p.grad for p in trained if p.grad is not None]
        assert gradients and {p.dtype for p in (*trained, *gradients)} == {torch.float32}
        assert {gradient.device.type for gradient in gradients} == {device}
        assert device == "meta" or all(gradient.isfinite().all() for gradient in gradients)
    held = {p.dtype for p in bert.own_parameters().values()}
    assert held == {dtype if device == "cpu" and stage != "full" else torch.float32}


COMMANDS = {kind: f"--stage adapter --task sst2 --adapter {kind}" for kind in ADAPTER_KINDS}
COMMANDS |= {f"fusion {f}": f"--stage fusion --task sst2 --fusion {f}" for f in FUSION_KINDS}
COMMANDS |= {f"task {name}": f"--stage head --task {name}" for name in ("rte", "pick", "sts_b")}
COMMANDS |= {f"score {s}": f"--stage head --task rte --score {s}" for s in CLASS_SCORES}
COMMANDS |= {f"head {head}": f"--stage head --task pick --head {head}" for head in HEAD_KINDS}
COMMANDS |= {f"encoder {name}": "--stage full --task rte" for name in ENCODERS}


@pytest.fixture(scope="module")
def trained(launch, runs, encoders):
    """trained(name, out, ...): the closing line's dictionary of a run of COMMANDS"""

    def trained(name, out, *more):
        words = "--epochs 2 --limit-train 33 --limit-dev 20 --batch-size 8 --lr 5e-3 "
        words += COMMANDS[name]
        adapters = [runs / task for task in ("rte", "sst2", "pick")]
        given = cli(adapters=adapters) if "fusion" in words else []
        given += cli(fusion_config="power=2") if "by_example" in words else []
        given += cli(model=encoders[name.split()[1]]) if "encoder" in name else []
        return launch(words, *given, *more, out=out)

    return trained


def fusion_and_adapters(args, bert, task):
    add_fusion(bert, args.adapters)
    for name in args.adapters:
        for module in adapter_modules(bert, name).values():
            module.requires_grad_(True)


@pytest.mark.parametrize("kind", ["own", "pal"])
def test_adapters_that_another_stage_trains_stay_of_their_kind(kind, launch, tmp_path, monkeypatch):
    monkeypatch.setitem(train.STAGES, "joint", {"build": fusion_and_adapters})
    one = tmp_path / "one"
    launch(f"--stage adapter --task rte --adapter {kind} --epochs 1", out=one)
    words = "--stage joint --task rte --epochs 1 --lr 1e-2"
    result = launch(words, adapters=[one, f"two={one}"], out=tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert train.evaluate(run.model, run.task, run.split(), run.args)["loss"] == result["dev_loss"]


@pytest.mark.parametrize("name", COMMANDS)
def test_interrupted_and_resumed_is_the_same(name, trained, at_step, tmp_path):
    whole = trained(name, tmp_path / "whole")
    at_step(8, child.stop, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        trained(name, tmp_path / "cut")
    trained(name, tmp_path / "cut", "--resume")
    assert_equal(tmp_path / "cut", tmp_path / "whole")
    # and loaded again, it is what was evaluated in training
    run = load_run(tmp_path / "cut")
    result = train.evaluate(run.model, run.task, run.split(), run.args)
    assert result["loss"] == whole["dev_loss"]
    assert result[run.args.score] == whole[run.args.score]
