"""An encoder's files, whatever their kind: Google's TensorFlow checkpoints, safetensors, PyTorch's
.bin.

A checkpoint's tensors are looked up by the names that the Hugging Face hub uses today.
"""

import hashlib
import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

from formats.files import listed, read_json, read_tensors, write_json, write_tensors
from formats.hub import commit_of, download
from formats.tensorflow import read_tensorflow


@dataclass
class BertConfig:
    """The fields of `bert_config.json` and `config.json` that change what is computed.

    Raises ValueError, naming the field, for a configuration that is not a BERT or RoBERTa encoder.
    """

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    classifier_dropout: float | None = None
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int = 0
    position_embedding_type: str = "absolute"
    model_type: str = "bert"

    def __post_init__(self):
        check_config(self)

    @property
    def max_length(self):
        """The longest input in tokens. RoBERTa's positions start after its padding index."""
        first = self.pad_token_id + 1 if self.model_type == "roberta" else 0
        return self.max_position_embeddings - first


@dataclass
class Checkpoint:
    """An encoder's files, found and opened; its tensors are read by `read`."""

    directory: Path
    config_path: Path
    weights_path: Path
    config: BertConfig
    names: dict  # the hub's name of a tensor today -> its name in the file
    tensors: dict  # name in the file -> tensor, of TensorFlow a function that reads it
    digest: str | None = None  # of what `read` has read

    def read(self, shapes):
        """
        {name: fp32 tensor} of exactly the tensors in `shapes`, {the hub's name: shape}.

        Raises ValueError that names the file and what is missing, unknown or of another shape.
        """
        names, result, missing, wrong = dict(self.names), {}, [], []
        google = self.weights_path.suffix == ".index"
        try:
            for hub, shape in shapes.items():
                if (name := names.pop(hub, None)) is None:
                    missing.append(hub)
                    continue
                tensor = self.tensors[name]() if google else self.tensors[name]
                if tensor.shape != shape:
                    shown = f"{list(tensor.shape)}, {self.config_path.name} says {list(shape)}"
                    wrong.append(f"{listed([name])} has shape {shown}")
                elif not tensor.is_floating_point():
                    wrong.append(
                        f"{listed([name])} holds {tensor.dtype}, not floating-point numbers"
                    )
                else:
                    result[hub] = tensor.float()
            # a fine-tuned Hugging Face model may have any head; of Google's, nothing but the
            # encoder is left
            encoder = "" if google else r"(embeddings|encoder)\.(?!position_ids$)"
            unknown = [name for hub, name in names.items() if re.match(encoder, hub)]
            problems = wrong[:3]
            if missing:
                problems.append(f"it lacks {listed(missing)}")
            if unknown:
                problems.append(f"it has unknown tensors {listed(unknown)}")
            if problems:
                raise ValueError("; ".join(problems))
        except ValueError as e:
            raise ValueError(f"{self.weights_path}: {e}") from e
        self.digest = digest_of(result)
        return result


def digest_of(tensors):
    """SHA-256 of {name: fp32 tensor}: of names, shapes and every number. The same encoder has the
    same digest in whatever kind of file it is, and whatever its tensors are called there."""

    def one(name):
        tensor = tensors[name].contiguous()
        return f"{name} {list(tensor.shape)} {hashlib.sha256(tensor.numpy()).hexdigest()}\n"

    with ThreadPoolExecutor() as pool:  # hashlib lets other threads run
        return hashlib.sha256("".join(pool.map(one, sorted(tensors))).encode()).hexdigest()


