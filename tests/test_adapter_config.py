"""--adapter-config; and, with PEER_PYTHON (tests/reference.py), every architecture of the paper's
grid beside the reference library."""

import itertools
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter import AdapterConfig, Kind, add_adapter, save_adapter
from bert import Bert, BertConfig
from conftest import IDS, MASK
from experiments.load_run import load_run
from formats.adapterhub import without_effect
from reference import PEER, needs_peer, spread

# --------------------------------------------------------------------------------------------------
# --adapter-config


def test_fields_of_the_preset_are_changed(launch, tmp_path):
    words = "ln_after=true residual_before_ln=post_add leave_out=[1] non_linearity=swish"
    command = "--stage adapter --task rte --epochs 1 --reduction-factor 4 --adapter bapna"
    launch(f"{command} --adapter-config {words} mh_adapter=true", out=tmp_path / "run")
    bert, _, config = load_run(tmp_path / "run")
    changes = {
        "mh_adapter": True,
        "ln_after": True,
        "residual_before_ln": "post_add",
        "non_linearity": "swish",
        "leave_out": [1],
    }
    assert config["adapter_config"] == changes
    adapter = bert.layers[0].output_add_norm.adapters["rte"]
    assert adapter.config == AdapterConfig.bapna(**changes, reduction_factor=4)
    assert [key for key, slot in bert.slots() if slot.adapters] == [(0, "attention"), (0, "output")]


WRONG = """
pfeiffer | ln_affter=true | has no 'ln_affter', its fields are mh_adapter
pal | ln_after=true | --adapter pal has no 'ln_after', its fields are size, num_heads, leave_out
pfeiffer | ln_after | NAME=VALUE, not 'ln_after'
pfeiffer | ln_after=yes | ln_after must be true or false, not 'yes'
pfeiffer | ln_after=1 | ln_after must be true or false, not 1
pfeiffer | non_linearity=tanh | non_linearity must be one of leakyrelu, relu
pfeiffer | non_linearity=["relu"] | not ['relu']
pfeiffer | init_weights=mam_adapter | init_weights must be one of bert, houlsby, houlsby_code
pfeiffer | layer_norms=all | layer_norms must be true or false
pfeiffer | leave_out=5 | leave_out must be a list
pfeiffer | leave_out=[2] | leave_out [2] has others than the layers 0 .. 1
pfeiffer | leave_out=[0,1] | leaves no layer
pfeiffer | mh_adapter=false output_adapter=false | no place in the encoder
pfeiffer | residual_before_ln=post_add original_ln_before=false | 'post_add' is the input
pfeiffer | residual_before_ln=false original_ln_before=false | original_ln_before=false leaves out
pfeiffer | adapter_residual_before_ln=true | needs the new LayerNorm
"""


@pytest.mark.parametrize("row", WRONG.strip().splitlines())
def test_wrong_changes(fails, row):
    adapter, words, say = row.split(" | ")
    fails(f"--adapter {adapter} --adapter-config {words}", say=say)


def test_a_size_of_an_adapter_without_one(fails):
    fails("--adapter pal --reduction-factor 8", say="--adapter pal has no 'reduction_factor'")


def test_files_may_have_what_changes_nothing():
    config = AdapterConfig(
        original_ln_before=False, residual_before_ln=False, adapter_residual_before_ln=True
    )
    assert set(without_effect(config)) == {"residual_before_ln", "adapter_residual_before_ln"}
    inside = {"ln_after": True, "adapter_residual_before_ln": True}
    assert not without_effect(AdapterConfig(residual_before_ln=False, **inside))


@dataclass(frozen=True)
class ReadsInput(Kind):
    """A fork's configuration with one of the fields of AdapterConfig, and not its neighbours."""

    original_ln_before: bool = False


def test_fields_of_other_kinds_have_other_neighbours():
    assert without_effect(ReadsInput()) == {}


# --------------------------------------------------------------------------------------------------
# The whole grid, by itself and beside the reference

POSITIONS = {"top": (False, True), "bottom": (True, False), "both": (True, True)}
TWICE = list(itertools.product((True, False), repeat=2))  # before, after
GRID = [
    {
        "mh_adapter": bottom,
        "output_adapter": top,
        "original_ln_before": own_before,
        "original_ln_after": own_after,
        "ln_before": before,
        "ln_after": after,
        "residual_before_ln": residual,
        "adapter_residual_before_ln": inside,
        "non_linearity": act,
        "reduction_factor": factor,
    }
    for (bottom, top), (own_before, own_after), (
        before,
        after,
    ), residual, inside, act, factor in itertools.product(
        POSITIONS.values(),
        TWICE,
        TWICE,
        (True, False, "post_add"),
        (False, True),
        ("relu", "leakyrelu", "swish"),
        (2, 8, 16, 64),
    )
]


