"""Ψ: AdapterFusion, the attention over N adapters that is trained in stage 2 (section 3).

add_fusion(bert, ["mnli", "qqp", "rte"])      # over adapters already there; trainable, active
loss = loss + fusion_regularization(bert)     # keeps V close to the identity
fusion_weights(bert)                          # s: {(layer, location): [B, T, N]}
save_fusion(bert, "runs/fusion-rte"); load_fusion(bert, "runs/fusion-rte")
"""

import torch
import torch.nn.functional as F
from torch import nn

from adapter import Adapter, adapter_modules, adapter_tensors, class_of, head_tensors
from bert import AddNorm, Layer
from formats import adapterhub
from formats.files import error_prefix
from runtime.record import read_run


class Fusion(nn.Module):
    """
    AdapterFusion in one AddNorm (section 3.2, Figure 2). For every token,

        s = softmax_n( (Q h + b_Q) · (K z_n + b_K) )        o = Σ_n s_n V z_n

    z_n is the output of adapter n without its residual, which is added once, to o. Vectors are
    columns, so Q, K and V are the transposes of the paper's. The biases are those of adapters 1.3,
    and so is h, which is what the adapters read, LN(f + x), where section 3.2 has the feed-forward
    output f (docs/silent.md). `textbook` computes these two equations term by term;
    `low_rank` is the same function of bottleneck adapters at a fraction of the cost.
    """

    def __init__(self, adapter_names, hidden_size, dropout):
        super().__init__()
        self.adapter_names = adapter_names  # of the N adapters that are fused in this AddNorm
        self.query = nn.Linear(hidden_size, hidden_size)  # Q
        self.key = nn.Linear(hidden_size, hidden_size)  # K
        self.value = nn.Linear(hidden_size, hidden_size, bias=False)  # V
        self.dropout = nn.Dropout(dropout)
        self.s = None  # of the last forward, [B, T, N]
        for linear in (self.query, self.key):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
        # section 4.1: ones on the diagonal, so that at first o is about Σ s_n z_n. Off the
        # diagonal the paper has random numbers of norm 1e-6; this constant is that of adapters 1.3.
        with torch.no_grad():
            self.value.weight.fill_(1e-6).fill_diagonal_(1.0)

    def forward(self, f, x, add_norm, layer_x=None, mask=None):
        """f: sub-layer output, x: its input, add_norm: whose adapters and LayerNorm are used;
        [B, T, d] -> [B, T, d]. layer_x, mask: see AddNorm."""
        adapters = [add_norm.adapters[name] for name in self.adapter_names]
        # As in adapters 1.3, the configuration of the last adapter decides for all of them what
        # they read, which residual is added to o, and whether BERT's LayerNorm follows. Of an
        # adapter's own LayerNorms, `norm_before` is a part of its z, and `norm_after` is left out.
        last = adapters[-1]
        h, residual = last.h_and_residual(f, x, add_norm.norm)
        if all(type(adapter) is Adapter for adapter in adapters):
            o = self.low_rank(h, adapters)
        else:
            o = self.textbook(h, adapters, layer_x, mask)
        return last.close(o + residual, x, add_norm.norm)

    def textbook(self, h, adapters, layer_x=None, mask=None):
        """The two equations above, term by term: h [B, T, d] -> o [B, T, d]. For each token that is
        (2·N + 1)·d² + 2·N·r·d multiply-adds, in `low_rank` about 3·d² + 3·N·r·d."""
        z = torch.stack([adapter.z(h, layer_x, mask) for adapter in adapters], 2)  # [B, T, N, d]
        scores = torch.einsum("btd,btnd->btn", self.query(h), self.key(z))  # q·(K z_n + b_K)
        s = self.softmax(scores)  # [B, T, N]
        return torch.einsum("btn,btnd->btd", s, self.value(z))  # o = Σ_n s_n V z_n

    def low_rank(self, h, adapters, many_tokens=None):
        """
        The same without ever forming the d numbers of a z_n, which is U_n a_n + b_n with an a_n of
        only r numbers, d/16 by default. Three matrices hold all N adapters side by side. Their
        common dimension, R = Σ r_n + N, counts the columns of every U_n, and then one for each b_n
        (docs/figures/low_rank.svg).

            a           [B, T, R]  a_1 … a_N of each token, then a 1 for each b_n
            U           [d, R]     U_1 … U_N, then b_1 … b_N
            membership  [R, N]     1 where a column belongs to adapter n

        So z_n is U (a ⊙ column n of membership), and with q = Q h + b_Q

            q·(K z_n + b_K)  =  ((Uᵀ Kᵀ q) ⊙ a)·(column n of membership) + q·b_K
            Σ_n s_n V z_n    =  V U (a ⊙ (membership s))

        q·b_K is the same for every n: the softmax alone would not see it, but dropout on the scores
        does. With many_tokens K U and V U are formed first. That is cheaper, and the default, where
        there are more tokens than columns.
        """
        a = bottlenecks(h, adapters)  # [B, T, R]
        U, membership = up_projections(adapters, a.dtype)  # [d, R], [R, N]
        K, V, b_K = self.key.weight, self.value.weight, self.key.bias  # [d, d], [d, d], [d]
        if many_tokens is None:
            many_tokens = h.shape[0] * h.shape[1] > U.shape[1]
        q = self.query(h)  # Q h + b_Q: [B, T, d]
        q_K_U = q @ (K @ U) if many_tokens else q @ K @ U  # [B, T, R]
        scores = (q_K_U * a) @ membership + (q @ b_K)[..., None]  # q·(K z_n + b_K): [B, T, N]
        s = self.softmax(scores)  # [B, T, N]
        s_a = (s.to(a.dtype) @ membership.T) * a  # every a_n times its s_n: [B, T, R]
        return s_a @ (V @ U).T if many_tokens else s_a @ U.T @ V.T  # Σ_n s_n V z_n: [B, T, d]

    def softmax(self, scores):
        """s of the scores, [B, T, N] -> [B, T, N], which is kept for `fusion_weights`. As in
        adapters 1.3, dropout is applied to the raw scores. A subclass may make a score -∞, to leave
        an adapter out: dropout must not make that 0 · -∞."""
        left_out = scores == -torch.inf
        s = self.dropout(scores).masked_fill(left_out, -torch.inf).softmax(-1)
        self.s = s.detach()
        return s


