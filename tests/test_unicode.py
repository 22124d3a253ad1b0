"""From text to batch with any Unicode: no example is lost, whatever its length."""

import json

import pytest

from data import batches, get_task, length_groups, load_split
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
    tokenizer, made = load_tokenizer(GOLDEN / "tokenizers" / kind, 40), []
    (tmp_path / "pick").mkdir()
    with open(tmp_path / "pick" / "train.jsonl", "w", encoding="utf-8", newline="") as file:
        for i, (a, *choices) in enumerate(zip(TEXTS, TEXTS[1:], TEXTS[9:], strict=False)):
            row = {"text_a": a, "choices": choices, "label": i % 2}
            file.write(json.dumps(row, ensure_ascii=i % 3 > 0) + "\n")
            made.append(([tokenizer.encode(a, b) for b in choices], i % 2))
    split = load_split(get_task("pick", tmp_path), "train", tokenizer, tmp_path)
    expected = [([(e.ids, e.type_ids) for e in encodings], label) for encodings, label in made]
    seen = []
    for batch in batches(split, 4, 0, 7):
        found = [None] * len(batch["input_ids"])
        for places, group in length_groups(batch):
            for place, ids, types, mask in zip(places.tolist(), *group, strict=True):
                real = mask.bool()
                assert found[place] is None and not ids[~real].any() and not types[~real].any()
                found[place] = ids[real].tolist(), types[real].tolist()
        for i, label in enumerate(batch["labels"].tolist()):
            seen.append((found[2 * i : 2 * i + 2], label))
    assert sorted(seen) == sorted(expected)
