#!/bin/sh
# The runs of rte_control.csv. DATA as in docs/results.md.
set -e
common="--task rte --model minilm --data-dir DATA --limit-train 1000 --max-length 64 --batch-size 16 --lr 5e-4"
for seed in 0 1 2; do
  python train.py --stage adapter $common --seed $seed --epochs 3 --out runs/rte-$seed
  python train.py --stage head $common --seed $seed --epochs 2 --adapters runs/rte-$seed --out runs/rte-head-$seed
  python train.py --stage fusion $common --seed $seed --epochs 2 --adapters runs/rte-$seed --out runs/rte-twice-$seed
done
