#!/bin/sh
# The paper's central comparison on MiniLM: 8 tasks, 1,000 training examples, three options for each stage, chosen on 200 other
# training examples, which also choose the epoch; measured on all development examples. DATA as in results/README.md. Goes on.
set -e
test -d FEW || python results/cut.py DATA FEW 1000
python -m experiments.tables --model minilm --data-dir FEW --test DATA --out runs/central --seeds 0 1 2 --choose-seeds 5 \
  --tasks mnli qqp sst2 social_i_qa scitail mrpc rte cb \
  --systems head full st_a_16 multitask mt_a mt_a_top fusion_st_a fusion_mt_a fusion_mt_a_top \
  --head-options '--lr 5e-4 --epochs 10' '--lr 2e-3 --epochs 10' '--lr 8e-3 --epochs 10' \
  --full-options '--lr 2e-5 --epochs 10' '--lr 5e-5 --epochs 10' '--lr 1.5e-4 --epochs 10' \
  --adapter-options '--lr 3e-4 --epochs 20' '--lr 1e-3 --epochs 20' '--lr 3e-3 --epochs 20' \
  --multitask-options '--lr 2e-5 --epochs 10 --steps-per-epoch 500' '--lr 5e-5 --epochs 10 --steps-per-epoch 500' \
    '--lr 1.5e-4 --epochs 10 --steps-per-epoch 500' \
  --fusion-options '--lr 5e-5 --epochs 10' '--lr 3e-4 --epochs 10' '--lr 1e-3 --epochs 10' \
  -- --max-length 128 --batch-size 16 --dtype bfloat16
