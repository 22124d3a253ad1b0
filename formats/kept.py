"""Which tensors of a model a run keeps, in its checkpoint and in its files."""

from formats.adapterhub import head_tensors, slot_tensors


def files_of(model, given):
    """{"adapter NAME" | "fusion" | "head" | "encoder": {name in its file: tensor}} of what a run
    writes in the files of AdapterHub and Hugging Face: each adapter but those of --adapters, whose
    names are `given`, in which nothing is trained; the fusion; the head; Θ if all is trained."""
    bert, found = model.bert, {}
    for name in bert.adapter_configs:
        modules = {k: s.adapters[name] for k, s in bert.slots.items() if name in s.adapters}
        tensors = slot_tensors(modules)
        if name not in given or any(tensor.requires_grad for tensor in tensors.values()):
            found[f"adapter {name}"] = tensors
    if isinstance(bert.active, tuple):
        modules = {k: slot.fusion for k, slot in bert.slots.items() if slot.fusion is not None}
        found["fusion"] = slot_tensors(modules)
    found["head"] = head_tensors(model.head)
    if all(p.requires_grad for p in bert.theta().values()):
        found["encoder"] = bert.theta()
    return found


def kept_names(model, given):
    """The names, in the model's state, of what a run must keep: all but the frozen parameters of Θ
    and of the adapters in `given`, the names of --adapters, which are in files already."""
    frozen = {*model.bert.theta().values()}
    for slot in model.bert.slots.values():
        for name in {*given} & {*slot.adapters}:
            frozen |= {*slot.adapters[name].parameters()}
    state = model.state_dict(keep_vars=True)
    return {name for name, tensor in state.items() if tensor.requires_grad or tensor not in frozen}


def without_file(model, kept, files):
    """{name: tensor} of what a run keeps and none of the files that `files_of` names has."""
    in_files = {id(tensor) for tensors in files.values() for tensor in tensors.values()}
    state = model.state_dict(keep_vars=True)
    return {name: t for name, t in state.items() if name in kept and id(t) not in in_files}


def hold_frozen_in(model, kept, dtype):
    """Holds Θ, unless some of it is trained, and every frozen Φ that is not `kept`, in `dtype`."""
    theta = [*model.bert.theta().values()]
    frozen = [p for n, p in model.named_parameters() if ".adapters." in n and n not in kept]
    if not any(p.requires_grad for p in theta):
        frozen += theta
    for p in frozen:
        p.data = p.data.to(dtype)