def open_encoder(source, modules):
    """The Checkpoint at `source`: a directory as Google published it (bert_config.json,
    bert_model.ckpt.*), a directory with config.json and model.safetensors or pytorch_model.bin, or
    else a Hugging Face hub id.

    modules: the hub's names of an encoder's modules. Raises FileNotFoundError if there is no such
    checkpoint, ValueError, naming the file, if it cannot be read."""
    directory = fetch_encoder(source)
    config_path, weights_path = checkpoint_files(directory)
    config = read_config(config_path)
    modules = "|".join(map(re.escape, modules))
    known = re.compile(rf"(encoder\.layer\.\d+\.)?({modules})\.(weight|bias)")

    def unknown(names):
        return [name for hub, name in hub_names(names).items() if not known.fullmatch(hub)]

    google = weights_path.suffix == ".index"
    tensors = read_tensorflow(weights_path, unknown) if google else read_tensors(weights_path)
    try:
        names = hub_names(tensors)
        layers = {
            match[1] for name in names if (match := re.match(r"encoder\.layer\.(\d+)\.", name))
        }
        # before as many are made as a damaged config may ask for
        if len(layers) != config.num_hidden_layers:
            raise ValueError(
                f"it has {len(layers)} layers, {config_path.name} says {config.num_hidden_layers}"
            )
    except ValueError as e:
        raise ValueError(f"{weights_path}: {e}") from e
    return Checkpoint(directory, config_path, weights_path, config, names, tensors)


def read_pooler(directory):
    """{"weight": [d, d], "bias": [d]} of the pretrained pooler, which the encoder itself does not
    need. Raises ValueError if the checkpoint has none."""
    _, weights_path = checkpoint_files(directory)
    google = weights_path.suffix == ".index"
    if google:
        others = re.compile(r"(?!bert/(pooler|embeddings)/).*")
        tensors = read_tensorflow(weights_path, lambda names: [], others)
    else:
        tensors = read_tensors(weights_path)
    names = hub_names(tensors)
    found = {}
    for kind in ("weight", "bias"):
        name = names.get(f"pooler.dense.{kind}")
        if name is None:
            raise ValueError(f"{weights_path}: it has no pooler, which the head is to read")
        found[kind] = (tensors[name]() if google else tensors[name]).float()
    return found


