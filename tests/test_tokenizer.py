"""formats.tokenizer: the tokens of every kind of vocabulary, cut to the length."""

import json
import shutil

import pytest

from conftest import VOCABULARY
from damage import GOLDEN
from formats.tokenizer import load_tokenizer


def test_roberta_tokens(tmp_path):
    directory = GOLDEN / "roberta" / "encoder"
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(directory / name, tmp_path)
    whole, parts = load_tokenizer(directory, 30), load_tokenizer(tmp_path, 30)
    for texts in [
        ("the cat sat on the mat.", "the dog"),
        ("The  man",),
        (" a", ""),
        ("the park, the park", "a"),
    ]:
        a, b = whole.encode(*texts), parts.encode(*texts)
        assert (a.ids, a.type_ids, a.tokens) == (b.ids, b.type_ids, b.tokens)
    tokens = parts.encode("the cat", "the dog").tokens
    middle = tokens.index("</s>")
    assert (
        tokens[0] == "<s>"
        and tokens[middle : middle + 2] == ["</s>", "</s>"]
        and tokens[-1] == "</s>"
    )
    assert tokens.count("</s>") == 3 and set(parts.encode("the cat", "the dog").type_ids) == {0}
    assert "".join(tokens[1:middle]) == "theĠcat"


@pytest.mark.parametrize(
    "words, config, cased",
    [
        ("the cat", None, False),
        ("the The", None, True),
        ("the É", None, True),
        ("the ##s ##S", None, True),
        (
            "the ℝ ##ℝ ™",
            None,
            False,
        ),  # upper-case, but not to be lowered: so it is in Google's uncased vocabulary
        ("the The", {"do_lower_case": True}, False),
        ("the cat", {"do_lower_case": False}, True),
        ("the The", {}, True),
    ],
)
def test_cased_or_uncased(words, config, cased, tmp_path):
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words.split()]) + "\n"
    )
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokens = load_tokenizer(tmp_path, 9).encode("THE the").tokens
    assert tokens == (
        ["[CLS]", "[UNK]", "the", "[SEP]"] if cased else ["[CLS]", "the", "the", "[SEP]"]
    )


def test_wordpiece(encoder, tmp_path):
    tokenizer = load_tokenizer(encoder, 48)
    encoding = tokenizer.encode("The Red cat.", "blue zebra")
    assert encoding.tokens == ["[CLS]", "the", "red", "cat", ".", "[SEP]", "blue", "[UNK]", "[SEP]"]
    assert encoding.type_ids == [0] * 6 + [1] * 3
    (tmp_path / "vocab.txt").write_text(
        "\n".join([*VOCABULARY, "Red"])
    )  # upper-case entries: a cased vocabulary
    assert load_tokenizer(tmp_path, 48).encode("Red red").tokens == ["[CLS]", "Red", "red", "[SEP]"]
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    assert load_tokenizer(tmp_path, 48).encode("Red red").tokens == ["[CLS]", "red", "red", "[SEP]"]


def test_the_longer_text_is_cut_first(encoder):
    encoding = load_tokenizer(encoder, 12).encode("red " * 20, "cat dog bird")
    assert encoding.tokens == ["[CLS]", *["red"] * 6, "[SEP]", "cat", "dog", "bird", "[SEP]"]
    encoding = load_tokenizer(encoder, 12).encode("red " * 20, "cat " * 30)
    assert len(encoding.ids) == 12 and 4 <= encoding.tokens.count("red") <= 5


def test_chinese_bert_is_lower_cased(tmp_path):
    """Google's tokenization.py: its vocabulary has <S> and <T>, and no other capitals."""
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "<S>", "<T>", "red", "的"])
    )
    assert load_tokenizer(tmp_path, 20).encode("RED").tokens == ["[CLS]", "red", "[SEP]"]


@pytest.mark.parametrize(
    "options, text, tokens",
    [
        ({"do_lower_case": True}, "RÉD", ["red"]),
        ({"do_lower_case": True, "strip_accents": False}, "RÉD", ["réd"]),
        ({"do_lower_case": False, "strip_accents": True}, "réd", ["red"]),
        ({"do_lower_case": False}, "réd", ["réd"]),
        ({"tokenize_chinese_chars": True}, "的的", ["的", "的"]),
        ({"tokenize_chinese_chars": False}, "的的", ["的的"]),
    ],
)
def test_tokenizer_config_is_obeyed(options, text, tokens, tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "red", "réd", "的", "的的"]
    (tmp_path / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    assert load_tokenizer(tmp_path, 20).encode(text).tokens[1:-1] == tokens
