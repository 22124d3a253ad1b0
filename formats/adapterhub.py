"""AdapterHub's files (the `adapters` library, version 1.3) of adapters, heads and fusions: a name,
options (a JSON object) and tensors, {(slot, part): tensor}, such as ("encoder.layer.3.output",
"adapter_up.weight"). What modules they become is not known here."""

import math
import re
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

import torch

from formats import files
from formats.encoder import sha256_of
from formats.hub import download

# JSON; tensors, a file's name of today and that of old; what is behind a slot in a tensor's name
Files = namedtuple("Files", "config weights word")
ADAPTER = Files("adapter_config.json", ("adapter.safetensors", "pytorch_adapter.bin"), ".adapters")
HEAD = Files("head_config.json", ("model_head.safetensors", "pytorch_model_head.bin"), "")
OF_FUSION = ("model_adapter_fusion.safetensors", "pytorch_model_adapter_fusion.bin")
FUSION = Files("adapter_fusion_config.json", OF_FUSION, ".adapter_fusion_layer")
# [bert.]encoder.layer.0[.attention].output.adapters.NAME.adapter_up.weight, or an old word
SLOT = r"(?:\w+\.)?((?:embeddings|encoder\.layer\.\d+)(?:\.[a-z_]+)*)"
WORD = r"(?:adapters|layer_text_task_adapters|attention_text_task_adapters|adapter_fusion_layer)"
TENSOR = re.compile(rf"(?:{SLOT}\.{WORD}|(heads))\.([^.]+)\.(\w+(?:\.\w+)*)")

# What AdapterHub's adapters have beyond the paper's grid, without effect; the paper's fusion
DEFAULTS = files.read_json(Path(__file__).with_name("adapterhub.json"))
NOT_IN_THE_PAPER, FUSION_CONFIG = DEFAULTS["adapter"], DEFAULTS["fusion"]
GRID_FIELDS = DEFAULTS["grid"]  # the names of the other fields
YES_OR_NO = """mh_adapter output_adapter original_ln_before original_ln_after ln_before ln_after
    adapter_residual_before_ln""".split()  # of these
# Fields of a fusion that may differ and change nothing (value_before_softmax: V z_n or V Σ s_n z_n)
SAME_FUNCTION = ("dropout_prob", "regularization", "value_before_softmax", "value_initialized")
# What a bottleneck adapter's parts are called there, and in adapter.py. With a LayerNorm before it,
# adapter_down is (norm, linear, activation), not (linear, activation), and the norm is there twice.
NAMES = [("adapter_down.0", "down"), ("adapter_up", "up"), ("adapter_norm_after", "norm_after")]
NAMES_WITH_NORM_BEFORE = [("adapter_down.0", "norm_before"), ("adapter_norm_before", "norm_before")]
NAMES_WITH_NORM_BEFORE += [("adapter_down.1", "down"), *NAMES[1:]]
MODEL_CLASSES = {"bert": "BertAdapterModel", "roberta": "RobertaAdapterModel"}  # of the library


def paper_adapters(model_type):
    """{task: hub id} of the authors' 16 adapters (docs/adapterhub.md)"""
    if model_type not in DEFAULTS["paper"]:
        raise ValueError(f"the paper's adapters are for bert and roberta, not for {model_type}")
    return DEFAULTS["paper"][model_type]


def check_name(name):
    """Raises ValueError for what no directory, part of a tensor's name or fusion can be called."""
    right = isinstance(name, str) and re.fullmatch(r"[\w@+=-][\w@+= -]{0,99}", name)
    if not right or hasattr(torch.nn.ModuleDict(), name):
        rule = "up to 100 letters, digits, blanks, _-@+=, and no method of PyTorch's, like 'half'"
        raise ValueError(f"{name!r:.120} cannot be an adapter's name, nor its task's: {rule}")


def whole_id(name):
    """roberta-base -> FacebookAI/roberta-base, as the hub has it since 2024; others as they are"""
    owner = {"bert": "google-bert", "roberta": "FacebookAI"}.get(name.split("-")[0])
    return f"{owner}/{name}" if owner and "/" not in name else name


def slot_path(key):
    """(3, "attention") -> encoder.layer.3.attention.output; (None, "a.b"), of no layer -> a.b"""
    layer, location = key
    location = "attention.output" if location == "attention" else location
    return location if layer is None else f"encoder.layer.{layer}.{location}"


def bottleneck_options(options, metadata):
    """The paper's fields of a saved adapter. Raises ValueError naming one that is not supported."""
    # What changes a saved adapter's output. The weights of an inv_adapter are refused by `read`.
    for field in ("is_parallel", "phm_layer", "scaling", "use_gating", "cross_adapter"):
        if options.get(field, NOT_IN_THE_PAPER[field]) != NOT_IN_THE_PAPER[field]:
            raise ValueError(f"{field} = {options[field]!r:.50} is not supported")
    name = str(options.get("non_linearity")).lower()
    old = {} if "version" in metadata else {"gelu": "gelu_new", "gelu_orig": "gelu"}
    options = {"original_ln_before": False, **options, "non_linearity": old.get(name, name)}
    options["leave_out"] = list(options.get("leave_out") or ())
    return {field: v for field, v in options.items() if field in GRID_FIELDS}


