#!/bin/sh
# The single runs of by_hand.csv, one seed each. MINILM and DATA as in docs/results.md.
set -e
common="--model MINILM --data-dir DATA --dtype bfloat16 --lr 5e-4"
python train.py $common --stage adapter --task mnli --epochs 4
python train.py $common --stage adapter --task qqp --epochs 4 --limit-train 8000
python train.py $common --stage adapter --task sst2 --epochs 3 --limit-train 10000
python train.py $common --stage adapter --task mrpc --epochs 6
python train.py $common --stage adapter --task rte --epochs 8 --max-length 128
python train.py $common --stage adapter --task cb --epochs 20 --patience 20 --max-length 128
python train.py $common --stage adapter --task scitail --epochs 20 --limit-train 200 --out runs/scitail-200
A="runs/mnli runs/qqp runs/sst2 runs/mrpc runs/rte runs/cb"
python train.py $common --stage fusion --task rte --epochs 6 --max-length 128 --adapters $A
python train.py $common --stage fusion --task cb --epochs 20 --patience 20 --max-length 128 --adapters $A
python train.py $common --stage fusion --task scitail --epochs 20 --limit-train 200 --adapters $A runs/scitail-200 \
    --out runs/fusion-scitail-200
python train.py $common --stage adapter --task social_i_qa --limit-train 6000 --epochs 3
