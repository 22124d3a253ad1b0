"""From text to batch with any Unicode: nothing crashes, no example is lost, lengths and ids stay
within bounds."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.implementations import ByteLevelBPETokenizer
from tokenizers.processors import RobertaProcessing

from conftest import VOCABULARY
from damage import tries, unhurried
from data import batches, get_task, load_split, split_by_length
from data import length_bucketed_batches as bucketed
from formats.tokenizer import load_tokenizer

KINDS = st.sampled_from(["words", "bytes"])


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
letters = st.sampled_from(HARD) | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
texts = st.lists(letters, max_size=6).map("".join)
pairs = st.lists(st.tuples(texts, st.none() | texts), min_size=1, max_size=8)


@settings(unhurried, max_examples=tries(250))
@given(pairs=pairs, max_length=st.integers(8, 40), name=KINDS)
def test_tokens(directories, pairs, max_length, name):
    """Each text alone gives what it gives among others: framed, not too long, only known ids,
    segments in order."""
    tokenizer, of_bytes = load_tokenizer(directories[name], max_length), name == "bytes"
    size = max(tokenizer.get_vocab().values()) + 1
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


rows = st.lists(st.tuples(texts, texts, texts, st.integers(0, 1)), min_size=1, max_size=20)


@settings(unhurried, max_examples=tries(90))
@given(rows, KINDS, st.booleans(), st.integers(1, 9), st.integers(0, 99))
def test_no_example_is_lost(directories, tmp_path_factory, rows, name, ascii, batch_size, seed):
    """JSON lines -> batches: every row once, with its own label, its own tokens and both of its
    choices, in any order."""
    directory, tokenizer = tmp_path_factory.mktemp("data"), load_tokenizer(directories[name], 40)
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
        for places, (ids, types, mask) in split_by_length(batch):
            assert mask.any(0).all()  # no column is padding alone
            for place, *row, real in zip(places.tolist(), ids, types, mask.bool(), strict=True):
                assert found[place] is None and not any(values[~real].any() for values in row)
                found[place] = tuple(values[real].tolist() for values in row)
        for i, label in enumerate(batch["labels"].tolist()):
            seen.append((found[2 * i : 2 * i + 2], label))
    assert sorted(seen) == sorted(expected)


lengths = st.lists(st.integers(1, 600), min_size=1, max_size=400).map(np.array)
seeds = st.none() | st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 99))  # and epochs


@settings(unhurried, max_examples=tries(300))
@given(lengths, st.integers(1, 40) | st.integers(1, 500), seeds, st.integers(1, 60))
def test_every_index_once(lengths, batch_size, seed, window):
    order = bucketed(lengths, batch_size, seed, window)
    assert sorted(np.concatenate(order).tolist()) == list(range(len(lengths)))
    assert len(order) == -(-len(lengths) // batch_size)
    assert all(1 <= len(batch) <= batch_size for batch in order)
    if seed is None:  # the longest batch comes first: what does not fit into memory fails at once
        assert (np.diff(lengths[np.concatenate(order)]) <= 0).all()
