"""`make verify`: is what this project names on the hub still as it was, do the GPU's tests pass on
this machine, and what does BERT-base reach beside the paper's Table 1? With --plan it only says
what it would do. After an interruption the same command goes on. A directory in results/verified/
gets the machine and the outcome of each step, pytest's reports (hub.xml has the hub's commits), and
the table. A training passes if it ends: whether its accuracy is near the paper's is for you to
judge. The exit status is 1 if a step failed."""

import os
import subprocess
import sys
from datetime import date
from pathlib import Path

import torch

from experiments import report, study, tables
from formats.adapterhub import paper_adapters
from formats.files import write_json
from runtime import command
from runtime.record import machine

OUT, RESULTS, GPUS = Path("runs/verify"), Path("results/verified"), torch.cuda.device_count()
PLAN = """Estimated from docs/benchmarks.md, not measured: training takes half an hour on an H200,
30 hours on two CPU cores; then tests, and downloads of 2 GB to HF_HOME (BERT-base, RoBERTa-base, 32
adapters of the authors, 15 tasks). Not checked: UKP's arguments, which are not on the hub; the rest
of Table 1; the reference library, but for recorded outputs (make test-peers). Steps, in order:"""
STEPS = {  # {name: what stands behind python -m}
    "reference": "pytest tests/test_reference.py",
    "hub": "pytest tests/test_hub.py",
    "gpu": "pytest tests/test_cuda_graphs.py tests/test_processes.py::test_a_gpu",
    "two-gpus": "torch.distributed.run --nproc_per_node=2 -m train --stage adapter --task cb "
    f"--out {OUT}/two-gpus --overwrite",
    "table 1": "experiments.tables --tasks rte mrpc cb --systems st_a_16 fusion_st_a "
    f"--seeds 0 1 2 --out {OUT}",  # but here the authors' adapters are fused
}
NEEDED = {"gpu": 1, "two-gpus": 2}  # of NVIDIA's GPUs


def take(name, words, target):
    """What became of a step: "passed", or what is wrong. Its files go into `target`."""
    if GPUS < (needed := NEEDED.get(name, 0)):
        return f"not checked, NVIDIA GPUs needed: {needed}"
    if name == "table 1":
        adapters = " ".join(f"{task}={hub}" for task, hub in paper_adapters("bert").items())
        study.SYSTEMS["fusion_st_a"] = "fusion of the 16", "fusion", f"--adapters {adapters}", ""
        args = tables.parse(words.split()[1:])
        rows, failed = study.run(args)
        report.write_text(target / "table1.csv", rows.to_csv(index=False))
        print(*tables.page(args, rows, "bert"), sep="\n\n")
        return f"failed: {failed}" if failed else "passed"
    words = [sys.executable, "-m", *words.split()]
    if "pytest" in words:  # which names what has failed, and what was skipped
        words += ["-q", "--tb=line", "-rs", f"--junit-xml={target / name}.xml"]
    status = subprocess.run(words, env=os.environ | {"HUB_TESTS": "1"}).returncode
    return f"failed, exit status {status}" if status else "passed"


def main(argv=None):
    parser = command.Parser("python -m experiments.verify", description=__doc__)
    parser.add_argument("--plan", action="store_true", help="say what it does, and do nothing")
    is_plan = parser.parse_args(argv).plan
    print(PLAN, *(f"  {name}: {words}" for name, words in STEPS.items()), sep="\n", flush=True)
    if is_plan:
        return
    for name in ("ADAPTERFUSION_MODEL", "ADAPTERFUSION_DATA_DIR"):  # it is about the hub's
        os.environ.pop(name, None)
    here, outcomes = machine(torch.device("cuda" if GPUS else "cpu")), {}
    target = RESULTS / f"{date.today()}-{str(here['commit'])[:7]}"
    for name, words in STEPS.items():
        outcomes[name] = take(name, words, target)
        write_json(target / "verified.json", {"machine": here, "outcomes": outcomes})
    print("", *(f"{name}: {outcome}" for name, outcome in outcomes.items()), target, sep="\n")
    sys.exit(any(outcome.startswith("failed") for outcome in outcomes.values()))


if __name__ == "__main__":
    command.run_command("verify", main)
