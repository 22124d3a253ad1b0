"""experiments.evaluate, masked adapters, and training on a few of them at a time."""

import json
import shutil
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_resume import assert_equal
from torch import nn

import fusion as fusion_module
import train
from adapter import AdapterConfig, activate, add_adapter
from bert import Bert
from conftest import write_rows
from data import TASKS, batches
from experiments import evaluate as evaluation
from experiments.load_run import load_run, load_run_split
from fusion import add_fusion, fusion_regularization, fusion_weights, fusions
from runtime import state
from variants.folding import fold
from variants.masking import mask


@pytest.fixture
def evaluate(capsys, encoder):
    """evaluate(run, ...): (what the command prints before the closing line, the closing line's
    dictionary)"""

    def evaluate(run, *options):
        capsys.readouterr()
        evaluation.main([str(run), "--device", "cpu", *map(str, options)])
        *lines, last = capsys.readouterr().out.splitlines()
        return lines, json.loads(last)

    return evaluate


@pytest.fixture
def logits(monkeypatch):
    """A list to which every evaluation adds its logits, batch by batch."""
    seen, predict = [], train.predict

    def recorded(bert, *arguments):
        result = predict(bert, *arguments)
        if not bert.training:
            seen.append(result)
        return result

    monkeypatch.setattr(train, "predict", recorded)
    return seen


@pytest.fixture(scope="module")
def wide(runs, tmp_path_factory):
    """The fusion of three adapters, whose weights differ, and which speak up: queries 100 times as
    large, V 20 times."""
    run = shutil.copytree(runs / "fusion-rte", tmp_path_factory.mktemp("wide") / "fusion")
    path = run / "model_adapter_fusion.safetensors"
    larger = {"query": 100, "value": 20, "key": 1}
    save_file({name: larger[name.split(".")[-2]] * p for name, p in load_file(path).items()}, path)
    return run


STAGES = [
    ["--stage", "adapter", "--adapter", "bapna"],
    ["--stage", "adapter", "--task", "pick"],
    ["--stage", "fusion"],
    ["--stage", "head"],
    ["--stage", "full"],
    ["--stage", "multitask", "--tasks", "rte", "pick", "--steps-per-epoch", 3],
]


@pytest.mark.parametrize(
    "options, dtype", [*((stage, "bfloat16") for stage in STAGES), (STAGES[2], "float32")]
)
def test_everything_is_as_in_training(
    options, dtype, launch, evaluate, logits, runs, encoder, tmp_path, capsys
):
    """Bit by bit: the small runs guess nearly one class, so the accuracy alone would prove
    little."""
    out, task = (
        tmp_path / "run",
        ["--task", "rte"] * ("--task" not in options and "--tasks" not in options),
    )
    adapters = ["--adapters", runs / "rte", runs / "sst2"] if "fusion" in options else []
    metrics = launch(
        *options,
        *task,
        *adapters,
        "--dtype",
        dtype,
        "--epochs",
        1,
        "--lr",
        "5e-2",
        "--out",
        out,
        "--batch-size",
        8,
        "--limit-dev",
        39,
    )
    before, in_training = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}, [*logits]
    logits.clear()
    for task in metrics["task"].split(","):
        lines, result = evaluate(out, *(["--task", task] if "," in metrics["task"] else []))
        assert result["accuracy"] == metrics.get("accuracies", {task: metrics["accuracy"]})[task]
        assert (result["task"], result["examples"], result["split"]) == (task, 39, "validation")
        assert ("classes" in result) == (task != "pick")
        assert any(
            f"of 39 examples right, accuracy {result['accuracy']:.4f}" in line for line in lines
        )
        assert any("--limit-dev" in line for line in lines)
    assert len(logits) == len(in_training) and all(map(torch.equal, logits, in_training))
    assert (
        torch.cat([batch for batch in logits if batch.shape[1] == logits[0].shape[1]]).std(0).min()
        > 0
    )
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    if options[1] in ("full", "multitask"):
        with pytest.raises(SystemExit) as exit:
            evaluate(out, "--task", task, "--model", encoder)
        assert exit.value.code == 2 and "has an encoder of its own" in capsys.readouterr().err


