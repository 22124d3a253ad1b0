"""The same on a GPU as on a CPU: skipped where there is none."""

import json

import pytest
import torch

import child
import train
from adapter import activate, load_adapter
from conftest import assert_equal, cli, content, main, of_stage
from fusion import fusion_regularization
from reference import (
    ADAPTERS,
    FP32_TOLERANCE,
    FUSIONS,
    GOLDEN,
    difference,
    encoder,
    run,
    with_fusion,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture(scope="module")
def command(quiet_encoder, data_dir, runs):
    """command("fusion", out, ...): two epochs on the GPU, without dropout."""

    def command(stage, out, text="", **options):
        places = {"model": quiet_encoder, "data_dir": data_dir, "out": out, **options}
        size = "--device cuda --epochs 2 --batch-size 16 --lr 5e-3"
        return [*of_stage(stage, runs, 6), *cli(f"{size} {text}", **places)]

    return command


@pytest.mark.parametrize("directory", [*ADAPTERS, *FUSIONS])
def test_the_reference_library_s_adapters_and_fusions(directory, expected):
    model, name = directory.split("/")
    tensors = {key: tensor.cuda() for key, tensor in expected[model].items()}
    wanted = tensors[f"{name}.last_hidden_state"]
    if directory in FUSIONS:
        bert = with_fusion(directory).cuda()
        assert fusion_regularization(bert).device.type == "cuda"
    else:
        bert = encoder(model).cuda()
        activate(bert, load_adapter(bert, GOLDEN / directory))
    assert difference(run(bert, tensors), wanted) <= FP32_TOLERANCE


@pytest.mark.parametrize("stage", train.STAGES)
def test_training_is_that_of_a_cpu(stage, command, tmp_path):
    main(command(stage, tmp_path / "a", "--dtype float32 --device cpu"))
    main(command(stage, tmp_path / "b", "--dtype float32"))
    logs = [[line["loss"] for line in content(tmp_path / out)[0]] for out in ("a", "b")]
    assert logs[0] == pytest.approx(logs[1], abs=1e-4) and len(logs[0]) == 2


@pytest.mark.parametrize("stage", train.STAGES)
def test_an_interrupted_run_ends_as_an_undisturbed_one(stage, command, encoder, at_step, tmp_path):
    """In bf16, which is what a GPU computes in unless told otherwise, and with dropout."""
    main(command(stage, tmp_path / "whole", model=encoder))
    at_step(8, child.stop)
    with pytest.raises(KeyboardInterrupt):
        main(command(stage, tmp_path / "stopped", model=encoder))
    main(command(stage, tmp_path / "stopped", "--resume", model=encoder))
    assert_equal(tmp_path / "whole", tmp_path / "stopped")
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["dtype"] == "bfloat16"
