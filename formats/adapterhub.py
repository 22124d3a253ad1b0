"""AdapterHub's files (the `adapters` library, version 1.3): adapters, prediction heads and fusions.

Each is a name, options (a JSON object) and tensors, {(slot, part): tensor}, such as
("encoder.layer.3.output", "adapter_up.weight"). What modules they become is not known here.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from formats.files import error_prefix, listed, read_json, read_tensors, write_json, write_tensors
from formats.hub import commit_of, download


@dataclass(frozen=True)
class Files:
    """The files of a saved adapter, head or fusion: a JSON file and a file of tensors."""

    config: str
    weights: tuple  # their names of today and of old
    pattern: str  # of a tensor's name
    tensor: str  # the name that is written

    def split(self, key):
        """A tensor's name -> (slot, part, name of the adapter, head or fusion), None for one that
        is no such tensor."""
        match = re.fullmatch(self.pattern, key)
        return match and match.group("slot", "part", "name")


# [bert.]encoder.layer.0[.attention].output.adapters.NAME.adapter_up.weight, where old files have
# layer_text_task_adapters or attention_text_task_adapters. `embeddings` has only copies of a
# LayerNorm, adapter_layer_norm, which AdapterHub's library lacks.
SLOT = r"(?:\w+\.)?(?P<slot>embeddings|encoder\.layer\.\d+\.(?:[a-z_]+\.)*[a-z_]+)\."
LISTS = r"(?:adapters|layer_text_task_adapters|attention_text_task_adapters)\."
NAME = r"(?P<name>[^.]+)\."  # PyTorch allows no full stop there
ADAPTER = Files(
    "adapter_config.json",
    ("adapter.safetensors", "pytorch_adapter.bin"),
    SLOT + LISTS + NAME + r"(?P<part>adapter_\w+(?:\.\w+)*)",
    "{model_type}.{slot}.adapters.{name}.{part}",
)
HEAD = Files(
    "head_config.json",
    ("model_head.safetensors", "pytorch_model_head.bin"),
    r"(?P<slot>heads)\." + NAME + r"(?P<part>\w+(?:\.\w+)*)",
    "{slot}.{name}.{part}",
)
FUSION = Files(
    "adapter_fusion_config.json",
    ("model_adapter_fusion.safetensors", "pytorch_model_adapter_fusion.bin"),
    SLOT + r"adapter_fusion_layer\." + NAME + r"(?P<part>\w+(?:\.\w+)*)",
    "{model_type}.{slot}.adapter_fusion_layer.{name}.{part}",
)

# What AdapterHub's bottleneck configuration has beyond the paper's grid, where it has no effect
NOT_IN_THE_PAPER = json.loads("""{
    "cross_adapter": false, "dropout": 0.0, "factorized_phm_W": true, "factorized_phm_rule": false,
    "hypercomplex_nonlinearity": "glorot-uniform", "init_weights": "bert",
    "init_weights_seed": null, "inv_adapter": null, "inv_adapter_reduction_factor": null,
    "is_parallel": false, "learn_phm": true, "phm_bias": true, "phm_c_init": "normal", "phm_dim": 4,
    "phm_init_range": 0.0001, "phm_layer": false, "phm_rank": 1, "scaling": 1.0,
    "shared_W_phm": false, "shared_phm_rule": true, "stochastic_depth": 0.0, "use_gating": false
}""")

# The paper's fusion in the reference's terms, and the fields that may differ and change nothing
# (value_before_softmax: V z_n or V Σ s_n z_n, which are equal)
FUSION_CONFIG = json.loads("""{
    "dropout_prob": null, "key": true, "query": true, "query_before_ln": false,
    "regularization": true, "residual_before": false, "temperature": false, "value": true,
    "value_before_softmax": true, "value_initialized": true
}""")
SAME_FUNCTION = ("dropout_prob", "regularization", "value_before_softmax", "value_initialized")

# The single-task adapters that the paper's authors published (reduction factor 16), for
# BERT-base-uncased and RoBERTa-base. A row: the task under which they are loaded here (inside the
# files they have other names), and what hub ids have between AdapterHub/ and _pfeiffer. For BERT,
# those of mnli, qqp, sst2, mrpc and rte were replaced in August 2020 by those of the AdapterHub
# paper, of the same architecture. Their heads are the pretrained pooler, which is in the encoder's
# files, and one linear layer.
PAPER_ADAPTERS = """
mnli            bert-base-uncased_nli_multinli     roberta-base-multinli
qqp             bert-base-uncased_sts_qqp          roberta-base-qqp
sst2            bert-base-uncased_sentiment_sst-2  roberta-base-sst
winogrande      bert-base-uncased-winogrande       roberta-base-winogrande
imdb            bert-base-uncased-imdb             roberta-base-imdb
hellaswag       bert-base-uncased-hellaswag        roberta-base-hellaswag
social_i_qa     bert-base-uncased-siqa             roberta-base-siqa
cosmos_qa       bert-base-uncased-cosmosqa         roberta-base-cosmosqa
scitail         bert-base-uncased-scitail          roberta-base-scitail
argument        bert-base-uncased-ukpsent1         roberta-base-ukpsent1
commonsense_qa  bert-base-uncased-csqa             roberta-base-csqa
boolq           bert-base-uncased-boolq            roberta-base-boolq
mrpc            bert-base-uncased_sts_mrpc         roberta-base-mrpc
sick            bert-base-uncased-sick             roberta-base-sick
rte             bert-base-uncased_nli_rte          roberta-base-rte
cb              bert-base-uncased-cb               roberta-base-cb
"""


# of the reference library, which has none for other encoders
MODEL_CLASSES = {"bert": "BertAdapterModel", "roberta": "RobertaAdapterModel"}


def paper_adapters(model_type):
    """[(task, hub id)] of the paper's 16 adapters for "bert" or "roberta". Raises ValueError for
    another encoder."""
    if model_type not in MODEL_CLASSES:
        known = " and ".join(MODEL_CLASSES)
        raise ValueError(f"the paper's adapters are for {known}, none of them for {model_type}")
    rows = [row.split() for row in PAPER_ADAPTERS.strip().split("\n")]
    column = {"bert": 1, "roberta": 2}[model_type]
    return [(row[0], f"AdapterHub/{row[column]}_pfeiffer") for row in rows]


def check_name(name, taken=()):
    """Raises ValueError for an adapter's name that cannot be a directory's, a part of a tensor's
    name, or of a fusion's, or that another adapter has already."""
    right = isinstance(name, str) and re.fullmatch(r"[\w@+=-][\w@+= -]{0,99}", name)
    if not right or hasattr(torch.nn.ModuleDict(), name):
        rule = "letters, digits, blanks and _-@+=, at most 100, no method of ModuleDict"
        raise ValueError(f"{name!r:.120} cannot be an adapter's name: {rule}")
    if name in taken:
        raise ValueError(f"there is already an adapter called {name!r}")


