"""Every kind of adapter, fusion and head, and every type of task, those of examples/ and the forks
below included, has the same properties. A new kind is tested by being registered: none is listed
here."""

import contextlib
import copy
import importlib
import json
import signal
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
import torch
from torch import nn

import child
import train
from adapter import (
    ADAPTERS,
    ARCHITECTURES,
    HEADS,
    Adapter,
    AdapterConfig,
    BaseAdapterConfig,
    Head,
    activate,
    adapter_modules,
    add_adapter,
    load_adapter,
    new_head,
    register,
    register_head,
    save_adapter,
)
from bert import ENCODERS, Bert
from conftest import WORDS, assert_equal, cli, randomize, tiny_encoder
from data import TASKS, Classification, MultipleChoice
from experiments import evaluate
from fusion import (
    FUSIONS,
    Fusion,
    add_fusion,
    fusion_regularization,
    fusions,
    load_fusion,
    save_fusion,
)
from fusion import register as register_fusion


@dataclass(frozen=True)
class OwnConfig(AdapterConfig):
    """Trains U alone, and has a buffer and a z of its own, which is no bottleneck's."""

    architecture = "own"

    @classmethod
    def own(cls, **changes):
        return cls(**changes)

    def make_modules(self, bert):
        d = bert.config.hidden_size
        places = super().make_modules(bert)
        return [(key, slot, Own(self, d, self.bottleneck_size(d, 0))) for key, slot, _ in places]

    def tensor_names(self, module):
        return BaseAdapterConfig.tensor_names(self, module)  # of all parameters and buffers

    def trainable_parameters(self, module):
        return module.up.parameters()


class Own(Adapter):
    def __init__(self, *values):
        super().__init__(*values)
        self.register_buffer("factor", torch.tensor([4.0]))

    def z(self, h, layer_input=None):
        return (self.factor * super().z(h, layer_input)).to(h.dtype)


class ByExample(Fusion):
    """One softmax for each example, of the mean over its real tokens; and parameters of its own,
    one of them a scalar for each adapter."""

    file_tag = {"kind": "by_example"}
    config_defaults = {"power": 1.0}
    order_matters_because = "its scalars belong to the positions of the adapters"

    def __init__(self, name, adapter_names, *values, **config):
        super().__init__(name, adapter_names, *values, **config)
        self.scalar = nn.Parameter(torch.ones(len(adapter_names)))
        self.deep = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))

    def compose(self, h, adapters, layer_input=None):
        _, mask = layer_input
        real = torch.ones_like(h[..., :1]) if mask is None else mask[:, 0, 0, :, None].to(h.dtype)
        z = torch.stack([adapter.z(h, layer_input) for adapter in adapters], 2)  # [B, T, N, d]
        z = z * self.deep(self.scalar[:, None])
        scores = torch.einsum("btd,btnd->btn", self.query(h), self.key(z))
        scores = (real * scores).sum(1, keepdim=True) / real.sum(1, keepdim=True)  # [B, 1, N]
        s = self.weigh(scores * self.config["power"])[:, 0]
        return self.value(torch.einsum("bn,btnd->btd", s, z))

    textbook = compose