def test_report(runs, data_dir, evaluate, tmp_path, monkeypatch):
    """Against a count by hand, on a split of another name in another directory. The model is one
    that adds up ids."""

    def predict(bert, head, batch, dtype):
        return nn.functional.one_hot(batch["input_ids"].sum(1) // 3 % 2, 2).float()

    monkeypatch.setattr(train, "predict", predict)
    rows = [
        json.loads(line) for line in (data_dir / "rte" / "train.jsonl").read_text().splitlines()
    ][:50]
    write_rows(tmp_path / "rte" / "test.jsonl", rows)
    lines, result = evaluate(runs / "rte", "--split", "test", "--data-dir", tmp_path)
    assert not any(line.startswith("note") for line in lines)

    bert, _, config = load_run(runs / "rte")
    _, split = load_run_split(runs / "rte", bert, config, "test", tmp_path)
    for name, examples in (
        ("validation", 7),
        ("test", 50),
    ):  # --limit-dev is about the development set
        cut = {**config, "limit_dev": 7}
        directory = tmp_path if name == "test" else data_dir
        assert len(load_run_split(runs / "rte", bert, cut, name, directory)[1]) == examples
    pairs = np.array(
        [
            (batch["labels"].item(), batch["input_ids"].sum().item() // 3 % 2)
            for batch in batches(split, 1)
        ]
    )
    assert min((pairs == (k, j)).all(1).sum() for k in range(2) for j in range(2)) > 0
    assert result["accuracy"] == (pairs[:, 0] == pairs[:, 1]).mean() and result["examples"] == 50
    assert result["labels"] == list(TASKS["rte"].labels) == list(result["classes"])
    for k, label in enumerate(result["labels"]):
        assert result["confusion"][k] == [((pairs == (k, j)).all(1)).sum() for j in range(2)]
        right = (pairs == (k, k)).all(1).sum()
        values = result["classes"][label]
        assert values["count"] == (pairs[:, 0] == k).sum() and values["recall"] == pytest.approx(
            right / values["count"]
        )
        assert values["precision"] == pytest.approx(right / (pairs[:, 1] == k).sum())
        (line,) = (line for line in lines if line.split()[:2] == [str(k + 1), label])
        assert line.split()[2:] == [
            f"{values['precision']:.3f}",
            f"{values['recall']:.3f}",
            str(values["count"]),
            *map(str, result["confusion"][k]),
        ]

    write_rows(tmp_path / "rte" / "ones.jsonl", [{**row, "label": 1} for row in rows])
    lines, result = evaluate(
        runs / "rte",
        "--split",
        "ones",
        "--data-dir",
        tmp_path,
        "--batch-size",
        7,
        "--max-length",
        12,
    )
    assert (
        result["classes"]["entailment"]["recall"] is None
        and result["classes"]["entailment"]["count"] == 0
    )
    assert "-" in next(line for line in lines if "1 entailment" in line).split()
    assert result["accuracy"] == result["classes"]["not_entailment"]["recall"] > 0


def test_your_own_task_needs_no_other_split(runs, data_dir, evaluate, tmp_path):
    (tmp_path / "pick").mkdir()
    (tmp_path / "pick" / "test.jsonl").write_bytes(
        (data_dir / "pick" / "validation.jsonl").read_bytes()
    )
    _, result = evaluate(runs / "pick", "--split", "test", "--data-dir", tmp_path)
    assert (
        result["accuracy"] == json.loads((runs / "pick" / "metrics.json").read_text())["accuracy"]
    )


def test_your_own_task_has_the_columns_of_its_training(
    launch, evaluate, data_dir, tmp_path, capsys
):
    """text_b may be missing from a task, but not from a file of a task that was trained with it."""
    rows = [
        json.loads(line) for line in (data_dir / "rte" / "train.jsonl").read_text().splitlines()
    ]
    for name in ("text_b", "hypothesis"):
        split = [
            {"text_a": row["sentence1"], name: row["sentence2"], "label": row["label"]}
            for row in rows
        ]
        write_rows(tmp_path / "mine" / f"{name}.jsonl", split)
    for split in ("train", "validation"):
        shutil.copyfile(tmp_path / "mine" / "text_b.jsonl", tmp_path / "mine" / f"{split}.jsonl")
    launch(
        "--stage",
        "adapter",
        "--task",
        "mine",
        "--data-dir",
        tmp_path,
        "--epochs",
        1,
        "--out",
        tmp_path / "run",
    )
    assert evaluate(tmp_path / "run", "--split", "text_b")[1]["examples"] == len(rows)
    with pytest.raises(SystemExit):
        evaluate(tmp_path / "run", "--split", "hypothesis")
    assert "['text_a', 'text_b'], the hypothesis split" in capsys.readouterr().err


def test_a_table_of_many_classes_stays_narrow():
    labels = [f"label {i}" * (1 + 9 * (i == 3)) for i in range(150)]
    right, predictions = torch.arange(150), torch.arange(150).roll(1)
    result = {"examples": 150, **evaluation.by_class(labels, right, predictions)}
    lines = list(evaluation.table(result))
    assert (
        len(lines) == 151 and max(map(len, lines)) < 80 and len({len(line) for line in lines}) == 1
    )


def test_of_many_classes_only_what_occurs_is_told():
    """30,000 classes: a square matrix of them would have 900 million cells."""
    names = [f"class {i}" for i in range(30_000)]
    right, predictions = torch.tensor([7, 7, 29_999]), torch.tensor([7, 8, 29_999])
    started = time.monotonic()
    result = {"examples": 3, **evaluation.by_class(names, right, predictions)}
    assert time.monotonic() - started < 2
    assert result["confusion"] == {
        "class 7": {"class 7": 1, "class 8": 1},
        "class 29999": {"class 29999": 1},
    }
    assert result["classes"]["class 7"] == {"precision": 1.0, "recall": 0.5, "count": 2}
    assert result["classes"]["class 8"] == {"precision": 0.0, "recall": None, "count": 0}
    assert len(list(evaluation.table(result))) == 4


def test_options_of_training_are_refused(runs, data_dir, tmp_path, capsys, encoder, monkeypatch):
    rows = [
        json.loads(line) for line in (data_dir / "rte" / "train.jsonl").read_text().splitlines()
    ][:5]
    write_rows(
        tmp_path / "rte" / "nolabel.jsonl",
        [{k: v for k, v in row.items() if k != "label"} for row in rows],
    )
    write_rows(tmp_path / "rte" / "hidden.jsonl", [{**row, "label": -1} for row in rows])
    write_rows(
        tmp_path / "pick" / "train.jsonl", [{"text_a": "a", "choices": ["a", "b"], "label": 0}] * 5
    )
    broken = shutil.copytree(runs / "rte", tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "batch_size": "32"}))
    no_stage = shutil.copytree(broken, tmp_path / "no stage")
    (no_stage / "config.json").write_text(json.dumps({**config, "stage": ["adapter"]}))
    other = tmp_path / "other"
    other.mkdir()
    before = sorted(tmp_path.rglob("*"))
    run, fusion = [runs / "rte"], [runs / "fusion-rte"]
    for arguments, say in (
        ([], "required: run"),
        ([*run, "--epochs", 3], "unrecognized arguments: --epochs"),
        ([*run, "--seed", 0], "unrecognized arguments: --seed"),
        ([*run, "--out", tmp_path / "x"], "unrecognized arguments: --out"),
        ([*run, "--overwrite"], "unrecognized arguments: --overwrite"),
        ([*run, "--task", "sst2"], "a run on 'rte', not on 'sst2'"),
        ([other], "no finished run"),
        ([broken], "not the configuration of a run"),
        ([no_stage], "not the configuration of a run"),
        ([*run, "--split", "test"], "no test split"),
        ([*run, "--data-dir", tmp_path / "none"], "not a directory"),
        ([*run, "--data-dir", tmp_path, "--split", "nolabel"], "no column 'label'"),
        ([*run, "--data-dir", tmp_path, "--split", "hidden"], "line 1: label -1 is not one of"),
        ([*run, "--max-length", 1000], "--max-length must be in 8 .. 48"),
        ([*run, "--batch-size", 0], "--batch-size"),
        ([*run, "--model", other], str(other)),
        ([*run, "--mask", "rte"], "no fusion"),
        ([*fusion, "--mask", "mnli"], "'mnli' is not in the fusion of rte, sst2, pick"),
        ([*fusion, "--mask", "rte", "sst2", "pick"], "layer 1 would be left without"),
        (
            [runs / "pick", "--data-dir", tmp_path, "--split", "train"],
            "different labels, or choices",
        ),
    ):
        with pytest.raises(SystemExit) as exit:
            evaluation.main([*map(str, arguments)])
        output = capsys.readouterr()
        assert exit.value.code == 2 and output.out == "" and output.err.count("\n") == 1, output
        assert output.err.startswith("evaluate.py: ") and say in output.err
    for option in ("--run", "--split", "--mask"):
        with pytest.raises(SystemExit) as exit:
            train.main(["--stage", "adapter", "--task", "rte", option, "x"])
        assert (
            exit.value.code == 2 and f"unrecognized arguments: {option}" in capsys.readouterr().err
        )
    assert sorted(tmp_path.rglob("*")) == before

    monkeypatch.setattr(
        train,
        "predict",
        lambda bert, head, batch, dtype: torch.full((len(batch["labels"]), 2), torch.nan),
    )
    with pytest.raises(SystemExit) as exit:
        evaluation.main([str(runs / "rte")])
    assert (
        exit.value.code == 2
        and capsys.readouterr().err == "evaluate.py: the model's outputs are not finite\n"
    )


