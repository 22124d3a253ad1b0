#!/bin/sh
# Every way to compose on the targets of experiments/skills.py (MiniLM): both skills, of two adapters
# and of eight, and the skill that the text asks for. Rates are chosen with seeds 5 and 6; sources are
# trained with each seed. What is interrupted goes on by the same call. `sh results/composing.sh
# "fusion mean sum"`: these systems alone.
set -e
out=runs/composing
all="fusion mean sum gates scalearn scaled router top_one scalearn_uniform average soup joint own head_on_order"
python -m results.composing $out/data
study() {
    name=$1 sources=$2
    shift 2
    python -m experiments.composition --import results.composing --model minilm --data-dir $out/data \
        --out $out/$name --sources $sources --seeds 0 1 2 3 4 --choose-seeds 5 6 --paired --jobs ${JOBS:-2} \
        --source-options '--lr 1e-3 --epochs 2' --adapter-options '--lr 5e-4 --epochs 8' '--lr 2e-3 --epochs 8' \
        --head-options '--lr 5e-4 --epochs 6' '--lr 2e-3 --epochs 6' \
        --soup-options '--lr 5e-4 --epochs 6' '--lr 2e-3 --epochs 6' \
        --joint-options '--lr 1e-4 --epochs 6' '--lr 5e-4 --epochs 6' \
        --fusion-options '--lr 5e-4 --epochs 6' '--lr 2e-3 --epochs 6' "$@" -- --max-length 40 --batch-size 16
    test "$systems" != "$all" || cp $out/$name/composition.csv results/composing_$name.csv
}
systems=${1:-$all}
study eight "match order long the of two_words vowel plural" --target both --train-examples 240 --systems $systems
study two "match order" --target both --train-examples 240 --systems $systems
study asked "match order" --target asked --systems $systems
if test "$systems" = "$all"; then python -m results.composing; fi  # composing.png
