"""Φ: task adapters, the small networks that are trained in stage 1 (section 2.2, Figure 5), and prediction heads.

    add_adapter(bert, "rte", AdapterConfig.pfeiffer(reduction_factor=16))   # new, trainable, active
    load_adapter(bert, "runs/rte")                                          # AdapterHub's files, frozen
    activate(bert, "rte")                                                   # or None: plain BERT
    save_adapter(bert, "rte", "runs/rte")

Files have the names, JSON fields and tensor names of the `adapters` library (AdapterHub), version 1.3.
"""

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from bert import (
    ACTIVATIONS,
    attention,
    commit_of,
    download,
    listed,
    read_bin,
    read_json,
    read_safetensors,
    write_json,
    write_safetensors,
)

NON_LINEARITIES = {"leakyrelu": F.leaky_relu, **{n: ACTIVATIONS[n] for n in ("relu", "swish", "gelu", "gelu_new")}}

INIT_WEIGHTS = {
    "bert": partial(nn.init.normal_, std=0.02),
    "houlsby": partial(nn.init.trunc_normal_, std=0.01, a=-0.02, b=0.02),  # near the identity, as in their paper
}

# What AdapterHub's bottleneck configuration has beyond the paper, and the values without effect that are written
NOT_IN_THE_PAPER = {
    "cross_adapter": False, "dropout": 0.0, "factorized_phm_W": True, "factorized_phm_rule": False,
    "hypercomplex_nonlinearity": "glorot-uniform", "init_weights_seed": None, "inv_adapter": None,
    "inv_adapter_reduction_factor": None, "is_parallel": False, "learn_phm": True, "phm_bias": True, "phm_c_init": "normal",
    "phm_dim": 4, "phm_init_range": 0.0001, "phm_layer": False, "phm_rank": 1,
    "scaling": 1.0, "shared_W_phm": False, "shared_phm_rule": True, "stochastic_depth": 0.0, "use_gating": False,
}  # fmt: skip


def as_layers(leave_out):
    """A tuple of layers. Raises ValueError for what is no list of them."""
    if not isinstance(leave_out, (list, tuple)) or any(type(layer) is not int for layer in leave_out):
        raise ValueError(f"leave_out must be a list of layers, not {leave_out!r:.50}")
    return tuple(leave_out)


