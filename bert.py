"""Θ: the frozen BERT encoder, with the slots where adapters and their fusion are inserted.

    bert = Bert.from_pretrained("google-bert/bert-base-uncased")  # or a directory
    h = bert(input_ids, token_type_ids, attention_mask)           # [B, T] -> [B, T, d]
    python bert.py SOURCE "Some text"                             # what a checkpoint holds

Shapes: B batch, T tokens, d hidden_size, H heads. Figures and sections are the paper's.
"""

if __name__ == "__main__":
    from runtime.command import announce

    announce("bert.py")

import re
from dataclasses import asdict

import torch
import torch.nn.functional as F
from torch import nn

from formats.encoder import BertConfig, open_encoder, write_encoder
from runtime.kernels import attention, dropout, embedding

ACTIVATIONS = {
    "gelu": F.gelu,  # with erf, as transformers computes Google's "gelu"
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}


class AddNorm(nn.Module):
    """
    The "Add & Norm" that closes a sub-layer: the insertion point for adapters and fusion, called a
    slot in this project (Figures 1, 2, 5).

    adapters   every Φ_n that sits here, by name (adapter.py)
    fusion     Ψ, or None (fusion.py)
    active     None for plain BERT, an adapter's name, or the fusion's name (its adapters,
               comma-separated)
    """

    def __init__(self, config):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.adapters = nn.ModuleDict()
        self.fusion = None
        self.active = None

    def forward(self, f, x, layer_input=None):
        """
        f: the sub-layer's output, x: its input (the residual stream), both [B, T, d] -> the same.
        layer_input: what the whole layer read, (its x, its mask), for adapters that work in
        parallel to the layer (MT-A, variants/pal.py). Only the slot on top of a layer is given it.
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

    def forward(self, x, mask, cls_only=False):
        """x: [B, T, d], mask: [B, 1, 1, T], True = real token -> [B, T, d], or with cls_only the
        first token's [B, 1, d]"""
        layer_input = (x, mask)
        k, v = self.heads(self.key(x)), self.heads(self.value(x))  # [B, H, T, d/H]
        if cls_only:
            x = x[:, :1].contiguous()  # so that each projection is one matmul instead of B
        q = self.heads(self.query(x))  # [B, H, T, d/H], or with cls_only [B, H, 1, d/H]
        a = self.attend(q, k, v, mask).transpose(1, 2).reshape(x.shape)
        f = dropout(self.attention_dense(a), self.hidden_dropout, self.training)
        x = self.attention_add_norm(f, x)
        f = self.output_dense(self.activation(self.intermediate(x)))  # d -> 4d -> d
        f = dropout(f, self.hidden_dropout, self.training)
        return self.output_add_norm(f, x, layer_input)

    def heads(self, x):
        """[B, T, d] -> [B, H, T, d/H]"""
        B, T, _ = x.shape
        return x.view(B, T, self.num_heads, -1).transpose(1, 2)

    def attend(self, q, k, v, mask):
        """softmax(q kᵀ / √(d/H)) v over the real tokens, with dropout on the softmax in training:
        q, k, v [B, H, T, d/H] -> q's shape"""
        p = self.attention_dropout if self.training else 0.0
        return attention(q, k, v, mask, p)


