"""How long a grid of runs will take on this machine: a few steps of each kind of run are timed.

The encoder's configuration is enough for that: a model of the same shape with random weights takes
the same time.
"""

import contextlib
import io
import math
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor

import torch

import data
import train
from adapter import ADAPTERS, Head, add_adapter
from bert import Bert, BertConfig
from experiments import grid
from formats.encoder import fetch_encoder, find_config
from formats.rows import find_split
from formats.tokenizer import load_tokenizer
from fusion import add_fusion
from runtime.options import configure
from runtime.processes import choose_device, out_of_memory

BERT_BASE = ("google-bert/bert-base-uncased", "bert-base-uncased")
TOKENS_PER_WORD = 1.2  # of BERT's uncased vocabulary: 1.05 to 1.26 in ten of the paper's tasks


def find_encoder(model, whole=False):
    """
    (configuration, directory of its tokenizer, or None) of an encoder, a directory or a hub id.

    whole: its weights are read, too, so that a damaged encoder is found now. Otherwise they may be
    missing, and BERT-base's configuration is known without a network. Raises FileNotFoundError for
    an encoder that cannot be found, ValueError for one that cannot be read.
    """
    if whole:
        bert = Bert.from_pretrained(model)
        return bert.config, bert.directory
    try:
        directory = fetch_encoder(model, weights=False)
    except FileNotFoundError:
        if model not in BERT_BASE:
            raise
        return BertConfig(), None
    return find_config(directory), directory


