"""Writes a folder that is ready for upload from a finished adapter or fusion run. It uploads
nothing.

    python -m experiments.publish runs/rte [--out published/rte] [--repo USER/rte] \\
        [--encoder HUB_ID]

The folder holds AdapterHub's files, of a fusion also those of its adapters (adapters/NAME), and
README.md, a model card that says what it is, how good, and how to load it here and with
AdapterHub's library. It names no path of this machine: for an encoder that was a local directory
--encoder must give its hub id.
"""

if __name__ == "__main__":
    from runtime.command import announce

    announce("publish.py")

import json
import os
import re
import shutil
from pathlib import Path

from adapter import save_adapter, save_head
from data import TASKS
from experiments.load_run import check_stage, load_run, read_run_config, unknown_kind
from formats.adapterhub import check_name
from formats.files import read_json
from fusion import fusions, save_fusion
from runtime.command import errors_in_one_line
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
{measured}
license: {license}
{language}{datasets}{base_model}---

# {title}

{what}

| | |
|---|---|
| encoder | {encoder} |
| task | {task}: {labels} |
| accuracy on the development set | {accuracy:.4f}, {dev_examples} examples{constant} |{scores}
| training | {train_examples} examples, the best of at most {epochs} epochs was {best_epoch} |
| settings | learning rate {lr}, batches of {batch_size}, at most {max_length} tokens, seed {seed} |

Inputs below: `input_ids`, `token_type_ids`, `attention_mask`, LongTensors of shape {shape}, from
the encoder's own tokenizer; `logits` has one column per {column}.

## With the five files that trained it

{code}

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


# of metrics.json: (what the card calls it, what the hub does)
SCORES = {
    "macro_f1": ("macro-F1", "f1"),
    "f1": ("F1 of the second label", "f1"),
    "matthews": ("Matthews' correlation", "matthews_correlation"),
    "dev_loss": ("loss", None),
}


def card(config, metrics, bert, head, encoder, repo, license, language=None, code=None):
    """The text of README.md. Raises KeyError or TypeError if the run's files do not say what it
    must tell."""
    fusion, task, adapters = config["stage"] == "fusion", config["task"], config["adapters"]
    choices = head.config["head_type"] == "multiple_choice"
    if type(metrics["accuracy"]) is not float:
        raise TypeError(f"accuracy {metrics['accuracy']!r:.50}")
    settings = ("epochs", "lr", "batch_size", "max_length", "seed")
    results = ("accuracy", "dev_examples", "train_examples", "best_epoch")
    inputs = ("input_ids", "token_type_ids", "attention_mask")
    labels = ", ".join(map(json.dumps, config["labels"])).replace("|", "\\|")
    imports, load_here, load_there = loading(fusion, adapters)
    known = {name: SCORES[name] for name in SCORES if type(metrics.get(name)) is float}
    measured = dict.fromkeys(["accuracy", *(there for _, there in known.values() if there)])
    share = metrics.get("majority_class_accuracy")
    source = TASKS[task].source if task in TASKS else None
    language = language or ("en" if task in TASKS else None)  # all of the paper's are English
    text = CARD.format(
        scores="".join(
            f"\n| {title} on the development set | {metrics[name]:.4f} |"
            for name, (title, _) in known.items()
        ),
        constant="" if share is None else f"; always the most frequent class: {share:.4f}",
        measured="\n".join(f"- {name}" for name in measured),
        license=json.dumps(license),
        language=f"language: {json.dumps(language)}\n" if language else "",
        datasets=f"datasets:\n- {json.dumps(source)}\n" if source else "",
        code=f"The code is at <{code}>." if code else "Run it where that code is.",
        **{key: config[key] for key in settings},
        **{key: metrics[key] for key in results},
        model_type=bert.config.model_type,
        encoder=encoder,
        repo=repo,
        task=f"`{task}`",
        tag=json.dumps(f"adapterhub:{TAGS.get(task, task)}"),
        base_model=f"base_model: {json.dumps(encoder)}\n" if encoder.count("/") == 1 else "",
        title=f"{'AdapterFusion' if fusion else 'Adapter'} `{task}` for {encoder}",
        what=what_it_is(config),
        labels=f"{len(config['labels'])} choices" if choices else labels,
        shape="[examples, choices, tokens]" if choices else "[examples, tokens]",
        column="choice" if choices else "label, in the order above",
        imports="\n".join(imports),
        load_here="\n".join(load_here),
        load_there="\n".join(load_there),
        inputs=", ".join(f"{name}.flatten(0, 1)" if choices else name for name in inputs),
    )
    if all(adapters[-1] in module.adapter_names for _, module in fusions(bert)):
        return text
    why = (
        f"The `adapters` library cannot run this fusion: `{adapters[-1]}` is not in all of "
        "its layers."
    )
    return f"{text[: text.index('## With `adapters`')]}{why}\n\n{text[text.index('## Paper') :]}"


def what_it_is(config):
    """The card's first sentence."""
    task, adapters = config["task"], config["adapters"]
    if config["stage"] == "fusion":
        names = ", ".join(f"`{name}`" for name in adapters)
        return f"AdapterFusion over {len(adapters)} adapters, {names}, trained on `{task}`."
    kind = f"{config['adapter']}, reduction factor {config['reduction_factor']:g}"
    for field, value in config.get("adapter_config", {}).items():
        kind += f", {field} {json.dumps(value)}"
    return f"A bottleneck adapter ({kind}) trained on `{task}`."


