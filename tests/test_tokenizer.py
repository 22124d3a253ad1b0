"""formats.tokenizer: the tokens of every kind of vocabulary, truncated to the length."""

import json

import pytest

from conftest import VOCABULARY
from formats.tokenizer import load_tokenizer
from reference import GOLDEN


def tokens(directory, *texts, max_length=20):
    return " ".join(load_tokenizer(directory, max_length).encode(*texts).tokens)


def test_roberta_tokens():
    pair = load_tokenizer(GOLDEN / "roberta" / "encoder", 30).encode("the cat", "the dog")
    assert "".join(pair.tokens) == "<s>theĠcat</s></s>theĠdog</s>" and set(pair.type_ids) == {0}


WORDPIECE = [  # words of the vocabulary, options, a text, its tokens
    ("the cat", None, "THE", "the"),
    ("the É", None, "THE", "[UNK]"),  # a cased vocabulary
    ("the ##s ##S", None, "THE", "[UNK]"),
    ("the ℝ ##ℝ ™", None, "THE", "the"),  # they have no lower case; Google's uncased vocabulary
    ("the <S> <T>", None, "THE", "the"),  # Chinese BERT's vocabulary, by Google's tokenization.py
    ("the The", {"do_lower_case": True}, "THE", "the"),
    ("the cat", {"do_lower_case": False}, "THE", "[UNK]"),
    ("red réd", {"do_lower_case": True}, "RÉD", "red"),
    ("red réd", {"do_lower_case": True, "strip_accents": False}, "RÉD", "réd"),
    ("red réd", {"do_lower_case": False, "strip_accents": True}, "réd", "red"),
    ("的 的的", {"tokenize_chinese_chars": True}, "的的", "的 的"),
    ("的 的的", {"tokenize_chinese_chars": False}, "的的", "的的"),
]


@pytest.mark.parametrize("words, options, text, expected", WORDPIECE)
def test_kinds_of_wordpiece(words, options, text, expected, tmp_path):
    """Cased or uncased, by the vocabulary or by tokenizer_config.json, which is obeyed."""
    vocabulary = "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words.split()])
    (tmp_path / "vocab.txt").write_text(vocabulary, encoding="utf-8")
    if options is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    assert tokens(tmp_path, text) == f"[CLS] {expected} [SEP]"


def test_wordpiece_and_truncation(encoder):
    pair = load_tokenizer(encoder, 48).encode("The Red cat.", "blue zebra")
    assert " ".join(pair.tokens) == "[CLS] the red cat . [SEP] blue [UNK] [SEP]"
    assert pair.type_ids == [0] * 6 + [1] * 3 and "zebra" not in VOCABULARY
    cut = tokens(encoder, "red " * 20, "cat dog bird", max_length=12)
    assert cut == "[CLS] red red red red red red [SEP] cat dog bird [SEP]"
    cut = tokens(encoder, "red " * 20, "cat " * 30, max_length=12).split()
    assert len(cut) == 12 and 4 <= cut.count("red") <= 5
