#!/bin/sh
# The runs of full.csv with seed 0. MINILM and DATA as in docs/results.md. For seeds 1 and 2: the lines from cb's adapter on,
# with --seed N and an --out of their own.
set -e
common="--model MINILM --data-dir DATA --dtype bfloat16 --batch-size 32 --lr 5e-4"
python train.py $common --stage adapter --task mnli --epochs 5 --patience 2 --limit-dev 1000
python train.py $common --stage adapter --task qqp --epochs 4 --patience 1 --limit-dev 1000
python train.py $common --stage adapter --task social_i_qa --epochs 2 --patience 1 --limit-dev 1000
python train.py $common --stage adapter --task imdb --epochs 2 --limit-dev 1000
python train.py $common --stage adapter --task boolq --epochs 3 --limit-dev 1000
python train.py $common --stage adapter --task sst2 --epochs 1 --limit-dev 1000
python train.py $common --stage adapter --task cb --epochs 15 --patience 3
for task in scitail mrpc rte; do python train.py $common --stage adapter --task $task --epochs 8 --patience 2; done
A="runs/mnli runs/qqp runs/sst2 runs/imdb runs/boolq runs/scitail runs/mrpc runs/rte runs/cb runs/social_i_qa"
python train.py $common --stage fusion --task cb --epochs 10 --patience 3 --adapters $A
for task in scitail mrpc rte; do python train.py $common --stage fusion --task $task --epochs 5 --patience 2 --adapters $A; done
