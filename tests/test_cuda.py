"""The same on a GPU as on a CPU: skipped where there is none."""

import pytest
import torch

import child
import train
from conftest import assert_equal, content, main
from fusion import fusion_regularization
from reference import FP32_TOLERANCE, FUSIONS, difference, run, with_fusion
from runtime.record import read_run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture(scope="module")
def command(commands, quiet_encoder):
    """Two epochs on the GPU, without dropout."""
    words = "--device cuda --epochs 2 --batch-size 16 --lr 5e-3"
    return commands(words, 6, model=quiet_encoder)


@pytest.mark.parametrize("directory", FUSIONS)
def test_the_reference_library_s_fusions(directory, expected):
    model, name = directory.split("/")
    tensors = {key: tensor.cuda() for key, tensor in expected[model].items()}
    bert = with_fusion(directory).cuda()
    assert fusion_regularization(bert).device.type == "cuda"
    wanted = tensors[f"{name}.last_hidden_state"]
    assert difference(run(bert, tensors), wanted) <= FP32_TOLERANCE


@pytest.mark.parametrize("stage", train.STAGES)
def test_training_is_that_of_a_cpu(stage, command, tmp_path):
    main(command(stage, tmp_path / "a", "--dtype float32 --device cpu"))
    main(command(stage, tmp_path / "b", "--dtype float32"))
    logs = [[line["loss"] for line in content(tmp_path / out)[0]] for out in ("a", "b")]
    assert logs[0] == pytest.approx(logs[1], abs=1e-4) and len(logs[0]) == 2


def test_an_interrupted_run_ends_as_an_undisturbed_one(command, encoder, at_step, tmp_path):
    """In bf16, which is what a GPU computes in unless told otherwise, and with the dropout of its
    own random numbers."""
    main(command("fusion", tmp_path / "whole", model=encoder))
    at_step(8, child.stop)
    with pytest.raises(KeyboardInterrupt):
        main(command("fusion", tmp_path / "stopped", model=encoder))
    main(command("fusion", tmp_path / "stopped", "--resume", model=encoder))
    assert_equal(tmp_path / "whole", tmp_path / "stopped")
    assert read_run(tmp_path / "whole")["options"]["dtype"] == "bfloat16"
