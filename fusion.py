"""Ψ: AdapterFusion, the attention over N adapters that is trained in stage 2 (section 3).

add_fusion(bert, ["mnli", "qqp", "rte"])      # over adapters already there; trainable, active
loss = loss + fusion_regularization(bert)     # keeps V close to the identity
fusion_weights(bert)                          # s: {(layer, location): [B, T, N]}
save_fusion(bert, "runs/fusion-rte"); load_fusion(bert, "runs/fusion-rte")
"""

import torch
import torch.nn.functional as F
from torch import nn

from adapter import Adapter, find_adapter
from bert import activate, known_adapters
from formats import adapterhub


class Fusion(nn.Module):
    """
    AdapterFusion in one slot (section 3.2, Figure 2). For every token, with h the query and z_n the
    output of adapter n,

        s = softmax_n( (Q h + b_Q) · (K z_n + b_K) )        o = Σ_n s_n V z_n

    `textbook` is this as written, `fast` the same function at a fraction of its cost. Another kind
    of fusion is a subclass with another `attend` or `compose`, and a line in FUSIONS.
    """

    options = {}  # AdapterHub's fields, and others, in which a kind differs from the paper's fusion

    def __init__(self, name, adapter_names, hidden_size, dropout):
        super().__init__()
        self.name = name  # all fused adapters, joined by commas
        self.adapter_names = adapter_names  # those of them that sit in this slot
        self.query = nn.Linear(hidden_size, hidden_size)  # Q
        self.key = nn.Linear(hidden_size, hidden_size)  # K
        self.value = nn.Linear(hidden_size, hidden_size, bias=False)  # V
        self.dropout = nn.Dropout(dropout)
        self.masked = frozenset()  # names of adapters that are left out, see variants/masking.py
        self.weights = None  # s of the last forward [B, T, N], N without those masked
        for linear in (self.query, self.key):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
        # section 4.1: ones on the diagonal, small values elsewhere; o starts near the mean of z_n
        with torch.no_grad():
            self.value.weight.fill_(1e-6).fill_diagonal_(1.0)

    def forward(self, f, x, norm, adapters, layer_input=None):
        """f: sub-layer output, x: its input [B, T, d], norm: BERT's own LayerNorm, adapters: N
        modules, layer_input: what the whole layer read -> [B, T, d]"""
        last = adapters[-1]  # as in the reference, its config says what all read, and the residual
        h, residual = last.inputs(f, x, norm)
        o = self.compose(h, self.unmasked(adapters), layer_input)
        return last.add_and_norm(o + residual, x, norm)

    def textbook(self, h, adapters, layer_input=None):
        """The paper's equations, literally: h [B, T, d] -> o [B, T, d]. 2·N·d² multiply-adds per
        token, and 3·N·d activations."""
        z = torch.stack([adapter.z(h, layer_input) for adapter in adapters], 2)  # z_n: [B, T, N, d]
        scores = torch.einsum("btd,btnd->btn", self.query(h), self.key(z))  # (Q h)·(K z_n)
        s = self.attend(scores)  # [B, T, N]
        return torch.einsum("btn,btnd->btd", s, self.value(z))  # o = Σ_n s_n V z_n

    def attend(self, scores):
        """s = softmax_n(scores): [B, T, N] -> the same. Dropout on scores is the reference's."""
        s = self.dropout(scores).softmax(-1)
        self.weights = s.detach()
        return s

    def compose(self, h, adapters, layer_input=None):
        """o by `fast` where every z_n is U_n a_n + b_n, else by `once`, cheaper only if r > d/4."""
        if all(type(adapter).z is Adapter.z for adapter in adapters):
            return self.low_rank(h, adapters)
        return self.absorbed(h, adapters, layer_input)

    def absorbed(self, h, adapters, layer_input):
        """`textbook` with K and V applied once, to the query and to the sum of z_n, instead of to
        every z_n: (Q h)·(K z_n) = (Kᵀ Q h)·z_n, and Σ s_n V z_n = V Σ s_n z_n."""
        z = torch.stack([adapter.z(h, layer_input) for adapter in adapters], 2)  # [B, T, N, d]
        q = self.query(h)  # [B, T, d]
        scores = (z @ (q @ self.key.weight)[..., None])[..., 0] + (q @ self.key.bias)[..., None]
        s = self.attend(scores).to(z.dtype)  # [B, T, N]
        return self.value((s[:, :, None] @ z)[:, :, 0])  # [B, T, d]

    def low_rank(self, h, adapters):
        """
        `once` without ever forming z_n, because z_n = U_n a_n + b_n has only r = d/16 dimensions.
        Let a hold all a_n and a constant 1 for each adapter, and U all U_n and b_n as its columns,
        R = Σ r_n + N of them. Then, with one matrix product for all D_n and one for all U_n,

            (Q h + b_Q)·K z_n  =  Σ over n's columns of  a ⊙ (Uᵀ Kᵀ (Q h + b_Q))
            Σ_n s_n V z_n      =  V U (s ⊙ a)                 s spread over each adapter's columns

        which leaves two chains of products, Uᵀ Kᵀ Q h and V U (s ⊙ a), in the cheaper order: where
        there are more tokens than columns, the weights first (3·R·d multiply-adds per token, 3·d²·R
        once), else the tokens with one weight after the other (3·R·d + 3·d² per token). The softmax
        does not see (Q h + b_Q)·b_K, the same for every n; dropout on the scores does, so it stays.
        """
        B, T, d = h.shape
        a = bottlenecks(h, adapters)  # [B·T, R]
        U, membership = up_projections(adapters, a.dtype)  # [d, R], [R, N]
        Q, K, V = self.query.weight, self.key.weight, self.value.weight
        b_Q, b_K = self.query.bias, self.key.bias
        R, N = membership.shape
        h = h.reshape(B * T, d)
        if weights_first := B * T > R:  # K U, and b_K added to each K b_n: [d, R]
            keys = torch.addmm(F.pad(b_K[:, None].expand(d, N), (R - N, 0)), K, U)
            q = F.linear(h, (Q.T @ keys).T, b_Q @ keys)  # [B·T, R]
            scores = (q * a) @ membership  # (Q h + b_Q)·(K z_n + b_K): [B·T, N]
        else:
            q = F.linear(h, Q, b_Q)  # [B·T, d]
            scores = (q @ K @ U * a) @ membership + (q @ b_K)[:, None]
        s = self.attend(scores.view(B, T, N)).view(B * T, N)
        s_a = s.to(a.dtype) @ membership.T * a  # s ⊙ a: [B·T, R]
        return (s_a @ (V @ U).T if weights_first else s_a @ U.T @ V.T).view(B, T, d)  # Σ s_n V z_n

    def unmasked(self, of_each):
        """`of_each` adapter of this slot -> the same without those that are masked."""
        pairs = zip(self.adapter_names, of_each, strict=True)
        return [value for name, value in pairs if name not in self.masked]

    def regularization(self):
        """0.01 · ‖V − I‖²_F"""
        V = self.value.weight
        identity = torch.eye(len(V), device=V.device, dtype=V.dtype)
        return 0.01 * F.mse_loss(V, identity, reduction="sum")