FUSIONS = {"attention": Fusion}  # --fusion NAME: Fusion, or a subclass of it
# In a layer in which nothing but these is, only self-attention mixes tokens (Model in train.py).
OURS = {AddNorm, Layer, Adapter, Fusion, nn.Linear, nn.LayerNorm, nn.ModuleDict}
OURS |= {nn.Identity, nn.Dropout}


def bottlenecks(h, adapters):
    """All a_n = act(D_n h + b_D), and a 1 for each adapter: h [B, T, d] -> [B, T, R]"""
    a = torch.cat([one.act(one.down(one.norm_before(h))) for one in adapters], -1)
    return F.pad(a, (0, len(adapters)), value=1.0)


def up_projections(adapters, dtype):
    """U [d, R], whose columns are those of all U_n and then all b_n, and membership [R, N]: a
    product with it sums over each adapter's columns, one with its transpose repeats a number for
    each of them."""
    ups = [adapter.up for adapter in adapters]
    U = torch.cat([up.weight for up in ups] + [up.bias[:, None] for up in ups], 1)
    identity = torch.eye(len(ups), dtype=dtype, device=U.device)  # [N, N]
    rows = [identity[n].expand(up.in_features, -1) for n, up in enumerate(ups)]  # [r_n, N] each
    return U.to(dtype), torch.cat([*rows, identity])


def add_fusion(bert, names, fusion_class=Fusion, **fields):
    """
    Adds a new fusion over adapters that are already in the encoder, in every layer where one of
    them sits, in place of an existing fusion, activates it, and makes it the only trainable part.
    fields: keyword arguments of your own class. Raises ValueError for adapters at different
    locations (pfeiffer with houlsby), which adapters 1.3 does not fuse either, and for one without
    a z.
    """
    p = bert.config.attention_probs_dropout_prob
    modules = new_fusions(bert, [*names], p, fusion_class, fields)
    bert.requires_grad_(False)  # the new modules are not in it yet
    insert_fusions(bert, [*names], modules)


def new_fusions(bert, names, dropout, fusion_class, fields):
    """{(layer, location): Fusion} of a new fusion, not in its slots yet."""
    if not names or len({*names}) < len(names):
        raise ValueError(f"a fusion needs at least one adapter, and each of them once, not {names}")
    found = {name: adapter_modules(bert, name) for name in names}
    locations = {name: {location for _, location in found[name]} for name in names}
    for name in names:
        if not all(hasattr(module, "z") for module in found[name].values()):
            raise ValueError(f"adapter {name!r} has no output z that a fusion could mix")
        if locations[name] != locations[names[0]]:
            pair = f"{names[0]!r} and {name!r}"
            raise ValueError(f"adapters at different locations cannot be fused: {pair}")
    modules, d = {}, bert.config.hidden_size
    for key in bert.slots:
        if here := [name for name in names if key in found[name]]:
            modules[key] = fusion_class(here, d, dropout, **fields)
            modules[key].to(bert.device, torch.promote_types(bert.dtype, torch.float32))
    return modules


def insert_fusions(bert, names, modules):
    """Makes {(layer, location): Fusion} the encoder's fusion, and active."""
    for key, fusion in modules.items():
        check_low_rank(fusion, [bert.slots[key].adapters[name] for name in fusion.adapter_names])
        fusion.train(bert.training)
    bert.fused_names = names
    for key, slot in bert.slots.items():
        slot.active, slot.fused, slot.fusion = None, True, modules.get(key)


