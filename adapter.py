"""Φ: task adapters, the small networks trained in stage 1 (section 2.2, Figure 5), and heads.

    add_adapter(bert, "rte", AdapterConfig.pfeiffer(reduction_factor=16))  # trainable, active
    load_adapter(bert, "runs/rte")                                         # AdapterHub's files
    activate(bert, "rte")                                                  # None: plain BERT
    save_adapter(bert, "rte", "runs/rte")

A kind of adapter is a configuration class, whose fields are those of its JSON file, with

    architecture             its name in that file; None for AdapterHub's bottleneck adapters
    modules(bert)            [((layer, location), slot, new module)], wherever it sits
    tensor_names(module)     {name in the file, adapter_PART.KIND: name in the module}
    no_fusion                why it cannot be fused, or None; kinds are never fused with each other

and a module that computes, for f the sub-layer's output and x its input, both [B, T, d],

    enter(f, x, norm)        what it reads, h, and the residual that is added to its output
    z(h, layer_input)        its output without the residual: what fusion mixes
    leave(output, x, norm)   back into the residual stream
    forward(f, x, norm, layer_input)

`register` makes it known to `--adapter` and `load_adapter`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from bert import ACTIVATIONS
from formats import adapterhub
from formats.files import naming

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
        """Bapna and Firat (2019): one per layer, on top, with a new LayerNorm on its input."""
        return cls(**{"ln_before": True, **changes})

    def bottleneck_size(self, hidden_size, layer):
        """r of one layer. The reference rounds down, and never below 1."""
        factor = self.reduction_factor
        if isinstance(factor, Mapping):
            factor = factor.get(str(layer), factor.get("default"))
            if factor is None:
                raise ValueError(f"reduction_factor has neither layer {layer} nor a default")
        return max(int(hidden_size // factor), 1)

    def modules(self, bert):
        sits_at, d = (
            {"attention": self.mh_adapter, "output": self.output_adapter},
            bert.config.hidden_size,
        )
        return [
            ((layer, location), slot, Adapter(self, d, self.bottleneck_size(d, layer)))
            for (layer, location), slot in bert.slots()
            if sits_at.get(location, False) and layer not in self.leave_out
        ]

    def tensor_names(self, module):
        return adapterhub.bottleneck_names(self.ln_before, self.ln_after)

    def initialize(self, linear):
        """As the reference does: weights from N(0, 0.02), biases 0."""
        nn.init.normal_(linear.weight, std=0.02)
        nn.init.zeros_(linear.bias)


class Adapter(nn.Module):
    """One adapter in one slot, around it LayerNorms and a residual (Figure 5)."""

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

    def enter(self, f, x, norm):
        """What the adapter reads, and its residual: f, x [B, T, d] -> h, residual [B, T, d]"""
        h = norm(f + x) if self.config.original_ln_before else f
        if self.config.residual_before_ln == "post_add":
            return h, f + x
        return h, f if self.config.residual_before_ln else h

    def z(self, h, layer_input=None):
        """z = U·act(D·h + b_D) + b_U: [B, T, d] -> [B, T, r] -> [B, T, d]. Fusion's fast form works
        on these four parts of many adapters at once."""
        U, b_U = self.up_projection()
        return F.linear(self.act(self.down(self.read(h))), U, b_U)

    def read(self, h):
        return self.norm_before(h) if self.norm_before else h

    def up_projection(self):
        """U [d, r] and b_U [d]"""
        return self.up.weight, self.up.bias

    def leave(self, output, x, norm):
        """Back into the residual stream."""
        return norm(output + x) if self.config.original_ln_after else output

    def forward(self, f, x, norm, layer_input=None):
        """f: sub-layer output, x: its input, norm: BERT's own LayerNorm; [B, T, d] -> [B, T, d]"""
        h, residual = self.enter(f, x, norm)
        z = self.z(h, layer_input)
        if self.norm_after is None:
            output = z + residual
        elif self.config.adapter_residual_before_ln:
            output = self.norm_after(z + residual)
        else:
            output = self.norm_after(z) + residual
        return self.leave(output, x, norm)


ADAPTERS = {}  # --adapter: what makes a configuration
KINDS = {}  # architecture in a saved adapter's file: the class of its configuration


def register(kind, *names):
    """Makes a kind of adapter known; names: of the class methods that make a configuration."""
    KINDS[kind.architecture] = kind
    ADAPTERS.update({name: getattr(kind, name) for name in names})


register(AdapterConfig, "pfeiffer", "houlsby", "bapna")


def add_adapter(bert, name, config):
    """
    Adds a new adapter to every slot that its config names, activates it, and leaves exactly it
    trainable. It is held in fp32 even where the encoder is in bf16.
    Raises ValueError if the name is taken or unusable, or if the config leaves no adapter in this
    encoder; then nothing is changed.
    """
    dtype = torch.float64 if bert.dtype == torch.float64 else torch.float32
    modules = new_modules(bert, name, config, dtype)
    plug_in(name, modules)
    activate(bert, name)
    for _, _, module in modules:
        module.requires_grad_(True)


