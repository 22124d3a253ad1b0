"""Exchange with AdapterHub: old and refused files, the paper's adapters, cards, pretrained poolers;
and with PEER_PYTHON (tests/reference.py), what its library computes with files of this project."""

import json
import re
import shutil
from copy import deepcopy

import pytest
import torch
from safetensors.torch import load_file, save_file

import reference
from adapter import (
    AdapterConfig,
    activate,
    add_adapter,
    copy_adapters,
    load_adapter,
    load_head,
    save_adapter,
)
from bert import Bert
from conftest import randomize
from data import TASKS
from experiments.load_run import load_run
from formats.adapterhub import paper_adapters
from fusion import add_fusion, load_fusion, save_fusion
from reference import FP32_TOLERANCE, GOLDEN, difference, needs_peer, run, with_fusion

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
def compute(model, inputs, adapters, fusion=None, safe=True):
    """[B, T, d] of the first adapter, or of a fusion."""
    bert, every = Bert.from_pretrained(model), load_file(inputs)
    names = [load_adapter(bert, directory) for directory in adapters]
    load_fusion(bert, fusion) if fusion else activate(bert, names[0])
    return run(bert, every)


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """{key: what `compute` takes} of adapters and fusions, new and in an old format."""
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
    return cases


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
        assert difference(compute(**case), theirs[key]) <= FP32_TOLERANCE, key


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
    change(path, {"config": {**config, "leave_out": None}})
    load_adapter(bert, path.parent)
    found = next(bert.slots())[1].adapters["bottom"].config
    assert found == AdapterConfig(**config, original_ln_before=False)


def test_a_copy_of_an_adapter_that_names_no_encoder_names_none(copy, tmp_path):
    path = copy(BERT / "pfeiffer") / "adapter_config.json"
    change(path, {"model_name": None})
    copy_adapters({"new": path.parent}, tmp_path, reference.encoder("bert").config)
    assert not json.loads((tmp_path / "new" / path.name).read_text())["model_name"]


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
    assert ("sst2", "AdapterHub/roberta-base-sst_pfeiffer") in paper_adapters("roberta")
    (root, _), bert, source = hub, Bert.from_pretrained(encoder), {}
    add_adapter(bert, "x", AdapterConfig.pfeiffer(reduction_factor=4))
    for i, (task, id) in enumerate(paper_adapters("bert")):
        randomize(bert, ".adapters.")
        save_adapter(bert, "x", tmp_path / "new" / task)
        name = "nli/rte@ukp" if i % 2 else "glue_mnli"
        old_format(tmp_path / "new" / task, root / id, name, "glue_mnli")
        tensors = load_file(tmp_path / "new" / task / "adapter.safetensors")
        source[task] = {key.replace(".x.", f".{task}."): t for key, t in tensors.items()}
    launch("--stage fusion --task rte --epochs 1 --adapters paper", out=tmp_path / "run")
    note = "AdapterHub/bert-base-uncased_nli_rte_pfeiffer was trained on 'bert-base-uncased'"
    assert f"note: {note}" in capsys.readouterr().out
    shutil.rmtree(root)
    assert load_run(tmp_path / "run").adapters == list(TASKS)
    for task in TASKS:  # in today's format, under the name that it has here
        path = tmp_path / "run" / "adapters" / task
        assert json.loads((path / "adapter_config.json").read_text())["name"] == task
        assert_equal_tensors(load_file(path / "adapter.safetensors"), source[task])


def test_sources_can_be_mixed(hub, runs, launch, encoder, tmp_path):
    """A run, an old AdapterHub directory and a hub id, which fusions and heads may have, too."""
    old_format(runs / "sst2", tmp_path / "old", "sentiment", "sentiment")
    for name in ("pick", "fusion-rte"):
        shutil.copytree(runs / name, hub[0] / "USER" / name)
    (hub[0] / "USER" / "pick" / "config.json").unlink()
    sources = [runs / "rte", tmp_path / "old", "USER/pick"]
    words = f"--stage fusion --task rte --epochs 1 --model {encoder}"
    launch(words, adapters=sources, out=tmp_path / "run")
    bert, _, record = load_run(tmp_path / "run")
    assert [*record.loaded_adapters] == ["rte", "sentiment", "pick"]
    load_adapter(bert, runs / "sst2")
    load_fusion(bert, "USER/fusion-rte")
    assert load_head(bert, "USER/pick").num_outputs == 3
    with pytest.raises(FileNotFoundError, match="USER/none has no adapter_config"):
        load_adapter(bert, "USER/none")


def test_a_head_on_the_pooler_needs_one(tmp_path):
    reference.encoder("bert").save_pretrained(tmp_path / "encoder")  # which leaves the pooler out
    with pytest.raises(ValueError, match="it has no pooler"):
        load_head(Bert.from_pretrained(tmp_path / "encoder"), BERT / "by_layer")
