"""Ψ: AdapterFusion, the attention over N adapters that is trained in stage 2 (section 3).

add_fusion(bert, ["mnli", "qqp", "rte"])      # over adapters already there; trainable, active
loss = loss + fusion_regularization(bert)     # keeps V close to the identity
fusion_weights(bert)                          # s: {(layer, location): [B, T, N]}
save_fusion(bert, "runs/fusion-rte"); load_fusion(bert, "runs/fusion-rte")
"""

import torch
import torch.nn.functional as F
from torch import nn

from adapter import Adapter, adapter_modules
from bert import activate, known_adapters
from formats import adapterhub
from formats.files import error_prefix


class Fusion(nn.Module):
    """
    AdapterFusion in one slot (section 3.2, Figure 2). For every token,

        s = softmax_n( (Q h + b_Q) · (K z_n + b_K) )        o = Σ_n s_n V z_n

    z_n is what adapter n computes, without its residual, which is added once, to o. Vectors are
    columns, so Q, K and V are the transposes of the paper's. Two things are those of adapters 1.3:
    the biases, and that h is what the adapters read, LN(f + x), where section 3.2 has the
    feed-forward output f (docs/silent.md). `textbook` computes these two equations term by term,
    and is what tests compare with; the model runs `compose`, the same function at a fraction of
    the cost. Another kind of fusion is a subclass with another `attend` or `compose`,
    registered under a name of its own (docs/forking.md).
    """

    file_tag = {}  # tells a variant from the paper's fusion in adapter_fusion_config.json
    config_defaults = {}  # hyper-parameters of a variant, set by --fusion-config, saved with it
    mixes_tokens = False  # each token's output depends on that token alone (bert.py)
    order_matters_because = None  # a sentence, if it does (tests/test_kinds.py reads it)

    def __init__(self, name, adapter_names, hidden_size, dropout, **config):
        super().__init__()
        if unknown := [field for field in config if field not in self.config_defaults]:
            known = ", ".join(self.config_defaults) or "none"
            raise ValueError(
                f"{type(self).__name__} has no field {unknown[0]!r:.50}, its fields: {known}"
            )
        self.name = name  # all fused adapters, comma-separated
        self.adapter_names = adapter_names  # those of them that sit in this slot
        self.config = {**self.config_defaults, **config}
        self.query = nn.Linear(hidden_size, hidden_size)  # Q
        self.key = nn.Linear(hidden_size, hidden_size)  # K
        self.value = nn.Linear(hidden_size, hidden_size, bias=False)  # V
        self.dropout = nn.Dropout(dropout)
        self.weights = None  # s of the last forward [B, T, N]
        for linear in (self.query, self.key):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
        # section 4.1: ones on the diagonal, so that at first o is about Σ s_n z_n. Elsewhere the
        # text has random numbers of norm 1e-6; the constant is that of adapters 1.3.
        with torch.no_grad():
            self.value.weight.fill_(1e-6).fill_diagonal_(1.0)

    def forward(self, f, x, norm, adapters, layer_input=None):
        """f: sub-layer output, x: its input [B, T, d], norm: BERT's own LayerNorm, adapters: N
        modules, layer_input: the layer's input and the mask -> [B, T, d]"""
        # As in adapters 1.3, the configuration of the last adapter decides for all of them what
        # they read, which residual is added to o, and whether BERT's LayerNorm follows. Of an
        # adapter's own LayerNorms, `norm_before` is a part of its z, and `norm_after` is left out.
        last = adapters[-1]
        h, residual = last.inputs(f, x, norm)
        self.weights = None
        o = self.compose(h, adapters, layer_input)
        return last.add_and_norm(o + residual, x, norm)

    def textbook(self, h, adapters, layer_input=None):
        """The two equations above, term by term: h [B, T, d] -> o [B, T, d]. 2·N·d² multiply-adds
        per token, and 3·N·d activations."""
        z = torch.stack([adapter.z(h, layer_input) for adapter in adapters], 2)  # z_n: [B, T, N, d]
        scores = torch.einsum("btd,btnd->btn", self.query(h), self.key(z))  # q·(K z_n + b_K)
        s = self.weigh(scores)  # [B, T, N]
        return torch.einsum("btn,btnd->btd", s, self.value(z))  # o = Σ_n s_n V z_n

    def attend(self, scores):
        """s = softmax_n(scores): [B, T, N] -> [B, T, N]. As in adapters 1.3, dropout is applied to
        the raw scores."""
        return self.dropout(scores).softmax(-1)

    def weigh(self, scores):
        """s of `attend`, which is kept for `fusion_weights`."""
        s = self.attend(scores)
        self.weights = s.detach()
        return s

    def compose(self, h, adapters, layer_input=None):
        """o: [B, T, d]. By `low_rank` if every z_n is a linear map of a bottleneck, otherwise by
        `absorbed`."""
        if are_bottlenecks(adapters):
            return self.low_rank(h, adapters)
        return self.absorbed(h, adapters, layer_input)

    def absorbed(self, h, adapters, layer_input):
        """`textbook` with K and V applied once, to the query and to the sum of z_n, instead of to
        every z_n: (Q h)·(K z_n) = (Kᵀ Q h)·z_n, and Σ s_n V z_n = V Σ s_n z_n."""
        z = torch.stack([adapter.z(h, layer_input) for adapter in adapters], 2)  # [B, T, N, d]
        q = self.query(h)  # Q h + b_Q: [B, T, d]
        scores = (z @ (q @ self.key.weight)[..., None])[..., 0]  # (Kᵀ q)·z_n: [B, T, N]
        scores = scores + (q @ self.key.bias)[..., None]  # + q·b_K, the same for every n
        s = self.weigh(scores).to(z.dtype)  # [B, T, N]
        mixture = (s[:, :, None] @ z)[:, :, 0]  # Σ s_n z_n: [B, T, d]
        return self.value(mixture)  # V Σ s_n z_n: [B, T, d]

    def low_rank(self, h, adapters):
        """
        The same without ever forming the d numbers of a z_n, which is U_n a_n + b_n with an a_n of
        only r numbers, d/16 by default. Three matrices hold all N adapters side by side. Their
        common dimension, R = Σ r_n + N, counts the columns of every U_n, and then one for each b_n
        (docs/figures/low_rank.svg).

            a           [B·T, R]   a_1 … a_N of each token, then a 1 for each b_n
            U           [d, R]     U_1 … U_N, then b_1 … b_N
            membership  [R, N]     1 where a column belongs to adapter n

        Then U (a ⊙ membership's column n) is z_n, and with q = Q h + b_Q

            q·(K z_n + b_K)  =  ((Uᵀ Kᵀ q) ⊙ a) @ membership + q·b_K
            Σ_n s_n V z_n    =  V U (a ⊙ (s @ membershipᵀ))

        Each chain of products is evaluated in the cheaper order. With more tokens than columns,
        K U and V U come first: 3·R·d multiply-adds per token, and 3·d²·R once. Otherwise each token
        meets one matrix after the other: 3·R·d + 3·d² per token. q·b_K is the same for every n:
        the softmax alone would not see it, but dropout on the scores does.
        """
        B, T, d = h.shape
        a = bottlenecks(h, adapters)  # [B·T, R]
        U, membership = up_projections(adapters, a.dtype)  # [d, R], [R, N]
        R, N = membership.shape
        Q, K, V = self.query.weight, self.key.weight, self.value.weight  # [d, d] each
        b_Q, b_K = self.query.bias, self.key.bias  # [d] each
        h = h.reshape(B * T, d)
        weights_first = B * T > R
        if weights_first:
            # every a has one 1 per adapter, so b_K is added in the columns of the b_n
            b_K_columns = F.pad(b_K[:, None].expand(d, N), (R - N, 0))  # 0 … 0, b_K … b_K: [d, R]
            keys = torch.addmm(b_K_columns, K, U)  # K U + b_K: [d, R]
            q_keys = F.linear(h, (Q.T @ keys).T, b_Q @ keys)  # qᵀ (K U + b_K): [B·T, R]
            scores = (q_keys * a) @ membership  # q·(K z_n + b_K): [B·T, N]
        else:
            q = F.linear(h, Q, b_Q)  # Q h + b_Q: [B·T, d]
            q_keys = q @ K @ U  # qᵀ K U: [B·T, R]
            scores = (q_keys * a) @ membership + (q @ b_K)[:, None]  # [B·T, N]
        s = self.weigh(scores.view(B, T, N)).reshape(B * T, N)
        s_a = s.to(a.dtype) @ membership.T * a  # each a_n times its s_n: [B·T, R]
        if weights_first:
            o = s_a @ (V @ U).T  # Σ_n s_n V z_n: [B·T, d]
        else:
            o = s_a @ U.T @ V.T  # the same: [B·T, R] -> [B·T, d] -> [B·T, d]
        return o.view(B, T, d)

    def regularization(self):
        """0.01 · ‖V − I‖²_F"""
        V = self.value.weight
        identity = torch.eye(len(V), device=V.device, dtype=V.dtype)
        return 0.01 * (V - identity).square().sum()


