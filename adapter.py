"""Φ: task adapters, the small networks trained in stage 1 (section 2.2, Figure 5); and heads.

add_adapter(bert, "rte", AdapterConfig.pfeiffer(reduction_factor=16))  # trainable, active
load_adapter(bert, "runs/rte")                                         # AdapterHub's files
activate(bert, "rte")                                                  # None: plain BERT
save_adapter(bert, "rte", "runs/rte")
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

import torch
import torch.nn.functional as F
from torch import nn

from bert import ACTIVATIONS, activate, known_adapters
from formats import adapterhub
from formats.encoder import read_pooler
from formats.files import error_prefix


class BaseAdapterConfig:
    """
    The interface of adapter configurations. A new kind of adapter is a frozen dataclass derived
    from this one, whose fields are those of its adapter_config.json, and the module that its
    `make_modules` makes (docs/forking.md).
    """

    architecture = None  # its name in adapter_config.json; None: a bottleneck adapter
    cannot_fuse_because = None  # a sentence for the error message; None: it can be fused

    def make_modules(self, bert):
        """[((layer, location), slot, new module)] for every place where the adapter sits"""
        raise NotImplementedError

    def tensor_names(self, module):
        """{name in the file, which begins with adapter_: name in the module}, buffers included"""
        return {f"adapter_{name}": name for name in module.state_dict()}

    def trainable_parameters(self, module):
        """The parameters of a new adapter's module that training changes; all others stay as they
        are, and are saved with it."""
        return module.parameters()

    def residual_fields(self):
        """Names of the fields on which `inputs` and `add_and_norm` of its modules depend. In a
        fusion only the last adapter's count, so `add_fusion` says where adapters differ in them."""
        return [field.name for field in fields(self)]


