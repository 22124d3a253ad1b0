"""formats.task_rows and runtime.results, without an encoder."""

import math

import pytest
import torch

from formats import task_rows
from runtime.results import Results


def test_labels_by_name_and_by_place():
    labels = ("Yes", "no", "NO")
    places = task_rows.make_label_ids(labels)
    assert places == {"Yes": 0, "no": 1, "NO": 2, "yes": 0}  # the first of several alike

    def index(value, of_the_hub=False):
        return task_rows.label_index(value, labels, places, {"nope": "no"}, of_the_hub)

    assert [index(value) for value in ("Yes", " yes\n", "NO", "nope")] == [0, 0, 2, 1]
    assert [index(value, of_the_hub=True) for value in (2, "1")] == [2, 1]
    for value in (1, 3, None, 0.0, "maybe"):
        with pytest.raises(ValueError, match=f"label {value!r} is not one of Yes, no, NO"):
            index(value)
    with pytest.raises(ValueError, match="hidden"):
        index(-1, of_the_hub=True)


def test_candidates_stay_together(tokenizer):
    examples = [([("red cat", None), ("a", "dog")], 1), ([("one", "two"), ("not", None)], 0)]
    columns = task_rows.encode(tokenizer, examples)
    ids = [
        [tokenizer.encode(*filter(None, pair)).ids for pair in candidates]
        for candidates, _ in examples
    ]
    assert columns["input_ids"] == ids and columns["label"] == [1, 0]
    assert columns["length"] == [max(map(len, group)) for group in ids]
    task_rows.check_candidates(examples[0][0], 2)
    with pytest.raises(ValueError, match="2 choices, expected 3"):
        task_rows.check_candidates(examples[0][0], 3)


def test_what_other_code_has_made_is_made_anew():
    code = task_rows.source_code(Results, Results.add)
    assert len(code) == 2 and any("class Results" in text for text in code)


def test_results_keep_the_order_of_the_batches():
    results = Results(5, 2)
    assert (results.size, results.steps) == (2, 3)
    for labels, loss in (([0, 1], 1.0), ([1, 1], 2.0), ([0], 4.0)):
        labels = torch.tensor(labels)
        results.add(labels, 1 - labels, torch.tensor(loss), labels >= 0)
    labels, predictions, loss = results.gathered(torch.long)
    assert labels.tolist() == [0, 1, 1, 1, 0] and predictions.tolist() == [1, 0, 0, 0, 1]
    assert loss == (1 + 1 + 2 + 2 + 4) / 5


def test_outputs_that_are_not_finite():
    results = Results(2, 2)
    logits = torch.tensor([[0.0, 1.0], [math.inf, 0.0]])
    results.add(
        torch.tensor([1, 0]), logits.argmax(-1), torch.tensor(0.5), logits.isfinite().all(-1)
    )
    with pytest.raises(FloatingPointError, match="not finite"):
        results.gathered(torch.long)
