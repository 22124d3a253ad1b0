"""What text_or_library.sh trains: two fusions as the paper's text has them, where it differs from
the reference library, and a head that reads all tokens. As a program, the rows of its runs:

python -m results.text_or_library runs
"""

import sys
from pathlib import Path

import torch
from torch import nn

import train
from adapter import Head, register_head
from experiments.load_run import as_trained, load_run
from experiments.report import write_csv
from formats.files import read_json
from fusion import Fusion, register


class QueryF(Fusion):
    """The query is f, the output of the feed-forward sub-layer (section 3.2), not LN(f + x)."""

    file_tag = {"query": "f"}
    mixes_tokens = False

    def forward(self, f, x, norm, adapters, layer_input=None):
        h, residual = adapters[-1].inputs(f, x, norm)
        z = torch.stack([adapter.z(h, layer_input) for adapter in adapters], 2)  # [B, T, N, d]
        s = self.weigh(torch.einsum("btd,btnd->btn", self.query(f), self.key(z)))  # [B, T, N]
        o = torch.einsum("btn,btnd->btd", s, self.value(z))
        return adapters[-1].add_and_norm(o + residual, x, norm)


class RandomV(Fusion):
    """V starts from N(0, std) beside its diagonal (section 4.1), not from 1e-6."""

    file_tag = {"kind": "random V"}
    config_defaults = {"std": 1e-6}
    mixes_tokens = False

    def __init__(self, *values, **config):
        super().__init__(*values, **config)
        with torch.no_grad(), torch.random.fork_rng():  # all else starts as in the other fusion
            nn.init.normal_(self.value.weight, std=self.config["std"]).fill_diagonal_(1.0)


class MeanHead(Head):
    """The mean over the real tokens takes the place of [CLS]."""

    def forward(self, h, mask):
        mask = mask[..., None].to(h.dtype)  # [B·C, T, 1]
        return self.logits((h * mask).sum(1) / mask.sum(1))


register("query_f", QueryF)
register("random_v", RandomV)
register_head("mean", MeanHead)


VARIANTS = "query_f random_v random_v_larger without_last pruned mean without_last_mean".split()


def row(run):
    """test_accuracy: on the training examples that the run was not given, as composition --test"""
    loaded, metrics = load_run(run), read_json(run / "metrics.json")
    model, examples = as_trained(loaded, "cpu"), loaded.left_over()
    test = train.evaluate(model, loaded.task, examples, loaded.eval_batch_size)["accuracy"]
    record = loaded.record
    accuracies = metrics["accuracy"], round(test, 4)
    return [*accuracies, metrics["best_epoch"], record.commit, record.processor]


if __name__ == "__main__":
    study, rows = Path(sys.argv[1]), []
    found = {"fusion": study / "composition-2" / "runs" / "fusion-240"}
    for variant, path in (found | {name: study / "variants" / name for name in VARIANTS}).items():
        rows += [[variant, seed, *row(Path(f"{path}-{seed}"))] for seed in (0, 1, 2)]
    header = "variant,seed,accuracy,test_accuracy,best_epoch,commit,processor".split(",")
    write_csv(Path(__file__).with_suffix(".csv"), header, rows)
