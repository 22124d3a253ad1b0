"""Θ, Φ and Ψ compute what the reference library computes, and read and write its files
(tests/make_golden.py)."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from adapter import (
    Adapter,
    AdapterConfig,
    activate,
    add_adapter,
    load_adapter,
    load_head,
    save_adapter,
    save_head,
)
from bert import Bert, BertConfig, attention, dropout
from fusion import (
    Fusion,
    add_fusion,
    fusion_regularization,
    fusion_weights,
    load_fusion,
    save_fusion,
)
from variants.folding import fold
from variants.pal import PAL, PALConfig

GOLDEN = Path(__file__).parent / "golden"
TOLERANCE = 2e-5
ENCODERS = ["bert", "roberta"]


def directories(file):
    """Every golden directory that holds such a file, as bert/pfeiffer."""
    return [str(path.parent.relative_to(GOLDEN)) for path in sorted(GOLDEN.glob(f"*/*/{file}"))]


ADAPTERS, HEADS = directories("adapter_config.json"), directories("head_config.json")
FUSIONS = directories("adapter_fusion_config.json")


@pytest.fixture(scope="module")
def expected():
    return {name: load_file(GOLDEN / name / "expected.safetensors") for name in ENCODERS}


def encoder(name):
    return Bert.from_pretrained(GOLDEN / name / "encoder")


def run(bert, inputs):
    with torch.no_grad():
        return bert(inputs["input_ids"], inputs["token_type_ids"], inputs["attention_mask"])


def with_fusion(directory):
    """An encoder with a golden fusion and the adapters that it names."""
    model, _ = directory.split("/")
    bert = encoder(model)
    for name in json.loads((GOLDEN / directory / "adapter_fusion_config.json").read_text())[
        "adapter_names"
    ]:
        load_adapter(bert, GOLDEN / model / name)
    load_fusion(bert, GOLDEN / directory)
    return bert


def difference(a, b):
    assert a.shape == b.shape
    return (a - b).abs().max().item()


def test_golden_set_is_complete():
    assert len(ADAPTERS) == 15 and len(FUSIONS) == 3 and len(HEADS) == 5
    assert sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file()) < 1_000_000


@pytest.mark.parametrize("name", ENCODERS)
def test_encoder(name, expected):
    assert (
        difference(run(encoder(name), expected[name]), expected[name]["encoder.last_hidden_state"])
        <= TOLERANCE
    )


@pytest.mark.parametrize("directory", ADAPTERS)
def test_adapter(directory, expected):
    model, name = directory.split("/")
    bert = encoder(model)
    assert load_adapter(bert, GOLDEN / directory) == name
    plain = run(bert, expected[model])  # loaded is not yet active
    assert difference(plain, expected[model]["encoder.last_hidden_state"]) <= TOLERANCE
    activate(bert, name)
    h = run(bert, expected[model])
    assert difference(h, expected[model][f"{name}.last_hidden_state"]) <= TOLERANCE
    assert (
        difference(h, plain) > 0.5
    )  # the adapter is not a small correction that a tolerance could hide


@pytest.mark.parametrize("directory", HEADS)
def test_head(directory, expected):
    model, name = directory.split("/")
    bert = encoder(model)
    activate(bert, load_adapter(bert, GOLDEN / directory))
    head = load_head(bert, GOLDEN / directory)
    logits = head(run(bert, expected[model]))
    assert difference(logits, expected[model][f"{name}.logits"]) <= TOLERANCE
    assert (
        difference(head(run(bert.double(), expected[model])), logits) <= TOLERANCE
    )  # the encoder's precision is its own


@pytest.mark.parametrize("directory", FUSIONS)
def test_fusion(directory, expected):
    model, name = directory.split("/")
    bert, expected = with_fusion(directory), expected[model]
    assert difference(run(bert, expected), expected[f"{name}.last_hidden_state"]) <= TOLERANCE
    weights = fusion_weights(bert)
    assert len(weights) == sum(key.startswith(f"{name}.attention.") for key in expected)
    for (layer, location), s in weights.items():
        location = {"attention": "mh_adapter", "output": "output_adapter"}[location]
        assert difference(s, expected[f"{name}.attention.{layer}.{location}"]) <= TOLERANCE
    assert difference(fusion_regularization(bert), expected[f"{name}.regularization"]) <= TOLERANCE


# --------------------------------------------------------------------------------------------------
# The fast fusion is the textbook one


def adapters(configs, d, dtype):
    """Adapters with weights at which an error would show."""
    result = nn.ModuleList(
        Adapter(config, d, config.bottleneck_size(d, 0)) for config in configs
    ).to(dtype)
    for parameter in result.parameters():
        nn.init.normal_(parameter, std=0.5)
    return result


MIXTURES = {
    "different bottlenecks": [AdapterConfig.pfeiffer(reduction_factor=f) for f in (2, 4, 16)],
    "one adapter": [AdapterConfig.pfeiffer()],
    "different non-linearities": [
        AdapterConfig(non_linearity=n) for n in ("relu", "leakyrelu", "swish", "gelu")
    ],
    "with ln_before": [
        AdapterConfig.bapna(reduction_factor=4),
        AdapterConfig.bapna(reduction_factor=8),
    ],
    "some with ln_before": [
        AdapterConfig.bapna(reduction_factor=4),
        AdapterConfig.pfeiffer(reduction_factor=2),
    ],
    "houlsby": [
        AdapterConfig.houlsby(reduction_factor=8),
        AdapterConfig.houlsby(reduction_factor=2),
    ],
}


def outputs_and_gradients(form, fusion, h, direction, fused, layer_input=()):
    """[o, the gradients of h, the fusion's parameters, the adapters', and x if there is one]"""
    h = h.clone().requires_grad_()
    torch.manual_seed(1)  # the same scores are dropped
    if form == fusion.fast:
        o = form(h, fused)
    else:
        o = form(h, fused, layer_input or None)
    of = [h, *fusion.parameters(), *fused.parameters(), *layer_input[:1]]
    return [o, *torch.autograd.grad((o * direction).sum(), of, allow_unused=True)]


def same_function(ours, textbook, names):
    for i, (fast, slow) in enumerate(zip(ours, textbook, strict=True)):
        name = names[i] if i < len(names) else f"adapter parameter {i - len(names)}"
        assert (fast is None) == (slow is None), name
        if fast is not None:
            assert difference(fast, slow) <= 1e-10 * max(1, slow.abs().max()), name


@pytest.mark.parametrize(
    "tokens", [2, 24, 200], ids="{} tokens".format
)  # the cheapest order of the products differs
@pytest.mark.parametrize("training", [False, True], ids=["eval", "dropout on the scores"])
@pytest.mark.parametrize("configs", MIXTURES.values(), ids=MIXTURES)
def test_mix_is_textbook(configs, training, tokens):
    torch.manual_seed(0)
    d = 32
    fused = adapters(configs, d, torch.float64)
    fusion = (
        Fusion("fusion", [str(i) for i in range(len(configs))], d, dropout=0.3)
        .double()
        .train(training)
    )
    for parameter in fusion.parameters():
        nn.init.normal_(parameter, std=0.3)
    h, direction = torch.randn(2, 2, tokens // 2, d, dtype=torch.float64)
    slow = outputs_and_gradients(fusion.textbook, fusion, h, direction, fused)
    names = ["o", "h", *(name for name, _ in fusion.named_parameters())]
    assert names == [
        "o",
        "h",
        "query.weight",
        "query.bias",
        "key.weight",
        "key.bias",
        "value.weight",
    ]
    for form in (fusion.fast, fusion.once, fusion.compose):
        same_function(outputs_and_gradients(form, fusion, h, direction, fused), slow, names)
    if tokens > 2:  # without dropout the softmax does not see b_K, with dropout it does
        assert (slow[5].abs().max() > 1e-6) == (training and len(configs) > 1)


class Fourfold(Adapter):
    """A kind of adapter with a z of its own, of which `fast` knows nothing."""

    def z(self, h, layer_input=None):
        return 4 * super().z(h, layer_input)


def pal(config, d):
    return PAL(config, BertConfig(hidden_size=d, attention_probs_dropout_prob=0.2))


OTHER_KINDS = {  # d: N modules
    "pal": lambda d: [pal(PALConfig.pal(size=12, num_heads=3), d) for _ in range(3)],
    "low rank": lambda d: [pal(PALConfig.low_rank(size=size), d) for size in (2, 8)],
    "pal and low rank": lambda d: [
        pal(PALConfig.low_rank(size=8), d),
        pal(PALConfig.pal(size=8, num_heads=2), d),
    ],
    "one pal": lambda d: [pal(PALConfig.pal(size=4, num_heads=2), d)],
    "four times z": lambda d: [Fourfold(AdapterConfig.bapna(), d, r) for r in (2, 3)],
    "four times z of one": lambda d: [
        Adapter(AdapterConfig.pfeiffer(), d, 2),
        Fourfold(AdapterConfig.pfeiffer(), d, 4),
    ],
}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "dropout"])
@pytest.mark.parametrize("make", OTHER_KINDS.values(), ids=OTHER_KINDS)
def test_other_kinds_are_fused_by_the_textbook(make, training, monkeypatch):
    """Where z is not a bottleneck's, `once` is used: also with the mask and the input of the whole
    layer, whose gradient is compared, too."""
    torch.manual_seed(0)
    d = 24
    fused = nn.ModuleList(make(d)).double().train(training)
    fusion = Fusion("fusion", [str(i) for i in range(len(fused))], d, dropout=0.3)
    fusion = fusion.double().train(training)
    for parameter in [*fusion.parameters(), *fused.parameters()]:
        nn.init.normal_(parameter, std=0.3)
    h, x, direction = torch.randn(3, 3, 7, d, dtype=torch.float64)
    mask = (torch.arange(7) < torch.tensor([7, 4, 1])[:, None])[:, None, None]
    layer_input = x.requires_grad_(), mask
    monkeypatch.setattr(fusion, "fast", lambda *_: pytest.fail("z is not a bottleneck's"))
    slow = outputs_and_gradients(fusion.textbook, fusion, h, direction, fused, layer_input)
    weights = fusion.weights
    names = ["o", "h", *(name for name, _ in fusion.named_parameters())]
    for form in (fusion.once, fusion.compose):
        ours = outputs_and_gradients(form, fusion, h, direction, fused, layer_input)
        same_function(ours, slow, names)
        assert difference(fusion.weights, weights) <= 1e-10
    assert slow[0].std() > 0.1  # the comparison is of something
    reads_layer = any(type(adapter) is PAL for adapter in fused)
    assert (slow[-1] is not None) == reads_layer and (slow[1] is not None)
    if reads_layer:
        assert slow[-1].abs().max() > 0.1


@pytest.mark.parametrize("configs", MIXTURES.values(), ids=MIXTURES)
def test_folded_is_textbook(configs):
    torch.manual_seed(0)
    bert = encoder("bert").double()
    for i, config in enumerate(configs):
        add_adapter(bert, f"adapter {i}", config)
    add_fusion(bert, [f"adapter {i}" for i in range(len(configs))])
    for name, parameter in bert.named_parameters():
        if ".adapters." in name or ".fusion." in name:
            nn.init.normal_(parameter, std=0.3)
    before = {name: (p, p.clone(), p.requires_grad) for name, p in bert.named_parameters()}
    folded = fold(bert)
    ids = torch.randint(5, 40, (4, 9))
    with torch.no_grad():
        o, folded_o = bert(ids), folded(ids)
    assert difference(o, folded_o) <= 1e-10
    assert o.std() > 0.1  # the comparison is of something
    for (key, s), (folded_key, folded_s) in zip(
        fusion_weights(bert).items(), fusion_weights(folded).items(), strict=True
    ):
        assert key == folded_key and difference(s, folded_s) <= 1e-10
    # the encoder that was folded is as it was, and nothing is held twice
    for name, p in bert.named_parameters():
        assert (
            p is before[name][0]
            and torch.equal(p, before[name][1])
            and p.requires_grad == before[name][2]
        )
    assert all(p is before[name][0] for name, p in folded.named_parameters())
    with pytest.raises(ValueError, match="folded"):
        save_fusion(folded, "never-written")


@pytest.mark.parametrize("directory", FUSIONS)
def test_folded_is_the_reference_s(directory, expected):
    bert, inputs = with_fusion(directory), expected[directory.split("/")[0]]
    assert difference(run(fold(bert), inputs), run(bert, inputs)) <= 1e-5


# --------------------------------------------------------------------------------------------------
# The shorter ways through the encoder


@pytest.mark.parametrize("directory", [*ADAPTERS[:3], *FUSIONS])
def test_cls_only_is_the_first_token(directory, expected):
    bert, inputs = encoder(directory.split("/")[0]), expected[directory.split("/")[0]]
    if directory in FUSIONS:
        bert = with_fusion(directory)
    else:
        activate(bert, load_adapter(bert, GOLDEN / directory))
    whole = run(bert, inputs)
    with torch.no_grad():
        first = bert(
            *(inputs[name] for name in ("input_ids", "token_type_ids", "attention_mask")),
            cls_only=True,
        )
    assert first.shape == (len(whole), 1, whole.shape[2])
    assert difference(first, whole[:, :1]) <= 1e-5


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout(p):
    torch.manual_seed(0)
    x = torch.rand(1000, 1001) + 0.5  # an odd number of elements
    x.requires_grad_()
    y = dropout(x, p, training=True)
    kept = y != 0
    # four standard deviations of the share, and of the shares of single rows and columns
    assert abs(kept.float().mean() - (1 - p)) < 4 * math.sqrt(p * (1 - p) / x.numel())
    for dim in (0, 1):
        assert (kept.float().mean(dim) - (1 - p)).abs().max() < 6 * math.sqrt(p * (1 - p) / 1000)
    assert torch.allclose(y[kept], x[kept] / (1 - p))
    y.sum().backward()
    assert torch.allclose(x.grad, kept / (1 - p))
    assert not torch.equal(dropout(x, p, training=True) != 0, kept)
    torch.manual_seed(0)
    torch.rand(1000, 1001)
    assert torch.equal(dropout(x, p, training=True), y)
    assert dropout(x, p, training=False) is x and dropout(x, 0.0, training=True) is x


def test_attention_in_training_is_the_one_in_evaluation():
    """They are written differently on a CPU; with a dropout of almost nothing they must agree."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 5, 4, 7, 8, dtype=torch.float64)
    mask = (torch.arange(7) < torch.tensor([1, 3, 7, 6, 2])[:, None])[:, None, None]
    for m in (mask, None):
        assert difference(attention(q, k, v, m, 1e-9), attention(q, k, v, m, 0.0)) <= 1e-8


