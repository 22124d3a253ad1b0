"""Writes a folder that is ready for upload from a finished adapter or fusion run. It uploads
nothing.

    python -m experiments.publish runs/rte [--repo USER/rte] [--encoder HUB_ID]

The folder holds AdapterHub's files, for a fusion also those of its adapters (adapters/NAME), and
README.md, a model card that says what it is, how good, and how to load it here and with
AdapterHub's library (its text: experiments/card.md). It names no path of this machine: for an
encoder that was a local directory --encoder must give its hub id.
"""

import json
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from string import Template

from adapter import save_adapter, save_head
from data import TASKS
from experiments.load_run import Reading, load_run, read_run_config, unknown_kind
from formats.adapterhub import check_name
from formats.files import read_json
from fusion import fusions, save_fusion
from runtime.command import run_command
from runtime.settings import argument, like, option, parse

# {stage: how the files are loaded here, and with AdapterHub's library}
LOAD = {
    "adapter": (
        "activate(bert, load_adapter(bert, directory))",
        "model.load_adapter(directory, use_safetensors=True, set_active=True)",
    ),
    "fusion": (
        """for name in $names:
    load_adapter(bert, f"{directory}/adapters/{name}")
load_fusion(bert, directory)""",
        """for name in $names:
    model.load_adapter(f"{directory}/adapters/{name}", use_safetensors=True)
model.load_adapter_fusion(directory, use_safetensors=True, set_active=True)""",
    ),
}


@dataclass(frozen=True)
class Options:
    run: Path = argument("an adapter or a fusion run")
    out: Path | None = option(None, "default published/RUN")
    repo: str | None = option(None, "hub repository that the card names; default USER/RUN")
    encoder: str | None = option(None, "the encoder's hub id, if it was a local directory")
    model: str | None = like(Reading, "model")


def escape(text):
    """A text from data, as Markdown and HTML show it: with nothing in it that either obeys."""
    return re.sub(r"[^\w ,.-]", lambda found: f"&#{ord(found[0])};", str(text))


def card(config, metrics, bert, head, encoder, repo):
    """The text of README.md. Raises KeyError if the run's files lack something it must say."""
    task, adapters, values = config["task"], config["adapters"], {**config, **metrics}
    choices = head.config["head_type"] == "multiple_choice"
    said = "epochs lr batch_size max_length seed dev_examples train_examples best_epoch".split()
    texts = {name: escape(values[name]) for name in said}
    template = Path(__file__).with_name("card.md").read_text(encoding="utf-8")
    for name, code in zip(("load_here", "load_there"), LOAD[config["stage"]], strict=True):
        template = template.replace(f"${name}", code)
    labels = ", ".join(f'"{escape(label)}"' for label in config["labels"])
    scores = [name for name in ("macro_f1", "f1", "matthews", "dev_loss") if name in metrics]
    share = metrics.get("majority_class_accuracy")
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    inputs = [f"{name}.flatten(0, 1)" if choices else name for name in inputs]
    on_hub = TASKS[task].hub if task in TASKS else None
    text = Template(template).substitute(
        texts,
        model_type=bert.config.model_type,
        datasets=f'datasets: ["{on_hub[0]}"]\n' if on_hub else "",
        encoder=encoder,
        repo=repo,
        task=task,
        what=what(config, bert),
        names=json.dumps(adapters),
        labels=f"{len(config['labels'])} choices" if choices else labels,
        accuracy=f"{metrics['accuracy']:.4f}",
        majority="" if share is None else f"; majority class: {share:.4f}",
        scores="".join(f"| {name} there | {metrics[name]:.4f} |\n" for name in scores),
        shape="[examples, choices, tokens]" if choices else "[examples, tokens]",
        column="choice" if choices else "label, in the order above",
        inputs=", ".join(inputs),
        mask=inputs[-1],
    )
    if all(adapters[-1] in module.adapter_names for _, module in fusions(bert)):
        return text
    why = f"The `adapters` library cannot run this fusion: `{adapters[-1]}` is not in all layers."
    return f"{text[: text.index('## With `adapters`')]}{why}\n"


def what(config, bert):
    """What a run has trained, in words."""
    if config["stage"] == "fusion":
        return f"AdapterFusion over {', '.join(f'`{name}`' for name in config['adapters'])}"
    (adapter, *_) = (slot.adapters[config["task"]] for _, slot in bert.slots() if slot.adapters)
    changes = {"reduction_factor": adapter.config.reduction_factor, **config["adapter_config"]}
    words = [f"{field} {json.dumps(value)}" for field, value in changes.items()]
    return f"Adapter ({escape(', '.join([config['adapter'], *words]))})"


def write(out, bert, head, config, text):
    """Writes all files into a temporary folder, which then takes the place of `out`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as directory:
        complete = Path(directory) / "folder"
        complete.mkdir()
        if config["stage"] == "adapter":
            save_adapter(bert, config["task"], complete)
        else:
            save_fusion(bert, complete)
        for name in config["adapters"]:
            save_adapter(bert, name, complete / "adapters" / name)
        save_head(head, bert, config["task"], complete)
        (complete / "README.md").write_text(text, encoding="utf-8")
        complete.rename(out)


def main(argv=None):
    options = parse(Options, argv, "python -m experiments.publish", __doc__)
    run, name = options.run, Path(os.path.realpath(options.run)).name
    out, repo = options.out or Path("published") / name, options.repo or f"USER/{name}"
    if out.exists():
        raise ValueError(f"{out} is already there: choose another --out, or remove it")
    stage = read_run_config(run)["stage"]
    if stage not in ("adapter", "fusion"):
        raise ValueError(
            f"{run} is of --stage {stage}: only adapter and fusion runs can be published"
        )
    bert, head, config = load_run(run, model=options.model)  # so it is whole, and will load there
    check_name(config["task"])
    if unknown := unknown_kind(bert, head):
        raise ValueError(f"{run}: AdapterHub's library has no {unknown}, and cannot read the file")
    encoder = options.encoder or config["model"]
    if options.encoder is None and (encoder == "minilm" or Path(encoder).is_absolute()):
        raise ValueError(f"{run}: say with --encoder what the hub id of {encoder} is")
    for said in (encoder, repo):  # which the card has in its code
        if not re.fullmatch(r"[\w./@+-]+", said):
            raise ValueError(f"{said!r:.100} is no name for an encoder or a repository")
    text = card(config, read_json(run / "metrics.json"), bert, head, encoder, repo)
    bert.source = encoder  # into the files
    write(out, bert, head, config, text)
    print(f"{out} is ready: read its README.md, add a license, then: hf upload {repo} {out}")


if __name__ == "__main__":
    run_command("publish.py", main)
