"""`python bert.py SOURCE ["Some text"]`: what is in a checkpoint, and does it work?
`python data.py TASK`: what the model will see of a task."""

import re
from collections import Counter
from dataclasses import replace
from itertools import islice

import numpy as np
import torch

from formats.encoder import checkpoint_files, fetch_encoder, find_config
from formats.files import listed
from formats.tokenizer import load_tokenizer
from runtime.command import errors_in_one_line
from runtime.options import Parser, add_data_options, as_columns


def inspect_encoder(load):
    """Prints the configuration, where each group of weights came from, and the output at [CLS].
    load(source): the model"""
    parser = Parser(description="Shows what is in an encoder's checkpoint, and what it computes.")
    parser.add_argument("source", metavar="SOURCE", help="a directory or a hub id")
    parser.add_argument("text", nargs="?", default="", help="some text, default: Hello.")
    with errors_in_one_line("bert.py"):
        args = parser.parse_args()
        bert = load(args.source)
        sizes = bert.config.max_length, bert.config.vocab_size, bert.config.type_vocab_size
        tokenizer = load_tokenizer(bert.directory, *sizes)
        text = args.text.encode().decode() or "Hello."  # refuses bytes that are not UTF-8
        encoding = tokenizer.encode(text)
        h = bert(torch.tensor([encoding.ids]), torch.tensor([encoding.type_ids]))  # [1, T, d]
        if not h.isfinite().all():
            broken = listed([name for name, p in bert.named_parameters() if not p.isfinite().all()])
            raise ValueError(
                f"{bert.directory}: the output is not finite, nor are these weights: "
                f"{broken or 'none'}"
            )
    print(bert.config)
    count = sum(p.numel() for p in bert.parameters())
    print(f"{count:>12,} parameters from {checkpoint_files(bert.directory)[1]}:")
    groups = {}  # module, all layers together -> (parameters, {kind: name in the file})
    for name, parameter in bert.named_parameters():
        module, kind = re.sub(r"layers\.\d+", "layers.*", name).rsplit(".", 1)
        stored = re.sub(r"layer([._])\d+", r"layer\1*", bert.origin[name])
        size, found = groups.get(module, (0, {}))
        groups[module] = size + parameter.numel(), {**found, kind: stored}
    for module, (size, found) in groups.items():
        print(f"{size:>12,} {module:<35} from {', '.join(found.values())}")
    print(" ".join(encoding.tokens))
    print("[CLS]", " ".join(f"{value:.5f}" for value in h[0, 0, :8].tolist()))


def inspect_task(data):
    """`python data.py TASK`: prints what the model will see of a task. data: the module."""
    parser = Parser(description="Shows what the model will see of a task.")
    parser.add_argument("task")
    add_data_options(parser)
    parser.add_argument(
        "--model", default="google-bert/bert-base-uncased", help="an encoder, for its tokenizer"
    )
    with errors_in_one_line("data.py"):
        args = parser.parse_args()
        task = data.get_task(args.task, args.data_dir, columns=as_columns(args.column_names))
        directory = fetch_encoder(args.model)
        config = find_config(directory)
        # as train.py has it, so that it finds the tokens in the cache
        task = replace(task, max_length=min(task.max_length, config.max_length))
        tokenizer = load_tokenizer(
            directory, task.max_length, config.vocab_size, config.type_vocab_size
        )
        splits = {
            name: data.load_split(
                task, name, tokenizer, args.data_dir, dev_fraction=args.dev_fraction
            )
            for name in ("train", "validation")
        }
    print(
        f"{args.task}: "
        f"{f'one of {len(task.labels)} choices' if task.choices else ', '.join(task.labels)}"
    )
    for name, split in splits.items():
        lengths = split.with_format("numpy")["length"][:]
        counts = Counter(split["label"][:])
        balance = ", ".join(
            f"{label} {counts[i] / len(split):.1%}" for i, label in enumerate(task.labels)
        )
        tokens = " / ".join(f"{np.percentile(lengths, p):.0f}" for p in (5, 50, 95, 100))
        some = islice(data.batches(split, 32, seed=0), 100)
        masks = [mask for batch in some for _, (_, _, mask) in data.split_by_length(batch)]
        padding = 1 - sum(mask.sum().item() for mask in masks) / sum(mask.numel() for mask in masks)
        print(f"{name}: {len(split):,} examples; {balance}")
        print(
            f"    {tokens} tokens (5th, 50th, 95th, 100th percentile), "
            f"{np.mean(lengths >= task.max_length):.1%} at the "
            f"limit of {task.max_length}, {padding:.1%} padding in batches of 32"
        )
    for row in splits["train"].select(range(min(3, len(splits["train"])))):
        print(f"\n{task.labels[row['label']]}")
        for i, (ids, types) in enumerate(zip(row["input_ids"], row["token_type_ids"], strict=True)):
            print("  *" if task.choices and i == row["label"] else "   ", end="")
            for segment in sorted(set(types)):
                tokens = [
                    tokenizer.id_to_token(id)
                    for id, type in zip(ids, types, strict=True)
                    if type == segment
                ]
                print(f" {segment}: {' '.join(tokens)}", end="")
            print()
