"""Ψ: AdapterFusion, the attention over N adapters that is trained in stage 2 (section 3).

    add_fusion(bert, ["mnli", "qqp", "rte"])      # over adapters that are already there; new, trainable, active
    loss = loss + fusion_regularization(bert)     # keeps V close to the identity
    fusion_weights(bert)                          # who spoke: {(layer, location): [B, T, N]}
    silence(bert, ["qqp"])                        # without it; silence(bert, []): all again
    save_fusion(bert, "runs/fusion-rte"); load_fusion(bert, "runs/fusion-rte")
"""

import copy
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from adapter import PAL, SLOT, PALConfig, activate, check_dropout, fetch, fill, meta, read_tensors, refuse_rest, slot_name
from bert import read_json, write_json, write_safetensors


class Fusion(nn.Module):
    """
    AdapterFusion in one slot (section 3.2, Figure 2). For every token, with h the query and z_n adapter n's output:

        s = softmax_n( (Q h + b_Q) · (K z_n + b_K) )        o = Σ_n s_n V z_n

    `textbook` computes this as written: 2·N·d² multiply-adds per token, and N·d activations. `forward` computes the same
    function without ever forming z_n, because z_n = U_n a_n + b_n has only r = d/16 dimensions. Let a hold all a_n and a
    constant 1 for each adapter, and Z all U_n and b_n as its columns, R = Σ r_n + N of them. Then

        (Q h + b_Q)·K z_n  =  Σ over n's columns of  a ⊙ (Zᵀ Kᵀ (Q h + b_Q))        all D_n are one product, all U_n another
        Σ s_n V z_n        =  V Z (s ⊙ a)                                           s spread over each adapter's columns

    which leaves two chains of products, Zᵀ Kᵀ Q h and V Z (s ⊙ a), multiplied in the cheaper order: the weights with each
    other first where there are more tokens than columns, the tokens with one weight after the other where there are fewer.
    That is 3·R·d multiply-adds per token and 3·d²·R once, or 3·R·d + 3·d² per token. (Q h + b_Q)·b_K is the same for every
    n, so the softmax does not see it; dropout on the raw scores does (the reference drops scores before the softmax), so
    it stays.
    """

    def __init__(self, name, adapter_names, hidden_size, dropout):
        super().__init__()
        self.name = name  # all fused adapters, joined by commas
        self.adapter_names = adapter_names  # those of them that sit in this slot
        self.query = nn.Linear(hidden_size, hidden_size)  # Q
        self.key = nn.Linear(hidden_size, hidden_size)  # K
        self.value = nn.Linear(hidden_size, hidden_size, bias=False)  # V
        self.dropout = nn.Dropout(dropout)
        self.silent = frozenset()  # names of those that do not speak, see `silence`
        self.weights = None  # s of the last forward [B, T, N], N those that speak
        for linear in (self.query, self.key):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
        # section 4.1: ones on the diagonal, small values elsewhere; o starts as the weighted mean of the z_n
        with torch.no_grad():
            self.value.weight.fill_(1e-6).fill_diagonal_(1.0)

    def forward(self, f, x, norm, adapters, parallel=None):
        """f: sub-layer output, x: its input [B, T, d], norm: BERT's own LayerNorm, adapters: N modules, parallel: what PALs
        read -> [B, T, d]"""
        last = adapters[-1]  # the reference: the last adapter's config says what all of them read, and the residual
        h, residual = last.enter(f, x, norm)
        adapters = speaking(self, adapters)
        o = self.mix_pals(h, adapters, parallel) if isinstance(last, PAL) else self.mix(h, adapters)
        return last.leave(o + residual, x, norm)

    def mix(self, h, adapters):
        """o of the class docstring: h [B, T, d] -> [B, T, d]"""
        B, T, d = h.shape
        a = bottlenecks(h, adapters)  # [B·T, R]
        Z, member = up_projections(adapters, a.dtype)  # [d, R], [R, N]
        Q, K, V, b_Q, b_K = self.query.weight, self.key.weight, self.value.weight, self.query.bias, self.key.bias
        h = h.reshape(B * T, d)
        weights_first = B * T > Z.shape[1]
        scores = ((chain(h, Q.T, K, Z, weights_first=weights_first) + b_Q @ K @ Z) * a) @ member  # (Q h + b_Q)·K z_n [B·T, N]
        scores = scores + (h @ (Q.T @ b_K) + b_Q @ b_K)[:, None]  # + (Q h + b_Q)·b_K
        s = self.dropout(scores).softmax(-1)  # [B·T, N]
        self.weights = s.detach().view(B, T, -1)
        return chain((s.to(a.dtype) @ member.T) * a, Z.T, V.T, weights_first=weights_first).view(B, T, d)  # Σ s_n V z_n

    def mix_pals(self, h, adapters, parallel):
        """The same over PALs, whose z_n is no linear function of something smaller: K and V are still applied only once."""
        z = torch.stack([adapter.z(*parallel)[:, : h.shape[1]] for adapter in adapters], 2)  # [B, T, N, d]
        q = self.query(h)  # [B, T, d]
        scores = (z @ (q @ self.key.weight)[..., None])[..., 0] + (q @ self.key.bias)[..., None]  # [B, T, N]
        s = self.dropout(scores).softmax(-1)
        self.weights = s.detach()
        return self.value((s.to(z.dtype)[:, :, None] @ z)[:, :, 0])  # [B, T, d]

    def textbook(self, h, adapters):
        """The same function as `mix`, with the paper's equations taken literally."""
        norms = [adapter.norm_before or nn.Identity() for adapter in adapters]
        z = [adapter.up(adapter.act(adapter.down(norm(h)))) for adapter, norm in zip(adapters, norms, strict=True)]
        z = torch.stack(z, 2)  # [B, T, N, d]
        scores = torch.einsum("btd,btnd->btn", self.query(h), self.key(z))
        s = self.dropout(scores).softmax(-1)  # [B, T, N]
        return torch.einsum("btn,btnd->btd", s, self.value(z))


