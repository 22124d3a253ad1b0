"""The reference library: its outputs and losses (golden/README.md), and its files, both ways."""

import itertools
import json
import os
import re
import shutil
import subprocess
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

import adapter
import fusion
import train
from adapter import AdapterConfig, activate, adapter_modules, add_adapter, load_adapter, load_head
from bert import ENCODERS, Bert
from conftest import GOLDEN, randomize, same_tensors, times
from data import TASKS
from examples.mpnet import MPNet
from experiments.load_run import load_run
from formats.adapterhub import paper_adapters
from formats.files import read_json, read_tensors
from fusion import add_fusion, fusion_regularization, fusion_weights, load_fusion, save_fusion

BERT = GOLDEN / "bert"
FIELDS = ("input_ids", "token_type_ids", "attention_mask")
TOLERANCE = 1e-5  # of what float64 computes here, against fp32 outputs of the reference
OF_ENCODERS = {"bert": 1e-5, "roberta": 1e-5, "mpnet": 1e-10}  # of fp32 and float64 outputs
PEER = os.environ.get("PEER_PYTHON")


def directories(file):
    """Every golden directory that holds such a file, as bert/pfeiffer."""
    return [str(path.parent.relative_to(GOLDEN)) for path in sorted(GOLDEN.glob(f"*/*/{file}"))]


ADAPTERS, HEADS = directories("adapter_config.json"), directories("head_config.json")
FUSIONS = directories("adapter_fusion_config.json")
assert (len(ADAPTERS), len(HEADS), len(FUSIONS)) == (15, 6, 3)


@pytest.fixture(scope="module")
def expected():
    return {path.parent.name: load_file(path) for path in GOLDEN.glob("*/expected.safetensors")}


def encoder_of(name):
    return Bert.from_pretrained(GOLDEN / name / "encoder")


def run(bert, inputs):
    with torch.no_grad():
        return bert(*(inputs[name] for name in FIELDS))


def with_fusion(directory):
    """An encoder with a golden fusion and the adapters that it names."""
    bert, beside = encoder_of(directory.split("/")[0]), (GOLDEN / directory).parent
    for name in read_json(GOLDEN / directory / "adapter_fusion_config.json")["adapter_names"]:
        load_adapter(bert, beside / name if (beside / name).is_dir() else BERT / name)
    load_fusion(bert, GOLDEN / directory)
    return bert


def difference(a, b):
    assert a.shape == b.shape
    return (a - b).abs().max().item()


@pytest.mark.parametrize("name", OF_ENCODERS)
def test_encoder(name, expected, tmp_path, monkeypatch):
    """It is written as it was read, bit for bit; an adapter is no part of it."""
    monkeypatch.setitem(ENCODERS, "mpnet", MPNet)
    bert = encoder_of(name)
    add_adapter(bert, "rte", AdapterConfig())
    bert.save_pretrained(tmp_path)
    golden = load_file(GOLDEN / name / "encoder" / "model.safetensors")
    golden = {key: tensor for key, tensor in golden.items() if ".pooler." not in key}
    assert same_tensors(load_file(tmp_path / "model.safetensors"), golden)
    again = Bert.from_pretrained(tmp_path)
    assert again.config == bert.config
    if name == "bert":  # a head that reads the pooler needs one, which is not saved
        with pytest.raises(ValueError, match="it has no pooler"):
            load_head(again, BERT / "by_layer")
    activate(bert)
    h = run(bert.double(), expected[name])
    assert difference(h, expected[name]["encoder.last_hidden_state"]) <= OF_ENCODERS[name]


def assert_same_files(ours, theirs, stem):
    """All names, tensors and fields are the reference's, but for where the encoder came from."""
    config = f"{stem.removeprefix('model_')}_config.json"
    assert {path.name for path in ours.iterdir()} == {f"{stem}.safetensors", config}
    old = theirs / f"pytorch_{stem}.bin"
    tensors = load_file(theirs / f"{stem}.safetensors") if not old.exists() else read_tensors(old)
    assert same_tensors(load_file(ours / f"{stem}.safetensors"), tensors)
    assert {**read_json(ours / config), "model_name": ""} == read_json(theirs / config)


