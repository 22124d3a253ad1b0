"""experiments.inspect: what is in a checkpoint, and what a model will see of a task."""

import pytest

import child
from conftest import cli
from experiments import inspect
from reference import EXPECTED, SAFETENSORS, TENSORFLOW

COMMAND = "-m", "experiments.inspect"


def test_encoder(capsys):
    code, out, err = child.output([*COMMAND, "encoder", TENSORFLOW, "the cat ran"])
    assert code == 0 and not err
    total = sum(p.numel() for p in EXPECTED.values())
    for text in (
        "hidden_size=32",
        "[CLS] the cat ran [SEP]",
        "ckpt.index",
        f"{total:,} parameters",
    ):
        assert text in out
    lines = [line for line in out.splitlines() if " from " in line and "parameters" not in line]
    assert len(lines) == 12
    assert sum(int(line.split()[0].replace(",", "")) for line in lines) == total
    assert "bert/encoder/layer_*/attention/self/query/kernel" in out
    # the hidden states are those of the safetensors twin
    inspect.main(["encoder", str(SAFETENSORS), "the cat ran"])
    assert capsys.readouterr().out.splitlines()[-1] == out.splitlines()[-1]


def test_a_directory_without_an_encoder(tmp_path):
    code, out, err = child.output([*COMMAND, "encoder", tmp_path])
    assert (code, out) == (2, "")
    assert err.startswith("inspect: no encoder in") and err.count("\n") == 1


def test_task(encoder, data_dir, tmp_path, capsys):
    inspect.main(["task", "pick", *cli(data_dir=data_dir, model=encoder)])
    shown = capsys.readouterr().out
    for text in ("train: 96 examples", "validation: 40 examples", "[CLS]", "  * [CLS] "):
        assert text in shown
    with pytest.raises(ValueError, match="unknown task 'rtee'"):
        inspect.main(["task", "rtee", "--model", str(encoder)])
    # what the messages about a file recommend
    (tmp_path / "mine").mkdir()
    lines = ["review,stars", *(f"a film,{i % 2}" for i in range(20))]
    (tmp_path / "mine" / "train.csv").write_text("\n".join(lines))
    words = "task mine --columns text_a=review label=stars --dev-fraction 0.1"
    inspect.main(cli(words, data_dir=tmp_path, model=encoder))
    shown = capsys.readouterr().out
    assert "train: 18 examples" in shown and "validation: 2 examples" in shown
