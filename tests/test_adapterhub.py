"""Exchange with AdapterHub: old and refused files, other names, the paper's adapters, pretrained
poolers; and with PEER_PYTHON (tests/reference.py), what its library computes with files and whole
runs of this project."""

import json
import re
import shutil
from copy import deepcopy

import pytest
import torch
from safetensors.torch import load_file, save_file

import reference
from adapter import AdapterConfig, activate, add_adapter, load_adapter, load_head, save_adapter
from bert import Bert
from conftest import IDS, MASK, randomize
from data import TASKS
from experiments.load_run import load_run
from formats.adapterhub import paper_adapters
from formats.files import read_json
from fusion import add_fusion, load_fusion, save_fusion
from reference import FIELDS, FP32_TOLERANCE, GOLDEN, difference, needs_peer, run, with_fusion

BERT = GOLDEN / "bert"
NEW = {  # what the golden set lacks: a bottleneck of 1, the other GELU
    "p100": AdapterConfig(reduction_factor=100),
    "gelu_new": AdapterConfig(reduction_factor=8, non_linearity="gelu_new"),
}
FUSIONS = {
    "three": ["pfeiffer", "gelu_new", "p100"],
    "some_ln": ["bapna", "pfeiffer"],  # the last one's configuration counts
    "with_ln_after": ["pfeiffer", "ln_after"],
    "both_places": ["houlsby", "both_ln"],
    "partly": ["leave_out", "pfeiffer"],
}
OLD = ["bert/pfeiffer", "bert/houlsby", "bert/bottom", "bert/gelu_new", "roberta/houlsby"]


def old_format(source, target, name, inside):
    """An adapter as AdapterHub published them in 2020: an old configuration, old names, a .bin."""
    target.mkdir(parents=True)
    values = json.loads((source / "adapter_config.json").read_text())
    del values["version"]
    values |= {"name": name, "model_name": "bert-base-uncased", "type": "text_task"}
    old, names = values["config"], {"gelu": "gelu_orig", "gelu_new": "gelu"}  # of that time
    old["non_linearity"] = names.get(old["non_linearity"], old["non_linearity"])
    old["invertible_adapter"] = dict(block_type="nice", non_linearity="relu", reduction_factor=2)
    (target / "adapter_config.json").write_text(json.dumps(values))
    tensors = {}
    for key, tensor in load_file(source / "adapter.safetensors").items():
        kind = "attention" if ".attention." in key else "layer"
        old_name = re.sub(r"\.adapters\.[^.]+\.", f".{kind}_text_task_adapters.{inside}.", key)
        tensors[old_name.removeprefix("bert.")] = tensor  # saved from a model without heads
    torch.save(tensors, target / "pytorch_adapter.bin")
    return target


@torch.no_grad()
def compute(model, inputs, adapters, fusion=None, safe=True, shape=None):
    """[B, T, d] of the first adapter, or of a fusion; of a run, which has inputs of this shape, the
    logits [B, K]."""
    bert, every = Bert.from_pretrained(model), load_file(inputs)
    if shape is not None:
        return load_run(fusion or adapters[0]).model(every)
    names = [load_adapter(bert, directory) for directory in adapters]
    load_fusion(bert, fusion) if fusion else activate(bert, names[0])
    return run(bert, every)


@pytest.fixture(scope="module")
def renamed(runs, encoder, launch, tmp_path_factory):
    """A run on an adapter called rte as another one is, and on an old one with "/" and "," in its
    name."""
    root, bert = tmp_path_factory.mktemp("renamed"), Bert.from_pretrained(encoder)
    shutil.copytree(runs / "pick", root / "rte")
    change(root / "rte" / "adapter_config.json", {"name": "rte"})
    add_adapter(bert, "x", AdapterConfig(reduction_factor=4, non_linearity="gelu_new"))
    randomize(bert, ".adapters.")
    save_adapter(bert, "x", root / "x")
    old_format(root / "x", root / "old", "a,b/c", "a,b/c")
    words = "--stage fusion --task rte --epochs 1"
    for sources, name in (([root / "rte"], "'rte'"), ([root / "old"], "'a,b/c'")):
        with pytest.raises(ValueError, match=f"{name}.*NAME="):
            launch(words, adapters=[runs / "rte", *sources], out=root / "none")
    sources = [runs / "rte", f"second={root / 'rte'}", f"third={root / 'old'}"]
    launch(words, adapters=sources, out=root / "run")
    shutil.rmtree(root / "old")
    return root / "run"


