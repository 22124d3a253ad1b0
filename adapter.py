"""Φ: task adapters, the small networks that are trained in stage 1 (section 2.2, Figure 5), and prediction heads.

    add_adapter(bert, "rte", AdapterConfig.pfeiffer(reduction_factor=16))   # new, trainable, active
    load_adapter(bert, "runs/rte")                                          # AdapterHub's files, frozen
    activate(bert, "rte")                                                   # or None: plain BERT
    save_adapter(bert, "rte", "runs/rte")

Files have the names, JSON fields and tensor names of the `adapters` library (AdapterHub), version 1.3.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from bert import download, listed, read_bin, read_json, read_safetensors, write_json, write_safetensors

NON_LINEARITIES = {"relu": F.relu, "leakyrelu": F.leaky_relu, "swish": F.silu, "gelu": F.gelu}

# What AdapterHub's bottleneck configuration has beyond the paper: written with these values, refused with any other
NOT_IN_THE_PAPER = {
    "cross_adapter": False, "dropout": 0.0, "factorized_phm_W": True, "factorized_phm_rule": False,
    "hypercomplex_nonlinearity": "glorot-uniform", "init_weights": "bert", "init_weights_seed": None,
    "inv_adapter": None, "inv_adapter_reduction_factor": None, "is_parallel": False, "learn_phm": True,
    "phm_bias": True, "phm_c_init": "normal", "phm_dim": 4, "phm_init_range": 0.0001, "phm_layer": False, "phm_rank": 1,
    "scaling": 1.0, "shared_W_phm": False, "shared_phm_rule": True, "stochastic_depth": 0.0, "use_gating": False,
}  # fmt: skip
# of these, the ones that change what a saved adapter computes at evaluation
REFUSED = ("inv_adapter", "is_parallel", "phm_layer", "scaling", "use_gating", "cross_adapter")


@dataclass(frozen=True)
class AdapterConfig:
    """
    Any point of the paper's grid (appendix A.2, Figure 5), under AdapterHub's field names.

    mh_adapter, output_adapter   where: after the attention ("bottom"), after the feed-forward ("top") sub-layer
    reduction_factor             bottleneck r = hidden_size // reduction_factor, at least 1; a mapping
                                 {"0": 2, "default": 16} gives it by layer
    non_linearity                relu | leakyrelu | swish | gelu
    original_ln_before           the adapter reads LN(f + x), with BERT's own LayerNorm, instead of f
    original_ln_after            LN(· + x), with BERT's own LayerNorm, after the adapter
    ln_before, ln_after          a new LayerNorm on the adapter's input, output
    residual_before_ln           the adapter's residual is f (True), LN(f + x) (False) or f + x ("post_add")
    adapter_residual_before_ln   with ln_after: the residual is added before that new LayerNorm
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

    def __post_init__(self):
        for field in fields(self):
            if field.type is bool and type(getattr(self, field.name)) is not bool:
                raise ValueError(f"{field.name} must be true or false, not {getattr(self, field.name)!r}")
        if not (self.mh_adapter or self.output_adapter):
            raise ValueError("an adapter without mh_adapter and output_adapter has no place in the encoder")
        if self.non_linearity not in NON_LINEARITIES:
            raise ValueError(f"non_linearity {self.non_linearity!r} is not one of {', '.join(NON_LINEARITIES)}")
        if self.residual_before_ln not in (True, False, "post_add"):
            raise ValueError(f"residual_before_ln {self.residual_before_ln!r} is not true, false or 'post_add'")
        if self.residual_before_ln == "post_add" and not self.original_ln_before:
            raise ValueError("residual_before_ln 'post_add' is the input of original_ln_before, which is off")
        by_layer = isinstance(self.reduction_factor, Mapping)
        for factor in self.reduction_factor.values() if by_layer else [self.reduction_factor]:
            if type(factor) not in (int, float) or not 0 < factor < math.inf:
                raise ValueError(f"reduction_factor must be a positive number, not {factor!r}")
        if not isinstance(self.leave_out, (list, tuple)) or any(type(layer) is not int for layer in self.leave_out):
            raise ValueError(f"leave_out must be a list of layers, not {self.leave_out!r}")
        object.__setattr__(self, "leave_out", tuple(self.leave_out))

    @classmethod
    def pfeiffer(cls, **changes):
        """The paper's own adapter: one per layer, on top, between BERT's own LayerNorm applied twice (Figure 5, right)."""
        return cls(**changes)

    @classmethod
    def houlsby(cls, **changes):
        """Houlsby et al. (2019), ST-A Houlsby in Table 1: two adapters per layer."""
        return cls(**{"mh_adapter": True, "non_linearity": "swish", "original_ln_before": False, **changes})

    @classmethod
    def bapna(cls, **changes):
        """Bapna and Firat (2019): one adapter per layer, on top, with a new LayerNorm on its input."""
        return cls(**{"ln_before": True, **changes})

    def bottleneck_size(self, hidden_size, layer):
        """r of one layer. The reference rounds down, and never below 1."""
        factor = self.reduction_factor
        if isinstance(factor, Mapping):
            factor = factor.get(str(layer), factor.get("default"))
            if factor is None:
                raise ValueError(f"reduction_factor has neither layer {layer} nor a default")
        return max(int(hidden_size // factor), 1)

    def has(self, layer, location):
        """Whether this adapter sits at a slot of Bert.slots()."""
        return layer not in self.leave_out and (self.mh_adapter if location == "attention" else self.output_adapter)


class Adapter(nn.Module):
    """One adapter in one slot: z = U·act(D·h + b_d) + b_u, around it LayerNorms and a residual (Figure 5)."""

    def __init__(self, config, hidden_size, bottleneck_size):
        super().__init__()
        self.config = config
        self.norm_before = nn.LayerNorm(hidden_size) if config.ln_before else None
        self.down = nn.Linear(hidden_size, bottleneck_size)  # D
        self.act = NON_LINEARITIES[config.non_linearity]
        self.up = nn.Linear(bottleneck_size, hidden_size)  # U
        self.norm_after = nn.LayerNorm(hidden_size) if config.ln_after else None
        for linear in (self.down, self.up):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)

    def enter(self, f, x, norm):
        """What the adapter reads, and its residual: f, x [B, T, d] -> h, residual [B, T, d]"""
        h = norm(f + x) if self.config.original_ln_before else f
        residual = {True: f, False: h}.get(self.config.residual_before_ln)
        return h, f + x if residual is None else residual  # None: "post_add"

    def leave(self, output, x, norm):
        """Back into the residual stream."""
        return norm(output + x) if self.config.original_ln_after else output

    def forward(self, f, x, norm):
        """f: sub-layer output, x: its input, norm: BERT's own LayerNorm; [B, T, d] -> [B, T, d]"""
        h, residual = self.enter(f, x, norm)
        z = self.up(self.act(self.down(self.norm_before(h) if self.norm_before else h)))  # d -> r -> d
        if self.norm_after is None:
            output = z + residual
        elif self.config.adapter_residual_before_ln:
            output = self.norm_after(z + residual)
        else:
            output = self.norm_after(z) + residual
        return self.leave(output, x, norm)


def add_adapter(bert, name, config):
    """Adds a new adapter to every slot that its config names, activates it, and leaves exactly it trainable.

    Initialised as the reference does: weights N(0, 0.02), biases 0. Held in fp32 even where the encoder is in bf16.
    Raises ValueError if the name is taken or unusable, or if the config leaves no adapter in this encoder.
    """
    plug_in(bert, name, config, torch.float64 if bert.dtype == torch.float64 else torch.float32)
    activate(bert, name)
    for _, slot in bert.slots():
        if name in slot.adapters:
            slot.adapters[name].requires_grad_(True)


def plug_in(bert, name, config, dtype):
    """New adapter modules in their slots, frozen; nothing is changed if an error is raised."""
    check_name(name)
    if any(name in slot.adapters for _, slot in bert.slots()):
        raise ValueError(f"there is already an adapter called {name!r}")
    places = [(layer, slot) for (layer, location), slot in bert.slots() if config.has(layer, location)]
    if not places:
        raise ValueError(f"adapter {name!r}: leave_out leaves no layer of {bert.config.num_hidden_layers}")
    d = bert.config.hidden_size
    modules = [Adapter(config, d, config.bottleneck_size(d, layer)) for layer, _ in places]
    for (_, slot), module in zip(places, modules, strict=True):
        slot.adapters[name] = module.to(bert.device, dtype).requires_grad_(False).train(bert.training)


def check_name(name):
    """Raises ValueError for a name that cannot be a directory, a part of a tensor's name, or a member of a fusion."""
    if not isinstance(name, str) or not re.fullmatch(r"[\w@+=-][\w@+= -]{0,99}", name) or hasattr(nn.ModuleDict, name):
        raise ValueError(
            f"{name!r:.120} cannot be an adapter's name: letters, digits, '_' and '-', at most 100, no method of ModuleDict"
        )


def activate(bert, name):
    """Lets one adapter, a fusion (its name is that of its adapters joined by commas) or, with None, only the encoder
    speak. Everything is frozen afterwards. Raises ValueError if nothing has that name."""
    known = {name for _, slot in bert.slots() for name in slot.adapters}
    known |= {slot.fusion.name for _, slot in bert.slots() if slot.fusion is not None}
    if name is not None and name not in known:
        raise ValueError(f"there is no adapter called {name!r}; there are: {', '.join(sorted(known)) or 'none'}")
    for _, slot in bert.slots():
        slot.active = name
    bert.requires_grad_(False)


# ----------------------------------------------------------------------------------------------------------------------
# Prediction heads


class Head(nn.Module):
    """
    AdapterHub's prediction head on the last layer's [CLS] vector, without pooler.

    config holds AdapterHub's fields: head_type ("classification" | "multiple_choice"), num_labels or num_choices,
    layers (2: dropout, linear d -> d, tanh, dropout, linear; 1: dropout, linear), activation_function, label2id.
    Raises ValueError for any other head.
    """

    def __init__(self, config, bert_config):
        super().__init__()
        self.config = {"activation_function": "tanh", "bias": True, "dropout_prob": None, "use_pooler": False, **config}
        if self.config.get("head_type") not in ("classification", "multiple_choice"):
            raise ValueError(f"head_type {self.config.get('head_type')!r} is not supported")
        for field, supported in {"layers": (1, 2), "activation_function": ("tanh",), "use_pooler": (False,),
                                 "bias": (True,)}.items():  # fmt: skip
            if self.config.get(field) not in supported:
                raise ValueError(f"a head with {field} = {self.config.get(field)!r} is not supported, only {supported[0]}")
        self.num_outputs = self.config.get("num_labels") or self.config.get("num_choices")
        if type(self.num_outputs) is not int or not 0 < self.num_outputs < 100_000:
            raise ValueError("a head needs num_labels or num_choices")
        choices = [self.config["dropout_prob"], bert_config.classifier_dropout, bert_config.hidden_dropout_prob]
        dropout = next(p for p in choices if p is not None)
        d, last = bert_config.hidden_size, self.num_outputs if config["head_type"] == "classification" else 1
        modules = [nn.Dropout(dropout), nn.Linear(d, last)]
        if self.config["layers"] == 2:
            modules = [nn.Dropout(dropout), nn.Linear(d, d), nn.Tanh(), *modules]
        self.layers = nn.Sequential(*modules)  # its indices are AdapterHub's: heads.NAME.1.weight, heads.NAME.4.weight
        for module in modules:
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=bert_config.initializer_range)
                nn.init.zeros_(module.bias)

    def forward(self, h):
        """h: hidden states [B·C, T, d], C candidates of an example in a row (1 for classification) -> logits [B, K]"""
        return self.layers(h[:, 0]).view(-1, self.num_outputs)


