"""train.main against the reference library's own trainer: the same weights and batches, without
dropout, in float64. Needs PEER_PYTHON, a Python with `adapters` (make test-peers)."""

import json

import pytest
import torch
from safetensors.torch import load_file

import train
from adapter import save_adapter, save_head
from data import Classification
from fusion import save_fusion
from reference import ask_peer, needs_peer

RUNS = {
    "pfeiffer": "--stage adapter --task rte --adapter pfeiffer",
    "houlsby": "--stage adapter --task rte --adapter houlsby",
    "multiple choice": "--stage adapter --task pick",
    "fusion": "--stage fusion --task rte --allow-other-encoder",
}


@needs_peer
@pytest.mark.parametrize("name", RUNS)
def test_losses_of_40_steps(name, runs, launch, quiet_encoder, tmp_path, monkeypatch):
    task, batches, losses, saved = RUNS[name].split()[3], [], [], {}
    fused = [runs / task for task in ("rte", "sst2", "pick")] * (name == "fusion")
    collate, loss, make_optimizer = train.collate, Classification.loss, train.make_optimizer

    def keep_batch(rows, pad_token_id):
        batch = collate(rows, pad_token_id)
        B = len(batch["labels"])  # of multiple choice theirs are [B, C, T]
        theirs = {n: t.view(B, -1, t.shape[1]).squeeze(1) for n, t in batch.items() if t.ndim > 1}
        batches.append({**batch, **theirs})
        return batch

    def keep_loss(logits, labels):
        losses.append(loss(logits, labels))
        return losses[-1]

    def keep_weights(*values):
        bert, head = saved["model"].bert, saved["model"].head
        if fused:
            save_fusion(bert, tmp_path / "fusion")
        else:
            save_adapter(bert, task, tmp_path / "adapter")
        save_head(head, bert, "head", tmp_path / "head")
        return make_optimizer(*values)

    def cast_parts_float64(model, *_):
        for p in model.parameters():  # a file holds fp32
            p.data = p.data.to(torch.float32).double()
        saved["model"] = model

    with monkeypatch.context() as patch:
        patch.setattr(train, "choose_device", lambda *_: (torch.device("cpu"), torch.float64))
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        patch.setattr(train, "cast_parts", cast_parts_float64)
        patch.setattr(train, "collate", keep_batch)
        patch.setattr(train, "make_optimizer", keep_weights)
        patch.setattr(train, "evaluate", lambda *_: {"accuracy": 0.5, "loss": 0.5})
        patch.setattr(Classification, "loss", staticmethod(keep_loss))
        torch.set_default_dtype(torch.float64)
        try:
            words = f"{RUNS[name]} --epochs 10 --patience 10 --batch-size 24 --lr 1e-3"
            given = {"adapters": fused} if fused else {}
            launch(words, model=quiet_encoder, out=tmp_path / "run", **given)
        finally:
            torch.set_default_dtype(torch.float32)
    assert len(losses) == 40
    torch.save(batches, tmp_path / "batches.pt")
    plan = {
        "encoder": str(quiet_encoder),
        "adapters": [str(path) for path in fused or [tmp_path / "adapter"]],
        "fusion": str(tmp_path / "fusion") if fused else None,
        "head": str(tmp_path / "head"),
        "lr": 1e-3,
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    ask_peer("peer.py", "trainer", tmp_path)
    theirs = load_file(tmp_path / "trainer.safetensors")["losses"].tolist()
    differences = [abs(ours.item() - peer) for ours, peer in zip(losses, theirs, strict=True)]
    print(f"{name}: losses {losses[0]:.4f} to {losses[-1]:.4f}, differ by {max(differences):.1e}")
    assert max(differences) < 1e-12