FUSIONS = {"attention": Fusion}  # --fusion


def bottlenecks(h, adapters):
    """All a_n = act(D_n h + b_D), and a 1 for each adapter: h [B, T, d] -> [B·T, R]"""
    if all(adapter.input_norm(h) is h and adapter.act is adapters[0].act for adapter in adapters):
        D = torch.cat([adapter.down.weight for adapter in adapters])  # [Σ r_n, d]
        b_D = torch.cat([adapter.down.bias for adapter in adapters])
        a = adapters[0].act(F.linear(h, D, b_D))  # one product for all, [B, T, Σ r_n]
    else:
        a = torch.cat(
            [adapter.act(adapter.down(adapter.input_norm(h))) for adapter in adapters], -1
        )
    return F.pad(a, (0, len(adapters)), value=1.0).flatten(0, 1)


def up_projections(adapters, dtype):
    """U [d, R], whose columns are those of all U_n and then all b_n, and membership [R, N], 1 where
    a column is adapter n's: a product with it sums over each adapter's columns, one with its
    transpose spreads over them."""
    Us, bs = zip(*(adapter.up_projection() for adapter in adapters), strict=True)
    identity = torch.eye(len(Us), dtype=dtype, device=Us[0].device)  # its rows: e_n
    rows = [e_n.expand(U_n.shape[1], -1) for e_n, U_n in zip(identity, Us, strict=True)]
    return torch.cat([*Us, torch.stack(bs, 1)], 1).to(dtype), torch.cat([*rows, identity])