# ----------------------------------------------------------------------------------------------------------------------
# AdapterHub's files

CONFIG_FILE, WEIGHTS_FILES = "adapter_config.json", ("adapter.safetensors", "pytorch_adapter.bin")
HEAD_CONFIG_FILE, HEAD_FILES = "head_config.json", ("model_head.safetensors", "pytorch_model_head.bin")


def tensor_names(config):
    """Ours -> AdapterHub's. With ln_before, `adapter_down` is (norm, linear, activation), otherwise (linear, activation)."""
    names = {"down": f"adapter_down.{int(config.ln_before)}", "up": "adapter_up"}
    if config.ln_before:
        names["norm_before"] = "adapter_norm_before"  # the reference stores it a second time, as adapter_down.0
    if config.ln_after:
        names["norm_after"] = "adapter_norm_after"
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in names.items() for kind in ("weight", "bias")}


def slot_name(key):
    """(3, "attention") -> encoder.layer.3.attention.output"""
    layer, location = key
    return f"encoder.layer.{layer}.{'attention.output' if location == 'attention' else 'output'}"


def meta(bert, name):
    """The fields beside "config" in all of AdapterHub's JSON files."""
    kind = {"bert": "Bert", "roberta": "Roberta"}[bert.config.model_type]
    return {
        "hidden_size": bert.config.hidden_size,
        "model_class": f"{kind}AdapterModel",
        "model_name": bert.source or "",
        "model_type": bert.config.model_type,
        "name": name,
        "version": "adapters.1.3.0",  # of the format; without it the library takes "gelu" for its tanh approximation
    }


