"""AdapterHub's files (the `adapters` library, version 1.3): adapters, prediction heads and fusions.

Each is a name, options (a JSON object) and tensors, {(slot, part): tensor}, such as
("encoder.layer.3.output", "adapter_up.weight"). What modules they become is not known here.
"""

import csv
import hashlib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from formats.files import error_prefix, listed, read_json, read_tensors, write_json, write_tensors
from formats.hub import download


@dataclass(frozen=True)
class Files:
    """The files of a saved adapter, head or fusion: a JSON file and a file of tensors."""

    config: str
    weights: tuple  # their names of today and of old
    pattern: str  # of a tensor's name
    tensor: str  # the name that is written


# [bert.]encoder.layer.0[.attention].output.adapters.NAME.adapter_up.weight, where old files have
# layer_text_task_adapters or attention_text_task_adapters. What sits in the embeddings is our own.
SLOT = r"(?:\w+\.)?(?P<slot>(?:embeddings|encoder\.layer\.\d+)(?:\.[a-z_]+)*)\."
LISTS = r"(?:adapters|layer_text_task_adapters|attention_text_task_adapters)\."
NAME = r"(?P<name>[^.]+)\."  # PyTorch allows no full stop there
PART = r"(?P<part>\w+(?:\.\w+)*)"
ADAPTER = Files(
    "adapter_config.json",
    ("adapter.safetensors", "pytorch_adapter.bin"),
    SLOT + LISTS + NAME + PART,
    "{model_type}.{slot}.adapters.{name}.{part}",
)
HEAD = Files(
    "head_config.json",
    ("model_head.safetensors", "pytorch_model_head.bin"),
    r"(?P<slot>heads)\." + NAME + PART,
    "{slot}.{name}.{part}",
)
FUSION = Files(
    "adapter_fusion_config.json",
    ("model_adapter_fusion.safetensors", "pytorch_model_adapter_fusion.bin"),
    SLOT + r"adapter_fusion_layer\." + NAME + PART,
    "{model_type}.{slot}.adapter_fusion_layer.{name}.{part}",
)

# What AdapterHub's bottleneck configuration has beyond the paper's grid, where it has no effect;
# and the paper's fusion in its terms
DEFAULTS = read_json(Path(__file__).with_name("adapterhub.json"))
NOT_IN_THE_PAPER, FUSION_CONFIG = DEFAULTS["adapter"], DEFAULTS["fusion"]
# Fields of a fusion that may differ and change nothing (value_before_softmax: V z_n or V Σ s_n z_n)
SAME_FUNCTION = ("dropout_prob", "regularization", "value_before_softmax", "value_initialized")

# of the reference library, which has none for other encoders
MODEL_CLASSES = {"bert": "BertAdapterModel", "roberta": "RobertaAdapterModel"}


def paper_adapters(model_type):
    """
    {task: hub id} of the 16 single-task adapters that the paper's authors published (reduction
    factor 16), for BERT-base-uncased ("bert") and RoBERTa-base ("roberta"). For BERT, those of
    mnli, qqp, sst2, mrpc and rte were replaced in August 2020 by those of the AdapterHub paper, of
    the same architecture, whose heads are the pretrained pooler and one linear layer.
    """
    if model_type not in MODEL_CLASSES:
        known = " and ".join(MODEL_CLASSES)
        raise ValueError(f"the paper's adapters are for {known}, none of them for {model_type}")
    with open(Path(__file__).with_name("paper_adapters.csv"), encoding="utf-8") as file:
        return {row["task"]: row[model_type] for row in csv.DictReader(file)}


def check_name(name):
    """Raises ValueError for an adapter's name that cannot be a directory's, a part of a tensor's
    name, or of a fusion's."""
    right = isinstance(name, str) and re.fullmatch(r"[\w@+=-][\w@+= -]{0,99}", name)
    if not right or hasattr(torch.nn.ModuleDict(), name):
        rule = "letters, digits, blanks and _-@+=, at most 100, no method of ModuleDict"
        advice = "NAME=DIR gives a saved one another name"
        raise ValueError(f"{name!r:.120} cannot be an adapter's name: {rule}; {advice}")