def slot_path(key):
    """(3, "attention") -> encoder.layer.3.attention.output; (None, "embeddings") -> embeddings"""
    layer, location = key
    location = location.removesuffix(".norm")  # of a LayerNorm's copies
    location = {"attention": "attention.output"}.get(location, location)
    return location if layer is None else f"encoder.layer.{layer}.{location}"


def header(name, config, source):
    """The fields beside "config" in all of AdapterHub's JSON files. config: the encoder's; source:
    its name."""
    return {
        "hidden_size": config.hidden_size,
        "model_class": MODEL_CLASSES.get(config.model_type),  # or null
        "model_name": source or "",
        "model_type": config.model_type,
        "name": name,
        # of the format; without it "gelu" is read as its tanh approximation
        "version": "adapters.1.3.0",
    }


# --------------------------------------------------------------------------------------------------
# What options may be


def check_bottleneck(config, non_linearities):
    """Raises ValueError, naming the field, for an invalid configuration of a bottleneck adapter."""
    choices = {field.name: [True, False] for field in fields(config) if field.type is bool}
    choices["residual_before_ln"] = [True, False, "post_add"]
    choices["non_linearity"] = [*non_linearities]
    for field, known in choices.items():
        if (value := getattr(config, field)) not in known:
            these = ", ".join(map(str, known))
            raise ValueError(f"{field} must be one of {these}, not {value!r:.50}")
    factors = config.reduction_factor
    for key in factors if isinstance(factors, Mapping) else ():
        if key != "default" and not (isinstance(key, str) and key.isdecimal()):
            names = 'a layer, such as "0", or "default"'
            raise ValueError(f"reduction_factor: {key!r:.50} must be {names}")
    for factor in factors.values() if isinstance(factors, Mapping) else [factors]:
        # below 0.1, a file could ask for a bottleneck of any size
        if type(factor) not in (int, float) or not 0.1 <= factor < math.inf:
            raise ValueError(f"reduction_factor must be at least 0.1, not {factor!r:.50}")
    check_leave_out(config)
    if not (config.mh_adapter or config.output_adapter):
        raise ValueError("without mh_adapter and output_adapter it has no place in the encoder")
    if config.residual_before_ln == "post_add" and not config.original_ln_before:
        raise ValueError("'post_add' is the input of original_ln_before, which is off")


