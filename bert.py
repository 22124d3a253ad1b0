"""Θ: the frozen BERT encoder, with the places where adapters and their fusion are inserted.

    bert = Bert.from_pretrained("google-bert/bert-base-uncased")  # or a directory
    h = bert(input_ids, token_type_ids, attention_mask)           # [B, T] -> [B, T, d]

Shapes: B batch, T tokens, d hidden_size, H attention heads. Figures, sections and equations are the
paper's. "adapters 1.3" is AdapterHub's library, the reference implementation of AdapterFusion."""

import re
from dataclasses import asdict, dataclass, fields

import torch
import torch.nn.functional as F
from torch import nn

from formats import encoder
from formats.files import error_prefix
from runtime import kernels  # attention, dropout and embedding, as PyTorch's, but faster
from runtime.command import look_up

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
    initializer_range: float = 0.02  # of new weights beside the encoder, in heads
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = None  # where config.json has none: 0, or 1 for RoBERTa
    position_embedding_type: str = "absolute"
    is_decoder: bool = False
    model_type: str = "bert"

    def __post_init__(self):
        if self.pad_token_id is None:
            self.pad_token_id = 1 if self.model_type == "roberta" else 0
        if self.position_embedding_type != "absolute" or self.is_decoder:
            raise ValueError("what can be computed are encoders with absolute position embeddings")