def test_every_architecture_trains_or_is_refused(encoder):
    """All but the sizes: one example of each non-linearity's and bottleneck's is enough for the
    others."""
    torch.manual_seed(0)
    bert, refused = Bert.from_pretrained(encoder), 0
    for options in GRID:
        if (options["non_linearity"], options["reduction_factor"]) != ("swish", 8):
            continue
        try:
            add_adapter(bert, "a", AdapterConfig(**options))
        except ValueError as e:
            refused += 1
            assert (
                "which is off" in str(e)
                and options["residual_before_ln"] == "post_add"
                and not options["original_ln_before"]
            )
            continue
        (bert(IDS, None, MASK)[:, 0] @ torch.arange(32.0)).sum().backward()
        for name, p in bert.named_parameters():
            assert not p.requires_grad or p.grad.isfinite().all() and p.grad.any(), (name, options)
        for _, slot in bert.slots():
            slot.adapters.clear()
    assert refused == 3 * 2 * 4 * 2


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """(our outputs, the reference's, what it refused), by number in GRID, in float64"""
    root, generator = tmp_path_factory.mktemp("grid"), torch.Generator().manual_seed(1)
    config = BertConfig(30, 64, 2, 4, 64, max_position_embeddings=8)
    bert = Bert(config).requires_grad_(False).eval()
    spread(bert.named_parameters(), generator)
    bert.save_pretrained(root / "encoder")
    inputs = {
        "input_ids": [[5, 6, 7, 8, 9], [10, 11, 12, 0, 0]],
        "token_type_ids": [[0, 0, 1, 1, 1], [0, 1, 1, 0, 0]],
        "attention_mask": [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]],
    }
    inputs = {name: torch.tensor(rows) for name, rows in inputs.items()}
    save_file(inputs, root / "inputs.safetensors")
    weights = {}
    for (layer, location), r in itertools.product(
        itertools.product(range(2), ("attention", "output")), (32, 8, 4, 1)
    ):
        shapes = {
            "adapter_up.weight": (64, r),
            "adapter_up.bias": (64,),
            "adapter_norm_before.weight": (64,),
            "adapter_norm_before.bias": (64,),
            "adapter_norm_after.weight": (64,),
            "adapter_norm_after.bias": (64,),
            **{
                f"adapter_down.{i}.{kind}": shape
                for i in (0, 1)
                for kind, shape in (("weight", (r, 64)), ("bias", (r,)))
            },
        }
        made = [(part, torch.nn.Parameter(torch.empty(shape))) for part, shape in shapes.items()]
        spread(made, generator)
        weights |= {f"{layer}.{location}.{part}.{r}": p.data.double() for part, p in made}
    save_file(weights, root / "weights.safetensors")
    add_adapter(bert, "own", AdapterConfig(layer_norms=True))
    save_adapter(bert, "own", root / "own")
    plan = {"encoder": str(root / "encoder"), "configs": GRID, "cannot_read": str(root / "own")}
    (root / "plan.json").write_text(json.dumps(plan))
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    environment.pop("PYTHONPATH", None)
    peer = subprocess.Popen(
        [PEER, Path(__file__).with_name("peer.py"), "grid", root],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    ours, bert = {}, Bert.from_pretrained(root / "encoder").double()
    with torch.no_grad():
        for number, options in enumerate(GRID):
            try:
                add_adapter(bert, "a", AdapterConfig(**options))
            except ValueError as e:
                ours[number] = str(e)
                continue
            for (layer, location), slot in bert.slots():
                if "a" in slot.adapters:
                    adapter = slot.adapters["a"]
                    names = adapter.config.tensor_names(adapter)  # of a norm that has two, the last
                    for name, theirs in {ours: theirs for theirs, ours in names.items()}.items():
                        adapter.get_parameter(name).copy_(
                            weights[f"{layer}.{location}.{theirs}.{adapter.down.out_features}"]
                        )
            ours[number] = bert(*inputs.values())
            for _, slot in bert.slots():
                slot.adapters.pop("a") if "a" in slot.adapters else None
    output, _ = peer.communicate(timeout=300)
    assert peer.returncode == 0, output[-3000:]
    theirs, refused = (
        load_file(root / "grid.safetensors"),
        json.loads((root / "refused-grid.json").read_text()),
    )
    return (
        ours,
        {int(number): h for number, h in theirs.items()},
        {int(n) if n.isdigit() else n: refused[n] for n in refused},
    )


def fits(options, position, own, new):
    return (
        (options["mh_adapter"], options["output_adapter"]) == POSITIONS[position]
        and (options["original_ln_before"], options["original_ln_after"]) == own
        and (options["ln_before"], options["ln_after"]) == new
    )


@needs_peer
@pytest.mark.parametrize(
    "new",
    TWICE,
    ids=lambda new: f"new-{'-'.join(itertools.compress(('before', 'after'), new)) or 'none'}",
)
@pytest.mark.parametrize(
    "own",
    TWICE,
    ids=lambda own: f"own-{'-'.join(itertools.compress(('before', 'after'), own)) or 'none'}",
)
@pytest.mark.parametrize("position", POSITIONS)
def test_every_architecture_of_the_grid(both, position, own, new):
    ours, theirs, refused = both
    numbers = [number for number, options in enumerate(GRID) if fits(options, position, own, new)]
    assert len(numbers) == 3 * 2 * 3 * 4
    compared = 0
    for number in numbers:
        if (
            GRID[number]["residual_before_ln"] == "post_add" and not own[0]
        ):  # the one thing that cannot be expressed:
            # f + x is the residual only where it is the input of BERT's LayerNorm. The reference
            # finds no residual at all
            assert "UnboundLocalError" in refused[number] and "'residual'" in refused[number]
            assert (
                "residual_before_ln 'post_add' is the input of original_ln_before, which is off"
                in ours[number]
            )
            continue
        a, b = ours[number], theirs[number]
        assert a.dtype == b.dtype == torch.float64 and a.shape == b.shape == (2, 5, 64)
        assert (a - b).abs().max() <= 1e-10 * b.abs().max() and b.abs().max() > 0.1, GRID[number]
        compared += 1
    assert compared == (72 if own[0] else 48)


@needs_peer
def test_the_reference_does_not_read_own_layer_norms(both):
    """It would know nothing of them: without the word for the architecture it would load the rest,
    and compute something else."""
    assert both[2]["own"] == "KeyError: 'layer_norms'"


@needs_peer
def test_the_grid_tells_architectures_apart(both):
    """2,880 outputs, and no two are the same but where a field has no effect, which is what
    `without_effect` says."""
    ours, theirs, refused = both
    assert (
        len(theirs) == 2880
        and len([number for number in refused if number != "own"]) == 3456 - 2880
    )
    meaningful = [number for number in theirs if not without_effect(AdapterConfig(**GRID[number]))]
    assert len({theirs[number].numpy().round(6).tobytes() for number in meaningful}) == len(
        meaningful
    )
    assert len({theirs[number].numpy().round(6).tobytes() for number in theirs}) == len(meaningful)


def test_bapna_is_bapna_and_firat_s_formula(encoder):
    """h + U·relu(D·LN_new(h) + b_D) + b_U, h the layer's output, and nothing after it."""
    torch.manual_seed(0)
    bert = Bert.from_pretrained(encoder)
    add_adapter(bert, "a", AdapterConfig.bapna(reduction_factor=4))
    slot = bert.layers[0].output_add_norm
    for p in slot.adapters["a"].parameters():
        torch.nn.init.normal_(p, std=0.5)
    f, x = torch.randn(2, 3, 5, 32)
    W = dict(slot.adapters["a"].named_parameters())
    with torch.no_grad():
        h = torch.nn.functional.layer_norm(
            f + x, (32,), slot.norm.weight, slot.norm.bias, slot.norm.eps
        )
        mean, variance = h.mean(-1, keepdim=True), h.var(-1, unbiased=False, keepdim=True)
        normed = (h - mean) / (variance + 1e-5).sqrt() * W["norm_before.weight"] + W[
            "norm_before.bias"
        ]
        a = (normed @ W["down.weight"].T + W["down.bias"]).clamp(min=0)
        expected = h + a @ W["up.weight"].T + W["up.bias"]
        assert (slot(f, x) - expected).abs().max() < 1e-5