@dataclass(frozen=True)
class AdapterConfig:
    """
    Any point of the paper's grid (appendix A.2, Figure 5), under AdapterHub's field names.

    mh_adapter, output_adapter   where: after the attention ("bottom"), after the feed-forward ("top") sub-layer
    reduction_factor             bottleneck r = hidden_size // reduction_factor, at least 1; a mapping
                                 {"0": 2, "default": 16} gives it by layer
    non_linearity                relu | leakyrelu | swish | gelu | gelu_new, its tanh approximation
    original_ln_before           the adapter reads LN(f + x), with BERT's own LayerNorm, instead of f
    original_ln_after            LN(· + x), with BERT's own LayerNorm, after the adapter
    ln_before, ln_after          a new LayerNorm on the adapter's input, output
    residual_before_ln           the adapter's residual is f (True), LN(f + x) (False) or f + x ("post_add")
    adapter_residual_before_ln   with ln_after: the residual is added before that new LayerNorm
    leave_out                    layers (from 0) without an adapter
    init_weights                 bert: weights from N(0, 0.02); houlsby: N(0, 0.01), cut at two standard deviations
    layer_norms                  a copy of every LayerNorm of BERT (of the embeddings' and of layers without adapter, too) that is
                                 trained with the adapter and takes its place. AdapterHub's library cannot read such files

    The last two make Houlsby et al.'s recipe (2019) of their architecture; the paper does not have them.
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
    init_weights: str = "bert"
    layer_norms: bool = False

    def __post_init__(self):
        for field in fields(self):
            if field.type is bool and type(getattr(self, field.name)) is not bool:
                raise ValueError(f"{field.name} must be true or false, not {getattr(self, field.name)!r:.50}")
        if not (self.mh_adapter or self.output_adapter):
            raise ValueError("an adapter without mh_adapter and output_adapter has no place in the encoder")
        if self.non_linearity not in list(NON_LINEARITIES):
            raise ValueError(f"non_linearity {self.non_linearity!r:.50} is not one of {', '.join(NON_LINEARITIES)}")
        if self.residual_before_ln not in (True, False, "post_add"):
            raise ValueError(f"residual_before_ln {self.residual_before_ln!r:.50} is not true, false or 'post_add'")
        if self.residual_before_ln == "post_add" and not self.original_ln_before:
            raise ValueError("residual_before_ln 'post_add' is the input of original_ln_before, which is off")
        if self.init_weights not in list(INIT_WEIGHTS):
            raise ValueError(f"init_weights {self.init_weights!r:.50} is not one of {', '.join(INIT_WEIGHTS)}")
        by_layer = isinstance(self.reduction_factor, Mapping)
        for factor in self.reduction_factor.values() if by_layer else [self.reduction_factor]:
            if type(factor) not in (int, float) or not 0.1 <= factor < math.inf:  # a file may ask for any size
                raise ValueError(f"reduction_factor must be a number of at least 0.1, not {factor!r:.50}")
        object.__setattr__(self, "leave_out", as_layers(self.leave_out))

    @classmethod
    def pfeiffer(cls, **changes):
        """The paper's own adapter: one per layer, on top, between BERT's LayerNorm applied twice (Figure 5, right)."""
        return cls(**changes)

    @classmethod
    def houlsby(cls, **changes):
        """Houlsby et al. (2019), ST-A Houlsby in Table 1: two adapters per layer."""
        return cls(**{"mh_adapter": True, "non_linearity": "swish", "original_ln_before": False, **changes})

    @classmethod
    def bapna(cls, **changes):
        """Bapna and Firat (2019): one adapter per layer, on top, with a new LayerNorm on its input."""
        return cls(**{"ln_before": True, **changes})

    def without_effect(self):
        """{field: why} of those that change nothing here. They are harmless in a file; to ask for them is a mistake."""
        reasons = {}
        if not (self.residual_before_ln or self.original_ln_before):
            reasons["residual_before_ln"] = "residual_before_ln=false takes LN(f + x), which original_ln_before=false leaves out"
        if self.adapter_residual_before_ln and not self.ln_after:
            reasons["adapter_residual_before_ln"] = "adapter_residual_before_ln=true needs the new LayerNorm of ln_after=true"
        return reasons

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
            INIT_WEIGHTS[config.init_weights](linear.weight)
            nn.init.zeros_(linear.bias)

    def enter(self, f, x, norm):
        """What the adapter reads, and its residual: f, x [B, T, d] -> h, residual [B, T, d]"""
        h = norm(f + x) if self.config.original_ln_before else f
        residual = {True: f, False: h}.get(self.config.residual_before_ln)
        return h, f + x if residual is None else residual  # None: "post_add"

    def leave(self, output, x, norm):
        """Back into the residual stream."""
        return norm(output + x) if self.config.original_ln_after else output

    def forward(self, f, x, norm, parallel=None):
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


@dataclass(frozen=True)
class PALConfig:
    """
    The task-specific layers of multi-task training (section 2.2.2; Stickland and Murray, 2019), parallel to a whole layer.

    size        of the small space
    num_heads   of the self-attention there, whose projections from d and back are shared by all layers; 0: no
                self-attention, and projections of each layer's own
    leave_out   layers (from 0) without one
    """

    size: int = 204
    num_heads: int = 6  # as their code has it; 12 in their paper
    leave_out: tuple = ()
    mh_adapter, output_adapter = False, True  # where it is added, in AdapterConfig's terms

    def __post_init__(self):
        if type(self.size) is not int or not 0 < self.size < 10**5:
            raise ValueError(f"size must be a positive integer, not {self.size!r:.50}")
        if type(self.num_heads) is not int or self.num_heads < 0 or self.num_heads and self.size % self.num_heads:
            raise ValueError(f"num_heads must be 0 or divide the size {self.size}, not {self.num_heads!r:.50}")
        object.__setattr__(self, "leave_out", as_layers(self.leave_out))

    @classmethod
    def pal(cls, **changes):
        """Projected attention layers: 1.1 times BERT-base's parameters for eight tasks."""
        return cls(**changes)

    @classmethod
    def low_rank(cls, **changes):
        """Their low-rank layers, of about as many parameters."""
        return cls(**{"size": 100, "num_heads": 0, **changes})

    has = AdapterConfig.has