@pytest.fixture(scope="module")
def ours(runs, loud_fusion, renamed, encoder, tmp_path_factory):
    """{key: what `compute` takes} of adapters and fusions, new and in an old format, and of whole
    runs."""
    torch.manual_seed(0)
    root = shutil.copytree(GOLDEN, tmp_path_factory.mktemp("exchange") / "golden")
    bert, cases = reference.encoder("bert"), {}
    for name in "pfeiffer bapna ln_after houlsby both_ln leave_out".split():
        load_adapter(bert, BERT / name)
    for name, config in NEW.items():
        add_adapter(bert, name, config)
        randomize(bert, f".adapters.{name}.")
        save_adapter(bert, name, root / "bert" / name)
        cases[f"bert/{name}"] = {"adapters": [root / "bert" / name]}
    for directory in OLD:
        name, old = directory.split("/")[1], root / f"{directory}-old"
        old_format(root / directory, old, name, name)
        cases[directory] = {"adapters": [root / directory]}
        cases[f"{directory}-old"] = {"adapters": [old], "safe": False}
    for name, members in FUSIONS.items():
        add_fusion(bert, members)
        randomize(bert, ".fusion.")
        save_fusion(bert, fusion := root / "bert" / name)
        cases[name] = {"adapters": [root / "bert" / n for n in members], "fusion": fusion}
    for case in cases.values():
        golden = case["adapters"][0].parent
        case |= {"model": golden / "encoder", "inputs": golden / "expected.safetensors"}
    inputs = dict(zip(FIELDS, (IDS, (IDS > 10).long(), MASK), strict=True))
    save_file(inputs, root / "inputs.safetensors")
    for directory in (runs / "rte", runs / "pick", loud_fusion, renamed):
        shape = [1, 3, 6] if directory.name == "pick" else [3, 6]
        case = {"model": encoder, "inputs": root / "inputs.safetensors", "shape": shape}
        copies = [directory / "adapters" / name for name in load_run(directory).adapters]
        case |= {"adapters": copies, "fusion": directory} if copies else {"adapters": [directory]}
        cases[directory] = case
    return {str(name): case for name, case in cases.items()}


@pytest.fixture(scope="module")
def theirs(ours, tmp_path_factory):
    """What the reference library computes with our files."""
    root = tmp_path_factory.mktemp("peer")
    plan = json.dumps({"read": ours}, default=str)
    (root / "plan.json").write_text(plan)
    reference.ask_peer("peer.py", "read", root)
    return load_file(root / "read.safetensors")


@needs_peer
def test_ours_to_theirs(ours, theirs):
    for key, case in ours.items():
        tolerance = 1e-6 if "shape" in case else FP32_TOLERANCE  # logits are small
        assert difference(compute(**case), theirs[key]) <= tolerance, key


def test_old_files(ours):
    for name in OLD:
        assert torch.equal(compute(**ours[f"{name}-old"]), compute(**ours[name])), name


