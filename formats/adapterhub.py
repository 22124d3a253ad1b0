"""AdapterHub's files (the `adapters` library, version 1.3): adapters, prediction heads and fusions.

A tensor in them is called by its slot and its part: ("encoder.layer.3.output",
"adapter_up.weight").
"""

import hashlib
import math
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import nn

from formats.files import error_prefix, listed, read_json, read_tensors, write_json, write_tensors
from formats.hub import commit_of, download, is_local


@dataclass(frozen=True)
class Files:
    """One of AdapterHub's kinds of saved modules: a JSON file and a file of tensors."""

    config: str
    weights: tuple  # names of today and of old
    pattern: re.Pattern  # of a tensor's name
    tensor: str  # the name that is written


# [bert.]encoder.layer.0[.attention].output.adapters.NAME.adapter_up.weight, where old files have
# layer_text_task_adapters or attention_text_task_adapters. `embeddings` has only LAYER_NORM.
SLOT = r"(?:\w+\.)?(?P<slot>embeddings|encoder\.layer\.\d+\.(?:[a-z_]+\.)*[a-z_]+)\."
LISTS = r"(?:adapters|layer_text_task_adapters|attention_text_task_adapters)\."
LAYER_NORM = "adapter_layer_norm"  # a task's own copy of a LayerNorm, which AdapterHub lacks
ADAPTER = Files(
    "adapter_config.json",
    ("adapter.safetensors", "pytorch_adapter.bin"),
    re.compile(SLOT + LISTS + r"(?P<name>.+)\.(?P<part>adapter_\w+(?:\.\d)?\.\w+)"),
    "{model_type}.{slot}.adapters.{name}.{part}",
)
HEAD = Files(
    "head_config.json",
    ("model_head.safetensors", "pytorch_model_head.bin"),
    re.compile(r"(?P<slot>heads)\.(?P<name>.+)\.(?P<part>\d\.\w+)"),
    "{slot}.{name}.{part}",
)
FUSION = Files(
    "adapter_fusion_config.json",
    ("model_adapter_fusion.safetensors", "pytorch_model_adapter_fusion.bin"),
    re.compile(SLOT + r"adapter_fusion_layer\.(?P<name>.+)\.(?P<part>(?:query|key|value)\.\w+)"),
    "{model_type}.{slot}.adapter_fusion_layer.{name}.{part}",
)

# What AdapterHub's bottleneck configuration has beyond the paper's grid, with the values without
# effect
NOT_IN_THE_PAPER = {
    "cross_adapter": False,
    "dropout": 0.0,
    "factorized_phm_W": True,
    "factorized_phm_rule": False,
    "hypercomplex_nonlinearity": "glorot-uniform",
    "init_weights": "bert",
    "init_weights_seed": None,
    "inv_adapter": None,
    "inv_adapter_reduction_factor": None,
    "is_parallel": False,
    "learn_phm": True,
    "phm_bias": True,
    "phm_c_init": "normal",
    "phm_dim": 4,
    "phm_init_range": 0.0001,
    "phm_layer": False,
    "phm_rank": 1,
    "scaling": 1.0,
    "shared_W_phm": False,
    "shared_phm_rule": True,
    "stochastic_depth": 0.0,
    "use_gating": False,
}

# The paper's fusion in the reference's terms. value_before_softmax: V z_n or V Σ s_n z_n, which are
# equal
FUSION_CONFIG = {
    "dropout_prob": None,
    "key": True,
    "query": True,
    "query_before_ln": False,
    "regularization": True,
    "residual_before": False,
    "temperature": False,
    "value": True,
    "value_before_softmax": True,
    "value_initialized": True,
}

