"""Cross-fitting: a fusion that has the target's own adapters, and does not trust them too much.

    python examples/cross_fitting.py --stage adapter --task rte --half 0 --out runs/rte-half-0
    python examples/cross_fitting.py --stage adapter --task rte --half 1 --out runs/rte-half-1
    python examples/cross_fitting.py --stage fusion --task rte \\
        --adapters runs/mnli runs/qqp runs/rte-half-0 runs/rte-half-1

In the paper the target's own adapter is trained on D_n, and Ψ on the same D_n (section 3.1). With
few examples the adapter knows them by heart, and Ψ learns to trust it. An upper model must not be
trained on what the lower ones have seen (Wolpert, Stacked generalization, 1992). So there are two
own adapters here, each trained on one half. A step of Ψ has examples of one half, and the adapter
that has seen them is masked (the cross-fitting of Chernozhukov et al., 2018): Ψ is trained on all
examples, and never on what an adapter has seen. In evaluation both adapters are there.

A fusion can take --half, too: Ψ is then trained on that half, and given the own adapter of the
other. Nothing has to be masked, but Ψ sees only half of the examples.
"""

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # found from any directory

import train
from adapter import copy_adapters
from data import collate, length_bucketed_batches
from fusion import fusion_regularization
from runtime.command import run_command
from runtime.directory import check_out, is_finished
from runtime.processes import choose_device
from runtime.run import open_run
from runtime.seen import NOTABLE, hashes_of, share_seen
from runtime.settings import option, same_option
from train import finished_result  # experiments.grid also calls it, by this module's name
from variants.masking import mask


@dataclass(frozen=True)
class Settings(train.Settings):
    stage: str = same_option(train.Settings, "stage", choices=["adapter", "fusion"])
    half: int | None = option(
        None,
        "train on this half only; without it, a fusion trains on both, and each batch masks the "
        "adapter that was trained on its half",
        choices=[0, 1],
        needed_by=("adapter",),
        group="halves",
    )

    def with_defaults(self):
        if self.out is not None or self.half is None:
            return super().with_defaults()
        prefix = "" if self.stage == "adapter" else f"{self.stage}-"
        out = Path(f"runs/{prefix}{self.task}-half-{self.half}")
        return replace(self, out=out).with_defaults()


def halves_of(train_set):
    """0 or 1 for each example, by its texts and label: an example is in the same half whatever
    --limit-train draws, and so is a duplicate of it."""
    return (hashes_of(train_set) % 2).astype(int)


def own_adapters(adapters, train_set):
    """[name of the adapter trained on half 0, on half 1], found by what the adapters, {name:
    AdapterRecord}, have seen. Raises ValueError unless there is one of each."""
    hashes, halves, own = hashes_of(train_set), halves_of(train_set), ([], [])
    for name, adapter in adapters.items():
        if adapter.sketch is None:  # a note says that it is unknown
            continue
        shares = [share_seen(hashes[halves == half], adapter.sketch) for half in (0, 1)]
        if None in shares:  # trained on far more examples than one half has
            continue
        if sorted(shares) == [0, 1]:  # it has seen one half, whole
            own[shares.index(1)].append(name)
        elif max(shares) >= NOTABLE:
            seen = f"has seen {shares[0]:.0%} of half 0 and {shares[1]:.0%} of half 1"
            advice = "train it with --half, and with the data, --limit-train and --seed of this run"
            raise ValueError(f"adapter {name!r} {seen} of the training examples: {advice}")
    for half, names in enumerate(own):
        if len(names) != 1:
            have = f"--adapters has {' and '.join(names) or 'none'}"
            raise ValueError(f"one adapter trained on --half {half} of this task is needed: {have}")
    return [name for (name,) in own]


def batches_by_half(lengths, halves, batch_size, seed):
    """[(half, indices)] of an epoch, each batch from one half."""
    found = []
    for half in (0, 1):
        (mine,) = np.nonzero(halves == half)
        parts = length_bucketed_batches(lengths[mine], batch_size, seed)
        found += [(half, mine[part]) for part in parts]
    return [found[i] for i in np.random.default_rng(seed).permutation(len(found))]


