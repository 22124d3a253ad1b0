"""Other ways to compose N frozen adapters: the equation, the paper, and how it starts.

    python train.py --import examples.composing --stage fusion --task rte --fusion sum \
        --adapters runs/mnli runs/qqp
    python train.py --import examples.composing --stage soup --task rte \
        --adapters runs/mnli runs/qqp

As in fusion.py, z_n is the output of adapter n without its residual, which is added once, to o, and
h is what the adapters read. Kinds without Q and K keep as s what a token gives to each adapter, for
`fusion_weights`; where no softmax makes it, it does not sum to 1."""

import torch
import torch.nn.functional as F
from torch import nn

import train
from adapter import adapter_modules, add_adapter
from fusion import FUSIONS, Fusion


class Sum(Fusion):
    """o = Σ_n z_n: task arithmetic (Ilharco et al., 2023) of outputs. Only the head is trained."""

    def __init__(self, adapter_names, hidden_size, dropout):
        nn.Module.__init__(self)  # without Q, K and V
        self.adapter_names, self.s = adapter_names, None

    def textbook(self, h, adapters):
        z = torch.stack([adapter.z(h) for adapter in adapters], 2)  # [B, T, N, d]
        weights = self.weights(h)
        self.s = weights.detach().mean(-1).expand(z.shape[:-1])  # [B, T, N]
        return (weights * z).sum(2)  # [B, T, d]

    def weights(self, h):
        """What z is multiplied by, [B, T, N, d], or any shape that is broadcast to it"""
        return h.new_ones(len(self.adapter_names), 1)


class ValueOfSum(Sum):
    """o = V Σ_n z_n, with the paper's V and its start: even weights with V, but for their 1/N."""

    def __init__(self, adapter_names, hidden_size, dropout):
        Fusion.__init__(self, adapter_names, hidden_size, dropout)
        del self.query, self.key

    def textbook(self, h, adapters):
        return self.value(super().textbook(h, adapters))


class Static(ValueOfSum):
    """o = V Σ_n ω_n z_n, with ω_n = (1 + 20 δ_n) / N, one trained number δ_n for each adapter and
    layer. AdamW moves δ by the rate, and so ω, at first 1/N, as fast as attention's s."""

    def __init__(self, adapter_names, hidden_size, dropout):
        super().__init__(adapter_names, hidden_size, dropout)
        self.delta = nn.Parameter(torch.zeros(len(adapter_names), 1))  # [N, 1]

    def weights(self, h):
        return (1 + 20 * self.delta) / len(self.adapter_names)


class Mean(Fusion):
    """o = V (1/N) Σ_n z_n: attention without its weights. The paper's V and its start."""

    def __init__(self, *args):
        super().__init__(*args)
        self.query.requires_grad_(False)  # without effect on o: not trained
        self.key.requires_grad_(False)

    def softmax(self, q_k):
        return super().softmax(torch.zeros_like(q_k))  # 1/N each: [B, T, N]


class ScaLearn(Sum):
    """o = Σ_n ω_n ⊙ z_n, with a trained ω_n of d numbers (Frohmann et al., 2024). As in their code,
    ω starts as N(2/N, 0.001²), and dropout of 0.3 is applied to it."""

    def __init__(self, adapter_names, hidden_size, dropout):
        super().__init__(adapter_names, hidden_size, dropout)
        self.omega = nn.Parameter(torch.empty(len(adapter_names), hidden_size))  # [N, d]
        nn.init.normal_(self.omega, 2 / len(adapter_names), 0.001)
        self.dropout = nn.Dropout(0.3)

    def weights(self, h):
        return self.dropout(self.omega)


class ScaLearnUniform(ScaLearn):
    """The same with one number for each adapter: o = Σ_n ω_n z_n."""

    def __init__(self, adapter_names, hidden_size, dropout):
        super().__init__(adapter_names, 1, dropout)  # ω: [N, 1]