# The single-task adapters that the paper's authors published (version "AdapterFusion", reduction
# factor 16), for BERT-base-uncased and RoBERTa-base, called by the task under which they are loaded
# here; inside the files they have other names (glue_mnli). For BERT, those of mnli, qqp, sst2, mrpc
# and rte are not the paper's own: these were released, too, and replaced on 24 August 2020
# (repository adapter-hub/Hub, commits 6780757 and 7fe32f7) by those of the AdapterHub paper, of the
# same architecture. Their heads are BertForSequenceClassification's: the pretrained pooler, which
# is in the encoder's files, and one linear layer.
PAPER_ADAPTERS = {
    "mnli": (
        "AdapterHub/bert-base-uncased_nli_multinli_pfeiffer",
        "AdapterHub/roberta-base-multinli_pfeiffer",
    ),
    "qqp": (
        "AdapterHub/bert-base-uncased_sts_qqp_pfeiffer",
        "AdapterHub/roberta-base-qqp_pfeiffer",
    ),
    "sst2": (
        "AdapterHub/bert-base-uncased_sentiment_sst-2_pfeiffer",
        "AdapterHub/roberta-base-sst_pfeiffer",
    ),
    "winogrande": (
        "AdapterHub/bert-base-uncased-winogrande_pfeiffer",
        "AdapterHub/roberta-base-winogrande_pfeiffer",
    ),
    "imdb": ("AdapterHub/bert-base-uncased-imdb_pfeiffer", "AdapterHub/roberta-base-imdb_pfeiffer"),
    "hellaswag": (
        "AdapterHub/bert-base-uncased-hellaswag_pfeiffer",
        "AdapterHub/roberta-base-hellaswag_pfeiffer",
    ),
    "social_i_qa": (
        "AdapterHub/bert-base-uncased-siqa_pfeiffer",
        "AdapterHub/roberta-base-siqa_pfeiffer",
    ),
    "cosmos_qa": (
        "AdapterHub/bert-base-uncased-cosmosqa_pfeiffer",
        "AdapterHub/roberta-base-cosmosqa_pfeiffer",
    ),
    "scitail": (
        "AdapterHub/bert-base-uncased-scitail_pfeiffer",
        "AdapterHub/roberta-base-scitail_pfeiffer",
    ),
    "argument": (
        "AdapterHub/bert-base-uncased-ukpsent1_pfeiffer",
        "AdapterHub/roberta-base-ukpsent1_pfeiffer",
    ),
    "commonsense_qa": (
        "AdapterHub/bert-base-uncased-csqa_pfeiffer",
        "AdapterHub/roberta-base-csqa_pfeiffer",
    ),
    "boolq": (
        "AdapterHub/bert-base-uncased-boolq_pfeiffer",
        "AdapterHub/roberta-base-boolq_pfeiffer",
    ),
    "mrpc": (
        "AdapterHub/bert-base-uncased_sts_mrpc_pfeiffer",
        "AdapterHub/roberta-base-mrpc_pfeiffer",
    ),
    "sick": ("AdapterHub/bert-base-uncased-sick_pfeiffer", "AdapterHub/roberta-base-sick_pfeiffer"),
    "rte": (
        "AdapterHub/bert-base-uncased_nli_rte_pfeiffer",
        "AdapterHub/roberta-base-rte_pfeiffer",
    ),
    "cb": ("AdapterHub/bert-base-uncased-cb_pfeiffer", "AdapterHub/roberta-base-cb_pfeiffer"),
}


def paper_adapters(model_type):
    """[(task, hub id)] of the paper's 16 adapters for "bert" or "roberta"."""
    return [(task, ids[model_type == "roberta"]) for task, ids in PAPER_ADAPTERS.items()]


def check_name(name, taken=()):
    """Raises ValueError for an adapter's name that cannot be a directory's, a part of a tensor's
    name, or of a fusion's, or that another adapter has already."""
    right = isinstance(name, str) and re.fullmatch(r"[\w@+=-][\w@+= -]{0,99}", name)
    if not right or len(name.encode()) > 200 or hasattr(nn.ModuleDict(), name):
        raise ValueError(
            f"{name!r:.120} cannot be an adapter's name: letters, digits, blanks and _-@+=, at "
            "most 100, no method of ModuleDict"
        )
    if name in taken:
        raise ValueError(f"there is already an adapter called {name!r}")


