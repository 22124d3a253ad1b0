#!/bin/sh
# The rows fusion_of_mnli, head_on_mnli_again, full_12 and further_* of base_size.csv. DATA as in results/README.md.
set -e
MPNET=${MPNET:-sentence-transformers/all-mpnet-base-v2}
where="--model $MPNET --data-dir DATA"
how="--import examples.mpnet --max-length 128 --batch-size 16 --dtype bfloat16"
python train.py --stage adapter --task mnli $where $how --epochs 1 --lr 3e-4 --limit-train 10000 --limit-dev 2000 --out runs/mnli
for task in rte mrpc; do
  python -m experiments.composition --target $task --train-examples 400 --seeds 0 1 2 --test --sources runs/mnli $where \
    --systems fusion head_on_mnli full --fusion-options "--lr 5e-4 --epochs 4 --patience 4" \
    --head-options "--lr 1e-3 --epochs 8 --patience 4" --full-options "--lr 3e-5 --epochs 12 --patience 12" \
    --out runs/controls-$task -- $how
done
for lr in 5e-4 1e-4; do for task in rte mrpc; do for seed in 0 1 2; do
  out=runs/further-$lr-$task-$seed
  python train.py --stage further --task $task --adapters runs/mnli $where $how --import results.further --limit-train 400 \
    --seed $seed --lr $lr --epochs 4 --patience 4 --out $out
  python -m results.further $out
done; done; done
