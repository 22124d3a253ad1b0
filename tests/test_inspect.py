"""python bert.py and python data.py: what is in a checkpoint, and what a model will see of a
task."""

import shutil
import sys

import pytest

import bert as bert_module
import child
import data
from damage import EXPECTED, INDEX, ROOT, SAFETENSORS, TENSORFLOW

# --------------------------------------------------------------------------------------------------
# python bert.py


def command(*arguments):
    return child.output([ROOT / "bert.py", *arguments])


def test_command_line(capsys, monkeypatch):
    code, out, err = command(TENSORFLOW, "the cat ran")
    assert code == 0 and not err
    assert (
        "hidden_size=32" in out
        and "[CLS] the cat ran [SEP]" in out
        and str(TENSORFLOW / INDEX) in out
    )
    total = sum(p.numel() for p in EXPECTED.values())
    assert f"{total:,} parameters" in out
    rows = [
        line.split(maxsplit=2)
        for line in out.splitlines()
        if " from " in line and "parameters" not in line
    ]
    assert len(rows) == 12 and sum(int(row[0].replace(",", "")) for row in rows) == total
    assert "bert/encoder/layer_*/attention/self/query/kernel" in out
    # the hidden states are those of the safetensors twin
    monkeypatch.setattr(sys, "argv", ["bert.py", str(SAFETENSORS), "the cat ran"])
    bert_module.main()
    assert capsys.readouterr().out.splitlines()[-1] == out.splitlines()[-1]


def test_command_line_errors(capsys, monkeypatch, tmp_path):
    code, out, err = command(str(tmp_path))
    assert (code, out) == (2, "bert.py: loading PyTorch\n")
    assert err.startswith("bert.py: no encoder in") and err.count("\n") == 1
    shutil.copytree(SAFETENSORS, tmp_path / "more")
    with open(tmp_path / "more" / "vocab.txt", "a") as file:
        file.write("more\n")
    for arguments in (
        [str(tmp_path / "more")],
        [],
        ["a", "b", "c"],
        [str(tmp_path / "missing")],
        ["a/b/c", "text"],
    ):
        monkeypatch.setattr(sys, "argv", ["bert.py", *arguments])
        with pytest.raises(SystemExit) as e:
            bert_module.main()
        captured = capsys.readouterr()
        assert e.value.code == 2 and captured.out == "" and captured.err.count("\n") == 1


# --------------------------------------------------------------------------------------------------
# python data.py


def test_data_command_line(encoder, data_dir, capsys, monkeypatch):
    monkeypatch.setattr(
        "sys.argv", ["data.py", "pick", "--data-dir", str(data_dir), "--model", str(encoder)]
    )
    data.main()
    shown = capsys.readouterr().out
    assert (
        "train: 96 examples" in shown
        and "validation: 40 examples" in shown
        and "[CLS]" in shown
        and "  * 0: " in shown
    )
    monkeypatch.setattr("sys.argv", ["data.py", "rtee", "--model", str(encoder)])
    with pytest.raises(SystemExit) as exit:
        data.main()
    assert exit.value.code == 2 and capsys.readouterr().err.startswith(
        "data.py: unknown task 'rtee'"
    )


def test_columns_and_a_part_that_is_held_out(encoder, tmp_path, capsys, monkeypatch):
    """What the messages about a file recommend, `data.py` knows, too."""
    (tmp_path / "mine").mkdir()
    lines = ["review,stars", *(f"a film,{i % 2}" for i in range(20))]
    (tmp_path / "mine" / "train.csv").write_text("\n".join(lines))
    words = ["data.py", "mine", "--data-dir", str(tmp_path), "--model", str(encoder)]
    words += ["--columns", "text_a=review", "label=stars", "--dev-fraction", "0.1"]
    monkeypatch.setattr("sys.argv", words)
    data.main()
    shown = capsys.readouterr().out
    assert "train: 18 examples" in shown and "validation: 2 examples" in shown


def test_a_reader_that_has_seen_enough(encoder, data_dir):
    """python data.py rte | head"""
    process = child.Program([data.__file__, "rte", "--data-dir", data_dir, "--model", encoder])
    process.stdout.close()
    assert process.stderr.read() == ""
    process.wait(60)