def check_dropout(p):
    """Raises ValueError for what a file calls a dropout rate and is none."""
    if type(p) not in (int, float) or not 0 <= p < 1:
        raise ValueError(f"dropout_prob must be a number in [0, 1), not {p!r:.50}")


def slot_name(key):
    """(3, "attention") -> encoder.layer.3.attention.output; (None, "embeddings") -> embeddings"""
    layer, location = key
    location = location.removesuffix(".norm")  # of a LayerNorm's copies
    location = {"attention": "attention.output"}.get(location, location)
    return location if layer is None else f"encoder.layer.{layer}.{location}"


def tensors_by_file_name(config, modules):
    """{(slot, part): parameter} of an adapter's modules, [((layer, location), slot, module)], which
    config.tensor_names(module) gives as {name of a part in the file: its name in the module}."""
    return {
        (slot_name(key), theirs): module.get_parameter(ours)
        for key, _, module in modules
        for theirs, ours in config.tensor_names(module).items()
    }


def fusion_tensors_by_file_name(found):
    """The same of {(layer, location): fusion}, whose parts have the names in the file."""
    return {
        (slot_name(key), part): parameter
        for key, fusion in found.items()
        for part, parameter in fusion.named_parameters()
    }


def header(name, config, source):
    """The fields beside "config" in all of AdapterHub's JSON files. config: the encoder's; source:
    its name."""
    return {
        "hidden_size": config.hidden_size,
        "model_class": {"bert": "Bert", "roberta": "Roberta"}[config.model_type] + "AdapterModel",
        "model_name": source or "",
        "model_type": config.model_type,
        "name": name,
        # of the format; without it "gelu" is read as its tanh approximation
        "version": "adapters.1.3.0",
    }


# --------------------------------------------------------------------------------------------------
# What a configuration may be


def check_layers(leave_out):
    """Raises ValueError for what is no list of layers."""
    if not isinstance(leave_out, (list, tuple)) or any(
        type(layer) is not int for layer in leave_out
    ):
        raise ValueError(f"leave_out must be a list of layers, not {leave_out!r:.50}")


def check_bottleneck(config, non_linearities):
    """Raises ValueError, naming the field, for a bottleneck adapter's configuration that has no
    meaning."""
    for field in fields(config):
        if field.type is bool and type(getattr(config, field.name)) is not bool:
            raise ValueError(
                f"{field.name} must be true or false, not {getattr(config, field.name)!r:.50}"
            )
    if not (config.mh_adapter or config.output_adapter):
        raise ValueError(
            "an adapter without mh_adapter and output_adapter has no place in the encoder"
        )
    if config.non_linearity not in list(non_linearities):
        raise ValueError(
            f"non_linearity {config.non_linearity!r:.50} is not one of {', '.join(non_linearities)}"
        )
    if config.residual_before_ln not in (True, False, "post_add"):
        raise ValueError(
            f"residual_before_ln {config.residual_before_ln!r:.50} is not true, false or 'post_add'"
        )
    if config.residual_before_ln == "post_add" and not config.original_ln_before:
        raise ValueError(
            "residual_before_ln 'post_add' is the input of original_ln_before, which is off"
        )
    by_layer = isinstance(config.reduction_factor, Mapping)
    for factor in config.reduction_factor.values() if by_layer else [config.reduction_factor]:
        # a file may ask for any size
        if type(factor) not in (int, float) or not 0.1 <= factor < math.inf:
            raise ValueError(
                f"reduction_factor must be a number of at least 0.1, not {factor!r:.50}"
            )
    check_layers(config.leave_out)


def factor_of_layer(factor, layer):
    """The reduction factor of a layer, where {"0": 2, "default": 16} gives it by layer. Raises
    ValueError."""
    if not isinstance(factor, Mapping):
        return factor
    if (found := factor.get(str(layer), factor.get("default"))) is None:
        raise ValueError(f"reduction_factor has neither layer {layer} nor a default")
    return found


