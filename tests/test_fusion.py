"""The low-rank fusion, and the one with K and V applied once, are the textbook one."""

import pytest
import torch
from torch import nn

from adapter import Adapter, AdapterConfig
from bert import BertConfig
from fusion import Fusion
from reference import difference
from variants.pal import PAL, PALConfig


def adapters(configs, d, dtype):
    """Adapters with weights at which an error would show."""
    result = nn.ModuleList(
        Adapter(config, d, config.bottleneck_size(d, 0)) for config in configs
    ).to(dtype)
    for parameter in result.parameters():
        nn.init.normal_(parameter, std=0.5)
    return result


bapna, houlsby, pfeiffer = AdapterConfig.bapna, AdapterConfig.houlsby, AdapterConfig.pfeiffer
MIXTURES = {
    "different bottlenecks": [pfeiffer(reduction_factor=f) for f in (2, 4, 16)],
    "one adapter": [pfeiffer()],
    "different non-linearities": [
        AdapterConfig(non_linearity=n) for n in ("relu", "leakyrelu", "swish", "gelu")
    ],
    "with ln_before": [bapna(reduction_factor=f) for f in (4, 8)],
    "some with ln_before": [bapna(reduction_factor=4), pfeiffer(reduction_factor=2)],
    "houlsby": [houlsby(reduction_factor=f) for f in (8, 2)],
}


def outputs_and_gradients(form, fusion, h, direction, fused, layer_input=()):
    """[o, the gradients of h, the fusion's parameters, the adapters', and x if there is one]"""
    h = h.clone().requires_grad_()
    torch.manual_seed(1)  # the same scores are dropped
    o = form(h, fused) if form.__name__ == "low_rank" else form(h, fused, layer_input or None)
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
    fusion = Fusion("fusion", [str(i) for i in range(len(configs))], d, dropout=0.3)
    fusion = fusion.double().train(training)
    for parameter in fusion.parameters():
        nn.init.normal_(parameter, std=0.3)
    h, direction = torch.randn(2, 2, tokens // 2, d, dtype=torch.float64)
    slow = outputs_and_gradients(fusion.textbook, fusion, h, direction, fused)
    names = ["o", "h", *(name for name, _ in fusion.named_parameters())]
    for form in (fusion.low_rank, fusion.absorbed, fusion.compose):
        same_function(outputs_and_gradients(form, fusion, h, direction, fused), slow, names)
    if tokens > 2:  # without dropout the softmax does not see b_K, with dropout it does
        assert (slow[names.index("key.bias")].abs().max() > 1e-6) == (training and len(configs) > 1)


class Fourfold(Adapter):
    """A subclass with a z of its own keeps no promise of Adapter's."""

    def z(self, h, layer_input=None):
        return 4 * super().z(h, layer_input)


def pal(config, d):
    return PAL(config, BertConfig(hidden_size=d, attention_probs_dropout_prob=0.2))


OTHER_KINDS = {  # d: N modules
    "pal": lambda d: [pal(PALConfig.pal(size=12, num_heads=3), d) for _ in range(3)],
    "pal and low rank": lambda d: [
        pal(PALConfig.low_rank(size=8), d),
        pal(PALConfig.pal(size=8, num_heads=2), d),
    ],
    "four times z": lambda d: [Fourfold(bapna(), d, r) for r in (2, 3)],
    "four times z of one": lambda d: [Adapter(pfeiffer(), d, 2), Fourfold(pfeiffer(), d, 4)],
}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "dropout"])
@pytest.mark.parametrize("make", OTHER_KINDS.values(), ids=OTHER_KINDS)
def test_other_kinds_are_fused_by_the_textbook(make, training, monkeypatch):
    """Where z is not a bottleneck's, `absorbed` is used: also with the mask and the input of the
    whole layer, whose gradient is compared, too."""
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
    monkeypatch.setattr(fusion, "low_rank", lambda *_: pytest.fail("z is not a bottleneck's"))
    slow = outputs_and_gradients(fusion.textbook, fusion, h, direction, fused, layer_input)
    weights = fusion.weights
    names = ["o", "h", *(name for name, _ in fusion.named_parameters())]
    for form in (fusion.absorbed, fusion.compose):
        ours = outputs_and_gradients(form, fusion, h, direction, fused, layer_input)
        same_function(ours, slow, names)
        assert difference(fusion.weights, weights) <= 1e-10
    assert slow[0].std() > 0.1  # the comparison is of something
    reads_layer = any(type(adapter) is PAL for adapter in fused)
    assert (slow[-1] is not None) == reads_layer and (slow[1] is not None)
    if reads_layer:
        assert slow[-1].abs().max() > 0.1