# --------------------------------------------------------------------------------------------------
# Masks

MIXTURES = {
    "alike": [AdapterConfig.pfeiffer(reduction_factor=r) for r in (2, 4, 8, 16)],
    "different": [
        AdapterConfig.pfeiffer(reduction_factor=2, original_ln_before=False),
        AdapterConfig.bapna(reduction_factor=4),
        AdapterConfig.pfeiffer(reduction_factor=4, leave_out=(1,)),
        AdapterConfig.pfeiffer(residual_before_ln=False, non_linearity="gelu"),
    ],
    "both places": [AdapterConfig.houlsby(reduction_factor=r) for r in (2, 4, 8)],
}
IDS = torch.tensor([[2, 5, 6, 7, 3], [2, 9, 3, 11, 12]])


def fused(encoder, configs):
    """In float64, with weights at which an error shows."""
    torch.manual_seed(0)
    bert = Bert.from_pretrained(encoder).double()
    for i, config in enumerate(configs):
        add_adapter(bert, f"a{i}", config)
    add_fusion(bert, [f"a{i}" for i in range(len(configs))])
    for name, parameter in bert.named_parameters():
        if ".adapters." in name or ".fusion." in name:
            nn.init.normal_(parameter, std=0.3)
    activate(bert, ",".join(f"a{i}" for i in range(len(configs))))
    return bert.eval()


