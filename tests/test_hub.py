"""The Hugging Face hub itself: what this project names is there, and loads (make test-hub)."""

import os

import datasets
import huggingface_hub
import pytest
import torch

from adapter import load_adapter
from bert import Bert
from data import TASKS, get_task, load_split
from formats.rows import Source, plain_label
from formats.sources import find_adapters
from formats.tokenizer import load_tokenizer
from fusion import add_fusion, fusion_weights

pytestmark = pytest.mark.skipif("HUB_TESTS" not in os.environ, reason="needs a network")


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.hub is not None])
def test_a_data_set(name, tokenizer):
    """It is where TASKS says, with the task's columns; labels are in its order, or texts."""
    task = get_task(name, source := Source())
    candidates = len(task.labels) if task.is_multiple_choice else 1
    repository, configuration, revision = task.hub
    found = huggingface_hub.dataset_info(repository, revision=revision)
    assert found.id == repository, f"{repository} has moved to {found.id}"
    rows = datasets.load_dataset(repository, configuration, revision=revision)["train"]
    names = [feature.names for feature in rows.features.values() if hasattr(feature, "names")]
    assert names in ([], [task.labels]), f"{repository} has the labels {names}, not {task.labels}"
    for split in ("train", "validation"):
        examples = load_split(task, source, split, tokenizer, limit=20)
        assert [len(example.input_ids) for example in examples] == [candidates] * 20
    if not names:
        rows = source.read_split(task, "train")[1].values()
        labels = {plain_label(row[task.label]) for row in rows}
        assert labels == {*task.indices}, f"{repository} has the labels {labels}"


@pytest.mark.parametrize("name", ["google-bert/bert-base-uncased", "FacebookAI/roberta-base"])
@torch.inference_mode()
def test_an_encoder(name):
    """With all of the paper's adapters, under a fusion."""
    bert = Bert.from_pretrained(name)
    for task, directory in find_adapters(["paper"], bert.config.model_type).items():
        load_adapter(bert, directory, task)
    add_fusion(bert, [*bert.adapter_configs])
    tokens = load_tokenizer(bert.directory, 32, bert.config).encode("It rains.", "It is wet.")
    assert bert(torch.tensor([tokens.ids]), torch.tensor([tokens.type_ids])).isfinite().all()
    assert all(s.shape[-1] == 16 for s in fusion_weights(bert).values())