def check_leave_out(config):
    """Raises ValueError unless leave_out is a list of layers."""
    layers = config.leave_out
    if not isinstance(layers, (list, tuple)) or not all(type(layer) is int for layer in layers):
        raise ValueError(f"leave_out must be a list of layers, not {layers!r:.50}")


def check_fits(config, layers, d):
    """Raises ValueError for layers that an encoder of so many layers lacks, and for a factor that
    leaves no bottleneck in hidden size d. In a file they are harmless; to ask for them is a
    mistake."""
    if not {*getattr(config, "leave_out", ())} <= {*range(layers)}:
        left_out = list(config.leave_out)
        raise ValueError(f"leave_out {left_out} names layers outside 0 .. {layers - 1}")
    factors = getattr(config, "reduction_factor", {})
    factors = factors if isinstance(factors, Mapping) else {"default": factors}
    if unknown := factors.keys() - {"default", *map(str, range(layers))}:
        one = min(unknown)
        raise ValueError(f"reduction_factor names layer {one}, outside 0 .. {layers - 1}")
    if (largest := max(factors.values(), default=0)) > d:
        raise ValueError(f"reduction_factor {largest:g} leaves no bottleneck in hidden size {d}")


def without_effect(config):
    """{field: why} of those that change nothing here. They are harmless in a file; to ask for them
    is a mistake."""
    off, reasons = {field for field, value in vars(config).items() if not value}, {}
    if {"residual_before_ln", "original_ln_before"} <= off:
        why = "residual_before_ln=false takes LN(f + x), which original_ln_before=false leaves out"
        reasons["residual_before_ln"] = why
    if "ln_after" in off and "adapter_residual_before_ln" not in off:
        why = "adapter_residual_before_ln=true needs the new LayerNorm of ln_after=true"
        reasons["adapter_residual_before_ln"] = why
    return reasons


def bottleneck_names(ln_before, ln_after):
    """{AdapterHub's name: ours} of a bottleneck adapter's tensors. With ln_before, its adapter_down
    is (norm, linear, activation), else (linear, activation), and the norm is stored a second
    time."""
    names = {f"adapter_down.{int(ln_before)}": "down", "adapter_up": "up"}
    if ln_before:
        names |= {"adapter_down.0": "norm_before", "adapter_norm_before": "norm_before"}
    if ln_after:
        names["adapter_norm_after"] = "norm_after"
    parts = ("weight", "bias")
    return {f"{theirs}.{p}": f"{ours}.{p}" for theirs, ours in names.items() for p in parts}


def head_config(config):
    """A head's options, complete. Raises ValueError for a head that is not supported here."""
    config = {"activation_function": "tanh", "dropout_prob": None, "use_pooler": False, **config}
    supported = {"head_type": ("classification", "multiple_choice"), "layers": (1, 2)}
    if config.get("layers") == 2:
        supported["activation_function"] = ("tanh",)
    for field, values in supported.items():
        if (value := config.get(field)) not in values:
            only = " or ".join(map(str, values))
            raise ValueError(f"a head with {field} = {value!r:.50} is not supported, only {only}")
    outputs = "num_choices" if config["head_type"] == "multiple_choice" else "num_labels"
    if outputs == "num_labels":  # a head of the other type has no such field
        config.setdefault("bias", True)
    if not isinstance(config.get(outputs), int):
        raise ValueError(f"a head needs {outputs}")
    return config


