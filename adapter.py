"""Φ: task adapters, the small networks trained in stage 1 (section 2.2, Figure 5); and heads.

add_adapter(bert, "rte", AdapterConfig.pfeiffer(reduction_factor=16))  # trainable, active
load_adapter(bert, "runs/rte")                                         # AdapterHub's files
activate(bert, "rte")                                                  # None: plain BERT
save_adapter(bert, "rte", "runs/rte")
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial

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
INIT_WEIGHTS = {  # of D and U; Houlsby et al. (2019): closer to the identity, cut at two sigma
    "bert": partial(nn.init.normal_, std=0.02),
    "houlsby": partial(nn.init.trunc_normal_, std=0.01, a=-0.02, b=0.02),  # in their paper
    "houlsby_code": partial(nn.init.trunc_normal_, std=0.001, a=-0.002, b=0.002),  # in their code
}


class Kind:
    """
    What the configuration of any kind of adapter says. A new kind is a frozen dataclass derived
    from this one, whose fields are those of its adapter_config.json, and the module that its
    `modules` makes (docs/forking.md).
    """

    architecture = None  # the kind's name in adapter_config.json; None: a bottleneck adapter
    no_fusion = None  # why adapters of this kind cannot be fused, if they cannot

    def modules(self, bert):
        """[((layer, location), slot, new module)] for every place where the adapter sits"""
        raise NotImplementedError

    def tensor_names(self, module):
        """{name in the file, which begins with adapter_: name in the module}, buffers included"""
        return {f"adapter_{name}": name for name in module.state_dict()}

    def trained(self, module):
        """The parameters of a new adapter's module that training changes; all others stay as they
        are, and are saved with it."""
        return module.parameters()

    def fields_in_stream(self):
        """Names of the fields on which `inputs` and `add_and_norm` of its modules depend. In a
        fusion only the last adapter's count, so `add_fusion` says where adapters differ in them."""
        return [field.name for field in fields(self)]


