#!/bin/sh
# The study of composition (section 1 of docs/results.md). Each command can be stopped; the same one goes on.
set -e
export OMP_NUM_THREADS=1

study() { # OUT EPOCHS, then options of experiments.composition
    out=$1 epochs=$2
    shift 2
    python -m experiments.composition --out "runs/$out" --model minilm --jobs 2 "$@" \
        --source-options '--epochs 4' --adapter-options '--lr 1e-3 --epochs 30' \
        --head-options "--lr 2e-3 --epochs $epochs --patience $epochs" \
        --full-options "--lr 5e-5 --epochs $epochs --patience $epochs" \
        --fusion-options "--lr 5e-4 --epochs $epochs --patience $epochs" \
        --multitask-options '--lr 5e-5 --epochs 4 --steps-per-epoch 200' \
        -- --max-length 40 --batch-size 16 --device cpu --dtype float32
}

python -m experiments.skills --out runs/two
python -m experiments.skills --skills match order spelling --out runs/three

# three skills
study composition-3 10 --target all --sources match order spelling --data-dir runs/three --train-examples 480 --seeds 0 1 \
    --systems own head_on_match head_on_order head_on_spelling fusion fusion_with_own

# two skills, all systems; the third is the irrelevant source
study composition-2 10 --target both --sources match order --irrelevant runs/composition-3/runs/source-spelling \
    --data-dir runs/two --train-examples 240 --seeds 0 1 2 3 4

# fewer and more examples, about as many steps
for size in '120 20' '960 5' '60 40'; do
    study "composition-${size% *}" "${size#* }" --target both --train-examples "${size% *}" --data-dir runs/two --seeds 0 \
        --sources runs/composition-2/runs/source-match runs/composition-2/runs/source-order \
        --systems own head_on_source-order fusion
done

# the reference library over the same adapters, then the rows and the figure
.venv-peer/bin/python results/reference_fusion.py --data runs/two/both --seeds 0 1 2 3 4 --out runs/reference.csv \
    --adapters runs/composition-2/runs/source-match runs/composition-2/runs/source-order \
    --model "$(python -c 'from formats.encoder import find_minilm; print(find_minilm())')"
python results/composition_figure.py runs
