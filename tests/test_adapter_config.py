"""--adapter-config; and, with PEER_PYTHON (tests/reference.py), every architecture of the paper's
grid beside the reference library."""

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter import Adapter, AdapterConfig, add_adapter, save_adapter
from bert import Bert, BertConfig
from conftest import IDS, MASK
from experiments.load_run import load_run
from formats.adapterhub import without_effect
from reference import FIELDS, ask_peer, needs_peer, spread

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
pal | size=0 | size must be
pal | num_heads=5 | num_heads
pal --reduction-factor 8 | size=8 | --adapter pal has no 'reduction_factor'
pfeiffer | ln_after | NAME=VALUE, not 'ln_after'
pfeiffer | ln_after=yes | ln_after must be one of True, False, not 'yes'
pfeiffer | non_linearity=tanh | non_linearity must be one of leakyrelu, relu
pfeiffer | init_weights=mam_adapter | init_weights must be one of bert, houlsby, houlsby_code
pfeiffer | leave_out=5 | leave_out must be a list
pfeiffer | leave_out=[2] | leave_out [2] has others than the layers 0 .. 1
pfeiffer | leave_out=[0,1] | leaves no layer
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


def random_weights(generator):
    """{LAYER.LOCATION.PART.BOTTLENECK: tensor} for every adapter of the grid, in float64"""
    weights = {}
    for layer, location, r in itertools.product((0, 1), ("attention", "output"), (32, 8, 4, 1)):
        shapes = {"adapter_up.weight": (64, r), "adapter_up.bias": (64,)}
        for norm in ("adapter_norm_before", "adapter_norm_after"):
            shapes |= {f"{norm}.weight": (64,), f"{norm}.bias": (64,)}
        for down in ("adapter_down.0", "adapter_down.1"):
            shapes |= {f"{down}.weight": (r, 64), f"{down}.bias": (r,)}
        made = [(part, torch.nn.Parameter(torch.empty(shape))) for part, shape in shapes.items()]
        spread(made, generator)
        weights |= {f"{layer}.{location}.{part}.{r}": p.data.double() for part, p in made}
    return weights


@torch.no_grad()
def compute(bert, options, weights, inputs):
    add_adapter(bert, "a", AdapterConfig(**options))
    for (layer, location), slot in bert.slots():
        if "a" in slot.adapters:
            adapter = slot.adapters["a"]
            names = adapter.config.tensor_names(adapter)
            ours = {name: part for part, name in names.items()}  # of a norm that has two, the last
            for name, part in ours.items():
                key = f"{layer}.{location}.{part}.{adapter.down.out_features}"
                adapter.get_parameter(name).copy_(weights[key])
    h = bert(*inputs.values())
    for _, slot in bert.slots():
        slot.adapters.clear()
    return h


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """(our outputs, the reference's, what it refused), by number in GRID, in float64"""
    root, generator = tmp_path_factory.mktemp("grid"), torch.Generator().manual_seed(1)
    config = BertConfig(30, 64, 2, 4, 64, max_position_embeddings=8)
    bert = Bert(config).requires_grad_(False).eval()
    spread(bert.named_parameters(), generator)
    bert.save_pretrained(root / "encoder")
    ids, types = [[5, 6, 7, 8, 9], [10, 11, 12, 0, 0]], [[0, 0, 1, 1, 1], [0, 1, 1, 0, 0]]
    mask = [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    inputs = dict(zip(FIELDS, map(torch.tensor, (ids, types, mask)), strict=True))
    save_file(inputs, root / "inputs.safetensors")
    save_file(weights := random_weights(generator), root / "weights.safetensors")
    add_adapter(bert, "own", AdapterConfig(layer_norms=True))
    save_adapter(bert, "own", root / "own")
    plan = {"encoder": str(root / "encoder"), "configs": GRID, "cannot_read": str(root / "own")}
    (root / "plan.json").write_text(json.dumps(plan))
    ask_peer("peer.py", "grid", root)
    bert = Bert.from_pretrained(root / "encoder").double()
    ours = {
        str(number): compute(bert, options, weights, inputs)
        for number, options in enumerate(GRID)
        if not cannot_be(options)
    }
    refused = json.loads((root / "refused.json").read_text())
    return ours, load_file(root / "grid.safetensors"), refused


@needs_peer
def test_every_architecture_of_the_grid(both):
    ours, theirs, refused = both
    assert len(ours) == len(theirs) == 2880 and len(GRID) == 3456
    for number, options in enumerate(GRID):
        if cannot_be(options):  # there, it finds no residual at all
            assert "UnboundLocalError" in refused[str(number)]
            continue
        a, b = ours[str(number)], theirs[str(number)]
        assert a.dtype == b.dtype == torch.float64 and a.shape == b.shape == (2, 5, 64)
        assert (a - b).abs().max() <= 1e-10 * b.abs().max() and b.abs().max() > 0.1, options
    # without the word for the architecture it would load the rest, and compute something else
    assert refused["own"] == "KeyError: 'layer_norms'"


@needs_peer
def test_the_grid_tells_architectures_apart(both):
    """2,880 outputs, and no two are the same but where a field has no effect, which is what
    `without_effect` says."""
    theirs = {number: h.numpy().round(6).tobytes() for number, h in both[1].items()}
    meaningful = [n for n in theirs if not without_effect(AdapterConfig(**GRID[int(n)]))]
    assert len({theirs[n] for n in meaningful}) == len(meaningful) == len({*theirs.values()})
