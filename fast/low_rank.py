"""The two equations of AdapterFusion at a fraction of their cost. Nothing here is in the paper.

`Fusion.textbook` (fusion.py) says what a fusion computes. `low_rank` computes the same for
bottleneck adapters, and `choose_form` sees, for each new fusion, whether it really does."""

import contextlib
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import nn

from formats.files import note


def low_rank(fusion, h, adapters, form, many_tokens=None):
    """h [B, T, d] -> o [B, T, d], without ever forming the d numbers of a z_n, which is
    U_n a_n + b_n with an a_n of only r numbers. For each token that takes about 3·d² + 3·N·r·d
    multiply-adds in place of (2·N + 1)·d² + 2·N·r·d. Three matrices hold all adapters side by side,
    see docs/figures/low_rank.svg. R = Σ r_n + N counts the columns of every U_n, and every b_n.

        a           [B, T, R]  a_1 … a_N of each token, then a 1 for each b_n
        U           [d, R]     U_1 … U_N, then b_1 … b_N
        membership  [R, N]     1 where that column of U belongs to adapter n

    So z_n is U (a ⊙ column n of membership), and with q = Q h + b_Q

        q·(K z_n + b_K)  =  ((Uᵀ Kᵀ q) ⊙ a)·(column n of membership) + q·b_K
        Σ_n s_n V z_n    =  V U (a ⊙ (membership s))

    q·b_K is the same for every n. The softmax ignores that, but the dropout before it does not.

    form         "joint": one product for all D_n, one activation; "apart": each its `bottleneck`
    many_tokens  whether K U and V U are formed first; default if there are more tokens than R"""
    if form == "joint":
        downs = [adapter.down for adapter in adapters]
        D, b_D = torch.cat([D_n.weight for D_n in downs]), torch.cat([D_n.bias for D_n in downs])
        a = adapters[0].act(F.linear(h, D, b_D))  # [B, T, R - N]
    else:
        a = torch.cat([adapter.bottleneck(h) for adapter in adapters], -1)  # [B, T, R - N]
    a = F.pad(a, (0, len(adapters)), value=1.0)  # [B, T, R]
    ups = [adapter.up for adapter in adapters]
    U = torch.cat([up.weight for up in ups] + [up.bias[:, None] for up in ups], 1).to(a.dtype)
    # a product with membership sums over an adapter's columns, one with its transpose repeats s_n
    identity = torch.eye(len(ups), dtype=a.dtype, device=a.device)  # [N, N]
    owners = [identity[n].expand(up.in_features, -1) for n, up in enumerate(ups)]  # [r_n, N] each
    membership = torch.cat([*owners, identity])  # [R, N]
    K, V, b_K = fusion.key.weight, fusion.value.weight, fusion.key.bias  # [d, d], [d, d], [d]
    if many_tokens is None:
        many_tokens = h.shape[0] * h.shape[1] > U.shape[1]
    q = fusion.query(h)  # Q h + b_Q: [B, T, d]
    q_K_U = q @ (K @ U) if many_tokens else q @ K @ U  # [B, T, R]
    q_k = (q_K_U * a) @ membership + (q @ b_K)[..., None]  # q·(K z_n + b_K): [B, T, N]
    s = fusion.softmax(q_k)  # [B, T, N]
    s_a = (s.to(a.dtype) @ membership.T) * a  # every a_n times its s_n: [B, T, R]
    return s_a @ (V @ U).T if many_tokens else s_a @ U.T @ V.T  # Σ_n s_n V z_n: [B, T, d]


def choose_form(fusion, adapters, norm, paper_fusion, known_adapters):
    """How `low_rank` computes what `fusion.textbook` does: "joint" or "apart", or None if it does
    not, which is noted unless the class has formulas of its own.

    fusion           a new one, over `adapters`, {name: module}, beside the LayerNorm `norm`
    paper_fusion     the class whose `textbook` `low_rank` follows
    known_adapters   AdapterHub's kinds of adapters, of which the first is the base of the others

    Raises ValueError for an adapter that is not in a fusion what it is alone, and for one that
    reads or adds something else than the last one, which decides for all of them. If both are
    AdapterHub's kinds, that is noted alone, since its library fuses them, too."""
    if norm.weight.device.type == "meta":  # tensors without numbers: there is nothing to compare
        return None
    norm, copy, *copies = copy_to_cpu(nn.ModuleList([norm, fusion, *adapters.values()]))
    check_adapters(dict(zip(adapters, copies, strict=True)), norm, known_adapters)
    # `low_rank` calls neither of these, so it cannot follow others
    z, textbook = known_adapters[0].z, paper_fusion.textbook
    are_known = [getattr(type(a), "z", None) is z and type(a.up) is nn.Linear for a in copies]
    if type(fusion).textbook is not textbook or not all(are_known):
        return None
    if (form := compare_forms(nn.ModuleList([copy, *copies]))) is None:
        note("`low_rank` does not compute what `textbook` does, which is used and is slower")
    return form


