"""Exchange with AdapterHub; and with PEER_PYTHON, what its library computes with our files."""

import itertools
import json
import re
import shutil
import subprocess
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import adapter
import reference
from adapter import AdapterConfig, activate, adapter_modules, add_adapter, load_adapter
from bert import Bert
from conftest import randomize
from data import TASKS
from experiments.load_run import load_run
from formats.adapterhub import paper_adapters
from formats.files import read_json
from fusion import Fusion, add_fusion, load_fusion, save_fusion
from reference import GOLDEN, difference, run, same_tensors, with_fusion

BERT = GOLDEN / "bert"


def change(path, file=(), config=()):
    """Changes a JSON file: fields of its own, and of its "config"."""
    old = read_json(path)
    path.write_text(json.dumps({**old, "config": {**old["config"], **dict(config)}, **dict(file)}))


def old_format(source, target, name, inside):
    """An adapter as AdapterHub published them in 2020: an old configuration, old names, a .bin."""
    target.mkdir(parents=True)
    values = read_json(source / "adapter_config.json")
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


def test_old_files(expected, tmp_path):
    for directory in ("bert/pfeiffer", "bert/houlsby", "bert/bottom", "roberta/houlsby"):
        model, outputs = directory.split("/")[0], []
        bert, source = reference.encoder(model), GOLDEN / directory
        for place in (source, old_format(source, tmp_path / directory, "old", "old")):
            activate(bert, load_adapter(bert, place))
            outputs.append(run(bert, expected[model]))
        assert torch.equal(*outputs)


def test_fields_that_old_configs_lack_are_the_reference_s_defaults(copy):
    bert, path = reference.encoder("bert"), copy(BERT / "bottom") / "adapter_config.json"
    required = "mh_adapter output_adapter reduction_factor non_linearity".split()
    config = {field: read_json(path)["config"][field] for field in required}
    change(path, {"config": {**config, "leave_out": None, "non_linearity": "GELU"}})
    load_adapter(bert, path.parent)
    assert bert.adapter_configs["bottom"] == AdapterConfig(**config, original_ln_before=False)


def test_several_names_in_a_file(copy):
    """As the reference writes them at times: the one that the configuration names counts."""
    bert, path = reference.encoder("bert"), copy(BERT / "pfeiffer") / "adapter.safetensors"
    tensors = load_file(path)
    save_file({k.replace(".pfeiffer.", ".a."): 2 * t for k, t in tensors.items()} | tensors, path)
    load_adapter(bert, path.parent)
    up = bert.layers[0].output_add_norm.adapters["pfeiffer"].up.weight
    name = "bert.encoder.layer.0.output.adapters.pfeiffer.adapter_up.weight"
    assert torch.equal(up, tensors[name])
    change(path.with_name("adapter_config.json"), {"name": "b"})
    with pytest.raises(ValueError, match="it holds .*, not 'b'"):
        load_adapter(bert, path.parent)


def test_old_fusion_has_only_a_name(copy, expected):
    source, bert = copy(BERT / "fusion-pfeiffer"), with_fusion("bert/fusion-pfeiffer")
    change(source / "adapter_fusion_config.json", {"adapter_names": None}, {"dropout_prob": None})
    h = run(bert, expected["bert"])
    add_fusion(bert, ["p4"])
    load_fusion(bert, source)
    assert torch.equal(run(bert, expected["bert"]), h)


def test_the_paper_s_adapters_are_fused(hub, launch, encoder, tmp_path, capsys):
    """They have old files, and names that are not their tasks': here two for all, one unusable."""
    assert paper_adapters("roberta")["sst2"] == "AdapterHub/roberta-base-sst_pfeiffer"
    (root, _), bert, source = hub, Bert.from_pretrained(encoder), {}
    add_adapter(bert, "x", AdapterConfig(reduction_factor=4, non_linearity="gelu_new"))
    for i, (task, id) in enumerate(paper_adapters("bert").items()):
        randomize(bert, ".adapters.")
        adapter.save_adapter(bert, "x", tmp_path / "new" / task)
        name = "nli/rte@ukp" if i % 2 else "glue_mnli"
        old_format(tmp_path / "new" / task, root / id, name, "glue_mnli")
        tensors = load_file(tmp_path / "new" / task / "adapter.safetensors")
        source[task] = {key.replace(".x.", f".{task}."): t for key, t in tensors.items()}
    launch("--stage fusion --task rte --epochs 1 --adapters paper", out=tmp_path / "run")
    notes = re.findall(r"note: .*made for 'bert-base-uncased'", capsys.readouterr().out)
    assert len(notes) == 16 and "AdapterHub/bert-base-uncased_nli_rte_pfeiffer" in notes[-2]
    shutil.rmtree(root)
    finished = load_run(tmp_path / "run")
    assert finished.adapters == list(TASKS)
    for task in TASKS:  # in today's format, under the name that it has here
        path = tmp_path / "run" / "adapters" / task
        assert read_json(path / "adapter_config.json")["name"] == task
        assert same_tensors(load_file(path / "adapter.safetensors"), source[task])
        assert finished.bert.adapter_configs[task].non_linearity == "gelu_new"