def save_adapter(bert, name, directory):
    """Writes adapter_config.json and adapter.safetensors (fp32) into `directory`. Raises ValueError for an unknown name."""
    directory = Path(directory)
    tensors, config = {}, None
    for key, slot in bert.slots():
        if name in slot.adapters:
            config = slot.adapters[name].config
            weights = slot.adapters[name].state_dict()
            prefix = f"{bert.config.model_type}.{slot_name(key)}.adapters.{name}."
            for ours, theirs in tensor_names(config).items():
                tensors[prefix + theirs] = weights[ours].detach().float().cpu().contiguous()
                if ours.startswith("norm_before"):
                    copy = theirs.replace("adapter_norm_before", "adapter_down.0")
                    tensors[prefix + copy] = tensors[prefix + theirs].clone()
    if config is None:
        raise ValueError(f"there is no adapter called {name!r}")
    directory.mkdir(parents=True, exist_ok=True)
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    values = {**NOT_IN_THE_PAPER, **values, "leave_out": list(config.leave_out)}
    write_safetensors(directory / WEIGHTS_FILES[0], tensors)
    write_json(directory / CONFIG_FILE, {"config": dict(sorted(values.items())), **meta(bert, name)})


def fetch_adapter(source):
    """Directory of an adapter: `source` itself, or the files of a hub id. Raises FileNotFoundError if it is neither."""
    if Path(source).is_dir():
        if not (Path(source) / CONFIG_FILE).is_file():
            raise FileNotFoundError(f"no adapter in {source}: it has no {CONFIG_FILE}")
        return Path(source)
    config = download(str(source), CONFIG_FILE)
    if config is None or not any(download(str(source), name) for name in WEIGHTS_FILES):
        raise FileNotFoundError(f"no adapter in hub repository {source!r}")
    return config.parent