def without_effect(config):
    """{field: why} of those that change nothing here. They are harmless in a file; to ask for them
    is a mistake."""
    reasons = {}
    if not hasattr(config, "original_ln_before"):  # of another kind
        return reasons
    if not (config.residual_before_ln or config.original_ln_before):
        reasons["residual_before_ln"] = (
            "residual_before_ln=false takes LN(f + x), which original_ln_before=false leaves out"
        )
    if config.adapter_residual_before_ln and not config.ln_after:
        reasons["adapter_residual_before_ln"] = (
            "adapter_residual_before_ln=true needs the new LayerNorm of ln_after=true"
        )
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
    return {
        f"{theirs}.{kind}": f"{ours}.{kind}"
        for theirs, ours in names.items()
        for kind in ("weight", "bias")
    }


def check_fused(names, there):
    """Raises ValueError for names of adapters that cannot be a fusion's; there: of those loaded."""
    if not names or len(set(names)) < len(names):
        raise ValueError(f"a fusion needs at least one adapter, and each of them once, not {names}")
    if missing := [name for name in names if name not in there]:
        raise ValueError(f"adapter {missing[0]!r} is to be fused, but has not been loaded")


def check_fusion(configs):
    """Raises ValueError if adapters cannot be fused with each other; configs: {name:
    configuration}."""
    for field in ("mh_adapter", "output_adapter"):
        values = {name: getattr(config, field, None) for name, config in configs.items()}
        if len(set(values.values()) - {None}) > 1:
            raise ValueError(
                f"adapters at different locations cannot be fused: {field} is "
                + ", ".join(f"{value} in {name}" for name, value in values.items())
            )
    for config in configs.values():
        if config.no_fusion:
            names = [name for name, other in configs.items() if other.no_fusion == config.no_fusion]
            raise ValueError(f"{config.no_fusion}: {', '.join(names)}")
    if len({config.architecture for config in configs.values()}) > 1:
        kinds = ", ".join(
            f"{name} ({c.architecture or 'bottleneck'})" for name, c in configs.items()
        )
        raise ValueError(f"adapters of one kind cannot be fused with other adapters: {kinds}")


def head_config(config):
    """A head's configuration, complete. Raises ValueError for a head that this project does not
    implement."""
    config = {"activation_function": "tanh", "dropout_prob": None, "use_pooler": False, **config}
    if config.get("head_type") not in ("classification", "multiple_choice"):
        kind = config.get("head_type")
        raise ValueError(
            f"head_type {kind!r:.50} is not supported, only classification and multiple_choice"
        )
    if config["head_type"] == "classification":  # the other kind has no such field
        config.setdefault("bias", True)
    supported = {"layers": (1, 2), "use_pooler": (False, True), "bias": (True, None)}
    if config.get("layers") != 1:
        supported["activation_function"] = ("tanh",)
    for field, values in supported.items():
        if config.get(field) not in values:
            raise ValueError(
                f"a head with {field} = {config.get(field)!r:.50} is not supported, only "
                f"{' or '.join(map(str, values))}"
            )
    outputs = head_outputs(config)
    if type(outputs) is not int or not 0 < outputs < 100_000:
        raise ValueError("a head needs num_labels or num_choices")
    if config["dropout_prob"] is not None:
        check_dropout(config["dropout_prob"])
    return config


def head_outputs(config):
    """K: how many labels or choices a head is for, None where its configuration does not say."""
    return config.get("num_labels") or config.get("num_choices")


def head_layers(config, encoder):
    """The layers of a head, as their places in this nn.Sequential number the tensors in its file.
    config: the head's, complete; encoder: the configuration of the encoder, for d and defaults."""
    p = config["dropout_prob"]
    for default in (encoder.classifier_dropout, encoder.hidden_dropout_prob):
        p = default if p is None else p
    d = encoder.hidden_size
    # each choice is scored by itself
    outputs = 1 if config["head_type"] == "multiple_choice" else head_outputs(config)
    layers = [nn.Dropout(p), nn.Linear(d, outputs)]
    if config["layers"] == 2:
        layers = [nn.Dropout(p), nn.Linear(d, d), nn.Tanh(), *layers]
    for layer in layers:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=encoder.initializer_range)
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