def speaking(fusion, of_each):
    """`of_each` adapter of a slot, in the order of fusion.adapter_names -> the same without those that are silent."""
    return [value for name, value in zip(fusion.adapter_names, of_each, strict=True) if name not in fusion.silent]


def bottlenecks(h, adapters):
    """What goes into the up-projections of a slot: all a_n, and a 1 for each adapter. h [B, T, d] -> [B·T, R]"""
    if any(adapter.norm_before for adapter in adapters):  # each adapter has an input of its own
        down = [adapter.down(adapter.norm_before(h) if adapter.norm_before else h) for adapter in adapters]
    else:
        D, b_D = (torch.cat([getattr(adapter.down, kind) for adapter in adapters]) for kind in ("weight", "bias"))
        down = F.linear(h, D, b_D).split([adapter.down.out_features for adapter in adapters], -1)
    a = [adapter.act(part).flatten(0, 1) for adapter, part in zip(adapters, down, strict=True)]  # N x [B·T, r_n]
    return torch.cat([*a, a[0].new_ones(len(a[0]), len(a))], 1)


def chain(x, *weights, weights_first):
    """x W_1 W_2 ...: all the W multiplied first, or x with one after the other."""
    if weights_first:
        product = weights[-1]
        for W in reversed(weights[:-1]):
            product = W @ product
        return x @ product
    for W in weights:
        x = x @ W
    return x


def up_projections(adapters, dtype):
    """Z [d, R], whose columns are those of all U_n and then all b_n, and member [R, N], 1 where a column belongs to adapter n:
    a product with it sums over each adapter's columns, one with its transpose spreads over them."""
    Z = torch.cat([adapter.up.weight for adapter in adapters] + [adapter.up.bias[:, None] for adapter in adapters], 1)
    ones = [Z.new_ones(adapter.up.in_features, 1) for adapter in adapters]
    member = torch.cat([torch.block_diag(*ones), torch.eye(len(adapters), dtype=Z.dtype, device=Z.device)])
    return Z.to(dtype), member.to(dtype)


def add_fusion(bert, adapter_names):
    """
    Adds a new fusion over adapters that are already in the encoder, at every slot where they sit, activates it, and
    leaves exactly it trainable. It takes the place of an earlier one.

    Raises ValueError for an unknown or repeated adapter, fewer than one, or adapters at different locations (some only
    on top, some also at the bottom), which the reference does not fuse either.
    """
    plug_in_fusion(bert, adapter_names, None, torch.float64 if bert.dtype == torch.float64 else torch.float32)
    for _, fusion in fusions(bert):
        fusion.requires_grad_(True)


def plug_in_fusion(bert, adapter_names, dropout, dtype):
    """New fusion modules in their slots, active, all frozen; nothing is changed if an error is raised."""
    names = list(adapter_names)
    configs = [find_config(bert, name) for name in names]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"a fusion needs at least one adapter, and each of them once, not {names}")
    for field in ("mh_adapter", "output_adapter"):
        if len({getattr(config, field) for config in configs}) > 1:
            raise ValueError(
                f"adapters at different locations cannot be fused: {field} is "
                + ", ".join(f"{getattr(config, field)} in {name}" for name, config in zip(names, configs, strict=True))
            )
    if len({isinstance(config, PALConfig) for config in configs}) > 1:
        raise ValueError(f"PALs cannot be fused with other adapters: {', '.join(names)}")
    own = [name for name, config in zip(names, configs, strict=True) if getattr(config, "layer_norms", False)]
    if own:  # h, and with it z_n, comes from a stream that they have changed; no other adapter can speak in it
        raise ValueError(f"adapters that come with LayerNorms of their own (layer_norms) cannot be fused: {', '.join(own)}")
    dropout = dropout or bert.config.attention_probs_dropout_prob  # so the reference: 0.0 counts as not given
    for _, slot in bert.slots():
        here = [name for name in names if name in slot.adapters]
        slot.fusion = Fusion(",".join(names), here, bert.config.hidden_size, dropout) if here else None
        if here:
            slot.fusion.to(bert.device, dtype).train(bert.training)
    activate(bert, ",".join(names))