class Router(Sum):
    """o = Σ_n s_n z_n with s = softmax(W h): the gate of a mixture of experts, which does not see
    z (Shazeer et al., 2017, without noise and top k). As theirs, W starts at 0, and s at 1/N."""

    def __init__(self, adapter_names, hidden_size, dropout):
        super().__init__(adapter_names, hidden_size, dropout)
        self.gate = nn.Linear(hidden_size, len(adapter_names), bias=False)  # W
        nn.init.zeros_(self.gate.weight)

    def begin_batch(self, attention_mask):
        super().begin_batch(attention_mask)
        self.attention_mask = attention_mask  # for `penalty`, as h is

    def weights(self, h):
        self.h = h.detach()
        return self.gate(h).softmax(-1)[..., None]  # [B, T, N, 1]

    def penalty(self):
        """Their balance term, 0.01 · CV² of each adapter's share of a batch, which trains W."""
        s = self.gate(self.h.to(self.gate.weight.dtype)).softmax(-1)  # [B, T, N]
        mask = self.attention_mask  # [B, T]
        is_real = torch.ones_like(s[..., 0]) if mask is None else mask
        share = (s * is_real[..., None]).sum((0, 1)) / is_real.sum()  # [N], which sum to 1
        return 0.01 * (len(share) * share.square().sum() - 1)


class Gates(Fusion):
    """s_n = 2 σ(score of n): the adapters do not compete (sigmoids for experts: Csordás et al.,
    2023). The scores start near 0, and s near 1, at the sum. There is no dropout of scores."""

    def softmax(self, q_k):
        s = 2 * q_k.sigmoid()
        self.s = s.detach()
        return s


class Scaled(Fusion):
    """Scores over √d (Vaswani et al., 2017), which the paper leaves out: s starts nearer to 1/N."""

    def softmax(self, q_k):
        return super().softmax(q_k / self.query.in_features**0.5)


class SlowScores(Fusion):
    """Attention whose Q and K move at a twentieth of the learning rate. AdamW moves a parameter by
    the rate, whatever its size: so both are 20 times as large, and scores are divided by 20²."""

    factor = 20

    def __init__(self, adapter_names, hidden_size, dropout):
        super().__init__(adapter_names, hidden_size, dropout)
        with torch.no_grad():
            self.query.weight *= self.factor
            self.key.weight *= self.factor

    def softmax(self, q_k):
        return super().softmax(q_k / self.factor**2)


class TopOne(Fusion):
    """o = V z_k with the largest s_k, but the gradient is that of all s (Bengio et al., 2013)."""

    def softmax(self, q_k):
        s = super().softmax(q_k)
        self.s = F.one_hot(s.argmax(-1), s.shape[-1]).to(s.dtype)
        return self.s + (s - s.detach())


FUSIONS |= {"sum": Sum, "mean": Mean, "gates": Gates, "scaled": Scaled}
FUSIONS |= {"top_one": TopOne, "value_of_sum": ValueOfSum, "slow": SlowScores, "scalearn": ScaLearn}
FUSIONS |= {"scalearn_uniform": ScaLearnUniform, "router": Router, "static": Static}


def soup(args, bert, task):
    """AdapterSoup (Chronopoulou et al., 2023): the given adapters' average, frozen and saved."""
    sources = [adapter_modules(bert, name) for name in bert.adapter_configs]
    configs = [*bert.adapter_configs.values()]
    if not configs or any(config != configs[0] for config in configs):
        raise ValueError("--stage soup needs --adapters, all of one architecture")
    add_adapter(bert, task.name, configs[0])
    for key, module in adapter_modules(bert, task.name).items():
        states = [source[key].state_dict() for source in sources]
        mean = {name: torch.stack([s[name] for s in states]).mean(0) for name in states[0]}
        module.load_state_dict(mean)
        module.requires_grad_(False)


train.STAGES["soup"] = {"lr": 1e-3, "epochs": 30, "build": soup, "options": ["adapters"]}
