"""Writes a folder that is ready for upload from a finished adapter or fusion run. It uploads
nothing.

    python -m experiments.publish runs/rte [--out published/rte] [--repo USER/rte] [--encoder
    HUB_ID]

The folder holds AdapterHub's files, of a fusion also those of its adapters (adapters/NAME), and
README.md, a model card that says what it is, how good, and how to load it here and with
AdapterHub's library. It names no path of this machine: an encoder that was a local directory is
called by that directory's name, unless --encoder gives its hub id.
"""

import runtime.console  # noqa: F401  (first: Ctrl-C during imports, closed outputs)

# isort: split
import json
import os
import re
import shutil
import sys
from pathlib import Path

from adapter import find_adapter, save_adapter, save_head
from experiments.load_run import load_run
from formats.adapterhub import check_name
from formats.files import read_json
from fusion import fusions, save_fusion
from runtime.options import Parser

# AdapterHub's names of the paper's tasks
TAGS = {
    "mnli": "nli/multinli",
    "qqp": "sts/qqp",
    "sst2": "sentiment/sst-2",
    "winogrande": "comsense/winogrande",
    "imdb": "sentiment/imdb",
    "hellaswag": "comsense/hellaswag",
    "social_i_qa": "comsense/siqa",
    "cosmos_qa": "comsense/cosmosqa",
    "scitail": "nli/scitail",
    "argument": "argument/ukpsent",
    "commonsense_qa": "comsense/csqa",
    "boolq": "rc/boolq",
    "mrpc": "sts/mrpc",
    "sick": "nli/sick",
    "rte": "nli/rte",
    "cb": "nli/cb",
}
WRITTEN = (
    "README.md",
    "adapter_config.json",
    "adapter.safetensors",
    "head_config.json",
    "model_head.safetensors",
    "adapter_fusion_config.json",
    "model_adapter_fusion.safetensors",
    "adapters",
)

CARD = """---
tags:
- adapter-transformers
- adapters
- {model_type}
- {tag}
metrics:
- accuracy
{base_model}---

# {title}

{what}

| | |
|---|---|
| encoder | {encoder} |
| task | {task}: {labels} |
| accuracy on the development set | {accuracy:.4f}, {dev_examples} examples |
| training | {train_examples} examples, the best of at most {epochs} epochs was {best_epoch} |
| settings | learning rate {lr}, batches of {batch_size}, at most {max_length} tokens, seed {seed} |

Inputs below: `input_ids`, `token_type_ids`, `attention_mask`, LongTensors of shape {shape}, from the encoder's own
tokenizer; `logits` has one column per {column}.

## With the five files that trained it

```python
from huggingface_hub import snapshot_download

{imports}

directory = snapshot_download("{repo}")
bert = Bert.from_pretrained("{encoder}")
{load_here}
head = load_head(bert, directory)
logits = head(bert({inputs}))
```

## With `adapters`

```python
from adapters import AutoAdapterModel
from huggingface_hub import snapshot_download

directory = snapshot_download("{repo}")
model = AutoAdapterModel.from_pretrained("{encoder}")
{load_there}
model.eval()
logits = model(input_ids, token_type_ids=token_type_ids, attention_mask=attention_mask).logits
```

## Paper

Pfeiffer et al., AdapterFusion: Non-Destructive Task Composition for Transfer Learning, EACL 2021,
https://arxiv.org/abs/2005.00247
"""


def card(config, metrics, bert, head, encoder, repo):
    """The text of README.md. Raises ValueError if the run's files do not say what it must tell."""
    fusion, task, adapters = config["stage"] == "fusion", config["task"], config["adapters"]
    flatten = ", ".join(
        f"{name}.flatten(0, 1)" for name in ("input_ids", "token_type_ids", "attention_mask")
    )
    choices = head.config["head_type"] == "multiple_choice"
    if type(metrics["accuracy"]) is not float:
        raise TypeError(f"accuracy {metrics['accuracy']!r:.50}")
    members = ", ".join(f"`{name}`" for name in adapters)
    what = (
        f"AdapterFusion over {len(adapters)} adapters, {members}, trained on `{task}`."
        if fusion
        else f"A bottleneck adapter ({config['adapter']}, reduction factor "
        f"{config['reduction_factor']:g}"
        + "".join(
            f", {field} {json.dumps(value)}"
            for field, value in config.get("adapter_config", {}).items()
        )
        + f") trained on `{task}`."
    )
    here = [
        f"for name in {json.dumps(adapters)}:",
        '    load_adapter(bert, f"{directory}/adapters/{name}")',
        "load_fusion(bert, directory)",
    ]
    there = [
        here[0],
        '    model.load_adapter(f"{directory}/adapters/{name}", use_safetensors=True)',
        "model.load_adapter_fusion(directory, use_safetensors=True, set_active=True)",
    ]
    if not fusion:
        here = ["activate(bert, load_adapter(bert, directory))"]
        there = ["model.load_adapter(directory, use_safetensors=True, set_active=True)"]
    text = CARD.format(
        **{
            **{key: config[key] for key in ("epochs", "lr", "batch_size", "max_length", "seed")},
            **{
                key: metrics[key]
                for key in ("accuracy", "dev_examples", "train_examples", "best_epoch")
            },
        },
        model_type=bert.config.model_type,
        encoder=encoder,
        repo=repo,
        task=f"`{task}`",
        tag=json.dumps(f"adapterhub:{TAGS.get(task, task)}"),
        base_model=f"base_model: {json.dumps(encoder)}\n" if encoder.count("/") == 1 else "",
        title=f"{'AdapterFusion' if fusion else 'Adapter'} `{task}` for {encoder}",
        what=what,
        labels=f"{len(config['labels'])} choices"
        if choices
        else ", ".join(map(json.dumps, config["labels"])).replace("|", "\\|"),
        shape="[examples, choices, tokens]" if choices else "[examples, tokens]",
        column="choice" if choices else "label, in the order above",
        imports=f"from adapter import {'' if fusion else 'activate, '}load_adapter, "
        "load_head\nfrom bert import Bert" + "\nfrom fusion import load_fusion" * fusion,
        load_here="\n".join(here),
        load_there="\n".join(there),
        inputs=flatten if choices else "input_ids, token_type_ids, attention_mask",
    )
    if all(adapters[-1] in module.adapter_names for _, module in fusions(bert)):
        return text
    why = (
        f"The `adapters` library cannot run this fusion: `{adapters[-1]}` is not in all of "
        "its layers."
    )
    return f"{text[: text.index('## With `adapters`')]}{why}\n\n{text[text.index('## Paper') :]}"


