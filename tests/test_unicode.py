"""From text to batch with any Unicode: no example is lost, whatever its length."""

import json

import pytest

from data import batches, collate, get_task, load_split
from formats.tokenizer import load_tokenizer
from reference import GOLDEN

# what texts go wrong with: control characters, marks that combine or change direction, joiners,
# line ends of Unicode, noncharacters, special tokens, very long words
HARD = ["\0", "\x1b", "\r\n", "\t", " ", "", "\u0301" * 20, "x" * 300, "\u65e5" * 100]
HARD += "\u202e \u200d \ufeff \ufffd \uffff \u0130 \u1e9e \ufdfa \U0010ffff \u2028".split(" ")
HARD += ["\u0085", "\u00a0", "\u3000", "\U0001f468\u200d\U0001f469", "[SEP]", "</s>", "##ing"]
TEXTS = [*HARD, "".join(HARD), " ".join(HARD[::-1]), "the cat, the dog"]


@pytest.mark.parametrize("kind", ["uncased", "roberta"])
def test_no_example_is_lost(kind, tmp_path):
    """JSON lines -> batches: every row once, with its label, its tokens and both of its choices."""
    tokenizer, expected, found = load_tokenizer(GOLDEN / "tokenizers" / kind, 40), [], []
    (tmp_path / "pick").mkdir()
    with open(tmp_path / "pick" / "train.jsonl", "w", encoding="utf-8", newline="") as file:
        for i, (a, *choices) in enumerate(zip(TEXTS, TEXTS[1:], TEXTS[9:], strict=False)):
            row = {"text_a": a, "choices": choices, "label": i % 2}
            file.write(json.dumps(row, ensure_ascii=i % 3 > 0) + "\n")
            encodings = [tokenizer.encode(a, b) for b in choices]
            expected.append((tuple((e.ids, e.type_ids) for e in encodings), i % 2))
    examples = load_split(get_task("pick", tmp_path), "train", tokenizer)
    for indices in batches(examples, 4, seed=0):
        batch = collate([examples[i] for i in indices], pad_token_id=7)
        ids, types, mask, labels = batch.values()
        assert (ids[mask == 0] == 7).all() and not types[mask == 0].any()
        each = zip(ids.tolist(), types.tolist(), mask.sum(1), strict=True)
        rows = [(i[:n], t[:n]) for i, t, n in each]
        found += zip(zip(rows[::2], rows[1::2], strict=True), labels.tolist(), strict=True)
    assert sorted(found) == sorted(expected)
