"""Ψ: AdapterFusion, the attention over N adapters that is trained in stage 2 (section 3).

add_fusion(bert, ["mnli", "qqp", "rte"])      # a new one, over adapters that are there
loss = loss + fusion_regularization(bert)     # keeps V close to the identity
fusion_weights(bert)                          # s: {(layer, location): [B, T, N]}
save_fusion(bert, "runs/fusion-rte")
load_fusion(bert, "runs/fusion-rte")"""

from copy import deepcopy
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from adapter import Adapter, GridAdapter, activate, adapter_modules
from formats import adapterhub
from formats.files import error_prefix


class Fusion(nn.Module):
    """AdapterFusion in one AddNorm (section 3.2, Figure 2). For every token,

        s = softmax_n( (Q h + b_Q) · (K z_n + b_K) )        o = Σ_n s_n V z_n

    z_n is the output of adapter n without its residual, which is added once, to o. Vectors are
    columns, so Q, K and V are the transposes of the paper's. As in adapters 1.3 there are biases,
    and h is what the adapters read; the h of section 3.2 is the feed-forward output, f here
    (docs/silent.md)."""

    def __init__(self, adapter_names, hidden_size, dropout):
        super().__init__()
        self.adapter_names = adapter_names  # of the N adapters that are fused in this AddNorm
        self.query = nn.Linear(hidden_size, hidden_size)  # Q
        self.key = nn.Linear(hidden_size, hidden_size)  # K
        self.value = nn.Linear(hidden_size, hidden_size, bias=False)  # V
        self.dropout = nn.Dropout(dropout)
        self.s = None  # [B, T, N], of the batch for which the encoder was called last
        for linear in (self.query, self.key):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
        # section 4.1: ones on the diagonal, so that at first o is about Σ s_n z_n. Off the
        # diagonal the paper has random numbers of norm 1e-6; this constant is that of adapters 1.3.
        with torch.no_grad():
            self.value.weight.fill_(1e-6).fill_diagonal_(1.0)

    def forward(self, f, x, add_norm):
        """f: sub-layer output, x: its input, add_norm: where it sits; [B, T, d] -> [B, T, d]"""
        adapters = [add_norm.adapters[name] for name in self.adapter_names]
        # As in adapters 1.3, the last adapter decides for all of them what they read, which
        # residual is added to o, and whether BERT's LayerNorm follows.
        last = adapters[-1]
        h, residual = last.h_and_residual(f, x, add_norm.norm)
        if has_low_rank(self, adapters):
            o = low_rank(self, h, adapters)  # what `textbook` computes, at a fraction of the cost
        else:
            o = self.textbook(h, adapters)
        return last.close(o + residual, x, add_norm.norm)

    def textbook(self, h, adapters):
        """The two equations above, term by term: h [B, T, d] -> o [B, T, d]"""
        z = torch.stack([adapter.z(h) for adapter in adapters], 2)  # [B, T, N, d]
        scores = torch.einsum("btd,btnd->btn", self.query(h), self.key(z))  # q·(K z_n + b_K)
        s = self.softmax(scores)  # [B, T, N]
        return torch.einsum("btn,btnd->btd", s, self.value(z))  # o = Σ_n s_n V z_n

    def softmax(self, scores):
        """s of the scores, [B, T, N] -> [B, T, N], which is kept for `fusion_weights`. As in
        adapters 1.3, dropout is applied to the raw scores. A subclass may set a score to -∞, to
        leave an adapter out: dropout must not make that 0 · -∞, which is NaN."""
        left_out = scores == -torch.inf
        s = self.dropout(scores).masked_fill(left_out, -torch.inf).softmax(-1)
        self.s = s.detach()
        return s


FUSIONS = {"attention": Fusion}  # --fusion NAME: Fusion, or a subclass of it


def active_fusions(bert):
    """{(layer, location): Fusion} of the active fusion; {} where none is."""
    if not isinstance(bert.active, tuple):
        return {}
    return {key: slot.fusion for key, slot in bert.slots.items() if slot.fusion is not None}


def fusion_regularization(bert):
    """0.01 · Σ_layers ‖V − I‖²_F, a scalar tensor to add to the loss (section 4.1: "l2-norm" on V;
    in the form of adapters 1.3). 0 without an active fusion."""
    penalty = torch.zeros((), device=bert.device)
    for fusion in active_fusions(bert).values():
        V = fusion.value.weight
        identity = torch.eye(len(V), device=V.device, dtype=V.dtype)
        penalty = penalty + 0.01 * (V - identity).square().sum()
    return penalty


def fusion_weights(bert):
    """s of the active fusion for the batch that the encoder computed last: {(layer, "output" |
    "attention"): [B, T, N]}, padding included. N is in the order of add_fusion, and s is 0 for an
    adapter that is left out of a layer. If a fork skips a slot, the slot is missing for that batch.
    Raises ValueError if no fusion is active, or none was computed."""
    if not (fusions := active_fusions(bert)):
        raise ValueError("no fusion is active in this encoder")
    result = {}
    for key, fusion in fusions.items():
        if fusion.s is not None:
            result[key] = fusion.s.new_zeros(*fusion.s.shape[:-1], len(bert.active))  # [B, T, N]
            result[key][..., [bert.active.index(n) for n in fusion.adapter_names]] = fusion.s
    if not result:
        raise ValueError("no fusion weights yet: run a batch through the encoder first")
    return result