class PAL(nn.Module):
    """One projected attention layer, or low-rank layer: z = GELU(U·g(D·x + b_d) + b_u), x the input of a whole layer of BERT,
    g self-attention without output matrix, or nothing; LN(f + z + x') at the layer's end, where f + x' are added anyway."""

    def __init__(self, config, bert_config, shared=None):
        super().__init__()
        d, size = bert_config.hidden_size, config.size
        self.config = config
        self.attention_dropout = bert_config.attention_probs_dropout_prob
        self.down = shared.down if shared else nn.Linear(d, size)
        self.up = shared.up if shared else nn.Linear(size, d)
        for name in ("query", "key", "value") if config.num_heads else ():
            setattr(self, name, nn.Linear(size, size))
        for linear in self.children():
            if not (shared and linear in (shared.down, shared.up)):
                nn.init.normal_(linear.weight, std=bert_config.initializer_range)
                nn.init.zeros_(linear.bias)

    def z(self, x, mask):
        """The layer's input [B, T, d], mask [B, 1, 1, T] -> [B, T, d]"""
        y = self.down(x)  # d -> size
        if self.config.num_heads:
            split = [layer(y).unflatten(2, (self.config.num_heads, -1)) for layer in (self.query, self.key, self.value)]
            q, k, v = (part.transpose(1, 2) for part in split)  # [B, H, T, size/H]
            y = attention(q, k, v, mask, self.attention_dropout if self.training else 0.0).transpose(1, 2).flatten(2)
        return F.gelu(self.up(y))

    def enter(self, f, x, norm):
        """What fusion's query reads, and the residual, as in the paper's own adapter."""
        return norm(f + x), f

    def leave(self, output, x, norm):
        return norm(output + x)

    def forward(self, f, x, norm, parallel):
        """As Adapter.forward; parallel: the layer's input and its mask. f may be that of the first token alone."""
        return norm(f + self.z(*parallel)[:, : f.shape[1]] + x)


def add_adapter(bert, name, config):
    """Adds a new adapter to every slot that its config names, activates it, and leaves exactly it trainable.

    Initialised as the reference does: weights by init_weights, biases 0. Held in fp32 even where the encoder is in bf16.
    Raises ValueError if the name is taken or unusable, or if the config leaves no adapter in this encoder.
    """
    plug_in(bert, name, config, torch.float64 if bert.dtype == torch.float64 else torch.float32)
    activate(bert, name)
    for _, slot in bert.slots():
        if name in slot.adapters:
            slot.adapters[name].requires_grad_(True)
    for _, _, own in bert.layer_norms():
        if name in own:
            own[name].requires_grad_(True)


