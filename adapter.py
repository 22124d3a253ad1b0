"""Φ: task adapters, the small networks trained in stage 1 (section 2.2, Figure 5); and heads.

add_adapter(bert, "rte", AdapterConfig.pfeiffer(reduction_factor=16))  # trainable, active
load_adapter(bert, "runs/rte")                                         # AdapterHub's files
activate(bert, "rte")                                                  # None: plain BERT
save_adapter(bert, "rte", "runs/rte")"""

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields

import torch
from torch import nn

from bert import ACTIVATIONS
from formats import adapterhub
from formats.encoder import read_pooler
from formats.files import error_prefix
from runtime.command import look_up


@dataclass
class AdapterConfig:
    """Any point of the paper's grid (appendix A.2, Figure 5), under AdapterHub's field names.

    mh_adapter, output_adapter   where: after the attention ("bottom"), the feed-forward ("top")
    reduction_factor             bottleneck r = hidden_size // reduction_factor, at least 1; a
                                 mapping {"0": 2, "default": 16} gives it by layer
    non_linearity                relu | leakyrelu | swish (silu) | gelu | gelu_new (tanh form)
    original_ln_before           it reads LN(f + x), with BERT's own LayerNorm, instead of f
    original_ln_after            LN(· + x), with BERT's own LayerNorm, after the adapter
    ln_before, ln_after          a new LayerNorm on the adapter's input, output; a fusion leaves
                                 ln_after out, as in adapters 1.3
    residual_before_ln           which residual is added to its output:
                                     True: f     False: h, before ln_before     "post_add": f + x
    adapter_residual_before_ln   with ln_after: the residual comes before that LayerNorm, not after
    leave_out                    layers (from 0) without an adapter"""

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
    leave_out: list = field(default_factory=list)

    def __post_init__(self):
        allowed = {f.name: (True, False) for f in fields(self) if f.type is bool}
        allowed |= {"residual_before_ln": (True, False, "post_add"), "non_linearity": ACTIVATIONS}
        for name, values in allowed.items():
            if (value := getattr(self, name)) not in values:
                known = ", ".join(map(str, values))
                raise ValueError(f"{name} must be one of {known}, not {value!r}")
        for layer, factor in self.factors().items():
            is_number = type(factor) in (int, float) and 0 < factor < math.inf
            if not is_number or (layer != "default" and not layer.isdecimal()):
                raise ValueError(f"reduction_factor cannot be {layer!r:.50}: {factor!r:.50}")
        if not isinstance(self.leave_out, list) or {*map(type, self.leave_out)} - {int}:
            raise ValueError(f"leave_out must be a list of layers, not {self.leave_out!r:.50}")
        if self.residual_before_ln == "post_add" and not self.original_ln_before:
            raise ValueError("residual_before_ln='post_add' needs original_ln_before")

    @classmethod
    def pfeiffer(cls, **changes):
        """The paper's own: one per layer, after the feed-forward sub-layer; BERT's LayerNorm comes
        before it, and again after it."""
        return cls(**changes)

    @classmethod
    def houlsby(cls, **changes):
        """Houlsby et al. (2019), ST-A Houlsby in Table 1: two adapters per layer."""
        preset = {"mh_adapter": True, "non_linearity": "swish", "original_ln_before": False}
        return cls(**(preset | changes))

    @classmethod
    def bapna(cls, **changes):
        """Bapna and Firat (2019): h + U·relu(D·LN_new(h)) on each layer's output h = LN(f + x)."""
        preset = {"ln_before": True, "original_ln_after": False, "residual_before_ln": False}
        return cls(**(preset | changes))

    def factors(self):
        """{"default", or a layer: its reduction factor}"""
        given = self.reduction_factor
        given = given if isinstance(given, Mapping) else {"default": given}
        return {str(layer): factor for layer, factor in given.items()}

    def bottleneck_size(self, hidden_size, layer):
        """r of one layer. adapters 1.3 rounds down, and never below 1."""
        factors = self.factors()
        if str(layer) not in factors and "default" not in factors:
            raise ValueError(f"reduction_factor names neither layer {layer} nor a default")
        return max(int(hidden_size // factors.get(str(layer), factors.get("default"))), 1)

    def modules(self, bert):
        """{(layer, location): a new Adapter} for every place where this adapter sits."""
        d, layers = bert.config.hidden_size, len(bert.layers)
        named = {*self.leave_out, *(int(key) for key in self.factors() if key != "default")}
        if outside := named - {*range(layers)}:
            raise ValueError(f"the encoder has layers 0 to {layers - 1}, and no {min(outside)}")
        sits_at = {"attention": self.mh_adapter, "output": self.output_adapter}
        return {
            (layer, location): Adapter(self, d, self.bottleneck_size(d, layer))
            for layer in range(layers)
            for location in sits_at
            if sits_at[location] and layer not in self.leave_out
        }


class Adapter(nn.Module):
    """One adapter in one AddNorm, with its LayerNorms and residual (Figure 5)."""

    def __init__(self, config, hidden_size, bottleneck_size):
        super().__init__()
        self.config = config
        self.norm_before = nn.LayerNorm(hidden_size) if config.ln_before else nn.Identity()
        self.down = nn.Linear(hidden_size, bottleneck_size)  # D
        self.act = deepcopy(ACTIVATIONS[config.non_linearity])  # nn.PReLU(), say: each its own
        self.up = nn.Linear(bottleneck_size, hidden_size)  # U
        self.norm_after = nn.LayerNorm(hidden_size) if config.ln_after else None
        for linear in (self.down, self.up):  # as in adapters 1.3; the paper does not say
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)

    def h_and_residual(self, f, x, norm):
        """What the adapter reads, and what is added to its output: [B, T, d] each"""
        # the lower and the upper "Add & Norm" of Figure 5, here and in `close`, are one LayerNorm
        h = norm(f + x) if self.config.original_ln_before else f
        kind = self.config.residual_before_ln
        residual = f + x if kind == "post_add" else f if kind else h
        return h, residual

    def bottleneck(self, h):
        """a = act(D·norm_before(h) + b_D): [B, T, d] -> [B, T, r]"""
        return self.act(self.down(self.norm_before(h)))

    def z(self, h):
        """z = U·a + b_U, [B, T, d] -> [B, T, d]: the output without the residual, which is what a
        fusion mixes. `Fusion.low_rank` computes it in another way: `add_fusion` compares them."""
        return self.up(self.bottleneck(h))  # [B, T, r] -> [B, T, d]

    def close(self, output, x, norm):
        """Back into the residual stream: LN(output + x). Without original_ln_after it is `output`
        itself, which then holds x only if the residual does."""
        return norm(output + x) if self.config.original_ln_after else output

    def forward(self, f, x, norm):
        """f: sub-layer output, x: its input, norm: BERT's own LayerNorm; [B, T, d] -> [B, T, d]"""
        h, residual = self.h_and_residual(f, x, norm)
        z = self.z(h)
        if self.norm_after is None:
            output = z + residual
        elif self.config.adapter_residual_before_ln:
            output = self.norm_after(z + residual)
        else:
            output = self.norm_after(z) + residual
        return self.close(output, x, norm)


# --adapter NAME: a function of the fields in --adapter-config that returns an AdapterConfig, or a
# class of your own, with its fields as attributes, and `modules`
ADAPTERS = {
    "pfeiffer": AdapterConfig.pfeiffer,
    "houlsby": AdapterConfig.houlsby,
    "bapna": AdapterConfig.bapna,
}


def add_adapter(bert, name, config, saved=None):
    """Adds an adapter wherever its configuration says, in fp32 even where the encoder is in bf16. A
    new one is activated, and is then all that is trained; with the tensors of a `saved` one it is
    frozen, and not active. Raises ValueError, and nothing has changed."""
    adapterhub.check_name(name)
    if name in bert.adapter_configs:
        raise ValueError(f"there is already an adapter called {name!r}")
    if not (modules := config.modules(bert)):
        raise ValueError(f"adapter {name!r} has no place: its configuration leaves all layers out")
    for module in modules.values():
        module.to(bert.device, torch.promote_types(bert.dtype, torch.float32))  # fp64 in tests
        module.train(bert.training)
    if saved is None:
        bert.requires_grad_(False)  # all but the new modules, which are not in it yet
    else:
        saved.copy_into(file_tensors(modules))
        for module in modules.values():
            module.requires_grad_(False)
    for key, module in modules.items():
        bert.slots[key].adapters[name] = module
    bert.adapter_configs[name] = config
    if saved is None:
        set_active(bert, name)


def adapter_modules(bert, name):
    """{(layer, location): module} of an adapter. Raises ValueError if there is none."""
    if name not in bert.adapter_configs:
        raise ValueError(f"the encoder has no adapter called {name!r}")
    return {key: slot.adapters[name] for key, slot in bert.slots.items() if name in slot.adapters}


def activate(bert, active=None):
    """Chooses what is computed, as `set_active` does, and freezes all parameters."""
    set_active(bert, active)
    bert.requires_grad_(False)


def set_active(bert, active):
    """Chooses what is computed: None, plain BERT; the name of an adapter; or a tuple of names, the
    fusion of these adapters in its order. A slot where none of them sits computes plain BERT."""
    is_fusion = isinstance(active, tuple)
    names = active if is_fusion else [] if active is None else [active]
    for name in names:
        adapter_modules(bert, name)  # raises ValueError if it is not there
    here = {key: [n for n in names if n in slot.adapters] for key, slot in bert.slots.items()}
    if is_fusion:
        fused = {key: s.fusion.adapter_names if s.fusion else [] for key, s in bert.slots.items()}
        if here != fused:
            raise ValueError(f"the encoder has no fusion of {', '.join(names)}, in this order")
    for key, slot in bert.slots.items():
        slot.active = active if here[key] else None
    bert.active = active


# ---- Files ---------------------------------------------------------------------------------------


def file_tensors(modules):
    """{(path of the slot, name in the file): parameter} of {(layer, location): Adapter or Fusion}.
    AdapterHub has names of its own for an adapter's parts, two for a LayerNorm before it."""
    tensors = {}
    for key, module in modules.items():
        parameters = dict(module.named_parameters())
        has_norm = "norm_before.weight" in parameters
        table = adapterhub.NAMES_WITH_NORM_BEFORE if has_norm else adapterhub.NAMES
        for name, p in parameters.items():
            module_name, _, part = name.rpartition(".")
            theirs = [f"{their}.{part}" for their, ours in table if ours == module_name]
            for file_name in theirs or [name]:
                tensors[adapterhub.slot_path(key), file_name] = p
    return tensors


def save_adapter(bert, name, directory):
    """Writes adapter_config.json and adapter.safetensors, fp32."""
    tensors, config = file_tensors(adapter_modules(bert, name)), bert.adapter_configs[name]
    options = dict(vars(config))
    if type(config) is not AdapterConfig:
        options["architecture"] = type(config).__name__  # see class_of
    header = adapterhub.header(name, bert.config, bert.source)
    adapterhub.write_adapter(directory, options, tensors, header)


def load_adapter(bert, source, name=None):
    """Inserts a saved adapter into the encoder, frozen and not yet active. source: a run, an
    AdapterHub directory, a hub id, or the Saved that was read there; name: what to call it here,
    otherwise what its file says. Returns the name. Raises FileNotFoundError without an adapter
    there, and ValueError if it does not fit the encoder, which is then unchanged."""
    is_read = isinstance(source, adapterhub.Saved)
    saved = source if is_read else adapterhub.read(source, adapterhub.ADAPTER)
    name, options = name or saved.name, saved.options
    with error_prefix(saved.directory):
        saved.check_encoder(bert)
        config_class = class_of(saved, ADAPTERS, AdapterConfig)
        if config_class is AdapterConfig:
            options = adapterhub.bottleneck_options(options, saved.metadata)
        known = vars(config_class())
        config = config_class(**{field: v for field, v in options.items() if field in known})
        add_adapter(bert, name, config, saved)
    return name


def class_of(saved, entries, ours):
    """The class of what is saved: `ours`, or that of a fork, whose name is in the file (which
    AdapterHub's library therefore refuses). The class itself must be one of the entries."""
    if "architecture" not in saved.options:
        return ours
    classes = {entry.__name__: entry for entry in entries.values() if isinstance(entry, type)}
    return look_up(classes, saved.options["architecture"], "the class")


# ---- Prediction heads ----------------------------------------------------------------------------


class Head(nn.Module):
    """The prediction head on the last layer's [CLS] vector. The paper describes none; this is
    AdapterHub's default, with the fields of its head_config.json. Raises ValueError for others.

    head_type                 classification | multiple_choice
    num_labels, num_choices   K, the number of classes, or of choices
    layers                    2: dropout, linear d -> d, tanh, dropout, linear; 1: dropout, linear
    use_pooler                [CLS] goes through the encoder's own pretrained pooler first
    dropout_prob              None: the encoder's"""

    def __init__(self, config, bert_config):
        super().__init__()
        self.config = config = adapterhub.head_options(config)  # with AdapterHub's defaults
        is_multiple_choice = config["head_type"] == "multiple_choice"
        self.num_outputs = config["num_choices" if is_multiple_choice else "num_labels"]  # K
        rates = (config["dropout_prob"], bert_config.classifier_dropout)
        p = next((rate for rate in rates if rate is not None), bert_config.hidden_dropout_prob)
        d = bert_config.hidden_size
        # Classification has one output for each label. Each choice of a multiple-choice example is
        # an input of its own, and the same single output scores all of them.
        layers = [nn.Dropout(p), nn.Linear(d, 1 if is_multiple_choice else self.num_outputs)]
        if config["layers"] == 2:
            layers = [nn.Dropout(p), nn.Linear(d, d), nn.Tanh(), *layers]
        self.layers = nn.Sequential(*layers)  # the indices are those of AdapterHub's parameters
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=bert_config.initializer_range)
                nn.init.zeros_(layer.bias)
        self.pooler = nn.Linear(d, d) if config["use_pooler"] else None

    def forward(self, h, mask=None):
        """h: hidden states [B·C, T, d], the C candidates of an example one after another -> logits
        [B, K]. mask: [B·C, T], 1 on real tokens, for a head of your own that reads more tokens."""
        x = h[:, 0].to(self.layers[-1].weight.dtype)  # [CLS]: [B·C, d]
        if self.pooler is not None:
            x = self.pooler(x).tanh()
        return self.layers(x).view(-1, self.num_outputs)  # [B·C, K or 1] -> [B, K]


