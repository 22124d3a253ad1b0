"""Which tensors of a model are a run's own, so that a checkpoint and the run's files hold them."""

from torch import nn

from formats.adapterhub import head_tensors, slot_tensors


def parts_of(model):
    """{"adapter NAME" | "fusion" | "head" | "encoder": {name in its file: tensor}} of what a run
    writes in the files of AdapterHub and Hugging Face: each adapter and fusion in which something
    is trained, the head, and Θ if all of it is trained. (The modules are those of `adapter_modules`
    and `active_fusions`, in files above this one.)"""
    bert, found = model.bert, {}
    for name in bert.adapter_configs:
        modules = {k: s.adapters[name] for k, s in bert.slots.items() if name in s.adapters}
        found[f"adapter {name}"] = slot_tensors(modules)
    if isinstance(bert.active, tuple):
        modules = {k: slot.fusion for k, slot in bert.slots.items() if slot.fusion is not None}
        found["fusion"] = slot_tensors(modules)
    found = {part: tensors for part, tensors in found.items() if is_trained(tensors)}
    found["head"] = head_tensors(model.head)
    theta = bert.own_parameters()
    return found | ({"encoder": theta} if all(p.requires_grad for p in theta.values()) else {})


def is_trained(tensors):
    """Whether any of {name: tensor} is trained."""
    return any(tensor.requires_grad for tensor in tensors.values())


def own_names(model, parts):
    """The names, in the model's state, of what a run must keep: what is trained; all in its parts,
    {part: {name in its file: tensor}}; all buffers; and frozen parameters that are not Θ's, where
    something in their module is trained, such as Q and K of examples/mean_fusion.py."""
    state = model.state_dict(keep_vars=True)
    of_theta = {id(p) for p in model.bert.own_parameters().values()}
    in_files = {id(tensor) for tensors in parts.values() for tensor in tensors.values()}
    modules = set()  # those in which something is trained, at any depth
    for name, tensor in state.items():
        if tensor.requires_grad:
            path = name.split(".")
            modules |= {".".join(path[:depth]) for depth in range(len(path))}
    names = set()
    for name, tensor in state.items():
        is_beside = name.rpartition(".")[0] in modules and id(tensor) not in of_theta
        is_buffer = not isinstance(tensor, nn.Parameter)
        if tensor.requires_grad or id(tensor) in in_files or is_beside or is_buffer:
            names.add(name)
    return names


def without_file(model, own, parts):
    """{name: tensor} of what is a run's own, and in none of its parts."""
    in_files = {id(tensor) for tensors in parts.values() for tensor in tensors.values()}
    state = model.state_dict(keep_vars=True)
    return {name: t for name, t in state.items() if name in own and id(t) not in in_files}


def hold_frozen_in(model, own, dtype):
    """Θ, unless some of it is trained, and every frozen Φ are held in `dtype` in place of fp32."""
    theta = model.bert.own_parameters()
    frozen = [] if is_trained(theta) else [*theta.values()]
    frozen += [p for n, p in model.named_parameters() if ".adapters." in n and n not in own]
    for p in frozen:
        p.data = p.data.to(dtype)