def new_modules(bert, name, config, dtype):
    """[((layer, location), slot, new module)] of a new adapter, frozen, not yet in the slots."""
    adapterhub.check_name(name)
    if any(name in slot.adapters for _, slot in bert.slots()):
        raise ValueError(f"there is already an adapter called {name!r}")
    modules = config.modules(bert)
    if not modules:
        layers = bert.config.num_hidden_layers
        raise ValueError(f"adapter {name!r}: leave_out leaves no layer of {layers}")
    for _, _, module in modules:
        module.to(bert.device, dtype).requires_grad_(False).train(bert.training)
    return modules


def plug_in(name, modules):
    for _, slot, module in modules:
        slot.adapters[name] = module


def find_adapter(bert, name):
    """(configuration, [((layer, location), slot, module)]). Raises ValueError if there is none."""
    found = [
        (key, slot, slot.adapters[name]) for key, slot in bert.slots() if name in slot.adapters
    ]
    if not found:
        raise ValueError(f"there is no adapter called {name!r}")
    return found[0][2].config, found


def activate(bert, name):
    """Lets one adapter, a fusion (its name is that of its adapters joined by commas; a fusion of
    one goes before that one) or, with None, only the encoder take part. Everything is frozen
    afterwards. Raises ValueError if nothing has that name."""
    known = {name for _, slot in bert.slots() for name in slot.adapters}
    known |= {slot.fusion.name for _, slot in bert.slots() if slot.fusion is not None}
    if name is not None and name not in known:
        there = ", ".join(sorted(known)) or "none"
        raise ValueError(f"there is no adapter called {name!r}; there are: {there}")
    set_active(bert, name)
    bert.requires_grad_(False)


def set_active(bert, name):
    """`activate` without freezing: multi-task training turns from one adapter to the next."""
    for _, slot in bert.slots():
        slot.active = name


class Head(nn.Module):
    """
    The prediction head, on the last layer's [CLS] vector, without pooler. The paper does not
    describe it; this is AdapterHub's.

    config holds AdapterHub's fields: head_type ("classification" | "multiple_choice"), num_labels
    or num_choices, layers (2: dropout, linear d -> d, tanh, dropout, linear; 1: dropout, linear),
    label2id. Raises ValueError for any other head.
    """

    def __init__(self, config, bert_config):
        super().__init__()
        self.config = adapterhub.head_config(config)
        self.num_outputs = self.config.get("num_labels") or self.config.get("num_choices")
        rates = (
            self.config["dropout_prob"],
            bert_config.classifier_dropout,
            bert_config.hidden_dropout_prob,
        )
        dropout = next(p for p in rates if p is not None)
        d, last = (
            bert_config.hidden_size,
            1 if config["head_type"] == "multiple_choice" else self.num_outputs,
        )
        modules = [nn.Dropout(dropout), nn.Linear(d, last)]
        if self.config["layers"] == 2:
            modules = [nn.Dropout(dropout), nn.Linear(d, d), nn.Tanh(), *modules]
        self.layers = nn.Sequential(*modules)
        for module in modules:
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=bert_config.initializer_range)
                nn.init.zeros_(module.bias)

    def forward(self, h):
        """h: hidden states [B·C, T, d], an example's C candidates in a row (1 for classification)
        -> logits [B, K]"""
        cls = h[:, 0].to(self.layers[-1].weight.dtype)  # [B·C, d]
        return self.layers(cls).view(-1, self.num_outputs)


# --------------------------------------------------------------------------------------------------
# Files, in AdapterHub's formats


def save_adapter(bert, name, directory):
    """Writes adapter_config.json and adapter.safetensors, fp32. Raises ValueError without it."""
    config, modules = find_adapter(bert, name)
    header = adapterhub.header(name, bert.config, bert.source)
    adapterhub.write_adapter(directory, config, named_tensors(config, modules), header)


def named_tensors(config, modules):
    """{(slot, part): parameter} under AdapterHub's names"""
    return {
        (adapterhub.slot_name(key), theirs): module.get_parameter(ours)
        for key, _, module in modules
        for theirs, ours in config.tensor_names(module).items()
    }


def load_adapter(bert, directory, name=None):
    """
    Plugs a saved adapter into the encoder, frozen and not yet active, in the encoder's dtype.

    directory: a run, an AdapterHub directory (modern or legacy tensor names, safetensors or .bin),
    or a hub id; name: what to call it here, otherwise what its config says. Returns the name.
    Raises FileNotFoundError without an adapter there, ValueError if it does not fit; then the
    encoder is unchanged.
    """
    saved = adapterhub.read_adapter(directory, KINDS, name)
    with naming(saved.directory):
        saved.check_encoder(bert.config)
        modules = new_modules(bert, saved.name, saved.config, bert.dtype)
    saved.fill(named_tensors(saved.config, modules))
    plug_in(saved.name, modules)
    return saved.name


def save_head(head, bert, name, directory):
    """Writes head_config.json and model_head.safetensors into `directory`."""
    tensors = {("heads", part): tensor for part, tensor in head.layers.state_dict().items()}
    header = adapterhub.header(name, bert.config, bert.source)
    adapterhub.write(directory, adapterhub.HEAD, head.config, tensors, header)


def load_head(bert, directory):
    """The Head saved in `directory` (or a hub id), frozen, in eval mode. Raises as load_adapter."""
    saved = adapterhub.read_head(directory)
    head = Head(saved.config, bert.config)
    saved.fill({("heads", part): p for part, p in head.layers.named_parameters()})
    return head.to(bert.device).requires_grad_(False).eval()