HEADS = {"cls": Head}  # --head NAME: Head, or a class of your own


def head_tensors(head):
    """{("heads", name in the file): parameter}, without the pooler, which is a part of Θ's files"""
    own = {name: p for name, p in head.named_parameters() if not name.startswith("pooler.")}
    return {("heads", name.removeprefix("layers.")): p for name, p in own.items()}


def save_head(head, bert, name, directory):
    """Writes head_config.json and model_head.safetensors into `directory`."""
    header, options = adapterhub.header(name, bert.config, bert.source), head.config
    if type(head) is not Head:  # see class_of; what AdapterHub's library looks at is the head_type
        mark = type(head).__name__
        options = {"head_type": mark, "architecture": mark, "config": options}
    adapterhub.write(directory, adapterhub.HEAD, options, head_tensors(head), header)


def load_head(bert, directory):
    """The head saved in `directory` (or a hub id), frozen, in eval mode. Raises as load_adapter."""
    saved = adapterhub.read(directory, adapterhub.HEAD)
    with error_prefix(saved.directory):
        saved.check_encoder(bert)
        options = saved.options.get("config", saved.options)
        head = class_of(saved, HEADS, Head)(options, bert.config)
        saved.copy_into(head_tensors(head))
    if head.pooler is not None:
        head.pooler.load_state_dict(read_pooler(bert.directory))
    return head.to(bert.device).requires_grad_(False).eval()