def loading(fusion, adapters):
    """Lines of the card's code: imports, how the five files load the folder, how `adapters`
    does."""
    if not fusion:
        return (
            ["from adapter import activate, load_adapter, load_head", "from bert import Bert"],
            ["activate(bert, load_adapter(bert, directory))"],
            ["model.load_adapter(directory, use_safetensors=True, set_active=True)"],
        )
    each = f"for name in {json.dumps(adapters)}:"
    return (
        [
            "from adapter import load_adapter, load_head",
            "from bert import Bert",
            "from fusion import load_fusion",
        ],
        [
            each,
            '    load_adapter(bert, f"{directory}/adapters/{name}")',
            "load_fusion(bert, directory)",
        ],
        [
            each,
            '    model.load_adapter(f"{directory}/adapters/{name}", use_safetensors=True)',
            "model.load_adapter_fusion(directory, use_safetensors=True, set_active=True)",
        ],
    )


def publish(
    run,
    out,
    repo,
    encoder=None,
    model=None,
    overwrite=False,
    anyway=False,
    license="mit",
    language=None,
    code=None,
):
    """Writes the folder `out`. Raises ValueError or FileNotFoundError for a run that is not
    finished, has no adapter, or does not load, or has learned nothing, unless `anyway`; then
    nothing is written."""
    check_out(run, out, overwrite)
    try:
        check_stage(run, read_run_config(run), ["adapter", "fusion"], "can be published")
        bert, head, config = load_run(run, model=model)  # so it is whole, and the files will load
        for name in [config["task"], *config["adapters"]]:
            check_name(name)
        if unknown := unknown_kind(bert):
            raise ValueError(
                f"{run}: AdapterHub's library has no {unknown}, and cannot read the file"
            )
        source = config["model"]
        if encoder is None and Path(source).is_absolute():
            raise ValueError(
                f"{run} was trained on an encoder in a local directory, {Path(source).name}: say "
                "with --encoder what its hub id is"
            )
        encoder = encoder or source
        given = (encoder, repo, license, language or "", code or "")
        if strange := [text for text in given if not text.isprintable()]:
            raise ValueError(f"a name with unprintable characters, {strange[0]!r:.100}")
        for name in (encoder, repo):  # which the card has in its code and its tables
            if re.search(r"[^\w ./@+~:=,()-]", name):
                raise ValueError(f"{name!r:.100} is no name for an encoder or a repository")
        metrics = read_json(run / "metrics.json")
        text = card(config, metrics, bert, head, encoder, repo, license, language, code)
        share = metrics.get("majority_class_accuracy")
        if share is not None and metrics["accuracy"] <= share and not anyway:
            raise ValueError(
                f"{run} has learned nothing: accuracy {metrics['accuracy']:.4f}, always the most "
                f"frequent class {share:.4f}; --anyway publishes it"
            )
    except (KeyError, TypeError, AttributeError) as e:
        raise ValueError(
            f"{run}: config.json and metrics.json are not those of a run: {type(e).__name__} {e}"
        ) from e
    bert.source = encoder  # into the files
    write(out, bert, head, config, text)


def check_out(run, out, overwrite):
    """Raises ValueError if the folder cannot be written to `out`."""
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


def write(out, bert, head, config, text):
    """Writes all files into a temporary folder, then moves them. What else is in `out`, for
    instance .git, stays."""
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
        for name in WRITTEN:
            if (out / name).is_dir():
                shutil.rmtree(out / name)
            (out / name).unlink(missing_ok=True)
            if (temporary / name).exists():
                (temporary / name).rename(out / name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def main(argv=None):
    parser = Parser(
        prog="python -m experiments.publish",
        description="Writes a folder that is ready for upload from a finished run.",
    )
    parser.add_argument("run", type=Path, help="an adapter or a fusion run")
    parser.add_argument("--out", type=Path, help="default published/RUN")
    parser.add_argument("--repo", help="hub repository that the card names; default USER/RUN")
    parser.add_argument(
        "--encoder", help="the encoder's hub id, if the run was trained from a local directory"
    )
    parser.add_argument("--license", default="mit", help="of the weights; default mit")
    parser.add_argument("--language", help="of the texts; default en for the paper's tasks")
    parser.add_argument("--code", metavar="URL", help="where the code is that loads the files")
    parser.add_argument(
        "--anyway", action="store_true", help="publish a run that has learned nothing, too"
    )
    parser.add_argument("--model", help="where the encoder is now, if not where the run found it")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier folder")
    with errors_in_one_line("publish.py"):
        args = parser.parse_args(argv)
        name = Path(os.path.realpath(args.run)).name  # Path.resolve fails on a loop of links
        out, repo = args.out or Path("published") / name, args.repo or f"USER/{name}"
        given = {name: getattr(args, name) for name in ("anyway", "license", "language", "code")}
        publish(args.run, out, repo, args.encoder, args.model, args.overwrite, **given)
    print(f"{out} is ready: read its README.md, then, for instance: hf upload {repo} {out}")


if __name__ == "__main__":
    main()
