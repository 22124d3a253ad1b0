"""experiments.show: what is in a checkpoint, and what a model will see of a task."""

import child
from conftest import cli
from experiments import show
from reference import EXPECTED, SAFETENSORS, TENSORFLOW


def test_encoder(capsys):
    """Of a TensorFlow checkpoint; the hidden states are those of its safetensors twin."""
    words = ["-m", "experiments.show", "encoder", TENSORFLOW, "the cat ran"]
    code, out, err = child.output(words)
    assert code == 0 and not err
    total = sum(p.numel() for p in EXPECTED.values())
    for text in ("hidden_size=32", "[CLS] the cat ran [SEP]", f"{total:,} parameters from"):
        assert text in out
    assert "bert/encoder/layer_*/attention/self/query/kernel" in out
    show.main(["encoder", str(SAFETENSORS), "the cat ran"])
    assert capsys.readouterr().out.splitlines()[-1] == out.splitlines()[-1]


def test_task(encoder, data_dir, tmp_path, capsys):
    """The multiple-choice task, and a file with names of its own for the columns."""
    rows = "".join(f"a film,{i % 2}\n" for i in range(20))
    (tmp_path / "mine.csv").write_text(f"review,stars\n{rows}")
    show.main(cli("task pick", data_dir=data_dir, model=encoder))
    words = "task mine --columns text_a=review label=stars --dev-fraction 0.1"
    show.main(cli(words, train_file=tmp_path / "mine.csv", model=encoder))
    shown = capsys.readouterr().out
    for text in "train: 96|validation: 40|\n  * [CLS] |train: 18|validation: 2".split("|"):
        assert text in shown
