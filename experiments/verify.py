"""`make verify`: is what this project names on the hub still as it was, do the GPU's tests pass on
this machine, and what does BERT-base reach beside the paper's Table 1? With --plan it only says
what it would do. After an interruption the same command goes on. A file in results/verified/ gets
the outcome of each check. A training passes if it ends: whether its accuracy is near the paper's is
for you to judge. The exit status is 1 if a check failed."""

import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

import torch

from experiments import study, tables
from formats.adapterhub import paper_adapters
from formats.files import read_json, write_json
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


def take(name, words):
    """{the step, or each of its tests: its check}, with the commits of the hub that a test saw"""
    file, words, found = OUT / f"{name}.xml", [sys.executable, "-m", *words.split()], {}
    is_tests = "pytest" in words
    words += f"-q --tb=no --junit-xml={file} -o junit_family=xunit1".split() if is_tests else []
    done = subprocess.run(words, env=os.environ | {"HUB_TESTS": "1"} if name == "hub" else None)
    if done.returncode not in ((0, 1) if is_tests else (0,)):  # 1: a test has failed
        return {name: {"outcome": "failed", "message": f"exit status {done.returncode}"}}
    for case in ElementTree.parse(file).iter("testcase") if is_tests else ():
        commits = {p.get("name"): p.get("value") for p in case.iter("property")}
        check = found[f"{name}: {case.get('name')}"] = {"outcome": "passed", "commits": commits}
        for problem in (part for part in case if part.tag in ("failure", "error", "skipped")):
            check["outcome"] = "not checked" if problem.tag == "skipped" else "failed"
            check["message"] = " ".join(problem.get("message").split())[:300]
    return found or {name: {"outcome": "passed"}}


def table_1(words):
    """{the table, or a run that failed: its check}; prints the table"""
    adapters = " ".join(f"{name}={hub}" for name, hub in paper_adapters("bert").items())
    study.SYSTEMS["fusion_st_a"] = "fusion of the 16", "fusion", f"--adapters {adapters}", ""
    args = tables.parse(words.split()[1:])
    rows, failed = study.run(args)
    print(*tables.page(args, rows, "bert"), sep="\n\n")
    found = {name: {"outcome": "failed", "message": why} for name, why in failed.items()}
    return found | {"table 1": {"outcome": "passed", "rows": json.loads(rows.to_json())}}


def main(argv=None):
    parser = command.Parser("python -m experiments.verify", description=__doc__)
    parser.add_argument("--plan", action="store_true", help="say what it does, and do nothing")
    is_plan = parser.parse_args(argv).plan
    print(PLAN, *(f"  {name}: {words}" for name, words in STEPS.items()), sep="\n", flush=True)
    if is_plan:
        return
    for name in ("ADAPTERFUSION_MODEL", "ADAPTERFUSION_DATA_DIR"):  # it is about the hub's
        os.environ.pop(name, None)
    files, here = sorted(RESULTS.glob("*.json")), machine(torch.device("cuda" if GPUS else "cpu"))
    before = read_json(files[-1])["checks"] if files else {}
    target, checks = RESULTS / f"{date.today()}-{str(here['commit'])[:7]}.json", {}
    for name, words in STEPS.items():
        if GPUS < (needed := NEEDED.get(name, 0)):
            found = {name: {"outcome": "not checked", "message": f"NVIDIA GPUs needed: {needed}"}}
        else:
            found = table_1(words) if name == "table 1" else take(name, words)
        for test, check in found.items():
            was, now = before.get(test, check).get("commits"), check.get("commits")
            if was and was != now and "message" not in check:
                check["message"] = f"moved: {was} in {files[-1]}, now {now}"
            if "message" in check:
                print(f"{check['outcome'].upper()} {test}: {check['message']}", flush=True)
        checks |= found
        write_json(target, {"machine": here, "checks": checks})
    print(target)
    sys.exit(any(check["outcome"] == "failed" for check in checks.values()))


if __name__ == "__main__":
    command.run_command("verify", main)