def add_fusion(bert, names, fusion_class=Fusion, **fields):
    """Adds a new fusion over adapters of the encoder wherever one of them sits, in place of an
    existing one, and activates it. Its parameters are then the only ones that require a gradient.
    fields: further arguments of a class of your own. Raises ValueError, and changes nothing, if the
    adapters sit at different locations (as adapters 1.3 does), or if one has no output z."""
    p = bert.config.attention_probs_dropout_prob
    modules = new_modules(bert, names, fusion_class, p, fields)
    bert.requires_grad_(False)  # all but the new modules, which are not in it yet
    insert(bert, names, modules)


def insert(bert, names, modules):
    for key, slot in bert.slots.items():
        slot.fusion = modules.get(key)
    activate(bert, tuple(names))


def new_modules(bert, names, fusion_class, dropout, fields):
    """{(layer, location): module} of a new fusion, not yet in the encoder."""
    if not names or len({*names}) < len(names):
        raise ValueError(f"a fusion needs at least one adapter, and each of them once, not {names}")
    found = {name: adapter_modules(bert, name) for name in names}
    for name in names:
        for key, adapter in found[name].items():
            if not all(hasattr(adapter, part) for part in ("h_and_residual", "z", "close")):
                raise ValueError(f"adapter {name!r} has no output z that a fusion could mix")
            check_forward(name, adapter, bert.slots[key].norm)
        if {where for _, where in found[name]} != {where for _, where in found[names[0]]}:
            pair = f"{names[0]!r} and {name!r}"
            raise ValueError(f"adapters at different locations cannot be fused: {pair}")
    modules = {}
    for key in bert.slots:
        if here := [name for name in names if key in found[name]]:
            fusion = fusion_class(here, bert.config.hidden_size, dropout, **fields)
            fusion.fields = fields  # for `save_fusion`
            fusion.to(bert.device, torch.promote_types(bert.dtype, torch.float32))
            check_low_rank(fusion, [found[name][key] for name in here])
            modules[key] = fusion.train(bert.training)
    return modules


# ---- Files ---------------------------------------------------------------------------------------


def save_fusion(bert, directory):
    """Writes adapter_fusion_config.json and model_adapter_fusion.safetensors of the active one."""
    if not (modules := active_fusions(bert)):
        raise ValueError("no fusion is active in this encoder")
    one = next(iter(modules.values()))
    tensors = adapterhub.slot_tensors(modules)
    options = adapterhub.FUSION_CONFIG
    parts = {part.split(".")[0] for _, part in tensors}  # tensors: {(slot, part): tensor}
    if type(one) is not Fusion or one.fields or parts != {"query", "key", "value"}:
        options = adapterhub.own_kind(one, one.fields)  # AdapterHub's library refuses it
    name = ",".join(bert.active)
    adapterhub.write(directory, adapterhub.FUSION, name, options, tensors, bert)


def load_fusion(bert, directory):
    """Inserts a saved fusion into the encoder and activates it, frozen. The adapters that it names
    must have been loaded. Raises FileNotFoundError if there is no fusion, and ValueError if it does
    not fit; the encoder is then unchanged."""
    saved = adapterhub.read(directory, adapterhub.FUSION)
    with error_prefix(saved.directory):
        saved.check_encoder(bert)
        fusion_class, fields = saved.kind(Fusion, FUSIONS)
        if fields is None:  # it is in AdapterHub's own format
            adapterhub.check_fusion(saved.options)
        # a dropout of 0.0 counts as unset, as in adapters 1.3
        p = saved.options.get("dropout_prob") or bert.config.attention_probs_dropout_prob
        modules = new_modules(bert, saved.adapter_names, fusion_class, p, fields or {})
        # AdapterHub's files also hold layers in which all adapters are left out
        unused = [adapterhub.slot_path(key) for key in bert.slots if key not in modules]
        saved.copy_into(adapterhub.slot_tensors(modules), unused)
    for module in modules.values():
        module.requires_grad_(False)
    insert(bert, saved.adapter_names, modules)


# ---- The same at a fraction of the cost ----------------------------------------------------------
# Nothing from here on is in the paper.


def has_low_rank(fusion, adapters):
    """Whether the adapters are bottlenecks, and the equations those of `Fusion.textbook`."""
    is_textbook = type(fusion).textbook is Fusion.textbook
    return is_textbook and all(type(adapter) in (Adapter, GridAdapter) for adapter in adapters)


