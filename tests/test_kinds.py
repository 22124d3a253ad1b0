"""Every kind in a dictionary, those of examples/ and own_fork.py included, has the same properties.
Where a new one differs, say so in PROBLEMS, NO_DISTRIBUTION, ORDERED, STAGES, or NOT_TRAINED."""

import argparse
import contextlib
import copy
import importlib
import itertools
import re
import signal
import sys
from pathlib import Path
from statistics import mean
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import child
import train
from adapter import ADAPTERS, HEADS, Adapter, activate, add_adapter
from bert import ACTIVATIONS, ENCODERS, Bert, BertConfig
from conftest import WORDS, assert_equal, interrupt, main, randomize, same_tensors, tiny_encoder
from data import CLASS_SCORES, TASKS
from experiments import evaluate
from experiments.load_run import load_run
from formats.files import note, read_json
from fusion import FUSIONS, Fusion, active_fusions, add_fusion, fusion_weights

EXAMPLES = sorted(path.stem for path in Path(train.__file__).parent.glob("examples/[!_]*.py"))
TABLES = (ADAPTERS, FUSIONS, HEADS, TASKS, ENCODERS, train.STAGES)
with contextlib.ExitStack() as stack:
    for table in TABLES:
        stack.enter_context(patch.dict(table))
    for name in ["own_fork", "experiments.pal", *(f"examples.{name}" for name in EXAMPLES)]:
        importlib.import_module(name)
    KINDS = [dict(table) for table in TABLES]
ADAPTER_KINDS, FUSION_KINDS, HEAD_KINDS, EVERY_TASK, ENCODER_KINDS, STAGE_KINDS = KINDS


@pytest.fixture(autouse=True, scope="module")
def examples():
    """The other tests know nothing of these kinds."""
    with contextlib.ExitStack() as stack:
        for table, kinds in zip(TABLES, KINDS, strict=True):
            stack.enter_context(patch.dict(table, kinds))
        yield


PROBLEMS = {"lora": "no output z"}  # of a fusion
FUSED = [kind for kind in ADAPTER_KINDS if kind not in PROBLEMS]
ORDERED = {*"static scalearn scalearn_uniform router".split()}  # with parameters for adapter n
NO_DISTRIBUTION = [*"sum value_of_sum gates".split(), *ORDERED - {"router"}]  # s is no softmax
FORMS = {"pal": None, "own": None}  # classes with a z of their own are computed by the textbook
ALONE_AND_FUSED = [(kind, None) for kind in ADAPTER_KINDS]
ALONE_AND_FUSED += [(kind, fusion_kind) for kind in FUSED for fusion_kind in FUSION_KINDS]
every_adapter = pytest.mark.parametrize("kind", ADAPTER_KINDS)
# where a kind has such fields, the second and the third adapter differ from the first
VARIED = {"a": {}, "b": {"reduction_factor": 4, "size": 12, "num_heads": 3}}
VARIED["c"] = {"reduction_factor": 8, "non_linearity": "gelu"}
TASK_KINDS = [EVERY_TASK[name] for name in ("mnli", "social_i_qa", "sts_b")]  # 3, 3 and 1 outputs


def new_bert(encoder, kind, names="ab", dtype=torch.float64, device="cpu"):
    """The tiny encoder with adapters of one kind and different weights."""
    torch.manual_seed(1)
    bert = Bert.from_pretrained(encoder).to(device, dtype)
    for name in names:
        fields = vars(ADAPTERS[kind]()).keys() & VARIED[name].keys()
        add_adapter(bert, name, ADAPTERS[kind](**{field: VARIED[name][field] for field in fields}))
    randomize(bert, ".adapters.")
    return bert


def fuse(bert, names, fusion_kind):
    """A new fusion with such weights."""
    fields = {"power": 2.0} if fusion_kind == "own" else {}
    add_fusion(bert, names, FUSIONS[fusion_kind], **fields)
    randomize(bert, ".fusion.")


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """{kind: directory} of a tiny encoder of every kind"""
    root = tmp_path_factory.mktemp("encoders")
    return {kind: tiny_encoder(kind, root / kind) for kind in ENCODERS}


def inputs(padding=0):
    """input_ids, token_type_ids, attention_mask [3, 7 + padding]; lengths 7, 4 and 2"""
    torch.manual_seed(2)
    ids = torch.randint(5, 5 + len(WORDS), (3, 7))
    mask = (torch.arange(7) < torch.tensor([7, 4, 2])[:, None]).long()
    given = ids * mask, torch.randint(0, 2, (3, 7)) * mask, mask
    return [F.pad(tensor, (0, padding)) for tensor in given]


