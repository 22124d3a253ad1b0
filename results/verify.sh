#!/bin/sh
# `make verify`, with a network: is what this project names on the hub as it was, do the GPU's tests pass on this machine, and
# what does BERT-base reach on three tasks? Estimated, not measured: half an hour on an H200, 30 hours on two CPU cores; downloads
# of 2 GB. Table 1 of the paper has for an adapter alone and for a fusion of the authors' 16: RTE 71.0 ± 1.6, 76.8 ± 1.7; MRPC
# 85.2 ± 0.5, 90.3 ± 0.8; CB 86.1 ± 3.9, 92.1 ± 1.0. The same command goes on.
out=runs/verify/$(git rev-parse --short HEAD)
HUB_TESTS=1 python -m pytest -q tests/test_hub.py --junit-xml=$out/hub.xml # which names the hub's commits
python -m pytest -q tests/test_reference.py tests/test_cuda_graphs.py tests/test_processes.py
unset ADAPTERFUSION_MODEL ADAPTERFUSION_DATA_DIR
for seed in 0 1 2; do for task in rte mrpc cb; do
  python train.py --stage adapter --task $task --seed $seed --resume --out $out/$task-$seed
  python train.py --stage fusion --adapters paper --task $task --seed $seed --resume --out $out/fusion-$task-$seed
done; done
python -c "
import glob, json, pandas
rows = pandas.DataFrame([json.load(open(path)) for path in glob.glob('$out/*/metrics.json')])
print(rows.groupby(['task', 'stage'])['accuracy'].agg(['mean', 'std', 'count']))"
