"""Exchange with AdapterHub: old, odd and refused files, the paper's adapters, cards; and with
PEER_PYTHON (tests/reference.py), what its library computes with files of this project. Those that
the library wrote are read in test_reference.py."""

import json
import re
import shutil
from copy import deepcopy

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter import (
    AdapterConfig,
    Head,
    activate,
    add_adapter,
    load_adapter,
    load_head,
    save_adapter,
    save_head,
)
from bert import Bert
from conftest import IDS, MASK, cli
from data import TASKS
from experiments import publish
from experiments.load_run import load_run
from formats.adapterhub import paper_adapters
from fusion import add_fusion, fusion_regularization, fusion_weights, load_fusion, save_fusion
from reference import (
    FIELDS,
    FP32_TOLERANCE,
    GOLDEN,
    PEER,
    ask_peer,
    difference,
    needs_peer,
    run,
    spread,
    with_fusion,
)
from reference import encoder as golden_encoder

BERT = GOLDEN / "bert"

# --------------------------------------------------------------------------------------------------
# What this project writes

NEW = {  # what the golden set lacks
    "p100": {"reduction_factor": 100},  # a bottleneck of 1
    "gelu_new": {"reduction_factor": 8, "non_linearity": "gelu_new"},
}
FUSIONS = {
    "three": ["pfeiffer", "gelu_new", "p100"],
    "some_ln": ["bapna", "pfeiffer"],  # the last one's configuration counts
    "with_ln_after": ["pfeiffer", "ln_after"],
    "both_places": ["houlsby", "both_ln"],
    "partly": ["leave_out", "pfeiffer"],
}
OLD = ["bert/pfeiffer", "bert/houlsby", "bert/bottom", "bert/gelu_new", "roberta/houlsby"]
LOCATIONS = {"attention": "mh_adapter", "output": "output_adapter"}


@torch.no_grad()
def compute(case):
    """Of adapters, and a head or a fusion: {KEY.h: [B, T, d], KEY.logits: [B, K],
    KEY.LAYER.LOCATION: [B, T, N], KEY.regularization: []}"""
    key, bert, inputs = case["key"], Bert.from_pretrained(case["model"]), load_file(case["inputs"])
    names = [load_adapter(bert, source) for source in case["adapters"]]
    activate(bert, names[0])
    if "fusion" in case:
        load_fusion(bert, case["fusion"])
    result = {f"{key}.h": run(bert, inputs)}
    if "head" in case:
        head = load_head(bert, case["head"])
        result[f"{key}.logits"] = head(result[f"{key}.h"], inputs["attention_mask"])
    if "fusion" in case:
        for (layer, location), s in fusion_weights(bert).items():
            result[f"{key}.{layer}.{LOCATIONS[location]}"] = s
        result[f"{key}.regularization"] = fusion_regularization(bert)
    return result


def randomise(bert, part, generator):
    spread([item for item in bert.named_parameters() if part in item[0]], generator)


def old_format(source, target, name, inside):
    """An adapter as AdapterHub published them in 2020: an old configuration, old names, a .bin."""
    target.mkdir(parents=True)
    values = json.loads((source / "adapter_config.json").read_text())
    fields = "mh_adapter output_adapter reduction_factor non_linearity original_ln_before"
    fields += " original_ln_after residual_before_ln ln_before ln_after"
    old = {field: values["config"][field] for field in fields.split()}
    names = {"gelu": "gelu_orig", "gelu_new": "gelu"}  # of that time
    old["non_linearity"] = names.get(old["non_linearity"], old["non_linearity"])
    old["invertible_adapter"] = dict(block_type="nice", non_linearity="relu", reduction_factor=2)
    kept = {field: values[field] for field in ("hidden_size", "model_type")}
    kept |= {"config": old, "config_id": "9076f36a74755ac4", "type": "text_task"}
    kept |= {"name": name, "model_class": "BertModel", "model_name": "bert-base-uncased"}
    (target / "adapter_config.json").write_text(json.dumps(kept))
    tensors = {}
    for key, tensor in load_file(source / "adapter.safetensors").items():
        kind = "attention" if ".attention." in key else "layer"
        old_name = re.sub(r"\.adapters\.[^.]+\.", f".{kind}_text_task_adapters.{inside}.", key)
        tensors[old_name.removeprefix("bert.")] = tensor  # saved from a model without heads
    torch.save(tensors, target / "pytorch_adapter.bin")
    return target


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """{key: adapters, and a fusion of them, as `compute` and the reference take them}, beside the
    golden ones. What is the golden set's own needs no test here: its files are written alike."""
    root = shutil.copytree(GOLDEN, tmp_path_factory.mktemp("exchange") / "golden")
    bert, generator, cases = golden_encoder("bert"), torch.Generator().manual_seed(3), {}
    for name, options in NEW.items():
        add_adapter(bert, name, AdapterConfig(**options))
        randomise(bert, f".adapters.{name}.", generator)
        save_adapter(bert, name, root / "bert" / name)
        cases[f"bert/{name}"] = {"adapters": [root / "bert" / name]}
    for directory in OLD:
        name = directory.split("/")[1]
        old = old_format(root / directory, root / f"{directory}-old", name, name)
        cases[directory] = {"adapters": [root / directory]}
        cases[f"{directory}-old"] = {"adapters": [old], "safe": False}
    for name in "pfeiffer bapna ln_after houlsby both_ln leave_out".split():
        load_adapter(bert, BERT / name)
    for name, members in FUSIONS.items():
        add_fusion(bert, members)
        randomise(bert, ".fusion.", generator)
        save_fusion(bert, root / "bert" / name)
        sources = [root / "bert" / member for member in members]
        cases[name] = {"adapters": sources, "fusion": root / "bert" / name}
    for key, case in cases.items():
        golden = case["adapters"][0].parent
        case |= {"key": key, "model": golden / "encoder"}
        case["inputs"] = golden / "expected.safetensors"
    return cases


