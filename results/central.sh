#!/bin/sh
# The paper's central comparison on MiniLM: 8 tasks, 500 training examples, which each seed draws from 1,000 (CB: all 208), three
# options for each stage. 200 (CB: 41) other training examples choose these, and the epoch; measured on all development
# examples. DATA as in results/README.md. The same command goes on.
set -e
test -d FEW || python results/cut.py DATA FEW 1000
python -m experiments.tables --model minilm --data-dir FEW --test DATA --out runs/central --seeds 0 1 2 --choose-seeds 5 \
  --jobs ${JOBS:-1} --tasks mnli qqp sst2 social_i_qa scitail mrpc rte cb \
  --systems head full st_a_16 fusion_st_a multitask mt_a mt_a_top fusion_mt_a \
  --head-options '--lr 5e-4 --epochs 10' '--lr 2e-3 --epochs 10' '--lr 8e-3 --epochs 10' \
  --full-options '--lr 2e-5 --epochs 8' '--lr 5e-5 --epochs 8' '--lr 1.5e-4 --epochs 8' \
  --adapter-options '--lr 3e-4 --epochs 15' '--lr 1e-3 --epochs 15' '--lr 3e-3 --epochs 15' \
  --multitask-options '--lr 2e-5 --epochs 6 --steps-per-epoch 250' '--lr 5e-5 --epochs 6 --steps-per-epoch 250' \
    '--lr 1.5e-4 --epochs 6 --steps-per-epoch 250' \
  --fusion-options '--lr 5e-5 --epochs 8' '--lr 3e-4 --epochs 8' '--lr 1e-3 --epochs 8' \
  -- --limit-train 500 --patience 3 --max-length 128 --batch-size 16 --dtype bfloat16
cp runs/central/results.csv results/central.csv
python -m results.central
python -m experiments.fusion_weights runs/central/runs/fusion_st_a-*-0 --out runs/central/weights  # Figures 4 and 6
cp runs/central/weights/weights.csv results/central_weights.csv