# --------------------------------------------------------------------------------------------------
# Reading


def fetch(source, files=ADAPTER):
    """Directory of an adapter (head, fusion): `source` itself, or the files of a hub id. Raises
    FileNotFoundError."""
    if Path(source).is_dir():
        if not (Path(source) / files.config).is_file():
            path = Path(source) / "config.json"
            stage = read_json(path).get("stage") if path.is_file() else None
            if stage == "multitask" and files is ADAPTER:
                why = f", but a multi-task run's adapters are in {source}/adapters"
            elif (Path(source) / "seeds.json").is_file():
                why = f": it holds a run for each seed, as {source}/seed-0"
            elif stage:
                why = f", it is a run of --stage {stage}: leave it out"
            else:
                why = ", so it holds no adapter: leave it out" if files is ADAPTER else ""
            raise FileNotFoundError(f"{source} has no {files.config}{why}")
        return Path(source)
    if files is ADAPTER and is_local(source):
        if os.path.exists(source):
            raise FileNotFoundError(f"{source} is no directory, as an adapter is")
        task = Path(source).name
        raise FileNotFoundError(
            f"there is no directory {str(source)!r}: if it is to be the run on {task!r:.50}, train "
            f"it with --stage adapter --task {shlex.quote(task):.50}"
        )
    config = download(source, files.config)
    if config is None:
        raise FileNotFoundError(f"hub repository {source} has no {files.config}")
    if not any(download(source, name, revision=commit_of(config)) for name in files.weights):
        raise FileNotFoundError(
            f"hub repository {source} has neither {' nor '.join(files.weights)}"
        )
    return config.parent


@dataclass
class Saved:
    """A saved adapter, head or fusion, read and checked as far as can be told without an
    encoder."""

    directory: Path
    name: str  # what to call it
    config: object
    values: dict  # the whole JSON object
    path: Path  # of its tensors
    tensors: dict  # {(slot, part): tensor}

    def check_encoder(self, config):
        """Raises ValueError if the file is for another kind of encoder."""
        for field in ("hidden_size", "model_type"):
            ours = getattr(config, field)
            if self.values.get(field, ours) != ours:
                raise ValueError(
                    f"an adapter for {field} {self.values[field]!r:.50}, the encoder has {ours!r}"
                )

    def fill(self, parameters, without=()):
        """
        Copies the tensors into {(slot, part): parameter}. Nothing is changed unless everything
        fits. A parameter that has two names may be stored under one of them; without: slots whose
        tensors need no parameter. Raises ValueError for a tensor that is missing, misshapen, not
        finite, or without a parameter.
        """
        fitting = []
        for key, parameter in parameters.items():
            tensor, name = self.tensors.get(key), ".".join(key)
            if tensor is None:
                if any(p is parameter and k in self.tensors for k, p in parameters.items()):
                    continue
                raise ValueError(f"{self.path}: {name} is missing")
            if tensor.shape != parameter.shape or not tensor.is_floating_point():
                shown = (
                    f"{tensor.dtype} {list(tensor.shape)}, here it must be a float "
                    f"{list(parameter.shape)}"
                )
                raise ValueError(f"{self.path}: {name} is {shown}")
            tensor = tensor.to(parameter.dtype)  # float8 knows no isfinite
            if not tensor.isfinite().all():
                raise ValueError(f"{self.path}: {name} holds values that are not finite")
            fitting.append((parameter, tensor))
        if rest := [
            ".".join(key) for key in self.tensors if key not in parameters and key[0] not in without
        ]:
            raise ValueError(f"{self.path}: tensors without a place here: {listed(rest)}")
        with torch.no_grad():
            for parameter, tensor in fitting:
                parameter.copy_(tensor)


