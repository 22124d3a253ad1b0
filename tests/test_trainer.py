"""train.main against the reference library's own trainer: the same weights and batches, without
dropout, in float64. Two of its trajectories are in golden/; the others need PEER_PYTHON, a Python
with `adapters` (make test-peers)."""

import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import train
from adapter import save_adapter, save_head
from fusion import save_fusion
from reference import FIELDS, GOLDEN, ask_peer, needs_peer

RUNS = {
    "pfeiffer": "--stage adapter --task rte --adapter pfeiffer",
    "houlsby": "--stage adapter --task rte --adapter houlsby",
    "multiple choice": "--stage adapter --task pick",
    "fusion": "--stage fusion --task rte",
}
LOSSES = GOLDEN / "trajectory.json"  # {name: the reference's 40}
STARTS = GOLDEN / "trajectory.safetensors"  # NAME/PARAMETER at first, and the batches
STORED = ("pfeiffer", "fusion")  # written anew by WRITE_TRAJECTORY=1 make test-peers


@pytest.fixture
def sources(runs, tmp_path):
    """sources(name): the --adapters of a run; without their run.json, since the digest of the
    encoder's weights is another one in float64"""
    copies = []
    for task in ("rte", "sst2", "pick"):
        copies.append(shutil.copytree(runs / task, tmp_path / "sources" / task))
        (copies[-1] / "run.json").unlink()
    return lambda name: copies * (name == "fusion")


@pytest.fixture
def train_40_steps(launch, sources, quiet_encoder, tmp_path, monkeypatch):
    """train_40_steps(name, start): (the 40 losses, the Model's parameters at first, the batches).
    start: function(Model, batches), called before the first step, which may change both"""

    def train_40_steps(name, start):
        given, batches, losses, first = [], [], [], {}
        collate, find_task = train.collate, train.find_task

        def next_batch(examples, pad_token_id):
            batches.append(given[len(batches)] if given else collate(examples, pad_token_id))
            return batches[-1]

        def keep_loss(logits, labels):
            losses.append(F.cross_entropy(logits, labels))
            return losses[-1]

        def begin_in_float64(model, _):
            for p in model.parameters():  # a file holds fp32
                p.data = p.data.to(torch.float32).double()
            start(model, given)
            first.update((n, p.detach().float().clone()) for n, p in model.named_parameters())

        with monkeypatch.context() as patch:
            patch.setattr(train, "choose_device", lambda *_: (torch.device("cpu"), torch.float64))
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            patch.setattr(train, "hold_frozen_in", begin_in_float64)
            patch.setattr(train, "collate", next_batch)
            patch.setattr(train, "find_task", lambda *x: replace(find_task(*x), loss=keep_loss))
            patch.setattr(train, "evaluate", lambda *_: {"accuracy": 0.5, "loss": 0.5})
            torch.set_default_dtype(torch.float64)
            try:
                words = f"{RUNS[name]} --epochs 10 --patience 10 --batch-size 24 --lr 1e-3"
                more = {"adapters": sources(name)} if sources(name) else {}
                launch(words, model=quiet_encoder, out=tmp_path / "run", **more)
            finally:
                torch.set_default_dtype(torch.float32)
        assert len(losses) == 40
        return [value.item() for value in losses], first, batches

    return train_40_steps


def largest_difference(ours, theirs):
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", STORED)
def test_the_reference_s_losses_of_40_steps(name, train_40_steps):
    tensors = load_file(STARTS)

    def start(model, batches):
        with torch.no_grad():
            for parameter, p in model.named_parameters():
                p.copy_(tensors[f"{name}/{parameter}"])
        for step in range(40):
            batch = {field: tensors[field][step].long() for field in FIELDS}
            T = batch["attention_mask"].sum(1).max()
            labels = tensors["labels"][step].long()
            batches.append({field: t[:, :T] for field, t in batch.items()} | {"labels": labels})

    losses, *_ = train_40_steps(name, start)
    assert largest_difference(losses, json.loads(LOSSES.read_text())[name]) < 1e-12


@needs_peer
@pytest.mark.parametrize("name", RUNS)
def test_its_own_trainer(name, train_40_steps, sources, quiet_encoder, tmp_path):
    adapters = sources(name) or [tmp_path / "adapter"]

    def save_start(model, _):
        with torch.no_grad():
            for p in model.head.parameters():  # so that gradients are clipped
                p.mul_(16)
        if sources(name):
            save_fusion(model.bert, tmp_path / "fusion")
        else:
            save_adapter(model.bert, RUNS[name].split()[3], tmp_path / "adapter")
        save_head(model.head, model.bert, "head", tmp_path / "head")

    losses, first, batches = train_40_steps(name, save_start)
    theirs = []
    for batch in batches:  # of multiple choice the library's are [B, C, T]
        B = len(batch["labels"])
        shaped = {n: t.view(B, -1, t.shape[1]).squeeze(1) for n, t in batch.items() if t.ndim > 1}
        theirs.append({**batch, **shaped})
    torch.save(theirs, tmp_path / "batches.pt")
    plan = {
        "encoder": str(quiet_encoder),
        "adapters": [str(path) for path in adapters],
        "fusion": str(tmp_path / "fusion") if sources(name) else None,
        "head": str(tmp_path / "head"),
        "lr": 1e-3,
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    ask_peer("peer.py", "trainer", tmp_path)
    theirs = load_file(tmp_path / "trainer.safetensors")["losses"].tolist()
    assert largest_difference(losses, theirs) < 1e-12
    if name in STORED and "WRITE_TRAJECTORY" in os.environ:
        write(name, theirs, first, batches)


def write(name, losses, first, batches):
    """One stored trajectory; its batches are the other's."""
    stored, tensors = {}, {}
    if LOSSES.exists():
        stored, tensors = json.loads(LOSSES.read_text()), load_file(STARTS)
    tensors = {n: t for n, t in tensors.items() if not n.startswith(f"{name}/")}
    tensors |= {f"{name}/{parameter}": p.float() for parameter, p in first.items()}
    T = max(batch["input_ids"].shape[1] for batch in batches)
    for field in FIELDS:  # ids of the tests' vocabulary fit into a byte
        padded = [F.pad(batch[field], (0, T - batch[field].shape[1])) for batch in batches]
        tensors[field] = torch.stack(padded).to(torch.uint8)
    tensors["labels"] = torch.stack([batch["labels"] for batch in batches]).to(torch.uint8)
    save_file(tensors, STARTS)
    LOSSES.write_text(json.dumps({**stored, name: losses}, indent=0) + "\n")