@pytest.fixture(scope="module")
def published(tmp_path_factory, runs, encoder):
    """Runs with a card, for the tiny encoder, and inputs for its Python."""
    root = tmp_path_factory.mktemp("published")
    inputs = dict(zip(FIELDS, (IDS, (IDS > 10).long(), MASK), strict=True))
    save_file(inputs, path := root / "inputs.safetensors")
    cards = []
    for name, shape in {"rte": [3, 6], "pick": [1, 3, 6], "fusion-rte": [3, 6]}.items():
        words = cli(out=root / name, encoder=encoder, repo=f"USER/{name}")
        publish.main([str(runs / name), *words])
        cards.append({"key": f"card.{name}", "run": runs / name, "folder": root / name})
        cards[-1] |= {"inputs": path, "shape": shape}
    return cards


# --------------------------------------------------------------------------------------------------
# Beside the reference


@pytest.fixture(scope="module")
def theirs(ours, published, launch, tmp_path_factory):
    """What the reference library computes with our files, a multi-task run's among them."""
    root = tmp_path_factory.mktemp("peer")
    text = "--adapter pfeiffer --tasks rte sst2 --epochs 1 --lr 1e-2"
    launch(f"{text} --steps-per-epoch 10", out=root / "run")
    of_task, case = root / "run" / "adapters" / "sst2", {"key": "multitask", "model": root / "run"}
    case |= {"inputs": published[0]["inputs"], "adapters": [of_task], "head": of_task}
    ours["multitask"] = case
    plan = json.dumps({"read": [*ours.values()], "cards": published}, default=str)
    (root / "plan.json").write_text(plan)
    ask_peer("peer.py", "read", root)
    return load_file(root / "read.safetensors")


@needs_peer
def test_ours_to_theirs(ours, theirs):
    """The same, and large enough for that to mean something."""
    for key, tensor in (item for case in ours.values() for item in compute(case).items()):
        if key == "partly.0.output_adapter":
            # the absent adapter has no weight there, and here its own is 0
            assert (tensor[..., 0] == 0).all() and (tensor[..., 1] == 1).all()
        else:
            assert difference(tensor, theirs[key]) <= FP32_TOLERANCE, key
            assert tensor.abs().max() > (1e-3 if key.endswith("regularization") else 0.02), key


def test_cards_run(published, request, monkeypatch):
    """The first block of Python, as it stands; the reference runs the second one."""
    for card in published:
        monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda _, c=card: c["folder"])
        text, inputs = (card["folder"] / "README.md").read_text(), load_file(card["inputs"])
        names = {name: tensor.view(card["shape"]) for name, tensor in inputs.items()}
        exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0], names)
        bert, head, _ = load_run(card["run"])
        with torch.no_grad():
            assert torch.equal(names["logits"], head(run(bert, inputs), inputs["attention_mask"]))
        if PEER:
            theirs = request.getfixturevalue("theirs")[card["key"]]
            assert difference(names["logits"].detach(), theirs) <= FP32_TOLERANCE


# --------------------------------------------------------------------------------------------------
# Old and odd files


@pytest.mark.parametrize("directory", OLD)
def test_old_files(ours, directory):
    new, old = (compute(ours[key]) for key in (directory, f"{directory}-old"))
    assert torch.equal(old[f"{directory}-old.h"], new[f"{directory}.h"])


def change(path, file=(), config=()):
    """Changes a JSON file: fields of its own, and of its "config"."""
    old = json.loads(path.read_text())
    path.write_text(json.dumps({**old, "config": {**old["config"], **dict(config)}, **dict(file)}))


