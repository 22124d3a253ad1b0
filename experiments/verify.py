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
from hashlib import sha256
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import torch

from experiments import report
from formats.files import read_json, write_json
from runtime import command
from runtime.record import machine

RESULTS, GPUS = Path("results/verified"), torch.cuda.device_count()
HERE = machine(torch.device("cuda" if GPUS else "cpu"))
COMMIT = str(HERE["commit"])[:7]
OUT = Path("runs/verify", COMMIT)  # of this code alone
PLAN = """Estimated from docs/benchmarks.md, not measured: training takes half an hour on an H200,
30 hours on two CPU cores; then tests, and downloads of 2 GB to HF_HOME (BERT-base, RoBERTa-base, 32
adapters of the authors, 15 tasks). Not checked: UKP's arguments, which are not on the hub; the rest
of Table 1; the reference library, but for recorded outputs (make test-peers). Steps, in order:"""
STEPS = {  # {name: what stands behind python -m}
    "reference": "pytest tests/test_reference.py",
    "hub": "pytest tests/test_hub.py",
    "gpu": "pytest tests/test_cuda_graphs.py tests/test_processes.py::test_a_gpu",
}
TASKS, SYSTEMS = ("rte", "mrpc", "cb"), {"st_a_16": "adapter", "fusion_st_a": "fusion"}  # Table 1
for seed, task, system in [(i, task, s) for i in range(3) for task in TASKS for s in SYSTEMS]:
    words = f"train --stage {SYSTEMS[system]} --task {task} --seed {seed}"
    STEPS[f"{system}-{task}-{seed}"] = words + " --adapters paper" * (system == "fusion_st_a")
STEPS["two-gpus"] = f"torch.distributed.run --nproc_per_node=2 -m {STEPS['st_a_16-cb-0']}"
STEPS |= {f"{name}-again": STEPS[name] for name in ("st_a_16-cb-0", "two-gpus")}  # the same bits


def tests(name, words):
    """{test: its check}, with the commits of the hub that it has seen"""
    words, found = f"{words} -q --tb=no --junit-xml={OUT}/{name}.xml -o junit_family=xunit1", {}
    words = [sys.executable, "-m", *words.split()]
    done = subprocess.run(words, env=os.environ | {"HUB_TESTS": "1"} if name == "hub" else None)
    if done.returncode not in (0, 1):
        return {name: {"outcome": "failed", "message": f"pytest: exit status {done.returncode}"}}
    for case in ElementTree.parse(OUT / f"{name}.xml").iter("testcase"):
        commits = {p.get("name"): p.get("value") for p in case.iter("property")}
        check = found[f"{name}: {case.get('name')}"] = {"outcome": "passed", "commits": commits}
        for problem in (part for part in case if part.tag in ("failure", "error", "skipped")):
            check["outcome"] = "not checked" if problem.tag == "skipped" else "failed"
            check["message"] = " ".join(problem.get("message").split())[:300]
    return found


def training(name, words):
    """{name: what the last line of a run says, and the SHA-256 of its tensors}"""
    print(f"{name}: its epochs are in {OUT / name}/log.jsonl", flush=True)
    words = [sys.executable, "-m", *words.split(), "--out", str(OUT / name), "--resume"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        return {name: {"outcome": "failed", "message": done.stderr[-300:].strip()}}
    bits = [sha256(f.read_bytes()).hexdigest() for f in sorted((OUT / name).glob("*.safetensors"))]
    found = json.loads(done.stdout.splitlines()[-1]) | {"outcome": "passed", "bits": bits}
    return {name: found | {"machine": read_json(OUT / name / "run.json")["machine"]}}


def main(argv=None):
    parser = command.Parser("python -m experiments.verify", description=__doc__)
    parser.add_argument("--plan", action="store_true", help="say what it does, and do nothing")
    is_plan = parser.parse_args(argv).plan
    print(PLAN, *(f"  {name}: {words}" for name, words in STEPS.items()), sep="\n", flush=True)
    if is_plan:
        return
    for name in ("ADAPTERFUSION_MODEL", "ADAPTERFUSION_DATA_DIR"):  # it is about the hub's
        os.environ.pop(name, None)
    files = sorted(RESULTS.glob("*.json"))
    before = read_json(files[-1])["checks"] if files else {}
    target, checks = RESULTS / f"{date.today()}-{COMMIT}.json", {}
    for name, words in STEPS.items():
        if GPUS < (needed := {"gpu": 1, "two": 2}.get(name.split("-")[0], 0)):
            found = {name: {"outcome": "not checked", "message": f"NVIDIA GPUs needed: {needed}"}}
        else:
            found = (tests if words.startswith("pytest") else training)(name, words)
        for test, check in found.items():
            first = checks.get(name.removesuffix("-again"), check)
            if "bits" in check and check["bits"] != first.get("bits"):
                check |= {"outcome": "failed", "message": "the first run ended in other bits"}
            was, now = before.get(test, check).get("commits"), check.get("commits")
            if was and was != now and "message" not in check:
                check["message"] = f"moved: {was} in {files[-1]}, now {now}"
        checks |= found
        write_json(target, {"machine": HERE, "checks": checks})
    for name, check in checks.items():
        if "message" in check:
            print(f"{check['outcome'].upper()} {name}: {check['message']}")
    paper = pd.read_csv("experiments/paper_results.csv").set_index(["encoder", "task"])
    rows = [[task] for task in TASKS]
    for row, system in [(row, system) for row in rows for system in SYSTEMS]:
        runs = [checks.get(f"{system}-{row[0]}-{i}", {}).get("accuracy") for i in range(3)]
        ours = report.with_deviation(100 * pd.Series(runs, dtype=float).dropna())
        row += [ours, paper[system]["bert-base-uncased", row[0]]]
    print(report.markdown(rows, ["", "ST-A", "Table 1", "fusion of the 16", "Table 1"]), target)
    sys.exit(any(check["outcome"] == "failed" for check in checks.values()))


if __name__ == "__main__":
    command.run_command("verify", main)
