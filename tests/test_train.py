"""Both stages and the baselines: what is trained, what is left alone, what is written, and that it
reads back exactly."""

import json
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import child
import train
from adapter import AdapterConfig, activate, add_adapter, load_adapter
from bert import Bert
from conftest import dev_batches, sentence, write_rows
from experiments.load_run import load_run
from fusion import add_fusion, fusion_regularization, fusion_weights

REPOSITORY = Path(train.__file__).parent


def snapshot(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def logits_of(run, some_batches, **options):
    bert, head, _ = load_run(run, **options)
    with torch.inference_mode():
        return torch.cat([train.predict(bert, head, batch, bert.dtype) for batch in some_batches])


@pytest.mark.parametrize("stage", ["adapter", "fusion", "head", "full"])
def test_a_stage_trains_exactly_what_it_should(stage, launch, encoder, runs, tmp_path, monkeypatch):
    before, after = {}, {}
    build = train.build

    def spy(*args):
        bert, head, fused = build(*args)
        before.update(snapshot(bert))
        after["bert"] = bert
        return bert, head, fused

    monkeypatch.setattr(train, "build", spy)
    adapters = ["--adapters", runs / "rte", runs / "pick"] if stage == "fusion" else []
    result = launch(
        "--stage",
        stage,
        "--task",
        "sst2",
        "--epochs",
        1,
        "--lr",
        "1e-2",
        "--out",
        tmp_path / "run",
        *adapters,
    )
    changed = {
        name for name, p in after["bert"].named_parameters() if not torch.equal(p, before[name])
    }
    expected = {"adapter": "adapters.sst2.", "fusion": ".fusion.", "head": None, "full": ""}[stage]
    if stage == "full":
        assert len(changed) > 0.9 * len(before)
    elif expected is None:
        assert not changed
    else:  # every new tensor has moved, and nothing else: Θ and every other Φ are bit-identical
        # the key's bias moves only through dropout on the scores, but move it does
        assert changed == {name for name in before if expected in name}
        kept = Bert.from_pretrained(encoder).state_dict()
        assert all(
            torch.equal(after["bert"].state_dict()[name], tensor) for name, tensor in kept.items()
        )
    trained = sum(
        p.numel() for name, p in before.items() if expected is not None and expected in name
    )
    head = 32 * 32 + 32 + 32 * 2 + 2
    assert result["trained_parameters"] == trained + head


def test_requires_grad_is_the_contract(encoder, runs):
    def trainable(bert):
        return {name for name, p in bert.named_parameters() if p.requires_grad}

    bert = Bert.from_pretrained(encoder)
    assert not trainable(bert) and not bert.training
    load_adapter(bert, runs / "rte")
    assert not trainable(bert)
    add_adapter(bert, "new", AdapterConfig.houlsby(reduction_factor=4))
    assert trainable(bert) == {
        name for name, _ in bert.named_parameters() if ".adapters.new." in name
    }
    activate(bert, "rte")
    assert not trainable(bert)
    load_adapter(bert, runs / "sst2")
    add_fusion(bert, ["rte", "sst2"])
    assert trainable(bert) == {name for name, _ in bert.named_parameters() if ".fusion." in name}


def test_run_directories(runs):
    stage_1 = {
        "config.json",
        "metrics.json",
        "log.jsonl",
        "adapter_config.json",
        "adapter.safetensors",
        "head_config.json",
        "model_head.safetensors",
    }
    assert {path.name for path in (runs / "rte").iterdir()} == stage_1
    fusion = {path.name for path in (runs / "fusion-rte").iterdir()}
    expected = stage_1 - {"adapter_config.json", "adapter.safetensors"}
    assert fusion == expected | {
        "adapter_fusion_config.json",
        "model_adapter_fusion.safetensors",
        "adapters",
    }
    for name in ("rte", "sst2", "pick"):
        copy, original = (
            load_file(path / "adapter.safetensors")
            for path in (runs / "fusion-rte/adapters" / name, runs / name)
        )
        assert copy.keys() == original.keys() and all(
            torch.equal(copy[key], original[key]) for key in copy
        )
    log = [json.loads(line) for line in (runs / "rte" / "log.jsonl").read_text().splitlines()]
    metrics = json.loads((runs / "rte" / "metrics.json").read_text())
    assert [line["epoch"] for line in log] == [1, 2]
    assert metrics["accuracy"] == max(line["dev_accuracy"] for line in log)
    assert log[metrics["best_epoch"] - 1]["dev_accuracy"] == metrics["accuracy"]
    assert {
        "stage",
        "task",
        "seed",
        "model",
        "best_epoch",
        "accuracy",
        "train_examples",
        "seconds",
        "out",
    } <= set(metrics)


@pytest.mark.parametrize("stage", ["adapter", "fusion", "head", "full"])
def test_a_run_reloads_exactly(stage, launch, encoder, data_dir, runs, tmp_path, monkeypatch):
    sources = [shutil.copytree(runs / name, tmp_path / name) for name in ("rte", "sst2")]
    seen = {}
    save_run = train.save
    some = dev_batches(encoder, data_dir, "pick")

    def spy(args, bert, heads, *rest):
        bert.eval(), heads.eval()
        with torch.inference_mode():
            seen["logits"] = torch.cat(
                [train.predict(bert, heads[0], batch, torch.float32) for batch in some]
            )
        save_run(args, bert, heads, *rest)

    monkeypatch.setattr(train, "save", spy)
    adapters = ["--adapters", *sources] if stage == "fusion" else []
    launch(
        "--stage",
        stage,
        "--task",
        "pick",
        "--epochs",
        2,
        "--lr",
        "1e-3",
        "--out",
        tmp_path / "run",
        *adapters,
    )
    for source in sources:
        shutil.rmtree(source)
    moved = shutil.move(tmp_path / "run", tmp_path / "moved")
    assert torch.equal(logits_of(moved, some), seen["logits"])


def test_the_best_epoch_is_what_is_saved(launch, encoder, data_dir, tmp_path):
    result = launch(
        "--stage",
        "adapter",
        "--task",
        "sst2",
        "--epochs",
        6,
        "--lr",
        "2e-2",
        "--out",
        tmp_path / "run",
    )
    some = dev_batches(encoder, data_dir, "sst2")
    right = logits_of(tmp_path / "run", some).argmax(-1) == torch.cat(
        [batch["labels"] for batch in some]
    )
    assert right.float().mean().item() == pytest.approx(result["accuracy"], abs=1e-6)


def test_it_learns(launch, tmp_path):
    """Classification and multiple choice, your own tasks, far above chance on held-out examples."""
    rng = random.Random(1)
    for split, n in (("train", 600), ("validation", 200)):
        texts = [sentence(rng, 5) for _ in range(n)]
        rows = [
            {"text_a": text, "label": "cat" if "cat" in text or "dog" in text else "none"}
            for text in texts
        ]
        write_rows(tmp_path / "data" / "animal" / f"{split}.jsonl", rows)
        rows = []
        for _ in range(n):
            choices, right = (
                [sentence(rng, 3).replace("yes", "no") for _ in range(3)],
                rng.randrange(3),
            )
            choices[right] += " yes"
            rows.append({"choices": choices, "label": right})
        write_rows(tmp_path / "data" / "affirm" / f"{split}.jsonl", rows)
    options = [
        "--data-dir",
        tmp_path / "data",
        "--epochs",
        8,
        "--lr",
        "1e-2",
        "--batch-size",
        16,
        "--reduction-factor",
        2,
    ]
    for task, chance in (("animal", 0.65), ("affirm", 0.35)):
        accuracy = launch("--stage", "adapter", "--task", task, "--out", tmp_path / task, *options)[
            "accuracy"
        ]
        assert accuracy > chance + 0.2
    assert json.loads((tmp_path / "animal" / "config.json").read_text())["labels"] == [
        "cat",
        "none",
    ]


def test_early_stopping(launch, tmp_path):
    result = launch(
        "--stage",
        "head",
        "--task",
        "sst2",
        "--epochs",
        50,
        "--patience",
        2,
        "--lr",
        "1e-9",
        "--out",
        tmp_path / "r",
    )
    epochs = len((tmp_path / "r" / "log.jsonl").read_text().splitlines())
    assert epochs == result["best_epoch"] + 2 < 50


def test_same_seed_same_numbers(launch, tmp_path):
    tensors = []
    for i, seed in enumerate((3, 3, 4)):
        launch(
            "--stage",
            "adapter",
            "--task",
            "rte",
            "--epochs",
            1,
            "--seed",
            seed,
            "--out",
            tmp_path / str(i),
        )
        tensors.append(load_file(tmp_path / str(i) / "adapter.safetensors"))
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
    assert not all(torch.equal(tensors[0][name], tensors[2][name]) for name in tensors[0])


def test_limit_train_is_drawn_with_the_seed(launch, tmp_path):
    result = launch(
        "--stage",
        "head",
        "--task",
        "rte",
        "--epochs",
        1,
        "--limit-train",
        10,
        "--out",
        tmp_path / "r",
    )
    assert result["train_examples"] == 10 and result["dev_examples"] == 40
    result = launch(
        "--stage", "head", "--task", "rte", "--epochs", 1, "--limit-dev", 7, "--out", tmp_path / "s"
    )
    assert result["dev_examples"] == 7 and round(result["accuracy"] * 7, 9) % 1 == 0


def test_fusion_regularization_enters_the_loss_and_weights_sum_to_one(encoder, data_dir, runs):
    bert = Bert.from_pretrained(encoder)
    for name in ("rte", "sst2"):
        load_adapter(bert, runs / name)
    add_fusion(bert, ["rte", "sst2"])
    assert fusion_regularization(bert).item() == pytest.approx(
        2 * 0.01 * 32 * 31 * 1e-12, rel=1e-3
    )  # two layers of 32 x 32
    for batch in dev_batches(encoder, data_dir)[:1]:
        bert(batch["input_ids"], batch["token_type_ids"], batch["attention_mask"])
    weights = fusion_weights(bert)
    assert set(weights) == {(0, "output"), (1, "output")}
    assert all(torch.allclose(s.sum(-1), torch.ones(s.shape[:2])) for s in weights.values())


def test_logits_do_not_depend_on_the_batch(encoder, data_dir, runs):
    """Alone, in a batch, in another order and with more padding: the same to 1e-5."""
    whole = dev_batches(encoder, data_dir, batch_size=40)[0]
    bert, head, _ = load_run(runs / "fusion-rte")
    logits = train.predict(bert, head, whole, torch.float32)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    shuffled = {name: tensor[order] for name, tensor in whole.items()}
    assert torch.allclose(
        train.predict(bert, head, shuffled, torch.float32), logits[order], atol=1e-5
    )
    inputs = [whole[name] for name in ("input_ids", "token_type_ids", "attention_mask")]
    wider = [torch.nn.functional.pad(tensor, (0, 7)) for tensor in inputs]
    assert torch.allclose(head(bert(*wider)), logits, atol=1e-5)
    for i in (0, 17, 39):
        T = whole["attention_mask"][i].sum()
        alone = [tensor[i : i + 1, :T] for tensor in inputs]
        assert torch.allclose(head(bert(*alone)), logits[i : i + 1], atol=1e-5)


def test_grouping_choices_by_length_changes_nothing(encoder, data_dir, launch, runs):
    batch = dev_batches(encoder, data_dir, "pick", batch_size=40)[0]
    bert, head, _ = load_run(runs / "pick")
    whole = head(bert(batch["input_ids"], batch["token_type_ids"], batch["attention_mask"]))
    assert whole.shape == (40, 3)
    assert torch.allclose(train.predict(bert, head, batch, torch.float32), whole, atol=1e-5)


def test_bfloat16_holds_frozen_weights_in_bf16_and_trained_ones_in_fp32(
    launch, data_dir, encoder, runs, tmp_path, monkeypatch
):
    dtypes = {}
    save_run = train.save

    def spy(args, bert, *rest):
        dtypes.update({name: p.dtype for name, p in bert.named_parameters()})
        save_run(args, bert, *rest)

    monkeypatch.setattr(train, "save", spy)
    launch(
        "--stage",
        "fusion",
        "--task",
        "rte",
        "--adapters",
        runs / "rte",
        runs / "sst2",
        "--epochs",
        1,
        "--dtype",
        "bfloat16",
        "--out",
        tmp_path / "run",
    )
    for name, dtype in dtypes.items():
        assert dtype == (torch.float32 if ".fusion." in name else torch.bfloat16), name
    assert all(
        t.dtype == torch.float32
        for t in load_file(tmp_path / "run" / "model_adapter_fusion.safetensors").values()
    )
    some = dev_batches(encoder, data_dir)
    low, high = (
        logits_of(tmp_path / "run", some, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)
    )
    assert low.dtype == torch.float32 and torch.allclose(low, high, atol=0.1)


def test_full_run_is_a_checkpoint(launch, data_dir, encoder, tmp_path):
    """Sequential fine-tuning: the directory of a fully fine-tuned run is a --model."""
    launch(
        "--stage", "full", "--task", "rte", "--epochs", 1, "--lr", "1e-3", "--out", tmp_path / "one"
    )
    one = Bert.from_pretrained(tmp_path / "one")
    assert not torch.equal(
        one.word_embeddings.weight, Bert.from_pretrained(encoder).word_embeddings.weight
    )
    result = launch(
        "--stage",
        "full",
        "--task",
        "sst2",
        "--epochs",
        1,
        "--model",
        tmp_path / "one",
        "--out",
        tmp_path / "two",
    )
    assert result["model"] == str(tmp_path / "one")
    shutil.rmtree(tmp_path / "one")
    assert len(logits_of(tmp_path / "two", dev_batches(encoder, data_dir, "sst2"))) == 40


@pytest.mark.parametrize("stage", ["adapter", "fusion"])
def test_interrupted_and_resumed_equals_uninterrupted(stage, launch, runs, tmp_path, monkeypatch):
    adapters = ["--adapters", runs / "rte", runs / "sst2"] if stage == "fusion" else []
    options = [
        "--stage",
        stage,
        "--task",
        "sst2",
        "--epochs",
        3,
        "--batch-size",
        16,
        "--lr",
        "5e-3",
        *adapters,
    ]  # 18 steps
    whole = launch(*options, "--out", tmp_path / "whole")
    file = {"adapter": "adapter.safetensors", "fusion": "model_adapter_fusion.safetensors"}[stage]

    cross_entropy = torch.nn.functional.cross_entropy
    for stop_in in (2, 8, 2, 3):  # in the first epoch, in the second twice, in the third
        steps = []

        def interrupt(*args, steps=steps, stop_in=stop_in):
            steps.append(1)
            if len(steps) == stop_in:  # in the middle of a step
                os.kill(os.getpid(), signal.SIGTERM)
            return cross_entropy(*args)

        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "cross_entropy", interrupt)
            with pytest.raises(KeyboardInterrupt):
                launch(*options, "--out", tmp_path / "cut", "--resume")
        assert not (tmp_path / "cut" / "metrics.json").exists()
        if stop_in == 8:
            with pytest.raises(ValueError, match="--resume"):
                launch(*options, "--out", tmp_path / "cut")
            with pytest.raises(ValueError, match="lr = 0.005, not 0.1"):
                launch(*options, "--out", tmp_path / "cut", "--resume", "--lr", 0.1)
    resumed = launch(*options, "--out", tmp_path / "cut", "--resume")
    assert {**resumed, "seconds": 0, "out": 0} == {**whole, "seconds": 0, "out": 0}
    a, b = (load_file(tmp_path / name / file) for name in ("whole", "cut"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    losses = [
        [
            json.loads(line)["loss"]
            for line in (tmp_path / name / "log.jsonl").read_text().splitlines()
        ]
        for name in ("whole", "cut")
    ]
    assert losses[0] == losses[1]
    assert not (tmp_path / "cut" / "resume.pt").exists()


def test_command_line(encoder, data_dir, tmp_path):
    """As a user types it: progress on stdout, the closing line is JSON, Ctrl-C says how to go
    on."""
    command = [
        "train.py",
        "--stage",
        "adapter",
        "--task",
        "rte",
        "--model",
        encoder,
        "--data-dir",
        data_dir,
        "--device",
        "cpu",
        "--out",
        tmp_path / "run",
    ]
    status, out, error = child.output([*command, "--epochs", "2"])
    assert status == 0, error
    result = json.loads(out.splitlines()[-1])
    assert result["stage"] == "adapter" and result["task"] == "rte" and 0 <= result["accuracy"] <= 1
    assert result == json.loads((tmp_path / "run" / "metrics.json").read_text())
    status, out, _ = child.output([*command, "--epochs", "2", "--resume"])
    assert status == 0 and json.loads(out.splitlines()[-1]) == result

    process = child.Program([*command, "--epochs", "500", "--patience", "500", "--overwrite"])
    while not process.stdout.readline().startswith("       1  "):
        pass
    process.send_signal(signal.SIGINT)
    stderr = process.stderr.read()
    assert process.wait(60) == 130
    assert (
        stderr.splitlines()[-1]
        == f"train.py: interrupted, continue with --resume --out {tmp_path / 'run'} in the same "
        "command"
    )
    assert (tmp_path / "run" / "resume.pt").exists() and not (
        tmp_path / "run" / "metrics.json"
    ).exists()


def test_weight_decay_spares_biases_norms_and_v(launch, runs, tmp_path, monkeypatch):
    groups = []
    adamw = train.AdamW
    monkeypatch.setattr(
        train, "AdamW", lambda given, **options: groups.extend(given) or adamw(given, **options)
    )
    launch(
        "--stage",
        "fusion",
        "--task",
        "rte",
        "--adapters",
        runs / "rte",
        runs / "sst2",
        "--epochs",
        1,
        "--weight-decay",
        0.1,
        "--out",
        tmp_path / "run",
    )
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    shapes = [[tuple(p.shape) for p in group["params"]] for group in groups]
    assert sorted(shapes[0]) == [(2, 32)] + [(32, 32)] * 5  # head, and two layers of Q and K
    assert sorted(shapes[1]) == [(2,)] + [(32,)] * 5 + [(32, 32)] * 2  # all biases, and V