def read_adapter(source, kinds, name=None):
    """The Saved adapter at `source`, a directory or a hub id; see `read_adapter_config`."""
    directory = fetch(source)
    name, config, values = read_adapter_config(directory, kinds, name)
    return Saved(directory, name, config, values, *read(directory, ADAPTER, values.get("name")))


def read_head(source):
    """The Saved head at `source`, a directory or a hub id."""
    directory = fetch(source, HEAD)
    path = directory / HEAD.config
    values = read_json(path)
    config = values.get("config")
    with error_prefix(path):
        config = head_config(config if isinstance(config, dict) else {})
    name = values.get("name")
    return Saved(directory, name, config, values, *read(directory, HEAD, name))


def read_fusion(source, kinds):
    """
    (Saved fusion, names of its adapters, kind, dropout or None) at `source`, a directory or a hub
    id.

    kinds: fusion classes, of which the one is taken whose `options` the file has. Raises
    ValueError.
    """
    directory = fetch(source, FUSION)
    path = directory / FUSION.config
    values = read_json(path)
    config, names = values.get("config"), values.get("adapter_names") or values.get("name")
    names = names.split(",") if isinstance(names, str) else names  # old files have only the name
    right = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not isinstance(config, dict) or not right:
        raise ValueError(f"{path}: not the configuration of a fusion")
    unlike = [different_options(config, kind.options) for kind in kinds]
    if all(unlike):  # as it is unlike the first, the paper's own; static fusion has no value
        field = unlike[0][0]
        raise ValueError(
            f"{path}: a fusion with {field} = {config.get(field)!r:.50} is not supported"
        )
    if config.get("dropout_prob") is not None:
        check_dropout(config["dropout_prob"])
    name = values.get("name")
    saved = Saved(directory, name, config, values, *read(directory, FUSION, name))
    return saved, names, kinds[unlike.index([])], config.get("dropout_prob")


def different_options(config, options):
    """Fields in which a saved fusion computes something else than one of a kind with `options`."""
    changes = ("query", "key", "value", "query_before_ln", "residual_before", "temperature", "kind")
    expected = {**FUSION_CONFIG, **options}
    return [
        field
        for field in changes
        if config.get(field, FUSION_CONFIG.get(field)) != expected.get(field)
    ]


def read_adapter_config(directory, kinds, name=None):
    """
    (name, configuration, the whole JSON object) of an adapter directory.

    kinds: {architecture: dataclass of its fields}, where None stands for bottleneck adapters; name:
    what to call it, else the file's own. Raises ValueError for what this project does not
    implement, by name.
    """
    path = Path(directory) / ADAPTER.config
    values = read_json(path)
    options = values.get("config")
    if not isinstance(options, dict):
        raise ValueError(f"{path}: no 'config' object: not a bottleneck adapter of AdapterHub")
    architecture = options.get("architecture") or None
    if architecture not in list(kinds):
        raise ValueError(
            f"{path}: only bottleneck adapters are supported, and this is of the kind "
            f"{architecture!r:.50}"
        )
    kind = kinds[architecture]
    if issubclass(kind, kinds[None]):
        options = bottleneck_options(path, values, options)
    known = {field.name for field in fields(kind)}
    try:
        config = kind(**{key: value for key, value in options.items() if key in known})
        name = values.get("name") if name is None else name
        check_name(name)
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from e
    return name, config, values


def bottleneck_options(path, values, options):
    """A file's options with what the reference assumes where it does not say, under today's
    names."""
    required = ("mh_adapter", "output_adapter", "reduction_factor", "non_linearity")
    if lacks := [field for field in required if field not in options]:
        raise ValueError(
            f"{path}: only bottleneck adapters are supported, this is one without {listed(lacks)}"
        )
    # what changes a saved adapter's output; inv_adapter does only if the file has its weights:
    # `read` refuses them
    for field in ("is_parallel", "phm_layer", "scaling", "use_gating", "cross_adapter"):
        if options.get(field, NOT_IN_THE_PAPER[field]) != NOT_IN_THE_PAPER[field]:
            raise ValueError(f"{path}: {field} = {options[field]!r:.50} is not supported")
    options = {"original_ln_before": False, "leave_out": (), **options}
    options["leave_out"] = options["leave_out"] or ()
    options["non_linearity"] = str(options["non_linearity"]).lower()
    if "version" not in values:  # then "gelu" is gelu_new
        old = {"gelu": "gelu_new", "gelu_orig": "gelu"}
        options["non_linearity"] = old.get(options["non_linearity"], options["non_linearity"])
    # of no effect on a saved adapter
    if options.get("init_weights") not in ("bert", "houlsby", "houlsby_code"):
        options.pop("init_weights", None)
    return options