def add_fusion(bert, adapter_names, kind=Fusion):
    """
    Adds a new fusion over adapters that are already in the encoder, at every slot where they sit,
    activates it, and leaves exactly it trainable. It takes the place of an earlier one.

    Raises ValueError for an unknown or repeated adapter, fewer than one, adapters of different
    kinds, or at different locations (some only on top, some also at the bottom), which the
    reference does not fuse either.
    """
    dtype = torch.float64 if bert.dtype == torch.float64 else torch.float32
    install(bert, new_fusions(bert, list(adapter_names), kind, None, dtype))
    for _, fusion in fusions(bert):
        fusion.requires_grad_(True)


def new_fusions(bert, names, kind, dropout, dtype):
    """{(layer, location): new fusion} over the adapters of these names, not yet in the slots."""
    adapterhub.check_fused(names, known_adapters(bert))
    adapterhub.check_fusion({name: find_adapter(bert, name)[0] for name in names})
    p = dropout or bert.config.attention_probs_dropout_prob  # 0.0 means none given: the reference
    result = {}
    for key, slot in bert.slots():
        if here := [name for name in names if name in slot.adapters]:
            fusion = kind(",".join(names), here, bert.config.hidden_size, p)
            result[key] = fusion.to(bert.device, dtype).train(bert.training)
    return result


def install(bert, new):
    """Puts new fusions into their slots, active and frozen."""
    for key, slot in bert.slots():
        slot.fusion = new.get(key)
    activate(bert, next(iter(new.values())).name)


def fusions(bert):
    """((layer, location), Fusion) for every slot that has one."""
    return [(key, slot.fusion) for key, slot in bert.slots() if slot.fusion is not None]


def fusion_regularization(bert):
    """0.01 · Σ_layers ‖V − I‖²_F, a scalar tensor to add to the loss (section 4.1: "l2-norm" on V;
    the reference's form). 0 without a fusion."""
    zero = torch.zeros((), device=bert.device)
    return sum((fusion.regularization() for _, fusion in fusions(bert)), zero)


def fusion_weights(bert):
    """s of the last forward: {(layer, "output" | "attention"): [B, T, N]}, padding included, with
    T = 1 in the last layer after `cls_only`; N in the order of the fusion's name, 0 for an adapter
    that is left out of that layer or masked. Raises ValueError without a fusion, or a forward."""
    result = {}
    for key, fusion in fusions(bert):
        if fusion.weights is None:
            raise ValueError("no fusion weights yet: run a batch through the encoder first")
        names = fusion.name.split(",")
        result[key] = fusion.weights.new_zeros(*fusion.weights.shape[:-1], len(names))
        there = [names.index(name) for name in fusion.unmasked(fusion.adapter_names)]
        result[key][..., there] = fusion.weights
    if not result:
        raise ValueError("there is no fusion in this encoder")
    return result


def save_fusion(bert, directory):
    """Writes adapter_fusion_config.json and model_adapter_fusion.safetensors. Raises ValueError
    without a fusion."""
    found = dict(fusions(bert))
    if not found:
        raise ValueError("there is no fusion in this encoder")
    fusion = next(iter(found.values()))
    header = adapterhub.header(fusion.name, bert.config, bert.source)
    adapterhub.write_fusion(
        directory, fusion.options, adapterhub.fusion_tensors_by_file_name(found), header
    )


def load_fusion(bert, directory):
    """Plugs a saved fusion into the encoder and activates it, frozen. The adapters that it names
    must have been loaded. Raises FileNotFoundError without a fusion there, ValueError if it does
    not fit or is no known kind of fusion; then the encoder is unchanged."""
    saved, names, kind, dropout = adapterhub.read_fusion(directory, list(FUSIONS.values()))
    new = new_fusions(bert, names, kind, dropout, bert.dtype)
    # the reference has weights, which it does not use, also where all adapters are left out
    idle = [adapterhub.slot_name(key) for key, _ in bert.slots() if key not in new]
    saved.fill(adapterhub.fusion_tensors_by_file_name(new), without=idle)
    install(bert, new)
