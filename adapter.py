"""Φ: task adapters, the small networks trained in stage 1 (section 2.2, Figure 5), and heads.

add_adapter(bert, "rte", AdapterConfig.pfeiffer(reduction_factor=16))  # trainable, active
load_adapter(bert, "runs/rte")                                         # AdapterHub's files
activate(bert, "rte")                                                  # None: plain BERT
save_adapter(bert, "rte", "runs/rte")
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from bert import ACTIVATIONS, activate, known_adapters
from formats import adapterhub
from formats.encoder import read_pooler
from formats.files import error_prefix

NON_LINEARITIES = {
    "leakyrelu": F.leaky_relu,
    **{name: ACTIVATIONS[name] for name in ("relu", "swish", "gelu", "gelu_new")},
}


@dataclass(frozen=True)
class AdapterConfig:
    """
    Any point of the paper's grid (appendix A.2, Figure 5), under AdapterHub's field names.

    mh_adapter, output_adapter   where: after the attention ("bottom"), the feed-forward ("top")
    reduction_factor             bottleneck r = hidden_size // reduction_factor, at least 1; a
                                 mapping {"0": 2, "default": 16} gives it by layer
    non_linearity                relu | leakyrelu | swish | gelu | gelu_new, its tanh form
    original_ln_before           it reads LN(f + x), with BERT's own LayerNorm, instead of f
    original_ln_after            LN(· + x), with BERT's own LayerNorm, after the adapter
    ln_before, ln_after          a new LayerNorm on the adapter's input, output
    residual_before_ln           its residual is f (True), LN(f + x) (False), f + x ("post_add")
    adapter_residual_before_ln   with ln_after: the residual is added before that LayerNorm
    leave_out                    layers (from 0) without an adapter

    Raises ValueError, naming the field, for what has no meaning.
    """

    mh_adapter: bool = False
    output_adapter: bool = True
    reduction_factor: float | Mapping = 16
    non_linearity: str = "relu"
    original_ln_before: bool = True
    original_ln_after: bool = True
    ln_before: bool = False
    ln_after: bool = False
    residual_before_ln: bool | str = True
    adapter_residual_before_ln: bool = False
    leave_out: tuple = ()

    architecture = None
    no_fusion = None

    def __post_init__(self):
        adapterhub.check_bottleneck(self, NON_LINEARITIES)
        object.__setattr__(self, "leave_out", tuple(self.leave_out))

    @classmethod
    def pfeiffer(cls, **changes):
        """The paper's own: one per layer, on top, between BERT's LayerNorm applied twice."""
        return cls(**changes)

    @classmethod
    def houlsby(cls, **changes):
        """Houlsby et al. (2019), ST-A Houlsby in Table 1: two adapters per layer."""
        own = {"mh_adapter": True, "non_linearity": "swish", "original_ln_before": False}
        return cls(**{**own, **changes})

    @classmethod
    def bapna(cls, **changes):
        """Bapna and Firat (2019): h + U·relu(D·LN_new(h)) on each layer's output h = LN(f + x)."""
        own = {"ln_before": True, "original_ln_after": False, "residual_before_ln": False}
        return cls(**{**own, **changes})

    def bottleneck_size(self, hidden_size, layer):
        """r of one layer. The reference rounds down, and never below 1."""
        factor = adapterhub.factor_of_layer(self.reduction_factor, layer)
        return max(int(hidden_size // factor), 1)

    def modules(self, bert):
        """[((layer, location), slot, new module)], wherever it sits"""
        sits_at = {"attention": self.mh_adapter, "output": self.output_adapter}
        d = bert.config.hidden_size
        return [
            ((layer, location), slot, Adapter(self, d, self.bottleneck_size(d, layer)))
            for (layer, location), slot in bert.slots()
            if sits_at.get(location, False) and layer not in self.leave_out
        ]

    def tensor_names(self, module):
        """{name in the file: name in the module}"""
        return adapterhub.bottleneck_names(self.ln_before, self.ln_after)

    def initialize(self, linear):
        """As the reference does: weights from N(0, 0.02), biases 0."""
        nn.init.normal_(linear.weight, std=0.02)
        nn.init.zeros_(linear.bias)


class Adapter(nn.Module):
    """One adapter in one slot, with its LayerNorms and residual (Figure 5)."""

    def __init__(self, config, hidden_size, bottleneck_size):
        super().__init__()
        self.config = config
        self.norm_before = nn.LayerNorm(hidden_size) if config.ln_before else None
        self.down = nn.Linear(hidden_size, bottleneck_size)  # D
        self.act = NON_LINEARITIES[config.non_linearity]
        self.up = nn.Linear(bottleneck_size, hidden_size)  # U
        self.norm_after = nn.LayerNorm(hidden_size) if config.ln_after else None
        for linear in (self.down, self.up):
            config.initialize(linear)

    def inputs(self, f, x, norm):
        """What the adapter reads, and its residual: f, x [B, T, d] -> h, residual [B, T, d]"""
        h = norm(f + x) if self.config.original_ln_before else f
        if self.config.residual_before_ln == "post_add":
            return h, f + x
        return h, f if self.config.residual_before_ln else h

    def z(self, h, layer_input=None):
        """U·act(D·h + b_D) + b_U, without the residual: what fusion mixes; [B, T, d] -> the same.
        Fusion's fast form works on `read`, `down`, `act` and `up_projection` of all at once."""
        U, b_U = self.up_projection()
        a = self.act(self.down(self.input_norm(h)))  # [B, T, d] -> [B, T, r]
        return F.linear(a, U, b_U)  # -> [B, T, d]

    def input_norm(self, h):
        return self.norm_before(h) if self.norm_before else h

    def up_projection(self):
        """U [d, r] and b_U [d]"""
        return self.up.weight, self.up.bias

    def add_and_norm(self, output, x, norm):
        """Back into the residual stream."""
        return norm(output + x) if self.config.original_ln_after else output

    def forward(self, f, x, norm, layer_input=None):
        """f: sub-layer output, x: its input, norm: BERT's own LayerNorm; [B, T, d] -> [B, T, d]"""
        h, residual = self.inputs(f, x, norm)
        z = self.z(h, layer_input)
        if self.norm_after is None:
            output = z + residual
        elif self.config.adapter_residual_before_ln:
            output = self.norm_after(z + residual)
        else:
            output = self.norm_after(z) + residual
        return self.add_and_norm(output, x, norm)


ADAPTERS = {}  # --adapter: what makes a configuration
KINDS = {}  # architecture in a saved adapter's file: the class of its configuration


def register(kind, *names):
    """Makes a kind known, see docs/forking.md; names: of class methods that make configurations."""
    KINDS[kind.architecture] = kind
    ADAPTERS.update({name: getattr(kind, name) for name in names})


register(AdapterConfig, "pfeiffer", "houlsby", "bapna")


def add_adapter(bert, name, config):
    """Adds a new adapter to every slot that its config names, activates it, and leaves exactly it
    trainable. It is held in fp32 even where the encoder is in bf16. Raises ValueError if the name
    is taken or unusable, or if the config leaves no adapter in this encoder."""
    dtype = torch.float64 if bert.dtype == torch.float64 else torch.float32
    modules = new_modules(bert, name, config, dtype)
    for _, slot, module in modules:
        slot.adapters[name] = module
    activate(bert, name)
    for _, _, module in modules:
        module.requires_grad_(True)


def new_modules(bert, name, config, dtype):
    """[((layer, location), slot, new module)] of a new adapter, frozen, not yet in the slots."""
    adapterhub.check_name(name, taken=known_adapters(bert))
    modules = config.modules(bert)
    if not modules:
        raise ValueError(f"adapter {name!r}: leave_out leaves no layer of {len(bert.layers)}")
    for _, _, module in modules:
        module.to(bert.device, dtype).requires_grad_(False).train(bert.training)
    return modules


def find_adapter(bert, name):
    """(configuration, [((layer, location), slot, module)]). Raises ValueError if there is none."""
    there = [(key, slot) for key, slot in bert.slots() if name in slot.adapters]
    found = [(key, slot, slot.adapters[name]) for key, slot in there]
    if not found:
        raise ValueError(f"there is no adapter called {name!r}")
    return found[0][2].config, found


def save_adapter(bert, name, directory):
    """Writes adapter_config.json and adapter.safetensors, fp32. Raises ValueError without it."""
    config, modules = find_adapter(bert, name)
    header = adapterhub.header(name, bert.config, bert.source)
    adapterhub.write_adapter(
        directory, config, adapterhub.tensors_by_file_name(config, modules), header
    )


def load_adapter(bert, directory, name=None):
    """Plugs a saved adapter into the encoder, frozen and not yet active, in the encoder's dtype.
    directory: a run, an AdapterHub directory (modern or legacy tensor names, safetensors or .bin),
    or a hub id; name: what to call it here, otherwise what its config says. Returns the name.
    Raises FileNotFoundError without an adapter there, ValueError if it does not fit; then the
    encoder is unchanged."""
    saved = adapterhub.read_adapter(directory, KINDS, name)
    with error_prefix(saved.directory):
        saved.check_encoder(bert.config)
        modules = new_modules(bert, saved.name, saved.config, bert.dtype)
    saved.fill(adapterhub.tensors_by_file_name(saved.config, modules))
    for _, slot, module in modules:
        slot.adapters[saved.name] = module
    return saved.name


class Head(nn.Module):
    """The prediction head on the last layer's [CLS] vector, AdapterHub's; the paper describes none.
    config: head_type ("classification" | "multiple_choice"), num_labels or num_choices, layers (2:
    dropout, linear d -> d, tanh, dropout, linear; 1: dropout, linear), use_pooler, label2id. Raises
    ValueError for a head that is none of these."""

    def __init__(self, config, bert_config):
        super().__init__()
        self.config = adapterhub.head_config(config)
        self.num_outputs = adapterhub.head_outputs(self.config)
        self.layers = adapterhub.head_layers(self.config, bert_config)
        d = bert_config.hidden_size
        self.pooler = nn.Linear(d, d) if self.config["use_pooler"] else None  # the encoder's own

    def forward(self, h):
        """h: hidden states [B·C, T, d], an example's C candidates one after another
        -> logits [B, K]"""
        cls = h[:, 0].to(self.layers[-1].weight.dtype)  # [B·C, d]
        if self.pooler is not None:
            cls = self.pooler(cls).tanh()
        return self.layers(cls).view(-1, self.num_outputs)


def save_head(head, bert, name, directory):
    """Writes head_config.json and model_head.safetensors into `directory`."""
    header = adapterhub.header(name, bert.config, bert.source)
    adapterhub.write_head(directory, head.config, head.layers.state_dict(), header)


def load_head(bert, directory):
    """The Head saved in `directory` (or a hub id), frozen, in eval mode. Raises as load_adapter."""
    saved = adapterhub.read_head(directory)
    head = Head(saved.config, bert.config)
    saved.fill({("heads", part): p for part, p in head.layers.named_parameters()})
    if head.pooler is not None:  # in the encoder's files, not in the head's
        head.pooler.load_state_dict(read_pooler(bert.directory))
    return head.to(bert.device).requires_grad_(False).eval()