def batch_of(padding=0):
    names = "input_ids token_type_ids attention_mask".split()
    return dict(zip(names, inputs(padding), strict=True))


def close(ours, theirs):
    return torch.allclose(ours, theirs, rtol=1e-9, atol=1e-11)


def outputs_and_gradients(bert, given):
    torch.manual_seed(3)  # the same is dropped
    h = bert(*given)
    trained = [p for p in bert.parameters() if p.requires_grad]
    return [h, *(torch.autograd.grad(h.pow(3).sum(), trained) if trained else ())]


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("fusion_kind", FUSION_KINDS)
def test_the_form_that_is_used_is_the_textbooks(encoder, kind, fusion_kind):
    """Many tokens and few, with dropout, in any order. What was added last is trained alone."""
    bert, names = new_bert(encoder, kind, "abc"), "abc"
    assert all(".adapters.c." in n for n, p in bert.named_parameters() if p.requires_grad)
    fuse(bert, names, fusion_kind)
    assert all(".fusion." in n for n, p in bert.named_parameters() if p.requires_grad)
    fusions, many = active_fusions(bert), inputs()
    if fusion_kind == "attention":  # a form that fell back by mistake would only be slower
        assert {fusion.fast_form for fusion in fusions.values()} == {FORMS.get(kind, "apart")}
    for training in (False, True):
        for given in (many, [tensor[1:2, :4] for tensor in many]):
            ours = outputs_and_gradients(bert.train(training), given)
            by_the_textbook = copy.deepcopy(bert)
            copies = active_fusions(by_the_textbook)
            for fusion in copies.values():
                fusion.fast_form = None
            theirs = outputs_and_gradients(by_the_textbook, given)
            assert all(map(close, ours, theirs))
            assert all(close(fusions[key].s, copies[key].s) for key in copies)
    h = bert.eval()(*many)
    sums = torch.stack([fusion.s.sum(-1) for fusion in fusions.values()])
    is_distribution = close(sums, torch.ones_like(sums))
    assert is_distribution == (fusion_kind not in NO_DISTRIBUTION), "does s sum to 1?"
    fuse(bert, names[::-1], fusion_kind)
    for key, fusion in active_fusions(bert).items():
        fusion.load_state_dict(fusions[key].state_dict())
    is_ordered = not close(bert(*many), h)
    assert is_ordered == (fusion_kind in ORDERED), "is it the same in another order of adapters?"
    activate(bert)  # the adapters do speak
    assert not torch.allclose(bert(*many), h, atol=1e-3)


BOTTLENECK, Z, CLOSE = Adapter.bottleneck, Adapter.z, Adapter.close
SOFTMAX, TEXTBOOK = Fusion.softmax, Fusion.textbook

EDITS = [  # what is edited, and how; the form that is then used
    (Adapter, "bottleneck", lambda self, h: BOTTLENECK(self, h).square(), "apart"),
    (Fusion, "softmax", lambda self, x: SOFTMAX(self, x + torch.randn_like(x)), "joint"),
    (Adapter, "z", lambda self, h: F.dropout(Z(self, h), 0.5, self.training), None),
    (Fusion, "textbook", lambda self, *x: TEXTBOOK(self, *x) * (1 if self.training else 2), None),
]


@pytest.mark.parametrize("owner, name, edit, form", EDITS)
def test_an_edit_acts_in_both_stages(quiet_encoder, owner, name, edit, form, monkeypatch, capsys):
    """Where the fast form cannot follow it, a note says so. No comparison draws random numbers."""
    bert = new_bert(quiet_encoder, "pfeiffer").train()

    def alone_and_fused():
        activate(bert, "a")
        alone = bert(*inputs())
        torch.manual_seed(4)
        add_fusion(bert, "ab")
        return alone, bert(*inputs())

    before = alone_and_fused()
    monkeypatch.setattr(owner, name, edit)
    note.cache_clear()
    after = alone_and_fused()
    assert [*map(torch.equal, before, after)] == [owner is Fusion, False]
    assert {fusion.fast_form for fusion in active_fusions(bert).values()} == {form}
    assert ("is slower" in capsys.readouterr().out) == (form is None)
    monkeypatch.setattr("fast.low_rank.compare_forms", lambda *_: form)
    assert all(map(torch.equal, after, alone_and_fused()))