@torch.no_grad()
def check_adapters(adapters, norm, known_adapters):
    """Raises, or notes, what `choose_form` says, by values in fp32 on random f and x, to a relative
    1e-4. `norm_after` is no difference: a fusion leaves it out, as adapters 1.3 does."""
    random, shape = torch.Generator().manual_seed(0), (2, 3, len(norm.weight))
    f, x = (torch.randn(shape, generator=random, dtype=torch.float32) for _ in range(2))
    around_z = {}  # {name: input, residual, and an output that shows how the adapter ends}
    for name, adapter in adapters.items():
        h, residual = adapter.eval().h_and_residual(f, x, norm)
        around_z[name] = torch.stack([h, residual, adapter.close(h + residual, x, norm)])
        if isinstance(adapter, known_adapters[0]) and getattr(adapter, "norm_after", None) is None:
            in_fusion = adapter.close(adapter.z(h) + residual, x, norm)
            if not is_near(in_fusion, adapter(f, x, norm)):
                fused = "close(z(h) + residual, x, norm), with h and residual from `h_and_residual`"
                raise ValueError(f"adapter {name!r}: its `forward` must be {fused}, as in a fusion")
    last = [*adapters][-1]
    for name, adapter in adapters.items():
        if not is_near(around_z[last], around_z[name]):
            problem = f"adapters {name!r} and {last!r} have another input, residual, or end"
            if not {type(adapter), type(adapters[last])} <= {*known_adapters}:
                raise ValueError(f"{problem}, so a fusion cannot mix them")
            note(f"{problem}: in their fusion both have those of the last one, as in adapters 1.3")


@torch.no_grad()
def compare_forms(modules):
    """The form of `low_rank` that gives what `textbook` gives, "joint" or else "apart", or None.
    Both are computed for random h [B, T, d], at weights close to these (what agrees there does so
    later, trained or loaded), in training and evaluation, and must draw equally many random
    numbers. modules: the fusion and then its adapters, from `copy_to_cpu`, which are changed"""
    random = torch.Generator().manual_seed(0)  # so that a run decides the same when it is loaded
    for tensor in [*modules.parameters(), *modules.buffers()]:
        if tensor.is_floating_point():  # a new one may start at a value that has no effect
            tensor += 0.01 * torch.randn(tensor.shape, generator=random, dtype=tensor.dtype)
    weights = {id(p): p for p in modules.parameters()}
    h = torch.randn(2, 8, modules[-1].up.out_features, generator=random, dtype=torch.float32)

    def results(compute, *form):
        """[o, where the generator then stands] in training, and then in evaluation"""
        found = []
        for is_training in (True, False):  # each with buffers of its own, which may change
            fusion, *adapters = deepcopy(modules, {**weights}).train(is_training)
            torch.default_generator.manual_seed(0)
            found += [compute(fusion, h, adapters, *form), torch.get_rng_state().float()]
        return found

    with torch.random.fork_rng(devices=[]):  # training draws what it would without this
        for form in ("joint", "apart"):
            if form == "joint" and len({adapter.act for adapter in modules[1:]}) > 1:
                continue
            with contextlib.suppress(Exception):  # an edit that this form does not know
                right = 2 * results(type(modules[0]).textbook)
                found = results(low_rank, form, True) + results(low_rank, form, False)
                if all(map(is_near, right, found)):
                    return form


def is_near(right, found):
    """To a relative 1e-4 of the largest number. NaN is near nothing."""
    return bool((found - right).abs().max() <= 1e-4 * right.abs().max())


def copy_to_cpu(modules):
    """A copy in fp32 of all that they reach: `Module.float` misses what is shared by a tuple."""
    reached = {}  # {id of an original: its copy}
    copies = deepcopy(modules, reached)
    for x in reached.values():
        if isinstance(x, torch.Tensor):
            x.data = x.data.to("cpu", torch.float32 if x.is_floating_point() else x.dtype)
    return copies