def read_adapter_config(directory):
    """(name, AdapterConfig, the whole JSON object) of an adapter directory.

    Raises ValueError for what this project does not implement, by name.
    """
    path = Path(directory) / CONFIG_FILE
    values = read_json(path)
    config = values.get("config")
    if not isinstance(config, dict):
        raise ValueError(f"{path}: no 'config' object: not a bottleneck adapter of AdapterHub")
    if "reduction_factor" not in config or config.get("architecture"):
        kind = config.get("architecture") or "one without a reduction_factor"
        raise ValueError(f"{path}: only bottleneck adapters are supported, this is {kind}")
    for field in REFUSED:  # older files lack the newer fields; an invertible adapter counts only if it has weights
        if field != "inv_adapter" and config.get(field, NOT_IN_THE_PAPER[field]) != NOT_IN_THE_PAPER[field]:
            raise ValueError(f"{path}: {field} = {config[field]!r} is not supported")
    if config.get("non_linearity") == "gelu" and "version" not in values:
        raise ValueError(f"{path}: non_linearity gelu_new is not supported (which is what old files call 'gelu')")
    known = {field.name for field in fields(AdapterConfig)}
    try:
        config = AdapterConfig(**{key: value for key, value in config.items() if key in known})
        check_name(values.get("name"))
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from e
    return values["name"], config, values


def read_weights(directory, names):
    """(path, tensors) of the first of the files `names` that is in `directory`."""
    for name in names:
        path = Path(directory) / name
        if path.is_file():
            return path, (read_safetensors if path.suffix == ".safetensors" else read_bin)(path)
    raise FileNotFoundError(f"no weights in {directory}: it has neither {' nor '.join(names)}")


