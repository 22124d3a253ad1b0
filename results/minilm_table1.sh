#!/bin/sh
# The runs of minilm_table1.csv, and minilm_figure3.png. DATA as in results/README.md.
set -e
python results/cut.py DATA CUT
python -m experiments.tables --model minilm --data-dir CUT --out runs/table1 --jobs 14 --seeds 0 1 2 \
    --tasks mnli qqp sst2 winogrande imdb hellaswag social_i_qa cosmos_qa scitail commonsense_qa boolq mrpc rte cb \
    --systems st_a_16 full fusion_st_a head \
    --adapter-options '--lr 5e-4 --epochs 8 --patience 2' --head-options '--lr 1e-3 --epochs 8 --patience 2' \
    --full-options '--lr 5e-5 --epochs 4' --fusion-options '--lr 5e-4 --epochs 4' -- --dtype bfloat16
for task in scitail boolq mrpc rte cb; do # minilm_control.csv
    python -m experiments.composition --model minilm --data-dir CUT --target $task --sources mnli --systems own fusion_of_own --seeds 0 1 2 \
        --adapter-options '--lr 5e-4 --epochs 8 --patience 2' --fusion-options '--lr 5e-4 --epochs 4' --out runs/control-$task -- --dtype bfloat16
done