class MeanHead(Head):
    """It reads the mean over the real tokens."""

    def __init__(self, config, bert_config):
        super().__init__(config, bert_config)
        self.mlp = nn.Sequential(nn.Linear(bert_config.hidden_size, bert_config.hidden_size))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, h, mask):
        mean = (h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.logits(self.mlp(self.scale * mean))


TABLES = (ADAPTERS, ARCHITECTURES, FUSIONS, TASKS, Classification.scores, HEADS, train.STAGES)
TABLES += (ENCODERS,)
EXAMPLES = sorted(path.stem for path in Path(train.__file__).parent.glob("examples/[!_]*.py"))

without = [dict(table) for table in TABLES]
for name in EXAMPLES:
    importlib.import_module(f"examples.{name}")
register("own", OwnConfig)
register_fusion("by_example", ByExample)
register_head("mean", MeanHead)
with_examples = [dict(table) for table in TABLES]


def fill(contents):
    for table, content in zip(TABLES, contents, strict=True):
        table.clear()
        table.update(content)


@pytest.fixture(autouse=True, scope="module")
def examples():
    fill(with_examples)
    yield
    fill(without)


ADAPTER_KINDS, _, FUSION_KINDS, _, _, HEAD_KINDS, _, ENCODER_KINDS = with_examples
assert {make().architecture for make in ADAPTER_KINDS.values()} == {*with_examples[1]}
TASK_TYPES = {task.type for task in with_examples[3].values()}


def can_fuse(kind):
    return ADAPTER_KINDS[kind]().cannot_fuse_because is None


every_adapter = pytest.mark.parametrize("kind", ADAPTER_KINDS)
every_fused_adapter = pytest.mark.parametrize("kind", [*filter(can_fuse, ADAPTER_KINDS)])
every_fusion = pytest.mark.parametrize("fusion_kind", FUSION_KINDS)
# where a kind has such fields, the second and the third adapter differ from the first
VARIED = {
    "a": {},
    "b": {"reduction_factor": 4, "size": 12, "num_heads": 3},
    "c": {"reduction_factor": 8, "non_linearity": "gelu"},
}


def new_bert(encoder, kind, names="ab", dtype=torch.float64, device="cpu"):
    """The tiny encoder with adapters of one kind and different weights."""
    torch.manual_seed(1)
    bert = Bert.from_pretrained(encoder).to(device, dtype)
    for name in names:
        config = ADAPTER_KINDS[kind]()
        known = {field.name for field in fields(config)} & VARIED[name].keys()
        add_adapter(bert, name, replace(config, **{field: VARIED[name][field] for field in known}))
    randomize(bert, ".adapters.")
    return bert


def fuse(bert, names, fusion_kind):
    """A new fusion with such weights, and with hyper-parameters that are not the defaults."""
    config = {field: 2 * value for field, value in fusion_kind.config_defaults.items()}
    add_fusion(bert, names, fusion_kind, **config)
    randomize(bert, ".fusion.")


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """{kind: directory} of a tiny encoder of every kind"""
    root = tmp_path_factory.mktemp("encoders")
    return {name: tiny_encoder(kind, root / name) for name, kind in ENCODER_KINDS.items()}


def alone_and_fused(bert, kind):
    """None for the adapter that is active now, then each kind of fusion once it is."""
    yield None
    for fusion_kind in FUSION_KINDS.values() if can_fuse(kind) else ():
        fuse(bert, "ab", fusion_kind)
        yield fusion_kind


def inputs(padding=0):
    """input_ids, token_type_ids, attention_mask [3, 7 + padding]; lengths 7, 4 and 2"""
    torch.manual_seed(2)
    ids = torch.randint(5, 5 + len(WORDS), (3, 7))
    mask = (torch.arange(7) < torch.tensor([7, 4, 2])[:, None]).long()
    given = ids * mask, torch.randint(0, 2, (3, 7)) * mask, mask
    return [torch.nn.functional.pad(tensor, (0, padding)) for tensor in given]


BATCH = ("input_ids", "token_type_ids", "attention_mask")


def close(ours, theirs):
    return torch.allclose(ours, theirs, rtol=1e-9, atol=1e-11)


def outputs_and_gradients(bert, given):
    torch.manual_seed(3)  # the same is dropped
    h = bert(*given)
    trained = [p for p in bert.parameters() if p.requires_grad]
    return [h, *torch.autograd.grad(h.pow(3).sum(), trained)] if trained else [h]


@every_fused_adapter
@every_fusion
@pytest.mark.parametrize("names", ["ab", "abc"])
def test_the_form_that_is_used_is_the_textbooks(encoder, kind, fusion_kind, names):
    """With many tokens and few, with dropout, and in any order of the adapters if none matters."""
    bert, fusion_kind = new_bert(encoder, kind, names), FUSION_KINDS[fusion_kind]
    fuse(bert, names, fusion_kind)
    textbook = copy.deepcopy(bert)
    for _, fusion in fusions(textbook):
        fusion.compose = fusion.textbook
    many = inputs()
    for training in (False, True):
        for given in (many, [tensor[1:2, :4] for tensor in many]):
            both = [outputs_and_gradients(b.train(training), given) for b in (bert, textbook)]
            assert all(map(close, *both))
            for (_, ours), (_, theirs) in zip(fusions(bert), fusions(textbook), strict=True):
                assert close(ours.weights, theirs.weights)
    h = bert.eval()(*many)
    sums = torch.stack([fusion.weights.sum(-1) for _, fusion in fusions(bert)])
    assert close(sums, torch.ones_like(sums))
    if fusion_kind.order_matters_because is None:
        add_fusion(bert, names[::-1], fusion_kind)
        for (_, fusion), (_, same) in zip(fusions(bert), fusions(textbook), strict=True):
            fusion.load_state_dict(same.state_dict())
        assert close(bert(*many), h)
    activate(bert, None)  # the adapters do speak
    assert not torch.allclose(bert(*many), h, atol=1e-3)


def test_only_the_same_kind_at_the_same_places_is_fused(encoder):
    """Otherwise the error names the adapter, and no fusion is left behind."""
    bert = new_bert(encoder, "pfeiffer", "a")
    for i, (kind, make) in enumerate(ADAPTER_KINDS.items()):
        add_adapter(bert, f"x{i}", make())
        config, modules = adapter_modules(bert, f"x{i}")
        same_places = {location for (_, location), _, _ in modules} == {"output"}
        if can_fuse(kind) and config.architecture is None and same_places:
            continue
        with pytest.raises(ValueError, match=f" x{i}$"):
            add_fusion(bert, ["a", f"x{i}"])
    assert not fusions(bert)


@every_adapter
def test_saved_and_loaded_bit_for_bit(encoder, kind, tmp_path):
    bert = new_bert(encoder, kind, dtype=torch.float32)
    for name in "ab":
        save_adapter(bert, name, tmp_path / name)
    for fusion_kind in alone_and_fused(bert, kind):
        again = Bert.from_pretrained(encoder)
        assert [load_adapter(again, tmp_path / name) for name in "ab"] == ["a", "b"]
        if fusion_kind is None:
            activate(again, "b")
        else:
            save_fusion(bert, tmp_path / "fusion")
            load_fusion(again, tmp_path / "fusion")
            assert {type(fusion) for _, fusion in fusions(again)} == {fusion_kind}
            assert fusions(again)[0][1].config == fusions(bert)[0][1].config
        assert torch.equal(bert(*inputs()), again(*inputs()))
        ours, theirs = bert.state_dict(), again.state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours.keys() | theirs.keys())