# --------------------------------------------------------------------------------------------------
# Files


def same_tensors(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def read_tensors(directory, stem):
    if (directory / f"{stem}.safetensors").exists():
        return load_file(directory / f"{stem}.safetensors")
    return torch.load(directory / f"pytorch_{stem}.bin", weights_only=True)


def same_json(ours, theirs):
    """The same fields and values; model_name is where the encoder came from, which the golden sets
    left empty."""
    ours, theirs = json.loads(ours.read_text()), json.loads(theirs.read_text())
    return {**ours, "model_name": ""} == theirs


@pytest.mark.parametrize("directory", ADAPTERS)
def test_saved_adapter_is_the_reference_s(directory, tmp_path):
    bert = encoder(directory.split("/")[0])
    name = load_adapter(bert, GOLDEN / directory)
    save_adapter(bert, name, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "adapter.safetensors",
        "adapter_config.json",
    ]
    assert same_tensors(
        load_file(tmp_path / "adapter.safetensors"), read_tensors(GOLDEN / directory, "adapter")
    )
    assert same_json(tmp_path / "adapter_config.json", GOLDEN / directory / "adapter_config.json")


@pytest.mark.parametrize("directory", HEADS)
def test_saved_head_is_the_reference_s(directory, tmp_path):
    bert = encoder(directory.split("/")[0])
    save_head(load_head(bert, GOLDEN / directory), bert, directory.split("/")[1], tmp_path)
    assert same_tensors(
        load_file(tmp_path / "model_head.safetensors"),
        read_tensors(GOLDEN / directory, "model_head"),
    )
    assert same_json(tmp_path / "head_config.json", GOLDEN / directory / "head_config.json")


@pytest.mark.parametrize("directory", FUSIONS)
def test_saved_fusion_is_the_reference_s(directory, tmp_path):
    save_fusion(with_fusion(directory), tmp_path)
    stem = "model_adapter_fusion"
    assert same_tensors(
        load_file(tmp_path / f"{stem}.safetensors"), read_tensors(GOLDEN / directory, stem)
    )
    assert same_json(
        tmp_path / "adapter_fusion_config.json", GOLDEN / directory / "adapter_fusion_config.json"
    )


def test_saved_reads_back_bit_identical(tmp_path, expected):
    """Also what the reference has no golden file for: by random configurations, through save and
    load."""
    torch.manual_seed(3)
    bert = encoder("bert")
    for name, config in {
        "a": AdapterConfig.pfeiffer(reduction_factor=3),
        "b": AdapterConfig.bapna(),
    }.items():
        add_adapter(bert, name, config)
    add_fusion(bert, ["b", "a"])
    for parameter in (
        p for key, p in bert.named_parameters() if ".adapters." in key or ".fusion." in key
    ):
        parameter.data.normal_(std=0.3)
    save_fusion(bert, tmp_path / "fusion")
    for name in "ab":
        save_adapter(bert, name, tmp_path / name)
    again = encoder("bert")
    for name in "ab":
        load_adapter(again, tmp_path / name)
    load_fusion(again, tmp_path / "fusion")
    assert same_tensors(bert.state_dict(), again.state_dict())
    assert torch.equal(run(bert, expected["bert"]), run(again, expected["bert"]))


def test_saved_encoder_reads_back_bit_identical(tmp_path, expected):
    for name in ENCODERS:
        bert = encoder(name)
        load_adapter(bert, GOLDEN / name / "pfeiffer")  # what is plugged in is not part of it
        bert.save_pretrained(tmp_path / name)
        golden = load_file(GOLDEN / name / "encoder" / "model.safetensors")
        golden = {key: tensor for key, tensor in golden.items() if ".pooler." not in key}
        assert same_tensors(load_file(tmp_path / name / "model.safetensors"), golden)
        assert Bert.from_pretrained(tmp_path / name).config == bert.config


# --------------------------------------------------------------------------------------------------
# An example's hidden states are its own


@pytest.mark.parametrize("name", ENCODERS)
def test_padding_and_order_do_not_matter(name, expected):
    bert, inputs = encoder(name), expected[name]
    activate(bert, load_adapter(bert, GOLDEN / name / "pfeiffer"))
    together = run(bert, inputs)
    order = torch.tensor([2, 0, 3, 1])
    fields = ("input_ids", "token_type_ids", "attention_mask")
    shuffled = run(bert, {field: inputs[field][order] for field in fields})
    for i, length in enumerate(inputs["attention_mask"].sum(1).tolist()):
        alone = run(bert, {field: inputs[field][i : i + 1, :length] for field in fields})[0]
        assert difference(together[i, :length], alone) <= 1e-5
        assert difference(shuffled[order.tolist().index(i), :length], alone) <= 1e-5


def test_defaults_of_the_inputs(expected):
    """Without token types all are 0, without a mask all tokens are real."""
    bert, ids = encoder("bert"), torch.tensor([[2, 7, 8, 3]])
    with torch.no_grad():
        assert torch.equal(bert(ids), bert(ids, torch.zeros_like(ids), torch.ones_like(ids)))
        bert(torch.ones(1, 24, dtype=torch.long))
        with pytest.raises(ValueError, match="25 tokens"):
            bert(torch.ones(1, 25, dtype=torch.long))
        with pytest.raises(ValueError, match="23 tokens"):  # positions 2 to 23
            encoder("roberta")(torch.ones(1, 23, dtype=torch.long))


def test_base_sizes():
    """BERT-base without pooler."""
    with torch.device("meta"):
        bert = Bert(BertConfig())
    assert sum(parameter.numel() for parameter in bert.parameters()) == 108_891_648