def train_by_halves(settings):
    """As train.train. What differs is marked with ##."""
    settings = settings.with_defaults()
    if settings.resume and is_finished(settings.out):
        return finished_result(settings)
    check_out(settings)

    device, dtype = choose_device(settings.device, settings.dtype)
    task = train.find_task(settings)
    ## what stage 1 calls its adapter; a fusion does not use it
    half_task = replace(task, name=f"{task.name}-half-{settings.half}")
    model, adapter_dirs = train.build(settings, half_task, device, dtype)
    bert = model.bert
    settings = settings.for_task(task, bert.config)
    train_set, dev_set = train.load_data(settings, task, bert)
    if settings.half is not None:  ##
        train_set = train_set.select(np.flatnonzero(halves_of(train_set) == settings.half))
        if not len(train_set):
            raise ValueError(f"half {settings.half} of the training examples is empty")
    lengths, halves = train_set.with_format("numpy")["length"][:], halves_of(train_set)  ##
    steps = len(batches_by_half(lengths, halves, settings.batch_size, seed=0))  ##
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = train.make_optimizer(trainable, settings.lr, settings.weight_decay)
    train.check_savable(model, task.name, adapter_dirs)
    record = train.describe_run(settings, task, bert, adapter_dirs, dtype)
    record = record.with_training(
        train.trained_parts(model), trainable, steps, {task.name: (train_set, dev_set)}, device
    )
    own = []  ##
    if settings.half is None:  ## stage 1 always has a half, so this is a fusion
        own = own_adapters(record.loaded_adapters, train_set)
    else:  ##
        for name, adapter in record.loaded_adapters.items():
            if (adapter.seen_train or 0) >= NOTABLE:
                seen = f"has seen {adapter.seen_train:.0%} of half {settings.half}"
                raise ValueError(f"adapter {name!r} {seen}: it must be one of the other half")

    state = train.TrainState(loss=torch.zeros((), device=device))
    save_best = partial(train.save, settings.out, task.name, model, state, trainable)
    with open_run(settings, record, device, save_best) as run:
        if run.is_new and run.rank == 0:
            copy_adapters(adapter_dirs, settings.out / "adapters", bert.config)
        run.start(state, trainable, optimizer)
        if own:  ##
            run.say(f"note: {' and '.join(own)} are masked in the batches that they have seen")
        ddp_model = run.distribute(model)
        while state.epoch <= settings.epochs and (
            state.epoch - state.best_epoch <= settings.patience
        ):
            seed = settings.seed, state.epoch
            every = batches_by_half(lengths, halves, settings.batch_size, seed)  ##
            remaining = every[state.step :]
            model.train()
            for half, indices in run.progress(remaining, state):  ##
                if own:  ## the adapter that has seen these examples
                    mask(bert, [own[half]])
                done = ((state.epoch - 1) * steps + state.step) / (steps * settings.epochs)
                train.set_lr(optimizer, settings.lr * train.lr_factor(done, settings.warmup))
                step_loss = torch.zeros((), device=device)
                for weight, part in run.micro_batches(indices):
                    batch = collate(train_set[part], bert.config.pad_token_id)
                    loss = task.type.loss(ddp_model(batch), batch["labels"].to(device))
                    (weight * (loss + fusion_regularization(bert))).backward()
                    step_loss += weight * loss.detach()
                nn.utils.clip_grad_norm_(trainable.values(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                state.loss += run.mean(step_loss)
                state.step += 1
                run.after_step(state)

            if own:  ## no adapter has seen the development set
                mask(bert, [])
            scores = train.evaluate(model, task, dev_set, settings.eval_batch_size)
            if scores[settings.score] > state.best_score:
                state.keep_best(scores, scores[settings.score], trainable)
            run.log_epoch(state, scores)
            state.next_epoch()
            run.checkpoint(state)
        return run.finish(state)


def main(argv=None):
    return train.main(argv, Settings, train_by_halves)


if __name__ == "__main__":
    run_command("cross_fitting.py", main)
