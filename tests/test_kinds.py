"""Every kind of adapter and fusion, and every type of task, that the command line knows, those of
examples/ included, has the same properties. A new kind is tested by being registered: none is
listed here."""

import contextlib
import copy
import importlib
import json
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch

import child
import train
from adapter import (
    ADAPTERS,
    ARCHITECTURES,
    HEADS,
    Head,
    activate,
    adapter_modules,
    add_adapter,
    load_adapter,
    save_adapter,
)
from bert import Bert
from conftest import WORDS, assert_equal, cli, sentence, write_rows
from data import TASKS, Classification, MultipleChoice
from experiments import evaluate
from fusion import (
    FUSIONS,
    add_fusion,
    fusion_regularization,
    fusion_weights,
    fusions,
    load_fusion,
    save_fusion,
)
from variants.masking import mask

TABLES = (ADAPTERS, ARCHITECTURES, FUSIONS, TASKS, Classification.scores, HEADS, train.STAGES)
EXAMPLES = sorted(path.stem for path in Path(train.__file__).parent.glob("examples/[!_]*.py"))

without = [dict(table) for table in TABLES]
for name in EXAMPLES:
    importlib.import_module(f"examples.{name}")
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


ADAPTER_KINDS = with_examples[0]
assert {make().architecture for make in ADAPTER_KINDS.values()} == {*with_examples[1]}
FUSION_KINDS = with_examples[2]
TASK_TYPES = {task.type for task in with_examples[3].values()}
every_adapter = pytest.mark.parametrize("kind", ADAPTER_KINDS)
every_fusion = pytest.mark.parametrize("fusion_kind", FUSION_KINDS)


def randomize(bert, part):
    """Weights at which an error shows: nothing stays at 0, no softmax is 0 or 1."""
    for name, p in bert.named_parameters():
        if part in name:
            p.data += 0.2 * torch.randn_like(p)


def new_bert(encoder, kind, names="ab", dtype=torch.float64, device="cpu"):
    """The tiny encoder with adapters of one kind and different weights."""
    torch.manual_seed(1)
    bert = Bert.from_pretrained(encoder).to(device, dtype)
    for name in names:
        add_adapter(bert, name, ADAPTER_KINDS[kind]())
    randomize(bert, ".adapters.")
    return bert


def can_fuse(kind):
    return ADAPTER_KINDS[kind]().cannot_fuse_because is None


def alone_and_fused(bert, kind):
    """None for the adapter that is active now, then each kind of fusion once it is."""
    yield None
    for fusion_kind in FUSION_KINDS.values() if can_fuse(kind) else ():
        add_fusion(bert, ["a", "b"], fusion_kind)
        randomize(bert, ".fusion.")
        yield fusion_kind


def inputs(padding=0):
    """input_ids, token_type_ids, attention_mask [3, 7 + padding]; lengths 7, 4 and 2"""
    torch.manual_seed(2)
    ids = torch.randint(5, 5 + len(WORDS), (3, 7))
    mask = (torch.arange(7) < torch.tensor([7, 4, 2])[:, None]).long()
    given = ids * mask, torch.randint(0, 2, (3, 7)) * mask, mask
    return [torch.nn.functional.pad(tensor, (0, padding)) for tensor in given]


def close(ours, theirs):
    return torch.allclose(ours, theirs, rtol=1e-9, atol=1e-11)


def outputs_and_gradients(bert):
    h = bert(*inputs())
    trained = [p for p in bert.parameters() if p.requires_grad]
    return [h, *torch.autograd.grad(h.pow(3).sum(), trained)] if trained else [h]


