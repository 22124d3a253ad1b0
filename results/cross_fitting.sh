#!/bin/sh
# The rows of cross_fitting*.csv (section 1 of docs/results.md): what to do about the own adapter, on the target of two
# skills. The sources are trained anew. The command can be stopped; the same one goes on.
set -e
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python=${PYTHON:-python}
test -f runs/two/both/validation.jsonl || $python -m experiments.skills --out runs/two
run() { # TABLE OUT OWN_EPOCHS LR SYSTEM ...
    table=$1 out=$2 own_epochs=$3 lr=$4 && shift 4
    $python -m experiments.composition --out "$out" --model minilm --jobs 2 --data-dir runs/two \
        --target both --sources match order --train-examples 240 --seeds 0 1 2 --systems "$@" \
        --source-options '--epochs 4' --adapter-options "--lr 1e-3 --epochs $own_epochs" \
        --fusion-options "--lr $lr --epochs 10 --patience 10" \
        -- --max-length 40 --batch-size 16 --device cpu --dtype float32
    cp "$out/composition.csv" "results/$table.csv"
}
keep() { # OUT RUN ...: copies these from runs/cross, so that the next command does not train them again
    out=$1 && shift && mkdir -p "$out/runs"
    for name in "$@"; do
        new=$out/runs/$name
        test -e "$new" || { cp -r "runs/cross/runs/$name" "$new.part" && mv "$new.part" "$new"; }
    done
}
run cross_fitting runs/cross 30 5e-4 own fusion fusion_with_own fusion_half fusion_half_control cross
keep runs/cross-low-lr source-match source-order own-240-0 own-240-1 own-240-2
run cross_fitting_low_lr runs/cross-low-lr 30 5e-5 fusion_with_own # the paper's learning rate
keep runs/cross-short-own source-match source-order
run cross_fitting_short_own runs/cross-short-own 5 5e-4 own fusion_with_own # an own adapter that knows the examples less well