@torch.no_grad()
def check_low_rank(fusion, adapters):
    """Raises ValueError if `low_rank` and `textbook` differ on a few random vectors. Otherwise an
    edit of `Adapter.z`, say, would be trained in stage 1 and have no effect in a fusion."""
    V = fusion.eval().value.weight
    if V.is_meta or not all(type(adapter) is Adapter for adapter in adapters):
        return  # without numbers nothing can be computed; other adapters use `textbook` alone
    generator = torch.Generator().manual_seed(0)  # not the one from which training draws
    h = torch.randn(2, 3, len(V), generator=generator).to(V)
    exact_o, exact_s = fusion.textbook(h, adapters), fusion.s
    for many_tokens in (False, True):
        o = fusion.low_rank(h, adapters, many_tokens)
        for found, exact in ((o, exact_o), (fusion.s, exact_s)):
            if not (found - exact).abs().max() <= 1e-4 * exact.abs().max():
                raise ValueError("low_rank no longer computes what textbook makes of z: edit both")
    fusion.s = None


def fusions(bert):
    """{(layer, location): Fusion}"""
    return {key: slot.fusion for key, slot in bert.slots.items() if slot.fusion is not None}


def fusion_regularization(bert):
    """0.01 · Σ_layers ‖V − I‖²_F, a scalar tensor to add to the loss (section 4.1: "l2-norm" on V;
    in the form of adapters 1.3). 0 without a fusion."""
    penalty = torch.zeros((), device=bert.device)
    for fusion in fusions(bert).values():
        V = fusion.value.weight
        identity = torch.eye(len(V), device=V.device, dtype=V.dtype)
        penalty = penalty + 0.01 * (V - identity).square().sum()
    return penalty


def fusion_weights(bert):
    """s of the last forward: {(layer, "output" | "attention"): [B, T, N]}, padding included; T is 1
    in the last layer if only [CLS] was computed there. N is in the order of add_fusion, and s is 0
    for an adapter that is left out of a layer. Raises ValueError without fusion or forward pass."""
    names, result = bert.fused_names, {}
    for key, fusion in fusions(bert).items():
        if fusion.s is None:
            raise ValueError("no fusion weights yet: run a batch through the encoder first")
        result[key] = fusion.s.new_zeros(*fusion.s.shape[:-1], len(names))
        result[key][..., [names.index(name) for name in fusion.adapter_names]] = fusion.s
    if not result:
        raise ValueError("there is no fusion in this encoder")
    return result


# ---- Files ---------------------------------------------------------------------------------------


def fusion_tensors(modules):
    """{(path of the slot, name in the file): parameter} of {(layer, location): Fusion}; the names
    are those of Fusion's own parameters."""
    return {
        (adapterhub.slot_path(key), part): p
        for key, fusion in modules.items()
        for part, p in fusion.named_parameters()
    }


def save_fusion(bert, directory):
    """Writes adapter_fusion_config.json and model_adapter_fusion.safetensors."""
    if not (modules := fusions(bert)):
        raise ValueError("there is no fusion in this encoder")
    header = adapterhub.header(",".join(bert.fused_names), bert.config, bert.source)
    options = adapterhub.FUSION_CONFIG
    fusion_class = type(next(iter(modules.values())))
    if fusion_class is not Fusion:  # AdapterHub's library is to refuse what it cannot know
        options = {"class": fusion_class.__name__}
    header |= {"adapter_names": bert.fused_names}
    adapterhub.write(directory, adapterhub.FUSION, options, fusion_tensors(modules), header)


def load_fusion(bert, directory):
    """Inserts a saved fusion into the encoder and activates it, frozen. The adapters that it names
    must have been loaded. Raises FileNotFoundError without a fusion there, and ValueError if it
    does not fit; the encoder is then unchanged."""
    saved = adapterhub.read(directory, adapterhub.FUSION)
    run = read_run(saved.directory)
    with error_prefix(saved.config_path):
        saved.check_encoder(bert, run)
        fusion_class = class_of(saved.directory, "fusion", FUSIONS)
        if fusion_class is Fusion:
            adapterhub.check_fusion(saved.options)
        # 0.0 counts as unset, as in adapters 1.3
        p = saved.options.get("dropout_prob") or bert.config.attention_probs_dropout_prob
        fields = run["options"]["fusion_config"] if run else {}
        modules = new_fusions(bert, saved.adapter_names, p, fusion_class, fields)
    # AdapterHub's files also hold weights for layers in which all adapters are left out.
    unused = [adapterhub.slot_path(key) for key in bert.slots if key not in modules]
    saved.copy_into(fusion_tensors(modules), unused)
    insert_fusions(bert, saved.adapter_names, modules)
    bert.requires_grad_(False)


def parameters_by_file(bert, head):
    """The parameters that a run's files can hold: {"encoder" | "adapter NAME" | "fusion" | "head":
    {name in the file: parameter}}"""
    found = {f"adapter {n}": adapter_tensors(adapter_modules(bert, n)) for n in bert.adapters}
    found |= {"fusion": fusion_tensors(fusions(bert)), "head": head_tensors(head)}
    return {"encoder": {bert.hub_name(n): p for n, p in bert.own_parameters().items()}, **found}