@every_adapter
@every_fusion
def test_the_form_that_is_used_is_the_textbooks(encoder, kind, fusion_kind):
    """Whatever the order of the adapters, unless the kind of fusion says that it matters."""
    bert, fusion_kind = new_bert(encoder, kind), FUSION_KINDS[fusion_kind]
    if not can_fuse(kind):
        with pytest.raises(ValueError, match="a, b"):
            add_fusion(bert, ["a", "b"], fusion_kind)
        assert not fusions(bert)
        return
    add_fusion(bert, ["a", "b"], fusion_kind)
    randomize(bert, ".fusion.")
    textbook = copy.deepcopy(bert)
    for _, fusion in fusions(textbook):
        fusion.compose = fusion.textbook
    ours, theirs = outputs_and_gradients(bert), outputs_and_gradients(textbook)
    assert all(map(close, ours, theirs))
    for (_, ours), (_, theirs) in zip(fusions(bert), fusions(textbook), strict=True):
        assert close(ours.weights, theirs.weights)
        assert close(ours.weights.sum(-1), torch.ones(3, 7, dtype=torch.float64))
    h = bert(*inputs())
    if fusion_kind.order_matters_because is None:
        add_fusion(bert, ["b", "a"], fusion_kind)
        for (_, fusion), (_, same) in zip(fusions(bert), fusions(textbook), strict=True):
            fusion.load_state_dict(same.state_dict())
        assert close(bert(*inputs()), h)
    activate(bert, None)  # the adapters do speak
    assert not torch.allclose(bert(*inputs()), h, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("kind", [*filter(can_fuse, ADAPTER_KINDS)])
@every_fusion
def test_a_masked_adapter_has_no_effect(encoder, kind, fusion_kind):
    """Whatever its weights are; or else the fusion says that it cannot leave adapters out."""
    bert = new_bert(encoder, kind)
    add_fusion(bert, ["b", "a"], FUSION_KINDS[fusion_kind])  # the last decides what both read
    randomize(bert, ".fusion.")
    whole = bert(*inputs())
    mask(bert, ["b"])
    try:
        h = bert(*inputs())
    except ValueError as error:
        assert "cannot leave adapters out" in str(error)
        return
    assert all((s[..., 0] == 0).all() for s in fusion_weights(bert).values())
    assert not torch.allclose(h, whole, atol=1e-3)
    randomize(bert, ".adapters.b.")
    assert torch.equal(bert(*inputs()), h)


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


@every_adapter
def test_padding_does_not_matter(encoder, kind):
    bert = new_bert(encoder, kind)
    for _ in alone_and_fused(bert, kind):
        ids, types, mask = inputs()
        short, long = bert(ids, types, mask), bert(*inputs(padding=9))[:, :7]
        assert close(short[mask.bool()], long[mask.bool()])
        alone = bert(ids[1:2, :4], types[1:2, :4], mask[1:2, :4])
        assert close(short[1:2, :4], alone)


# --------------------------------------------------------------------------------------------------
# A step as train.py has it, on a device that needs no GPU, and in bf16

# (stage, kind of adapter, kind of fusion) as train.py combines them
STEPS = [("head", None, None), ("full", None, None)]
STEPS += [("adapter", kind, None) for kind in ADAPTER_KINDS]
STEPS += [
    ("fusion", kind, name) for kind in ADAPTER_KINDS if can_fuse(kind) for name in FUSION_KINDS
]


@pytest.mark.parametrize("device, dtype", [("meta", torch.float32), ("cpu", torch.bfloat16)])
@pytest.mark.parametrize("stage, kind, fusion_kind", STEPS, ids=str)
def test_a_step(encoder, stage, kind, fusion_kind, device, dtype, monkeypatch):
    """Forward and backward of one batch. `meta` is a device that computes nothing, mixes with no
    other, and has no autocast. Every type of task takes part in --stage head."""
    if device == "meta":
        monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    held = torch.float32 if stage == "full" else dtype
    bert = new_bert(encoder, kind, "ab" if kind else "", held, device)
    if stage == "fusion":
        add_fusion(bert, ["a", "b"], FUSION_KINDS[fusion_kind])
    if stage == "full":
        bert.requires_grad_(True)
    bert.train()
    ids, types, mask = inputs()
    trained = [p for p in bert.parameters() if p.requires_grad]
    for task_type in TASK_TYPES if stage == "head" else [Classification]:
        head = Head({**task_type.head("xyz"), "layers": 2}, bert.config).to(device)
        examples = 1 if issubclass(task_type, MultipleChoice) else 3
        labels = torch.zeros(examples, dtype=task_type.dtype)
        batch = {"input_ids": ids, "token_type_ids": types, "attention_mask": mask}
        logits = train.Model(bert, head, dtype)({**batch, "labels": labels})
        assert logits.dtype == torch.float32 and logits.device.type == device
        assert task_type.predict(logits).shape == labels.shape
        loss = task_type.loss(logits, labels.to(device))
        (loss + fusion_regularization(bert)).backward()
        trained += head.parameters()
    gradients = [p.grad for p in trained if p.grad is not None]
    assert gradients and {p.dtype for p in (*trained, *gradients)} == {torch.float32}
    assert {gradient.device.type for gradient in gradients} == {device}
    assert device == "meta" or all(gradient.isfinite().all() for gradient in gradients)


# --------------------------------------------------------------------------------------------------
# Runs


@pytest.fixture(scope="module")
def places(data_dir, tmp_path_factory):
    """Tasks of every type, the examples' among them: the label of sts_b is the share of the words
    that the texts have in common."""
    directory = shutil.copytree(data_dir, tmp_path_factory.mktemp("kinds") / "data")
    rng = random.Random(3)
    for split, n in (("train", 96), ("validation", 40)):
        rows = []
        for i in range(n):
            a, b = sentence(rng, 6), sentence(rng, 6)
            b = " ".join([*a.split()[: i % 7], *b.split()[i % 7 :]])
            rows.append({"sentence1": a, "sentence2": b, "label": 5 * (i % 7) / 6})
        write_rows(directory / "sts_b" / f"{split}.jsonl", rows)
    return directory


def commands():
    """{name: the options of its run}"""
    result = {}
    for name in ADAPTER_KINDS:
        result[name] = f"--stage adapter --task sst2 --adapter {name}"
    for name in FUSION_KINDS:
        result[f"fusion {name}"] = f"--stage fusion --task sst2 --fusion {name}"
    # `pick` is an own task, without a line in TASKS
    of_task = {Classification: "rte", MultipleChoice: "pick"}
    of_task |= {task.type: name for name, task in TASKS.items() if task.type not in of_task}
    for task_type, name in of_task.items():
        result[f"task {task_type.__name__}"] = f"--stage head --task {name}"
    for score in Classification.scores:
        result[f"score {score}"] = f"--stage head --task rte --score {score}"
    return result


COMMANDS = commands()
fill(without)  # the other tests know nothing of the examples


@pytest.fixture(scope="module")
def trained(launch, places, runs):
    """trained(name, out, ...): the closing line's dictionary of a run of COMMANDS"""

    def trained(name, out, *more):
        words = "--epochs 2 --limit-train 33 --limit-dev 20 --batch-size 8 --lr 5e-3 "
        words += COMMANDS[name]
        adapters = [runs / task for task in ("rte", "sst2", "pick")]
        given = cli(adapters=adapters) if "fusion" in words else []
        return launch(words, *given, *more, data_dir=places, out=out)

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
