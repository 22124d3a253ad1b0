"""Θ: the frozen BERT encoder, with the slots where adapters and their fusion are inserted.

    bert = Bert.from_pretrained("google-bert/bert-base-uncased")  # or a directory
    h = bert(input_ids, token_type_ids, attention_mask)           # [B, T] -> [B, T, d]

Shapes: B batch, T tokens, d hidden_size, H attention heads. Figures and sections are the paper's.
"adapters 1.3" is AdapterHub's library, the reference implementation of AdapterFusion.
"""

import re
from dataclasses import asdict, dataclass, fields

import torch
import torch.nn.functional as F
from torch import nn

from formats.encoder import check_config, open_encoder, write_encoder
from runtime.kernels import attention, dropout, embedding  # torch's functions, made faster

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
    type_vocab_size: int = 2
    initializer_range: float = 0.02  # of new heads and PALs; Θ itself is loaded
    layer_norm_eps: float = 1e-12
    pad_token_id: int = 0
    position_embedding_type: str = "absolute"
    model_type: str = "bert"

    @property
    def max_length(self):
        """The longest input in tokens."""
        return self.max_position_embeddings

    @classmethod
    def from_json(cls, path, values):
        """The configuration in the JSON object `values`, whose other fields are ignored; path: the
        file's, for messages. Raises ValueError, naming the field, for a value that the encoder
        cannot have."""
        known = [field.name for field in fields(cls)]
        config = cls(**{name: values[name] for name in known if name in values})
        check_config(path, config, ACTIVATIONS, fields(BertConfig))
        return config

    def to_json(self):
        """The fields that `save_pretrained` writes."""
        return asdict(self)


@dataclass
class RobertaConfig(BertConfig):
    model_type: str = "roberta"
    pad_token_id: int = 1

    @property
    def max_length(self):
        """RoBERTa's positions start after its padding index."""
        return self.max_position_embeddings - self.pad_token_id - 1


class AddNorm(nn.Module):
    """
    The "Add & Norm" that closes a sub-layer: LN(f + x). This project calls it a slot: adapters and
    their fusion are inserted here (Figures 1, 2, 5). The figures have two Add & Norm boxes around
    an adapter. Both are this LayerNorm: the adapter reads LN(f + x), and the result is
    LN(f + z + x).

    adapters   every Φ_n that sits here, by name (adapter.py)
    fusion     Ψ, or None (fusion.py)
    active     None for plain BERT, an adapter's name, or the fusion's name (the names of its
               adapters, comma-separated)
    """

    def __init__(self, config):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.adapters = nn.ModuleDict()
        self.fusion = None
        self.active = None

    def forward(self, f, x, layer_input):
        """
        f: the sub-layer's output, x: its input (the residual stream), both [B, T, d] -> the same.
        layer_input: (the layer's input [B, T, d], the mask [B, 1, 1, T] or None), for adapters that
        are parallel to the whole layer (MT-A, variants/pal.py) and for whatever mixes tokens.
        """
        if self.fusion is not None and self.active == self.fusion.name:
            adapters = [self.adapters[name] for name in self.fusion.adapter_names]
            return self.fusion(f, x, self.norm, adapters, layer_input)
        if self.active in self.adapters:
            return self.adapters[self.active](f, x, self.norm, layer_input)
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
        self.hidden_dropout = config.hidden_dropout_prob

    def forward(self, x, mask, cls_only=False, bias=None):
        """x: [B, T, d], mask: [B, 1, 1, T], True = real token, bias: [1, H, T, T] or None
        (`Bert.attention_bias`) -> [B, T, d], or with cls_only the first token's [B, 1, d]"""
        layer_input = (x, mask)
        k, v = self.split_heads(self.key(x)), self.split_heads(self.value(x))  # [B, H, T, d/H]
        if cls_only:
            x = x[:, :1].contiguous()  # contiguous: one matrix product for the batch
        q = self.split_heads(self.query(x))  # [B, H, T, d/H], or with cls_only [B, H, 1, d/H]
        # The bias is given only if there is one: a fork's attention(q, k, v, mask) has none.
        more = {} if bias is None else {"bias": bias[:, :, : q.shape[2]]}
        a = self.attention(q, k, v, mask, **more).transpose(1, 2).reshape(x.shape)
        f = dropout(self.attention_dense(a), self.hidden_dropout, self.training)
        x = self.attention_add_norm(f, x, layer_input)
        f = self.output_dense(self.activation(self.intermediate(x)))  # d -> intermediate_size -> d
        f = dropout(f, self.hidden_dropout, self.training)
        return self.output_add_norm(f, x, layer_input)

    def split_heads(self, x):
        """[B, T, d] -> [B, H, T, d/H]"""
        B, T, _ = x.shape
        return x.view(B, T, self.num_heads, -1).transpose(1, 2)

    def attention(self, q, k, v, mask, bias=None):
        """softmax(q kᵀ / √(d/H) + bias) v over the real tokens, with dropout on the softmax in
        training: q, k, v [B, H, T, d/H] -> q's shape"""
        p = self.attention_dropout if self.training else 0.0
        return attention(q, k, v, mask, p, bias)