def plug_in(bert, name, config, dtype):
    """New adapter modules in their slots, frozen; nothing is changed if an error is raised."""
    check_name(name)
    if any(name in slot.adapters for _, slot in bert.slots()):
        raise ValueError(f"there is already an adapter called {name!r}")
    places = [(layer, slot) for (layer, location), slot in bert.slots() if config.has(layer, location)]
    if not places:
        raise ValueError(f"adapter {name!r}: leave_out leaves no layer of {bert.config.num_hidden_layers}")
    d, modules = bert.config.hidden_size, []
    for layer, _ in places:
        if isinstance(config, PALConfig):
            modules.append(PAL(config, bert.config, shared=modules[0] if modules and config.num_heads else None))
        else:
            modules.append(Adapter(config, d, config.bottleneck_size(d, layer)))
    for (_, slot), module in zip(places, modules, strict=True):
        slot.adapters[name] = module.to(bert.device, dtype).requires_grad_(False).train(bert.training)
    for _, norm, own in bert.layer_norms() if getattr(config, "layer_norms", False) else ():
        own[name] = copy.deepcopy(norm).to(dtype).requires_grad_(False)


def check_name(name):
    """Raises ValueError for a name that cannot be a directory, a part of a tensor's name, or a member of a fusion."""
    right = isinstance(name, str) and re.fullmatch(r"[\w@+=-][\w@+= -]{0,99}", name) and len(name.encode()) <= 200
    if not right or hasattr(nn.ModuleDict(), name):
        raise ValueError(
            f"{name!r:.120} cannot be an adapter's name: letters, digits, _ and -, at most 100, no method of ModuleDict"
        )


def check_dropout(p):
    """Raises ValueError for what a file calls a dropout rate and is none."""
    if type(p) not in (int, float) or not 0 <= p < 1:
        raise ValueError(f"dropout_prob must be a number in [0, 1), not {p!r:.50}")


def activate(bert, name):
    """Lets one adapter, a fusion (its name is that of its adapters joined by commas; a fusion of one goes before that one)
    or, with None, only the encoder speak. Everything is frozen afterwards. Raises ValueError if nothing has that name."""
    known = {name for _, slot in bert.slots() for name in slot.adapters}
    known |= {slot.fusion.name for _, slot in bert.slots() if slot.fusion is not None}
    if name is not None and name not in known:
        raise ValueError(f"there is no adapter called {name!r}; there are: {', '.join(sorted(known)) or 'none'}")
    speak(bert, name)
    bert.requires_grad_(False)


def speak(bert, name):
    """`activate` without freezing: multi-task training turns from one adapter to the next."""
    for _, slot in bert.slots():
        slot.active = name


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
        self.config = {"activation_function": "tanh", "dropout_prob": None, "use_pooler": False, **config}
        if self.config.get("head_type") not in ("classification", "multiple_choice"):
            kind = self.config.get("head_type")
            raise ValueError(f"head_type {kind!r:.50} is not supported, only classification and multiple_choice")
        if self.config["head_type"] == "classification":  # the other kind has no such field
            self.config.setdefault("bias", True)
        for field, supported in {"layers": (1, 2), "use_pooler": (False,), "bias": (True, None),
                                 "activation_function": ("tanh",)}.items():  # fmt: skip
            value = self.config.get(field)
            if value not in supported and not (field == "activation_function" and self.config["layers"] == 1):
                raise ValueError(f"a head with {field} = {value!r:.50} is not supported, only {supported[0]}")
        self.num_outputs = self.config.get("num_labels") or self.config.get("num_choices")
        if type(self.num_outputs) is not int or not 0 < self.num_outputs < 100_000:
            raise ValueError("a head needs num_labels or num_choices")
        choices = [self.config["dropout_prob"], bert_config.classifier_dropout, bert_config.hidden_dropout_prob]
        dropout = next(p for p in choices if p is not None)
        check_dropout(dropout)
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
        return self.layers(h[:, 0].to(self.layers[-1].weight.dtype)).view(-1, self.num_outputs)


# ----------------------------------------------------------------------------------------------------------------------
# AdapterHub's files

CONFIG_FILE, WEIGHTS_FILES = "adapter_config.json", ("adapter.safetensors", "pytorch_adapter.bin")
HEAD_CONFIG_FILE, HEAD_FILES = "head_config.json", ("model_head.safetensors", "pytorch_model_head.bin")

