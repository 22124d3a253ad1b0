#!/bin/sh
# The runs of cross_fitting.csv: cross-fitting on the target of two skills, in the directory of composition.sh, whose
# data and sources they take; so far the file has seed 0 alone. The same command again goes on where it was stopped.
export OMP_NUM_THREADS=1
common="--task both --model minilm --data-dir runs/two --limit-train 240 --max-length 40 --batch-size 16 --device cpu --dtype float32 --resume"
sources="runs/composition-2/runs/source-match runs/composition-2/runs/source-order"

for seed in 0 1 2; do
    for half in 0 1; do
        python examples/cross_fitting.py --stage adapter $common --seed $seed --half $half \
            --lr 1e-3 --epochs 30 --out runs/cross/own-$seed-half-$half
    done
    python examples/cross_fitting.py --stage fusion $common --seed $seed --lr 5e-4 --epochs 10 --patience 10 \
        --adapters $sources runs/cross/own-$seed-half-0 runs/cross/own-$seed-half-1 --out runs/cross/fusion-$seed
done
