"""Ψ: AdapterFusion, the attention over N adapters that is trained in stage 2 (section 3).

add_fusion(bert, ["mnli", "qqp", "rte"])      # a new one, over adapters that are there
loss = loss + fusion_regularization(bert)     # keeps V close to the identity
fusion_weights(bert)                          # s: {(layer, location): [B, T, N]}
save_fusion(bert, "runs/fusion-rte")
load_fusion(bert, "runs/fusion-rte")"""

import torch
from torch import nn

from adapter import Adapter, GridAdapter, activate, adapter_modules
from fast.low_rank import choose_form, low_rank
from formats import adapterhub
from formats.files import error_prefix


class Fusion(nn.Module):
    """AdapterFusion in one AddNorm (section 3.2, Figure 2). For every token,

        s = softmax_n( (Q h + b_Q) · (K z_n + b_K) )        o = Σ_n s_n V z_n

    z_n is the output of adapter n without its residual, which is added once, to o. Vectors are
    columns, so Q, K and V are the transposes of the paper's. As in adapters 1.3 there are biases,
    and h is what the adapters read; the h of section 3.2 is the feed-forward output, f here
    (docs/silent.md)."""

    fast_form = None  # how `low_rank` computes this fusion; None: only `textbook` computes it

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
        if self.fast_form is None:
            o = self.textbook(h, adapters)
        else:  # The usual path: the same o for less work, since z_n = U_n a_n + b_n has only r free
            # numbers. It calls `softmax`, too. `choose_form` has compared it with `textbook`.
            o = low_rank(self, h, adapters, self.fast_form)
        return last.close(o.to(h.dtype) + residual, x, add_norm.norm)

    def textbook(self, h, adapters):
        """The equations of section 3.2, term by term: h [B, T, d] -> o [B, T, d]"""
        z = torch.stack([adapter.z(h) for adapter in adapters], 2)  # [B, T, N, d]
        q_k = torch.einsum("btd,btnd->btn", self.query(h), self.key(z))  # q·(K z_n + b_K)
        s = self.softmax(q_k)  # [B, T, N]
        return torch.einsum("btn,btnd->btd", s, self.value(z))  # o = Σ_n s_n V z_n

    def softmax(self, q_k):
        """The products q·(K z_n + b_K) -> s, both [B, T, N]; s is kept for `fusion_weights`. As in
        adapters 1.3, dropout is applied to the products themselves. A subclass may set one to -∞,
        to leave an adapter out: dropout must not make that 0 · -∞, which is NaN."""
        if self.training:
            q_k = self.dropout(q_k).masked_fill(q_k == -torch.inf, -torch.inf)
        s = q_k.softmax(-1)
        self.s = s.detach()
        return s

    def begin_batch(self, attention_mask):
        """The encoder calls this before each batch. A subclass may keep the mask: [B, T], 1 on real
        tokens, 0 on padding, or None if all are real."""
        self.s = None

    def penalty(self):
        """0.01 · ‖V − I‖²_F, which is added to the loss (section 4.1: "l2-norm" on V; in the form
        of adapters 1.3). 0 for a subclass without V."""
        if not hasattr(self, "value"):
            return 0.0
        V = self.value.weight
        identity = torch.eye(len(V), device=V.device, dtype=V.dtype)
        return 0.01 * (V - identity).square().sum()


FUSIONS = {"attention": Fusion}  # --fusion NAME: Fusion, or a subclass of it


def active_fusions(bert):
    """{(layer, location): Fusion} of the active fusion; {} where none is."""
    if not isinstance(bert.active, tuple):
        return {}
    return {key: slot.fusion for key, slot in bert.slots.items() if slot.fusion is not None}


def fusion_regularization(bert):
    """The penalties of all slots of the active fusion, a scalar tensor to add to the loss. 0
    without an active fusion."""
    penalties = [fusion.penalty() for fusion in active_fusions(bert).values()]
    return sum(penalties, torch.zeros((), device=bert.device))


def fusion_weights(bert):
    """s of the active fusion for the batch that the encoder computed last: {(layer, "output" |
    "attention"): [B, T, N]}, padding included. N is in the order of add_fusion; s is 0 where an
    adapter is left out of a layer, and a slot that a fork skips is missing. Raises ValueError if no
    fusion is active, or none was computed."""
    if not (fusions := active_fusions(bert)):
        raise ValueError("no fusion is active in this encoder")
    result = {}
    for key, fusion in fusions.items():
        if (s := fusion.s) is not None:
            result[key] = s.new_zeros(*s.shape[:-1], len(bert.active))  # [B, T, N]
            result[key][..., [bert.active.index(n) for n in fusion.adapter_names]] = s
    if not result:
        raise ValueError("no fusion weights: run a batch; a `softmax` of your own keeps self.s")
    return result