def test_leaving_an_adapter_out(encoder, monkeypatch):
    """By a score of −∞, of which dropout makes no NaN."""
    bert, out = new_bert(encoder, "pfeiffer", "abc").train(), torch.tensor([0.0, -torch.inf, 0.0])
    fuse(bert, "abc", "attention")
    monkeypatch.setattr(Fusion, "softmax", lambda self, x: SOFTMAX(self, x + out))
    assert all(tensor.isfinite().all() for tensor in outputs_and_gradients(bert, inputs()))
    assert not any(s[..., 1].any() for s in fusion_weights(bert).values())


def test_one_state_says_what_is_computed(encoder):
    """Without an active fusion: no weights, no penalty; in another order it is another fusion."""
    bert = new_bert(encoder, "pfeiffer", "abc")
    fuse(bert, "ab", "attention")
    h, s = bert(*inputs()), fusion_weights(bert)
    for active in ("a", None):
        activate(bert, active)
        bert(*inputs())
        assert train.fusion_regularization(bert) == 0
        with pytest.raises(ValueError, match="no fusion is active"):
            fusion_weights(bert)
    with pytest.raises(ValueError, match="no fusion of"):
        activate(bert, ("b", "a"))
    activate(bert, ("a", "b"))
    assert torch.equal(bert(*inputs()), h) and train.fusion_regularization(bert) > 0
    assert same_tensors(fusion_weights(bert), s)


def test_an_activation_with_parameters(encoder, monkeypatch):
    """Each adapter has its own; a fusion then has no common one."""
    monkeypatch.setitem(ACTIVATIONS, "prelu", nn.PReLU())
    config, bert = ADAPTERS["pfeiffer"](non_linearity="prelu"), Bert.from_pretrained(encoder)
    for name in "ab":
        add_adapter(bert, name, config)
    assert len({id(p) for n, p in bert.named_parameters() if ".act." in n}) == 4
    add_fusion(bert, "ab")
    assert {fusion.fast_form for fusion in active_fusions(bert).values()} == {"apart"}


class Parallel(Adapter):
    """It reads x, as He et al. (2022) have it."""

    def forward(self, f, x, norm):
        return norm(f + self.z(x) + x)

    def h_and_residual(self, f, x, norm):
        return x, f


def test_what_a_fusion_would_compute_otherwise(encoder, monkeypatch, capsys):
    """Noted of AdapterHub's kinds, refused of an own class, and of an edit that it cannot see."""
    bert, config = new_bert(encoder, "pfeiffer", "a", torch.bfloat16), ADAPTERS["pfeiffer"]()
    add_adapter(bert, "b", ADAPTERS["bapna"]())
    add_fusion(bert, "ab")
    assert "the last one" in capsys.readouterr().out
    config.module = lambda hidden_size, layer: Parallel(config, hidden_size, 2)
    add_adapter(bert, "c", config)
    with pytest.raises(ValueError, match="cannot mix"):
        add_fusion(bert, "ac")
    add_fusion(bert, "c")
    monkeypatch.setattr(Adapter, "close", lambda self, *x: CLOSE(self, *x).relu())
    with pytest.raises(ValueError, match="'a': its `forward` must be"):
        add_fusion(bert, "a")


@every_adapter
def test_what_cannot_be_fused_is_refused_by_name(encoder, kind):
    """And the fusion that is there stays; adapters of different kinds can be mixed."""
    bert = new_bert(encoder, "pfeiffer", "a")
    add_fusion(bert, "a")
    before, problem = active_fusions(bert), {"houlsby": "different locations", **PROBLEMS}.get(kind)
    add_adapter(bert, kind, ADAPTERS[kind]())
    if problem:
        with pytest.raises(ValueError, match=f"{kind}.*{problem}|{problem}.*{kind}"):
            add_fusion(bert, ["a", kind])
        activate(bert, ("a",))
        assert active_fusions(bert) == before
    else:
        add_fusion(bert, ["a", kind])
        assert bert(*inputs()).isfinite().all()


@torch.no_grad()
@every_adapter
@pytest.mark.parametrize("encoder_kind", ENCODER_KINDS)
def test_padding_and_other_examples_change_nothing(encoders, encoder_kind, kind):
    """Of an adapter alone and of each kind of fusion; and of each kind of head behind them."""
    bert = new_bert(encoders[encoder_kind], kind)
    names = [argparse.Namespace(head=name) for name in HEADS]
    heads = [train.new_head(name, task, bert).double() for name in names for task in TASK_KINDS]
    for fusion_kind in (None, *(FUSION_KINDS if kind in FUSED else ())):
        if fusion_kind:
            fuse(bert, "ab", fusion_kind)
        ids, types, mask = inputs()
        h, long = bert(ids, types, mask), bert(*inputs(padding=9))[:, :7]
        assert close(h[mask.bool()], long[mask.bool()])
        assert close(h[1:2, :4], bert(ids[1:2, :4], types[1:2, :4], mask[1:2, :4]))
        for head in heads if fusion_kind in (None, "attention") else ():
            model = train.Model(bert, head).eval()
            for padding in (0, 5):
                ours = model(batch_of(padding))
                assert torch.allclose(ours, head(h, mask).float(), atol=1e-6)