def publish(run, out, repo, encoder=None, model=None, overwrite=False):
    """Writes the folder `out`. Raises ValueError or FileNotFoundError for a run that is not
    finished, has no adapter, or does not load; then nothing is written."""
    if not run.is_dir():
        raise ValueError(f"no finished run in {run}: it is no directory")
    if (out.exists() or out.is_symlink()) and not out.is_dir():
        raise ValueError(f"--out {out} is a file, or a link that leads nowhere")
    if out.exists() and out.samefile(run):
        raise ValueError(f"--out {out} is the run itself")
    if out.exists() and any(out.iterdir()):
        if not overwrite:
            raise ValueError(f"{out} is not empty: choose another --out, or --overwrite it")
        card_and_head = all((out / name).is_file() for name in ("README.md", "head_config.json"))
        if not card_and_head or (out / "log.jsonl").exists():
            raise ValueError(f"{out} is not a folder that this command wrote: choose another --out")
    try:
        bert, head, config = load_run(
            run, model=model
        )  # so it is whole, and what is written will load
        if config["stage"] not in ("adapter", "fusion"):
            raise ValueError(
                f"{run} is of --stage {config['stage']}: only adapter and fusion runs can "
                "be published"
            )
        check_name(config["task"])
        for name in config["adapters"] or [config["task"]]:
            if find_adapter(bert, name)[0].architecture is not None:
                raise ValueError(
                    f"{run}: AdapterHub's library has no adapters like {name}, and cannot "
                    "read its file"
                )
        source = config["model"]
        encoder = encoder or (Path(source).name if Path(source).is_absolute() else source)
        for name in (encoder, repo):  # which the card has in its code and its tables
            if not name.isprintable() or re.search(r"[^\w ./@+~:=,()-]", name):
                raise ValueError(f"{name!r:.100} is no name for an encoder or a repository")
        text = card(config, read_json(run / "metrics.json"), bert, head, encoder, repo)
    except (KeyError, TypeError, AttributeError) as e:
        raise ValueError(
            f"{run}: config.json and metrics.json are not those of a run: {type(e).__name__} {e}"
        ) from e

    bert.source = encoder  # into the files
    temporary = out.parent / f".{out.name}.{os.getpid()}"
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        if config["stage"] == "adapter":
            save_adapter(bert, config["task"], temporary)
        for name in config["adapters"]:
            save_adapter(bert, name, temporary / "adapters" / name)
        if config["stage"] == "fusion":
            save_fusion(bert, temporary)
        save_head(head, bert, config["task"], temporary)
        (temporary / "README.md").write_text(text, encoding="utf-8")
        out.mkdir(exist_ok=True)
        for name in WRITTEN:  # and whatever else is there, for instance .git, stays
            if (out / name).is_dir():
                shutil.rmtree(out / name)
            (out / name).unlink(missing_ok=True)
            if (temporary / name).exists():
                (temporary / name).rename(out / name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def main(argv=None):
    parser = Parser(description="Writes a folder that is ready for upload from a finished run.")
    parser.add_argument("run", type=Path, help="an adapter or a fusion run")
    parser.add_argument("--out", type=Path, help="default published/RUN")
    parser.add_argument("--repo", help="hub repository that the card names; default USER/RUN")
    parser.add_argument(
        "--encoder", help="the encoder's hub id, if the run was trained from a local directory"
    )
    parser.add_argument("--model", help="where the encoder is now, if not where the run found it")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier folder")
    try:
        args = parser.parse_args(argv)
        name = Path(os.path.realpath(args.run)).name  # Path.resolve fails on a loop of links
        out, repo = args.out or Path("published") / name, args.repo or f"USER/{name}"
        publish(args.run, out, repo, args.encoder, args.model, args.overwrite)
    except (ValueError, OSError) as e:
        print(f"publish.py: {' '.join(str(e).split())}", file=sys.stderr)
        sys.exit(2)
    print(f"{out} is ready: read its README.md, then, for instance: hf upload {repo} {out}")


if __name__ == "__main__":
    main()