def add_fusion(bert, names, fusion_class=Fusion, **arguments):
    """Adds a new fusion over adapters of the encoder wherever one of them sits, in place of an
    existing one, and activates it. Its parameters are then the only ones that require a gradient.
    arguments: further ones, for a class of your own. Raises ValueError, and changes nothing, for a
    name that is unknown or there twice, for adapters at different locations (as adapters 1.3 does),
    for one without `z`, and for those that `choose_form` refuses."""
    modules = make_fusion(bert, names, fusion_class, arguments)
    bert.requires_grad_(False)  # all but the new modules, which are not in it yet
    put_in_place(bert, names, modules)


def put_in_place(bert, names, modules):
    for key, slot in bert.slots.items():
        slot.fusion = modules.get(key)
    activate(bert, tuple(names))


def make_fusion(bert, names, fusion_class, arguments, dropout=None):
    """{(layer, location): module} of a new fusion, not yet in the encoder. Without a dropout it has
    that of the encoder's attention; 0.0 counts as none given, as in adapters 1.3."""
    dropout = dropout or bert.config.attention_probs_dropout_prob
    if not names or len({*names}) < len(names):
        raise ValueError(f"a fusion needs at least one adapter, and each of them once, not {names}")
    found = {name: adapter_modules(bert, name) for name in names}
    for name in names:
        methods = ("h_and_residual", "z", "close")
        if not all(hasattr(module, m) for module in found[name].values() for m in methods):
            raise ValueError(f"adapter {name!r} has no output z that a fusion could mix")
        if {where for _, where in found[name]} != {where for _, where in found[names[0]]}:
            pair = f"{names[0]!r} and {name!r}"
            raise ValueError(f"adapters at different locations cannot be fused: {pair}")
    modules = {}
    for key, slot in bert.slots.items():
        if here := {name: found[name][key] for name in names if key in found[name]}:
            fusion = fusion_class([*here], bert.config.hidden_size, dropout, **arguments)
            fusion.arguments = arguments  # for `save_fusion`
            fusion.to(bert.device, torch.promote_types(bert.dtype, torch.float32))
            # The form in which `low_rank` gives the same o as the given class, or None. Raises
            # ValueError if an adapter reads or adds something else than the last; for the last two
            # classes, which AdapterHub's library fuses all the same, it only prints a note.
            fusion.fast_form = choose_form(fusion, here, slot.norm, Fusion, (Adapter, GridAdapter))
            modules[key] = fusion.train(bert.training)
    return modules


def save_fusion(bert, directory):
    """Writes adapter_fusion_config.json and model_adapter_fusion.safetensors of the active one."""
    if not (modules := active_fusions(bert)):
        raise ValueError("no fusion is active in this encoder")
    one = next(iter(modules.values()))
    tensors = adapterhub.slot_tensors(modules)
    options = {"architecture": type(one).__name__, "fields": one.arguments}  # see `save_adapter`
    if type(one) is Fusion and not one.arguments and adapterhub.is_attention(tensors):
        options = adapterhub.FUSION_CONFIG  # the paper's own, with the fields that AdapterHub has
    adapterhub.write(directory, adapterhub.FUSION, ",".join(bert.active), options, tensors, bert)


def load_fusion(bert, directory):
    """Inserts a saved fusion into the encoder and activates it, frozen. The adapters that it names
    must have been loaded. Raises FileNotFoundError if there is no fusion, and ValueError if it does
    not fit; the encoder is then unchanged."""
    saved = adapterhub.read(directory, adapterhub.FUSION)
    with error_prefix(saved.directory):
        saved.check_encoder(bert)
        fusion_class, arguments = saved.kind(Fusion, FUSIONS)
        if arguments is None:  # it is in AdapterHub's own format, which names no class
            adapterhub.check_fusion(saved.options)
        p = saved.options.get("dropout_prob")
        modules = make_fusion(bert, saved.adapter_names, fusion_class, arguments or {}, p)
        # AdapterHub's files also hold layers in which all adapters are left out
        unused = [adapterhub.slot_path(key) for key in bert.slots if key not in modules]
        saved.copy_into(adapterhub.slot_tensors(modules), unused)
    for module in modules.values():
        module.requires_grad_(False)
    put_in_place(bert, saved.adapter_names, modules)