def check_bottleneck(fields, factors, activations):
    """Raises ValueError for a value that a field cannot have. factors: {layer: reduction factor}"""
    allowed = dict.fromkeys(YES_OR_NO, [True, False])
    allowed |= {"residual_before_ln": [True, False, "post_add"], "non_linearity": activations}
    for name, values in allowed.items():
        if fields[name] not in values:
            known = ", ".join(map(str, values))
            raise ValueError(f"{name} must be one of {known}, not {fields[name]!r}")
    for layer, factor in factors.items():
        if not 0 < factor < math.inf:
            raise ValueError(f"reduction_factor must be positive, not {factor} ({layer})")
    if fields["residual_before_ln"] == "post_add" and not fields["original_ln_before"]:
        raise ValueError("residual_before_ln='post_add' needs original_ln_before")


def is_bottleneck(fields, tensors):
    """Whether AdapterHub's bottleneck adapters have these fields, and {(slot, part): tensor}."""
    parts = {theirs for theirs, _ in NAMES_WITH_NORM_BEFORE}
    return fields.keys() == {*GRID_FIELDS} and {p.rpartition(".")[0] for _, p in tensors} <= parts


def is_attention(tensors):
    """Whether {(slot, part): tensor} are those of AdapterHub's fusion."""
    return {part.split(".")[0] for _, part in tensors} == {"query", "key", "value"}


def slot_tensors(modules):
    """{(slot's path, name in the file): tensor} of {(layer, location): module}, buffers included"""
    tensors = {}
    for key, module in modules.items():
        state = module.state_dict(keep_vars=True)
        table = NAMES_WITH_NORM_BEFORE if "norm_before.weight" in state else NAMES
        for name, tensor in state.items():
            module_name, _, part = name.rpartition(".")
            theirs = [f"{their}.{part}" for their, ours in table if ours == module_name]
            for file_name in theirs or [name]:
                tensors[slot_path(key), file_name] = tensor
    return tensors


def head_tensors(head):
    """{("heads", name in the file): tensor}, without the pooler, which is a part of Θ's files"""
    state = head.state_dict(keep_vars=True)
    rest = {name: tensor for name, tensor in state.items() if not name.startswith("pooler.")}
    return {("heads", name.removeprefix("layers.")): tensor for name, tensor in rest.items()}


def check_fusion(options):
    """Raises ValueError for a saved fusion that is another function than the paper's."""
    for field, value in options.items():
        if field not in SAME_FUNCTION and (field, value) not in FUSION_CONFIG.items():
            raise ValueError(f"a fusion with {field} = {value!r:.50} is not supported")


def check_head(config):
    """A head's options, complete. Raises ValueError for a head that is not supported here."""
    defaults = {"activation_function": "tanh", "dropout_prob": None, "use_pooler": False}
    config = {**defaults, "bias": True, **config}
    supported = {"head_type": ("classification", "multiple_choice"), "layers": (1, 2)}
    supported["bias"] = (True,)
    if config.get("layers") == 2:
        config["activation_function"] = str(config["activation_function"]).lower()
        supported["activation_function"] = ("tanh",)
    for field, values in supported.items():
        if (value := config.get(field)) not in values:
            raise ValueError(f"a head with {field} = {value!r:.50} is not supported, only {values}")
    if config["head_type"] == "multiple_choice":  # which has no such field in the library
        del config["bias"]
    return config


@dataclass
class Saved:
    """A saved adapter, head or fusion."""

    directory: Path
    metadata: dict  # the whole JSON object
    options: dict  # its "config"
    name: str
    adapter_names: list  # of a fusion
    tensors: dict  # {(slot, part): tensor}
    run: dict  # the run.json beside it; empty without one

    def check_encoder(self, bert):
        """Raises ValueError if the file is for another encoder than `bert`. Without a run, only a
        name says which that is: where one is a directory's, or has no owner, it is noted."""
        if bert.sha256 and self.run.get("encoder", bert.sha256) != bert.sha256:
            problem = f"with other weights, or another configuration, than {bert.source}"
            raise ValueError(f"it was trained on an encoder {problem}: {self.run['trained_on']}")
        ours, theirs = bert.source or "", self.metadata.get("model_name") or ""
        is_directory = Path(ours).is_dir()  # a clone, perhaps, whose name says no owner
        is_same = whole_id(theirs) == (ours if is_directory else whole_id(ours))
        if ours and theirs and not self.run and not is_same:
            has_same_name = Path(theirs).name == Path(ours).name
            problem = f"made for {theirs!r:.100}, the encoder is {'in ' * is_directory}{ours}"
            if not is_directory and (not has_same_name or whole_id(theirs).count("/") == 1):
                raise ValueError(problem)
            files.note(f"{'an adapter' if has_same_name else self.directory} was {problem}")
        theirs = self.metadata.get("model_type", bert.config.model_type)
        if theirs != (ours := bert.config.model_type):
            raise ValueError(f"made for model_type {theirs!r:.50}, the encoder has {ours!r}")

    def kind(self, ours, entries):
        """(the class, `ours` or one of `entries`, that it names; its fields), or (ours, None)"""
        if "architecture" not in self.options:
            return ours, None
        classes = {one.__name__: one for one in (ours, *entries.values()) if isinstance(one, type)}
        if (name := self.options["architecture"]) not in classes:
            raise ValueError(f"the class {name!r:.50} is not known: --import MODULE adds one")
        return classes[name], self.options["fields"]

    def copy_into(self, tensors, unused=()):
        """Copies the tensors into those of {(slot, part): tensor}, but for `unused` slots'."""
        found = {key: tensor for key, tensor in self.tensors.items() if key[0] not in unused}
        files.check_names({*map(".".join, tensors)}, {*map(".".join, found)})
        with torch.no_grad():
            for key, tensor in tensors.items():
                if isinstance(tensor, torch.nn.Parameter):
                    files.check_tensor(".".join(key), found[key], tensor.shape, "here it must be")
                tensor.copy_(found[key])

    def sha256(self):
        """Of the tensors, whatever the adapter's name and its kind of file."""
        return sha256_of({".".join(key): tensor.float() for key, tensor in self.tensors.items()})


