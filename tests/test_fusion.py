"""The low-rank fusion, and the one with K and V applied once, are the textbook one."""

import pytest
import torch
from torch import nn

from adapter import Adapter, AdapterConfig, add_adapter
from bert import BertConfig
from fusion import Fusion, add_fusion
from reference import difference
from variants.pal import PAL, PALConfig

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


def fused(bert, configs):
    """The encoder in float64 with a fusion of adapters a0, a1, …, and weights at which an error
    would show."""
    torch.manual_seed(0)
    bert.double()
    for i, config in enumerate(configs):
        add_adapter(bert, f"a{i}", config)
    add_fusion(bert, [f"a{i}" for i in range(len(configs))])
    for name, parameter in bert.named_parameters():
        if ".adapters." in name or ".fusion." in name:
            nn.init.normal_(parameter, std=0.3)
    return bert


def new_fusion(modules, d, training):
    """(the adapters, a fusion of them), with such weights"""
    torch.manual_seed(0)
    adapters = nn.ModuleList(modules)
    fusion = Fusion("fusion", [str(i) for i in range(len(adapters))], d, dropout=0.3)
    for module in (adapters, fusion):
        module.double().train(training)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.3)
    return adapters, fusion


def outputs_and_gradients(form, fusion, h, direction, adapters, layer_input=None):
    """{"o": output, and by their names the gradients of h, all parameters, and x if it is given}"""
    h = h.clone().requires_grad_()
    torch.manual_seed(1)  # the same scores are dropped
    o = form(h, adapters) if form.__name__ == "low_rank" else form(h, adapters, layer_input)
    of = {"h": h, **dict(fusion.named_parameters()), **dict(adapters.named_parameters())}
    of |= {"x": layer_input[0]} if layer_input else {}
    found = torch.autograd.grad((o * direction).sum(), [*of.values()], allow_unused=True)
    return {"o": o, **dict(zip(of, found, strict=True))}


def same_function(ours, textbook):
    for name, slow in textbook.items():
        assert (ours[name] is None) == (slow is None), name
        if slow is not None:
            assert difference(ours[name], slow) <= 1e-10 * max(1, slow.abs().max()), name


@pytest.mark.parametrize("tokens", [2, 24, 200])  # the cheapest order of the products differs
@pytest.mark.parametrize("training", [False, True], ids=["eval", "dropout on the scores"])
@pytest.mark.parametrize("configs", MIXTURES.values(), ids=MIXTURES)
def test_mix_is_textbook(configs, training, tokens):
    modules = [Adapter(config, 32, config.bottleneck_size(32, 0)) for config in configs]
    adapters, fusion = new_fusion(modules, 32, training)
    h, direction = torch.randn(2, 2, tokens // 2, 32, dtype=torch.float64)
    slow = outputs_and_gradients(fusion.textbook, fusion, h, direction, adapters)
    for form in (fusion.low_rank, fusion.absorbed, fusion.compose):
        same_function(outputs_and_gradients(form, fusion, h, direction, adapters), slow)
    if tokens > 2:  # without dropout the softmax does not see b_K, with dropout it does
        assert (slow["key.bias"].abs().max() > 1e-6) == (training and len(configs) > 1)


class Fourfold(Adapter):
    """A z of its own, which is no bottleneck's."""

    def z(self, h, layer_input=None):
        return 4 * super().z(h, layer_input)


d = 24
bert = BertConfig(hidden_size=d, attention_probs_dropout_prob=0.2)
pals = PALConfig.pal(size=8, num_heads=1), PALConfig.pal(size=12, num_heads=3)
OTHER_KINDS = {
    "two sizes of pal": [PAL(config, bert) for config in pals],
    "four times z": [Fourfold(bapna(), d, r) for r in (2, 3)],
    "four times z of one": [Adapter(pfeiffer(), d, 2), Fourfold(pfeiffer(), d, 4)],
}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "dropout"])
@pytest.mark.parametrize("modules", OTHER_KINDS.values(), ids=OTHER_KINDS)
def test_other_kinds_are_fused_by_the_textbook(modules, training, monkeypatch):
    """Where z is not a bottleneck's, `absorbed` is used: also with the mask and the input of the
    whole layer, whose gradient is compared, too."""
    adapters, fusion = new_fusion(modules, d, training)
    h, x, direction = torch.randn(3, 3, 7, d, dtype=torch.float64)
    mask = (torch.arange(7) < torch.tensor([7, 4, 1])[:, None])[:, None, None]
    given = fusion, h, direction, adapters, (x.requires_grad_(), mask)
    monkeypatch.setattr(fusion, "low_rank", lambda *_: pytest.fail("z is not a bottleneck's"))
    slow, weights = outputs_and_gradients(fusion.textbook, *given), fusion.weights
    for form in (fusion.absorbed, fusion.compose):
        same_function(outputs_and_gradients(form, *given), slow)
        assert difference(fusion.weights, weights) <= 1e-10
    assert slow["o"].std() > 0.1 and slow["h"] is not None  # the comparison is of something
    reads_layer = any(type(adapter) is PAL for adapter in adapters)
    assert (slow["x"] is not None and slow["x"].abs().max() > 0.1) == reads_layer
