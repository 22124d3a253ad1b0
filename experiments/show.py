"""What is in a checkpoint, and what does it compute? What will the model see of a task?

python -m experiments.show encoder DIRECTORY_OR_HUB_ID "Some text"
python -m experiments.show task TASK [--data-dir DIR | --train-file FILE] [--model SOURCE]
"""

import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

import train
from bert import Bert, read_config
from formats.encoder import checkpoint_files, fetch_encoder, find_config, read_encoder_config
from formats.tokenizer import load_tokenizer
from runtime.command import run_command
from runtime.forks import imports_option
from runtime.settings import argument, parse, same_option

COMMAND = "python -m experiments.show"


@dataclass(frozen=True)
class EncoderOptions:
    source: str = argument("a directory, a hub id, or minilm", metavar="SOURCE")
    text: str = argument("some text", default="Hello.")
    imports: str | None = imports_option()


def inspect_encoder(argv):
    """Prints the configuration, where each group of weights came from, and the output at [CLS]."""
    options = parse(EncoderOptions, argv, f"{COMMAND} encoder", "Shows what is in a checkpoint.")
    bert = Bert.from_pretrained(options.source)
    sizes = bert.config.max_length, bert.config.vocab_size, bert.config.type_vocab_size
    encoding = load_tokenizer(bert.directory, *sizes).encode(options.text)
    h = bert(torch.tensor([encoding.ids]), torch.tensor([encoding.type_ids]))  # [1, T, d]
    print(bert.config)
    count = sum(p.numel() for p in bert.parameters())
    print(f"{count:>12,} parameters from {checkpoint_files(bert.directory)[1]}:")
    groups = {}  # module, all layers together -> (parameters, {weight or bias: name in the file})
    for name, parameter in bert.named_parameters():
        module, kind = re.sub(r"layers\.\d+", "layers.*", name).rsplit(".", 1)
        stored = re.sub(r"layer([._])\d+", r"layer\1*", bert.checkpoint_names[name])
        size, names = groups.get(module, (0, {}))
        groups[module] = size + parameter.numel(), {**names, kind: stored}
    for module, (size, names) in groups.items():
        print(f"{size:>12,} {module:<35} from {', '.join(names.values())}")
    print(" ".join(encoding.tokens))
    print("[CLS]", " ".join(f"{value:.5f}" for value in h[0, 0, :8].tolist()))


@dataclass(frozen=True)
class TaskOptions:
    task: str = argument("one of the paper's tasks, or your own")
    data_dir: str | None = same_option(train.Settings, "data_dir", group=None)
    train_file: Path | None = same_option(train.Settings, "train_file", group=None)
    dev_file: Path | None = same_option(train.Settings, "dev_file", group=None)
    column_names: dict[str, str] = same_option(train.Settings, "column_names", group=None)
    dev_fraction: float | None = same_option(train.Settings, "dev_fraction", group=None)
    model: str | None = same_option(train.Settings, "model", group=None)
    imports: str | None = imports_option()


def inspect_task(argv):
    """Prints sizes, classes, lengths and the first examples of a task."""
    options = parse(TaskOptions, argv, f"{COMMAND} task", "Shows what the model will see of it.")
    settings = train.Settings(stage="head", **vars(options)).with_defaults()
    task, directory = train.find_task(settings), fetch_encoder(settings.model, weights=False)
    path = find_config(directory)
    config = read_config(path, read_encoder_config(path))
    settings = settings.for_task(task, config)
    # as train.py does, which then finds the tokens in the cache
    encoder = SimpleNamespace(directory=directory, config=config)
    train_set, dev_set = train.load_data(settings, task, encoder)
    tokenizer, limit = load_tokenizer(directory, settings.max_length), settings.max_length
    choices = f"one of {len(task.labels)} choices"
    print(f"{task.name}: {choices if task.is_multiple_choice else ', '.join(task.labels)}")
    for name, split in {"validation": dev_set, "train": train_set}.items():
        lengths = split.with_format("numpy")["length"][:]
        counts = Counter(split["label"][:])
        shares = [f"{label} {counts[i] / len(split):.1%}" for i, label in enumerate(task.labels)]
        tokens = " / ".join(f"{np.percentile(lengths, p):.0f}" for p in (5, 50, 95, 100))
        print(f"{name}: {len(split):,} examples; {', '.join(shares)}")
        print(f"    {tokens} tokens (5th, 50th, 95th, 100th percentile)")
        print(f"    {np.mean(lengths >= limit):.1%} at the limit of {limit}")
    for row in train_set.select(range(min(3, len(train_set)))):
        print(f"\n{task.labels[row['label']]}")
        for i, ids in enumerate(row["input_ids"]):
            mark = "*" if task.is_multiple_choice and i == row["label"] else " "
            print(f"  {mark} {' '.join(map(tokenizer.id_to_token, ids))}")


def main(argv=None):
    what, *words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if what in ("-h", "--help"):
        return print(__doc__)
    if what not in ("encoder", "task"):
        raise ValueError(f"it takes `encoder SOURCE` or `task TASK`, not {what!r:.50}")
    return inspect_encoder(words) if what == "encoder" else inspect_task(words)


if __name__ == "__main__":
    run_command("show", main)
