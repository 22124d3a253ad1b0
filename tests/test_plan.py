"""experiments/plan.py: a plan needs the encoder's configuration, and times what train.py trains;
and the share of a machine that each of several jobs gets."""

import os
import shutil

import pytest
import torch

from bert import BertConfig
from experiments import architecture_search, grid, plan, table1

BERT_BASE = "google-bert/bert-base-uncased"


@pytest.fixture
def print_plan(data_dir, tmp_path, capsys):
    """print_plan(main, model, ...) -> the lines of a plan for rte"""

    def print_plan(main, model, *words):
        options = ["--model", model, "--data-dir", data_dir, "--tasks", "rte", "--seeds", "0"]
        options += ["--out", tmp_path / "out", "--plan", *words, "--", "--device", "cpu"]
        assert main([str(word) for word in options]) == 0, capsys.readouterr().err
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().out.splitlines()

    return print_plan


def hours_of(lines):
    """{name of a run: hours}"""
    rows = [line.split() for line in lines if " × " in line and "hours" not in line]
    return {row[0]: float(row[-1]) for row in rows}


@pytest.mark.parametrize("file", ["config.json", "bert_config.json"])
def test_a_configuration_is_enough(print_plan, encoder, tmp_path, file):
    (tmp_path / "model").mkdir()
    shutil.copy(encoder / "config.json", tmp_path / "model" / file)
    for main, runs, options in (
        (table1.main, {"head-rte-0", "st_a_16-rte-0"}, ["--systems", "head", "st_a_16"]),
        (architecture_search.main, {"rte-full-0"}, ["--reduction-factors", "8"]),
    ):
        lines = print_plan(main, tmp_path / "model", *options)
        assert runs <= hours_of(lines).keys()
        assert "note: without the encoder's tokenizer, tokens of rte are an estimate" in lines
    shutil.copy(encoder / "vocab.txt", tmp_path / "model")
    assert not any("estimate" in line for line in print_plan(main, tmp_path / "model", *options))


def test_bert_base_is_known_without_a_network(print_plan, monkeypatch, capsys):
    seen = []

    def measure(args, adapters, config):
        seen.append(config)
        return (0.0, 1.0), (0.0, 0.0)  # a second a token

    monkeypatch.setattr(plan, "measure", measure)
    lines = print_plan(table1.main, BERT_BASE, "--systems", "head")
    assert seen and all(config == BertConfig() for config in seen)
    assert any(line.startswith("head-rte-0 ") for line in lines)
    lines = print_plan(architecture_search.main, BERT_BASE, "--no-extras")
    assert any(line.startswith("rte-full-0 ") for line in lines)
    with pytest.raises(SystemExit) as exit:
        table1.main(["--model", "someone/another-encoder", "--tasks", "rte", "--plan"])
    error = capsys.readouterr().err
    assert exit.value.code == 2 and error.count("\n") == 1 and "someone/another-encoder" in error


def test_tokens_are_estimated_from_words(data_dir, encoder):
    assert plan.estimated_tokens(("a cat runs .", None), 48) == pytest.approx(4 * 1.2 + 2)
    assert plan.estimated_tokens(("a cat", "the dog runs"), 48) == pytest.approx(5 * 1.2 + 3)
    assert plan.estimated_tokens(("cat " * 100, "dog"), 48) == 48
    config, directory = plan.find_encoder(str(encoder))
    exact = plan.tokens("rte", str(data_dir), [], config, directory)  # one token a word here
    assert exact < plan.tokens("rte", str(data_dir), [], config, None) < 1.2 * exact


@pytest.mark.parametrize(
    "stage, trained, frozen",
    [
        ("head", [], ["word_embeddings", "adapters", "fusion"]),
        ("full", ["word_embeddings"], ["adapters", "fusion"]),
        ("adapter", ["adapters"], ["word_embeddings", "fusion"]),
        ("fusion", ["fusion"], ["word_embeddings", "adapters"]),
        ("multitask", ["word_embeddings", "adapters"], ["fusion"]),
    ],
)
def test_what_is_timed_is_what_is_trained(encoder, stage, trained, frozen):
    words = ["--stage", stage, "--task", "rte"]
    if stage == "multitask":
        words = ["--stage", stage, "--tasks", "rte", "sst2"]
    args = grid.parse(grid.Cell("a", (*words, *fused(stage), "--device", "cpu")), encoder / "out")
    config, _ = plan.find_encoder(str(encoder))
    bert, head, _ = plan.build(args, len(args.adapters), config)
    names = {name for name, p in bert.named_parameters() if p.requires_grad}
    for part in trained:
        assert any(part in name for name in names), part
    for part in frozen:
        assert not any(part in name for name in names), part
    assert all(p.requires_grad for p in head.parameters())


def fused(stage):
    return ["--adapters", "a", "b", "c"] if stage == "fusion" else []


# --------------------------------------------------------------------------------------------------


def test_jobs_together_use_each_core_once(monkeypatch):
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "RAYON_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for cores in (1, 2, 7, 16, 64):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=cores: range(n), raising=False)
        for jobs in (2, 3, 16):
            shares = [grid.environment(slot, jobs, False) for slot in range(jobs)]
            threads = [int(share["OMP_NUM_THREADS"]) for share in shares]
            assert min(threads) >= 1 and sum(threads) <= max(cores, jobs) < sum(threads) + jobs
            # the tokenizers' too, and nobody's threads wait in a busy loop
            assert [int(share["RAYON_NUM_THREADS"]) for share in shares] == threads
            assert {share["OMP_WAIT_POLICY"] for share in shares} == {"PASSIVE"}
    assert not {"OMP_NUM_THREADS", "OMP_WAIT_POLICY"} & grid.environment(0, 1, False).keys()


def test_the_users_and_torchruns_threads_stay(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for launch in (["torchrun", "--nproc_per_node=8"], ["python", "-m", "torch.distributed.run"]):
        assert "OMP_NUM_THREADS" not in grid.environment(0, 2, True, launch)
    assert "OMP_NUM_THREADS" in grid.environment(0, 2, True, ["python"])
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert grid.environment(0, 2, True)["OMP_NUM_THREADS"] == "3"