FUSIONS = {"attention": Fusion}  # --fusion


def register(name, fusion_class):
    """Makes a kind of fusion known as --fusion NAME. Raises ValueError if the name or the file_tag
    is taken."""
    tag = adapterhub.variant_options(fusion_class.file_tag)
    for other_name, other in FUSIONS.items():
        if other is fusion_class:
            continue
        if other_name == name:
            raise ValueError(f"--fusion {name} is already registered for {other.__name__}")
        if adapterhub.variant_options(other.file_tag) == tag:
            raise ValueError(
                f"{fusion_class.__name__} with the file_tag {fusion_class.file_tag} and "
                f"{other.__name__} with {other.file_tag}: their files could not be told apart"
            )
    FUSIONS[name] = fusion_class


def are_bottlenecks(adapters):
    """Whether every z_n is U_n a_n + b_n, as `Adapter.z` computes it."""
    return all(getattr(type(adapter), "z", None) is Adapter.z for adapter in adapters)


def bottlenecks(h, adapters):
    """All a_n = act(D_n h + b_D), and a 1 for each adapter: h [B, T, d] -> [B·T, R]"""
    same_act = all(adapter.act is adapters[0].act for adapter in adapters)
    plain = all(
        isinstance(a.norm_before, nn.Identity) and type(a.down) is nn.Linear for a in adapters
    )
    if same_act and plain:
        D = torch.cat([adapter.down.weight for adapter in adapters])  # [Σ r_n, d]
        b_D = torch.cat([adapter.down.bias for adapter in adapters])
        a = adapters[0].act(F.linear(h, D, b_D))  # one product for all, [B, T, Σ r_n]
    else:
        a = [adapter.act(adapter.down(adapter.norm_before(h))) for adapter in adapters]
        a = torch.cat(a, -1)
    return F.pad(a, (0, len(adapters)), value=1.0).flatten(0, 1)