def read(directory, files, name):
    """
    (path, {(slot, part): tensor}) of what is called `name` in the first of files.weights that is in
    `directory`.

    Alone there, it may be called anything. It need not be alone: the reference writes a head
    (fusion) "rte2" also into the file of one called "rte". Raises FileNotFoundError without a file,
    ValueError for a tensor that does not belong.
    """
    path = next(
        (Path(directory) / file for file in files.weights if (Path(directory) / file).is_file()),
        None,
    )
    if path is None:
        raise FileNotFoundError(
            f"no weights in {directory}: it has neither {' nor '.join(files.weights)}"
        )
    found = {}
    for key, tensor in read_tensors(path).items():
        match = files.pattern.fullmatch(key)
        if match is None:  # for instance an invertible adapter's
            raise ValueError(f"{path}: {listed([key])} has no place here, not supported")
        if (
            found.setdefault(match["name"], {}).setdefault((match["slot"], match["part"]), tensor)
            is not tensor
        ):
            raise ValueError(f"{path}: {listed([key])} is there twice, under an old and a new name")
    if not found:  # a kind of fusion may have no parameters; of another, `fill` misses them
        return path, {}
    if str(name) not in found and len(found) > 1:
        raise ValueError(f"{path}: it holds {listed(list(found))}, not {name!r:.50}")
    return path, found[str(name)] if str(name) in found else found.popitem()[1]


def check_encoder(source, directory, values, model, digest, allow=False):
    """
    Raises ValueError if a saved adapter was trained on another encoder than `model`, whose weights
    have this digest, unless that is allowed. The config.json of the run that it is from knows the
    digest. An adapter without a run has only its encoder's name, which says little where `model` is
    a directory: then another name is a note.
    """
    trained_on, theirs = Path(str(values.get("model_name") or model)).name, run_encoder(directory)
    if theirs is not None and theirs != digest:
        problem = f"{source} was trained on an encoder with other weights than {model}"
    elif theirs is None and trained_on != Path(model).name:
        problem = f"{source} was trained on {trained_on!r:.100}, not on {model}"
        allow = allow or Path(model).is_dir()
    else:
        return
    refuse_or_note(problem, allow)


def refuse_or_note(problem, allow):
    """What happens where an encoder is not the one of the training."""
    if not allow:
        raise ValueError(f"{problem}: --allow-other-encoder takes it all the same")
    print(f"note: {problem}")


def find_adapters(sources, kinds, encoder, model, digest, allow_other_encoder=False):
    """
    {name: directory} of saved adapters that are to be fused. sources: directories, hub ids, pairs
    (name, directory), or "paper" for its authors' 16; encoder: its configuration, model: its name,
    digest: that of its weights. Raises ValueError if two have the same name, or if one was trained
    on another encoder; FileNotFoundError for one that is not there.
    """
    named, found = [], {}
    for source in sources:
        if source == "paper":
            named += paper_adapters(encoder.model_type)
        else:
            named.append(source if isinstance(source, tuple) else (None, source))
    for name, source in named:
        directory = fetch(source)
        name, _, values = read_adapter_config(directory, kinds, name)
        for other in found:  # rte and RTE are one name to some file systems
            if other.lower() == name.lower():
                both = f"{found[other]} and {directory}"
                raise ValueError(f"two adapters are called {name!r}: {both}")
        check_encoder(source, directory, values, model, digest, allow_other_encoder)
        found[name] = directory
    return found


