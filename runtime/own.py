"""Which tensors of a model are a run's own, so that a checkpoint and the run's files hold them."""


def is_trained(tensors):
    """Whether any of {name: tensor} is trained."""
    return any(tensor.requires_grad for tensor in tensors.values())


def own_names(model, parts):
    """The names of what is trained; of all in a run's parts, {part: {name in its file: tensor}};
    and of the buffers and frozen parameters that stand in a module in which something is trained,
    but for the encoder's parameters."""
    state, theta = model.state_dict(keep_vars=True), model.bert.own_parameters()
    elsewhere = {id(p) for p in theta.values()}
    new = {id(tensor) for tensors in parts.values() for tensor in tensors.values()}
    modules = set()  # those in which something is trained, at any depth
    for name, tensor in state.items():
        if tensor.requires_grad:
            path = name.split(".")
            modules |= {".".join(path[:depth]) for depth in range(len(path))}
    names = set()
    for name, tensor in state.items():
        is_beside = name.rpartition(".")[0] in modules and id(tensor) not in elsewhere
        if tensor.requires_grad or id(tensor) in new or is_beside:
            names.add(name)
    return names


def without_file(model, own, parts):
    """{name: tensor} of what is a run's own, and in none of its parts."""
    in_files = {id(tensor) for tensors in parts.values() for tensor in tensors.values()}
    state = model.state_dict(keep_vars=True)
    return {name: t for name, t in state.items() if name in own and id(t) not in in_files}
