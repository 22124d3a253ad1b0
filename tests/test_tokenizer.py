"""Every kind of vocabulary gives the ids of transformers (tests/golden), and each file beside it is
read, or refused by the name of its field."""

import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from formats.tokenizer import CONFIG, copy_tokenizer, load_tokenizer
from reference import GOLDEN, PEER, needs_peer

TOKENIZERS = GOLDEN / "tokenizers"
EXPECTED = json.loads((TOKENIZERS / "expected.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", EXPECTED)
def test_ids_and_truncation_are_those_of_transformers(kind):
    """The vocabulary alone says whether it is cased."""
    for texts, max_length, ids, type_ids in EXPECTED[kind]:
        encoding = load_tokenizer(TOKENIZERS / kind, max_length).encode(*texts)
        assert (encoding.ids, encoding.type_ids) == (ids, type_ids), (texts, max_length)


def write(directory, words, files):
    """A vocab.txt with these words behind the special tokens, and JSON files beside it; the name
    lower.json stands for a tokenizer.json of an uncased tokenizer."""
    vocabulary = "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words.split()])
    directory.mkdir(exist_ok=True)
    (directory / "vocab.txt").write_text(vocabulary + "\n\n", encoding="utf-8-sig")  # with a BOM
    for name, value in {"config.json": {"model_type": "bert"}, **files}.items():
        if name == "lower.json":
            (directory / CONFIG).write_text('{"do_lower_case": true}')
            load_tokenizer(directory, 20).save(str(directory / "tokenizer.json"))
        else:
            (directory / name).write_text(json.dumps(value), encoding="utf-8")
    return directory


def config(**fields):
    return {CONFIG: {"do_lower_case": True, "tokenizer_class": "BertTokenizer", **fields}}


E1 = {"content": "[E1]", "special": True, "normalized": False, "lstrip": True}
E1 |= {"rstrip": False, "single_word": False}
MAP = {"special_tokens_map.json": {"additional_special_tokens": ["[E1]"]}}
READ = [  # words of the vocabulary, the files beside it, a text, its tokens
    ("the The", config(), "THE", "the"),
    ("the cat", config(do_lower_case=False), "THE", "[UNK]"),
    ("red réd", config(strip_accents=False), "RÉD", "réd"),
    ("red réd", config(do_lower_case=False, strip_accents=True), "réd", "red"),
    ("的 的的", config(tokenize_chinese_chars=False), "的的", "的的"),
    ("the", {**config(), "added_tokens.json": {"[E1]": 6}, **MAP}, "[E1]THE[E1]", "[E1] the [E1]"),
    ("a b", {**config(), "added_tokens.json": {"a-b": 7}}, "A-B a", "a-b a"),
    ("the", config(added_tokens_decoder={"6": E1}), "the [E1]the", "the [E1] the"),
    ("<s> </s> it", config(cls_token="<s>", sep_token="</s>"), "It <s>", "<s> it <s> </s>"),
    (
        "the",
        config(mask_token={**E1, "content": "[MASK]", "__type": "AddedToken"}),
        "the  [MASK]the",
        "the [MASK] the",
    ),
    ("it It", {"lower.json": 0, **config(do_lower_case=False)}, "It", "It"),
    ("red réd", {"lower.json": 0, **config(strip_accents=False)}, "RÉD", "réd"),
    (
        "it It",
        {"lower.json": 0, **config(clean_text=True, never_split=None, max_len=9)},
        "It",
        "it",
    ),
]
JUDGED = [  # the same where no file says what is cased: the whole vocabulary does
    ("the cat", {}, "THE Cát", "the cat"),
    ("the cat COVID", {}, "THE", "the"),  # an entry that was added
    (" ".join(f"w{i}" for i in range(1000)) + " A B C D E", {}, "W7", "w7"),
    ("the The Cat", {}, "THE", "[UNK]"),
    ("か が て で", {}, "が で", "が で"),
]


@pytest.mark.parametrize("words, files, text, expected", READ + JUDGED)
def test_the_files_beside_a_vocabulary_are_obeyed(words, files, text, expected, tmp_path, capsys):
    """Also from a copy, as a fully trained run has it; and blank lines are no tokens."""
    expected = expected if expected.startswith("<s>") else f"[CLS] {expected} [SEP]"
    added = any(token in json.dumps(files) for token in ("[E1]", "a-b"))
    sizes = SimpleNamespace(vocab_size=5 + len(words.split()) + added, type_vocab_size=2)
    directory, other = write(tmp_path / "a", words, files), tmp_path / "b"
    other.mkdir()
    copy_tokenizer(directory, other)
    for place in (directory, other):
        tokenizer = load_tokenizer(place, 20, sizes)
        tokens = [tokenizer.id_to_token(i) for i in tokenizer.encode(text).ids]
        assert " ".join(tokens) == expected
    assert ("is cased; by its entries" in capsys.readouterr().out) == (CONFIG not in files)


REFUSED = [  # a file, and what it says
    (CONFIG, {"tokenizer_class": "BertJapaneseTokenizer"}),
    ("config.json", {"tokenizer_class": "BertJapaneseTokenizer"}),
    (CONFIG, {"tokenizer_class": "RobertaTokenizer"}),  # which needs tokenizer.json
    (CONFIG, {"do_basic_tokenize": False}),
    (CONFIG, {"never_split": ["a"]}),
    (CONFIG, {"truncation_side": "left"}),
    (CONFIG, {"of_the_future": 1}),
    ("special_tokens_map.json", {"image_token": "<i>"}),
    ("added_tokens.json", {"[E1]": 9}),  # another number than transformers would give it
    (CONFIG, {"added_tokens_decoder": {"9": {"content": "[E1]"}}}),
]


@pytest.mark.parametrize("name, fields", REFUSED)
def test_what_is_not_known_is_refused_by_its_name(name, fields, tmp_path):
    write(tmp_path, "the", {name: fields})
    field = "[E1]" if "E1" in str(fields) else next(iter(fields))
    with pytest.raises(ValueError, match=re.escape(field)):
        load_tokenizer(tmp_path, 20)


PROGRAM = """
import json, sys
from transformers import AutoTokenizer

for directory, text in json.load(open(sys.argv[1])):
    print(json.dumps(AutoTokenizer.from_pretrained(directory)(text)["input_ids"]))
"""


@needs_peer
def test_all_of_them_are_transformers_ids(tmp_path):
    cases = [[str(tmp_path / str(i)), text] for i, (_, _, text, _) in enumerate(READ)]
    for (words, files, _, _), (directory, _) in zip(READ, cases, strict=True):
        write(Path(directory), words, files)
        # transformers reads a BOM, and blank lines, as entries
        vocabulary = Path(directory, "vocab.txt").read_text(encoding="utf-8-sig").strip()
        Path(directory, "vocab.txt").write_text(vocabulary + "\n", encoding="utf-8")
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    words = [PEER, "-c", PROGRAM, tmp_path / "cases.json"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    ours = [load_tokenizer(directory, 20).encode(text).ids for directory, text in cases]
    assert ours == [json.loads(line) for line in done.stdout.splitlines()]
