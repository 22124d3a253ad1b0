"""--adapter-config; and, with PEER_PYTHON (tests/reference.py), every architecture of the paper's
grid beside the reference library."""

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter import Adapter, AdapterConfig, adapter_modules, add_adapter, save_adapter
from bert import Bert
from conftest import IDS, MASK
from experiments.load_run import load_run
from formats.adapterhub import without_effect
from reference import FIELDS, ask_peer, difference, needs_peer, run, spread
from reference import encoder as encoder_of
from variants.houlsby import HoulsbyRecipeConfig

# --------------------------------------------------------------------------------------------------
# --adapter-config


def test_fields_of_the_preset_are_changed(launch, tmp_path):
    words = "ln_after=true residual_before_ln=post_add leave_out=[1] non_linearity=swish"
    command = "--stage adapter --task rte --epochs 1 --reduction-factor 4 --adapter bapna"
    launch(f"{command} --adapter-config {words} mh_adapter=true", out=tmp_path / "run")
    bert, _, config = load_run(tmp_path / "run")
    changes = {"mh_adapter": True, "ln_after": True, "residual_before_ln": "post_add"}
    changes |= {"non_linearity": "swish", "leave_out": [1]}
    assert config["adapter_config"] == changes
    adapter = bert.layers[0].output_add_norm.adapters["rte"]
    assert adapter.config == AdapterConfig.bapna(**changes, reduction_factor=4)
    assert [key for key, slot in bert.slots() if slot.adapters] == [(0, "attention"), (0, "output")]


WRONG = """
pfeiffer | ln_affter=true | has no 'ln_affter', its fields are mh_adapter
pal | ln_after=true | --adapter pal has no 'ln_after', its fields are size, num_heads, leave_out
pal | num_heads=5 | num_heads must divide
pal --reduction-factor 8 | size=8 | --adapter pal has no 'reduction_factor'
pfeiffer | ln_after | NAME=VALUE, not 'ln_after'
pfeiffer | ln_after=yes | ln_after must be one of True, False, not 'yes'
pfeiffer | non_linearity=tanh | non_linearity must be one of gelu, gelu_new, relu
pfeiffer | leave_out=[2] | leave_out [2] names layers outside 0 .. 1
pfeiffer | leave_out=[0,1] | leave_out excludes all 2 layers
pfeiffer | mh_adapter=false output_adapter=false | no place in the encoder
pfeiffer | residual_before_ln=false original_ln_before=false | original_ln_before=false leaves out
pfeiffer | adapter_residual_before_ln=true | needs the new LayerNorm
"""


@pytest.mark.parametrize("row", WRONG.strip().splitlines())
def test_wrong_changes(launch, tmp_path, row):
    adapter, words, say = row.split(" | ")
    options = f"--stage adapter --task rte --adapter {adapter} --adapter-config {words}"
    with pytest.raises(ValueError) as error:
        launch(options, out=tmp_path / "out")
    assert say in str(error.value) and not list(tmp_path.iterdir())


def z(adapter, h):
    return adapter.up(adapter.act(adapter.down(h)))


def test_the_presets_are_what_their_papers_write():
    """All golden adapters end in BERT's LayerNorm, which bapna has not."""
    torch.manual_seed(0)
    norm, (f, x) = torch.nn.LayerNorm(32), torch.randn(2, 2, 5, 32)
    presets = AdapterConfig.pfeiffer, AdapterConfig.houlsby, AdapterConfig.bapna
    adapters = torch.nn.ModuleList(Adapter(preset(), 32, 4) for preset in presets)
    for p in adapters.parameters():
        torch.nn.init.normal_(p)
    pfeiffer, houlsby, bapna = adapters
    h = norm(f + x)
    for adapter, expected in (
        (pfeiffer, norm(f + z(pfeiffer, h) + x)),
        (houlsby, norm(f + z(houlsby, f) + x)),
        (bapna, h + z(bapna, bapna.norm_before(h))),
    ):
        assert torch.allclose(adapter(f, x, norm), expected, atol=1e-5)


# --------------------------------------------------------------------------------------------------
# The whole grid, by itself and beside the reference

TWICE = list(itertools.product((True, False), repeat=2))  # before, after
CHOICES = {  # fields, and the values that they take together
    "mh_adapter output_adapter": [(False, True), (True, False), (True, True)],
    "original_ln_before original_ln_after": TWICE,
    "ln_before ln_after": TWICE,
    "residual_before_ln": [(True,), (False,), ("post_add",)],
    "adapter_residual_before_ln": [(False,), (True,)],
    "non_linearity": [("relu",), ("leakyrelu",), ("swish",)],
    "reduction_factor": [(2,), (8,), (16,), (64,)],
}
FIELDS_OF_GRID = " ".join(CHOICES).split()
GRID = [
    dict(zip(FIELDS_OF_GRID, itertools.chain(*values), strict=True))
    for values in itertools.product(*CHOICES.values())
]


