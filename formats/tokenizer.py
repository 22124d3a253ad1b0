"""The tokenizers of encoders, as `tokenizers` objects: from tokenizer.json or vocab.txt."""

import hashlib
import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.implementations import BertWordPieceTokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")


def load_tokenizer(directory, max_length, config=None):
    """
    The tokenizer in an encoder's directory: tokenizer.json, or BERT's vocab.txt. It adds [CLS] a
    [SEP] b [SEP], or RoBERTa's <s> a </s></s> b </s>, and truncates to `max_length` tokens, the
    longer of two texts first.

    A vocabulary with upper-case entries is a cased one, unless tokenizer_config.json says
    otherwise. config: the encoder's. Raises FileNotFoundError if there is no tokenizer, ValueError
    if it cannot be read, or has more tokens or more segment types than the encoder has embeddings.
    """
    directory = Path(directory)
    try:
        tokenizer = read_tokenizer(directory)
    except FileNotFoundError:
        raise
    except Exception as e:  # the library raises no other kind
        raise ValueError(f"{directory}: its tokenizer cannot be read: {e}") from e
    added = tokenizer.num_special_tokens_to_add(is_pair=True)
    if not 0 < added <= max_length - 2:
        raise ValueError(f"{directory}: its tokenizer adds {added} tokens, of {max_length}")
    if config is not None:
        pair = tokenizer.encode("a", "a")
        highest = max(*tokenizer.get_vocab().values(), *pair.ids)
        types = config.type_vocab_size or 2  # 0: the encoder looks at none
        if highest >= config.vocab_size or max(pair.type_ids) >= types:
            found = f"{highest + 1} tokens and {max(pair.type_ids) + 1} types of segments"
            known = f"{config.vocab_size} and {config.type_vocab_size}"
            raise ValueError(f"the tokenizer in {directory} has {found}, the encoder {known}")
    tokenizer.enable_truncation(max_length, strategy="longest_first")
    return tokenizer


PROBE = ("Caf\u00e9 NAIVE na\u00efve 1,024.5 \u4f60\u597d it's <s> [SEP] \u2603", "a B  c\td the")


def tokenizer_sha256(tokenizer):
    """SHA-256 of a tokenizer's vocabulary, and of the tokens of two short texts with letters,
    digits and symbols of several kinds: it differs for another vocabulary, for cased and uncased,
    and is the same for a vocab.txt and a tokenizer.json that do the same."""
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.no_truncation()
    pair = tokenizer.encode(*PROBE)
    vocabulary = sorted((i, word) for word, i in tokenizer.get_vocab().items())
    return hashlib.sha256(repr((vocabulary, pair.ids, pair.type_ids)).encode()).hexdigest()


def read_tokenizer(directory):
    """`load_tokenizer` without its checks and without truncation."""
    if (directory / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    elif (directory / "vocab.txt").is_file():
        tokenizer = wordpiece(directory)
    else:
        needed = "it needs tokenizer.json or vocab.txt"
        raise FileNotFoundError(f"no tokenizer in {directory}: {needed}")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode("\u2603")  # fails if there is no token for unknown characters
    return tokenizer


def wordpiece(directory):
    """BERT's tokenizer from vocab.txt, one token a line."""
    lines = (directory / "vocab.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n")
    vocab = {line.rstrip("\r"): i for i, line in enumerate(lines)}
    # Not isupper(): uncased vocabularies have "ℝ", which is upper-case but has no lower case. That
    # of Chinese BERT, which is uncased, has <S> and <T> besides [CLS] and the like.
    words = [word for word in vocab if not word.startswith("[") and word not in ("<S>", "<T>")]
    options = {"do_lower_case": all(word == word.lower() for word in words)}
    config = directory / "tokenizer_config.json"
    if config.is_file():
        options |= json.loads(config.read_text(encoding="utf-8"))
    wrapped = BertWordPieceTokenizer(
        vocab,
        lowercase=bool(options["do_lower_case"]),
        strip_accents=options.get("strip_accents"),  # None: if lowercase
        handle_chinese_chars=bool(options.get("tokenize_chinese_chars", True)),
    )
    return wrapped._tokenizer  # like the others a plain Tokenizer


def copy_tokenizer(source, directory):
    """Copies the files of an encoder's tokenizer from its directory to another one."""
    for name in TOKENIZER_FILES:
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, Path(directory) / name)