def find_config(bert, name):
    """The AdapterConfig of an adapter that is in the encoder. Raises ValueError if it is not."""
    for _, slot in bert.slots():
        if name in slot.adapters:
            return slot.adapters[name].config
    raise ValueError(f"adapter {name!r} is to be fused, but has not been loaded")


@torch.no_grad()
def fold(bert):
    """
    An encoder for inference with the same outputs and fusion weights, where every fusion that is active is folded: 3·R·d
    multiply-adds per token. It shares all other modules' weights with `bert`, which stays as it is.
    """
    shared = {id(p): p for p in bert.parameters()}
    folded = copy.deepcopy(bert, shared).eval()
    for _, slot in folded.slots():
        if slot.fusion is not None and slot.active == slot.fusion.name:
            adapters = [slot.adapters[name] for name in slot.fusion.adapter_names]
            if isinstance(adapters[-1], PAL) or isinstance(slot.fusion, FoldedFusion):  # there is nothing to fold
                continue
            slot.fusion = FoldedFusion(slot.fusion, adapters).to(bert.dtype)
    return folded


def fusions(bert):
    """((layer, location), Fusion) for every slot that has one."""
    return [(key, slot.fusion) for key, slot in bert.slots() if slot.fusion is not None]


def silence(bert, names, layers=None):
    """
    Takes adapters out of the softmax, as scores of -inf would, but without the work; in all layers, or in `layers` (from 0).
    What was silenced there before is not any more: after silence(bert, []) all speak. What the adapters of a slot read is
    still the last one's choice, silent or not.

    Raises ValueError, and changes nothing, for a name that is not in the fusion, for a layer that has none, or if a layer would
    be left without adapter.
    """
    names, there = frozenset(names), {layer for (layer, _), _ in fusions(bert)}
    layers = there if layers is None else set(layers)
    if not there or layers - there:
        raise ValueError("there is no fusion in " + (f"layer {min(layers - there)}, from 0" if there else "this encoder"))
    here = [(key, fusion) for key, fusion in fusions(bert) if key[0] in layers]
    for (layer, _), fusion in here:
        if isinstance(fusion, FoldedFusion):
            raise ValueError("adapters of a folded fusion cannot be silenced: silence them, then fold")
        if unknown := sorted(names - set(fusion.name.split(","))):
            raise ValueError(f"adapter {unknown[0]!r:.120} is not in the fusion of {fusion.name.replace(',', ', ')}")
        if set(fusion.adapter_names) <= names:
            raise ValueError(f"layer {layer + 1} would be left without adapter: it has {', '.join(fusion.adapter_names)}")
    for _, fusion in here:
        fusion.silent, fusion.weights = names, None


def fusion_regularization(bert):
    """0.01 · Σ_layers ‖V − I‖²_F, a scalar tensor to add to the loss (section 4.1: "l2-norm" on V; the reference's form).
    0 without a fusion. Raises ValueError for a folded one, which has no V."""
    total = torch.zeros((), device=bert.device)
    for _, fusion in fusions(bert):
        if isinstance(fusion, FoldedFusion):
            raise ValueError("a folded fusion has no regularization: it is not for training")
        V = fusion.value.weight
        total = total + 0.01 * (V - torch.eye(len(V), device=V.device, dtype=V.dtype)).pow(2).sum()
    return total


def fusion_weights(bert):
    """s of the fusion's last forward: {(layer, "output" | "attention"): [B, T, N]}, padding included; N in the order of the
    fusion's name, 0 for an adapter that is left out of that layer or silent. Raises ValueError before the first forward."""
    result = {}
    for key, fusion in fusions(bert):
        if fusion.weights is None:
            raise ValueError("there are no fusion weights yet: run a batch through the encoder first")
        result[key] = fusion.weights.new_zeros(*fusion.weights.shape[:-1], len(fusion.name.split(",")))
        names = speaking(fusion, fusion.adapter_names)
        result[key][..., [fusion.name.split(",").index(name) for name in names]] = fusion.weights
    if not result:
        raise ValueError("there is no fusion in this encoder")
    return result