def test_fields_that_old_configs_lack_are_the_reference_s_defaults(copy):
    bert, path = golden_encoder("bert"), copy(BERT / "bottom") / "adapter_config.json"
    required = "mh_adapter output_adapter reduction_factor non_linearity".split()
    config = json.loads(path.read_text())["config"]
    config = {field: config[field] for field in required}
    change(path, {"config": {**config, "leave_out": None}})
    load_adapter(bert, path.parent)
    found = next(bert.slots())[1].adapters["bottom"].config
    assert found == AdapterConfig(**config, original_ln_before=False)
    for field in required:
        change(path, {"config": {key: value for key, value in config.items() if key != field}})
        with pytest.raises(ValueError, match=f"this one has no {field}"):
            load_adapter(bert, path.parent, "other")


def test_several_names_in_a_file(copy):
    bert, path = golden_encoder("bert"), copy(BERT / "pfeiffer") / "adapter.safetensors"
    tensors = load_file(path)
    doubled = {key.replace(".pfeiffer.", ".a."): 2 * t for key, t in tensors.items()}
    save_file({**doubled, **tensors}, path)
    load_adapter(bert, path.parent)  # the one that the configuration names
    up = bert.layers[0].output_add_norm.adapters["pfeiffer"].up.weight
    name = "bert.encoder.layer.0.output.adapters.pfeiffer.adapter_up.weight"
    assert torch.equal(up, tensors[name])
    change(path.parent / "adapter_config.json", {"name": "b"})
    with pytest.raises(ValueError, match="it holds a, pfeiffer, not 'b'"):
        load_adapter(bert, path.parent)


def test_old_fusion_has_only_a_name(copy, expected):
    source = copy(BERT / "fusion-pfeiffer")
    old = {"adapter_names": None}, {"dropout_prob": None}
    change(source / "adapter_fusion_config.json", *old)
    bert = with_fusion("bert/fusion-pfeiffer")
    h = run(bert, expected["bert"])
    add_fusion(bert, ["p4"])
    load_fusion(bert, source)
    assert torch.equal(run(bert, expected["bert"]), h)


# --------------------------------------------------------------------------------------------------
# Refused files