def cannot_be(options):
    """The one thing that cannot be expressed: f + x is the residual only where it is the input of
    BERT's LayerNorm."""
    return options["residual_before_ln"] == "post_add" and not options["original_ln_before"]


def test_every_architecture_trains_or_is_refused(encoder):
    """With one non-linearity and one bottleneck. In a file, what changes nothing is no error."""
    torch.manual_seed(0)
    bert = Bert.from_pretrained(encoder)
    for options in GRID:
        if (options["non_linearity"], options["reduction_factor"]) != ("swish", 8):
            continue
        if cannot_be(options):
            with pytest.raises(ValueError, match="'post_add' is the input .* which is off"):
                AdapterConfig(**options)
            continue
        add_adapter(bert, "a", AdapterConfig(**options))
        (bert(IDS, None, MASK)[:, 0] @ torch.arange(32.0)).sum().backward()
        for name, p in bert.named_parameters():
            assert not p.requires_grad or p.grad.isfinite().all() and p.grad.any(), (name, options)
        for _, slot in bert.slots():
            slot.adapters.clear()


def random_weights():
    """{LAYER.LOCATION.PART.BOTTLENECK: tensor} for every adapter of the grid, in float64"""
    weights, generator = {}, torch.Generator().manual_seed(1)
    for layer, location, r in itertools.product((0, 1), ("attention", "output"), (16, 4, 2, 1)):
        shapes = {"adapter_up.weight": (32, r), "adapter_up.bias": (32,)}
        for norm in ("adapter_norm_before", "adapter_norm_after"):
            shapes |= {f"{norm}.weight": (32,), f"{norm}.bias": (32,)}
        for down in ("adapter_down.0", "adapter_down.1"):
            shapes |= {f"{down}.weight": (r, 32), f"{down}.bias": (r,)}
        made = [(part, torch.nn.Parameter(torch.empty(shape))) for part, shape in shapes.items()]
        spread(made, generator)
        weights |= {f"{layer}.{location}.{part}.{r}": p.data.double() for part, p in made}
    return weights


@torch.no_grad()
def compute(bert, options, weights, inputs):
    add_adapter(bert, "a", AdapterConfig(**options))
    for (layer, location), _, adapter in adapter_modules(bert, "a")[1]:
        names = adapter.config.tensor_names(adapter)
        ours = {name: part for part, name in names.items()}  # of a norm that has two, the last
        for name, part in ours.items():
            key = f"{layer}.{location}.{part}.{adapter.down.out_features}"
            adapter.get_parameter(name).copy_(weights[key])
    h = run(bert, inputs)
    for _, slot in bert.slots():
        slot.adapters.clear()
    return h


@needs_peer
def test_every_architecture_of_the_grid(expected, tmp_path):
    """In float64. No two of the 2,880 outputs are the same but where a field has no effect, which
    is what `without_effect` says."""
    bert, inputs = encoder_of("bert"), {name: expected["bert"][name] for name in FIELDS}
    save_file(inputs, tmp_path / "inputs.safetensors")
    save_file(weights := random_weights(), tmp_path / "weights.safetensors")
    add_adapter(bert, "own", HoulsbyRecipeConfig())
    save_adapter(bert, "own", tmp_path / "own")
    plan = {"encoder": bert.directory, "configs": GRID, "cannot_read": tmp_path / "own"}
    (tmp_path / "plan.json").write_text(json.dumps(plan, default=str))
    ask_peer("peer.py", "grid", tmp_path)
    theirs = load_file(tmp_path / "grid.safetensors")
    refused = json.loads((tmp_path / "refused.json").read_text())
    # without the word for the architecture it would load the rest, and compute something else
    assert refused["own"] == "KeyError: 'layer_norms'"
    assert len(theirs) == 2880 and len(GRID) == 3456
    bert, meaningful = encoder_of("bert").double(), []
    for number, options in enumerate(GRID):
        if cannot_be(options):  # there, it finds no residual at all
            assert "UnboundLocalError" in refused[str(number)]
            continue
        a, b = compute(bert, options, weights, inputs), theirs[str(number)]
        assert a.dtype == b.dtype == torch.float64
        assert difference(a, b) <= 1e-10 * b.abs().max() and b.abs().max() > 0.1, options
        if not without_effect(AdapterConfig(**options)):
            meaningful.append(b.numpy().round(6).tobytes())
    every = {h.numpy().round(6).tobytes() for h in theirs.values()}
    assert len(meaningful) == len({*meaningful}) == len(every)