# A tensor's name in those files: [bert.]encoder.layer.0[.attention].output.adapters.NAME.adapter_up.weight, where old
# files have layer_text_task_adapters or attention_text_task_adapters; heads.NAME.4.weight
SLOT = r"(?:\w+\.)?(?P<slot>embeddings|encoder\.layer\.\d+\.(?:attention\.)?output)\."  # embeddings: only LAYER_NORM
LISTS = r"(?:adapters|layer_text_task_adapters|attention_text_task_adapters)\."
LAYER_NORM = "adapter_layer_norm"  # a task's own copy, as AdapterHub does not have it
ADAPTER_TENSOR = re.compile(SLOT + LISTS + r"(?P<name>.+)\.(?P<part>adapter_\w+(?:\.\d)?\.\w+)")
HEAD_TENSOR = re.compile(r"(?P<slot>heads)\.(?P<name>.+)\.(?P<part>\d\.\w+)")

# The single-task adapters that the paper's authors published (version "AdapterFusion", reduction factor 16), for
# BERT-base-uncased and RoBERTa-base. Five of GLUE are missing for BERT; in their place, those of the AdapterHub paper,
# of the same architecture. Inside the files they have other names (glue_mnli): they are loaded under their tasks'.
PAPER_ADAPTERS = {
    "mnli": ("AdapterHub/bert-base-uncased_nli_multinli_pfeiffer", "AdapterHub/roberta-base-multinli_pfeiffer"),
    "qqp": ("AdapterHub/bert-base-uncased_sts_qqp_pfeiffer", "AdapterHub/roberta-base-qqp_pfeiffer"),
    "sst2": ("AdapterHub/bert-base-uncased_sentiment_sst-2_pfeiffer", "AdapterHub/roberta-base-sst_pfeiffer"),
    "winogrande": ("AdapterHub/bert-base-uncased-winogrande_pfeiffer", "AdapterHub/roberta-base-winogrande_pfeiffer"),
    "imdb": ("AdapterHub/bert-base-uncased-imdb_pfeiffer", "AdapterHub/roberta-base-imdb_pfeiffer"),
    "hellaswag": ("AdapterHub/bert-base-uncased-hellaswag_pfeiffer", "AdapterHub/roberta-base-hellaswag_pfeiffer"),
    "social_i_qa": ("AdapterHub/bert-base-uncased-siqa_pfeiffer", "AdapterHub/roberta-base-siqa_pfeiffer"),
    "cosmos_qa": ("AdapterHub/bert-base-uncased-cosmosqa_pfeiffer", "AdapterHub/roberta-base-cosmosqa_pfeiffer"),
    "scitail": ("AdapterHub/bert-base-uncased-scitail_pfeiffer", "AdapterHub/roberta-base-scitail_pfeiffer"),
    "argument": ("AdapterHub/bert-base-uncased-ukpsent1_pfeiffer", "AdapterHub/roberta-base-ukpsent1_pfeiffer"),
    "commonsense_qa": ("AdapterHub/bert-base-uncased-csqa_pfeiffer", "AdapterHub/roberta-base-csqa_pfeiffer"),
    "boolq": ("AdapterHub/bert-base-uncased-boolq_pfeiffer", "AdapterHub/roberta-base-boolq_pfeiffer"),
    "mrpc": ("AdapterHub/bert-base-uncased_sts_mrpc_pfeiffer", "AdapterHub/roberta-base-mrpc_pfeiffer"),
    "sick": ("AdapterHub/bert-base-uncased-sick_pfeiffer", "AdapterHub/roberta-base-sick_pfeiffer"),
    "rte": ("AdapterHub/bert-base-uncased_nli_rte_pfeiffer", "AdapterHub/roberta-base-rte_pfeiffer"),
    "cb": ("AdapterHub/bert-base-uncased-cb_pfeiffer", "AdapterHub/roberta-base-cb_pfeiffer"),
}


