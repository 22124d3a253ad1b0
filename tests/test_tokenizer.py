"""Every kind of vocabulary, and the files beside it, give the ids of transformers."""

import json
import random

import pytest

from conftest import GOLDEN
from formats.tokenizer import CONFIG, copy_tokenizer, encode_pairs, load_tokenizer

TOKENIZERS = GOLDEN / "tokenizers"
EXPECTED = json.loads((TOKENIZERS / "expected.json").read_text(encoding="utf-8"))
# words of a vocabulary, the files beside it, a text, its ids
BESIDE = json.loads((TOKENIZERS / "beside.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", EXPECTED)
def test_ids_and_truncation_are_those_of_transformers(kind):
    """The vocabulary alone says whether it is cased. `encode_pairs`, which is faster, cuts one or
    two texts of random lengths to the same ids and types, and says whether there were more."""
    for texts, max_length, ids, type_ids in EXPECTED[kind]:
        encoding = load_tokenizer(TOKENIZERS / kind, max_length).encode(*texts)
        assert (encoding.ids, encoding.type_ids) == (ids, type_ids), (texts, max_length)
    rng = random.Random(0)
    for length in [8, 9, 20, 31] * 10:
        tokenizer = load_tokenizer(TOKENIZERS / kind, length)
        words = ["the", "a [SEP] b", "x"]
        texts = [" ".join(rng.choices(words, k=rng.randrange(30))) for _ in "ab"]
        pairs = [(a, b) for a in texts for b in (*texts, None)]
        for pair, (ids, types, is_cut) in zip(pairs, encode_pairs(tokenizer, pairs), strict=True):
            one = tokenizer.encode(*[text for text in pair if text is not None])
            assert (ids.tolist(), types.tolist()) == (one.ids, one.type_ids)
            assert is_cut == bool(one.overflowing)


def write(directory, words, files):
    """A vocab.txt with these words, and files beside it; tokenizer.json is an uncased one."""
    vocabulary = "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words.split()])
    directory.mkdir(exist_ok=True)
    (directory / "vocab.txt").write_text(vocabulary + "\n\n", encoding="utf-8-sig")  # with a BOM
    (directory / "config.json").write_text('{"model_type": "bert"}')
    if "tokenizer.json" in files:
        (directory / CONFIG).write_text('{"do_lower_case": true}')
        load_tokenizer(directory, 20).save(str(directory / "tokenizer.json"))
    for name in files.keys() - {"tokenizer.json"}:
        (directory / name).write_text(json.dumps(files[name]), encoding="utf-8")


@pytest.mark.parametrize("words, files, text, ids", BESIDE)
def test_the_files_beside_a_vocabulary_are_obeyed(words, files, text, ids, tmp_path, capsys):
    """Also from a copy, as a fully trained run has it."""
    write(tmp_path / "a", words, files)
    (tmp_path / "b").mkdir()
    copy_tokenizer(tmp_path / "a", tmp_path / "b")
    for name in "ab":
        assert load_tokenizer(tmp_path / name, 20).encode(text).ids == ids
    assert "is cased" not in capsys.readouterr().out


JUDGED = [
    ("the cat COVID", "THE Cát", "the cat"),  # with an entry that was added
    (" ".join(f"w{i}" for i in range(1000)) + " A B C D E", "W7", "w7"),
    ("the The Cat", "THE", "[UNK]"),
    ("か が て で", "が で", "が で"),
]


@pytest.mark.parametrize("words, text, tokens", JUDGED)
def test_the_whole_vocabulary_says_what_is_cased(words, text, tokens, tmp_path, capsys):
    """Where no file does, which is said; and blank lines are no tokens."""
    write(tmp_path, words, {})
    tokenizer = load_tokenizer(tmp_path, 20)
    assert tokenizer.encode(text).tokens == ["[CLS]", *tokens.split(), "[SEP]"]
    assert tokenizer.get_vocab_size() == 5 + len(words.split())
    assert "is cased; by its entries" in capsys.readouterr().out
