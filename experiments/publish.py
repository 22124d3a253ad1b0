"""Writes a folder that is ready for upload from a finished adapter or fusion run. It uploads
nothing.

    python -m experiments.publish runs/rte [--repo USER/rte] [--encoder HUB_ID]

The folder holds AdapterHub's files, for a fusion also those of its adapters (adapters/NAME), and
README.md, a model card that says what it is, how good, and how to load it here and with
AdapterHub's library (its text: experiments/card.md). It names no path of this machine: for an
encoder that was a local directory --encoder must give its hub id.
"""

import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from adapter import adapter_modules, save_adapter, save_head
from data import TASKS, Classification, MultipleChoice
from experiments.load_run import Reading, load_run, read_finished, unknown_kind
from formats.adapterhub import MODEL_CLASSES, check_name
from formats.files import read_json
from fusion import fusions, save_fusion
from runtime.command import run_command
from runtime.settings import argument, option, parse, same_option


@dataclass(frozen=True)
class Options:
    run: Path = argument("an adapter or a fusion run")
    out: Path | None = option(None, "default published/RUN")
    repo: str | None = option(None, "hub repository that the card names; default USER/RUN")
    encoder: str | None = option(None, "the encoder's hub id, if it was a local directory")
    model: str | None = same_option(Reading, "model")
    imports: str | None = same_option(Reading, "imports")


def escape(text):
    """A text from data, as Markdown and HTML show it: with nothing in it that either obeys."""
    return re.sub(r"[^\w ,.-]", lambda found: f"&#{ord(found[0])};", str(text))


def card(run, encoder, repo):
    """The text of README.md."""
    bert, head, record = run
    task = run.task.name
    on_hub = TASKS[task].hub if task in TASKS else None
    data = ModelCardData(
        tags=["adapter-transformers", "adapters", bert.config.model_type],
        metrics=["accuracy"],
        base_model=encoder,
        datasets=[on_hub[0]] if on_hub else None,
    )
    choices = head.config["head_type"] == "multiple_choice"
    labels = ", ".join(f'"{escape(label)}"' for label in run.task.labels)
    fused = [module.adapter_names for _, module in fusions(bert)]
    values = {
        "task": task,
        "encoder": encoder,
        "repo": repo,
        "what": what(run),
        "adapters": run.adapters,
        "metrics": read_json(run.directory / "metrics.json"),
        "options": record.options,
        "max_length": record.tasks[task].max_length,
        "choices": choices,
        "labels": f"{len(run.task.labels)} choices" if choices else labels,
        # the reference reads the last one's configuration in every layer
        "in_all_layers": all(run.adapters[-1] in names for names in fused),
    }
    template = Path(__file__).with_name("card.md")
    return ModelCard.from_template(data, str(template), **values).content


def what(run):
    """What a run has trained, in words."""
    if run.record.stage == "fusion":
        return f"AdapterFusion over {', '.join(f'`{name}`' for name in run.adapters)}"
    config, _ = adapter_modules(run.bert, run.task.name)
    options = run.record.options
    changes = {"reduction_factor": config.reduction_factor, **options["adapter_config"]}
    words = [f"{field} {json.dumps(value)}" for field, value in changes.items()]
    return f"Adapter ({escape(', '.join([options['adapter'], *words]))})"


def write(out, run, text):
    """Writes all files into a temporary folder, which then takes the place of `out`."""
    bert, head, record = run
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as directory:
        complete = Path(directory) / "folder"
        complete.mkdir()
        if record.stage == "adapter":
            save_adapter(bert, run.task.name, complete)
        else:
            save_fusion(bert, complete)
        for name in run.adapters:
            save_adapter(bert, name, complete / "adapters" / name)
        save_head(head, bert, run.task.name, complete)
        (complete / "README.md").write_text(text, encoding="utf-8")
        complete.rename(out)


def main(argv=None):
    options = parse(Options, argv, "python -m experiments.publish", __doc__)
    run, name = options.run, options.run.resolve().name
    out, repo = options.out or Path("published") / name, options.repo or f"USER/{name}"
    if out.exists():
        raise ValueError(f"{out} is already there: choose another --out, or remove it")
    stage = read_finished(run).stage
    if stage not in ("adapter", "fusion"):
        raise ValueError(f"{run} is of --stage {stage}: only adapters and fusions can be published")
    loaded = load_run(run, model=options.model)  # so it is whole, and will load there
    check_name(loaded.task.name)
    unknown = unknown_kind(loaded.bert, loaded.head)
    if loaded.bert.config.model_type not in MODEL_CLASSES:
        unknown = f"encoders like this one ({type(loaded.bert).__name__})"
    if loaded.task.type not in (Classification, MultipleChoice):
        unknown = f"tasks like this one ({loaded.task.type.__name__})"
    if unknown:
        raise ValueError(f"{run}: AdapterHub's library has no {unknown}, and cannot read the file")
    encoder = options.encoder or loaded.record.options["model"]
    if options.encoder is None and (encoder == "minilm" or Path(encoder).is_absolute()):
        raise ValueError(f"{run}: say with --encoder what the hub id of {encoder} is")
    for said in (encoder, repo):  # which the card has in its code
        if not re.fullmatch(r"[\w./@+-]+", said):
            raise ValueError(f"{said!r:.100} is no name for an encoder or a repository")
    loaded.bert.source = encoder  # into the files
    write(out, loaded, card(loaded, encoder, repo))
    print(f"{out} is ready: read its README.md, add a license, then: hf upload {repo} {out}")


if __name__ == "__main__":
    run_command("publish.py", main)