class Bert(nn.Module):
    """BERT without pooler and pretraining heads. Encoders that differ from it in positions, token
    types, attention's scores or the names of tensors are subclasses (`Roberta`, below)."""

    config_class = BertConfig
    HUB_NAMES = {  # our module -> Hugging Face's; Google's differ from those only in punctuation
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

    def __init__(self, config: BertConfig):
        super().__init__()
        self.config = config
        # set by from_pretrained:
        self.source = None  # its argument, a directory or hub id, which saved adapters mention
        self.directory = None  # where the checkpoint's files and the tokenizer's are
        self.digest = None  # SHA-256 of the weights in the checkpoint
        self.checkpoint_names = {}  # {our name of a parameter: its name in the checkpoint}
        # {(layer, location): module} of slots that are not AddNorms, for adapters elsewhere
        # (LoRA in the query projection, say): submodules of this encoder, with `adapters`, `fusion`
        # and `active` as AddNorm has them
        self.extra_slots = {}
        d = config.hidden_size
        self.word_embeddings = embedding(config.vocab_size, d)
        self.position_embeddings = embedding(config.max_position_embeddings, d)
        if config.type_vocab_size:
            self.token_type_embeddings = embedding(config.type_vocab_size, d)
        self.embeddings_norm = nn.LayerNorm(d, eps=config.layer_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))

    def forward(self, input_ids, token_type_ids=None, attention_mask=None, cls_only=False):
        """
        input_ids, token_type_ids, attention_mask: LongTensors [B, T], in this order (the mask is
        second in `transformers`); attention_mask is 1 on real tokens. Without token types all are
        0, without a mask all tokens are real.
        Returns the last layer's hidden states [B, T, d], or with cls_only the first token's
        [B, 1, d]: for a head that reads only [CLS] (adapter.py), the other tokens of the last layer
        need only keys and values. Raises ValueError if T exceeds the position embeddings.
        """
        B, T = input_ids.shape
        if T > self.config.max_length:
            longest = self.config.max_length
            raise ValueError(f"an input of {T} tokens is longer than this encoder's {longest}")
        mask = attention_mask
        if mask is not None:
            mask = mask.bool()[:, None, None, :]  # [B, T] -> [B, 1, 1, T]
        bias = self.attention_bias(T)  # [1, H, T, T], or None

        x = self.word_embeddings(input_ids)
        if self.config.type_vocab_size:
            if token_type_ids is None:
                token_type_ids = torch.zeros_like(input_ids)
            x = x + self.token_type_embeddings(token_type_ids)
        x = self.embeddings_norm(x + self.position_embeddings(self.positions(input_ids)))
        x = dropout(x, self.config.hidden_dropout_prob, self.training)  # [B, T, d]
        for layer in self.layers[:-1]:
            x = layer(x, mask, bias=bias)
        # All tokens are computed where something in the last layer may mix them, and for a single
        # example: the products of a single vector may be rounded differently from run to run, by
        # where the weights lie in memory.
        last = self.layers[-1]
        first_only = cls_only and B > 1 and not any(map(may_mix_tokens, last.modules()))
        x = last(x, mask, cls_only=first_only, bias=bias)
        return x[:, :1] if cls_only else x

    def positions(self, input_ids):
        """[B, T] -> [T] or [B, T]: the rows of the position embeddings."""
        return torch.arange(input_ids.shape[1], device=input_ids.device)

    def attention_bias(self, T):
        """[1, H, T, T], which is added to the scores of attention in every layer, or None."""
        return None

    def slots(self):
        """Every slot: ((layer, "attention" | "output"), AddNorm) from bottom to top, then
        `extra_slots`."""
        for i, layer in enumerate(self.layers):
            yield (i, "attention"), layer.attention_add_norm
            yield (i, "output"), layer.output_add_norm
        yield from self.extra_slots.items()

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

        source: a directory as Google published it (bert_config.json, bert_model.ckpt.*), a
        directory with config.json and model.safetensors or pytorch_model.bin, or else a Hugging
        Face hub id. Raises FileNotFoundError if there is no such checkpoint, ValueError if its
        content does not fit; the message names the file, and the tensor with both shapes.
        `Bert.from_pretrained` makes the class that ENCODERS has for the `model_type` in
        config.json, a subclass's `from_pretrained` that subclass.
        """
        checkpoint = open_encoder(source)
        config = read_config(checkpoint.config_path, checkpoint.config)
        kind = ENCODERS[config.model_type] if cls is Bert else cls
        with torch.device("meta"):  # allocates nothing: the loaded tensors become its parameters
            bert = kind(config)
        shapes = {kind.hub_name(name): p.shape for name, p in bert.named_parameters()}
        tensors = checkpoint.read(shapes)
        state = {name: tensors[kind.hub_name(name)] for name, _ in bert.named_parameters()}
        bert.load_state_dict(state, assign=True)
        bert.source, bert.directory = str(source), checkpoint.directory
        bert.digest = checkpoint.digest
        bert.checkpoint_names = {name: checkpoint.names[kind.hub_name(name)] for name in state}
        return bert.requires_grad_(False).eval()

    def own_parameters(self):
        """{name: parameter} of Θ alone, without adapters and fusions."""
        inserted = re.compile(r"\.(adapters|fusion)\.")
        return {n: p for n, p in self.named_parameters() if not inserted.search(n)}

    def save_pretrained(self, directory):
        """Writes config.json and model.safetensors (Θ alone) under Hugging Face's names, so that
        `transformers` and `from_pretrained` read them. Other keys of a config.json there stay."""
        tensors = {self.hub_name(name): p for name, p in self.own_parameters().items()}
        write_encoder(directory, self.config.to_json(), tensors, prefix=self.config.model_type)

    @classmethod
    def hub_name(cls, name):
        """ "layers.0.query.weight" -> "encoder.layer.0.attention.self.query.weight". Raises
        ValueError for a parameter that HUB_NAMES does not name."""
        layer, module, part = re.fullmatch(r"(?:layers\.(\d+)\.)?(.*?)\.?(\w+)", name).groups()
        if module not in cls.HUB_NAMES:
            kind = cls.__name__
            raise ValueError(f"{kind}.HUB_NAMES does not say what a checkpoint calls {name}")
        return (f"encoder.layer.{layer}." if layer else "") + f"{cls.HUB_NAMES[module]}.{part}"


class Roberta(Bert):
    """BERT with other positions."""

    config_class = RobertaConfig

    def positions(self, input_ids):
        """They count the real tokens, from pad_token_id + 1. [B, T] -> [B, T]"""
        real = (input_ids != self.config.pad_token_id).long()
        return real.cumsum(1) * real + self.config.pad_token_id


ENCODERS = {}  # {model_type in config.json: its class}


def register(encoder_class):
    """Makes an encoder known under its configuration's `model_type`. Raises ValueError if that is
    taken."""
    name = encoder_class.config_class.model_type
    if ENCODERS.get(name, encoder_class) is not encoder_class:
        raise ValueError(f"{encoder_class.__name__}: there is already an encoder {name!r}")
    ENCODERS[name] = encoder_class


register(Bert)
register(Roberta)


def read_config(path, values):
    """The configuration of the encoder that config.json describes. values: the JSON object in it;
    path: for messages. Raises ValueError for a `model_type` that is not registered."""
    name = values.get("model_type", "bert")
    if name not in [*ENCODERS]:  # a list: a file's value may be unhashable
        advice = "docs/forking.md says how to add one, and --import names its module"
        known = ", ".join(ENCODERS)
        raise ValueError(f"{path}: model_type {name!r:.50} is not one of {known}; {advice}")
    return ENCODERS[name].config_class.from_json(path, values)


def may_mix_tokens(module):
    """Whether a token's output may depend on other tokens. Each class says so itself: a subclass of
    `Adapter` or `Fusion` does not inherit their `mixes_tokens = False`, as it may be another
    function."""
    own = vars(type(module))
    if "mixes_tokens" in own:
        return own["mixes_tokens"]
    return hasattr(module, "mixes_tokens")


def activate(bert, name):
    """Activates an adapter, a fusion (by its name, that of its adapters, comma-separated) or, with
    None, plain BERT, and freezes all parameters. If a fusion has a single adapter, the name means
    the fusion. Raises ValueError if nothing has that name."""
    known = known_adapters(bert) | {slot.fusion.name for _, slot in bert.slots() if slot.fusion}
    if name is not None and name not in known:
        names = ", ".join(map(repr, sorted(known))) or "none"
        raise ValueError(f"no adapter or fusion is called {name!r}; there are: {names}")
    for _, slot in bert.slots():
        slot.active = name
    bert.requires_grad_(False)


def known_adapters(bert):
    """The names of all adapters in this encoder."""
    return {name for _, slot in bert.slots() for name in slot.adapters}
