"""Θ: the frozen BERT encoder, and everything that is needed to load a checkpoint into it.

    bert = Bert.from_pretrained("google-bert/bert-base-uncased")   # or a directory, see `from_pretrained`
    h = bert(input_ids, token_type_ids, attention_mask)            # [B, T] -> [B, T, d]

    python bert.py SOURCE "Some text"                              # what is in a checkpoint, and does it work?

Shapes: B batch, T tokens, d hidden_size, H heads. References are to Pfeiffer et al., AdapterFusion (EACL 2021), and
Devlin et al., BERT (NAACL 2019).
"""

import json
import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import google_crc32c
import numpy as np
import torch
import torch.nn.functional as F
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

ACTIVATIONS = {
    "gelu": F.gelu,  # with erf, as transformers computes Google's "gelu"
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}


@dataclass
class BertConfig:
    """The fields of Google's `bert_config.json` and Hugging Face's `config.json` that change what is computed."""

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
        """Raises ValueError, naming the field, for a configuration that is not a BERT or RoBERTa encoder."""
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
                 "max_position_embeddings", "type_vocab_size")  # fmt: skip
        for name in sizes:
            if type(getattr(self, name)) is not int or not 0 < getattr(self, name) < 2**31:
                raise ValueError(f"{name} must be a positive integer, not {getattr(self, name)!r}")
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "layer_norm_eps", "initializer_range"):
            if type(getattr(self, name)) not in (int, float) or not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be a number in [0, 1), not {getattr(self, name)!r}")
        if self.model_type not in ("bert", "roberta"):
            raise ValueError(f"model_type {self.model_type!r} is not supported, only 'bert' and 'roberta'")
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(f"hidden_act {self.hidden_act!r} is not one of {', '.join(ACTIVATIONS)}")
        if self.position_embedding_type != "absolute":
            raise ValueError(f"position_embedding_type {self.position_embedding_type!r}: only 'absolute' is supported")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of {self.num_attention_heads} heads")

    @property
    def max_length(self):
        """The longest input in tokens. RoBERTa's positions start after its padding index."""
        return self.max_position_embeddings - (self.pad_token_id + 1 if self.model_type == "roberta" else 0)


class AddNorm(nn.Module):
    """The "Add & Norm" that closes a sub-layer, and the slot for what is plugged in there (Figures 1, 2 and 5).

    `adapters` holds Φ_n by name (adapter.py), `fusion` holds Ψ (fusion.py). `active` says who speaks: None (plain BERT),
    an adapter's name, or the fusion's name, which is that of its adapters joined by commas.
    """

    def __init__(self, config):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.adapters = nn.ModuleDict()
        self.fusion = None
        self.active = None

    def forward(self, f, x):
        """f: the sub-layer's output, x: its input (the residual stream), both [B, T, d] -> [B, T, d]"""
        if self.fusion is not None and self.active == self.fusion.name:
            return self.fusion(f, x, self.norm, [self.adapters[name] for name in self.fusion.adapter_names])
        if self.active in self.adapters:
            return self.adapters[self.active](f, x, self.norm)
        return self.norm(f + x)


class Layer(nn.Module):
    """One transformer layer: self-attention and feed-forward, each closed by an AddNorm."""

    def __init__(self, config):
        super().__init__()
        d = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.query = nn.Linear(d, d)
        self.key = nn.Linear(d, d)
        self.value = nn.Linear(d, d)
        self.attention_dense = nn.Linear(d, d)
        self.attention_add_norm = AddNorm(config)  # "bottom" in the paper (section 2.2.3)
        self.intermediate = nn.Linear(d, config.intermediate_size)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.output_dense = nn.Linear(config.intermediate_size, d)
        self.output_add_norm = AddNorm(config)  # "top": where the paper's own adapter sits
        self.attention_dropout = config.attention_probs_dropout_prob
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x, mask):
        """x: [B, T, d], mask: [B, 1, 1, T], True = real token -> [B, T, d]"""
        B, T, d = x.shape
        q = self.query(x).view(B, T, self.num_heads, -1).transpose(1, 2)  # [B, H, T, d/H]
        k = self.key(x).view(B, T, self.num_heads, -1).transpose(1, 2)
        v = self.value(x).view(B, T, self.num_heads, -1).transpose(1, 2)
        dropout = self.attention_dropout if self.training else 0.0
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)  # [B, H, T, d/H]
        a = self.attention_dense(a.transpose(1, 2).reshape(B, T, d))  # [B, T, d]
        x = self.attention_add_norm(self.dropout(a), x)
        f = self.output_dense(self.activation(self.intermediate(x)))  # [B, T, d] -> [B, T, 4d] -> [B, T, d]
        return self.output_add_norm(self.dropout(f), x)