def write_encoder(directory, config, tensors, prefix):
    """Writes config.json, whose other keys stay, with the digest of these weights, and
    model.safetensors with `prefix` before the names."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "config.json"
    tensors = {name: tensor.detach().float().cpu() for name, tensor in tensors.items()}
    config = {**config, "weights_sha256": digest_of(tensors)}
    write_json(path, {**(read_json(path) if path.exists() else {}), **config})
    write_tensors(
        directory / "model.safetensors", {f"{prefix}.{name}": t for name, t in tensors.items()}
    )


def check_config(config):
    """Raises ValueError that names the field of a configuration that no encoder here has."""
    sizes = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "max_position_embeddings",
        "type_vocab_size",
    )
    for name in sizes:
        value = getattr(config, name)
        if type(value) is not int or not 0 < value < 10**7:
            raise ValueError(f"{name} must be a positive integer, not {value!r:.50}")
    rates = [
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
        "layer_norm_eps",
        "initializer_range",
    ]
    if config.classifier_dropout is not None:
        rates.append("classifier_dropout")
    for name in rates:
        value = getattr(config, name)
        if type(value) not in (int, float) or not 0 <= value < 1:
            raise ValueError(f"{name} must be a number in [0, 1), not {value!r:.50}")
    choices = {
        "model_type": ("bert", "roberta"),
        "hidden_act": ("gelu", "gelu_new", "relu", "silu", "swish"),
        "position_embedding_type": ("absolute",),
    }
    for name, known in choices.items():
        if getattr(config, name) not in known:
            raise ValueError(
                f"{name} {getattr(config, name)!r:.50} is not supported, only {', '.join(known)}"
            )
    if config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"num_attention_heads {config.num_attention_heads} does not divide hidden_size "
            f"{config.hidden_size}"
        )
    pad = config.pad_token_id
    if type(pad) is not int or not 0 <= pad < config.vocab_size or config.max_length < 1:
        raise ValueError(
            f"pad_token_id {pad!r:.50} is not in the vocabulary, or leaves no positions"
        )


def find_config(directory):
    """The configuration of a checkpoint directory; its weights are not read, and may be missing."""
    try:
        path, _ = checkpoint_files(directory)
    except FileNotFoundError:
        known = [Path(directory) / name for name in ("config.json", "bert_config.json")]
        path = next((path for path in known if path.is_file()), None)
        if path is None:
            raise
    return read_config(path)


def read_config(path):
    """BertConfig from bert_config.json or config.json; fields that it does not know are left
    alone."""
    values = read_json(path)
    known = {field.name for field in fields(BertConfig)}
    if values.get("is_decoder"):
        raise ValueError(
            f"{path}: is_decoder is on: a decoder sees only what is to the left, this is an encoder"
        )
    try:
        return BertConfig(**{name: value for name, value in values.items() if name in known})
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from e


def hub_names(names):
    """{Hugging Face's name today, without prefix: name in the file}, from the names in a file.
    They differ in

        the prefix                          bert., roberta., model.bert.; Google: bert/
        LayerNorm's weight and bias         old and Google: gamma, beta
        the weight of a linear layer        Google: kernel, and transposed
        the weight of an embedding          Google: none, bert/embeddings/word_embeddings
        layer 3                             Google: layer_3

    Raises ValueError if two tensors of the encoder are the same; what else is in a file may be
    called anything."""
    hub = {name: re.sub(r"/layer_(\d+)/", r"/layer/\1/", name).replace("/", ".") for name in names}
    hub = {
        name: re.sub(r"\.beta$", ".bias", re.sub(r"\.(gamma|kernel)$", ".weight", hub[name]))
        for name in names
    }
    hub = {
        name: re.sub(r"(embeddings\.\w+_embeddings)$", r"\1.weight", hub[name]) for name in names
    }
    anchor = "embeddings.word_embeddings.weight"
    prefix = next(
        (
            name.removesuffix(anchor)
            for name in hub.values()
            if re.fullmatch(rf"(.*\.)?{anchor}", name)
        ),
        "",
    )
    result = {}
    for name in names:
        other = result.setdefault(hub[name].removeprefix(prefix), name)
        if other != name and hub[name].removeprefix(prefix).startswith(("embeddings.", "encoder.")):
            raise ValueError(f"{listed(sorted([other, name]))} are the same tensor")
    return result


def fetch_encoder(source, weights=True):
    """Directory of an encoder and its tokenizer: `source` itself, or the files of a hub id that are
    needed, with its weights or without them."""
    if Path(source).is_dir():
        return Path(source)
    hint = ""
    if Path(source).parent.name == "runs":
        task = Path(source).name.removeprefix("full-")
        hint = f": if it is to be a run, train it with --stage full --task {shlex.quote(task):.50}"
    try:
        config = download(source, "config.json")
        if config is None:
            raise FileNotFoundError(f"{source!r} has no config.json on the hub")
        fetch = partial(download, source, revision=commit_of(config))
        if weights and not (fetch("model.safetensors") or fetch("pytorch_model.bin")):
            raise FileNotFoundError(
                f"{source!r} has neither model.safetensors nor pytorch_model.bin on the hub"
            )
        if not fetch("tokenizer.json"):
            for name in (
                ("tokenizer_config.json",) if fetch("vocab.txt") else ("vocab.json", "merges.txt")
            ):
                fetch(name)
    except FileNotFoundError as e:
        raise FileNotFoundError(
            f"{e}{hint}; --model takes a directory with bert_config.json and bert_model.ckpt.*, a "
            "directory with config.json "
            "and model.safetensors (or pytorch_model.bin), or a hub id"
        ) from e
    return config.parent


def checkpoint_files(directory):
    """(config, weights) of a checkpoint directory. Raises FileNotFoundError that says what is
    missing."""
    directory = Path(directory)
    for config, weights in (
        ("config.json", "model.safetensors"),
        ("config.json", "pytorch_model.bin"),
        ("bert_config.json", "bert_model.ckpt.index"),
    ):
        if (directory / config).is_file() and (directory / weights).is_file():
            return directory / config, directory / weights
    raise FileNotFoundError(
        f"no encoder in {directory}: it needs config.json with model.safetensors or "
        "pytorch_model.bin, or "
        "bert_config.json with bert_model.ckpt.index and its data files"
    )