@dataclass(frozen=True)
class AdapterConfig(Kind):
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
    init_weights                 bert | houlsby | houlsby_code, see INIT_WEIGHTS
    layer_norms                  copies of all of BERT's LayerNorms are trained with the adapter and
                                 replace them; AdapterHub's library has no such field

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
    init_weights: str = "bert"
    layer_norms: bool = False

    def __post_init__(self):
        adapterhub.check_bottleneck(self, NON_LINEARITIES, INIT_WEIGHTS)
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

    @classmethod
    def houlsby_recipe(cls, **changes):
        """Houlsby et al.'s architecture as in their code: the tanh form of GELU, their
        initialisation, and LayerNorms of its own. Their training (weight decay 0.01, warm-up over
        0.1 of the steps, lr 3e-4) and their head are not part of it. `houlsby` is AdapterHub's
        preset: swish, and neither of the other two."""
        own = {"non_linearity": "gelu_new", "init_weights": "houlsby_code", "layer_norms": True}
        return cls.houlsby(**{**own, **changes})

    @property
    def architecture(self):
        """A name for what AdapterHub's library has not, so that it refuses such a file instead of
        ignoring the LayerNorms."""
        return "layer_norms" if self.layer_norms else None

    @property
    def no_fusion(self):
        """z_n of such an adapter has a meaning only in the residual stream that its own LayerNorms
        make, and in a fusion all adapters share one stream."""
        reason = "adapters that come with LayerNorms of their own (layer_norms) cannot be fused"
        return reason if self.layer_norms else None

    def bottleneck_size(self, hidden_size, layer):
        """r of one layer. The reference rounds down, and never below 1."""
        factor = self.reduction_factor
        if isinstance(factor, Mapping):
            factor = factor.get(str(layer), factor.get("default"))
            if factor is None:
                raise ValueError(f"reduction_factor has neither layer {layer} nor a default")
        return max(int(hidden_size // factor), 1)

    def modules(self, bert):
        """[((layer, location), slot, new module)] for every place where the adapter sits"""
        sits_at = {"attention": self.mh_adapter, "output": self.output_adapter}
        d = bert.config.hidden_size
        result = [
            ((layer, location), slot, Adapter(self, d, self.bottleneck_size(d, layer)))
            for (layer, location), slot in bert.slots()
            if sits_at.get(location, False) and layer not in self.leave_out
        ]
        if self.layer_norms and result:
            result += [(key, slot, slot.new_copy()) for key, slot in layer_norm_slots(bert)]
        return result

    def tensor_names(self, module):
        """{name in the file: name in the module}"""
        if isinstance(module, nn.LayerNorm):
            return {f"adapter_layer_norm.{part}": part for part in ("weight", "bias")}
        return adapterhub.bottleneck_names(self.ln_before, self.ln_after)

    def fields_in_stream(self):
        return ["original_ln_before", "residual_before_ln", "original_ln_after"]

    def initialize(self, linear):
        """The initial weights of D or U; biases are 0."""
        INIT_WEIGHTS[self.init_weights](linear.weight)
        nn.init.zeros_(linear.bias)


class Adapter(nn.Module):
    """One adapter in one slot, with its LayerNorms and residual (Figure 5)."""

    # The promise that z(h) is U·act(D·norm_before(h) + b_D) + b_U, with `norm_before`, `down`,
    # `act` and `up_projection` of this module. Fusion then computes from these, without z.
    low_rank = True

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        if "z" in vars(cls) and "low_rank" not in vars(cls):
            cls.low_rank = False  # a subclass with a z of its own keeps no promise it did not make

    def __init__(self, config, hidden_size, bottleneck_size):
        super().__init__()
        self.config = config
        self.norm_before = nn.LayerNorm(hidden_size) if config.ln_before else nn.Identity()
        self.down = nn.Linear(hidden_size, bottleneck_size)  # D
        self.act = NON_LINEARITIES[config.non_linearity]
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
        """U·act(D·h + b_D) + b_U, the adapter's output without the residual, which is what fusion
        mixes: [B, T, d] -> [B, T, d]"""
        U, b_U = self.up_projection()
        a = self.act(self.down(self.norm_before(h)))  # [B, T, d] -> [B, T, r]
        return F.linear(a, U, b_U)  # -> [B, T, d]

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


# --adapter: what makes a configuration
PRESETS = ("pfeiffer", "houlsby", "bapna", "houlsby_recipe")
ADAPTERS = {name: getattr(AdapterConfig, name) for name in PRESETS}
# architecture in a saved adapter's file: the class of its configuration
KINDS = {None: AdapterConfig, "layer_norms": AdapterConfig}


def register(kind, *names):
    """Registers a kind of adapter; `names` are its factory methods, for --adapter. Raises
    ValueError for a kind without an `architecture` of its own, and for a name that is taken."""
    architecture = kind.architecture
    if not isinstance(architecture, str) or KINDS.get(architecture, kind) is not kind:
        raise ValueError(f"{kind.__name__} needs an `architecture` of its own: {architecture!r}")
    if taken := [name for name in names if name in ADAPTERS and architecture not in KINDS]:
        raise ValueError(f"{kind.__name__}: there is already an --adapter {taken[0]}")
    KINDS[architecture] = kind
    ADAPTERS.update({name: getattr(kind, name) for name in names})


def add_adapter(bert, name, config):
    """Adds a new adapter to every slot that its config names, activates it, and makes it the only
    trainable part. It is held in fp32 even where the encoder is in bf16. Raises ValueError if the
    name is taken or unusable, or if the config leaves no adapter in this encoder."""
    dtype = torch.float64 if bert.dtype == torch.float64 else torch.float32
    modules = new_modules(bert, name, config, dtype)
    insert(bert, name, modules)
    activate(bert, name)
    for _, _, module in modules:
        for parameter in config.trained(module):
            parameter.requires_grad_(True)


def new_modules(bert, name, config, dtype):
    """[((layer, location), slot, new module)] of a new adapter, frozen, not yet in the slots."""
    adapterhub.check_name(name, taken=known_adapters(bert))
    modules = config.modules(bert)
    if not modules:
        raise ValueError(f"adapter {name!r}: leave_out leaves no layer of {len(bert.layers)}")
    for _, _, module in modules:
        module.to(bert.device, dtype).requires_grad_(False).train(bert.training)
    return modules


def insert(bert, name, modules):
    """Puts an adapter's modules into their slots. Raises ValueError if the encoder does not own
    one of these slots, as nothing there would be trained or saved."""
    for _, slot, module in modules:
        slot.adapters[name] = module
    owned = {id(p) for p in bert.parameters()}
    for key, _, module in modules:
        if any(id(p) not in owned for p in module.parameters()):
            for _, slot, _ in modules:
                del slot.adapters[name]
            raise ValueError(f"the slot {key} of adapter {name!r} is no submodule of the encoder")


def find_adapter(bert, name):
    """(configuration, [((layer, location), slot, module)]). Raises ValueError if there is no such
    adapter."""
    slots = [(key, slot) for key, slot in bert.slots() if name in slot.adapters]
    modules = [(key, slot, slot.adapters[name]) for key, slot in slots]
    if not modules:
        raise ValueError(f"there is no adapter called {name!r}")
    return modules[0][2].config, modules


# --------------------------------------------------------------------------------------------------
# Task-dependent copies of BERT's LayerNorms (appendix A.2), `layer_norms` of a configuration


class LayerNormSlot(nn.LayerNorm):
    """One of BERT's LayerNorms, and the copies of it that adapters bring: a slot as AddNorm is,
    where the active adapter's copy is applied in its place."""

    def __init__(self, norm):
        super().__init__(norm.normalized_shape, norm.eps)
        self.weight, self.bias = norm.weight, norm.bias
        self.adapters, self.fusion, self.active = nn.ModuleDict(), None, None

    def new_copy(self):
        copy = nn.LayerNorm(self.normalized_shape, self.eps, device=self.weight.device)
        copy.load_state_dict({"weight": self.weight, "bias": self.bias})
        return copy

    def forward(self, x):
        return self.adapters[self.active](x) if self.active in self.adapters else super().forward(x)


def layer_norm_slots(bert):
    """[(key, LayerNormSlot)] of all LayerNorms of BERT, which become slots if they are not yet."""
    places = {(None, "embeddings.norm"): (bert, "embeddings_norm")}
    for i, layer in enumerate(bert.layers):
        places[i, "attention.norm"] = layer.attention_add_norm, "norm"
        places[i, "output.norm"] = layer.output_add_norm, "norm"
    for key, (owner, name) in places.items():
        if key not in bert.more_slots:
            bert.more_slots[key] = LayerNormSlot(getattr(owner, name))
            setattr(owner, name, bert.more_slots[key])
    return [(key, bert.more_slots[key]) for key in places]


# --------------------------------------------------------------------------------------------------
# Files


def tensors_by_file_name(config, modules):
    """{(slot, part): tensor} of an adapter's modules, [((layer, location), slot, module)]. Raises
    ValueError for one that `tensor_names` forgets."""
    result, names = {}, {}
    for key, _, module in modules:
        tensors = module.state_dict(keep_vars=True)
        names |= {id(tensor): name for name, tensor in tensors.items()}
        for theirs, ours in config.tensor_names(module).items():
            result[adapterhub.slot_name(key), theirs] = tensors[ours]
    if forgotten := names.keys() - {id(tensor) for tensor in result.values()}:
        name = names[forgotten.pop()]
        raise ValueError(f"tensor_names of {type(config).__name__} forgets {name}")
    return result


def save_adapter(bert, name, directory):
    """Writes adapter_config.json and adapter.safetensors, fp32. Raises ValueError if there is no
    such adapter."""
    config, modules = find_adapter(bert, name)
    tensors = tensors_by_file_name(config, modules)
    header = adapterhub.header(name, bert.config, bert.source)
    adapterhub.write_adapter(directory, options_of(config), tensors, header)


def options_of(config):
    """The options in adapter_config.json"""
    return {"architecture": config.architecture, **asdict(config)}


def read_config(directory, name=None):
    """(name, configuration, the whole JSON object) of an adapter directory; name: what to call it,
    else the file's own. Raises ValueError for what this project does not implement."""
    name, options, values = adapterhub.read_adapter_config(directory, name)
    with error_prefix(f"{directory}/{adapterhub.ADAPTER.config}"):
        architecture = options["architecture"] or None
        if architecture not in list(KINDS):
            known = "only bottleneck adapters are supported, and this is of the kind"
            raise ValueError(f"{known} {architecture!r:.50}")
        known = [field.name for field in fields(KINDS[architecture])]
        config = KINDS[architecture](**{name: options[name] for name in known if name in options})
    return name, config, values


def load_adapter(bert, directory, name=None):
    """Inserts a saved adapter into the encoder, frozen and not yet active, in the encoder's dtype.
    directory: a run, an AdapterHub directory (modern or legacy tensor names, safetensors or .bin),
    or a hub id; name: what to call it here, otherwise what its config says. Returns the name.
    Raises FileNotFoundError without an adapter there, ValueError if it does not fit; then the
    encoder is unchanged."""
    directory = adapterhub.fetch(directory)
    name, config, _ = read_config(directory, name)
    saved = adapterhub.read(directory, adapterhub.ADAPTER)
    with error_prefix(directory):
        saved.check_size(bert.config)
        modules = new_modules(bert, name, config, bert.dtype)
        tensors = tensors_by_file_name(config, modules)
    saved.fill(tensors)
    insert(bert, name, modules)
    return name


def copy_adapters(sources, directory, bert_config):
    """Writes saved adapters, {name: directory}, to `directory`/NAME, in today's format, as fp32 and
    under these names. bert_config: their encoder's."""
    for name, source in sources.items():
        options = options_of(read_config(source, name)[1])
        saved = adapterhub.read(source, adapterhub.ADAPTER)
        header = adapterhub.header(name, bert_config, str(saved.values.get("model_name", "")))
        adapterhub.write_adapter(directory / name, options, saved.tensors, header)


# --------------------------------------------------------------------------------------------------
# Prediction heads


class Head(nn.Module):
    """
    The prediction head on the last layer's [CLS] vector. The paper describes none; this is
    AdapterHub's default. Its configuration, AdapterHub's head_config.json:

    head_type                 classification | multiple_choice
    num_labels, num_choices   K, of either type
    layers                    2: dropout, linear d -> d, tanh, dropout, linear; 1: dropout, linear
    use_pooler                [CLS] goes through the encoder's own pretrained pooler first
    dropout_prob              None: the encoder's
    label2id                  {label: its index}

    Raises ValueError for other heads.
    """

    def __init__(self, config, bert_config):
        super().__init__()
        self.config = config = adapterhub.head_config(config)  # complete
        choices = config["head_type"] == "multiple_choice"
        self.num_outputs = config["num_choices" if choices else "num_labels"]  # K
        rates = config["dropout_prob"], bert_config.classifier_dropout
        p = next((rate for rate in rates if rate is not None), bert_config.hidden_dropout_prob)
        d = bert_config.hidden_size
        # classification has one output per label; of a multiple-choice example each choice is an
        # input of its own, and is scored by the same single output
        layers = [nn.Dropout(p), nn.Linear(d, 1 if choices else self.num_outputs)]
        if config["layers"] == 2:
            layers = [nn.Dropout(p), nn.Linear(d, d), nn.Tanh(), *layers]
        self.layers = nn.Sequential(*layers)  # numbered as in AdapterHub's files
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=bert_config.initializer_range)
                nn.init.zeros_(layer.bias)
        self.pooler = nn.Linear(d, d) if config["use_pooler"] else None

    def forward(self, h):
        """h: hidden states [B·C, T, d], an example's C candidates one after another
        -> logits [B, K]"""
        cls = h[:, 0].to(self.layers[-1].weight.dtype)  # [B·C, d]
        if self.pooler is not None:
            cls = self.pooler(cls).tanh()
        return self.layers(cls).view(-1, self.num_outputs)  # [B·C, K or 1] -> [B, K]


def save_head(head, bert, name, directory):
    """Writes head_config.json and model_head.safetensors into `directory`."""
    header = adapterhub.header(name, bert.config, bert.source)
    tensors = {("heads", part): tensor for part, tensor in head.layers.state_dict().items()}
    adapterhub.write(directory, adapterhub.HEAD, head.config, tensors, header)


def load_head(bert, directory):
    """The Head saved in `directory` (or a hub id), frozen, in eval mode. Raises as load_adapter."""
    saved = adapterhub.read_head(directory)
    head = Head(saved.options, bert.config)
    saved.fill({("heads", part): p for part, p in head.layers.named_parameters()})
    if head.pooler is not None:  # its weights are in the encoder's files
        head.pooler.load_state_dict(read_pooler(bert.directory))
    return head.to(bert.device).requires_grad_(False).eval()