def load_adapter(bert, directory, name=None):
    """
    Plugs a saved adapter into the encoder, frozen and not yet active, in the encoder's dtype.

    directory: a run, an AdapterHub directory (modern or legacy tensor names, safetensors or .bin), or a hub id;
    name: what to call it here, otherwise what its config says. Returns the name.
    Raises FileNotFoundError without an adapter there, ValueError if it does not fit this encoder; nothing is changed then.
    """
    directory = fetch_adapter(directory)
    own_name, config, values = read_adapter_config(directory)
    name = own_name if name is None else name
    if values.get("hidden_size", bert.config.hidden_size) != bert.config.hidden_size:
        raise ValueError(
            f"{directory}: an adapter for hidden_size {values['hidden_size']}, the encoder has {bert.config.hidden_size}"
        )
    if values.get("model_type", bert.config.model_type) != bert.config.model_type:
        raise ValueError(f"{directory}: an adapter for {values['model_type']}, the encoder is {bert.config.model_type}")
    path, tensors = read_weights(directory, WEIGHTS_FILES)

    # [bert.]encoder.layer.0[.attention].output.adapters.NAME.adapter_up.weight; before 2021 the list was called
    # layer_text_task_adapters and attention_text_task_adapters
    pattern = re.compile(
        r"(?:\w+\.)?(encoder\.layer\.\d+\.(?:attention\.)?output)\."
        r"(?:adapters|layer_text_task_adapters|attention_text_task_adapters)\.(.+)\.(adapter_\w+(?:\.\d)?\.\w+)"
    )
    found = {}
    for tensor_name, tensor in tensors.items():
        match = pattern.fullmatch(tensor_name)
        if match is None:
            raise ValueError(f"{path}: {tensor_name} is not part of a bottleneck adapter, refused")
        found[f"{match[1]}.{match[3]}"] = tensor

    plug_in(bert, name, config, bert.dtype)
    try:
        for key, slot in bert.slots():
            if name in slot.adapters:
                for ours, theirs in tensor_names(config).items():
                    fill(slot.adapters[name].get_parameter(ours), found, f"{slot_name(key)}.{theirs}", path)
                if config.ln_before:
                    for kind in ("weight", "bias"):
                        found.pop(f"{slot_name(key)}.adapter_down.0.{kind}", None)
        if found:
            raise ValueError(f"{path}: tensors without a place in this encoder: {listed(list(found))}")
    except ValueError:
        for _, slot in bert.slots():
            slot.adapters.pop(name) if name in slot.adapters else None
        raise
    return name


def fill(parameter, tensors, name, path):
    """Moves one tensor of a file into a parameter. Raises ValueError if it is missing, misshapen or not finite."""
    tensor = tensors.pop(name, None)
    if tensor is None:
        raise ValueError(f"{path}: {name} is missing")
    if tensor.shape != parameter.shape or not tensor.is_floating_point():
        raise ValueError(
            f"{path}: {name} is {tensor.dtype} {list(tensor.shape)}, here it must be a float {list(parameter.shape)}"
        )
    if not tensor.isfinite().all():
        raise ValueError(f"{path}: {name} holds values that are not finite")
    with torch.no_grad():
        parameter.copy_(tensor)


def save_head(head, bert, name, directory):
    """Writes head_config.json and model_head.safetensors into `directory`."""
    tensors = {f"heads.{name}.{key}": value.float().cpu().contiguous() for key, value in head.layers.state_dict().items()}
    write_safetensors(Path(directory) / HEAD_FILES[0], tensors)
    write_json(Path(directory) / HEAD_CONFIG_FILE, {"config": head.config, **meta(bert, name)})


def load_head(bert, directory):
    """The Head saved in `directory`, frozen, in eval mode. Raises as load_adapter does."""
    path = Path(directory) / HEAD_CONFIG_FILE
    if not path.is_file():
        raise FileNotFoundError(f"no head in {directory}: it has no {HEAD_CONFIG_FILE}")
    config = read_json(path).get("config")
    try:
        head = Head(config if isinstance(config, dict) else {}, bert.config)
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from e
    weights_path, tensors = read_weights(directory, HEAD_FILES)
    # any prefix and name: heads.NAME.4.weight -> 4.weight
    tensors = {".".join(key.rsplit(".", 2)[-2:]): tensor for key, tensor in tensors.items()}
    for key, parameter in head.layers.named_parameters():
        fill(parameter, tensors, key, weights_path)
    if tensors:
        raise ValueError(f"{weights_path}: unexpected tensors {listed(list(tensors))}")
    return head.to(bert.device).requires_grad_(False).eval()
