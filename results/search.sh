#!/bin/sh
# The rows of search_sst2 and search_scitail. DATA as in results/README.md.
set -e
search="python -m experiments.architecture_search --model minilm --data-dir DATA --jobs 2"
$search --tasks sst2 --out runs/search-sst2 --adapter-options '--lr 5e-4' --full-options '--lr 5e-5' \
    -- --limit-train 2000 --epochs 2 --batch-size 16 --max-length 64 --dtype bfloat16
$search --tasks scitail --out runs/search-scitail --adapter-options '--lr 5e-4' --full-options '--lr 5e-5' \
    -- --limit-train 1000 --limit-dev 500 --epochs 2 --batch-size 16 --max-length 64 --dtype bfloat16