class FoldedFusion(nn.Module):
    """A Fusion for inference: the products of weights in `Fusion.mix` are there ahead of time, three of size d × R remain."""

    def __init__(self, fusion, adapters):
        super().__init__()
        self.name, self.adapter_names, self.silent, self.weights = fusion.name, fusion.adapter_names, fusion.silent, None
        Q, K, V = fusion.query.weight, fusion.key.weight, fusion.value.weight  # K's bias does not change the softmax
        Z, member = up_projections(speaking(fusion, adapters), Q.dtype)  # [d, R], [R, N]
        self.register_buffer("to_scores", (K @ Z).T @ Q)  # [R, d]
        self.register_buffer("to_scores_bias", fusion.query.bias @ K @ Z)  # [R]
        self.register_buffer("to_output", V @ Z)  # [d, R]
        self.register_buffer("member", member)

    def forward(self, f, x, norm, adapters, parallel=None):
        """As Fusion.forward."""
        last = adapters[-1]
        h, residual = last.enter(f, x, norm)
        a = bottlenecks(h, speaking(self, adapters))  # [B·T, R]
        scores = (F.linear(h.flatten(0, 1), self.to_scores, self.to_scores_bias) * a) @ self.member
        s = scores.softmax(-1)  # [B·T, N]
        self.weights = s.view(*h.shape[:2], -1)
        output = F.linear((s @ self.member.T) * a, self.to_output).view(h.shape)
        return last.leave(output + residual, x, norm)


# ----------------------------------------------------------------------------------------------------------------------
# AdapterHub's files

FUSION_CONFIG_FILE = "adapter_fusion_config.json"
FUSION_FILES = ("model_adapter_fusion.safetensors", "pytorch_model_adapter_fusion.bin")
FUSION_TENSOR = re.compile(SLOT + r"adapter_fusion_layer\.(?P<name>.+)\.(?P<part>(?:query|key|value)\.\w+)")

# The paper's fusion in the reference's terms. value_before_softmax: V z_n or V Σ s_n z_n, which are equal
FUSION_CONFIG = {
    "dropout_prob": None, "key": True, "query": True, "query_before_ln": False, "regularization": True,
    "residual_before": False, "temperature": False, "value": True, "value_before_softmax": True,
    "value_initialized": True,
}  # fmt: skip


def save_fusion(bert, directory):
    """Writes adapter_fusion_config.json and model_adapter_fusion.safetensors. Raises ValueError without a fusion."""
    tensors = {}
    for key, fusion in fusions(bert):
        if isinstance(fusion, FoldedFusion):
            raise ValueError("a folded fusion cannot be saved: save the one that it was folded from")
        prefix = f"{bert.config.model_type}.{slot_name(key)}.adapter_fusion_layer.{fusion.name}."
        for name, tensor in fusion.state_dict().items():
            tensors[prefix + name] = tensor.float().cpu().contiguous()
    if not tensors:
        raise ValueError("there is no fusion in this encoder")
    names = fusion.name.split(",")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_safetensors(directory / FUSION_FILES[0], tensors)
    config = {"adapter_names": names, "config": FUSION_CONFIG, **meta(bert, fusion.name)}
    write_json(directory / FUSION_CONFIG_FILE, config)


def load_fusion(bert, directory):
    """
    Plugs a saved fusion into the encoder and activates it, frozen. The adapters that it names must have been loaded.

    Raises FileNotFoundError without a fusion there, ValueError if it does not fit or is not the paper's kind of fusion.
    """
    directory = fetch(directory, FUSION_CONFIG_FILE, FUSION_FILES)
    path = directory / FUSION_CONFIG_FILE
    values = read_json(path)
    config, names = values.get("config"), values.get("adapter_names") or values.get("name")
    names = names.split(",") if isinstance(names, str) else names  # old files have only the name
    if not isinstance(config, dict) or not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path}: not the configuration of a fusion")
    for field in ("query", "key", "value", "query_before_ln", "residual_before", "temperature"):
        if config.get(field, FUSION_CONFIG[field]) != FUSION_CONFIG[field]:  # static fusion has no value
            raise ValueError(f"{path}: a fusion with {field} = {config[field]!r:.50} is not supported")
    if config.get("dropout_prob") is not None:
        check_dropout(config["dropout_prob"])
    path, tensors = read_tensors(directory, FUSION_FILES, FUSION_TENSOR, values.get("name"))

    before = [(slot, slot.fusion, slot.active) for _, slot in bert.slots()]
    plug_in_fusion(bert, names, config.get("dropout_prob"), bert.dtype)
    try:
        for key, fusion in fusions(bert):
            for part, parameter in fusion.named_parameters():
                fill(parameter, tensors, (slot_name(key), part), path)
        # the reference has weights, which it does not use, also where all adapters are left out
        idle = [slot_name(key) for key, slot in bert.slots() if slot.fusion is None]
        refuse_rest([key for key in tensors if key[0] not in idle], path)
    except ValueError:
        for slot, fusion, active in before:
            slot.fusion, slot.active = fusion, active
        raise