@every_adapter
def test_exactly_what_is_new_is_trained(encoder, kind):
    """A step moves the adapter, then the fusion, and nothing else by a single bit."""
    bert = new_bert(encoder, kind, dtype=torch.float32)
    config, modules = adapter_modules(bert, "b")  # a kind may keep parts of an adapter as they are
    new = {p for _, _, module in modules for p in config.trainable_parameters(module)}
    part = ".adapters.b."
    for fusion_kind in alone_and_fused(bert, kind):
        if fusion_kind is not None:
            new, part = {p for _, fusion in fusions(bert) for p in fusion.parameters()}, ".fusion."
        trained = {name for name, p in bert.named_parameters() if p.requires_grad}
        assert {bert.get_parameter(name) for name in trained} == new
        assert all(part in name for name in trained)
        before = {name: p.detach().clone() for name, p in bert.named_parameters()}
        if trained:
            (bert(*inputs()).pow(3).sum() + fusion_regularization(bert)).backward()
            torch.optim.AdamW(new, 0.1).step()
        changed = {n for n, p in bert.named_parameters() if not torch.equal(p, before[n])}
        assert changed == trained


@torch.no_grad()
@every_adapter
@pytest.mark.parametrize("encoder_kind", ENCODER_KINDS)
def test_padding_other_examples_and_the_cls_shortcut_change_nothing(encoders, encoder_kind, kind):
    bert = new_bert(encoders[encoder_kind], kind)
    for _ in alone_and_fused(bert, kind):
        ids, types, mask = inputs()
        h, long = bert(ids, types, mask), bert(*inputs(padding=9))[:, :7]
        assert close(h[mask.bool()], long[mask.bool()])
        assert close(h[1:2, :4], bert(ids[1:2, :4], types[1:2, :4], mask[1:2, :4]))
        assert close(h[:, :1], bert(ids, types, mask, cls_only=True))


@torch.no_grad()
@pytest.mark.parametrize("name", HEAD_KINDS)
def test_a_head_is_given_what_it_reads(encoder, name):
    """Whether or not it reads [CLS] alone, and however long the padding is."""
    bert = Bert.from_pretrained(encoder).double()
    for task_type in TASK_TYPES:
        head = new_head(name, {**task_type.head("xyz"), "layers": 2}, bert.config).double().eval()
        expected = head(bert(*inputs()), inputs()[2])
        for padding in (0, 5):
            batch = dict(zip(BATCH, inputs(padding), strict=True))
            batch["labels"] = torch.zeros(len(expected))
            assert torch.allclose(train.Model(bert, head)(batch), expected.float(), atol=1e-6)