def low_rank(fusion, h, adapters, many_tokens=None):
    """`textbook` without ever forming the d numbers of a z_n, which is U_n a_n + b_n with an a_n of
    only r numbers. For each token that takes about 3·d² + 3·N·r·d multiply-adds in place of
    (2·N + 1)·d² + 2·N·r·d. Three matrices hold all adapters side by side, see docs/figures/
    low_rank.svg. R = Σ r_n + N counts the columns of every U_n, and then one for each b_n.

        a           [B, T, R]  a_1 … a_N of each token, then a 1 for each b_n
        U           [d, R]     U_1 … U_N, then b_1 … b_N
        membership  [R, N]     1 where that column of U belongs to adapter n

    So z_n is U (a ⊙ column n of membership), and with q = Q h + b_Q

        q·(K z_n + b_K)  =  ((Uᵀ Kᵀ q) ⊙ a)·(column n of membership) + q·b_K
        Σ_n s_n V z_n    =  V U (a ⊙ (membership s))

    q·b_K is the same for every n. The softmax ignores that, but the dropout before it does not.
    With many_tokens, the default where there are more tokens than columns, K U and V U are formed
    first, which is cheaper there."""
    a = torch.cat([adapter.bottleneck(h) for adapter in adapters], -1)  # [B, T, R - N]
    a = F.pad(a, (0, len(adapters)), value=1.0)  # [B, T, R]
    ups = [adapter.up for adapter in adapters]
    U = torch.cat([up.weight for up in ups] + [up.bias[:, None] for up in ups], 1).to(a.dtype)
    # A product with membership sums over the columns of each adapter. A product with its transpose
    # repeats each adapter's number for all of its columns.
    identity = torch.eye(len(ups), dtype=a.dtype, device=a.device)  # [N, N]
    owners = [identity[n].expand(up.in_features, -1) for n, up in enumerate(ups)]  # [r_n, N] each
    membership = torch.cat([*owners, identity])  # [R, N]
    K, V, b_K = fusion.key.weight, fusion.value.weight, fusion.key.bias  # [d, d], [d, d], [d]
    if many_tokens is None:
        many_tokens = h.shape[0] * h.shape[1] > U.shape[1]
    q = fusion.query(h)  # Q h + b_Q: [B, T, d]
    q_K_U = q @ (K @ U) if many_tokens else q @ K @ U  # [B, T, R]
    scores = (q_K_U * a) @ membership + (q @ b_K)[..., None]  # q·(K z_n + b_K): [B, T, N]
    s = fusion.softmax(scores)  # [B, T, N]
    s_a = (s.to(a.dtype) @ membership.T) * a  # every a_n times its s_n: [B, T, R]
    return s_a @ (V @ U).T if many_tokens else s_a @ U.T @ V.T  # Σ_n s_n V z_n: [B, T, d]


# Two things exist in two forms: an adapter's `forward`, which no fusion calls, and `textbook`. An
# edit of one form would silently have no effect where the other is used. So they are compared, on
# random vectors, whenever a fusion is added.


@torch.no_grad()
def check_forward(name, adapter, norm):
    """Raises ValueError if an adapter's `forward` and what a fusion takes of it differ. What is not
    compared: an adapter with `norm_after`, which a fusion leaves out, as adapters 1.3 does, and one
    that is no `Adapter`."""
    is_ours = isinstance(adapter, Adapter) and getattr(adapter, "norm_after", None) is None
    if not is_ours or norm.weight.is_meta:
        return
    adapter, norm = (deepcopy(module).cpu().float().eval() for module in (adapter, norm))
    random = torch.Generator().manual_seed(0)
    f, x = (torch.randn(2, 3, len(norm.weight), generator=random) for _ in range(2))
    h, residual = adapter.h_and_residual(f, x, norm)
    alone, fused = adapter(f, x, norm), adapter.close(adapter.z(h) + residual, x, norm)
    if not (alone - fused).abs().max() <= 1e-4 * alone.abs().max():  # NaN fails, too
        parts = "close(z(h) + residual, x, norm), with h and residual from `h_and_residual`"
        raise ValueError(f"adapter {name!r}: its `forward` must be what a fusion computes, {parts}")


@torch.no_grad()
def check_low_rank(fusion, adapters):
    """Raises ValueError if `low_rank` and `textbook` differ, at weights close to these. In training
    both draw the same random numbers in the same order: those of `bottleneck`, for a fork that has
    dropout there, and then those of the scores."""
    if fusion.value.weight.is_meta or not has_low_rank(fusion, adapters):
        return
    both = deepcopy(nn.ModuleList([fusion, *adapters])).cpu().float()
    forms = [Fusion.textbook, *(partial(low_rank, many_tokens=b) for b in (True, False))]
    with torch.random.fork_rng(devices=[]):  # training draws what it would without this check
        h = torch.randn(2, 3, len(fusion.value.weight))
        for p in both.parameters():  # a new parameter may start at a value without any effect
            p.add_(0.01 * torch.randn(p.shape))
        for is_training in (True, False):
            found = []
            for form in forms:
                fusion, *adapters = deepcopy(both).train(is_training)  # which may change a buffer
                torch.default_generator.manual_seed(0)  # the CPU's alone
                found.append(form(fusion, h, adapters))
            if not all((o - found[0]).abs().max() <= 1e-4 * found[0].abs().max() for o in found):
                raise ValueError("low_rank no longer computes textbook: edit both, or `bottleneck`")