@pytest.mark.parametrize("kind, fusion_kind", ALONE_AND_FUSED)
def test_all_is_computed_on_one_device(encoder, kind, fusion_kind):
    """`meta` computes nothing, and mixes with no other."""
    bert = new_bert(encoder, kind, dtype=torch.float32, device="meta")
    if fusion_kind:
        fuse(bert, "ab", fusion_kind)
    pairs = [*itertools.product(HEADS, TASK_KINDS)]
    for name, task in pairs if fusion_kind in (None, "attention") else pairs[:1]:
        head = train.new_head(argparse.Namespace(head=name), task, bert)
        model = train.Model(bert, head).train()
        logits = model(batch_of())
        labels = torch.zeros(len(logits), device="meta")
        loss = task.loss(logits, labels if len(task.labels) == 1 else labels.long())
        (loss + train.fusion_regularization(bert)).backward()
        assert task.prediction(logits).shape == labels.shape


def multiply_adds(work):
    """How many products it takes, for what docs/benchmarks.md says"""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        work()
    return counter.get_total_flops() / 2


def test_the_products_of_a_forward_pass():
    """With more tokens than columns R, K U and V U are computed once: fewer than in `textbook`."""
    B, T, d, m, L, r, N = 5, 12, 64, 128, 3, 4, 4
    bert = Bert(BertConfig(100, d, L, 4, m)).requires_grad_(False).eval()
    for name in "abcd":
        add_adapter(bert, name, ADAPTERS["pfeiffer"]())
    add_fusion(bert, "abcd")
    ids, tokens = torch.zeros(B, T, dtype=torch.long), B * T * L
    encoder = tokens * (4 * d * d + 2 * d * m + 2 * T * d)
    R = N * (r + 1)  # columns of all U_n and b_n
    fusion = L * 2 * d * d * R + tokens * (d * d + N * r * d + 2 * R * d + 2 * R * N)
    assert multiply_adds(lambda: bert(ids, ids, ids)) == encoder + fusion
    assert fusion < tokens * (d * d + 2 * N * d * d)
    # no gradient of frozen weights, and none below the first adapter
    assert multiply_adds(lambda: bert(ids, ids, ids).sum().backward()) < 3 * encoder


# Runs: {name: (stage, other options)}, and the parts of the names of what a stage trains
STAGES = {
    "adapter": r"\.adapters\.sst2\.|^head\.",
    "fusion": r"\.fusion\.|^head\.",
    "head": r"^head\.",
    "full": r"",
    "multitask": r"",
    "houlsby": r"\.adapters\.sst2\.|norm\.(weight|bias)$|^head\.",
    "soup": r"^head\.",
    "own": r"^bert\.(?!.*\.adapters\.).*bias|\.adapters\.sst2\.|\.gate$|\.prompt$|^head\.",
}
NOT_TRAINED = {"own": r"\.down\.", "fusion mean": r"\.fusion\.(query|key)\."}
COMMANDS = {kind: ("adapter", f"--adapter {kind}") for kind in ADAPTER_KINDS}
COMMANDS |= {f"fusion {kind}": ("fusion", f"--fusion {kind}") for kind in FUSION_KINDS}
COMMANDS["fusion own"] = ("fusion", "--fusion own --fusion-config power=2")
COMMANDS |= {f"task {t}": ("head", f"--task {t}") for t in ("rte", "pick", "sts_b", "own")}
COMMANDS |= {f"score {score}": ("head", f"--score {score}") for score in CLASS_SCORES}
COMMANDS |= {f"head {head}": ("head", f"--task pick --head {head}") for head in HEAD_KINDS}
COMMANDS |= {f"encoder {kind}": ("full", "") for kind in ENCODER_KINDS}
OWN_STAGES = [stage for stage in STAGE_KINDS if stage not in "adapter fusion head full".split()]
COMMANDS |= {f"stage {stage}": (stage, "") for stage in [*OWN_STAGES, "multitask"]}
COMMANDS["stage multitask, Θ alone"] = ("multitask", "--without-adapters")
COMMANDS["stage soup"] = ("soup", "--adapters {runs}/rte again={runs}/rte")  # of one architecture
ONE_TASK = [name for name, (stage, _) in COMMANDS.items() if stage != "multitask"]
every_run = pytest.mark.parametrize("run", COMMANDS, indirect=True)


