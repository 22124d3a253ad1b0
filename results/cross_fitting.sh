#!/bin/sh
# The rows of cross_fitting.csv (section 1 of docs/results.md): what to do about the own adapter, on the target of two
# skills. The sources are trained anew. The command can be stopped; the same one goes on.
set -e
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python=${PYTHON:-python}
test -d runs/two || $python -m experiments.skills --out runs/two
$python -m experiments.composition --out runs/cross --model minilm --jobs 2 --data-dir runs/two \
    --target both --sources match order --train-examples 240 --seeds 0 1 2 \
    --systems own fusion fusion_with_own fusion_half fusion_half_control cross \
    --source-options '--epochs 4' --adapter-options '--lr 1e-3 --epochs 30' \
    --fusion-options '--lr 5e-4 --epochs 10 --patience 10' \
    -- --max-length 40 --batch-size 16 --device cpu --dtype float32
cp runs/cross/composition.csv results/cross_fitting.csv
