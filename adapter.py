"""Φ: task adapters, the small networks trained in stage 1 (section 2.2, Figure 5); and heads.

add_adapter(bert, "rte", AdapterConfig.pfeiffer(reduction_factor=16))  # a new one
load_adapter(bert, "runs/rte")                                         # a saved one
activate(bert, "rte")                                                  # None: plain BERT
save_adapter(bert, "rte", "runs/rte")
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import nn

from bert import ACTIVATIONS
from formats import adapterhub
from formats.encoder import read_pooler
from formats.files import error_prefix


class Adapter(nn.Module):
    """The paper's own adapter (Figure 5), in an AddNorm: in the paper, the one that closes the
    feed-forward sub-layer. The "Add & Norm" before and after it are one LayerNorm, BERT's."""

    def __init__(self, config, hidden_size, bottleneck_size):
        super().__init__()
        self.config = config
        self.down = nn.Linear(hidden_size, bottleneck_size)  # D
        self.act = deepcopy(ACTIVATIONS[config.non_linearity])  # it may be a module with weights
        self.up = nn.Linear(bottleneck_size, hidden_size)  # U
        for linear in (self.down, self.up):  # as in adapters 1.3; the paper does not say
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)

    def forward(self, f, x, norm):
        """f: sub-layer output, x: its input, norm: BERT's own LayerNorm; [B, T, d] -> [B, T, d]"""
        h = norm(f + x)
        z = self.z(h)
        return norm(f + z + x)

    def z(self, h):
        """z = U·a + b_U: [B, T, d] -> [B, T, d]"""
        return self.up(self.bottleneck(h))  # [B, T, r] -> [B, T, d]

    def bottleneck(self, h):
        """a = act(D·h + b_D): [B, T, d] -> [B, T, r]"""
        return self.act(self.down(h))

    # A fusion mixes the z of several adapters: it calls the next two in place of `forward`. When it
    # is added, it refuses an Adapter whose `forward` gives something other than close(z(h) +
    # residual, x, norm); `norm_after` alone is let through (see GridAdapter).

    def h_and_residual(self, f, x, norm):
        """What the adapter reads, and what is added to its z: [B, T, d] each"""
        return norm(f + x), f

    def close(self, output, x, norm):
        """Back into the residual stream: [B, T, d] -> [B, T, d]"""
        return norm(output + x)


class GridAdapter(Adapter):
    """All other points of the paper's grid (Figure 5), by the fields of AdapterConfig: what an
    adapter reads, which residual is added to its output, and how it goes back into BERT.

                     h           residual   end
    pfeiffer         LN(f + x)   f          LN(· + x)
    houlsby          f           f          LN(· + x)
    bapna            LN(f + x)   h          ·
    with post_add    LN(f + x)   f + x      LN(· + x): x is added twice, as in adapters 1.3

    A fusion leaves `norm_after` out, as in adapters 1.3: there alone it differs from `forward`."""

    def __init__(self, config, hidden_size, bottleneck_size):
        super().__init__(config, hidden_size, bottleneck_size)
        self.norm_before = nn.LayerNorm(hidden_size) if config.ln_before else nn.Identity()
        self.norm_after = nn.LayerNorm(hidden_size) if config.ln_after else None

    def forward(self, f, x, norm):
        h, residual = self.h_and_residual(f, x, norm)
        z = self.z(h)
        if self.norm_after is None:
            output = z + residual
        elif self.config.adapter_residual_before_ln:
            output = self.norm_after(z + residual)
        else:
            output = self.norm_after(z) + residual
        return self.close(output, x, norm)

    def bottleneck(self, h):
        return super().bottleneck(self.norm_before(h))

    def h_and_residual(self, f, x, norm):
        h = norm(f + x) if self.config.original_ln_before else f
        if self.config.residual_before_ln == "post_add":
            return h, f + x
        if self.config.residual_before_ln:
            return h, f
        return h, h

    def close(self, output, x, norm):
        if self.config.original_ln_after:
            return norm(output + x)
        return output  # nothing adds x here: it is in the output only if it is in the residual


