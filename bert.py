"""Θ: the frozen BERT encoder, and everything that is needed to load a checkpoint into it.

    bert = Bert.from_pretrained("google-bert/bert-base-uncased")   # or a directory, see `from_pretrained`
    h = bert(input_ids, token_type_ids, attention_mask)            # [B, T] -> [B, T, d]

    python bert.py SOURCE "Some text"                              # what is in a checkpoint, and does it work?

Shapes: B batch, T tokens, d hidden_size, H heads. References are to Pfeiffer et al., AdapterFusion (EACL 2021), and
Devlin et al., BERT (NAACL 2019).
"""

import json
import math
import re
import sys
from collections import Counter
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import google_crc32c
import numpy as np
import torch
import torch.nn.functional as F
from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
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
            if type(getattr(self, name)) is not int or not 0 < getattr(self, name) < 10**7:
                raise ValueError(f"{name} must be a positive integer, not {getattr(self, name)!r:.50}")
        rates = ("hidden_dropout_prob", "attention_probs_dropout_prob", "layer_norm_eps", "initializer_range")
        for name in rates if self.classifier_dropout is None else (*rates, "classifier_dropout"):
            if type(getattr(self, name)) not in (int, float) or not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be a number in [0, 1), not {getattr(self, name)!r:.50}")
        choices = {"model_type": ("bert", "roberta"), "hidden_act": tuple(ACTIVATIONS),
                   "position_embedding_type": ("absolute",)}  # fmt: skip
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r:.50} is not supported, only {', '.join(known)}")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"num_attention_heads {self.num_attention_heads} does not divide hidden_size {self.hidden_size}")
        if type(self.pad_token_id) is not int or not 0 <= self.pad_token_id < self.vocab_size or self.max_length < 1:
            raise ValueError(f"pad_token_id {self.pad_token_id!r:.50} is not in the vocabulary, or leaves no positions")

    @property
    def max_length(self):
        """The longest input in tokens. RoBERTa's positions start after its padding index."""
        return self.max_position_embeddings - (self.pad_token_id + 1 if self.model_type == "roberta" else 0)


class AddNorm(nn.Module):
    """The "Add & Norm" that closes a sub-layer, and the slot for what is plugged in there (Figures 1, 2 and 5).

    `adapters` holds Φ_n by name (adapter.py), `fusion` holds Ψ (fusion.py). `active` says who speaks: None (plain BERT),
    an adapter's name, or the fusion's name, which is that of its adapters joined by commas. `norms` holds what a task has in
    place of the LayerNorm, where its adapter comes with copies of its own.
    """

    def __init__(self, config):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.norms = nn.ModuleDict()
        self.adapters = nn.ModuleDict()
        self.fusion = None
        self.active = None

    def forward(self, f, x, parallel=None):
        """f: the sub-layer's output, x: its input (the residual stream), both [B, T, d] -> [B, T, d]. parallel: the input of
        the whole layer and the mask, for an adapter that is parallel to it (MT-A)."""
        norm = self.norms[self.active] if self.active in self.norms else self.norm
        if self.fusion is not None and self.active == self.fusion.name:
            return self.fusion(f, x, norm, [self.adapters[name] for name in self.fusion.adapter_names], parallel)
        if self.active in self.adapters:
            return self.adapters[self.active](f, x, norm, parallel)
        return norm(f + x)


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
        self.hidden_dropout = config.hidden_dropout_prob

    def forward(self, x, mask, cls_only=False):
        """x: [B, T, d], mask: [B, 1, 1, T], True = real token -> [B, T, d], or with cls_only the first token's [B, 1, d]"""
        B, T, d = x.shape
        parallel = (x, mask)
        k = self.key(x).view(B, T, self.num_heads, -1).transpose(1, 2)  # [B, H, T, d/H]
        v = self.value(x).view(B, T, self.num_heads, -1).transpose(1, 2)
        if cls_only:
            x, T = x[:, :1].contiguous(), 1  # else B small products in place of one
        q = self.query(x).view(B, T, self.num_heads, -1).transpose(1, 2)
        p = self.attention_dropout if self.training else 0.0
        a = attention(q, k, v, mask, p).transpose(1, 2).reshape(B, T, d)  # [B, H, T, d/H] -> [B, T, d]
        x = self.attention_add_norm(dropout(self.attention_dense(a), self.hidden_dropout, self.training), x)
        f = self.output_dense(self.activation(self.intermediate(x)))  # [B, T, d] -> [B, T, 4d] -> [B, T, d]
        return self.output_add_norm(dropout(f, self.hidden_dropout, self.training), x, parallel)


