"""A fusion in the reference library, over the adapters of this project's runs: results.md sets it
beside ours. It needs an environment with experiments/requirements-peer.txt, and nothing of ours:

    .venv-peer/bin/python results/reference_fusion.py --model MINILM --data runs/two/both \\
        --adapters runs/composition-2/runs/source-match runs/composition-2/runs/source-order \\
        --seeds 0 1 2 3 4 --out reference.csv
"""

import argparse
import json
from pathlib import Path

import adapters
import numpy as np
import torch
from adapters.composition import Fuse
from transformers import AutoTokenizer

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--data", type=Path, required=True, help="with train.jsonl, validation.jsonl")
parser.add_argument("--adapters", nargs="+", required=True)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--seeds", type=int, nargs="+", default=[0])
parser.add_argument("--train-examples", type=int, default=240)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--lr", type=float, default=5e-4)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--max-length", type=int, default=40)
options = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(options.model)


def read(split):
    lines = (options.data / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


train_rows, dev_rows = read("train"), read("validation")
labels = sorted({row["label"] for row in train_rows})


def batch_of(rows):
    texts = [row["text_a"] for row in rows], [row["text_b"] for row in rows]
    settings = {"truncation": "longest_first", "max_length": options.max_length, "padding": True}
    batch = tokenizer(*texts, return_tensors="pt", **settings)
    return batch, torch.tensor([labels.index(row["label"]) for row in rows])


def batches(rows):
    return [rows[i : i + options.batch_size] for i in range(0, len(rows), options.batch_size)]


def accuracy(model):
    model.eval()
    right = 0
    with torch.inference_mode():
        for rows in batches(dev_rows):
            batch, y = batch_of(rows)
            right += (model(**batch).logits.argmax(-1) == y).sum().item()
    return right / len(dev_rows)


def train(seed):
    """The development accuracy after each epoch."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    rows = [train_rows[i] for i in rng.permutation(len(train_rows))[: options.train_examples]]
    model = adapters.AutoAdapterModel.from_pretrained(options.model)
    files = {"with_head": False, "use_safetensors": True}
    names = [model.load_adapter(path, **files) for path in options.adapters]
    model.add_adapter_fusion(names)
    model.add_classification_head("target", num_labels=len(labels), layers=2)
    model.train_adapter_fusion(Fuse(*names))
    model.active_head = "target"
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.lr, weight_decay=0.0)
    steps = options.epochs * len(batches(rows))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    found = []
    for _ in range(options.epochs):
        model.train()
        for part in batches([rows[i] for i in rng.permutation(len(rows))]):
            batch, y = batch_of(part)
            loss = torch.nn.functional.cross_entropy(model(**batch).logits, y)
            (loss + model.base_model.get_fusion_regularization_loss()).backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        found.append(accuracy(model))
        print(seed, len(found), f"{found[-1]:.4f}", flush=True)
    return found


with open(options.out, "w") as file:
    print("seed,epoch,accuracy", file=file)
    for seed in options.seeds:
        for epoch, value in enumerate(train(seed), 1):
            print(f"{seed},{epoch},{value:.4f}", file=file, flush=True)