def literal(fusion, masked):
    """Fusion.compose as the textbook form, with -inf for some of the scores."""

    def compose(h, adapters, layer_input=None):
        norms = [adapter.norm_before or nn.Identity() for adapter in adapters]
        z = torch.stack(
            [a.up(a.act(a.down(norm(h)))) for a, norm in zip(adapters, norms, strict=True)], 2
        )
        scores = torch.einsum("btd,btnd->btn", fusion.query(h), fusion.key(z))
        out = [n for n, name in enumerate(fusion.adapter_names) if name in masked]
        scores[..., out] = -torch.inf
        s = scores.softmax(-1)
        fusion.weights = s
        return torch.einsum("btn,btnd->btd", s, fusion.value(z))

    return compose


@pytest.mark.parametrize("masked", [["a0"], ["a2"], ["a0", "a1"], ["a1", "a2"]], ids=" ".join)
@pytest.mark.parametrize("configs", MIXTURES.values(), ids=MIXTURES)
def test_a_mask_is_minus_infinity(configs, masked, encoder, monkeypatch):
    """Also of the last adapter, whose configuration says what all of them read."""
    bert = fused(encoder, configs)
    if "a2" in masked and len(configs) == 4:
        masked = [*masked, "a3"]
    with torch.no_grad():
        whole = bert(IDS)
        mask(bert, masked)
        o, s = bert(IDS), fusion_weights(bert)
        folded = fold(bert)
        assert (folded(IDS) - o).abs().max() < 1e-10 and torch.equal(fold(folded)(IDS), folded(IDS))
        with pytest.raises(ValueError, match="not for training"):
            fusion_regularization(folded)
        assert all((fusion_weights(folded)[key] - s[key]).abs().max() < 1e-10 for key in s)
        with pytest.raises(ValueError, match="then fold"):
            mask(folded, ["a1"])
        mask(bert, [])
        assert torch.equal(bert(IDS), whole)
        for _, fusion in fusions(bert):
            monkeypatch.setattr(fusion, "compose", literal(fusion, masked))
        assert (bert(IDS) - o).abs().max() < 1e-10
    for key, weights in fusion_weights(bert).items():
        assert (weights - s[key]).abs().max() < 1e-10 and (s[key].sum(-1) - 1).abs().max() < 1e-10
        assert (s[key][..., [int(name[1:]) for name in masked]] == 0).all()
    assert (o - whole).abs().max() > 1e-3