def encoder_of(sources):
    """The encoder that the runs among `sources` have recorded; None if none has. Raises ValueError
    if they differ."""
    models = {}
    for source in sources:
        path = Path(source) / "config.json"
        if path.is_file() and isinstance(model := read_json(path).get("model"), str):
            models.setdefault(model, source)
    if len(models) > 1:
        found = ", ".join(f"{source} on {model}" for model, source in models.items())
        raise ValueError(f"--adapters were trained on different encoders ({found}): add --model")
    return next(iter(models), None)


def digest(directory, kinds):
    """SHA-256 of a saved adapter: its configuration and tensors, whatever its name and its kind of
    file."""
    saved = read_adapter(directory, kinds)
    result = hashlib.sha256(repr(saved.config).encode())
    for key, tensor in sorted(saved.tensors.items()):
        result.update(repr(key).encode() + tensor.float().numpy().tobytes())
    return result.hexdigest()


def run_encoder(directory):
    """The digest of the encoder that a run's adapters belong to, from the directory of the run, or
    of an adapter in it: the one it was trained on, or for multi-task training, which changes the
    encoder, the one it ended with. None where no run says."""
    name, places = Path(directory).name, [Path(directory), Path(directory).parent.parent]
    if Path(directory).parent.name != "adapters":
        places.pop()
    for path in (place / "config.json" for place in places):
        config = read_json(path) if path.is_file() else {}
        if name in config.get(
            "adapter_encoders", ()
        ):  # a fusion's copies, also those of --allow-other-encoder
            return config["adapter_encoders"][name]
        if config.get("stage") in ("adapter", "fusion"):
            return config.get("encoder_sha256")
        if config.get("stage") == "multitask":
            return config.get("weights_sha256")
    return None


# --------------------------------------------------------------------------------------------------
# Writing


def write(directory, files, config, tensors, values):
    """Writes one kind of `files`: its options, {(slot, part): tensor} as fp32, and what `header`
    gives."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    names = {"model_type": values["model_type"], "name": values["name"]}
    write_tensors(
        directory / files.weights[0],
        {
            files.tensor.format(slot=slot, part=part, **names): tensor
            for (slot, part), tensor in tensors.items()
        },
    )
    write_json(directory / files.config, {"config": config, **values})


def write_adapter(directory, config, tensors, values):
    """`write` of an adapter from its configuration, a dataclass; architecture None: a bottleneck
    adapter."""
    options = {field.name: getattr(config, field.name) for field in fields(config)}
    other = (
        NOT_IN_THE_PAPER if config.architecture is None else {"architecture": config.architecture}
    )
    if options.get("layer_norms") is False:  # the library has no such field
        del options["layer_norms"]
    if isinstance(options.get("leave_out"), tuple):
        options["leave_out"] = list(options["leave_out"])
    write(directory, ADAPTER, dict(sorted({**other, **options}.items())), tensors, values)


def write_head(directory, config, tensors, values):
    """`write` of a head; tensors: {part: tensor}, all of them in the one slot that heads have."""
    write(directory, HEAD, config, {("heads", part): t for part, t in tensors.items()}, values)


def write_fusion(directory, options, tensors, values):
    """`write` of a fusion; options: in which its kind differs from the paper's, None for one that
    has been folded. Raises ValueError for that."""
    if options is None:
        raise ValueError("a folded fusion cannot be saved: save the one that it was folded from")
    config = {"adapter_names": values["name"].split(","), **values}
    write(directory, FUSION, {**FUSION_CONFIG, **options}, tensors, config)


def copy_adapters(sources, kinds, directory, config):
    """Writes saved adapters, {name: directory}, into `directory`/NAME, as fp32, in today's
    format and under these names. config: their encoder's."""
    for name, path in sources.items():
        saved = read_adapter(path, kinds, name)
        values = header(name, config, str(saved.values.get("model_name", "")))
        write_adapter(Path(directory) / name, saved.config, saved.tensors, values)