def read(source, kind):
    """What is Saved at `source`, a directory or a hub id. Of several names in a file, that in the
    JSON counts: the reference writes a head or a fusion "rte2" also into the file of "rte"."""
    directory = Path(source)
    if not directory.is_dir():
        directory = download(source, "run.json", kind.config, *kind.weights)
    config_path = directory / kind.config
    metadata = files.read_json(config_path) if files.is_file(config_path) else {}
    if peft := metadata.get("peft_type"):
        raise ValueError(f"{source} is an adapter of the peft library, {peft}: not supported")
    paths = [directory / name for name in kind.weights if files.is_file(directory / name)]
    if not metadata or not paths:
        raise FileNotFoundError(f"{source} has no {kind.config} with {' or '.join(kind.weights)}")
    options, name = metadata.get("config", {}), metadata.get("name")
    names = metadata.get("adapter_names") or name  # old files of fusions have nothing else
    names = names.split(",") if isinstance(names, str) else names
    found = []
    for path in paths:
        by_name = {}
        with files.error_prefix(path):
            for key, tensor in files.read_tensors(path).items():
                if (match := TENSOR.fullmatch(key)) is None:  # for instance an invertible adapter's
                    raise ValueError(f"{key} has no place here, not supported")
                slot, heads, inside, part = match.groups()
                by_name.setdefault(inside, {})[slot or heads, part] = tensor
            if name not in by_name and len(by_name) > 1:
                raise ValueError(f"it holds {', '.join(by_name):.200}, not {name!r:.50}")
        # without any: a kind of fusion may have no parameters; if it has, `copy_into` misses them
        tensors = by_name.get(name) or next(iter(by_name.values()), {})
        found.append(Saved(directory, metadata, options, name, names, tensors, read_run(directory)))
    if len(found) > 1 and found[0].sha256() != found[1].sha256():  # one is of an earlier training
        raise ValueError(f"{paths[0]} and {paths[1].name} differ: remove the one that is not meant")
    return found[0]


def read_run(directory):
    """What run.json says in a run's directory, or in that of an adapter's copy; {} without one."""
    path = Path(directory) / "run.json"
    return files.read_json(path) if files.is_file(path) else {}


def write(directory, kind, name, options, tensors, bert):
    """Writes an adapter, a head or a fusion (name: those of its adapters, with commas), for the
    encoder `bert`. Without the version, AdapterHub's library reads "gelu" as its tanh form."""
    model_type = bert.config.model_type
    header = {"name": name, "model_type": model_type, "model_name": bert.source or ""}
    header |= {"hidden_size": bert.config.hidden_size, "version": "adapters.1.3.0"}
    header["model_class"] = MODEL_CLASSES.get(model_type)
    if kind is FUSION:
        header["adapter_names"] = name.split(",")
    write_files(directory, kind, options, tensors, header)


def write_files(directory, kind, options, tensors, metadata):
    """Writes files: options, {(slot, part): tensor} as fp32, and the other fields of the JSON."""
    prefix, name = f"{metadata['model_type']}." if kind.word else "", metadata["name"]
    named = {f"{prefix}{slot}{kind.word}.{name}.{part}": t for (slot, part), t in tensors.items()}
    files.write_tensors(Path(directory) / kind.weights[0], named)
    files.write_json(Path(directory) / kind.config, {"config": options, **metadata})
    Path(directory, kind.weights[1]).unlink(missing_ok=True)  # or two files would differ


def copy(saved, name, directory):
    """Writes a Saved adapter under another name, fp32, with the run.json that was beside it."""
    write_files(directory, ADAPTER, saved.options, saved.tensors, {**saved.metadata, "name": name})
    if saved.run:
        files.write_json(Path(directory) / "run.json", saved.run)