def test_a_head_on_the_pooler_needs_one(tmp_path):
    reference.encoder("bert").save_pretrained(tmp_path / "encoder")  # which leaves the pooler out
    with pytest.raises(ValueError, match="it has no pooler"):
        adapter.load_head(Bert.from_pretrained(tmp_path / "encoder"), BERT / "by_layer")


ROBERTA, OTHER_MODEL = {"model_type": "roberta"}, "model_type 'roberta', the encoder has 'bert'"
REFUSED = [  # one in the golden set; its file, and fields of that, or of its "config"; the message
    ("bottom", "adapter file", {"config": {"mh_adapter": True}}, "non_linearity must be"),
    ("bottom", "adapter config", {"scaling": "learned"}, "scaling = 'learned'"),
    ("bottom", "adapter config", {"architecture": "lora", "r": 8}, "'lora'"),
    ("bottom", "adapter file", ROBERTA, OTHER_MODEL),
    ("p4", "head file", ROBERTA, OTHER_MODEL),
    ("fusion-pfeiffer", "adapter_fusion file", ROBERTA, OTHER_MODEL),
    ("p4", "head config", {"head_type": "tagging"}, "head_type = 'tagging'"),
    ("p4", "head config", {"layers": 2, "activation_function": "relu"}, "= 'relu'"),
    ("fusion-pfeiffer", "adapter_fusion config", {"query_before_ln": True}, "query_before_ln"),
    ("bottom", "adapter tensor", "invertible_adapters.bottom.F.0.weight", "invertible_adapters"),
    ("bottom", "adapter tensor", "encoder.layer.0.output.loras.bottom.lora_A", "loras"),
    ("bottom", "adapter tensor", "encoder.layer.7.output.adapters.bottom.x", "layer.7"),
]
LOAD = {"adapter": load_adapter, "head": adapter.load_head, "adapter_fusion": load_fusion}


@pytest.mark.parametrize("name, what, changes, say", REFUSED)
def test_what_is_refused_leaves_the_encoder_as_it_was(name, what, changes, say, copy):
    (kind, part), source = what.split(), copy(BERT / name)
    bert = with_fusion("bert/fusion-houlsby")
    for member in ("pfeiffer", "p4", "p16"):
        load_adapter(bert, BERT / member)
    if part == "tensor":  # one more
        path = source / "adapter.safetensors"
        save_file({**load_file(path), f"bert.{changes}": torch.zeros(32, 4)}, path)
    else:
        change(source / f"{kind}_config.json", **{part: changes})
    before = deepcopy(bert.state_dict())
    with pytest.raises(ValueError) as error:
        LOAD[kind](bert, source)
    message = str(error.value)
    assert say in message and "\n" not in message and str(source) in message
    assert same_tensors(bert.state_dict(), before)


@torch.no_grad()
def test_every_architecture_of_the_grid(expected):
    """Of appendix A.2: [CLS] of one example in float64, with the tensors of both_ln."""
    names = "mh_adapter output_adapter original_ln_before original_ln_after ln_before ln_after"
    choices = dict.fromkeys(names.split(), (True, False))
    choices |= {"residual_before_ln": (True, False, "post_add")}
    choices |= {"adapter_residual_before_ln": (True, False)}
    grid = [dict(zip(choices, v, strict=True)) for v in itertools.product(*choices.values())]
    grid = [fields for fields in grid if fields["mh_adapter"] or fields["output_adapter"]]
    bert = reference.encoder("bert").double()
    load_adapter(bert, BERT / "both_ln")
    full = adapter_modules(bert, "both_ln")
    theirs = load_file(BERT / "grid.safetensors")["hidden_states"]
    for number, (fields, h) in enumerate(zip(grid, theirs, strict=True)):
        if h.isnan().all():  # the reference refuses it, too
            with pytest.raises(ValueError, match="'post_add' needs original_ln_before"):
                AdapterConfig(**fields)
            continue
        add_adapter(bert, f"a{number}", AdapterConfig(**fields, reduction_factor=4))
        for key, module in adapter_modules(bert, f"a{number}").items():
            module.load_state_dict(full[key].state_dict(), strict=False)
        assert difference(run(bert, expected["bert"])[0, 0], h) <= 1e-12, fields
    assert theirs.isnan().all(1).sum() == 48