@pytest.mark.parametrize("directory", ADAPTERS)
def test_adapter_and_head(directory, expected, tmp_path):
    """Loaded is frozen, and not yet active; by_layer's head reads the encoder's own pooler."""
    model, name = directory.split("/")
    bert, expected = encoder_of(model).double(), expected[model]
    assert load_adapter(bert, GOLDEN / directory) == name
    assert not any(p.requires_grad for p in bert.parameters())
    plain = run(bert, expected)
    assert difference(plain, expected["encoder.last_hidden_state"]) <= TOLERANCE
    activate(bert, name)
    h = run(bert, expected)
    assert difference(h, expected[f"{name}.last_hidden_state"]) <= TOLERANCE
    assert difference(h, plain) > 0.5  # not a small correction that a tolerance could hide
    adapter.save_adapter(bert, name, tmp_path / "adapter")
    assert_same_files(tmp_path / "adapter", GOLDEN / directory, "adapter")
    if directory in HEADS:
        head = load_head(bert, GOLDEN / directory)
        # the precisions of encoder and head are their own
        for logits in (head(h, expected["attention_mask"]), head.double()(h)):
            assert difference(logits, expected[f"{name}.logits"]) <= TOLERANCE
        name = read_json(GOLDEN / directory / "head_config.json")["name"]
        adapter.save_head(head, bert, name, tmp_path / "head")
        assert_same_files(tmp_path / "head", GOLDEN / directory, "model_head")


@pytest.mark.parametrize("directory", FUSIONS)
def test_fusion(directory, expected, tmp_path):
    model, name = directory.split("/")
    bert, expected = with_fusion(directory).double(), expected[model]
    assert not any(p.requires_grad for p in bert.parameters())
    assert difference(run(bert, expected), expected[f"{name}.last_hidden_state"]) <= TOLERANCE
    weights = fusion_weights(bert)
    assert len(weights) == sum(key.startswith(f"{name}.attention.") for key in expected)
    for (layer, location), s in weights.items():
        location = {"attention": "mh_adapter", "output": "output_adapter"}[location]
        assert difference(s, expected[f"{name}.attention.{layer}.{location}"]) <= TOLERANCE
    assert difference(fusion_regularization(bert), expected[f"{name}.regularization"]) <= TOLERANCE
    save_fusion(bert, tmp_path)
    assert_same_files(tmp_path, GOLDEN / directory, "model_adapter_fusion")


RUNS = {"pfeiffer": "adapter --task rte --adapter pfeiffer", "choices": "adapter --task pick"}
RUNS["fusion"] = "fusion --task rte --adapters"