@dataclass
class AdapterConfig:
    """Any point of the paper's grid (appendix A.2, Figure 5), under AdapterHub's field names. The
    defaults are the paper's own adapter.

    mh_adapter, output_adapter   where: after the attention ("bottom"), the feed-forward ("top")
    reduction_factor             bottleneck r = hidden_size // reduction_factor, at least 1; a
                                 mapping {"0": 2, "default": 16} gives it by layer
    non_linearity                relu | leakyrelu | swish (silu) | gelu | gelu_new (tanh form)
    original_ln_before           it reads LN(f + x), with BERT's own LayerNorm, instead of f
    original_ln_after            LN(· + x), with BERT's own LayerNorm, after the adapter
    ln_before, ln_after          a new LayerNorm on the adapter's input, output; a fusion leaves
                                 ln_after out, as in adapters 1.3
    residual_before_ln           what is added to its output. True: f; False: h; "post_add": f + x
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
        adapterhub.check_bottleneck(vars(self), self.factors(), ACTIVATIONS)  # raises ValueError

    @classmethod
    def pfeiffer(cls, **changes):
        """The paper's own: one per layer, after the feed-forward sub-layer."""
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

    def module(self, hidden_size, layer):
        """The new module of one layer."""
        norms = self.original_ln_before, self.original_ln_after, self.ln_before, self.ln_after
        is_the_papers = norms == (True, True, False, False) and self.residual_before_ln is True
        adapter_class = Adapter if is_the_papers else GridAdapter
        return adapter_class(self, hidden_size, self.bottleneck_size(hidden_size, layer))

    def modules(self, bert):
        """{(layer, location): a new Adapter} for every place where this adapter sits."""
        named = {*self.leave_out, *(int(key) for key in self.factors() if key != "default")}
        if outside := named - {*range(len(bert.layers))}:
            last = len(bert.layers) - 1
            raise ValueError(f"the encoder has layers 0 to {last}, and no {min(outside)}")
        sits_at = {"attention": self.mh_adapter, "output": self.output_adapter}
        modules = {}
        for layer, location in bert.slots:
            if sits_at.get(location) and layer not in self.leave_out:
                modules[layer, location] = self.module(bert.config.hidden_size, layer)
        return modules


# --adapter NAME: a function of the fields in --adapter-config that returns an AdapterConfig, or a
# dataclass of your own with a method `modules`. Loading finds your class here, by its own name.
ADAPTERS = {"pfeiffer": AdapterConfig.pfeiffer, "houlsby": AdapterConfig.houlsby}
ADAPTERS["bapna"] = AdapterConfig.bapna


def add_adapter(bert, name, config):
    """Adds a new adapter wherever its configuration says, and activates it. Its parameters are then
    the only ones that require a gradient. Raises ValueError if it cannot be added, and leaves the
    encoder unchanged."""
    modules = make_adapter(bert, name, config)
    bert.requires_grad_(False)  # all but the new modules, which are not in it yet
    insert(bert, name, config, modules)
    activate(bert, name)


def insert(bert, name, config, modules):
    for key, module in modules.items():
        bert.slots[key].adapters[name] = module
    bert.adapter_configs[name] = config


def make_adapter(bert, name, config):
    """{(layer, location): module} of a new adapter, not yet in the encoder. The modules are in fp32
    (fp64 if Θ is), also where Θ is in bf16: autocast (train.py) then casts them."""
    adapterhub.check_name(name)
    if name in bert.adapter_configs:
        raise ValueError(f"there is already an adapter called {name!r}")
    if not (modules := config.modules(bert)):
        raise ValueError(f"adapter {name!r} is in no layer: its configuration leaves all out")
    for module in modules.values():
        module.to(bert.device, torch.promote_types(bert.dtype, torch.float32)).train(bert.training)
    return modules


def adapter_modules(bert, name):
    """{(layer, location): module} of an adapter. Raises ValueError if there is none."""
    if name not in bert.adapter_configs:
        raise ValueError(f"the encoder has no adapter called {name!r}")
    return {key: slot.adapters[name] for key, slot in bert.slots.items() if name in slot.adapters}


def activate(bert, active=None):
    """Chooses what is computed: None, plain BERT; the name of an adapter; or a tuple of names, the
    fusion of these adapters in its order. A slot where none of them sits computes plain BERT.
    `requires_grad` is not changed."""
    active = tuple(active) if isinstance(active, list) else active
    if active == ():
        raise ValueError("a fusion needs at least one adapter")
    one = () if active is None else (active,)
    names = active if isinstance(active, tuple) else one
    found = {name: adapter_modules(bert, name) for name in names}  # raises ValueError
    computed = {}  # by slot; nothing is changed before all slots have been looked at
    for key, slot in bert.slots.items():
        here = [name for name in names if key in found[name]]
        fused = slot.fusion.adapter_names if slot.fusion else []
        if isinstance(active, tuple) and here != fused:
            raise ValueError(f"the encoder has no fusion of {', '.join(names)}, in this order")
        computed[key] = active if here else None
    for key, slot in bert.slots.items():
        slot.active = computed[key]
    bert.active = active