# --------------------------------------------------------------------------------------------------
# Reading


def fetch(source, files=ADAPTER):
    """Directory of an adapter (head, fusion): `source` itself, or the files of a hub id."""
    directory = Path(source)
    if (directory / files.config).is_file():
        return directory
    if directory.is_dir():
        raise FileNotFoundError(f"{source} has no {files.config}")
    config = download(source, files.config)
    if config is None:
        raise FileNotFoundError(f"hub repository {source} has no {files.config}")
    for name in files.weights:  # where neither is, `read` says so
        if download(source, name, commit_of(config)):
            break
    return config.parent


@dataclass
class Saved:
    """A saved adapter, head or fusion."""

    directory: Path
    options: dict
    metadata: dict  # the whole JSON object
    path: Path  # of its tensors
    tensors: dict  # {(slot, part): tensor}

    def check_size(self, config):
        """Raises ValueError if the file is for another kind or size of encoder."""
        for field in ("hidden_size", "model_type"):
            ours = getattr(config, field)
            if self.metadata.get(field, ours) != ours:
                theirs = f"{field} {self.metadata[field]!r:.50}"
                raise ValueError(f"made for {theirs}, the encoder has {ours!r}")

    def copy_into(self, parameters, without=()):
        """Copies the tensors into {(slot, part): parameter}, new ones. A parameter that has two
        names may be stored under one of them; without: slots whose tensors need no parameter."""
        stored = {key: p for key, p in parameters.items() if key in self.tensors}
        found = {id(p) for p in stored.values()}
        with error_prefix(self.path), torch.no_grad():
            if absent := [".".join(key) for key, p in parameters.items() if id(p) not in found]:
                raise ValueError(f"it lacks {listed(absent)}")
            unused = [key for key in self.tensors if key not in parameters]
            if names := [".".join(key) for key in unused if key[0] not in without]:
                raise ValueError(f"tensors without a place here: {listed(names)}")
            for key, parameter in stored.items():
                tensor, name = self.tensors[key], ".".join(key)
                if tensor.shape != parameter.shape or not tensor.is_floating_point():
                    needed = f"here it must be a float {list(parameter.shape)}"
                    raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, {needed}")
                if not parameter.copy_(tensor).isfinite().all():
                    raise ValueError(f"{name} holds values that are not finite")


def read_values(directory, files):
    """(options, the whole JSON object) of an adapter, head or fusion."""
    path = Path(directory) / files.config
    values = read_json(path)
    if not isinstance(values.get("config"), dict):
        raise ValueError(f"{path}: no 'config' object, as AdapterHub's files have it")
    return values["config"], values


def read_fusion(source):
    """(Saved fusion, names of its adapters) at `source`, a directory or a hub id."""
    saved = read(source, FUSION)
    names = saved.metadata.get("adapter_names") or saved.metadata["name"]  # all that old files have
    return saved, names.split(",") if isinstance(names, str) else names


def variant_options(options):
    """What of a saved fusion's options makes it another function than the paper's fusion."""
    return {
        field: value
        for field, value in options.items()
        if field not in SAME_FUNCTION and (field, value) not in FUSION_CONFIG.items()
    }


def read_adapter_config(directory, name=None):
    """(name, options, the whole JSON object) of an adapter directory. name: what to call it, else
    the file's own. Raises ValueError, naming the field, for what this project does not
    implement."""
    options, values = read_values(directory, ADAPTER)
    with error_prefix(Path(directory) / ADAPTER.config):
        if not options.get("architecture"):
            options = bottleneck_options(values, options)
        name = values.get("name") if name is None else name
        check_name(name)
    return name, options, values