def attention(q, k, v, mask, p):
    """softmax(q kᵀ / √(d/H)) v over the real tokens, each weight dropped with probability p: 3 x [B, H, T, d/H] -> the same"""
    if p == 0 or q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)
    scores = q / math.sqrt(q.shape[-1]) @ k.transpose(-1, -2)  # the same with our dropout: [B, H, T, T]
    if mask is not None:
        scores += scores.new_zeros(mask.shape).masked_fill(~mask, torch.finfo(scores.dtype).min)
    return dropout(scores.softmax(-1), p, training=True) @ v


def dropout(x, p, training):
    """F.dropout, on a CPU in a third of its time: with 16 random bits an element, which hold p to 1/65,536."""
    if not training or p == 0 or x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, p, training)
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    keep = bits[: x.numel()].view(x.shape) >= round(2**16 * p) - 2**15
    return (x * keep).mul_(1 / (1 - p))


def embedding(rows, d):
    """nn.Embedding, but uniform: normal numbers on the meta device cost `from_pretrained` a second (torch imports sympy)."""
    return nn.Embedding.from_pretrained(torch.empty(rows, d).uniform_(-0.035, 0.035), freeze=False)


class Bert(nn.Module):
    """BERT or RoBERTa without pooler and pretraining heads."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.source = None  # what from_pretrained was given, written into the files of adapters
        self.directory = None  # where its files are, the tokenizer's among them
        self.origin = {}  # parameter -> its name in the file it was loaded from
        d = config.hidden_size
        self.word_embeddings = embedding(config.vocab_size, d)
        self.position_embeddings = embedding(config.max_position_embeddings, d)
        self.token_type_embeddings = embedding(config.type_vocab_size, d)
        self.embeddings_norm = nn.LayerNorm(d, eps=config.layer_norm_eps)
        self.embeddings_norms = nn.ModuleDict()  # AddNorm.norms of this LayerNorm
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))

    def forward(self, input_ids, token_type_ids=None, attention_mask=None, cls_only=False):
        """
        input_ids, token_type_ids, attention_mask: LongTensors [B, T]; attention_mask is 1 on real tokens. Without
        token types all are 0, without a mask all tokens are real.
        Returns the last layer's hidden states [B, T, d], or with cls_only the first token's [B, 1, d]: a head reads no
        other, and the last layer then needs only keys and values of the rest.
        Raises ValueError if T exceeds the position embeddings.
        """
        T = input_ids.shape[1]
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
        own, active = self.embeddings_norms, self.layers[0].attention_add_norm.active
        x = (own[active] if active in own else self.embeddings_norm)(x + self.position_embeddings(positions))
        x = dropout(x, self.config.hidden_dropout_prob, self.training)
        for layer in self.layers:
            # one row alone is left whole: a matrix-vector product's rounding depends on where in memory the weights are
            x = layer(x, mask, cls_only and len(x) > 1 and layer is self.layers[-1])
        return x[:, :1] if cls_only else x

    def slots(self):
        """Every place where adapters and fusion can sit: ((layer, "attention" | "output"), AddNorm), in order."""
        for i, layer in enumerate(self.layers):
            yield (i, "attention"), layer.attention_add_norm
            yield (i, "output"), layer.output_add_norm

    def layer_norms(self):
        """Every LayerNorm, and what tasks have in its place by name: (key of slots() or, of the embeddings, None, norm, norms)"""
        yield None, self.embeddings_norm, self.embeddings_norms
        for key, slot in self.slots():
            yield key, slot.norm, slot.norms

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
        google = weights_path.suffix == ".index"
        read = read_tensorflow if google else read_safetensors if weights_path.suffix == ".safetensors" else read_bin
        tensors = read(weights_path)
        try:
            names = hub_names(tensors)
            layers = {match[1] for name in names if (match := re.match(r"encoder\.layer\.(\d+)\.", name))}
            if len(layers) != config.num_hidden_layers:  # before as many are made as a damaged config may ask for
                raise ValueError(f"it has {len(layers)} layers, {config_path.name} says {config.num_hidden_layers}")
            # an empty model, whose parameters become the loaded tensors themselves: nothing is held twice
            with torch.device("meta"):
                bert = cls(config)
            state, missing, wrong = {}, [], []
            for ours, parameter in bert.named_parameters():
                name = names.pop(hub_name(ours), None)
                if name is None:
                    missing.append(hub_name(ours))
                    continue
                tensor = tensors[name]() if google else tensors[name]
                if tensor.shape != parameter.shape:
                    shapes = f"{list(tensor.shape)}, {config_path.name} says {list(parameter.shape)}"
                    wrong.append(f"{listed([name])} has shape {shapes}")
                elif not tensor.is_floating_point():
                    wrong.append(f"{listed([name])} holds {tensor.dtype}, not floating-point numbers")
                else:
                    state[ours], bert.origin[ours] = tensor.float(), name
            # a fine-tuned Hugging Face model may have any head; of Google's, read_tensorflow left nothing but the encoder
            encoder = "" if google else r"(embeddings|encoder)\.(?!position_ids$)"
            unknown = [name for hub, name in names.items() if re.match(encoder, hub)]
            problems = wrong[:3] + [f"it lacks {listed(missing)}"] * bool(missing)
            problems += [f"it has unknown tensors {listed(unknown)}"] * bool(unknown)
            if problems:
                raise ValueError("; ".join(problems))
        except ValueError as e:
            raise ValueError(f"{weights_path}: {e}") from e
        bert.load_state_dict(state, assign=True)
        bert.source, bert.directory = str(source), directory
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
            if not re.search(r"\.adapters\.|\.fusion\.|norms\.", name):
                tensors[f"{self.config.model_type}.{hub_name(name)}"] = parameter.detach().float().cpu().contiguous()
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

# What a TensorFlow checkpoint may hold beside the encoder: pooler, pretraining heads, optimizer state, and the unused
# prompt_tuning variable of one that was converted from AdapterHub's models
IGNORED = re.compile(r"(bert/pooler|cls|bert/prompt_tuning)/.*|(.*/)?(adam_[mv]|global_step)")


def hub_name(name):
    """Of our parameter: layers.0.query.weight -> encoder.layer.0.attention.self.query.weight"""
    layer, module, kind = re.fullmatch(r"(?:layers\.(\d+)\.)?(.+)\.(\w+)", name).groups()
    return (f"encoder.layer.{layer}." if layer else "") + f"{NAMES[module]}.{kind}"


def hub_names(names):
    """
    {Hugging Face's name today, without prefix: name in the file}, from the names in a file. They differ in

        the prefix                          bert., roberta., model.bert.; Google: bert/
        LayerNorm's weight and bias         old and Google: gamma, beta
        the weight of a linear layer        Google: kernel, and transposed
        the weight of an embedding          Google: no name of its own, bert/embeddings/word_embeddings
        layer 3                             Google: layer_3

    Raises ValueError if two tensors of the encoder are the same; what else is in a file may be called anything.
    """
    hub = {name: re.sub(r"/layer_(\d+)/", r"/layer/\1/", name).replace("/", ".") for name in names}
    hub = {name: re.sub(r"\.beta$", ".bias", re.sub(r"\.(gamma|kernel)$", ".weight", hub[name])) for name in names}
    hub = {name: re.sub(r"(embeddings\.\w+_embeddings)$", r"\1.weight", hub[name]) for name in names}
    anchor = "embeddings.word_embeddings.weight"
    prefix = next((name.removesuffix(anchor) for name in hub.values() if re.fullmatch(rf"(.*\.)?{anchor}", name)), "")
    result = {}
    for name in names:
        other = result.setdefault(hub[name].removeprefix(prefix), name)
        if other != name and hub[name].removeprefix(prefix).startswith(("embeddings.", "encoder.")):
            raise ValueError(f"{listed(sorted([other, name]))} are the same tensor")
    return result


def listed(names, most=4):
    """The first few names of a list, for a message of one line."""
    shown = [name if name.isprintable() and len(name) < 200 else repr(name[:200]) for name in names[:most]]
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")


# ----------------------------------------------------------------------------------------------------------------------
# Finding and reading files


def download(repo_id, filename, revision=None):
    """Path of one file of a hub repository, from the cache when there is no network; None if it has no such file.

    Raises FileNotFoundError if the hub cannot be reached and the cache does not have it, or the id is not one.
    """
    repo_id = str(repo_id)
    if re.match(r"[./~]", repo_id) or repo_id.count("/") > 1 or "\\" in repo_id:  # do not wait for the network
        raise FileNotFoundError(f"there is no directory {repo_id!r}")
    try:
        if try_to_load_from_cache(repo_id, filename, revision=revision) is _CACHED_NO_EXIST:
            return None
        return Path(hf_hub_download(repo_id, filename, revision=revision))
    except LocalEntryNotFoundError as e:  # a kind of EntryNotFoundError: must come first
        raise FileNotFoundError(f"{repo_id!r} is no local directory, and the Hugging Face hub cannot be reached") from e
    except EntryNotFoundError:
        return None
    except Exception as e:  # not found, no access, no id, a broken proxy, a full disk: of many kinds
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise FileNotFoundError(f"{repo_id!r} is no local directory, and does not come from the hub: {reason}") from e


def commit_of(path):
    """The commit that a file of `download` is from: with it, other files fit, and cached ones need no network."""
    return path.parent.name if path.parent.parent.name == "snapshots" else None


def fetch_encoder(source):
    """Directory of an encoder and its tokenizer: `source` itself, or the files of a hub id that are needed."""
    if Path(source).is_dir():
        return Path(source)
    try:
        config = download(source, "config.json")
        if config is None:
            raise FileNotFoundError(f"{source!r} has no config.json on the hub")
        fetch = partial(download, source, revision=commit_of(config))
        if not (fetch("model.safetensors") or fetch("pytorch_model.bin")):
            raise FileNotFoundError(f"{source!r} has neither model.safetensors nor pytorch_model.bin on the hub")
        if not fetch("tokenizer.json"):
            for name in ("tokenizer_config.json",) if fetch("vocab.txt") else ("vocab.json", "merges.txt"):
                fetch(name)
    except FileNotFoundError as e:
        raise FileNotFoundError(
            f"{e}; --model takes a directory with bert_config.json and bert_model.ckpt.*, a directory with config.json "
            "and model.safetensors (or pytorch_model.bin), or a hub id"
        ) from e
    return config.parent


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
    if Path(path).exists() and not Path(path).is_file():  # nothing to wait for, like a pipe
        raise ValueError(f"{path} is not a file")
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as e:
        raise ValueError(f"{path}, line {e.lineno}: not JSON: {e.msg}") from e
    except (ValueError, RecursionError) as e:
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
    if values.get("is_decoder"):
        raise ValueError(f"{path}: is_decoder is on: a decoder sees only what is to the left, this is an encoder")
    try:
        return BertConfig(**{name: value for name, value in values.items() if name in known})
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from e


def read_safetensors(path):
    """All tensors of a safetensors file. They are views of the mapped file: nothing is copied, or read before it is used."""
    try:
        return load_file(path)
    except (SafetensorError, ValueError, KeyError) as e:
        raise ValueError(f"{path}: not a readable safetensors file: {e}") from e


def read_bin(path):
    """All tensors of a PyTorch file. Only tensors are unpickled: a file with anything else is refused, not executed."""
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:  # torch raises many kinds here
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise ValueError(f"{path}: not a file of tensors alone, refused: {reason}") from e
    size = Path(path).stat().st_size
    if not isinstance(tensors, dict) or not all(
        isinstance(t, torch.Tensor) and t.layout == torch.strided and t.device.type == "cpu" and t.nbytes <= size
        and isinstance(name, str) for name, t in tensors.items()
    ):  # fmt: skip
        raise ValueError(f"{path}: not a dictionary of plain tensors, refused")
    return tensors


# ----------------------------------------------------------------------------------------------------------------------
# Google's checkpoints: TensorFlow's "tensor bundle" (tensorflow/core/util/tensor_bundle), read with numpy.
# The index file is a LevelDB table: name -> where the tensor is. The data files hold the raw numbers.

TABLE_MAGIC = 0xDB4775248B80FB57
UNSUPPORTED = "which is not supported: save it again with tf.compat.v1.train.Saver"
FLOAT_TYPES = {1: np.dtype("<f4"), 2: np.dtype("<f8"), 19: np.dtype("<f2")}  # DT_FLOAT, DT_DOUBLE, DT_HALF

# the protocol-buffer messages of the index: (field number, wire type) -> name
HEADER = {(1, 0): "shards", (2, 0): "big_endian"}
ENTRY = {(1, 0): "dtype", (2, 2): "shape", (3, 0): "shard", (4, 0): "offset", (5, 0): "size", (6, 5): "crc", (7, 2): "slices"}
SHAPE, DIMENSION = {(2, 2): "dimensions"}, {(1, 0): "size"}


def read_tensorflow(path):
    """
    {name: function that reads the tensor} for the encoder's variables in a TensorFlow checkpoint.

    path: the `.index` file. Raises ValueError, here or when a tensor is read, for a damaged file (every block and tensor
    that is read is checked against its CRC-32C), for variables that are not BERT's, and for what Google's releases do
    not contain: compressed, big-endian or sliced bundles.
    """
    try:
        entries = table_entries(path.read_bytes())
        header = entries.pop("", None)
        if header is None:
            raise ValueError("damaged: it has no header")
        header = protobuf(header, HEADER)
        if header.get("big_endian"):
            raise ValueError(f"a big-endian checkpoint, {UNSUPPORTED}, on a little-endian machine")
        entries = {name: protobuf(entry, ENTRY) for name, entry in entries.items()}
        for name, entry in entries.items():
            if "slices" in entry:
                raise ValueError(f"{listed([name])} is a partitioned variable in slices, {UNSUPPORTED}, without a partitioner")
        entries = {name: entry for name, entry in entries.items() if not IGNORED.fullmatch(name)}
        modules = "|".join(map(re.escape, NAMES.values()))
        known = re.compile(rf"(encoder\.layer\.\d+\.)?({modules})\.(weight|bias)")
        unknown = [name for hub, name in hub_names(entries).items() if not known.fullmatch(hub)]
        if unknown:
            raise ValueError(f"unknown variables {listed(unknown)}")
        used = Counter()
        for name, entry in entries.items():
            data = path.with_name(f"{path.stem}.data-{entry.get('shard', 0):05d}-of-{header.get('shards', 1):05d}")
            if not data.is_file():
                raise FileNotFoundError(f"{data} is not there, {name} is in it")
            entry["data"] = data
            used[data] += entry.get("size", 0)
            if used[data] > data.stat().st_size:  # cannot be: no two tensors share their bytes
                raise ValueError(f"{data.name} is cut off: {name} and those before it do not fit in its bytes")
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from e
    return {name: partial(bundle_tensor, name, entry) for name, entry in entries.items()}


def bundle_tensor(name, entry):
    """One tensor of a bundle: a kernel is copied, transposed, anything else a view of its mapped data file."""
    dtype = FLOAT_TYPES.get(entry.get("dtype"))
    if dtype is None:
        raise ValueError(f"{name} has TensorFlow type {entry.get('dtype')}, expected a float type")
    dimensions = protobuf(entry.get("shape", [b""])[-1][:100], SHAPE).get("dimensions", [])  # two need no more
    shape = tuple(protobuf(dimension, DIMENSION).get("size", 0) for dimension in dimensions)
    data, offset, size = entry["data"], entry.get("offset", 0), entry.get("size", 0)
    if len(shape) > 2 or not 0 < math.prod(shape) * dtype.itemsize == size <= data.stat().st_size - offset:
        raise ValueError(f"{name}: shape {list(shape)[:9]} in {dtype} is not {size} bytes at {offset} of {data.name}")
    array = np.memmap(data, dtype=dtype, mode="c", offset=offset, shape=shape)  # writable, but never into the file
    view = array.view()
    view.flags.writeable = False  # google_crc32c takes no buffer that could change
    if not intact(view, entry.get("crc", 0)):
        raise ValueError(f"{name} in {data.name} does not match its checksum: the file is damaged")
    tensor = torch.from_numpy(np.require(array, requirements="A"))
    if not name.endswith("/kernel"):
        return tensor
    # a view .T would do, but not add up in the same order. Memory of numpy's: it asks for huge pages, which halves the time
    return torch.from_numpy(np.empty(shape[::-1], np.float32)).copy_(tensor.T)


def table_entries(table):
    """{key: value} of a LevelDB table (leveldb/doc/table_format.md): blocks of entries, and a block of their places."""
    if len(table) < 48 or int.from_bytes(table[-8:], "little") != TABLE_MAGIC:
        raise ValueError("not the index of a TensorFlow checkpoint, or cut off")
    _, position = varint(table, len(table) - 48)  # where the metaindex block is, which is not needed
    _, position = varint(table, position)
    offset, position = varint(table, position)
    size, _ = varint(table, position)
    entries, end = {}, 0
    for _, place in block_entries(table, offset, size):
        offset, position = varint(place, 0)
        size, _ = varint(place, position)
        if offset < end:  # one behind the other, so the work is linear in the size of the file
            raise ValueError("damaged: its blocks overlap")
        end = offset + size + 5
        for key, value in block_entries(table, offset, size):
            if entries.setdefault(key.decode("latin-1"), value) is not value:
                raise ValueError(f"damaged: it has {key[:200]} twice")
    return entries


def block_entries(table, offset, size):
    """(key, value) pairs of one block; a key shares its beginning with the one before."""
    block, trailer = table[offset : offset + size], table[offset + size : offset + size + 5]
    if len(block) < max(size, 4) or len(trailer) < 5:
        raise ValueError(f"cut off, or damaged: no block of {size} bytes at {offset}")
    if trailer[0] == 1:
        raise ValueError(f"its blocks are compressed with snappy, {UNSUPPORTED}")
    if not intact(block + trailer[:1], int.from_bytes(trailer[1:], "little")):
        raise ValueError(f"the block at {offset} does not match its checksum: the file is damaged")
    end = size - 4 - 4 * int.from_bytes(block[-4:], "little")  # the restart points are not needed
    position, key, names = 0, b"", 0
    damaged = ValueError(f"damaged: the block at {offset} does not hold what it says")
    while position < end:
        shared, position = varint(block, position)
        unshared, position = varint(block, position)
        length, position = varint(block, position)
        key = key[:shared] + block[position : position + unshared]
        position += unshared + length
        names += len(key)  # bounded: a few bytes can ask for a long name again and again
        if len(key) < shared + unshared or position > end or names > 20 * size:
            raise damaged
        yield key, block[position - length : position]
    if end < 0:
        raise damaged


def protobuf(message, names):
    """{name: value} of a protocol-buffer message: numbers, the last one counts, and lists of byte strings.

    names: {(field number, wire type): name}; other fields are skipped.
    """
    result, position = {}, 0
    while position < len(message):
        tag, position = varint(message, position)
        name, wire_type = names.get((tag >> 3, tag & 7)), tag & 7
        length = {0: 0, 1: 8, 5: 4}.get(wire_type)
        if wire_type == 0:
            value, position = varint(message, position)
        elif wire_type == 2:
            length, position = varint(message, position)
        if length is None or position + length > len(message):
            raise ValueError("damaged: an entry ends in the middle of a field")
        field = message[position : position + length]
        position += length
        if name and wire_type == 2:
            result.setdefault(name, []).append(field)
        elif name:
            result[name] = value if wire_type == 0 else int.from_bytes(field, "little")
    return result


def varint(data, position):
    """A base-128 integer of at most 64 bits -> (value, next position)"""
    value = 0
    for i, byte in enumerate(data[position : position + 10]):
        value |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            return value, position + i + 1
    raise ValueError("damaged: a number without an end")


def intact(data, crc):
    """Whether data has this CRC-32C, which LevelDB stores rotated by 15 bits plus a constant. google_crc32c, Google's small
    library around the processor's own instruction, takes 0.04 s for BERT-base; numpy alone would take seconds."""
    crc = (crc - 0xA282EAD8) & 0xFFFFFFFF
    return google_crc32c.value(data) == ((crc >> 17) | (crc << 15)) & 0xFFFFFFFF


def main():
    """`python bert.py SOURCE ["Some text"]`: what is in a checkpoint, where each group of weights came from, and [CLS]."""
    from data import load_tokenizer

    if len(sys.argv) not in (2, 3) or sys.argv[1].startswith("-"):
        print('bert.py: usage: python bert.py SOURCE ["Some text"]', file=sys.stderr)
        sys.exit(2)
    try:
        bert = Bert.from_pretrained(sys.argv[1])
        sizes = bert.config.max_length, bert.config.vocab_size, bert.config.type_vocab_size
        tokenizer = load_tokenizer(bert.directory, *sizes)
        text = "".join(sys.argv[2:]).encode().decode() or "Hello."  # refuses bytes that are not UTF-8
        encoding = tokenizer.encode(text)
        h = bert(torch.tensor([encoding.ids]), torch.tensor([encoding.type_ids]))  # [1, T, d]
        if not h.isfinite().all():
            broken = listed([name for name, p in bert.named_parameters() if not p.isfinite().all()])
            raise ValueError(f"{bert.directory}: the output is not finite, nor are these weights: {broken or 'none'}")
    except (OSError, ValueError) as e:
        print(f"bert.py: {' '.join(str(e).split())}", file=sys.stderr)
        sys.exit(2)
    print(bert.config)
    print(f"{sum(p.numel() for p in bert.parameters()):>12,} parameters from {checkpoint_files(bert.directory)[1]}:")
    groups = {}  # all layers together
    for name, parameter in bert.named_parameters():
        module, kind = re.sub(r"layers\.\d+", "layers.*", name).rsplit(".", 1)
        stored = re.sub(r"layer([._])\d+", r"layer\1*", bert.origin[name])
        size, names = groups.get(module, (0, {}))
        groups[module] = size + parameter.numel(), {**names, kind: stored}
    for module, (size, names) in groups.items():
        print(f"{size:>12,} {module:<35} from {', '.join(names.values())}")
    print(" ".join(encoding.tokens))
    print("[CLS]", " ".join(f"{value:.5f}" for value in h[0, 0, :8].tolist()))


if __name__ == "__main__":
    main()
