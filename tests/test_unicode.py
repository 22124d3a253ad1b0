"""From text to batch with any Unicode: nothing crashes, no example is lost, lengths and ids stay
within bounds."""

import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from conftest import VOCABULARY
from damage import tries
from data import (
    TASKS,
    batches,
    collate,
    get_task,
    length_bucketed_batches,
    load_split,
    split_by_length,
)
from formats.tokenizer import load_tokenizer

bounded = settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
VOCABULARIES = ("uncased", "cased", "bytes")


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Three tiny vocabularies: WordPiece, uncased and cased, and byte-level BPE."""
    root = tmp_path_factory.mktemp("vocabularies")
    pieces = (
        ["##" + c for c in "abcdefgin"]
        + list("abcdefgin")
        + ["\u0301", "\u65e5", "\u05d0", "\U0001f600"]
    )
    for name, more in (("uncased", []), ("cased", ["The", "A", "\u00c9"])):
        (root / name).mkdir()
        (root / name / "vocab.txt").write_text(
            "\n".join([*dict.fromkeys([*VOCABULARY, *pieces, *more])]), encoding="utf-8"
        )
    # GPT-2's 256 letters for bytes: printable Latin-1 stands for itself, the rest is moved behind
    # it
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(b) for b in plain] + [chr(256 + i) for i in range(256 - len(plain))]
    merges = [("t", "h"), ("th", "e"), ("\u0120", "the"), ("\u00e2", "\u0122")]
    tokens = [
        "<s>",
        "<pad>",
        "</s>",
        "<unk>",
        "<mask>",
        *letters,
        *("".join(pair) for pair in merges),
    ]
    (root / "bytes").mkdir()
    (root / "bytes" / "vocab.json").write_text(
        json.dumps({token: i for i, token in enumerate(tokens)})
    )
    (root / "bytes" / "merges.txt").write_text(
        "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges), encoding="utf-8"
    )
    return {name: root / name for name in VOCABULARIES}


# characters of every kind but surrogates, and what texts go wrong with: control characters, NUL,
# marks that combine or change direction, joiners, emoji in families, noncharacters, special tokens,
# very long words
HARD = [
    "\0",
    "\x1b",
    "\r\n",
    "\t",
    "\u0301" * 20,
    "\u202e",
    "\u2066",
    "\u200d",
    "\ufeff",
    "\ufffd",
    "\uffff",
    "\u2028",
    "\u0085",
    "\u05d0\u05d1",
    "\u0645\u0631",
    "\u65e5\u672c",
    "\u0130",
    "\u1e9e",
    "\ufdfa",
    "\u1100\u1161",
    "\U0001f468\u200d\U0001f469",
    "\U0001f1e9\U0001f1ea",
    "\U0010ffff",
    "\u00a0",
    "\u3000",
    "[CLS]",
    "[SEP]",
    "[PAD]",
    "[MASK]",
    "<s>",
    "</s>",
    "<mask>",
    "##ing",
    "the",
    "The",
    " ",
    "",
    "x" * 300,
    "\u65e5" * 100,
]
texts = st.lists(
    st.sampled_from(HARD) | st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    max_size=6,
).map("".join)


@settings(bounded, max_examples=tries(250))
@given(
    pairs=st.lists(st.tuples(texts, st.none() | texts), min_size=1, max_size=8),
    max_length=st.integers(8, 40),
    name=st.sampled_from(VOCABULARIES),
)
def test_tokens(directories, pairs, max_length, name):
    """Each text alone gives what it gives among others: framed, not too long, only known ids,
    segments in order."""
    tokenizer = load_tokenizer(directories[name], max_length)
    size = max(tokenizer.get_vocab().values()) + 1
    encodings = tokenizer.encode_batch([a if b is None else (a, b) for a, b in pairs])
    first, last = (
        tokenizer.token_to_id(token)
        for token in (("<s>", "</s>") if name == "bytes" else ("[CLS]", "[SEP]"))
    )
    assert len(encodings) == len(pairs)
    for (a, b), encoding in zip(pairs, encodings, strict=True):
        assert 2 <= len(encoding.ids) <= max_length and all(0 <= i < size for i in encoding.ids)
        assert encoding.ids[0] == first and encoding.ids[-1] == last
        assert encoding.type_ids == sorted(encoding.type_ids)
        assert set(encoding.type_ids) == ({0, 1} if b is not None and name != "bytes" else {0})
        assert encoding.ids == tokenizer.encode(*(text for text in (a, b) if text is not None)).ids
        if (
            name == "bytes"
            and b is None
            and len(encoding.ids) < max_length
            and not any(token in a for token in ("<", "["))
        ):
            assert tokenizer.decode(encoding.ids) == a  # byte-level: nothing is unknown


@settings(bounded, max_examples=tries(50))
@given(
    rows=st.lists(st.tuples(texts, texts, st.integers(0, 1)), min_size=1, max_size=30),
    name=st.sampled_from(VOCABULARIES),
    ascii=st.booleans(),
    batch_size=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_no_example_is_lost(directories, tmp_path_factory, rows, name, ascii, batch_size, seed):
    """JSON lines -> batches: every row once, with its own label and its own tokens, in any
    order."""
    directory = tmp_path_factory.mktemp("data")
    (directory / "rte").mkdir()
    lines = [
        json.dumps(dict(sentence1=a, sentence2=b, label=label), ensure_ascii=ascii) + "\n"
        for a, b, label in rows
    ]
    (directory / "rte" / "train.jsonl").write_text("".join(lines), encoding="utf-8", newline="")
    tokenizer = load_tokenizer(directories[name], 40)
    split = load_split(get_task("rte", directory), "train", tokenizer, directory)
    expected = [(tokenizer.encode(a, b).ids, label) for a, b, label in rows]
    assert [
        (ids[0], label) for ids, label in zip(split["input_ids"][:], split["label"][:], strict=True)
    ] == expected
    seen = []
    for batch in batches(split, batch_size, 0, seed):
        for ids, mask, label in zip(
            batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True
        ):
            seen.append((ids[mask.bool()].tolist(), label.item()))
    assert sorted(seen) == sorted(expected)


@settings(bounded, max_examples=tries(40))
@given(
    rows=st.lists(
        st.tuples(texts, st.lists(texts, min_size=3, max_size=3), st.integers(0, 2)),
        min_size=1,
        max_size=12,
    ),
    name=st.sampled_from(VOCABULARIES),
    batch_size=st.integers(1, 5),
)
def test_choices_stay_together(directories, tmp_path_factory, rows, name, batch_size):
    directory = tmp_path_factory.mktemp("data")
    (directory / "pick").mkdir()
    lines = [
        json.dumps(dict(text_a=a, choices=choices, label=label)) + "\n"
        for a, choices, label in rows
    ]
    (directory / "pick" / "train.jsonl").write_text("".join(lines))
    tokenizer = load_tokenizer(directories[name], 40)
    split = load_split(get_task("pick", directory), "train", tokenizer, directory)
    expected = [[tokenizer.encode(a, choice).ids for choice in choices] for a, choices, _ in rows]
    assert split["input_ids"][:] == expected and split["label"][:] == [label for *_, label in rows]
    for batch in batches(split, batch_size, 0, seed=1):
        found = [None] * len(batch["input_ids"])
        for places, (ids, _, mask) in split_by_length(batch):
            for place, row, real in zip(places.tolist(), ids, mask.bool(), strict=True):
                assert found[place] is None
                found[place] = row[real].tolist()
        for i, label in enumerate(batch["labels"].tolist()):
            assert (found[3 * i : 3 * i + 3], label) in [
                (ids, row[2]) for ids, row in zip(expected, rows, strict=True)
            ]


@settings(bounded, max_examples=tries(50))
@given(before=texts, surrogate=st.integers(0xD800, 0xDFFF), after=texts)
@example(before="", surrogate=0xD83D, after="")
def test_half_a_surrogate_pair_is_an_error(tmp_path_factory, directories, before, surrogate, after):
    """JSON can escape it, UTF-8 has no bytes for it: the file is named, no character is made up."""
    directory = tmp_path_factory.mktemp("data")
    (directory / "rte").mkdir()
    line = json.dumps(
        {"sentence1": f"{before}{chr(surrogate)}-{after}", "sentence2": "", "label": 0}
    )
    (directory / "rte" / "train.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match="train.jsonl.*surrogate"):
        load_split(
            get_task("rte", directory),
            "train",
            load_tokenizer(directories["uncased"], 40),
            directory,
        )


# --------------------------------------------------------------------------------------------------
# Batches

numbers = st.lists(st.integers(1, 600), min_size=1, max_size=400).map(np.array)
numbers |= st.builds(
    lambda n, seed: np.random.default_rng(seed).integers(1, 600, n),
    st.integers(1, 3000),
    st.integers(0, 99),
)
seeds = (
    st.none() | st.integers(0, 2**32 - 1) | st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 99))
)


@settings(bounded, max_examples=tries(300))
@given(
    lengths=numbers,
    batch_size=st.integers(1, 40) | st.integers(1, 500),
    seed=seeds,
    window=st.integers(1, 60),
)
def test_every_index_once(lengths, batch_size, seed, window):
    order = length_bucketed_batches(lengths, batch_size, seed, window)
    assert sorted(np.concatenate(order).tolist()) == list(range(len(lengths)))
    assert len(order) == -(-len(lengths) // batch_size) and all(
        1 <= len(batch) <= batch_size for batch in order
    )
    again = length_bucketed_batches(lengths, batch_size, seed, window)
    assert all(np.array_equal(one, two) for one, two in zip(order, again, strict=True))
    if seed is None:  # the longest batch comes first: what does not fit into memory fails at once
        assert (np.diff(lengths[np.concatenate(order)]) <= 0).all()


candidates = st.lists(st.integers(0, 9), min_size=1, max_size=20)
examples = st.integers(1, 5).flatmap(
    lambda C: st.lists(
        st.tuples(st.lists(candidates, min_size=C, max_size=C), st.integers(0, C)),
        min_size=1,
        max_size=9,
    )
)


@settings(bounded, max_examples=tries(250))
@given(examples=examples, pad=st.integers(0, 9))
def test_collate_and_groups(examples, pad):
    """Also with real tokens that have the padding's id."""
    flat = [ids for choices, _ in examples for ids in choices]
    rows = {
        "input_ids": [choices for choices, _ in examples],
        "label": [label for _, label in examples],
        "token_type_ids": [
            [[k % 2 for k in range(len(ids))] for ids in choices] for choices, _ in examples
        ],
    }
    batch = collate(rows, pad)
    T = max(map(len, flat))
    assert batch["labels"].tolist() == rows["label"]
    for name in ("input_ids", "token_type_ids", "attention_mask"):
        assert batch[name].shape == (len(flat), T) and batch[name].dtype == torch.int64
    for i, ids in enumerate(flat):
        padding = T - len(ids)
        assert batch["input_ids"][i].tolist() == ids + [pad] * padding
        assert batch["attention_mask"][i].tolist() == [1] * len(ids) + [0] * padding
        assert (
            batch["token_type_ids"][i].tolist() == [k % 2 for k in range(len(ids))] + [0] * padding
        )
    found = {}
    for places, (ids, types, mask) in split_by_length(batch):
        assert (
            ids.shape == types.shape == mask.shape and mask.any(0).all()
        )  # no column is padding alone
        for place, row, real in zip(places.tolist(), ids, mask.bool(), strict=True):
            assert place not in found
            found[place] = row[real].tolist()
    assert [found[i] for i in range(len(flat))] == flat


def test_the_tasks_of_the_paper_take_any_text():
    """Templates are filled with the text as it is, whatever it holds."""
    hard = "_{0}%s\\1\0"
    assert TASKS["winogrande"].candidates("a _ b", hard, "x") == [
        (f"a {hard} b", None),
        ("a x b", None),
    ]
    assert TASKS["hellaswag"].candidates(hard, hard, [hard]) == [(hard, f"{hard} {hard}")]
    assert TASKS["social_i_qa"].candidates(hard, hard, hard) == [(hard, f"{hard} {hard}")]