@pytest.mark.parametrize("name", RUNS)
def test_the_reference_s_losses(name, launch, runs, quiet_encoder, tmp_path, monkeypatch, request):
    """Of 40 steps with the same weights and batches, without dropout, in float64."""
    tensors = load_file(GOLDEN / "trajectory.safetensors")
    tensors = {n.removeprefix(f"{name}/"): t for n, t in tensors.items() if n.startswith(name)}
    losses, steps, get_task = [], iter(range(40)), train.get_task

    def start(model, *_):
        with torch.no_grad():
            for parameter, p in model.named_parameters():
                p.data = tensors[parameter].double()

    def next_batch(*_):
        step = next(steps)
        T = tensors["attention_mask"][step].sum(1).max()
        batch = {field: tensors[field][step, :, :T].long() for field in FIELDS}
        return batch | {"labels": tensors["labels"][step].long()}

    def keep_loss(logits, labels):
        losses.append(F.cross_entropy(logits, labels))
        return losses[-1]

    torch.set_default_dtype(torch.float64)
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    monkeypatch.setattr(train, "choose_device", lambda *_: (torch.device("cpu"), torch.float64))
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(train, "evaluate", lambda *_: {"accuracy": 0.5, "loss": 0.5})
    monkeypatch.setattr(train, "hold_frozen_in", start)
    monkeypatch.setattr(train, "collate", next_batch)
    monkeypatch.setattr(train, "get_task", lambda *x: replace(get_task(*x), loss=keep_loss))
    words = f"--epochs 10 --patience 10 --batch-size 24 --lr 1e-3 --stage {RUNS[name]}".split()
    for task in ("rte", "sst2", "pick") if name == "fusion" else ():
        # without run.json, since the digest of the encoder's weights is another one in float64
        words.append(shutil.copytree(runs / task, tmp_path / task))
        (tmp_path / task / "run.json").unlink()
    launch("", *words, model=quiet_encoder, out=tmp_path / "run")
    expected = read_json(GOLDEN / "trajectory.json")[name]
    assert torch.stack(losses).tolist() == pytest.approx(expected, rel=0, abs=1e-12)


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
        bert, source = encoder_of(model), GOLDEN / directory
        for place in (source, old_format(source, tmp_path / directory, "old", "old")):
            activate(bert, load_adapter(bert, place))
            outputs.append(run(bert, expected[model]))
        assert torch.equal(*outputs)
        shutil.copy(source / "adapter.safetensors", place)  # both files, which are the same
        load_adapter(bert, place, "both")
        times(2.0)(place / "adapter.safetensors")
        with pytest.raises(ValueError, match="adapter.bin differ: remove"):
            load_adapter(bert, place, "newer")
        adapter.save_adapter(bert, "both", place)
        assert load_adapter(bert, place, "again") == "again"


def test_fields_that_old_configs_lack_are_the_reference_s_defaults(copy, expected):
    bert, path = encoder_of("bert"), copy(BERT / "bottom") / "adapter_config.json"
    required = "mh_adapter output_adapter reduction_factor non_linearity".split()
    config = {field: read_json(path)["config"][field] for field in required}
    change(path, {"config": {**config, "leave_out": None, "non_linearity": "GELU"}})
    load_adapter(bert, path.parent)
    assert bert.adapter_configs["bottom"] == AdapterConfig(**config, original_ln_before=False)
    source, bert = copy(BERT / "fusion-pfeiffer"), with_fusion("bert/fusion-pfeiffer")
    change(source / "adapter_fusion_config.json", {"adapter_names": None}, {"dropout_prob": None})
    h = run(bert, expected["bert"])
    add_fusion(bert, ["p4"])
    load_fusion(bert, source)  # which has only its own name
    assert torch.equal(run(bert, expected["bert"]), h)


def test_several_names_in_a_file(copy):
    """As the reference writes them at times: the one that the configuration names counts."""
    bert, path = encoder_of("bert"), copy(BERT / "pfeiffer") / "adapter.safetensors"
    tensors = {k: t.clone() for k, t in load_file(path).items()}  # not views of what is replaced
    save_file({k.replace(".pfeiffer.", ".a."): 2 * t for k, t in tensors.items()} | tensors, path)
    load_adapter(bert, path.parent)
    adapter.save_adapter(bert, "pfeiffer", path.parent / "saved")
    assert same_tensors(load_file(path.parent / "saved" / path.name), tensors)
    change(path.with_name("adapter_config.json"), {"name": "b"})
    with pytest.raises(ValueError, match="it holds .*, not 'b'"):
        load_adapter(bert, path.parent)