class Bert(nn.Module):
    """BERT or RoBERTa without pooler and pretraining heads."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.source = None  # what from_pretrained was given, written into the files of adapters
        d = config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, d)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, d)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, d)
        self.embeddings_norm = nn.LayerNorm(d, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))

    def forward(self, input_ids, token_type_ids=None, attention_mask=None):
        """
        input_ids, token_type_ids, attention_mask: LongTensors [B, T]; attention_mask is 1 on real tokens. Without
        token types all are 0, without a mask all tokens are real.
        Returns the last layer's hidden states [B, T, d]. Raises ValueError if T exceeds the position embeddings.
        """
        B, T = input_ids.shape
        if T > self.config.max_length:
            raise ValueError(f"an input of {T} tokens is longer than this encoder's {self.config.max_length}")
        positions = torch.arange(T, device=input_ids.device)  # [T]
        if self.config.model_type == "roberta":  # counted from pad + 1 over the real tokens, padding stays at pad
            real = (input_ids != self.config.pad_token_id).long()
            positions = real.cumsum(1) * real + self.config.pad_token_id  # [B, T]
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None, :]  # [B, 1, 1, T]

        x = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)  # [B, T, d]
        x = self.dropout(self.embeddings_norm(x + self.position_embeddings(positions)))
        for layer in self.layers:
            x = layer(x, mask)
        return x

    def slots(self):
        """Every place where adapters and fusion can sit: ((layer, "attention" | "output"), AddNorm), in order."""
        for i, layer in enumerate(self.layers):
            yield (i, "attention"), layer.attention_add_norm
            yield (i, "output"), layer.output_add_norm

    @property
    def dtype(self):
        return self.word_embeddings.weight.dtype

    @property
    def device(self):
        return self.word_embeddings.weight.device

    @classmethod
    def from_pretrained(cls, source):
        """
        Loads an encoder; it is frozen (no parameter requires a gradient) and in eval mode.

        source: a directory as Google published it (bert_config.json, bert_model.ckpt.*), a directory with config.json
        and model.safetensors or pytorch_model.bin, or else a Hugging Face hub id.
        Raises FileNotFoundError if there is no such checkpoint, ValueError if its content does not fit; the message
        names the file, and the tensor with both shapes.
        """
        directory = fetch_encoder(source)
        config_path, weights_path = checkpoint_files(directory)
        config = read_config(config_path)
        read = {"index": read_tensorflow, "safetensors": read_safetensors, "bin": read_bin}
        tensors = read[weights_path.name.rsplit(".", 1)[1]](weights_path)

        # BERT-base takes no memory twice: an empty model, whose parameters become the loaded tensors themselves
        with torch.device("meta"):
            bert = cls(config)
        state, missing, wrong = {}, [], []
        for name, parameter in bert.named_parameters():
            hub_name = to_hub_name(name)
            tensor = tensors.pop(hub_name, None)
            if tensor is None:
                missing.append(hub_name)
            elif tensor.shape != parameter.shape:
                wrong.append(f"{hub_name} has shape {list(tensor.shape)}, the config says {list(parameter.shape)}")
            elif not tensor.is_floating_point():
                wrong.append(f"{hub_name} holds {tensor.dtype}, not floating-point numbers")
            else:
                state[name] = tensor.float()
        # a fine-tuned Hugging Face model may have any head beside the encoder, Google's release has the known ones
        ours = ("embeddings.", "encoder.") if weights_path.suffix != ".index" else ""
        unknown = [name for name in tensors if name.startswith(ours) and not IGNORED.search(name)]
        problems = wrong[:3] + [f"lacks {listed(missing)}"] * bool(missing)
        problems += [f"has unknown tensors {listed(unknown)}"] * bool(unknown)
        if problems:
            raise ValueError(f"{weights_path} does not fit {config_path.name}: {'; '.join(problems)}")
        bert.load_state_dict(state, assign=True)
        bert.source = str(source)
        return bert.requires_grad_(False).eval()

    def save_pretrained(self, directory):
        """Writes config.json and model.safetensors (Θ alone) under Hugging Face's names, so that `transformers` and
        `from_pretrained` read them. Existing keys of config.json stay."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "config.json"
        config = json.loads(path.read_text()) if path.exists() else {}
        config.update({field.name: getattr(self.config, field.name) for field in fields(BertConfig)})
        write_json(path, config)
        tensors = {}
        for name, parameter in self.named_parameters():
            if ".adapters." not in name and ".fusion." not in name:
                tensors[f"{self.config.model_type}.{to_hub_name(name)}"] = parameter.detach().float().cpu().contiguous()
        write_safetensors(directory / "model.safetensors", tensors)


