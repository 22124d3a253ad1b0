"""Stages for base_size_controls.sh and one_source.sh: an adapter, or its U, trained further.

python train.py --stage further --import results.further --task rte --adapters runs/mnli
python -m results.further runs/further-rte    # its accuracy on the examples left over"""

import sys
from functools import partial

import examples.mpnet  # noqa: F401  (its kind of encoder)
import train
from adapter import activate
from experiments.load_run import load_run


def build(part, args, bert, task):
    (name,) = bert.adapter_configs
    activate(bert, name)
    for path, p in bert.named_parameters():
        p.requires_grad_(".adapters." in path and part in path)


train.STAGES["further"] = {"lr": 1e-4, "epochs": 30, "build": partial(build, "")}
train.STAGES["up"] = {"lr": 1e-4, "epochs": 30, "build": partial(build, ".up.")}  # with b_U

if __name__ == "__main__":
    for directory in sys.argv[1:]:
        run = load_run(directory)
        scores = train.evaluate(run.model, run.task, run.left_over(), run.args)
        print(f"{directory}: {scores['accuracy']:.4f}", flush=True)
