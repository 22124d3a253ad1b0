"""Writes a folder that is ready for upload from a finished adapter or fusion run. It uploads
nothing.

    python -m experiments.publish runs/rte [--out published/rte] [--repo USER/rte] \\
        [--encoder HUB_ID]

The folder holds AdapterHub's files, for a fusion also those of its adapters (adapters/NAME), and
README.md, a model card that says what it is, how good, and how to load it here and with
AdapterHub's library (its text: experiments/card.md). It names no path of this machine: for an
encoder that was a local directory --encoder must give its hub id.
"""

if __name__ == "__main__":
    from runtime.command import announce

    announce("publish.py")

import json
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from string import Template

from adapter import save_adapter, save_head
from data import TASKS
from experiments.load_run import Reading, check_stage, load_run, read_run_config, unknown_kind
from formats.adapterhub import check_name
from formats.files import read_json
from fusion import fusions, save_fusion
from runtime.command import run_command
from runtime.settings import argument, like, option, parse

# AdapterHub's names of the paper's tasks
TAGS = """mnli=nli/multinli qqp=sts/qqp sst2=sentiment/sst-2 winogrande=comsense/winogrande
    imdb=sentiment/imdb hellaswag=comsense/hellaswag social_i_qa=comsense/siqa
    cosmos_qa=comsense/cosmosqa scitail=nli/scitail argument=argument/ukpsent
    commonsense_qa=comsense/csqa boolq=rc/boolq mrpc=sts/mrpc sick=nli/sick rte=nli/rte cb=nli/cb"""
TAGS = dict(pair.split("=") for pair in TAGS.split())
SCORES = {  # of metrics.json: (what the card calls it, what the hub does)
    "macro_f1": ("macro-F1", "f1"),
    "f1": ("F1 of the second label", "f1"),
    "matthews": ("Matthews' correlation", "matthews_correlation"),
    "dev_loss": ("loss", None),
}
WRITTEN = """README.md adapter_config.json adapter.safetensors head_config.json
    model_head.safetensors adapter_fusion_config.json model_adapter_fusion.safetensors
    adapters""".split()


@dataclass(frozen=True)
class Options:
    run: Path = argument("an adapter or a fusion run")
    out: Path | None = option(None, "default published/RUN")
    repo: str | None = option(None, "hub repository that the card names; default USER/RUN")
    encoder: str | None = option(
        None, "the encoder's hub id, if the run was trained from a local directory"
    )
    license: str = option("mit", "of the weights")
    language: str | None = option(None, "of the texts; default en for the paper's tasks")
    code: str | None = option(None, "where the code is that loads the files", metavar="URL")
    anyway: bool = option(False, "publish a run that has learned nothing, too")
    model: str | None = like(Reading, "model")
    overwrite: bool = option(False, "replace an earlier folder")


def escape(text):
    """A text from data, as Markdown and HTML show it: with nothing in it that either obeys."""
    return re.sub(r"[^\w ,.-]", lambda found: f"&#{ord(found[0])};", str(text))