# ----------------------------------------------------------------------------------------------------------------------
# Names. A checkpoint's tensors are looked up by Hugging Face's names; Google's differ only in punctuation.

NAMES = {  # ours -> Hugging Face
    "word_embeddings": "embeddings.word_embeddings",
    "position_embeddings": "embeddings.position_embeddings",
    "token_type_embeddings": "embeddings.token_type_embeddings",
    "embeddings_norm": "embeddings.LayerNorm",
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_dense": "attention.output.dense",
    "attention_add_norm.norm": "attention.output.LayerNorm",
    "intermediate": "intermediate.dense",
    "output_dense": "output.dense",
    "output_add_norm.norm": "output.LayerNorm",
}

# What checkpoints hold beside the encoder: pooler, pretraining and task heads, buffers, optimizer state
IGNORED = re.compile(
    r"^(pooler|cls|lm_head|classifier|qa_outputs|prompt_tuning)\.|position_ids$|"
    r"(^|\.)(adam_[mv]|global_step|AdamWeightDecayOptimizer.*)$"
)


def to_hub_name(name):
    """layers.0.query.weight -> encoder.layer.0.attention.self.query.weight"""
    layer, name = re.fullmatch(r"(?:layers\.(\d+)\.)?(.+)", name).groups()
    module, kind = name.rsplit(".", 1)
    return (f"encoder.layer.{layer}." if layer else "") + f"{NAMES[module]}.{kind}"


def from_tensorflow_name(name):
    """bert/encoder/layer_0/attention/self/query/kernel -> encoder.layer.0.attention.self.query.weight"""
    name = re.sub(r"^bert/", "", name)
    name = re.sub(r"/layer_(\d+)/", r"/layer/\1/", name)
    name = re.sub(r"/(kernel|gamma)$", "/weight", name)
    name = re.sub(r"/beta$", "/bias", name)
    name = re.sub(r"^(embeddings/\w+_embeddings)$", r"\1/weight", name)
    return name.replace("/", ".")


def normalised(tensors):
    """Strips a prefix ("bert.", "roberta.", "model.bert.") and renames the old gamma and beta."""
    anchor = "embeddings.word_embeddings.weight"
    prefix = next((name[: -len(anchor)] for name in tensors if name == anchor or name.endswith("." + anchor)), "")
    result = {}
    for name, tensor in tensors.items():
        name = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name.removeprefix(prefix)))
        result[name] = tensor
    return result