# (stage, kind of adapter, kind of fusion) as train.py combines them
STEPS = [("head", None, None), ("full", None, None)]
STEPS += [("adapter", kind, None) for kind in ADAPTER_KINDS]
STEPS += [
    ("fusion", kind, name) for kind in ADAPTER_KINDS if can_fuse(kind) for name in FUSION_KINDS
]


@pytest.mark.parametrize("device, dtype", [("meta", torch.float32), ("cpu", torch.bfloat16)])
@pytest.mark.parametrize("stage, kind, fusion_kind", STEPS, ids=str)
def test_a_step(encoder, stage, kind, fusion_kind, device, dtype, monkeypatch):
    """One batch; `meta` is a device that computes nothing, mixes with no other, has no autocast."""
    if device == "meta":
        monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    held = torch.float32 if stage == "full" else dtype
    bert = new_bert(encoder, kind, "ab" if kind else "", held, device)
    if stage == "fusion":
        fuse(bert, "ab", FUSION_KINDS[fusion_kind])
    if stage == "full":
        bert.requires_grad_(True)
    bert.train()
    trained = [p for p in bert.parameters() if p.requires_grad]
    every = [(head, task_type) for head in HEAD_KINDS for task_type in TASK_TYPES]
    for head, task_type in every if stage == "head" else [("cls", Classification)]:
        head = new_head(head, {**task_type.head("xyz"), "layers": 2}, bert.config).to(device)
        examples = 1 if issubclass(task_type, MultipleChoice) else 3
        labels = torch.zeros(examples, dtype=task_type.dtype)
        batch = {**dict(zip(BATCH, inputs(), strict=True)), "labels": labels}
        logits = train.Model(bert, head, dtype)(batch)
        assert logits.dtype == torch.float32 and logits.device.type == device
        assert task_type.predict(logits).shape == labels.shape
        loss = task_type.loss(logits, labels.to(device))
        (loss + fusion_regularization(bert)).backward()
        trained += head.parameters()
    gradients = [p.grad for p in trained if p.grad is not None]
    assert gradients and {p.dtype for p in (*trained, *gradients)} == {torch.float32}
    assert {gradient.device.type for gradient in gradients} == {device}
    assert device == "meta" or all(gradient.isfinite().all() for gradient in gradients)


OF_TASK = {Classification: "rte", MultipleChoice: "pick"}  # `pick` has no line in TASKS
OF_TASK |= {task.type: name for name, task in TASKS.items() if task.type not in OF_TASK}
COMMANDS = {kind: f"--stage adapter --task sst2 --adapter {kind}" for kind in ADAPTER_KINDS}
COMMANDS |= {f"fusion {f}": f"--stage fusion --task sst2 --fusion {f}" for f in FUSION_KINDS}
COMMANDS |= {f"task {t.__name__}": f"--stage head --task {name}" for t, name in OF_TASK.items()}
COMMANDS |= {f"score {s}": f"--stage head --task rte --score {s}" for s in Classification.scores}
COMMANDS |= {f"head {head}": f"--stage head --task pick --head {head}" for head in HEAD_KINDS}
COMMANDS |= {f"encoder {name}": "--stage full --task rte" for name in ENCODER_KINDS}
fill(without)  # the other tests know nothing of the examples


@pytest.fixture(scope="module")
def trained(launch, runs, encoders):
    """trained(name, out, ...): the closing line's dictionary of a run of COMMANDS"""

    def trained(name, out, *more):
        words = "--epochs 2 --limit-train 33 --limit-dev 20 --batch-size 8 --lr 5e-3 "
        words += COMMANDS[name]
        adapters = [runs / task for task in ("rte", "sst2", "pick")]
        given = cli(adapters=adapters) if "fusion" in words else []
        given += cli(model=encoders[name.split()[1]]) if "encoder" in name else []
        return launch(words, *given, *more, out=out)

    return trained


@pytest.mark.parametrize("name", COMMANDS)
def test_interrupted_and_resumed_is_the_same(name, trained, at_step, tmp_path):
    whole = trained(name, tmp_path / "whole")
    at_step(8, child.stop, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        trained(name, tmp_path / "cut")
    trained(name, tmp_path / "cut", "--resume")
    assert_equal(tmp_path / "cut", tmp_path / "whole")
    # and it is what was evaluated in training
    score = json.loads((tmp_path / "cut" / "config.json").read_text())["score"]
    result = evaluate.main([str(tmp_path / "cut"), "--device", "cpu"])
    assert result[score] == whole[score]