def card(config, metrics, bert, head, encoder, repo, options):
    """The text of README.md. Raises KeyError if the run's files lack something it must say."""
    task, adapters, values = config["task"], config["adapters"], {**config, **metrics}
    choices = head.config["head_type"] == "multiple_choice"
    inputs = "input_ids", "token_type_ids", "attention_mask"
    source = TASKS[task].source if task in TASKS else None
    front = {
        "license": options.license,
        "language": options.language or ("en" if task in TASKS else None),
        "datasets": [source] if source else None,
        "base_model": encoder if encoder.count("/") == 1 else None,
    }
    scores = [(*SCORES[name], metrics[name]) for name in SCORES if metrics.get(name) is not None]
    metric_names = dict.fromkeys(["accuracy", *(hub for _, hub, _ in scores if hub)])
    scores = [f"| {title} on the development set | {value:.4f} |\n" for title, _, value in scores]
    labels = ", ".join(f'"{escape(label)}"' for label in config["labels"])
    share = metrics.get("majority_class_accuracy")
    template = Path(__file__).with_name("card.md").read_text(encoding="utf-8")
    # the parts on adapters and on fusions, of which a card has one
    unwanted = "adapter" if config["stage"] == "fusion" else "fusion"
    template = re.sub(rf"<!-- {unwanted} -->\n.*?<!-- end -->\n", "", template, flags=re.DOTALL)
    template = re.sub(r"<!-- \w+ -->\n", "", template)
    said = "epochs lr batch_size max_length seed dev_examples train_examples best_epoch".split()
    text = Template(template).substitute(
        {name: escape(values[name]) for name in said},
        model_type=bert.config.model_type,
        tag=TAGS.get(task, task),
        front="".join(f"{name}: {json.dumps(value)}\n" for name, value in front.items() if value),
        metric_names="\n".join(f"- {name}" for name in metric_names),
        encoder=encoder,
        repo=repo,
        task=task,
        kind=kind_of(config, bert),
        adapters=", ".join(f"`{name}`" for name in adapters),
        names=json.dumps(adapters),
        labels=f"{len(config['labels'])} choices" if choices else labels,
        accuracy=f"{metrics['accuracy']:.4f}",
        majority="" if share is None else f"; majority class: {share:.4f}",
        scores="".join(scores),
        shape="[examples, choices, tokens]" if choices else "[examples, tokens]",
        column="choice" if choices else "label, in the order above",
        code=f"The code is at <{options.code}>." if options.code else "Run it where that code is.",
        inputs=", ".join(f"{name}.flatten(0, 1)" if choices else name for name in inputs),
    )
    if all(adapters[-1] in module.adapter_names for _, module in fusions(bert)):
        return text
    why = f"The `adapters` library cannot run this fusion: `{adapters[-1]}` is not in all layers."
    return f"{text[: text.index('## With `adapters`')]}{why}\n\n{text[text.index('## Paper') :]}"


def kind_of(config, bert):
    """The architecture of an adapter, in words."""
    if config["stage"] == "fusion":
        return ""
    (adapter, *_) = (slot.adapters[config["task"]] for _, slot in bert.slots() if slot.adapters)
    changes = {"reduction factor": adapter.config.reduction_factor, **config["adapter_config"]}
    words = ", ".join(f"{field} {json.dumps(value)}" for field, value in changes.items())
    return escape(f"{config['adapter']}, {words}")


def check_out(out, overwrite):
    """Raises an error unless `out` is new, empty, or may be replaced."""
    if out.exists() and any(out.iterdir()):
        if not overwrite:
            raise ValueError(f"{out} is not empty: choose another --out, or --overwrite it")
        card_and_head = all((out / name).is_file() for name in ("README.md", "head_config.json"))
        if not card_and_head or (out / "log.jsonl").exists():  # which a run has
            raise ValueError(f"{out} is not a folder that this command wrote: choose another --out")


def write(out, bert, head, config, text):
    """Writes all files into a temporary folder, then moves them. What else is in `out`, for
    instance .git, stays."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as directory:
        temporary = Path(directory)
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


def main(argv=None):
    options = parse(Options, argv, "python -m experiments.publish", __doc__)
    run, name = options.run, Path(os.path.realpath(options.run)).name
    out, repo = options.out or Path("published") / name, options.repo or f"USER/{name}"
    check_out(out, options.overwrite)
    check_stage(run, read_run_config(run), ["adapter", "fusion"], "can be published")
    bert, head, config = load_run(run, model=options.model)  # so it is whole, and will load there
    check_name(config["task"])
    if unknown := unknown_kind(bert):
        raise ValueError(f"{run}: AdapterHub's library has no {unknown}, and cannot read the file")
    encoder = options.encoder or config["model"]
    if options.encoder is None and Path(encoder).is_absolute():
        raise ValueError(
            f"{run} was trained on an encoder in a local directory, {Path(encoder).name}: say "
            "with --encoder what its hub id is"
        )
    for said in (encoder, repo, options.code or ""):  # which the card has in its code
        if re.search(r"[^\w ./@+~:=,()?#%-]", said):
            raise ValueError(f"{said!r:.100} is no name for an encoder, a repository or a place")
    metrics = read_json(run / "metrics.json")
    text = card(config, metrics, bert, head, encoder, repo, options)
    accuracy, share = metrics["accuracy"], metrics.get("majority_class_accuracy")
    if share is not None and accuracy <= share and not options.anyway:
        raise ValueError(
            f"{run} has learned nothing: accuracy {accuracy:.4f}, the majority class alone "
            f"{share:.4f}; --anyway publishes it"
        )
    bert.source = encoder  # into the files
    write(out, bert, head, config, text)
    print(f"{out} is ready: read its README.md, then, for instance: hf upload {repo} {out}")


if __name__ == "__main__":
    run_command("publish.py", main)
