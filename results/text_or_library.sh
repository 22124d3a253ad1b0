#!/bin/sh
# The runs of text_or_library.csv, after those of composition.sh, whose target, adapters and settings they have.
set -e
export OMP_NUM_THREADS=1
study=runs/composition-2/runs

fusion() { # NAME, then options of train.py
    name=$1
    shift
    for seed in 0 1 2; do
        python train.py --stage fusion --task both --data-dir runs/two --limit-train 240 --model minilm --max-length 40 \
            --batch-size 16 --device cpu --dtype float32 --lr 5e-4 --epochs 10 --patience 10 --seed $seed \
            --import results.text_or_library --out "runs/variants/$name-$seed" --resume "$@"
    done
}

all="$study/source-match $study/source-order"
# the trained fusions without their last layer; their adapters are what later runs take for two adapters without it
for seed in 0 1 2; do
    out=runs/variants/pruned-$seed
    [ -d $out ] || python -m experiments.prune $study/fusion-240-$seed --leave-out 6 --out $out
done
fewer="runs/variants/pruned-0/adapters/match runs/variants/pruned-0/adapters/order"

fusion query_f --adapters $all --fusion query_f
fusion random_v --adapters $all --fusion random_v
fusion without_last --adapters $fewer
fusion mean --adapters $all --head mean
fusion without_last_mean --adapters $fewer --head mean
fusion random_v_larger --adapters $all --fusion random_v --fusion-config std=0.01

python -m results.text_or_library runs