def test_the_paper_s_adapters_are_fused(hub, launch, encoder, tmp_path):
    """They have old files, and names that are not their tasks': here two for all, one unusable."""
    assert paper_adapters("roberta")["sst2"] == "AdapterHub/roberta-base-sst_pfeiffer"
    with pytest.raises(ValueError, match="not for mpnet"):
        paper_adapters("mpnet")
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
    shutil.rmtree(root)
    finished = load_run(tmp_path / "run")
    assert finished.adapters == list(TASKS)
    for task in TASKS:  # in today's format, under the name that it has here
        path = tmp_path / "run" / "adapters" / task
        assert read_json(path / "adapter_config.json")["name"] == task
        assert same_tensors(load_file(path / "adapter.safetensors"), source[task])
        assert finished.bert.adapter_configs[task].non_linearity == "gelu_new"


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
    ("p4", "head config", {"bias": False}, "bias = False"),
    ("fusion-pfeiffer", "adapter_fusion config", {"query_before_ln": True}, "query_before_ln"),
    ("bottom", "adapter tensor", "encoder.layer.0.output.loras.bottom.lora_A", "loras"),
    ("bottom", "adapter tensor", "encoder.layer.7.output.adapters.bottom.x", "layer.7"),
]
LOAD = {"adapter": load_adapter, "head": load_head, "adapter_fusion": load_fusion}


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
    bert = encoder_of("bert").double()
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
    bert = encoder_of("bert")
    for name in ("pfeiffer", "houlsby"):
        load_adapter(bert, BERT / name)
        assert bert.adapter_configs[name] == getattr(AdapterConfig, name)(reduction_factor=8)
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
    h = run(with_fusion(f"bert/mixed/{name}").double(), expected["bert"])
    assert difference(h, load_file(BERT / "mixed.safetensors")[name]) <= 1e-10


@pytest.mark.parametrize("names", [("with", "without"), ("without", "with")])
def test_the_last_adapter_closes_a_fusion(names, expected):
    """With V = 0, it is the last one alone with z = 0."""
    bert, alone = encoder_of("bert"), []
    for name in names:
        add_adapter(bert, name, AdapterConfig(original_ln_after=name == "with"))
        for module in adapter_modules(bert, name).values():
            nn.init.zeros_(module.up.weight)
        activate(bert, name)
        alone.append(run(bert, expected["bert"]))
    add_fusion(bert, names)
    for of_layer in fusion.active_fusions(bert).values():
        nn.init.zeros_(of_layer.value.weight)
    assert torch.equal(run(bert, expected["bert"]), alone[1]) and not torch.equal(*alone)


@torch.no_grad()
@pytest.mark.skipif(not PEER, reason="needs PEER_PYTHON, with the reference library")
def test_the_reference_reads_our_runs(runs, loud_fusion, encoder, tmp_path):
    """And computes the same; own classes are refused."""
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
    finished = load_run(runs / "rte")
    add_adapter(finished.bert, "own", type("OwnConfig", (AdapterConfig,), {})())
    add_fusion(finished.bert, ["rte"], type("OwnFusion", (fusion.Fusion,), {}))
    head = type("OwnHead", (adapter.Head,), {})(finished.model.head.config, finished.bert.config)
    for name in ("own adapter", "own fusion", "own head"):
        shutil.copytree(runs / "rte", tmp_path / name)
        plan[name] = {**common, "adapters": [tmp_path / name], "shape": [3, 6]}
    adapter.save_adapter(finished.bert, "own", tmp_path / "own adapter")
    save_fusion(finished.bert, tmp_path / "own fusion")
    plan["own fusion"]["fusion"] = tmp_path / "own fusion"
    adapter.save_head(head, finished.bert, "rte", tmp_path / "own head")
    (tmp_path / "plan.json").write_text(json.dumps(plan, default=str))
    subprocess.run([PEER, Path(__file__).with_name("peer.py"), tmp_path], check=True)
    theirs = load_file(tmp_path / "read.safetensors")
    assert theirs.keys() == ours.keys()
    for key in ours:
        assert difference(ours[key], theirs[key]) <= 1e-6, key  # logits are small