@pytest.fixture(scope="module")
def words(command, encoder, encoders, runs):
    """words(name, out, ...) of a run of COMMANDS, in bf16, as on a GPU"""

    def words(name, out, more=""):
        stage, text = COMMANDS[name]
        text = f"{text.format(runs=runs)} --limit-train 33 --limit-dev 20 --seed 3 {more}"
        model = encoders[name.split()[1]] if "encoder" in name else encoder
        return command(stage, out, f"--dtype bfloat16 {text}", model=model)

    return words


@pytest.fixture(scope="module")
def run(request, words, tmp_path_factory):
    """(name, what `main` returned, and if it is on one task: the model, {name: tensor} at first)"""
    begun, hold_frozen_in = [], train.hold_frozen_in

    def remember(model, kept, dtype):
        hold_frozen_in(model, kept, dtype)
        begun.extend((model, {n: t.clone() for n, t in model.state_dict().items()}))

    with patch.object(train, "hold_frozen_in", remember):
        result = main(words(request.param, tmp_path_factory.mktemp("runs") / "run"))
    return request.param, result, *begun


@pytest.mark.parametrize("run", ONE_TASK, indirect=True)
def test_what_is_new_is_trained_and_nothing_else_moves(run):
    """Not by a single bit."""
    name, result, model, before = run
    assert result["stage"] in STAGES, "which parts of the names are those of what it trains?"
    parameters, of_stage = dict(model.named_parameters()), STAGES[result["stage"]]
    fixed = {n for n in parameters if not re.search(of_stage, n)}
    new = parameters.keys() - fixed
    new -= {n for n in new if name in NOT_TRAINED and re.search(NOT_TRAINED[name], n)}
    trained = {n for n, p in parameters.items() if p.requires_grad}
    assert trained == new, "what of it stays frozen is in NOT_TRAINED"
    assert result["trained_parameters"] == sum(parameters[n].numel() for n in new)
    moved = {n for n, p in parameters.items() if not torch.equal(p, before[n])}
    # the last bias of a multiple-choice head is the same for all choices
    still = new - moved - {"head.layers.4.bias"}
    assert not still and moved <= new, "what of it has no effect is frozen, or goes"
    assert {parameters[n].dtype for n in new} == {torch.float32}
    if result["stage"] in ("adapter", "fusion", "head") and name != "own":  # which freezes its own
        assert {parameters[n].dtype for n in fixed} == {torch.bfloat16}


@every_run
def test_loaded_it_is_the_same_model(run):
    """And `load_run` draws nothing. Of several tasks each has its head."""
    _, result, *begun = run
    torch.manual_seed(5)
    random, losses = torch.get_rng_state(), []
    accuracies = result.get("accuracies", {result["task"]: result.get("accuracy")})
    for task, accuracy in accuracies.items():
        loaded = load_run(result["out"], task=task)
        assert torch.equal(torch.get_rng_state(), random)
        found = train.evaluate(loaded.model, loaded.task, loaded.split(), loaded.args)
        assert found.get("accuracy") == accuracy
        losses.append(found["loss"])
    assert mean(losses) == result["dev_loss"]
    if len(losses) == 1:
        assert same_tensors(loaded.model.state_dict(), begun[0].state_dict())
        assert found[loaded.args.score] == result[loaded.args.score]


@every_run
def test_interrupted_and_resumed_it_ends_in_the_same_files(run, words, tmp_path):
    name, result, *_ = run
    interrupt(words(name, tmp_path), 8, signal.SIGINT)
    main(words(name, tmp_path, "--resume"))
    assert_equal(tmp_path, Path(result["out"]))


@pytest.mark.parametrize("name", [name for name in COMMANDS if name.endswith("own")])
def test_an_entry_of_a_module(name, words, tmp_path, monkeypatch):
    """As a user trains and evaluates with --import; without it the name is refused."""
    status, _, error = child.ends(words(name, tmp_path, "--import own_fork"))
    assert status == 0, error
    for table in TABLES:
        monkeypatch.delitem(table, "own")
    with pytest.raises(ValueError, match="'own'.*--import"):
        load_run(tmp_path)
    monkeypatch.delitem(sys.modules, "own_fork")
    again = evaluate.main([str(tmp_path), *"--device cpu --import own_fork".split()])
    assert again["loss"] == read_json(tmp_path / "metrics.json")["dev_loss"]
