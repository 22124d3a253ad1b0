"""From text to batch with any Unicode: nothing crashes, no example is lost, lengths and ids stay
within bounds."""

import itertools
import json

import numpy as np
import pytest
from tokenizers.implementations import ByteLevelBPETokenizer
from tokenizers.processors import RobertaProcessing

from conftest import VOCABULARY
from data import batches, get_task, length_groups, load_split
from data import length_bucketed_batches as bucketed
from formats.tokenizer import load_tokenizer

KINDS = ["words", "bytes"]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Two tiny vocabularies: WordPiece, and RoBERTa's byte-level BPE."""
    words, of_bytes = tmp_path_factory.mktemp("words"), tmp_path_factory.mktemp("bytes")
    pieces = "##a ##b ##c ##e b c d \u0301 \u65e5 \u05d0 \U0001f600".split()
    (words / "vocab.txt").write_text("\n".join([*VOCABULARY, *pieces]), encoding="utf-8")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(["the the \u202e\u2066"], special_tokens=["<s>", "</s>", "<mask>"])
    bpe.post_processor = RobertaProcessing(("</s>", 1), ("<s>", 0), add_prefix_space=False)
    bpe.save(str(of_bytes / "tokenizer.json"))
    return {"words": words, "bytes": of_bytes}


# what texts go wrong with: control characters, marks that combine or change direction, joiners,
# emoji in families, noncharacters, special tokens, very long words
HARD = ["\0", "\x1b", "\r\n", "\t", " ", "", "\u0301" * 20, "x" * 300, "\u65e5" * 100]
HARD += "\u202e \u2066 \u200d \ufeff \ufffd \uffff \u0130 \u1e9e \ufdfa \U0010ffff".split(" ")
HARD += ["\u2028", "\u0085", "\u00a0", "\u3000", "\u05d0\u05d1", "\u1100\u1161"]
HARD += "\U0001f468\u200d\U0001f469 [CLS] [SEP] [PAD] <s> </s> <mask> ##ing the The".split(" ")
TEXTS = [*HARD, "".join(HARD), " ".join(HARD[::-1]), "the cat, the dog"]


@pytest.mark.parametrize("max_length", [8, 40])
@pytest.mark.parametrize("name", KINDS)
def test_tokens(directories, max_length, name):
    """Each text alone gives what it gives among others: framed, not too long, only known ids,
    segments in order."""
    tokenizer, of_bytes = load_tokenizer(directories[name], max_length), name == "bytes"
    size = max(tokenizer.get_vocab().values()) + 1
    pairs = [pair for a in TEXTS for pair in ((a, None), (a, "the cat"), ("\u65e5 dog", a))]
    encodings = tokenizer.encode_batch([a if b is None else (a, b) for a, b in pairs])
    frame = ("<s>", "</s>") if of_bytes else ("[CLS]", "[SEP]")
    for (a, b), encoding in zip(pairs, encodings, strict=True):
        ids, types = encoding.ids, encoding.type_ids
        assert 2 <= len(ids) <= max_length and all(0 <= i < size for i in ids)
        assert (ids[0], ids[-1]) == tuple(map(tokenizer.token_to_id, frame))
        assert types == sorted(types)
        assert set(types) == ({0, 1} if b is not None and not of_bytes else {0})
        assert ids == tokenizer.encode(*(text for text in (a, b) if text is not None)).ids
        if of_bytes and b is None and len(ids) < max_length and not {"<", "["} & set(a):
            assert tokenizer.decode(ids) == a  # byte-level: nothing is unknown


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("ascii, batch_size, seed", [(True, 9, None), (False, 4, 7), (False, 1, 0)])
def test_no_example_is_lost(directories, tmp_path, name, ascii, batch_size, seed):
    """JSON lines -> batches: every row once, with its own label, its own tokens and both of its
    choices, in any order."""
    directory, tokenizer = tmp_path, load_tokenizer(directories[name], 40)
    rows = [(*texts, len(texts[0]) % 2) for texts in zip(TEXTS, TEXTS[1:], TEXTS[9:], strict=False)]
    written = [dict(text_a=a, choices=bs, label=label) for a, *bs, label in rows]
    lines = "".join(json.dumps(row, ensure_ascii=ascii) + "\n" for row in written)
    (directory / "pick").mkdir()
    (directory / "pick" / "train.jsonl").write_text(lines, encoding="utf-8", newline="")
    split = load_split(get_task("pick", directory), "train", tokenizer, directory)
    made = [([tokenizer.encode(a, b) for b in bs], label) for a, *bs, label in rows]
    expected = [([(e.ids, e.type_ids) for e in encodings], label) for encodings, label in made]
    seen = []
    for batch in batches(split, batch_size, 0, seed):
        found = [None] * len(batch["input_ids"])
        for places, (ids, types, mask) in length_groups(batch):
            assert mask.any(0).all()  # no column is padding alone
            for place, *row, real in zip(places.tolist(), ids, types, mask.bool(), strict=True):
                assert found[place] is None and not any(values[~real].any() for values in row)
                found[place] = tuple(values[real].tolist() for values in row)
        for i, label in enumerate(batch["labels"].tolist()):
            seen.append((found[2 * i : 2 * i + 2], label))
    assert sorted(seen) == sorted(expected)


@pytest.mark.parametrize("seed", [None, 0, (2**32 - 1, 9)])  # and epoch
@pytest.mark.parametrize("window", [1, 50])
def test_every_index_once(seed, window):
    for count, batch_size in itertools.product((1, 7, 64, 400), (1, 8, 33, 500)):
        lengths = np.random.default_rng(count).integers(1, 600, count)
        order = bucketed(lengths, batch_size, seed, window)
        assert sorted(np.concatenate(order).tolist()) == list(range(count))
        assert len(order) == -(-count // batch_size)
        assert all(1 <= len(batch) <= batch_size for batch in order)
        if seed is None:  # the longest batch first: what does not fit into memory fails at once
            assert (np.diff(lengths[np.concatenate(order)]) <= 0).all()