def bottleneck_options(values, options):
    """A file's options with what the reference assumes where it does not say, under today's
    names."""
    for field in ("mh_adapter", "output_adapter", "reduction_factor", "non_linearity"):
        if field not in options:
            raise ValueError(f"only bottleneck adapters are supported: this one has no {field}")
    # What changes a saved adapter's output. The weights of an inv_adapter are refused by `read`.
    for field in ("is_parallel", "phm_layer", "scaling", "use_gating", "cross_adapter"):
        if options.get(field, NOT_IN_THE_PAPER[field]) != NOT_IN_THE_PAPER[field]:
            raise ValueError(f"{field} = {options[field]!r:.50} is not supported")
    options = {"original_ln_before": False, "architecture": None, **options}
    options["leave_out"] = options.get("leave_out") or ()
    options["non_linearity"] = str(options["non_linearity"]).lower()
    if "version" not in values:  # then "gelu" is gelu_new
        old = {"gelu": "gelu_new", "gelu_orig": "gelu"}
        options["non_linearity"] = old.get(options["non_linearity"], options["non_linearity"])
    return options


def read(source, files):
    """What is Saved at `source`, a directory or a hub id, with its options as they are there, and
    the tensors in the first of files.weights that exists. Alone there, they may have any name; but
    the reference writes a head (fusion) "rte2" also into the file of one called "rte". Raises
    FileNotFoundError, or ValueError that names the file."""
    directory = fetch(source, files)
    options, metadata = read_values(directory, files)
    paths = [directory / name for name in files.weights if (directory / name).is_file()]
    if not paths:
        missing = " nor ".join(files.weights)
        raise FileNotFoundError(f"no weights in {directory}: it has neither {missing}")
    by_name, inside, stored = {}, str(metadata.get("name")), read_tensors(paths[0])
    with error_prefix(paths[0]):
        for key, tensor in stored.items():
            found = files.split(key)
            if found is None:  # for instance an invertible adapter's
                raise ValueError(f"{key} has no place here, not supported")
            slot, part, name = found
            by_name.setdefault(name, {})[slot, part] = tensor
        if inside not in by_name and len(by_name) > 1:
            raise ValueError(f"it holds {listed(list(by_name))}, not {inside!r:.50}")
    # without any: a kind of fusion may have no parameters; if it has, `copy_into` misses them
    tensors = by_name.get(inside) or next(iter(by_name.values()), {})
    return Saved(directory, options, metadata, paths[0], tensors)


def digest(directory, config):
    """SHA-256 of a saved adapter: its configuration and tensors, whatever its own name and its kind
    of file."""
    result = hashlib.sha256(repr(config).encode())
    for key, tensor in sorted(read(directory, ADAPTER).tensors.items()):
        result.update(repr(key).encode() + tensor.float().numpy().tobytes())
    return result.hexdigest()


# --------------------------------------------------------------------------------------------------
# Writing


def file_names(files, tensors, metadata):
    """{name in the file: tensor} of {(slot, part): tensor}. Raises ValueError for one that could
    not be read back under its name."""
    result = {}
    for (slot, part), tensor in tensors.items():
        names = {"model_type": metadata["model_type"], "name": metadata["name"]}
        key = files.tensor.format(slot=slot, part=part, **names)
        if files.split(key) != (slot, part, metadata["name"]):
            raise ValueError(f"a tensor cannot be called {part} in {slot}: it would not be found")
        result[key] = tensor
    return result


def write(directory, files, options, tensors, metadata):
    """Writes one kind of `files`: its options, {(slot, part): tensor} as fp32, and what `header`
    gives. Raises ValueError for a tensor that could not be read back under its name."""
    named = file_names(files, tensors, metadata)
    Path(directory).mkdir(parents=True, exist_ok=True)
    write_tensors(Path(directory) / files.weights[0], named)
    write_json(Path(directory) / files.config, {"config": options, **metadata})


def write_adapter(directory, options, tensors, values):
    """`write` of an adapter; options: with its architecture, None for a bottleneck adapter."""
    options = dict(options)
    if options["architecture"] is None:
        del options["architecture"]
        options = {**NOT_IN_THE_PAPER, **options}
    write(directory, ADAPTER, dict(sorted(options.items())), tensors, values)


def write_fusion(directory, options, tensors, values):
    """`write` of a fusion; options: those in which it differs from the paper's."""
    values = {"adapter_names": values["name"].split(","), **values}
    write(directory, FUSION, {**FUSION_CONFIG, **options}, tensors, values)