def tensor_names(config, first=True):
    """Ours -> AdapterHub's. With ln_before, `adapter_down` is (norm, linear, activation), else (linear, activation). It has no
    PALs: theirs are named alike; the projections that all layers share are written with the first one."""
    if isinstance(config, PALConfig):
        own = ("query", "key", "value") if config.num_heads else ()
        parts = (*(("down", "up") if first or not own else ()), *own)
        return {f"{part}.{kind}": f"adapter_{part}.{kind}" for part in parts for kind in ("weight", "bias")}
    names = {"down": f"adapter_down.{int(config.ln_before)}", "up": "adapter_up"}
    if config.ln_before:
        names["norm_before"] = "adapter_norm_before"  # the reference stores it a second time, as adapter_down.0
    if config.ln_after:
        names["norm_after"] = "adapter_norm_after"
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in names.items() for kind in ("weight", "bias")}


def slot_name(key):
    """(3, "attention") -> encoder.layer.3.attention.output; None -> embeddings"""
    if key is None:
        return "embeddings"
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
    """Writes adapter_config.json and adapter.safetensors (fp32). Raises ValueError for an unknown name."""
    tensors, config = {}, None
    for key, slot in bert.slots():
        if name in slot.adapters:
            config, weights = slot.adapters[name].config, slot.adapters[name].state_dict()
            for ours, theirs in tensor_names(config, first=not tensors).items():
                tensors[slot_name(key), theirs] = weights[ours]
                if ours.startswith("norm_before"):
                    second = theirs.replace("adapter_norm_before", "adapter_down.0")
                    tensors[slot_name(key), second] = weights[ours].clone()
    if config is None:
        raise ValueError(f"there is no adapter called {name!r}")
    for key, _, own in bert.layer_norms():
        if name in own:
            for kind, tensor in own[name].state_dict().items():
                tensors[slot_name(key), f"{LAYER_NORM}.{kind}"] = tensor
    write_adapter(directory, config, tensors, meta(bert, name))


def write_adapter(directory, config, tensors, values):
    """tensors: {(slot, part): tensor}, values: what `meta` returns."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {f"{values['model_type']}.{slot}.adapters.{values['name']}.{part}": tensor.float().cpu().contiguous()
               for (slot, part), tensor in tensors.items()}  # fmt: skip
    options = {field.name: getattr(config, field.name) for field in fields(config)}
    other = {"architecture": "pal"} if isinstance(config, PALConfig) else NOT_IN_THE_PAPER
    if options.pop("layer_norms", False):  # the library, which has no such field, would read the rest: so it refuses
        options |= {"layer_norms": True, "architecture": "layer_norms"}
    options = {**other, **options, "leave_out": list(config.leave_out)}
    write_safetensors(directory / WEIGHTS_FILES[0], tensors)
    write_json(directory / CONFIG_FILE, {"config": dict(sorted(options.items())), **values})


def copy_adapter(bert, source, name, directory):
    """Writes a saved adapter that fits `bert` into `directory` under the name `name`, bit by bit, in today's format."""
    _, config, values = read_adapter_config(source, name)
    _, tensors = read_tensors(source, WEIGHTS_FILES, ADAPTER_TENSOR, values.get("name"))
    write_adapter(directory, config, tensors, {**meta(bert, name), "model_name": str(values.get("model_name", ""))})


def paper_adapters(bert):
    """[(task, hub id)] of the paper's 16 adapters for this kind of encoder."""
    return [(task, ids[bert.config.model_type == "roberta"]) for task, ids in PAPER_ADAPTERS.items()]


def fetch(source, config_file=CONFIG_FILE, weights_files=WEIGHTS_FILES):
    """Directory of an adapter (head, fusion): `source` itself, or the files of a hub id. Raises FileNotFoundError."""
    if Path(source).is_dir():
        if not (Path(source) / config_file).is_file():
            raise FileNotFoundError(f"{source} has no {config_file}")
        return Path(source)
    config = download(source, config_file)
    if config is None:
        raise FileNotFoundError(f"hub repository {source} has no {config_file}")
    if not any(download(source, name, revision=commit_of(config)) for name in weights_files):
        raise FileNotFoundError(f"hub repository {source} has neither {' nor '.join(weights_files)}")
    return config.parent


