"""Ψ: AdapterFusion, the attention over N adapters that is trained in stage 2 (section 3).

    add_fusion(bert, ["mnli", "qqp", "rte"])      # over adapters that are already there; new, trainable, active
    loss = loss + fusion_regularization(bert)     # keeps V close to the identity
    fusion_weights(bert)                          # who spoke: {(layer, location): [B, T, N]}
    save_fusion(bert, "runs/fusion-rte"); load_fusion(bert, "runs/fusion-rte")
"""

import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from adapter import SLOT, activate, check_dropout, fetch, fill, meta, read_tensors, refuse_rest, slot_name
from bert import read_json, write_json, write_safetensors


class Fusion(nn.Module):
    """
    AdapterFusion in one slot (section 3.2, Figure 2). For every token, with h the query and z_n adapter n's output:

        s = softmax_n( (Q h + b_Q) · (K z_n + b_K) )        o = Σ_n s_n V z_n

    `textbook` computes this as written: 2·N·d² multiply-adds per token, and N·d activations. `forward` computes the same
    function in about 3·d² + 3·N·r·d, because z_n = U_n a_n + b_n has only r = d/16 dimensions:

        (Q h + b_Q)·(K z_n + b_K)  =  t·z_n + q·b_K         q = Q h + b_Q,  t = Kᵀ q:  K is applied once, to the query
        t·z_n                      =  (U_nᵀ t)·a_n + t·b_n                             z_n is never formed
        Σ s_n V z_n                =  V (U (s ⊙ a) + s b)                              V is applied once, to the mixture

    where all D_n are one product, and all U_n another. q·b_K is the same for every n, so the softmax does not see it;
    dropout on the raw scores does (the reference drops scores before the softmax), so it stays.
    """

    def __init__(self, name, adapter_names, hidden_size, dropout):
        super().__init__()
        self.name = name  # all fused adapters, joined by commas
        self.adapter_names = adapter_names  # those of them that sit in this slot
        self.query = nn.Linear(hidden_size, hidden_size)  # Q
        self.key = nn.Linear(hidden_size, hidden_size)  # K
        self.value = nn.Linear(hidden_size, hidden_size, bias=False)  # V
        self.dropout = nn.Dropout(dropout)
        self.weights = None  # s of the last forward [B, T, N]
        for linear in (self.query, self.key):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
        # section 4.1: ones on the diagonal, small values elsewhere; o starts as the weighted mean of the z_n
        with torch.no_grad():
            self.value.weight.fill_(1e-6).fill_diagonal_(1.0)

    def forward(self, f, x, norm, adapters):
        """f: sub-layer output, x: its input [B, T, d], norm: BERT's own LayerNorm, adapters: N modules -> [B, T, d]"""
        last = adapters[-1]  # the reference: the last adapter's config says what all of them read, and the residual
        h, residual = last.enter(f, x, norm)
        return last.leave(self.mix(h, adapters) + residual, x, norm)

    def mix(self, h, adapters):
        """o of the class docstring: h [B, T, d] -> [B, T, d]. R is the sum of the bottleneck sizes r_n."""
        sizes = [adapter.down.out_features for adapter in adapters]
        if any(adapter.norm_before for adapter in adapters):  # each adapter has an input of its own
            down = [adapter.down(adapter.norm_before(h) if adapter.norm_before else h) for adapter in adapters]
        else:
            D = torch.cat([adapter.down.weight for adapter in adapters])  # [R, d]
            down = F.linear(h, D, torch.cat([adapter.down.bias for adapter in adapters])).split(sizes, -1)
        a = torch.cat([adapter.act(part) for adapter, part in zip(adapters, down, strict=True)], -1)  # [B, T, R]
        U = torch.cat([adapter.up.weight for adapter in adapters], 1)  # [d, R]
        b = torch.stack([adapter.up.bias for adapter in adapters])  # [N, d]
        # member[i, n] = 1 where dimension i of a belongs to adapter n: sums within, and spreads over, an adapter
        member = torch.block_diag(*(a.new_ones(size, 1) for size in sizes))  # [R, N]

        q = self.query(h)  # [B, T, d]
        t = F.linear(q, self.key.weight.T)  # Kᵀ q [B, T, d]
        scores = (F.linear(t, U.T) * a) @ member + F.linear(t, b)  # t·z_n [B, T, N]
        scores = scores + F.linear(q, self.key.bias[None])  # + q·b_K [B, T, 1]
        s = self.dropout(scores).softmax(-1)  # [B, T, N]
        self.weights = s.detach()
        s = s.to(a.dtype)
        mixture = F.linear(F.linear(s, member) * a, U) + F.linear(s, b.T)  # Σ s_n z_n [B, T, d]
        return self.value(mixture)

    def textbook(self, h, adapters):
        """The same function as `mix`, with the paper's equations taken literally."""
        norms = [adapter.norm_before or nn.Identity() for adapter in adapters]
        z = [adapter.up(adapter.act(adapter.down(norm(h)))) for adapter, norm in zip(adapters, norms, strict=True)]
        z = torch.stack(z, 2)  # [B, T, N, d]
        scores = torch.einsum("btd,btnd->btn", self.query(h), self.key(z))
        s = self.dropout(scores).softmax(-1)  # [B, T, N]
        return torch.einsum("btn,btnd->btd", s, self.value(z))


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


def fusions(bert):
    """((layer, location), Fusion) for every slot that has one."""
    return [(key, slot.fusion) for key, slot in bert.slots() if slot.fusion is not None]


def fusion_regularization(bert):
    """0.01 · Σ_layers ‖V − I‖²_F, a scalar tensor to add to the loss (section 4.1: "l2-norm" on V; the reference's form).
    0 without a fusion."""
    total = torch.zeros((), device=bert.device)
    for _, fusion in fusions(bert):
        V = fusion.value.weight
        total = total + 0.01 * (V - torch.eye(len(V), device=V.device, dtype=V.dtype)).pow(2).sum()
    return total


def fusion_weights(bert):
    """s of the last forward: {(layer, "output" | "attention"): [B, T, N]}, padding included; N in the order of the
    fusion's name, 0 for an adapter that is left out of that layer. Raises ValueError before the first forward."""
    result = {}
    for key, fusion in fusions(bert):
        if fusion.weights is None:
            raise ValueError("there are no fusion weights yet: run a batch through the encoder first")
        result[key] = fusion.weights.new_zeros(*fusion.weights.shape[:-1], len(fusion.name.split(",")))
        result[key][..., [fusion.name.split(",").index(name) for name in fusion.adapter_names]] = fusion.weights
    if not result:
        raise ValueError("there is no fusion in this encoder")
    return result


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