FILES = {  # what reads them, their JSON file, one in the golden set
    "adapter": (load_adapter, "adapter_config.json", "pfeiffer"),
    "head": (load_head, "head_config.json", "p4"),
    "fusion": (load_fusion, "adapter_fusion_config.json", "fusion-pfeiffer"),
}
REFUSED = r"""
adapter config | {"scaling": "learned"} | scaling = 'learned'
adapter config | {"architecture": "lora", "r": 8} | 'lora'
adapter config | {"reduction_factor": 1e-9} | reduction_factor must be
adapter config | {"reduction_factor": {"0": 8}} | neither layer 1
adapter file | {"hidden_size": 64} | hidden_size 64, the encoder has 32
adapter file | {"model_type": "roberta"} | model_type 'roberta', the encoder has 'bert'
adapter file | {"config": "pfeiffer"} | no 'config'
adapter file | {"name": "a\nb"} | cannot be an adapter's name
adapter file | {"name": ["a"]} | cannot be an adapter's name
head config | {"head_type": "tagging"} | head_type = 'tagging'
head config | {"layers": 2, "activation_function": "relu"} | activation_function = 'relu'
head config | {"num_labels": 2} | float [2, 32]
fusion config | {"query_before_ln": true} | query_before_ln = True
fusion file | {"adapter_names": ["pfeiffer", "../p2"]} | '../p2' is to be fused
fusion file | {"adapter_names": ["pfeiffer", "pfeiffer"]} | each of them once
adapter tensor | invertible_adapters.pfeiffer.F.0.weight | invertible_adapters
adapter tensor | encoder.layer.0.attention.self.query.loras.pfeiffer.lora_A | loras
adapter tensor | encoder.layer.7.output.adapters.pfeiffer.adapter_up.weight | layer.7
adapter tensor | encoder.layer.0.attention.output.adapters.pfeiffer.adapter_up.weight | attention
adapter tensor | encoder.layer.0.output.layer_text_task_adapters.pfeiffer.adapter_up.weight | twice
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
    message, after = str(error.value), bert.state_dict()
    assert say in message and "\n" not in message and str(source) in message
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


# --------------------------------------------------------------------------------------------------
# From the hub


def test_the_paper_s_adapters_are_fused(hub, launch, encoder, tmp_path, capsys):
    """Published adapters have old files, and names that are not their tasks': here two for all, one
    unusable."""
    assert ("sst2", "AdapterHub/roberta-base-sst_pfeiffer") in paper_adapters("roberta")
    (root, _), bert, source = hub, Bert.from_pretrained(encoder), {}
    add_adapter(bert, "x", AdapterConfig.pfeiffer(reduction_factor=4))
    for i, (task, id) in enumerate(paper_adapters("bert")):
        randomise(bert, ".adapters.", torch.Generator().manual_seed(i))
        save_adapter(bert, "x", tmp_path / "new" / task)
        name = "nli/rte@ukp" if i % 2 else "glue_mnli"
        old_format(tmp_path / "new" / task, root / id, name, "glue_mnli")
        tensors = load_file(tmp_path / "new" / task / "adapter.safetensors")
        source[task] = {key.replace(".x.", f".{task}."): t for key, t in tensors.items()}
    launch("--stage fusion --task rte --epochs 1 --adapters paper", out=tmp_path / "run")
    note = "AdapterHub/bert-base-uncased_nli_rte_pfeiffer was trained on 'bert-base-uncased'"
    assert f"note: {note}" in capsys.readouterr().out
    shutil.rmtree(root)
    assert load_run(tmp_path / "run").config["adapters"] == list(TASKS)
    for task in TASKS:  # in today's format, under the name that it has here
        path = tmp_path / "run" / "adapters" / task
        values = json.loads((path / "adapter_config.json").read_text())
        assert "version" in values
        assert (values["name"], values["model_name"]) == (task, "bert-base-uncased")
        tensors = load_file(path / "adapter.safetensors")
        assert tensors.keys() == source[task].keys()
        assert all(torch.equal(tensors[key], source[task][key]) for key in tensors)


def test_sources_can_be_mixed(hub, runs, launch, encoder, tmp_path):
    """A run, an old AdapterHub directory and a hub id. Heads and fusions come from the hub,
    too."""
    old_format(runs / "sst2", tmp_path / "old", "sentiment", "sentiment")
    for name in ("pick", "fusion-rte"):
        shutil.copytree(runs / name, hub[0] / "USER" / name)
    (hub[0] / "USER" / "pick" / "config.json").unlink()
    sources = [runs / "rte", tmp_path / "old", "USER/pick"]
    fuse, out = f"--stage fusion --task rte --epochs 1 --model {encoder}", tmp_path / "run"
    launch(fuse, adapters=sources, out=out)
    bert, _, config = load_run(out)
    assert config["adapters"] == ["rte", "sentiment", "pick"]
    load_adapter(bert, runs / "sst2")
    load_fusion(bert, "USER/fusion-rte")
    assert load_head(bert, "USER/pick").num_outputs == 3
    with pytest.raises(FileNotFoundError, match="USER/none has no adapter_config"):
        launch(fuse, adapters=[*sources, "USER/none"], out=tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


# --------------------------------------------------------------------------------------------------
# Heads on the encoder's pooler


@needs_peer
def test_a_head_on_the_pooler_is_that_of_the_reference(tmp_path):
    """BertForSequenceClassification with an adapter, its head converted by the reference
    library."""
    (tmp_path / "plan.json").write_text("{}")
    ask_peer("peer.py", "pooler", tmp_path)
    expected = load_file(tmp_path / "pooler.safetensors")
    bert = Bert.from_pretrained(tmp_path / "encoder")
    activate(bert, load_adapter(bert, tmp_path / "adapter"))
    head = load_head(bert, tmp_path / "head")
    h, mask = bert(expected["ids"]), torch.ones_like(expected["ids"])
    assert difference(head(h, mask), expected["logits"]) <= FP32_TOLERANCE
    save_head(head, bert, "default", tmp_path / "again")
    assert torch.equal(load_head(bert, tmp_path / "again")(h, mask), head(h, mask))


def test_a_head_on_the_pooler_needs_one(encoder, copy, tmp_path):
    bert = Bert.from_pretrained(encoder)  # a checkpoint without pooler
    config = {"head_type": "classification", "num_labels": 2, "layers": 1, "use_pooler": True}
    config["activation_function"] = None  # of one layer
    save_head(Head(config, bert.config), bert, "rte", tmp_path)
    with pytest.raises(ValueError, match="it has no pooler"):
        load_head(bert, tmp_path)
    path, (W, b) = copy(encoder) / "model.safetensors", torch.randn(33, 32).split([32, 1])
    pooler = {"bert.pooler.dense.weight": W, "bert.pooler.dense.bias": b[0]}
    save_file({**load_file(path), **pooler}, path)
    bert = Bert.from_pretrained(path.parent)
    head, h = load_head(bert, tmp_path), bert(IDS, None, MASK)
    logits = head.layers[-1](torch.tanh(h[:, 0] @ W.T + b))
    assert torch.allclose(head(h, MASK), logits, atol=1e-5)
