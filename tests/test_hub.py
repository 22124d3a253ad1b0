"""The Hugging Face hub itself: what this project names is there, and loads. Runs where there is a
network, and only what HUB_TESTS names (make test-hub): data, sizes, encoders, adapters, or
a task or encoder."""

import os
import re

import pytest
import torch

from adapter import load_adapter
from bert import Bert
from data import TASKS, get_task, load_split
from formats.rows import load_from_hub, origin
from formats.tokenizer import load_tokenizer
from fusion import add_fusion, fusion_weights
from runtime.adapters import resolve_adapters

WANTED = {*os.environ.get("HUB_TESTS", "").split(",")} - {""}
ON_HUB = [name for name, task in TASKS.items() if task.hub is not None]
ENCODERS = ["google-bert/bert-base-uncased", "FacebookAI/roberta-base"]
assert WANTED <= {"data", "sizes", "encoders", "adapters", *ON_HUB}, f"HUB_TESTS={WANTED}"


def of(part, names=ENCODERS):
    """The names for which a part of these tests is wanted."""
    wanted = [name for name in names if {part, name} & WANTED]
    return pytest.mark.parametrize("name", wanted)


@of("data", ON_HUB)
def test_a_data_set(name, tokenizer):
    """Its rows have the columns of the task, and its labels are in the task's order."""
    task = get_task(name)
    candidates = len(task.labels) if task.is_multiple_choice else 1
    for split in ("train", "validation"):
        tokens = load_split(task, split, tokenizer, limit=20)
        assert [len(ids) for ids in tokens["input_ids"]] == [candidates] * 20
        assert re.fullmatch("[0-9a-f]{40}", origin(tokens)["revision"])
    features = load_from_hub(*task.hub)["train"].features
    names = [feature.names for feature in features.values() if hasattr(feature, "names")]
    assert names in ([], [list(task.labels)])


@of("sizes", ON_HUB)
def test_the_sizes_of_a_data_set(name):
    task = get_task(name)
    rows, (train, dev) = load_from_hub(*task.hub), task.hub_sizes or task.sizes
    if task.dev_from_train:
        assert len(rows["train"]) == train + dev
    else:
        assert (len(rows["train"]), len(rows[task.dev])) == (train, dev)


@of("encoders")
@torch.inference_mode()
def test_an_encoder(name):
    bert = Bert.from_pretrained(name)
    tokenizer = load_tokenizer(bert.directory, 32, bert.config.vocab_size)
    tokens = tokenizer.encode("It rains.", "It is wet.")
    ids = torch.tensor([tokens.ids])
    h = bert(ids, torch.tensor([tokens.type_ids]), torch.ones_like(ids))
    assert h.shape == (1, len(tokens.ids), bert.config.hidden_size) and h.isfinite().all()


@of("adapters")
@torch.inference_mode()
def test_the_paper_s_adapters(name):
    """All of them, under a fusion."""
    bert = Bert.from_pretrained(name)
    found = resolve_adapters(["paper"], bert.config, name, bert.digest)
    assert [*found] == [*TASKS]
    for task, directory in found.items():
        load_adapter(bert, directory, task)
    add_fusion(bert, [*found])
    ids = torch.tensor([[5, 6, 7, 8]])
    assert bert(ids, torch.zeros_like(ids), torch.ones_like(ids)).isfinite().all()
    assert all(s.shape[-1] == 16 for s in fusion_weights(bert).values())