def listed(names, most=4):
    """The first few of a list, for a message."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# ----------------------------------------------------------------------------------------------------------------------
# Finding and reading files


def download(repo_id, filename, revision=None):
    """Path of one file of a hub repository, from the cache when there is no network; None if it has no such file.

    Raises FileNotFoundError if the hub cannot be reached and the cache does not have it, or the id is not one.
    """
    try:
        return Path(hf_hub_download(repo_id, filename, revision=revision))
    except LocalEntryNotFoundError as e:  # a kind of EntryNotFoundError: must come first
        raise FileNotFoundError(f"{repo_id!r} is no local directory, and the Hugging Face hub cannot be reached") from e
    except EntryNotFoundError:
        return None
    except (HfHubHTTPError, HFValidationError) as e:
        reason = str(e).strip().splitlines()[0]
        raise FileNotFoundError(f"{repo_id!r} is neither a local directory nor on the hub: {reason}") from e


def fetch_encoder(source):
    """Directory of an encoder and its tokenizer: `source` itself, or the files of a hub id that are needed."""
    if Path(source).is_dir():
        return Path(source)
    try:
        config = download(source, "config.json")
        if config is None:
            raise FileNotFoundError(f"{source!r} has no config.json on the hub")
        weights = download(source, "model.safetensors") or download(source, "pytorch_model.bin")
        if weights is None:
            raise FileNotFoundError(f"{source!r} has neither model.safetensors nor pytorch_model.bin on the hub")
        for name in ("tokenizer_config.json", "vocab.txt"):
            optional(download, source, name)
        if not optional(download, source, "tokenizer.json"):
            for name in ("vocab.json", "merges.txt"):
                optional(download, source, name)
    except FileNotFoundError as e:
        raise FileNotFoundError(
            f"{e}; --model takes a directory with bert_config.json and bert_model.ckpt.*, a directory with config.json "
            "and model.safetensors (or pytorch_model.bin), or a hub id"
        ) from e
    return config.parent


def optional(fetch, *args):
    """fetch(*args), or None where the cache of a machine without a network does not have the file."""
    try:
        return fetch(*args)
    except FileNotFoundError:
        return None


def checkpoint_files(directory):
    """(config, weights) of a checkpoint directory. Raises FileNotFoundError that says what is missing."""
    directory = Path(directory)
    for config, weights in (
        ("config.json", "model.safetensors"),
        ("config.json", "pytorch_model.bin"),
        ("bert_config.json", "bert_model.ckpt.index"),
    ):
        if (directory / config).is_file() and (directory / weights).is_file():
            return directory / config, directory / weights
    raise FileNotFoundError(
        f"no encoder in {directory}: it needs config.json with model.safetensors or pytorch_model.bin, or "
        "bert_config.json with bert_model.ckpt.index and its data files"
    )


def read_json(path):
    """The object in a JSON file. Raises ValueError that names file and line."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as e:
        raise ValueError(f"{path}, line {e.lineno}: not JSON: {e.msg}") from e
    except (UnicodeDecodeError, RecursionError) as e:
        raise ValueError(f"{path}: not JSON: {e}") from e
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def write_json(path, value):
    """Writes JSON under a temporary name and renames it: a reader sees the old file or the new one."""
    temporary = Path(f"{path}.tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def write_safetensors(path, tensors):
    """Like write_json, for tensors."""
    temporary = Path(f"{path}.tmp")
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.replace(path)


def read_config(path):
    """BertConfig from bert_config.json or config.json; fields that it does not know are left alone."""
    values = read_json(path)
    known = {field.name for field in fields(BertConfig)}
    try:
        return BertConfig(**{name: value for name, value in values.items() if name in known})
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from e


def read_safetensors(path):
    """All tensors of a safetensors file, under normalised names. They are views of the mapped file: nothing is copied."""
    try:
        return normalised(load_file(path))
    except (SafetensorError, ValueError, KeyError) as e:
        raise ValueError(f"{path}: not a readable safetensors file: {e}") from e


def read_bin(path):
    """All tensors of a PyTorch file. Only tensors are unpickled: a file with anything else is refused, not executed."""
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:  # torch raises many kinds here
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise ValueError(f"{path}: not a file of tensors alone, refused: {reason}") from e
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise ValueError(f"{path}: not a dictionary of tensors, refused")
    return normalised(tensors)


# ----------------------------------------------------------------------------------------------------------------------
# Google's checkpoints: TensorFlow's "tensor bundle" (tensorflow/core/util/tensor_bundle), read with numpy.
# The index file is a LevelDB table: name -> where the tensor is. The data files hold the raw numbers.

TABLE_MAGIC = 0xDB4775248B80FB57
FLOAT_TYPES = {1: np.dtype("<f4"), 2: np.dtype("<f8"), 19: np.dtype("<f2")}  # DT_FLOAT, DT_DOUBLE, DT_HALF


def read_tensorflow(path):
    """All encoder variables of a TensorFlow checkpoint, under Hugging Face's names, kernels transposed.

    path: the `.index` file. Raises ValueError for a damaged file (every block and tensor that is read is checked against
    its CRC-32C) and for what Google's releases do not contain: compressed, big-endian or sliced bundles.
    """
    index = Path(path).read_bytes()
    try:
        entries = dict(table_entries(index))
        header = protobuf(entries.pop(b"", b""))
        if header.get(2, 0) != 0:
            raise ValueError("big-endian checkpoints are not supported: save it again on a little-endian machine")
        shards = header.get(1, 1)
        tensors = {}
        for key, value in entries.items():
            tf_name = key.decode()
            name = from_tensorflow_name(tf_name)
            if not IGNORED.search(name):
                tensor = bundle_tensor(path, tf_name, protobuf(value), shards)
                tensors[name] = torch.from_numpy(tensor.T.copy() if tf_name.endswith("/kernel") else tensor)
    except (IndexError, UnicodeDecodeError) as e:
        raise ValueError(f"{path}: damaged: {e}") from e
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from e
    return tensors


def bundle_tensor(path, name, entry, shards):
    """One tensor of a bundle as a numpy array that maps its data file."""
    if 7 in entry:
        raise ValueError(f"{name} is stored in slices (a partitioned variable), which is not supported: save it whole")
    dtype = FLOAT_TYPES.get(entry.get(1))
    if dtype is None:
        raise ValueError(f"{name} has TensorFlow type {entry.get(1)}, expected a float type")
    shape = [protobuf(dim).get(1, 0) for dim in protobuf(entry.get(2, b""), repeated=(2,)).get(2, [])]
    offset, size = entry.get(4, 0), entry.get(5, 0)
    data = Path(str(path).removesuffix(".index") + f".data-{entry.get(3, 0):05d}-of-{shards:05d}")
    if not data.is_file():
        raise ValueError(f"{name} is in {data.name}, which is not there")
    count = 1
    for length in shape:  # Python's integers: a hostile shape does not overflow
        count *= length
    if count * dtype.itemsize != size or offset + size > data.stat().st_size:
        raise ValueError(f"{name} of shape {shape} does not fit its {size} bytes at {offset} of {data.name}")
    if size == 0:
        return np.zeros(shape, dtype)
    array = np.memmap(data, dtype=dtype, mode="c", offset=offset, shape=tuple(shape))  # copy on write
    view = array.view()
    view.flags.writeable = False  # google_crc32c takes no buffer that could change
    if unmasked(entry.get(6, 0)) != google_crc32c.value(view):
        raise ValueError(f"{name} in {data.name} does not match its checksum: the file is damaged")
    return array


def table_entries(table):
    """(key, value) pairs of a LevelDB table (leveldb/doc/table_format.md)."""
    if len(table) < 48 or int.from_bytes(table[-8:], "little") != TABLE_MAGIC:
        raise ValueError("not the index of a TensorFlow checkpoint")
    footer = table[-48:]
    _, position = varint(footer, 0)  # the metaindex block is not needed
    _, position = varint(footer, position)
    offset, position = varint(footer, position)
    size, position = varint(footer, position)
    for _, handle in block_entries(table, offset, size):
        offset, position = varint(handle, 0)
        size, position = varint(handle, position)
        yield from block_entries(table, offset, size)


def block_entries(table, offset, size):
    """(key, value) pairs of one block; keys share prefixes with the one before."""
    block, trailer = table[offset : offset + size], table[offset + size : offset + size + 5]
    if len(block) < max(size, 4) or len(trailer) < 5:
        raise ValueError(f"the index is cut off: no block of {size} bytes at {offset}")
    if trailer[0] != 0:
        raise ValueError("compressed index blocks (snappy) are not supported: save it again with tf.train.Saver")
    if unmasked(int.from_bytes(trailer[1:], "little")) != google_crc32c.value(block + trailer[:1]):
        raise ValueError(f"the index block at {offset} does not match its checksum: the file is damaged")
    end = size - 4 - 4 * int.from_bytes(block[-4:], "little")  # the restart points are not needed
    position, key = 0, b""
    while position < end:
        shared, position = varint(block, position)
        unshared, position = varint(block, position)
        length, position = varint(block, position)
        if shared > len(key) or position + unshared + length > end:
            raise ValueError(f"the index block at {offset} is damaged")
        key = key[:shared] + block[position : position + unshared]
        position += unshared
        yield key, block[position : position + length]
        position += length


def protobuf(message, repeated=()):
    """{field number: value} of a protocol-buffer message; fields in `repeated` become lists."""
    result, position = {}, 0
    while position < len(message):
        tag, position = varint(message, position)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == 0:
            value, position = varint(message, position)
        elif wire_type in (1, 5):  # fixed64, fixed32
            length = 8 if wire_type == 1 else 4
            value = int.from_bytes(message[position : position + length], "little")
            position += length
        elif wire_type == 2:
            length, position = varint(message, position)
            value = message[position : position + length]
            position += length
        else:
            raise ValueError(f"damaged entry: wire type {wire_type}")
        if position > len(message):
            raise ValueError("damaged entry: it ends in the middle of a field")
        if number in repeated:
            result.setdefault(number, []).append(value)
        else:
            result[number] = value
    return result


def varint(data, position):
    """A base-128 integer of at most 64 bits -> (value, next position)"""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("damaged: an integer of more than ten bytes")


def unmasked(crc):
    """LevelDB stores checksums rotated by 15 bits plus a constant."""
    crc = (crc - 0xA282EAD8) & 0xFFFFFFFF
    return ((crc >> 17) | (crc << 15)) & 0xFFFFFFFF


if __name__ == "__main__":
    from data import load_tokenizer

    if len(sys.argv) not in (2, 3):
        sys.exit('usage: python bert.py SOURCE ["Some text"]')
    try:
        bert = Bert.from_pretrained(sys.argv[1])
        directory = fetch_encoder(sys.argv[1])
        encoding = load_tokenizer(directory, bert.config.max_length).encode(*sys.argv[2:] or ["Hello."])
    except (OSError, ValueError) as e:
        print(f"bert.py: {e}", file=sys.stderr)
        sys.exit(2)
    print(bert.config)
    for group in (bert.word_embeddings, bert.position_embeddings, bert.token_type_embeddings, bert.layers):
        print(f"{sum(p.numel() for p in group.parameters()):>12,} parameters", group)
    print(f"{sum(p.numel() for p in bert.parameters()):>12,} parameters from {checkpoint_files(directory)[1]}")
    h = bert(torch.tensor([encoding.ids]), torch.tensor([encoding.type_ids]))  # [1, T, d]
    print(" ".join(encoding.tokens))
    print("[CLS]", " ".join(f"{value:.5f}" for value in h[0, 0, :8].tolist()))