@dataclass(frozen=True)
class AdapterConfig(BaseAdapterConfig):
    """
    Any point of the paper's grid (appendix A.2, Figure 5), under AdapterHub's field names.

    mh_adapter, output_adapter   where: after the attention ("bottom"), the feed-forward ("top")
    reduction_factor             bottleneck r = hidden_size // reduction_factor, at least 1; a
                                 mapping {"0": 2, "default": 16} gives it by layer
    non_linearity                relu | leakyrelu | swish (silu) | gelu | gelu_new (its tanh form)
    original_ln_before           it reads LN(f + x), with BERT's own LayerNorm, instead of f
    original_ln_after            LN(· + x), with BERT's own LayerNorm, after the adapter
    ln_before, ln_after          a new LayerNorm on the adapter's input, output; a fusion leaves
                                 ln_after out, as in adapters 1.3
    residual_before_ln           which residual is added to its output:
                                     True: f     False: what it reads     "post_add": f + x
    adapter_residual_before_ln   with ln_after: the residual is added before that LayerNorm
    leave_out                    layers (from 0) without an adapter

    Raises ValueError, naming the field, for an invalid value.
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

    def __post_init__(self):
        adapterhub.check_bottleneck(self, ACTIVATIONS)
        object.__setattr__(self, "leave_out", tuple(self.leave_out))

    @classmethod
    def pfeiffer(cls, **changes):
        """The paper's own: one per layer, after the feed-forward sub-layer; BERT's LayerNorm comes
        before it, and again after it."""
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
        """r of one layer. adapters 1.3 rounds down, and never below 1."""
        factor = self.reduction_factor
        if isinstance(factor, Mapping):
            factor = factor.get(str(layer), factor.get("default"))
            if factor is None:
                raise ValueError(f"reduction_factor has neither layer {layer} nor a default")
        return max(int(hidden_size // factor), 1)

    def make_modules(self, bert):
        sits_at = {"attention": self.mh_adapter, "output": self.output_adapter}
        d = bert.config.hidden_size
        return [
            ((layer, location), slot, Adapter(self, d, self.bottleneck_size(d, layer)))
            for (layer, location), slot in bert.slots()
            if sits_at.get(location) and layer not in self.leave_out
        ]

    def tensor_names(self, module):
        return adapterhub.bottleneck_names(self.ln_before, self.ln_after)

    def residual_fields(self):
        return ["original_ln_before", "residual_before_ln", "original_ln_after"]

    def initialize(self, linear):
        """The initial weights of D or U (adapters 1.3: as BERT's own)."""
        nn.init.normal_(linear.weight, std=0.02)
        nn.init.zeros_(linear.bias)


class Adapter(nn.Module):
    """One adapter in one slot, with its LayerNorms and residual (Figure 5)."""

    mixes_tokens = False  # each token's output depends on that token alone, see bert.py

    def __init__(self, config, hidden_size, bottleneck_size):
        super().__init__()
        self.config = config
        self.norm_before = nn.LayerNorm(hidden_size) if config.ln_before else nn.Identity()
        self.down = nn.Linear(hidden_size, bottleneck_size)  # D
        self.act = ACTIVATIONS[config.non_linearity]
        self.up = nn.Linear(bottleneck_size, hidden_size)  # U
        self.norm_after = nn.LayerNorm(hidden_size) if config.ln_after else None
        for linear in (self.down, self.up):
            config.initialize(linear)

    def inputs(self, f, x, norm):
        """What the adapter reads, h, and what is added to its output, the residual: f, x [B, T, d]
        -> h, residual [B, T, d]"""
        h = norm(f + x) if self.config.original_ln_before else f
        if self.config.residual_before_ln == "post_add":
            return h, f + x
        return h, f if self.config.residual_before_ln else h

    def z(self, h, layer_input=None):
        """U·act(D·norm_before(h) + b_D) + b_U, the adapter's output without the residual, which is
        what fusion mixes: [B, T, d] -> [B, T, d]. Unless a subclass has a `z` of its own, fusion
        never forms it: it works with the bottlenecks a and `up_projection`."""
        U, b_U = self.up_projection()
        a = self.act(self.down(self.norm_before(h)))  # [B, T, d] -> [B, T, r]
        return F.linear(a, U, b_U)  # -> [B, T, d]

    def up_projection(self):
        """U [d, r] and b_U [d]"""
        return self.up.weight, self.up.bias

    def add_and_norm(self, output, x, norm):
        """Back into the residual stream: LN(output + x), or without original_ln_after `output`"""
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


# --adapter NAME: a function that makes a configuration
ADAPTERS = {name: getattr(AdapterConfig, name) for name in ("pfeiffer", "houlsby", "bapna")}
# "architecture" in a saved adapter's file: its configuration class
ARCHITECTURES = {None: AdapterConfig}


def register(name, config_class):
    """Registers a kind of adapter. `name` is the value of --adapter; a classmethod of that name, if
    there is one, makes the configuration. Its `architecture` is what adapter_config.json says.
    Raises ValueError for a class without an `architecture` of its own, and for a name that is
    taken."""
    architecture = config_class.architecture
    if not isinstance(architecture, str) or (
        architecture in ARCHITECTURES and ARCHITECTURES[architecture] is not config_class
    ):
        raise ValueError(
            f"{config_class.__name__} needs an `architecture` of its own: {architecture!r}"
        )
    make = getattr(config_class, name, config_class)
    if name in ADAPTERS and ADAPTERS[name] != make:
        raise ValueError(f"{config_class.__name__}: there is already an --adapter {name}")
    ARCHITECTURES[architecture], ADAPTERS[name] = config_class, make


def add_adapter(bert, name, config):
    """Adds a new adapter to every slot that its config names, activates it, and makes it the only
    trainable part. It is held in fp32 even where the encoder is in bf16. Raises ValueError if the
    name is taken or unusable, or if the config leaves no adapter in this encoder."""
    dtype = torch.float64 if bert.dtype == torch.float64 else torch.float32
    modules = new_modules(bert, name, config, dtype)
    insert(bert, name, modules)
    activate(bert, name)
    for _, _, module in modules:
        for parameter in config.trainable_parameters(module):
            parameter.requires_grad_(True)


def new_modules(bert, name, config, dtype):
    """[((layer, location), slot, new module)] of a new adapter, frozen, not yet in the slots."""
    adapterhub.check_name(name, taken=known_adapters(bert))
    modules = config.make_modules(bert)
    if not modules:
        raise ValueError(f"adapter {name!r}: leave_out excludes all {len(bert.layers)} layers")
    for _, _, module in modules:
        module.config = config
        module.to(bert.device, dtype).requires_grad_(False).train(bert.training)
    return modules


def insert(bert, name, modules):
    """Puts an adapter's modules into their slots. Raises ValueError for a slot that is not a
    submodule of the encoder, since nothing there would be trained or saved."""
    for _, slot, module in modules:
        slot.adapters[name] = module
    owned = {id(p) for p in bert.parameters()}
    for key, _, module in modules:
        if any(id(p) not in owned for p in module.parameters()):
            for _, slot, _ in modules:
                del slot.adapters[name]
            raise ValueError(
                f"the slot {key} of adapter {name!r} is not a submodule of the encoder"
            )


def adapter_modules(bert, name):
    """(configuration, [((layer, location), slot, module)]). Raises ValueError if there is no such
    adapter."""
    slots = [(key, slot) for key, slot in bert.slots() if name in slot.adapters]
    modules = [(key, slot, slot.adapters[name]) for key, slot in slots]
    if not modules:
        raise ValueError(f"there is no adapter called {name!r}")
    return modules[0][2].config, modules


# --------------------------------------------------------------------------------------------------
# Files


def adapter_tensors(config, modules):
    """{(path of the slot, part): tensor} of an adapter's modules, [((layer, location), slot,
    module)]. Raises ValueError for one that `tensor_names` omits."""
    result, names = {}, {}
    for key, _, module in modules:
        tensors = module.state_dict(keep_vars=True)
        names |= {id(tensor): name for name, tensor in tensors.items()}
        for theirs, ours in config.tensor_names(module).items():
            result[adapterhub.slot_path(key), theirs] = tensors[ours]
    if omitted := names.keys() - {id(tensor) for tensor in result.values()}:
        name = names[omitted.pop()]
        raise ValueError(f"tensor_names of {type(config).__name__} omits {name}")
    return result


def save_adapter(bert, name, directory):
    """Writes adapter_config.json and adapter.safetensors, fp32. Raises ValueError if there is no
    such adapter."""
    config, modules = adapter_modules(bert, name)
    tensors = adapter_tensors(config, modules)
    header = adapterhub.header(name, bert.config, bert.source)
    adapterhub.write_adapter(directory, config_dict(config), tensors, header)


def config_dict(config):
    """The "config" object of adapter_config.json"""
    return {"architecture": config.architecture, **asdict(config)}


def read_saved_config(directory, name=None):
    """(name, configuration) of an adapter directory; name: what to call it, else the file's own.
    Raises ValueError for what this project does not implement."""
    name, options, _ = adapterhub.read_adapter_config(directory, name)
    with error_prefix(f"{directory}/{adapterhub.ADAPTER.config}"):
        architecture = options["architecture"] or None
        if architecture not in list(ARCHITECTURES):  # a list: a file's value may be unhashable
            known = ", ".join(["bottleneck adapters", *filter(None, ARCHITECTURES)])
            raise ValueError(
                f"the architecture {architecture!r:.50} is not known, only {known}; --import names "
                "the module of a fork"
            )
        config_class = ARCHITECTURES[architecture]
        known = [field.name for field in fields(config_class)]
        config = config_class(**{field: options[field] for field in known if field in options})
    return name, config


def load_adapter(bert, directory, name=None):
    """Inserts a saved adapter into the encoder, frozen and not yet active, in the encoder's dtype.
    directory: a run, an AdapterHub directory (modern or legacy tensor names, safetensors or .bin),
    or a hub id; name: what to call it here, otherwise what its config says. Returns the name.
    Raises FileNotFoundError without an adapter there, ValueError if it does not fit; then the
    encoder computes what it did before."""
    directory = adapterhub.fetch(directory)
    name, config = read_saved_config(directory, name)
    saved = adapterhub.read(directory, adapterhub.ADAPTER)
    with error_prefix(directory):
        saved.check_size(bert.config)
        modules = new_modules(bert, name, config, bert.dtype)
        tensors = adapter_tensors(config, modules)
    saved.copy_into(tensors)
    insert(bert, name, modules)
    return name


def copy_adapters(sources, directory, bert_config):
    """Saves adapters again, {name: directory}, in `directory`/NAME: in the current format, in fp32,
    and under these names. bert_config: their encoder's."""
    for name, source in sources.items():
        options = config_dict(read_saved_config(source, name)[1])
        saved = adapterhub.read(source, adapterhub.ADAPTER)
        header = adapterhub.header(name, bert_config, saved.metadata.get("model_name"))
        adapterhub.write_adapter(directory / name, options, saved.tensors, header)


# --------------------------------------------------------------------------------------------------
# Prediction heads


class Head(nn.Module):
    """
    The prediction head on the last layer's [CLS] vector. The paper describes none; this is
    AdapterHub's default. Its configuration, AdapterHub's head_config.json:

    head_type                 classification | multiple_choice
    num_labels, num_choices   K, the number of classes, or of choices
    layers                    2: dropout, linear d -> d, tanh, dropout, linear; 1: dropout, linear
    use_pooler                [CLS] goes through the encoder's own pretrained pooler first
    dropout_prob              None: the encoder's
    label2id                  {label: its index}

    Raises ValueError for other heads. A head of your own is a subclass; it is saved with all of its
    parameters (docs/forking.md).
    """

    # `forward` reads the first token alone: the encoder may leave out the others. A subclass that
    # does not say so itself is given all of them.
    cls_only = True

    def __init__(self, config, bert_config):
        super().__init__()
        self.config = config = adapterhub.head_config(config)  # with its defaults
        is_multiple_choice = config["head_type"] == "multiple_choice"
        self.num_outputs = config["num_choices" if is_multiple_choice else "num_labels"]  # K
        p = config["dropout_prob"]
        if p is None:
            p = bert_config.classifier_dropout
        if p is None:
            p = bert_config.hidden_dropout_prob
        d = bert_config.hidden_size
        # classification has one output for each label; each choice of a multiple-choice example is
        # an input of its own, and all are scored by the same single output
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
        """h: hidden states [B·C, T, d], the C candidates of an example one after another (T = 1
        where the head is `cls_only`); mask: [B·C, T], 1 on real tokens -> logits [B, K]"""
        return self.logits(h[:, 0])

    def logits(self, x):
        """One vector for each candidate, [B·C, d] -> [B, K]"""
        x = x.to(self.layers[-1].weight.dtype)
        if self.pooler is not None:
            x = self.pooler(x).tanh()
        return self.layers(x).view(-1, self.num_outputs)  # [B·C, K or 1] -> [B, K]


HEADS = {"cls": Head}  # --head NAME; it is "kind" in head_config.json, which a cls head lacks


def register_head(name, head_class):
    """Makes a kind of head known to --head and `load_head`. Raises ValueError if the name is
    taken."""
    if name in HEADS and HEADS[name] is not head_class:
        raise ValueError(f"{head_class.__name__}: there is already a --head {name}")
    HEADS[name] = head_class


def new_head(kind, config, bert_config):
    """A head of one of HEADS. Raises ValueError for one that is not registered."""
    if kind not in [*HEADS]:  # a list: a file's value may be unhashable
        raise ValueError(f"a head of the kind {kind!r:.50} is not known, only {', '.join(HEADS)}")
    return HEADS[kind](config if kind == "cls" else {**config, "kind": kind}, bert_config)


def head_tensors(head):
    """{("heads", part): tensor}, without the pooler, whose weights are in the encoder's files."""
    tensors = head.state_dict(keep_vars=True).items()
    return {
        ("heads", name.removeprefix("layers.")): tensor
        for name, tensor in tensors
        if not name.startswith("pooler.")
    }


def save_head(head, bert, name, directory):
    """Writes head_config.json and model_head.safetensors into `directory`."""
    header = adapterhub.header(name, bert.config, bert.source)
    adapterhub.write(directory, adapterhub.HEAD, head.config, head_tensors(head), header)


def load_head(bert, directory):
    """The head saved in `directory` (or a hub id), frozen, in eval mode. Raises as load_adapter."""
    saved = adapterhub.read(directory, adapterhub.HEAD)
    with error_prefix(saved.directory / adapterhub.HEAD.config):
        saved.check_size(bert.config)
        head = new_head(saved.options.get("kind", "cls"), saved.options, bert.config)
    saved.copy_into(head_tensors(head))
    if head.config["use_pooler"]:
        head.pooler.load_state_dict(read_pooler(bert.directory))
    return head.to(bert.device).requires_grad_(False).eval()