def read_split(task, split, data_dir):
    """The rows of a split; where training examples are held out, as many as there will be."""
    source = find_split(task, split, data_dir)
    rows = [row for _, row in source.read()]
    held = min(source.part or 0, len(rows) // 2)
    return rows[:held] if held and split == "validation" else rows[held:]


def sizes(tasks, data_dir):
    """{task: (training examples, development examples)}"""
    return {
        task: tuple(
            len(read_split(data.get_task(task, data_dir), split, data_dir))
            for split in ("train", "validation")
        )
        for task in tasks
    }


def tokens(task, data_dir, words, config, directory):
    """
    The mean number of tokens of an example, with all of its candidates. words: the options of
    train.py; directory: where the tokenizer is. With a tokenizer it is the mean of 500 examples,
    without one an estimate from their words.
    """
    task = data.get_task(task, data_dir)
    longest = int(
        grid.options(words).get("--max-length") or min(task.max_length, config.max_length)
    )
    tokenizer = None
    if directory is not None:
        with contextlib.suppress(FileNotFoundError):
            tokenizer = load_tokenizer(directory, longest, config.vocab_size)
    if tokenizer is not None:
        with contextlib.redirect_stdout(io.StringIO()):
            sample = data.load_split(task, "train", tokenizer, data_dir, limit=500)
        counts = [len(ids) for candidates in sample["input_ids"] for ids in candidates]
        return sum(counts) / len(sample)
    print(f"note: without the encoder's tokenizer, tokens of {task.name} are an estimate")
    rows = read_split(task, "train", data_dir)
    counts = []
    for i in range(0, len(rows), max(1, len(rows) // 500)):
        candidates, _ = data.to_candidates(task, rows[i])
        counts.append(sum(estimated_tokens(pair, longest) for pair in candidates))
    return sum(counts) / len(counts)


def estimated_tokens(pair, longest):
    """Of texts (a, b or None): their words' tokens, [CLS], and a [SEP] after each text."""
    texts = [text for text in pair if text is not None]
    words = sum(len(text.split()) for text in texts)
    return min(longest, TOKENS_PER_WORD * words + 1 + len(texts))


# --------------------------------------------------------------------------------------------------
# Steps of a run


def build(args, adapters, config):
    """(encoder, head, dtype): what the arguments of a train.py would train, with random weights.
    adapters: how many a fusion has"""
    device, dtype = choose_device(args.device, args.dtype)
    whole = args.stage in ("full", "multitask")  # the encoder itself is trained
    bert = Bert(config).to(device, torch.float32 if whole else dtype).requires_grad_(False)
    single = args.stage in ("adapter", "multitask") and args.adapter != "none"
    names = [f"task{i}" for i in range(adapters if args.stage == "fusion" else int(single))]
    for name in names:
        factor = min(args.reduction_factor, config.hidden_size)
        add_adapter(bert, name, configure(ADAPTERS[args.adapter], factor, args.adapter_config))
    if args.stage == "fusion":
        add_fusion(bert, names)
    if whole:
        bert.requires_grad_(True)
    head = Head({"head_type": "classification", "num_labels": 2, "layers": 2}, config)
    return bert, head.to(device), dtype


def measure(args, adapters, config):
    """
    ((a, b), (c, d)): a training step on n tokens takes about a + b·n seconds on this machine, and
    evaluation c + d·n. From a few steps on random tokens, with the encoder and what the arguments
    (of train.py) plug in; fusion is over `adapters`.
    """
    bert, head, dtype = build(args, adapters, config)
    device = bert.device
    trained = [p for p in [*bert.parameters(), *head.parameters()] if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=device.type != "mps")

    def train_step(batch):
        logits = train.predict(bert, head, batch, dtype)
        loss = torch.nn.functional.cross_entropy(logits, batch["labels"].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    @torch.inference_mode()
    def eval_step(batch):
        train.predict(bert, head, batch, dtype)

    rows = math.ceil(args.batch_size / args.grad_accumulation)
    rows = rows if device.type == "cuda" else min(rows, 8)
    short, long = (min(T, config.max_length) for T in (24, 96))
    result = []
    for step in (train_step, eval_step):
        bert.train(step is train_step), head.train(step is train_step)
        seconds = [fastest(step, random_batch(config, rows, T), device) for T in (short, long)]
        slope = max(0.0, seconds[1] - seconds[0]) / (rows * max(1, long - short))
        result.append((max(0.0, seconds[0] - slope * rows * short), slope))
    return result


def random_batch(config, rows, T):
    ids = torch.randint(config.vocab_size // 2, config.vocab_size, (rows, T))
    return {
        "input_ids": ids,
        "token_type_ids": torch.zeros_like(ids),
        "attention_mask": torch.ones_like(ids),
        "labels": torch.zeros(rows, dtype=torch.long),
    }


def fastest(step, batch, device):
    """Seconds of the fastest of three steps, after one that warms up."""
    times = []
    for _ in range(4):
        synchronize(device)
        started = time.perf_counter()
        step(batch)
        synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


# --------------------------------------------------------------------------------------------------
# Hours of a grid


def hours(cells, out, tasks, config, measured):
    """
    {name: (examples per epoch, epochs, hours at most)}: every epoch trained, none saved by early
    stopping.

    tasks: {name: (training examples, dev examples, tokens of an example)}; measured: a dictionary
    in which measurements are kept from one call to the next.
    """
    result = {}
    for cell in cells:
        args = grid.parse(cell, out)
        train_rows, dev_rows, tokens = zip(*(tasks[name] for name in args.tasks), strict=True)
        limited = [min(n, args.limit_train or n) for n in train_rows]
        examples = sum(limited)
        if args.stage == "multitask" and args.steps_per_epoch:
            examples = args.steps_per_epoch * args.batch_size
        # as if examples of several tasks were drawn in proportion to their number
        mean = sum(n * T for n, T in zip(limited, tokens, strict=True)) / sum(limited)
        key = kind_of_run(args)
        if key not in measured:
            measured[key] = measure(args, len(args.adapters), config)
        (a, b), (c, d) = measured[key]
        epoch = examples / args.batch_size * a + examples * mean * b
        for n, T in zip(dev_rows, tokens, strict=True):
            n = min(n, args.limit_dev or n)
            epoch += n / (4 * args.batch_size) * c + n * T * d
        result[cell.name] = examples, args.epochs, args.epochs * epoch / 3600
    return result


def kind_of_run(args):
    """What the time of a step depends on. The bottleneck's size hardly matters; the number of
    adapters does, and how far down the gradient has to go."""
    architecture = len(args.adapters)
    if args.stage == "adapter":
        fields = ("mh_adapter", "output_adapter", "layer_norms")
        architecture = (args.adapter, *(args.adapter_config.get(field) for field in fields))
    return args.stage, architecture, args.batch_size, args.device, args.dtype


def estimate(cells, args, sizes, config, directory):
    """{name: hours at most} of the runs that are to be made; prints their number and sum first. The
    arguments are those of `print_runs`. Empty where nothing is to be made, or memory is too small
    for the measurement."""
    todo = grid.unfinished(cells, args.out, args.part)
    if not todo:
        return {}
    tasks = with_tokens(args, sizes, config, directory)
    print("measuring a few steps of each kind of run ...", flush=True)
    try:
        found = in_another_process(hours, todo, args.out, tasks, config, {}, needed=args.cuda)
    except (MemoryError, RuntimeError) as e:
        if not (isinstance(e, MemoryError) or out_of_memory(e)):
            raise
        print("note: memory is too small to measure how long it takes", flush=True)
        return {}
    found = {name: cost for name, (_, _, cost) in found.items()}
    print(f"{grid.runs(len(todo))}, {on_this_machine(sum(found.values()), args)}", flush=True)
    return found


def in_another_process(function, *arguments, needed):
    """What the function returns. A process that has used a GPU keeps some of it until it ends, and
    may shut others out: so it must be one that ends before others need the GPU."""
    if not needed:
        return function(*arguments)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def on_this_machine(hours, args, more=""):
    """A sum of hours in words."""
    devices = grid.devices(args.jobs, args.cuda)
    where = f"{devices} GPU{'s' if devices > 1 else ''}"
    if not args.cuda:
        where = f"CPU, {os.cpu_count()} cores"
    words = grid.in_words(3600 * hours / devices)
    return (
        f"at most {words} of training on this machine ({where}){more}; early stopping ends most "
        "runs sooner"
    )


def with_tokens(args, sizes, config, directory):
    """sizes, with the tokens of an example"""
    return {
        task: (*rows, tokens(task, args.data_dir, args.rest, config, directory))
        for task, rows in sizes.items()
    }


def print_runs(cells, args, sizes, config, directory, measured):
    """Prints every run with its hours, and returns the sum in words. sizes: as `sizes` gives them;
    directory: as `tokens` takes it; measured: as `hours`."""
    tasks = with_tokens(args, sizes, config, directory)
    print("measuring a few steps of each kind of run ...", flush=True)
    found = hours(cells, args.out, tasks, config, measured)
    left = 0.0
    print(f"{'run':60} {'examples × epochs':>20} {'hours, at most':>15}")
    for name, (examples, epochs, cost) in found.items():
        finished = grid.metrics(args.out, name) is not None
        left += 0.0 if finished else cost
        print(
            f"{name:60} {f'{examples:,} × {epochs}':>20} "
            f"{'finished' if finished else f'{cost:.2f}':>15}"
        )
    total = sum(cost for _, _, cost in found.values())
    hours_left = left / grid.devices(args.jobs, args.cuda)
    to_go = f", {grid.in_words(3600 * hours_left)} of it to go" if left else ", all of it done"
    return f"{grid.runs(len(found))}, {on_this_machine(total, args, to_go)}"
