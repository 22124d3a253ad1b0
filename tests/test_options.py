"""Options: what the environment and earlier runs say in their place, and data in files of one's
own."""

import pytest

import train
from conftest import cli, read_lines
from experiments import evaluate


def test_the_environment_and_earlier_runs_name_the_encoder(
    runs, encoder, quiet_encoder, data_dir, tmp_path, monkeypatch
):
    """A fusion takes the encoder that its adapters' runs recorded, and does not guess."""
    monkeypatch.setenv("ADAPTERFUSION_DATA_DIR", str(data_dir))
    fusion = "--stage fusion --task rte"

    def model(text, out, **options):
        words = f"{text} --epochs 1 --device cpu --limit-train 8"
        return train.main(cli(words, out=tmp_path / out, **options))["model"]

    assert model(fusion, "a", adapters=[runs / "rte", runs / "sst2"]) == str(encoder)
    monkeypatch.setenv("ADAPTERFUSION_MODEL", str(quiet_encoder))
    assert model("--stage adapter --task sst2", "sst2") == str(quiet_encoder)
    monkeypatch.delenv("ADAPTERFUSION_MODEL")
    both = [runs / "rte", f"colours={tmp_path / 'sst2'}"]
    with pytest.raises(ValueError, match="different encoders .*: add --model"):
        model(fusion, "x", adapters=both)
    # --model chooses one of them: here the two have the same weights
    assert model(fusion, "y", adapters=both, model=encoder) == str(encoder)


def test_files_of_your_own(launch, data_dir, tmp_path):
    """CSV, whose columns have changed places, wherever it lies; a run finds its files again."""
    for split in ("train", "validation"):
        rows = read_lines(data_dir / "sst2" / f"{split}.jsonl")
        lines = [f"{i},{row['sentence']},{row['label']}\n" for i, row in enumerate(rows)]
        (tmp_path / f"{split} set.csv").write_text("id,label,text_a\n" + "".join(lines))
    words = "--stage adapter --epochs 2 --lr 5e-3"
    own = cli("--task stars --columns text_a=label label=text_a", out=tmp_path / "run")
    own += cli(train_file=tmp_path / "train set.csv", dev_file=tmp_path / "validation set.csv")
    result = launch(words, *own)
    expected = launch(words, task="sst2", out=tmp_path / "same")
    assert result["accuracy"] == expected["accuracy"] and result["train_examples"] == 96
    again = evaluate.main([str(tmp_path / "run"), "--device", "cpu"])
    assert again["accuracy"] == result["accuracy"]