# --------------------------------------------------------------------------------------------------
# Names and fields


def slot_path(key):
    """(3, "attention") -> encoder.layer.3.attention.output; (None, "embeddings.norm") -> the same
    without the layer"""
    layer, location = key
    location = {"attention": "attention.output"}.get(location, location)
    return location if layer is None else f"encoder.layer.{layer}.{location}"


def parameter_names(name, has_norm_before):
    """What a file calls a parameter of a bottleneck adapter; any other keeps its name. With a
    LayerNorm before it, its adapter_down is (norm, linear, activation), otherwise (linear,
    activation), and that LayerNorm is stored twice."""
    module, _, part = name.rpartition(".")
    theirs = {
        "down": [f"adapter_down.{int(has_norm_before)}"],
        "up": ["adapter_up"],
        "norm_before": ["adapter_down.0", "adapter_norm_before"],
        "norm_after": ["adapter_norm_after"],
    }
    return [f"{other}.{part}" for other in theirs.get(module, [])] or [name]


def bottleneck_options(options, metadata):
    """The paper's fields of a saved bottleneck adapter, with what the reference assumes where the
    file does not say. Raises ValueError, naming the field, for what is not implemented here."""
    for field in ("mh_adapter", "output_adapter", "reduction_factor", "non_linearity"):
        if field not in options:
            raise ValueError(f"only bottleneck adapters are supported: this one has no {field}")
    # What changes a saved adapter's output. The weights of an inv_adapter are refused by `read`.
    for field in ("is_parallel", "phm_layer", "scaling", "use_gating", "cross_adapter"):
        if options.get(field, NOT_IN_THE_PAPER[field]) != NOT_IN_THE_PAPER[field]:
            raise ValueError(f"{field} = {options[field]!r:.50} is not supported")
    options = {"original_ln_before": False, **options}
    options["leave_out"] = list(options.get("leave_out") or ())
    options["non_linearity"] = str(options["non_linearity"]).lower()
    if "version" not in metadata:  # then "gelu" is gelu_new
        old = {"gelu": "gelu_new", "gelu_orig": "gelu"}
        options["non_linearity"] = old.get(options["non_linearity"], options["non_linearity"])
    return {field: v for field, v in options.items() if field not in NOT_IN_THE_PAPER}


def check_fusion(options):
    """Raises ValueError for a saved fusion that is another function than the paper's."""
    for field, value in options.items():
        if field not in SAME_FUNCTION and (field, value) not in FUSION_CONFIG.items():
            raise ValueError(f"a fusion with {field} = {value!r:.50} is not supported")


def head_options(config):
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


@dataclass
class Saved:
    """A saved adapter, head or fusion."""

    directory: Path
    config_path: Path
    weights_path: Path
    metadata: dict  # the whole JSON object
    tensors: dict  # {(slot, part): tensor}

    @property
    def options(self):
        return self.metadata["config"]

    @property
    def name(self):
        return self.metadata.get("name")

    @property
    def adapter_names(self):
        """Of a fusion; its own name is all that old files have."""
        names = self.metadata.get("adapter_names") or self.name
        return names.split(",") if isinstance(names, str) else names

    def check_encoder(self, bert, run):
        """Raises ValueError if the file is for another encoder than `bert`: of another kind, size,
        or SHA-256 in its run.json, `run`. Without one, and where the encoder is a local directory,
        its name says little, and another name is only noted."""
        if bert.sha256 and run.get("encoder", bert.sha256) != bert.sha256:
            raise ValueError(f"it was trained on an encoder with other weights than {bert.source}")
        trained_on = Path(str(self.metadata.get("model_name") or bert.source)).name
        if not run and bert.source and trained_on != Path(bert.source).name:
            problem = f"made for {trained_on!r:.100}, the encoder is {bert.source}"
            if not Path(bert.source).is_dir():
                raise ValueError(problem)
            print(f"note: {self.config_path} was {problem}")
        for field in ("hidden_size", "model_type"):
            ours = getattr(bert.config, field)
            if self.metadata.get(field, ours) != ours:
                theirs = f"{field} {self.metadata[field]!r:.50}"
                raise ValueError(f"made for {theirs}, the encoder has {ours!r}")

    def copy_into(self, parameters, without=()):
        """Copies the tensors into {(slot, part): parameter}. A parameter that has two names may be
        stored under one of them; without: slots whose tensors need no parameter."""
        stored = {key: p for key, p in parameters.items() if key in self.tensors}
        found = {id(p) for p in stored.values()}
        with error_prefix(self.weights_path), torch.no_grad():
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

    def sha256(self):
        """Of the tensors, whatever the adapter's name and its kind of file."""
        result = hashlib.sha256()
        for key, tensor in sorted(self.tensors.items()):
            result.update(repr(key).encode() + tensor.float().numpy().tobytes())
        return result.hexdigest()


