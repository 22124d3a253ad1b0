"""The tokenizers of encoders, as `tokenizers` objects: from tokenizer.json, vocab.txt, or
vocab.json with merges.txt."""

import contextlib
import hashlib
import json
import os
import shutil
import threading
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
)


def load_tokenizer(directory, max_length, vocab_size=None, type_vocab_size=None):
    """The tokenizer of an encoder's directory: tokenizer.json, vocab.txt (WordPiece, BERT), or
    vocab.json and merges.txt (byte-level BPE, RoBERTa). Adds [CLS] a [SEP] b [SEP], or <s> a
    </s></s> b </s>, and cuts the longer of two texts first.

    A vocabulary with upper-case entries is a cased one, unless tokenizer_config.json says
    otherwise. Raises FileNotFoundError if none is there, ValueError for one that cannot be read, or
    that knows more than the `vocab_size` tokens and `type_vocab_size` kinds of segments of the
    encoder."""
    directory = Path(directory)
    try:
        with silence():
            tokenizer = read_tokenizer(directory)
            frame, single = tokenizer.encode("", ""), tokenizer.encode("")  # [CLS] [SEP] [SEP]
            lost = loses_text(tokenizer)
    except (FileNotFoundError, KeyboardInterrupt, MemoryError):
        raise
    except BaseException as e:  # the Rust side raises bare Exceptions, and panics are none
        reason = (str(e).splitlines() or [type(e).__name__])[0]
        raise ValueError(f"{directory}: its tokenizer cannot be read: {reason:.200}") from e
    known = max(tokenizer.get_vocab().values(), default=-1)
    known = max(known, *frame.ids, *single.ids, -1) + 1
    if vocab_size is not None and known > vocab_size:
        raise ValueError(
            f"the tokenizer in {directory} knows {known} tokens, the encoder {vocab_size}"
        )
    if not 1 <= len(frame) <= max_length - 2 or not 1 <= len(single):
        raise ValueError(
            f"{directory}: its tokenizer adds {len(frame)} tokens to a pair, of at most "
            f"{max_length}, and {len(single)} to a text"
        )
    kinds = max(frame.type_ids + single.type_ids + lost[1]) + 1
    if type_vocab_size is not None and kinds > type_vocab_size:
        raise ValueError(
            f"the tokenizer in {directory} knows {kinds} kinds of segments, "
            f"the encoder {type_vocab_size}"
        )
    if lost[0]:
        raise ValueError(f"{directory}: its tokenizer drops the {lost[0]} of two texts")
    tokenizer.enable_truncation(max_length, strategy="longest_first")
    return tokenizer


@contextlib.contextmanager
def silence():
    """Without the lines that the Rust side writes to stderr when it panics: the error is raised,
    too, and reported once."""
    try:
        kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    except OSError:  # stderr is closed
        yield
        return
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept), os.close(nowhere)


PROBE = ("Caf\u00e9 NAIVE na\u00efve 1,024.5 \u4f60\u597d it's <s> [SEP] \u2603", "a B  c\td the")
# such as a pattern that tries every way to split a text does not end on
SLOW = ("a" * 2000 + "!", "1" * 2000 + "a", " " * 2000 + "a", "a1 " * 700 + "\u2603")


def loses_text(tokenizer, seconds=10):
    """("first", "second" or "", segments of a pair): which of two texts leaves no token, though
    it has some alone. Raises ValueError if a few thousand characters take too long."""
    result = []

    def probe():
        try:
            words = [word for word in tokenizer.get_vocab() if word.isalnum()][:3]
            text = " ".join(words + ["a"])
            alone, pair = tokenizer.encode(text), tokenizer.encode(text, text)
            there = {*pair.sequence_ids} if {*alone.sequence_ids} - {None} else {0, 1}
            result.append(
                ("first" * (0 not in there) or "second" * (1 not in there), pair.type_ids)
            )
            for text in SLOW:
                tokenizer.encode(text)
            result.append("done")
        except BaseException as e:
            result.append(e)

    thread = threading.Thread(target=probe, daemon=True)  # Rust cannot be interrupted
    thread.start()
    thread.join(seconds)
    if not result or result[-1] != "done":
        if result and isinstance(result[-1], BaseException):
            raise result[-1]
        raise ValueError(f"it takes more than {seconds} s for a text of 2,000 characters")
    return result[0]


def tokenizer_digest(tokenizer):
    """SHA-256 of a tokenizer's vocabulary, and of what it makes of two short texts with letters,
    digits and signs of several kinds: another vocabulary or order, cased or not, and another frame
    are told apart. The same from vocab.txt and from a tokenizer.json that does the same."""
    pair = tokenizer.encode(*PROBE)
    vocabulary = sorted((i, word) for word, i in tokenizer.get_vocab().items())
    return hashlib.sha256(repr((vocabulary, pair.ids, pair.type_ids)).encode()).hexdigest()


def read_tokenizer(directory):
    """`load_tokenizer` without its checks."""
    if (directory / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    elif (directory / "vocab.txt").is_file():
        tokenizer = wordpiece(directory)
    elif (directory / "vocab.json").is_file() and (directory / "merges.txt").is_file():
        tokenizer = byte_level_bpe(directory)
    else:
        raise FileNotFoundError(
            f"no tokenizer in {directory}: it needs tokenizer.json or vocab.txt"
        )
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode("\u2603")  # fails without a token for what is unknown
    return tokenizer


def wordpiece(directory):
    """BERT's tokenizer from vocab.txt, one token a line."""
    words = (directory / "vocab.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n")
    vocab = {word.rstrip("\r"): i for i, word in enumerate(words)}
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    lacking = [token for token in special[:4] if token not in vocab]
    if lacking:
        raise ValueError(f"vocab.txt has no {lacking[0]}")
    # not isupper(): uncased ones have "ℝ"; [CLS], and in Chinese BERT's vocabulary, which is
    # lower-cased, <S> and <T>
    words = (word for word in vocab if not word.startswith("[") and word not in ("<S>", "<T>"))
    options = {"do_lower_case": all(word == word.lower() for word in words)}
    config = directory / "tokenizer_config.json"
    if config.is_file():
        options |= json.loads(config.read_text(encoding="utf-8"))
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token in special if token in vocab]
    )
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=bool(options["do_lower_case"]),
        strip_accents=options.get("strip_accents"),  # None: as lowercase is
        handle_chinese_chars=bool(options.get("tokenize_chinese_chars", True)),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(
        ("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"])
    )
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def byte_level_bpe(directory):
    """RoBERTa's tokenizer from vocab.json and merges.txt."""
    vocab = json.loads((directory / "vocab.json").read_text(encoding="utf-8"))
    lines = (directory / "merges.txt").read_text(encoding="utf-8").split("\n")
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    if not all("".join(pair) in vocab for pair in merges):  # else the library panics
        raise ValueError("merges.txt joins what vocab.json does not have")
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token in ("<s>", "<pad>", "</s>", "<unk>")]
        + [AddedToken("<mask>", lstrip=True, special=True)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    sep, cls = (("</s>", tokenizer.token_to_id("</s>")), ("<s>", tokenizer.token_to_id("<s>")))
    tokenizer.post_processor = processors.RobertaProcessing(
        sep, cls, trim_offsets=True, add_prefix_space=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def copy_tokenizer(source, directory):
    """Copies the files of an encoder's tokenizer from its directory to another one."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