class Bert(nn.Module):
    """BERT or RoBERTa without pooler and pretraining heads."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.config = config
        # set by from_pretrained:
        self.source = None  # its argument, which the files of adapters mention
        self.directory = None  # of the checkpoint's files, the tokenizer's among them
        self.digest = None  # SHA-256 of the weights in the checkpoint
        self.origin = {}  # {our name of a parameter: its name in the checkpoint}
        # {(layer, location): module} of slots beside the AddNorms, for adapters that sit elsewhere
        # (LoRA in the query projection, say): submodules of this encoder, with `adapters`, `fusion`
        # and `active` as AddNorm has them
        self.more_slots = {}
        d = config.hidden_size
        # an nn.Embedding each; see runtime/kernels.py for why not by its own constructor
        self.word_embeddings = embedding(config.vocab_size, d)
        self.position_embeddings = embedding(config.max_position_embeddings, d)
        self.token_type_embeddings = embedding(config.type_vocab_size, d)
        self.embeddings_norm = nn.LayerNorm(d, eps=config.layer_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))

    def forward(self, input_ids, token_type_ids=None, attention_mask=None, cls_only=False):
        """
        input_ids, token_type_ids, attention_mask: LongTensors [B, T]; attention_mask is 1 on real
        tokens. Without token types all are 0, without a mask all tokens are real.
        Returns the last layer's hidden states [B, T, d], or with cls_only the first token's
        [B, 1, d]. (The head reads only [CLS], so in the last layer the other tokens need only keys
        and values.) Raises ValueError if T exceeds the position embeddings.
        """
        T, longest = input_ids.shape[1], self.config.max_length
        if T > longest:
            raise ValueError(f"an input of {T} tokens is longer than this encoder's {longest}")
        positions = torch.arange(T, device=input_ids.device)  # [T]
        if self.config.model_type == "roberta":  # from pad + 1; padding stays at pad
            real = (input_ids != self.config.pad_token_id).long()
            positions = real.cumsum(1) * real + self.config.pad_token_id  # [B, T]
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        mask = attention_mask
        if mask is not None:
            mask = mask.bool()[:, None, None, :]  # [B, T] -> [B, 1, 1, T]

        x = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        x = self.embeddings_norm(x + self.position_embeddings(positions))  # [B, T, d]
        x = dropout(x, self.config.hidden_dropout_prob, self.training)
        for layer in self.layers[:-1]:
            x = layer(x, mask)
        # For a single example the shortcut would turn matrix products into matrix-vector products,
        # whose rounding depends on where in memory the weights are. So it is computed whole.
        x = self.layers[-1](x, mask, cls_only=cls_only and len(x) > 1)
        return x[:, :1] if cls_only else x

    def slots(self):
        """Every slot: ((layer, "attention" | "output"), AddNorm) from bottom to top, then those of
        `more_slots`."""
        for i, layer in enumerate(self.layers):
            yield (i, "attention"), layer.attention_add_norm
            yield (i, "output"), layer.output_add_norm
        yield from self.more_slots.items()

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
        """
        checkpoint = open_encoder(source)
        with torch.device("meta"):  # empty: its parameters become the loaded tensors themselves
            bert = cls(checkpoint.config)
        shapes = {hub_name(name): p.shape for name, p in bert.named_parameters()}
        tensors = checkpoint.read(shapes)
        state = {name: tensors[hub_name(name)] for name, _ in bert.named_parameters()}
        bert.load_state_dict(state, assign=True)
        bert.source, bert.directory = str(source), checkpoint.directory
        bert.digest = checkpoint.digest
        bert.origin = {name: checkpoint.names[hub_name(name)] for name in state}
        return bert.requires_grad_(False).eval()

    def save_pretrained(self, directory):
        """Writes config.json and model.safetensors (Θ alone) under Hugging Face's names, so that
        `transformers` and `from_pretrained` read them. Existing keys of config.json stay."""
        inserted = re.compile(r"\.(adapters|fusion)\.")
        tensors = {hub_name(n): p for n, p in self.named_parameters() if not inserted.search(n)}
        write_encoder(directory, asdict(self.config), tensors, prefix=self.config.model_type)


def activate(bert, name):
    """Activates an adapter, a fusion (named after its adapters, comma-separated; a fusion of one
    adapter goes before that adapter) or, with None, plain BERT, and freezes all parameters. Raises
    ValueError if nothing has that name."""
    known = known_adapters(bert) | {slot.fusion.name for _, slot in bert.slots() if slot.fusion}
    if name is not None and name not in known:
        names = ", ".join(sorted(known)) or "none"
        raise ValueError(f"there is no adapter called {name!r}; there are: {names}")
    for _, slot in bert.slots():
        slot.active = name
    bert.requires_grad_(False)


def known_adapters(bert):
    """The names of all adapters in this encoder."""
    return {name for _, slot in bert.slots() for name in slot.adapters}


NAMES = {  # our module -> Hugging Face's; Google's differ from those only in punctuation
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


def hub_name(name):
    """Of our parameter: layers.0.query.weight -> encoder.layer.0.attention.self.query.weight"""
    layer, module, part = re.fullmatch(r"(?:layers\.(\d+)\.)?(.+)\.(\w+)", name).groups()
    return (f"encoder.layer.{layer}." if layer else "") + f"{NAMES[module]}.{part}"


def main():
    from runtime.inspect import inspect_encoder

    inspect_encoder(Bert.from_pretrained)


if __name__ == "__main__":
    main()