def read_adapter_config(directory, name=None):
    """(name, AdapterConfig, the whole JSON object) of an adapter directory; name: what to call it, else the file's own.

    Raises ValueError for what this project does not implement, by name.
    """
    path = Path(directory) / CONFIG_FILE
    values = read_json(path)
    options = values.get("config")
    if not isinstance(options, dict):
        raise ValueError(f"{path}: no 'config' object: not a bottleneck adapter of AdapterHub")
    required = ("mh_adapter", "output_adapter", "reduction_factor", "non_linearity")
    lacks = [field for field in required if field not in options]
    kind = PALConfig if options.get("architecture") == "pal" else AdapterConfig
    if kind is AdapterConfig and ((options.get("architecture") or None) not in (None, "layer_norms") or lacks):
        kind = f"{options['architecture']!r:.50}" if options.get("architecture") else f"without {listed(lacks)}"
        raise ValueError(f"{path}: only bottleneck adapters are supported, this is one {kind}")
    # what changes a saved adapter's output; inv_adapter does only if the file has its weights, see read_tensors
    for field in ("is_parallel", "phm_layer", "scaling", "use_gating", "cross_adapter"):
        if options.get(field, NOT_IN_THE_PAPER[field]) != NOT_IN_THE_PAPER[field]:
            raise ValueError(f"{path}: {field} = {options[field]!r:.50} is not supported")
    # what the reference assumes of a file that does not say; and its old names: without a version, "gelu" is gelu_new
    options = {"original_ln_before": False, **options, "leave_out": options.get("leave_out") or ()}
    options["non_linearity"] = str(options.get("non_linearity")).lower()
    if "version" not in values:
        old = {"gelu": "gelu_new", "gelu_orig": "gelu"}
        options["non_linearity"] = old.get(options["non_linearity"], options["non_linearity"])
    if options.get("init_weights") not in list(INIT_WEIGHTS):  # of no effect on a saved adapter
        options.pop("init_weights", None)
    known = {field.name for field in fields(kind)}
    try:
        config = kind(**{key: value for key, value in options.items() if key in known})
        name = values.get("name") if name is None else name
        check_name(name)
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from e
    return name, config, values


def read_tensors(directory, files, pattern, name):
    """
    (path, {(slot, part): tensor}) of what is called `name` in the first of `files` that is in `directory`.

    Alone there, it may be called anything. It need not be alone: the reference writes a head (fusion) "rte2" also into
    the file of one called "rte". Raises FileNotFoundError without a file, ValueError for a tensor that does not belong.
    """
    path = next((Path(directory) / file for file in files if (Path(directory) / file).is_file()), None)
    if path is None:
        raise FileNotFoundError(f"no weights in {directory}: it has neither {' nor '.join(files)}")
    found = {}
    for key, tensor in (read_safetensors if path.suffix == ".safetensors" else read_bin)(path).items():
        match = pattern.fullmatch(key)
        if match is None:  # for instance an invertible adapter's
            raise ValueError(f"{path}: {listed([key])} has no place here, not supported")
        if found.setdefault(match["name"], {}).setdefault((match["slot"], match["part"]), tensor) is not tensor:
            raise ValueError(f"{path}: {listed([key])} is there twice, under an old and a new name")
    if str(name) not in found and len(found) != 1:
        raise ValueError(f"{path}: it holds {listed(list(found)) or 'nothing'}, not {name!r:.50}")
    return path, found[str(name)] if str(name) in found else found.popitem()[1]