class AddNorm(nn.Module):
    """The "Add & Norm" that closes a sub-layer, LN(f + x), and the one place where the paper
    inserts anything (Figures 1, 2 and 5).

    adapters   every Φ_n that sits here, by name (adapter.py)
    fusion     Ψ over some of them (fusion.py), or None
    active     what is computed here: None, plain BERT; a name, that Φ; or a tuple of names, Ψ"""

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
            return self.fusion(f, x, self)
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
        self.activation = look_up(ACTIVATIONS, config.hidden_act, "hidden_act")
        self.output_dense = nn.Linear(config.intermediate_size, d)
        self.output_add_norm = AddNorm(config)  # "top", where the paper's own adapter sits
        self.attention_dropout = config.attention_probs_dropout_prob
        self.hidden_dropout = config.hidden_dropout_prob

    def forward(self, x, mask):
        """x: [B, T, d]; mask: [B, 1, 1, T], True on real tokens -> [B, T, d]"""
        parts = (self.query, self.key, self.value)
        q, k, v = (self.split_heads(linear(x)) for linear in parts)  # [B, H, T, d/H] each
        context = self.attention(q, k, v, mask).transpose(1, 2).reshape(x.shape)  # [B, T, d]
        f = kernels.dropout(self.attention_dense(context), self.hidden_dropout, self.training)
        x = self.attention_add_norm(f, x)
        f = self.output_dense(self.activation(self.intermediate(x)))  # d -> intermediate_size -> d
        f = kernels.dropout(f, self.hidden_dropout, self.training)
        return self.output_add_norm(f, x)

    def split_heads(self, x):
        """[B, T, d] -> [B, H, T, d/H]"""
        return x.unflatten(2, (self.num_heads, -1)).transpose(1, 2)

    def attention(self, q, k, v, mask):
        """softmax(q kᵀ / √(d/H)) v over the real tokens, with dropout on the softmax in training:
        [B, H, T, d/H] each -> [B, H, T, d/H]"""
        return kernels.attention(q, k, v, mask, self.attention_dropout if self.training else 0.0)


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

    def __init__(self, config, layer_class=Layer):
        super().__init__()
        self.config = config
        d = config.hidden_size
        self.word_embeddings = kernels.embedding(config.vocab_size, d)
        self.position_embeddings = kernels.embedding(config.max_position_embeddings, d)
        if config.type_vocab_size:
            self.token_type_embeddings = kernels.embedding(config.type_vocab_size, d)
        self.embeddings_norm = nn.LayerNorm(d, eps=config.layer_norm_eps)
        self.layers = nn.ModuleList(layer_class(config) for _ in range(config.num_hidden_layers))
        # Where something can be plugged in: {(layer, location): AddNorm}, from bottom to top.
        self.slots = {}
        for i, layer in enumerate(self.layers):
            self.slots[i, "attention"] = layer.attention_add_norm
            self.slots[i, "output"] = layer.output_add_norm
        self.adapter_configs = {}  # {name: configuration} of the adapters in the slots (adapter.py)
        self.active = None  # as in AddNorm, of all layers: what `activate` of adapter.py was given
        self.source = self.directory = None  # from_pretrained's argument, and where its files are
        self.hub_config, self.sha256 = {}, None  # all of config.json, and a digest of all weights

    def forward(self, input_ids, token_type_ids=None, attention_mask=None):
        """LongTensors [B, T], in this order (in `transformers` the mask is second); attention_mask
        is 1 on real tokens. Without token types all are 0, without a mask all tokens are real.
        Returns the last layer's hidden states [B, T, d]."""
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None]
        x = self.word_embeddings(input_ids) + self.position_embeddings(self.positions(input_ids))
        if self.config.type_vocab_size:
            types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
            x = x + self.token_type_embeddings(types)
        x = self.embeddings_norm(x)
        x = kernels.dropout(x, self.config.hidden_dropout_prob, self.training)  # [B, T, d]
        for layer in self.layers:
            x = layer(x, mask)
        return x

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
    def from_pretrained(source):
        """Loads an encoder, frozen (no parameter requires a gradient) and in eval mode. source: a
        directory as Google published it (bert_config.json, bert_model.ckpt.*), a directory with
        config.json and model.safetensors or pytorch_model.bin, or else a Hugging Face hub id.
        Raises FileNotFoundError without a checkpoint there, and ValueError if it does not fit."""
        checkpoint = encoder.open_encoder(source)
        known = [field.name for field in fields(BertConfig)]
        with error_prefix(checkpoint.config_path):
            config = BertConfig(**{n: v for n, v in checkpoint.config.items() if n in known})
            encoder_class = look_up(ENCODERS, config.model_type, "model_type")
        with torch.device("meta"):  # allocates nothing: the loaded tensors become its parameters
            bert = encoder_class(config)
        hub_names = {name: bert.hub_name(name) for name, _ in bert.named_parameters()}
        tensors = checkpoint.read({hub_names[n]: p.shape for n, p in bert.named_parameters()})
        bert.load_state_dict({n: tensors[hub_names[n]] for n in hub_names}, assign=True)
        bert.source, bert.directory = str(source), checkpoint.directory
        bert.hub_config, bert.sha256 = checkpoint.config, encoder.sha256_of(tensors)
        return bert.requires_grad_(False).eval()

    def own_parameters(self):
        """{name: parameter} of Θ alone, without what is plugged in."""
        inserted = re.compile(r"\.(adapters|fusion)\.")
        return {n: p for n, p in self.named_parameters() if not inserted.search(n)}

    def save_pretrained(self, directory):
        """Writes config.json and model.safetensors (Θ alone) as Hugging Face does, so that
        `transformers` and `from_pretrained` read them. Returns a SHA-256 of the weights."""
        tensors = {self.hub_name(name): p for name, p in self.own_parameters().items()}
        values = {**self.hub_config, **asdict(self.config)}
        return encoder.write_encoder(directory, values, tensors)

    def hub_name(self, name):
        """layers.0.query.weight -> encoder.layer.0.attention.self.query.weight"""
        *path, part = name.split(".")
        layer = ""
        if path[:1] == ["layers"]:
            layer, path = f"encoder.layer.{path[1]}.", path[2:]
        if (module := ".".join(path)) not in self.HUB_NAMES:
            raise ValueError(f"HUB_NAMES does not say what {name} is called in a checkpoint")
        return f"{layer}{self.HUB_NAMES[module]}.{part}"


class Roberta(Bert):
    """RoBERTa numbers positions differently: real tokens alone count, from pad_token_id + 1."""

    def positions(self, input_ids):
        real = (input_ids != self.config.pad_token_id).long()
        return real.cumsum(1) * real + self.config.pad_token_id  # [B, T]

    @property
    def max_length(self):
        return self.config.max_position_embeddings - self.config.pad_token_id - 1


ENCODERS = {"bert": Bert, "roberta": Roberta}  # by the model_type in config.json