def read(source, files):
    """What is Saved at `source`, a directory or a hub id, with the tensors in the first of
    files.weights that exists. Alone there, they may have any name; but the reference writes a head
    (fusion) "rte2" also into the file of one called "rte". Raises FileNotFoundError, or ValueError
    that names the file."""
    directory = Path(source)
    if not directory.is_dir():
        directory = download(source, "run.json", files.config, *files.weights)
    config_path = directory / files.config
    if not config_path.is_file():
        raise FileNotFoundError(f"{source} has no {files.config}")
    metadata = read_json(config_path)
    if not isinstance(metadata.get("config"), dict):
        raise ValueError(f"{config_path}: no 'config' object, as AdapterHub's files have it")
    paths = [directory / name for name in files.weights if (directory / name).is_file()]
    if not paths:
        missing = " nor ".join(files.weights)
        raise FileNotFoundError(f"no weights in {directory}: it has neither {missing}")
    by_name, inside = {}, str(metadata.get("name"))
    with error_prefix(paths[0]):
        for key, tensor in read_tensors(paths[0]).items():
            match = re.fullmatch(files.pattern, key)
            if match is None:  # for instance an invertible adapter's
                raise ValueError(f"{key} has no place here, not supported")
            slot, part, name = match.group("slot", "part", "name")
            by_name.setdefault(name, {})[slot, part] = tensor
        if inside not in by_name and len(by_name) > 1:
            raise ValueError(f"it holds {listed(list(by_name))}, not {inside!r:.50}")
    # without any: a kind of fusion may have no parameters; if it has, `copy_into` misses them
    tensors = by_name.get(inside) or next(iter(by_name.values()), {})
    return Saved(directory, config_path, paths[0], metadata, tensors)


# --------------------------------------------------------------------------------------------------
# Writing


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


def write(directory, files, options, tensors, metadata):
    """Writes one kind of `files`: its options, {(slot, part): tensor} as fp32, and what `header`
    gives."""
    named = {}
    for (slot, part), tensor in tensors.items():
        names = {"slot": slot, "part": part, **metadata}
        named[files.tensor.format(**names)] = tensor
    Path(directory).mkdir(parents=True, exist_ok=True)
    write_tensors(Path(directory) / files.weights[0], named)
    write_json(Path(directory) / files.config, {"config": options, **metadata})


def write_adapter(directory, options, tensors, metadata):
    """`write` of an adapter, with the fields that the library expects of a bottleneck adapter."""
    if "architecture" not in options:
        options = {**NOT_IN_THE_PAPER, **options}
    write(directory, ADAPTER, dict(sorted(options.items())), tensors, metadata)


def copy(source, name, directory):
    """Writes a saved adapter again, as it is but for its name, its precision (fp32) and the names
    of its files, with the run.json of the run that trained it."""
    saved = read(source, ADAPTER)
    write(directory, ADAPTER, saved.options, saved.tensors, {**saved.metadata, "name": name})
    if (saved.directory / "run.json").is_file():
        shutil.copyfile(saved.directory / "run.json", Path(directory) / "run.json")
