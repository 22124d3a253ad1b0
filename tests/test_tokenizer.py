"""Every kind of vocabulary gives transformers' ids (tests/make_golden.py), and the options beside a
vocab.txt are obeyed."""

import json

import pytest

from formats.tokenizer import load_tokenizer
from reference import GOLDEN

TOKENIZERS = GOLDEN / "tokenizers"
EXPECTED = json.loads((TOKENIZERS / "expected.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", EXPECTED)
def test_ids_and_truncation_are_those_of_transformers(kind):
    """The vocabulary alone says whether it is cased."""
    for texts, max_length, ids, type_ids in EXPECTED[kind]:
        encoding = load_tokenizer(TOKENIZERS / kind, max_length).encode(*texts)
        assert (encoding.ids, encoding.type_ids) == (ids, type_ids), (texts, max_length)


WORDPIECE = [  # words of the vocabulary, tokenizer_config.json, a text, its tokens
    ("the ##s ##S", {}, "THE", "[UNK]"),  # cased by its ##S alone
    ("the The", {"do_lower_case": True}, "THE", "the"),
    ("the cat", {"do_lower_case": False}, "THE", "[UNK]"),
    ("red réd", {"do_lower_case": True, "strip_accents": False}, "RÉD", "réd"),
    ("red réd", {"do_lower_case": False, "strip_accents": True}, "réd", "red"),
    ("的 的的", {"tokenize_chinese_chars": False}, "的的", "的的"),
]


@pytest.mark.parametrize("words, options, text, expected", WORDPIECE)
def test_tokenizer_config_is_obeyed(words, options, text, expected, tmp_path):
    vocabulary = "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words.split()])
    (tmp_path / "vocab.txt").write_text(vocabulary, encoding="utf-8")
    if options:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    assert load_tokenizer(tmp_path, 20).encode(text).tokens == ["[CLS]", expected, "[SEP]"]