def save_adapter(bert, name, directory):
    """Writes adapter_config.json and adapter.safetensors, in AdapterHub's format where its library
    computes the same. A fork's adapter (another class, field or parameter) is written with an
    "architecture", which the library refuses."""
    config = bert.adapter_configs[name]
    tensors = adapterhub.slot_tensors(adapter_modules(bert, name))  # {(slot, name in file): tensor}
    options = {"architecture": type(config).__name__, "fields": vars(config)}
    # AdapterHub's own adapters may have these fields and parameters: then all of their fields
    if type(config) is AdapterConfig and adapterhub.is_bottleneck(vars(config), tensors):
        options = {**adapterhub.NOT_IN_THE_PAPER, **vars(config)}
    adapterhub.write(directory, adapterhub.ADAPTER, name, options, tensors, bert)


def load_adapter(bert, directory, name=None):
    """Inserts a saved adapter into the encoder, frozen and not yet active. directory: a run, an
    AdapterHub directory, a hub id, or what `adapterhub.read` returned; name: what to call it here,
    otherwise what its file says. Returns the name. Raises FileNotFoundError if there is no adapter,
    and ValueError if it does not fit the encoder, which is then unchanged."""
    is_read = isinstance(directory, adapterhub.Saved)
    saved = directory if is_read else adapterhub.read(directory, adapterhub.ADAPTER)
    name = name or saved.name
    with error_prefix(saved.directory):
        saved.check_encoder(bert)
        # the class that the file names, AdapterConfig or one in ADAPTERS, and its arguments;
        # (AdapterConfig, None) if it names none, as in AdapterHub's own format
        config_class, options = saved.kind(AdapterConfig, ADAPTERS)
        if options is None:
            options = adapterhub.bottleneck_options(saved.options, saved.metadata)
        config = config_class(**options)
        modules = make_adapter(bert, name, config)
        saved.copy_into(adapterhub.slot_tensors(modules))  # in place
    for module in modules.values():
        module.requires_grad_(False)
    insert(bert, name, config, modules)
    return name


class Head(nn.Module):
    """The prediction head on the last layer's [CLS] vector. The paper describes none; this is
    AdapterHub's default. config has the fields of its head_config.json. What is not supported
    raises ValueError; fields not listed here, such as label2id, are kept, and written by saving.

    head_type                 classification | multiple_choice
    num_labels, num_choices   K, the number of classes, or of choices
    layers                    2: dropout, linear d -> d, tanh, dropout, linear; 1: dropout, linear
    activation_function, bias only tanh and True are supported, which are the defaults
    use_pooler                [CLS] goes through the encoder's own pretrained pooler first, which is
                              in the encoder's files, not in the head's; default False
    dropout_prob              default None: the encoder's"""

    def __init__(self, config, bert_config):
        super().__init__()
        self.config = config = adapterhub.check_head(config)  # with the defaults above
        is_multiple_choice = config["head_type"] == "multiple_choice"
        self.num_outputs = config["num_choices" if is_multiple_choice else "num_labels"]  # K
        ps = config["dropout_prob"], bert_config.classifier_dropout, bert_config.hidden_dropout_prob
        p = next(p for p in ps if p is not None)
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
        self.pooler = nn.Linear(d, d) if config["use_pooler"] else None  # `load_head` fills it

    def forward(self, h, attention_mask=None):
        """h: hidden states [B·C, T, d], the C candidates of an example one after another -> logits
        [B, K]. attention_mask: [B·C, T], 1 on real tokens, for a subclass that reads all tokens."""
        x = h[:, 0].to(self.layers[-1].weight.dtype)  # [CLS], in fp32: [B·C, d]
        if self.pooler is not None:
            x = self.pooler(x).tanh()
        return self.layers(x).view(-1, self.num_outputs)  # [B·C, K or 1] -> [B, K]


HEADS = {"cls": Head}  # --head NAME: Head, or a subclass of it


def save_head(head, bert, name, directory):
    """Writes head_config.json and model_head.safetensors into `directory`."""
    options = head.config
    if type(head) is not Head:  # AdapterHub's library refuses an unknown head_type
        name_of_class = type(head).__name__
        options = {"head_type": name_of_class, "architecture": name_of_class, "fields": options}
    tensors = adapterhub.head_tensors(head)  # without the pooler
    adapterhub.write(directory, adapterhub.HEAD, name, options, tensors, bert)


def load_head(bert, directory):
    """The head saved in `directory` (or a hub id), frozen, in eval mode. Raises what load_adapter
    raises."""
    saved = adapterhub.read(directory, adapterhub.HEAD)
    with error_prefix(saved.directory):
        saved.check_encoder(bert)
        head_class, options = saved.kind(Head, HEADS)
        head = head_class(saved.options if options is None else options, bert.config)
        saved.copy_into(adapterhub.head_tensors(head))
    if head.pooler is not None:
        head.pooler.load_state_dict(read_pooler(bert.directory))
    return head.to(bert.device).requires_grad_(False).eval()