def load_adapter(bert, directory, name=None):
    """
    Plugs a saved adapter into the encoder, frozen and not yet active, in the encoder's dtype.

    directory: a run, an AdapterHub directory (modern or legacy tensor names, safetensors or .bin), or a hub id;
    name: what to call it here, otherwise what its config says. Returns the name.
    Raises FileNotFoundError without an adapter there, ValueError if it does not fit; then the encoder is unchanged.
    """
    directory = fetch(directory)
    name, config, values = read_adapter_config(directory, name)
    for field in ("hidden_size", "model_type"):
        ours = getattr(bert.config, field)
        if values.get(field, ours) != ours:
            raise ValueError(f"{directory}: an adapter for {field} {values[field]!r:.50}, the encoder has {ours!r}")
    path, tensors = read_tensors(directory, WEIGHTS_FILES, ADAPTER_TENSOR, values.get("name"))
    try:
        plug_in(bert, name, config, bert.dtype)
    except ValueError as e:
        raise ValueError(f"{directory}: {e}") from e
    try:
        first = True
        for key, slot in bert.slots():
            if name in slot.adapters:
                for ours, theirs in tensor_names(config, first).items():
                    fill(slot.adapters[name].get_parameter(ours), tensors, (slot_name(key), theirs), path)
                first = False
                if getattr(config, "ln_before", False):
                    for kind in ("weight", "bias"):
                        tensors.pop((slot_name(key), f"adapter_down.0.{kind}"), None)
        for key, _, own in bert.layer_norms():
            if name in own:
                for kind, parameter in own[name].named_parameters():
                    fill(parameter, tensors, (slot_name(key), f"{LAYER_NORM}.{kind}"), path)
        refuse_rest(tensors, path)
    except ValueError:
        for modules in (*(slot.adapters for _, slot in bert.slots()), *(own for _, _, own in bert.layer_norms())):
            modules.pop(name) if name in modules else None
        raise
    return name


def fill(parameter, tensors, key, path):
    """Moves tensors[slot, part] into a parameter. Raises ValueError if it is missing, misshapen or not finite."""
    tensor, name = tensors.pop(key, None), ".".join(key)
    if tensor is None:
        raise ValueError(f"{path}: {name} is missing")
    if tensor.shape != parameter.shape or not tensor.is_floating_point():
        raise ValueError(
            f"{path}: {name} is {tensor.dtype} {list(tensor.shape)}, here it must be a float {list(parameter.shape)}"
        )
    tensor = tensor.to(parameter.dtype)  # float8 knows no isfinite
    if not tensor.isfinite().all():
        raise ValueError(f"{path}: {name} holds values that are not finite")
    with torch.no_grad():
        parameter.copy_(tensor)


def refuse_rest(tensors, path):
    """Raises ValueError if `fill` has left tensors of a file."""
    if tensors:
        raise ValueError(f"{path}: tensors without a place here: {listed(['.'.join(key) for key in tensors])}")


def save_head(head, bert, name, directory):
    """Writes head_config.json and model_head.safetensors into `directory`."""
    weights = head.layers.state_dict()
    tensors = {f"heads.{name}.{key}": tensor.float().cpu().contiguous() for key, tensor in weights.items()}
    write_safetensors(Path(directory) / HEAD_FILES[0], tensors)
    write_json(Path(directory) / HEAD_CONFIG_FILE, {"config": head.config, **meta(bert, name)})


def load_head(bert, directory):
    """The Head saved in `directory` (or a hub id), frozen, in eval mode. Raises as load_adapter does."""
    directory = fetch(directory, HEAD_CONFIG_FILE, HEAD_FILES)
    values = read_json(directory / HEAD_CONFIG_FILE)
    config = values.get("config")
    try:
        head = Head(config if isinstance(config, dict) else {}, bert.config)
    except ValueError as e:
        raise ValueError(f"{directory / HEAD_CONFIG_FILE}: {e}") from e
    path, tensors = read_tensors(directory, HEAD_FILES, HEAD_TENSOR, values.get("name"))
    for part, parameter in head.layers.named_parameters():
        fill(parameter, tensors, ("heads", part), path)
    refuse_rest(tensors, path)
    return head.to(bert.device).requires_grad_(False).eval()