def up_projections(adapters, dtype):
    """U [d, R], whose columns are those of all U_n and then all b_n, and membership [R, N], 1 where
    a column is adapter n's: a product with it sums over each adapter's columns, one with its
    transpose repeats a number for each of them."""
    Us, bs = zip(*(adapter.up_projection() for adapter in adapters), strict=True)
    identity = torch.eye(len(Us), dtype=dtype, device=Us[0].device)  # its rows: e_n
    rows = [e_n.expand(U_n.shape[1], -1) for e_n, U_n in zip(identity, Us, strict=True)]
    U = torch.cat([*Us, torch.stack(bs, 1)], 1)
    return U.to(dtype), torch.cat([*rows, identity])


def add_fusion(bert, adapter_names, fusion_class=Fusion, **config):
    """
    Adds a new fusion over adapters that are already in the encoder, at every slot where they sit,
    activates it, and makes it the only trainable part. It replaces an existing fusion.
    config: hyper-parameters of a variant.

    Raises ValueError for an unknown or repeated adapter, no adapter, adapters of different
    kinds, or at different locations (some only on top, some also at the bottom), which adapters 1.3
    does not fuse either.
    """
    names = list(adapter_names)
    dtype = torch.float64 if bert.dtype == torch.float64 else torch.float32
    insert_fusions(bert, new_fusions(bert, names, fusion_class, config, None, dtype))
    configs = [adapter_modules(bert, name)[0] for name in names]
    for field in configs[-1].residual_fields():
        values = [getattr(config, field) for config in configs]
        if any(value != values[-1] for value in values):
            each = ", ".join(f"{v} in {n}" for n, v in zip(names, values, strict=True))
            print(f"note: the adapters differ in {field} ({each}): the last one's value is used")
    for _, fusion in fusions(bert):
        fusion.requires_grad_(True)


def new_fusions(bert, names, fusion_class, config, dropout, dtype):
    """{(layer, location): new fusion} over the adapters of these names, not yet in the slots."""
    check_adapters(bert, names)
    p = dropout or bert.config.attention_probs_dropout_prob  # 0.0 counts as unset, as in adapters
    result = {}
    for key, slot in bert.slots():
        if present := [name for name in names if name in slot.adapters]:
            fusion = fusion_class(",".join(names), present, bert.config.hidden_size, p, **config)
            result[key] = fusion.to(bert.device, dtype).train(bert.training)
    return result


