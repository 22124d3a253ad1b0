"""The tokenizers of encoders, as `tokenizers` objects, from the files that transformers has for
them. A field that is not known here, and may change tokens, is refused by its name."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, BertWordPieceTokenizer, Tokenizer
from tokenizers.normalizers import BertNormalizer

from formats.files import error_prefix, is_file, note, read_json

CONFIG, ADDED, SPECIAL = "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"
TOKENIZER_FILES = ("tokenizer.json", CONFIG, "vocab.txt", ADDED, SPECIAL)
# What tokenizer_config.json may say. "classes": {class: the file from which it is read}; "parts":
# fields that override a part of tokenizer.json, as in transformers; "special": special tokens;
# "always": fields that may have this one value; "harmless": fields that change no token
KNOWN = read_json(Path(__file__).with_name("tokenizer_fields.json"))


def load_tokenizer(directory, max_length, config=None):
    """An encoder's tokenizer: of two texts [CLS] a [SEP] b [SEP], or <s> a </s></s> b </s>, cut to
    `max_length` tokens, the longer text first. config: the encoder's, which must embed them all."""
    directory = Path(directory)
    path, vocab = directory / "tokenizer.json", directory / "vocab.txt"
    if not is_file(path) and not is_file(vocab):
        raise FileNotFoundError(f"no tokenizer in {directory}: no tokenizer.json or vocab.txt")
    with error_prefix(directory, is_read=True):
        options = read_options(directory)
        has_json = is_file(path)
        with error_prefix(path.name if has_json else vocab.name, is_read=True):
            tokenizer = Tokenizer.from_file(str(path)) if has_json else wordpiece(vocab, options)
        for field, (part, name) in KNOWN["parts"].items():
            if field in options and hasattr(getattr(tokenizer, part), name):
                setattr(getattr(tokenizer, part), name, options[field])
        add_tokens(tokenizer, directory, options)
    tokenizer.no_padding()
    if tokenizer.num_special_tokens_to_add(is_pair=True) == 0:
        raise ValueError(f"{directory}: its tokenizer adds neither [CLS] nor [SEP]")
    if config is not None:
        pair = tokenizer.encode("a", "a")
        tokens, types = 1 + max(*tokenizer.get_vocab().values(), *pair.ids), 1 + max(pair.type_ids)
        if tokens > config.vocab_size or types > (config.type_vocab_size or 2):  # 0: unused
            found = f"{tokens} tokens and {types} types of segments"
            raise ValueError(f"the tokenizer in {directory} has {found}, more than the encoder")
    tokenizer.enable_truncation(max_length, strategy="longest_first")
    return tokenizer