def test_the_presets():
    """Two are the reference's, Bapna and Firat's is h + U·relu(D·LN_new(h))."""
    bert = reference.encoder("bert")
    for name in ("pfeiffer", "houlsby"):
        preset = getattr(AdapterConfig, name)
        load_adapter(bert, BERT / name)
        assert bert.adapter_configs[name] == preset(reduction_factor=8)
        assert preset(non_linearity="gelu").non_linearity == "gelu"
    assert AdapterConfig.bapna(ln_before=False).ln_before is False
    torch.manual_seed(0)
    norm, (f, x) = nn.LayerNorm(32), torch.randn(2, 2, 5, 32)
    bapna = AdapterConfig.bapna(reduction_factor=8).module(32, 0)
    for p in bapna.parameters():
        nn.init.normal_(p)
    h = norm(f + x)
    z = bapna.up(bapna.down(bapna.norm_before(h)).relu())
    assert torch.allclose(bapna(f, x, norm), h + z, atol=1e-5)


@pytest.mark.parametrize("name", [*load_file(BERT / "mixed.safetensors")])
def test_fusions_of_different_adapters(name, expected):
    """Of which the last one's configuration counts; some are left out of a layer."""
    bert, theirs = reference.encoder("bert").double(), load_file(BERT / "mixed.safetensors")
    for member in read_json(BERT / "mixed" / name / "adapter_fusion_config.json")["adapter_names"]:
        new = BERT / "mixed" / member
        load_adapter(bert, new if new.is_dir() else BERT / member)
    load_fusion(bert, BERT / "mixed" / name)
    assert difference(run(bert, expected["bert"]), theirs[name]) <= 1e-10


@torch.no_grad()
@reference.needs_peer
def test_the_reference_reads_our_runs(runs, loud_fusion, encoder, tmp_path):
    """And computes the same, also of an old file, with another GELU; own classes are refused."""
    ids = torch.tensor([[2, 7, 8, 9, 10, 3], [2, 11, 3, 0, 0, 0], [2, 12, 13, 14, 3, 0]])
    inputs = {"input_ids": ids, "token_type_ids": (ids > 10).long()}
    inputs["attention_mask"] = (ids != 0).long()
    save_file(inputs, tmp_path / "inputs.safetensors")
    common, plan, ours = {"model": encoder, "inputs": tmp_path / "inputs.safetensors"}, {}, {}
    for directory in (runs / "rte", runs / "pick", loud_fusion):
        finished, key = load_run(directory), directory.name
        shape = [1, 3, 6] if key == "pick" else [3, 6]
        plan[key] = {**common, "adapters": [directory], "shape": shape}
        if finished.adapters:
            copies = [directory / "adapters" / name for name in finished.adapters]
            plan[key] |= {"adapters": copies, "fusion": directory}
        ours[key] = finished.model(inputs)
    bert = Bert.from_pretrained(encoder)
    old = old_format(BERT / "mixed" / "gelu_new", tmp_path / "old", "old", "old")
    activate(bert, load_adapter(bert, old))
    ours["old"] = run(bert, inputs)
    plan["old"] = {**common, "adapters": [old], "safe": False}
    finished = load_run(runs / "rte")
    add_adapter(finished.bert, "own", type("OwnConfig", (AdapterConfig,), {})())
    add_fusion(finished.bert, ["rte"], type("OwnFusion", (Fusion,), {}))
    head = type("OwnHead", (adapter.Head,), {})(finished.model.head.config, finished.bert.config)
    for name in ("own adapter", "own fusion", "own head"):
        shutil.copytree(runs / "rte", tmp_path / name)
        plan[name] = {**common, "adapters": [tmp_path / name], "shape": [3, 6]}
    adapter.save_adapter(finished.bert, "own", tmp_path / "own adapter")
    save_fusion(finished.bert, tmp_path / "own fusion")
    plan["own fusion"]["fusion"] = tmp_path / "own fusion"
    adapter.save_head(head, finished.bert, "rte", tmp_path / "own head")
    (tmp_path / "plan.json").write_text(json.dumps(plan, default=str))
    subprocess.run([reference.PEER, Path(__file__).with_name("peer.py"), tmp_path], check=True)
    theirs = load_file(tmp_path / "read.safetensors")
    assert theirs.keys() == ours.keys()
    for key in ours:
        tolerance = reference.FP32_TOLERANCE if key == "old" else 1e-6  # logits are small
        assert difference(ours[key], theirs[key]) <= tolerance, key