def assert_equal_tensors(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def change(path, file=(), config=()):
    """Changes a JSON file: fields of its own, and of its "config"."""
    old = json.loads(path.read_text())
    path.write_text(json.dumps({**old, "config": {**old["config"], **dict(config)}, **dict(file)}))


def test_fields_that_old_configs_lack_are_the_reference_s_defaults(copy):
    bert, path = reference.encoder("bert"), copy(BERT / "bottom") / "adapter_config.json"
    required = "mh_adapter output_adapter reduction_factor non_linearity".split()
    config = json.loads(path.read_text())["config"]
    config = {field: config[field] for field in required}
    change(path, {"config": {**config, "leave_out": None, "non_linearity": "GELU"}})
    load_adapter(bert, path.parent)
    assert bert.adapters["bottom"] == AdapterConfig(**config, original_ln_before=False)


def test_adapters_under_other_names(renamed):
    """The run's copies have them in all places, and nothing else is changed."""
    run = load_run(renamed)
    assert run.adapters == ["rte", "second", "third"]
    for name in run.adapters:
        copy = renamed / "adapters" / name
        assert read_json(copy / "adapter_config.json")["name"] == name
        assert all(f".adapters.{name}." in key for key in load_file(copy / "adapter.safetensors"))
        assert (copy / "run.json").exists() == (name != "third")
    assert run.bert.adapters["third"].non_linearity == "gelu_new"


def test_several_names_in_a_file(copy):
    """As the reference writes them at times: the one that the configuration names counts."""
    bert, path = reference.encoder("bert"), copy(BERT / "pfeiffer") / "adapter.safetensors"
    tensors = load_file(path)
    save_file({k.replace(".pfeiffer.", ".a."): 2 * t for k, t in tensors.items()} | tensors, path)
    load_adapter(bert, path.parent)
    up = bert.layers[0].output_add_norm.adapters["pfeiffer"].up.weight
    name = "bert.encoder.layer.0.output.adapters.pfeiffer.adapter_up.weight"
    assert torch.equal(up, tensors[name])


def test_old_fusion_has_only_a_name(copy, expected):
    source, bert = copy(BERT / "fusion-pfeiffer"), with_fusion("bert/fusion-pfeiffer")
    change(source / "adapter_fusion_config.json", {"adapter_names": None}, {"dropout_prob": None})
    h = run(bert, expected["bert"])
    add_fusion(bert, ["p4"])
    load_fusion(bert, source)
    assert torch.equal(run(bert, expected["bert"]), h)


FILES = {  # what reads them, their JSON file, one in the golden set
    "adapter": (load_adapter, "adapter_config.json", "pfeiffer"),
    "head": (load_head, "head_config.json", "p4"),
    "fusion": (load_fusion, "adapter_fusion_config.json", "fusion-pfeiffer"),
}
REFUSED = r"""
adapter file | {"config": {"mh_adapter": true}} | this one has no output_adapter
adapter config | {"scaling": "learned"} | scaling = 'learned'
adapter config | {"architecture": "lora", "r": 8} | 'lora'
adapter file | {"model_type": "roberta"} | model_type 'roberta', the encoder has 'bert'
head file | {"model_type": "roberta"} | model_type 'roberta', the encoder has 'bert'
fusion file | {"model_type": "roberta"} | model_type 'roberta', the encoder has 'bert'
head config | {"head_type": "tagging"} | head_type = 'tagging'
head config | {"layers": 2, "activation_function": "relu"} | activation_function = 'relu'
fusion config | {"query_before_ln": true} | query_before_ln = True
adapter tensor | invertible_adapters.pfeiffer.F.0.weight | invertible_adapters
adapter tensor | encoder.layer.0.attention.self.query.loras.pfeiffer.lora_A | loras
adapter tensor | encoder.layer.7.output.adapters.pfeiffer.adapter_up.weight | layer.7
"""


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_what_is_refused_leaves_the_encoder_as_it_was(copy, row):
    """A field of the file, one of its "config", or a tensor more is wrong."""
    what, changes, say = row.split(" | ")
    (kind, part), bert = what.split(), with_fusion("bert/fusion-houlsby")
    load, file, one = FILES[kind]
    if kind == "fusion":
        for member in ("pfeiffer", "p4", "p16"):
            load_adapter(bert, BERT / member)
    source, before = copy(BERT / one), deepcopy(bert.state_dict())
    if part == "tensor":
        path = source / "adapter.safetensors"
        save_file({**load_file(path), f"bert.{changes}": torch.zeros(32, 4)}, path)
    else:
        change(source / file, **{part: json.loads(changes)})
    with pytest.raises(ValueError) as error:
        load(bert, source)
    message = str(error.value)
    assert say in message and "\n" not in message and str(source) in message
    assert_equal_tensors(bert.state_dict(), before)


def test_the_paper_s_adapters_are_fused(hub, launch, encoder, tmp_path, capsys):
    """They have old files, and names that are not their tasks': here two for all, one unusable."""
    assert paper_adapters("roberta")["sst2"] == "AdapterHub/roberta-base-sst_pfeiffer"
    (root, _), bert, source = hub, Bert.from_pretrained(encoder), {}
    add_adapter(bert, "x", AdapterConfig.pfeiffer(reduction_factor=4))
    for i, (task, id) in enumerate(paper_adapters("bert").items()):
        randomize(bert, ".adapters.")
        save_adapter(bert, "x", tmp_path / "new" / task)
        name = "nli/rte@ukp" if i % 2 else "glue_mnli"
        old_format(tmp_path / "new" / task, root / id, name, "glue_mnli")
        tensors = load_file(tmp_path / "new" / task / "adapter.safetensors")
        source[task] = {key.replace(".x.", f".{task}."): t for key, t in tensors.items()}
    launch("--stage fusion --task rte --epochs 1 --adapters paper", out=tmp_path / "run")
    notes = re.findall(r"note: .*made for 'bert-base-uncased'", capsys.readouterr().out)
    assert len(notes) == 16 and "AdapterHub/bert-base-uncased_nli_rte_pfeiffer" in notes[-2]
    shutil.rmtree(root)
    assert load_run(tmp_path / "run").adapters == list(TASKS)
    for task in TASKS:  # in today's format, under the name that it has here
        path = tmp_path / "run" / "adapters" / task
        assert read_json(path / "adapter_config.json")["name"] == task
        assert_equal_tensors(load_file(path / "adapter.safetensors"), source[task])


def test_adapters_heads_and_fusions_on_the_hub(hub, runs, encoder):
    tasks = ["rte", "sst2", "pick"]
    for name in (*tasks, "fusion-rte"):
        shutil.copytree(runs / name, hub[0] / "USER" / name)
    bert = Bert.from_pretrained(encoder)
    assert [load_adapter(bert, f"USER/{task}") for task in tasks] == tasks
    load_fusion(bert, "USER/fusion-rte")
    assert load_head(bert, "USER/pick").num_outputs == 3
    with pytest.raises(FileNotFoundError, match="USER/fusion-rte has no adapter_config"):
        load_adapter(bert, "USER/fusion-rte")


def test_a_head_on_the_pooler_needs_one(tmp_path):
    reference.encoder("bert").save_pretrained(tmp_path / "encoder")  # which leaves the pooler out
    with pytest.raises(ValueError, match="it has no pooler"):
        load_head(Bert.from_pretrained(tmp_path / "encoder"), BERT / "by_layer")