def encode_pairs(tokenizer, pairs):
    """[(ids [T], types of segments [T], whether it is cut)] of [(text, text or None)], as by
    `tokenizer.encode`. That, of two long texts, also returns each part that is cut off one beside
    each that is cut off the other: it grows with the square of their lengths."""
    pairs = [[text for text in pair if text is not None] for pair in pairs]
    texts = [text for pair in pairs for text in pair]
    found = iter(tokenizer.encode_batch(texts, add_special_tokens=False))
    result, frames = [], {}  # {1 or 2 texts: [(number of a text, or None, a token, its type)]}
    for count in (1, 2):
        one = tokenizer.encode(*["a"] * count)
        parts = [*zip(one.sequence_ids, one.ids, one.type_ids, strict=True)]
        # a text has one entry, though "a" may be several tokens
        frames[count] = [p for i, p in enumerate(parts) if p[0] is None or p[0] != parts[i - 1][0]]
    for count in map(len, pairs):
        texts = [next(found) for _ in range(count)]
        size = tokenizer.truncation["max_length"] - tokenizer.num_special_tokens_to_add(count > 1)
        lengths = [len(text) + sum(map(len, text.overflowing)) for text in texts]
        # each text may have what the other one leaves, and at least half
        kept = [min(n, size - min(sum(lengths) - n, size // 2)) for n in lengths]
        if sum(kept) > size:  # of an odd number the longer text has one more
            kept[lengths[0] > lengths[1]] -= 1
        parts = [([i] if n is None else texts[n].ids[: kept[n]], t) for n, i, t in frames[count]]
        ids = np.concatenate([ids for ids, _ in parts]).astype(np.int32)
        types = np.concatenate([[t] * len(ids) for ids, t in parts]).astype(np.int32)
        result.append((ids, types, kept != lengths))
    return result


def tokenizer_sha256(tokenizer):
    """SHA-256 of a tokenizer's vocabulary, and of its tokens of two texts: it is the same for a
    vocab.txt and a tokenizer.json that do the same, and another one for cased and uncased."""
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.no_truncation()
    text = "Caf\u00e9 NAIVE na\u00efve 1,024.5 \u4f60\u597d it's <s> [SEP] \u2603"
    pair = tokenizer.encode(text, "a B  c\td the")
    vocabulary = sorted((i, word) for word, i in tokenizer.get_vocab().items())
    return hashlib.sha256(repr((vocabulary, pair.ids, pair.type_ids)).encode()).hexdigest()


def read_options(directory):
    """The fields of its JSON files; special tokens are lists of objects. May raise ValueError."""
    paths = [directory / name for name in ("config.json", CONFIG, SPECIAL)]
    model, config, special = (read_json(path) if is_file(path) else {} for path in paths)
    options = {"tokenizer_class": model.get("tokenizer_class"), **config}
    if "added_tokens_decoder" not in config:  # which is newer than the map
        options |= special
    kind = (options.pop("tokenizer_class") or "BertTokenizer").removesuffix("Fast")
    source = KNOWN["classes"].get(kind)
    if source is None or (source != "vocab.txt" and not (directory / "tokenizer.json").is_file()):
        raise ValueError(f"tokenizer_class = {kind!r:.100} is not supported")
    for field, value in options.items():
        known = not value or any(field in KNOWN[n] for n in ("parts", "special", "harmless"))
        if field in KNOWN["always"]:
            known = value == KNOWN["always"][field]
        if not known:
            raise ValueError(f"{field} = {value!r:.100} is not supported")
        if field in KNOWN["special"]:
            values = value if isinstance(value, list) else [value]
            options[field] = [v if isinstance(v, dict) else {"content": v} for v in values if v]
    whole = KNOWN["parts"] if source == "tokenizer.json alone" else ()
    return {field: value for field, value in options.items() if field not in whole}


def add_tokens(tokenizer, directory, options):
    """Adds what transformers has beside the vocabulary, and special tokens, never normalized."""
    special = {one["content"]: one for name in KNOWN["special"] for one in options.get(name, [])}
    added = {int(i): one for i, one in options.get("added_tokens_decoder", {}).items()}
    if not added and is_file(directory / ADDED):
        added = {i: {"content": text} for text, i in read_json(directory / ADDED).items()}
    there = {one.content for one in tokenizer.get_added_tokens_decoder().values()}
    for token in [*(added[i] for i in sorted(added)), *special.values()]:
        if (text := token["content"]) not in there:
            flags = {**token, "special": text in special or token.get("special", False)}
            flags = {name: flags[name] for name in flags if name not in ("content", "__type")}
            tokenizer.add_tokens([AddedToken(text, **flags)])
            there.add(text)
    for i, token in added.items():
        if (number := tokenizer.token_to_id(token["content"])) != i:
            raise ValueError(f"added token {token['content']!r:.50} is number {number}, not {i}")


def wordpiece(path, options):
    """BERT's tokenizer from vocab.txt, with an entry a line. Completes its options."""
    lines = path.read_text(encoding="utf-8-sig").rstrip("\n").split("\n")
    vocab = {word: i for i, word in enumerate(lines)}
    for name in ("unk", "cls", "sep", "pad", "mask"):
        if f"[{name.upper()}]" in vocab:
            options.setdefault(f"{name}_token", [{"content": f"[{name.upper()}]"}])
    if "do_lower_case" not in options:
        # texts are cased as nearly all of the vocabulary is; a few entries were added to it later
        strip = BertNormalizer(False, False, strip_accents=True, lowercase=False).normalize_str
        words = [word for word in vocab if not re.fullmatch(r"\[.*\]|<.*>", word)]
        few = max(1, len(words) // 100)
        lower, plain = (sum(word != f(word) for word in words) <= few for f in (str.lower, strip))
        found = {"do_lower_case": lower, "strip_accents": lower and plain}
        note(f"no file says how {path} is cased; by its entries: {json.dumps(found)}")
        options |= found | options
    unk, sep, cls = (options[f"{name}_token"][0]["content"] for name in ("unk", "sep", "cls"))
    tokenizer = BertWordPieceTokenizer(vocab, unk, sep, cls, pad_token="", mask_token="")
    return Tokenizer.from_str(tokenizer.to_str())


def copy_tokenizer(source, directory):
    """Copies the files of an encoder's tokenizer from its directory to another one."""
    for name in TOKENIZER_FILES:
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, Path(directory) / name)
