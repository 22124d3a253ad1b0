"""Run by test_adapterhub.py with the reference library's Python: peer_pooler.py DIRECTORY

Writes an encoder with pooler, an adapter, the head that the library makes of
BertForSequenceClassification's, and the logits of that model with the adapter."""

import sys
from pathlib import Path

import adapters
import torch
from adapters import AutoAdapterModel
from safetensors.torch import save_file
from transformers import BertConfig, BertForSequenceClassification

directory = Path(sys.argv[1])
torch.manual_seed(0)
config = BertConfig(
    vocab_size=40,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=24,
    num_labels=3,
)
static = BertForSequenceClassification(config).eval()
for p in static.parameters():
    if p.ndim > 1:
        torch.nn.init.normal_(p, std=0.2)
static.save_pretrained(directory / "encoder")
model = AutoAdapterModel.from_pretrained(directory / "encoder")
model.add_adapter("a", config="pfeiffer")
for name, p in model.named_parameters():
    if ".adapters." in name:
        torch.nn.init.normal_(p, std=0.3)
model.save_adapter(directory / "adapter", "a", with_head=False)
model.save_head(directory / "head", "default")
adapters.init(static)
static.load_adapter(str(directory / "adapter"), set_active=True)
static.eval()
ids = torch.randint(5, 40, (4, 9))
with torch.no_grad():
    save_file({"ids": ids, "logits": static(ids).logits}, directory / "expected.safetensors")