@pytest.mark.parametrize("left", [0, 1, 2])
def test_all_but_one_masked_is_a_fusion_of_that_one(left, encoder):
    configs = MIXTURES["both places"]
    bert, names = fused(encoder, configs), ["a0", "a1", "a2"]
    kept = {key: fusion for key, fusion in fusions(bert)}
    with torch.no_grad():
        mask(bert, [name for name in names if name != f"a{left}"])
        masked = bert(IDS)
        add_fusion(bert, [f"a{left}"])
        for key, fusion in fusions(bert):
            fusion.load_state_dict(kept[key].state_dict())
        assert (bert.eval()(IDS) - masked).abs().max() < 1e-10


def test_layers_are_silenced_one_by_one(encoder):
    bert = fused(encoder, MIXTURES["different"])
    mask(bert, ["a0"], layers=[1])
    with torch.no_grad():
        bert(IDS)
    s = fusion_weights(bert)
    assert (s[0, "output"][..., 0] > 0).all() and (s[1, "output"][..., 0] == 0).all()
    silent = {key: fusion.masked for key, fusion in fusions(bert)}
    for names, layers, say in (
        (["a0", "a1", "a3"], [0, 1], "layer 2 would be left"),
        (["a"], None, "'a' is not in the fusion"),
        (["a0"], [1, 7], "no fusion in layer 7, from 0"),
    ):
        with pytest.raises(ValueError, match=say):
            mask(bert, names, layers)
    assert silent == {key: fusion.masked for key, fusion in fusions(bert)}
    mask(bert, (name for name in ["a1"]))  # whatever can be gone through
    assert {fusion.masked for _, fusion in fusions(bert)} == {frozenset(["a1"])}
    with pytest.raises(ValueError, match="run a batch"):  # those of the last forward are of others
        fusion_weights(bert)


def test_mask_on_the_command_line(wide, evaluate, logits, tmp_path):
    """Masking the last two leaves what a run of the first alone gives."""
    _, whole = evaluate(wide)
    _, masked = evaluate(wide, "--mask", "sst2", "pick")
    one = shutil.copytree(wide, tmp_path / "one")
    for name in ("sst2", "pick"):
        shutil.rmtree(one / "adapters" / name)
    config, path = json.loads((one / "config.json").read_text()), one / "adapter_fusion_config.json"
    (one / "config.json").write_text(json.dumps({**config, "adapters": ["rte"]}))
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "adapter_names": ["rte"], "name": "rte"})
    )
    evaluate(one)
    assert masked["masked"] == ["sst2", "pick"] and whole["masked"] == []
    whole, masked, alone = logits
    assert (masked - alone).abs().max() < 1e-5 and (masked - whole).abs().max() > 1e-3


# --------------------------------------------------------------------------------------------------
# --adapters-per-batch