def check_adapters(bert, names):
    """Raises ValueError for adapters that cannot be fused."""
    if not names or len(set(names)) < len(names):
        raise ValueError(f"a fusion needs at least one adapter, and each of them once, not {names}")
    if missing := [name for name in names if name not in known_adapters(bert)]:
        raise ValueError(f"adapter {missing[0]!r} is to be fused, but has not been loaded")
    found = {name: adapter_modules(bert, name) for name in names}
    reasons = {name: config.cannot_fuse_because for name, (config, _) in found.items()}
    for reason in filter(None, reasons.values()):
        these = [name for name in names if reasons[name] == reason]
        raise ValueError(f"{reason}: {', '.join(these)}")
    kinds = {name: config.architecture or "bottleneck" for name, (config, _) in found.items()}
    places = {
        name: " and ".join(sorted({location for (_, location), _, _ in modules}))
        for name, (_, modules) in found.items()
    }
    for what, values in (("of different kinds", kinds), ("at different locations", places)):
        if len(set(values.values())) > 1:
            each = ", ".join(f"{value} in {name}" for name, value in values.items())
            raise ValueError(f"adapters {what} cannot be fused: {each}")


def insert_fusions(bert, new):
    """Puts new fusions into their slots, active and frozen."""
    for key, slot in bert.slots():
        slot.fusion = new.get(key)
    activate(bert, next(iter(new.values())).name)


def fusions(bert):
    """((layer, location), Fusion) for every slot that has one."""
    return [(key, slot.fusion) for key, slot in bert.slots() if slot.fusion is not None]


def fusion_regularization(bert):
    """0.01 · Σ_layers ‖V − I‖²_F, a scalar tensor to add to the loss (section 4.1: "l2-norm" on V;
    in the form of adapters 1.3). 0 without a fusion."""
    zero = torch.zeros((), device=bert.device)
    return sum((fusion.regularization() for _, fusion in fusions(bert)), zero)


def fusion_weights(bert):
    """s of the last forward: {(layer, "output" | "attention"): [B, T, N]}, padding included; T is 1
    in the last layer where `cls_only` has left out the other tokens. N is in the order in which the
    adapters were given, 0 for one that is left out of that layer. Raises ValueError if
    there is no fusion, or if there has been no forward pass."""
    result = {}
    for key, fusion in fusions(bert):
        if fusion.weights is None:
            raise ValueError("no fusion weights yet: run a batch through the encoder first")
        names = fusion.name.split(",")
        result[key] = fusion.weights.new_zeros(*fusion.weights.shape[:-1], len(names))
        present = [names.index(name) for name in fusion.adapter_names]
        result[key][..., present] = fusion.weights
    if not result:
        raise ValueError("there is no fusion in this encoder")
    return result


def save_fusion(bert, directory):
    """Writes adapter_fusion_config.json and model_adapter_fusion.safetensors. Raises ValueError
    without a fusion."""
    by_key = dict(fusions(bert))
    if not by_key:
        raise ValueError("there is no fusion in this encoder")
    fusion = next(iter(by_key.values()))
    header = adapterhub.header(fusion.name, bert.config, bert.source)
    options = {**fusion.file_tag, **fusion.config}
    adapterhub.write_fusion(directory, options, fusion_tensors(by_key), header)


def fusion_tensors(by_key):
    """{(path of the slot, part): tensor} of {(layer, location): fusion}. A part has the same name
    in the file as in the module."""
    return {
        (adapterhub.slot_path(key), part): tensor
        for key, fusion in by_key.items()
        for part, tensor in fusion.state_dict(keep_vars=True).items()
    }


def load_fusion(bert, directory):
    """Inserts a saved fusion into the encoder and activates it, frozen. The adapters that it names
    must have been loaded. Raises FileNotFoundError without a fusion there, ValueError if it does
    not fit or is no known kind of fusion; then the encoder is unchanged."""
    saved, names = adapterhub.read_fusion(directory)
    with error_prefix(saved.directory / adapterhub.FUSION.config):
        saved.check_size(bert.config)
        fusion_class, config = fusion_class_of(saved.options)
        dropout = saved.options.get("dropout_prob")
        new = new_fusions(bert, names, fusion_class, config, dropout, bert.dtype)
    # AdapterHub's files also hold weights for layers in which all adapters are left out
    unused = [adapterhub.slot_path(key) for key, _ in bert.slots() if key not in new]
    saved.copy_into(fusion_tensors(new), without=unused)
    insert_fusions(bert, new)


def fusion_class_of(options):
    """(the registered variant to which a saved file belongs, its hyper-parameters). options: the
    file's, those of a variant being its file_tag and fields."""
    for fusion_class in FUSIONS.values():
        config = {f: value for f, value in options.items() if f in fusion_class.config_defaults}
        tag = {field: value for field, value in options.items() if field not in config}
        if adapterhub.variant_options(tag) == adapterhub.variant_options(fusion_class.file_tag):
            return fusion_class, config
    field, value = next(iter(adapterhub.variant_options(options).items()))
    raise ValueError(f"a fusion with {field} = {value!r:.50} is not supported")