def test_a_few_adapters_per_batch(launch, runs, tmp_path, monkeypatch):
    """Every step draws anew, the same in all layers; evaluation is over all; K = N is as
    without."""
    seen, compose = [], fusion_module.Fusion.compose

    def watched(self, h, adapters, layer_input=None):
        seen.append((self.training, tuple(self.unmasked(self.adapter_names))))
        assert len(adapters) == len(seen[-1][1])
        return compose(self, h, adapters, layer_input)

    adapters = ["--adapters", *(runs / name for name in ("rte", "sst2", "pick"))]
    options = [
        "--stage",
        "fusion",
        "--task",
        "rte",
        *adapters,
        "--epochs",
        1,
        "--lr",
        "5e-3",
        "--batch-size",
        4,
    ]
    monkeypatch.setattr(fusion_module.Fusion, "compose", watched)
    launch(*options, "--adapters-per-batch", 2, "--out", tmp_path / "two")
    steps = [names for training, names in seen if training]
    assert steps[::2] == steps[1::2] and len(steps) == 2 * 24  # two layers
    assert all(len(names) == 2 for names in steps) and len(set(steps)) == 3
    assert {names for training, names in seen if not training} == {("rte", "sst2", "pick")}
    config = json.loads((tmp_path / "two" / "config.json").read_text())
    assert config["adapters_per_batch"] == 2 and "adapters_per_batch" not in state.FREE
    assert all(not fusion.masked for _, fusion in fusions(load_run(tmp_path / "two")[0]))

    launch(*options, "--adapters-per-batch", 3, "--out", tmp_path / "three")
    launch(*options, "--out", tmp_path / "all")
    a, b, c = (
        load_file(tmp_path / name / "model_adapter_fusion.safetensors")
        for name in ("two", "three", "all")
    )
    assert all(torch.equal(b[name], c[name]) for name in c) and any(
        not torch.equal(a[name], c[name]) for name in c
    )


def test_a_resumed_run_draws_the_same(launch, runs, tmp_path, monkeypatch):
    adapters = ["--adapters", *(runs / name for name in ("rte", "sst2", "pick"))]
    options = [
        "--stage",
        "fusion",
        "--task",
        "rte",
        *adapters,
        "--epochs",
        2,
        "--lr",
        "5e-3",
        "--batch-size",
        8,
        "--adapters-per-batch",
        2,
        "--save-minutes",
        0,
    ]
    launch(*options, "--out", tmp_path / "whole")
    steps, clip = [], nn.utils.clip_grad_norm_

    def interrupted(*arguments):
        steps.append(1)
        if len(steps) == 12 + 7:  # in the second epoch
            raise KeyboardInterrupt
        return clip(*arguments)

    monkeypatch.setattr(nn.utils, "clip_grad_norm_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launch(*options, "--out", tmp_path / "run")
    monkeypatch.setattr(nn.utils, "clip_grad_norm_", clip)
    with pytest.raises(ValueError, match="adapters_per_batch"):
        launch(*options, "--adapters-per-batch", 3, "--resume", "--out", tmp_path / "run")
    launch(*options, "--resume", "--out", tmp_path / "run")
    assert_equal(tmp_path / "run", tmp_path / "whole")


def test_adapters_per_batch_errors(launch, runs, tmp_path):
    for name in ("partly", "too"):
        copy = shutil.copytree(runs / "rte", tmp_path / name)
        values = json.loads((copy / "adapter_config.json").read_text())
        values |= {"name": name, "config": {**values["config"], "leave_out": [1]}}
        (copy / "adapter_config.json").write_text(json.dumps(values))
        tensors = load_file(copy / "adapter.safetensors")
        save_file(
            {
                key.replace(".rte.", f".{name}."): tensor
                for key, tensor in tensors.items()
                if "layer.1." not in key
            },
            copy / "adapter.safetensors",
        )
    two, some = [runs / "rte", runs / "sst2"], [runs / "rte", tmp_path / "partly", tmp_path / "too"]
    for K, adapters, more, say in (
        (1, two, [], "must be in 2 .. 2"),
        (3, two, [], "must be in 2 .. 2"),
        (2, some, [], "3 or more, not 2: layer 2 has 1"),
        (2, two, ["--compile"], "not go together"),
    ):
        with pytest.raises(ValueError, match=say):
            launch(
                "--stage",
                "fusion",
                "--task",
                "rte",
                "--adapters",
                *adapters,
                "--adapters-per-batch",
                K,
                *more,
                "--out",
                tmp_path / "out",
            )
    with pytest.raises(ValueError, match="belongs to --stage fusion"):
        launch(
            "--stage",
            "adapter",
            "--task",
            "rte",
            "--adapters-per-batch",
            1,
            "--out",
            tmp_path / "out",
        )
    assert not (tmp_path / "out").exists()
